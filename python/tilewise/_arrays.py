"""NumPy and CuPy arrays and torch tensors as views that the extension takes: (address, dtype number, shape, strides).

`as_array` decides once what an argument is and brings it into a form that can be viewed without a copy; `view` is the
cheap part that runs per call, made of attributes only (`__dlpack__` costs microseconds per tensor). Neither torch nor
CuPy is imported here: a tensor can only exist if somebody else has imported it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from . import _ext
from ._errors import InvalidArgumentError, UnsupportedError, message, refuse, refuse_type

# numpy.ndarray, torch.Tensor or cupy.ndarray. Not spelled out as a union, since torch and CuPy may be absent.
Array: TypeAlias = Any
# torch.device of a CUDA device, or CupyDevice; None = host memory.
Device: TypeAlias = Any
View: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Numbers of tilewise_dtype in tilewise.h.
FLOAT64: Final = 1
FLOAT32: Final = 2
_NUMPY_DTYPES: Final[dict[Any, int]] = {
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float16): 3,
    np.dtype(np.int64): 5,
    np.dtype(np.int32): 6,
    np.dtype(np.int16): 7,
    np.dtype(np.int8): 8,
    np.dtype(np.uint8): 9,
    np.dtype(np.bool_): 10,
    np.dtype(np.uint32): 11,
}
_DTYPE_NAMES: Final = "float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, uint32, bool"
_torch_dtypes: dict[Any, int] = {}


class _Anywhere:
    """In place of a device: which one is not decided yet."""


ANYWHERE: Final = _Anywhere()


@dataclass(frozen=True, slots=True)
class CupyDevice:
    """Where a CuPy array is; what is asked of a torch.device. Unlike one, it says that CuPy owns memory and streams."""

    type: ClassVar[str] = "cuda"
    index: int

    def __str__(self) -> str:
        return f"cuda:{self.index}"


# cupy.ndarray once CuPy is there. Compared with None: torch.compile does not take the truth of a class.
_cupy_type: type | None = None


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")  # not kept: torch.compile compiles again when a global that it saw has changed
    return torch is not None and isinstance(value, torch.Tensor)


def is_cupy(value: object) -> bool:
    """Whether `value` is a CuPy array, without importing CuPy."""
    global _cupy_type
    if _cupy_type is None:
        _cupy_type = getattr(sys.modules.get("cupy"), "ndarray", None)
    return _cupy_type is not None and isinstance(value, _cupy_type)


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or is_torch(value) or is_cupy(value)


def kind_of(array: Array) -> str:
    return "torch.Tensor" if is_torch(array) else "cupy.ndarray" if is_cupy(array) else "numpy.ndarray"


def device_of(array: Array) -> Device:
    """A CuPy array's CupyDevice, a tensor's torch.device (that of the CPU too), None for NumPy."""
    if is_torch(array):
        return array.device
    return CupyDevice(array.device.id) if is_cupy(array) else None


def on_gpu(value: Any) -> bool:
    return (is_torch(value) and value.device.type != "cpu") or is_cupy(value)


def torch_dtypes() -> dict[Any, int]:
    """torch dtype -> tilewise_dtype; filled when the first tensor comes by."""
    if not _torch_dtypes:
        torch = sys.modules["torch"]
        names = (
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
            "uint32",
        )
        for number, name in enumerate(names, start=1):
            if hasattr(torch, name):  # uint32 is young
                _torch_dtypes[getattr(torch, name)] = number
    return _torch_dtypes


def compiling() -> bool:
    """Whether this code is being traced (torch.compile, torch.export): no value of a tensor can be read then."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def traced() -> bool:
    """Whether operators are being recorded or replaced: by a compiler, or by a mode such as FakeTensorMode."""
    torch = sys.modules.get("torch")
    return torch is not None and (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0)


def stays(value: Any) -> bool:
    """Whether this is a tensor whose values cannot be read now: on a GPU, where that would wait, or traced."""
    return on_gpu(value) or (is_torch(value) and traced())


