"""Problems that users of attention libraries have reported, as tests.

Each test is named by the id of the report in the project's collection; the sources (fa = Dao-AILab/flash-attention,
pt = pytorch/pytorch, xf = facebookresearch/xformers, hf = huggingface/transformers, fi = flashinfer-ai/flashinfer, ...)
stand in the docstrings. Here are those that a CPU can pose; with TILEWISE_TEST_DEVICE=cuda their tensors are on the GPU. Shapes are [batch, heads, length, dim] (layout "bhsd") unless
a test says otherwise; large shapes are scaled down where the reason of the failure allows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time

import numpy as np
import pytest

import formula
import tilewise
from tilewise import masks, ops

torch = pytest.importorskip("torch")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
host_only = pytest.mark.skipif(DEVICE != "cpu", reason="about host memory or the CPU's threads")


@pytest.fixture(autouse=True)
def _device():
    """Whatever a test makes without saying where is on DEVICE."""
    with contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE):
        yield


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator("cpu").manual_seed(seed + 1000 * len(shape) + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale).to(dtype).to(DEVICE)


def host(t):
    return t.detach().cpu().double().numpy()


def here(a):
    """An array of NumPy where the tensors are."""
    return a if DEVICE == "cpu" else torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE)


def swapped(a):
    return a.swapaxes(1, 2)


def check(q, k, v, *, layout="bhsd", do=None, dlse=None, backward=True, ref=None, **options):
    """o, lse and gradients against the formula; `ref` has the formula's options where they differ. Returns them."""
    turn = swapped if layout == "bhsd" else (lambda a: a)
    plain = {name: host(a) if isinstance(a, torch.Tensor) else a for name, a in {**options, **(ref or {})}.items()}
    plain = {
        name: a for name, a in plain.items() if name not in ("seed", "deterministic", "batch_invariant", "score_mod")
    }
    if ref and "score_mod" in ref:
        plain["score_mod"] = ref["score_mod"]
    exact = [turn(host(a)) for a in (q, k, v)]
    f = formula.forward(*exact, **plain)
    q, k, v = (a.detach().requires_grad_(backward) for a in (q, k, v))
    options = {name: here(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
    o, lse = tilewise.attention(q, k, v, layout=layout, return_lse=True, **options)
    dtype = NAMES[q.dtype]
    std = formula.forward(*exact, **plain, round_to=None if dtype == "float64" else formula.half(dtype))
    formula.assert_accurate(turn(host(o)), f.o, std.o, dtype, label="o", slack=formula.slack(f))
    formula.assert_close(host(lse), f.lse, 1e-9 if dtype == "float64" else 3e-5 if dtype == "float32" else 3e-3, "lse")
    if not backward:
        return o.detach(), lse.detach(), None
    do = torch.ones_like(o) if do is None else do
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    grads = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    if "score_mod" not in plain:
        expected = formula.backward(f, turn(host(do)), host(dlse))
        for name, g in zip(("dq", "dk", "dv"), grads, strict=True):
            formula.assert_close(turn(host(g)), getattr(expected, name), TOLERANCE[q.dtype], name)
    return o.detach(), lse.detach(), grads


def before_a_wall(array):
    """A copy of `array` whose last byte is the last of its page; the page after it cannot be read."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy.setflags(write=True)
    copy[...] = array
    return copy


def lazily_mapped(shape, strides, dtype):
    """Zeros at strides that span far more memory than there is; only touched pages exist."""
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, reach * np.dtype(dtype).itemsize, flags=flags)
    except (OSError, ValueError):
        pytest.skip("this machine does not map that much")
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * flat.itemsize for s in strides])


# ------------------------------------------------------------------------ A. masked rows, NaN, data that is not used


def test_A01():
    """pt#103963: bool mask true only in [:4, :4]; rows 4-7 were NaN."""
    q, k, v = (randn(1, 1, 8, 8, seed=n) for n in range(3))
    keep = np.zeros((8, 8), bool)
    keep[:4, :4] = True
    o, lse, grads = check(q, k, v, mask=keep)
    assert (o[:, :, 4:] == 0).all() and torch.isneginf(lse[:, :, 4:]).all() and (grads[0][:, :, 4:] == 0).all()
    assert torch.allclose(
        o[:, :, :4], tilewise.attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], layout="bhsd"), atol=1e-6
    )


def test_A02():
    """pt#103749: mask [1, 1, 6, 10], lower triangular in 5 rows, row 5 all false."""
    q, k, v = randn(1, 2, 6, 8), randn(1, 2, 10, 8), randn(1, 2, 10, 8, seed=1)
    keep = np.tril(np.ones((1, 1, 6, 10), bool))
    keep[..., 5, :] = False
    o, lse, _ = check(q, k, v, mask=keep, softmax_scale=0.125)
    assert (o[:, :, 5] == 0).all() and torch.isneginf(lse[:, :, 5]).all()


def test_A04():
    """pt#109517: additive mask of finfo.min on the first 128 of 441 columns; NaN in one backend."""
    q, k, v = (randn(1, 1, 441, 64, seed=n) for n in range(3))
    bias = torch.zeros(441)
    bias[:128] = torch.finfo(torch.float32).min
    o, _, grads = check(q, k, v, bias=bias)
    rest = tilewise.attention(q, k[:, :, 128:], v[:, :, 128:], layout="bhsd")
    assert torch.allclose(o, rest, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in grads) and (grads[1][:, :, :128] == 0).all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_A05(which):
    """pt#101967: NaN in a masked key or value leaked into the output."""
    q, k, v = (torch.arange(8.0).reshape(1, 2, 1, 4) for _ in range(3))
    keep = np.array([[True, False], [True, False]])
    run = lambda: check(q, k, v, layout="bshd", mask=keep)  # noqa: E731
    clean = run()
    {"k": k, "v": v}[which][0, 1, 0, 0] = torch.nan
    o, lse, grads = run()
    assert torch.equal(o, clean[0]) and torch.equal(lse, clean[1])
    assert all(torch.equal(a, b) for a, b in zip(grads, clean[2], strict=True))


def test_A07():
    """fa#2374: varlen decode from a cache whose unused part is NaN."""
    used = torch.tensor([32, 64, 96, 48], dtype=torch.int32)
    q = randn(4, 8, 64, dtype=torch.bfloat16)
    k, v = randn(4, 128, 8, 64, dtype=torch.bfloat16), randn(4, 128, 8, 64, dtype=torch.bfloat16, seed=1)
    for n in range(4):
        k[n, used[n] :], v[n, used[n] :] = torch.nan, torch.nan
    cu = torch.arange(5, dtype=torch.int32)
    o = tilewise.attention(q, k, v, cu_seqlens_q=cu, seqused_kv=used, causal=True)
    for n in range(4):
        alone = tilewise.attention(q[None, n : n + 1], k[n : n + 1, : used[n]], v[n : n + 1, : used[n]])
        assert torch.isfinite(o[n]).all() and torch.allclose(o[n].float(), alone[0, 0].float(), atol=1e-2)


@host_only
@pytest.mark.parametrize("seqlen_kv", [1, 65, 127])
def test_A08(seqlen_kv):
    """fa#1395: keys that do not fill a tile, memory after them poisoned, or not there at all."""
    q = randn(1, 7, 2, 24).numpy()
    k, v = randn(1, seqlen_kv, 2, 24, seed=1).numpy(), randn(1, seqlen_kv, 2, 24, seed=2).numpy()
    expected, lse, _ = tilewise.attention_forward(q, k, v)
    gradients = tilewise.attention_backward(expected, q, k, v, expected, lse)
    poisoned = [np.full((1, 200, 2, 24), np.nan, np.float32) for _ in range(2)]
    for memory, a in zip(poisoned, (k, v), strict=True):
        memory[:, :seqlen_kv] = a
    walled = [before_a_wall(a) for a in (q, k, v)]
    for given in ([q, *(a[:, :seqlen_kv] for a in poisoned)], walled):
        o, lse, _ = tilewise.attention_forward(*given)
        np.testing.assert_array_equal(o, expected)
        g = tilewise.attention_backward(before_a_wall(o), *given, before_a_wall(o), before_a_wall(lse))
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(g, name), getattr(gradients, name))


