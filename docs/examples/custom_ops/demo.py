"""A network with operators of our own, as plan for all GPUs: python demo.py [GENERATION …]"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import tccompile as tc
from tccompile.arch import ARCHS

OPS = [Path(__file__).parent / "press.py"]


def network(shape: tuple[int, int, int, int] = (1, 3, 90, 120), seeds: int = 24) -> onnx.ModelProto:
    """An image's features, under a halftone screen, and how far each pixel's are from the nearest seed."""
    rng = np.random.default_rng(0)
    constants = {"w": rng.standard_normal((16, 3, 3, 3)) / 5, "seeds": rng.standard_normal((seeds, 16))}
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["features"], "features", pads=[1, 1, 1, 1]),
        helper.make_node("Halftone", ["features"], ["screened"], "screen", domain="press", pitch=6, depth=0.5),
        helper.make_node("Cells", ["screened", "seeds"], ["print"], "cells", domain="press"),
    ]
    image = helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("print", onnx.TensorProto.FLOAT, None)
    weights = [onnx.numpy_helper.from_array(values.astype(np.float32), name) for name, values in constants.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("press", 1)]
    return helper.make_model(helper.make_graph(nodes, "press", [image], [result], weights), opset_imports=opsets)


if __name__ == "__main__":
    model = network()
    plan = tc.compile(model, archs=sys.argv[1:] or tuple(ARCHS), ops=OPS)
    plan.save("press.plan")
    for section in plan.entries[0].sections:
        nodes = (" + ".join(plan.entries[0].program.ops[step.op].nodes) for step in section.steps if step.launches)
        print(section.arch, "launches", ", ".join(nodes))

    session = tc.Session("press.plan", ops=OPS)  # ops are for the CPU, if there is no GPU
    (result,) = session.run(None, {"image": np.random.default_rng(1).random((1, 3, 90, 120), np.float32)})
    print(f"distances from {result.min():.2f} to {result.max():.2f}, on {session.describe()}")
