"""Pointwise ops, simulated and compiled."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.expr import (
    Element,
    Expr,
    Index,
    Range,
    View,
    broadcast_view,
    call,
    cast,
    constant,
    coord,
    greatest,
    identity_view,
    least,
    load,
    quotient,
    remainder,
    reshape_view,
)
from tccompile.ir.ops import Pointwise
from tccompile.ir.reference import compute
from tccompile.ir.storage import from_storage, to_storage
from tccompile.ir.types import ELEMENTS, DType
from tccompile.kernels.codegen import decode, divider, encode
from tccompile.kernels.pointwise import PointwiseKernel
from tccompile.lower.narrow import GRIDS, rounded
from tests.gpu.cases import NHWC, Builder, pointwise, program_of
from tests.kernels import machine, simulator
from tests.kernels.support import ARCH, cases_of, check
from tests.tiers import APART, thorough, usually

KERNEL = PointwiseKernel()
F16, F32, I64 = DType.F16, DType.F32, DType.I64


LARGEST = {"to_nhwc_wide", "fp8_transposed", "transpose", "from_nhwc", "fp8_from_halves"}


@pytest.mark.parametrize("case", usually(cases_of(Pointwise), *({*cases_of(Pointwise)} - LARGEST)))
def test_values(case: str) -> None:
    check(KERNEL, program_of(case))


def scalar(b: Builder):
    b.values("x", np.array(3.0), F32)
    b.result((), F16)
    return call("exp", load(0)), (View("x", ()),)


def repeated(b: Builder):
    """Every read is of one element or one row"""
    b.values("x", np.array([2.0]), F32)
    b.normal("z", (1, 9), F16)
    b.result((5, 9), F16)
    return call("mul", load(0), load(1)), (broadcast_view("x", (1,), (5, 9)), broadcast_view("z", (1, 9), (5, 9)))


def concatenated(b: Builder):
    """Two tensors along the lanes' axis: which one is read depends on the lane"""
    shape = (3, 21)
    b.normal("x", (3, 10), F16)
    b.normal("z", (3, 11), F16)
    b.result(shape, F16)
    left, right = Range(coord(1), 0, 10), Range(coord(1), 10, 21)
    return call("add", load(0), load(1)), (
        View("x", (coord(0), coord(1)), (left,)),
        View("z", (coord(0), coord(1) - 10), (right,)),
    )


def reflected(b: Builder):
    """Padding by reflection: |i - 2| from the left, and from the right the same"""
    shape = (2, 13)
    i = coord(1) - 2
    mirrored = greatest(i, -i, shape)
    mirrored = least(mirrored, constant(16) - mirrored, shape)
    b.normal("x", (2, 9), F32)
    b.result(shape, F32)
    return load(0), (View("x", (coord(0), mirrored)),)


def rolled(b: Builder):
    """Remainders and quotients of negative numbers"""
    shape = (4, 18)
    b.normal("x", (4, 18), F16)
    b.normal("z", (12,), F16)
    b.result(shape, F16)
    turned = remainder(coord(1) - 5, 18, shape)
    floor = quotient(coord(1) - 9, 3, shape) + 4
    return call("sub", load(0), load(1)), (View("x", (coord(0), turned)), View("z", (floor,)))


def far_away(b: Builder):
    """A window that is mostly outside, on all sides"""
    b.normal("x", (1, 8, 3, 2), F16, NHWC)
    b.result((1, 8, 9, 7), F16, NHWC)
    index = (coord(0), coord(1), coord(2) * 2 - 7, -coord(3) + 4)
    return load(0), (View("x", index, (Range(index[2], 0, 3), Range(index[3], 0, 2)), -100.0),)


def rank_8(b: Builder):
    shape = (2, 1, 3, 2, 1, 2, 3, 5)
    b.normal("x", (5, 3, 2, 1, 2, 3, 1, 2), F32)
    b.result(shape, F16)
    return load(0), (View("x", tuple(coord(7 - a) for a in range(8))),)


def to_a_slice(b: Builder):
    b.normal("x", (2, 12, 3, 5), F16, NHWC)
    b.slice_of((2, 12, 3, 5), 1, 40, 4, F16, NHWC)
    return call("relu", load(0)), (identity_view("x", 4),)


def to_a_slice_with_padding(b: Builder):
    """What is read has less padding than what is written"""
    b.normal("x", (2, 3), F16)
    b.slice_of((2, 3), 1, 9, 6, F16)
    return call("neg", load(0)), (identity_view("x", 2),)


