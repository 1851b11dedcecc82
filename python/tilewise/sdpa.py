"""PyTorch's scaled_dot_product_attention, computed by Tilewise: three ways in.

    o = tilewise.scaled_dot_product_attention(q, k, v, is_causal=True)   # the same signature
    with tilewise.sdpa.routed():                                         # every call inside, whoever makes it
        model(x)
    tilewise.sdpa.register_flash()                                       # PyTorch's own registry, CUDA only
    torch.nn.attention.activate_flash_attention_impl("tilewise")

docs/sdpa.md has the guide.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Sequence
from inspect import signature
from typing import Any, Final, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from ._attention import attention, attention_backward, attention_forward
from ._errors import Error, UnsupportedError, message, refuse, refuse_type
from ._names import own_names

__all__ = ["register_flash", "routed", "scaled_dot_product_attention"]

_log: Final = logging.getLogger("tilewise.sdpa")
_pytorchs: Final = torch.nn.functional.scaled_dot_product_attention
# Functions that torch hands to a mode as a whole, and that come to the function inside; a backward pass when a checkpoint
# runs the forward pass again.
_CALLERS: Final = (torch.nn.functional.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.grad)
_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

try:  # torch.nn.attention.bias: causal masks as objects, whose corner has a name
    from torch.nn.attention.bias import CausalBias, CausalVariant
except ImportError:  # torch < 2.3
    CausalBias = CausalVariant = None


# ------------------------------------------------------------------------------------------------- the function


@own_names
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention with its signature and meaning, computed by Tilewise.

    Args:
        query, key, value: tensors [..., heads, L, E], [..., heads, S, E] and [..., heads, S, Ev]; the axes in front of
            the last two broadcast. The heads axis may be missing.
        attn_mask: bool, true = attend; or float, added to the scores, with a gradient; broadcasts to
            [..., heads, L, S]. Or a torch.nn.attention.bias.CausalBias.
        dropout_p: applied always, in evaluation too, as in PyTorch.
        is_causal: query i sees keys 0 to i (top left). Not together with attn_mask.
        scale: default 1 / sqrt(E).
        enable_gqa: key and value may have fewer heads, which divide those of query.

    Returns:
        [..., heads, L, Ev]. A query that sees no key gives 0.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            refuse_type(name, f"a {type(tensor).__name__}", "a torch tensor", "For other arrays: tilewise.attention.")
        if tensor.ndim < 2:
            refuse(name, f"shape {list(tensor.shape)}", "two axes or more, [..., length, dim]")
    causal: Any = "top_left" if is_causal else False
    if CausalBias is not None and isinstance(attn_mask, CausalBias):
        if is_causal:
            _refuse_both()
        causal = True if attn_mask.variant == CausalVariant.LOWER_RIGHT else "top_left"
        attn_mask = None
    if attn_mask is not None and is_causal:
        _refuse_both()
    rank = max(query.ndim, key.ndim, value.ndim)
    lead, query, key, value = _four_axes(query, key, value, enable_gqa)
    options: dict[str, Any] = {"layout": "bhsd", "causal": causal, "softmax_scale": scale}
    if attn_mask is not None:
        array = _mask_of_four_axes(attn_mask, rank, lead, (query.shape[1], query.shape[2], key.shape[2]))
        options["bias" if array.is_floating_point() else "mask"] = array
    if dropout_p == 1:  # PyTorch allows it: nothing is kept
        o = attention(query, key, value, **options) * 0.0
    else:
        o = attention(query, key, value, dropout_p=dropout_p, **options)
    if rank == 4:
        return o
    return o.reshape(o.shape[2:] if rank == 2 else (o.shape[0], *o.shape[2:]) if rank == 3 else (*lead, *o.shape[1:]))


def _refuse_both() -> NoReturn:
    refuse(
        "attn_mask, is_causal",
        "both",
        "one of the two",
        "Join attn_mask with torch.ones(L, S, dtype=torch.bool).tril(), or call tilewise.attention(causal=..., mask=...).",
    )


def _four_axes(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[tuple[int, ...], Any, Any, Any]:
    """The axes in front of heads, and the three as [batch, heads, length, dim] without copying what need not be."""
    rank = max(query.ndim, key.ndim, value.ndim)
    three = []
    for x in (query, key, value):
        if x.ndim < rank:
            x = x.reshape((1,) * (rank - x.ndim) + tuple(x.shape))
        three.append(x.reshape(1, 1, *x.shape) if rank == 2 else x.unsqueeze(1) if rank == 3 else x)
    query, key, value = three
    try:
        lead = tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        refuse(
            "query, key, value",
            f"shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)}",
            "axes in front of [heads, length, dim] that broadcast",
        )
    heads, heads_k, heads_v = query.shape[-3], key.shape[-3], value.shape[-3]
    if enable_gqa:
        if not heads_k or not heads_v or heads % heads_k or heads % heads_v:
            if not (heads == heads_k == heads_v == 0):
                refuse(
                    "query, key, value",
                    f"{heads}, {heads_k} and {heads_v} heads",
                    "heads of key and of value that divide those of query",
                )
        elif heads_k != heads_v:
            key = key.repeat_interleave(heads // heads_k, -3)
            value = value.repeat_interleave(heads // heads_v, -3)
    elif not heads == heads_k == heads_v:
        try:
            heads = torch.broadcast_shapes((heads,), (heads_k,), (heads_v,))[0]
        except RuntimeError:
            refuse(
                "query, key, value",
                f"{heads}, {heads_k} and {heads_v} heads",
                "as many in all three, or 1",
                "Grouped heads need enable_gqa=True.",
            )
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
        if not heads_k == heads_v == 1:  # one head for all is the kernels' own way
            key = key.expand(*key.shape[:-3], heads, *key.shape[-2:])
            value = value.expand(*value.shape[:-3], heads, *value.shape[-2:])
    flat = []
    for x in (query, key, value):
        if tuple(x.shape[:-3]) != lead:
            x = x.expand(*lead, *x.shape[-3:])
        flat.append(x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-3:]))
    return lead, *flat


def _mask_of_four_axes(mask: Any, rank: int, lead: Sequence[int], last: tuple[int, int, int]) -> Any:
    """attn_mask as a tensor that broadcasts to [batch, heads, L, S]."""
    if not isinstance(mask, torch.Tensor):
        refuse_type("attn_mask", f"a {type(mask).__name__}", "a torch tensor, bool or float, or None")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        refuse("attn_mask", f"dtype {mask.dtype}", "bool (true = attend) or a float dtype (added to the scores)")
    heads, length_q, length_kv = last
    full = (*lead, heads, length_q, length_kv) if rank >= 4 else (*lead, length_q, length_kv)[-rank:]
    try:
        fits = torch.broadcast_shapes(mask.shape, full) == torch.Size(full)
    except RuntimeError:
        fits = False
    if not fits:
        refuse("attn_mask", f"shape {list(mask.shape)}", f"what broadcasts to {list(full)}")
    if rank == 3 and mask.ndim == 3:
        return mask.unsqueeze(1)
    if len(lead) == 1 or mask.ndim < 4:
        return mask
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + tuple(mask.shape))
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(math.prod(lead), *mask.shape[-3:])


# ------------------------------------------------------------------------------------------------ the context


class routed(TorchFunctionMode):
    """A context in which torch.nn.functional.scaled_dot_product_attention is computed by Tilewise.

        with tilewise.sdpa.routed() as route:
            model(x).sum().backward()
        print(route.taken, route.declined)

    It is there for calls of every library and every thread, by the name in torch.nn.functional; in the thread that enters
    it, by whatever name.
    What Tilewise declines goes to PyTorch: the logger "tilewise.sdpa" says why, as a warning the first time that a
    reason comes up in this context, at level DEBUG later. With strict=True it is an error instead.

    Attributes:
        taken: number of calls that Tilewise computed, those in compiled code left out.
        declined: number of the others, by reason.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict
        self.taken = 0
        self.declined: Counter[str] = Counter()
        self._thread = 0
        self._without_modes = 0  # how deep in functions that torch runs with the mode put aside

    def __enter__(self) -> routed:
        super().__enter__()
        if torch.compiler.is_compiling():  # a compiler runs the context itself
            return self
        self._thread = threading.get_ident()
        with _lock:
            _routes.append(self)
            torch.nn.functional.scaled_dot_product_attention = _by_name
        return self

    def __exit__(self, *error: Any) -> None:
        if not torch.compiler.is_compiling():
            with _lock:
                _routes.remove(self)
                if not _routes:
                    torch.nn.functional.scaled_dot_product_attention = _pytorchs
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _pytorchs:
            return self._call(*args, **kwargs)
        if function not in _CALLERS:
            return function(*args, **kwargs)
        self._without_modes += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._without_modes -= 1

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        reason = _why_not(*args, **kwargs)
        if not reason:
            try:
                o = scaled_dot_product_attention(*args, **kwargs)
            except Error as error:
                if self.strict:
                    raise
                reason = str(error)
            else:
                if not torch.compiler.is_compiling():
                    self.taken += 1
                return o
        if self.strict:
            raise UnsupportedError(f"scaled_dot_product_attention under routed(strict=True): {reason}")
        if torch.compiler.is_compiling():  # a graph has no room for words
            return _pytorchs(*args, **kwargs)
        _log.log(logging.DEBUG if self.declined[reason] else logging.WARNING, "left to PyTorch: %s", reason)
        self.declined[reason] += 1
        return _pytorchs(*args, **kwargs)


