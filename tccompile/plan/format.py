"""The plan: what running a model needs, as dataclasses and as one file. Standard library and NumPy only."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import secrets
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np

from tccompile.arch import ARCHS
from tccompile.errors import LaunchError, PlanError, UsageError
from tccompile.ir.extent import Extent, Shape, round_up
from tccompile.ir.feeds import InputRange
from tccompile.ir.forms import FORMS, Form
from tccompile.ir.limits import SIZE, check_program, require
from tccompile.ir.memory import COMPARED, NOWHERE, Budget, Span, accesses, ordered, whereabouts
from tccompile.ir.metadata import Metadata
from tccompile.ir.ops import OPS, Op
from tccompile.ir.packed import unpacked
from tccompile.ir.program import Program, lifetimes
from tccompile.ir.storage import elements, store, to_storage
from tccompile.ir.tensor import Tensor
from tccompile.ir.types import DType
from tccompile.ir.weights import SMALL, Literal, Recipe, Source, digest, evaluate, extents, leaves
from tccompile.plan import codec
from tccompile.plan.code import has_function, targets
from tccompile.plan.formulas import Formula, Slot, check_formulas, computed, filler, slots
from tccompile.plan.stretch import Stretch
from tccompile.sizes import Size
from tccompile.terminal import plain

FORMAT_VERSION = 14


# --- Arguments of a placed launch: see kernels/spec.py for what each stands for ----------------------------------------


@dataclass(frozen=True)
class Address:
    """A 64-bit address: `bytes` from the start of an arena, of the weights, or of a model input or output.

    space  "arena", "counters", "weights", or "io"; `name` is the constant's or the input's or output's, else empty
    """

    space: str
    name: str
    bytes: Extent


@dataclass(frozen=True)
class Int:
    """A 32-bit integer parameter."""

    value: Extent


@dataclass(frozen=True)
class Float:
    """A 32-bit float parameter."""

    value: float


@dataclass(frozen=True)
class Map:
    """The address of a tensor map, encoded when the plan is loaded. Never of a model input or output.

    kind   "tiled" or "im2col"; lower, upper, channels and pixels are the latter's, box the former's
    dtype  the type of the elements that it copies, one of MAPPED
    """

    kind: str
    dtype: DType
    address: Address
    extents: Shape
    strides: Shape
    steps: tuple[int, ...]
    swizzle: int
    box: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0


PlanArg = Address | Int | Float | Map

MAPPED: Mapping[DType, str] = {
    DType.F16: "FLOAT16", DType.BF16: "BFLOAT16", DType.F32: "FLOAT32", DType.I8: "UINT8", DType.U8: "UINT8",
    DType.E4M3: "UINT8", DType.E5M2: "UINT8",
}  # fmt: skip
"""What the driver calls the types of a tensor map's elements (CUtensorMapDataType); it copies all of 8 bits alike."""


# --- Steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedLaunch:
    """One kernel launch; `image` indexes the plan's images.

    cooperative  its blocks wait for each other: they must run at once, and may be fewer than `grid`, which is then (n, 1, 1)
    early        it may start before the launches that it comes after have ended: its code waits for them (griddepcontrol.wait)
    """

    image: int
    grid: tuple[Extent, Extent, Extent]
    block: int
    smem: int
    args: tuple[PlanArg, ...]
    cooperative: bool = False
    early: bool = False


@dataclass(frozen=True)
class Step:
    """One op as it runs: launches one after the other, when the steps in `after` are done.

    op            index into the entry's program
    kernel        the kernel's name; config, its parameters
    tensor_cores  whether it uses them; `reason` says why this kernel, or why no Tensor Cores
    scratch       where in the arena its workspace begins, and its bytes; counters, the same of its counters
    within        of a step without launches, the earlier one whose launches compute it too; else -1
    """

    op: int
    kernel: str
    config: Mapping[str, int | float | str | bool | tuple]
    tensor_cores: bool
    reason: str
    launches: tuple[PlacedLaunch, ...]
    after: tuple[int, ...]
    scratch: Span = NOWHERE
    counters: Span = NOWHERE
    within: int = -1


@dataclass(frozen=True)
class Section:
    """An entry's steps for one GPU generation, or for "cpu": steps without launches, that only the CPU engine runs.

    offsets   byte offset in the arena of each tensor that owns storage there
    arena     bytes; counters, bytes that are zero before the first inference
    """

    arch: str
    steps: tuple[Step, ...]
    offsets: Mapping[str, int]
    arena: int
    counters: int

    @property
    def within(self) -> list[int]:
        """For each step the earlier one whose launches compute it too, or -1."""
        return [step.within for step in self.steps]

    @property
    def also(self) -> dict[int, int]:
        """The ops that launches of other steps compute, by the number of the step that has these."""
        return {step.within: step.op for step in self.steps if step.within >= 0}


