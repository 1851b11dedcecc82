"""From a Python function to the one-line text of an expression (grammar: src/core/expr.hpp).

A mask_mod or score_mod is called once, with `Node`s in place of numbers; the operators record what it does. What comes
out is a tree of text pieces. Arrays and scalars that the function reads from `s` stay references "@k" and "$k", whose
numbers are filled in when the text is rendered, because a call numbers the arrays of its mask and its score_mod in one
list. Nothing of the function itself is kept or called again.
"""

from __future__ import annotations

import builtins
import inspect
import math
import numbers
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from ._arrays import ANYWHERE, Array, as_array, is_array, is_torch, on_gpu
from ._errors import ArgumentTypeError, InvalidArgumentError, TraceError, message

# Kinds of a traced value, ordered: they widen silently from left to right.
BOOLEAN: Final = 0
INTEGER: Final = 1
REAL: Final = 2
_KIND_NAMES: Final = ("a bool", "an integer", "a real number")

_INT32_MAX: Final = 2**31 - 1
# The C++ parser's own limit; checked here too, so that sharing cannot make the text explode while it is printed.
_MAX_TEXT: Final = 2**17

PARAMETERS: Final = {"mask_mod": ("b", "h", "i", "j", "s"), "score_mod": ("x", "b", "h", "i", "j", "s")}
SEQUENCE_FACTS: Final = ("seqlen_q", "seqlen_kv", "q_offset", "head_kv")

_NO_TRUTH: Final = (
    "a traced value has no truth value, because the function runs once for all (b, h, i, j): write &, | and ~ for "
    "`and`, `or` and `not`, tilewise.ops.where(c, a, b) for `if`, tilewise.ops.minimum/maximum for min()/max(), and "
    "(a < b) & (b < c) for a < b < c"
)
_CAPTURE: Final = (
    "an array of the enclosing scope meets a traced value: capture it by keyword, "
    "tilewise.score_mod(f, table=table) or tilewise.masks.mod(f, table=table), and read it as s.table[...] in the "
    "function"
)


