"""The plan as one file: a header of JSON, and sections of code, literals and weights."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tccompile.errors import LaunchError, PlanError
from tccompile.garbage import no_garbage
from tccompile.ir.extent import round_up
from tccompile.ir.forms import FORMS, Form
from tccompile.ir.limits import require
from tccompile.ir.ops import OPS, Op
from tccompile.ir.program import Program
from tccompile.ir.storage import elements
from tccompile.ir.weights import SMALL, Literal, leaves
from tccompile.plan import FORMAT_VERSION, codec
from tccompile.plan.format import Contents, Entry, Family
from tccompile.plan.formulas import Slot
from tccompile.plan.rules import FORMULAS, check_families, check_plan
from tccompile.plan.stretch import Stretch
from tccompile.terminal import plain

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


@dataclass(frozen=True, repr=False)
class Plan(Contents):
    """A compiled model."""

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
                    f"section {section.name!r} of {section.length} bytes does not fit into the file: it is cut off or damaged, "
                    "copy it again"
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
            raise PlanError(
                f"section {stored.name!r}: its SHA-256 is not what the header says, the file is damaged, copy it again"
            )
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
    of_programs = _Programs(codec.Codec(classes, {np.ndarray: array, **numbers}))
    open_ = codec.Codec(classes, {np.ndarray: array, **numbers, Program: (of_programs.encode, of_programs.decode)})
    of_family = (lambda family: open_.encode(family, Family), lambda value: open_.decode(value, Family))
    special = {bytes: code, bytes | memoryview | Stretch: weights, np.ndarray: array, Family: of_family}
    return codec.Codec(classes, special)


class _Programs:
    """How programs of families are written and read: one that an earlier family has, as its number among those that differ."""

    def __init__(self, coder: codec.Codec) -> None:
        self._coder = coder
        self._numbers: dict[bytes, int] = {}
        self._read: list[tuple[Program, int]] = []
        self._values = 0

    def encode(self, program: Program) -> Any:
        value = self._coder.encode(program, Program)
        text = codec.dumps(value)
        if text in self._numbers:
            return self._numbers[text]
        self._numbers[text] = len(self._numbers)
        return value

    def decode(self, value: Any) -> Program:
        if type(value) is not int:
            program: Program = self._coder.decode(value, Program)
            self._read.append((program, codec.values(codec.dumps(value))))
            return program
        if not 0 <= value < len(self._read):
            raise codec.CodecError(f"there is no program {value} before it")
        program, count = self._read[value]
        self._values += count  # what is in memory for each family
        if self._values > MAX_VALUES:
            raise codec.CodecError(f"programs of more than {MAX_VALUES} values, each as often as families have it")
        return program


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
    check_families(plan.families)
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
        with no_garbage():
            return _checked(data)
    except MemoryError:
        raise LaunchError("there is no memory to read the plan") from None


def _checked(data: Stretch) -> Plan:
    prefix = data[: PREFIX.size].read()
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise PlanError("this is not a plan of tccompile's")
    _, version, zero, length, size, digest = PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        newer = "install the newer one that made it, or " if version > FORMAT_VERSION else ""
        raise PlanError(
            f"the plan has format {version}, this version of tccompile reads format {FORMAT_VERSION}: {newer}compile the model "
            "again"
        )
    stored = data[PREFIX.size : PREFIX.size + length].read()
    if zero or len(stored) != length or hashlib.sha256(stored).digest() != digest:
        raise PlanError("section 'header' is cut off or damaged: copy the file again")
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
    check_families(plan.families)
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
        same = True
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
                same = False
        return program if same else replace(program, constants=constants)

    return _each_program(plan, whole)


def _each_program(plan: Plan, changed: Callable[[Program], Program]) -> Plan:
    """The plan with other programs in its entries and families."""

    def renewed(entry: Entry) -> Entry:
        program = changed(entry.program)
        return entry if program is entry.program else replace(entry, program=program)

    def family_of(family: Family) -> Family:
        entry = renewed(family.entry)
        return family if entry is family.entry else replace(family, entry=entry)

    return replace(plan, entries=tuple(map(renewed, plan.entries)), families=tuple(map(family_of, plan.families)))
