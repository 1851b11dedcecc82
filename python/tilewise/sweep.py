"""`tilewise sweep FILE`: measures, checks and ranks kernel configs, hundreds of config × shape cells in one run.

A config sets constants of a kernel family, in place of those that the library would choose. FILE is JSON:

    {"shapes": ["fwd bf16 d128 causal s4096", "bwd bf16 d64 full s8192 b2h16/4", ...],
     "anchor": "cudnn",
     "families": [
         {"family": "fwd_simt", "grid": {"kColumns": [64, 128], "kBlocks": [1, 2]}},
         {"family": "bwd_simt", "configs": [{"kColumns": 64}], "shapes": [...]}]}

A family gets the shapes of its pass: fwd_… or bwd_…. `grid` stands for all combinations, `configs` for single ones, `fixed`
for what all of them set. The config without constants always runs, and first: the others are ranked against it. Shapes:
pass, dtype, head dim, mask (full, causal, window, documents), tokens; then batch and heads, by default 16,384 tokens in the
batch and a hidden size of 2048.

Constants reach the library as TILEWISE_CONFIG="family:name=value,name=value", read once, so every config has a process of
its own; one that hangs or breaks the context of the GPU takes nobody with it. The next processes start while one measures.
Each cell runs beside the anchor in rotated rounds, and is ranked by the ratio of times of the same round.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._errors import InvalidArgumentError

VARIABLE = "TILEWISE_CONFIG"
SHAPE = re.compile(
    r"(fwd|bwd) (fp32|bf16|fp16|fp64) d(\d+) (full|causal|window|documents) s(\d+)(?: b(\d+)h(\d+)(?:/(\d+))?)?"
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
Say = Callable[[str], None]


# ------------------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True)
class Config:
    family: str
    constants: tuple[tuple[str, int], ...] = ()

    @property
    def variable(self) -> str:
        """What TILEWISE_CONFIG is set to; nothing for the choice of the library."""
        return (
            f"{self.family}:{','.join(f'{name}={value}' for name, value in self.constants)}" if self.constants else ""
        )

    def __str__(self) -> str:
        return f"{self.family} {' '.join(f'{n}={v}' for n, v in self.constants) or '(default)'}"


@dataclass(frozen=True)
class Job:
    config: Config
    shapes: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    jobs: tuple[Job, ...]
    anchor: str = "cudnn"

    @property
    def cells(self) -> int:
        return sum(len(job.shapes) for job in self.jobs)


def refuse(where: str, got: Any, allowed: str) -> Any:
    raise InvalidArgumentError(f"{where}: got {got!r}; allowed: {allowed}")


def sizes_of(shape: str) -> dict[str, Any]:
    """Arguments of measure.Cell, which needs torch."""
    found = SHAPE.fullmatch(shape) if isinstance(shape, str) else None
    if found is None:
        return refuse("shapes", shape, "like 'fwd bf16 d128 causal s4096' or 'bwd fp16 d64 window s8192 b2h32/8'")
    pass_, dtype, dim, mask, seqlen, batch, heads_q, heads_kv = found.groups()
    heads = int(heads_q) if heads_q else max(1, 2048 // int(dim))
    return {
        "batch": int(batch) if batch else max(1, 16384 // int(seqlen)),
        "heads_q": heads,
        "heads_kv": int(heads_kv) if heads_kv else heads,
        "seqlen_q": int(seqlen),
        "seqlen_kv": int(seqlen),
        "head_dim": int(dim),
        "dtype": dtype,
        "mask": mask,
        "pass_": pass_,
    }


def configs_of(entry: dict[str, Any]) -> Iterator[Config]:
    """The default, then grid and configs; each once."""
    family, fixed, grid = entry["family"], entry.get("fixed", {}), entry.get("grid", {})
    chosen: list[dict[str, int]] = []
    if grid:
        chosen += [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    chosen += entry.get("configs", [])
    if fixed and not chosen:
        chosen.append({})
    yield Config(family)
    seen = {Config(family)}
    for each in chosen:
        for name, value in (fixed | each).items():
            if not re.fullmatch(r"k[A-Za-z0-9]+", name) or type(value) is not int:
                refuse(f"{family}: constant", f"{name}={value}", "whole numbers, by the names that the kernels use")
        config = Config(family, tuple(sorted((fixed | each).items())))
        if config not in seen:
            seen.add(config)
            yield config


def sweep_from(data: Any) -> Sweep:
    if not isinstance(data, dict) or not isinstance(data.get("families"), list) or not data["families"]:
        refuse("sweep", type(data).__name__, '{"shapes": [...], "families": [{"family": ..., "grid": {...}}]}')
    if unknown := set(data) - {"shapes", "families", "anchor"}:
        refuse("sweep", sorted(unknown)[0], "shapes, families, anchor")
    jobs = []
    for entry in data["families"]:
        family = entry.get("family", "") if isinstance(entry, dict) else ""
        if not isinstance(family, str) or family[:4] not in ("fwd_", "bwd_", "cpu_"):
            refuse("family", family, "the name of a kernel family, like fwd_simt")
        if unknown := set(entry) - {"family", "fixed", "grid", "configs", "shapes"}:
            refuse(family, sorted(unknown)[0], "family, fixed, grid, configs, shapes")
        shapes = [shape for shape in entry.get("shapes", data.get("shapes", [])) if sizes_of(shape)]
        if not family.startswith("cpu_"):
            shapes = [shape for shape in shapes if shape[:3] == family[:3]]
        if not shapes:
            refuse(f"{family}: shapes", "none of its pass", "at least one")
        jobs += [Job(config, tuple(dict.fromkeys(shapes))) for config in configs_of(entry)]
    return Sweep(tuple(jobs), data.get("anchor", "cudnn"))


# ------------------------------------------------------------------------------------------- compiling, without a GPU


def spec_of(shape: str) -> dict[str, Any]:
    """The shape as a spec of `tilewise aot`."""
    sizes = sizes_of(shape)
    spec = {
        "dtype": DTYPES[sizes["dtype"]],
        "head_dim": sizes["head_dim"],
        "heads": [sizes["heads_q"], sizes["heads_kv"]],
        "causal": sizes["mask"] != "full",
        "window": sizes["mask"] == "window",
    }
    if sizes["mask"] == "documents":
        spec |= {"mask": "documents(@0,@0)", "arrays": [f"int32[{sizes['batch']},256]"]}
    return spec


def compile_here(request: dict[str, Any]) -> list[dict[str, Any]]:
    """In a process of its own: every kernel that a config needs, into a pack. What stands in the answer is what
    `tilewise aot --json` tells of a kernel, or an error."""
    from . import _cuda, _ext
    from ._specs import spec_from

    _cuda.tell_nvrtc_path()
    kernels: list[dict[str, Any]] = []
    done = set()
    for shape in request["shapes"]:
        entry = spec_of(shape)
        backward = shape.startswith("bwd")
        key = json.dumps([entry | {"arrays": len(entry.get("arrays", []))}, backward])
        if key in done:
            continue
        done.add(key)
        try:
            problem = spec_from(entry, shape).problem()
            lines = _ext.compile(problem, backward, request["arch"], request["directory"]).splitlines()
            kernels += [{"shape": shape, **json.loads(line)} for line in lines]
        except Exception as error:
            kernels.append({"shape": shape, "error": str(error)[:2000]})
    return kernels


def compile_all(sweep: Sweep, arch: str, directory: Path, jobs: int, say: Say) -> dict[str, Any]:
    """All configs, several processes at once. The record lies beside the kernels, for the run to read."""
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def one(job: Job) -> list[dict[str, Any]]:
        request = {"do": "compile", "shapes": job.shapes, "arch": arch, "directory": str(directory)}
        done = subprocess.run(
            worker_command(), input=json.dumps(request), text=True, capture_output=True, check=False,
            env=worker_environment(job.config, None),
        )  # fmt: skip
        try:
            found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["kernels"]
        except (ValueError, IndexError, KeyError):
            tail = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            found = [{"shape": "all", "error": tail}]
        return found

    record: dict[str, Any] = {"arch": arch, "configs": {}}
    with ThreadPoolExecutor(jobs) as pool:
        for number, (job, kernels) in enumerate(zip(sweep.jobs, pool.map(one, sweep.jobs), strict=True), start=1):
            record["configs"][str(job.config)] = kernels
            same = same_kernels(kernels, record["configs"].get(str(Config(job.config.family)), []))
            note = ", the kernels of the default" if same and job.config.constants else ""
            say(f"[{number:3}/{len(sweep.jobs)}] {job.config}: {resources(kernels)}{note}")
    record["seconds"] = round(time.monotonic() - start, 1)
    (directory / "sweep.json").write_text(json.dumps(record, indent=1) + "\n")
    failed = [name for name, kernels in record["configs"].items() if any("error" in each for each in kernels)]
    say(f"{len(sweep.jobs)} configs in {record['seconds']} s, {len(failed)} failed; {directory}")
    for name in failed:
        text = next(each["error"] for each in record["configs"][name] if "error" in each)
        say(f"  {name}: {' '.join(text.split())[:300]}")
    return record


def same_kernels(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    """By their places in the pack, which are made of their content."""
    places = [{kernel["path"] for kernel in kernels if "path" in kernel} for kernels in (one, other)]
    return bool(places[0]) and places[0] == places[1]


def resources(kernels: Sequence[dict[str, Any]]) -> str:
    """The most of registers and spilled bytes; the reason where there is no kernel."""
    if errors := [each["error"] for each in kernels if "error" in each]:
        return f"failed: {' '.join(errors[0].split())[:120]}"
    registers = [each["registers"] for each in kernels if each.get("registers") is not None]
    spills = [each.get("spill_store_bytes") or 0 for each in kernels]
    text = f"{max(registers)} registers" if registers else f"{len(kernels)} kernels"
    return text + (f", spills {max(spills)} B" if any(spills) else "")


# ----------------------------------------------------------------------------------------------------------- processes


def worker_command() -> list[str]:
    return [sys.executable, "-m", "tilewise.sweep"]


def worker_environment(config: Config, pack: Path | None) -> dict[str, str]:
    environment = os.environ | {
        VARIABLE: config.variable,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
    }
    if pack is not None:
        packs = [str(pack.resolve()), *filter(None, [os.environ.get("TILEWISE_PACKS")])]
        environment["TILEWISE_PACKS"] = os.pathsep.join(packs)
    return environment


class Worker:
    """A process that measures one config: started early, told to go when the GPU is free, ended if it takes too long."""

    def __init__(self, job: Job, request: dict[str, Any], pack: Path | None) -> None:
        self.job = job
        self.rows: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            worker_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=worker_environment(job.config, pack), start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()
        self._tell(request)

    def _tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError:  # it ended already; reading will say so
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-40:], line.rstrip()]

    def _next(self, deadline: float) -> dict[str, Any]:
        """The next message; {"ended": why} if there is none."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                return {"ended": "time limit"}
            if line is None:
                code = self.process.wait()
                return {"ended": f"exit status {code}: " + " | ".join(self.errors[-3:])[-400:]}
            try:
                message = json.loads(line)
            except ValueError:
                continue  # somebody's chatter
            if isinstance(message, dict):
                return message

    def measure(self, rounds: int, limit: float) -> list[dict[str, Any]]:
        """A row for every shape; what the process did not come to has an error."""
        deadline = time.monotonic() + limit
        message = self._next(deadline)
        self._tell({"go": rounds})
        while "ended" not in message and "done" not in message:
            message = self._next(deadline)
            if "row" in message:
                self.rows.append(message["row"])
        self.end()
        reason = message.get("ended", "")
        known = {row["shape"] for row in self.rows}
        return self.rows + [{"shape": s, "error": reason or "no result"} for s in self.job.shapes if s not in known]

    def end(self) -> None:
        if self.process.poll() is None:
            try:
                self.process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def serve() -> None:
    """The worker's side. Imports and the context of the GPU come before `ready`, all work on the GPU after `go`."""
    request = json.loads(sys.stdin.readline())
    if request["do"] == "compile":
        print(json.dumps({"kernels": compile_here(request)}), flush=True)
        return
    import torch

    from . import gpu_bench  # noqa: F401 - loaded before the GPU is waited for

    if request["device"] == "cuda":
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    print(json.dumps({"ready": True}), flush=True)
    rounds = json.loads(sys.stdin.readline())["go"]
    for shape in request["shapes"]:
        try:
            row = measure_shape(shape, request, rounds)
        except Exception as error:
            row = {"shape": shape, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps({"row": row}), flush=True)
    print(json.dumps({"done": True}), flush=True)


