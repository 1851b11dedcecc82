"""tilewise.scaled_dot_product_attention, the context that routes PyTorch's, and PyTorch's registry of flash kernels.

Tests named by an id are reports of users, as in test_reports.py. TILEWISE_TEST_DEVICE=cuda puts the tensors on the GPU.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
from pathlib import Path

import pytest

import tilewise

torch = pytest.importorskip("torch")
F = torch.nn.functional
sdpa = pytest.importorskip("tilewise.sdpa")

DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sdpa.md"


def randn(*shape, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
    return x.requires_grad_(grad)


def exact(query, key, value, **options):
    """PyTorch's own, by its plain formula, in float64."""
    options = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()
    }
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)


def compare(query, key, value, tolerance=2e-6, **options):
    o = tilewise.scaled_dot_product_attention(query, key, value, **options)
    expected = exact(query, key, value, **options)
    assert o.shape == expected.shape and o.dtype == query.dtype and o.device == query.device
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)
    leaves = [x for x in (query, key, value, options.get("attn_mask")) if x is not None and x.requires_grad]
    if leaves:
        do = randn(*o.shape, seed=9)
        mine = torch.autograd.grad((o * do).sum(), leaves)
        theirs = torch.autograd.grad((expected * do.double()).sum(), leaves)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=10 * tolerance, rtol=10 * tolerance)
    return o


def qkv(*lead, heads=4, heads_kv=4, length_q=7, length_kv=9, dim=8, dim_v=8, **more):
    return (
        randn(*lead, heads, length_q, dim, grad=True, **more),
        randn(*lead, heads_kv, length_kv, dim, grad=True, seed=1, **more),
        randn(*lead, heads_kv, length_kv, dim_v, grad=True, seed=2, **more),
    )


# ------------------------------------------------------------------------------------------------------ the function


def test_is_a_lazy_attribute():
    assert tilewise.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    with pytest.raises(AttributeError, match="no attribute 'scaled_dot_product'"):
        _ = tilewise.scaled_dot_product


def test_has_torchs_signature():
    import inspect

    text = F.scaled_dot_product_attention.__doc__
    signature = re.search(r"scaled_dot_product_attention\((.*?)\)", text, re.DOTALL)[1]
    theirs = [part.split("=")[0].strip() for part in signature.split(",") if part.strip() != "*"]
    assert list(inspect.signature(sdpa.scaled_dot_product_attention).parameters) == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    compare(*qkv(2, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5)])
def test_causal_is_top_left(lengths):
    compare(*qkv(2, length_q=lengths[0], length_kv=lengths[1]), is_causal=True)


def test_scale_and_other_value_dim():
    compare(*qkv(2, dim=8, dim_v=5), scale=0.3)


@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (7, 1), (2, 1, 7, 9), (1, 4, 1, 9), (2, 4, 7, 9), (4, 7, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape, kind):
    mask = randn(*shape, seed=4)
    mask = mask > -0.5 if kind == "bool" else mask.detach().requires_grad_()
    compare(*qkv(2), attn_mask=mask)


def test_rows_that_see_nothing_are_zero_as_in_torch():
    """A01, pt#103963: rows 4-7 were NaN in PyTorch; since 2.5 they are 0, for both kinds of mask."""
    q, k, v = qkv(1, heads=1, heads_kv=1, length_q=8, length_kv=8)
    keep = torch.zeros(8, 8, dtype=torch.bool, device=DEVICE)
    keep[:4, :4] = True
    added = torch.zeros(8, 8, device=DEVICE).masked_fill(~keep, float("-inf"))
    for mask in (keep, added):
        o = tilewise.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert not o[:, :, 4:].any()
        torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=2e-6, rtol=2e-6)
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(bool(g.isfinite().all()) for g in gradients)


def test_a_finite_minimum_hides_too():
    """A04, pt#109517: an additive mask of finfo.min, the way models write it."""
    added = torch.zeros(9, device=DEVICE)
    added[:4] = torch.finfo(torch.float32).min
    q, k, v = qkv(1)
    o = compare(q, k, v, attn_mask=added.expand(7, 9))
    torch.testing.assert_close(o, tilewise.scaled_dot_product_attention(q, k[:, :, 4:], v[:, :, 4:]))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_heads(heads):
    q, k, v = qkv(2, heads=heads[0], heads_kv=heads[1])
    compare(q, k, v, enable_gqa=True, is_causal=True)


