"""What `tilewise bench --device cuda` compares Tilewise with itself on, after the cells; forward pass only.

gqa8: query heads that share key/value heads, over as many query heads with key/value heads of their own.
batch_invariant: the option, over the same call without it. varlen: packed sequences of very different lengths, over equal
long ones. Work differs in the last one only, so what is compared are FLOP rates. Five problems of a head dim and a mask take
turns in the same rounds, as the implementations of a cell do, and each has to pass the accuracy rule.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from rich.table import Table

import tilewise

# gpu_bench imports this module too, so names of it are looked up when they are needed, not here.
from . import gpu_bench, measure
from .measure import Cell, Data, Tensor
from .report import human_ratio

RELATIONS = {  # a problem, and the one that it is compared with
    "gqa8": ("gqa8", "mha"),
    "batch_invariant": ("batch_invariant", "mha"),
    "varlen": ("varlen", "long"),
}
PROBLEMS = ("mha", "gqa8", "batch_invariant", "long", "varlen")
SETUP_SECONDS = 8.0  # for the plan only: inputs, truth and kernels of the five


# ---------------------------------------------------------------------------------------------------------- what to run


@dataclass(frozen=True)
class Sizes:
    head_dims: tuple[int, ...] = (64, 128)  # of these, what the bench was asked for
    hidden: int = 2048
    batch: int = 4  # of mha, gqa8 and batch_invariant
    tokens: int = 4096
    long_batch: int = 2  # what varlen is compared with
    long_tokens: int = 8192
    sequences: int = 64
    shortest: int = 32
    longest: int = 8192


@dataclass(frozen=True)
class Problem:
    """A call of Tilewise. With `lengths` the sequences are packed, and `cell` holds all of their tokens as one."""

    cell: Cell
    lengths: tuple[int, ...] = ()
    batch_invariant: bool = False

    def sequence(self, index: int) -> Cell:
        return replace(self.cell, seqlen_q=self.lengths[index], seqlen_kv=self.lengths[index])

    @property
    def flops(self) -> float:
        """Useful ones: between sequences there are none."""
        if not self.lengths:
            return self.cell.flops
        return sum(self.sequence(index).flops for index in range(len(self.lengths)))

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]


@dataclass(frozen=True)
class Group:
    """Problems that take turns with each other."""

    dtype: str
    head_dim: int
    mask: str
    sizes: Sizes

    def __str__(self) -> str:
        return f"fwd {self.dtype} d{self.head_dim} {self.mask} against itself"

    def problems(self) -> dict[str, Problem]:
        sizes, heads = self.sizes, max(1, self.sizes.hidden // self.head_dim)

        def cell(batch: int, tokens: int, heads_kv: int = heads) -> Cell:
            return Cell(batch, heads, heads_kv, tokens, tokens, self.head_dim, self.dtype, self.mask, "fwd")

        mha = cell(sizes.batch, sizes.tokens)
        lengths = draw_lengths(sizes.sequences, sizes.shortest, sizes.longest)
        return {
            "mha": Problem(mha),
            "gqa8": Problem(cell(sizes.batch, sizes.tokens, heads // 8)),
            "batch_invariant": Problem(mha, batch_invariant=True),
            "long": Problem(cell(sizes.long_batch, sizes.long_tokens)),
            "varlen": Problem(cell(1, sum(lengths)), lengths),
        }

    def round_seconds(self, min_seconds: float) -> float:
        """For the plan only."""
        return sum(max(1.05 * min_seconds, problem.flops / 1e14) for problem in self.problems().values())


def groups_of(cells: Sequence[Cell], sizes: Sizes) -> list[Group]:
    """Of every dtype and head dim that has forward cells of both masks."""
    masks: dict[tuple[str, int], set[str]] = {}
    for cell in cells:
        if cell.pass_ == "fwd" and cell.head_dim in sizes.head_dims:
            masks.setdefault((cell.dtype, cell.head_dim), set()).add(cell.mask)
    return [
        Group(dtype, dim, mask, sizes)
        for (dtype, dim), found in masks.items()
        if found >= {"full", "causal"}
        for mask in ("full", "causal")
    ]


def draw_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """As many between 100 and 200 as between 1000 and 2000: uniform in the logarithm, the same in every run."""
    draw = random.Random(seed)
    return tuple(round(math.exp(draw.uniform(math.log(shortest), math.log(longest)))) for _ in range(count))


# ---------------------------------------------------------------------------------------------------------- one problem


def make_data(problem: Problem, seed: int, device: str) -> Data:
    """As in a cell; packed sequences are [tokens, heads, head_dim]."""
    data = gpu_bench.make_data(problem.cell, seed, device)
    if not problem.lengths:
        return data
    return Data(*(x[0].transpose(0, 1) for x in (*data.qkv, data.do)))


def options_of(problem: Problem, device: str) -> dict[str, Any]:
    options = measure.tilewise_options(problem.cell, device)
    if problem.batch_invariant:
        options["batch_invariant"] = True
    if problem.lengths:
        starts = torch.tensor(problem.starts, dtype=torch.int32, device=device)
        options["cu_seqlens_q"] = options["cu_seqlens_kv"] = starts
        options["max_seqlen_q"] = options["max_seqlen_kv"] = max(problem.lengths)
    return options


def checked_parts(problem: Problem, data: Data, o: Tensor) -> Iterator[tuple[str, Cell, Data, Tensor]]:
    """What the accuracy rule is applied to: cells with their inputs and output. Of packed sequences the shortest, a middle
    and the longest one, each a batch of one."""
    if not problem.lengths:
        yield "o", problem.cell, data, o
        return
    order = sorted(range(len(problem.lengths)), key=problem.lengths.__getitem__)
    for index in dict.fromkeys((order[0], order[len(order) // 2], order[-1])):
        rows = slice(problem.starts[index], problem.starts[index + 1])
        q, k, v, do, part = (x[rows].transpose(0, 1)[None] for x in (*data.qkv, data.do, o))
        yield f"o of sequence {index}", problem.sequence(index), Data(q, k, v, do), part


def judge(cell: Cell, data: Data, o: Tensor) -> measure.Verdict:
    sample = measure.draw_sample(cell).to(o.device)
    truth, plain = (measure.sampled_attention(cell, data, sample, exact) for exact in (True, False))
    return measure.judge(measure.at_sample({"o": o}, cell, sample), truth, plain, cell.dtype)["o"]


def prepare(name: str, problem: Problem, sets: Sequence[Data], device: str) -> tuple[gpu_bench.Entry, gpu_bench.Turn]:
    """Accuracy, then what is timed."""
    options = options_of(problem, device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, **options)

    entry = gpu_bench.Entry(name, gpu_bench.our_kernel(sets[0], False, options))
    o = measure.run_once(attention, sets[0], False)["o"]
    verdicts = {what: judge(*part) for what, *part in checked_parts(problem, sets[0], o)}
    entry.accuracy = {what: verdict.to_json() for what, verdict in verdicts.items()}
    entry.error_ok = all(verdict.passed for verdict in verdicts.values())
    turn, entry.note = gpu_bench.make_turn(attention, sets, False, device)
    entry.captured = turn.captured
    return entry, turn


# ------------------------------------------------------------------------------------------------------------ one group


def run_group(bench: gpu_bench.Bench, group: Group, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of the relations whose two problems both ran."""
    problems = group.problems()
    ready: dict[str, tuple[gpu_bench.Entry, gpu_bench.Turn]] = {}
    made: dict[Cell, list[Data]] = {}  # batch_invariant reads what mha reads
    for name, problem in problems.items():
        bench.free_memory()
        with gpu_bench.quiet() as seen:
            try:
                if problem.cell not in made:
                    made[problem.cell] = [make_data(problem, seed, bench.device) for seed in range(bench.input_sets)]
                ready[name] = prepare(name, problem, made[problem.cell], bench.device)
            except Exception as error:  # compilers and drivers raise what they like; the others shall still run
                bench.decline(str(group), name, gpu_bench.why(error, seen), say)
                continue
        gpu_bench.tell(ready[name][0], say)
    bench.take_turns(ready, rounds)
    entries = {name: entry for name, (entry, _) in ready.items()}
    bench.log += [log_of(group, entry, bench.monitor) for entry in entries.values()]
    rows = [
        to_row(relation, group, problems, entries)
        for relation, pair in RELATIONS.items()
        if all(name in entries for name in pair)
    ]
    say("    " + "  ".join(f"{row['relation']} {row['ratio_median']:.3f}" for row in rows))
    return rows


