"""The plan: what running a model needs, as dataclasses and as one file. Standard library and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tccompile.program import Program

FORMAT_VERSION = 1


# --- Arguments of a placed launch: see kernels/spec.py for what each stands for ----------------------------------------


@dataclass(frozen=True)
class Address:
    """A 64-bit address: `bytes` from the start of an arena, of the weights, or of a model input or output.

    space  "arena", "counters", "weights", or "io"; `name` is the constant's or the input's or output's, else empty
    """

    space: str
    name: str
    bytes: int


@dataclass(frozen=True)
class Int:
    """A 32-bit integer parameter."""

    value: int


@dataclass(frozen=True)
class Float:
    """A 32-bit float parameter."""

    value: float


@dataclass(frozen=True)
class Map:
    """The address of a tensor map, encoded when the plan is loaded. Never of a model input or output.

    kind  "tiled" or "im2col"; lower, upper, channels and pixels are the latter's, box the former's
    """

    kind: str
    address: Address
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    box: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0


PlanArg = Address | Int | Float | Map


# --- Steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedLaunch:
    """One kernel launch; `image` indexes the plan's images."""

    image: int
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[PlanArg, ...]


@dataclass(frozen=True)
class Step:
    """One op as it runs: launches one after the other, when the steps in `after` are done.

    op            index into the entry's program
    kernel        the kernel's name; config, its parameters
    tensor_cores  whether it uses them; `reason` says why this kernel, or why no Tensor Cores
    """

    op: int
    kernel: str
    config: Mapping[str, int | float | str | bool]
    tensor_cores: bool
    reason: str
    launches: tuple[PlacedLaunch, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Section:
    """An entry's steps for one GPU generation.

    offsets   byte offset in the arena of each tensor that owns storage there
    arena     bytes; counters, bytes that are zero before the first inference
    """

    arch: str
    steps: tuple[Step, ...]
    offsets: Mapping[str, int]
    arena: int
    counters: int


@dataclass(frozen=True)
class Entry:
    """One set of input shapes."""

    program: Program
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Image:
    """The code of one kernel for one generation.

    kind      "cubin", or "ptx" for the driver to compile
    function  the name of its entry function
    """

    arch: str
    kind: str
    function: str
    code: bytes


@dataclass(frozen=True)
class Plan:
    """A compiled model.

    name     the model's
    producer the tools and versions that made it, by name
    weights  the bytes of each constant tensor in the layout its entry in `tensors` says (all of `span`); constants that
             were left out of a stripped plan are missing. Entries with a constant of the same name share it
    notes    what a person may want to know of the whole model, one line each: precision, rewrites, warnings
    """

    name: str
    producer: Mapping[str, str]
    entries: tuple[Entry, ...]
    images: tuple[Image, ...]
    weights: Mapping[str, bytes | memoryview]
    notes: tuple[str, ...] = ()
