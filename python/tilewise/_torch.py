"""torch's side: autograd, vmap, autocast. Imported only when a tensor arrives, so torch stays optional.

A Function whose backward is a Function that has none, so that second derivatives are refused in words. The arrays of a
call travel as one flat list in the places of `_problem`.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from . import _ext, torch_ops
from ._arrays import ANYWHERE, Array, as_array, empty_in_order, inverse, is_float, torch_dtypes, traced
from ._attention import checked_out, merge_arrays, rng_of, run_backward, run_forward
from ._errors import UnsupportedError, refuse
from ._problem import ARRAYS, BIAS, OPTION_ORDER, SINKS, SLOPES, Call, K, Q, Rng, Settings, V
from ._record import FILE as RECORDED
from ._trace import Function
from .torch_ops import FORWARD_MODE, SECOND_ORDER, autocast, deterministic, modes, transforms

_SCORE_MOD: Final = OPTION_ORDER.index("score_mod")

# The quick way for calls that repeat, see _ext_quick.cpp: there if torch has a table of C functions for DLPack (2.10).
_is_compiling: Final = torch.compiler.is_compiling
_grad_enabled: Final = torch.is_grad_enabled
_forward_ad: Final = torch.autograd.forward_ad


def _introduce() -> bool:
    """Tells the extension what it needs of torch."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if api is None or not hasattr(torch._C, "_is_any_autocast_enabled"):
        return False
    dtypes = {number: dtype for dtype, number in torch_dtypes().items()}
    return _ext.set_torch(torch.Tensor, torch.nn.Parameter, api, torch.empty_strided, torch.empty_like, dtypes)


_has_quick_calls: Final = not RECORDED and _introduce()  # what is recorded takes the general way
_autocast: Final[Callable[[], bool]] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
atexit.register(_ext.clear_quick_calls)  # they are objects of an interpreter that will be gone


def _eager() -> bool:
    """Whether tensors are what they seem: no compiler, mode, transform or forward-mode level is about. (To a compiler the
    first question is a constant, and it does not look further.)"""
    return not (_is_compiling() or modes() or transforms() or _forward_ad._current_level >= 0)


