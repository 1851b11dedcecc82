"""The GPU benchmark without a GPU: cells, budget, ratios, the JSON, the table, and a whole run on the CPU."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from tilewise import gpu_bench, measure  # noqa: E402
from tilewise.gpu_bench import Bench, Budget, Entry, Monitor, Turn, by_cell, cell_of, cells_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ROW_KEYS = (
    "pass dtype head_dim head_dim_v mask seqlen batch heads_q heads_kv impl kernel ms_min ms_median ms_max tflops "
    "ratio_to_cudnn_median clock_mhz error_ok"
).split()


def test_cells():
    cells = cells_of()
    assert len(cells) == len(set(cells)) == 2 * (6 * 3 * 2 + 2)
    for cell in cells:
        assert cell.batch * cell.seqlen_q == 16384 and cell.heads_q * cell.head_dim == 2048
        assert cell.heads_kv == cell.heads_q and cell.seqlen_kv == cell.seqlen_q and cell.dtype == "bf16"
    sparse = [cell for cell in cells if cell.mask in ("window", "documents")]
    assert {(c.seqlen_q, c.head_dim, c.pass_, c.mask) for c in sparse} == {
        (8192, 128, p, m) for p in ("fwd", "bwd") for m in ("window", "documents")
    }
    quick = cells_of(gpu_bench.QUICK_SEQLENS, gpu_bench.QUICK_HEAD_DIMS)
    assert len(quick) == 2 * (3 * 2 * 2 + 2) and set(quick) <= set(cells)
    assert "flex" in gpu_bench.wanted(sparse[0], gpu_bench.IMPLS)
    assert "flex" not in gpu_bench.wanted(cells[0], gpu_bench.IMPLS)


def test_flops_of_a_window():
    cell = replace(cell_of(3000, 16, "fp32", "window", "fwd"), batch=1, heads_q=1, heads_kv=1)
    assert cell.pairs == cell.visible().sum() == sum(min(i + 1, 1024) for i in range(3000))
    assert cell.flops == 4 * cell.pairs * 16


def test_budget_drops_rounds_evenly():
    def rounds_of(budget, speed=1.0, cells=20, setup=1.0, turn=1.0):
        elapsed, given = 0.0, []
        for n in range(cells):
            count = budget.rounds_now(elapsed, setup * (cells - n), turn * (cells - n))
            given.append(count)
            spent = (setup + count * turn) * speed if count else 0.0
            if count:
                budget.took(setup + count * turn, spent)
            elapsed += spent
        return given, elapsed

    assert rounds_of(Budget(None, 5))[0] == [5] * 20
    assert rounds_of(Budget(1000, 5))[0] == [5] * 20
    given, elapsed = rounds_of(Budget(80, 5))
    assert given == [3] * 20 and elapsed == 80
    given, elapsed = rounds_of(Budget(90, 5))  # what does not fit evenly goes to the last ones
    assert set(given) == {3, 4} and elapsed <= 90
    given, elapsed = rounds_of(Budget(80, 5), speed=1.5)  # slower than planned: fewer rounds, still in time
    assert given[0] == 3 and min(given) >= 1 and elapsed <= 82
    given, _ = rounds_of(Budget(10, 5))  # far too little: one round each while there is time, then nothing
    assert given[:5] == [1] * 5 and given[-1] == 0
    assert Budget(10, 5).rounds_now(10, 1, 1) == 0


def test_turns_are_as_long_as_asked_and_not_a_call_longer():
    for unit, units in ((0.001, 1), (0.03, 2), (0.5, 2)):
        done = []
        turn = Turn([partial(done.append, n) for n in range(units)], 4, None, True, unit)

        def clock(work, unit=unit, done=done):
            before = len(done)
            work()
            return unit * (len(done) - before)

        turn.clock = clock
        for estimate in (0.0, unit / 3, unit, unit * 3):
            done.clear()
            turn.unit_seconds = estimate
            assert math.isclose(turn.run(0.2), unit / 4)
            total = unit * len(done)
            assert total >= 0.2 - 1e-9
            if estimate in (unit, unit * 3):
                assert total <= 0.2 + unit + 1e-9
        assert not done or {*done} <= {*range(units)}
    assert turn.next > 1  # sets are walked through from turn to turn


class FakeGpu:
    """The part of torch.cuda that a turn uses, with a clock of its own; a captured call costs 1 ms less."""

    def __init__(self, monkeypatch, refuses=False):
        self.now, self.queue, self.capturing, self.refuses = 0.0, [], None, refuses
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                self.time = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.time - self.time) * 1e3

        class Stream:
            def wait_stream(self, other):
                pass

            def synchronize(self):
                pass

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                gpu.now += sum(cost - 1e-3 for _, cost in self.calls)
                gpu.queue += [name for name, _ in self.calls]

        @contextlib.contextmanager
        def graph(graph, stream):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None

        for name, value in {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def call(self, name, cost):
        def run():
            if self.capturing is not None:
                if self.refuses:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.capturing.calls.append((name, cost))
            else:
                self.now += cost
                self.queue.append(name)

        return run


@pytest.mark.parametrize("cost", [2e-3, 0.011, 0.3])
@pytest.mark.parametrize("refuses", [False, True])
def test_turns_of_a_gpu(monkeypatch, cost, refuses):
    gpu = FakeGpu(monkeypatch, refuses)
    turn, note = gpu_bench.turn_of(lambda: [gpu.call("a", cost), gpu.call("b", cost)], "cuda")
    assert turn.captured is not refuses and (note is not None) is refuses
    one = cost if refuses else cost - 1e-3
    gpu.queue.clear()
    start = gpu.now
    assert math.isclose(turn.run(0.2), one)
    assert gpu.queue[:4] == ["a", "b", "a", "b"][: len(gpu.queue)]
    assert 0.2 - 1e-9 <= gpu.now - start <= 0.2 + max(one, 0.0 if refuses else one * turn.calls) + 1e-9
    if cost == 0.3:  # one call a turn, and the other set of inputs in the next one
        turn.run(0.2)
        assert gpu.queue == ["a", "b"]


def entry(name, seconds, ok=True):
    return Entry(name, "kernel", list(seconds), error_ok=ok)


def test_rows_and_ratios():
    cell = cell_of(4096, 128, "bf16", "causal", "bwd")
    cudnn, ours = entry("cudnn", [1e-3, 4e-3, 2e-3]), entry("tilewise", [2e-3, 2e-3, 5e-3], ok=False)
    row = gpu_bench.to_row(cell, ours, cudnn, 1755.0)
    assert list(row) == ROW_KEYS
    assert row["ratio_to_cudnn_median"] == 0.5  # of 0.5, 2 and 0.4: of the same round, not of medians
    assert (row["ms_min"], row["ms_median"], row["ms_max"]) == (2.0, 2.0, 5.0)
    assert math.isclose(row["tflops"], 2.5 * 4 * 4096**2 / 2 * 128 * 16 * 4 / 2e-3 * 1e-12)
    assert row["error_ok"] is False and row["clock_mhz"] == 1755.0 and row["mask"] == "causal"
    assert gpu_bench.to_row(cell, cudnn, cudnn, None)["ratio_to_cudnn_median"] == 1
    assert gpu_bench.to_row(cell, ours, None, None)["ratio_to_cudnn_median"] is None


def report_of(rows):
    return {"gpu": "NVIDIA H200", "date": "2030-01-01", "commit": None, "torch": "2", "cuda": "13", "cells": rows,
            "protocol": {"text": "two rounds", "declined": [{"cell": "x", "impl": "math", "reason": "too big"}] * 5}}  # fmt: skip


def test_table():
    rows = []
    for seqlen, ours in ((512, 2e-3), (1024, 5e-4)):
        cell = cell_of(seqlen, 64, "bf16", "full", "fwd")
        cudnn = entry("cudnn", [1e-3])
        rows += [gpu_bench.to_row(cell, each, cudnn, None) for each in (entry("tilewise", [ours]), cudnn)]
    rows.append(gpu_bench.to_row(cell_of(8192, 128, "bf16", "window", "fwd"), entry("flex", [1e-3]), None, None))
    rows[2]["error_ok"] = False
    report = report_of(rows)
    assert gpu_bench.present(report) == ["tilewise", "cudnn", "flex"]
    lines = gpu_bench.body(report)
    assert [line[-2] for line in lines] == ["0.50×", "2.00×", "–"]
    assert lines[1][4].endswith("(inaccurate)") and lines[2][4] == "–"
    assert gpu_bench.inaccurate(report) == ["fwd d64 full s1024"]
    assert "1.000 (geometric mean of 2 cells, 0.500 to 2.000)" in gpu_bench.means(report)[0]
    text = gpu_bench.to_markdown(report)
    assert "| fwd | 64 | full | 512 |" in text and "math: too big (5 cells, the first x)" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_clock_and_power():
    assert gpu_bench.parse_sample("1980, 687.31\n") == (1980.0, 687.31)
    clock, power = gpu_bench.parse_sample("345, [N/A]")
    assert clock == 345 and math.isnan(power)
    assert gpu_bench.parse_sample("No devices were found") is None
    monitor = Monitor(samples=[(0.0, 100, 10.0), (1.0, 200, 20.0), (1.2, 300, math.nan), (9.0, 900, 90.0)])
    assert monitor.between([(0.9, 1.3)]) == (250, 20.0)
    assert monitor.between([(0.9, 1.3), (8.9, 9.1)]) == (300, 55.0)
    assert monitor.between([(5, 6)]) == (None, None)
    Monitor(gpu="none").stop()


def test_names_and_reasons():
    assert gpu_bench.slug("NVIDIA H200") == "h200"
    assert gpu_bench.slug("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"
    assert gpu_bench.slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    folder = gpu_bench.results_folder("NVIDIA H200")
    assert folder == ROOT / "bench/results/h200"
    assert gpu_bench.why(RuntimeError("first\nsecond")) == "first"
    assert len(gpu_bench.why(RuntimeError("x" * 1000))) == 200
    big = cell_of(16384, 64, "bf16", "full", "bwd")
    assert "needs 256 GiB" in gpu_bench.memory_refusal("math", big, 2, 140 * 2**30)
    assert gpu_bench.memory_refusal("cudnn", big, 2, 0) is None


def test_commit_of_a_copy_without_git(monkeypatch):
    monkeypatch.setenv("TILEWISE_COMMIT", "abc")
    monkeypatch.setattr(measure, "checkout_root", lambda: None)
    assert measure.commit() == "abc"


def test_whole_run_on_the_cpu(tmp_path, monkeypatch):
    """Every step but capture and clocks; an implementation that fails takes nobody with it."""
    pytest.importorskip("matplotlib")
    bench = Bench(impls=("tilewise", "math", "cudnn"), rounds=2, min_seconds=0.001, device="cpu")
    cells = cells_of((32,), (16,), ("fp32",), tokens=64, hidden=32, masks=("causal",))
    cells += [cell_of(1100, 16, "fp32", mask, "bwd", 1100, 16) for mask in ("window", "documents")]
    make = gpu_bench.make_attention

    def broken(name, cell, device):
        if name == "cudnn":
            raise RuntimeError("no such kernel")
        return make(name, cell, device)

    monkeypatch.setattr(gpu_bench, "make_attention", broken)
    with (tmp_path / "text").open("w") as file:
        assert gpu_bench.run(bench, cells, tmp_path / "deep", Console(file=file, width=132)) == 0
    text = (tmp_path / "text").read_text()
    assert "4 cells in" in text and "accuracy of Tilewise: ok in all" in text and "no such kernel (4 cells" in text
    report = json.loads((tmp_path / "deep/bench.json").read_text())
    assert list(report) == ["gpu", "date", "commit", "torch", "cuda", "protocol", "cells"]
    assert len(report["cells"]) == 8 and all(list(row) == ROW_KEYS and row["error_ok"] for row in report["cells"])
    assert {row["mask"] for row in report["cells"]} == {"causal", "window1024", "documents1000"}
    assert len(by_cell(report)) == 4 and len(report["protocol"]["log"]) == 8
    assert (tmp_path / "deep/bench.md").stat().st_size > 500 and (tmp_path / "deep/bench.png").stat().st_size > 5000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    code = "import sys; from tilewise.cli import main; sys.argv = ['tilewise', 'bench', '--device', 'cuda']; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and "no GPU" in done.stderr
