"""CuPy arrays: values on the fake GPU without torch, CuPy's stream and memory, refusals. CuPy itself is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_stand_in
import tilewise
from tilewise import _arrays, _cuda, _ext, masks

HERE = Path(__file__).parent
FAKE = HERE.parents[1] / "build/dev/tests/fake_cuda"
SHAPES = ((2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 6))


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(_arrays, "_cupy_type", None)
    state = {"device": 0, "streams": {0: 0, 1: 0}, "capturing": False, "waits": 0}
    for name, value in state.items():
        monkeypatch.setattr(cupy_stand_in.state, name, value)
    return cupy_stand_in.install()


class Plan:
    """Runs in host memory what was prepared for a device, and keeps what it was given."""

    def __init__(self):
        self.seen = []

    def _run(self, run, problem, *args):
        *views, address, size, stream = args
        self.seen.append((problem.device_type, problem.device_index, address > 0, size, stream))
        problem.device_type = problem.device_index = 0
        run(problem, *views)

    def forward(self, problem, *args):
        self._run(_ext.forward, problem, *args)

    def backward(self, problem, *args):
        self._run(_ext.backward, problem, *args)


@pytest.fixture
def plan(cupy, monkeypatch):
    made = Plan()
    monkeypatch.setattr(_cuda, "_ext", SimpleNamespace(prepare=lambda problem, backward: (made, 640)))
    return made


def numbers(*shapes, dtype=np.float32):
    generator = np.random.default_rng(3)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def on(cupy, device, *arrays):
    with cupy.cuda.Device(device):
        return [cupy.asarray(array) for array in arrays]


# ------------------------------------------------------------------------------------------------------------ values

ON_THE_FAKE_GPU = """
import sys
import cupy_stand_in
cupy = cupy_stand_in.install()
import numpy as np
import tilewise
from tilewise import masks

generator = np.random.default_rng(0)
q, k, v, do = [generator.standard_normal(s).astype(np.float32) for s in ((2, 70, 4, 24), (2, 90, 2, 24), (2, 90, 2, 16), (2, 70, 4, 16))]
bias = generator.standard_normal((4, 70, 90)).astype(np.float16)
keep = np.arange(180).reshape(2, 90) % 7 != 0

def everything(put):
    options = dict(causal=True, bias=put(bias), mask=masks.key_padding(put(keep)), seqused_kv=[90, 41], q_offset=put(np.array(5)))
    inputs = [put(x) for x in (q, k, v)]
    o, lse = tilewise.attention(*inputs, return_lse=True, **options)
    same, _, rng = tilewise.attention_forward(*inputs, **options)
    g = tilewise.attention_backward(put(do), *inputs, o, lse, rng=rng, **options)
    return [o, lse, same, g.dq, g.dk, g.dv, g.dbias]

for device in (0, 1):
    with cupy.cuda.Device(device):
        found = everything(cupy.asarray)
        assert tilewise.explain(*[cupy.asarray(x) for x in (q, k, v)]).count("cuda:%d" % device) >= 1
    for a, b in zip(found, everything(np.array), strict=True):
        assert type(a) is cupy.ndarray and a.device.id == device, (a, device)
        a = a.get()
        assert a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
        assert np.abs(np.where(b == a, 0, a - b)).max() < (2e-2 if a.dtype == np.float16 else 2e-5)
