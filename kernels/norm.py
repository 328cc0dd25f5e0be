"""Normalization over any axes, and over groups of channels: InstanceNorm, GroupNorm, LayerNorm and the like.

The variance is never a difference of large numbers: it is summed over deviations from the mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch
from tccompile.ir.ops import Norm, Op
from tccompile.ir.program import Program
from tccompile.kernels import epilogue, two_pass
from tccompile.kernels.loops import refusal
from tccompile.kernels.spec import Config, Value, Work
from tccompile.kernels.text import KernelText, TextKernel
from tccompile.kernels.two_pass_text import Passes, Reduction

_SUM, _ABSORBING_SUM = Reduction("{} + {}", "f32(0)", False), Reduction("{} + {}", "f32(0)", True)
_INVERSE = "f32(1) / sqrt({s} * inverse + eps)"
PASSES = {
    True: Passes(
        first=_ABSORBING_SUM,
        between="{r} * inverse",
        term="({v} - {r}) * ({v} - {r})",
        second=_SUM,
        after=_INVERSE,
        out="({v} - {r}) * {s}",
    ),
    False: Passes(first=_ABSORBING_SUM, between="{r}", term="{v} * {v}", second=_ABSORBING_SUM, after=_INVERSE, out="{v} * {s}"),
}
"""By `Norm.centred`: the second sum is that of squares, with the mean taken out first or not."""


class NormKernel(TextKernel):
    """Every Norm of floats, in float32, by one launch in which a block or less computes each mean."""

    name = "norm"
    realises = Norm
    stores_twice = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Norm)
        dtype = program.tensors[op.x].dtype
        if not dtype.is_float:
            return f"its input is {dtype.value}, which is no float type"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Norm)
        yield from two_pass.configs(op, program, op.axes, arch, op.groups)

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        assert isinstance(op, Norm)
        return two_pass.takes(op, program, op.axes, config, op.groups)

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Norm)
        return two_pass.cost(op, program, two_pass.describe(op, program, op.axes, op.groups, config), arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Norm)
        shares = two_pass.describe(op, program, op.axes, op.groups, config)
        return two_pass.work(self.name, op, program, shares, op.eps, centred=op.centred)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        return two_pass.text(PASSES[bool(params["centred"])], params)
