"""flash_attn.flash_attn_interface: the functions of flash-attn 2.8 and the four private ones that other packages use.

Every function is `tilewise.attention`, or one of its two halves, with other names. What is common to all of them:

* q is [batch, seqlen_q, num_heads, head_dim], k and v [batch, seqlen_k, num_heads_k, head_dim]; num_heads is a multiple of
  num_heads_k, and query head h reads head h // (num_heads // num_heads_k). Packed ("varlen"): [total, heads, head_dim] with
  cu_seqlens. float16, bfloat16, float32 and float64, on the CPU and on CUDA devices, any strides.
* causal and window_size count positions from the bottom right corner: query i stands at t = i + seqlen_k - seqlen_q.
* A row that sees no key has out = 0, softmax_lse = +inf and no gradient.
* softmax_lse is the natural logarithm of the sum of exponentials of a row, float32 (float64 for float64 inputs).

The method is FlashAttention-2 (Dao 2023, arXiv:2307.08691). Conventions are those of flash-attn 2.8.4; docs/compatibility.md
lists the deliberate differences.
"""

from __future__ import annotations

from typing import Any

import torch

import tilewise

from .._attention import draw_seed
from .._errors import refuse
from .._names import own_names
from .._problem import integer
from ._arguments import SERVING, cap, must_be_none, not_yet, row_dots, tensors, unpacked
from ._arguments import window as pair
from ._dmask import s_dmask

#: flash-attn looks for AMD GPUs with this; there are none here.
USE_TRITON_ROCM = False

Pair = tuple[int, int]
Lse = torch.Tensor


def _upstream_lse(lse: torch.Tensor) -> torch.Tensor:
    """flash-attn 2 writes +inf where a row sees no key."""
    return torch.where(torch.isneginf(lse), torch.inf, lse)


def _own_lse(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isposinf(lse), -torch.inf, lse)


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    **lengths: Any,
) -> dict[str, Any]:
    """Options of tilewise.attention."""
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": pair(window_size),
        "softcap": cap(softcap),
        "alibi_slopes": alibi_slopes,
        **lengths,
    }


def _dmask(q: torch.Tensor, k: torch.Tensor, rng: Any, dropout_p: float, options: dict[str, Any]) -> torch.Tensor:
    """S_dmask, or an empty tensor without dropout."""
    if not dropout_p:
        return q.new_empty(0)
    if "cu_seqlens_q" in options:
        lengths = {name: integer(options[name], name) for name in ("max_seqlen_q", "max_seqlen_kv")}
        options = {**options, **lengths}
    return s_dmask(q.detach(), k.detach(), rng, dropout_p=dropout_p, **options)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    options: dict[str, Any],
) -> Any:
    tensors(q=q, k=k, v=v)
    if not return_attn_probs:
        return tilewise.attention(q, k, v, dropout_p=dropout_p, deterministic=deterministic, **options)
    rng = draw_seed(q, q.device if q.is_cuda else None) if dropout_p else None
    out, lse = tilewise.attention(
        q, k, v, dropout_p=dropout_p, seed=rng, deterministic=deterministic, return_lse=True, **options
    )
    return out, _upstream_lse(lse), _dmask(q, k, rng, dropout_p, options)


@own_names
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q to k and v, forward and backward.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim].
        k: [batch, seqlen_k, num_heads_k, head_dim].
        v: [batch, seqlen_k, num_heads_k, head_dim_v]; head_dim_v may differ.
        dropout_p: probability in [0, 1) that an attention weight is dropped. 0 in evaluation. The default generator of
            torch decides (torch.manual_seed).
        softmax_scale: factor of q k^T; default 1 / sqrt(head_dim).
        causal: hides keys after the query's own position i + seqlen_k - seqlen_q.
        window_size: (left, right), counted from that position, both ends included; -1 = no bound.
        softcap: scores become softcap * tanh(score / softcap); 0 (or less) = off.
        alibi_slopes: [num_heads] or [batch, num_heads]; slope * distance is subtracted from a score. Has a gradient.
        deterministic: gradients have the same bits in every run.
        return_attn_probs: return (out, softmax_lse, S_dmask).

    Returns:
        out, [batch, seqlen_q, num_heads, head_dim_v] in the dtype of q; with return_attn_probs also

        softmax_lse, float32 [batch, num_heads, seqlen_q], +inf where a row sees no key; differentiable;

        S_dmask, for tests, empty without dropout: [batch, num_heads, seqlen_q, seqlen_k], lengths rounded up to a
        multiple of 128, exp(score - largest score of the row), the sign bit set where dropout dropped.

    Raises:
        tilewise.InvalidArgumentError (ValueError), tilewise.ArgumentTypeError (TypeError), tilewise.UnsupportedError
        (NotImplementedError), with the argument, what was seen, and what is allowed.
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, kv [batch, seqlen_k, 2, num_heads_k, head_dim]."""
    k, v = unpacked(kv, "kv", 2, 5)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, qkv [batch, seqlen, 3, num_heads, head_dim]."""
    q, k, v = unpacked(qkv, "qkv", 3, 5)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of packed sequences, each to its own keys.

    Args:
        q: [total_q, num_heads, head_dim]; k: [total_k, num_heads_k, head_dim]; v: [total_k, num_heads_k, head_dim_v].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [batch + 1]: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: hints, int or 0-d tensor; a wrong one is slower, not wrong, and None is taken. Only
            S_dmask has its shape from them.
        block_table: must be None: caches in pages come with serving.
        The rest: as `flash_attn_func`; alibi_slopes [num_heads] or [batch, num_heads].

    Returns:
        out [total_q, num_heads, head_dim_v]; with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse
        [num_heads, total_q], S_dmask [batch, num_heads, max_seqlen_q, max_seqlen_k], rounded up to 128. Rows in no
        sequence have out = 0 and softmax_lse = +inf.

    Raises:
        As `flash_attn_func`.
    """
    must_be_none("block_table", block_table, SERVING)
    options = _options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
    )  # fmt: skip
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, kv [total_k, 2, num_heads_k, head_dim]."""
    k, v = unpacked(kv, "kv", 2, 4)
    options = _options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
    )  # fmt: skip
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv [total, 3, num_heads, head_dim]."""
    q, k, v = unpacked(qkv, "qkv", 3, 4)
    options = _options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen,
    )  # fmt: skip
    return _attention(q, k, v, dropout_p, deterministic, return_attn_probs, options)


@own_names
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Not there yet: it comes with serving. Raises tilewise.UnsupportedError (NotImplementedError)."""
    not_yet(
        "flash_attn_with_kvcache()",
        "a call",
        "none yet",
        f"{SERVING} Until then tilewise.attention(q, k_cache, v_cache, seqused_kv=cache_seqlens) attends to a "
        "cache that is not paged.",
    )


