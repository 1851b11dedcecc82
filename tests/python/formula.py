"""The formula of docs/formula.md in NumPy, read literally: what the Python tests compare with.

Dense arrays in layout bshd. Nothing is shared with the library: positions, masks, softmax and gradients are written out
once more, on full [batch, heads, seqlen_q, seqlen_kv] arrays in float64.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


def positions(seqlen_q, seqlen_kv, q_offset, batch):
    """t [batch, seqlen_q, 1] and j [1, 1, seqlen_kv]."""
    if isinstance(q_offset, str):
        q_offset = seqlen_kv - seqlen_q if q_offset == "bottom_right" else 0
    offset = np.broadcast_to(np.asarray(q_offset, np.int64), (batch,))
    return np.arange(seqlen_q)[None, :, None] + offset[:, None, None], np.arange(seqlen_kv)[None, None, :]


def visibility(shape, *, causal=False, q_offset="bottom_right", window=(-1, -1), chunk=0, mask=None):
    """bool [batch, heads, seqlen_q, seqlen_kv]; mask: a bool array that broadcasts to it."""
    batch, _, seqlen_q, seqlen_kv = shape
    t, j = positions(seqlen_q, seqlen_kv, q_offset, batch)
    seen = np.ones((batch, seqlen_q, seqlen_kv), bool)
    if causal:
        seen &= j <= t
    if window[0] >= 0:
        seen &= j >= t - window[0]
    if window[1] >= 0:
        seen &= j <= t + window[1]
    if chunk:
        seen &= j // chunk == t // chunk
    full = np.broadcast_to(seen[:, None], shape)
    return full if mask is None else full & np.asarray(mask, bool)


def forward(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    softcap=0.0,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    score_mod=None,
    captured=None,
    q_offset="bottom_right",
    causal=False,
    window=(-1, -1),
    chunk=0,
    mask=None,
    keep=None,
    keep_prob=1.0,
    round_to=None,
):
    """SimpleNamespace with o, lse, p, and what the backward pass needs. round_to: rounds S, P and O, which makes it the
    plain computation in a low precision that accuracy is measured against."""
    rounded = round_to or (lambda a: a)
    wide = np.float64 if round_to is None else np.float32
    q, k, v = (np.asarray(a).astype(wide) for a in (q, k, v))
    batch, seqlen_q, heads, dim = q.shape
    seqlen_kv, heads_kv = k.shape[1:3]
    group = heads // heads_kv if heads_kv else 1
    kk, vv = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = softmax_scale if softmax_scale is not None else (1 / np.sqrt(dim) if dim else 1.0)
    shape = (batch, heads, seqlen_q, seqlen_kv)
    with np.errstate(all="ignore"):
        x = rounded(np.einsum("bihd,bjhd->bhij", q, kk) * wide(scale)).astype(wide)
        raw = x
        if softcap > 0:
            x = softcap * np.tanh(x / softcap)
        if bias is not None:
            x = x + np.asarray(bias).astype(wide)
        t, j = positions(seqlen_q, seqlen_kv, q_offset, batch)
        distance = np.abs(t - j)[:, None]
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes).astype(wide)
            x = x - np.broadcast_to(slopes, (batch, heads))[:, :, None, None] * distance
        if score_mod is not None:
            x = call_mod(score_mod, shape, x, q_offset, captured, heads_kv)
        seen = visibility(shape, causal=causal, q_offset=q_offset, window=window, chunk=chunk, mask=mask)
        x = np.where(seen, x, -np.inf)
        sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks).astype(wide)
        sink = sink[None, :, None, None]
        m = np.maximum(x.max(-1, keepdims=True, initial=-np.inf), sink)
        m_safe = np.where(np.isneginf(m), 0, m)
        l = np.exp(x - m_safe).sum(-1, keepdims=True) + np.exp(sink - m_safe)
        lse = np.where(l > 0, m_safe + np.log(l), np.where(np.isnan(l), np.nan, -np.inf))
        p = np.where(np.isneginf(x), 0, np.exp(x - np.where(np.isneginf(lse), 0, lse)))
        dropped = p if keep is None else np.where(keep, p / keep_prob, 0)
        # Selected, not multiplied: what a hidden key holds never counts.
        products = np.where(dropped[..., None] == 0, 0, dropped[..., None] * vv.transpose(0, 2, 1, 3)[:, :, None])
        if round_to is None:
            o = products.sum(3)
        else:
            o = np.einsum("bhij,bjhd->bhid", rounded(dropped).astype(wide), np.where(np.isfinite(vv), vv, 0))
    o = rounded(o.transpose(0, 2, 1, 3))
    return SimpleNamespace(
        o=o,
        lse=lse[..., 0],
        p=p,
        raw=raw,
        x=x,
        scale=scale,
        distance=distance,
        sink=sink,
        kk=kk,
        vv=vv,
        q=q,
        group=group,
        softcap=softcap,
        keep=keep,
        keep_prob=keep_prob,
        dropped=dropped,
    )


def call_mod(function, shape, x, q_offset, captured, heads_kv):
    """The same Python function that is traced, on whole index arrays."""
    batch, heads, seqlen_q, seqlen_kv = shape
    b, h, i, j = np.ix_(range(batch), range(heads), range(seqlen_q), range(seqlen_kv))
    t, _ = positions(seqlen_q, seqlen_kv, q_offset, batch)
    offset = (t[:, 0, 0] if seqlen_q else np.zeros(batch, np.int64)).reshape(-1, 1, 1, 1)
    s = SimpleNamespace(
        seqlen_q=np.int64(seqlen_q),
        seqlen_kv=np.int64(seqlen_kv),
        q_offset=offset,
        head_kv=h // max(1, heads // max(1, heads_kv)),
        **(captured or {}),
    )
    args = (b, h, i, j, s) if x is None else (x, b, h, i, j, s)
    return np.broadcast_to(function(*args), shape)


def backward(f, do, dlse=None):
    """Gradients from forward()'s result; without score_mod. dbias is of the full shape."""
    do = np.asarray(do).astype(np.float64).transpose(0, 2, 1, 3)
    lse = f.lse[..., None]
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse).astype(np.float64)[..., None]
    vv = f.vv.transpose(0, 2, 1, 3)
    hidden = f.p == 0
    dead = np.isneginf(f.x).all(-1, keepdims=True) if f.x.shape[-1] else np.ones(f.x.shape[:-1] + (1,), bool)
    with np.errstate(all="ignore"):
        dp = np.einsum("bhid,bhjd->bhij", do, np.where(np.isfinite(vv), vv, 0))
        if f.keep is not None:
            dp = np.where(f.keep, dp / f.keep_prob, 0)
        delta = (f.o.transpose(0, 2, 1, 3) * do).sum(-1, keepdims=True)
        dx = np.where(hidden | dead, 0, f.p * (dp - delta + dlse))
        p_sink = np.where(np.isneginf(f.sink), 0, np.exp(f.sink - lse))
        dsinks = np.where(p_sink == 0, 0, p_sink * (dlse - delta)).sum((0, 2, 3))
        slope = 1 - np.tanh(f.raw / f.softcap) ** 2 if f.softcap > 0 else 1.0
        ds = np.where(dx == 0, 0, dx * slope) * f.scale
        q = f.q.transpose(0, 2, 1, 3)
        kk = f.kk.transpose(0, 2, 1, 3)
        dq = np.einsum("bhij,bhjd->bhid", ds, np.where(np.isfinite(kk), kk, 0))
        dk = np.einsum("bhij,bhid->bhjd", ds, np.where(np.isfinite(q), q, 0))
        dv = np.einsum("bhij,bhid->bhjd", f.dropped, do)
    return SimpleNamespace(
        dq=dq.transpose(0, 2, 1, 3),
        dk=fold(dk, f.group).transpose(0, 2, 1, 3),
        dv=fold(dv, f.group).transpose(0, 2, 1, 3),
        dbias=dx,
        dslopes=-(dx * f.distance).sum((2, 3)),
        dsinks=dsinks,
    )


