"""The largest batch that fits: the search by hand, the limit with real processes, and what is said of both."""

import io
import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from halfstep.__main__ import app
from halfstep.errors import WorkloadError
from halfstep.explain.report.sweep import largest_sheet, sheet_text
from halfstep.formats import BF16, FP32
from halfstep.lab.bench import sweep as sweep_module
from halfstep.lab.bench.lane import OutOfMemory, Remote, Task
from halfstep.lab.bench.sweep import Asked, largest, largest_batches
from halfstep.lab.bench.variants import Entry
from halfstep.lab.workloads.load import load_workload
from halfstep.measurements import Largest
from tests.bench.test_sweep import Played

CPU = torch.device("cpu")
O0, O2 = Entry("O0", FP32, peer=False), Entry("O2", BF16, peer=False)
ASKED = Asked(("regression",), (), (O0, O2), 1, CPU, {"d_in": "4", "d_out": "4"})
MIB = 2**20
HUNGRY = """
import torch
from halfstep.lab.workloads.load import Regression


class Hungry(Regression):
    factor, more = 1, 1

    def loss(self, outputs, targets):
        taken = torch.ones(self.factor * len(outputs), 8 * 2**18)  # 8 MiB for each example
        self.factor *= self.more
        return super().loss(outputs, targets) + 0 * taken[0, 0]


def mine(batch="2", more="1"):
    job = Hungry(batch=int(batch), d_in=4, d_out=4)
    job.more = int(more)
    return job
"""


@pytest.fixture
def hungry(tmp_path):
    (tmp_path / "own.py").write_text(HUNGRY, encoding="utf-8")
    return replace(ASKED, models=(f"{tmp_path / 'own.py'}:mine",), settings={}, rows=(O0,))


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(sweep_module, "Remote", Played)
    monkeypatch.setattr(Played, "log", [])

    def fail(worker):
        if int(worker.settings["batch"]) > {"O0": 21, "O2": 40}[worker.name]:
            raise OutOfMemory("out of memory")

    monkeypatch.setattr(Played, "fail", fail)
    return Played


@pytest.mark.parametrize("edge", range(20))
def test_the_search_finds_the_edge_and_tries_none_twice(edge):
    tried = []
    assert largest(lambda size: tried.append(size) or size <= edge, most=1000) == edge
    assert len(tried) == len(set(tried)) <= 2 * max(1, edge).bit_length() + 1


def test_each_row_has_its_largest_batch_and_the_report_says_so(played):
    found = largest_batches(ASKED, 64 * MIB)
    assert [(each.name, each.batch) for each in found] == [("O0", 21), ("O2 bf16", 40)]
    assert dict(found[0].tried) == {1: True, 2: True, 4: True, 8: True, 16: True, 32: False, 24: False, 20: True,
                                    22: False, 21: True}  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    sheet = largest_sheet(found, ASKED.words(), "halfstep bench")
    console.print(sheet_text(sheet))
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("regression; cpu, ")
    assert lines[4].split() == ["regression", "O2", "bf16", "40", "1.90"]
    assert lines[-1] == "regression at O2 bf16 takes 40 examples per batch, 1.90 times those of O0."
    (chart,) = sheet.charts
    assert [(trace["x"], trace["y"]) for trace in chart.traces] == [(["regression"], [21]), (["regression"], [40])]
    assert largest_headline(found[:1]) == "No level takes a larger batch than O0."


def largest_headline(found):
    return largest_sheet(found, ASKED.words(), "halfstep bench").headline


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({"O0": 0, "O1": 4}, "m at O1 takes 4 examples per batch; O0 does not fit."),
        ({"O1": 4, "O2": 8}, "m at O2 takes 8 examples per batch."),
        ({"O0": 0, "O1": 0}, "No batch fits at any level."),
        ({"O0": 4, "O1": 4}, "No level takes a larger batch than O0."),
    ],
)
def test_the_sentence_says_so_where_o0_is_not_there_to_compare_with(batches, said):
    assert largest_headline([Largest("m", name, MIB, batch) for name, batch in batches.items()]) == said


