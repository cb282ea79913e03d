"""Turns at what the process has once: finalizers wait for nobody, and nobody is disturbed by one."""

import threading

import pytest

from halfstep.cast.turns import Turns


def test_work_is_done_at_once_where_nobody_has_a_turn():
    done = []
    Turns().later(lambda: done.append(1))
    assert done == [1]


def test_work_that_comes_in_ones_own_turn_is_done_at_its_end():
    turns, done = Turns(), []
    with turns:
        with turns:
            turns.later(lambda: done.append(1))
            assert done == []
        assert done == []
    assert done == [1]


def test_work_that_comes_with_other_work_is_done_after_it():
    turns, done = Turns(), []

    def work():
        turns.later(lambda: done.append("second"))
        done.append("first")

    with turns:
        turns.later(work)
    assert done == ["first", "second"]


def test_work_that_comes_in_anothers_turn_does_not_wait():
    turns, done = Turns(), []
    with turns:
        thread = threading.Thread(target=turns.later, args=(lambda: done.append(1),))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert done == []
    assert done == [1]


def test_work_that_fails_ends_the_turn():
    turns, done = Turns(), []
    with pytest.raises(ZeroDivisionError):
        turns.later(lambda: 1 / 0)
    turns.later(lambda: done.append(1))
    assert done == [1]
    thread = threading.Thread(target=turns.later, args=(lambda: done.append(2),))
    thread.start()
    thread.join(10)
    assert done == [1, 2]