def log_of(group: Group, entry: gpu_bench.Entry, monitor: gpu_bench.Monitor) -> dict[str, Any]:
    clock, power = monitor.between(entry.spans)
    return {
        "cell": str(group),
        "impl": entry.name,
        "rounds": len(entry.seconds),
        "ms": [seconds * 1e3 for seconds in entry.seconds],
        "clock_mhz": clock,
        "power_w": power,
        "graph": entry.captured,
        "accuracy": entry.accuracy,
    }


def to_row(
    relation: str, group: Group, problems: dict[str, Problem], entries: dict[str, gpu_bench.Entry]
) -> dict[str, Any]:
    """One element of "relations" in bench.json."""
    name, base = RELATIONS[relation]
    ours, its = entries[name], entries[base]
    work = problems[name].flops / problems[base].flops
    ratios = [work * ratio for ratio in gpu_bench.speed_ratios(ours.seconds, its.seconds)]
    return {
        "relation": relation,
        "pass": "fwd",
        "dtype": group.dtype,
        "head_dim": group.head_dim,
        "mask": gpu_bench.MASK_NAMES[group.mask],
        "tflops": problems[name].flops / statistics.median(ours.seconds) * 1e-12,
        "base_tflops": problems[base].flops / statistics.median(its.seconds) * 1e-12,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "kernel": ours.kernel,
        "error_ok": ours.error_ok and its.error_ok,
    }


