#!/usr/bin/env python3
"""`./dev gpu-test`: everything that can be tested on a GPU machine, in parallel, under five minutes.

The harness draws random problems for the kernels of simt, mma and (on Hopper) sm90, in every dtype they have, until the
time is used; test_cuda.py and the report cases run with tensors on the GPU; the CPU harness runs with AVX-512. A test of
Python that failed runs once more, alone: others on the same GPU may have been in its way. Report:
bench/results/<gpu>/test.json. Exit status 1 on a failure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_common import BUILD, HARNESS, ROOT, Done, Row, indented, is_hopper, machine, pool, run, say, table, write

DTYPES = ("float32", "bfloat16", "float16", "float64")
# (impl, dtype): tensor cores are for 16 bits.
KERNELS = (*(("simt", dtype) for dtype in DTYPES), ("mma", "bfloat16"), ("mma", "float16"))
HOPPER = (("sm90", "bfloat16"), ("sm90", "float16"))
# Longest sequence, largest head dim: many options at once, all column counts, several tiles.
SIZES = ((150, 40), (100, 260), (600, 128))
LEAST = 90  # seconds: torch starts in every process, and half a minute is kept for failures to run once more
CHUNK = 6  # cases per process: every case has kernels of its own, which are compiled on the way
RESULT = re.compile(r"^(\S.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


def harness_counts(done: Done, cases: int) -> tuple[int, int, list[str]]:
    """(passed, failed, what failed) of one run of the harness; one that ended early failed once more."""
    failures = [line for line in done.output.splitlines() if line.startswith("FAILED")]
    summary = re.search(r"(\d+) passed, (\d+) failed", done.output)
    if summary:
        return int(summary[1]), int(summary[2]), failures
    return 0, 1, [*failures, f"{done.how}, {cases} cases: {' '.join(done.output.split())[-300:]}"]


def pytest_results(output: str) -> dict[str, str]:
    """Result of every test, of a run with -vv that may have been cut off."""
    return {found[1]: found[2] for line in output.splitlines() if (found := RESULT.match(line))}


def shards(names: Sequence[str], count: int) -> list[list[str]]:
    return [part for n in range(count) if (part := list(names[n::count]))]


@dataclass
class Run:
    python: str
    seconds: float
    start: float = field(default_factory=time.monotonic)
    rows: dict[str, Row] = field(default_factory=dict)
    again: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # row, test, environment
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def left(self, reserve: float = 0.0) -> float:
        return self.seconds - reserve - self.elapsed

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row(name))

    def harness(self, name: str, cases: int, settings: Sequence[str], limit: float) -> None:
        command = [str(HARNESS), "test", f"cases={cases}", *settings]
        done = run(command, limit, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"})
        if done.code is None and self.left(25) <= 1:  # the run is over, nothing is wrong with it
            return
        passed, failed, failures = harness_counts(done, cases)
        with self.lock:
            row = self.row(name)
            row.passed, row.failed, row.seconds = row.passed + passed, row.failed + failed, row.seconds + done.seconds
            row.failures += [f"{' '.join(settings)}: {line}" for line in failures]
            if failed and len(row.failures) <= 4:
                say(f"  {self.elapsed:4.0f} s  {name}: {' '.join(command[1:])}\n{indented(done.output, 12)}")

    def pytest(self, name: str, tests: Sequence[str], environment: dict[str, str], limit: float) -> None:
        command = [self.python, "-m", "pytest", "-vv", "--tb=short", "--color=no", "-p", "no:randomly", *tests]
        done = run(command, limit, environment)
        results = pytest_results(done.output)
        with self.lock:
            row = self.row(name)
            row.seconds += done.seconds
            bad = [test for test, result in results.items() if result in ("FAILED", "ERROR")]
            row.passed += sum(result in ("PASSED", "XFAIL", "XPASS") for result in results.values())
            row.skipped += sum(result == "SKIPPED" for result in results.values())
            row.failed += len(bad)
            self.again += [(name, test, environment) for test in bad]
            missing = [test for test in tests if test not in results]
            if missing and (done.code is None or done.code not in (0, 1)):
                row.failed += 1
                row.failures.append(
                    f"{done.how}, {len(missing)} of {len(tests)} tests without a result, first {missing[0]}"
                )
                say(indented(done.output, 15))
            say(
                f"  {self.elapsed:4.0f} s  {name}: {len(results)} of {len(tests)} tests, {len(bad)} failed, {done.seconds:.0f} s"
            )
            if bad:
                start = done.output.find("= FAILURES")
                say(indented("\n".join(done.output[max(start, 0) :].splitlines()[:90]), 90))

    def collect(self, file: str, environment: dict[str, str]) -> list[str]:
        done = run([self.python, "-m", "pytest", "--collect-only", "--color=no", file], 90, environment)
        tests = [line for line in done.output.splitlines() if line.startswith(file + "::")]
        if not tests:
            row = self.row(f"python {Path(file).name}")
            row.failed += 1
            row.failures.append(f"not collected: {done.how}")
            say(indented(done.output, 20))
        return tests

    def rerun(self) -> None:
        """Failures once more, one after another: the kernels are compiled by now and nobody else is there."""
        for name, test, environment in self.again:
            row, left = self.row(name), self.left(2)
            if left < 8:
                row.failures.append(f"{test} (no time to run it again alone)")
                continue
            done = run(
                [self.python, "-m", "pytest", "-vv", "--tb=short", "--color=no", test], min(60, left), environment
            )
            if pytest_results(done.output).get(test) == "PASSED":
                row.failed, row.passed = row.failed - 1, row.passed + 1
                row.notes.append(f"passed only alone: {test.split('::')[-1]}")
            else:
                wrong = [line[2:] for line in done.output.splitlines() if line.startswith("E ")]
                row.failures.append(f"{test}: {' '.join(wrong[0].split())[:200] if wrong else done.how}")
            say(f"  {self.elapsed:4.0f} s  again, alone: {test}: {'passed' if done.code == 0 else 'failed'}")


def draws(gpu: str) -> Iterator[tuple[str, list[str]]]:
    """Without end: (row of the table, settings of the harness). Every size and kernel once, then other seeds."""
    kernels = KERNELS + (HOPPER if is_hopper(gpu) else ())
    for seed in itertools.count(step=CHUNK):
        for (seqlen, dim), (impl, dtype) in itertools.product(SIZES, kernels):
            settings = [f"impl={impl}", f"dtype={dtype}", f"seqlen={seqlen}", f"dim={dim}", f"seed={seed}"]
            yield f"harness, {impl}, {dtype}", settings


def everything(self: Run, workers: int, gpu: str) -> None:
    base = {"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    on_gpu = base | {"TILEWISE_TEST_DEVICE": "cuda"}
    files = {"tests/python/test_cuda.py": (base, 4), "tests/python/test_reports.py": (on_gpu, 4)}
    with pool(workers) as jobs:
        collected = {file: jobs.submit(self.collect, file, environment) for file, (environment, _) in files.items()}
        chunks = draws(gpu)

        def draw() -> None:
            """Chunks of random problems until the time for them is over, or nothing is left to learn from them."""
            while self.left(30) > 5 and sum(len(row.failures) for row in list(self.rows.values())) < 60:
                with self.lock:
                    name, settings = next(chunks)
                self.harness(name, CHUNK, settings, self.left(25))

        pending = []
        for file, (environment, count) in files.items():
            name = f"python {Path(file).name}"
            for part in shards(collected[file].result(), count):
                pending.append(jobs.submit(self.pytest, name, part, environment, self.left(30)))
        if HARNESS.exists():
            for dtype in DTYPES:
                settings = ["impl=cpu_tiled", "isa=avx512", f"dtype={dtype}"]
                pending.append(
                    jobs.submit(self.harness, f"harness, CPU, AVX-512, {dtype}", 100, settings, self.left(30))
                )
            pending += [jobs.submit(draw) for _ in range(workers)]
        else:
            self.row("harness").failed = 1
            self.row("harness").failures.append(f"{HARNESS.relative_to(ROOT)} was not built")
        for job in pending:
            job.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev gpu-test", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--seconds", type=float, default=285, help="time of the whole run, the build included")
    parser.add_argument("--out", type=Path, help="folder of test.json [bench/results/<gpu>]")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 4) - 2), help="programs at once")
    parser.add_argument("--build-seconds", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--build-failed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    left = options.seconds - options.build_seconds
    if left < LEAST:
        parser.error(
            f"--seconds {options.seconds:g}: the build took {options.build_seconds:.0f} s of them; {LEAST} or more have to "
            f"be left for tests, so give it {options.build_seconds + LEAST:.0f} or more"
        )
    self = Run(sys.executable, left)
    build = self.row("build")
    build.seconds, build.passed, build.failed = (
        options.build_seconds,
        int(not options.build_failed),
        int(options.build_failed),
    )
    about, folder = machine()
    folder = options.out or folder
    say(f"{about['gpu']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}; {options.workers} programs at once, "
        f"{self.seconds:.0f} s left")  # fmt: skip
    os.environ.setdefault("TILEWISE_CACHE_DIR", str(BUILD / "cache"))
    doctor = run(
        [sys.executable, "-P", "-c", "from tilewise.cli import main; main()", "doctor"],
        60,
        {"PYTHONPATH": str(ROOT / "python")},
    )
    say(indented(doctor.output, 30))
    try:
        everything(self, options.workers, about["gpu"])
        self.rerun()
    except Exception as error:  # whatever it is, the table is still worth having
        self.row("this tool").failed = 1
        self.row("this tool").failures.append(f"{type(error).__name__}: {error}")
    return finish(self, about, folder, doctor.output)


def finish(self: Run, about: dict[str, Any], folder: Path, doctor: str) -> int:
    rows = sorted(self.rows.values(), key=lambda row: (row.name != "build", row.name))
    record = {**about, "seconds": round(self.elapsed + self.rows["build"].seconds, 1),
              "ok": all(row.ok for row in rows), "steps": [row.to_json() for row in rows], "doctor": doctor}  # fmt: skip
    write(folder / "test.json", record)
    say("\nFailures:" if any(row.failures for row in rows) else "")
    for row in rows:
        for line in row.failures[:12]:
            say(f"  {row.name}: {line[:400]}")
        if len(row.failures) > 12:
            say(f"  {row.name}: and {len(row.failures) - 12} more")
    say("\n" + table(rows))
    say(f"{'All passed' if record['ok'] else 'FAILED'} in {record['seconds']} s; {folder / 'test.json'}")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
