"""Runs random settings through this checkout and through another commit; bits, plans and words must be the same.

    python tests/against.py COMMIT [--runs 40] [--seed 0] [--no-faults]

Each side has a process of its own, with its own `halfstep` and the models and faults of this checkout's tests. A run
draws a model, a level, a format, an optimizer, accumulation, clipping, losses, an overflow and a resume, and tells the
weights, the optimizer's state, the loss scale and the status after each step, tensors as hashes. This checkout resumes
from the plan and the states that the other one saved. Then blame's verdict on each planted fault is told word for word.
Prints the first thing that differs in each run, and returns 1 if anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
HOUSE_0 = "fed6a7d"  # the commit at which the house begins to be redrawn
STEPS = 6
OPTIMIZERS = ("AdamW", "Adam amsgrad", "SGD", "SGD nesterov", "Lion", "NovoGrad", "Lamb", "RMSprop")
LSTM = 3  # the task whose model has no norm, which a rule would name


def setting(seed: int) -> dict[str, Any]:
    """Returns the setting of a run; the same in both processes."""
    draw = random.Random(seed)
    task, level = draw.randrange(6), draw.choice(["O0", "O1", "O1", "O2", "O2", "O3"])
    return {
        "seed": seed,
        "task": task,
        "level": level,
        "low": draw.choice(["bf16", "fp16"]),
        "optimizer": draw.choice(OPTIMIZERS),
        "stepping": draw.choice(["session", "session", "optimizer"]),
        "accumulate": draw.choice([1, 1, 2]),
        "max_norm": draw.choice([None, 1.0]),
        "losses": draw.choice([1, 1, 2]),
        "overflow": draw.choice([None, draw.randrange(STEPS)]),
        "resume": draw.choice([None, draw.randrange(1, STEPS)]),
        "rule": None if task == LSTM or level == "O0" else draw.choice([None, "full", "low"]),
        "groups": draw.choice([False, True]),
    }


def optimizer_of(name: str, groups: list[dict[str, Any]]) -> Any:
    """Returns an optimizer of the parameter groups."""
    import torch

    import halfstep

    kind, _, option = name.partition(" ")
    given = {"amsgrad": {"amsgrad": True}, "nesterov": {"momentum": 0.9, "nesterov": True}}.get(option, {})
    found = getattr(halfstep, kind, None) or getattr(torch.optim, kind)
    return found(groups, lr=1e-2, **given)


def digest(value: Any) -> str:
    """Returns a short hash of the bits of tensors, and of the text of all else."""
    import torch

    held = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            held.update(f"{each.dtype}{tuple(each.shape)}".encode())
            held.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(each, dict):
            for key in sorted(each, key=str):
                held.update(str(key).encode())
                add(each[key])
        elif isinstance(each, (list, tuple)):
            for item in each:
                add(item)
        else:
            held.update(repr(each).encode())

    add(value)
    return held.hexdigest()[:12]


def trained(given: dict[str, Any], folder: Path, load: bool) -> Iterator[Any]:
    """Yields what one run tells: its plan, then each step; saves what a resume needs in the folder, or loads it."""
    import torch

    import halfstep
    from tests.models.zoo import TASKS

    task = list(TASKS.values())[given["task"]]
    batches = task.batches(STEPS * given["accumulate"])
    rules = {"full": [halfstep.Rule("*norm*", halfstep.FULL)], "low": [halfstep.Rule("*norm*", halfstep.LOW)]}

    kept = folder / f"{given['seed']}.toml"
    plan = halfstep.level(given["level"], given["low"]).edit(*rules.get(given["rule"], []))

    def opened(plan: Any) -> tuple[Any, Any, Any]:
        torch.manual_seed(given["seed"])
        model = task.build()
        weights = list(model.parameters())
        groups = [{"params": weights[::2]}, {"params": weights[1::2], "weight_decay": 0.1}]
        optimizer = optimizer_of(given["optimizer"], groups if given["groups"] else [{"params": weights}])
        return model, optimizer, halfstep.initialize(model, optimizer, plan, stepping=given["stepping"])

    model, optimizer, session = opened(plan)
    yield {name: repr(value) for name, value in vars(session.plan).items()}
    for step in range(STEPS):
        if step == given["resume"]:
            saved = [each.state_dict() for each in (model, optimizer, session)]
            if not load:
                torch.save(saved, kept.with_suffix(".pt"))
                halfstep.save_plan(session.plan, kept)
            session.close()
            model, optimizer, session = opened(halfstep.load_plan(kept))
            saved = torch.load(kept.with_suffix(".pt"))
            for each, state in zip((model, optimizer, session), saved, strict=True):
                each.load_state_dict(state)
        optimizer.zero_grad()
        for batch in batches[step * given["accumulate"] : (step + 1) * given["accumulate"]]:
            for number in range(given["losses"]):
                loss = task.loss(model, batch) / given["accumulate"]
                session.backward(loss * (torch.inf if step == given["overflow"] else 1.0), loss_id=number)
        if given["stepping"] == "session":
            session.step(max_norm=given["max_norm"])
        else:
            optimizer.step()
        status = session.status()
        told = {k: repr(v) for k, v in asdict(status).items() if "bytes" not in k and "seconds" not in k}
        yield step, float(loss), digest(model.state_dict()), digest(optimizer.state_dict()["state"]), told
    session.close()
    yield "closed", digest(model.state_dict())


def verdicts() -> Iterator[Any]:
    """Yields blame's verdict on each planted fault."""
    import torch

    import halfstep
    from tests.diagnose.faults.hosts import targets
    from tests.diagnose.faults.table import FAULTS
    from tests.diagnose.faults.unplanned import UNPLANNED

    for fault in (*FAULTS, *UNPLANNED):
        if fault.compiled or fault.stale:
            continue
        torch.manual_seed(1)
        model, inputs, labels = fault.model(), fault.inputs(), targets()
        fault.breaks(model)
        inputs = inputs if fault.spoils is None else fault.spoils(inputs)
        plan = halfstep.level(fault.plan, fault.low)
        options = dict(fault.options)
        if "loss_scale" in options:
            plan = plan.edit(replace(plan.scale, kind="static", init=options.pop("loss_scale")))
        session = halfstep.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan, **options)
        loss, called = fault.loss, model
        yield fault.name, str(halfstep.blame(session, lambda m=called, x=inputs, f=loss, y=labels: f(m(x), y)))
        session.close()


