"""What a plan may take, so that a build that exceeds it fails: memory, the file's size, time, and what is not on Tensor Cores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tccompile.arch import ARCHS, Arch
from tccompile.errors import UsageError
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels import joint, kernel
from tccompile.kernels.rates import MEASURED
from tccompile.plan.file import Plan, encoded_size
from tccompile.plan.format import Entry, Section
from tccompile.schedule.choose import uncopied
from tccompile.schedule.timings import Timings

GPUS = {rates.gpu.split()[-1].lower(): arch for arch, rates in MEASURED.items()}
"""GPUs that were measured, and the generation whose code they run."""

SIZE = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TIME = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True)
class Latency:
    """At most so many microseconds, on a GPU of a generation."""

    us: float
    gpu: str
    arch: str


@dataclass(frozen=True)
class Budgets:
    """What a plan may take; None where it may be anything.

    vram          bytes of a GPU's memory that a session of the plan allocates: one arena, the weights, the code
    plan_size     bytes of the file
    tensor_cores  the least share of the floating-point operations that run on Tensor Cores, from 0 to 1
    latency       what an inference may take, by estimate
    no_fp32       whether nothing between inputs and outputs may be stored in fp32
    """

    vram: int | None = None
    plan_size: int | None = None
    tensor_cores: float | None = None
    latency: Latency | None = None
    no_fp32: bool = False

    def __bool__(self) -> bool:
        return self != Budgets()


@dataclass(frozen=True)
class Finding:
    """What a plan takes of one budget: where in the plan, how much, how much is allowed, and whether that is kept."""

    budget: str
    where: str
    takes: str
    allowed: str
    kept: bool

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def parse_size(text: str) -> int:
    """`2GB`, `512MiB` or `65536`, in bytes. Raises UsageError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in SIZE:
        raise UsageError(f"cannot read the size {text!r}; write it as 2GB, 512MiB or 65536")
    return int(float(found[1]) * SIZE[found[2].upper()])


def parse_share(text: str) -> float:
    """`95%` as 0.95. Raises UsageError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if found is None or not 0 <= float(found[1]) <= 100:
        raise UsageError(f"cannot read the share {text!r}; write it as 95%")
    return float(found[1]) / 100


def parse_latency(text: str) -> Latency:
    """`2ms@h200`, or of a generation as `2ms@sm_86`. Raises UsageError."""
    time, _, gpu = text.partition("@")
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|µs|ms|s)\s*", time)
    if found is None or not gpu:
        raise UsageError(f"cannot read the latency {text!r}; write it as 2ms@h200, or of a generation as 2ms@sm_86")
    arch = GPUS.get(gpu.lower(), gpu)
    if arch not in ARCHS:
        raise UsageError(f"unknown GPU {gpu!r}; choose from {', '.join((*GPUS, *ARCHS))}")
    return Latency(float(found[1]) * TIME[found[2]], gpu.lower(), arch)


def findings(plan: Plan, budgets: Budgets, timings: Timings) -> list[Finding]:
    """What the plan takes of each budget. Raises UsageError for a latency on a generation that the plan has no code for."""
    found: list[Finding] = []
    if budgets.plan_size is not None:
        size = encoded_size(plan)
        found.append(_at_most("--max-plan-size", "the file", size, budgets.plan_size))
    if budgets.vram is not None:
        fixed = sum(map(plan.size, plan.weights))
        found += [_at_most("--max-vram", where, fixed + _own(plan, s), budgets.vram) for where, _, s in _sections(plan)]
    if budgets.tensor_cores is not None:
        found += _tensor_cores(plan, budgets.tensor_cores)
    if budgets.latency is not None:
        found += _latencies(plan, budgets.latency, timings)
    if budgets.no_fp32:
        found += [f for number, entry in enumerate(plan.entries) for f in _in_fp32(number, entry.program)]
    return found


def text_of(found: list[Finding]) -> str:
    """A table, those that are not kept first."""
    rows = [("budget", "of", "takes", "allowed", "")]
    ordered = sorted(found, key=lambda f: f.kept)
    rows += [(f.budget, f.where, f.takes, f.allowed, "" if f.kept else "exceeded") for f in ordered]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4])).rstrip() for row in rows)


def _sections(plan: Plan) -> Iterator[tuple[str, Entry, Section]]:
    """Each entry's steps for each generation once, and what to call them."""
    for number, entry in enumerate(plan.entries):
        for arch in dict.fromkeys(s.arch for s in entry.sections):
            name = f"{arch}, entry {number}" if len(plan.entries) > 1 else arch
            yield name, entry, next(s for s in entry.sections if s.arch == arch)


def _own(plan: Plan, section: Section) -> int:
    """Bytes of a GPU's memory for a section's arena, counters and code."""
    images = {launch.image for step in section.steps for launch in step.launches}
    return section.arena + section.counters + sum(len(plan.images[i].code) for i in images)


