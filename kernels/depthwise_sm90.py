"""Depthwise convolution on Hopper: the tensor copy engine feeds sparse diagonal matrices on Tensor Cores.

A tap of the filter is an 8 by 8 matrix with 8 channels' weights on its diagonal. mma.sp multiplies by a matrix of whose every
four neighbours along K two are zero, in little more time than by half of it: one mma.sp.m16n8k32 is 4 taps of 8 neighbouring
pixels for two rows of y, one below the other, which see the same pixels through neighbouring rows of the filter. The pixels come
from shared memory: a matrix of 8 pixels by 8 channels is what ldmatrix reads, at any pixel, so that nothing is moved or masked.
What is no number in one channel (an infinity, NaN) makes NaN of the 8 channels that share a matrix with it, in both rows of y.

A block walks down its part of the rows of all images, `columns` pixels wide, of `channels` channels, in steps of two rows of y
each; narrow images lie side by side, so that no matrix has pixels to spare. They come in slabs of a few steps by boxes of a
tensor map, whose zeros outside the image are the padding, into a ring of buffers; with a stride of 2 even and odd columns come as
arrays of their own, of maps that step over two columns, so that pixels of a matrix are neighbours. One warp asks for slabs and
has results stored; each other warp has 8 channels, or twice 8, of a part of the columns. It reads each row once and multiplies it
for all pairs of rows of y that it belongs to. Results are rounded into boxes in shared memory. A warp that is done with a slab
says so and goes on to the next one; when all have, the slab's buffer is filled again and its results are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import hypot

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.codegen import divider
from tccompile.kernels.depthwise import filter_of, image
from tccompile.kernels.depthwise_sm90_text import NUMBERS, lines, maps
from tccompile.kernels.depthwise_sm90_walk import (
    CHOSEN,
    PARAMS,
    Walk,
    constant,
    elsewhere,
    longest,
    partitions,
    share,
    walk_of,
    walks,
)
from tccompile.kernels.loops import refusal, vectors
from tccompile.kernels.parts.maps import unmapped
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Config, Launch, Ptr, TiledMap, Value, Work, code, memory_us, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, intrinsic, parameters


class DepthwiseSm90(TextKernel):
    """Conv with as many groups as input and output channels, NHWC, in fp16, by TMA and mma.sp, on sm_90a."""

    name = "depthwise_sm90"
    realises: type[Op] = Conv
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if (reason := elsewhere(arch)) is not None:
            return reason
        x, w, y = (program.tensors[name] for name in (op.x, op.w, op.y))
        if not op.groups == x.shape[1] == w.shape[0]:
            return "it is no depthwise convolution: groups, input channels and output channels differ"
        for t in (x, w, y):
            if t.dtype is not DType.F16:
                return f"{t.name} is {t.dtype.value}; Tensor Cores multiply float16, and the copy engine stores it"
        r, s = filter_of(w)
        square = x.rank == 4 and r == s and r in (3, 5, 7) and op.strides in ((1, 1), (2, 2)) and op.dilations == (1, 1)
        if not square:
            return f"its filter is {r}×{s}: it takes 3×3, 5×5 and 7×7 with stride 1 or 2 along both axes, without dilation"
        if x.shape[3] < op.strides[1]:
            return f"{x.name} is narrower than the stride"
        if reason := unmapped((x, y), program):
            return reason
        if not vectors(w, 0, 8):
            return f"the channels of {w.name} do not lie in aligned vectors of 8"
        if x.strides[1] != 1 or any(s % 8 for s in (x.offset, *(x.strides[a] for a in (0, 2, 3) if x.shape[a] > 1))):
            return f"pixels of {x.name} do not begin at multiples of 16 bytes, or their channels are no neighbours"
        if not walks(op, program, arch):
            return f"slabs of {r} rows of its image do not fit {arch.smem_block} bytes of shared memory"
        if (reason := refusal(op, program, epilogue.frame_of(op, program))) is not None:
            return reason
        target = epilogue.describe(op, program, epilogue.frame_of(op, program)).form.y
        if target.shuffled or target.mode != "vector":
            return f"the channels of {y.name} do not lie in aligned vectors of 8, as the copy engine stores them"
        if loads := epilogue.loads_by_row(op, program):
            return f"its epilogue reads {loads[0].tensor.name} for each pixel"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The ones of least estimated cost, of equals those with fewer blocks on a multiprocessor."""
        found = [
            {"parts": parts, **{name: getattr(w, name) for name in CHOSEN}}
            for w in walks(op, program, arch)
            for parts in partitions(op, program, w, arch)
        ]
        yield from sorted(found, key=lambda config: (self.cost(op, program, config, arch), config["blocks"]))[:12]

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).depthwise_sm90
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        clock = arch.fp32_tflops * 1e6 / 2 / 128 / arch.sms  # cycles of a microsecond
        # Cycles of a step: of a Tensor Core, which has a quarter of a block's warps, and of shared memory for all of them:
        # matrices read, results written and read, the rows' arrival; and of the copy engine for the pixels of the boxes.
        products = (own.product[len(walk.products[k])] for age in range(walk.reach) for k in walk.live(age))
        tensor = walk.warps / 4 * walk.each * walk.strips * sum(products)
        lines = 8 // len({n * walk.groups % 8 for n in range(8)}) if not walk.swizzle else 1  # cycles that a matrix takes
        vectors = walk.warps * walk.each * walk.strips
        accesses = vectors * (sum(map(len, walk.products)) + 2) * lines + (walk.slab + walk.results) / walk.steps / 128
        pixels = walk.stride * walk.rows * walk.images * walk.width
        # A block's slabs come one after the other; what they take of a multiprocessor, they take from its other blocks too.
        together, stages = ceil_div(shares.blocks, arch.sms), walk.stages(arch)
        slabs, steps, all_steps = longest(shares.height, shares.strips, shares.parts, walk.reach, walk.steps, shares.skipped)
        pairs = ceil_div(shares.height * shares.strips, shares.parts)
        multiplied = pairs + own.partly * (steps - pairs) if walk.spares else steps
        step_us = max(tensor, accesses) / clock
        computing = ceil_div(together, walk.blocks) * slabs * own.slab_us + together * multiplied * step_us
        copying = together * slabs * walk.steps * pixels * own.pixel / clock
        # Rows and columns that neighbours read too come from the L2 cache, mostly.
        x = program.tensors[op.x]
        along = (shares.across - 1) * (walk.width - walk.window) * walk.stride / image(x.shape)[3]
        down = all_steps / (shares.height * shares.strips) - 1
        straddling = own.straddling if (walk.swizzle or walk.stride > 1) and x.dtype.size * x.strides[3] % 128 else 0
        moving = own.moving * (1 + straddling) * traffic_us(op, program, arch) + own.again * (down + along) * memory_us([x], arch)
        waiting = own.first * walk.steps * step_us + own.refill_us * max(0, slabs - stages) / stages
        return own.start_us + waiting + hypot(computing, copying, moving)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Conv)
        w, y = program.tensors[op.w], program.tensors[op.y]
        walk, shares = walk_of(op, program, config), share(op, program, config, arch)
        stages = walk.stages(arch)
        if 0 in y.shape:
            return Work(())
        spec = epilogue.describe(op, program, epilogue.frame_of(op, program), 1)
        _, _, _, q = image(y.shape)
        x_maps, begins = inputs(op, program, walk)
        y_map = _map(y, y.padded[1], q, 0, 1, (walk.channels, walk.window, walk.images, 2), walk.swizzle)
        numbers = (
            *(shares.chunks, *divider(shares.chunks), *shares.rows, *divider(shares.parts)),
            *(shares.height, *divider(shares.height), shares.across, *divider(shares.across), q),
            *(shares.skipped, shares.ended, -op.pads[0]),
            *(begins[0], begins[-1], w.strides[2], w.strides[3], w.padded[0], y.padded[1]),
        )
        launch = Launch(
            code(
                self.name, **{name: getattr(walk, name) for name in PARAMS},
                stages=stages, constant=constant(op, program), epilogue=spec.params,
            ),
            grid=(shares.blocks, 1, 1),
            block=walk.threads,
            args=(*x_maps, y_map, Ptr(op.w), *map(I32, numbers), *spec.args),
            smem=walk.smem(stages),
        )  # fmt: skip
        return Work((launch,))

    def source(self, arch: Arch, **params: Value) -> KernelText:
        walk = Walk(*(params[name] for name in PARAMS))
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]), 4, stores=False, keeps=True)
        assert stored.kept
        hopper = (
            "base", "uniform", "computed", "barrier_init", "barrier_arrive", "barrier_expect", "barrier_wait",
            "fence_barrier_init", "prefetch_map", "sync_warp", "wait_for_earlier_grids", "let_later_grids_start", "fence_copies",
            "copy_box4", "store_box4",
        )  # fmt: skip
        scope = {
            **{name: intrinsic(f"ptx.hopper.{name}") for name in hopper},
            "kept": stored.kept,
            "results": stored.function,
            "boxes_read": intrinsic("ptx.hopper.boxes_read", 0),
            "read_word": intrinsic("ptx.memory.load_words", 1, "global.nc" if params["constant"] else "global"),
            "take": intrinsic("ptx.mma.take", 1),
            "zeros": intrinsic("ptx.mma.zeros", 4),
            "put_turned": intrinsic("ptx.hopper.store_matrices", 2, True),
            **{f"matrices{n}": intrinsic("ptx.hopper.read_matrices", n) for n in (2, 4)},
            **{f"multiply{n}": intrinsic("ptx.mma.multiply_sparse", n) for n in (2, 4)},
        }
        signature = {
            **parameters("map", maps(walk)),
            "w": "address",
            **parameters("int", NUMBERS),
            "e": stored.kinds,
        }
        return KernelText(signature, lines(walk, params["stages"], params["constant"]), scope, walk.threads, walk.blocks)


