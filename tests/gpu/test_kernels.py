"""Every kernel in many configs on a GPU: right values, zero padding, nothing else written, twice the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from tccompile.arch import ARCHS, Arch
from tccompile.errors import TccompileError, UsageError
from tccompile.expr import DType
from tccompile.plan import Entry, Plan, read_plan
from tccompile.program import Tensor
from tccompile.reference import compute, elements, from_storage, to_storage
from tccompile.runtime.driver import Device, DriverError, open_device
from tccompile.runtime.gpu import GpuEngine, kind
from tccompile.weights import Literal
from tests.gpu.cases import CASES

TOLERANCE = {DType.F16: 2e-3, DType.BF16: 8e-3, DType.F32: 1e-5}
POISON = 0xFF
"""Floats made of it are NaN."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "source" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--plans", None)
        sources = sorted(folder.glob("*.plan")) if folder else list(CASES)
        metafunc.parametrize("source", sources, ids=[s.stem if isinstance(s, Path) else s for s in sources])


class Runner:
    """Runs variants in a child process, and in a new one after a kernel broke the GPU's context there."""

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def check(self, path: Path, number: int) -> str | None:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            wrong = self.pool.submit(check_variant, path, number).result(timeout=60)
        except (BrokenProcessPool, TimeoutError) as error:
            wrong = f"the process ended: {error!r}"
        if wrong and ("CUDA_ERROR" in wrong or "the process ended" in wrong):
            self.close()
        return wrong

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


@cache
def _plan(path: Path) -> tuple[Plan, np.ndarray]:
    plan = read_plan(path)
    return plan, _expected(plan)


def check_variant(path: Path, number: int) -> str | None:
    """In the child process: what is wrong with an entry of a plan, or None."""
    plan, expected = _plan(path)
    try:
        return check(plan, plan.entries[number], open_device(), expected)
    except (TccompileError, DriverError) as error:
        return str(error)


@pytest.mark.gpu
def test_kernels(source: Path | str, gpu: Device, runner: Runner, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    paths = [source] if isinstance(source, Path) else _compiled(source, gpu, request.config.getoption("--all"), tmp_path)
    failures, checked = [], 0
    for path in paths:
        plan = read_plan(path)
        for number, entry in enumerate(plan.entries):
            if _runs_here(plan, entry, gpu):
                checked += 1
                step = entry.sections[0].steps[0]
                if wrong := runner.check(path, number):
                    failures.append(f"{entry.sections[0].arch} {step.kernel} {dict(step.config)}: {wrong}")
    if not checked:
        pytest.skip(f"nothing in it runs on {gpu}")
    assert not failures, f"{len(failures)} of {checked} variants are wrong:\n" + "\n".join(failures)


def _compiled(case: str, gpu: Device, every: bool, folder: Path) -> list[Path]:
    """Plans with machine code for this GPU, and PTX for older generations with code of their own that the toolchain knows."""
    from tccompile.emit import check_toolchain
    from tests.gpu.build import build_plans

    def known(arch: Arch) -> bool:
        try:
            check_toolchain(arch)
        except UsageError:
            return False
        return True

    own = [a for a in ARCHS.values() if a.cc <= gpu.cc and a.cc[0] == gpu.cc[0] and (a.cc == gpu.cc or not a.suffix)][-1:]
    older = [ARCHS[name] for name in ("sm_61", "sm_75", "sm_80") if ARCHS[name].cc < gpu.cc and ARCHS[name] not in own]
    plans = build_plans([case], own, "cubin", every) + build_plans([case], list(filter(known, older)), "ptx", every)
    paths = [folder / f"{number}.plan" for number in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    return paths or pytest.skip("no kernel for it")


def _runs_here(plan: Plan, entry: Entry, gpu: Device) -> bool:
    arch = ARCHS[entry.sections[0].arch]
    if arch.suffix:
        return arch.cc == gpu.cc
    return arch.cc <= gpu.cc and (kind(plan, entry.sections[0]) == "ptx" or arch.cc[0] == gpu.cc[0])


def _expected(plan: Plan) -> np.ndarray:
    """What the op means, not yet rounded to what it is stored as."""
    program = plan.entries[0].program
    (op,) = program.ops
    values = {}
    for name in op.inputs:
        recipe = program.constants[name]
        assert isinstance(recipe, Literal)
        values[name] = recipe.values
    return compute(op, program, values)


def check(plan: Plan, entry: Entry, gpu: Device, expected: np.ndarray) -> str | None:
    """Run a variant twice, in poisoned memory; None if all is right, else what is wrong."""
    program = entry.program
    y = program.tensors["y"]
    storage = program.tensors[y.storage]
    engine = GpuEngine(plan, entry, gpu, entry.sections[0].arch)
    try:
        stream = int(engine.stream.value)
        is_output = y.name in program.outputs
        addresses = {y.name: engine.staging().address(y.name)} if is_output else {}
        begin = 0 if is_output else engine.section.offsets[storage.name]
        runs = []
        for _ in range(2):
            engine.fill_arena(POISON)
            if is_output:
                memory = engine.staging().memory
                with gpu as cu:
                    cu.cuMemsetD8(memory.address, POISON, memory.size)
                    cu.cuCtxSynchronize()
            engine.launch(addresses, stream)
            engine.synchronize(stream)
            runs.append(
                engine._read(engine.staging().memory.address, engine.staging().memory.size) if is_output else engine.read_arena()
            )
            if engine.read_counters().any():
                return "counters are not zero afterwards"
        whole = runs[0][begin:]
        size = storage.span * y.dtype.size
        buffer = whole[:size].view(y.dtype.numpy)
        wrong = (
            _wrong_values(np.array(elements(buffer, y)), expected, y) or _wrong_padding(buffer, y) or _wrong_rest(whole, size, y)
        )
        if wrong:
            return wrong
        again = runs[1][begin : begin + size]
        return None if np.array_equal(again, whole[:size]) else "the second run's bytes differ"
    finally:
        engine.close()


def _wrong_values(stored: np.ndarray, expected: np.ndarray, y: Tensor) -> str | None:
    if not y.dtype.is_float:
        differ = int((stored != to_storage(expected, y.dtype)).sum())
        return f"{differ} of {stored.size} elements differ" if differ else None
    got, want = from_storage(stored, y.dtype).astype(np.float64), expected.astype(np.float64)
    if np.isnan(got).any():
        first = tuple(map(int, np.argwhere(np.isnan(got))[0]))
        return f"{int(np.isnan(got).sum())} of {got.size} elements are NaN, the first at {first}"
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= TOLERANCE[y.dtype]:
        worst = np.unravel_index(int(np.argmax(np.abs(got - want))), got.shape)
        return f"relative error {error:.2e}; worst at {tuple(map(int, worst))}: {got[worst]:.6g}, not {want[worst]:.6g}"
    return None


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
