"""Whole models with Tilewise, PyTorch's SDPA and eager attention, in one run: `python -m tilewise.compat speed`.

Three parts: a training step of a Llama of 1.3 billion weights at 8192 tokens, generation with a Falcon and a Llama shape,
and a small Llama under torch.compile. Models are built from their configurations with random weights, which all
implementations share. Each implementation first answers (loss and a gradient, or the logits of generation), which is
compared with SDPA's answer and warms everything up: what is wrong is not timed. Then come rounds in rotated order; a ratio
is the median of the ratios of two times of the same round. Peak memory is that of PyTorch's allocator, weights included.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from . import measure
from ._compat_cases import PARTS, Case, answer_of, apart, build, cases, turn_of
from ._errors import refuse
from .compat import _quietly, write_between

REFERENCE: Final = "sdpa"
TITLES: Final = {"tilewise": "Tilewise", "sdpa": "SDPA", "eager": "eager"}
# Norm of the difference from the reference's answer as a share of its norm: some five times what rounding in every layer
# makes of it. A wrong mask is off by half and more; a scale that is off by a tenth lies at the limit in bf16.
TOLERANCE: Final = {
    "float32": {"loss": 1e-5, "gradient": 1e-4, "logits": 1e-4},
    "bfloat16": {"loss": 1e-3, "gradient": 0.1, "logits": 0.05},
}
LIMIT: Final = 1.02  # of compiled models: time with Tilewise / time with SDPA
MIN_SECONDS: Final = {"train": 0.0, "generate": 0.0, "compiled": 0.05}  # of one turn
ROUNDS: Final = {"train": 5, "generate": 5, "compiled": 20}
EXPECTED: Final = {
    "train": 15.0,
    "generate": 8.0,
    "compiled": 20.0,
}  # seconds of a case, to leave the later ones theirs
OUT_OF_MEMORY: Final = "out of memory"
LEAST: Final = 3  # rounds of a case, unless all time is over
BEGIN: Final = "<!-- begin: python -m tilewise.compat speed --markdown -->"


# ------------------------------------------------------------------------------------------------- measuring


@dataclass
class Outcome:
    """What came of one implementation in one case."""

    seconds: list[float] = field(default_factory=list)  # of one call, by round
    median: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    differences: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    wrong: bool = False


@dataclass
class Result:
    case: Case
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)  # tilewise's time / another's, of the same rounds
    setup: float = 0.0
    skipped: str = ""

    @property
    def failed(self) -> bool:
        return any(o.wrong or (o.fault and name != "eager") for name, o in self.outcomes.items())


class Meter:
    """Times and memory of one device."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device.startswith("cuda")
        if self.cuda:
            torch.cuda.set_device(torch.device(device).index or 0)

    def time(self, turn: Callable[[], Any], repeats: int = 1) -> float:
        if not self.cuda:
            started = time.perf_counter()
            for _ in range(repeats):
                turn()
            return (time.perf_counter() - started) / repeats
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(repeats):
            turn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else None


