"""The CUDA driver, checked: every call that fails raises, and a GPU is its primary context, shared with other libraries.

The bindings are imported when a GPU is first asked for.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock, local
from typing import Any

import numpy as np

from tccompile.errors import DeviceError, LaunchError


class DriverError(LaunchError):
    """A driver call that failed: `status` is the name of its CUresult."""

    def __init__(self, call: str, status: str):
        super().__init__(f"{call}: {status}")
        self.status = status


Native = Callable[..., int]


class Driver:
    """cuda.bindings.driver, whose functions raise DriverError instead of returning a status, and return the bare result."""

    def __init__(self, api: Any):
        self.api = api
        self._native: dict[str, Native] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.api, name)
        if not name.startswith("cu") or isinstance(found, type):
            setattr(self, name, found)
            return found

        def checked(*args: Any) -> Any:
            result = found(*args)
            if status := result[0]:
                raise DriverError(name, getattr(status, "name", str(status)))
            return result[1] if len(result) == 2 else result[1:]

        setattr(self, name, checked)
        return checked

    def native(self, name: str) -> Native:
        """A function of CUDA 12.0 where it lies in memory, which takes ctypes' values: for calls that must not take long.

        It gives a status: see `native_calls`.
        """
        if name not in self._native:
            address, _ = self.cuGetProcAddress(name.encode(), 12000, 0)
            self._native[name] = ctypes.CFUNCTYPE(ctypes.c_int)(int(address))
        return self._native[name]

    def native_calls(self, name: str, calls: Iterable[Sequence[Any]]) -> None:
        """Call such a function with each of these arguments. Raises DriverError."""
        function = self.native(name)
        for args in calls:
            if status := function(*args):
                raise DriverError(name, getattr(self.api.CUresult(status), "name", str(status)))

    def start_early(self, graph: Any, before: list[Any], node: Any) -> None:
        """Put a kernel node of a graph after others; it may start when all their blocks have let it, or have ended."""
        edge = self.CUgraphEdgeData()
        edge.type = int(self.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        edge.from_port = self.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        # The bindings of CUDA 13 have this under the name that means another function in those of CUDA 12.
        name = "cuGraphAddDependencies_v2" if hasattr(self.api, "cuGraphAddDependencies_v2") else "cuGraphAddDependencies"
        getattr(self, name)(graph, before, [node] * len(before), [edge] * len(before), len(before))

    def add_node(self, graph: Any, before: list[Any], params: Any) -> Any:
        """A node of any kind, after others of a graph."""
        if hasattr(self.api, "cuGraphAddNode_v2"):  # the bindings of CUDA 12, in which the other name takes no edges
            return self.cuGraphAddNode_v2(graph, before, None, len(before), params)
        return self.cuGraphAddNode(graph, before, None, len(before), params)


@cache
def driver() -> Driver:
    """The initialised driver; DeviceError says why there is none."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise DeviceError(f"running on a GPU needs cuda-bindings: pip install cuda-bindings ({error})") from error
    cu = Driver(api)
    try:
        cu.cuInit(0)
    except DriverError as error:
        raise DeviceError(f"no usable NVIDIA GPU ({error})") from error
    except Exception as error:  # the bindings raise types of their own when the library is missing
        detail = "" if type(error).__name__ == "DynamicLibNotFoundError" else f" ({error})"  # it says no more than we do
        raise DeviceError(f"no NVIDIA driver is installed{detail}") from error
    return cu


class Device:
    """One GPU. `with device:` makes its primary context current, and restores the caller's afterwards."""

    def __init__(self, cu: Driver, ordinal: int):
        count = cu.cuDeviceGetCount()
        if not 0 <= ordinal < count:
            there = (
                "there is no GPU"
                if not count
                else f"there are {count}, gpu:0 to gpu:{count - 1}"
                if count > 1
                else "there is only gpu:0"
            )
            raise DeviceError(f"no GPU number {ordinal}: {there}")
        self.cu, self.ordinal = cu, ordinal
        self._entered = local()  # how deep this thread is in `with device:`; only the outermost changes the context
        self._handle = handle = cu.cuDeviceGet(ordinal)
        self.cc = self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")
        self.multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self.name = cu.cuDeviceGetName(256, handle).split(b"\0")[0].decode()
        self.driver_version: int = cu.cuDriverGetVersion()  # 1000 * major + 10 * minor
        try:
            self.context = cu.cuDevicePrimaryCtxRetain(handle)
        except DriverError as error:
            raise DeviceError(f"cannot use {self}: {error}") from error
        weakref.finalize(self, _quietly, cu.cuDevicePrimaryCtxRelease, handle).atexit = False

    @property
    def cuda(self) -> str:
        """The version of CUDA that the driver is of, as "12.4"."""
        return f"{self.driver_version // 1000}.{self.driver_version % 1000 // 10}"

    def attribute(self, name: str) -> int:
        """What the driver says of the device: CU_DEVICE_ATTRIBUTE_ and the name."""
        return self.cu.cuDeviceGetAttribute(getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self._handle)

    def __str__(self) -> str:
        return f"{self.name} (gpu:{self.ordinal}, compute capability {self.cc[0]}.{self.cc[1]})"

    def __enter__(self) -> Driver:
        depth = getattr(self._entered, "depth", 0)
        if depth == 0:
            self.cu.cuCtxPushCurrent(self.context)
        self._entered.depth = depth + 1
        return self.cu

    def __exit__(self, *exc: object) -> None:
        self._entered.depth -= 1
        if self._entered.depth == 0:
            self.cu.cuCtxPopCurrent()