def test_A11():
    """pt#141128: a broken input must not be hidden: NaN queries give NaN, in their own rows only."""
    q, k, v = (randn(2, 4, 16, 8, seed=n) for n in range(3))
    clean = tilewise.attention(q, k, v, layout="bhsd")
    q[0, 1, 3] = torch.nan
    o, lse = tilewise.attention(q, k, v, layout="bhsd", return_lse=True)
    assert torch.isnan(o[0, 1, 3]).all() and torch.isnan(lse[0, 1, 3])
    o[0, 1, 3] = clean[0, 1, 3]
    assert torch.equal(o, clean)
    assert torch.isnan(tilewise.attention(q * torch.nan, k, v, layout="bhsd")).all()


@pytest.mark.parametrize("length", [64, 192, 640, 704, 768])
def test_A13(length):
    """pt#196678: NaN in dQ when a row's lse is below -88.7 and the length is 64 modulo 128."""
    q = randn(1, 1, length, 64, dtype=torch.bfloat16, scale=0.1) + 4
    k = randn(1, 1, length, 64, dtype=torch.bfloat16, scale=0.1, seed=1) - 4
    v = randn(1, 1, length, 64, dtype=torch.bfloat16, seed=2)
    _, lse, grads = check(q, k, v, mask=np.ones((1, 1, length, length), bool))
    assert lse.max() < -88.7 and all(torch.isfinite(g).all() for g in grads)


def test_A14():
    """fa#334: one query, one key: dQ = dK = 0 exactly and dV = dO. Layout [batch, length, heads, dim]."""
    q, k, v = (randn(1, 1, 1, 16, dtype=torch.float16, scale=3, seed=n) for n in range(3))
    o, _, (dq, dk, dv) = check(q, k, v, layout="bshd")
    assert (dq == 0).all() and (dk == 0).all() and (dv == 1).all() and torch.equal(o, v)


@pytest.mark.parametrize("length", [128, 129])
@pytest.mark.parametrize("how", ["score_mod", "bias"])
def test_A16(length, how):
    """pt#153799: a causal block mask and the bias i - j together gave NaN in the backward pass."""
    q, k, v = (randn(1, 1, length, 64, dtype=torch.bfloat16, seed=n) for n in range(3))
    i, j = np.ix_(range(length), range(length))
    options = {"mask": masks.mod(lambda b, h, i, j, s: i >= j)}
    if how == "score_mod":
        options["score_mod"] = lambda x, b, h, i, j, s: x + (i - j)
    else:
        options["bias"] = here((i - j).astype(np.float32))
    _, _, grads = check(q, k, v, **options, ref={"mask": i >= j, "bias": (i - j).astype(np.float64)})
    assert all(torch.isfinite(g).all() for g in grads)


def test_A17():
    """tracel-ai/burn#4697: causal and a key mask that drops key 0: row 0 is empty."""
    q, k, v = (randn(1, 1, 4, 4, seed=n) for n in range(3))
    keep = np.array([False, True, True, True])
    o, lse, _ = check(q, k, v, causal=True, mask=keep)
    assert (o[:, :, 0] == 0).all() and torch.isneginf(lse[:, :, 0]).all()


def test_A19():
    """fi#4452: causal with more queries than keys; empty rows had a finite lse. Merging must be the identity."""
    q = randn(1, 32, 35, 16, dtype=torch.bfloat16)
    k, v = randn(1, 32, 2, 16, dtype=torch.bfloat16), randn(1, 32, 2, 16, dtype=torch.bfloat16, seed=1)
    o, lse, _ = check(q, k, v, causal=True)
    assert int(torch.isneginf(lse).sum()) == 33 * 32
    other, other_lse = tilewise.attention(q, k, v, layout="bhsd", return_lse=True)
    merged, merged_lse = tilewise.merge([o, other], [lse, other_lse], layout="bhsd")
    empty = torch.isneginf(lse)
    assert torch.equal(merged[empty], other[empty]) and torch.equal(merged_lse[empty], other_lse[empty])


def test_A20():
    """fi#1533: causal, fewer keys than queries, output full of junk: rows without keys are written as 0."""
    q, k, v = randn(1, 2, 9, 8), randn(1, 2, 4, 8), randn(1, 2, 4, 8, seed=1)
    out = torch.full((1, 2, 9, 8), 7e7)
    tilewise.attention(q, k, v, layout="bhsd", causal=True, out=out)
    assert (out[:, :, :5] == 0).all() and (out[:, :, 5:].abs() < 10).all()


def test_A22():
    """erfanzar/jax-flash-attn2#1: a zero cotangent gives exactly zero gradients, with bias finfo(fp16).min too."""
    q, k, v = (randn(1, 2, 20, 16, dtype=torch.float16, seed=n) for n in range(3))
    for fill in (0.0, torch.finfo(torch.float16).min):
        bias = torch.full((20, 20), fill, dtype=torch.float16, requires_grad=True)
        _, _, grads = check(q, k, v, causal=True, bias=bias.detach(), do=torch.zeros_like(q))
        assert all((g == 0).all() for g in grads)
        o = tilewise.attention(q, k, v, layout="bhsd", causal=True, bias=bias)
        (d_bias,) = torch.autograd.grad(o, bias, torch.zeros_like(o))
        assert (d_bias == 0).all()


def test_A23():
    """pt#119320: a block of NaN in dQ at batch 2700."""
    q, k, v = (randn(2700, 4, 2, 64, seed=n) for n in range(3))
    check(q, k, v)


# ------------------------------------------------------------------------------------------- B. ragged and empty


def check_packed(q, k, v, cu_q, cu_kv, *, dtype_tolerance=None, **options):
    """Every sequence against the formula, forward and backward; rows of no sequence are zero."""
    q, k, v = (a.detach().requires_grad_() for a in (q, k, v))
    given = {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor(cu_kv, dtype=torch.int32),
    }
    o, lse = tilewise.attention(q, k, v, return_lse=True, **given, **options)
    do = randn(*o.shape, dtype=o.dtype, seed=9)
    grads = torch.autograd.grad(o, (q, k, v), do)
    plain = {name: options[name] for name in ("causal", "softmax_scale", "window") if name in options}
    for n in range(len(cu_q) - 1):
        i, j = slice(cu_q[n], cu_q[n + 1]), slice(cu_kv[n], cu_kv[n + 1])
        parts = host(q)[None, i], host(k)[None, j], host(v)[None, j]
        f = formula.forward(*parts, **plain)
        std = formula.forward(
            *parts, **plain, round_to=formula.half(NAMES[q.dtype]) if q.dtype != torch.float64 else None
        )
        formula.assert_accurate(host(o)[None, i], f.o, std.o, NAMES[q.dtype], slack=formula.slack(f))
        formula.assert_close(host(lse)[None, :, i], f.lse, 1e-5 if q.dtype != torch.float64 else 1e-9)
        ref = formula.backward(f, host(do)[None, i])
        for got, want in zip(
            (host(grads[0])[i], host(grads[1])[j], host(grads[2])[j]), (ref.dq, ref.dk, ref.dv), strict=True
        ):
            formula.assert_close(got, want[0], TOLERANCE[q.dtype])
    for array, end in ((o, cu_q[-1]), (grads[0], cu_q[-1]), (grads[1], cu_kv[-1]), (grads[2], cu_kv[-1])):
        assert (array[end:] == 0).all()
    return o, lse, grads


