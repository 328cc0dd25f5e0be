"""What crosses the border of a loop's body, on every generation: a copy, by the code of a Pointwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.expr import Epilogue, View, call, constant, coord, identity_view, load
from tccompile.ir.ops import Carry, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.pointwise import PointwiseKernel
from tccompile.kernels.spec import Config, Function, Kernel, Work

POINTWISE = PointwiseKernel()


class CarryKernel(Kernel):
    """Every Carry. What stays as it was where an iteration does not take place is written over itself."""

    name = "carry"
    realises = Carry

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        return POINTWISE.supports(_copy(op, program), program, arch)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The one that is usually the fastest: alone, in a program to be timed, an op of a loop means nothing."""
        copy = _copy(op, program)
        yield min(POINTWISE.configs(copy, program, arch), key=lambda config: POINTWISE.cost(copy, program, config, arch))

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        return POINTWISE.cost(_copy(op, program), program, config, arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        return POINTWISE.work(_copy(op, program), program, config, arch)

    def build(self, arch: Arch, **params: Any) -> Function:
        raise AssertionError("its code is that of a Pointwise")


def _copy(op: Op, program: Program) -> Pointwise:
    """The Pointwise that does the same."""
    assert isinstance(op, Carry)
    x, y = program.tensors[op.x], program.tensors[op.y]
    views = [identity_view(op.x, x.rank)]
    expr = load(0, x.dtype.compute)
    if op.over is not None and op.going is not None:
        views += [identity_view(op.over, y.rank), View(op.going, (constant(0),) * program.tensors[op.going].rank)]
        takes = load(2, DType.BOOL)
        if op.here is not None:  # a row, which y's rows have where they are said to
            others = [coord(axis) for axis in range(1, y.rank)]
            views[0] = View(op.x, (constant(0), *others))
            views.append(View(op.here, (coord(0), *[constant(0)] * len(others))))
            takes = call("bit_and", takes, load(3, DType.BOOL))
        expr = call("where", takes, expr, load(1, y.dtype.compute))
    return Pointwise(nodes=op.nodes, y=op.y, epilogue=Epilogue(expr, tuple(views)))
