"""One call, taken apart: the arrays, and everything else.

`Call` checks what kind of object each argument is and leaves shapes, dtypes and ranges to the C++ side, which checks
them for every front. Arrays and settings are kept apart because the backward pass of torch gets its arrays anew (saved
tensors may have been moved, or recomputed by a checkpoint), while the settings stay.
"""

from __future__ import annotations

import copy
import numbers
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypedDict

import numpy as np

from . import _ext
from ._arrays import (
    ANYWHERE,
    Array,
    Device,
    View,
    as_array,
    check_place,
    compiling,
    device_of,
    in_dtype,
    is_array,
    is_torch,
    kind_of,
    shape_view,
    stays,
    view,
)
from ._errors import ArgumentTypeError, InvalidArgumentError, message, refuse, refuse_type, refuse_unknown
from ._trace import Function
from .masks import Mask, as_mask

Layout: TypeAlias = Literal["bshd", "bhsd"]
Causal: TypeAlias = bool | Literal["top_left"]
ScoreMod: TypeAlias = Function | Callable[..., Any]
# (seed, offset) of dropout: two numbers, or an int64[2] tensor that stays where it is.
Rng: TypeAlias = "tuple[int, int] | Array"


class Options(TypedDict, total=False):
    """The options of the formula; their meaning and defaults are those of `tilewise.attention`."""

    layout: Layout
    causal: Causal
    q_offset: Any
    window: tuple[int, int]
    chunk: int
    mask: Any
    softmax_scale: float | None
    softcap: float
    bias: Any
    alibi_slopes: Any
    sinks: Any
    score_mod: ScoreMod | None
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    max_seqlen_q: Any
    max_seqlen_kv: Any
    seqused_q: Any
    seqused_kv: Any
    leftpad_kv: Any
    dropout_p: float
    seed: Any
    deterministic: bool
    batch_invariant: bool
    backend: str | None
    validate: bool


OPTION_ORDER: Final = tuple(Options.__annotations__)  # that of the parameters of Call
OPTION_NAMES: Final = frozenset(OPTION_ORDER)

# Places of the arrays of a call; those of the mask and the score_mod follow.
Q, K, V, BIAS, SLOPES, SINKS, Q_OFFSET, CU_Q, CU_KV, USED_Q, USED_KV, LEFTPAD, ARRAYS = range(13)
NAMES: Final = (
    "q", "k", "v", "bias", "alibi_slopes", "sinks", "q_offset", "cu_seqlens_q", "cu_seqlens_kv", "seqused_q",
    "seqused_kv", "leftpad_kv",
)  # fmt: skip

_LAYOUTS: Final = {"bshd": 0, "bhsd": 1}
_BOTTOM_RIGHT, _TOP_LEFT, _OFFSET_VALUE, _OFFSET_ARRAY = range(4)


