"""The plan: what running a model needs, as dataclasses and as one file. Standard library and NumPy only."""

from __future__ import annotations

import base64
import hashlib
import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tccompile import codec
from tccompile.errors import PlanError, UsageError
from tccompile.expr import DType
from tccompile.limits import SIZE, check_program, require
from tccompile.program import OPS, Op, Program, Tensor
from tccompile.reference.storage import elements, store, to_storage
from tccompile.weights import SMALL, Literal, Recipe, Source, evaluate, extents, leaves

FORMAT_VERSION = 5


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
    """One kernel launch; `image` indexes the plan's images.

    cooperative  its blocks wait for each other: they must run at once, and may be fewer than `grid`, which is then (n, 1, 1)
    early        it may start before the launches that it comes after have ended: its code waits for them (griddepcontrol.wait)
    """

    image: int
    grid: tuple[int, int, int]
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
    """

    op: int
    kernel: str
    config: Mapping[str, int | float | str | bool | tuple]
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


@dataclass(frozen=True, eq=False)
class Expected:
    """What one output must be.

    values  the reference at places evenly spread over the output in row-major order, float64; all of it if it is small
    norm    the reference's, of all elements
    error   of the plan when it was made, ‖out - ref‖ / ‖ref‖ over all elements; `bound`, what is allowed
    """

    name: str
    values: np.ndarray
    norm: float
    error: float
    bound: float


@dataclass(frozen=True)
class Certificate:
    """What an entry must compute from inputs that come from a seed (`feeds.seeded`).

    oracle  what computed the reference
    device  where `error` was measured
    inputs  SHA-256 of the inputs' bytes, in the program's order, in hexadecimal
    """

    entry: int
    seed: int
    inputs: str
    oracle: str
    device: str
    outputs: tuple[Expected, ...]


@dataclass(frozen=True)
class Plan:
    """A compiled model.

    name     the model's
    producer the tools and versions that made it, by name
    weights  the bytes of each constant tensor in the layout its entry in `tensors` says (all of `span`); constants that
             were left out of a stripped plan are missing. Entries with a constant of the same name share it
    notes    what a person may want to know of the whole model, one line each
    certificates  what `tcrun --selftest` holds the plan to
    """

    name: str
    producer: Mapping[str, str]
    entries: tuple[Entry, ...]
    images: tuple[Image, ...]
    weights: Mapping[str, bytes | memoryview]
    notes: tuple[str, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    digests: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False, metadata={"stored": False})
    """The SHA-256 of weights that lie in a file; checked by `weight`."""

    def weight(self, name: str) -> memoryview:
        """The bytes of a constant tensor, checked against their SHA-256 if they come from a file.

        Raises UsageError if they were left out of the plan, PlanError if the file is damaged.
        """
        if name not in self.weights:
            raise UsageError(
                f"the plan holds no values of {name!r}, it was made without its weights: give the model "
                "they come from (tcrun --weights MODEL.onnx)"
            )
        data = memoryview(self.weights[name]).cast("B")
        if name in self.digests and hashlib.sha256(data).digest() != self.digests[name]:
            raise PlanError(f"section 'weights {name}': its SHA-256 is not what the header says, the file is damaged")
        return data

    def kind(self, section: Section) -> str:
        """In what form the section's code comes: "cubin" or "ptx"."""
        return next((self.images[launch.image].kind for step in section.steps for launch in step.launches), "cubin")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file: see `write_plan`."""
        write_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan in a file: see `read_plan`."""
        return read_plan(path)


# --- Weights ---------------------------------------------------------------------------------------------------------


def pack_constant(tensor: Tensor, values: np.ndarray) -> bytes:
    """Logical values as the bytes of `tensor`'s storage: its dtype, its order of axes, zeros in the padding.

    Raises ValueError if they have another shape.
    """
    if values.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: values of shape {values.shape} for a tensor of {tensor.shape}")
    buffer = np.zeros(tensor.span, tensor.dtype.numpy)
    store(buffer, tensor, to_storage(values, tensor.dtype))
    return buffer.tobytes()


