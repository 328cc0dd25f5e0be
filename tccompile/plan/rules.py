"""What a plan must keep to: every index, offset, size and limit of what a file may say."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import PlanError
from tccompile.ir.extent import Extent
from tccompile.ir.limits import SIZE, check_program, require
from tccompile.ir.memory import COMPARED, Budget, accesses, lifetimes, ordered, whereabouts
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor
from tccompile.ir.weights import Source, extents, leaves
from tccompile.plan.code import has_function, targets
from tccompile.plan.format import (
    MAPPED,
    Address,
    Certificate,
    Contents,
    Entry,
    Family,
    Float,
    Image,
    Int,
    Map,
    Origin,
    PlacedLaunch,
    Section,
)
from tccompile.plan.formulas import Slot, check_formulas, slots
from tccompile.plan.weights import NOT_EVALUATED, left_out

GRID = ((1 << 31) - 1, 65535, 65535)
BLOCK = 1024
SMEM = 227 * 1024
ARGS = 1024


def check_plan(plan: Contents) -> None:
    """Hold a plan to the rules of the format: every index, offset, size and limit. Raises PlanError that names the place."""
    require(plan.entries, "a plan without entries")
    for i, image in enumerate(plan.images):
        with naming(f"code {i}"):
            _check_image(image)
    constants: dict[str, Tensor] = {}
    ends: set[tuple[Any, ...]] = set()
    budget = Budget(COMPARED)
    for i, entry in enumerate((*plan.entries, *(family.highest for family in plan.families))):
        where = f"entry {i}" if i < len(plan.entries) else f"entry {i - len(plan.families)} at its greatest sizes"
        with naming(where):
            check_program(entry.program)
            names = (*entry.program.inputs, *entry.program.outputs)
            cuts = ((count.tensor, *sorted(count.cuts.items())) for count in entry.program.counts)
            ends.add((*((name, entry.program.tensors[name].dtype) for name in names), *cuts))
            require(len(ends) == 1, "has other inputs or outputs, or of another type, than the entries before it")
            for name in entry.program.constants:
                tensor = entry.program.tensors[name]
                require(constants.setdefault(name, tensor) == tensor, f"constant {name!r} has another layout in another entry")
            check_sections(entry, plan.images, budget)
    for name in plan.weights:
        require(name in constants, f"weights of {name!r}, which is no constant")
        size = constants[name].nbytes
        require(plan.size(name) == size, f"weights of {name!r} of {plan.size(name)} bytes, its layout has {size}")
    check_left_out(plan)
    _check_origin(plan.origin, constants)
    for i, certificate in enumerate(plan.certificates):
        with naming(f"certificate {i}"):
            _check_certificate(certificate, plan.entries)


def check_sections(entry: Entry, images: Sequence[Image], budget: Budget) -> None:
    """Hold an entry's steps to the rules of the format. Raises PlanError that names the generation and the step."""
    for section in entry.sections:
        with naming(section.arch):
            _check_section(section, entry.program, images, budget)


def check_member(plan: Contents, entry: Entry) -> None:
    """Hold an entry of a family, which is made when its sizes are first seen, to what `check_plan` holds others to.

    The CPU engine does so. `plan.members` has what a GPU's launches are held to, which takes less time.
    """
    check_program(entry.program)
    check_sections(entry, plan.images, Budget(COMPARED))


NO_PLACE = Address("arena", "", 0)

SIZES, FORMULAS = 16, 1 << 16
"""Sizes and formulas of a family, at most."""


def check_families(families: Sequence[Family]) -> None:
    """Raises PlanError for sizes, formulas and slots that are none."""
    for i, family in enumerate(families):
        with naming(f"family {i}"):
            _check_family(family)


