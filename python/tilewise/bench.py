"""`tilewise bench`: Tilewise against what is installed, side by side in one run.

Every cell runs all implementations in rounds, in rotated order, each at least `min_seconds` back to back; what counts is
the ratio of two times of the same round. The accuracy rule is checked in every cell before anything is timed.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import measure
from .measure import PEERS, Cell, Timing
from .report import Steps, human_ratio, human_seconds, write_json

SCHEMA = "tilewise.bench/1"
FAMILIES = ("grid", "decode", "documents")
SHAPE = re.compile(r"b(\d+)h(\d+)(?:/(\d+))?s(\d+)(?::(\d+))?d(\d+)")


@dataclass(frozen=True)
class Protocol:
    rounds: int = 5
    min_seconds: float = 0.2
    input_sets: int = 2

    def __str__(self) -> str:
        return (
            f"{self.rounds} {'rounds' if self.rounds > 1 else 'round'} in rotated order, every turn at least {self.min_seconds * 1e3:.0f} ms back to back over "
            f"{self.input_sets} sets of inputs; ratios to Tilewise of the same round"
        )


# ------------------------------------------------------------------------------------------------------- what to run


def grid(
    seqlens: Sequence[int],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    masks: Sequence[str],
    passes: Sequence[str],
    heads: tuple[int, int] | None = None,
    batch: int | None = None,
) -> list[Cell]:
    """Every combination. By default a hidden size of 256 and at least 2048 tokens in the batch, so that one call is long
    enough to time and short enough to repeat on two cores."""
    cells = []
    for dtype, pass_, head_dim, mask, seqlen in itertools.product(dtypes, passes, head_dims, masks, seqlens):
        heads_q, heads_kv = heads or (max(1, 256 // head_dim),) * 2
        size = batch or max(1, 2048 // seqlen)
        cells.append(Cell(size, heads_q, heads_kv, seqlen, seqlen, head_dim, dtype, mask, pass_))
    return cells


def parse_shape(text: str) -> Cell:
    """`b1h16/4s1:8192d128` = batch 1, 16 query heads on 4 key/value heads, 1 query on 8192 keys, head dim 128."""
    match = SHAPE.fullmatch(text)
    if match is None:
        families = ", ".join(FAMILIES)
        raise ValueError(
            f"shapes: got {text!r}; allowed: {families}, or a shape like b2h8s1024d64 or b1h16/4s1:8192d128"
        )
    batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim = (int(part) if part else None for part in match.groups())
    assert batch is not None and heads_q is not None and seqlen_q is not None and head_dim is not None
    return Cell(batch, heads_q, heads_kv or heads_q, seqlen_q, seqlen_kv or seqlen_q, head_dim)


def cells_of(
    shapes: Sequence[str] = FAMILIES,
    seqlens: Sequence[int] = (512, 2048, 8192),
    head_dims: Sequence[int] = (64, 128),
    dtypes: Sequence[str] = ("fp32", "bf16"),
    masks: Sequence[str] = ("full", "causal"),
    passes: Sequence[str] = measure.PASSES,
    heads: tuple[int, int] | None = None,
    batch: int | None = None,
) -> list[Cell]:
    """The cells of families and explicit shapes. `documents` and `decode` follow the dtypes; decode is forward only."""
    cells: list[Cell] = []
    for shape in shapes:
        if shape == "grid":
            cells += grid(seqlens, head_dims, dtypes, masks, passes, heads, batch)
        elif shape == "decode":
            q, kv = heads or (32, 8)
            sizes = (batch or 1, q, kv, 1, max(seqlens), max(head_dims))
            cells += [Cell(*sizes, dtype) for dtype in dtypes if "fwd" in passes]
        elif shape == "documents":
            tokens, dim = max(seqlens), min(head_dims)
            q, kv = heads or (max(1, 256 // dim),) * 2
            sizes = (batch or 1, q, kv, tokens, tokens, dim)
            cells += [Cell(*sizes, dtype, "documents", pass_) for dtype, pass_ in itertools.product(dtypes, passes)]
        else:
            cell = parse_shape(shape)
            several = itertools.product(dtypes, passes, masks)
            cells += [replace(cell, dtype=dtype, pass_=pass_, mask=mask) for dtype, pass_, mask in several]
    return list(dict.fromkeys(cells))


# ---------------------------------------------------------------------------------------------------------- one cell


def run_cell(cell: Cell, peers: Sequence[str], protocol: Protocol, steps: Steps) -> dict[str, Any]:
    backward = cell.pass_ == "bwd"
    row: dict[str, Any] = {"name": str(cell), "cell": asdict(cell), "flops": cell.flops, "implementations": {}}
    steps.now(f"{cell}: fp64 truth on sampled rows")
    sets = [measure.make_data(cell, seed) for seed in range(protocol.input_sets)]
    sample = measure.draw_sample(cell)
    truth = measure.sampled_attention(cell, sets[0], sample, exact=True)
    plain = measure.sampled_attention(cell, sets[0], sample, exact=False)

    turns = {}
    for name in ("tilewise", *peers):
        steps.now(f"{cell}: accuracy of {PEERS[name].title}")
        graphs = protocol.input_sets if backward else 1
        if refused := measure.memory_refusal(name, cell, graphs):
            row["implementations"][name] = {"refused": refused}
            continue
        attention = PEERS[name].make(cell)
        try:
            full = measure.run_once(attention, sets[0], backward)
        except (RuntimeError, NotImplementedError) as error:
            if name == "tilewise":
                raise
            row["implementations"][name] = {"refused": str(error).strip().splitlines()[0]}
            continue
        verdicts = measure.judge(measure.at_sample(full, cell, sample), truth, plain, cell.dtype)
        row["implementations"][name] = {
            "accuracy": {key: verdict.to_json() for key, verdict in verdicts.items()},
            "passed": all(verdict.passed for verdict in verdicts.values()),
        }
        turns[name] = measure.turn(attention, sets, backward)

    def tell(name: str, number: int) -> None:
        steps.now(f"{cell}: {PEERS[name].title}, round {number + 1} of {protocol.rounds}")

    timings = measure.rounds(turns, protocol.rounds, protocol.min_seconds, tell)
    for name, timing in timings.items():
        row["implementations"][name] |= {
            "seconds": timing.seconds,
            "median": timing.median,
            "gflops": cell.flops / timing.median * 1e-9,
        }
        if cell.seqlen_q == 1:  # every key and value is read once and used once: bandwidth is the limit
            row["implementations"][name]["gbytes"] = cell.kv_bytes / timing.median * 1e-9
    row["ratios"] = {
        name: spread(timing, timings["tilewise"]) for name, timing in timings.items() if name != "tilewise"
    }
    return row


def spread(peer: Timing, ours: Timing) -> dict[str, float]:
    ratios = peer.times_of(ours)
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def expected_seconds(cell: Cell, peers: Sequence[str], protocol: Protocol) -> float:
    """For the progress bar only."""
    call = cell.flops / (60e9 if cell.dtype == "fp32" else 15e9)
    return 0.5 + (len(peers) + 1) * (protocol.rounds + 2) * max(protocol.min_seconds, 1.5 * call)


# -------------------------------------------------------------------------------------------------------- the tables


def rate_text(entry: dict[str, Any]) -> str:
    value, unit = (entry["gbytes"], "GB/s") if "gbytes" in entry else (entry["gflops"], "GFLOP/s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def ratio_text(row: dict[str, Any], name: str) -> str:
    if name in row["ratios"]:
        ratio = row["ratios"][name]
        low, high = (human_ratio(ratio[end]).rstrip("×") for end in ("min", "max"))
        return f"{human_ratio(ratio['median'])} {low}–{high}"
    return "declined" if name in row["implementations"] else "–"


def accuracy_text(row: dict[str, Any]) -> str:
    """The largest error as a share of what the rule allows."""
    accuracy = row["implementations"]["tilewise"]["accuracy"]
    share = max(verdict["error"] / max(verdict["allowed"], 1e-300) for verdict in accuracy.values())
    return f"{'ok' if row['implementations']['tilewise']['passed'] else 'FAILED'} {share:.0%}"


def header(report: dict[str, Any]) -> list[str]:
    peers = [name for name in report["implementations"] if name != "tilewise"]
    return ["cell", "Tilewise", "rate", *(report["implementations"][name] for name in peers), "accuracy"]


def body(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    ours = row["implementations"]["tilewise"]
    peers = [name for name in report["implementations"] if name != "tilewise"]
    times = (ratio_text(row, name) for name in peers)
    return [row["name"], human_seconds(ours["median"]), rate_text(ours), *times, accuracy_text(row)]


def notes(report: dict[str, Any]) -> list[str]:
    """Why a peer has no figure, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in report["cells"]:
        for name, entry in row["implementations"].items():
            if "refused" in entry:
                reasons.setdefault(f"{report['implementations'][name]}: {entry['refused']}", []).append(row["name"])
    return [f"{reason} ({', '.join(names)})" for reason, names in reasons.items()]


