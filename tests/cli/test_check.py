"""`halfstep check`: what it prints, and how it ends."""

import json
from contextlib import nullcontext

import pytest

from halfstep import OpChange, edit_from_dict
from halfstep.cli import step

SMALL = ["--set", "d_in=8", "--set", "d_out=8", "--set", "batch=4"]
OWN = (
    "import torch\n"
    "from halfstep.lab.workloads.load import Regression\n"
    "class Planted(torch.nn.Linear):\n"
    "    def forward(self, x):\n"
    "        x = super().forward(x)\n"
    "        return {expression}\n"
    "class Own(Regression):\n"
    "    def build(self, seed): return torch.nn.Sequential(Planted(4, 4))\n"
    "def mine(): return Own(batch=2, d_in=4, d_out=4)\n"
)


def test_a_healthy_workload_ends_with_0(halfstep):
    code, out, err = halfstep("check", "regression", *SMALL, "--plan", "O2", "--low", "fp16", "--no-precision")
    assert (code, err) == (0, "")
    assert out == "regression under O2 in fp16: nothing found\n"


@pytest.mark.parametrize("command", ["check", "inspect"])
def test_products_are_an_option(halfstep, command):
    refused = halfstep(command, "regression", *SMALL, "--low", "fp8")[2]
    assert "keep --low bf16 and pass --products fp8" in refused
    code, _, err = halfstep(command, "regression", *SMALL, "--low", "bf16", "--products", "fp9", "--quiet")
    assert (code, "did you mean 'fp8'" in err) == (2, True)
    wide = ["--set", "d_in=32", "--set", "d_out=32", "--set", "batch=4"]
    assert halfstep(command, "regression", *wide, "--low", "bf16", "--products", "fp8", "--quiet")[0] == 0


def test_notes_end_with_0_and_progress_counts_forward_passes(halfstep, monkeypatch):
    seen = []
    monkeypatch.setattr(step, "activity", lambda what, quiet: nullcontext(seen.append))
    code, out, _ = halfstep("check", "regression", *SMALL, "--plan", "O3", "--low", "fp16")
    assert code == 0
    assert [line.rpartition(": ")[2] for line in seen] == ["forward pass 1", "forward pass 2"]
    assert "2 notes" in out
    assert "precision compared at (model)" in out


@pytest.mark.parametrize(
    ("expression", "code", "seen"),
    [
        ("x.masked_fill(x > 0, -1e9)", 1, "error: value beyond the format at 0, own.py:6 in forward"),
        ("x / (x.abs() + 1e-8)", 0, "warning: constant vanishes at 0, own.py:6 in forward"),
    ],
)
def test_errors_end_with_1_and_warnings_do_not(halfstep, tmp_path, expression, code, seen):
    (tmp_path / "own.py").write_text(OWN.format(expression=expression), encoding="utf-8")
    ended, out, err = halfstep("check", f"{tmp_path / 'own.py'}:mine", "--plan", "O2", "--low", "fp16")
    assert (ended, err) == (code, "")
    assert seen in out
    assert "edit: Rule('0', FULL)" in out or "plan.edit(OpChange" in out


def test_batches_may_be_a_list_as_for_the_other_commands(halfstep, tmp_path):
    listed = "    def batches(self, seed): return [(torch.ones(2, 4), torch.ones(2, 4))]\ndef mine()"
    own = OWN.format(expression="x").replace("def mine()", listed)
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    code, out, _ = halfstep("check", f"{tmp_path / 'own.py'}:mine", "--plan", "O2", "--low", "fp16", "--no-precision")
    assert (code, out) == (0, "Own under O2 in fp16: nothing found\n")


def test_the_findings_are_written_as_json_also_where_it_ends_with_1(halfstep, tmp_path):
    (tmp_path / "own.py").write_text(OWN.format(expression="x.masked_fill(x > 0, -1e9)"), encoding="utf-8")
    options = ["--plan", "O2", "--low", "fp16", "--no-precision", "--json", tmp_path / "x.json"]
    assert halfstep("check", f"{tmp_path / 'own.py'}:mine", *options)[0] == 1
    read = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert (read["plan"], read["low"]) == ("O2", "fp16")
    (finding,) = read["findings"]
    assert finding.keys() == {"severity", "code", "place", "evidence", "advice", "cure"}
    assert (finding["severity"], finding["code"]) == ("error", "value beyond the format")
    assert finding["cure"] == [{"edit": "op_change", "list": "deny", "op": "masked_fill"}]
    assert [edit_from_dict(edit) for edit in finding["cure"]] == [OpChange("deny", "masked_fill")]
    assert halfstep("check", "regression", *SMALL, "--json", tmp_path / "none.json")[0] == 0
    (compared,) = json.loads((tmp_path / "none.json").read_text(encoding="utf-8"))["findings"]
    assert (compared["severity"], compared["code"]) == ("note", "precision compared")