def patches(b: Builder):
    """Space to depth: the lane's axis is taken apart"""
    shape = (1, 20, 3, 4)
    b.normal("x", (1, 5, 6, 8), F16, NHWC)
    b.result(shape, F16, NHWC)
    c = coord(1)
    i, j = quotient(c, 10, shape), remainder(quotient(c, 5, shape), 2, shape)
    return load(0), (View("x", (coord(0), remainder(c, 5, shape), coord(2) * 2 + i, coord(3) * 2 + j)),)


def unflattened(b: Builder):
    b.normal("x", (2, 60), F16)
    b.result((2, 3, 4, 5), F16, NHWC)
    return load(0), (reshape_view("x", (2, 60), (2, 3, 4, 5)),)


def every_type(source: DType, to: DType):
    def make(b: Builder):
        if source.is_float:
            extremes = [0.0, -0.0, 1.5, -1.5, 127.9, -129.0, 300.0, -70000.0, np.nan, 65519.0, 1e-8] + [3e9, -1e19, 1e30] * (
                source is not F16
            )
            b.values("x", np.array(extremes * 3), source, pad=1)
        elif source is DType.BOOL:
            b.values("x", b.rng.integers(0, 2, 17).astype(bool), source, pad=1)
        else:
            limits = np.iinfo(source.numpy)
            b.values("x", b.rng.integers(limits.min, limits.max, 33, source.numpy, endpoint=True), source, pad=1)
        n = b.tensors["x"].shape
        b.result(n, to)
        return cast(load(0, source.compute), to.compute), (identity_view("x", 1),)

    return make


MORE = (
    scalar, repeated, concatenated, reflected, rolled, far_away, rank_8, to_a_slice, to_a_slice_with_padding, patches,
    unflattened,
)  # fmt: skip


@pytest.mark.parametrize("make", MORE, ids=lambda m: m.__name__)
def test_more_values(make) -> None:
    check(KERNEL, pointwise("case", make))


def transpose(shape: tuple[int, ...], order: tuple[int, ...], source: DType, to: DType, scale: float | None = None):
    """y's axis a is x's axis order[a]."""

    def make(b: Builder):
        b.values("x", to_storage(b.rng.standard_normal(shape), source), source)
        b.result(tuple(shape[a] for a in order), to)
        back = tuple(coord(order.index(a)) for a in range(len(shape)))
        return call("add", load(0), scale) if scale else load(0), (View("x", back),)

    return make


@pytest.mark.parametrize(
    "make",
    [
        transpose((67, 72), (1, 0), F16, F16),  # vectors in, tiles that are not full
        transpose((64, 45), (1, 0), F32, F16),  # an input whose rows end in padding
        transpose((2, 40, 3, 33), (2, 3, 0, 1), F16, F32, 2.0),  # x + 2 is not 0 in y's padding
        transpose((3, 70, 35), (0, 2, 1), DType.BF16, F32),
    ],
)
def test_tiles(make) -> None:
    program = pointwise("transpose", make)
    configs = list(KERNEL.configs(program.ops[0], program, ARCH))
    assert [*configs[0]] == ["tile"] and all([*config] == ["lanes"] for config in configs[1:])
    check(KERNEL, program)


def test_tiles_of_a_border() -> None:
    """NHWC to a model's output, whose rows are no vectors"""

    def make(b: Builder):
        b.normal("x", (2, 35, 7, 9), F16, NHWC)
        b.output((2, 35, 7, 9))
        return load(0), (identity_view("x", 4),)

    check(KERNEL, pointwise("border", make), {"tile": 64})


TYPES = [t for t in ELEMENTS if t.in_numpy]


@pytest.mark.parametrize("to", TYPES, ids=lambda t: t.value)
@pytest.mark.parametrize("source", [F32, F16, I64, DType.U8, DType.I16, DType.BOOL], ids=lambda t: t.value)
def test_types(source: DType, to: DType) -> None:
    """Bit for bit what the reference stores"""
    program = pointwise("types", every_type(source, to))
    (op,) = program.ops
    values = {name: recipe.values for name, recipe in program.constants.items()}
    expected = from_storage(to_storage(compute(op, program, values), to), to)
    config = next(KERNEL.configs(op, program, ARCH))
    memory = simulator.run(KERNEL.work(op, program, config, ARCH), program, values, op.y, ARCH)
    memory.check_written()
    np.testing.assert_array_equal(memory.result(), expected)


