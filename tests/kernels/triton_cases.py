"""What the tests of the Triton kernels compute: in a process with Triton's interpreter, or on a CUDA device.

The interpreter must be chosen before Triton is imported, so no test process imports this file's kernels by itself.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from halfstep.train.kernels.batch import Batch, Kept, Place, Scratch, Wanted, is_dense
from halfstep.train.optim import laws, moments
from halfstep.train.optim.implementations import IMPLEMENTATIONS, update
from halfstep.train.optim.masters import join, split
from halfstep.train.scale.norm import Clip

# Param groups, written out: an optimizer that is made imports Triton, before its interpreter is chosen.
_ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False}
_ADAM |= {"amsgrad": False, "maximize": False}
_ADAMW = {**_ADAM, "decoupled_weight_decay": True}
_SGD = {"lr": 0.1, "weight_decay": 0.0, "maximize": False, "momentum": 0.0, "nesterov": False}
_LION = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
_LAMB = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True}
_LAMB |= {"grad_averaging": True, "max_grad_norm": None, "decoupled_weight_decay": True, "always_adapt": False}
_NOVO = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
_NOVO |= {"grad_averaging": True, "reg_inside_moment": False, "norm_type": 2, "init_zero": False}
OPTIONS = {
    "adam": _ADAM,
    "adam-l2-amsgrad": {**_ADAM, "weight_decay": 0.1, "amsgrad": True},
    "adam-maximize": {**_ADAM, "betas": (0.5, 0.9), "eps": 1e-3, "maximize": True},
    "adamw": {**_ADAMW, "weight_decay": 0.01},
    "adamw-amsgrad-maximize": {**_ADAMW, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    "adamw-tensor-lr": {**_ADAMW, "weight_decay": 0.3, "lr": torch.tensor(1e-2)},
    "lion": _LION,
    "lion-decay-maximize": {**_LION, "betas": (0.8, 0.95), "weight_decay": 0.3, "maximize": True},
    "lion-decay-tensor-lr": {**_LION, "weight_decay": 0.3, "lr": torch.tensor(1e-2)},
    "sgd": _SGD,
    "sgd-l2-maximize": {**_SGD, "weight_decay": 0.1, "maximize": True},
    "sgd-momentum": {**_SGD, "momentum": 0.9},
    "sgd-nesterov": {**_SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "lamb": _LAMB,
    "lamb-l2-tensor-lr": {**_LAMB, "decoupled_weight_decay": False, "grad_averaging": False, "lr": torch.tensor(1e-2)},
    "lamb-no-decay": {**_LAMB, "weight_decay": 0.0, "bias_correction": False},
    "lamb-adapt": {**_LAMB, "weight_decay": 0.0, "always_adapt": True, "betas": (0.5, 0.8)},
    "novograd": _NOVO,
    "novograd-inside": {**_NOVO, "reg_inside_moment": True, "init_zero": True, "betas": (0.95, 0.98)},
    "novograd-largest-tensor-lr": {**_NOVO, "norm_type": 0, "grad_averaging": False, "lr": torch.tensor(1e-2)},
    "novograd-largest-zero": {**_NOVO, "norm_type": 0, "bias_correction": False, "init_zero": True, "eps": 1e-3},
    "sgd-momentum-tensor-lr": {**_SGD, "lr": torch.tensor(0.1), "momentum": 0.5, "maximize": True},
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STORAGES = {  # layout, dtype of the weights, dtypes that the gradients have in turn
    "full": ("full", FP32, [FP32]),
    "full-low-gradients": ("full", FP32, [BF16, FP16, FP32]),
    "split": ("split", BF16, [BF16]),
    "split-full-gradients": ("split", BF16, [FP32]),
    "copy-bf16": ("copy", BF16, [BF16]),
    "copy-fp16": ("copy", FP16, [FP16, FP32]),
    "low-bf16": ("low", BF16, [BF16]),
    "low-fp16": ("low", FP16, [FP16]),
    "full-8bit": ("full", FP32, [FP32]),
    "split-8bit": ("split", BF16, [BF16]),
    "split-bf16-moments": ("split", BF16, [BF16]),
    "low-rounded": ("low", BF16, [BF16]),
    "low-rounded-8bit": ("low", BF16, [BF16]),
}
KEPT = {"full-8bit": "8bit", "split-8bit": "8bit", "split-bf16-moments": "bf16", "low-rounded": "full"}
KEPT |= {"low-rounded-8bit": "8bit"}
CODED = {o for o, options in OPTIONS.items() if not options.get("amsgrad") and "grad_averaging" not in options}
MATRIX = [(o, s) for o in OPTIONS for s in STORAGES if KEPT.get(s, "full") == "full" or o in CODED]
SHAPES = [(7, 19), (0,), (1100,), (), (2, 3, 2, 2), (5, 256), (37,)]  # of groups with gaps and without


def row_of(options):
    if "grad_averaging" in options:
        return laws.LAMB if "always_adapt" in options else laws.NOVOGRAD
    return laws.ADAM if "eps" in options else laws.LION if "betas" in options else laws.SGD


def implementation():
    from halfstep.train.kernels import triton as kernels

    def run(row, batch, group):
        return partial(kernels.update, row.triton, batch, row.options(group)) if kernels.fits(batch) else None

    return run


def new(values):
    """Copies of tensors, of which the last starts 4 bytes behind a multiple of 16, as a view of a flat buffer may."""
    copies = [torch.empty_like(value).copy_(value) for value in values]
    flat = torch.empty(values[-1].numel() + 64, dtype=values[-1].dtype, device=values[-1].device)
    start = 4 // flat.element_size()
    copies[-1] = flat[start : start + values[-1].numel()].view(values[-1].shape).copy_(values[-1])
    return copies


def states_of(storage, options, full):
    """The states of full weights as a storage keeps them, and what its batch has as `kept`: places of shards."""
    row, width = row_of(options), KEPT.get(storage, "full")
    codes = dict(zip(row.states(options), row.codes(options), strict=False))
    sizes = [max(1, t.numel() // (t.shape[0] if t.dim() > 1 else 1)) for t in full]
    places = [Place(i, 5 * i, size, size + 3 * i) for i, size in enumerate(sizes)]
    if width == "full":
        states = {name: [torch.full_like(t, row.start) for t in full] for name in row.states(options)}
        states |= {name: [torch.zeros((), device=t.device) for t in full] for name in row.scalars}
        return states, Kept("full", True, tuple(codes.values()), places, {}) if storage in KEPT else None
    each = [moments._new(t, place, width, codes) for t, place in zip(full, places, strict=True)]
    bases = {name: [b.kept.bases[name][0] for b in each] for name in codes if width == "8bit"}
    states = {name: [b.states[name][0] for b in each] for name in codes}
    return states, Kept(width, "rounded" in storage, tuple(codes.values()), places, bases)


def batch_of(storage, options, device):
    layout, low, _ = STORAGES[storage]
    g = torch.Generator().manual_seed(1)
    whole = row_of(options).whole  # those have no norm of an empty tensor, which no step contains
    full = [torch.randn(shape, generator=g).to(device) for shape in SHAPES if not whole or 0 not in shape]
    (image,) = (i for i, t in enumerate(full) if t.dim() == 4)
    full[image] = full[image].contiguous(memory_format=torch.channels_last)
    if layout == "split":
        weights, extras = (list(part) for part in zip(*map(split, full), strict=True))
    else:
        weights, extras = [value.to(low) for value in full], full if layout == "copy" else []
    states, kept = states_of(storage, options, full)
    states = {name: new(tensors) for name, tensors in states.items()}
    steps = [torch.zeros((), device=device) for _ in full] if row_of(options).counts or kept else []
    return Batch(layout, new(weights), new(extras) if extras else [], [], states, steps, whole=whole, kept=kept)


def gradients(batch, dtypes, step):
    g = torch.Generator().manual_seed(100 + step)
    made = []
    for i, weight in enumerate(batch.weights):
        values = (torch.randn(weight.shape, generator=g) * 4).to(dtypes[i % len(dtypes)])
        made.append(torch.empty_like(weight, dtype=values.dtype).copy_(values))
    return made


def distance(one, other):
    """The largest number of representable numbers that lie between two tensors, element by element."""
    if not one.numel():
        return 0
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    low, high = (t.contiguous().view(kind).long() for t in (one, other))
    smallest = torch.iinfo(kind).min
    low, high = (torch.where(t < 0, smallest - t, t) for t in (low, high))
    if kind is torch.int8 or (torch.equal(one.isnan(), other.isnan()) and not one.isnan().any()):
        return int((low - high).abs().max())
    return -1


def values(batch):
    """Everything that an update writes, split weights joined."""
    if batch.layout == "split":
        yield from (join(w, extra) for w, extra in zip(batch.weights, batch.extras, strict=True))
    else:
        yield from batch.weights
        yield from batch.extras
    for tensors in (*batch.states.values(), *(batch.kept.bases.values() if batch.kept else ())):
        yield from tensors
    yield from batch.steps


def compare(options_name, storage, steps, device="cpu"):
    """Updates by the kernels and by the reference; the largest distance of anything that they write."""
    from halfstep.train.kernels import triton as kernels

    options = OPTIONS[options_name]
    lr = options["lr"]
    if isinstance(lr, torch.Tensor):
        options = {**options, "lr": lr.to(device)}
    dtypes = STORAGES[storage][2]
    tables = [{"triton": implementation()}, {"eager": IMPLEMENTATIONS["eager"]}]
    batches = [batch_of(storage, options, device) for _ in tables]
    scratches = [Scratch() for _ in tables]
    assert kernels.fits(replace(batches[0], grads=gradients(batches[0], dtypes, 0)))
    start = [value.clone() for value in values(batches[0])]
    for step in range(steps):
        found = torch.tensor(step % 7 in (0, 3), device=device)  # the first is one
        factor = torch.tensor(0.3, device=device) if step % 2 else None
        for batch, table, scratch in zip(batches, tables, scratches, strict=True):
            grads = gradients(batch, dtypes, step)
            if step % 7 == 3:
                grads[2].fill_(float("inf"))
            now = options if isinstance(lr, torch.Tensor) else {**options, "lr": lr / (1 + step)}
            update(row_of(options), replace(batch, grads=grads), now, factor, found, scratch, table)
    moved = [not torch.equal(a, b) for a, b in zip(start, values(batches[0]), strict=True) if a.numel() > 1]
    assert all(moved), "an update that changes nothing is no update"
    pairs = zip(values(batches[0]), values(batches[1]), strict=True)
    return max(distance(one, other) for one, other in pairs)


def nans_stored_alike(storage, device="cpu"):
    """Whether updates to NaN store NaN weights, also of those that round to a zero, and the reference's bits."""
    layout, low, _ = STORAGES[storage]
    some = torch.tensor([0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF], dtype=torch.int32, device=device)
    nans = torch.cat([some, some - 2**31]).view(torch.float32).repeat(150)
    zeros = torch.zeros_like(nans)
    stored = []
    for table in ({"triton": implementation()}, {"eager": IMPLEMENTATIONS["eager"]}):
        extras = {"split": [zeros.to(torch.int16)], "copy": [zeros.clone()]}.get(layout, [])
        batch = Batch(layout, [zeros.to(low)], extras, [nans], {})
        false = torch.tensor(False, device=device)
        update(row_of(_SGD), batch, {**_SGD, "lr": 1.0}, None, false, Scratch(), table)
        stored.append([t.view(torch.uint8) for t in written(batch)])
    nan = batch.weights[0].float().isnan().all()
    return bool(nan) and all(map(torch.equal, *stored))


