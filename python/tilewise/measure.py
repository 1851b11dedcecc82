"""What `tilewise bench` and `tilewise demo` share: problems, peers, fp64 truth, clocks, memory.

Everything here needs torch: it is the peer. FLOP convention: forward = 4 * pairs * head_dim per head, backward = 2.5
times that; a causal square counts as exactly half, any other mask counts the pairs it shows.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MASKS = ("full", "causal", "window", "documents")
PASSES = ("fwd", "bwd")
WINDOW_LENGTH = 1024
DOCUMENT_LENGTH = 1000

Tensor = Any  # torch.Tensor; torch is optional, so the checker sees Any
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------------------ the problem


@dataclass(frozen=True)
class Cell:
    """One attention problem of a table. `window` is causal and shows the last WINDOW_LENGTH keys, `documents` is causal
    inside packed documents of DOCUMENT_LENGTH tokens."""

    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seqlen_q: int = 1024
    seqlen_kv: int = 1024
    head_dim: int = 64
    dtype: str = "fp32"
    mask: str = "full"
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        sizes = (self.batch, self.heads_q, self.heads_kv, self.seqlen_q, self.seqlen_kv, self.head_dim)
        if min(sizes) < 1:
            raise ValueError(f"every size must be at least 1: {self}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"{self.heads_q} query heads are not a multiple of {self.heads_kv} key/value heads")
        if self.dtype not in DTYPES or self.mask not in MASKS or self.pass_ not in PASSES:
            raise ValueError(f"unknown dtype, mask or pass: {self.dtype}, {self.mask}, {self.pass_}")
        if self.mask == "documents" and self.seqlen_q != self.seqlen_kv:
            raise ValueError("a documents mask needs as many queries as keys")
        if self.mask == "window" and self.seqlen_q != self.seqlen_kv:
            raise ValueError("a window mask needs as many queries as keys")

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        tokens = f"{self.seqlen_kv}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}:{self.seqlen_kv}"
        return f"b{self.batch}h{heads}s{tokens}d{self.head_dim} {self.dtype} {self.mask} {self.pass_}"

    @cached_property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head."""
        if self.mask == "full":
            return self.seqlen_q * self.seqlen_kv
        if self.mask == "causal":
            if self.seqlen_q == self.seqlen_kv:
                return self.seqlen_q * self.seqlen_kv / 2
            visible = (i + self.seqlen_kv - self.seqlen_q + 1 for i in range(self.seqlen_q))
            return sum(max(0, n) for n in visible)
        if self.mask == "window":
            width = min(WINDOW_LENGTH, self.seqlen_q)
            return self.seqlen_q * width - width * (width - 1) / 2
        whole, rest = divmod(self.seqlen_q, DOCUMENT_LENGTH)
        return (whole * DOCUMENT_LENGTH**2 + rest**2) / 2

    @property
    def flops(self) -> float:
        return (4.0 if self.pass_ == "fwd" else 10.0) * self.pairs * self.head_dim * self.heads_q * self.batch

    @property
    def kv_bytes(self) -> int:
        item = DTYPES[self.dtype].itemsize
        return 2 * self.batch * self.heads_kv * self.seqlen_kv * self.head_dim * item

    def document_ids(self, device: Any = "cpu") -> Tensor:
        return torch.arange(self.seqlen_kv, dtype=torch.int32, device=device) // DOCUMENT_LENGTH

    def visible(self, rows: Tensor | None = None) -> Tensor | None:
        """Boolean [rows, seqlen_kv] on the device of `rows`, None if everything is visible."""
        if self.mask == "full":
            return None
        rows = torch.arange(self.seqlen_q) if rows is None else rows
        position = (rows + self.seqlen_kv - self.seqlen_q)[:, None]
        keys = torch.arange(self.seqlen_kv, device=rows.device)
        visible = keys <= position
        if self.mask == "window":
            visible &= keys > position - WINDOW_LENGTH
        if self.mask == "documents":
            ids = self.document_ids(rows.device)
            visible &= ids[rows][:, None] == ids
        return visible

    def score_bytes(self, matrices: float) -> int:
        """Bytes of `matrices` arrays of the size of the scores: what an attention without tiles must hold."""
        scores = self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv
        return int(scores * DTYPES[self.dtype].itemsize * matrices)


