"""What the functions that generated text calls mean, in Python: those of `codegen.names()`, and intrinsics by their names.

A thread waits for others where a meaning is a generator: it yields None at a barrier of the block; (`exchange`, values…) where a
warp's lanes exchange values, which `exchange` gets of all of them by lane, and goes on with what it gives for its own lane; and
(`WAIT`, condition, values…) until condition(values…) holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import numpy as np

from tccompile.ir.evaluate import NUMPY
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.types import DType
from tccompile.kernels.ptx.atoms import ATOMS, Atom
from tests.kernels.copy_engine import CopyEngine
from tests.kernels.memory import Memory, SharedMemory

WAIT = "wait"

UNSIGNED = {2: np.uint16, 4: np.uint32}
"""What elements of so many bytes are compared as."""

Exchange = Callable[[Mapping[int, tuple]], Mapping[int, Any]]


class Place(Protocol):
    """Where a thread runs: the launch's memory, and what the threads of the block whose turn it is share."""

    memory: Memory

    @property
    def shared(self) -> SharedMemory: ...

    @property
    def engine(self) -> CopyEngine: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def thread(self) -> int:
        """The number of the thread whose turn it is, in its block."""

    @property
    def notes(self) -> dict[str, Any]:
        """What one thread of the block leaves for the others, by names."""

    def shared_of(self, block: int) -> SharedMemory:
        """What a block of this cluster shares."""


class Cluster:
    """How many threads of a cluster's blocks have come to its barrier, and how often each has waited there."""

    def __init__(self, threads: int) -> None:
        self.threads, self.arrived = threads, 0
        self.waits: dict[tuple[int, int], int] = {}


# --- The names that every text may call ------------------------------------------------------------------------------


def i32(value: Any) -> int:
    value = int(value)
    assert -(2**31) <= value < 2**31, "more than 32 bits"
    return value


def _divide(n: int, multiplier: int, shift: int) -> int:
    assert 0 <= n < 2**31
    return n * (multiplier & 0xFFFFFFFF) >> shift


def _saturated(low: int, high: int) -> Any:
    return lambda x: 0 if math.isnan(x) else low if x <= low else high if x >= high else int(x)


def _within(x: Any, low: Any, high: Any) -> Any:
    return min(max(x, low), high) if x == x else low


def names() -> dict[str, Any]:
    """What `codegen.names()` holds, in Python."""
    builtins = {n: f for n, f in NUMPY.items() if n not in ("where", "logical_not")}
    return {
        **builtins,
        **{f"int_{n}": lambda *a, f=f: int(f(*(np.int64(x) for x in a))) for n, f in builtins.items()},
        "quick_div": lambda a, b: a / b, "over": lambda a, b: a / b, "quick_exp": np.exp,
        "as_half": lambda x: np.float32(np.float16(x)), "larger": np.fmax,
        "ratio": lambda a, b, inverse: a / b, "saturate": _within,
        "rounded_within": lambda *x: np.rint(_within(*x)), "whole_within": lambda *x: int(np.rint(_within(*x))),
        "bits_within": lambda *x: int(np.rint(_within(*x))) + 0x4B400000,
        "select": lambda c, a, b: a if c else b,
        "within": lambda i, low, high: int(low <= i < high),
        "to_int": _saturated(-(2**63), 2**63 - 1), "to_unsigned": _saturated(0, 2**64 - 1), "to_float": np.float32,
        "narrow_to_int": lambda x: i32(x), "narrow_to_float": lambda x: np.float32(i32(x)), "byte_to_float": np.float32,
        "divide": _divide, "f32": np.float32, "i32": i32, "i64": int, "u64": int, "boolean": bool,
        "inf": math.inf, "nan": math.nan,
    }  # fmt: skip


# --- Memory ----------------------------------------------------------------------------------------------------------


def _space(place: Place, space: str) -> Memory | SharedMemory:
    return place.shared if space == "shared" else place.memory


