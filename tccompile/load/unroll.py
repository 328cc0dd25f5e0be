"""Control flow without control: branches and loops of a model become the nodes in them, while it is folded.

An If whose condition is known is its branch; of another both branches are computed, and Where takes from one (nodes have no
effects but their results). A Loop or Scan whose number of iterations is known is its body, so many times one after the other.
Where the data decide it, it is the body as often as it can be: an iteration that does not take place leaves what is carried as
it was, and indices in it are 0, since what they are computed from was not meant for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tccompile.errors import UnsupportedError
from tccompile.ir.ops.carry import TURNS
from tccompile.load import repeat, sizes
from tccompile.load.at_once import SEVERAL, several_at_once
from tccompile.load.constants import held, literal
from tccompile.load.mapped import mapped
from tccompile.load.nodes import constant_node, rename_inputs, subgraphs, tensor_values
from tccompile.load.repeat import INDEXED, LONG, LONG_COUNTED, Repeated, Repeater, tried
from tccompile.load.rows import appended, as_rows
from tccompile.load.turns import turns
from tccompile.load.types import static_type
from tccompile.load.valid import invalid, title

MOST = 2**14
"""Nodes that all loops of a model may become."""

LONG_AT_ONCE = 64
"""Nodes that a loop may become whose number of iterations the data decide: of more, its iterations are computed at once if they
can be."""

SHORT = 8
"""Nodes of an If's branch, of fewer than which both are computed side by side."""

TAKES_LONG = (
    "Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "Loop", "MatMul", "NonMaxSuppression", "RNN", "Scan",
    "TopK",
)  # fmt: skip
"""Operators of which one may be worth leaving out."""

OWN = "tccompile.load.unroll"
"""The domain of the nodes that stand, while a graph is folded, for what is to be done when those before them have been."""


@dataclass
class Running:
    """A Loop or a Scan, or an If whose branches are both computed.

    carried     the names of the values that an iteration passes to the next
    condition   the name of the value that decides, of an If or on another iteration; empty if none does
    parts       for each output that is put together of parts: their names; of an If, for each branch: those of its results
    axes        for each such output, the axis along which the parts come one after the other
    most        the name of the number of iterations, if it is computed
    going       the name of what says whether the iteration that comes next takes place; empty if it does in any case
    turns       the same of each iteration that there is room for
    bound       how many these are at most, where the data decide; `limited` if that is the user's word
    over        what says whether there would have been more; empty if there cannot be
    """

    node: onnx.NodeProto
    carried: list[str]
    condition: str = ""
    iterations: int | None = None
    parts: list[list[str]] = field(default_factory=list)
    axes: list[int] = field(default_factory=list)
    done: int = 0
    most: str = ""
    going: str = ""
    turns: list[str] = field(default_factory=list)
    bound: int | None = None
    limited: bool = False
    over: str = ""


class Limits:
    """What is held to a user's word in the branches of an If: in one that is not taken there is none of it."""

    def __init__(self, s: sizes.Sizes) -> None:
        self.s, self.marks = s, [len(s.limited)]

    def next(self) -> None:
        """The first branch ends, and the other one begins."""
        self.marks.append(len(self.s.limited))

    def by(self, node: onnx.NodeProto, condition: str, branch: str) -> None:
        """Both have ended, and the condition says which is taken; `branch` as of `Unroller.choice`."""
        s = self.s
        s.node = node
        first, middle = self.marks
        for i in range(first, len(s.limited)):
            counts = [s.limited[i].count, s.constant([0])]
            counts = counts if i < middle else counts[::-1]
            s.limited[i] = replace(s.limited[i], count=s.one_of(condition, counts, branch))


class Folding(repeat.Folding, Protocol):
    """What the walk over a graph that is folded offers: see `fold.Folder`, which is one."""

    present: dict[str, str]

    def visit(self, node: onnx.NodeProto) -> None: ...

    def instead(self, *nodes: onnx.NodeProto) -> None: ...


