"""The functions of FlashAttention-3 (its module `flash_attn_interface`), computed by Tilewise on every CPU and GPU.

    from tilewise.flash_attn_interface import flash_attn_func      # instead of: from flash_attn_interface import …

Names, order of arguments and defaults are upstream's. As in `tilewise.flash_attn.flash_attn_interface`, q is [batch,
seqlen_q, num_heads, head_dim] or packed [total_q, num_heads, head_dim], and causal and window_size count from the bottom
right corner; but a row that sees no key has softmax_lse = -inf, and there is no dropout. The head dimension of v may differ.

What is not there is refused: qv, the scales of FP8 (q_descale, k_descale, v_descale), caches (page_table, k_new, ...; they
come with serving), num_splits above 1 and sm_margin (how work is split is chosen here). pack_gqa is a layout of work that
results do not depend on; True, False and None are taken. docs/compatibility.md lists the deliberate differences.
"""

from __future__ import annotations

from typing import Any

import torch

import tilewise

from ._errors import refuse, refuse_type
from ._names import own_names
from ._problem import integer
from .flash_attn import _install
from .flash_attn._arguments import SERVING, cap, must_be_none, not_yet, row_dots, tensors, unpacked
from .flash_attn._arguments import window as pair

Pair = tuple[int, int]

__version__ = "3.0.0"

_FP8 = "Give float16 or bfloat16 inputs without scales."


def install() -> None:
    """Makes `import flash_attn_interface` mean this module in this process, with metadata of flash-attn-3 3.0.0.

    As `tilewise.flash_attn.install`: before other libraries are imported.

    Raises:
        ImportError: where a flash_attn_interface exists already.
    """
    _install.install_as("flash_attn_interface", "tilewise.flash_attn_interface", "flash-attn-3", __version__)


def _checked(num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0, **absent: Any) -> None:
    """Refuses what is not there; `absent`: arguments that must be None."""
    for name, value in absent.items():
        if name.endswith("descale"):
            advice = _FP8
        elif name == "qv":
            advice = "Concatenate: q = cat(q, qv), k = cat(k, v) along head_dim has the same scores."
        else:
            advice = SERVING
        must_be_none(name, value, advice)
    if num_splits not in (0, 1):
        not_yet("num_splits", num_splits, "0 or 1", "How keys are split is chosen by the plan.")
    if pack_gqa not in (None, True, False):
        refuse_type("pack_gqa", repr(pack_gqa), "None, True or False; results are the same")
    if sm_margin:
        not_yet("sm_margin", sm_margin, "0", "Kernels take all of the GPU.")


