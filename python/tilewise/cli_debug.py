"""The commands that answer questions about a call: `explain`, `show`, `kernel`, `record`, `replay`."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

import tilewise

from . import _ext, _record
from ._problem import Call, call_from, renamed
from .cli import LOOK, app, fail, heads_pair, need, numbers, one_of
from .report import make_console

if TYPE_CHECKING:
    from .replay import Outcome

EXPRESSION = "with masks, ops, np and seqlen, seqlen_kv at hand"


@dataclass
class Problem:
    """What a command is asked about: a call of the command line's options, or a recorded one."""

    call: Call
    backward: bool | None  # None: both passes
    rng: Any = (0, 0)

    def plans(self) -> list[str]:
        passes = (False, True) if self.backward is None else (self.backward,)
        try:
            problem = self.call.problem(self.rng)
            return [_ext.Plan(problem, each).explain().rstrip("\n") for each in passes]
        except tilewise.InvalidArgumentError as error:
            renamed(self.call.settings, error)


def problem_from(
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE:LINE", help="A recorded call, instead of all options but --pass below."),
    ] = None,
    batch: Annotated[int, typer.Option(min=0, help="Batch.")] = 1,
    seqlen: Annotated[int, typer.Option(min=0, help="Queries; and keys, unless --seqlen-kv says otherwise.")] = 4096,
    seqlen_kv: Annotated[int | None, typer.Option(min=0, help="Keys.")] = None,
    heads: Annotated[str, typer.Option(help="Heads, or query/key heads like 32/8.")] = "8",
    head_dim: Annotated[int, typer.Option(min=0, help="Size of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16; bfloat16 needs torch.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Causal, aligned bottom right.")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT; -1 = unbounded.")] = None,
    chunk: Annotated[int, typer.Option(min=0, help="Keys of the same chunk only.")] = 0,
    mask: Annotated[
        str | None, typer.Option(metavar="PYTHON", help=f"A mask as a Python expression, {EXPRESSION}.")
    ] = None,
    score_mod: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help=f"A score function, lambda x, b, h, i, j, s: ..., {EXPRESSION}."),
    ] = None,
    softcap: Annotated[float, typer.Option(min=0, help="Softcap; 0 = off.")] = 0.0,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias for every query and key.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="With a sink for every head.")] = False,
    dropout_p: Annotated[float, typer.Option(min=0, max=1, help="Dropout.")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Two runs give the same bits.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The bits of a row depend on what it sees only.")
    ] = False,
    pass_: Annotated[str, typer.Option("--pass", help="fwd, bwd or both.")] = "both",
    backend: Annotated[str | None, typer.Option(help="Ask for one implementation by name.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: the GPU of this machine.")] = "cpu",
) -> Problem:
    backward = one_of(pass_, "--pass", {"fwd": False, "bwd": True, "both": None})
    if device not in ("cpu", "cuda"):
        fail(f"--device: got {device!r}; allowed: cpu, cuda")
    if device == "cuda":
        need_gpu()
    if from_ is not None:
        return recorded_problem(from_, device, backend, backward)
    heads_q, heads_kv = heads_pair(heads)
    keys = seqlen if seqlen_kv is None else seqlen_kv
    names = {"masks": tilewise.masks, "ops": tilewise.ops, "np": np, "seqlen": seqlen, "seqlen_kv": keys}
    options: dict[str, Any] = {
        "causal": causal, "chunk": chunk, "softcap": softcap, "dropout_p": dropout_p, "backend": backend,
        "deterministic": deterministic, "batch_invariant": batch_invariant,
        "mask": evaluated(mask, "--mask", vars(tilewise.masks) | names),
        "score_mod": evaluated(score_mod, "--score-mod", names),
    }  # fmt: skip
    if window is not None:
        left, _, right = window.partition(",")
        try:
            options["window"] = int(left), int(right)
        except ValueError:
            fail(f"--window: got {window!r}; allowed: LEFT,RIGHT like 1023,0")
    shapes = [(batch, seqlen, heads_q, head_dim), *[(batch, keys, heads_kv, head_dim)] * 2]
    q, k, v = (empty(shape, dtype, device) for shape in shapes)
    one = empty((1, heads_q, 1, 1), "float32", device)
    if bias:  # of which a number for each head is there
        shape = 1, heads_q, seqlen, keys
        options["bias"] = np.broadcast_to(one, shape) if isinstance(one, np.ndarray) else one.expand(shape)
    options |= {name: one.reshape(-1) for name, given in (("alibi_slopes", alibi), ("sinks", sinks)) if given}
    return Problem(call_from("tilewise", q, k, v, options), backward)


