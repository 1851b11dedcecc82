"""as_view: every kind of object that may come as an array, and a clear refusal of the rest."""

from __future__ import annotations

import numpy as np
import pytest

import formula
import tilewise
from tilewise import _arrays


def run(q, k, v, **options):
    return tilewise.attention(q, k, v, **options)


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, n, 2, 8)).astype(np.float32) for n in (5, 6, 6))


def test_numpy_view():
    a = np.zeros((2, 3, 4), np.float32)
    assert tilewise.as_view(a) == (a.ctypes.data, 2, (2, 3, 4), (12, 4, 1))
    assert tilewise.as_view(a[:, ::-1, ::2])[1:] == (2, (2, 3, 2), (12, -4, 2))
    assert tilewise.as_view(np.zeros((0, 3), bool))[1:3] == (10, (0, 3))
    assert tilewise.as_view(np.ones(()))[2:] == ((), ())
    assert tilewise.as_view(np.broadcast_to(a[0, 0], (5, 4)))[3] == (0, 1)


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint32"]
)
def test_dtype_numbers_agree_between_numpy_and_torch(name):
    torch = pytest.importorskip("torch")
    numpy_view = tilewise.as_view(np.zeros(3, name))
    torch_view = tilewise.as_view(torch.zeros(3, dtype=getattr(torch, name)))
    assert numpy_view[1] == torch_view[1]
    assert torch_view[3] == (1,)


def test_read_only_and_memmap_inputs(qkv, tmp_path):
    q, k, v = qkv
    expected = run(q, k, v)
    q.setflags(write=False)
    np.testing.assert_array_equal(run(q, k, v), expected)
    mapped = np.memmap(tmp_path / "k", np.float32, "w+", shape=k.shape)
    mapped[:] = k
    np.testing.assert_array_equal(run(q, mapped, v), expected)
    with pytest.raises(tilewise.InvalidArgumentError, match="read-only"):
        run(k[:, :5], k, v, out=q)


def test_odd_memory_is_copied(qkv):
    q, k, v = qkv
    expected = run(q, k, v)
    record = np.zeros(k.shape, np.dtype([("pad", np.uint8), ("x", np.float32)], align=False))
    record["x"] = k  # strides of 5 bytes, unaligned
    np.testing.assert_array_equal(run(q, record["x"], v), expected)
    out = np.zeros(q.shape, record.dtype)["x"]
    with pytest.raises(tilewise.InvalidArgumentError, match="copied"):
        run(q, k, v, out=out)


def test_bfloat16_of_ml_dtypes(qkv):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (a.astype(ml_dtypes.bfloat16) for a in qkv)
    o, lse = run(q, k, v, return_lse=True)
    assert o.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32
    ref = formula.forward(*(a.astype(np.float64) for a in (q, k, v)))
    assert formula.worst(o.astype(np.float64), ref.o) < 0.02


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ([[1.0]], "numpy.ndarray, torch.Tensor or cupy.ndarray"),
        (1.0, "float"),
        (None, "NoneType"),
        (np.ma.masked_array(np.zeros((1, 5, 2, 8))), "MaskedArray"),
        (np.zeros((1, 5, 2, 8), ">f4"), "byte order"),
        (np.zeros((1, 5, 2, 8), np.complex64), "complex64"),
        (np.zeros((1, 5, 2, 8), object), "object"),
        (np.zeros((1, 5, 2, 8), np.longdouble), "longdouble|float128"),
    ],
)
def test_refused_kinds(qkv, value, hint):
    with pytest.raises(tilewise.Error, match=hint):
        run(value, *qkv[1:])


def test_an_object_with_array_is_told_how_to_convert(qkv):
    class Lazy:
        def __array__(self):
            return qkv[0]

    with pytest.raises(tilewise.ArgumentTypeError, match=r"numpy.asarray"):
        run(Lazy(), *qkv[1:])


def test_lists_where_a_list_is_natural():
    q = np.ones((1, 3, 2, 4))
    np.testing.assert_array_equal(
        run(q, q, q, alibi_slopes=[0.5, 0.25], sinks=(0.0, 1.0)),
        run(q, q, q, alibi_slopes=np.array([0.5, 0.25]), sinks=np.array([0.0, 1.0])),
    )
    packed = np.ones((5, 2, 4))
    assert run(packed, packed, packed, cu_seqlens_q=[0, 2, 5], cu_seqlens_kv=[0, 2, 5]).shape == (5, 2, 4)


