"""A row of a benchmark while it trains, in this process, or in one of its own that is asked for one step at a time."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from halfstep.edits import Scaling
from halfstep.errors import WorkloadError
from halfstep.initialize import initialize
from halfstep.lab.bench.tally import CpuBytes, CudaBytes, counting, limit_memory, next_batch, reason, settings_of
from halfstep.lab.bench.variants import End, Entry, Variant, timed_step
from halfstep.lab.workloads.load import WORKLOADS, load_workload
from halfstep.lab.workloads.workload import Batch, Workload, to_device_of
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.torch_internals import is_out_of_memory
from halfstep.train.cast.opregistry import REGISTRY

COUNTED = 2  # steps: the first makes the optimizer's state, the second has the peak


@dataclass(frozen=True)
class Step:
    """The loss of a training step, and its milliseconds."""

    loss: float
    ms: float


class Deal:
    """The batches of a workload, for rows that each make `turn` steps on the same tensors in turn."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self._seed: int | None = None
        self._source: Iterator[Batch] = iter(())
        self._drawn = 0
        self._kept: dict[int, Batch] = {}  # the first ones, with which every row begins, and the last ones
        self.turn = 1

    def batch(self, seed: int, number: int) -> Batch:
        """Returns batch `number` (from 0) of a seed."""
        if seed != self._seed or (number < self._drawn and number not in self._kept):
            self._source, self._drawn, self._kept, self._seed = self.workload.batches(seed), 0, {}, seed
        while self._drawn <= number:
            inputs, targets = next_batch(self._source)
            if self._drawn - self.turn >= COUNTED:
                del self._kept[self._drawn - self.turn]
            self._kept[self._drawn] = inputs.to(self.device), targets.to(self.device)
            self._drawn += 1
        return self._kept[number]


class Local:
    """Trains one row of a benchmark in this process, a step for each call."""

    def __init__(self, entry: Entry, deal: Deal) -> None:
        self._entry, self._deal = entry, deal
        self._workload, self._device = deal.workload, deal.device
        self._open, self._counting = ExitStack(), ExitStack()
        self._variant: Variant | None = None

    def begin(self, seed: int, *, counted: bool = False, limit: int | None = None) -> None:
        """Builds the model of a seed in place of an earlier one; `limit`: bytes that may be allocated from now on."""
        self.close()
        self._seed, self._made = seed, 0
        self._count: CpuBytes | CudaBytes | None = None
        for number in range(COUNTED if counted else 0):
            self._deal.batch(seed, number)  # so that they are no part of the peak
        if limit is not None:
            limit_memory(limit, self._device)
        with self._closed_by_errors():
            if counted:
                self._count = counting(self._device)
                self._counting.enter_context(self._count)
            self._variant = self._entry.start(self._workload, seed, self._device)
            self._open.callback(self._variant.close)
        self._lr = tuple(group["lr"] for group in self._variant.optimizer.param_groups)

    def step(self, number: int, steps: int) -> Step:
        variant = self._running()
        with self._closed_by_errors():
            batch = self._deal.batch(self._seed, number)
            if self._count is not None and self._made < COUNTED:
                self._count.restart()
            loss, took = timed_step(variant, batch, self._lr, self._workload.lr_factor(number, steps))
            variant.observe()
            self._made += 1
            if self._made == COUNTED:
                self._counting.close()
            return Step(float(loss), took)

    def gauge(self) -> float:
        """Returns about how many seconds a validation takes, from the time of its first batch."""
        model = self._running().model
        batches = iter(self._workload.validation())
        first = next(batches, None)
        if first is None:
            return 0.0
        (inputs,) = to_device_of(model, first[0])
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                start = perf_counter()
                float(model(inputs).sum())
                took = perf_counter() - start
        finally:
            model.train(was_training)
        return took * (1 + sum(len(each) for each, _ in batches) / max(1, len(inputs)))

    def gradient_error(self, seed: int) -> float | None:
        """Returns how far the gradient of a first batch is from fp32's, over the noise of batches; None of a peer."""
        return None if self._entry.peer else gradient_error(self._workload, self._entry.plan, seed, self._device)

    def end(self, *, validate: bool) -> End:
        """Returns what the run has come to, after a validation if `validate` is true."""
        variant = self._running()
        self._counting.close()
        # A compiled model would be compiled once more to evaluate.
        with torch.compiler.set_stance("force_eager") if self._entry.compiled else nullcontext():
            figures = self._workload.evaluate(variant.model) if validate else {}
        peak = None if self._count is None else self._count.peak
        return replace(variant.end(), peak=peak, validation={name: float(v) for name, v in figures.items()})

    def close(self) -> None:
        self._counting.close()
        self._open.close()
        self._variant = None

    def _running(self) -> Variant:
        assert self._variant is not None, "the run has not begun"
        return self._variant

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()  # memory is counted in one run at a time
            raise


