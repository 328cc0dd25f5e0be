"""Depthwise convolution on Tensor Cores: a tap of the filter is a diagonal matrix.

16 pixels by 8 channels of the input times 8 by 8 numbers, which are 0 but for the channels' weights on the diagonal: seven of
eight multiplications are for nothing, but nothing is converted, and one instruction (mma.m16n8k16) multiplies two taps. fp16 in,
sums in fp32. What is no number in one channel (an infinity, NaN) makes NaN of the 8 channels that share a matrix with it.

Nothing is exchanged between threads. A warp computes 8 rectangles of pixels, one for each row g of four lanes, by 4 * lanes
channels, of which lane t of a row reads and stores `lanes` neighbouring ones. Word k of a vector, two channels, is the lane's
part of matrix k, whose columns are thus the words k of all four lanes; its rows g and g + 8 are neighbouring columns of the
image. The accumulators of all matrices are then neighbouring channels of the lane's own pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Conv, Op
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import epilogue
from tccompile.kernels.depthwise import NUMBERS, THREADS, Depthwise, filter_of, image, place, stores, unrolled
from tccompile.kernels.ptx.atoms import of_warpgroups, warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import Config, Value, memory_us, traffic_us
from tccompile.kernels.text import KernelText, indented, intrinsic, parameters

SIZE = 2
"""Bytes of an element of x and w."""


class DepthwiseMma(Depthwise):
    """Conv with as many groups as input and output channels, NHWC, in fp16, with large filters; from sm_75 on."""

    name = "depthwise_mma"
    realises: type[Op] = Conv
    tensor_cores = True
    unit = (8, 4)
    walks = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Conv)
        if warp_atom(arch) is None:
            return f"{arch.name} has no Tensor Core instruction with 16 rows and 8 columns"
        if (reason := super().supports(op, program, arch)) is not None:
            return reason
        for t in (program.tensors[op.x], program.tensors[op.w]):
            if t.dtype is not DType.F16:
                return f"{t.name} is {t.dtype.value}; Tensor Cores multiply float16"
        if unrolled(op, program) not in TILES:
            r, s = filter_of(program.tensors[op.w])
            return f"its filter is {r}×{s}: Tensor Cores take 5×5 with stride 1 or 2 and 7×7 with stride 1, without dilation"
        return None

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Conv)
        height = image(program.op_shape(op))[2]
        counts = sorted({ceil_div(height, bands) for bands in (1, 2, 3, 4, 5, 7, 10, 14)})
        for columns, lanes in TILES[unrolled(op, program)]:
            yield from ({"rows": rows, "columns": columns, "lanes": lanes} for rows in counts)

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Conv)
        own = measured(arch).depthwise_mma
        rows, columns, lanes = (config[name] for name in ("rows", "columns", "lanes"))
        n, c, p, q = image(program.op_shape(op))
        taps, stride = unrolled(op, program)
        warps = ceil_div(n * ceil_div(p, rows) * ceil_div(q, columns), 8) * ceil_div(c, 4 * lanes)
        steps = rows + slots_of(taps, stride) - 1
        # What a step takes of a multiprocessor: products of 16 × 8 × 8 on its Tensor Cores, and the other instructions.
        products = columns // 2 * taps[0] * taps[1] * lanes // 2
        reads = stride * ((columns - 1) * stride + taps[1])
        others = 40 + 5 * reads + lanes * stride * ((columns - 2) * stride + taps[1]) + 24 * columns
        rate = arch.tensor_tflops * 1e6 / arch.sms * (own.mma_sync if of_warpgroups(arch) else own.older)
        each = 2048 * products / rate + (own.issuing * products + others) / (arch.fp32_tflops * 1e6 / arch.sms / 64 * own.issue)
        busy = own.busy * warps / arch.sms * steps * each + own.step_us * steps
        latency = own.start_us + steps * (own.latency_us + 2 * each)
        again = ((rows - 1) * stride + taps[0]) / (rows * stride) - 1  # of x, what two bands read
        moved = own.moving * traffic_us(op, program, arch) + max(0.0, again) * memory_us([program.tensors[op.x]], arch)
        longest = max(moved, busy, latency)
        return measured(arch).launch_us + measured(arch).depthwise.from_l2 * (
            longest + own.exposed * (moved + busy + latency - longest)
        )

    def source(self, arch: Arch, **params: Value) -> KernelText:
        columns, lanes = params["columns"], params["lanes"]
        stored = epilogue.source(epilogue.Form.decoded(params["epilogue"]), columns)
        words = lanes * SIZE // 4
        scope = {
            "store": stored.function,
            "read": intrinsic("ptx.memory.read_words", words, "global.nc"),
            "take": intrinsic("ptx.mma.take", words),
            "zeros": intrinsic("ptx.mma.zeros", 2 * lanes),
            "multiply_diagonal": intrinsic("ptx.mma.multiply_diagonal", warp_atom(arch), words),
        }
        signature = {**parameters("address", "x, w"), **parameters("int", NUMBERS), "e": stored.kinds}
        writer = Writer(columns, lanes, params["stride"], tuple(params["taps"]))
        return KernelText(signature, writer.lines(), scope, THREADS, TILES[writer.taps, writer.stride][columns, lanes])


TILES: dict[tuple[tuple[int, int], int], dict[tuple[int, int], int]] = {
    ((5, 5), 1): {(2, 4): 3, (4, 4): 2},
    ((5, 5), 2): {(2, 4): 3, (4, 4): 2},
    ((7, 7), 1): {(2, 4): 2},
}
"""Of filters by their taps, rows and columns, and the stride: the columns and lanes that a thread computes, and the blocks of a
multiprocessor, which bound the registers."""


def slots_of(taps: tuple[int, int], stride: int) -> int:
    """Rows of y that a row of x may belong to."""
    return ceil_div(taps[0], stride)


@dataclass(frozen=True)
class Writer:
    """Writes the kernel's text. x: (N, H, W, C), w: (R, S, C).

    A warp walks down the image, one row of y a step, which brings as many rows of x as the stride has; they are read one step
    ahead, each vector once. Rows of y under way take turns in the accumulators, so the loop's text holds as many steps.

    columns  of y that a thread computes, two of which share their accumulators
    lanes    neighbouring channels of a thread
    taps     rows and columns of the filter
    """

    columns: int
    lanes: int
    stride: int
    taps: tuple[int, int]

    @property
    def _slots(self) -> int:
        return slots_of(self.taps, self.stride)

    @property
    def _width(self) -> int:
        """Columns of x that are read."""
        return (self.columns - 1) * self.stride + self.taps[1]

    @property
    def _pairs(self) -> range:
        """The first of each two columns of y whose accumulators lie together."""
        return range(0, self.columns, 2)

    def lines(self) -> list[str]:
        out = [*self._places(), *self._matrices(), *self._columns(), f"steps = i32(rows + i32({self._slots - 1}))"]
        out += [line for u in range(self.stride) for line in self._read_row(u, "i32(0)")]
        out += self._weights()
        out += [f"a{number}_{q} = zeros()" for number in range(self._slots) for q in self._pairs]
        out += ["k = i32(0)", "while k < steps:"]
        for number in range(self._slots):
            text = self._step(number)
            out += indented([f"if i32(k + i32({number})) < steps:", *indented(text)] if number else text)
        return [*out, f"    k = i32(k + i32({self._slots}))"]

    def _places(self) -> list[str]:
        return [
            "t = i32(cuda.blockIdx.x) * i32(cuda.blockDim.x) + i32(cuda.threadIdx.x)",
            "warp, g, t = t >> i32(5), (t >> i32(2)) & i32(7), t & i32(3)",
            "if warp >= total:",
            "    return",
            "octet = divide(warp, groups_m, groups_s)",
            f"c = i32(i32((warp - octet * groups) * i32({4 * self.lanes})) + t * i32({self.lanes}))",
            "rectangle = i32(i32(octet * i32(8)) + g)",
            "real = i32(rectangle < rectangles)",
            "rectangle = select(real != 0, rectangle, i32(rectangles - i32(1)))",
            *place("rows", self.columns),
            # Nothing is stored of a rectangle too many, and what is read in place of what is not there is masked.
            "p0 = select(real != 0, p0, P)",
            "inside = within(c, i32(0), padded)",  # y may be padded further than x and w
            "known = select(inside != 0, c, i32(0))",
            f"base = x + (i64(n) * i64(xn) + i64(known)) * i64({SIZE})",
        ]

    def _matrices(self) -> list[str]:
        """Lane (g, t) has numbers 2 * t and 2 * t + 1 of column g of a matrix of weights."""
        return [
            f"filters = w + i64(known) * i64({SIZE})",
            "diagonal = select(g & i32(1) == i32(0), i32(0xffff), i32(-0x10000))",
            "diagonal = select(i32(g >> i32(1)) == t, i32(diagonal & i32(-inside)), i32(0))",
        ]

    def _columns(self) -> list[str]:
        out = []
        for j in range(self._width):
            out += [
                f"present = within(i32(x0 + i32({j})), i32(0), W)",
                f"mask_w{j} = i32(-i32(present & inside))",
                f"column{j} = i32(select(present != 0, i32(x0 + i32({j})), i32(0)) * xw)",
            ]
        return out

    def _weights(self) -> list[str]:
        out = []
        for r in range(self.taps[0]):
            for s in range(self.taps[1]):
                at = f"i64(i32(i32(i32({r}) * wr) + i32(i32({s}) * ws)))"
                out.append(f"w{r}_{s} = take(read(filters + {at} * i64({SIZE})), diagonal, diagonal)")
        return out

    def _read_row(self, u: int, step: str) -> list[str]:
        """Row u of those of x that the step brings."""
        return [
            f"h = i32(h0 + i32({step} * sh) + i32({u}))",
            "present = within(h, i32(0), H)",
            f"mask_h{u} = i32(-present)",
            "line = i32(select(present != 0, h, i32(0)) * xh)",
            *(f"x{u}_{j} = read(base + i64(i32(line + column{j})) * i64({SIZE}))" for j in range(self._width)),
        ]

    def _step(self, number: int) -> list[str]:
        """Step k + number: the row of y that begins there has accumulators `number`, the one before it those before."""
        text = [f"a{number}_{q} = zeros()" for q in self._pairs]
        ahead = f"i32(k + i32({number + 1}))"
        met = sorted({q * self.stride + s for q in self._pairs for s in range(self.taps[1])})
        for u in range(self.stride):
            for j in met:  # neighbouring pairs of columns meet in the same two columns of x
                both = (f"take(x{u}_{i}, mask_w{i}, mask_h{u})" for i in (j, j + self.stride))
                text.append(f"v{j} = {' + '.join(both)}")
            text += [f"if {ahead} < steps:", *indented(self._read_row(u, ahead))]
            text += self._products(number, u)
        done = " + ".join(f"a{(number + 1) % self._slots}_{q}" for q in self._pairs)
        text += [f"p = i32(k + i32({number + 1 - self._slots}))", "if p >= 0:"]
        return [*text, *indented(stores("p", self.columns, done))]

    def _products(self, number: int, u: int) -> list[str]:
        """Row u times those of the filter that rows of y under way have there: two taps at once, and the last by itself."""
        stride, (taps_h, taps_w) = self.stride, self.taps
        live = [((number - d) % self._slots, u + d * stride) for d in range(self._slots) if u + d * stride < taps_h]
        text = []
        for taps in (range(s, min(s + 2, taps_w)) for s in range(0, taps_w, 2)):
            for q in self._pairs:
                vectors = " + ".join(f"v{q * stride + s}" for s in taps)
                for a, r in live:
                    weights = " + ".join(f"w{r}_{s}" for s in taps)
                    text.append(f"a{a}_{q} = multiply_diagonal(a{a}_{q}, {vectors}, {weights})")
        return text
