"""halfstep inside Lightning (extra [lightning]): a plugin for `Trainer(plugins=[...])` and `Fabric(plugins=[...])`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError, SetupError
from halfstep.formats import is_narrow
from halfstep.initialize import check_adapted, initialize
from halfstep.plan.matching import unwrap
from halfstep.plan.plan import Plan
from halfstep.records import StepRecord, counted
from halfstep.sharded import is_sharded
from halfstep.train.processes.collectives import failing_together
from halfstep.train.scale.loss import wide
from halfstep.train.session.session import Session, Sink
from halfstep.validate import extra

with extra("lightning", first="2.6", below="2.7"):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Where Lightning's averaging callbacks read and write weights, but for AveragedModel's reads, which see fp32 values.
EXCHANGING = ("on_train_epoch_start", "on_train_end", "on_validation_epoch_start", "on_validation_epoch_end")
PRUNING = ("apply_pruning", "apply_lottery_ticket_hypothesis", "make_pruning_permanent")
# By name, as Trainer and Fabric have one class of each. Fabric shards a model after it has asked the plugin.
_BOTH = ("SingleDeviceStrategy", "DDPStrategy")
STRATEGIES = {"Trainer": (*_BOTH, "ModelParallelStrategy"), "Fabric": _BOTH}
SHARDING = (
    "; to shard (FSDPStrategy is FSDP1), use a Trainer with ModelParallelStrategy, and fully_shard(module, "
    "mp_policy=halfstep.fsdp_policy(plan, low=...)) in configure_model"
)


class Halfstep(Precision):
    """Trains under a halfstep plan: `Trainer(plugins=[Halfstep("O2", low="bf16")])`, without `precision=`.

    `plan` and `settings` are those of `halfstep.initialize`. The session is open while a fit, validation, test or
    prediction runs; before and after, the model is an ordinary fp32 model. After O3, which has no masters, its fp32
    weights hold values that were rounded to the low format. Checkpoints are always fp32. With Fabric, call the plugin's
    `setup` instead of `fabric.setup`, which does not pass optimizers to plugins. Call the plugin's `close` at the end.

    A Trainer's loggers get `halfstep/scale`, `halfstep/skipped` and, above O0, `halfstep/bad_losses` and
    `halfstep/grad_norm` every `log_every_n_steps` steps. `halfstep/skipped` counts the skipped steps so far, and
    `halfstep/bad_losses` those with a loss that was not finite. `halfstep/grad_norm` is the norm before clipping;
    with several optimizers its name ends in the number of the optimizer (`halfstep/grad_norm/0`).

    Raises:
        TypeError: `halfstep.initialize` has no such setting.
    """

    def __init__(self, plan: Plan | str = "O1", **settings: Any) -> None:
        check_adapted(settings)
        self._plan, self._settings = plan, settings
        self._session: Session | None = None
        self._loop: type[FabricPrecision] = Precision  # whose base of a plugin, that of a Trainer or of Fabric
        self._norms: dict[int, Tensor | None] = {}  # of gradients that were clipped for a step to come, by optimizer
        self._counts: dict[str, Any] = {}  # of skipped steps of the session
        self._lent = ExitStack()  # what callbacks that average or prune were given
        self._last: dict[str, Any] = {}  # the state of the last session, for a checkpoint that is saved after it

    def __repr__(self) -> str:
        return f"Halfstep({self._plan!r}, **{self._settings})"

    @property
    def session(self) -> Session:
        """The open session.

        Raises:
            SessionError: no session is open.
        """
        if self._session is None:
            raise SessionError(
                "no halfstep session is open: with a Trainer, use the session while it fits or evaluates; with Fabric, "
                "replace `fabric.setup(model, optimizer)` with `plugin.setup(fabric, model, optimizer)`"
            )
        return self._session

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Opens a Trainer's session once the model is on the device, or adds the optimizers to the open session."""
        module = unwrap(model)
        assert isinstance(module, LightningModule)
        trainer = module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._session is None:
            self._open([module], optimizers if fitting else None, partial(self._log, module))
        elif fitting:  # opened before the model was wrapped
            self._session.add_optimizers(optimizers)
        self._lent.close()
        self._lent = _lend_to_callbacks(trainer, self.session)
        return model, optimizers, lr_schedulers

    def setup(self, fabric: Fabric, model: nn.Module | Sequence[nn.Module], *optimizers: Optimizer) -> Any:
        """Sets up all models and optimizers of a Fabric loop; returns them as `fabric.setup` does, in one tuple.

        Raises:
            PlanError, SetupError: for the same reasons as `halfstep.initialize`.
            SetupError: `setup` was called before, or halfstep does not support the strategy.
        """
        _check_strategy("Fabric", fabric.strategy)
        if self._session is not None:
            raise SetupError("plugin.setup was called before; pass all models in one call, or call plugin.close()")
        models = [model] if isinstance(model, nn.Module) else list(model)
        for each in models:
            fabric.to_device(each)
        self._loop = FabricPrecision
        self._open(models, optimizers or None)
        made = (*map(fabric.setup_module, models), *map(fabric.setup_optimizers, optimizers))
        return made if len(made) > 1 else made[0]

    def _open(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer] | None, *sinks: Sink) -> None:
        self.close()
        self._norms, self._counts = {}, {}
        settings = {**self._settings, "sinks": [*self._settings.get("sinks", ()), *sinks], "stepping": "optimizer"}
        with failing_together():
            self._session = initialize(models, optimizers, self._plan, **settings)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Checks a model and the strategy before Lightning wraps the model; returns the model.

        With a Trainer's DDPStrategy it also opens the session: DistributedDataParallel must wrap a converted model.

        Raises:
            SetupError: the strategy or low weights are not supported, or `setup` did not get the model (with Fabric).
        """
        trainer = _trainer_of(module)
        if trainer is not None:
            _check_strategy("Trainer", trainer.strategy)
            _check_low(trainer, module, trains_them=self._plan == "O0")
            self.close()
            if type(trainer.strategy).__name__ == "DDPStrategy":  # which wraps the model before it has optimizers
                trainer.strategy.model_to_device()
                self._open([module], [] if trainer.state.fn == TrainerFn.FITTING else None, partial(self._log, module))
        elif not any(module is each for each, _ in self.session.modules()):
            raise SetupError(f"this {type(module).__name__} was not passed to plugin.setup; pass all models at once")
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns the context of `fabric.autocast()`, which extends the plan to code outside of models."""
        return self.session.autocast()

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Returns a context that does nothing: modules called in a step run under the plan, other code runs in fp32."""
        return nullcontext()

    val_step_context = test_step_context = predict_step_context = train_step_context

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Calls the hooks that Lightning runs before the backward pass."""
        return self._loop.pre_backward(self, tensor, module)

    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs the backward pass of a loss times its scale; afterwards `p.grad` holds unscaled gradients."""
        with self.session.scaling(tensor) as scale:
            self._loop.backward(self, wide(tensor) * scale, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Calls the hooks that Lightning runs after the backward pass; they see unscaled gradients."""
        return self._loop.post_backward(self, tensor, module)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer of the session as Lightning does; returns the result of the optimizer's `step`.

        Raises:
            SetupError: the optimizer does not belong to the session.
        """
        own = self.session.optimizers
        if not any(optimizer is each for each in own):
            raise SetupError(
                f"this {type(optimizer).__name__} is not an optimizer of the session, which has "
                f"{', '.join(type(each).__name__ for each in own)}: an optimizer was replaced after the session "
                "opened; return it from configure_optimizers, or pass it to plugin.setup(fabric, model, optimizer)"
            )
        self._stepping = id(optimizer)
        return self._loop.optimizer_step(self, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips gradients by norm as Lightning does, and keeps the norm before clipping for the loggers."""
        self._keep_norm(optimizer, nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips gradients by value as Lightning does, and keeps the norm before clipping for the loggers."""
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        self._keep_norm(optimizer, nn.utils.get_total_norm(gradients))
        super().clip_grad_by_value(optimizer, clip_val)

    def _keep_norm(self, optimizer: Any, norm: Tensor) -> None:
        own = id(getattr(optimizer, "optimizer", optimizer))  # out of Lightning's wrapper, where a loop clips by hand
        self._norms[own] = norm.full_tensor() if is_sharded(norm) else norm

    def _log(self, module: LightningModule, record: StepRecord) -> None:
        """Passes the values of a step that Lightning logs to the Trainer's loggers; `log_dict` is slow."""
        trainer, optimizers = module.trainer, self.session.optimizers
        self._counts = counted(self._counts, record)
        norm = self._norms.pop(self._stepping, record.grad_norm)
        every = trainer.log_every_n_steps  # 0 is never, as with barebones=True
        if not every or (module.automatic_optimization and (trainer.global_step + 1) % every):
            return
        given = {"halfstep/scale": record.scale, **self._counts}
        if norm is not None:
            number = f"/{list(map(id, optimizers)).index(self._stepping)}" if len(optimizers) > 1 else ""
            given[f"halfstep/grad_norm{number}"] = norm
        with suppress(MisconfigurationException):  # in hooks where Lightning takes no values
            module.log_dict(given, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale and counters, which Lightning writes into its checkpoints."""
        return self._session.state_dict() if self._session is not None and self._session.optimizers else self._last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the loss scale and counters from a checkpoint."""
        self.session.load_state_dict(state_dict)

    def close(self) -> None:
        """Closes the session; the model is then an ordinary fp32 model."""
        self._lent.close()
        if self._session is not None:
            self._last = self.state_dict()  # not that of an evaluation
            self._session.close()
            self._session = None

    teardown = close


def _trainer_of(module: nn.Module) -> Trainer | None:
    with suppress(RuntimeError):  # it has none
        if isinstance(module, LightningModule) and isinstance(module.trainer, Trainer):  # Fabric puts a stand-in there
            return module.trainer
    return None


def _check_strategy(trainer: str, strategy: object) -> None:
    name, allowed = type(strategy).__name__, STRATEGIES[trainer]
    if name not in allowed:
        raise SetupError(
            f"the strategy of the {trainer} is {name}, but halfstep works only with {', '.join(allowed)}; leave "
            f"strategy out for one device, or set strategy='ddp'{SHARDING if 'FSDP' in name else ''}"
        )


def _averaging_of(trainer: Trainer) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, (StochasticWeightAveraging, WeightAveraging))]