def test_grouped_heads_of_different_number():
    q = randn(1, 6, 4, 8, grad=True)
    k, v = randn(1, 3, 4, 8, grad=True, seed=1), randn(1, 2, 4, 8, grad=True, seed=2)
    compare(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank):
    lead = {2: (), 3: (4,), 5: (2, 3, 4)}[rank]
    q = randn(*lead, 7, 8, grad=True)
    k, v = randn(*lead, 9, 8, grad=True, seed=1), randn(*lead, 9, 6, grad=True, seed=2)
    compare(q, k, v)
    compare(q, k, v, attn_mask=randn(7, 9, seed=3) > 0)
    compare(q, k, v, attn_mask=randn(*lead, 7, 9, seed=3).requires_grad_())
    if rank == 5:
        compare(q, k, v, attn_mask=randn(3, 1, 7, 9, seed=3) > 0)


def test_axes_broadcast():
    q = randn(3, 4, 7, 8, grad=True)
    k, v = randn(1, 1, 9, 8, grad=True, seed=1), randn(3, 4, 9, 8, grad=True, seed=2)
    compare(q, k, v)
    compare(q, k, v[:, :1])
    compare(q[:, :1], k.expand(1, 4, 9, 8), v)


def test_causal_bias_objects():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = qkv(2)
    for make in (causal_lower_right, causal_upper_left):
        bias = make(7, 9)
        o = tilewise.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(
            o, F.scaled_dot_product_attention(q, k, v, attn_mask=bias._materialize(DEVICE)), atol=2e-6, rtol=2e-6
        )


def test_dropout():
    q, k, v = qkv(2)
    torch.manual_seed(0)
    a = tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    b = tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert torch.equal(a, b)
    many = torch.stack([tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.3) for _ in range(400)])
    torch.testing.assert_close(many.mean(0), F.scaled_dot_product_attention(q, k, v), atol=0.25, rtol=0)
    assert not tilewise.scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


def test_vmap():
    q, k, v = (x.detach() for x in qkv(3, 2))
    mapped = torch.vmap(tilewise.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(mapped, F.scaled_dot_product_attention(q, k, v), atol=2e-6, rtol=2e-6)


REFUSED = [
    ("attn_mask, is_causal: got both", {"attn_mask": torch.ones(7, 9, dtype=torch.bool), "is_causal": True}),
    ("attn_mask: got dtype torch.int64", {"attn_mask": torch.ones(7, 9, dtype=torch.int64)}),
    (r"attn_mask: got shape \[7, 8\]", {"attn_mask": torch.ones(7, 8)}),
    (r"attn_mask: got shape \[2, 2, 4, 7, 9\]", {"attn_mask": torch.ones(2, 2, 4, 7, 9)}),
    ("attn_mask: got a list", {"attn_mask": [[True]]}),
    ("dropout_p: got 1.5", {"dropout_p": 1.5}),
    ("^scale: got 'x'", {"scale": "x"}),
]


@pytest.mark.parametrize(("text", "options"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refusals(text, options):
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with pytest.raises(tilewise.Error, match=text):
        tilewise.scaled_dot_product_attention(*qkv(2), **options)


def test_refusals_of_shapes():
    """B14, pt#141218: half tensors with axes of size zero, ranks that differ, grouped heads: the process died."""
    with pytest.raises(tilewise.InvalidArgumentError, match="enable_gqa=True"):
        tilewise.scaled_dot_product_attention(*qkv(2, heads=4, heads_kv=2))
    with pytest.raises(tilewise.InvalidArgumentError, match="that divide those of query"):
        tilewise.scaled_dot_product_attention(*qkv(2, heads=4, heads_kv=3), enable_gqa=True)
    with pytest.raises(tilewise.InvalidArgumentError, match="that divide those of query"):
        tilewise.scaled_dot_product_attention(*qkv(2, heads=4, heads_kv=0, dtype=torch.float16), enable_gqa=True)
    with pytest.raises(tilewise.InvalidArgumentError, match="that broadcast"):
        tilewise.scaled_dot_product_attention(qkv(2)[0], qkv(3)[1], qkv(2)[2])
    with pytest.raises(tilewise.InvalidArgumentError, match="query: got shape"):
        tilewise.scaled_dot_product_attention(*(randn(8) for _ in range(3)))
    with pytest.raises(tilewise.InvalidArgumentError, match="^query, key, value: got dtypes"):
        tilewise.scaled_dot_product_attention(qkv(2)[0].double(), *qkv(2)[1:])
    with pytest.raises(tilewise.InvalidArgumentError, match="^value: got 8 rows; allowed: as many as key, 9"):
        tilewise.scaled_dot_product_attention(*qkv(2)[:2], qkv(2)[2][..., :8, :])
    with pytest.raises(tilewise.ArgumentTypeError, match="key: got a list"):
        tilewise.scaled_dot_product_attention(randn(4, 8), [1], randn(4, 8))
    nothing = (randn(1, 0, 4, 8, dtype=torch.float16) for _ in range(3))
    assert tilewise.scaled_dot_product_attention(*nothing, enable_gqa=True).shape == (1, 0, 4, 8)


# ------------------------------------------------------------------------------------------------------ the context


def test_routes_whoever_calls():
    q, k, v = qkv(2)
    with sdpa.routed() as route:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v)
        layer = torch.nn.TransformerDecoderLayer(8, 2, dropout=0.0, batch_first=True, device=DEVICE)
        layer(randn(2, 5, 8), randn(2, 6, 8)).sum().backward()
    assert route.taken == 4 and not route.declined
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected, atol=2e-6, rtol=2e-6)
    F.scaled_dot_product_attention(q, k, v)
    assert route.taken == 4
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_routes_other_threads():
    q, k, v = qkv(2)
    with sdpa.routed() as route, concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: F.scaled_dot_product_attention(q, k, v), range(3)))
    assert route.taken == 3
    assert all(torch.equal(found[0], each) for each in found)


