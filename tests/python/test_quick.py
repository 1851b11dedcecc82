"""The quick way of calls that repeat: the same bits, gradients and refusals as the general way, and nothing kept."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tilewise
from tilewise import _ext

torch = pytest.importorskip("torch")
from tilewise import _torch  # noqa: E402

pytestmark = pytest.mark.skipif(not _torch._has_quick_calls, reason="this torch has no C functions for DLPack")
ROOT = Path(__file__).parents[2]

OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top_left", "softcap": 3.0},
    {"window": (5, 2), "softmax_scale": 0.3},
    {"chunk": 8, "q_offset": 3},
    {"deterministic": True, "batch_invariant": True},
    {"backend": "reference"},
    {"validate": True, "max_seqlen_q": 20},
]


@pytest.fixture(autouse=True)
def _fresh():
    _ext.clear_quick_calls()
    yield
    _ext.clear_quick_calls()


def qkv(batch=2, seqlen_q=11, seqlen_kv=13, heads=4, heads_kv=2, dim=8, dim_v=6, dtype=torch.float32, grad=False):
    shapes = ((batch, seqlen_q, heads, dim), (batch, seqlen_kv, heads_kv, dim), (batch, seqlen_kv, heads_kv, dim_v))
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


class Ways:
    """Runs one call the general way, and the quick way; notices if the second was not what it should be."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch

    def general(self, call):
        with self._patch.context() as patch:
            patch.setattr(_torch, "_has_quick_calls", False)
            return call()

    def quick(self, call):
        call()  # the first one makes it known

        def general(*_):
            raise AssertionError("a call went the general way")

        with self._patch.context() as patch:
            patch.setattr(_torch, "_attention", general)
            return call()


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


def same(a, b):
    assert type(a) is type(b)
    for x, y in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride() and x.device == y.device
        assert x.requires_grad == y.requires_grad


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits(ways, options, dtype):
    q, k, v = qkv(dtype=dtype)
    for lse in (False, True):
        call = lambda: tilewise.attention(q, k, v, return_lse=lse, **options)  # noqa: B023, E731
        same(ways.quick(call), ways.general(call))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_order_in_memory(ways, layout):
    """o has its axes in memory in the order of q's, whatever that is."""
    q, k, v = qkv(heads=4, heads_kv=4, seqlen_q=4, seqlen_kv=4)
    wide = torch.randn(2, 4, 4, 16)
    views = [
        q,
        q.transpose(1, 2),
        q.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        wide[..., :8],
        wide[..., 1::2],
        q[:, :1].expand(2, 4, 4, 8),
        q[:1].expand(2, -1, -1, -1).transpose(1, 2),
        torch.empty(2, 0, 4, 8),
        torch.empty(2, 4, 0, 8).transpose(1, 2)[:, :0],
    ]
    for each in views:
        heads = each.shape[2 if layout == "bshd" else 1]
        keys = torch.randn(2, 4, max(heads, 1), 8) if layout == "bshd" else torch.randn(2, max(heads, 1), 4, 8)
        call = lambda: tilewise.attention(each, keys, keys, layout=layout, return_lse=True)  # noqa: B023, E731
        same(ways.quick(call), ways.general(call))


def test_axes_by_stride_is_the_rule_of_torch():
    generator = np.random.default_rng(1)
    for _ in range(300):
        shape = tuple(int(n) for n in generator.integers(1, 4, size=4))
        strides = tuple(int(n) for n in generator.choice([0, 1, 2, 3, 6, 12, 24], size=4))
        base = torch.empty_strided(shape, strides)
        like = torch.empty_like(base)
        order = _ext.axes_by_stride(shape, strides)
        made = torch.empty([shape[axis] for axis in order]).permute(tuple(np.argsort(order)))
        if not base.is_contiguous() and torch._debug_has_internal_overlap(base) == 1:
            assert made.stride() == like.stride(), (shape, strides)