def _check_family(family: Family) -> None:
    require(0 < len(family.sizes) <= SIZES and len(family.formulas) <= FORMULAS, f"{len(family.sizes)} sizes")
    for size in family.sizes:
        numbers = size.low, size.high, size.step
        require(all(type(n) is int for n in numbers) and 0 <= size.low <= size.high < 1 << 31, f"a size of {numbers}")
        require(0 < size.step < 1 << 31, f"a size in steps of {size.step}")
    require(len({size.name for size in family.sizes}) == len(family.sizes), "two sizes of one name")
    product = family.product
    bounds = len(product) == 2 and all(type(n) is int for n in product) and 0 <= product[0] <= product[1]
    require(not product or bounds, f"a product of {product}")
    require(all(type(n) is int for f in family.formulas for n in f[1:]), "a formula of no numbers")
    check_formulas(family.formulas, len(family.sizes))
    require(slots(family.entry) <= len(family.formulas), "a slot that no formula fills")
    for section in family.entry.sections:
        fixed = (
            section.offsets,
            section.arena,
            section.counters,
            [(s.op, s.after, s.scratch[0], s.counters[0]) for s in section.steps],
        )
        require(not slots(fixed), "a place in memory, or an order of steps, that a size decides")
        for launch in (launch for step in section.steps for launch in step.launches):
            # A convolution's last window begins further from an image's edge or less far, as its stride meets the size.
            free: Mapping[str, Any] = {"address": NO_PLACE, "extents": (), "strides": (), "upper": ()}
            maps = [replace(arg, **free) for arg in launch.args if isinstance(arg, Map)]
            told = replace(launch, grid=(1, 1, 1), smem=0, args=(*maps, *[a for a in launch.args if isinstance(a, Slot)]))
            require(not slots(told), "a launch's code, block or tensor map's box that a size decides")
    program = family.entry.program
    require(set(program.inputs) <= set(program.tensors), "an input that is no tensor")
    require(not any(slots(program.tensors.get(name)) for name in program.constants), "a constant whose layout a size decides")
    extents: list[Any] = [n for name in program.inputs for n in program.tensors[name].shape if isinstance(n, Slot)]
    bare = {f[1] for n in extents if (f := family.formulas[n.number])[0] == "size"}
    require(bare == set(range(len(family.sizes))), "a size that is no extent of an input")


def _check_origin(origin: Origin, constants: Mapping[str, Tensor]) -> None:
    require(origin.factor == 0 or 1 <= origin.factor < math.inf, f"its origin: a factor of {origin.factor}")
    for name in origin.decided:
        require(name in origin.weights, f"its origin: {name!r} decided something, and is none of the model's weights")
    for name, held in origin.held.items():
        require(name in constants, f"its origin: values of {name!r}, which is no constant")
        numbers = (held.largest, held.norm, held.loss, held.spread, held.room, *held.sums)
        require(all(n >= 0 for n in numbers), f"its origin: {name!r} has numbers that are no magnitudes")  # NaN is not either
        require(len(held.sums) in (0, 3), f"its origin: {name!r} has {len(held.sums)} sums in place of 3")


def _check_image(image: Image) -> None:
    require(image.kind in ("cubin", "ptx"), f"code of kind {image.kind!r}")
    said = targets(image.kind, image.code)
    require(
        image.arch in ARCHS and image.arch in said,
        f"{image.kind} of {image.arch!r} that says it is for {' or '.join(said) or 'nothing'}",
    )
    require(has_function(image.kind, image.code, image.function), f"it has no function {image.function!r}")


MADE, TIMES = 1 << 27, 64
"""Elements that filling in weights may make: so many, or so many times those that they come from."""


def check_left_out(plan: Contents) -> None:
    """Hold what `fill` would make of a model's weights, on the way and in the end, to a multiple of those."""
    made: dict[str, Extent] = {}
    given: dict[str | int, int] = {}
    for name, (tensor, recipe) in left_out(plan).items():
        try:
            made[name] = extents(recipe)[1] + tensor.span
        except NOT_EVALUATED as error:
            raise PlanError(f"the recipe of the constant {name!r} cannot be evaluated: {error}") from error
        for leaf in leaves(recipe):
            given[leaf.name if isinstance(leaf, Source) else id(leaf.values)] = math.prod(extents(leaf)[0])
    most = max(MADE, TIMES * sum(given.values()))
    if sum(made.values()) > most:
        name = max(made, key=made.__getitem__)
        raise PlanError(
            f"the recipe of the constant {name!r} makes {made[name]} elements, and all {sum(made.values())} of weights that have "
            f"{sum(given.values())}: more than {most} are not filled in"
        )


SEEDED = 4096
"""Values of a reference that a certificate holds, at most."""