_lock: Final = threading.Lock()
_routes: Final[list[routed]] = []


def _by_name(*args: Any, **kwargs: Any) -> Any:
    """What stands under the function's name in torch.nn.functional while there are routes."""
    route = _routes[-1] if _routes else None
    if route is None:
        return _pytorchs(*args, **kwargs)
    if route._without_modes or not (torch.compiler.is_compiling() or threading.get_ident() == route._thread):
        return route._call(*args, **kwargs)
    return _pytorchs(*args, **kwargs)  # the mode sees it


def _why_not(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    *_: Any,
    **__: Any,
) -> str:
    """Why a call is PyTorch's, as far as tilewise.attention would not say so itself; "" if there is no reason."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x is None and name == "attn_mask":
            continue
        if not isinstance(x, torch.Tensor):
            return message(name, f"a {type(x).__name__}", "a torch tensor")
        if name == "attn_mask" and CausalBias is not None and isinstance(x, CausalBias):
            continue
        if x.is_nested or x.layout != torch.strided:
            return message(name, "a nested or sparse tensor", "dense tensors", "tilewise.attention takes cu_seqlens.")
        if not torch.compiler.is_compiling() and _has_ways_of_its_own(type(x)):
            return message(name, f"a {type(x).__name__}, a tensor with ways of its own", "plain tensors")
    if query.device.type not in ("cpu", "cuda", "meta"):
        return message("query", f"device {query.device}", "cpu or cuda")
    if query.dtype not in _DTYPES:
        return message(
            "query", f"dtype {query.dtype}", ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        )
    if torch.autograd.forward_ad._current_level >= 0:
        return message("forward-mode AD", "an active level", "reverse mode")
    if torch.jit.is_tracing():
        return message("torch.jit.trace", "an active trace", "eager calls, torch.compile and torch.export")
    return ""


def _has_ways_of_its_own(kind: type) -> bool:
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__ and kind.__name__ not in ("FakeTensor", "FunctionalTensor")


# ------------------------------------------------------------------------------- PyTorch's registry of flash kernels


def register_flash(name: str = "tilewise") -> None:
    """Makes Tilewise known to torch.nn.attention.activate_flash_attention_impl(name).

    Once active, PyTorch's own flash operators on CUDA are Tilewise's: those that its SDPA, varlen_attn and context
    parallelism use. restore_flash_attention_impl() takes them back. Registering activates nothing.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise UnsupportedError(
            message(
                "register_flash()",
                f"torch {torch.__version__}, which has no registry of flash implementations",
                "a torch with torch.nn.attention.register_flash_attention_impl",
                "tilewise.sdpa.routed() needs none.",
            )
        ) from None
    register_flash_attention_impl(name, register_fn=_Operators)


