"""A small program that has what programs have, and plans of it: for tests of the file, the placement and the engines."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from tccompile.ir import weights
from tccompile.ir.expr import ACC, Epilogue, View, call, const, coord, identity_view, load, reshape_view
from tccompile.ir.ops import Conv, Gemm, Op, Pointwise, Reduce
from tccompile.ir.program import Program
from tccompile.ir.storage import pack_constant
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.ir.verify import verify
from tccompile.ir.weights import Literal, Source, Transform
from tccompile.kernels.spec import F32, I32, Arg, Counters, Im2colMap, Launch, Ptr, Scratch, TiledMap, Work, code
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Image, PlacedLaunch, Section, Step
from tccompile.schedule.place import place

IMAGE = (0, 2, 3, 1)
WEIGHTS = {"conv1": (9, 3, 3, 3), "conv2": (8, 3, 1, 1), "fc": (19, 5)}


def program(storage: DType = DType.F16) -> Program:
    """Two convolutions whose results are concatenated by views, the mean of that, and a Gemm; three channels, so padding."""
    cat = dense("cat", (1, 19, 6, 6), storage, IMAGE)
    tensors = [
        dense("x", (1, 3, 6, 6), DType.F32, pad=1),
        dense("xh", (1, 3, 6, 6), storage, IMAGE),
        dense("w1", (11, 3, 3, 3), storage, IMAGE),
        dense("w2", (8, 3, 1, 1), storage, IMAGE),
        cat,
        Tensor("c2", (1, 8, 6, 6), storage, (1, 8, 6, 6), cat.strides, "cat", 0),
        Tensor("c1", (1, 11, 6, 6), storage, (1, 16, 6, 6), cat.strides, "cat", 8),
        dense("mean", (1, 19, 1, 1), storage, IMAGE),
        dense("flat", (1, 19), storage),
        dense("fc", (5, 19), storage),
        dense("bias", (5,), DType.F32),
        dense("table", (1, 4096), DType.F32),
        dense("y", (1, 5), DType.F32, pad=1),
        dense("top", (1, 4096), DType.F16, pad=1),
    ]
    geometry = {"strides": (1, 1), "dilations": (1, 1)}
    mean = Epilogue(call("mul", ACC, const(1 / 36)))
    biased = Epilogue(call("add", ACC, load(0)), (View("bias", (coord(1),)),))
    table = Epilogue(call("mul", load(0), load(1)), (identity_view("table", 2), View("y", (coord(0), coord(1) * 0))))
    ops = (
        Pointwise(nodes=("in",), y="xh", epilogue=Epilogue(load(0), (identity_view("x", 4),))),
        Conv(nodes=("first",), y="c1", x="xh", w="w1", pads=(1, 1), **geometry),
        Conv(nodes=("second",), y="c2", x="xh", w="w2", pads=(0, 0), **geometry, epilogue=Epilogue(call("relu", ACC))),
        Reduce(nodes=("mean",), y="mean", x="cat", axes=(2, 3), combine="add", epilogue=mean),
        Pointwise(nodes=("flat",), y="flat", epilogue=Epilogue(load(0), (reshape_view("mean", (1, 19, 1, 1), (1, 19)),))),
        Gemm(nodes=("fc", "softened"), y="y", a="flat", b="fc", epilogue=biased),
        Pointwise(nodes=("table",), y="top", epilogue=table),
    )
    constants = {
        "w1": Transform("pad", (Source("conv1", (9, 3, 3, 3), "float32"),), (("after", (2, 0, 0, 0)), ("before", (0, 0, 0, 0)))),
        "w2": Source("conv2", (8, 3, 1, 1), "float32"),
        "fc": Transform("transpose", (Source("fc", (19, 5), "float32"),), (("axes", (1, 0)),)),
        "bias": Literal(np.arange(5, dtype=np.float32)),
        "table": Literal(np.random.default_rng(3).standard_normal((1, 4096)).astype(np.float32)),
    }
    out = Program(("x",), ("y", "top"), {t.name: t for t in tensors}, constants, ops)
    verify(out)
    return out


def sources() -> dict[str, np.ndarray]:
    """The model's weights."""
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in WEIGHTS.items()}


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(6).standard_normal((1, 3, 6, 6)).astype(np.float32)}


def fake_code(arch: str, kind: str = "cubin", function: str = "k") -> bytes:
    """What begins and is called as a generation's machine code, and does nothing."""
    if kind == "ptx":
        return f".version 8.0\n.target {arch}\n.visible .entry {function}() {{ ret; }}\n".encode()
    flags = int(arch.removeprefix("sm_").rstrip("a")) | 0x800 * arch.endswith("a")
    header = struct.pack("<4sBBBBB7xHHI3QI", b"\x7fELF", 2, 1, 1, 51, 7, 2, 190, 129, 0, 0, 0, flags)
    return header + f"\0.text.{function}\0".encode()


def image(arch: str, kind: str = "cubin", function: str = "k") -> Image:
    return Image(arch, kind, function, fake_code(arch, kind, function), "none", (("n", 1), ("types", ("float16", 2.0))))


def work(op: Op, storage: Program, launches: int = 1) -> Work:
    """Launches that nobody runs, with all kinds of arguments: a convolution's has tensor maps."""
    args: list[Arg] = [Ptr(op.y), *map(Ptr, op.inputs), Scratch(16), Counters(4), I32(-1), F32(float("inf"))]
    if isinstance(op, Conv):
        o, _, r, s = storage.tensors[op.w].shape
        args.append(TiledMap(op.x, 0, (8, 36), (16,), (8, 8), (1, 1), 0))
        strides = (16, 16 * s, 16 * s * r)
        args.append(Im2colMap(op.w, (8, s, r, o), strides, (-1, -1), (-1, -1), (1, 1), 32, 64, 64))
    return Work((Launch(code("none"), (3, 2, 1), 128, tuple(args), 1024),) * launches, scratch=100, counters=8)


def section(program: Program, arch: str = "cpu", image: int = 0, launches: int = 0) -> Section:
    """A placed section, with so many launches a step."""
    placed = place(program, [work(op, program, launches) for op in program.ops])
    config = {"tile": (128, 64), "stages": 3, "split": 1.5, "swizzle": True}
    steps = []
    for i, after in enumerate(placed.after):
        launched = tuple(PlacedLaunch(image, (3, 2, 1), 128, 1024, args) for args in placed.args[i])
        steps.append(Step(i, "kernel", config, False, "why", launched, after, placed.scratch[i], placed.own_counters[i]))
    return Section(arch, tuple(steps), placed.offsets, placed.arena, placed.counters)


def plan(storage: DType = DType.F16, left_out: Sequence[str] = ()) -> Plan:
    """Two generations and all kinds of arguments; without the weights named in `left_out`."""
    p = program(storage)
    sections = section(p, "sm_80", 0, 1), section(p, "sm_90a", 1, 2)
    return Plan(
        name="small",
        producer={"tccompile": "0", "numba": "1"},
        entries=(Entry(p, sections),),
        images=(image("sm_80", "cubin", "f"), image("sm_90a", "ptx", "g")),
        weights={n: w for n, w in packed(p).items() if n not in left_out},
        notes=("a note — with a dash",),
    )


def packed(program: Program) -> Mapping[str, bytes]:
    """The bytes of all constants."""
    values = sources()
    return {n: pack_constant(program.tensors[n], weights.evaluate(r, values)) for n, r in program.constants.items()}
