"""tilewise.flash_attn and tilewise.flash_attn_interface: signatures, values, gradients, refusals, install().

Values are compared with the formula in float64 (formula.py). With TILEWISE_TEST_DEVICE=cuda the tensors are on the GPU.
Tests named by a letter and two digits are reports of users, as in test_reports.py. flash-attn's own tests are run by
tools/upstream_flash_attn.py.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import formula
import tilewise

torch = pytest.importorskip("torch")

import tilewise.flash_attn_interface as fa3  # noqa: E402
from tilewise import flash_attn as fa  # noqa: E402
from tilewise._problem import OPTION_NAMES  # noqa: E402
from tilewise.flash_attn import bert_padding  # noqa: E402
from tilewise.flash_attn import flash_attn_interface as fa2  # noqa: E402
from tilewise.flash_attn.layers import rotary  # noqa: E402

DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
ROOT = str(Path(tilewise.__file__).parent.parent)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# As in the documentation of flash-attn 2.8.4 and FlashAttention-3.
FA2 = """
flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)
flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False)
_flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax)
_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0)
_flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None)
_flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False)
_get_block_size_n(device, head_dim, is_dropout, is_causal)
"""
FA3 = """
flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)
flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)
flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)
_flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0)
_flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0)
"""
BERT = """
unpad_input(hidden_states, attention_mask, unused_mask=None)
pad_input(hidden_states, indices, batch, seqlen)
unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length)
"""
ROTARY = """
apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)
apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)
apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0)
RotaryEmbedding(dim, base=10000.0, interleaved=False, scale_base=None, device=None)
"""


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0, grad=True):
    generator = torch.Generator("cpu").manual_seed(seed + 1000 * len(shape) + sum(shape))
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(DEVICE)
    return x.requires_grad_(grad)


def host(t):
    return t.detach().cpu().double().numpy()


def tensor(values, dtype=None):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def int32(*values):
    return tensor(values, torch.int32)


def ones(*shape, dtype=None):
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def waves(like):
    """A gradient whose numbers all differ."""
    return torch.cos(torch.arange(like.numel(), device=DEVICE) * 1.0).view(like.shape).to(like.dtype)


@pytest.mark.parametrize(
    ("module", "table"),
    [(fa2, FA2), (fa3, FA3), (bert_padding, BERT), (rotary, ROTARY)],
    ids=["2", "3", "bert", "rotary"],
)
def test_signatures(module, table):
    for line in table.strip().splitlines():
        name = line.partition("(")[0]
        function = getattr(module, name)
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
        assert f"{name}({', '.join(shown)})" == line
        assert function.__doc__


def test_defaults_can_be_read_as_ring_attention_reads_them():
    for function in (fa2._flash_attn_forward, fa2._flash_attn_varlen_backward, fa3._flash_attn_forward):
        assert inspect.isfunction(function)
        spec = inspect.getfullargspec(function)
        assert len(spec.args) > 10 and spec.varargs is None and spec.varkw is None
    assert fa2._wrapped_flash_attn_forward is fa2._flash_attn_forward


def test_the_package_names_what_upstream_names():
    for name in fa.__all__:
        assert getattr(fa, name) is not None
    assert fa.__version__ == "2.8.4" and fa2.USE_TRITON_ROCM is False


# ------------------------------------------------------------------------------------------------ values and gradients


def check(result, inputs, exact, *, empty_lse=math.inf, tolerance=None, **options):
    """(out, lse) and gradients against the formula; `exact`: q, k, v in float64 as NumPy arrays, [b, s, h, d]."""
    out, lse = result[:2]
    f = formula.forward(*exact, **options)
    tolerance = tolerance or TOLERANCE[out.dtype]
    formula.assert_close(host(out), f.o, tolerance, "out")
    formula.assert_close(host(lse), np.where(np.isneginf(f.lse), empty_lse, f.lse), max(tolerance, 3e-5), "lse")
    do, dlse = waves(out), torch.ones_like(lse)
    gradients = torch.autograd.grad((out, lse), inputs, (do, dlse))
    expected = formula.backward(f, host(do), host(dlse))
    return gradients, expected


DENSE = [
    {},
    {"causal": True},
    {"window_size": (3, 0)},
    {"window_size": (0, 2), "causal": True},
    {"softcap": 2.5, "softmax_scale": 0.7},
    {"alibi": "h", "causal": True},
    {"alibi": "bh"},
    {"deterministic": True, "window_size": [2, 2]},
    {"dropout_p": 0.3, "causal": True},
    {"dropout_p": 0.3, "softcap": 2.0, "alibi": "h"},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(9, 14), (14, 9)], ids=str)
@pytest.mark.parametrize("options", DENSE, ids=str)
def test_dense(options, lengths, dtype):
    q = randn(2, lengths[0], 4, 24, dtype=dtype)
    k, v = (randn(2, lengths[1], 2, 24, dtype=dtype, seed=n) for n in (1, 2))
    options, ref = dict(options), {}
    dropout_p = options.pop("dropout_p", 0.0)
    if kind := options.pop("alibi", None):
        options["alibi_slopes"] = randn(*{"h": (4,), "bh": (2, 4)}[kind], seed=5).detach().abs().float()
        ref["alibi_slopes"] = host(options["alibi_slopes"])
    torch.manual_seed(3)
    out, lse, s_dmask = fa.flash_attn_func(q, k, v, dropout_p, return_attn_probs=True, **options)
    if dropout_p:
        assert s_dmask.shape == (2, 4, 128, 128) and s_dmask.dtype == dtype
        ref["keep"] = ~np.signbit(s_dmask[:, :, : lengths[0], : lengths[1]].float().cpu().numpy())
        ref["keep_prob"] = (65536 - round(65536 * dropout_p)) / 65536
    else:
        assert s_dmask.numel() == 0
    ref |= {n: options[n] for n in ("causal", "softcap", "softmax_scale") if n in options}
    ref["window"] = tuple(options.get("window_size", (-1, -1)))
    gradients, expected = check((out, lse), (q, k, v), [host(x) for x in (q, k, v)], **ref)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        formula.assert_close(host(gradient), getattr(expected, name), 3 * TOLERANCE[dtype], name)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.manual_seed(3)
    alone = fa.flash_attn_func(q, k, v, dropout_p, **options)
    assert torch.equal(alone, out)


def test_packed_in_one_tensor():
    qkv = randn(2, 7, 3, 4, 16)
    out, lse, _ = fa.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    (dqkv,), e = check((out, lse), (qkv,), [host(x) for x in qkv.unbind(2)], causal=True)
    formula.assert_close(host(dqkv), np.stack([e.dq, e.dk, e.dv], 2), 2e-5)

    q, kv = randn(2, 5, 4, 16), randn(2, 7, 2, 2, 16)
    out, lse, _ = fa.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    (dq, dkv), e = check((out, lse), (q, kv), [host(q), *(host(x) for x in kv.unbind(2))], causal=True)
    formula.assert_close(host(dq), e.dq, 2e-5)
    formula.assert_close(host(dkv), np.stack([e.dk, e.dv], 2), 2e-5)


CU_Q, CU_K = (0, 5, 5, 12, 13), (0, 9, 12, 16, 16)  # lengths 5/9, 0/3, 7/4, 1/0


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"dropout_p": 0.4}, {"alibi": 1}], ids=str
)
@pytest.mark.parametrize("packed", ["", "kv"])
def test_varlen(packed, options):
    q, k, v = randn(15, 4, 16), randn(16, 2, 16, seed=1), randn(16, 2, 16, seed=2)
    cu_q, cu_k = int32(*CU_Q), int32(*CU_K)  # two rows at the end belong to no sequence
    options = dict(options)
    slopes = randn(4, 4, seed=5).detach().abs() if options.pop("alibi", None) else None
    call = {"causal": False, "dropout_p": 0.0, "alibi_slopes": slopes, "return_attn_probs": True, **options}
    if packed:
        kv = torch.stack((k, v), 1)
        out, lse, s_dmask = fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 9, **call)
    else:
        out, lse, s_dmask = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 9, **call)
    assert lse.shape == (4, 15) and (lse[:, 12:] == torch.inf).all() and (out[12:] == 0).all()
    do = waves(out)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    assert all(g.isfinite().all() for g in gradients)
    p = call["dropout_p"]
    assert s_dmask.shape == ((4, 4, 128, 128) if p else (0,))
    for b in range(4):
        rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
        count_q, count_k = rows.stop - rows.start, keys.stop - keys.start
        ref = {"causal": call["causal"], "window": options.get("window_size", (-1, -1))}
        if slopes is not None:
            ref["alibi_slopes"] = host(slopes[b])
        if p:
            s = s_dmask[b : b + 1].float().cpu().numpy()
            ref |= {"keep": ~np.signbit(s[:, :, :count_q, :count_k]), "keep_prob": 1 - round(65536 * p) / 65536}
            assert not s[:, :, count_q:].any() and not s[:, :, :, count_k:].any()
        f = formula.forward(host(q[rows])[None], host(k[keys])[None], host(v[keys])[None], **ref)
        formula.assert_close(host(out[rows])[None], f.o, 2e-5, "out")
        formula.assert_close(host(lse[:, rows])[None], np.where(np.isneginf(f.lse), np.inf, f.lse), 3e-5, "lse")
        e = formula.backward(f, host(do[rows])[None])
        for name, gradient, part in zip(("dq", "dk", "dv"), gradients, (rows, keys, keys), strict=True):
            formula.assert_close(host(gradient[part])[None], getattr(e, name), 5e-5, name)


def test_varlen_qkvpacked_is_each_sequence_alone():
    qkv, cu = randn(12, 3, 2, 16), (0, 4, 5, 12)
    out, lse, s_dmask = fa.flash_attn_varlen_qkvpacked_func(qkv, int32(*cu), 7, causal=True, return_attn_probs=True)
    assert out.shape == (12, 2, 16) and lse.shape == (2, 12) and s_dmask.numel() == 0
    for a, b in zip(cu, cu[1:], strict=False):
        alone = fa.flash_attn_qkvpacked_func(qkv[None, a:b], causal=True)
        torch.testing.assert_close(out[a:b], alone[0])


@pytest.mark.parametrize("length", [7, 128, 129, 300])
def test_s_dmask_is_the_softmax_with_the_signs_of_dropout(length):
    q, k, v = (randn(1, length, 4, 16, seed=n, scale=2.0) for n in range(3))
    torch.manual_seed(1)
    out, lse, s = fa.flash_attn_func(q, k, v, 0.25, causal=True, window_size=(50, 0), return_attn_probs=True)
    rounded = -(-length // 128) * 128
    assert s.shape == (1, 4, rounded, rounded)
    p = s.abs()[:, :, :length, :length]
    p = p / p.sum(-1, keepdim=True)
    expected = tilewise.attn_probs(q.detach(), k.detach(), causal=True, window=(50, 0))
    torch.testing.assert_close(p, expected, atol=1e-6, rtol=1e-5)
    kept = torch.where(torch.signbit(s[:, :, :length, :length]), 0.0, p) / 0.75
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out, atol=1e-5, rtol=1e-4)
    assert abs(torch.signbit(s).float().mean().item() - 0.25) < 0.01 + 0.2 / length


def test_s_dmask_has_the_mask_of_dropout_mask():
    for seed in map(tensor, ([5, 0], [-3, 2**40 + 9], [2**62 + 12345, 7])):
        q = randn(2, 40, 3, 8, grad=False)
        options = {"dropout_p": 0.17, "softmax_scale": None, "causal": False, "window": (-1, -1), "softcap": 0.0}
        s = fa2.s_dmask(q, q, seed, alibi_slopes=None, **options)
        keep = tilewise.dropout_mask(2, 3, 40, 40, dropout_p=0.17, seed=seed)
        assert torch.equal(~torch.signbit(s)[:, :, :40, :40], torch.as_tensor(keep, device=DEVICE))


# -------------------------------------------------------------------------------------------------- the private four


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_private_dense(dropout_p):
    """Gradients are written in place, into views of one tensor; the mask of dropout comes back from rng_state."""
    q, k, v = (randn(2, 6, 4, 16, seed=n) for n in range(3))
    common = (dropout_p, 0.3, True, 3, 0, 0.0, None)
    torch.manual_seed(7)
    out, lse, s, rng = fa2._flash_attn_forward(q, k, v, *common, dropout_p > 0)
    torch.manual_seed(7)
    full, full_lse, _ = fa.flash_attn_func(q, k, v, dropout_p, 0.3, True, (3, 0), return_attn_probs=True)
    assert torch.equal(out, full) and torch.equal(lse, full_lse) and not out.requires_grad
    assert rng.dtype == torch.int64 and rng.shape == (2,) and rng.device == q.device
    assert s.numel() == (2 * 4 * 128 * 128 if dropout_p else 0)
    dout = randn(2, 6, 4, 16, seed=9, grad=False)
    expected = torch.autograd.grad(full, (q, k, v), dout)
    dqkv = torch.full((2, 6, 3, 4, 16), torch.nan, device=DEVICE)
    softmax_d = fa2._flash_attn_backward(dout, q, k, v, out, lse, *dqkv.unbind(2), *common, False, rng_state=rng)
    torch.testing.assert_close(dqkv, torch.stack(expected, 2))
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(1, 2))
    again = torch.full_like(q, torch.nan, requires_grad=False)
    fa2._flash_attn_backward(dout, q, k, v, out, lse, None, again, None, *common, True, rng)
    torch.testing.assert_close(again, expected[1])


def test_private_varlen():
    q, k, v = randn(13, 4, 16), randn(16, 2, 16, seed=1), randn(16, 2, 16, seed=2)
    lengths = (int32(*CU_Q), int32(*CU_K), 7, 9)
    torch.manual_seed(7)
    out, lse, s, rng = fa2._flash_attn_varlen_forward(q, k, v, *lengths, 0.3, 0.25, True, return_softmax=True)
    torch.manual_seed(7)
    full, full_lse, full_s = fa.flash_attn_varlen_func(q, k, v, *lengths, 0.3, 0.25, True, return_attn_probs=True)
    assert torch.equal(out, full) and torch.equal(lse, full_lse) and torch.equal(s, full_s)
    dout = randn(13, 4, 16, seed=9, grad=False)
    expected = torch.autograd.grad(full, (q, k, v), dout)
    found = [torch.full_like(x, torch.nan, requires_grad=False) for x in (q, k, v)]
    softmax_d = fa2._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *found, *lengths, 0.3, 0.25, True, -1, -1, 0.0, None, False, rng, zero_tensors=True
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert softmax_d.shape == (4, 13)


def test_private_varlen_with_parts_of_the_keys():
    q, k, v = randn(4, 4, 16), randn(12, 2, 16, seed=1), randn(12, 2, 16, seed=2)
    out, lse, _, _ = fa2._flash_attn_varlen_forward(
        q, k, v, int32(0, 2, 4), int32(0, 7, 12), 2, 7, 0.0, 0.25, True, leftpad_k=int32(1, 0), seqused_k=int32(5, 3)
    )
    for b, keys in ((0, slice(1, 5)), (1, slice(7, 10))):
        rows = slice(2 * b, 2 * b + 2)
        alone = fa2._flash_attn_forward(
            q[None, rows], k[None, keys], v[None, keys], 0.0, 0.25, True, -1, -1, 0.0, None, False
        )
        torch.testing.assert_close(out[rows], alone[0][0])
        torch.testing.assert_close(lse[:, rows], alone[1][0])


def test_ring_of_blocks_with_the_private_functions():
    """What ring attention does: partial results merged by lse, gradients of each block from the merged out and lse."""
    q, k, v = (randn(1, 12, 2, 16, seed=n) for n in range(3))
    parts = [slice(0, 5), slice(5, 12)]
    outs = [fa2._flash_attn_forward(q, k[:, p], v[:, p], 0.0, 0.25, False, -1, -1, 0.0, None, False) for p in parts]
    out, lse = tilewise.merge([o[0] for o in outs], [o[1] for o in outs])
    whole = fa.flash_attn_func(q, k, v, softmax_scale=0.25)
    torch.testing.assert_close(out, whole.detach())
    dout = randn(1, 12, 2, 16, seed=9, grad=False)
    expected = torch.autograd.grad(whole, (q, k, v), dout)
    dq, dk, dv = torch.zeros_like(out), torch.empty_like(out), torch.empty_like(out)
    for p in parts:
        part = torch.empty_like(out)
        fa2._flash_attn_backward(
            dout, q, k[:, p], v[:, p], out, lse, part, dk[:, p], dv[:, p], 0.0, 0.25, False, -1, -1, 0.0, None, False
        )
        dq += part
    for a, b in zip((dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------------------- FlashAttention-3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (3, 1), "softcap": 2.0},
        {"attention_chunk": 4, "causal": True},
        {"pack_gqa": True},
    ],
    ids=str,
)
def test_3_dense(options):
    q, k, v = randn(2, 14, 4, 24), randn(2, 9, 2, 24, seed=1), randn(2, 9, 2, 16, seed=2)
    result = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    ref = {n: options[n] for n in ("causal", "softcap") if n in options}
    ref |= {"chunk": options.get("attention_chunk", 0), "window": options.get("window_size", (-1, -1))}
    gradients, e = check(result, (q, k, v), [host(x) for x in (q, k, v)], empty_lse=-math.inf, **ref)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        formula.assert_close(host(gradient), getattr(e, name), 5e-5, name)
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), result[0])


def test_3_qkvpacked_with_fewer_heads_of_k():
    qkv = randn(2, 6, 4 + 2 * 2, 16)
    out = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    q, k, v = qkv.split([4, 2, 2], 2)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v, causal=True))
    assert torch.equal(
        fa3.flash_attn_qkvpacked_func(qkv[:, :, :6].unflatten(2, (3, 2))),
        fa3.flash_attn_func(*qkv[:, :, :6].split(2, 2)),
    )
    with pytest.raises(ValueError, match="num_heads_q: got 3 of 8 heads"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=3)


def test_3_varlen_with_seqused():
    q, k, v = randn(13, 4, 16), randn(16, 2, 16, seed=1), randn(16, 2, 16, seed=2)
    out, lse = fa3.flash_attn_varlen_func(
        q,
        k,
        v,
        int32(*CU_Q),
        int32(*CU_K),
        7,
        9,
        int32(4, 0, 7, 1),
        int32(9, 1, 2, 0),
        causal=True,
        return_attn_probs=True,
    )
    alone, alone_lse = fa3.flash_attn_func(q[None, :4], k[None, :9], v[None, :9], causal=True, return_attn_probs=True)
    torch.testing.assert_close(out[:4], alone[0])
    torch.testing.assert_close(lse[:, :4], alone_lse[0])
    assert (out[4] == 0).all() and (lse[:, 4] == -torch.inf).all()
    out.sum().backward()
    assert (q.grad[4] == 0).all() and (k.grad[14:] == 0).all() and k.grad.isfinite().all()


def test_3_private_functions():
    q, k, v = randn(2, 6, 4, 16), randn(2, 8, 2, 16, seed=1), randn(2, 8, 2, 16, seed=2)
    full = fa3.flash_attn_func(q, k, v, causal=True)
    place = torch.full_like(full, torch.nan, requires_grad=False)
    out, lse, rest, more = fa3._flash_attn_forward(q, k, v, out_=place, causal=True)
    assert out is place and torch.equal(out, full) and rest.numel() == more.numel() == 0
    dout = randn(2, 6, 4, 16, seed=9, grad=False)
    expected = torch.autograd.grad(full, (q, k, v), dout)
    found = [torch.full_like(x, torch.nan, requires_grad=False) for x in (q, k, v)]
    fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=found[0], dk=found[1], dv=found[2], is_causal=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_3_combine():
    q, k, v = (randn(2, 6, 4, 16, seed=n, grad=False) for n in range(3))
    parts = [fa3.flash_attn_func(q, k[:, p], v[:, p], return_attn_probs=True) for p in (slice(0, 2), slice(2, 6))]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = fa3.flash_attn_combine(outs, lses)
    whole, whole_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2))
    place = torch.empty(2, 6, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    assert fa3.flash_attn_combine(outs, lses, place)[0] is place and torch.equal(place, whole.bfloat16())
    assert fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16


# ---------------------------------------------------------------------------------------------------------- refusals


def refusals():
    q, cu = torch.zeros(1, 4, 2, 8, device=DEVICE), tensor([0, 4])
    p, t = q[0], torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    varlen = (p, p, p, cu, cu, 4, 4)
    no, value, kind = NotImplementedError, ValueError, TypeError
    return [
        (no, "block_table: got a tensor", lambda: fa.flash_attn_varlen_func(*varlen, block_table=t)),
        (no, "block_table: got", lambda: fa2._flash_attn_varlen_forward(*varlen, 0.0, 1.0, False, block_table=t)),
        (no, "num_splits: got 2", lambda: fa2._flash_attn_varlen_forward(*varlen, 0.0, 1.0, False, num_splits=2)),
        (no, r"flash_attn_with_kvcache\(\): .*serving", lambda: fa.flash_attn_with_kvcache(q, q, q)),
        (no, r"flash_attn_with_kvcache\(\): .*serving", lambda: fa3.flash_attn_with_kvcache(q, q, q)),
        (no, "get_scheduler_metadata", lambda: fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 8, t)),
        (no, "qv: got a tensor", lambda: fa3.flash_attn_func(q, q, q, qv=q)),
        (no, "k_descale: got a tensor.*without scales", lambda: fa3.flash_attn_func(q, q, q, k_descale=t)),
        (no, "num_splits: got 3", lambda: fa3.flash_attn_func(q, q, q, num_splits=3)),
        (no, "sm_margin: got 4", lambda: fa3.flash_attn_varlen_func(*varlen, sm_margin=4)),
        (no, "page_table: got", lambda: fa3._flash_attn_forward(q, q, q, page_table=t)),
        (no, "k_new: got", lambda: fa3._flash_attn_forward(q, q, q, k_new=q, v_new=q)),
        (kind, "pack_gqa: got 'yes'", lambda: fa3.flash_attn_func(q, q, q, pack_gqa="yes")),
        (kind, "window_size: got 3", lambda: fa.flash_attn_func(q, q, q, window_size=3)),
        (value, "-2", lambda: fa.flash_attn_func(q, q, q, window_size=(-2, 0))),
        (value, "dropout_p", lambda: fa.flash_attn_func(q, q, q, 1.5)),
        (value, r"qkv: got shape \[1, 4, 2, 8\]", lambda: fa.flash_attn_qkvpacked_func(q)),
        (value, "kv: got shape", lambda: fa.flash_attn_kvpacked_func(q, q[None])),
        (kind, "k: got a ndarray", lambda: fa.flash_attn_func(q, np.zeros((1, 4, 2, 8)), q)),
        (value, "q: got 2 heads with 3", lambda: fa.flash_attn_func(q, *[q[:, :, :1].repeat(1, 1, 3, 1)] * 2)),
        (value, "rng_state", lambda: fa2._flash_attn_backward(q, q, q, q, q, q[..., 0].transpose(1, 2), q, q, q, 0.5, 1.0, False, -1, -1, 0.0, None, False)),
        (value, "return_softmax", lambda: fa2._flash_attn_forward(q, q, q, 0.0, 1.0, False, -1, -1, 0.0, None, True)),
        (value, "attention_mask: got shape", lambda: bert_padding.unpad_input(q, ones(1, 3))),
        (value, "cos, sin: got 2 rows", lambda: rotary.apply_rotary_emb(q, ones(2, 4), ones(2, 4))),
        (value, "cos, sin: got shapes", lambda: rotary.apply_rotary_emb(q, ones(9, 8), ones(9, 8))),
        (value, "max_seqlen: got 5 for 4 tokens from position 2", lambda: rotary.RotaryEmbedding(8, device=DEVICE)(ones(1, 4, 3, 2, 8), seqlen_offset=2, max_seqlen=5)),
        (value, "qkv: got head_dim 8; allowed: at least 16", lambda: rotary.RotaryEmbedding(16, device=DEVICE)(ones(1, 4, 3, 2, 8))),
        (value, r"out: got shape \[4, 2, 8\]", lambda: fa3.flash_attn_combine(q[None], q[None, ..., 0], p)),
        (kind, "out_dtype: got 3", lambda: fa3.flash_attn_combine(q[None], q[None, ..., 0], out_dtype=3)),
        (value, r"rng_state: got torch.float32 \[2\]", lambda: fa2._flash_attn_backward(q, q, q, q, q, q[..., 0].transpose(1, 2), q, q, q, 0.5, 1.0, False, -1, -1, 0.0, None, False, ones(2))),
    ]  # fmt: skip


@pytest.mark.parametrize("n", range(30))
def test_refusals(n):
    kind, pattern, call = refusals()[n]
    with pytest.raises(kind, match=pattern) as caught:
        call()
    assert isinstance(caught.value, tilewise.Error)
    assert "allowed:" in str(caught.value)


# Argument names of tilewise.attention, its halves and merge: in the errors of a front only if they are its own too.
OURS = OPTION_NAMES | {"q", "k", "v", "o", "do", "lse", "dlse", "rng", "out", "wanted", "o_parts", "lse_parts"}


def every_function():
    """(function, its valid arguments): all of both interfaces, dense and packed, and PyTorch's."""
    tensors = {"q": (4,), "k": (2,), "v": (2,), "kv": (2, 2), "qkv": (3, 4), "dout": (4,), "out": (4,), "dq": (4,), "dk": (2,), "dv": (2,)}  # fmt: skip
    dense, packed = ({name: ones(*lengths, *heads, 8) for name, heads in tensors.items()} for lengths in ((2, 6), (6,)))
    dense |= {"softmax_lse": ones(2, 4, 6)}
    packed |= {"softmax_lse": ones(4, 6), "max_seqlen_q": 3, "max_seqlen_k": 3, "max_seqlen": 3}
    packed |= {name: int32(0, 3, 6) for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens")}
    both = {
        "dropout_p": 0.1, "softmax_scale": 0.5, "causal": False, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0, "alibi_slopes": None, "return_softmax": False, "deterministic": False,
        "rng_state": tensor([1, 2]), "return_attn_probs": False,
    }  # fmt: skip
    for module in (fa2, fa3):
        for name, function in vars(module).items():
            if not re.match("_?flash_attn_", name) or "kvcache" in name:
                continue
            if name == "flash_attn_combine":
                yield function, {"out_partial": ones(3, 2, 6, 4, 8), "lse_partial": ones(3, 2, 6, 4)}
                continue
            if "varlen" not in name:
                yield function, dense | both
            if "varlen" in name or (module is fa3 and name.startswith("_")):
                yield function, packed | both
    of_heads = {"qkv": ones(2, 6, 8, 8), "num_heads_q": 4}
    yield fa3.flash_attn_qkvpacked_func, both | of_heads
    heads_first = {name: ones(2, 4, 6, 8) for name in ("query", "key", "value")}
    yield tilewise.scaled_dot_product_attention, heads_first
    yield tilewise.scaled_dot_product_attention, heads_first | {"attn_mask": ones(6, 6)}


def wrong(value):
    """Values that hardly any argument takes, if a valid one is this."""
    yield from ("x", -3, 1.5, None)
    if not isinstance(value, torch.Tensor):
        yield from (3, math.nan, (0,), ("a", 0), (-2, 0), (0, -2), True, tensor(1.0).requires_grad_())
        return
    yield from ([1], np.zeros(3), value[None], value[0], value[..., :-1], value[:1])
    yield from (value.to(dtype) for dtype in (torch.int8, torch.float64))
    yield from (torch.cat((value, value), axis) for axis in range(value.ndim))
    if value.ndim == 1:
        yield from (value - 5, value * 9, value.flip(0))


def test_errors_name_the_arguments_of_the_function_that_was_called():
    """Every argument of every function, one wrong at a time: what is refused is refused in the function's words."""
    refused = collections.Counter()
    for function, arguments in every_function():
        parameters = inspect.signature(function).parameters
        valid = {name: value for name, value in arguments.items() if name in parameters}
        function(**valid)
        for name in parameters:
            for value in wrong(valid.get(name)):
                try:
                    function(**valid | {name: value})
                except tilewise.Error as error:
                    text = str(error)
                else:
                    continue
                refused[function] += 1
                subjects = text.partition(": got")[0].split(", ")
                assert all(re.split(r"\[", subject)[0] in parameters for subject in subjects), text
                said = set(re.findall(r"(?<!['\w.])\w+(?!['\w(])", re.sub(r"tilewise\.\w+\([^)]*\)", "", text)))
                assert not said & (OURS - parameters.keys()), text
    assert len(refused) == 17 and all(count > 20 for count in refused.values()), refused


def test_errors_keep_advice_that_fits():
    q, kv, cu = ones(6, 4, 8), ones(6, 2, 2, 8), int32(0, 3, 6)
    with pytest.raises(ValueError) as caught:
        fa.flash_attn_varlen_kvpacked_func(q, kv[..., :7], cu, cu, 3, 3)
    assert str(caught.value) == "kv: got head_dim 7; allowed: the head_dim of q, 8."
    if DEVICE == "cpu":  # what lies on a GPU is not read by the host
        with pytest.raises(ValueError) as caught:
            fa.flash_attn_varlen_func(q, *kv.unbind(1), cu, int32(0, 3, 9), 3, 3)
        assert str(caught.value) == "cu_seqlens_k: got last entry 9; allowed: at most the number of tokens, 6."
    with pytest.raises(ValueError) as caught:
        fa.flash_attn_func(q, *kv.unbind(1))
    assert str(caught.value) == "q: got rank 3; allowed: rank 4 [batch, seqlen, heads, head_dim]."
    with pytest.raises(ValueError, match=r"For packed sequences give cu_seqlens_q and cu_seqlens_k; for one"):
        fa3._flash_attn_forward(q, *kv.unbind(1))
    with pytest.raises(ValueError, match=r"qkv: got dtypes int32, int32, int32; allowed: one dtype"):
        fa.flash_attn_qkvpacked_func(ones(2, 6, 3, 4, 8, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"window_size_left: got 'x'"):
        fa3._flash_attn_forward(q[None], q[None], q[None], window_size_left="x")
    with pytest.raises(ValueError, match=r"window_size\[0\]: got -2"):
        fa.flash_attn_func(q[None], q[None], q[None], window_size=(-2, 0))


# ------------------------------------------------------------------------------------------------- compiled, transformed


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)[:2],
        lambda q, k, v: fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), softcap=2.0),
        lambda q, k, v: fa.flash_attn_varlen_func(q[0], k[0], v[0], int32(0, 3, 6), int32(0, 3, 6), 3, 3, causal=True),
        lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=2, return_attn_probs=True),
    ],
    ids=["2", "kvpacked", "varlen", "3"],
)
def test_fullgraph(function):
    torch._dynamo.reset()
    inputs = [randn(1, 6, 2, 16, seed=n) for n in range(3)]
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results.append([*outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_fullgraph_with_dropout_and_s_dmask():
    torch._dynamo.reset()
    q, k, v = (randn(1, 6, 2, 16, seed=n) for n in range(3))

    def layer(q, k, v):
        return fa.flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)

    out, _, s = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    s = s[:, :, :6, :6]
    p = torch.where(torch.signbit(s), 0.0, s.abs()) / s.abs().sum(-1, keepdim=True) / 0.6
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", p, v), out, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


def test_fullgraph_of_the_private_functions():
    torch._dynamo.reset()
    q, k, v = (randn(1, 6, 2, 16, seed=n, grad=False) for n in range(3))

    def step(q, k, v):
        out, lse, _, _ = fa2._flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        fa2._flash_attn_backward(out, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False)
        return out, dq, dk, dv

    for a, b in zip(step(q, k, v), torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_gradcheck():
    q, k, v = (randn(1, 4, 2, 3, dtype=torch.float64, seed=n) for n in range(3))
    slopes = randn(2, dtype=torch.float64).detach().abs().requires_grad_()

    def call(q, k, v, slopes):
        out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes, return_attn_probs=True)
        return out, lse

    assert torch.autograd.gradcheck(call, (q, k, v, slopes))


# ------------------------------------------------------------------------------------------------- reports of users


def packed_against_formula(q, k, v, cu_q, cu_k, max_q, max_k, **options):
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, int32(*cu_q), int32(*cu_k), max_q, max_k, return_attn_probs=True, **options
    )
    do = waves(out)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    options.pop("deterministic", None)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        f = formula.forward(host(q[rows])[None], host(k[keys])[None], host(v[keys])[None], **options)
        e = formula.backward(f, host(do[rows])[None])
        formula.assert_close(host(out[rows])[None], f.o, TOLERANCE[q.dtype], "out")
        formula.assert_close(host(lse[:, rows])[None], np.where(np.isneginf(f.lse), np.inf, f.lse), 3e-3, "lse")
        for name, gradient, part in zip(("dq", "dk", "dv"), gradients, (rows, keys, keys), strict=True):
            formula.assert_close(host(gradient[part])[None], getattr(e, name), 3 * TOLERANCE[q.dtype], name)
    return out, lse, gradients


