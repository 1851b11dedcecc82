"""flash_attn.layers.rotary: rotary position embeddings (Su et al., arXiv:2104.09864), in torch operations.

Pairs of a head's dimensions are rotated by an angle that grows with the position: dimensions 2n and 2n + 1 if interleaved
(as GPT-J does), else n and n + rotary_dim / 2 (as GPT-NeoX does). Dimensions past rotary_dim stay as they are. Products
are taken in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._errors import refuse


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """`apply_rotary_emb` without autograd of its own; conjugate=True rotates the other way round."""
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1] or cos.shape != sin.shape:
        seen = f"shapes {list(cos.shape)} and {list(sin.shape)} for head_dim {x.shape[-1]}"
        refuse("cos, sin", seen, "one shape, [seqlen_rotary, rotary_dim / 2], with rotary_dim <= head_dim")
    place = _positions(x, seqlen_offsets, cu_seqlens, cos.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[place].to(wide).unsqueeze(-2) for table in (cos, sin))
    if conjugate:
        s = -s
    turned = x[..., :rotary_dim].to(wide)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    turned = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    if inplace:
        x[..., :rotary_dim] = turned
        return x
    return torch.cat((turned, x[..., rotary_dim:]), -1)


def _positions(
    x: torch.Tensor, seqlen_offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None, limit: int
) -> torch.Tensor:
    """Position of every token: [batch | 1, seqlen] or packed [total]."""
    if cu_seqlens is None:
        place = torch.arange(x.shape[1], device=x.device)[None]
        if isinstance(seqlen_offsets, int) and x.shape[1] + seqlen_offsets > limit:
            seen = f"{limit} rows for {x.shape[1]} tokens from position {seqlen_offsets}"
            refuse("cos, sin", seen, "a row for every position")
        return place + (seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[:, None])
    place = torch.arange(x.shape[0], device=x.device)
    if cu_seqlens.shape[0] < 2:
        return place
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    place = place - cu_seqlens[sequence]
    return place + (seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[sequence])


class _Rotate(torch.autograd.Function):
    """In place, on tensors that require grad too; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: Any, sin: Any, offsets: Any, cu_seqlens: Any, interleaved: bool) -> Any:
        ctx.save_for_backward(cos, sin, *(t for t in (offsets, cu_seqlens) if isinstance(t, torch.Tensor)))
        ctx.offsets = offsets if isinstance(offsets, int) else None
        ctx.packed, ctx.interleaved = cu_seqlens is not None, interleaved
        return apply_rotary(x, cos, sin, offsets, cu_seqlens, interleaved=interleaved, inplace=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cos, sin, *rest = ctx.saved_tensors
        offsets = rest.pop(0) if ctx.offsets is None else ctx.offsets
        cu_seqlens = rest.pop(0) if ctx.packed else None
        dx = apply_rotary(gradients[0], cos, sin, offsets, cu_seqlens, interleaved=ctx.interleaved, conjugate=True)
        return dx, None, None, None, None, None


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotates the first rotary_dim dimensions of every head by the position of its token.

    Args:
        x: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with cu_seqlens.
        cos, sin: [seqlen_rotary, rotary_dim / 2], a row for every position.
        interleaved: pairs of neighbours; default: the first half with the second.
        inplace: writes to x and returns it.
        seqlen_offsets: position of the first token, an int or int [batch].
        cu_seqlens: int [batch + 1], as in the packed functions.
        max_seqlen: not needed.

    Returns:
        The shape and dtype of x; differentiable in x.

    Raises:
        tilewise.InvalidArgumentError: the shapes do not fit, or there are fewer rows than positions.
    """
    if inplace:
        return _Rotate.apply(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved)
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`apply_rotary_emb` from position 0; cos and sin may be [batch, seqlen, rotary_dim / 2]."""
    if cos.ndim == 2:
        return apply_rotary_emb(x, cos, sin, interleaved)
    rows = [apply_rotary(a[None], c, s, interleaved=interleaved) for a, c, s in zip(x, cos, sin, strict=True)]
    return torch.cat(rows)


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotates q and k inside qkv, in place, and returns it.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim] with
            num_heads_q.
        cos_k, sin_k: for k; default: cos and sin.
        The rest: as `apply_rotary_emb`.
    """
    q, k = _q_and_k(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    return _RotateParts.apply(qkv, ((q, cos, sin), (k, cos_k, sin_k)), seqlen_offsets, interleaved)


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotates k inside kv [batch, seqlen, 2, heads, head_dim], in place, and returns it. As `apply_rotary_emb`."""
    if kv.ndim != 5 or kv.shape[2] != 2:
        refuse("kv", f"shape {list(kv.shape)}", "[batch, seqlen, 2, heads, head_dim]")
    return _RotateParts.apply(kv, (((slice(None), slice(None), 0), cos, sin),), seqlen_offsets, interleaved)