def test_known_by_value_and_type(ways):
    q, k, v = qkv()
    for good in ({"causal": True}, {"softcap": 1.0}, {"chunk": 1}, {"window": (1, 0)}):
        ways.quick(lambda good=good: tilewise.attention(q, k, v, **good))
    # Equal in Python to options that are known now, and refused all the same.
    for bad in ({"causal": 1}, {"causal": 1.0}, {"causal": np.int64(1)}, {"chunk": 1.0}, {"chunk": True}):
        with pytest.raises(tilewise.Error):
            tilewise.attention(q, k, v, **bad)
    with pytest.raises(tilewise.Error):
        tilewise.attention(q, k, v, window=(1.0, 0))
    same(tilewise.attention(q, k, v, softcap=1), tilewise.attention(q, k, v, softcap=1.0))
    assert not torch.equal(tilewise.attention(q, k, v, causal=False), tilewise.attention(q, k, v, causal=True))
    count = _ext.num_quick_calls()
    tilewise.attention(q, k, v, window=[1, 0])  # a list may change: it is no key
    tilewise.attention(q, k, v, bias=torch.zeros(11, 13))
    tilewise.attention(q, k, v, dropout_p=0.5)
    assert _ext.num_quick_calls() == count


def test_deterministic_algorithms_of_torch_are_options(ways):
    q, k, v = qkv()
    call = lambda: tilewise.attention(q, k, v)  # noqa: E731
    ways.quick(call)
    known = _ext.num_quick_calls()
    torch.use_deterministic_algorithms(True)
    try:
        ways.quick(call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert _ext.num_quick_calls() == known + 1


def test_a_failed_call_is_not_kept():
    q, k, v = qkv()
    for bad in ({"softcap": float("nan")}, {"layout": "bhsd"}, {"backend": "nothing"}):
        with pytest.raises(tilewise.Error):
            tilewise.attention(q, k, v, **bad)
    assert _ext.num_quick_calls() == 0


# ------------------------------------------------------------------------------------------- what is no plain call


def test_the_general_way_takes_the_rest(ways):
    q, k, v = qkv()
    ways.quick(lambda: tilewise.attention(q, k, v))
    left: list[torch.Tensor] = []
    torch.vmap(lambda x: left.append(x) or x)(torch.stack([q, -q]))
    torch.func.grad(lambda x: left.append(x * 1) or x.sum())(q)
    calls = {
        "left vmap": lambda: tilewise.attention(left[0], k, v),
        "left grad": lambda: tilewise.attention(left[1], k.clone().requires_grad_(), v),
        "negated": lambda: tilewise.attention(torch._neg_view(q), k, torch._neg_view(v)),
        "imaginary": lambda: tilewise.attention(torch.complex(q, q).conj().imag, k, v),
        "zeros": lambda: tilewise.attention(torch._efficientzerotensor(q.shape), k, v),
        "parameter": lambda: tilewise.attention(torch.nn.Parameter(q), k, v),
        "numpy": lambda: tilewise.attention(q, k.numpy(), v),
        "dtype": lambda: tilewise.attention(q, k.double(), v),
        "integers": lambda: tilewise.attention(q.int(), k.int(), v.int()),
        "complex": lambda: tilewise.attention(q.to(torch.complex64), k, v),
        "rank": lambda: tilewise.attention(q[0], k[0], v[0]),
        "heads": lambda: tilewise.attention(q[:, :, :3], k, v),
        "meta": lambda: tilewise.attention(q.to("meta"), k.to("meta"), v.to("meta")),
        "sparse": lambda: tilewise.attention(q.to_sparse(), k, v),
        "none": lambda: tilewise.attention(q, None, v),
        "autocast": lambda: _autocast(lambda: tilewise.attention(q, k, v)),
        "vmap": lambda: torch.vmap(lambda x: tilewise.attention(x, k, v))(torch.stack([q, -q])),
        "grad": lambda: torch.func.grad(lambda x: tilewise.attention(x, k, v).sum())(q),
        "out": lambda: tilewise.attention(q, k, v, out=torch.empty(2, 11, 4, 6)),
    }

    def outcome(call):
        try:
            return call().detach()
        except Exception as error:
            return type(error), str(error)

    for name, call in calls.items():
        quick, general = outcome(call), ways.general(lambda call=call: outcome(call))
        if isinstance(quick, tuple):
            assert quick == general, name
        else:
            same(quick, general)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(tilewise.UnsupportedError, match="forward-mode"):
            tilewise.attention(dual, k, v)
    with torch._subclasses.FakeTensorMode() as mode:
        o = tilewise.attention(*(mode.from_tensor(x) for x in (q, k, v)))
        assert type(o).__name__ == "FakeTensor"


def _autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def test_torch_function_modes_see_no_difference(ways):
    q, k, v = qkv()
    expected = tilewise.attention(q, k, v)
    with torch.device("meta"):  # a mode that moves what is made without a device
        same(ways.quick(lambda: tilewise.attention(q, k, v)), expected)


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_the_same_gradients(ways, options):
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        inputs = [x.requires_grad_(w) for x, w in zip(qkv(), wanted, strict=True)]
        leaves = [x for x in inputs if x.requires_grad]

        def call():
            o, lse = tilewise.attention(*inputs, return_lse=True, **options)  # noqa: B023
            seen = [o, lse]
            for target in (o.sum() * 1.5, (o * o).sum() + lse.sum(), lse.sum()):
                got = torch.autograd.grad(target, leaves, retain_graph=True, allow_unused=True)  # noqa: B023
                seen += [torch.zeros(()) if x is None else x for x in got]
            return tuple(x.detach() for x in seen)

        same(ways.quick(call), ways.general(call))


def test_only_o_is_returned_with_a_graph(ways):
    q, k, v = qkv(grad=True)
    o = ways.quick(lambda: tilewise.attention(q, k, v))
    assert isinstance(o, torch.Tensor) and o.requires_grad
    with torch.no_grad():
        assert not ways.quick(lambda: tilewise.attention(q, k, v)).requires_grad
    with torch.inference_mode():
        assert ways.quick(lambda: tilewise.attention(q, k, v)).is_inference()


def test_gradients_that_need_the_general_way(ways):
    q, k, v = qkv(grad=True)
    ways.quick(lambda: tilewise.attention(q, k, v))
    o = tilewise.attention(q, k, v)
    plain = torch.autograd.grad(o, q, torch.ones_like(o), retain_graph=True)[0]
    negated = torch.autograd.grad(o, q, torch._neg_view(-torch.ones_like(o)), retain_graph=True)[0]
    same(plain, negated)
    (recorded,) = torch.autograd.grad(o, q, torch.ones_like(o), create_graph=True)
    same(plain, recorded.detach())
    with pytest.raises(tilewise.UnsupportedError, match="second derivatives"):
        recorded.sum().backward()


def test_a_changed_input_is_noticed():
    q, k, v = qkv(grad=True)
    for _ in range(2):
        o = tilewise.attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_saved_tensors_may_come_back_as_others(ways):
    q, k, v = qkv(grad=True)
    ways.quick(lambda: tilewise.attention(q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        o = tilewise.attention(q, k, v)
    found = torch.autograd.grad(o.sum(), (q, k, v))
    expected = ways.general(lambda: torch.autograd.grad(tilewise.attention(q, k, v).sum(), (q, k, v)))
    same(found, expected)


# ------------------------------------------------------------------------------------------------- what is kept


def test_no_tensor_is_kept():
    tensors = qkv()
    for _ in range(2):
        o, lse = tilewise.attention(*tensors, return_lse=True)
    plan = tilewise.plan(*tensors)
    plan.run(*tensors)
    gone = [weakref.ref(x) for x in (*tensors, o, lse)]
    del tensors, o, lse
    gc.collect()
    # A plan keeps the options it was made with, not q, k and v.
    assert all(each() is None for each in gone)
    assert plan.workspace_bytes >= 0


def test_the_number_of_calls_is_bounded():
    q, k, v = qkv(batch=1, seqlen_q=2, seqlen_kv=2)
    most = 0
    for n in range(600):
        tilewise.attention(q, k, v, softcap=1.0 + n)
        most = max(most, _ext.num_quick_calls())
    assert 100 <= most <= 256


def test_threads():
    inputs = [qkv(seqlen_q=n, seqlen_kv=n) for n in range(1, 9)]
    expected = [tilewise.reference(*each, causal=True) for each in inputs]

    def work(n):
        for _ in range(50):
            o = tilewise.attention(*inputs[n], causal=True)
            _ext.clear_quick_calls() if n == 0 else None
        return o

    with ThreadPoolExecutor(8) as pool:
        for o, e in zip(pool.map(work, range(8)), expected, strict=True):
            torch.testing.assert_close(o.double(), e.double(), rtol=1e-4, atol=1e-5)


def test_nothing_leaks_at_exit():
    code = (
        "import torch, tilewise; q = torch.ones(1, 2, 1, 4, requires_grad=True); "
        "o = [tilewise.attention(q, q, q) for _ in range(2)]"  # whose graphs are there to the end
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "python")
    assert done.returncode == 0 and done.stderr == ""


# ------------------------------------------------------------------------------------------------------------- plans


def test_plans_run_the_quick_way(monkeypatch):
    q, k, v = qkv()
    plan = tilewise.plan(q, k, v, causal=True)
    with_lse = tilewise.plan(q, k, v, causal=True, return_lse=True)
    expected = tilewise.attention(q, k, v, causal=True, return_lse=True)
    memory = torch.empty(plan.workspace_bytes + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: max(plan.workspace_bytes, 1)]
    longer = [torch.cat([x, x], 1) for x in (q, k, v)]

    def runs():
        out, lse = torch.full((2, 11, 4, 6), 7.0), torch.full((2, 4, 11), 7.0)
        assert plan.run(q, k, v, out=out) is out
        both = plan.run(q, k, v, lse=lse, workspace=memory)
        assert both[1] is lse
        return plan.run(q, k, v), with_lse.run(q, k, v), (out, lse), both, plan.run(*longer)

    monkeypatch.setattr(plan, "_call", lambda *_: pytest.fail("the general way"))
    monkeypatch.setattr(with_lse, "_call", lambda *_: pytest.fail("the general way"))
    o, pair, written, both, more = runs()
    same(o, expected[0])
    for each in (pair, written, both):
        same(each, expected)
    same(more, tilewise.attention(*longer, causal=True))


def test_refusals_of_plans_are_those_of_the_general_way():
    q, k, v = qkv()
    plan, general = tilewise.plan(q, k, v), tilewise.plan(q, k, v)
    general._quick = None
    short = torch.empty(max(plan.workspace_bytes - 1, 0), dtype=torch.uint8)
    bad = [
        lambda p: p.run(q.double(), k.double(), v.double()),
        lambda p: p.run(q[:, :, :2], k[:, :, :1], v[:, :, :1]),
        lambda p: p.run(q, k, v, out=torch.empty(2, 11, 4, 5)),
        lambda p: p.run(q, k, v, out=q),
        lambda p: p.run(q, k, v, out=torch.empty(2, 11, 4, 6, requires_grad=True)),
        lambda p: p.run(q, k, v, lse=torch.empty(2, 4, 12)),
        lambda p: p.run(q, k, v, workspace=short),
        lambda p: p.run(q, k, v, workspace=torch.empty(2**20, dtype=torch.uint8)[1::2]),
        lambda p: p.run(q, k, v, workspace="no"),
        lambda p: p.run(q, k, None),
        lambda p: p.run(q, k, v, causal=True),
    ]
    refused = 0
    for each in bad:
        texts = []
        for p in (plan, general):
            try:
                each(p)
                texts.append("")
            except tilewise.Error as error:
                texts.append(f"{type(error)} {error}")
        assert texts[0].replace(str(short.data_ptr() % 64), "") == texts[1].replace(str(short.data_ptr() % 64), "")
        refused += texts[0] != ""
    assert refused >= 9
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(tilewise.InvalidArgumentError, match="deterministic"):
            plan.run(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------------------- a GPU

# Tensors of host memory that torch's table of functions shows as tensors of cuda:0. The fake GPU's memory is host
# memory too, so its kernels run on them. A process of its own, since the extension keeps the table.
_HOST_TENSORS_AS_CUDA = r"""
import ctypes, json, sys
import torch, tilewise
from tilewise import _ext, _torch
from tilewise._problem import Call

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]
TensorOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
StreamOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
class Api(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
                ("others", ctypes.c_void_p * 3), ("tensor_of", TensorOf), ("stream_of", StreamOf)]
get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
NAME = b"dlpack_exchange_api"
true = Api.from_address(get(torch.Tensor.__dlpack_c_exchange_api__, NAME))
streams = []
def tensor_of(tensor, out):
    status = true.tensor_of(tensor, out)
    out.contents.device_type = 2
    return status
def stream_of(kind, index, out):
    streams.append((kind, index))
    out[0] = None
    return 0
api = Api(true.major, true.minor, None, true.others, TensorOf(tensor_of), StreamOf(stream_of))
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
dtypes = {n: d for d, n in _torch.torch_dtypes().items()}
made = []
def empty_strided(shape, strides, *, dtype, device):
    made.append((tuple(shape), str(dtype)))
    return torch.empty_strided(shape, strides, dtype=dtype).fill_(7 if dtype.is_floating_point else 77)
def empty_like(tensor):
    return torch.empty_like(tensor).fill_(7)
assert _ext.set_torch(torch.Tensor, torch.nn.Parameter, new(ctypes.addressof(api), NAME, None), empty_strided, empty_like, dtypes)
"""

_CALLS = r"""
torch.manual_seed(0)
q, k, v = torch.randn(2, 70, 4, 16), torch.randn(2, 90, 2, 16), torch.randn(2, 90, 2, 8)
call = Call(q, k, v, causal=True, softcap=5.0)
expected = tilewise.attention_forward(q, k, v, causal=True, softcap=5.0)
do, dlse = torch.randn(2, 70, 4, 8), torch.randn(2, 4, 70)
gradients = tilewise.attention_backward(do, q, k, v, *expected[:2], dlse=dlse, causal=True, softcap=5.0)
quick = _ext.QuickCall(call.problem())
worst = {}
def compare(name, a, b):
    worst[name] = max(worst.get(name, 0.0), float((a - b).abs().max()))
for _ in range(2):
    o, lse = quick.forward(q, k, v, True, None)
    compare("o", o, expected[0])
    compare("lse", lse, expected[1])
    for name, a, b in zip(("dq", "dk", "dv"), quick.backward(do, q, k, v, o, lse, dlse, True, True, True),
                          (gradients.dq, gradients.dk, gradients.dv)):
        compare(name, a, b)
plans = _ext.num_plans()
only = quick.backward(do, q, k, v, o, lse, None, False, True, False)
longer = quick.forward(torch.cat([q, q], 1), k, v, False, None)
after = _ext.num_plans()
_ext.clear_plans()
quick.forward(q, k, v, False, None)
# A plan remembers the workspace of its last run, and must not take it for that of a longer problem.
def on_gpu(*arrays):
    problem = Call(*arrays, causal=True, softcap=5.0).problem()
    problem.device_type = 1
    return problem
def backward(q, k, v):
    o, lse, _ = tilewise.attention_forward(q, k, v, causal=True, softcap=5.0)
    arrays = [o, o, lse, None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None]
    views = [x if x is None else tilewise.as_view(x) for x in arrays]
    plan.backward(on_gpu(q, k, v), views, [], address, size, 0)
plan = _ext.Plan(on_gpu(q, k, v), True)
size = plan.workspace_bytes
memory = torch.empty(size + 64, dtype=torch.uint8)
address = (memory.data_ptr() + 63) // 64 * 64
refused = []
for n in (1, 1, 2, 2, 1):
    try:
        backward(torch.cat([q] * n, 1), k, v)
        refused.append(False)
    except tilewise.InvalidArgumentError as error:
        refused.append("workspace" in str(error))
print(json.dumps({
    "refused": refused,
    "worst": worst, "streams": sorted(set(streams)), "plans": [plans, after, _ext.num_plans()],
    "only": [x is not None for x in only], "shape": list(longer.shape), "scratch": sum(d == "torch.uint8" for _, d in made),
}))
"""


# A plan keeps what it decided about a problem for the next run of the same one. Here nothing of it may be wrong: other
# addresses, strides, alignment, seeds and lengths, refusals after success, and threads.
_RUNS_OF_A_PLAN = r"""
from concurrent.futures import ThreadPoolExecutor
from tilewise._arrays import as_view

torch.manual_seed(0)
def problem_of(q, k, v, **options):
    problem = Call(q, k, v, **options).problem()
    problem.device_type = 1
    return problem
def qkv(length=40, layout="contiguous"):
    arrays = [torch.randn(2, n, heads, 16).bfloat16() for n, heads in ((length, 4), (50, 2), (50, 2))]
    if layout == "heads_first":
        arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
    elif layout == "misaligned":
        arrays = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in arrays]
    return arrays
first = qkv()
plan = _ext.Plan(problem_of(*first, causal=True), False)
quick = _ext.QuickCall(Call(*first, causal=True).problem(), plan)
worst = 0.0
def check(arrays):
    global worst
    o, lse = quick.forward(*arrays, True, None)
    expected = tilewise.attention(*(x.float() for x in arrays), causal=True, return_lse=True)
    worst = max(worst, float((o.float() - expected[0]).abs().max()), float((lse - expected[1]).abs().max()))
for _ in range(2):
    for layout in ("contiguous", "heads_first", "contiguous", "misaligned", "contiguous"):
        check(qkv(layout=layout))
    check(qkv(length=1))
    check(qkv(length=40))
refused = []
def refuse(run):
    try:
        run()
        refused.append("")
    except tilewise.Error as error:
        refused.append(str(error))
q, k, v = first
lse = torch.empty(2, 4, 40)
check(first)
refuse(lambda: quick.forward(q, k, v, True, None, q))
refuse(lambda: quick.forward(q, k, v, True, None, None, torch.as_strided(q.view(torch.float32), lse.shape, lse.stride())))
refuse(lambda: quick.forward(q, k, v, True, None, torch.empty(2, 40, 4, 8, dtype=q.dtype)))
refuse(lambda: quick.forward(q.half(), k.half(), v.half(), True, None))
check(first)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(check, [qkv(length=n) for n in (40, 40, 40, 7, 40, 40, 7, 40)]))

# Seeds change from run to run, and with them what is dropped.
dropping = _ext.Plan(problem_of(q, k, v, dropout_p=0.5), False)
for seed in (1, 2, 1):
    o = torch.empty_like(q)
    problem = problem_of(q, k, v, dropout_p=0.5)
    problem.seed, problem.offset = seed, 5
    memory = torch.empty(dropping.workspace_bytes + 64, dtype=torch.uint8)
    address = (memory.data_ptr() + 63) // 64 * 64
    dropping.forward(problem, as_view(o), None, address, dropping.workspace_bytes, 0)
    expected = tilewise.attention(*(x.float() for x in first), dropout_p=0.5, seed=(seed, 5))
    worst = max(worst, float((o.float() - expected).abs().max()))
print(json.dumps({"worst": worst, "refused": refused}))
"""


def _on_the_fake_gpu(script: str, folder: Path, **environment: str) -> dict:
    fake = ROOT / "build/dev/tests/fake_cuda"
    if not (fake / "libcuda.so.1").exists() or not (fake / "libnvrtc.so.13").exists():
        pytest.skip(f"the fake GPU is not built: {fake}")
    env = {
        **os.environ,
        "TILEWISE_CUDA_DRIVER": str(fake / "libcuda.so.1"),
        "TILEWISE_NVRTC": str(fake / "libnvrtc.so.13"),
        "TILEWISE_CACHE_DIR": str(folder),
        "PYTHONPATH": str(ROOT / "python"),
        **environment,
    }
    command = [sys.executable, "-c", _HOST_TENSORS_AS_CUDA + script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_on_the_fake_gpu(tmp_path):
    seen = _on_the_fake_gpu(_CALLS, tmp_path)
    assert set(seen["worst"]) == {"o", "lse", "dq", "dk", "dv"}
    assert all(error < 2e-5 for error in seen["worst"].values()), seen
    assert seen["refused"] == [False, False, True, True, False]
    assert seen["streams"] == [[2, 0]]
    assert seen["plans"] == [2, 2, 1]  # one for each pass, for all lengths; made anew when they were cleared
    assert seen["only"] == [False, True, False] and seen["shape"] == [2, 140, 4, 8]
    assert seen["scratch"] > 0  # the backward pass has a workspace


def test_runs_of_a_plan_on_the_fake_gpu(tmp_path):
    seen = _on_the_fake_gpu(_RUNS_OF_A_PLAN, tmp_path, TILEWISE_FAKE_CC="8.0")
    assert seen["worst"] < 0.04, seen  # bfloat16
    shared, shared_too, shape, dtype = seen["refused"]
    assert "memory shared with the input q" in shared and "memory shared with the input q" in shared_too
    assert shape.startswith("o: got shape") and "the plan was made for" in dtype


def test_a_table_of_another_version_is_not_used():
    header = (ctypes.c_uint64 * 7)(2)  # major 2
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(header), b"dlpack_exchange_api", None)
    assert not _ext.set_torch(torch.Tensor, torch.nn.Parameter, capsule, torch.empty_strided, torch.empty_like, {})
    q, k, v = qkv()
    same(tilewise.attention(q, k, v), tilewise.attention(q, k, v))
