"""From a mask function of Transformers, f(batch, head, query, key) -> bool, to the rule that Tilewise knows it by.

The function is called once, on stand-ins that record what it does. What is recorded is a tree; bands (causal, windows),
chunks, documents and padding in it become the masks of those names, and anything else an expression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from . import masks
from ._errors import Error
from ._trace import Node
from .masks import Mask


class NotTraceable(Exception):
    """The function does something that has no name here."""


@dataclass(frozen=True)
class Rule:
    """Query at position t sees key j: t - left <= j <= t + right (None = no bound), and the mask."""

    left: int | None = None
    right: int | None = None
    mask: Mask | None = None

    def and_mask(self, mask: Mask) -> Rule:
        return replace(self, mask=mask if self.mask is None else self.mask & mask)

    def to(self, device: Any) -> Rule:
        return replace(self, mask=None if self.mask is None else moved(self.mask, device))


def moved(mask: Mask, device: Any) -> Mask:
    """The same mask with its arrays on another device."""
    if isinstance(mask, masks._Joined):
        return masks._Joined(mask._op, *[moved(part, device) for part in mask._parts])
    if isinstance(mask, masks._Kind):
        args = [(arg[0], arg[1].to(device)) if isinstance(arg, tuple) else arg for arg in mask._args]
        return masks._Kind(mask._name, *args)
    if isinstance(mask, masks._Mod):
        import copy

        function = copy.copy(mask._function)
        function.arrays = tuple((name, array.to(device)) for name, array in function.arrays)
        function.on_host = torch.device(device).type == "cpu"
        return masks._Mod(function)
    return mask


# ------------------------------------------------------------------------------------------------------ recording


_BINARY: Final = ("add", "sub", "mul", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "or")


class Symbol:
    """A recorded value. `op` is "q", "kv", "b", "const" (args: the value), "gather" (args: tensor, *indices), or an
    operation on Symbols."""

    __slots__ = ("args", "op")
    device = torch.device("cpu")  # a tensor moved to it meets this value as a number

    def __init__(self, op: str, *args: Any) -> None:
        self.op = op
        self.args = args

    # What mask functions of Transformers ask of their indices besides operators.
    def new_ones(self, *_: Any, **__: Any) -> Symbol:
        return TRUE

    def new_zeros(self, *_: Any, **__: Any) -> Symbol:
        return FALSE

    def to(self, *_: Any, **__: Any) -> Symbol:
        return self

    def __add__(self, other: Any) -> Symbol:
        return _apply("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return _apply("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return _apply("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return _apply("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return _apply("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return _apply("mul", other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return _apply("floordiv", self, other)

    def __mod__(self, other: Any) -> Symbol:
        return _apply("mod", self, other)

    def __neg__(self) -> Symbol:
        return _apply("sub", 0, self)

    def __abs__(self) -> Symbol:
        return Symbol("abs", self)

    abs = __abs__

    def __lt__(self, other: Any) -> Symbol:
        return _apply("lt", self, other)

    def __le__(self, other: Any) -> Symbol:
        return _apply("le", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return _apply("gt", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return _apply("ge", self, other)

    def __eq__(self, other: Any) -> Symbol:  # type: ignore[override]
        return _apply("eq", self, other)

    def __ne__(self, other: Any) -> Symbol:  # type: ignore[override]
        return _apply("ne", self, other)

    __hash__ = object.__hash__

    def __and__(self, other: Any) -> Symbol:
        return _logic("and", self, other)

    def __rand__(self, other: Any) -> Symbol:
        return _logic("and", other, self)

    def __or__(self, other: Any) -> Symbol:
        return _logic("or", self, other)

    def __ror__(self, other: Any) -> Symbol:
        return _logic("or", other, self)

    def __invert__(self) -> Symbol:
        if self.op == "const":
            return FALSE if self.args[0] else TRUE
        return Symbol("not", self)

    def __bool__(self) -> NoReturn:
        raise NotTraceable("it asks for the truth of a comparison (`if`, `and`, `or`)")

    def __index__(self) -> NoReturn:
        raise NotTraceable("it uses an index as a number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a compiler that looks at the object
            raise AttributeError(name)
        raise NotTraceable(f"it uses .{name} of an index")

    def _truth(self) -> Symbol:
        return self if self.op != "gather" or self.args[0].dtype == torch.bool else _apply("ne", self, 0)

    bool = _truth

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        known = {"logical_and": "and", "bitwise_and": "and", "logical_or": "or", "bitwise_or": "or"}
        if not options and len(args) == 2 and (known.get(name, name) in _BINARY or name in ("rand", "ror")):
            op = {"rand": "and", "ror": "or"}.get(name, known.get(name, name))
            return _logic(op, *args) if op in ("and", "or") else _apply(op, *args)
        if name in ("logical_not", "bitwise_not", "invert") and len(args) == 1:
            return ~args[0]
        if name in ("abs", "absolute") and len(args) == 1:
            return abs(args[0])
        raise NotTraceable(f"it calls torch's {name} on an index")


TRUE: Final = Symbol("const", True)
FALSE: Final = Symbol("const", False)


def _symbol(value: Any) -> Symbol:
    if isinstance(value, Symbol):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            raise NotTraceable("it computes with a tensor that it does not index")
        value = value.item()
    if not isinstance(value, (bool, int)):
        raise NotTraceable(f"it computes with a {type(value).__name__}")
    return Symbol("const", value)


def _apply(op: str, a: Any, b: Any) -> Symbol:
    return Symbol(op, _symbol(a), _symbol(b))


def _logic(op: str, a: Any, b: Any) -> Symbol:
    a, b = _symbol(a), _symbol(b)
    neutral = op == "and"
    for one, other in ((a, b), (b, a)):
        if one.op == "const":
            return other if bool(one.args[0]) == neutral else (FALSE if neutral else TRUE)
    return Symbol(op, a, b)


class _Recording(TorchFunctionMode):
    """Sees tensors that are indexed with Symbols, which nobody else would be asked about."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__getitem__" and len(args) == 2:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, Symbol) for each in index):
                if len(index) != args[0].ndim:
                    raise NotTraceable("it takes slices of a tensor")
                return Symbol("gather", args[0], *map(_symbol, index))
        return function(*args, **(options or {}))