class Settings:
    """All of a call that is not an array. Read-only after it is made."""

    __slots__ = (
        "array_names", "backend", "batch_invariant", "causal", "chunk", "cuda", "deterministic", "dropout_p",
        "first_mod_array",
        "is_torch", "layout", "mask", "max_seqlen_kv", "max_seqlen_q", "mod_names", "q_offset_mode", "q_offset_value",
        "scalars", "score_mod", "softcap", "softmax_scale", "validate", "window",
    )  # fmt: skip

    is_torch: bool
    cuda: int  # number of the CUDA device; -1 = host memory
    layout: int
    softmax_scale: float | None
    causal: bool
    softcap: float
    window: tuple[int, int] | None
    chunk: int
    q_offset_mode: int
    q_offset_value: int
    mask: str
    score_mod: str
    scalars: tuple[float, ...]
    array_names: tuple[str, ...]  # of the mask's and score_mod's arrays, for messages
    first_mod_array: int  # arrays from here on belong to the score_mod only
    mod_names: tuple[str, ...]  # captured name of each of those
    max_seqlen_q: int
    max_seqlen_kv: int
    dropout_p: float
    deterministic: bool
    batch_invariant: bool
    backend: str
    validate: bool

    def problem(self, arrays: Sequence[Array | None], rng: Rng = (0, 0), *, data: bool = True) -> _ext.Problem:
        """The C struct for these arrays (which must outlive its use)."""
        see: Callable[[Array], View] = view if data else shape_view
        problem = _ext.Problem(see(arrays[Q]), see(arrays[K]), see(arrays[V]), self.layout)
        if self.causal:
            problem.causal = 1
        if self.softmax_scale is not None:
            problem.softmax_scale = self.softmax_scale
            problem.has_softmax_scale = 1
        if self.softcap:
            problem.softcap = self.softcap
        if self.window is not None:
            problem.window_left, problem.window_right = self.window
        if self.chunk:
            problem.chunk = self.chunk
        if self.q_offset_mode:
            problem.q_offset_mode = self.q_offset_mode
            problem.q_offset_value = self.q_offset_value
        if self.mask:
            problem.mask = self.mask
        if self.score_mod:
            problem.score_mod = self.score_mod
        if self.scalars:
            problem.set_scalars(self.scalars)
        if len(arrays) > ARRAYS:
            problem.set_arrays([see(array) for array in arrays[ARRAYS:]])
        if (array := arrays[BIAS]) is not None:
            problem.set_bias(see(array))
        if (array := arrays[SLOPES]) is not None:
            problem.set_alibi_slopes(see(array))
        if (array := arrays[SINKS]) is not None:
            problem.set_sinks(see(array))
        if (array := arrays[Q_OFFSET]) is not None:
            problem.set_q_offset(see(array))
        if (array := arrays[CU_Q]) is not None:
            problem.set_cu_seqlens_q(see(array))
        if (array := arrays[CU_KV]) is not None:
            problem.set_cu_seqlens_kv(see(array))
        if (array := arrays[USED_Q]) is not None:
            problem.set_seqused_q(see(array))
        if (array := arrays[USED_KV]) is not None:
            problem.set_seqused_kv(see(array))
        if (array := arrays[LEFTPAD]) is not None:
            problem.set_leftpad_kv(see(array))
        if self.max_seqlen_q:
            problem.max_seqlen_q = self.max_seqlen_q
        if self.max_seqlen_kv:
            problem.max_seqlen_kv = self.max_seqlen_kv
        if self.dropout_p:
            problem.dropout_p = self.dropout_p
            if type(rng) is tuple:
                problem.seed, problem.offset = rng
            else:
                problem.set_seed_offset(see(rng))
        if self.deterministic:
            problem.deterministic = 1
        if self.batch_invariant:
            problem.batch_invariant = 1
        if self.validate:
            problem.validate = 1
        if self.backend:
            problem.backend = self.backend
        if self.cuda >= 0:
            problem.device_type = 1
            problem.device_index = self.cuda
        return problem

    def on_host(self) -> Settings:
        """The same for arrays that were copied to host memory."""
        settings = copy.copy(self)
        settings.cuda = -1
        return settings

    def explain_error(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """The same error with the caller's names in place of the numbers of arrays."""

        def name(match: re.Match[str]) -> str:
            n = int(match[1])
            return f"{match[0]} = {self.array_names[n]}" if n < len(self.array_names) else match[0]

        return type(error)(re.sub(r"(?:@|arrays\[)(\d+)\]?", name, str(error)))


class Call:
    """`settings`, `arrays` by place, their `device`, and the option `seed` as far as it was given."""

    __slots__ = ("arrays", "device", "seed", "settings")

    settings: Settings
    arrays: list[Array | None]
    device: Device
    seed: Rng | None

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        layout: Any = "bshd",
        causal: Any = False,
        q_offset: Any = "bottom_right",
        window: Any = (-1, -1),
        chunk: Any = 0,
        mask: Any = None,
        softmax_scale: Any = None,
        softcap: Any = 0.0,
        bias: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        score_mod: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_kv: Any = None,
        seqused_q: Any = None,
        seqused_kv: Any = None,
        leftpad_kv: Any = None,
        dropout_p: Any = 0.0,
        seed: Any = None,
        deterministic: Any = False,
        batch_invariant: Any = False,
        backend: Any = None,
        validate: Any = False,
        *,
        meta: bool = False,
    ) -> None:
        q = as_array(q, "q", meta=meta, device=ANYWHERE)
        tensor = is_torch(q)
        device = device_of(q)
        if device is not None and device.type != "cuda":
            device = None
        if is_torch(k) != tensor or is_torch(v) != tensor:
            k, v = as_array(k, "k", meta=meta, device=ANYWHERE), as_array(v, "v", meta=meta, device=ANYWHERE)
            kinds = ", ".join(map(kind_of, (q, k, v)))
            ways = "torch.from_numpy(x) and x.numpy()"
            if "cupy" in kinds:
                ways = "torch.from_dlpack(x) and cupy.from_dlpack(x)"
            refuse_type("q, k, v", kinds, "one kind for all three", f"{ways} convert without a copy.")
        k = as_array(k, "k", meta=meta, device=device)
        v = as_array(v, "v", meta=meta, device=device)

        s = Settings()
        s.is_torch = tensor
        s.cuda = -1 if device is None else device.index
        number = _LAYOUTS.get(layout) if isinstance(layout, str) else None
        if number is None:
            refuse("layout", repr(layout), "'bshd' [batch, seqlen, heads, dim] or 'bhsd' [batch, heads, seqlen, dim]")
        s.layout = number

        offset_array = None
        s.q_offset_value = 0
        if isinstance(q_offset, str):
            if q_offset == "bottom_right":
                s.q_offset_mode = _BOTTOM_RIGHT
            elif q_offset == "top_left":
                s.q_offset_mode = _TOP_LEFT
            else:
                refuse("q_offset", repr(q_offset), "'bottom_right', 'top_left', an int, or an integer array [batch]")
        elif isinstance(q_offset, (int, np.integer)) or (
            hasattr(q_offset, "ndim") and q_offset.ndim == 0 and not stays(q_offset)
        ):
            s.q_offset_mode = _OFFSET_VALUE
            s.q_offset_value = integer(q_offset, "q_offset")
        else:
            s.q_offset_mode = _OFFSET_ARRAY
            offset_array = as_array(q_offset, "q_offset", sequence=True, meta=meta, device=device)
            if offset_array.ndim == 0:  # one for all
                batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
                offset_array = (
                    offset_array.expand(batch) if tensor else sys.modules["cupy"].broadcast_to(offset_array, (batch,))
                )
        if causal is True or causal is False:
            s.causal = causal
        elif isinstance(causal, str) and causal == "top_left":
            if s.q_offset_mode not in (_BOTTOM_RIGHT, _TOP_LEFT):
                refuse("causal", "'top_left' with a q_offset", "one of the two", "causal=True obeys q_offset.")
            s.causal = True
            s.q_offset_mode = _TOP_LEFT
        elif isinstance(causal, np.bool_):
            s.causal = bool(causal)
        else:
            refuse(
                "causal", repr(causal), "False, True (aligned as q_offset says: bottom right by default) or 'top_left'"
            )

        if not isinstance(window, (tuple, list)) or len(window) != 2:
            refuse_type(
                "window", repr(window), "a pair (left, right); -1 = unbounded", "The w latest keys are (w - 1, 0)."
            )
        left, right = window
        s.window = None if left == right == -1 else (integer(left, "window left"), integer(right, "window right"))
        s.chunk = integer(chunk, "chunk")
        s.softmax_scale = None if softmax_scale is None else real(softmax_scale, "softmax_scale")
        s.softcap = real(softcap, "softcap")
        s.max_seqlen_q = 0 if max_seqlen_q is None else _hint(max_seqlen_q, "max_seqlen_q")
        s.max_seqlen_kv = 0 if max_seqlen_kv is None else _hint(max_seqlen_kv, "max_seqlen_kv")
        s.dropout_p = real(dropout_p, "dropout_p")
        s.deterministic = flag(deterministic, "deterministic")
        if tensor and not s.deterministic:
            s.deterministic = sys.modules["torch"].are_deterministic_algorithms_enabled()
        s.batch_invariant = flag(batch_invariant, "batch_invariant")
        s.validate = flag(validate, "validate")
        if backend is not None and not isinstance(backend, str):
            refuse_type("backend", repr(backend), "None (the best) or the name of an implementation")
        s.backend = backend or ""
        if seed is not None:
            seed = check_seed(seed, device)

        arrays: list[Array | None] = [
            q,
            k,
            v,
            None if bias is None else as_array(bias, "bias", meta=meta, device=device),
            None
            if alibi_slopes is None
            else as_array(alibi_slopes, "alibi_slopes", sequence=True, meta=meta, device=device),
            None if sinks is None else as_array(sinks, "sinks", sequence=True, meta=meta, device=device),
            offset_array,
            None
            if cu_seqlens_q is None
            else as_array(cu_seqlens_q, "cu_seqlens_q", sequence=True, meta=meta, device=device),
            None
            if cu_seqlens_kv is None
            else as_array(cu_seqlens_kv, "cu_seqlens_kv", sequence=True, meta=meta, device=device),
            None if seqused_q is None else as_array(seqused_q, "seqused_q", sequence=True, meta=meta, device=device),
            None if seqused_kv is None else as_array(seqused_kv, "seqused_kv", sequence=True, meta=meta, device=device),
            None if leftpad_kv is None else as_array(leftpad_kv, "leftpad_kv", sequence=True, meta=meta, device=device),
        ]

        s.mask = s.score_mod = ""
        s.scalars = ()
        s.array_names = s.mod_names = ()
        s.first_mod_array = 0
        if mask is not None:
            resolved = (mask if isinstance(mask, Mask) else as_mask(mask)).resolve()
            s.mask = resolved.text
            s.scalars = tuple(resolved.scalars)
            s.array_names = tuple(resolved.names)
            if device is not None or not resolved.on_host:
                for name, array in zip(resolved.names, resolved.arrays, strict=True):
                    check_place(array, name, device)
            arrays.extend(resolved.arrays)
        if score_mod is not None:
            function = score_mod if isinstance(score_mod, Function) else Function("score_mod", score_mod, {})
            if function.role != "score_mod":
                refuse_type("score_mod", "a mask_mod", "a score_mod, f(x, b, h, i, j, s) -> x")
            first, first_scalar = len(s.array_names), len(s.scalars)
            text = function.traceable_text if tensor and compiling() else function.text
            s.score_mod = text(
                tuple(range(first, first + len(function.arrays))),
                tuple(range(first_scalar, first_scalar + len(function.scalars))),
            )
            s.scalars += function.scalars
            s.first_mod_array = first
            s.mod_names = tuple([name for name, _ in function.arrays])
            s.array_names += tuple([f"score_mod's {name}" for name in s.mod_names])
            if device is not None or not function.on_host:
                for name, array in function.arrays:
                    check_place(array, f"score_mod's {name}", device)
            arrays.extend([array for _, array in function.arrays])
        self.settings = s
        self.arrays = arrays
        self.device = device
        self.seed = seed

    def problem(self, rng: Rng = (0, 0), *, data: bool = True) -> _ext.Problem:
        return self.settings.problem(self.arrays, rng, data=data)


