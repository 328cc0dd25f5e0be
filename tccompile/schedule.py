"""Program × Arch → choices: which kernel and config realises each op, and why.

The metacommand: every kernel that supports the op offers its configs, each with a cost; the cheapest wins, Tensor Cores or
not. The reason says what decided, and for a Conv or Gemm without Tensor Cores, what their kernels asked for and did not get.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.errors import TccompileError
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Code, Config, Kernel, Work
from tccompile.program import Conv, Gemm, Op, Program


@dataclass(frozen=True)
class Choice:
    """What runs one op: a kernel in one config, its launches, the estimate in microseconds, and the reason."""

    kernel: Kernel
    config: Config
    work: Work
    cost: float
    reason: str


def schedule(program: Program, arch: Arch, refused: Collection[Code] = ()) -> list[Choice]:
    """One choice per op, in the program's order, without the codes that turned out not to fit the generation's registers."""
    return [choose(op, program, arch, refused) for op in program.ops]


def choose(op: Op, program: Program, arch: Arch, refused: Collection[Code] = ()) -> Choice:
    """The cheapest of all configs of all kernels that support the op, the first of equals."""
    kernels = [k for k in KERNELS if isinstance(op, k.realises)]
    refusals = {k.name: k.supports(op, program, arch) for k in kernels}
    candidates = [
        (k.cost(op, program, config, arch), k, config)
        for k in kernels
        if refusals[k.name] is None
        for config in k.configs(op, program, arch)
    ]
    if not candidates:
        why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        raise TccompileError(f"no kernel for {type(op).__name__} {op.nodes[0]!r} on {arch.name}: {why}")
    ranked = sorted(candidates, key=lambda c: c[0])
    works = ((*c, c[1].work(op, program, c[2], arch)) for c in ranked)
    chosen = next((w for w in works if not any(launch.code in refused for launch in w[3].launches)), None)
    if chosen is None:
        raise TccompileError(f"every kernel for {type(op).__name__} {op.nodes[0]!r} spills registers on {arch.name}")
    cost, kernel, config, work = chosen
    reason = f"estimated {cost:.1f} µs" + (f", best of {len(candidates)}" if len(candidates) > 1 else "")
    if isinstance(op, Conv | Gemm) and not kernel.tensor_cores:
        by_tensor_cores = [c for c, k, _ in candidates if k.tensor_cores]
        if arch.mma is None:
            why = f"{arch.name} has none"
        elif by_tensor_cores:
            why = f"with them it is estimated to take {min(by_tensor_cores):.1f} µs"
        else:  # KERNELS lists the more general kernel after the more special one, so the last refusal is the rule that counts
            why = next(str(refusals[k.name]) for k in reversed(kernels) if k.tensor_cores)
        reason += f"; no Tensor Cores: {why}"
    return Choice(kernel, config, work, cost, reason)