# --------------------------------------------------------------------------------------------------- the private four
# Ring and context parallel packages call them and read their defaults.


@own_names
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass alone, without autograd: (out, softmax_lse, S_dmask, rng_state).

    rng_state is the int64[2] (seed, offset) that dropout used, on the device of q, for `_flash_attn_backward`; zeros
    without dropout. S_dmask is empty unless return_softmax, which needs dropout_p > 0. Arguments as `flash_attn_func`.
    """
    window_size = (window_size_left, window_size_right)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _forward(q, k, v, dropout_p, return_softmax, options)


@own_names
def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_flash_attn_forward`, for packed sequences.

    Args:
        leftpad_k, seqused_k: int [batch]: only rows leftpad_k to seqused_k - 1 of a sequence's keys are part of it.
        zero_tensors: rows of no sequence are zero here, with or without it.
        num_splits: 0 or 1; how keys are split is chosen here.
        block_table: must be None.
    """
    must_be_none("block_table", block_table, SERVING)
    if num_splits not in (0, 1):
        not_yet("num_splits", num_splits, "0 or 1", "How keys are split is chosen by the plan.")
    window_size = (window_size_left, window_size_right)
    options = _options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
        seqused_kv=seqused_k, leftpad_kv=leftpad_k,
    )  # fmt: skip
    return _forward(q, k, v, dropout_p, return_softmax, options)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, return_softmax: bool, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors(q=q, k=k, v=v)
    if return_softmax and not dropout_p:
        refuse("return_softmax", "True with dropout_p 0", "True with dropout_p > 0, or False")
    out, lse, rng = tilewise.attention_forward(q, k, v, dropout_p=dropout_p, **options)
    if rng is None:
        rng = torch.zeros(2, dtype=torch.int64, device=q.device)
    probs = _dmask(q, k, rng, dropout_p, options) if return_softmax else q.new_empty(0)
    return out, _upstream_lse(lse), probs, rng


@own_names
def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """The backward pass alone: writes dq, dk and dv, of any strides, and returns softmax_d.

    softmax_lse may come from several calls whose results were merged (ring attention). rng_state is what
    `_flash_attn_forward` returned; it is needed with dropout. A gradient whose tensor is None is not computed. softmax_d,
    float32 [batch, num_heads, seqlen_q], is the sum over head_dim of dout * out.
    """
    window_size = (window_size_left, window_size_right)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, deterministic, rng_state, options)


@own_names
def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """As `_flash_attn_backward`, for packed sequences; softmax_d is [num_heads, total_q].

    zero_tensors: rows of no sequence have zero gradients here, with or without it.
    """
    window_size = (window_size_left, window_size_right)
    options = _options(
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
    )  # fmt: skip
    return _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, deterministic, rng_state, options)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    rng_state: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    wanted = [name for name, gradient in (("q", dq), ("k", dk), ("v", dv)) if gradient is not None]
    if dropout_p:
        if rng_state is None:
            refuse("rng_state", "None with dropout_p > 0", "what the forward pass returned")
        tensors(rng_state=rng_state)
        if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
            seen = f"{rng_state.dtype} {list(rng_state.shape)}"
            refuse("rng_state", seen, "torch.int64 [2], what the forward pass returned")
    tilewise.attention_backward(
        dout, q, k, v, out, _own_lse(softmax_lse), rng=rng_state, dq=dq, dk=dk, dv=dv, wanted=wanted,
        dropout_p=dropout_p, deterministic=deterministic, **options,
    )  # fmt: skip
    return row_dots(dout, out)


#: Upstream these are the operators behind the functions above.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Number of keys that S_dmask is relative to one maximum of: here all of a row, so a number above every length."""
    return 1 << 30