# ------------------------------------------------------------------------------------------------------------ the table

COLUMNS = ("relation", "dtype", "dim", "mask", "TFLOP/s", "base", "ratio", "lowest", "highest", "kernel")
EXPLANATION = (
    "Forward pass, TFLOP/s, hidden size 2048; ratios of the same round, median and range. gqa8: 8 query heads to a key/value "
    "head over a key/value head each, 4 × 4096 tokens. batch_invariant: with that option over without. varlen: 64 packed "
    "sequences of 32 to 8192 tokens, spread evenly in the logarithm, over 2 × 8192; FLOPs of the pairs that they show."
)


def body(report: dict[str, Any]) -> list[list[str]]:
    """Reports of older versions have no relations."""
    return [
        [row["relation"], row["dtype"], str(row["head_dim"]), row["mask"], gpu_bench.rate(row),
         gpu_bench.figure(row["base_tflops"]),
         *(human_ratio(row[f"ratio_{which}"]) for which in ("median", "min", "max")), row["kernel"]]
        for row in report.get("relations", [])
    ]  # fmt: skip


def to_table(report: dict[str, Any]) -> Table:
    return gpu_bench.table_of(COLUMNS, body(report), {"relation", "dtype", "mask"})


def to_markdown(report: dict[str, Any]) -> list[str]:
    lines = body(report)
    if not lines:
        return []
    return [
        "",
        "## Tilewise against itself",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---|---|--:|--:|--:|--:|--:|---|",
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
        EXPLANATION,
    ]


def inaccurate(report: dict[str, Any]) -> list[str]:
    return [
        f"{row['relation']} d{row['head_dim']} {row['mask']}"
        for row in report.get("relations", [])
        if not row["error_ok"]
    ]


def missing(report: dict[str, Any]) -> int:
    """Groups in which a problem did not run."""
    return len({each["cell"] for each in report["protocol"].get("declined", []) if each["impl"] in PROBLEMS})
