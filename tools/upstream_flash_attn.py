#!/usr/bin/env python3
"""Runs flash-attn's own test files against tilewise: a seeded sample of their cases.

    tools/upstream_flash_attn.py CHECKOUT --count 11000 --workers 12
    tools/upstream_flash_attn.py CHECKOUT --interface 3 --count 2000 --workers 12

CHECKOUT is a clone of flash-attention; its tests/test_flash_attn.py (flash-attn 2.8), or hopper/test_flash_attn.py
(FlashAttention-3), is imported as it is, with `import flash_attn` and `import flash_attn_interface` meaning tilewise
(`tilewise.flash_attn.install()`), and its test functions are called with combinations of their parameters. The files need
einops. With --device cpu the word cuda in them is read as cpu. Cases are drawn so that every value of every parameter comes
up; the same seed draws the same cases. Prints a table; --out keeps every case with its result.

Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import time
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVING = "caches come with serving"
SPLITS = "how keys are split is chosen by the plan"


@dataclass(frozen=True)
class Interface:
    """A test file and what does not run of it, with the reasons."""

    file: str
    tests: dict[str, str]
    values: dict[tuple[str, Any], str]  # of a parameter
    texts: dict[str, tuple[str, str]]  # what stands in the file: what is read instead, why


INTERFACES = {
    2: Interface(
        "tests/test_flash_attn.py",
        {
            "test_flash_attn_kvcache": SERVING,
            "test_flash_attn_varlen_paged_kv_num_splits": SERVING,
            "test_flash_attn_kvcache_paged_block_table_bounds": SERVING,
            "test_flash_attn_generator_arg_must_be_none": "calls the compiled module flash_attn_2_cuda, which is not there",
        },
        {("paged_kv_block_size", 256): SERVING, ("paged_kv_block_size", 512): SERVING},
        {},
    ),
    3: Interface(
        "hopper/test_flash_attn.py",
        {
            "test_flash_attn_kvcache": SERVING,
            "test_flash_attn_varlen_combine_linearize": f"num_splits = 4: {SPLITS}",
            "test_flash3_bw_compatibility": "schemas of the operators torch.ops.flash_attn_3, which are not there",
        },
        {("has_qv", True): "there is no qv", ("dtype", "torch.float8_e4m3fn"): "there is no float8"},
        {
            "num_splits_vals = [1, 3]": ("num_splits_vals = [1]", SPLITS),
            "num_splits_vals = [1, 3, 0]": ("num_splits_vals = [1, 0]", SPLITS),
            "torch.empty(70 * 1024 ** 3": ("torch.empty(1", "70 GiB of ballast; processes share the memory"),
        },
    ),
}

Case = tuple[str, dict[str, Any]]  # name of the test, its arguments
Table = dict[tuple[str, ...], list[Any]]  # names, one or several that go together, and their values


def load(options: argparse.Namespace) -> types.ModuleType:
    """The test file as a module."""
    import torch

    import tilewise.flash_attn
    import tilewise.flash_attn_interface

    tilewise.flash_attn.install()
    tilewise.flash_attn_interface.install()
    interface = INTERFACES[options.interface]
    file = options.checkout / interface.file
    sys.path.append(str(file.parent))  # for what it imports from beside it
    text = file.read_text()
    for there, (instead, _) in interface.texts.items():
        text = text.replace(there, instead)
    if options.device == "cpu":
        text = text.replace('device = "cuda"', 'device = "cpu"').replace('device="cuda"', 'device="cpu"')
        torch.cuda.get_device_capability = lambda *_: (8, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 40)
    if options.rounds:
        text = re.sub(r"in range\((50|100|250|1000)\)", f"in range({options.rounds})", text)
    module = types.ModuleType("test_flash_attn")
    exec(compile(text, "test_flash_attn.py", "exec"), module.__dict__)
    return module


def parameters(test: Any, interface: Interface) -> Table:
    """Names (one, or several that go together) and their values, of the parametrize marks."""
    found: Table = {}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = tuple(name.strip() for name in mark.args[0].split(","))
            left_out = {value for name, value in interface.values if (name,) == names}
            found[names] = [v for v in mark.args[1] if v not in left_out and str(v) not in left_out]
    return found


def length(value: Any) -> int:
    return max(value) if isinstance(value, tuple) else value


def tables_of(module: types.ModuleType, interface: Interface) -> dict[str, Table]:
    tests = [(name, test) for name, test in sorted(vars(module).items()) if name.startswith("test_")]
    return {name: parameters(test, interface) for name, test in tests if name not in interface.tests}


def draw(module: types.ModuleType, options: argparse.Namespace) -> list[Case]:
    """Cases of all tests, in random order."""
    rng = random.Random(options.seed)
    tables = tables_of(module, INTERFACES[options.interface])
    for table in tables.values():
        for names, values in table.items():
            if "seqlen" in names[0]:
                table[names] = [v for v in values if length(v) <= options.longest]
    sizes = {name: count_of(table) for name, table in tables.items()}
    cases: list[Case] = []
    # Small tests completely; the rest of the sample goes to the others in equal parts.
    left = options.count
    for n, name in enumerate(sorted(tables, key=sizes.__getitem__)):
        share = min(sizes[name], left // (len(tables) - n))
        left -= share
        cases += [(name, case) for case in sample(tables[name], share, sizes[name], rng)]
    rng.shuffle(cases)
    return cases


def count_of(table: Table) -> int:
    total = 1
    for values in table.values():
        total *= len(values)
    return total


def sample(table: Table, share: int, size: int, rng: random.Random) -> list[dict[str, Any]]:
    """Different combinations. Each parameter goes through its values in rounds, every round in another order."""
    seen: dict[str, dict[str, Any]] = {}
    decks: dict[tuple[str, ...], list[Any]] = {names: [] for names in table}
    while len(seen) < share:
        case: dict[str, Any] = {}
        for names, values in table.items():
            if not decks[names] or (share * 2 > size and rng.random() < 0.5):  # dense samples: do not go round in step
                decks[names] = rng.sample(values, len(values))
            value = decks[names].pop()
            case.update(zip(names, value, strict=True) if len(names) > 1 else [(names[0], value)])
        seen.setdefault(repr(case), case)
    return list(seen.values())


def run(module: types.ModuleType, case: Case) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", why)."""
    import contextlib
    import io

    import pytest

    name, arguments = case
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            getattr(module, name)(**arguments)
    except pytest.skip.Exception as reason:
        return "skipped", str(reason) or "without a reason"
    except Exception as error:
        frame = error.__traceback__
        while (
            frame is not None
            and frame.tb_next is not None
            and frame.tb_next.tb_frame.f_code.co_filename.endswith("test_flash_attn.py")
        ):
            frame = frame.tb_next
        line = frame.tb_lineno if frame is not None else 0
        return "failed", f"line {line}: {type(error).__name__}: {str(error)[:300]}"
    return "passed", ""


