"""Compiling kernels before they are needed: `tilewise aot`, `tilewise warmup`, and what is told about it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import _cuda, _ext
from ._errors import InternalError
from ._specs import Spec


@dataclass(frozen=True)
class Job:
    spec: Spec
    pass_: str
    arch: str  # "": the GPU at hand


@dataclass
class Kernel:
    """One kernel of one compiled module; numbers are None where the compiler told nothing (PTX)."""

    spec: str
    tuned: bool
    family: str
    file: str
    entry: str
    arch: str
    compiler: str
    registers: int | None
    shared_bytes: int | None
    stack_bytes: int | None
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    local_bytes: int | None
    image_bytes: int
    seconds: float
    from_cache: bool
    warnings: list[str]
    path: str
    rendered: str = ""  # spec.cuh, at the first kernel of a module

    def faults(self) -> list[str]:
        """What no tuned kernel may have."""
        found = []
        if self.spill_store_bytes or self.spill_load_bytes:
            found.append(f"spills {self.spill_store_bytes} bytes, reads back {self.spill_load_bytes}")
        elif self.local_bytes or self.stack_bytes:
            found.append(f"{self.local_bytes or self.stack_bytes} bytes of local memory")
        found.extend(line for line in self.warnings if "C7510" in line or "wgmma" in line)
        return found

    def title(self) -> str:
        return f"{self.entry or self.file} {self.arch}"


@dataclass
class Outcome:
    kernels: list[Kernel] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # modules that do not compile
    jobs: int = 0
    specs: int = 0
    seconds: float = 0.0
    directory: str = ""

    def faults(self, tuned: bool) -> list[tuple[Kernel, str]]:
        return [(kernel, text) for kernel in self.kernels if kernel.tuned == tuned for text in kernel.faults()]

    @property
    def good(self) -> bool:
        return not self.failures and not self.faults(tuned=True)

    def report(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "specs": self.specs,
            "seconds": round(self.seconds, 2),
            "good": self.good,
            "failures": self.failures,
            "faults": [f"{kernel.title()} ({kernel.spec}): {text}" for kernel, text in self.faults(tuned=True)],
            "kernels": [{k: v for k, v in asdict(kernel).items() if k != "rendered"} for kernel in self.kernels],
        }


def jobs_of(
    specs: Iterable[Spec], archs: Sequence[str], passes: Sequence[str], archs_per_spec: int | None = None
) -> list[Job]:
    """Archs vary fastest, so that the modules that all specs share are made at once for all. With archs_per_spec a spec
    that is not tuned gets that many of them, the next ones in turn."""
    jobs: list[Job] = []
    turn = 0
    for spec in specs:
        some = archs
        if archs_per_spec is not None and not spec.tuned and archs_per_spec < len(archs):
            some = [archs[(turn + n) % len(archs)] for n in range(archs_per_spec)]
            turn += archs_per_spec
        jobs.extend(Job(spec, each, arch) for each in spec.passes if each in passes for arch in some)
    return jobs


def compile_jobs(jobs: Sequence[Job], directory: str, threads: int, console: Console) -> Outcome:
    """Compiles them into a pack, or with "" into the user's cache. Raises tilewise.Error for what concerns all of them:
    no compiler, an arch that it does not know, a folder that takes no files."""
    _cuda.tell_nvrtc_path()
    outcome = Outcome(jobs=len(jobs), specs=len({job.spec for job in jobs}), directory=directory)
    start = time.perf_counter()
    seen: dict[tuple[str, str], Kernel] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress,
        ThreadPoolExecutor(threads) as pool,
    ):
        bar = progress.add_task("compiling", total=len(jobs))
        running: dict[Future[str], Job] = {}
        waiting = iter(jobs)
        try:
            while True:
                # A few more than threads: what fails for all must not have to be tried by all.
                for job in _some(waiting, threads + 1 - len(running)):
                    running[pool.submit(_compile, job, directory)] = job
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(done)
                    progress.update(
                        bar, advance=1, description=f"{job.arch or 'GPU'} {job.pass_} {job.spec.title()}"[:60]
                    )
                    try:
                        lines = done.result()
                    except InternalError as error:
                        outcome.failures.append(f"{job.spec.title()}, {job.pass_}: {error}")
                        continue
                    for line in lines.splitlines():
                        _add(seen, Kernel(spec=job.spec.title(), tuned=job.spec.tuned, **json.loads(line)))
        except BaseException:
            for each in running:
                each.cancel()
            raise
    outcome.kernels = sorted(
        seen.values(), key=lambda each: (each.file, each.entry, len(each.arch), each.arch, each.spec)
    )
    outcome.seconds = time.perf_counter() - start
    return outcome


def _some(jobs: Iterator[Job], count: int) -> Iterator[Job]:
    for _, job in zip(range(count), jobs, strict=False):
        yield job


def _compile(job: Job, directory: str) -> str:
    return _ext.compile(job.spec.problem(), job.pass_ == "backward", job.arch, directory)


def _add(seen: dict[tuple[str, str], Kernel], kernel: Kernel) -> None:
    """Several specs may need one module: it is told of once, by who compiled it, and is tuned if one of them is."""
    known = seen.get((kernel.path, kernel.entry))
    if known is None:
        seen[kernel.path, kernel.entry] = kernel
        return
    if not kernel.from_cache:
        kernel.tuned = kernel.tuned or known.tuned
        seen[kernel.path, kernel.entry] = kernel
    elif kernel.tuned and not known.tuned:
        known.tuned, known.spec = True, kernel.spec


# ---------------------------------------------------------------------------------------------------------- report


def _most(kernels: Iterable[Kernel], name: str) -> str:
    values = [value for kernel in kernels if (value := getattr(kernel, name)) is not None]
    return str(max(values)) if values else "?"


def to_table(outcome: Outcome, every: bool) -> Table:
    """A row per kernel and arch with the largest figures over all specs, or one per spec too."""
    table = Table(title=f"GPU kernels in {outcome.directory or 'the cache'}", title_justify="left")
    table.add_column("kernel", overflow="fold")
    table.add_column("arch")
    table.add_column("spec" if every else "variants", justify="left" if every else "right", overflow="fold")
    for name in ("registers", "shared B", "stack B", "spill B", "KiB", "ms"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, ...], list[Kernel]] = {}
    for kernel in outcome.kernels:
        name = kernel.entry or kernel.file
        groups.setdefault((name, kernel.arch, kernel.spec, kernel.path) if every else (name, kernel.arch), []).append(
            kernel
        )
    for key, group in groups.items():
        # Seconds are those of a module and stand at its first kernel.
        times = [kernel.seconds * 1e3 for kernel in group if kernel.seconds > 0]
        spills = _most(group, "spill_store_bytes")
        table.add_row(
            key[0],
            key[1].removeprefix("sm_"),
            key[2] if every else str(len(group)),
            _most(group, "registers"),
            _most(group, "shared_bytes"),
            _most(group, "stack_bytes"),
            spills,
            f"{max(kernel.image_bytes for kernel in group) / 1024:.0f}",
            f"{statistics.median(times):.0f}" if times else "",
            style="yellow" if any(kernel.faults() for kernel in group) else None,
        )
    return table


def print_outcome(outcome: Outcome, console: Console, every: bool) -> None:
    console.print(to_table(outcome, every))
    modules = {kernel.path: kernel for kernel in outcome.kernels}
    fresh = {kernel.path for kernel in outcome.kernels if not kernel.from_cache}
    size = sum(kernel.image_bytes for kernel in modules.values())
    console.print(
        f"{outcome.specs} specs: {len(modules)} modules, {size / 2**20:.1f} MiB; {len(fresh)} compiled, the rest was there; "
        f"{outcome.seconds:.1f} s. Figures are the largest of the variants, ms the median of a module.",
        highlight=False,
    )
    if loose := outcome.faults(tuned=False):
        console.print(
            f"In specs that are not tuned, {len({id(kernel) for kernel, _ in loose})} kernels spill or use local memory.",
            highlight=False,
        )
    for kernel, text in outcome.faults(tuned=True):
        console.print(f"[bold red]tuned[/] {kernel.title()}, {kernel.spec}: {text}", highlight=False, soft_wrap=True)
    for text in outcome.failures:
        console.print("[bold red]failed[/]", end=" ")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
