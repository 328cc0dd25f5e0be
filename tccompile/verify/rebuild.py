"""What nobody can tell by looking at a plan, made again: its machine code, and the numbers that its launches take.

A step's kernel and config say which launches it has, and an image's kernel and parameters which code: both are made once more
by the installed compiler, and compared with what the plan holds. This says nothing of the weights, which come from the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tccompile.arch import ARCHS, Arch, Feature
from tccompile.emit import toolchain
from tccompile.emit.job import CodegenError, Progress
from tccompile.emit.many import remake
from tccompile.errors import TccompileError, UsageError
from tccompile.ir.ops import Custom, Op
from tccompile.ir.ops.custom import meaning_of
from tccompile.ir.program import Program
from tccompile.kernels import KERNELS, joint
from tccompile.kernels.spec import Code, Config, Launch, Work
from tccompile.plan.file import Plan
from tccompile.plan.format import Image, PlacedLaunch, Section, Step
from tccompile.schedule.choose import uncopied
from tccompile.schedule.place import Layout


@dataclass(frozen=True)
class Difference:
    """One thing in which a plan differs from what its kernels make, and where."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def differences(plan: Plan, progress: Progress | None = None, jobs: int | None = None) -> list[Difference]:
    """All of a plan's code and launches that its kernels do not make, here and now; none if all are as they should be.

    Raises UsageError if the plan was made by other versions of the tools: they make other code of the same kernels; and
    DeviceError for operators of the user's that are not those which are given.
    """
    _check_tools(plan.producer)
    for op in (op for entry in plan.entries for op in entry.program.ops if isinstance(op, Custom)):
        meaning_of(op)
    launched: set[Code] = set()
    found = [d for number, entry in enumerate(plan.entries) for s in entry.sections for d in _launches(plan, number, s, launched)]
    return [*found, *_code(plan.images, launched, progress, jobs)]


def _check_tools(producer: Mapping[str, str]) -> None:
    from tccompile import __version__

    here = {"tccompile": __version__, **toolchain.versions()}
    other = [f"{name} {producer.get(name, 'unknown')} (here {own})" for name, own in here.items() if producer.get(name) != own]
    if other:
        raise UsageError(f"the plan was made by {', '.join(other)}: its code can be compared where those are installed")


# --- Code ------------------------------------------------------------------------------------------------------------


def _code(
    images: Sequence[Image], launched: Collection[Code], progress: Progress | None, jobs: int | None
) -> Iterator[Difference]:
    """Differences of the code. Only what the kernels themselves ask for is made: another's parameters could say anything."""
    known = [number for number, image in enumerate(images) if Code(image.kernel, image.params) in launched]
    wanted = [(Code(images[n].kernel, images[n].params), ARCHS[images[n].arch], images[n].kind) for n in known]
    again = dict(zip(known, remake(wanted, progress, jobs), strict=True))
    for number, image in enumerate(images):
        place, made = f"code {number} ({image.kernel} for {image.arch}, {image.kind})", again.get(number)
        if made is None:
            yield Difference(place, "no step's kernel launches code of these parameters")
        elif isinstance(made, TccompileError):
            yield Difference(place, f"cannot be made again: {made}")
        elif made != image:
            yield Difference(place, f"{len(image.code)} bytes that are not the {len(made.code)} made again")


# --- Launches --------------------------------------------------------------------------------------------------------


def _launches(plan: Plan, number: int, section: Section, launched: set[Code]) -> Iterator[Difference]:
    """Differences of a section's launches. Adds to `launched` the code that its steps' kernels ask for."""
    program, arch = plan.entries[number].program, ARCHS.get(section.arch)
    if arch is None:  # steps for the CPU engine
        return
    direct = {i: conv for i, (copy, conv) in uncopied(program).items() if not section.steps[copy].launches}
    unwritten = {copy for i, (copy, _) in uncopied(program).items() if i in direct}
    together = section.together
    for i, (op, step) in enumerate(zip(program.ops, section.steps, strict=True)):
        place = f"entry {number} for {section.arch}, step {i} ({type(op).__name__} {op.nodes[0]!r})"
        if i in unwritten or step.within >= 0:
            continue
        try:
            if i in together:
                several = [program.ops[k] for k in together[i]]
                work = _work(joint(step.kernel), several, step, program, arch)
            else:
                own = direct.get(i, op)
                kernel = next((k for k in KERNELS if k.name == step.kernel and isinstance(own, k.realises)), None)
                work = _work(kernel, own, step, program, arch)
        except Exception as error:  # a config that the kernel does not know may make it stumble over anything
            what = error if isinstance(error, CodegenError) else f"{step.kernel} cannot be asked for its launches: {error!r}"
            yield Difference(place, str(what))
            continue
        launched |= {launch.code for launch in work.launches}
        layout = Layout(program, section.offsets)
        yield from (Difference(place, what) for what in _compared(work, step, layout, plan.images, arch))


def _work(kernel: Any, ops: Op | Sequence[Op], step: Step, program: Program, arch: Arch) -> Work:
    """What the step's kernel launches for an op, or for several: a Kernel takes one, a Joint several; None if there is none."""
    if kernel is None:
        raise CodegenError(f"there is no kernel {step.kernel!r} for it")
    if (refusal := kernel.supports(ops, program, arch)) is not None:
        raise CodegenError(f"{step.kernel} does not take it: {refusal}")
    config: Config = dict(step.config)
    if not any(config == known for known in kernel.configs(ops, program, arch)):
        raise CodegenError(f"{step.kernel} has no config {config}")
    return kernel.work(ops, program, config, arch)


def _compared(work: Work, step: Step, layout: Layout, images: Sequence[Image], arch: Arch) -> Iterator[str]:
    if (step.scratch[1], step.counters[1]) != (work.scratch, work.counters):
        sizes = f"{step.scratch[1]} and {step.counters[1]} bytes, not {work.scratch} and {work.counters}"
        yield f"has a workspace and counters of {sizes}"
    if len(step.launches) != len(work.launches):
        yield f"has {len(step.launches)} launches, not {len(work.launches)}"
        return
    for n, (placed, launch) in enumerate(zip(step.launches, work.launches, strict=True)):
        for name, ours, theirs in _parts(placed, launch, step, layout, images, arch):
            if ours != theirs:
                yield f"launch {n} has {name} {ours}, not {theirs}"


def _parts(
    placed: PlacedLaunch, launch: Launch, step: Step, layout: Layout, images: Sequence[Image], arch: Arch
) -> Iterator[tuple[str, object, object]]:
    """What a launch is made of: its name, as the plan has it, and as the kernel does."""
    image = images[placed.image]
    yield "code of", (image.kernel, image.params), (launch.code.kernel, launch.code.params)
    yield "grid", placed.grid, launch.grid
    yield "block", placed.block, launch.block
    yield "shared memory", placed.smem, launch.smem
    yield "cooperative", placed.cooperative, launch.cooperative
    yield "early", placed.early, arch.has(Feature.EARLY_START) and not launch.cooperative
    args = layout.args(launch, step.scratch, step.counters)
    yield "a number of arguments", len(placed.args), len(args)
    for k, (ours, theirs) in enumerate(zip(placed.args, args, strict=False)):
        yield f"argument {k}", ours, theirs
