"""Hopper's instructions (sm_90a): mbarriers, the tensor copy engine (TMA), wgmma, clusters, dependent launches.

Names and semantics are those of the PTX ISA; addresses in shared memory are 32 bits, in global memory 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tccompile.ir.types import DType
from tccompile.kernels.ptx.atoms import BITS, Atom, group_atom
from tccompile.kernels.ptx.core import (
    cuda,
    f32,
    i32,
    inline,
    instruction,
    intrinsic,
    ir,
    packed,
    types,
    u16,
    u32,
    u64,
    unpacked,
    void,
)
from tccompile.kernels.ptx.memory import pack, pack_rounded
from tccompile.kernels.ptx.mma import SUMS

# --- Shared memory and integers ----------------------------------------------------------------------------------------


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit address of an array in shared memory."""

    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return builder.call(ir.InlineAsm(function, text, "=r,l"), [builder.ptrtoint(data, ir.IntType(64))])

    return u32(array), codegen


uniform = instruction("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", i32, i32)
"""The value of the warp's first lane, which the compiler then knows to be the same in all.

What is computed from it, and after a branch by it, stays in uniform registers: descriptors of wgmma need no move for each one.
"""

computed = instruction("mov.b32 $0, $1;", i32, i32)
"""The value, computed here and held: the compiler would rather compute it again in every branch that uses it."""

# --- Barriers ----------------------------------------------------------------------------------------------------------

barrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", void, u32, u32)
barrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", void, u32)
barrier_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", void, u32, u32)
"""Arrive, and expect that many bytes from the copy engine before the phase completes."""

barrier_wait = instruction(
    "{ .reg .pred p; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE_${:uid};"
    " bra WAIT_${:uid}; DONE_${:uid}: }",
    void,
    u32,
    u32,
)
"""Until the phase of that parity has completed; a fresh barrier's phase of parity 1 counts as completed."""

fence_barrier_init = instruction("fence.mbarrier_init.release.cluster;", void)
"""Makes initialised barriers visible to the copy engine and to the cluster."""


@cache
def sync_threads(name: int, threads: int) -> Any:
    """`bar.sync` on one of the 16 named barriers: of `threads` threads."""
    return instruction(f"bar.sync {name}, {threads};", void)


sync_named = instruction("bar.sync $0, 256;", void, i32)
arrive_named = instruction("bar.arrive $0, 256;", void, i32)
"""Two warpgroups meet at a named barrier: the one that arrives goes on."""


def meeting(threads: int) -> tuple[Any, Any]:
    """The same of so many threads in all."""
    return tuple(instruction(f"bar.{how} $0, {threads};", void, i32) for how in ("sync", "arrive"))  # type: ignore[return-value]


sync_group = instruction("bar.sync $0, 128;", void, i32)
"""A warpgroup meets at a named barrier."""

sync_warp = instruction("bar.warp.sync 0xffffffff;", void)

# --- Clusters ----------------------------------------------------------------------------------------------------------

cluster_arrive = instruction("barrier.cluster.arrive.release.aligned;", void)
cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;", void)
in_block = instruction("mapa.shared::cluster.u32 $0, $1, $2;", u32, u32, u32, pure=True)
"""The address, in block $2 of the cluster, of what is at $1 in this block's shared memory."""

barrier_arrive_in = instruction(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [t]; }", void, u32, i32
)
"""Arrive at the barrier that lies at $0 in block $1 of the cluster."""

cluster_arrive_at = instruction("barrier.cluster.arrive.release.aligned;", void, types.int64, i32)
cluster_wait_at = instruction("barrier.cluster.wait.acquire.aligned;", void, types.int64, i32, i32)
"""The same with the parameters of `exchange.arrive` and `exchange.await_all`, which they need not."""

load_cluster_f32 = instruction(
    "{ .reg .b32 t; mapa.shared::cluster.u32 t, $1, $2; ld.shared::cluster.f32 $0, [t]; }", f32, u32, u32
)
"""What lies at $1 in the shared memory of block $2 of the cluster."""

load_shared_f32x4 = instruction("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", (f32, f32, f32, f32), u32)


@cache
def load_cluster_x4(acc: str) -> Any:
    """The device function address → four sums of a type of `SUMS` in the shared memory of any block of the cluster."""
    return instruction(f"ld.shared::cluster.v4.{acc} {{$0, $1, $2, $3}}, [$4];", (SUMS[acc][0],) * 4, u32)


# --- The tensor copy engine --------------------------------------------------------------------------------------------

prefetch_map = instruction("prefetch.tensormap [$0];", void, u64)

copy_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5}], [$2];",
    void, u32, u64, u32, i32, i32, i32,
)  # fmt: skip
"""(shared address, map, barrier, coordinates of a box of three dimensions, innermost first); zeros outside the array."""

