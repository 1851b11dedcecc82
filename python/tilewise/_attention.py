"""Attention on NumPy and CuPy arrays and torch tensors: the call, its two halves, and what is built on them.

The method is FlashAttention-2 (Dao 2023, arXiv:2307.08691): tiles of keys pass by a tile of queries with an online
softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), so memory is linear in the sequence lengths, and the backward
pass recomputes the probabilities from q, k and lse. The result is exact: the formula of docs/formula.md.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, TypeVar, Unpack

import numpy as np

from . import _cuda, _ext, _record
from ._arrays import (
    ANYWHERE,
    Array,
    Device,
    accumulator,
    as_array,
    check_output,
    device_of,
    empty,
    empty_in_order,
    in_dtype,
    inverse,
    is_array,
    is_cupy,
    is_float,
    is_torch,
    put_on,
    to_host,
    traced,
    view,
    write,
)
from ._errors import InvalidArgumentError, refuse, refuse_type, refuse_unknown
from ._problem import (
    ARRAYS,
    BIAS,
    CU_KV,
    CU_Q,
    LEFTPAD,
    NAMES,
    OPTION_NAMES,
    SINKS,
    SLOPES,
    USED_KV,
    USED_Q,
    Call,
    Causal,
    K,
    Layout,
    Options,
    Q,
    Rng,
    ScoreMod,
    Settings,
    V,
    call_from,
    check_seed,
    integer,
    renamed,
)  # fmt: skip
from ._trace import Function

F = TypeVar("F", bound=Callable[..., Any])


def _named_options(function: F) -> F:
    """Hides `**unknown` from help() and signature(): it only exists to name the nearest option in the error."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


# --------------------------------------------------------------------------------------------------- running


def draw_seed(like: Array, device: Device) -> Rng:
    """A seed from the generator that the user controls: torch.manual_seed, or numpy.random.seed. On a GPU it is drawn
    there, so that nobody waits and every replay of a CUDA graph has another."""
    if not is_torch(like):
        return int(np.random.randint(0, 2**63, dtype=np.int64)), 0  # noqa: NPY002 (the global generator, on purpose)
    torch = sys.modules["torch"]
    if device is not None:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return torch.stack([seed, torch.zeros_like(seed)]) if traced() else (int(seed.item()), 0)


def rng_of(call: Call) -> Rng:
    """(seed, offset) of a call: drawn if dropout needs one and none was given."""
    if not call.settings.dropout_p:
        return 0, 0
    return draw_seed(call.arrays[Q], call.device) if call.seed is None else call.seed


def rng_array(call: Call, rng: Rng) -> Array | None:
    """What attention_forward returns as rng: int64[2] of the inputs' kind and device, None without dropout."""
    if not call.settings.dropout_p:
        return None
    if not isinstance(rng, tuple):
        return rng
    if not call.settings.is_torch:
        return np.array(rng, np.int64) if call.device is None else put_on(call.device, np.array(rng, np.int64))
    torch = sys.modules["torch"]
    if call.device is None:
        return torch.tensor(rng, device="cpu")
    array = torch.empty(2, dtype=torch.int64, device=call.device)
    for n, number in enumerate(rng):
        array[n : n + 1].fill_(number)  # a kernel each; a copy from here would wait
    return array


def given_rng(call: Call, rng: Any) -> Rng:
    """What the backward pass is told of dropout: `rng`, else the option seed."""
    if not call.settings.dropout_p:
        return 0, 0
    if rng is not None:
        return check_seed(rng, call.device)
    if call.seed is None:
        refuse("rng", "None with dropout_p > 0", "the rng that attention_forward returned")
    return call.seed