# ------------------------------------------------------------------------------------------------------ recognising


class _Frame:
    """Where indices of a mask function lie: key j of the call is kv_offset + j there, query i is q_offset + i."""

    def __init__(self, batch: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: int) -> None:
        self.batch = batch
        self.length = {"q": q_length, "kv": kv_length}
        self.offset = {"q": q_offset, "kv": kv_offset}

    def rows(self, table: Any, side: str) -> Any:
        """[batch, length] of a table [batch, tokens] for the queries or the keys of the call."""
        offset, length = self.offset[side], self.length[side]
        if table.shape[0] not in (1, self.batch):
            raise NotTraceable(f"it reads a table of {table.shape[0]} rows with batch {self.batch}")
        if isinstance(offset, int):
            if offset + length > table.shape[1]:
                raise NotTraceable(f"it reads a table of {table.shape[1]} tokens at token {offset + length - 1}")
            return table[:, offset : offset + length]
        return table.index_select(1, offset.to(table.device) + torch.arange(length, device=table.device))


def rule_of(
    function: Callable[..., Any], batch: int, q_length: int, kv_length: int, q_offset: Any, kv_offset: int
) -> Rule:
    """The rule of a mask function; NotTraceable, saying why, if there is none."""
    with _Recording():
        try:
            root = _symbol(function(Symbol("b"), Symbol("const", 0), Symbol("q"), Symbol("kv")))
        except NotTraceable:
            raise
        except Exception as error:  # a function written for tensors may fail on a stand-in in any way
            raise NotTraceable(f"it fails on a stand-in for an index ({type(error).__name__}: {error})") from error
    frame = _Frame(batch, q_length, kv_length, q_offset, kv_offset)
    try:
        return _conjunction(root, frame)
    except Error as error:
        raise NotTraceable(str(error)) from error


