"""Folding that goes on behind what it refuses: `tccompile --check` lists all that a model lacks, and not the first of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import onnx
import onnx.helper

from tccompile.errors import ModelError, UnsupportedError, blamed_on
from tccompile.load.fold import Folder
from tccompile.load.issues import Findings, Issue
from tccompile.load.nodes import reads
from tccompile.load.types import Type
from tccompile.load.unroll import OWN
from tccompile.load.valid import title


class Unknown(UnsupportedError):
    """A tensor of which nothing is known, for another node's sake."""


class Survey(Folder):
    """Leaves nodes that are refused out of the graph, notes why, and leaves out what depends on them.

    What is left computes the outputs that do not, and what the nodes that were left out read: the later stages judge that. Where
    the model itself says what a refused node's results are, these are inputs.
    """

    def __init__(self, found: Findings, unknown: Iterable[str], *folded: Any) -> None:
        super().__init__(*folded)
        self.found = found
        self.unknown = set(unknown)
        self.ends: dict[str, None] = {}
        self.outputs = {v.name for v in self.graph.output}

    def run(self) -> dict[str, Type]:
        types = super().run()
        self.found.constants |= self.folded
        return types

    def visit(self, node: onnx.NodeProto) -> None:
        whole, names = self.whole(node)
        if self.unknown.intersection(names):
            self.found.masked.append(self.issue(whole))
            self.leave_out(whole, names)
            return
        called = title(whole)
        try:
            with blamed_on(called):
                super().visit(node)
        except Unknown:
            self.leave_out(whole, names)
        except (ModelError, UnsupportedError) as error:
            self.found.add(error, self.issue(whole), called)
            self.leave_out(whole, names)

    def whole(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, list[str]]:
        """The node of the model, and what it reads; of a loop that goes on, what the last iteration computed."""
        if node.domain != OWN:
            return node, [name for name in reads(node) if name]
        running = self.control.running[node.name][1]
        names = (running.condition, *running.carried, *chain.from_iterable(running.parts))
        return running.node, [self.resolved(name) for name in names if name]

    def type_of(self, name: str, node: onnx.NodeProto) -> Type:
        if name in self.unknown:
            raise Unknown(name)
        return super().type_of(name, node)

    def issue(self, node: onnx.NodeProto) -> Issue:
        """All but the reason."""
        names = [name for name in node.input if name and (name in self.types or name in self.constants)]
        shapes = tuple(self.type_of(name, node).shape for name in names)
        domain = "" if node.domain == "ai.onnx" else node.domain
        outputs = tuple(filter(None, node.output))
        return Issue(node.name or next(iter(outputs), node.op_type), node.op_type, shapes, "", "", domain, outputs)

    def leave_out(self, node: onnx.NodeProto, names: Iterable[str]) -> None:
        """Without the node: what it writes is unknown, or what the model says it is, and what it reads is wanted."""
        self.ends |= {name: None for name in names if name in self.types}
        for y in filter(None, node.output):
            self.types.pop(y, None)
            kind = self.said.get(y)
            if kind is None or y in self.outputs or y in self.constants:
                self.unknown.add(y)
            else:
                self.types[y] = kind
                self.graph.input.append(onnx.helper.make_value_info(y, kind.proto))

    def name_outputs(self) -> None:
        kept = []
        for value in self.graph.output:
            name = self.resolved(value.name)
            if name not in self.unknown and (name in self.types or name in self.constants):
                kept.append(value)
            elif name not in self.unknown:
                self.found.issues.append(
                    Issue(value.name, "Output", (), "nothing computes it", "", outputs=(value.name,), invalid=True)
                )
        taken = {v.name for v in (*kept, *self.graph.input)} | {self.resolved(v.name) for v in kept}
        kept += [onnx.helper.make_value_info(n, self.types[n].proto) for n in self.ends if n not in taken and n in self.types]
        del self.graph.output[:]
        self.graph.output.extend(kept)
        super().name_outputs()

    def drop_unused(self) -> None:
        self.folded = set(self.constants)
        super().drop_unused()