def _output_shapes(
    settings: Settings, arrays: Sequence[Array | None]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of o and lse. Inputs of a wrong rank get any shape: the C++ side refuses them before it looks at o."""
    q, v = arrays[Q], arrays[V]
    assert q is not None and v is not None
    shape = tuple(q.shape)
    o = (*shape[:-1], v.shape[-1] if v.ndim else 0) if shape else ()
    if arrays[CU_Q] is not None:
        return o, (shape[1], shape[0]) if len(shape) == 3 else None
    if len(shape) != 4:
        return o, None
    return o, shape[:3] if settings.layout else (shape[0], shape[2], shape[1])


def run_forward(
    settings: Settings, arrays: Sequence[Array | None], rng: Rng, want_lse: bool, out: Array | None = None
) -> tuple[Array, Array | None]:
    """o and, if wanted, lse."""
    if settings.cuda >= 0 and settings.backend == "reference":
        return _forward_on_host(settings, arrays, rng, want_lse, out)
    if _record.FILE:
        _record.forward(settings, arrays, rng)
    q = arrays[Q]
    assert q is not None
    o_shape, lse_shape = _output_shapes(settings, arrays)
    o = empty_in_order(q, o_shape) if out is None else out
    lse = empty(q, lse_shape, accumulator(q)) if want_lse and lse_shape is not None else None
    try:
        problem = settings.problem(arrays, rng)
        if settings.cuda < 0:
            _ext.forward(problem, view(o), None if lse is None else view(lse))
        else:
            _cuda.forward(problem, view(o), None if lse is None else view(lse), device_of(q))
    except InvalidArgumentError as error:
        renamed(settings, error)
    return o, lse


def run_backward(
    settings: Settings,
    arrays: Sequence[Array | None],
    rng: Rng,
    do: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    wanted: Iterable[int],
    buffers: Mapping[int, Array] | None = None,
    run: Callable[[_ext.Problem, list[Any], list[Any]], None] | None = None,
) -> dict[int, Array]:
    """Gradients of the arrays whose places are wanted, by place."""
    if settings.cuda >= 0 and settings.backend == "reference" and run is None:
        return _backward_on_host(settings, arrays, rng, do, o, lse, dlse, wanted, buffers)
    if _record.FILE:
        _record.backward(settings, arrays, rng, do, dlse, wanted)
    gradients: dict[int, Array] = {}
    for place in wanted:
        given = buffers.get(place) if buffers else None
        array = arrays[place]
        assert array is not None
        gradients[place] = empty_in_order(array, tuple(array.shape)) if given is None else given
    places = (Q, K, V, BIAS, SLOPES, SINKS)
    views: list[Any] = [view(do, "do"), view(o, "o"), view(lse, "lse"), None if dlse is None else view(dlse, "dlse")]
    views.extend([view(gradients[place]) if place in gradients else None for place in places])
    darrays: list[Any] = []
    if any(place >= ARRAYS for place in gradients):
        darrays = [view(gradients[place]) if place in gradients else None for place in range(ARRAYS, len(arrays))]
    try:
        problem = settings.problem(arrays, rng)
        if run is not None:
            run(problem, views, darrays)
        elif settings.cuda < 0:
            _ext.backward(problem, views, darrays)
        else:
            _cuda.backward(problem, views, darrays, device_of(do))
    except InvalidArgumentError as error:
        renamed(settings, error)
    return gradients


# The formula itself is there on the CPU only. For tensors on a GPU it is taken to the copies of them in host memory.


def _rng_on_host(rng: Rng) -> Rng:
    return rng if isinstance(rng, tuple) else tuple(rng.tolist())


def _forward_on_host(
    settings: Settings, arrays: Sequence[Array | None], rng: Rng, want_lse: bool, out: Array | None
) -> tuple[Array, Array | None]:
    q = arrays[Q]
    assert q is not None
    device = device_of(q)
    o, lse = run_forward(settings.on_host(), [*map(to_host, arrays)], _rng_on_host(rng), want_lse)
    o = put_on(device, o)
    return o if out is None else write(out, o), None if lse is None else put_on(device, lse)


def _backward_on_host(
    settings: Settings,
    arrays: Sequence[Array | None],
    rng: Rng,
    do: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    wanted: Iterable[int],
    buffers: Mapping[int, Array] | None,
) -> dict[int, Array]:
    here, pair = [*map(to_host, arrays)], _rng_on_host(rng)
    found = run_backward(settings.on_host(), here, pair, to_host(do), to_host(o), to_host(lse), to_host(dlse), wanted)
    found = {place: put_on(device_of(do), gradient) for place, gradient in found.items()}
    return {
        place: write(buffers[place], gradient) if buffers and place in buffers else gradient
        for place, gradient in found.items()
    }


def checked_out(out: Any, name: str, call: Call) -> Array | None:
    if out is None:
        return None
    if is_torch(out) != call.settings.is_torch:
        check_output(out, name, ANYWHERE)  # refuses what is no array at all
        refuse_type(name, f"a {type(out).__name__}", "the kind of q, k and v")
    return check_output(out, name, call.device)


# --------------------------------------------------------------------------------------------------- attention


_torch_attention: Callable[..., Any] | None = None


def _import_torch() -> Callable[..., Any]:
    """_torch.attention. Found once: the import statement in every call would cost a microsecond."""
    global _torch_attention
    from . import _torch

    _torch_attention = _torch.attention
    return _torch_attention


@_named_options
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: Layout = "bshd",
    causal: Causal = False,
    q_offset: Any = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    chunk: int = 0,
    mask: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: ScoreMod | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_kv: Any = None,
    seqused_q: Any = None,
    seqused_kv: Any = None,
    leftpad_kv: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
    validate: bool = False,
    **unknown: Never,
) -> Any:
    """Exact attention, softmax(scale * q k^T, masked) v, in memory linear in the sequence lengths.

    For batch b, query head h, its KV head g = h // (num_heads_q / num_heads_kv), query i at position
    t = i + q_offset[b], key j at position j::

        x  = softmax_scale * <q_i, k_j>
        x  = softcap * tanh(x / softcap)            if softcap > 0
        x += bias[b, h, i, j]
        x -= alibi_slopes[b, h] * |t - j|
        x  = score_mod(x, b, h, i, j, s)
        x  = x where visible, else -inf             mask, causal, window, chunk, lengths
        lse = log(sum_j exp(x) + exp(sinks[h]))     natural logarithm
        p  = exp(x - lse);  p = dropout(p)
        o  = sum_j p v_j

    A query that sees no key gives o = 0, lse = -inf (or its sink) and no gradient. Method: FlashAttention-2 (Dao
    2023, arXiv:2307.08691).

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], or as `layout` says, or packed [total_q, num_heads_q,
            head_dim_qk] with cu_seqlens_q. NumPy array, torch tensor on the CPU or a CUDA device, or CuPy
            array; float64, float32, float16 or bfloat16; any strides.
        k: [batch, seqlen_kv, num_heads_kv, head_dim_qk] or packed with cu_seqlens_kv; num_heads_q is a multiple of
            num_heads_kv. Kind, dtype and device of q; so are all other arrays of the call on the device of q.
        v: like k, with head_dim_v, which may differ from head_dim_qk.
        layout: "bshd" = [batch, seqlen, heads, dim], "bhsd" = [batch, heads, seqlen, dim], for q, k, v, out.
        causal: True hides keys j > t. "top_left" is short for causal=True, q_offset="top_left".
        q_offset: position of query 0: "bottom_right" = seqlen_kv - seqlen_q (the last query sees the last key),
            "top_left" = 0, an int, or an integer array [batch].
        window: (left, right): t - left <= j <= t + right; -1 = unbounded. The latest w keys are (w - 1, 0).
        chunk: > 0: only keys of the same chunk, j // chunk == t // chunk.
        mask: of `tilewise.masks`, joined by & | ~; or a bool or integer array that broadcasts to [batch,
            num_heads_q, seqlen_q, seqlen_kv], true = visible. ANDed with causal, window and chunk.
        softmax_scale: default 1 / sqrt(head_dim_qk).
        softcap: 0 = off.
        bias: float array of any float dtype that broadcasts to [batch, num_heads_q, seqlen_q, seqlen_kv]. Has a
            gradient.
        alibi_slopes: float [num_heads_q] or [batch, num_heads_q]. Has a gradient.
        sinks: float [num_heads_q]: one more logit per head in the denominator. Has a gradient.
        score_mod: function f(x, b, h, i, j, s) -> x, traced once into an expression (see `tilewise.score_mod`).
        cu_seqlens_q, cu_seqlens_kv: int32 or int64 [batch + 1], prefix sums of the lengths of packed sequences. May
            be given for q alone.
        max_seqlen_q, max_seqlen_kv: sizing hints, int or 0-d tensor; never needed.
        seqused_q, seqused_kv: int32 or int64 [batch]: only the first rows of each sequence are part of it.
        leftpad_kv: int32 or int64 [batch]: rows of k and v before it are not part of the sequence.
        dropout_p: probability in [0, 1), rounded to a multiple of 1/65536.
        seed: None (from the global generator of torch, for other arrays NumPy's; in torch anew in every replay of a CUDA
            graph), an int, or int64[2] (seed, offset), which is left on its device.
        deterministic: two runs give the same bits. The CPU always does; torch.use_deterministic_algorithms sets it.
        batch_invariant: bits of a row depend on its q and its visible keys and values only.
        return_lse: return (o, lse); lse float32 (float64 for float64 inputs), [batch, num_heads_q, seqlen_q] or packed
            [num_heads_q, total_q]. Has a gradient.
        out: array that o is written to, its dtype and shape; not with gradients.
        backend: None = the best; or the name of an implementation ("reference", "cpu_tiled").
        validate: also checks what would need a synchronisation on a GPU.

    Returns:
        o, of the kind and dtype of q, its shape with head_dim_v, its axes in memory in the order of q's; or (o, lse).
        In torch o and lse are differentiable once, with respect to q, k, v, bias, alibi_slopes, sinks and the float
        arrays that score_mod captured; `tilewise.torch_ops.composite` any number of times.

    Raises:
        InvalidArgumentError (ValueError): a shape, dtype or value; ArgumentTypeError (TypeError): an object of the wrong
        kind, or an unknown option; UnsupportedError (NotImplementedError): nothing on this machine takes the problem.
    """
    if unknown:
        refuse_unknown("attention", unknown, OPTION_NAMES | {"return_lse", "out"})
    options = (
        layout, causal, q_offset, window, chunk, mask, softmax_scale, softcap, bias, alibi_slopes, sinks, score_mod,
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, seqused_q, seqused_kv, leftpad_kv, dropout_p, seed,
        deterministic, batch_invariant, backend, validate,
    )  # fmt: skip
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        # A compiler must not see _torch_attention: it compiles again when that changes.
        if torch.compiler.is_dynamo_compiling():
            from . import _torch

            return _torch.traced_attention(q, k, v, options, return_lse, out)
        return (_torch_attention or _import_torch())(q, k, v, options, return_lse, out)
    call = Call(q, k, v, *options)
    out = checked_out(out, "out", call)
    o, lse = run_forward(call.settings, call.arrays, rng_of(call), return_lse, out)
    return (o, lse) if return_lse else o


def attention_forward(q: Any, k: Any, v: Any, *, out: Any = None, **options: Unpack[Options]) -> tuple[Any, Any, Any]:
    """The forward pass alone, without autograd: (o, lse, rng).

    rng is the int64[2] (seed, offset) that dropout used, to be given to `attention_backward`; None without dropout.
    Arguments as `attention`.
    """
    record = is_torch(q) and traced()
    call = call_from("attention_forward", q, k, v, options, meta=record)
    rng = rng_of(call)
    if record:
        from . import _torch

        with sys.modules["torch"].no_grad():
            o, lse = _torch.recorded_forward(call.settings, call.arrays, rng)
        return (o if out is None else out.copy_(o)), lse, rng_array(call, rng)
    with _no_grad(call):
        o, lse = run_forward(call.settings, call.arrays, rng, True, checked_out(out, "out", call))
    return o, lse, rng_array(call, rng)


@dataclass(frozen=True, slots=True)
class Gradients:
    """What `attention_backward` returns. None = not wanted, or not an input of the call."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None
    dsinks: Any = None
    #: by the name that score_mod captured the array under
    captured: dict[str, Any] = field(default_factory=dict)


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    rng: Any = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    wanted: Iterable[str] | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """The backward pass alone. o, lse and rng are what `attention_forward` returned for the same arguments.

    Args:
        do: gradient of o, any strides.
        dlse: gradient of lse.
        dq, dk, dv: arrays that the gradients are written to, shape and dtype of q, k, v.
        wanted: names of the inputs whose gradients are computed, out of "q", "k", "v", "bias", "alibi_slopes", "sinks"
            and the names of arrays captured by score_mod. Default: all that are there.
        options: as `attention`.

    Probabilities are recomputed from q, k and lse (Dao 2023, arXiv:2307.08691, algorithm 2); dS = P * (dP - D + dlse)
    with D = rowsum(o * do).
    """
    record = is_torch(q) and traced()
    call = call_from("attention_backward", q, k, v, options, meta=record)
    settings, device = call.settings, call.device
    pair = given_rng(call, rng)
    places = _wanted_places(call, wanted)
    if record:
        from . import _torch

        with sys.modules["torch"].no_grad():
            found = _torch.recorded_backward(settings, call.arrays, pair, do, o, lse, dlse, places)
        for place, given in ((Q, dq), (K, dk), (V, dv)):
            if given is not None:
                found[place] = given.copy_(found[place])
        return _gradients(call, found)
    buffers: dict[int, Array] = {}
    for place, name, given in ((Q, "dq", dq), (K, "dk", dk), (V, "dv", dv)):
        array = checked_out(given, name, call)
        if array is not None:
            buffers[place] = array
            if place not in places:
                refuse(name, "an array, though the gradient is not wanted", f"{name}, with {name[1:]!r} in wanted")
    do, o, lse = (as_array(x, name, device=device) for x, name in ((do, "do"), (o, "o"), (lse, "lse")))
    dlse = None if dlse is None else as_array(dlse, "dlse", device=device)
    with _no_grad(call):
        gradients = run_backward(settings, call.arrays, pair, do, o, lse, dlse, places, buffers)
    return _gradients(call, gradients)