def _check_certificate(certificate: Certificate, entries: Sequence[Entry]) -> None:
    require(0 <= certificate.entry < len(entries), f"it is of entry {certificate.entry}")
    require(0 <= certificate.seed < 1 << 32, f"a seed of {certificate.seed}")
    require(certificate.held >= 0, f"{certificate.held} inputs that were held back")
    program = entries[certificate.entry].program
    for name, r in certificate.ranges.items():
        require(name in program.inputs, f"a range of {name!r}, which is no input")
        require(math.isfinite(r.low) and math.isfinite(r.high) and r.low <= r.high, f"input {name!r}: a range of {r}")
        dtype = program.tensors[name].dtype
        held = dtype.is_float or (abs(r.low) < 2**63 and abs(r.high) < 2**63 and math.ceil(r.low) <= math.floor(r.high))
        require(held, f"input {name!r} of {dtype.value}: a range of {r}")
    names = [e.name for e in certificate.outputs]
    require(names == list(program.results), f"its outputs are {names}, the program's {list(program.results)}")
    for e in certificate.outputs:
        count = min(program.tensors[e.name].size, SEEDED)
        fits = e.values.dtype == np.float64 and e.values.shape == (count,) and np.isfinite(e.values).all()
        require(fits, f"output {e.name!r}: expected {count} finite numbers of 64 bits")
        numbers = all(math.isfinite(x) and x >= 0 for x in (e.norm, e.error, e.bound))
        require(numbers, f"output {e.name!r}: a norm of {e.norm}, an error of {e.error}, a bound of {e.bound}")
        held = e.held is None if certificate.held == 0 else e.held is not None and math.isfinite(e.held) and e.held >= 0
        require(held, f"output {e.name!r}: an error of {e.held} on {certificate.held} inputs that were held back")


@contextmanager
def naming(place: str) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None


CPU = "cpu"
"""The generation of a section that only the CPU engine runs."""

STEPS = 1 << 16
"""Steps of a section, at most: for each, those that it comes after are kept as bits."""


def _check_section(section: Section, program: Program, images: Sequence[Image], budget: Budget) -> None:
    require(0 <= section.arena < SIZE and 0 <= section.counters < SIZE, f"an arena of {section.arena} bytes")
    elsewhere = {*program.constants, *program.inputs, *program.outputs}
    for name, offset in section.offsets.items():
        tensor = program.tensors.get(name)
        if tensor is None or tensor.base is not None or name in elsewhere:
            raise PlanError(f"{name!r} has no place in the arena")
        end = offset + tensor.nbytes
        if offset < 0 or end > section.arena:
            raise PlanError(f"tensor {name!r} ends at {end} of {section.arena} bytes of the arena")
        if offset % 16:
            raise PlanError(f"tensor {name!r} at {offset}, which 16 does not divide")
    for op in program.ops:
        for name in (*op.inputs, *op.results):
            owner = program.tensors[name].storage
            if owner not in section.offsets and owner not in elsewhere:
                raise PlanError(f"tensor {owner!r} has no place in the arena")
    require(len(section.steps) <= STEPS, f"{len(section.steps)} steps")
    require([s.op for s in section.steps] == list(range(len(program.ops))), "its steps are not the program's ops in order")
    for i, step in enumerate(section.steps):
        with naming(f"step {i}"):
            require(all(0 <= a < i for a in step.after), f"runs after {step.after}")
            _check_within(section, program, i)
            for what, (start, size), most in (
                ("scratch", step.scratch, section.arena),
                ("counters", step.counters, section.counters),
            ):
                require(start >= 0 and size >= 0 and start + size <= most, f"{what} of {size} bytes at {start} of {most}")
    _check_lifetimes(section, program)
    _check_edges(section, program, budget)
    require(section.arch in ARCHS or section.arch == CPU, "a generation that there is not")
    if section.arch == CPU:
        require(not any(step.launches for step in section.steps), "launches, which the CPU engine does not run")
    else:
        _check_launches(section, program, images)


def _check_within(section: Section, program: Program, number: int) -> None:
    """A step that another one's launches compute has none. Where that is a later one, nothing else reads the result: it may not
    be written."""
    step = section.steps[number]
    if step.within == -1:
        return
    there = 0 <= step.within < len(section.steps) and section.steps[step.within].launches
    require(there and not step.launches, f"is computed within step {step.within}, which has no launches, or by its own")
    if step.within > number:
        storage = program.tensors[program.ops[number].y].storage
        read = [i for i, op in enumerate(program.ops) if any(program.tensors[name].storage == storage for name in op.inputs)]
        own = {step.within, *(i for i, other in enumerate(section.steps) if other.within == step.within)}
        require(
            read and own.issuperset(read) and storage not in program.outputs,
            f"step {step.within} is not all that reads its result",
        )


