"""halfstep inside Keras 3, on the TensorFlow, JAX and torch backends; needs the extra [keras].

A plan becomes Keras dtype policies, its loss scale becomes a wrapper around the optimizer, and the run log a callback.
"""

from halfstep.adapters.keras.find import find_broken
from halfstep.adapters.keras.global_policy import policy_map, set_plan
from halfstep.adapters.keras.log import KeepStatistics, LogCallback, StepLog
from halfstep.adapters.keras.modules import as_modules
from halfstep.adapters.keras.policies import apply_plan, describe
from halfstep.adapters.keras.scale import LossScaleOptimizer, enable_mixed_precision_graph_rewrite

__all__ = [
    "KeepStatistics", "LogCallback", "LossScaleOptimizer", "StepLog", "apply_plan", "as_modules", "describe",
    "enable_mixed_precision_graph_rewrite", "find_broken", "policy_map", "set_plan",
]  # fmt: skip
