"""The code of the README and of docs/ runs as it stands there; links and quoted result files exist."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import halfstep
from halfstep.adapters.apex import uninstall
from halfstep.lab.workloads.load import load_workload

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# The blocks of each page, in order: Python, plan files, and what is printed. A new one fails here until it has a name,
# and then until a test runs or prints it. Commands (sh) are run by tests/cli/test_shown.py.
NAMES = {
    "README.md": ("first lines", "README's verdict"),
    "apex.md": ("apex",),
    "design.md": ("flow", "sweep"),
    "diagnosis.md": ("before", "rotary", "lost precision", "findings", "prediction", "blame", "verdict"),
    "fp8.md": ("products",),
    "guide.md": ("own workload", "plan", "average", "schedule"),
    "index.md": ("front",),
    "keras.md": ("keras fit", "keras tape", "keras modules"),  # run by tests/keras/test_page.py
    "mismatch.md": ("mixed", "mixed formats", "outside"),
    "nan.md": ("ask", "the tutorial's verdict"),
    "plans.md": ("plan file", "edited plan"),
    "processes.md": ("sharded", "pipeline", "load", "gathered"),
    "quickstart.md": ("loop", "evaluation", "checkpoint", "look", "end"),
    "slower.md": ("inspected",),
    "seeing.md": ("observe", "seeing"),
    "trainers.md": ("lightning", "fabric", "accelerate", "transformers"),
    "which-level.md": ("recommendation", "with units"),
}
DIAGRAMS = {"flow", "sweep"}
HERE = Path(__file__).parent
RUN_BY = (
    HERE / "test_readme.py",
    HERE / "cli/test_shown.py",
    HERE / "trainers/test_page.py",
    HERE / "keras/test_page.py",
)


def fences(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page: language and content."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> dict[str, str]:
    if page.name == "tutorial.md":  # rendered from examples/tutorial.py, see test_site.py
        return {}
    code = [content for language, content in fences(page) if language != "sh"]
    return dict(zip(NAMES.get(page.name, ()), code, strict=True))


def masked(text: str) -> str:
    """What is printed without its numbers, which are those of a machine."""
    return re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?", "#", text)


BLOCKS = {name: code for page in PAGES for name, code in blocks(page).items()}


def test_every_block_is_run():
    tests = "".join(path.read_text(encoding="utf-8") for path in RUN_BY)
    assert BLOCKS.keys() - set(re.findall(r'BLOCKS\["(.*?)"\]', tests)) == DIAGRAMS


def anchors(page: Path) -> set[str]:
    """The ids that a page's headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        of_page = anchor and target.suffix == ".md"  # not the mode of a picture
        assert not of_page or anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(torch.nn.functional.gelu(self.norm(self.body(inputs))))


def test_every_result_that_is_kept_is_quoted():
    results = ROOT / "benchmarks" / "results"
    kept = [*results.glob("*.json"), *results.glob("*/table.md")]
    told = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in kept if path.relative_to(results).as_posix() not in told] == []


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the pages take as given: a model, an optimizer, data, a loss, a schedule and a path."""
    monkeypatch.chdir(tmp_path)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    loader = [(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(6)]
    return {
        "torch": torch,
        "halfstep": halfstep,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "loss_fn": nn.functional.cross_entropy,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "evaluate": lambda model: sum(float((model(x).argmax(1) == y).float().mean()) for x, y in loader) / len(loader),
        "path": tmp_path / "checkpoint.pt",
    }


def backward(names):
    inputs, targets = names["loader"][0]
    names["session"].backward(names["loss_fn"](names["model"](inputs), targets))


def test_first_lines_train_save_resume_and_close(names):
    before = {name: value.clone() for name, value in names["model"].state_dict().items()}
    exec(BLOCKS["first lines"], names)
    after = names["model"].state_dict()
    assert all(value.dtype == torch.float32 for value in after.values())
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert type(names["model"]) is Model


def test_products_in_8_bits_are_told(names, capsys):
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(BLOCKS["products"], names)
    with names["session"] as session:
        session.backward(model(torch.ones(2, 32)).sum())
        session.step()
    assert "products: fp8-row in 0; bf16: the last Linear in 1" in capsys.readouterr().out


def test_plan_is_edited_saved_and_read(names):
    exec(BLOCKS["plan"], names)
    with names["session"] as session:
        backward(names)
        session.step()
        assert names["model"].head.weight.dtype == torch.float32
        assert names["model"].body.weight.dtype == torch.float16
        assert halfstep.load_plan("plan.toml") == session.plan


def test_a_failed_batch_gets_a_verdict_whose_edits_are_taken(names, capsys):
    names["inputs"], names["targets"] = torch.randn(4, 8), torch.randint(0, 4, (4,))
    with torch.no_grad():
        names["model"].head.weight.mul_(1e7)
    names["session"] = first = halfstep.initialize(names["model"], names["optimizer"], "O1", low="fp16", loss_scale=1.0)
    exec(BLOCKS["blame"], names)
    assert "overflow: linear in head" in capsys.readouterr().out
    assert first.closed
    with names["session"] as session:
        assert session.plan == first.plan.edit(*names["verdict"].cure)


GPT = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)

        scores = torch.matmul(q, k.mT)
        return torch.matmul(torch.softmax(scores / 8, -1), v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(64), Attention(), nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(65, 64), nn.Linear(64, 65)
        self.blocks = nn.Sequential(Block(), Block(), Block(), Block())

    def forward(self, numbers):
        return self.head(self.blocks(self.embed(numbers)))
"""


