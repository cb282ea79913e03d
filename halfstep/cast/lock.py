"""A lock for process-wide state; finalizers can use it too, even if they run while a thread holds it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class DeferringLock:
    """A reentrant lock, used in a `with` statement; finalizers pass their work to `defer`, which never waits.

    Work passed to `defer` while the lock is held is done just before the lock is released. A finalizer can run at any
    point of any thread. If it waited for the lock, it could wait forever. If its own thread held the lock, it could
    enter the lock again and change what the thread is using.
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
