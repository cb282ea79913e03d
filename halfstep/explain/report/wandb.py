"""Logs a session's steps and observations to Weights & Biases; needs the extra [wandb]."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.explain.report.log import NumbersSink

try:
    import wandb
except ImportError as error:
    raise ImportError(
        f"halfstep.explain.report.wandb needs {error.name}; run: pip install 'halfstep[wandb]'"
    ) from error

STEP = "halfstep/step"


class WandB(NumbersSink):
    """Logs to a run of Weights & Biases: `initialize(..., sinks=[WandB(wandb.init(...))])`.

    Numbers have the same names as in the TensorBoard sink, such as `halfstep/loss`. They are plotted over the metric
    `halfstep/step`, so that they do not disturb the steps of your own logging. Verdicts and findings are in the run's
    summary. `close()` logs what is left, but does not finish the run.
    """

    where = "the wandb run"
    errors = (OSError, wandb.Error)

    def __init__(self, run: wandb.Run) -> None:
        super().__init__()
        self._run = run
        run.define_metric(STEP, hidden=True)
        for names in ("halfstep/*", "lost/*", "saturated/*"):
            run.define_metric(names, step_metric=STEP)

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        self._run.log({STEP: step, **numbers})

    def write_text(self, name: str, text: str, step: int) -> None:
        self._run.summary[f"halfstep/{name} of step {step}"] = text
