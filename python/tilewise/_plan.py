"""Deciding apart from running: plans, and questions about what would be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from . import _cuda, _ext, _record
from ._arrays import Array, accumulator, as_array, check_output, empty, empty_in_order, is_torch, view
from ._attention import (
    Gradients,
    _gradients,
    _no_grad,
    _output_shapes,
    _wanted_places,
    checked_out,
    given_rng,
    rng_of,
    run_backward,
)  # fmt: skip
from ._errors import Error, InvalidArgumentError, refuse, refuse_type, refuse_unknown
from ._problem import (
    CU_KV,
    CU_Q,
    LEFTPAD,
    OPTION_NAMES,
    Q_OFFSET,
    USED_KV,
    USED_Q,
    Call,
    Options,
    Q,
    call_from,
    renamed,
)

_TENSOR_OPTIONS = frozenset({
    "q_offset", "bias", "alibi_slopes", "sinks", "mask", "score_mod", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q",
    "max_seqlen_kv", "seqused_q", "seqused_kv", "leftpad_kv", "seed", "softmax_scale",
})  # fmt: skip


class Plan:
    """A decision: implementation, tile sizes and workspace for one kind of problem. Made by `tilewise.plan`.

    Printable. Any number of threads may run one plan at once, each with its own workspace. A plan runs every problem that
    agrees with the planned one in dtypes, head counts, head dims and options; batch, lengths and strides may differ as
    long as the workspace suffices. Gradients are not recorded: use a backward plan.
    """

    def __init__(self, call: Call, options: Mapping[str, Any], backward: bool, lse: bool) -> None:
        self.backward = backward
        self._options = dict(options)
        self._lse = lse
        if call.device is not None:
            _cuda.tell_nvrtc_path()
        try:
            problem = call.problem(data=_has_lengths(call))
            self._plan = _ext.Plan(problem, backward)
        except InvalidArgumentError as error:
            renamed(call.settings, error)
        self._quick: Callable[..., Any] | None = None
        if call.settings.is_torch and not backward:
            from . import _torch

            self._quick = _torch.quick_plan(self._plan, problem, options)

    @property
    def workspace_bytes(self) -> int:
        """Scratch that a run needs."""
        return self._plan.workspace_bytes

    def explain(self) -> str:
        """Implementation and configuration, and the reason of every implementation that declined."""
        return self._plan.explain().rstrip("\n")

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<tilewise plan: {self.explain().splitlines()[0]}>"

    def _call(self, q: Any, k: Any, v: Any, changes: Mapping[str, Any]) -> Call:
        unknown = changes.keys() - _TENSOR_OPTIONS
        if unknown & OPTION_NAMES:
            refuse(
                "run",
                f"the option {', '.join(sorted(unknown))}",
                ", ".join(sorted(_TENSOR_OPTIONS)),
                "What a plan decides on is fixed: make another plan.",
            )
        if unknown:
            refuse_unknown("run", unknown, _TENSOR_OPTIONS)
        return call_from("run", q, k, v, {**self._options, **changes})

    def _scratch(self, workspace: Any, problem: _ext.Problem, call: Call) -> tuple[int, int, int, Any]:
        """(address, bytes, stream, what keeps the memory alive); address 0 = the extension allocates for this run."""
        stream = 0 if call.device is None else _cuda.stream_of(call.device)
        if workspace is None:
            if call.device is None:
                return 0, 0, stream, None
            array = _cuda.workspace(self._plan.workspace_bytes_for(problem), call.device)
            return view(array)[0], int(array.nbytes), stream, array
        array = check_output(workspace, "workspace", call.device)
        size = int(array.nbytes)
        contiguous = array.is_contiguous() if is_torch(array) else array.flags.c_contiguous
        address = view(array)[0]
        if not contiguous or address % 64 or size < self.workspace_bytes:
            refuse(
                "workspace",
                f"{size} bytes at an address of remainder {address % 64} by 64"
                f"{'' if contiguous else ', not contiguous'}",
                f"contiguous memory of at least {self.workspace_bytes} bytes, aligned to 64",
            )
        return address, size, stream, array

    def run(
        self, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, workspace: Any = None, **tensors: Any
    ) -> Any:
        """o, or (o, lse) if the plan was made with return_lse=True or `lse` is given.

        Args:
            out, lse: arrays that the results are written to.
            workspace: contiguous array of at least `workspace_bytes`, aligned to 64 bytes, on the device of q. Default:
                allocated for the run.
            tensors: new arrays or numbers for the options of the plan that carry data (cu_seqlens_q, bias, mask, ...).
        """
        if self.backward:
            refuse_type(
                "plan.run", "a backward plan", "a forward plan", "Use run_backward, or plan(..., backward=False)."
            )
        if self._quick is not None and not tensors:
            found = self._quick(q, k, v, self._lse, out, lse, workspace)
            if found is not None:
                return found
        call = self._call(q, k, v, tensors)
        array = call.arrays[Q]
        o_shape, lse_shape = _output_shapes(call.settings, call.arrays)
        o = empty_in_order(array, o_shape) if out is None else checked_out(out, "out", call)
        given = checked_out(lse, "lse", call)
        if given is None and self._lse and lse_shape is not None:
            given = empty(array, lse_shape, accumulator(array))
        rng = rng_of(call)
        if _record.FILE:
            _record.forward(call.settings, call.arrays, rng)
        with _no_grad(call):
            try:
                problem = call.problem(rng)
                address, size, stream, _memory = self._scratch(workspace, problem, call)
                self._plan.forward(problem, view(o), None if given is None else view(given), address, size, stream)
            except InvalidArgumentError as error:
                renamed(call.settings, error)
        return o if given is None else (o, given)

    def run_backward(
        self,
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
        wanted: Any = None,
        workspace: Any = None,
        **tensors: Any,
    ) -> Gradients:
        """Gradients, as `tilewise.attention_backward`."""
        if not self.backward:
            refuse_type(
                "plan.run_backward", "a forward plan", "a backward plan", "Make it with plan(..., backward=True)."
            )
        call = self._call(q, k, v, tensors)
        pair = given_rng(call, rng)
        buffers: dict[int, Array] = {}
        for place, (name, each) in enumerate((("dq", dq), ("dk", dk), ("dv", dv))):
            array = checked_out(each, name, call)
            if array is not None:
                buffers[place] = array
        device = call.device
        do, o, lse = (as_array(x, name, device=device) for x, name in ((do, "do"), (o, "o"), (lse, "lse")))
        dlse = None if dlse is None else as_array(dlse, "dlse", device=device)

        def run(problem: _ext.Problem, views: list[Any], darrays: list[Any]) -> None:
            address, size, stream, _memory = self._scratch(workspace, problem, call)
            self._plan.backward(problem, views, darrays, address, size, stream)

        with _no_grad(call):
            places = _wanted_places(call, wanted)
            found = run_backward(call.settings, call.arrays, pair, do, o, lse, dlse, places, buffers, run)
        return _gradients(call, found)


def _has_lengths(call: Call) -> bool:
    """Whether the arrays that hold lengths have data; q, k and v need none to be planned for."""
    arrays = [call.arrays[place] for place in (Q, CU_Q, CU_KV, USED_Q, USED_KV, LEFTPAD, Q_OFFSET)]
    return all(not is_torch(array) or _has_data(array) for array in (*arrays, *call.arrays) if array is not None)


def _has_data(tensor: Any) -> bool:
    return tensor.device.type != "meta" and type(tensor).__name__ != "FakeTensor"


def plan(
    q: Any, k: Any, v: Any, *, backward: bool = False, return_lse: bool = False, **options: Unpack[Options]
) -> Plan:
    """Decides how a problem is computed, once, to be run many times.

    q, k, v and the other arrays say shapes and dtypes; tensors on the meta device are enough. Arguments as `attention`;
    `backward` plans the gradients.
    """
    call = call_from("plan", q, k, v, options, meta=True)
    return Plan(call, options, bool(backward), bool(return_lse))


def supports(q: Any, k: Any, v: Any, *, backward: bool = False, **options: Unpack[Options]) -> tuple[bool, list[str]]:
    """Whether this machine can compute the problem, and why not.

    Returns:
        (True, []) or (False, reasons). Options that do not exist raise, as everywhere. Tensors on the meta device are
        enough.
    """
    if unknown := options.keys() - OPTION_NAMES:
        refuse_unknown("supports", unknown, OPTION_NAMES)
    try:
        plan(q, k, v, backward=backward, **options)
    except Error as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return False, lines[1:] if len(lines) > 1 else lines
    return True, []


def explain(q: Any, k: Any, v: Any, *, backward: bool | None = None, **options: Unpack[Options]) -> str:
    """What would be done with a problem: implementation, tile sizes, workspace, and who declined and why.

    backward: None = both passes. Other arguments as `attention`.
    """
    passes = (False, True) if backward is None else (bool(backward),)
    return "\n".join(plan(q, k, v, backward=each, **options).explain() for each in passes)
