"""Program × Arch → choices: which kernel and config realises each op, and why.

The metacommand: every kernel that supports the op offers its configs, each with a cost; the cheapest wins, Tensor Cores or
not. The reason says what decided, and for a Conv or Gemm without Tensor Cores, what their kernels asked for and did not get.
"""

from __future__ import annotations

from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.errors import TccompileError
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Config, Kernel, Work
from tccompile.program import Conv, Gemm, Op, Program


@dataclass(frozen=True)
class Choice:
    """What runs one op: a kernel in one config, its launches, the estimate in microseconds, and the reason."""

    kernel: Kernel
    config: Config
    work: Work
    cost: float
    reason: str


def schedule(program: Program, arch: Arch) -> list[Choice]:
    """One choice per op, in the program's order."""
    return [choose(op, program, arch) for op in program.ops]


def choose(op: Op, program: Program, arch: Arch) -> Choice:
    refusals: dict[str, str] = {}
    best: tuple[float, Kernel, Config] | None = None
    count = 0
    for kernel in KERNELS:
        if not isinstance(op, kernel.realises):
            continue
        refusal = kernel.supports(op, program, arch)
        if refusal is not None:
            refusals[kernel.name] = refusal
            continue
        for config in kernel.configs(op, program, arch):
            count += 1
            cost = kernel.cost(op, program, config, arch)
            if best is None or cost < best[0]:
                best = cost, kernel, config
    if best is None:
        why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        raise TccompileError(f"no kernel for {type(op).__name__} {op.nodes[0]!r} on {arch.name}: {why}")
    cost, kernel, config = best
    return Choice(kernel, config, kernel.work(op, program, config, arch), cost, _reason(op, kernel, cost, count, refusals, arch))


def _reason(op: Op, kernel: Kernel, cost: float, count: int, refusals: dict[str, str], arch: Arch) -> str:
    estimated = f"estimated {cost:.1f} µs" + (f", best of {count}" if count > 1 else "")
    if kernel.tensor_cores or not isinstance(op, Conv | Gemm):
        return estimated
    if arch.mma is None:
        return f"{estimated}; no Tensor Cores: {arch.name} has none"
    asked = [refusals[k.name] for k in KERNELS if k.tensor_cores and k.name in refusals]
    why = "; ".join(dict.fromkeys(asked)) or "estimated to be slower"
    return f"{estimated}; no Tensor Cores: {why}"
