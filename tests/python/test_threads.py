"""Results do not depend on the number of threads, to the bit; and torch's setting is followed."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise import masks


@pytest.fixture(autouse=True)
def _restore():
    yield
    tilewise.set_num_threads(0)


def everything(dtype, **options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, 150, 4, 32), (2, 300, 2, 32), (2, 300, 2, 32)))
    o, lse, _ = tilewise.attention_forward(q, k, v, **options)
    g = tilewise.attention_backward(o, q, k, v, o, lse, dlse=lse, **options)
    return [o, lse, g.dq, g.dk, g.dv, g.dbias, g.dalibi_slopes, g.dsinks]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (64, 0)},
        {
            "bias": np.ones((4, 1, 300), np.float32),
            "sinks": np.ones(4, np.float32),
            "alibi_slopes": np.ones(4, np.float32) * 0.01,
        },
        {"dropout_p": 0.2, "seed": 1, "mask": masks.mod(lambda b, h, i, j, s: (i + j) % 3 != 0)},
    ],
    ids=["plain", "band", "extras", "dropout"],
)
def test_bits_do_not_depend_on_threads(dtype, options):
    results = []
    for threads in (1, 2, 3, 16):
        tilewise.set_num_threads(threads)
        assert tilewise.num_threads() <= threads
        results.append(everything(dtype, **options))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a is None and b is None) or a.tobytes() == b.tobytes()


def test_decode_bits_do_not_depend_on_threads():
    """One query and many keys: the keys are split over the threads, always in the same places."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 1, 4, 64), (1, 5000, 1, 64), (1, 5000, 1, 64)))
    results = []
    for threads in (1, 2, 3, 7):
        tilewise.set_num_threads(threads)
        results.append(tilewise.attention(q, k, v, return_lse=True))
    for o, lse in results[1:]:
        assert o.tobytes() == results[0][0].tobytes() and lse.tobytes() == results[0][1].tobytes()


def test_torch_num_threads_is_followed():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert tilewise.num_threads() == min(count, before) or tilewise.num_threads() == count
    finally:
        torch.set_num_threads(before)