def test_the_verdict_of_the_pages_is_that_of_such_a_model(tmp_path):
    (tmp_path / "gpt.py").write_text(GPT, encoding="utf-8")
    made = {}
    exec(compile(GPT, str(tmp_path / "gpt.py"), "exec"), made)
    model = made["Net"]()
    with torch.no_grad():
        model.blocks[2].attn.qkv.weight[:128] *= 88  # of queries and keys
    numbers, targets = torch.randint(65, (8, 64)), torch.randint(65, (8, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:
        verdict = halfstep.blame(
            session, lambda: nn.functional.cross_entropy(model(numbers).flatten(0, 1), targets.flatten())
        )
    assert masked(f"{verdict}\n") == masked(BLOCKS["verdict"])
    assert BLOCKS["README's verdict"] == BLOCKS["verdict"]
    assert BLOCKS["the tutorial's verdict"] in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_lost_precision_is_found_as_the_page_shows():
    made = {"torch": torch, "nn": nn}
    exec(compile(BLOCKS["rotary"], "model.py", "exec"), made)
    model, x = nn.Sequential(nn.Linear(2, 2), made["Rotary"](), nn.Linear(2, 4)), torch.randn(128, 2)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2", low="bf16") as session:
        (finding,) = halfstep.check(session, lambda: model(x).square().mean())
    assert masked(f"{finding}\n") == masked(BLOCKS["lost precision"])


def test_a_probe_sees_the_gradients_of_the_steps_it_looks_at(names, capsys):
    def train(steps):
        for _ in range(steps):
            backward(names)
            names["session"].step()

    with halfstep.initialize(names["model"], names["optimizer"], "O1", low="bf16") as names["session"]:
        names["train"] = train
        exec(BLOCKS["observe"], names)
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        [step, module, name]
        for step in ("1", "50", "100")
        for module in ("body", "norm", "head")
        for name in ("weight", "bias")
    ]


def test_a_check_and_a_prediction_end_in_a_plan_that_trains(names, capsys):
    names["batches"] = iter(names["loader"])
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-2)
    exec(BLOCKS["before"], names)
    assert capsys.readouterr().out.startswith("note: precision compared"), "nothing is wrong in this model"
    with names["session"] as session:
        assert session.plan.scale == names["prediction"].scale("fp16").edit
        backward(names)
        assert not bool(session.step().skipped)


def test_average_follows_the_fp32_weights(names):
    with halfstep.initialize(names["model"], names["optimizer"], "O2", low="bf16") as session:
        names["session"] = session
        exec(BLOCKS["average"], names)
        backward(names)
        session.step()
        names["update"](names["average"], decay=0.0)
    assert all(torch.equal(names["average"][name], value) for name, value in names["model"].state_dict().items())


