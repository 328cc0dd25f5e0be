"""Tensor maps, by which the copy engine reads and writes boxes: which tensors may have one, and those of images."""

from __future__ import annotations

from collections.abc import Iterable

from tccompile.ir.extent import ceil_div
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.kernels.parts.operands import UNIT
from tccompile.kernels.spec import TiledMap


def may_move(t: Tensor, program: Program) -> bool:
    """Whether the tensor's address may change from run to run: a caller chooses those of a model's inputs and outputs."""
    return t.storage in program.inputs or t.storage in program.outputs


def unmapped(tensors: Iterable[Tensor], program: Program) -> str | None:
    """Why one of the tensors can have no map, which holds its address; None if each can have one."""
    moving = next((t.name for t in tensors if may_move(t, program)), None)
    return moving and f"{moving} is a model input or output, whose address may change; tensor maps hold addresses"


def image_map(t: Tensor, channels: int, box: tuple[int, ...], swizzle: int, first: int = 0, step: int = 1) -> TiledMap:
    """Of an image's (channels, columns, rows, images), channels being neighbours: of every `step`th column from `first` on."""
    n, _, rows, columns = t.shape
    taken = columns if step == 1 else max(1, ceil_div(columns - first, step))
    along, down, apart = (t.dtype.size * t.strides[a] if t.shape[a] > 1 else UNIT for a in (3, 2, 0))
    offset = t.dtype.size * first * t.strides[3] if first and columns > first else 0
    return TiledMap(t.name, offset, (channels, taken, rows, n), (step * along, down, apart), box, (1, 1, 1, 1), swizzle)