class Unroller:
    """Puts the nodes of bodies in the place of If, Loop and Scan; a loop goes on when what its last turn computes is known."""

    def __init__(self, folder: Folding) -> None:
        self.folder = folder
        self.running: dict[str, tuple[Callable[[Running], None], Running]] = {}
        self.made = 0
        self.repeating = False
        self.unlike: dict[str, str] = {}
        """Why loops do not stay loops, by what names in them begin with."""

    def visit(self, node: onnx.NodeProto) -> bool:
        """Puts other nodes in the place of a node of control flow: True if it was one."""
        if node.domain == OWN:
            then, running = self.running[node.name]
            then(running)
            return True
        if node.domain not in ("", "ai.onnx"):
            return False
        match node.op_type:
            case "If":
                self.branch(node)
            case "Loop":
                self.loop(node)
            case "Scan":
                self.scan(node)
            case "SequenceMap":
                self.map_sequence(node)
            case _:
                return False
        return True

    # --- If

    def branch(self, node: onnx.NodeProto) -> None:
        condition = self.folder.constants.get(node.input[0])
        branches = [_graph(node, f"{which}_branch") for which in ("then", "else")]
        counts = [len(graph.output) for graph in branches]
        if counts != [len(node.output)] * 2:
            raise invalid(node, f"it has {len(node.output)} outputs, and its branches {counts[0]} and {counts[1]}")
        if condition is not None:
            self.check_one(node, node.input[0], "condition", onnx.TensorProto.BOOL)
            nodes, results = self.inlined(branches[not condition.values.item()], _prefix(node))
            self.folder.instead(*nodes, self.wait_for(Running(node, results), self.finish))
            return
        self.check_one(node, node.input[0], "condition", onnx.TensorProto.BOOL)
        says = self.all_of(node, [node.input[0]])
        parts = [self.inlined(graph, f"{_prefix(node)}/{which}") for graph, which in zip(branches, ("then", "else"), strict=True)]
        running = Running(node, [], says, parts=[results for _, results in parts])
        limits = Limits(self.folder.sizes)
        then, other = self.guarded(parts[0][0], says), self.guarded(parts[1][0], self.folder.sizes.add("Not", [says]))
        between = self.wait_for(running, lambda _: limits.next(), "#then")
        self.folder.instead(*then, between, *other, self.wait_for(running, lambda r: self.choose(r, limits)))

    def choose(self, running: Running, limits: Limits) -> None:
        """One of both, for each result of the two branches, once they are known."""
        branch = _prefix(running.node) if _is_long(running.node) and not self.is_nothing(running) else ""
        limits.by(running.node, running.condition, branch)
        for y, a, b in zip(running.node.output, *running.parts, strict=False):
            if y:
                self.choice(running.node, running.condition, a, b, y, branch)

    def is_nothing(self, running: Running) -> bool:
        """Whether a branch gives only constants without elements: who asks whether there is anything most often finds it."""
        results = [[self.folder.constants.get(self.folder.resolved(name)) for name in part] for part in running.parts]
        return any(all(weight is not None and 0 in weight.shape for weight in part) for part in results)

    def choice(self, node: onnx.NodeProto, condition: str, a: str, b: str, y: str, branch: str = "") -> None:
        """y is a or b, of which the other one need not be computed if `branch` is a name."""
        f = self.folder
        a, b = f.resolved(a), f.resolved(b)
        if a == b:
            self.bind(y, a)
            return
        if a in f.sequences and b in f.sequences:
            self.choose_sequence(node, condition, a, b, y, branch)
            return
        one, other = f.type_of(a, node), f.type_of(b, node)
        if one.elem != other.elem or len(one.shape) != len(other.shape):
            shapes = " or ".join("×".join(map(str, t.shape)) or "scalar" for t in (one, other))
            raise self.refusal(node, f"its output {y!r} is {shapes}, by a condition that is computed at run time")
        how = {"branch": branch} if branch else {}
        f.visit(onnx.helper.make_node("Choice", [condition, a, b], [y], node.name or y, domain=sizes.OWN, **how))

    def choose_sequence(self, node: onnx.NodeProto, condition: str, a: str, b: str, y: str, branch: str = "") -> None:
        """y is a or b, sequences of as many tensors, or one of them with some more: those are there by the condition."""
        f, s = self.folder, self.folder.sizes
        s.node = node
        one, other = f.sequences[a], f.sequences[b]
        if len(one) < len(other):
            one, other, condition = other, one, s.add("Not", [condition])
        rest, made = list(other), list[str]()
        for i, part in enumerate(one):
            made.append(f"{y}/{i}")
            if len(one) == len(other):
                self.choice(node, condition, part, rest.pop(0), made[-1], branch)
                continue
            f.same(made[-1], f.resolved(part))
            flags = [flag for flag in [f.present.get(part)] if flag]
            if rest and rest[0] == part:
                rest.pop(0)
            else:
                flags.append(condition)
            if flags:
                f.present[made[-1]] = self.all_of(node, flags)
        if rest:
            raise self.refusal(
                node, f"its output {y!r} is a sequence of other tensors by a condition that is computed at run time"
            )
        f.sequences[y] = made

    def one(self, name: str) -> str:
        """A tensor of one element as a scalar."""
        s = self.folder.sizes
        return s.add("Reshape", [name, s.constant(np.zeros(0))]) if name and s.shape(name) else name

    def all_of(self, node: onnx.NodeProto, conditions: Sequence[str]) -> str:
        """One boolean that says whether all of these are true."""
        s, out = self.folder.sizes, ""
        s.node = node
        for one in conditions:
            one = self.one(one)
            out = s.add("And", [out, one]) if out else one
        return out

    def guarded(self, nodes: list[onnx.NodeProto], condition: str) -> list[onnx.NodeProto]:
        """Nodes that need not take place: then, indices in them are 0."""
        if not condition:
            return nodes
        out = []
        for node in nodes:
            if node.op_type in INDEXED and node.domain in ("", "ai.onnx"):
                name = f"{_prefix(node)}/at"
                out.append(onnx.helper.make_node("Guard", [node.input[1], condition], [name], node.name, domain=sizes.OWN))
                node.input[1] = name
            out.append(node)
        return out

    # --- Loop

    def loop(self, node: onnx.NodeProto, bound: int | None = None) -> None:
        """Its iterations one after the other; `bound`, how many these are at most, if that is known."""
        body, most = _graph(node, "body"), node.input[0]
        _take_scalars(body)
        weight = self.folder.constants.get(most)
        carried = list(node.input[2:])
        if len(body.input) != 2 + len(carried) or len(body.output) < 1 + len(carried):
            raise invalid(node, f"it carries {len(carried)} values, of {len(body.input)} inputs and {len(body.output)} outputs")
        parts: list[list[str]] = [[] for _ in body.output[1 + len(carried) :]]
        condition = node.input[1] if len(node.input) > 1 else ""
        if most:
            self.check_one(node, most, "number of iterations", onnx.TensorProto.INT64)
        iterations = int(weight.values.item()) if weight is not None else None
        if iterations != 0 and self.collects(node):
            return
        if (same := self.counted(node, condition, iterations)) is not None:
            self.loop(same, bound)
            return
        running = Running(
            node, carried, condition, iterations, parts, [0] * len(parts), most=most if weight is None else "", bound=bound
        )
        if not self.stays(running):
            self.folder.instead(self.wait_for(running, self.iterate))

    def counted(self, node: onnx.NodeProto, condition: str, iterations: int | None) -> onnx.NodeProto | None:
        """The loop with its number of iterations and no condition, if that is computed of a counter; None if of anything else."""
        f = self.folder
        known = f.constants.get(f.resolved(condition)) if condition else None
        if known is None or not known.values.all() or (iterations is None and node.input[0]):
            return None
        weights = [f.constants.get(f.resolved(x)) if x else None for x in node.input[2:]]
        first = [w.values if w is not None and held(w).size == 1 else None for w in weights]
        number = turns(_graph(node, "body"), iterations, first, f.constants, f.opsets)
        if number is None:
            return None
        same = onnx.NodeProto.FromString(node.SerializeToString())
        same.input[0], same.input[1] = f.sizes.constant(number), ""
        body = _graph(same, "body")
        body.output[0].name += "#true"
        body.initializer.append(onnx.numpy_helper.from_array(np.array(True), body.output[0].name))
        return same

    def collects(self, node: onnx.NodeProto) -> bool:
        """Takes what a loop only puts rows behind, beginning with none, as rows that iterations give: True if there was some."""
        f, body = self.folder, _graph(node, "body")
        carried = [f.resolved(x) for x in node.input[2:]]
        tensors = [k for k, x in enumerate(carried) if x and x not in f.sequences and x not in f.absent]
        empty = [k for k in tensors if f.type_of(carried[k], node).shape[:1] == (0,)]
        found = {k: rows for k in empty if (rows := appended(body, k)) is not None}
        if not found:
            return False
        results = [f"{y}#rows" if y else "" for y in (node.output[k] for k in found)]
        f.instead(as_rows(node, body, found, results), self.wait_for(Running(node, []), self.join, "#rows"))
        return True

    def join(self, running: Running) -> None:
        """The rows that iterations gave, one behind the other."""
        f, s, node = self.folder, self.folder.sizes, running.node
        s.node = node
        for y in node.output:
            rows = f.resolved(f"{y}#rows")
            if y and (rows in f.types or rows in f.constants):
                shape = s.shape(rows)
                to = [s.constant([1])] if shape[1] == 1 else [s.constant([-1, *shape[2:]])]
                f.visit(onnx.helper.make_node("Squeeze" if shape[1] == 1 else "Reshape", [rows, *to], [y], node.name or y))

    def stays(self, running: Running) -> bool:
        """Keeps a loop of many nodes one, if each iteration does the same: True if that was so."""
        f, node, body = self.folder, running.node, _graph(running.node, "body")
        known = f.constants.get(running.condition) if running.condition else None
        if self.repeating or (known is not None and not known.values.all()):
            return False
        try:
            bound = self.bound(running, TURNS)
        except UnsupportedError:
            return False  # nor can it be unrolled, if the data decide how often it goes round
        bound = bound if running.bound is None else min(bound, running.bound)
        nodes = bound * _count(body)
        counted = running.most or (running.condition and known is None)
        if nodes <= (min(LONG_AT_ONCE, LONG_COUNTED) if counted else LONG_COUNTED):
            return False
        decide = [f.sizes.add("Less", [f.sizes.constant(0), running.most])] if running.most else []
        decide += [running.condition] if running.condition and known is None else []
        loop = Repeated(
            node, _prefix(node), [f.resolved(x) for x in running.carried], bound, running.limited, self.one(running.most),
            self.all_of(node, decide), nodes <= LONG, self.made + nodes <= MOST,
        )  # fmt: skip
        with tried(f, f.sizes, self) as why:
            f.set_constant(f"{loop.prefix}#true", literal("", True))
            inputs = [loop.turn, f"{loop.prefix}#true", *loop.carried]
            names = dict(zip((v.name for v in body.input), inputs, strict=True))
            self.repeating = True
            repeater = Repeater(f, loop)
            repeater.fold(*self.inlined(body, loop.prefix, names=names))
            several = None if node.name.endswith(SEVERAL) else several_at_once(repeater)
            if several is None and nodes <= LONG_COUNTED:
                raise repeater.differs("it is short")
            if several is None:
                repeater.stay()
            elif several.node is not None:
                f.instead(several.node, self.wait_for(running, lambda _: several.put_together(), SEVERAL))
        self.repeating = False
        self.unlike.update((loop.prefix, reason) for reason in why)
        return not why

    def iterate(self, running: Running) -> None:
        """One more iteration, or what comes after the last."""
        f, node, i = self.folder, running.node, running.done
        body = _graph(node, "body")
        if not self.goes_on(running):
            self.finish(running)
            return
        name = f"{_prefix(node)}/{i}"
        f.set_constant(f"{name}/iteration", literal("", i, np.int64))
        f.set_constant(f"{name}/condition", literal("", True))
        inputs = [f"{name}/iteration", f"{name}/condition", *running.carried]
        nodes, results = self.inlined(body, _prefix(node), i, dict(zip((v.name for v in body.input), inputs, strict=True)))
        carried = len(running.carried)
        before, running.condition, running.carried = running.carried, results[0], results[1 : 1 + carried]
        for parts, part in zip(running.parts, results[1 + carried :], strict=True):
            parts.append(part)
        running.done += 1
        running.turns.append(running.going)
        f.instead(*self.guarded(nodes, running.going), self.wait_for(running, lambda r: self.settle(r, before)))

    def goes_on(self, running: Running) -> bool:
        """Whether there is room for another iteration; `going` says whether it takes place, if the data decide."""
        f, node, i = self.folder, running.node, running.done
        if running.iterations is not None and i >= running.iterations:
            return False
        decide = [running.going] if running.going else []
        if running.condition:
            condition = f.resolved(running.condition)
            self.check_one(node, condition, "condition", onnx.TensorProto.BOOL)
            weight = f.constants.get(condition)
            if weight is not None and not weight.values.all():
                return False
            decide += [condition] if weight is None else []
        if running.most:
            f.sizes.node = node
            decide.append(f.sizes.add("Less", [f.sizes.constant(i), running.most]))
        if not decide:
            return True
        running.going = self.all_of(node, decide)
        if running.bound is None:
            running.bound = self.bound(running)
        if i >= running.bound and running.limited:
            running.over = running.going
        return i < running.bound

    def bound(self, running: Running, ceiling: int = MOST) -> int:
        """How often a loop goes round at most: by what is known of how often it is to, and by the user's word."""
        s, node = self.folder.sizes, running.node
        s.node = node
        said, found = s.limit(), s.number(running.most) if running.most else None
        known = [n.limit if isinstance(n, sizes.Size) else n for n in found or ()]
        known += [] if running.iterations is None else [running.iterations]
        most = min([*known, *([] if said is None else [said])], default=ceiling + 1)
        running.limited = most not in known
        if most > ceiling and said is not None:
            raise UnsupportedError(
                f"{title(node)}: it goes round up to {most} times, and loops of more than {ceiling} iterations are not "
                f"unrolled{self.why(_prefix(node))}: say fewer by --limit {node.name or _prefix(node)}=N, or end the model "
                "before it"
            )
        if most > ceiling:
            raise UnsupportedError(
                f"{title(node)}: how often it goes round is computed at run time: say how often at most, with "
                f"--limit {node.name or _prefix(node)}=N; or end the model before it"
            )
        return most

    def why(self, prefix: str) -> str:
        """Why a loop does not stay one, to be put behind what follows from that."""
        return f" (it does not stay a loop: {self.unlike[prefix]})" if prefix in self.unlike else ""

    def settle(self, running: Running, before: Sequence[str]) -> None:
        """What is carried stays as it was if the iteration did not take place."""
        if running.going:
            for k, (new, old) in enumerate(zip(running.carried, before, strict=True)):
                running.carried[k] = f"{_prefix(running.node)}/{running.done - 1}/carried_{k}"
                self.choice(running.node, running.going, new, old, running.carried[k])
        self.iterate(running)

    def taken(self, running: Running) -> sizes.Size:
        """How many iterations take place."""
        s, total = self.folder.sizes, self.folder.sizes.constant([0])
        s.node = running.node
        for turn in [*running.turns, *filter(None, [running.over])]:
            one = (
                s.add("Reshape", [s.add("Cast", [turn], to=onnx.TensorProto.INT64), s.constant([1])]) if turn else s.constant([1])
            )
            total = s.add("Add", [total, one])
        return s.size(total, len(running.turns), bool(running.over))

    # --- Scan

    def scan(self, node: onnx.NodeProto) -> None:
        f, body = self.folder, _graph(node, "body")
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        count = attributes["num_scan_inputs"]
        if count > len(node.input) or len(body.input) != len(node.input) or len(body.output) < len(node.input) - count:
            inside = f"{len(body.input)} inputs and {len(body.output)} outputs"
            raise invalid(node, f"it scans {count} of {len(node.input)} inputs, by a body of {inside}")
        carried, scanned = list(node.input[: len(node.input) - count]), list(node.input[len(node.input) - count :])
        outputs = len(body.output) - len(carried)

        def of(name: str, n: int) -> list[int]:
            values = list(attributes.get(name, [0] * n))
            if len(values) != n or (name.endswith("directions") and not set(values) <= {0, 1}):
                raise invalid(node, f"its {name} are {values}, for {n} tensors")
            return values

        axes = of("scan_input_axes", count)
        shapes = [f.type_of(x, node).shape for x in scanned]
        if not all(-len(shape) <= axis < len(shape) for axis, shape in zip(axes, shapes, strict=True)):
            raise invalid(node, f"its scan_input_axes are {axes}, of {', '.join(map(str, shapes))}")
        lengths = [shape[axis] for axis, shape in zip(axes, shapes, strict=True)]
        if len(set(lengths)) > 1:
            raise invalid(node, f"it scans axes of {' and '.join(map(str, lengths))} elements")
        axes = [axis % len(shape) for axis, shape in zip(axes, shapes, strict=True)]
        backward, steps = of("scan_input_directions", count), lengths[0]
        ahead = [*axes, *backward, *of("scan_output_axes", outputs), *of("scan_output_directions", outputs)]
        if steps and not any(ahead) and self.map(node, body, carried, scanned):
            return
        counted = [f.sizes.of(x).get(axis) for x, axis in zip(scanned, axes, strict=True)]
        if (size := next(filter(None, counted), None)) is not None:
            x = scanned[counted.index(size)]
            if any(ahead) or any(other != size for other in counted):
                raise f.sizes.refuse(x, f.sizes.axis_of(x, size), "the Scan goes along other axes, or backwards")
            self.loop(_as_loop(node, size.count, count), size.limit)
            return
        if steps * _count(body) > LONG_COUNTED and not any(ahead):
            self.loop(_as_loop(node, f.sizes.constant(steps), count))
            return
        parts: list[list[str]] = [[] for _ in range(outputs)]
        nodes: list[onnx.NodeProto] = []
        for i in range(steps):
            slices = []
            for k, (x, axis) in enumerate(zip(scanned, axes, strict=True)):
                slices.append(f"{_prefix(node)}/{i}/input_{k}")
                f.set_constant(f"{slices[-1]}/at", literal("", steps - 1 - i if backward[k] else i, np.int64))
                nodes.append(
                    onnx.helper.make_node("Gather", [x, f"{slices[-1]}/at"], [slices[-1]], f"{node.name}[{i}]", axis=axis)
                )
            inputs = dict(zip((v.name for v in body.input), [*carried, *slices], strict=True))
            inner, results = self.inlined(body, _prefix(node), i, inputs)
            nodes += inner
            carried = results[: len(carried)]
            for part, result in zip(parts, results[len(carried) :], strict=True):
                part.append(result)
        for k, flipped in enumerate(of("scan_output_directions", outputs)):
            parts[k] = parts[k][::-1] if flipped else parts[k]
        running = Running(node, carried, parts=parts, axes=of("scan_output_axes", outputs))
        self.folder.instead(*nodes, self.wait_for(running, self.finish))

    def map(self, node: onnx.NodeProto, body: onnx.GraphProto, carried: list[str], scanned: list[str]) -> bool:
        """All turns at once, if they pass nothing on, and compute of a row what `mapped` knows: True if that was so."""
        f = self.folder
        nodes, results = self.inlined(
            body, _prefix(node), names=dict(zip((v.name for v in body.input), [*carried, *scanned], strict=True))
        )
        read = dict.fromkeys([*carried, *(name for n in nodes for name in n.input if name in f.constants)])
        rows = {name: len(f.type_of(name, node).shape) - 1 for name in scanned}
        others = {name: len(f.type_of(name, node).shape) for name in read if name not in rows}
        weights = {name: f.constants[name] for name in others if name in f.constants}
        short = {name: w for name, w in weights.items() if w.dtype == np.int64 and math.prod(w.shape) <= MOST}
        axes = {name: w.values.reshape(-1).tolist() for name, w in short.items()}
        made = mapped(nodes, rows, others, axes)
        if made is None:
            return False
        written = {y for n in made[0] for y in n.output}
        results = [made[1].get(name, name) for name in results]
        if results[: len(carried)] != carried or not written.issuperset(results[len(carried) :]) or {*carried} & {*scanned}:
            return False
        pairs = [(x, y) for x, y in zip(results, node.output, strict=True) if y]
        f.instead(*made[0], *(onnx.helper.make_node("Identity", [x], [y], node.name or y) for x, y in pairs))
        return True

    # --- SequenceMap

    def map_sequence(self, node: onnx.NodeProto) -> None:
        """The body for each tensor of a sequence; other sequences have as many, and tensors are the same for all."""
        f, body = self.folder, _graph(node, "body")
        lists = [f.sequences.get(f.resolved(x), f.sequences.get(x)) for x in node.input]
        lengths = {len(parts) for parts in lists if parts is not None}
        if lists[0] is None or len(lengths) > 1 or len(body.input) != len(lists) or len(body.output) < len(node.output):
            raise invalid(node, f"it maps sequences of {sorted(lengths)} tensors by a body of {len(body.input)} inputs")
        if any(part in f.present for parts in lists for part in parts or ()):
            raise self.refusal(node, "how many tensors its sequences have is computed at run time")
        nodes, results = list[onnx.NodeProto](), list[list[str]]()
        for i in range(lengths.pop()):
            given = [x if parts is None else parts[i] for x, parts in zip(node.input, lists, strict=True)]
            inner, made = self.inlined(body, _prefix(node), i, dict(zip((v.name for v in body.input), given, strict=True)))
            nodes += inner
            results.append(made)
        for k, y in enumerate(node.output):
            f.sequences[y] = [made[k] for made in results]
        f.instead(*nodes)

    # --- what they share

    def inlined(
        self, graph: onnx.GraphProto, prefix: str, iteration: int | None = None, names: Mapping[str, str] | None = None
    ) -> tuple[list[onnx.NodeProto], list[str]]:
        """The nodes of a graph inside a node, with names of their own, and those of its results.

        `names` says what the graph's inputs are. Constants in it are the same in every iteration.
        """
        f, where = self.folder, prefix if iteration is None else f"{prefix}/{iteration}"
        names = dict(names or {})
        constants = {t.name: lambda t=t: literal("", tensor_values(t, prefix)) for t in graph.initializer}
        constants |= {n.output[0]: lambda n=n: constant_node(n) for n in graph.node if n.op_type == "Constant"}
        for name, values in constants.items():
            names[name] = f"{prefix}/{name}"
            if names[name] not in f.constants:
                f.set_constant(names[name], values())
        kept = [n for n in graph.node if n.op_type != "Constant"]
        names |= {y: f"{where}/{y}" for n in kept for y in n.output if y}
        nodes = []
        for inner in kept:
            n = onnx.NodeProto()
            n.CopyFrom(inner)
            rename_inputs(n, names)
            n.output[:] = [names.get(y, y) for y in n.output]
            n.name = f"{n.name}[{iteration}]" if n.name and iteration is not None else n.name
            nodes.append(n)
        if iteration is not None:
            self.made += max(1, len(nodes))
            if self.made > MOST:
                raise UnsupportedError(
                    f"{prefix!r}: iterations of its loop, of {len(nodes)} nodes each, make more than {MOST} nodes"
                    f"{self.why(prefix)}; give it a shorter sequence, or split the model there"
                )
        return nodes, [names.get(v.name, v.name) for v in graph.output]

    def wait_for(self, running: Running, then: Callable[[Running], None], what: str = "") -> onnx.NodeProto:
        """A node that goes on with it, or does `what` there is beside that, when all nodes before have been folded."""
        name = f"{_prefix(running.node)}{what}"
        self.running[name] = then, running
        return onnx.helper.make_node("Continue", [], [], name, domain=OWN)

    def finish(self, running: Running) -> None:
        """The outputs of a branch, or of a loop after its last iteration."""
        node, carried = running.node, len(running.carried)
        for y, name in zip(node.output, running.carried, strict=False):
            self.bind(y, name)
        size = self.taken(running) if running.going and (running.over or any(running.turns)) else None
        for k, (y, parts) in enumerate(zip(node.output[carried:], running.parts, strict=False)):
            said = _graph(node, "body").output
            if y:
                self.stack(node, parts, running.axes[k], y, said[len(said) - len(running.parts) + k], size)

    def bind(self, y: str, name: str) -> None:
        """`y` is the tensor, or the sequence, `name`."""
        f, name = self.folder, self.folder.resolved(name)
        if y and name in f.sequences:
            f.sequences[y] = f.sequences[name]
        elif y and name in f.absent:
            f.absent.add(y)
        elif y:
            f.same(y, name)
            f.sizes.says(y, f.sizes.of(name))

    def stack(
        self, node: onnx.NodeProto, parts: list[str], axis: int, y: str, said: onnx.ValueInfoProto, size: sizes.Size | None
    ) -> None:
        """y is the parts, along a new axis, of which there are as many as the size says."""
        if not parts:
            kind = static_type(said.type)
            if kind is None:
                raise self.refusal(node, f"it has no iterations, and the shape of its output {y!r} is not known")
            shape = list(kind.shape)
            shape.insert(axis % (len(shape) + 1), 0)
            self.folder.set_constant(y, literal("", np.empty(shape, kind.dtype)))
            return
        f, s = self.folder, self.folder.sizes
        s.node = node
        rows = [s.add("Unsqueeze", [f.resolved(part), s.constant([axis])]) for part in parts]
        f.visit(onnx.helper.make_node("Concat", rows, [y], node.name or y, axis=axis))
        if size is not None:
            made = f.resolved(y)
            s.says(made, {**s.of(made), axis % len(s.shape(made)): size})

    def check_one(self, node: onnx.NodeProto, name: str, what: str, elem: int) -> None:
        """Raises ModelError unless a tensor has one element, of this type."""
        t = self.folder.type_of(name, node)
        if math.prod(t.shape) != 1 or t.elem != elem:
            kinds = [onnx.TensorProto.DataType.Name(e).lower() for e in (elem, t.elem)]
            raise invalid(node, f"its {what} ({name}) is {kinds[1]} of shape {t.shape}; it must be one {kinds[0]}")

    def refusal(self, node: onnx.NodeProto, why: str) -> UnsupportedError:
        return UnsupportedError(f"{title(node)}: {why}; export the model with that constant, or split it there")


