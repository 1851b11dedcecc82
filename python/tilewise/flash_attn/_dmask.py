"""S_dmask: what flash-attn returns of the probabilities when dropout is on, in torch operations.

It is for tests, and as large as a matrix of scores: nothing else in the package is. Made of ordinary operations, it needs
no copy to the host and can be compiled. The random numbers are those of docs/formula.md#dropout.
"""

from __future__ import annotations

from typing import Any

import torch

_LOW = 0xFFFFFFFF


def s_dmask(
    q: torch.Tensor,
    k: torch.Tensor,
    rng: Any,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    seqused_kv: torch.Tensor | None = None,
    leftpad_kv: torch.Tensor | None = None,
) -> torch.Tensor:
    """exp(x - m), x the score and m the largest of its row, with the sign bit set where dropout drops; 0 where hidden.

    [batch, heads, seqlen_q, seqlen_kv], both lengths rounded up to a multiple of 128, in the dtype of q. A probability is
    abs(S_dmask) * exp(m - lse): a row divided by its sum.
    """
    with torch.no_grad():
        q, rows = _padded(q, cu_seqlens_q, max_seqlen_q)
        k, keys = _padded(k, cu_seqlens_kv, max_seqlen_kv, seqused_kv, leftpad_kv)
        batch, seqlen_q, heads, dim = q.shape
        seqlen_kv, group = k.shape[1], heads // max(k.shape[2], 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = dim**-0.5 if softmax_scale is None else softmax_scale
        x = torch.einsum("bihd,bjhd->bhij", q.to(wide), k.to(wide).repeat_interleave(group, 2)) * scale
        if softcap > 0:
            x = softcap * torch.tanh(x / softcap)
        i = torch.arange(seqlen_q, device=q.device)[:, None]
        j = torch.arange(seqlen_kv, device=q.device)
        t = i + (keys - rows).view(-1, 1, 1)
        if alibi_slopes is not None:
            x = x - alibi_slopes.expand(batch, heads)[:, :, None, None] * (t - j).abs()[:, None]
        hidden = (i >= rows.view(-1, 1, 1)) | (j >= keys.view(-1, 1, 1))
        if causal:
            hidden = hidden | (j > t)
        if window[0] >= 0:
            hidden = hidden | (j < t - window[0])
        if window[1] >= 0:
            hidden = hidden | (j > t + window[1])
        x = x.masked_fill(hidden[:, None], -torch.inf)
        m = x.amax(-1, keepdim=True) if seqlen_kv else x.new_zeros(())
        s = torch.exp(x - torch.where(torch.isneginf(m), 0.0, m)).to(q.dtype)
        return torch.where(keep_mask(rng, batch, heads, seqlen_q, seqlen_kv, dropout_p, q.device), s, -s)


def _padded(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    seqused: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x as [batch, seqlen rounded up to 128, heads, dim], and the lengths [batch]."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -seqlen % 128))
        return x, torch.full((batch,), seqlen, device=x.device)
    cu_seqlens = torch.as_tensor(cu_seqlens, dtype=torch.int64, device=x.device)
    first, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    if seqused is not None:
        lengths = torch.as_tensor(seqused, dtype=torch.int64, device=x.device)
    if leftpad is not None:
        leftpad = torch.as_tensor(leftpad, dtype=torch.int64, device=x.device)
        first, lengths = first + leftpad, (lengths - leftpad).clamp(min=0)
    if not x.shape[0]:
        x = x.new_zeros(1, *x.shape[1:])
    places = first[:, None] + torch.arange(-(-max_seqlen // 128) * 128, device=x.device)
    return x[places.clamp(max=x.shape[0] - 1)], lengths


def keep_mask(
    rng: Any, batch: int, heads: int, seqlen_q: int, seqlen_kv: int, dropout_p: float, device: torch.device
) -> torch.Tensor:
    """`tilewise.dropout_mask` for lengths that are multiples of 16 and 32, on any device. rng: (seed, offset)."""
    seed, offset = rng[0], rng[1]
    key0, key1 = seed & _LOW, ((seed >> 32) ^ (offset >> 32)) & _LOW

    def counter(count: int, step: int) -> torch.Tensor:
        """0 ... 7, then again from the next multiple of step."""
        return (torch.arange(0, count, step, device=device)[:, None] + torch.arange(8, device=device)).flatten()

    c0 = torch.zeros((), dtype=torch.int64, device=device) + (offset & _LOW)
    c1 = torch.arange(batch * heads, device=device)[:, None, None]
    c2 = counter(seqlen_q, 16)[:, None]
    c3 = counter(seqlen_kv, 32)
    for _ in range(7):  # Philox4x32-7 (Salmon et al., SC 2011). Products wrap modulo 2^64, as they should.
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ key0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ key1, p0 & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    # Word 2 * bit3(i) + bit4(j), half bit3(j).
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3))
    lanes = torch.stack((words & 0xFFFF, words >> 16)) >= round(65536 * dropout_p)
    lanes = lanes.view(2, 2, 2, batch, heads, seqlen_q // 16, 8, seqlen_kv // 32, 8)  # half, bit3(i), bit4(j), ...
    return lanes.permute(3, 4, 5, 1, 6, 7, 2, 0, 8).reshape(batch, heads, seqlen_q, seqlen_kv)
