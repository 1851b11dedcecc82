"""`tilewise bench --device cuda`: Tilewise against PyTorch's attention kernels on one GPU, side by side in one run.

A GPU that is loaded for seconds runs into its power limit, so times of different minutes do not compare. Every cell runs
all implementations in rounds, in rotated order, each at least 200 ms back to back; what counts is the ratio of two times
of the same round. Calls are replayed from CUDA graphs where an implementation can be captured, and walk through two sets
of inputs. The accuracy rule is checked before anything is timed. FLOPs: 4·pairs·d forward, 10·pairs·d backward.
After the cells, Tilewise is compared with itself: `gpu_relations`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import math
import re
import statistics
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

from . import gpu_relations, measure
from .measure import Attention, Cell, Data, Tensor
from .report import human_ratio, write_json

TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
QUICK_SEQLENS, QUICK_HEAD_DIMS = (512, 2048, 8192), (64, 128)
MASK_NAMES = {"full": "full", "causal": "causal", "window": "window1024", "documents": "documents1000"}
TITLES = {
    "tilewise": "Tilewise",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "efficient": "memory-efficient",
    "flex": "FlexAttention",
    "math": "math",
}
IMPLS = tuple(TITLES)
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# For the plan only: FLOP/s that are surely reached, and seconds of preparation.
RATES = {"tilewise": 8e12, "math": 15e12}
SETUP_SECONDS, COMPILE_SECONDS = 1.5, 25.0


# ---------------------------------------------------------------------------------------------------------- what to run


def cells_of(
    seqlens: Sequence[int] = SEQLENS,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[str] = ("bf16",),
    passes: Sequence[str] = measure.PASSES,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    masks: Sequence[str] = ("full", "causal"),
    sparse: bool = True,
) -> list[Cell]:
    """The same number of tokens and the same hidden size in every cell. `sparse` adds windows and documents at 8192
    tokens and head dim 128, where both are asked for."""
    cells = []
    for dtype in dtypes:
        for pass_ in passes:
            for dim in head_dims:
                for mask in masks:
                    cells += [cell_of(seqlen, dim, dtype, mask, pass_, tokens, hidden) for seqlen in seqlens]
            if sparse and 8192 in seqlens and 128 in head_dims:
                cells += [
                    cell_of(8192, 128, dtype, mask, pass_, tokens, hidden) for mask in ("window", "documents")
                ]  # fmt: skip
    return list(dict.fromkeys(cells))


def cell_of(
    seqlen: int, dim: int, dtype: str, mask: str, pass_: str, tokens: int = TOKENS, hidden: int = HIDDEN
) -> Cell:
    heads = max(1, hidden // dim)
    return Cell(max(1, tokens // seqlen), heads, heads, seqlen, seqlen, dim, dtype, mask, pass_)


def wanted(cell: Cell, impls: Sequence[str]) -> list[str]:
    """FlexAttention is compiled for every shape, so it runs where the others have no kernel for the mask."""
    sparse = cell.mask in ("window", "documents")
    return [name for name in impls if name != "flex" or sparse]


# ----------------------------------------------------------------------------------------------------------- the budget


@dataclass
class Budget:
    """How many rounds the next cell gets, such that all cells left get as many and the run ends in time.

    Estimates are corrected by what the cells so far really took."""

    seconds: float | None
    rounds: int
    planned: float = 0.0
    spent: float = 0.0

    @property
    def correction(self) -> float:
        return min(4.0, max(0.4, self.spent / self.planned)) if self.planned > 0 else 1.0

    def rounds_now(self, elapsed: float, setup_left: float, round_left: float) -> int:
        """0: no time for this cell at all. At least one round otherwise: an even cut, never a missing cell."""
        if self.seconds is None:
            return self.rounds
        left = self.seconds - elapsed
        if left <= 0:
            return 0
        fits = (left / self.correction - setup_left) / max(round_left, 1e-9)
        return max(1, min(self.rounds, math.floor(fits)))

    def took(self, planned: float, spent: float) -> None:
        self.planned += planned
        self.spent += spent


def round_seconds(cell: Cell, names: Sequence[str], min_seconds: float) -> float:
    """One turn of everybody: the shortest turn, or one call where that is longer."""
    return sum(max(1.05 * min_seconds, cell.flops / RATES.get(name, 1e14)) for name in names)


def setup_seconds(cell: Cell, names: Sequence[str]) -> float:
    slow = sum(3 * cell.flops / rate for name, rate in RATES.items() if name in names)
    return SETUP_SECONDS + slow + (COMPILE_SECONDS if "flex" in names else 0.0)


# ---------------------------------------------------------------------------------------------------------- the inputs


def make_data(cell: Cell, seed: int, device: str) -> Data:
    """Stored [batch, tokens, heads, head_dim], handed over as [batch, heads, tokens, head_dim] views of that."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(heads: int, tokens: int) -> Tensor:
        shape = cell.batch, tokens, heads, cell.head_dim
        x = torch.randn(shape, generator=generator, device=device).to(measure.DTYPES[cell.dtype])
        return x.transpose(1, 2)

    q, do = draw(cell.heads_q, cell.seqlen_q), draw(cell.heads_q, cell.seqlen_q)
    k, v = draw(cell.heads_kv, cell.seqlen_kv), draw(cell.heads_kv, cell.seqlen_kv)
    if cell.pass_ == "bwd":
        for x in (q, k, v):
            x.requires_grad_(True)
    return Data(q, k, v, do)


