"""Loops and branches in a graph: conditional nodes, whose bodies are graphs that run by what a byte on the device says.

A kernel of one thread tells the node what the byte says: before it, and at the end of each iteration of a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tccompile.runtime.driver import Device, Driver, Handle

PTX = Path(__file__).with_name("loop.ptx")
"""The code of that kernel; the driver knows the function that it calls."""

ENTRY = b"tc_loop"

LOOP_DRIVER = 12040
"""The first driver that has such nodes. For older ones, and for families, a loop's body is in the graph as often as it may run,
and branches run whether or not they are taken."""

UNROLLED = 1 << 17
"""Launches that loops may have in such a graph."""


@dataclass(frozen=True)
class Placed:
    """A part of a section that runs by what a byte says: its first and last step, and the byte's address.

    most    how often it runs at most, of a loop, which goes on while the byte is not 0; 0 for a branch
    wanted  what the byte says if a branch is taken
    by      the step that writes the byte, of a branch
    """

    first: int
    last: int
    going: int
    most: int = 0
    wanted: bool = True
    by: int = -1

    def holds(self, other: Placed) -> bool:
        """Whether another part lies in this one."""
        return self is not other and self.first <= other.first and other.last <= self.last


class Conditional:
    """Adds conditional nodes to graphs. The graphs' instances must not outlive it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        with device as cu:
            self._module = Handle(device, cu.cuModuleLoadData(PTX.read_bytes() + b"\0"), "cuModuleUnload")
            self._function = cu.cuModuleGetFunction(self._module.value, ENTRY)
        self._told: list[np.ndarray] = []

    def begin(self, cu: Driver, graph: Any, before: list[Any], part: Placed) -> tuple[Any, Any, Any]:
        """A node of a graph, after others: the node, its body, and what `end` is to be told of a loop."""
        handle = cu.cuGraphConditionalHandleCreate(graph, self.device.context, 0, 0)
        told = self._tell(cu, graph, before, part, int(handle))
        kinds = cu.CUgraphConditionalNodeType
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = kinds.CU_GRAPH_COND_TYPE_WHILE if part.most else kinds.CU_GRAPH_COND_TYPE_IF
        params.conditional.size = 1
        params.conditional.ctx = self.device.context
        node = cu.add_node(graph, [told], params)
        return node, params.conditional.phGraph_out[0], handle

    def end(self, cu: Driver, body: Any, before: list[Any], part: Placed, handle: Any) -> None:
        """The last node of a loop's body."""
        self._tell(cu, body, before, part, int(handle))

    def _tell(self, cu: Driver, graph: Any, before: list[Any], part: Placed, handle: int) -> Any:
        values = np.array([part.going, handle, not part.wanted], np.uint64)
        pointers = values.ctypes.data + 8 * np.arange(3, dtype=np.uint64)
        self._told += [values, pointers]
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.kernelParams = pointers.ctypes.data
        return cu.cuGraphAddKernelNode(graph, before, len(before), params)

    def close(self) -> None:
        self._module.close()
