"""The public names of Python, from their signatures and docstrings: read as text, as PyTorch and Ray may not be there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import tccompile
from tccompile import errors
from tccompile.options import Options

ROOT = Path(__file__).parents[2] / "tccompile"

Names = dict[str, tuple[str, Sequence[str] | None]]
"""By its public name: the module and the name there, and which methods of a class are shown; None for all public ones."""

PACKAGE: Names = {
    "compile": ("pipeline.compile", None),
    "check": ("api.check", None),
    "verify": ("api.verify", None),
    "inspect": ("api.inspect", None),
    "weights": ("load.model.sources", None),
    "Plan": ("plan.file.Plan", ("save", "load")),
    "Session": ("runtime.session.Session", None),
    "Value": ("runtime.session.Value", None),
}
RESULTS: Names = {
    "Report": ("check.Report", None),
    "Verification": ("verify.oracle.Verification", None),
    "Profile": ("runtime.profile.Profile", None),
    "Metadata": ("ir.metadata.Metadata", None),
}
CUSTOM: Names = {
    "op": ("custom.operators.op", None),
    "Operator.on": ("custom.operators.Operator.on", None),
    "rewrite": ("rewrites.own.rewrite", None),
}
ORT = ("InferenceSession", "SessionOptions", "RunOptions", "OrtValue", "IOBinding", "get_available_providers", "get_device")
DOORS = {
    "ort": ORT,
    "torch": ("compile", "Compiled"),
    "ray": ("Batches", "service"),
    "triton": ("write_repository", "Model"),
    "backend": ("TccompileBackend",),
}

INTRO = """# Python

*Written by `python -m tests.reference` from signatures and docstrings. What to use when is in [from Python](../guide/python.md).*

"""

OWN = "[How they are written](../guide/custom-operators.md)."

ITEM = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")
"""A line of a docstring that begins what it says of an argument."""


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _definition(where: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a function, a class, or a method of one, by its place in the package."""
    module, name = where.rsplit(".", 1)
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        outer = _definition(module)
        return next(node for node in outer.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(node for node in _module(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)


def _base(where: str, found: ast.ClassDef) -> ast.ClassDef | None:
    """The class of the package that a class adds to, where it comes from another module."""
    named = {ast.unparse(base) for base in found.bases}
    module = _module(ROOT.joinpath(*where.split(".")[:-1]).with_suffix(".py"))
    for node in (node for node in module.body if isinstance(node, ast.ImportFrom)):
        for name in (alias.name for alias in node.names if alias.name in named):
            base = _definition(f"{(node.module or '').removeprefix('tccompile.')}.{name}")
            return base if isinstance(base, ast.ClassDef) else None
    return None


WIDTH = 100
"""Of a signature on one line: others have a line for each argument."""


def _signature(function: ast.FunctionDef, lines: bool = True) -> str:
    """Its arguments and what it gives, without `self`."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + [*a.defaults]
    said = [_argument(x, d) for x, d in zip(positional, defaults, strict=True) if x.arg not in ("self", "cls")]
    if a.vararg or a.kwonlyargs:
        said.append(f"*{_argument(a.vararg, None)}" if a.vararg else "*")
    said += [_argument(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    said += [f"**{_argument(a.kwarg, None)}"] if a.kwarg else []
    gives = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    if lines and len(", ".join(said)) > WIDTH:
        return "(\n" + "".join(f"    {text},\n" for text in said) + f"){gives}"
    return f"({', '.join(said)}){gives}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
    value = "" if default is None else ast.unparse(default)
    if value.startswith("Options."):
        value = repr(getattr(Options, value.removeprefix("Options.")))
    return f"{argument.arg}{kind}{f' = {value}' if value else ''}"


def text_of(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: what is said of arguments as a list."""
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            yield from ("```python", *(line.removeprefix("    ") for line in paragraph.splitlines()), "```", "")
            continue
        listed = False
        for line in paragraph.splitlines():
            if (item := ITEM.fullmatch(line)) is not None:
                names = ", ".join(f"`{name}`" for name in item[1].split(", "))
                yield f"- {names}: {item[2]}"
                listed = True
            elif listed and line.startswith(" "):
                yield f"  {line.strip()}"
            else:
                yield from ("", line) if listed else (line.strip(),)
                listed = False
        yield ""


def _shown(name: str, where: str, methods: Sequence[str] | None) -> Iterator[str]:
    """A heading, a signature, the docstring; of a class, its methods too."""
    found = _definition(where)
    said = ast.get_docstring(found) or ""
    if isinstance(found, ast.FunctionDef):
        yield from (f"### {name}", "", "```python", f"{name}{_signature(found)}", "```", "", *text_of(said))
        return
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    base = _base(where, found) if found.bases and (ROOT / where.split(".")[0]).is_dir() else None
    body = [*(base.body if base else []), *found.body]
    named = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    fields = [f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}" for node in named]
    fields = [field for field in fields if not field.startswith("_")]
    made = next((_signature(f) for f in functions if f.name == "__init__"), "")
    made = "" if ": _" in made or made == "()" else made.removesuffix(" -> None")  # what others make is not called by users
    yield from (f"### {name}", "", "```python", f"class {name}{made}", *(f"    {field}" for field in fields))
    yield from ("```", "", *text_of(said), *text_of((ast.get_docstring(base) or "").partition("\n\n")[2] if base else ""))
    for f in functions:
        if f.name.startswith("_") or (methods is not None and f.name not in methods):
            continue
        about = " ".join((ast.get_docstring(f) or "").split("\n\n")[0].split())
        if any(isinstance(d, ast.Name) and d.id == "property" for d in f.decorator_list):
            yield from (f"- `{f.name}`: {about}",)
        elif len(ast.get_docstring(f) or "") > len(about) + 20:
            yield from ("", "```python", f"{f.name}{_signature(f)}", "```", "", *text_of(ast.get_docstring(f) or ""))
        else:
            yield f"- `{f.name}{_signature(f, lines=False)}`: {about}"
    yield ""


def _errors() -> Iterator[str]:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TccompileError)]
    yield from ("## Errors", "", "All are in `tccompile.errors`. [The exit code](exit-codes.md) is that of the commands.", "")
    yield from ("| class | exit code | when |", "| --- | --- | --- |")
    for c in sorted(classes, key=lambda c: c.exit_code):
        yield f"| `{c.__name__}` | {c.exit_code} | {' '.join((c.__doc__ or '').split())} |"
    yield ""


def page() -> str:
    """docs/reference/api.md"""
    lines = ["## tccompile", ""]
    for names in (PACKAGE, RESULTS):
        lines += [] if names is PACKAGE else ["## What functions give", ""]
        lines += [line for name, (where, methods) in names.items() for line in _shown(name, where, methods)]
    lines += [*_errors(), "## Operators and rewrites of your own", "", OWN, ""]
    lines += [line for name, (where, methods) in CUSTOM.items() for line in _shown(name, where, methods)]
    functions = ", ".join(f"`{name}`" for name in tccompile.OF_VALUES)
    lines += [f"Functions of values, for operators that are formulas, are names of `tccompile`: {functions}.", ""]
    for module, names in DOORS.items():
        lines += [f"## tccompile.{module}", ""]
        lines += [*text_of(ast.get_docstring(_module(ROOT / f"{module}.py")) or "")]
        lines += [line for name in names for line in _shown(name, f"{module}.{name}", None)]
    text = (INTRO + "\n".join(lines)).replace("```\n\n```python\n    ", "\n    ")
    return re.sub(r"\n{3,}", "\n\n", text.replace("```\n\n```python\n", "\n")).rstrip() + "\n"
