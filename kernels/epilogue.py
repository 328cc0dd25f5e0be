"""What happens to a kernel's results before and while they are stored: the epilogue's expression, its loads, y's layout.

A kernel computes its op's result as rows m and groups of neighbouring lanes c, and hands each group of float32 values to
`store`. Which axis is which is a `Frame`; how each tensor is read or written for it is `describe`'s choice:

lanes  "vector": neighbours in memory, accesses of up to 16 bytes; "strided": one access a lane; "guarded": the same, lanes
       at and beyond the result's channels not touched; "same": one element for all lanes
rows   "none": the address does not depend on m; "linear": m times a stride; "general": a stride for each dimension of the
       rows, and m is taken apart by multiplications with reciprocals (once for all accesses)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tccompile.errors import UnsupportedError
from tccompile.ir.expr import DType, Expr, Shape, View
from tccompile.ir.program import Attention, Conv, Gemm, Op, Pool, Program, Tensor
from tccompile.kernels.codegen import Lines, Parameters, decode, divider, encode, execute, names, split, tuple_of, types_of
from tccompile.kernels.spec import I32, Arg, Ptr, Value

Frame = tuple[int | None, ...]
"""The axes of the result: those of the rows, outermost first, then that of the lanes. None where the result has no such axis.

Convolutions have (n, p, q, c): the row of an output pixel is (n * P + p) * Q + q.
"""


def frame_of(op: Op, program: Program) -> Frame:
    """The rows and lanes of an op's result: channels are the lanes of images, else y's innermost axis."""
    rank, y = len(program.op_shape(op)), program.tensors[op.y]
    if isinstance(op, Conv) or (isinstance(op, Pool) and y.padded[2:] == y.shape[2:]):
        return (0, 2, 3, 1) if rank == 4 else (0, None, 2, 1)
    inner = y.inner
    lane = rank - 1 if isinstance(op, Attention | Gemm) or inner is None else inner
    rows = [a for a in range(rank) if a != lane]
    return (*[None] * (3 - len(rows)), *rows, lane)


@dataclass(frozen=True)
class EpilogueSpec:
    """How to store one op's results.

    params  what `build` needs, for `code(…, epilogue=spec.params)`; without shapes, so that ops share codes
    args    the arguments of the launch that the stored function takes as `e`
    """

    params: tuple[Value, ...]
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class RowLoad:
    """A tensor of which the epilogue reads something else for each row.

    offset  of what row 0 reads, in elements from the tensor's first one
    step    elements from row to row, or None where rows lie at several strides
    vector  whether neighbouring columns are neighbours in memory, and groups of 8 begin at multiples of 16 bytes
    """

    tensor: Tensor
    offset: int
    step: int | None
    vector: bool


@dataclass(frozen=True)
class _Access:
    """One tensor as an affine function of the result's coordinates, in elements from its first one."""

    tensor: Tensor
    strides: tuple[int, ...]  # by axis of the result
    offset: int


def _access(program: Program, view: View, rank: int) -> _Access:
    tensor = program.tensors[view.tensor]
    strides, offset = [0] * rank, 0
    for index, stride in zip(view.index, tensor.strides, strict=True):
        assert index.affine is not None
        offset += index.constant * stride
        for axis, k in index.affine.items():
            strides[axis] += k * stride
    return _Access(tensor, tuple(strides), offset)


