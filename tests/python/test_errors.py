"""Every class of bad input has an error that names the argument, what was seen, and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise import masks


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(dtype) for s in ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))]


def call(**changes):
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v, **changes}
    return tilewise.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def packed(cu_q, cu_kv, **options):
    q, k = np.zeros((5, 2, 4), np.float32), np.zeros((6, 2, 4), np.float32)
    return tilewise.attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **options)


zeros = np.zeros


@pytest.mark.parametrize(
    ("changes", "patterns"),
    [
        # q, k, v
        ({"q": zeros((5, 4, 8), np.float32)}, ["q", "rank 3", "rank 4", "cu_seqlens"]),
        ({"q": zeros(8, np.float32)}, ["q", "rank 1"]),
        ({"q": zeros((), np.float32)}, ["q", "rank 0"]),
        ({"q": zeros((1, 2, 5, 4, 8), np.float32)}, ["q", "rank 5"]),
        ({"q": zeros((2, 5, 4, 8), np.float64)}, ["float64", "float32, float32", "one dtype"]),
        ({"v": zeros((2, 6, 2, 8), np.float16)}, ["float32, float32, float16"]),
        (
            {
                "q": zeros((2, 5, 4, 8), np.int32),
                "k": zeros((2, 6, 2, 8), np.int32),
                "v": zeros((2, 6, 2, 8), np.int32),
            },
            ["int32", "float16"],
        ),
        ({"q": zeros((3, 5, 4, 8), np.float32)}, ["batch 2", "batch 3"]),
        ({"q": zeros((2, 5, 3, 8), np.float32)}, ["q", "3 heads", "2 heads", "multiple"]),
        (
            {
                "q": zeros((2, 5, 4, 8), np.float32),
                "k": zeros((2, 6, 0, 8), np.float32),
                "v": zeros((2, 6, 0, 8), np.float32),
            },
            ["4 heads", "0 heads"],
        ),
        ({"k": zeros((2, 6, 2, 9), np.float32)}, ["k", "9", "8"]),
        ({"v": zeros((2, 7, 2, 8), np.float32)}, ["v", "7", "6"]),
        ({"v": zeros((2, 6, 4, 8), np.float32)}, ["v", "4 heads", "2"]),
        ({"layout": "sbhd"}, ["layout", "sbhd", "bshd"]),
        ({"layout": 1}, ["layout", "bhsd"]),
        # bands
        ({"window": (-2, 0)}, ["window", "-2", "-1"]),
        ({"window": (0, -5)}, ["window", "-5", "-1"]),
        ({"chunk": -1}, ["chunk", "-1"]),
        ({"q_offset": "bottom_left"}, ["q_offset", "bottom_left", "top_left"]),
        ({"q_offset": zeros(3, np.int32)}, ["q_offset", "3", "2"]),
        ({"q_offset": zeros(2, np.float32)}, ["q_offset", "float32", "int32"]),
        ({"causal": "top_left", "q_offset": 3}, ["causal", "top_left", "q_offset"]),
        # numbers
        ({"softmax_scale": float("nan")}, ["softmax_scale", "nan", "finite"]),
        ({"softmax_scale": float("inf")}, ["softmax_scale", "inf"]),
        ({"softcap": -1.0}, ["softcap", "-1"]),
        ({"softcap": float("nan")}, ["softcap", "nan"]),
        ({"dropout_p": 1.0}, ["dropout_p", "1", r"\[0, 1\)"]),
        ({"dropout_p": -0.1}, ["dropout_p", "-0.1"]),
        ({"dropout_p": float("nan")}, ["dropout_p", "nan"]),
        ({"seed": 2**70, "dropout_p": 0.5}, ["seed", "64"]),
        ({"seed": zeros(3, np.int64)}, ["seed", "3", r"int64\[2\]"]),
        ({"seed": zeros(2)}, ["seed", "float64"]),
        ({"backend": "gpu"}, ["backend", "gpu", "reference"]),
        # arrays
        ({"bias": zeros((5, 7), np.float32)}, ["bias", r"\[5, 7\]", r"\[2, 4, 5, 6\]"]),
        ({"bias": zeros((5, 6), bool)}, ["bias", "bool", "mask"]),
        ({"bias": zeros((1, 1, 1, 5, 6), np.float32)}, ["bias", "rank 5"]),
        ({"alibi_slopes": zeros(3)}, ["alibi_slopes", r"\[3\]", r"\[4\]"]),
        ({"alibi_slopes": zeros((3, 4))}, ["alibi_slopes", r"\[3, 4\]"]),
        ({"sinks": zeros(2)}, ["sinks", r"\[2\]", r"\[4\]"]),
        ({"sinks": zeros(4, np.int32)}, ["sinks", "int32"]),
        ({"seqused_kv": zeros(3, np.int32)}, ["seqused_kv", r"\[3\]"]),
        ({"seqused_kv": np.array([7, 1])}, ["seqused_kv", "7", "6"]),
        ({"seqused_q": np.array([-1, 1])}, ["seqused_q", "-1"]),
        ({"leftpad_kv": np.array([0, 9])}, ["leftpad_kv", "9"]),
        ({"max_seqlen_q": -1}, ["max_seqlen_q", "-1"]),
        # masks
        ({"mask": zeros((5, 7), bool)}, ["mask", "7", "6"]),
        ({"mask": zeros((5, 6), np.float32)}, ["mask", "float32", "bias"]),
        ({"mask": masks.key_padding(zeros((2, 5), bool))}, ["key_padding", "5", "6"]),
        ({"mask": masks.key_padding(zeros((2, 6, 1, 1), bool))}, ["key_padding"]),
        ({"mask": masks.documents(zeros((2, 5), np.int32))}, ["documents", "kv_ids", "6"]),
        ({"mask": masks.window(-2, 0)}, ["window", "-2"]),
        ({"mask": masks.chunk(0)}, ["chunk", "0"]),
        ({"mask": masks.prefix(3), "causal": True}, ["prefix", "causal"]),
        ({"mask": masks.blocks(zeros((1, 1), bool), 2, 2)}, ["blocks"]),
        ({"mask": masks.tree(zeros((2, 5, 1), np.int64), 3)}, ["tree", "int64", "uint32"]),
        ({"mask": masks.intervals(zeros((2, 2, 6, 3), np.int32), causal=True)}, ["intervals", "3"]),
        # out
        ({"out": zeros((2, 5, 4, 7), np.float32)}, ["o", r"\[2, 5, 4, 7\]", r"\[2, 5, 4, 8\]"]),
        ({"out": zeros((2, 5, 4, 8), np.float64)}, ["o", "float64", "float32"]),
        ({"out": np.broadcast_to(zeros(8, np.float32), (2, 5, 4, 8))}, ["out", "read-only"]),
    ],
)
def test_bad_values(changes, patterns):
    import re

    with pytest.raises(tilewise.InvalidArgumentError) as caught:
        call(**changes)
    assert isinstance(caught.value, ValueError)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"q": [[1.0]]}, "q: .*list"),
        ({"causal": 1}, "causal"),
        ({"causal": None}, "causal"),
        ({"causal": "bottom"}, "causal"),
        ({"window": 4}, r"window.*\(w - 1, 0\)"),
        ({"window": (1, 2, 3)}, "window"),
        ({"window": (1.5, 0)}, "window left.*1.5"),
        ({"window": (None, 0)}, "window left"),
        ({"chunk": 1.5}, "chunk"),
        ({"chunk": True}, "chunk"),
        ({"softmax_scale": "1"}, "softmax_scale"),
        ({"softcap": None}, "softcap"),
        ({"dropout_p": None}, "dropout_p"),
        ({"max_seqlen_q": 1.0}, "max_seqlen_q"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"deterministic": 1}, "deterministic"),
        ({"validate": None}, "validate"),
        ({"backend": 3}, "backend"),
        ({"mask": "causal"}, "mask.*str"),
        ({"mask": lambda b, h, i, j, s: i > j}, "masks.mod"),
        ({"score_mod": 0.5}, "score_mod.*float"),
        ({"score_mod": lambda x, i, j: x}, "score_mod"),
        ({"bias": 0.5}, "bias"),
        ({"sinks": 1.0}, "sinks"),
        ({"alibi_slopes": "yes"}, "alibi_slopes"),
        ({"cu_seqlens_q": 3}, "cu_seqlens_q"),
        ({"out": [0.0]}, "out"),
    ],
)
def test_bad_kinds(changes, pattern):
    with pytest.raises(tilewise.Error, match=pattern) as caught:
        call(**changes)
    assert isinstance(caught.value, (TypeError, ValueError))


@pytest.mark.parametrize(
    ("cu_q", "cu_kv", "patterns"),
    [
        ([0, 3, 2, 5], [0, 1, 2, 3], ["cu_seqlens_q", "2", "3", "decrease"]),
        ([0, 3, 6], [0, 3, 6], ["cu_seqlens_q", "6", "5"]),
        ([-1, 3, 5], [0, 3, 6], ["cu_seqlens_q", "-1"]),
        ([0, 5], [0, 3, 6], ["cu_seqlens_kv", "batch 2", "batch 1"]),
        ([], [], ["cu_seqlens_q", r"float|\[0\]|batch"]),
        ([[0, 5]], [[0, 6]], ["cu_seqlens_q", r"\[1, 2\]"]),
        ([0.0, 5.0], [0, 6], ["cu_seqlens_q", "float64"]),
    ],
)
def test_bad_sequence_lengths(cu_q, cu_kv, patterns):
    import re

    for options in ({}, {"validate": True}):
        with pytest.raises(tilewise.Error) as caught:
            packed(cu_q, cu_kv, **options)
        for pattern in patterns:
            assert re.search(pattern, str(caught.value)), str(caught.value)


def test_ranks_that_do_not_fit_cu_seqlens():
    q, k, v = arrays()
    with pytest.raises(tilewise.InvalidArgumentError, match="rank 4.*rank 3"):
        tilewise.attention(q, k, v, cu_seqlens_q=[0, 5], cu_seqlens_kv=[0, 6])
    with pytest.raises(tilewise.InvalidArgumentError, match="k: got rank 3"):
        tilewise.attention(q[0], k[0], v[0], cu_seqlens_q=[0, 5])


def test_unknown_options_name_the_nearest():
    q, k, v = arrays()
    for run in (
        lambda **o: tilewise.attention(q, k, v, **o),
        lambda **o: tilewise.attention_forward(q, k, v, **o),
        lambda **o: tilewise.attention_backward(q, q, k, v, q, q, **o),
        lambda **o: tilewise.reference(q, k, v, **o),
        lambda **o: tilewise.plan(q, k, v, **o),
        lambda **o: tilewise.explain(q, k, v, **o),
        lambda **o: tilewise.attn_probs(q, k, **o),
    ):
        with pytest.raises(TypeError, match=r"casual.*Did you mean 'causal'") as caught:
            run(casual=True)
        assert isinstance(caught.value, tilewise.Error)
        with pytest.raises(TypeError, match="'softmax_scale' instead of 'softmax_scales'"):
            run(softmax_scales=1.0)
    with pytest.raises(TypeError, match="option 'zzz'"):
        tilewise.attention(q, k, v, zzz=1)
    with pytest.raises(TypeError, match="positional"):
        tilewise.attention(q, k, v, "bshd")


def test_overlapping_outputs_are_refused():
    q, k, v = arrays()
    for given in (q, q[:, ::-1]):
        with pytest.raises(tilewise.InvalidArgumentError, match=r"o: .*memory shared with the input q"):
            tilewise.attention(q, k, v, out=given)
    memory = np.zeros(3 * k.size, np.float32)
    inside = memory[: k.size].reshape(k.shape)
    shifted = memory[k.size // 2 :][: q.size].reshape(q.shape)
    with pytest.raises(tilewise.InvalidArgumentError, match="memory shared"):
        tilewise.attention(q, inside, v, out=shifted)
    out = np.lib.stride_tricks.as_strided(np.zeros(q.size, np.float32), q.shape, (0, 128, 32, 4))
    with pytest.raises(tilewise.InvalidArgumentError, match="stride 0"):
        tilewise.attention(q, k, v, out=out)
    o, lse, _ = tilewise.attention_forward(q, k, v)
    with pytest.raises(tilewise.InvalidArgumentError, match="dq"):
        tilewise.attention_backward(o, q, k, v, o, lse, dq=q)
    with pytest.raises(tilewise.InvalidArgumentError, match="dq"):
        tilewise.attention_backward(o, q, k, v, o, lse, dq=o)


def test_slots_of_one_buffer_do_not_overlap():
    buffer = np.random.default_rng(0).standard_normal((2, 5, 4, 3, 8)).astype(np.float32)
    q, k, v, out = (buffer[:, :, n] for n in range(4))
    expected = tilewise.attention(q.copy(), k.copy(), v.copy())
    assert tilewise.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(buffer[:, :, 3], expected)


def test_wrong_backward_inputs():
    q, k, v = arrays()
    o, lse, _ = tilewise.attention_forward(q, k, v)
    for change, pattern in (
        ({"do": o[:1]}, r"do: .*\[1, 5, 4, 8\]"),
        ({"o": o[..., :4]}, "o: "),
        ({"lse": lse[:, :2]}, "lse: "),
        ({"lse": lse.astype(np.float64)}, "lse: .*float64"),
        ({"do": o.astype(np.float64)}, "do: .*float64"),
        ({"do": None}, "do: "),
        ({"dlse": lse[0]}, "dlse"),
        ({"dq": k.copy()}, "dq"),
        ({"wanted": ["q", "sinks"]}, "wanted.*sinks"),
    ):
        given = {"do": o, "o": o, "lse": lse, **change}
        with pytest.raises(tilewise.Error, match=pattern):
            tilewise.attention_backward(given.pop("do"), q, k, v, given.pop("o"), given.pop("lse"), **given)


def test_dropout_mask_arguments():
    for bad, pattern in (
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"seed": None}, "seed"),
    ):
        with pytest.raises(tilewise.Error, match=pattern):
            tilewise.dropout_mask(1, 1, 2, 2, **{"dropout_p": 0.5, "seed": 1, **bad})
    with pytest.raises(tilewise.Error, match="shape|extents"):
        tilewise.dropout_mask(-1, 1, 2, 2, dropout_p=0.5, seed=1)
    with pytest.raises(tilewise.Error, match="batch"):
        tilewise.dropout_mask(1.5, 1, 2, 2, dropout_p=0.5, seed=1)


def test_hierarchy():
    assert issubclass(tilewise.InvalidArgumentError, ValueError)
    assert issubclass(tilewise.ArgumentTypeError, TypeError)
    assert issubclass(tilewise.TraceError, TypeError)
    assert issubclass(tilewise.UnsupportedError, NotImplementedError)
    assert issubclass(tilewise.OutOfMemoryError, MemoryError)
    assert issubclass(tilewise.InternalError, RuntimeError)
    for name in (
        "InvalidArgumentError",
        "ArgumentTypeError",
        "TraceError",
        "UnsupportedError",
        "OutOfMemoryError",
        "InternalError",
    ):
        assert issubclass(getattr(tilewise, name), tilewise.Error)


def test_expressions_are_checked_by_the_library_too():
    q, k, v = arrays()
    deep = tilewise.score_mod(_chain)
    with pytest.raises(tilewise.InvalidArgumentError, match="nest"):
        tilewise.attention(q, k, v, score_mod=deep)


def _chain(x, b, h, i, j, s):
    for _ in range(2000):
        x = x + 1
    return x


def test_thread_counts():
    with pytest.raises(tilewise.InvalidArgumentError, match="num_threads"):
        tilewise.set_num_threads(-1)
    with pytest.raises(TypeError):
        tilewise.set_num_threads(1.5)
