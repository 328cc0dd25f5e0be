"""Softmax and its logarithm along any axis of tensors of any layout.

y = exp(x - max) / sum(exp(x - max)): the maximum is taken out first, so that nothing overflows. It may overlook a NaN, which
the sum then finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from tccompile.arch import Arch
from tccompile.ir.ops import Op, Softmax
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue, two_pass
from tccompile.kernels.loops import refusal
from tccompile.kernels.spec import Config, Value, Work
from tccompile.kernels.text import KernelText, TextKernel
from tccompile.kernels.two_pass_text import Passes, Reduction

_MAXIMUM, _SUM = Reduction("larger({}, {})", "f32(-inf)", False), Reduction("{} + {}", "f32(0)", True)

_EXP = "quick_exp({v} - {r})"
_SCALED_EXP = "power_of_2({v} * f32(1.4426950408889634) - {r})"
"""With {r} the maximum times the same, in one multiply-add: by what that is rounded, all terms and their sum are off alike."""

SOFTMAX = Passes(_MAXIMUM, "{r}", _EXP, _SUM, "f32(1) / {s}", f"{_EXP} * {{s}}", "{v} * {s}")
SCALED_SOFTMAX = Passes(_MAXIMUM, "{r} * f32(1.4426950408889634)", _SCALED_EXP, _SUM, "f32(1) / {s}", f"{_SCALED_EXP} * {{s}}")
LOG_SOFTMAX = Passes(_MAXIMUM, "{r}", _EXP, _SUM, "log({s})", "{v} - {r} - {s}")


def passes(params: dict[str, Value]) -> Passes:
    """Those of a code: scaled where exponentials are computed twice, and the maximum is no float32, which might overflow."""
    scaled = params["words"] and params["x"] == DType.F16.value
    return LOG_SOFTMAX if params["log"] else SCALED_SOFTMAX if scaled else SOFTMAX


class SoftmaxKernel(TextKernel):
    """Every Softmax of floats, in float32."""

    name = "softmax"
    realises = Softmax

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Softmax)
        dtype = program.tensors[op.x].dtype
        if not dtype.is_float:
            return f"its input is {dtype.value}, which is no float type"
        return refusal(op, program, epilogue.frame_of(op, program))

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Softmax)
        yield from two_pass.configs(op, program, (op.axis,), arch)

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        assert isinstance(op, Softmax)
        return two_pass.takes(op, program, (op.axis,), config)

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Softmax)
        return two_pass.cost(op, program, two_pass.describe(op, program, (op.axis,), config=config), arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Softmax)
        return two_pass.work(self.name, op, program, two_pass.describe(op, program, (op.axis,), config=config), 0.0, log=op.log)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        return two_pass.text(passes(params), params)
