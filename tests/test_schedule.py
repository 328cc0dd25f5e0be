"""Choices where steps run side by side: who is beside whom, who is in a hurry, and what that changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tccompile.arch import ARCHS
from tccompile.errors import TccompileError
from tccompile.ir.expr import ACC, Epilogue, call, identity_view, load
from tccompile.ir.ops import Conv, Gemm, Op, Pointwise
from tccompile.ir.program import Program
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.ir.weights import Source
from tccompile.kernels.spec import Launch, Ptr, Work, code
from tccompile.schedule.choose import ALONE, Company, candidates, choose, company, schedule, share, uncopied

ARCH = ARCHS["sm_90a"]


def copies(reads: dict[str, str]) -> Program:
    """Copies by name, each of the tensor that it reads."""
    ops = [Pointwise(nodes=(y,), y=y, epilogue=Epilogue(load(0), (identity_view(x, 1),))) for y, x in reads.items()]
    tensors = {n: dense(n, (8,), DType.F32, pad=1) for n in ("x", *reads)}
    return Program(("x",), tuple(reads), tensors, {}, tuple(ops))


def projections(count: int) -> Program:
    """A copy of 128 rows, and its products with `count` matrices of 1024×1024."""
    tensors = {name: dense(name, (1, 128, 1024), DType.F16, pad=1) for name in ("x", "h")}
    ops: list[Op] = [Pointwise(nodes=("copy",), y="h", epilogue=Epilogue(load(0), (identity_view("x", 3),)))]
    for i in range(count):
        tensors |= {f"w{i}": dense(f"w{i}", (1024, 1024), DType.F16), f"y{i}": dense(f"y{i}", (1, 128, 1024), DType.F16, pad=1)}
        ops.append(Gemm(nodes=(f"gemm{i}",), y=f"y{i}", a="h", b=f"w{i}"))
    constants = {f"w{i}": Source(f"w{i}", (1024, 1024), "float16") for i in range(count)}
    return Program(("x",), tuple(f"y{i}" for i in range(count)), tensors, constants, tuple(ops))


def first_layer(readers: int = 1, channels: int = 3, dtype: DType = DType.F32, size: int = 64) -> Program:
    """Convolutions of the copy of a model input, in NHWC and fp16."""
    nhwc = (0, 2, 3, 1)
    tensors = {
        "x": dense("x", (1, channels, size, size), dtype, pad=1),
        "h": dense("h", (1, channels, size, size), DType.F16, nhwc),
        "w": dense("w", (32, channels, 3, 3), DType.F16, nhwc),
    }
    ops: list[Op] = [Pointwise(nodes=("copy",), y="h", epilogue=Epilogue(load(0), (identity_view("x", 4),)))]
    for i in range(readers):
        tensors[f"y{i}"] = dense(f"y{i}", (1, 32, size, size), DType.F16, nhwc)
        conv = Conv(nodes=(f"conv{i}",), y=f"y{i}", x="h", w="w", strides=(1, 1), pads=(1, 1), dilations=(1, 1))
        ops += [conv, Pointwise(nodes=("out",), y=f"z{i}", epilogue=Epilogue(load(0), (identity_view(f"y{i}", 4),)))]
        tensors[f"z{i}"] = dense(f"z{i}", (1, 32, size, size), DType.F32, pad=1)
    outputs = tuple(f"z{i}" for i in range(readers))
    return Program(("x",), outputs, tensors, {"w": Source("w", (32, channels, 3, 3), "float32")}, tuple(ops))


def test_a_first_layer_reads_the_model_input_itself_where_a_kernel_can() -> None:
    program = first_layer()
    copy, conv, _ = schedule(program, ARCH)
    assert not copy.work.launches and "y0 is computed from x itself" in copy.reason
    assert conv.kernel.name == "conv_stem" and Ptr("x") in conv.work.launches[0].args


def test_a_first_layer_reads_a_copy_where_that_is_faster() -> None:
    """Volta's kernels take NHWC in fp16, and CUDA cores take longer."""
    program = first_layer(size=512)
    copy, conv, _ = schedule(program, ARCHS["sm_70"])
    assert copy.work.launches and Ptr("x") not in conv.work.launches[0].args and conv.kernel.tensor_cores


