"""The table in docs/apex.md: each row that says kept or fixed names tests that are there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "apex.md"


def rows():
    """Yields the rows of the table of apex.amp: what apex does, what halfstep does, the word, the tests."""
    table = PAGE.read_text().split("| apex | here | | test |\n")[1].split("\n\n")[0]
    for line in table.splitlines()[1:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0].startswith("**"):
            yield cells


def test_each_row_is_kept_fixed_or_not_applicable():
    found = list(rows())
    assert len(found) > 70
    assert [row for row in found if len(row) != 4 or row[2] not in ("kept", "fixed", "not applicable")] == []


@pytest.mark.parametrize("row", [row for row in rows() if row[2] != "not applicable"], ids=lambda row: row[0][:40])
def test_each_kept_or_fixed_row_names_tests_that_are_there(row):
    names = re.findall(r"`(\w+)\.(\w+)`", row[3])
    assert names
    for file, name in names:
        assert f"def test_{name}(" in (HERE / f"test_{file}.py").read_text()


def test_the_migration_page_casts_batch_norms_as_apex_did(amp, low):
    """Its words for `keep_batchnorm_fp32=False` are run here."""
    (line,) = [
        line for line in (PAGE.parent / "migration.md").read_text().splitlines() if "keep_batchnorm_fp32=False" in line
    ]
    rules = eval(re.search(r"`rules=(.*)` \|", line)[1])
    model, other = (nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)) for _ in range(2))
    with halfstep.initialize(model, plan="O2", low=low, rules=rules):
        amp.initialize(other, opt_level="O2", keep_batchnorm_fp32=False, verbosity=0)
        for norm in (model[1], other[1]):
            assert (norm.weight.dtype, norm.running_mean.dtype) == (low, low)
    assert model[1].weight.dtype is torch.float32


def test_the_migration_page_names_what_there_is():
    text = (PAGE.parent / "migration.md").read_text()
    assert len(set(re.findall(r"halfstep\.(\w+)", text))) > 5
    assert [name for name in re.findall(r"halfstep\.(\w+)", text) if not hasattr(halfstep, name)] == []
    assert [name for name in re.findall(r"session\.(\w+)", text) if not hasattr(halfstep.Session, name)] == []
    given = re.findall(r"`((?:loss_scale|master|rules|ops|norms|input)=[^`]+)`", text)
    given = [each.replace('"f"', '"sigmoid"') for each in given if "..." not in each and "module:" not in each]
    assert len(given) >= 7
    for keywords in given:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        settings = eval(f"dict({keywords})", {"halfstep": halfstep})
        halfstep.initialize(model, None, "O2", low="fp16", **settings).close()