# --- What the copy engine reads and writes -----------------------------------------------------------------------------


def _map(t: Tensor, channels: int, columns: int, first: int, step: int, box: tuple[int, ...], swizzle: int) -> TiledMap:
    """Of (channels, columns, images, rows): every `step`th column from `first` on. Rows of images side by side are neighbours."""
    extents = (channels, columns, t.shape[0], t.shape[2])
    apart = zip(extents[1:], (step * t.strides[3], t.strides[0], t.strides[2]), strict=True)
    strides = tuple(t.dtype.size * s if n > 1 else 16 for n, s in apart)
    return TiledMap(t.name, t.dtype.size * first * t.strides[3], extents, strides, box, (1, 1, 1, 1), swizzle)


def inputs(op: Conv, program: Program, walk: Walk) -> tuple[list[TiledMap], list[int]]:
    """For each of a stride's columns from the first one that column 0 of y reads: its map, and where it begins there."""
    x, box = program.tensors[op.x], (walk.channels, walk.width, walk.images, walk.steps * walk.rows)
    found, begins = [], []
    for f in range(walk.stride):
        begin, parity = divmod(f - op.pads[1], walk.stride)
        columns = ceil_div(x.shape[3] - parity, walk.stride)
        found.append(_map(x, x.shape[1], columns, parity, walk.stride, box, walk.swizzle))
        begins.append(begin)
    return found, begins
