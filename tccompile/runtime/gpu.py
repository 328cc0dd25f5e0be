"""The GPU engine: inferences, times and checks of what is loaded for an entry, or of a member of a family; and its platform."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from tccompile.errors import LaunchError, VerificationError
from tccompile.ir.branches import taken
from tccompile.ir.loops import in_turn
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, to_storage
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Family, Section, Step
from tccompile.runtime.arrays import IO_ALIGN, Array, DeviceArray, DeviceBuffer, Exchange, adopt, as_stored
from tccompile.runtime.driver import Driver, DriverError, Handle, Memory, open_device
from tccompile.runtime.engine import Engine
from tccompile.runtime.family import GpuFamily, Member
from tccompile.runtime.finite import Scan, check_finite
from tccompile.runtime.graph import Executable
from tccompile.runtime.loaded import Loaded
from tccompile.runtime.profile import Profile, profiled, roof
from tccompile.runtime.resident import Resident, taken_out
from tccompile.runtime.room import Room, Staging, aligned, most, touched

WARMUP = 3
"""Inferences ahead of those whose steps are timed."""


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
        self._users: weakref.WeakSet[Loaded] = weakref.WeakSet()
        self._families: list[GpuFamily] = []

    @property
    def name(self) -> str:
        return f"gpu:{self.device.ordinal}"

    def load(self, entry: Entry) -> GpuEngine:
        engine = GpuEngine(self._loaded(entry, self._room), None, self.check_finite)
        if self._room is not None:
            self._run_once(engine)
        return engine

    def load_families(self) -> None:
        if not self.plan.families:
            return
        greatest = most(self.plan)
        self._room = Room(self.device, greatest.arena, greatest.counters, greatest.io, greatest.outputs)
        self._room.prepare(greatest, int(self._stream.value))
        for number, family in enumerate(self.plan.families):
            loaded = self._loaded(family.lowest, self._room, family)
            self._families.append(GpuFamily(family, loaded))
            engine = self.load_member(number, [size.low for size in family.sizes])
            self._run_once(engine)
            engine.close()

    def _run_once(self, engine: GpuEngine) -> None:
        """Run an engine on zeros: what the driver does when a graph and its kernels first run, no new size waits for then."""
        sizes = {name: aligned(t.nbytes) for name, t in engine.io.items()}
        *offsets, size = accumulate(sizes.values(), initial=0)
        memory = Memory(self.device, size, "inputs and outputs")
        addresses = {name: memory.address + offset for name, offset in zip(sizes, offsets, strict=True)}
        with self.device as cu:
            cu.cuMemsetD8Async(memory.address, 0, memory.size, engine.stream.value)
            engine.launch(addresses, engine.stream.value)
            engine.synchronize(engine.stream.value)
        memory.close()

    def load_member(self, number: int, sizes: Sequence[int]) -> GpuEngine:
        family = self._families[number]
        return GpuEngine(family.loaded, family.member(sizes), self.check_finite)

    def _loaded(self, entry: Entry, room: Room | None = None, family: Family | None = None) -> Loaded:
        loaded = Loaded(self.plan, entry, self.device, self.target, self._stream, self._resident, room, family)
        self._resident = loaded.resident
        self._users.add(loaded)
        return loaded

    def close(self) -> None:
        """Free the stream, and what members of families share. Its engines are closed before."""
        if self._room is not None:
            self._room.wait()
        for family in self._families:
            family.close()
        self._families.clear()
        self._resident = None
        if self._room is not None:
            self._room.close()
        self._stream.close()

    def refit(self, engines: Iterable[Engine], constants: Mapping[str, bytes | memoryview]) -> None:
        """See `Platform.refit`: addresses stay, so graphs and tensor maps do too."""
        assert self._resident is not None, "no engine is loaded"
        taken_out(self._resident, self._users)
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


def _is_usable(array: Array) -> TypeGuard[DeviceBuffer]:
    """Whether kernels can use an array where it lies."""
    return isinstance(array, DeviceBuffer) and not array.address % IO_ALIGN


class GpuEngine:
    """An entry of a plan on a GPU, an `Engine`: `run` launches its graph.

    loaded        what it runs; of a member of a family, what is loaded for another one
    member        what is its own, of a member of a family; None for what was loaded for this entry alone, which it closes
    check_finite  `run` waits for the outputs, has a kernel look at them, and raises VerificationError that names the first node
                  whose result is not finite, if one reaches an output
    Raises LaunchError if memory does not suffice or the driver refuses a launch.
    """

    def __init__(self, loaded: Loaded, member: Member | None = None, check_finite: bool = False):
        self._loaded, self._member, self._check_finite = loaded, member, check_finite
        self.plan, self.device, self.resident = loaded.plan, loaded.device, loaded.resident
        self.target, self.stream, self.room = loaded.target, loaded.stream, loaded.room
        self._own = int(self.stream.value)
        program = loaded.entry.program
        self.inputs, self.outputs = program.inputs, program.outputs
        self.io = member.io if member else {name: program.tensors[name] for name in (*self.inputs, *self.outputs)}
        self.counts = member.counts if member else program.counts
        graph = loaded.graph
        self._exec = member.executable if member else Executable(graph, graph.instantiated(), graph.numbers)
        self._staging = Staging(self.room, self.io)
        self._scan: Scan | None = None

    @cached_property
    def entry(self) -> Entry:
        """The entry; of a member of a family made when it is first asked for: inferences do not need it."""
        return self._member.entry() if self._member else self._loaded.entry

    @property
    def program(self) -> Program:
        """The entry's program."""
        return self.entry.program

    @property
    def section(self) -> Section:
        """That of the entry's sections whose code runs."""
        return self.entry.sections[self._loaded.number]

    def _handle(self, create: str, *args: Any, destroy: str) -> Handle:
        with self.device as cu:
            return Handle(self.device, getattr(cu, create)(*args), destroy)

    def describe(self) -> str:
        return f"{self.device}, code for {self.target}"

    # --- One inference -----------------------------------------------------------------------------------------------

    def run(
        self, arrays: Mapping[str, Array], outputs: Mapping[str, Array | None] | None = None, stream: int | None = None
    ) -> dict[str, Any]:
        """See `Engine.run`: outputs are made on the device if any input lies there, and else on the host."""
        queue = self._own if stream is None else stream
        wanted = dict.fromkeys(self.outputs) if outputs is None else outputs
        targets = {name: target for name, target in wanted.items() if target is not None}
        buffers = [a for a in (*arrays.values(), *targets.values()) if isinstance(a, DeviceBuffer)]
        on_device = any(isinstance(arrays[name], DeviceBuffer) for name in self.inputs)
        with self.device as cu:
            self._order_after_producers(buffers, queue)
            addresses = {name: a.address for name, a in {**arrays, **targets}.items() if _is_usable(a)}
            made: dict[str, DeviceArray] = {}
            if on_device:
                made = {n: self._output(n, queue) for n in self.outputs if n in wanted and n not in targets}
                addresses |= {name: array.memory.address for name, array in made.items()}
            staged = [name for name in (*self.inputs, *self.outputs) if name not in addresses]
            if staged:
                addresses |= self._stage(cu, staged, arrays, queue)
            self.launch_in(cu, addresses, queue)
            if self._check_finite:
                self._check_outputs(addresses, queue)

            landed = self._fetch(cu, [name for name in staged if name in wanted], wanted, queue)
            if stream is None or landed or len(buffers) < len(arrays) + len(targets):
                self.synchronize(queue)
                self.room.mark_last(None)
            else:
                self.room.mark_last(queue)
                if made:
                    first, *others = made.values()
                    first.mark(others)

            for target, host in landed.values():
                if host is not target:
                    np.copyto(target, host)
            return {n: made[n] if n in made else landed[n][0] for n in wanted if n not in targets}

    def _order_after_producers(self, buffers: Sequence[DeviceBuffer], stream: int) -> None:
        """Make the stream wait for whoever works on the buffers, and for the last inference."""
        for where in {b.stream for b in buffers}:
            producer = where.stream(self.device.ordinal) if isinstance(where, Exchange) else where
            if producer is not None and producer != stream:
                self.room.order_after(producer, stream, self._own)
        self.room.order_after_last(stream)

    def _stage(self, cu: Driver, names: Sequence[str], arrays: Mapping[str, Array], stream: int) -> dict[str, int]:
        """Where inputs and outputs are staged, after inputs have been queued to be copied there."""
        staging = self.staging(names, stream)
        for name in names:
            array = arrays.get(name)
            if isinstance(array, np.ndarray):
                staging.put(name, as_stored(array, self.io[name].dtype), stream)
            elif array is not None:
                cu.cuMemcpyDtoDAsync(staging.address(name), array.address, self.io[name].nbytes, stream)
        return {name: staging.address(name) for name in names}

    def _fetch(
        self, cu: Driver, staged: Sequence[str], wanted: Mapping[str, Array | None], stream: int
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Queue the copies of staged outputs to where they are wanted. Of those that go to the host: the arrays, and where they
        then lie, which may be elsewhere."""
        there = {name: wanted[name] for name in staged}
        # While the GPU works: some of the copies to the host return when they are done, and not before.
        new = [name for name, a in there.items() if a is None]
        made = dict(zip(new, touched([self.io[name] for name in new]), strict=True))
        on_host = {n: made[n] if a is None else a for n, a in there.items() if not isinstance(a, DeviceBuffer)}
        landed = {}
        try:
            for name, target in there.items():
                if isinstance(target, DeviceBuffer):
                    cu.cuMemcpyDtoDAsync(target.address, self._staging.address(name), self.io[name].nbytes, stream)
                else:
                    landed[name] = on_host[name], self._staging.fetch(name, on_host[name], stream)
        except DriverError as error:
            raise self._failed(error) from error
        return landed

    def launch(self, addresses: Mapping[str, int], stream: int) -> None:
        """Queue one inference. `addresses` are those of all inputs and outputs on the device, each a multiple of IO_ALIGN.

        Inferences of one engine run one after the other, whatever their streams: they share the arena.
        """
        with self.device as cu:
            self.launch_in(cu, addresses, stream)

    def launch_in(self, cu: Driver, addresses: Mapping[str, int], stream: int) -> None:
        """`launch`, for who is in the device's context already."""
        try:
            self._exec.launch(cu, addresses, stream)
        except DriverError as error:
            raise LaunchError(f"launching {self.plan.name} on {self.device} failed: {error}") from error

    def synchronize(self, stream: int) -> None:
        """Wait until everything on the stream is done; LaunchError if a kernel failed."""
        with self.device as cu:
            try:
                cu.cuStreamSynchronize(stream)
            except DriverError as error:
                raise self._failed(error) from error

    def _failed(self, error: DriverError) -> LaunchError:
        return LaunchError(f"running {self.plan.name} on {self.device} failed: {error}")

    def staging(self, names: Sequence[str], stream: int) -> Staging:
        """Memory for inputs and outputs that do not lie on the device, with places for these, for what a stream is to do."""
        self._staging.place(names, stream)
        return self._staging

    def _output(self, name: str, stream: int) -> DeviceArray:
        """An array for an output that is written on the stream."""
        t = self.io[name]
        output, spare = self.room.outputs.take(name, t.nbytes, stream)
        return DeviceArray(output, t.shape, t.dtype, stream, stream == self._own, spare)

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
        addresses = {name: a.address for name, a in arrays.items() if _is_usable(a)}
        staged = [name for name in (*self.inputs, *self.outputs) if name not in addresses]
        with self.device as cu:
            return addresses | self._stage(cu, staged, arrays, self._own)

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
            nodes = self._exec.nodes()
            node = next(nodes, None)
            for step in self.section.steps:
                while node is not None and node.step.op == step.op:
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
            self._scan = Scan(self.device, list(self.outputs))
        wrong = self._scan.wrong(tensors, addresses, stream)
        if not wrong:
            return
        left_out: dict[str, np.ndarray] = {}  # copies that no step makes: a later one reads what they are of

        def meaning(op: Op) -> np.ndarray:
            given = {n: left_out[n] if n in left_out else self._elements(n, addresses) for n in op.inputs}
            return compute(op, self.program, given)

        def says(name: str) -> bool:
            return bool(self._elements(name, addresses).item())

        for i in taken(self.program, in_turn(self.program, lambda body: says(body.going)), says):
            step, op = self.section.steps[i], self.program.ops[i]
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
            for node in self._exec.nodes():
                if node.step.op == step.op:
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
        if self._member:  # what is queued of it runs as it was told: nothing waits for that
            self._member.give_back()
        else:
            self.room.wait()
            self._exec.close()
            self._loaded.close()
        del self.resident, self._loaded