def _q_and_k(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[Any, Any]:
    """Indices of q and of k."""
    every = slice(None)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return (every, every, 0), (every, every, 1)
    if qkv.ndim != 4 or num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2:
        allowed = "[batch, seqlen, 3, heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim]"
        refuse("qkv", f"shape {list(qkv.shape)}, num_heads_q {num_heads_q}", allowed)
    end = (qkv.shape[2] + num_heads_q) // 2
    return (every, every, slice(num_heads_q)), (every, every, slice(num_heads_q, end))


class _RotateParts(torch.autograd.Function):
    """Rotates parts of a tensor in place; parts: (index, cos, sin)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: Any, offsets: Any, interleaved: bool) -> Any:
        ctx.parts, ctx.offsets, ctx.interleaved = parts, offsets, interleaved
        for index, cos, sin in parts:
            apply_rotary(x[index], cos, sin, offsets, interleaved=interleaved, inplace=True)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dx = gradients[0].clone()
        for index, cos, sin in ctx.parts:
            apply_rotary(dx[index], cos, sin, ctx.offsets, interleaved=ctx.interleaved, inplace=True, conjugate=True)
        return dx, None, None, None


class RotaryEmbedding(torch.nn.Module):
    """Keeps tables of cos and sin and rotates q and k with them, in place.

    Args:
        dim: number of dimensions of a head that are rotated.
        base: the slowest pair turns by about 1 / base a position.
        interleaved: as `apply_rotary_emb`.
        scale_base: None, or the base of xPos (Sun et al., arXiv:2212.10554), which scales q up and k down with the
            position.
        device: where the tables are made.
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-steps / dim), persistent=False)
        self.register_buffer(
            "scale", None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim), persistent=False
        )
        self._tables: tuple[torch.Tensor, ...] = ()

    def _cos_sin(self, seqlen: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """cos, sin for q, then for k: [at least seqlen, dim / 2] in the dtype and on the device of `like`."""
        tables = self._tables
        fits = (
            tables and tables[0].shape[0] >= seqlen and (tables[0].dtype, tables[0].device) == (like.dtype, like.device)
        )
        if not fits or (self.training and tables[0].is_inference()):
            # float32 throughout, even in a model that was cast: positions have more digits than bfloat16 holds.
            place = torch.arange(seqlen, device=like.device, dtype=torch.float32)
            steps = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
            angle = torch.outer(place, self.base ** (-steps / self.dim))
            cos, sin = angle.cos(), angle.sin()
            tables = (cos, sin, cos, sin)
            if self.scale_base is not None:
                scale = ((steps + 0.4 * self.dim) / (1.4 * self.dim)) ** (
                    (place[:, None] - seqlen // 2) / self.scale_base
                )
                tables = (cos * scale, sin * scale, cos / scale, sin / scale)
            tables = self._tables = tuple([table.to(like.dtype) for table in tables])
        return tables

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotates in place.

        Args:
            qkv: as `apply_rotary_emb_qkv_`; with kv it is q, [batch, seqlen, heads, head_dim].
            kv: [batch, seqlen, 2, heads, head_dim].
            seqlen_offset: position of the first token, an int or int [batch].
            max_seqlen: number of positions that the tables must have; needed if seqlen_offset is a tensor.

        Returns:
            qkv, or (q, kv).
        """
        if max_seqlen is None:
            if not isinstance(seqlen_offset, int):
                refuse("max_seqlen", "None with a tensor as seqlen_offset", "the number of positions")
            max_seqlen = qkv.shape[1] + seqlen_offset
        elif isinstance(seqlen_offset, int) and max_seqlen < qkv.shape[1] + seqlen_offset:
            seen = f"{max_seqlen} for {qkv.shape[1]} tokens from position {seqlen_offset}"
            refuse("max_seqlen", seen, "a place for every position")
        if self.dim > qkv.shape[-1]:
            refuse("qkv", f"head_dim {qkv.shape[-1]}", f"at least {self.dim}, the dimensions that are rotated")
        cos, sin, cos_k, sin_k = self._cos_sin(max_seqlen, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
