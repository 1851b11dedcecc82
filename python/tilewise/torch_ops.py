"""torch.library operators `tilewise::attention_forward` and `tilewise::attention_backward`, for code that is traced.

torch.compile, torch.export and dispatch modes (FakeTensorMode, make_fx) see a call of `tilewise.attention` as one
operator. Its schema holds everything by value: tensors, numbers, and options, masks and score functions as text. It has
few arguments, since a compiled model pays for each of them in every layer. `import tilewise.torch_ops` registers the
operators, for a process that loads an exported program; otherwise the first tensor does. Plain calls take a shorter way.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from . import _ext
from ._arrays import ANYWHERE, accumulator, as_array, inverse
from ._attention import _output_shapes, run_backward, run_forward
from ._composite import composite as composite
from ._errors import UnsupportedError
from ._problem import ARRAYS, BIAS, SINKS, SLOPES, K, Q, Rng, Settings, V
from ._record import FILE as _RECORDED

_INPUTS: Final = "Tensor q, Tensor k, Tensor v, Tensor[] others, SymInt[] sizes, float[] reals, str options"
_FLAGS: Final = ("layout", "q_offset_mode", "first_mod_array", "causal", "deterministic", "batch_invariant", "validate")
# window_left, window_right, chunk, q_offset_value, max_seqlen_q, max_seqlen_kv, seed, offset
_NO_SIZES: Final = (-1, -1, 0, 0, 0, 0, 0, 0)
_INSTEAD: Final = (
    "tilewise.torch_ops.composite takes the same arguments and has derivatives of any order, in both modes, with memory "
    "for all scores: see docs/torch.md#second-derivatives. So has torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)
SECOND_ORDER: Final = (
    "second derivatives of attention: got a request to differentiate its gradient; allowed: first derivatives. "
    + _INSTEAD
)
modes: Final = torch._C._len_torch_dispatch_stack
transforms: Final = torch._C._are_functorch_transforms_active
deterministic: Final = torch._C._get_deterministic_algorithms
_grad_enabled: Final = torch.is_grad_enabled
_forward_ad: Final = torch.autograd.forward_ad
FORWARD_MODE: Final = (
    "forward-mode derivatives of attention: got an input with a tangent; allowed: reverse mode (backward). " + _INSTEAD
)


def pack(settings: Settings, arrays: Sequence[Any], rng: Rng) -> tuple[Any, ...]:
    """Arguments of the operators, in the order of the schema.

    others: optional arrays that are given, in the order of _problem.NAMES, arrays of the mask and the score_mod, and the
    tensor (seed, offset) if there is one. sizes: those of _NO_SIZES, or none if all are as there. reals: softcap,
    dropout_p, softmax_scale if given, scalars of the score_mod. options: what _Options reads.
    """
    s = settings
    left, right = (-1, -1) if s.window is None else s.window
    seed_offset, seed, offset = (None, *rng) if isinstance(rng, tuple) else (rng, 0, 0)
    scale = [] if s.softmax_scale is None else [s.softmax_scale]
    sizes = [left, right, s.chunk, s.q_offset_value, s.max_seqlen_q, s.max_seqlen_kv, seed, offset]
    # By identity: to compare a size that is a symbol with a number would hold the program to that answer.
    usual = all([size is usual for size, usual in zip(sizes, _NO_SIZES, strict=True)])  # noqa: C419 (traced)
    optional = [*arrays[V + 1 : ARRAYS], seed_offset]
    words = [
        *[str(int(getattr(s, name))) for name in _FLAGS],
        *[str(int(there)) for there in [s.softmax_scale is not None, *[array is not None for array in optional]]],
    ]
    return (
        *arrays[: V + 1],
        [array for array in [*arrays[V + 1 :], seed_offset] if array is not None],
        [] if usual else sizes,
        [s.softcap, s.dropout_p, *scale, *s.scalars],
        "|".join([" ".join(words), s.mask, s.score_mod, s.backend]).replace("\n", " "),
    )


class _Options:
    """The argument `options`: numbers (_FLAGS, whether there is a softmax_scale, and for each optional array and the
    tensor (seed, offset) whether it is there), mask, score_mod and backend, with "|" between them; the last may be
    anything. A single line: TorchInductor writes arguments into comments of the programs that it makes."""

    def __init__(self, text: str) -> None:
        words, self.mask, self.score_mod, self.backend = text.split("|", 3)
        numbers = [int(word) for word in words.split()]
        self.flags = dict(zip(_FLAGS, numbers, strict=False))
        self.has_scale, *given, self.has_seed_offset = numbers[len(_FLAGS) :]
        #: places of the optional arrays that are given
        self.places = [V + 1 + n for n, there in enumerate(given) if there]
        #: no tensors but q, k, v and those of a mask
        self.is_plain = not (self.places or self.has_seed_offset or self.score_mod)


_options: Final = functools.lru_cache(4096)(_Options)


def _unpack(args: Sequence[Any]) -> tuple[Settings, list[Any], Rng]:
    q, k, v, others, sizes, reals, text = args
    o = _options(text)
    others = list(others or ())  # AOTInductor gives None for an empty list
    seed_offset = others.pop() if o.has_seed_offset else None
    arrays = [q, k, v, *[None] * (ARRAYS - V - 1)]
    for place in o.places:
        arrays[place] = others.pop(0)
    arrays += others
    s = Settings()
    for name, value in o.flags.items():
        setattr(s, name, value)
    s.backend, s.mask, s.score_mod = o.backend, o.mask, o.score_mod
    left, right, s.chunk, s.q_offset_value, s.max_seqlen_q, s.max_seqlen_kv, seed, offset = sizes or _NO_SIZES
    s.softcap, s.dropout_p, *scalars = reals
    s.softmax_scale = scalars.pop(0) if o.has_scale else None
    s.is_torch = True
    # Asked for where the program was traced, or now.
    s.deterministic = bool(s.deterministic) or torch.are_deterministic_algorithms_enabled()
    place = q.device
    s.cuda = place.index if place.type == "cuda" else -1
    s.window = None if left == right == -1 else (left, right)
    s.scalars = tuple(scalars)
    s.array_names = ()
    s.mod_names = ("",) * (len(others) - s.first_mod_array) if s.score_mod else ()
    return s, arrays, (seed, offset) if seed_offset is None else seed_offset


def _plain(array: Any) -> Any:
    return None if array is None else as_array(array, "array", device=ANYWHERE)


# Strides of the outputs follow those of the inputs, so a compiler must not change them.
_TAGS: Final = tuple(
    getattr(torch.Tag, name) for name in ("needs_exact_strides", "needs_fixed_stride_order") if hasattr(torch.Tag, name)
)[:1]

torch.library.define("tilewise::attention_forward", f"({_INPUTS}) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    "tilewise::attention_backward",
    f"(Tensor d_o, Tensor o, Tensor lse, Tensor? dlse, {_INPUTS}, int[] wanted) -> Tensor[]",
    tags=_TAGS,
)


# A compiled model calls the operators anew for every layer: what does not change between two calls is kept, as for
# plain calls (_ext_quick.cpp).


def _kept_under(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a call is kept under; None if it has more tensors than q, k, v and those of a mask, scalars, or dropout."""
    _, _, _, others, sizes, reals, text = args
    options = _options(text)
    if not options.is_plain or reals[1] or len(reals) > 2 + options.has_scale:
        return None
    return (text, len(others or ()), *(sizes or ()), *reals)