def empty(shape: tuple[int, ...], dtype: str, device: str = "cpu") -> Any:
    """An array of that shape which takes no memory until somebody writes to it, and nobody does."""
    if dtype not in ("float32", "float64", "float16", "bfloat16"):
        fail(f"--dtype: got {dtype!r}; allowed: float32, float64, float16, bfloat16")
    if dtype != "bfloat16" and device == "cpu":
        return np.empty(shape, dtype)
    need("torch", "bfloat16", "torch")
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def need_gpu() -> None:
    need("torch", "--device cuda", "torch")
    import torch

    if not torch.cuda.is_available():
        fail("--device cuda: torch sees no GPU here; `tilewise kernel --arch 90a` tells of kernels without one")


def evaluated(text: str | None, option: str, names: dict[str, Any]) -> Any:
    if text is None:
        return None
    try:
        return eval(text, {**names})
    except Exception as error:  # whatever the user's own code raises
        fail(f"{option}: got {escape(text)} ({type(error).__name__}: {escape(str(error))}); allowed: a Python expression, "
             f"{EXPRESSION}")  # fmt: skip


def recorded_problem(text: str, device: str, backend: str | None, backward: bool | None) -> Problem:
    try:
        recorded = _record.read_one(text)
    except OSError as error:
        fail(f"--from: got {text} ({error.strerror}); allowed: FILE:LINE of a file that TILEWISE_RECORD wrote")
    in_torch = recorded.kind != "numpy" or device != "cpu"
    if in_torch:
        need("torch", "This call", "torch")
        import torch  # noqa: F401 - its arrays are made from it
    call = object.__new__(Call)  # what is left of a call once it is taken apart
    call.settings = recorded.settings_for(device, in_torch, backend)
    try:
        call.arrays, call.device, call.seed = recorded.make_arrays(device, in_torch), None, None
    except tilewise.Error as error:
        fail(escape(f"{recorded.path}:{recorded.number}: {error}"))
    return Problem(call, backward, recorded.rng or (0, 0))


def about_a_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Puts the options of `problem_from` in front of the command's own, and a Problem in their place."""
    shared = inspect.signature(problem_from, eval_str=True).parameters
    own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(problem_from(**{name: values.pop(name) for name in shared}), **values)
        except tilewise.Error as error:
            fail(escape(str(error)))

    options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared.values(), *own)]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {**problem_from.__annotations__, **command.__annotations__}
    return run


# ---------------------------------------------------------------------------------------------------------- questions


@app.command(rich_help_panel=LOOK)
@about_a_problem
def explain(problem: Problem) -> None:
    """Which implementation would run a problem, how, and why not the others.

    Nothing is computed, and no memory is used. The first line names the options that count, deterministic and
    batch_invariant among them; the others say who declined and why, who takes it, tile sizes and workspace.

    Example: tilewise explain --seqlen 1 --seqlen-kv 8192 --heads 32/8 --head-dim 128

    Example: tilewise explain --from calls.jsonl:3 --device cpu
    """
    for text in problem.plans():
        print(text)