def test_routes_nest():
    q, k, v = qkv(2)
    with sdpa.routed() as outer:
        with sdpa.routed() as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert (outer.taken, inner.taken) == (1, 1)


def test_what_is_declined_goes_to_torch_and_is_logged(caplog):
    jagged = torch.nested.nested_tensor([randn(3, 16), randn(5, 16)], layout=torch.jagged, device=DEVICE)
    jagged = jagged.unflatten(-1, (2, 8)).transpose(1, 2)
    with caplog.at_level(logging.DEBUG, "tilewise.sdpa"), sdpa.routed() as route:
        for _ in range(2):
            F.scaled_dot_product_attention(jagged, jagged, jagged)
        with torch.autograd.forward_ad.dual_level():
            F.scaled_dot_product_attention(*(x.detach() for x in qkv(1)))
    assert route.taken == 0 and sum(route.declined.values()) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "WARNING"]
    assert "nested or sparse" in caplog.text and "forward-mode" in caplog.text


def test_errors_are_torchs_own(caplog):
    """One that torch has on every device: its CUDA kernels take a dropout_p of 1.5, for instance."""
    q, k, v = qkv(2)
    same = pytest.raises(RuntimeError, match="query, key, and value to have the same dtype")
    with caplog.at_level(logging.WARNING, "tilewise.sdpa"), sdpa.routed() as route, same:
        F.scaled_dot_product_attention(q, k.double(), v)
    assert route.taken == 0 and "query, key, value: got dtypes float32, float64, float32" in caplog.text


def test_strict():
    q, k, v = qkv(2)
    with sdpa.routed(strict=True), pytest.raises(tilewise.InvalidArgumentError, match="got both"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(7, 9, device=DEVICE).bool(), is_causal=True)
    with (
        sdpa.routed(strict=True),
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(tilewise.UnsupportedError, match="forward-mode"),
    ):
        F.scaled_dot_product_attention(q, k, v)


def test_tensor_subclasses_of_others_are_theirs():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    q, k, v = (two_tensor.TwoTensor(x.detach(), x.detach()) for x in qkv(1))
    with sdpa.routed() as route:
        o = F.scaled_dot_product_attention(q, k, v)
    assert route.taken == 0 and type(o) is two_tensor.TwoTensor
    assert "a TwoTensor" in next(iter(route.declined))


