"""torch: gradients by gradcheck in float64, and every way in which autograd may call them."""

from __future__ import annotations

import numpy as np
import pytest

import formula
import tilewise
from tilewise import masks, ops

torch = pytest.importorskip("torch")


def tensors(*shapes, seed=0, grad=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def qkv(grad=True, dtype=torch.float64, seed=0):
    return tensors((2, 4, 4, 5), (2, 6, 2, 5), (2, 6, 2, 3), grad=grad, dtype=dtype, seed=seed)


def small():
    """For gradcheck, whose cost is the square of the number of elements: two heads to a KV head, ragged sizes."""
    return tensors((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3))


def gradcheck(function, *inputs):
    def finite(*inputs):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(torch.where(torch.isfinite(x), x, 0.0) for x in outputs)  # lse of empty rows

    assert torch.autograd.gradcheck(finite, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"causal": True, "q_offset": -2},
        {"window": (2, 1)},
        {"chunk": 3},
        {"softcap": 0.8},
        {"softmax_scale": 0.7},
        {"dropout_p": 0.4, "seed": 5},
        {"mask": np.arange(12).reshape(3, 4) % 5 != 0},
        {"backend": "reference"},
        {"causal": True, "softcap": 1.5, "dropout_p": 0.2, "seed": 1, "window": (3, 0)},
    ],
    ids=str,
)
def test_gradcheck_through_o_and_lse(options):
    gradcheck(lambda q, k, v: tilewise.attention(q, k, v, return_lse=True, **options), *small())


def test_gradcheck_of_a_batch_with_groups():
    inputs = tensors((2, 2, 4, 2), (2, 3, 2, 2), (2, 3, 2, 1))
    gradcheck(lambda q, k, v: tilewise.attention(q, k, v, causal=True, return_lse=True), *inputs)


def test_gradcheck_in_layout_bhsd():
    inputs = tensors((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3))
    gradcheck(lambda q, k, v: tilewise.attention(q, k, v, layout="bhsd", causal=True, return_lse=True), *inputs)


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (2, 1, 4), (1, 1, 3, 1), (4,), ()])
def test_gradcheck_of_bias(shape):
    (bias,) = tensors(shape, seed=1)
    gradcheck(
        lambda q, k, v, bias: tilewise.attention(q, k, v, bias=bias, causal=True, return_lse=True), *small(), bias
    )


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_gradcheck_of_alibi_slopes(shape):
    (slopes,) = tensors(shape, seed=1)
    gradcheck(lambda q, k, v, s: tilewise.attention(q, k, v, alibi_slopes=s, return_lse=True), *small(), slopes)


@pytest.mark.parametrize("q_offset", ["bottom_right", -3])
def test_gradcheck_of_sinks(q_offset):
    (sinks,) = tensors((2,), seed=1)
    gradcheck(
        lambda q, k, v, s: tilewise.attention(q, k, v, sinks=s, causal=True, q_offset=q_offset, return_lse=True),
        *small(),
        sinks,
    )


def test_gradcheck_of_captured_arrays():
    table, per_key, alpha = tensors((2, 6), (4,), (), seed=1)

    def run(q, k, v, table, per_key, alpha):
        mod = tilewise.score_mod(
            lambda x, b, h, i, j, s: ops.tanh(x * s.alpha) + s.table[h, i - j + 3] * s.per_key[j],
            table=table, per_key=per_key, alpha=alpha,
        )  # fmt: skip
        return tilewise.attention(q, k, v, score_mod=mod, causal=True, return_lse=True)

    gradcheck(run, *small(), table, per_key, alpha)


def test_an_array_captured_twice_gets_both_gradients():
    (table,) = tensors((4,), seed=1)

    def run(q, k, v, table):
        mod = tilewise.score_mod(lambda x, b, h, i, j, s: x + s.one[j] + s.two[i] ** 2, one=table, two=table)
        return tilewise.attention(q, k, v, score_mod=mod, mask=masks.mod(lambda b, h, i, j, s: s.t[j] < 1.0, t=table))

    gradcheck(run, *small(), table)


def test_gradcheck_of_everything_at_once():
    bias, slopes, sinks, table = tensors((1, 2, 3, 4), (1, 2), (2,), (6,), seed=1)

    def run(q, k, v, bias, slopes, sinks, table):
        mod = tilewise.score_mod(lambda x, b, h, i, j, s: x * 0.5 + s.table[i - j + 3], table=table)
        return tilewise.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, score_mod=mod, causal=True, softcap=2.0, dropout_p=0.3,
            seed=4, mask=masks.window(3, -1) | masks.chunk(4), return_lse=True,
        )  # fmt: skip

    gradcheck(run, *small(), bias, slopes, sinks, table)