def quick_plan(plan: _ext.Plan, problem: _ext.Problem, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Runs of a forward plan with the plan's own options, for plain tensors: f(q, k, v, want_lse, out, lse, workspace) is
    None if the general way has to be taken. None if that is always so."""
    if not _has_quick_calls or problem.dropout_p or _ext.quick_call(tuple(options.values()), False) is False:
        return None
    quick = _ext.QuickCall(problem, plan)
    planned_as = deterministic()

    def run(q: Any, k: Any, v: Any, want_lse: bool, out: Any, lse: Any, workspace: Any) -> Any:
        if not _eager() or deterministic() != planned_as:  # the plan does not fit any more: the general way says so
            return None
        return quick.forward(q, k, v, want_lse, None, out, lse, workspace)

    return run


def attention(q: Any, k: Any, v: Any, options: tuple[Any, ...], return_lse: bool, out: Any) -> Any:
    """See `tilewise.attention`; options in the order of `Call`."""
    seen_by = modes()
    if seen_by or transforms() or _forward_ad._current_level >= 0:
        return (traced_attention if seen_by else _attention)(q, k, v, options, return_lse, out)
    keep = False
    if _has_quick_calls and out is None and not _autocast():
        quick = _ext.quick_call(options, deterministic())
        if quick:
            found = quick.forward(q, k, v, bool(return_lse), _apply_quick if _grad_enabled() else None)
            if found is not None:
                return found
        keep = quick is None
    return _attention(q, k, v, options, return_lse, out, keep)


def traced_attention(q: Any, k: Any, v: Any, options: tuple[Any, ...], return_lse: bool, out: Any) -> Any:
    """The same for a compiler or a mode, which see one operator."""
    function = options[_SCORE_MOD]
    if torch.compiler.is_compiling() and function is not None and not isinstance(function, Function):
        # A clean break of the graph: a function cannot be traced while a compiler traces. Without it the compiler
        # would try every frame below, at great length and in vain.
        return torch.compiler.disable(_attention)(q, k, v, options, return_lse, out)
    call = Call(q, k, v, *options, meta=True)
    o, lse = recorded_forward(call.settings, call.arrays, rng_of(call))
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if return_lse else o


def recorded_forward(settings: Settings, arrays: Sequence[Any], rng: Rng) -> tuple[Any, Any]:
    """run_forward as an operator."""
    o, lse = torch.ops.tilewise.attention_forward(*torch_ops.pack(settings, _as_tensors(arrays), rng))
    return o, lse


def recorded_backward(
    settings: Settings, arrays: Sequence[Any], rng: Rng, do: Any, o: Any, lse: Any, dlse: Any, wanted: Sequence[int]
) -> dict[int, Any]:
    """run_backward as an operator."""
    inputs = torch_ops.pack(settings, _as_tensors(arrays), rng)
    found = torch.ops.tilewise.attention_backward(do, o, lse, dlse, *inputs, list(wanted))
    return dict(zip(wanted, found, strict=True))


def _as_tensors(arrays: Sequence[Array | None]) -> list[Array | None]:
    """NumPy arrays beside tensors (masks, lengths) as tensors too."""
    return [
        array if array is None or isinstance(array, torch.Tensor) else torch.as_tensor(array, device="cpu")
        for array in arrays
    ]


def _attention(q: Any, k: Any, v: Any, options: tuple[Any, ...], return_lse: bool, out: Any, keep: bool = False) -> Any:
    """The general way. `keep`: these options may become a quick call, if the call succeeds."""
    call = Call(*autocast(q, k, v), *options)
    if out is not None:
        out = checked_out(out, "out", call)
    # Inside torch.func transforms (vmap, grad, jvp) a tensor may be a wrapper whose memory cannot be read here; with
    # forward-mode AD it may carry a tangent that must not be lost in silence.
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    if transformed or needs_graph(call):
        if out is not None:
            refuse("out", "a tensor, while an input requires grad", "None", "Copy the result, or use torch.no_grad().")
        function = _TransformedForward if transformed else _Forward
        o, lse = function.apply(call.settings, rng_of(call), *call.arrays)
    else:
        o, lse = run_forward(call.settings, call.arrays, rng_of(call), return_lse, out)
    if keep and not call.settings.dropout_p:  # dropout draws a seed, which is not the business of the quick way
        _ext.keep_quick_call(options, deterministic(), _QuickCall(call))
    return (o, lse) if return_lse else o


def needs_graph(call: Call) -> bool:
    """Whether a gradient is wanted."""
    if not torch.is_grad_enabled():
        return False
    for place in _differentiable_places(call.settings, call.arrays):
        array = call.arrays[place]
        if isinstance(array, torch.Tensor) and array.requires_grad:
            return True
    return False


def _differentiable_places(settings: Settings, arrays: Sequence[Array | None]) -> list[int]:
    places = [place for place in (Q, K, V, BIAS, SLOPES, SINKS) if arrays[place] is not None]
    if settings.mod_names:
        first = ARRAYS + settings.first_mod_array
        places.extend([place for place in range(first, len(arrays)) if is_float(arrays[place])])
    return places


def _forward(settings: Settings, rng: Rng, arrays: Sequence[Any]) -> tuple[Any, Any]:
    o, lse = run_forward(settings, arrays, rng, True)
    if lse is None:  # only for inputs of a wrong rank, which run_forward refuses
        raise AssertionError("no lse")
    return o, lse


def _save(ctx: Any, settings: Settings, rng: Rng, arrays: Sequence[Any], output: tuple[Any, Any]) -> None:
    ctx.settings = settings
    # Tensors go through save_for_backward, even those without a gradient: it notices when one was changed in between,
    # and lets hooks move them (offloading) or make them anew (checkpoints). The rest is kept as it is.
    arrays = [*arrays, rng]
    ctx.places = [place for place, array in enumerate(arrays) if isinstance(array, torch.Tensor)]
    ctx.others = [None if isinstance(array, torch.Tensor) else array for array in arrays]
    ctx.save_for_backward(*[arrays[place] for place in ctx.places], *output)
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, do: Any, dlse: Any, gradients_of: Any) -> tuple[Any, ...]:
    """What autograd wants of a backward pass: a gradient or None for every input of forward."""
    *tensors, o, lse = ctx.saved_tensors
    arrays = list(ctx.others)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        arrays[place] = tensor
    rng = arrays.pop()
    result: list[Any] = [None] * (2 + len(arrays))
    places = _differentiable_places(ctx.settings, arrays)
    wanted = tuple([place for place in places if ctx.needs_input_grad[2 + place]])
    if wanted and (do is not None or dlse is not None):
        if do is None:
            do = o.new_zeros(()).expand(o.shape)
        gradients = gradients_of(ctx.settings, rng, wanted, do, o, lse, dlse, *arrays)
        for place, gradient in zip(wanted, gradients, strict=True):
            result[2 + place] = gradient
    return tuple(result)


def _backward(
    settings: Settings,
    rng: Rng,
    wanted: tuple[int, ...],
    do: Any,
    o: Any,
    lse: Any,
    dlse: Any,
    *arrays: Any,
) -> tuple[Any, ...]:
    do = _readable(do, "do")
    dlse = None if dlse is None else _readable(dlse, "dlse")
    if deterministic() and not settings.deterministic:  # asked for since the forward pass
        settings = copy.copy(settings)
        settings.deterministic = True
    gradients = run_backward(settings, arrays, rng, do, o, lse, dlse, wanted)
    return tuple([gradients[place] for place in wanted])


def _readable(gradient: Any, name: str) -> Any:
    # Lazy zeros of autograd have no memory to read.
    return as_array(gradient.clone() if gradient._is_zerotensor() else gradient, name, device=ANYWHERE)


class _Forward(torch.autograd.Function):
    """(settings, rng, *arrays) -> (o, lse)."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, rng: Rng, *arrays: Any) -> tuple[Any, Any]:
        output = _forward(settings, rng, arrays)
        _save(ctx, settings, rng, arrays, output)
        return output

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        return _pull_back(ctx, do, dlse, _Backward.apply if torch.is_grad_enabled() else _backward)


class _Backward(torch.autograd.Function):
    """(settings, rng, wanted places, do, o, lse, dlse, *arrays) -> a gradient for each wanted place; has none itself."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        return _backward(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(SECOND_ORDER)


class _QuickCall(_ext.QuickCall):
    """Remembers the settings, for gradients that have to be computed the general way."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.problem())
        self._settings = call.settings
        self.deterministic = call.settings.deterministic

    def settings_for(self, q: Any) -> Settings:
        settings = copy.copy(self._settings)
        settings.cuda = q.device.index if q.device.type == "cuda" else -1
        return settings


class _Quick(torch.autograd.Function):
    """(quick call, q, k, v) -> (o, lse); _Forward without all that such a call has none of."""

    @staticmethod
    def forward(ctx: Any, quick: _QuickCall, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        output = quick.forward(q, k, v, True, None)
        if output is None:  # unless a mode of torch appeared since the same question a moment ago
            output = _forward(quick.settings_for(q), (0, 0), _arrays_of(q, k, v))
        ctx.quick = quick
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        _, *wanted = ctx.needs_input_grad
        if (do is None and dlse is None) or not any(wanted):
            return None, None, None, None
        if do is None:
            do = o.new_zeros(()).expand(o.shape)
        found = None
        if not _grad_enabled() and _eager() and (ctx.quick.deterministic or not deterministic()):
            found = ctx.quick.backward(do, q, k, v, o, lse, dlse, *wanted)
        if found is None:
            places = tuple([place for place in (Q, K, V) if wanted[place]])
            gradients_of = _Backward.apply if _grad_enabled() else _backward
            settings = ctx.quick.settings_for(q)
            gradients = iter(gradients_of(settings, (0, 0), places, do, o, lse, dlse, *_arrays_of(q, k, v)))
            found = [next(gradients) if each else None for each in wanted]
        return None, *found


def _arrays_of(q: Any, k: Any, v: Any) -> list[Any]:
    return [q, k, v, *[None] * (ARRAYS - 3)]


# What _Quick.apply ends in. Before that it looks for setup_context, and into tensors that have left a transform; such a
# Function has none, and the extension has read the tensors already. On a short sequence that took a third of the time.
_apply_quick: Final = super(torch.autograd.Function, _Quick).apply


# The same two for torch.func, whose transforms want the context set up apart and a rule for vmap. Apart, because
# torch spends more time on such a Function than on attention of a short sequence.


class _TransformedForward(torch.autograd.Function):
    @staticmethod
    def forward(settings: Settings, rng: Rng, *arrays: Any) -> tuple[Any, Any]:
        return _forward(settings, rng, arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        _save(ctx, inputs[0], inputs[1], inputs[2:], output)

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        return _pull_back(ctx, do, dlse, _TransformedBackward.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], settings: Settings, rng: Rng, *arrays: Any) -> Any:
        apply = _TransformedForward.apply
        size, dims = info.batch_size, in_dims[2:]
        folded = _fold(size, dims, settings, arrays)
        if folded is not None:
            o, lse = apply(settings, rng, *folded)
            return tuple([x.unflatten(0, (size, x.shape[0] // size)) for x in (o, lse)]), (0, 0)
        results = [apply(settings, rng, *_select(arrays, dims, n)) for n in range(size)]
        return (torch.stack([o for o, _ in results]), torch.stack([lse for _, lse in results])), (0, 0)


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Any, ...]:
        return _backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(SECOND_ORDER)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(SECOND_ORDER)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], settings: Settings, rng: Any, wanted: Any, *tensors: Any) -> Any:
        dims = in_dims[3:]
        results = [
            _TransformedBackward.apply(settings, rng, wanted, *_select(tensors, dims, n))
            for n in range(info.batch_size)
        ]
        return tuple([torch.stack(each) for each in zip(*results, strict=True)]), (0,) * len(wanted)


def _select(arrays: Sequence[Any], dims: Sequence[int | None], n: int) -> list[Any]:
    return [array if dim is None else array.select(dim, n) for array, dim in zip(arrays, dims, strict=True)]


def _fold(size: int, dims: Sequence[int | None], settings: Settings, arrays: Sequence[Any]) -> list[Any] | None:
    """q, k, v with the mapped axis folded into batch: one call instead of `size`; None if something depends on b."""
    plain = not (settings.mask or settings.score_mod or settings.dropout_p)
    if not plain or any(array is not None for array in arrays[BIAS:]) or any(arrays[p].ndim < 4 for p in (Q, K, V)):
        return None
    folded: list[Any] = list(arrays)
    for place in (Q, K, V):
        array, dim = arrays[place], dims[place]
        array = array.unsqueeze(0).expand(size, *array.shape) if dim is None else array.movedim(dim, 0)
        folded[place] = array.flatten(0, 1)
    return folded


# ---------------------------------------------------------------------------------------------------- merging


def merge(parts: list[Any], lses: list[Any], order: tuple[int, ...]) -> tuple[Any, Any]:
    """See `tilewise.merge`."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*parts, *lses)):
        o, lse = _Merge.apply(order, *parts, *lses)
        return o, lse
    return _merged(parts, lses, order)


def _merged(parts: Sequence[Any], lses: Sequence[Any], order: tuple[int, ...]) -> tuple[Any, Any]:
    if parts[0].device.type == "cpu" and not traced():
        return merge_arrays(parts, lses, order)
    return _merge_in_torch(parts, lses, order)


def _merge_in_torch(parts: Sequence[Any], lses: Sequence[Any], order: tuple[int, ...]) -> tuple[Any, Any]:
    """The same as merge_arrays in torch's operations, in the dtype of lse, one part after the other."""
    dtype = torch.promote_types(lses[0].dtype, torch.float32)
    back = inverse(order[:-1])  # from the axes of lse to those of o
    wide = [lse.to(dtype) for lse in lses]
    largest = wide[0]
    for lse in wide[1:]:
        largest = torch.maximum(largest, lse)
    # Rows that no part has keys for: exp(-inf - 0) = 0, where -inf - -inf would be NaN.
    shift = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = [torch.exp(lse - shift) for lse in wide]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    merged = None
    for part, lse, weight in zip(parts, wide, weights, strict=True):
        share = (weight / total).permute(back).unsqueeze(-1)
        # Selected, since a part without keys may hold anything.
        term = torch.where(torch.isneginf(lse).permute(back).unsqueeze(-1), 0.0, share * part.to(dtype))
        merged = term if merged is None else merged + term
    o = empty_in_order(parts[0], tuple(parts[0].shape))
    o.copy_(merged)
    return o, shift + torch.log(total)


class _Merge(torch.autograd.Function):
    """(order, *o_parts, *lse_parts) -> (o, lse). The backward is made of torch operations, so it can be differentiated."""

    @staticmethod
    def forward(ctx: Any, order: tuple[int, ...], *tensors: Any) -> tuple[Any, Any]:
        count = len(tensors) // 2
        o, lse = _merged(tensors[:count], tensors[count:], order)
        ctx.order = order
        ctx.save_for_backward(*tensors, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
        *tensors, o, lse = ctx.saved_tensors
        count = len(tensors) // 2
        back = inverse(ctx.order[:-1])
        do, o = do.to(lse.dtype), o.to(lse.dtype)
        d_parts: list[Any] = []
        d_lses: list[Any] = []
        for part, part_lse in zip(tensors[:count], tensors[count:], strict=True):
            # A part without keys has weight 0; selected, since -inf - -inf is NaN.
            empty = torch.isneginf(part_lse)
            weight = torch.where(
                empty, 0.0, torch.exp(part_lse.to(lse.dtype).masked_fill(empty, 0.0) - torch.where(empty, 0.0, lse))
            )
            spread = weight.permute(back).unsqueeze(-1)
            d_parts.append((spread * do).to(part.dtype))
            # d lse_n = weight * (do . (o_n - o) + dlse); what an empty part's o holds does not count.
            change = torch.where(empty.permute(back).unsqueeze(-1), 0.0, part.to(lse.dtype) - o)
            along = (do * change).sum(-1).permute(tuple(ctx.order[:-1]))
            d_lses.append((weight * torch.where(empty, 0.0, along + dlse)).to(part_lse.dtype))
        return (None, *d_parts, *d_lses)
