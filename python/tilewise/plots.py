"""The pictures of `tilewise demo`, `bench` and `show`. Needs matplotlib and nothing else; reads only what they made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

if TYPE_CHECKING:
    from .show import TileMap

matplotlib.use("Agg")  # a file, never a window
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Okabe and Ito's palette stays apart for every common colour blindness; the markers do so without any colour.
STYLES = {
    "tilewise": {"color": "#D55E00", "marker": "o", "linewidth": 2.4, "zorder": 3},
    "sdpa": {"color": "#0072B2", "marker": "s", "linewidth": 1.6},
    "sdpa-flash": {"color": "#56B4E9", "marker": "D", "linewidth": 1.6},
    "standard": {"color": "#444444", "marker": "^", "linewidth": 1.6, "linestyle": "--"},
    "cudnn": {"color": "#0072B2", "marker": "s", "linewidth": 1.6},
    "fa2": {"color": "#56B4E9", "marker": "D", "linewidth": 1.6},
    "efficient": {"color": "#009E73", "marker": "v", "linewidth": 1.6},
    "flex": {"color": "#CC79A7", "marker": "P", "linewidth": 1.6},
    "math": {"color": "#444444", "marker": "^", "linewidth": 1.6, "linestyle": "--"},
}


def _tokens(count: float, _: object = None) -> str:
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def _style_axes(axes: Any, lengths: list[int], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(unit)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, rows: list[dict[str, Any]], pass_: str, name: str, title: str, value: str, scale: float) -> None:
    """One implementation over the lengths at which it ran; a mark at the end tells that it did not fit further on."""
    entries = [(row["tokens"], row[pass_][name]) for row in rows if name in row[pass_]]
    points = [(tokens, entry[value] * scale) for tokens, entry in entries if entry.get(value)]
    if points:
        axes.plot(*zip(*points, strict=True), label=title, markersize=6, **STYLES[name])
        if any("refused" in entry for _, entry in entries):
            axes.annotate("out of memory", points[-1], textcoords="offset points", xytext=(6, 6), fontsize=8,
                          color=STYLES[name]["color"])  # fmt: skip


def demo_picture(report: dict[str, Any], path: Path) -> Path:
    """Time and memory over the sequence length, and how similar the sentences are."""
    rows, model = report.get("sweep") or [], report.get("model")
    panels = (3 if rows else 0) + (1 if model else 0)
    shape = (2, 2) if panels == 4 else (1, panels)
    figure, grid = plt.subplots(*shape, figsize=(11.5, 8.6) if panels == 4 else (5.6 * panels, 4.6), squeeze=False)
    axes = list(grid.flat)
    if rows:
        lengths, titles = [row["tokens"] for row in rows], report["implementations"]
        for place, title, unit, pass_, value, scale in (
            (axes[0], "Forward: time", "milliseconds", "fwd", "median", 1e3),
            (axes[1], "Backward: time", "milliseconds", "bwd", "median", 1e3),
            (axes[2], "Training step: peak memory beyond the inputs", "MiB", "bwd", "peak_bytes", 2.0**-20),
        ):
            for name, label in titles.items():
                _curve(place, rows, pass_, name, label, value, scale)
            _style_axes(place, lengths, title, unit)
        axes[0].legend(frameon=False)
    if model:
        last = axes[-1]
        image = last.imshow(model["similarity"], cmap="cividis", vmin=0, vmax=1)
        last.set_title("MiniLM with Tilewise: sentence similarity", loc="left", fontsize=11, fontweight="bold")
        topics = model["topics"]
        size = len(model["sentences"]) // len(topics)
        middles = [size * index + (size - 1) / 2 for index in range(len(topics))]
        last.set_xticks(middles, topics, rotation=30, ha="right")
        last.set_yticks(middles, topics)
        last.tick_params(length=0)
        for index in range(1, len(topics)):  # thin lines between topics
            last.axhline(size * index - 0.5, color="white", linewidth=0.8)
            last.axvline(size * index - 0.5, color="white", linewidth=0.8)
        figure.colorbar(image, ax=last, shrink=0.8, label="cosine similarity")
    about = report["about"]
    figure.suptitle(report["settings"]["title"], fontsize=12, x=0.01, ha="left")
    figure.text(
        0.01, 0.005, f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "
        f"tilewise {about['tilewise']} {(about['commit'] or '')[:12]}, {about['date'][:10]}", fontsize=8, color="#555555",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.02, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def bench_picture(report: dict[str, Any], path: Path) -> Path:
    """How long each peer takes against Tilewise, cell by cell: the median of the rounds with the range of all."""
    cells, titles = report["cells"], report["implementations"]
    peers = [name for name in titles if name != "tilewise"]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.34 * len(cells)))
    for offset, name in enumerate(peers):
        rows = [(index, cell["ratios"][name]) for index, cell in enumerate(cells) if name in cell["ratios"]]
        if not rows:
            continue
        middle = [ratio["median"] for _, ratio in rows]
        spread = [
            [ratio["median"] - ratio["min"] for _, ratio in rows],
            [ratio["max"] - ratio["median"] for _, ratio in rows],
        ]
        places = [index + 0.22 * (offset - (len(peers) - 1) / 2) for index, _ in rows]
        axes.errorbar(middle, places, xerr=spread, fmt=STYLES[name]["marker"], color=STYLES[name]["color"], markersize=5,
                      elinewidth=1.2, label=titles[name])  # fmt: skip
    axes.axvline(1, color=STYLES["tilewise"]["color"], linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_yticks(range(len(cells)), [cell["name"] for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time of the peer / time of Tilewise, same round (right of the line: Tilewise is faster)")
    axes.set_title(f"{report['device']}, {report['threads']} threads, torch {report['torch']}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def gpu_bench_picture(report: dict[str, Any], path: Path) -> Path:
    """TFLOP/s over the sequence length, a panel for every pass, mask and head dim; other masks as bars below."""
    from .gpu_bench import IMPLS, TITLES

    cells = report["cells"]
    curves = [row for row in cells if row["mask"] in ("full", "causal")]
    bars = [row for row in cells if row["mask"] not in ("full", "causal")]
    rows = list(dict.fromkeys((row["pass"], row["mask"]) for row in curves))
    dims = sorted({row["head_dim"] for row in curves}) or [0]
    height = len(rows) + (1 if bars else 0)
    figure = plt.figure(figsize=(4.6 * max(2, len(dims)), 3.2 * height))
    grid = figure.add_gridspec(height, len(dims))
    handles: dict[str, Any] = {}
    for down, (pass_, mask) in enumerate(rows):
        for across, dim in enumerate(dims):
            panel = [row for row in curves if (row["pass"], row["mask"], row["head_dim"]) == (pass_, mask, dim)]
            axes = figure.add_subplot(grid[down, across])
            for name in IMPLS:
                points = sorted((row["seqlen"], row["tflops"]) for row in panel if row["impl"] == name)
                if points:
                    handles[name] = axes.plot(*zip(*points, strict=True), markersize=5, **STYLES[name])[0]
            lengths = sorted({row["seqlen"] for row in panel}) or [1]
            title = f"{'forward' if pass_ == 'fwd' else 'backward'}, {mask}, head dim {dim}"
            _style_axes(axes, lengths, title, "TFLOP/s" if across == 0 else "")
            axes.set_yscale("linear")
            axes.set_ylim(bottom=0)
            if down + 1 < len(rows):
                axes.set_xlabel("")
    if bars:
        axes = figure.add_subplot(grid[-1, :])
        kinds = list(dict.fromkeys((row["pass"], row["mask"], row["seqlen"], row["head_dim"]) for row in bars))
        names = [name for name in IMPLS if any(row["impl"] == name for row in bars)]
        for offset, name in enumerate(names):
            found = {
                (row["pass"], row["mask"], row["seqlen"], row["head_dim"]): row for row in bars if row["impl"] == name
            }
            places = [
                place + 0.8 * ((offset + 0.5) / len(names) - 0.5) for place, kind in enumerate(kinds) if kind in found
            ]
            heights = [found[kind]["tflops"] for kind in kinds if kind in found]
            drawn = axes.bar(places, heights, 0.8 / len(names), color=STYLES[name]["color"])
            handles.setdefault(name, drawn)
        axes.set_xticks(range(len(kinds)), [f"{p} {mask}\n{n} tokens, head dim {d}" for p, mask, n, d in kinds])
        axes.set_ylabel("TFLOP/s of visible pairs")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), [TITLES[name] for name in handles], loc="upper right", ncols=len(handles) or 1,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.text(0.01, 0.995, f"{report['gpu']}, torch {report['torch']}, {(report['commit'] or '')[:12]} {report['date'][:10]}",
                fontsize=9, color="#555555", va="top")  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / (3.2 * height)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def mask_picture(found: TileMap, title: str, path: Path) -> Path:
    """Tiles of a mask: queries go down, keys to the right."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from .show import COLORS

    rows, columns = found.classes.shape
    extent = (0, columns * found.tile[1], rows * found.tile[0], 0)
    figure, axes = plt.subplots(figsize=(7.5, 7.5))
    colors = ListedColormap([COLORS[each] for each in sorted(COLORS)])
    axes.imshow(found.classes, cmap=colors, vmin=0, vmax=2, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(
        f"{title}\ntiles of {found.tile[0]} queries × {found.tile[1]} keys", loc="left", fontsize=9, wrap=True
    )
    patches = [Patch(facecolor=COLORS[each], edgecolor="#888888", label=text) for each, text in found.shares().items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return path
