"""A lock for state that a process has once; finalizers, which may run while anybody holds it, can use it too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class DeferringLock:
    """A reentrant lock for a `with`; work handed to `defer` while it is held is done just before it is released.

    Finalizers use `defer`. A finalizer that waited for the lock could wait for ever; one that took it could change what
    its own thread is using.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def defer(self, work: Callable[[], None]) -> None:
        """Runs `work` at once if nobody holds the lock, else just before the lock is released; never waits."""
        self._waiting.append(work)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._depth == 1 and self._waiting:
                self._waiting.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()
