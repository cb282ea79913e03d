"""The update against the optimizers' own steps, and against the textbook written out in float64."""

import pytest
import torch
from torch.optim import SGD

import halfstep
from halfstep.train.kernels.batch import Scratch
from halfstep.train.optim.implementations import IMPLEMENTATIONS
from halfstep.train.optim.masters import MasterStore, round_half_away
from tests.optim.cases import (
    ADAMS,
    FALSE,
    HERE,
    LAMBS,
    LIONS,
    NOVOGRADS,
    OWN,
    SGDS,
    TEXTBOOKS,
    TRUE,
    WHOLE,
    as_held,
    assert_same_bits,
    gradients,
    has_kernel,
    one_pass,
    own_run,
    parameters,
    takes,
)

EACH_IMPLEMENTATION = pytest.mark.parametrize("implementation", HERE)
STEPS = 6


def each(cases):
    rows = [(name, *case) for name in HERE for case in cases if has_kernel(name, *case)]
    return pytest.mark.parametrize(("implementation", "cls", "options"), rows)


EACH_OWN, EACH_ROW = each(OWN), each(OWN + WHOLE)


def dense(run):
    """Drops the parameter that is part of a larger tensor, which torch's kernels cannot take."""
    run.params = run.params[:4]
    run.optimizer.param_groups[0]["params"] = run.params
    return run


