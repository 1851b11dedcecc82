"""Standard attention in the dtype of a call, in torch: the yardstick of the accuracy rule (docs/formula.md).

What a user would write with plain matrix products: S = round(scale q k^T), P = round(softmax(S)), o = round(P v),
gradients likewise; products accumulate in float32 (float64 for float64), options between S and P are applied in that
dtype, and round() is to the dtype of q. It shares masks, dropout and torch's operations with the library, and nothing else. It takes the
rows of a call in blocks, so that no whole score matrix is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from . import _ext
from ._arrays import is_float, view
from ._attention import _output_shapes
from ._composite import OPERATIONS, REAL_OPERATIONS
from ._problem import (
    ARRAYS,
    BIAS,
    CU_KV,
    CU_Q,
    LEFTPAD,
    NAMES,
    Q_OFFSET,
    SINKS,
    SLOPES,
    USED_KV,
    USED_Q,
    K,
    Q,
    Settings,
    V,
)  # fmt: skip

Tensor = Any  # torch.Tensor, which the checker does not know
_BLOCK: Final = 2**22  # scores at a time
# Operations that take a truth for 0 or 1.
_WHOLE: Final = {"add", "sub", "mul", "min", "max", "floordiv", "mod", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"}


# ------------------------------------------------------------------------------------------------------- expressions


def _parsed(text: str) -> Any:
    """Text of an expression (grammar: src/core/expr.hpp) as nested tuples (op, args...); leaves are strings."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[^(),]+|[()]", text):
        if token == "(":
            stack.append([stack[-1].pop()])
        elif token == ")":
            done = tuple(stack.pop())
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    return stack[0][0]


class _Expression:
    def __init__(self, text: str, arrays: Sequence[Any], scalars: Sequence[float], dtype: torch.dtype) -> None:
        self.root = _parsed(text)
        self.arrays, self.scalars, self.dtype = arrays, scalars, dtype

    def __call__(self, variables: dict[str, Any]) -> Tensor:
        return self._value(self.root, variables)

    def _leaf(self, text: str, variables: dict[str, Any]) -> Tensor:
        if text in variables:
            return torch.as_tensor(variables[text])
        if text in ("true", "false"):
            return torch.tensor(text == "true")
        if text.startswith("$"):
            scalar = self.scalars[int(text[1:].rstrip("i"))]
            return torch.tensor(int(scalar)) if text.endswith("i") else torch.tensor(scalar, dtype=self.dtype)
        whole = re.fullmatch(r"-?\d+", text)
        return torch.tensor(int(text)) if whole else torch.tensor(float(text), dtype=self.dtype)

    def _value(self, node: Any, variables: dict[str, Any]) -> Tensor:
        if isinstance(node, str):
            return self._leaf(node, variables)
        op, *args = node
        if op == "gather":
            return self._gather(int(args[0][1:]), [self._value(each, variables) for each in args[1:]])
        values = [self._value(each, variables) for each in args]
        if op in _WHOLE:
            values = [each.long() if each.dtype == torch.bool else each for each in values]
        elif op in REAL_OPERATIONS:
            values = [each.to(self.dtype) for each in values]
        return OPERATIONS[op](*values)

    def _gather(self, number: int, indices: list[Tensor]) -> Tensor:
        array = self.arrays[number]
        inside = torch.tensor(True)
        for index, size in zip(indices, array.shape, strict=True):
            inside = inside & (index >= 0) & (index < size)
        if 0 in array.shape:
            return torch.zeros(inside.shape, dtype=array.dtype)
        near = [index.clamp(0, size - 1) for index, size in zip(indices, array.shape, strict=True)]
        return torch.where(inside, array[tuple(near)], torch.zeros((), dtype=array.dtype))


# --------------------------------------------------------------------------------------------------------- sequences


@dataclass
class _Sequence:
    b: int
    q0: int
    q_len: int
    kv0: int
    kv_len: int
    q_offset: int


def _sequences(settings: Settings, arrays: Sequence[Any]) -> list[_Sequence]:
    """Where the rows and keys of each sequence lie; docs/formula.md, packed sequences."""

    def numbers(place: int) -> list[int] | None:
        return None if arrays[place] is None else arrays[place].tolist()

    axis = 2 if settings.layout else 1
    cu_q, cu_kv, used_q, used_kv = (numbers(place) for place in (CU_Q, CU_KV, USED_Q, USED_KV))
    pad, offset = numbers(LEFTPAD), numbers(Q_OFFSET)
    found = []
    for b in range(len(cu_q) - 1 if cu_q else arrays[Q].shape[0]):
        q0, rows = (cu_q[b], cu_q[b + 1] - cu_q[b]) if cu_q else (0, arrays[Q].shape[axis])
        kv0, keys = (cu_kv[b], cu_kv[b + 1] - cu_kv[b]) if cu_kv else (0, arrays[K].shape[axis])
        rows = used_q[b] if used_q else rows
        keys = used_kv[b] if used_kv else keys
        skipped = pad[b] if pad else 0
        keys = max(keys - skipped, 0)
        mode = settings.q_offset_mode
        t = (keys - rows, 0, settings.q_offset_value, offset[b] if offset else 0)[mode]
        found.append(_Sequence(b, q0, rows, kv0 + skipped, keys, t))
    return found


