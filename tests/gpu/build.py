"""Plans that force a kernel and a config, for the cases of `cases.py`; written here, run where a GPU is.

    python -m tests.gpu.build DIR --arch sm_90a --kind cubin
    python -m tests.gpu.build DIR --arch sm_80,sm_75,sm_61 --kind ptx     adds to what is there, under other names
    pytest tests/gpu --plans DIR

Each case becomes one plan whose entries are its variants: every kernel that supports it, with every config (--all) or with a
few, on every generation asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tccompile.arch import ARCHS, Arch
from tccompile.emit import Job, emit
from tccompile.kernels import KERNELS
from tccompile.kernels.spec import Config, Kernel, Work
from tccompile.place import place
from tccompile.plan import Entry, Image, PlacedLaunch, Plan, Section, Step, pack_constant
from tccompile.program import Program
from tccompile.schedule import schedule
from tccompile.weights import Literal
from tests.gpu.cases import CASES, network, program_of


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


def variants(case: str, program: Program, archs: Iterable[Arch], kind: str, every: bool) -> list[Variant]:
    """All kernels that support the case, with every config; or with the two of least cost and one more, by the case's number."""
    (op,) = program.ops
    found = []
    for arch in archs:
        for kernel in KERNELS:
            if not isinstance(op, kernel.realises) or kernel.supports(op, program, arch) is not None:
                continue
            configs = list(kernel.configs(op, program, arch))
            if not every and len(configs) > 3:
                configs.sort(key=lambda c: kernel.cost(op, program, c, arch))
                configs = [*configs[:2], configs[2 + list(CASES).index(case) % (len(configs) - 2)]]
            found += [Variant(kernel, c, kernel.work(op, program, c, arch), arch, kind) for c in configs]
    return found


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
    placed = place(program, [v.work])
    launches = tuple(
        PlacedLaunch(index[images[job]], launch.grid, launch.block, launch.smem, args)
        for job, launch, args in zip(v.jobs, v.work.launches, placed.args[0], strict=True)
    )
    step = Step(0, v.kernel.name, v.config, v.kernel.tensor_cores, "forced", launches, ())
    return Entry(program, (Section(v.arch.name, (step,), placed.offsets, placed.arena, placed.counters),))


def build_plans(cases: Iterable[str], archs: Sequence[Arch], kind: str, every: bool = False, progress=None) -> list[Plan]:
    """The plans of some cases, compiled together."""
    programs = {case: program_of(case) for case in cases}
    wanted = {case: variants(case, program, archs, kind, every) for case, program in programs.items()}
    images = emit([job for v in wanted.values() for variant in v for job in variant.jobs], progress)
    return [build_plan(case, programs[case], v, images) for case, v in wanted.items() if v]


def session_plan(targets: Sequence[tuple[Arch, str]], progress=None) -> Plan:
    """A small network with two branches and entries for batches of 1 and 3, as the compiler would build it."""
    programs = [network(batch) for batch in (1, 3)]
    choices = {(i, t): schedule(p, t[0]) for i, p in enumerate(programs) for t in targets}
    jobs = {(i, t): [[(x.code, *t) for x in c.work.launches] for c in made] for (i, t), made in choices.items()}
    images = emit([job for steps in jobs.values() for step in steps for job in step], progress)
    index = {image: i for i, image in enumerate(dict.fromkeys(images.values()))}

    def section(i: int, target: tuple[Arch, str]) -> Section:
        made, placed = choices[i, target], place(programs[i], [c.work for c in choices[i, target]])
        steps = []
        for number, choice in enumerate(made):
            launches = tuple(
                PlacedLaunch(index[images[job]], launch.grid, launch.block, launch.smem, args)
                for job, launch, args in zip(jobs[i, target][number], choice.work.launches, placed.args[number], strict=True)
            )
            kernel = choice.kernel
            steps.append(
                Step(number, kernel.name, choice.config, kernel.tensor_cores, choice.reason, launches, placed.after[number])
            )
        return Section(target[0].name, tuple(steps), placed.offsets, placed.arena, placed.counters)

    entries = tuple(Entry(p, tuple(section(i, t) for t in targets)) for i, p in enumerate(programs))
    return Plan("session", {}, entries, tuple(index), _weights(programs[0]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.build")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--kind", choices=("cubin", "ptx"), default="cubin")
    parser.add_argument("--all", action="store_true", help="every config of every kernel")
    parser.add_argument("--case", action="append", help="only cases whose name begins so")
    args = parser.parse_args()
    archs = [ARCHS[name] for name in args.arch.split(",")]
    cases = [c for c in CASES if not args.case or any(c.startswith(p) for p in args.case)]
    args.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} kernels, {time.monotonic() - begin:.0f} s ", end="", file=sys.stderr, flush=True)

    plans = build_plans(cases, archs, args.kind, args.all, progress)
    print(file=sys.stderr)
    suffix = f"{'+'.join(a.name for a in archs)}.{args.kind}.plan"
    for plan in plans:
        plan.save(args.folder / f"{plan.name}.{suffix}")
    if not args.case:
        (args.folder / "session").mkdir(exist_ok=True)
        session_plan([(a, args.kind) for a in archs]).save(args.folder / "session" / suffix)
    without = [c for c in cases if c not in {p.name for p in plans}]
    entries = sum(len(p.entries) for p in plans)
    print(f"{len(plans)} plans with {entries} variants" + (f"; no kernel for {', '.join(without)}" if without else ""))


if __name__ == "__main__":
    main()
