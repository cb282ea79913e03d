"""Models sharded by FSDP2: they train as unsharded ones that read low-rounded weights, and all processes agree."""

from __future__ import annotations

import json
import math
import re
import time

import pytest
import torch

import halfstep
from halfstep.train.cast.recipes import RECIPES
from tests import forks, replicas, sharded
from tests.sharded import LEVELS, LOWS

ULP = 2.0**-22  # of a loss between 2 and 4
STEPS = 5
SETTINGS = [(level, low) for level in LEVELS for low in LOWS]
FAULTS = ("loss", "batch", "gradient", "shard")
VARIANTS = {
    "tied": {"made_with": {"tied": True}},
    "frozen": {"made_with": {"frozen": True}},
    "again": {"again": True},
    "kept whole": {"reshard_after_forward": False},
    "kept in parts": {"reshard_after_forward": 1},
    "reduced late": {"shares": 2, "sync": False},
    "reduced each time": {"shares": 2, "sync": True},
    "foreign": {"optimizer": sharded.foreign},
}
SAME_BITS = ("again", "kept whole", "kept in parts")
CASES = {
    **{f"{level} {low}": (sharded.halved, (level, low, STEPS)) for level, low in SETTINGS},
    **{f"O2 {low} {name}": (sharded.variant, ("O2", low, kwargs)) for name, kwargs in VARIANTS.items() for low in LOWS},
    **{f"O2 {low} plain": (sharded.variant, ("O2", low, {})) for low in LOWS},
    **{f"{level} bf16 sent": (sharded.sent, (level, "bf16")) for level in ("O0", *LEVELS)},
    **{f"{level} bf16 between": (sharded.between, (level, "bf16")) for level in LEVELS},
    **{f"{level} fp16 {what}": (sharded.faulty, (level, "fp16", what)) for level in ("O1", "O2") for what in FAULTS},
}
PARALLEL = [("O0", "bf16"), *((level, low) for level in ("O1", "O2") for low in LOWS)]
CASES |= {
    **{f"{level} bf16 hybrid": (sharded.hybrid, (level, "bf16")) for level in ("O1", "O2")},
    **{f"{level} bf16 plain": (sharded.variant, (level, "bf16", {})) for level in ("O1", "O2")},
    **{f"{level} {low} parallel": (sharded.parallel, (level, low, "alone")) for level, low in PARALLEL},
    "stopping": (sharded.stopping, ()),
    **{f"undefined {low}": (sharded.undefined, (low, kind)) for low, kind in (("bf16", "root"), ("fp16", "layers"))},
    **{what: (sharded.differing, (what,)) for what in ("plan", "O0", "optimizer", "gathering", "reducing", "raising")},
    **{f"{engine} hook": (sharded.hooked, (engine,)) for engine in ("DDP", "FSDP2")},
    "blame": (sharded.refused, ("blame",)),
    "check": (sharded.refused, ("check",)),
    **{f"gathered {what}": (sharded.gathered, (what,)) for what in sharded.ASKS},
    "gathered tensor": (sharded.gathered, ("blame", "tensor")),
    "not gathered": (sharded.not_gathered, ()),
}
CODED = (0,), (1,)
CASES |= {f"coded {dims}": (sharded.coded, ("8bit", *dims)) for dims in CODED}
USES = (
    ("fp8", "fsdp"),
    ("nvfp4", "fsdp"),
    ("fp8", "own"),
    ("fp8-row", "own"),
    ("fp8-row", "ddp"),
    ("fp8-row", "odd"),
    *((name, "tp") for name in RECIPES),
)
CASES |= {f"recipe {how}": (sharded.by_recipe, how) for how in USES}
CASES |= {f"parts by {name}": (sharded.parts_cast, (name,)) for name in RECIPES}
CASES |= {f"muon {dims}": (sharded.coded, ("muon", *dims)) for dims in CODED}
PARTS = ("O1", "bf16"), ("O2", "fp16")
CASES |= {f"loss {level} {low}": (sharded.loss_of_parts, (level, low)) for level, low in PARTS}
CASES |= {f"{level} summed": (sharded.summed, (level,)) for level in LEVELS}
CASES |= {f"unfrozen {what}": (sharded.unfrozen, ("O2", what == "group")) for what in ("weight", "group")}
SLOW_CASES = ("O1 bf16", "O2 fp16", "O3 bf16", "O3 fp16", "O1 fp16 full", "truncated", "gathered blame")
SAVED = [("O1", "fp16"), ("O2", "bf16"), ("O3", "bf16")]
FORMS = ("dcp", "full")
CUT = ("missing", "truncated")