@dataclass
class Data:
    """Inputs of a cell, layout [batch, heads, tokens, head_dim] for everybody, so that nobody pays for a transpose."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_data(cell: Cell, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, tokens: int) -> Tensor:
        x = torch.randn(cell.batch, heads, tokens, cell.head_dim, generator=generator)
        return x.to(DTYPES[cell.dtype])

    q, do = draw(cell.heads_q, cell.seqlen_q), draw(cell.heads_q, cell.seqlen_q)
    k, v = draw(cell.heads_kv, cell.seqlen_kv), draw(cell.heads_kv, cell.seqlen_kv)
    if cell.pass_ == "bwd":
        for x in (q, k, v):
            x.requires_grad_(True)
    return Data(q, k, v, do)


# -------------------------------------------------------------------------------------------------------- the peers


def tilewise_options(cell: Cell, device: Any = "cpu") -> dict[str, Any]:
    options: dict[str, Any] = {"layout": "bhsd", "causal": cell.mask != "full"}
    if cell.mask == "window":
        options["window"] = WINDOW_LENGTH - 1, 0
    if cell.mask == "documents":
        ids = cell.document_ids(device).expand(cell.batch, -1).contiguous()
        options["mask"] = tilewise.masks.documents(ids)
    return options


def tilewise_attention(cell: Cell) -> Attention:
    options = tilewise_options(cell)
    return lambda q, k, v: tilewise.attention(q, k, v, **options)


def sdpa_attention(cell: Cell) -> Attention:
    """PyTorch's own fused attention. Its causal mask is aligned top-left, so only square problems may use the flag."""
    square = cell.seqlen_q == cell.seqlen_kv
    options: dict[str, Any] = {"enable_gqa": cell.heads_q != cell.heads_kv}
    if cell.mask == "causal" and square:
        options["is_causal"] = True
    elif cell.mask != "full":
        options["attn_mask"] = cell.visible()
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def sdpa_flash_attention(cell: Cell) -> Attention:
    """The same with the flash backend and no other: torch raises where that backend declines."""
    attention = sdpa_attention(cell)

    def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attention(q, k, v)

    return forced


def standard_attention(cell: Cell) -> Attention:
    """softmax(q kᵀ) v as in a textbook, with the whole score matrix in memory. Heads that share keys are folded into
    the rows so that k and v are not copied, and the mask is filled in place: no handicap."""
    visible = cell.visible()
    hidden = None if visible is None else ~visible
    group = cell.heads_q // cell.heads_kv
    scale = cell.head_dim**-0.5

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = q.shape
        q = (q * scale).reshape(cell.batch, cell.heads_kv, group * cell.seqlen_q, cell.head_dim)
        scores = q @ k.transpose(-1, -2)
        if hidden is not None:
            scores.view(cell.batch, cell.heads_kv, group, cell.seqlen_q, cell.seqlen_kv).masked_fill_(
                hidden, float("-inf")
            )
        return (torch.softmax(scores, -1) @ v).view(shape)

    return attention


class Peer(NamedTuple):
    title: str
    make: Callable[[Cell], Attention]


PEERS: dict[str, Peer] = {
    "tilewise": Peer("Tilewise", tilewise_attention),
    "sdpa": Peer("PyTorch SDPA", sdpa_attention),
    "sdpa-flash": Peer("SDPA flash", sdpa_flash_attention),
    "standard": Peer("standard attention", standard_attention),
}

# Score-sized arrays alive at once in standard attention: scores and probabilities; in training also their gradients.
STANDARD_MATRICES = {"fwd": 2.0, "bwd": 4.0}


def memory_refusal(name: str, cell: Cell, graphs: int = 1) -> str | None:
    """A sentence if `name` would not fit into what is free now, `graphs` forward passes kept for their backward.
    Asked before anything is allocated."""
    if name != "standard":
        return None
    needed = cell.score_bytes(STANDARD_MATRICES[cell.pass_] + graphs - 1)
    free = available_memory()
    # Four fifths: the estimate leaves out masks and outputs, and others use the machine too.
    return f"needs {human_bytes(needed)}, {human_bytes(free)} free" if needed > 0.8 * free else None


