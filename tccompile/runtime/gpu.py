"""The GPU engine: one arena, one upload of the weights, tensor maps encoded, and one CUDA graph made of the steps' edges."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from threading import Lock
from typing import Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import DeviceError, LaunchError, PlanError, UsageError, VerificationError
from tccompile.ir.extent import round_up
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, to_storage
from tccompile.plan.format import MAPPED, Address, Entry, Float, Int, Map, PlacedLaunch, Plan, PlanArg, Section, Step
from tccompile.runtime.arrays import IO_ALIGN, LEGACY, Array, DeviceArray, DeviceBuffer, Exchange, Output, adopt, as_stored
from tccompile.runtime.driver import Device, Driver, DriverError, Handle, Memory, PinnedMemory, mib, open_device
from tccompile.runtime.engine import Engine
from tccompile.runtime.finite import Scan, check_finite
from tccompile.runtime.generations import native
from tccompile.runtime.profile import Profile, profiled, roof
from tccompile.terminal import plain

ALIGN = 256
"""Bytes that everything in device memory is aligned to."""

WARMUP = 3
"""Inferences ahead of those whose steps are timed."""

EARLY_DRIVER = 12030
"""The first driver whose graphs have programmatic edges."""

PARAMETERS_DRIVER = 12040
"""The first driver that says what a kernel's parameters are."""

