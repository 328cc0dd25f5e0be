"""choices + offsets + machine code → Plan: steps, images and weights, once each, whatever the number of sections."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from tccompile.arch import ARCHS, Feature
from tccompile.emit.job import Job
from tccompile.errors import UnsupportedError
from tccompile.ir.forms import Packed
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant, to_storage
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import SMALL, evaluate, same, sources_of
from tccompile.plan.file import Plan
from tccompile.plan.format import Address, Entry, Held, Image, Map, Origin, PlacedLaunch, PlanArg, Section, Step
from tccompile.refit.held import exact, of_values, rounded, summed
from tccompile.schedule.choose import Choice
from tccompile.schedule.place import Placement

THREADS = min(os.cpu_count() or 1, 8)
"""That evaluate constants: NumPy lets others run while it computes."""


@dataclass(frozen=True)
class Build:
    """One entry's program for one generation: what is chosen for each op, where tensors lie, and in what form its code comes.

    kind  "cubin", or "ptx" for a section that the driver compiles
    """

    arch: str
    kind: str
    choices: Sequence[Choice]
    placement: Placement


def pack(
    name: str,
    producer: Mapping[str, str],
    entries: Sequence[tuple[Program, Sequence[Build]]],
    images: Mapping[Job, Image],
    sources: Mapping[str, np.ndarray],
    strip_weights: bool,
    notes: Sequence[str] = (),
    progress: Callable[[int, int], object] = lambda done, total: None,
    origin: Origin | None = None,
    rooms: Mapping[str, float] = MappingProxyType({}),
) -> Plan:
    """The plan. `sources` are the model's initializers, by name, from which the constants' recipes are evaluated.

    progress  is told how many constants of how many have been evaluated
    origin    what is known of the model; the plan adds what its constants are
    rooms     what magnitudes constants may have in any case, by name
    Raises UnsupportedError for weights that float16 cannot hold.
    """
    index = {image: i for i, image in enumerate(dict.fromkeys(images.values()))}
    weights: dict[str, bytes | memoryview] = {}
    known: dict[str, Held] = {}
    packed: list[Entry] = []
    every = frozenset[str]().union(*(_read(builds) for _, builds in entries))
    for number, (program, builds) in enumerate(entries):
        program = _with_alone(_without_unread(program, _read(builds)), every)
        names = _own_names(program, packed, number)
        program, placements = _renamed(program, names), [_moved(b.placement, names) for b in builds]
        builds = [replace(b, placement=p) for b, p in zip(builds, placements, strict=True)]
        kept = [n for n in program.constants if n not in weights and n not in known]
        of_one = partial(_packed, _Constants(program, sources, strip_weights, origin))
        old_name = {new: old for old, new in names.items()}
        progress(0, len(kept))
        threads = ThreadPoolExecutor(THREADS)
        try:
            for done, (constant, (data, held)) in enumerate(zip(kept, threads.map(of_one, kept), strict=True)):
                if data is not None:
                    weights[constant] = data
                if held is not None:
                    known[constant] = replace(held, room=rooms.get(old_name.get(constant, constant), 0.0))
                progress(done + 1, len(kept))
        finally:
            threads.shutdown(cancel_futures=True)  # an interrupt waits for those under way only
        packed.append(Entry(program, tuple(section(b, images, index) for b in builds)))
    origin = Origin() if origin is None else replace(origin, held=known)
    return Plan(name, producer, tuple(packed), tuple(index), weights, tuple(notes), origin=origin)


def _is_weight(constant: str, program: Program) -> bool:
    """Whether it is left out of a plan without weights: the model has it, or what it is made of, and it is not small."""
    tensor = program.tensors[constant]
    return tensor.nbytes > SMALL and bool(sources_of(program.constants[constant]))


class _Constants:
    """A program's constants, and what is packed of them.

    stripped  whether weights are left out
    origin    what the plan tells of the model, to which it adds what constants are; None if it tells nothing
    """

    def __init__(self, program: Program, sources: Mapping[str, np.ndarray], stripped: bool, origin: Origin | None) -> None:
        self.program, self.sources, self.stripped, self.origin = program, sources, stripped, origin
        self.users, self.terms = _users(program), summed(program)


def _packed(of: _Constants, constant: str) -> tuple[bytes | memoryview | None, Held | None]:
    """A constant as it lies in memory, unless it is left out, and what it is, if that is told.

    Raises UnsupportedError for weights that float16 cannot hold.
    """
    tensor, recipe = of.program.tensors[constant], of.program.constants[constant]
    stripped = of.stripped and _is_weight(constant, of.program)
    left_out, told = stripped or of.program.packed(constant) is not None, of.origin if sources_of(recipe) else None
    if left_out and told is None:
        return None, None
    with np.errstate(over="ignore"):
        values = evaluate(exact(recipe), of.sources)
        held = None if told is None else of_values(recipe, values, tensor, of.terms.get(constant), told.factor > 0)
        if left_out:
            return None, held
        values = rounded(recipe, values)
    if constant in of.users:
        _check_range(of.users[constant], tensor, values)
    return pack_constant(tensor, values), held


def section(build: Build, images: Mapping[Job, Image], index: Mapping[Image, int]) -> Section:
    """The steps of a build; `index` numbers the plan's images."""
    arch, placement = ARCHS[build.arch], build.placement
    steps = []
    for number, choice in enumerate(build.choices):
        launches = tuple(
            PlacedLaunch(
                index[images[launch.code, arch, build.kind]],
                launch.grid,
                launch.block,
                launch.smem,
                args,
                launch.cooperative,
                early=arch.has(Feature.EARLY_START) and not launch.cooperative,
            )
            for launch, args in zip(choice.work.launches, placement.args[number], strict=True)
        )
        config, cores, after = dict(choice.config), choice.kernel.tensor_cores, placement.after[number]
        own = placement.scratch[number], placement.own_counters[number]
        steps.append(Step(number, choice.kernel.name, config, cores, choice.reason, launches, after, *own, choice.work.within))
    return Section(build.arch, tuple(steps), placement.offsets, placement.arena, placement.counters)