copy_box_to = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    " [$0], [$1, {$3, $4, $5}], [$2], $6;",
    void, u32, u64, u32, i32, i32, i32, u16,
)  # fmt: skip
"""The same to that place in each block of the cluster that a mask names, whose own barrier is told of it."""

copy_box4 = instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6}], [$2];",
    void, u32, u64, u32, i32, i32, i32, i32,
)  # fmt: skip
"""The same of a box of four dimensions."""

copy_box5 = instruction(
    "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6, $7}], [$2];",
    void, u32, u64, u32, i32, i32, i32, i32, i32,
)  # fmt: skip
"""The same of a box of five dimensions."""

copy_bytes = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $3, [$2];", void, u32, u64, u32, i32
)
"""(shared address, global address, barrier, bytes) of neighbours in memory; addresses and bytes are multiples of 16."""

copy_pixels = instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$3, $4, $5, $6}], [$2], {$7, $8};",
    void, u32, u64, u32, i32, i32, i32, i32, u16, u16,
)  # fmt: skip
"""(shared address, im2col map, barrier, c, w, h, n of the first pixel's window, offset in the window along w and h)"""


store_box = instruction(
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$2, $3, $4}], [$1]; cp.async.bulk.commit_group;",
    void, u64, u32, i32, i32, i32,
)  # fmt: skip
"""(map, shared address, coordinates of a box, innermost first): a group of its own; nothing outside the array is written."""

store_box4 = instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$2, $3, $4, $5}], [$1]; cp.async.bulk.commit_group;",
    void, u64, u32, i32, i32, i32, i32,
)  # fmt: skip
"""The same of a box of four dimensions."""

fence_copies = instruction("fence.proxy.async.shared::cta;", void)
"""What this thread wrote to shared memory before is what the copy engine reads afterwards."""


@cache
def boxes_read(pending: int) -> Any:
    """Until the copy engine has read the shared memory of all but this thread's last `pending` boxes to store."""
    return instruction(f"cp.async.bulk.wait_group.read {pending};", void)


@cache
def set_registers(count: int, more: bool) -> Any:
    """Give registers back, or take as many as other warpgroups of the block gave back; executed by a whole warpgroup."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", void)


# --- Dependent launches: no effect unless the launch asks for programmatic stream serialisation --------------------------

wait_for_earlier_grids = instruction("griddepcontrol.wait;", void)
let_later_grids_start = instruction("griddepcontrol.launch_dependents;", void)

# --- wgmma -------------------------------------------------------------------------------------------------------------


@cache
def wgmma_wait(pending: int) -> Any:
    """Until all but the `pending` groups committed last are done."""
    return instruction(f"wgmma.wait_group.sync.aligned {pending};", void)


wgmma_wait_all, wgmma_wait_last = wgmma_wait(0), wgmma_wait(1)


def descriptor(swizzle: int, leading: int, stride: int) -> int:
    """The constant part of a shared-memory matrix descriptor; the address, over 16, is added to it.

    swizzle  bytes: 128, 64, 32, or 0 for none
    leading  K-major: bytes between core matrices (8 rows of 16 bytes) that are neighbours along K, only without swizzle;
             else bytes between blocks of 64 rows, with a swizzle of 128
    stride   K-major: bytes between groups of 8 rows; else bytes between groups of 8 of K
    """
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return mode << 62 | (stride >> 4) << 32 | ((leading >> 4) or 1) << 16


@inline
def base():
    """The block's shared memory, from the first multiple of 1 KiB on: where swizzled boxes may lie."""
    return i32((shared_address(cuda.shared.array(0, types.uint8)) + u32(1023)) & u32(0xFFFFFC00))


@inline
def operand(half, address):
    """The descriptor of the matrix at an address, from its constant part."""
    return half | (u64(address & i32(0x3FFFF)) >> u64(4))