def test_where_all_is_compiled_batches_count_in_those_of_the_compiled_o0():
    def found(**batches):
        return [Largest("m", name.replace("_", " "), MIB, batch) for name, batch in batches.items()]

    def shares(rows):
        return [cells[-1] for cells in largest_sheet(rows, ASKED.words(), "").rows]

    compiled = found(O0_compiled=20, O2_bf16_compiled=30)
    assert shares(compiled) == ["1.00", "1.50"]
    said = "m at O2 bf16 compiled takes 30 examples per batch, 1.50 times those of O0 compiled."
    assert largest_headline(compiled) == said
    both = found(O0=10, O0_compiled=20, O2_bf16=15)
    assert shares(both) == ["1.00", "2.00", "1.50"]
    assert shares(found(O0=0, O0_compiled=20)) == ["-", "-"]
    assert largest_headline(found(O0_compiled=0, O1_compiled=4)).endswith("; O0 compiled does not fit.")
    assert largest_headline(found(O0_compiled=4, O1_compiled=4)) == "No level takes a larger batch than O0 compiled."


def test_another_failure_is_a_row_with_an_error(played, monkeypatch):
    def fail(worker):
        raise WorkloadError("no such thing")

    monkeypatch.setattr(Played, "fail", fail)
    assert [(each.batch, each.error) for each in largest_batches(ASKED, MIB)] == [(None, "no such thing")] * 2


@pytest.mark.parametrize(("stopped", "batches", "shown"), [("O2", [21], True), ("O0", [], False)])
def test_ctrl_c_leaves_the_rows_that_are_whole(stopped, batches, shown, played, monkeypatch):
    search = Played.fail

    def stop(worker):
        if worker.name == stopped:
            raise KeyboardInterrupt
        search(worker)

    monkeypatch.setattr(Played, "fail", stop)
    assert [each.batch for each in largest_batches(ASKED, MIB)] == batches
    command = ["bench", "regression", "--largest-batch", "1MiB", "--levels", "O0,O2", "--low", "bf16", "--no-peer"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 130
    assert ("regression O0 21 1.00" in " ".join(done.output.split())) == shown


@pytest.mark.parametrize(
    ("change", "limit", "said"),
    [
        ({"batches": (4,)}, MIB, "leave out --batch-size"),
        ({"settings": {"batch": "4"}}, MIB, "leave out --batch-size"),
        ({}, 0, "a memory limit of at least 1 byte, got 0"),
    ],
)
def test_bad_input_is_refused(played, change, limit, said):
    with pytest.raises(WorkloadError, match=said):
        largest_batches(replace(ASKED, **change), limit)
    assert played.log == []


def test_a_limit_is_kept_by_the_process(hungry, forked):
    (model,) = hungry.models
    origin = replace(hungry, settings={"more": "10"}).origin(model, load_workload(model, {"batch": "4"}))
    with closing(Remote(Task(origin, O0, CPU))) as remote:
        remote.begin(0, limit=256 * MIB)
        assert remote.step(0, 2).loss > 0  # of 32 MiB
        with pytest.raises(OutOfMemory, match="out of memory"):
            remote.step(1, 2)  # of 320 MiB


@pytest.mark.slow
def test_the_largest_batch_is_that_of_the_limit(hungry, forked):
    (found,) = largest_batches(hungry, 256 * MIB)
    assert 16 <= found.batch < 32, found.tried  # 32 would take all of it, and libraries take up to 128 MiB


def test_the_command_writes_what_it_found(played, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    done = CliRunner().invoke(
        app,
        ["bench", "regression", "--largest-batch", "64MiB", "--levels", "O0,O2", "--low", "bf16", "--no-peer",
         "--json", str(path), "--page", str(tmp_path / "x.html")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [row["batch"] for row in json.loads(path.read_text(encoding="utf-8"))["largest"]] == [21, 40]
    assert "1.90 times those of O0" in (tmp_path / "x.html").read_text(encoding="utf-8")