@EACH_OWN
def test_full_weights_and_state_go_as_under_torch(cls, options, implementation):
    ours = dense(own_run(cls, options, implementation=implementation))
    theirs = parameters()[:4]
    peer = cls(theirs, **options)
    for seed in range(STEPS):
        grads = gradients(ours.params, seed)
        ours.step(grads)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.clone()
        peer.step()
    for p, q in zip(ours.params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
    state, expected = ours.optimizer.state_dict()["state"], peer.state_dict()["state"]
    assert state.keys() == expected.keys()
    for index, entry in expected.items():
        assert state[index].keys() == entry.keys()
        for name, value in entry.items():
            assert state[index][name].dtype is value.dtype
            size = max(1.0, value.abs().max().item())  # as that of a momentum, whose terms may cancel
            torch.testing.assert_close(state[index][name], value, rtol=2e-6, atol=2e-7 * size)


def textbook(cls, options, w, grads):
    assert cls in TEXTBOOKS, f"write the update of {cls.__name__} out as its paper has it, and add it to TEXTBOOKS"
    return TEXTBOOKS[cls](w, grads, **{**options, "lr": float(options["lr"])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EACH_OWN
def test_weights_are_the_textbooks(cls, options, dtype, implementation):
    if implementation == "native" and dtype is torch.float64:
        pytest.skip("the compiled loops compute in fp32; float64 weights take the next row")
    run = dense(own_run(cls, options, implementation=implementation, dtype=dtype))
    start = [p.detach().clone().double() for p in run.params]
    all_grads = [gradients(run.params, seed) for seed in range(STEPS)]
    for grads in all_grads:
        run.step(grads)
    tolerance = 3e-6 if dtype is torch.float32 else 1e-8 if isinstance(options["lr"], torch.Tensor) else 1e-13
    for i, p in enumerate(run.params):
        expected = textbook(cls, options, start[i], [grads[i].double() for grads in all_grads])
        assert p.dtype is dtype
        torch.testing.assert_close(p.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("cls", "options"), [ADAMS[1], SGDS[3]])
def test_a_part_of_a_larger_tensor_is_updated_and_its_neighbours_are_not(cls, options):
    large = torch.randn(6, 8)
    part = torch.nn.Parameter(large[:, ::2])
    neighbours, alone = large[:, 1::2].clone(), torch.nn.Parameter(large[:, ::2].clone())
    for p in (part, alone):
        run = own_run(cls, options)
        run.params = run.optimizer.param_groups[0]["params"] = [p]
        for seed in range(3):
            run.step(gradients([p], seed))
    torch.testing.assert_close(part, alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(large[:, 1::2], neighbours)


@EACH_ROW
def test_split_and_copy_train_bit_identically_on_bf16_weights(cls, options, implementation):
    runs = [own_run(cls, options, kind, implementation=implementation) for kind in ("copy", "split")]
    for seed in range(11):
        for run in runs:
            run.step(gradients(run.params, seed), torch.tensor(2.0**-3), torch.tensor(seed % 7 == 3))
    assert_same_bits(runs[0].params, runs[1].params)
    assert_same_bits(runs[0].values(), runs[1].values())


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "options"), [ADAMS[4], SGDS[3]])
def test_a_master_goes_as_the_full_weight_does_from_the_same_gradients(cls, options, low, implementation):
    full = dense(own_run(cls, options, implementation=implementation))
    master = dense(own_run(cls, options, "copy", low, implementation))
    for seed in range(STEPS):
        grads = gradients(master.params, seed)
        master.step(grads, torch.tensor(0.3))
        full.step([grad.float() for grad in grads], torch.tensor(0.3))
    assert_same_bits(master.values(), [p.detach() for p in full.params])


@pytest.mark.parametrize("kind", [None, "copy", "split", "none"])
@pytest.mark.parametrize(("cls", "options"), [ADAMS[1], SGDS[3], LAMBS[0]])
def test_the_factor_is_as_good_as_scaling_the_gradients_first(cls, options, kind):
    one, other = own_run(cls, options, kind), own_run(cls, options, kind)
    for seed in range(3):
        grads = gradients(one.params, seed, scale=1024.0)
        one.step(grads, torch.tensor(2.0**-10))
        other.step([grad.float() * 2.0**-10 for grad in grads])
    assert_same_bits(one.everything(), other.everything())


@pytest.mark.parametrize("layout", ["full", "copy", "split", "low"])
@EACH_IMPLEMENTATION
def test_a_large_tensor_cut_in_chunks_comes_out_as_in_one_piece(layout, implementation):
    kind = {"full": None, "low": "none"}.get(layout, layout)
    numel = 2**19 + 1000  # one chunk on a CPU and a bit
    whole = torch.randn(numel)
    runs = []
    for values in ([whole], list(whole.split(2**19 // 4))):
        run = own_run(*ADAMS[0], kind, implementation=implementation)
        run.params = [torch.nn.Parameter(value.clone()) for value in values]
        run.optimizer.param_groups[0]["params"] = run.params
        for p in run.params if kind else ():
            run.store.track(p)
        run.step([torch.ones_like(p) * 0.1 for p in run.params])
        run.step([torch.ones_like(p) * -0.3 for p in run.params], torch.tensor(0.7))
        runs.append(torch.cat(run.values()))
    # where a vector loop ends differs between the two, and torch's kernels end it with other instructions
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0 if implementation == "eager" else 1e-6)


def test_split_and_copy_are_bit_identical_on_a_large_weight_and_two_threads(two_threads):
    start = torch.randn(2**20 + 77)
    values = []
    for kind in ("copy", "split"):
        p = torch.nn.Parameter(start.clone())
        run = own_run(*ADAMS[3], kind)
        run.params = run.optimizer.param_groups[0]["params"] = [p]
        run.store.track(p)
        for seed in range(3):
            run.step(gradients([p], seed), torch.tensor(0.1))
        values += run.values()
    assert_same_bits(values[:1], values[1:])


def test_a_channels_last_weight_pairs_with_the_right_elements_of_a_contiguous_gradient():
    run = own_run(SGD, {"lr": 1.0})
    kernel = run.params[3]
    assert not kernel.is_contiguous()
    grads = [torch.zeros_like(p) for p in run.params]
    grads[3] = torch.arange(kernel.numel(), dtype=torch.float32).view(kernel.shape)
    expected = kernel.detach() - grads[3]
    run.step(grads)
    assert torch.equal(kernel, expected)


def test_implementations_say_which_batches_they_take():
    weight, part = torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]
    adam, sgd = (own_run(*case) for case in (ADAMS[0], SGDS[2]))

    def taken(run, tensor):
        return [name for name in IMPLEMENTATIONS if takes(name, run.optimizer, tensor)]

    assert taken(adam, weight) == taken(sgd, weight) == ["native", "fused", "eager"]
    assert taken(adam, weight.double()) == ["fused", "eager"]
    assert taken(adam, part) == ["eager"]
    assert taken(own_run(*LIONS[0]), weight) == ["native", "eager"]


def test_scratch_memory_is_used_again_and_grows():
    scratch = Scratch()
    few, many = [torch.zeros(3)], [torch.zeros(3), torch.zeros(2, 2)]
    flat, _ = scratch.views("grads", torch.float32, few)
    assert scratch.views("grads", torch.float32, few)[0] is flat
    grown, more = scratch.views("grads", torch.float32, many)
    assert [v.shape for v in more] == [(3,), (2, 2)]
    assert grown.numel() == 7
    assert scratch.views("grads", torch.float32, few)[0].data_ptr() == grown.data_ptr()


def test_scratch_memory_stays_where_it_is_however_many_shapes_come():
    scratch = Scratch()
    first, _ = scratch.views("full", torch.float32, [torch.zeros(5000)])
    for numel in range(1, 5000):
        flat, _ = scratch.views("full", torch.int32, [torch.zeros(numel)])
        assert flat.data_ptr() == first.data_ptr()
    assert len(scratch._views) <= 4096


@pytest.mark.parametrize("kind", [None, "copy", "split", "none"])
@pytest.mark.parametrize(
    ("implementation", "cls", "options"),
    [(name, *case) for name in HERE for case in (ADAMS[0], ADAMS[4], SGDS[1], SGDS[3])]
    + [("eager", *LAMBS[0]), ("eager", *NOVOGRADS[0])],
)
def test_a_skip_leaves_every_bit_as_it_was(cls, options, kind, implementation):
    run = own_run(cls, options, kind, implementation=implementation)
    run = dense(run) if kind is None else run
    with torch.no_grad():
        for p in run.params:
            run.store.write(p, torch.where(torch.rand(p.shape) < 0.5, -0.0, run.store.full(p)))
    run.step(gradients(run.params, 0))
    before = run.everything()
    for bad in (float("inf"), float("nan"), -float("inf"), 1.0):
        run.step([torch.full_like(p, bad) for p in run.params], torch.tensor(0.5), TRUE)
    assert_same_bits(run.everything(), before)
    run.step(gradients(run.params, 1), None, FALSE)
    assert any((one != other).any() for one, other in zip(run.everything(), before, strict=True))


@pytest.mark.parametrize("kind", [None, "copy", "split", "none"])
@EACH_ROW
def test_a_skipped_first_step_is_as_if_it_had_not_been(cls, options, kind, implementation):
    runs = [own_run(cls, options, kind, implementation=implementation) for _ in range(2)]
    runs = [dense(run) for run in runs] if kind is None else runs
    runs[0].step([torch.full_like(p, float("inf")) for p in runs[0].params], None, TRUE)
    for seed in range(4):
        for run in runs:
            run.step(gradients(run.params, seed))
    assert_same_bits(runs[0].everything(), runs[1].everything())


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("layout", ["split", "copy"])
def test_a_skipped_step_keeps_every_pattern_of_a_weight(implementation, layout):
    """Every high half of an fp32 number, with low halves at both sides of where rounding changes."""
    high = torch.arange(2**16, dtype=torch.int32) << 16
    full = (high[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).view(torch.float32)
    p = torch.nn.Parameter(full.clone())
    store = MasterStore(layout, torch.bfloat16)
    store.track(p)
    stored = p.detach().clone()
    table = {implementation: IMPLEMENTATIONS[implementation]}
    optimizer = SGD([p], lr=0.1)
    if not takes(implementation, optimizer, p.detach(), layout, [store.extra(p)]):
        pytest.skip(f"{implementation} takes no {layout} weights")
    stepper = one_pass(optimizer, store, table)
    stepper.step([p], [torch.ones_like(p)], None, TRUE)
    kept = as_held(full) if layout == "split" else full
    assert_same_bits([p.detach(), store.full(p)], [stored, kept])


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("layout", ["split", "copy", "none"])
def test_an_update_that_gives_a_nan_stores_a_nan(implementation, layout):
    """Also those that round to a zero, such as every NaN that a GPU makes."""
    some = torch.tensor([0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF], dtype=torch.int32).repeat(20)
    grad = torch.cat([some, some - 2**31]).view(torch.float32)
    run = own_run(SGD, {"lr": 1.0}, layout, implementation=implementation)
    run.params = run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros_like(grad))]
    run.store.track(run.params[0])
    run.step([grad])
    assert_same_bits([run.params[0].detach()], [round_half_away(grad, torch.bfloat16)])
    assert run.params[0].float().isnan().all()
    if layout != "none":
        assert_same_bits(run.values(), [as_held(grad) if layout == "split" else grad])


def test_adam_squares_a_gradient_in_torchs_order():
    """The square of 2.3e19 is beyond fp32, 0.001 times it is not."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight = torch.nn.Parameter(model.weight.detach().clone())
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    session.backward(model(torch.ones(1, 1)).sum())
    model.weight.grad.fill_(2.3e19)
    session.step()
    weight.grad = torch.full((1, 1), 2.3e19)
    torchs = torch.optim.AdamW([weight], lr=0.1)
    torchs.step()
    found, expected = optimizer.state_dict()["state"][0], torchs.state_dict()["state"][0]
    assert torch.isfinite(found["exp_avg_sq"]).all()
    assert torch.equal(found["exp_avg_sq"], expected["exp_avg_sq"])
    session.close()