def _conjunction(root: Symbol, frame: _Frame) -> Rule:
    terms = _without_packed_positions(_flat("and", root))
    rule = Rule()
    known = _tables(_not_negative, terms)
    for term in terms:
        band = _band(term)
        if band is not None:
            left, right = band
            if left is not None and (rule.left is None or left < rule.left):
                rule = replace(rule, left=left)
            if right is not None and (rule.right is None or right < rule.right):
                rule = replace(rule, right=right)
            continue
        if _not_negative(term) is not None and any(_same_documents(t) is _not_negative(term) for t in terms):
            continue  # documents hide negative numbers themselves
        rule = rule.and_mask(_mask(term, frame, known))
    return rule


def _flat(op: str, node: Symbol) -> list[Symbol]:
    if node.op != op:
        return [node]
    parts: list[Symbol] = []
    for arg in node.args:
        parts += _flat(op, arg)
    return parts


def _tables(of: Callable[[Symbol], Any], terms: list[Symbol]) -> list[Any]:
    tables = [of(term) for term in terms]
    return [table for table in tables if table is not None]


def _linear(node: Symbol) -> tuple[int, int, int] | None:
    """(a, b, c) of a * q + b * kv + c."""
    if node.op == "q":
        return 1, 0, 0
    if node.op == "kv":
        return 0, 1, 0
    if node.op == "const":
        return 0, 0, int(node.args[0])
    if node.op in ("add", "sub"):
        one, other = _linear(node.args[0]), _linear(node.args[1])
        if one is None or other is None:
            return None
        sign = 1 if node.op == "add" else -1
        return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]
    return None


def _band(node: Symbol) -> tuple[int | None, int | None] | None:
    """(left, right) of a comparison that bounds kv - q; (None, None) for one that always holds."""
    if node.op == "const":
        return (None, None) if node.args[0] else None
    if node.op not in ("lt", "le", "gt", "ge"):
        return None
    one, other = node.args
    if node.op in ("gt", "ge"):
        one, other = other, one
    strict = 1 if node.op in ("lt", "gt") else 0  # one + strict <= other
    if one.op == "abs" and other.op == "const":
        inner, reach = _linear(one.args[0]), int(other.args[0]) - strict
        if inner in ((1, -1, 0), (-1, 1, 0)) and reach >= 0:
            return reach, reach
        return None
    difference = _linear(Symbol("sub", one, other))
    if difference is None:
        return None
    a, b, c = difference[0], difference[1], difference[2] + strict  # a * q + b * kv + c <= 0
    if (a, b) == (-1, 1) and -c >= 0:
        return None, -c
    if (a, b) == (1, -1) and -c >= 0:
        return -c, None
    if a <= 0 and b <= 0 and c <= 0 and (a, b) != (0, 0):  # indices are not negative
        return None, None
    return None


def _gather_of(node: Symbol, side: str) -> Any:
    """The table of table[b, side], else None."""
    if node.op == "gather" and len(node.args) == 3 and node.args[1].op == "b" and node.args[2].op == side:
        return node.args[0]
    return None


def _same_documents(node: Symbol) -> Any:
    """The table of table[b, q] == table[b, kv], else None."""
    if node.op != "eq":
        return None
    for one, other in (node.args, node.args[::-1]):
        table = _gather_of(one, "q")
        if table is not None and _gather_of(other, "kv") is table and not table.is_floating_point():
            return table
    return None


def _not_negative(node: Symbol) -> Any:
    """The table of table[b, q or kv] >= 0, else None."""
    if node.op == "ge" and node.args[1].op == "const" and node.args[1].args[0] == 0:
        for side in ("q", "kv"):
            table = _gather_of(node.args[0], side)
            if table is not None:
                return table
    return None


def _mask(node: Symbol, frame: _Frame, known: list[Any]) -> Mask:
    """A mask for a tree; `known`: tables of which this place sees no negative entries."""
    if node.op == "and":
        rule = _conjunction(node, frame)
        parts = [] if rule.mask is None else [rule.mask]
        if rule.left is not None or rule.right is not None:
            parts.append(masks.window(-1 if rule.left is None else rule.left, -1 if rule.right is None else rule.right))
        if not parts:
            raise NotTraceable("it shows everything in a part of an `or`")
        return parts[0] if len(parts) == 1 else parts[0] & parts[1]
    if node.op == "or":
        first, *rest = [_mask(part, frame, []) for part in _flat("or", node)]
        for part in rest:
            first = first | part
        return first
    if node.op == "not":
        return ~_mask(node.args[0], frame, [])
    band = _band(node)
    if band is not None and band != (None, None):
        return masks.window(-1 if band[0] is None else band[0], -1 if band[1] is None else band[1])
    table = _same_documents(node)
    if table is not None:
        if not any(table is each for each in known):
            table = table - table.amin()  # a negative number would be padding
        return masks.documents(frame.rows(table, "q"), frame.rows(table, "kv"))
    table = _gather_of(node, "kv")
    if table is not None and table.dtype == torch.bool:
        return masks.key_padding(frame.rows(table, "kv"))
    chunk = _chunk(node, frame)
    return _expression(node, frame) if chunk is None else chunk


