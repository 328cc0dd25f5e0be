"""GPU generations: what the code generator must know of each, as frozen data."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Flag, auto

from tccompile.errors import UsageError


class Feature(Flag):
    """What kernels use that only some generations have.

    What a generation multiplies by, sparse operands and types of 8 bits included, is the table of atoms': `kernels/ptx/atoms.py`.
    """

    FENCES = auto()  # fence.acq_rel, which orders memory at less cost than membar; sm_70 has it too, where it is not used
    ASYNC_COPIES = auto()  # cp.async: from global to shared memory without a register
    TENSOR_COPIES = auto()  # the tensor copy engine, and mbarriers that count the bytes it brings
    CLUSTERS = auto()  # blocks that read each other's shared memory
    EARLY_START = auto()  # programmatic dependent launch: a grid starts while those before it still run


NONE = Feature(0)
AMPERE = Feature.FENCES | Feature.ASYNC_COPIES
HOPPER = AMPERE | Feature.TENSOR_COPIES | Feature.CLUSTERS | Feature.EARLY_START


@dataclass(frozen=True)
class Arch:
    """One GPU generation.

    Figures are the CUDA C++ Programming Guide's "Technical Specifications per Compute Capability" and the datasheets of a
    typical card of the generation, for the cost models only: the card that will run a plan is not known. Not a datasheet's are
    sm_90a's 800 TFLOP/s (of 989: what cuBLAS reaches), its memory (between an H100's 3350 GB/s and an H200's 4800), and sm_100's
    500, an estimate for mma.sync, since no kernel uses its tcgen05.
    """

    name: str  # as in sm_80
    cc: tuple[int, int]
    suffix: str  # "a": code for this one generation, with its own instructions
    features: Feature
    smem_block: int  # bytes of shared memory that one block may ask for
    smem_sm: int  # bytes of shared memory of a multiprocessor; a block costs 1 KiB more (added for sm_70 and sm_75)
    threads_sm: int
    blocks_sm: int
    sms: int  # of a typical card
    tensor_tflops: float  # dense fp16 with fp32 accumulation, 0 without Tensor Cores
    fp32_tflops: float
    gbps: float  # memory bandwidth, GB/s
    l2: float  # MiB of L2 cache

    @property
    def target(self) -> tuple[int, int] | tuple[int, int, str]:
        """As the compiler of kernels takes it."""
        return (*self.cc, self.suffix) if self.suffix else self.cc

    def has(self, feature: Feature) -> bool:
        """Whether kernels may use it on this generation."""
        return feature in self.features

    def __post_init__(self) -> None:
        assert self.name == f"sm_{self.cc[0]}{self.cc[1]}{self.suffix}"
        assert self.smem_block < self.smem_sm and self.smem_block % 1024 == 0


KIB = 1024
# fmt: off
ARCHS: dict[str, Arch] = {a.name: a for a in (
    #    name      cc       suf. features   smem_block smem_sm   thr/SM blk   SMs     TC   fp32  GB/s   L2
    Arch("sm_61",  (6, 1),  "",  NONE,       48 * KIB,  96 * KIB, 2048,   32,  10,   0.0,   4.4,  192,  1.5),
    Arch("sm_70",  (7, 0),  "",  NONE,       96 * KIB,  97 * KIB, 2048,   32,  80, 112.0,  14.0,  900,    6),
    Arch("sm_75",  (7, 5),  "",  NONE,       64 * KIB,  65 * KIB, 1024,   16,  46,  60.0,  10.1,  448,    4),
    Arch("sm_80",  (8, 0),  "",  AMPERE,    163 * KIB, 164 * KIB, 2048,   32, 108, 312.0,  19.5, 1555,   40),
    Arch("sm_86",  (8, 6),  "",  AMPERE,     99 * KIB, 100 * KIB, 1536,   16,  68, 119.0,  29.8,  760,    5),
    Arch("sm_89",  (8, 9),  "",  AMPERE,     99 * KIB, 100 * KIB, 1536,   24, 128, 330.0,  82.6, 1008,   72),
    Arch("sm_90a", (9, 0),  "a", HOPPER,    227 * KIB, 228 * KIB, 2048,   32, 132, 800.0,  67.0, 4000,   50),
    Arch("sm_100", (10, 0), "",  HOPPER,    227 * KIB, 228 * KIB, 2048,   32, 148, 500.0,  75.0, 7000,  126),
    Arch("sm_120", (12, 0), "",  HOPPER,     99 * KIB, 100 * KIB, 1536,   24, 170, 400.0, 104.0, 1790,   96),
)}
# fmt: on

PTX = ("sm_61", "sm_80")
"""The generations whose code a plan also carries as PTX, which the driver compiles on GPUs that no machine code fits."""

TEGRA = {(5, 3): "Jetson Nano", (6, 2): "Jetson TX2", (7, 2): "Jetson Xavier", (8, 7): "Jetson Orin", (11, 0): "Jetson Thor"}
"""GPUs that take no machine code of other ones, not even of their own major version: they run PTX."""

CARDS = {
    "sm_61": ("pascal", "p4", "p40", "gtx1080"), "sm_70": ("volta", "v100", "titanv"), "sm_75": ("turing", "t4", "rtx2080"),
    "sm_80": ("ampere", "a100", "a30"), "sm_86": ("a10", "a40", "a6000", "rtx3090"), "sm_89": ("ada", "l4", "l40s", "rtx4090"),
    "sm_90a": ("hopper", "h100", "h200", "gh200"), "sm_100": ("blackwell", "b200", "gb200"), "sm_120": ("rtx5090", "rtxpro6000"),
}  # fmt: skip
"""What somebody may call a generation, for whom an error names it."""

_FORM = re.compile(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)[af]?")


def arch_named(name: str) -> str:
    """The generation that is meant by `sm_86`, `86`, `8.6` or `sm_90`. Raises UsageError, which says what other GPUs run."""
    if name in ARCHS:
        return name
    form = _FORM.fullmatch(name.strip().lower())
    if form is None:
        known = {card: arch for arch, cards in CARDS.items() for card in cards} | {arch: arch for arch in ARCHS}
        plain = re.sub(r"[^a-z0-9_]", "", name.lower().removeprefix("nvidia").removeprefix("geforce"))
        near = difflib.get_close_matches(plain, known, 1, 0.7)
        hint = f"did you mean {known[near[0]]}? " if near else ""
        raise UsageError(f"unknown GPU generation {name!r}; {hint}choose from {', '.join(ARCHS)}, native, or all")
    cc = int(form[1]), int(form[2])
    for arch in ARCHS.values():
        if arch.cc == cc:
            return arch.name
    called = f"{name!r} ({TEGRA[cc]})" if cc in TEGRA else repr(name)
    raise UsageError(f"no code is built for {called}: {what_runs_on(cc)}")


def what_runs_on(cc: tuple[int, int]) -> str:
    """For people, what a GPU of another compute capability than those in the table runs, and how to build it."""
    older = [arch for arch in ARCHS.values() if arch.cc <= cc and not arch.suffix]
    near = [arch.name for arch in older if arch.cc[0] == cc[0]]
    if near and cc not in TEGRA:
        return f"it runs the machine code of {near[-1]}; give --arch {near[-1]}"
    ptx = [arch.name for arch in older if arch.name in PTX]
    if ptx:
        return f"it runs the PTX of {ptx[-1]}, which the driver compiles; give --arch {ptx[-1]}"
    return f"it is older than {next(iter(ARCHS))}, the first that can be built for"
