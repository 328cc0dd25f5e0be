"""GPU generations: what the code generator must know of each, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass


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
    mma: str | None  # the Tensor Core instruction that the kernels use, or None
    cp_async: bool  # asynchronous copies from global to shared memory
    tma: bool  # tensor copy engine, mbarriers, programmatic dependent launch
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
        """As numba.cuda.compile takes it."""
        return (*self.cc, self.suffix) if self.suffix else self.cc

    def __post_init__(self) -> None:
        assert self.name == f"sm_{self.cc[0]}{self.cc[1]}{self.suffix}"
        assert self.smem_block < self.smem_sm and self.smem_block % 1024 == 0
        assert (self.mma is None) == (self.tensor_tflops == 0)


KIB = 1024
# fmt: off
ARCHS: dict[str, Arch] = {a.name: a for a in (
    #    name      cc       suf. mma             async  tma    smem_block smem_sm   thr/SM blk   SMs     TC   fp32  GB/s   L2
    Arch("sm_61",  (6, 1),  "",  None,           False, False,  48 * KIB,  96 * KIB, 2048,   32,  10,   0.0,   4.4,  192,  1.5),
    Arch("sm_70",  (7, 0),  "",  "mma.m8n8k4",   False, False,  96 * KIB,  97 * KIB, 2048,   32,  80, 112.0,  14.0,  900,    6),
    Arch("sm_75",  (7, 5),  "",  "mma.m16n8k8",  False, False,  64 * KIB,  65 * KIB, 1024,   16,  46,  60.0,  10.1,  448,    4),
    Arch("sm_80",  (8, 0),  "",  "mma.m16n8k16", True,  False, 163 * KIB, 164 * KIB, 2048,   32, 108, 312.0,  19.5, 1555,   40),
    Arch("sm_86",  (8, 6),  "",  "mma.m16n8k16", True,  False,  99 * KIB, 100 * KIB, 1536,   16,  68, 119.0,  29.8,  760,    5),
    Arch("sm_89",  (8, 9),  "",  "mma.m16n8k16", True,  False,  99 * KIB, 100 * KIB, 1536,   24, 128, 330.0,  82.6, 1008,   72),
    Arch("sm_90a", (9, 0),  "a", "wgmma",        True,  True,  227 * KIB, 228 * KIB, 2048,   32, 132, 800.0,  67.0, 4000,   50),
    Arch("sm_100", (10, 0), "",  "mma.m16n8k16", True,  True,  227 * KIB, 228 * KIB, 2048,   32, 148, 500.0,  75.0, 7000,  126),
    Arch("sm_120", (12, 0), "",  "mma.m16n8k16", True,  True,   99 * KIB, 100 * KIB, 1536,   24, 170, 400.0, 104.0, 1790,   96),
)}
# fmt: on

PTX = ("sm_61", "sm_80")
"""The generations whose code a plan also carries as PTX, which the driver compiles on GPUs that no machine code fits."""