def call_from(function: str, q: Any, k: Any, v: Any, options: Mapping[str, Any], *, meta: bool = False) -> Call:
    """A Call from keyword options, with a good error for one that does not exist."""
    unknown = [name for name in options if name not in OPTION_NAMES]  # a difference of sets stops torch 2.11's compiler
    if unknown:
        refuse_unknown(function, unknown, OPTION_NAMES)
    return Call(q, k, v, **options, meta=meta)


def renamed(settings: Settings, error: InvalidArgumentError) -> NoReturn:
    """Raises the error again, with arrays under their own names."""
    raise (settings.explain_error(error) if settings.array_names else error) from None


# ------------------------------------------------------------------------------------------------- small kinds


def _hint(value: Any, argument: str) -> int:
    """A length that is not needed; 0 = not known."""
    return 0 if type(value) is not int and stays(value) else integer(value, argument)


def _refuse_unread(value: Any, argument: str, kind: str) -> None:
    if stays(value):
        refuse_type(
            argument, f"an array on device {device_of(value)}", kind, "x.item() reads it, and waits for the device."
        )


def integer(value: Any, argument: str) -> int:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, (bool, np.bool_)):
        refuse_type(argument, repr(value), "an integer")
    _refuse_unread(value, argument, "an integer")
    try:
        number = operator.index(value)
    except TypeError:
        refuse_type(argument, f"{value!r} ({type(value).__name__})", "an integer")
    if not -(2**63) <= number < 2**63:
        refuse(argument, number, "a 64-bit integer")
    return number


