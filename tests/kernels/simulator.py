"""Runs the text that kernels are generated from, thread by thread, as the Python that it is, over NumPy buffers.

Every access is checked: the address must lie in a tensor's padded extents or between its elements, be a multiple of the
access's width, and be written at most once. What instructions do is stated here once more, in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tccompile.expr import DType
from tccompile.kernels import attention, cumulate, epilogue, pointwise, pool, resize, scatter, top_k
from tccompile.kernels.codegen import execute
from tccompile.kernels.spec import F32, I32, Launch, Ptr, Work
from tccompile.program import Program
from tccompile.reference import elements, from_storage, store, to_storage
from tccompile.reference.expressions import NUMPY

SPACE = 1 << 33
"""Distance of the addresses of two storages."""


class Memory:
    """A program's storages, each far from the others; y's is poisoned."""

    def __init__(self, program: Program, values: Mapping[str, np.ndarray], y: str) -> None:
        self.program = program
        self.buffers: list[np.ndarray] = []
        self.written: list[np.ndarray] = []
        self.base: dict[str, int] = {}
        for name, t in program.tensors.items():
            if t.base is None:
                self.base[name] = len(self.buffers) * SPACE + SPACE // 2
                buffer = np.zeros(t.span, t.dtype.numpy)
                buffer.view(np.uint8)[:] = 0xFF
                if name in values:
                    stored = values[name].dtype == t.dtype.numpy  # bf16 is given as its bits
                    store(buffer, t, values[name] if stored else to_storage(values[name], t.dtype))
                self.buffers.append(buffer)
                self.written.append(np.zeros(buffer.nbytes, np.uint8))
        self.y = program.tensors[y]

    def pointer(self, p: Ptr) -> int:
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

    def functions(self, accesses: epilogue.Accesses) -> dict[str, Any]:
        """The memory functions that generated text calls."""
        return {name: getattr(self, kind)(dtype, n, guarded) for name, (kind, dtype, n, guarded) in accesses.items()}

    def check_written(self, once: bool = True) -> None:
        """All of y's padded extents (once), zeros outside its shape, and nothing else."""
        y = self.y
        owner = self.program.tensors[y.storage]
        k = self.base[owner.name] // SPACE
        counts = self.written[k].reshape(-1, y.dtype.size)
        assert all(not w.any() for i, w in enumerate(self.written) if i != k)
        expected = np.zeros(len(counts), np.uint8)
        elements(expected, y, y.padded)[...] = 1
        counts = counts if once else counts > 0
        assert np.array_equal(counts, np.repeat(expected[:, None], y.dtype.size, 1)), "not just all of y's padded extents"
        whole = elements(self.buffers[k], y, y.padded).copy()
        whole[tuple(slice(0, n) for n in y.shape)] = 0
        assert not any(whole.tobytes()), "the padding is not zero"

    def result(self) -> np.ndarray:
        k = self.base[self.y.storage] // SPACE
        return from_storage(elements(self.buffers[k], self.y), self.y.dtype)


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
        "quick_div": lambda a, b: a / b,
        "select": lambda c, a, b: a if c else b,
        "within": lambda i, low, high: int(low <= i < high),
        "to_int": _saturated(-(2**63), 2**63 - 1), "to_unsigned": _saturated(0, 2**64 - 1), "to_float": np.float32,
        "divide": _divide, "f32": np.float32, "i32": _i32, "i64": int, "boolean": bool, "inf": math.inf, "nan": math.nan,
    }  # fmt: skip


def run(work: Work, program: Program, values: Mapping[str, np.ndarray], y: str) -> Memory:
    """Run the launches of a pointwise, pool or resize kernel."""
    memory = Memory(program, values, y)
    with np.errstate(all="ignore"):
        for launch in work.launches:
            _launch(launch, memory)
    return memory


SOURCES: dict[str, Any] = {
    "attention": attention.source,
    "pointwise": pointwise.source,
    "pool": pool.source,
    "resize": resize.source,
    "scatter": scatter.source,
    "top_k": top_k.source,
    "cumulate": cumulate.source,
}


def _launch(launch: Launch, memory: Memory) -> None:
    params = dict(launch.code.params)
    cuda = SimpleNamespace(blockIdx=SimpleNamespace(x=0, y=0), threadIdx=SimpleNamespace(x=0))
    scope = {**names(), "cuda": cuda}

    if "epilogue" in params:
        text, kinds, accesses = epilogue.source(params.pop("epilogue"))
        scope["store"] = execute(text, {**scope, **memory.functions(accesses)}, "store")
        params["extra"] = len(kinds)
    text, _, accesses = SOURCES[launch.code.kernel](**params)
    # A barrier suspends a thread until all others are there, or have ended.
    barriers = "cuda.syncthreads()" in text
    kernel = execute(text.replace("cuda.syncthreads()", "yield"), {**scope, **memory.functions(accesses)}, "kernel")
    args = []
    for arg in launch.args:
        assert isinstance(arg, Ptr | I32 | F32)
        args.append(memory.pointer(arg) if isinstance(arg, Ptr) else arg.value)
    for cuda.blockIdx.y, cuda.blockIdx.x in np.ndindex(launch.grid[1], launch.grid[0]):
        shared: dict[int, np.ndarray] = {}
        cuda.shared = SimpleNamespace(array=lambda n, kind, shared=shared: shared.setdefault(n, np.full(n, np.nan, kind)))
        threads = []
        for cuda.threadIdx.x in range(launch.block):
            threads.append(kernel(*args))
            if barriers:
                next(threads[-1])
        while barriers and threads:
            waiting = []
            for number, thread in enumerate(threads):
                cuda.threadIdx.x = number
                if next(thread, thread) is not thread:
                    waiting.append(thread)
            assert len(waiting) in (0, len(threads)), "some threads wait at a barrier that others do not reach"
            threads = waiting