@dataclass(frozen=True)
class Entry:
    """One set of input shapes."""

    program: Program
    sections: tuple[Section, ...]


@dataclass(frozen=True, eq=False)
class Family:
    """Entries that differ by sizes alone: the same steps, with other numbers.

    sizes     what they differ by; each is an extent of some input, as it stands there
    formulas  how numbers follow from the sizes
    entry     the entry, with a Slot in the place of each such number. Its arena has room for all sizes
    """

    sizes: tuple[Size, ...]
    formulas: tuple[Formula, ...]
    entry: Entry

    @cached_property
    def _fill(self) -> Callable[[Sequence[Extent]], Entry]:
        return filler(self.entry)

    def at(self, sizes: Sequence[int]) -> Entry:
        """The entry for sizes in the order of `sizes`. Raises PlanError for formulas that give nothing."""
        return self._fill(computed(self.formulas, sizes))

    @property
    def lowest(self) -> Entry:
        """The entry for the least sizes."""
        return self.at([size.low for size in self.sizes])

    @property
    def highest(self) -> Entry:
        """The entry for the greatest sizes."""
        return self.at([size.all[-1] for size in self.sizes])

    def sizes_of(self, shapes: Mapping[str, Shape]) -> tuple[int, ...] | None:
        """The sizes at which the inputs have these shapes; None if there are none."""
        found: dict[int, int] = {}
        for name, shape in shapes.items():
            extents = self.entry.program.tensors[name].shape
            if len(extents) != len(shape):
                return None
            for extent, n in zip(extents, shape, strict=True):
                if not isinstance(extent, Slot):
                    if extent != n:
                        return None
                elif (formula := self.formulas[extent.number])[0] == "size" and found.setdefault(formula[1], n) != n:
                    return None
        if len(found) < len(self.sizes) or any(found[i] not in size for i, size in enumerate(self.sizes)):
            return None
        sizes = tuple(found[i] for i in range(len(self.sizes)))
        return sizes if self._have(shapes, sizes) else None

    @cached_property
    def _sums(self) -> list[tuple[str, int, int]]:
        """Extents of inputs that follow from the sizes: the input, the axis, and the formula."""
        tensors = self.entry.program.tensors
        extents: list[Any] = [(name, axis, n) for name in self.entry.program.inputs for axis, n in enumerate(tensors[name].shape)]
        open_ = [(name, axis, n.number) for name, axis, n in extents if isinstance(n, Slot)]
        return [(name, axis, formula) for name, axis, formula in open_ if self.formulas[formula][0] != "size"]

    def _have(self, shapes: Mapping[str, Shape], sizes: Sequence[int]) -> bool:
        """Whether extents that follow from the sizes are what they must be."""
        numbers = computed(self.formulas, sizes) if self._sums else ()
        return all(shapes[name][axis] == numbers[formula] for name, axis, formula in self._sums)


@dataclass(frozen=True)
class Image:
    """The code of one kernel for one generation.

    kind      "cubin", or "ptx" for the driver to compile
    function  the name of its entry function
    kernel    the kernel's name, and `params` those of its `build`: what the code can be made of again
    """

    arch: str
    kind: str
    function: str
    code: bytes
    kernel: str
    params: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Expected:
    """What one output must be.

    values  the reference at places evenly spread over the output in row-major order, float64; all of it if it is small
    norm    the reference's, of all elements
    error   of the plan when it was made, ‖out - ref‖ / ‖ref‖ over all elements; `bound`, what is allowed
    held    the largest such error on real inputs, of a plan that was quantized by others than these; None of others
    """

    name: str
    values: np.ndarray
    norm: float
    error: float
    bound: float
    held: float | None = None


@dataclass(frozen=True)
class Certificate:
    """What an entry must compute from inputs that come from a seed (`feeds.seeded`).

    oracle  what computed the reference
    device  where `error` was measured
    inputs  SHA-256 of the inputs' bytes, in the program's order, in hexadecimal
    ranges  between what numbers the values of inputs lie, of those that are not normally distributed
    held    how many sets of real inputs the plan was also measured on, held back from calibration
    """

    entry: int
    seed: int
    inputs: str
    oracle: str
    device: str
    outputs: tuple[Expected, ...]
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    held: int = 0


