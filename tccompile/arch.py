"""GPU generations: what the code generator must know of each, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


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
