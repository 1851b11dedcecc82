#!/usr/bin/env python3
"""`./dev gpu-sanitize`: the harness on the GPU under compute-sanitizer.

Random problems run once without a tool, which compiles their kernels into a cache on disk; then once under each tool,
all from the same cache. Report: bench/results/<gpu>/sanitize.json. Exit status 1 if a tool finds something.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_common import BUILD, HARNESS, ROOT, Done, Row, indented, is_hopper, machine, pool, run, say, table, write

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
# (impl, dtype); tensor cores are for 16 bits.
KERNELS = (("simt", "float32"), ("simt", "bfloat16"), ("simt", "float64"), ("mma", "bfloat16"), ("mma", "float16"))
HOPPER = (("sm90", "bfloat16"), ("sm90", "float16"))
# Longest sequence, largest head dim: several tiles of keys, 64 in simt, up to 128 in mma, up to 176 in sm90, pass by.
SIZES = {"simt": (90, 40), "mma": (400, 100), "sm90": (700, 130)}
# racecheck: every hazard with its place, not only that there is one.
OPTIONS = {"racecheck": ["--racecheck-report=all"]}
FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def sanitizer() -> str | None:
    """On the PATH, or in the toolkit."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", "/opt/cuda"]
    places = [f"{home}/{part}/compute-sanitizer" for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next((place for place in places if os.access(place, os.X_OK)), None)


def findings(done: Done) -> tuple[int | None, list[str]]:
    """(errors or hazards, None if the tool came to no verdict; the first lines of what it said)."""
    summaries = [int(first or second) for first, second in FOUND.findall(done.output)]
    lines = [line for line in done.output.splitlines() if line.startswith("=========")]
    lines = [line[9:].strip() for line in lines if line[9:].strip() not in ("", "COMPUTE-SANITIZER")]
    return (max(summaries) if summaries else None), lines


def harness_settings(kernels: tuple[str, str], options: argparse.Namespace) -> list[str]:
    impl, dtype = kernels
    seqlen, dim = SIZES[impl]
    return ["test", f"impl={impl}", f"dtype={dtype}", f"cases={options.cases}", f"seqlen={options.seqlen or seqlen}",
            f"dim={options.dim or dim}", f"seed={options.seed}"]  # fmt: skip


def sanitize(tool: str, kernels: tuple[str, str], program: str, options: argparse.Namespace, row: Row) -> None:
    what = " ".join(kernels)
    command = [
        program,
        f"--tool={tool}",
        *OPTIONS.get(tool, []),
        "--error-exitcode=86",
        "--print-limit=5",
        str(HARNESS),
    ]
    done = run([*command, *harness_settings(kernels, options)], options.limit, {"OMP_NUM_THREADS": "2"})
    errors, lines = findings(done)
    ran = re.search(r"(\d+) passed, (\d+) failed", done.output)
    row.seconds = max(row.seconds, done.seconds)
    if done.code is None:
        progress = re.findall(r"(\d+) of \d+, \d+ failed", done.output)
        row.failed += 1 if errors or lines[:1] else 0
        row.skipped += options.cases
        row.notes.append(
            f"{what}: time limit of {options.limit:.0f} s" + (f" after {progress[-1]} cases" if progress else "")
        )
    elif ran and (errors == 0 or (errors is None and done.code == 0)):
        row.passed += int(ran[1])
        if int(ran[2]):
            row.failed += int(ran[2])
            row.failures.append(f"{what}: {ran[2]} results were wrong under the tool")
    elif errors:
        row.failed += errors
        row.failures.append(f"{what}: {errors} found: " + " | ".join(lines[:6]))
    else:
        row.failed += 1
        row.failures.append(f"{what}: no verdict, {done.how}: " + " | ".join(lines[:4] or done.output.split("\n")[-5:]))
    (ROOT / "build/logs").mkdir(parents=True, exist_ok=True)
    (ROOT / f"build/logs/sanitize-{tool}-{what.replace(' ', '-')}.log").write_text(done.output)
    say(f"  {tool}, {what}: {errors if errors is not None else 'no verdict'}, {done.how}, {done.seconds:.0f} s")
    if errors or (done.code not in (0, None)):
        say(indented("\n".join(lines or done.output.splitlines()), 30))


def compile_first(options: argparse.Namespace, rows: dict[str, Row]) -> None:
    """The same cases without a tool; what is wrong here is no finding of the tools."""
    row = rows["without a tool"] = Row("without a tool")
    with pool(len(options.kernels)) as jobs:
        started = [
            (each, jobs.submit(run, [str(HARNESS), *harness_settings(each, options)], options.limit, {}))
            for each in options.kernels
        ]
        for kernels, job in started:
            done = job.result()
            row.seconds = max(row.seconds, done.seconds)
            found = re.search(r"(\d+) passed, (\d+) failed", done.output)
            row.passed += int(found[1]) if found else 0
            row.failed += int(found[2]) if found else 1
            if not found or int(found[2]):
                row.failures.append(f"{' '.join(kernels)}: {done.how}")
                say(indented(done.output, 15))
    say(f"  without a tool, kernels compiled: {row.passed} passed, {row.failed} failed, {row.seconds:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev gpu-sanitize", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"{', '.join(TOOLS)} [all]")
    parser.add_argument("--cases", type=int, default=20, help="random problems for each kernel and dtype")
    parser.add_argument("--seqlen", type=int, help="longest sequence [90; mma: 400]")
    parser.add_argument("--dim", type=int, help="largest head dim [40; mma: 100]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each tool, kernel and dtype")
    parser.add_argument("--out", type=Path, help="folder of sanitize.json [bench/results/<gpu>]")
    parser.add_argument("--build-seconds", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--build-failed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"unknown tool {sorted(unknown)[0]!r}; allowed: {', '.join(TOOLS)}")

    start = time.monotonic()
    about, folder = machine()
    options.kernels = KERNELS + (HOPPER if is_hopper(about["gpu"]) else ())
    folder = options.out or folder
    os.environ["TILEWISE_CACHE_DIR"] = str(BUILD / "cache")
    rows: dict[str, Row] = {}
    program = sanitizer()
    version = ""
    if program is None or not HARNESS.exists():
        missing = (
            "compute-sanitizer is not installed" if program is None else f"{HARNESS.relative_to(ROOT)} was not built"
        )
        rows["set-up"] = Row("set-up", failed=1, failures=[missing])
    else:
        version = " ".join(run([program, "--version"], 30).output.split("\n")[1:3])
        say(f"{about['gpu']}: {program} {version}")
        compile_first(options, rows)
        chosen = options.tools or list(TOOLS)
        for tool in chosen:
            rows[tool] = Row(tool)
        # All tools at once: each is one process that waits for its GPU most of the time.
        with pool(max(1, min(6, (os.cpu_count() or 4) // 2))) as jobs:
            started = [
                (tool, jobs.submit(sanitize, tool, each, program, options, rows[tool]))
                for each in options.kernels
                for tool in chosen
            ]
            for tool, job in started:
                try:
                    job.result()
                except Exception as error:
                    rows[tool].failed += 1
                    rows[tool].failures.append(f"{type(error).__name__}: {error}")
    record = {**about, "seconds": round(time.monotonic() - start, 1), "sanitizer": version, "cases": options.cases,
              "ok": all(row.ok for row in rows.values()), "steps": [row.to_json() for row in rows.values()]}  # fmt: skip
    write(folder / "sanitize.json", record)
    for row in rows.values():
        for line in row.failures[:8]:
            say(f"  {row.name}: {line[:600]}")
    say("\n" + table(rows.values()))
    say(f"{'Clean' if record['ok'] else 'NOT clean'} in {record['seconds']} s; {folder / 'sanitize.json'}")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
