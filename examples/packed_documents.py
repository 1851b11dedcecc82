"""One million tokens of packed documents, with the mask and the score function written as Python lambdas.

    python examples/packed_documents.py                    # 1,000,000 tokens
    python examples/packed_documents.py --tokens 20000     # a taste

Every query sees the earlier tokens of its own document, and scores fall with the distance, at a slope per head that is
learned. A dense mask of this problem would take 931 GiB; here both functions become expressions that the kernels
evaluate, and the tiles that the mask hides are never visited, forward or backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewise


def size(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def draw_documents(tokens: int, mean_length: int) -> list[int]:
    """First token of each document, and the end: lengths between half and one and a half of the mean."""
    starts = [0]
    while starts[-1] < tokens:
        length = int(torch.randint(max(1, mean_length // 2), mean_length * 3 // 2 + 1, ()))
        starts.append(min(tokens, starts[-1] + length))
    return starts


def timed(label: str, call: Callable[[], Any]) -> tuple[Any, float]:
    print(f"{label} ...", end="", flush=True)
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    print(f" {seconds:.2f} s")
    return result, seconds


def peak_memory() -> float | None:
    """Bytes, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("VmHWM:")), None)


def exact(q: Any, k: Any, v: Any, do: Any, slopes: Any) -> dict[str, Any]:
    """One document by the textbook, in fp64: output and gradients [tokens, heads, head_dim]."""
    leaves = [x.detach().double().requires_grad_(True) for x in (q, k, v, slopes)]
    q, k, v, slopes = leaves
    position = torch.arange(len(q))
    distance = position[:, None] - position
    x = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5 - slopes[:, None, None] * distance
    p = x.masked_fill(distance < 0, float("-inf")).softmax(-1)
    o = torch.einsum("hij,jhd->ihd", p, v)
    gradients = torch.autograd.grad(o, leaves, do.double())
    return dict(zip(("dq", "dk", "dv", "dslopes", "o"), (*gradients, o.detach()), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention over packed documents that no dense mask could hold.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--document", type=int, default=1000, help="mean length of a document")
    parser.add_argument("--check", type=int, default=16, help="number of documents compared with fp64")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    tokens, heads, head_dim = arguments.tokens, arguments.heads, arguments.head_dim
    starts = draw_documents(tokens, arguments.document)
    lengths = torch.tensor(starts).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    print(f"{tokens:,} tokens in {len(lengths):,} documents, {heads} x {head_dim}, fp32")
    print(f"visible: {pairs:,} of {tokens**2:,} pairs ({pairs / tokens**2:.3%})")
    print(f"a dense mask would take {size(tokens**2)}, the scores of one head {size(4 * tokens**2)}")

    q, k, v = (torch.randn(1, tokens, heads, head_dim, requires_grad=True) for _ in range(3))
    do = torch.randn(1, tokens, heads, head_dim)
    slopes = torch.logspace(-1, -2, heads).requires_grad_(True)

    mask = tilewise.masks.mod(lambda b, h, i, j, s: (s.document[i] == s.document[j]) & (j <= i), document=document)
    distance = tilewise.score_mod(lambda x, b, h, i, j, s: x - s.slopes[h] * (i - j), slopes=slopes)

    o, forward = timed("forward", lambda: tilewise.attention(q, k, v, mask=mask, score_mod=distance))
    gradients, backward = timed("backward", lambda: torch.autograd.grad(o, (q, k, v, slopes), do))
    rates = [factor * pairs * head_dim * heads / seconds * 1e-9 for factor, seconds in ((4, forward), (10, backward))]
    print(f"on the visible pairs: {rates[0]:.3g} and {rates[1]:.3g} GFLOP/s")
    if peak := peak_memory():
        print(
            f"peak memory of the process: {size(peak)}; q, k, v, o and their gradients alone are {size(8 * q.nbytes)}"
        )

    # Whole documents, by the textbook in fp64. A key seen through a hole in the mask would show as an error of order one.
    results = dict(zip(("dq", "dk", "dv", "dslopes", "o"), (*gradients, o.detach()), strict=True))
    everything = arguments.check >= len(lengths)
    chosen = sorted({0, len(lengths) - 1, *torch.randperm(len(lengths))[: arguments.check - 2].tolist()})
    chosen = list(range(len(lengths))) if everything else chosen
    errors: dict[str, float] = {}
    sums = torch.zeros(heads, dtype=torch.float64)
    for index in chosen:
        rows = slice(starts[index], starts[index + 1])
        truth = exact(q[0, rows], k[0, rows], v[0, rows], do[0, rows], slopes)
        sums += truth.pop("dslopes")
        for name, value in truth.items():
            errors[name] = max(errors.get(name, 0.0), float((results[name][0, rows] - value).abs().max()))
    if everything:  # the slope's gradient is a sum over all documents
        errors["dslopes"] = float(((results["dslopes"] - sums) / sums).abs().max())
    print(
        f"largest errors against fp64 in {len(chosen)} whole documents: "
        + ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
    )
    limits = {"o": 1e-5, "dq": 1e-4, "dk": 1e-4, "dv": 1e-4, "dslopes": 1e-3}
    passed = all(error <= limits[name] for name, error in errors.items())
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
