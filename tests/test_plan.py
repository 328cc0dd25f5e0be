"""The plan file: what goes in comes out, and whatever else comes in gives a PlanError."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
import os
import random
import struct
import time
import zlib
from dataclasses import dataclass, replace
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from tccompile.errors import LaunchError, PlanError, UsageError
from tccompile.ir import weights
from tccompile.ir.expr import Epilogue, Expr, View, call, const, constant, coord, identity_view, load
from tccompile.ir.ops import Pointwise, Resize
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, Recipe, Source, Transform, same
from tccompile.kernels.spec import Work
from tccompile.plan import FORMAT_VERSION, codec
from tccompile.plan import file as plan_module
from tccompile.plan.file import PREFIX, Plan, from_bytes, read_plan, to_bytes, write_plan
from tccompile.plan.format import Entry, Section, Step
from tccompile.plan.rules import check_plan
from tccompile.plan.weights import NOT_EVALUATED, fill
from tccompile.runtime.cpu import CpuEngine
from tccompile.schedule.place import place
from tests.small import feeds, plan, sources

PLAN = plan()
FILE = to_bytes(PLAN)


def header_of(file: bytes) -> dict:
    _, _, _, length, _, _ = PREFIX.unpack_from(file)
    return json.loads(zlib.decompress(file[PREFIX.size : PREFIX.size + length]))


def with_header(file: bytes, header: dict | bytes) -> bytes:
    """The file with another header, whose checksum is right."""
    magic, version, zero, length, _, _ = PREFIX.unpack_from(file)
    text = header if isinstance(header, bytes) else codec.dumps(header)
    stored = zlib.compress(text, 1)
    start, new = -(-(PREFIX.size + length) // 256) * 256, -(-(PREFIX.size + len(stored)) // 256) * 256
    prefix = PREFIX.pack(magic, version, zero, len(stored), len(text), hashlib.sha256(stored).digest())
    return (prefix + stored).ljust(new, b"\0") + file[start:]


# --- Round trips -----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "model.plan"
    PLAN.save(path)
    read = Plan.load(path)
    assert path.read_bytes() == FILE
    assert read.weights == PLAN.weights
    assert {name: bytes(read.weight(name)) for name in read.weights} == PLAN.weights
    for field in ("name", "producer", "images", "notes"):
        assert getattr(read, field) == getattr(PLAN, field)
    for a, b in zip(read.entries, PLAN.entries, strict=True):
        assert a.sections == b.sections
        assert replace(a.program, constants={}) == replace(b.program, constants={})
        assert a.program.constants.keys() == b.program.constants.keys()
        assert all(same(a.program.constants[n], b.program.constants[n]) for n in a.program.constants)
    assert to_bytes(read) == FILE


def test_a_file_without_sections():
    bare = replace(PLAN, images=(), weights={}, entries=tuple(replace(e, sections=()) for e in PLAN.entries))
    entry = bare.entries[0]
    small = {n: r for n, r in entry.program.constants.items() if n != "table"}
    program = replace(entry.program, ops=entry.program.ops[:-1], outputs=("y",), constants=small)
    bare = replace(bare, entries=(replace(entry, program=program),))
    assert header_of(to_bytes(bare))["sections"] == []
    assert to_bytes(from_bytes(to_bytes(bare))) == to_bytes(bare)


def test_the_order_of_dictionaries_does_not_matter():
    entry = PLAN.entries[0]
    turned = {what: dict(reversed(getattr(entry.program, what).items())) for what in ("tensors", "constants")}
    turned = replace(entry.program, **turned)
    other = replace(PLAN, weights=dict(reversed(PLAN.weights.items())), entries=(replace(entry, program=turned),))
    assert to_bytes(other) == FILE


def test_equal_sections_are_stored_once():
    twice = replace(PLAN, images=(*PLAN.images, replace(PLAN.images[0], params=())))
    assert len(header_of(to_bytes(twice))["sections"]) == len(header_of(FILE)["sections"])
    assert from_bytes(to_bytes(twice)).images == twice.images


def test_literals_are_not_stored_beside_their_weights():
    """The table's 16 KB are in the file once, as weights; without them, as the recipe's values."""
    names = [s["name"] for s in header_of(FILE)["sections"]]
    assert names.count("weights table") == 1 and "literal" not in names
    without = to_bytes(plan(left_out=["table"]))
    assert [s["name"] for s in header_of(without)["sections"]].count("literal") == 1
    recipe = from_bytes(without).entries[0].program.constants["table"]
    assert same(recipe, PLAN.entries[0].program.constants["table"])


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "model.plan"
    path.write_bytes(b"old")
    broken = replace(PLAN, weights={**PLAN.weights, "nobody": b""})
    with pytest.raises(PlanError, match="nobody"):
        write_plan(broken, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_of_any_new_file(tmp_path, monkeypatch):
    """Without a question for the umask, which would change it for all threads of the process until it is put back"""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("changed for the whole process"))
    write_plan(PLAN, tmp_path / "a.plan")
    (tmp_path / "b").touch()
    assert (tmp_path / "a.plan").stat().st_mode == (tmp_path / "b").stat().st_mode


# --- Weights ---------------------------------------------------------------------------------------------------------


def test_pack_constant_lays_values_out():
    values = np.random.default_rng(1).standard_normal((5, 3, 2, 2)).astype(np.float32)
    tensor = dense("w", (5, 3, 2, 2), DType.F16, (0, 2, 3, 1))
    out = np.frombuffer(pack_constant(tensor, values), np.float16)
    assert len(out) == 5 * 2 * 2 * 8
    for o, c, r, s in itertools.product(range(5), range(8), range(2), range(2)):
        assert out[((o * 2 + r) * 2 + s) * 8 + c] == (np.float16(values[o, c, r, s]) if c < 3 else 0)
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2, 1\)"):
        pack_constant(tensor, values[..., :1])


def test_bf16_constants_are_their_bits():
    tensor = dense("w", (3,), DType.BF16)
    out = np.frombuffer(pack_constant(tensor, np.array([1.0, -2.0, 3.140625], np.float32)), np.uint16)
    assert out.tolist() == [0x3F80, 0xC000, 0x4049, 0, 0, 0, 0, 0]


def test_weights_that_were_left_out_are_filled_in():
    stripped = from_bytes(to_bytes(plan(left_out=["w1", "fc"])))
    with pytest.raises(UsageError, match=r"'w1'.*--weights MODEL\.onnx"):
        stripped.weight("w1")
    assert to_bytes(fill(stripped, sources())) == FILE


def test_weights_of_another_model_are_refused():
    stripped = plan(left_out=["w1"])
    with pytest.raises(UsageError, match="weight 'conv1', which the model does not have"):
        fill(stripped, {})
    with pytest.raises(UsageError, match=r"'conv1' as float32 \(9, 3, 3, 3\), the model has float32 \(1,\)"):
        fill(stripped, {"conv1": np.zeros(1, np.float32)})
    with pytest.raises(UsageError, match="the model has float16"):
        fill(stripped, {"conv1": np.zeros((9, 3, 3, 3), np.float16)})


@pytest.mark.parametrize(
    "recipe",
    [
        Transform("reshape", (Literal(np.zeros(3)),), (("shape", (2,)),)),
        Transform("matmul", (Literal(np.zeros(3)), Literal(np.zeros(4)))),
        Transform("cast", (Literal(np.zeros(3)),), (("dtype", "nonsense"),)),
        Transform("add", ()),
        Transform("sqrt", (Literal(np.zeros(3)), Literal(np.zeros(3)))),  # the second is where it would write
        Transform("neg", (Literal(np.zeros(3)),), (("dtype", "float32"),)),
        Transform("take", (Literal(np.zeros(3)), Literal(np.zeros(3))), (("axis", 1),)),
        Transform("slice", (Literal(np.zeros(3)),), (("ends", (1,)), ("starts", (0,)), ("steps", (0,)))),
        Literal(np.zeros(3)),
    ],
)
def test_recipes_that_cannot_be_evaluated(recipe):
    with pytest.raises(PlanError, match="recipe of the constant 'w1'"):
        fill(from_bytes(to_bytes(with_recipe(recipe))), sources())


def with_recipe(recipe: Recipe, **tensor: object) -> Plan:
    """The plan without the values of w1, which this recipe gives."""
    stripped = plan(left_out=["w1"])
    entry = stripped.entries[0]
    program = replace(entry.program, constants={**entry.program.constants, "w1": recipe})
    if tensor:
        program = replace(program, tensors={**program.tensors, "w1": replace(program.tensors["w1"], **tensor)})
    return replace(stripped, entries=(replace(entry, program=program),))


def column(n: int) -> Literal:
    return Literal(np.zeros((n, 1), np.float32))


@pytest.mark.parametrize(
    "recipe",
    [
        Transform("expand", (column(1),), (("shape", (1 << 20, 1 << 20)),)),
        Transform("add", (column(1 << 17), Transform("transpose", (column(1 << 17),), (("axes", (1, 0)),)))),
        Transform("matmul", (column(1 << 17), Transform("reshape", (column(1 << 17),), (("shape", (1, -1)),)))),
        Transform("pad", (column(1),), (("after", (1 << 40, 0)), ("before", (0, 0)))),
        Transform("take", (Transform("expand", (column(1),), (("shape", (1, 1 << 26)),)), Literal(np.zeros(8))), (("axis", 0),)),
        Transform("cast", (column(1),), (("dtype", "U1000000000"),)),
        Transform("rounded", (Transform("reshape", (column(0),), (("shape", (0, 1 << 40)),)),), (("terms", 1),)),
        Transform(
            "concat", (Transform("pad", (column(1),), (("after", (1 << 16, 0)), ("before", (0, 0)))),) * 4096, (("axis", 0),)
        ),
    ],
    ids=lambda recipe: recipe.fn,
)
def test_recipes_that_would_make_more_than_memory_holds(recipe):
    """What is made on the way counts, whatever comes of it: here one slice of it, or nothing."""
    first = Transform("slice", (recipe,), (("ends", (1, 1)), ("starts", (0, 0)), ("steps", (1, 1))))
    for whole in (recipe, first):
        with pytest.raises(PlanError, match="recipe of the constant 'w1'"):
            to_bytes(with_recipe(whole))


def test_a_constant_that_is_left_out_is_no_larger_than_weights_can_make_it():
    """A shape of few elements, but 10^11 in memory."""
    recipe = PLAN.entries[0].program.constants["w1"]
    with pytest.raises(PlanError, match=r"recipe of the constant 'w1' makes \d{11,} elements"):
        to_bytes(with_recipe(recipe, padded=((1 << 31) - 1, *PLAN.entries[0].program.tensors["w1"].padded[1:])))


dims = st.lists(st.integers(-1, 3), max_size=3).map(tuple)
cuts = st.lists(st.none() | st.integers(-4, 4), min_size=2, max_size=2).map(tuple)


def larger(r: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    def of(fn: str, arrays: int, **given: st.SearchStrategy) -> st.SearchStrategy[Recipe]:
        named = (v.map(lambda x, k=k: (k, x)) for k, v in sorted(given.items()))
        return st.builds(Transform, st.just(fn), st.tuples(*[r] * arrays), st.tuples(*named))

    return st.one_of(
        *(of(fn, 2) for fn in ("add", "matmul")),
        *(of(fn, n, axis=st.integers(-2, 2)) for fn, n in [("concat", 3), ("take", 2)]),
        *(of(fn, 1, shape=dims) for fn in ("reshape", "expand")),
        *(of(fn, 1, axes=dims) for fn in ("transpose", "flip")),
        of("slice", 1, starts=cuts, ends=cuts, steps=cuts),
        of("pad", 1, before=dims, after=dims),
        of("cast", 1, dtype=st.sampled_from(["float16", "U9"])),
        of("rounded", 1, terms=st.integers(0, 2)),
    )


@settings(max_examples=300, deadline=None)
@example(Transform("pad", (Literal(np.zeros((2, 2))),), (("after", (1,)), ("before", (1,)))))
@given(st.recursive(st.lists(st.integers(0, 3), max_size=3).map(lambda shape: Literal(np.zeros(shape))), larger, max_leaves=5))
def test_what_a_recipe_would_make_is_told_by_shapes(recipe):
    """Whatever NumPy makes of a recipe, its extents were known; but for text, which no weights are."""
    try:
        shape = weights.evaluate(recipe, {}).shape
    except NOT_EVALUATED:
        return
    assert "U9" in repr(recipe) or weights.extents(recipe)[0] == shape


# --- Damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\x89TCPLAN\n", b"PK\x03\x04" + bytes(100), FILE[:63]])
def test_what_is_not_a_plan(tmp_path, content):
    path = tmp_path / "model.plan"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"model\.plan: this is not a plan"):
        read_plan(path)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.plan", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            read_plan(path)


def test_another_format_version_is_named():
    other = FILE[:8] + struct.pack("<I", FORMAT_VERSION + 1) + FILE[12:]
    says = (
        f"the plan has format {FORMAT_VERSION + 1}, this version of tccompile reads format {FORMAT_VERSION}: "
        "install the newer one that made it, or compile the model again"
    )
    with pytest.raises(PlanError, match=says):
        from_bytes(other)


def test_damaged_weights_are_found_when_they_are_used():
    position = FILE.rindex(PLAN.weights["w2"])
    damaged = bytearray(FILE)
    damaged[position + 3] ^= 1
    read = from_bytes(bytes(damaged))
    assert bytes(read.weight("w1")) == PLAN.weights["w1"]
    with pytest.raises(PlanError, match=r"section 'weights w2'.*SHA-256.*damaged"):
        read.weight("w2")


def outcome(data: bytes) -> bytes | None:
    """What a file holds after all, None if it is refused. Anything but a PlanError is a failure."""
    try:
        read = from_bytes(data)
        for name in read.weights:
            read.weight(name)
        return to_bytes(read)
    except PlanError as error:
        assert str(error)
        return None


def test_random_damage():
    """Flipped bits, cut ends, lost and repeated pieces: refused, or nothing that matters was hit."""
    rng = random.Random(1)
    refused = 0
    for _ in range(120):
        data = bytearray(FILE)
        at, n = rng.randrange(len(data)), rng.choice((1, 2, 17, 300))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + n]
            case 3:
                data[at:at] = data[max(at - n, 0) : at] or b"x"
            case 4:
                data[at : at + n] = bytes(rng.randrange(256) for _ in range(n))
        result = outcome(bytes(data))
        refused += result is None
        assert result in (None, FILE)
    assert refused > 60


# --- Limits ----------------------------------------------------------------------------------------------------------

TENSORS = ("plan", "entries", 0, "program", "tensors")
OPS = ("plan", "entries", 0, "program", "ops")
FORMS = "plan", "entries", 0, "program", "forms"
STEPS = ("plan", "entries", 0, "sections", 0, "steps")
ARGS = (*STEPS, 1, "launches", 0, "args")
"""Of the first convolution: its result, its image, its weights, workspace and counters, two numbers and two tensor maps."""


def certificate(values: np.ndarray | None = None, **changes) -> dict:
    """One of PLAN's only entry, as JSON, with one thing changed."""
    values = np.zeros(5) if values is None else values
    array = {"dtype": values.dtype.name, "shape": list(values.shape), "data": base64.b64encode(values.tobytes()).decode()}
    numbers = {"norm": 1.0, "error": 0.0, "bound": 1e-2}
    expected = {"name": "y", "values": array, **numbers, **{k: v for k, v in changes.items() if k in numbers}}
    top = {"dtype": "float64", "shape": [4096], "data": base64.b64encode(bytes(8 * 4096)).decode()}
    outputs = [expected, {"name": "top", "values": top, "norm": 0.0, "error": 0.0, "bound": 1e-2}]
    made = {"entry": 0, "seed": 1, "inputs": "", "oracle": "none", "device": "none", "outputs": outputs}
    return made | {k: v for k, v in changes.items() if k not in numbers}