@cache
def accumulators(n: int, acc: str = "f32") -> Any:
    """A device function without parameters: a warpgroup's 64×n tile of undefined sums of a type of `SUMS`, n / 2 of them a
    thread."""
    each, number, _ = SUMS[acc]
    kind = types.Tuple((each,) * (n // 2))

    @intrinsic
    def undefined(typingctx):
        def codegen(context, builder, sig, args):
            return ir.Constant(ir.ArrayType(number, n // 2), ir.Undefined)

        return kind(), codegen

    return undefined


def _products(
    atom: Atom,
    n: int,
    steps: tuple[tuple[int, int], ...],
    k_major: tuple[bool, bool],
    kinds: tuple[str, str],
    waits: bool,
    words: int,
) -> list[str]:
    """The text of what `multiply` does: operands are the sums, the two descriptors, whether to add, and words of places."""
    count = n // 2
    assert not (words and waits), "places are kept until `wgmma_wait_kept`"
    operands = "{" + ", ".join(f"${i}" for i in range(count)) + "}", f"${count}", f"${count + 1}"
    lines = _wgmmas(atom, n, steps, k_major, kinds, operands, f"${count + 2}", words)
    return [*lines, *["wgmma.wait_group.sync.aligned 0;"] * waits]


def _wgmmas(
    atom: Atom,
    n: int,
    steps: tuple[tuple[int, int], ...],
    k_major: tuple[bool, bool],
    kinds: tuple[str, str],
    operands: tuple[str, str, str],
    more: str,
    words: int = 0,
) -> list[str]:
    """The text of a committed group: `operands` are the sums and the two descriptors, `more` whether to add to the sums, and
    words of places are the operands of the text behind it."""
    registers, left, right = operands
    scales = ", 1, 1" if atom.acc == "f32" else ""  # by which both operands are multiplied, unless they are integers
    transposed = "" if atom.along_k else "".join(", 0" if k else ", 1" for k in k_major)
    assert all(k_major) or not atom.along_k, f"{atom.name} takes operands along K"
    lines = [".reg .pred p;", ".reg .b64 a, b;", f"setp.ne.u32 p, {more}, 0;", "wgmma.fence.sync.aligned;"]
    for i, (at_a, at_b) in enumerate(steps):
        lines += ["setp.eq.u32 p, 0, 0;"] if i == 1 else []
        lines += [f"add.s64 a, {left}, {at_a >> 4};", f"add.s64 b, {right}, {at_b >> 4};"]
        word, turn = divmod(i * words, len(steps))  # a word for each, or one for two: half of the threads' is read by each
        places = f", ${n // 2 + 3 + word}, {turn and 1}" if words else ""
        lines.append(f"{atom.text(n, *kinds)} {registers}, a, b{places}, p{scales}{transposed};")
    return [*lines, "wgmma.commit_group.sync.aligned;"]


@cache
def multiply(
    n: int,
    steps: tuple[tuple[int, int], ...],
    k_major: tuple[bool, bool],
    kinds: tuple[str, str] = ("f16", "f16"),
    waits: bool = False,
    words: int = 0,
) -> Any:
    """acc = multiply(acc, a, b, more): a committed group of wgmmas of n columns, A·Bᵀ of what lies in shared memory.

    steps    for each wgmma, the bytes from the start of A's and of B's tile to its 32 bytes of K
    k_major  of A and of B: whether K is innermost in shared memory, else the rows are
    kinds    types of their elements: sums of integers are int32, others fp32
    waits    whether the products are there when it returns
    words    if not 0, A is sparse, and `multiply(acc, a, b, more, places)` takes a tuple of so many words with the places of its
             elements (see `operands.Places`); a wgmma then takes 64 bytes of B's K. They must be kept until the products are
             there: see `wgmma_wait_kept`
    a, b     descriptors of the tiles' starts
    more     whether to add to `acc`; if 0, its values do not matter
    """
    atom, count = group_atom(*kinds, sparse=words > 0), n // 2
    each, number, register = SUMS[atom.acc]
    kind = types.Tuple((each,) * count)
    text = "{ " + " ".join(_products(atom, n, steps, k_major, kinds, waits, words)) + " }"
    tied = map(str, range(count))
    constraints = ",".join([*[f"={register}"] * count, "l", "l", "r", *["r"] * words, *tied, "~{memory}"])

    def codegen(context, builder, sig, args):
        acc, *given = args[:4]
        values = [builder.extract_value(acc, i) for i in range(count)]
        given += [part for pack in args[4:] for part in unpacked(builder, pack, words)]
        function = ir.FunctionType(ir.LiteralStructType([number] * count), [v.type for v in (*given, *values)])
        done = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), [*given, *values])
        out = ir.Constant(ir.ArrayType(number, count), ir.Undefined)
        for i in range(count):
            out = builder.insert_value(out, builder.extract_value(done, i), i)
        return out

    if words:

        @intrinsic
        def multiplied_sparse(typingctx, acc, a, b, more, places):
            return kind(kind, u64, u64, i32, types.UniTuple(u32, words)), codegen

        return multiplied_sparse

    @intrinsic
    def multiplied(typingctx, acc, a, b, more):
        return kind(kind, u64, u64, i32), codegen

    return multiplied


@cache
def multiply_added(
    n: int, parts: tuple[tuple[tuple[int, int], ...], ...], kinds: tuple[str, str], places: tuple[int, ...]
) -> Any:
    """acc = multiply_added(acc, lefts, b): products whose sums are rough, made by themselves and added to `acc` when it returns.
    The compiler would add later by itself, and keep what several of these have made.

    acc     a tuple of sums for each block of 64 rows of A
    parts   steps, as `multiply` has them, for each of so many `lefts`, from which A's offsets count
    places  bytes from A's start to each block; the rest as `multiply` has it
    """
    atom, each, blocks, lefts = group_atom(*kinds), n // 2, len(places), len(parts)
    count = blocks * each
    lines, adds = [f".reg .f32 {', '.join(f's{i}' for i in range(count))};", ".reg .b64 at;"], []
    for number, place in enumerate(places):
        names = [f"s{number * each + i}" for i in range(each)]
        for left, steps in enumerate(parts):
            lines.append(f"add.s64 at, ${count + left}, {place >> 4};")
            operands = f"{{{', '.join(names)}}}", "at", f"${count + lefts}"
            made = _wgmmas(atom, n, steps, (True, True), kinds, operands, "1" if left else "0")
            lines += [line for line in made if not line.startswith(".reg")] if number or left else made
        adds.append(f"wgmma.wait_group.sync.aligned {lefts * (blocks - 1 - number)};")
        adds += [f"add.f32 ${name[1:]}, ${name[1:]}, {name};" for name in names]
    text = f"{{ {' '.join([*lines, *adds])} }}"
    constraints = ",".join([*["=f"] * count, *["l"] * (lefts + 1), *map(str, range(count)), "~{memory}"])
    kind = types.Tuple((types.Tuple((f32,) * each),) * blocks)

    @intrinsic
    def multiplied(typingctx, acc, of_lefts, b):
        def codegen(context, builder, sig, args):
            sums = [value for block in unpacked(builder, args[0], blocks) for value in unpacked(builder, block, each)]
            given = [*unpacked(builder, args[1], lefts), args[2]]
            function = ir.FunctionType(ir.LiteralStructType([ir.FloatType()] * count), [v.type for v in (*given, *sums)])
            done = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), [*given, *sums])
            values = unpacked(builder, done, count)
            return packed(builder, [packed(builder, values[i : i + each]) for i in range(0, count, each)])

        return kind(kind, types.UniTuple(u64, lefts), u64), codegen

    return multiplied