def load(place: Place, dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    kind = np.float32 if dtype.is_float else int

    def read(address: int, inside: int = 1) -> Any:
        if not inside:
            return kind(0) if n == 1 else (kind(0),) * n
        stored = _space(place, space).bytes(address, dtype.size * n).view(dtype.numpy)
        found = from_storage(stored, dtype)
        values = tuple(found if dtype.is_float else map(int, found))
        return values[0] if n == 1 else values

    return read if guarded else lambda address: read(address)


def load_floats(place: Place, dtype: DType, n: int = 1, guarded: bool = False, space: str = "global") -> Any:
    read = load(place, dtype, n, guarded, space)
    return lambda *where: np.float32(read(*where)) if n == 1 else tuple(map(np.float32, read(*where)))


def store(place: Place, dtype: DType, n: int = 1, guarded: bool = False, space: str = "global", rounds: bool = False) -> Any:
    kind = np.float32 if dtype.is_float else np.int64

    def write(address: int, *values: Any) -> None:
        if guarded:
            *values, inside = values
            if not inside:
                return
        assert len(values) == n
        stored = np.clip(np.rint(values), dtype.lowest, dtype.largest) if rounds else np.array(values, kind)
        _space(place, space).write(address, to_storage(stored, dtype))

    return write


def load_words(place: Place, n: int, space: str = "global", outside: int = 0) -> Any:
    def read(address: int, inside: int) -> tuple[int, ...]:
        return read_words(place, n, space)(address) if inside else (outside,) * n

    return read


def read_words(place: Place, n: int, space: str = "global") -> Any:
    return lambda address: tuple(_space(place, space).bytes(address, 4 * n).view(np.uint32).tolist())


def load_bytes(place: Place, n: int) -> Any:
    return lambda address, inside: int.from_bytes(place.memory.bytes(address, n).tobytes(), "little") if inside else 0


def larger_bytes(place: Place, dtype: DType) -> Any:
    kind = np.uint16 if dtype is DType.U8 else np.int16

    def larger(high: int, low: int, word: int) -> tuple[int, int]:
        turned = np.array([word], np.uint32).view(np.uint8)[[1, 0, 3, 2]].view(kind)
        pairs = [np.array([x], np.uint32).view(kind) for x in (high, low, word)]
        most = (np.maximum(pairs[0], pairs[2]), np.maximum(pairs[1], turned))
        return tuple(int(pair.view(np.uint32)[0]) for pair in most)  # type: ignore[return-value]

    return larger


def largest_bytes(place: Place, dtype: DType) -> Any:
    def values(high: int, low: int) -> tuple[np.float32, ...]:
        higher, lower = (np.array([x], np.uint32).view(dtype.numpy) for x in (high, low))
        return tuple(map(np.float32, (lower[1], higher[1], lower[3], higher[3])))

    return values


def load_sums(place: Place, compute: DType, n: int) -> Any:
    def read(address: int) -> Any:
        values = tuple(map(compute.numpy.type, place.shared.bytes(address, 4 * n).view(np.int32)))
        return values[0] if n == 1 else values

    return read


def store_words(place: Place, n: int) -> Any:
    def write(address: int, *words: int) -> None:
        assert len(words) == n
        place.shared.write(address, np.array(words, np.uint32))

    return write


def prefetch(place: Place) -> Any:
    """Only what exists is to be asked for."""

    def asked(address: int) -> None:
        place.memory.bytes(address, 1)

    return asked


def copy_async(place: Place, *how: Any) -> Any:
    """What is copied has landed at once."""

    def copy(slot: int, address: int, inside: int) -> None:
        place.shared.write(slot, np.array(place.memory.words(address) if inside else (0,) * 4, np.uint32))

    return copy


def shared_address(place: Place) -> Any:
    def address(array: np.ndarray) -> int:
        assert array.base is place.shared.content, "the address of an array that is not the memory which the launch asks for"
        return place.shared.first

    return address


def _floats(dtype: DType, words: tuple[int, ...]) -> tuple[np.float32, ...]:
    return tuple(from_storage(np.array(words, np.uint32).view(dtype.numpy), dtype))


def floats(place: Place, dtype: DType, n: int) -> Any:
    return lambda *words: _floats(dtype, words)


def integers(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers of words that a lane has of one row, in their order along K: the last axis's words become numbers."""
    digits = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    digits = digits[..., np.argsort([0, 2, 4, 6, 1, 3, 5, 7])] if bits == 4 else digits
    return digits.reshape(*words.shape[:-1], -1).astype(np.float32)


def packed_chunk(asked: Mapping[int, tuple], bits: int, per: int, scales: DType, zeros: bool, columns: int) -> dict[int, Any]:
    """A warp's products of 128 of K, block by block, as (row, K) by (K, column); K in the order (32, lane, number)."""
    sums, words, factors, stood, x = (np.array(part) for part in zip(*asked.values(), strict=True))
    lanes = words.astype(np.uint32).reshape(8, 4, bits // 4, 2, 4)  # g, t, K's half or all, r, word
    u = integers(lanes.transpose(3, 0, 2, 4, 1).reshape(2, 8, 4, bits // 4, 4).swapaxes(3, 4), bits)  # r, g, j, t, number
    factors = factors.astype(np.uint32).reshape(8, 4, 2, -1)[:, 0].view(scales.numpy)[..., :per].astype(np.float32)  # g, r, block
    zero = np.array((stood & 0xFF)[0, 0], np.float32)
    if zeros:
        zero = stood.astype(np.uint32).reshape(8, 4, 2, -1)[:, 0].view(np.uint8)[..., :per].astype(np.float32)
    of_x = x.astype(np.uint32).reshape(8, 4, columns, 4, 4).view(np.float16).astype(np.float32)  # g, t, b, j, number
    order = np.arange(128).reshape(4, 4, 8)  # of j, t, number: where it is along K
    if per == 8:
        order = np.arange(128).reshape(4, 2, 4, 4).swapaxes(1, 2).reshape(4, 4, 8)
    block = order * per // 128
    w = (u - (np.moveaxis(zero[..., block], 1, 0) if zeros else zero)) * np.moveaxis(factors[..., block], 1, 0)
    made = np.einsum("rgjtn,ctbjn->rgbc", w, of_x)  # c: the column, of 8
    made = made.reshape(2, 8, columns, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
    return dict(zip(asked, map(tuple, (sums + made).astype(np.float32)), strict=True))


def multiply_chunk(place: Place, atom: str, *how: Any) -> Any:
    return exchanged(lambda asked: packed_chunk(asked, *how))


def multiply_part(place: Place, bits: int, blocks: int, x: DType, few: int) -> Any:
    def added(sums: tuple, words: tuple, scales: tuple, zeros: tuple, of_x: tuple) -> tuple:
        u = integers(np.array(words, np.uint32).reshape(2, -1), bits).reshape(2, blocks, -1)
        factors, zero = (np.array(part, np.float32).reshape(2, blocks, 1) for part in (scales, zeros))
        w = ((u - (zero - np.float32(2**23))) * factors).reshape(2, 8)
        rows = from_storage(np.array(of_x, np.uint32).view(x.numpy), x).reshape(few, 8)
        return tuple(map(np.float32, np.array(sums) + (w @ rows.T).reshape(-1)))

    return added


def deviations(place: Place, dtype: DType, n: int) -> Any:
    def added(sums: tuple, origins: tuple, words: tuple) -> tuple:
        away = [v - o for v, o in zip(_floats(dtype, words), origins, strict=True)]
        return tuple(s + d for s, d in zip(sums, [*away, *(d * d for d in away)], strict=True))

    return added


def scaled(place: Place, dtype: DType, n: int) -> Any:
    def values(words: tuple, means: tuple, scales: tuple) -> tuple:
        return tuple((v - m) * s for v, m, s in zip(_floats(dtype, words), means, scales, strict=True))

    return values


# --- Arithmetic ------------------------------------------------------------------------------------------------------


def _dot(acc: Any, a: tuple, b: tuple) -> Any:
    for x, y in zip(a, b, strict=True):
        acc = np.float32(np.float64(x) * np.float64(y) + np.float64(acc))
    return acc


def multiply_add(place: Place, n: int) -> Any:
    return lambda acc, a, b: tuple(_dot(z, (x,), (y,)) for z, x, y in zip(acc, a, b, strict=True))


def take(place: Place, n: int) -> Any:
    return lambda words, a, b: tuple(w & a & b & 0xFFFFFFFF for w in words)


def halves(place: Place) -> Any:
    return lambda a, b: int(np.array([a, b], np.float16).view(np.uint32)[0])


def rounded(place: Place, dtype: DType) -> Any:
    limits = np.iinfo(dtype.numpy)
    return lambda *values: int(np.clip(np.rint(values), limits.min, limits.max).astype(dtype.numpy).view(np.uint32)[0])


def _permute(a: int, b: int, pick: int) -> int:
    given = (int(a) & 0xFFFFFFFF | (int(b) & 0xFFFFFFFF) << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(given[pick >> 4 * i & 7] for i in range(4)), "little")


def widen(place: Place, kind: str) -> Any:
    """The word's first two floats, and its others."""
    return lambda word: tuple(numbers(np.array([word], np.uint32), kind, np.float32).astype(np.float16).view(np.uint32).tolist())


def part(place: Place, n: int, columns: int, acc: str = "f32") -> Any:
    return lambda acc, number: acc[number * (columns // 2) : (number + 1) * (columns // 2)]


# --- Blocks that wait for each other ---------------------------------------------------------------------------------


def last_to_arrive(place: Place, in_order: bool) -> Any:
    def arrived(counter: int, parts: int) -> Generator[None, None, bool]:
        yield
        if place.thread == 0:
            last = place.memory.atomic_add(counter, 1) == parts - 1
            if last:
                place.memory.atomic_add(counter, -parts)
            place.notes["last"] = last
        yield
        return place.notes["last"]

    return arrived


def arrive(place: Place, ordered: bool) -> Any:
    def arrived(counters: int, tid: int) -> Generator[None]:
        yield
        if tid == 0:
            place.memory.atomic_add(counters, 1)

    return arrived


def await_all(place: Place, ordered: bool) -> Any:
    def awaited(counters: int, blocks: int, tid: int) -> Generator[tuple | None]:
        yield WAIT, lambda: place.memory.atomic_add(counters, 0) >= blocks
        yield  # nobody leaves, which clears the counters, before all threads of the block have seen them

    return awaited


def leave(place: Place) -> Any:
    def left(counters: int, blocks: int, tid: int) -> None:
        if tid == 0 and place.memory.atomic_add(counters + 4, 1) == blocks - 1:
            place.memory.atomic_add(counters, -blocks)
            place.memory.atomic_add(counters + 4, -blocks)

    return left


def grid_barrier(place: Place) -> Any:
    arrived, awaited, left = arrive(place, False), await_all(place, False), leave(place)

    def met(counters: int, blocks: int, tid: int) -> Generator[tuple | None]:
        yield from arrived(counters, tid)
        yield from awaited(counters, blocks, tid)
        left(counters, blocks, tid)

    return met


def wait_for_values(place: Place, dtype: DType, vectors: int, together: bool) -> Any:
    words = load_words(place, 4)
    missing = np.iinfo(UNSIGNED[dtype.size]).max

    def vectors_of(args: tuple[int, ...]) -> list[int]:
        return [word for k in range(0, 2 * vectors, 2) for word in words(args[k], args[k + 1])]

    def there(*args: int) -> bool:
        return not (np.array(vectors_of(args), np.uint32).view(UNSIGNED[dtype.size]) == missing).any()

    def waited(*args: int) -> Generator[tuple, None, list[int]]:
        yield WAIT, there, *args
        return vectors_of(args)

    return waited


def publish(place: Place, dtype: DType) -> Any:
    def write(address: int, value: Any) -> None:
        data = to_storage(np.array([value], np.float32), dtype)
        assert data.view(np.uint8).min() < 0xFF, "all ones says that a value is not there"
        place.memory.write(address, data)

    return write


def withhold(place: Place, dtype: DType) -> Any:
    return lambda address: place.memory.write(address, np.full(dtype.size, 0xFF, np.uint8))


def cluster_arrive(place: Place) -> Any:
    def arrived(*unused: int) -> None:
        place.cluster.arrived += 1

    return arrived


def cluster_wait(place: Place) -> Any:
    def waited(*unused: int) -> Generator[None]:
        cluster, me = place.cluster, (id(place.shared), place.thread)
        turn = cluster.waits[me] = cluster.waits.get(me, 0) + 1
        yield  # so that all threads of a block see the same number
        while cluster.arrived < turn * cluster.threads:
            yield

    return waited


def load_cluster(place: Place) -> Any:
    def read(address: int, block: int) -> np.float32:
        other = place.shared_of(block)
        return other.bytes(address - place.shared.first + other.first, 4).view(np.float32)[0]

    return read


# --- The tensor copy engine ------------------------------------------------------------------------------------------


def of_engine(name: str) -> Callable[..., Any]:
    """The meaning that is the engine's method of that name."""
    return lambda place, *how: lambda *args: getattr(place.engine, name)(*args)


def barrier_wait(place: Place) -> Any:
    def wait(at: int, parity: int) -> Generator[tuple]:
        yield WAIT, place.engine.completed, at, parity

    return wait


# --- Exchanges within a warp -----------------------------------------------------------------------------------------


def exchanged(exchange: Exchange) -> Any:
    """The function of a thread that takes part in an exchange."""

    def asked(*values: Any) -> Generator[tuple, Any, Any]:
        return (yield exchange, *values)

    return asked


def by(exchange: Exchange) -> Callable[..., Any]:
    """The meaning that is this exchange, whatever its parameters."""
    return lambda place, *how: exchanged(exchange)


def multiply_patch(place: Place, atom: Atom, mi: int, groups: int, blocks: int, kinds: tuple[str | None, str | None]) -> Any:
    how = kinds[0] or atom.a, atom.acc, kinds[1]
    return exchanged(lambda asked: products_of_patch(asked, mi, groups, blocks, how))


def multiply_fragment(place: Place, name: str) -> Any:
    atom = ATOMS[name]
    return exchanged(lambda asked: product(asked, atom.a, atom.acc))


def warp_multiply(place: Place, name: str, a: str | None = None, b: str | None = None) -> Any:
    atom = ATOMS[name]
    return exchanged(lambda asked: product(asked, a or atom.a, atom.acc, b or atom.b))


def warp_multiply_sparse(place: Place, name: str, of_a: str, of_b: str) -> Any:
    """An mma.sp of bytes: of every four of K a word of the left operand has two, `which` says which ones."""

    def multiplied(asked: Mapping[int, tuple]) -> dict[int, Any]:
        given = np.array([values for values in asked.values()], np.int64)
        words = (given[:, 4:12] & 0xFFFFFFFF).astype(np.uint32)
        left = words[:, :4, None].view(ELEMENTS[of_a]).reshape(8, 4, 2, 2, 2, 2)  # g, t, half of K, row, four, number
        right = words[:, 4:, None].view(ELEMENTS[of_b]).reshape(8, 4, 4, 4)  # g, t, 16 of K, number
        b = right.transpose(2, 1, 3, 0).reshape(64, 8).astype(np.int64)
        a = np.zeros((2, 8, 2, 4, 2, 4), np.int64)  # row, g, half of K, t, four, place
        for g in range(8):
            which = {int(v) & 0xFFFFFFFF for v in given[4 * g : 4 * g + 4, 12]}
            assert len(which) == 1 and which <= {0x44444444, 0xEEEEEEEE}, "places that are not the same"
            first = 0 if which == {0x44444444} else 2
            a[:, g, :, :, :, first : first + 2] = left[g].transpose(2, 1, 0, 3, 4)
        product, out = a.reshape(16, 64) @ b, {}
        for n, i in enumerate(asked):
            g, t = i % 32 // 4, i % 4
            out[i] = tuple(int(given[n, 2 * r + k] + product[g + 8 * r, 2 * t + k]) for r in range(2) for k in range(2))
        return out

    return exchanged(multiplied)


def read_matrices(place: Place, n: int) -> Any:
    return exchanged(lambda asked: place.engine.matrices(asked, n))


def put_matrices(place: Place, count: int, turned: bool) -> Any:
    assert (count, turned) == (2, True)
    return exchanged(lambda asked: place.engine.put_turned(asked))


def shuffled(asked: Mapping[int, tuple]) -> dict[int, Any]:
    return {i: asked[i ^ mask][0] for i, (_, mask) in asked.items()}


def balloted(asked: Mapping[int, tuple]) -> dict[int, Any]:
    word = sum(1 << i % 32 for i, (value,) in asked.items() if value)
    return dict.fromkeys(asked, word - (word >> 31 << 32))


ELEMENTS = {"f16": np.float16, "s8": np.int8, "u8": np.uint8}
"""What the types of operands that are multiplied are in NumPy."""


FLOATS_OF_8 = {"e4m3": DType.E4M3, "e5m2": DType.E5M2}


def numbers(words: np.ndarray, kind: str, number: type) -> np.ndarray:
    """The elements in words, the last axis's of one after the other."""
    if kind in FLOATS_OF_8:
        return from_storage(words.view(np.uint8), FLOATS_OF_8[kind])
    return words.view(ELEMENTS[kind]).astype(number)


def product(asked: Mapping[int, tuple], kind: str = "f16", acc: str = "f32", other: str | None = None) -> dict[int, Any]:
    """An mma.sync of a warp, 16 rows by 8 columns, over so many times 16 bytes of K as the words have.

    Each lane gives 4 accumulators, then its words of a and those of b. Lane (g, t) of 8 × 4 has of every 16 bytes of K the t-th
    word, of a's rows g and g + 8 and of b's column g, and accumulators of columns 2t and 2t + 1 of these rows (PTX ISA, "Matrix
    fragments for mma.m16n8k16", and for m16n8k8 and m16n8k32).
    """
    assert [i % 32 for i in asked] == list(range(32)), "lanes in another order"
    number = np.float32 if acc == "f32" else np.int64
    given = list(asked.values())
    words = (np.array([v[4:] for v in given], np.int64) & 0xFFFFFFFF).astype(np.uint32)
    blocks = words.shape[1] // 3
    of_a, of_b = (np.ascontiguousarray(part) for part in (words[:, : 2 * blocks], words[:, 2 * blocks :]))
    a = (
        numbers(of_a, kind, number).reshape(8, 4, blocks, 2, -1).transpose(3, 0, 2, 1, 4).reshape(16, -1)
    )  # by g, t, word, element
    b = numbers(of_b, other or kind, number).reshape(8, 4, blocks, -1).transpose(2, 1, 3, 0).reshape(-1, 8)
    c = np.array([v[:4] for v in given], number).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    sums = (c + a @ b).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    return dict(zip(asked, map(tuple, sums), strict=True))


def products_of_patch(
    asked: Mapping[int, tuple], mi: int, groups: int, blocks: int, how: tuple[str, str, str | None]
) -> dict[int, Any]:
    """`ptx.patch.multiply`, block by block of 16 pixels by 8 columns."""
    out = {i: list(acc) for i, (acc, _, _) in asked.items()}
    lanes = 2 * blocks
    for number in range(groups * blocks):
        group, block = divmod(number, blocks)
        for i in range(mi):
            first = (i * groups + group) * 2 * lanes + 2 * block
            at = [first, first + 1, first + lanes, first + lanes + 1]
            words = {
                lane: (*(out[lane][k] for k in at), *x[4 * i : 4 * i + 4], *w[2 * number : 2 * number + 2])
                for lane, (_, x, w) in asked.items()
            }
            for lane, values in product(words, *how).items():
                for k, value in zip(at, values, strict=True):
                    out[lane][k] = value
    return {lane: tuple(values) for lane, values in out.items()}


def sparse_product(asked: Mapping[int, tuple]) -> dict[int, Any]:
    """mma.sp of 2 or 4 times 8 of K: a word of the left operand has two of four neighbours, `which` says at which places."""
    taps = len(next(iter(asked.values()))[1])
    a, b = np.zeros((16, 8 * taps), np.float32), np.zeros((8 * taps, 8), np.float32)
    halves = [np.array(words, np.uint32).view(np.float16).astype(np.float32) for _, *pair, _ in asked.values() for words in pair]
    for n, (i, (*_, which)) in enumerate(asked.items()):
        g, t = i % 32 // 4, i % 4
        left, right = halves[2 * n], halves[2 * n + 1]
        near, far = which & 3, which >> 2 & 3
        assert near < far and which & 0xFFFFFFFF == 0x11111111 * (4 * far + near), "places that are not in order, or not the same"
        for word in range(taps):
            row, four = g + 8 * (word % 2), word // 2 * 16 + 4 * t
            a[row, four + near], a[row, four + far] = left[2 * word : 2 * word + 2]
            b[8 * word + 2 * t : 8 * word + 2 * t + 2, g] = right[2 * word : 2 * word + 2]
    product, out = a @ b, {}
    for i, (acc, *_) in asked.items():
        g, t = i % 32 // 4, i % 4
        out[i] = tuple(acc[2 * r + k] + product[g + 8 * r, 2 * t + k] for r in range(2) for k in range(2))
    return out


def diagonal_products(asked: Mapping[int, tuple]) -> dict[int, Any]:
    """`mma.multiply_diagonal`: for each of `tiles` words of a vector one product."""
    results: dict[int, list] = {i: list(acc) for i, (acc, *_) in asked.items()}
    tiles = len(asked[min(asked)][0]) // 4
    for t in range(tiles):
        at = [2 * t, 2 * t + 1, 2 * (tiles + t), 2 * (tiles + t) + 1]
        given = {i: (*(acc[k] for k in at), *a[t::tiles], *b[t::tiles]) for i, (acc, a, b) in asked.items()}
        for i, values in product(given).items():
            for k, v in zip(at, values, strict=True):
                results[i][k] = v
    return {i: tuple(values) for i, values in results.items()}


# --- The table -------------------------------------------------------------------------------------------------------


def nothing(place: Place, *how: Any) -> Any:
    """Of what there is nothing to wait for here."""
    return lambda *args: None


def same(place: Place) -> Any:
    return lambda value: value


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The meaning that is this function, wherever it runs."""
    return lambda place, *how: function


def places(place: Place, offsets: tuple[tuple[int, ...], ...]) -> Any:
    return lambda base, t: [base + of_lanes[t] for of_lanes in offsets]


def pixels(place: Place, mi: int, half: int) -> Any:
    def read(at: int) -> list[int]:
        rows = [read_words(place, 2, "shared")(at + half * row) for row in range(2 * mi)]
        return [rows[2 * i + row][k] for i in range(mi) for k in range(2) for row in range(2)]

    return read


def weights(place: Place, blocks: int) -> Any:
    each = 2 * min(blocks, 2)
    read = read_words(place, each, "shared")
    return lambda at: [word for i in range(0, 2 * blocks, each) for word in read(at + 128 * i)]


MEANINGS: dict[str, Callable[..., Any]] = {
    "parts.split.last_to_arrive": last_to_arrive,
    "ptx.exchange.arrive": arrive,
    "ptx.exchange.await_all": await_all,
    "ptx.exchange.grid_barrier": grid_barrier,
    "ptx.exchange.leave": leave,
    "ptx.exchange.publish": publish,
    "ptx.exchange.values": lambda place, dtype: lambda *words: _floats(dtype, words),
    "ptx.exchange.wait": wait_for_values,
    "ptx.exchange.withhold": withhold,
    "ptx.hopper.barrier_arrive": of_engine("barrier_arrive"),
    "ptx.hopper.barrier_expect": of_engine("barrier_expect"),
    "ptx.hopper.barrier_init": of_engine("barrier_init"),
    "ptx.hopper.barrier_wait": barrier_wait,
    "ptx.hopper.base": plain(lambda: 0),
    "ptx.hopper.boxes_read": of_engine("boxes_read"),
    "ptx.hopper.cluster_arrive_at": cluster_arrive,
    "ptx.hopper.cluster_wait_at": cluster_wait,
    "ptx.hopper.computed": same,
    "ptx.hopper.copy_box4": of_engine("copy_box"),
    "ptx.hopper.fence_barrier_init": nothing,
    "ptx.hopper.fence_copies": nothing,
    "ptx.hopper.let_later_grids_start": nothing,
    "ptx.hopper.load_cluster_f32": load_cluster,
    "ptx.hopper.part": part,
    "ptx.hopper.prefetch_map": nothing,
    "ptx.hopper.read_matrices": read_matrices,
    "ptx.hopper.store_box4": of_engine("store_box"),
    "ptx.hopper.store_matrices": put_matrices,
    "ptx.hopper.sync_warp": nothing,
    "ptx.hopper.uniform": same,
    "ptx.hopper.wait_for_earlier_grids": nothing,
    "ptx.memory.anew": plain(lambda *words: words[:-1]),
    "ptx.memory.deviations": deviations,
    "ptx.memory.float_bits": plain(lambda x: int(np.float32(x).view(np.int32))),
    "ptx.memory.floats": floats,
    "ptx.memory.larger_bytes": larger_bytes,
    "ptx.memory.largest_bytes": largest_bytes,
    "ptx.memory.load": load,
    "ptx.memory.load_bytes": load_bytes,
    "ptx.memory.load_floats": load_floats,
    "ptx.memory.load_sums": load_sums,
    "ptx.memory.load_words": load_words,
    "ptx.memory.prefetch": prefetch,
    "ptx.memory.read_words": read_words,
    "ptx.memory.rounded": rounded,
    "ptx.memory.scaled": scaled,
    "ptx.memory.store": store,
    "ptx.mma.cp_async": copy_async,
    "ptx.mma.cp_async_commit": nothing,
    "ptx.mma.cp_async_wait": nothing,
    "ptx.mma.cp_async_with": copy_async,
    "ptx.mma.divide": plain(lambda a, b: a // b),
    "ptx.mma.halves": halves,
    "ptx.mma.load_chunk": lambda place: load_words(place, 4),
    "ptx.mma.multiply_diagonal": by(diagonal_products),
    "ptx.mma.multiply_fragment": multiply_fragment,
    "ptx.mma.multiply_sparse": by(sparse_product),
    "ptx.mma.shared_address": shared_address,
    "ptx.mma.store_chunk": lambda place: store_words(place, 4),
    "ptx.mma.store_shared_words": store_words,
    "ptx.mma.take": take,
    "ptx.mma.taken": lambda place, compute, n: lambda sums: tuple(map(compute.numpy.type, sums)),
    "ptx.mma.warp_multiply": warp_multiply,
    "ptx.mma.warp_multiply_sparse": warp_multiply_sparse,
    "ptx.mma.widen": widen,
    "ptx.mma.zeros": lambda place, n, acc="f32": lambda: (np.float32(0) if acc == "f32" else 0,) * n,
    "ptx.packed.multiply_chunk": multiply_chunk,
    "ptx.packed.multiply_part": multiply_part,
    "ptx.patch.base": plain(lambda: 0),
    "ptx.patch.keep": plain(lambda words, inside: words if inside else [0] * len(words)),
    "ptx.patch.multiply": multiply_patch,
    "ptx.patch.pixels": pixels,
    "ptx.patch.places": places,
    "ptx.patch.weights": weights,
    "ptx.simt.ballot": by(balloted),
    "ptx.simt.count_bits": plain(lambda x: (int(x) & 0xFFFFFFFF).bit_count()),
    "ptx.simt.dot": lambda place, n: _dot,
    "ptx.simt.float_from": plain(lambda x: np.int32(x).view(np.float32) - np.float32(1.5 * 2**23)),
    "ptx.simt.multiply_add": multiply_add,
    "ptx.simt.permute": plain(_permute),
    "ptx.simt.product": plain(lambda a, b: np.float32(a) * np.float32(b)),
    "ptx.simt.shifted": plain(lambda a, n: int(a) << n & 0xFFFFFFFF),
    "ptx.simt.shuffle": by(shuffled),
    "ptx.simt.shuffle_int": by(shuffled),
    "ptx.softmax.exp2": plain(np.exp2),
}
"""By the names of `text.Intrinsic`: a function of the place and of what the intrinsic's own one takes."""
