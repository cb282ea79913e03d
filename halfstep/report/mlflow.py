"""A session's steps and observations for MLflow; needs the extra [mlflow]."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import LogError
from halfstep.report.numbers import NumbersSink

try:
    import mlflow
except ImportError as error:
    raise ImportError(f"halfstep.report.mlflow needs {error.name}; run: pip install 'halfstep[mlflow]'") from error


class MLflow(NumbersSink):
    """Logs to the run of MLflow that is active: `with mlflow.start_run(): initialize(..., sinks=[MLflow()])`.

    Metrics have TensorBoard's names; verdicts and findings are text artifacts in `halfstep/`. A thread of MLflow's
    writes them. `close()`, or the end of the process, waits for what is left; the run itself is yours to end.

    Raises:
        LogError: no run is active.
    """

    where = "the MLflow run"
    errors = (OSError, mlflow.MlflowException)

    def __init__(self) -> None:
        super().__init__()
        run = mlflow.active_run()
        if run is None:
            raise LogError("no MLflow run is active; make the sink inside `with mlflow.start_run():`")
        self._run_id = run.info.run_id

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        """Logs metrics, later."""
        mlflow.log_metrics(dict(numbers), step=step, run_id=self._run_id, synchronous=False)

    def write_text(self, name: str, text: str, step: int) -> None:
        """Logs a text file."""
        mlflow.log_text(text, f"halfstep/{name}-{step}.txt", run_id=self._run_id)

    def finish(self) -> None:
        """Waits until everything is written."""
        mlflow.flush_async_logging()