def as_array(
    value: Any, name: str, *, sequence: bool = False, meta: bool = False, device: Device | _Anywhere = None
) -> Array:
    """`value` as an ndarray or tensor that `view` can take; refuses everything that is not an array on `device`.

    The result is `value` itself wherever possible. Copied are: lists and tuples (only if `sequence`), arrays whose
    strides are not whole elements, unaligned arrays, and lazily negated tensors.
    With `meta`, tensors without data (meta device, FakeTensor) are taken too.
    """
    if type(value) is np.ndarray:
        if device is not None:
            check_place(value, name, device)
        return value if value.dtype in _NUMPY_DTYPES and value.flags.aligned else _numpy_array(value, name)
    if is_torch(value):
        return _torch_tensor(value, name, meta, device)
    if isinstance(value, np.ndarray):
        check_place(value, name, device)
        if isinstance(value, np.ma.MaskedArray):
            refuse_type(name, "a numpy.ma.MaskedArray", "numpy.ndarray", "Give its mask as mask=, and x.filled() here.")
        return _numpy_array(value.view(np.ndarray), name)
    if is_cupy(value):
        check_place(value, name, device)
        return _cupy_array(value, name)
    if sequence and isinstance(value, (list, tuple, np.generic)):
        if compiling():
            return sys.modules["torch"].tensor(value, device="cpu" if device is None or device is ANYWHERE else device)
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.asarray(value, dtype=object)
        array = _numpy_array(array, name)
        return array if device is None or device is ANYWHERE else _to_device(array, name, device)
    allowed = "numpy.ndarray, torch.Tensor or cupy.ndarray" + (", or a list of numbers" if sequence else "")
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    advice = "numpy.asarray(x) converts it." if hasattr(value, "__array__") or isinstance(value, (list, tuple)) else ""
    if _exports_device_memory(value):
        advice = "torch.from_dlpack(x) and cupy.from_dlpack(x) make one of the same memory."
    return refuse_type(name, f"a {where}{kind.__qualname__}", allowed, advice)


def _exports_device_memory(value: Any) -> bool:
    """Of another library's array: whether it is on a GPU."""
    try:
        return int(value.__dlpack_device__()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
    except Exception:  # no array at all, or one without memory, as JAX has while it traces
        return False


def _cupy_array(array: Array, name: str) -> Array:
    with array.device:  # where CuPy converts
        array = _known_dtype(array, name)
        return array.copy() if any(stride % array.itemsize for stride in array.strides) else array


def _numpy_array(array: np.ndarray[Any, Any], name: str) -> Array:
    array = _known_dtype(array, name)
    if not array.flags.aligned or any(stride % array.itemsize for stride in array.strides):
        array = np.array(array)  # a field of a structured array, a raw buffer at an odd address
    return array


def _known_dtype(array: Array, name: str) -> Array:
    """dtypes are NumPy's."""
    dtype = array.dtype
    if dtype == np.uint16:
        array = array.astype(np.int32)  # the same values in a dtype that the library has
    elif dtype not in _NUMPY_DTYPES:
        # bfloat16 of ml_dtypes is known by its name: importing ml_dtypes just to ask would cost every user.
        if dtype.name == "bfloat16" and dtype.itemsize == 2:
            _NUMPY_DTYPES[dtype] = 4
        elif not dtype.isnative:
            refuse(
                name,
                f"dtype {dtype} of the other byte order",
                "native byte order",
                "x.astype(x.dtype.newbyteorder('=')) converts it.",
            )
        else:
            refuse(name, f"dtype {dtype}", _DTYPE_NAMES)
    return array


def check_place(array: Array, name: str, device: Device | _Anywhere) -> None:
    """Refuses an array that is not on `device`: all of one call must be in one place, and of one library on a GPU."""
    of_cupy = is_cupy(array)
    if isinstance(device, CupyDevice) and not of_cupy:
        advice = "cupy.asarray(x) makes one, once for many calls."
        if on_gpu(array):
            advice = "cupy.from_dlpack(x) makes one of the same memory."
        refuse(name, f"a {kind_of(array)}", f"a cupy.ndarray on device {device}, that of q", advice)
    if isinstance(array, np.ndarray):
        if device is not None and device is not ANYWHERE:
            refuse(
                name,
                "a numpy.ndarray",
                f"a torch.Tensor on device {device}, that of q",
                "torch.as_tensor(x, device=q.device) makes one, once for many calls.",
            )
        return
    if of_cupy:
        where = device_of(array)
        if device is None:
            refuse(name, f"a cupy.ndarray on device {where}", "device cpu, that of q", "x.get() copies it there.")
        if device is ANYWHERE or device == where:
            return
        if isinstance(device, CupyDevice):
            advice = f"cupy.asarray(x) inside `with cupy.cuda.Device({device.index})` copies it there."
            refuse(name, f"a cupy.ndarray on device {where}", f"device {device}, that of q", advice)
        allowed = f"a torch.Tensor on device {device}, that of q"
        refuse(name, "a cupy.ndarray", allowed, "torch.from_dlpack(x) makes one of the same memory.")
    place = array.device
    if place.type == "meta":
        return
    if place.type not in ("cpu", "cuda"):
        raise UnsupportedError(message(name, f"a tensor on device {place}", "device cpu or cuda", "x.cpu() moves it."))
    if device is not ANYWHERE and (place.type != "cpu" if device is None else place != device):
        refuse(
            name,
            f"a tensor on device {place}",
            f"device {'cpu' if device is None else device}, that of q",
            "x.to(q.device) moves it.",
        )


def _to_device(array: np.ndarray[Any, Any], name: str, device: Device) -> Array:
    """Numbers of a Python list, for the kernels. The copy is queued, not waited for."""
    of_cupy = isinstance(device, CupyDevice)
    if of_cupy:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device.index):
            captured = cupy.cuda.get_current_stream().is_capturing()
    else:
        torch = sys.modules["torch"]
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captured:
        refuse(
            name,
            "a list, while a CUDA graph is captured",
            f"{'an array' if of_cupy else 'a tensor'} on device {device}",
            "Make it before the capture: a replay would read the list's memory again, long after it is gone.",
        )
    if of_cupy:
        return put_on(device, array)
    return torch.from_numpy(array).to(device, non_blocking=True)