@pytest.mark.parametrize("way", ["grad", "backward"])
def test_checkpoints_inside(way):
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv(1)
    plain = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).pow(2).sum(), (q, k, v))
    with sdpa.routed() as route:
        o = checkpoint(lambda *x: F.scaled_dot_product_attention(*x), q, k, v, use_reentrant=False)
        if way == "grad":
            again = torch.autograd.grad(o.pow(2).sum(), (q, k, v))
        else:
            o.pow(2).sum().backward()
            again = q.grad, k.grad, v.grad
    assert route.taken and not route.declined  # the second run is cut short where it has made what was dropped
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiles(where):
    q, k, v = qkv(1)

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    def inside(q, k, v):
        with sdpa.routed():
            return plain(q, k, v)

    torch._dynamo.reset()
    graphs = []

    def look(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    if where == "inside":
        o = torch.compile(inside, fullgraph=True, backend=look)(q, k, v)
    else:
        with sdpa.routed():
            o = torch.compile(plain, fullgraph=True, backend=look)(q, k, v)
    torch.testing.assert_close(o, plain(q, k, v), atol=1e-5, rtol=1e-5)
    assert "tilewise.attention_forward" in graphs[0]


# ------------------------------------------------------------------------------------------ PyTorch's registry

registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this torch has no registry of flash kernels",
)


@registry
def test_registers():
    from torch.nn import attention

    sdpa.register_flash()
    assert "tilewise" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("tilewise")
    try:
        assert attention.current_flash_attention_impl() == "tilewise"
        if DEVICE == "cuda":
            q, k, v = qkv(2, length_q=9, dtype=torch.bfloat16)
            with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(o.sum(), (q, k, v))
            torch.testing.assert_close(o.double(), exact(q, k, v, is_causal=True), atol=3e-2, rtol=3e-2)
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


@pytest.fixture
def operators():
    """The operators on the device of the tests; PyTorch has none of them on the CPU."""
    found = sdpa._Operators("CUDA" if DEVICE == "cuda" else "CPU")
    yield torch.ops.aten
    found.remove()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_operators(operators, causal):
    q, k, v = qkv(2, length_q=9)
    o, lse, *_ = operators._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    expected = exact(q, k, v, is_causal=causal)
    torch.testing.assert_close(o.double(), expected, atol=2e-6, rtol=2e-6)
    scores = (q.double() @ k.double().mT) / 8**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(9, 9, device=DEVICE).bool().tril(), float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-6, rtol=2e-6)
    do = randn(*o.shape, seed=5)
    mine = torch.autograd.grad((o * do).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * do).sum(), (q, k, v))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)


def test_dropout_of_operators(operators):
    q, k, v = (x.double().detach().requires_grad_() for x in qkv(1))
    o, _, _, _, _, _, rng, *_ = operators._scaled_dot_product_flash_attention(q, k, v, 0.4, False)
    seed = rng.view(torch.int64)
    again = tilewise.attention(q, k, v, layout="bhsd", dropout_p=0.4, seed=seed)
    assert torch.equal(o, again)
    do = randn(*o.shape, seed=5).double()
    mine = torch.autograd.grad((o * do).sum(), (q, k, v))
    theirs = torch.autograd.grad((again * do).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_packed_operators(operators):
    q, k, v = (randn(16, 2, 8, grad=True, seed=n) for n in range(3))
    bounds = torch.tensor([0, 5, 6, 16], dtype=torch.int32, device=DEVICE)
    o, *_ = operators._flash_attention_forward(
        q, k, v, bounds, bounds, 10, 10, 0.0, True, False, window_size_left=3, window_size_right=0
    )
    expected = tilewise.attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, causal=True, window=(3, 0))
    assert torch.equal(o, expected)
    mine = torch.autograd.grad(o.sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    with pytest.raises(tilewise.InvalidArgumentError, match="^cum_seq_k: got last entry 26"):
        operators._flash_attention_forward(q, k, v, bounds, bounds + 10, 10, 10, 0.0, True, False)
    with pytest.raises(tilewise.UnsupportedError, match="return_debug_mask: got a bool"):
        operators._flash_attention_forward(q, k, v, bounds, bounds, 10, 10, 0.0, True, True)


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