def _quick_call(args: Sequence[Any]) -> Any:
    """The call that is kept for these arguments of an operator, if there is one or can be."""
    key = None if _RECORDED else _kept_under(args)
    if key is None:
        return None
    quick = _ext.quick_call(key, deterministic())
    if quick is None:
        settings, arrays, rng = _unpack(args)
        quick = _ext.QuickCall(settings.problem([*map(_plain, arrays)], rng))
        _ext.keep_quick_call(key, deterministic(), quick)
    return quick


def _forward(*args: Any) -> tuple[Any, Any]:
    quick = _quick_call(args)
    found = quick.forward(*args[:3], True, None, arrays=args[3] or None) if quick else None
    if found is not None:
        return found
    settings, arrays, rng = _unpack(args)
    o, lse = run_forward(settings, [*map(_plain, arrays)], rng, True)
    assert lse is not None
    return o, lse


def _backward(do: Any, o: Any, lse: Any, dlse: Any, *args: Any) -> list[Any]:
    *inputs, wanted = args
    quick = _quick_call(tuple(inputs))
    if quick and all(place in (Q, K, V) for place in wanted):
        wants = [place in wanted for place in (Q, K, V)]
        found = quick.backward(do, *inputs[:3], o, lse, dlse, *wants, arrays=inputs[3] or None)
        if found is not None:
            return [found[place] for place in wanted]
    settings, arrays, rng = _unpack(inputs)
    gradients = run_backward(
        settings, [*map(_plain, arrays)], rng, _plain(do), _plain(o), _plain(lse), _plain(dlse), wanted
    )
    return [gradients[place] for place in wanted]


