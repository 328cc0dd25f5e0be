"""Plans that force a kernel and a config, for the cases of `cases.py`; written here, run where a GPU is.

    python -m tests.gpu.build DIR --arch sm_90a --kind cubin
    python -m tests.gpu.build DIR --arch sm_80,sm_75,sm_61 --kind ptx     adds to what is there, under other names
    python -m tests.gpu.build SMALL --sample 4                            four variants of each kernel, for slow tools
    pytest tests/gpu --plans DIR

Each case becomes one plan whose entries are its variants: every kernel that supports it, with every config (--all) or with a
few, on every generation asked for. Variants whose code spills registers are left out, as the compiler does, and counted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tccompile.arch import ARCHS, Arch
from tccompile.emit import toolchain
from tccompile.emit.job import Job, Progress, SpillError
from tccompile.emit.many import emit
from tccompile.emit.pack import Build, section
from tccompile.errors import UsageError
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.weights import Literal
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Config, Kernel, Work
from tccompile.pipeline import jobs_of
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Image
from tccompile.runtime.generations import archs_of
from tccompile.schedule.choose import Choice, is_sparse, schedule
from tccompile.schedule.place import place
from tests.gpu.cases import CASES, network, program_of

CASES_AT_ONCE = 40
"""Cases whose kernels are compiled, and their plans written, before the next: what is stopped has made most of what it took."""


@dataclass(frozen=True)
class Variant:
    """One way to run a case."""

    kernel: Kernel
    config: Config
    work: Work
    arch: Arch
    kind: str

    @property
    def jobs(self) -> list[Job]:
        return [(launch.code, self.arch, self.kind) for launch in self.work.launches]


def variants(
    case: str, program: Program, archs: Iterable[Arch], kind: str, every: bool, kernels: Iterable[Kernel] = KERNELS
) -> list[Variant]:
    """All kernels that support the case, with every config, and what has the code of other ops; or with the two of least cost
    and one more, by the case's number, and as many that read 2:4 weights compressed."""
    (op,) = program.ops
    found = []
    for arch in archs:
        for kernel in kernels:
            if not isinstance(op, kernel.realises) or kernel.supports(op, program, arch) is not None:
                continue
            offered = list(kernel.configs(op, program, arch))
            offered += [c for own in offered[:1] for c in kernel.shareable(op, program, own, arch)]
            for sparse in (False, True):
                configs = [c for c in offered if is_sparse(c) == sparse]
                if not every and len(configs) > 3:
                    configs.sort(key=lambda c: kernel.cost(op, program, c, arch))
                    configs = [*configs[:2], configs[2 + list(CASES).index(case) % (len(configs) - 2)]]
                found += [Variant(kernel, c, kernel.work(op, program, c, arch), arch, kind) for c in configs]
    return found


def known(archs: Iterable[Arch]) -> list[Arch]:
    """Those that the installed toolchain makes code for."""

    def is_known(arch: Arch) -> bool:
        try:
            toolchain.check(arch)
        except UsageError:
            return False
        return True

    return list(filter(is_known, archs))


def build_plan(case: str, program: Program, wanted: Sequence[Variant], images: Mapping[Job, Image]) -> Plan:
    """A plan with an entry of one step for each variant."""
    index = {image: i for i, image in enumerate(dict.fromkeys(images[job] for v in wanted for job in v.jobs))}
    return Plan(case, {}, tuple(_entry(program, v, images, index) for v in wanted), tuple(index), _weights(program))


def _weights(program: Program) -> dict[str, bytes]:
    weights = {}
    for name, recipe in program.constants.items():
        assert isinstance(recipe, Literal)
        weights[name] = pack_constant(program.tensors[name], recipe.values)
    return weights


def _entry(program: Program, v: Variant, images: Mapping[Job, Image], index: Mapping[Image, int]) -> Entry:
    choice = Choice(v.kernel, v.config, v.work, math.nan, "forced")
    return Entry(program, (section(Build(v.arch.name, v.kind, [choice], place(program, [v.work])), images, index),))


@dataclass(frozen=True)
class Built:
    """Plans of some cases, and the variants left out of them because their code spills registers."""

    plans: list[Plan]
    spilled: list[Variant]


