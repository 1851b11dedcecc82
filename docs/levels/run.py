#!/usr/bin/env python3
"""Compiles the six levels, checks each against float64, and times them beside PyTorch's FlashAttention-2 and Tilewise.

    python docs/levels/run.py                          # two problems, half a minute on an H200
    python docs/levels/run.py --shapes 2x16x2048       # batch x heads x seqlen
    python docs/levels/run.py --json FILE              # keeps what was measured
    python docs/levels/run.py --table FILE             # writes it into README.md; needs no GPU

Inputs are normal random numbers in bfloat16, outputs are NaN before a level is checked. A level is right if it is at most
twice as far off as standard attention done plainly in bfloat16 (docs/formula.md, "Dtypes and accuracy"). Times are taken
with CUDA events over calls back to back, in rounds: each round runs everybody, in rotated order, and a gain is the median
over the rounds of the ratio of two times of the same round. A FLOP count is 4 seqlen^2 64 per head.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
README = HERE / "README.md"
RESULTS = ROOT / "bench/results/nvidia-h200/levels.json"
BEGIN, END = "<!-- figures: written by run.py --table -->", "<!-- end of figures -->"

HEAD_DIM, TILE, KIB = 64, 64, 1024
DEVICE = "cuda"
SHAPES = ((4, 32, 4096), (1, 8, 8192))

Shape = tuple[int, int, int]  # batch, heads, seqlen


# ---------------------------------------------------------------------------------------------------------- the levels


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: Callable[[int, int], tuple[int, int, int]]  # of heads (batch times heads) and seqlen
    threads: int = 128
    shared: int = 0  # dynamic, in bytes


@dataclass(frozen=True)
class Level:
    number: int
    file: str
    title: str
    launches: tuple[Launch, ...]
    scratch: Callable[[int, int], int] = lambda heads, seqlen: 0  # floats
    edit: tuple[str, str] | None = None  # a variant: the text of the file with this replaced

    @property
    def name(self) -> str:
        return f"{self.number}, {self.title}"

    def source(self) -> str:
        text = (HERE / self.file).read_text()
        if self.edit is not None:
            assert text.count(self.edit[0]) == 1, f"{self.file} has not one {self.edit[0]!r}"
            text = text.replace(*self.edit)
        return text


def state(heads: int, seqlen: int) -> int:  # o, m and l of every row
    return heads * seqlen * (HEAD_DIM + 2)


ONE_BLOCK = 4 * (3 * TILE * HEAD_DIM + 4 * TILE * HEAD_DIM)  # q, k, v and four parts

LEVELS = (
    Level(
        1, "1-standard.cu", "standard",
        (Launch("scores", lambda h, s: (s // TILE, s // TILE, h)), Launch("softmax", lambda h, s: (s, h, 1), 256),
         Launch("output", lambda h, s: (s // TILE, h, 1))),
        lambda heads, seqlen: heads * seqlen * seqlen,
    ),
    Level(2, "2-tiles.cu", "tiles: FlashAttention",
          (Launch("attention", lambda h, s: (h, 1, 1), shared=ONE_BLOCK + 4 * 10 * TILE),), state),
    Level(3, "3-unscaled.cu", "o unscaled until the end",
          (Launch("attention", lambda h, s: (h, 1, 1), shared=ONE_BLOCK + 4 * 11 * TILE),), state),
    Level(4, "4-parallel.cu", "parallel over the sequence",
          (Launch("attention", lambda h, s: (s // TILE, h, 1), shared=ONE_BLOCK + 4 * 4 * TILE),)),
    Level(5, "5-warps.cu", "queries split over warps",
          (Launch("attention", lambda h, s: (s // 128, h, 1), shared=4 * (64 * 128 + 2 * 64 * 64 + 4 * 64 * 36)),)),
    Level(6, "6-tensor-cores.cu", "tensor cores", (Launch("attention", lambda h, s: (s // 128, h, 1)),)),
)  # fmt: skip

# What a part of an idea does alone.
VARIANTS = (
    Level(4, "4-parallel.cu", "with one block per head",
          (Launch("attention", lambda h, s: (1, h, 1), shared=ONE_BLOCK + 4 * 4 * TILE),)),
    Level(5, "5-warps.cu", "with 64 queries per block",
          (Launch("attention", lambda h, s: (s // 64, h, 1), shared=4 * (3 * 64 * 64 + 4 * 64 * 20)),),
          edit=("kTileQ = 128", "kTileQ = 64")),
    Level(6, "6-tensor-cores.cu", "with o divided at every tile", (Launch("attention", lambda h, s: (s // 128, h, 1)),),
          edit=("kDivideAtEveryTile = false", "kDivideAtEveryTile = true")),
)  # fmt: skip

PEERS = ("PyTorch's FlashAttention-2", "Tilewise")


# ------------------------------------------------------------------------------------------------- compile and launch


class Problem(ctypes.Structure):  # as in tile.cuh
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "scratch")] + [("seqlen", ctypes.c_int)]


class Failure(Exception):
    pass


def nvrtc_path() -> str:
    """TILEWISE_NVRTC, else that of a pip package, else what the loader finds, else that of a toolkit."""
    if forced := os.environ.get("TILEWISE_NVRTC"):
        return forced
    found = importlib.util.find_spec("nvidia")
    roots = [Path(each) for each in (found.submodule_search_locations or ())] if found else []
    toolkits = sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    folders = [root / part / "lib" for root in roots for part in ("cu13", "cuda_nvrtc")] + toolkits
    files = [file for folder in folders for file in sorted(folder.glob("libnvrtc.so.1[0-9]"))]
    for file in files:
        return str(file)
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
            return name
        except OSError:
            continue
    raise Failure("found no NVRTC: pip install nvidia-cuda-nvrtc, or name its library in TILEWISE_NVRTC")


class Compiler:
    def __init__(self, path: str | None = None) -> None:
        path = path or nvrtc_path()
        # It asks for its builtins by bare name: the loader knows those that are loaded already.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.1*") if "/" in path else ():
            ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(path)

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, name: str, arch: str, headers: dict[str, str] | None = None) -> tuple[bytes, str]:
        """Device code for one arch, and what ptxas says about registers and spills."""
        library, program = self.library, ctypes.c_void_p()
        headers = headers or {path.name: path.read_text() for path in HERE.glob("*.cuh")}
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(each.encode() for each in headers))
        # ftz: exp2f becomes one instruction. Numbers below 1e-38 do not matter in a softmax.
        options = [f"--gpu-architecture={arch}", "-std=c++17", "-default-device", "-ftz=true", "--ptxas-options=-v"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
        try:
            code = library.nvrtcCompileProgram(program, len(options), array)
            log = self._fetch(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            if code != 0:
                raise Failure(f"{name} for {arch}: NVRTC {self.version()} says\n{log}")
            return self._fetch(program, "nvrtcGetCUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, what + "Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, what)(program, buffer)
        return buffer.raw


class Driver:
    """Loads and launches in the context that is current, torch's."""

    REGISTERS, MAX_DYNAMIC, CARVEOUT = 4, 8, 9  # CU_FUNC_ATTRIBUTE_...

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ.get("TILEWISE_CUDA_DRIVER") or "libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failure(f"{name} failed with CUDA error {code}")

    def load(self, cubin: bytes, launches: Sequence[Launch]) -> list[ctypes.c_void_p]:
        module = ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), cubin)
        functions = [ctypes.c_void_p() for _ in launches]
        for function, launch in zip(functions, launches, strict=True):
            self("cuModuleGetFunction", ctypes.byref(function), module, launch.kernel.encode())
            if launch.shared:
                self("cuFuncSetAttribute", function, self.MAX_DYNAMIC, launch.shared)
                self("cuFuncSetAttribute", function, self.CARVEOUT, 100)  # shared memory before cache
        return functions

    def attribute(self, function: ctypes.c_void_p, which: int) -> int:
        value = ctypes.c_int()
        self("cuFuncGetAttribute", ctypes.byref(value), which, function)
        return value.value

    def blocks_per_sm(self, function: ctypes.c_void_p, launch: Launch) -> int:
        count, shared = ctypes.c_int(), ctypes.c_size_t(launch.shared)
        self("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(count), function, launch.threads, shared)
        return count.value

    def run(
        self, functions: Sequence[ctypes.c_void_p], level: Level, problem: Problem, heads: int, stream: int
    ) -> None:
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(problem))
        for function, launch in zip(functions, level.launches, strict=True):
            grid = launch.grid(heads, problem.seqlen)
            self("cuLaunchKernel", function, *grid, launch.threads, 1, 1, launch.shared, ctypes.c_void_p(stream),
                 parameters, None)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- check and time