def fold(gradient, group):
    """Sum over the query heads of a KV head."""
    batch, heads, rows, dim = gradient.shape
    return gradient.reshape(batch, heads // group, group, rows, dim).sum(2) if group else gradient


def reduce_to(gradient, shape):
    """Sum over the axes that were broadcast to make `gradient` from `shape`."""
    shape = (1,) * (gradient.ndim - len(shape)) + tuple(shape)
    axes = tuple(n for n in range(gradient.ndim) if shape[n] == 1 and gradient.shape[n] != 1)
    return gradient.sum(axes, keepdims=True)


def half(dtype):
    """Rounding to a low precision and back, for forward(round_to=...)."""
    if dtype == "bfloat16":
        import torch

        return lambda a: torch.from_numpy(np.ascontiguousarray(a, np.float32)).bfloat16().float().numpy()
    return lambda a: a.astype(dtype).astype(np.float32)


def worst(x, ref):
    """Largest error; infinities and NaN must be in the same places."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, (x.shape, ref.shape)
    finite = np.isfinite(ref)
    np.testing.assert_array_equal(np.where(finite, 0, x), np.where(finite, 0, ref))
    return float(np.abs(np.where(finite, x, 0) - np.where(finite, ref, 0)).max(initial=0))


def assert_close(x, ref, tolerance=1e-9, label=""):
    """Absolute and relative to the largest value, in one figure."""
    size = np.abs(np.where(np.isfinite(ref), ref, 0)).max(initial=0)
    error = worst(x, ref)
    assert error <= tolerance * (1 + size), f"{label}: error {error:.3g}, size {size:.3g}"


def slack(f):
    """What one rounding of the largest float32 score does to the output. Small samples can be lucky in `std`."""
    scores = np.abs(np.where(np.isfinite(f.x), f.x, 0)).max(initial=1)
    return 2.0**-23 * scores * np.abs(np.where(np.isfinite(f.vv), f.vv, 0)).max(initial=0)


def assert_accurate(x, ref, std, dtype, factor=2.0, label="", slack=1e-7):
    """max|x - ref| <= factor * max|std - ref| + 2 * max|round(ref) - ref|, the rule of the project."""
    if dtype == "float64":
        return assert_close(x, ref, 1e-11, label)
    finite = np.isfinite(ref)
    clean = np.where(finite, ref, 0)
    rounding = np.abs(half(dtype)(clean.astype(np.float32)).astype(np.float64) - clean).max(initial=0)
    plain = np.abs(np.where(finite, std, 0) - clean).max(initial=0)
    error = worst(x, ref)
    limit = factor * plain + 2 * rounding + slack
    assert error <= limit, f"{label}: error {error:.3g}, allowed {limit:.3g}"
    return None