@dataclass(frozen=True)
class Held:
    """What the values of a constant were when the plan was made, by which `refit` judges others.

    largest  magnitude; infinite if not all were finite
    norm     the root of the sum of squares
    loss     what float16 loses of its subnormals among them, relative to the norm, where that is how they are stored
    spread   how far the norms for each input channel of a product's weights were apart
    sums     of a product's weights in integers: the largest sum of a row's magnitudes, of those above 0, of those below, of all
    room     what magnitudes may be in any case, since results that they are added to have been as large
    """

    largest: float
    norm: float
    loss: float = 0.0
    spread: float = math.inf
    sums: tuple[float, ...] = ()
    room: float = 0.0


@dataclass(frozen=True)
class Exported:
    """What the exporter that wrote the model told of weights of products.

    modules  the module that a weight is part of, by the weight's name
    folded   weights that are no module's own: a normalization behind it was folded into them, or several modules share them
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What a plan knows of the model that it was made from, such that other weights can take the place of the model's.

    weights   SHA-256 of each of the model's initializers, by name; see `ir.weights.digest`
    decided   those among them whose values something else depends on than constants: a shape, an op, a literal
    nodes     of each of the model's nodes a digest of what it computes of the model's inputs and weights, sorted
    held      what constants were that are made of initializers
    factor    how much larger or smaller constants may be, where precision was chosen by what values tensors take; 0 elsewhere
    model     SHA-256 of the model's file, in hexadecimal; empty if it was compiled from memory
    exported  by which adapters find their weights
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    held: Mapping[str, Held] = field(default_factory=dict)
    factor: float = 0.0
    model: str = ""
    exported: Exported = field(default_factory=Exported)


@dataclass(frozen=True)
class Rewritten:
    """What one rewrite did to the model's graph, for people: its `equation`, and the nodes that computed what it replaced."""

    equation: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Plan:
    """A compiled model.

    name          the model's name, as its file or its graph has it
    producer      the tools and versions that made it, by name
    entries       those for fixed shapes, and then of each family the one for its least sizes
    images        machine code, as cubins or PTX
    weights       the bytes of each constant tensor in the layout its entry in `tensors` says (all of `span`); constants that
                  were left out of a stripped plan are missing. Entries with a constant of the same name share it
    notes         what a person may want to know of the whole model, one line each
    certificates  what `tcrun --selftest` holds the plan to
    origin        what `refit` holds other weights to
    families      entries for whole ranges of sizes
    metadata      what the model's file says of itself
    rewrites      what was done to the model's graph before it was lowered
    """

    name: str
    producer: Mapping[str, str]
    entries: tuple[Entry, ...]
    images: tuple[Image, ...]
    weights: Mapping[str, bytes | memoryview | Stretch]
    notes: tuple[str, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    origin: Origin = field(default_factory=Origin)
    families: tuple[Family, ...] = ()
    metadata: Metadata = field(default_factory=Metadata)
    rewrites: tuple[Rewritten, ...] = ()
    digests: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False, metadata={"stored": False})
    """The SHA-256 of weights that lie in a file; checked by `weight`."""
    identity: str = field(init=False, default="", compare=False, repr=False, metadata={"stored": False})
    """The SHA-256 of the header of the file that it was read from, in hexadecimal: of all that is in the file. Empty for a plan
    that was not read from a file, or is something else by now."""

    def weight(self, name: str) -> memoryview:
        """The bytes of a constant tensor; if they come from a file, read from it now, and checked against their SHA-256.

        Raises UsageError if they were left out of the plan, PlanError if the file is damaged.
        """
        if name not in self.weights:
            if (found := self._of_integers(name)) is not None:
                return found
            raise UsageError(
                f"the plan holds no values of {name!r}, it was made without its weights: give the model "
                "they come from (tcrun --weights MODEL.onnx)"
            )
        held = self.weights[name]
        data = held.read() if isinstance(held, Stretch) else memoryview(held).cast("B")
        if name in self.digests and hashlib.sha256(data).digest() != self.digests[name]:
            raise PlanError(
                f"section 'weights {name}': its SHA-256 is not what the header says, the file is damaged, or has been written to "
                "since it was opened"
            )
        return data

    def _of_integers(self, name: str) -> memoryview | None:
        """The bytes of a constant that the plan has as integers in blocks alone; None if it is no such constant."""
        for program in (entry.program for entry in self.entries if name in entry.program.constants):
            if (form := program.packed(name)) is not None:
                stored = {part: program.tensors[part] for part in form.tensors}
                parts = {n: np.frombuffer(self.weight(n), t.dtype.numpy).reshape(t.shape) for n, t in stored.items()}
                zeros = parts[form.zeros] if form.zeros else form.zero
                w = program.tensors[name]
                return pack_constant(w, unpacked(w.shape, parts[form.tensor], parts[form.scales], zeros, form.bits, form.block))
        return None

    def size(self, name: str) -> int:
        """The bytes of a constant tensor in the plan; 0 if they were left out."""
        held = self.weights.get(name, b"")
        return len(held) if isinstance(held, Stretch) else memoryview(held).nbytes

    def kind(self, section: Section) -> str:
        """In what form the section's code comes: "cubin" or "ptx"."""
        return next((self.images[launch.image].kind for step in section.steps for launch in step.launches), "cubin")

    def __repr__(self) -> str:
        program = self.entries[0].program
        named = {n: "x".join(map(str, program.tensors[n].shape)) for n in (*program.inputs, *program.outputs)}
        inputs, outputs = (", ".join(f"{n} {named[n]}" for n in names) for names in (program.inputs, program.outputs))
        archs = ", ".join(dict.fromkeys(s.arch for e in self.entries for s in e.sections))
        more = f", {len(self.entries)} entries" if len(self.entries) > 1 else ""
        return plain(f"<Plan {self.name!r}: {inputs} → {outputs}{more}, for {archs}>")

    def __reduce__(self) -> Any:
        """Pickled, a plan is its file's bytes: weights may lie in a file that is not there where it is read."""
        return from_bytes, (to_bytes(self),)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all: where writing fails, what was there before stays. Raises OSError."""
        write_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file. Raises PlanError if it is damaged or of another format version; runs none of its code."""
        return read_plan(path)


