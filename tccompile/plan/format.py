"""The plan: what running a model needs, as dataclasses. Standard library and NumPy only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tccompile.errors import PlanError, UsageError
from tccompile.ir.extent import Extent, Shape
from tccompile.ir.feeds import InputRange
from tccompile.ir.memory import NOWHERE, Span
from tccompile.ir.metadata import Metadata
from tccompile.ir.packed import unpacked
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.types import DType
from tccompile.plan.formulas import Formula, Slot, computed, filler
from tccompile.plan.stretch import Stretch
from tccompile.sizes import Size

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
    within        of a step without launches, the other one whose launches compute it too; else -1
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
        """For each step the other one whose launches compute it too, or -1."""
        return [step.within for step in self.steps]

    @property
    def together(self) -> dict[int, list[int]]:
        """Of steps whose launches compute several ops, these, in the program's order."""
        found: dict[int, list[int]] = {}
        for step in self.steps:
            if step.within >= 0:
                found.setdefault(step.within, [step.within]).append(step.op)
        return {step: sorted(ops) for step, ops in found.items()}


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
    product   what the sizes' product is at least and at most, if it is for those alone
    """

    sizes: tuple[Size, ...]
    formulas: tuple[Formula, ...]
    entry: Entry
    product: tuple[int, ...] = ()

    @cached_property
    def _fill(self) -> Callable[[Sequence[Extent]], Entry]:
        return filler(self.entry)

    def at(self, sizes: Sequence[int]) -> Entry:
        """The entry for sizes in the order of `sizes`. Raises PlanError for formulas that give nothing."""
        return self._fill(computed(self.formulas, sizes))

    @cached_property
    def lowest(self) -> Entry:
        """The entry for the least sizes."""
        return self.at([size.low for size in self.sizes])

    @cached_property
    def highest(self) -> Entry:
        """The entry for the greatest sizes."""
        return self.at([size.all[-1] for size in self.sizes])

    def sizes_of(self, shapes: Mapping[str, Shape]) -> tuple[int, ...] | None:
        """The sizes at which the inputs have these shapes; None if there are none."""
        ranks, of_sizes, fixed = self._extents
        for name, rank in ranks:
            if len(shapes[name]) != rank:
                return None
        found: dict[int, int] = {}
        for name, axis, number, size in of_sizes:
            n = shapes[name][axis]
            if n not in size or found.setdefault(number, n) != n:
                return None
        if any(shapes[name][axis] != n for name, axis, n in fixed) or len(found) < len(self.sizes):
            return None
        sizes = tuple(found[i] for i in range(len(self.sizes)))
        if self.product and not self.product[0] <= math.prod(sizes) <= self.product[1]:
            return None
        return sizes if self._have(shapes, sizes) else None

    @cached_property
    def _extents(self) -> tuple[list[tuple[str, int]], list[tuple[str, int, int, range]], list[tuple[str, int, int]]]:
        """What an input's shape is held to: its rank, extents that are sizes, each with the size's number and all that it may be,
        and those that are numbers. Whoever looks for a family asks all: a size out of range is what is most often found."""
        tensors = self.entry.program.tensors
        extents: list[Any] = [(name, axis, n) for name in self.entry.program.inputs for axis, n in enumerate(tensors[name].shape)]
        open_ = [(name, axis, self.formulas[n.number]) for name, axis, n in extents if isinstance(n, Slot)]
        of_sizes = [(name, axis, a, self.sizes[a].all) for name, axis, (op, a, _) in open_ if op == "size"]
        ranks = [(name, tensors[name].rank) for name in self.entry.program.inputs]
        return ranks, of_sizes, [(name, axis, n) for name, axis, n in extents if not isinstance(n, Slot)]

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


@dataclass(frozen=True)
class Contents:
    """What a plan holds: `plan.file.Plan` is one that can be written and read.

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
                "since it was opened: copy it again"
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