def checkpoints(folder, *, save):
    """Returns the cases that save to, or only load from, a folder."""
    cases = {}
    for level, low in SAVED:
        where = folder / f"{level} {low}"
        where.mkdir(exist_ok=True)
        if save:
            cases[f"{level} {low} saved"] = (sharded.saved, (level, low, str(where)))
        for form in FORMS:
            cases[f"{level} {low} {form}"] = (sharded.loaded, (level, low, str(where), form, "sharded"))
    return cases


def coded_checkpoint(folder):
    where = str(folder / "8bit")
    return {
        "8bit saved": (sharded.saved, ("O2", "bf16", where, "8bit")),
        "8bit loaded": (sharded.loaded, ("O2", "bf16", where, "dcp", "sharded", "8bit")),
    }


def pooled(folder, slow):
    cut = {how: (sharded.cut_short, (str(folder / how), how)) for how in CUT}
    (folder / "8bit").mkdir(exist_ok=True)
    cases = CASES | checkpoints(folder, save=True) | coded_checkpoint(folder) | cut
    return {name: case for name, case in cases.items() if slow or not name.startswith(SLOW_CASES)}


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.slow_but("O1-fp16")
def test_one_process_trains_as_an_unsharded_model_that_reads_low_rounded_weights(
    level, low, process_group, monkeypatch
):
    optimizer = sharded.adamw
    if level != "O1" and low == "bf16":  # the reference stores ties away from zero, and FSDP2 gathers them to even
        optimizer = sharded.foreign
        monkeypatch.setattr("halfstep.train.optim.masters.round_half_away", torch.Tensor.to)
    losses, norms, weights, *_ = sharded.trained(0, level, low, STEPS, exact=level == "O2", optimizer=optimizer)
    assert (losses, norms, weights) == sharded.plain(level, low, STEPS, optimizer=optimizer)


@pytest.mark.slow_but("O2-bf16")
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_train_as_one_with_two_micro_batches(level, low, found, process_group):
    one, other = (each[f"{level} {low}"] for each in found)
    assert one == other
    losses, norms, *_, scales, skipped = sharded.halved(0, level, low, STEPS, shares=2)
    assert ({str(key): scale for key, scale in scales.items()}, skipped) == tuple(one[3:])
    assert max(abs(a - b) for a, b in zip(losses, one[0], strict=True)) <= 4 * ULP
    assert one[1] == pytest.approx(norms, rel=1e-6)


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_alike_in_all_processes(name, low, found):
    one, other = (each[f"O2 {low} {name}"] for each in found)
    assert one == other
    base = found[0][f"O2 {low} plain"]
    if name in SAME_BITS:
        assert one == base
    elif name.startswith("reduced"):
        assert one[0] == pytest.approx(base[0], rel=2e-3)  # other roundings: of halves of the batches
    else:
        assert one[2] != base[2]


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("low", LOWS)
def test_gradients_that_wait_add_up_in_fp32_as_those_that_were_reduced(low, found):
    late, at_once = (found[0][f"O2 {low} reduced {when}"] for when in ("late", "each time"))
    assert late[0] == pytest.approx(at_once[0], abs=4 * ULP)


@pytest.mark.slow_but("[O2")
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_sends_one_vector_and_reads_nothing_on_the_host(level, found):
    for each in found:
        in_step, _, parameters, reads, _, _ = each[f"{level} bf16 sent"]
        assert in_step == [["c10d::allreduce_", 8 * (1 + math.ceil((parameters + 64) / 26) + 2)]]  # counts of 2 bits
        assert reads == 0


@pytest.mark.slow_but("[O2")
@pytest.mark.parametrize("level", LEVELS)
def test_gathers_send_half_of_the_bytes_of_fp32(level, found):
    for each in found:
        full, low = (
            [(name, size) for name, size in each[f"{key} bf16 sent"][1] if "allgather" in name] for key in ("O0", level)
        )
        assert [name for name, _ in low] == [name for name, _ in full]
        assert len(full) > 0
        assert 2 * sum(size for _, size in low) == sum(size for _, size in full)