def run_once(attention: Attention, data: Data, backward: bool) -> dict[str, Tensor]:
    """Output and, with `backward`, gradients."""
    if not backward:
        with torch.no_grad():
            return {"o": attention(*data.qkv)}
    o = attention(*data.qkv)
    dq, dk, dv = torch.autograd.grad(o, data.qkv, data.do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def turn(attention: Attention, sets: list[Data], backward: bool) -> Callable[[], None]:
    """What one timed turn repeats. It walks through the input sets so that no cache keeps the answer warm. For the
    backward pass the forward is done beforehand and its graph kept, so only the backward is timed."""
    count = 0
    if not backward:

        def forward_turn() -> None:
            nonlocal count
            attention(*sets[count % len(sets)].qkv)
            count += 1

        return forward_turn

    graphs = [(attention(*data.qkv), data) for data in sets]

    def backward_turn() -> None:
        nonlocal count
        o, data = graphs[count % len(graphs)]
        torch.autograd.grad(o, data.qkv, data.do, retain_graph=True)
        count += 1

    return backward_turn


# -------------------------------------------------------------------------------------------------------- the truth


@dataclass(frozen=True)
class Sample:
    """Where a result is checked: query rows, keys, and (batch, key/value head) pairs with all their query heads."""

    rows: Tensor
    keys: Tensor
    groups: tuple[tuple[int, int], ...]

    def to(self, device: Any) -> Sample:
        return Sample(self.rows.to(device), self.keys.to(device), self.groups)


def draw_sample(cell: Cell, count: int = 64, groups: int = 2, seed: int = 1) -> Sample:
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        inner = torch.randperm(size, generator=generator)[: max(0, count - 2)]
        return torch.cat([inner, torch.tensor([0, size - 1])]).unique()  # the first and the last are always among them

    every = [(b, g) for b in range(cell.batch) for g in range(cell.heads_kv)]
    picked = torch.randperm(len(every), generator=generator)[:groups].tolist()
    return Sample(draw(cell.seqlen_q), draw(cell.seqlen_kv), tuple(every[index] for index in sorted(picked)))


def at_sample(result: dict[str, Tensor], cell: Cell, sample: Sample) -> dict[str, Tensor]:
    """The sampled part of full results, [groups, heads of the group or 1, rows or keys, head_dim]."""
    group = cell.heads_q // cell.heads_kv

    def pick(name: str, x: Tensor) -> Tensor:
        if name in ("o", "dq"):
            return torch.stack([x[b, g * group : (g + 1) * group][:, sample.rows] for b, g in sample.groups])
        return torch.stack([x[b, g : g + 1][:, sample.keys] for b, g in sample.groups])

    return {name: pick(name, x.detach()).double() for name, x in result.items()}


def sampled_attention(cell: Cell, data: Data, sample: Sample, exact: bool) -> dict[str, Tensor]:
    """Attention and its gradients at the sample only, on the device of the data, in blocks of rows: in fp64 (`exact`), or as the cell's dtype
    would do it plainly: fp32 sums, every stored array rounded to the dtype."""
    real = torch.float64 if exact or cell.dtype == "fp64" else torch.float32
    dtype = DTYPES[cell.dtype]

    def rounded(x: Tensor) -> Tensor:
        return x if exact else x.to(dtype).to(real)

    scale = cell.head_dim**-0.5
    group = cell.heads_q // cell.heads_kv
    backward = cell.pass_ == "bwd"
    device = data.q.device
    block = max(16, (4_000_000 if device.type == "cpu" else 100_000_000) // (cell.seqlen_kv * group))
    # Gradients of a key gather over all query rows; the forward needs only the sampled ones.
    rows = torch.arange(cell.seqlen_q, device=device) if backward else sample.rows
    parts: dict[str, list[Tensor]] = {name: [] for name in (("o", "dq", "dk", "dv") if backward else ("o",))}

    for b, g in sample.groups:
        heads = slice(g * group, (g + 1) * group)
        q, do = data.q[b, heads].detach().to(real), data.do[b, heads].to(real)
        k, v = data.k[b, g].detach().to(real), data.v[b, g].detach().to(real)
        o, dq = torch.empty(group, len(rows), cell.head_dim, dtype=real, device=device), torch.empty_like(q)
        dk, dv = torch.zeros_like(k[sample.keys]), torch.zeros_like(v[sample.keys])
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            index = rows[part]
            visible = cell.visible(index)
            # Keys that no row of this block sees do no work here either.
            end = cell.seqlen_kv
            if visible is not None:
                end = int(index[-1]) + cell.seqlen_kv - cell.seqlen_q + 1
                visible = visible[:, :end]
            s = rounded((q[:, index] @ k[:end].T) * scale)
            if visible is not None:
                s.masked_fill_(~visible, float("-inf"))
            p = rounded(torch.softmax(s, -1))
            o[:, part] = p @ v[:end]
            if backward:
                dp = rounded(do[:, index] @ v[:end].T)
                ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)))
                dq[:, part] = (ds @ k[:end]) * scale
                seen = sample.keys < end
                keys = sample.keys[seen]
                dk[seen] += torch.einsum("hik,hid->kd", ds[:, :, keys], q[:, index]) * scale
                dv[seen] += torch.einsum("hik,hid->kd", p[:, :, keys], do[:, index])
        parts["o"].append(rounded(o[:, sample.rows] if backward else o))
        if backward:
            parts["dq"].append(rounded(dq[:, sample.rows]))
            parts["dk"].append(rounded(dk)[None])
            parts["dv"].append(rounded(dv)[None])
    return {name: torch.stack(part).double() for name, part in parts.items()}


