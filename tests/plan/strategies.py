"""Every valid plan, as hypothesis strategies: all fields, no value left at its default throughout."""

from hypothesis import strategies as st

from halfstep.edits import OpChanges, Policy, Rule, Scaling
from halfstep.formats import BF16, FP16
from halfstep.plan.plan import Plan

OPS = ("softmax", "exp", "sum", "layer_norm", "matmul", "cat", "torch.linalg.inv", "my_ops:swish", "a.b:c.d")

names = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda word: word.isprintable() and word.strip())
patterns = st.one_of(
    st.from_regex(r"[a-z*?]{1,4}(\.[a-z0-9*]{1,3}){0,3}", fullmatch=True),
    st.just(""),
    st.from_regex(r"type:[A-Z][a-z*]{0,5}", fullmatch=True),
)
scale_values = st.floats(2.0**-126, 2.0**126)


@st.composite
def dynamic_scalings(draw):
    low, init, high = sorted(draw(st.tuples(scale_values, scale_values, scale_values)))
    return Scaling(
        "dynamic",
        init=init,
        growth=draw(st.floats(1.0, 2.0**20, exclude_min=True)),
        backoff=draw(st.floats(2.0**-20, 1.0, exclude_max=True)),
        growth_interval=draw(st.integers(1, 2**31 - 1)),
        min=low,
        max=high,
        hysteresis=draw(st.integers(1, 2**31 - 1)),
    )


scalings = st.one_of(
    st.just(Scaling("none")), st.builds(Scaling, st.just("static"), init=scale_values), dynamic_scalings()
)


@st.composite
def policies(draw, param):
    width = draw(st.sampled_from(("full", "low") if param == "low" else ("full",)))
    compute = "low" if width == "low" else draw(st.sampled_from(("full", "low")))
    return Policy(width, compute, draw(st.sampled_from(("full", "low", "input"))))


@st.composite
def op_changes(draw):
    ops = draw(st.permutations(OPS))
    cuts = sorted(draw(st.lists(st.integers(0, len(ops)), min_size=4, max_size=4)))
    bounds = [0, *cuts]
    return OpChanges(*(tuple(ops[start:stop]) for start, stop in zip(bounds, cuts, strict=False)))


@st.composite
def rules(draw, param):
    found = draw(st.lists(patterns, unique=True, max_size=4))
    widths = st.sampled_from(("keep", "low", "full"))
    return tuple(draw(_rule(pattern, draw(policies(param)), draw(widths))) for pattern in found)


def _rule(pattern, policy, buffers):
    words = ("policy",) if policy.compute == "full" else ("policy", "keep", "low")
    return st.builds(Rule, st.just(pattern), st.just(policy), st.just(buffers), st.sampled_from(words))


@st.composite
def plans(draw):
    low = draw(st.sampled_from((BF16, FP16)))
    name = draw(names)
    kept = draw(st.sampled_from(("full", "bf16", "8bit")))
    if draw(st.integers(0, 7)) == 0:
        return Plan(name, low, "full", "none", "full", "none", Scaling("none"), "keep", moments=kept)
    param = draw(st.sampled_from(("full", "low")))
    masters = ("none",) if param == "full" else ("none", "copy", "split") if low == BF16 else ("none", "copy")
    master = draw(st.sampled_from(masters))
    unkept = param == "low" and master == "none" and low == BF16
    return Plan(
        name=name,
        low=low,
        param=param,
        ops="table",
        norms="full" if param == "full" else draw(st.sampled_from(("full", "low"))),
        master=master,
        scale=draw(scalings),
        output=draw(st.sampled_from(("full", "low", "keep"))),
        input=draw(st.sampled_from(("keep", "low"))),
        moments=kept,
        full_moments=tuple(draw(st.lists(names, max_size=2))),
        rounding=draw(st.sampled_from(("nearest", "stochastic") if unkept else ("nearest",))),
        op_changes=draw(op_changes()),
        rules=draw(rules(param)),
    )
