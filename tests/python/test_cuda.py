"""Tensors on CUDA devices: values, streams, graphs, seeds, and that nothing waits for the device.

Values are compared with the CPU in float64. Most tests need a GPU and are skipped without one; those of the second half
check the way there with stand-ins.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import tilewise
from tilewise import _cuda, _ext, masks, ops
from tilewise._attention import run_backward, run_forward
from tilewise._problem import Call

torch = pytest.importorskip("torch")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tensors(*shapes, seed=0, dtype=torch.float32, device="cuda", grad=False):
    """The same numbers for every device and dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device).requires_grad_(grad)
        for shape in shapes
    ]


def qkv(batch=2, seqlen_q=70, seqlen_kv=90, heads=4, heads_kv=2, dim=32, dim_v=24, **how):
    return tensors(
        (batch, seqlen_q, heads, dim), (batch, seqlen_kv, heads_kv, dim), (batch, seqlen_kv, heads_kv, dim_v), **how
    )


def wide(tensor):
    """A copy on the CPU in float64; integers stay what they are."""
    copy = tensor.detach().cpu()
    return (copy.double() if copy.is_floating_point() else copy).requires_grad_(tensor.requires_grad)


def close(a, b, dtype):
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    finite = torch.isfinite(b)
    assert torch.equal(finite, torch.isfinite(a))
    assert torch.equal(a[~finite], b[~finite])
    limit = TOLERANCE[dtype] * max(1.0, float(b[finite].abs().max()) if finite.any() else 1.0)
    worst = float((a - b)[finite].abs().max()) if finite.any() else 0.0
    assert worst <= limit, f"off by {worst:.2e}, allowed {limit:.2e}"


def compare(inputs, call, dtype=torch.float32):
    """Runs call(*inputs) on the GPU and on the CPU in float64: o, lse and every gradient."""
    exact = [wide(x) for x in inputs]
    outputs, expected = call(*inputs), call(*exact)
    for a, b in zip(outputs, expected, strict=True):
        assert a.device == inputs[0].device
        close(a, b, dtype)
    weights = tensors(*[x.shape for x in expected], seed=9, dtype=torch.float64, device="cpu")
    weights = [torch.where(torch.isfinite(x), w, 0.0) for x, w in zip(expected, weights, strict=True)]
    wanted = [n for n, x in enumerate(inputs) if x.requires_grad]
    given = [w.to(x.dtype).to(x.device) for w, x in zip(weights, outputs, strict=True)]
    found = torch.autograd.grad(outputs, [inputs[n] for n in wanted], given)
    known = torch.autograd.grad(expected, [exact[n] for n in wanted], weights)
    for a, b in zip(found, known, strict=True):
        assert a.dtype == dtype and a.device == inputs[0].device
        close(a, b, dtype)


def attend(q, k, v, **options):
    return tilewise.attention(q, k, v, return_lse=True, **options)


