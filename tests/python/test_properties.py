"""Random problems: shapes, layouts, strides, dtypes and options are drawn together, and the formula judges."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import formula
import tilewise
from tilewise import masks

SETTINGS = settings(
    max_examples=int(os.environ.get("TILEWISE_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking arrays takes minutes and says little
)

KINDS = ["numpy"]
try:
    import torch

    KINDS.append("torch")
except ImportError:
    torch = None


def in_memory(draw, array):
    """A view with the values of `array` in memory of another shape: other order of axes, gaps of NaN, reversed axes."""
    order = draw(st.permutations(range(array.ndim)))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, -1, -2]), min_size=array.ndim, max_size=array.ndim))
    offset = draw(st.integers(0, 3))
    widths = [n * abs(step) for n, step in zip((array.shape[axis] for axis in order), steps, strict=True)]
    fill = np.nan if array.dtype.kind == "f" else 1
    memory = np.full(int(np.prod(widths)) + offset, fill, array.dtype)[offset:].reshape(widths)
    view = memory[tuple(slice(None, None, step) for step in steps)].transpose(np.argsort(order))
    assert view.shape == array.shape
    view[...] = array
    return view


def to_kind(kind, array, dtype=None):
    """In torch negative strides do not exist: such views are copied."""
    if kind == "numpy":
        return array
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.to(dtype)


def host(a):
    return a if isinstance(a, np.ndarray) else a.detach().double().numpy()


@st.composite
def problems(draw, dtypes=("float64", "float32", "float16", "bfloat16"), largest=40):
    """(kind, dtype, layout, float64 q, k, v as the library sees them, given q, k, v, options, options of the formula)."""
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from([d for d in dtypes if d != "bfloat16" or kind == "torch"]))
    batch = draw(st.sampled_from([1, 1, 2, 3, 0]))
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = st.one_of(st.integers(0, largest), st.sampled_from([1, 63, 64, 65, 127, 129]))
    seqlen_q, seqlen_kv = draw(lengths), draw(lengths)
    dim_qk, dim_v = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = (
        (batch, seqlen_q, heads_kv * group, dim_qk),
        (batch, seqlen_kv, heads_kv, dim_qk),
        (batch, seqlen_kv, heads_kv, dim_v),
    )
    store = "float32" if dtype == "bfloat16" else dtype
    arrays = [rng.standard_normal(shape).astype(store) for shape in shapes]
    if dtype == "bfloat16":
        arrays = [formula.half("bfloat16")(a) for a in arrays]
    exact = [a.astype(np.float64) for a in arrays]
    layout = draw(st.sampled_from(["bshd", "bhsd"]))
    given = []
    for a in arrays:
        view = in_memory(draw, a.swapaxes(1, 2) if layout == "bhsd" else a)
        given.append(to_kind(kind, view, torch.bfloat16 if dtype == "bfloat16" else None))

    shape = (batch, heads_kv * group, seqlen_q, seqlen_kv)
    options, plain = {"layout": layout}, {}

    def option(name, value, chance=4):
        if draw(st.integers(0, chance)) == 0:
            options[name] = plain[name] = value()

    def array_option(name, shapes, make):
        if draw(st.integers(0, 4)) == 0:
            plain[name] = make(draw(st.sampled_from(shapes)))
            options[name] = to_kind(kind, in_memory(draw, plain[name]))

    option("causal", lambda: True, 1)
    option("window", lambda: (draw(st.integers(-1, 50)), draw(st.integers(-1, 50))))
    option("chunk", lambda: draw(st.integers(1, 30)))
    option("q_offset", lambda: draw(st.one_of(st.just("top_left"), st.integers(-40, 60))))
    option("softmax_scale", lambda: draw(st.sampled_from([0.0, 0.1, 1.0, -0.3])))
    option("softcap", lambda: draw(st.sampled_from([0.5, 3.0, 30.0])))
    float_dtype = draw(st.sampled_from([np.float64, np.float32, np.float16]))
    normal = lambda s: rng.standard_normal(s).astype(float_dtype)  # noqa: E731
    array_option("bias", [shape, shape[1:], (1, shape[1], 1, shape[3]), (shape[2], 1), (shape[0], 1, 1, 1)], normal)
    array_option("alibi_slopes", [(shape[1],), (shape[0], shape[1])], normal)
    array_option("sinks", [(shape[1],)], normal)
    array_option(
        "mask", [shape, shape[2:], (shape[0], 1, 1, shape[3]), (shape[1], shape[2], 1)], lambda s: rng.random(s) > 0.4
    )
    return kind, dtype, layout, exact, given, options, plain


@SETTINGS
@given(problems())
def test_forward(problem):
    _, dtype, layout, exact, qkv, options, plain = problem
    ref = formula.forward(*exact, **plain)
    std = formula.forward(*exact, **plain, round_to=None if dtype == "float64" else formula.half(dtype))
    o, lse = tilewise.attention(*qkv, return_lse=True, **options)
    assert type(o) is type(qkv[0]) and o.dtype == qkv[0].dtype
    got = host(o).astype(np.float64)
    formula.assert_accurate(
        got if layout == "bshd" else got.swapaxes(1, 2), ref.o, std.o, dtype, label="o", slack=formula.slack(ref)
    )
    size = 1 + np.abs(np.where(np.isfinite(ref.lse), ref.lse, 0)).max(initial=0)
    plain_error = formula.worst(std.lse, ref.lse)
    error = formula.worst(host(lse), ref.lse)
    assert error <= (1e-11 if dtype == "float64" else 2e-6) * size + 2 * plain_error


@SETTINGS
@given(problems(dtypes=("float64",), largest=20), st.integers(0, 2**32), st.booleans())
def test_backward(problem, seed, with_dlse):
    kind, _, layout, exact, qkv, options, plain = problem
    f = formula.forward(*exact, **plain)
    rng = np.random.default_rng(seed)
    do = rng.standard_normal(f.o.shape)
    dlse = rng.standard_normal(f.lse.shape) if with_dlse else None
    ref = formula.backward(f, do, dlse)
    o, lse, _ = tilewise.attention_forward(*qkv, **options)
    given_do = do.swapaxes(1, 2) if layout == "bhsd" else do
    g = tilewise.attention_backward(
        to_kind(kind, given_do), *qkv, o, lse, dlse=None if dlse is None else to_kind(kind, dlse), **options
    )
    for name in ("dq", "dk", "dv"):
        got = host(getattr(g, name))
        formula.assert_close(got.swapaxes(1, 2) if layout == "bhsd" else got, getattr(ref, name), 1e-10, name)
    tolerance = 1e-10 if all(a.dtype == np.float64 for a in plain.values() if isinstance(a, np.ndarray)) else 2e-3
    if "bias" in plain:
        shape = plain["bias"].shape
        formula.assert_close(host(g.dbias), formula.reduce_to(ref.dbias, shape).reshape(shape), tolerance, "dbias")
    if "alibi_slopes" in plain:
        want = ref.dslopes if plain["alibi_slopes"].ndim == 2 else ref.dslopes.sum(0)
        formula.assert_close(host(g.dalibi_slopes), want, tolerance, "dslopes")
    if "sinks" in plain:
        formula.assert_close(host(g.dsinks), ref.dsinks, tolerance, "dsinks")


@SETTINGS
@given(problems(dtypes=("float32",)))
def test_strides_do_not_change_bits(problem):
    kind, _, _, _, qkv, options, _ = problem
    plain = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in options.items()}
    contiguous = [np.ascontiguousarray(a) if kind == "numpy" else a.contiguous() for a in qkv]
    a, a_lse = tilewise.attention(*qkv, return_lse=True, **options)
    b, b_lse = tilewise.attention(*contiguous, return_lse=True, **plain)
    np.testing.assert_array_equal(host(a), host(b))
    np.testing.assert_array_equal(host(a_lse), host(b_lse))


@SETTINGS
@given(st.data())
def test_packed_is_each_sequence_alone(data):
    kind = data.draw(st.sampled_from(KINDS))
    batch = data.draw(st.integers(0, 5))
    lengths = st.lists(st.sampled_from([0, 0, 1, 2, 5, 17, 70]), min_size=batch, max_size=batch)
    rows, keys = data.draw(lengths), data.draw(lengths)
    slack = data.draw(st.integers(0, 3))
    cu_q, cu_kv = np.cumsum([0, *rows]), np.cumsum([0, *keys])
    group = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    q = rng.standard_normal((cu_q[-1] + slack, 2 * group, 6))
    k, v = rng.standard_normal((cu_kv[-1] + slack, 2, 6)), rng.standard_normal((cu_kv[-1] + slack, 2, 4))
    k[cu_kv[-1] :], v[cu_kv[-1] :], q[cu_q[-1] :] = np.nan, np.nan, np.nan
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([(-1, -1), (9, 0), (3, 8)]))
    index = data.draw(st.sampled_from([np.int32, np.int64]))
    given = [to_kind(kind, a) for a in (q, k, v)]
    cu = {"cu_seqlens_q": to_kind(kind, cu_q.astype(index)), "cu_seqlens_kv": to_kind(kind, cu_kv.astype(index))}
    if data.draw(st.booleans()):  # only a hint, however wrong
        cu["max_seqlen_q"], cu["max_seqlen_kv"] = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    o, lse, _ = tilewise.attention_forward(*given, causal=causal, window=window, **cu)
    do = rng.standard_normal(o.shape)
    g = tilewise.attention_backward(to_kind(kind, do), *given, o, lse, causal=causal, window=window, **cu)
    for n in range(batch):
        i, j = slice(cu_q[n], cu_q[n + 1]), slice(cu_kv[n], cu_kv[n + 1])
        f = formula.forward(q[None, i], k[None, j], v[None, j], causal=causal, window=window)
        formula.assert_close(host(o)[i], f.o[0])
        formula.assert_close(host(lse)[:, i], f.lse[0])
        ref = formula.backward(f, do[None, i])
        formula.assert_close(host(g.dq)[i], ref.dq[0])
        formula.assert_close(host(g.dk)[j], ref.dk[0])
        formula.assert_close(host(g.dv)[j], ref.dv[0])
    for array, end in ((o, cu_q[-1]), (g.dq, cu_q[-1]), (g.dk, cu_kv[-1]), (g.dv, cu_kv[-1])):
        assert (host(array)[end:] == 0).all()
    assert np.isneginf(host(lse)[:, cu_q[-1] :]).all()


def leaf_masks(rng, shape):
    """(mask, dense bool array) of one random kind."""
    batch, heads, seqlen_q, seqlen_kv = shape
    b, h, i, j = np.ix_(range(batch), range(heads), range(seqlen_q), range(seqlen_kv))
    t = i + seqlen_kv - seqlen_q
    kind = rng.integers(0, 8)
    if kind == 0:
        return masks.causal(), j <= t
    if kind == 1:
        left, right = rng.integers(-1, 20, 2)
        return masks.window(left, right), ((left < 0) | (j >= t - left)) & ((right < 0) | (j <= t + right))
    if kind == 2:
        c = int(rng.integers(1, 20))
        return masks.chunk(c), j // c == t // c
    if kind == 3:
        q_ids, kv_ids = rng.integers(-1, 3, (batch, seqlen_q)), rng.integers(-1, 3, (batch, seqlen_kv))
        return masks.documents(q_ids, kv_ids), (q_ids[:, None, :, None] == kv_ids[:, None, None]) & (q_ids >= 0)[
            :, None, :, None
        ]
    if kind == 4:
        keep = rng.random((batch, seqlen_kv)) > 0.5
        return masks.key_padding(keep), keep[:, None, None]
    if kind == 5:
        keep = rng.random((1, heads, seqlen_q, seqlen_kv)) > 0.5
        return masks.dense(keep), keep
    if kind == 6:
        start = rng.integers(0, 30, (batch, seqlen_q))
        end = start + rng.integers(0, 30, (batch, seqlen_q))
        return masks.row_intervals(start, end), (j >= start[:, None, :, None]) & (j < end[:, None, :, None])
    n = int(rng.integers(2, 5))
    return masks.mod(lambda b, h, i, j, s: (i * 3 + j + h) % s.n != 0, n=n), (i * 3 + j + h) % n != 0


def random_mask(rng, shape, depth):
    if depth == 0 or rng.random() < 0.2:
        mask, dense = leaf_masks(rng, shape)
        return mask, np.broadcast_to(dense, shape)
    a, da = random_mask(rng, shape, depth - 1)
    which = rng.integers(0, 3)
    if which == 0:
        return ~a, ~da
    b, db = random_mask(rng, shape, depth - 1)
    return (a & b, da & db) if which == 1 else (a | b, da | db)


@SETTINGS
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 130), st.integers(1, 200))
def test_mask_algebra(seed, depth, seqlen_q, seqlen_kv):
    rng = np.random.default_rng(seed)
    shape = (2, 2, seqlen_q, seqlen_kv)
    q, k = rng.standard_normal((2, seqlen_q, 2, 4)), rng.standard_normal((2, seqlen_kv, 1, 4))
    mask, dense = random_mask(rng, shape, depth)
    f = formula.forward(q, k, k, mask=dense)
    o, lse, _ = tilewise.attention_forward(q, k, k, mask=mask)
    formula.assert_close(lse, f.lse, label=repr(mask))
    formula.assert_close(o, f.o, label=repr(mask))
    do = rng.standard_normal(o.shape)
    g, ref = tilewise.attention_backward(do, q, k, k, o, lse, mask=mask), formula.backward(f, do)
    for name in ("dq", "dk", "dv"):
        formula.assert_close(getattr(g, name), getattr(ref, name), label=f"{name} {mask!r}")


@SETTINGS
@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), max_size=4), st.sampled_from(["bshd", "bhsd"]))
def test_parts_merge_to_the_whole(seed, cuts, layout):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, h, 5)).astype(np.float32) for n, h in ((7, 4), (60, 2), (60, 2)))
    cuts = [0, *sorted(cuts), 60]
    turn = (lambda a: a.swapaxes(1, 2)) if layout == "bhsd" else (lambda a: a)
    parts = [
        tilewise.attention(turn(q), turn(k[:, a:b]), turn(v[:, a:b]), layout=layout, return_lse=True)
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    o, lse = tilewise.merge([p[0] for p in parts], [p[1] for p in parts], layout=layout)
    f = formula.forward(q, k, v)
    formula.assert_close(turn(o), f.o, 3e-6)
    formula.assert_close(lse, f.lse, 3e-6)


@SETTINGS
@given(st.integers(0, 2**32), st.floats(0, 0.99), st.sampled_from(["float32", "float64"]))
def test_dropout_is_the_mask_that_dropout_mask_returns(seed, p, dtype):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, h, 4)).astype(dtype) for n, h in ((19, 4), (37, 2), (37, 2)))
    keep = tilewise.dropout_mask(2, 4, 19, 37, dropout_p=p, seed=(seed, 7))
    f = formula.forward(q, k, v, causal=True, keep=keep, keep_prob=(65536 - round(65536 * p)) / 65536)
    o = tilewise.attention(q, k, v, causal=True, dropout_p=p, seed=(seed, 7))
    formula.assert_close(o, f.o, 1e-5)


@SETTINGS
@given(st.integers(0, 2**32), st.booleans())
def test_hidden_and_slack_data_never_counts(seed, causal):
    """NaN and inf at keys that no query sees, in slack, and in unused rows change no bit, in both passes."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, 2, 4)).astype(np.float32) for n in (9, 80, 80))
    keep = rng.random((2, 80)) > 0.5
    used = np.array([80, int(rng.integers(0, 80))])
    options = {"mask": masks.key_padding(keep), "seqused_kv": used, "causal": causal}
    bad = ~keep | (np.arange(80) >= used[:, None])

    def run():
        o, lse, _ = tilewise.attention_forward(q, k, v, **options)
        g = tilewise.attention_backward(o, q, k, v, o, lse, dlse=np.ones_like(lse), **options)
        return [a.tobytes() for a in (o, lse, g.dq, g.dk, g.dv)]

    clean = run()
    k[bad], v[bad] = rng.choice([np.nan, np.inf, -np.inf]), rng.choice([np.nan, np.inf, -np.inf])
    assert run() == clean


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_sizes(kind, shape):
    q = to_kind(kind, np.ones(shape))
    o, lse, _ = tilewise.attention_forward(q, q, q, causal=True)
    assert tuple(o.shape) == shape and tuple(lse.shape) == (shape[0], shape[2], shape[1])
    g = tilewise.attention_backward(o, q, q, q, o, lse, causal=True)
    assert tuple(g.dq.shape) == tuple(g.dk.shape) == tuple(g.dv.shape) == shape
    # nothing to see, but queries: zero rows
    k = to_kind(kind, np.ones((2, 0, 2, 4)))
    o, lse = tilewise.attention(to_kind(kind, np.ones((2, 3, 2, 4))), k, k, return_lse=True)
    assert (host(o) == 0).all() and np.isneginf(host(lse)).all()
