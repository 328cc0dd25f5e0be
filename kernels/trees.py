"""Ensembles of decision trees, on every generation: a thread walks through some trees for a row.

The trees of a row are shared out between `lanes` neighbouring threads, more of them the fewer rows there are. A thread keeps a
sum for each target in shared memory; then the threads of a row add theirs up, always in the same order. Of many targets a block
has a part, and walks again for each. Whatever the constants hold, no walk leaves them or goes on for ever: indices are clamped,
and a walk ends after `depth` branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Op, Trees
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.lines import THREADS, refusal
from tccompile.kernels.loops import power
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import I32, Arg, Config, Launch, Ptr, Work, code, traffic_us
from tccompile.kernels.text import KernelText, TextKernel, indented, intrinsic, parameters

LANES = (1, 8, 32, THREADS)
"""Threads that a row may have."""

TARGETS = 32
"""Of a block, at most: each takes a float32 of shared memory for every thread."""

COMBINE = {"add": ("{} + {}", "f32(0)"), "min": ("minimum({}, {})", "f32(inf)"), "max": ("maximum({}, {})", "f32(-inf)")}


class TreesKernel(TextKernel):
    """Every Trees."""

    name = "trees"
    realises = Trees

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Trees)
        for name in (op.branches, op.leaves):
            if program.tensors[name].dtype is not DType.I32 or program.tensors[name].offset % 4:
                return f"{name} is not of int32 at an address that is a multiple of 16"
        if not program.tensors[op.x].dtype.is_float:
            return f"{op.x} is {program.tensors[op.x].dtype.value}; features are floats"
        return refusal(op, program)

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Trees)
        most = power(op.trees)
        for lanes in dict.fromkeys(min(n, most) for n in LANES):
            yield {"lanes": lanes}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        assert isinstance(op, Trees)
        y, lanes = program.tensors[op.y], config["lanes"]
        parts = ceil_div(y.shape[1], TARGETS)
        waves = max(1.0, y.padded[0] * lanes * parts / (arch.sms * arch.threads_sm))
        walks = ceil_div(op.trees, lanes) * (op.depth + 1) * measured(arch).branch_us
        added_up = (lanes.bit_length() - 1) * min(y.shape[1], TARGETS) * measured(arch).join_us
        return measured(arch).launch_us + traffic_us(op, program, arch) + waves * (walks + added_up)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Trees)
        x, y, lanes = program.tensors[op.x], program.tensors[op.y], config["lanes"]
        if not y.size:
            return Work(())
        targets = min(y.shape[1], TARGETS)
        records, entries = (program.tensors[name].size // n for name, n in ((op.branches, 4), (op.leaves, 2)))
        numbers = (*y.shape, *y.padded, x.shape[1], op.trees, op.depth, records, entries, *x.strides, *y.strides)
        params = {"x": x.dtype.value, "y": y.dtype.value, "combine": op.combine, "lanes": lanes, "targets": targets}
        grid = (ceil_div(y.padded[0] * lanes, THREADS), ceil_div(y.shape[1], targets), 1)
        args: tuple[Arg, ...] = (*map(Ptr, (op.x, op.branches, op.leaves, op.y)), *map(I32, numbers))
        return Work((Launch(code(self.name, **params), grid, THREADS, args),))

    def source(self, arch: Arch, **params: Any) -> KernelText:
        x, y = DType(params["x"]), DType(params["y"])
        scope = {
            "get": intrinsic("ptx.memory.load", x),
            "put": intrinsic("ptx.memory.store", y),
            "words4": intrinsic("ptx.memory.read_words", 4, "global.nc"),
            "words2": intrinsic("ptx.memory.read_words", 2, "global.nc"),
            "as_float": intrinsic("ptx.memory.floats", DType.F32, 1),
        }
        signature = {**parameters("address", "x, branches, leaves, y"), **parameters("int", NUMBERS)}
        lines = Writer(x.size, y.size, params["combine"], params["lanes"], params["targets"]).lines()
        return KernelText(signature, lines, scope, THREADS)


NUMBERS = "rows, columns, padded_rows, padded_columns, features, trees, depth, records, entries, x_row, x_step, y_row, y_step"


@dataclass(frozen=True)
class Writer:
    """Writes the kernel's text. Block: rows blockIdx.x * (256 / lanes) …, targets blockIdx.y * `targets` …

    x, y     their elements' bytes
    combine  how weights are combined, of COMBINE
    lanes    threads that share the trees of a row
    targets  of a block: shared memory has a row of them, one for each thread
    """

    x: int
    y: int
    combine: str
    lanes: int
    targets: int

    @property
    def _neutral(self) -> str:
        return COMBINE[self.combine][1]

    def _combined(self, one: str, other: str) -> str:
        return COMBINE[self.combine][0].format(one, other)

    def lines(self) -> list[str]:
        return [
            *self._places(),
            "if row < rows:",
            f"    line = x + i64(row) * (i64(x_row) * {self.x})",
            "    tree = lane",
            "    while tree < trees:",
            *indented(indented([*self._leaf(), *self._weights(), f"tree = i32(tree + i32({self.lanes}))"])),
            *self._over_lanes(),
            "if row < padded_rows:",
            *indented(self._stored()),
        ]

    def _places(self) -> list[str]:
        return [
            f"shared = cuda.shared.array({self.targets * THREADS}, f32)",
            "tid, part = i32(cuda.threadIdx.x), i32(cuda.blockIdx.y)",
            f"lane = i32(tid & i32({self.lanes - 1}))",
            f"row = i32(i32(cuda.blockIdx.x) * i32({THREADS // self.lanes}) + (tid >> i32({self.lanes.bit_length() - 1})))",
            f"first = i32(part * i32({self.targets}))",
            f"for k in range({self.targets}):",
            f"    shared[k * {THREADS} + tid] = {self._neutral}",
        ]

    def _leaf(self) -> list[str]:
        """Down a tree, whatever its records say: no further than it is deep, and to no place that is none."""
        return [
            "w0, w1, w2, w3 = words4(u64(branches + i64(tree) * 16))",
            "step = i32(0)",
            "while w3 == 0 and step < depth:",
            "    feature = i32(min(i64(w1) >> 4, i64(features - i32(1))))",
            f"    value = get(line + i64(feature) * (i64(x_step) * {self.x}))",
            "    (limit,) = as_float(w0)",
            "    side = select(value > limit, i64(4), i64(8))",
            "    side = select(value == limit, i64(2), side)",
            "    side = select(value < limit, i64(1), side)",
            "    child = min(i64(w2), i64(records - i32(2))) + select((i64(w1) & side) != 0, i64(0), i64(1))",
            "    w0, w1, w2, w3 = words4(u64(branches + child * 16))",
            "    step = i32(step + i32(1))",
        ]

    def _weights(self) -> list[str]:
        """The leaf's, of the block's targets."""
        return [
            "if w3 != 0:",
            "    entry = min(i64(w2), i64(entries))",
            "    end = min(entry + (i64(w3) - 1), i64(entries))",
            "    while entry < end:",
            "        target, bits = words2(u64(leaves + entry * 8))",
            "        k = i64(target) - i64(first)",
            f"        if k >= 0 and k < {self.targets}:",
            f"            place = i32(k * {THREADS} + tid)",
            "            (weight,) = as_float(bits)",
            f"            shared[place] = {self._combined('shared[place]', 'weight')}",
            "        entry = entry + 1",
        ]

    def _over_lanes(self) -> list[str]:
        return [
            f"half = i32({self.lanes // 2})",
            "while half > 0:",
            "    cuda.syncthreads()",
            "    if lane < half:",
            f"        for k in range({self.targets}):",
            f"            place = i32(k * {THREADS} + tid)",
            f"            shared[place] = {self._combined('shared[place]', 'shared[place + half]')}",
            "    half = i32(half >> i32(1))",
            "cuda.syncthreads()",
        ]

    def _stored(self) -> list[str]:
        """Where no leaf had a weight for a target, it is zero."""
        last = "part == i32(cuda.gridDim.y) - i32(1)"
        return [
            f"end_column = padded_columns if {last} else i32(first + i32({self.targets}))",
            "column = i32(first + lane)",
            "while column < end_column:",
            "    total = f32(0)",
            "    if row < rows and column < columns:",
            f"        total = shared[i32((column - first) * {THREADS} + (tid - lane))]",
            f"        {'pass' if self.combine == 'add' else f'total = select(total == {self._neutral}, f32(0), total)'}",
            f"    put(y + i64(row) * (i64(y_row) * {self.y}) + i64(column) * (i64(y_step) * {self.y}), total)",
            f"    column = i32(column + i32({self.lanes}))",
        ]
