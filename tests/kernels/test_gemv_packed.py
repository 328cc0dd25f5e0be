"""Products of few rows with weights of 4 and 8 bits: values thread by thread and by their PTX, exactness, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir import packed as form
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels.gemv_packed import GemvPacked, GemvPackedMma
from tccompile.kernels.spec import Kernel
from tests.gpu.cases import gemm, packed
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, check
from tests.networks import relative_error
from tests.tiers import thorough

PLAIN, MMA = GemvPacked(), GemvPackedMma()
F32, F16 = DType.F32, DType.F16

VALUES = {
    "one row": (PLAIN, packed("one row", (1, 300), 21), {"across": 1, "splits": 1, "stages": 2}),
    "bytes, split": (PLAIN, packed("bytes", (3, 300), 40, 8, 128), {"across": 2, "splits": 2, "stages": 2}),
    "blocks of 16": (PLAIN, packed("16", (5, 140), 24, 4, 16, scales=F16), {"across": 1, "splits": 1, "stages": 2}),
    "bytes, blocks of 16": (PLAIN, packed("b16", (2, 140), 24, 8, 16, False, dtype=F32), {"across": 1, "splits": 1, "stages": 2}),
    "bf16": (PLAIN, packed("bf16", (2, 140), 24, 4, 64, dtype=DType.BF16, ep=""), {"across": 4, "splits": 1, "stages": 3}),
    "mma, one row": (MMA, packed("row", (1, 600), 21), {"across": 1, "splits": 1, "stages": 3}),
    "mma, split": (MMA, packed("split", (3, 300), 40, 8, 64, scales=F16), {"across": 2, "splits": 2, "stages": 2}),
    "mma, blocks of 16": (MMA, packed("m16", (11, 130), 40, 4, 16, scales=F16), {"across": 1, "splits": 1, "stages": 2}),
    "mma, bytes": (MMA, packed("m8", (9, 600), 24, 8, 256, False, ep="bias residual"), {"across": 4, "splits": 1, "stages": 2}),
    "mma, one scale": (MMA, packed("whole", (9, 600), 24, 4, 640, False), {"across": 1, "splits": 2, "stages": 3}),
    "mma, blocks of 32": (MMA, packed("m32", (2, 200), 24, 8, 32), {"across": 8, "splits": 1, "stages": 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_values(case: str) -> None:
    check(*VALUES[case])


@thorough
@pytest.mark.parametrize("case", ["one row", "mma, split", "mma, one scale"])
def test_values_of_its_ptx(case: str) -> None:
    check(*VALUES[case], arch=ARCHS["sm_90a"], run=machine.run)


def test_on_sm_75() -> None:
    """Whose products have half of K"""
    check(MMA, packed("old", (2, 200), 24), {"across": 1, "splits": 1, "stages": 2}, arch=ARCHS["sm_75"])


@pytest.mark.parametrize("kernel", [PLAIN, MMA], ids=["plain", "mma"])
def test_weights_are_not_rounded(kernel: Kernel) -> None:
    """Scales that halves do not have, and a result in float32."""
    program, rng = packed("exact", (2, 256), 32, ep=""), np.random.default_rng(0)
    parts = {name: recipe.values for name, recipe in program.constants.items() if isinstance(recipe, Literal)}
    parts["scales"] = rng.uniform(0.001, 0.002, parts["scales"].shape).astype(np.float32)
    w = form.unpacked((32, 256), parts["u"], parts["scales"], parts["zeros"], 4, 32)
    program = replace(program, tensors={**program.tensors, "y": dense("y", (2, 32), F32)})
    config = {"across": 1, "splits": 1, "stages": 2}
    memory = simulator.run(kernel.work(program.ops[0], program, config, ARCH), program, parts, "y", ARCH)
    exact = parts["a"].astype(np.float64) @ w.astype(np.float64).T
    assert relative_error(memory.result(), exact) < 1e-6 < relative_error(parts["a"] @ w.astype(np.float16).T, exact)


def plain(program: Program) -> Program:
    return replace(program, forms={})


@pytest.mark.parametrize(
    ("kernel", "program", "reason"),
    [
        (MMA, packed("seventeen", (17, 64), 40), "it has 17 rows; integers are read as they are for 16 rows at most"),
        (PLAIN, packed("nine", (9, 64), 40), "for 8 rows at most"),
        (MMA, packed("float", (1, 64), 40, dtype=F32), "a is float32; it multiplies float16"),
        (PLAIN, plain(packed("none", (1, 64), 40)), "its weights are not known as integers"),
        (PLAIN, gemm("turned", (2, 64), 40, transposed="b"), "its weights are not known as integers"),
    ],
    ids=["17", "9", "fp32", "no form", "floats"],
)
def test_says_why_not(kernel: Kernel, program: Program, reason: str) -> None:
    assert reason in str(kernel.supports(program.ops[0], program, ARCH))


def test_rows_that_are_not_aligned_are_refused() -> None:
    program = packed("input", (2, 68), 40)
    program = replace(program, tensors={**program.tensors, "a": dense("a", (2, 68), F16, pad=1)})
    assert PLAIN.supports(program.ops[0], program, ARCH) is not None
    assert isinstance(program.ops[0], Gemm)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kernel", [PLAIN, MMA], ids=["plain", "mma"])
def test_configs_cover_k(kernel: Kernel, rows: int) -> None:
    program = packed("configs", (rows, 5000), 40, 4, 128)
    (op,) = program.ops
    configs = list(kernel.configs(op, program, ARCH))
    assert configs == sorted(configs, key=lambda c: kernel.cost(op, program, c, ARCH))
    for config in configs:
        (launch,) = kernel.work(op, program, config, ARCH).launches
        assert launch.grid[1] == config["splits"] and launch.grid[0] * int(config["across"]) >= 3  # type: ignore[call-overload]


@thorough
@pytest.mark.parametrize(("arch", "kernel", "rows"), [("sm_61", PLAIN, 2), ("sm_75", MMA, 16), ("sm_90a", MMA, 16)])
def test_compiles(arch: str, kernel: Kernel, rows: int) -> None:
    """Without spilled registers."""
    program = packed("registers", (rows, 1024), 64)
    (launch,) = kernel.work(program.ops[0], program, {"across": 1, "splits": 2, "stages": 3}, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0
