"""Mask objects: their text, their algebra, and every kind against a dense mask written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import formula
import tilewise
from tilewise import masks

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_KV = 2, 4, 2, 9, 13
SHAPE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(1)
    return (
        rng.standard_normal((BATCH, SEQLEN_Q, HEADS, 8)),
        rng.standard_normal((BATCH, SEQLEN_KV, HEADS_KV, 8)),
        rng.standard_normal((BATCH, SEQLEN_KV, HEADS_KV, 5)),
    )


def grids():
    b, h, i, j = np.ix_(range(BATCH), range(HEADS), range(SEQLEN_Q), range(SEQLEN_KV))
    return b, h, i, j, i + SEQLEN_KV - SEQLEN_Q


def check(qkv, mask, dense):
    ref = formula.forward(*qkv, mask=np.broadcast_to(dense, SHAPE))
    o, lse = tilewise.attention(*qkv, mask=mask, return_lse=True)
    formula.assert_close(lse, ref.lse, label="lse")
    formula.assert_close(o, ref.o, label="o")


def texts(mask):
    return mask.resolve().text


def test_text_of_every_kind():
    a, b = np.zeros(3, np.int32), np.ones(3, np.int32)
    words = np.zeros((3, 1), np.uint32)
    assert texts(masks.causal()) == "causal()"
    assert texts(masks.window(3, -1)) == "window(3,-1)"
    assert texts(masks.chunk(4)) == "chunk(4)"
    assert texts(masks.key_padding(a)) == "key_padding(@0)"
    assert texts(masks.documents(a)) == "documents(@0,@0)"
    assert texts(masks.documents(a, b)) == "documents(@0,@1)"
    assert texts(masks.prefix(5)) == "prefix(5)"
    assert texts(masks.prefix(np.int64(5))) == "prefix(5)"
    assert texts(masks.prefix(a)) == "prefix(@0)"
    assert texts(masks.prefix([1, 2])) == "prefix(@0)"
    assert texts(masks.intervals(a, causal=True)) == "intervals(@0,causal)"
    assert texts(masks.intervals(a, causal=False)) == "intervals(@0,full)"
    assert texts(masks.row_intervals(a, b)) == "row_intervals(@0,@1)"
    assert texts(masks.tree(words, 3)) == "tree(@0,3)"
    assert texts(masks.tree(words, a)) == "tree(@0,@1)"
    assert texts(masks.blocks(a, 16, 32)) == "blocks(@0,16,32)"
    assert texts(masks.dense(a)) == "dense(@0)"
    assert texts(masks.mod(lambda b, h, i, j, s: i > j)) == "mod(gt(i,j))"


def test_text_of_compositions():
    a, b = np.zeros(3, bool), np.ones(3, bool)
    assert texts(masks.causal() & masks.window(1, 1) & masks.chunk(2)) == "and(causal(),window(1,1),chunk(2))"
    assert texts(masks.causal() | ~masks.chunk(2)) == "or(causal(),not(chunk(2)))"
    assert texts((masks.dense(a) | masks.dense(b)) & masks.dense(a)) == "and(or(dense(@0),dense(@1)),dense(@0))"
    assert texts(masks.causal() & a) == "and(causal(),dense(@0))"
    assert texts(a & masks.causal()) == "and(dense(@0),causal())"
    assert texts(a | masks.causal()) == "or(dense(@0),causal())"
    mask = masks.causal() & masks.documents(np.zeros(3, np.int32))
    assert masks.prepare(mask) is mask
    assert repr(mask) == "<tilewise mask and(causal(),documents(<documents q_ids>,<documents q_ids>))>"


def test_tensors_compose_too():
    torch = pytest.importorskip("torch")
    keep = torch.ones(3, dtype=torch.bool)
    assert texts(masks.causal() & keep) == "and(causal(),dense(@0))"
    assert texts(keep & masks.causal()) in ("and(dense(@0),causal())", "and(causal(),dense(@0))")
    assert texts(keep | masks.causal()) in ("or(dense(@0),causal())", "or(causal(),dense(@0))")
    assert texts(masks.prefix(torch.tensor(4))) == "prefix(4)"


def test_a_mask_has_no_truth_value():
    with pytest.raises(tilewise.ArgumentTypeError, match="& for and"):
        bool(masks.causal())
    with pytest.raises(tilewise.ArgumentTypeError, match="& for and"):
        _ = masks.causal() and masks.chunk(2)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: masks.dense(np.zeros((2, 2), np.float32)), "bias"),
        (lambda: masks.documents(np.zeros(3)), "integers"),
        (lambda: masks.window(1.5, 0), "integer"),
        (lambda: masks.chunk("4"), "integer"),
        (lambda: masks.prefix(2.5), "integer"),
        (lambda: masks.intervals(np.zeros(3, np.int32), "causal"), "True or False"),
        (lambda: masks.causal() & 3, "mask of tilewise.masks"),
        (lambda: masks.causal() & (lambda b, h, i, j, s: True), "masks.mod"),
        (lambda: masks.mod(tilewise.score_mod(lambda x, b, h, i, j, s: x)), "score_mod"),
        (lambda: masks.key_padding("no"), "list of numbers"),
    ],
)
def test_wrong_arguments(make, hint):
    with pytest.raises(tilewise.Error, match=hint):
        make()


def test_bands(qkv):
    _, _, _, j, t = grids()
    check(qkv, masks.causal(), j <= t)
    check(qkv, masks.window(3, 1), (j >= t - 3) & (j <= t + 1))
    check(qkv, masks.window(-1, 2), j <= t + 2)
    check(qkv, masks.chunk(4), j // 4 == t // 4)
    check(qkv, masks.causal() & masks.chunk(5), (j <= t) & (j // 5 == t // 5))


def test_key_padding(qkv):
    keep = np.random.default_rng(0).random((BATCH, SEQLEN_KV)) > 0.3
    check(qkv, masks.key_padding(keep), keep[:, None, None])
    check(qkv, masks.key_padding(keep.astype(np.int64)), keep[:, None, None])
    check(qkv, ~masks.key_padding(keep), ~keep[:, None, None])


def test_documents(qkv):
    rng = np.random.default_rng(0)
    q_ids = rng.integers(-1, 3, (BATCH, SEQLEN_Q)).astype(np.int32)
    kv_ids = rng.integers(-1, 3, (BATCH, SEQLEN_KV)).astype(np.int32)
    dense = (q_ids[:, None, :, None] == kv_ids[:, None, None, :]) & (q_ids >= 0)[:, None, :, None]
    check(qkv, masks.documents(q_ids, kv_ids), dense)
    _, _, _, j, t = grids()
    check(qkv, masks.documents(q_ids, kv_ids) & masks.causal(), dense & (j <= t))


def test_prefix(qkv):
    _, _, _, j, t = grids()
    check(qkv, masks.prefix(6), (j < 6) | (j <= t))
    n = np.array([2, 12], np.int32)
    check(qkv, masks.prefix(n), (j < n[:, None, None, None]) | (j <= t))
    with pytest.raises(tilewise.InvalidArgumentError, match="prefix"):
        tilewise.attention(*qkv, mask=masks.prefix(6), causal=True)


def test_intervals(qkv):
    _, _, i, j, t = grids()
    rng = np.random.default_rng(0)
    bounds = np.sort(rng.integers(0, SEQLEN_Q + 1, (BATCH, HEADS_KV, SEQLEN_KV, 4)), -1).astype(np.int32)
    by_head = np.repeat(bounds, HEADS // HEADS_KV, axis=1).transpose(3, 0, 1, 2)[:, :, :, None, :]
    lts, lte, uts, ute = by_head
    check(qkv, masks.intervals(bounds[..., :1], causal=True), (j <= t) & ~(i >= lts))
    check(qkv, masks.intervals(bounds[..., :2], causal=True), (j <= t) & ~((i >= lts) & (i < lte)))
    check(qkv, masks.intervals(bounds[..., 2:], causal=False), ~(i >= uts) & ~(i < ute))
    check(qkv, masks.intervals(bounds, causal=False), ~((i >= lts) & (i < lte)) & ~((i >= uts) & (i < ute)))


def test_row_intervals(qkv):
    _, _, _, j, _ = grids()
    start = np.random.default_rng(0).integers(0, 8, (BATCH, SEQLEN_Q)).astype(np.int32)
    end = start + 4
    check(qkv, masks.row_intervals(start, end), (j >= start[:, None, :, None]) & (j < end[:, None, :, None]))


def test_tree(qkv):
    _, _, i, j, _ = grids()
    n = 7
    bits = np.random.default_rng(0).integers(0, 2**n, (BATCH, SEQLEN_Q, 1)).astype(np.uint32)
    column = j - (SEQLEN_KV - n)
    dense = (column < 0) | ((bits[:, None] >> np.maximum(column, 0).astype(np.uint32)) & 1).astype(bool)
    check(qkv, masks.tree(bits, n), dense)
    check(qkv, masks.tree(bits, np.full(BATCH, n, np.int32)), dense)


def test_blocks(qkv):
    _, _, i, j, _ = grids()
    map = np.random.default_rng(0).random((BATCH, 1, 3, 3)) > 0.4
    b, h = np.ix_(range(BATCH), range(HEADS))
    dense = map[np.arange(BATCH)[:, None, None, None], 0, i // 4, j // 5]
    check(qkv, masks.blocks(map, 4, 5), dense)


@pytest.mark.parametrize(
    "shape", [SHAPE, (1, 1, SEQLEN_Q, SEQLEN_KV), (SEQLEN_Q, 1), (BATCH, 1, 1, SEQLEN_KV), (HEADS, 1, 1)]
)
def test_dense(qkv, shape):
    keep = np.random.default_rng(0).random(shape) > 0.3
    check(qkv, keep, keep)
    check(qkv, masks.dense(keep.astype(np.int8)), keep)
    check(qkv, masks.causal() & keep, keep & (grids()[3] <= grids()[4]))


def test_mod(qkv):
    _, h, i, j, _ = grids()
    ids = np.random.default_rng(0).integers(0, 3, SEQLEN_KV)
    mask = masks.mod(lambda b, h, i, j, s: (s.ids[i] == s.ids[j]) | (j % 5 == h), ids=ids)
    check(qkv, mask, (ids[i] == ids[j]) | (j % 5 == h))


def test_a_mask_reads_its_arrays_anew_in_every_call(qkv):
    keep = np.ones((SEQLEN_Q, SEQLEN_KV), bool)
    mask = masks.prepare(masks.dense(keep))
    check(qkv, mask, keep)
    keep[:, 3:] = False
    check(qkv, mask, keep)


def test_arrays_in_messages_have_their_names(qkv):
    with pytest.raises(tilewise.InvalidArgumentError, match="documents kv_ids"):
        tilewise.attention(
            *qkv, mask=masks.documents(np.zeros((BATCH, SEQLEN_Q), np.int32), np.zeros((BATCH, 4), np.int32))
        )