SCALE = 1024.0  # of the loss, in formats that need one: far from both ends of a gradient at initialization


def gradient_error(workload: Workload, plan: Plan, seed: int, device: torch.device) -> float | None:
    """Returns |g - g32| / |g_a - g_b|: of the first batch under the plan and in fp32, and of two batches in fp32.

    Weights are those at initialization: the error of what a plan rounds, as a share of what a short run sees anyway.
    None if both batches are the same.
    """
    batches = workload.batches(seed)
    one, other = (
        (inputs.to(device), targets.to(device)) for inputs, targets in (next_batch(batches), next_batch(batches))
    )
    full = level("O0", "bf16")
    exact = _gradient(workload, full, one, seed, device)
    noise = (_gradient(workload, full, other, seed, device) - exact).norm()
    plan = plan.edit(Scaling("static", init=SCALE)) if plan.scale.active else plan
    return float((_gradient(workload, plan, one, seed, device) - exact).norm() / noise) if noise else None


def _gradient(workload: Workload, plan: Plan, batch: Batch, seed: int, device: torch.device) -> Tensor:
    model = workload.build(seed).to(device)
    with initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan) as session:
        torch.manual_seed(seed)  # the same dropout
        session.backward(workload.loss(model(batch[0]), batch[1]))
        scale = plan.scale.init if plan.scale.active else 1.0
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]) / scale


# ---- a row in a process of its own
_LINES = 3  # of what a process said last before it died


@dataclass(frozen=True)
class Origin:
    """Where a workload comes from, so that another process can load the same: what `load_workload` takes."""

    model: str
    settings: dict[str, str]
    data: Path | None = None

    def load(self) -> Workload:
        return load_workload(self.model, self.settings, data=self.data)


def origin_of(workload: Workload) -> Origin:
    """Returns the origin of one of halfstep's own workloads."""
    if WORKLOADS.get(workload.name) is not type(workload):
        raise WorkloadError(
            "torch.amp, and each row after five with other op tables, train in processes of their own, which cannot "
            f"load {type(workload).__name__}; pass origin=Origin('path.py:function', settings), or leave them out"
        )
    return Origin(workload.name, settings_of(workload), workload.data)


@dataclass(frozen=True)
class Task:
    """What a process trains: a row of a benchmark, with as many threads as this process has."""

    origin: Origin
    entry: Entry
    device: torch.device
    threads: int = field(default_factory=torch.get_num_threads)


class OutOfMemory(WorkloadError):
    """A configuration did not fit into memory."""


class Remote:
    """Trains one row as `Local` does, in a process that starts at once: where no session of another row is open.

    Raises `OutOfMemory` where its memory ran out, and `WorkloadError` where something else failed in it.
    """

    def __init__(self, task: Task) -> None:
        self._is_ready, self._is_limited = False, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import answer_calls; answer_calls()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the one who deals
        )
        self._send(task)

    def ready(self) -> None:
        """Waits until the process has loaded its workload, so that what loading takes is nobody's step."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def __getattr__(self, what: str) -> Callable[..., Any]:
        """Returns a function that calls this method of the process's `Local`."""

        def ask(*given: object, **named: object) -> Any:
            self.ready()
            self._is_limited |= named.get("limit") is not None
            self._send((what, given, named))
            return self._answer()

        return ask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(BrokenPipeError):  # a line that a dead process never took
                each.close()

    def _send(self, asked: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            pickle.dump(asked, self._process.stdin)
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            said = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if isinstance(said, WorkloadError):
            raise said
        return said

    def _death(self) -> WorkloadError:
        code = self._process.wait()
        self._errors.seek(0)
        last = " ".join(self._errors.read().decode(errors="replace").strip().splitlines()[-_LINES:])
        if code == -signal.SIGKILL and os.name == "posix":
            return OutOfMemory("out of memory: the system killed the process")
        if self._is_limited:  # libraries such as OpenMP's end a process that gets no memory
            return OutOfMemory(f"out of memory: the process ended with code {code} under its limit; it wrote: {last}")
        return WorkloadError(f"the process ended with code {code}; it wrote: {last or 'nothing'}")


def answer_calls() -> None:
    """In the process of a row: reads a task from stdin and answers each call that follows, at last with an error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a workload prints is no answer

    def say(said: object) -> None:
        pickle.dump(said, answers)
        answers.flush()

    task: Task = pickle.load(sys.stdin.buffer)
    try:
        torch.set_num_threads(task.threads)
        lane = Local(task.entry, Deal(task.origin.load(), task.device))
        say("ready")
        while True:
            try:
                what, given, named = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer = getattr(lane, what)(*given, **named)
            assert not (task.entry.peer and REGISTRY.kernels), "a session is open in the process of a peer"
            say(answer)
    except Exception as error:  # whatever a user's workload raises
        say(OutOfMemory(f"out of memory: {error}") if is_out_of_memory(error) else WorkloadError(reason(error)))