def describe(op: Op, program: Program, frame: Frame, lanes: int = 8) -> EpilogueSpec:
    """How `op` stores groups of `lanes` (1, 2, 4 or 8) neighbouring results.

    Groups with c at or beyond y's padded extent are ignored, those below it must all be stored, with any values beyond the
    result's channels. Raises UnsupportedError for a tensor with a stride of 2**31 elements or more.
    """
    assert lanes in (1, 2, 4, 8)
    shape, y, block = program.op_shape(op), program.tensors[op.y], op.epilogue.shuffle
    lane = frame[-1]
    assert lane is not None
    for axis, (n, padded) in enumerate(zip(y.shape, y.padded, strict=True)):
        assert axis == lane or n == padded, f"{y.name}: padding along axis {axis}, which holds rows"
    accesses = [_access(program, view, len(shape)) for view in op.epilogue.loads]
    rows = [a for a in frame[:-1] if a is not None and (shape[a] > 1 or block > 1)]
    y_strides = list(y.strides)
    if block > 1:
        y_strides[2], y_strides[3] = block * y.strides[2], block * y.strides[3]
    dims = _merged(rows, shape, [tuple(y_strides), *(a.strides for a in accesses)], block > 1)
    inner = [extent for extent, _ in dims[1:]]

    args: list[Arg] = [I32(v) for extent in inner for v in (extent, *divider(extent))]
    channels, padded = shape[lane], y.padded[lane]
    y_rows, y_args = _rows(dims, tuple(y_strides), y.name)
    if block > 1:
        whole = y.shape[1] % lanes == 0 and padded == y.shape[1]
        mode = "vector" if whole and _aligned(y, lanes, 0, [y.strides[a] for a in (0, 2, 3)]) and y.strides[1] == 1 else "strided"
        args += [Ptr(op.y), *y_args, *map(I32, (channels, padded, y.strides[1], y.shape[1], *divider(y.shape[1])))]
        args += map(I32, (block, *divider(block), y.strides[2], y.strides[3]))
        target = (y.dtype.value, mode, y_rows, False, True)
    else:
        vector = y.strides[lane] == 1 and padded % lanes == 0 and _aligned(y, lanes, 0, [y.strides[a] for a in rows])
        mode = "vector" if vector else "strided" if padded % lanes == 0 else "guarded"
        args += [Ptr(op.y), *y_args, I32(channels), I32(padded), I32(y.strides[lane])]
        target = (y.dtype.value, mode, y_rows, padded != channels, False)
    sources = []
    for access in accesses:
        how, more = _rows(dims, access.strides, access.tensor.name)
        step = access.strides[lane]
        reach = -(-max(channels, padded if block == 1 else 0) // lanes) * lanes  # lanes that groups ask for
        within = access.offset + sum((shape[a] - 1) * s for a, s in enumerate(access.strides) if s > 0 and a != lane)
        covered = channels == reach or (step == 1 and within + reach <= access.tensor.span)
        mode = "same" if step == 0 else "strided" if channels == reach else "guarded"
        if step == 1 and covered and _aligned(access.tensor, lanes, access.offset, [access.strides[a] for a in rows]):
            mode = "vector"
        sources.append((access.tensor.dtype.value, mode, how))
        args += [Ptr(access.tensor.name, access.offset * access.tensor.dtype.size), *more, I32(_small(step, access.tensor.name))]
    return EpilogueSpec((lanes, len(dims), target, tuple(sources), encode(op.epilogue.expr)), tuple(args))


def lane_groups(op: Op, program: Program, frame: Frame, lanes: int = 8) -> int:
    """How many groups of lanes a row has: those that must be stored."""
    lane = frame[-1]
    assert lane is not None
    extent = program.tensors[op.y].padded[lane] if op.epilogue.shuffle == 1 else program.op_shape(op)[lane]
    return -(-extent // lanes)


def loads_by_row(op: Op, program: Program) -> list[RowLoad]:
    """What the epilogue reads elsewhere for each row, such as a residual: what it costs depends on them."""
    shape, frame = program.op_shape(op), frame_of(op, program)
    found = []
    for view, (_, mode, how) in zip(op.epilogue.loads, describe(op, program, frame).params[3], strict=True):
        if how != "none":
            access = _access(program, view, len(shape))
            step = next((access.strides[a] for a in reversed(frame[:-1]) if a is not None and shape[a] > 1), 0)
            found.append(RowLoad(access.tensor, access.offset, step if how == "linear" else None, mode == "vector"))
    return found


Dims = list[tuple[int, list[int]]]
"""Dimensions of the rows, outermost first: their extents, and the axes of the result that each is made of."""


def _merged(rows: list[int], shape: Shape, strides: list[tuple[int, ...]], apart: bool) -> Dims:
    """The fewest dimensions in which every access has one stride a dimension."""
    dims: Dims = []
    for axis in rows:
        if dims and not apart and all(s[dims[-1][1][-1]] == s[axis] * shape[axis] for s in strides):
            dims[-1] = (dims[-1][0] * shape[axis], [*dims[-1][1], axis])
        else:
            dims.append((shape[axis], [axis]))
    return dims


def _rows(dims: Dims, strides: tuple[int, ...], name: str) -> tuple[str, list[Arg]]:
    """How an access depends on the row, and its strides as arguments."""
    steps = [_small(strides[axes[-1]], name) for _, axes in dims]
    if not any(steps):
        return "none", []
    if all(steps[i] == steps[i + 1] * dims[i + 1][0] for i in range(len(dims) - 1)):
        return "linear", [I32(steps[-1])]
    return "general", [I32(s) for s in steps]


def _small(stride: int, name: str) -> int:
    if not -(2**31) <= stride < 2**31:
        raise UnsupportedError(f"tensor {name}: a stride of {stride} elements; kernels take strides below 2**31")
    return stride


def _aligned(tensor: Tensor, lanes: int, offset: int, strides: list[int]) -> bool:
    """Whether groups of lanes begin at multiples of their size (16 bytes at most); storage itself is aligned to 16."""
    width = min(16, lanes * tensor.dtype.size)
    return all(n * tensor.dtype.size % width == 0 for n in (tensor.offset, offset, *strides))


# --- The code --------------------------------------------------------------------------------------------------------


def build(params: tuple[Value, ...], rows: int = 1, space: str = "global") -> tuple[Any, tuple[Any, ...]]:
    """The device function `store` and the Numba types of what `e` holds, for `EpilogueSpec.params`.

    store(acc, m, c, e)               `lanes` float32 of acc: the results of channels c … c + lanes - 1 (c a multiple of lanes) of
                                      row m (int32 both)
    store(acc, m, step, end, c, e)    with `rows` > 1: those of rows m, m + step, … one after the other; rows at and beyond `end`
                                      are ignored, but m lies below it. All rows' loads are issued before the first store
    e                                 a tuple of the launch's `EpilogueSpec.args`
    space                             where it stores, of `memory.SPACES`
    """
    from numba import cuda

    text, kinds, accesses, *_ = source(params, rows)
    scope = {**names(), **memory_functions(accesses, space)}
    store = cuda.jit(device=True, inline="always")(execute(text, scope, "store"))
    return store, types_of(kinds)


def build_results(params: tuple[Value, ...], rows: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """As `build`, for a kernel that reads and stores by itself what differs by row, of some rows.

    results(acc, c, e)         rows · `lanes` float32 of acc, those of one row after those of another → as many that y is to hold,
                               rounded to nothing yet; zeros in y's padding, anything beyond it
    results(acc, added, c, e)  where a load differs by row: `added` has its values, as `acc`
    """
    from numba import cuda

    text, kinds, accesses, *_ = source(params, rows, stores=False)
    results = cuda.jit(device=True, inline="always")(execute(text, {**names(), **memory_functions(accesses)}, "results"))
    return results, types_of(kinds)


def build_kept(params: tuple[Value, ...], rows: int = 2) -> tuple[Any, Any, tuple[Any, ...]]:
    """As `build_results`, for a kernel that stays with its columns.

    kept(c, e)                what is read for channels c … c + lanes - 1 of every row
    results(acc, read, c, e)  `read`: what `kept` gave for the same c; with `added` before it, as there
    """
    from numba import cuda

    found = source(params, rows, stores=False, keeps=True)
    scope = {**names(), **memory_functions(found.accesses)}
    inline = cuda.jit(device=True, inline="always")
    kept, results = (inline(execute(text, scope, name)) for text, name in ((found.kept, "kept"), (found.text, "results")))
    return kept, results, types_of(found.kinds)


def build_ahead(params: tuple[Value, ...]) -> Any:
    """The device function ahead(c, e): what `store` reads for channels c … c + lanes - 1 of every row, such as a bias, is to come
    to the L2 cache meanwhile. It may be called before earlier grids have ended: L2 sees what they write."""
    from numba import cuda

    from tccompile.kernels.ptx.memory import prefetch

    text = execute(source(params).ahead, {**names(), "prefetch": prefetch}, "ahead")
    return cuda.jit(device=True, inline="always")(text)


Accesses = dict[str, tuple[str, DType, int, bool]]
"""The memory functions that generated text calls: name → ("load" or "store", dtype, elements, guarded)."""


def memory_functions(accesses: Accesses, space: str = "global") -> dict[str, Any]:
    """Those functions; the stores write to `space`. Imports Numba."""
    from tccompile.kernels.ptx import memory

    spaces = {"load": "global", "store": space}
    return {name: getattr(memory, kind)(dtype, n, guarded, spaces[kind]) for name, (kind, dtype, n, guarded) in accesses.items()}


class Source(NamedTuple):
    """The text of `store`, or else of `results`, the kinds of its arguments ("address" or "int"), the memory functions it calls,
    and the text of `ahead` and of `kept`."""

    text: str
    kinds: list[str]
    accesses: Accesses
    ahead: str
    kept: str


def source(params: Any, rows: int = 1, stores: bool = True, keeps: bool = False) -> Source:
    """What an epilogue's functions are made of: see `build`, `build_results`, `build_kept` and `build_ahead`."""
    lanes, rank, (y_type, y_mode, y_rows, mask, shuffle), sources, encoded = params
    expr, target = decode(encoded), DType(y_type)
    accesses: Accesses = {}
    arguments = Parameters("e[{}]")
    out = Lines()

    # The rows' numbers, and their coordinates, innermost last, if anything needs them. A row too many reads what row m reads.
    by_row = sum(how != "none" for _, _, how in sources)
    assert stores or by_row <= 1
    numbers = ["m"] + [out.let(f"i32(m + step * {r})") for r in range(1, rows) if stores]
    read_from = ["m"] + [out.let(f"select({n} < end, {n}, m)") for n in numbers[1:]] + ["m"] * (rows - len(numbers))
    inner = [arguments.divider() for _ in range(rank - 1)]
    apart = any(how == "general" for how in (y_rows, *(s[2] for s in sources)))
    digits = [split(out, n, inner) if apart else [] for n in read_from]

    def offsets(how: str, size: int) -> list[str]:
        """Bytes from the tensor's first element to each row's."""
        strides = [arguments.take() for _ in range({"none": 0, "linear": 1, "general": rank}[how])]
        each = [{"none": [], "linear": [n], "general": d}[how] for n, d in zip(read_from, digits, strict=True)]
        return ["".join(f" + i64({d}) * (i64({s}) * {size})" for d, s in zip(at, strides, strict=True)) for at in each]

    first = arguments.take("address")
    y = [f"{first}{row}" for row in offsets(y_rows, target.size)]
    y = [out.let(text) for text in y] if stores else y
    if shuffle:
        channels, padded, y_step = arguments.take(), arguments.take(), arguments.take()
        remaining, multiplier, shift = arguments.divider()
        block, y_p, y_q = arguments.divider(), arguments.take(), arguments.take()
        limit = channels
    else:
        channels, padded, y_step = arguments.take(), arguments.take(), arguments.take()
        limit = padded

    # Loads: values[r][k][i] is load k in lane i of row r. What does not depend on the row is read once.
    values: list[list[list[str]]] = [[] for _ in range(rows)]
    ahead, kept = ["def ahead(c, e):", f"    if c < {channels}:", "        pass"], Lines()
    reading, found = kept if keeps else out, []
    for k, (kind, mode, how) in enumerate(sources):
        dtype = DType(kind)
        first = arguments.take("address")
        bases = [f"{first}{row}" for row in offsets(how, dtype.size)]
        step = arguments.take()
        if how == "none":
            ahead.append(f"        prefetch({first} + i64(c) * (i64({step}) * {dtype.size}))")
        if not stores and how != "none":
            for r, loaded in enumerate(values):
                loaded.append([f"added[{r * lanes + i}]" for i in range(lanes)])
            continue
        n = lanes if mode == "vector" else 1
        name = f"load{k}"
        accesses[name] = ("load", dtype, n, mode == "guarded")
        for base, loaded in zip(bases, values, strict=True):
            if mode == "same":
                read = [reading.let(f"{name}({base})")] * lanes
            elif mode == "vector":
                group = reading.let(f"{name}({base} + i64(c) * {dtype.size})")
                read = [reading.let(f"{group}[{i}]") if lanes > 1 else group for i in range(lanes)]
            else:
                read = []
                for i in range(lanes):
                    at = f"c + {i}" if i else "c"
                    guard = f", {at} < {channels}" if mode == "guarded" else ""
                    read.append(reading.let(f"{name}({base} + i64({at}) * (i64({step}) * {dtype.size}){guard})"))
            read = [reading.loaded(r, dtype) for r in read]
            found += [r for r in read if r not in found]
            loaded.append([f"read[{found.index(r)}]" for r in read] if keeps else read)

    def leaf(r: int, i: int) -> Callable[[Expr], str]:
        return lambda e: f"acc[{r * lanes + i}]" if e.fn == "acc" else values[r][e.value][i]  # type: ignore[index]

    body = out.lines
    ready: list[str] = []
    size, zero = target.size, "f32(0)" if target.is_float else "i64(0)"
    for r in range(rows):
        results = [out.stored(out.value(expr, leaf(r, i)), expr.dtype, target) for i in range(lanes)]
        if mask:
            within = out.let(f"i32({channels} - c)")  # in 32 bits, as `c + i` would not be
            results = [out.let(f"select({within} > i32({i}), {v}, {zero})") for i, v in enumerate(results)]
        if not stores:
            ready += results
            continue
        puts = []
        if shuffle:
            accesses["put"] = ("store", target, lanes if y_mode == "vector" else 1, y_mode != "vector")
            for i in range(1 if y_mode == "vector" else lanes):
                # Channel (bp * block + bq) * remaining + k of the result goes to channel k of pixel (bp, bq) of the block.
                lane = f"i32(c + {i})"
                pixel = out.let(f"divide({lane}, {multiplier}, {shift})")
                channel = out.let(f"i32({lane} - {pixel} * {remaining})")
                bp = out.let(f"divide({pixel}, {block[1]}, {block[2]})")
                bq = out.let(f"i32({pixel} - {bp} * {block[0]})")
                at = out.let(f"{y[r]} + (i64({bp}) * i64({y_p}) + i64({bq}) * i64({y_q})) * {size}")
                if y_mode == "vector":
                    puts.append(f"put({at} + i64({channel}) * {size}, {', '.join(results)})")
                    continue
                puts.append(f"put({at} + i64({channel}) * (i64({y_step}) * {size}), {results[i]}, {lane} < {channels})")
                # Whoever writes the pixel's last channel writes its padding too.
                puts.append(f"last = select({lane} < {channels}, {channel}, i32(-1)) == {remaining} - 1")
                puts.append(f"for z in range({remaining}, select(last, {padded}, {remaining})):")
                puts.append(f"    put({at} + i64(z) * (i64({y_step}) * {size}), {zero}, 1)")
        elif y_mode == "vector":
            accesses["put"] = ("store", target, lanes, False)
            puts.append(f"put({y[r]} + i64(c) * {size}, {', '.join(results)})")
        else:
            accesses["put"] = ("store", target, 1, y_mode == "guarded")
            for i, v in enumerate(results):
                guard = f", c + {i} < {padded}" if y_mode == "guarded" else ""
                puts.append(f"put({y[r]} + i64(c + {i}) * (i64({y_step}) * {size}), {v}{guard})")
        body += [f"if {numbers[r]} < end:", *(f"    {line}" for line in puts)] if r else puts
    if not stores:  # what lies beyond y is computed from its first columns

        def function(head: str, body: list[str], values: list[str]) -> str:
            lines = [f"c = select(c < {padded}, c, i32(0))", *body, f"return {tuple_of(values)}"]
            return f"def {head}:\n" + "".join(f"    {line}\n" for line in lines)

        text = function(f"results(acc, {'added, ' * by_row}{'read, ' * keeps}c, e)", body, ready)
        return Source(text, arguments.kinds, accesses, "\n".join(ahead), function("kept(c, e)", kept.lines, found))
    parameters = "acc, m, step, end, c, e" if rows > 1 else "acc, m, c, e"
    text = f"def store({parameters}):\n    if c < {limit}:\n" + "".join(f"        {line}\n" for line in body)
    return Source(text, arguments.kinds, accesses, "\n".join(ahead), "")