def fill(plan: Plan, sources: Mapping[str, np.ndarray]) -> Plan:
    """The plan with the weights that were left out of it, evaluated from the model's initializers by name.

    Raises UsageError if they are not the initializers of the model that the plan was made from.
    """
    weights, missing = dict(plan.weights), _left_out(plan)
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
    constants = {n: (e.program.tensors[n], r) for e in plan.entries for n, r in e.program.constants.items()}
    return {name: constant for name, constant in constants.items() if name not in plan.weights}


# --- What a plan must keep to ----------------------------------------------------------------------------------------

GRID = ((1 << 31) - 1, 65535, 65535)
BLOCK = 1024
SMEM = 227 * 1024
ARGS = 1024


def check_plan(plan: Plan) -> None:
    """Hold a plan to the rules of the format: every index, offset, size and limit. Raises PlanError that names the place."""
    require(plan.entries, "a plan without entries")
    constants: dict[str, Tensor] = {}
    ends: set[tuple[tuple[str, DType], ...]] = set()
    for i, entry in enumerate(plan.entries):
        with _naming(f"entry {i}"):
            check_program(entry.program)
            names = (*entry.program.inputs, *entry.program.outputs)
            ends.add(tuple((name, entry.program.tensors[name].dtype) for name in names))
            require(len(ends) == 1, "has other inputs or outputs, or of another type, than the entries before it")
            for name in entry.program.constants:
                tensor = entry.program.tensors[name]
                require(constants.setdefault(name, tensor) == tensor, f"constant {name!r} has another layout in another entry")
        for section in entry.sections:
            with _naming(f"entry {i} for {section.arch}"):
                _check_section(section, entry.program, plan.images)
    for name, data in plan.weights.items():
        require(name in constants, f"weights of {name!r}, which is no constant")
        size = constants[name].nbytes
        require(len(memoryview(data).cast("B")) == size, f"weights of {name!r} of {len(data)} bytes, its layout has {size}")
    _check_left_out(plan)
    for i, certificate in enumerate(plan.certificates):
        with _naming(f"certificate {i}"):
            _check_certificate(certificate, plan.entries)
    for image in plan.images:
        require(image.kind in ("cubin", "ptx"), f"code of kind {image.kind!r}")


MADE, TIMES = 1 << 27, 64
"""Elements that filling in weights may make: so many, or so many times those that they come from."""


def _check_left_out(plan: Plan) -> None:
    """Hold what `fill` would make of a model's weights, on the way and in the end, to a multiple of those."""
    made: dict[str, int] = {}
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
    program = entries[certificate.entry].program
    names = [e.name for e in certificate.outputs]
    require(names == list(program.outputs), f"its outputs are {names}, the program's {list(program.outputs)}")
    for e in certificate.outputs:
        count = min(program.tensors[e.name].size, SEEDED)
        fits = e.values.dtype == np.float64 and e.values.shape == (count,) and np.isfinite(e.values).all()
        require(fits, f"output {e.name!r}: expected {count} finite numbers of 64 bits")
        numbers = all(math.isfinite(x) and x >= 0 for x in (e.norm, e.error, e.bound))
        require(numbers, f"output {e.name!r}: a norm of {e.norm}, an error of {e.error}, a bound of {e.bound}")


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None


def _check_section(section: Section, program: Program, images: Sequence[Image]) -> None:
    require(0 <= section.arena < SIZE and 0 <= section.counters < SIZE, f"an arena of {section.arena} bytes")
    elsewhere = {*program.constants, *program.inputs, *program.outputs}
    for name, offset in section.offsets.items():
        tensor = program.tensors.get(name)
        if tensor is None or tensor.base is not None or name in elsewhere:
            raise PlanError(f"{name!r} has no place in the arena")
        end = offset + tensor.nbytes
        require(offset >= 0 and end <= section.arena, f"tensor {name!r} ends at {end} of {section.arena} bytes of the arena")
        require(offset % 16 == 0, f"tensor {name!r} at {offset}, which 16 does not divide")
    for op in program.ops:
        for name in (*op.inputs, op.y):
            owner = program.tensors[name].storage
            require(owner in elsewhere or owner in section.offsets, f"tensor {owner!r} has no place in the arena")
    require([s.op for s in section.steps] == list(range(len(program.ops))), "its steps are not the program's ops in order")
    for i, step in enumerate(section.steps):
        with _naming(f"step {i}"):
            require(all(0 <= a < i for a in step.after), f"runs after {step.after}")
            for launch in step.launches:
                _check_launch(launch, section, program, images)