def test_B01():
    """fa#1537: max_seqlen_q = 1 broke the GQA reshuffle."""
    q = randn(2, 9, 64, dtype=torch.bfloat16)
    k, v = randn(8, 3, 64, dtype=torch.bfloat16), randn(8, 3, 64, dtype=torch.bfloat16, seed=1)
    check_packed(q, k, v, [0, 1, 1, 2], [0, 3, 3, 8], causal=True, max_seqlen_q=1, max_seqlen_kv=5, softmax_scale=1.0)


def test_B02():
    """fa#1619: fewer tokens than sequences, with GQA."""
    q = randn(1, 21, 120, dtype=torch.bfloat16)
    k, v = randn(1, 7, 120, dtype=torch.bfloat16), randn(1, 7, 120, dtype=torch.bfloat16, seed=1)
    cu = [0, 0, 0, 0, 1]
    check_packed(q, k, v, cu, cu, max_seqlen_q=1, max_seqlen_kv=1, softmax_scale=math.sqrt(120))


@pytest.mark.parametrize("causal", [False, True])
def test_B04(causal):
    """fa#1713: sequences with keys and no queries, in the backward pass too."""
    q, k, v = (randn(30, 2, 16, seed=n) for n in range(3))
    _, _, grads = check_packed(q, k, v, [0, 15, 15, 30], [0, 10, 20, 30], causal=causal)
    assert (grads[1][10:20] == 0).all() and (grads[2][10:20] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_B05(causal):
    """fa#2470: no keys at all: integer division by zero, or an illegal instruction."""
    q, k = randn(3, 4, 5, 8), torch.empty(3, 2, 0, 8)
    o, lse, grads = check(q, k, k, causal=causal)
    assert (o == 0).all() and torch.isneginf(lse).all() and (grads[0] == 0).all()


def test_B07():
    """fa#1661: rows past cu_seqlens[-1] are zero, in `out=` as well."""
    q, k, v = (randn(9, 2, 8, seed=n) for n in range(3))
    cu = torch.tensor([0, 3, 6])
    out = torch.full((9, 2, 8), 7.0)
    _, lse = tilewise.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, out=out, return_lse=True)
    assert (out[6:] == 0).all() and torch.isneginf(lse[:, 6:]).all()
    check_packed(q, k, v, cu.tolist(), cu.tolist())


def test_B08():
    """fa#1773: max_seqlen is a hint for sizing and never changes the result."""
    q, k, v = (randn(20, 2, 8, seed=n) for n in range(3))
    cu = torch.tensor([0, 2, 20])
    expected = tilewise.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    for hint in (0, 1, 18, 10**6, torch.tensor(3)):
        o = tilewise.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=hint, max_seqlen_kv=hint)
        assert torch.equal(o, expected)


@host_only
def test_B10():
    """fa#2333: cu_seqlens at the very end of an allocation; an entry past it was read."""
    q = randn(50, 2, 8).numpy()
    cu = np.cumsum([0, *[1] * 50]).astype(np.int32)
    walled = before_a_wall(cu)
    expected, lse, _ = tilewise.attention_forward(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    o, lse, _ = tilewise.attention_forward(q, q, q, cu_seqlens_q=walled, cu_seqlens_kv=walled)
    np.testing.assert_array_equal(o, expected)
    tilewise.attention_backward(o, q, q, q, o, lse, cu_seqlens_q=walled, cu_seqlens_kv=walled)


def test_B11():
    """fa#1214: head dim 192 left part of the output unwritten; junk in `out` must all be replaced."""
    q = randn(3, 16, 192, dtype=torch.float16)
    k, v = randn(7, 16, 192, dtype=torch.float16), randn(7, 16, 192, dtype=torch.float16, seed=1)
    o, _, _ = check_packed(q, k, v, [0, 3], [0, 7], causal=True, softmax_scale=0.1147)
    out = torch.full_like(o, 9999)
    cu = torch.tensor([0, 3]), torch.tensor([0, 7])
    tilewise.attention(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], causal=True, softmax_scale=0.1147, out=out)
    assert torch.equal(out, o)


def test_B13():
    """fa#2167: varlen backward with seqused below the segment's length; unused rows have zero gradients."""
    cu_q, cu_kv, used_q, used_kv = [0, 6, 10], [0, 8, 13], [4, 4], [5, 0]
    q, k, v = randn(10, 2, 8), randn(13, 2, 8), randn(13, 2, 8, seed=1)
    poisoned = [a.clone() for a in (q, k, v)]
    for a, cu, used in zip(poisoned, (cu_q, cu_kv, cu_kv), (used_q, used_kv, used_kv), strict=True):
        for n in range(2):
            a[cu[n] + used[n] : cu[n + 1]] = torch.nan
    inputs = [a.requires_grad_() for a in poisoned]
    o, lse = tilewise.attention(
        *inputs, cu_seqlens_q=torch.tensor(cu_q), cu_seqlens_kv=torch.tensor(cu_kv), seqused_q=torch.tensor(used_q),
        seqused_kv=torch.tensor(used_kv), return_lse=True,
    )  # fmt: skip
    grads = torch.autograd.grad(o.sum(), inputs)
    f = formula.forward(host(q)[None, :4], host(k)[None, :5], host(v)[None, :5])
    ref = formula.backward(f, np.ones_like(f.o))
    formula.assert_close(host(o)[:4], f.o[0], 1e-6)
    for got, want, rows in zip(grads, (ref.dq, ref.dk, ref.dv), (4, 5, 5), strict=True):
        formula.assert_close(host(got)[:rows], want[0], 1e-5)
        assert (got[rows:] == 0).all()
    assert (o[4:] == 0).all() and torch.isneginf(lse[:, 4:]).all()


def test_B14():
    """pt#141218: zero-size dims, mismatched ranks and head counts of 0 ended the process."""
    sizes = [(0, 0, 0, 0), (1, 2, 3, 0), (1, 0, 3, 4), (1, 2, 0, 4), (0, 2, 3, 4), (2, 3, 4), (3,), ()]
    for a in sizes:
        for b in sizes:
            q, k = torch.ones(a, dtype=torch.float16), torch.ones(b, dtype=torch.float16)
            try:
                o = tilewise.attention(q, k, k)
            except tilewise.InvalidArgumentError as error:
                assert "allowed" in str(error)
            else:
                assert o.shape == q.shape


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_B16(dropout_p):
    """pt#166318, pt#195812: batch 0, forward and backward, with dropout too."""
    q = torch.empty(0, 2, 5, 8, requires_grad=True)
    o, lse = tilewise.attention(q, q, q, layout="bhsd", dropout_p=dropout_p, return_lse=True)
    assert o.shape == (0, 2, 5, 8) and lse.shape == (0, 2, 5)
    o.sum().backward()
    assert q.grad.shape == q.shape


def test_B17():
    """pt#81077: padding that leaves a sequence of length 0 in the batch."""
    q, k, v = (randn(3, 2, 4, 8, seed=n) for n in range(3))
    keep = np.array([[True] * 4, [False] * 4, [True, True, False, False]])
    o, lse, _ = check(
        q, k, v, mask=masks.key_padding(torch.from_numpy(keep).to(DEVICE)), ref={"mask": keep[:, None, None]}
    )
    assert (o[1] == 0).all() and torch.isneginf(lse[1]).all()


