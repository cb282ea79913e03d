"""Imports Keras; if Keras or its backend is not installed, the error says what to install."""

from __future__ import annotations

from halfstep.adapters.versions import check_version

try:
    import keras
except ImportError as error:
    missing = (error.name or "keras").partition(".")[0]
    raise ImportError(
        "halfstep.adapters.keras needs keras; run: pip install 'halfstep[keras]'"
        if missing == "keras"
        else f"Keras is set to run on {missing}, which is not installed; run: pip install {missing}, or choose an "
        "installed backend before importing keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error
except ValueError as error:  # of a name that no backend has
    raise ImportError(
        f"{error}; choose tensorflow, jax or torch before importing keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error

FIRST, BELOW = "3.15", "3.16"
check_version("keras", keras.__version__, first=FIRST, below=BELOW)

BACKEND: str = keras.backend.backend()
if BACKEND not in ("tensorflow", "jax", "torch"):
    raise ImportError(
        f"halfstep supports the Keras backends tensorflow, jax and torch, not {BACKEND}; choose one before importing "
        "keras: os.environ['KERAS_BACKEND'] = 'jax'"
    )

__all__ = ["BACKEND", "keras"]
