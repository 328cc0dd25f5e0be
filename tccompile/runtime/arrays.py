"""Arrays that come from and go to other libraries: NumPy, DLPack and `__cuda_array_interface__`.

DLPack's structures are those of dlpack.h, https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import local
from typing import Any

import numpy as np

from tccompile.errors import InputError
from tccompile.ir.extent import Shape
from tccompile.ir.types import ELEMENTS, DType
from tccompile.runtime.driver import Device, Handle, Memory, PooledMemory

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_NAME = b"dltensor"  # a capsule keeps the pointer, so this must live on
_EXCHANGE = b"dlpack_exchange_api"

LEGACY = (0, 1)
"""Handles of the legacy default stream: the driver's, and what stands for it where 0 is not allowed."""


IO_ALIGN = 16
"""Bytes that kernels rely on for the address of a model input or output: their widest access."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),  # 64-bit integers, as the strides
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_TENSOR = struct.Struct("=QiiiBBHQQQ")
"""The same, to be read at once."""


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


@dataclass(slots=True)
class DeviceBuffer:
    """An array on a GPU that somebody else owns.

    owner   keeps it alive
    stream  where its owner works with it, if known: a handle, or who says it
    """

    address: int
    shape: Shape
    dtype: DType
    contiguous: bool
    owner: Any
    stream: int | Exchange | None = None


Array = np.ndarray | DeviceBuffer
"""A caller's array as engines take it: on the host, or on a GPU."""


def adopt(array: Any, ordinal: int | None, stream: int, name: str) -> Array:
    """A caller's array: a NumPy array if it lies in host memory, else where it lies on the GPU. Nothing is copied.

    ordinal  the GPU that the session runs on, or None for the CPU
    stream   the CUstream that will use it: the producer's own work on a DLPack array is ordered before what comes there
    Raises InputError, which names the input or output `name`, if it lies on another device or cannot be read.
    """
    if isinstance(array, np.ndarray):
        return array
    try:
        if isinstance(array, DeviceArray):
            _check_device(array.device.ordinal, ordinal, name)
            array.wait(stream)
            return DeviceBuffer(array.memory.address, array.shape, array.type, True, array)
        exchange = _exchange(type(array))  # type: ignore[arg-type]
        if exchange is not None and (found := exchange.buffer(array, ordinal, name)) is not None:
            return found
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            return _from_dlpack(array, ordinal, stream, name)
        if hasattr(array, "__cuda_array_interface__"):
            return _from_interface(array, ordinal, name)
        if hasattr(array, "__array__"):
            return np.asarray(array)
    except InputError:
        raise
    except Exception as error:
        says = next(iter(str(error).splitlines()), type(error).__name__)  # PyTorch's go on with its C++ functions
        raise InputError(f"{name}: cannot read the given {type(array).__name__} ({says})") from error
    raise InputError(
        f"{name}: a value of type {type(array).__name__} is not an array; numpy.asarray makes one of numbers, lists, images"
    )


class Exchange:
    """A library's C functions that describe its arrays, ten times as fast as capsules (DLPackExchangeAPI in dlpack.h)."""

    def __init__(self, describe: int, current: int):
        self._describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(describe)
        self._current = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(current)

    def buffer(self, array: Any, ordinal: int | None, name: str) -> DeviceBuffer | None:
        """Where the array lies; None if it does not lie on a GPU."""
        answer = _answer
        self._describe(array, answer.tensor_at)
        data, device, number, rank, code, bits, lanes, shape, strides, offset = _TENSOR.unpack_from(answer.tensor)
        if device != _CUDA and device != _CUDA_MANAGED:
            return None
        if number != ordinal:
            _check_device(number, ordinal, name)
        layout = _layout(_words(shape, rank), _words(strides, rank), code, bits, lanes, name)
        return DeviceBuffer(data + offset, *layout, array, self)

    def stream(self, ordinal: int) -> int:
        """The stream on which the library works now, in this thread."""
        self._current(_CUDA, ordinal, _answer.stream_at)
        return _answer.stream.value or 0


class _Answer(local):
    """What a thread has a library write: faster than making these for each array."""

    def __init__(self) -> None:
        self.tensor, self.stream = (ctypes.c_uint8 * _TENSOR.size)(), ctypes.c_void_p()
        self.tensor_at, self.stream_at = ctypes.addressof(self.tensor), ctypes.addressof(self.stream)


_answer = _Answer()


def _words(address: int, count: int) -> bytes | None:
    """So many 64-bit integers; None if there are none."""
    return ctypes.string_at(address, 8 * count) if address else None