@pytest.mark.parametrize(("poison", "taken"), [(1.0, 1.0), (float("inf"), 0.0)])
def test_schedule_counts_only_steps_that_were_taken(names, poison, taken):
    with halfstep.initialize(names["model"], names["optimizer"], "O2", low="bf16") as names["session"]:
        inputs, targets = names["loader"][0]
        names["session"].backward(names["loss_fn"](names["model"](inputs), targets) * poison)
        exec(BLOCKS["schedule"], names)
    assert float(names["taken"]) == taken
    assert float(names["optimizer"].param_groups[0]["lr"]) == pytest.approx(3e-4 * taken / 100)


def test_seeing_the_run_writes_a_log_that_has_what_was_observed(names):
    exec(BLOCKS["seeing"], names)
    backward(names)
    names["session"].step()
    names["session"].close()
    names["log"].close()
    run = halfstep.read_log("run.jsonl")
    assert [values.step for values in run.steps] == [1]
    assert run.observed == (1,)


def test_a_loop_in_apex_form_trains_and_ends_as_an_ordinary_model(names):
    before = names["model"].state_dict()["head.weight"].clone()
    try:
        exec(BLOCKS["apex"], names)
        assert names["model"].head.weight.dtype == torch.float16
    finally:
        uninstall()
    assert type(names["model"]) is Model
    assert not torch.equal(names["model"].head.weight, before)
    assert "apex" not in sys.modules


def test_a_stage_of_a_pipeline_trains(names, process_group):
    names["stage"], names["device"] = names["model"], torch.device("cpu")
    names |= {"rank": 0, "stages": 1}
    before = [p.detach().clone() for p in names["stage"].parameters()]
    exec(BLOCKS["pipeline"], names)
    assert not all(map(torch.equal, before, names["stage"].parameters()))


def test_a_sharded_model_trains(names, process_group):
    names["model"].blocks = [names["model"].body]
    with torch.random.fork_rng():
        exec(BLOCKS["sharded"], names)
    with names["session"] as session:
        assert session.status().steps == len(names["loader"])
        assert session.status().skipped == 0


def test_the_front_page_trains(names):
    before = names["model"].state_dict()["head.weight"].clone()
    lines = BLOCKS["front"].splitlines()
    exec("\n".join(line[1:] for line in lines if not line.startswith("-")), names)
    with names["session"]:
        assert not torch.equal(names["model"].state_dict()["head.weight"], before)


def test_the_quickstart_trains_evaluates_resumes_looks_and_closes(names, capsys):
    exec(BLOCKS["loop"], names)
    exec(BLOCKS["evaluation"], names)
    exec(BLOCKS["checkpoint"], names)
    exec(BLOCKS["look"], names)
    exec(BLOCKS["end"], names)
    assert names["session"].status().steps == len(names["loader"])
    assert 0 <= names["accuracy"] <= 1
    assert capsys.readouterr().out.startswith("note: precision compared"), "nothing is wrong in this model"
    assert type(names["model"]) is Model


def test_a_batch_that_fails_is_explained(names, capsys):
    names["inputs"], names["targets"] = torch.randn(4, 8), torch.randint(0, 4, (4,))
    with torch.no_grad():
        names["model"].head.weight.mul_(1e7)
    with halfstep.initialize(names["model"], names["optimizer"], "O1", low="fp16") as names["session"]:
        exec(BLOCKS["ask"], names)
    assert "overflow: linear in head" in capsys.readouterr().out


FLOW = """\
import torch
from torch import nn


@torch.library.custom_op("halfstep_page::warp", mutates_args=())
def warp(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    if x.dtype != grid.dtype:
        raise RuntimeError("expected scalar type Half but found Float")
    return x * grid


warp.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: None)


class Warp(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        grid = torch.ones(8)
        return warp(x, grid)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.warp, self.head = Warp(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.warp(x))

    def project(self, hidden):
        return nn.functional.linear(hidden, self.head.weight)
"""


def test_torch_s_error_of_integers_stays_as_it_is():
    class Scored(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.multi_margin_loss(super().forward(x), torch.zeros(2, dtype=torch.int32))

    model = Scored(4, 4)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="bf16")
    with session, pytest.raises(RuntimeError, match="expected scalar type Long") as raised:
        model(torch.ones(2, 4))
    assert "mismatch.md" not in str(raised.value)


