"""Every kernel in many configs on a GPU: right values, zero padding, nothing else written, twice the same.

What runs is compiled first, all of it together; conftest.py prints a table of the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from tccompile.arch import ARCHS
from tccompile.errors import TccompileError
from tccompile.ir.ops import Attention, Custom
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import elements, from_storage, to_storage
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import FLOAT8, DType
from tccompile.plan.file import Plan, read_plan
from tccompile.plan.format import Entry
from tccompile.runtime.driver import Device, DriverError, open_device
from tccompile.runtime.gpu import GpuEngine
from tccompile.runtime.loaded import Loaded
from tests.gpu.cases import CASES, operators
from tests.gpu.conftest import RESULTS, SPILLED

TOLERANCE = {DType.F16: 5e-4, DType.BF16: 4e-3, DType.F32: 1e-5, DType.F64: 1e-5, DType.E4M3: 1e-2, DType.E5M2: 2e-2}
FLOAT8_SUMS = 1e-3
"""Of sums of floats of 8 bits: of those of 128 products Hopper's wgmma keeps about 14 bits, before they are added in float32."""

POISON = 0xFF
"""Floats made of it are NaN."""

PATIENCE_S = 20
"""After so many seconds a kernel hangs."""


@dataclass(frozen=True)
class Result:
    """How a variant did: its relative error, and what is wrong with it."""

    target: str  # "sm_80 (PTX)"
    kernel: str
    error: float = 0.0
    wrong: str | None = None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "source" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--plans", None)
        sources = sorted(folder.glob("*.plan")) if folder else list(CASES)
        metafunc.parametrize("source", sources, ids=[s.stem if isinstance(s, Path) else s for s in sources])


# --- What runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(gpu: Device, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The plans of the selected cases: machine code for this GPU, and PTX for older generations that the toolchain knows.

    --all is for the machine code; of the PTX, every kernel is tested in a few configs.
    """
    cases = [item.callspec.params["source"] for item in request.session.items if "source" in getattr(item, "fixturenames", ())]
    if not cases or isinstance(cases[0], Path):
        return {}
    from tests.gpu.build import build_plans, known

    own = [a for a in ARCHS.values() if a.cc <= gpu.cc and a.cc[0] == gpu.cc[0] and (a.cc == gpu.cc or not a.suffix)][-1:]
    older = [ARCHS[name] for name in ("sm_61", "sm_75", "sm_80") if ARCHS[name].cc < gpu.cc and ARCHS[name] not in own]
    targets = {"cubin": own, "ptx": known(older)}
    folder = tmp_path_factory.mktemp("plans")
    paths: dict[str, list[Path]] = {case: [] for case in cases}
    for kind_, archs in targets.items():
        every = kind_ == "cubin" and request.config.getoption("--all")
        built = build_plans(paths, [(a, kind_) for a in archs], every)
        request.config.stash[SPILLED] += [f"{v.kernel.name} for {v.arch.name}" for v in built.spilled]
        for plan in built.plans:
            paths[plan.name].append(folder / f"{plan.name}.{kind_}.plan")
            plan.save(paths[plan.name][-1])
    return paths


class Runner:
    """Runs variants in a child process, and in a new one after a kernel broke the GPU's context there."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def check(self, path: Path, number: int) -> Result:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            result = self.pool.submit(check_variant, path, number).result(timeout=PATIENCE_S)
        except (BrokenProcessPool, TimeoutError) as error:
            entry = read_plan(path).entries[number]
            result = Result(entry.sections[0].arch, entry.sections[0].steps[0].kernel, wrong=f"the process ended: {error!r}")
        if result.wrong and ("CUDA_ERROR" in result.wrong or "the process ended" in result.wrong):
            self.close()
        return result

    def close(self) -> None:
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown(cancel_futures=True)
        self.pool = None


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.gpu
def test_kernels(
    source: Path | str, gpu: Device, runner: Runner, compiled: dict[str, list[Path]], request: pytest.FixtureRequest
) -> None:
    results, failures = request.config.stash[RESULTS], []
    checked = 0
    for path in [source] if isinstance(source, Path) else compiled[source]:
        plan = read_plan(path)
        for number, entry in enumerate(plan.entries):
            if _runs_here(plan, entry, gpu):
                checked += 1
                result = runner.check(path, number)
                results.append(result)
                if result.wrong:
                    failures.append(f"{result.target} {result.kernel} {dict(entry.sections[0].steps[0].config)}: {result.wrong}")
    if not checked:
        pytest.skip(f"nothing in it runs on {gpu}")
    if failures:
        pytest.fail(f"{len(failures)} of {checked} variants are wrong:\n" + "\n".join(failures), pytrace=False)


# --- One variant, in the child process -------------------------------------------------------------------------------


@cache
def _plan(path: Path) -> tuple[Plan, np.ndarray]:
    plan = read_plan(path)
    return plan, _expected(plan)


@cache
def _device() -> Device:
    """The GPU, kept: a context takes 0.2 s to make, a variant a tenth of it."""
    return open_device()


def check_variant(path: Path, number: int) -> Result:
    """How an entry of a plan does."""
    plan, expected = _plan(path)
    entry = plan.entries[number]
    section = entry.sections[0]
    target = section.arch + (" (PTX)" if plan.kind(section) == "ptx" else "")
    try:
        error, wrong = check(plan, entry, _device(), expected)
    except (TccompileError, DriverError) as raised:
        error, wrong = 0.0, str(raised)
    return Result(target, section.steps[0].kernel, error, wrong)


