"""The formula in torch's own operations: for derivatives of any order, in reverse and in forward mode.

Nothing is tiled here: all scores are in memory at once. What a mask shows, which rows exist and what dropout keeps is
not computed a second time but asked of the operator `tilewise::attention_forward`: with scores of 0 and the unit matrix
in place of v, o is the probabilities, and not 0 where a key is visible (and kept).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack

import torch

from . import _ext
from ._arrays import traced
from ._attention import attention, rng_of
from ._errors import InvalidArgumentError, refuse_type
from ._problem import (
    BIAS,
    CU_KV,
    CU_Q,
    LEFTPAD,
    Q_OFFSET,
    SINKS,
    SLOPES,
    USED_KV,
    USED_Q,
    Call,
    K,
    Options,
    Q,
    V,
    call_from,
    renamed,
)  # fmt: skip
from ._trace import BOOLEAN, INTEGER, REAL, Function, Node

# What scores are made of: of no interest to the question which of them count.
_SCORES: Final = ("softmax_scale", "softcap", "bias", "alibi_slopes", "score_mod", "sinks", "backend", "layout")


def composite(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """`tilewise.attention` in torch's operations: differentiable any number of times, backward and forward mode.

    Exact, with every option, but slow, and with memory for all scores ([batch, num_heads_q, seqlen_q, seqlen_kv], for
    packed sequences [num_heads_q, total_q, total_kv]) several times over: for short sequences and small tests. Works with
    torch.func, torch.vmap and torch.compile.

    Args:
        q, k, v, options: as `tilewise.attention`, torch tensors only. `backend` is not looked at.
        return_lse: return (o, lse).

    Returns:
        o of the dtype of q, or (o, lse). Computed in float32, for float64 in float64.

    Raises:
        As `tilewise.attention`; ArgumentTypeError for arrays that are no tensors.

    Where `tilewise.attention` ignores values, here torch's rules hold: a NaN or infinity of a visible key reaches the
    rows of its head that do not see it, and a score_mod whose derivative is not finite where its value is not used
    (the other branch of where, hidden keys) gives NaN.
    """
    if not isinstance(q, torch.Tensor):
        refuse_type("q", f"a {type(q).__name__}", "a torch.Tensor", "torch.from_numpy(x) makes one without a copy.")
    from .torch_ops import autocast

    function = options.get("score_mod")
    if function is not None and not isinstance(function, Function):
        function = options["score_mod"] = Function("score_mod", function, {})
    call = call_from("composite", *autocast(q, k, v), options, meta=True)
    if not traced():
        try:
            _ext.Plan(call.problem(data=False), False)  # refuses what tilewise.attention does
        except InvalidArgumentError as error:
            renamed(call.settings, error)
    s, arrays = call.settings, [None if x is None else torch.as_tensor(x) for x in call.arrays]
    q, k, v = arrays[Q], arrays[K], arrays[V]
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    if s.layout:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible, kept, exists = _seen(call, options, q, k)

    packed = q.ndim == 3
    shapes = tuple(q.shape), tuple(k.shape)
    q, k, v = (x.flatten(0, 1)[None] if packed and x.ndim == 4 else x[None] if packed else x for x in (q, k, v))
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q, k, v))  # [batch, heads, tokens, dim]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    # Padding may hold anything, NaN included.
    q = torch.where(visible.any(-1, keepdim=True), q, 0.0)
    k, v = (torch.where(visible.any(-2).unsqueeze(-1), x, 0.0) for x in (k, v))

    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if s.softmax_scale is None else s.softmax_scale
    x = scale * (q @ k.transpose(-1, -2))
    if s.softcap > 0:
        x = s.softcap * torch.tanh(x / s.softcap)
    if function is not None or arrays[BIAS] is not None or arrays[SLOPES] is not None:
        x = _modified(x, call, arrays, function, shapes)
    x = torch.where(visible, x, -math.inf)

    # The largest is a constant here: its derivative cancels.
    largest = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -math.inf)
    sinks = None if (given := arrays[SINKS]) is None else given.to(wide)[:, None, None]
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach())
    largest = torch.where(largest == -math.inf, 0.0, largest)
    p = torch.exp(x - largest)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    p = p / total
    if kept is not None:
        p = torch.where(kept, p * (65536 / (65536 - round(65536 * s.dropout_p))), 0.0)
    o = torch.where(exists, p @ v, 0.0).to(dtype)
    lse = torch.where(exists & ~empty, largest + torch.log(total), -math.inf).squeeze(-1)
    if packed:
        o, lse = o[0].transpose(0, 1), lse[0]
    elif not s.layout:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _seen(call: Call, options: Mapping[str, Any], q: Any, k: Any) -> tuple[Any, Any, Any]:
    """Bool [batch, heads, rows, keys] twice, visible and kept by dropout (None without), and [batch, heads, rows, 1],
    whether a row exists; batch is 1 for packed sequences. q and k, with tokens before heads, lend their shapes."""
    like: Any = {"device": q.device, "dtype": torch.float32}
    keys = math.prod(k.shape[:-2]) if q.ndim == 3 else k.shape[1]
    unit = torch.eye(keys, **like)
    unit = unit.view(*k.shape[:-2], 1, keys) if q.ndim == 3 else unit[:, None].expand(k.shape[0], keys, 1, keys)
    rest = {name: value for name, value in options.items() if name not in _SCORES}
    # A row that exists and sees nothing has the lse of its sink.
    rest |= {"dropout_p": 0.0, "seed": None, "sinks": torch.zeros(q.shape[-2], **like)}
    zeros, zeros_k = (torch.zeros((*x.shape[:-1], 1), **like) for x in (q, k))
    unit = unit.expand(*k.shape[:-1], keys)
    o, lse = attention(zeros, zeros_k, unit, return_lse=True, **rest)
    kept = None
    if call.settings.dropout_p:
        rest |= {"dropout_p": call.settings.dropout_p, "seed": rng_of(call)}
        kept = attention(zeros, zeros_k, unit, **rest).movedim(-2, -3 if q.ndim == 4 else 0) > 0
    visible, exists = o.movedim(-2, -3 if q.ndim == 4 else 0) > 0, (lse > -math.inf).unsqueeze(-1)
    if q.ndim == 3:
        return visible[None], None if kept is None else kept[None], exists[None]
    return visible, kept, exists


def _modified(
    x: Any, call: Call, arrays: list[Any], function: Function | None, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Any:
    """x [batch, heads, rows, keys] with bias, ALiBi and score_mod. `shapes` of q and k, with tokens before heads."""
    s = call.settings
    (b, i, rows), (_, j, keys) = (
        _tokens(shape, arrays[cu], arrays[used], arrays[pad] if pad else None, x.device)
        for shape, cu, used, pad in zip(shapes, (CU_Q, CU_KV), (USED_Q, USED_KV), (0, LEFTPAD), strict=True)
    )
    if s.q_offset_mode == 0:  # bottom right
        offset = keys - rows
    elif arrays[Q_OFFSET] is not None:
        offset = arrays[Q_OFFSET].to(torch.int32)
    else:
        offset = torch.full_like(rows, s.q_offset_value)
    if x.shape[0] == 1 and len(shapes[0]) == 3:
        b, i, j = b.flatten()[None, None, :, None], i.flatten()[None, None, :, None], j.flatten()[None, None, None]
    else:
        b, i, j = b[:, None, :1, None], i[:, None, :, None], j[:, None, None]
    h = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)[:, None, None]
    if (bias := arrays[BIAS]) is not None:
        bias = bias.view(*[1] * (4 - bias.ndim), *bias.shape)
        places = [n.clamp(0, size - 1).long() for n, size in zip((b, h, i, j), bias.shape, strict=True)]
        x = x + bias[tuple(places)].to(x.dtype)
    if (slopes := arrays[SLOPES]) is not None:
        slope = slopes[h.long()] if slopes.ndim == 1 else slopes[b.long(), h.long()]
        x = x - slope.to(x.dtype) * (i + offset[b.long()] - j).abs()
    if function is not None:
        known = {"x": x, "b": b, "h": h, "i": i, "j": j, "head_kv": h // (shapes[0][-2] // shapes[1][-2])}
        known |= {"seqlen_q": rows[b.long()], "seqlen_kv": keys[b.long()], "q_offset": offset[b.long()]}
        x = _evaluate(function, known)
    return x


def _tokens(shape: Any, cu: Any, used: Any, pad: Any, device: Any) -> tuple[Any, Any, Any]:
    """int32: for every token the number of its sequence and its place there, [batch, tokens] or packed [total], and the
    length of every sequence, [batch]."""
    total = shape[0] if cu is not None else shape[1]
    token = torch.arange(total, dtype=torch.int32, device=device)
    if cu is None:
        b = torch.arange(shape[0], dtype=torch.int32, device=device)[:, None].expand(-1, total)
        token = token.expand(shape[0], -1)
        length = torch.full((shape[0],), total, dtype=torch.int32, device=device)
    else:
        cu = cu.to(torch.int32)
        b = torch.searchsorted(cu[1:], token, right=True).clamp(max=len(cu) - 2).to(torch.int32)
        token = token - cu[b.long()]
        length = cu.diff()
    if used is not None:
        length = used.to(torch.int32)
    if pad is not None:
        pad = pad.to(torch.int32)
        token = token - pad[b.long()]
        length = (length - pad).clamp(min=0)
    return b, token, length


# ------------------------------------------------------------------------------------ expressions, see src/core/expr.hpp


def _evaluate(function: Function, known: Mapping[str, Any]) -> Any:
    """The value of a score_mod at tensors that broadcast."""
    x = known["x"]
    scalars, arrays = function.scalars, [torch.as_tensor(array) for _, array in function.arrays]
    values: dict[int, Any] = {}

    def number(value: Any, kind: int) -> Any:
        return torch.full((), value, dtype=(torch.bool, torch.int32, x.dtype)[kind], device=x.device)

    def leaf(node: Node) -> Any:
        if node.op in known:
            return known[node.op]
        if node.op == "$":
            assert node.ref is not None
            return number(scalars[node.ref] if node.kind == REAL else int(scalars[node.ref]), node.kind)
        if node.kind == BOOLEAN:
            return number(node.op == "true", BOOLEAN)
        return number(int(node.op) if node.kind == INTEGER else float(node.op), node.kind)

    def value(node: Node) -> Any:
        found = values.get(id(node))
        if found is None:
            if not node.args:
                found = leaf(node)
            elif node.op == "gather":
                assert node.ref is not None
                found = _gather(arrays[node.ref], [value(each) for each in node.args], x.dtype)
            else:
                found = OPERATIONS[node.op](*_widened(node, [value(each) for each in node.args], x.dtype))
            values[id(node)] = found
        return found

    return value(function.expression.root).to(x.dtype)


def _widened(node: Node, operands: list[Any], real: Any) -> list[Any]:
    """Operands in the kind of the operation: bool to integer to real."""
    kind = max(each.kind for each in (node.args[1:] if node.op == "where" else node.args))
    if node.op in REAL_OPERATIONS:
        kind = REAL
    elif node.op in ("where", "and", "or", "not", "eq", "ne"):
        pass
    else:
        kind = max(kind, INTEGER)
    dtype = (torch.bool, torch.int32, real)[kind]
    return [each if node.op == "where" and n == 0 else each.to(dtype) for n, each in enumerate(operands)]


def _gather(array: Any, places: list[Any], real: Any) -> Any:
    """0 or false, and no gradient, at a place outside of the array."""
    inside: Any = True
    for place, size in zip(places, array.shape, strict=True):
        inside = (place >= 0) & (place < size) & inside
    if 0 in array.shape:
        return torch.zeros_like(inside, dtype=array.dtype)
    # At least one axis each: an index without any would be read as a number, which a compiler cannot.
    places = [torch.atleast_1d(n.clamp(0, size - 1).long()) for n, size in zip(places, array.shape, strict=True)]
    found = array[tuple(places)]
    found = found.to(real) if array.is_floating_point() else found if array.dtype is torch.bool else found.int()
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))


def _floordiv(a: Any, b: Any) -> Any:
    if a.is_floating_point() or b.is_floating_point():
        return torch.floor(a / b)
    return torch.where(b == 0, 0, torch.div(a, torch.where(b == 0, 1, b), rounding_mode="floor"))


def _mod(a: Any, b: Any) -> Any:
    if a.is_floating_point() or b.is_floating_point():
        return torch.remainder(a, b)
    return torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b)))


REAL_OPERATIONS: Final = ("div", "exp", "log", "tanh", "sqrt", "float")
# Of equal operands the first is taken, with its derivative; torch.maximum would share it out.
OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": _floordiv, "mod": _mod,
    "min": lambda a, b: torch.where((a <= b) | (a != a), a, b), "max": lambda a, b: torch.where((a >= b) | (a != a), a, b),
    "neg": torch.neg, "abs": lambda a: torch.where(a < 0, -a, a), "exp": torch.exp, "log": torch.log, "tanh": torch.tanh,
    "sqrt": torch.sqrt, "float": lambda a: a, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "eq": torch.eq, "ne": torch.ne, "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": torch.where,
}  # fmt: skip
