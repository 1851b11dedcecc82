"""Tilewise against itself, without a GPU: lengths, FLOPs, a whole run on the CPU with tiny sizes, what goes wrong in one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

import tilewise  # noqa: E402
from tilewise import gpu_bench, gpu_relations, measure  # noqa: E402
from tilewise.gpu_bench import Bench, Entry, cells_of  # noqa: E402
from tilewise.gpu_relations import Group, Problem, Sizes, draw_lengths, groups_of  # noqa: E402

ROW_KEYS = (
    "relation pass dtype head_dim mask tflops base_tflops ratio_median ratio_min ratio_max kernel error_ok"
).split()
TINY = Sizes(
    head_dims=(16,), hidden=128, batch=2, tokens=48, long_batch=1, long_tokens=96, sequences=5, shortest=4, longest=96
)


def run(folder: Path) -> tuple[int, str, dict]:
    """Exit status, what was said, and the report, of one cell of each mask and what follows."""
    bench = Bench(impls=("tilewise",), rounds=3, min_seconds=0.001, device="cpu", relations=TINY)
    cells = cells_of((32,), (16,), ("fp32",), ("fwd",), tokens=32, hidden=32)
    with (folder / "text").open("w") as file:
        status = gpu_bench.run(bench, cells, folder, Console(file=file, width=132))
    return status, (folder / "text").read_text(), json.loads((folder / "bench.json").read_text())


def test_lengths():
    lengths = draw_lengths(64, 32, 8192)
    assert lengths == draw_lengths(64, 32, 8192) != draw_lengths(64, 32, 8192, seed=1)
    assert len(lengths) == 64 and all(isinstance(n, int) and 32 <= n <= 8192 for n in lengths)
    assert 20 <= sum(n < 512 for n in lengths) <= 44  # 512 is the middle in the logarithm
    assert draw_lengths(3, 7, 7) == (7, 7, 7)


def test_groups():
    """What was asked for decides: both masks, the forward pass, head dims 64 and 128."""
    assert [(g.dtype, g.head_dim, g.mask) for g in groups_of(cells_of(), Sizes())] == [
        ("bf16", dim, mask) for dim in (64, 128) for mask in ("full", "causal")
    ]
    assert len(groups_of(cells_of(head_dims=(128, 256)), Sizes())) == 2
    assert groups_of(cells_of(masks=("causal",)), Sizes()) == []
    assert groups_of(cells_of(passes=("bwd",)), Sizes()) == []


@pytest.mark.parametrize("dim", [64, 128])
def test_flops(dim):
    problems = Group("bf16", dim, "full", Sizes()).problems()
    assert tuple(problems) == gpu_relations.PROBLEMS
    halves = Group("bf16", dim, "causal", Sizes()).problems()
    lengths = problems["varlen"].lengths
    expected = dict.fromkeys(("mha", "gqa8", "batch_invariant"), 4 * 4 * 4096**2 * 2048)
    expected |= {"long": 4 * 2 * 8192**2 * 2048, "varlen": 4 * 2048 * sum(n * n for n in lengths)}
    assert {name: problem.flops for name, problem in problems.items()} == expected
    assert {name: 2 * problem.flops for name, problem in halves.items()} == expected
    assert problems["gqa8"].cell.heads_q == 8 * problems["gqa8"].cell.heads_kv == problems["mha"].cell.heads_kv
    assert problems["varlen"].cell.seqlen_q == problems["varlen"].starts[-1] == sum(lengths)


def test_packed_sequences_are_those_that_are_checked():
    cell = measure.Cell(1, 2, 2, 12, 12, 8, "fp32", "causal")
    problem = Problem(cell, (4, 1, 2, 5))
    data = gpu_relations.make_data(problem, 0, "cpu")
    assert data.q.shape == (12, 2, 8) and data.q.is_contiguous()
    parts = list(gpu_relations.checked_parts(problem, data, data.v))
    assert [part.seqlen_q for _, part, _, _ in parts] == [1, 4, 5]
    assert torch.equal(parts[2][2].k, data.k[7:].transpose(0, 1)[None]) and parts[2][3].shape == (1, 2, 5, 8)
    assert parts[2][2].q.untyped_storage().data_ptr() == data.q.untyped_storage().data_ptr()
    same = Problem(cell, (3, 3))  # of equal sequences there may be fewer than three
    assert len(list(gpu_relations.checked_parts(same, data, data.v))) == 2


def test_rates_of_the_same_round():
    group = Group("fp32", 16, "full", TINY)
    problems = group.problems()
    seconds = {"varlen": [1e-3, 4e-3, 2e-3], "long": [1e-3, 1e-3, 4e-3]}
    entries = {name: Entry(name, f"kernel of {name}", each, error_ok=True) for name, each in seconds.items()}
    row = gpu_relations.to_row("varlen", group, problems, entries)
    assert list(row) == ROW_KEYS and row["kernel"] == "kernel of varlen" and row["error_ok"] is True
    work = problems["varlen"].flops / problems["long"].flops
    for which, ratio in (("min", 0.25), ("median", 1.0), ("max", 2.0)):
        assert math.isclose(row[f"ratio_{which}"], ratio * work)
    assert math.isclose(row["tflops"], problems["varlen"].flops / 2e-3 * 1e-12)
    assert math.isclose(row["base_tflops"], problems["long"].flops / 1e-3 * 1e-12)
    entries["long"].error_ok = False  # a ratio to a wrong result is worth nothing
    assert gpu_relations.to_row("varlen", group, problems, entries)["error_ok"] is False


def test_whole_run_on_the_cpu(tmp_path):
    pytest.importorskip("matplotlib")
    status, text, report = run(tmp_path)
    assert status == 0 and "accuracy of Tilewise: ok in all" in text
    rows = report["relations"]
    assert [(row["mask"], row["relation"]) for row in rows] == [
        (mask, relation) for mask in ("full", "causal") for relation in gpu_relations.RELATIONS
    ]
    for row in rows:
        assert list(row) == ROW_KEYS
        assert (row["pass"], row["dtype"], row["head_dim"], row["error_ok"]) == ("fwd", "fp32", 16, True)
        assert 0 < row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert row["tflops"] > 0 and row["base_tflops"] > 0 and row["kernel"].startswith("cpu")
    log = [each for each in report["protocol"]["log"] if each["impl"] in gpu_relations.PROBLEMS]
    assert len(log) == 2 * 5 and all(len(each["ms"]) == each["rounds"] == 3 for each in log)

    markdown = (tmp_path / "bench.md").read_text()
    table = markdown.split("## Tilewise against itself")[1]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6 and len({line.count("|") for line in lines}) == 1
    assert re.search(r"\| varlen \| fp32 \| 16 \| causal \| .*× \| cpu", table) and gpu_relations.EXPLANATION in table
    assert re.search(r"gqa8\W+fp32\W+16\W+full", text) and gpu_relations.EXPLANATION in text

    del report["relations"]  # as an older version wrote it
    assert "against itself" not in gpu_bench.to_markdown(report) and gpu_relations.inaccurate(report) == []


def test_a_wrong_result_is_reported(tmp_path, monkeypatch):
    """One packed sequence that reads a key of its neighbour."""
    attention = tilewise.attention

    def wrong(q, k, v, **options):
        if "cu_seqlens_q" in options:
            starts = options["cu_seqlens_q"].clone()
            starts[1] += 1
            options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        return attention(q, k, v, **options)

    monkeypatch.setattr(tilewise, "attention", wrong)
    monkeypatch.setattr(gpu_relations, "draw_lengths", lambda *sizes: (9, 8, 30))
    status, text, report = run(tmp_path)
    assert status == 1 and "varlen: error beyond the rule" in text
    assert {row["relation"] for row in report["relations"] if not row["error_ok"]} == {"varlen"}
    assert "FAILED in 2: varlen d16 full, varlen d16 causal" in text and "(inaccurate)" in text


def test_a_problem_that_raises_takes_nobody_with_it(tmp_path, monkeypatch):
    attention = tilewise.attention

    def broken(q, k, v, **options):
        if options.get("batch_invariant"):
            raise RuntimeError("no such kernel")
        return attention(q, k, v, **options)

    monkeypatch.setattr(tilewise, "attention", broken)
    status, text, report = run(tmp_path)
    assert [row["relation"] for row in report["relations"]] == ["gqa8", "varlen"] * 2
    assert [(each["impl"], each["reason"]) for each in report["protocol"]["declined"]] == [
        ("batch_invariant", "no such kernel")
    ] * 2
    assert status == 1 and "missing in 2" in text  # what a cell without Tilewise is, too
    assert "batch_invariant: no such kernel (fwd fp32 d16 full against itself" in (tmp_path / "bench.md").read_text()
