"""`tilewise sweep` without a GPU: its file, its ranking, its processes, and a whole run on the CPU."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from tilewise import InvalidArgumentError, sweep
from tilewise.sweep import Config, Job, Settings, Sweep, Worker

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ["fwd bf16 d128 causal s4096", "bwd bf16 d64 full s8192 b2h16/4"]


def test_file():
    data = {
        "shapes": SHAPES,
        "families": [
            {"family": "fwd_simt", "grid": {"kA": [1, 2], "kB": [3, 4]}, "configs": [{"kA": 9}, {"kA": 1, "kB": 3}]},
            {"family": "bwd_simt", "fixed": {"kC": 5}},
        ],
    }
    found = sweep.sweep_from(data)
    variables = [job.config.variable for job in found.jobs]
    assert variables == ["", "fwd_simt:kA=1,kB=3", "fwd_simt:kA=1,kB=4", "fwd_simt:kA=2,kB=3", "fwd_simt:kA=2,kB=4",
                         "fwd_simt:kA=9", "", "bwd_simt:kC=5"]  # fmt: skip
    assert {job.shapes for job in found.jobs if job.config.family == "fwd_simt"} == {(SHAPES[0],)}
    assert {job.shapes for job in found.jobs if job.config.family == "bwd_simt"} == {(SHAPES[1],)}
    assert found.cells == 8 and found.anchor == "cudnn" and str(found.jobs[0].config) == "fwd_simt (default)"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "families"),
        ({"families": []}, "families"),
        ({"families": [{"family": "simt"}]}, "family: got 'simt'"),
        ({"families": [{"family": "fwd_simt"}]}, "shapes: got 'none of its pass'"),
        ({"families": [{"family": "fwd_simt", "shapes": ["fwd bf16"]}]}, "shapes: got 'fwd bf16'"),
        ({"shapes": SHAPES, "families": [{"family": "fwd_simt", "configs": [{"kA": "x"}]}]}, "kA=x"),
        ({"shapes": SHAPES, "families": [{"family": "fwd_simt", "configs": [{"a;b": 1}]}]}, "a;b=1"),
        ({"shapes": SHAPES, "families": [{"family": "fwd_simt", "gird": {}}]}, "gird"),
        ({"shape": SHAPES, "families": [{"family": "fwd_simt"}]}, "shape"),
    ],
)
def test_files_that_are_refused(data, words):
    with pytest.raises(InvalidArgumentError) as error:
        sweep.sweep_from(data)
    assert words in str(error.value)


def test_shapes():
    assert sweep.sizes_of(SHAPES[0]) == {"batch": 4, "heads_q": 16, "heads_kv": 16, "seqlen_q": 4096, "seqlen_kv": 4096,
                                         "head_dim": 128, "dtype": "bf16", "mask": "causal", "pass_": "fwd"}  # fmt: skip
    assert (sweep.sizes_of(SHAPES[1])["heads_q"], sweep.sizes_of(SHAPES[1])["heads_kv"]) == (16, 4)


def test_the_committed_sweeps_can_be_read():
    files = sorted((ROOT / "bench/sweeps").glob("*.json"))
    assert files
    for file in files:
        found = sweep.sweep_from(json.loads(file.read_text()))
        assert found.cells > 20
        for job in found.jobs:
            for shape in job.shapes:
                sweep.spec_of(shape)


def row(config, shape, ratio=None, tflops=1.0, **more):
    ratio = {} if ratio is None else {"ratio_to_anchor": ratio}
    return {"config": config, "shape": shape, "error_ok": True, "tflops": tflops, **ratio, **more}


def test_ranking():
    results = [
        row("fwd_x (default)", "a", 0.5), row("fwd_x (default)", "b", 0.2),
        row("fwd_x k=1", "a", 1.0), row("fwd_x k=1", "b", 0.2, tflops=9.0),
        row("fwd_x k=2", "a", 9.0, error_ok=False), row("fwd_x k=2", "b", 0.8),
        {"config": "fwd_x k=3", "shape": "a", "error": "time limit"}, row("fwd_x k=3", "b", 0.1),
        row("bwd_y (default)", "c", tflops=3.0), row("bwd_y k=1", "c", tflops=6.0),
    ]  # fmt: skip
    ranked = {each["config"]: each for each in sweep.ranking(results)}
    assert list(ranked) == ["bwd_y k=1", "bwd_y (default)", "fwd_x k=1", "fwd_x (default)", "fwd_x k=2", "fwd_x k=3"]
    assert math.isclose(ranked["fwd_x k=1"]["gain"], math.sqrt(2)) and ranked["fwd_x k=1"]["most"] == 2
    assert ranked["fwd_x k=2"]["bad"] == 1 and ranked["bwd_y k=1"]["gain"] == 2
    assert [(each["config"], each["shape"]) for each in sweep.best_per_shape(results)] == [
        ("bwd_y k=1", "c"), ("fwd_x k=1", "a"), ("fwd_x k=2", "b")
    ]  # fmt: skip
    compiled = {
        "configs": {"fwd_x k=1": [{"registers": 90, "spill_store_bytes": 8}], "fwd_x k=3": [{"error": "no\n!"}]}
    }
    text = sweep.table(sweep.ranking(results), compiled)
    assert "90 registers, spills 8 B" in text and "failed: no !" in text and len(text.splitlines()) == 7


def test_rounds_shrink_with_the_time():
    jobs = [Job(Config("fwd_x"), ("a",))] * 9
    settings = Settings(rounds=4)
    assert sweep.rounds_for(settings, 100, None, jobs, []) == 4
    assert sweep.rounds_for(settings, 100, 10, jobs, []) == 4
    assert sweep.rounds_for(settings, 60, 10, jobs, []) == 2
    assert sweep.rounds_for(settings, 1, 10, jobs, []) == 1


def test_kernels_of_the_default_are_recognised():
    one, two = [{"path": "x"}, {"path": "y"}], [{"path": "y"}, {"path": "x"}]
    assert sweep.same_kernels(one, two) and not sweep.same_kernels(one, one[:1]) and not sweep.same_kernels([], [])


PROGRAM = """
import json, sys, time
request = json.loads(sys.stdin.readline())
print("chatter"); print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
print(json.dumps({"row": {"shape": "a", "error_ok": True, "tflops": 1.0}}), flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "words"),
    [("time.sleep(60)", "time limit"), ("sys.exit('illegal address')", "exit status 1: illegal address"),
     ("print(json.dumps({'done': True}))", "no result")],
)  # fmt: skip
def test_a_config_that_hangs_or_breaks_keeps_what_it_measured(monkeypatch, ending, words):
    monkeypatch.setattr(sweep, "worker_command", lambda: [sweep.sys.executable, "-c", PROGRAM + ending])
    worker = Worker(Job(Config("fwd_x", (("k", 1),)), ("a", "b")), {}, None)
    start = time.monotonic()
    rows = worker.measure(1, 15 if words == "time limit" else 60)
    assert time.monotonic() - start < 50 and worker.process.poll() is not None
    assert rows[0]["shape"] == "a" and rows[0]["error_ok"] and rows[1]["shape"] == "b" and words in rows[1]["error"]


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_PACKS", "/other")
    environment = sweep.worker_environment(Config("fwd_x", (("kA", 1), ("kB", 2))), tmp_path)
    assert environment["TILEWISE_CONFIG"] == "fwd_x:kA=1,kB=2"
    assert environment["TILEWISE_PACKS"] == f"{tmp_path.resolve()}:/other"


def test_whole_run_on_the_cpu(tmp_path):
    pytest.importorskip("torch")
    shapes = ("fwd fp32 d16 causal s48 b1h2", "bwd fp32 d16 documents s48 b2h2/1")
    jobs = tuple(Job(Config("cpu_tiled", constants), shapes) for constants in ((), (("kA", 1),)))
    said: list[str] = []
    settings = Settings(device="cpu", turn=0.001, rounds=2, ahead=2, budget=400, limit=200)
    assert sweep.run(Sweep(jobs, "math"), settings, tmp_path / "deep/sweep.json", said.append) == 0
    report = json.loads((tmp_path / "deep/sweep.json").read_text())
    assert len(report["cells"]) == 4 and all(each["error_ok"] and each["rounds"] == 2 for each in report["cells"])
    assert {each["config"] for each in report["ranking"]} == {"cpu_tiled (default)", "cpu_tiled kA=1"}
    assert "4 of 4 cells good" in said[-1]
    said.clear()
    settings.budget = 0
    assert sweep.run(Sweep(jobs, "math"), settings, tmp_path / "sweep.json", said.append) == 1
    assert "no time left" in "".join(said)