def test_B19():
    """fi#3047: no keys for one request of a chunked prefill; its part must not change the merge."""
    q = randn(2, 5, 2, 8)
    k, v = randn(2, 6, 2, 8), randn(2, 6, 2, 8, seed=1)
    first = tilewise.attention(q, k, v, seqused_kv=torch.tensor([6, 0]), return_lse=True)
    second = tilewise.attention(q, k, v, return_lse=True)
    o, lse = tilewise.merge([first[0], second[0]], [first[1], second[1]])
    assert torch.isneginf(first[1][1]).all() and (first[0][1] == 0).all()
    assert torch.equal(o[1], second[0][1]) and torch.equal(lse[1], second[1][1])


# ------------------------------------------------------------------------- C. what causal, window and softcap mean


def test_C01():
    """pt#110144: 2 queries, 6 keys: bottom right sees 5 and 6 keys, top left 1 and 2."""
    q, k = randn(1, 1, 2, 8), randn(1, 1, 6, 8)
    for causal, seen in ((True, [5, 6]), ("top_left", [1, 2])):
        p = tilewise.attn_probs(q, k, layout="bhsd", causal=causal)
        assert (p[0, 0] > 0).sum(-1).tolist() == seen


def test_C03():
    """gittensor-ai-lab/sparkinfer#3, fa#282: prefill in chunks of 5 + 4 + 3 equals the whole."""
    q, k, v = (randn(1, 2, 12, 8, dtype=torch.float64, seed=n) for n in range(3))
    whole = tilewise.attention(q, k, v, layout="bhsd", causal=True)
    parts = [
        tilewise.attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], layout="bhsd", causal=True)
        for a, b in ((0, 5), (5, 9), (9, 12))
    ]
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-14)


def test_C04():
    """fa#1133: causal and the windows (-1, 0), (S, 0), (S - 1, 0) are the same mask. [batch, length, heads, dim]."""
    q, k, v = (randn(1, 130, 8, 128, dtype=torch.float16, seed=n) for n in range(3))
    expected = tilewise.attention(q, k, v, causal=True)
    for window in ((-1, 0), (130, 0), (129, 0)):
        assert torch.equal(tilewise.attention(q, k, v, window=window), expected), window


def test_C06():
    """fa#2199: window (32, 64), not causal, 129 queries and fewer keys: rows with an empty window are zero."""
    q, k, v = randn(1, 2, 129, 16), randn(1, 2, 40, 16), randn(1, 2, 40, 16, seed=1)
    o, lse, _ = check(q, k, v, window=(32, 64))
    empty = np.isneginf(host(lse))
    assert empty.any() and not empty.all() and (host(o)[empty] == 0).all()


@pytest.mark.parametrize("left", [0, 1, 5])
def test_C07(left):
    """fa#2574: window (w, 0) without causal; the 0 was taken for 'not set'."""
    q, k, v = (randn(1, 2, 20, 8, seed=n) for n in range(3))
    o, _, _ = check(q, k, v, window=(left, 0))
    assert torch.equal(o, tilewise.attention(q, k, v, layout="bhsd", causal=True, window=(left, -1)))


def test_C09():
    """fla-org/flash-linear-attention#824: a window of 0 or fewer keys. (0, 0) is the query's own key; -2 is refused."""
    q, k, v = (randn(1, 1, 4, 4, seed=n) for n in range(3))
    o = tilewise.attention(q, k, v, layout="bhsd", window=(0, 0))
    assert torch.equal(o, v)
    for window in ((-2, 0), (0, -3)):
        with pytest.raises(ValueError, match="window"):
            tilewise.attention(q, k, v, layout="bhsd", window=window)


def test_C10():
    """hf#39408, hf#29623: a sliding window of W keys is (W - 1, 0): exactly W keys, the query's own included."""
    q, k = randn(1, 1, 10, 8), randn(1, 1, 10, 8, seed=1)
    p = tilewise.attn_probs(q, k, layout="bhsd", window=(3, 0))
    assert (p[0, 0] > 0).sum(-1).tolist() == [min(i + 1, 4) for i in range(10)]


def test_C12():
    """ort#28370: softcap comes before the bias, so a bias of -inf hides its key for good."""
    q, k, v = (randn(1, 2, 8, 16, seed=n, scale=3) for n in range(3))
    bias = randn(8, 8, seed=5)
    bias[:, 5:] = -torch.inf
    check(q, k, v, softcap=5.0, bias=bias)
    p = tilewise.attn_probs(q, k, layout="bhsd", softcap=5.0, bias=bias)
    assert (p[..., 5:] == 0).all() and (p[..., :5] > 0).all()


@pytest.mark.parametrize("softcap", [50.0, 30.0])
def test_C13(softcap):
    """fa#1065, fa#1025: softcap without a backward pass."""
    inputs = [randn(1, 1, 2, 16, dtype=torch.float64, seed=n).requires_grad_() for n in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: tilewise.attention(q, k, v, layout="bhsd", softcap=softcap), inputs)