def test_A14():
    """fa#334: one query, one key, fp16: dq was NaN."""
    q, k, v = (randn(1, 1, 1, 16, dtype=torch.float16, scale=3, seed=n) for n in range(3))
    fa.flash_attn_func(q, k, v).sum().backward()
    assert (q.grad == 0).all() and (k.grad == 0).all() and (v.grad == 1).all()


def test_B01():
    """fa#1537: max_seqlen_q = 1 with grouped heads failed in a reshape."""
    q = randn(2, 9, 64, dtype=torch.bfloat16)
    k, v = (randn(8, 3, 64, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    packed_against_formula(q, k, v, (0, 1, 1, 2), (0, 3, 3, 8), 1, 5, softmax_scale=1.0, causal=True)


def test_B02():
    """fa#1619: fewer tokens than sequences, grouped heads."""
    q = randn(1, 21, 120, dtype=torch.bfloat16)
    k, v = (randn(1, 7, 120, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    packed_against_formula(q, k, v, (0, 0, 0, 0, 1), (0, 0, 0, 0, 1), 1, 1, softmax_scale=math.sqrt(120) / 120)


@pytest.mark.parametrize("causal", [False, True])
def test_B04(causal):
    """fa#1713: a sequence without queries that has keys, and the other way round."""
    q, k, v = randn(30, 2, 32), randn(30, 2, 32, seed=1), randn(30, 2, 32, seed=2)
    packed_against_formula(q, k, v, (0, 15, 15, 30), (0, 10, 20, 30), 15, 10, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_B05(causal):
    """fa#2470: no keys at all."""
    q, k = randn(2, 3, 4, 16), randn(2, 0, 4, 16)
    out, lse, _ = fa.flash_attn_func(q, k, k, causal=causal, return_attn_probs=True)
    assert (out == 0).all() and (lse == torch.inf).all()
    out.sum().backward()
    assert (q.grad == 0).all() and k.grad.shape == k.shape


def test_B07():
    """fa#1661: rows past cu_seqlens[-1] kept what was in memory."""
    q, k, v = (randn(20, 2, 16, seed=n) for n in range(3))
    out, lse, gradients = packed_against_formula(q, k, v, (0, 7, 12), (0, 9, 15), 7, 9)
    assert (out[12:] == 0).all() and (lse[:, 12:] == torch.inf).all()
    assert all((g[15:] == 0).all() for g in gradients)


def test_B08():
    """fa#1773: a sequence longer than max_seqlen. Here max_seqlen is a hint."""
    q, k, v = (randn(200, 2, 16, seed=n) for n in range(3))
    packed_against_formula(q, k, v, (0, 150, 200), (0, 150, 200), 3, 5, causal=True)
    packed_against_formula(q, k, v, (0, 150, 200), (0, 150, 200), None, tensor(150))


def test_C04():
    """fa#1133: causal is window (-1, 0) is (S, 0) is (S - 1, 0)."""
    q, k, v = (randn(1, 130, 2, 32, dtype=torch.float16, seed=n) for n in range(3))
    causal = fa.flash_attn_func(q, k, v, causal=True)
    for window in ((-1, 0), (130, 0), (129, 0)):
        assert torch.equal(fa.flash_attn_func(q, k, v, window_size=window), causal)


def test_C06():
    """fa#2199: rows whose window holds no key."""
    q, k, v = randn(1, 129, 2, 16), randn(1, 20, 2, 16, seed=1), randn(1, 20, 2, 16, seed=2)
    result = fa.flash_attn_func(q, k, v, window_size=(32, 64), return_attn_probs=True)
    assert (result[1][..., 0] == torch.inf).all()
    check(result, (q, k, v), [host(x) for x in (q, k, v)], window=(32, 64))


def test_F05():
    """fa#2541: slices of one projection, head_dim 256: dv was wrong on three quarters of the rows."""
    for dim in (64, 128, 256):
        qkv = randn(1, 128, 3, 2, dim)
        out = fa.flash_attn_func(*qkv.unbind(2), causal=True)
        dout = randn(1, 128, 2, dim, seed=4, grad=False)
        dqkv = torch.full_like(qkv, torch.nan, requires_grad=False)
        _, lse, _ = fa.flash_attn_func(*qkv.unbind(2), causal=True, return_attn_probs=True)
        fa2._flash_attn_backward(
            dout, *qkv.unbind(2), out, lse, *dqkv.unbind(2), 0.0, dim**-0.5, True, -1, -1, 0.0, None, False
        )
        apart = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(2)]
        expected = torch.autograd.grad(fa.flash_attn_func(*apart, causal=True), apart, dout)
        torch.testing.assert_close(dqkv, torch.stack(expected, 2))


def test_F07_F08():
    """fa#355, xf#282: dout that is not contiguous, or of stride 0."""
    q, k, v = randn(2, 32, 4, 64), randn(2, 32, 1, 64, seed=1), randn(2, 32, 1, 64, seed=2)
    out = fa.flash_attn_func(q, k, v, causal=True)
    base = randn(2, 4, 32, 64, seed=3, grad=False).transpose(1, 2)
    for dout in (base, ones(dtype=q.dtype).expand_as(out)):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for a, b in zip(found, torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)


def test_G03():
    """fa#980, fa#1166: other head dims for v."""
    for dim, dim_v in ((192, 128), (32, 64), (8, 16)):
        q, k, v = randn(1, 20, 2, dim), randn(1, 20, 2, dim, seed=1), randn(1, 20, 2, dim_v, seed=2)
        result = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        check(result, (q, k, v), [host(x) for x in (q, k, v)], causal=True)


def test_H02(monkeypatch):
    """fa#746, fa#1766: the flag `deterministic` was dropped on the way."""
    seen = []
    monkeypatch.setattr(tilewise, "attention", lambda *args, **options: seen.append(options["deterministic"]))
    q, cu = randn(1, 4, 3, 2, 8), int32(0, 4)
    for flag in (True, False):
        fa.flash_attn_func(q[:, :, 0], q[:, :, 0], q[:, :, 0], deterministic=flag)
        fa.flash_attn_qkvpacked_func(q, deterministic=flag)
        fa.flash_attn_kvpacked_func(q[:, :, 0], q[:, :, :2], deterministic=flag)
        fa.flash_attn_varlen_func(*[q[0, :, 0]] * 3, cu, cu, 4, 4, deterministic=flag)
        fa.flash_attn_varlen_qkvpacked_func(q[0], cu, 4, deterministic=flag)
        fa.flash_attn_varlen_kvpacked_func(q[0, :, 0], q[0, :, :2], cu, cu, 4, 4, deterministic=flag)
        fa3.flash_attn_func(*[q[:, :, 0]] * 3, deterministic=flag)
        fa3.flash_attn_qkvpacked_func(q, deterministic=flag)
        fa3.flash_attn_varlen_func(*[q[0, :, 0]] * 3, cu, cu, 4, 4, deterministic=flag)
    assert seen == [True] * 9 + [False] * 9


def test_H08():
    """fa#612: gradients with dropout agree with finite differences, the mask held still."""
    q, k, v = (randn(1, 5, 2, 4, dtype=torch.float64, seed=n) for n in range(3))

    def call(q, k, v):
        torch.manual_seed(11)
        return fa.flash_attn_func(q, k, v, 0.3, causal=True)

    assert torch.autograd.gradcheck(call, (q, k, v))


# ------------------------------------------------------------------------------------------------ padding and rotation


def test_unpad_and_pad():
    x, mask = randn(3, 5, 2, 4), tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert (
        torch.equal(packed, x[mask.bool()]) and cu_seqlens.tolist() == [0, 2, 2, 6] and cu_seqlens.dtype == torch.int32
    )
    assert (
        longest == 4
        and isinstance(longest, int)
        and used.tolist() == [2, 0, 4]
        and indices.tolist() == [0, 1, 11, 12, 13, 14]
    )
    back = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, torch.where(mask.bool()[..., None, None], x, 0.0))
    back.square().sum().backward()
    assert torch.equal(x.grad, torch.where(mask.bool()[..., None, None], 2 * x, 0.0))

    unused = tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask.bool(), unused.bool())
    assert (
        cu_seqlens.tolist() == [0, 3, 4, 8]
        and used.tolist() == [2, 0, 4]
        and longest == 4
        and packed.shape == (8, 2, 4)
    )


def test_unpad_of_nothing():
    packed, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(
        randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)
    )
    assert packed.shape == (0, 4) and indices.numel() == 0 and cu_seqlens.tolist() == [0, 0, 0] and longest == 0
    assert bert_padding.pad_input(packed, indices, 2, 3).shape == (2, 3, 4)


def test_unpad_of_concatenated_sequences():
    x = randn(3, 6, 4)
    lengths = tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(packed, torch.cat((x[0, :5], x[1, :5], x[2]))) and torch.equal(packed, x.flatten(0, 1)[indices])


def test_padded_batch_through_the_packed_function():
    """A batch, padded on the right, is what each sequence alone is (hf#29075, open-r1#599)."""
    x, lengths = randn(2, 6, 3, 2, 16), (4, 6)
    mask = torch.arange(6, device=DEVICE) < tensor(lengths)[:, None]
    packed, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(x, mask)
    out = fa.flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True)
    out = bert_padding.pad_input(out, indices, 2, 6)
    for b, length in enumerate(lengths):
        alone = fa.flash_attn_qkvpacked_func(x[b : b + 1, :length], causal=True)
        torch.testing.assert_close(out[b, :length], alone[0])
        assert (out[b, length:] == 0).all()


