"""tools/gpu_test.py and what it stands on, without a GPU: time limits, counting, a run in which everything fails."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_common  # noqa: E402
import gpu_sanitize  # noqa: E402
import gpu_test  # noqa: E402

sys.path.pop(0)


def test_a_program_past_its_limit_is_ended_with_its_children():
    start = time.monotonic()
    done = gpu_common.run(["bash", "-c", "echo before; sleep 60 & sleep 60"], 0.5)
    assert done.code is None and done.output == "before\n" and done.how == "time limit"
    assert time.monotonic() - start < 20
    assert gpu_common.run(["bash", "-c", "echo x >&2; exit 3"], 20).code == 3
    assert gpu_common.run(["/no/such/program"], 20).code == 127


def test_too_little_time_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_test.main(["--seconds", "90", "--build-seconds", "40"])
    assert "the build took 40 s" in (said := capsys.readouterr().err) and "130 or more" in said


def test_harness_output_is_counted():
    def counts(output, code=1):
        return gpu_test.harness_counts(gpu_common.Done(code, output, 1.0), 6)

    assert counts("FAILED simt seed=3 b1\n  o: off\n5 passed, 1 failed\n") == (5, 1, ["FAILED simt seed=3 b1"])
    assert counts("\r6 of 6, 0 failed\n6 passed, 0 failed\n", 0) == (6, 0, [])
    passed, failed, failures = counts("terminate called\n", -6)
    assert (passed, failed) == (0, 1) and "exit status -6" in failures[0] and "terminate called" in failures[0]
    assert "time limit" in counts("", None)[2][0]


def test_pytest_output_is_counted():
    text = (
        "tests/a.py::test_x PASSED   [ 10%]\ntests/a.py::test_y[window and offset] FAILED [ 20%]\n"
        "tests/a.py::test_z SKIPPED (needs two CUDA devices) [ 30%]\ntests/a.py::test_cut"
    )
    assert gpu_test.pytest_results(text) == {
        "tests/a.py::test_x": "PASSED",
        "tests/a.py::test_y[window and offset]": "FAILED",
        "tests/a.py::test_z": "SKIPPED",
    }
    assert gpu_test.shards(["a", "b", "c"], 2) == [["a", "c"], ["b"]] and gpu_test.shards(["a"], 3) == [["a"]]


@pytest.mark.parametrize(("gpu", "hopper"), [("NVIDIA H200", True), ("NVIDIA H20", True), ("NVIDIA L40S", False)])
def test_every_kernel_is_drawn_in_every_size_before_any_comes_again(gpu, hopper):
    count = len(gpu_test.SIZES) * (len(gpu_test.KERNELS) + (len(gpu_test.HOPPER) if hopper else 0))
    drawn = list(itertools.islice(gpu_test.draws(gpu), 2 * count))
    rounds = [{(name, *(s for s in settings if not s.startswith("seed="))) for name, settings in part}
              for part in (drawn[:count], drawn[count:])]  # fmt: skip
    assert rounds[0] == rounds[1] and len(rounds[0]) == count
    assert len({tuple(settings) for _, settings in drawn}) == 2 * count
    by_kernel = {tuple(settings[:2]): name for name, settings in drawn}
    assert by_kernel["impl=mma", "dtype=bfloat16"] == "harness, mma, bfloat16"
    dtypes = {impl: {d for i, d in by_kernel if i == impl} for impl in ("impl=simt", "impl=mma", "impl=sm90")}
    assert dtypes["impl=simt"] == {f"dtype={dtype}" for dtype in gpu_test.DTYPES}
    assert dtypes["impl=mma"] == {"dtype=float16", "dtype=bfloat16"}
    assert dtypes["impl=sm90"] == (dtypes["impl=mma"] if hopper else set())


def test_table():
    rows = [gpu_common.Row("one", 3), gpu_common.Row("two", 1, 2, notes=["n"]), gpu_common.Row("three")]
    lines = gpu_common.table(rows).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["ok", "FAILED", "nothing"]
    assert lines[2].endswith("n") and rows[0].to_json()["ok"] and not rows[2].to_json()["ok"]


TESTS = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("name", ["with a space"])
def test_param(name): pass
def test_bad(): assert 1 == 2
def test_crowded():
    import os, pathlib
    path = pathlib.Path(os.environ["MARK"])
    first = not path.exists()
    path.touch()
    assert not first
"""


def test_failures_run_again_alone(tmp_path, capsys):
    file = tmp_path / "test_sample.py"
    file.write_text(TESTS)
    self = gpu_test.Run(sys.executable, 300)
    environment = {"MARK": str(tmp_path / "mark")}
    root = os.path.relpath(file, ROOT)
    names = [f"{root}::{name}" for name in ("test_good", "test_param[with a space]", "test_bad", "test_crowded")]
    self.pytest("sample", names, environment, 120)
    row = self.rows["sample"]
    found = {test.split("::")[-1] for _, test, _ in self.again}
    assert (row.passed, row.failed) == (2, 2) and found == {"test_bad", "test_crowded"}
    self.again = [
        (row, next(name for name in names if name.endswith(test.split("::")[-1])), env) for row, test, env in self.again
    ]
    self.rerun()
    assert (row.passed, row.failed) == (3, 1), capsys.readouterr().out
    assert row.notes == ["passed only alone: test_crowded"] and "assert 1 == 2" in row.failures[0]


