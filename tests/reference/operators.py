"""Which operators are supported, from the tables that compile them and from ONNX's own cases as `tccompile.check` sees them.

Of an operator of the standard, a model of one node is made from one of ONNX's node cases that passes (tests/backend.py), and
checked: as it is, then with the inputs that decide shapes as constants, then with all of them so. Types are those in which it
still checks out. Refusals are the texts that the operator's converter raises, and the functions that it calls.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tccompile.check import FOLDED
from tccompile.check import _find as problems
from tccompile.load import classical, contrib
from tccompile.load.counted.rules import COUNTS
from tccompile.load.fold import CONTROL_FLOW, FUNCTIONS
from tccompile.load.opset import NEWEST, OLDEST, UPGRADES
from tccompile.load.valid import DECIDES
from tccompile.lower.graph import missing
from tccompile.lower.registry import CONVERTERS
from tests.backend import cases, reason

STANDARD, CLASSICAL = "", classical.DOMAIN
TYPES = {
    name.lower(): number
    for name, number in TensorProto.DataType.items()
    if number not in (TensorProto.UNDEFINED, TensorProto.COMPLEX64, TensorProto.COMPLEX128, TensorProto.STRING)
}
"""ONNX's names of types, and their numbers."""

RUNS, DECIDED, CONSTANT = "runs", "decided", "constant"
"""How a case checks out: as it is, with the inputs constant that DECIDES names, with all inputs constant."""


@dataclass(frozen=True)
class Row:
    """An operator of the standard that is supported.

    opsets    the first and the last that have it, of those that are taken
    types     of its first input, as tensor types without `tensor()`
    decided   inputs that are constants
    constant  whether it is there only for what does not depend on inputs
    """

    op: str
    opsets: tuple[int, int]
    types: tuple[str, ...]
    decided: tuple[str, ...]
    constant: bool


# --- Cases -----------------------------------------------------------------------------------------------------------


@cache
def schemas(domain: str) -> dict[str, Any]:
    """The newest schema of each operator of a domain that is not deprecated, at an opset that is taken."""
    found: dict[str, Any] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == domain and not schema.deprecated and (domain or schema.since_version <= NEWEST):
            known = found.get(schema.name)
            found[schema.name] = schema if known is None or known.since_version < schema.since_version else known
    return {name: schema for name, schema in found.items() if _last(schema) >= OLDEST or domain}


def _last(schema: Any) -> int:
    """The last opset that has an operator."""
    newest = max(_history()[schema.domain, schema.name], key=lambda s: s.since_version)
    return newest.since_version - 1 if newest.deprecated else NEWEST