# --- Weights ---------------------------------------------------------------------------------------------------------


def pack_constant(tensor: Tensor, values: np.ndarray) -> memoryview:
    """Logical values as the bytes of `tensor`'s storage: its dtype, its order of axes, zeros in the padding.

    Raises ValueError if they have another shape.
    """
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: values of shape {values.shape} for a tensor of {tensor.shape}")
    full = tensor.padded == tensor.shape and tensor.span == values.size
    buffer = (np.empty if full else np.zeros)(tensor.span, tensor.dtype.numpy)
    store(buffer, tensor, to_storage(values, tensor.dtype))
    return buffer.view(np.uint8).data  # of gigabytes there need not be a copy


def fill(plan: Plan, sources: Mapping[str, np.ndarray]) -> Plan:
    """The plan with the weights that were left out of it, evaluated from the model's initializers by name.

    Raises UsageError if they are not the initializers of the model that the plan was made from.
    """
    weights, missing, told = dict(plan.weights), _left_out(plan), dict(plan.origin.weights)
    for source in (leaf for _, recipe in missing.values() for leaf in leaves(recipe)):
        if not isinstance(source, Source):
            continue
        values = sources.get(source.name)
        if values is None:
            raise UsageError(f"the plan needs the weight {source.name!r}, which the model does not have: is it another model?")
        if values.shape != source.shape or values.dtype.name != source.dtype:
            raise UsageError(
                f"the plan needs the weight {source.name!r} as {source.dtype} {source.shape}, the model has "
                f"{values.dtype.name} {values.shape}: is it another model?"
            )
        if source.name in told and digest(values) != told.pop(source.name):
            raise UsageError(
                f"the weight {source.name!r} has other values than those that the plan was made with; tcrefit puts others into it"
            )
    for name, (tensor, recipe) in missing.items():
        try:
            weights[name] = pack_constant(tensor, evaluate(recipe, sources))
        except NOT_EVALUATED as error:
            raise PlanError(f"the recipe of the constant {name!r} cannot be evaluated: {error}") from error
    return replace(plan, weights=weights)


NOT_EVALUATED = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)
"""What evaluating a recipe raises that says something that no function takes."""


def _left_out(plan: Plan) -> dict[str, tuple[Tensor, Recipe]]:
    """The constants whose values are not in the plan."""
    constants = {
        n: (e.program.tensors[n], r) for e in plan.entries for n, r in e.program.constants.items() if e.program.packed(n) is None
    }
    return {name: constant for name, constant in constants.items() if name not in plan.weights}


# --- What a plan must keep to ----------------------------------------------------------------------------------------

GRID = ((1 << 31) - 1, 65535, 65535)
BLOCK = 1024
SMEM = 227 * 1024
ARGS = 1024


def check_plan(plan: Plan) -> None:
    """Hold a plan to the rules of the format: every index, offset, size and limit. Raises PlanError that names the place."""
    require(plan.entries, "a plan without entries")
    for i, image in enumerate(plan.images):
        with _naming(f"code {i}"):
            _check_image(image)
    constants: dict[str, Tensor] = {}
    ends: set[tuple[Any, ...]] = set()
    budget = Budget(COMPARED)
    for i, entry in enumerate((*plan.entries, *(family.highest for family in plan.families))):
        where = f"entry {i}" if i < len(plan.entries) else f"entry {i - len(plan.families)} at its greatest sizes"
        with _naming(where):
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
        with _naming(f"certificate {i}"):
            _check_certificate(certificate, plan.entries)


