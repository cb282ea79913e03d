"""Provides `enable_mixed_precision_graph_rewrite`, known from TensorFlow 1 and 2.3, for Keras 3; it sets a plan."""

from __future__ import annotations

from halfstep.adapters.keras.backend import backend
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
    """Makes models built from now on compute in fp16 with fp32 variables; returns a LossScaleOptimizer of `optimizer`.

    Does the same as `set_plan(level("O1", "fp16"))` and `LossScaleOptimizer(optimizer)`. On TensorFlow, graphs without
    Keras layers are rewritten too, if TensorFlow has a rewrite for the device. Models in `others` are not affected.

    Raises:
        SetupError: a model that is not in `others` is already built, or the optimizer is already built, scales the loss
            itself, or is not a Keras optimizer.
        PlanError: a global policy is already set, or `loss_scale` is not valid.
    """
    plan = customize(level("O1", "fp16"), loss_scale=loss_scale)
    wrapped = LossScaleOptimizer(optimizer, plan.scale)
    if optimizer.built:
        raise SetupError(
            f"optimizer {optimizer.name!r} is already built for a model; switch mixed precision on before making the "
            "model, with a new optimizer"
        )
    built = built_models(others)
    if built:
        raise SetupError(
            f"models that are already built would keep their policies: {', '.join(built[:3])}; call "
            "enable_mixed_precision_graph_rewrite before making the model, or use apply_plan(model, level('O1', "
            "'fp16')) and LossScaleOptimizer(optimizer). To let a model keep its policies, pass others=(model,)"
        )
    set_plan(plan, others=others)
    backend().rewrite_graphs()
    return wrapped
