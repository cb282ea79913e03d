"""Keras itself, and what is said where it, or the backend that it is to use, is not installed."""

from __future__ import annotations

from halfstep.adapters.versions import check_version

try:
    import keras
except ImportError as error:
    missing = (error.name or "keras").partition(".")[0]
    raise ImportError(
        "halfstep.adapters.keras needs keras; run: pip install 'halfstep[keras]'"
        if missing == "keras"
        else f"Keras is to run on {missing}, which is not installed; run: pip install {missing}, or choose a backend "
        "that is installed before the import of keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error
except ValueError as error:  # of a name that no backend has
    raise ImportError(
        f"{error}; choose tensorflow, jax or torch before the import of keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error

FIRST, BELOW = "3.15", "3.16"
check_version("keras", keras.__version__, first=FIRST, below=BELOW)

BACKEND: str = keras.backend.backend()

__all__ = ["BACKEND", "keras"]
