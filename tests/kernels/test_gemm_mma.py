"""The mma.sync kernels: what they accept, how they lay out shared memory, split K, and that every generation compiles them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tccompile.arch import ARCHS, Feature
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.ir.expr import ACC, Epilogue, View, call, coord, identity_view, load
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.gemm_mma import (
    BY_SHAPE,
    TILES,
    ConvMma,
    Form,
    GemmMma,
    build_tile,
    resident_of,
    stages_of,
)
from tccompile.kernels.implicit_gemm import CHUNK, SCALARS, Problem, describe, scalars, split_steps, tiles
from tccompile.kernels.parts.fragments import QUADS, WARP
from tccompile.kernels.ptx.atoms import atoms, warp_atom
from tccompile.kernels.spec import I32, Counters, Scratch
from tests.kernels import machine
from tests.networks import relative_error
from tests.tiers import usually

NHWC = (0, 2, 3, 1)
WITH_TENSOR_CORES = [a for a in ARCHS.values() if atoms(a)]


def program_of(op: Op, *tensors: Tensor) -> Program:
    return Program(("x",), ("y",), {t.name: t for t in tensors}, {}, (op,))


def conv(shape=(1, 64, 14, 14), outputs=64, taps=(3, 3), groups=1, dtype=DType.F16, x: Tensor | None = None, **changes):
    n, c, h, w = shape
    fields = {"strides": (1, 1), "pads": (taps[0] // 2, taps[1] // 2), "dilations": (1, 1), **changes}
    (sh, sw), (ph, pw), (dh, dw) = fields["strides"], fields["pads"], fields["dilations"]
    p, q = (h + 2 * ph - dh * (taps[0] - 1) - 1) // sh + 1, (w + 2 * pw - dw * (taps[1] - 1) - 1) // sw + 1
    op = Conv(nodes=("conv",), x="x", w="w", y="y", groups=groups, **fields)
    x = x or dense("x", shape, dtype, NHWC)
    return op, program_of(
        op, x, dense("w", (outputs, c // groups, *taps), dtype, NHWC), dense("y", (n, outputs, p, q), dtype, NHWC)
    )


def gemm(m=77, k=64, n=48, lead=(), batched=False, dtype=DType.F16, a: Tensor | None = None):
    op = Gemm(nodes=("gemm",), a="x", b="w", y="y")
    b = dense("w", (*lead, n, k) if batched else (n, k), dtype)
    return op, program_of(op, a or dense("x", (*lead, m, k), dtype), b, dense("y", (*lead, m, n), dtype))


# --- The description -------------------------------------------------------------------------------------------------


def gathered(problem: Problem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The product by the description alone, element by element of the flat storage: what the kernels' addresses must reach."""
    out = np.zeros((problem.batches, problem.rows, problem.columns))
    (_, p, q), (h, wd) = problem.pixels, problem.image
    xn, xh, xw, xc = problem.x_pixel
    wr, ws, wc = problem.w_tap
    c = np.arange(problem.channels)
    for b in range(problem.batches):
        o, i = divmod(b, problem.batch[1])
        xb, wb = o * problem.x_batch[0] + i * problem.x_batch[1], o * problem.w_batch[0] + i * problem.w_batch[1]
        for m in range(problem.rows):
            image, line, column = m // q // p, m // q % p, m % q
            for r in range(problem.taps[0]):
                for s in range(problem.taps[1]):
                    y0 = line * problem.strides[0] - problem.pads[0] + r * problem.dilations[0]
                    x0 = column * problem.strides[1] - problem.pads[1] + s * problem.dilations[1]
                    if 0 <= y0 < h and 0 <= x0 < wd:
                        row = x[xb + image * xn + y0 * xh + x0 * xw + c * xc]
                        n = np.arange(problem.columns)[:, None]
                        out[b, m] += w[wb + n * problem.w_column + r * wr + s * ws + c * wc] @ row
    return out


def stored(tensor: Tensor, values: np.ndarray) -> np.ndarray:
    flat = np.zeros(tensor.span)
    np.lib.stride_tricks.as_strided(flat, tensor.shape, [s * 8 for s in tensor.strides])[...] = values
    return flat