def rotated(x, cos, sin, interleaved, place):
    """One pair of numbers at a time, as rotation of complex numbers."""
    x, half = host(x).copy(), cos.shape[-1]
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
        turn = host(cos)[place, n] + 1j * host(sin)[place, n]
        z = (x[..., a] + 1j * x[..., b]) * turn[..., None]
        x[..., a], x[..., b] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "tensor"])
def test_rotary(interleaved, inplace, offsets):
    angle = randn(12, 3, seed=8, grad=False)
    cos, sin = angle.cos(), angle.sin()
    start = tensor([2, 5]) if offsets == "tensor" else offsets
    place = np.arange(6)[None] + (np.array([2, 5])[:, None] if offsets == "tensor" else np.full((2, 1), offsets))
    x = randn(2, 6, 2, 8)
    expected = rotated(x, cos, sin, interleaved, place)
    given = x.detach().clone().requires_grad_()
    out = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, start)
    formula.assert_close(host(out), expected, 1e-6)
    assert (out.data_ptr() == given.data_ptr()) == inplace
    dout = randn(2, 6, 2, 8, seed=3, grad=False)
    (dx,) = torch.autograd.grad(out, given, dout)
    formula.assert_close(host(dx), rotated(dout, cos, -sin, interleaved, place), 1e-6)
    packed = rotary.apply_rotary_emb(
        x.detach().flatten(0, 1), cos, sin, interleaved, seqlen_offsets=start, cu_seqlens=int32(0, 6, 12), max_seqlen=6
    )
    formula.assert_close(host(packed.unflatten(0, (2, 6))), expected, 1e-6)