SMALL_MAP = 131_072
"""Bytes under which a tensor's map must have a bit cleared for drivers of CUDA 13.1 or older (docs/facts/hopper.md)."""


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

    engines  those that read its weights
    """

    def __init__(self, plan: Plan, device: Device):
        self.plan, self.device = plan, device
        self.lock = Lock()
        self.engines: weakref.WeakSet[GpuEngine] = weakref.WeakSet()
        self._weights: dict[str, int] = {}
        self._memory: list[Memory] = []
        self._modules: dict[int, Handle] = {}

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
            *offsets, size = accumulate(map(_aligned, sizes.values()), initial=0)
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
        data = np.frombuffer(self.plan.weight(name), np.uint8)
        with self.device as cu:
            cu.cuMemcpyHtoD(address, data.ctypes.data, data.size)

    def refit(self, constants: Mapping[str, bytes | memoryview]) -> None:
        """Copy other values of constants to where they lie; of those that have not been uploaded, keep them for then."""
        with self.lock, self.device as cu:
            cu.cuCtxSynchronize()  # inferences that read the old ones
            later = {name: data for name, data in constants.items() if name not in self._weights}
            digests = {name: digest for name, digest in self.plan.digests.items() if name not in later}
            self.plan = replace(self.plan, weights={**self.plan.weights, **later}, digests=digests)
            for name, data in constants.items():
                if name in self._weights and data:
                    cu.cuMemcpyHtoD(self._weights[name], np.frombuffer(data, np.uint8).ctypes.data, len(data))
            cu.cuCtxSynchronize()  # a copy from pageable memory may return before it is done

    def functions(self, smem: Mapping[int, int]) -> dict[int, Any]:
        """The kernels of images, each allowed to use so many bytes of dynamic shared memory. DriverError if one does not load."""
        with self.lock, self.device as cu:
            missing = [image for image in smem if image not in self._modules]
            if any(self.plan.images[image].kind == "ptx" for image in missing):  # the driver takes 0.1 s and more to compile one
                with ThreadPoolExecutor() as threads:
                    loaded = list(threads.map(self._loaded, missing))
            else:
                loaded = [self._loaded(image) for image in missing]
            self._modules |= dict(zip(missing, loaded, strict=True))
            found = {}
            for image, size in smem.items():
                name = self.plan.images[image].function.encode()
                found[image] = function = cu.cuModuleGetFunction(self._modules[image].value, name)
                if size > 48 << 10:
                    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    cu.cuFuncSetAttribute(function, limit, size)
            return found

    def _loaded(self, image: int) -> Handle:
        with self.device as cu:
            return Handle(self.device, _load(cu, self.plan, image), "cuModuleUnload")


_residents: weakref.WeakValueDictionary[tuple[int, int], Resident] = weakref.WeakValueDictionary()
_residents_lock = Lock()


def resident(plan: Plan, device: Device, engine: GpuEngine) -> Resident:
    """The one Resident of a plan on a device, for an engine."""
    with _residents_lock:
        found = _residents.get((id(plan), device.ordinal))
        if found is None:
            found = _residents[id(plan), device.ordinal] = Resident(plan, device)
        found.engines.add(engine)
        return found


def taken_out(shared: Resident, engines: Iterable[Any]) -> None:
    """Make a Resident one of these engines alone: sessions that are opened later have another. UsageError if others read it."""
    with _residents_lock:
        if set(shared.engines).difference(engines):
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


# --- The platform and the engine -------------------------------------------------------------------------------------


class GpuPlatform:
    """One GPU as a `Platform`: its engines share a stream, on which they run where the caller names none.

    ordinal       the GPU's number
    target        run the code of this generation, as "sm_80", instead of the best for the device
    check_finite  see `GpuEngine`
    Raises DeviceError if there is no such GPU that can be used.
    """

    def __init__(self, plan: Plan, ordinal: int, target: str | None = None, check_finite: bool = False):
        self.plan, self.target, self.check_finite = plan, target, check_finite
        self.device = open_device(ordinal)
        with self.device as cu:  # it waits for the legacy default stream
            self._stream = Handle(self.device, cu.cuStreamCreate(0), "cuStreamDestroy")
        self._resident: Resident | None = None
        self._room: Room | None = None

    @property
    def name(self) -> str:
        return f"gpu:{self.device.ordinal}"

    def load(self, entry: Entry) -> GpuEngine:
        return self._loaded(entry, None)

    def load_member(self, entry: Entry) -> GpuEngine:
        if self._room is None:
            arena, counters, io = _most(self.plan)
            self._room = Room(self.device, arena, counters, io=io)
        return self._loaded(entry, self._room)

    def _loaded(self, entry: Entry, room: Room | None) -> GpuEngine:
        engine = GpuEngine(self.plan, entry, self.device, self.target, self.check_finite, self._stream, self._resident, room)
        self._resident = engine.resident
        return engine

    def close(self) -> None:
        """Free the stream, and the memory that members of families share. Its engines are closed before."""
        if self._room is not None:
            self._room.close()
        self._stream.close()

    def refit(self, engines: Iterable[Engine], constants: Mapping[str, bytes | memoryview]) -> None:
        """See `Platform.refit`: addresses stay, so graphs and tensor maps do too."""
        assert self._resident is not None, "no engine is loaded"
        taken_out(self._resident, engines)
        try:
            self._resident.refit(constants)
        except DriverError as error:
            raise LaunchError(f"new weights cannot be copied to {self.device}: {error}") from error

    def adopt(self, array: Any, stream: int | None, what: str) -> Array:
        return adopt(array, self.device.ordinal, int(self._stream.value) if stream is None else stream, what)

    def __enter__(self) -> Driver:
        return self.device.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.device.__exit__(*exc)


class GpuEngine:
    """One entry of a plan, loaded on a GPU, an `Engine`: `run` launches its graph.

    target        the generation whose code it took, as "sm_80" or "sm_80 (PTX)"
    check_finite  `run` waits for the outputs, has a kernel look at them, and raises VerificationError that names the first node
                  whose result is not finite, if one reaches an output
    stream        where inferences run that name none; one of its own if None
    shared        where its weights lie; where those of the plan's other sessions do if None
    room          memory that it shares with other engines, of which one runs at a time; of its own if None
    Raises DeviceError if nothing in the plan runs on the device, and LaunchError if memory does not suffice or the driver
    refuses a launch.
    """

    def __init__(
        self,
        plan: Plan,
        entry: Entry,
        device: Device,
        target: str | None = None,
        check_finite: bool = False,
        stream: Handle | None = None,
        shared: Resident | None = None,
        room: Room | None = None,
    ):
        self.plan, self.entry, self.device = plan, entry, device
        self._check_finite = check_finite
        self.program = entry.program
        self.resident = shared or resident(plan, device, self)
        self.resident.engines.add(self)
        self.section, functions = self._first_that_loads(choices(plan, entry, device.cc, target), target)
        self.target = self.section.arch + (" (PTX)" if plan.kind(self.section) == "ptx" else "")
        self.resident.upload(list(_weights_of(self.section)))
        maps = [arg for launch in _launches(self.section) for arg in launch.args if isinstance(arg, Map)]
        self._maps = {m: i for i, m in enumerate(dict.fromkeys(maps))}
        self._own_room = room is None
        size = 128 * len(self._maps)
        self.room = room or Room(device, self.section.arena, self.section.counters, size)
        self._own_maps = Memory(device, size, "tensor maps") if room and size else None
        self._map_table = self._own_maps.address if self._own_maps else self.room.maps
        self._own_stream = stream is None
        self.stream = stream or self._handle("cuStreamCreate", 0, destroy="cuStreamDestroy")
        self._own = int(self.stream.value)
        self._staging: Staging | None = None
        self._scan: Scan | None = None
        self._bound: dict[str, int] = {}
        self._outputs: dict[tuple[str, int], list[Output]] = {}
        self._encode_maps()
        self._build(functions)

    def _handle(self, create: str, *args: Any, destroy: str) -> Handle:
        with self.device as cu:
            return Handle(self.device, getattr(cu, create)(*args), destroy)

    def _first_that_loads(self, sections: list[Section], target: str | None) -> tuple[Section, dict[int, Any]]:
        """The best section whose code the driver takes, and the functions of its images."""
        refusals = []
        for section in sections:
            smem: dict[int, int] = {}
            for launch in _launches(section):
                smem[launch.image] = max(smem.get(launch.image, 0), launch.smem)
            try:
                return section, self.resident.functions(smem)
            except DriverError as error:
                refusals.append(f"the driver refused the code for {section.arch}: {error}")
        asked = f" for {target}" if target else ""
        others = choices(self.plan, self.entry, self.device.cc) if target else []
        oldest = min(ARCHS.values(), key=lambda arch: arch.cc)
        if others:
            way_out = f"without a target it takes the code for {others[0].arch}"
        elif self.device.cc < oldest.cc:
            way_out = f"the GPU is older than {oldest.name}, the first that can be built for: run it on the device cpu"
        else:
            way_out = f"compile it for {', '.join(native(self.device.cc))}, or run it on the device cpu"
        raise DeviceError(
            "; ".join(
                [f"no code{asked} in the plan runs on {self.device}: it has {offered(self.plan, self.entry)}", *refusals, way_out]
            )
        )

    def _encode_maps(self) -> None:
        """Write the tensor maps to where launches are told that they are."""
        if self._maps:
            with self.device as cu:
                table = np.frombuffer(b"".join(self._encoded(cu, m) for m in self._maps), np.uint8)
                cu.cuMemcpyHtoD(self._map_table, table.ctypes.data, table.nbytes)

    def _encoded(self, cu: Driver, m: Map) -> bytes:
        """A tensor map's 128 bytes."""
        wide, narrow = cu.cuuint64_t, cu.cuuint32_t
        extents, strides = [wide(n) for n in m.extents], [wide(n) for n in m.strides]
        where = self._address(m.address)
        dtype = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAPPED[m.dtype]}")
        rest = (
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{m.swizzle}B' if m.swizzle else 'NONE'}"),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        rank = len(extents)
        if m.kind == "tiled":
            box, steps = [narrow(n) for n in m.box], [narrow(n) for n in m.steps]
            encoded = cu.cuTensorMapEncodeTiled(dtype, rank, where, extents, strides, box, steps, *rest)
        else:
            steps = [narrow(n) for n in (1, *m.steps, 1)]
            corners = list(m.lower), list(m.upper)
            encoded = cu.cuTensorMapEncodeIm2col(
                dtype, rank, where, extents, strides, *corners, m.channels, m.pixels, steps, *rest
            )
        words = np.frombuffer(bytes((ctypes.c_uint8 * 128).from_address(encoded.getPtr())), np.uint64).copy()
        bytes_spanned = m.extents[-1] * m.strides[-1] if m.strides else m.dtype.size * m.extents[0]
        if self.device.driver_version <= 13010 and bytes_spanned < SMALL_MAP:
            words[1] &= np.uint64(~(1 << 21) & (2**64 - 1))
        return words.tobytes()

    def _address(self, a: Address) -> int:
        """The device address of anything but a model input or output, whose addresses come with each run."""
        match a.space:
            case "arena":
                return self.room.address + a.bytes
            case "counters":
                return self.room.counters + a.bytes
            case "weights":
                return self.resident.weight(a.name) + a.bytes
        raise AssertionError(f"an address in {a.space!r} is not fixed")

    def _build(self, functions: Mapping[int, Any]) -> None:
        """The graph: a node for each launch, after the last nodes of the steps that its step comes after."""
        with self.device as cu:
            self._graph = Handle(self.device, cu.cuGraphCreate(0), "cuGraphDestroy")
            self._nodes: list[_Node] = []
            self._uses: dict[str, list[tuple[_Node, int, int]]] = {}  # of each input and output: the node, the slot, the offset
            last: list[list[Any]] = []  # of each step
            for step in self.section.steps:
                before = [node for s in step.after for node in last[s]]
                for launch in step.launches:
                    if 0 in launch.grid:  # a tensor without elements
                        continue
                    node = _Node(self, cu, step, launch, functions[launch.image])
                    for slot, name, offset in node.io:
                        self._uses.setdefault(name, []).append((node, slot, offset))
                    try:
                        node.handle = node.add_to(self._graph.value, before, cu, bool(before))
                    except DriverError as error:
                        raise LaunchError(f"{self._where(node)}: {error}") from error
                    self._nodes.append(node)
                    before = [node.handle]
                last.append(before)
            how = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
            try:
                self._exec = Handle(self.device, cu.cuGraphInstantiateWithParams(self._graph.value, how), "cuGraphExecDestroy")
            except DriverError as error:
                culprit = [n for n in self._nodes if int(n.handle) == int(how.hErrNode_out)]
                raise LaunchError(f"{self._where(culprit[0]) if culprit else self.plan.name}: {error}") from error

    def _where(self, node: _Node) -> str:
        """A launch, for people."""
        op = self.program.ops[node.step.op]
        sizes = ", ".join(f"{n} {'x'.join(map(str, self.program.tensors[n].shape))}" for n in (*op.inputs, op.y))
        how = f"grid {node.launch.grid}, {node.launch.block} threads, {node.launch.smem} bytes of shared memory"
        return plain(f"node {op.nodes[0]} ({sizes}): kernel {node.step.kernel}, {how}")

    def describe(self) -> str:
        return f"{self.device}, code for {self.target}"

    # --- One inference -----------------------------------------------------------------------------------------------

    def run(
        self, arrays: Mapping[str, Array], outputs: Mapping[str, Array | None] | None = None, stream: int | None = None
    ) -> dict[str, Any]:
        """See `Engine.run`: outputs are made on the device if any input lies there, and else on the host."""
        queue = self._own if stream is None else stream
        wanted = dict.fromkeys(self.program.outputs) if outputs is None else outputs
        targets = {name: target for name, target in wanted.items() if target is not None}
        buffers = [a for a in (*arrays.values(), *targets.values()) if isinstance(a, DeviceBuffer)]
        on_device = any(isinstance(arrays[name], DeviceBuffer) for name in self.program.inputs)
        with self.device as cu:
            self._order_after_producers(buffers, queue)
            addresses = {name: self._place_input(cu, name, arrays[name], queue) for name in self.program.inputs}
            made: dict[str, DeviceArray] = {}
            staged: list[str] = []
            for name in self.program.outputs:
                target = targets.get(name)
                if isinstance(target, DeviceBuffer) and not target.address % IO_ALIGN:
                    addresses[name] = target.address
                elif on_device and name in wanted and target is None:
                    made[name] = self._output(name, queue)
                    addresses[name] = made[name].memory.address
                else:
                    addresses[name] = self.staging().address(name)
                    staged.append(name)
            self.launch_in(cu, addresses, queue)
            if self._check_finite:
                self._check_outputs(addresses, queue)

            to_host = self._fetch(cu, staged, wanted, queue)
            if stream is None or to_host or len(buffers) < len(arrays) + len(targets):
                self.synchronize(queue)
                self.room.mark_last(None)
            else:
                self.room.mark_last(queue)
                for array in made.values():
                    array.mark()

            for name in to_host:
                if name in targets:
                    np.copyto(targets[name], self.staging().host(name))  # type: ignore[arg-type]
            new = (name for name in wanted if name not in targets)
            return {n: made[n] if n in made else self.staging().host(n).copy() for n in new}

    def _order_after_producers(self, buffers: Sequence[DeviceBuffer], stream: int) -> None:
        """Make the stream wait for whoever works on the buffers, and for the last inference."""
        for where in {b.stream for b in buffers}:
            producer = where.stream(self.device.ordinal) if isinstance(where, Exchange) else where
            if producer is not None and producer != stream:
                self.room.order_after(producer, stream, self._own)
        self.room.order_after_last(stream)

    def _place_input(self, cu: Driver, name: str, array: Array, stream: int) -> int:
        """Where the input lies on the device, after it has been queued to be copied there if need be."""
        if isinstance(array, DeviceBuffer) and not array.address % IO_ALIGN:
            return array.address
        t = self.program.tensors[name]
        where = self.staging().address(name)
        if isinstance(array, np.ndarray):
            self.staging().put(name, as_stored(array, t.dtype), stream)
        else:
            cu.cuMemcpyDtoDAsync(where, array.address, t.nbytes, stream)
        return where

    def _fetch(self, cu: Driver, staged: Sequence[str], wanted: Mapping[str, Array | None], stream: int) -> list[str]:
        """Queue the copies of staged outputs to where they are wanted. Returns those that go to the host."""
        to_host = []
        for name in staged:
            target = wanted.get(name)
            if isinstance(target, DeviceBuffer):
                cu.cuMemcpyDtoDAsync(target.address, self.staging().address(name), self.program.tensors[name].nbytes, stream)
            elif name in wanted:
                self.staging().fetch(name, stream)
                to_host.append(name)
        return to_host

    def launch(self, addresses: Mapping[str, int], stream: int) -> None:
        """Queue one inference. `addresses` are those of all inputs and outputs on the device, each a multiple of IO_ALIGN.

        Inferences of one engine run one after the other, whatever their streams: they share the arena.
        """
        with self.device as cu:
            self.launch_in(cu, addresses, stream)

    def launch_in(self, cu: Driver, addresses: Mapping[str, int], stream: int) -> None:
        """`launch`, for who is in the device's context already."""
        try:
            if addresses != self._bound:
                changed = {}
                for name, address in addresses.items():
                    if self._bound.get(name) != address:
                        for node, slot, offset in self._uses.get(name, ()):
                            node.values[slot] = address + offset
                            changed[id(node)] = node
                for node in changed.values():
                    cu.cuGraphExecKernelNodeSetParams(self._exec.value, node.handle, node.params)
                self._bound = dict(addresses)
            cu.cuGraphLaunch(self._exec.value, stream)
        except DriverError as error:
            self._bound = {}
            raise LaunchError(f"launching {self.plan.name} on {self.device} failed: {error}") from error

    def synchronize(self, stream: int) -> None:
        """Wait until everything on the stream is done; LaunchError if a kernel failed."""
        with self.device as cu:
            try:
                cu.cuStreamSynchronize(stream)
            except DriverError as error:
                raise LaunchError(f"running {self.plan.name} on {self.device} failed: {error}") from error

    def staging(self) -> Staging:
        """Memory for inputs and outputs that do not lie on the device, made when it is first needed."""
        if self._staging is None:
            self._staging = Staging(self.room, self.program)
        return self._staging

    def _output(self, name: str, stream: int) -> DeviceArray:
        """An array for an output that is written on the stream."""
        t = self.program.tensors[name]
        pool = self._outputs.setdefault((name, stream), [])
        output = pool.pop() if pool else Output(self.device, t.nbytes, f"output {name!r}")
        return DeviceArray(output, t.shape, t.dtype, stream, stream == self._own, pool)

    # --- Times --------------------------------------------------------------------------------------------------------

    def time(self, arrays: Mapping[str, Array], iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each of `iterations` graph launches, between events, after `warmup` ones."""
        return self._time(self._placed(arrays), iterations, warmup)

    def profile(self, arrays: Mapping[str, Array], iterations: int) -> Profile:
        """One step at a time, by events around each, less what the events add, the same for all."""
        addresses = self._placed(arrays)
        whole = median(self._time(addresses, iterations, 10)) * 1e3
        limits = roof(self.device)
        times, alone = self._time_steps(addresses, iterations)
        steps = profiled(self.program, self.section, times, limits, median(alone))
        return Profile(self.plan.name, self.describe(), False, iterations, whole, steps, limits)

    def _placed(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """The addresses of inputs, copied to the device if they are not there, and of outputs."""
        with self.device as cu:
            addresses = {n: self._place_input(cu, n, arrays[n], self._own) for n in self.program.inputs}
        return addresses | {n: self.staging().address(n) for n in self.program.outputs}

    def _time(self, addresses: Mapping[str, int], iterations: int, warmup: int) -> list[float]:
        """Milliseconds of each of `iterations` graph launches, between events, after `warmup` ones."""
        with self.device as cu:
            stream = int(self.stream.value)
            events = [self._handle("cuEventCreate", 0, destroy="cuEventDestroy") for _ in range(2 * iterations)]
            for _ in range(warmup):
                self.launch(addresses, stream)
            self.synchronize(stream)
            for begin, end in zip(events[::2], events[1::2], strict=True):
                cu.cuEventRecord(begin.value, stream)
                self.launch(addresses, stream)
                cu.cuEventRecord(end.value, stream)
            self.synchronize(stream)
            pairs = zip(events[::2], events[1::2], strict=True)
            return [float(cu.cuEventElapsedTime(begin.value, end.value)) for begin, end in pairs]

    def _time_steps(self, addresses: Mapping[str, int], iterations: int) -> tuple[list[list[float]], list[float]]:
        """Microseconds in graphs that run one step at a time: of each step in each of `iterations` inferences, between events,
        and of whole inferences without events in between.

        A step is as it is in an inference: its tensors lie where the step before left them, its weights where they last were.
        """
        with self.device:
            self.launch(addresses, self._own)  # sets the addresses in the nodes' parameters
            steps = self._time_chain(iterations, True)
            return steps, [whole for (whole,) in self._time_chain(iterations, False)]

    def _time_chain(self, iterations: int, each: bool) -> list[list[float]]:
        """Microseconds between events in a graph of the launches one after the other: around each step, or around all."""
        with self.device as cu:
            graph = Handle(self.device, cu.cuGraphCreate(0), "cuGraphDestroy")
            events: list[Handle] = []
            last: list[Any] = []
            launched = False  # whether `last` is a launch

            def record() -> None:
                nonlocal last, launched
                launched = False
                events.append(self._handle("cuEventCreate", 0, destroy="cuEventDestroy"))
                last = [cu.cuGraphAddEventRecordNode(graph.value, last, len(last), events[-1].value)]

            record()
            nodes = iter(self._nodes)
            node = next(nodes, None)
            for step in self.section.steps:
                while node is not None and node.step is step:
                    last = [node.add_to(graph.value, last, cu, launched)]
                    launched = True
                    node = next(nodes, None)
                if each:
                    record()
            if not each:
                record()
            how = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
            chain = Handle(self.device, cu.cuGraphInstantiateWithParams(graph.value, how), "cuGraphExecDestroy")
            times = []
            for _ in range(iterations + WARMUP):
                cu.cuGraphLaunch(chain.value, self._own)
                self.synchronize(self._own)
                times.append([float(cu.cuEventElapsedTime(a.value, b.value)) * 1e3 for a, b in pairwise(events)])
            return times[WARMUP:]

    # --- Checks and debugging ----------------------------------------------------------------------------------------

    def _check_outputs(self, addresses: Mapping[str, int], stream: int) -> None:
        """Wait for the inference that was queued last; raises VerificationError if an output of it is not finite.

        It then runs once more, one step at a time, to find the first step that writes an infinity or a NaN.
        """
        self.synchronize(stream)
        tensors = self.program.tensors
        if self._scan is None:
            self._scan = Scan(self.device, list(self.program.outputs))
        wrong = self._scan.wrong(tensors, addresses, stream)
        if not wrong:
            return
        left_out: dict[str, np.ndarray] = {}  # copies that no step makes: a later one reads what they are of

        def meaning(op: Op) -> np.ndarray:
            given = {n: left_out[n] if n in left_out else self._elements(n, addresses) for n in op.inputs}
            return compute(op, self.program, given)

        for step in self.section.steps:
            op = self.program.ops[step.op]
            y = tensors[op.y]
            if step.launches:
                self._run_alone(step)
                stored = self._elements(op.y, addresses)
            else:
                stored = left_out[op.y] = to_storage(meaning(op), y.dtype)
            check_finite(op, y, stored, partial(meaning, op), self.program.storage.get(y.storage))
        raise VerificationError(f"output {wrong[0]!r} was not finite, but is when its steps run one by one: please report it")

    def _run_alone(self, step: Step) -> None:
        """Run the launches of a step, one after the other, on what lies in memory."""
        with self.device as cu:
            graph = Handle(self.device, cu.cuGraphCreate(0), "cuGraphDestroy")
            last: list[Any] = []
            for node in self._nodes:
                if node.step is step:
                    last = [node.add_to(graph.value, last, cu, False)]
            how = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
            alone = Handle(self.device, cu.cuGraphInstantiateWithParams(graph.value, how), "cuGraphExecDestroy")
            cu.cuGraphLaunch(alone.value, self._own)
            self.synchronize(self._own)

    def _elements(self, name: str, addresses: Mapping[str, int]) -> np.ndarray:
        """A tensor's elements as they are stored on the device, or a constant's in the plan."""
        t = self.program.tensors[name]
        owner = self.program.tensors[t.storage]
        if owner.name in self.program.constants:
            stored = self._weight(owner.name)
        elif owner.name in addresses:
            stored = self._read(addresses[owner.name], owner.nbytes)
        else:
            stored = self.read_arena(self.section.offsets[owner.name], owner.nbytes)
        return elements(stored.view(owner.dtype.numpy), t)

    def _weight(self, name: str) -> np.ndarray:
        """A constant's bytes, as kernels read them; from the plan if none does."""
        if self.resident.has(name):
            return self._read(self.resident.weight(name), self.program.tensors[name].nbytes)
        return np.frombuffer(self.resident.plan.weight(name), np.uint8)

    def fill_arena(self, byte: int) -> None:
        """Set every byte of the arena: 0xFF makes every float of it NaN. Counters stay as they are."""
        with self.device as cu:
            cu.cuMemsetD8(self.room.address, byte, self.section.arena)
            cu.cuCtxSynchronize()

    def read_arena(self, begin: int = 0, size: int | None = None) -> np.ndarray:
        """The arena's bytes, all or `size` of them."""
        return self._read(self.room.address + begin, self.section.arena - begin if size is None else size)

    def read_counters(self) -> np.ndarray:
        """The counters' bytes: all zero between inferences."""
        return self._read(self.room.counters, self.section.counters)

    def _read(self, address: int, size: int) -> np.ndarray:
        out = np.empty(size, np.uint8)
        with self.device as cu:
            cu.cuCtxSynchronize()
            if size:
                cu.cuMemcpyDtoH(out.ctypes.data, address, size)
        return out

    def close(self) -> None:
        """Free everything that no other engine uses. It cannot run afterwards."""
        self.room.wait()
        for part in (self._exec, self._graph):
            part.close()
        if self._own_maps:
            self._own_maps.close()
        if self._own_stream:
            self.stream.close()
        self._outputs.clear()
        if self._own_room:
            self.room.close()
        self.resident.engines.discard(self)
        del self.resident


class _Node:
    """A launch in the graph: its parameters, packed once, of which only addresses of inputs and outputs ever change."""

    handle: Any

    def __init__(self, engine: GpuEngine, cu: Driver, step: Step, launch: PlacedLaunch, function: Any):
        self.step, self.launch = step, launch
        if engine.device.driver_version >= PARAMETERS_DRIVER and not _takes(cu, function, launch.args):
            image = engine.plan.images[launch.image].function
            raise PlanError(f"step {step.op} hands {len(launch.args)} arguments to kernel {image}, whose code takes others")
        self.early = launch.early and engine.device.driver_version >= EARLY_DRIVER
        self.values = (ctypes.c_uint64 * len(launch.args))()  # a slot of 8 bytes each, whatever the type's size
        self.pointers = (ctypes.c_void_p * len(launch.args))()
        self.io: list[tuple[int, str, int]] = []  # slot, input or output, offset in bytes
        start = ctypes.addressof(self.values)
        for slot, arg in enumerate(launch.args):
            self.pointers[slot] = start + 8 * slot
            match arg:
                case Address("io", name, offset):
                    self.io.append((slot, name, offset))
                case Address():
                    self.values[slot] = engine._address(arg)
                case Int(value):
                    self.values[slot] = value & 0xFFFFFFFF
                case Float(value):
                    self.values[slot] = int(np.float32(value).view(np.uint32))
                case Map():
                    self.values[slot] = engine._map_table + 128 * engine._maps[arg]
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
        if launch.cooperative:
            resident = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.block, launch.smem)
            params.gridDimX = min(launch.grid[0], resident * engine.device.multiprocessors)
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block, 1, 1
        params.sharedMemBytes = launch.smem
        params.kernelParams = ctypes.addressof(self.pointers)
        self.params = params

    def add_to(self, graph: Any, before: list[Any], cu: Driver, launches: bool) -> Any:
        """A node of `graph` with this launch, after those in `before`, which it need not wait for if they are `launches`."""
        early = launches and self.early
        node = cu.cuGraphAddKernelNode(graph, [] if early else before, 0 if early else len(before), self.params)
        if early:
            cu.start_early(graph, before, node)
        if self.launch.cooperative:
            together = cu.CUkernelNodeAttrValue()
            together.cooperative = 1
            cu.cuGraphKernelNodeSetAttribute(node, cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, together)
        return node


def _takes(cu: Driver, function: Any, args: Sequence[PlanArg]) -> bool:
    """Whether a kernel's parameters are as many as these arguments, and end where they do: the driver reads what it is told."""
    end = 0
    for arg in args:
        size = 4 if isinstance(arg, Int | Float) else 8
        end = round_up(end, size) + size
    try:
        offset, size = cu.cuFuncGetParamInfo(function, len(args) - 1) if args else (0, 0)
    except DriverError:
        return False
    try:
        cu.cuFuncGetParamInfo(function, len(args))
    except DriverError:
        return offset + size == end
    return False


class Room:
    """Memory that engines of a session share, of which one runs at a time: the arena, counters, and inputs and outputs.

    arena, counters, maps  bytes; maps, of the tensor maps of the only engine
    io     bytes of inputs and outputs, of host memory too, allocated when they are first needed
    """

    def __init__(self, device: Device, arena: int, counters: int, maps: int = 0, io: int = 0):
        self.device, self.io = device, io
        begin = _aligned(_aligned(arena) + counters)
        self.memory = Memory(device, begin + maps, f"the arena ({mib(arena)})")
        self.address, self.counters = self.memory.address, self.memory.address + _aligned(arena)
        self.maps = self.memory.address + begin
        self._last_stream: int | None = None
        self._staged: tuple[Memory, PinnedMemory] | None = None
        with device as cu:
            untimed = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._done = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            self._earlier = Handle(device, cu.cuEventCreate(untimed), "cuEventDestroy")
            cu.cuMemsetD8(self.address, 0, self.memory.size)

    def staged(self, size: int) -> tuple[Memory, PinnedMemory]:
        """Memory for so many bytes of inputs and outputs, on the device and on the host."""
        if self._staged is None or self._staged[0].size < size:
            self.wait()
            size = max(size, self.io)
            self._staged = Memory(self.device, size, "inputs and outputs"), PinnedMemory(self.device, size)
        return self._staged

    def order_after(self, earlier: int, stream: int, own: int) -> None:
        """Make the stream wait for what is queued on another one up to here, unless the driver orders them already.

        own  the stream of the engines, which waits for the legacy default stream
        """
        if not (earlier in LEGACY and (stream == own or stream in LEGACY)):
            with self.device as cu:
                cu.cuEventRecord(self._earlier.value, earlier)
                cu.cuStreamWaitEvent(stream, self._earlier.value, 0)

    def order_after_last(self, stream: int) -> None:
        """Make the stream wait for the last inference, if that was queued on another one and may not be done."""
        if self._last_stream not in (None, stream):
            with self.device as cu:
                cu.cuStreamWaitEvent(stream, self._done.value, 0)

    def mark_last(self, stream: int | None) -> None:
        """What has been queued on the stream up to here is the last inference; None: it is done."""
        if stream is not None:
            self.device.cu.cuEventRecord(self._done.value, stream)
        self._last_stream = stream

    def wait(self) -> None:
        """Until the last inference is done."""
        if self._last_stream is not None:
            with self.device as cu, suppress(DriverError):
                cu.cuEventSynchronize(self._done.value)

    def close(self) -> None:
        self.wait()
        for part in (self._done, self._earlier, self.memory, *(self._staged or ())):
            part.close()


def _most(plan: Plan) -> tuple[int, int, int]:
    """The largest arena and counters of a plan's families, and the most bytes of inputs and outputs: see `Room`."""
    sections = [s for family in plan.families for s in family.entry.sections]
    programs = [family.highest.program for family in plan.families]
    io = max(sum(_aligned(p.tensors[n].nbytes) for n in (*p.inputs, *p.outputs)) for p in programs)
    return max(s.arena for s in sections), max(s.counters for s in sections), io


class Staging:
    """A room's memory for every input and output of a program, on the device and pinned on the host, laid out alike."""

    def __init__(self, room: Room, program: Program):
        self.device, self.program, self.offsets, total = room.device, program, dict[str, int](), 0
        for name in program.inputs + program.outputs:
            self.offsets[name] = total
            total = _aligned(total + program.tensors[name].nbytes)
        self.memory, pinned = room.staged(total)
        self.bytes = np.ctypeslib.as_array(pinned.bytes)

    def address(self, name: str) -> int:
        """Where an input or output lies on the device."""
        return self.memory.address + self.offsets[name]

    def host(self, name: str) -> np.ndarray:
        """Where it lies on the host: an array in pinned memory."""
        t = self.program.tensors[name]
        start = self.offsets[name]
        return self.bytes[start : start + t.nbytes].view(t.dtype.numpy).reshape(t.shape)

    def put(self, name: str, value: np.ndarray, stream: int) -> None:
        """Queue the copy of an input to the device."""
        host = self.host(name)
        np.copyto(host, value)
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyHtoDAsync(self.address(name), host.ctypes.data, host.nbytes, stream)

    def fetch(self, name: str, stream: int) -> None:
        """Queue the copy of an output to the host."""
        host = self.host(name)
        if host.nbytes:
            with self.device as cu:
                cu.cuMemcpyDtoHAsync(host.ctypes.data, self.address(name), host.nbytes, stream)


def _launches(section: Section) -> Iterator[PlacedLaunch]:
    return (launch for step in section.steps for launch in step.launches)


def _weights_of(section: Section) -> Iterator[str]:
    """The constants whose addresses the section's launches take."""
    for launch in _launches(section):
        for arg in launch.args:
            address = arg.address if isinstance(arg, Map) else arg
            if isinstance(address, Address) and address.space == "weights":
                yield address.name


def _aligned(n: int) -> int:
    return round_up(n, ALIGN)
