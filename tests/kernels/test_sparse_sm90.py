"""2:4 weights by Hopper's implicit GEMM: values as compiled, what the copy engine is told to read, what is refused, registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS, KIB
from tccompile.emit.compile import resources
from tccompile.fuse.sparse import compress
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels import gemm_sm90_tile as tiles
from tccompile.kernels.gemm_sm90 import HOPPER
from tccompile.kernels.spec import Im2colMap, TiledMap
from tccompile.schedule.choose import is_sparse
from tests.gpu.cases import conv, gemm, of_8_bits, of_float8, program_of, pruned
from tests.kernels import machine
from tests.kernels.support import check, on_two_blocks
from tests.tiers import thorough, usually

ARCH = ARCHS["sm_90a"]


def sparse(make: Callable[..., Program], *args, **how) -> Program:
    """An op of 2:4 weights, whose result stays inside."""
    program = make("s", *args, **how)
    program = replace(program, outputs=())
    (op,) = program.ops
    name = op.w if isinstance(op, Conv) else op.b if isinstance(op, Gemm) else ""
    w = program.constants[name]
    assert isinstance(w, Literal)
    return compress(replace(program, constants={**program.constants, name: Literal(pruned(w.values))}), {})


def config(bm: int, bn: int) -> dict:
    return {"bm": bm, "bn": bn, "split": 1, "swapped": True, "sparse": True}


def kernel(program: Program):
    return HOPPER[isinstance(program.ops[0], Gemm)]


S8, FP8 = (DType.U8, DType.I8, DType.F16), (DType.E4M3, DType.E4M3, DType.F16)


@pytest.mark.parametrize(
    ("make", "args", "bm", "bn"),
    usually(
        [
            (gemm, ((40, 130), 70), 40, 64),
            (gemm, ((300, 130), 130), 128, 64),
            (conv, ((2, 40, 7, 9), 72, (3, 3), 1, None, 1, 1, "bias relu"), 56, 64),
            (of_8_bits, ((1, 144, 7, 9), 40, (3, 3), S8), 64, 64),
            (of_float8, ((70, 1300), 198, (), FP8), 24, 64),
            (gemm, ((300, 196), 250, "bias relu"), 200, 256),
            (conv, ((2, 40, 7, 9), 256, (3, 3), 1, None, 1, 1, "bias relu"), 200, 256),
            (of_8_bits, ((210, 390), 250, (), S8), 192, 256),
        ],
        0,
    ),
)
def test_compiled_code_computes(make, args, bm, bn):
    """An odd number of stages, the last of them not full; taps whose channels fill none; results in several pieces; two blocks of
    a warpgroup."""
    program = sparse(make, *args)
    check(kernel(program), program, config(bm, bn), arch=ARCH, run=on_two_blocks)


def test_places_out_of_order_are_found():
    given, which = np.arange(64 * 16, dtype=np.float32).reshape(64, 16), np.full((4, 32), 0x44444444, np.uint32)
    whole = machine.unpacked(given, which, 0).reshape(64, 8, 4)
    assert np.array_equal(whole[..., :2].reshape(64, 16), given) and not whole[..., 2:].any()
    which[2, 5] = 0x44444441
    with pytest.raises(AssertionError, match="in ascending order"):
        machine.unpacked(given, which, 0)


@pytest.mark.parametrize(
    ("case", "values", "places"),
    [
        ("sparse_gemm", ((128, 130, 1), (32, 128, 1)), ((256, 8, 4), (256, 2, 2))),
        ("sparse_conv", ((288, 72, 1), (32, 128, 1)), ((256, 18, 2), (256, 2, 2))),
        ("sparse_s8_gemm", ((576, 198, 1), (64, 128, 1)), ((256, 36, 4), (256, 4, 2))),
    ],
)
def test_boxes_are_half_a_stage_of_values_and_their_places(case, values, places):
    program = program_of(case)
    (launch,) = kernel(program).work(program.ops[0], program, config(64, 128), ARCH).launches
    a, b, p = launch.args[:3]
    assert isinstance(b, TiledMap) and (b.extents, b.box, b.swizzle) == (*values, 64)
    assert isinstance(p, TiledMap) and (p.extents, p.box, p.swizzle) == (*places, 0)
    if isinstance(a, Im2colMap):  # taps begin where stages do: 40 channels are 64
        assert a.channels == 64 and launch.args[-1] is not None
        assert [arg.value for arg in launch.args[3:40] if hasattr(arg, "value")].count(64) >= 1


def test_tiles_fit_shared_memory():
    assert all(bm % 16 == 0 for bm in tiles.SHARED), "half of them are groups of 8"
    for bn, rows in (*tiles.SWAPPED.items(), *tiles.TALL.items(), *tiles.LARGE_SPARSE.items()):
        for bm in rows:
            for kinds in (("f16", "f16"), ("s8", "s8"), ("e4m3", "e4m3")):
                for added in (False, True)[: 1 if bn in tiles.TALL else 2]:
                    t = tiles.tile(config(bm, bn), ARCH, 100, True, added, kinds)
                    assert t.smem <= ARCH.smem_block and t.stages >= 2 and t.stage_bytes % KIB == 0
                    assert t.bm % t.piece == t.piece % t.span == 0 and t.places and t.places.at % 512 == 0
                    assert t.staged % (8 * 128) == 0, "boxes begin where their swizzle does"
    assert tiles.tile(config(256, 128), ARCH, 100, True).stages == tiles.tile(config(200, 256), ARCH, 100, True).stages == 4


def test_two_blocks_of_a_warpgroup_are_for_sums_that_are_kept_once():
    def tall(program: Program) -> set[int]:
        (op,) = program.ops
        return {c["bm"] for c in kernel(program).configs(op, program, ARCH) if c["bn"] == 256 and is_sparse(c)}

    assert tall(sparse(gemm, (4000, 128), 256)) == {176, 192, 200}
    assert tall(sparse(of_8_bits, (4000, 128), 256, (), S8)) == {176, 192}, "integers have multiples of 16"
    assert not tall(sparse(of_float8, (4000, 128), 256, (), FP8))
    assert not tall(sparse(gemm, (4000, 128), 384)), "there are places for an odd number of 128 rows"
    assert not tall(sparse(gemm, (4000, 128), 256, ep="bias residual")), "what is added comes in one box"
    assert not tall(sparse(gemm, (4000, 128), 256, to="output")), "results do not go to y in boxes"


def test_rows_of_two_blocks_are_copied_by_both():
    def shared(rows: int, columns: int, make=of_float8, *more) -> dict[int, dict]:
        program = sparse(make, (rows, 256), columns, *more)
        every = kernel(program).configs(program.ops[0], program, ARCH)
        return {c["bm"]: c for c in every if c.get("shared") and is_sparse(c)}

    found = shared(4000, 2048)
    assert set(found) <= set(tiles.SHARED) and found
    assert not shared(4000, 2048 + 128), "an odd number of tiles side by side"
    assert not shared(2000, 1024), "few tiles"
    assert not shared(4000, 2048, gemm), "sums that are kept once do not wait for the L2 cache"
    program = sparse(of_float8, (4000, 256), 2048)
    bm, chosen = next(iter(found.items()))
    (launch,) = kernel(program).work(program.ops[0], program, chosen, ARCH).launches
    assert launch.grid[0] % 2 == 0 and isinstance(launch.args[0], TiledMap) and launch.args[0].box == (128, bm // 2, 1)
    assert dict(launch.code.params)["shared"] == 2


def test_what_is_multiplied_as_dense():
    def why(program: Program) -> str:
        found = kernel(program)
        (op,) = program.ops
        assert not any(map(is_sparse, found.configs(op, program, ARCH)))
        return str(found.without_zeros(op, program, ARCH))

    assert "K of 24 is less than the 64" in why(sparse(gemm, (5, 24), 72))
    assert "is transposed; sparse Tensor Cores take both along K" in why(sparse(gemm, (64, 128), 72, transposed="a"))
    wide = sparse(of_8_bits, (64, 144), 72, kinds=(DType.I8, DType.I8, DType.I8))
    assert why(wide).replace("sparse wgmma's rows are the weights', and then results go to y in boxes of halves", "") == ""
    good = sparse(gemm, (64, 128), 72)
    assert HOPPER[1].without_zeros(good.ops[0], good, ARCH) is None
    assert "no wgmma" in str(HOPPER[1].without_zeros(good.ops[0], good, ARCHS["sm_80"]))


@thorough
@pytest.mark.parametrize(
    ("make", "how", "config", "most"),
    [
        (gemm, {"ep": "bias relu"}, config(256, 128), 168),
        (gemm, {"ep": "bias relu"}, config(200, 256), 168),
        *((of_float8, {}, {**config(bm, 128), "shared": 2}, 168) for bm in tiles.SHARED),
    ],
)
def test_machine_code_has_no_spills(make, how, config, most):
    program = sparse(make, (600, 1024), 250, **how)
    (launch,) = kernel(program).work(program.ops[0], program, config, ARCH).launches
    used = resources(launch.code, ARCH)
    assert used.registers <= most and used.stack == 0
