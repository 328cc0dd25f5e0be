"""The time loop of a recurrent layer in one launch: all blocks run at once, and pass the hidden state on through memory.

A block has a few units of one direction (a part), all gates of them, and keeps their recurrent weights in shared memory, as far
as they fit; what does not fit, and the weights of further parts, where the GPU runs fewer blocks than there are, is read from
memory (mostly from the L2 cache) in every step. In each step a warp multiplies the weights by its share of K of the hidden
state, which it waits for element by element (see ptx/exchange.py); sums over the warps, the gates and the new state of a unit
and a sequence are one thread's. Sequences are taken `batch` at a time. States are float32 and stay in scratch memory.

Elements of K are taken 32 at a time: of row `lane / 4`, a lane has the 8 neighbouring elements from `lane % 4 * 8` on, both of
the weights and of the state. For mma.sync that is just another order of K in two blocks of 16, so that fragments are read as
vectors of 16 bytes, without being laid out anew.

A GRU that resets before the product takes two rounds a step: r and z first, then n, with σ(r) h in place of h.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from tccompile.arch import Arch
from tccompile.ir.expr import Epilogue
from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.ops import Op, Rnn
from tccompile.ir.ops.rnn import GATES
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.codegen import encode
from tccompile.kernels.loops import LIMIT
from tccompile.kernels.ptx.atoms import warp_atom
from tccompile.kernels.rates import measured
from tccompile.kernels.rnn_text import OPTIONAL, Shape, rounds, text_of
from tccompile.kernels.spec import (
    I32,
    Arg,
    Config,
    Counters,
    Launch,
    Ptr,
    Scratch,
    Value,
    Work,
    code,
)
from tccompile.kernels.text import KernelText, TextKernel


class _Rnn(TextKernel):
    """What both kernels of recurrent layers share: all but the sizes of the blocks' parts."""

    realises = Rnn

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Rnn)
        x, r, y = (program.tensors[n] for n in (op.x, op.r, op.y))
        if op.epilogue != Epilogue():
            return "it has an epilogue"
        for t, axis in ((r, 3), (y, 3)):
            steps = (*(s for a, s in enumerate(t.strides) if a != axis), t.offset, t.padded[axis])
            if t.strides[axis] != 1 or any(s % 8 for s in steps) or (t.base is None and t.padded[:3] != t.shape[:3]):
                return f"{t.name} is not stored in rows of whole groups of 8 units"
        if r.padded[3] != y.padded[3]:
            return f"{r.name} has {r.padded[3]} columns with padding, {y.name} {y.padded[3]} units"
        for name in op.operands:
            t = program.tensors[name]
            if t.strides[-1] != 1 and t.shape[-1] > 1:
                return f"{name} does not store neighbours along its last axis side by side"
            if name == op.lengths and t.dtype is not DType.I32:
                return f"{name} is {t.dtype.value}; lengths are int32"
            if name != op.lengths and t.dtype not in (DType.F16, DType.BF16, DType.F32):
                return f"{name} is {t.dtype.value}; it computes floats of 16 and 32 bits"
        if y.dtype not in (DType.F16, DType.BF16, DType.F32):
            return f"{y.name} is {y.dtype.value}; it stores floats of 16 and 32 bits"
        for t in (x, r, y):
            if t.span >= LIMIT:
                return f"{t.name} spans {t.span} elements; offsets are counted in 31 bits"
        return None

    @abstractmethod
    def shapes(self, op: Rnn, program: Program, arch: Arch) -> list[Shape]:
        """How the op can be shared out among blocks."""

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Rnn)
        for shape in self.shapes(op, program, arch):
            yield {"units": shape.units, "batch": shape.batch}

    def shape(self, op: Rnn, program: Program, config: Config, arch: Arch) -> Shape:
        atom = warp_atom(arch)
        mma = atom.name if atom and self.tensor_cores else None
        sizes = program.tensors[op.r].dtype.size, program.tensors[op.y].dtype.size
        return Shape(GATES[op.cell], config["units"], config["batch"], mma, *sizes)

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Rnn)
        shape, y = self.shape(op, program, config, arch), program.tensors[op.y]
        own, steps, (_, d, n, _) = measured(arch).rnn, program.tensors[op.x].shape[0], y.shape
        chunks = ceil_div(y.padded[3], 32)
        blocks = d * ceil_div(y.padded[3], shape.units)
        each = ceil_div(blocks, arch.sms)
        turns = ceil_div(n, shape.batch)
        kept = shape.kept(chunks, arch)
        # Of a step: passing on the state; weights from shared memory, or at a share of L2's speed; what the lanes multiply.
        weights = shape.rows * 32 * shape.size
        streamed = weights * (each * chunks - kept) * min(blocks, arch.sms) * turns / (arch.gbps * own.streaming)
        read = weights * chunks * each * turns / 128 / own.shared_cycles_us
        waits = each * turns * ceil_div(chunks, shape.warps * shape.unrolled) * own.wait_us
        multiplied = 0.0 if shape.mma else shape.rows * 32 * chunks * each * turns * shape.batch / 64 / own.shared_cycles_us
        step = own.step_us + own.turn_us * each * turns + waits + max(read, streamed) + multiplied
        return measured(arch).launch_us + own.start_us + steps * len(_rounds(op)) * step

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Rnn)
        shape = self.shape(op, program, config, arch)
        tensors = program.tensors
        x, r, y = tensors[op.x], tensors[op.r], tensors[op.y]
        steps, (_, d, n, units), wide = x.shape[0], y.shape, y.padded[3]
        parts, kept = ceil_div(wide, shape.units), shape.kept(ceil_div(wide, 32), arch)
        optional = {name: getattr(op, name) for name in OPTIONAL if getattr(op, name) is not None}
        compiled = code(
            self.name,
            cell=op.cell,
            units=shape.units,
            batch=shape.batch,
            mma=shape.mma or "",
            types=(x.dtype.value, r.dtype.value, y.dtype.value),
            optional=tuple((name, tensors[t].dtype.value) for name, t in optional.items()),
            backward=op.backward,
            functions=tuple(tuple(map(encode, of_one)) for of_one in op.functions),
            clip=str(op.clip),
            reset_after=op.reset_after,
            coupled=op.coupled,
        )
        # Scratch: three states in float32, then hidden states before the first step, and what replaces them in a second round.
        two_rounds = len(_rounds(op)) > 1
        state = _aligned(d * n * wide * 4)
        first = _aligned(d * n * wide * y.dtype.size)
        starts = [0, state, 2 * state, 3 * state, 3 * state + first]
        scratch = starts[-1] + (_aligned(steps * d * n * wide * y.dtype.size) if two_rounds else 0)
        args: list[Arg] = [Ptr(op.x), Ptr(op.r), Ptr(op.y), Counters(), *map(Scratch, starts[:4])]
        args += [Scratch(starts[4] if two_rounds else 0), *map(Ptr, optional.values())]
        sizes = (steps, n, units, wide, d, parts, ceil_div(n, shape.batch), kept, shape.pitch(kept))
        strides = [*x.strides[:2], *r.strides[:3], y.strides[0], y.strides[1], y.strides[2]]
        for name, t in optional.items():
            strides += tensors[t].strides[: OPTIONAL[name]]
        launch = Launch(
            compiled,
            (min(d * parts, arch.sms), 1, 1),
            shape.threads,
            (*args, *map(I32, (*sizes, *strides))),
            shape.smem(kept),
            cooperative=True,
        )
        return Work((launch,), scratch=scratch, counters=8)

    def source(self, arch: Arch, **params: Value) -> KernelText:
        return text_of(**params)