def tell(runs: list[int], faults: bool, folder: Path, load: bool) -> None:
    """Prints a line of JSON for each thing that a process found."""
    import logging
    import warnings

    import torch

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in runs:
        given = setting(seed)
        try:
            for number, each in enumerate(trained(given, folder, load)):
                print(json.dumps([f"run {seed}, {number}", each]), flush=True)
        except Exception as error:  # words are compared too
            print(json.dumps([f"run {seed}, error", f"{type(error).__name__}: {error}"]), flush=True)
    for name, said in verdicts() if faults else ():
        print(json.dumps([f"fault {name}", said]), flush=True)


def ask(package: Path, arguments: list[str], room: Path) -> dict[str, Any]:
    """Returns what a process tells whose `halfstep` is this package, and whose tests are those of this checkout."""
    (room / "halfstep").symlink_to(package)
    paths = os.pathsep.join([str(room), str(HERE)])
    program = "import sys; sys.path.remove(''); from tests.against import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, cwd=room, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def alike(before: Any, after: Any) -> bool:
    """Tells whether both sides told the same; of fields that one side lacks, nothing."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(before[name] == after[name] for name in before.keys() & after.keys())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(alike, before, after))
    return repr(before) == repr(after)  # a NaN too


def compare(commit: str, runs: int, seed: int, faults: bool) -> int:
    """Prints what differs between this checkout and a commit; returns how many things do."""
    with tempfile.TemporaryDirectory() as folder:
        other, rooms = Path(folder) / "other", [Path(folder) / "a", Path(folder) / "b"]
        subprocess.run(["git", "-C", HERE, "worktree", "add", "--quiet", "--detach", other, commit], check=True)
        try:
            for loops in (HERE / "halfstep").rglob("loops-*.so"):  # each is named after its sources
                if (place := other / loops.parent.relative_to(HERE)).is_dir():
                    shutil.copy(loops, place)
            if (other / "hatch_build.py").exists():  # of other sources, which the other side has to build
                subprocess.run([sys.executable, other / "hatch_build.py"], stdout=subprocess.DEVNULL, check=True)
            for room in rooms:
                room.mkdir()
            arguments = ["--tell", "--runs", str(runs), "--seed", str(seed), *([] if faults else ["--no-faults"])]
            arguments += ["--folder", folder]
            before = ask(other / "halfstep", arguments, rooms[0])
            after = ask(HERE / "halfstep", [*arguments, "--load"], rooms[1])
        finally:
            subprocess.run(["git", "-C", HERE, "worktree", "remove", "--force", other], check=True)
    differs: dict[str, str] = {}  # by run or fault: the first thing
    for key in {**before, **after}:
        if not alike(before.get(key), after.get(key)):
            differs.setdefault(key.partition(",")[0], key)
    for name, key in differs.items():
        print(f"{key}\n  before {before.get(key)}\n  now    {after.get(key)}")
        if name.startswith("run"):
            print(f"  setting {setting(int(name.split()[1]))}")
    for key in (key for key in before if key.endswith("error")):
        print(f"{key}: {before[key]}")
    print(f"{len(before)} things of {runs} runs, faults {'too' if faults else 'left out'}: {len(differs)} differ")
    return len(differs)


def main(arguments: list[str]) -> int:
    """Compares, or tells what this process found; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default=HOUSE_0, help=f"what to compare with; {HOUSE_0} if left out")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-faults", action="store_true", help="leave out the verdicts, which take longest")
    for hidden in ("--tell", "--load"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.tell:
        tell(list(range(given.seed, given.seed + given.runs)), not given.no_faults, given.folder, given.load)
        return 0
    return 1 if compare(given.commit, given.runs, given.seed, not given.no_faults) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