@cache
def _history() -> dict[tuple[str, str], list[Any]]:
    out: dict[tuple[str, str], list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        out.setdefault((schema.domain, schema.name), []).append(schema)
    return out


@cache
def cases_of() -> dict[tuple[str, str], list[Any]]:
    """ONNX's cases of one node, by its operator; those that pass come first, of newer opsets before those of older ones."""
    out: dict[tuple[str, str], list[Any]] = {}
    for case in cases():
        nodes = case.model.graph.node
        if len(nodes) == 1:
            out.setdefault((nodes[0].domain, nodes[0].op_type), []).append(case)
    return {key: sorted(found, key=lambda c: (reason(c.name) is not None, -_opset(c.model))) for key, found in out.items()}


def _opset(model: onnx.ModelProto) -> int:
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def passes(domain: str, op: str) -> bool:
    """Whether one of ONNX's cases of the operator passes on the CPU engine, as tests/test_backend.py holds it to."""
    return any(reason(case.name) is None for case in cases_of().get((domain, op), ()))


def refusal(model: onnx.ModelProto) -> str | None:
    """What `tccompile --check` says of a model; None if all of it is supported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        issues = problems(model, ({},), None).issues
    return issues[0].reason if issues else None


def with_constants(case: Any, which: Callable[[int], bool]) -> onnx.ModelProto:
    """A case's model in which the inputs that `which` names by their places at the node are constants, of the case's values."""
    model = deepcopy(case.model)
    node, graph = model.graph.node[0], model.graph
    values = dict(zip((v.name for v in case.model.graph.input), case.data_sets[0][0], strict=False))
    constant = {name for place, name in enumerate(node.input) if name in values and which(place)}
    for name in sorted(constant):
        value = values[name]
        graph.initializer.append(value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name))
        graph.initializer[-1].name = name
    kept = [v for v in graph.input if v.name not in constant]
    del graph.input[:]
    graph.input.extend(kept)
    return model


@cache
def checked(domain: str, op: str) -> tuple[str, onnx.ModelProto] | str:
    """How an operator checks out, and the model that does; or why none does."""
    found = [case for case in cases_of().get((domain, op), ()) if reason(case.name) is None]
    newest = [case for case in found if _opset(case.model) == _opset(found[0].model)]
    if not found and domain == STANDARD and op in CONVERTERS:
        model = one_node(schemas(domain)[op])
        return refusal(model) or (RUNS, model)
    why = ""
    for way, which in ((RUNS, lambda _: False), (DECIDED, DECIDES.get(op, ()).__contains__), (CONSTANT, lambda _: True)):
        for case in newest[:8]:
            model = with_constants(case, which)
            said = refusal(model)
            if said is None:
                return way, model
            why = why or said
    return why


def one_node(schema: Any) -> onnx.ModelProto:
    """A model of an operator that ONNX has no case of: what its schema asks for and nothing else."""
    inputs = [p for p in schema.inputs if p.option.name != "Optional"]
    numbers = [TYPES[(*_types(schema, p), "float")[0]] for p in inputs]
    values = [helper.make_tensor_value_info(f"x{i}", number, (2, 2)) for i, number in enumerate(numbers)]
    given = {"INT": 1, "FLOAT": 1.0, "STRING": "", "INTS": [1], "FLOATS": [1.0], "STRINGS": [""]}
    attributes = {name: given[a.type.name] for name, a in schema.attributes.items() if a.required and a.type.name in given}
    outputs = [f"y{i}" for i in range(max(1, schema.min_output))]
    node = helper.make_node(schema.name, [v.name for v in values], outputs, "node", domain=schema.domain, **attributes)
    results = [onnx.ValueInfoProto(name=y) for y in outputs]
    graph = helper.make_graph([node], "g", values, results)
    opsets = [helper.make_opsetid("", min(NEWEST, _last(schema)))]
    if schema.domain:
        opsets.append(helper.make_opsetid(schema.domain, schema.since_version))
    return helper.make_model(graph, opset_imports=opsets)


def not_listed(domain: str, op: str) -> str | None:
    """What is said of a model of an operator that is not listed, one of ONNX's cases if there is one; None if it is taken."""
    found = cases_of().get((domain, op), ())
    said = refusal(found[0].model if found else one_node(schemas(domain)[op]))
    by_name = missing(op, domain)
    return by_name[0] if said and by_name else said


# --- Types -----------------------------------------------------------------------------------------------------------


def _types(schema: Any, parameter: Any) -> Sequence[str]:
    """The types of tensors that a parameter of a schema may have."""
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    names = (t.removeprefix("tensor(").rstrip(")") for t in allowed.get(parameter.type_str, (parameter.type_str,)))
    return sorted(name for name in names if name in TYPES)


def with_type(model: onnx.ModelProto, number: int, places: Container[int]) -> onnx.ModelProto:
    """The model with another type of the inputs of its node at these places; what its outputs are of is left to it."""
    model = deepcopy(model)
    node, graph = model.graph.node[0], model.graph
    names = {name for place, name in enumerate(node.input) if place in places}
    for value in graph.input:
        if value.name in names:
            value.type.tensor_type.elem_type = number
    for tensor in graph.initializer:
        if tensor.name in names:
            values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(number))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for value in graph.output:
        value.ClearField("type")
    return model