def test_a_run_in_which_nothing_works_still_reports(tmp_path, monkeypatch, capsys):
    """No harness, no GPU, no time."""
    monkeypatch.setattr(gpu_test, "HARNESS", ROOT / "no/such/harness")
    about = {"gpu": "none", "date": "", "commit": None, "torch": None, "cuda": None}
    monkeypatch.setattr(gpu_test, "machine", lambda: (about, tmp_path))
    monkeypatch.setattr(gpu_test, "run", lambda *_: gpu_common.Done(1, "no doctor", 0.0))
    monkeypatch.setattr(gpu_test.Run, "collect", lambda self, file, environment: [])
    assert gpu_test.main(["--seconds", "300", "--workers", "2", "--build-failed", "--build-seconds", "1"]) == 1
    record = json.loads((tmp_path / "test.json").read_text())
    assert record["ok"] is False and record["steps"][0]["name"] == "build" and not record["steps"][0]["ok"]
    assert "was not built" in capsys.readouterr().out


SANITIZER = """#!/bin/sh
case "$1 $*" in
    --version*) echo NVIDIA; echo "Version 1" ;;
    --tool=memcheck*float64*) echo "========= Invalid __global__ read of size 4 bytes"
        echo "2 passed, 0 failed"; echo "========= ERROR SUMMARY: 3 errors"; exit 86 ;;
    --tool=memcheck*impl=mma*dtype=float16*seqlen=400*) echo "========= Invalid __shared__ write of size 16 bytes"
        echo "2 passed, 0 failed"; echo "========= ERROR SUMMARY: 1 error"; exit 86 ;;
    --tool=racecheck*) echo "2 passed, 0 failed"; echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
    --tool=initcheck*) echo "1 of 2, 0 failed"; sleep 60 ;;
    --tool=synccheck*) echo "========= Error: Device not supported"; exit 1 ;;
    *) echo "2 passed, 0 failed"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


def test_sanitize_tells_clean_found_late_and_unusable_apart(tmp_path, monkeypatch, capsys):
    about = {"gpu": "none", "date": "", "commit": None, "torch": None, "cuda": None}
    harness, tool = tmp_path / "harness", tmp_path / "compute-sanitizer"
    harness.write_text('#!/bin/sh\necho "$2 $3" >> "$0.log"\necho "2 passed, 0 failed"\n')
    tool.write_text(SANITIZER)
    for file in (harness, tool):
        file.chmod(0o755)
    monkeypatch.setattr(gpu_sanitize, "machine", lambda: (about, tmp_path))
    monkeypatch.setattr(gpu_sanitize, "HARNESS", harness)
    monkeypatch.setattr(gpu_sanitize, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", "")
    assert gpu_sanitize.main(["--cases", "2", "--limit", "6", "--out", str(tmp_path)]) == 1
    steps = {step["name"]: step for step in json.loads((tmp_path / "sanitize.json").read_text())["steps"]}
    kernels = {tuple(line.split()) for line in (tmp_path / "harness.log").read_text().splitlines()}
    assert kernels == {(f"impl={impl}", f"dtype={dtype}") for impl, dtype in gpu_sanitize.KERNELS}
    assert {("impl=mma", "dtype=float16"), ("impl=mma", "dtype=bfloat16"), ("impl=simt", "dtype=float32")} < kernels
    count = len(kernels)
    assert steps["racecheck"]["ok"] and steps["racecheck"]["passed"] == 2 * count
    assert steps["memcheck"]["failed"] == 4 and steps["memcheck"]["passed"] == 2 * (count - 2)
    found = sorted(steps["memcheck"]["failures"])
    assert found[0].startswith("mma float16: 1 found") and "Invalid __shared__ write" in found[0]
    assert found[1].startswith("simt float64: 3 found") and "Invalid __global__ read" in found[1]
    assert "Invalid __shared__" in (tmp_path / "build/logs/sanitize-memcheck-mma-float16.log").read_text()
    assert steps["initcheck"]["skipped"] == 2 * count
    assert all("time limit of 6 s after 1 cases" in note for note in steps["initcheck"]["notes"])
    assert steps["synccheck"]["failed"] == count and "Device not supported" in steps["synccheck"]["failures"][0]
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("NOT clean")
    monkeypatch.setattr(gpu_sanitize, "sanitizer", lambda: None)
    assert gpu_sanitize.main(["--out", str(tmp_path)]) == 1
    assert "not installed" in capsys.readouterr().out


def test_dev_says_that_there_is_no_gpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for command in ("gpu-test", "gpu-sweep"):
        done = subprocess.run([str(ROOT / "dev"), command], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "needs a GPU" in done.stderr