def skip_changes_nothing(options_name, storage, device="cpu"):
    """Whether every bit is as it was after a skip with infinite and NaN gradients."""

    options = OPTIONS[options_name]
    dtypes = STORAGES[storage][2]
    batch = batch_of(storage, options, device)
    table = {"triton": implementation()}
    for tensor in values(replace(batch, layout="full", kept=None)):
        tensor.neg_()  # zeros of the state too: a -0.0 that came back as 0.0 would show
    before = [t.contiguous().view(torch.uint8 if t.dim() else t.dtype).clone() for t in written(batch)]
    for bad in (float("inf"), float("nan"), 1.0):
        grads = [torch.full_like(g, bad) for g in gradients(batch, dtypes, 0)]
        true = torch.tensor(True, device=device)
        update(row_of(options), replace(batch, grads=grads), options, None, true, Scratch(), table)
    after = [t.contiguous().view(torch.uint8 if t.dim() else t.dtype) for t in written(batch)]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def written(batch):
    return [*batch.weights, *batch.extras, *values(replace(batch, layout="copy", weights=[], extras=[]))]


def read(tensors, device="cpu"):
    """Norm, test and flags of the read pass, and whether the gradients are as they were; as Python values."""
    from halfstep.train.kernels import triton as kernels

    held = [t.to(device) for t in tensors]
    if is_dense(held[-1]):
        held[-1] = new(held[-1:])[0]
    before = [t.clone() for t in held]
    scratch = Scratch()
    norm, found, flags, _ = kernels.read(held, scratch)
    again = kernels.read(held, scratch)[0]
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(held, before, strict=True))
    assert norm.dtype is torch.float32
    assert (norm.shape, found.shape, flags.shape) == ((), (), (len(held),))
    assert torch.equal(norm, again) or bool(norm.isnan())
    return float(norm), bool(found), flags.tolist(), same