def _kept(words: Sequence[str], number: str) -> list[str]:
    """What uses words without any effect, where a number is not negative. wgmma reads registers until it is done, which the
    assembler does not know: it would give them to other values that are computed while wgmma runs, but for a use after the wait.
    """
    stores = [f"@kept st.shared.b32 [nowhere], {word};" for word in words]
    return [".reg .pred kept;", ".reg .b32 nowhere;", "mov.b32 nowhere, 0;", f"setp.lt.s32 kept, {number}, 0;", *stores]


@cache
def wgmma_wait_kept(pending: int, words: int) -> Any:
    """The device function (places, number), as `wgmma_wait`: a tuple of places, of so many words, is kept until then; the number
    is not negative."""
    lines = [f"wgmma.wait_group.sync.aligned {pending};", *_kept([f"${i}" for i in range(words)], f"${words}")]
    wait = instruction(f"{{ {' '.join(lines)} }}", void, *[u32] * words, i32)

    @inline
    def wait_one(places, number):
        wait(places[0], number)

    @inline
    def wait_two(places, number):
        wait(places[0], places[1], number)

    return wait_one if words == 1 else wait_two


@cache
def wgmma_wait_kept_twice(pending: int, words: int) -> Any:
    """The same with the places of two products."""
    lines = [f"wgmma.wait_group.sync.aligned {pending};", *_kept([f"${i}" for i in range(2 * words)], f"${2 * words}")]
    wait = instruction(f"{{ {' '.join(lines)} }}", void, *[u32] * (2 * words), i32)

    @inline
    def wait_one(places, number):
        wait(places[0][0], places[1][0], number)

    @inline
    def wait_two(places, number):
        wait(places[0][0], places[0][1], places[1][0], places[1][1], number)

    return wait_one if words == 1 else wait_two


@cache
def load_places(words: int) -> Any:
    """The device function address → a tuple of so many words, 1 or 2, that lie there in shared memory."""
    if words == 1:
        load = instruction("ld.shared.b32 $0, [$1];", u32, u32)

        @inline
        def load_one(address):
            return (load(address),)

        return load_one
    return instruction("ld.shared.v2.b32 {$0, $1}, [$2];", (u32, u32), u32)