def _wanted_places(call: Call, wanted: Iterable[str] | None) -> list[int]:
    known = {NAMES[place]: place for place in (Q, K, V, BIAS, SLOPES, SINKS) if call.arrays[place] is not None}
    first = ARRAYS + call.settings.first_mod_array
    for n, name in enumerate(call.settings.mod_names):
        array = call.arrays[first + n]
        if is_float(array):
            if name in known and wanted is not None:
                refuse("score_mod", f"a captured array named {name!r}", "another name, to tell it from the argument")
            known[f"captured {name}" if name in known else name] = first + n
    if wanted is None:
        return list(known.values())
    names = list(wanted)
    for name in names:
        if name not in known:
            refuse("wanted", repr(name), ", ".join(known))
    return [known[name] for name in dict.fromkeys(names)]


def _gradients(call: Call, by_place: Mapping[int, Array]) -> Gradients:
    first = ARRAYS + call.settings.first_mod_array
    captured = {name: by_place[first + n] for n, name in enumerate(call.settings.mod_names) if first + n in by_place}
    dq, dk, dv, dbias, dalibi_slopes, dsinks = (by_place.get(place) for place in (Q, K, V, BIAS, SLOPES, SINKS))
    return Gradients(dq, dk, dv, dbias, dalibi_slopes, dsinks, captured)