def work(options: argparse.Namespace, number: int, cases: Any, results: Any) -> None:
    """A process: takes cases until there are none."""
    import torch

    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    module = load(options)
    drawn = draw(module, options)
    for n in iter(cases.get, None):
        start = time.perf_counter()
        verdict, why = run(module, drawn[n])
        results.put((n, verdict, why, round(time.perf_counter() - start, 3)))
        if options.device == "cuda":
            torch.cuda.empty_cache()  # for the other processes
    results.put(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="clone of flash-attention, at the version to be compared with")
    parser.add_argument("--interface", type=int, choices=(2, 3), default=2, help="flash-attn 2 or FlashAttention-3")
    parser.add_argument("--count", type=int, default=10000, help="number of cases in the sample (default 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes, spread over the GPUs")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument(
        "--rounds", type=int, default=0, help="repetitions in the tests for races; 0 = as many as the file's"
    )
    parser.add_argument(
        "--longest", type=int, default=10**9, help="leaves out lengths above; what did not run is listed"
    )
    parser.add_argument("--slice", default=":", metavar="FROM:TO", help="part of the sample, to run it in pieces")
    parser.add_argument("--seconds", type=float, default=1e9, help="takes no new case after so long")
    parser.add_argument("--out", type=Path, help="file that gets one line of JSON for each case, as they finish")
    options = parser.parse_args()

    module = load(options)
    drawn = draw(module, options)
    first, last = ((int(n) if n else None) for n in options.slice.split(":"))
    wanted = list(range(len(drawn)))[first:last]

    context = multiprocessing.get_context("spawn")
    cases, results = context.Queue(), context.Queue()
    processes = [context.Process(target=work, args=(options, n, cases, results)) for n in range(options.workers)]
    for process in processes:
        process.start()
    waiting = iter(wanted)
    for _ in range(2 * options.workers):
        cases.put(next(waiting, None))
    start, done = time.monotonic(), {}
    out = options.out.open("a") if options.out else None
    busy = options.workers
    while busy:
        result = results.get()
        if result is None:
            busy -= 1
            continue
        n, verdict, why, seconds = result
        done[n] = (verdict, why)
        cases.put(next(waiting, None) if time.monotonic() - start < options.seconds else None)
        if out:
            name, arguments = drawn[n]
            record = {"n": n, "test": name, "arguments": {k: str(v) for k, v in arguments.items()}}
            out.write(json.dumps({**record, "result": verdict, "why": why, "seconds": seconds}) + "\n")
            out.flush()
        if verdict == "failed":
            print(f"FAILED {drawn[n][0]} {drawn[n][1]}: {why}", flush=True)
    for process in processes:
        process.join()
    report(module, INTERFACES[options.interface], drawn, done, time.monotonic() - start)
    return any(verdict == "failed" for verdict, _ in done.values())


def report(
    module: types.ModuleType,
    interface: Interface,
    drawn: list[Case],
    done: dict[int, tuple[str, str]],
    seconds: float,
) -> None:
    tables = tables_of(module, interface)
    by_test: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    covered = set()
    for n, (verdict, why) in done.items():
        name, arguments = drawn[n]
        by_test.setdefault(name, Counter())[verdict] += 1
        if verdict == "skipped":
            reasons[why] += 1
        else:
            covered |= {(name, names, repr(values_of(names, arguments))) for names in tables[name]}
    print(f"\n{'test':42} {'ran':>7} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for name, counts in [*sorted(by_test.items()), ("all", sum(by_test.values(), Counter()))]:
        print(f"{name:42} {counts.total():7} {counts['passed']:7} {counts['failed']:7} {counts['skipped']:8}")
    for why, number in reasons.items():
        print(f"skipped by the file itself, {number}: {why}")
    for name, why in interface.tests.items():
        print(f"left out: {name}: {why}")
    for (name, value), why in interface.values.items():
        print(f"left out: {name} = {value}: {why}")
    for there, (instead, why) in interface.texts.items():
        print(f"{instead} for {there}: {why}")
    for name, table in tables.items():
        for names, values in table.items():
            missing = [v for v in values if (name, names, repr(v)) not in covered]
            if missing:
                print(f"not run: {name}: {', '.join(names)} = {', '.join(map(str, missing))}")
    print(f"{len(done)} of {len(drawn)} cases in {seconds:.0f} s")


def values_of(names: tuple[str, ...], arguments: dict[str, Any]) -> Any:
    return arguments[names[0]] if len(names) == 1 else tuple([arguments[name] for name in names])


if __name__ == "__main__":
    sys.exit(main())