def _at_most(budget: str, where: str, takes: int, allowed: int) -> Finding:
    return Finding(budget, where, _bytes(takes), _bytes(allowed), takes <= allowed)


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"


def _tensor_cores(plan: Plan, least: float) -> Iterator[Finding]:
    """Of generations that have Tensor Cores. Raises UsageError if the plan has code for none of them."""
    found = [s for s in _sections(plan) if s[2].arch in ARCHS and ARCHS[s[2].arch].tensor_tflops]
    if not found:
        archs = ", ".join(dict.fromkeys(section.arch for _, _, section in _sections(plan)))
        raise UsageError(f"--require-tensor-cores: {archs} has no Tensor Cores; build for a generation that has, too (--arch)")
    for where, entry, section in found:
        p = entry.program
        whole = sum(p.flops(p.ops[s.op]) for s in section.steps)
        there = sum(p.flops(p.ops[s.op]) for s in section.steps if s.tensor_cores)
        share = there / whole if whole else 1.0
        yield Finding("--require-tensor-cores", where, f"{100 * share:.1f}%", f"{100 * least:g}%", share >= least)


def _latencies(plan: Plan, most: Latency, timings: Timings) -> Iterator[Finding]:
    found = [(where, entry, s) for where, entry, s in _sections(plan) if s.arch == most.arch]
    if not found:
        raise UsageError(f"--max-latency on {most.gpu}: the plan has no code for {most.arch}; build for it, too (--arch)")
    for where, entry, section in found:
        time, measured, steps = estimate(entry.program, section, ARCHS[most.arch], timings)
        how = f"{time:.1f} µs ({measured} of {steps} steps measured, others by the cost model)"
        yield Finding("--max-latency", f"{where} on {most.gpu}", how, f"{most.us:g} µs", time <= most.us)


@dataclass(frozen=True)
class StepTime:
    """When a step begins if each starts as soon as those before it have ended, and what it takes, in microseconds; none if it
    launches nothing. Whether that was measured."""

    begin: float
    us: float
    measured: bool


def step_times(program: Program, section: Section, arch: Arch, timings: Timings) -> list[StepTime]:
    """Of each step: by a measured time if there is one, else by the cost model."""
    direct = {conv: op for conv, (copy, op) in uncopied(program).items() if not section.steps[copy].launches}
    found: list[StepTime] = []
    for i, step in enumerate(section.steps):
        begin = max((found[k].begin + found[k].us for k in step.after), default=0.0)
        if not step.launches:
            found.append(StepTime(begin, 0.0, False))
            continue
        if (both := joint(step.kernel)) is not None:
            ops = [program.ops[k] for k in section.together[i]]
            found.append(StepTime(begin, both.cost(ops, program, step.config, arch), False))
            continue
        op, own = direct.get(i, program.ops[step.op]), kernel(step.kernel)
        known = timings.of(op, program, arch)
        time = known.of(own, step.config) if known is not None else None
        us = time.us if time is not None else own.cost(op, program, step.config, arch)
        found.append(StepTime(begin, us, time is not None))
    return found


def estimate(program: Program, section: Section, arch: Arch, timings: Timings) -> tuple[float, int, int]:
    """What an inference takes, in microseconds, if each step starts when those before it have ended; how many steps' times were
    measured; and how many steps launch anything."""
    found = step_times(program, section, arch, timings)
    launched = sum(bool(step.launches) for step in section.steps)
    return max((t.begin + t.us for t in found), default=0.0), sum(t.measured for t in found), launched


def expected_time(entry: Entry, section: Section, timings: Timings) -> float | None:
    """The same microseconds; None for a generation of which nothing is known, as the CPU."""
    return estimate(entry.program, section, ARCHS[section.arch], timings)[0] if section.arch in ARCHS else None


def _in_fp32(number: int, program: Program) -> Iterator[Finding]:
    """Single numbers and masks, which are in fp32 in any mode, do not count."""
    outside = {*program.inputs, *program.outputs}
    written = dict.fromkeys(op.y for op in program.ops if op.y not in outside)
    in_fp32 = [n for n in written if program.tensors[n].dtype is DType.F32]
    kept = [(n, program.storage[n].reason if n in program.storage else "fp32, as all is") for n in in_fp32]
    for name, reason in kept:
        yield Finding("--no-fp32", name, reason, "fp16", False)
    if not kept:
        types = {t.dtype for t in program.tensors.values() if t.storage not in outside and t.size > 1}
        whole = DType.F32 in types and not types & {DType.F16, DType.BF16}
        yield Finding("--no-fp32", f"entry {number}", "fp32 throughout" if whole else "nothing in fp32", "fp16", not whole)