def test_C15():
    """fa#907: ALiBi in one pass equals step by step with a cache."""
    q, k, v = (randn(1, 9, 4, 8, dtype=torch.float64, seed=n) for n in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    whole = tilewise.attention(q, k, v, causal=True, alibi_slopes=slopes)
    for n in range(9):
        step = tilewise.attention(q[:, n : n + 1], k[:, : n + 1], v[:, : n + 1], causal=True, alibi_slopes=slopes)
        assert torch.allclose(step[:, 0], whole[:, n], atol=1e-14)


def test_C16():
    """Luce-Org/lucebox#595: a position of INT32_MAX overflowed."""
    q, k, v = (randn(1, 1, 4, 8, seed=n) for n in range(3))
    full = tilewise.attention(q, k, v, layout="bhsd")
    for offset in (2**31 - 1, 2**31, 2**40, torch.tensor([2**31 - 1], dtype=torch.int32)):
        assert torch.equal(tilewise.attention(q, k, v, layout="bhsd", causal=True, q_offset=offset), full)
        o = tilewise.attention(q, k, v, layout="bhsd", window=(-1, 5), q_offset=offset)
        assert torch.equal(o, full)


# ------------------------------------------------------------------------------------ D. packing, without adapters


@pytest.mark.parametrize("side", ["left", "right"])
def test_D05_D06(side):
    """hf#29075, fa#487, huggingface/open-r1#599: lengths 3 and 5, padded on either side, then 3 decode steps."""
    lengths, capacity = [3, 5], 8
    rows = [[randn(n + 3, 2, 8, dtype=torch.float64, seed=10 * n + m) for m in range(3)] for n in lengths]
    cache = [torch.full((2, capacity, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    pad = torch.tensor([5 - n if side == "left" else 0 for n in lengths])
    queries = torch.full((2, 5, 2, 8), torch.nan, dtype=torch.float64)
    for b, n in enumerate(lengths):
        queries[b, pad[b] : pad[b] + n] = rows[b][0][:n]
        for place in (0, 1):
            cache[place][b, pad[b] : pad[b] + n + 3] = rows[b][place + 1][: n + 3]
    alone = [tilewise.attention(q[None], k[None], v[None], causal=True)[0] for q, k, v in rows]
    # Rows are positioned from the left pad on; a left-padded batch has its queries there as well.
    used = pad + torch.tensor(lengths)
    offset = -pad
    o = tilewise.attention(
        queries.nan_to_num(), cache[0], cache[1], causal=True, q_offset=offset, leftpad_kv=pad, seqused_kv=used
    )
    for b, n in enumerate(lengths):
        assert torch.allclose(o[b, pad[b] : pad[b] + n], alone[b][:n], atol=1e-14)
    for step in range(3):
        used = used + 1
        q = torch.stack([rows[b][0][n + step] for b, n in enumerate(lengths)])[:, None]
        o = tilewise.attention(q, cache[0], cache[1], causal=True, leftpad_kv=pad, seqused_kv=used)
        for b, n in enumerate(lengths):
            assert torch.allclose(o[b, 0], alone[b][n + step], atol=1e-14)


def test_D12():
    """hf#46946, hf#47014: T5: scale 1 and a learned bias [1, heads, q, k]."""
    q, k, v = (randn(2, 4, 9, 8, dtype=torch.float64, seed=n) for n in range(3))
    bias = randn(1, 4, 9, 9, dtype=torch.float64, seed=5).requires_grad_()
    o = tilewise.attention(q, k, v, layout="bhsd", softmax_scale=1.0, bias=bias)
    (d_bias,) = torch.autograd.grad(o.sum(), bias)
    f = formula.forward(*(swapped(host(a)) for a in (q, k, v)), softmax_scale=1.0, bias=host(bias))
    ref = formula.backward(f, np.ones_like(f.o))
    formula.assert_close(swapped(host(o)), f.o)
    formula.assert_close(host(d_bias), ref.dbias.sum(0, keepdims=True))


def test_D14():
    """fa#1104, fa#1605: one prompt and several responses in one row equal separate runs."""
    prompt, responses = 4, [3, 2, 5]
    total = prompt + sum(responses)
    ids = np.concatenate([[0] * prompt, *[[n + 1] * count for n, count in enumerate(responses)]]).astype(np.int32)
    ids = here(ids)
    q, k, v = (randn(1, total, 2, 8, dtype=torch.float64, seed=n) for n in range(3))
    shared = masks.mod(lambda b, h, i, j, s: (s.ids[j] == 0) | (s.ids[i] == s.ids[j]), ids=ids)
    o = tilewise.attention(q, k, v, causal=True, mask=shared)
    start = prompt
    for count in responses:
        rows = [*range(prompt), *range(start, start + count)]
        alone = tilewise.attention(q[:, rows], k[:, rows], v[:, rows], causal=True)
        assert torch.allclose(o[:, rows], alone, atol=1e-14)
        start += count


# -------------------------------------------------------------------------------------------- E. sizes and offsets


@host_only
def test_E06():
    """fa#772: slots of a cache 2^30 elements apart: only the named ones are written, each from its own keys."""
    big = lazily_mapped((5, 16, 2, 8), (2**30, 16, 8, 1), np.float32)
    q = randn(5, 16, 2, 8).numpy()
    big[:] = q
    expected = tilewise.attention(q, q, q, causal=True)
    np.testing.assert_array_equal(tilewise.attention(q, big, big, causal=True), expected)
    out = lazily_mapped((5, 16, 2, 8), (2**30, 16, 8, 1), np.float32)
    tilewise.attention(q[1:], q[1:], q[1:], causal=True, out=out[1:])
    assert (out[0] == 0).all()
    np.testing.assert_array_equal(out[1:], expected[1:])


@host_only
def test_E08():
    """xf#788: a bias view whose strides pass 32 bits."""
    bias = lazily_mapped((32, 3, 50), (12180 * 12184, 12184, 1), np.float32)
    bias[:] = randn(32, 3, 50).numpy()
    q, k = randn(1, 32, 3, 4).numpy(), randn(1, 32, 50, 4).numpy()
    small = bias.copy()
    o, lse, _ = tilewise.attention_forward(q, k, k, layout="bhsd", bias=bias)
    np.testing.assert_array_equal(o, tilewise.attention(q, k, k, layout="bhsd", bias=small))
    g = tilewise.attention_backward(o, q, k, k, o, lse, layout="bhsd", bias=bias)
    assert g.dbias.shape == small.shape and g.dbias.flags.c_contiguous


def test_E11():
    """Comfy-Org/comfy-kitchen#178: refused because of a batch stride that batch 1 never uses."""
    memory = torch.randn(40 * 2 * 8)
    k = memory.as_strided((1, 40, 2, 8), (2**40, 16, 8, 1))
    q = torch.randn(1, 5, 2, 8)
    assert torch.equal(tilewise.attention(q, k, k), tilewise.attention(q, k.contiguous(), k.contiguous()))
    huge = torch.empty_strided((1, 299521, 56, 128), (2**33, 56 * 128, 128, 1), device="meta", dtype=torch.bfloat16)
    assert tilewise.supports(huge[:, :100], huge, huge) == (True, [])


# ------------------------------------------------------------------------------------------ F. strides and layouts


def same_as_contiguous(q, k, v, do=None, **options):
    """Bits of a call on views against the same call on contiguous copies, forward and backward."""
    results = []
    for inputs in ((q, k, v), tuple(a.clone(memory_format=torch.contiguous_format) for a in (q, k, v))):
        leaves = [a.detach().requires_grad_() for a in inputs]
        o, lse = tilewise.attention(*leaves, return_lse=True, **options)
        given = torch.ones_like(o) if do is None else do if inputs[0] is q else do.contiguous()
        results.append((o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, given)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    return results[0]


def test_F01():
    """pt#187506: the last axis with stride 2."""
    q, k, v = (randn(1, 2, 9, 32, seed=n)[..., ::2] for n in range(3))
    same_as_contiguous(q, k, v, layout="bhsd")


def test_F02():
    """pt#128816: mask [batch, heads, q, 1] was read past its end."""
    q, k, v = randn(2, 3, 5, 8), randn(2, 3, 70, 8), randn(2, 3, 70, 8, seed=1)
    keep = before_a_wall(np.random.default_rng(0).random((2, 3, 5, 1)) > 0.5)
    check(q, k, v, mask=keep)


def test_F04():
    """ROCm/pytorch#3230, torch-spyre/torch-spyre#4331: v is a transposed view."""
    q, k = randn(1, 16, 62, 128, dtype=torch.bfloat16), randn(1, 16, 62, 128, dtype=torch.bfloat16, seed=1)
    v = randn(1, 62, 16, 128, dtype=torch.bfloat16, seed=2).transpose(1, 2)
    same_as_contiguous(q, k, v, layout="bhsd")


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_F05(dim):
    """fa#2541: gradients into slices of one fused buffer full of NaN. [batch, length, heads, dim]."""
    fused = randn(1, 128, 3, 2, dim)
    q, k, v = fused.unbind(2)
    o, lse, _ = tilewise.attention_forward(q, k, v)
    do = randn(*o.shape, seed=3)
    gradients = torch.full_like(fused, torch.nan)
    dq, dk, dv = gradients.unbind(2)
    tilewise.attention_backward(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv)
    separate = tilewise.attention_backward(do, q.contiguous(), k.contiguous(), v.contiguous(), o, lse)
    assert torch.isfinite(gradients).all()
    for n, name in enumerate(("dq", "dk", "dv")):
        assert torch.equal(gradients[:, :, n], getattr(separate, name)), name


def test_F07():
    """fa#355: one KV head, non-contiguous gradient of the output. [batch, length, heads, dim]."""
    q = randn(2, 32, 4, 128, dtype=torch.float16)
    k, v = randn(2, 32, 1, 128, dtype=torch.float16), randn(2, 32, 1, 128, dtype=torch.float16, seed=1)
    do = randn(2, 4, 128, 32, dtype=torch.float16, seed=2).permute(0, 3, 1, 2)
    same_as_contiguous(q, k, v, do)


def test_F08():
    """xf#282, ROCm/TransformerEngine#623: out.sum().backward() has a gradient with all strides 0."""
    q, k, v = (randn(2, 3, 7, 8, seed=n).requires_grad_() for n in range(3))
    o = tilewise.attention(q, k, v, layout="bhsd")
    summed = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    ones = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))


def test_F10():
    """pt#146377: K and V are [:, :, :-128] of larger tensors; the gradient of K was garbage."""
    q, big_k, big_v = (randn(1, 16, 384, 64, seed=n) for n in range(3))
    same_as_contiguous(q, big_k[:, :, :-128], big_v[:, :, :-128], layout="bhsd")


def test_F11():
    """pt#133671: strides of the output are those of q, so gradients made with empty_like mean what they seem to."""
    for q in (randn(2, 2, 49, 32), randn(2, 49, 2, 32).transpose(1, 2)):
        k = randn(2, 2, 49, 32, seed=1)
        o = tilewise.attention(q.requires_grad_(), k, k, layout="bhsd")
        assert o.stride() == q.stride()
        grad = torch.empty_like(o).copy_(randn(2, 2, 49, 32, seed=2))
        other = grad.contiguous()
        first = torch.autograd.grad(o, q, grad, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(o, q, other)[0])


@pytest.mark.parametrize(("shape", "dtype"), [((2, 77, 8, 64), torch.float16), ((31, 43, 32, 8), torch.float32)])
def test_F13(shape, dtype):
    """xf#808, xf#813, xf#684: a bias whose last axis is 77 or 43. [batch, length, heads, dim]."""
    q, k, v = (randn(*shape, dtype=dtype, seed=n) for n in range(3))
    bias = randn(shape[2], shape[1], shape[1], dtype=dtype, seed=5)
    check(q, k, v, layout="bshd", bias=bias)


def test_F14():
    """xf#683: a bool bias and inputs of rank 3 get one clear sentence each."""
    q = randn(32, 10, 16)
    with pytest.raises(ValueError, match=r"rank 3.*rank 4.*cu_seqlens"):
        tilewise.attention(q, q, q)
    q = q[None]
    with pytest.raises(ValueError, match=r"bias.*bool.*mask"):
        tilewise.attention(q, q, q, layout="bhsd", bias=torch.ones(10, 10, dtype=torch.bool))
    check(q, q, q, mask=np.tri(10, dtype=bool))


def test_F16():
    """pt#176915: strides of the gradient differ from those of the output, as after a merge."""
    q, k, v = (randn(2, 3, 9, 8, seed=n) for n in range(3))
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        back = [order.index(n) for n in range(4)]
        shape = [q.shape[n] for n in order]
        same_as_contiguous(q, k, v, randn(*shape, seed=7).permute(back), layout="bhsd")


def test_F17():
    """vllm#41454: head dim 46 in bf16: rows of 92 bytes."""
    q, k, v = (randn(1, 2, 33, 46, dtype=torch.bfloat16, seed=n) for n in range(3))
    check(q, k, v, causal=True)


# --------------------------------------------------------------------------------- G. dimensions, dtype, precision


def test_G02():
    """fa#753: head_dim_v twice head_dim_qk."""
    o, _, _ = check(randn(4, 4, 4, 8, dtype=torch.bfloat16), randn(4, 4, 4, 8, dtype=torch.bfloat16, seed=1),
                    randn(4, 4, 4, 16, dtype=torch.bfloat16))  # fmt: skip
    assert o.shape == (4, 4, 4, 16)


@pytest.mark.parametrize(("dim_qk", "dim_v"), [(192, 128), (32, 64), (64, 128), (96, 192), (128, 256)])
def test_G03(dim_qk, dim_v):
    """fa#980, fa#1166: other head dims for v, forward and backward."""
    q, k, v = randn(1, 2, 17, dim_qk), randn(1, 2, 21, dim_qk), randn(1, 2, 21, dim_v, seed=1)
    check(q, k, v, causal=True)


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 88, 96, 112, 120])
def test_G05(dim):
    """fa#2492, fa#28, pt#133321: head dims that are no power of two, backward."""
    check(*(randn(1, 2, 33, dim, seed=n) for n in range(3)), causal=True)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 129, 192, 193])
