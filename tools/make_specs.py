#!/usr/bin/env python3
"""Writes python/tilewise/specs.json, the specs that CI compiles for every arch: every pair of a dtype, a head dim, a mask
and an option stands in one of them, and as few specs as a greedy search finds. Usage: tools/make_specs.py [FILE]."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise import masks

N = 256  # as in tilewise/_specs.py
IDS = np.zeros(N, np.int64)
TABLE = np.zeros((4, N), np.float32)

MASKS: dict[str, Any] = {
    "band": None,
    "chunk": None,
    "key_padding": masks.key_padding(np.zeros((1, N), bool)),
    "documents": masks.documents(IDS),
    "prefix": masks.prefix(np.zeros(1, np.int32)),
    "intervals": masks.intervals(np.zeros((1, 1, N, 2), np.int32), causal=True),
    "row_intervals": masks.row_intervals(np.zeros(N, np.int32), np.zeros(N, np.int32)),
    "tree": masks.tree(np.zeros((N, 2), np.uint32), 48),
    "blocks": masks.blocks(np.zeros((4, 4), np.uint8), 64, 64),
    "dense": masks.dense(np.zeros((1, 1, N, N), bool)),
    "mod": masks.mod(lambda b, h, i, j, s: (abs(i - j) < s.reach[h]) | (j % s.step == 0), reach=IDS[:4], step=7),
    "joined": masks.causal() & (masks.documents(IDS.astype(np.int32)) | ~masks.window(16, 16))
    | masks.intervals(np.zeros((1, 1, N, 4), np.int32), causal=False),
}
SCORE_MODS: dict[str, Any] = {
    "none": None,
    "plain": tilewise.score_mod(lambda x, b, h, i, j, s: x - s.rate * abs(i + s.q_offset - j), rate=0.1),
    "array": tilewise.score_mod(lambda x, b, h, i, j, s: x + s.table[h, j], table=TABLE),
}
FACTORS: dict[str, list[Any]] = {
    "mask": list(MASKS),
    "dtype": ["float16", "bfloat16", "float32", "float64"],
    "head_dim": [64, 128, 256, (192, 128)],
    "score_mod": list(SCORE_MODS),
    **{flag: [False, True] for flag in ("softcap", "bias", "alibi", "sinks", "dropout")},
}


def pairs(row: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for one, other in itertools.combinations(FACTORS, 2):
        yield one, row[one], other, row[other]


def cover() -> list[dict[str, Any]]:
    """Rows that hold every pair of values of two factors; of many random rows always the one with most new pairs."""
    draw = random.Random(0)
    missing = {
        (one, a, other, b)
        for one, other in itertools.combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
    }
    rows = []
    while missing:
        one, a, other, b = min(missing, key=repr)
        candidates = []
        for _ in range(400):
            row = {name: draw.choice(values) for name, values in FACTORS.items()}
            row[one], row[other] = a, b
            candidates.append(row)
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs(row)))
        missing.difference_update(pairs(best))
        rows.append(best)
    return rows


def spec_of(row: dict[str, Any]) -> dict[str, Any]:
    dims = row["head_dim"] if isinstance(row["head_dim"], tuple) else (row["head_dim"],) * 2
    q, v = np.empty((1, N, 4, dims[0]), np.float32), np.empty((1, N, 4, dims[1]), np.float32)
    from tilewise._problem import ARRAYS, call_from

    call = call_from("make_specs", q, q, v, {"mask": MASKS[row["mask"]], "score_mod": SCORE_MODS[row["score_mod"]]})
    settings = call.settings
    spec: dict[str, Any] = {"dtype": row["dtype"], "head_dim": dims[0]}
    if dims[1] != dims[0]:
        spec["head_dim_v"] = dims[1]
    if row["mask"] == "band":
        spec.update(causal=True, window=True)
    elif row["mask"] == "chunk":
        spec.update(chunk=True)
    else:
        spec["mask"] = settings.mask
    if settings.score_mod:
        spec["score_mod"] = settings.score_mod
    if len(call.arrays) > ARRAYS:
        spec["arrays"] = [f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in call.arrays[ARRAYS:] if a is not None]
    if settings.scalars:
        spec["scalars"] = len(settings.scalars)
    spec.update({flag: True for flag in ("softcap", "bias", "alibi", "sinks", "dropout") if row[flag]})
    on = [flag for flag in ("softcap", "bias", "alibi", "sinks", "dropout") if row[flag]]
    mod = [] if row["score_mod"] == "none" else [f"score_mod:{row['score_mod']}"]
    dim = f"d{dims[0]}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]}"
    return {"name": " ".join([row["dtype"], dim, row["mask"], *mod, *on]), **spec}


# What models call all day: each alone, without the other options. Tuned are the passes that no arch may spill in.
PLAIN: list[tuple[str, int, str, list[str]]] = [
    ("float16", 64, "band", ["forward"]),
    ("bfloat16", 64, "band", ["forward"]),
    ("bfloat16", 64, "key_padding", []),
    ("float16", 128, "band", ["forward", "backward"]),
    ("bfloat16", 128, "band", ["forward", "backward"]),
    ("float16", 256, "band", ["forward"]),
    ("bfloat16", 256, "band", ["forward"]),
    ("float32", 64, "band", []),
    ("float32", 128, "key_padding", []),
]


def plain_specs() -> Iterator[dict[str, Any]]:
    off = {"score_mod": "none", **dict.fromkeys(("softcap", "bias", "alibi", "sinks", "dropout"), False)}
    for dtype, dim, mask, tuned in PLAIN:
        spec = spec_of({**off, "dtype": dtype, "head_dim": dim, "mask": mask})
        name = spec["name"] + " alone"
        if not tuned:
            yield {**spec, "name": name}
            continue
        for each in ("forward", "backward"):
            part = {**spec, "name": f"{name} {each}", "passes": [each]}
            yield {**part, "tuned": True} if each in tuned else part


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "python/tilewise/specs.json")
    specs = [*plain_specs(), *map(spec_of, cover())]
    lines = ",\n".join("  " + json.dumps(spec) for spec in specs)
    target.write_text(
        '{\n "about": "Made by tools/make_specs.py; tilewise/_specs.py says what stands in a spec.",\n "specs": [\n'
        + lines
        + "\n ]\n}\n"
    )
    print(f"{target}: {len(specs)} specs")


if __name__ == "__main__":
    main()