def deep_expr(levels: int) -> dict:
    out: dict = {"fn": "acc"}
    for _ in range(levels):
        out = {"fn": "relu", "args": [out]}
    return out


def deep_index(levels: int) -> dict:
    out: dict = {}
    for _ in range(levels):
        out = {"terms": [[{"_": "Quotient", "index": out, "divisor": 2}, 1]]}
    return out


def least_index(levels: int) -> dict:
    """min(min(… - 7, …), …): bounds that were computed twice a level would take for ever."""
    out: dict = {"constant": -7}
    for _ in range(levels):
        out = {"terms": [[{"_": "Least", "a": out, "b": {"terms": [[{"_": "Coord", "axis": 1}, 1]]}}, 1]]}
    return out


def grouped(tensor: str, groups: int, of: int) -> dict:
    return {"_": "Grouped", "tensor": tensor, "groups": groups, "of": of}


def of_tensor(name: str, extent: int = 1) -> dict:
    at = [{"terms": [[{"_": "Coord", "axis": axis}, 1]]} for axis in range(4)]
    return {"terms": [[{"_": "Element", "tensor": name, "index": at, "extent": extent}, 1]]}


LIMITS = [
    ((*TENSORS, "cat", "padded", 1), 1 << 45, "tensor 'cat'"),
    ((*TENSORS, "cat", "shape", 1), -1, "tensor 'cat'"),
    ((*TENSORS, "cat", "strides", 0), -8, "tensor 'cat'"),
    ((*TENSORS, "cat", "dtype"), "float8", "entries.0.*cat.dtype: 'float8' is no DType"),
    ((*TENSORS, "cat", "dtype"), "tf32", "'cat' has elements of type tf32, which no kernel"),
    ((*TENSORS, "cat", "name"), "dog", "calls itself 'dog'"),
    ((*TENSORS, "c1", "offset"), 9, "reaches outside the storage of 'cat'"),
    ((*TENSORS, "c1", "base"), "nobody", "nobody"),
    ((*TENSORS, "c1", "base"), "c2", "no storage of its own"),
    ((*TENSORS, "y", "padded"), [1, 8], "not row-major without padding"),
    ((*TENSORS, "cat", "colour"), 1, "Tensor has no 'colour'"),
    ((*OPS, 1, "x"), "nobody", "Conv 'first': 'nobody' is no tensor"),
    ((*OPS, 1, "_"), "Crash", "expected one of Pointwise, Conv"),
    ((*OPS, 1, "strides"), [0, 1], "Conv 'first': shapes"),
    ((*OPS, 1, "groups"), 2, "Conv 'first': shapes"),
    ((*OPS, 1, "pads"), [1], "Conv 'first': shapes"),
    ((*OPS, 1, "dilations"), [1, 1 << 40], "Conv 'first': shapes"),
    ((*OPS, 1, "y"), "c2", "Conv 'first': shapes"),
    ((*OPS, 3, "axes"), [2, 4], "Reduce 'mean': shapes"),
    ((*OPS, 5, "a"), "mean", "Gemm 'fc': shapes"),
    ((*OPS, 1, "epilogue"), {"shuffle": 4}, "shuffle 4"),
    ((*OPS, 1, "epilogue"), {"expr": deep_expr(150)}, "Conv 'first': its expression nests too deep"),
    ((*OPS, 1, "epilogue"), {"expr": deep_expr(400)}, "nests too deep"),
    ((*OPS, 0, "epilogue", "expr", "value"), 1, "no view 1"),
    ((*OPS, 0, "epilogue", "expr", "fn"), "__import__", "unknown function '__import__'"),
    ((*OPS, 0, "epilogue", "expr", "fn"), "acc", "acc where it has no place"),
    ((*OPS, 0, "epilogue", "loads", 0, "tensor"), "cat", "nothing before it writes"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0, "constant"), 1, "reads 'x' at 1…1 of 1"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), deep_index(140), "nests too deep"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), least_index(100), "reads 'x' at -7"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), {"terms": [[{"_": "Coord", "axis": 9}, 1]]}, "has no axis 9"),
    (
        (*OPS, 0, "epilogue", "loads", 0, "index", 0),
        {"terms": [[{"_": "Quotient", "divisor": 0, "index": {}}, 1]]},
        "divided by 0",
    ),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), of_tensor("nothing"), "'nothing' is no tensor"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), of_tensor("x"), "indices of float32"),
    ((*OPS, 0, "epilogue", "loads", 0, "index", 0), of_tensor("x", extent=0), "an axis of 0 elements"),
    (("plan", "entries", 0, "program", "constants", "w1", "fn"), "system", "unknown transform 'system'"),
    (("plan", "entries", 0, "program", "constants", "x"), {"_": "Source", "name": "", "shape": [], "dtype": ""}, "constant 'x'"),
    (("plan", "entries", 0, "program", "outputs"), ["y", "y"], "of the same name"),
    (FORMS, {"w1": [grouped("x", 1, 2)]}, "'x', which is a form of 'w1': one of them is no constant"),
    (FORMS, {"x": [grouped("w1", 1, 2)]}, "'w1', which is a form of 'x': one of them is no constant"),
    (FORMS, {"w1": [grouped("w1", 1, 2)]}, "'w1', which is a form of 'w1', has shape"),
    (FORMS, {"w1": [grouped("w1", 0, 2)]}, "'w1', which is a form of 'w1', has shape"),
    (FORMS, {"w1": [{"_": "Form", "tensor": "w1"}]}, "expected one of Grouped"),
    (("plan", "entries", 0, "program", "outputs"), ["cat"], "output 'cat' is not row-major"),
    (("plan", "entries"), [], "without entries"),
    (("plan", "entries", 0, "sections", 0, "arena"), 256, "of 256 bytes"),
    (("plan", "entries", 0, "sections", 0, "arena"), 1 << 50, "an arena of"),
    (("plan", "entries", 0, "sections", 0, "offsets", "cat"), -256, "tensor 'cat' ends at"),
    (("plan", "entries", 0, "sections", 0, "offsets", "cat"), 8, "16 does not divide"),
    (("plan", "entries", 0, "sections", 0, "offsets", "w1"), 0, "'w1' has no place in the arena"),
    ((*STEPS, 0, "op"), 1, "not the program's ops in order"),
    ((*STEPS, 1, "after"), [1], "step 1: runs after"),
    ((*STEPS, 0, "launches", 0, "image"), 2, "no code 2"),
    ((*STEPS, 0, "launches", 0, "grid"), [1, 65536, 1], "a grid of"),
    ((*STEPS, 0, "launches", 0, "grid"), [1, 1], "grid: expected an array of 3"),
    ((*STEPS, 0, "launches", 0, "cooperative"), True, "a cooperative grid of"),
    ((*STEPS, 0, "launches", 0, "early"), 1, "early: expected true or false"),
    ((*STEPS, 0, "launches", 0, "block"), 2048, "a block of 2048"),
    ((*STEPS, 0, "launches", 0, "smem"), 1 << 20, "shared memory"),
    ((*ARGS, 0, "bytes"), 1 << 30, "step 1 .Conv 'first'.: bytes .* of 'arena' are none of its tensors'"),
    ((*ARGS, 0, "space"), "host", "of 'host' are none"),
    ((*ARGS, 2, "name"), "w2", "of weights 'w2' are none"),
    ((*ARGS, 2, "name"), "x", "of weights 'x' are none"),
    ((*ARGS, 2, "bytes"), -16, "bytes -16 to -16 of weights 'w1' are none"),
    ((*ARGS, 3, "bytes"), 1 << 20, "of 'arena' are none"),
    ((*ARGS, 4, "bytes"), 0, "of 'counters' are none"),
    ((*ARGS, 5, "value"), 1 << 33, "in 32 bits"),
    ((*ARGS, 6, "value"), "infinity", "expected a number, got 'infinity'"),
    ((*ARGS, 7, "extents"), [8, 1 << 31], "of 'arena' are none"),
    ((*ARGS, 7, "extents"), [8, 37], "of 'arena' are none"),
    ((*ARGS, 7, "dtype"), "float32", "of 'arena' are none"),  # rows of 32 bytes where there are 16
    ((*ARGS, 7, "dtype"), "int8", "a tensor map"),  # a box of 8 bytes
    ((*ARGS, 7, "dtype"), "int64", "a tensor map"),
    ((*ARGS, 7, "box"), [8, 512], "a tensor map"),
    ((*ARGS, 7, "box"), [4, 8], "a tensor map"),
    ((*ARGS, 7, "swizzle"), 32, "a tensor map"),  # of a box whose rows have 16 bytes
    ((*ARGS, 7, "strides"), [8], "a tensor map"),
    ((*ARGS, 7, "strides"), [1 << 40], "a tensor map"),
    ((*ARGS, 7, "steps"), [9, 1], "a tensor map"),
    ((*ARGS, 7, "address", "bytes"), 8, "step 1 .*a tensor map"),
    ((*ARGS, 7, "address", "space"), "io", "a tensor map"),
    ((*ARGS, 8, "lower"), [0], "a tensor map"),
    ((*ARGS, 8, "lower"), [-129, 0], "a tensor map"),
    ((*ARGS, 8, "channels"), 64, "a tensor map"),
    ((*ARGS, 8, "channels"), 24, "a tensor map"),
    ((*ARGS, 8, "pixels"), 1025, "a tensor map"),
    ((*STEPS, 0, "launches", 0, "args", 1, "name"), "y", "of io 'y' are none"),
    ((*STEPS, 0, "launches", 0, "args", 0), {"_": "Int", "value": 0}, "no launch writes its result 'xh'"),
    ((*STEPS, 5, "launches"), [], "nothing writes the output 'y'"),
    ((*STEPS, 0, "launches"), [], "step 1 .*are none of its tensors'"),
    ((*STEPS, 1, "scratch"), [0, 1 << 30], "step 1: scratch of"),
    ((*STEPS, 1, "counters"), [-4, 8], "counters of"),
    (("plan", "entries", 0, "sections", 0, "arch"), "sm_90a", "code for sm_80 among that for sm_90a"),
    (("plan", "entries", 0, "sections", 0, "arch"), "sm_81", "a generation that there is not"),
    (("plan", "entries", 0, "sections", 0, "arch"), "cpu", "launches, which the CPU engine does not run"),
    (("plan", "images", 0, "arch"), "sm_90a", "code 0: cubin of 'sm_90a' that says it is for sm_80"),
    (("plan", "images", 0, "kind"), "ptx", "code 0: ptx of 'sm_80' that says it is for nothing"),
    (("plan", "images", 1, "arch"), "sm_80", "code 1: ptx of 'sm_80' that says it is for sm_90a"),
    (("plan", "images", 0, "function"), "g", "code 0: it has no function 'g'"),
    ((*TENSORS[:-1], "storage"), {"c1": {"reason": "why"}}, "storage of 'c1', which is no float tensor with storage of its own"),
    ((*TENSORS[:-1], "storage"), {"nobody": {"reason": "why"}}, "storage of 'nobody'"),
    ((*TENSORS[:-1], "storage"), {"xh": {"reason": "why", "scale": 2.0**127}}, r"scaled by 1.7\d*e\+38"),
    ((*TENSORS[:-1], "storage"), {"xh": {"reason": "why", "scale": 0.0}}, "scaled by 0.0"),
    ((*TENSORS[:-1], "storage"), {"xh": {"reason": "why", "scale": "nan"}}, "scaled by nan"),
    (("plan", "certificates"), [certificate(entry=1)], "certificate 0: it is of entry 1"),
    (("plan", "certificates"), [certificate(seed=1 << 32)], "certificate 0: a seed of"),
    (("plan", "certificates"), [certificate(outputs=[])], r"its outputs are \[\]"),
    (("plan", "certificates"), [certificate(bound="nan")], "a bound of nan"),
    (("plan", "certificates"), [certificate(error=-1.0)], "an error of -1.0"),
    (("plan", "certificates"), [certificate(held=1)], "an error of None on 1 inputs that were held back"),
    (("plan", "certificates"), [certificate(held=-1)], "-1 inputs that were held back"),
    (("plan", "certificates"), [certificate(values=np.zeros(4))], "expected 5 finite numbers of 64 bits"),
    (("plan", "certificates"), [certificate(values=np.zeros(5, np.float32))], "expected 5 finite numbers of 64 bits"),
    (("plan", "certificates"), [certificate(values=np.full(5, np.nan))], "expected 5 finite numbers of 64 bits"),
    ((*OPS, 0, "epilogue", "expr"), {"fn": "const", "value": 1e300, "dtype": "int64"}, r"a constant of int64 that is 1e\+300"),
    ((*OPS, 0, "epilogue", "expr"), {"fn": "bit_not", "args": [{"fn": "load", "value": 0}]}, "'in': bit_not of float32"),
    (("plan", "name"), "\ud800", r"name: expected Unicode, got '\\ud800'"),
    (("plan", "producer"), {"\ud800": "0"}, r"producer: expected Unicode, got '\\ud800'"),
    (
        ("plan", "entries", 0, "program", "constants", "bias", "values"),
        {"dtype": "float32", "shape": [0, 1 << 39, 1 << 39], "data": ""},
        "bias.values: an array of shape",
    ),
    (("plan", "images", 0, "kind"), "exe", "code of kind 'exe'"),
    (("plan", "images", 0, "code"), 99, "there is no section 99"),
    (("plan", "images", 0, "code"), {}, "there is no section {}"),
    (("plan", "weights", "y"), 0, "weights of 'y', which is no constant"),
    (("plan", "weights", "w1"), 0, "its layout has"),
    (("plan", "producer"), {"tccompile": 1}, "producer.tccompile: expected a string"),
    (("sections", 0, "length"), 1 << 62, "does not fit into the file"),
    (("sections", 0, "length"), -1, "does not fit into the file"),
    (("sections", 0, "sha256"), "z", "SHA-256"),
    (("sections", 0, "size"), 1 << 62, "at most"),
]


