"""What is loaded of a plan's entry on a GPU: its code, weights, graph and tensor maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import DeviceError
from tccompile.ir.branches import branches
from tccompile.ir.loops import bodies
from tccompile.ir.memory import whereabouts
from tccompile.plan.file import Plan
from tccompile.plan.format import Address, Entry, Family, Map, PlacedLaunch, Section, Step
from tccompile.plan.formulas import computed, integers
from tccompile.runtime.driver import Device, DriverError, Handle, Memory
from tccompile.runtime.generations import native
from tccompile.runtime.graph import LaunchGraph, launches
from tccompile.runtime.loops import Placed
from tccompile.runtime.maps import Encoder, MapTable
from tccompile.runtime.resident import Resident, choices, offered, resident
from tccompile.runtime.room import Room
from tccompile.terminal import plain


class Loaded:
    """An entry's code, weights, graph and tensor maps on a GPU: what its engine runs, or the engines of a family's members.

    family  whose member the entry is, of which other members may be run then
    target  the generation whose code it took, as "sm_80" or "sm_80 (PTX)"; `number`, which of the entry's sections has it
    stream, shared, room  where inferences run that name no stream, where the weights lie, and memory that it shares with
            others, of which one runs at a time; None: its own stream and room, the weights of the plan's other sessions
    table   where its tensor maps lie; None without any. `encode` makes those of other sizes
    Raises DeviceError if nothing in the plan runs on the device, and LaunchError if memory does not suffice or the driver
    refuses a launch.
    """

    def __init__(
        self,
        plan: Plan,
        entry: Entry,
        device: Device,
        target: str | None = None,
        stream: Handle | None = None,
        shared: Resident | None = None,
        room: Room | None = None,
        family: Family | None = None,
    ):
        self.plan, self.entry, self.device = plan, entry, device
        self.resident = shared or resident(plan, device, self)
        self.resident.users.add(self)
        self.section, functions, rooms = self._first_that_loads(choices(plan, entry, device.cc, target), target, family)
        self.number = _place(self.section, entry)
        self.target = self.section.arch + (" (PTX)" if plan.kind(self.section) == "ptx" else "")
        self.resident.upload(list(_weights_of(self.section)))
        self._own_room, self._own_stream = room is None, stream is None
        self.room = room or Room(device, self.section.arena, self.section.counters)
        with device as cu:
            self.stream = stream or Handle(device, cu.cuStreamCreate(0), "cuStreamDestroy")
            self.maps = MapTable(family.entry.sections[self.number] if family else self.section)
            self.encode = Encoder(device, self.maps.maps, self.address)
            numbers = computed(family.formulas, [size.low for size in family.sizes]) if family else ()
            self.table = table_of(device, self.encode(integers(numbers)))
            places = self.maps.places(self.table.address if self.table else 0)
            named = [image.function for image in plan.images]
            program = (family.highest if family else entry).program
            parts = [self._placed(body.going, body.first, body.last, most=body.most) for body in bodies(program)]
            for branch in () if family else branches(program):
                parts.append(self._placed(branch.going, branch.first, branch.last, wanted=branch.wanted, by=branch.by))
            self.graph = LaunchGraph(
                device, self.section, functions, named, self.address, places, rooms, self._where, parts, family is None
            )

    def _first_that_loads(
        self, sections: list[Section], target: str | None, family: Family | None
    ) -> tuple[Section, dict[int, Any], dict[int, int]]:
        """The best section whose code the driver takes, the functions of its images, and the most shared memory of each."""
        refusals = []
        greatest = family.highest if family else self.entry
        for section in sections:
            rooms: dict[int, int] = {}
            for launch in (*launches(section), *launches(greatest.sections[_place(section, self.entry)])):
                rooms[launch.image] = max(rooms.get(launch.image, 0), launch.smem)
            try:
                return section, self.resident.functions(rooms), rooms
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
        if refusals:
            refusals.append(f"a newer driver than this one, of CUDA {self.device.cuda}, may take it")
        raise DeviceError(
            "; ".join(
                [f"no code{asked} in the plan runs on {self.device}: it has {offered(self.plan, self.entry)}", *refusals, way_out]
            )
        )

    def address(self, a: Address) -> int:
        """The device address of anything but a model input or output, whose addresses come with each run."""
        match a.space:
            case "arena":
                return self.room.address + a.bytes
            case "counters":
                return self.room.counters + a.bytes
            case "weights":
                return self.resident.weight(a.name) + a.bytes
        raise AssertionError(f"an address in {a.space!r} is not fixed")

    def _placed(self, going: str, first: int, last: int, **how: Any) -> Placed:
        """A loop's body or a branch, and where its flag lies."""
        space, name, start = whereabouts(self.entry.program, self.section.offsets, going)
        return Placed(first, last, self.address(Address(space, name, start)), **how)

    def _where(self, step: Step, launch: PlacedLaunch) -> str:
        """A launch, for people."""
        op, tensors = self.entry.program.ops[step.op], self.entry.program.tensors
        sizes = ", ".join(f"{n} {'x'.join(map(str, tensors[n].shape))}" for n in (*op.inputs, op.y))
        how = f"grid {launch.grid}, {launch.block} threads, {launch.smem} bytes of shared memory"
        return plain(f"node {op.nodes[0]} ({sizes}): kernel {step.kernel}, {how}")

    def close(self) -> None:
        """Free everything that is its own."""
        self.resident.users.discard(self)
        del self.resident
        self.graph.close()
        if self.table:
            self.table.close()
        if self._own_stream:
            self.stream.close()
        if self._own_room:
            self.room.close()


def table_of(device: Device, encoded: np.ndarray) -> Memory | None:
    """Memory with tensor maps in it; None for none."""
    if not encoded.size:
        return None
    table = Memory(device, encoded.nbytes, "tensor maps")
    copy_maps(device, table.address, encoded)
    return table


def copy_maps(device: Device, address: int, encoded: np.ndarray) -> None:
    """Copy tensor maps to where they lie."""
    with device as cu:
        cu.cuMemcpyHtoD(address, encoded.ctypes.data, encoded.nbytes)


def _place(section: Section, entry: Entry) -> int:
    """Which of an entry's sections one is."""
    return next(i for i, other in enumerate(entry.sections) if other is section)


def _weights_of(section: Section) -> Iterator[str]:
    """The constants whose addresses the section's launches take."""
    for launch in launches(section):
        for arg in launch.args:
            address = arg.address if isinstance(arg, Map) else arg
            if isinstance(address, Address) and address.space == "weights":
                yield address.name