def test_gradcheck_of_packed_sequences():
    cu_q, cu_kv = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 6])
    gradcheck(
        lambda q, k, v: tilewise.attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, causal=True, return_lse=True
        ),
        *tensors((6, 2, 2), (7, 1, 2), (7, 1, 2)),
    )


def test_gradcheck_of_used_rows():
    used_q, used, pad = torch.tensor([3, 2]), torch.tensor([4, 3]), torch.tensor([1, 0])
    gradcheck(
        lambda q, k, v: tilewise.attention(q, k, v, seqused_q=used_q, seqused_kv=used, leftpad_kv=pad, causal=True),
        *tensors((2, 3, 2, 2), (2, 4, 1, 2), (2, 4, 1, 2)),
    )


def test_only_some_inputs_need_a_gradient():
    for wanted in range(8):
        inputs = [t.detach().requires_grad_(bool(wanted >> n & 1)) for n, t in enumerate(qkv())]
        o = tilewise.attention(*inputs)
        assert o.requires_grad == (wanted > 0)
        if wanted:
            o.sum().backward()
        for t in inputs:
            assert (t.grad is not None) == t.requires_grad


def test_gradient_of_bias_alone_in_its_own_dtype():
    q, k, v = qkv(grad=False, dtype=torch.float32)
    bias = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    tilewise.attention(q, k, v, bias=bias).sum().backward()
    assert bias.grad.dtype == torch.bfloat16 and bias.grad.shape == bias.shape


def test_gradients_of_lse_alone_and_of_o_alone():
    q, k, v = qkv()
    for pick in (0, 1):
        outputs = tilewise.attention(q, k, v, causal=True, return_lse=True)
        grads = torch.autograd.grad(outputs[pick].sum(), (q, k, v), allow_unused=True)
        f = formula.forward(*(t.detach().numpy() for t in (q, k, v)), causal=True)
        ones = np.ones_like(f.o), np.ones_like(f.lse)
        ref = formula.backward(f, ones[0] * (pick == 0), ones[1] * (pick == 1))
        for got, want in zip(grads, (ref.dq, ref.dk, ref.dv), strict=True):
            formula.assert_close(got.numpy(), want)


def test_strange_output_gradients():
    """Expanded, non-contiguous, negated and reversed views of do are all read by their strides."""
    q, k, v = qkv()
    o = tilewise.attention(q, k, v)
    do = torch.randn(3, 4, 4, 2, dtype=torch.float64)
    variants = {
        "ones": torch.ones(()).double().expand(o.shape),
        "permuted": do.permute(3, 2, 1, 0),
        "strided": torch.randn(2, 4, 4, 6).double()[..., ::2],
        "negated": torch.view_as_complex(torch.randn(*o.shape, 2).double()).conj().imag,
        "row": torch.randn(2, 4, 4, 1).double().expand(o.shape),
    }
    for name, do in variants.items():
        got = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        want = torch.autograd.grad(o, (q, k, v), do.clone().contiguous(), retain_graph=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), name


def test_sum_backward():
    q, k, v = qkv()
    tilewise.attention(q, k, v).sum().backward()
    do = np.ones((2, 4, 4, 3))
    ref = formula.backward(formula.forward(*(t.detach().numpy() for t in (q, k, v))), do)
    formula.assert_close(q.grad.numpy(), ref.dq)


def test_shared_storage_and_expanded_inputs():
    """q, k and v as slices of one projection, and KV heads expanded with stride 0."""
    x = torch.randn(1, 3, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda x: tilewise.attention(x[:, :, 0], x[:, :, 1], x[:, :, 2], causal=True), x)
    k = torch.randn(1, 4, 1, 2, dtype=torch.float64, requires_grad=True)
    q = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda q, k: tilewise.attention(q, k.expand(-1, -1, 2, -1), k.expand(-1, -1, 2, -1)), q, k)


def test_strides_of_gradients_follow_the_inputs():
    q = torch.randn(2, 4, 5, 8).transpose(1, 2).requires_grad_()
    k = torch.randn(8, 6, 2, 4).permute(2, 1, 3, 0).requires_grad_()
    dq, dk = torch.autograd.grad(tilewise.attention(q, k, k.detach()).sum(), (q, k))
    assert dq.stride() == q.stride() and dk.stride() == k.stride()


