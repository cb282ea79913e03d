"""`apex.fp16_utils.FP16_Optimizer`: fp32 masters and a loss scale for the optimizer of a network cast by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from halfstep.adapters.apex.loss_scaler import dynamic_scaling
from halfstep.edits import FULL, Rule, Scaling
from halfstep.errors import SetupError, StateError
from halfstep.machine import read_facts
from halfstep.optim.masters import is_low
from halfstep.plan.compatibility import first_device
from halfstep.plan.levels import customize, level
from halfstep.records import StepRecord
from halfstep.session.decide import decide
from halfstep.session.session import Session

__all__ = ["FP16_Optimizer"]

_ENTRIES = ("optimizer_state_dict", "fp32_from_fp16", "session")


class FP16_Optimizer:  # apex's name
    """Wraps the optimizer of a network that was cast to fp16 or bf16, and adds fp32 masters and a loss scale.

    It opens a halfstep session over the optimizer's parameters. The low-precision parameters must be all fp16 or all
    bf16. Each of them gets an fp32 master, which starts with the parameter's value. Parameters in fp32 get no master.
    After `backward`, the gradients of all parameters are unscaled and in fp32. The forward pass runs in the formats to
    which the network was cast, for example by `FP16Model`. With `verbose` a message is printed for each skipped step;
    for this, every step waits for the device.

    Unlike in apex, steps with non-finite gradients are skipped under a static scale too, `state_dict` allows an exact
    resume, and closures work.

    Raises:
        SetupError: the parameters are a mix of fp16 and bf16, `init_optimizer` is not an optimizer, or
            `dynamic_loss_args` has an unknown name or is passed without `dynamic_loss_scale=True`.
        PlanError: an argument of the loss scale is out of range.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, Optimizer):
            raise SetupError(f"FP16_Optimizer got {type(init_optimizer).__name__}; pass a torch optimizer")
        if dynamic_loss_args is not None and not dynamic_loss_scale:
            raise SetupError(
                "FP16_Optimizer got dynamic_loss_args, but the loss scale is static; pass dynamic_loss_scale=True too, "
                "or leave dynamic_loss_args out"
            )
        scaling = (
            _from_arguments(dynamic_loss_args or {})
            if dynamic_loss_scale
            else Scaling("static", init=static_loss_scale)
        )
        self.optimizer = init_optimizer
        self.verbose = verbose
        self._skipped: Tensor | None = None
        params = [p for group in init_optimizer.param_groups for p in group["params"]]
        self._low = [p for p in params if is_low(p)]
        self._dtype = _only_dtype(self._low)
        self._held = nn.ModuleDict(
            {
                "low": nn.ParameterList(self._low),
                "full": nn.ParameterList([p for p in params if not is_low(p)]),
            }
        )
        rules = [Rule("full", FULL)] if self._low and len(self._low) < len(params) else []
        plan = customize(level("O2" if self._low else "O1", self._dtype), loss_scale=scaling, rules=rules)
        decision = decide(
            [self._held],
            [init_optimizer],
            plan,
            emulate=False,  # the network is not run by this session
            stepping="optimizer",
            facts=read_facts(first_device([self._held])),
            already_low=self._low,
        )
        self._session = Session(decision, sinks=[self._after_step])

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward pass; waits for the device."""
        return float(self._session.runtime.scales.of(0).value)

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped; waits for the device."""
        return self._skipped is not None and bool(self._skipped)

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's param groups, which hold the network's own parameters."""
        return self.optimizer.param_groups

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # apex's name
        """Sets the gradients to zero, or with `set_grads_to_None` to None."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Runs the backward pass of the scaled loss, and unscales the gradients.

        With `update_master_grads=False` the gradients stay scaled until `update_master_grads()`, so that further
        backward passes can add to them.
        """
        loss = loss.float()
        with self._session.scaling(loss, unscale=update_master_grads) as scale:
            (loss * scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def update_master_grads(self) -> None:
        """Unscales the gradients that earlier backward passes left scaled."""
        self._session.unscale_()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]]:
        """Returns the unscaled gradients as one list per param group; None for a parameter without a gradient."""
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in self.param_groups]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the unscaled gradients in place; returns their norm before clipping.

        If a gradient is not finite, the norm is infinite or NaN. apex returned -1 in this case, and waited for
        the device at every call to detect it.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        return clip_grad_norm_(params, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates masters and weights unless a gradient is not finite; returns the result of `closure`.

        A closure is called once, and must call `backward` of this FP16_Optimizer.
        """
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Returns a dict of the optimizer's state, the fp32 weights, and the session's state (loss scale, counters)."""
        return {
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self._held.state_dict(),
            "session": self._session.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores weights, masters, optimizer state and loss scale from a dict that `state_dict()` returned.

        Raises:
            StateError: the dict is incomplete, or was saved for another network or with another kind of loss scale.
        """
        missing = [name for name in _ENTRIES if not isinstance(state_dict, Mapping) or name not in state_dict]
        if missing:
            raise StateError(
                f"the state of FP16_Optimizer lacks {', '.join(map(repr, missing))}; pass a result of "
                "halfstep's FP16_Optimizer.state_dict(). From a checkpoint that apex wrote, load only its "
                "'optimizer_state_dict', into the wrapped optimizer"
            )
        self._session.load_state_dict(state_dict["session"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._held.load_state_dict(state_dict["fp32_from_fp16"])

    def close(self) -> None:
        """Closes the session; the wrapped optimizer is an ordinary one again, and the weights stay in fp16 or bf16.

        If the network is wrapped in DistributedDataParallel, wrap it again afterwards: the old wrapper no longer
        reduces gradients.
        """
        self._session.close()
        for p in self._low:
            _cast(p, self._dtype)

    def _after_step(self, record: StepRecord) -> None:
        self._skipped = record.skipped
        if self.verbose and bool(record.skipped):
            print(  # as apex did
                f"OVERFLOW! Skipping step. Attempted loss scale: {float(record.scale)}, reducing to {self.loss_scale}"
            )


def _cast(p: Parameter, dtype: torch.dtype) -> None:
    grad, p.grad = p.grad, None
    p.data = p.data.to(dtype)
    p.grad_dtype = None
    p.grad = None if grad is None else grad.to(dtype)


def _only_dtype(low: list[Parameter]) -> torch.dtype:
    kinds = {p.dtype for p in low}
    if len(kinds) > 1:
        raise SetupError(
            f"the optimizer's low-precision parameters are of {' and '.join(sorted(map(str, kinds)))}; cast the "
            "network to one of these dtypes (modules that need fp32 may stay in torch.float32)"
        )
    return next(iter(kinds), torch.float16)


def _from_arguments(given: Mapping[str, Any]) -> Scaling:
    known = ("init_scale", "scale_factor", "scale_window")
    strange = sorted(set(given) - set(known))
    if strange:
        raise SetupError(f"dynamic_loss_args got {', '.join(map(repr, strange))}; pass only {', '.join(known)}")
    return dynamic_scaling(**given)