def _check_launch(launch: PlacedLaunch, section: Section, program: Program, images: Sequence[Image]) -> None:
    require(0 <= launch.image < len(images), f"there is no code {launch.image}")
    require(all(1 <= n <= most for n, most in zip(launch.grid, GRID, strict=True)), f"a grid of {launch.grid}")
    require(not launch.cooperative or launch.grid[1:] == (1, 1), f"a cooperative grid of {launch.grid}")
    require(not (launch.cooperative and launch.early), "a cooperative launch that starts early")
    require(1 <= launch.block <= BLOCK, f"a block of {launch.block} threads")
    require(0 <= launch.smem <= SMEM, f"{launch.smem} bytes of shared memory")
    require(len(launch.args) <= ARGS, f"{len(launch.args)} arguments")
    for arg in launch.args:
        match arg:
            case Int(value):
                require(-(1 << 31) <= value < 1 << 32, f"{value} in 32 bits")
            case Address():
                _check_address(arg, 0, section, program)
            case Map():
                _check_map(arg, section, program)


def _check_map(arg: Map, section: Section, program: Program) -> None:
    dims, im2col = len(arg.extents), arg.kind == "im2col"
    fits = (
        arg.kind in ("tiled", "im2col")
        and (dims == 4 if im2col else 1 <= dims <= 5)
        and len(arg.strides) == dims - 1
        and len(arg.box) == (0 if im2col else dims)
        and len(arg.lower) == len(arg.upper) == (2 if im2col else 0)
        and len(arg.steps) == (2 if im2col else dims)
        and all(1 <= n < 1 << 32 for n in arg.extents)
        and all(0 < s < SIZE for s in arg.strides)
        and all(1 <= n <= 256 for n in arg.box)
        and all(1 <= n <= 8 for n in arg.steps)
        and all(-(1 << 15) <= n < 1 << 15 for n in (*arg.lower, *arg.upper))
        and arg.swizzle in (0, 32, 64, 128)
        and 0 <= arg.channels <= 256
        and 0 <= arg.pixels <= 1024
        and arg.address.space in ("arena", "weights")
    )
    require(fits, f"a tensor map that the hardware does not have: {arg}")
    span = arg.extents[0] * 2 + sum((n - 1) * s for n, s in zip(arg.extents[1:], arg.strides, strict=True))
    _check_address(arg.address, span, section, program)


def _check_address(address: Address, span: int, section: Section, program: Program) -> None:
    """An address and `span` bytes from it on lie inside what the address is relative to."""
    names = {"weights": program.constants, "io": (*program.inputs, *program.outputs)}
    match address.space:
        case "arena":
            size = section.arena
        case "counters":
            size = section.counters
        case "weights" | "io":
            require(address.name in names[address.space], f"the address of {address.name!r}, which is not in {address.space}")
            size = program.tensors[address.name].nbytes
        case _:
            raise PlanError(f"an address in {address.space!r}")
    end = address.bytes + span
    require(address.bytes >= 0 and end <= size, f"bytes {address.bytes} to {end} of {size} in {address.space}")


# --- The file --------------------------------------------------------------------------------------------------------