def _check_lifetimes(section: Section, program: Program) -> None:
    """What is in use at the same time shares no bytes."""
    begin: list[list[tuple[int, Extent, str]]] = [[] for _ in section.steps]
    end: list[list[int]] = [[] for _ in section.steps]
    for name, (first, last) in lifetimes(program, section.within).items():
        if size := program.tensors[name].nbytes:
            begin[first].append((section.offsets[name], size, repr(name)))
            end[last].append(section.offsets[name])
    for i, step in enumerate(section.steps):
        start, size = step.scratch
        if size:
            begin[i].append((start, size, "its workspace"))
            end[i].append(start)
    starts: list[int] = []  # of what is in use, in order
    used: list[tuple[Extent, str]] = []  # where it ends, and what it is
    for i, (new, old) in enumerate(zip(begin, end, strict=True)):
        for start, size, what in new:
            k = bisect_left(starts, start)
            near = [n for n in (k - 1, k) if 0 <= n < len(starts) and starts[n] < start + size and start < used[n][0]]
            if near:
                other = used[near[0]][1]
                raise PlanError(f"step {i} ({_called(program.ops[i])}): {what} lies over {other}, which is in use")
            starts.insert(k, start)
            used.insert(k, (start + size, what))
        for start in old:
            k = bisect_left(starts, start)
            del starts[k], used[k]


def _check_edges(section: Section, program: Program, budget: Budget) -> None:
    """Steps that touch the same bytes, one of them writing, come after each other: see `memory`."""
    spans = [s.scratch for s in section.steps], [s.counters for s in section.steps]
    own = accesses(program, section.offsets, *spans, section.within)
    cooperative = [any(launch.cooperative for launch in step.launches) for step in section.steps]
    reach: list[int] = []  # for each step, all that it comes after, as bits
    for i, (step, needed) in enumerate(zip(section.steps, ordered(own, cooperative, budget), strict=True)):
        before = 0
        for a in step.after:
            before |= reach[a] | 1 << a
        for other in needed:
            if not before >> other & 1:
                what = f"step {i} ({_called(program.ops[i])}) may run at the same time as step {other}"
                raise PlanError(f"{what} ({_called(program.ops[other])}), but they touch the same bytes or must not meet")
        reach.append(before)


def _called(op: Op) -> str:
    return f"{type(op).__name__} {op.nodes[0]!r}"


# --- Launches --------------------------------------------------------------------------------------------------------


