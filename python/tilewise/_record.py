"""Calls written to a file, to be run again: TILEWISE_RECORD=FILE writes it, `tilewise replay` and `--from` read it.

One line of JSON for every pass that is run, forward or backward, written before it runs, so that a crash is on record
too. A line holds all of a call but the numbers of its float arrays: those are there with TILEWISE_RECORD_DATA=1 only.
Integer and bool arrays (lengths, documents, masks) are always there, because they decide what is computed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import sys
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from . import _ext
from ._arrays import ANYWHERE, Array, as_array, is_torch, to_host, view
from ._errors import InvalidArgumentError, message
from ._problem import ARRAYS, NAMES, SLOPES, Q, Rng, Settings

# Read once: a call that is not recorded pays for looking at FILE, and for nothing else.
FILE: str = os.environ.get("TILEWISE_RECORD", "")
DATA: bool = os.environ.get("TILEWISE_RECORD_DATA", "") not in ("", "0")

FORMAT: Final = 1
ALIGNMENT: Final = 64  # addresses are kept modulo this: kernels are chosen by it
DTYPES: Final = {
    1: "float64", 2: "float32", 3: "float16", 4: "bfloat16", 5: "int64", 6: "int32", 7: "int16", 8: "int8", 9: "uint8",
    10: "bool", 11: "uint32",
}  # fmt: skip
ITEM_BYTES: Final = {name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in DTYPES.values()}
_TUPLES: Final = ("window", "scalars", "array_names", "mod_names")
_lock = threading.Lock()


# ----------------------------------------------------------------------------------------------------------- writing


def forward(settings: Settings, arrays: Sequence[Array | None], rng: Rng) -> None:
    _write("forward", settings, arrays, rng, {})


def backward(
    settings: Settings, arrays: Sequence[Array | None], rng: Rng, do: Array, dlse: Array | None, wanted: Iterable[int]
) -> None:
    _write("backward", settings, arrays, rng, {"wanted": [*wanted], "do": do, "dlse": dlse})


def _write(pass_: str, settings: Settings, arrays: Sequence[Array | None], rng: Rng, more: dict[str, Any]) -> None:
    global FILE
    try:
        # Copies to the host would break the capture of a CUDA graph.
        readable = not (settings.cuda >= 0 and _capturing())
        pair = rng if isinstance(rng, tuple) else to_host(rng).tolist() if readable else None  # type: ignore[union-attr]
        kind = type(arrays[Q]).__module__.partition(".")[0]
        line: dict[str, Any] = {
            "tilewise": _ext.version(), "format": FORMAT, "pass": pass_, "kind": kind,
            "device": "cpu" if settings.cuda < 0 else f"cuda:{settings.cuda}",
            "settings": {name: getattr(settings, name) for name in Settings.__slots__},
            "rng": pair,
            "arrays": [_described(array, readable) for array in arrays], **more,
        }  # fmt: skip
        for name in ("do", "dlse"):
            if name in line:
                line[name] = _described(line[name], readable)
        text = json.dumps(line) + "\n"
        with _lock, open(FILE, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # other processes may write to it too
            file.write(text)
    except Exception as error:  # whatever it is: the call goes on
        warnings.warn(f"TILEWISE_RECORD={FILE}: recording has stopped: {type(error).__name__}: {error}", stacklevel=4)
        FILE = ""


def _capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _described(array: Array | None, readable: bool) -> dict[str, Any] | None:
    if array is None:
        return None
    address, number, shape, strides = view(array)
    dtype = DTYPES[number]
    about: dict[str, Any] = {
        "dtype": dtype, "shape": [*map(int, shape)], "strides": [*map(int, strides)], "align": address % ALIGNMENT,
    }  # fmt: skip
    if readable and (DATA or "float" not in dtype):
        about["data"] = _encoded(array, dtype, shape, strides)
    return about


def _encoded(array: Array, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> str:
    once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in strides])  # broadcast axes
    array = array[once] if isinstance(array, np.ndarray) else to_host(array[once])
    if is_torch(array):
        torch = sys.modules["torch"]
        array = (array.contiguous().view(torch.int16) if dtype == "bfloat16" else array).numpy()
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 1)).decode()


# ----------------------------------------------------------------------------------------------------------- reading


@dataclass
class Recorded:
    """One line of a file."""

    path: Path
    number: int
    pass_: str
    kind: str  # numpy, torch or cupy
    device: str
    settings: dict[str, Any]
    rng: tuple[int, int] | None
    arrays: list[dict[str, Any] | None]
    wanted: list[int]
    do: dict[str, Any] | None
    dlse: dict[str, Any] | None

    def name(self, place: int) -> str:
        """What the user calls the array at this place."""
        if place < ARRAYS:
            return NAMES[place]
        names, number = self.settings["array_names"], place - ARRAYS  # a compiled call has lost them
        return str(names[number]) if number < len(names) else f"arrays[{number}]"

    def settings_for(self, device: str, torch_arrays: bool, backend: str | None) -> Settings:
        """`backend` None = the recorded one, unless the call moves to a device of another kind."""
        settings = Settings()
        for name in Settings.__slots__:
            value = self.settings[name]
            setattr(settings, name, tuple(value) if name in _TUPLES and value is not None else value)
        settings.is_torch = torch_arrays
        settings.cuda = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
        moved = (settings.cuda < 0) != (self.device == "cpu")
        settings.backend = backend if backend is not None else "" if moved else settings.backend
        return settings

    def make_arrays(self, device: str, in_torch: bool) -> list[Array | None]:
        return [
            None if about is None else make_array(about, device, in_torch, place, self.name(place))
            for place, about in enumerate(self.arrays)
        ]

    def make_gradient(self, name: str, device: str, in_torch: bool) -> Array | None:
        about = self.do if name == "do" else self.dlse
        place = 1000 if name == "do" else 1001  # of the draw: past those of all arrays
        return None if about is None else make_array(about, device, in_torch, place, name)


def make_array(about: Mapping[str, Any], device: str, in_torch: bool, place: int, name: str) -> Array:
    """An array as it was described: shape, strides and alignment, with its numbers, or else drawn ones."""
    dtype, shape, strides = about["dtype"], about["shape"], about["strides"]
    size = ITEM_BYTES[dtype]
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)] if 0 not in shape else [0]
    before = -sum(step for step in reach if step < 0)
    first = before + (about["align"] // size - before) % (ALIGNMENT // size)  # element 0, from an aligned address
    last = first + sum(step for step in reach if step > 0)
    memory = np.zeros((last + 1) * size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    layout = memory, begin + first * size, [stride * size for stride in strides]
    np.ndarray(shape, f"u{size}", *layout)[...] = _numbers(about, place, name)
    if in_torch:
        torch = sys.modules["torch"]
        flat = torch.from_numpy(memory)[begin : begin + (last + 1) * size].view(getattr(torch, dtype)).to(device)
        array = flat.as_strided(shape, [*map(abs, strides)], flat.storage_offset() + first)
        return as_array(array, name, device=ANYWHERE)
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            advice = "pip install ml_dtypes, which NumPy's bfloat16 comes from."
            raise InvalidArgumentError(
                message(name, "a NumPy array of bfloat16", "other dtypes here", advice)
            ) from None
        return as_array(np.ndarray(shape, ml_dtypes.bfloat16, *layout), name, device=ANYWHERE)
    return as_array(np.ndarray(shape, dtype, *layout), name, device=ANYWHERE)


def _numbers(about: Mapping[str, Any], place: int, name: str) -> Any:
    """Bits of the elements, one of each broadcast axis."""
    dtype, size = about["dtype"], ITEM_BYTES[about["dtype"]]
    shape = [1 if stride == 0 else n for n, stride in zip(about["shape"], about["strides"], strict=True)]
    if 0 in about["shape"]:
        shape = about["shape"]
    if "data" in about:
        try:
            raw = zlib.decompress(base64.b64decode(about["data"], validate=True))
            return np.frombuffer(raw, f"u{size}").reshape(shape)
        except (ValueError, zlib.error) as error:
            raise InvalidArgumentError(
                message(name, f"data that cannot be read ({error})", "what TILEWISE_RECORD wrote")
            ) from None
    if "float" not in dtype:
        raise InvalidArgumentError(
            message(name, "no data: the call was captured in a CUDA graph", "calls outside of a capture")
        )
    drawn = np.random.default_rng(place).standard_normal(shape)
    if place == SLOPES:
        drawn = np.abs(drawn) / 8  # others would leave one key to a row
    if dtype == "bfloat16":  # the upper half, which is a bfloat16
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(dtype).view(f"u{size}")


def read(path: Path) -> Iterator[Recorded]:
    """The calls of a file, one after the other. Raises at the first line that is none."""
    with open(path) as file:
        for number, line in enumerate(file, 1):
            yield _parsed(path, number, line)


def read_one(text: str) -> Recorded:
    """FILE:LINE, or FILE for its first line."""
    name, colon, digits = text.rpartition(":")
    number = 1
    if colon and digits.isdecimal() and not Path(text).exists():
        text, number = name, int(digits)
    count = 0
    for recorded in read(Path(text)):
        count += 1
        if count == number:
            return recorded
    raise InvalidArgumentError(message("--from", f"line {number} of {text}", f"1 to {count}, its lines"))


def _parsed(path: Path, number: int, line: str) -> Recorded:
    where = f"{path}:{number}"
    allowed = "a line that TILEWISE_RECORD wrote"
    try:
        found = json.loads(line)
    except ValueError:
        cut = not line.endswith("\n")
        seen = f"a line that ends after {len(line)} characters" if cut else "a line that is no JSON"
        advice = "The program was ended while it wrote; remove the line to replay the others." if cut else ""
        raise InvalidArgumentError(message(where, seen, allowed, advice)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        seen = f"format {found['format']}" if isinstance(found, dict) and "format" in found else "other JSON"
        raise InvalidArgumentError(message(where, seen, f"{allowed}, format {FORMAT}"))
    try:
        if found["settings"].keys() != {*Settings.__slots__} or len(found["arrays"]) < ARRAYS:
            version = f"a call of tilewise {found['tilewise']}"
            raise InvalidArgumentError(
                message(where, version, f"those of {_ext.version()}", "Its options are others; record it again.")
            )
        return Recorded(
            path, number, found["pass"], found["kind"], found["device"], found["settings"],
            None if found["rng"] is None else tuple(found["rng"]), found["arrays"], found.get("wanted", []),
            found.get("do"), found.get("dlse"),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(message(where, f"a line without {error}", allowed)) from None
