"""What the sessions of one plan share on a GPU: which code runs there, loaded once, and the weights, uploaded once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import UsageError
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Section
from tccompile.runtime.driver import Device, Driver, DriverError, Handle, Memory
from tccompile.runtime.room import aligned

# --- Which code ------------------------------------------------------------------------------------------------------


def choices(plan: Plan, entry: Entry, cc: tuple[int, int], target: str | None = None) -> list[Section]:
    """The sections that may run on a GPU of compute capability `cc`, the best one first.

    Machine code runs on its own major version, at the same or a higher minor one; PTX is compiled for any newer GPU; code of
    a target with a suffix runs on its own compute capability only. `target` leaves only the sections of that generation.
    """

    def fits(section: Section) -> bool:
        arch = ARCHS.get(section.arch)
        if arch is None or target not in (None, section.arch):
            return False
        if arch.suffix:
            return arch.cc == cc
        return arch.cc <= cc and (plan.kind(section) == "ptx" or arch.cc[0] == cc[0])

    def rank(section: Section) -> tuple[bool, tuple[int, int], str]:
        return plan.kind(section) == "cubin", ARCHS[section.arch].cc, ARCHS[section.arch].suffix

    return sorted(filter(fits, entry.sections), key=rank, reverse=True)


def offered(plan: Plan, entry: Entry) -> str:
    """What a plan has, for people: `machine code for sm_80, sm_90a; PTX for sm_80`"""
    forms = {"cubin": "machine code", "ptx": "PTX"}
    lists = {form: [s.arch for s in entry.sections if plan.kind(s) == k] for k, form in forms.items()}
    return "; ".join(f"{form} for {', '.join(names)}" for form, names in lists.items() if names) or "no code at all"


# --- What sessions share ---------------------------------------------------------------------------------------------


class Resident:
    """What the sessions of one plan on one GPU share: weights, uploaded once, and loaded code.

    users  those that read its weights
    """

    def __init__(self, plan: Plan, device: Device):
        self.plan, self.device = plan, device
        self.lock = Lock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._weights: dict[str, int] = {}
        self._memory: list[Memory] = []
        self._modules: dict[int, Handle] = {}
        self._rooms: dict[int, int] = {}  # shared memory that has been asked for, where that is more than what all get

    def weight(self, name: str) -> int:
        """The device address of a constant that has been uploaded."""
        return self._weights[name]

    def has(self, name: str) -> bool:
        """Whether a constant has been uploaded."""
        return name in self._weights

    def upload(self, names: list[str]) -> None:
        """Copy constants to the device, into one allocation, unless they are there already.

        Raises UsageError if the plan was stored without them, PlanError if the file is damaged.
        """
        with self.lock, self.device:
            missing = [n for n in dict.fromkeys(names) if n not in self._weights]
            if not missing:
                return
            sizes = {n: self.plan.size(n) for n in missing}  # `weight` refuses what is not there
            *offsets, size = accumulate(map(aligned, sizes.values()), initial=0)
            memory = Memory(self.device, size, f"{len(missing)} weights")
            addresses = {name: memory.address + offset for name, offset in zip(missing, offsets, strict=True)}
            with ThreadPoolExecutor() as threads:  # a checksum takes longer than the copy, the largest one longest
                largest_first = sorted(missing, key=lambda n: -sizes[n])
                for copied in [threads.submit(self._copy, n, addresses[n]) for n in largest_first]:
                    copied.result()
            self._weights |= addresses
            self._memory.append(memory)

    def _copy(self, name: str, address: int) -> None:
        """A constant to the device, from memory of its own that is freed again."""
        self._put(address, self.plan.weight(name))

    def _put(self, address: int, data: bytes | memoryview) -> None:
        with self.device as cu:
            cu.cuMemcpyHtoD(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))

    def refit(self, constants: Mapping[str, bytes | memoryview]) -> None:
        """Copy other values of constants to where they lie; of those that have not been uploaded, keep them for then."""
        with self.lock, self.device as cu:
            cu.cuCtxSynchronize()  # inferences that read the old ones
            later = {name: data for name, data in constants.items() if name not in self._weights}
            digests = {name: digest for name, digest in self.plan.digests.items() if name not in later}
            self.plan = replace(self.plan, weights={**self.plan.weights, **later}, digests=digests)
            here = {name: data for name, data in constants.items() if name in self._weights and data}
            with ThreadPoolExecutor() as threads:
                largest_first = sorted(here, key=lambda name: -len(here[name]))
                for copied in [threads.submit(self._put, self._weights[name], here[name]) for name in largest_first]:
                    copied.result()
            cu.cuCtxSynchronize()  # a copy from pageable memory may return before it is done

    def functions(self, rooms: Mapping[int, int]) -> dict[int, Any]:
        """The kernels of images, each allowed to use so many bytes of dynamic shared memory, or more that others of the plan's
        launches use. DriverError if one does not load."""
        with self.lock, self.device as cu:
            missing = [image for image in rooms if image not in self._modules]
            if any(self.plan.images[image].kind == "ptx" for image in missing):  # the driver takes 0.1 s and more to compile one
                with ThreadPoolExecutor() as threads:
                    loaded = list(threads.map(self._loaded, missing))
            else:
                loaded = [self._loaded(image) for image in missing]
            self._modules |= dict(zip(missing, loaded, strict=True))
            found = {}
            for image, size in rooms.items():
                name = self.plan.images[image].function.encode()
                found[image] = function = cu.cuModuleGetFunction(self._modules[image].value, name)
                if size > self._rooms.get(image, 48 << 10):
                    self._rooms[image] = size
                    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    cu.cuFuncSetAttribute(function, limit, size)
            return found

    def _loaded(self, image: int) -> Handle:
        with self.device as cu:
            return Handle(self.device, _load(cu, self.plan, image), "cuModuleUnload")


_residents: weakref.WeakValueDictionary[tuple[int, int], Resident] = weakref.WeakValueDictionary()
_residents_lock = Lock()


def resident(plan: Plan, device: Device, user: Any) -> Resident:
    """The one Resident of a plan on a device, for a user."""
    with _residents_lock:
        found = _residents.get((id(plan), device.ordinal))
        if found is None:
            found = _residents[id(plan), device.ordinal] = Resident(plan, device)
        found.users.add(user)
        return found


def taken_out(shared: Resident, users: Iterable[Any]) -> None:
    """Make a Resident one of these users alone: sessions that are opened later have another. UsageError if others read it."""
    with _residents_lock:
        if set(shared.users).difference(users):
            raise UsageError(
                "another session of the same plan reads its weights where they lie: close it first, or load the plan once more "
                "for this one, as Session(tccompile.Plan.load(path))"
            )
        for key in [key for key, found in _residents.items() if found is shared]:
            del _residents[key]


def _load(cu: Driver, plan: Plan, image: int) -> Any:
    """A module of the image's code. For PTX that the driver refuses, the error tells what its compiler says."""
    code, option = plan.images[image], cu.CUjit_option
    if code.kind == "cubin":
        return cu.cuModuleLoadData(bytes(code.code))
    log = bytearray(4096)
    names = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    try:
        return cu.cuModuleLoadDataEx(bytes(code.code) + b"\0", len(names), names, [log, len(log)])
    except DriverError as error:
        said = bytes(log).split(b"\0")[0].decode(errors="replace").strip()
        raise DriverError(f"compiling the PTX of {code.function} ({said})", error.status) from error