@pytest.mark.slow_but("[O2")
@pytest.mark.parametrize("level", LEVELS)
def test_a_process_holds_sixteen_bytes_for_each_of_its_elements(level, found):
    for each in found:
        *_, memory, here = each[f"{level} bf16 sent"]
        steps = 4 * 18  # of each parameter a count
        assert memory == {"weights": 4 * here, "masters": 0, "gradients": 4 * here, "optimizer": 8 * here + steps}


@pytest.mark.slow_but("[O2")
@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_and_closing(level, found):
    (one, losses), (other, same) = (each[f"{level} bf16 between"] for each in found)
    assert one == other == [True, True, True, True, True, []]
    assert losses == same
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[-1] < losses[1]


@pytest.mark.slow_but("[O1")
@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_all_skip_what_one_process_spoils(level, what, found):
    one, other = (each[f"{level} fp16 {what}"] for each in found)
    assert one == other
    skips, (names, processes, unchanged), scales, _ = one
    assert skips == [False, True, False, False]
    assert unchanged
    assert processes == ([1] if what in ("loss", "batch") else [])
    if what == "shard":
        assert names == ["blocks.1.up.weight"]
    assert bool(names) == (what != "loss")
    init = halfstep.level(level, "fp16").scale.init
    assert scales == {"0": init if what in ("loss", "batch") else init / 2}


@pytest.mark.slow_but("O1-fp16-dcp", "O2-bf16")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("level", "low"), SAVED)
def test_training_goes_on_from_a_checkpoint_bit_for_bit_in_as_many_processes(level, low, form, found):
    truth = found[0][f"{level} {low} saved"]
    assert truth[0][:2] == [18 + 3 * 18, True]  # the weights, and three states of each, all fp32
    assert [each[f"{level} {low} {key}"] for each in found for key in ("saved", form)] == [truth] * 4


KINDS = [  # but O3 unsharded, which keeps no fp32 values
    (level, low, kind)
    for level, low in SAVED
    for kind in ("sharded", "plain", "torch")
    if (level, kind) != ("O3", "plain")
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("level", "low", "kind"), KINDS)
@pytest.mark.slow_but("bf16-plain-dcp", "O2-bf16-torch-full")
def test_a_checkpoint_of_two_processes_is_one_of_one_with_and_without_shards_and_halfstep(
    level, low, form, kind, found, pool_folder, process_group
):
    truth, _, _ = found[0][f"{level} {low} saved"]
    came, _, _ = sharded.loaded(0, level, low, f"{pool_folder}/{level} {low}", form, kind)
    assert list(came) == truth


@pytest.mark.slow
def test_four_processes(found, pool_folder, tmp_path, process_group):
    cases = checkpoints(pool_folder, save=False)
    cases |= {f"{level} {low}": (sharded.halved, (level, low, STEPS)) for level, low in SETTINGS}
    cases |= {f"{level} bf16 hybrid": (sharded.hybrid, (level, "bf16")) for level in ("O1", "O2")}
    cases |= {f"{level} bf16 under": (sharded.parallel, (level, "bf16", "under")) for level in ("O0", "O1", "O2")}
    cases["gathered both"] = sharded.gathered, ("blame", "both")
    four = replicas.run(tmp_path, 4, cases)
    assert [each["gathered both"] for each in four] == [found[0]["gathered blame"]] * 4
    for level, low in SAVED:
        for form in FORMS:
            assert [each[f"{level} {low} {form}"][0] for each in four] == [found[0][f"{level} {low} saved"][0]] * 4
    for level, low in SETTINGS:
        mine = [each[f"{level} {low}"] for each in four]
        assert mine == [mine[0]] * 4
        losses, *_ = sharded.halved(0, level, low, STEPS, shares=4)
        assert max(abs(a - b) for a, b in zip(losses, mine[0][0], strict=True)) <= 4 * ULP
    for level in ("O1", "O2"):
        mine = [each[f"{level} bf16 hybrid"] for each in four]
        assert mine == [mine[0]] * 4
        assert mine[0][1] == pytest.approx(found[0][f"{level} bf16 hybrid"][1], rel=5e-2)
    for level in ("O0", "O1", "O2"):
        under = [each[f"{level} bf16 under"] for each in four]
        assert [each[1:] for each in under] == [under[0][1:]] * 4
        assert under[0][3] == ([True, [3]] if level != "O0" else [False, []])
        assert under[0][1] == pytest.approx(found[0][f"{level} bf16 parallel"][1], rel=1e-2)