def test_two_formats_in_an_operation_of_ones_own_and_outside_of_forward(names, tmp_path, capsys):
    made = {}
    exec(compile(FLOW, str(tmp_path / "flow.py"), "exec"), made)
    model = names["model"] = made["Net"]()
    optimizer = names["optimizer"] = torch.optim.AdamW(model.parameters())
    names["inputs"], names["targets"] = names["loader"][0]
    names["session"] = halfstep.initialize(model, optimizer, "O2", low="fp16")
    with pytest.raises(RuntimeError, match=r"got two formats in a forward.*halfstep\.check.*more: docs/mismatch\.md"):
        model(names["inputs"])
    exec(BLOCKS["mixed"], names)
    assert capsys.readouterr().out == BLOCKS["mixed formats"]
    names["session"] = halfstep.initialize(model, optimizer, names["session"].plan.edit(*names["findings"][0].cure))
    backward(names)
    names["hidden"] = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"Net\.project: .*session\.autocast.*more: docs/mismatch\.md"):
        model.project(names["hidden"])
    exec(BLOCKS["outside"], names)
    assert names["logits"].dtype is torch.float16


def test_a_step_is_inspected(names, capsys):
    names["inputs"], names["targets"] = names["loader"][0]
    with halfstep.initialize(names["model"], names["optimizer"], "O1", low="bf16") as names["session"]:
        exec(BLOCKS["inspected"], names)
    printed = capsys.readouterr().out
    assert printed.startswith("a step at O1 in bf16: ")
    assert len(printed) < 3000, "it is read in a terminal"


def test_an_edited_plan_is_what_the_session_says(names, capsys):
    exec(BLOCKS["edited plan"], names)
    with names["session"] as session:
        assert "rule 'head'" in capsys.readouterr().out
        assert session.plan.scale == halfstep.Scaling("dynamic", init=1024, min=1.0)


def test_the_plan_file_of_the_page_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(BLOCKS["plan file"], encoding="utf-8")
    plan = halfstep.load_plan(path)
    full = halfstep.level("O2", "fp16").edit(
        halfstep.Rule("blocks.*.attn", halfstep.FULL),
        halfstep.Rule("type:GroupNorm", halfstep.FULL),
        halfstep.OpChange("deny", "gelu"),
        halfstep.OpChange("allow", "einsum"),
        halfstep.Scaling("dynamic", init=1024.0, min=1.0),
    )
    assert plan == full


def test_a_sharded_model_is_loaded_from_a_distributed_checkpoint(names, process_group):
    names["model"].blocks = [names["model"].body]
    with torch.random.fork_rng():
        exec(BLOCKS["sharded"], names)
    names |= {"copy": copy, "dcp": dcp, "get_state_dict": get_state_dict, "set_state_dict": set_state_dict}
    with names["session"] as session:
        weights, states = get_state_dict(names["model"], names["optimizer"])
        saved = {"model": weights, "optimizer": states, "session": session.state_dict()}
        dcp.save(saved, checkpoint_id=names["path"])
        before = {name: t.full_tensor().clone() for name, t in names["model"].state_dict().items()}
        backward(names)
        session.step()
        exec(BLOCKS["load"], names)
        assert session.status().steps == len(names["loader"])
        assert all(torch.equal(t.full_tensor(), before[name]) for name, t in names["model"].state_dict().items())


def test_a_sharded_model_is_blamed_on_a_gathered_copy(names, process_group):
    names["model"].blocks = [names["model"].body]
    with torch.random.fork_rng():
        exec(BLOCKS["sharded"], names)
    names |= {"GPT": Model, "inputs": torch.full((4, 8), torch.nan), "targets": torch.zeros(4, dtype=torch.long)}
    with names["session"]:
        exec(BLOCKS["gathered"], names)
    assert names["verdict"].kind == "input data"


def test_a_workload_of_ones_own_is_taken(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(BLOCKS["own workload"], encoding="utf-8")
    workload = load_workload(f"{path}:mine")
    inputs, targets = next(workload.batches(0))
    loss = workload.loss(workload.build(0)(inputs), targets)
    assert loss.isfinite()
    assert workload.evaluate(workload.build(0)).keys() == {"loss"}