def check_sections(entry: Entry, images: Sequence[Image], budget: Budget) -> None:
    """Hold an entry's steps to the rules of the format. Raises PlanError that names the generation and the step."""
    for section in entry.sections:
        with _naming(section.arch):
            _check_section(section, entry.program, images, budget)


def check_member(plan: Plan, entry: Entry) -> None:
    """Hold an entry of a family, which is made when its sizes are first seen, to what `check_plan` holds others to.

    The CPU engine does so. `plan.members` has what a GPU's launches are held to, which takes less time.
    """
    check_program(entry.program)
    check_sections(entry, plan.images, Budget(COMPARED))


NO_PLACE = Address("arena", "", 0)

SIZES, FORMULAS = 16, 1 << 16
"""Sizes and formulas of a family, at most."""


def _check_family(family: Family) -> None:
    """Raises PlanError for sizes, formulas and slots that are none."""
    require(0 < len(family.sizes) <= SIZES and len(family.formulas) <= FORMULAS, f"{len(family.sizes)} sizes")
    for size in family.sizes:
        numbers = size.low, size.high, size.step
        require(all(type(n) is int for n in numbers) and 0 <= size.low <= size.high < 1 << 31, f"a size of {numbers}")
        require(0 < size.step < 1 << 31, f"a size in steps of {size.step}")
    require(len({size.name for size in family.sizes}) == len(family.sizes), "two sizes of one name")
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
            maps = [replace(arg, address=NO_PLACE, extents=(), strides=()) for arg in launch.args if isinstance(arg, Map)]
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


def check_left_out(plan: Plan) -> None:
    """Hold what `fill` would make of a model's weights, on the way and in the end, to a multiple of those."""
    made: dict[str, Extent] = {}
    given: dict[str | int, int] = {}
    for name, (tensor, recipe) in _left_out(plan).items():
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
def _naming(place: str) -> Iterator[None]:
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
        for name in (*op.inputs, op.y):
            owner = program.tensors[name].storage
            if owner not in section.offsets and owner not in elsewhere:
                raise PlanError(f"tensor {owner!r} has no place in the arena")
    require(len(section.steps) <= STEPS, f"{len(section.steps)} steps")
    require([s.op for s in section.steps] == list(range(len(program.ops))), "its steps are not the program's ops in order")
    for i, step in enumerate(section.steps):
        with _naming(f"step {i}"):
            require(all(0 <= a < i for a in step.after), f"runs after {step.after}")
            _check_within(section, i)
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


def _check_within(section: Section, number: int) -> None:
    """A step that another one's launches compute is the only one of that, and has none itself."""
    step = section.steps[number]
    if step.within == -1:
        return
    require(0 <= step.within < number and not step.launches, f"is computed within step {step.within}")
    whole = section.steps[step.within]
    require(whole.launches and section.within.count(step.within) == 1, f"is computed within step {step.within}, which cannot be")


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
    also = section.also
    for i, (op, step) in enumerate(zip(program.ops, section.steps, strict=True)):
        y = program.tensors[op.y]
        with _naming(f"step {i} ({_called(op)})"):
            if step.within >= 0:
                continue
            if not step.launches:
                if y.size:
                    require(y.storage not in program.outputs, f"nothing writes the output {y.storage!r}")
                    unwritten[y.storage] = op.inputs if y.base is None else ()
                continue
            read = [n for name in op.inputs for n in unwritten.get(program.tensors[name].storage, (name,))]
            ops = [op, *([program.ops[also[i]]] if i in also else [])]
            results, places = [_Places() for _ in ops], _Places()
            for one, own in zip(ops, results, strict=True):
                own.add(*_place(program, section, one.y))
                read += [] if one is op else one.inputs
                for name in (*read, *(part for form in program.forms_of(one) for part in form.tensors), one.y):
                    if program.tensors[name].storage not in unwritten:
                        places.add(*_place(program, section, name))
            places.add("arena", "", *step.scratch)
            places.add("counters", "", *step.counters)
            addresses = [a for launch in step.launches for a in _check_launch(launch, section, images, kinds, places)]
            for one, own in zip(ops, results, strict=True):
                written = not program.tensors[one.y].size or any(own.hold(a, 0) for a in addresses)
                require(written, f"no launch writes its result {one.y!r}")
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
        and (inner <= m.swizzle or not m.swizzle)
        and (1 <= m.pixels <= 1024 if im2col else m.pixels == m.channels == 0)
        and m.address.space in ("arena", "weights")
        and m.address.bytes % 16 == 0
    )
    if not fits:
        raise PlanError(f"a tensor map that the hardware does not have: {m}")
    return m.address, m.extents[0] * size + sum((n - 1) * s for n, s in zip(m.extents[1:], m.strides, strict=True))


