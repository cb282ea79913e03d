"""Processes that train replicas of a model under DistributedDataParallel: all of them have the same bits, always."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.errors import SessionError
from halfstep.train.processes.collectives import LOSSES, SCALE_BITS, WEIGHT_BITS, Findings, _folded
from halfstep.train.processes.shards import local, reshard
from tests import replicas
from tests.replicas import MODES, SETTINGS, WRAPPINGS

LOW = [name for name in SETTINGS if name != "O0"]
PARTING = ["O1 bf16", "O2 bf16 split", "O2 fp16", "O3 bf16"]
WHO = {"first": [0], "second": [1], "both": [0, 1], "none": []}
FAST = {  # of a test over settings, the rows that are fast: one for each path
    "bits": ("[O2 bf16 split-", "[O2 fp16-", "[O0-seeds", "[O1 fp16-join", "[O3 bf16-checkpoint"),
    "wrapping": ("[O2 fp16-", "[O1 fp16-plain"),
    "several": ("[O1 fp16", "[O2 bf16 split"),
    "sent": ("[O1 fp16", "[O2 bf16 split"),
    "epochs": ("-O2 bf16 split", "AdamW-O1 bf16"),
    "closed": ("[O1 fp16", "[O2 bf16 split", "[O2 fp16"),
    "told": ("second-O1 bf16", "-O2 bf16 split"),
    "quiet": ("both-O2 bf16 split", "none-O2 fp16"),
}
CASES = {
    **{
        f"{s}-{w} wrapping": (replicas.wrapping, (s, w))
        for s in ("O1 fp16", "O2 bf16 split", "O2 fp16")
        for w in WRAPPINGS
    },
    **{f"{setting} several": (replicas.several, (setting,)) for setting in ("O1 fp16", "O2 bf16 split", "O2 fp16")},
    **{f"{setting}, part": (replicas.part_of_a_model, (setting,)) for setting in ("O1 bf16", "O2 bf16 copy")},
    "nothing": (replicas.collectives, ("O0",)),
    **{f"{setting} sent": (replicas.collectives, (setting,)) for setting in LOW},
    "spoiler": (replicas.spoiler, (2,)),
    "stopping": (replicas.stopping, ()),
    **{what: (replicas.differing, (what,)) for what in (*replicas.DIFFERING, "level, wrapped before")},
    "optimizer": (replicas.differing, ("optimizer",)),
    "scaled": (replicas.scaled, ()),
    "split": (replicas.exact, ("split",)),
    "copy": (replicas.exact, ("copy",)),
    "unsynchronised": (replicas.unsynchronised, ()),
    "copied": (replicas.copied, ()),
    "after join": (replicas.after_join, ()),
    "wrapped before": (replicas.wrapped_before, ()),
    **{f"{who}-{s} told": (replicas.loaded_alone, (s, WHO[who])) for s in PARTING for who in ("first", "second")},
    **{f"{who}-{s} quiet": (replicas.loaded_alone, (s, WHO[who])) for s in PARTING for who in ("both", "none")},
    "scaled alone": (replicas.scaled_alone, ()),
    "many losses": (replicas.many_losses, ()),
    "reduced by hand": (replicas.reduced_by_hand, ()),
    **{f"{o}-{s} epochs": (replicas.epochs, (s, o)) for s in PARTING for o in replicas.OPTIMIZERS},
    **{f"{setting} closed": (replicas.closed, (setting,)) for setting in SETTINGS},
    "initialized after": (replicas.initialized_after, ()),
    **{f"{setting}, rates": (replicas.rates, (setting,)) for setting in ("O1 bf16", "O2 bf16 split")},
    **{f"{setting}, LSTM": (replicas.recurrent, (setting,)) for setting in ("O2 bf16 split", "O2 fp16")},
    "own pass in join": (replicas.own_pass_in_join, ()),
    "agreed on": (replicas.agreed_on, ()),
    **{f"sparse {low}": (replicas.sparse, (low,)) for low in ("bf16", "fp16")},
    "in parts": (replicas.in_parts, ()),
}


def agreeing(steps):
    return {
        f"{setting}-{mode} bits": (replicas.agreeing, (setting, mode, steps)) for setting in SETTINGS for mode in MODES
    }


def pooled(folder, slow):
    return {name: case for name, case in (CASES | agreeing(5)).items() if slow or is_fast(name)}


def is_fast(name):
    row, _, test = name.rpartition(" ")
    return any(word in f"[{row}]" for word in FAST.get(test, ("",)))


def assert_same(results, mode, *, skips):
    """`results` are those of each process, with what its weights were before they were wrapped."""
    first, before = results[0]
    assert [result for result, _ in results] == [first] * len(results)
    assert first["wrapped"] == before
    assert first["state"] != before
    if mode != "join":
        assert [i for i, skipped in enumerate(first["skips"]) if skipped] == skips


@pytest.mark.slow_but(*FAST["bits"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_processes_have_the_same_bits_from_the_wrap_to_the_end(found, setting, mode):
    results = [each[f"{setting}-{mode} bits"] for each in found]
    bad = setting != "O0" and mode in ("infinite loss", "NaN gradient")
    assert_same(results, mode, skips=[2] if bad else [])
    names = results[0][0]["names"]
    assert bool(names) == (setting != "O0" and mode in ("NaN gradient", "join"))
    if mode != "join":
        assert results[0][0]["bad losses"] == (setting != "O0" and mode == "infinite loss")
    if setting in ("O1 fp16", "O2 fp16"):  # in join() processes see gradients of each other, and no losses
        init = halfstep.level(setting[:2], "fp16").scale.init
        assert results[0][0]["scales"] == {"0": init / 2 if mode in ("NaN gradient", "join") else init}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_processes_have_the_same_bits_over_two_hundred_steps(size, tmp_path):
    cases = agreeing(200)
    found = replicas.run(tmp_path, size, cases)
    for name in cases:
        mode = name.partition("-")[2].removesuffix(" bits")
        bad = not name.startswith("O0") and mode in ("infinite loss", "NaN gradient")
        assert_same([each[name] for each in found], mode, skips=[2] if bad else [])


@pytest.mark.slow_but(*FAST["wrapping"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("setting", ["O1 fp16", "O2 bf16 split", "O2 fp16"])
def test_accumulation_and_ways_to_wrap(found, setting, wrapping):
    one, other = (each[f"{setting}-{wrapping} wrapping"] for each in found)
    assert one == other
    assert one[2] == 1


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_sparse_gradients_of_low_weights_are_summed_in_fp32(low, found):
    mean = torch.tensor((1 + 2**-10) / 2).to(halfstep.level("O2", low).low.dtype).item()
    assert [each[f"sparse {low}"] for each in found] == [[[0, 0], [mean, mean], [0, 0], [0, 0]]] * 2


def test_an_optimizer_that_keeps_each_state_in_one_process_trains_at_o1(found):
    one, other = (each["in parts"] for each in found)
    assert one == other
    assert one[1:] == [1, True]


@pytest.mark.slow_but(*FAST["several"])
@pytest.mark.parametrize("setting", ["O1 fp16", "O2 bf16 split", "O2 fp16"])
def test_several_models_with_optimizers_that_step_apart(found, setting):
    one, other = (each[f"{setting} several"] for each in found)
    assert one == other
    assert one[2] == 2


@pytest.mark.parametrize("setting", ["O1 bf16", "O2 bf16 copy"])
def test_a_wrapper_of_a_part_clips_alike_though_the_rest_has_other_gradients(found, setting):
    one, other = (each[f"{setting}, part"] for each in found)
    assert one[:2] == other[:2]
    assert one[2] != other[2]


@pytest.mark.slow_but(*FAST["sent"])
@pytest.mark.parametrize("setting", LOW)
def test_a_step_sends_one_vector_and_only_where_its_model_is_wrapped(found, setting):
    for each in found:
        alone, together, parameters = each[f"{setting} sent"]
        assert alone == []
        assert together == [["c10d::allreduce_", bytes_of(parameters, 2)]]
        assert together[0][1] <= 8 * (3 + parameters + 1 + 2)


def test_processes_on_two_classes_of_processors_emulate_both_or_neither(found):
    one, other = (each["agreed on"] for each in found)
    assert one is other


def test_nothing_is_sent_at_o0(found):
    assert [each["nothing"][:2] for each in found] == [[[], []]] * 2


def test_the_process_whose_loss_was_infinite_is_named(found):
    assert [each["spoiler"] for each in found] == [[[1], []]] * 2


def test_a_verdict_of_one_process_stops_all_at_the_same_step(found):
    (step, kind, evidence), (own_step, own_kind, _) = (each["stopping"] for each in found)
    assert step == own_step
    assert (kind, own_kind) != (None, None)
    assert kind == "another process"
    assert "process 1" in evidence
    assert own_kind != "another process"


def test_what_differs_between_processes_is_said_when_it_is_wrapped(found):
    for each in found:
        assert "process 1 has the plan's master = 'copy', process 0 has the plan's master = 'split'" in each["plan"]


@pytest.mark.parametrize("what", ["level", "level of process 1", "level, wrapped before"])
def test_the_levels_of_processes_are_named_where_one_trains_as_written(found, what):
    one, other = ("O1", "O0") if what == "level of process 1" else ("O0", "O1")
    for each in found:
        assert f"process 1 has the plan's name = '{other}', process 0 has the plan's name = '{one}'" in each[what]


def test_what_differs_between_optimizers_is_said_at_the_first_step(found):
    for each in found:
        assert "process 1 has 0.bias of shape (32,)" in each["optimizer"]
        assert "process 0 has 0.weight of shape (32, 8)" in each["optimizer"]


def test_loss_scales_are_those_of_the_first_process(found):
    expected = {"0": {"kind": "dynamic", "scale": 64.0, "clean_steps": 3, "overflows_left": 1}}
    assert [each["scaled"] for each in found] == [expected] * 2


@pytest.mark.parametrize("master", ["split", "copy"])
def test_every_bit_of_the_first_process_arrives(found, master):
    for each in found:
        arrived, sent, halved = each[master]
        assert arrived == sent
        assert halved == 0.5


def test_nothing_is_sent_where_the_wrapper_sends_nothing(found):
    (one, sent), (other, _) = (each["unsynchronised"] for each in found)
    assert one != other
    assert sent == []


def test_wrappers_can_be_copied_and_saved_and_are_left_as_they_were(found):
    assert [each["copied"] for each in found] == [
        [["_Joined", "_DDPJoinHook", "_DDPJoinHook"], False, "_DDPJoinHook"]
    ] * 2


def test_training_goes_on_together_after_a_join(found):
    (one, inside), (other, _) = (each["after join"] for each in found)
    assert one == other
    assert inside == [[]] * 3
    _, scales, outside, disabled = one
    assert scales["0"]["scale"] == halfstep.level("O2", "fp16").scale.init / 2
    assert outside[1:] == [["c10d::allreduce_"]] * 2
    assert disabled == ["c10d::allreduce_"]


def test_a_model_that_was_wrapped_before_is_found(found):
    one, other = (each["wrapped before"] for each in found)
    assert one == other
    assert one[1:] == [1, ["c10d::allreduce_"]]


@pytest.mark.slow_but(*FAST["told"])
@pytest.mark.parametrize("setting", PARTING)
@pytest.mark.parametrize("who", ["first", "second"])
def test_replicas_that_part_are_told_once_in_all_processes(found, setting, who):
    for each in found:
        said = [line for lines in each[f"{who}-{setting} told"] for line in lines]
        assert len(said) == 1
        assert "weights in process 1 differ from those in process 0 (0.weight, 0.bias, 1.weight" in said[0]


@pytest.mark.slow_but(*FAST["quiet"])
@pytest.mark.parametrize("setting", PARTING)
@pytest.mark.parametrize("who", ["none", "both"])
def test_nothing_is_said_of_replicas_that_are_alike(found, setting, who):
    assert [each[f"{who}-{setting} quiet"] for each in found] == [[[]] * 9] * 2


def test_gradients_under_other_loss_scales_are_an_error_in_all_processes(found):
    for each in found:
        message, unchanged, skipped = each["scaled alone"]
        assert "process 1 carry another loss scale" in message
        assert unchanged
        assert skipped == 1


def test_each_loss_has_a_flag_of_its_own_and_one_too_many_is_an_error(found):
    (one, message), (other, _) = (each["many losses"] for each in found)
    assert one == other
    initial = halfstep.level("O1", "fp16").scale.init
    assert one == {"7": initial, "8": initial / 2, "62": initial}
    assert "loss_id is 63" in message


def test_where_a_loop_reduces_gradients_itself_a_loss_that_is_not_finite_lowers_the_scale_in_all(found):
    one, other = (each["reduced by hand"] for each in found)
    assert one == other
    assert one[1]["0"]["scale"] == halfstep.level("O1", "fp16").scale.init / 2


@pytest.mark.slow_but(*FAST["epochs"])
@pytest.mark.parametrize("setting", PARTING)
@pytest.mark.parametrize("optimizer", replicas.OPTIMIZERS)
def test_optimizer_states_are_alike_from_the_wrap_on_and_after_each_join(found, setting, optimizer):
    one, other = (each[f"{optimizer}-{setting} epochs"] for each in found)
    assert one == other
    assert one[0][1][0] > 0


def test_a_model_wrapped_before_its_weights_are_stored_low_is_refused(found):
    (message, one), (_, other) = (each["initialized after"] for each in found)
    assert "stop reducing gradients when the weights change format at O2" in message
    assert one == other


@pytest.mark.slow_but(*FAST["closed"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrapper_made_for_low_weights_refuses_to_train_once_the_session_is_closed(found, setting):
    (said, one), (_, other) = (each[f"{setting} closed"] for each in found)
    assert one == other
    if setting.startswith(("O0", "O1")):
        assert said is None
    else:
        assert "wrap the model again" in said


@pytest.mark.parametrize("setting", ["O1 bf16", "O2 bf16 split"])
def test_options_of_the_first_process_are_handed_on_into_the_same_tensor(found, setting):
    (one, weights), (other, same) = (each[f"{setting}, rates"] for each in found)
    assert one == other == [pytest.approx(1e-2), [0.9, 0.99], 0.1, True]
    assert weights == same


@pytest.mark.parametrize("setting", ["O2 bf16 split", "O2 fp16"])
def test_an_lstm_with_low_weights_trains_alike(found, setting):
    one, other = (each[f"{setting}, LSTM"] for each in found)
    assert one == other
    assert one[1:] == [["torch.float32"], 0]  # sums of two passes, each of which makes low ones


def test_an_infinite_loss_of_a_loops_own_pass_is_skipped_by_all_within_join(found):
    one, other = (each["own pass in join"] for each in found)
    assert one == other
    assert one[1] == {"0": halfstep.level("O2", "fp16").scale.init / 2}


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_step_after_the_process_group_was_destroyed_is_refused(engine, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = replicas.network(0)
        if engine == "FSDP2":
            fully_shard(model, mp_policy=halfstep.fsdp_policy("O1", low="bf16"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = halfstep.initialize(model, optimizer, "O1", low="bf16")
        wrapped = model if engine == "FSDP2" else replicas.DDP(model)
        replicas.one_step(wrapped, optimizer, session, 0, 0)
        before = replicas.digest([local(p) for p in model.parameters()])
        session.backward((wrapped(replicas.batch(0, 1)[0])).square().mean())
        reshard([model])
    finally:
        dist.destroy_process_group()
    with pytest.raises(SessionError, match=r"its process group was destroyed; save and close the session before"):
        session.step()
    assert replicas.digest([local(p) for p in model.parameters()]) == before


def bytes_of(parameters, size):
    """Returns the bytes of the sum: counts up to `size` of a flag for each parameter and loss, packed in 53 bits."""
    room = 53 // len(f"{size:b}")
    return 8 * (1 + math.ceil((parameters + LOSSES) / room) + size)


def findings(norm, size, bad=(), *, rank=0, losses=(), spoiled=False, stops=False, scale=0.0, number=0.0):
    here = torch.arange(size) == rank
    gradients, lost = (torch.tensor([i in which for i in range(n)]) for which, n in ((bad, 3), (losses, LOSSES)))
    square = torch.tensor(norm).double().square() / size
    same = torch.where(here, torch.tensor([[scale], [number]], dtype=torch.float64), 0.0)
    return Findings(square, gradients, lost, here & spoiled, here & stops, same)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 255, 1024, 4096])
@pytest.mark.slow_but("[1]", "[7]", "255")
def test_what_each_process_packs_is_what_all_unpack(size):
    total = sum(
        findings(
            1.0,
            size,
            bad=(1,) if rank == size - 1 else (),
            rank=rank,
            losses=(0, 63),  # in all: counts that fill their room
            spoiled=rank % 3 == 1,
            stops=rank % 4 == 2,
            scale=2.0**16 if rank % 5 else 2.0**15,
            number=2.0**52 - 1 if rank % 7 else 2.0**52 - 2,
        ).packed()
        for rank in range(size)
    )
    assert 8 * len(total) == bytes_of(3, size)
    found = findings(1.0, size).unpacked(total)
    ranks = torch.arange(size)
    assert found.gradients.tolist() == [False, True, False]
    assert found.losses.nonzero().flatten().tolist() == [0, 63]
    assert torch.equal(found.processes, ranks % 3 == 1)
    assert torch.equal(found.stops, ranks % 4 == 2)
    assert torch.equal(found.same, torch.stack([ranks % 5 != 0, ranks % 7 != 0]))


def test_every_power_of_two_as_a_loss_scale_is_told_from_every_other():
    scales = torch.arange(-149, 128).double().exp2()
    for bits in (SCALE_BITS, WEIGHT_BITS):
        assert len(_folded(scales, bits).unique()) == len(scales)
        assert _folded(torch.zeros(1, dtype=torch.float64), bits).item() == 0


@given(st.floats(min_value=0.0, width=32, allow_infinity=False), st.integers(1, 4096))
def test_a_norm_that_all_have_comes_back_as_it_was(norm, size):
    own = findings(norm, size)
    part = own.packed()
    total = part.clone()
    for _ in range(size - 1):
        total += part
    assert own.unpacked(total).norm.item() == torch.tensor(norm).item()


def test_norms_that_differ_count_with_the_root_of_their_mean_square_and_flags_with_any():
    one, other = findings(3.0, 2, bad=(1,)), findings(4.0, 2, bad=(1, 2))
    both = one.unpacked(one.packed() + other.packed())
    assert both.norm.item() == torch.tensor(12.5).sqrt().item()
    assert both.gradients.tolist() == [False, True, True]
    assert not both.losses.any()