@pytest.mark.slow_but("[O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replicas_of_shards_count_once(level, found):
    one, other = (each[f"{level} bf16 hybrid"] for each in found)
    assert one == other
    assert one[1] == pytest.approx(found[0][f"{level} bf16 plain"][1], rel=1e-6)
    assert one[0] == pytest.approx(found[0][f"{level} bf16 plain"][0], abs=4 * ULP)


@pytest.mark.slow_but("O0-bf16", "O1-fp16", "O2-bf16")
@pytest.mark.parametrize(("level", "low"), PARALLEL)
def test_tensor_parallel_layers_train_as_whole_ones(level, low, found, process_group):
    one, other = (each[f"{level} {low} parallel"] for each in found)
    assert one == other
    losses, norms, *_ = sharded.plain(level, low, 4, hidden=64)
    assert one[0] == pytest.approx(losses, rel=2e-3)
    assert one[1] == pytest.approx(norms, rel=1e-2)
    assert one[3] == ([True, [1]] if level != "O0" else [False, []])


def test_a_verdict_of_one_process_stops_all_at_the_same_step(found):
    (step, kind), (own_step, own_kind) = (each["stopping"] for each in found)
    assert step == own_step
    assert kind == "another process"
    assert own_kind not in (None, "another process")


@pytest.mark.parametrize("low", LOWS)
def test_the_operation_whose_gradient_is_undefined_is_named_where_gradients_are_shards(low, found):
    assert [each[f"undefined {low}"] for each in found] == [["invalid", "sqrt", "backward"]] * 2


def test_processes_with_different_plans_or_optimizers(found):
    for each in found:
        assert "what is trained differs between processes: process 1 has the plan's name = 'O2'" in each["plan"]
        assert "differs between processes: process 1 has the plan's name = 'O1', process 0 has the plan's" in each["O0"]
        assert "what is trained differs between processes: process 1 has" in each["optimizer"]


def test_what_initialize_raises_in_one_process_is_an_error_in_all(found):
    one, other = (each["raising"] for each in found)
    assert other.startswith("SetupError: 18 of 18 parameters in group 0 of AdamW do not belong to the model")
    assert one == f"SetupError: process 1 has raised {other}"


@pytest.mark.parametrize(
    ("what", "module", "other", "first"),
    [
        ("gathering", "blocks.1", "param_dtype=None", "param_dtype=torch.bfloat16"),
        ("reducing", "blocks.0", "reduce_dtype=torch.bfloat16", "reduce_dtype=torch.float32"),
    ],
)
def test_policies_that_differ_between_processes_are_an_error_in_all(what, module, other, first, found):
    line = 'fully_shard(module, mp_policy=halfstep.fsdp_policy("O1", low="bf16")) for all of the model'
    for each in found:
        assert f"SetupError: the mp_policy of {module} differs between processes: process 1 has" in each[what]
        assert each[what].index(other) < each[what].index("process 0 has") < each[what].index(first)
        assert f"write {line}, in all processes" in each[what]


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_step_that_a_hook_stopped_in_one_process_is_counted_in_all_and_not_made_again(engine, found):
    assert found[0][f"{engine} hook"] == [[], 4]
    (first, again, second, _), steps = found[1][f"{engine} hook"]
    assert (first, second, steps) == ("1", "2", 4)
    assert "step() was called without gradients" in again


@pytest.mark.parametrize("what", ["blame", "check"])
def test_what_needs_a_copy_of_the_model_says_so_in_all_processes(what, found):
    for each in found:
        assert f"SetupError: the model is sharded over processes, and {what}()" in each[what]
        assert f"halfstep.on_gathered_copy(session, build, lambda whole, model: halfstep.{what}(" in each[what]


@pytest.mark.slow_but("[check")
@pytest.mark.parametrize("what", sharded.ASKS)
def test_blame_and_check_say_of_a_gathered_copy_what_they_say_of_an_unsharded_model(what, found):
    net = sharded.overflowing()
    optimizer = sharded.adamw(net)
    with halfstep.initialize(net, optimizer, "O1", low="fp16") as session:
        sharded.train(net, optimizer, session, 1)
        said = sharded.told(sharded.ASKS[what], session, net)
    assert any(place.startswith("blocks.1.up") for _, place, _ in said)
    assert [each[f"gathered {what}"] for each in found] == [[said, True, True]] * 2


def test_blame_of_a_gathered_copy_of_tensor_parallel_layers_names_the_layer(found):
    for said, unchanged, goes_on in (each["gathered tensor"] for each in found):
        assert [(kind, place.partition(",")[0]) for kind, place, _ in said] == [("overflow", "blocks.1.up")]
        assert (unchanged, goes_on) == (True, True)


def test_a_copy_that_cannot_be_made_is_an_error_in_all_processes(found):
    one, other = (each["not gathered"] for each in found)
    assert "SetupError: an unsharded copy of the model needs" in one["small"]
    assert "cpu has 9.31e-07 GiB free: use a process with more memory" in one["small"]
    assert "SetupError: build() returned another model than the one that is sharded: " in one["other"]
    assert "SetupError: build() returned 2 models, and the session has 1" in one["several"]
    assert "SetupError: build() returned int; it must return the model as it is before fully_shard" in one["no model"]
    assert one["raises"] == "KeyError: 'its own'"
    assert "lambda" in one["not sent"]
    for what in ("small", "other", "several", "no model", "raises", "not sent"):
        assert other[what] == f"SessionError: process 0 has raised {one[what]}"
    assert (
        one["rank"]
        == other["rank"]
        == ("SetupError: rank is 2; the model is sharded over the processes [0, 1]: pass one of these")
    )
    assert one["fits"] == other["fits"] == "None"
    assert "takes an open session, not a closed session" in one["closed"]


SLOW = ("replicas", "fewer", "backward O1", "backward O2", "raises", "sharded raises")


@pytest.mark.parametrize(
    "how",
    ["sharded", *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW)],
)
def test_a_process_that_is_gone_or_late_ends_the_step_of_the_others_with_an_error_in_time(how, tmp_path):
    begun = time.monotonic()
    forks.start(sharded.leaving, (str(tmp_path), 2, how), 2)
    step, unchanged, message = json.loads((tmp_path / "0.json").read_text())
    assert (step, unchanged) == (1, True)
    where = "backward pass" if how.startswith("backward") or how.endswith("raises") else "step"
    assert f"process 0 got no answer in the {where}" in message
    assert "process 1 has ended, has raised, or is late" in message
    assert time.monotonic() - begun < 240  # a deadline, with starts on a busy machine; the timeout is 10 s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "arguments", "where"),
    [
        (sharded.leaving, (2, "initialize"), "halfstep.initialize"),
        (sharded.unopened, (), "DistributedDataParallel(model), where the sessions of all"),
    ],
)
def test_a_process_that_does_not_come_is_named_where_the_others_wait(run, arguments, where, tmp_path):
    forks.start(run, (str(tmp_path), *arguments), 2)
    message = json.loads((tmp_path / "0.json").read_text())
    assert f"SessionError: process 0 got no answer in {where}" in message
    assert "process 1 has ended, has raised, or is late" in message