def test_rotary_of_parts():
    angle = randn(6, 4, seed=8, grad=False)
    cos, sin = angle.cos(), angle.sin()
    qkv = randn(2, 6, 3, 2, 8)
    expected = [rotary.apply_rotary_emb(qkv[:, :, n], cos, sin) for n in range(2)]
    given = (qkv * 1).clone()
    out = rotary.apply_rotary_emb_qkv_(given, cos, sin)
    torch.testing.assert_close(out, torch.stack([*expected, qkv[:, :, 2]], 2))
    dout = randn(2, 6, 3, 2, 8, seed=3, grad=False)
    (found,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    (wanted,) = torch.autograd.grad(torch.stack([*expected, qkv[:, :, 2]], 2), qkv, dout)
    torch.testing.assert_close(found, wanted)

    grouped = qkv.detach().flatten(2, 3)  # 4 heads of q, 1 of k, 1 of v
    out = rotary.apply_rotary_emb_qkv_(grouped.clone(), cos, sin, num_heads_q=4)
    torch.testing.assert_close(out[:, :, :5], rotary.apply_rotary_emb(grouped[:, :, :5], cos, sin))
    assert torch.equal(out[:, :, 5], grouped[:, :, 5])
    kv = qkv.detach()[:, :, 1:].clone()
    out = rotary.apply_rotary_emb_kv_(kv, cos, sin)
    assert out.data_ptr() == kv.data_ptr()
    torch.testing.assert_close(out[:, :, 0], expected[1].detach())


def test_rotary_embedding():
    embedding = rotary.RotaryEmbedding(8, base=100.0, device=DEVICE)
    qkv = randn(2, 5, 3, 2, 8, grad=False)
    out = embedding(qkv.clone(), seqlen_offset=2)
    place = np.arange(2, 7)[None].repeat(2, 0)
    angle = torch.arange(9.0, device=DEVICE)[:, None] * 100.0 ** (-torch.arange(0, 8, 2, device=DEVICE) / 8)
    for n in range(2):
        formula.assert_close(host(out[:, :, n]), rotated(qkv[:, :, n], angle.cos(), angle.sin(), False, place), 1e-5)
    q, kv = embedding(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    torch.testing.assert_close(torch.cat((q[:, :, None], kv), 2), out)
    scaled = rotary.RotaryEmbedding(8, base=100.0, scale_base=512, device=DEVICE)
    out2 = scaled(qkv.clone(), seqlen_offset=2)
    # xPos: what q gains k loses, so scores between equal positions stay.
    torch.testing.assert_close((out2[:, :, 0] * out2[:, :, 1]).sum(-1), (out[:, :, 0] * out[:, :, 1]).sum(-1))
    with pytest.raises(ValueError, match="max_seqlen: got None"):
        embedding(qkv, seqlen_offset=tensor([1, 2]))
    from tilewise.flash_attn.ops.triton.rotary import apply_rotary

    assert apply_rotary is rotary.apply_rotary


# ------------------------------------------------------------------------------------------------------------ install


def python(code, *path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), ROOT, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_install():
    code = """
import importlib, importlib.metadata as metadata, importlib.util, sys
import tilewise.flash_attn
assert importlib.util.find_spec("flash_attn") is None  # never without being asked
tilewise.flash_attn.install()
tilewise.flash_attn.install()
import flash_attn, flash_attn.flash_attn_interface
from flash_attn import flash_attn_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
assert flash_attn is tilewise.flash_attn and flash_attn.__version__ == "2.8.4"
assert flash_attn_func is tilewise.flash_attn.flash_attn_func
assert flash_attn.flash_attn_interface is sys.modules["tilewise.flash_attn.flash_attn_interface"]
assert importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.bert_padding")
assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.4"
assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
assert metadata.version("numpy") and metadata.distribution("flash-attn").metadata["Name"] == "flash-attn"
for missing in ("flash_attn.modules.mha", "flash_attn.cute", "flash_attn._install", "flash_attn_interface"):
    try:
        importlib.import_module(missing)
    except ModuleNotFoundError as error:
        assert missing.startswith(error.name), error
    else:
        raise AssertionError(missing)
import tilewise.flash_attn_interface as own
own.install()
import flash_attn_interface
assert flash_attn_interface is own and metadata.version("flash-attn-3") == own.__version__
print("fine")
"""
    done = python(code)
    assert done.stdout.strip() == "fine", done.stdout + done.stderr


@pytest.mark.parametrize("place", ["module", "namespace", "metadata", "imported"])
def test_install_refuses_where_the_real_one_is(tmp_path, place):
    before = (
        "import sys, types; sys.modules['flash_attn'] = types.ModuleType('flash_attn')" if place == "imported" else ""
    )
    if place in ("module", "namespace"):
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / ("__init__.py" if place == "module" else "x.py")).write_text("real = True\n")
    if place == "metadata":
        (tmp_path / "flash_attn-2.7.0.dist-info").mkdir()
        (tmp_path / "flash_attn-2.7.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.7.0\n"
        )
    code = f"""
{before}
import sys, tilewise.flash_attn
finders = list(sys.meta_path)
try:
    tilewise.flash_attn.install()
except ImportError as error:
    assert isinstance(error, tilewise.Error)
    print(error)
assert sys.meta_path == finders
"""
    done = python(code, tmp_path)
    assert "install(): got a flash_attn that exists" in done.stdout and "pip uninstall" in done.stdout, (
        done.stdout + done.stderr
    )


def test_transformers_takes_the_installed_one():
    pytest.importorskip("transformers")
    code = """
import tilewise.flash_attn
tilewise.flash_attn.install()
import torch
torch.cuda.is_available = lambda: True  # what transformers asks besides; there may be no GPU here
from transformers.utils import is_flash_attn_2_available
from transformers.utils.import_utils import is_flash_attn_greater_or_equal
print(is_flash_attn_2_available(), is_flash_attn_greater_or_equal("2.1.0"), is_flash_attn_greater_or_equal("3.0"))
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
print(lazy_import_flash_attention("flash_attention_2")[0] is not None)
"""
    done = python(code)
    assert done.stdout.split() == ["True", "True", "False", "True"], done.stdout + done.stderr


def test_import_tilewise_does_not_import_the_fronts():
    code = "import tilewise, sys; print([m for m in sys.modules if 'flash' in m or m == 'torch'])"
    assert python(code).stdout.strip() == "[]"


def test_documentation():
    """The blocks of docs/flash_attn.md run, each in a process of its own."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "flash_attn.md").read_text()
    blocks = [part.partition("```\n")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        done = python(block)
        assert done.returncode == 0, block + done.stderr
    page = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text()
    assert "flash_attn" in page
    assert importlib.import_module("tilewise.flash_attn").install.__doc__