@pytest.mark.parametrize("place, value, message", LIMITS, ids=[".".join(map(str, place[-3:])) for place, _, _ in LIMITS])
def test_limits(place, value, message):
    header = header_of(FILE)
    code = next(i for i, s in enumerate(header["sections"]) if s["name"] == "code")
    place = tuple(code if place[0] == "sections" and p == 0 else p for p in place)
    node = header
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises(PlanError, match=message):
        from_bytes(with_header(FILE, header))


def with_op(tensor: Tensor) -> Plan:
    """The plan with one op more, which writes a number into a tensor."""
    entry = PLAN.entries[0]
    op = Pointwise(nodes=("more",), y=tensor.name, epilogue=Epilogue(const(7)))
    program = replace(entry.program, tensors={**entry.program.tensors, tensor.name: tensor}, ops=(*entry.program.ops, op))
    last = len(entry.program.ops)
    at = {} if tensor.base else {tensor.name: entry.sections[0].arena}  # at the arena's end
    sections = tuple(
        replace(s, steps=(*s.steps, replace(s.steps[0], op=last)), offsets={**s.offsets, **at}) for s in entry.sections[:1]
    )
    return replace(PLAN, entries=(replace(entry, program=program, sections=sections),))


@pytest.mark.parametrize("owner", ["x", "bias"])
def test_inputs_and_constants_are_not_written(owner):
    """The CPU engine reads a caller's arrays and the mapped file where they lie."""
    base = PLAN.entries[0].program.tensors[owner]
    with pytest.raises(PlanError, match=f"'more': writes into '{owner}', which is an input or a constant"):
        to_bytes(with_op(replace(base, name="view", base=owner)))


