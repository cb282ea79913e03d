"""Logs a session's steps and observations to MLflow; needs the extra [mlflow]."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.errors import LogError
from halfstep.explain.report.numbers import NumbersSink

try:
    import mlflow
except ImportError as error:
    raise ImportError(
        f"halfstep.explain.report.mlflow needs {error.name}; run: pip install 'halfstep[mlflow]'"
    ) from error


class MLflow(NumbersSink):
    """Logs to the active MLflow run: `with mlflow.start_run(): initialize(..., sinks=[MLflow()])`.

    Metrics have the same names as in TensorBoard; verdicts and findings are text artifacts in `halfstep/`. MLflow's
    background thread writes them. `close()`, or the end of the process, waits for it, but does not end the MLflow run.

    Raises:
        LogError: no run is active.
    """

    where = "the MLflow run"
    errors = (OSError, mlflow.MlflowException)

    def __init__(self) -> None:
        super().__init__()
        run = mlflow.active_run()
        if run is None:
            raise LogError("no MLflow run is active; create the sink inside `with mlflow.start_run():`")
        self._run_id = run.info.run_id

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        mlflow.log_metrics(dict(numbers), step=step, run_id=self._run_id, synchronous=False)

    def write_text(self, name: str, text: str, step: int) -> None:
        mlflow.log_text(text, f"halfstep/{name}-{step}.txt", run_id=self._run_id)

    def finish(self) -> None:
        mlflow.flush_async_logging()
