"""A lock for what the process has once: finalizers wait for nobody, and nobody is disturbed by one."""

import threading

import pytest

from halfstep.train.cast.opregistry import DeferringLock


def test_work_is_done_at_once_if_nobody_holds_the_lock():
    done = []
    DeferringLock().defer(lambda: done.append(1))
    assert done == [1]


def test_work_deferred_by_the_holder_is_done_at_release():
    lock, done = DeferringLock(), []
    with lock:
        with lock:
            lock.defer(lambda: done.append(1))
            assert done == []
        assert done == []
    assert done == [1]


def test_work_that_comes_with_other_work_is_done_after_it():
    lock, done = DeferringLock(), []

    def work():
        lock.defer(lambda: done.append("second"))
        done.append("first")

    with lock:
        lock.defer(work)
    assert done == ["first", "second"]


def test_work_deferred_by_another_thread_does_not_wait():
    lock, done = DeferringLock(), []
    with lock:
        thread = threading.Thread(target=lock.defer, args=(lambda: done.append(1),))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert done == []
    assert done == [1]


def test_work_that_fails_releases_the_lock():
    lock, done = DeferringLock(), []
    with pytest.raises(ZeroDivisionError):
        lock.defer(lambda: 1 / 0)
    lock.defer(lambda: done.append(1))
    assert done == [1]
    thread = threading.Thread(target=lock.defer, args=(lambda: done.append(2),))
    thread.start()
    thread.join(10)
    assert done == [1, 2]
