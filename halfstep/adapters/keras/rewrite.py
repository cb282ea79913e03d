"""The one line of TensorFlow 1 and 2.3 that switched mixed precision on, by today's means."""

from __future__ import annotations

from halfstep.adapters.keras.backend import rewrite_graphs
from halfstep.adapters.keras.global_policy import built_models, set_plan
from halfstep.adapters.keras.installed import keras
from halfstep.adapters.keras.scale import LossScaleOptimizer
from halfstep.edits import Scaling
from halfstep.errors import SetupError
from halfstep.plan.levels import customize, level


def enable_mixed_precision_graph_rewrite(
    optimizer: keras.optimizers.Optimizer,
    loss_scale: str | float | Scaling = "dynamic",
    *,
    others: tuple[keras.Model, ...] = (),
) -> LossScaleOptimizer:
    """Makes models that are built from now on compute in fp16 with fp32 variables, and returns the optimizer wrapped.

    It is `set_plan(level("O1", "fp16"))` and `LossScaleOptimizer`. On TensorFlow graphs without Keras's layers are
    rewritten too, where TensorFlow has a rewrite for the device. `others` are models that stay as they are.

    Raises:
        SetupError: a model was built before, which keeps its policy, or the optimizer was used, scales or is none.
        PlanError: a global policy is set already, or `loss_scale` stands for none.
    """
    plan = customize(level("O1", "fp16"), loss_scale=loss_scale)
    wrapped = LossScaleOptimizer(optimizer, plan.scale)
    if optimizer.built:
        raise SetupError(
            f"{optimizer.name!r} was built for a model already; switch mixed precision on before the model is made, "
            "with a new optimizer"
        )
    built = built_models(others)
    if built:
        raise SetupError(
            f"{', '.join(built[:3])} is built already and would stay as it is; call "
            "enable_mixed_precision_graph_rewrite before the model is made, or for this one apply_plan(model, "
            "level('O1', 'fp16')) and LossScaleOptimizer(optimizer); name models that are to stay so: others=(model,)"
        )
    set_plan(plan, others=others)
    rewrite_graphs()
    return wrapped
