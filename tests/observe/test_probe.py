"""A probe sees what a step did, to the last element, and leaves nothing behind."""

import collections
import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import ObserveError, SessionError
from halfstep.machine import AVX512_BF16
from halfstep.records import TENSOR_KINDS
from halfstep.train.kernels import stats as kernel
from halfstep.train.optim import steppers
from halfstep.train.probe import probe as probe_module
from halfstep.train.probe.rows import measure
from tests.contracts.cases import Kept, backward_and_step, batch, every_plan, mixed_plans, start, train
from tests.scale.sync import NoSync, no_cuda_sync

ALL = (*TENSOR_KINDS, "update")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.body(self.first(x)))


def small_session(name="O1", low="bf16", model=None, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = model or Small()
    return model, halfstep.initialize(model, optimizer(model.parameters(), lr=0.1), name, low=low, **options)


def step(model, session, x=None, **options):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) if x is None else x
    session.backward(model(x).square().mean(), **options)
    return session.step()


def observed(name="O1", low="bf16", *, model=None, steps=1, every=1, **options):
    """What a probe sees of some steps."""
    model, session = small_session(name, low, model)
    probe = session.observe(every=every, **options)
    for _ in range(steps):
        step(model, session)
    return probe.flush()


def two_passes(model, name="O1"):
    """What a probe sees of one step of two backward passes, by subject."""
    model, session = small_session(name, model=model)
    probe = session.observe(every=1)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        session.backward(model(x).square().mean())
    session.step()
    return {(o.module, o.kind, o.name): (o.stats, o.scale) for o in probe.flush()}


def by_subject(observations, kind):
    return {(o.module, o.name): o for o in observations if o.kind == kind}


def hooks_of(model):
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


