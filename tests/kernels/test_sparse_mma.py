"""2:4 weights by mma.sp: values as compiled, what is refused, and that it is taken only where it is estimated to be faster."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.fuse.sparse import offered
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.gemm_mma import MMA
from tccompile.schedule.choose import candidates, choose, is_sparse
from tests.bench.layers import GemmLayer
from tests.gpu.cases import conv, gemm, of_8_bits, of_float8
from tests.kernels import machine
from tests.kernels.support import check
from tests.kernels.test_sparse_sm90 import sparse
from tests.tiers import thorough, usually

ARCH = ARCHS["sm_80"]

S8 = (DType.U8, DType.I8, DType.I8)


def kernel(program: Program):
    return MMA[isinstance(program.ops[0], Gemm)]


def config(program: Program, bm: int, bn: int, splits: int = 1) -> dict:
    size = next(iter(program.tensors.values())).dtype.size
    return {"bm": bm, "bn": bn, "bk": 128 // size, "splits": splits, "sparse": True}


@pytest.mark.parametrize(
    ("make", "args", "bm", "bn", "splits"),
    usually(
        [
            (gemm, ((40, 130), 70), 64, 64, 1),
            (gemm, ((130, 330), 130), 128, 128, 2),
            (gemm, ((20, 136), 200), 16, 64, 1),
            (conv, ((1, 64, 7, 5), 72, (3, 3), 1, None, 1, 1, "bias relu"), 64, 128, 1),
            (of_8_bits, ((70, 144), 40, (), S8), 64, 32, 1),
            (of_8_bits, ((1, 128, 5, 7), 40, (3, 3), S8), 32, 64, 2),
        ],
        0,
    ),
)
def test_compiled_code_computes(make, args, bm, bn, splits):
    """Stages that are not full, weights whose rows fill no tile, parts of K."""
    program = sparse(make, *args)
    check(kernel(program), program, config(program, bm, bn, splits), arch=ARCH, run=machine.run)


def test_what_is_multiplied_as_dense():
    def why(program: Program, arch: str = "sm_80") -> str:
        (op,) = program.ops
        assert not any(is_sparse(c) for c in kernel(program).configs(op, program, ARCHS[arch]))
        return str(kernel(program).without_zeros(op, program, ARCHS[arch]))

    assert why(sparse(gemm, (64, 128), 72), "sm_75") == "sm_75 has no sparse products of float16 that a warp makes"
    assert "no sparse products of float8_e4m3fn" in why(sparse(of_float8, (64, 144), 72), "sm_89")
    assert "its taps have 72 channels, not a multiple of 64" in why(sparse(conv, (1, 72, 7, 7), 64, (3, 3)))
    assert "is transposed" in why(sparse(gemm, (64, 128), 72, transposed="a"))
    assert why(sparse(gemm, (64, 128), 72), "sm_90a") == "None", "there the kernel of warpgroups says why"


@pytest.mark.parametrize(("layer", "taken"), [(GemmLayer(16, 4096, 4096), True), (GemmLayer(16, 64, 64), False)])
def test_it_is_taken_where_it_is_faster(layer, taken):
    op, program = layer.parts()[-1]
    program = offered(program, [op.b])
    chosen = choose(op, program, ARCH)
    assert is_sparse(chosen.config) is taken and ("; 2:4" in chosen.reason) is taken
    ranked = candidates(op, program, ARCH)
    assert any(is_sparse(c.config) for c in ranked)


@thorough
@pytest.mark.parametrize("bm", [64, 128])
def test_largest_tiles_do_not_spill(bm):
    op, program = GemmLayer(4096, 4096, 4096).parts()[-1]
    program = offered(program, [op.b])
    (launch,) = kernel(program).work(op, program, config(program, bm, 128), ARCH).launches
    assert resources(launch.code, ARCH).registers <= 256
