"""torch.library operators `tilewise::attention_forward` and `tilewise::attention_backward`, for code that is traced.

torch.compile, torch.export and dispatch modes (FakeTensorMode, make_fx) see a call of `tilewise.attention` as one
operator. Its schema holds everything by value: tensors, numbers, and masks and score functions as one line of text with
arrays and scalars. `import tilewise.torch_ops` registers the operators, for a process that loads an exported program;
otherwise the first tensor does. Plain calls take a shorter way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ._arrays import ANYWHERE, _order, accumulator, as_array, inverse
from ._attention import _output_shapes, run_backward, run_forward
from ._errors import UnsupportedError
from ._problem import ARRAYS, BIAS, SINKS, SLOPES, K, Q, Rng, Settings, V

_INPUTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? q_offset, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, Tensor? leftpad_kv, "
    "Tensor[] arrays, Tensor? seed_offset, int seed, int offset, int layout, float? softmax_scale, bool causal, "
    "float softcap, SymInt window_left, SymInt window_right, SymInt chunk, int q_offset_mode, SymInt q_offset_value, "
    "str mask, str score_mod, float[] scalars, int first_mod_array, SymInt max_seqlen_q, SymInt max_seqlen_kv, "
    "float dropout_p, bool deterministic, bool batch_invariant, str backend, bool validate"
)
_NUMBERS: Final = ARRAYS + 2  # place of the first argument after the tensors
_SECOND_ORDER: Final = (
    "second derivatives of attention: got a request to differentiate its gradient; allowed: first derivatives. See "
    "docs/python.md#second-derivatives."
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
    arrays = [*args[:ARRAYS], *args[ARRAYS]]
    seed_offset = args[ARRAYS + 1]
    (
        seed, offset, s.layout, s.softmax_scale, s.causal, s.softcap, left, right, s.chunk, s.q_offset_mode,
        s.q_offset_value, s.mask, s.score_mod, scalars, s.first_mod_array, s.max_seqlen_q, s.max_seqlen_kv, s.dropout_p,
        s.deterministic, s.batch_invariant, s.backend, s.validate,
    ) = args[_NUMBERS:]  # fmt: skip
    s.is_torch = True
    place = arrays[Q].device
    s.cuda = place.index if place.type == "cuda" else -1
    s.window = None if left == right == -1 else (left, right)
    s.scalars = tuple(scalars)
    s.array_names = ()
    s.mod_names = ("",) * (len(args[ARRAYS]) - s.first_mod_array) if s.score_mod else ()
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


@torch.library.impl("tilewise::attention_forward", ("cpu", "cuda"))
def _forward(*args: Any) -> tuple[Any, Any]:
    settings, arrays, rng = _unpack(args)
    o, lse = run_forward(settings, [*map(_plain, arrays)], rng, True)
    assert lse is not None
    return o, lse


@torch.library.impl("tilewise::attention_backward", ("cpu", "cuda"))
def _backward(do: Any, o: Any, lse: Any, dlse: Any, *args: Any) -> list[Any]:
    *inputs, wanted = args
    settings, arrays, rng = _unpack(inputs)
    gradients = run_backward(
        settings, [*map(_plain, arrays)], rng, _plain(do), _plain(o), _plain(lse), _plain(dlse), wanted
    )
    return [gradients[place] for place in wanted]


def _like(array: Any, shape: tuple[Any, ...]) -> Any:
    """As _arrays.empty_in_order, for sizes that may be symbols."""
    if array.is_contiguous():
        return array.new_empty(shape)
    order = _order.__wrapped__(tuple(array.shape), tuple(array.stride()))
    return array.new_empty([shape[axis] for axis in order]).permute(inverse(order))


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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    *optional, arrays, seed_offset = inputs[:_NUMBERS]
    ctx.given = [array is not None for array in (*optional, seed_offset)]
    ctx.numbers = inputs[_NUMBERS:]
    tensors = [array for array in (*optional, seed_offset) if array is not None]
    ctx.save_for_backward(*tensors, *arrays, *output)
    ctx.set_materialize_grads(False)


def _pull_back(ctx: Any, do: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, o, lse = ctx.saved_tensors
    *optional, seed_offset = [tensors.pop(0) if given else None for given in ctx.given]
    inputs = (*optional, tensors, seed_offset, *ctx.numbers)
    # torch takes an empty list of numbers for one of tensors.
    result: list[Any] = [[] if isinstance(each, (list, tuple)) and not each else None for each in inputs]
    in_list: list[Any] = [None] * len(tensors)
    result[ARRAYS] = in_list
    needed = ctx.needs_input_grad
    needed_in_list = needed[ARRAYS] if isinstance(needed[ARRAYS], (list, tuple)) else [needed[ARRAYS]] * len(tensors)
    wanted = [place for place in (Q, K, V, BIAS, SLOPES, SINKS) if needed[place] and optional[place] is not None]
    settings, _, _ = _unpack(inputs)
    if settings.mod_names:
        mod = range(settings.first_mod_array, len(tensors))
        wanted += [ARRAYS + n for n in mod if needed_in_list[n] and tensors[n].is_floating_point()]
    if wanted and (do is not None or dlse is not None):
        if do is None:
            do = o.new_zeros(()).expand(o.shape)
        found = torch.ops.tilewise.attention_backward(do, o, lse, dlse, *inputs, wanted)
        for place, gradient in zip(wanted, found, strict=True):
            if place < ARRAYS:
                result[place] = gradient
            else:
                in_list[place - ARRAYS] = gradient
    return tuple(result)


def _refuse_second(ctx: Any, *gradients: Any) -> Any:
    raise UnsupportedError(_SECOND_ORDER)


torch.library.register_autograd("tilewise::attention_forward", _pull_back, setup_context=_keep)
torch.library.register_autograd("tilewise::attention_backward", _refuse_second)


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


if hasattr(torch.library, "register_vmap"):  # torch >= 2.5
    torch.library.register_vmap("tilewise::attention_forward", _vmap_forward)
    torch.library.register_vmap("tilewise::attention_backward", _vmap_backward)
