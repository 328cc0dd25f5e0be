"""Programs, ops, expressions and views as text, for dumps, reports and the keys of timing tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tccompile.ir.expr import Atom, Coord, Element, Epilogue, Expr, Greatest, Index, Least, Quotient, Remainder, View
from tccompile.ir.ops import Op
from tccompile.ir.ops.op import Operand
from tccompile.ir.program import Program
from tccompile.ir.tensor import Tensor


def program_text(program: Program) -> str:
    """A program as text, an op a line, with the tensor it writes: shape, dtype, and where it differs from dense, strides."""
    lines = [f"input {tensor_text(program.tensors[n])}\n" for n in program.inputs]
    lines += [f"constant {tensor_text(program.tensors[n])}\n" for n in program.constants]
    for op in program.ops:
        lines.append(f"{tensor_text(program.tensors[op.y])} = {op_text(op)}    # {', '.join(op.nodes)}\n")
    lines += [f"output {n}\n" for n in program.outputs]
    lines += [f"storage of %{n}: {s.reason}\n" for n, s in program.storage.items()]
    return "".join(lines)


def tensor_text(t: Tensor) -> str:
    """Its type and shape, and where it lies."""
    shape = "x".join(map(str, t.shape))
    padded = "" if t.padded == t.shape else f" padded {'x'.join(map(str, t.padded))}"
    view = f" in {t.base}+{t.offset}" if t.base else ""
    return f"%{t.name}: {t.dtype.value}[{shape}]{padded} strides {t.strides}{view}"


def op_text(op: Op) -> str:
    """The op's fields, the epilogue, and what expressions it has beside."""
    fields = {name: getattr(op, name) for name in op.holds}
    shown = [f"{k}={_field_text(v, op.holds[k])}" for k, v in fields.items() if not isinstance(v, Expr)]
    beside = "".join(f" {k} {expr_text(v, ())}" for k, v in fields.items() if isinstance(v, Expr))
    also = f" and %{op.also.y} = {expr_text(op.also.expr, [View(op.y, ())])}" if op.also else ""
    return f"{type(op).__name__}({', '.join(shown)}) {epilogue_text(op.epilogue)}{beside}{also}"


def _field_text(value: Any, held: Any) -> str:
    if held is Index:
        return f"[{', '.join(map(index_text, value))}]"
    if not isinstance(held, Operand):
        return str(value)
    if value is None:
        return "none"
    return f"%{value}" if isinstance(value, str) else "(" + ", ".join(f"%{v}" for v in value) + ")"


def epilogue_text(epilogue: Epilogue) -> str:
    shuffle = f" shuffle {epilogue.shuffle}" if epilogue.shuffle > 1 else ""
    return f"{{ {expr_text(epilogue.expr, epilogue.loads)} }}{shuffle}"


def expr_text(e: Expr, loads: Sequence[View]) -> str:
    match e.fn:
        case "load":
            return view_text(loads[e.value])  # type: ignore[index]
        case "const":
            return repr(e.value)
        case "acc":
            return "acc"
        case "cast":
            return f"{e.dtype.value}({expr_text(e.args[0], loads)})"
    return f"{e.fn}({', '.join(expr_text(a, loads) for a in e.args)})"


def view_text(view: View) -> str:
    text = f"%{view.tensor}[{', '.join(map(index_text, view.index))}]"
    if view.valid:
        where = " and ".join(f"{r.low} <= {index_text(r.index)} < {r.high}" for r in view.valid)
        text = f"({text} if {where} else {view.fill})"
    return text


def index_text(index: Index) -> str:
    parts = [_atom(atom) if k == 1 else f"{k}*{_atom(atom)}" for atom, k in index.terms]
    if index.constant or not parts:
        parts.append(str(index.constant))
    return " + ".join(parts)


def _atom(atom: Atom) -> str:
    match atom:
        case Coord(axis):
            return f"i{axis}"
        case Quotient(index, k):
            return f"({index_text(index)})//{k}"
        case Remainder(index, k):
            return f"({index_text(index)})%{k}"
        case Least(a, b):
            return f"min({index_text(a)}, {index_text(b)})"
        case Greatest(a, b):
            return f"max({index_text(a)}, {index_text(b)})"
        case Element(tensor, at, extent):
            return f"%{tensor}[{', '.join(map(index_text, at))}]<{extent}"