@dataclass
class Verdict:
    """The accuracy rule on one array: max|x − fp64| ≤ c · max|plain − fp64| + 2 · max|rounding of fp64|, c = 2 for the
    output and 3 for gradients, and a mean error of at most 1.5 times that of the plain computation."""

    error: float
    allowed: float
    mean_error: float = 0.0
    mean_allowed: float = math.inf
    magnitude: float = 0.0

    @property
    def passed(self) -> bool:  # written so that NaN fails
        return self.error <= self.allowed and self.mean_error <= self.mean_allowed

    @property
    def share(self) -> float:
        """How much of what is allowed; from 1 on it fails. For the worst of several."""
        shares = [
            e / a if a else math.inf if e else 0.0
            for e, a in ((self.error, self.allowed), (self.mean_error, self.mean_allowed))
        ]
        return math.inf if any(map(math.isnan, shares)) else max(shares)

    def to_json(self) -> dict[str, float | bool]:
        return asdict(self) | {"passed": self.passed}


def judge(
    result: dict[str, Tensor], truth: dict[str, Tensor], plain: dict[str, Tensor], dtype: str
) -> dict[str, Verdict]:
    verdicts = {}
    for name, exact in truth.items():
        error, plain_error = (result[name] - exact).abs(), (plain[name] - exact).abs()
        floor = (exact.to(DTYPES[dtype]).double() - exact).abs()
        verdicts[name] = Verdict(
            error=error.max().item(),
            allowed=((2 if name == "o" else 3) * plain_error.max() + 2 * floor.max()).item(),
            mean_error=error.mean().item(),
            mean_allowed=1.5 * max(plain_error.mean().item(), floor.mean().item()),
            magnitude=exact.abs().max().item(),
        )
    return verdicts


# ------------------------------------------------------------------------------------------------------------ clocks


