"""Hopper's implicit GEMM: what the copy engine is told to read, the layout of shared memory, and that it compiles well."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS, KIB
from tccompile.emit.compile import resources
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, load
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal
from tccompile.kernels import gemm_sm90 as sm90
from tccompile.kernels import gemm_sm90_tile as tiles
from tccompile.kernels.implicit_gemm import describe
from tccompile.kernels.parts.staging import BOXES
from tccompile.kernels.spec import TiledMap
from tccompile.schedule.choose import choose
from tests.gpu.cases import conv, gemm, of_8_bits, of_float8
from tests.kernels import machine
from tests.kernels.support import check, on_two_blocks
from tests.tiers import thorough, usually

ARCH = ARCHS["sm_90a"]
CONV, GEMM = sm90.HOPPER
BIASED = Epilogue(call("relu", call("add", ACC, load(0))), (View("bias", (coord(1),)),))


def conv_program(x, w, strides=1, pads=0, dilations=1, ends=None, epilogue=BIASED, view=False, groups=1) -> Program:
    """One Conv of images or lines; with `view`, x is the middle of a tensor of 16 channels more."""
    axes = len(x) - 2
    pair = [(v,) * axes if isinstance(v, int) else v for v in (strides, pads, dilations)]
    ends = pair[1] if ends is None else ends
    order = (0, 2, 3, 1) if axes == 2 else (0, 2, 1)
    out = tuple(
        (n + a + b - (f - 1) * d - 1) // s + 1
        for n, f, s, a, b, d in zip(x[2:], w[2:], pair[0], pair[1], ends, pair[2], strict=True)
    )
    tensors = [
        dense("w", w, DType.F16, order),
        dense("bias", (w[0],), DType.F32),
        dense("y", (x[0], w[0], *out), DType.F16, order),
    ]
    if view:
        whole = dense("whole", (x[0], x[1] + 16, *x[2:]), DType.F16, order)
        tensors += [whole, Tensor("x", x, DType.F16, x, whole.strides, "whole", 8)]
    else:
        tensors.append(dense("x", x, DType.F16, order))
    op = Conv(
        nodes=("conv",), y="y", x="x", w="w", strides=pair[0], pads=pair[1], dilations=pair[2], groups=groups, epilogue=epilogue
    )
    constants = {"w": Literal(np.zeros(1)), "bias": Literal(np.zeros(1))}
    return Program((), (), {t.name: t for t in tensors}, constants, (op,))


def gemm_program(a, b, inputs=(), transposed="") -> Program:
    y = (*a[:-1], b[-2])
    order = {n: (*range(len(s) - 2), len(s) - 1, len(s) - 2) if n in transposed else None for n, s in (("a", a), ("b", b))}
    tensors = [dense("a", a, DType.F16, order["a"]), dense("b", b, DType.F16, order["b"]), dense("y", y, DType.F16)]
    op = Gemm(nodes=("gemm",), y="y", a="a", b="b")
    return Program(inputs, (), {t.name: t for t in tensors}, {"b": Literal(np.zeros(1))}, (op,))


CASES = {
    "3x3": conv_program((2, 64, 7, 9), (40, 64, 3, 3), pads=1),
    "strided": conv_program((2, 40, 11, 8), (24, 40, 3, 3), strides=2, pads=1),
    "asymmetric": conv_program((1, 64, 9, 12), (16, 64, 2, 3), strides=(2, 1), pads=(0, 2), ends=(3, 0), dilations=(2, 3)),
    "few channels": conv_program((2, 3, 15, 14), (64, 3, 7, 7), strides=2, pads=3),
    "16 channels": conv_program((1, 16, 6, 7), (33, 16, 3, 3), pads=1),
    "24 channels": conv_program((1, 24, 6, 7), (8, 24, 3, 3), pads=1),
    "96 channels": conv_program((1, 96, 5, 5), (8, 96, 3, 3), pads=1),
    "200 channels": conv_program((1, 200, 4, 5), (72, 200, 3, 3), pads=1),
    "strided 1x1": conv_program((2, 64, 7, 6), (128, 64, 1, 1), strides=2),
    "1x1": conv_program((3, 96, 5, 5), (300, 96, 1, 1)),
    "a view": conv_program((2, 24, 5, 6), (8, 24, 3, 3), pads=1, view=True),
    "a view, 1x1": conv_program((2, 40, 5, 6), (8, 40, 1, 1), view=True),
    "a line": conv_program((2, 32, 21), (16, 32, 5), pads=2, strides=2),
    "product": gemm_program((150, 70), (33, 70)),
    "row": gemm_program((1, 200), (100, 200)),
    "rows of batches": gemm_program((3, 50, 40), (24, 40)),
    "batches": gemm_program((2, 5, 33, 72), (2, 5, 20, 72)),
    "transposed a": gemm_program((150, 70), (33, 70), transposed="a"),
    "transposed b": gemm_program((150, 70), (33, 70), transposed="b"),
    "both transposed": gemm_program((300, 130), (100, 130), transposed="ab"),
    "batches of transposed": gemm_program((2, 5, 33, 72), (2, 5, 20, 72), transposed="ab"),
    "many tiles": gemm_program((1100, 64), (200, 64)),
    **{f"1x1 of {k}": conv_program((2, k, 5, 6), (24, k, 1, 1)) for k in (3, 16, 24, 32, 48, 56, 80, 112, 120, 144)},
}  # fmt: skip


RESIDUAL = conv_program(
    (2, 64, 7, 9),
    (40, 64, 1, 1),
    epilogue=Epilogue(
        call("relu", call("add", call("add", ACC, load(0)), load(1))),
        (View("bias", (coord(1),)), View("x", (coord(0), coord(1), coord(2), coord(3)))),
    ),
)
"""Adds the first of x's channels, which lie as y's do but for the rows' stride."""