# --------------------------------------------------------------------------------------------------------- attention


def standard_attention(
    settings: Settings,
    arrays: Sequence[Any],
    rng: tuple[int, int],
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    wanted: Sequence[int] = (),
) -> dict[str, Tensor]:
    """o and lse, and the gradients of the wanted places under "d" and their name. All tensors are on the CPU."""
    dtype = arrays[Q].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    packed_q, packed_kv = arrays[CU_Q] is not None, arrays[CU_KV] is not None

    def of_sequence(x: Tensor, b: int, packed: bool) -> Tensor:  # [heads, tokens, dim]
        return x.transpose(0, 1) if packed else x[b] if settings.layout else x[b].transpose(0, 1)

    big: list[Any] = [None if x is None else x.detach().to(wide) if is_float(x) else _plain(x) for x in arrays]
    leaves = {place: big[place].clone().requires_grad_() for place in wanted if place not in (Q, K, V, SINKS)}
    for place, leaf in leaves.items():
        big[place] = leaf
    o_shape, lse_shape = _output_shapes(settings, arrays)
    assert lse_shape is not None
    o, lse = torch.zeros(o_shape, dtype=dtype), torch.full(lse_shape, -math.inf, dtype=wide)
    sums = {place: torch.zeros_like(big[place]) for place in (Q, K, V, SINKS) if big[place] is not None}
    sequences = _sequences(settings, arrays)
    heads = arrays[Q].shape[1 if settings.layout and not packed_q else -2]
    heads_kv = arrays[K].shape[1 if settings.layout and not packed_kv else -2]
    group = heads // heads_kv if heads_kv else 1
    dim = arrays[Q].shape[-1]
    scale = settings.softmax_scale if settings.softmax_scale is not None else 1 / math.sqrt(dim) if dim else 1.0
    mod = None
    if settings.score_mod:
        mod = _Expression(settings.score_mod, big[ARRAYS:], settings.scalars, wide)
    most_rows = max((s.q_len for s in sequences), default=0)
    columns = max((s.kv_len for s in sequences), default=0)
    if not packed_kv:  # what a dense call has probabilities of
        columns = arrays[K].shape[2 if settings.layout else 1]
    keep = _kept(settings, rng, len(sequences), heads, most_rows, columns)
    keep_prob = 1 - math.floor(settings.dropout_p * 65536 + 0.5) / 65536
    per_row = max(1, len(sequences) * heads * columns)
    step = max(1, _BLOCK // per_row)
    sinks = big[SINKS].reshape(-1, 1) if big[SINKS] is not None else torch.full((1, 1), -math.inf, dtype=wide)
    for row0 in range(0, most_rows, step):
        visible = _visible(settings, arrays, len(sequences), heads, range(row0, min(row0 + step, most_rows)), columns)
        for s in sequences:
            rows = slice(row0, min(row0 + step, s.q_len))
            if rows.start >= rows.stop or not heads:
                continue
            places = slice(s.q0 + rows.start, s.q0 + rows.stop) if packed_q else rows
            keys = slice(s.kv0, s.kv0 + s.kv_len)
            q = of_sequence(big[Q], s.b, packed_q)[:, places]
            k = of_sequence(big[K], s.b, packed_kv)[:, keys].repeat_interleave(group, 0)
            v = of_sequence(big[V], s.b, packed_kv)[:, keys].repeat_interleave(group, 0)
            scores = rounded(q @ k.transpose(1, 2) * scale).requires_grad_(bool(wanted))
            i = torch.arange(rows.start, rows.stop)[:, None]
            j = torch.arange(s.kv_len)[None, :]
            h = torch.arange(heads)[:, None, None]
            x = scores
            if settings.softcap:
                x = settings.softcap * torch.tanh(x / settings.softcap)
            if big[BIAS] is not None:
                bias = big[BIAS].reshape((1,) * (4 - big[BIAS].ndim) + tuple(big[BIAS].shape))
                bias = bias[s.b if bias.shape[0] > 1 else 0]
                bias = bias[:, rows] if bias.shape[1] > 1 else bias
                x = x + (bias[:, :, : s.kv_len] if bias.shape[2] > 1 else bias)
            if big[SLOPES] is not None:
                slopes = big[SLOPES][s.b] if big[SLOPES].ndim == 2 else big[SLOPES]
                x = x - slopes.reshape(-1, 1, 1) * (i + s.q_offset - j).abs()
            if mod is not None:
                x = mod({
                    "x": x, "b": s.b, "h": h, "i": i, "j": j, "seqlen_q": s.q_len, "seqlen_kv": s.kv_len,
                    "q_offset": s.q_offset, "head_kv": h // group,
                }).to(wide).expand(scores.shape)  # fmt: skip
            sees = visible[s.b, :, : rows.stop - rows.start, : s.kv_len] & (x.detach() != -math.inf)
            seen = sees.any(1)[:, :, None]  # what is hidden may be NaN, and 0 times that is NaN
            k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
            with torch.no_grad():
                y = torch.where(sees, x, -math.inf)
                m = torch.maximum(y.amax(-1), sinks) if s.kv_len else sinks.expand(heads, rows.stop - rows.start)
                finite = torch.where(m == -math.inf, 0.0, m)
                weights = torch.exp(y - finite[:, :, None])
                total = weights.sum(-1) + torch.exp(sinks - finite)
                p = rounded(weights / torch.where(total == 0, 1.0, total)[:, :, None])
                row_lse = finite + torch.log(total)
                kept: Any = 1.0
                if keep is not None:
                    kept = keep[s.b, :, rows, : s.kv_len].to(wide) / keep_prob
                o_rows = (p * kept) @ v
                of_sequence(o, s.b, packed_q)[:, places] = o_rows.to(dtype)
                (lse[:, places] if packed_q else lse[s.b, :, rows])[...] = row_lse
            if not wanted:
                continue
            assert do is not None
            do_rows = of_sequence(do.to(wide), s.b, packed_q)[:, places]
            dp = rounded(do_rows @ v.transpose(1, 2)) * kept
            delta = (rounded(o_rows) * do_rows).sum(-1)
            slope = -delta
            if dlse is not None:
                slope = slope + (dlse[:, places] if packed_q else dlse[s.b, :, rows]).to(wide)
            dx = torch.where(sees, p * (dp + slope[:, :, None]), 0.0)
            if big[SINKS] is not None:
                share = torch.exp(sinks - torch.where(row_lse == -math.inf, 0.0, row_lse))
                sums[SINKS] += (share * slope).sum(-1)
            if x.requires_grad:
                x.backward(dx)
            ds = torch.zeros_like(dx) if scores.grad is None else rounded(torch.where(sees, scores.grad, 0.0))

            def to_kv(x: Tensor) -> Tensor:
                return x.view(heads_kv, group, *x.shape[1:]).sum(1)

            of_sequence(sums[Q], s.b, packed_q)[:, places] += ds @ k * scale
            of_sequence(sums[K], s.b, packed_kv)[:, keys] += to_kv(ds.transpose(1, 2) @ q) * scale
            of_sequence(sums[V], s.b, packed_kv)[:, keys] += to_kv((p * kept).transpose(1, 2) @ do_rows)
    results = {"o": o, "lse": lse}
    for place in wanted:
        gradient = sums[place] if place in sums else leaves[place].grad
        if gradient is None:
            gradient = torch.zeros_like(big[place])
        results["d" + name_of(settings, place)] = gradient.detach().to(arrays[place].dtype)
    return results


def name_of(settings: Settings, place: int) -> str:
    if place < ARRAYS:
        return NAMES[place]
    return settings.mod_names[place - ARRAYS - settings.first_mod_array] or f"array {place - ARRAYS}"


def _plain(x: Tensor) -> Tensor:
    return x.long() if x.dtype == torch.uint32 else x  # which torch can store, and hardly more


def most_keys(settings: Settings, arrays: Sequence[Any]) -> int:
    return max((s.kv_len for s in _sequences(settings, arrays)), default=0)


def _visible(settings: Settings, arrays: Sequence[Any], batch: int, heads: int, rows: range, keys: int) -> Tensor:
    """bool [batch, heads, rows, keys]: where a call with the same mask and no scores has probabilities."""
    masked = settings.on_host()
    masked.score_mod, masked.softcap, masked.dropout_p, masked.softmax_scale, masked.backend = "", 0.0, 0.0, 1.0, ""
    flat = [*arrays]
    for place in (Q, K, V):
        flat[place] = torch.zeros(1, dtype=torch.float32).expand(*arrays[place].shape[:-1], 1)
    flat[BIAS] = flat[SLOPES] = flat[SINKS] = None
    p = torch.empty(batch, heads, len(rows), keys, dtype=torch.float32)
    _ext.attn_probs(masked.problem(flat), None, [*rows], [*range(heads)], view(p))
    return p > 0


def _kept(settings: Settings, rng: tuple[int, int], *shape: int) -> Tensor | None:
    if not settings.dropout_p:
        return None
    keep = torch.empty(shape, dtype=torch.bool)
    _ext.dropout_mask(*rng, settings.dropout_p, view(keep))
    return keep