def test_padding_of_a_tensor_without_elements_is_memory_too():
    """Whoever writes the tensor writes its padding."""
    with pytest.raises(PlanError, match="tensor 'none' ends at"):
        to_bytes(with_op(Tensor("none", (0, 3), DType.F32, (8, 8), (8, 1))))


@pytest.mark.parametrize("name, dtype", [("z", DType.F32), ("x", DType.F64)])
def test_entries_have_the_same_inputs_and_outputs(name, dtype):
    """A session takes them to be those of the first entry."""

    def entry(name: str, dtype: DType) -> Entry:
        tensors = {n: dense(n, (2,), t, pad=1) for n, t in ((name, dtype), ("y", DType.F32))}
        op = Pointwise(nodes=("copy",), y="y", epilogue=Epilogue(load(0), (identity_view(name, 1),)))
        return Entry(Program((name,), ("y",), tensors, {}, (op,)), ())

    with pytest.raises(PlanError, match="entry 1: has other inputs or outputs"):
        to_bytes(Plan("", {}, (entry("x", DType.F32), entry(name, dtype)), (), {}))


def test_indices_are_integers():
    tensors = [dense("x", (2, 3), DType.F32, pad=1), dense("y", (2, 4), DType.F32, pad=1)]
    tables = [dense("index", (4, 1), DType.F32), dense("weights", (4, 1), DType.F32)]
    op = Resize(nodes=("up",), y="y", x="x", axes=(1,), index=("index",), weights=("weights",))
    constants = {t.name: Literal(np.zeros(t.shape, np.float32)) for t in tables}
    program = Program(("x",), ("y",), {t.name: t for t in (*tensors, *tables)}, constants, (op,))
    with pytest.raises(PlanError, match="Resize 'up': indices of float32"):
        to_bytes(Plan("", {}, (Entry(program, ()),), (), {}))


