"""What torch offers to its own operators, offered by ours: opcheck, torch.func, autocast, compiling without compiling
again, export, determinism; and `composite`, for derivatives of any order. The blocks of docs/torch.md run here too."""

from __future__ import annotations

import functools
import io
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tilewise
from tilewise import _ext, masks, ops
from tilewise._problem import ARRAYS, Call, Settings

torch = pytest.importorskip("torch")
F = torch.nn.functional
from tilewise import torch_ops  # noqa: E402
from tilewise.torch_ops import composite  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch.md"
FORWARD = torch.ops.tilewise.attention_forward
BACKWARD = torch.ops.tilewise.attention_backward


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def randn(*shape, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def qkv(seqlen_q=5, seqlen_kv=7, batch=2, dtype=torch.float64, grad=True):
    shapes = ((batch, seqlen_q, 4, 3), (batch, seqlen_kv, 2, 3), (batch, seqlen_kv, 2, 6))
    return [randn(*shape, seed=n, dtype=dtype, grad=grad) for n, shape in enumerate(shapes)]


def arguments(q, k, v, rng=(0, 0), **options):
    call = Call(q, k, v, **options)
    return torch_ops.pack(call.settings, call.arrays, rng)


def same(a, b):
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.detach(), b.detach())


def in_orders(x):
    """The values of x with its four axes in every order in memory, and in memory with gaps."""
    for order in itertools.permutations(range(4)):
        yield x.permute(order).contiguous().permute(tuple(order.index(n) for n in range(4)))
    yield torch.stack([x, x], -1)[..., 0]


TABLE = randn(4, 7)
ALPHA = randn(1).reshape(())
SCORE = tilewise.score_mod(
    lambda x, b, h, i, j, s: (
        x * s.alpha
        + s.table[h, i - j + 3]
        + ops.where((i + b) % 3 == 1, s.q_offset - s.seqlen_kv, abs(x)) * 0.1
        + ops.maximum(x, s.head_kv)
        - ops.tanh(s.table[0, 1] / 2) * (i // 2)
    ),
    table=TABLE,
    alpha=ALPHA,
)

# ---------------------------------------------------------------------------------------------------- the operators


@pytest.mark.parametrize(
    ("rng", "options"),
    [
        ((0, 0), {"layout": "bhsd", "causal": True}),
        ((0, 0), {"score_mod": SCORE, "mask": masks.prefix(2) | masks.causal(), "alibi_slopes": randn(4, grad=False)}),
        (torch.tensor([1, 2]), {"dropout_p": 0.2, "sinks": torch.zeros(4), "seqused_kv": torch.tensor([3, 6])}),
    ],
    ids=["strided", "functions", "dropout"],
)
def test_opcheck_of_both_operators(rng, options):
    q, k, v = qkv(dtype=torch.float32)
    if "layout" in options:  # tensors of the shapes of a projection, seen as [batch, heads, length, dim]
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    args = arguments(q, k, v, rng, **options)
    torch.library.opcheck(FORWARD.default, args)
    plain = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)  # a gradient has none itself
    o, lse = FORWARD(*plain)
    wanted = [0, 1, 2, ARRAYS] if "score_mod" in options else [0, 1, 2]  # q, k, v, and the table or alpha
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(BACKWARD.default, (torch.ones_like(o), o, lse, dlse, *plain, wanted))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fakes_have_the_strides_of_the_real_ones(layout):
    from torch._subclasses import FakeTensorMode

    q, k, v = (x.detach() for x in qkv())
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    for a, b, c in zip(in_orders(q), reversed([*in_orders(k)]), in_orders(v), strict=True):
        args = arguments(a, b, c, layout=layout)
        o, lse = FORWARD(*args)
        do = torch.ones_like(o)
        real = [o, lse, *BACKWARD(do, o, lse, None, *args, [0, 1, 2])]
        with FakeTensorMode() as mode:
            args, do, o, lse = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, do, o, lse))
            fake = [*FORWARD(*args), *BACKWARD(do, o, lse, None, *args, [0, 1, 2])]
        for x, y in zip(real, fake, strict=True):
            assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype


