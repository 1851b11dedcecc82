"""A mask as a picture of its tiles, in text: what kernels skip, compute whole, and look into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from . import _ext
from ._problem import Call, call_from

SKIP, PARTIAL, FULL = 0, 1, 2  # TileClass of src/core/mask.hpp
NAMES: Final = {FULL: "full", PARTIAL: "partial", SKIP: "skip"}
MARKS: Final = {FULL: "█", PARTIAL: "▒", SKIP: "·"}
COLORS: Final = {FULL: "#0072B2", PARTIAL: "#E69F00", SKIP: "#eeeeee"}
_MOST_TILES: Final = 512  # of an axis, unless a tile size is asked for


@dataclass
class TileMap:
    """Classes of the tiles of one head of one sequence, [rows of tiles, columns of tiles]."""

    classes: np.ndarray[Any, Any]
    tile: tuple[int, int]  # queries, keys

    @property
    def counts(self) -> dict[int, int]:
        return {each: int((self.classes == each).sum()) for each in NAMES}

    def shares(self) -> dict[int, str]:
        """Name, count and share of each class."""
        total = max(1, self.classes.size)
        return {each: f"{NAMES[each]} {count} ({100 * count / total:.1f}%)" for each, count in self.counts.items()}

    def legend(self) -> list[str]:
        return [f"{MARKS[each]} {text}" for each, text in self.shares().items()]

    def picture(self, columns: int) -> list[str]:
        """Lines of at most `columns` marks. Where tiles have to share a mark, it is partial unless all are alike."""
        factor = max(1, -(-self.classes.shape[1] // columns))
        lines = []
        for row in range(0, self.classes.shape[0], factor):
            line = ""
            for column in range(0, self.classes.shape[1], factor):
                cell = self.classes[row : row + factor, column : column + factor]
                line += MARKS[int(cell.flat[0]) if (cell == cell.flat[0]).all() else PARTIAL]
            lines.append(line)
        return lines


def tile_map(
    q: Any, k: Any, v: Any, *, b: int = 0, h: int = 0, tile: tuple[int, int] | None = None, **options: Any
) -> TileMap:
    """Tiles of the mask of `tilewise.attention(q, k, v, **options)`, for sequence b and query head h.

    tile: queries and keys of a tile; the default is 64 of each, or more where that would be more than 512 tiles. The
    numbers of q, k and v do not matter. Works in host memory.
    """
    return map_of(call_from("tile_map", q, k, v, options), b, h, tile)


def map_of(call: Call, b: int, h: int, tile: tuple[int, int] | None) -> TileMap:
    problem = call.problem()

    def classes(tile_q: int, tile_kv: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(_ext.mask_tiles(problem, b, h, tile_q, tile_kv), np.uint8)

    if tile is None:
        longest = max(1, len(classes(64, 2**40)), len(classes(2**40, 64)))
        size = 64
        while longest * 64 > size * _MOST_TILES:
            size *= 2
        tile = size, size
    rows = len(classes(tile[0], 2**40))
    return TileMap(classes(*tile).reshape(rows, -1) if rows else np.zeros((0, 0), np.uint8), tile)