SECTIONS = codec.dumps(header_of(FILE)["sections"])


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "not JSON"),
        (b"[]", "expected a plan and its sections"),
        (b'{"plan":NaN,"sections":[]}', "NaN is not JSON"),
        (b'{"plan":' + b"[" * 100_000 + b"]" * 100_000 + b',"sections":[]}', "nests too deep"),
        (b'{"plan":{},"sections":' + SECTIONS + b"}", "section 'header': Plan lacks entries"),
        (b'{"plan":' + b"9" * 5000 + b',"sections":[]}', "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"plan":{"name":"a","name":"b"},"sections":[]}', "'name' twice in one object"),
        (b'{"plan":[' + b"{}," * (1 << 21) + b'{}],"sections":[]}', "header has .* values, at most"),
    ],
)
def test_texts_that_are_no_header(text, message):
    with pytest.raises(PlanError, match=message):
        from_bytes(with_header(FILE, text))


def test_a_header_that_swells_when_decompressed():
    stored = zlib.compress(bytes(1 << 24))
    digest = hashlib.sha256(stored).digest()
    for claimed in (1 << 10, 1 << 24 | 1, 1 << 40):
        bomb = PREFIX.pack(FILE[:8], FORMAT_VERSION, 0, len(stored), claimed, digest) + stored
        with pytest.raises(PlanError, match="section 'header'"):
            from_bytes(bomb)