def _torch_tensor(tensor: Any, name: str, meta: bool, wanted: Device | _Anywhere) -> Array:
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        _check_subclass(tensor, name, meta)
    if tensor.dtype not in torch_dtypes():
        if tensor.dtype == getattr(torch, "uint16", None):
            return tensor.to(torch.int32)
        if tensor.dtype.is_complex and name in ("q", "k", "v"):
            refuse(
                name, f"dtype {tensor.dtype}", "float64, float32, float16, bfloat16", "torch.view_as_real splits it."
            )
        refuse(name, f"dtype {tensor.dtype}", _DTYPE_NAMES)
    if tensor.layout is not torch.strided:
        refuse(name, f"a tensor of layout {tensor.layout}", "torch.strided", "x.to_dense() converts it.")
    place = tensor.device.type
    if place != "cpu" or wanted is not None:
        if place == "meta" and not meta:
            refuse(name, "a tensor on the meta device, which has no data", "a tensor on the CPU or a CUDA device")
        check_place(tensor, name, wanted)
    if not meta and tensor.is_neg():  # operators, which traced calls end in, resolve it themselves
        tensor = tensor.resolve_neg()
    return tensor


def _check_subclass(tensor: Any, name: str, meta: bool) -> None:
    """Subclasses that only add attributes have the memory of a plain tensor; those that dispatch may have none."""
    kind = type(tensor)
    if getattr(kind, "__torch_dispatch__", None) is getattr(sys.modules["torch"].Tensor, "__torch_dispatch__", None):
        return
    if kind.__name__ == "FakeTensor":
        if not meta:
            refuse(
                name,
                "a FakeTensor, which has no data",
                "a tensor with data",
                "Inside FakeTensorMode, call tilewise.attention; the other functions need data.",
            )
        return
    refuse_type(
        name,
        f"a {kind.__module__}.{kind.__qualname__}",
        "torch.Tensor",
        "For a jagged nested tensor give x.values() and x.offsets() as cu_seqlens."
        if "Nested" in kind.__name__
        else "",
    )


def put_on(device: Device, array: Array) -> Array:
    """A copy, of a NumPy array for CuPy, of a tensor for torch."""
    if isinstance(device, CupyDevice):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device.index):
            return cupy.asarray(array)
    return array.to(device)


def in_dtype(array: Array, name: str) -> Array:
    """The array itself or a copy in the dtype of this name."""
    if is_torch(array):
        return array.to(getattr(sys.modules["torch"], name))
    if is_cupy(array):
        with array.device:
            return array.astype(name, copy=False)
    return array.astype(name, copy=False)


def write(out: Array, array: Array) -> Array:
    if is_cupy(out):
        with out.device:
            out[...] = array
    else:
        out[...] = array
    return out


