"""Placement: no two live areas share bytes, edges order all steps that share bytes, and arguments point where tensors lie."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tccompile.ir.expr import Epilogue, call, identity_view, load
from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.kernels.spec import F32, I32, Counters, Im2colMap, Launch, Ptr, Scratch, TiledMap, Work, code
from tccompile.plan.format import Address, Float, Int, Map
from tccompile.schedule.place import ALIGN, Area, Placement, pack_areas, place
from tests.small import program as small_program

IMAGE = (0, 2, 3, 1)


def test_steps_whose_blocks_must_run_at_once_never_run_at_once() -> None:
    names = ("a", "b", "c")
    tensors = {"x": dense("x", (8,), DType.F32, pad=1), **{n: dense(n, (8,), DType.F32, pad=1) for n in names}}
    read = Epilogue(load(0), (identity_view("x", 1),))
    program = Program(("x",), names, tensors, {}, tuple(Pointwise(nodes=(n,), y=n, epilogue=read) for n in names))
    works = [Work((Launch(code("k"), (2, 1, 1), 32, (), cooperative=n != "b"),)) for n in names]
    assert place(program, works).after == ((), (), (0,))


@st.composite
def programs(draw) -> tuple[Program, list[Work]]:
    """Pointwise ops over random earlier tensors: whole ones, and channel slices of concatenations written part by part."""
    tensors = {"x": dense("x", (1, 8, 2, 2), DType.F32, pad=1)}
    ops: list[Pointwise] = []
    whole = ["x"]  # what may be read

    def add(y: Tensor) -> None:
        reads = draw(st.lists(st.sampled_from(whole), min_size=1, max_size=3))
        loads = tuple(identity_view(name, 4) for name in reads)
        expr = load(0)
        for k in range(1, len(loads)):
            expr = call("add", expr, load(k))
        tensors[y.name] = y
        ops.append(Pointwise(nodes=(y.name,), y=y.name, epilogue=Epilogue(expr, loads)))

    for i in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            add(dense(f"t{i}", (1, 8, 2, 2), draw(st.sampled_from([DType.F16, DType.F32])), IMAGE))
            whole.append(f"t{i}")
        else:
            parts = draw(st.integers(2, 4))
            cat = tensors[f"c{i}"] = dense(f"c{i}", (1, 8 * parts, 2, 2), DType.F16, IMAGE)
            order = draw(st.permutations(range(parts)))
            slices = [Tensor(f"c{i}.{p}", (1, 8, 2, 2), DType.F16, (1, 8, 2, 2), cat.strides, cat.name, 8 * p) for p in order]
            for part in slices:
                add(part)
            whole += [part.name for part in slices]
    last = ops[-1].y
    tensors["y"] = dense("y", (1, 8, 2, 2), DType.F32, pad=1)
    ops.append(Pointwise(nodes=("y",), y="y", epilogue=Epilogue(load(0), (identity_view(last, 4),))))
    program = Program(("x",), ("y",), tensors, {}, tuple(ops))
    verify(program)
    works = []
    for scratch in draw(st.lists(st.sampled_from([0, 0, 1, 300]), min_size=len(ops), max_size=len(ops))):
        probe = Launch(code("probe"), (1, 1, 1), 32, (Scratch(),) if scratch else ())
        works.append(Work((probe,), scratch))
    return program, works


def touched(program: Program, placed: Placement, name: str) -> set[tuple[str, int]]:
    """Every byte of a tensor: the space it lies in, and where."""
    t = program.tensors[name]
    at = np.full((1,) * t.rank, t.offset)
    for axis, (n, stride) in enumerate(zip(t.padded, t.strides, strict=True)):
        at = at + (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(t.rank)])
    space, start = ("arena", placed.offsets[t.storage]) if t.storage in placed.offsets else (t.storage, 0)
    return {(space, start + int(e) * t.dtype.size + b) for e in at.flat for b in range(t.dtype.size)}


def before(placed: Placement) -> list[set[int]]:
    """For each step, all steps that it comes after."""
    out: list[set[int]] = []
    for after in placed.after:
        out.append(set(after).union(*(out[a] for a in after)))
    return out


@settings(max_examples=60, deadline=None)
@given(programs())
def test_random_programs(case):
    program, works = case
    placed = place(program, works)
    writes = [touched(program, placed, op.y) for op in program.ops]
    reads = [set().union(*(touched(program, placed, name) for name in op.inputs)) for op in program.ops]
    for work, (args,), written in zip(works, placed.args, writes, strict=True):
        written |= {("arena", args[0].bytes + b) for b in range(work.scratch)}

    # A value is not overwritten between its writer and its last reader.
    holder: dict[tuple[str, int], str] = {}
    for op, written in zip(program.ops, writes, strict=True):
        for name in op.inputs:
            if name != "x":
                assert all(holder[byte] == name for byte in touched(program, placed, name))
        holder |= dict.fromkeys(written, op.y)

    # Two steps that share bytes, one of them writing, are ordered; and edges are neither forward nor implied by others.
    comes_after = before(placed)
    for i, j in itertools.combinations(range(len(program.ops)), 2):
        if writes[i] & (writes[j] | reads[j]) or reads[i] & writes[j]:
            assert i in comes_after[j]
    for i, after in enumerate(placed.after):
        assert all(a < i for a in after)
        assert all(a not in comes_after[b] for a in after for b in after)

    ends = [placed.offsets[n] + program.tensors[n].nbytes for n in placed.offsets]
    assert all(offset % ALIGN == 0 for offset in placed.offsets.values())
    assert max(ends, default=0) <= placed.arena


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 5)), max_size=25))
def test_areas_in_use_together_do_not_overlap(drawn):
    areas = [Area(str(k), size * ALIGN, first, first + length) for k, (size, first, length) in enumerate(drawn)]
    offsets, arena = pack_areas(areas)
    for (a, at), (b, bt) in itertools.combinations(zip(areas, offsets, strict=True), 2):
        if a.first <= b.last and b.first <= a.last and a.size and b.size:
            assert at + a.size <= bt or bt + b.size <= at
    assert arena == max((offset + a.size for a, offset in zip(areas, offsets, strict=True)), default=0)
    assert arena <= sum(a.size for a in areas)


def chain(steps: int, width: int) -> list[Area]:
    """Areas of a residual network: each used by the next step, every `width`-th one also by the step `width` later."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 40, steps) * ALIGN
    return [Area(str(i), int(n), i, i + (width if i % width == 0 else 1)) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("steps, width", [(60, 3), (150, 4), (120, 20), (40, 40)])
def test_the_arena_is_near_the_largest_live_sum(steps, width):
    areas = chain(steps, width)
    live = max(sum(a.size for a in areas if a.first <= i <= a.last) for i in range(steps))
    assert pack_areas(areas)[1] <= 1.1 * live


def test_parallel_branches_of_a_concatenation_are_not_ordered():
    """Both convolutions write channels of one tensor whose bytes interleave: neither waits for the other."""
    program = small_program()
    placed = place(program, [Work(())] * len(program.ops))
    names = [op.nodes[0] for op in program.ops]
    first, second, mean = names.index("first"), names.index("second"), names.index("mean")
    assert placed.after[first] == placed.after[second] == (names.index("in"),)
    assert placed.after[mean] == (first, second)


def test_reused_memory_orders_steps():
    """A chain of three needs two areas: the third tensor lies where the first did, and its writer waits for its readers."""
    names = ["a", "b", "c", "d"]
    tensors = {n: dense(n, (512,), DType.F16) for n in names}
    tensors |= {n: dense(n, (512,), DType.F16, pad=1) for n in ("x", "y")}
    chain = ["x", *names, "y"]
    ops = [Pointwise(nodes=(y,), y=y, epilogue=Epilogue(load(0), (identity_view(x, 1),))) for x, y in itertools.pairwise(chain)]
    placed = place(Program(("x",), ("y",), tensors, {}, tuple(ops)), [Work(())] * len(ops))
    assert placed.arena == 2048
    assert placed.offsets["a"] == placed.offsets["c"] != placed.offsets["b"] == placed.offsets["d"]
    assert placed.after == ((), (0,), (1,), (2,), (3,))


def branches() -> Program:
    """x → a → b → c, and beside it a → s, listed last; y = c + s."""
    tensors = {n: dense(n, (512,), DType.F16) for n in ("a", "b", "c", "s")}
    tensors |= {n: dense(n, (512,), DType.F16, pad=1) for n in ("x", "y")}
    reads = {"a": ("x",), "b": ("a",), "c": ("b",), "s": ("a",), "y": ("c", "s")}
    ops = []
    for y, names in reads.items():
        expr = load(0) if len(names) == 1 else call("add", load(0), load(1))
        ops.append(Pointwise(nodes=(y,), y=y, epilogue=Epilogue(expr, tuple(identity_view(n, 1) for n in names))))
    return Program(("x",), ("y",), tensors, {}, tuple(ops))


def test_a_step_waits_for_no_bytes_that_a_branch_beside_it_had():
    """s lies where b did if only the order of steps counts, and would wait for c then."""
    program = branches()
    placed = place(program, [Work(())] * len(program.ops))
    assert placed.arena == 4 * 1024
    assert placed.after == ((), (0,), (1,), (0,), (2, 3))


def test_branches_share_bytes_where_the_arena_would_grow_much():
    program = branches()
    placed = place(program, [Work((), scratch=n) for n in (0, 8192, 0, 8192, 0)])
    assert placed.arena < 1.5 * 8192
    assert 1 in before(placed)[3]


def test_arguments():
    program = small_program()
    tiled = TiledMap("c1", 32, (8, 6), (48,), (8, 6), (1, 1), 64)
    im2col = Im2colMap("w2", (8, 1, 1, 8), (16, 16, 16), (-1, -2), (-3, -4), (1, 2), 8, 64)
    args = (Ptr("c1", 4), Ptr("w1"), Ptr("x", 8), Ptr("y"), Scratch(16), Counters(4), I32(-3), F32(0.5), tiled, im2col)
    launch = Launch(code("k"), (1, 1, 1), 32, args)
    works = [Work((launch, launch), scratch=400, counters=8)] * len(program.ops)
    placed = place(program, works)
    cat = placed.offsets["cat"]
    seen = set()
    for i in range(len(program.ops)):
        ours, again = placed.args[i]
        assert ours == again
        scratch, counters = ours[4], ours[5]
        assert isinstance(scratch, Address) and scratch.space == "arena" and (scratch.bytes - 16) % ALIGN == 0
        assert 16 <= scratch.bytes <= placed.arena - 400 + 16
        assert counters.space == "counters" and 4 <= counters.bytes <= placed.counters - 8 + 4
        seen.add(counters.bytes)
        assert ours[:4] == (
            Address("arena", "", cat + 16 + 4),
            Address("weights", "w1", 0),
            Address("io", "x", 8),
            Address("io", "y", 0),
        )
        assert ours[6:8] == (Int(-3), Float(0.5))
        assert ours[8] == Map("tiled", DType.F16, Address("arena", "", cat + 16 + 32), (8, 6), (48,), (1, 1), 64, box=(8, 6))
        assert ours[9] == Map(
            "im2col", DType.F16, Address("weights", "w2", 0), (8, 1, 1, 8), (16, 16, 16), (1, 2), 128,
            lower=(-1, -2), upper=(-3, -4), channels=8, pixels=64,
        )  # fmt: skip
    assert len(seen) == len(program.ops)


def test_scratch_does_not_touch_what_the_step_reads_or_writes():
    program = small_program()
    probe = Launch(code("k"), (1, 1, 1), 32, (Scratch(),))
    works = [Work((probe,), scratch=5000)] * len(program.ops)
    placed = place(program, works)
    for op, args in zip(program.ops, placed.args, strict=True):
        start = args[0][0].bytes
        own = {("arena", b) for b in range(start, start + 5000)}
        for name in (*op.inputs, op.y):
            if program.tensors[name].storage not in program.constants:
                assert not own & touched(program, placed, name)
    everything = before(placed)  # all scratch lies in the same bytes, so the steps stand in line
    assert all(len(earlier) == i for i, earlier in enumerate(everything))
