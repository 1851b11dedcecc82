"""The API on NumPy arrays and torch tensors, option by option, against the formula written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import formula
import tilewise
from tilewise import masks

KINDS = ["numpy", "torch"]


def make(kind, *shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape).astype("float32" if dtype == "bfloat16" else dtype) for shape in shapes]
    if kind == "numpy":
        return arrays
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(a).to(getattr(torch, dtype)) for a in arrays]


def host(a):
    return a if isinstance(a, np.ndarray) else a.detach().double().numpy()


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def qkv(kind):
    return make(kind, (2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 5))


def like(a, array):
    """`array` in the kind of a."""
    if isinstance(a, np.ndarray):
        return np.asarray(array)
    import torch

    return torch.from_numpy(np.array(array))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "top_left by offset": {"causal": True, "q_offset": "top_left"},
    "offset": {"causal": True, "q_offset": 2},
    "far offset": {"causal": True, "q_offset": 2**40},
    "negative offset": {"causal": True, "q_offset": -3},
    "offsets": {"causal": True, "q_offset": np.array([1, 7])},
    "int32 offsets": {"causal": True, "q_offset": np.array([1, 7], np.int32)},
    "window": {"window": (3, 2)},
    "left window": {"window": (4, -1)},
    "window 0": {"window": (0, 0)},
    "chunk": {"chunk": 4},
    "chunk with negative positions": {"chunk": 4, "q_offset": -6},
    "all bands": {"causal": True, "window": (5, 0), "chunk": 7},
    "scale": {"softmax_scale": 0.3},
    "scale 0": {"softmax_scale": 0.0},
    "negative scale": {"softmax_scale": -0.5},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": ("normal", (2, 4, 9, 13))},
    "bias of one row": {"bias": ("normal", (13,))},
    "bias of heads": {"bias": ("normal", (4, 1, 13))},
    "alibi": {"alibi_slopes": ("normal", (4,))},
    "alibi of batch": {"alibi_slopes": ("normal", (2, 4))},
    "sinks": {"sinks": ("normal", (4,))},
    "sinks with empty rows": {"sinks": ("normal", (4,)), "causal": True, "q_offset": -3},
    "mask": {"mask": ("keep", (2, 1, 9, 13))},
    "much": {
        "causal": True, "window": (6, 0), "softcap": 2.0, "bias": ("normal", (1, 4, 9, 13)), "sinks": ("normal", (4,)),
        "alibi_slopes": ("normal", (2, 4)), "mask": ("keep", (9, 13)), "softmax_scale": 0.7,
    },
}  # fmt: skip


def resolve(options, a):
    """(options for tilewise in the kind of a, options for the formula)."""
    rng = np.random.default_rng(5)
    ours, plain = {}, {}
    for name, value in options.items():
        if isinstance(value, tuple) and value[0] == "normal":
            value = rng.standard_normal(value[1])
        elif isinstance(value, tuple) and value[0] == "keep":
            value = rng.random(value[1]) > 0.3
        plain[name] = value
        ours[name] = like(a, value) if isinstance(value, np.ndarray) else value
    if plain.get("causal") == "top_left":
        plain["q_offset"] = "top_left"
    return ours, plain


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_option(qkv, name, layout):
    ours, plain = resolve(OPTIONS[name], qkv[0])
    ref = formula.forward(*map(host, qkv), **plain)
    if layout == "bhsd":
        qkv = [a.swapaxes(1, 2) for a in qkv]
    o, lse = tilewise.attention(*qkv, layout=layout, return_lse=True, **ours)
    assert type(o) is type(qkv[0]) and o.dtype == qkv[0].dtype
    formula.assert_close(host(lse), ref.lse, label="lse")
    formula.assert_close(host(o), ref.o if layout == "bshd" else ref.o.swapaxes(1, 2), label="o")


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_every_option(qkv, name):
    ours, plain = resolve(OPTIONS[name], qkv[0])
    f = formula.forward(*map(host, qkv), **plain)
    rng = np.random.default_rng(7)
    do, dlse = rng.standard_normal(f.o.shape), rng.standard_normal(f.lse.shape)
    ref = formula.backward(f, do, dlse)
    o, lse, rng_used = tilewise.attention_forward(*qkv, **ours)
    assert rng_used is None
    a = qkv[0]
    g = tilewise.attention_backward(like(a, do), *qkv, o, lse, dlse=like(a, dlse), **ours)
    for name in ("dq", "dk", "dv"):
        formula.assert_close(host(getattr(g, name)), getattr(ref, name), label=name)
    if "bias" in ours:
        formula.assert_close(
            host(g.dbias), formula.reduce_to(ref.dbias, ours["bias"].shape).reshape(ours["bias"].shape)
        )
    if "alibi_slopes" in ours:
        slopes = ours["alibi_slopes"]
        formula.assert_close(host(g.dalibi_slopes), ref.dslopes if slopes.ndim == 2 else ref.dslopes.sum(0))
    if "sinks" in ours:
        formula.assert_close(host(g.dsinks), ref.dsinks)


def test_wanted_gradients_and_given_buffers(qkv):
    a = qkv[0]
    bias = make("numpy" if isinstance(a, np.ndarray) else "torch", (9, 13))[0]
    o, lse, _ = tilewise.attention_forward(*qkv, bias=bias)
    do = o
    everything = tilewise.attention_backward(do, *qkv, o, lse, bias=bias)
    some = tilewise.attention_backward(do, *qkv, o, lse, bias=bias, wanted=["k", "bias"])
    assert some.dq is None and some.dv is None
    np.testing.assert_array_equal(host(some.dk), host(everything.dk))
    np.testing.assert_array_equal(host(some.dbias), host(everything.dbias))
    dk = like(a, np.full(tuple(qkv[1].shape), np.nan))
    given = tilewise.attention_backward(do, *qkv, o, lse, bias=bias, dk=dk)
    assert given.dk is dk
    np.testing.assert_array_equal(host(dk), host(everything.dk))
    with pytest.raises(tilewise.InvalidArgumentError, match="wanted"):
        tilewise.attention_backward(do, *qkv, o, lse, wanted=["bias"])
    with pytest.raises(tilewise.InvalidArgumentError, match="dk"):
        tilewise.attention_backward(do, *qkv, o, lse, wanted=["q"], dk=dk)


def test_gradients_of_captured_arrays(qkv):
    a = qkv[0]
    table, weight = like(a, np.linspace(-1, 1, 4 * 21).reshape(4, 21)), like(a, np.array(0.5))
    mod = tilewise.score_mod(lambda x, b, h, i, j, s: x * s.w + s.t[h, i - j + 12], t=table, w=weight)
    o, lse, _ = tilewise.attention_forward(*qkv, score_mod=mod)
    g = tilewise.attention_backward(o, *qkv, o, lse, score_mod=mod)
    assert set(g.captured) == {"t", "w"}
    assert tuple(g.captured["t"].shape) == (4, 21) and tuple(g.captured["w"].shape) == (1,)
    step = 1e-6
    for name, index in (("t", (1, 9)), ("t", (3, 0)), ("w", ())):
        moved = {"t": host(table).copy(), "w": host(weight).copy()}
        values = []
        for sign in (1, -1):
            moved[name][index] += sign * step
            m = tilewise.score_mod(
                lambda x, b, h, i, j, s: x * s.w + s.t[h, i - j + 12], **{n: like(a, v) for n, v in moved.items()}
            )
            values.append((host(tilewise.attention(*qkv, score_mod=m)) * host(o)).sum())
            moved[name][index] -= sign * step
        got = host(g.captured[name])[index if index else 0]
        assert abs(got - (values[0] - values[1]) / (2 * step)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes_meet_the_accuracy_rule(kind, dtype, causal):
    if kind == "numpy" and dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        qkv = [
            a.astype(ml_dtypes.bfloat16)
            for a in make(kind, (2, 70, 4, 32), (2, 70, 2, 32), (2, 70, 2, 32), dtype="float32")
        ]
    else:
        qkv = make(kind, (2, 70, 4, 32), (2, 70, 2, 32), (2, 70, 2, 32), dtype=dtype)
    exact = [a.astype(np.float64) if isinstance(a, np.ndarray) else host(a) for a in qkv]
    ref = formula.forward(*exact, causal=causal)
    std = formula.forward(*exact, causal=causal, round_to=None if dtype == "float64" else formula.half(dtype))
    o, lse = tilewise.attention(*qkv, causal=causal, return_lse=True)
    assert o.dtype == qkv[0].dtype
    assert str(lse.dtype).endswith("float64" if dtype == "float64" else "float32")
    o = o.astype(np.float64) if isinstance(o, np.ndarray) else host(o)
    formula.assert_accurate(o, ref.o, std.o, dtype, slack=formula.slack(ref))
    formula.assert_close(host(lse), ref.lse, 1e-11 if dtype == "float64" else 4e-6)


def test_packed(kind):
    lengths_q, lengths_kv = [3, 0, 5, 1], [4, 2, 5, 0]
    cu_q, cu_kv = np.cumsum([0, *lengths_q]).astype(np.int32), np.cumsum([0, *lengths_kv])
    q, k, v = make(kind, (cu_q[-1] + 2, 4, 8), (cu_kv[-1] + 1, 2, 8), (cu_kv[-1] + 1, 2, 6))
    sinks = like(q, np.array([0.1, 0.2, 0.3, 0.4]))
    o, lse = tilewise.attention(
        q, k, v, cu_seqlens_q=like(q, cu_q), cu_seqlens_kv=like(q, cu_kv), causal=True, sinks=sinks, return_lse=True,
        max_seqlen_q=5, max_seqlen_kv=like(q, np.array(1)),
    )  # fmt: skip
    assert tuple(o.shape) == (11, 4, 6) and tuple(lse.shape) == (4, 11)
    for n, (rows, keys) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        part = [
            host(a)[None, begin : begin + count]
            for a, begin, count in ((q, cu_q[n], rows), (k, cu_kv[n], keys), (v, cu_kv[n], keys))
        ]
        ref = formula.forward(*part, causal=True, sinks=host(sinks))
        formula.assert_close(host(o)[cu_q[n] : cu_q[n] + rows], ref.o[0])
        formula.assert_close(host(lse)[:, cu_q[n] : cu_q[n] + rows], ref.lse[0])
    assert (host(o)[9:] == 0).all() and np.isneginf(host(lse)[:, 9:]).all()


def test_packed_queries_with_a_dense_cache(kind):
    q, k, v = make(kind, (7, 4, 8), (3, 10, 2, 8), (3, 10, 2, 8))
    used = np.array([10, 4, 6], np.int32)
    cu = np.array([0, 2, 3, 7])
    o = tilewise.attention(q, k, v, cu_seqlens_q=like(q, cu), seqused_kv=like(q, used), causal=True)
    for n in range(3):
        part = host(q)[None, cu[n] : cu[n + 1]], host(k)[n : n + 1, : used[n]], host(v)[n : n + 1, : used[n]]
        formula.assert_close(host(o)[cu[n] : cu[n + 1]], formula.forward(*part, causal=True).o[0])


def test_used_rows_and_left_padding(kind):
    q, k, v = make(kind, (3, 6, 2, 8), (3, 9, 2, 8), (3, 9, 2, 8))
    used_q, used_kv, pad = np.array([6, 0, 4]), np.array([9, 5, 7], np.int32), np.array([2, 0, 3])
    o, lse = tilewise.attention(
        q,
        k,
        v,
        seqused_q=like(q, used_q),
        seqused_kv=like(q, used_kv),
        leftpad_kv=like(q, pad),
        causal=True,
        return_lse=True,
    )
    for n in range(3):
        part = host(q)[n : n + 1, : used_q[n]], *(host(a)[n : n + 1, pad[n] : used_kv[n]] for a in (k, v))
        ref = formula.forward(*part, causal=True)
        formula.assert_close(host(o)[n, : used_q[n]], ref.o[0])
        formula.assert_close(host(lse)[n, :, : used_q[n]], ref.lse[0])
        assert (host(o)[n, used_q[n] :] == 0).all() and np.isneginf(host(lse)[n, :, used_q[n] :]).all()


def test_out(qkv):
    expected = tilewise.attention(*qkv)
    out = like(qkv[0], np.full((2, 9, 4, 5), np.nan))
    assert tilewise.attention(*qkv, out=out) is out
    np.testing.assert_array_equal(host(out), host(expected))
    strided = like(qkv[0], np.full((2, 9, 4, 10), np.nan))
    view = strided[..., ::2]
    o, lse = tilewise.attention(*qkv, out=view, return_lse=True)
    assert o is view
    np.testing.assert_array_equal(host(strided)[..., ::2], host(expected))
    assert np.isnan(host(strided)[..., 1::2]).all()


def test_nothing_is_written_when_a_call_is_refused(qkv):
    out = like(qkv[0], np.full((2, 9, 4, 5), 7.0))
    for options in (
        {"window": (-2, 0)},
        {"chunk": -1},
        {"dropout_p": 1.0},
        {"backend": "none"},
        {"sinks": like(qkv[0], np.zeros(3))},
    ):
        with pytest.raises(tilewise.Error):
            tilewise.attention(*qkv, out=out, **options)
    assert (host(out) == 7).all()


def test_reference_is_float64(kind):
    qkv = make(kind, (1, 5, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4), dtype="float32")
    o, lse = tilewise.reference(*qkv, causal=True, return_lse=True)
    assert str(o.dtype).endswith("float64") and str(lse.dtype).endswith("float64")
    formula.assert_close(host(o), formula.forward(*map(host, qkv), causal=True).o, 1e-12)
    with pytest.raises(tilewise.InvalidArgumentError, match="reference"):
        tilewise.reference(*qkv, backend="cpu_tiled")


def test_probabilities(qkv):
    q, k, v = qkv
    ref = formula.forward(*map(host, qkv), causal=True)
    _, lse = tilewise.attention(*qkv, causal=True, return_lse=True)
    formula.assert_close(host(tilewise.attn_probs(q, k, causal=True)), ref.p)
    formula.assert_close(host(tilewise.attn_probs(q, k, lse, causal=True)), ref.p)
    formula.assert_close(
        host(tilewise.attn_probs(q, k, lse, rows=[8, 0], heads=[3], causal=True)), ref.p[:, [3]][:, :, [8, 0]]
    )
    formula.assert_close(
        host(tilewise.attn_probs(q, k, rows=2, heads=like(q, np.array([1, 0])), causal=True)),
        ref.p[:, [1, 0]][:, :, [2]],
    )
    swapped = tilewise.attn_probs(q.swapaxes(1, 2), k.swapaxes(1, 2), layout="bhsd", causal=True)
    formula.assert_close(host(swapped), ref.p)
    with pytest.raises(tilewise.InvalidArgumentError, match="rows"):
        tilewise.attn_probs(q, k, rows=[9])
    with pytest.raises(tilewise.InvalidArgumentError, match="heads"):
        tilewise.attn_probs(q, k, heads=[4])


def test_probabilities_of_packed_sequences(kind):
    q, k = make(kind, (5, 2, 4), (6, 2, 4))
    cu_q, cu_kv = like(q, np.array([0, 3, 5])), like(q, np.array([0, 2, 6]))
    p = host(tilewise.attn_probs(q, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv))
    assert p.shape == (2, 2, 3, 4)
    ref = formula.forward(host(q)[None, 3:], host(k)[None, 2:], host(k)[None, 2:])
    formula.assert_close(p[1, :, :2], ref.p[0])
    assert (p[0, :, :, 2:] == 0).all() and (p[1, :, 2] == 0).all()


def test_dropout(qkv):
    p = 0.3
    keep = tilewise.dropout_mask(2, 4, 9, 13, dropout_p=p, seed=11)
    assert keep.dtype == bool and 0.5 < keep.mean() < 0.9
    keep_prob = (65536 - round(65536 * p)) / 65536
    f = formula.forward(*map(host, qkv), keep=keep, keep_prob=keep_prob)
    o, lse = tilewise.attention(*qkv, dropout_p=p, seed=11, return_lse=True)
    # keep_prob is a float32 in every kernel
    formula.assert_close(host(o), f.o, 1e-6)
    formula.assert_close(host(lse), f.lse)
    o, lse, rng = tilewise.attention_forward(*qkv, dropout_p=p, seed=like(qkv[0], np.array([11, 0])))
    assert host(rng).tolist() == [11, 0]
    do = like(qkv[0], np.ones(f.o.shape))
    g = tilewise.attention_backward(do, *qkv, o, lse, dropout_p=p, rng=rng)
    ref = formula.backward(f, host(do))
    for name in ("dq", "dk", "dv"):
        formula.assert_close(host(getattr(g, name)), getattr(ref, name), 1e-6, name)
    with pytest.raises(tilewise.InvalidArgumentError, match="rng"):
        tilewise.attention_backward(do, *qkv, o, lse, dropout_p=p)


def test_seeds(qkv):
    def run(**options):
        return host(tilewise.attention(*qkv, dropout_p=0.5, **options))

    np.testing.assert_array_equal(run(seed=3), run(seed=np.array([3, 0])))
    np.testing.assert_array_equal(run(seed=3), run(seed=(3, 0)))
    assert not np.array_equal(run(seed=3), run(seed=(3, 1)))
    np.testing.assert_array_equal(run(seed=2**64 - 1), run(seed=-1))
    assert not np.array_equal(run(), run())  # drawn anew
    if isinstance(qkv[0], np.ndarray):
        np.random.seed(0)
        first = run()
        np.random.seed(0)
    else:
        import torch

        torch.manual_seed(0)
        first = run()
        torch.manual_seed(0)
        assert type(tilewise.dropout_mask(1, 1, 2, 2, dropout_p=0.5, seed=torch.tensor([1, 2]))) is torch.Tensor
    np.testing.assert_array_equal(first, run())
    # the layout of the mask does not depend on that of the tensors
    swapped = [a.swapaxes(1, 2) for a in qkv]
    np.testing.assert_array_equal(
        run(seed=3), host(tilewise.attention(*swapped, layout="bhsd", dropout_p=0.5, seed=3)).swapaxes(1, 2)
    )


def test_merge(kind):
    q, k, v = make(kind, (2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6))
    o, lse = tilewise.attention(q, k, v, return_lse=True)
    cuts = [0, 3, 3, 10, 12]
    for layout in ("bshd", "bhsd"):
        parts = [
            tilewise.attention(
                *[a if layout == "bshd" else a.swapaxes(1, 2) for a in (q, k[:, i:j], v[:, i:j])],
                layout=layout,
                return_lse=True,
            )
            for i, j in zip(cuts, cuts[1:], strict=False)
        ]
        merged, merged_lse = tilewise.merge([o for o, _ in parts], [lse for _, lse in parts], layout=layout)
        formula.assert_close(host(merged if layout == "bshd" else merged.swapaxes(1, 2)), host(o), 1e-12)
        formula.assert_close(host(merged_lse), host(lse), 1e-12)
        stacked, _ = tilewise.merge(
            like(q, np.stack([host(o) for o, _ in parts])),
            like(q, np.stack([host(lse) for _, lse in parts])),
            layout=layout,
        )
        np.testing.assert_array_equal(host(stacked), host(merged))


def test_merge_of_packed_and_empty_parts(kind):
    o1, o2 = make(kind, (7, 2, 4), (7, 2, 4))
    lse1, lse2 = make(kind, (2, 7), (2, 7), seed=3)
    lse2[:, 3] = -np.inf
    o2[3] = float("nan")  # a part without keys contributes nothing, whatever it holds
    o, lse = tilewise.merge([o1, o2], [lse1, lse2])
    np.testing.assert_allclose(host(o)[3], host(o1)[3])
    np.testing.assert_allclose(host(lse)[:, 3], host(lse1)[:, 3])
    np.testing.assert_allclose(host(lse), np.logaddexp(host(lse1), host(lse2)))
    lse1[:, 3] = -np.inf
    o, lse = tilewise.merge([o1, o2], [lse1, lse2])
    assert (host(o)[3] == 0).all() and np.isneginf(host(lse)[:, 3]).all()
    empty = tilewise.merge([o1[:0]], [lse1[:, :0]])
    assert tuple(empty[0].shape) == (0, 2, 4) and tuple(empty[1].shape) == (2, 0)


@pytest.mark.parametrize(
    ("parts", "lses", "hint"),
    [
        ([], [], "0 and 0"),
        ([(2, 3, 4, 5)], [(2, 4, 3), (2, 4, 3)], "1 and 2"),
        ([(2, 3, 4, 5)], [(2, 3, 4)], r"\[2, 4, 3\]"),
        ([(2, 3, 4, 5), (2, 3, 4, 6)], [(2, 4, 3)] * 2, r"o_parts\[1\]"),
        ([(3, 4)], [(3,)], "rank 2"),
    ],
)
def test_merge_refuses(parts, lses, hint):
    with pytest.raises(tilewise.InvalidArgumentError, match=hint):
        tilewise.merge([np.zeros(s) for s in parts], [np.zeros(s) for s in lses])


def test_plan(qkv):
    plan = tilewise.plan(*qkv, causal=True, return_lse=True)
    assert plan.workspace_bytes >= 0
    assert "forward" in str(plan) and "implementation" in str(plan) and "forward" in repr(plan)
    o, lse = tilewise.attention(*qkv, causal=True, return_lse=True)
    planned_o, planned_lse = plan.run(*qkv)
    np.testing.assert_array_equal(host(planned_o), host(o))
    np.testing.assert_array_equal(host(planned_lse), host(lse))
    memory = np.empty(plan.workspace_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[:] = 0xFF
    out = like(qkv[0], np.zeros(tuple(o.shape)))
    lse_out = like(qkv[0], np.zeros(tuple(lse.shape)))
    plan.run(*qkv, out=out, lse=lse_out, workspace=memory[start : start + plan.workspace_bytes])
    np.testing.assert_array_equal(host(out), host(o))
    np.testing.assert_array_equal(host(lse_out), host(lse))
    # other lengths, same plan
    shorter = [a[:1, :4] for a in qkv]
    np.testing.assert_array_equal(host(plan.run(*shorter)[0]), host(tilewise.attention(*shorter, causal=True)))
    with pytest.raises(tilewise.InvalidArgumentError, match="another plan"):
        plan.run(*qkv, softcap=1.0)
    with pytest.raises(tilewise.InvalidArgumentError, match="planned|made for"):
        plan.run(qkv[0], qkv[1], qkv[2][..., :3])
    with pytest.raises(tilewise.ArgumentTypeError, match="sinks"):
        plan.run(*qkv, sink=None)
    if plan.workspace_bytes:
        with pytest.raises(tilewise.InvalidArgumentError, match="workspace"):
            plan.run(*qkv, workspace=np.empty(1, np.uint8))
    with pytest.raises(tilewise.ArgumentTypeError, match="backward=True"):
        plan.run_backward(o, *qkv, o, lse)


def test_backward_plan(qkv):
    sinks = like(qkv[0], np.zeros(4))
    o, lse, _ = tilewise.attention_forward(*qkv, sinks=sinks)
    plan = tilewise.plan(*qkv, sinks=sinks, backward=True)
    assert plan.backward and "backward" in str(plan)
    planned = plan.run_backward(o, *qkv, o, lse)
    direct = tilewise.attention_backward(o, *qkv, o, lse, sinks=sinks)
    for name in ("dq", "dk", "dv", "dsinks"):
        np.testing.assert_array_equal(host(getattr(planned, name)), host(getattr(direct, name)))
    with pytest.raises(tilewise.ArgumentTypeError, match="run_backward"):
        plan.run(*qkv)


def test_plans_need_shapes_only():
    torch = pytest.importorskip("torch")
    q, k = torch.empty(2, 9, 4, 8, device="meta"), torch.empty(2, 13, 2, 8, device="meta")
    plan = tilewise.plan(q, k, k, causal=True)
    real = torch.randn(2, 9, 4, 8), torch.randn(2, 13, 2, 8)
    assert torch.equal(plan.run(real[0], real[1], real[1]), tilewise.attention(real[0], real[1], real[1], causal=True))
    assert tilewise.supports(q, k, k) == (True, [])
    packed = torch.empty(7, 2, 8, device="meta")
    assert tilewise.supports(packed, packed, packed, cu_seqlens_q=[0, 3, 7], cu_seqlens_kv=np.array([0, 3, 7])) == (
        True,
        [],
    )
    assert "backward" in tilewise.explain(q, k, k, sinks=torch.zeros(4, device="meta"))


def test_supports_and_explain(qkv):
    assert tilewise.supports(*qkv, causal=True) == (True, [])
    assert tilewise.supports(*qkv, backward=True) == (True, [])
    ok, reasons = tilewise.supports(qkv[0], qkv[1], qkv[2][:, :5])
    assert not ok and "13" in reasons[0]
    ok, reasons = tilewise.supports(*qkv, backend="no such")
    assert not ok and "reference" in reasons[0]
    with pytest.raises(tilewise.ArgumentTypeError, match="causal"):
        tilewise.supports(*qkv, casual=True)
    text = tilewise.explain(*qkv, causal=True)
    assert "forward" in text and "backward" in text
    assert "backward" not in tilewise.explain(*qkv, backward=False)
    assert "reference" in tilewise.explain(*qkv, backend="reference")


def test_doctor():
    text = tilewise.doctor()
    assert "self-test: passed" in text
    for word in ("python:", "numpy:", "cpu isa:", "cpu threads:", "implementation: reference"):
        assert word in text


def test_batch_invariance_and_validate_are_accepted(qkv):
    expected = tilewise.attention(*qkv, batch_invariant=True, validate=True, deterministic=True)
    alone = tilewise.attention(*[a[1:] for a in qkv], batch_invariant=True)
    np.testing.assert_array_equal(host(expected)[1:], host(alone))


def test_the_signature_is_the_documented_one():
    import inspect

    parameters = inspect.signature(tilewise.attention).parameters
    assert (
        list(parameters)
        == (
            "q k v layout causal q_offset window chunk mask softmax_scale softcap bias alibi_slopes sinks score_mod "
            "cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv seqused_q seqused_kv leftpad_kv dropout_p seed "
            "deterministic batch_invariant return_lse out backend validate"
        ).split()
    )
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults["layout"] == "bshd" and defaults["q_offset"] == "bottom_right" and defaults["window"] == (-1, -1)
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name not in "qkv")
    assert tilewise._problem.OPTION_NAMES == set(defaults) - {"return_lse", "out"}


def test_mask_data_of_packed_calls_is_packed_like_q_and_k(kind):
    q, k, v = make(kind, (5, 2, 4), (6, 2, 4), (6, 2, 4))
    cu_q, cu_kv = like(q, np.array([0, 3, 5])), like(q, np.array([0, 2, 6]))
    q_ids, kv_ids = np.array([0, 1, 1, 0, 0]), np.array([1, 0, 0, 0, 1, 1])
    o = tilewise.attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, mask=masks.documents(like(q, q_ids), like(q, kv_ids))
    )
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 5), slice(2, 6))):
        ref = formula.forward(
            host(q)[None, rows], host(k)[None, keys], host(v)[None, keys], mask=q_ids[rows, None] == kv_ids[None, keys]
        )
        formula.assert_close(host(o)[rows], ref.o[0])
