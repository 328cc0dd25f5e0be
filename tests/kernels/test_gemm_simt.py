"""The plain matrix-product kernel: it takes every layout, loads four at once where it may, and compiles everywhere."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS, Feature
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.ir.ops import Conv
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_mma import ConvMma, GemmMma
from tccompile.kernels.gemm_simt import BK, BY_SHAPE, TILES, ConvSimt, Form, GemmSimt, build_tile, chunk_of
from tccompile.kernels.implicit_gemm import SCALARS, describe, scalars
from tccompile.kernels.ptx.atoms import ATOMS
from tccompile.kernels.spec import I32
from tests.gpu.cases import CASES
from tests.gpu.cases import program_of as case_program
from tests.kernels.test_gemm_mma import conv, gemm, program_of
from tests.tiers import usually

F16, F32 = DType.F16, DType.F32


@pytest.mark.parametrize(
    ("case", "chunk"),
    [
        (conv(), 4),
        (conv(dtype=F32), 4),
        (conv((1, 3, 9, 9)), 4),  # padded with zeros in x and w
        (conv(groups=16), 4),
        (conv((1, 20, 9, 9), 30, groups=10), 1),  # two channels a group
        (conv(x=dense("x", (1, 64, 14, 14), F16)), 1),  # NCHW
        (gemm(k=33), 4),
        (gemm(k=33, a=dense("x", (77, 33), F16, pad=1)), 1),
        (gemm(k=36, a=Tensor("x", (77, 36), F16, (77, 36), (40, 1), "base", 2)), 1),  # begins in the middle of a chunk
    ],
)
def test_chunks(case, chunk):
    op, program = case
    assert chunk_of(describe(op, program)) == chunk
    kernel = ConvSimt() if isinstance(op, Conv) else GemmSimt()
    for arch in ARCHS.values():
        assert kernel.supports(op, program, arch) is None
        for config in kernel.configs(op, program, arch):
            (launch,) = kernel.work(op, program, config, arch).launches
            assert dict(launch.code.params)["chunk"] == chunk and launch.smem <= 48 * 1024


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith(("conv", "gemm"))])
def test_steps_cover_all_of_k(case):
    """Also where a tap has 3 channels in a chunk of 4, or 19 in five: more steps than the channels alone would take"""
    program = case_program(case)
    (op,) = program.ops
    kernels = (ConvSimt(), ConvMma()) if isinstance(op, Conv) else (GemmSimt(), GemmMma())
    for kernel in kernels:
        if kernel.supports(op, program, ARCHS["sm_80"]) is not None:
            continue
        for config in kernel.configs(op, program, ARCHS["sm_80"]):
            (launch,) = kernel.work(op, program, config, ARCHS["sm_80"]).launches
            numbers = dict(zip(SCALARS, (a.value for a in launch.args if isinstance(a, I32)), strict=False))
            chunk = dict(launch.code.params).get("chunk", describe(op, program).chunk)
            across = config.get("bk", BK) // chunk
            assert launch.grid[1] == config["splits"]
            assert launch.grid[1] * numbers["steps"] * across >= numbers["chunks"]


def test_what_it_refuses():
    op, program = gemm(dtype=DType.I32)
    assert GemmSimt().supports(op, program, ARCHS["sm_80"]) == (
        "x is int32 and w int32; CUDA cores multiply two floats, or two integers of 8 bits"
    )
    op, program = gemm(m=2**17, k=2**14, dtype=F32)
    assert "offsets are counted in 31 bits" in str(GemmSimt().supports(op, program, ARCHS["sm_80"]))


def test_depthwise_weights_of_any_order():
    op, program = conv((1, 20, 9, 9), 20, groups=20)
    w = dense("w", (20, 1, 3, 3), F16, (2, 3, 1, 0))
    program = program_of(op, program.tensors["x"], w, program.tensors["y"])
    problem = describe(op, program)
    (launch,) = ConvSimt().work(op, program, {"bm": 32, "bn": 32, "splits": 1}, ARCHS["sm_61"]).launches
    numbers = [a.value for a in launch.args if isinstance(a, I32)]
    v = scalars(problem, 32, 32, BK, 1, 1, problem.channels)
    assert dict(launch.code.params)["lanes"] == 1
    assert v["columns"] == 1 and v["last_stored"] == 5  # the last group also writes four channels of padding
    assert numbers[len(v) : len(v) + 4] == [1, w.strides[2], w.strides[3], w.strides[1]]


@pytest.mark.parametrize("channels", [1, 3, 5, 16, 33])
def test_every_group_stores_in_groups_that_begin_at_a_multiple_of_the_lanes(channels):
    op, program = conv((1, 4 * channels, 5, 5), 4 * channels, groups=4)
    (launch,) = ConvSimt().work(op, program, {"bm": 32, "bn": 32, "splits": 1}, ARCHS["sm_80"]).launches
    lanes = dict(launch.code.params)["lanes"]
    assert lanes == {1: 1, 3: 1, 5: 1, 16: 4, 33: 1}[channels] and channels % lanes == 0


def test_tiles_share_their_loads():
    for tile in TILES:
        for chunk in (1, 4):
            assert tile.bm * BK // chunk % tile.threads == 0 and tile.bn * BK // chunk % tile.threads == 0
        assert tile.smem <= 48 * 1024


COMPILED = [
    ("sm_61", (128, 128), 4, F32, F32, True, 4),
    ("sm_61", (64, 64), 1, F16, F32, True, 1),
    ("sm_75", (128, 32), 1, F32, F32, False, 1),
    ("sm_90a", (32, 64), 4, F16, F16, False, 4),
    ("sm_120", (32, 32), 1, DType.BF16, F16, False, 1),
]


@pytest.mark.parametrize(("name", "shape", "chunk", "x", "w", "split", "lanes"), usually(COMPILED, 1, 3))
def test_compiles_without_spills(name, shape, chunk, x, w, split, lanes):
    op, program = conv(groups=1)
    params = epilogue.describe(op, program, epilogue.frame_of(op, program), lanes).params
    tile, arch = BY_SHAPE[shape], ARCHS[name]
    ptx = ptx_text(
        build_tile(Form(tile, ATOMS["fma"], x, w, chunk, split, lanes), arch.has(Feature.ASYNC_COPIES), params), arch, "kernel"
    )
    _, used = assemble(ptx, name)
    assert used.stack == 0
    assert ptx.count("fma.rn.f32") >= tile.rows * tile.columns * BK
