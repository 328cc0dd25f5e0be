"""The time of every step of an inference, beside the least time that the device's arithmetic and memory allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tccompile.arch import ARCHS, Arch
from tccompile.ir.loops import times as times_of
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.plan.format import Section, Step
from tccompile.runtime.driver import Device


@dataclass(frozen=True)
class Roof:
    """A device's peak rates. Arithmetic is our table's for its generation, by its number of multiprocessors.

    tensor, cuda  TFLOP/s of Tensor Cores in fp16 (0 without them) and of the CUDA cores in fp32
    memory        GB/s by the driver's memory clock and bus width
    """

    tensor: float
    cuda: float
    memory: float

    def flops(self, tensor_cores: bool) -> float:
        """TFLOP/s of a step."""
        return self.tensor if tensor_cores else self.cuda


@dataclass(frozen=True)
class StepProfile:
    """One step.

    us     median of its times between events around it, less what an event adds (0 at least)
    flops  of products (2 for a multiplication with an addition), 0 for other ops; bytes, each tensor moved once
    least  microseconds that the roof allows, None without a roof; share of it: least / us
    times  how often an inference may run it, as a part of a loop; on a GPU the other numbers are of one time
    """

    nodes: tuple[str, ...]
    op: str
    shape: tuple[int, ...]
    kernel: str
    config: Mapping[str, Any]
    tensor_cores: bool
    us: float
    flops: int
    bytes: int
    least: float | None
    times: int = 1

    @property
    def share(self) -> float | None:
        return None if self.least is None or not self.us else self.least / self.us

    @property
    def tflops(self) -> float:
        return self.flops / self.us * 1e-6 if self.us else 0.0

    @property
    def gbps(self) -> float:
        return self.bytes / self.us * 1e-3 if self.us else 0.0


@dataclass(frozen=True)
class Profile:
    """What an inference is made of.

    device  as `Session.describe` says it
    us      median of whole inferences, as they run: independent steps side by side, no events in between
    steps   in the order in which they ran, one at a time
    """

    model: str
    device: str
    on_cpu: bool
    iterations: int
    us: float
    steps: tuple[StepProfile, ...]
    roof: Roof | None

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it, with what follows from the fields."""
        steps = [asdict(s) | {"tflops": s.tflops, "gbps": s.gbps, "share": s.share} for s in self.steps]
        return asdict(self) | {"steps": steps}


def roof(device: Device) -> Roof | None:
    """A GPU's peak rates; None for a generation that our table does not know."""
    arch = _row(device.cc)
    if arch is None:
        return None
    sms, khz, bits = (device.attribute(name) for name in ("MULTIPROCESSOR_COUNT", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH"))
    scale = sms / arch.sms
    return Roof(arch.tensor_tflops * scale, arch.fp32_tflops * scale, 2 * khz * bits / 8 * 1e-6)  # both edges of the clock


def _row(cc: tuple[int, int]) -> Arch | None:
    """The generation of a compute capability: its own, or the last before it of the same major version."""
    rows = [a for a in ARCHS.values() if a.cc[0] == cc[0] and a.cc <= cc]
    return rows[-1] if rows else None


def profiled(
    program: Program, section: Section, times: Sequence[Sequence[float]], roof: Roof | None, whole: float | None = None
) -> tuple[StepProfile, ...]:
    """The steps of a section, from the microseconds of each in several inferences.

    whole  microseconds of all of them when nothing is measured in between: what measuring adds, it adds to each step alike
    """
    medians = [median(us) for us in zip(*times, strict=True)]
    running = sum(any(0 not in launch.grid for launch in step.launches) for step in section.steps)
    extra = 0.0 if whole is None else max(sum(medians) - whole, 0.0) / max(running, 1)
    told = zip(section.steps, medians, times_of(program), strict=True)
    return tuple(_profiled(program, step, max(us - extra, 0.0), roof, often) for step, us, often in told)


def _profiled(program: Program, step: Step, us: float, roof: Roof | None, often: int) -> StepProfile:
    op = program.ops[step.op]
    flops, moved = program.products(op), traffic(op, program)
    least = None
    if roof is not None:
        least = max(flops / roof.flops(step.tensor_cores) * 1e-6, moved / roof.memory * 1e-3)
    shape = program.tensors[op.y].shape
    name = type(op).__name__
    return StepProfile(op.nodes, name, shape, step.kernel, dict(step.config), step.tensor_cores, us, flops, moved, least, often)


def traffic(op: Op, program: Program) -> int:
    """Bytes of the op's operands and result, each moved once. Of what an epilogue reads, no more elements than the result has."""
    tensors = program.tensors
    y = tensors[op.y]
    sizes = {name: min(tensors[name].size, max(y.size, 1)) for name in op.inputs} | {n: tensors[n].size for n in op.operands}
    return y.size * y.dtype.size + sum(size * tensors[name].dtype.size for name, size in sizes.items())