class _no_grad:
    """torch.no_grad() for calls on tensors, nothing for NumPy."""

    def __init__(self, call: Call) -> None:
        self._context = sys.modules["torch"].no_grad() if call.settings.is_torch else None

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


def score_mod(function: Callable[..., Any], **captured: Any) -> Function:
    """A score function f(x, b, h, i, j, s) -> x with what it reads, for the option `score_mod`.

    The function is called once, with traced values: the score x (a real number) and the integers b (batch or number of
    the sequence), h (query head), i and j (row and key, counted within the sequence). It becomes an expression that runs
    in the kernels, and its derivative is taken on the expression. `s` has `seqlen_q`, `seqlen_kv`, `q_offset`,
    `head_kv`, and what is captured by keyword: numbers, which are run-time values, and arrays of up to five axes. Float
    arrays have gradients. An index out of range gives 0, and no gradient. See `tilewise.ops`.

        bias = tilewise.score_mod(lambda x, b, h, i, j, s: x + s.table[h, s.q_offset + i - j], table=table)
        o = tilewise.attention(q, k, v, score_mod=bias, causal=True)
    """
    return Function("score_mod", function, captured)


def reference(q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, **options: Unpack[Options]) -> Any:
    """The formula in float64, read literally: slow, and what every implementation is tested against.

    Arguments as `attention`; q, k and v are converted to float64, and so is the result. Differentiable in torch. Works in
    host memory: tensors on a GPU are copied there and back, with a wait.
    """
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        refuse_unknown("reference", unknown, OPTION_NAMES | {"return_lse", "out"})
    if options.get("backend") not in (None, "reference"):
        refuse("backend", repr(options["backend"]), "'reference'", "tilewise.attention takes other backends.")
    wide = [_float64(as_array(each, name, device=ANYWHERE)) for each, name in ((q, "q"), (k, "k"), (v, "v"))]
    options["backend"] = "reference"
    return attention(*wide, return_lse=return_lse, out=out, **options)