def build_plans(
    cases: Iterable[str],
    targets: Sequence[tuple[Arch, str]],
    every: bool = False,
    sample: int | None = None,
    progress: Progress | None = None,
    kernels: Iterable[Kernel] = KERNELS,
) -> Built:
    """The plans of some cases for generations and kinds, compiled together; `sample` takes at most so many of each kernel."""
    programs = {case: program_of(case) for case in cases}
    wanted = {
        case: [v for arch, kind in targets for v in variants(case, program, [arch], kind, every, kernels)]
        for case, program in programs.items()
    }
    if sample is not None:
        wanted = _sampled(wanted, sample)
    jobs = [job for v in wanted.values() for variant in v for job in variant.jobs]
    spills: frozenset[Job] = frozenset()
    try:
        images = emit(jobs, progress)
    except SpillError as error:
        spills = frozenset(error.jobs)
        images = emit([job for job in jobs if job not in spills], progress)
    spilled = [variant for v in wanted.values() for variant in v if spills.intersection(variant.jobs)]
    kept = {case: [variant for variant in v if not spills.intersection(variant.jobs)] for case, v in wanted.items()}
    return Built([build_plan(case, programs[case], v, images) for case, v in kept.items() if v], spilled)


def _sampled(wanted: Mapping[str, list[Variant]], most: int) -> dict[str, list[Variant]]:
    """At most so many variants of each kernel, spread over its cases and configs."""
    by_kernel: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for case, found in wanted.items():
        for i, v in enumerate(found):
            by_kernel.setdefault((v.kernel.name, v.arch.name), []).append((case, i))
    taken = {
        places[i * len(places) // min(most, len(places))] for places in by_kernel.values() for i in range(min(most, len(places)))
    }
    return {case: [v for i, v in enumerate(found) if (case, i) in taken] for case, found in wanted.items()}


def session_plan(targets: Sequence[tuple[Arch, str]], progress: Progress | None = None) -> Plan:
    """A small network with two branches and entries for batches of 1 and 3, as the compiler would build it."""
    programs = [network(batch) for batch in (1, 3)]
    builds = []
    for p in programs:
        made = [(schedule(p, arch), arch, kind) for arch, kind in targets]
        builds.append([Build(arch.name, kind, c, place(p, [x.work for x in c])) for c, arch, kind in made])
    images = emit([job for of_one in builds for build in of_one for job in jobs_of(build)], progress)
    index = {image: i for i, image in enumerate(dict.fromkeys(images.values()))}
    entries = tuple(
        Entry(p, tuple(section(build, images, index) for build in of_one)) for p, of_one in zip(programs, builds, strict=True)
    )
    return Plan("session", {}, entries, tuple(index), _weights(programs[0]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.build")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--kind", choices=("cubin", "ptx"), default="cubin")
    parser.add_argument("--all", action="store_true", help="every config of every kernel")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N variants of each kernel")
    parser.add_argument("--case", action="append", help="only cases whose name begins so")
    parser.add_argument("--kernel", help="only these kernels, separated by commas")
    args = parser.parse_args()
    targets = [(ARCHS[name], args.kind) for name in archs_of(args.arch.split(","))]
    cases = [c for c in CASES if not args.case or any(c.startswith(p) for p in args.case)]
    args.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def progress(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{done} of {total} kernels, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    kernels = [k for k in KERNELS if not args.kernel or k.name in args.kernel.split(",")]
    suffix = f"{'+'.join(arch.name for arch, _ in targets)}.{args.kind}.plan"
    plans, variants, spilled = 0, 0, Counter[str]()
    step = len(cases) if args.sample is not None else CASES_AT_ONCE
    for first in range(0, len(cases), step):
        built = build_plans(cases[first : first + step], targets, args.all, args.sample, progress, kernels)
        for plan in built.plans:
            plan.save(args.folder / f"{plan.name}.{suffix}")
        plans, variants = plans + len(built.plans), variants + sum(len(p.entries) for p in built.plans)
        spilled.update(f"{v.kernel.name} for {v.arch.name}" for v in built.spilled)
        print(f"{plans} plans with {variants} variants, {min(first + step, len(cases))} of {len(cases)} cases", flush=True)
    if not args.case and not args.kernel and args.sample is None:
        (args.folder / "session").mkdir(exist_ok=True)
        session_plan(targets).save(args.folder / "session" / suffix)
    for what, n in sorted(spilled.items()):
        print(f"{n} variants of {what} spill registers and are left out")


if __name__ == "__main__":
    main()
