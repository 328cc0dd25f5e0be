"""All that stands against compiling a model, and where the model can be cut so that nothing does: `tccompile --check`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import onnx
import onnx.defs

from tccompile.errors import ModelError, TccompileError, UnsupportedError, UsageError
from tccompile.load.contrib import DOMAINS
from tccompile.load.cut import Graph, Part, quoted
from tccompile.load.fold import CONTROL_FLOW, FUNCTIONS
from tccompile.load.issues import Findings, Issue
from tccompile.load.model import Model, Tuned, load, parsed, read
from tccompile.load.nodes import all_nodes
from tccompile.lower.graph import check_together, lower, missing, unsupported
from tccompile.lower.registry import CONVERTERS
from tccompile.options import Shapes
from tccompile.python import as_python
from tccompile.rewrites import rewrite
from tccompile.terminal import plain

FOLDED = FUNCTIONS | CONTROL_FLOW | {
    "ConcatFromSequence", "Constant", "ConstantOfShape", "Einsum", "EyeLike", "Optional", "SequenceAt", "SequenceConstruct",
    "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Size", "SplitToSequence",
}  # fmt: skip
"""Operators of the standard that have no converter, and need none where shapes are known."""

TAKEN_APART = (*DOMAINS, "ai.onnx.ml")
"""Domains of which some operators are taken apart: which, depends on shapes and attributes."""

ROUNDS = 4
"""How often a cut is moved on because something else was behind it."""

MOST = 64
"""Inputs and outputs of a part that a command can still be read with."""

CHECKS = 8
"""How many cuts are tried: each takes as long as reading and folding the model."""

SEARCH = 2**20
"""Nodes to look at for the side of each that is refused, on which the model is to be cut."""


@dataclass(frozen=True)
class Missing:
    """Issues that are one: of the same operator, for the same reason. The first of them speaks for all."""

    issue: Issue
    nodes: tuple[str, ...]

    @property
    def text(self) -> str:
        more = f" and {len(self.nodes) - 3} more" if len(self.nodes) > 3 else ""
        names = f"{', '.join(self.nodes[:3])}{more}"
        what = {"Input": "inputs", "Output": "outputs"}.get(self.issue.op, "nodes")
        count = f", {len(self.nodes)} {what}" if len(self.nodes) > 1 else ""
        says = "; ".join(filter(None, (self.issue.reason, self.issue.way_out)))
        return plain(f"{names} ({self.issue.title}{count}): {says}")

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self.issue).items() if name != "outputs"}
        return {**fields, "count": len(self.nodes), "nodes": list(self.nodes)}


@dataclass(frozen=True)
class Cut:
    """Where a model can be cut so that all of the rest is supported."""

    part: Part
    entries: tuple[Shapes, ...]
    placeholders: bool  # some extents in the entries are examples
    refused: int  # nodes
    kept: int
    nodes: int

    @property
    def command(self) -> str:
        model = self.part.model if not isinstance(self.part.model, onnx.ModelProto) else "MODEL.onnx"
        words = ["tccompile", quoted(str(model))]
        words += [word for name in self.part.inputs for word in ("--input", quoted(name))]
        words += [word for name in self.part.outputs for word in ("--output", quoted(name))]
        texts = [[f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()] for shapes in self.entries]
        if len(texts) == 1:
            words += [word for text in texts[0] for word in ("--shape", quoted(text))]
        else:
            words += [word for text in texts for word in ("--entry", quoted(",".join(text)))]
        return " ".join(words)

    @property
    def text(self) -> str:
        where = "around" if self.part.inputs and self.part.outputs else "behind" if self.part.inputs else "before"
        what = "it" if self.refused == 1 else "them"
        own = ", with your own extents" if self.placeholders else ""
        return f"cut the model {where} {what}, which keeps {self.kept} of its {self.nodes} nodes{own}: {self.command}"


@dataclass(frozen=True)
class Report:
    """What of a model is missing, each thing once, and the cut that goes round it if there is one."""

    missing: tuple[Missing, ...]
    cut: Cut | None

    @property
    def exit_code(self) -> int:
        """That of the error that a model's first defect is; 0 if there is none."""
        if not self.missing:
            return 0
        issues = [m.issue for m in self.missing if not m.issue.open]
        if not issues:
            return UsageError.exit_code
        return ModelError.exit_code if issues[0].invalid else UnsupportedError.exit_code

    @property
    def text(self) -> str:
        """What `tccompile --check` prints: a line for each thing that is missing, and the way round."""
        if not self.missing:
            return "every node is supported"
        missing = [m for m in self.missing if not m.issue.open]
        said = [m.text for m in self.missing]
        if len(missing) < len(said) and missing:
            said.append("the rest was looked at with these examples of shapes")
        elif not missing:
            return "\n".join((*said, "every node is supported, with these examples of shapes"))
        count = sum(len(m.nodes) for m in missing)
        what = "thing" if any(m.issue.op in ("Input", "Output", "Model") for m in missing) else "node"
        last = f"{count} {what}{'s are' if count > 1 else ' is'} not supported"
        return "\n".join((*said, last, *([self.cut.text] if self.cut else ())))

    def __str__(self) -> str:
        return as_python(self.text)

    def to_json(self) -> list[dict[str, Any]]:
        """What `tccompile --check --json` prints: the node, the operator, the reason, the way out of each thing."""
        command = self.cut.command if self.cut else None
        return [{**m.to_json(), "cut": command} for m in self.missing]


