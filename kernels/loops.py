"""Loops over axes of strided tensors, merged on the host and taken apart in the kernel; what several kernels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tccompile.ir.extent import Extent, Shape, divides, most, same
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.kernels.codegen import definition, divider, execute, names, tuple_of
from tccompile.kernels.epilogue import Frame
from tccompile.kernels.spec import I32
from tccompile.kernels.text import DeviceText

LIMIT = 2**31
"""Indices, extents and strides are 32-bit numbers in the kernels; addresses are 64-bit."""


@dataclass(frozen=True)
class Loops:
    """A nest of loops, outermost first, and how far each step of one moves in each of several tensors (in elements)."""

    extents: Shape
    strides: tuple[Shape, ...]

    @property
    def size(self) -> Extent:
        """Iterations of the whole nest."""
        return prod(self.extents)

    @property
    def depth(self) -> int:
        return len(self.extents)

    @property
    def args(self) -> tuple[I32, ...]:
        """The arguments of `unravel(depth, tensors)`: a divider for each loop but the outermost, then each tensor's strides."""
        out = [value for n in self.extents[1:] for value in (n, *divider(n))]
        return tuple(I32(v) for v in (*out, *(s for strides in self.strides for s in strides)))


def loops(extents: Sequence[Extent], *strides: Sequence[Extent]) -> Loops:
    """The nest over `extents`, without loops of one iteration, and with neighbours merged where all strides allow it.

    The order of the iterations stays. At least one loop is left.
    """
    kept: list[tuple[Extent, list[Extent]]] = []
    for i, n in enumerate(extents):
        steps = [s[i] for s in strides]
        if same(n, 1):
            continue
        if kept and all(same(outer, n * inner) for outer, inner in zip(kept[-1][1], steps, strict=True)):
            kept[-1] = (kept[-1][0] * n, steps)
        else:
            kept.append((n, steps))
    kept = kept or [(1, [0] * len(strides))]
    return Loops(tuple(n for n, _ in kept), tuple(zip(*(s for _, s in kept), strict=True)) if strides else ())


def unravel(depth: int, tensors: int = 1) -> DeviceText:
    """The device function (iteration, arguments) → offset in elements (int64), or a tuple of one for each tensor."""
    base = 3 * (depth - 1)
    lines, rest = [], "i"
    for d in reversed(range(1, depth)):
        k = 3 * (d - 1)
        lines += [f"q{d} = divide({rest}, w[{k + 1}], w[{k + 2}])", f"j{d} = {rest} - q{d} * w[{k}]"]
        rest = f"q{d}"
    lines.append(f"j0 = {rest}")
    sums = [" + ".join(f"i64(j{d}) * i64(w[{base + t * depth + d}])" for d in range(depth)) for t in range(tensors)]
    return DeviceText("unravel", "i, w", [*lines, f"return {', '.join(sums)}"], {})


def unravel_args(depth: int, tensors: int = 1) -> tuple[str, ...]:
    """The kinds of the arguments that `unravel(depth, tensors)` takes, as a `KernelText`'s signature has them."""
    return ("int",) * (3 * (depth - 1) + tensors * depth)


def device(name: str, params: str, lines: Sequence[str], **scope: Any) -> Any:
    """The device function of this text; it may call what `codegen.names()` and `scope` hold."""
    from tccompile.kernels.ptx.core import cuda

    return cuda.jit(device=True, inline="always")(execute(definition(name, [params], lines), {**names(), **scope}, name))


def entry(body: Callable[..., None], *counts: int) -> Callable[..., None]:
    """The kernel that calls `body(a0, …, (b0, …), (c0, …))`: counts[0] parameters by themselves, then tuples of the others."""
    groups = [[f"p{g}_{i}" for i in range(n)] for g, n in enumerate(counts)]
    args = [*groups[0], *map(tuple_of, groups[1:])]
    text = definition("kernel", [p for group in groups for p in group], [f"body({', '.join(args)})"])
    return execute(text, {"body": body}, "kernel")


def tree(accs: Sequence[str], combine: str, threads: int) -> list[str]:
    """Text that combines the T threads of an output by halves: those at tid + s * stride, for s < T.

    The results end up in the registers and the places in `shared` (one row of `threads` numbers each) of the thread t = 0. All
    threads of the block take part; `shared` must be free, and is to be left alone by others until the next barrier.
    """
    return [
        *(f"shared[{i * threads} + tid] = {a}" for i, a in enumerate(accs)),
        "cuda.syncthreads()",
        "half = T >> i32(1)",
        "while half > 0:",
        "    if t < half:",
        "        other = tid + half * stride",
        *(f"        {a} = {combine.format(a, f'shared[{i * threads} + other]')}" for i, a in enumerate(accs)),
        *(f"        shared[{i * threads} + tid] = {a}" for i, a in enumerate(accs)),
        "    cuda.syncthreads()",
        "    half = half >> i32(1)",
    ]


def exchange(accs: Sequence[str], combine: str, threads: int, block: int, first: int = 0) -> list[str]:
    """Text that combines the float32 of an output's `threads` neighbouring threads (a power of 2) by exchanges within warps.

    All of them get the results. All threads of the block take part. More than 32 also use `shared` from `first` on, a number for
    each warp of the block and each of `accs`, which others are to leave alone until the next barrier.
    """
    out, half = [], min(threads, 32) // 2
    while half:
        for a in accs:
            out += [f"other = shuffle({a}, i32({half}))", f"{a} = {combine.format(a, 'other')}"]
        half //= 2
    if threads > 32:
        at = [first + i * (block // 32) for i in range(len(accs))]
        out.append("if tid & i32(31) == 0:")
        out += [f"    shared[i32({b}) + (tid >> i32(5))] = {a}" for b, a in zip(at, accs, strict=True)]
        out += ["cuda.syncthreads()", f"warp = (tid >> i32(5)) & i32({-(threads // 32)})"]
        for b, a in zip(at, accs, strict=True):
            out.append(f"{a} = shared[i32({b}) + warp]")
            out += [f"{a} = {combine.format(a, f'shared[i32({b + w}) + warp]')}" for w in range(1, threads // 32)]
    return out


# --- What kernels ask of tensors -------------------------------------------------------------------------------------


def vectors(t: Tensor, axis: int, lanes: int) -> bool:
    """Whether `axis` is innermost, and all of `padded` can be read in vectors of `lanes` elements at aligned addresses."""
    others = [t.strides[a] for a in range(t.rank) if a != axis and most(t.padded[a]) > 1]
    steps = [*others, t.offset, t.padded[axis]]
    return (t.strides[axis] == 1 or same(t.padded[axis], 1)) and all(divides(lanes, s) for s in steps)


def power(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def is_vector_type(t: Tensor) -> bool:
    return t.dtype in (DType.F16, DType.F32)


def refusal(op: Op, program: Program, frame: Frame) -> str | None:
    """Why the rows and lanes of `frame` cannot be computed and stored with 32-bit indices, or None."""
    y = program.tensors[op.y]
    for axis, (n, padded) in enumerate(zip(y.shape, y.padded, strict=True)):
        if axis != frame[-1] and n != padded:
            return f"its output is padded along axis {axis}, not along that of the lanes"
    for name in (*op.inputs, op.y):
        if (span := program.tensors[name].span) >= LIMIT:
            return f"{name} spans {span} elements; offsets are counted in 31 bits"
    return None