@cache
def add(n: int) -> Any:
    """The device function (acc, part): the sums of two of a warpgroup's 64×n tiles, in fp32."""
    kind = types.Tuple((f32,) * (n // 2))

    @intrinsic
    def added(typingctx, acc, part):
        def codegen(context, builder, sig, args):
            pairs = zip(*(unpacked(builder, a, n // 2) for a in args), strict=True)
            return packed(builder, [builder.fadd(a, b) for a, b in pairs])

        return kind(kind, kind), codegen

    return added


@cache
def add_made(n: int, pending: int) -> Any:
    """The device function (acc, part): the same of a part that wgmma makes, when all but the `pending` groups that were committed
    last are done. It waits for them by itself, as the compiler would add before."""
    kind, count = types.Tuple((f32,) * (n // 2)), n // 2
    lines = [f"wgmma.wait_group.sync.aligned {pending};", *(f"add.f32 ${i}, ${i}, ${count + i};" for i in range(count))]
    constraints = ",".join([*["=f"] * count, *["f"] * count, *map(str, range(count)), "~{memory}"])

    @intrinsic
    def added(typingctx, acc, part):
        def codegen(context, builder, sig, args):
            sums, own = (unpacked(builder, a, count) for a in args)
            function = ir.FunctionType(ir.LiteralStructType([ir.FloatType()] * count), [v.type for v in (*own, *sums)])
            done = builder.call(ir.InlineAsm(function, " ".join(lines), constraints, side_effect=True), [*own, *sums])
            return packed(builder, unpacked(builder, done, count))

        return kind(kind, kind), codegen

    return added


@cache
def part(n: int, columns: int, acc: str = "f32") -> Any:
    """part(acc, number): what a thread holds of the `columns` from `number * columns` on of its warpgroup's 64×n tile, whose sums
    are of a type of `SUMS`.

    columns / 2 values: for each 8 columns, two neighbouring ones of row lane / 4, then the same of the row 8 below.
    """
    count = columns // 2
    each, sum_type, _ = SUMS[acc]
    whole, kind = types.Tuple((each,) * (n // 2)), types.Tuple((each,) * count)

    @intrinsic
    def taken(typingctx, acc, number):
        def codegen(context, builder, sig, args):
            acc, number = args
            values = [builder.extract_value(acc, i) for i in range(n // 2)]
            done = builder.append_basic_block("taken")
            blocks = [builder.append_basic_block(f"part{i}") for i in range(n // columns)]
            cases = builder.switch(number, blocks[0])
            for i, block in enumerate(blocks):
                if i:
                    cases.add_case(ir.Constant(ir.IntType(32), i), block)
                builder.position_at_end(block)
                builder.branch(done)
            builder.position_at_end(done)
            out = ir.Constant(ir.ArrayType(sum_type, count), ir.Undefined)
            phis = [builder.phi(sum_type) for _ in range(count)]
            for k, phi in enumerate(phis):
                for i, block in enumerate(blocks):
                    phi.add_incoming(values[i * count + k], block)
                out = builder.insert_value(out, phi, k)
            return out

        return kind(whole, i32), codegen

    return taken


@cache
def store_matrices(count: int = 4, turned: bool = False, kind: str = "f16") -> Any:
    """The device function (address, two float32 a matrix): `count` matrices of 8×8 numbers as `kind`, f16 or bf16, to shared
    memory. A lane gives two neighbours in row lane / 4 of each, or where they are turned in column lane / 4, and the address of
    row lane mod 8 of matrix lane / 8."""
    words = "abcd"[:count]
    rounded = " ".join(f"cvt.rn.{kind}x2.f32 {word}, ${2 * i + 2}, ${2 * i + 1};" for i, word in enumerate(words))
    stored = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if turned else ''}.shared.b16 [$0], {{{', '.join(words)}}};"
    return instruction(f"{{ .reg .b32 {', '.join(words)}; {rounded} {stored} }}", void, u32, *(f32,) * (2 * count))


@cache
def store_byte_matrices(dtype: DType, count: int, rectifies: bool) -> Any:
    """The device function (address, four float32 a matrix): `count` matrices of 8×8 pairs of bytes to shared memory, turned. Of
    the pair at each of two neighbouring places in column lane / 4 a lane gives the first bytes, then the second ones. All are
    rounded and saturated; `rectifies`: as `memory.store` has it. Addresses are those of `store_matrices`."""
    words = "abcd"[:count]

    def text() -> str:
        body = list[str]()
        for i, word in enumerate(words):
            pairs = [f"${4 * i + k + 1}" for k in (0, 2, 1, 3)]
            body += pack(dtype, word, pairs, rectifies) if dtype.is_float else pack_rounded(dtype, word, pairs)
        stored = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{', '.join(words)}}};"
        return f"{{ .reg .b32 {', '.join(words)}; {' '.join(body)} {stored} }}"

    return instruction(text, void, u32, *(f32,) * (4 * count))


@cache
def read_turned_matrices(count: int) -> Any:
    """The device function address → the lane's words of `count` matrices as `store_byte_matrices` wrote them."""
    words = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{words}}}, [${count}];"
    return instruction(text, (u32,) * count, u32)


@cache
def read_matrices(n: int) -> Any:
    """The device function address → the lane's words of n = 2 or 4 such matrices."""
    words = ", ".join(f"${i}" for i in range(n))
    return instruction(f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16 {{{words}}}, [${n}];", (u32,) * n, u32)


WIDENED = {
    "f16": "mov.b32 {{l, h}}, {word}; cvt.f32.f16 ${low}, l; cvt.f32.f16 ${high}, h;",
    "bf16": "mov.b32 {{l, h}}, {word}; mov.b32 ${low}, {{z, l}}; mov.b32 ${high}, {{z, h}};",
}
"""A word's two numbers of 16 bits as float32."""


@cache
def load_matrices(count: int = 4, turned: bool = False, kind: str = "f16") -> Any:
    """The device function address → what `store_matrices` wrote there, as float32."""
    words = "abcd"[:count]
    loaded = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if turned else ''}.shared.b16 {{{', '.join(words)}}}, [${2 * count}];"
    widened = " ".join(WIDENED[kind].format(word=word, low=2 * i, high=2 * i + 1) for i, word in enumerate(words))
    zero = ("", "") if kind == "f16" else (", z", "mov.b16 z, 0; ")
    declared = f".reg .b32 {', '.join(words)}; .reg .b16 l, h{zero[0]}; {zero[1]}"
    return instruction(f"{{ {declared}{loaded} {widened} }}", (f32,) * (2 * count), u32)


@cache
def stage(n: int, columns: int, pitch: int, sums: str = "f32") -> Any:
    """stage(acc, address, chunk): write columns `chunk * columns` and up of a 64×n tile, of a type of `SUMS`, to shared memory.

    address  of this thread's first element: in row r of its warp's 16 rows, q mod 2 · 8 bytes on, and with q > 1 behind the row's
             first fours
    pitch    bytes from row to row

    Thread (row r = lane / 4, q = lane mod 4) holds columns 8j + 2q and 8j + 2q + 1 of rows r and r + 8. The first four of every
    8 columns of a row lie side by side, and behind them the last four, so that a thread reads 8 columns as two 16-byte accesses
    without bank conflicts.
    """
    each, number, register = SUMS[sums]
    kind = types.Tuple((each,) * (n // 2))
    constraints = f"r,{register},{register},~{{memory}}"

    @intrinsic
    def staged(typingctx, acc, address, chunk):
        def codegen(context, builder, sig, args):
            acc, address, chunk = args
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(32), number, number])

            def write(at, first):
                text = f"st.shared.v2.{sums} [$0+{at}], {{$1, $2}};"
                store = ir.InlineAsm(function, text, constraints, side_effect=True)
                builder.call(store, [address, builder.extract_value(acc, first), builder.extract_value(acc, first + 1)])

            done = builder.append_basic_block("staged")
            cases = builder.switch(chunk, done)
            for c in range(n // columns):
                block = builder.append_basic_block(f"chunk{c}")
                cases.add_case(ir.Constant(ir.IntType(32), c), block)
                builder.position_at_end(block)
                for j in range(columns // 8):
                    group = 4 * (c * columns // 8 + j)
                    write(16 * j, group)
                    write(16 * j + 8 * pitch, group + 2)
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return void(kind, u32, i32), codegen

    return staged


@cache
def stage_turned(n: int, pitch: int, below: int = 16, sums: str = "f32") -> Any:
    """stage(acc, address, chunk): write a 64×n tile, of a type of `SUMS`, to shared memory turned over: a column is a row of the
    pitch there.

    address  of this thread's first element: row r of its warp's 16 in two halves of fours as in `stage`, column 2q
    chunk    0: all columns are written
    below    bytes from a row to the one 8 below: 16, as the next four of the first half, or 32 where rows lie one after the other
    """
    each, number, register = SUMS[sums]
    kind = types.Tuple((each,) * (n // 2))

    @intrinsic
    def staged(typingctx, acc, address, chunk):
        def codegen(context, builder, sig, args):
            acc, address, _ = args
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(32), number])
            for i in range(n // 2):
                at = (i // 4 * 8 + i % 2) * pitch + i % 4 // 2 * below
                text = f"st.shared.{sums} [$0+{at}], $1;"
                store = ir.InlineAsm(function, text, f"r,{register},~{{memory}}", side_effect=True)
                builder.call(store, [address, builder.extract_value(acc, i)])
            return context.get_dummy_value()

        return void(kind, u32, i32), codegen

    return staged


# --- Attention ---------------------------------------------------------------------------------------------------------


ONE = ".reg .pred one; setp.eq.u32 one, 0, 0; "


def weights_words(scores: int, kind: str) -> int:
    """Words that a thread has of the weights of so many columns, of a type of `BITS`."""
    return scores // 2 * BITS[kind] // 32


def _attend(scores: int, values: int, steps: tuple[tuple[int, int], ...], first: int, turn: bool, kind: str) -> list[str]:
    """Two committed groups of wgmmas: scores = q · kᵀ, and values += weights · v; then a wait for the first one.

    Operands from `first` on: the weights' words, descriptors of q, k and v, and with `turn` the barrier to arrive at.
    """
    words, atom = weights_words(scores, kind), group_atom(kind, kind)
    q, k, v = (f"${first + words + i}" for i in range(3))
    s = "{" + ", ".join(f"${i}" for i in range(scores // 2)) + "}"
    o = "{" + ", ".join(f"${scores // 2 + i}" for i in range(values // 2)) + "}"
    lines = ["wgmma.fence.sync.aligned;"]
    for i, (at_q, at_k) in enumerate(steps):
        lines += [f"add.s64 a, {q}, {at_q >> 4};", f"add.s64 b, {k}, {at_k >> 4};"]
        lines.append(f"{atom.text(scores)} {s}, a, b, {'one' if i else 'zero'}, 1, 1{'' if atom.along_k else ', 0, 0'};")
    lines.append("wgmma.commit_group.sync.aligned;")
    lines += _weigh(o, values, words, first, v, kind)
    if turn:
        lines.append(f"bar.arrive ${first + words + 3}, 256;")
    return [*lines, "wgmma.wait_group.sync.aligned 1;"]


def _weigh(o: str, values: int, words: int, first: int, v: str, kind: str) -> list[str]:
    """A committed group: o += weights · v. Rows of v lie across K, 128 bytes each, or where an instruction takes operands along K
    only, 16 of them turned, as `values` rows of 16 bytes."""
    lines, atom = [], group_atom(kind, kind)
    step_bytes = atom.k * values if atom.along_k else atom.k * 128
    for step in range(words // 4):
        left = ", ".join(f"${first + 4 * step + i}" for i in range(4))
        lines.append(f"add.s64 b, {v}, {step_bytes * step >> 4};")
        lines.append(f"{atom.text(values)} {o}, {{{left}}}, b, one, 1, 1{'' if atom.along_k else ', 1'};")
    return [*lines, "wgmma.commit_group.sync.aligned;"]


@cache
def attend(scores: int, values: int, steps: tuple[tuple[int, int], ...], turn: bool, kind: str = "f16") -> Any:
    """s, acc = attend(acc, weights, q, k, v[, barrier]): s = q · kᵀ (64×scores), while acc += weights · v (64×values) goes on.

    acc and the weights must be left alone until `settle`. `steps` are those of `multiply`; q, k and v descriptors, of elements of
    type `kind`. With `turn` it arrives at a named barrier of 256 threads as soon as all is asked for.
    """
    words = weights_words(scores, kind)
    s, o, w = (types.UniTuple(t, n) for t, n in ((f32, scores // 2), (f32, values // 2), (u32, words)))
    outs = scores // 2 + values // 2
    body = _attend(scores, values, steps, outs, turn, kind)
    text = "{ .reg .b64 a, b; .reg .pred zero; setp.ne.u32 zero, 0, 0; " + ONE + " ".join(body) + " }"
    more = ["r"] if turn else []
    tied = [str(scores // 2 + i) for i in range(values // 2)]
    constraints = ",".join([*["=f"] * outs, *["r"] * words, "l", "l", "l", *more, *tied, "~{memory}"])

    def codegen(context, builder, sig, args):
        acc, weights, *rest = args
        given = unpacked(builder, weights, words) + rest
        given += unpacked(builder, acc, values // 2)
        function = ir.FunctionType(ir.LiteralStructType([ir.FloatType()] * outs), [g.type for g in given])
        done = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), given)
        parts = unpacked(builder, done, outs)
        return context.make_tuple(
            builder, sig.return_type, [packed(builder, parts[: scores // 2]), packed(builder, parts[scores // 2 :])]
        )

    result = types.Tuple((s, o))
    if turn:

        @intrinsic
        def attended_in_turn(typingctx, acc, weights, q, k, v, barrier):
            return result(o, w, u64, u64, u64, i32), codegen

        return attended_in_turn

    @intrinsic
    def attended(typingctx, acc, weights, q, k, v):
        return result(o, w, u64, u64, u64), codegen

    return attended


@cache
def weigh(scores: int, values: int, kind: str = "f16") -> Any:
    """acc = weigh(acc, weights, v): acc plus weights · v, when it is there."""
    words = weights_words(scores, kind)
    o, w = types.UniTuple(f32, values // 2), types.UniTuple(u32, words)
    registers = "{" + ", ".join(f"${i}" for i in range(values // 2)) + "}"
    first = values // 2
    lines = ["wgmma.fence.sync.aligned;", *_weigh(registers, values, words, first, f"${first + words}", kind)]
    text = "{ .reg .b64 b; " + ONE + " ".join(lines) + " wgmma.wait_group.sync.aligned 0; }"
    constraints = ",".join([*["=f"] * first, *["r"] * words, "l", *map(str, range(first)), "~{memory}"])

    @intrinsic
    def weighed(typingctx, acc, weights, v):
        def codegen(context, builder, sig, args):
            given = [*unpacked(builder, args[1], words), args[2]]
            given += unpacked(builder, args[0], first)
            function = ir.FunctionType(ir.LiteralStructType([ir.FloatType()] * first), [g.type for g in given])
            done = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), given)
            return packed(builder, unpacked(builder, done, first))

        return o(o, w, u64), codegen

    return weighed


@cache
def settle(values: int, weights: int, kind: str, holds: bool) -> Any:
    """acc, w = settle(acc, w, total): both as they were, once all products are done; w, so many float32 or words of E4M3 by the
    type of operands, is not used for anything before.

    holds  whether what w is computed by stays before the wait. ptxas moves a wait over arithmetic that does not need it, to where
           products have just begun, but not over a store, which here needs the total and is never done
    total  int32 that is computed of all of w, and never -1
    """
    each, number, register = (u32, ir.IntType(32), "r") if kind == "e4m3" else (f32, ir.FloatType(), "f")
    w, o = types.UniTuple(each, weights), types.UniTuple(f32, values // 2)
    count, tied = values // 2, values // 2 + weights
    outs = [*["=f"] * count, *[f"=&{register}" if kind == "e4m3" else f"={register}"] * weights]
    given = [str(i) if i < count or kind != "e4m3" else register for i in range(tied)]
    constraints, total = ",".join([*outs, *given, "r", "~{memory}"]), f"${2 * tied}"
    text = "wgmma.wait_group.sync.aligned 0;"
    if kind == "e4m3":
        text += "".join(f" mov.b32 ${count + i}, ${tied + count + i};" for i in range(weights))
    if holds:
        text = f"{{ .reg .pred p; setp.eq.s32 p, {total}, -1; @p st.shared.b32 [{total}], {total}; {text} }}"

    @intrinsic
    def settled(typingctx, acc, weights_, total):
        def codegen(context, builder, sig, args):
            given = unpacked(builder, args[0], values // 2)
            given += [*unpacked(builder, args[1], weights), args[2]]
            kinds = [*[ir.FloatType()] * (values // 2), *[number] * weights]
            function = ir.FunctionType(ir.LiteralStructType(kinds), [g.type for g in given])
            done = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), given)
            parts = unpacked(builder, done, len(kinds))
            return context.make_tuple(
                builder, sig.return_type, [packed(builder, parts[: values // 2]), packed(builder, parts[values // 2 :])]
            )

        return types.Tuple((o, w))(o, w, i32), codegen

    return settled


def _quads(words: int) -> list[tuple[int, int]]:
    """How many words lie side by side, and where the first of them does: 16 bytes of each of 128 threads at a time."""
    return [(min(4, words - i), 512 * i) for i in range(0, words, 4)]


@cache
def keep_sums(count: int) -> Any:
    """keep_sums(acc, address): write a warpgroup's sums to shared memory, two in a word as bf16, 16 bytes of each thread side by
    side; address: this thread's first ones."""
    kind = types.UniTuple(f32, count)

    @intrinsic
    def kept(typingctx, acc, address):
        def codegen(context, builder, sig, args):
            values, number = unpacked(builder, args[0], count), iter(range(0, count, 2))
            for words, at in _quads(count // 2):
                two = [values[i : i + 2] for i in (next(number) for _ in range(words))]
                given = [x for pair in two for x in pair]
                pack = " ".join(f"cvt.rn.bf16x2.f32 w{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(words))
                names = ", ".join(f"w{i}" for i in range(words))
                text = f"{{ .reg .b32 {names}; {pack} st.shared.v{words}.b32 [$0+{at}], {{{names}}}; }}"
                function = ir.FunctionType(ir.VoidType(), [ir.IntType(32), *[ir.FloatType()] * len(given)])
                constraints = ",".join(["r", *["f"] * len(given), "~{memory}"])
                builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), [args[1], *given])
            return context.get_dummy_value()

        return void(kind, u32), codegen

    return kept


@cache
def add_kept(count: int) -> Any:
    """add_kept(acc, address, a0, a1): acc plus what `keep_sums` wrote, each row's times a."""
    kind = types.UniTuple(f32, count)

    @intrinsic
    def added(typingctx, acc, address, a0, a1):
        def codegen(context, builder, sig, args):
            values, out = unpacked(builder, args[0], count), []
            for words, at in _quads(count // 2):
                names = ", ".join(f"w{i}" for i in range(words))
                unpack = " ".join(f"shl.b32 ${2 * i}, w{i}, 16; and.b32 ${2 * i + 1}, w{i}, 0xffff0000;" for i in range(words))
                text = f"{{ .reg .b32 {names}; ld.shared.v{words}.b32 {{{names}}}, [${2 * words}+{at}]; {unpack} }}"
                numbers = ir.LiteralStructType([ir.IntType(32)] * (2 * words))
                function = ir.FunctionType(numbers, [ir.IntType(32)])
                constraints = ",".join([*["=r"] * (2 * words), "r", "~{memory}"])
                read = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), [args[1]])
                for bits in unpacked(builder, read, 2 * words):
                    i = len(out)
                    out.append(builder.fma(builder.bitcast(bits, ir.FloatType()), args[2 + i // 2 % 2], values[i]))
            return packed(builder, out)

        return kind(kind, u32, f32, f32), codegen

    return added


bits_of = instruction("mov.b32 $0, $1;", i32, f32, pure=True)
"""Those of a float32."""
