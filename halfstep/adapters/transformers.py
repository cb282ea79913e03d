"""halfstep inside Hugging Face's Trainer (extra [transformers]): each `train` is a Session on its Accelerator."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from halfstep.adapters.accelerate import (
    SessionOptimizer,
    SessionScaler,
    attach,
    check_accelerator,
    check_plan,
    open_session,
    take_over,
)
from halfstep.errors import SetupError
from halfstep.formats import is_narrow
from halfstep.initialize import check_adapted, initialize
from halfstep.plan.plan import Plan
from halfstep.records import StepRecord, counted
from halfstep.validate import extra

with extra("transformers", first="5.22", below="5.24"):
    from transformers import PreTrainedModel, Trainer, TrainingArguments
    from transformers.utils import CONFIG_NAME

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object  # what a Trainer is mixed with

TRL = "1.16"  # the release that tests/trainers/test_trl.py ran with
_LOG = logging.getLogger("halfstep")


class HalfstepMixin(_Mixed):
    """Makes a Trainer train under a plan: `class MyTrainer(HalfstepMixin, SFTTrainer)`, or use `HalfstepTrainer`.

    `plan` and the settings in `halfstep`, a dict, are those of `halfstep.initialize`. The session is open while `train`
    runs; before and after, the model is an ordinary fp32 model. Checkpoints are always fp32. Logs have, in addition to
    the Trainer's own `grad_norm`, `halfstep/scale`, `halfstep/skipped` (how many steps of this run were skipped so far)
    and `halfstep/bad_losses` (how many of these had a loss that was not finite).

    Raises:
        SetupError: halfstep does not support one of the TrainingArguments.
    """

    def __init__(
        self, *args: Any, plan: Plan | str = "O1", halfstep: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._plan, self._settings = plan, dict(halfstep or {})
        check_adapted(self._settings)
        for each in (*args, *kwargs.values()):
            if isinstance(each, TrainingArguments):  # which another Trainer may have in another place
                _check_arguments(each)
        check_plan(plan, self._settings)  # before a model is loaded, which a constructor may do
        self._record: StepRecord | None = None
        self._counts: dict[str, Any] = {}  # of skipped steps of the session
        super().__init__(*args, **kwargs)
        if any(each.__module__.startswith("trl.") for each in type(self).__mro__):
            version = sys.modules["trl"].__version__
            if not f"{version}.".startswith(f"{TRL}."):
                what = "TRL %s is installed, and halfstep was tested with TRL %s; try a short run first"
                _LOG.warning(what, version, TRL)
        if self.args.logging_nan_inf_filter:
            _LOG.warning(
                "TrainingArguments(logging_nan_inf_filter=True), the default, logs the mean of earlier losses instead "
                "of infinite and NaN ones, which hides failures that halfstep reports; look at halfstep/skipped in the "
                "logs, the number of skipped steps. With False, the Trainer logs NaN for all losses from the first "
                "such loss on"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Accelerator as the Trainer does, and checks it."""
        _check_arguments(self.args)  # a Trainer may have made them
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer as the Trainer does, and opens the session."""
        optimizer: Optimizer = super().create_optimizer(*args, **kwargs)
        self._close()  # `auto_find_batch_size` begins again within one call of `train`
        self._counts = {}
        attach(self.accelerator, [self.model], [optimizer], self._plan, **self._with_sink())
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the scheduler as the Trainer does; before that, connects the optimizer's `step` to the session."""
        if self.accelerator.is_fsdp2:  # which has sharded the model since `create_optimizer`
            open_session(self.accelerator, [self.model], [self.optimizer], self._plan, **self._with_sink())
        take_over(self.accelerator, self.optimizer)
        return super().create_scheduler(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Checks that the session makes the optimizer's steps, and runs a training step as the Trainer does.

        Raises:
            SetupError: the session's optimizer was replaced by another.
        """
        if not isinstance(self.optimizer, SessionOptimizer):
            other = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper has one inside
            raise SetupError(
                f"the Trainer's optimizer, {type(other).__name__}, is not an optimizer of the session; pass it to "
                "HalfstepTrainer(optimizers=...), or set self.optimizer in an override of create_optimizer that ends "
                "with `return super().create_optimizer()`"
            )
        return super().training_step(*args, **kwargs)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the model as the Trainer does, and widens its fp16 and bf16 weights to fp32."""
        return self._widened(super().call_model_init(*args, **kwargs))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does, and closes the session."""
        if resume_from_checkpoint:
            self._widened(self.model)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._close()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as the Trainer does; logs with a loss also get the loss scale and the number of skipped steps.

        Closes the session when the Trainer logs the end of the training.
        """
        if "train_runtime" in logs:  # before the best weights are loaded, for which PEFT makes new parameters
            self._close()
        if "loss" in logs and self._record is not None:
            record = self._record
            logs |= {name: float(value) for name, value in {"halfstep/scale": record.scale, **self._counts}.items()}
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Saves as the Trainer does; sets the dtype in the saved config to float32 if some saved weights are fp32.

        If only an adapter was saved, there is no config of the model to change.
        """
        super().save_model(output_dir, *args, **kwargs)
        folder = Path(output_dir or self.args.output_dir)
        whole = isinstance(self.model, PreTrainedModel) and (folder / CONFIG_NAME).exists()  # not adapters alone
        scaler = self.accelerator.scaler
        low = isinstance(scaler, SessionScaler) and scaler.session.low_parameters()  # which are saved in fp32
        full = low or any(p.dtype is torch.float32 for p in self.model.parameters())
        if self.args.should_save and whole and full:
            self.model.config.dtype = torch.float32
            self.model.config.save_pretrained(folder)

    def _widened(self, model: Any) -> Any:
        """Widens a model's fp16 and bf16 weights to fp32; returns the model."""
        # A checkpoint is loaded before the session opens; its values would be rounded in low-precision weights.
        if any(p.requires_grad and is_narrow(p.dtype) for p in model.parameters()):
            initialize(model, None, self._plan, **{**self._settings, "sinks": []}).close()
        return model

    def _close(self) -> None:
        if isinstance(self.accelerator.scaler, SessionScaler):
            self.accelerator.scaler.session.close()

    def _with_sink(self) -> dict[str, Any]:
        return {**self._settings, "sinks": [*self._settings.get("sinks", ()), self._keep]}

    def _keep(self, record: StepRecord) -> None:
        self._record = record
        self._counts = counted(self._counts, record)


class HalfstepTrainer(HalfstepMixin, Trainer):
    """Hugging Face's Trainer under a plan: `HalfstepTrainer(model, args, ..., plan="O2")`."""


def _check_arguments(args: Any) -> None:
    for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            raise SetupError(
                f"{type(args).__name__}({name}=True) does not work with halfstep, which casts by its plan; pass "
                f"{name}=False (TRL's configs are bf16 by default)"
            )
    if args.n_gpu > 1:
        raise SetupError(
            f"the Trainer would run on {args.n_gpu} devices in one process with DataParallel, which halfstep does not "
            "support; start one process per device (torchrun --nproc-per-node=...), or set CUDA_VISIBLE_DEVICES=0"
        )