@app.command(rich_help_panel=LOOK)
@about_a_problem
def show(
    problem: Problem,
    tile: Annotated[
        str | None, typer.Option(metavar="Q,KV", help="Queries and keys of a tile.  [default: 64,64 up to 512 tiles]")
    ] = None,
    sequence: Annotated[int, typer.Option(min=0, help="Which sequence of the batch.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Which query head.")] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture to this PNG file too.")] = None,
) -> None:
    """A mask as a picture of its tiles: skipped, full and partial, with counts.

    Skipped tiles cost nothing; in full tiles no key has to be looked at; partial ones are computed and masked. Queries go
    down, keys to the right. Causal, window, chunk and the lengths of a recorded call are part of the mask.

    Example: tilewise show --seqlen 2048 --causal --window 511,0

    Example: tilewise show --seqlen 1000 --mask "documents(np.arange(seqlen) // 300) | masks.mod(lambda b, h, i, j, s: j < 16)"
    """
    from .show import COLORS, MARKS, map_of

    sizes = None
    if tile is not None:
        queries, *keys = numbers(tile, "--tile")
        if len(keys) != 1:
            fail(f"--tile: got {tile!r}; allowed: two numbers, like 64,128")
        sizes = queries, keys[0]
    found = map_of(problem.call, sequence, head, sizes)
    title = problem.plans()[0].split("\n", 1)[0].partition(" ")[2]
    console = make_console()
    console.print(f"{escape(title)}, sequence {sequence}, head {head}: tiles of {found.tile[0]} queries × "
                  f"{found.tile[1]} keys", highlight=False, soft_wrap=True)  # fmt: skip
    colors = {MARKS[each]: color for each, color in COLORS.items()}
    colors["·"] = "bright_black"  # light grey is for paper
    for line in found.picture(min(96, console.width)):
        console.print("".join(f"[{colors[mark]}]{mark}[/]" for mark in line), highlight=False, soft_wrap=True)
    console.print(", ".join(found.legend()), highlight=False, soft_wrap=True)
    if png is not None:
        need("matplotlib", "The picture", "cli")
        from .plots import mask_picture

        console.print(f"File: {mask_picture(found, title, png)}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=LOOK)
@about_a_problem
def kernel(
    problem: Problem,
    arch: Annotated[str, typer.Option(help="The GPU: 75, 80, 86, 89, 90a, 100, 120.")] = "90a",
    source: Annotated[
        bool, typer.Option("--source", help="Print what was written for this problem: tile sizes, mask and functions.")
    ] = False,
) -> None:
    """The GPU kernels that a problem would get: their names, registers, shared memory and spills; no GPU is needed.

    They are compiled as a first call would compile them, into a folder that is removed. Needs NVRTC: pip install
    nvidia-cuda-nvrtc. The text around what --source prints is that of kernels/tilewise.

    Example: tilewise kernel --dtype float16 --head-dim 128 --causal --arch 90a --source
    """
    import json

    from . import _cuda
    from .aot import Kernel

    _cuda.tell_nvrtc_path()
    table = Table("pass", "kernel", "arch", "registers", "shared B", "spill B", "ms")
    texts: dict[str, None] = {}  # one for all kernels of a module
    with tempfile.TemporaryDirectory() as folder:
        for backward in (False, True) if problem.backward is None else (problem.backward,):
            for line in _ext.compile(problem.call.problem(), backward, arch, folder).splitlines():
                each = Kernel(spec="", tuned=False, **json.loads(line))
                figures = (each.registers, each.shared_bytes, each.spill_store_bytes)
                table.add_row(
                    "backward" if backward else "forward", each.entry or each.file, each.arch,
                    *["?" if figure is None else str(figure) for figure in figures], f"{each.seconds * 1e3:.0f}",
                )  # fmt: skip
                if each.rendered:
                    texts[f"// spec.cuh of {each.file}\n{each.rendered.rstrip()}"] = None
    make_console().print(table)
    for text in texts if source else ():
        print(f"\n{text}")


# --------------------------------------------------------------------------------------------------- record and replay

DEBUG = "Record and replay"


@app.command(rich_help_panel=DEBUG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Calls are added at its end.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program, with its arguments.")],
    data: Annotated[
        bool, typer.Option("--data", help="The numbers of all arrays too; else replay draws random ones.")
    ] = False,
) -> None:
    """Run a program and write every call of tilewise to a file, to be replayed elsewhere.

    The same as TILEWISE_RECORD=FILE (and TILEWISE_RECORD_DATA=1) in front of the command. Shapes, strides, options, seeds,
    masks and functions are written, and all integer arrays, like lengths and document numbers. The exit status is that
    of the program.

    Example: tilewise record --data calls.jsonl python train.py --steps 1
    """
    named = {"TILEWISE_RECORD": str(file.absolute()), "TILEWISE_RECORD_DATA": "1" if data else "0"}
    try:
        raise typer.Exit(subprocess.run(command, env={**os.environ, **named}, check=False).returncode)
    except OSError as error:
        fail(f"COMMAND: got {command[0]!r} ({error.strerror}); allowed: a program, like python train.py")


@app.command(rich_help_panel=DEBUG)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What TILEWISE_RECORD or `tilewise record` wrote.")],
    impl: Annotated[
        str | None,
        typer.Option("--impl", "--backend", metavar="NAME", help="The implementation.  [default: as recorded]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.  [default: as recorded, if it is here]")] = None,
    calls: Annotated[str | None, typer.Option(help="Lines of the file, like 1,4.  [default: all]")] = None,
) -> None:
    """Run recorded calls again and check every result against the formula in float64.

    A row for every pass: line of the file, shapes, implementation, largest error, what the accuracy rule allows, and its
    verdict (docs/formula.md; of several results, the one nearest to its limit). Arrays whose numbers were not recorded
    are drawn anew, the same in every replay. The reference takes its time: long sequences take minutes.

    Exit status 1 if a result fails or a call does not run.

    Example: tilewise replay calls.jsonl --impl cpu_tiled --device cpu
    """
    need("torch", "The replay", "torch")
    from . import replay as program

    if device not in (None, "cpu", "cuda"):
        fail(f"--device: got {device!r}; allowed: cpu, cuda")
    if device == "cuda":
        need_gpu()
    wanted = None
    if calls is not None:
        wanted = set(numbers(calls, "--calls"))
    table = Table("call", "pass", "shapes", "implementation", "worst", "error", "allowed", "verdict")
    good, problem, reasons = True, "", []

    def tell(outcome: Outcome) -> None:
        table.add_row(*row_of(outcome))
        if outcome.error:
            reasons.append(f"{file}:{outcome.number}: did not run: {outcome.error}")

    try:
        found = (each for each in _record.read(file) if wanted is None or each.number in wanted)
        good = program.run(found, device, impl, tell)
    except OSError as error:
        problem = f"FILE: got {file} ({error.strerror}); allowed: a file that TILEWISE_RECORD wrote"
    except tilewise.Error as error:
        problem = escape(str(error))
    if table.rows:
        make_console().print(table)
    for reason in reasons:
        print(reason)
    if problem:
        fail(problem)
    if not table.rows:
        fail(f"{file}: got {'no call of --calls' if wanted else 'no calls'}; allowed: a file with calls in it")
    raise typer.Exit(0 if good else 1)


def row_of(outcome: Outcome) -> tuple[str, ...]:
    first = str(outcome.number), outcome.pass_, escape(outcome.shapes), outcome.implementation or "none"
    if outcome.error:
        return *first, "", "", "", "[bold red]did not run[/]"
    name, worst = max(outcome.judged.items(), key=lambda each: each[1].share)
    verdict = "passed" if outcome.passed else "[bold red]FAILED[/]"
    return *first, name, f"{worst.error:.1e}", f"{worst.allowed:.1e}", verdict