def to_host(array: Array | None) -> Array | None:
    """A copy without a gradient in host memory, of a CuPy array a NumPy array. Waits for the device."""
    return None if array is None else array.get() if is_cupy(array) else array.detach().cpu()


def view(array: Array, name: str = "array") -> View:
    """(address, dtype number, shape, strides) of an array from `as_array`."""
    if type(array) is np.ndarray:
        size = array.itemsize
        # NumPy gives an empty array strides of 0, which would look like a broadcast.
        strides = tuple([stride // size for stride in array.strides]) if array.size else (1,) * array.ndim
        return array.__array_interface__["data"][0], _NUMPY_DTYPES[array.dtype], array.shape, strides
    if is_cupy(array):
        size = array.itemsize
        strides = tuple([stride // size for stride in array.strides]) if array.size else (1,) * array.ndim
        return array.data.ptr, _NUMPY_DTYPES[array.dtype], tuple(array.shape), strides
    try:
        address = array.data_ptr()
    except RuntimeError as error:
        raise InvalidArgumentError(
            message(
                name,
                f"a tensor whose memory cannot be read ({str(error).splitlines()[0]})",
                "a plain tensor",
                "Inside torch.func transforms call tilewise.attention; the other functions take plain tensors.",
            )
        ) from None
    if address == 0 and array.numel() != 0:  # a lazy zero tensor, as autograd may hand one over
        refuse(name, "a tensor without memory", "a plain tensor", "x.clone() gives one.")
    return address, _torch_dtypes[array.dtype], array.shape, array.stride()


def shape_view(array: Array) -> View:
    """Like `view`, without an address: for planning, where tensors may have no data."""
    if type(array) is np.ndarray or is_cupy(array):
        return (0, *view(array)[1:])
    return 0, _torch_dtypes[array.dtype], array.shape, array.stride()


def as_view(value: Any, name: str = "array") -> View:
    """View of any object that `tilewise.attention` takes. The caller keeps `value` alive while the view is in use."""
    return view(as_array(value, name, device=ANYWHERE), name)


def check_output(array: Array, name: str, device: Device | _Anywhere = None) -> Array:
    """An array that results are written to: no copy may be made of it."""
    checked = as_array(array, name, device=device)
    if checked is not array and not (isinstance(array, np.ndarray) and np.may_share_memory(checked, array)):
        refuse(
            name,
            "an array that would have to be copied (byte order, alignment, dtype or a lazy negation)",
            "a plain one",
        )
    if isinstance(checked, np.ndarray):
        if not checked.flags.writeable:
            refuse(name, "a read-only array", "an array that can be written to")
    elif is_torch(checked) and checked.requires_grad and sys.modules["torch"].is_grad_enabled():
        refuse(name, "a tensor that requires grad", "one that does not", "x.detach(), or torch.no_grad().")
    return checked


@lru_cache(maxsize=1024)
def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Axes from outermost to innermost in memory. Axes of stride 0 keep their place among the others.

    The rule of torch.empty_like.
    """
    return _ext.axes_by_stride(shape, strides)


def empty(like: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """New array of the kind and on the device of `like`, in row-major order; dtype of `like` unless given."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype or like.dtype)
    if is_cupy(like):
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype or like.dtype)
    return sys.modules["torch"].empty(shape, dtype=dtype or like.dtype, device=like.device)


def empty_in_order(like: Array, shape: tuple[int, ...]) -> Array:
    """New array of the kind, dtype and rank of `like`, with its axes in memory in the order of `like`'s."""
    numpy = not is_torch(like)
    if like.flags.c_contiguous if numpy else like.is_contiguous():
        return empty(like, shape)
    order = _order(tuple(like.shape), tuple(like.strides if numpy else like.stride()))
    array = empty(like, tuple([shape[axis] for axis in order]))
    if order == tuple(range(len(order))):
        return array
    back = inverse(order)
    return array.transpose(back) if numpy else array.permute(back)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def accumulator(like: Array) -> Any:
    """dtype of lse: float64 for float64 inputs, else float32."""
    if not is_torch(like):
        return np.dtype(np.float64 if like.dtype == np.float64 else np.float32)
    torch = sys.modules["torch"]
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def is_float(array: Array) -> bool:
    """Whether the dtype can have a gradient."""
    return (torch_dtypes() if is_torch(array) else _NUMPY_DTYPES).get(array.dtype, 5) < 5