def test_G06(length):
    """jax#27224: lengths that are no multiple of the block."""
    check(*(randn(1, 8, length, 16, dtype=torch.bfloat16, seed=n) for n in range(3)))


@pytest.mark.parametrize("heads_kv", [1, 2, 4, 7])
@pytest.mark.parametrize("seqlen_q", [1, 37])
def test_G08(heads_kv, seqlen_q):
    """pt#193893: few KV heads corrupted generation on one architecture."""
    q = randn(2, 2 * heads_kv, seqlen_q, 32, dtype=torch.bfloat16)
    k, v = (randn(2, heads_kv, 77, 32, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    keep = np.random.default_rng(0).random((2, 1, seqlen_q, 77)) > 0.3
    check(q, k, v, mask=keep)


def test_G11():
    """pt#99012: CPU autocast with a float32 mask."""
    layer = torch.nn.Linear(256, 768)
    x, bias = torch.randn(2, 64, 256), torch.zeros(64, 64).masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf)
    with torch.autocast(DEVICE, torch.bfloat16):
        q, k, v = layer(x).unflatten(-1, (3, 8, 32)).unbind(2)
        o = tilewise.attention(q, k, v, bias=bias)
        mixed = tilewise.attention(q.float(), k, v, bias=bias)
    assert o.dtype == torch.bfloat16 and torch.equal(o, mixed)
    assert torch.allclose(o.float(), tilewise.attention(q.float(), k.float(), v.float(), causal=True), atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_G12(dtype):
    """ROCm/pytorch#1811: a mask of another dtype than q was silently NaN."""
    q, k, v = (randn(1, 2, 9, 16, dtype=torch.float16, seed=n) for n in range(3))
    check(q, k, v, bias=randn(9, 9, dtype=dtype, seed=5))
    for integers in (np.int8, np.int32, np.int64, np.uint8):
        check(q, k, v, mask=np.tri(9, dtype=integers))


def test_G14():
    """ikawrakow/ik_llama.cpp#1196: 64k keys, nearly flat probabilities, large v: sums must not be fp16."""
    q = randn(1, 1, 1, 16, dtype=torch.float16, scale=0.01)
    k = randn(1, 65536, 1, 16, dtype=torch.float16, scale=0.01)
    v = randn(1, 65536, 1, 16, dtype=torch.float16, scale=100) + 20000
    o = tilewise.attention(q, k, v)
    assert torch.isfinite(o).all()
    assert torch.allclose(o.double(), v.double().mean(1, keepdim=True), rtol=2e-3)


def test_G15():
    """ggml-org/ggml#1536, lcpp#28124: float32 means float32: no halves or TF32 inside."""
    q, k, v = (randn(1, 2, 200, 64, seed=n) for n in range(3))
    f = formula.forward(*(swapped(host(a)) for a in (q, k, v)))
    o = tilewise.attention(q, k, v, layout="bhsd")
    assert formula.worst(swapped(host(o)), f.o) < 1e-6


def test_G17():
    """zhuzilin/ring-flash-attention#22: partial results in float32 merge to the whole within float32."""
    q, k, v = (randn(1, 2, 64, 32, dtype=torch.bfloat16, seed=n).float() for n in range(3))
    f = formula.forward(*(swapped(host(a)) for a in (q, k, v)))
    parts = [
        tilewise.attention(q, k[:, :, n : n + 8], v[:, :, n : n + 8], layout="bhsd", return_lse=True)
        for n in range(0, 64, 8)
    ]
    o, lse = tilewise.merge([p[0] for p in parts], [p[1] for p in parts], layout="bhsd")
    assert o.dtype == torch.float32
    assert formula.worst(swapped(host(o)), f.o) < 1e-6 and formula.worst(host(lse), f.lse) < 2e-6


def test_G18():
    """meta-pytorch/attention-gym#200: lse is the natural logarithm, as torch.logsumexp."""
    q, k, v = (randn(1, 2, 9, 16, dtype=torch.float64, seed=n) for n in range(3))
    _, lse = tilewise.attention(q, k, v, layout="bhsd", return_lse=True)
    assert torch.allclose(lse, torch.logsumexp(q @ k.mT / 4, -1))


# --------------------------------------------------------------------------- H. determinism, invariance, dropout


def bits(*tensors):
    return [t.detach().contiguous().view(torch.uint8) if t.element_size() == 1 else host(t).tobytes() for t in tensors]


def test_H01():
    """fa#2244, fa#1893: the same inputs give the same bits of dQ, dK, dV in every run."""
    q, k, v = (randn(2, 4, 130, 32, seed=n).requires_grad_() for n in range(3))
    bias = randn(1, 4, 130, 130, seed=4).requires_grad_()
    first = None
    for _ in range(30):
        o = tilewise.attention(q, k, v, layout="bhsd", causal=True, bias=bias, deterministic=True)
        now = bits(o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias)))
        first = first or now
        assert now == first