def _float64(array: Array) -> Array:
    if not is_float(array):
        return array  # attention refuses it, by its own dtype
    return in_dtype(array, "float64")


# ----------------------------------------------------------------------------------------- around attention


def _lengths(call: Call, cu: int, used: int, pad: int | None = None) -> np.ndarray[Any, Any]:
    """Effective lengths of packed sequences, on the host."""
    length = np.diff(np.asarray(call.arrays[cu]))
    if call.arrays[used] is not None:
        length = np.asarray(call.arrays[used])
    if pad is not None and call.arrays[pad] is not None:
        length = np.maximum(length - np.asarray(call.arrays[pad]), 0)
    return length


def _index_list(value: Any, argument: str, limit: int) -> list[int]:
    if value is None:
        return list(range(limit))
    if is_array(value):
        value = value.reshape(-1).tolist()
    if isinstance(value, int):
        value = [value]
    return [integer(each, argument) for each in value]


def attn_probs(
    q: Any, k: Any, lse: Any = None, *, rows: Any = None, heads: Any = None, **options: Unpack[Options]
) -> Any:
    """Probabilities p of chosen query rows and heads, before dropout: [batch, heads, rows, seqlen_kv].

    Args:
        q, k, options: as `attention`.
        lse: what attention returned; computed if not given.
        rows: indices of queries within their sequence; default all.
        heads: indices of query heads; default all.

    Returns:
        float32 (float64 for float64 inputs); 0 where a key is hidden, past the sequence, or the row does not exist. Packed
        calls: the last axis is as long as the longest sequence. Works in host memory: tensors on a GPU are copied there
        and back, with a wait.
    """
    call = call_from("attn_probs", q, k, k, options)
    lse = None if lse is None else as_array(lse, "lse", device=call.device)
    if (device := call.device) is not None:
        call.settings, call.arrays, call.device = call.settings.on_host(), [*map(to_host, call.arrays)], None
        lse = to_host(lse)
    q, k = call.arrays[Q], call.arrays[K]
    bhsd = bool(call.settings.layout)
    if call.arrays[CU_Q] is not None:
        limit = int(max(_lengths(call, CU_Q, USED_Q), default=0))
    else:
        limit = q.shape[2 if bhsd else 1] if q.ndim == 4 else 0
    if call.arrays[CU_KV] is not None:
        keys = int(max(_lengths(call, CU_KV, USED_KV, LEFTPAD), default=0))
    else:
        keys = k.shape[2 if bhsd else 1] if k.ndim == 4 else 0
    num_heads = q.shape[1 if bhsd and q.ndim == 4 else -2] if q.ndim >= 3 else 0
    cu_seqlens = call.arrays[CU_Q]
    batch = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    row_list, head_list = _index_list(rows, "rows", limit), _index_list(heads, "heads", num_heads)
    with _no_grad(call):
        p = empty(q, (batch, len(head_list), len(row_list), keys), accumulator(q))
        try:
            _ext.attn_probs(call.problem(), None if lse is None else view(lse, "lse"), row_list, head_list, view(p))
        except InvalidArgumentError as error:
            renamed(call.settings, error)
    return p if device is None else put_on(device, p)


