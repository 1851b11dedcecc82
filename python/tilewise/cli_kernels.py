"""The commands about compiled GPU kernels: `tilewise aot`, `tilewise warmup`, `tilewise cache`."""

from __future__ import annotations

import json as jsons
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import tilewise

from . import _ext
from ._specs import DTYPES, PASSES, Spec, committed_specs, specs_from_file, specs_from_model
from .cli import KERNELS, app, fail, one_of

SPECS_HELP = "JSON file with a list of specs; python -m pydoc tilewise._specs says what stands in one."
MODEL_HELP = "A model's config.json, or the folder that holds it: what its calls need."
JSON_HELP = "Write the whole report to this JSON file; - = standard output, and nothing else."
ARCHS = "75,80,86,89,90a,100,120"

Specs = Annotated[Path | None, typer.Option(metavar="FILE", help=SPECS_HELP)]
Model = Annotated[Path | None, typer.Option(metavar="CONFIG", help=MODEL_HELP)]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the model.  [default: its torch_dtype, else bfloat16]")]
PassOption = Annotated[str, typer.Option("--pass", help="fwd, bwd or both.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Threads that compile.  [default: one per CPU]")]
Json = Annotated[str | None, typer.Option(metavar="FILE", help=JSON_HELP)]
Every = Annotated[bool, typer.Option("--every", help="A row for each spec instead of the largest figures.")]


@app.command(rich_help_panel=KERNELS)
def aot(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pack; made if it is not there.")],
    arch: Annotated[
        str, typer.Option(help="GPUs, joined by commas. compute_90 is PTX, which later GPUs take too.")
    ] = ARCHS,
    specs: Specs = None,
    model: Model = None,
    dtype: Dtype = None,
    pass_: PassOption = "both",
    archs_per_spec: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Only N of the archs, in turn, for specs that are not tuned: a quicker check."
        ),
    ] = None,
    jobs: Jobs = None,
    every: Every = False,
    json: Json = None,
) -> None:
    """Compile kernels into a pack, ahead of time and without a GPU.

    A machine whose TILEWISE_PACKS names the folder then runs these kernels without compiling, and without NVRTC. Without
    --specs or --model it is the list that tilewise itself is checked with. Needs NVRTC: pip install nvidia-cuda-nvrtc.

    Exit status 1 if a kernel does not compile, or one of a tuned spec spills, uses local memory or has its wgmma
    serialised.

    Example: tilewise aot --arch 80,90a --model Llama-3-8B/config.json --out pack
    """
    chosen = specs_of(specs, model, dtype) or committed_specs()
    try:
        # For all users of the machine, other than the cache.
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out: got {str(out)!r} ({error.strerror}); allowed: a folder that can be written to")
    run(chosen, arch.split(","), str(out), pass_, jobs, every, json, archs_per_spec)


@app.command(rich_help_panel=KERNELS)
def warmup(
    specs: Specs = None,
    model: Model = None,
    arch: Annotated[str | None, typer.Option(help="GPUs, joined by commas.  [default: the GPU at hand]")] = None,
    dtype: Dtype = None,
    pass_: PassOption = "both",
    jobs: Jobs = None,
    every: Every = False,
    json: Json = None,
) -> None:
    """Compile kernels into the user's cache, so that no first call has to wait.

    For the GPU of this machine, or with --arch for others that will use the same cache. What is there already stays.

    Example: tilewise warmup --model Llama-3-8B/config.json
    """
    chosen = specs_of(specs, model, dtype)
    if not chosen:
        fail("warmup: got neither --model nor --specs; allowed: one of the two")
    run(chosen, arch.split(",") if arch else [""], "", pass_, jobs, every, json)


def specs_of(specs: Path | None, model: Path | None, dtype: str | None) -> list[Spec]:
    if specs and model:
        fail("--specs and --model: got both; allowed: one of the two")
    if dtype is not None and (dtype not in DTYPES or not model):
        fail(f"--dtype: got {dtype!r}{'' if model else ' without --model'}; allowed: {', '.join(DTYPES)}, of a --model")
    try:
        return specs_from_file(specs) if specs else specs_from_model(model, dtype) if model else []
    except tilewise.Error as error:
        fail(str(error))


