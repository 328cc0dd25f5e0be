"""Kernels of users' own operators: the user's Numba-CUDA function, within one that makes arrays of addresses for it."""

from __future__ import annotations

import dis
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tccompile.arch import Arch
from tccompile.custom.files import added
from tccompile.custom.operators import Operator, Shaped, bytes_of, line_of, place_of
from tccompile.errors import OperatorError, TccompileError
from tccompile.ir.expr import const
from tccompile.ir.extent import Extent, round_up, whole
from tccompile.ir.ops import Custom, Op
from tccompile.ir.ops.custom import starts
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor, dense
from tccompile.ir.types import DType
from tccompile.kernels.codegen import definition, execute, names, tuple_of, types_of
from tccompile.kernels.lines import filled, refusal
from tccompile.kernels.rates import measured
from tccompile.kernels.spec import (
    F32,
    I32,
    Arg,
    Code,
    Config,
    Function,
    Kernel,
    Launch,
    Ptr,
    Scratch,
    Value,
    Work,
    code,
    traffic_us,
)
from tccompile.kernels.text import intrinsic

ALIGN = 256
"""Bytes: where working memory and outputs in it begin."""

HINTS = {
    "it spills registers": "fewer threads leave each of them more registers",
    "too much shared data": "beyond 48 KiB ask for it by shared=, and take it as cuda.shared.array(0, …)",
}
"""What helps where an assembler's error says so."""

GRID = ((1 << 31) - 1, 65535, 65535)


class CustomKernel(Kernel):
    """Every Custom whose operator is known, by the kernel that the user has written for the generation."""

    name = "custom"
    realises = Custom

    def supports(self, op: Op, program: Program, arch: Arch) -> str | None:
        assert isinstance(op, Custom)
        operator = added().operators.get(op.operator)
        if operator is None or operator.elementwise:
            return f"{op.operator} is the user's own operator: give the Python that says what it is, --ops FILE.py"
        if operator.digest != op.digest:
            return f"{op.operator} was another one when the program was made: compile the model again"
        if (why := refusal(op, program)) is not None:
            return why
        shared, most = _Launched(op, program, arch, operator).shared(), arch.smem_block
        if shared <= most:
            return None
        where = place_of(operator.program(arch).function)
        return f"{where}{op.operator} asks for {shared} bytes of shared memory, and {arch.name} has {most}"

    def configs(self, op: Op, program: Program, arch: Arch) -> Iterator[Config]:
        assert isinstance(op, Custom)
        yield {"operator": op.operator, "function": added().operators[op.operator].program(arch).function.__name__}

    def cost(self, op: Op, program: Program, config: Config, arch: Arch) -> float:
        return measured(arch).launch_us + traffic_us(op, program, arch)

    def work(self, op: Op, program: Program, config: Config, arch: Arch) -> Work:
        assert isinstance(op, Custom)
        y = program.tensors[op.y]
        first = filled(op, program, const(0, y.dtype.compute), (), arch) if y.padded != y.shape or len(op.outputs) > 1 else ()
        if not y.size:
            return Work(first)
        launched = _Launched(op, program, arch, added().operators[op.operator])
        launch = launched.launch()
        return Work((*first, launch), scratch=launched.used)

    def build(self, arch: Arch, **params: Value) -> Function:
        from tccompile.kernels.ptx.core import inline, types

        operator = added().operators[params["operator"]]
        program = next(p for p in operator.programs if p.since == params["since"])
        kinds, lines, scope = _wrapped(params["args"])
        given = ", ".join(f"{name}=a{i}" for i, (name, *_) in enumerate(params["args"]))
        text = definition("kernel", [name for name, _ in kinds], [*lines, f"function({given})"])
        function = execute(text, {**names(), **scope, "function": inline(program.function)}, "kernel")
        return Function(function, types.void(*types_of([kind for _, kind in kinds])), program.threads)

    def blamed(self, code: Code, arch: Arch, error: Exception) -> TccompileError | None:
        """The failure as an error in the user's file."""
        params = dict(code.params)
        operator = added().operators[params["operator"]]
        function = next(p for p in operator.programs if p.since == params["since"]).function
        what = f"{operator.name} for {arch.name}"
        if isinstance(error, TccompileError):  # of what assembles it
            said = str(error).splitlines()[0]
            hints = (way_out for sign, way_out in HINTS.items() if sign in said)
            return OperatorError("; ".join((f"{place_of(function)}{what}: {said}", *hints)))
        line = _line_in(error, function)
        where = re.sub(r":\d+: $", f":{line}: ", place_of(function)) if line else line_of(error, function)
        missing = re.search(r"name '(\w+)' is not defined", str(error))
        plainly = missing is not None and inspect.isfunction(function.__globals__.get(missing[1]))
        hint = '; a kernel calls functions that are decorated: @cuda.jit(device=True, inline="always")' if plainly else ""
        return OperatorError(f"{where}{what}: {_said(error)}{hint}")


