"""As much of CuPy as tilewise asks for, on memory of the host, which the fake GPU takes for its own."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

state = SimpleNamespace(device=0, streams={0: 0, 1: 0}, capturing=False, waits=0)


class Device:
    def __init__(self, number: int) -> None:
        self.id = number
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(state.device)
        state.device = self.id
        return self

    def __exit__(self, *error: object) -> None:
        state.device = self._before.pop()


class ndarray:
    """An array that NumPy cannot read by accident."""

    def __init__(self, memory: np.ndarray[Any, Any], device: int) -> None:
        self._memory, self._device = memory, device
        self.data = SimpleNamespace(ptr=memory.ctypes.data)

    @property
    def device(self) -> Device:
        return Device(self._device)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes", "flags"):
            return getattr(self._memory, name)
        raise AttributeError(name)

    def _like(self, memory: np.ndarray[Any, Any]) -> ndarray:
        """Of what runs on the GPU: CuPy wants its device to be the current one."""
        assert state.device == self._device, "another device is current"
        return ndarray(memory, self._device)

    def __len__(self) -> int:
        return len(self._memory)

    def __setitem__(self, where: Any, value: ndarray) -> None:
        assert isinstance(value, ndarray), "CuPy takes no NumPy arrays here"
        assert state.device == self._device, "another device is current"
        self._memory[where] = value._memory

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        return self._like(self._memory.astype(dtype, copy=copy))

    def copy(self) -> ndarray:
        return self._like(self._memory.copy())

    def transpose(self, *axes: Any) -> ndarray:
        return ndarray(self._memory.transpose(*axes), self._device)

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._memory.reshape(*shape), self._device)

    def get(self) -> np.ndarray[Any, Any]:
        state.waits += 1
        return self._memory.copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device


def empty(shape: Any, dtype: Any) -> ndarray:
    """Aligned as CuPy's memory is, and never zeros."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.full(size + 512, 0xFF, np.uint8)
    first = -memory.ctypes.data % 512
    return ndarray(memory[first : first + size].view(dtype).reshape(shape), state.device)


def install() -> ModuleType:
    """What `import cupy` gives from now on."""
    module = ModuleType("cupy")
    stream = lambda: SimpleNamespace(ptr=state.streams[state.device], is_capturing=lambda: state.capturing)  # noqa: E731
    members = {
        "ndarray": ndarray,
        "empty": empty,
        "asarray": lambda x: ndarray(np.array(x), state.device),
        "broadcast_to": lambda x, shape: ndarray(np.broadcast_to(x._memory, shape), x._device),
        "cuda": SimpleNamespace(Device=Device, get_current_stream=stream),
    }
    vars(module).update(members)
    sys.modules["cupy"] = module
    return module