class _Operators:
    """The operators, in force as long as this object is. What `activate_flash_attention_impl` keeps."""

    _lock = threading.Lock()

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        # Without it torch warns that a kernel of its own has a successor, which is the point.
        quiet = {"allow_override": True} if "allow_override" in signature(self._library.impl).parameters else {}
        for operator, function in (
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_backward", _flash_backward),
            ("_scaled_dot_product_flash_attention", _sdpa_flash_forward),
            ("_scaled_dot_product_flash_attention_backward", _sdpa_flash_backward),
        ):
            self._library.impl(operator, function, dispatch_key, **quiet)

    def remove(self) -> None:
        with self._lock:
            if self._library is not None:
                self._library._destroy()
                self._library = None


def _refuse_extras(**extras: Any) -> None:
    for name, value in extras.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                message(
                    name,
                    f"a {type(value).__name__}",
                    "None",
                    "Under the flash implementation 'tilewise' this operator does not take it: call tilewise.attention, "
                    "or torch.nn.attention.restore_flash_attention_impl() first.",
                )
            )


def _window(left: Any, right: Any) -> tuple[int, int]:
    return -1 if left is None else int(left), -1 if right is None else int(right)


def _flash_options(
    cum_seq_q: Any, cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"dropout_p": dropout_p, "causal": bool(is_causal), "softmax_scale": scale}
    if cum_seq_q is not None and cum_seq_q.numel():
        options |= {
            "cu_seqlens_q": cum_seq_q, "cu_seqlens_kv": cum_seq_k, "max_seqlen_q": int(max_q), "max_seqlen_kv": int(max_k),
        }  # fmt: skip
    return options