# Each takes the device that it makes its arrays on.
OPTIONS = {
    "plain": lambda d: {},
    "causal": lambda d: {"causal": True},
    "top_left": lambda d: {"causal": "top_left"},
    "window": lambda d: {"window": (20, 3)},
    "window and offset": lambda d: {"window": (9, 0), "q_offset": -3},
    "offsets": lambda d: {"causal": True, "q_offset": torch.tensor([4, -5], device=d)},
    "one offset": lambda d: {"causal": True, "q_offset": torch.tensor(7, device=d)},
    "chunk": lambda d: {"chunk": 16, "causal": True},
    "softcap and scale": lambda d: {"softcap": 2.0, "softmax_scale": 0.3},
    "dropout": lambda d: {"dropout_p": 0.3, "seed": 12345, "causal": True},
    "used": lambda d: {
        "seqused_q": torch.tensor([70, 33], device=d),
        "seqused_kv": torch.tensor([41, 90], device=d),
        "leftpad_kv": torch.tensor([0, 13], device=d),
        "causal": True,
    },
    "lists": lambda d: {"seqused_kv": [41, 90], "sinks": [0.5, -1.0, 0.0, 2.0]},
    "key_padding": lambda d: {"mask": masks.key_padding(torch.arange(90, device=d).expand(2, -1) % 7 != 0)},
    "documents": lambda d: {
        "mask": masks.documents(
            torch.arange(70, device=d).expand(2, -1) // 20, torch.arange(90, device=d).expand(2, -1) // 20
        )
    },
    "prefix": lambda d: {"mask": masks.prefix(torch.tensor([30, 5], device=d))},
    "dense": lambda d: {"mask": torch.arange(70 * 90, device=d).reshape(70, 90) % 5 != 0},
    "blocks": lambda d: {
        "mask": masks.blocks(torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], device=d)[None, None], 32, 32)
    },
    "joined": lambda d: {"mask": (masks.window(5, 5) | masks.chunk(32)) & ~masks.window(1, 1)},
    "mask_mod": lambda d: {
        "mask": masks.mod(lambda b, h, i, j, s: (i + j) % s.m < s.t[h], m=5, t=torch.tensor([1, 2, 3, 4], device=d))
    },
    "score_mod": lambda d: {"score_mod": tilewise.score_mod(lambda x, b, h, i, j, s: ops.tanh(x) - 0.05 * abs(i - j))},
    "batch_invariant": lambda d: {"batch_invariant": True, "causal": True},
    "deterministic": lambda d: {"deterministic": True},
}


@gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_values(name):
    compare(qkv(grad=True), lambda q, k, v: attend(q, k, v, **OPTIONS[name](q.device)))


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_values_of_other_dtypes(dtype):
    compare(qkv(grad=True, dtype=dtype), lambda q, k, v: attend(q, k, v, causal=True), dtype)


@gpu
@pytest.mark.parametrize("dims", [(1, 1), (8, 8), (40, 17), (64, 64), (128, 128)])
def test_values_of_head_dims(dims):
    compare(qkv(dim=dims[0], dim_v=dims[1], grad=True), lambda q, k, v: attend(q, k, v, causal=True))


@gpu
def test_values_of_layouts_and_strides():
    inputs = tensors((2, 4, 70, 32), (2, 2, 90, 32), (2, 2, 90, 32), grad=True)
    compare(inputs, lambda q, k, v: attend(q, k, v, layout="bhsd", causal=True))
    inputs = tensors((2, 33, 3, 4, 17), grad=True)
    compare(inputs, lambda x: attend(x[:, :, 0, :, 1:], x[:, :, 1, :, 1:], x[:, :, 2, :, :-1], causal=True))
    q = inputs[0].detach()[:, :, 0].transpose(1, 2)  # [2, 4, 33, 17], heads nearer than rows
    assert tilewise.attention(q, q, q, layout="bhsd").stride() == torch.empty_like(q).stride()


@gpu
def test_values_of_packed_sequences():
    def call(q, k, v):
        cu_q = torch.tensor([0, 10, 10, 47, 60], device=q.device)
        cu_kv = torch.tensor([0, 21, 30, 70, 90], device=q.device)
        return attend(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=cu_q.max())

    compare(tensors((64, 4, 32), (95, 2, 32), (95, 2, 32), grad=True), call)  # some rows in no sequence


