"""What a kernel is: which ops it realises, in which configs, at what cost, with which launches, and its code.

description  the op, as the model asked for it
config       what we chose: tile sizes, stages, splits
code         what is compiled: a kernel's name and the parameters of its `build`; shapes are arguments, not parameters, so
             that many steps share one code

A kernel's code is written in one of two ways: as text (`text.TextKernel`), or as a Python function for Numba (`Kernel.build`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tccompile.arch import Arch
from tccompile.errors import TccompileError
from tccompile.ir.extent import Extent, Shape, hint
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.kernels.remembered import remembered

Value = Any
"""A parameter of a config or a build: an int, float, str, bool, or a tuple of these, so that JSON can hold it."""

Config = Mapping[str, Value]
"""One way to run a kernel: its parameters by name, as `--explain` prints them. Empty for a kernel without a choice."""


# --- Arguments of a launch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ptr:
    """The address of a tensor's first element plus `bytes`: a 64-bit unsigned parameter."""

    tensor: str
    bytes: Extent = 0


@dataclass(frozen=True)
class Scratch:
    """The address of the launch's workspace plus `bytes`. Its content is undefined when the step begins."""

    bytes: Extent = 0


@dataclass(frozen=True)
class Counters:
    """The address of the step's counters plus `bytes`: zero before the first inference, and the step leaves them zero."""

    bytes: Extent = 0


@dataclass(frozen=True)
class I32:
    value: Extent


@dataclass(frozen=True)
class F32:
    value: float


@dataclass(frozen=True)
class TiledMap:
    """The address of a tensor map (128 bytes, 64-byte aligned): boxes of a strided array of up to five dimensions.

    Innermost dimension first, as cuTensorMapEncodeTiled takes it: `strides` in bytes, of dimensions 1 and up.
    """

    tensor: str
    bytes: Extent  # offset of the array from the tensor's first element
    extents: Shape
    strides: Shape
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 128  # bytes; 0 for none


@dataclass(frozen=True)
class Im2colMap:
    """The address of a tensor map for implicit GEMM: `pixels` rows of `channels` halves, as cuTensorMapEncodeIm2col takes it.

    Dimensions (C, W, H, N), innermost first; strides in bytes, of W, H and N; corners and steps in the order W, H.
    """

    tensor: str
    extents: tuple[Extent, Extent, Extent, Extent]
    strides: tuple[Extent, Extent, Extent]
    lower: tuple[int, int]
    upper: tuple[int, int]
    steps: tuple[int, int]
    channels: int
    pixels: int
    swizzle: int = 128


Arg = Ptr | Scratch | Counters | I32 | F32 | TiledMap | Im2colMap


# --- Launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """What to compile: `KERNELS[kernel].build(arch, **params)`. Equal codes are compiled once."""

    kernel: str
    params: tuple[tuple[str, Value], ...]


def code(kernel: str, **params: Value) -> Code:
    return Code(kernel, tuple(sorted(params.items())))


@dataclass(frozen=True)
class Launch:
    """One kernel launch: arguments in the order of the compiled function's parameters.

    cooperative  its blocks wait for each other, so they must run at once. Where the GPU has no room for `grid`, it gets fewer
                 blocks: the code takes its share of the work from how many there are
    """

    code: Code
    grid: tuple[Extent, Extent, Extent]
    block: int  # threads
    args: tuple[Arg, ...]
    smem: int = 0  # dynamic shared memory, bytes
    cooperative: bool = False


@dataclass(frozen=True)
class Work:
    """All that realises one op: launches that run one after the other, and the memory that they share."""

    launches: tuple[Launch, ...]
    scratch: Extent = 0  # bytes of workspace
    counters: Extent = 0  # bytes of counters
    within: int = -1  # of an op that launches nothing: the number of the one whose launches compute it too; else -1


@dataclass(frozen=True)
class Function:
    """What `build` gives the compiler: a Python function, its parameters' types, and how it is compiled."""

    function: Callable[..., None]
    signature: Any  # types.void(…)
    threads: int  # the most threads a block has: a launch bound
    blocks: int = 1  # blocks that a multiprocessor should hold at once: caps the registers
    fastmath: bool = False
    cluster: int = 1  # blocks along x that share a cluster (sm_90 and newer); the grid is a multiple of it


