"""The loss scale in Keras: an optimizer that wraps another and adapts its scale as halfstep does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import mul
from threading import local
from typing import Any

from halfstep.adapters.keras.backend import backend, keras
from halfstep.adapters.keras.global_policy import built_models, set_plan, tell_unseen_rules
from halfstep.edits import Scaling
from halfstep.errors import SetupError
from halfstep.plan.levels import as_scaling, customize, level
from halfstep.train.scale.scaling import next_state

ops = keras.ops
_AS_KERAS = Scaling("dynamic", init=2.0**15)  # its first scale is half that of plans


@keras.saving.register_keras_serializable(package="halfstep")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps an optimizer: scales the loss, and skips steps whose gradients are not finite.

    `scaling` is a Scaling, "dynamic", a number, or "none"; by default it begins where Keras's own does. With "none" the
    loss is not scaled, but steps are still skipped. Pass this optimizer to `model.compile(optimizer=...)`; `fit` does
    the rest. A custom loop calls `scale_loss`, computes gradients, and calls `apply`. To read or change unscaled
    gradients, it calls `unscale` and `apply_unscaled` instead of `apply`. The scale and its counters are variables of
    the optimizer, saved and loaded with it. Under a strategy with several replicas, all replicas skip a step that
    overflowed in any of them.

    Raises:
        SetupError: `inner_optimizer` is not a Keras optimizer, or scales the loss itself.
        PlanError: `scaling` is not a valid loss scale.
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        scaling: Scaling | str | float = _AS_KERAS,
        *,
        name: str | None = None,
    ) -> None:
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise SetupError(
                f"optimizer {inner_optimizer.name!r} already scales the loss; pass the optimizer that it wraps: "
                "LossScaleOptimizer(optimizer.inner_optimizer)"
            )
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise SetupError(
                f"{inner_optimizer!r:.80} is not a Keras optimizer; pass one, such as keras.optimizers.Adam(1e-3)"
            )
        scaling = as_scaling(scaling)
        super().__init__(inner_optimizer, scaling.first, scaling.growth_interval, name=name)
        self.scaling = scaling
        self._seen = local()  # what `unscale` has found; each replica runs in a thread

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the variables of this optimizer and of the wrapped one; `var_list` are the weights to train."""
        super().build(var_list)
        counter = {"shape": (), "dtype": "int", "aggregation": "none"}
        hysteresis = keras.initializers.Constant(self.scaling.hysteresis)
        self.overflows_left = self.add_variable(initializer=hysteresis, name="overflows_left", **counter)
        self.skipped = self.add_variable(initializer="zeros", name="skipped", **counter)
        self.grad_norm = self.add_variable((), "zeros", "float32", aggregation="none", name="grad_norm")
        tell_unseen_rules(var_list)

    def unscale(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> list[Any]:
        """Returns the gradients of a scaled loss divided by the scale; None stays None.

        Pass the variables if they are not all that the optimizer trains. What overwrites a variable of a float8 layer
        (`overwrite_with_gradient`) is no gradient, and stays as it is.
        """
        self._check_built()
        self._seen.found = ops.logical_or(self._found(grads), getattr(self._seen, "found", False))
        return self._divided(grads, trainable_variables)

    def _divided(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
        scale, own = self.dynamic_scale, self._overwrites(grads, variables)
        return [g if g is None or new else ops.divide(g, scale) for g, new in zip(grads, own, strict=True)]

    def _norm(self, true: Sequence[Any], variables: Sequence[Any] | None) -> Any:
        overwrites = self._overwrites(true, variables)
        summed = backend().summed([g for g, new in zip(true, overwrites, strict=True) if not new])
        return ops.sqrt(sum(ops.sum(ops.square(ops.cast(g, "float32"))) for g in summed))

    def _overwrites(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> list[bool]:
        """Returns for each gradient whether it is the new value of its variable, as of the scales of float8 layers."""
        variables = list(variables or self._trainable_variables)
        if len(variables) != len(grads):  # of some variables, which the caller did not pass
            return [False] * len(grads)
        return [bool(self._overwrite_variable_with_gradient(variable)) for variable in variables]

    def _found(self, grads: Sequence[Any]) -> Any:
        return ops.logical_not(self.check_finite(grads))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Applies the gradients of a scaled loss, or skips the step if one is not finite; adapts the scale."""
        self._build_for(trainable_variables)
        self._apply(self._found(grads), self._divided(grads, trainable_variables), trainable_variables)

    def apply_unscaled(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Applies gradients that `unscale` returned, or skips the step if there was an overflow; adapts the scale.

        An overflow that `unscale` found skips the step even if clipping has removed it since. For this to work, call
        both methods in the same compiled function.
        """
        self._build_for(trainable_variables)
        found = ops.logical_or(self._found(grads), getattr(self._seen, "found", False))
        self._apply(found, grads, trainable_variables)

    def _build_for(self, variables: Sequence[Any] | None) -> None:
        if self.built:
            return
        if variables is None:
            raise ValueError(f"{self.name} is not built; pass the variables too: apply(gradients, variables)")
        with keras.name_scope(self.name):
            self.build(list(variables))

    def _apply(self, found: Any, true: Sequence[Any], variables: Sequence[Any] | None) -> None:
        vars(self._seen).clear()
        norm = self._norm(true, variables)
        variables = list(variables or self._trainable_variables)
        backend().apply_where_finite(self, found, true, norm, variables)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the weights and the optimizer's variables after a step on the gradients of a scaled loss."""
        with self._holding(optimizer_variables) as scope:
            found, true = self._found(grads), self._divided(grads, None)  # the variables passed are values
            self.adapt(found, self._norm(true, None))
            own = [scope.get_current_value(v) for v in self._variables]
        inner = list(optimizer_variables[len(own) :])
        weights, inner = ops.cond(
            found,
            lambda: (list(trainable_variables), inner),
            lambda: self.inner_optimizer.stateless_apply(inner, true, trainable_variables),
        )
        return list(weights), [*own, *inner]

    def stateless_scale_loss(self, optimizer_variables: Sequence[Any], loss: Any) -> Any:
        """Returns the loss times the scale in `optimizer_variables`."""
        with self._holding(optimizer_variables):
            return self.scale_loss(loss)

    def _check_built(self) -> None:
        if not self.built:
            raise ValueError(f"{self.name} is not built; call optimizer.build(model.trainable_variables) first")

    def _holding(self, optimizer_variables: Sequence[Any]) -> Any:
        self._check_built()
        return keras.StatelessScope(state_mapping=list(zip(self.variables, optimizer_variables, strict=True)))

    def adapt(self, found: Any, norm: Any) -> None:
        """Updates scale and counters after a step that overflowed if `found`, with unscaled gradients of this norm."""
        self.grad_norm.assign(norm)
        self.skipped.assign_add(ops.cast(found, self.skipped.dtype))
        if not self.scaling.adapts:
            return
        variables = (self.dynamic_scale, self.step_counter, self.overflows_left)
        scale, clean, left = (ops.convert_to_tensor(v) for v in variables)
        scale, clean, left = next_state(scale, clean, left, found, self.scaling, select=ops.where, times=mul)
        scale = ops.clip(scale, self.scaling.min, self.scaling.max)
        for variable, value in zip(variables, (scale, clean, left), strict=True):
            variable.assign(ops.cast(value, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        del config["initial_scale"], config["dynamic_growth_steps"]
        return config | {"scaling": asdict(self.scaling)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LossScaleOptimizer:
        made: LossScaleOptimizer = super().from_config(
            config | {"scaling": Scaling(**config["scaling"])}, custom_objects
        )
        return made


# Known from TensorFlow 1 and 2.3, for Keras 3; it sets a plan.
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