def types_of(op: str, model: onnx.ModelProto) -> tuple[str, ...]:
    """The types of its first input in which the model of an operator of the standard checks out.

    Inputs change with it that its schema says are of its type, or else all that are of the same one in the model.
    """
    schema, node = schemas(STANDARD)[op], model.graph.node[0]
    if not schema.inputs or not node.input:
        return ()
    names, last = _types(schema, schema.inputs[0]), len(schema.inputs) - 1
    kind = {v.name: v.type.tensor_type.elem_type for v in model.graph.input} | {
        t.name: t.data_type for t in model.graph.initializer
    }
    places = range(len(node.input))
    same = {i for i in places if schema.inputs[min(i, last)].type_str == schema.inputs[0].type_str}
    alike = {i for i in places if kind.get(node.input[i]) == kind.get(node.input[0])}
    if len(names) < 2:
        return tuple(names)
    ways = [same] if same == alike else [same, alike]
    return tuple(t for t in names if any(refusal(with_type(model, TYPES[t], way)) is None for way in ways))


# --- What is listed --------------------------------------------------------------------------------------------------


def listed(domain: str) -> list[str]:
    """The operators of a domain that are supported, by the tables that say so."""
    if domain == CLASSICAL:
        return sorted(classical.OPERATORS)
    if domain in contrib.DOMAINS:
        return sorted(contrib.OPERATORS[domain])
    tables = {*CONVERTERS, *FOLDED, *FUNCTIONS, *COUNTS, *UPGRADES} - CONTROL_FLOW
    return sorted(op for op in schemas(STANDARD) if op in tables or passes(STANDARD, op))


def row(op: str) -> Row:
    """What is known of an operator of the standard that is listed."""
    schema, found = schemas(STANDARD)[op], checked(STANDARD, op)
    first = max(OLDEST, min(s.since_version for s in _history()[STANDARD, op]))
    way, model = found if isinstance(found, tuple) else (CONSTANT, None)
    names = tuple(schema.inputs[i].name for i in DECIDES.get(op, ()) if i < len(schema.inputs)) if way != RUNS else ()
    types = types_of(op, model) if model is not None else ()
    return Row(op, (first, _last(schema)), types, names, way == CONSTANT)


# --- What is refused -------------------------------------------------------------------------------------------------

REFUSALS = ("refuse", "refused")
OURS = ("tccompile.lower", "tccompile.load.contrib", "tccompile.load.classical")


def _functions(fn: Any, seen: set[Any]) -> Iterator[FunctionType]:
    """A function, and those of the converters that it calls by name."""
    while isinstance(fn, partial):
        fn = fn.func
    if not isinstance(fn, FunctionType) or fn in seen or not fn.__module__.startswith(OURS):
        return
    seen.add(fn)
    yield fn
    for name in fn.__code__.co_names:
        yield from _functions(fn.__globals__.get(name), seen)


def _text(node: ast.expr, names: Mapping[str, Any]) -> str:
    """A message as the code has it: what depends on the model is …, what is a constant of ours is its value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v.value if isinstance(v, ast.FormattedValue) else v, names) for v in node.values)
    if isinstance(node, ast.Name) and isinstance(value := names.get(node.id), int | float):
        return f"2^{int(math.log2(value))}" if value > 4096 and float(math.log2(value)).is_integer() else str(value)
    return "…"


@cache
def _calls(fn: FunctionType) -> tuple[tuple[str, str], ...]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    found = (call.args for call in calls if call.func.attr in REFUSALS and len(call.args) == 2)  # type: ignore[attr-defined]
    return tuple((_text(why, fn.__globals__), _text(way_out, fn.__globals__)) for why, way_out in found)


def refused(converter: Any) -> list[str]:
    """What an operator's converter refuses, each with the way out."""
    found = [texts for fn in _functions(converter, set()) for texts in _calls(fn)]
    return [f"{why}: {way_out}" for why, way_out in dict.fromkeys(found) if why.strip("… ") and way_out.strip("… ")]


# --- The page --------------------------------------------------------------------------------------------------------

INTRO = f"""# Operators

*Written by `python -m tests.reference` from the tables that compile them; a test holds the page to the code.*

Models of opsets {OLDEST} to {NEWEST} are taken. What this page does not list, `tccompile MODEL.onnx --check` refuses, and says
where. [Operators of your own](../guide/custom-operators.md) are added by `--ops`. Shapes are known when a plan is made, or lie in
[ranges](../guide/ranges.md). An operator whose inputs are all constants is computed then.

- **opsets**: those that have the operator. Models of older opsets are written as newer ones have them.
- **types**: of the first input. float64 is computed in float32; uint64 in int64. Narrow types, of fewer than 8 bits or floats of
  8, are stored wider, but for products of [floats of 8 bits](../design/quantized-models.md#floats-of-8-bits). Other floats are
  stored as `--precision` says. In an operator of several inputs not every mixture of types may be there.
- **constants**: inputs that decide a shape or a meaning, and so must not be computed at run time.
"""