def test_no_grad_and_inference_mode():
    q, k, v = qkv()
    expected = tilewise.attention(q, k, v).detach()
    with torch.no_grad():
        o = tilewise.attention(q, k, v)
        assert not o.requires_grad and torch.equal(o, expected)
        out = torch.empty_like(expected)
        assert tilewise.attention(q, k, v, out=out) is out
    with torch.inference_mode():
        assert torch.equal(tilewise.attention(q, k, v), expected)


def test_out_with_gradients_is_refused():
    q, k, v = qkv()
    with pytest.raises(tilewise.InvalidArgumentError, match="out"):
        tilewise.attention(q, k, v, out=torch.empty(2, 4, 4, 3, dtype=torch.float64))


def test_dropout_repeats_in_the_backward_pass():
    q, k, v = qkv()
    o = tilewise.attention(q, k, v, dropout_p=0.5)
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    second = torch.autograd.grad(o, (q, k, v), do)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(3)
    o = tilewise.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(o, tilewise.attention(q, k, v, dropout_p=0.5))


def test_checkpoint_and_offload():
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv()
    (sinks,) = tensors((4,), seed=2)

    def run(q, k, v, sinks):
        return tilewise.attention(q, k, v, sinks=sinks, dropout_p=0.3, mask=masks.key_padding(keep)).square().sum()

    keep = torch.ones(2, 6, dtype=torch.bool)
    results = []
    for how in ("plain", "checkpoint", "reentrant", "offload"):
        torch.manual_seed(0)
        if how == "plain":
            loss = run(q, k, v, sinks)
        elif how == "offload":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
                loss = run(q, k, v, sinks)
        else:
            loss = checkpoint(run, q, k, v, sinks, use_reentrant=how == "reentrant")
        results.append(
            torch.autograd.grad(loss, (q, k, v, sinks)) if how != "reentrant" else _backward(loss, q, k, v, sinks)
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def _backward(loss, *inputs):
    loss.backward()
    return [t.grad for t in inputs]


def test_saved_tensors_that_were_changed_are_noticed():
    q, k, v = qkv()
    keep = torch.ones(2, 6, dtype=torch.bool)
    o = tilewise.attention(q, k, v, mask=masks.key_padding(keep))
    keep[0, 0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_memory_of_inputs_is_not_kept_alive_by_hooks():
    """With offloading hooks nothing but the packed copies may hold the inputs."""
    import weakref

    q, k, v = (t * 1 for t in qkv())  # intermediate results
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        o = tilewise.attention(q, k, v)
    gone = weakref.ref(v)
    del q, k, v
    assert gone() is None
    o.sum().backward()


def test_second_derivatives_are_refused_with_the_alternative():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(tilewise.UnsupportedError, match=r"second-derivatives"):
        dq.square().sum().backward()


def test_forward_mode_is_refused_with_the_alternative():
    q, k, v = qkv(grad=False)
    with pytest.raises(tilewise.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: tilewise.attention(q, k, v), (q,), (torch.ones_like(q),))


def test_vmap():
    q, k, v = tensors((3, 2, 4, 4, 5), (3, 2, 6, 2, 5), (3, 2, 6, 2, 3), grad=False)
    bias, sinks = tensors((3, 4, 6), (4,), grad=False, seed=1)

    def looped(function, *inputs):
        return torch.stack([function(*each) for each in zip(*inputs, strict=True)])

    plain = lambda q, k, v: tilewise.attention(q, k, v, causal=True)  # noqa: E731
    assert torch.equal(torch.vmap(plain)(q, k, v), looped(plain, q, k, v))
    one_k = lambda q: tilewise.attention(q, k[0], v[0])  # noqa: E731
    assert torch.equal(torch.vmap(one_k)(q), looped(one_k, q))
    biased = lambda q, k, v, b: tilewise.attention(q, k, v, bias=b, sinks=sinks)  # noqa: E731
    assert torch.equal(torch.vmap(biased)(q, k, v, bias), looped(biased, q, k, v, bias))
    moved = torch.vmap(plain, in_dims=(2, 0, 0), out_dims=1)(q.movedim(0, 2), k, v)
    assert torch.equal(moved.movedim(1, 0), looped(plain, q, k, v))
    with_lse = torch.vmap(lambda q, k, v: tilewise.attention(q, k, v, return_lse=True))(q, k, v)
    assert torch.equal(with_lse[1][1], tilewise.attention(q[1], k[1], v[1], return_lse=True)[1])
    nested = torch.vmap(torch.vmap(lambda q, k, v: tilewise.attention(q[None], k[None], v[None])[0]))(q, k, v)
    assert torch.equal(nested, torch.stack([tilewise.attention(q[n], k[n], v[n]) for n in range(3)]))


def test_func_grad_and_vmap_of_grad():
    q, k, v = tensors((3, 2, 4, 4, 5), (3, 2, 6, 2, 5), (3, 2, 6, 2, 3), grad=False)
    loss = lambda q, k, v: tilewise.attention(q, k, v, causal=True).square().sum()  # noqa: E731
    single = [torch.func.grad(loss, argnums=(0, 1, 2))(q[n], k[n], v[n]) for n in range(3)]
    for n in range(3):
        leaves = [t[n].clone().requires_grad_() for t in (q, k, v)]
        loss(*leaves).backward()
        for a, b in zip(single[n], leaves, strict=True):
            assert torch.equal(a, b.grad)
    together = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for place in range(3):
        assert torch.equal(together[place], torch.stack([each[place] for each in single]))


def test_jacobian():
    q, k, v = (t.detach() for t in tensors((1, 2, 1, 3), (1, 3, 1, 3), (1, 3, 1, 2)))
    run = lambda q: tilewise.attention(q, k, v)  # noqa: E731
    loop = torch.autograd.functional.jacobian(run, q)
    assert torch.allclose(torch.func.jacrev(run)(q), loop)


def test_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = tilewise.attention(q, k.bfloat16(), v, bias=torch.zeros(4, 6))
        assert o.dtype == torch.bfloat16
        o.float().sum().backward()
        assert q.grad.dtype == torch.float32
        wide = qkv()
        assert tilewise.attention(*wide).dtype == torch.float64
    assert tilewise.attention(q, k, v).dtype == torch.float32


def test_merge_is_differentiable_twice():
    inputs = tensors((1, 3, 2, 2), (1, 3, 2, 2), (1, 2, 3), (1, 2, 3))

    def run(o1, o2, lse1, lse2):
        return tilewise.merge([o1, o2], [lse1, lse2])

    gradcheck(run, *inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    packed = tensors((3, 2, 2), (3, 2, 2), (2, 3), (2, 3))
    gradcheck(run, *packed)
    swapped = tensors((1, 2, 3, 2), (1, 2, 3, 2), (1, 2, 3), (1, 2, 3))
    gradcheck(lambda *a: tilewise.merge(a[:2], a[2:], layout="bhsd"), *swapped)


def test_merge_with_an_empty_part_has_finite_gradients():
    o1, o2, lse1, lse2 = tensors((1, 2, 1, 4), (1, 2, 1, 4), (1, 1, 2), (1, 1, 2))
    lse2.data[..., 0] = -torch.inf
    o2.data[:, 0] = torch.nan
    o, lse = tilewise.merge([o1, o2], [lse1, lse2])
    (o.sum() + lse.sum()).backward()
    assert torch.equal(lse1.grad[..., 0], torch.ones(1, 1, dtype=torch.float64))
    assert torch.equal(o1.grad[:, 0], torch.ones(1, 1, 4, dtype=torch.float64))
    for t in (lse2, o2):
        assert torch.isfinite(t.grad).all() and (t.grad[..., 0].flatten()[0] == 0)


def test_gradients_through_parts_and_merge_are_those_of_the_whole():
    q, k, v = qkv()

    def parts(q, k, v):
        results = [tilewise.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 2), (2, 5), (5, 6))]
        return tilewise.merge([o for o, _ in results], [lse for _, lse in results])

    o, lse = tilewise.attention(q, k, v, return_lse=True)
    split_o, split_lse = parts(q, k, v)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    whole = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    split = torch.autograd.grad((split_o, split_lse), (q, k, v), (do, dlse))
    for a, b in zip(whole, split, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_reference_has_gradients():
    q, k, v = qkv(dtype=torch.float32)
    tilewise.reference(q, k, v, causal=True).sum().backward()
    assert q.grad.dtype == torch.float32 and torch.isfinite(q.grad).all()


def test_many_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def work(n):
        q, k, v = qkv(seed=n)
        tilewise.attention(q, k, v, causal=True).square().sum().backward()
        return q.grad

    alone = [work(n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(pool.map(work, range(8)), alone, strict=True):
            assert torch.equal(a, b)


def test_module_training_step():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(-3)
            return tilewise.attention(q, k, v, causal=True, sinks=self.sinks).flatten(-2)

    torch.manual_seed(0)
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    x, y = torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert layer.sinks.grad.abs().sum() > 0


def test_compiled_code_falls_back_to_a_plain_call():
    def step(q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True) + 1

    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(q, k, v), step(q, k, v))
    compiled(q, k, v).sum().backward()
    assert q.grad is not None