def added() -> Program:
    """A convolution whose result the copy that it reads is added to."""
    program = first_layer(channels=3)
    copy, conv, *rest = program.ops
    expr = call("add", ACC, load(0))
    tensors = dict(program.tensors) | {"w": replace(program.tensors["w"], shape=(3, 3, 3, 3), padded=(3, 8, 3, 3))}
    tensors["y0"] = dense("y0", (1, 3, 64, 64), DType.F16, (0, 2, 3, 1))
    tensors["z0"] = dense("z0", (1, 3, 64, 64), DType.F32, pad=1)
    conv = replace(conv, epilogue=Epilogue(expr, (identity_view("h", 4),)))
    return replace(program, tensors=tensors, ops=(copy, conv, *rest))


@pytest.mark.parametrize("program", [added(), first_layer(2), first_layer(channels=5), first_layer(dtype=DType.I32)])
def test_copies_that_others_read_of_many_channels_or_of_integers_stay(program: Program) -> None:
    assert not uncopied(program)


def test_a_chain_is_alone() -> None:
    program = copies({"a": "x", "b": "a", "c": "b"})
    assert company(program, [1.0, 2.0, 3.0]) == ([1.0, 3.0, 6.0], [0.0, 0.0, 0.0])


def test_who_is_beside_whom() -> None:
    """a → b → c take 5, and beside b and c runs d, which has 3 of its 1 to spare: nobody minds if d takes longer."""
    program = copies({"a": "x", "b": "a", "c": "b", "d": "a"})
    latest, others = company(program, [1.0, 2.0, 2.0, 1.0])
    assert latest == [1.0, 3.0, 5.0, 5.0]
    assert others == [0.0, 0.0, 0.0, 1.0]  # b is beside d, which is not in a hurry; c begins when d has ended


def test_one_that_could_nearly_take_as_long_again_counts_in_part() -> None:
    program = copies({"a": "x", "b": "x"})
    latest, others = company(program, [4.0, 3.0])
    assert latest == [4.0, 4.0] and others == pytest.approx([2 / 3, 1.0])


def test_projections_side_by_side_leave_room_to_each_other() -> None:
    def blocks(program: Program) -> list[int]:
        return [math.prod(launch.grid) for choice in schedule(program, ARCH)[1:] for launch in choice.work.launches]

    (alone,) = blocks(projections(1))
    beside = blocks(projections(3))
    assert len(set(beside)) == 1 and beside[0] <= alone / 2
    assert all("beside others" in choice.reason for choice in schedule(projections(3), ARCH)[1:])


def test_a_step_with_time_to_spare_takes_little_room() -> None:
    program = projections(1)
    hasty = choose(program.ops[1], program, ARCH, company=Company(1.0, 0.0))
    idle = choose(program.ops[1], program, ARCH, company=Company(1.0, 20.0))
    assert (
        share(idle.work, ARCH) < share(hasty.work, ARCH) <= share(choose(program.ops[1], program, ARCH, company=ALONE).work, ARCH)
    )
    assert idle.cost > hasty.cost


def test_share_of_the_gpu() -> None:
    def work(*grids: tuple[int, int, int]) -> Work:
        return Work(tuple(Launch(code("k"), grid, 128, ()) for grid in grids))

    assert share(work((33, 1, 1)), ARCH) == 0.25
    assert share(work((2, 33, 1), (1, 1, 1)), ARCH) == 0.5
    assert share(work((1000, 1, 1)), ARCH) == 1.0 and share(work(), ARCH) == 0.0


def test_where_all_spill_the_ways_out_are_named() -> None:
    class Everything(set[object]):
        def __contains__(self, _: object) -> bool:
            return True

    with pytest.raises(TccompileError, match=r"spills registers on sm_80: leave sm_80 out \(--arch\), or .* \(--fp32 'a'\)"):
        schedule(copies({"a": "x"}), ARCHS["sm_80"], Everything())


def test_ops_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their tensors are called; not if one of these is a constant, a model output or a type of its own"""
    program, looked, all_of = projections(4), [], candidates
    tensors = program.tensors | {"y3": dense("y3", (1, 128, 1024), DType.F32, pad=1)}
    program = replace(program, tensors=tensors, outputs=("y0", "y1", "y3"))
    monkeypatch.setattr("tccompile.schedule.choose.candidates", lambda op, *rest: looked.append(op.y) or all_of(op, *rest))
    choices = schedule(program, ARCH)
    assert looked == ["h", "y0", "y2", "y3"]
    for op, choice in zip(program.ops, choices, strict=True):
        assert choice.cost in [c.cost for c in all_of(op, program, ARCH)]