def dropout_mask(batch: int, num_heads_q: int, seqlen_q: int, seqlen_kv: int, *, dropout_p: float, seed: Any) -> Any:
    """The elements that dropout keeps: bool [batch, num_heads_q, seqlen_q, seqlen_kv].

    A function of (seed, offset, b, h, i, j) alone: Philox4x32-7 (Salmon et al., SC 2011), the same for every backend,
    tiling and layout. Kept probabilities are scaled by 65536 / (65536 - round(65536 * dropout_p)).

    Args:
        seed: an int, or int64[2] (seed, offset) such as the rng that `attention_forward` returned. A torch tensor or
            a CuPy array gives one on its device (made in host memory, with a wait).
    """
    if seed is None:
        refuse_type("seed", "None", "an int, or int64[2] (seed, offset)")
    shape = tuple(integer(n, name) for n, name in (
        (batch, "batch"), (num_heads_q, "num_heads_q"), (seqlen_q, "seqlen_q"), (seqlen_kv, "seqlen_kv")
    ))  # fmt: skip
    if min(shape) < 0:
        refuse("shape", shape, "extents >= 0")
    keep = np.empty(shape, np.bool_)
    number, offset = check_seed(to_host(seed) if is_torch(seed) or is_cupy(seed) else seed)
    _ext.dropout_mask(number, offset, dropout_p, view(keep))
    if is_torch(seed):
        return sys.modules["torch"].from_numpy(keep).to(seed.device)
    return put_on(device_of(seed), keep) if is_cupy(seed) else keep