# --- Kernels ---------------------------------------------------------------------------------------------------------


class Family(ABC):
    """Codes of one kind, by their parameters. Subclasses state the attributes.

    Those that derive from `Kernel` or `Joint` write their code as a Python function for Numba, in `build`, and tests run the PTX
    that it becomes (tests/kernels/machine.py). Those that derive from `text.TextKernel` write text, in `source`.
    """

    name: str
    tensor_cores: bool = False

    @abstractmethod
    def build(self, arch: Arch, **params: Value) -> Function:
        """The code for one `Code.params`, made without a GPU. Only this may import Numba; the rest of the module may not."""

    def blamed(self, code: Code, arch: Arch, error: Exception) -> TccompileError | None:
        """The error to raise where its code does not compile for a reason that is not ours; None if it is."""
        return None


class Joint(Family):
    """A kernel family of several ops in one launch, given in the program's order. What its methods answer is what those of
    `Kernel` do."""

    @abstractmethod
    def groups(self, program: Program) -> Iterator[tuple[int, Sequence[int]]]:
        """Ops that one launch may compute, by number: the one in whose step it is, and all of them."""

    @abstractmethod
    def supports(self, ops: Sequence[Op], program: Program, arch: Arch) -> str | None: ...

    @abstractmethod
    def configs(self, ops: Sequence[Op], program: Program, arch: Arch) -> Iterator[Config]: ...

    @abstractmethod
    def cost(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> float: ...

    @abstractmethod
    def work(self, ops: Sequence[Op], program: Program, config: Config, arch: Arch) -> Work: ...


class Kernel(Family):
    """A kernel family of one op."""

    realises: type[Op]
    reads_integers: bool = False
    """Whether it reads weights as integers in blocks (`forms.Packed`), and in no other form."""
    stores_twice: bool = False
    """Whether it stores a second result (`Op.also`), where the op has one."""

    @abstractmethod
    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        """None if it can run the op on this generation; else the reason why not, for people."""

    def without_zeros(self, op: Op, program: Program, arch: Arch) -> str | None:
        """Why it offers no config, with `sparse` set, that reads the op's 2:4 weights in their compressed form (`forms.Sparse`);
        None if it does, or if it never does."""
        return None

    @abstractmethod
    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        """The configs worth trying for the op. Only called when `supports` gave None."""

    def takes(self, op: Op, program: Program, config: Config, arch: Arch) -> bool:
        """Whether a config that is worth trying at other sizes can run the op. Only called when `supports` gave None."""
        return config in self.every(op, program, arch)

    @remembered
    def every(self, op: Op, program: Program, arch: Arch) -> list[Config]:
        """All of `configs`, found once for an op."""
        return [*self.configs(op, program, arch)]

    def shareable(self, op: Op, program: Program, config: Config, arch: Arch) -> Iterator[Config]:
        """Configs beside one of `configs`, no faster, but whose code other ops may have: for ranges, whose codes are few."""
        return iter(())

    @abstractmethod
    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        """Estimated time in microseconds."""

    def codes(self, op: Op, program: Program, config: Config, arch: Arch) -> frozenset[Code]:
        """Those of the launches for the op: where kernels are chosen, most are asked for nothing else."""
        return frozenset(launch.code for launch in self.work(op, program, config, arch).launches)

    @abstractmethod
    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        """The launches for the op."""


# --- For cost models -------------------------------------------------------------------------------------------------


def memory_us(tensors: list[Tensor], arch: Arch) -> float:
    """Time to move each tensor once, at the bandwidth that a copy reaches."""
    return sum(hint(math.prod(t.padded)) * t.dtype.size for t in tensors) / (arch.gbps * 1e3 * 0.9)


def traffic_us(op: Op, program: Program, arch: Arch) -> float:
    """Time to read the op's inputs and write its results once; of what only views read, one element for each of y at most."""
    y = program.tensors[op.y]
    read = {n: memory_us([program.tensors[n]], arch) for n in op.inputs}
    for n in read.keys() - {*op.operands}:
        t = program.tensors[n]
        seen = sum(view.tensor == n for view in op.views) * hint(math.prod(y.padded)) * t.dtype.size / (arch.gbps * 1e3 * 0.9)
        read[n] = min(read[n], seen)
    return sum(read.values()) + memory_us([program.tensors[name] for name in op.results], arch)