def _as_loop(node: onnx.NodeProto, most: str, count: int) -> onnx.NodeProto:
    """A Scan along the first axis of its last `count` inputs, of which there are as many rows as `most` says, as a Loop."""
    body = onnx.GraphProto()
    body.CopyFrom(_graph(node, "body"))
    carried = len(node.input) - count
    turn, goes_on = (f"{_prefix(node)}/{what}" for what in ("turn", "goes_on"))
    rows = [
        onnx.helper.make_node("Gather", [x, turn], [v.name], node.name or _prefix(node))
        for x, v in zip(node.input[carried:], body.input[carried:], strict=True)
    ]
    inputs = [
        onnx.helper.make_tensor_value_info(turn, onnx.TensorProto.INT64, ()),
        onnx.helper.make_tensor_value_info(goes_on, onnx.TensorProto.BOOL, ()),
    ]
    graph = onnx.helper.make_graph(
        [*rows, *body.node], body.name, [*inputs, *body.input[:carried]], [inputs[1], *body.output], body.initializer
    )
    return onnx.helper.make_node("Loop", [most, "", *node.input[:carried]], node.output, node.name, body=graph)


def _count(graph: onnx.GraphProto) -> int:
    """The nodes of a graph, and of those in them."""
    return sum(1 + sum(_count(inner) for inner in subgraphs(node)) for node in graph.node)


