"""halfstep inside Accelerate (extra [accelerate]): a Session takes the calls that it makes to its scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError, SetupError
from halfstep.formats import FP32, is_narrow
from halfstep.initialize import check_adapted, initialize
from halfstep.machine import read_facts
from halfstep.plan.compatibility import check_optimizers, check_parameters
from halfstep.plan.io import choose_plan
from halfstep.plan.levels import customize
from halfstep.plan.matching import is_fsdp1, match_parameters
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import resolve
from halfstep.records import StepRecord
from halfstep.sharded import fsdp_modules, is_sharded, tied
from halfstep.torch_internals import policy_of
from halfstep.train.processes.collectives import failing_together
from halfstep.train.processes.shards import fsdp_policy
from halfstep.train.session.session import Session
from halfstep.validate import extra, named

with extra("accelerate", first="1.14", below="1.16"):
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

FSDP2 = "FSDP2 (fsdp_version: 2 in `accelerate config`, or FullyShardedDataParallelPlugin(fsdp_version=2))"


def prepare(accelerator: Accelerator, *args: Any, plan: Plan | str = "O1", **settings: Any) -> Any:
    """Returns the result of `accelerator.prepare(*args)`; the models and optimizers in `args` train under a plan.

    The loop does not change: `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `optimizer.step`, `save_state`
    and `load_state` work as before. `plan` and `settings` are those of `halfstep.initialize`. Pass all models and
    optimizers of a loop in one call. `session_of(accelerator)` returns the session. Under FSDP2 Accelerate shards the
    model with `halfstep.fsdp_policy` of the plan.

    Raises:
        PlanError: for the same reasons as `halfstep.initialize`.
        SetupError: for the same reasons as `halfstep.initialize`, or because no model was passed, the Accelerator
            already has a session or a scaler, or one of its settings is not supported.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    optimizers = [each for each in args if isinstance(each, Optimizer)]
    if not models:
        raise SetupError("prepare was called without a model; pass all models and optimizers of a loop to one call")
    with _undone_by_errors(accelerator):
        attach(accelerator, models, optimizers, plan, **settings)
        prepared = accelerator.prepare(*args)
        made = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
        if accelerator.is_fsdp2:
            models = [each for each in made if isinstance(each, nn.Module)]
            open_session(accelerator, models, optimizers, plan, **settings)
    for each in made:
        take_over(accelerator, each)
    return prepared


@contextmanager
def _undone_by_errors(accelerator: Accelerator) -> Iterator[None]:
    """An error inside the context closes the session that was opened there; a second try finds no trace of it."""
    plugin, scaler = getattr(accelerator.state, "fsdp_plugin", None), accelerator.scaler
    policy, session = getattr(plugin, "mixed_precision_policy", None), getattr(scaler, "session", None)
    try:
        yield
    except BaseException:
        opened = getattr(accelerator.scaler, "session", None)
        if opened is not None and opened is not session:
            opened.close()
        accelerator.scaler = scaler
        if plugin is not None:
            plugin.mixed_precision_policy = policy
        raise


def session_of(accelerator: Accelerator) -> Session:
    """Returns the session of an Accelerator.

    Raises:
        SessionError: the Accelerator has no session.
    """
    if isinstance(accelerator.scaler, SessionScaler):
        return accelerator.scaler.session
    raise SessionError("this Accelerator has no session; call halfstep.adapters.accelerate.prepare(accelerator, ...)")


@failing_together()
def attach(
    accelerator: Accelerator, models: list[nn.Module], optimizers: list[Optimizer], plan: Plan | str, **settings: Any
) -> None:
    """Opens a session on models and optimizers; call it before the Accelerator prepares them.

    Under FSDP2 it sets the policy that Accelerate shards with; then call `open_session` after the preparation.
    """
    check_adapted(settings)
    check_accelerator(accelerator, models)
    if not accelerator.is_fsdp2:
        for model in models:
            away = next((name for name, p in model.named_parameters() if p.is_meta), None)
            if away is not None:
                raise SetupError(
                    f"{away!r} is on the meta device, where accelerate.cpu_offload and device_map leave weights; load "
                    f"the model without them, and shard it where it is too large for one device: {FSDP2}"
                )
            model.to(accelerator.device)
        open_session(accelerator, models, optimizers, plan, **settings)
        return
    check_plan(plan, settings, models)
    plugin, policy = accelerator.state.fsdp_plugin, fsdp_policy(plan, low=settings.get("low"))
    if policy.param_dtype is not None and hasattr(plugin.cpu_offload, "pin_memory"):  # a CPUOffloadPolicy
        raise SetupError(
            "Accelerate's FSDP2 would offload shards to the CPU, where halfstep cannot step them yet; set "
            "fsdp_offload_params: false in `accelerate config`, or leave cpu_offload out of the plugin, or use O0"
        )
    sharded = {is_sharded(p) for model in models for p in model.parameters()}
    if plugin.cpu_ram_efficient_loading and sharded == {False, True}:
        raise SetupError(
            "some modules were sharded before prepare, whose weights Accelerate's fsdp_cpu_ram_efficient_loading would "
            "send as if they were whole; set it to false"
        )
    read = policy.param_dtype or FP32.dtype
    gathered = {policy_of(module).param_dtype or FP32.dtype for module in fsdp_modules(models)}
    if gathered and read not in gathered and sharded == {True}:
        raise SetupError(
            "accelerator.prepare or fully_shard sharded this model before, to gather weights in another format than "
            f"{read}; pass a new model to halfstep's prepare, which shards it, and to no other"
        )
    if plugin.mixed_precision_policy not in (None, policy) and accelerator.scaler is None:
        raise SetupError("mixed_precision_policy is set in the plugin, and halfstep sets its own; leave it out")
    check_optimizers(_inside(optimizers), models)
    for model in models:
        _check_tied(plugin, model)
    plugin.mixed_precision_policy = policy
    low = any(p.requires_grad and is_narrow(p.dtype) for model in models for p in model.parameters())
    if low and policy.param_dtype is not None:  # they are sharded in fp32; O3 would round the others
        initialize(models, None, "O1" if plan == "O1" else "O2", low=settings.get("low")).close()


def _check_tied(plugin: Any, model: nn.Module) -> None:
    def policy() -> Any:
        plugin.set_auto_wrap_policy(model)
        return fsdp2_prepare_auto_wrap_policy(plugin, model)

    for names, apart in tied(model, policy):
        if apart or (plugin.cpu_ram_efficient_loading and not hasattr(model, "tie_weights")):
            raise SetupError(
                f"{named(names)} are one parameter, which Accelerate's FSDP2 would part; leave layers that have it out "
                "of fsdp_transformer_layer_cls_to_wrap, and set fsdp_cpu_ram_efficient_loading to false"
            )


def check_plan(plan: Plan | str, settings: dict[str, Any], models: Sequence[nn.Module] = ()) -> None:
    """Raises what a session would say of its plan, before models are loaded or sharded."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, _ = choose_plan(plan, settings.get("low"), read_facts(device))
    layers = nn.Sequential(*(nn.Linear(128, 128, device="meta") for _ in range(3)))  # for which nothing is drawn
    anywhere = replace(chosen, rules=(), full_moments=())  # without patterns, which name parts of the user's model
    given = {**settings, "low": None, "rules": (), "full_moments": None, "process_group": None, "sinks": []}
    with initialize(layers.to_empty(device=device), None, anywhere, **given) as trial:
        whole = replace(trial.plan, rules=chosen.rules, full_moments=chosen.full_moments)
        whole = customize(whole, rules=settings.get("rules", ()), full_moments=settings.get("full_moments"))
        if models:
            check_parameters([], models, whole)
            resolve(whole, models)
            match_parameters(whole.full_moments, models)


def open_session(
    accelerator: Accelerator, models: list[nn.Module], optimizers: list[Optimizer], plan: Plan | str, **settings: Any
) -> None:
    """Opens a session on models and optimizers, whose scaler the Accelerator gets."""
    scaler = accelerator.scaler or SessionScaler()  # optimizers that are prepared again keep their scaler
    settings["sinks"] = [*settings.get("sinks", ()), scaler.keep]
    scaler.session = initialize(models, _inside(optimizers) or None, plan, stepping="optimizer", **settings)
    accelerator.scaler = scaler


def _inside(optimizers: list[Optimizer]) -> list[Optimizer]:
    return [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in optimizers]


def check_accelerator(accelerator: Accelerator, models: Sequence[nn.Module] = ()) -> None:
    """Raises a SetupError for an Accelerator that a session cannot train in, or for models that it cannot."""
    fsdp1 = accelerator.distributed_type == DistributedType.FSDP or any(map(is_fsdp1, models))
    kind = "FSDP1" if fsdp1 else accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") and not accelerator.is_fsdp2:
        raise SetupError(
            f"halfstep does not work with Accelerate's {kind}; use one device, DistributedDataParallel (MULTI_GPU or "
            f"MULTI_CPU in `accelerate config`), or {FSDP2}"
        )
    sizes = accelerator.parallelism_config
    beyond = [name for name in ("tp_size", "cp_size", "sp_size") if getattr(sizes, name, 1) > 1]
    if beyond:
        raise SetupError(
            "halfstep does not work with Accelerate's tensor, context and sequence parallelism; leave "
            f"{beyond[0]} out of ParallelismConfig, where dp_shard_size and dp_replicate_size work, or write the "
            "loop without Accelerate: parallelize_module, fully_shard, the optimizer, halfstep.initialize"
        )
    if accelerator.mixed_precision != "no":
        raise SetupError(
            f"mixed_precision={accelerator.mixed_precision!r} together with halfstep would cast and scale twice; leave "
            "mixed_precision out of Accelerator(...) and `accelerate config`, and bf16 and fp16 out of "
            "TrainingArguments"
        )
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, SessionScaler):
        raise SetupError("the Accelerator already has a scaler, and halfstep sets its own; do not set it")
    if isinstance(accelerator.scaler, SessionScaler) and not accelerator.scaler.session.closed:
        raise SetupError(
            "this Accelerator already has a session; pass all models and optimizers to one call of prepare, or close "
            "the session first: session_of(accelerator).close(). Close it before accelerator.free_memory() too"
        )


def take_over(accelerator: Accelerator, prepared: Any) -> None:
    """Turns an AcceleratedOptimizer into a SessionOptimizer, which steps through the session; ignores other objects."""
    # Its scaler is missing if it was prepared before the session was opened.
    if type(prepared) is AcceleratedOptimizer and isinstance(accelerator.scaler, SessionScaler):
        prepared.scaler = accelerator.scaler
        prepared.__class__ = SessionOptimizer


class SessionScaler:
    """The scaler of an Accelerator: passes its calls to a session, and keeps the last StepRecord of each optimizer."""

    session: Session

    def __init__(self) -> None:
        self.records: dict[Optimizer, StepRecord] = {}
        self._stepping: Optimizer | None = None
        self._device = None

    def _lazy_init_scale_growth_tracker(self, device: Any) -> None:
        """Does nothing; Accelerate calls it after it has loaded a state under FSDP2."""

    def scale(self, loss: Tensor) -> SimpleNamespace:
        """Returns an object to use in place of the loss: its `backward()` is `session.backward(loss)`."""
        return SimpleNamespace(backward=lambda **kwargs: self.session.backward(loss, **kwargs))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Steps one optimizer, which the session has taken over; calls `closure`, if any."""
        if not any(optimizer is each for each in self.session.optimizers):
            raise SetupError(
                f"this {type(optimizer).__name__} is not an optimizer of the session; pass it to "
                "prepare(accelerator, ...), and do not replace it afterwards"
            )
        self._stepping = optimizer
        try:
            optimizer.step(closure=closure)  # with torch.distributed.checkpoint's words, by which a session knows it
        finally:
            self._stepping = None

    def keep(self, record: StepRecord) -> None:
        """Keeps the record of the optimizer that steps; it is a sink of the session."""
        if self._stepping is not None:  # else a loop has called the optimizer that Accelerate wraps
            self.records[self._stepping] = record

    def update(self) -> None:
        """Does nothing, since `step` has already adapted the loss scale."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Does nothing, since the session unscales gradients at the end of each backward pass."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the session's state, which `save_state` writes."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of the session, as `state_dict` returned it."""
        self.session.load_state_dict(state)


class SessionOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around an optimizer, changed so that `step` goes through a session.

    `step_was_skipped` also reports the steps that the session skipped on the device. Accelerate's own class reports a
    step as skipped only if `step` of the wrapped optimizer was not called.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Steps the optimizer through the session; does nothing while Accelerate still accumulates gradients."""
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device. Accelerate's schedulers read it after each step."""
        record = self.scaler.records.get(self.optimizer)
        return record is not None and bool(record.skipped)