def test_bytes_between_sections_are_zero():
    length = PREFIX.unpack_from(FILE)[3]
    for at in (PREFIX.size + length, -(-(PREFIX.size + length) // 256) * 256 - 1):
        with pytest.raises(PlanError, match=r"bytes before section .* that are not zero"):
            from_bytes(FILE[:at] + b"x" + FILE[at + 1 :])


def test_code_is_decompressed_once_and_within_bounds(monkeypatch):
    """However many images have the same; and all of it together."""
    alike = replace(PLAN, images=tuple(replace(PLAN.images[i > 0], params=(("n", i),)) for i in range(50)))
    read = from_bytes(to_bytes(alike))
    assert len({id(i.code) for i in read.images}) == 2
    monkeypatch.setattr(plan_module, "MAX_ALL_CODE", sum(len(i.code) for i in PLAN.images) - 1)
    with pytest.raises(PlanError, match=r"section 'code': .* bytes, at most"):
        from_bytes(FILE)


def test_no_memory_to_read_a_plan_is_an_error_of_ours(monkeypatch):
    def none(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(plan_module, "_decompressed", none)
    with pytest.raises(LaunchError, match="no memory to read the plan"):
        from_bytes(FILE)


def test_values_that_weights_hold_too():
    """A constant that the program says is one thing, and the engines read as another."""
    header = header_of(FILE)
    values = {"dtype": "float32", "shape": [5], "data": base64.b64encode(np.ones(5, np.float32).tobytes()).decode()}
    header["plan"]["entries"][0]["program"]["constants"]["bias"]["values"] = values
    with pytest.raises(PlanError, match="'bias' has values, and weights"):
        from_bytes(with_header(FILE, header))


def moved(name: str, to: str) -> dict:
    """The header of a plan whose map puts a tensor where another begins."""
    header = header_of(FILE)
    for section in header["plan"]["entries"][0]["sections"]:
        section["offsets"][name] = section["offsets"][to]
        for step in section["steps"]:
            step["launches"] = []
        section["arch"] = "cpu"
    return header


def test_memory_maps_that_were_rewritten():
    """Each tensor where each other one begins: refused, unless that changes nothing, and results are what they were."""
    want = CpuEngine(PLAN, PLAN.entries[0], PLAN.entries[0].sections[0]).run(feeds())
    names, refused = PLAN.entries[0].sections[0].offsets, 0
    for name, to in itertools.permutations(names, 2):
        try:
            read = from_bytes(with_header(FILE, moved(name, to)))
        except PlanError:
            refused += 1
            continue
        got = CpuEngine(read, read.entries[0], read.entries[0].sections[0]).run(feeds())
        assert all(np.array_equal(got[n], want[n]) for n in want), (name, to)
    assert refused >= 6


def test_no_edge_can_be_missing():
    for s, section in enumerate(PLAN.entries[0].sections):
        for i, step in enumerate(section.steps):
            for a in step.after:
                header = header_of(FILE)
                header["plan"]["entries"][0]["sections"][s]["steps"][i]["after"].remove(a)
                with pytest.raises(PlanError, match=rf"step {i} .* may run at the same time as step"):
                    from_bytes(with_header(FILE, header))


def part(name: str, base: Tensor, first: int, channels: int) -> Tensor:
    shape = (1, channels, *base.shape[2:])
    return Tensor(name, shape, base.dtype, shape, base.strides, base.name, first)


@pytest.mark.parametrize(
    "parts, message",
    [
        ([(0, 8), (8, 8)], None),
        ([(8, 8), (0, 8)], None),
        ([(0, 8)], "reads elements of 'cat' that nothing before it writes"),
        ([(0, 8), (4, 12)], "writes elements of 'cat' that have been written"),
        ([(0, 4), (8, 8)], "reads elements of 'cat'"),
        ([(0, 16), (0, 16)], "that have been written"),
    ],
)
def test_each_element_is_written_once_before_it_is_read(parts, message):
    cat = dense("cat", (1, 16, 2, 2), DType.F16, (0, 2, 3, 1))
    y = dense("y", (1, 16, 2, 2), DType.F32, pad=1)
    slices = [part(f"c{i}", cat, first, count) for i, (first, count) in enumerate(parts)]
    ops = [Pointwise(nodes=(t.name,), y=t.name, epilogue=Epilogue(const(1.0))) for t in slices]
    last = Pointwise(nodes=("out",), y="y", epilogue=Epilogue(load(0), (identity_view("cat", 4),)))
    program = Program((), ("y",), {t.name: t for t in (cat, y, *slices)}, {}, (*ops, last))
    made = Plan("", {}, (Entry(program, ()),), (), {})
    if message is None:
        assert to_bytes(made)
    else:
        with pytest.raises(PlanError, match=message):
            to_bytes(made)


def test_what_lies_between_the_elements_of_a_tensor_is_not_read():
    """A tensor whose elements are two apart, all of them written, and a view of its storage that has those between them too."""
    apart = Tensor("apart", (1, 8), DType.F32, (1, 8), (16, 2))
    row = Tensor("row", (1, 8), DType.F32, (1, 8), (8, 1), "apart", 0)
    y = dense("y", (1, 8), DType.F32, pad=1)
    for read, taken in (("apart", True), ("row", False)):
        first = Pointwise(nodes=("apart",), y="apart", epilogue=Epilogue(const(1.0)))
        last = Pointwise(nodes=("out",), y="y", epilogue=Epilogue(load(0), (identity_view(read, 2),)))
        program = Program((), ("y",), {t.name: t for t in (apart, row, y)}, {}, (first, last))
        made = Plan("", {}, (Entry(program, ()),), (), {})
        if taken:
            assert to_bytes(made)
        else:
            with pytest.raises(PlanError, match="reads elements of 'row' that nothing before it writes"):
                to_bytes(made)


def test_checking_takes_time_by_steps_not_by_their_squares():
    """Thousands of steps that all read one tensor and write slices of another, which one reads."""
    n = 1500
    tensors = [dense("x", (n, 8), DType.F32, pad=1), dense("y", (n, 8), DType.F32, pad=1), dense("a", (n, 8), DType.F32)]
    tensors += [Tensor(f"t{i}", (1, 8), DType.F32, (1, 8), (8, 1), "y", 8 * i) for i in range(n)]
    copy = Pointwise(nodes=("a",), y="a", epilogue=Epilogue(load(0), (identity_view("x", 2),)))
    row = Epilogue(load(0), (View("a", (constant(3), coord(1))),))
    ops = (copy, *(Pointwise(nodes=(f"t{i}",), y=f"t{i}", epilogue=row) for i in range(n)))
    program = Program(("x",), ("y",), {t.name: t for t in tensors}, {}, ops)
    placed = place(program, [Work(())] * len(ops))
    steps = tuple(Step(i, "none", {}, False, "", (), after) for i, after in enumerate(placed.after))
    made = Plan("", {}, (Entry(program, (Section("cpu", steps, placed.offsets, placed.arena, 0),)),), (), {})
    begin = time.process_time()
    check_plan(made)
    assert time.process_time() - begin < 2  # it takes 0.2 s


def test_the_compiler_cannot_write_what_nobody_reads():
    entry = PLAN.entries[0]
    op = entry.program.ops[0]
    expr = load(0)
    for _ in range(200):
        expr = call("relu", expr)
    program = replace(entry.program, ops=(replace(op, epilogue=replace(op.epilogue, expr=expr)), *entry.program.ops[1:]))
    with pytest.raises(PlanError, match="nests too deep"):
        to_bytes(replace(PLAN, entries=(replace(entry, program=program),)))


# --- The codec -------------------------------------------------------------------------------------------------------

integers = st.integers(-(1 << 63), (1 << 63) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(st.booleans(), integers, finite, st.text(), st.none())
attributes = st.lists(
    st.tuples(st.text(), st.recursive(scalars, lambda x: st.lists(x, max_size=3).map(tuple), max_leaves=5)), max_size=3
).map(tuple)
recipes = st.recursive(
    st.builds(Source, st.text(), st.lists(st.integers(0, 9)).map(tuple), st.sampled_from(["float32", "int64"])),
    lambda r: st.builds(Transform, st.text(), st.lists(r, max_size=3).map(tuple), attributes),
    max_leaves=8,
)
constants = st.one_of(
    st.floats(allow_nan=False, width=64).map(const),
    integers.map(lambda v: const(v, DType.I64)),
    st.booleans().map(lambda v: const(v, DType.BOOL)),
)
expressions = st.recursive(
    st.one_of(constants, st.integers(0, 9).map(load)), lambda e: st.builds(partial(call, "add"), e, e), max_leaves=10
)
extents = st.lists(st.integers(-5, 1 << 50), max_size=4).map(tuple)
tensors = st.builds(
    Tensor, st.text(), extents, st.sampled_from(DType), extents, extents, st.none() | st.text(), st.integers(-3, 3)
)


def round_trip(value, hint):
    coder = codec.Codec({}, {})
    text = codec.dumps(coder.encode(value, hint))
    back = codec.Codec({}, {}).decode(codec.loads(text), hint)
    assert codec.dumps(coder.encode(back, hint)) == text
    return back


@settings(max_examples=100, deadline=None)
@given(tensors, expressions, recipes)
def test_the_codec_gives_back_what_it_got(tensor, expr, recipe):
    assert round_trip(tensor, Tensor) == tensor
    back = round_trip(expr, Expr)
    assert back == expr and repr(back) == repr(expr)  # -0.0 is not 0.0, True is not 1
    assert repr(round_trip(recipe, Recipe)) == repr(recipe)


@dataclass(frozen=True)
class Numbers:
    value: float
    other: int | float | str = 0


@given(st.floats(width=64), st.one_of(st.integers(-9, 9), st.text(), finite))
def test_floats_are_exact(value, other):
    back = round_trip(Numbers(value, other), Numbers)
    assert struct.pack("<d", back.value) == struct.pack("<d", value) or (math.isnan(value) and math.isnan(back.value))
    assert back.other == other and type(back.other) is type(other)


@given(st.recursive(scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(), x, max_size=4), max_leaves=10))
@settings(max_examples=200, deadline=None)
def test_the_codec_refuses_what_is_something_else(value):
    """Any JSON value decodes to a value of the type, or gives a CodecError."""
    for hint in (Tensor, Expr, Numbers, tuple[int, ...], DType, tuple[str, float], float | None):
        try:
            back = codec.Codec({}, {}).decode(copy.deepcopy(value), hint)
        except codec.CodecError:
            continue
        codec.Codec({}, {}).encode(back, hint)


def test_errors_of_the_codec_say_where():
    with pytest.raises(codec.CodecError, match=r"^shape\[1\]: expected an integer of 64 bits, got 1.5$"):
        text = {"name": "x", "shape": [1, 1.5], "dtype": "float32", "padded": [], "strides": []}
        codec.Codec({}, {}).decode(text, Tensor)
    with pytest.raises(codec.CodecError, match="inf cannot stand where a string could"):
        codec.Codec({}, {}).encode(Numbers(0.0, float("inf")), Numbers)


def test_feeds_fit():
    """The small program runs from its file: what these tests damage is whole to begin with."""
    read = from_bytes(FILE)
    out = CpuEngine(read, read.entries[0], read.entries[0].sections[0], check_padding=True).run(feeds())
    assert np.isfinite(out["y"]).all() and out["top"].shape == (1, 4096)