@cache
def _exchange(kind: type) -> Exchange | None:
    """The table of the type's library, if it has one that we can read."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not _capsule_is(capsule, _EXCHANGE):
        return None
    table = _capsule_pointer(capsule, _EXCHANGE)
    if ctypes.c_uint32.from_address(table).value != 1:  # the major version
        return None
    # After 16 bytes of versions: an allocator, two functions for arrays that are handed over, and these.
    describe, current = (ctypes.c_size_t * 2).from_address(table + 40)
    return Exchange(describe, current) if describe else None  # a library may leave it out


def _from_dlpack(array: Any, ordinal: int | None, stream: int, name: str) -> Array:
    device_type, device_id = array.__dlpack_device__()
    on_gpu = device_type in (_CUDA, _CUDA_MANAGED)
    if on_gpu:
        _check_device(int(device_id), ordinal, name)
    capsule = array.__dlpack__(stream=stream or LEGACY[1]) if on_gpu else array.__dlpack__()
    if not _capsule_is(capsule, _NAME):
        raise InputError(f"{name}: the given {type(array).__name__} hands out a DLPack capsule of an unknown kind")
    tensor = ctypes.string_at(_capsule_pointer(capsule, _NAME), _TENSOR.size)
    data, _, _, rank, code, bits, lanes, shape_at, strides_at, offset = _TENSOR.unpack(tensor)
    strides = _words(strides_at, rank)
    shape, dtype, contiguous = _layout(_words(shape_at, rank), strides, code, bits, lanes, name)
    if on_gpu:
        return DeviceBuffer(data + offset, shape, dtype, contiguous, (array, capsule))
    if device_type not in (_CPU, _CUDA_HOST):
        raise InputError(f"{name}: lies on a device that is neither the host nor an NVIDIA GPU (DLPack type {device_type})")
    return _host(data + offset, shape, _integers(strides), dtype, capsule)


@lru_cache
def _layout(shape: bytes | None, strides: bytes | None, code: int, bits: int, lanes: int, name: str) -> tuple[Shape, DType, bool]:
    """Shape, type, and whether it is contiguous, of an array whose extents and strides (in elements) are 64-bit integers."""
    extents, steps = _integers(shape) or (), _integers(strides)
    return extents, _dtype(code, bits, lanes, name), _contiguous(extents, steps)


def _integers(words: bytes | None) -> tuple[int, ...] | None:
    return None if words is None else struct.unpack(f"{len(words) // 8}q", words)


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
    shape, strides = tuple(said["shape"]), said.get("strides")
    dtype = _STRINGS.get(said["typestr"])
    if dtype is None:
        raise InputError(f"{name}: elements of type {said['typestr']} are not taken")
    if strides is not None:
        strides = tuple([s // dtype.size for s in strides])
    if said.get("mask") is not None:
        raise InputError(f"{name}: masked arrays are not taken")
    return DeviceBuffer(said["data"][0] or 0, shape, dtype, _contiguous(shape, strides), array, said.get("stream"))


_STRINGS = {t.numpy.str: t for t in ELEMENTS if t.in_numpy}
_TYPES: dict[tuple[int, int, int], DType] = {(_CODES[t.numpy.kind], t.numpy.itemsize * 8, 1): t for t in ELEMENTS if t.in_numpy}
_TYPES[_BFLOAT, 16, 1] = DType.BF16


def _dtype(code: int, bits: int, lanes: int, name: str) -> DType:
    try:
        return _TYPES[code, bits, lanes]
    except KeyError:
        raise InputError(f"{name}: elements of {bits} bits and kind {code} are not taken") from None


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


def as_stored(array: Any, dtype: DType) -> np.ndarray:
    """The array in the type that holds elements of a tensor's type: bfloat16 as its bits."""
    return array.view(np.uint16) if dtype is DType.BF16 and array.dtype.name != "uint16" else array


def stream_handle(stream: Any) -> int:
    """The CUstream of an integer, or of an object of PyTorch (`cuda_stream`), CuPy (`ptr`), or with `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        if (value := getattr(stream, attribute, None)) is not None:
            return int(value)
    with suppress(TypeError, ValueError):
        return int(stream)
    raise InputError(f"a {type(stream).__name__} is not a CUDA stream; give its handle as an integer")


def check_apart(outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> None:
    """Hold arrays that outputs are written into to memory of their own. Raises InputError that names both.

    What lies on the host is copied from before kernels run and copied to when they are done, so there an output may take the
    place of an input; on the GPU kernels read and write it in any order.
    """
    before: list[tuple[str, Array]] = []
    on_gpu = [(f"input {name!r}", a) for name, a in inputs.items() if isinstance(a, DeviceBuffer)]
    for name, a in outputs.items():
        what = f"output {name!r}"
        if isinstance(a, np.ndarray) and not _elements_apart(a):
            raise InputError(
                f"{what}: elements of the array lie in the same memory (strides {a.strides}); give one that has its own"
            )
        for other, b in (*before, *on_gpu) if isinstance(a, DeviceBuffer) else before:
            if _overlap(a, b):
                raise InputError(f"{what} and {other} overlap in memory; give each memory of its own")
        before.append((what, a))


def _elements_apart(a: np.ndarray) -> bool:
    """Whether every element certainly has bytes of its own: each axis steps over all that the ones within it span."""
    span = a.itemsize
    for step, n in sorted((abs(step), n) for step, n in zip(a.strides, a.shape, strict=True) if n > 1):
        if step < span:
            return not a.size
        span += step * (n - 1)
    return True


def _overlap(a: Array, b: Array) -> bool:
    """Whether arrays share memory; also where finding out would take long, and their ends overlap."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        try:
            return bool(np.shares_memory(a, b, max_work=_PATIENCE))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True
    (low, high), (begin, end) = _ends(a), _ends(b)
    return low < end and begin < high