def merge(o_parts: Any, lse_parts: Any, *, layout: Layout = "bshd") -> tuple[Any, Any]:
    """Joins results over disjoint sets of keys into the result over all of them: (o, lse).

    o = sum_n exp(lse_n - lse) o_n with lse = log(sum_n exp(lse_n)), in the order of the parts. A part with
    lse = -inf contributes nothing, whatever its o holds. Differentiable in torch, more than once.

    Args:
        o_parts: list of outputs of `attention` in `layout` or packed, or one array with the parts as first axis.
        lse_parts: their lse, in the same order.

    Parts made with `sinks` must have the sinks in one of them only.
    """
    parts = _parts(o_parts, "o_parts")
    lses = _parts(lse_parts, "lse_parts")
    if len(parts) != len(lses) or not parts:
        refuse(
            "o_parts, lse_parts", f"{len(parts)} and {len(lses)} parts", "as many of one as of the other, at least one"
        )
    if any(is_cupy(each) for each in (*parts, *lses)):
        advice = "torch.from_dlpack(x) makes a tensor of the same memory."
        refuse_type("o_parts, lse_parts", "a cupy.ndarray", "numpy.ndarray or torch.Tensor", advice)
    tensor = is_torch(parts[0])
    if any(is_torch(each) != tensor for each in (*parts, *lses)):
        refuse_type("o_parts, lse_parts", "NumPy arrays and torch tensors mixed", "one kind")
    if tensor and any(each.device != parts[0].device for each in (*parts, *lses)):
        places = sorted({str(each.device) for each in (*parts, *lses)})
        refuse("o_parts, lse_parts", f"tensors on {', '.join(places)}", "one device")
    rank = parts[0].ndim
    if rank not in (3, 4) or layout not in ("bshd", "bhsd"):
        refuse("o_parts", f"rank {rank}, layout {layout!r}", "rank 4 in layout 'bshd' or 'bhsd', or packed of rank 3")
    # Axes of lse are [batch, heads, rows] or [heads, total]; those of o without its last are put in the same order.
    order = (0, 1, 2, 3) if rank == 4 and layout == "bhsd" else (0, 2, 1, 3) if rank == 4 else (1, 0, 2)
    rows = tuple(parts[0].shape[axis] for axis in order[:-1])
    for n, (o, lse) in enumerate(zip(parts, lses, strict=True)):
        if o.shape != parts[0].shape or o.dtype != parts[0].dtype:
            refuse(
                f"o_parts[{n}]",
                f"{o.dtype} {list(o.shape)}",
                f"{parts[0].dtype} {list(parts[0].shape)}, as the first part",
            )
        if tuple(lse.shape) != rows or lse.dtype != lses[0].dtype:
            refuse(
                f"lse_parts[{n}]",
                f"{lse.dtype} {list(lse.shape)}",
                f"{lses[0].dtype} {list(rows)}, one per row and head of o",
            )
    if not is_float(lses[0]) or not is_float(parts[0]):
        refuse("o_parts, lse_parts", f"{parts[0].dtype} and {lses[0].dtype}", "float dtypes")
    if tensor:
        from . import _torch

        return _torch.merge(parts, lses, order)
    return merge_arrays(parts, lses, order)


