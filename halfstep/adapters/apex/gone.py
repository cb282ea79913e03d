"""What scripts from before `amp.initialize` import from apex, and the one error that says what to use instead."""

from __future__ import annotations

import re
from typing import Any

from halfstep.pages import MIGRATION, more

__all__ = ["multi_tensor_applier", "to_python_float"]  # what scripts with amp.initialize import along with it

MODULES = (
    "apex.fp16_utils", "apex.fp16_utils.fp16util", "apex.fp16_utils.fp16_optimizer", "apex.fp16_utils.loss_scaler",
    "apex.multi_tensor_apply", "apex.multi_tensor_apply.multi_tensor_apply", "apex.parallel.LARC",
)  # fmt: skip

_NAMES = re.compile(
    "init|fp16_utils|multi_tensor_apply|MultiTensorApply|LARC|FP16_Optimizer|FP16Model|(Dynamic)?LossScaler|tofp16|"
    "BN_convert_float|convert_(module|network)|network_to_half|prep_param_lists|"
    "master_params_to_model_params|model_grads_to_master_grads"
)


def refuse(module: str, name: str) -> Any:
    """The `__getattr__` of a module: an ImportError for a name that apex had, else an AttributeError."""
    if not _NAMES.fullmatch(name):  # what looks through all modules for a name expects this error
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(
        f"{module}.{name} is not in halfstep's stand-in for apex, which has amp (from amp.initialize on), parallel, "
        "optimizers and normalization. halfstep.initialize(model, optimizer) replaces it: pass the fp32 model and the "
        f"ordinary optimizer; it keeps the fp32 masters, scales and unscales, and skips steps ({more(MIGRATION)})"
    )


def multi_tensor_applier(*args: Any) -> Any:
    """Raises an ImportError; scripts that only import it run."""
    return refuse("apex", "multi_tensor_apply")


def to_python_float(t: Any) -> float:
    """Returns a number, or the first element of a tensor or list, as a float; waits for the device."""
    return float(t.item() if hasattr(t, "item") else t[0])