def check(model: Model, entries: Sequence[Shapes], block: int | None = None, limits: Mapping[str, int] | None = None) -> Report:
    """What of a model is not supported, or not valid, for any of the entries; nothing if it can be compiled.

    An input whose shape is open is one of that, and the rest is looked at with an example of its shape.

    block, limits  as `load.read` takes them
    Raises UsageError for shapes that do not fit, and what `load.parsed` raises of a file that is no model.
    """
    found = _find(model, entries, block, limits)
    refused = replace(found, issues=[issue for issue in found.issues if not issue.open])
    return Report(_grouped(found.issues), _way_round(model, entries, refused, block, limits) if refused.issues else None)


def advise(
    error: TccompileError,
    model: Model,
    entries: Sequence[Shapes],
    block: int | None = None,
    limits: Mapping[str, int] | None = None,
) -> None:
    """Adds to what a refusal of a model says where the model can be cut, and that more is missing."""
    with suppress(TccompileError):  # it is this error that is to be told
        report = check(model, entries, block, limits)
        more = len(report.missing) - 1
        says = [f"{more} more {'things are' if more > 1 else 'thing is'} missing: --check lists all"] if more > 0 else []
        says += [report.cut.text] if report.cut else []
        error.args = ("\n".join((str(error), *says)),)


def _find(model: Model, entries: Sequence[Shapes], block: int | None, limits: Mapping[str, int] | None = None) -> Findings:
    """One issue for each node at most."""
    try:
        opened = read(model, block, limits)
    except (UnsupportedError, ModelError) as error:
        return Findings(_as_a_whole(error, parsed(model)[0]))
    issues: dict[tuple[str, ...], Issue] = {}
    constants = set[str]()
    for shapes in entries:
        found = Findings()
        try:
            graph = rewrite(load(opened, shapes, found))
            found.issues += unsupported(graph)
            if not found.issues:
                check_together(lower(graph))
            found.issues += filter(None, map(_by_name, found.masked))
        except (UnsupportedError, ModelError) as error:
            found.issues += _as_a_whole(error, opened.proto)
        for issue in found.issues:
            issues.setdefault((issue.node, *issue.outputs), issue)
        constants |= found.constants
    return Findings([*issues.values()], constants=constants)


def _as_a_whole(error: TccompileError, proto: onnx.ModelProto) -> list[Issue]:
    """An error about no single node, and the nodes whose operators are missing in any case."""
    found = Findings()
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)
    known = min(max(opset, 0), (1 << 31) - 1)  # onnx takes 32 bits, and the file has 64
    own = {(f.domain, f.name) for f in proto.functions}
    for part in (proto.graph, *proto.functions):
        for node in all_nodes(part.node):
            if (node.domain, node.op_type) in own:
                continue
            domain = "" if node.domain == "ai.onnx" else node.domain
            outputs = tuple(filter(None, node.output))
            issue = Issue(node.name or next(iter(outputs), node.op_type), node.op_type, (), "", "", domain, outputs)
            if domain == "" and not onnx.defs.has(node.op_type, known, ""):
                why = f"opset {opset} has no operator {node.op_type}"
                found.issues.append(
                    replace(issue, reason=why, way_out="export the model with an opset that has it", invalid=True)
                )
            elif named := _by_name(issue):
                found.issues.append(named)
    if not any(issue.invalid for issue in found.issues):  # it is about another thing
        found.add(error, Issue(proto.graph.name or "the model", "Model", (), "", ""), "")
    return found.issues


def _by_name(issue: Issue) -> Issue | None:
    """What can be said of a node by its operator alone: that there is nothing for it, if so."""
    if issue.domain in TAKEN_APART or (issue.domain == "" and (issue.op in FOLDED or issue.op in CONVERTERS)):
        return None
    why = missing(issue.op, issue.domain)
    return replace(issue, reason=why[0], way_out=why[1]) if why else None


