"""torch.library operators `tilewise::attention_forward` and `tilewise::attention_backward`, for code that is traced.

torch.compile, torch.export and dispatch modes (FakeTensorMode, make_fx) see a call of `tilewise.attention` as one
operator. Its schema holds everything by value: tensors, numbers, and masks and score functions as one line of text with
arrays and scalars. `import tilewise.torch_ops` registers the operators, for a process that loads an exported program;
otherwise the first tensor does. Plain calls take a shorter way.
"""

from __future__ import annotations

import contextlib
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

_INPUTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? q_offset, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, Tensor? leftpad_kv, "
    "Tensor[] arrays, Tensor? seed_offset, int seed, int offset, int layout, float? softmax_scale, bool causal, "
    "float softcap, SymInt window_left, SymInt window_right, SymInt chunk, int q_offset_mode, SymInt q_offset_value, "
    "str mask, str score_mod, float[] scalars, int first_mod_array, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "float dropout_p, bool deterministic, bool batch_invariant, str backend, bool validate"
)
_NUMBERS: Final = ARRAYS + 2  # place of the first argument after the tensors
_NAMES: Final = [each.split()[1] for each in _INPUTS.split(", ")]
_DROPOUT: Final = _NAMES.index("dropout_p")
_SCALARS: Final = _NAMES.index("scalars")
_SCORE_MOD: Final = _NAMES.index("score_mod")
_NO_OPTIONS: Final = (None,) * (ARRAYS - 3)  # of the tensors behind q, k and v
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
FORWARD_MODE: Final = (
    "forward-mode derivatives of attention: got an input with a tangent; allowed: reverse mode (backward). " + _INSTEAD
)


def pack(settings: Settings, arrays: Sequence[Any], rng: Rng) -> tuple[Any, ...]:
    """Arguments of the operators, in the order of the schema."""
    s = settings
    left, right = (-1, -1) if s.window is None else s.window
    seed_offset, seed, offset = (None, *rng) if isinstance(rng, tuple) else (rng, 0, 0)
    return (
        *arrays[:ARRAYS], list(arrays[ARRAYS:]), seed_offset, seed, offset, s.layout, s.softmax_scale, s.causal,
        s.softcap, left, right, s.chunk, s.q_offset_mode, s.q_offset_value, s.mask, s.score_mod, list(s.scalars),
        s.first_mod_array, s.max_seqlen_q, s.max_seqlen_kv, s.dropout_p, s.deterministic, s.batch_invariant,
        s.backend, s.validate,
    )  # fmt: skip


def _unpack(args: Sequence[Any]) -> tuple[Settings, list[Any], Rng]:
    s = Settings()
    listed = args[ARRAYS] or ()  # AOTInductor gives None for an empty list
    arrays = [*args[:ARRAYS], *listed]
    seed_offset = args[ARRAYS + 1]
    (
        seed, offset, s.layout, s.softmax_scale, s.causal, s.softcap, left, right, s.chunk, s.q_offset_mode,
        s.q_offset_value, s.mask, s.score_mod, scalars, s.first_mod_array, s.max_seqlen_q, s.max_seqlen_kv, s.dropout_p,
        s.deterministic, s.batch_invariant, s.backend, s.validate,
    ) = args[_NUMBERS:]  # fmt: skip
    s.is_torch = True
    # Asked for where the program was traced, or now.
    s.deterministic = s.deterministic or torch.are_deterministic_algorithms_enabled()
    place = arrays[Q].device
    s.cuda = place.index if place.type == "cuda" else -1
    s.window = None if left == right == -1 else (left, right)
    s.scalars = tuple(scalars)
    s.array_names = ()
    s.mod_names = ("",) * (len(listed) - s.first_mod_array) if s.score_mod else ()
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
    """What a call is kept under; None if it has more tensors than q, k, v and those of a mask, or draws numbers."""
    if args[_DROPOUT] or args[_SCALARS] or args[_SCORE_MOD] or args[3:ARRAYS] != _NO_OPTIONS:
        return None
    return (len(args[ARRAYS] or ()), *args[_NUMBERS:_SCALARS], *args[_SCALARS + 1 :])


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
    found = quick.forward(*args[:3], True, None, arrays=args[ARRAYS] or None) if quick else None
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
        found = quick.backward(do, *inputs[:3], o, lse, dlse, *wants, arrays=inputs[ARRAYS] or None)
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


@torch.library.register_fake("tilewise::attention_forward")
def _fake_forward(*args: Any) -> tuple[Any, Any]:
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
    """(keyset, numbers, *tensors: those of the schema, then the list `arrays`) -> (o, lse)."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, numbers: Sequence[Any], *tensors: Any) -> tuple[Any, Any]:
        output = _below(torch.ops.tilewise.attention_forward.default, _forward, keyset, _inputs(tensors, numbers))
        ctx.numbers = numbers
        ctx.given = [tensor is not None for tensor in tensors]
        ctx.save_for_backward(*[tensor for tensor in tensors if tensor is not None], *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        *saved, o, lse = ctx.saved_tensors
        tensors = [saved.pop(0) if given else None for given in ctx.given]
        inputs = _inputs(tensors, ctx.numbers)
        needed = ctx.needs_input_grad[2:]
        # Where a wanted gradient stands among `tensors`, by its place.
        found = {place: place for place in (Q, K, V, BIAS, SLOPES, SINKS)}
        settings, arrays, _ = _unpack(inputs)
        if settings.mod_names:
            found |= {place: place + 1 for place in range(ARRAYS + settings.first_mod_array, len(arrays))}
        wanted = [
            place
            for place, n in found.items()
            if needed[n] and arrays[place] is not None and arrays[place].is_floating_point()
        ]
        result: list[Any] = [None] * len(tensors)
        if wanted and (do is not None or dlse is not None):
            if do is None:
                do = o.new_zeros(()).expand(o.shape)
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
    """Arguments of the operators: seed_offset stands behind the list `arrays`, and before it here."""
    return (*tensors[:ARRAYS], list(tensors[ARRAYS + 1 :]), tensors[ARRAYS], *numbers)


def _is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether autograd has anything to do here."""
    if transforms() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _autograd_forward(keyset: Any, *args: Any) -> Any:
    if not _is_recorded((*args[:ARRAYS], *(args[ARRAYS] or ()))):
        return _below(torch.ops.tilewise.attention_forward.default, _forward, keyset, args)
    *optional, arrays, seed_offset = args[:_NUMBERS]
    return _applied(_Forward, keyset, args[_NUMBERS:], *optional, seed_offset, *(arrays or ()))


def _autograd_backward(keyset: Any, *args: Any) -> Any:
    if not _is_recorded((*args[: 4 + ARRAYS], *(args[4 + ARRAYS] or ()))):
        return _below(torch.ops.tilewise.attention_backward.default, _backward, keyset, args)
    given, args = args[:4], args[4:]
    *optional, arrays, seed_offset = args[:_NUMBERS]
    return list(_applied(_Backward, keyset, args[_NUMBERS:], *given, *optional, seed_offset, *(arrays or ())))


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
