"""Positions as values: what tables are made of that are computed when a plan runs (`load.late`)."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from tccompile.ir.expr import Expr, Index, View, call, cast, constant, coord
from tccompile.ir.extent import Extent
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.lower.builder import Builder, Reads, shape_of


def position(reads: Reads, name: str, index: Index, count: Extent) -> Expr:
    """An index, from 0 to below `count`, as an int64: by a table of positions that all sizes share.

    It is a column, whose rows have no padding: a shorter one is a part of a longer one.
    """
    b = reads.builder
    column = b.add(dense(b.unique(f"{name}.positions"), (count, 1), DType.I32, (0, 1), pad=1))
    b.constants[column.name] = Literal(np.arange(count, dtype=np.int32)[:, None])
    return reads.view(View(column.name, (index, constant(0))))


def range_(node: gs.Node, b: Builder) -> None:
    """start + delta * position, where these depend on sizes; others are constants."""
    (start, _, delta), y = node.inputs, node.outputs[0]
    reads = Reads(b, shape_of(y))
    place = position(reads, y.name, coord(0), reads.shape[0])
    place = cast(place, b.dtype(y).compute)
    b.compute(b.result(y), call("add", reads.broadcast(start), call("mul", place, reads.broadcast(delta))), reads)