DOCUMENTS = {
    "rise": lambda b, n: n // (170 + 90 * b),
    "padding at the end": lambda b, n: torch.where(n < 500 + b, n // 200, -1),
    "one comes back": lambda b, n: n // 150 % 3,
    "short": lambda b, n: n // 30,
}


@gpu
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_documents_that_are_runs(name, dim):
    """Each is a sequence of its own, if the GPU finds that no id comes back; values are the same either way."""
    rows = torch.arange(600).expand(2, -1)
    ids = DOCUMENTS[name](torch.arange(2)[:, None], rows)

    def call(q, k, v):
        return attend(
            q, k, v, causal=True, window=(90, 0), mask=masks.documents(ids.to(q.device)),
            sinks=[0.5, -1.0, 0.0, 2.0], alibi_slopes=torch.tensor([0.1, 0.2, 0.0, 0.5], device=q.device),
        )  # fmt: skip

    inputs = tensors((2, 600, 4, dim), (2, 600, 2, dim), (2, 600, 2, dim), dtype=torch.bfloat16)
    outputs, expected = call(*inputs), call(*[wide(x) for x in inputs])
    for a, b in zip(outputs, expected, strict=True):
        close(a, b, torch.bfloat16)


@gpu
def test_gradients_of_everything_else():
    extra = tensors((1, 4, 70, 90), (2, 4), (4,), (4, 90), (), seed=1, grad=True)

    def call(q, k, v, bias, slopes, sinks, table, alpha):
        mod = tilewise.score_mod(lambda x, b, h, i, j, s: x * s.alpha + s.table[h, j], table=table, alpha=alpha)
        slopes = slopes * 0.05
        return attend(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, score_mod=mod, causal=True)

    compare([*qkv(grad=True), *extra], call)


@gpu
def test_empty_problems():
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        q = torch.zeros(shape, device="cuda", requires_grad=True)
        o = tilewise.attention(q, q, q)
        assert o.shape == q.shape
        o.sum().backward()
    q, k = torch.ones(1, 3, 2, 8, device="cuda"), torch.ones(1, 0, 2, 8, device="cuda")
    o, lse = tilewise.attention(q, k, k, return_lse=True)
    assert (o == 0).all() and torch.isneginf(lse).all()


# ------------------------------------------------------------------------------------------ waiting, streams, graphs


@contextlib.contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def everything(q, k, v, keep, cu, seed=None):
    o = tilewise.attention(q, k, v, causal=True, mask=masks.key_padding(keep), dropout_p=0.2, seed=seed)
    (dq,) = torch.autograd.grad(o.sum(), q)
    packed = tilewise.attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_kv=[0, 50, 90], sinks=[0.0] * 4)
    with torch.no_grad():
        o2, lse, rng = tilewise.attention_forward(q, k, v, dropout_p=0.2, seed=3)
        tilewise.attention_backward(o2, q, k, v, o2, lse, rng=rng, dropout_p=0.2)
        tilewise.merge([o2, o2], [lse, lse])
        tilewise.plan(q, k, v, q_offset=torch.zeros(2, dtype=torch.int32, device=q.device)).run(q, k, v)
    return o, dq, packed


@gpu
def test_nothing_waits_for_the_device():
    q, k, v = qkv(grad=True)
    keep, cu = torch.ones(2, 90, dtype=torch.bool, device="cuda"), torch.tensor([0, 30, 70], device="cuda")
    everything(q, k, v, keep, cu)
    with no_waiting():
        everything(q, k, v, keep, cu)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(2 * 10**9)  # about a second
    everything(q, k, v, keep, cu)
    busy = not torch.cuda.current_stream().query()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    device = time.perf_counter() - start
    assert busy, "the calls came back after the device was done"
    assert host < device / 2


@gpu
def test_memory_comes_from_torch_alone():
    q, k, v = qkv(batch=4, seqlen_q=512, seqlen_kv=512, grad=True)
    for _ in range(3):
        tilewise.attention(q, k, v, causal=True).sum().backward()
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for _ in range(20):
        tilewise.attention(q, k, v, causal=True).sum().backward()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - reserved
    assert free - torch.cuda.mem_get_info()[0] <= grown


@gpu
def test_side_streams():
    q, k, v = qkv()
    expected = tilewise.attention(q, k, v, causal=True)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late.copy_(q)  # nobody who runs elsewhere sees this
        late.requires_grad_()
        o = tilewise.attention(late, k, v, causal=True)
        (dq,) = torch.autograd.grad(o.sum(), late)
    stream.synchronize()
    assert torch.equal(o, expected)
    q.requires_grad_()
    close(dq, torch.autograd.grad(tilewise.attention(q, k, v, causal=True).sum(), q)[0], torch.float32)