@pytest.mark.slow
def test_each_of_the_others_names_the_one_of_four_that_is_gone(tmp_path):
    forks.start(sharded.leaving, (str(tmp_path), 4, "sharded"), 4)
    for rank in range(3):
        step, unchanged, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (step, unchanged) == (1, True)
        assert re.search(r"process(es)? [\d, ]*3 ha", message)


@pytest.mark.slow_but("missing")
@pytest.mark.parametrize("how", CUT)
def test_a_checkpoint_that_was_cut_short_is_an_error_in_all_processes_and_changes_nothing(how, found):
    for each in found:
        message, alike = each[how]
        assert "CheckpointException ranks:" in message
        assert "(RANK 1)" in message
        assert alike


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow
def test_compiled_blocks_train_alike(level, process_group):
    expected, *_ = sharded.trained(0, level, "bf16", 2)
    assert sharded.trained(0, level, "bf16", 2, compiled="aot_eager")[0] == expected


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_another_mesh_adds_to_are_summed_in_fp32(found, level):
    """As reduce_dtype says, which FSDP2 alone does not (pytorch#190626): it gives 1 here."""
    assert [each[f"{level} summed"] for each in found] == [[1 + 2**-10, 1 + 2**-10, 3 * (1 + 2**-10)]] * len(found)