class Node:
    """One value of the expression. `op` is the text before '(' or a whole leaf; a reference has its number in `ref`."""

    __slots__ = ("args", "kind", "op", "ref")

    def __init__(self, op: str, args: tuple[Node, ...], kind: int, ref: int | None = None) -> None:
        self.op = op
        self.args = args
        self.kind = kind
        self.ref = ref

    def __repr__(self) -> str:
        return f"<traced {_KIND_NAMES[self.kind]}: {render(self)}>"

    # Arithmetic. The reflected forms keep the order of the operands.
    def __add__(self, other: Any) -> Node:
        return _number("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return _number("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return _number("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return _number("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return _number("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return _number("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return _call("div", REAL, self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return _call("div", REAL, other, self)

    def __floordiv__(self, other: Any) -> Node:
        return _number("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Node:
        return _number("floordiv", other, self)

    def __mod__(self, other: Any) -> Node:
        return _number("mod", self, other)

    def __rmod__(self, other: Any) -> Node:
        return _number("mod", other, self)

    def __neg__(self) -> Node:
        return _number("neg", self)

    def __pos__(self) -> Node:
        return self

    def __abs__(self) -> Node:
        return _number("abs", self)

    def __pow__(self, exponent: Any) -> Node:
        if isinstance(exponent, Node) or not isinstance(exponent, numbers.Real):
            raise TraceError(
                "**: the exponent must be a Python number; write tilewise.ops.exp(y * tilewise.ops.log(x))"
            )
        if exponent == 0.5:
            return sqrt(self)
        if exponent not in (1, 2, 3, 4):
            raise TraceError(
                message("**", f"the exponent {exponent}", "1, 2, 3, 4 and 0.5", "Use ops.exp and ops.log.")
            )
        result = self
        for _ in range(int(exponent) - 1):
            result = result * self
        return result

    def __rpow__(self, base: Any) -> Node:
        raise TraceError(f"{base!r} ** traced value: write tilewise.ops.exp(value * math.log({base!r}))")

    # Comparison
    def __lt__(self, other: Any) -> Node:
        return _call("lt", BOOLEAN, self, other)

    def __le__(self, other: Any) -> Node:
        return _call("le", BOOLEAN, self, other)

    def __gt__(self, other: Any) -> Node:
        return _call("gt", BOOLEAN, self, other)

    def __ge__(self, other: Any) -> Node:
        return _call("ge", BOOLEAN, self, other)

    def __eq__(self, other: object) -> Node:  # type: ignore[override]
        return _call("eq", BOOLEAN, self, other)

    def __ne__(self, other: object) -> Node:  # type: ignore[override]
        return _call("ne", BOOLEAN, self, other)

    __hash__ = object.__hash__

    # Logic
    def __and__(self, other: Any) -> Node:
        return _logic("and", "&", self, other)

    def __rand__(self, other: Any) -> Node:
        return _logic("and", "&", other, self)

    def __or__(self, other: Any) -> Node:
        return _logic("or", "|", self, other)

    def __ror__(self, other: Any) -> Node:
        return _logic("or", "|", other, self)

    def __xor__(self, other: Any) -> Node:
        return _logic("ne", "^", self, other)

    def __rxor__(self, other: Any) -> Node:
        return _logic("ne", "^", other, self)

    def __invert__(self) -> Node:
        return _logic("not", "~", self)

    # What an expression cannot do
    def __bool__(self) -> NoReturn:
        raise TraceError(_NO_TRUTH)

    def __index__(self) -> NoReturn:
        raise TraceError(_CAPTURE)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:  # NumPy's indexing swallows errors of __index__ and comes here
        raise TraceError(_CAPTURE)

    def __int__(self) -> NoReturn:
        raise TraceError("int() of a traced value: use // for whole numbers")

    def __float__(self) -> NoReturn:
        raise TraceError("float() of a traced value: use tilewise.ops.to_float")

    def __iter__(self) -> NoReturn:
        raise TraceError("a traced value is one number: it cannot be iterated")

    def __getitem__(self, index: Any) -> NoReturn:
        raise TraceError("a traced value is one number: it cannot be indexed")

    # NumPy's and torch's own functions, so that np.exp(x), torch.where(c, a, b) and np.float32(2) * x work.
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Node:
        return _foreign(
            "numpy", ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", inputs, options
        )

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Node:
        return _foreign("numpy", function.__name__, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Node:
        return _foreign("torch", getattr(function, "__name__", str(function)), args, options or {})


class _CapturedArray:
    """s.name of a captured array: indexing it records a gather."""

    def __init__(self, name: str, reference: int, rank: int, kind: int) -> None:
        self._name, self._reference, self._rank, self._kind = name, reference, rank, kind

    def __getitem__(self, index: Any) -> Node:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != self._rank:
            raise TraceError(
                message(f"s.{self._name}[...]", f"{len(indices)} indices", f"one per axis of the array, {self._rank}")
            )
        nodes = []
        for each in indices:
            if isinstance(each, slice) or each is None or each is Ellipsis:
                raise TraceError(
                    message(f"s.{self._name}[...]", repr(each), "one integer per axis", "There are no slices.")
                )
            node = as_node(each)
            if node.kind == REAL:
                raise TraceError(
                    message(f"s.{self._name}[...]", "a real index", "integers", "// of two integers is an integer.")
                )
            nodes.append(node)
        return Node("gather", tuple(nodes), self._kind, self._reference)

    def __getattr__(self, name: str) -> NoReturn:
        raise TraceError(f"s.{self._name} is a captured array and can only be indexed: s.{self._name}[index, ...]")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(f"s.{self._name} is a captured array: index it, s.{self._name}[index, ...], to get a number")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __and__ = __or__ = __invert__ = __bool__ = __iter__ = __len__ = _refuse


class _State:
    """The argument s: facts of the sequence, and what was captured."""

    def __init__(self, captured: Mapping[str, tuple[str, int, int]]) -> None:
        self._captured = captured
        self._arrays: list[str] = []  # names in the order of first use
        self._scalars: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in SEQUENCE_FACTS:
            return Node(name, (), INTEGER)
        if name not in self._captured:
            known = ", ".join((*SEQUENCE_FACTS, *self._captured))
            raise TraceError(
                message(f"s.{name}", "a name that was not captured", known, f"Capture it: mod(f, {name}=...).")
            )
        what, rank, kind = self._captured[name]
        names = self._arrays if what == "array" else self._scalars
        if name not in names:
            names.append(name)
        reference = names.index(name)
        if what == "scalar":
            node = Node("$", (), kind, reference)
            return node if kind != BOOLEAN else Node("ne", (Node("$", (), INTEGER, reference), as_node(0)), BOOLEAN)
        if rank == 0:  # read as an array of one element, so that it can have a gradient
            return Node("gather", (as_node(0),), kind, reference)
        return _CapturedArray(name, reference, rank, kind)


def as_node(value: Any) -> Node:
    """A Python or NumPy number as a literal; a Node as itself."""
    if isinstance(value, Node):
        return value
    if isinstance(value, _CapturedArray):
        value._refuse()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return Node("true" if value else "false", (), BOOLEAN)
    if isinstance(value, numbers.Integral):
        value = int(value)
        if not -_INT32_MAX <= value <= _INT32_MAX:
            raise TraceError(message("constant", value, "an int32", f"Write it as a real number: {float(value)!r}."))
        return Node(str(value), (), INTEGER)
    if isinstance(value, numbers.Real):
        value = float(value)
        if math.isnan(value):
            raise TraceError(message("constant", "NaN", "numbers, inf and -inf"))
        return Node(repr(value), (), REAL)
    if is_array(value):
        # Reading a number from a GPU would wait for it.
        if value.ndim == 0 and not on_gpu(value) and not getattr(value, "requires_grad", False):
            return as_node(value.item())
        raise TraceError(_CAPTURE)
    raise TraceError(
        message("traced function", f"a {type(value).__name__}", "numbers, traced values and s.<captured name>")
    )


def _call(op: str, kind: int, *operands: Any) -> Node:
    return Node(op, tuple(map(as_node, operands)), kind)


def _number(op: str, *operands: Any) -> Node:
    """An operation that gives an integer if every operand is one (or a bool), else a real number."""
    nodes = tuple(map(as_node, operands))
    return Node(op, nodes, max(INTEGER, *(node.kind for node in nodes)))


def _logic(op: str, symbol: str, *operands: Any) -> Node:
    nodes = tuple(map(as_node, operands))
    for node in nodes:
        if node.kind != BOOLEAN:
            raise TraceError(
                message(
                    symbol,
                    _KIND_NAMES[node.kind],
                    "bools",
                    "Compare first: (i // 2 == 0) & (j > i). "
                    "Mind the brackets: & binds tighter than <. Bits of integers come from // and %.",
                )
            )
    return Node(op, nodes, BOOLEAN)


# --------------------------------------------------------------------------------------------- tilewise.ops


def where(condition: Any, a: Any, b: Any) -> Node:
    """a where the condition holds, else b. The gradient goes to the branch that was taken, and to no other."""
    node = as_node(condition)
    if node.kind != BOOLEAN:
        raise TraceError(
            message("where", f"{_KIND_NAMES[node.kind]} as the condition", "a bool", "Compare it: c != 0.")
        )
    yes, no = as_node(a), as_node(b)
    return Node("where", (node, yes, no), max(yes.kind, no.kind))


def minimum(a: Any, b: Any) -> Node:
    """The smaller of two values; NaN if one is. Of equal ones the first gets the gradient."""
    return _number("min", a, b)


def maximum(a: Any, b: Any) -> Node:
    """The larger of two values; NaN if one is. Of equal ones the first gets the gradient."""
    return _number("max", a, b)


def exp(a: Any) -> Node:
    """e to the power of a."""
    return _call("exp", REAL, a)


def log(a: Any) -> Node:
    """Natural logarithm."""
    return _call("log", REAL, a)


def tanh(a: Any) -> Node:
    """Hyperbolic tangent."""
    return _call("tanh", REAL, a)


def sqrt(a: Any) -> Node:
    """Square root."""
    return _call("sqrt", REAL, a)


def absolute(a: Any) -> Node:
    """Absolute value; its derivative at 0 is 1."""
    return _number("abs", a)


def to_float(a: Any) -> Node:
    """An integer or bool as a real number."""
    return _call("float", REAL, a)


_FOREIGN: Final[dict[str, Callable[..., Node]]] = {
    "where": where, "exp": exp, "log": log, "tanh": tanh, "sqrt": sqrt,
    "abs": absolute, "absolute": absolute, "fabs": absolute, "minimum": minimum, "maximum": maximum, "fmin": minimum, "fmax": maximum,
    "add": operator.add, "subtract": operator.sub, "sub": operator.sub, "multiply": operator.mul, "mul": operator.mul,
    "divide": operator.truediv, "true_divide": operator.truediv, "div": operator.truediv,
    "floor_divide": operator.floordiv, "floordiv": operator.floordiv, "remainder": operator.mod,
    "negative": operator.neg, "neg": operator.neg, "square": lambda a: a * a,
    "less": operator.lt, "lt": operator.lt, "less_equal": operator.le, "le": operator.le,
    "greater": operator.gt, "gt": operator.gt, "greater_equal": operator.ge, "ge": operator.ge,
    "equal": operator.eq, "eq": operator.eq, "not_equal": operator.ne, "ne": operator.ne,
    "logical_and": operator.and_, "bitwise_and": operator.and_, "logical_or": operator.or_, "bitwise_or": operator.or_,
    "logical_not": operator.invert, "bitwise_not": operator.invert, "invert": operator.invert,
}  # fmt: skip


def _foreign(library: str, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Node:
    for each in args:
        if not isinstance(each, Node) and is_array(each) and each.ndim > 0:
            raise TraceError(_CAPTURE)
    function = _FOREIGN.get(name.strip("_"))
    if function is None or options:
        known = "where, minimum, maximum, exp, log, tanh, sqrt, abs and operators"
        raise TraceError(message(f"{library} function {name}", "a traced value", known, "See tilewise.ops."))
    return function(*map(as_node, args))


# -------------------------------------------------------------------------------------------------- rendering


def render(root: Node) -> str:
    """The text of `root`, with its references as they are numbered: "@n" an array, "$n" a scalar."""
    known: dict[int, str] = {}

    # Depth first with a stack of its own: a long chain of operators must give the C++ side's error about nesting, not
    # a RecursionError.
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [arg for arg in node.args if id(arg) not in known]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        parts = [known[id(arg)] for arg in node.args]
        if sum(map(len, parts)) > _MAX_TEXT:
            raise TraceError(
                message(
                    "traced function",
                    f"an expression of more than {_MAX_TEXT} bytes of text",
                    f"up to {_MAX_TEXT}",
                    "Capture a precomputed array instead.",
                )
            )
        reference = node.ref
        if node.op == "$":
            text = f"${reference}i" if node.kind == INTEGER else f"${reference}"
        elif node.op == "gather":
            text = f"gather(@{reference},{','.join(parts)})"
        else:
            text = f"{node.op}({','.join(parts)})" if parts else node.op
        known[id(node)] = text
    return known[id(root)]


# ---------------------------------------------------------------------------------------------------- tracing


class _Expression:
    """What tracing leaves: the tree and the names it reads, without the arrays themselves. Shared through the cache."""

    __slots__ = ("arrays", "pieces", "root", "scalars", "texts")

    def __init__(self, root: Node, arrays: tuple[str, ...], scalars: tuple[str, ...]) -> None:
        self.root = root
        self.pieces = tuple(re.split(r"([@$]\d+)", render(root)))  # references apart from the text between them
        self.arrays = arrays
        self.scalars = scalars
        self.texts: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}


class Function:
    """A traced mask_mod or score_mod with what it captured.

    Made by `tilewise.score_mod` and `tilewise.masks.mod`. `str()` gives its text, with the arrays and scalars numbered
    in the order of first use.
    """

    __slots__ = ("arrays", "expression", "on_host", "role", "scalars")

    def __init__(self, role: str, function: Callable[..., Any], captured: Mapping[str, Any]) -> None:
        values: dict[str, Any] = {}
        facts: dict[str, tuple[str, int, int]] = {}
        for name, value in captured.items():
            values[name], facts[name] = _classify(role, name, value)
        self.role = role
        self.expression = _trace(role, function, facts)
        self.arrays: tuple[tuple[str, Array], ...] = tuple((name, values[name]) for name in self.expression.arrays)
        self.scalars: tuple[float, ...] = tuple(float(values[name]) for name in self.expression.scalars)
        self.on_host = not any(on_gpu(array) for _, array in self.arrays)

    def text(self, arrays: tuple[int, ...], scalars: tuple[int, ...]) -> str:
        """The text with its arrays and scalars numbered as given."""
        texts = self.expression.texts
        text = texts.get((arrays, scalars))
        if text is None:
            text = texts[arrays, scalars] = self.traceable_text(arrays, scalars)
        return text

    def traceable_text(self, arrays: tuple[int, ...], scalars: tuple[int, ...]) -> str:
        """The same from constants alone, without the cache: torch.compile runs it at compile time."""
        text = ""
        for piece in self.expression.pieces:
            if piece.startswith("@"):
                piece = f"@{arrays[int(piece[1:])]}"
            elif piece.startswith("$"):
                piece = f"${scalars[int(piece[1:])]}"
            text += piece
        return text

    def __str__(self) -> str:
        return render(self.expression.root)

    def __repr__(self) -> str:
        names = [name for name, _ in self.arrays] + list(self.expression.scalars)
        return f"<tilewise {self.role} {self}{' captures ' + ', '.join(names) if names else ''}>"


def _classify(role: str, name: str, value: Any) -> tuple[Any, tuple[str, int, int]]:
    """A captured object: what to keep of it, and ("array" | "scalar", rank, kind)."""
    if name in SEQUENCE_FACTS:
        raise InvalidArgumentError(
            message(role, f"a captured object named {name}", "other names", f"s.{name} is taken.")
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value, ("scalar", 0, BOOLEAN)
    if isinstance(value, numbers.Integral):
        if not -_INT32_MAX <= int(value) <= _INT32_MAX:
            raise InvalidArgumentError(message(f"captured {name}", value, "an int32", "Capture a float instead."))
        return int(value), ("scalar", 0, INTEGER)
    if isinstance(value, numbers.Real):
        return float(value), ("scalar", 0, REAL)
    if isinstance(value, Node):
        raise TraceError(f"captured {name}: got a traced value; capture numbers and arrays, from outside the function.")
    array = as_array(value, f"captured {name}", sequence=True, meta=True, device=ANYWHERE)
    if is_torch(array) and array.is_neg():
        array = array.resolve_neg()
    rank = array.ndim
    if rank == 0:
        array = array.reshape(1)
    dtype = str(array.dtype)
    kind = BOOLEAN if dtype.endswith("bool") else REAL if "float" in dtype else INTEGER
    return array, ("array", rank, kind)


# Traced functions by what can change their expression. A lambda written in a loop has one code object, so a training
# step that spells its score_mod inline is traced once. Bounded: emptied when full.
_cache: dict[Any, _Expression] = {}
_CACHE_SIZE: Final = 512
_CONSTANTS: Final = (bool, int, float, str, type(None))
# What a cached function may read around itself. Modules of functions without state; of numpy and torch, which have
# random generators and settings too, the names that tracing understands and a few constants.
_STATELESS_MODULES: Final = frozenset({"math", "operator", "tilewise", "tilewise.ops"})
_OTHER_MODULES: Final = frozenset({"numpy", "torch"})
_OTHER_NAMES: Final = frozenset({*_FOREIGN, *dir(math), "float32", "float64", "int32", "int64"})
_STATELESS_BUILTINS: Final = frozenset(
    {"abs", "bool", "float", "int", "len", "max", "min", "pow", "range", "round", "sum"}
)


def _stable_key(function: Callable[..., Any], captured: Iterable[str]) -> Any:
    """A key that is equal only for functions that trace alike, or None if that cannot be told from outside.

    Safe are plain functions that read nothing but constants: no nested functions, and globals and closure cells that
    are numbers, stateless functions, or modules of such.
    """
    if type(function) is not types.FunctionType:
        return None
    code = function.__code__
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            return None
    values: list[Any] = []
    attributes: list[str] = []
    try:
        for cell in function.__closure__ or ():
            values.append(cell.cell_contents)
    except ValueError:  # an empty cell
        return None
    scope = function.__globals__
    for name in code.co_names:
        if name in scope:
            values.append(scope[name])
        elif name not in _STATELESS_BUILTINS:
            attributes.append(name)  # or a builtin that is not known to be safe
    values.extend(function.__defaults__ or ())
    values.extend((function.__kwdefaults__ or {}).values())
    key: list[Any] = [code]
    others = False
    for value in values:
        kind = type(value)
        if kind in _CONSTANTS:
            key.append((kind, repr(value) if kind is float else value))  # repr tells 0.0 from -0.0
            continue
        if kind is types.ModuleType:
            others = others or value.__name__ in _OTHER_MODULES
            stateless = value.__name__ in _STATELESS_MODULES or value.__name__ in _OTHER_MODULES
        elif kind is types.FunctionType:
            stateless = value.__module__ == __name__
        else:
            stateless = kind is types.BuiltinFunctionType and value.__module__ == "math"
        if not stateless:
            return None
        key.append((kind, id(value)))
    known = {*captured, *SEQUENCE_FACTS}
    for name in attributes:
        if name in known or (others and name in _OTHER_NAMES):
            continue
        if others or name in vars(builtins):
            return None
    return tuple(key)


def _trace(role: str, function: Callable[..., Any], captured: Mapping[str, tuple[str, int, int]]) -> _Expression:
    key = _stable_key(function, captured)
    if key is not None:
        key = (role, key, tuple(captured.items()))
        found = _cache.get(key)
        if found is not None:
            return found
    _check_arity(role, function)
    state = _State(captured)
    arguments: list[Any] = [Node(name, (), REAL if name == "x" else INTEGER) for name in PARAMETERS[role][:-1]]
    result = function(*arguments, state)
    if result is None:
        raise TraceError(message(role, "a function that returns None", "a value", "Is a `return` missing?"))
    root = as_node(result)
    if role == "mask_mod" and root.kind != BOOLEAN:
        raise TraceError(
            message(role, f"{_KIND_NAMES[root.kind]} as the result", "a bool (true = visible)", "Compare it: r != 0.")
        )
    expression = _Expression(root, tuple(state._arrays), tuple(state._scalars))
    if key is not None:
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        _cache[key] = expression
    return expression


def _check_arity(role: str, function: Any) -> None:
    wanted = PARAMETERS[role]
    shown = f"{role}({', '.join(wanted)})"
    if not callable(function):
        raise ArgumentTypeError(message(role, f"a {type(function).__name__}", f"a function {shown}"))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without one: the call itself will say
    try:
        signature.bind(*wanted)
    except TypeError:
        raise TraceError(
            message(
                role,
                f"a function of ({', '.join(signature.parameters)})",
                f"one of ({', '.join(wanted)})",
                "s has seqlen_q, seqlen_kv, q_offset, head_kv and what was captured by keyword.",
            )
        ) from None
