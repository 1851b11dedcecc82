"""How the command line speaks: figures for people, and progress that names what is running."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def make_console() -> Console:
    """Without a terminal rich falls back to 80 columns, which breaks every table of this program."""
    return Console() if sys.stdout.isatty() else Console(width=132)


def human_seconds(seconds: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        if seconds * factor < 1000 or unit == "s":
            break
    value = seconds * factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def human_ratio(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 20 else f"{ratio:.1f}×" if ratio >= 10 else f"{ratio:.2f}×"


def write_json(path: Path, report: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


class Steps:
    """A progress bar on a terminal, nothing in a log. Steps are weighed in expected seconds, so that the remaining
    time means something although the last step may take a hundred times as long as the first."""

    def __init__(self, console: Console, weight: float) -> None:
        self.progress = Progress(
            SpinnerColumn(), BarColumn(30), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("", total=weight)

    def __enter__(self) -> Steps:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def now(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def done(self, weight: float) -> None:
        self.progress.advance(self.task, weight)

    def log(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)