# --- The file --------------------------------------------------------------------------------------------------------

MAGIC = b"\x89TCPLAN\n"
PREFIX = struct.Struct("<8sIIQQ32s")  # magic, format version, 0, bytes of the header as stored and as JSON, its SHA-256
ALIGN = 256
MAX_HEADER = 1 << 26
MAX_VALUES = 1 << 22
"""JSON values of a header: in Python each takes some 100 bytes, of the file perhaps one bit."""

MAX_CODE = 1 << 26
MAX_ALL_CODE = 1 << 28

_PACKED = np.empty(0)
"""Stands for the values of a literal that a plan's weights hold already."""


@dataclass(frozen=True)
class _Stored:
    """A section of the file.

    size  bytes after decompression by zlib, or -1 if it is stored as it is
    """

    name: str
    length: int
    sha256: str
    size: int = -1


class _Writer:
    """Collects sections; equal ones are stored once."""

    def __init__(self) -> None:
        self.table: list[_Stored] = []
        self.data: list[bytes | memoryview] = []
        self._known: dict[tuple[str, int], int] = {}

    def put(self, name: str, data: bytes | memoryview, size: int = -1) -> int:
        digest = hashlib.sha256(data).hexdigest()
        if (digest, size) not in self._known:
            self._known[digest, size] = len(self.table)
            self.table.append(_Stored(name, len(data), digest, size))
            self.data.append(data)
        return self._known[digest, size]

    def code(self, code: bytes) -> int:
        return self.put("code", zlib.compress(code, 9), len(code))

    def array(self, values: np.ndarray) -> Any:
        if values is _PACKED:
            return None
        values = np.asarray(values, order="C")
        if values.dtype.kind not in "biuf":
            raise codec.CodecError(f"an array of {values.dtype}")
        data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        stored = self.put("literal", data) if len(data) > SMALL else base64.b64encode(data).decode()
        return {"dtype": values.dtype.name, "shape": list(values.shape), "data": stored}


class _Reader:
    """Gives sections of a file, checked as they are read."""

    def __init__(self, data: Stretch, table: Sequence[_Stored], start: int) -> None:
        self.table = table
        self._sections: list[Stretch] = []
        self._code: dict[int, bytes] = {}
        self._left = MAX_ALL_CODE
        for section in table:
            end, start = start, _aligned(start)
            if any(data[end:start].read()):
                raise PlanError(f"bytes before section {section.name!r} that are not zero: the file is damaged")
            if not 0 <= section.length <= len(data) - start:
                raise PlanError(
                    f"section {section.name!r} of {section.length} bytes does not fit into the file: it is cut off or damaged"
                )
            self._sections.append(data[start : start + section.length])
            start += section.length
        if start != len(data):
            raise PlanError(f"the file has {len(data)} bytes, its sections end at {start}")

    def section(self, index: Any) -> tuple[_Stored, Stretch]:
        if type(index) is not int or not 0 <= index < len(self.table):
            raise codec.CodecError(f"there is no section {index!r}")
        return self.table[index], self._sections[index]

    def checked(self, index: Any) -> tuple[_Stored, memoryview]:
        stored, part = self.section(index)
        data = part.read()
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise PlanError(f"section {stored.name!r}: its SHA-256 is not what the header says, the file is damaged")
        return stored, data

    def code(self, index: Any) -> bytes:
        """A section of code, decompressed once for all images that it is the code of."""
        self.section(index)
        if index not in self._code:
            stored, data = self.checked(index)
            self._code[index] = _decompressed(data, stored.size, min(MAX_CODE, self._left), f"section {stored.name!r}")
            self._left -= stored.size
        return self._code[index]

    def array(self, value: Any) -> np.ndarray:
        if value is None:
            return _PACKED
        if type(value) is not dict or set(value) != {"dtype", "shape", "data"} or type(value["shape"]) is not list:
            raise codec.CodecError("expected an array's dtype, shape and data")
        if type(value["dtype"]) is not str or value["dtype"] not in _ARRAYS:
            raise codec.CodecError(f"an array of {value['dtype']!r}")
        dtype, shape = np.dtype(value["dtype"]).newbyteorder("<"), value["shape"]
        if not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or len(shape) > 32:
            raise codec.CodecError(f"an array of shape {shape!r}")
        if type(value["data"]) is str:
            try:
                data: bytes | memoryview = base64.b64decode(value["data"], validate=True)
            except ValueError:
                raise codec.CodecError("data that is not base64") from None
        else:
            data = self.checked(value["data"])[1]
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise codec.CodecError(f"{len(data)} bytes for an array of {dtype} {shape}")
        try:
            return np.frombuffer(data, dtype).reshape(shape)
        except ValueError:  # of no elements, and yet beyond what NumPy can count
            raise codec.CodecError(f"an array of shape {shape!r}") from None