def prepare(
    case: Case,
    models: dict[str, Any],
    meter: Meter,
    tolerance: dict[str, float],
    tiny: bool,
    say: Callable[[str], None],
) -> tuple[dict[str, Outcome], dict[str, Callable[[], Any]]]:
    """Every implementation's first answer, peak and warm-up; the turns of those that may be timed."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = case.options["vocab_size"]
    shapes = ((case.batch, n) for n in (case.length, max(1, case.new)))
    ids, given = (torch.randint(3, vocabulary, shape, generator=generator).to(meter.device) for shape in shapes)
    outcomes = {name: Outcome(fault=f"not run: {REFERENCE} failed") for name in case.implementations}
    turns: dict[str, Callable[[], Any]] = {}
    expected: dict[str, Any] = {}
    for name in (REFERENCE, *(name for name in case.implementations if name != REFERENCE)):
        say(f"{case.name}, {case.what}: {name}, first run")
        outcome, model = Outcome(), models[name]
        outcomes[name] = outcome
        meter.clear()
        try:
            turn = turn_of(case, model, ids, meter.device, tiny)
            answer = answer_of(case, model, turn, ids, given)
            outcome.peak_bytes = meter.peak()
            expected = expected or answer
            outcome.differences = {what: apart(answer[what], x) for what, x in expected.items()}
            shares = {what: found / tolerance[what] for what, found in outcome.differences.items()}
            worst = max(shares, key=lambda what: shares[what])
            outcome.wrong = shares[worst] > 1
            if outcome.wrong:
                outcome.fault = f"wrong: {worst} differs from {REFERENCE}'s by {outcome.differences[worst]:.2g}"
            else:
                turn()
                turns[name] = turn
        except torch.OutOfMemoryError:
            outcome.peak_bytes, outcome.fault = meter.peak(), OUT_OF_MEMORY
        except Exception as error:  # of one implementation; the others are still worth knowing
            outcome.fault = f"{type(error).__name__}: {error}"
        model.zero_grad(set_to_none=True)
        if not expected:  # nothing to compare with, so nothing to time
            break
    return outcomes, turns


def run_case(case: Case, meter: Meter, until: float, end: float, tiny: bool, say: Callable[[str], None]) -> Result:
    started = time.perf_counter()
    result, kind = Result(case), "bfloat16" if meter.cuda else "float32"
    say(f"{case.name}: building")
    models = build(case, meter.device, getattr(torch, kind))
    result.outcomes, turns = prepare(case, models, meter, TOLERANCE[kind], tiny, say)
    result.setup = time.perf_counter() - started
    meter.clear()
    repeats = 1
    if turns and (shortest := 0.0 if tiny else MIN_SECONDS[case.part]):
        repeats = max(1, math.ceil(shortest / min(meter.time(turn) for turn in turns.values())))
    names = [name for name in case.implementations if name in turns]
    for n in range(ROUNDS[case.part]):
        if n and time.perf_counter() > (until if n >= LEAST else end):
            break
        say(f"{case.name}, {case.what}: round {n + 1} of {ROUNDS[case.part]}")
        for name in names[n % len(names) :] + names[: n % len(names)] if names else ():
            result.outcomes[name].seconds.append(meter.time(turns[name], repeats))
    for name in names:
        models[name].zero_grad(set_to_none=True)
        outcome = result.outcomes[name]
        outcome.median = statistics.median(outcome.seconds)
        outcome.tokens_per_second = case.tokens / outcome.median
        if name != "tilewise" and "tilewise" in turns:
            pairs = zip(result.outcomes["tilewise"].seconds, outcome.seconds, strict=True)
            result.ratios[name] = [mine / theirs for mine, theirs in pairs]
    torch._dynamo.reset()
    return result


# ------------------------------------------------------------------------------------------------- what is said


def ratio_text(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds)"


def speed_text(outcome: Outcome) -> str:
    if outcome.tokens_per_second:
        return f"{outcome.tokens_per_second:,.0f}"
    return outcome.fault.splitlines()[0][:80] if outcome.fault else "-"


def time_text(outcome: Outcome) -> str:
    return f"{outcome.median * 1e3:.4g}" if outcome.median else "-"


def peak_text(outcome: Outcome) -> str:
    if not outcome.peak_bytes:
        return "-"
    return f"{'> ' if outcome.fault == OUT_OF_MEMORY else ''}{outcome.peak_bytes / 2**30:.2f}"


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """model, measure, and a cell for each implementation."""
    lines: list[tuple[str, ...]] = [("model", "measured", *TITLES.values())]
    for result in results:
        case, outcomes = result.case, result.outcomes
        cells = {"tokens/s": {name: speed_text(outcome) for name, outcome in outcomes.items()}}
        if result.skipped:
            cells["tokens/s"] = dict.fromkeys(case.implementations, result.skipped)
        if not case.new and not result.skipped:
            cells["ms"] = {name: time_text(outcome) for name, outcome in outcomes.items()}
        if any(outcome.peak_bytes for outcome in outcomes.values()):
            cells["peak GiB"] = {name: peak_text(outcome) for name, outcome in outcomes.items()}
        if result.ratios:
            cells["time of Tilewise / this"] = {name: ratio_text(ratios) for name, ratios in result.ratios.items()}
        for measured, by_name in cells.items():
            lines.append((case.name, f"{case.what}: {measured}", *(by_name.get(name, "-") for name in TITLES)))
    return lines


def table(results: Sequence[Result]) -> str:
    lines = rows(results)
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def note(results: Sequence[Result]) -> str:
    """Whether a compiled model is as fast as with SDPA."""
    found = [r.ratios[REFERENCE] for r in results if r.case.part == "compiled" and REFERENCE in r.ratios]
    if not found:
        return ""
    worst = max(statistics.median(ratios) for ratios in found)
    return f"compiled: time of Tilewise / SDPA {worst:.3f} at worst; at most {LIMIT} is wanted\n"


def headline(about: dict[str, Any]) -> str:
    versions = f"tilewise {about['tilewise']} ({about['commit']}), transformers {about['transformers']}, torch {about['torch']}"
    return f"{about['device']}, {about['dtype']}{', tiny models' if about['tiny'] else ''}; {versions}"


def markdown(about: dict[str, Any], results: Sequence[Result]) -> str:
    first, *others = (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in rows(results))
    return "\n".join(
        [first, "|---" * 2 + "|---:" * len(TITLES) + "|", *others, "", f"{headline(about)}; {about['date']}."]
    )


def as_json(about: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Times, and what they are worth nothing without. `ratios` has the median, the range and the number of rounds."""
    listed = []
    for result in results:
        ratios = {
            name: {"median": statistics.median(r), "low": min(r), "high": max(r), "rounds": len(r)}
            for name, r in result.ratios.items()
        }
        case = asdict(result.case) | {"what": result.case.what, "tokens": result.case.tokens}
        outcomes = {name: asdict(outcome) for name, outcome in result.outcomes.items()}
        listed.append(case | {"setup": result.setup, "skipped": result.skipped, "results": outcomes, "ratios": ratios})
    return {"command": "python -m tilewise.compat speed", "about": about, "cases": listed}


