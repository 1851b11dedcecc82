"""Traced calls: the operators, torch.compile with fullgraph, torch.export, and modes that replace operators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tilewise
from tilewise import masks
from tilewise._problem import Call

torch = pytest.importorskip("torch")

KEEP = torch.arange(6).expand(2, -1) % 5 != 2
OFFSETS = torch.tensor([1, 0])
MOD = masks.mod(lambda b, h, i, j, s: (i + j) % s.m != 0, m=3)
TABLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(7)).requires_grad_()
SCORE = tilewise.score_mod(lambda x, b, h, i, j, s: x * s.a + s.t[h, j], t=TABLE, a=2.0)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(seqlen_q=4, seqlen_kv=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, seqlen_q, 4, 8), (2, seqlen_kv, 2, 8), (2, seqlen_kv, 2, 5))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def same(a, b):
    return torch.equal(a.detach(), b.detach())


def check(function, *inputs, backend="aot_eager", wanted=()):
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    wanted = [*inputs, *wanted]
    results = []
    for run in (compiled, function):
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(sum(x.sum() for x in outputs), wanted)
        results.append([*outputs, *gradients])
    for a, b in zip(*results, strict=True):
        assert same(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": (2, 1), "softcap": 3.0, "softmax_scale": 0.3},
        {"mask": masks.key_padding(KEEP) & MOD | masks.prefix(2)},
        {"seqused_kv": [3, 4], "sinks": [0.0, 1.0, 2.0, 3.0], "dropout_p": 0.5, "seed": 4},
        {"dropout_p": 0.5, "seed": torch.tensor([4, 9]), "mask": KEEP[:, None, None]},
        {"causal": True, "q_offset": OFFSETS, "max_seqlen_q": OFFSETS.max(), "seqused_kv": OFFSETS + 3},
        {"causal": True, "q_offset": OFFSETS[0]},
    ],
    ids=lambda options: " ".join(options),
)
def test_fullgraph(options):
    check(lambda q, k, v: tilewise.attention(q * 2, k, v, return_lse=True, **options), *qkv(), backend="eager")


def test_fullgraph_with_captured_gradients():
    check(
        lambda q, k, v: tilewise.attention(q * 2, k, v, score_mod=SCORE, mask=MOD & masks.key_padding(KEEP)) + 1,
        *qkv(),
        wanted=[TABLE],
    )


def test_fullgraph_keeps_the_order_of_axes():
    q, k, v = qkv()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    check(lambda q, k, v: tilewise.attention(q, k, v, causal=True), q, k, v)


def test_fullgraph_of_packed_sequences():
    cu = torch.tensor([0, 3, 3, 8])
    packed = [torch.randn(8, 2, 4, requires_grad=True) for _ in range(3)]
    check(
        lambda q, k, v: tilewise.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_kv=cu, return_lse=True),
        *packed,
    )


def test_fullgraph_of_masks_made_inside():
    check(
        lambda q, k, v: tilewise.attention(q, k, v, mask=masks.key_padding(KEEP) & masks.causal() | masks.window(0, 0)),
        *qkv(),
        backend="eager",
    )


def test_fullgraph_under_autocast_and_vmap():
    def cast(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return tilewise.attention(q, k, v)

    check(cast, *qkv(), backend="eager")
    check(
        lambda q, k, v: torch.vmap(lambda a: tilewise.attention(a[None], k[:1], v[:1])[0])(q), *qkv(), backend="eager"
    )


def test_fullgraph_with_dynamic_shapes():
    run = torch.compile(
        lambda q, k, v: tilewise.attention(q, k, v, causal=True, window=(k.shape[1] // 2, 0)),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for n in (5, 9, 17):
        q, k, v = qkv(n, n + 2)
        o = run(q, k, v)
        assert same(o, tilewise.attention(q, k, v, causal=True, window=((n + 2) // 2, 0)))
        o.sum().backward()
        assert q.grad is not None


def test_another_mask_or_function_is_another_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def run(q, k, v, mask, score_mod):
        return tilewise.attention(q, k, v, mask=mask, score_mod=score_mod)

    def score(f, **captured):
        return tilewise.score_mod(f, **captured)

    q, k, v = qkv()
    triple = score(lambda x, b, h, i, j, s: x * 3)
    padding, other = masks.key_padding(KEEP), masks.key_padding(~KEEP)
    for mask, mod in ((masks.causal(), None), (padding, None), (other, None), (padding, SCORE), (MOD, triple)):
        assert same(run(q, k, v, mask, mod), tilewise.attention(q, k, v, mask=mask, score_mod=mod))
    for a in (4.0, 5.0):
        mod = score(lambda x, b, h, i, j, s: x * s.a, a=a)
        assert same(run(q, k, v, None, mod), tilewise.attention(q, k, v, score_mod=mod))


def test_dropout_is_drawn_anew():
    q, k, v = qkv()
    run = torch.compile(lambda: tilewise.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = run(), run()
    assert not same(first, second)
    torch.manual_seed(1)
    assert same(first, tilewise.attention(q, k, v, dropout_p=0.5))
    first.sum().backward()


def test_halves_and_merge():
    q, k, v = qkv()

    def run(q, k, v):
        o, lse, rng = tilewise.attention_forward(q, k, v, causal=True, dropout_p=0.2)
        g = tilewise.attention_backward(torch.ones_like(o), q, k, v, o, lse, rng=rng, causal=True, dropout_p=0.2)
        parts = [tilewise.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 2), (2, 6))]
        return g.dq, g.dv, *tilewise.merge([o for o, _ in parts], [lse for _, lse in parts])

    torch.manual_seed(0)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.manual_seed(0)
    for a, b in zip(found, run(q, k, v), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_out():
    q, k, v = (x.detach() for x in qkv())
    out = torch.zeros(2, 4, 4, 5)
    torch.compile(lambda: tilewise.attention(q, k, v, out=out), fullgraph=True, backend="eager")()
    assert same(out, tilewise.attention(q, k, v))


def test_a_bare_function_breaks_the_graph_and_works():
    q, k, v = qkv()

    def run(q, k, v):
        return tilewise.attention(q + 1, k, v, score_mod=lambda x, b, h, i, j, s: x * 2) + 1

    assert same(torch.compile(run, backend="eager")(q, k, v), run(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return tilewise.attention(q, k, v, causal=True, mask=masks.key_padding(KEEP), score_mod=SCORE)

    q, k, v = qkv()
    program = torch.export.export(Layer(), (q, k, v), strict=strict)
    assert "tilewise.attention_forward" in str(program.graph)
    assert same(program.module()(q, k, v), Layer()(q, k, v))


def test_modes_see_one_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q, k, v: tilewise.attention(q, k, v, score_mod=lambda x, b, h, i, j, s: x + j))(*qkv())
    assert graph.code.count("torch.ops.tilewise.attention_forward") == 1


def packed_call(rng=(0, 0), **options):
    from tilewise import torch_ops

    call = Call(*qkv(), **options)
    return torch_ops.pack(call.settings, call.arrays, rng)


@pytest.mark.parametrize(
    ("rng", "options"),
    [
        ((0, 0), {}),
        (
            (0, 0),
            {"mask": MOD & masks.key_padding(KEEP), "score_mod": SCORE, "bias": torch.zeros(4, 6), "causal": True},
        ),
        (torch.tensor([1, 2]), {"dropout_p": 0.2, "sinks": torch.zeros(4), "seqused_kv": torch.tensor([3, 6])}),
    ],
    ids=["plain", "functions", "dropout"],
)
def test_opcheck(rng, options):
    args = packed_call(rng, **options)
    torch.library.opcheck(torch.ops.tilewise.attention_forward.default, args)
    o, lse = torch.ops.tilewise.attention_forward(*args)
    backward = (torch.ones_like(o), o.detach(), lse.detach(), None, *args, [0, 2])
    checks = ("test_schema", "test_faketensor")  # it has no derivative to register
    torch.library.opcheck(torch.ops.tilewise.attention_backward.default, backward, test_utils=checks)


@pytest.mark.parametrize(
    "options", [{}, {"mask": MOD | masks.chunk(2), "score_mod": SCORE}], ids=["plain", "functions"]
)
def test_options_are_one_line(options):
    """TorchInductor writes them into comments of what it makes for a GPU: a second line was no Python (SyntaxError)."""
    text = packed_call(**options)[-1]
    assert isinstance(text, str) and text.isprintable(), text


def test_second_derivatives_are_refused():
    o, _ = torch.ops.tilewise.attention_forward(*(args := packed_call()))
    (dq,) = torch.autograd.grad(o.square().sum(), args[0], create_graph=True)
    with pytest.raises(tilewise.UnsupportedError, match="second-derivatives"):
        dq.sum().backward()


def test_programs_of_inductor_leave_the_dispatcher_out(tmp_path) -> None:
    """Also those that a later process finds on disk: nothing is traced there."""
    program = (
        "import torch, tilewise as tw\n"
        "from torch._dynamo.utils import counters\n"
        "q = torch.linspace(-1, 1, 80).reshape(1, 5, 2, 8).requires_grad_()\n"
        "call = lambda q: tw.attention(q * 2, q, q, causal=True).square().sum()\n"
        "f = torch.compile(call, fullgraph=True)\n"
        "f(q).backward()\n"
        "q.grad = None\n"
        "with torch.autograd.profiler.profile() as seen:\n"
        "    f(q).backward()\n"
        "(known,) = torch.autograd.grad(call(q), q)\n"
        "torch.testing.assert_close(q.grad, known)\n"
        "hits = sum(n for name, n in counters['aot_autograd'].items() if name == 'autograd_cache_hit')\n"
        "print(sum('tilewise::' in event.name for event in seen.function_events), hits)\n"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["0", "0"], ["0", "1"]]


def test_first_call_of_a_process_may_be_compiled() -> None:
    """What the library finds out in its first call must not stop the compiler that traces it."""
    program = (
        "import torch, tilewise as tw\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "f = torch.compile(lambda q: tw.attention(q, q, q), fullgraph=True, backend='eager')\n"
        "assert torch.equal(f(q), tw.attention(q, q, q)) and f(q).shape == q.shape\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