@every_plan
def test_what_is_seen_is_what_the_step_had(name, low):
    model, optimizer, session = start(name, low)
    train(session, model, optimizer, [0, 1])
    probe = session.observe(every=1)
    outputs, gradients = {}, {}

    def keep(module_name):
        def hook(module, args, output):
            outputs[module_name] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(lambda g: gradients.__setitem__(module_name, g.clone()))

        return hook

    handles = [module.register_forward_hook(keep(n)) for n, module in model.named_modules()]
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    inputs, targets = batch(2)
    optimizer.zero_grad()
    session.backward(F.mse_loss(model(inputs), targets))
    weight_grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    record = session.step(max_norm=1.0)
    for handle in handles:
        handle.remove()

    if name == "O0":  # elsewhere it is a cast of what the head returned
        del outputs[""], gradients[""]
    seen = probe.flush()
    scale = float(record.scale)
    assert {o.step for o in seen} == {3}
    for kind, expected, kind_scale in (
        ("activation", {(n, ""): t for n, t in outputs.items()}, 1.0),
        ("activation_grad", {(n, ""): t for n, t in gradients.items()}, scale),
        ("weight", {tuple(n.rsplit(".", 1)): t for n, t in weights.items()}, 1.0),
        ("weight_grad", {tuple(n.rsplit(".", 1)): t for n, t in weight_grads.items()}, scale),
    ):
        found = by_subject(seen, kind)
        assert found.keys() == expected.keys()
        for subject, t in expected.items():
            observation = found[subject]
            assert observation.stats == measure(t), (kind, subject)
            assert (observation.scale, observation.sampled) == (kind_scale, False)
            assert observation.format == {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[t.dtype]


def test_the_first_step_and_then_every_nth_are_seen():
    model, session = small_session()
    step(model, session)
    probe = session.observe(every=4, tensors="weight")
    for _ in range(12):
        step(model, session)
    assert [o.step for o in probe.flush() if (o.module, o.name) == ("first", "weight")] == [2, 4, 8, 12]
    assert probe.flush() == []


class Counted(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@every_plan
@pytest.mark.slow_but("O0", "O1-bf16", "O2-fp16")
def test_a_step_that_is_not_observed_has_no_operation_more(name, low):
    def counted(session, model, optimizer, number):
        with Counted() as mode:
            train(session, model, optimizer, [number])
        return mode.calls

    model, optimizer, session = start(name, low)
    reference = [counted(session, model, optimizer, number) for number in range(6)]
    session.close()

    model, optimizer, session = start(name, low)
    before = counted(session, model, optimizer, 0)
    with session.observe(every=3, tensors=ALL):
        observed = counted(session, model, optimizer, 1)
        between = [counted(session, model, optimizer, number) for number in (2, 3)]
        counted(session, model, optimizer, 2)  # under the mode too: the first step under another one sorts anew
    after = counted(session, model, optimizer, 5)
    session.close()
    assert before == reference[0]
    assert sum(observed.values()) > sum(reference[1].values())
    assert between[1] == reference[3]
    assert after == reference[5]


def test_hooks_exist_only_while_a_step_is_observed():
    model, session = small_session()
    probe = session.observe(every=3)
    assert hooks_of(model)
    step(model, session)
    assert not hooks_of(model)
    step(model, session)
    assert hooks_of(model)
    probe.detach()
    assert not hooks_of(model)
    probe.detach()
    with session.observe():
        assert hooks_of(model)
    assert not hooks_of(model)
    session.observe()
    session.close()
    assert not hooks_of(model)


@pytest.mark.parametrize("calls", [0, 2, 4])
def test_ctrl_c_while_a_probe_is_attached_leaves_nothing_behind(calls, monkeypatch):
    model, session = small_session()
    probe = session.observe(every=2)
    put_on, left = nn.Module.register_forward_hook, iter(range(calls))

    def interrupted(*args, **kwargs):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return put_on(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, session)  # looks at the one after it
    monkeypatch.undo()
    step(model, session)
    probe.detach()
    assert not hooks_of(model)
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert {o.step for o in probe.flush()} == {1}


@pytest.mark.slow_but("O1-bf16", "O2-fp16")
@mixed_plans
def test_observed_steps_train_to_the_same_bits(name, low):
    results = []
    for observe in (False, True):
        model, optimizer, session = start(name, low)
        if observe:
            session.observe(every=1, tensors=ALL)
        train(session, model, optimizer, range(4), poison=[2])
        results.append(list(model.state_dict().values()))
        session.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@mixed_plans
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.slow_but("True-O1-fp16", "True-O2-bf16")
def test_an_observed_step_does_not_wait_for_the_device(name, low, native, monkeypatch):
    if not native:
        monkeypatch.setattr(kernel, "loops", lambda: None)
        monkeypatch.setattr(steppers, "takes_updates", lambda *args: False)
    model, optimizer, session = start(name, low)
    probe = session.observe(every=1, tensors=ALL, sample=64)
    train(session, model, optimizer, [0])
    with NoSync():
        train(session, model, optimizer, [1, 2])
    assert {o.step for o in probe.flush()} == {1, 2, 3}


class Wrapped(nn.Module):
    """Runs an inner model under a checkpoint, and a layer of its own after it."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Small()
        self.own = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.own(self.inner(x))
        return self.own(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_a_checkpoint_that_computes_again_is_counted_once(name, reentrant):
    found = two_passes(Wrapped(reentrant), name)
    assert found == two_passes(Wrapped(None), name)
    assert found["inner.first", "activation", ""][0].count == 2 * 5 * 6


class Nested(nn.Module):
    """A checkpoint around a layer and another checkpoint."""

    def __init__(self, outer, inner):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.outer, self.inner = outer, inner

    def middle(self, x):
        x = torch.relu(self.first(x))
        return self.second(x) if self.inner is None else checkpoint(self.second, x, use_reentrant=self.inner)

    def forward(self, x):
        return self.middle(x) if self.outer is None else checkpoint(self.middle, x, use_reentrant=self.outer)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the first pass inside
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_checkpoints_inside_checkpoints_are_counted_once(outer, inner):
    assert two_passes(Nested(outer, inner)) == two_passes(Nested(None, None))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("O1", how) for how in ("compile", "fullgraph", "in place", "a function around it", "a part")),
        *((name, "compile") for name in ("O0", "O2", "O3")),
    ],
)
@pytest.mark.slow_but("a part")
def test_compiled_models_are_seen_uncompiled_and_compile_only_once(name, how, on_processor):
    on_processor(AVX512_BF16)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, session = small_session(name, model=Wrapped(None))
    call = model
    if how in ("compile", "fullgraph"):
        call = torch.compile(model, backend=backend, fullgraph=how == "fullgraph")
    elif how == "in place":
        model.compile(backend=backend)
    elif how == "a part":
        model.inner.compile(backend=backend)
    else:
        call = torch.compile(lambda x: model(x) + 1, backend=backend)
    probe = session.observe(every=3)
    for _ in range(7):
        step(call, session)
    seen = probe.flush()
    assert len(graphs) == 1
    assert torch._dynamo.eval_frame._stance.stance == "default"
    for kind in ("activation", "activation_grad"):
        steps = collections.Counter(o.step for o in seen if o.kind == kind)
        # four inside, one after them, and the model's own output where it is a cast
        count = 5 if name == "O0" else 6
        assert steps == {1: count, 3: count, 6: count}


@pytest.mark.slow_but("O1", "O3")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_a_model_in_ddp_is_seen_under_its_own_names(name):
    found = []
    for wrap in (lambda model: model, nn.parallel.DistributedDataParallel):
        model, session = small_session(name)
        probe = session.observe(every=1)
        wrapped = wrap(model)
        step(wrapped, session)
        found.append({(o.module, o.kind, o.name): o.stats for o in probe.flush()})
        session.close()
    assert found[0] == found[1]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        return self.tied(self.again(self.layer(x)))


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_a_shared_module_counts_all_its_calls_and_a_shared_weight_once(name):
    seen = observed(name, model=Twice())
    assert by_subject(seen, "activation")["layer", ""].stats.count == 2 * 20
    assert by_subject(seen, "activation_grad")["layer", ""].stats.count == 2 * 20
    assert set(by_subject(seen, "weight")) == {("layer", "weight"), ("layer", "bias"), ("tied", "bias")}


class Structured(nn.Linear):
    def forward(self, x):
        hidden = super().forward(x)
        return {"logits": hidden * 2, "rest": (hidden + 1, torch.arange(3), None)}


class Sums(nn.Sequential):
    def forward(self, x):
        out = super().forward(x)
        return out["logits"] + out["rest"][0]


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_outputs_that_are_no_tensor_are_entered(name):
    seen = observed(name, model=Sums(Structured(4, 4)))
    for kind in ("activation", "activation_grad"):
        assert {name for module, name in by_subject(seen, kind) if module == "0"} == {"logits", "rest.0"}


def test_a_container_that_returns_what_a_child_returned_is_left_out_but_an_in_place_change_is_not():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Sequential(nn.Linear(4, 2)))
    found = by_subject(observed("O0", model=model), "activation")
    assert [module for module, _ in found] == ["0.0", "0.1", "1.0"]
    assert found["0.0", ""].stats.negatives > 0
    assert found["0.1", ""].stats.negatives == 0


def test_passes_without_gradients_are_not_seen():
    model, session = small_session()
    probe = session.observe(every=1)
    with torch.no_grad():
        model(torch.ones(100, 4))
    with torch.inference_mode():
        model(torch.ones(100, 4))
    step(model, session)
    assert by_subject(probe.flush(), "activation")["first", ""].stats.count == 5 * 6


def test_gradients_name_the_scale_that_they_carry():
    model, session = small_session("O2", "fp16", loss_scale=128.0)
    probe = session.observe(every=1, tensors=("activation_grad", "weight_grad"))
    step(model, session)
    session.backward(model(torch.ones(5, 4)).mean())
    session.unscale_()
    session.step()
    seen = probe.flush()
    assert {o.scale for o in seen if o.step == 1} == {128.0}
    assert {o.scale for o in seen if o.step == 2 and o.kind == "activation_grad"} == {128.0}
    assert {o.scale for o in seen if o.step == 2 and o.kind == "weight_grad"} == {1.0}


def test_losses_with_scales_of_their_own_are_told_apart():
    model, session = small_session("O1", "fp16", loss_scale=halfstep.Scaling("dynamic", init=64.0))
    probe = session.observe(every=1, tensors="activation_grad")
    session.backward(model(torch.ones(5, 4)).mean())
    session._scales.of(1).value.fill_(16.0)
    session.backward(model(torch.ones(5, 4)).mean(), loss_id=1)
    session.step()
    found = [o for o in probe.flush() if o.module == "first"]
    assert sorted((o.scale, o.stats.count) for o in found) == [(16.0, 30), (64.0, 30)]
    assert found[0].stats.amax / found[0].scale == pytest.approx(found[1].stats.amax / found[1].scale, rel=0.02)


def test_a_graph_that_outlives_its_step_is_not_counted_later():
    model, session = small_session()
    probe = session.observe(every=2, tensors="activation_grad")
    kept = model(torch.ones(5, 4)).mean()
    step(model, session)  # the first step, observed
    session.backward(kept)  # in the second step, whose probe did not see that forward
    session.step()
    assert {(o.step, o.stats.count) for o in probe.flush() if o.module == "first"} == {(1, 30)}


def test_a_probe_may_come_and_go_between_forward_and_backward():
    results = []
    for observed in (False, True):
        model, session = small_session("O2")
        x = torch.ones(5, 4)
        probe = session.observe(every=1) if observed else None
        loss = model(x).square().mean()
        if probe is not None:
            probe.detach()
        backward_and_step(session, loss)
        loss = model(x).square().mean()
        if probe is not None:
            late = session.observe(every=1)
        backward_and_step(session, loss)
        results.append(list(model.state_dict().values()))
        if probe is not None:
            assert probe.flush() == []
            assert {o.kind for o in late.flush()} == {"weight", "weight_grad"}
        session.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_hook_on_a_leaf_goes_with_the_step():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    model, session = small_session("O0", model=model)
    probe = session.observe(every=5, tensors="activation_grad")
    x = torch.ones(5, 4, requires_grad=True)
    step(model, session, x)
    assert not x._backward_hooks
    assert set(by_subject(probe.flush(), "activation_grad")) == {("0", ""), ("1", "")}


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("*", {"", "first", "body.0", "body.1", "last"}),
        ("body", {"body.0", "body.1"}),
        ("type:ReLU", {"body.1"}),
        (["first", "last"], {"first", "last"}),
    ],
)
def test_patterns_choose_modules_with_all_below_them(pattern, modules):
    assert {o.module for o in observed(modules=pattern)} == modules


def test_a_sample_reads_a_part_and_says_so():
    seen = observed(model=nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)), sample=128)
    found = {(o.module, o.kind, o.name): (o.stats.count, o.sampled) for o in seen}
    assert found["0", "weight", "weight"] == (128, True)
    assert found["0", "weight", "bias"] == (100, False)
    assert found["0", "activation", ""] == (128, True)
    assert found["1", "activation", ""] == (10, False)


def test_copies_and_pickles_of_an_observed_model_are_not_observed():
    model, session = small_session("O0")
    probe = session.observe(every=1, tensors="activation")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(torch.ones(7, 4)), twin(torch.ones(7, 4)))
    step(model, session)
    assert by_subject(probe.flush(), "activation")["first", ""].stats.count == 30
    assert b"halfstep.train.probe" not in pickle.dumps(model)


def test_observations_go_to_the_log_and_to_recorders_and_stay_for_flush():
    sink, log = Kept(), []
    model, session = small_session(sinks=[sink])
    probe = session.observe(every=1, log=log.append)
    step(model, session)
    assert log == [o for o in sink.others if isinstance(o, halfstep.records.Observation)]
    assert log == probe.flush()
    assert log


def test_what_is_never_flushed_is_dropped_with_one_notice(monkeypatch, caplog):
    monkeypatch.setattr(probe_module, "KEPT", 20)
    seen = observed(steps=6, tensors="weight")  # 6 tensors a step
    assert caplog.text.count("drops the oldest") == 1
    assert {o.step for o in seen} == {4, 5, 6}


def test_what_a_log_has_is_not_kept_for_long(monkeypatch, caplog):
    monkeypatch.setattr(probe_module, "KEPT_DELIVERED", 20)
    model, session = small_session()
    log = []
    probe = session.observe(every=1, tensors="weight", log=log.append)
    for _ in range(6):
        step(model, session)
    assert len(log) == 36
    assert {o.step for o in probe.flush()} == {4, 5, 6}
    assert "drops" not in caplog.text


def test_a_probe_that_sees_no_forward_says_so_once(caplog):
    model, session = small_session()
    probe = session.observe(every=1)
    for _ in range(2):
        weight = model.first.weight
        backward_and_step(session, (weight * 2).sum())
    notices = [r.getMessage() for r in caplog.records]
    assert sum("saw no activation in step 1" in notice for notice in notices) == 1
    assert len(notices) == 1
    assert by_subject(probe.flush(), "activation") == {}


def test_tensors_whose_elements_cannot_be_read_are_named_once(caplog):
    model, session = small_session("O0")
    probe = session.observe(every=1, tensors="activation")
    params = dict(model.named_parameters())
    for _ in range(2):
        torch.func.vmap(lambda x: torch.func.functional_call(model, params, (x,)))(torch.ones(3, 4))
        step(model, session)
    (notice,) = [r.getMessage() for r in caplog.records]
    assert "cannot read some tensors, of type Tensor" in notice
    assert {o.stats.count for o in probe.flush() if o.module == "first"} == {30}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": "frist"}, "did you mean 'first'"),
        ({"modules": ["first", "nothing.*"]}, r"the pattern 'nothing\.\*' in modules matches no module"),
        ({"modules": []}, "modules is empty"),
        ({"modules": 3}, "modules is 3; pass a pattern of module names as a string"),
        ({"tensors": None}, "tensors is None; pass a string such as 'activation'"),
        ({"modules": "type:"}, "names no class"),
        ({"tensors": "weigth"}, "did you mean 'weight'"),
        ({"tensors": ()}, "tensors is empty"),
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, r"every is 2\.5"),
        ({"sample": 0}, "sample is 0"),
        ({"sample": 0.5}, r"sample is 0\.5"),
        ({"log": "run.jsonl"}, "log is 'run.jsonl'; pass a function"),
        ({"precision": 1}, "precision is 1; pass True to compare modules with fp32, or False"),
        ({"modules": "type:ReLU", "tensors": ("weight", "update")}, "has a floating-point parameter"),
    ],
)
def test_what_is_not_there_is_refused_in_words(arguments, message):
    model, session = small_session()
    with pytest.raises(ObserveError, match=message):
        session.observe(**arguments)
    assert not hooks_of(model)


@pytest.mark.parametrize(
    ("tensor", "sample", "message"),
    [
        ([1.0, 2.0], None, r"expected a tensor, got list; pass torch\.as_tensor\(values\)"),
        (torch.ones(3), 0, "sample is 0; pass how many"),
        (torch.ones(3), "64", "sample is '64'; pass how many"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(tensor, sample, message):
    with pytest.raises(ObserveError, match=message):
        halfstep.measure(tensor, sample=sample)


def test_inference_and_closed_sessions_have_no_steps_to_observe():
    model = Small()
    with (
        halfstep.initialize(model, None, "O1", low="bf16") as session,
        pytest.raises(SessionError, match="does not run"),
    ):
        session.observe()
    with pytest.raises(SessionError, match="closed"):
        session.observe()
    optimizer = torch.optim.LBFGS(model.parameters())
    with halfstep.initialize(model, optimizer, "O0") as session, pytest.raises(SessionError, match="closure"):
        session.observe()


def test_several_optimizers_make_steps_of_their_own():
    models = [Small(), Small()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session = halfstep.initialize(models, optimizers, "O2", low="bf16")
    sizes = {f"{index}.{name}": size for index in "01" for name, size in (("first", 6), ("body.0", 6), ("last", 2))}
    probe = session.observe(every=1, tensors=("weight", "weight_grad", "update"))
    session.backward(models[0](torch.ones(3, 4)).mean() + models[1](torch.ones(4, 4)).mean())
    session.step(optimizers[1])
    session.step(optimizers[0])
    seen = {(o.step, o.kind, o.module.split(".")[0]) for o in probe.flush()}
    weights = {(step, "weight", index) for step in (1, 2) for index in "01"}
    assert seen == weights | {(1, kind, "1") for kind in ("weight_grad", "update")} | {
        (2, kind, "0") for kind in ("weight_grad", "update")
    }
    backward_and_step(session, models[0](torch.ones(3, 4)).mean() + models[1](torch.ones(4, 4)).mean())
    counts = {(o.kind, o.module): o.stats.count for o in probe.flush() if o.name == "bias"}
    kinds = ("weight", "weight_grad", "update")
    assert counts == {(kind, name): size for kind in kinds for name, size in sizes.items()}


def test_what_blame_runs_is_no_part_of_the_step():
    found = []
    for asked in (False, True):
        model, session = small_session()
        probe = session.observe(every=1)
        if asked:
            halfstep.blame(session, lambda model=model: model(torch.full((9, 4), 3.0)).mean())
        step(model, session)
        found.append([o.stats for o in probe.flush()])
        session.close()
    assert found[0] == found[1]


@pytest.mark.gpu
def test_an_observed_step_on_a_gpu_does_not_wait_and_counts_as_the_cpu_does():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Small().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        session = halfstep.initialize(model, optimizer, "O2", low="bf16")
        probe = session.observe(every=1, tensors=ALL, sample=64)
        x = torch.ones(5, 4, device=device)
        for _ in range(2):
            step(model, session, x)
        with no_cuda_sync() if device == "cuda" else nullcontext():
            step(model, session, x)
        found.append({(o.step, o.module, o.kind, o.name): o.stats for o in probe.flush()})
        session.close()
    assert found[0].keys() == found[1].keys()
    for key, stats in found[0].items():
        assert found[1][key].count == stats.count
        if key[0] == 1 and key[2] == "weight":
            assert found[1][key].exponents == stats.exponents


class Offset(nn.Module):
    def forward(self, x):
        return (x + 300) - 300  # in bf16 a multiple of 2


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_modules_take_turns_in_being_called_again_in_fp32(name):
    model = nn.Sequential(nn.Linear(4, 16), Offset(), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
    kept = copy.deepcopy(model)
    seen = observed(name, model=model, steps=4, tensors=(), precision=True)
    assert [(each.step, each.module, each.kind) for each in seen] == [
        (1, "0", "precision"), (2, "1", "precision"), (3, "2.0", "precision"), (4, "2.1", "precision")
    ]  # fmt: skip
    off = [each.stats.rms for each in seen]
    assert off[1] > 0.3
    assert max(off[0], off[2]) < 0.02
    assert off[3] == 0.0  # with the same random numbers

    torch.manual_seed(0)
    _, session = small_session(name, model=kept)
    for _ in range(4):
        step(kept, session)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept.parameters(), strict=True))


def test_a_module_that_cannot_be_called_again_is_named(caplog):
    class Once(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    observed(model=nn.Sequential(Once(4, 16)), tensors=(), precision=True)
    assert "a probe cannot call 0 again in fp32: TypeError: no copies" in caplog.text


class Normalizing(nn.Linear):
    def forward(self, x, norm):
        return norm(super().forward(x))


class OfOthers(nn.Module):
    """A BatchNorm that another module calls, and features and an average that hooks keep."""

    def __init__(self, *, hooked):
        super().__init__()
        self.first, self.norm, self.head = Normalizing(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.features, self.average = [], torch.zeros(8)
        if hooked:
            self.first.register_forward_hook(lambda module, args, out: self.keep(out))

    def keep(self, out):
        self.features.append(out)
        self.average = 0.9 * self.average + 0.1 * out.detach().float().mean(0)

    def forward(self, x):
        self.features.clear()
        return self.head(self.first(x, self.norm) - self.average) + sum(each.mean() for each in self.features)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_second_call_in_fp32_leaves_hooks_and_the_buffers_of_other_modules_alone(hooked, caplog):
    def trained(watched):
        torch.manual_seed(0)
        model, x = OfOthers(hooked=hooked), torch.randn(16, 4)
        with halfstep.initialize(model, torch.optim.AdamW(model.parameters(), 0.1), "O2", low="bf16") as session:
            if watched:
                session.observe(every=1, tensors=(), precision=True)
            for _ in range(6):
                session.backward(model(x).square().mean())
                session.step()
        return model

    plain, watched = trained(False), trained(True)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    assert torch.equal(plain.average, watched.average)
    assert ("fp32 whose hooks would run twice: the model itself, first" in caplog.text) is hooked