def test_H02():
    """fa#746, fa#1766: the flag reaches the library and is not dropped on the way."""
    q = randn(1, 4, 2, 8)
    for value in (False, True):
        call = tilewise._problem.Call(q, q, q, deterministic=value, batch_invariant=value)
        problem = call.problem()
        assert problem.deterministic == problem.batch_invariant == int(value)
    assert "batch_invariant" in str(tilewise.plan(q, q, q, batch_invariant=True))
    with pytest.raises(ValueError, match="another plan"):
        tilewise.plan(q, q, q).run(q, q, q, deterministic=True)


@host_only
def test_H04():
    """The CPU form of H01: 1, 2, 3 and 16 threads give the same bits."""
    q, k, v = (randn(2, 4, 200, 32, seed=n).requires_grad_() for n in range(3))
    results = []
    try:
        for threads in (1, 2, 3, 16):
            tilewise.set_num_threads(threads)
            o = tilewise.attention(q, k, v, layout="bhsd", causal=True)
            results.append(bits(o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
    finally:
        tilewise.set_num_threads(0)
    assert all(r == results[0] for r in results)


def test_H05():
    """fi#2424: a long request has the same bits alone and among many short ones."""
    lengths = [700, *[5] * 30]
    cu = torch.tensor([0, *np.cumsum(lengths)])
    q, k, v = (randn(sum(lengths), h, 64, seed=n) for n, h in ((0, 4), (1, 2), (2, 2)))
    for options in ({"causal": True}, {"window": (100, 0)}):
        o, lse = tilewise.attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, batch_invariant=True, return_lse=True, **options
        )
        alone = tilewise.attention(
            q[None, :700], k[None, :700], v[None, :700], batch_invariant=True, return_lse=True, **options
        )
        assert bits(o[:700], lse[:, :700]) == bits(alone[0][0], alone[1][0])
        # a chunk of it, with its cache: chunked prefill and decode
        for begin, end in ((640, 700), (699, 700), (3, 70)):
            part = tilewise.attention(
                q[None, begin:end], k[None, :end], v[None, :end], batch_invariant=True, return_lse=True, **options
            )
            assert bits(part[0][0], part[1][0]) == bits(o[begin:end], lse[:, begin:end]), (begin, end)


def test_H07():
    """fa#1417: the capacity of the cache does not matter, only its used part. [batch, length, heads, dim]."""
    q, k, v = randn(1, 1, 4, 128), randn(1, 1024, 2, 128), randn(1, 1024, 2, 128, seed=1)
    used = torch.tensor([160])
    expected = None
    for capacity in (160, 161, 200, 512, 1024):
        o, lse = tilewise.attention(
            q, k[:, :capacity], v[:, :capacity], seqused_kv=used, batch_invariant=True, return_lse=True
        )
        expected = expected or bits(o, lse)
        assert bits(o, lse) == expected, capacity


def test_H08():
    """fa#612: with dropout and a fixed seed, finite differences agree with the gradients."""
    inputs = [randn(1, 2, 4, 3, dtype=torch.float64, seed=n).requires_grad_() for n in range(3)]
    run = lambda q, k, v: tilewise.attention(q, k, v, layout="bhsd", dropout_p=0.3, seed=17)  # noqa: E731
    assert torch.autograd.gradcheck(run, inputs)


def test_H10():
    """From fa#2597 and uxlfoundation/oneDNN#3233: one mask for a seed, whatever the backend, layout and packing."""
    q, k = randn(2, 70, 4, 8), randn(2, 90, 2, 8)
    v = torch.eye(90)[None, :, None].expand(2, 90, 2, 90)  # o shows which probabilities were kept
    keep = torch.from_numpy(tilewise.dropout_mask(2, 4, 70, 90, dropout_p=0.4, seed=9)).to(DEVICE)
    best = tilewise.attention(q, k, v, dropout_p=0.4, seed=9)
    assert torch.equal(best.transpose(1, 2) != 0, keep)
    other = tilewise.attention(q.cpu(), k.cpu(), v.cpu(), dropout_p=0.4, seed=9, backend="reference")
    assert torch.equal(other != 0, best.cpu() != 0)
    cu_q, cu_kv = torch.tensor([0, 70, 140]), torch.tensor([0, 90, 180])
    packed = tilewise.attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, dropout_p=0.4, seed=9
    )
    assert torch.equal(packed.unflatten(0, (2, 70)) != 0, best != 0)


# ------------------------------------------------------------------------- I. bias, sinks, outputs, transforms


def test_I02():
    """jax#30593: the gradient of a bias at batch 2."""
    q, k, v = (randn(2, 8, 12, 16, seed=n) for n in range(3))
    bias = randn(2, 8, 12, 12, seed=5).requires_grad_()
    (d_bias,) = torch.autograd.grad(tilewise.attention(q, k, v, layout="bhsd", bias=bias).sum(), bias)
    f = formula.forward(*(swapped(host(a)) for a in (q, k, v)), bias=host(bias))
    formula.assert_close(host(d_bias), formula.backward(f, np.ones_like(f.o)).dbias, 1e-5)


def test_I03():
    """jax#28974: a boolean mask [4, 1, 1, 32], not expanded over the queries."""
    q, k, v = (randn(4, 4, 32, 16, dtype=torch.bfloat16, seed=n) for n in range(3))
    check(q, k, v, mask=np.random.default_rng(0).random((4, 1, 1, 32)) > 0.3)


@pytest.mark.parametrize("length", [1, 6])
def test_I05(length):
    """pt#146896: a learned table, bias[clamp(i - j)], at length 1; as a gather and as a bias."""
    q, k, v = (randn(1, 1, length, 8, dtype=torch.float64, seed=n) for n in range(3))
    table = randn(4, 1, dtype=torch.float64, seed=5).requires_grad_()
    mod = tilewise.score_mod(lambda x, b, h, i, j, s: x + s.t[ops.minimum(ops.maximum(i - j, 0), 3), h], t=table)
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    do = randn(1, 1, length, 8, dtype=torch.float64, seed=6)
    by_gather = tilewise.attention(q, k, v, layout="bhsd", score_mod=mod)
    by_bias = tilewise.attention(q, k, v, layout="bhsd", bias=table[(i - j).clamp(0, 3), 0])
    assert torch.allclose(by_gather, by_bias, atol=1e-14)
    first, second = (torch.autograd.grad(o, table, do)[0] for o in (by_gather, by_bias))
    assert torch.allclose(first, second, atol=1e-14)


def test_I06():
    """fa#2876, fa#1977, fa#540: gradient of ALiBi slopes, 40 heads."""
    q, k, v = (randn(1, 40, 3, 2, dtype=torch.float64, seed=n) for n in range(3))
    slopes = randn(40, dtype=torch.float64, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: tilewise.attention(q, k, v, layout="bhsd", alibi_slopes=s), (slopes,))