@gpu
def test_threads_with_streams_of_their_own():
    inputs = [qkv(seqlen_q=40 + 10 * n, seed=n) for n in range(6)]
    expected = [tilewise.attention(*each, causal=True) for each in inputs]
    torch.cuda.synchronize()

    def work(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [tilewise.attention(*inputs[n], causal=True) for _ in range(20)]
        stream.synchronize()
        return all(torch.equal(each, expected[n]) for each in results)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def captured(function):
    """(graph, results) of a function that has run once before, on the stream that torch wants captures on."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@gpu
def test_graph_of_forward_and_backward():
    q, k, v = qkv(grad=True)
    used = torch.tensor([90, 90], device="cuda")

    def step():
        o, lse = attend(q, k, v, causal=True, seqused_kv=used)
        return o, lse, *torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))

    graph, results = captured(step)
    for n, lengths in enumerate(([90, 90], [17, 64])):  # new data and new lengths in the same memory
        with torch.no_grad():
            for old, new in zip((q, k, v), qkv(seed=n + 5), strict=True):
                old.copy_(new)
            used.copy_(torch.tensor(lengths))
        graph.replay()
        got = [x.clone() for x in results]
        for a, b in zip(got, step(), strict=True):
            close(a, b, torch.float32)


@gpu
def test_graph_with_dropout_has_a_new_mask_in_every_replay():
    q, k, v = qkv()

    def step():
        o, lse, rng = tilewise.attention_forward(q, k, v, dropout_p=0.3)
        g = tilewise.attention_backward(torch.ones_like(o), q, k, v, o, lse, rng=rng, dropout_p=0.3)
        return o, g.dq, rng

    graph, (o, dq, rng) = captured(step)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(rng.tolist())
        call = [wide(x).requires_grad_() for x in (q, k, v)]
        expected = tilewise.attention(*call, dropout_p=0.3, seed=seen[-1])
        close(o, expected, torch.float32)
        close(dq, torch.autograd.grad(expected.sum(), call[0])[0], torch.float32)
    assert len({tuple(each) for each in seen}) == 3


@gpu
def test_graph_of_autograd_with_dropout():
    q, k, v = qkv(grad=True)

    def step():
        o = tilewise.attention(q, k, v, dropout_p=0.5)
        return o, *torch.autograd.grad(o.sum(), (v,))

    graph, (o, dv) = captured(step)
    graph.replay()
    first = o.clone(), dv.clone()
    graph.replay()
    assert not torch.equal(first[0], o) and not torch.equal(first[1], dv)
    # o = p' v and dv = p'^T 1: equal only if forward and backward saw one mask.
    close((dv * v).sum(), o.sum(), torch.bfloat16)


@gpu
def test_lists_are_refused_in_a_capture():
    q, k, v = qkv()
    tilewise.attention(q, k, v, seqused_kv=[3, 4])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(tilewise.InvalidArgumentError, match="seqused_kv.*captured"), torch.cuda.graph(graph):
        tilewise.attention(q, k, v, seqused_kv=[3, 4])
    torch.cuda.synchronize()


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    inputs = qkv(device="cuda:1", grad=True)
    assert torch.cuda.current_device() == 0
    compare(inputs, lambda q, k, v: attend(q, k, v, causal=True, dropout_p=0.1, seed=5))
    with torch.cuda.device(1):
        compare(inputs, lambda q, k, v: attend(q, k, v, causal=True, dropout_p=0.1, seed=5))
    assert torch.cuda.current_device() == 0
    near = qkv()
    with pytest.raises(tilewise.InvalidArgumentError, match=r"k: .*cuda:0; .*cuda:1, that of q"):
        tilewise.attention(inputs[0], near[1], near[2])
    with pytest.raises(tilewise.InvalidArgumentError, match=r"out: .*cuda:0; .*cuda:1"):
        tilewise.attention(*[x.detach() for x in inputs], out=torch.empty(2, 70, 4, 24, device="cuda"))


# ------------------------------------------------------------------------------------------------------------- seeds


@gpu
def test_seeds():
    q, k, v = qkv()
    pair = torch.tensor([7, 3], device="cuda")
    same = [
        tilewise.attention(q, k, v, dropout_p=0.4, seed=seed) for seed in (pair, (7, 3), np.array([7, 3]), pair.cpu())
    ]
    for each in same[1:]:
        assert torch.equal(same[0], each)
    close(same[0], tilewise.attention(*map(wide, (q, k, v)), dropout_p=0.4, seed=(7, 3)), torch.float32)
    torch.manual_seed(3)
    first = tilewise.attention(q, k, v, dropout_p=0.4)
    second = tilewise.attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(first, tilewise.attention(q, k, v, dropout_p=0.4)) and not torch.equal(first, second)
    o, lse, rng = tilewise.attention_forward(q, k, v, dropout_p=0.4, seed=11)
    assert rng.tolist() == [11, 0] and rng.is_cuda and rng.dtype == torch.int64
    a = tilewise.attention_backward(o, q, k, v, o, lse, rng=rng, dropout_p=0.4)
    b = tilewise.attention_backward(o, q, k, v, o, lse, seed=11, dropout_p=0.4)
    close(a.dq, b.dq, torch.float32)
    keep = tilewise.dropout_mask(2, 4, 70, 90, dropout_p=0.4, seed=rng)
    assert keep.is_cuda and torch.equal(keep.cpu(), torch.from_numpy(tilewise.dropout_mask(2, 4, 70, 90, dropout_p=0.4, seed=11)))  # fmt: skip


@gpu
def test_a_seed_that_changes_before_the_backward_is_noticed():
    q, k, v = qkv(grad=True)
    pair = torch.tensor([7, 3], device="cuda")
    o = tilewise.attention(q, k, v, dropout_p=0.4, seed=pair)
    pair += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@gpu
def test_checkpoint_replays_the_dropout():
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv(grad=True)
    run = lambda q, k, v: tilewise.attention(q, k, v, dropout_p=0.3).square().sum()  # noqa: E731
    torch.manual_seed(0)
    plain = torch.autograd.grad(run(q, k, v), (q, k, v))
    torch.manual_seed(0)
    again = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False), (q, k, v))
    for a, b in zip(plain, again, strict=True):
        close(a, b, torch.float32)


# --------------------------------------------------------------------------------------------------------- the rest


@gpu
def test_autocast_and_determinism():
    q, k, v = qkv(grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        o = tilewise.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert tilewise.attention(q, k, v).dtype == torch.float32
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(tilewise.attention(q, k, v, causal=True).sum(), (q, k, v)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@gpu
def test_questions():
    q, k, v = qkv()
    assert tilewise.supports(q, k, v, causal=True) == (True, [])
    assert tilewise.supports(q, k, v, causal=True, backward=True) == (True, [])
    text = tilewise.explain(q, k, v, causal=True)
    assert "cuda:0" in text and "implementation:" in text
    ok, reasons = tilewise.supports(q, k, v, backend="cpu_tiled")
    assert not ok and "cuda:0" in " ".join(reasons)
    close(
        tilewise.attn_probs(q, k, rows=[3, 69], heads=[1], causal=True),
        tilewise.attn_probs(wide(q), wide(k), rows=[3, 69], heads=[1], causal=True),
        torch.float32,
    )
    exact = tilewise.reference(q, k, v, causal=True)
    assert exact.is_cuda and exact.dtype == torch.float64
    close(tilewise.attention(q, k, v, causal=True), exact, torch.float32)
    q.requires_grad_()
    tilewise.reference(q, k, v, causal=True).sum().backward()
    assert q.grad.is_cuda


@gpu
def test_merge():
    q, k, v = qkv(grad=True)
    parts = [attend(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 30), (30, 31), (31, 90))]
    o, lse = tilewise.merge([o for o, _ in parts], [lse for _, lse in parts])
    whole = attend(q, k, v)
    close(o, whole[0], torch.float32)
    close(lse, whole[1], torch.float32)
    found = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
    for a, b in zip(found, torch.autograd.grad(whole[0].sum() + whole[1].sum(), (q, k, v)), strict=True):
        close(a, b, torch.float32)


@gpu
def test_plans():
    q, k, v = qkv()
    plan = tilewise.plan(q, k, v, causal=True, return_lse=True)
    expected = attend(q, k, v, causal=True)
    workspace = torch.full(
        (plan.workspace_bytes + 64,), 255, dtype=torch.uint8, device="cuda"
    )  # contents do not matter
    for scratch in (None, workspace):
        for a, b in zip(plan.run(q, k, v, workspace=scratch), expected, strict=True):
            assert torch.equal(a, b)
    longer = qkv(batch=5, seqlen_q=200, seqlen_kv=300)
    close(plan.run(*longer)[0], attend(*longer, causal=True)[0], torch.float32)
    with pytest.raises(tilewise.InvalidArgumentError, match="workspace"):
        plan.run(q, k, v, workspace=torch.empty(1 << 20, dtype=torch.uint8))
    back = tilewise.plan(q, k, v, causal=True, backward=True)
    o, lse = expected
    a = back.run_backward(o, q, k, v, o, lse)
    b = tilewise.attention_backward(o, q, k, v, o, lse, causal=True)
    close(a.dk, b.dk, torch.float32)


@gpu
def test_lengths_and_batch_make_no_new_plans():
    tilewise.attention(*qkv(), causal=True)
    count = _ext.num_plans()
    for batch, rows in ((1, 5), (3, 128), (2, 511)):
        tilewise.attention(*qkv(batch=batch, seqlen_q=rows, seqlen_kv=rows), causal=True, softmax_scale=0.1 * batch)
        tilewise.attention(*qkv(batch=batch, seqlen_q=rows, seqlen_kv=rows + 3), causal=True)
    assert _ext.num_plans() == count


@gpu
def test_bad_lengths_are_clamped_or_refused():
    q, k, v = qkv()
    used = torch.tensor([5000, -3], device="cuda", dtype=torch.int32)
    o, lse = attend(q, k, v, seqused_kv=used)
    torch.cuda.synchronize()
    close(o[:1], attend(q[:1], k[:1], v[:1])[0], torch.float32)
    assert (o[1] == 0).all() and torch.isneginf(lse[1]).all()
    with pytest.raises(tilewise.InvalidArgumentError, match="seqused_kv"):
        tilewise.attention(q, k, v, seqused_kv=used, validate=True)


@gpu
def test_arrays_elsewhere_are_refused_by_name():
    q, k, v = qkv()
    for name, options in {
        "bias": {"bias": torch.zeros(70, 90)},
        "sinks": {"sinks": np.zeros(4)},
        "key_padding": {"mask": masks.key_padding(np.ones((2, 90), bool))},
        "cu_seqlens_q": {"cu_seqlens_q": torch.tensor([0, 70])},
        "score_mod's t": {"score_mod": tilewise.score_mod(lambda x, b, h, i, j, s: x + s.t[j], t=torch.zeros(90))},
        "out": {"out": torch.empty(2, 70, 4, 24)},
    }.items():
        with pytest.raises(tilewise.InvalidArgumentError, match=rf"{name}: got .*cuda:0, that of q"):
            tilewise.attention(q, k, v, **options)
    with pytest.raises(tilewise.InvalidArgumentError, match=r"sinks: .*cuda:0; .*cpu, that of q"):
        tilewise.attention(q.cpu(), k.cpu(), v.cpu(), sinks=torch.zeros(4, device="cuda"))
    with pytest.raises(tilewise.ArgumentTypeError, match="softmax_scale.*waits"):
        tilewise.attention(q, k, v, softmax_scale=torch.ones((), device="cuda"))


@gpu
def test_vmap_and_func_grad():
    q, k, v = tensors((3, 2, 9, 2, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8))
    run = lambda q, k, v: tilewise.attention(q, k, v, causal=True)  # noqa: E731
    expected = torch.stack([run(*each) for each in zip(q, k, v, strict=True)])
    close(torch.vmap(run)(q, k, v), expected, torch.float32)
    grad = torch.func.grad(lambda q: run(q, k[0], v[0]).square().sum())(q[0])
    assert grad.is_cuda and torch.isfinite(grad).all()


@gpu
def test_operators():
    from tilewise import torch_ops

    q, k, v = qkv(grad=True, seqlen_q=7, seqlen_kv=9)
    call = Call(q, k, v, causal=True, mask=masks.key_padding(torch.ones(2, 9, dtype=torch.bool, device="cuda")))
    args = torch_ops.pack(call.settings, call.arrays, (0, 0))
    torch.library.opcheck(torch.ops.tilewise.attention_forward.default, args, rtol=1e-4, atol=1e-5)


@gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    torch._dynamo.reset()
    q, k, v = qkv(grad=True)
    keep = torch.arange(90, device="cuda").expand(2, -1) % 7 != 0
    mask = masks.key_padding(keep)

    def step(q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True, mask=mask) + 1

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(3):
        o = compiled(q, k, v)
        found = torch.autograd.grad(o.sum(), (q, k, v))
    expected = step(q, k, v)
    close(o, expected, torch.float32)
    for a, b in zip(found, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        close(a, b, torch.float32)


# ------------------------------------------------------------------------------------------------- without a device


class _FakePlan:
    """Runs on the CPU what was prepared for a device, and keeps what it was given."""

    def __init__(self):
        self.seen = []

    def _run(self, run, problem, *args):
        *views, address, size, stream = args
        self.seen.append((problem.device_type, problem.device_index, address % 64, size, stream))
        problem.device_type = problem.device_index = 0
        run(problem, *views)

    def forward(self, problem, *args):
        self._run(_ext.forward, problem, *args)

    def backward(self, problem, *args):
        self._run(_ext.backward, problem, *args)


@pytest.fixture
def fake_plan(monkeypatch):
    plan = _FakePlan()
    monkeypatch.setattr(_cuda, "_ext", SimpleNamespace(prepare=lambda problem, backward: (plan, 640)))
    monkeypatch.setattr(_cuda, "current_stream", lambda index: 77)
    return plan


def test_a_run_gets_workspace_and_stream(fake_plan):
    q, k, v = qkv(device="cpu")
    call = Call(q, k, v, causal=True, dropout_p=0.5)
    call.settings.cuda = 3
    rng = torch.tensor([5, 6])
    o, lse = run_forward(call.settings, call.arrays, rng, True)
    expected = attend(q, k, v, causal=True, dropout_p=0.5, seed=(5, 6))
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    gradients = run_backward(call.settings, call.arrays, rng, o, o, lse, None, [0, 1])
    g = tilewise.attention_backward(o, q, k, v, o, lse, causal=True, dropout_p=0.5, seed=(5, 6), wanted=["q", "k"])
    assert torch.equal(gradients[0], g.dq) and torch.equal(gradients[1], g.dk)
    assert fake_plan.seen == [(1, 3, 0, 640, 77)] * 2


def test_the_formula_runs_in_host_memory(fake_plan):
    q, k, v = qkv(device="cpu")
    call = Call(q, k, v, causal=True, backend="reference")
    call.settings.cuda = 0
    o, lse = run_forward(call.settings, call.arrays, (0, 0), True)
    assert torch.equal(o, tilewise.attention(q, k, v, causal=True, backend="reference"))
    assert run_backward(call.settings, call.arrays, (0, 0), o, o, lse, None, [2])[2].shape == v.shape
    assert fake_plan.seen == []


def test_plans_are_kept_by_what_they_are_bound_to():
    """The cache does not care for which device a problem is."""
    _ext.clear_plans()

    def prepare(backward=False, inputs=None, **options):
        inputs = inputs or qkv(device="cpu")
        return _ext.prepare(Call(*inputs, **options).problem(), backward)

    plan, size = prepare()
    assert _ext.num_plans() == 1 and plan.workspace_bytes == size
    longer, more = prepare(inputs=qkv(device="cpu", batch=3, seqlen_q=500, seqlen_kv=900))
    assert _ext.num_plans() == 1 and more > size
    assert more == longer.workspace_bytes_for(Call(*qkv(device="cpu", batch=3, seqlen_q=500, seqlen_kv=900)).problem())
    prepare(softmax_scale=0.5)
    prepare(dropout_p=1e-9)  # rounds to none
    assert _ext.num_plans() == 1
    for n, different in enumerate(
        (
            {"backward": True},
            {"causal": True},
            {"dropout_p": 0.1},
            {"softcap": 1.0},
            {"mask": masks.causal()},
            {"mask": masks.chunk(3)},
            {"score_mod": tilewise.score_mod(lambda x, b, h, i, j, s: x * 2)},
            {"inputs": qkv(device="cpu", heads=8)},
            {"inputs": qkv(device="cpu", dim=16)},
            {"inputs": qkv(device="cpu", dtype=torch.bfloat16)},
            {"deterministic": True},
            {"backend": "reference"},
        ),
        start=2,
    ):
        prepare(**different)
        prepare(**different)
        assert _ext.num_plans() == n, different
    for n in range(300):
        prepare(mask=masks.chunk(n + 1))
    assert _ext.num_plans() == 256
    _ext.clear_plans()


def test_a_workspace_that_is_too_small_is_refused():
    q, k, v = qkv(device="cpu")
    problem = Call(q, k, v).problem()
    plan, size = _ext.prepare(problem, False)
    memory = torch.empty(size + 64, dtype=torch.uint8)
    address = (memory.data_ptr() + 63) // 64 * 64
    o = torch.empty(2, 70, 4, 24)
    if size:
        with pytest.raises(tilewise.InvalidArgumentError, match="workspace"):
            plan.forward(problem, tilewise.as_view(o), None, address, size - 1, 0)
    plan.forward(problem, tilewise.as_view(o), None, address, size, 0)
    assert torch.equal(o, tilewise.attention(q, k, v))
    with pytest.raises(tilewise.InvalidArgumentError, match="stream"):
        plan.forward(problem, tilewise.as_view(o), None, address, size, 64)


def test_nvrtc_of_pip_packages(monkeypatch, tmp_path):
    for name in ("cuda_nvrtc", "cu13", "cudnn"):
        (tmp_path / name / "lib").mkdir(parents=True)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path), str(tmp_path / "nothing")])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: found if name == "nvidia" else None)
    assert _cuda.nvrtc_folders() == [str(tmp_path / "cuda_nvrtc" / "lib"), str(tmp_path / "cu13" / "lib")]
    told = []
    monkeypatch.setattr(_cuda, "_ext", SimpleNamespace(set_nvrtc_path=told.append))
    _cuda.tell_nvrtc_path()
    assert told == [":".join(_cuda.nvrtc_folders())]
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: None)
    assert _cuda.nvrtc_folders() == []


def test_fake_tensors_of_a_device():
    """Shapes, strides and devices of what a GPU would give, without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 4, 70, 32, device="cuda", dtype=torch.float16).transpose(1, 2)
        k, v = (torch.empty(2, 90, 2, n, device="cuda", dtype=torch.float16) for n in (32, 24))
        keep = torch.ones(2, 90, dtype=torch.bool, device="cuda")
        o, lse = attend(q, k, v, mask=masks.key_padding(keep), dropout_p=0.1, seqused_kv=[3, 4])
        assert o.shape == (2, 70, 4, 24) and o.device.type == "cuda" and o.stride() == (6720, 24, 1680, 1)
        assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32
        g = tilewise.attention_backward(o, q, k, v, o, lse, wanted=["q", "v"])
        assert g.dq.stride() == q.stride() and g.dv.device.type == "cuda" and g.dk is None
        with pytest.raises(tilewise.InvalidArgumentError, match=r"bias: .*cpu; .*cuda:0, that of q"):
            attend(q, k, v, bias=torch.zeros(70, 90))
