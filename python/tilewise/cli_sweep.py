"""The command `tilewise sweep`: tuning of GPU kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

import tilewise

from .cli import MEASURE, app, fail, need


@app.command(rich_help_panel=MEASURE)
def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Configs and shapes; python -m pydoc tilewise.sweep says how.")
    ],
    compile_: Annotated[
        Path | None,
        typer.Option("--compile", metavar="DIR", help="Only compile all configs into a pack; no GPU is needed."),
    ] = None,
    arch: Annotated[str, typer.Option(help="Of --compile.")] = "90a",
    jobs: Annotated[int | None, typer.Option(min=1, help="Of --compile: at once.  [default: one per CPU]")] = None,
    pack: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What --compile made; else kernels are compiled.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every cell beside the anchor.")] = 3,
    turn_ms: Annotated[float, typer.Option(min=0.1, help="Shortest turn, milliseconds.")] = 60,
    budget: Annotated[float, typer.Option(min=1, help="Seconds of the whole run.")] = 450,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for one config; one that hangs is ended.")] = 60,
    device: Annotated[str, typer.Option(help="cuda; cpu tries the tool out.")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="The report.  [default: bench/results/GPU/sweep-NAME.json]")] = None,
) -> None:
    """Measure, check and rank configs of GPU kernels: hundreds of config × shape cells in one run.

    First where there is no GPU: tilewise sweep FILE --compile build/pack. Then on the GPU: tilewise sweep FILE --pack
    build/pack. Every result is checked against fp64; configs are ranked against the library's own choice.

    Exit status 1 if the library's own choice is wrong, or nothing is right.
    """
    from . import sweep as program

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        chosen = program.sweep_from(json.loads(file.read_text()))
    except (OSError, ValueError, tilewise.Error) as error:
        fail(f"{file}: {error}")
    if compile_ is not None:
        record = program.compile_all(chosen, arch, compile_, jobs or os.cpu_count() or 1, say)
        broken = any("error" in kernel for kernels in record["configs"].values() for kernel in kernels)
        raise typer.Exit(1 if broken else 0)
    need("torch", "The sweep", "torch")
    import torch

    from . import gpu_bench

    if device not in ("cuda", "cpu"):
        fail(f"--device: got {device!r}; allowed: cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        fail("sweep: torch sees no GPU here; --compile DIR needs none")
    settings = program.Settings(
        device=device, rounds=rounds, turn=turn_ms / 1e3, budget=budget, limit=limit, pack=pack,
        ahead=max(1, min(4, (os.cpu_count() or 2) // 3)),
    )  # fmt: skip
    out = out or gpu_bench.results_folder(gpu_bench.gpu_name(device)) / f"sweep-{file.stem}.json"
    raise typer.Exit(program.run(chosen, settings, out, say))
