"""Runs the text that kernels are generated from, thread by thread, as the Python that it is, over NumPy buffers.

Every access is checked: the address must lie in a tensor's padded extents or between its elements, be a multiple of the
access's width, and be written at most once. What instructions do is stated here once more, in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tccompile.ir.evaluate import NUMPY
from tccompile.ir.program import Program
from tccompile.ir.storage import elements, from_storage, store, to_storage
from tccompile.ir.types import DType
from tccompile.kernels import (
    attention,
    codegen,
    conv_patch,
    cumulate,
    depthwise,
    depthwise_mma,
    depthwise_sm90,
    epilogue,
    gemv,
    loops,
    mlp,
    norm,
    norm_split,
    norm_team,
    pointwise,
    pool,
    reduce,
    resize,
    scatter,
    softmax,
    top_k,
    trees,
    two_pass,
)
from tccompile.kernels.codegen import execute
from tccompile.kernels.spec import F32, I32, Counters, Launch, Ptr, Scratch, TiledMap, Value, Work

SPACE = 1 << 33
"""Distance of the addresses of two storages."""


class Memory:
    """A program's storages, each far from the others, the workspace and the counters; y's and the workspace are poisoned."""

    def __init__(self, program: Program, values: Mapping[str, np.ndarray], y: str, scratch: int = 0, counters: int = 0) -> None:
        self.program = program
        self.buffers: list[np.ndarray] = []
        self.written: list[np.ndarray] = []
        self.base: dict[str, int] = {}
        for name, t in program.tensors.items():
            if t.base is None:
                self.base[name] = len(self.buffers) * SPACE + SPACE // 2
                buffer = np.zeros(t.span, t.dtype.numpy)
                buffer.view(np.uint8)[:] = 0xFF
                self.buffers.append(buffer)
                self.written.append(np.zeros(buffer.nbytes, np.uint8))
        for name, t in program.tensors.items():
            if name in values:
                stored = values[name].dtype == t.dtype.numpy  # bf16 is given as its bits
                buffer = self.buffers[self.base[t.storage] // SPACE]
                store(buffer, t, values[name] if stored else to_storage(values[name], t.dtype))
        self.own = len(self.buffers)
        self.buffers += [np.full(scratch, 0xFF, np.uint8), np.zeros(counters, np.uint8)]
        self.written += [np.zeros(n, np.uint8) for n in (scratch, counters)]
        self.y = program.tensors[y]

    def pointer(self, p: Ptr | Scratch | Counters) -> int:
        if not isinstance(p, Ptr):
            return (self.own + isinstance(p, Counters)) * SPACE + SPACE // 2 + p.bytes
        t = self.program.tensors[p.tensor]
        return self.base[t.storage] + t.offset * t.dtype.size + p.bytes

    def _find(self, address: int, size: int, n: int) -> tuple[int, int]:
        k, at = address // SPACE, address % SPACE - SPACE // 2
        assert at % min(16, size * n) == 0, "an access that is not aligned"
        assert at >= 0 and at + size * n <= self.buffers[k].nbytes, f"an access {at} bytes into {self.buffers[k].nbytes}"
        return k, at

    def load(self, dtype: DType, n: int, guarded: bool) -> Any:
        def read(address: int, inside: int = 1) -> Any:
            kind = np.float32 if dtype.is_float else int
            if not inside:
                return kind(0) if n == 1 else (kind(0),) * n
            k, at = self._find(int(address), dtype.size, n)
            stored = self.buffers[k].view(np.uint8)[at : at + dtype.size * n].view(dtype.numpy)
            values = [kind(v) for v in from_storage(stored, dtype)]
            return values[0] if n == 1 else tuple(values)

        return read if guarded else lambda address: read(address)

    def store(self, dtype: DType, n: int, guarded: bool) -> Any:
        def write(address: int, *values: Any) -> None:
            if guarded:
                *values, inside = values
                if not inside:
                    return
            assert len(values) == n
            k, at = self._find(int(address), dtype.size, n)
            kind = np.float32 if dtype.is_float else np.int64
            data = to_storage(np.array(values, kind), dtype).view(np.uint8)
            self.buffers[k].view(np.uint8)[at : at + len(data)] = data
            self.written[k][at : at + len(data)] += 1

        return write

    def words(self, address: int, inside: int = 1, n: int = 4) -> tuple[int, ...]:
        """`mma.load_chunk`, or as many words"""
        if not inside:
            return (0,) * n
        k, at = self._find(int(address), 4, n)
        return tuple(map(int, self.buffers[k].view(np.uint8)[at : at + 4 * n].view(np.uint32)))

    def prefetch(self, address: int) -> None:
        """`memory.prefetch`, which is to ask for what exists only."""
        self._find(int(address), 1, 1)

    def atomic_add(self, address: int, value: int) -> int:
        k, at = self._find(int(address), 4, 1)
        place = self.buffers[k][at : at + 4].view(np.int32)
        before = int(place[0])
        place[0] += value
        return before

    def last_to_arrive(self, counter: int, parts: int, tid: int) -> bool:
        """`parts.split.last_to_arrive` after its barrier, for the threads of a block in their order."""
        if tid == 0:
            self.last = self.atomic_add(counter, 1) == parts - 1
            if self.last:
                self.atomic_add(counter, -parts)
        return self.last

    def functions(self, accesses: epilogue.Accesses) -> dict[str, Any]:
        """The memory functions that generated text calls."""
        return {name: getattr(self, kind)(dtype, n, guarded) for name, (kind, dtype, n, guarded) in accesses.items()}

    def check_written(self, once: bool = True, some: bool = False) -> None:
        """All (or some) of y's padded extents (once), zeros outside its shape, and nothing else."""
        y = self.y
        k = self.base[y.storage] // SPACE
        assert all(not w.any() for i, w in enumerate(self.written) if i != k and i < self.own)
        counts = self._counts()
        expected = np.zeros(len(counts), np.uint8)
        elements(expected, y, y.padded)[...] = 1
        if some:
            assert not (counts > expected).any() and counts.any(), "other elements than y's, or none"
        else:
            assert np.array_equal(counts if once else counts > 0, expected), "not just all of y's padded extents"
        whole = np.where(elements(counts, y, y.padded), elements(self.buffers[k], y, y.padded), self.buffers[k].dtype.type(0))
        whole[tuple(slice(0, n) for n in y.shape)] = 0
        assert not any(whole.tobytes()), "the padding is not zero"

    def _counts(self) -> np.ndarray:
        """How often each element of y's storage was written."""
        counts = self.written[self.base[self.y.storage] // SPACE].reshape(-1, self.y.dtype.size)
        assert (counts == counts[:, :1]).all(), "a part of an element was written"
        return np.ascontiguousarray(counts[:, 0])

    def result(self) -> np.ndarray:
        k = self.base[self.y.storage] // SPACE
        return from_storage(elements(self.buffers[k], self.y), self.y.dtype)

    def there(self) -> np.ndarray:
        """Which of the result's elements were written."""
        return elements(self._counts(), self.y) > 0


def _i32(value: Any) -> int:
    value = int(value)
    assert -(2**31) <= value < 2**31, "more than 32 bits"
    return value


def _divide(n: int, multiplier: int, shift: int) -> int:
    assert 0 <= n < 2**31
    return n * (multiplier & 0xFFFFFFFF) >> shift


def _saturated(low: int, high: int) -> Any:
    return lambda x: 0 if math.isnan(x) else low if x <= low else high if x >= high else int(x)


def names() -> dict[str, Any]:
    """What `codegen.names()` holds, in Python."""
    builtins = {n: f for n, f in NUMPY.items() if n not in ("where", "logical_not")}
    return {
        **builtins,
        **{f"int_{n}": lambda *a, f=f: int(f(*(np.int64(x) for x in a))) for n, f in builtins.items()},
        "quick_div": lambda a, b: a / b, "quick_exp": np.exp, "power_of_2": np.exp2, "larger": np.fmax,
        "select": lambda c, a, b: a if c else b,
        "within": lambda i, low, high: int(low <= i < high),
        "to_int": _saturated(-(2**63), 2**63 - 1), "to_unsigned": _saturated(0, 2**64 - 1), "to_float": np.float32,
        "divide": _divide, "f32": np.float32, "i32": _i32, "i64": int, "boolean": bool, "inf": math.inf, "nan": math.nan,
    }  # fmt: skip


def run(work: Work, program: Program, values: Mapping[str, np.ndarray], y: str, blocks: int | None = None) -> Memory:
    """Run the launches of a kernel of generated text, or so many blocks of each: the first, the last, and some between."""
    memory = Memory(program, values, y, work.scratch, work.counters)
    with np.errstate(all="ignore"):
        for launch in work.launches:
            _launch(launch, memory, blocks)
    return memory


def simulated(kernel: str) -> bool:
    """Whether the kernel is of generated text, which runs here."""
    return kernel in _TEXTS


def _launch(launch: Launch, memory: Memory, blocks: int | None) -> None:
    """Run a launch's blocks one after the other, the threads of each in turns: see `_run_block`."""
    params = dict(launch.code.params)
    x, y, z = launch.grid
    sizes = {"blockDim": SimpleNamespace(x=launch.block), "gridDim": SimpleNamespace(x=x, y=y, z=z)}
    cuda = SimpleNamespace(blockIdx=SimpleNamespace(), threadIdx=SimpleNamespace(x=0), threadfence=lambda: None, **sizes)
    scope = {**names(), "cuda": cuda}
    extra = 0
    if "epilogue" in params:
        known = {"depthwise": "columns", "depthwise_mma": "columns", **dict.fromkeys(("norm", "norm_team", "softmax"), "rows")}
        at_once = known.get(launch.code.kernel)
        rows = params[at_once] if at_once else {"conv_patch": 2, "depthwise_sm90": 4}.get(launch.code.kernel, 1)
        own_stores = launch.code.kernel == "depthwise_sm90"
        form = epilogue.Form.decoded(params.pop("epilogue"))
        text, kinds, accesses, ahead, kept = epilogue.source(form, rows, stores=not own_stores, keeps=own_stores)
        name = "results" if own_stores else "store"
        scope[name] = execute(text, {**scope, **memory.functions(accesses)}, name)
        if own_stores:
            scope["kept"] = execute(kept, {**scope, **memory.functions(accesses)}, "kept")
        scope["ahead"] = execute(ahead, {**scope, "prefetch": memory.prefetch}, "ahead")
        if params.get("words"):
            text, _, accesses, *_ = epilogue.source(form.unmasked, rows)
            scope["store_inside"] = execute(text, {**scope, **memory.functions(accesses)}, name)
        extra = len(kinds)
    text, own, fixed = _TEXTS[launch.code.kernel](params, extra, memory)
    engine = own.get("engine")
    # Where threads wait for each other they are suspended: at barriers, and where a warp exchanges values.
    text = text.replace("cuda.syncthreads()", "yield")
    text = re.sub(r"^( *)if (last_to_arrive\(.*)\):$", r"\1yield\n\1if \2, tid):", text, flags=re.M)
    text = re.sub(rf"= ({'|'.join(_EXCHANGES)})\((.*)\)$", r"= yield ('\1', \2)", text, flags=re.M)
    name = re.search(r"def (\w+)", text)
    assert name
    kernel = execute(text, {**scope, **own}, name[1])
    args = []
    for arg in launch.args:
        assert isinstance(arg, Ptr | Scratch | Counters | I32 | F32 | TiledMap)
        args.append(arg.value if isinstance(arg, I32 | F32) else arg if isinstance(arg, TiledMap) else memory.pointer(arg))
    if fixed:  # a body: some arguments by themselves, the others in tuples, as in `loops.entry`
        rest = args[fixed[0] :]
        groups = [rest[sum(fixed[1:i]) :][: fixed[i]] for i in range(1, len(fixed))]
        args = [*args[: fixed[0]], *map(tuple, groups), tuple(rest[sum(fixed[1:]) :])]
    every, waiting = range(x * y * z), "yield from" in text
    part = every if waiting or blocks is None or blocks >= len(every) else _some(every, blocks)
    running = {n: _run_block(lambda: kernel(*args), launch.block, cuda.threadIdx, engine) for n in part}
    shared = {n: SimpleNamespace(array=_Shared(cuda.threadIdx, launch.smem)) for n in part}
    while running:  # blocks that wait for each other take turns, from barrier to barrier; others run one after the other
        for n in list(running) if waiting else [next(iter(running))]:
            cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z = n % x, n // x % y, n // (x * y)
            cuda.shared = shared[n]
            if next(running[n], "done") == "done":
                del running[n]


def _some(numbers: range, count: int) -> list[int]:
    """The first, the last, and some between, the same ones every time."""
    drawn = np.random.default_rng(len(numbers)).choice(numbers, count, replace=False)
    return sorted({numbers[0], numbers[-1], *map(int, drawn[2:])})


class _Shared:
    """`cuda.shared.array`: each thread's first, second … is the same array for all threads; floats are NaN at first.

    One of no elements is all of the block's dynamic shared memory.
    """

    def __init__(self, index: SimpleNamespace, dynamic: int) -> None:
        self.index, self.dynamic = index, dynamic
        self.arrays: list[np.ndarray] = []
        self.taken: dict[int, int] = {}

    def __call__(self, n: int, kind: Any) -> np.ndarray:
        number = self.taken.get(self.index.x, 0)
        self.taken[self.index.x] = number + 1
        dtype = {_i32: np.int32, int: np.int64}.get(kind, kind)
        n = n or self.dynamic // np.dtype(dtype).itemsize
        if number == len(self.arrays):
            self.arrays.append(np.full(n, np.nan if dtype is np.float32 else -1, dtype))
        assert (len(self.arrays[number]), self.arrays[number].dtype) == (n, dtype), "threads declare different arrays"
        return self.arrays[number]


class CopyEngine:
    """The tensor copy engine, mbarriers and a block's shared memory, for `launch.smem` bytes from address 0 on.

    A copy is done at once or when nothing else can go on, at random, and boxes are stored as late as may be: so what is read
    before it is waited for is old, and so is what is stored of shared memory that was filled again too early.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.random = np.random.default_rng(0)

    def begin(self) -> None:
        """A new block."""
        self.shared = np.full(1 << 18, 0xFF, np.uint8)  # NaN, where nobody writes
        self.phases: dict[int, list[int]] = {}  # by barrier: phases completed, threads and bytes to come, threads of a phase
        self.copies: list[tuple] = []
        self.stores: list[tuple] = []

    def finish(self) -> None:
        assert not self.copies, "a block ends before its copies"
        self.boxes_read()

    def advance(self) -> bool:
        """Do the copy that has waited longest."""
        if not self.copies:
            return False
        self._copy(*self.copies.pop(0))
        return True

    def barrier_init(self, at: int, threads: int) -> None:
        self.phases[at] = [0, threads, 0, threads]

    def barrier_arrive(self, at: int) -> None:
        self.barrier_expect(at, 0)

    def barrier_expect(self, at: int, size: int) -> None:
        phase = self.phases[at]
        phase[1:3] = [phase[1] - 1, phase[2] + size]
        assert phase[1] >= 0, "more arrivals than a phase has"
        self._complete(at)

    def completed(self, at: int, parity: int) -> bool:
        """Whether a wait for the phase of that parity is over."""
        return self.phases[at][0] % 2 != parity

    def _complete(self, at: int) -> None:
        phase = self.phases[at]
        if phase[1] == phase[2] == 0:
            phase[:2] = [phase[0] + 1, phase[3]]

    def copy_box(self, at: int, map_: TiledMap, barrier: int, *first: int) -> None:
        if self.random.integers(2):
            self._copy(at, map_, barrier, first)
        else:
            self.copies.append((at, map_, barrier, first))

    def store_box(self, map_: TiledMap, at: int, *first: int) -> None:
        self.stores.append((map_, at, first))

    def boxes_read(self) -> None:
        for map_, at, first in self.stores:
            k, offsets, inside = self._box(map_, first)
            box = self.shared[self._places(at, map_)].view(np.uint16).reshape(inside.shape)
            target, written = self.memory.buffers[k].view(np.uint16), self.memory.written[k].reshape(-1, 2)
            target[offsets[inside]] = box[inside]
            np.add.at(written, offsets[inside], 1)
        self.stores.clear()

    def _copy(self, at: int, map_: TiledMap, barrier: int, first: Sequence[int]) -> None:
        k, offsets, inside = self._box(map_, first)
        box = np.where(inside, self.memory.buffers[k].view(np.uint16)[np.where(inside, offsets, 0)], np.uint16(0))
        self.shared[self._places(at, map_)] = box.reshape(-1).view(np.uint8)
        self.phases[barrier][2] -= box.nbytes
        self._complete(barrier)

    def _box(self, map_: TiledMap, first: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray]:
        """The buffer, the elements of a box of halves in it, innermost dimension last, and whether each is in the array."""
        k, at = divmod(self.memory.pointer(Ptr(map_.tensor, map_.bytes)), SPACE)
        assert at % 16 == 0 and all(s % 16 == 0 for s in map_.strides) and set(map_.steps) == {1}, "a map that cannot be encoded"
        widest = map_.swizzle or 512
        assert all(0 < n <= 256 for n in map_.box) and 2 * map_.box[0] <= widest, "a box that cannot be copied"
        assert 2 * map_.box[0] % 16 == 0, "a box that is no whole vectors wide"
        assert all(n > 0 for n in map_.extents), "an array without elements"
        offsets, inside = np.array((at - SPACE // 2) // 2), np.array(True)
        for n, size, extent, stride in zip(first, map_.box, map_.extents, (2, *map_.strides), strict=True):
            index = np.arange(n, n + size).reshape(-1, *[1] * offsets.ndim)
            offsets = offsets + index * (stride // 2)
            inside = inside & (index >= 0) & (index < extent)
        return k, offsets, inside

    def _places(self, at: int, map_: TiledMap) -> np.ndarray:
        """The bytes of shared memory of a box: chunks of 16 bytes are swapped as lines of 128 bytes go on."""
        assert at % (8 * map_.swizzle or 128) == 0, "a box that is not aligned to its swizzle's pattern"
        places = np.arange(at, at + 2 * math.prod(map_.box))
        return places ^ ((places >> 7) & max(map_.swizzle // 16 - 1, 0)) << 4

    def matrices(self, asked: Mapping[int, tuple], n: int) -> dict[int, Any]:
        """ldmatrix: lanes 8m to 8m + 7 give the addresses of matrix m's rows, of which lane (g, t) gets word t of row g."""
        rows = [self._row(asked, m * 8 + g) for m in range(n) for g in range(8)]
        words = np.array([self.shared[row].view(np.uint32) for row in rows])
        return {i: tuple(int(words[8 * m + i % 32 // 4, i % 4]) for m in range(n)) for i in asked}

    def put_turned(self, asked: Mapping[int, tuple]) -> dict[int, Any]:
        """stmatrix of two matrices, transposed and rounded to halves: lane (g, t) has numbers 2t and 2t + 1 of column g."""
        for i, (_, *values) in asked.items():
            g, t = i % 32 // 4, i % 4
            for at, value in enumerate(values):
                row = self._row(asked, 8 * (at // 2) + 2 * t + at % 2)
                self.shared[row[2 * g : 2 * g + 2]] = np.array([value], np.float32).astype(np.float16).view(np.uint8)
        return dict.fromkeys(asked)

    def _row(self, asked: Mapping[int, tuple], lane: int) -> np.ndarray:
        at = asked[min(asked) + lane][0]
        assert at % 16 == 0, "a row that is not aligned"
        return np.arange(at, at + 16)


def _run_block(
    start: Callable[[], Generator | None], count: int, index: SimpleNamespace, engine: CopyEngine | None = None
) -> Generator[None]:
    """Each thread up to the next barrier, warp by warp; the threads of a warp wait for each other where they exchange values.

    Suspended whenever all threads have come to a barrier.
    """
    if engine:
        engine.begin()
    threads = {}
    for index.x in range(count):
        threads[index.x] = start()  # without barriers it is no generator, and has run
    live = {i: t for i, t in threads.items() if t is not None}
    asked: dict[int, Any] = {}
    while live:
        before = len(live)
        asked.clear()
        going = True
        while going:  # until all are at the barrier, or have ended
            steps = [_run_warp(live, range(warp, warp + 32), asked, index) for warp in range(0, count, 32)]
            waiting = any(asked[i] for i in live)
            going = waiting and (any(steps) or (engine is not None and engine.advance()))
            assert going or not waiting, "threads wait for what never comes"
        assert len(live) in (0, before), "some threads wait at a barrier that others do not reach"
        yield
    if engine:
        engine.finish()


def _run_warp(live: dict[int, Generator], lanes: range, asked: dict[int, Any], index: SimpleNamespace) -> bool:
    """Until the warp is at a barrier of the block, waits for something, or has ended; whether it has gone on at all."""
    answers: dict[int, Any] = {}
    going, any_step = True, False
    while going:
        ours = [i for i in lanes if i in live]
        kinds = {asked[i] and asked[i][0] for i in ours if i in asked}
        assert len(kinds) <= 1, "threads of a warp wait at different places"
        kind = kinds.pop() if kinds else ""
        if not ours or kind is None or (kind == "wait" and not all(asked[i][1](*asked[i][2:]) for i in ours)):
            break
        if kind not in ("", "wait"):
            assert len(ours) == 32, "a warp exchanges values without some of its threads"
            answers = _EXCHANGES.get(kind, kind)({i: asked[i][1:] for i in ours})
        for index.x in ours:
            try:
                asked[index.x] = live[index.x].send(answers.get(index.x))
            except StopIteration:
                del live[index.x]
        answers, any_step = {}, True
    return any_step


def _shuffle(asked: Mapping[int, tuple]) -> dict[int, Any]:
    return {i: asked[i ^ mask][0] for i, (_, mask) in asked.items()}


def _multiply(asked: Mapping[int, tuple]) -> dict[int, Any]:
    """mma.m16n8k16 or, of half the words, m16n8k8 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane (g, t) of 8 × 4."""
    a, b, acc = (np.zeros(shape, np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    places = {i: (i % 32 // 4, i % 4 * 2) for i in asked}
    for i, (g, t) in places.items():
        values = asked[i]
        halves = [np.array([w], np.uint32).view(np.float16).astype(np.float32) for w in values[4:]]
        blocks = len(halves) // 3
        for j in range(2 * blocks):
            a[g + j % 2 * 8, t + j // 2 * 8 :][:2] = halves[j]
        for j in range(blocks):
            b[t + 8 * j :, g][:2] = halves[2 * blocks + j]
        for j in range(2):
            acc[g + 8 * j, t : t + 2] = values[2 * j : 2 * j + 2]
    acc += a @ b
    return {i: (*acc[g, t : t + 2], *acc[g + 8, t : t + 2]) for i, (g, t) in places.items()}


def _patch(asked: Mapping[int, tuple]) -> dict[int, Any]:
    """`ptx.patch.multiply`, block by block of 16 pixels by 8 columns; of `pixels`, words come as they were read."""
    (blocks,) = {a[0] for a in asked.values()}
    out = {i: list(acc) for i, (_, acc, _, _) in asked.items()}
    lanes, numbers = 2 * blocks, len(next(iter(asked.values()))[3]) // 2
    for number in range(numbers):
        group, block = divmod(number, blocks)
        for i in range(len(next(iter(asked.values()))[2]) // 4):
            first = (i * (numbers // blocks) + group) * 2 * lanes + 2 * block
            at = [first, first + 1, first + lanes, first + lanes + 1]
            words = {
                lane: [*(out[lane][k] for k in at), *(x[4 * i + k] for k in (0, 2, 1, 3)), *w[2 * number : 2 * number + 2]]
                for lane, (_, _, x, w) in asked.items()
            }
            for lane, values in _multiply(words).items():
                for k, value in zip(at, values, strict=True):
                    out[lane][k] = value
    return {lane: tuple(values) for lane, values in out.items()}


def _multiply_sparse(asked: Mapping[int, tuple]) -> dict[int, Any]:
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


def _multiply_diagonal(asked: Mapping[int, tuple]) -> dict[int, Any]:
    """`mma.multiply_diagonal`: for each of `tiles` words of a vector one product."""
    results: dict[int, list] = {i: list(acc) for i, (acc, *_) in asked.items()}
    tiles = len(asked[min(asked)][0]) // 4
    for t in range(tiles):
        at = [2 * t, 2 * t + 1, 2 * (tiles + t), 2 * (tiles + t) + 1]
        given = {i: (*(acc[k] for k in at), *a[t::tiles], *b[t::tiles]) for i, (acc, a, b) in asked.items()}
        for i, values in _multiply(given).items():
            for k, v in zip(at, values, strict=True):
                results[i][k] = v
    return {i: tuple(values) for i, values in results.items()}


_EXCHANGES: dict[str, Callable[[Mapping[int, tuple]], dict[int, Any]]] = {
    "shuffle": _shuffle,
    "multiply": _multiply,
    "patch": _patch,
    "multiply_diagonal": _multiply_diagonal,
    "multiply2": _multiply_sparse,
    "multiply4": _multiply_sparse,
}


def _dot(acc: Any, a: tuple, b: tuple) -> Any:
    for x, y in zip(a, b, strict=True):
        acc = np.float32(np.float64(x) * np.float64(y) + np.float64(acc))
    return acc


Text = tuple[str, dict[str, Any], tuple[int, ...]]
"""A kernel's text, what it calls beside `names()`, and the counts of `loops.entry` but for the epilogue's, if it is a body."""


def _whole(source: Callable[..., tuple[str, Any, epilogue.Accesses]]) -> Callable[[dict[str, Value], int, Memory], Text]:
    """Of a kernel whose `source` gives all of its text."""

    def text_of(params: dict[str, Value], extra: int, memory: Memory) -> Text:
        text, _, accesses = source(**params, **({"extra": extra} if extra else {}))
        return text, memory.functions(accesses), ()

    return text_of


def _trees(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    text, scope, fixed = _whole(trees.source)(params, extra, memory)
    words = {f"words{n}": partial(memory.words, n=n) for n in (2, 4)}
    return text, {**scope, **words, "u64": int, "as_float": lambda word: (np.uint32(word).view(np.float32),)}, fixed


def _body(name: str, params: str, lines: Sequence[str]) -> str:
    return f"def {name}({params}, e):\n" + "".join(f"    {line}\n" for line in lines)


def _words(name: str, dtype: DType, n: int, memory: Memory) -> dict[str, Any]:
    """`memory.load_words` and `memory.floats`, with all of a vector in the first of its words."""
    read, count = memory.load(dtype, n, True), n * dtype.size // 4
    return {
        f"read_{name}": lambda address, inside: (read(address, inside), *[0] * (count - 1)),
        f"unpack_{name}": lambda *words: words[0],
    }


def _gemv(params: dict[str, Value], extra: int, memory: Memory, tensor_cores: bool) -> Text:
    scope: dict[str, Any] = {
        **_words("s", DType(params["streamed"]), 8, memory),
        **_words("t", DType(params["small"]), 8, memory),
        "read": memory.words,
        "dot": _dot,
        "u64": int,
        "read_part": memory.load(DType.F32, 1, False),
        "store_part": memory.store(DType.F32, 1, False),
    }
    # Blocks run in their order, so that of the last part of K comes last.
    text = _body("gemv", gemv.PARAMS, gemv.lines(tensor_cores, params))
    text = text.replace("not last_to_arrive(u64(counters + number * i64(4)), parts)", "part != parts - 1")
    return text, scope, (gemv.PARAMS.count(",") + 1,)


def _mlp(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    scope: dict[str, Any] = {
        **_words("x", DType(params["x"]), 8, memory),
        **_words("w", DType(params["w"]), 8, memory),
        **_words("v", DType(params["v"]), 8, memory),
        "read_one": memory.load(DType(params["x"]), 1, True),
        "read_bias": memory.load(DType(params["bias"] or "float32"), 1, True),
        "dot": _dot,
    }
    return _body("mlp", mlp.PARAMS, mlp.lines(params)), scope, (mlp.PARAMS.count(",") + 1,)


def _depthwise(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    lanes = params["lanes"]
    scope: dict[str, Any] = {
        "prefetch": memory.prefetch,
        "wait_for_earlier_grids": lambda: None,
        "let_later_grids_start": lambda: None,
        "zeros": lambda: (np.float32(0),) * lanes,
        "multiply_add": lambda acc, a, b: tuple(_dot(z, (x,), (y,)) for z, x, y in zip(acc, a, b, strict=True)),
    }
    for name in "xw":
        scope |= _words(name, DType(params[name]), lanes, memory)
    text = _body("depthwise", "x, w, numbers", depthwise.lines(params))
    return text, scope, (2, depthwise.NUMBERS.count(",") + 1)


def _conv_patch(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    x, patch = DType(params["x"]), conv_patch.patch_of(params)
    places, half, each = conv_patch.offsets(patch), 8 * patch.strides[1] * patch.pixel, 2 * min(patch.blocks, 2)
    count = 4 * patch.blocks
    shared = np.full(1 << 18, 0xFF, np.uint8)  # NaN, where nobody writes

    def get(at: int, n: int) -> list[int]:
        assert at % (4 * n) == 0
        return list(map(int, shared[at : at + 4 * n].view(np.uint32)))

    def put(at: int, *words: int) -> None:
        assert at % (4 * len(words)) == 0
        shared[at : at + 4 * len(words)] = np.array(words, np.uint32).view(np.uint8)

    def words(n: int) -> Any:
        return lambda address, inside: memory.words(address, inside, n)

    scope: dict[str, Any] = {
        "base": lambda: 0,
        "zeros": lambda: (np.float32(0),) * (patch.mi * patch.outputs // 2),
        "places": lambda base, t: [base + of_lanes[t] for of_lanes in places],
        "pixels": lambda at: [get(at + half * row, 2)[k] for row in range(2 * patch.mi) for k in range(2)],
        "weights": lambda at: [w for i in range(0, 2 * patch.outputs // 8, each) for w in get(at + 128 * i, each)],
        "keep": lambda words, inside: words if inside else [0] * len(words),
        "part": lambda acc, number: acc[number * count : (number + 1) * count],
        "halves": lambda a, b: int(np.array([a, b], np.float16).view(np.uint32)[0]),
        "read_half": memory.load(DType.F16, 1, True),
        "read_quad": words(2),
        "read_pair": words(4),
        "read_x": memory.load(x, 1, True),
        **{"put2": put, "put4": put},
    }
    text = _body("conv_patch", "x, w, numbers", conv_patch.lines(patch, x))
    text = re.sub(r"acc = multiply\((.*)\)$", rf"acc = yield ('patch', {patch.blocks}, \1)", text, flags=re.M)
    return text, scope, (2, conv_patch.NUMBERS.count(",") + 1)


def _depthwise_mma(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    lanes = params["lanes"]
    scope: dict[str, Any] = {
        "zeros": lambda: (np.float32(0),) * (2 * lanes),
        "read": partial(memory.words, n=lanes // 2),
        "take": lambda words, a, b: tuple(w & a & b & 0xFFFFFFFF for w in words),
    }
    text = _body("depthwise", "x, w, numbers", depthwise_mma.lines(params))
    return text, scope, (2, depthwise.NUMBERS.count(",") + 1)


def _depthwise_sm90(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    walk = depthwise_sm90.Walk(*(params[name] for name in depthwise_sm90.PARAMS))
    engine = CopyEngine(memory)
    scope: dict[str, Any] = {
        "engine": engine,
        "base": lambda: 0,
        "uniform": lambda number: number,
        "computed": lambda number: number,
        "zeros": lambda: (np.float32(0),) * 4,
        "read_word": partial(memory.words, n=1),
        "take": lambda words, a, b: tuple(w & a & b & 0xFFFFFFFF for w in words),
        "copy_box4": engine.copy_box,
        "store_box4": engine.store_box,
        **{name: getattr(engine, name) for name in ("barrier_init", "barrier_arrive", "barrier_expect", "boxes_read")},
        **{f"load_{n}": partial(engine.matrices, n=n) for n in (2, 4)},
        "store_2": engine.put_turned,
        "completed": engine.completed,
    }
    grids = ("wait_for_earlier_grids", "let_later_grids_start")
    scope |= dict.fromkeys(("sync_warp", "fence_barrier_init", "fence_copies", "prefetch_map", *grids), lambda *_: None)
    lines = depthwise_sm90.lines(walk, params["stages"], params["constant"])
    text = _body("depthwise", f"{depthwise_sm90.maps(walk)}, w, numbers", lines)
    text = re.sub(r"= matrices(\d)\((.*)\)$", r"= yield (load_\1, \2)", text, flags=re.M)
    text = re.sub(r"^( *)put_turned\((.*)\)$", r"\1yield (store_2, \2)", text, flags=re.M)
    text = re.sub(r"^( *)barrier_wait\((.*)\)$", r"\1yield ('wait', completed, \2)", text, flags=re.M)
    return text, scope, (walk.stride + 2, depthwise_sm90.NUMBERS.count(",") + 1)


def unravel(depth: int, tensors: int) -> Any:
    """`loops.unravel`"""
    text = "def unravel(i, w):\n" + "".join(f"    {line}\n" for line in loops.unravel_lines(depth, tensors))
    return execute(text, names(), "unravel")


def _two_pass(params: dict[str, Value], extra: int, memory: Memory, passes: two_pass.Passes) -> Text:
    x, dynamic = DType(params["x"]), _Dynamic(memory)
    scope = {
        "read": memory.load(x, params["unit"], True),
        **_words("x", x, params["unit"], memory),
        "anew": lambda *words: words[:-1],
        "shared_address": dynamic.address,
        "copy": dynamic.copy,
        "commit": lambda: None,
        "landed": lambda: None,
        "held_x": lambda slot, inside: (_floats(x, *dynamic.words(x)(slot, inside)), *[0] * (params["words"] - 1)),
        "kept": unravel(params["kept"], 3),
        "inner": unravel(params["inner"], 3),
    }
    text = _body("two_pass", f"{two_pass.PARAMS}, wo, wk", two_pass.source(passes, params))
    counts = two_pass.PARAMS.count(",") + 1, *(loops.unravel_args(params[name], 3) for name in ("kept", "inner"))
    return text, scope, counts


def _reduce(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    x, pre = DType(params["x"]), codegen.decode(params["pre"])
    acc = DType.F32 if pre.dtype is DType.F32 else DType.I64
    scope = {
        "read": memory.load(x, params["lanes"] * params["vector"], True),
        "load_part": memory.load(acc, params["lanes"], False),
        "store_part": memory.store(acc, params["lanes"], False),
        "rows": unravel(params["rows"], 1),
        "inner": unravel(params["inner"], 1),
        "last_to_arrive": memory.last_to_arrive,
        "u64": int,
    }
    text = _body("reduce", f"{reduce.PARAMS}, wr, wk", reduce.source(params, x, pre, acc))
    counts = reduce.PARAMS.count(",") + 1, *(loops.unravel_args(params[name]) for name in ("rows", "inner"))
    return text, scope, counts


def _norm_split(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    x = DType(params["x"])
    scope = {
        "read": memory.load(x, 8, True),
        "inner": unravel(params["depth"], 1),
        "get8": memory.load(DType.F32, 8, False),
        "put8": memory.store(DType.F32, 8, False),
        "put": memory.store(DType.F32, 1, False),
        "last_to_arrive": memory.last_to_arrive,
        "u64": int,
    }
    if params["phase"] == "apply":
        text = _body("apply", f"{norm_split.APPLY}, wk", norm_split.apply_lines(x))
        return text, scope, (norm_split.APPLY.count(",") + 1, loops.unravel_args(params["depth"]))
    text = _body("statistics", f"{norm_split.STATISTICS}, wk", norm_split.statistics_lines(x, params["grouped"]))
    return text, scope, (norm_split.STATISTICS.count(",") + 1, loops.unravel_args(params["depth"]))


def _floats(x: DType, *words: int) -> tuple[np.float32, ...]:
    """`memory.floats`"""
    return tuple(map(np.float32, from_storage(np.array(words, np.uint32).view(x.numpy), x)))


class _Dynamic:
    """The dynamic shared memory of a launch's blocks, by address; what is copied there has landed at once."""

    apart = 1 << 20

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.blocks: list[np.ndarray] = []  # in the order in which they begin

    def address(self, array: np.ndarray) -> int:
        if not any(array is known for known in self.blocks):
            self.blocks.append(array)
        return next(i for i, known in enumerate(self.blocks) if known is array) * self.apart

    def place(self, slot: int, size: int, unit: int = 16) -> np.ndarray:
        block, at = self.blocks[slot // self.apart], slot % self.apart
        assert slot % unit == 0 and at + size <= block.nbytes, f"{size} bytes of shared memory at {at}"
        return block.view(np.uint8)[at : at + size]

    def copy(self, slot: int, address: int, inside: int) -> None:
        self.place(slot, 16)[:] = np.array(self.memory.words(address, inside), np.uint32).view(np.uint8)

    def read(self, slot: int, n: int = 1) -> Any:
        values = self.place(slot, 4 * n, min(4 * n, 16)).view(np.float32)
        return tuple(values) if n > 1 else values[0]

    def write(self, slot: int, *values: np.float32) -> None:
        self.place(slot, 4 * len(values), min(4 * len(values), 16)).view(np.float32)[:] = values

    def words(self, x: DType) -> Callable[[int, int], tuple]:
        """(slot, inside) → 8 elements of x as words."""
        return lambda slot, inside: (
            tuple(self.place(slot, 8 * x.size).view(np.uint32)) if inside else (np.uint32(0),) * (2 * x.size)
        )


def _norm_team(params: dict[str, Value], extra: int, memory: Memory) -> Text:
    x = DType(params["x"])
    dynamic = _Dynamic(memory)

    def theirs(address: int, block: int) -> np.float32:
        own, at = divmod(address, dynamic.apart)
        return dynamic.blocks[own - own % params["cluster"] + block][at // 4]

    def deviations(sums: tuple, origins: tuple, given: tuple) -> tuple:
        away = [v - o for v, o in zip(_floats(x, *given), origins, strict=True)]
        return tuple(s + d for s, d in zip(sums, [*away, *(d * d for d in away)], strict=True))

    def scaled(given: tuple, means: tuple, scales: tuple) -> tuple:
        return tuple((v - m) * s for v, m, s in zip(_floats(x, *given), means, scales, strict=True))

    def read_words(address: int, inside: int) -> tuple:
        return memory.words(address, inside, 2 * x.size)

    def arrive(counters: int, tid: int) -> Generator[None]:
        yield
        if tid == 0:
            memory.atomic_add(counters, 1)

    def await_all(counters: int, blocks: int, tid: int) -> Generator[None]:
        yield  # so that all threads of a block see the same number
        while memory.atomic_add(counters, 0) < blocks:
            yield

    def leave(counters: int, blocks: int, tid: int) -> None:
        if tid == 0 and memory.atomic_add(counters + 4, 1) == blocks - 1:
            memory.atomic_add(counters, -blocks)
            memory.atomic_add(counters + 4, -blocks)

    scope = {
        "shared_address": dynamic.address, "copy": dynamic.copy, "held_words": dynamic.words(x),
        "deviations": deviations, "scaled": scaled,
        "arrive": arrive, "await_all": await_all, "done": lambda counter, tid: None, "leave": leave, "theirs": theirs,
        "commit": lambda: None, **{f"landed{i}": lambda: None for i in range(norm_team.PARTS)},
        "read_words": read_words, "element": memory.load(x, 1, True), "inner": unravel(params["depth"], 1),
        "own": dynamic.read, "own8": partial(dynamic.read, n=8), "keep": dynamic.write, "keep8": dynamic.write,
        "get4": memory.load(DType.F32, 4, True), "put2": memory.store(DType.F32, 2, False), "quotient": lambda a, b: a // b,
    }  # fmt: skip
    text = _body(
        "norm_team",
        f"{norm_team.PARAMS}, wk",
        norm_team.source(x, params["depth"], params["grouped"], bool(params["cluster"]), params["rows"]),
    )
    text = re.sub(r" (arrive|await_all)\(", r" yield from \1(", text)
    return text, scope, (norm_team.PARAMS.count(",") + 1, loops.unravel_args(params["depth"]))


SOURCES: dict[str, Any] = {
    "attention": attention.source,
    "pointwise": pointwise.source,
    "pool": pool.source,
    "resize": resize.source,
    "scatter": scatter.source,
    "top_k": top_k.source,
    "cumulate": cumulate.source,
}

_TEXTS: dict[str, Callable[[dict[str, Value], int, Memory], Text]] = {
    **{name: _whole(source) for name, source in SOURCES.items()},
    "conv_patch": _conv_patch,
    "depthwise": _depthwise,
    "mlp": _mlp,
    "depthwise_mma": _depthwise_mma,
    "depthwise_sm90": _depthwise_sm90,
    "norm": lambda params, *more: _two_pass(params, *more, passes=norm.PASSES[bool(params["centred"])]),
    "norm_split": _norm_split,
    "norm_team": _norm_team,
    "reduce": _reduce,
    "softmax": lambda params, *more: _two_pass(params, *more, passes=softmax.passes(params)),
    "trees": _trees,
    "gemv": partial(_gemv, tensor_cores=False),
    "gemv_mma": partial(_gemv, tensor_cores=True),
}