def real(value: Any, argument: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    _refuse_unread(value, argument, "a number")
    if is_array(value) and value.ndim == 0:
        if getattr(value, "requires_grad", False):
            refuse(
                argument,
                "a tensor that requires grad",
                "a number",
                f"{argument} has no gradient; use a score_mod with a captured array.",
            )
        return float(value)
    return refuse_type(argument, f"{value!r} ({type(value).__name__})", "a number")


def flag(value: Any, argument: str) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    return refuse_type(argument, repr(value), "True or False")


def check_seed(seed: Any, device: Device = None) -> Rng:
    """(seed, offset) of an int, or of an int64 array or tensor of two. A tensor on a GPU stays there."""
    if isinstance(seed, (bool, np.bool_)):
        refuse_type("seed", repr(seed), "None, an int, or int64[2] (seed, offset)")
    if isinstance(seed, numbers.Integral):
        number = int(seed)
        if not -(2**63) <= number < 2**64:
            refuse("seed", number, "64 bits")
        return (number if number < 2**63 else number - 2**64, 0)
    if is_array(seed):
        array = as_array(seed, "seed", meta=True, device=ANYWHERE)
        if tuple(array.shape) != (2,) or "int" not in str(array.dtype):
            refuse("seed", f"{array.dtype} {list(array.shape)}", "None, an int, or int64[2] (seed, offset)")
        if stays(array):
            check_place(array, "seed", device)
            return in_dtype(array, "int64")
        return int(array[0]), int(array[1])
    if isinstance(seed, (tuple, list)) and len(seed) == 2:
        return integer(seed[0], "seed"), integer(seed[1], "seed offset")
    raise ArgumentTypeError(message("seed", f"a {type(seed).__name__}", "None, an int, or int64[2] (seed, offset)"))
