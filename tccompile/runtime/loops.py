"""Loops in a graph: a while node, whose body is a graph that runs as long as a byte on the device is not 0.

A kernel of one thread tells the node what the byte says, once before it and at the end of each iteration.
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
"""The first driver that has such nodes. For older ones, and for families, a body is in the graph as often as it may run."""

UNROLLED = 1 << 17
"""Launches that loops may have in such a graph."""


@dataclass(frozen=True)
class Placed:
    """A loop of a section: its body's first and last step, how often it runs at most, and the address of the byte."""

    first: int
    last: int
    most: int
    going: int


class While:
    """Adds while nodes to graphs. The graphs' instances must not outlive it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        with device as cu:
            self._module = Handle(device, cu.cuModuleLoadData(PTX.read_bytes() + b"\0"), "cuModuleUnload")
            self._function = cu.cuModuleGetFunction(self._module.value, ENTRY)
        self._told: list[np.ndarray] = []

    def begin(self, cu: Driver, graph: Any, before: list[Any], going: int) -> tuple[Any, Any, Any]:
        """A while node of a graph, after others: the node, its body, and what `end` is to be told."""
        handle = cu.cuGraphConditionalHandleCreate(graph, self.device.context, 0, 0)
        told = self._tell(cu, graph, before, going, int(handle))
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        params.conditional.size = 1
        params.conditional.ctx = self.device.context
        node = cu.add_node(graph, [told], params)
        return node, params.conditional.phGraph_out[0], handle

    def end(self, cu: Driver, body: Any, before: list[Any], going: int, handle: Any) -> None:
        """The last node of a body."""
        self._tell(cu, body, before, going, int(handle))

    def _tell(self, cu: Driver, graph: Any, before: list[Any], going: int, handle: int) -> Any:
        values = np.array([going, handle], np.uint64)
        pointers = values.ctypes.data + 8 * np.arange(2, dtype=np.uint64)
        self._told += [values, pointers]
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.kernelParams = pointers.ctypes.data
        return cu.cuGraphAddKernelNode(graph, before, len(before), params)

    def close(self) -> None:
        self._module.close()