def _check_low(trainer: Trainer, module: nn.Module, *, trains_them: bool) -> None:
    """Refuses low weights that averages or, unless the plan `trains_them` as they are, a checkpoint would round."""
    low = next((p.dtype for p in module.parameters() if p.requires_grad and is_narrow(p.dtype)), None)
    averaging = _averaging_of(trainer)
    if low is not None and (averaging or (trainer.ckpt_path and not trains_them)):
        what = f"the fp32 averages of {type(averaging[0]).__name__}" if averaging else "fp32 values from ckpt_path"
        raise SetupError(
            f"{what} would be rounded to {low}, since the module's weights have that dtype; call module.float() before "
            "trainer.fit(module)"
        )


def _lend_to_callbacks(trainer: Trainer, session: Session) -> ExitStack:
    """Makes callbacks that average or prune weights meet fp32 weights; closing the returned stack undoes this."""
    undo = ExitStack()
    if session.plan.param != "low":
        return undo
    averaging = _averaging_of(trainer)
    if averaging and session.plan.master == "none":
        raise SetupError(
            f"{type(averaging[0]).__name__} averages weights, but {session.plan.name} stores weights only in "
            f"{session.plan.low}, which would round the averages; use Halfstep('O2')"
        )
    pruning = [each for each in trainer.callbacks if isinstance(each, ModelPruning)]
    for callback, name in (*product(averaging, EXCHANGING), *product(pruning, PRUNING)):
        setattr(callback, name, session.full_weights()(getattr(callback, name)))
        undo.callback(delattr, callback, name)
    return undo
