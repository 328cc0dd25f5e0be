"""A numbered dump of every stage: ONNX files while the graph is still ONNX, text afterwards, and each kernel's code.

00-load.onnx  01-rewrite.onnx  02-lower.txt  03-fuse.txt  04-precision.txt
05-schedule.sm_90a.txt …       06-place.sm_90a.txt …      kernels/NAME-DIGEST.sm_90a.cubin …
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tccompile.expr import Atom, Coord, Element, Epilogue, Expr, Greatest, Index, Least, Quotient, Remainder, View
from tccompile.program import Mlp, Op, Program, Scatter, Tensor, tensor_fields

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from tccompile.place import Placement
    from tccompile.plan import Image
    from tccompile.schedule import Choice


class Dump:
    """Writes what each stage made into a folder; does nothing when there is none. `entry` names the files of later entries."""

    def __init__(self, folder: Path | None, entry: int = 0):
        self.folder = folder
        self.suffix = f".entry{entry}" if entry else ""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def graph(self, number: int, stage: str, graph: gs.Graph) -> None:
        if self.folder is not None:
            import onnx
            import onnx_graphsurgeon as gs
            from onnx.external_data_helper import set_external_data
            from onnx_graphsurgeon.logger import G_LOGGER

            path = self.folder / f"{number:02}-{stage}{self.suffix}.onnx"
            weights = path.with_suffix(".onnx.weights")
            weights.unlink(missing_ok=True)  # onnx would append to those of an earlier dump
            with G_LOGGER.suppress():
                model = gs.export_onnx(graph)
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) >= 1024:
                    set_external_data(tensor, weights.name)
            onnx.save(model, path)

    def program(self, number: int, stage: str, program: Program) -> None:
        self._text(f"{number:02}-{stage}{self.suffix}.txt", program_text(program))

    def choices(self, number: int, stage: str, arch: str, program: Program, choices: Sequence[Choice]) -> None:
        lines = [
            f"{op.nodes[0]}: {type(op).__name__} by {choice.kernel.name} {dict(choice.config)}\n    {choice.reason}\n"
            + "".join(
                f"    {launch.code.kernel} grid {launch.grid} block {launch.block} smem {launch.smem}\n"
                for launch in choice.work.launches
            )
            for op, choice in zip(program.ops, choices, strict=True)
        ]
        self._text(f"{number:02}-{stage}{self.suffix}.{arch}.txt", "".join(lines))

    def placement(self, number: int, stage: str, arch: str, program: Program, placement: Placement) -> None:
        lines = [f"arena {placement.arena} bytes, counters {placement.counters} bytes\n"]
        lines += [f"{offset:12} {name}\n" for name, offset in sorted(placement.offsets.items(), key=lambda item: item[1])]
        lines += [
            f"step {i} {op.nodes[0]} after {list(after)}\n"
            for i, (op, after) in enumerate(zip(program.ops, placement.after, strict=True))
        ]
        self._text(f"{number:02}-{stage}{self.suffix}.{arch}.txt", "".join(lines))

    def images(self, images: Sequence[Image]) -> None:
        if self.folder is not None:
            (self.folder / "kernels").mkdir(exist_ok=True)
            for image in images:
                digest = hashlib.sha256(image.code).hexdigest()[:12]  # one kernel comes in several configs
                (self.folder / "kernels" / f"{image.function}-{digest}.{image.arch}.{image.kind}").write_bytes(image.code)

    def _text(self, name: str, text: str) -> None:
        if self.folder is not None:
            (self.folder / name).write_text(text, encoding="utf-8")


# --- Text ------------------------------------------------------------------------------------------------------------


def program_text(program: Program) -> str:
    """A program as text, an op a line, with the tensor it writes: shape, dtype, and where it differs from dense, strides."""
    lines = [f"input {_tensor(program.tensors[n])}\n" for n in program.inputs]
    lines += [f"constant {_tensor(program.tensors[n])}\n" for n in program.constants]
    for op in program.ops:
        lines.append(f"{_tensor(program.tensors[op.y])} = {op_text(op)}    # {', '.join(op.nodes)}\n")
    lines += [f"output {n}\n" for n in program.outputs]
    lines += [f"storage of %{n}: {s.reason}\n" for n, s in program.storage.items()]
    return "".join(lines)


def _tensor(t: Tensor) -> str:
    shape = "x".join(map(str, t.shape))
    padded = "" if t.padded == t.shape else f" padded {'x'.join(map(str, t.padded))}"
    view = f" in {t.base}+{t.offset}" if t.base else ""
    return f"%{t.name}: {t.dtype.value}[{shape}]{padded} strides {t.strides}{view}"


def op_text(op: Op) -> str:
    names = (f.name for f in dataclasses.fields(op) if f.name not in ("nodes", "y", "epilogue", "pre"))
    fields = {name: getattr(op, name) for name in names}
    tensors = set(tensor_fields(op))
    if isinstance(op, Scatter):
        fields["at"] = f"[{', '.join(map(index_text, op.at))}]"
    if isinstance(op, Mlp):
        fields["hidden"] = expr_text(op.hidden, ())
    shown = [f"{k}={_names(v) if k in tensors else v}" for k, v in fields.items()]
    return f"{type(op).__name__}({', '.join(shown)}) {epilogue_text(op.epilogue)}"


def _names(value: str | tuple[str, ...] | None) -> str:
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
