"""What a graph takes on each generation, step by step, by measured times and by estimates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import onnx_graphsurgeon as gs

from tccompile.arch import ARCHS
from tccompile.fuse import fuse
from tccompile.fuse.groups import absorb_shuffles, join_groups
from tccompile.fuse.twice import store_twice
from tccompile.ir.ops import Op
from tccompile.ir.program import Program
from tccompile.ir.types import FLOAT8, DType
from tccompile.layout import lay_out
from tccompile.lower.graph import lower
from tccompile.precision.formats import precision
from tccompile.rewrites import rewrite
from tccompile.schedule.choose import Candidate, Choice, schedule
from tccompile.schedule.timings import Timings

Kind = tuple[type[Op], str]
"""Of an op, and "fp8" for a convolution from patches that reads or writes floats of 8 bits, "int8" for what else does 8 bits, or
nothing."""

FROM_PATCHES = "conv_halo"
"""The kernel of these."""

Ratios = dict[Kind, float]

UNSURE = {"": 1.0, "int8": 1.05, "fp8": 1.5}
"""What a step is taken to take, in its estimate: so fp16 is left for what is surely faster. Convolutions from patches in floats
of 8 bits took 1.1 to 1.7 of their estimates (12 on an H200), and make three times the error of integers."""


def step_times(
    graph: gs.Graph,
    archs: Sequence[str],
    known: Timings,
    ranked: dict[str, dict[Hashable, list[Candidate]]],
    ratios: dict[str, Ratios],
) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """The steps of a graph as it would be compiled in fp16, on each generation: their nodes, and their times in microseconds,
    measured ones where a table has the op.

    ranked  candidates that were found for other graphs; more are added
    ratios  what times of ops of a kind are in their estimates, by those that are measured of the first graph that has some: of
            the model in floats, and of one in bytes. What is not measured is compared with them
    """
    program = lay_out(join_groups(absorb_shuffles(precision(fuse(lower(rewrite(graph.copy()))), "fp16", {}, ()))))
    program = store_twice(program)
    found: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    for name in archs:
        choices = schedule(program, ARCHS[name], (), known, ranked.setdefault(name, {}))
        steps = list(zip(program.ops, choices, strict=True))
        off = ratios.setdefault(name, {})
        for kind, ratio in _ratios(steps, program).items():
            off.setdefault(kind, ratio)
        found[name] = []
        nodes = [op.nodes for op in program.ops]
        for i, choice in enumerate(choices):
            if choice.work.within >= 0:  # computed by the other's launch, whose time is theirs together
                nodes[choice.work.within], nodes[i] = nodes[choice.work.within] + nodes[i], ()
        for (op, choice), own in zip(steps, nodes, strict=True):
            sure = 1.0 if choice.measured else _sure(_kind(op, choice, program), off)
            found[name].append((own, choice.cost * sure))
    return found


def _ratios(steps: Sequence[tuple[Op, Choice]], program: Program) -> Ratios:
    sums: dict[Kind, list[float]] = {}
    for op, choice in steps:
        if choice.measured:
            both = sums.setdefault(_kind(op, choice, program), [0.0, 0.0])
            both[0] += choice.cost
            both[1] += choice.estimate
    return {kind: took / said for kind, (took, said) in sums.items()}


def _kind(op: Op, choice: Choice, program: Program) -> Kind:
    kinds = {program.tensors[name].dtype for name in (*op.inputs, op.y)}
    if choice.kernel.name == FROM_PATCHES and kinds & {*FLOAT8}:
        return type(op), "fp8"
    return type(op), "int8" if any(t.bits == 8 and t is not DType.BOOL for t in kinds) else ""


def _sure(kind: Kind, off: Ratios) -> float:
    """What an estimate of an op of this kind is multiplied by: if none of it is measured, as the next kind that is."""
    op, of = kind
    others = [(op, of), (op, "int8"), (op, "")] if of else [kind]
    return next((off[k] for k in others if k in off), 1.0) * UNSURE[of]