def speed(
    parts: Sequence[str] = (), device: str = "", tiny: bool = False, seconds: float = 80.0, json_file: Path | None = None,
    page: Path | None = None, out: Any = None,
) -> int:  # fmt: skip
    """Measures, prints the table; 0 if nothing was wrong."""
    began = time.perf_counter()
    out = out or sys.stdout
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        refuse("--device", device, "cpu, or cuda where torch sees a GPU")
    if device == "cpu" and not tiny:
        refuse("--device", "cpu with models of full size", "cuda, or cpu with --tiny")
    if tiny:
        torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    meter = Meter(device)
    about = measure.facts(torch.cuda.get_device_name(device) if meter.cuda else "cpu")
    about |= {"transformers": transformers.__version__, "dtype": "bfloat16" if meter.cuda else "float32", "tiny": tiny}
    print(headline(about), file=out, flush=True)
    chosen = cases(parts or PARTS, tiny)
    results: list[Result] = []
    for n, case in enumerate(chosen):

        def say(text: str, n: int = n) -> None:
            if sys.stderr.isatty():
                print(f"\r\x1b[K{n + 1}/{len(chosen)} {text}", end="", file=sys.stderr, flush=True)

        now = time.perf_counter()
        left = began + seconds - now
        before = max((r.setup for r in results if r.case.part == case.part), default=0.0)
        if results and left <= before * (2 if case.part == "compiled" else 1):  # compiling a step takes twice as long
            results.append(Result(case, skipped="no time left"))
        else:
            mine, later = EXPECTED[case.part], sum(EXPECTED[other.part] for other in chosen[n + 1 :])
            until = now + max(left - later, left * mine / (mine + later))
            with _quietly():
                results.append(run_case(case, meter, until, began + seconds, tiny, say))
        meter.clear()
        if json_file is not None:  # after every case: a run that is cut short leaves what it has
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(as_json(about, results), indent=1) + "\n")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(f"\n{table(results)}\n\n{'' if tiny else note(results)}{time.perf_counter() - began:.0f} s", file=out)
    if page is not None:
        changed = write_between(page, BEGIN, markdown(about, results))
        print(f"{page}: {'rewritten' if changed else 'as it was'}", file=out)
    return 1 if any(result.failed for result in results) else 0