EXPLANATION = (
    "Columns of peers: time of the peer / time of Tilewise in the same round, median and min–max; above 1, Tilewise is "
    "faster. Cells: b batch, h query heads/key heads, s tokens (queries:keys), d head dim. FLOPs: 4·pairs·d forward, "
    "10·pairs·d backward, per head; causal counts half. Decode is given in bytes of K and V read per second. Accuracy: "
    "the largest error on sampled rows, as a share of what the accuracy rule allows."
)


def to_table(report: dict[str, Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for index, column in enumerate(header(report)):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in report["cells"]:
        failed = not row["implementations"]["tilewise"]["passed"]
        table.add_row(*body(row, report), style="red" if failed else "")
    return table


def to_markdown(report: dict[str, Any]) -> str:
    columns = header(report)
    lines = [
        f"# Benchmark: {report['device']}, {report['threads']} threads",
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, torch {report['torch']}, "
        f"load at the start {report['load']}. {report['protocol']['text']}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "|".join(["---"] + ["--:"] * (len(columns) - 1)) + "|",
        *("| " + " | ".join(body(row, report)) + " |" for row in report["cells"]),
        "",
        EXPLANATION,
    ]
    if extra := notes(report):
        lines += ["", "Declined:", "", *(f"- {note}" for note in extra)]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------ running


def run(
    cells: Sequence[Cell], peers: Sequence[str], protocol: Protocol, device: str, console: Console
) -> dict[str, Any]:
    """Runs the cells, telling each result as it comes; the report is what the JSON holds."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        **measure.facts(measure.choose_device(device)),
        "protocol": asdict(protocol) | {"text": str(protocol)},
        "implementations": {name: PEERS[name].title for name in ("tilewise", *peers)},
        "cells": [],
    }
    console.print(
        f"[bold]Tilewise {report['tilewise']}[/] on {report['device']}, {report['threads']} threads, torch {torch.__version__}"
    )
    console.print(f"{len(cells)} cells; {protocol}.", highlight=False)
    if warning := measure.busy_warning(report):
        console.print(f"[yellow]{warning}[/]")
    weights = [expected_seconds(cell, peers, protocol) for cell in cells]
    with Steps(console, sum(weights)) as steps:
        for cell, weight in zip(cells, weights, strict=True):
            row = run_cell(cell, peers, protocol, steps)
            report["cells"].append(row)
            steps.done(weight)
            ratios = "  ".join(f"{name} {human_ratio(x['median'])}" for name, x in row["ratios"].items())
            ours = row["implementations"]["tilewise"]
            failed = "" if ours["passed"] else "  [bold red]accuracy FAILED[/]"
            steps.log(f"  {row['name']:<38} {human_seconds(ours['median']):>8} {rate_text(ours):>13}  {ratios}{failed}")
    return report


def save(report: dict[str, Any], json: Path | None, markdown: Path | None, picture: Path | None) -> list[Path]:
    """Writes what was asked for; returns the files."""
    files = []
    if json is not None:
        files.append(write_json(json, report))
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(to_markdown(report))
        files.append(markdown)
    if picture is not None:
        from . import plots

        files.append(plots.bench_picture(report, picture))
    return files