def judged_differ(tensors, device="cpu"):
    """What a step may want to know of gradients for which the kernel and torch's operations give different bits."""
    from halfstep.train.kernels import triton as kernels

    held, wrong = [t.to(device) for t in tensors], []
    for scale, noted, most in product((None, 2.0**120, 0.3), (None, False, True), (None, 0.5, 1e-30, 1e39)):
        given = [None if value is None else torch.tensor(value, device=device) for value in (scale, noted)]
        norm, found, _, (true, skip, factor) = kernels.read(held, Scratch(), Wanted(*given, most))
        inverse = torch.ones_like(norm) if scale is None else given[0].reciprocal()
        expected = [norm * inverse, found | bool(noted)]
        got = [true, skip]
        if scale is None and most is None:
            assert factor is None
        else:
            clip = 1.0 if most is None else Clip(norm.device).factor(norm * inverse, most)
            expected.append(inverse * clip)
            got.append(factor)
        if not all(torch.equal(a, b) or (a.isnan() and b.isnan()) for a, b in zip(expected, got, strict=True)):
            wrong.append((scale, noted, most, expected, got))
    return wrong


def session_bits(name, low, tables, device="cpu"):
    """What some steps of a session leave behind, one of them skipped, under other tables of updates and readers."""
    from halfstep.train.kernels import triton as kernels
    from halfstep.train.scale.norm import READERS, Reader
    from tests.contracts import cases

    rows = {"triton": implementation(), "eager": IMPLEMENTATIONS["eager"]}
    kept = dict(IMPLEMENTATIONS), dict(READERS)
    try:
        IMPLEMENTATIONS.clear()
        IMPLEMENTATIONS.update({table: rows[table] for table in tables})
        READERS.clear()
        READERS["triton"] = Reader(kernels.can_read, kernels.read)
        model, optimizer, session = cases.start(name, low, loss_scale=128.0)
        records = cases.train(session, model, optimizer, range(4), poison=[2])
        assert [bool(record.skipped) for record in records] == [False, False, True, False]
        found = cases.snapshot(model, optimizer)
        session.close()
    finally:
        for table, before in zip((IMPLEMENTATIONS, READERS), kept, strict=True):
            table.clear()
            table.update(before)
    return found


