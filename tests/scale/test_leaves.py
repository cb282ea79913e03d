"""Gradients of leaves that are in no optimizer of a session."""

import torch

from halfstep.train.scale.loss import leaves_of, unscaled_leaves


def test_leaves_are_those_that_autograd_writes_to_each_once():
    w, x, constant = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    loss = (w * x + w * constant).sum()
    assert {id(leaf) for leaf in leaves_of([loss, loss * 2])} == {id(w), id(x)}
    assert [leaf is w for leaf in leaves_of([w])] == [True]


def test_what_a_scaled_pass_adds_is_divided_and_what_was_there_is_not():
    w, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    w.grad, other.grad = torch.full((2,), 5.0), torch.full((2,), 5.0)
    scale = torch.tensor(1024.0)
    loss = (3 * w + 7 * other).sum()
    with unscaled_leaves([loss], scale, but={id(other)}):
        (loss * scale).backward()
    assert torch.equal(w.grad, torch.full((2,), 8.0))
    assert torch.equal(other.grad, torch.full((2,), 5.0 + 7 * 1024))
    (w * 2).sum().backward()  # the hook is gone
    assert torch.equal(w.grad, torch.full((2,), 10.0))