_ARRAYS = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float16", "float32", "float64")


def _codec(code: codec.Pair, weights: codec.Pair, array: codec.Pair) -> codec.Codec:
    """How plans are written and read. In a family any integer may be a slot, which is written as its number under "$"."""
    classes = {Op: OPS, Form: FORMS}
    numbers = {int: _open(codec.INTEGER), float: _open(codec.NUMBER), codec.CONSTANT: _open(codec.OF_CONSTANT)}
    open_ = codec.Codec(classes, {np.ndarray: array, **numbers})
    of_family = (lambda family: open_.encode(family, Family), lambda value: open_.decode(value, Family))
    special = {bytes: code, bytes | memoryview | Stretch: weights, np.ndarray: array, Family: of_family}
    return codec.Codec(classes, special)


def _open(pair: codec.Pair) -> codec.Pair:
    """How a number is written where it may be a slot."""

    def encode(value: Any) -> Any:
        return {"$": value.number} if isinstance(value, Slot) else pair[0](value)

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            return pair[1](value)
        if set(value) != {"$"} or not 0 <= codec.INTEGER[1](value["$"]) < FORMULAS:
            raise codec.CodecError("expected the number of a formula")
        return Slot(value["$"])

    return encode, decode


def _aligned(size: int) -> int:
    return round_up(size, ALIGN)


def _decompressed(data: bytes | memoryview, size: int, limit: int, what: str) -> bytes:
    if not 0 <= size <= limit:
        raise PlanError(f"{what}: {size} bytes, at most {limit} are allowed")
    unpacker = zlib.decompressobj()
    try:
        out = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise PlanError(f"{what}: {error}") from None
    if len(out) != size or not unpacker.eof or unpacker.unused_data:
        raise PlanError(f"{what}: does not decompress to {size} bytes")
    return out


def _chunks(plan: Plan) -> Iterator[bytes | memoryview]:
    """The bytes of the file, piece by piece."""
    check_plan(plan)
    writer = _Writer()
    coder = _codec((writer.code, _refuse), (lambda w: w, _refuse), (writer.array, _refuse))
    weights: Any = {name: writer.put(f"weights {name}", plan.weight(name)) for name in sorted(plan.weights)}
    fixed = plan.entries[: len(plan.entries) - len(plan.families)]
    numbered: Any = replace(_without_packed_literals(replace(plan, entries=fixed)), weights=weights)
    encoded = coder.encode(numbered, Plan)
    header = codec.dumps({"plan": encoded, "sections": coder.encode(tuple(writer.table), tuple[_Stored, ...])})
    _check_header(header)
    stored = zlib.compress(header, 9)
    yield PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(stored), len(header), hashlib.sha256(stored).digest())
    yield stored
    end = PREFIX.size + len(stored)
    for data in writer.data:
        yield bytes(_aligned(end) - end)
        yield data
        end = _aligned(end) + len(data)


def _check_header(header: bytes) -> None:
    for what, count, most in (("bytes", len(header), MAX_HEADER), ("values", codec.values(header), MAX_VALUES)):
        if count > most:
            raise PlanError(
                f"the plan's header has {count} {what}, at most {most} are allowed: compile fewer entries or generations"
            )


def _refuse(value: Any) -> Any:
    raise codec.CodecError("not in this direction")


def to_bytes(plan: Plan) -> bytes:
    """The file's content: the same for equal plans. Raises PlanError if the plan is not one that `read_plan` would take."""
    return b"".join(_chunks(plan))


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan to a file, which appears whole or not at all."""
    with whole_file(path) as file:
        for chunk in _chunks(plan):
            file.write(chunk)


def encoded_size(plan: Plan) -> int:
    """The bytes of the file that `write_plan` writes."""
    return sum(memoryview(chunk).nbytes for chunk in _chunks(plan))


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to that takes its name, and the place of an older one, when all of it has been written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # not mkstemp's, which only its owner could read
    try:
        file = open(temporary, "xb")  # noqa: SIM115  closed below
    except OSError as error:
        error.filename = os.fspath(path)  # the name that the caller knows
        raise
    try:
        with file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):  # interrupted when it had its name already
            os.unlink(temporary)
        if isinstance(error, OSError):  # writing says only that the disk is full, and renaming names the other file, too
            error.filename, error.filename2 = os.fspath(path), None
        raise


def is_plan(path: Path) -> bool:
    """Whether a file begins as plans do."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Its weights are read when they are used; everything else is read and checked.

    Raises PlanError, which names the file and the section, if it cannot be read or breaks a rule of the format, and LaunchError
    if there is no memory for it.
    """
    try:
        return _read(Stretch.of_file(path))
    except OSError as error:
        raise PlanError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except PlanError as error:
        way_out = ": tccompile makes one of a model" if os.fspath(path).endswith(".onnx") else ""
        raise PlanError(f"{os.fspath(path)}: {error}{way_out}") from None


def from_bytes(data: bytes | memoryview) -> Plan:
    """The plan in a file's bytes: see `read_plan`."""
    return _read(Stretch.of(data))


