"""Recurrent layers on GPUs: the text of every cell run thread by thread, all blocks at once; code for every generation."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tccompile.arch import ARCHS, Arch
from tccompile.emit.compile import resources
from tccompile.ir.ops import Rnn
from tccompile.ir.program import Program
from tccompile.ir.reference import compute
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.types import DType
from tccompile.kernels.codegen import execute
from tccompile.kernels.rnn import RNN
from tccompile.kernels.rnn_text import SIZES, text_of
from tccompile.kernels.spec import I32, Config, Counters, Kernel, Launch, Ptr, Scratch
from tccompile.kernels.text import kernel_code
from tests.gpu.cases import program_of, rnn
from tests.kernels.meanings import names
from tests.kernels.memory import SPACE, Memory
from tests.kernels.support import cases_of
from tests.networks import relative_error
from tests.tiers import usually

ARCH = ARCHS["sm_80"]
MMA, SIMT = RNN
SCRATCH = 1 << 60
COUNTERS = SCRATCH + SPACE


class Machine:
    """All threads of a launch, as generators that are suspended where they wait for others."""

    def __init__(self, launch: Launch, program: Program, scratch: int, values: dict[str, np.ndarray], y: str) -> None:
        self.launch, self.params = launch, dict(launch.code.params)
        self.memory = Memory(program, values, y)
        self.scratch = np.full(scratch, 0xFF, np.uint8)
        self.warps = launch.block // 32
        self.types = [DType(t) for t in self.params["types"]]

    # --- memory

    def bytes(self, address: int, size: int) -> np.ndarray:
        address = int(address)
        if address >= SCRATCH:
            at, buffer = address - SCRATCH, self.scratch
        else:
            k, at = address // SPACE, address % SPACE - SPACE // 2
            buffer = self.memory.buffers[k].view(np.uint8)
        assert at % size == 0 and at >= 0 and at + size <= len(buffer), f"{size} bytes at {at} of {len(buffer)}"
        return buffer[at : at + size]

    def load(self, dtype: DType) -> Callable[..., Any]:
        def read(address: int, inside: int = 1) -> Any:
            if not inside:
                return np.float32(0) if dtype.is_float else 0
            value = from_storage(self.bytes(address, dtype.size).view(dtype.numpy), dtype)[0]
            return np.float32(value) if dtype.is_float else int(value)

        return read

    def store(self, dtype: DType) -> Callable[..., None]:
        def write(address: int, value: Any) -> None:
            self.bytes(address, dtype.size)[:] = to_storage(np.array([value], np.float32), dtype).view(np.uint8)

        return write

    def words(self, address: int, inside: int) -> list[int]:
        return self.bytes(address, 16).view(np.uint32).tolist() if inside else [0] * 4

    # --- running

    def block(self, index: int) -> list[Generator]:
        """The threads of a block."""
        shared = np.full(self.launch.smem // 4 + 4, 0xFFFFFFFF, np.uint32)
        used = self.launch.smem // 4

        def at(address: int, words: int) -> slice:
            assert address % (4 * words) == 0 and 0 <= address // 4 <= used - words, f"shared memory at {address}"
            return slice(address // 4, address // 4 + words)

        def write_sums(address: int, *values: np.float32) -> None:
            shared[at(address, len(values))] = np.array(values, np.float32).view(np.uint32)

        def copy_out(address: int, *values: int) -> None:
            shared[at(address, 4)] = np.array(values, np.uint32)

        x, r, y = self.types
        scope = {
            **names(),
            **{f"read_{n}": self.load(DType(t)) for n, t in self.params["optional"]},
            "read_x": self.load(x), "read_state": self.load(DType.F32), "write_state": self.store(DType.F32),
            "publish": self.store(y), "withhold": lambda a: self.bytes(a, y.size).fill(0xFF),
            "copy_in": self.words, "global_weights": self.words, "copy_out": copy_out,
            "shared_weights": lambda a, inside: shared[at(a, 4)].tolist() if inside else [0] * 4,
            "read_sum": lambda a: shared[at(a, 1)].view(np.float32)[0], "write_sum": write_sums, "write_sums": write_sums,
            "values": lambda *w: floats(w, y), "weights": lambda *w: floats(w, r), "shared_address": lambda a: 0,
            "quotient": lambda a, b: a // b, "wait": lambda *a: ("wait", a), "mma": lambda *a: ("mma", a),
            "grid_barrier": lambda *a: ("grid", a), "sync": lambda: ("block", ()),
        }  # fmt: skip
        text = kernel_code(text_of(**self.params))
        text = re.sub(r"\b(wait|mma|grid_barrier)\(", r"yield \1(", text).replace("cuda.syncthreads()", "yield sync()")
        args = [
            self.memory.pointer(a) if isinstance(a, Ptr)
            else SCRATCH + a.bytes if isinstance(a, Scratch) else COUNTERS if isinstance(a, Counters) else a.value
            for a in self.launch.args
        ]  # fmt: skip
        kernel = execute(text.replace("def kernel(", "def kernel(cuda, "), scope, "kernel")
        same = {
            "blockIdx": SimpleNamespace(x=index), "gridDim": SimpleNamespace(x=self.grid),
            "shared": SimpleNamespace(array=lambda n, kind: None),
        }  # fmt: skip
        return [kernel(SimpleNamespace(threadIdx=SimpleNamespace(x=tid), **same), *args) for tid in range(self.launch.block)]

    def run(self, grid: int, said: int | None = None) -> np.ndarray:
        """What a launch of `grid` blocks writes; an assertion fails where all wait. `said`: of how many blocks they are told."""
        self.grid = said or grid
        threads = [t for index in range(grid) for t in self.block(index)]
        waiting: list[Any] = [next(t) for t in threads]
        whole = {"grid": len(threads), "block": self.launch.block, "mma": 32, "wait": 1}
        while any(waiting):
            moved = False
            first = 0
            while first < len(threads):
                kind = waiting[first][0] if waiting[first] else None
                size = whole[kind] if kind else 1
                group = range(first, first + size) if kind and first % size == 0 else range(0)
                if group and all(waiting[t] and waiting[t][0] == kind for t in group):
                    answers = self.answer(kind, [waiting[t][1] for t in group])
                    if answers is not None:
                        moved = True
                        for t, answer in zip(group, answers, strict=True):
                            try:
                                waiting[t] = threads[t].send(answer)
                            except StopIteration:
                                waiting[t] = None
                        first += size
                        continue
                first += 1
            assert moved or not any(waiting), f"all wait: {sorted({w[0] for w in waiting if w})}"
        return self.memory.result()

    def answer(self, kind: str, args: list[tuple]) -> list[Any] | None:
        """What the threads of a group go on with, or None while they have to wait."""
        if kind == "mma":
            return fragments(args)
        if kind != "wait":
            return [None] * len(args)
        (one,) = args
        words = [w for k in range(0, len(one), 2) for w in self.words(one[k], one[k + 1])]
        stored = np.array(words, np.uint32).view(np.uint16 if self.types[2].size == 2 else np.uint32)
        return None if (stored == np.iinfo(stored.dtype).max).any() else [words]


def floats(words: Any, dtype: DType) -> list[np.float32]:
    return list(from_storage(np.array(words, np.uint32).view(dtype.numpy), dtype).astype(np.float32))


def fragments(args: list[tuple]) -> list[list[np.float32]]:
    """One mma.sync instruction of 32 lanes, as the PTX ISA's figures lay its operands out."""
    words = len(args[0]) - 4  # 3 for m16n8k8, 6 for m16n8k16
    steps = words // 3
    a, b, c = np.zeros((16, 8 * steps)), np.zeros((8 * steps, 8)), np.zeros((16, 8))
    for lane, given in enumerate(args):
        row, q = lane // 4, lane % 4
        acc, pairs = given[:4], [np.array([w], np.uint32).view(np.float16).astype(float) for w in given[4:]]
        c[row, 2 * q : 2 * q + 2], c[row + 8, 2 * q : 2 * q + 2] = acc[:2], acc[2:]
        for s in range(steps):
            k = slice(8 * s + 2 * q, 8 * s + 2 * q + 2)
            a[row, k], a[row + 8, k], b[k, row] = pairs[2 * s], pairs[2 * s + 1], pairs[2 * steps + s]
    c = (c + a @ b).astype(np.float32)
    return [[*c[lane // 4, lane % 4 * 2 :][:2], *c[lane // 4 + 8, lane % 4 * 2 :][:2]] for lane in range(32)]


def numbers(launch: Launch) -> dict[str, int]:
    """The launch's numbers by name."""
    return dict(zip(SIZES, (a.value for a in launch.args if isinstance(a, I32)), strict=False))


def check(kernel: Kernel, program: Program, config: Config, grid: int | None = None, arch: Arch = ARCH) -> None:
    (op,) = program.ops
    assert kernel.supports(op, program, arch) is None
    values: dict[str, Any] = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    work = kernel.work(op, program, config, arch)
    (launch,) = work.launches
    assert launch.cooperative and launch.block <= 1024
    with np.errstate(all="ignore"):
        machine = Machine(launch, program, work.scratch, values, op.y)
        got = machine.run(grid or launch.grid[0])
    y = program.tensors[op.y]
    whole = from_storage(machine.memory.buffers[machine.memory.base[y.name] // SPACE], y.dtype)
    assert np.isfinite(whole).all()  # padding included
    assert relative_error(got, compute(op, program, values)) <= {DType.F16: 1e-3, DType.BF16: 8e-3, DType.F32: 1e-6}[y.dtype]


QUICK = ("rnn", "gru", "lstm_all", "rnn_fp32", "gru_before_fp32", "lstm_fp32", "lstm_bf16", "gru_wide_state", "rnn_wide_weights")


@pytest.mark.parametrize("case", QUICK)
def test_right_thread_by_thread(case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    kernel = MMA if MMA.supports(op, program, ARCH) is None else SIMT
    best = min(kernel.configs(op, program, ARCH), key=lambda c: kernel.cost(op, program, c, ARCH))
    check(kernel, program, best)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_fewer_blocks_than_parts(arch: str) -> None:
    """A GPU that runs one block at once has it take all parts, whose weights it then reads in every step."""
    program = rnn("r", "gru", 2, 2, 10, (True,), lengths=(2, 1))
    check(MMA, program, {"units": 6, "batch": 8}, grid=1, arch=ARCHS[arch])


def test_weights_that_do_not_fit() -> None:
    """Chunks beyond those that are kept are read from memory, and sequences are taken in several turns."""
    program = rnn("r", "rnn", 2, 5, 290, functions="relu")
    small = replace(ARCHS["sm_61"], smem_block=8 * 1024)
    config = {"units": 8, "batch": 4}
    (launch,) = SIMT.work(program.ops[0], program, config, small).launches
    assert numbers(launch)["kept"] == 4
    check(SIMT, program, config, grid=2, arch=small)


def test_blocks_that_wait_for_ever_are_found() -> None:
    """The test of the test: a block that is not there never publishes what the others need."""
    program = program_of("rnn_fp32")
    (op,) = program.ops
    (launch,) = SIMT.work(op, program, {"units": 8, "batch": 4}, ARCH).launches
    values = {name: recipe.values for name, recipe in program.constants.items()}  # type: ignore[union-attr]
    machine = Machine(replace(launch, grid=(2, 1, 1)), program, 4096, values, op.y)
    with pytest.raises(AssertionError, match="all wait"):
        machine.run(2, said=3)


@pytest.mark.parametrize(
    ("arch", "case"),
    usually(
        [
            ("sm_61", "gru_before_lengths"),
            ("sm_70", "lstm_all"),
            ("sm_75", "lstm"),
            ("sm_90a", "gru_before_lengths"),
            ("sm_120", "lstm_650"),
        ],
        2,
        3,
    ),
)
def test_compiles(arch: str, case: str) -> None:
    program = program_of(case)
    (op,) = program.ops
    kernel = MMA if MMA.supports(op, program, ARCHS[arch]) is None else SIMT
    config = min(kernel.configs(op, program, ARCHS[arch]), key=lambda c: kernel.cost(op, program, c, ARCHS[arch]))
    (launch,) = kernel.work(op, program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0


@pytest.mark.parametrize("case", cases_of(Rnn))
def test_shares(case: str) -> None:
    """Every config's blocks fit the generation, its threads have a unit and a sequence each, and its parts cover all units."""
    program = program_of(case)
    (op,) = program.ops
    for arch in ARCHS.values():
        for kernel in RNN:
            if kernel.supports(op, program, arch) is not None:
                continue
            configs = list(kernel.configs(op, program, arch))
            assert configs
            for config in configs:
                shape = kernel.shape(op, program, config, arch)
                (launch,) = kernel.work(op, program, config, arch).launches
                said = numbers(launch)
                assert shape.units * shape.batch <= launch.block and launch.smem <= arch.smem_block
                assert launch.grid[0] == min(arch.sms, said["D"] * said["parts"])
                assert said["parts"] * shape.units >= said["HP"]
                assert said["turns"] * shape.batch >= said["N"]
                assert said["kept"] in (-(-said["HP"] // 32), said["kept"] // (step := shape.warps * shape.unrolled) * step)


def test_tensor_cores_take_fp16_only() -> None:
    for case, arch, reason in (
        ("lstm_bf16", "sm_80", "bfloat16"),
        ("lstm", "sm_61", "no Tensor Core"),
        ("lstm", "sm_70", "no Tensor"),
    ):
        program = program_of(case)
        assert reason in str(MMA.supports(program.ops[0], program, ARCHS[arch]))
        assert SIMT.supports(program.ops[0], program, ARCHS[arch]) is None
