"""What a user sends when a failure is ours: versions, the command, where it was, and the nodes that it was about.

Nodes come with their operators, attributes, shapes and types, which is what makes them again; never with a model's weights.
"""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from types import FrameType
from typing import Any

from tccompile import __version__
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.text import op_text, tensor_text
from tccompile.terminal import plain

TOOLS = ("numpy", "onnx", "onnx-graphsurgeon", "numba", "numba-cuda", "llvmlite", "cuda-bindings")

MOST = 400
"""Characters of an attribute."""


def where_to_send() -> str:
    """Whom a report goes to: the package's page for it where it names one."""
    try:
        pages = metadata.metadata("tccompile").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        pages = []
    named = {label.strip().lower(): url.strip() for label, _, url in (page.partition(",") for page in pages)}
    return next((named[name] for name in ("issues", "repository") if name in named), "whom you have tccompile from")


def text_of(error: BaseException, words: Sequence[str]) -> str:
    """A report of a failure of the command that was called with these words."""
    lines = [f"tccompile {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    lines.append(", ".join(f"{tool} {version}" for tool in TOOLS if (version := _version(tool))))
    lines += [" ".join((sys.argv[0], *words)), ""]
    if about := [*dict.fromkeys(_nodes(error))]:
        lines += ["It was about:", *about, ""]
    lines.append("".join(traceback.format_exception(error)))
    return "\n".join(lines)


def _version(tool: str) -> str | None:
    try:
        return metadata.version(tool)
    except metadata.PackageNotFoundError:
        return None


def _nodes(error: BaseException | None) -> Iterator[str]:
    """The nodes and ops that functions were working on when the error was raised, and those before it; the innermost first."""
    while error is not None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            if frame.f_globals.get("__name__", "").startswith("tccompile."):
                yield from _in_frame(frame, frames)
        error = error.__cause__ or error.__context__


def _in_frame(frame: FrameType, frames: Sequence[FrameType]) -> Iterator[str]:
    for name in ("node", "op", "job", "code"):
        value = frame.f_locals.get(name)
        if isinstance(value, Op):
            programs = (v for f in (frame, *reversed(frames)) for v in f.f_locals.values() if isinstance(v, Program))
            arch = getattr(frame.f_locals.get("arch"), "name", "")
            yield from _op(value, next(programs, None), f"on {arch}: " if arch else "")
        elif type(value).__name__ == "NodeProto":
            types = getattr(frame.f_locals.get("self"), "types", None) or frame.f_locals.get("types") or {}
            yield from _proto(value, types)
        elif type(value).__name__ == "Node" and hasattr(value, "attrs"):  # onnx-graphsurgeon's
            yield from _node(value)
        elif value is not None and name in ("job", "code"):
            yield plain(f"  {name} {_short(value)}")


def _op(op: Op, program: Program | None, where: str) -> Iterator[str]:
    yield plain(f"  {where}{op_text(op)}    # {', '.join(op.nodes)}")
    if program is not None:
        names = dict.fromkeys((op.y, *op.operands, *(view.tensor for view in op.epilogue.loads)))
        yield from (plain(f"    {tensor_text(program.tensors[n])}") for n in names if n in program.tensors)


def _proto(node: Any, types: Any) -> Iterator[str]:
    shown = [f"{a.name}={_attribute(a)}" for a in node.attribute]
    yield plain(f"  {node.domain or 'ai.onnx'}.{node.op_type}({', '.join(shown)})    # {node.name}")
    for name in (*node.input, *node.output):
        kind: Any = types.get(name) if isinstance(types, Mapping) else None
        yield plain(f"    {name}" + (f": {kind.dtype.name}[{'x'.join(map(str, kind.shape))}]" if hasattr(kind, "shape") else ""))


def _attribute(attribute: Any) -> str:
    """Its value, but of graphs and tensors, which may be weights, what they are."""
    import onnx.helper

    if attribute.HasField("t"):
        return f"a tensor {list(attribute.t.dims)}"
    if attribute.HasField("g") or attribute.graphs or attribute.tensors:
        return "graphs or tensors"
    return _short(onnx.helper.get_attribute_value(attribute))


def _node(node: Any) -> Iterator[str]:
    shown = [f"{k}={f'a tensor {list(v.shape)}' if hasattr(v, 'shape') else _short(v)}" for k, v in node.attrs.items()]
    yield plain(f"  {node.domain or 'ai.onnx'}.{node.op}({', '.join(shown)})    # {node.name}")
    for t in (*node.inputs, *node.outputs):
        constant = " constant" if hasattr(t, "values") else ""
        yield plain(f"    {t.name}: {t.dtype}{list(t.shape) if t.shape is not None else ''}{constant}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST else f"{text[:MOST]}…"