def test_I08():
    """fa#1819, fa#2102, fa#1973: a sink is one more logit whose probability is dropped after the softmax."""
    q = randn(2, 8, 12, 16, dtype=torch.float64)
    k, v = (randn(2, 2, 10, 16, dtype=torch.float64, seed=n) for n in (1, 2))
    sinks = randn(8, dtype=torch.float64, seed=3)
    leaves = [a.clone().requires_grad_() for a in (q, k, v, sinks)]
    o, lse = tilewise.attention(*leaves[:3], layout="bhsd", sinks=leaves[3], window=(3, 0), return_lse=True)
    other = [a.clone().requires_grad_() for a in (q, k, v, sinks)]
    x = other[0] @ other[1].repeat_interleave(4, 1).mT / 4
    t, j = torch.arange(12)[:, None] - 2, torch.arange(10)
    x = x.masked_fill(~((j <= t) & (j >= t - 3)), -torch.inf)
    x = torch.cat([x, other[3][:, None, None].expand(2, 8, 12, 1)], -1)
    expected = x.softmax(-1)[..., :-1] @ other[2].repeat_interleave(4, 1)
    assert torch.allclose(o, expected, atol=1e-13) and torch.allclose(lse, torch.logsumexp(x, -1))
    # rows 0 and 1 see no key
    assert (o[:, :, :2] == 0).all() and torch.equal(lse[:, :, :2], sinks[:, None].expand(2, 8, 2))
    weights = randn(*o.shape, dtype=torch.float64, seed=4), randn(*lse.shape, dtype=torch.float64, seed=5)
    ((o * weights[0]).sum() + (lse * weights[1]).sum()).backward()
    ((expected * weights[0]).sum() + (torch.logsumexp(x, -1) * weights[1]).sum()).backward()
    for a, b in zip(leaves, other, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


def test_I09():
    """fa#1137: a loss that depends on lse alone."""
    q, k, v = (randn(1, 2, 4, 3, dtype=torch.float64, seed=n).requires_grad_() for n in range(3))
    run = lambda q, k, v: tilewise.attention(q, k, v, layout="bhsd", return_lse=True)[1].exp()  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v))


def test_I11():
    """pt#116350: the gradient of a gradient: a clear error that names the alternative."""
    q, k, v = (randn(1, 1, 6, 4, dtype=torch.float64, seed=n).requires_grad_() for n in range(3))
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, v, layout="bhsd").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*SDPBackend.MATH"):
        torch.autograd.grad(dq.square().sum(), q)


def test_I12():
    """pt#110525, pt#187266: vmap, and vmap of grad, equal the stacked calls."""
    q, k, v = (randn(3, 2, 4, 7, 8, dtype=torch.float64, seed=n) for n in range(3))
    run = lambda q, k, v: tilewise.attention(q, k, v, layout="bhsd", causal=True)  # noqa: E731
    stacked = torch.stack([run(q[n], k[n], v[n]) for n in range(3)])
    assert torch.equal(torch.vmap(run)(q, k, v), stacked)
    loss = lambda q, k, v: run(q, k, v).square().sum()  # noqa: E731
    grads = torch.vmap(torch.func.grad(loss))(q, k, v)
    for n in range(3):
        leaf = q[n].clone().requires_grad_()
        loss(leaf, k[n], v[n]).backward()
        assert torch.equal(grads[n], leaf.grad)


def test_I14():
    """fi#1005: a tree mask whose sizes fill no tile; its bits end where the memory ends."""
    seqlen_q, seqlen_kv, n = 37, 101, 45
    q, k = randn(1, 2, seqlen_q, 8), randn(1, 2, seqlen_kv, 8)
    bits = before_a_wall(np.random.default_rng(0).integers(0, 2**32, (1, seqlen_q, 2), dtype=np.uint32))
    i, j = np.ix_(range(seqlen_q), range(seqlen_kv))
    column = j - (seqlen_kv - n)
    word = np.maximum(column, 0)
    dense = (column < 0) | ((bits[0, i, word // 32] >> (word % 32).astype(np.uint32)) & 1).astype(bool)
    check(q, k, k, mask=masks.tree(here(bits), n), ref={"mask": dense})


def test_I15():
    """fi#959: explicit rows of a 4 x 10 mask over a cache with appended tokens."""
    rows = np.array([[1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
                     [1, 1, 1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0, 1]])  # fmt: skip
    q, k, v = randn(1, 2, 4, 8), randn(1, 2, 10, 8), randn(1, 2, 10, 8, seed=1)
    o, _, _ = check(q, k, v, mask=rows)
    bits = np.array([[[0b0001]], [[0b0011]], [[0b0101]], [[0b1011]]], np.uint32).reshape(1, 4, 1)
    assert torch.equal(tilewise.attention(q, k, v, layout="bhsd", mask=masks.tree(here(bits), 4)), o)


def test_I17():
    """hf#33417, fa#1824: probabilities of chosen rows and heads."""
    q, k = randn(2, 4, 12, 8, dtype=torch.float64), randn(2, 2, 15, 8, dtype=torch.float64)
    p = tilewise.attn_probs(q, k, layout="bhsd", rows=[11, 3], heads=[0, 3])
    x = (q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)).softmax(-1)
    assert torch.allclose(p, x[:, [0, 3]][:, :, [11, 3]])


# ---------------------------------------------------------------------------------------------- J. strides, memory, time


def test_J03():
    """fa#818: strides of outputs and gradients are what empty_like predicts, in six layouts. [2, 513, 16, 64] scaled."""
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (0, 1, 3, 2), (3, 1, 0, 2)):
        shape = (2, 53, 4, 16)
        q = randn(*[shape[n] for n in order]).permute([order.index(n) for n in range(4)]).requires_grad_()
        k = randn(2, 53, 2, 16, seed=1).requires_grad_()
        o = tilewise.attention(q, k, k)
        dq, dk = torch.autograd.grad(o.sum(), (q, k))
        assert o.stride() == torch.empty_like(q).stride() == dq.stride(), order
        assert dk.stride() == k.stride()


def test_J16():
    """fa#1011: the memory of lse depends on the number of tokens, not on how they are packed."""
    total = 2048
    q = randn(total, 2, 8)
    for lengths in ([2048], [8] * 256, [1792, *[8] * 32]):
        cu = torch.tensor([0, *np.cumsum(lengths)])
        _, lse = tilewise.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, causal=True, return_lse=True)
        assert lse.shape == (2, total)


timed = pytest.mark.skipif(
    os.environ.get("TILEWISE_TIMED_TESTS") != "1", reason="measures time: set TILEWISE_TIMED_TESTS=1"
)


def best_time(function, rounds=7):
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def plain(q, k, v, causal):
    """Unfused attention on torch's matrix products, the honest opponent."""
    k, v = k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    x = q @ k.mT / math.sqrt(q.shape[-1])
    if causal and q.shape[2] > 1:
        x = x.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return x.softmax(-1) @ v


@timed
@pytest.mark.parametrize("seqlen_q", [1, 2048])
def test_J18(seqlen_q):
    """mozilla-ai/llamafile#974: never slower than unfused attention, prefill and decode."""
    q, k, v = randn(1, 32, seqlen_q, 128), randn(1, 8, 2048, 128), randn(1, 8, 2048, 128, seed=1)
    ours = best_time(lambda: tilewise.attention(q, k, v, layout="bhsd", causal=True))
    theirs = best_time(lambda: plain(q, k, v, True))
    assert ours <= theirs, f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms"


@timed
def test_J19():
    """pt#159835, ort#28695: decode with fewer heads than threads works on the keys in parallel."""
    if tilewise.num_threads() < 2:
        pytest.skip("one thread")
    q, k, v = randn(1, 1, 1, 128), randn(1, 1, 8192, 128), randn(1, 1, 8192, 128, seed=1)
    run = lambda: [tilewise.attention(q, k, v, layout="bhsd") for _ in range(20)]  # noqa: E731
    many = best_time(run)
    try:
        tilewise.set_num_threads(1)
        one = best_time(run)
    finally:
        tilewise.set_num_threads(0)
    assert many < one