def _parts(value: Any, name: str) -> list[Array]:
    if isinstance(value, np.ndarray) or is_torch(value):
        value = list(as_array(value, name, meta=traced(), device=ANYWHERE))
    return [as_array(each, f"{name}[{n}]", meta=traced(), device=ANYWHERE) for n, each in enumerate(value)]


def merge_arrays(parts: Sequence[Array], lses: Sequence[Array], order: tuple[int, ...]) -> tuple[Array, Array]:
    """The C call on NumPy arrays or tensors of checked shapes."""
    first = parts[0]
    count, dim = len(parts), first.shape[-1]
    shape = tuple([first.shape[axis] for axis in order])
    rows = math.prod(shape[:-1])
    if isinstance(first, np.ndarray):
        transpose = np.transpose
        o_stack = np.stack([transpose(part, order) for part in parts])
        lse_stack = np.stack(lses)
        lse_stack = lse_stack.astype(np.promote_types(lse_stack.dtype, np.float32), copy=False)
    else:
        torch = sys.modules["torch"]
        transpose = torch.permute
        o_stack = torch.stack([transpose(part, order) for part in parts])
        lse_stack = torch.stack(list(lses))
        lse_stack = lse_stack.to(torch.promote_types(lse_stack.dtype, torch.float32))
    o_rows, lse_rows = empty(o_stack, (rows, dim)), empty(lse_stack, (rows,))
    o_stack, lse_stack = o_stack.reshape(count, rows, dim), lse_stack.reshape(count, rows)
    _ext.merge(view(o_stack), view(lse_stack), view(o_rows), view(lse_rows))
    o = empty_in_order(first, tuple(first.shape))
    o[...] = transpose(o_rows.reshape(shape), inverse(order))
    return o, lse_rows.reshape(shape[:-1])
