"""What tools/gpu_test.py and tools/gpu_sanitize.py share: programs with a time limit, run several at once, and records."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/gpu"
HARNESS = BUILD / "tests/tilewise_harness"


@dataclass
class Done:
    """What became of a program. `code` is None if it ran past its limit and was ended."""

    code: int | None
    output: str
    seconds: float

    @property
    def how(self) -> str:
        return "time limit" if self.code is None else f"exit status {self.code}"


def run(command: Sequence[str], limit: float, environment: dict[str, str] | None = None) -> Done:
    """Output and errors together; past the limit the whole process group is ended, and what it said is kept."""
    start = time.monotonic()
    variables = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, env=variables,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Done(127, str(error), 0.0)
    try:
        output, _ = process.communicate(timeout=max(limit, 0.1))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Done(code, output, time.monotonic() - start)


@dataclass
class Row:
    """A line of the table at the end, gathered from any number of programs."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.failed == 0 and self.passed > 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 1),
            "notes": self.notes,
            "failures": self.failures,
        }


def say(text: str) -> None:
    print(text, flush=True)


def table(rows: Iterable[Row]) -> str:
    lines = [("", "step", "passed", "failed", "skipped", "seconds", "notes")]
    for row in rows:
        verdict = "ok" if row.ok else "FAILED" if row.failed else "nothing ran"
        lines.append(
            (verdict, row.name, str(row.passed), str(row.failed), str(row.skipped), f"{row.seconds:.0f}",
             "; ".join(row.notes))
        )  # fmt: skip
    widths = [max(len(line[n]) for line in lines) for n in range(6)]
    text = []
    for line in lines:
        cells = [line[n].ljust(widths[n]) if n < 2 else line[n].rjust(widths[n]) for n in range(6)]
        text.append("  ".join([*cells, line[6]]).rstrip())
    return "\n".join(text)


def machine() -> tuple[dict[str, Any], Path]:
    """The head of every record and its folder; asked of the package in a process of its own, which may be broken."""
    code = (
        "import json; from tilewise import gpu_bench as g; a = g.about('cuda'); "
        "print(json.dumps([a, str(g.results_folder(a['gpu']))]))"
    )
    done = run([sys.executable, "-c", code], 120, {"PYTHONPATH": str(ROOT / "python")})
    try:
        found, folder = json.loads(done.output.splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        say("The package does not import:\n" + indented(done.output, 15))
        smi = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 20)
        name = smi.output.splitlines()[0].strip() if smi.code == 0 and smi.output else "gpu"
        found = {"gpu": name, "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
                 "commit": os.environ.get("TILEWISE_COMMIT"), "torch": None, "cuda": None}  # fmt: skip
        folder = ROOT / "bench/results" / "-".join(name.lower().removeprefix("nvidia ").split())
    return found, Path(folder)


def is_hopper(gpu: str) -> bool:
    """Whether the kernels of sm90 run on the GPU of this name."""
    return re.search(r"H100|H200|H800|H20\b|GH200", gpu) is not None


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def indented(text: str, lines: int) -> str:
    return "\n".join("    | " + line[:240] for line in text.strip().splitlines()[-lines:])


def pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, workers))