@own_names
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q to k and v, forward and backward.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim]; k: [batch, seqlen_k, num_heads_k, head_dim]; v: [batch, seqlen_k,
            num_heads_k, head_dim_v].
        softmax_scale: factor of q k^T; default 1 / sqrt(head_dim).
        causal: hides keys after the query's own position t = i + seqlen_k - seqlen_q.
        window_size: (left, right) around t, both ends included; -1 = no bound.
        attention_chunk: c > 0: only keys j with j // c == t // c.
        softcap: scores become softcap * tanh(score / softcap); 0 (or less) = off.
        deterministic: gradients have the same bits in every run.
        return_attn_probs: return (out, softmax_lse).
        qv, q_descale, k_descale, v_descale: must be None. num_splits: 0 or 1. sm_margin: 0. pack_gqa: no effect.

    Returns:
        out [batch, seqlen_q, num_heads, head_dim_v]; with return_attn_probs also softmax_lse, float32 [batch, num_heads,
        seqlen_q], natural logarithm, -inf where a row sees no key; differentiable.

    Raises:
        tilewise.UnsupportedError (NotImplementedError): an argument that must be None; else as `tilewise.attention`.
    """
    _checked(num_splits, pack_gqa, sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    tensors(q=q, k=k, v=v)
    return tilewise.attention(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window=pair(window_size), chunk=attention_chunk,
        softcap=cap(softcap), deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip


@own_names
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: [batch, seqlen, 3, num_heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim] with
            num_heads_q.
        The rest: as `flash_attn_func`.
    """
    tensors(qkv=qkv)
    if qkv.ndim == 4:
        total = qkv.shape[2]
        heads = 0 if num_heads_q is None else integer(num_heads_q, "num_heads_q")
        if not 0 < heads < total or (total - heads) % 2:
            seen = f"{num_heads_q} of {total} heads"
            refuse("num_heads_q", seen, "total - num_heads_q even: as many heads of keys as of values")
        heads_k = (total - heads) // 2
        q, k, v = qkv.split([heads, heads_k, heads_k], 2)
    else:
        q, k, v = unpacked(qkv, "qkv", 3, 5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@own_names
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences, each to its own keys.

    Args:
        q: [total_q, num_heads, head_dim]; k: [total_k, num_heads_k, head_dim]; v: [total_k, num_heads_k, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [batch + 1]: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: hints; a wrong one is slower, not wrong.
        seqused_q, seqused_k: int [batch]: only the first rows of each sequence are part of it; the others have out = 0,
            softmax_lse = -inf and zero gradients.
        The rest: as `flash_attn_func`.

    Returns:
        out [total_q, num_heads, head_dim_v]; with return_attn_probs also softmax_lse [num_heads, total_q].
    """
    _checked(num_splits, pack_gqa, sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    tensors(q=q, k=k, v=v)
    return tilewise.attention(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window=pair(window_size), chunk=attention_chunk,
        softcap=cap(softcap), cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k, seqused_q=seqused_q, seqused_kv=seqused_k, deterministic=deterministic,
        return_lse=return_attn_probs,
    )  # fmt: skip


@own_names
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins results over disjoint sets of keys.

    Args:
        out_partial: [parts, batch, seqlen, num_heads, head_dim], any float dtype.
        lse_partial: [parts, batch, seqlen, num_heads].
        out: tensor that the result is written to.
        out_dtype: dtype of the result; default that of out, else of out_partial.

    Returns:
        (out [batch, seqlen, num_heads, head_dim], softmax_lse [batch, seqlen, num_heads]); differentiable unless out is
        given.
    """
    tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1]:
        seen = f"shapes {list(out_partial.shape)} and {list(lse_partial.shape)}"
        allowed = "[parts, batch, seqlen, num_heads, head_dim] and [parts, batch, seqlen, num_heads]"
        refuse("out_partial, lse_partial", seen, allowed)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        refuse_type("out_dtype", repr(out_dtype), "a torch.dtype or None")
    if out is not None:
        tensors(out=out)
        if out.shape != out_partial.shape[1:]:
            refuse("out", f"shape {list(out.shape)}", f"{list(out_partial.shape[1:])}, that of one part of out_partial")
        if out_dtype not in (None, out.dtype):
            refuse("out_dtype", out_dtype, f"{out.dtype}, the dtype of out, or None")
    merged, lse = tilewise.merge(out_partial, lse_partial.transpose(-1, -2))
    if out is not None:
        merged = out.copy_(merged)
    elif out_dtype is not None:
        merged = merged.to(out_dtype)
    return merged, lse.transpose(-1, -2)


@own_names
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Not there yet: it comes with serving. Raises tilewise.UnsupportedError (NotImplementedError)."""
    advice = "Until then tilewise.attention(..., seqused_kv=cache_seqlens) attends to a cache that is not paged."
    not_yet("flash_attn_with_kvcache()", "a call", "none yet", f"{SERVING} {advice}")


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Not there yet: it comes with serving. Raises tilewise.UnsupportedError (NotImplementedError)."""
    not_yet("get_scheduler_metadata()", "a call", "none yet", SERVING)


# ---------------------------------------------------------------------------------------------------- the private two


@own_names
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    out_: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass alone, without autograd: (out, softmax_lse, and two empty tensors, partial results upstream).

    q, and k and v, are dense, or packed with cu_seqlens_q and cu_seqlens_k; seqused_q, seqused_k and leftpad_k, int
    [batch], say which of their rows are used. out_ is written to and returned. rotary_interleaved says nothing without
    rotary_cos. The rest as `flash_attn_func`.
    """
    _checked(
        num_splits, pack_gqa, sm_margin, k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new,
        page_table=page_table, kv_batch_idx=kv_batch_idx, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    tensors(q=q, k=k, v=v)
    out, lse, _ = tilewise.attention_forward(
        q, k, v, out=out_, softmax_scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right),
        chunk=attention_chunk, softcap=cap(softcap), cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k, seqused_q=seqused_q, seqused_kv=seqused_k,
        leftpad_kv=leftpad_k,
    )  # fmt: skip
    return out, lse, lse.new_empty(0), lse.new_empty(0)


@own_names
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sequed_q: torch.Tensor | None = None,
    sequed_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """The backward pass alone: writes dq, dk and dv, of any strides, and returns softmax_d.

    softmax_lse may come from several calls whose results were merged. sequed_q and sequed_k (spelled as upstream) are
    seqused_q and seqused_k of the forward pass. A gradient whose tensor is None is not computed. softmax_d, float32
    [batch, num_heads, seqlen_q] or packed [num_heads, total_q], is the sum over head_dim of dout * out.
    """
    _checked(sm_margin=sm_margin)
    tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    wanted = [name for name, gradient in (("q", dq), ("k", dk), ("v", dv)) if gradient is not None]
    tilewise.attention_backward(
        dout, q, k, v, out, softmax_lse, dq=dq, dk=dk, dv=dv, wanted=wanted, softmax_scale=softmax_scale,
        causal=is_causal, window=(window_size_left, window_size_right), softcap=cap(softcap),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
        seqused_q=sequed_q, seqused_kv=sequed_k, deterministic=deterministic,
    )  # fmt: skip
    return row_dots(dout, out)
