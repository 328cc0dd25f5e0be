"""What tests of users' own operators share: small models of them, compiled without machine code and run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tccompile.custom.files import collected, using
from tccompile.dump import Dump
from tccompile.ir.program import Program
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.plan.file import Plan
from tccompile.runtime.session import Session
from tests.plans import without_code
from tests.rewrites.common import Net

OPERATORS = Path(__file__).parent / "operators.py"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "custom_ops"


def model_of(net: Net) -> onnx.ModelProto:
    """The model, of whose operators ONNX knows nothing: neither their outputs' types, nor that there is such a domain."""
    outputs = [onnx.ValueInfoProto(name=y) for y in net.outputs]
    graph = helper.make_graph(net.nodes, "net", net.inputs, outputs, net.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", net.opset)], ir_version=11)


def program_of(net: Net, *given: Any, precision: str = "mixed") -> Program:
    """The program of a model with these operators."""
    with using(collected(given or [OPERATORS])):
        return to_program(model_of(net), {}, Options(precision=precision), Dump(None))


def plan_of(net: Net, *given: Any, precision: str = "mixed") -> Plan:
    """Its plan for a generation with Tensor Cores and one without, each kernel's machine code left empty."""
    with using(collected(given or [OPERATORS])):
        return without_code(model_of(net), ("sm_61", "sm_80"), precision=precision)


def run(net: Net, feeds: dict[str, np.ndarray], *given: Any, precision: str = "mixed") -> list[np.ndarray]:
    """Its outputs on the CPU engine."""
    given = given or (OPERATORS,)
    with Session(plan_of(net, *given, precision=precision), "cpu", ops=given) as session:
        return session.run(None, feeds)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
