"""What both fronts, that of flash-attn 2 and that of FlashAttention-3, do to arguments before `tilewise.attention`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .._errors import UnsupportedError, message, refuse, refuse_type
from .._problem import integer, real

SERVING = "Functions for caches come with the serving part of tilewise."


def not_yet(argument: str, seen: object, allowed: str, advice: str) -> NoReturn:
    """Refuses what flash-attn has and tilewise has not, or not yet."""
    raise UnsupportedError(message(argument, seen, allowed, advice))


def must_be_none(argument: str, value: Any, advice: str) -> None:
    if value is not None:
        seen = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        not_yet(argument, seen, "None", advice)


def window(window_size: Any) -> tuple[int, int]:
    """(left, right) as two ints; a pair, a list or a tensor of two is taken."""
    if not hasattr(window_size, "__len__") or getattr(window_size, "ndim", 1) != 1 or len(window_size) != 2:
        refuse_type("window_size", repr(window_size), "a pair (left, right); -1 = unbounded")
    return integer(window_size[0], "window left"), integer(window_size[1], "window right")


def cap(softcap: Any) -> float:
    """softcap; below 0 it is off, as upstream."""
    return max(real(softcap, "softcap"), 0.0)


def tensors(**named: Any) -> None:
    """Refuses what is no tensor."""
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            refuse_type(
                name, f"a {type(value).__name__}", "a torch.Tensor", "tilewise.attention takes NumPy arrays too."
            )


def unpacked(stacked: torch.Tensor, name: str, parts: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The views of q, k, v (or k, v) in a tensor [..., parts, heads, head_dim]."""
    tensors(**{name: stacked})
    if stacked.ndim != rank or stacked.shape[-3] != parts:
        axes = "batch, seqlen" if rank == 5 else "total"
        refuse(name, f"shape {list(stacked.shape)}", f"[{axes}, {parts}, heads, head_dim]")
    return stacked.unbind(-3)


def row_dots(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """softmax_d, sum over head_dim of dout * out: float32 [batch, heads, seqlen_q] or packed [heads, total_q]."""
    wide = torch.promote_types(out.dtype, torch.float32)
    return (dout.to(wide) * out.to(wide)).sum(-1).transpose(-1, -2).contiguous()