class _Places:
    """Bytes that a step's addresses may lie in: of tensors, and of its workspace and counters."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[tuple[Extent, Extent]]] = {}
        self._reach: dict[tuple[str, str], tuple[list[Extent], list[Extent]]] = {}

    def add(self, space: str, name: str, start: Extent, size: Extent) -> None:
        self._spans.setdefault((space, name), []).append((start, start + size))

    def hold(self, address: Address, span: Extent) -> bool:
        """Whether an address and `span` bytes from it on lie in one of them, or it is the address of an empty one."""
        key = address.space, address.name
        if key not in self._reach:
            spans = sorted(self._spans.get(key, ()))
            self._reach[key] = [low for low, _ in spans], [*accumulate((high for _, high in spans), max)]
        starts, ends = self._reach[key]  # how far those reach that begin there or before
        k = bisect_right(starts, address.bytes)
        if k and address.bytes + max(span, 1) <= ends[k - 1]:
            return True
        return not span and (address.bytes, address.bytes) in self._spans.get(key, ())


def _check_launches(section: Section, program: Program, images: Sequence[Image]) -> None:
    """Launches keep to what a GPU can do, and take addresses of what their step reads and writes only.

    The result of a step without launches is not written: those that read it in the program read what it is made of in its place.
    """
    kinds: set[str] = set()
    unwritten: dict[str, tuple[str, ...]] = {}  # and what they are made of
    together = section.together
    for i, (op, step) in enumerate(zip(program.ops, section.steps, strict=True)):
        y = program.tensors[op.y]
        with naming(f"step {i} ({_called(op)})"):
            if step.within >= 0:
                continue
            if not step.launches:
                if y.size:
                    require(op.also is None, f"no launch writes its result {op.results[-1]!r}")
                    require(y.storage not in program.outputs, f"nothing writes the output {y.storage!r}")
                    unwritten[y.storage] = op.inputs if y.base is None else ()
                continue
            read = [n for name in op.inputs for n in unwritten.get(program.tensors[name].storage, (name,))]
            others = [k for k in together.get(i, ()) if k != i]
            read += [name for k in others for name in program.ops[k].inputs]
            results = [name for k in (i, *(k for k in others if k > i)) for name in program.ops[k].results]
            forms = [form for k in (i, *others) for form in program.forms_of(program.ops[k])]
            places = _Places()
            made = [program.ops[k].y for k in others if k < i]  # and need not be written
            for name in (*read, *(part for form in forms for part in form.tensors), *results, *made):
                if program.tensors[name].storage not in unwritten:
                    places.add(*_place(program, section, name))
            places.add("arena", "", *step.scratch)
            places.add("counters", "", *step.counters)
            addresses = [a for launch in step.launches for a in _check_launch(launch, section, images, kinds, places)]
            for name in results:
                own = _Places()
                own.add(*_place(program, section, name))
                written = not program.tensors[name].size or any(own.hold(a, 0) for a in addresses)
                require(written, f"no launch writes its result {name!r}")
    require(len(kinds) <= 1, "code of both kinds")


def _place(program: Program, section: Section, name: str) -> tuple[str, str, Extent, Extent]:
    return *whereabouts(program, section.offsets, name), program.tensors[name].nbytes


def _check_launch(
    launch: PlacedLaunch, section: Section, images: Sequence[Image], kinds: set[str], places: _Places
) -> list[Address]:
    """Check a launch whose addresses must lie in one of the places; its addresses. Adds the kind of its code to those seen."""
    require(0 <= launch.image < len(images), f"there is no code {launch.image}")
    image, (x, y, z) = images[launch.image], launch.grid
    kinds.add(image.kind)
    if image.arch != section.arch:
        raise PlanError(f"code for {image.arch} among that for {section.arch}")
    if not (1 <= x <= GRID[0] and 1 <= y <= GRID[1] and 1 <= z <= GRID[2]):
        raise PlanError(f"a grid of {launch.grid}")
    require(not launch.cooperative or (y, z) == (1, 1), "a cooperative grid of more than one dimension")
    require(not (launch.cooperative and launch.early), "a cooperative launch that starts early")
    if not (1 <= launch.block <= BLOCK and 0 <= launch.smem <= SMEM and len(launch.args) <= ARGS):
        raise PlanError(f"a block of {launch.block} threads, {launch.smem} bytes of shared memory, {len(launch.args)} arguments")
    addresses = []
    for arg in launch.args:
        if isinstance(arg, Int):
            if not -(1 << 31) <= arg.value < 1 << 32:
                raise PlanError(f"{arg.value} in 32 bits")
        elif not isinstance(arg, Float):
            address, span = _check_map(arg) if isinstance(arg, Map) else (arg, 0)
            if not places.hold(address, span):
                raise PlanError(f"bytes {address.bytes} to {address.bytes + span} of {_space(address)} are none of its tensors'")
            addresses.append(address)
    return addresses


def _space(address: Address) -> str:
    return f"{address.space} {address.name!r}" if address.name else f"{address.space!r}"


CORNER = 1 << 7
"""The corners of im2col maps of images are numbers of 8 bits with a sign."""


def _check_map(m: Map) -> tuple[Address, Extent]:
    """Hold a tensor map to what the driver takes (cuTensorMapEncodeTiled, …Im2col); the bytes that it spans."""
    dims, im2col = len(m.extents), m.kind == "im2col"
    size = m.dtype.size if m.dtype in MAPPED else 0
    inner = size * (m.channels if im2col else m.box[0] if m.box else 0)
    fits = (
        size > 0
        and m.kind in ("tiled", "im2col")
        and (dims == 4 if im2col else 1 <= dims <= 5)
        and len(m.strides) == dims - 1
        and len(m.box) == (0 if im2col else dims)
        and len(m.lower) == len(m.upper) == (2 if im2col else 0)
        and len(m.steps) == (2 if im2col else dims)
        and all(1 <= n < 1 << 32 for n in m.extents)
        and all(0 < s < SIZE and s % 16 == 0 for s in m.strides)
        and all(1 <= n <= 256 for n in (*m.box, *([m.channels] if im2col else ())))
        and all(1 <= n <= 8 for n in m.steps)
        and all(-CORNER <= n < CORNER for n in (*m.lower, *m.upper))
        and m.swizzle in (0, 32, 64, 128)
        and inner % 16 == 0
        and m.swizzle in (0, inner)
        and (1 <= m.pixels <= 1024 if im2col else m.pixels == m.channels == 0)
        and m.address.space in ("arena", "weights")
        and m.address.bytes % 16 == 0
    )
    if not fits:
        raise PlanError(f"a tensor map that the hardware does not have: {m}")
    return m.address, m.extents[0] * size + sum((n - 1) * s for n, s in zip(m.extents[1:], m.strides, strict=True))
