"""Every step of a model by the code of its kernel, thread by thread, beside the CPU engine: what a GPU would find, without one.

    python -m tests.kernels.replay resnet18 more/edgenext_opset17
    python -m tests.kernels.replay vit_b_16 --arch sm_61 --precision fp32

Kernels of generated text only (`TextKernel`); matrix products and convolutions are left out, and `conv_direct`, which takes every
convolution and would take half the time: test_conv_direct.py runs it. Of a large launch some blocks run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import from_storage, to_storage
from tccompile.kernels.conv_direct import ConvDirect
from tccompile.kernels.spec import Config, Work
from tccompile.kernels.text import TextKernel
from tccompile.plan.file import Plan
from tccompile.runtime.cpu import CpuEngine
from tccompile.schedule.choose import candidates
from tccompile.schedule.timings import key
from tests.kernels import simulator
from tests.kernels.support import TOLERANCE

BLOCKS = 6
"""Of a launch, if its blocks share nothing."""

THREADS = 20_000
"""Of launches whose blocks do, at most; others are left out."""


@dataclass(frozen=True)
class Step:
    """A step's op and kernel, and what is wrong with what it computes, or None."""

    op: Op
    kernel: str
    config: Config
    problem: str | None


def replay(plan: Plan, feeds: Mapping[str, np.ndarray], arch: Arch) -> Iterator[Step]:
    """The steps of a plan's first entry, each once with the cheapest config of each kernel that can run it."""
    entry = plan.entries[0]
    seen: set[tuple] = set()
    steps: list[Step] = []
    ops = {op.y: op for op in entry.program.ops}

    def observe(y: str, stored: np.ndarray) -> None:
        op = ops[y]
        values = {name: np.array(engine._elements(name)) for name in op.inputs}  # before y is stored over any of them
        steps.extend(_step(op, entry.program, values, arch, seen))

    engine = CpuEngine(plan, entry, entry.sections[0], observe=observe)
    engine.run(feeds)
    return iter(steps)


def _step(op: Op, program: Program, values: dict[str, np.ndarray], arch: Arch, seen: set[tuple]) -> Iterator[Step]:
    kernels: set[str] = set()
    for c in candidates(op, program, arch):
        name = c.kernel.name
        code = key(op, program), name, tuple(c.config.items())
        if name in kernels or not isinstance(c.kernel, TextKernel) or isinstance(c.kernel, ConvDirect):
            continue
        kernels.add(name)
        work = c.kernel.work(op, program, c.config, arch)
        if code not in seen and not (_shared(work) and _threads(work) > THREADS):
            seen.add(code)
            yield Step(op, name, c.config, _problem(op, program, values, work, arch))


def _shared(work: Work) -> bool:
    """Whether blocks see what others wrote."""
    return len(work.launches) > 1 or work.scratch > 0 or work.counters > 0


def _threads(work: Work) -> int:
    return sum(int(np.prod(launch.grid)) * launch.block for launch in work.launches)


def _problem(op: Op, program: Program, values: dict[str, np.ndarray], work: Work, arch: Arch) -> str | None:
    names = {*op.inputs, op.y}
    names |= {program.tensors[name].storage for name in names}
    tensors = {name: t for name, t in program.tensors.items() if name in names}
    constants = {name: recipe for name, recipe in program.constants.items() if name in names}
    own = replace(program, inputs=(), outputs=(), tensors=tensors, constants=constants, ops=(op,))
    some = not _shared(work)
    try:
        memory = simulator.run(work, own, values, op.y, arch, BLOCKS if some else None)
        if work.launches:
            memory.check_written(once=len(work.launches) == 1, some=some)
    except AssertionError as error:
        return str(error) or "not what the simulator allows"
    y = program.tensors[op.y]
    with np.errstate(all="ignore"):
        expected = from_storage(to_storage(np.broadcast_to(compute(op, program, values), y.shape), y.dtype), y.dtype)
    there = memory.there()
    return _difference(memory.result()[there], expected[there], TOLERANCE.get(y.dtype, 0.0))


def _difference(got: np.ndarray, expected: np.ndarray, tolerance: float) -> str | None:
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return "other infinities or NaN than the reference's"
    error, norm = np.linalg.norm(got[finite] - expected[finite]), np.linalg.norm(expected[finite])
    return None if error <= tolerance * norm + 1e-30 else f"{error / max(norm, 1e-30):.1e} off"


def main() -> int:
    from tests.networks import feeds, skeleton
    from tests.plans import without_code
    from tests.test_exporters import NETWORKS

    parser = argparse.ArgumentParser(description="The steps of networks in tests/models, simulated")
    parser.add_argument("networks", nargs="+", help="as resnet18, more/edgenext_opset17")
    parser.add_argument("--arch", default="sm_90a", choices=ARCHS)
    parser.add_argument("--precision", default="mixed", choices=("mixed", "fp16", "fp32"))
    options = parser.parse_args()
    wrong = False
    for name in options.networks:
        shapes, _ = NETWORKS.get(name.removeprefix("more/"), ({}, 0))
        model = skeleton(name)
        given = feeds(model, 1, shapes)
        plan = without_code(model, (options.arch,), {n: x.shape for n, x in given.items()}, options.precision)
        counts: Counter = Counter()
        for step in replay(plan, given, ARCHS[options.arch]):
            counts[step.kernel] += 1
            if step.problem:
                wrong = True
                print(f"{name}: {' + '.join(step.op.nodes)} by {step.kernel} {step.config}: {step.problem}", flush=True)
        print(f"{name}: {', '.join(f'{n} {kernel}' for kernel, n in sorted(counts.items()))}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