def test_functional_transforms_of_the_operator():
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in qkv(grad=False))
    args = arguments(q[0], k[0], v[0], causal=True)

    def loss(q, k, v):
        o, lse = FORWARD(q, k, v, *args[3:])
        return o.square().sum() + lse.sin().sum()

    def expected(q, k, v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(loss(*leaves), leaves)

    single = torch.func.grad(loss, argnums=(0, 1, 2))
    one_by_one = [expected(*each) for each in zip(q, k, v, strict=True)]
    for a, b in zip(single(q[1], k[1], v[1]), one_by_one[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(torch.vmap(single)(q, k, v), zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(a, torch.stack(b))
    # One level that asks for no gradient inside of one that does, and the other way round.
    outer = torch.func.grad(lambda q: torch.vmap(loss, in_dims=(0, None, None))(q, k[0], v[0]).sum())(q)
    assert torch.allclose(outer, torch.stack([expected(each, k[0], v[0])[0] for each in q]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functional_transforms(backend):
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in qkv(grad=False))
    run = torch.vmap(torch.func.grad(lambda *x: tilewise.attention(*x, causal=True).square().sum(), argnums=(0, 1, 2)))
    found = torch.compile(run, fullgraph=True, backend=backend)(q, k, v)
    for a, b in zip(found, run(q, k, v), strict=True):
        assert torch.allclose(a, b)


def test_a_program_exported_without_autocast_obeys_it():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return tilewise.attention(q, k, v, bias=bias)

    inputs = (*qkv(dtype=torch.float32, grad=False), randn(4, 5, 7, dtype=torch.float32, grad=False))
    program = torch.export.export(Layer(), inputs).module()
    assert same(program(*inputs), Layer()(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        o = program(*inputs)
        assert o.dtype == torch.bfloat16 and same(o, Layer()(*inputs))
    assert same(o, tilewise.attention(*(x.bfloat16() for x in inputs[:3]), bias=inputs[3]))
    with torch.autocast("cpu", torch.bfloat16):
        assert program(*inputs).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ compiling, exporting


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["contiguous", "projection", "transposed", "slice"])
def test_a_hundred_lengths_are_one_graph(backend, how):
    if backend == "inductor" and (shutil.which("g++") is None or how != "projection"):
        pytest.skip("inductor needs a C++ compiler, and time")
    mod = tilewise.score_mod(lambda x, b, h, i, j, s: x - 0.1 * abs(i - j))
    whole = [randn(2, 128, 4, 3, dtype=torch.float32, grad=False, seed=n) for n in range(3)]

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def run(q, k, v):
        return tilewise.attention(q, k, v, causal=True, score_mod=mod) * 2

    def inputs(n):
        if how == "projection":  # q, k and v beside each other in memory
            return torch.stack([x[:, :n] for x in whole], 2).unbind(2)
        if how == "transposed":
            return [x[:, :n].transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
        return [x[:, :n] if how == "slice" else x[:, :n].contiguous() for x in whole]

    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(9, 109):
            q, k, v = (x.detach().requires_grad_() for x in inputs(n))
            o = run(q, k, v)
            gradients = torch.autograd.grad(o.sum(), (q, k, v))
            if n % 20 == 9:
                expected = tilewise.attention(q, k, v, causal=True, score_mod=mod) * 2
                assert torch.equal(o, expected)
                for a, b in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
                    assert torch.allclose(a, b, atol=1e-6) and a.stride() == b.stride()


@pytest.mark.parametrize("modules", ["tilewise, torch", "torch, tilewise"])
def test_nothing_that_a_process_finds_out_first_compiles_again(modules):
    program = f"""
import {modules}
torch._dynamo.config.error_on_recompile = True
run = torch.compile(lambda q: tilewise.attention(q, q, q), fullgraph=True, dynamic=True, backend="eager")
for n in (9, 10, 11):
    q = torch.randn(2, n, 3, 8, requires_grad=True)
    assert torch.equal(run(q), tilewise.attention(q, q, q))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True, window=(7, 0)) + 1


def exported(strict=False):
    n, m = (torch.export.Dim(name, min=2, max=4096) for name in "nm")
    inputs = tuple(qkv(9, 11, dtype=torch.float32, grad=False))
    return torch.export.export(Layer(), inputs, dynamic_shapes=({1: n}, {1: m}, {1: m}), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict):
    file = io.BytesIO()
    torch.export.save(exported(strict), file)
    file.seek(0)
    program = torch.export.load(file)
    for run in (program.module(), program.run_decompositions().module()):
        for n, m in ((3, 5), (50, 77)):
            inputs = qkv(n, m, dtype=torch.float32, grad=False)
            assert same(run(*inputs), Layer()(*inputs))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(tmp_path):
    path = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "layer.pt2"))
    inputs = qkv(13, 17, dtype=torch.float32, grad=False)
    assert torch.allclose(torch._inductor.aoti_load_package(path)(*inputs), Layer()(*inputs), atol=1e-6)


# ---------------------------------------------------------------------------------------------------- determinism


@pytest.fixture
def deterministic():
    def switch(on):
        torch.use_deterministic_algorithms(on)

    yield switch
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def settings_seen(monkeypatch):
    """Whether each pass that runs was asked to be deterministic."""
    from tilewise import _attention, _torch

    seen = []

    def spied(function):
        def run(settings, *args, **more):
            seen.append(settings.deterministic)
            return function(settings, *args, **more)

        return run

    for module in (torch_ops, _torch):
        for name in ("run_forward", "run_backward"):
            monkeypatch.setattr(module, name, spied(getattr(_attention, name)))
    monkeypatch.setattr(torch_ops, "_RECORDED", "as if calls were recorded")  # operators take the general way
    return seen


def test_deterministic_algorithms_reach_compiled_and_exported_programs(deterministic, settings_seen):
    q, k, v = qkv()
    run = torch.compile(lambda *x: tilewise.attention(*x), fullgraph=True, backend="aot_eager")
    program = torch.export.export(Layer(), (q, k, v)).module()
    for on in (False, True, False):
        deterministic(on)
        for f in (run, program):
            settings_seen.clear()
            f(q, k, v).sum().backward()
            assert settings_seen == [on, on]


def test_kept_operator_calls_know_deterministic_algorithms(deterministic, monkeypatch):
    made = []
    problem = Settings.problem
    monkeypatch.setattr(
        Settings, "problem", lambda self, *args, **more: made.append(self.deterministic) or problem(self, *args, **more)
    )
    _ext.clear_quick_calls()
    q, k, v = qkv()
    run = torch.compile(lambda *x: tilewise.attention(*x), fullgraph=True, backend="aot_eager")
    expected = tilewise.attention(q, k, v)
    _ext.clear_quick_calls()
    made.clear()
    for on in (False, True, False):
        deterministic(on)
        o = run(q, k, v)
        o.sum().backward()
        assert torch.equal(o, expected)
    assert made == [False, True]  # one for both passes


@pytest.mark.parametrize("grad", [False, True])
def test_operators_take_tensors_without_memory(grad):
    q, k, v = [x.detach().to("meta").requires_grad_(grad) for x in qkv()]
    call = Call(q, k, v, meta=True)
    o, lse = FORWARD(*torch_ops.pack(call.settings, call.arrays, (0, 0)))
    assert (o.shape, o.device.type, lse.shape) == ((2, 5, 4, 6), "meta", (2, 4, 5))


@pytest.mark.parametrize("grad", [False, True])
def test_kept_operator_calls_take_each_mask_that_comes(grad):
    q, k, v = qkv(grad=grad)
    for shape in ((5, 7), (5, 7), (2, 1, 5, 7)):  # the second time as the first, with other numbers
        mask = torch.rand(shape) < 0.6
        o, _ = FORWARD(*arguments(q, k, v, mask=mask))
        expected = tilewise.attention(q, k, v, mask=mask, backend="reference")
        torch.testing.assert_close(o, expected)
        if grad:
            for mine, right in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected)), strict=True):
                torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("options", [{}, {"sinks": torch.zeros(4)}], ids=["quick", "general"])
def test_deterministic_algorithms_may_be_asked_for_after_the_forward_pass(deterministic, settings_seen, options):
    q, k, v = qkv()
    for _ in range(2):
        o = tilewise.attention(q, k, v, **options)
    settings_seen.clear()
    deterministic(True)
    o.sum().backward()
    assert settings_seen == [True]


def test_explain_says_what_is_promised(deterministic):
    q, k, v = qkv()
    words = lambda **options: [  # noqa: E731
        line.split() for line in tilewise.explain(q, k, v, **options).splitlines() if not line.startswith(" ")
    ]
    assert len(words()) == 2  # the passes
    assert not any({"deterministic", "batch_invariant"} & {*line} for line in words())
    assert all("batch_invariant" in line for line in words(batch_invariant=True))
    assert all("deterministic" in line for line in words(deterministic=True))
    deterministic(True)
    assert all("deterministic" in line for line in words())
    assert "deterministic" in str(tilewise.plan(q, k, v))


# ------------------------------------------------------------------------------------------------------- composite


CU_Q, CU_KV = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 5, 8])
CASES = {
    "plain": {},
    "top left": {"causal": "top_left", "softcap": 0.7},
    "window": {"window": (2, 1), "softmax_scale": 0.3},
    "chunk": {"chunk": 3, "q_offset": 2},
    "offsets": {"q_offset": torch.tensor([1, -3]), "causal": True},
    "bias": {"bias": randn(4, 5, 7), "causal": True},
    "broadcast bias": {"bias": randn(5, 1), "seqused_q": torch.tensor([2, 5])},
    "alibi": {"alibi_slopes": randn(2, 4), "seqused_kv": torch.tensor([3, 7])},
    "left padding": {"alibi_slopes": randn(4), "leftpad_kv": torch.tensor([1, 2]), "bias": randn(1, 1, 1, 7)},
    "sinks": {"sinks": randn(4), "q_offset": -3, "causal": True, "seqused_q": torch.tensor([4, 5])},
    "functions": {"score_mod": SCORE, "mask": masks.prefix(2) | masks.causal()},
    "a score of -inf": {"score_mod": lambda x, b, h, i, j, s: ops.where(i == j, float("-inf"), x)},
    "dropout": {"dropout_p": 0.3, "seed": (1, 2), "causal": True, "bias": randn(2, 1, 5, 7)},
    "lists": {"seqused_kv": [6, 0], "sinks": randn(4)},
    "array mask": {"mask": torch.arange(70).view(2, 1, 5, 7) % 3 != 0},
    "bhsd": {"layout": "bhsd", "causal": True, "bias": randn(4, 5, 7)},
    "packed": {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "causal": True, "alibi_slopes": randn(4), "sinks": randn(4)},
    "packed functions": {
        "cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "score_mod": SCORE, "bias": randn(3, 1, 5, 4),
        "seqused_kv": torch.tensor([3, 1, 2]), "leftpad_kv": torch.tensor([1, 0, 1]), "dropout_p": 0.3, "seed": 3,
    },
    "packed queries": {"cu_seqlens_q": CU_Q, "seqused_kv": torch.tensor([3, 6, 5]), "score_mod": SCORE, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_composite_is_the_same_formula(name):
    options = CASES[name]
    q, k, v = qkv(batch=3 if name == "packed queries" else 2)
    if "cu_seqlens_q" in options:
        q = randn(9, 4, 3)
    if "cu_seqlens_kv" in options:
        k, v = randn(8, 2, 3, seed=1), randn(8, 2, 6, seed=2)
    if "layout" in options:
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    leaves += [TABLE, ALPHA] if options.get("score_mod") is SCORE else []
    found = []
    for function in (tilewise.attention, composite):
        o, lse = function(q, k, v, return_lse=True, **options)
        weight = torch.sin(torch.arange(o.numel(), dtype=o.dtype)).view(o.shape)
        loss = (o * weight).sum() + torch.where(torch.isfinite(lse), lse, 0.0).square().sum()
        found.append([o, lse, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_composite_ignores_padding():
    q, k, v = qkv(grad=False)
    bad = [x.clone() for x in (q, k, v)]
    for x in bad[1:]:
        x[0, 3:] = float("nan")
    bad[0][1, 2:] = float("inf")
    options = {"seqused_kv": torch.tensor([3, 7]), "seqused_q": torch.tensor([5, 2])}
    results = []
    for inputs in ((q, k, v), bad):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = composite(*leaves, **options)
        results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(b).all() and torch.equal(a, b)


def math_attention(q, k, v, **options):
    """PyTorch's plain formula, [batch, heads, length, dim]."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def test_higher_derivatives_are_those_of_torchs_formula():
    q, k, v = (randn(1, 2, 3, 4, seed=n, grad=False) for n in range(3))
    bias = randn(3, 3, grad=False)
    mine = lambda q, bias: composite(q, k, v, layout="bhsd", bias=bias)  # noqa: E731
    theirs = lambda q, bias: math_attention(q, k, v, attn_mask=bias)  # noqa: E731
    tangents = (torch.ones_like(q), torch.cos(bias))
    for a, b in zip(
        torch.func.jvp(mine, (q, bias), tangents), torch.func.jvp(theirs, (q, bias), tangents), strict=True
    ):
        assert torch.allclose(a, b)
    hessians = [torch.func.hessian(lambda q, f=f: f(q, bias).square().sum())(q) for f in (mine, theirs)]
    assert hessians[0].abs().max() > 0.01 and torch.allclose(*hessians)
    batch = torch.stack([bias, -bias])
    assert torch.allclose(torch.vmap(lambda b: mine(q, b))(batch), torch.stack([theirs(q, b) for b in batch]))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "softcap": 1.5, "q_offset": -1},
        {"score_mod": tilewise.score_mod(lambda x, b, h, i, j, s: ops.tanh(x) * s.a[h] - i * j, a=randn(2))},
        {"sinks": randn(2, grad=False), "dropout_p": 0.4, "seed": 1},
    ],
    ids=lambda options: " ".join(options),
)
def test_gradgradcheck_and_forward_mode(options):
    q, k, v = randn(1, 3, 2, 2), randn(1, 3, 1, 2, seed=1), randn(1, 3, 1, 2, seed=2)

    def run(q, k, v):
        o, lse = composite(q, k, v, return_lse=True, **options)
        return o, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v), check_fwd_over_rev=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_composite_compiles(backend):
    q, k, v = qkv()
    options = {"causal": True, "dropout_p": 0.2, "seed": 3, "score_mod": SCORE}
    run = torch.compile(lambda *x: composite(*x, **options), fullgraph=True, backend=backend)
    assert torch.allclose(run(q, k, v), tilewise.attention(q, k, v, **options))


def test_composite_refuses_as_attention_does():
    q, k, v = qkv()
    for bad in ({"softcap": -1.0}, {"bias": randn(9, 9)}, {"window": (-2, 0)}, {"layout": "sbhd"}):
        with pytest.raises(tilewise.InvalidArgumentError) as expected:
            tilewise.attention(q, k, v, **bad)
        with pytest.raises(tilewise.InvalidArgumentError, match=re.escape(str(expected.value))):
            composite(q, k, v, **bad)
    with pytest.raises(tilewise.ArgumentTypeError, match="Did you mean 'softcap'"):
        composite(q, k, v, softcapp=1.0)
    with pytest.raises(tilewise.ArgumentTypeError, match=r"q: got a ndarray; allowed: a torch\.Tensor"):
        composite(*(x.detach().numpy() for x in (q, k, v)))


def test_empty_sizes():
    q, k, v = qkv()
    for inputs in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        for a, b in zip(composite(*inputs, return_lse=True), tilewise.attention(*inputs, return_lse=True), strict=True):
            assert torch.equal(a, b)


def test_what_has_no_derivative_names_composite():
    """Forward mode least of all may give zeros in silence, where nothing requires grad."""
    q, k, v = qkv(grad=False)
    args = arguments(q, k, v)
    one = torch.ones_like(q)
    names = r"torch_ops\.composite.*docs/torch\.md#second-derivatives"

    def dual(run):
        with torch.autograd.forward_ad.dual_level():
            return run(torch.autograd.forward_ad.make_dual(q, one))

    attention = lambda q: tilewise.attention(q, k, v)  # noqa: E731
    operator = lambda q: FORWARD(q, *args[1:])[0]  # noqa: E731
    for run in (attention, operator):
        for call in (
            lambda run=run: torch.func.jvp(run, (q,), (one,)),
            lambda run=run: dual(run),
            lambda run=run: torch.func.grad(lambda q: torch.func.grad(lambda q: run(q).square().sum())(q).sum())(q),
            lambda run=run: torch.func.hessian(lambda q: run(q).square().sum())(q),
        ):
            with pytest.raises(tilewise.UnsupportedError, match=names):
                call()
    assert "#" + "second-derivatives" in names and "## Second derivatives" in PAGE.read_text()
    with pytest.raises(Exception, match="tilewise"):
        torch.compile(lambda: torch.func.jvp(attention, (q,), (one,)), fullgraph=True, backend="eager")()


# ------------------------------------------------------------------------------------------------------- the rest


def test_the_host_is_quick():
    """Pairs of blocks in turn. The bars are double of what a quiet machine shows, for those that are not quiet."""
    x = [torch.randn(1, 1, 1, 8) for _ in range(3)]
    y = [torch.randn(1, 1, 1, 8, requires_grad=True) for _ in range(3)]

    def seconds(run):
        start = time.perf_counter()
        for _ in range(50):
            run()
        return time.perf_counter() - start

    for inputs, bar in ((x, 2.4), (y, 3.0)):

        def step(function, inputs=inputs, **options):
            o = function(*inputs, **options)
            if o.requires_grad:
                o.sum().backward()

        mine = functools.partial(step, tilewise.attention, layout="bhsd")
        theirs = functools.partial(step, F.scaled_dot_product_attention)
        for run in (mine, theirs):
            seconds(run)
        ratios = [
            seconds(mine) / seconds(theirs) if n % 2 else 1 / (seconds(theirs) / seconds(mine)) for n in range(40)
        ]
        assert statistics.median(ratios) < bar


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