def test_description_of_a_convolution_reaches_the_right_elements():
    rng = np.random.default_rng(0)
    op, program = conv((2, 6, 7, 9), 4, (3, 2), groups=2, strides=(2, 1), pads=(1, 1), dilations=(1, 2))
    problem = describe(op, program)
    assert isinstance(problem, Problem)
    x, w = rng.standard_normal((2, 6, 7, 9)), rng.standard_normal((4, 3, 3, 2))
    got = gathered(problem, stored(problem.x, x), stored(problem.w, w))
    n, o, p, q = program.tensors["y"].shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    ref = np.zeros((n, o, p, q))
    for oc in range(o):
        g = oc // 2
        for r in range(3):
            for s in range(2):
                view = padded[:, 3 * g : 3 * g + 3, r : r + 2 * p : 2, 2 * s : 2 * s + q][:, :, :p, :q]
                ref[:, oc] += np.einsum("nchw,c->nhw", view, w[oc, :, r, s])
    mine = got.reshape(2, n, p, q, 2).transpose(1, 0, 4, 2, 3).reshape(n, o, p, q)
    assert np.linalg.norm(mine - ref) < 1e-12 * np.linalg.norm(ref)


@pytest.mark.parametrize("batched", [False, True])
def test_description_of_a_matrix_product_of_views(batched):
    rng = np.random.default_rng(1)
    a = dense("x", (2, 3, 5, 16), DType.F16, order=(0, 2, 1, 3))  # heads, as attention has them
    op, program = gemm(5, 16, 8, lead=(2, 3), batched=batched, a=a)
    problem = describe(op, program)
    assert isinstance(problem, Problem)
    x, w = rng.standard_normal(a.shape), rng.standard_normal(program.tensors["w"].shape)
    ref = x @ np.swapaxes(w, -1, -2)
    got = gathered(problem, stored(problem.x, x), stored(problem.w, w)).reshape(ref.shape)
    assert np.linalg.norm(got - ref) < 1e-12 * np.linalg.norm(ref)


def test_rows_are_linear_only_where_one_stride_reaches_them():
    def linear(case):
        return describe(*case).linear

    assert linear(conv(taps=(1, 1))) and linear(gemm(lead=(3,)))
    assert not linear(conv(taps=(1, 1), strides=(2, 2)))
    assert not linear(conv(taps=(1, 1), pads=(1, 1)))
    assert not linear(conv(taps=(3, 3)))


@pytest.mark.parametrize("case", [conv(), conv((1, 3, 9, 9), 8, (7, 7)), conv((1, 200, 9, 9), 8, (1, 5)), gemm(k=100)])
def test_the_walk_through_taps_and_channels_meets_each_chunk_in_order(case):
    problem = describe(*case)
    for tile in TILES:
        v = scalars(problem, tile.bm, tile.bn, tile.across * CHUNK, 1, CHUNK, -(-problem.channels // CHUNK))
        assert tuple(v) == SCALARS
        for column in range(tile.across):
            tap, c = divmod(column, v["channels"])
            r, s = divmod(tap, v["taps_w"])
            for k in range(column, v["chunks"], tile.across):
                assert k == (r * v["taps_w"] + s) * v["channels"] + c
                c, s, r = c + v["walk_c"], s + v["walk_s"], r + v["walk_r"]
                if c >= v["channels"]:
                    c, s = c - v["channels"], s + 1
                if s >= v["taps_w"]:
                    s, r = s - v["taps_w"], r + 1


# --- What is accepted ------------------------------------------------------------------------------------------------


def x_view(channels: int, offset: int) -> tuple[Tensor, Tensor]:
    base = dense("base", (1, 128, 14, 14), DType.F16, NHWC)
    shape = (1, channels, 14, 14)
    return base, Tensor("x", shape, DType.F16, shape, base.strides, "base", offset)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (conv(), None),
        (conv((1, 3, 14, 14)), None),  # three channels are eight in memory
        (conv(groups=4), None),
        (gemm(m=1, n=45), None),
        (gemm(lead=(3, 2), batched=True), None),
        (conv(dtype=DType.F32), None),
        (conv(dtype=DType.BF16), None),
        (conv(dtype=DType.F64), "x is float64; Tensor Cores are fed with float16 or bfloat16 or int8 or uint8"),
        (conv(groups=64), "its groups have 1 input channels"),
        (conv((1, 64, 9, 9), 24, groups=8), "its groups have 3 output channels"),
        (conv(x=dense("x", (1, 64, 14, 14), DType.F16)), "neighbouring channels of x are 224 elements apart"),
        (conv((1, 20, 14, 14), x=x_view(20, 0)[1]), "x has 20 channels in memory, fewer than the 24 that are read at once"),
        (conv(x=x_view(64, 4)[1]), "rows of x begin at multiples of 4 elements, not of 16 bytes"),
        (gemm(k=20, a=dense("x", (77, 20), DType.F16, pad=1)), "x has 20 channels in memory, fewer than the 24 that"),
        (gemm(k=20, a=dense("x", (77, 20), DType.F16, order=(1, 0))), None),
        (gemm(k=20, a=dense("x", (77, 20), DType.F16, order=(1, 0), pad=1)), "rows of x begin at multiples of 77 elements"),
    ],
)
def test_supports(case, reason):
    op, program = case
    kernel = ConvMma() if isinstance(op, Conv) else GemmMma()
    why = kernel.supports(op, program, ARCHS["sm_80"])
    assert why is None if reason is None else why is not None and why.startswith(reason)
    assert kernel.supports(op, program, ARCHS["sm_61"]) == "sm_61 has no Tensor Cores"