def tell(text: str) -> None:
    """A line that says what is running, overwritten by the next one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Truth:
    """o and lse of every head in float64, and how far off standard attention in bfloat16 is."""

    def __init__(self, q: Any, k: Any, v: Any) -> None:
        import torch

        self.o = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        self.lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)
        standard, lse_error = torch.empty_like(q), 0.0
        for at in range(q.shape[0]):
            exact = (q[at].double() @ k[at].double().T) * HEAD_DIM**-0.5
            self.o[at], self.lse[at] = torch.softmax(exact, -1) @ v[at].double(), torch.logsumexp(exact, -1)
            scores = (q[at].float() @ k[at].float().T) * HEAD_DIM**-0.5
            lse_error = max(lse_error, float((torch.logsumexp(scores, -1) - self.lse[at]).abs().max()))
            weights = torch.softmax(scores.bfloat16().float(), -1).bfloat16()
            standard[at] = (weights.float() @ v[at].float()).bfloat16()
        off = (standard.double() - self.o).abs()
        rounding = float((self.o.bfloat16().double() - self.o).abs().max())
        self.standard_error = float(off.max())
        self.limit, self.mean_limit = 2 * self.standard_error + 2 * rounding, 1.5 * float(off.mean())
        self.lse_limit = 2e-5 * max(1.0, float(self.lse.abs().max())) + 2 * lse_error

    def check(self, o: Any, lse: Any | None = None) -> tuple[float, str | None]:
        """The largest error, and what is wrong if anything is. A NaN is larger than any limit."""
        off = (o.double() - self.o).abs()
        largest, mean = float(off.max()), float(off.mean())
        if not largest <= self.limit or not mean <= self.mean_limit:
            return (
                largest,
                f"o is off by {largest:.3g} (mean {mean:.3g}), allowed {self.limit:.3g} ({self.mean_limit:.3g})",
            )
        if lse is not None:
            largest_lse = float((lse.double() - self.lse).abs().max())
            if not largest_lse <= self.lse_limit:
                return largest, f"lse is off by {largest_lse:.3g}, allowed {self.lse_limit:.3g}"
        return largest, None


def seconds_per_call(call: Callable[[], Any], at_least: float) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = 1
    while True:
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end) / 1e3
        if elapsed >= 0.8 * at_least:
            return elapsed / calls
        calls = max(calls + 1, min(100 * calls, round(calls * at_least / max(elapsed, 1e-6))))


def peers(q: Any, k: Any, v: Any, shape: Shape) -> dict[str, Callable[[], Any]]:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    views = [x.view(*shape, HEAD_DIM) for x in (q, k, v)]

    def flash() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*views)

    calls = {PEERS[0]: flash}
    try:
        sys.path.append(str(ROOT / "python"))
        import tilewise

        calls[PEERS[1]] = lambda: tilewise.attention(*views, layout="bhsd")
    except ImportError as error:
        print(f"Tilewise is left out: {error}", file=sys.stderr)
    return calls


def measure(shape: Shape, levels: dict[str, tuple[Level, list[ctypes.c_void_p]]], driver: Driver, rounds: int,
            seconds: float) -> dict[str, Any]:  # fmt: skip
    import torch

    batch, num_heads, seqlen = shape
    heads = batch * num_heads
    title = f"batch {batch}, {num_heads} heads, {seqlen} tokens"
    tell(f"{title}: float64")
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(heads, seqlen, HEAD_DIM, generator=generator, device=DEVICE).bfloat16() for _ in range(3)
    )  # fmt: skip
    truth = Truth(q, k, v)
    o, lse = torch.empty_like(q), torch.empty(heads, seqlen, device=DEVICE)
    scratch = torch.empty(max(level.scratch(heads, seqlen) for level, _ in levels.values()) or 1, device=DEVICE)
    problem = Problem(*(x.data_ptr() for x in (q, k, v, o, lse, scratch)), seqlen)
    stream = torch.cuda.current_stream().cuda_stream

    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, (level, functions) in levels.items():
        tell(f"{title}: checks {name}")
        for poisoned in (o, lse, scratch):
            poisoned.fill_(float("nan"))
        driver.run(functions, level, problem, heads, stream)
        error, wrong = truth.check(o, lse)
        rows[name] = {"name": name, "error": error, "wrong": wrong, "ms": []}
        calls[name] = functools.partial(driver.run, functions, level, problem, heads, stream)
    for name, call in peers(q, k, v, shape).items():
        error, wrong = truth.check(call().reshape(o.shape))
        rows[name] = {"name": name, "error": error, "wrong": wrong, "ms": []}
        calls[name] = call

    names = list(calls)
    for number in range(rounds):
        shift = number * len(names) // rounds
        for name in names[shift:] + names[:shift]:
            tell(f"{title}: round {number + 1} of {rounds}, {name}")
            rows[name]["ms"].append(1e3 * seconds_per_call(calls[name], seconds))
    tell("")
    return {"batch": batch, "heads": num_heads, "seqlen": seqlen, "standard_error": truth.standard_error,
            "error_limit": truth.limit, "rows": list(rows.values())}  # fmt: skip


def commit() -> str | None:
    if "TILEWISE_COMMIT" in os.environ:  # a copy of the tree, whose own history says something else or nothing
        return os.environ["TILEWISE_COMMIT"][:12]
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------------------------------------------------- the tables


def human(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def tables(record: dict[str, Any] | None) -> str:
    """Markdown: a table for each shape. Without a record, what there will be."""
    nothing: list[dict[str, Any]] = [{"batch": b, "heads": h, "seqlen": s, "rows": []} for b, h, s in SHAPES]
    shapes = record["shapes"] if record else nothing
    lines = []
    if record:
        lines += [
            f"{record['gpu']}, bfloat16, forward; {record['date'][:10]}, commit {record['commit']}, PyTorch "
            f"{record['torch']}, driver {record['driver']}, NVRTC {record['nvrtc']}; {record['rounds']} rounds of "
            f"{record['seconds']} s. Every result is within the accuracy rule."
            if all(row["wrong"] is None for shape in shapes for row in shape["rows"])
            else "**Some results are wrong: these figures are worth nothing.**",
            "",
        ]
    for shape in shapes:
        flops = 4.0 * shape["batch"] * shape["heads"] * shape["seqlen"] ** 2 * HEAD_DIM
        found = {row["name"]: row["ms"] for row in shape["rows"]}
        lines += [
            f"**{shape['batch']} × {shape['heads']} heads of {shape['seqlen']} tokens**",
            "",
            "| level | registers | ms | TFLOP/s | × the level before | × level 2 |",
            "|---|---|---|---|---|---|",
        ]
        for level in sorted(LEVELS + VARIANTS, key=lambda level: (level.number, level in LEVELS)):
            variant = level in VARIANTS
            previous = next((other.name for other in LEVELS if other.number == level.number - 1), None)
            link = f"*{level.name}*" if variant else f"[{level.name}]({level.file})"
            registers = (record or {}).get("registers", {}).get(level.name)
            told = "" if registers is None else " / ".join(map(str, registers))
            lines.append(table_row(link, told, found, level.name, flops, previous))
        for name in PEERS:
            if record is None or name in found:
                lines.append(table_row(name, "", found, name, flops, LEVELS[-1].name))
        lines.append("")
    return "\n".join(lines).strip()


def table_row(
    link: str, registers: str, found: dict[str, list[float]], name: str, flops: float, previous: str | None
) -> str:
    if name not in found:
        return f"| {link} | {registers} | not measured yet | | | |"

    def gain(over: str | None) -> str:
        if over is None or over not in found:
            return ""
        return human(statistics.median(a / b for a, b in zip(found[over], found[name], strict=True)))

    ms = statistics.median(found[name])
    return f"| {link} | {registers} | {human(ms)} | {human(flops / ms / 1e9)} | {gain(previous)} | {gain(LEVELS[1].name)} |"


def with_tables(text: str, record: dict[str, Any] | None) -> str:
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables(record)}\n\n{END}{rest.split(END)[1]}"


# ------------------------------------------------------------------------------------------------------- command line


def shapes_from(text: str) -> list[Shape]:
    shapes: list[Shape] = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(f"{part!r} is not BATCHxHEADSxSEQLEN, as in 4x32x4096")
        batch, heads, seqlen = map(int, sizes)
        if seqlen % 128:
            raise argparse.ArgumentTypeError(f"{part!r}: the levels take a seqlen that 128 divides")
        if batch * heads > 65535:
            raise argparse.ArgumentTypeError(f"{part!r}: at most 65535 heads in all, which is a limit of CUDA's grids")
        shapes.append((batch, heads, seqlen))
    return shapes


def measure_all(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError:
        raise Failure(
            "needs PyTorch with CUDA, for tensors and for something to compare with: pip install torch"
        ) from None
    if not torch.cuda.is_available():
        raise Failure(f"needs an NVIDIA GPU of sm_80 or later; PyTorch {torch.__version__} sees none")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise Failure(f"needs sm_80 or later; {torch.cuda.get_device_name()} is sm_{major}{minor}")
    torch.zeros(1, device=DEVICE)  # makes its context the current one
    compiler, driver = Compiler(), Driver()
    levels: dict[str, tuple[Level, list[ctypes.c_void_p]]] = {}
    for level in (*LEVELS, *VARIANTS):
        tell(f"compiles {level.name}")
        cubin, _ = compiler.compile(level.source(), level.file, f"sm_{major}{minor}")
        levels[level.name] = level, driver.load(cubin, level.launches)
    version = ctypes.c_int()
    driver("cuDriverGetVersion", ctypes.byref(version))
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "nvrtc": compiler.version(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "registers": {
            name: [driver.attribute(each, driver.REGISTERS) for each in functions]
            for name, (_, functions) in levels.items()
        },
        "blocks_per_sm": {
            name: [driver.blocks_per_sm(*pair) for pair in zip(functions, level.launches, strict=True)]
            for name, (level, functions) in levels.items()
        },
        "shapes": [
            measure(shape, levels, driver, options.rounds, options.seconds) for shape in options.shapes
        ],
    }  # fmt: skip
    print(tables(record))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [(shape, row) for shape in record["shapes"] for row in shape["rows"] if row["wrong"]]
    for shape, row in wrong:
        print(f"WRONG: {row['name']}, seqlen {shape['seqlen']}: {row['wrong']}")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ",".join("x".join(map(str, shape)) for shape in SHAPES)
    parser.add_argument("--shapes", type=shapes_from, default=list(SHAPES), metavar="BxHxS,...",
                        help=f"batch, heads and seqlen of each problem (default: {default})")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="how often everybody has a turn (default: 3)")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a turn is, at least (default: 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the record")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the tables of this record into README.md, and end"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not options.seconds > 0:
        parser.error("--rounds and --seconds must be above 0")
    try:
        if options.table is not None:
            record = json.loads(options.table.read_text())
            README.write_text(with_tables(README.read_text(), record))
            return 0
        return measure_all(options)
    except (Failure, OSError, ValueError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