def _order(shape: Sequence[Any], strides: Sequence[Any]) -> list[int]:
    """As _arrays._order, by comparisons alone. A symbol that was made a number would hold for this length only."""
    order = list(range(len(shape)))[::-1]
    for n in range(1, len(order)):
        place = n
        for other in range(n - 1, -1, -1):
            a, b = order[other], order[place]
            low, high = strides[a], strides[b]
            if low == 0 or high == 0 or (low == high and shape[a] <= shape[b]):
                continue
            if low < high:
                break
            order[other], order[place] = b, a
            place = other
    return order[::-1]


def _like(array: Any, shape: tuple[Any, ...]) -> Any:
    """As _arrays.empty_in_order, for sizes that may be symbols."""
    if array.is_contiguous():
        return array.new_empty(shape)
    order = _order(array.shape, array.stride())
    return array.new_empty([shape[axis] for axis in order]).permute(inverse(tuple(order)))


# What a program of TorchInductor calls. The name is in programs that it keeps on disk: it stays.
_COMPILED: Final = {"attention_forward": _forward, "attention_backward": _backward}
for _name, _function in _COMPILED.items():
    setattr(torch.ops.tilewise, f"{_name}_compiled", _function)


@functools.cache
def _shorten_compiled_calls(registry: Any) -> None:
    """TorchInductor has taken gradients and autocast apart before it writes a program, so that the dispatcher would find
    _forward and _backward after all: the program calls them. The registry is there from torch 2.13 on."""

    def write(name: str, node: Any, writeline: Callable[[str], None]) -> None:
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = torch.ops.tilewise.{name}_compiled({arguments})")

    for name in _COMPILED:
        line = registry.CustomCodegen(python=functools.partial(write, name))
        registry.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.tilewise.{name}.default"] = line


@torch.library.register_fake("tilewise::attention_forward")
def _fake_forward(*args: Any) -> tuple[Any, Any]:
    if registry := sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen"):
        _shorten_compiled_calls(registry)
    settings, arrays, _ = _unpack(args)
    o_shape, lse_shape = _output_shapes(settings, arrays)
    q = arrays[Q]
    return _like(q, o_shape), q.new_empty(() if lse_shape is None else lse_shape, dtype=accumulator(q))


@torch.library.register_fake("tilewise::attention_backward")
def _fake_backward(do: Any, o: Any, lse: Any, dlse: Any, *args: Any) -> list[Any]:
    *inputs, wanted = args
    _, arrays, _ = _unpack(inputs)
    return [_like(arrays[place], tuple(arrays[place].shape)) for place in wanted]


# Autograd, by kernels of our own rather than register_autograd: that knows no torch.func, and loses the tangents of
# forward-mode AD in silence where nothing requires grad.


# Inside the transforms of torch.func an operator's kernels are called for one level of them at a time. Like the kernels
# of torch's own operators, ours apply a Function at that level alone and hand on to the next, whose gradients and
# tangents must be on again.


def _applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    if not transforms():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)


def _has_kernel(tensor: Any) -> bool:
    """Whether a tensor is what it seems, with memory that ours can read."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and (tensor.is_cpu or tensor.is_cuda)


def _below(operator: Any, kernel: Callable[..., Any], keyset: Any, args: Sequence[Any]) -> Any:
    """What stands below autograd in the dispatcher."""
    # To our own kernel the way through the dispatcher costs many times what the call does.
    if not (modes() or transforms()) and all(map(_has_kernel, args[:3])):
        return kernel(*args)
    with contextlib.ExitStack() as stack:
        if transforms():
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)


class _Forward(torch.autograd.Function):
    """(keyset, numbers: sizes, reals and options, *tensors: q, k, v, then the list `others`) -> (o, lse)."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, numbers: Sequence[Any], *tensors: Any) -> tuple[Any, Any]:
        output = _below(torch.ops.tilewise.attention_forward.default, _forward, keyset, _inputs(tensors, numbers))
        ctx.numbers = numbers
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        # Where a wanted gradient stands among `tensors`, by its place.
        options = _options(ctx.numbers[-1])
        given = [Q, K, V, *options.places]
        found = {place: given.index(place) for place in (Q, K, V, BIAS, SLOPES, SINKS) if place in given}
        if options.score_mod:
            end = len(tensors) - options.has_seed_offset
            for n in range(len(given) + options.flags["first_mod_array"], end):
                found[ARRAYS + n - len(given)] = n
        wanted = [place for place, n in found.items() if needed[n] and tensors[n].is_floating_point()]
        result: list[Any] = [None] * len(tensors)
        if wanted and (do is not None or dlse is not None):
            if do is None:
                do = o.new_zeros(()).expand(o.shape)
            inputs = _inputs(tensors, ctx.numbers)
            gradients = torch.ops.tilewise.attention_backward(do, o, lse, dlse, *inputs, wanted)
            for place, gradient in zip(wanted, gradients, strict=True):
                result[found[place]] = gradient
        return None, None, *result

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(FORWARD_MODE)