def test_dividers() -> None:
    n = np.unique(np.concatenate([np.arange(70), 2 ** np.arange(31) - 1, np.array([2**31 - 1, 2**31 - 2, 10**9 + 7])])).tolist()
    for d in [*range(1, 70), 1000, 2**16 - 1, 2**16, 2**16 + 1, 2**30 + 1, 2**31 - 1]:
        multiplier, shift = divider(d)
        assert -(2**31) <= multiplier < 2**31
        for k in (*n, *(x for m in (1, 3, 1001) for x in (m * d - 1, m * d) if x < 2**31)):
            assert k * (multiplier & 0xFFFFFFFF) >> shift == k // d


def test_expressions_as_json() -> None:
    import json

    expr = call("where", call("less", load(0), float("inf")), call("mul", load(1), 0.25), cast(load(2, I64), F32))
    text = json.loads(json.dumps(encode(expr)))
    assert decode(text) == expr


@pytest.mark.parametrize("turned", [False, True])
def test_constants_as_arguments_of_ptx(turned: bool) -> None:
    """Two scales and offsets, one code; its PTX, run by the machine, gives the reference's bits. Also of a transpose in tiles"""
    codes = set()
    for scale, offset in ((0.7, 5), (1 / 3, -(2**31))):

        def total(b: Builder, scale: float = scale, offset: int = offset):
            shape = (1, 40, 2, 40)
            b.normal("x", shape, F32, NHWC if turned else None)
            b.result(shape, F32)
            moved = call("add", call("mul", load(0), scale), 0.3)
            if turned:
                return moved, (identity_view("x", 4),)
            whole = cast(call("mul", moved, 100.0), I64)
            return cast(call("sub", whole, Expr("const", (), offset, I64)), F32), (identity_view("x", 4),)

        program = pointwise("constants", total)
        (op,) = program.ops
        config = next(KERNEL.configs(op, program, ARCH))
        assert ("tile" in config) == turned
        work = KERNEL.work(op, program, config, ARCH)
        codes.add(work.launches[0].code)
        values = {name: recipe.values for name, recipe in program.constants.items()}
        memory = machine.run(work, program, values, "y", ARCH)
        memory.check_written()
        expected = (values["x"].astype(np.float64) * np.float32(scale) + np.float32(0.3)).astype(np.float32)  # an FMA rounds once
        if not turned:
            expected = ((expected * np.float32(100)).astype(np.int64) - offset).astype(np.float32)
        np.testing.assert_array_equal(memory.result(), expected)
    assert len(codes) == 1