class RnnMma(_Rnn):
    """Rnn with recurrent weights and results in fp16, by mma.sync, from sm_75 on."""

    name = "rnn_mma"
    tensor_cores = True

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Rnn)
        if warp_atom(arch) is None:
            return f"{arch.name} has no Tensor Core instruction with 16 rows and 8 columns"
        for name in (op.r, op.y):
            if program.tensors[name].dtype is not DType.F16:
                return f"{name} is {program.tensors[name].dtype.value}; Tensor Cores multiply float16"
        return super().supports(op, program, arch)

    def shapes(self, op: Rnn, program: Program, arch: Arch) -> list[Shape]:
        """Parts that fill the GPU once, and a few sizes around; as many sequences as there are, up to 32."""
        _, d, n, _ = program.tensors[op.y].shape
        wide = program.tensors[op.y].padded[3]
        even = max(4, -(-d * wide // arch.sms + 1) // 2 * 2)
        found = []
        for units in sorted({4, 8, 16, 32, even, even + 2, min(2 * even, 32)}):
            for batch in (8, 16, 32):
                shape = self.shape(op, program, {"units": units, "batch": batch}, arch)
                fits = shape.tiles * shape.stripes <= 16 and shape.tiles <= 8 and units * batch <= shape.threads
                if fits and batch < 2 * n + 8 and shape.results <= arch.smem_block and units < 2 * wide:
                    found.append(shape)
        return found


class RnnSimt(_Rnn):
    """Rnn of floats, in float32, on any generation."""

    name = "rnn_simt"

    def shapes(self, op: Rnn, program: Program, arch: Arch) -> list[Shape]:
        return [self.shape(op, program, {"units": 8, "batch": batch}, arch) for batch in (1, 4)]


RNN = (RnnMma(), RnnSimt())


def _aligned(size: int) -> int:
    return round_up(size, 256)


def _rounds(op: Rnn) -> tuple[tuple[int, ...], ...]:
    return rounds(op.cell, op.reset_after)