def _grouped(issues: Iterable[Issue]) -> tuple[Missing, ...]:
    groups: dict[tuple[Any, ...], list[Issue]] = {}
    for issue in issues:
        reason = issue.reason
        for name in sorted({issue.node, *issue.outputs}, key=len, reverse=True):
            reason = reason.replace(repr(name), "_")
        key = (
            issue.domain,
            issue.op,
            re.sub(r"\d+", "0", re.sub(r"'[^']*'", "_", reason)),
            issue.invalid,
            issue.open and issue.node,
        )
        groups.setdefault(key, []).append(issue)
    return tuple(Missing(of[0], tuple(issue.node for issue in of)) for of in groups.values())


# --- Where to cut ----------------------------------------------------------------------------------------------------


@dataclass
class Frontier:
    """A model's graph with what is refused of it: nodes, by number, and inputs and outputs."""

    graph: Graph
    constants: set[str]
    nodes: set[int] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.live = self.graph.live(self.graph.inputs)
        self.named: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            self.named.setdefault(node.name, []).append(i)

    def add(self, issues: Iterable[Issue]) -> bool:
        """Whether all of the issues could be found in the graph, and were not all there."""
        before = len(self.nodes) + len(self.inputs) + len(self.outputs)
        for issue in issues:
            if issue.op == "Model" and not issue.outputs:
                continue
            if issue.op == "Input":
                self.inputs.update(issue.outputs)
            elif issue.op == "Output":
                self.outputs.update(issue.outputs)
            elif (i := self.node(issue)) is not None:
                self.nodes.add(i)
            else:
                return False
        if self.inputs:
            self.nodes |= {i for i, names in enumerate(self.graph.reads) if not self.inputs.isdisjoint(names)}
        return len(self.nodes) + len(self.inputs) + len(self.outputs) > before

    def node(self, issue: Issue) -> int | None:
        """The node of the main graph that an issue is about, or that the node stands for that it is about."""
        for y in issue.outputs:
            if y in self.graph.producer:
                return self.graph.producer[y]
        same = self.named.get(issue.node, ())
        if len(same) == 1:
            return same[0]
        for y in issue.outputs:  # what is put in a node's place has names that begin with one of its results'
            for end in (m.start() for m in reversed([*re.finditer(r"[/_]", y)])):
                if y[:end] in self.graph.producer:
                    return self.graph.producer[y[:end]]
        return None

    def behind(self, nodes: Iterable[int], inputs: Iterable[str] = ()) -> set[int]:
        """The nodes, and all that depend on them or on inputs."""
        out, unknown = set(nodes), set(inputs)
        for i, node in enumerate(self.graph.nodes):
            if i in out or not unknown.isdisjoint(self.graph.reads[i]):
                out.add(i)
                unknown.update(filter(None, node.output))
        return out

    def before(self, nodes: Iterable[int]) -> set[int]:
        """The nodes, and all that they depend on and that depends on inputs."""
        nodes = set(nodes)
        needed = self.graph.needed((name for i in nodes for name in self.graph.reads[i]), ()).nodes
        return nodes | {i for i in needed if not self.live.isdisjoint(self.graph.nodes[i].output)}

    def candidate(self, first: set[int], last: set[int]) -> Candidate:
        """The part behind what `first` needs, and before what needs `last`."""
        graph = self.graph
        start = self.before(first)
        end = self.behind(last, self.inputs if not first else ()) - start
        lost = {y for i in start | end for y in graph.nodes[i].output}
        own = [y for y in graph.outputs if y not in lost and y not in self.outputs and y in graph.producer]
        reads = (name for i in sorted(end) for name in graph.reads[i])
        edge = [n for n in dict.fromkeys(reads) if n in graph.producer and n not in lost and n not in self.constants]
        outputs = list(dict.fromkeys((*own, *(n for n in edge if n in self.live))))
        given = {y for i in start for y in graph.nodes[i].output if y and y not in self.constants}
        needed = graph.needed(outputs, given)
        inputs = [n for n in graph.inputs if n in needed.tensors and n not in self.inputs]
        inputs += [y for i in sorted(start) for y in graph.nodes[i].output if y in given and y in needed.tensors]
        return Candidate(
            tuple(inputs) if start else (), tuple(outputs), needed.nodes, needed.tensors, bool(start), outputs != graph.outputs
        )

    def candidates(self) -> list[Candidate]:
        """Cuts that leave what is refused out, those first that keep most of what has weights, then most nodes."""
        found = [self.candidate(set(), self.nodes), self.candidate(self.nodes, set())]
        if len(self.nodes) > 1 and len(self.nodes) * len(self.graph.nodes) <= SEARCH:
            nothing = set[int]()
            first = {i for i in self.nodes if self.score(self.candidate({i}, nothing)) > self.score(self.candidate(nothing, {i}))}
            found.append(self.candidate(first, self.nodes - first))
        useful = (c for c in found if c.outputs and c.nodes and len(c.inputs) + len(c.outputs) <= MOST)
        return sorted(useful, key=self.score, reverse=True)

    def score(self, candidate: Candidate) -> tuple[int, int]:
        constants = self.graph.constants
        return sum(any(n in constants for n in self.graph.reads[i]) for i in candidate.nodes), len(candidate.nodes)


