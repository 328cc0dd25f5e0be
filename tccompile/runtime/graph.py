"""A section's launches as a CUDA graph: its nodes and edges, and what is instantiated of it with the numbers for some shapes.

A graph is made once for an entry, and once for a family, whose members have the same launches with other numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tccompile.errors import LaunchError, PlanError
from tccompile.ir.extent import round_up
from tccompile.plan.format import Address, Float, Int, Map, PlacedLaunch, PlanArg, Section, Step
from tccompile.plan.rules import GRID
from tccompile.runtime.driver import Device, Driver, DriverError, Handle
from tccompile.runtime.loops import LOOP_DRIVER, UNROLLED, Conditional, Placed

EARLY_DRIVER = 12030
"""The first driver whose graphs have programmatic edges."""

PARAMETERS_DRIVER = 12040
"""The first driver that says what a kernel's parameters are."""


TOLD = np.dtype(
    [
        *(("func", np.uint64), ("grid", np.uint32, 3), ("block", np.uint32, 3), ("smem", np.uint32), ("_", np.uint32)),
        *((name, np.uint64) for name in ("params", "extra", "kern", "ctx")),
    ]
)
"""What the driver is told of a kernel's node, CUDA_KERNEL_NODE_PARAMS as it has been since CUDA 12.0. Where graphs are told other
numbers between two inferences, the driver's own function is called: the bindings take longer than it does."""

Use = tuple[int, int, int]
"""An argument that is the address of an input or output: the node's number, its place among the values, the offset in bytes."""


def launches(section: Section) -> Iterator[PlacedLaunch]:
    """All launches of a section, step by step."""
    return (launch for step in section.steps for launch in step.launches)


class Node:
    """A launch in a graph.

    first   its first argument's place among the values of all launches; each takes 8 bytes, whatever its type's size
    room    bytes of shared memory that it may be told to have, at most
    params  what the driver is told: code and block, which stay; grid, shared memory and arguments are put in when it is told
    most    blocks along the first axis of its grid, at most
    handles  its nodes in the graph: several, where a loop's body is in it several times
    """

    def __init__(self, device: Device, cu: Driver, step: Step, launch: PlacedLaunch, function: Any, first: int, room: int):
        self.step, self.launch, self.first = step, launch, first
        self.handles: list[Any] = []
        self.early = launch.early and device.driver_version >= EARLY_DRIVER
        self.most = GRID[0]
        if launch.cooperative:
            resident = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.block, room)
            self.most = resident * device.multiprocessors
        self.params = params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block, 1, 1

    def add_to(self, graph: Any, before: list[Any], cu: Driver, launched: bool) -> Any:
        """A node of `graph` with this launch, after those in `before`, which it need not wait for if they are `launched`.

        Its parameters are those of the Executable that were last asked for.
        """
        early = launched and self.early
        node = cu.cuGraphAddKernelNode(graph, [] if early else before, 0 if early else len(before), self.params)
        if early:
            cu.start_early(graph, before, node)
        if self.launch.cooperative:
            together = cu.CUkernelNodeAttrValue()
            together.cooperative = 1
            cu.cuGraphKernelNodeSetAttribute(node, cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, together)
        return node


class Numbers:
    """What launches are told: the values of their arguments, and all else of them as the driver reads it.

    values  8 bytes each, one after the other, of all nodes
    told    TOLD of each node
    first   the place of each node's first argument among the values
    """

    def __init__(self, values: np.ndarray, told: np.ndarray, first: np.ndarray):
        self.values, self.told, self._first = values, told, first
        self._pointers = values.ctypes.data + 8 * np.arange(max(len(values), 1), dtype=np.uint64)
        told["params"] = self._pointers.ctypes.data + 8 * first

    def copy(self) -> Numbers:
        """The same numbers elsewhere."""
        return Numbers(self.values.copy(), self.told.copy(), self._first)

    def put(self, number: int, node: Node) -> None:
        """Write what the node of that number is told into its parameters."""
        told, params = self.told[number], node.params
        params.gridDimX, params.gridDimY, params.gridDimZ = told["grid"].tolist()
        params.sharedMemBytes, params.kernelParams = int(told["smem"]), int(told["params"])


End = tuple[Any, bool]
"""A node of a graph that ends something, and whether it is a launch."""