def calls_of(
    family: str, cell: Any, sets: Sequence[Any], device: str
) -> tuple[list[Callable[[], Any]], dict[str, Any]]:
    """One call per set of inputs with the family forced, and the result of the first."""
    import tilewise

    from . import measure

    options = measure.tilewise_options(cell, device)
    tensors = [(x.q.detach(), x.k.detach(), x.v.detach(), x.do) for x in sets]
    if cell.pass_ == "fwd":

        def forward(q: Any, k: Any, v: Any, _: Any) -> Any:
            return lambda: tilewise.attention_forward(q, k, v, backend=family, **options)

        calls = [forward(*each) for each in tensors]
        return calls, {"o": calls[0]()[0]}

    def backward(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, lse, _ = tilewise.attention_forward(q, k, v, **options)
        return o, lambda: tilewise.attention_backward(do, q, k, v, o, lse, backend=family, **options)

    both = [backward(*each) for each in tensors]
    gradients = both[0][1]()
    result = {"o": both[0][0], "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return [call for _, call in both], result


def measure_shape(shape: str, request: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Checks one cell against fp64 on sampled rows, then measures it beside the anchor."""
    from . import gpu_bench, measure

    cell, device, family = measure.Cell(**sizes_of(shape)), request["device"], request["family"]
    backward = cell.pass_ == "bwd"
    sets = [gpu_bench.make_data(cell, seed, device) for seed in range(2)]
    sample = measure.draw_sample(cell).to(device)
    truth, plain = (measure.sampled_attention(cell, sets[0], sample, exact=exact) for exact in (True, False))
    calls, result = calls_of(family, cell, sets, device)
    verdicts = measure.judge(measure.at_sample(result, cell, sample), truth, plain, cell.dtype)
    good = all(verdict.passed for verdict in verdicts.values())
    row: dict[str, Any] = {"shape": shape, "error_ok": good}
    if not good:
        row["note"] = gpu_bench.worst({name: verdict.to_json() for name, verdict in verdicts.items()})
    turns: dict[str, gpu_bench.Turn] = {}
    turns[family], note = gpu_bench.turn_of(lambda: calls, device)
    if note:
        row["note"] = f"no graph: {note}"
    if request["anchor"]:
        try:
            anchor = gpu_bench.make_attention(request["anchor"], cell, device)
            measure.run_once(anchor, sets[0], backward)
            turns["anchor"], _ = gpu_bench.make_turn(anchor, sets, backward, device)
        except Exception as error:
            row["anchor_error"] = gpu_bench.why(error)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    for number in range(rounds):
        for name in order if number % 2 == 0 else order[::-1]:
            seconds[name].append(turns[name].run(request["turn"]))
    middle = statistics.median(seconds[family])
    row |= {"ms": middle * 1e3, "tflops": cell.flops / middle * 1e-12, "rounds": rounds}
    if "anchor" in seconds:
        ratios = gpu_bench.speed_ratios(seconds[family], seconds["anchor"])
        row |= {"anchor_ms": statistics.median(seconds["anchor"]) * 1e3, "ratio_to_anchor": statistics.median(ratios)}
    return row


# ------------------------------------------------------------------------------------------------------------- running


@dataclass
class Settings:
    device: str = "cuda"
    rounds: int = 3
    turn: float = 0.06
    budget: float = 450.0
    limit: float = 60.0  # of one config, beyond what its rounds take
    ahead: int = 4  # processes that wait for their turn
    pack: Path | None = None


def run_all(
    sweep: Sweep, settings: Settings, say: Say, keep: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """One config measures at a time. When the time is over the rest is told as not run."""
    start = time.monotonic()
    waiting: list[Job] = list(sweep.jobs)
    started: list[Worker] = []
    results: list[dict[str, Any]] = []
    done = 0
    try:
        while waiting or started:
            while waiting and len(started) < settings.ahead:
                job = waiting.pop(0)
                request = {
                    "do": "measure", "family": job.config.family, "shapes": job.shapes, "device": settings.device,
                    "anchor": sweep.anchor, "turn": settings.turn,
                }  # fmt: skip
                started.append(Worker(job, request, settings.pack))
            worker = started.pop(0)
            left = settings.budget - (time.monotonic() - start)
            if left <= 0:
                worker.process.kill()
                rows = [{"shape": shape, "error": "no time left"} for shape in worker.job.shapes]
            else:
                rounds = rounds_for(
                    settings, left, (time.monotonic() - start) / done if done else None, waiting, started
                )
                # A little beyond the budget: what has begun shall be told.
                rows = worker.measure(rounds, min(settings.limit + 3.0 * len(worker.job.shapes), left + 15))
                done += 1
            results += [
                {"config": str(worker.job.config), "variable": worker.job.config.variable, **row} for row in rows
            ]
            say(f"[{time.monotonic() - start:4.0f} s] {worker.job.config}: {summary(rows)}")
            keep(results)
    finally:
        for worker in started:
            worker.process.kill()
    return results


def rounds_for(
    settings: Settings, left: float, seconds: float | None, waiting: Sequence[Job], started: Sequence[Worker]
) -> int:
    """Fewer rounds for all that is left, if at the pace so far it would not be reached."""
    if seconds is None or not seconds:
        return settings.rounds
    share = left / (seconds * (1 + len(waiting) + len(started)))
    return settings.rounds if share >= 1 else max(1, min(settings.rounds, math.floor(settings.rounds * share)))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    good = [row for row in rows if row.get("error_ok")]
    wrong = [row for row in rows if row.get("error_ok") is False]
    errors = [row["error"] for row in rows if "error" in row]
    text = f"{len(good)} of {len(rows)} cells good"
    if good:
        text += f", {min(row['tflops'] for row in good):.3g} to {max(row['tflops'] for row in good):.3g} TFLOP/s"
    if wrong:
        text += f", {len(wrong)} WRONG ({wrong[0].get('note', '')})"
    return text + (f", {len(errors)} failed: {errors[0][:160]}" if errors else "")


def score(row: dict[str, Any]) -> float | None:
    """Speed against the anchor of the same rounds; plain speed where there is none."""
    if not row.get("error_ok"):
        return None
    return row.get("ratio_to_anchor") or row["tflops"]


def ranking(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Configs, best first within a family: the geometric mean over shapes of their speed over that of the default. A
    config that is wrong or failed anywhere comes last."""
    by_config: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        by_config.setdefault(row["config"], {})[row["shape"]] = row
    ranked = []
    for name, rows in by_config.items():
        family = name.split(" ")[0]
        base = by_config.get(f"{family} (default)", {})
        gains = {}
        for shape, row in rows.items():
            mine, its = score(row), score(base.get(shape, {}))
            if mine and its:
                gains[shape] = mine / its
        bad = sum(score(row) is None for row in rows.values())
        mean = math.exp(statistics.fmean(map(math.log, gains.values()))) if gains else None
        tflops = [row["tflops"] for row in rows.values() if score(row)]
        ranked.append(
            {"family": family, "config": name, "gain": mean, "least": min(gains.values(), default=None),
             "most": max(gains.values(), default=None), "cells": len(rows), "bad": bad,
             "tflops_max": max(tflops, default=None)}
        )  # fmt: skip
    return sorted(ranked, key=lambda each: (each["family"], each["bad"] > 0, -(each["gain"] or 0)))


def best_per_shape(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results:
        key = row["config"].split(" ")[0], row["shape"]
        if (mine := score(row)) is not None and mine > (score(best.get(key, {})) or 0):
            best[key] = row
    return [best[key] for key in sorted(best)]


def table(ranked: Sequence[dict[str, Any]], compiled: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    lines = [("config", "gain", "least", "most", "bad cells", "max TFLOP/s", "")]
    for each in ranked:
        kernels = compiled.get("configs", {}).get(each["config"])
        lines.append(
            (each["config"], number(each["gain"]), number(each["least"]), number(each["most"]),
             f"{each['bad']}/{each['cells']}", "–" if each["tflops_max"] is None else f"{each['tflops_max']:.3g}",
             resources(kernels) if kernels else "")
        )  # fmt: skip
    widths = [max(len(line[n]) for line in lines) for n in range(6)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(line[n].rjust(widths[n]) for n in range(1, 6)), line[6]]).rstrip()
        for line in lines
    )


def run(sweep: Sweep, settings: Settings, out: Path, say: Say) -> int:
    """Exit status 1: no config gave a right result, or the default gave a wrong one."""
    from . import gpu_bench
    from .report import write_json

    about = gpu_bench.about(settings.device)
    compiled: dict[str, Any] = {}
    if settings.pack is not None and (settings.pack / "sweep.json").exists():
        compiled = json.loads((settings.pack / "sweep.json").read_text())
    say(f"{about['gpu']}: {len(sweep.jobs)} configs, {sweep.cells} cells, anchor {sweep.anchor or 'none'}; {out}")

    def record(results: list[dict[str, Any]]) -> dict[str, Any]:
        return {**about, "anchor": sweep.anchor, "rounds": settings.rounds, "turn_ms": settings.turn * 1e3,
                "ranking": ranking(results), "best": best_per_shape(results), "cells": results}  # fmt: skip

    results = run_all(sweep, settings, say, lambda results: write_json(out, record(results)))
    final = record(results)
    write_json(out, final)
    say("\nFastest for each shape:")
    for row in final["best"]:
        ratio = f", {row['ratio_to_anchor']:.3f} of {sweep.anchor}" if "ratio_to_anchor" in row else ""
        say(f"  {row['shape']}: {row['config']}, {row['tflops']:.4g} TFLOP/s{ratio}")
    say("\nGain: speed over the default config, geometric mean over shapes.")
    say(table(final["ranking"], compiled))
    broken = [row for row in results if row["config"].endswith("(default)") and row.get("error_ok") is False]
    good = sum(1 for row in results if row.get("error_ok"))
    say(
        f"{good} of {len(results)} cells good"
        + (f"; the default is WRONG in {len(broken)}" if broken else "")
        + f"; {out}"
    )
    return 1 if broken or not good else 0


if __name__ == "__main__":
    serve()
