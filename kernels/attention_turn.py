"""What attention_sm90 does to v in E4M3 before it multiplies: turned, so that it lies along the rows that are summed over.

wgmma takes operands of 8 bits along K only, and the K of weights · v is v's rows. A launch of its own writes v turned to the
workspace: of each head 16 rows at a time, and of these for each element of a head 16 bytes. Eight such lines are one of the 8×16
matrices that wgmma reads, so tiles of any number of rows lie there as shared memory has them, and come as a run of bytes.

Behind the last element of a head lie ones, and zeros up to eight lines, where a product of that width exists: so the sum of a
row's weights is one more column of the result.

The 16 rows are in the order in which a thread's weights are the product's left operand: see `ptx.softmax.bytes_of`.
"""

from __future__ import annotations

from tccompile.ir.extent import ceil_div, round_up
from tccompile.ir.tensor import Tensor
from tccompile.kernels.codegen import definition, execute, tuple_of
from tccompile.kernels.ptx.atoms import group_atom
from tccompile.kernels.spec import I32, Arg, Function, Launch, Ptr, Scratch, code

LINE = 16
"""Rows of v that lie side by side, in bytes of E4M3."""

FOUR = 4
"""Elements of a head whose lines a thread writes: a word of each row."""

THREADS = 128

ONE = 0x38
"""Of E4M3, in the first of four bytes."""

ORDER = tuple(8 * (i // 2) + 2 * q + i % 2 for q in range(4) for i in range(4))
"""Which of 16 rows each byte of a line is of."""


def columns(e: int) -> int:
    """Of the product with v, whose heads have so many elements, a multiple of 8: with the sum of weights, or without."""
    return e + 8 if e + 8 <= group_atom("e4m3", "e4m3").n else e


def turned_bytes(v: Tensor, bn: int) -> int:
    """Bytes of the workspace that v takes, with heads of so many rows that tiles of `bn` divide them."""
    b, h, n, e = v.shape
    return int(b * h * round_up(n, bn) * columns(round_up(e, 8)))


def turning(kernel: str, v: Tensor, bn: int) -> Launch:
    """The launch that turns v; its code is `function`, which `kernel` builds."""
    b, h, n, e = v.shape
    lines, filled = round_up(n, bn) // LINE, round_up(e, 8) // FOUR
    fours = columns(filled * FOUR) // FOUR
    blocks = ceil_div(lines * fours, THREADS)
    integers = (blocks, h, n, lines, fours, filled, *v.strides[:3])
    args: tuple[Arg, ...] = (Ptr(v.name), Scratch(), *map(I32, integers))
    return Launch(code(kernel, turns=True), (blocks * b * h, 1, 1), THREADS, args)


INTEGERS = ("blocks", "heads", "rows", "lines", "fours", "filled", "v_b", "v_h", "v_r")
"""Blocks of a head, heads of a batch, rows of a head, lines and words of its rows as they are written, words that v has, and v's
strides."""


def function() -> Function:
    """The code of that launch: a thread reads a word of 16 rows and writes four lines."""
    from tccompile.kernels.loops import device
    from tccompile.kernels.ptx import hopper as hw
    from tccompile.kernels.ptx import memory, mma
    from tccompile.kernels.ptx.core import cuda, i32, inline, types, u32, u64

    i64, size, shared_address, store = types.int64, FOUR * LINE, mma.shared_address, memory.copy_from_shared
    room = THREADS * size + 16
    reads = [f"w{k} = read(at + u64({k} * step), i32({k} < left))" for k in range(LINE)]
    write = f"write(to, {', '.join(f'w{k} | more' for k in ORDER)})"
    turn = device(
        "turn", "at, step, left, more, to", [*reads, write], read=memory.load_bytes(FOUR), write=memory.store_turned, u64=u64,
    )  # fmt: skip

    @inline
    def body(v, y, integers):
        blocks, heads, rows, lines, fours, filled, v_b, v_h, v_r = integers
        hw.wait_for_earlier_grids()
        hw.let_later_grids_start()
        block = i32(cuda.blockIdx.x)
        head = mma.divide(block, blocks)
        item = i32(i32(block - head * blocks) * THREADS + cuda.threadIdx.x)
        line = mma.divide(item, fours)
        four = i32(item - line * fours)
        b = mma.divide(head, heads)
        n = i32(line * LINE)
        at = u64(v + u64(i64(b) * v_b + i64(i32(head - b * heads)) * v_h + i64(n) * v_r + four * FOUR))
        own = u32(u32(shared_address(cuda.shared.array(room, types.uint8)) + u32(15)) & u32(0xFFFFFFF0))
        left = i32(rows - n) if line < lines and four < filled else i32(0)
        more = u32(ONE) if four == filled else u32(0)
        turn(at, i64(v_r), left, more, u32(own + u32(cuda.threadIdx.x * size)))
        cuda.syncthreads()
        # A block's lines are neighbours, whichever thread has turned them.
        first = i32(i32(block - head * blocks) * THREADS)
        to = u64(y + u64((i64(head) * lines * fours + first) * size))
        left = i32(min(i32(lines * fours - first), THREADS) * (size // LINE))
        for k in range(size // LINE):
            chunk = i32(cuda.threadIdx.x + k * THREADS)
            if chunk < left:
                store(u64(to + u64(chunk * LINE)), u32(own + u32(chunk * LINE)))

    text = definition("kernel", ["v", "y", *INTEGERS], [f"body(v, y, {tuple_of(INTEGERS)})"])
    signature = types.void(u64, u64, *[i32] * len(INTEGERS))
    return Function(execute(text, {"body": body}, "kernel"), signature, THREADS)
