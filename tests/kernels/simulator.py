"""Runs the text that kernels are generated from, thread by thread, as the Python that it is, over NumPy buffers.

It takes the very text that the compiler takes (`TextKernel.source`). What instructions do is stated once more in Python, in
`meanings`; every access is checked, by `memory`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tccompile.arch import Arch
from tccompile.ir.program import Program
from tccompile.kernels import family
from tccompile.kernels.codegen import execute
from tccompile.kernels.spec import F32, I32, Arg, Counters, Launch, Ptr, Scratch, TiledMap, Work
from tccompile.kernels.text import Called, DeviceText, Intrinsic, KernelText, TextKernel, device_code, kernel_code, kinds_of
from tests.kernels.copy_engine import CopyEngine
from tests.kernels.meanings import MEANINGS, WAIT, Cluster, Place, i32, names
from tests.kernels.memory import Memory, SharedMemory

STUCK = "stuck"
"""Of a block: its threads wait for what only another block can give."""

APART = 1 << 20
"""Distance of the addresses of what two blocks share, where blocks run in turns."""


def run(work: Work, program: Program, values: Mapping[str, np.ndarray], y: str, arch: Arch, blocks: int | None = None) -> Memory:
    """Run the launches of a `TextKernel`, or so many blocks of each: the first, the last, and some between."""
    memory = Memory(program, values, y, work.scratch, work.counters)
    with np.errstate(all="ignore"):
        for launch in work.launches:
            kernel = family(launch.code.kernel)
            assert isinstance(kernel, TextKernel)
            _Launch(launch, kernel.source(arch, **dict(launch.code.params)), memory).run(blocks)
    return memory


# --- Text to functions -----------------------------------------------------------------------------------------------


def function(called: Called, place: Place, known: Mapping[str, Any]) -> Any:
    """What the text calls, in Python; `known`: what any text may call."""
    if isinstance(called, Intrinsic):
        assert called.name in MEANINGS, f"{called.name}: what it does is not in tests/kernels/meanings.py"
        return MEANINGS[called.name](place, *called.args)
    assert isinstance(called, DeviceText)
    scope = {name: function(inner, place, known) for name, inner in called.scope.items()}
    return _executed(device_code(called), {**known, **scope}, called.name)


def alone(text: DeviceText, memory: Memory) -> Any:
    """A function that touches nothing but memory, for itself."""
    return function(text, SimpleNamespace(memory=memory), names())  # type: ignore[arg-type]


def _executed(code: str, scope: dict[str, Any], name: str) -> Any:
    """The function of that code, in which a thread is suspended where what it calls is: it is a generator then itself."""
    suspending = {n for n, f in scope.items() if inspect.isgeneratorfunction(f)}
    tree = ast.fix_missing_locations(_Suspended(suspending).visit(ast.parse(code)))
    return execute(ast.unparse(tree), scope, name)


class _Suspended(ast.NodeTransformer):
    """Calls of functions that suspend a thread, and barriers of the block, become suspensions."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            return ast.YieldFrom(node)
        return ast.Yield(None) if isinstance(node.func, ast.Attribute) and node.func.attr == "syncthreads" else node


# --- A launch --------------------------------------------------------------------------------------------------------


class _Block:
    """A block while it runs."""

    def __init__(self, number: int, launch: Launch, memory: Memory, first: int, index: SimpleNamespace) -> None:
        self.number = number
        self.shared = SharedMemory(launch.smem, first)
        self.engine = CopyEngine(memory, self.shared.content, number)
        self.arrays = _Arrays(index, self.shared)
        self.notes: dict[str, Any] = {}