def kernel(program: Program) -> sm90.Hopper:
    return CONV if isinstance(program.ops[0], Conv) else GEMM


def first(program: Program, config: dict):
    """The op's launch in a config."""
    return kernel(program).work(program.ops[0], program, config, ARCH).launches[0]


def addresses(t: Tensor, lane: int, extents: tuple[int, ...]) -> np.ndarray:
    """Elements from a tensor's first one: rows by lanes, over other extents than its own."""
    grid = sum(i * s for i, s in zip(np.indices(extents), t.strides, strict=True))
    return np.moveaxis(np.asarray(grid), lane, -1).reshape(-1, extents[lane])


@pytest.mark.parametrize("config", [{"bm": 64, "bn": 32, "split": 1}, {"bm": 56, "bn": 64, "split": 1, "swapped": True}], ids=str)
@pytest.mark.parametrize("case", [*CASES, "residual"])
def test_boxes_are_of_all_that_is_stored_and_of_what_is_added(case, config):
    """The maps' rows are those of the result, and y's has its padding."""
    program = RESIDUAL if case == "residual" else CASES[case]
    (op,) = program.ops
    k = kernel(program)
    (launch,) = k.work(op, program, config, ARCH).launches
    y, *added = [a for a in launch.args[2:] if isinstance(a, TiledMap)]
    assert len(added) == (case == "residual") and dict(launch.code.params)["boxed"]
    lane = 1 if isinstance(op, Conv) else len(program.op_shape(op)) - 1
    tensor = program.tensors[op.y]
    stored = [(y, tensor, tensor.padded), *((m, program.tensors["x"], tensor.shape) for m in added)]
    for map_, t, extents in stored:
        b, r, c = np.indices(map_.extents[::-1])
        found = (c + r * (map_.strides[0] // 2) + b * (map_.strides[1] // 2)).reshape(-1, map_.extents[0])
        assert np.array_equal(found, addresses(t, lane, extents)) and map_.tensor == t.name and map_.bytes == 0
        assert map_.box == ((64, 56, 1) if "swapped" in config else (32, 16, 1)) and map_.swizzle == 2 * map_.box[0]


# --- As it is compiled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", usually([3, 16, 24, 32, 40, 64, 70, 112, 144], 6))
@pytest.mark.parametrize(("bm", "bn", "words"), usually([(64, 32, "bias relu"), (128, 16, "bias residual")], 1))
def test_compiled_code_computes(k, bm, bn, words, monkeypatch):
    """A K of every remainder, in blocks that take several tiles each, the last of them not full; small ones in narrow boxes."""
    ends, box = set(), machine.Machine.box

    def noted(self, map_, corner, at):
        if map_.tensor in "xw":
            ends.add(corner[0] + map_.box[0])
        return box(self, map_, corner, at)

    monkeypatch.setattr(machine.Machine, "box", noted)
    check(CONV, conv("c", (3, k, 9, 11), 40, (1, 1), ep=words), {"bm": bm, "bn": bn, "split": 1}, arch=ARCH, run=on_two_blocks)
    assert max(ends) == (16 if k <= 16 else 32 if k <= 32 else -(-k // 64) * 64)


@pytest.mark.parametrize(
    ("k", "bm", "bn"), usually([(16, 8, 64), (24, 56, 64), (70, 24, 64), (144, 40, 128), (70, 112, 128), (64, 16, 192)], 1)
)
@pytest.mark.parametrize("words", usually(["bias relu", "bias residual"], "bias residual"))
def test_compiled_code_computes_with_swapped_operands(k, bm, bn, words):
    """Spans of every remainder, of whole tiles and of parts of them, in channels that a tile's last ones are beyond."""
    config = {"bm": bm, "bn": bn, "split": 1, "swapped": True}
    check(CONV, conv("c", (3, k, 9, 11), 200, (1, 1), ep=words), config, arch=ARCH, run=on_two_blocks)


@pytest.mark.parametrize(
    "config",
    usually([{"bm": 64, "bn": 32, "split": 2}, {"bm": 24, "bn": 64, "split": 4, "swapped": True}], 1),
    ids=str,
)
def test_blocks_of_a_cluster_add_up_their_parts(config):
    """Of a K of more stages than parts, the last of them not full, by several clusters."""
    case = conv("c", (1, 64 * 2 * config["split"] + 40, 9, 11), 40, (1, 1), ep="bias residual")
    check(CONV, case, config, arch=ARCH, run=machine.run)


@pytest.mark.parametrize("words", usually(["bias relu", "bias residual"], "bias relu"))
def test_code_that_others_have(words):
    """Of a window of one element, and a K of few stages, by the code of larger windows, and of many stages."""
    one, larger = conv("c", (3, 128, 9, 11), 72, (1, 1), ep=words), conv("c", (3, 320, 9, 11), 72, (3, 3), ep=words)
    config = {"bm": 56, "bn": 64, "split": 1, "swapped": True}
    shared = list(CONV.shareable(one.ops[0], one, config, ARCH))
    assert shared == [{**config, "stages": 8}, {**config, "stages": 8, "gathered": True}]
    assert not list(CONV.shareable(larger.ops[0], larger, config, ARCH))
    codes = [CONV.codes(one.ops[0], one, c, ARCH) for c in (config, *shared)]
    assert len(set(codes)) == 3 and codes[2] == CONV.codes(larger.ops[0], larger, config, ARCH)
    for c in shared:
        check(CONV, one, c, arch=ARCH, run=on_two_blocks)


def test_windows_of_one_element_that_are_not_read_as_larger_ones():
    """Those that are so anyway, those whose channels fill no stage, and products."""
    every = [
        conv("c", (3, 128, 9, 11), 72, (1, 1), 2),
        conv("c", (3, 16, 9, 11), 72, (1, 1)),
        gemm("g", (40, 128), 72),
    ]
    for program in every:
        (op,) = program.ops
        kernel = CONV if isinstance(op, Conv) else GEMM
        found = list(kernel.shareable(op, program, {"bm": 64, "bn": 64, "split": 1}, ARCH))
        assert found == [{"bm": 64, "bn": 64, "split": 1, "stages": 8}]


@pytest.mark.parametrize("more", usually([{"bn": 64, "swapped": True}, {"bn": 32}], 0), ids=str)
def test_compiled_code_computes_in_bf16(more):
    """Results, and what is added to them, in boxes and in rows."""
    config = {"bm": 64, "split": 1} | more
    case = conv("c", (3, 72, 9, 11), 200, (1, 1), ep="bias residual", dtype=DType.BF16)
    check(CONV, case, config, arch=ARCH, run=on_two_blocks)


@pytest.mark.parametrize("k", usually([40, 70, 128]))
def test_compiled_code_computes_batches(k):
    for more in ({"bm": 64, "split": 1}, {"bm": 40, "split": 1, "swapped": True}):
        check(GEMM, gemm("g", (3, 70, k), 50, batched=True), {"bn": 64, **more}, arch=ARCH, run=on_two_blocks)


@pytest.mark.parametrize("case", usually(CASES, "asymmetric"))
def test_compiled_code_computes_every_form(case):
    """Images by im2col and as matrices, lines, views, batches, operands that lie the other way round"""
    rng, program = np.random.default_rng(1), CASES[case]
    (op,) = program.ops
    owners = [t for t in program.tensors.values() if t.base is None and t.name != op.y]
    program = replace(program, constants={t.name: Literal(rng.standard_normal(t.shape).astype(np.float32)) for t in owners})
    swaps = any(config.get("swapped") for config in kernel(program).configs(op, program, ARCH))
    by_k = dict(first(program, {"bm": 64, "bn": 64, "split": 1}).code.params)["k_major"]
    assert swaps == by_k[0]
    plain = {"bm": 64, "bn": 32 if by_k[1] else 64, "split": 1}  # columns that lie along N come in boxes of 64
    for config in (plain, {"bm": 56, "bn": 64, "split": 1, "swapped": True})[: 1 + swaps]:
        check(kernel(program), program, config, arch=ARCH, run=on_two_blocks)


# --- What it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (conv_program((1, 16, 5, 5), (16, 8, 3, 3), groups=2), "groups"),
        (conv_program((1, 8, 50, 50), (8, 8, 3, 3), strides=9), "step at most 8"),
        (conv_program((1, 8, 5, 5), (8, 8, 1, 1), pads=129), "-128 to 127"),
        (conv_program((1, 8, 600, 5), (8, 8, 3, 3), dilations=(130, 1), pads=(0, 1), ends=(132, 1)), "256 elements"),
        (gemm_program((8, 64), (8, 64), inputs=("a",)), "model input or output"),
    ],
)
def test_reasons(program, reason):
    found = kernel(program).supports(program.ops[0], program, ARCH)
    assert found is not None and reason in found


def test_only_hopper():
    program = CASES["product"]
    assert {n for n, a in ARCHS.items() if GEMM.supports(program.ops[0], program, a) is None} == {"sm_90a"}


# --- Tiles -----------------------------------------------------------------------------------------------------------

TILES = [
    tiles.tile({"bm": bm, "bn": bn, "split": split}, ARCH, steps, boxed, added)
    for bm, columns in tiles.TILES.items()
    for bn in columns
    for split in (1, 2, 4, 8)
    if split == 1 or bm * bn <= 128 * 128
    for steps in (1, 3, 100)
    for boxed, added in ((False, False), (True, False), (True, True))
    if split == 1 or not boxed
]
SWAPPED = [
    tiles.tile({"bm": bm, "bn": bn, "split": split, "swapped": True}, ARCH, steps, split == 1, added)
    for bn, rows in tiles.SWAPPED.items()
    for bm in rows
    for split in (1, 2, 4, 8)
    if split == 1 or bm * bn <= 128 * 128
    for steps in (1, 3, 100)
    for added in ([False, True] if split == 1 else [False])
]


def test_tiles_fit_shared_memory():
    for t in TILES + SWAPPED:
        at, results, ring = t.layout, t.staging.at, t.stages * t.stage_bytes
        assert t.smem <= ARCH.smem_block and t.stages >= 2
        assert t.stage_bytes % KIB == 0 and at["ring full"] % 8 == 0 and results % 16 == 0  # swizzled tiles, barriers, vectors
        own = t.box[0] * t.box[1] * 2 if t.boxed else 4 * t.columns * 16
        assert t.staged >= own and (t.split > 1 or results >= ring)
        assert at["ring full"] >= max(ring, results + t.writers * t.staged if t.split == 1 else t.bm * t.pitch)
        assert not t.boxed or t.staged % (8 * min(2 * t.box[0], 128)) == 0  # boxes begin where their swizzle does


@pytest.mark.parametrize("columns", [64, 128])
def test_staging_of_a_tile_turned_over_has_no_bank_conflicts(columns):
    """A warp's lanes write 4 bytes of 8 channels by 4 rows each; blocks of a cluster read them as those of other tiles."""
    t = next(t for t in SWAPPED if t.split > 1 and t.columns == columns)
    half, places = 2 * columns + 16, set()
    for warp in range(columns // 16):
        for i in range(t.bm // 2):
            at = [
                (x & 3) * 2 * t.pitch + (x >> 4) * half + warp * 32 + ((x >> 2) & 3) * 4
                + (i // 4 * 8 + i % 2) * t.pitch + i % 4 // 2 * 16
                for x in range(32)
            ]  # fmt: skip
            assert len({a // 4 % 32 for a in at}) == 32
            places |= {*at}
    rows, groups = np.indices((t.bm, columns // 8))
    read = (rows * t.pitch + groups * 16)[..., None] + np.array([0, 4, 8, 12, half, half + 4, half + 8, half + 12])
    assert places == {*read.ravel().tolist()} and len(places) == t.bm * columns


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
def test_staging_has_no_bank_conflicts(columns):
    """Each half of a warp writes 8 bytes a lane, each quarter reads 16: no two 4-byte words of it may be in one of 32 banks."""
    t = next(t for t in TILES if t.columns == columns and not t.boxed)
    half = 2 * columns + 16
    for j in range(columns // 8):
        for lanes in (range(16), range(16, 32)):
            at = [(x // 4) * t.pitch + (x // 2 % 2) * half + x % 2 * 8 + 16 * j for x in lanes]
            assert len({(a // 4 + w) % 32 for a in at for w in (0, 1)}) == 32
    groups = columns // 8
    for first in range(0, 32, 8):
        rows = [lane // groups for lane in range(first, first + 8)]
        if groups == 4:
            rows = [r & 4 | (r & 1) << 1 | (r & 2) >> 1 for r in rows]
        at = [row * t.pitch + lane % groups * 16 for row, lane in zip(rows, range(first, first + 8), strict=True)]
        assert columns > 64 or len({(a // 4 + w) % 32 for a in at for w in range(4)}) == 32
    places = {
        r * t.pitch + h * half + 4 * f + 16 * j for r in range(16) for h in (0, 1) for j in range(columns // 8) for f in range(4)
    }
    assert len(places) == 16 * columns and max(places) < 16 * t.pitch


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_boxes_are_laid_out_as_the_copy_engine_swizzles_them(columns):
    """Chunk c (16 bytes) of a box's row r lies at c ^ (which 128 bytes the row is in, modulo the chunks of a row)."""
    t = next(t for t in TILES if t.boxed and not t.added and t.columns == columns)
    alike = 7 - columns.bit_length()
    written = {}
    for group in range(columns // 16):
        for matrix in range(4):  # of a stmatrix: rows 0-7 and 8-15 of 8 columns, then of the next 8; a lane gives a row's address
            where = []
            for lane in range(8 * matrix, 8 * matrix + 8):
                row, key = lane & 15, (lane & 15) >> alike & columns // 8 - 1
                at = (row * 2 * columns + ((lane >> 4) ^ key) * 16) ^ (group * 32)
                written[at] = row, 2 * group + (lane >> 4)
                where.append(at)
            assert len({a // 16 % 8 for a in where}) == 8
    swizzled = {r * 2 * columns + (c ^ (r * 2 * columns // 128) % (columns // 8)) * 16: (r, c)
                for r in range(16) for c in range(columns // 8)}  # fmt: skip
    assert written == swizzled
    assert t.staged == BOXES * 16 * 2 * columns and t.staged % 1024 == t.staging.at % 1024 == 0


def test_rows_at_a_time_are_fewer_where_loads_need_registers():
    rows = [[tiles.Tile(bm, bn, 2, split, False, False, False).rows(n) for n in range(4)] for bm, bn, split in
            ((128, 128, 1), (192, 128, 1), (128, 256, 1), (64, 128, 1), (64, 16, 1), (64, 64, 4))]  # fmt: skip
    assert rows == [[4, 4, 2, 1], [2, 2, 2, 1], [2, 2, 2, 1], [2, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


def best(program: Program) -> dict:
    return dict(next(iter(kernel(program).configs(program.ops[0], program, ARCH))))


def test_configs_are_few_and_ranked():
    """The cheapest, and then such as have fewer blocks than all before them."""
    more = 0
    for program in CASES.values():
        op, k = program.ops[0], kernel(program)
        configs, problem = list(k.configs(op, program, ARCH)), describe(op, program)
        costs = [k.cost(op, program, c, ARCH) for c in configs]
        assert costs and costs == sorted(costs) and all(math.isfinite(c) and c > 0 for c in costs)
        blocks = [-(-problem.rows // c["bm"]) * -(-problem.stored // c["bn"]) * c["split"] for c in configs]
        assert all(n < min(blocks[:i]) for i, n in enumerate(blocks) if i >= sm90.CHEAPEST)
        more += len(configs) > sm90.CHEAPEST
    assert more


def test_few_tiles_are_split_and_many_are_not():
    small = best(conv_program((1, 256, 14, 14), (256, 256, 3, 3), pads=1))
    assert small["split"] >= 4
    large = best(gemm_program((8192, 8192), (8192, 8192)))
    assert large["bm"] * large["bn"] >= 192 * 128 and large["split"] == 1


# --- Machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "swapped", "bm", "bn", "split", "steps", "most"),
    usually(
        [
            ("3x3", False, 128, 128, 1, 9, 168),
            ("3x3", False, 64, 64, 8, 72, 168),
            ("few channels", False, 192, 128, 1, 7, 128),
            ("product", False, 128, 256, 1, 64, 168),
            ("batches", False, 64, 256, 1, 2, 255),
            ("product", False, 64, 16, 4, 8, 168),
            ("1x1", False, 64, 96, 1, 2, 168),
            ("both transposed", False, 128, 256, 1, 64, 168),
            ("transposed b", False, 64, 64, 4, 8, 168),
            ("residual", False, 128, 128, 1, 4, 168),
            ("residual", False, 192, 128, 1, 4, 128),
            ("1x1 of 16", False, 128, 96, 1, 1, 168),
            ("1x1 of 48", False, 192, 128, 1, 1, 128),
            ("1x1 of 144", False, 128, 256, 1, 3, 168),
            ("3x3", True, 256, 64, 1, 9, 208),
            ("residual", True, 256, 128, 1, 4, 168),
            ("few channels", True, 200, 128, 1, 7, 168),
            ("1x1", True, 112, 128, 1, 2, 168),
            ("product", True, 8, 128, 8, 64, 168),
            ("transposed b", True, 144, 64, 1, 8, 255),
        ],
        0,
        15,
    ),
)
def test_machine_code_has_no_spills(case, swapped, bm, bn, split, steps, most):
    """`resources` raises on spills and on serialised wgmma; registers are bounded by what the tile's warps may have."""
    program = {**CASES, "residual": RESIDUAL}[case]
    config = {"bm": bm, "bn": bn, "split": split, "swapped": swapped}
    (launch,) = kernel(program).work(program.ops[0], program, config, ARCH).launches
    boxed = dict(launch.code.params)["boxed"]
    stages = tiles.tile(config, ARCH, steps, boxed, boxed and case == "residual").stages
    params = {**dict(launch.code.params), "stages": stages}
    used = resources(type(launch.code)(launch.code.kernel, tuple(sorted(params.items()))), ARCH)
    assert used.registers <= most and used.stack == 0


@pytest.mark.parametrize(
    ("image", "measured"),
    [
        ((512, 512), {64: 16.06, 112: 13.16, 144: 12.82, 200: 11.81, 256: 10.89}),
        ((236, 320), {64: 5.59, 112: 5.30, 144: 4.53, 200: 4.75, 256: 5.11}),
    ],
)
def test_rows_of_every_second_pixel_come_faster(image, measured):
    """Microseconds of a convolution of 32 channels in a network on an H200, by the columns of a tile."""
    program = conv_program((1, 32, *image), (64, 32, 3, 3), 2, 1)
    told = {"bn": 64, "split": 1, "swapped": True}
    costs = {bm: CONV.cost(program.ops[0], program, {"bm": bm, **told}, ARCH) for bm in measured}
    assert all(costs[bm] == pytest.approx(us, rel=0.3) for bm, us in measured.items())
    assert min(costs, key=costs.__getitem__) == min(measured, key=measured.__getitem__)


def test_clusters_of_eight_exchange_more():
    """In bert_base with 71 tokens on an H200 they took 1.5 to 2.5 µs longer than a cluster of four."""
    program = gemm("g", (71, 3072), 768)

    def cost(bm: int, bn: int, split: int) -> float:
        return GEMM.cost(program.ops[0], program, {"bm": bm, "bn": bn, "split": split, "swapped": True}, ARCH)

    assert min(cost(112, 64, 8), cost(56, 128, 8), cost(64, 128, 8)) > cost(40, 64, 4) + 0.9


def test_boxes_of_half_a_stage_share_lines():
    """A convolution of 96 channels took 11.2 µs by im2col on an H200, and 15.4 from patches."""
    program = conv_program((32, 96, 28, 28), (128, 96, 3, 3), 1, 1)
    gathered = CONV.cost(program.ops[0], program, {"bm": 200, "bn": 128, "split": 1, "swapped": True}, ARCH)
    assert gathered == pytest.approx(11.2, rel=0.15)
    assert choose(program.ops[0], program, ARCH).kernel is CONV


def test_rows_of_pixels_take_longer_than_those_of_weights():
    """A convolution of 14² pixels in ResNet-50 at a batch of 20 took 8.8 and 12.0 µs on an H200."""
    program = conv_program((20, 256, 14, 14), (256, 256, 3, 3), 1, 1)
    wide, tall = (CONV.cost(program.ops[0], program, {**c, "split": 1, "swapped": True}, ARCH) for c in TILES_OF_14)
    assert tall > 1.1 * wide


def test_few_blocks_more_than_multiprocessors_are_not_twice_as_slow():
    """In BERT on an H200 144 blocks take 4.2 µs, and a layer is 1.4 µs faster where both products have 108 larger ones."""
    program = conv_program((131, 768, 1, 1), (2304, 768, 1, 1))
    few, many = (CONV.cost(program.ops[0], program, {"bm": n, "bn": 64, "split": 1, "swapped": True}, ARCH) for n in (48, 40))
    assert few < many < 1.3 * few


TILES_OF_14 = {"bm": 64, "bn": 128}, {"bm": 144, "bn": 64}

SHORT = {
    "64 of 192": (192, 64, {"bm": 32, "bn": 64, "swapped": True}),
    "none of 528": (528, 0, {"bm": 64, "bn": 16}),
    "32 for 22 of 150": (150, 32, {"bm": 64, "bn": 64}),
    "96 of 352": (352, 96, {"bm": 32, "bn": 64, "swapped": True}),
    "none of 240": (240, 0, {"bm": 64, "bn": 32}),
    "none of 256": (256, 0, {"bm": 64, "bn": 32}),
    "none of 96": (96, 0, {"bm": 64, "bn": 32}),
    "none of a cluster's": (352, 0, {"bm": 64, "bn": 32, "split": 2}),
}
"""Channels, and how many bytes of them the first stage counts, so that others end with them: none where rows begin within sectors
of 32 bytes, or where boxes end with them anyway."""


@pytest.mark.parametrize("case", usually(SHORT, "96 of 352"))
def test_a_short_first_stage(case: str) -> None:
    channels, short, how = SHORT[case]
    program = of_8_bits(case, (1, channels, 9, 8), 48, (1, 1), (DType.U8, DType.I8, DType.U8), residual=DType.U8)
    config = {"split": 1, **how}
    (launch,) = CONV.work(program.ops[0], program, config, ARCH).launches
    assert dict(launch.code.params).get("short", 0) == short
    if config["split"] == 1:  # the machine has no clusters
        check(CONV, program, config, once=False, arch=ARCH, run=machine.run)


@thorough
@pytest.mark.parametrize(
    "config",
    [
        {"bm": 64, "bn": 64, "overlaps": True},
        {"bm": 40, "bn": 64, "swapped": True},
        {"bm": 24, "bn": 64, "swapped": True, "overlaps": True},
    ],
    ids=str,
)
def test_a_short_first_stage_of_rough_sums(config) -> None:
    program = of_float8("short", (1, 160, 9, 8), 48, (1, 1), (DType.E4M3,) * 3, fn="relu", residual=DType.E4M3)
    check(CONV, program, {"split": 1, **config}, once=False, arch=ARCH, run=machine.run)


@thorough
def test_channels_that_are_fewer_than_a_group_leave_turned() -> None:
    program = of_8_bits("ten", (32, 240, 1, 1), 10, (1, 1), (DType.U8, DType.I8, DType.U8))
    config = {"bm": 8, "bn": 64, "split": 1, "swapped": True}
    assert config in list(CONV.configs(program.ops[0], program, ARCH))
    check(CONV, program, config, once=False, arch=ARCH, run=machine.run)