MAGIC = b"\x89TCPLAN\n"
PREFIX = struct.Struct("<8sIIQQ32s")  # magic, format version, 0, bytes of the header as stored and as JSON, its SHA-256
ALIGN = 256
MAX_HEADER = 1 << 26
MAX_CODE = 1 << 26

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

    def __init__(self, data: memoryview, table: Sequence[_Stored], start: int) -> None:
        self.table = table
        self._sections: list[memoryview] = []
        for section in table:
            start = _aligned(start)
            if not 0 <= section.length <= len(data) - start:
                raise PlanError(
                    f"section {section.name!r} of {section.length} bytes does not fit into the file: it is cut off or damaged"
                )
            self._sections.append(data[start : start + section.length])
            start += section.length
        if start != len(data):
            raise PlanError(f"the file has {len(data)} bytes, its sections end at {start}")

    def section(self, index: Any) -> tuple[_Stored, memoryview]:
        if type(index) is not int or not 0 <= index < len(self.table):
            raise codec.CodecError(f"there is no section {index!r}")
        return self.table[index], self._sections[index]

    def checked(self, index: Any) -> tuple[_Stored, memoryview]:
        stored, data = self.section(index)
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise PlanError(f"section {stored.name!r}: its SHA-256 is not what the header says, the file is damaged")
        return stored, data

    def code(self, index: Any) -> bytes:
        stored, data = self.checked(index)
        return _decompressed(data, stored.size, MAX_CODE, f"section {stored.name!r}")

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
    return codec.Codec({Op: OPS}, {bytes: code, bytes | memoryview: weights, np.ndarray: array})


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


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
    weights: Any = {
        name: writer.put(f"weights {name}", memoryview(plan.weights[name]).cast("B")) for name in sorted(plan.weights)
    }
    numbered: Any = replace(_without_packed_literals(plan), weights=weights)
    encoded = coder.encode(numbered, Plan)
    header = codec.dumps({"plan": encoded, "sections": coder.encode(tuple(writer.table), tuple[_Stored, ...])})
    if len(header) > MAX_HEADER:
        raise PlanError(
            f"the plan's header has {len(header)} bytes, at most {MAX_HEADER} are allowed: compile fewer entries or generations"
        )
    stored = zlib.compress(header, 9)
    yield PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(stored), len(header), hashlib.sha256(stored).digest())
    yield stored
    end = PREFIX.size + len(stored)
    for data in writer.data:
        yield bytes(_aligned(end) - end)
        yield data
        end = _aligned(end) + len(data)


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


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to that takes its name, and the place of an older one, when all of it has been written."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):  # interrupted when it had its name already
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # writing says only that the disk is full
            error.filename = os.fspath(path)
        raise


def is_plan(path: Path) -> bool:
    """Whether a file begins as plans do."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Its weights stay in the mapped file; everything else is read and checked.

    Raises PlanError, which names the file and the section, if it cannot be read or breaks a rule of the format.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except OSError as error:
        raise PlanError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    try:
        return from_bytes(data)
    except PlanError as error:
        raise PlanError(f"{os.fspath(path)}: {error}") from None


def from_bytes(data: bytes | memoryview) -> Plan:
    """The plan in a file's bytes: see `read_plan`."""
    data = memoryview(data)
    if len(data) < PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise PlanError("is not a plan of tccompile's")
    _, version, zero, length, size, digest = PREFIX.unpack_from(data)
    if version != FORMAT_VERSION:
        raise PlanError(
            f"has plan format {version}, this version of tccompile reads format {FORMAT_VERSION}: compile the model again"
        )
    stored = data[PREFIX.size : PREFIX.size + length]
    if zero or len(stored) != length or hashlib.sha256(stored).digest() != digest:
        raise PlanError("section 'header': is cut off or damaged")
    try:
        header = codec.loads(_decompressed(stored, size, MAX_HEADER, "section 'header'"))
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
    plan = replace(plan, weights={name: data for name, (_, data) in sections.items()}, digests=digests)
    check_plan(plan)
    return _with_packed_literals(plan)


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

    return replace(plan, entries=tuple(replace(e, program=bare(e.program)) for e in plan.entries))


def _with_packed_literals(plan: Plan) -> Plan:
    """The reverse, with values as the weights store them."""

    def whole(program: Program) -> Program:
        constants = dict(program.constants)
        for name, recipe in program.constants.items():
            if not isinstance(recipe, Literal):
                packed = any(isinstance(leaf, Literal) and leaf.values is _PACKED for leaf in leaves(recipe))
                require(not packed, f"the recipe of {name!r} has no values")
            elif recipe.values is _PACKED:
                require(name in plan.weights, f"the constant {name!r} has no values")
                tensor = program.tensors[name]
                constants[name] = Literal(elements(np.frombuffer(plan.weights[name], tensor.dtype.numpy), tensor))
        return replace(program, constants=constants)

    return replace(plan, entries=tuple(replace(e, program=whole(e.program)) for e in plan.entries))