class _Launch:
    """A launch, and the block and the thread whose turn it is: a `meanings.Place`."""

    def __init__(self, launch: Launch, text: KernelText, memory: Memory) -> None:
        self.launch, self.text, self.memory = launch, text, memory
        x, y, z = launch.grid
        self.cuda = SimpleNamespace(
            blockIdx=SimpleNamespace(), threadIdx=SimpleNamespace(x=0), blockDim=SimpleNamespace(x=launch.block),
            gridDim=SimpleNamespace(x=x, y=y, z=z), threadfence=lambda: None,
        )  # fmt: skip
        self.blocks: dict[int, _Block] = {}
        self.clusters: dict[int, Cluster] = {}
        self.kernel = self._kernel()

    @property
    def shared(self) -> SharedMemory:
        return self.block.shared

    @property
    def engine(self) -> CopyEngine:
        return self.block.engine

    @property
    def notes(self) -> dict[str, Any]:
        return self.block.notes

    @property
    def thread(self) -> int:
        return self.cuda.threadIdx.x

    @property
    def cluster(self) -> Cluster:
        number = self.block.number // self.text.cluster
        return self.clusters.setdefault(number, Cluster(self.launch.block * self.text.cluster))

    def shared_of(self, block: int) -> SharedMemory:
        first = self.block.number - self.block.number % self.text.cluster
        assert 0 <= block < self.text.cluster
        return self.blocks[first + block].shared

    def _kernel(self) -> Callable[[], Generator | None]:
        """The kernel with the launch's arguments."""
        known = {**names(), "cuda": self.cuda}
        scope = {name: function(called, self, known) for name, called in self.text.scope.items()}
        kernel = _executed(kernel_code(self.text), {**known, **scope}, "kernel")
        kinds = kinds_of(self.text)
        given = [_kind(arg) for arg in self.launch.args]
        assert given == kinds, f"other arguments than the kernel takes: {', '.join(given)} for {', '.join(kinds)}"
        return partial(kernel, *map(self._value, self.launch.args))

    def _value(self, arg: Arg) -> Any:
        if isinstance(arg, I32 | F32):
            return arg.value
        return self.memory.pointer(arg) if isinstance(arg, Ptr | Scratch | Counters) else arg

    def run(self, blocks: int | None) -> None:
        """Blocks run one after the other; those that wait for each other take turns, from barrier to barrier."""
        x, y, _ = self.launch.grid
        every = range(int(np.prod(self.launch.grid)))
        in_turns = self.launch.cooperative or self.text.cluster > 1
        part = every if in_turns or blocks is None or blocks >= len(every) else _some(every, blocks)
        running: dict[int, Generator[str]] = {}
        waiting = list(part)
        while waiting or running:
            while waiting and (in_turns or not running):
                n = waiting.pop(0)
                first = APART * len(self.blocks) if in_turns else 0
                self.blocks[n] = _Block(n, self.launch, self.memory, first, self.cuda.threadIdx)
                running[n] = self._block(self.blocks[n])
            said = dict.fromkeys(running, "")
            for n in said:
                self.block = self.blocks[n]
                self.cuda.blockIdx.x, self.cuda.blockIdx.y, self.cuda.blockIdx.z = n % x, n // x % y, n // (x * y)
                self.cuda.shared = SimpleNamespace(array=self.block.arrays)
                said[n] = next(running[n], "done")
                if said[n] == "done":
                    del running[n]
                    if not in_turns:
                        del self.blocks[n]
            assert {*said.values()} != {STUCK}, "threads wait for what never comes"

    def _block(self, block: _Block) -> Generator[str]:
        """Each thread up to the next barrier, warp by warp; the threads of a warp wait for each other where they exchange values.

        Suspended whenever all threads have come to a barrier, and where those that have not are `STUCK`.
        """
        count, index = self.launch.block, self.cuda.threadIdx
        threads = {}
        for index.x in range(count):
            threads[index.x] = self.kernel()  # without barriers it is no generator, and has run
        live = {i: t for i, t in threads.items() if t is not None}
        asked: dict[int, Any] = {}
        while live:
            before = len(live)
            asked.clear()
            waiting = True
            while waiting:  # until all are at the barrier, or have ended
                steps = [_run_warp(live, range(warp, warp + 32), asked, index) for warp in range(0, count, 32)]
                waiting = any(asked[i] for i in live)
                if waiting and not (any(steps) or block.engine.advance()):
                    yield STUCK
            assert len(live) in (0, before), "some threads wait at a barrier that others do not reach"
            yield ""
        block.engine.finish()


def _kind(arg: Arg) -> str:
    """The kind of parameter that takes the argument."""
    kinds = {I32: "int", F32: "float", TiledMap: "map", Ptr: "address", Scratch: "address", Counters: "address"}
    return kinds[type(arg)]


def _some(numbers: range, count: int) -> list[int]:
    """The first, the last, and some between, the same ones every time."""
    drawn = np.random.default_rng(len(numbers)).choice(numbers, count, replace=False)
    return sorted({numbers[0], numbers[-1], *map(int, drawn[2:])})


class _Arrays:
    """`cuda.shared.array`: each thread's first, second … is the same array for all threads; floats are NaN at first.

    One of no elements is all of the block's dynamic shared memory.
    """

    def __init__(self, index: SimpleNamespace, dynamic: SharedMemory) -> None:
        self.index, self.dynamic = index, dynamic
        self.arrays: list[np.ndarray] = []
        self.taken: dict[int, int] = {}

    def __call__(self, n: int, kind: Any) -> np.ndarray:
        number = self.taken.get(self.index.x, 0)
        self.taken[self.index.x] = number + 1
        dtype = np.dtype({i32: np.int32, int: np.int64}.get(kind, kind))
        if number == len(self.arrays):
            fresh = np.full(n, np.nan if dtype == np.float32 else -1, dtype)
            self.arrays.append(fresh if n else self.dynamic.content[: self.dynamic.content.nbytes // 4 * 4].view(dtype))
        found = self.arrays[number]
        assert (n == 0 or len(found) == n) and found.dtype == dtype, "threads declare different arrays"
        return found


def _run_warp(live: dict[int, Generator], lanes: range, asked: dict[int, Any], index: SimpleNamespace) -> bool:
    """Until the warp is at a barrier of the block, waits for something, or has ended; whether it has gone on at all."""
    answers: dict[int, Any] = {}
    going, any_step = True, False
    while going:
        ours = [i for i in lanes if i in live]
        kinds = {asked[i] and asked[i][0] for i in ours if i in asked}
        assert len(kinds) <= 1, "threads of a warp wait at different places"
        kind = kinds.pop() if kinds else ""
        if not ours or kind is None or (kind == WAIT and not all(asked[i][1](*asked[i][2:]) for i in ours)):
            break
        if kind not in ("", WAIT):
            assert len(ours) == 32, "a warp exchanges values without some of its threads"
            answers = kind({i: asked[i][1:] for i in ours})
        for index.x in ours:
            try:
                asked[index.x] = live[index.x].send(answers.get(index.x))
            except StopIteration:
                del live[index.x]
        answers, any_step = {}, True
    return any_step
