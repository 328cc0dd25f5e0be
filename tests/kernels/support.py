"""What the tests of several kernels share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, pack_constant, to_storage
from tccompile.ir.types import FLOAT8, DType
from tccompile.kernels.spec import Config, Kernel, Work
from tests.gpu.cases import CASES, program_of
from tests.kernels import machine, simulator
from tests.kernels.memory import Memory
from tests.networks import relative_error

ARCH = ARCHS["sm_80"]
TOLERANCE = {DType.F16: 5e-4, DType.BF16: 4e-3, DType.F32: 1e-6, DType.E4M3: 5e-3, DType.E5M2: 1e-2}
"""Of floats of 8 bits a few are rounded to another number, where the sum's order decides."""


@cache
def _ops() -> dict[str, type]:
    """Of what type each case's op is: that of the first case of its kind, since to build all takes seconds."""
    kinds = {made.kind: case for case, made in reversed(CASES.items())}
    types = {kind: type(program_of(case).ops[0]) for kind, case in kinds.items()}
    return {case: types[made.kind] for case, made in CASES.items()}


def cases_of(op: type) -> list[str]:
    """The cases of the tests on GPUs whose op is of this type."""
    return [case for case, kind in _ops().items() if issubclass(kind, op)]


def few_of(op: type) -> list[str]:
    """The first cases of an op, for what the others hardly show: to build all takes seconds."""
    return cases_of(op)[:16]


def sums(program: Program, kind: type[np.number]) -> np.ndarray:
    """What a product of the constants x and w is before its epilogue, added up in numbers of a wider kind."""
    (op,) = program.ops
    x, w = (program.constants[n].values.astype(kind) for n in ("x", "w"))  # type: ignore[union-attr]
    if isinstance(op, Gemm):
        return x @ w.swapaxes(-1, -2)
    assert isinstance(op, Conv)
    (sh, sw), (ph, pw), (dh, dw) = op.strides, op.pads, op.dilations
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    n, o, p, q = program.tensors[op.y].shape
    out, inner = np.zeros((n, o, p, q), kind), x.shape[1] // op.groups
    for c in range(o):
        first = c // (o // op.groups) * inner
        for r in range(w.shape[2]):
            for s in range(w.shape[3]):
                seen = padded[:, first : first + inner, r * dh : r * dh + sh * p : sh, s * dw : s * dw + sw * q : sw]
                out[:, c] += np.einsum("nchw,c->nhw", seen[:, :, :p, :q], w[c, :, r, s])
    return out


def check(
    kernel: Kernel,
    program: Program,
    config: Config | None = None,
    once: bool = True,
    arch: Arch = ARCH,
    run: Callable[..., Memory] = simulator.run,
) -> None:
    """Run the program's one op: right values, all of y's padded extents written (once), and nothing else.

    Values are compared with the expression's: integers as y's type stores them, others as exact as its type allows.

    run  `simulator.run`, for a `TextKernel`; or `machine.run`, which runs the PTX of any kernel, if it knows its instructions
    """
    (op,) = program.ops
    assert kernel.supports(op, program, arch) is None
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    expected = compute(op, program, values | _parts(program, values))
    y = program.tensors[op.y]
    if not y.dtype.is_float or y.dtype in FLOAT8:
        expected = from_storage(to_storage(expected, y.dtype), y.dtype)
    for chosen in [config] if config else kernel.configs(op, program, arch):
        memory = run(kernel.work(op, program, chosen, arch), program, values, op.y, arch)
        memory.check_written(once)
        result = memory.result()
        right = relative_error(result, expected) <= TOLERANCE.get(y.dtype, 0)
        assert right, difference(chosen, result, expected, TOLERANCE.get(y.dtype, 0))


def difference(config: Config, found: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """What a test says of wrong values: how many are off by more than rounding, and where the first one is."""
    room = 2 * tolerance * np.abs(expected.astype(np.float64)).max(initial=0.0)
    wrong = ~(np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= room)
    if not wrong.any():
        return f"config {config}: all values are a little off"
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"config {config}: {wrong.sum()} of {wrong.size} differ, first at {place}: {found[place]}, expected {expected[place]}"


def on_blocks(blocks: int, work: Work, program: Program, values: Mapping[str, np.ndarray], y: str, arch: Arch) -> Memory:
    """`machine.run` of a launch whose blocks take tiles in turn, on so many of them."""
    (launch,) = work.launches
    return machine.run(replace(work, launches=(replace(launch, grid=(blocks, 1, 1)),)), program, values, y, arch)


on_two_blocks = partial(on_blocks, 2)


def _parts(program: Program, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of the tensors that lie in constants."""
    parts = {}
    for name, t in program.tensors.items():
        if t.base in values:
            whole = program.tensors[t.base]
            stored = elements(np.frombuffer(pack_constant(whole, values[t.base]), whole.dtype.numpy), t)
            parts[name] = from_storage(np.array(stored), t.dtype)
    return parts