class LaunchGraph:
    """The graph of a section: a node for each launch, after the last nodes of the steps that its step comes after.

    functions  by the number of the code; `named`, what these are called
    address    where something lies that does not come with each inference
    maps       where tensor maps lie, of all arguments that are some, in order; `map_places`, these arguments' places
    rooms      the most shared memory that launches of each code have
    where      names a launch for people
    parts      those steps that are a loop's body, or a branch
    once       whether it is instantiated once: the driver takes a graph with while nodes only once
    uses       of each input and output
    Raises LaunchError, which names the node, if the driver refuses it; PlanError for arguments that its code does not take.
    """

    def __init__(
        self,
        device: Device,
        section: Section,
        functions: Mapping[int, Any],
        named: Sequence[str],
        address: Callable[[Address], int],
        maps: Sequence[int],
        rooms: Mapping[int, int],
        where: Callable[[Step, PlacedLaunch], str],
        parts: Sequence[Placed] = (),
        once: bool = True,
    ):
        self.device, self.where = device, where
        self.nodes: list[Node] = []
        self.map_places: list[int] = []
        self.uses: dict[str, list[Use]] = {}
        self._of_step: list[list[int]] = []  # the numbers of its nodes
        with device as cu:
            self._graph = Handle(device, cu.cuGraphCreate(0), "cuGraphDestroy")
            self._conditional = Conditional(device) if parts and once and device.driver_version >= LOOP_DRIVER else None
            self._parts = [part for part in parts if part.most or self._conditional is not None]
            for step in section.steps:
                self._of_step.append([])
                for launch in step.launches:
                    if 0 in launch.grid:  # a tensor without elements
                        continue
                    function = functions[launch.image]
                    if device.driver_version >= PARAMETERS_DRIVER and not _takes(cu, function, launch.args):
                        told = f"{len(launch.args)} arguments to kernel {named[launch.image]}, whose code takes others"
                        raise PlanError(f"step {step.op} hands {told}")
                    first = self.nodes[-1].first + len(self.nodes[-1].launch.args) if self.nodes else 0
                    self._of_step[-1].append(len(self.nodes))
                    self.nodes.append(Node(device, cu, step, launch, function, first, rooms[launch.image]))
            self.numbers = self._numbers(address, iter(maps))
            self._add_steps(cu, self._graph.value, section, range(len(section.steps)), [], None)
        self.handles = [[ctypes.c_void_p.from_param(int(handle)) for handle in node.handles] for node in self.nodes]

    def _add_steps(
        self, cu: Driver, graph: Any, section: Section, steps: range, before: list[End], inside: Placed | None
    ) -> list[End]:
        """Puts steps into a graph, those that come after no other of them after what is `before`: what ends the last one.

        inside  the part that they are
        """
        ends: dict[int, list[End]] = {}
        made = before
        at = steps.start
        while at < steps.stop:
            part = self._part(at, inside)
            own = range(at, part.last + 1 if part else at + 1)
            waits = {s for step in own for s in section.steps[step].after} | ({part.by} if part else set())
            found = [end for s in sorted(waits) if steps.start <= s < at for end in ends[s]]
            after = list({int(node): (node, launched) for node, launched in found}.values()) or before
            made = self._add(cu, graph, at, after) if part is None else self._add_part(cu, graph, section, part, after)
            ends.update(dict.fromkeys(own, made))
            at = own.stop
        return made

    def _part(self, step: int, inside: Placed | None) -> Placed | None:
        """The largest part that begins with a step, of those in another one."""
        found = [part for part in self._parts if part.first == step and (inside is None or inside.holds(part))]
        return max(found, key=lambda part: part.last, default=None)

    def _add(self, cu: Driver, graph: Any, step: int, before: list[End]) -> list[End]:
        """A step's launches, one after the other: what ends it."""
        for number in self._of_step[step]:
            node = self.nodes[number]
            self.numbers.put(number, node)
            try:
                launched = bool(before) and all(launched for _, launched in before)
                handle = node.add_to(graph, [end for end, _ in before], cu, launched)
            except DriverError as error:
                raise LaunchError(f"{self.where(node.step, node.launch)}: {error}") from error
            node.handles.append(handle)
            before = [(handle, True)]
        return before

    def _add_part(self, cu: Driver, graph: Any, section: Section, part: Placed, before: list[End]) -> list[End]:
        """A conditional node with a loop's body or a branch, or a loop's body as often as it may run: what ends it."""
        steps = range(part.first, part.last + 1)
        if self._conditional is None:
            count = part.most * sum(len(own) for own in self._of_step[part.first : part.last + 1])
            if count > UNROLLED:
                raise LaunchError(
                    f"a loop of up to {part.most} iterations, {count} launches, needs a driver of CUDA 12.4 or newer, and a plan "
                    f"for fixed shapes: {self.device} has a driver of CUDA {self.device.cuda}; say fewer iterations by --limit"
                )
            for _ in range(part.most):
                before = self._add_steps(cu, graph, section, steps, before, part)
            return before
        try:
            node, body, told = self._conditional.begin(cu, graph, [end for end, _ in before], part)
            ends = self._add_steps(cu, body, section, steps, [], part)
            if part.most:
                self._conditional.end(cu, body, [end for end, _ in ends], part, told)
        except DriverError as error:
            what = "loop" if part.most else "branch"
            raise LaunchError(f"the {what} of steps {part.first} to {part.last}: {error}") from error
        return [(node, False)]

    def _numbers(self, address: Callable[[Address], int], maps: Iterator[int]) -> Numbers:
        """What the launches are told as the section has it; inputs and outputs have no addresses yet."""
        values = np.zeros(sum(len(node.launch.args) for node in self.nodes), np.uint64)
        for number, node in enumerate(self.nodes):
            for place, arg in enumerate(node.launch.args, node.first):
                match arg:
                    case Address("io", name, offset):
                        self.uses.setdefault(name, []).append((number, place, int(offset)))
                    case Address():
                        values[place] = address(arg)
                    case Map():
                        values[place] = next(maps)
                        self.map_places.append(place)
                    case Int(value):
                        values[place] = int(value) & 0xFFFFFFFF
                    case Float(value):
                        values[place] = int(np.float32(value).view(np.uint32))
        told = np.zeros(len(self.nodes), TOLD)
        for number, node in enumerate(self.nodes):
            x, *others = node.launch.grid
            told[number]["func"], told[number]["smem"] = int(node.params.func), node.launch.smem
            told[number]["grid"], told[number]["block"] = (min(x, node.most), *others), (node.launch.block, 1, 1)
        return Numbers(values, told, np.array([node.first for node in self.nodes], np.uint64))

    def instantiated(self) -> Handle:
        """What can be launched, with the numbers that the graph was made with. LaunchError names the node that is refused."""
        with self.device as cu:
            how = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
            try:
                return Handle(self.device, cu.cuGraphInstantiateWithParams(self._graph.value, how), "cuGraphExecDestroy")
            except DriverError as error:
                culprits = [n for n in self.nodes if int(how.hErrNode_out) in map(int, n.handles)]
                what = f"{self.where(culprits[0].step, culprits[0].launch)}: " if culprits else ""
                raise LaunchError(f"{what}{error}") from error

    def close(self) -> None:
        self._graph.close()
        if self._conditional is not None:
            self._conditional.close()