# --- Shared memory ---------------------------------------------------------------------------------------------------


def banks(addresses: list[int]) -> set[int]:
    """The 16-byte columns of the 128 bytes that shared memory serves at once."""
    return {a // 16 % 8 for a in addresses}


@pytest.mark.parametrize("bk", [32, 64])
@pytest.mark.parametrize("fragments", [QUADS, WARP])
def test_swizzle_is_a_bijection_without_bank_conflicts(bk, fragments):
    across = bk // CHUNK
    spread = 8 // across

    def place(row: int, chunk: int) -> int:
        return row * bk * 2 + (chunk ^ (row // spread % across)) * 16

    assert sorted(place(r, c) for r in range(64) for c in range(across)) == list(range(0, 64 * bk * 2, 16))
    for first in range(0, 64 * across, 8):  # copies: eight neighbouring threads
        assert len(banks([place(*divmod(t, across)) for t in range(first, first + 8)])) == 8
    for lanes in (fragments.a, fragments.b):
        for step in range(bk // 16):
            for first in range(0, 32, 8):  # fragments: eight lanes at once, by the kernel's xor with 32 * step
                where = []
                for lane in range(first, first + 8):
                    row, half = lanes(lane)
                    start = row * bk * 2 + (half ^ (row // spread % across)) * 16
                    assert start ^ (32 * step) == place(row, 2 * step + half)
                    where.append(start ^ (32 * step))
                assert len(banks(where)) == len(set(where))  # equal addresses are one access


@pytest.mark.parametrize("tile", TILES)
def test_lines_of_k_reach_the_fragments_that_ldmatrix_turns_round(tile):
    """What lies in lines of K is copied and read without bank conflicts, and lanes read the blocks that the instruction takes."""
    f, bk = WARP, tile.across * CHUNK
    operands = [(tile.bm, tile.warps_m, tile.mi, f.b, lambda i: (i % 2, i // 2))] if tile.copies_lines else []
    operands.append((tile.bn, tile.warps_n, tile.nj, f.a, lambda i: (i // 2, i % 2)))
    for rows, warps, blocks, lanes, matrix in operands:
        across = rows // CHUNK
        pitch, apart, spread = 2 * rows, tile.threads // across, max(1, 8 // across)

        def place(line: int, chunk: int, pitch=pitch, spread=spread, across=across) -> int:
            return line * pitch + (chunk ^ (line // spread % min(8, across))) * 16

        copied = {}
        for i in range(bk // apart):
            for t in range(tile.threads):
                line, chunk = divmod(t, across)
                copied[place(line, chunk) + i * apart * pitch] = line + i * apart, chunk
                assert place(line, chunk) + i * apart * pitch == place(line + i * apart, chunk)
        assert sorted(copied) == list(range(0, bk * pitch, 16))
        for step, warp, block in itertools.product(range(bk // 16), range(warps), range(blocks)):
            for i in range(4):  # matrix i of the four that a warp reads: (chunk of rows, half of K) as fragments order them
                where = []
                for lane in range(8 * i, 8 * i + 8):
                    line, half = lanes(lane)
                    at = (place(line, warp * blocks * 2 + half) ^ (32 * block)) + step * 16 * pitch
                    chunk, k_half = matrix(i)
                    assert copied[at] == (step * 16 + k_half * 8 + lane % 8, (warp * blocks + block) * 2 + chunk)
                    where.append(at)
                assert len(banks(where)) == 8


@pytest.mark.parametrize("f", [QUADS, WARP])
def test_accumulators_cover_a_block_once(f):
    cells = [
        (row + t % 2 * f.row_step, column + t // 2 * 8 + e)
        for row, column in map(f.acc, range(32))
        for t in range(4)
        for e in range(2)
    ]
    assert sorted(cells) == [(i, j) for i in range(16) for j in range(16)]


def test_fragments_cover_a_block():
    for f in (QUADS, WARP):
        for lanes in (f.a, f.b):
            seen = {lanes(lane) for lane in range(32)}
            rows = {row for row, _ in seen}
            assert rows == set(range(16))
            assert {half for _, half in seen} == ({0, 1} if f.ldmatrix else {0})


@pytest.mark.parametrize("arch", WITH_TENSOR_CORES, ids=lambda a: a.name)
def test_tiles_fit_each_generation(arch):
    fitting = [t for t in TILES if stages_of(t, arch)]
    assert len(fitting) >= 6
    for tile in fitting:
        stages, resident = stages_of(tile, arch), resident_of(tile, arch)
        assert tile.smem(stages) <= arch.smem_block
        assert resident * (tile.smem(stages) + 1024) <= arch.smem_sm
        assert resident * tile.threads <= arch.threads_sm
        assert tile.slab_pitch % 32 in (8, 24)


# --- Splitting K -----------------------------------------------------------------------------------------------------


def test_splits_cover_every_step_once():
    for steps in range(1, 200):
        for asked in (1, 2, 3, 5, 8, 32, 300):
            splits, each = split_steps(steps, asked)
            assert 1 <= splits <= asked and (splits - 1) * each < steps <= splits * each


def test_work_splits_and_sizes_its_workspace():
    op, program = conv((1, 512, 7, 7), 512)
    work = ConvMma().work(op, program, {"bm": 64, "bn": 64, "bk": 64, "splits": 8}, ARCHS["sm_80"])
    (launch,) = work.launches
    assert launch.grid == (1 * 8, 8, 1)
    assert work.scratch == 8 * 8 * 64 * 64 * 4 and work.counters == 8 * 4
    assert [type(a) for a in launch.args[2:4]] == [Scratch, Counters]
    whole = ConvMma().work(op, program, {"bm": 64, "bn": 64, "bk": 64, "splits": 1}, ARCHS["sm_80"])
    assert whole.scratch == whole.counters == 0 and all(isinstance(a, I32) for a in whole.launches[0].args[2 : 2 + len(SCALARS)])


def test_nothing_to_compute_launches_nothing():
    op, program = gemm(m=0)
    assert GemmMma().work(op, program, {"bm": 64, "bn": 64, "bk": 64, "splits": 1}, ARCHS["sm_80"]).launches == ()


@pytest.mark.parametrize("arch", WITH_TENSOR_CORES, ids=lambda a: a.name)
def test_configs_fill_the_gpu_where_there_are_few_tiles(arch):
    kernel = ConvMma()
    small, big = conv((1, 512, 7, 7), 512), conv((64, 64, 56, 56), 64)
    for op, program in (small, big):
        configs = list(kernel.configs(op, program, arch))
        assert 1 <= len(configs) <= 12
        costs = [kernel.cost(op, program, c, arch) for c in configs]
        assert costs == sorted(costs) and all(math.isfinite(c) and c > 0 for c in costs)
        for c in configs:
            kernel.work(op, program, c, arch)
    first = next(iter(kernel.configs(*small, arch)))
    tm, tn = tiles(describe(*small), first["bm"], first["bn"])
    assert first["splits"] > 1 and tm * tn * first["splits"] >= arch.sms / 4
    assert next(iter(kernel.configs(*big, arch)))["splits"] == 1


def test_cost_grows_with_the_work():
    kernel, arch = ConvMma(), ARCHS["sm_80"]

    def best(case):
        return min(kernel.cost(*case, c, arch) for c in kernel.configs(*case, arch))

    assert best(conv((1, 64, 56, 56))) < best(conv((8, 64, 56, 56))) < best(conv((64, 64, 56, 56)))
    flops = describe(*gemm(4096, 4096, 4096)).flops
    assert 0.4 < flops / best(gemm(4096, 4096, 4096)) / (arch.tensor_tflops * 1e6) < 1.0


# --- Other types of numbers ------------------------------------------------------------------------------------------


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """float32 with so many digits of their significand, the others cut off."""
    return (values.view(np.uint32) & np.uint32(0xFFFFFFFF << (24 - digits) & 0xFFFFFFFF)).view(np.float32)


@pytest.mark.parametrize(
    ("dtype", "result", "digits", "splits"),
    usually(
        [
            (DType.BF16, DType.BF16, 8, 1),
            (DType.BF16, DType.F32, 8, 3),
            (DType.F32, DType.F32, 16, 2),
            (DType.F16, DType.F32, 11, 1),
        ],
        2,
    ),
)
def test_products_of_other_types_by_their_atoms(dtype, result, digits, splits):
    """The code for operands of a type, run as it is compiled: values that the type holds give sums that are good to float32.
    float32 is multiplied as two bf16, which hold 16 digits, and the product of what is small in both is left out."""
    op, program = gemm(70, 200, 45, dtype=dtype)
    program.tensors["y"] = dense("y", (70, 45), result)
    rng, kernel, arch = np.random.default_rng(3), GemmMma(), ARCHS["sm_80"]
    x, w = (rounded(rng.standard_normal(program.tensors[n].shape, np.float32), digits) for n in "xw")
    config = {"bm": 32, "bn": 64, "bk": 128 // dtype.size, "splits": splits}
    memory = machine.run(kernel.work(op, program, config, arch), program, {"x": x, "w": w}, "y", arch)
    memory.check_written(True)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    assert relative_error(memory.result(), exact) < {DType.BF16: 4e-3}.get(result, 5e-6 if dtype is DType.F32 else 1e-6)
    assert kernel.supports(op, program, arch) is None
    assert (kernel.supports(op, program, ARCHS["sm_75"]) is None) == (dtype is DType.F16)


def test_a_convolution_in_bf16_by_its_atom():
    op, program = conv((1, 24, 7, 5), 20, (3, 3), dtype=DType.BF16)
    program.tensors["y"] = dense("y", (1, 20, 7, 5), DType.F32, NHWC)
    rng, arch = np.random.default_rng(4), ARCHS["sm_80"]
    x, w = (rounded(rng.standard_normal(program.tensors[n].shape, np.float32), 8) for n in "xw")
    config = {"bm": 16, "bn": 64, "bk": 64, "splits": 2}
    memory = machine.run(ConvMma().work(op, program, config, arch), program, {"x": x, "w": w}, "y", arch)
    memory.check_written(True)
    images = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    taps = [np.einsum("nchw,oc->nohw", images[:, :, r : r + 7, s : s + 5], w[:, :, r, s]) for r in range(3) for s in range(3)]
    assert relative_error(memory.result(), sum(taps)) < 1e-6


# --- Code ------------------------------------------------------------------------------------------------------------


def heavy_epilogue() -> tuple:
    """A bias, a residual and GELU: what transformers and ResNets ask for, and more registers than either."""
    op, program = conv((1, 64, 14, 14), 45)
    loads = (View("bias", (coord(1),)), identity_view("res", 4))
    op = replace(op, epilogue=Epilogue(call("gelu", call("add", call("add", ACC, load(0)), load(1))), loads))
    tensors = dict(program.tensors) | {
        "bias": dense("bias", (45,), DType.F32),
        "res": dense("res", (1, 45, 14, 14), DType.F16, NHWC),
    }
    program = Program(("x",), ("y",), tensors, {}, (op,))
    return epilogue.describe(op, program, epilogue.frame_of(op, program)).params


BOTH = (True, True)
COMPILED = [
    ("sm_70", (64, 128, 128), False, BOTH, True),
    ("sm_75", (128, 64, 128), False, BOTH, True),
    ("sm_75", (128, 64, 128), True, (False, False), False),
    ("sm_80", (128, 128, 64), False, BOTH, True),
    ("sm_80", (128, 128, 64), True, (False, False), True),
    ("sm_86", (64, 64, 128), True, BOTH, False),
    ("sm_90a", (256, 64, 64), False, BOTH, True),
    ("sm_120", (16, 64, 128), True, BOTH, True),
    ("sm_120", (16, 64, 128), True, (True, False), True),
]


@pytest.mark.parametrize(("name", "tile", "linear", "k_major", "split"), usually(COMPILED, 3))
def test_compiles_without_spills(name, tile, linear, k_major, split):
    arch, tile = ARCHS[name], BY_SHAPE[tile]
    atom = warp_atom(arch, quads=True)
    assert atom
    form = Form(atom, arch.has(Feature.ASYNC_COPIES), tile, stages_of(tile, arch), linear, k_major, split)
    function = build_tile(form, heavy_epilogue())
    ptx = ptx_text(function, arch, "kernel")
    _, used = assemble(ptx, arch.name)  # raises on spills
    assert used.stack == 0 and used.registers * tile.threads * tile.blocks <= 65536
    per_block = {"mma.m8n8k4": 4, "mma.m16n8k8": 4, "mma.m16n8k16": 2}[atom.name]
    copies = ptx.count(atom.text()) / (tile.mi * tile.nj * per_block * (tile.depth // 32))
    assert copies >= 1 and copies == int(copies)  # LLVM may unroll the loop over steps
    assert ("cp.async.cg" in ptx) == arch.has(Feature.ASYNC_COPIES)