_devices: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()
_lock = Lock()


def open_device(ordinal: int = 0) -> Device:
    """The GPU of that number; DeviceError if it cannot be used."""
    cu = driver()
    with _lock:
        device = _devices.get(ordinal)
        if device is None:
            device = _devices[ordinal] = Device(cu, ordinal)
        return device


class Memory:
    """Device memory, freed with this object. LaunchError names `what` it was for when there is not enough."""

    def __init__(self, device: Device, size: int, what: str):
        self.device, self.size = device, size
        with device as cu:
            try:
                self.address = int(cu.cuMemAlloc(max(size, 1)))
            except DriverError as error:
                raise _no_room(device, cu, size, what, error) from error
        self.close = weakref.finalize(self, _freed, device, "cuMemFree", self.address)
        self.close.atexit = False

    def free(self, stream: int) -> None:
        """Free it; the driver waits for whoever may still use it, on this stream or another."""
        self.close()


class Pool:
    """A pool of the driver's: memory comes from it and goes back in the order of a stream, and it keeps what nobody uses.

    To allocate takes the driver 0.05 to 0.3 ms, and from here a few microseconds, unless the pool has to grow.

    kept  bytes up to which it keeps memory; what is beyond them goes back to the system when something is waited for
    """

    def __init__(self, device: Device, kept: int):
        with device as cu:
            wanted = cu.CUmemPoolProps()
            wanted.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            wanted.location.id = device.ordinal
            self._handle = Handle(device, cu.cuMemPoolCreate(wanted), "cuMemPoolDestroy")
            self.value, self.close = self._handle.value, self._handle.close  # closed, it stays until all memory is given back
            threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            cu.cuMemPoolSetAttribute(self.value, threshold, cu.cuuint64_t(kept))


class PooledMemory:
    """Memory of a pool, for what is queued from now on on a stream, or comes after that. See Memory."""

    def __init__(self, device: Device, pool: Pool, size: int, what: str, stream: int):
        self.device, self.size = device, size
        with device as cu:
            try:
                self.address = int(cu.cuMemAllocFromPoolAsync(max(size, 1), pool.value, stream))
            except DriverError as error:
                raise _no_room(device, cu, size, what, error) from error
        self.close = weakref.finalize(self, _freed_when_done, device, self.address)
        self.close.atexit = False

    def free(self, stream: int) -> None:
        """Give it back when the stream comes to here: whoever uses it is done by then."""
        if self.close.detach():
            with self.device as cu:
                cu.cuMemFreeAsync(self.address, stream)


class PinnedMemory:
    """Host memory that the GPU copies from and to without the CPU; `bytes` is an array over it."""

    def __init__(self, device: Device, size: int):
        self.size = size
        with device as cu:
            try:
                self.address = int(cu.cuMemHostAlloc(max(size, 1), 0))
            except DriverError as error:
                raise LaunchError(f"cannot allocate {mib(size)} of pinned host memory ({error})") from error
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        self.close = weakref.finalize(self, _freed, device, "cuMemFreeHost", self.address)
        self.close.atexit = False


class Handle:
    """A stream, event, module or graph of the driver, destroyed by `destroy` with this object."""

    def __init__(self, device: Device, value: Any, destroy: str):
        self.value = value
        self.close = weakref.finalize(self, _freed, device, destroy, value)
        self.close.atexit = False


def _freed(device: Device, call: str, value: Any) -> None:
    def free() -> None:
        with device as cu:
            getattr(cu, call)(value)

    _quietly(free)


def _freed_when_done(device: Device, address: int) -> None:
    """Free memory of a pool, for which the driver does not wait for those who use it."""
    with suppress(DriverError), device as cu:
        cu.cuCtxSynchronize()
    _freed(device, "cuMemFree", address)


def _no_room(device: Device, cu: Driver, size: int, what: str, error: DriverError) -> LaunchError:
    free, total = cu.cuMemGetInfo()
    return LaunchError(f"cannot allocate {mib(size)} for {what}: {mib(free)} of {mib(total)} are free on {device} ({error})")


def _quietly(call: Any, *args: Any) -> None:
    """Call; after a failed launch the driver refuses everything, and there is nothing left to free."""
    with suppress(DriverError):
        call(*args)


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
