"""Weights of 4 and 8 bits: what is recognized however a model says it, how they lie, what plans have and check, what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import tccompile
from tccompile.arch import ARCHS
from tccompile.dump import Dump
from tccompile.emit import pack
from tccompile.errors import PlanError, UsageError
from tccompile.fuse import packed as packing
from tccompile.fuse.packed import block_of
from tccompile.ir import packed
from tccompile.ir.forms import Packed
from tccompile.ir.limits import check_program
from tccompile.ir.ops import Gemm
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Recipe, Source, evaluate, extents, transform
from tccompile.kernels.gemv_packed import GemvPacked, GemvPackedMma
from tccompile.load.model import in_memory, read
from tccompile.options import Options, as_sizes
from tccompile.pipeline import Told, quiet, to_patterns, to_program, without_code
from tccompile.plan.file import Plan, from_bytes, to_bytes
from tccompile.plan.formulas import computed, drawn, filler
from tccompile.plan.weights import fill
from tccompile.ranges.box import opened
from tccompile.refit.plan import refitted
from tccompile.schedule.choose import choose
from tccompile.schedule.timings import key
from tccompile.tune import _data, repeated
from tests.bench.packed import Row
from tests.networks import relative_error
from tests.tiers import thorough

# --- How they lie ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, 384])
@pytest.mark.parametrize("shape", [(16, 128), (21, 300), (5, 45)])
def test_they_lie_as_they_are_unpacked(bits: int, block: int, shape: tuple[int, int]) -> None:
    rng, (n, k) = np.random.default_rng(0), shape
    blocks = -(-k // block)
    q, zero = (rng.integers(-(1 << bits - 1), 1 << bits - 1, s).astype(np.int8) for s in (shape, (n, blocks)))
    scale, offset = rng.uniform(0.5, 1, (n, blocks)).astype(np.float32), 1 << bits - 1
    parts = (
        packed.packed_values(q, bits, block, offset),
        packed.packed_scales(scale, block, "float32"),
        packed.packed_zeros(zero, block, offset),
    )
    assert tuple(p.shape for p in parts) == packed.shapes(shape, bits, block)
    each = [np.repeat(x.astype(np.float32), block, 1)[:, :k] for x in (zero, scale)]
    assert np.array_equal(packed.unpacked(shape, *parts, bits, block), (q - each[0]) * each[1])


def test_what_the_bits_do_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="integers from 0 to 16 in 4 bits"):
        packed.packed_values(np.array([[0, 16]]), 4, 32, 0)
    with pytest.raises(ValueError, match="zero points from -1 to 3"):
        packed.packed_zeros(np.array([[-1, 3]]), 32, 0)
    for bits, block in ((3, 32), (4, 48), (4, 8), (4, 192)):
        with pytest.raises(ValueError, match=f"weights of {bits} bits in blocks of {block}"):
            packed.shapes((16, 128), bits, block)


# --- What is recognized --------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
FLOATS = {np.float32: T.FLOAT, np.float16: T.FLOAT16}


def model(nodes: list, weights: list, shape: tuple[int, int], n: int, dtype: type = np.float32) -> onnx.ModelProto:
    """A model from x (M, K) to y (M, N)."""
    ends = [helper.make_tensor_value_info(name, FLOATS[dtype], s) for name, s in (("x", shape), ("y", (shape[0], n)))]
    weights = [w if isinstance(w, onnx.TensorProto) else numpy_helper.from_array(w[1], w[0]) for w in weights]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def of_n_bits(m: int, k: int, n: int, block: int, bits: int = 4, zeros: bool = True, dtype: type = np.float32) -> onnx.ModelProto:
    """As ONNX Runtime's quantizer writes it."""
    blocks = -(-k // block)
    weights = [
        ("w", RNG.integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8)),
        ("s", (RNG.uniform(0.5, 1, (n, blocks)) * 0.01).astype(dtype)),
    ]
    weights += [("z", RNG.integers(0, 256, (n, -(-blocks * bits // 8)), dtype=np.uint8))] * zeros
    names = ["x", *(name for name, _ in weights)]
    how = {"K": k, "N": n, "block_size": block, "bits": bits}
    return model([helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **how)], weights, (m, k), n, dtype)


LIMITS = {T.INT4: (-8, 8), T.UINT4: (0, 16), T.INT8: (-128, 128), T.UINT8: (0, 256)}


def dequantized(
    m: int, k: int, n: int, block: int, kind: int = T.INT4, zeros: bool = True, dtype: type = np.float32, turned: bool = False
) -> onnx.ModelProto:
    """DequantizeLinear of weights (K, N), or (N, K): in blocks, or with a scale for each output channel, or with one (-1)."""
    shape, axis = ((n, k), 1) if turned else ((k, n), 0)
    of_blocks = (
        tuple(-(-s // block) if a == axis else s for a, s in enumerate(shape)) if block > 0 else (n,) if block == 0 else ()
    )
    low, high = LIMITS[kind]
    weights: list = [helper.make_tensor("w", kind, shape, RNG.integers(low, high, shape).reshape(-1).tolist())]
    weights.append(("s", (RNG.uniform(0.5, 1, of_blocks) * 0.01).astype(dtype)))
    if zeros:
        weights.append(helper.make_tensor("z", kind, of_blocks, RNG.integers(low, high, of_blocks).reshape(-1).tolist()))
    how = {"axis": axis, "block_size": block} if block > 0 else {"axis": 1 - axis}
    first = helper.make_node("DequantizeLinear", ["w", "s", *["z"] * zeros], ["d"], **how)
    last = helper.make_node("Gemm", ["x", "d"], ["y"], transB=1) if turned else helper.make_node("MatMul", ["x", "d"], ["y"])
    return model([first, last], weights, (m, k), n, dtype)


def by_hand(scale: tuple[int, ...] = (96, 1), zero: object = 3, rest: str = "Mul") -> onnx.ModelProto:
    """Casts, differences and products, one by one."""
    node = helper.make_node
    nodes = [
        node("Cast", ["w"], ["a"], to=T.FLOAT), node("Sub", ["a", "z"], ["b"]), node(rest, ["b", "s"], ["c"]),
        node("Transpose", ["c"], ["d"]), node("MatMul", ["x", "d"], ["y"]),
    ]  # fmt: skip
    weights = [
        ("w", RNG.integers(-128, 128, (96, 256)).astype(np.int8)),
        ("z", np.asarray(zero, np.float32)),
        ("s", RNG.uniform(50, 99, scale).astype(np.float32)),
    ]
    return model(nodes, weights, (2, 256), 96)


def joined() -> onnx.ModelProto:
    """Two matrices side by side, in blocks of different sizes."""
    a, b = (dequantized(1, 256, 64, block, T.UINT4).graph for block in (32, 64))
    weights: list = []
    nodes = []
    for i, graph in enumerate((a, b)):
        for w in graph.initializer:
            w.name += str(i)
            weights.append(w)
        how = {"axis": 0, "block_size": 32 << i}
        nodes.append(helper.make_node("DequantizeLinear", [f"w{i}", f"s{i}", f"z{i}"], [f"d{i}"], **how))
    nodes += [helper.make_node("Concat", ["d0", "d1"], ["d"], axis=1), helper.make_node("MatMul", ["x", "d"], ["y"])]
    return model(nodes, weights, (1, 256), 128)


def program_of(proto: onnx.ModelProto, precision: str = "mixed") -> tuple[Program, dict[str, np.ndarray]]:
    opened = read(in_memory(proto))
    return to_program(opened, {}, Options(({},), precision=precision), Dump(None)), dict(opened.weights)


@pytest.mark.parametrize(
    ("proto", "bits", "block", "zeros"),
    [
        (of_n_bits(1, 256, 96, 32), 4, 32, True),
        (of_n_bits(1, 200, 96, 64, zeros=False, dtype=np.float16), 4, 64, False),
        (of_n_bits(1, 256, 96, 16, bits=2), 4, 16, True),
        (of_n_bits(1, 512, 24, 256, bits=8), 8, 256, True),
        (dequantized(1, 256, 96, 32), 4, 32, True),
        (dequantized(1, 200, 96, 48, T.UINT4), 4, 16, True),
        (dequantized(1, 200, 96, 128, T.INT4, zeros=False, dtype=np.float16), 4, 128, False),
        (dequantized(1, 256, 96, 64, T.INT8, turned=True), 8, 64, True),
        (dequantized(1, 250, 96, 0, T.INT8, zeros=False), 8, 256, False),
        (dequantized(1, 250, 96, -1, T.UINT8, zeros=False, dtype=np.float16), 8, 256, False),
        (by_hand(), 8, 256, True),
        (by_hand((1, 1), rest="Div"), 8, 256, True),
        (by_hand((1, 1), zero=np.arange(-48, 48)[:, None]), 8, 256, True),
        (joined(), 4, 32, True),
    ],
    ids=lambda v: "" if isinstance(v, onnx.ModelProto) else str(v),
)
def test_what_is_recognized(proto: onnx.ModelProto, bits: int, block: int, zeros: bool) -> None:
    program, weights = program_of(proto, "fp32")
    ((name, (form,)),) = program.forms.items()
    assert isinstance(form, Packed)
    assert (form.bits, form.block, bool(form.zeros)) == (bits, block, zeros)
    parts = {part: evaluate(program.constants[part], weights) for part in form.tensors}
    assert all(extents(program.constants[part])[0] == parts[part].shape == program.tensors[part].shape for part in parts)
    stood = parts[form.zeros] if form.zeros else form.zero
    found = packed.unpacked(program.tensors[name].shape, parts[form.tensor], parts[form.scales], stood, bits, block)
    assert relative_error(found, evaluate(program.constants[name], weights).astype(np.float32)) < (
        3e-4 if proto.graph.input[0].type.tensor_type.elem_type == T.FLOAT16 else 1e-7
    )


def test_blocks_of_many_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three scales, each of a block of its own, and of elements that are taken where it is not known yet."""
    monkeypatch.setattr(packing, "MANY", 1 << 8)
    factors: list[Recipe] = [Source(f"s{block}", (32, 512 // block, 1), "float32") for block in (32, 64, 128)]
    wide = (transform("expand", f, shape=(32, 512 // b, b)) for f, b in zip(factors, (32, 64, 128), strict=True))
    a, b, c = (transform("reshape", f, shape=(32, 512)) for f in wide)
    assert block_of([transform("mul", transform("mul", a, b), c)], 512) == 32
    taken = transform("take", Source("s", (64, 1), "float32"), Source("which", (64,), "int64"), axis=0)
    assert block_of([transform("expand", taken, shape=(64, 256))], 256) == 256
    assert block_of([transform("take", Source("s", (4, 256), "float32"), Source("which", (64,), "int64"), axis=0)], 256) is None


@pytest.mark.parametrize(
    "proto",
    [by_hand((96, 256)), by_hand((1, 256)), by_hand(zero=2.5), dequantized(1, 256, 96, 8), of_n_bits(1, 64, 16, 32)],
    ids=["a scale each", "scales along K", "no integer stands for 0", "blocks of 8", "few"],
)
def test_what_is_not(proto: onnx.ModelProto) -> None:
    assert not program_of(proto, "fp32")[0].forms


# --- Plans -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where steps read the integers, and no other form."""
    monkeypatch.setattr(pack, "_without_unread", lambda program, read: program)
    yield


def run(plan: Plan, x: np.ndarray) -> np.ndarray:
    return tccompile.Session(plan, device="cpu").run(None, {"x": x})[0]


def inputs(proto: onnx.ModelProto) -> np.ndarray:
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def sources(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return dict(read(in_memory(proto)).weights)


@pytest.mark.usefixtures("alone")
def test_a_plan_has_integers_alone() -> None:
    proto = of_n_bits(2, 512, 256, 64)
    plan = from_bytes(to_bytes(without_code(in_memory(proto))))
    program = plan.entries[0].program
    ((name, (form,)),) = program.forms.items()
    assert isinstance(form, Packed)
    assert form.alone and set(plan.weights) == set(form.tensors)
    assert len(to_bytes(plan)) < 512 * 256 * 0.75
    x = inputs(proto)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = ort.InferenceSession(proto.SerializeToString(), options).run(None, {"x": x})
    assert relative_error(run(plan, x), expected) < 5e-4
    assert plan.size(name) == 0 and len(plan.weight(name)) == program.tensors[name].nbytes


@pytest.mark.usefixtures("alone")
def test_other_weights() -> None:
    old, new = (of_n_bits(1, 256, 96, 32) for _ in range(2))
    plan, fresh = (from_bytes(to_bytes(without_code(in_memory(m), precision="fp16"))) for m in (old, new))
    other = refitted(plan, sources(new))
    assert {n: bytes(other.weight(n)) for n in plan.weights} == {n: bytes(fresh.weight(n)) for n in fresh.weights}
    x = inputs(old)
    assert np.array_equal(run(other, x), run(fresh, x)) and not np.array_equal(run(other, x), run(plan, x))


@pytest.mark.usefixtures("alone")
def test_integers_of_more_bits_are_refused() -> None:
    narrow = dequantized(1, 256, 96, 32, T.INT8, zeros=False)
    given = sources(narrow)
    low = replace_weight(narrow, "w", given["w"] % 8)
    plan = without_code(in_memory(low), precision="fp16")
    with pytest.raises(UsageError, match=r"cannot take the values given: integers from -?[0-9]+ to [0-9]+ in 4 bits"):
        refitted(plan, given)


def replace_weight(proto: onnx.ModelProto, name: str, values: np.ndarray) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    at = next(i for i, w in enumerate(out.graph.initializer) if w.name == name)
    out.graph.initializer[at].CopyFrom(numpy_helper.from_array(values, name))
    return out


@pytest.mark.usefixtures("alone")
def test_a_plan_without_weights_is_filled() -> None:
    proto = dequantized(1, 512, 256, 128, T.UINT4)
    whole = without_code(in_memory(proto))
    stripped = from_bytes(to_bytes(replace(whole, weights={n: b for n, b in whole.weights.items() if len(b) < 4096})))
    with pytest.raises(UsageError, match="made without its weights"):
        run(stripped, inputs(proto))
    assert np.array_equal(run(fill(stripped, sources(proto)), inputs(proto)), run(whole, inputs(proto)))


CHANGES = {
    "bits": (lambda f, p: (replace(f, bits=5), p), "weights of 5 bits"),
    "blocks": (lambda f, p: (replace(f, block=64), p), "in place of"),
    "zero": (lambda f, p: (replace(f, zero=256), p), "256 stands for 0"),
    "scales": (lambda f, p: (replace(f, scales=f.tensor), p), "in place of float32"),
    "values": (lambda f, p: (f, {**p, f.tensor: dense(f.tensor, (6, 2, 512), DType.U8)}), "in place of uint8"),
    "what": (lambda f, p: (replace(f, zeros="y"), p), "one of them is no constant"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_plan_must_keep_to(what: str) -> None:
    program, _ = program_of(of_n_bits(1, 256, 96, 32))
    ((name, (form,)),) = program.forms.items()
    change, message = CHANGES[what]
    form, tensors = change(form, dict(program.tensors))
    check_program(program)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_program(replace(program, tensors=tensors, forms={name: (form,)}))


# --- What is chosen, and said ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "arch", "kernel", "said"),
    [
        (1, "sm_61", "gemv_packed", "; weights in 4 bits in blocks of 128"),
        (1, "sm_80", "gemv_packed_mma", "; weights in 4 bits in blocks of 128"),
        (16, "sm_90a", "gemv_packed_mma", "; weights in 4 bits in blocks of 128"),
        (16, "sm_61", "", "; weights not in 4 bits in blocks of 128: sm_61 has no Tensor Core instruction"),
        (
            512,
            "sm_90a",
            "",
            "; weights not in 4 bits in blocks of 128: it has 512 rows; integers are read as they are for 16 rows",
        ),
    ],
)
def test_few_rows_read_integers(rows: int, arch: str, kernel: str, said: str) -> None:
    program = Row(rows, 4096, 4096, "int4, 128").program()
    (op,) = program.ops
    choice = choose(op, program, ARCHS[arch])
    assert choice.reason.split("; ", 1)[-1].find(said.removeprefix("; ")) >= 0
    assert choice.kernel.reads_integers == bool(kernel) and (not kernel or choice.kernel.name == kernel)
    assert "4 bits in blocks of 128" in key(op, program) and "4 bits" not in key(op, replace(program, forms={}))


@thorough
def test_entries_share_what_they_read() -> None:
    """One row reads integers, and 64 rows halves: a plan for both has both, and one for rows of one kind has one."""
    proto = of_n_bits(1, 1024, 1024, 128)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    x = np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    sizes = {}
    for rows in ((1,), (1, 64)):
        plan = from_bytes(
            to_bytes(tccompile.compile(proto, archs=["sm_80"], precision="fp16", entries=[{"x": (r, 1024)} for r in rows]))
        )
        sizes[rows] = sum(map(plan.size, plan.weights))
        for r in rows:
            (expected,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x[:r]})
            assert relative_error(run(plan, x[:r]), expected) < 5e-4
    assert sizes[1, 64] - sizes[1,] == 2 * 1024 * 1024 > 3 * sizes[1,]


@pytest.mark.parametrize(("kernel", "few"), [(GemvPacked(), 4), (GemvPackedMma(), 8)], ids=lambda v: getattr(v, "name", str(v)))
def test_few_rows_of_a_range_read_integers(kernel: GemvPacked | GemvPackedMma, few: int) -> None:
    """By one code, which has room for the most rows, and launches as at fixed sizes."""
    proto = of_n_bits(1, 256, 96, 32)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    options = Options(ranges=as_sizes({"rows": (2, 4)}))
    (found,), _ = to_patterns(read(in_memory(proto)), options, Dump(None), quiet, Told())
    arch, program = ARCHS["sm_80"], found.at(opened(found.box))
    op = next(op for op in program.ops if isinstance(op, Gemm))
    config = next(kernel.configs(op, found.at([3]), arch))
    assert kernel.supports(op, program, arch) is None
    formulas, tree = drawn(kernel.work(op, program, config, arch), ["rows"])
    (launch,) = filler(tree)(computed(formulas, [3])).launches
    (fixed,) = kernel.work(op, found.at([3]), config, arch).launches
    assert dict(launch.code.params)["few"] == few and (launch.grid, launch.args) == (fixed.grid, fixed.args)


def test_what_is_tuned_has_integers_of_its_own() -> None:
    """Each repetition; the weights in halves are the same, so that all candidates have one result."""
    program = Row(2, 256, 64, "int4, 32").program()
    (op,) = program.ops
    again, data = repeated(op, program, 3), _data(op, program)
    forms = [form for (form,) in again.forms.values()]
    assert len({name for form in forms for name in form.tensors}) == 6
    assert all(isinstance(again.constants[name], Source) and name in again.tensors for form in forms for name in form.tensors)
    parts = {
        n: np.frombuffer(data[n], program.tensors[n].dtype.numpy).reshape(program.tensors[n].shape) for n in ("values", "scales")
    }
    w = packed.unpacked((64, 256), parts["values"], parts["scales"], 8, 4, 32)
    assert relative_error(np.frombuffer(data["b"], np.float16).reshape(64, 256).astype(np.float32), w) < 1e-3