def _is_long(node: onnx.NodeProto) -> bool:
    """Whether an If has a branch that may be worth leaving out: of some nodes, or of one that takes long."""

    def inside(graph: onnx.GraphProto) -> Iterator[str]:
        for inner in graph.node:
            yield inner.op_type
            for part in subgraphs(inner):
                yield from inside(part)

    ops = [
        [op for op in inside(_graph(node, f"{which}_branch")) if op not in ("Constant", "Identity")] for which in ("then", "else")
    ]
    return max(map(len, ops)) >= SHORT or any(op in TAKES_LONG for own in ops for op in own)


def _take_scalars(body: onnx.GraphProto) -> None:
    """The number of an iteration and the condition as a body declares them: some, as TensorFlow's converter, have an axis."""
    for value in body.input[:2]:
        if len(value.type.tensor_type.shape.dim) == 1:
            name, one = value.name, f"{value.name}#shape"
            value.name = f"{name}#scalar"
            value.type.tensor_type.ClearField("shape")
            body.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), one))
            body.node.insert(0, onnx.helper.make_node("Reshape", [value.name, one], [name], name))


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    return next(a.g for a in node.attribute if a.name == name)


def _prefix(node: onnx.NodeProto) -> str:
    """What the names of a node's inner tensors begin with: a node's own name need not be the only one of its kind."""
    return next(filter(None, node.output))
