"""What crosses the border of a loop's body, on every generation: a copy, by the code of a Pointwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import Element, Epilogue, Index, View, call, constant, coord, identity_view, load
from tccompile.ir.ops import Carry, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.pointwise import Placed, PointwiseKernel
from tccompile.kernels.spec import Config, Function, Kernel, Work

POINTWISE = PointwiseKernel()


class CarryKernel(Kernel):
    """Every Carry. What stays as it was where an iteration does not take place is written over itself."""

    name = "carry"
    realises = Carry

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return POINTWISE.supports(*_copy(op, program), arch)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The one that is usually the fastest: alone, in a program to be timed, an op of a loop means nothing."""
        copy, program = _copy(op, program)
        yield min(POINTWISE.configs(copy, program, arch), key=lambda config: POINTWISE.cost(copy, program, config, arch))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        return POINTWISE.cost(*_copy(op, program), config, arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        return POINTWISE.work(*_copy(op, program), config, arch)

    def build(self, arch: Arch, **params: Any) -> Function:
        raise AssertionError("its code is that of a Pointwise")


def _copy(op: Op, program: Program) -> tuple[Pointwise, Program]:
    """The Pointwise that does the same, and the program for it: of a row, in which the result is that row."""
    assert isinstance(op, Carry)
    x, y = program.tensors[op.x], program.tensors[op.y]
    views = [identity_view(op.x, x.rank)]
    expr = load(0, x.dtype.compute)
    if op.over is not None and op.going is not None:
        views += [identity_view(op.over, y.rank), View(op.going, (constant(0),) * program.tensors[op.going].rank)]
        expr = call("where", load(2, DType.BOOL), expr, load(1, y.dtype.compute))
    if op.at is None:
        return Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, tuple(views))), program
    place = Index(((Element(op.at, (), y.shape[0]), 1),))
    views[1] = View(views[1].tensor, (place, *(coord(axis) for axis in range(1, y.rank))))
    row = replace(y, shape=(1, *y.shape[1:]), padded=(1, *y.padded[1:]))
    placed = Placed(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, tuple(views)), place=place)
    return placed, replace(program, tensors={**program.tensors, op.y: row})
