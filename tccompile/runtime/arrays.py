"""Arrays that come from and go to other libraries: NumPy, DLPack and `__cuda_array_interface__`.

DLPack's structures are those of dlpack.h, https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tccompile.errors import InputError
from tccompile.expr import DType, Shape
from tccompile.runtime.driver import Device, Handle, Memory

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_NAME = b"dltensor"  # a capsule keeps the pointer, so this must live on


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype, _capsule_is.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
# A capsule that is being destroyed has no references left, so its destructor takes it as a bare pointer.
_bare_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_bare_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@dataclass(frozen=True)
class DeviceBuffer:
    """An array on a GPU that somebody else owns. `owner` keeps it alive; `stream` is where it is being written, if known."""

    address: int
    shape: Shape
    dtype: DType
    contiguous: bool
    owner: Any
    stream: int | None = None


def adopt(array: Any, ordinal: int | None, stream: int, name: str) -> np.ndarray | DeviceBuffer:
    """A caller's array: a NumPy array if it lies in host memory, else where it lies on the GPU. Nothing is copied.

    ordinal  the GPU that the session runs on, or None for the CPU
    stream   the CUstream that will use it: the producer's own work on a DLPack array is ordered before what comes there
    Raises InputError, which names the input or output `name`, if it lies on another device or cannot be read.
    """
    if isinstance(array, np.ndarray):
        return array
    try:
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            return _from_dlpack(array, ordinal, stream, name)
        if hasattr(array, "__cuda_array_interface__"):
            return _from_interface(array, ordinal, name)
        if hasattr(array, "__array__"):
            return np.asarray(array)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: cannot read the given {type(array).__name__} ({error})") from error
    raise InputError(f"{name}: a {type(array).__name__} is not an array; give a NumPy array, or one with __dlpack__")


def _from_dlpack(array: Any, ordinal: int | None, stream: int, name: str) -> np.ndarray | DeviceBuffer:
    device_type, device_id = array.__dlpack_device__()
    on_gpu = device_type in (_CUDA, _CUDA_MANAGED)
    if on_gpu:
        _check_device(int(device_id), ordinal, name)
    # DLPack numbers the legacy default stream 1; 0 is not allowed there.
    capsule = array.__dlpack__(stream=stream or 1) if on_gpu else array.__dlpack__()
    if not _capsule_is(capsule, _NAME):
        raise InputError(f"{name}: the given {type(array).__name__} hands out a DLPack capsule of an unknown kind")
    tensor = ctypes.cast(_capsule_pointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    dtype = _dtype(tensor.code, tensor.bits, tensor.lanes, name)
    address = (tensor.data or 0) + tensor.byte_offset
    if on_gpu:
        return DeviceBuffer(address, shape, dtype, _contiguous(shape, strides), (array, capsule))
    if device_type not in (_CPU, _CUDA_HOST):
        raise InputError(f"{name}: lies on a device that is neither the host nor an NVIDIA GPU (DLPack type {device_type})")
    return _host(address, shape, strides, dtype, capsule)


def _host(address: int, shape: Shape, strides: tuple[int, ...] | None, dtype: DType, owner: Any) -> np.ndarray:
    """A NumPy array over memory that `owner` holds."""

    class Memory:
        __array_interface__ = {  # noqa: RUF012
            "shape": shape,
            "typestr": dtype.numpy.str,
            "data": (address or 1, False),
            "strides": None if strides is None else tuple(s * dtype.size for s in strides),
            "version": 3,
        }

    memory = Memory()
    memory.owner = owner  # type: ignore[attr-defined]
    return np.asarray(memory)


def _check_device(lies_on: int | None, ordinal: int | None, name: str) -> None:
    """`lies_on` is None for an array on a GPU that does not say which."""
    if ordinal is None:
        raise InputError(f"{name} lies on a GPU, and the session runs on the CPU; copy it to the host first")
    if lies_on not in (None, ordinal):
        raise InputError(f"{name} lies on gpu:{lies_on}, and the session runs on gpu:{ordinal}")


def _from_interface(array: Any, ordinal: int | None, name: str) -> DeviceBuffer:
    _check_device(None, ordinal, name)
    said = array.__cuda_array_interface__
    numpy_type = np.dtype(said["typestr"])
    shape, strides = tuple(said["shape"]), said.get("strides")
    if strides is not None:
        strides = tuple(s // max(numpy_type.itemsize, 1) for s in strides)
    dtype = _dtype(_CODES.get(numpy_type.kind, -1), numpy_type.itemsize * 8, 1, name)
    if said.get("mask") is not None:
        raise InputError(f"{name}: masked arrays are not taken")
    return DeviceBuffer(said["data"][0] or 0, shape, dtype, _contiguous(shape, strides), array, said.get("stream"))


def _dtype(code: int, bits: int, lanes: int, name: str) -> DType:
    if lanes == 1 and code == _BFLOAT and bits == 16:
        return DType.BF16
    for dtype in DType:
        own = dtype.numpy
        if dtype is not DType.BF16 and lanes == 1 and (_CODES[own.kind], own.itemsize * 8) == (code, bits):
            return dtype
    raise InputError(f"{name}: elements of {bits} bits and kind {code} are not taken")


def _contiguous(shape: Shape, strides: tuple[int, ...] | None) -> bool:
    """Whether elements lie in row-major order without gaps."""
    if strides is None or 0 in shape:
        return True
    step = 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True


class DeviceArray:
    """An output on the GPU: `torch.from_dlpack(y)`, `cupy.asarray(y)`, or `numpy.asarray(y)`, which copies.

    Its memory is freed with it and with whatever was made of it.
    """

    def __init__(self, memory: Memory, shape: Shape, dtype: DType):
        self.memory, self.shape, self._type = memory, shape, dtype
        self.stream: int | None = None  # where it is still being written until `ready`, or None if it is complete
        self.ready: Handle | None = None

    @property
    def dtype(self) -> np.dtype:
        return self._type.numpy

    @property
    def device(self) -> Device:
        return self.memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._type is DType.BF16:
            raise AttributeError("__cuda_array_interface__ has no bfloat16; use DLPack")
        data = (self.memory.address, False)
        stream = None if self.stream is None else self.stream or 1  # 0 is not allowed there, and 1 is the same
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": None, "version": 3, "stream": stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device.ordinal

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A capsule for a consumer that works on `stream`, which is made to wait for the array; -1 for no waiting.

        Raises BufferError for another device or a copy.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("only where it lies, and without a copy")
        if self.ready is not None and stream != -1:
            with self.device as cu:
                cu.cuStreamWaitEvent(stream or 1, self.ready.value, 0)
        return _capsule(self, self.memory.address, self.shape, self._type, self.device.ordinal)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on the GPU cannot be seen by NumPy without a copy")
        out = np.empty(self.shape, self.dtype)
        with self.device as cu:
            if self.ready is not None:
                cu.cuEventSynchronize(self.ready.value)
            if out.nbytes:
                cu.cuMemcpyDtoH(out.ctypes.data, self.memory.address, out.nbytes)
        return out if dtype is None else out.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self._type.value}, device={self.device})"


_exported: dict[int, tuple[Any, ...]] = {}
"""What capsules that are alive refer to, by the address of their DLManagedTensor."""


@_Deleter
def _delete(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


@_Destructor
def _destroy(capsule: int) -> None:
    if _bare_is(capsule, _NAME):  # nobody took it
        _exported.pop(_bare_pointer(capsule, _NAME), None)


def _capsule(owner: Any, address: int, shape: Shape, dtype: DType, ordinal: int) -> Any:
    code = _BFLOAT if dtype is DType.BF16 else _CODES[dtype.numpy.kind]
    extents, steps, step = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(), 1
    for axis in reversed(range(len(shape))):
        steps[axis], step = step, step * shape[axis]
    pointer = ctypes.POINTER(ctypes.c_int64)
    bits = dtype.size * 8
    tensor = _Tensor(
        address, _CUDA, ordinal, len(shape), code, bits, 1, ctypes.cast(extents, pointer), ctypes.cast(steps, pointer), 0
    )
    managed = _Managed(tensor, None, _delete)
    where = ctypes.addressof(managed)
    _exported[where] = (owner, managed, extents, steps)
    return _capsule_new(where, _NAME, _destroy)