def sessions_differ(name, low):
    """The names of what differs between a session under the kernels and one under the reference."""
    from tests.contracts.cases import differing

    return differing(session_bits(name, low, ["triton"]), session_bits(name, low, ["eager"]))


def far_ends_differ(options_name, device="cpu"):
    """What differs between tensors and the ends of longer ones, whose indices do not fit in 32 bits."""
    from halfstep.train.kernels import triton as kernels

    far, made, where = 2**31, kernels.Launches._made, kernels.addresses

    def shifted(launches, starts):
        for launch in made(launches, starts):
            table = torch.frombuffer(bytearray(launch.table), dtype=torch.int64).view(-1, len(launch.places))
            table[0] -= far // launches._length  # the blocks before them are not run
            table[1] += far
            yield replace(launch, table=table.numpy().tobytes())

    found = []
    for patched in (False, True):
        batch = batch_of("split", OPTIONS[options_name], device)
        for tensors in (batch.weights, batch.extras, batch.steps, *batch.states.values()):
            del tensors[3:]
        batch.grads[:] = gradients(batch, [BF16], 0)
        row, false = row_of(OPTIONS[options_name]), torch.tensor(False, device=device)
        try:
            if patched:
                kernels.Launches._made = lambda *args: list(shifted(*args))
                kernels.addresses = lambda ts: [t.data_ptr() - (far * t.element_size() if t.dim() else 0) for t in ts]
            kernels.update(row.triton, batch, row.options(OPTIONS[options_name]), None, false, Scratch())
            found.append([*written(batch), kernels.read(batch.grads, Scratch())[0]])
        finally:
            kernels.Launches._made, kernels.addresses = made, where
    return [i for i, (one, other) in enumerate(zip(*found, strict=True)) if not torch.equal(one, other)]


