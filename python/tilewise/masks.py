"""Masks as objects that say which keys a query sees, and compose: `causal() & documents(ids)`, `a | b`, `~a`.

A mask never becomes a seqlen_q x seqlen_kv array (unless it was given as one): the kernels skip whole tiles that it
hides, from summaries of its arrays made in one pass. Every positional rule uses the position t = i + q_offset of query
i; key j has position j. Arrays may be NumPy arrays or torch tensors (on the device of q) of any integer dtype (or bool
where a truth value is meant), with any strides; a heads axis may be 1, num_heads_kv or num_heads_q long. No value is
read on the host.

The same mask object can be used in many calls; its arrays are read anew in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from ._arrays import ANYWHERE, Array, as_array, compiling, device_of, is_array, is_float, on_gpu, stays
from ._errors import refuse, refuse_type
from ._trace import Function

__all__ = [
    "Mask", "blocks", "causal", "chunk", "dense", "documents", "intervals", "key_padding", "mod", "prefix", "prepare",
    "row_intervals", "tree", "window",
]  # fmt: skip


class Resolved:
    """A mask as the C ABI takes it: text, arrays "@k" with the names for messages, scalars "$k"."""

    __slots__ = ("arrays", "names", "on_host", "scalars", "text")

    def __init__(self) -> None:
        self.text = ""
        self.on_host = True  # all arrays
        self.arrays: list[Array] = []
        self.names: list[str] = []
        self.scalars: list[float] = []

    def array(self, name: str, array: Array) -> int:
        """Number of an array, the same for the same object."""
        for n, known in enumerate(self.arrays):
            if known is array:
                return n
        self.arrays.append(array)
        self.names.append(name)
        if on_gpu(array):
            self.on_host = False
        return len(self.arrays) - 1


class Mask:
    """A rule of visibility; made by the functions of `tilewise.masks`, joined by `&`, `|` and `~`."""

    __slots__ = ("_resolved",)

    def __init__(self) -> None:
        self._resolved: Resolved | None = None

    def __and__(self, other: Any) -> Mask:
        return _Joined("and", self, as_mask(other, "&"))

    def __rand__(self, other: Any) -> Mask:
        return _Joined("and", as_mask(other, "&"), self)

    def __or__(self, other: Any) -> Mask:
        return _Joined("or", self, as_mask(other, "|"))

    def __ror__(self, other: Any) -> Mask:
        return _Joined("or", as_mask(other, "|"), self)

    def __invert__(self) -> Mask:
        return _Joined("not", self)

    # `array & mask` must come here and not become an element-wise operation of the array.
    __array_ufunc__ = None

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        joined = {"and": "and", "bitwise_and": "and", "rand": "and", "or": "or", "bitwise_or": "or", "ror": "or"}
        if name in joined and len(args) == 2:
            # Reflected forms get their operands in reverse; order does not matter to & and |.
            return _Joined(joined[name], *[as_mask(arg, name) for arg in args])
        return NotImplemented

    def __bool__(self) -> NoReturn:
        refuse_type("mask", "a mask used as True or False", "& for and, | for or, ~ for not")

    def __repr__(self) -> str:
        resolved = self.resolve()
        text = resolved.text
        for n in reversed(range(len(resolved.names))):
            text = text.replace(f"@{n}", f"<{resolved.names[n]}>")
        return f"<tilewise mask {text}>"

    def resolve(self) -> Resolved:
        """Text and arrays; made at the first use and kept."""
        if self._resolved is not None:
            return self._resolved
        resolved = Resolved()
        resolved.text = self._emit(resolved)
        if not compiling():  # a traced tensor is nothing to keep
            self._resolved = resolved
        return resolved

    def _emit(self, resolved: Resolved) -> str:
        raise NotImplementedError


class _Joined(Mask):
    __slots__ = ("_op", "_parts")

    def __init__(self, op: str, *parts: Mask) -> None:
        super().__init__()
        self._op = op
        # and(and(a,b),c) is written and(a,b,c)
        self._parts: tuple[Mask, ...] = tuple(part for whole in parts for part in _flat(op, whole))

    def _emit(self, resolved: Resolved) -> str:
        return f"{self._op}({','.join(part._emit(resolved) for part in self._parts)})"


def _flat(op: str, mask: Mask) -> Iterator[Mask]:
    if op != "not" and isinstance(mask, _Joined) and mask._op == op:
        yield from mask._parts
    else:
        yield mask


class _Kind(Mask):
    """One kind of mask: its name and its arguments, which are numbers, words or (name, array)."""

    __slots__ = ("_args", "_name")

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__()
        self._name = name
        self._args = args

    def _emit(self, resolved: Resolved) -> str:
        texts = [f"@{resolved.array(*arg)}" if isinstance(arg, tuple) else str(arg) for arg in self._args]
        return f"{self._name}({','.join(texts)})"


class _Mod(Mask):
    __slots__ = ("_function",)

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def _emit(self, resolved: Resolved) -> str:
        function = self._function
        arrays = tuple([resolved.array(f"mask_mod's {name}", array) for name, array in function.arrays])
        first = len(resolved.scalars)
        resolved.scalars.extend(function.scalars)
        return f"mod({function.traceable_text(arrays, tuple(range(first, len(resolved.scalars))))})"


def as_mask(value: Any, argument: str = "mask") -> Mask:
    """A mask, or a bool or integer array as `dense`."""
    if isinstance(value, Mask):
        return value
    if is_array(value):
        return dense(value)
    if callable(value):
        refuse_type(
            argument, "a function", "a mask, or a bool array", "tilewise.masks.mod(f) makes a mask of a function."
        )
    return refuse_type(
        argument, f"a {type(value).__name__}", "a mask of tilewise.masks, joined by & | ~, or a bool array"
    )


def _int(value: Any, argument: str) -> int:
    if stays(value):
        refuse_type(
            argument, f"an array on device {device_of(value)}", "an int", "int(x) reads it, and waits for the device."
        )
    try:
        return operator.index(value)
    except TypeError:
        return refuse_type(argument, f"{value!r} ({type(value).__name__})", "an integer")


def _ints(value: Any, argument: str) -> tuple[str, Array]:
    """An array of integers or bools, with its name for messages."""
    array = as_array(value, argument, sequence=True, meta=True, device=ANYWHERE)
    if is_float(array):
        refuse(argument, f"dtype {array.dtype}", "integers or bool")
    return argument, array


def causal() -> Mask:
    """Key j is visible if j <= t."""
    return _Kind("causal")


def window(left: int, right: int) -> Mask:
    """Key j is visible if t - left <= j <= t + right; -1 = unbounded on that side. `window(w - 1, 0)` shows w keys."""
    return _Kind("window", _int(left, "window left"), _int(right, "window right"))


def chunk(size: int) -> Mask:
    """Key j is visible if j and t lie in the same chunk of `size` positions. Implies nothing about causal."""
    return _Kind("chunk", _int(size, "chunk"))


def key_padding(keep: Any) -> Mask:
    """bool or integer [batch, seqlen_kv], true = keep. Indexed by the physical row of the key, before leftpad_kv."""
    return _Kind("key_padding", _ints(keep, "key_padding"))


def documents(q_ids: Any, kv_ids: Any = None) -> Mask:
    """Query and key have the same document number, and it is not negative (negative = padding: sees nothing).

    Integer [batch, seqlen_q] and [batch, seqlen_kv], or [seqlen], or [batch, heads, seqlen]; packed [total] or [heads,
    total]. The numbers need not be sorted. kv_ids left out = q_ids.
    """
    ids = _ints(q_ids, "documents q_ids")
    return _Kind("documents", ids, ids if kv_ids is None else _ints(kv_ids, "documents kv_ids"))


def prefix(length: Any) -> Mask:
    """Key j is visible if j < length or j <= t: a prefix in both directions, the rest causal.

    length: int, or integer [batch] or [batch, heads]. Contains causal, so it is refused together with causal=True.
    """
    if isinstance(length, (list, tuple)) or is_array(length):
        if not isinstance(length, (list, tuple)) and length.ndim == 0 and not stays(length):
            return _Kind("prefix", _int(length, "prefix"))
        return _Kind("prefix", _ints(length, "prefix"))
    return _Kind("prefix", _int(length, "prefix"))


def intervals(startend_row_indices: Any, causal: bool) -> Mask:
    """FlashMask: for every key column, half-open ranges of query rows that do NOT see it (arXiv:2410.01359).

    int32 [batch, heads, seqlen_kv, C]; with causal=True, C = 1 hides rows [start, end of sequence) and C = 2 rows
    [start, end), beside those before the diagonal; with causal=False, C = 2 hides [start, ...) and [0, end), C = 4 two
    ranges.
    """
    if not isinstance(causal, (bool, np.bool_)):
        refuse_type("intervals causal", repr(causal), "True or False")
    return _Kind("intervals", _ints(startend_row_indices, "startend_row_indices"), "causal" if causal else "full")


def row_intervals(start: Any, end: Any) -> Mask:
    """Query i sees keys start[i] <= j < end[i]. Integer [batch, seqlen_q] or [batch, heads, seqlen_q]; packed [total]
    or [heads, total]."""
    return _Kind("row_intervals", _ints(start, "row_intervals start"), _ints(end, "row_intervals end"))


def tree(bits: Any, n: Any) -> Mask:
    """Speculative decoding: every key before the last n is visible; of those n, key c if bit (i, c) is set.

    bits: uint32 (or int32) words, [batch, seqlen_q, ceil(n / 32)], bit c at bit c % 32 of word c // 32. n: int, or
    integer [batch].
    """
    if isinstance(n, (list, tuple, np.ndarray)) or (is_array(n) and n.ndim > 0):
        return _Kind("tree", _ints(bits, "tree bits"), _ints(n, "tree n"))
    return _Kind("tree", _ints(bits, "tree bits"), _int(n, "tree n"))


def blocks(map: Any, block_q: int, block_kv: int) -> Mask:
    """Query i sees key j if map[i // block_q, j // block_kv] is not 0.

    bool or integer [batch, heads, ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)], or without the first axes.
    """
    return _Kind("blocks", _ints(map, "blocks map"), _int(block_q, "block_q"), _int(block_kv, "block_kv"))


def dense(array: Any) -> Mask:
    """True = visible. bool or integer, anything that broadcasts to [batch, heads, seqlen_q, seqlen_kv]."""
    array = as_array(array, "mask", meta=True, device=ANYWHERE)
    if is_float(array):
        refuse(
            "mask",
            f"dtype {array.dtype}",
            "bool or integers (true = visible)",
            "An additive float mask goes in as bias=.",
        )
    return _Kind("dense", ("mask", array))


def mod(function: Callable[..., Any], **captured: Any) -> Mask:
    """A mask from a function `f(b, h, i, j, s) -> bool`, true = visible.

    The function is called once, with traced values in place of the integers b, h, i, j; it becomes an expression that
    runs in the kernels (see `tilewise.ops` for what it may use). `s` has `seqlen_q`, `seqlen_kv`, `q_offset`,
    `head_kv`, and what is captured by keyword: numbers, which are run-time values, and arrays, read as
    `s.table[h, i - j]`; an index out of range gives 0 or False.

        window = tilewise.masks.mod(lambda b, h, i, j, s: i + s.q_offset - j < s.width, width=1024)
    """
    if isinstance(function, Function):
        if function.role != "mask_mod" or captured:
            refuse_type(
                "mask_mod",
                "a score_mod" if function.role != "mask_mod" else "captured objects once more",
                "a function f(b, h, i, j, s) -> bool",
            )
        return _Mod(function)
    return _Mod(Function("mask_mod", function, captured))


def prepare(mask: Any) -> Mask:
    """Does once what a call would do with the mask's Python side; for a mask that many layers of a step share."""
    prepared = as_mask(mask)
    prepared.resolve()
    return prepared