assert "torch" not in sys.modules
print("all seen")
"""


def test_values_on_the_fake_gpu(tmp_path):
    if not (FAKE / "libcuda.so.1").exists() or not (FAKE / "libnvrtc.so.13").exists():
        pytest.skip(f"the fake GPU is not built: {FAKE}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(Path(tilewise.__file__).parents[1])]),
        "TILEWISE_CUDA_DRIVER": str(FAKE / "libcuda.so.1"),
        "TILEWISE_NVRTC": str(FAKE / "libnvrtc.so.13"),
        "TILEWISE_CACHE_DIR": str(tmp_path),
        "TILEWISE_PACKS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_FAKE_GPU], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all seen\n"


# ---------------------------------------------------------------------------------------------- streams and memory


def test_the_stream_is_that_of_cupy_on_the_device_of_q(cupy, plan):
    cupy_stand_in.state.streams = {0: 77, 1: 99}
    inputs = on(cupy, 1, *numbers(*SHAPES))
    o, lse = tilewise.attention(*inputs, causal=True, return_lse=True)
    gradients = tilewise.attention_backward(o, *inputs, o, lse, causal=True)
    assert plan.seen == [(1, 1, True, 640, 99)] * 2
    assert {x.device.id for x in (o, lse, gradients.dq, gradients.dk, gradients.dv)} == {1}
    assert cupy_stand_in.state.waits == 0
    tilewise.attention(*on(cupy, 0, *numbers(*SHAPES)))
    assert plan.seen[-1] == (1, 0, True, 640, 77)


def test_out_and_memory_order(cupy, plan):
    q, k, v = numbers((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6))
    expected = tilewise.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)))
    inputs = [x.transpose(0, 2, 1, 3) for x in on(cupy, 0, q, k, v)]
    found = tilewise.attention(*inputs)
    assert found.strides == expected.strides and np.array_equal(found.get(), expected)
    out = cupy.empty((2, 9, 4, 6), "float32")
    assert tilewise.attention(*inputs, out=out) is out and np.array_equal(out.get(), expected)


def test_dropout_seed_and_rng(cupy, plan):
    arrays = numbers(*SHAPES)
    inputs = on(cupy, 0, *arrays)
    o, lse, rng = tilewise.attention_forward(*inputs, dropout_p=0.4, seed=11)
    assert type(rng) is cupy.ndarray and rng.dtype == np.int64 and rng.tolist() == [11, 0]
    assert np.array_equal(o.get(), tilewise.attention(*arrays, dropout_p=0.4, seed=11))
    waits = cupy_stand_in.state.waits
    again = tilewise.attention(*inputs, dropout_p=0.4, seed=rng)  # read in the kernel
    assert cupy_stand_in.state.waits == waits and np.array_equal(again.get(), o.get())
    keep = tilewise.dropout_mask(2, 4, 9, 11, dropout_p=0.4, seed=rng)
    assert np.array_equal(keep.get(), tilewise.dropout_mask(2, 4, 9, 11, dropout_p=0.4, seed=11))
    g = tilewise.attention_backward(o, *inputs, o, lse, dropout_p=0.4, rng=rng)
    h = tilewise.attention_backward(o.get(), *arrays, o.get(), lse.get(), dropout_p=0.4, seed=11)
    assert np.array_equal(g.dk.get(), h.dk)
    far = on(cupy, 1, *arrays, np.array([11, 0], np.uint16), np.array([1, 2], np.uint16))
    o = tilewise.attention(*far[:3], dropout_p=0.4, seed=far[3], q_offset=far[4])  # converted there
    assert np.array_equal(o.get(), tilewise.attention(*arrays, dropout_p=0.4, seed=11, q_offset=[1, 2]))


def test_the_formula_and_probabilities_come_back_to_the_device(cupy, plan):
    arrays = numbers(*SHAPES)
    inputs = on(cupy, 1, *arrays)
    exact = tilewise.reference(*inputs, causal=True)  # while another device is the current one
    assert exact.device.id == 1 and np.array_equal(exact.get(), tilewise.reference(*arrays, causal=True))
    p = tilewise.attn_probs(*inputs[:2], rows=[3], causal=True)
    assert p.device.id == 1 and np.array_equal(p.get(), tilewise.attn_probs(*arrays[:2], rows=[3], causal=True))
    out = on(cupy, 1, np.zeros((2, 9, 4, 6), np.float32))[0]
    assert tilewise.attention(*inputs, backend="reference", out=out) is out
    assert np.array_equal(out.get(), tilewise.attention(*arrays, backend="reference"))
    assert plan.seen == []


def test_captured_arrays_and_masks(cupy, plan):
    arrays = numbers(*SHAPES)
    inputs = on(cupy, 0, *arrays)
    table, ids = np.linspace(-1, 1, 11, dtype=np.float32), np.arange(22).reshape(2, 11) // 5

    def run(inputs, put):
        mod = tilewise.score_mod(lambda x, b, h, i, j, s: x + s.table[j], table=put(table))
        return tilewise.attention(*inputs, score_mod=mod, mask=masks.documents(put(ids[:, 2:]), put(ids)))

    assert np.array_equal(run(inputs, cupy.asarray).get(), run(arrays, np.array))


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(call, *words):
    with pytest.raises(tilewise.Error) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_one_library_and_one_device(cupy, plan):
    arrays = numbers(*SHAPES)
    q, k, v = on(cupy, 0, *arrays)
    far = on(cupy, 1, *arrays)
    attention = tilewise.attention
    refused(
        lambda: attention(q, arrays[1], v), "k: got a numpy.ndarray", "cupy.ndarray on device cuda:0", "cupy.asarray(x)"
    )
    refused(lambda: attention(arrays[0], k, v), "k: got a cupy.ndarray on device cuda:0", "device cpu", "x.get()")
    refused(
        lambda: attention(q, far[1], v),
        "k: got a cupy.ndarray on device cuda:1",
        "device cuda:0",
        "cupy.cuda.Device(0)",
    )
    refused(
        lambda: attention(q, k, v, bias=np.zeros((9, 11), np.float32)), "bias: got a numpy.ndarray", "cupy.asarray(x)"
    )
    refused(lambda: attention(q, k, v, out=np.zeros((2, 9, 4, 6), np.float32)), "out", "cupy.ndarray on device cuda:0")
    refused(lambda: attention(q, k, v, mask=masks.key_padding(np.ones((2, 11), bool))), "key_padding", "cupy.ndarray")
    refused(
        lambda: attention(*arrays, mask=masks.key_padding(cupy.asarray(np.ones((2, 11), bool)))),
        "key_padding",
        "x.get()",
    )
    refused(lambda: attention(q, k, v, softmax_scale=cupy.asarray(np.array(0.5))), "softmax_scale", "cuda:0", "waits")
    refused(lambda: masks.window(cupy.asarray(np.array(5)), 0), "window left", "cuda:0", "waits")
    refused(lambda: tilewise.merge([q, q], [q, q]), "cupy.ndarray", "torch.from_dlpack(x)")
    refused(lambda: attention(on(cupy, 0, arrays[0].astype(complex))[0], k, v), "q", "complex")
    assert plan.seen == []


def test_beside_torch(cupy, plan):
    torch = pytest.importorskip("torch")
    arrays = numbers(*SHAPES)
    q, k, v = on(cupy, 0, *arrays)
    tensor = torch.from_numpy(arrays[1])
    refused(lambda: tilewise.attention(q, tensor, v), "cupy.ndarray, torch.Tensor, cupy.ndarray", "from_dlpack")
    refused(lambda: tilewise.attention(tensor, k, v), "torch.Tensor, cupy.ndarray", "from_dlpack")
    refused(lambda: tilewise.attention(q, k, v, sinks=torch.zeros(4)), "sinks: got a torch.Tensor", "a cupy.ndarray on")
    refused(lambda: tilewise.attention(q, k, v, out=torch.zeros(2, 9, 4, 6)), "out", "the kind of q, k and v")


def test_lists_are_refused_in_a_capture(cupy, plan):
    inputs = on(cupy, 0, *numbers(*SHAPES))
    tilewise.attention(*inputs, seqused_kv=[3, 4])
    cupy_stand_in.state.capturing = True
    refused(
        lambda: tilewise.attention(*inputs, seqused_kv=[3, 4]), "seqused_kv", "captured", "an array on device cuda:0"
    )
    tilewise.attention(*inputs)


def test_arrays_of_other_libraries_are_told_the_way():
    class Elsewhere:
        def __init__(self, device):
            self._device = device

        def __dlpack_device__(self):
            return self._device

        def __array__(self):
            raise AssertionError("read by accident")

    q, k, v = numbers(*SHAPES)
    refused(
        lambda: tilewise.attention(Elsewhere((2, 0)), k, v), "q: got a ", "Elsewhere", "torch.from_dlpack(x) and cupy"
    )
    refused(lambda: tilewise.attention(Elsewhere((1, 0)), k, v), "q: got a ", "numpy.asarray(x)")
    refused(lambda: tilewise.attention(q, Elsewhere((2, 1)), v), "k: got a ", "cupy.from_dlpack(x)")