class Executable:
    """A graph to launch, with numbers of its own.

    The driver is told numbers by calls whose arguments are made once.
    """

    def __init__(self, graph: LaunchGraph, instance: Handle, numbers: Numbers):
        self.graph, self.instance, self.numbers = graph, instance, numbers
        own = ctypes.c_void_p.from_param(int(instance.value))
        told = [ctypes.c_void_p.from_param(numbers.told.ctypes.data + TOLD.itemsize * n) for n in range(len(graph.nodes))]
        self._calls = [[(own, handle, at) for handle in handles] for handles, at in zip(graph.handles, told, strict=True)]
        self._uses: Mapping[str, Sequence[Use]] = graph.uses
        self._stale: Collection[int] = ()
        self._bound: dict[str, int] = {}

    def renumbered(self, uses: Mapping[str, Sequence[Use]], nodes: Collection[int]) -> None:
        """The numbers of these nodes are others than the instance has, and the next launch tells it. `uses`: see LaunchGraph."""
        self._uses, self._stale, self._bound = uses, nodes, {}

    def launch(self, cu: Driver, addresses: Mapping[str, int], stream: int) -> None:
        """Queue one inference on inputs and outputs at these addresses. Raises DriverError."""
        try:
            if self._stale or addresses != self._bound:
                self._bind(cu, addresses)
            cu.cuGraphLaunch(self.instance.value, stream)
        except DriverError:
            self._bound, self._stale = {}, range(len(self.graph.nodes))
            raise

    def _bind(self, cu: Driver, addresses: Mapping[str, int]) -> None:
        changed = {*self._stale}
        for name, address in addresses.items():
            if self._bound.get(name) != address:
                for number, place, offset in self._uses.get(name, ()):
                    self.numbers.values[place] = address + offset
                    changed.add(number)
        self.tell(cu, sorted(changed))
        self._bound, self._stale = dict(addresses), ()

    def tell(self, cu: Driver, nodes: Iterable[int]) -> None:
        """Tell the instance the numbers of these nodes."""
        cu.native_calls("cuGraphExecKernelNodeSetParams", chain.from_iterable(self._calls[number] for number in nodes))

    def nodes(self) -> Iterator[Node]:
        """The nodes in order, each with its parameters set to these numbers when it comes."""
        for number, node in enumerate(self.graph.nodes):
            self.numbers.put(number, node)
            yield node

    def close(self) -> None:
        self.instance.close()


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
        return bool(offset + size == end)
    return False