def _chunk(node: Symbol, frame: _Frame) -> Mask | None:
    if node.op != "eq" or any(arg.op != "floordiv" or arg.args[1].op != "const" for arg in node.args):
        return None
    (one, size), (other, same) = node.args[0].args, node.args[1].args
    fits = {one.op, other.op} == {"q", "kv"} and size.args == same.args and frame.offset["kv"] == 0
    return masks.chunk(int(size.args[0])) if fits else None


def _expression(node: Symbol, frame: _Frame) -> Mask:
    """Any tree as a function of the kernels."""
    tables: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name in ("q", "kv"):
        tables[f"{name}_base"] = frame.offset[name]

    def collect(each: Symbol) -> None:
        if each.op == "gather" and id(each.args[0]) not in names:
            names[id(each.args[0])] = f"table{len(names)}"
            tables[names[id(each.args[0])]] = each.args[0]
        for arg in each.args:
            if isinstance(arg, Symbol):
                collect(arg)

    collect(node)

    def evaluate(each: Symbol, b: Any, i: Any, j: Any, s: Any) -> Any:
        if each.op == "gather":
            table = each.args[0]
            indices = []
            for axis, arg in enumerate(each.args[1:]):
                one = table.shape[axis] == 1 and arg.op == "b"
                indices.append(0 if one else evaluate(arg, b, i, j, s))
            return getattr(s, names[id(table)])[tuple(indices)]
        if each.op == "const":
            return each.args[0]
        if each.op in ("b", "q", "kv"):
            return {"b": b, "q": i, "kv": j}[each.op]
        values = [evaluate(arg, b, i, j, s) for arg in each.args]
        if each.op == "abs":
            return abs(values[0])
        if each.op == "not":
            return ~values[0]
        return _OPERATIONS[each.op](*values)

    def function(b: Node, h: Node, i: Node, j: Node, s: Any) -> Any:
        return evaluate(node, b, i + s.q_base, j + s.kv_base, s)

    return masks.mod(function, **tables)


_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}  # fmt: skip


def _without_packed_positions(terms: list[Symbol]) -> list[Symbol]:
    """Bands in positions of packed documents, as bands in tokens.

    Within a document positions rise by one, so that pos[kv] <= pos[q] is kv <= q wherever ids[q] == ids[kv]; if ids are
    what positions say, which is looked at.
    """
    ids = _tables(_same_documents, terms)
    if not ids:
        return terms
    result = []
    for term in terms:
        found: list[Any] = []
        plain = _tokens_for_positions(term, found)
        if found and _band(plain) is not None and all(_numbers_documents(ids, positions) for positions in found):
            result.append(plain)
        else:
            result.append(term)
    return result


def _tokens_for_positions(node: Symbol, found: list[Any]) -> Symbol:
    for side in ("q", "kv"):
        table = _gather_of(node, side)
        if table is not None and not table.is_floating_point() and table.dtype != torch.bool:
            if not any(table is each for each in found):
                found.append(table)
            return Symbol(side)
    if node.op in ("gather", "const"):
        return node
    return Symbol(node.op, *[_tokens_for_positions(arg, found) for arg in node.args])


def _numbers_documents(ids: list[Any], positions: Any) -> bool:
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    expected = begins.cumsum(-1)
    agree = [(table == expected).all() for table in ids if table.shape == expected.shape]
    if torch.compiler.is_compiling():  # a program cannot ask; Transformers makes both of the same positions
        if agree:
            torch._assert_async(torch.stack(agree).any(), "packed_sequence_mask and position_ids do not agree")
        return bool(agree)
    return any(map(bool, agree))