def test_index_arrays_of_other_widths():
    q = np.random.default_rng(0).standard_normal((2, 3, 2, 4))
    expected = run(q, q, q, seqused_kv=np.array([1, 2]))
    np.testing.assert_array_equal(run(q, q, q, seqused_kv=np.array([1, 2], np.uint16)), expected)
    with pytest.raises(tilewise.InvalidArgumentError, match="uint64"):
        run(q, q, q, seqused_kv=np.array([1, 2], np.uint64))


def test_output_order_follows_q():
    base = np.zeros((2, 4, 5, 8), np.float32)
    q = base.transpose(0, 2, 1, 3)  # bshd view of bhsd memory
    o = run(q, q, q)
    assert o.shape == q.shape and o.strides == q.strides
    bhsd = run(base, base, base, layout="bhsd")
    assert bhsd.flags.c_contiguous
    odd = np.zeros((8, 5, 2, 4), np.float32).transpose(2, 1, 3, 0)
    assert run(odd, odd, odd).strides == odd.strides
    assert run(q[:, ::-1], q, q).shape == q.shape
    wide = run(np.broadcast_to(q[:, :1], q.shape), q, q)
    assert wide.shape == q.shape


def test_order_of_axes_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = rng.integers(1, 4, 4).tolist()
        tensor = torch.empty(shape).permute(rng.permutation(4).tolist())
        if rng.random() < 0.3:
            tensor = tensor[:, :1].expand(-1, 3, -1, -1)
        result = _arrays.empty_in_order(tensor, tuple(tensor.shape))
        pairs = zip(result.stride(), torch.empty_like(tensor).stride(), tensor.shape, strict=True)
        assert all(ours == theirs for ours, theirs, n in pairs if n > 1), (tensor.shape, tensor.stride())


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")
        rng = self.torch.Generator().manual_seed(0)
        self.q = self.torch.randn(1, 5, 2, 8, generator=rng)
        self.k = self.torch.randn(1, 6, 2, 8, generator=rng)

    def test_output_order_follows_q(self):
        q = self.q.transpose(1, 2).contiguous().transpose(1, 2)
        assert run(q, self.k, self.k).stride() == q.stride()
        q.requires_grad_()
        o = run(q, self.k, self.k)
        assert o.stride() == q.stride()
        o.sum().backward()
        assert q.grad.stride() == q.stride()

    def test_parameters_and_plain_subclasses(self):
        torch = self.torch
        expected = run(self.q, self.k, self.k)
        assert torch.equal(run(torch.nn.Parameter(self.q), self.k, self.k), expected)

        class Named(torch.Tensor):
            pass

        assert torch.equal(torch.Tensor(run(self.q.as_subclass(Named), self.k, self.k)), expected)

    def test_lazy_negation(self):
        torch = self.torch
        k = torch.view_as_complex(torch.randn(1, 6, 2, 8, 2)).conj().imag
        assert k.is_neg()
        assert torch.equal(run(self.q, k, self.k), run(self.q, k.resolve_neg(), self.k))
        with pytest.raises(tilewise.InvalidArgumentError, match="lazy negation"):
            run(self.q, self.k, self.k, out=torch.view_as_complex(torch.randn(1, 5, 2, 8, 2)).conj().imag)

    def test_complex_is_refused(self):
        with pytest.raises(tilewise.InvalidArgumentError, match="complex64"):
            run(self.q.to(self.torch.complex64).conj(), self.k, self.k)

    def test_meta_and_fake(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with pytest.raises(tilewise.InvalidArgumentError, match="meta device"):
            run(self.q.to("meta"), self.k, self.k)
        with FakeTensorMode():
            q, k = self.torch.zeros(1, 5, 2, 8), self.torch.zeros(1, 6, 2, 8)
            o, lse = run(q, k, k, return_lse=True)
            assert o.shape == q.shape and lse.shape == (1, 2, 5)  # as an operator
            with pytest.raises(tilewise.InvalidArgumentError, match="FakeTensor"):
                tilewise.attn_probs(q, k)

    def test_all_arrays_of_a_call_are_on_one_device(self):
        # No such device is needed to refuse it: a tensor that says so will do.
        class Elsewhere(self.torch.Tensor):
            device = self.torch.device("cuda:1")

        class Strange(self.torch.Tensor):
            device = self.torch.device("xpu:0")

        q, k = self.q, self.k
        far_q, far_k = q.as_subclass(Elsewhere), k.as_subclass(Elsewhere)
        with pytest.raises(tilewise.InvalidArgumentError, match=r"k: .*device cpu; .*cuda:1, that of q.*x.to\("):
            run(far_q, k, k)
        ok, reasons = tilewise.supports(far_q, k, k)
        assert not ok and "cuda:1" in reasons[0]
        with pytest.raises(tilewise.InvalidArgumentError, match=r"v: .*device cuda:1; .*cpu, that of q"):
            run(q, k, far_k)
        mask = tilewise.masks.key_padding(self.torch.ones(1, 6, dtype=self.torch.bool))
        for name, options in {
            "sinks": {"sinks": self.torch.zeros(2)},
            "seqused_kv": {"seqused_kv": np.array([6])},
            "bias": {"bias": np.zeros((5, 6), np.float32)},
            "key_padding": {"mask": mask},
            "score_mod's t": {"score_mod": tilewise.score_mod(lambda x, b, h, i, j, s: x + s.t[j], t=np.zeros(6))},
            "out": {"out": self.torch.zeros(1, 5, 2, 8)},
        }.items():
            with pytest.raises(tilewise.InvalidArgumentError, match=rf"{name}: got .*cuda:1, that of q"):
                run(far_q, far_k, far_k, **options)
        far_mask = tilewise.masks.key_padding(self.torch.ones(1, 6, dtype=self.torch.bool).as_subclass(Elsewhere))
        for mask in (far_mask, far_mask & tilewise.masks.causal()):
            with pytest.raises(tilewise.InvalidArgumentError, match=r"key_padding: .*cuda:1; .*device cpu, that of q"):
                run(q, k, k, mask=mask)
        with pytest.raises(tilewise.InvalidArgumentError, match=r"seed: .*cuda:1; .*device cpu"):
            run(q, k, k, dropout_p=0.1, seed=self.torch.zeros(2, dtype=self.torch.int64).as_subclass(Elsewhere))
        with pytest.raises(tilewise.UnsupportedError, match=r"q: .*xpu:0; .*cpu or cuda"):
            run(q.as_subclass(Strange), k, k)
        for name in ("softmax_scale", "chunk"):
            with pytest.raises(tilewise.ArgumentTypeError, match=rf"{name}: .*cuda:1.*waits"):
                run(q, k, k, **{name: self.torch.ones(()).as_subclass(Elsewhere)})

    def test_layouts(self):
        with pytest.raises(tilewise.InvalidArgumentError, match="sparse"):
            run(self.q.to_sparse(), self.k, self.k)
        nested = self.torch.nested.nested_tensor(
            [self.torch.randn(3, 2, 8), self.torch.randn(4, 2, 8)], layout=self.torch.jagged
        )
        with pytest.raises(tilewise.Error, match="cu_seqlens"):
            run(nested, self.k, self.k)

    def test_kinds_are_not_mixed(self):
        with pytest.raises(tilewise.ArgumentTypeError, match=r"torch.Tensor, numpy.ndarray, torch.Tensor"):
            run(self.q, self.k.numpy(), self.k)
        with pytest.raises(tilewise.ArgumentTypeError, match="kind of q, k and v"):
            run(self.q, self.k, self.k, out=np.zeros((1, 5, 2, 8), np.float32))

    def test_numpy_options_with_tensors(self):
        keep = np.array([[True, True, False, True, True, False]])
        assert self.torch.equal(
            run(self.q, self.k, self.k, mask=tilewise.masks.key_padding(keep), sinks=np.zeros(2)),
            run(
                self.q,
                self.k,
                self.k,
                mask=tilewise.masks.key_padding(self.torch.from_numpy(keep)),
                sinks=self.torch.zeros(2),
            ),
        )

    def test_deterministic_algorithms_set_the_option(self):
        self.torch.use_deterministic_algorithms(True)
        try:
            assert tilewise._problem.Call(self.q, self.k, self.k).settings.deterministic
        finally:
            self.torch.use_deterministic_algorithms(False)
        assert not tilewise._problem.Call(self.q, self.k, self.k).settings.deterministic