def run(
    specs: list[Spec],
    archs: list[str],
    directory: str,
    pass_: str,
    jobs: int | None,
    every: bool,
    json: str | None,
    archs_per_spec: int | None = None,
) -> None:
    from .aot import compile_jobs, jobs_of, print_outcome
    from .report import make_console, write_json

    passes = one_of(pass_, "--pass", {"fwd": PASSES[:1], "bwd": PASSES[1:], "both": PASSES})
    console = Console(stderr=True) if json == "-" else make_console()
    try:
        outcome = compile_jobs(jobs_of(specs, archs, passes, archs_per_spec), directory, jobs or cpus(), console)
    except tilewise.Error as error:
        fail(str(error))
    if json == "-":
        print(jsons.dumps(outcome.report()))
    else:
        print_outcome(outcome, console, every)
        if json:
            console.print(f"File: {write_json(Path(json), outcome.report())}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if outcome.good else 1)


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------------- cache

cache = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The compiled kernels on this disk: what is there, whether it is sound, and how to be rid of it.\n\n"
    "It lies in TILEWISE_CACHE_DIR, else in $XDG_CACHE_HOME/tilewise or ~/.cache/tilewise, and keeps itself below "
    "TILEWISE_CACHE_MAX_MB (1024). Nothing in it is ever stale; to remove it costs compiling again.",
)
app.add_typer(cache, name="cache", rich_help_panel=KERNELS)

Folder = Annotated[Path | None, typer.Option("--dir", metavar="DIR", help="A pack instead of the cache.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def listing(folder: Path | None, verify: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        lines = _ext.cache_list(str(folder or ""), verify).splitlines()
    except tilewise.Error as error:
        fail(str(error))
    head, *entries = map(jsons.loads, lines)
    return head, entries


def mebibytes(entries: list[dict[str, Any]]) -> str:
    return f"{sum(entry['bytes'] for entry in entries) / 2**20:.1f} MiB"


@cache.command("ls")
def cache_ls(folder: Folder = None, json: JsonFlag = False) -> None:
    """List the compiled kernels, the latest used first."""
    from .report import make_console

    head, entries = listing(folder, verify=False)
    entries.sort(key=lambda entry: (-entry["last_use"], entry["key"]))
    if json:
        print(jsons.dumps({**head, "entries": entries}))
        return
    console = make_console()
    if entries:
        table = Table("kernel", "KiB", "last use", "key")
        table.columns[1].justify = "right"
        for entry in entries:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["last_use"]))
            problem = f"not used: {entry['problem']}" if entry["problem"] else entry["about"]
            table.add_row(problem, f"{entry['bytes'] / 1024:.0f}", when, entry["key"][:12])
        console.print(table)
    limit = "" if head["max_bytes"] is None else f" of at most {head['max_bytes'] / 2**20:.0f} MiB"
    console.print(
        f"{len(entries)} kernels, {mebibytes(entries)}{limit}, in {head['directory'] or 'no folder'}",
        highlight=False,
        soft_wrap=True,
    )


@cache.command("verify")
def cache_verify(folder: Folder = None, json: JsonFlag = False) -> None:
    """Read every file and check its checksum.

    A damaged file is never used, only compiled again; `tilewise cache clear` removes it. Exit status 1 if there is one.
    """
    head, entries = listing(folder, verify=True)
    bad = [entry for entry in entries if entry["problem"]]
    if json:
        print(jsons.dumps({**head, "entries": entries}))
    else:
        for entry in bad:
            print(f"{head['directory']}/{entry['key']}.twk: {entry['problem']}")
        print(f"{len(entries)} kernels, {mebibytes(entries)}, in {head['directory']}: {len(bad)} not sound")
    raise typer.Exit(1 if bad else 0)


@cache.command("clear")
def cache_clear(
    folder: Folder = None, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
) -> None:
    """Remove the compiled kernels; running programs keep theirs."""
    head, entries = listing(folder, verify=False)
    if entries and not yes and sys.stdin.isatty():
        typer.confirm(f"Remove {len(entries)} kernels from {head['directory']}?", abort=True)
    try:
        removed = _ext.cache_clear(str(folder or ""))
    except tilewise.Error as error:
        fail(str(error))
    print(f"{removed} kernels removed from {head['directory']}")