class _Backward(torch.autograd.Function):
    """(keyset, numbers with `wanted`, *tensors: do, o, lse, dlse, then as _Forward) -> gradients. Has none itself."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, numbers: Sequence[Any], *tensors: Any) -> tuple[Any, ...]:
        args = (*tensors[:4], *_inputs(tensors[4:], numbers))
        return tuple(_below(torch.ops.tilewise.attention_backward.default, _backward, keyset, args))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(SECOND_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(FORWARD_MODE)


def _inputs(tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of the operators."""
    return (*tensors[:3], list(tensors[3:]), *numbers)


def _is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether autograd has anything to do here."""
    if transforms() or _forward_ad._current_level >= 0:
        return True
    return _grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _autograd_forward(keyset: Any, *args: Any) -> Any:
    q, k, v, others, *numbers = args
    tensors = (q, k, v, *(others or ()))
    if not _is_recorded(tensors):
        return _below(torch.ops.tilewise.attention_forward.default, _forward, keyset, args)
    return _applied(_Forward, keyset, numbers, *tensors)


def _autograd_backward(keyset: Any, *args: Any) -> Any:
    do, o, lse, dlse, q, k, v, others, *numbers = args
    tensors = (do, o, lse, dlse, q, k, v, *(others or ()))
    if not _is_recorded(tensors):
        return _below(torch.ops.tilewise.attention_backward.default, _backward, keyset, args)
    return list(_applied(_Backward, keyset, numbers, *tensors))


def autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k, v in the dtype that an enclosing torch.autocast asks for; float64 stays, as in torch's own ops."""
    kind = q.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in narrow else x for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


_AUTOCAST: Final = {"AutocastCPU": torch._C.DispatchKey.AutocastCPU, "AutocastCUDA": torch._C.DispatchKey.AutocastCUDA}


def _autocast_forward(*args: Any) -> Any:
    """For programs that were exported without autocast and run under it."""
    keys = torch._C.DispatchKeySet(_AUTOCAST["AutocastCPU"]) | torch._C.DispatchKeySet(_AUTOCAST["AutocastCUDA"])
    cast = autocast(*args[:3])
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return torch.ops.tilewise.attention_forward(*cast, *args[3:])


_LIBRARY: Final = torch.library.Library("tilewise", "FRAGMENT")  # kept: what is registered goes when it does
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_forward", _forward, _key)
    _LIBRARY.impl("attention_backward", _backward, _key)
_LIBRARY.impl("attention_forward", _autograd_forward, "Autograd", with_keyset=True)
_LIBRARY.impl("attention_backward", _autograd_backward, "Autograd", with_keyset=True)
for _key in _AUTOCAST:
    _LIBRARY.impl("attention_forward", _autocast_forward, _key)


def _looped(operator: Any, info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """What torch.vmap makes of an operator: one call for each entry of the mapped axis."""

    def entry(arg: Any, dim: Any, n: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [entry(each, axis, n) for each, axis in zip(arg, dim, strict=True)]
        return arg if dim is None or not isinstance(arg, torch.Tensor) else arg.select(dim, n)

    calls = [operator(*map(entry, args, in_dims, [n] * len(args))) for n in range(info.batch_size)]
    return [torch.stack(each) for each in zip(*calls, strict=True)]


def _vmap_forward(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return tuple(_looped(torch.ops.tilewise.attention_forward, info, in_dims, args)), (0, 0)


def _vmap_backward(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    found = _looped(torch.ops.tilewise.attention_backward, info, in_dims, args)
    return found, [0] * len(found)


torch.library.register_vmap("tilewise::attention_forward", _vmap_forward)
torch.library.register_vmap("tilewise::attention_backward", _vmap_backward)