FLOATS = frozenset(("bfloat16", "double", "float", "float16"))
INTEGERS = frozenset(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64))
NARROW = frozenset(t for t in TYPES if any(k in t for k in ("float8", "float6", "float4", "int4", "int2")))


def _short(types: Sequence[str]) -> str:
    """Types, the groups of them that are all there by one word."""
    left, words = {*types}, []
    for word, group in (("floats", FLOATS), ("integers", INTEGERS), ("integers but uint64", INTEGERS - {"uint64"})):
        if group <= left:
            left -= group
            words.append(word)
    if len(narrow := NARROW & left) >= 8:
        left -= narrow
        words.append("narrow types")
    return ", ".join([*words, *sorted(left)])


SEQUENCES = "sequences and optional values of known length"


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| operator | opsets | types | constants |"
    yield "| --- | --- | --- | --- |"
    for r in rows:
        opsets = f"{r.opsets[0]}–{r.opsets[1]}"
        sequences = ("Sequence" in r.op or r.op == "Optional") and r.op in FOLDED
        constants = SEQUENCES if sequences else "all inputs" if r.constant else ", ".join(f"`{name}`" for name in r.decided)
        yield f"| {r.op} | {opsets} | {_short(r.types)} | {constants} |"


def _refusals(converters: Mapping[str, Any]) -> Iterator[str]:
    """What converters refuse, operators with the same list together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for op, converter in converters.items():
        if found := refused(converter):
            groups.setdefault(tuple(found), []).append(op)
    for texts, ops in sorted(groups.items(), key=lambda item: sorted(item[1])):
        yield f"**{', '.join(sorted(ops))}**"
        yield ""
        yield from (f"- {text}" for text in texts)
        yield ""


def page() -> str:
    """docs/reference/operators.md"""
    return with_rows([row(op) for op in listed(STANDARD)])


def with_rows(rows: Sequence[Row]) -> str:
    """The page with these rows in the table of ONNX's own operators."""
    return "\n".join([INTRO, *_standard(rows), *_classical(), *_microsoft()]).rstrip() + "\n"


def _standard(rows: Sequence[Row]) -> Iterator[str]:
    ops = listed(STANDARD)
    yield from ("## ONNX's own (ai.onnx)", "", *table(rows), "")
    yield from ("### What is refused of these", "", "What depends on the model is written as …", "")
    yield from _refusals({op: CONVERTERS[op] for op in ops if op in CONVERTERS})
    yield from ("### Not supported", "", "| operator | why |", "| --- | --- |")
    for op in sorted({*schemas(STANDARD)} - {*ops}):
        yield f"| {op} | {not_listed(STANDARD, op)} |"
    yield ""


def _classical() -> Iterator[str]:
    yield from ("## Classical models (ai.onnx.ml)", "")
    yield from ("On numbers alone, with ONNX Runtime's meaning:", f"{', '.join(listed(CLASSICAL))}.", "")
    yield from _refusals(classical.OPERATORS)
    left = sorted({*schemas(CLASSICAL)} - {*classical.OPERATORS})
    yield from (f"Not supported: {', '.join(left)}.", "")


FUSED_AGAIN = (
    "Fusion puts them together again, into other steps than the model has: attention is one, a quantized operator is an integer "
    "product with its scales in the epilogue, and MatMulNBits of up to 16 rows is a kernel that [reads integers of 4 and 8 bits]"
    "(../design/quantized-models.md#weights-in-4-and-8-bits)."
)
"""How operators that are taken apart are computed."""


def _microsoft() -> Iterator[str]:
    for domain in sorted(contrib.DOMAINS):
        yield from (f"## ONNX Runtime's own ({domain})", "", "Taken apart into operators of the standard:")
        yield from (f"{', '.join(listed(domain))}.", "", *((FUSED_AGAIN, "") if domain == "com.microsoft" else ()))
        yield from _refusals(contrib.OPERATORS[domain])