_PATIENCE = 1 << 16
"""Steps of NumPy's search for an element that two arrays share."""


def _ends(a: Array) -> tuple[int, int]:
    if isinstance(a, DeviceBuffer):
        return a.address, a.address + math.prod(a.shape) * a.dtype.size
    if not a.size:
        return 0, 0
    start = a.__array_interface__["data"][0]
    reach = [step * (n - 1) for step, n in zip(a.strides, a.shape, strict=True)]
    return start + sum(min(r, 0) for r in reach), start + sum(max(r, 0) for r in reach) + a.itemsize


KEPT = 8
"""Outputs whose memory is kept for the next inferences, of each output, length and stream."""


class Output:
    """Memory of an output, and an event if one is needed: both are used again when nobody holds the array any more.

    gone  is told the bytes when they are not. Any thread may do that, whatever it is doing
    """

    def __init__(self, memory: Memory | PooledMemory, gone: deque[int]):
        self.memory, self._gone = memory, gone
        self._event: Handle | None = None

    def __del__(self) -> None:
        self._gone.append(self.memory.size)

    @property
    def event(self) -> Handle:
        """The event, made when it is first asked for: inferences that are waited for need none."""
        if self._event is None:
            with self.memory.device as cu:
                untimed = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
                self._event = Handle(self.memory.device, cu.cuEventCreate(untimed), "cuEventDestroy")
        return self._event


class DeviceArray:
    """An output on the GPU: `torch.from_dlpack(y)`, `cupy.asarray(y)`, or `numpy.asarray(y)`, which copies.

    Its memory is used again when it and whatever was made of it are gone.
    """

    def __init__(self, output: Output, shape: Shape, dtype: DType, stream: int, waits_for_legacy: bool, pool: list[Output]):
        """An array that inferences on `stream` write, and that goes back to `pool` for later ones on the same stream.

        waits_for_legacy  whether that stream waits for the legacy default stream, as streams do by default
        """
        self.memory, self.shape, self.type = output.memory, shape, dtype
        self.pending: Handle | None = None  # the event until which it may still be being written
        self._output, self._stream, self._pool = output, stream, pool
        # Consumers on these streams are done before anything queued on `stream` later. If others have seen the array, its
        # memory is freed instead, and the driver waits for them.
        self._ordered = (stream, *LEGACY) if waits_for_legacy or stream in LEGACY else (stream,)
        self._reusable = True

    def __del__(self) -> None:
        if self._reusable and len(self._pool) < KEPT:
            self._pool.append(self._output)

    def mark(self, others: Iterable[DeviceArray]) -> None:
        """This array, and others on its stream, are being written until what has been queued up to here is done.

        They share an event. When this one's memory is used again it may come to stand for a later inference on the stream: then
        those who wait for the others wait for that, too.
        """
        with self.device as cu:
            cu.cuEventRecord(self._output.event.value, self._stream)
        for array in (self, *others):
            array.pending = self._output.event

    def wait(self, stream: int) -> None:
        """Make work that is queued on the stream from now on wait for the array."""
        self._reusable = self._reusable and stream in self._ordered
        if self.pending and stream != self._stream:
            with self.device as cu:
                cu.cuStreamWaitEvent(stream, self.pending.value, 0)

    @property
    def dtype(self) -> np.dtype:
        return self.type.numpy

    @property
    def device(self) -> Device:
        return self.memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.type is DType.BF16:
            raise AttributeError("__cuda_array_interface__ has no bfloat16; use DLPack")
        self._reusable = False
        data, stream = (self.memory.address, False), (self._stream or LEGACY[1]) if self.pending else None
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
        if stream == -1:
            self._reusable = False
        else:
            self.wait(stream or LEGACY[1])
        return _capsule(self, self.memory.address, self.shape, self.type, self.device.ordinal)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on the GPU cannot be seen by NumPy without a copy")
        out = np.empty(self.shape, self.dtype)
        with self.device as cu:
            if self.pending:
                cu.cuEventSynchronize(self.pending.value)
            if out.nbytes:
                cu.cuMemcpyDtoH(out.ctypes.data, self.memory.address, out.nbytes)
        return out if dtype is None else out.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.type.value}, device={self.device})"


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
    described = ctypes.addressof(extents), ctypes.addressof(steps)
    tensor = _Tensor(address, _CUDA, ordinal, len(shape), code, dtype.size * 8, 1, *described, 0)
    managed = _Managed(tensor, None, _delete)
    where = ctypes.addressof(managed)
    _exported[where] = (owner, managed, extents, steps)
    return _capsule_new(where, _NAME, _destroy)
