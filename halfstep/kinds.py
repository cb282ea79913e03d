"""The kinds of fault: one row each, with what is said of it, advised, tried and shown."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

_By: TypeAlias = tuple[Literal["format", "scale"], ...]
_Focus: TypeAlias = tuple[str, ...]


class Kind(str, Enum):
    """The kind of failure that a verdict is about; each member is a string and prints as its value."""

    sentence: str  # for the headline of a log; {operator}, {place}, {format}, {backward}: of the verdict
    advice: str  # if it depends on the kind alone, as where no operation is at fault
    cured_by: _By  # what may cure it: a wider format, or a lower loss scale
    focus: _Focus  # the kinds of tensors that a page shows first; (): those of the pass

    def __new__(cls, value: str, sentence: str, advice: str = "", cured_by: _By = (), focus: _Focus = ()) -> Kind:
        """Makes a member of its row."""
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.sentence, kind.advice, kind.cured_by, kind.focus = sentence, advice, cured_by, focus
        return kind

    # overflow in backward that vanishes at a lower scale
    SCALE_TOO_HIGH = "scale too high", "the loss scale is too high for {operator} in {place}"
    # finite inputs, a result beyond the format
    OVERFLOW = "overflow", "{operator} in {place} overflows in {format}{backward}", "", ("format", "scale")
    # 0/0, inf-inf, the log of zero, an eps that rounded to zero
    INVALID = "invalid", "{operator} in {place} has no finite result{backward}", "", ("format", "scale")
    # a softmax over a row that a mask has left without a finite entry
    MASKED_ROW = "masked row", "{operator} in {place} gets a row that is masked throughout", "", ("format",)
    INPUT_DATA = (
        "input data",
        "the input data of {place} are not finite",
        "clean the batch before it reaches the model (torch.nan_to_num with posinf=0 and neginf=0), or drop the sample",
    )
    WEIGHTS = (
        "weights",
        "weights of {place} are not finite",
        "load the last checkpoint whose weights are finite, and find the step after which they are not (likely causes: "
        "a learning rate that is too high or NaN, or an optimizer whose eps is 0)",
        (),
        ("weight",),
    )
    # an error that low results of operations lead to, though all are finite
    ERROR = "error", "what {operator} in {place} gives in {format} leads to an error{backward}", "", ("format",)
    # left from an earlier step
    STALE_GRADIENTS = (
        "stale gradients",
        "gradients of an earlier step that are not finite were never zeroed",
        "call optimizer.zero_grad() before each backward pass: a non-finite gradient stays non-finite, whatever is "
        "added to it",
    )
    # what other processes sent is not finite, what this one computed is
    ANOTHER_PROCESS = (
        "another process",
        "another process sent values that are not finite",
        "see the verdicts of the other processes: the fault is in one of them, or in its batch",
    )

    # no value is infinite, but results are far from those in fp32; found by comparing, not by blame
    PRECISION_LOST = "precision lost", "{operator} in {place} loses precision in {format}", "", ("format",)

    __str__ = str.__str__