def _rng_out(rng: Any, like: Any) -> tuple[Any, Any]:
    """(rng_state, unused) as the operators return them: uint64[2] and a number."""
    if rng is None:
        rng = torch.zeros(2, dtype=torch.int64, device=like.device)
    return rng.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=like.device)


@own_names
def _flash_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: Any = None,
    window_size_right: Any = None, seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None, out: Any = None,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """aten::_flash_attention_forward: [batch, length, heads, dim], or packed with cum_seq_*; bottom-right causal."""
    del num_splits  # a hint
    _refuse_extras(return_debug_mask=return_debug_mask, block_table=block_table)
    options = _flash_options(cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
    options |= {
        "window": _window(window_size_left, window_size_right),
        "alibi_slopes": alibi_slopes,
        "seqused_kv": seqused_k,
    }
    o, lse, rng = attention_forward(query, key, value, out=out, **options)
    return o, lse, *_rng_out(rng, query), query.new_empty(0)


@own_names
def _flash_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *,
    scale: float | None = None, window_size_left: Any = None, window_size_right: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    options = _flash_options(cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
    options["window"] = _window(window_size_left, window_size_right)
    rng = rng_state.view(torch.int64) if dropout_p else None
    g = attention_backward(grad_out, query, key, value, out, logsumexp, rng=rng, wanted=("q", "k", "v"), **options)
    return g.dq, g.dk, g.dv


@own_names
def _sdpa_flash_forward(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention: [batch, heads, length, dim]; lengths are equal where it is causal."""
    _refuse_extras(return_debug_mask=return_debug_mask)
    options = _flash_options(None, None, 0, 0, dropout_p, is_causal, scale)
    o, lse, rng = attention_forward(query, key, value, layout="bhsd", **options)
    nothing = torch.empty(0, dtype=torch.int32, device=query.device)
    return o, lse, nothing, nothing.clone(), query.shape[2], key.shape[2], *_rng_out(rng, query), query.new_empty(0)


@own_names
def _sdpa_flash_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    options = _flash_options(None, None, 0, 0, dropout_p, is_causal, scale)
    rng = philox_seed.view(torch.int64) if dropout_p else None
    g = attention_backward(
        grad_out, query, key, value, out, logsumexp, layout="bhsd", rng=rng, wanted=("q", "k", "v"), **options
    )
    return g.dq, g.dk, g.dv