def _read(data: Stretch) -> Plan:
    try:
        return _checked(data)
    except MemoryError:
        raise LaunchError("there is no memory to read the plan") from None


def _checked(data: Stretch) -> Plan:
    prefix = data[: PREFIX.size].read()
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise PlanError("is not a plan of tccompile's")
    _, version, zero, length, size, digest = PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        newer = "install the newer one that made it, or " if version > FORMAT_VERSION else ""
        raise PlanError(
            f"has plan format {version}, this version of tccompile reads format {FORMAT_VERSION}: {newer}compile the model again"
        )
    stored = data[PREFIX.size : PREFIX.size + length].read()
    if zero or len(stored) != length or hashlib.sha256(stored).digest() != digest:
        raise PlanError("section 'header': is cut off or damaged")
    try:
        text = _decompressed(stored, size, MAX_HEADER, "section 'header'")
        _check_header(text)
        header = codec.loads(text)
        if type(header) is not dict or set(header) != {"plan", "sections"}:
            raise codec.CodecError("expected a plan and its sections")
        table = codec.Codec({}, {}).decode(header["sections"], tuple[_Stored, ...])
        reader = _Reader(data, table, PREFIX.size + length)
        coder = _codec((_refuse, reader.code), (_refuse, reader.section), (_refuse, reader.array))
        plan = coder.decode(header["plan"], Plan)
    except codec.CodecError as error:
        raise PlanError(f"section 'header': {error}") from None
    sections: Any = plan.weights  # (entry in the table, bytes), as the reader gives them
    digests = {name: _digest(stored) for name, (stored, _) in sections.items()}
    for i, family in enumerate(plan.families):
        with _naming(f"family {i}"):
            _check_family(family)
    entries = (*plan.entries, *(family.lowest for family in plan.families))
    plan = replace(plan, weights={name: data for name, (_, data) in sections.items()}, digests=digests, entries=entries)
    check_plan(plan)
    plan = _with_packed_literals(plan)
    object.__setattr__(plan, "identity", digest.hex())
    return plan


def _digest(section: _Stored) -> bytes:
    try:
        return bytes.fromhex(section.sha256)
    except ValueError:
        raise PlanError(f"section {section.name!r}: its SHA-256 is none") from None


def _without_packed_literals(plan: Plan) -> Plan:
    """The plan without the values of constants that are literals, where the weights hold them already."""

    def bare(program: Program) -> Program:
        constants = {
            name: Literal(_PACKED) if isinstance(recipe, Literal) and name in plan.weights else recipe
            for name, recipe in program.constants.items()
        }
        return replace(program, constants=constants)

    return _each_program(plan, bare)


def _with_packed_literals(plan: Plan) -> Plan:
    """The reverse, with values as the weights store them."""

    def whole(program: Program) -> Program:
        constants = dict(program.constants)
        for name, recipe in program.constants.items():
            if isinstance(recipe, Literal) and recipe.values is not _PACKED:
                require(name not in plan.weights, f"the constant {name!r} has values, and weights")
            elif not isinstance(recipe, Literal):
                packed = any(isinstance(leaf, Literal) and leaf.values is _PACKED for leaf in leaves(recipe))
                require(not packed, f"the recipe of {name!r} has no values")
            else:
                require(name in plan.weights, f"the constant {name!r} has no values")
                tensor = program.tensors[name]
                constants[name] = Literal(elements(np.frombuffer(plan.weight(name), tensor.dtype.numpy), tensor))
        return replace(program, constants=constants)

    return _each_program(plan, whole)


def _each_program(plan: Plan, changed: Callable[[Program], Program]) -> Plan:
    """The plan with other programs in its entries and families."""
    entries = tuple(replace(e, program=changed(e.program)) for e in plan.entries)
    families = tuple(replace(f, entry=replace(f.entry, program=changed(f.entry.program))) for f in plan.families)
    return replace(plan, entries=entries, families=families)