def casts_differ(name, product, device="cpu"):
    """The cases in which the kernels' casts of a matrix and its transpose are not the law's bits and counts."""
    from halfstep.train.cast.recipes import RECIPES, round_operand
    from halfstep.train.kernels.casts import cast as kernel

    torch.manual_seed(0)
    recipe, wrong = RECIPES[name], []
    cast = recipe.casts[product, "a"]
    for rows, columns in ((64, 96), (130, 32), (5, 64), (1, 32)):
        x = torch.randn(rows, columns) * torch.randint(-30, 30, (rows, columns)).float().exp2()
        given = {"wide": x}
        if rows == 5:  # each kind of value once: an interpreter is slow
            given |= {"low": x.bfloat16(), "transposed": x.t().contiguous().t(), "zeros": x * 0, "tiny": x * 1e-41}
            given |= {"huge": x.clamp(-1, 1) * 3e38, "broadcast": x[:1].expand(rows, -1)}
            given |= {str(bad): x.clone() for bad in (float("inf"), float("nan"))}
        for case, value in given.items():
            if case in ("inf", "nan"):
                value[rows // 2, 3] = float(case)
            value = value.to(device)
            counts, expected = torch.zeros(2, 2, 3, dtype=torch.int64, device=device)
            whole = cast.block == (None, None)
            pair = kernel(value, cast.elements, cast.block[1], list(counts), whole=whole, multiple=recipe.multiple)
            alone = kernel(value, cast.elements, cast.block[1], [torch.zeros_like(counts[0])], whole=whole)[0]
            across = torch.nn.functional.pad(value.t(), (0, -rows % recipe.multiple))
            laws = [
                round_operand(each, cast, counts=lost) for each, lost in zip((value, across), expected, strict=True)
            ]
            same = torch.equal(counts, expected)
            for (elements, decode), law in zip((*pair, alone), (*laws, laws[0]), strict=True):
                same &= torch.equal(decode.nan_to_num(-1), law.decode.nan_to_num(-1))
                same &= torch.equal(elements.float().nan_to_num(500), law.elements.float().nan_to_num(500))
            if not same:
                wrong.append((rows, columns, case))
    return wrong


# ---- in a process of its own ---------------------------------------------------------------------------------------


def interpret():
    """Begins a process that runs kernels in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from triton.runtime import interpreter

    original, seen = interpreter._patch_lang, set()

    class Stays:
        def restore(self):
            pass

    def patch_once(fn):  # for every call of a nested kernel function it costs more than the call itself
        if id(fn.__globals__) not in seen:
            original(fn)
            seen.add(id(fn.__globals__))
        return Stays()

    interpreter._patch_lang = patch_once


def compile_only():
    """Begins a process in which launches compile for a Hopper GPU and run nothing."""
    import tempfile

    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="halfstep-triton-")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGpu:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(NoGpu())
    run = JITFunction.run

    def compile_it(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        PTX.setdefault(self.fn.__name__, {})[compiled.hash] = compiled.asm["ptx"]
        return compiled

    JITFunction.run = compile_it


PTX = {}


def compiled(settings, storage="split", lengths=(2000,)):
    """The PTX of each variant that updates under these options, and a read, compile, by kernel."""
    from halfstep.train.kernels import triton as kernels

    PTX.clear()
    layout, low, dtypes = STORAGES[storage]
    for i, options in enumerate(settings):
        weights = [torch.zeros(length + i, dtype=low) for length in lengths]
        zeros = [torch.zeros(w.shape) for w in weights]
        extras = [torch.zeros(w.shape, dtype=torch.int16) for w in weights] if layout == "split" else zeros
        batch = Batch(
            layout,
            weights,
            extras if layout in ("split", "copy") else [],
            [torch.zeros(w.shape, dtype=dtypes[0]) for w in weights],
            states_of(storage, options, zeros)[0],
            [torch.zeros(3)[i % 3] for _ in weights],  # addresses that are multiples of 16, and others
            kept=states_of(storage, options, zeros)[1],
        )
        flags = torch.zeros(32, dtype=torch.bool)
        row = row_of(options)
        kernels.update(row.triton, batch, row.options(options), torch.ones(5)[i % 5], flags[i % 32], Scratch())
        kernels.read(batch.grads, Scratch(), Wanted(torch.ones(5)[i % 5], flags[i % 32], 1.0 + i))
    return {name: list(variants.values()) for name, variants in PTX.items()}
