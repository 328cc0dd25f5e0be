"""2:4 weights: what is recognized, how they lie, what plans check, what other weights are held to, what is chosen and said."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.arch import ARCHS
from tccompile.emit import pack
from tccompile.errors import PlanError, VerificationError
from tccompile.fuse.sparse import compress
from tccompile.ir import sparse
from tccompile.ir.forms import Sparse
from tccompile.ir.limits import check_program
from tccompile.ir.program import Program
from tccompile.ir.storage import elements, pack_constant
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Literal, evaluate, extents
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.refit.plan import refitted
from tccompile.schedule import choose as choosing
from tccompile.schedule.choose import candidates, choose, is_sparse
from tccompile.schedule.timings import FORMAT, NO_TIMINGS, SPARSE, Table, Timing, Timings, key
from tccompile.tune import _forms, _pruned
from tests.bench.layers import GemmLayer
from tests.bench.sparse import offered
from tests.gpu.cases import conv, gemm, of_8_bits, program_of, pruned
from tests.refit.common import bits, plan_of, weights
from tests.rewrites.common import Net

ROOT = Path(__file__).parents[1]


# --- How they lie ----------------------------------------------------------------------------------------


def unpacked(values: np.ndarray, places: np.ndarray, whole: int) -> np.ndarray:
    """(O, K) of what `ir/sparse.py` says, thread by thread."""
    words = places.reshape(-1, 512 * (whole // 64)).view("<u4").reshape(len(places), -1, 128, whole // 64)
    out = np.zeros((len(places) * 64, words.shape[1] * whole), values.dtype)
    given = np.zeros((len(out), out.shape[1] // 2), values.dtype)
    given[: len(values)] = values
    for block, stage, thread, word in np.ndindex(words.shape):
        w, g, q = thread // 32, thread % 32 // 4, thread % 4
        for nibble in range(8):
            if whole == 64:
                row, k = 16 * w + g + 8 * (nibble // 4), 16 * q + 4 * (nibble % 4)
            else:
                row, k = 16 * w + g + 8 * (q % 2), 64 * word + 32 * (q // 2) + 4 * nibble
            row, k = row + 64 * block, k + stage * whole
            pair = int(words[block, stage, thread, word]) >> 4 * nibble & 15
            assert pair & 3 < pair >> 2, "in ascending order"
            out[row, k + (pair & 3)], out[row, k + (pair >> 2)] = given[row, k // 2], given[row, k // 2 + 1]
    return out


@pytest.mark.parametrize(("shape", "whole"), [((70, 130), 64), ((9, 72, 1, 2), 64), ((70, 130), 128), ((130, 8, 2), 128)])
def test_places_say_where_values_are(shape, whole):
    w = pruned(np.random.default_rng(0).standard_normal(shape).astype(np.float16))
    values, places = sparse.sparse_values(w, whole), sparse.sparse_places(w, whole)
    assert (values.shape, places.shape) == sparse.shapes(shape, whole) and places.dtype == np.uint8
    rows = np.moveaxis(w, 1, -1)
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -shape[1] % whole)]).reshape(shape[0], -1)
    found = unpacked(values, places, whole)
    assert np.array_equal(found[: len(w)], rows) and not found[len(w) :].any()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_of_every_four_two_at_most(count):
    w = np.zeros((3, 12), np.float32)
    w[1, 5 : 5 + count] = np.nan
    assert sparse.is_sparse(w) == (count < 3)
    if count == 3:
        for transform in (sparse.sparse_values, sparse.sparse_places):
            with pytest.raises(ValueError, match="more than two differ from zero"):
                transform(w, 64)


@pytest.mark.parametrize(("shape", "whole"), [((4,), 64), ((4, 8), 32), ((4, 8), 0)])
def test_no_such_weights(shape, whole):
    with pytest.raises(ValueError, match="of K at a time"):
        sparse.sparse_values(np.zeros(shape), whole)


# --- What is recognized ----------------------------------------------------------------------------------


def with_weights(program: Program, change) -> Program:
    """Compressed where it can be, with other weights."""
    (op,) = program.ops
    name = op.w if hasattr(op, "w") else op.b
    values = change(program.constants[name].values)
    return compress(replace(program, constants={**program.constants, name: Literal(values)}), {})


@pytest.mark.parametrize(
    ("program", "change", "found"),
    [
        (gemm("g", (5, 40), 9), pruned, True),
        (gemm("g", (5, 42), 9), pruned, True),
        (gemm("g", (5, 40), 9), lambda w: w, False),
        (gemm("g", (5, 40), 9), lambda w: pruned(w.T).T.copy(), False),
        (gemm("g", (5, 3), 9), np.zeros_like, False),
        (gemm("g", (2, 5, 40), 9, batched=True), lambda w: w * 0, False),
        (gemm("g", (5, 40), 9, dtype=DType.F32), pruned, False),
        (conv("c", (1, 16, 5, 5), 8, (3, 3)), pruned, True),
        (conv("c", (1, 16, 5, 5), 8, (3, 3), groups=2), pruned, False),
        (of_8_bits("s", (5, 40), 9), pruned, True),
        (of_8_bits("s", (5, 40), 9, kinds=(DType.I8, DType.U8, DType.I32)), pruned, False),
    ],
)
def test_what_is_recognized(program, change, found):
    made = with_weights(program, change)
    forms = [form for forms in made.forms.values() for form in forms if isinstance(form, Sparse)]
    assert bool(forms) == found
    check_program(made)
    for form in forms:
        assert all(extents(made.constants[name])[0] == made.tensors[name].shape for name in form.tensors)


def test_a_form_s_constants_are_its_weights():
    program = program_of("sparse_conv")
    ((name, (form,)),) = program.forms.items()
    values, places = (program.constants[n].values for n in form.tensors)
    taps = unpacked(values, places, 64)[:72].reshape(72, 3, 3, 64)
    assert np.array_equal(taps[..., :40], np.moveaxis(program.constants[name].values, 1, -1))
    assert form.renamed({form.places: "other"}) == Sparse(form.tensor, "other")


# --- What plans check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        (0, lambda t: dense(t.name, (t.shape[0], t.shape[1] + 32), t.dtype)),
        (0, lambda t: dense(t.name, t.shape, DType.BF16)),
        (0, lambda t: dense(t.name, t.shape, t.dtype, (1, 0))),
        (1, lambda t: dense(t.name, (t.shape[0] - 1, *t.shape[1:]), t.dtype)),
        (1, lambda t: dense(t.name, t.shape, DType.I8)),
    ],
)
def test_compressed_weights_of_another_size_are_refused(part, tensor):
    program = program_of("sparse_gemm")
    name = program.forms["b"][0].tensors[part]
    with pytest.raises(PlanError, match=r"'b.2of4', which is a form of 'b', and its places are"):
        check_program(replace(program, tensors={**program.tensors, name: tensor(program.tensors[name])}))


def test_places_that_are_no_constant_are_refused():
    program = program_of("sparse_gemm")
    with pytest.raises(PlanError, match="one of them is no constant"):
        check_program(replace(program, forms={"b": (Sparse("b.2of4", "y"),)}))


# --- Other weights ---------------------------------------------------------------------------------------


def net(seed: int, change=pruned) -> onnx.ModelProto:
    n, rng = Net(x=(4, 64)), np.random.default_rng(seed)
    w = rng.standard_normal((16, 64)).astype(np.float32) / 8
    return n.out(n("Gemm", "x", change(w), n.normal(16), transB=1)).model()


def test_other_weights_are_compressed_again_or_refused(monkeypatch):
    """As in plans whose steps read the compressed form."""
    monkeypatch.setattr(pack, "_without_unread", lambda program, read: program)
    plan = from_bytes(to_bytes(plan_of(net(0), "fp16")))
    assert [type(form) for forms in plan.entries[0].program.forms.values() for form in forms] == [Sparse]
    assert bits(refitted(plan, weights(net(1)))) == bits(plan_of(net(1), "fp16")) != bits(plan)
    with pytest.raises(VerificationError, match=r"the weight '.*': of four neighbouring channels more than two differ from zero"):
        refitted(plan, weights(net(1, lambda w: w)))


# --- What is chosen, and said ----------------------------------------------------------------------------


def reason(program: Program, arch: str, timings: Timings = NO_TIMINGS) -> str:
    return choose(program.ops[0], program, ARCHS[arch], timings=timings).reason


def product(*sizes: int) -> Program:
    return offered(GemmLayer(*sizes).parts()[-1][1], ["b"])


def test_reasons_say_2of4_or_why_not():
    large = product(4096, 4096, 4096)
    assert reason(large, "sm_90a").endswith("; 2:4")
    assert reason(product(16, 4096, 4096), "sm_80").endswith("; 2:4")
    assert "; not as 2:4: sm_75 has no " in reason(large, "sm_75")
    assert "; not as 2:4: that is estimated to take " in reason(product(4, 1024, 512), "sm_90a")
    assert "is less than the 64 that are multiplied at a time" in reason(product(4096, 4096, 32), "sm_90a")
    assert "2:4" not in reason(replace(large, forms={}), "sm_90a")


@pytest.mark.parametrize(
    ("us", "own", "said"),
    [
        (100.0, None, r"estimated [67]\d.\d µs by dense weights' on a GPU.*; 2:4$"),
        (1.0, None, r"measured 1.0 µs on a GPU.*; not as 2:4: that is estimated to take"),
        (100.0, 7.0, r"measured 7.0 µs on a GPU.*; 2:4$"),
        (100.0, 700.0, r"measured 100.0 µs on a GPU.*; not as 2:4: that took 700.0 µs"),
    ],
)
def test_times_of_dense_weights_tell_those_of_others(us, own, said, monkeypatch):
    """As much less as estimates say, of the same kernel, where that is surely faster than all others; unless 2:4 was measured."""
    program = product(4096, 4096, 4096)
    (op,), ranked = program.ops, candidates(program.ops[0], program, ARCHS["sm_90a"])
    monkeypatch.setattr(choosing, "source", lambda kernel: "")
    dense_one = next(c for c in ranked if c.kernel.name == "gemm_sm90" and not is_sparse(c.config))
    other, sparse_one = next(c for c in ranked if c.kernel.name == "gemm_mma"), next(c for c in ranked if is_sparse(c.config))
    times = [(dense_one, 100.0), (other, us)] + ([(sparse_one, own)] if own else [])
    name = key(op, program)
    assert name.endswith(SPARSE) and key(op, replace(program, forms={})) == name.removesuffix(SPARSE)
    timings = tuple(Timing(c.kernel.name, c.config, t, "") for c, t in times)
    table = Table("a GPU", "sm_90a", {name if own else name.removesuffix(SPARSE): timings}, FORMAT)
    assert re.search(said, reason(program, "sm_90a", Timings((table,))))


@pytest.mark.parametrize("dtype", [DType.F16, DType.I8, DType.E4M3])
def test_weights_to_measure_with_are_2of4(dtype):
    t = dense("w", (6, 40), dtype)
    data = _pruned(t, pack_constant(t, np.random.default_rng(0).integers(1, 3, t.shape)))
    values = elements(np.frombuffer(data, dtype.numpy), t)
    assert sparse.is_sparse(values) and np.count_nonzero(values) == values.size / 2
    assert len({tuple(np.flatnonzero(four)) for four in values.reshape(-1, 4)}) == 6


def test_measured_forms_are_of_the_weights_measured():
    program = product(64, 64, 128)
    data = {"b": _pruned(program.tensors["b"], pack_constant(program.tensors["b"], np.ones((64, 128), np.float16)))}
    form, made = program.forms["b"][0], _forms(program, data)
    b = elements(np.frombuffer(data["b"], np.float16), program.tensors["b"])
    for name in form.tensors:
        assert bytes(made[name]) == bytes(pack_constant(program.tensors[name], evaluate(program.constants[name], {"b": b})))


# --- The recipe ------------------------------------------------------------------------------------------


def test_the_demo_s_network_is_pruned():
    folder = ROOT / "docs" / "examples" / "superres"
    model = onnx.load(folder / "superres_x3.onnx")
    names = runpy.run_path(str(folder / "prune.py"))["prune"](model)
    assert len(names) == 13, "all of its 14 convolutions but the first, of three channels"
    found = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer]
    assert sum(sparse.is_sparse(w) for w in found if w.ndim == 4 and w.shape[1] > 3) == 13