# ----------------------------------------------------------------------------------------------------- implementations


def sdpa_attention(cell: Cell, backend: Any, device: str) -> Attention:
    options: dict[str, Any] = {"is_causal": cell.mask == "causal"}
    if cell.mask in ("window", "documents"):
        visible = cell.visible(torch.arange(cell.seqlen_q, device=device))
        assert visible is not None
        # Additive and of the inputs' dtype, so that nobody pays for a conversion.
        bias = torch.zeros(visible.shape, dtype=measure.DTYPES[cell.dtype], device=device)
        options["attn_mask"] = bias.masked_fill_(~visible, float("-inf"))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attention


def flex_attention(cell: Cell, device: str) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    torch._dynamo.reset()  # every cell is a new program; the limit of recompilations is for those that are not
    ids, width = cell.document_ids(device), measure.WINDOW_LENGTH
    rules: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < width),
        "documents": lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]),
    }
    mask = None
    if cell.mask in rules:
        mask = create_block_mask(rules[cell.mask], None, None, cell.seqlen_q, cell.seqlen_kv, device=device)
    compiled = torch.compile(flex, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def make_attention(name: str, cell: Cell, device: str) -> Attention:
    if name == "tilewise":
        options = measure.tilewise_options(cell, device)
        return lambda q, k, v: tilewise.attention(q, k, v, **options)
    return flex_attention(cell, device) if name == "flex" else sdpa_attention(cell, SDPA[name], device)


def kernel_of(name: str, cell: Cell, data: Data) -> str:
    """Which kernel of ours, as `tilewise explain` names it; of a peer, what it was asked as."""
    if name == "tilewise":
        return our_kernel(data, cell.pass_ == "bwd", measure.tilewise_options(cell, data.q.device))
    return "flex_attention, torch.compile" if name == "flex" else f"SDPBackend.{SDPA[name].name}"


def our_kernel(data: Data, backward: bool, options: dict[str, Any]) -> str:
    text = tilewise.explain(*(x.detach() for x in data.qkv), backward=backward, **options)
    found = re.search(r"implementation: (\S+)", text)
    return found[1] if found else "unknown"


def memory_refusal(name: str, cell: Cell, sets: int, free: int) -> str | None:
    """A sentence if the score matrices of `math` would not fit: three of them in fp32 at once, in training one of each
    set kept for its backward pass and three gradients."""
    if name != "math":
        return None
    scores = cell.batch * cell.heads_q * cell.seqlen_q * cell.seqlen_kv * 4
    needed = scores * (3 if cell.pass_ == "fwd" else 4 + 2 * sets)
    if needed <= 0.8 * free:
        return None
    return f"needs {measure.human_bytes(needed)}, {measure.human_bytes(free)} free"


def why(error: BaseException, seen: Sequence[Any] = ()) -> str:
    """One line. torch tells its reasons for declining in warnings, one for each backend; the last is of the one asked."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "No available kernel" in text:
        reasons = [str(each.message).split("(Triggered")[0].strip() for each in seen]
        reasons = [each for each in reasons if each and "not used because" not in each and "was not" not in each]
        if reasons:
            text = reasons[-1].splitlines()[0]
    return text if len(text) <= 200 else text[:197] + "..."


# -------------------------------------------------------------------------------------------------------------- turns


@dataclass
class Turn:
    """What one implementation repeats: units of a known number of calls, one after another, round and round."""

    units: list[Callable[[], Any]]
    calls: int  # in one unit
    clock: Callable[[Callable[[], None]], float]  # seconds that the device works on what the function queues
    captured: bool
    unit_seconds: float = 0.0
    reads: Sequence[object] = ()  # a graph keeps addresses, not tensors: what it reads must outlive it
    next: int = 0

    def queue(self, count: int) -> None:
        for _ in range(count):
            self.units[self.next % len(self.units)]()
            self.next += 1

    def run(self, min_seconds: float) -> float:
        """Seconds per call, over at least `min_seconds` back to back and not a whole unit longer."""
        total, done = 0.0, 0
        while total < min_seconds or done == 0:
            estimate = total / done if done else self.unit_seconds
            count = max(1, math.ceil((min_seconds - total) / estimate)) if estimate > 0 else 1
            # A first estimate can be off either way; no more than the half of what is missing is queued on its word.
            if not done:
                count = max(1, count // 2)
            total += self.clock(functools.partial(self.queue, count))
            done += count
        self.unit_seconds = total / done
        return total / done / self.calls


def host_clock(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def device_clock(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def calls_of(attention: Attention, sets: Sequence[Data], backward: bool) -> list[Callable[[], Any]]:
    """One call per set of inputs. For the backward pass the forward is done here and its graph kept."""
    if not backward:

        def forward(data: Data) -> Callable[[], Any]:
            def call() -> Any:
                with torch.no_grad():
                    return attention(*data.qkv)

            return call

        return [forward(data) for data in sets]

    def kept(data: Data) -> Callable[[], Any]:
        o = attention(*data.qkv)
        return lambda: torch.autograd.grad(o, data.qkv, data.do, retain_graph=True)

    return [kept(data) for data in sets]


UNIT_SECONDS = 0.02  # about as long as a graph shall run: launch gaps between graphs vanish, a turn ends in time


def make_turn(attention: Attention, sets: Sequence[Data], backward: bool, device: str) -> tuple[Turn, str | None]:
    """A turn, and why it is not replayed from a graph if it is not."""
    return turn_of(lambda: calls_of(attention, sets, backward), device)


def turn_of(make: Callable[[], list[Callable[[], Any]]], device: str) -> tuple[Turn, str | None]:
    """The same of any calls, one per set of inputs."""
    if device == "cpu":
        return Turn(make(), 1, host_clock, False), None
    # Gradients run on the stream of their forward pass, so both happen on the one that is captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = make()
        for call in calls[:-1]:
            call()
        stream.synchronize()
        once = device_clock(calls[-1]) if len(calls) > 1 else min(device_clock(calls[0]) for _ in range(2))
    plain = Turn(list(calls), 1, on_stream(stream), False, once)
    repeats = max(1, min(16, round(UNIT_SECONDS / max(once, 1e-6) / len(calls)))) if once < UNIT_SECONDS else 0
    try:
        if repeats:
            graphs = [capture(list(calls) * repeats, stream)]
        else:
            graphs = [capture([call], stream) for call in calls]
        captured = Turn(
            [graph.replay for graph in graphs], max(1, repeats * len(calls)), device_clock, True, once, reads=calls
        )
        if repeats:
            captured.unit_seconds = captured.clock(lambda: captured.queue(1))
        return captured, None
    except Exception as error:
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        return plain, why(error)


def on_stream(stream: Any) -> Callable[[Callable[[], None]], float]:
    def clock(work: Callable[[], None]) -> float:
        with torch.cuda.stream(stream):
            return device_clock(work)

    return clock


def capture(calls: Sequence[Callable[[], Any]], stream: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()  # nobody keeps the result, so the next call gets its memory
    return graph


# ---------------------------------------------------------------------------------------------------- clock and power


@dataclass
class Monitor:
    """SM clock and power every 50 ms beside the run, read through NVML, else by nvidia-smi; nothing where both are
    missing."""

    gpu: str = ""  # its UUID
    samples: list[tuple[float, float, float]] = field(default_factory=list)  # time, MHz, W
    process: Any = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.stopped.clear()
        try:
            read = nvml_reader(self.gpu)
            self.samples.append((time.perf_counter(), *read()))
        except Exception:  # the package, the library, the device or the query: any of them may be missing
            self.start_program()
            return

        def watch() -> None:
            while not self.stopped.wait(0.05):
                with contextlib.suppress(Exception):
                    self.samples.append((time.perf_counter(), *read()))

        threading.Thread(target=watch, daemon=True).start()

    def start_program(self) -> None:
        query = "--query-gpu=clocks.sm,power.draw"
        command = [
            "nvidia-smi",
            query,
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
            *(["-i", self.gpu] if self.gpu else []),
        ]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return

        def watch(lines: Any) -> None:
            for line in lines:
                if (pair := parse_sample(line)) is not None:
                    self.samples.append((time.perf_counter(), *pair))

        threading.Thread(target=watch, args=(self.process.stdout,), daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def between(self, spans: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
        """Medians of MHz and W inside the spans, 30 ms after their start: a reading is of the time before it."""
        samples = list(self.samples)
        inside = [s for s in samples if any(start + 0.03 <= s[0] <= end for start, end in spans)]
        clock = statistics.median(s[1] for s in inside) if inside else None
        power = [s[2] for s in inside if not math.isnan(s[2])]
        return clock, statistics.median(power) if power else None


def nvml_reader(gpu: str) -> Callable[[], tuple[float, float]]:
    """Reads MHz and W. The power of this moment: the usual query averages over a second."""
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu) if gpu else pynvml.nvmlDeviceGetHandleByIndex(0)
    instant = getattr(pynvml, "NVML_FI_DEV_POWER_INSTANT", None)

    def power() -> float:
        if instant is not None:
            value = pynvml.nvmlDeviceGetFieldValues(handle, [instant])[0]
            if value.nvmlReturn == 0 and value.value.uiVal > 0:
                return float(value.value.uiVal) / 1e3
        return float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3

    def read() -> tuple[float, float]:
        return float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)), power()

    return read


def parse_sample(line: str) -> tuple[float, float] | None:
    """`1980, 687.31`; power may be [N/A]."""
    first, _, second = line.partition(",")
    try:
        clock = float(first)
    except ValueError:
        return None
    try:
        return clock, float(second)
    except ValueError:
        return clock, math.nan


# ------------------------------------------------------------------------------------------------------------ one cell


@dataclass
class Entry:
    """One implementation in one cell."""

    name: str
    kernel: str
    seconds: list[float] = field(default_factory=list)  # per call, one for each round
    spans: list[tuple[float, float]] = field(default_factory=list)
    accuracy: dict[str, Any] = field(default_factory=dict)
    error_ok: bool = False
    captured: bool = False
    note: str | None = None


def speed_ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """How many times as fast as the peer, round by round."""
    return [its / mine for mine, its in zip(ours, peer, strict=True)]


def to_row(cell: Cell, entry: Entry, cudnn: Entry | None, clock: float | None) -> dict[str, Any]:
    """One element of "cells" in bench.json."""
    middle = statistics.median(entry.seconds)
    ratio = statistics.median(speed_ratios(entry.seconds, cudnn.seconds)) if cudnn and cudnn.seconds else None
    return {
        "pass": cell.pass_,
        "dtype": cell.dtype,
        "head_dim": cell.head_dim,
        "head_dim_v": cell.head_dim,
        "mask": MASK_NAMES[cell.mask],
        "seqlen": cell.seqlen_q,
        "batch": cell.batch,
        "heads_q": cell.heads_q,
        "heads_kv": cell.heads_kv,
        "impl": entry.name,
        "kernel": entry.kernel,
        "ms_min": min(entry.seconds) * 1e3,
        "ms_median": middle * 1e3,
        "ms_max": max(entry.seconds) * 1e3,
        "tflops": cell.flops / middle * 1e-12,
        "ratio_to_cudnn_median": ratio,
        "clock_mhz": clock,
        "error_ok": entry.error_ok,
    }


@contextlib.contextmanager
def quiet() -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


@dataclass
class Bench:
    impls: Sequence[str] = IMPLS
    rounds: int = 5
    min_seconds: float = 0.2
    input_sets: int = 2
    budget: float | None = None
    device: str = "cuda"
    relations: gpu_relations.Sizes | None = None  # None: Tilewise is not compared with itself
    declined: list[dict[str, str]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    monitor: Monitor = field(default_factory=Monitor)

    def prepare(self, cell: Cell, names: Sequence[str], say: Callable[[str], None]) -> dict[str, tuple[Entry, Turn]]:
        """Accuracy of everybody, then what is timed."""
        backward = cell.pass_ == "bwd"
        sets = [make_data(cell, seed, self.device) for seed in range(self.input_sets)]
        sample = measure.draw_sample(cell).to(self.device)
        truth = measure.sampled_attention(cell, sets[0], sample, exact=True)
        plain = measure.sampled_attention(cell, sets[0], sample, exact=False)
        ready: dict[str, tuple[Entry, Turn]] = {}
        for name in names:
            self.free_memory()
            refusal = memory_refusal(name, cell, self.input_sets, self.memory_left())
            if refusal is not None:
                self.decline(label(cell), name, refusal, say)
                continue
            with quiet() as seen:
                try:
                    attention = make_attention(name, cell, self.device)
                    entry = Entry(name, kernel_of(name, cell, sets[0]))
                    full = measure.run_once(attention, sets[0], backward)
                    verdicts = measure.judge(measure.at_sample(full, cell, sample), truth, plain, cell.dtype)
                    del full
                    entry.accuracy = {key: verdict.to_json() for key, verdict in verdicts.items()}
                    entry.error_ok = all(verdict.passed for verdict in verdicts.values())
                    turn, entry.note = make_turn(attention, sets, backward, self.device)
                    entry.captured = turn.captured
                except Exception as error:  # compilers and drivers raise what they like; the others shall still run
                    self.decline(label(cell), name, why(error, seen), say)
                    continue
            tell(entry, say)
            ready[name] = entry, turn
        return ready

    def decline(self, where: str, name: str, reason: str, say: Callable[[str], None]) -> None:
        self.declined.append({"cell": where, "impl": name, "reason": reason})
        say(f"    {name}: {reason}")

    def memory_left(self) -> int:
        return measure.available_memory() if self.device == "cpu" else int(torch.cuda.mem_get_info()[0])

    def free_memory(self) -> None:
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def take_turns(self, ready: dict[str, tuple[Entry, Turn]], rounds: int) -> None:
        order = list(ready)
        for number in range(rounds):
            shift = number % max(1, len(order))
            for name in order[shift:] + order[:shift]:
                entry, turn = ready[name]
                start = time.perf_counter()
                entry.seconds.append(turn.run(self.min_seconds))
                entry.spans.append((start, time.perf_counter()))

    def run_cell(
        self, cell: Cell, names: Sequence[str], rounds: int, say: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        ready = self.prepare(cell, names, say)
        self.take_turns(ready, rounds)
        cudnn = ready["cudnn"][0] if "cudnn" in ready else None
        rows = []
        for entry, _ in ready.values():
            clock, power = self.monitor.between(entry.spans)
            row = to_row(cell, entry, cudnn, clock)
            rows.append(row)
            ratios = speed_ratios(entry.seconds, cudnn.seconds) if cudnn else []
            self.log.append(
                {
                    "cell": label(cell),
                    "impl": entry.name,
                    "rounds": rounds,
                    "ms": [seconds * 1e3 for seconds in entry.seconds],
                    "ratio_to_cudnn_min": min(ratios, default=None),
                    "ratio_to_cudnn_max": max(ratios, default=None),
                    "power_w": power,
                    "joules_per_tflop": power / row["tflops"] if power else None,
                    "graph": entry.captured,
                    "accuracy": entry.accuracy,
                }
            )
        say("    " + "  ".join(f"{row['impl']} {row['tflops']:.3g}" for row in rows) + " TFLOP/s")
        return rows

    def run(
        self, cells: Sequence[Cell], say: Callable[[str], None], keep: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        """`keep` gets the report after every cell: a run that is cut off loses nothing that it had."""
        report = {**about(self.device), "protocol": {}, "cells": []}
        plan = [(cell, wanted(cell, self.impls)) for cell in cells]
        groups = gpu_relations.groups_of(cells, self.relations) if self.relations else []
        setups = [setup_seconds(cell, names) for cell, names in plan] + [gpu_relations.SETUP_SECONDS] * len(groups)
        per_round = [round_seconds(cell, names, self.min_seconds) for cell, names in plan]
        per_round += [group.round_seconds(self.min_seconds) for group in groups]
        steps: list[tuple[str, str, Callable[..., list[dict[str, Any]]]]] = []
        steps += [(label(cell), "cells", functools.partial(self.run_cell, cell, names)) for cell, names in plan]
        steps += [
            (str(group), "relations", functools.partial(gpu_relations.run_group, self, group)) for group in groups
        ]
        budget = Budget(self.budget, self.rounds)
        begun = time.perf_counter()
        self.monitor.start()
        try:
            for index, (where, part, work) in enumerate(steps):
                start = time.perf_counter()
                rounds = budget.rounds_now(start - begun, sum(setups[index:]), sum(per_round[index:]))
                say(f"[{index + 1:2}/{len(steps)}] {start - begun:5.0f} s  {where}, {rounds} rounds")
                if rounds == 0:
                    self.decline(where, "all", "no time left", say)
                else:
                    try:
                        report.setdefault(part, []).extend(work(rounds, say))
                    except Exception as error:
                        self.decline(where, "all", f"{type(error).__name__}: {why(error)}", say)
                    self.free_memory()
                    budget.took(setups[index] + rounds * per_round[index], time.perf_counter() - start)
                report["protocol"] = self.protocol(time.perf_counter() - begun)
                keep(report)
        finally:
            self.monitor.stop()
        return report

    def protocol(self, seconds: float) -> dict[str, Any]:
        done = [entry["rounds"] for entry in self.log]
        low, high = min(done, default=0), max(done, default=0)
        return {
            "text": (
                f"{low if low == high else f'{low} to {high}'} rounds in rotated order, every turn at least "
                f"{self.min_seconds * 1e3:.0f} ms back to back over {self.input_sets} sets of inputs, replayed from CUDA "
                "graphs unless noted; ratio_to_cudnn_median: time of cuDNN / time of the implementation in the same "
                "round, median; accuracy: sampled rows against fp64"
            ),
            "layout": "[batch, tokens, heads, head_dim]",
            "tilewise": tilewise.__version__,
            "budget_s": self.budget,
            "seconds": round(seconds, 1),
            **gpu_facts(self.device),
            "declined": self.declined,
            "log": self.log,
        }


def label(cell: Cell) -> str:
    return f"{cell.pass_} {cell.dtype} d{cell.head_dim} {MASK_NAMES[cell.mask]} s{cell.seqlen_q} b{cell.batch}h{cell.heads_q}"


def tell(entry: Entry, say: Callable[[str], None]) -> None:
    if entry.note:
        say(f"    {entry.name}: plain calls, no graph: {entry.note}")
    if not entry.error_ok:
        say(f"    {entry.name}: error beyond the rule: {worst(entry.accuracy)}")


def worst(accuracy: dict[str, Any]) -> str:
    shares = {
        key: max(v["error"] / max(v["allowed"], 1e-300), v["mean_error"] / max(v["mean_allowed"], 1e-300))
        for key, v in accuracy.items()
    }
    name = max(shares, key=lambda key: shares[key])
    return f"{name} at {shares[name]:.2f} of what is allowed"


# ------------------------------------------------------------------------------------------------------- the records


def gpu_name(device: str = "cuda") -> str:
    return measure.cpu_name() if device == "cpu" else str(torch.cuda.get_device_name())


def slug(name: str) -> str:
    """`NVIDIA H200` -> `h200`: the folder of a GPU in bench/results."""
    short = re.sub(r"^nvidia\s+|\b(graphics|gpu)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "gpu"


def results_folder(name: str) -> Path:
    """bench/results/<gpu> of the source tree, with or without git; else of where one stands."""
    source = Path(__file__).resolve().parents[2]
    root = source if (source / "include/tilewise/tilewise.h").exists() else Path()
    return root / "bench/results" / slug(name)


def about(device: str) -> dict[str, Any]:
    return {
        "gpu": gpu_name(device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measure.commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def gpu_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {}
    found: dict[str, Any] = {"cudnn": torch.backends.cudnn.version()}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader,nounits"]
        line = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
        found["driver"], found["power_limit_w"], found["max_clock_mhz"] = (part.strip() for part in line.split(","))
    return found


def uuid_of(device: str) -> str:
    """As nvidia-smi takes it, whatever CUDA_VISIBLE_DEVICES says."""
    if device == "cpu":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"


# ----------------------------------------------------------------------------------------------------------- the tables

Key = tuple[str, str, int, str, int]


def by_cell(report: dict[str, Any]) -> dict[Key, dict[str, dict[str, Any]]]:
    """Rows of every cell by implementation."""
    cells: dict[Key, dict[str, dict[str, Any]]] = {}
    for row in report["cells"]:
        key = row["pass"], row["dtype"], row["head_dim"], row["mask"], row["seqlen"]
        cells.setdefault(key, {})[row["impl"]] = row
    return cells


def present(report: dict[str, Any]) -> list[str]:
    return [name for name in IMPLS if any(row["impl"] == name for row in report["cells"])]


def columns(report: dict[str, Any]) -> list[str]:
    return ["pass", "dim", "mask", "tokens", *(TITLES[name] for name in present(report)), "Tilewise / cuDNN", "kernel"]


def rate(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return figure(row["tflops"]) + ("" if row["error_ok"] else " (inaccurate)")


def figure(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"


def body(report: dict[str, Any]) -> list[list[str]]:
    lines = []
    for (pass_, _, dim, mask, seqlen), rows in by_cell(report).items():
        ours = rows.get("tilewise")
        ratio = ours["ratio_to_cudnn_median"] if ours else None
        lines.append(
            [pass_, str(dim), mask, str(seqlen), *(rate(rows.get(name)) for name in present(report)),
             human_ratio(ratio) if ratio else "–", ours["kernel"] if ours else "–"]
        )  # fmt: skip
    return lines


def means(report: dict[str, Any]) -> list[str]:
    """Geometric means over the cells with both figures, of full and causal masks."""
    lines = []
    for pass_ in measure.PASSES:
        for peer in [name for name in present(report) if name != "tilewise"]:
            ratios = [
                rows["tilewise"]["tflops"] / rows[peer]["tflops"]
                for key, rows in by_cell(report).items()
                if key[0] == pass_ and key[3] in ("full", "causal") and "tilewise" in rows and peer in rows
            ]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                lines.append(
                    f"{pass_}, Tilewise over {TITLES[peer]}: {mean:.3f} (geometric mean of {len(ratios)} cells, "
                    f"{min(ratios):.3f} to {max(ratios):.3f})"
                )
    return lines


def inaccurate(report: dict[str, Any], name: str = "tilewise") -> list[str]:
    return [
        f"{row['pass']} d{row['head_dim']} {row['mask']} s{row['seqlen']}"
        for row in report["cells"]
        if row["impl"] == name and not row["error_ok"]
    ]


def reasons(report: dict[str, Any]) -> list[str]:
    found: dict[str, list[str]] = {}
    for each in report["protocol"].get("declined", []):
        found.setdefault(f"{each['impl']}: {each['reason']}", []).append(each["cell"])
    return [
        f"{reason} ({', '.join(cells) if len(cells) <= 3 else f'{len(cells)} cells, the first {cells[0]}'})"
        for reason, cells in found.items()
    ]


EXPLANATION = (
    "TFLOP/s, medians over rounds. Every cell: 16,384 tokens in the batch, hidden size 2048, layout [batch, tokens, heads, "
    "head_dim]. FLOPs: 4·pairs·d forward, 10·pairs·d backward, per head; causal counts half, window and documents the "
    "pairs they show. Tilewise / cuDNN: speeds of the same round, median of the rounds."
)


def to_table(report: dict[str, Any]) -> Table:
    return table_of(columns(report), body(report), {"pass", "mask"})


def table_of(names: Sequence[str], lines: Sequence[Sequence[str]], words: set[str]) -> Table:
    """Words to the left, figures to the right."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def to_markdown(report: dict[str, Any]) -> str:
    names = columns(report)
    protocol = report["protocol"]
    facts = [f"commit {report['commit'] or 'unknown'}", f"torch {report['torch']}", f"CUDA {report['cuda']}"]
    facts += [f"{name} {protocol[name]}" for name in ("driver", "cudnn") if protocol.get(name)]
    if protocol.get("power_limit_w"):
        facts.append(f"{protocol['power_limit_w']} W")
    lines = [
        f"# Benchmark: {report['gpu']}",
        "",
        f"{report['date']}, {', '.join(facts)}. {protocol['text']}.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "|".join(["---"] * 4 + ["--:"] * (len(names) - 4)) + "|",
        *("| " + " | ".join(line) + " |" for line in body(report)),
        "",
        EXPLANATION,
        "",
        *(f"- {line}" for line in means(report)),
    ]
    if extra := reasons(report):
        lines += ["", "Not run:", "", *(f"- {line}" for line in extra)]
    lines += gpu_relations.to_markdown(report)
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------------- running


def save(report: dict[str, Any], folder: Path, picture: bool) -> list[Path]:
    files = [write_json(folder / "bench.json", report)]
    (folder / "bench.md").write_text(to_markdown(report))
    files.append(folder / "bench.md")
    if picture and report["cells"]:
        from . import plots

        files.append(plots.gpu_bench_picture(report, folder / "bench.png"))
    return files


def run(bench: Bench, cells: Sequence[Cell], folder: Path | None, console: Console) -> int:
    """Exit status 1: Tilewise is missing in a cell that was run, or less accurate than the rule allows."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    name = gpu_name(bench.device)
    folder = folder or results_folder(name)
    bench.monitor.gpu = uuid_of(bench.device)
    say(f"Tilewise {tilewise.__version__} on {name}, torch {torch.__version__}, commit {measure.commit() or 'unknown'}")
    say(f"{len(cells)} cells, {', '.join(bench.impls)}; files in {folder}")
    report = bench.run(cells, say, lambda report: write_json(folder / "bench.json", report))
    try:
        files = save(report, folder, picture=True)
    except Exception as error:  # the picture is the least of it
        say(f"no picture: {type(error).__name__}: {error}")
        files = save(report, folder, picture=False)
    console.print()
    console.print(to_table(report))
    console.print()
    for line in (EXPLANATION, *reasons(report), *means(report)):
        say(line)
    if report.get("relations"):
        console.print()
        console.print(gpu_relations.to_table(report))
        console.print()
        say(gpu_relations.EXPLANATION)
    failed = inaccurate(report) + gpu_relations.inaccurate(report)
    missing = sum(1 for rows in by_cell(report).values() if "tilewise" not in rows) + gpu_relations.missing(report)
    say("Files: " + ", ".join(map(str, files)))
    say(
        f"{len(by_cell(report))} cells in {report['protocol'].get('seconds', 0):.0f} s; accuracy of Tilewise: "
        + (f"FAILED in {len(failed)}: {', '.join(failed[:6])}" if failed else "ok in all")
        + (f"; missing in {missing}" if missing else "")
    )
    return 1 if failed or missing or not report["cells"] else 0