def _read(builds: Sequence[Build]) -> frozenset[str]:
    """The constants, inputs and outputs whose addresses launches take."""
    args = (arg for build in builds for step in build.placement.args for launch in step for arg in launch)
    addresses = (arg.address if isinstance(arg, Map) else arg for arg in args)
    return frozenset(address.name for address in addresses if isinstance(address, Address))


def _users(program: Program) -> dict[str, str]:
    """The node that multiplies by each constant that is the weights of an op."""
    operands = {name: op.nodes[0] for op in program.ops for name in op.multiplied}
    return {name: node for name, node in operands.items() if name in program.constants}


def _check_range(node: str, tensor: Tensor, values: np.ndarray) -> None:
    """Raise UnsupportedError if weights are infinite in float16."""
    if tensor.dtype is DType.F16 and np.isinf(to_storage(values, DType.F16)).any():
        raise UnsupportedError(
            f"the weights {tensor.name!r} of node {node!r} have values beyond 65504, where float16 ends: "
            "compile with --precision mixed"
        )


def _without_unread(program: Program, read: frozenset[str]) -> Program:
    """The program without forms of constants that are not `read`."""
    kept = {name: tuple(form for form in forms if read.issuperset(form.tensors)) for name, forms in program.forms.items()}
    left = {name for forms in kept.values() for form in forms for name in form.tensors}
    dropped = {name for forms in program.forms.values() for form in forms for name in form.tensors} - left
    return replace(
        program,
        tensors={name: t for name, t in program.tensors.items() if name not in dropped},
        constants={name: recipe for name, recipe in program.constants.items() if name not in dropped},
        forms={name: forms for name, forms in kept.items() if forms},
    )


def _with_alone(program: Program, read: frozenset[str]) -> Program:
    """The program with the forms marked that are all that a plan has of constants which no launch of any entry has `read`."""
    forms = {
        name: tuple(replace(form, alone=name not in read) if isinstance(form, Packed) else form for form in own)
        for name, own in program.forms.items()
    }
    return replace(program, forms=forms)


def _own_names(program: Program, earlier: Sequence[Entry], number: int) -> dict[str, str]:
    """A new name for each constant that another entry has under the same name with other values or layout."""
    names: dict[str, str] = {}
    for name, recipe in program.constants.items():
        for entry in earlier:
            other = entry.program.constants.get(name)
            if other is not None and not (same(other, recipe) and entry.program.tensors[name] == program.tensors[name]):
                names[name] = f"{name}@{number}"
    return names


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with constants by other names."""
    return replace(
        program,
        tensors={
            names.get(n, n): replace(t, name=names.get(n, n), base=t.base and names.get(t.base, t.base))
            for n, t in program.tensors.items()
        },
        constants={names.get(n, n): r for n, r in program.constants.items()},
        ops=tuple(op.renamed(names) for op in program.ops),
        storage={names.get(n, n): s for n, s in program.storage.items()},
        forms={names.get(n, n): tuple(form.renamed(names) for form in forms) for n, forms in program.forms.items()},
    )


def _moved(placement: Placement, names: Mapping[str, str]) -> Placement:
    """The placement with the addresses of constants by other names."""

    def moved(arg: PlanArg) -> PlanArg:
        match arg:
            case Address("weights", name):
                return replace(arg, name=names.get(name, name))
            case Map(address=Address("weights", name)):
                return replace(arg, address=replace(arg.address, name=names.get(name, name)))
        return arg

    return replace(placement, args=tuple(tuple(tuple(map(moved, launch)) for launch in step) for step in placement.args))