def _line_in(error: Exception, function: Any) -> int | None:
    """The line of the user's function that Numba complains of, as its text says; None if it says none."""
    base, text = re.escape(os.path.basename(function.__code__.co_filename)), str(error)
    if found := re.search(rf'File "[^"]*{base}", line (\d+)', text):
        return int(found[1])
    if missing := re.search(r"name '(\w+)' is not defined", text):
        used = (i for i in dis.get_instructions(function) if i.argval == missing[1] and i.positions)
        return next((i.positions.lineno for i in used if i.positions), None)
    return _line_of_statement(error, function)


def _line_of_statement(error: Exception, function: Any) -> int | None:
    """The line of the user's function that Numba was at when it gave up, by where something is from that it held then."""
    line, frames = None, error.__traceback__
    while frames is not None:
        for held in frames.tb_frame.f_locals.values():
            at = getattr(held, "loc", held)
            if getattr(at, "filename", None) == function.__code__.co_filename and isinstance(getattr(at, "line", None), int):
                line = at.line
        frames = frames.tb_next
    return line


def _said(error: Exception) -> str:
    """What Numba says of a failure, in a line: without colours, and without what it shows of the code."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if reason := re.search(r"raised a specific error:\s*(.+)", text):
        return reason[1]
    lines = re.split(r'\nFile "|\nThere are \d+ candidate', text)[0].splitlines()
    kept = [line.strip() for line in lines if line.strip() and not re.match(r"Failed in|During: ", line)]
    return " ".join(kept[:4]) or type(error).__name__


# --- What is launched ----------------------------------------------------------------------------------------------------


@dataclass
class _Launched:
    """A launch of an operator's kernel in the making.

    used  bytes of the launch's workspace that are taken
    """

    op: Custom
    program: Program
    arch: Arch
    operator: Operator
    used: Extent = 0
    args: list[Arg] = field(default_factory=list)

    def __post_init__(self) -> None:
        op, tensors = self.op, self.program.tensors
        self.own = self.operator.program(self.arch)
        self.tensors = [None if name is None else tensors[name] for name in op.reads]
        shaped = [None if t is None else Shaped(t.shape, kind) for t, kind in zip(self.tensors, op.types, strict=True)]
        self.known = self.operator.bound(shaped, op.attributes)
        self.outputs = self.operator.shapes(self.known)
        self.known |= dict(zip(self.operator.outputs, self.outputs, strict=True))
        self.reads = dict(zip(self.operator.parameters, self.tensors, strict=False))

    def shared(self) -> int:
        found = self.operator.asked(self.own.shared, self.known)
        if not hasattr(found, "__index__") or found < 0:
            raise self.wrong(f"{found!r} bytes of shared memory")
        return int(found)

    def launch(self) -> Launch:
        described = tuple(self._argument(name) for name in inspect.signature(self.own.function).parameters)
        params = {"operator": self.op.operator, "digest": self.op.digest, "since": self.own.since, "args": described}
        return Launch(code("custom", **params), self._grid(), self.own.threads, tuple(self.args), self.shared())

    def wrong(self, what: str) -> OperatorError:
        return OperatorError(f"{place_of(self.own.function)}{self.operator.name}: {what}")

    def _grid(self) -> tuple[Extent, Extent, Extent]:
        asked = self.operator.asked(self.own.grid, self.known)
        grid = tuple(asked) if isinstance(asked, tuple | list) else (asked,)
        if not 1 <= len(grid) <= 3 or not all(hasattr(n, "__index__") and 1 <= n <= m for n, m in zip(grid, GRID, strict=False)):
            raise self.wrong(f"a grid of {asked!r}: 1 to 3 numbers, of which the first is below 2^31 and the others below 2^16")
        x, y, z = (*map(whole, grid), 1, 1)[:3]
        return x, y, z

    def _argument(self, name: str) -> tuple[Value, ...]:
        """What a parameter of the user's kernel is, for the code; its arguments are added to the launch's."""
        if name == "scratch":
            return self._array(name, *self._in_scratch(self.operator.asked(self.own.scratch, self.known)), False)
        if name in self.operator.outputs:
            return self._array(name, *self._output(self.operator.outputs.index(name)), False)
        if isinstance(t := self.reads.get(name), Tensor):
            return self._array(name, t, Ptr(t.name), True)
        if name not in self.known:
            raise self.wrong(f"its kernel's parameter {name!r} is no input, attribute or output")
        return self._number(name, self.known[name])

    def _array(self, name: str, t: Tensor, at: Arg, readonly: bool) -> tuple[Value, ...]:
        self.args += [at, *map(I32, t.shape), *map(I32, t.strides)]
        layout = "C" if t.strides == dense(t.name, t.shape, t.dtype, pad=1).strides else "A"
        return name, "array", t.dtype.value, t.rank, layout, readonly

    def _output(self, k: int) -> tuple[Tensor, Arg]:
        op, said = self.op, self.outputs[k]
        y = self.program.tensors[op.y]
        if op.outputs == (k,):
            return y, Ptr(y.name)
        if k not in op.outputs:  # nobody reads it, or another launch writes it
            return self._in_scratch(said)
        begin = starts([self.outputs[i].size for i in op.outputs])[op.outputs.index(k)]
        return dense(y.name, said.shape, y.dtype, pad=1), Ptr(y.name, begin * y.dtype.size)

    def _in_scratch(self, said: Any) -> tuple[Tensor, Arg]:
        if not isinstance(said, Shaped):
            raise self.wrong(f"working memory of {said!r}: a rule gives x.like(…)")
        at, self.used = Scratch(self.used), round_up(self.used + bytes_of(said), ALIGN)
        floats = DType.F32 if DType(said.dtype).is_float and DType(said.dtype) is not DType.F16 else DType(said.dtype)
        return dense("scratch", said.shape, floats, pad=1), at

    def _number(self, name: str, value: Any) -> tuple[Value, ...]:
        values = value if isinstance(value, tuple) else (value,)
        if value is None or isinstance(value, bool):
            return name, "constant", repr(value)
        if all(isinstance(v, int) and -(1 << 31) <= v < 1 << 31 for v in values):
            kind = "int"
            self.args += [I32(v) for v in values]
        elif all(isinstance(v, int | float) for v in values):
            kind = "float"
            self.args += [F32(float(v)) for v in values]
        else:
            raise self.wrong(f"its parameter {name!r} is {value!r}; kernels take integers of 32 bits, floats, and tuples of them")
        return (name, f"{kind}s", len(values)) if isinstance(value, tuple) else (name, kind)


def _wrapped(args: Any) -> tuple[list[tuple[str, str]], list[str], Mapping[str, Any]]:
    """The compiled function's parameters with their kinds, lines that make the user's arguments of them, and what these call."""
    from tccompile.kernels.text import device_function

    kinds: list[tuple[str, str]] = []
    lines: list[str] = []
    scope: dict[str, Any] = {}
    for i, (_, kind, *more) in enumerate(args):  # by names of our own: the user's may be any
        name = f"a{i}"
        if kind == "array":
            dtype, rank, layout, readonly = more
            at, extents, strides = f"{name}_at", [f"{name}_n{k}" for k in range(rank)], [f"{name}_s{k}" for k in range(rank)]
            kinds += [(at, "address"), *((n, "int") for n in (*extents, *strides))]
            scope[f"{name}_array"] = device_function(intrinsic("ptx.arrays.array_at", dtype, rank, layout, readonly))
            lines.append(f"{name} = {name}_array({at}, {tuple_of(extents)}, {tuple_of(strides)})")
        elif kind in ("ints", "floats"):
            parts = [f"{name}_{k}" for k in range(more[0])]
            kinds += [(part, kind.removesuffix("s")) for part in parts]
            lines.append(f"{name} = {tuple_of(parts)}")
        elif kind == "constant":
            lines.append(f"{name} = {more[0]}")
        else:
            kinds.append((name, kind))
    return kinds, lines, scope
