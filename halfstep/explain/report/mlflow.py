"""Logs a session's steps and observations to MLflow; needs the extra [mlflow]."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from halfstep.errors import LogError
from halfstep.explain.report.log import NumbersSink

try:
    import mlflow
except ImportError as error:
    raise ImportError(
        f"halfstep.explain.report.mlflow needs {error.name}; run: pip install 'halfstep[mlflow]'"
    ) from error

_LOG = logging.getLogger("halfstep")
MOST = 20_000  # writes that wait, of which each takes up to 3 KB


class MLflow(NumbersSink):
    """Logs to the active MLflow run: `with mlflow.start_run(): initialize(..., sinks=[MLflow()])`.

    Metrics have the same names as in TensorBoard; verdicts and findings are text artifacts in `halfstep/`. A thread of
    its own writes them, in order. `close()`, or the end of the process, waits for it, but does not end the MLflow run.
    Where a server does not answer, up to 20,000 writes wait; further ones are left out, and the log says how many.

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
        # not MLflow's own queue: its threads lose numbers in a folder that two of them make, and tell nobody of errors
        self._thread = ThreadPoolExecutor(1, "halfstep-mlflow")
        self._pending: deque[Future[object]] = deque()
        self._left_out = 0

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        self._later(mlflow.log_metrics, dict(numbers), step=step, run_id=self._run_id)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._later(mlflow.log_text, text, f"halfstep/{name}-{step}.txt", run_id=self._run_id)

    def finish(self) -> None:
        if self._left_out:
            _LOG.warning("%s lacks %d writes, for which its server was too slow", self.where, self._left_out)
            self._left_out = 0
        while self._pending:
            self._pending.popleft().result()

    def _later(self, write: Callable[..., object], *given: object, **named: object) -> None:
        """Queues a write, or leaves it out if too many wait; raises what an earlier one raised."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if len(self._pending) < MOST:
            self._pending.append(self._thread.submit(write, *given, **named))
            return
        if not self._left_out:
            _LOG.warning("%d writes wait for the server of %s; more are left out until it answers", MOST, self.where)
        self._left_out += 1