@dataclass
class Timing:
    """Seconds per call, one figure per round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def times_of(self, other: Timing) -> list[float]:
        """How many times as long this one took, against `other` in the same round."""
        return [mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)]


def rounds(
    turns: dict[str, Callable[[], None]], count: int, min_seconds: float, tell: Callable[[str, int], None]
) -> dict[str, Timing]:
    """`count` rounds; in each, every entry runs back to back for at least `min_seconds`, in rotated order, so that a
    slow minute of the machine hits all of them alike. Callers have run every entry once before."""
    timings = {name: Timing() for name in turns}
    names = list(turns)
    for number in range(count):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            tell(name, number)
            call, calls = turns[name], 0
            start = time.perf_counter()
            while (elapsed := time.perf_counter() - start) < min_seconds or calls == 0:
                call()
                calls += 1
            timings[name].seconds.append(elapsed / calls)
    return timings


# ------------------------------------------------------------------------------------------------------------ memory


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.3g} {unit}"


def status_kib(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), None)


def available_memory() -> int:
    """Bytes that can be had without swapping, under the container's limit if there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max" where there is no limit
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return free


def peak_meter() -> tuple[str, Callable[[], Callable[[], int]]]:
    """How peaks are read here, and a function that starts a reading and returns the one that ends it (bytes)."""
    if status_kib("VmHWM") is not None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        except OSError:
            pass
        else:
            base = (status_kib("VmRSS") or 0) * 1024

            def start() -> Callable[[], int]:
                Path("/proc/self/clear_refs").write_text("5")
                return lambda: (status_kib("VmHWM") or 0) * 1024 - base

            return "VmHWM, reset before each pass", start

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # The mark cannot be reset: growth hidden below an earlier peak (imports) is not seen.
    return "ru_maxrss, growth only", lambda: lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def measure_peak_here(name: str, cell: Cell, threads: int) -> dict[str, Any]:
    """Peak memory beyond q, k, v and do: of a forward pass, then of a training step. For a process of its own."""
    torch.set_num_threads(threads)
    small = Cell(heads_q=cell.heads_q, heads_kv=cell.heads_kv, seqlen_q=64, seqlen_kv=64, head_dim=cell.head_dim,
                 dtype=cell.dtype, mask=cell.mask, pass_="bwd")  # fmt: skip
    run_once(PEERS[name].make(small), make_data(small), backward=True)  # thread pools and lazily loaded code
    data = make_data(cell)
    method, start = peak_meter()
    result: dict[str, Any] = {"method": method}
    for pass_ in ("fwd", "bwd") if cell.pass_ == "bwd" else ("fwd",):
        read = start()
        run_once(PEERS[name].make(cell), data, backward=pass_ == "bwd")
        result[pass_] = read()
    return result


def measure_peak(name: str, cell: Cell, threads: int) -> dict[str, Any]:
    """`measure_peak_here` in a fresh process, where nothing that ran before can hide or inflate the peak."""
    request = json.dumps({"name": name, "cell": asdict(cell), "threads": threads})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.measure", request],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"measuring the memory of {name} at {cell}: {last}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


# ----------------------------------------------------------------------------------------------------------- records


def choose_device(wanted: str) -> str:
    """The device to run on: the best one that this version has kernels for."""
    if wanted in ("auto", "cpu"):
        return "cpu"
    raise ValueError(f"no kernels for device {wanted!r} in tilewise {tilewise.__version__}; it has: cpu")


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def checkout_root() -> Path | None:
    """The source tree this package lies in, if it does."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "include/tilewise/tilewise.h").exists() and (parent / ".git").exists():
            return parent
    return None


def commit() -> str | None:
    """Of the checkout; a copy without git is told by TILEWISE_COMMIT."""
    root = checkout_root()
    if root is None:
        return os.environ.get("TILEWISE_COMMIT")

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if head and git("status", "--porcelain", "-uno") else head or None
    except OSError:  # no git
        return os.environ.get("TILEWISE_COMMIT")


def facts(device: str) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "device": cpu_name() if device == "cpu" else device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "tilewise": tilewise.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "openmp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
    }


def busy_warning(about: dict[str, Any]) -> str | None:
    """Another program on the same cores makes every figure worthless; say so before the tables, not after."""
    if about["load"] > 0.5 + 0.1 * about["cpus"]:
        return f"The machine is busy (load {about['load']} on {about['cpus']} cores): times will be noisy."
    return None


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure_peak_here(asked["name"], Cell(**asked["cell"]), asked["threads"])))