def _runs_here(plan: Plan, entry: Entry, gpu: Device) -> bool:
    arch = ARCHS[entry.sections[0].arch]
    if arch.suffix:
        return arch.cc == gpu.cc
    return arch.cc <= gpu.cc and (plan.kind(entry.sections[0]) == "ptx" or arch.cc[0] == gpu.cc[0])


def _expected(plan: Plan) -> np.ndarray:
    """What the op means, not yet rounded to what it is stored as."""
    program = plan.entries[0].program
    (op,) = program.ops
    if isinstance(op, Custom):
        operators()  # which this process has not seen; they import Numba
    values = {}
    for name in op.inputs:
        tensor = program.tensors[name]
        base = program.tensors[tensor.storage]
        stored = elements(np.frombuffer(plan.weight(base.name), base.dtype.numpy), tensor)
        values[name] = from_storage(np.array(stored), tensor.dtype)
    return compute(op, program, values)


def check(plan: Plan, entry: Entry, gpu: Device, expected: np.ndarray) -> tuple[float, str | None]:
    """Run a variant twice, in poisoned memory: its relative error, and None if all is right, else what is wrong."""
    program = entry.program
    y = program.tensors["y"]
    storage = program.tensors[y.storage]
    engine = GpuEngine(Loaded(plan, entry, gpu, entry.sections[0].arch))
    try:
        stream = int(engine.stream.value)
        is_output = y.name in program.outputs
        staging = engine.staging([y.name] if is_output else [], stream)
        addresses = {y.name: staging.address(y.name)} if is_output else {}
        begin = 0 if is_output else engine.section.offsets[storage.name]
        runs = []
        for _ in range(2):
            engine.fill_arena(POISON)
            if is_output:
                with gpu as cu:
                    cu.cuMemsetD8(staging.memory.address, POISON, staging.memory.size)
                    cu.cuCtxSynchronize()
            engine.launch(addresses, stream)
            engine.synchronize(stream)
            runs.append(engine._read(staging.memory.address, staging.memory.size) if is_output else engine.read_arena())
            if engine.read_counters().any():
                return 0.0, "counters are not zero afterwards"
        whole = runs[0][begin:]
        size = storage.nbytes
        buffer = whole[:size].view(y.dtype.numpy)
        error, wrong = _wrong_values(np.array(elements(buffer, y)), expected, y, _tolerance(program))
        wrong = wrong or _wrong_padding(buffer, y) or _wrong_rest(whole, size, y)
        again = runs[1][begin : begin + size]
        return error, wrong or (None if np.array_equal(again, whole[:size]) else "the second run's bytes differ")
    finally:
        engine.close()


def _tolerance(program: Program) -> float:
    """By what the result is stored as; Attention rounds its weights to v's type on the way."""
    op, tensors = program.ops[0], program.tensors
    kinds = [tensors["y"].dtype, *([tensors[op.v].dtype] if isinstance(op, Attention) else [])]
    sums = FLOAT8_SUMS if any(tensors[name].dtype in FLOAT8 for name in op.multiplied) else 0.0
    return max(sums, *(TOLERANCE.get(kind, 0.0) for kind in kinds))


def _wrong_values(stored: np.ndarray, expected: np.ndarray, y: Tensor, tolerance: float) -> tuple[float, str | None]:
    if not y.dtype.is_float:
        differ = int((stored != to_storage(expected, y.dtype)).sum())
        return differ / stored.size, f"{differ} of {stored.size} elements differ" if differ else None
    if y.dtype in FLOAT8:
        expected = from_storage(to_storage(expected, y.dtype), y.dtype)
    got, want = from_storage(stored, y.dtype).astype(np.float64), expected.astype(np.float64)
    if np.isnan(got).any():
        first = tuple(map(int, np.argwhere(np.isnan(got))[0]))
        return np.nan, f"{int(np.isnan(got).sum())} of {got.size} elements are NaN, the first at {first}"
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= tolerance:
        worst = np.unravel_index(int(np.argmax(np.abs(got - want))), got.shape)
        return error, f"relative error {error:.2e}; worst at {tuple(map(int, worst))}: {got[worst]:.6g}, not {want[worst]:.6g}"
    return error, None


def _wrong_padding(buffer: np.ndarray, y: Tensor) -> str | None:
    padding = np.array(elements(buffer, y, y.padded))
    padding[tuple(slice(n) for n in y.shape)] = 0
    return f"{np.count_nonzero(padding)} elements of the padding are not zero" if padding.any() else None


def _wrong_rest(whole: np.ndarray, size: int, y: Tensor) -> str | None:
    """Bytes that are not y's must still be poison: in the storage it shares, and up to the next 256-byte boundary."""
    mine = np.zeros(size // y.dtype.size, bool)
    elements(mine.view(np.uint8), _as_bytes(y), y.padded)[...] = 1
    end = min(-(-size // 256) * 256, whole.size)
    rest = np.concatenate([whole[:size][~np.repeat(mine, y.dtype.size)], whole[size:end]])
    return f"{int((rest != POISON).sum())} bytes outside of it were written" if (rest != POISON).any() else None


def _as_bytes(y: Tensor) -> Tensor:
    """The tensor with elements of one byte."""
    return Tensor(y.name, y.shape, DType.U8, y.padded, y.strides, y.base, y.offset)