@pytest.mark.parametrize("elem", [*GRIDS], ids=TensorProto.DataType.Name)
def test_rounding_to_narrow_floats_as_compiled(elem: int) -> None:
    """No optimizer takes a number away that is added first: every number of fp16, and its neighbours in float32."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)].astype(np.float32)
    x = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(-np.inf))])[::5]
    x = x[: len(x) // 8 * 8].reshape(-1, 8)

    def on_grid(b: Builder):
        b.values("x", x, F32)
        b.result(x.shape, F32)
        return rounded(load(0), elem, saturate=True), (identity_view("x", 2),)

    program = pointwise("on a grid", on_grid)
    (op,) = program.ops
    work = KERNEL.work(op, program, next(KERNEL.configs(op, program, ARCH)), ARCH)
    memory = machine.run(work, program, {"x": x}, "y", ARCH)
    dtype, limit = helper.tensor_dtype_to_np_dtype(elem), GRIDS[elem].largest
    np.testing.assert_array_equal(memory.result(), np.clip(x, -limit, limit).astype(dtype).astype(np.float32))


def launch_of(program):
    (op,) = program.ops
    *_, config = KERNEL.configs(op, program, ARCH)
    (launch,) = KERNEL.work(op, program, config, ARCH).launches
    return launch


def loads_of(program) -> list[str]:
    return [entry[1] for entry in dict(launch_of(program).code.params)["loads"]]


def test_choices() -> None:
    assert loads_of(program_of("chain")) == ["vector", "each", "same"]  # the second one has a row of padding for each element
    assert loads_of(program_of("pad")) == ["vector"]
    assert loads_of(program_of("embedding")) == ["vector", "vector"]  # one index for each row
    assert loads_of(program_of("reshape")) == ["each"]
    assert loads_of(pointwise("case", repeated)) == ["same", "vector"]
    # A transpose: neighbouring threads along the input's innermost axis, not along y's, which is the last dimension.
    order = dict(launch_of(program_of("to_nhwc")).code.params)["order"]
    assert order[-1] != len(order) - 1


def test_shapes_share_code() -> None:
    def program(n: int):
        def make(b: Builder):
            b.normal("x", (n, 24, 5, 7), F16, NHWC)
            b.result((n, 24, 5, 7), F16, NHWC)
            return call("relu", load(0)), (identity_view("x", 4),)

        return pointwise("shape", make)

    assert launch_of(program(1)).code == launch_of(program(9)).code


def test_too_large() -> None:
    def make(b: Builder):
        from tccompile.ir.tensor import dense

        b.tensors["x"] = dense("x", (2**16, 2**16), F16)
        b.constants["x"] = None  # type: ignore[assignment]
        b.result((2**16, 2**16), F16)
        return load(0), (View("x", (coord(1), coord(0))),)

    program = pointwise("large", make)
    assert "32 bits" in KERNEL.supports(program.ops[0], program, ARCH)  # type: ignore[operator]


def everything(b: Builder) -> tuple[Expr, tuple[View, ...]]:
    """A code with a bit of each: vectors, scalars, conditions, quotients, functions of all types"""
    shape = (2, 19, 6, 8)
    b.normal("x", (2, 19, 3, 4), F16, NHWC)
    b.normal("r", (19,), F32)
    b.integers("i", (19,), I64)
    b.result(shape, F16, NHWC)
    up = View("x", (coord(0), coord(1), quotient(coord(2), 2, shape), quotient(coord(3), 2, shape)))
    moved = View("x", (coord(0), coord(1), coord(2) - 1, coord(3) - 2), (Range(coord(2), 1, 4), Range(coord(3), 2, 6)), 1.0)
    value = call("silu", call("mul", load(0), load(1)))
    value = call("where", call("less", load(3, I64), 2), value, call("gelu", load(2)))
    return value, (up, View("r", (coord(1),)), moved, View("i", (coord(1),)))


@thorough
@pytest.mark.parametrize("arch", APART)
def test_compiles(arch: str) -> None:
    program = pointwise("transpose", transpose((67, 72), (1, 0), F16, F16))
    (tiled,) = KERNEL.work(program.ops[0], program, {"tile": 64}, ARCH).launches
    indexed = [launch_of(program_of(case)) for case in ("embedding", "gather_elements", "gather_nd")]
    for launch in (launch_of(pointwise("everything", everything)), tiled, *indexed):
        assert resources(launch.code, ARCHS[arch]).stack == 0


def test_everything_is_right() -> None:
    check(KERNEL, pointwise("everything", everything))


@pytest.mark.parametrize("kept", [F32, I64])
@pytest.mark.parametrize("lanes", [1, 4])
def test_nothing_is_read_where_conditions_do_not_hold(kept: DType, lanes: int) -> None:
    """Three reads of each lane by itself, which take place if any lane needs them."""

    def seldom(b: Builder):
        shape = (3, 8, 20)
        for name in ("p", "q", "r"):
            b.integers(name, (20,), I64) if kept is I64 else b.normal(name, (20,), F32)
        b.integers("at", (8, 20), I64, 0, 20)
        b.integers("row", (3, 1), DType.BOOL, 0, 2)
        b.integers("column", (20,), DType.BOOL, 0, 2)
        b.result(shape, kept)
        views = [View(name, (Index(((Element("at", (coord(1), coord(2)), 20), 1),)),)) for name in ("p", "q", "r")]
        total = call("add", call("mul", load(0, kept), load(1, kept)), load(2, kept))
        inner = call("where", load(4, DType.BOOL), total, -1 if kept is I64 else -1.0)
        value = call("where", load(3, DType.BOOL), inner, 2 if kept is I64 else 2.0)
        return value, (*views, View("row", (coord(0), constant(0))), View("column", (coord(2),)))

    program = pointwise("seldom", seldom)
    (launch,) = KERNEL.work(program.ops[0], program, {"lanes": lanes}, ARCH).launches
    lines = KERNEL.source(ARCH, **dict(launch.code.params)).lines
    assert sum("if " in line for line in lines) == 2
    check(KERNEL, program)


def test_many_reads_without_a_condition() -> None:
    def sums(b: Builder):
        b.normal("x", (40,), F32)
        b.integers("at", (8, 20), I64, 0, 20)
        b.result((8, 20), F32)
        views = [View("x", (Index(((Element("at", (coord(0), coord(1)), 20), 1),), k),)) for k in range(4)]
        return call("add", call("add", load(0), load(1)), call("mul", load(2), load(3))), tuple(views)

    check(KERNEL, pointwise("sums", sums))