@dataclass(frozen=True)
class Candidate:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: set[int]
    tensors: set[str]
    begins: bool  # later than the model does
    ends: bool  # elsewhere than the model does


def _way_round(
    model: Model, entries: Sequence[Shapes], found: Findings, block: int | None, limits: Mapping[str, int] | None
) -> Cut | None:
    """The cut of a model that keeps most of it and of which all is supported, as far as can be told, or None."""
    model = model.model if isinstance(model, Tuned) else model  # what is supported depends on no values
    whole = model if isinstance(model, Part) else Part(model)
    graph = Graph(parsed(model)[0].graph)
    left = CHECKS
    for rank in range(3):
        frontier, issues = Frontier(graph, found.constants), found.issues
        for _ in range(ROUNDS):
            if not frontier.add(issues) or len(candidates := frontier.candidates()) <= rank:
                break
            with suppress(TccompileError):  # names between which there is no part, or of whose types nothing is known
                for cut in islice(_cuts(whole, entries, candidates[rank], frontier), left):
                    left -= 1
                    names = {name for node in parsed(cut.part)[0].graph.node for name in (node.name, *node.output)}
                    own = {name: most for name, most in (limits or {}).items() if name in names}
                    issues = _find(cut.part, cut.entries, block, own).issues
                    if not issues:
                        return cut
    return None


def _cuts(whole: Part, entries: Sequence[Shapes], candidate: Candidate, frontier: Frontier) -> Iterator[Cut]:
    """The candidate as a part of the model, with shapes of its inputs; with examples of them where they are not known."""
    graph = frontier.graph
    inputs = candidate.inputs if candidate.begins else tuple(n for n in whole.inputs if n in candidate.tensors)
    made = Part(whole.model, inputs, candidate.outputs if candidate.ends else whole.outputs)
    values = [v for v in parsed(made)[0].graph.input if v.name not in graph.constants]
    sizes = Cut(made, (), False, len(frontier.nodes), len(candidate.nodes), len(graph.nodes))
    open_shapes = False
    for examples in EXAMPLES:
        sets: list[Shapes] = []
        for shapes in entries:
            known = {v.name: shapes[v.name] for v in values if v.name in shapes}
            symbols = _symbols(values, known)
            for value in (v for v in values if v.name not in known):
                shape, said = _example(value, symbols, examples)
                open_shapes |= not said
                if shape is not None:
                    known[value.name] = shape
            if known not in sets:
                sets.append(known)
        yield replace(sizes, entries=tuple(sets), placeholders=open_shapes)
        if not open_shapes:
            return


EXAMPLES: tuple[dict[int, tuple[int, ...]], ...] = (
    {3: (224, 224, 3), 4: (1, 3, 224, 224)},
    {3: (3, 224, 224), 4: (1, 224, 224, 3)},
    {},
)
"""Shapes by which to try a part whose inputs have open ones, by their number of axes: those of an image, or small ones."""


def _symbols(values: Sequence[onnx.ValueInfoProto], known: Shapes) -> dict[str, int]:
    """The extents that symbols in the shapes of inputs stand for."""
    return {
        d.dim_param: n
        for v in values
        for d, n in zip(v.type.tensor_type.shape.dim, known.get(v.name, ()), strict=False)
        if d.dim_param
    }


def _example(
    value: onnx.ValueInfoProto, symbols: Mapping[str, int], examples: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...] | None, bool]:
    """The shape to give an input, None if it has one; and whether the model and the entry say it all."""
    if not value.type.tensor_type.HasField("shape"):
        raise UsageError(f"nothing is known of the shape of {value.name!r}")
    dims = value.type.tensor_type.shape.dim
    if all(d.HasField("dim_value") for d in dims):
        return None, True
    example = examples.get(len(dims), (1, *[16] * len(dims)))
    shape = tuple(d.dim_value if d.HasField("dim_value") else symbols.get(d.dim_param, -1) for d in dims)
    return tuple(e if n < 0 else n for n, e in zip(shape, example, strict=False)), -1 not in shape