@pytest.mark.parametrize(("level", "low"), PARTS)
def test_a_loss_that_is_a_dtensor_trains_and_is_skipped_where_it_is_not_finite(level, low, found):
    (losses, skipped), other = (each[f"loss {level} {low}"] for each in found)
    assert [losses, skipped] == other
    first, second, bad, last = losses
    assert (last < second - 0.05 < first - 0.1, bad, skipped) == (True, math.inf, 1)


def test_weights_that_were_frozen_train_later_also_where_all_of_their_group_were(found):
    """Torch 2.13's FSDP2 alone chooses the dtype of a group's gradients from what it trains first (pytorch#186998)."""
    assert [[each["unfrozen weight"], each["unfrozen group"]] for each in found] == [[True, True]] * len(found)


def assert_coded(found, dims):
    whole, two_bytes = sharded.coded(0, "8bit"), sharded.coded(0, "bf16")
    expected = [whole[0], two_bytes[1], *whole[2:4]] if 1 in dims else whole  # 350 columns are no whole groups
    assert [each[f"coded {dims}"][: len(expected)] for each in found] == [expected] * len(found)


@pytest.mark.parametrize("dims", CODED)
def test_moments_in_codes_give_the_same_bits_however_weights_are_split(dims, found):
    assert_coded(found, dims)


def assert_as_alone(products, came, *, split, close=1e-4):
    alone = sharded.by_recipe(0, products, "alone")
    assert came == [came[0] if split else alone] * len(came)
    assert came[0][0] == pytest.approx(alone[0], rel=close)  # the order in which processes add up in fp32


@pytest.mark.parametrize("how", USES)
def test_products_in_8_bits_have_the_same_bits_in_all_processes_or_are_refused(how, found):
    came = [each[f"recipe {how}"] for each in found]
    if how[1] == "odd":
        assert all(
            "in each process a multiple of 16 rows or columns of the weight; here a weight of 48" in e for e in came
        )
    else:
        own = how[1] == "own"  # units of a device, which round before processes add up
        assert_as_alone(how[0], came, split=own or how[1] == "tp", close=2e-2 if own else 1e-4)


@pytest.mark.parametrize("products", RECIPES)
def test_parts_of_operands_are_cast_as_the_whole_is(products, found):
    assert all(all(each[f"parts by {products}"]) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kinds"), [(3, ("fsdp", "ddp")), (4, ("both",))])
@pytest.mark.parametrize("products", ["fp8", "fp8-row", "nvfp4"])
def test_products_in_8_bits_have_the_same_bits_in_more_processes(products, size, kinds, tmp_path):
    found = replicas.run(tmp_path, size, {kind: (sharded.by_recipe, (products, kind)) for kind in kinds})
    for kind in kinds:
        assert_as_alone(products, [each[kind] for each in found], split=kind == "both")


@pytest.mark.parametrize("dims", CODED)
def test_muon_gives_the_same_bits_however_matrices_are_split(dims, found):
    assert [each[f"muon {dims}"] for each in found] == [sharded.coded(0, "muon")] * len(found)


def test_a_checkpoint_of_moments_in_codes_goes_on_bit_for_bit_and_is_one_of_torch(found, pool_folder, process_group):
    truth = found[0]["8bit saved"]
    assert [each[key] for each in found for key in ("8bit saved", "8bit loaded")] == [truth] * 4
    for kind in ("plain", "torch"):
        came, _, _ = sharded.loaded(0, "O2", "bf16", f"{pool_folder}/8bit", "dcp", kind, "8bit")
        assert list(came) == truth[0]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dims"), [(3, (0,)), (4, (None, 0)), (4, (0, 1))])
def test_moments_in_codes_give_the_same_bits_in_more_processes(size, dims, tmp_path):
    assert_coded(replicas.run(tmp_path, size, {f"coded {dims}": (sharded.coded, ("8bit", *dims))}), dims)
