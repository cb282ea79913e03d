"""Taking turns at what the process has once, also with finalizers, which may come in the middle of anybody's turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Turns:
    """A lock for a `with`, to be had again inside; what finalizers hand to `later` is done at the end of a turn.

    A finalizer that waited for the lock could wait for ever, and one that did not could change what its own thread is
    just going through.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def later(self, work: Callable[[], None]) -> None:
        """Does this at once where nobody has a turn, else at the end of the turn."""
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
