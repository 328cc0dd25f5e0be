"""Published convolution networks through every stage but machine code: right on the CPU engine, in fp16 and in fp32.

That runs the same steps, arena, layouts, padding and views as a GPU does, for the generation named.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.arch import ARCHS as GENERATIONS
from tccompile.cli.report import live_bytes
from tccompile.dump import Dump
from tccompile.ir.ops import Attention, Conv, Gemm, Pointwise
from tccompile.options import Options
from tccompile.pipeline import to_program
from tccompile.precision.ranges import total_flops
from tccompile.runtime.session import Session
from tccompile.schedule.choose import schedule
from tccompile.schedule.place import place
from tests.networks import CONVOLUTIONAL, RECURRENT, feeds, half, reference, relative_error, shortened, skeleton
from tests.plans import without_code
from tests.tiers import usually

ARCHS = ("sm_61", "sm_75", "sm_80", "sm_90a")
SHAPES = {"resnet50_dynbatch": {"input": (2, 3, 224, 224)}}
SMALLER = {"esrgan_x4": (1, 3, 44, 56), "style_transfer": (1, 3, 124, 156), "unet_denoise": (1, 3, 96, 160)}
"""Input shapes for networks that take minutes at their own size on a CPU; nothing else in them depends on it."""


BEGINNINGS = [("vit_b_16", "layer_norm_2", 1), ("bert_base", "layer_norm_4", 2)]
"""Attention networks up to a tensor of theirs, and how many attentions that takes."""


def network(name: str) -> onnx.ModelProto:
    """The network, its one input of the shape in SMALLER if that has one."""
    model = skeleton(name)
    if name in SMALLER:
        (image,) = model.graph.input
        was = [d.dim_value for d in image.type.tensor_type.shape.dim]
        assert len(was) == 4 and was[:2] == list(SMALLER[name][:2]), was
        for dim, extent in zip(image.type.tensor_type.shape.dim, SMALLER[name], strict=True):
            dim.dim_value = extent
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        del model.graph.value_info[:]
    return model


USUAL = ("resnet18", "mobilenet_v2", "deepspeech_gru")


@pytest.mark.parametrize("name", usually(CONVOLUTIONAL + RECURRENT, *USUAL))
def test_network_in_fp16(name):
    model, shapes = network(name), SHAPES.get(name, {})
    plan = without_code(model, (ARCHS[sum(map(ord, name)) % len(ARCHS)],), shapes)
    inputs = feeds(model, 1, shapes)
    expected = reference(model, inputs)
    with Session(plan, device="cpu") as session:
        got = session.run(list(expected), inputs)
    for out, (output, ref) in zip(got, expected.items(), strict=True):
        assert relative_error(out, ref) <= 3e-3, output


@pytest.mark.parametrize("name, output, attentions", usually(BEGINNINGS))
def test_beginning_of_an_attention_network_in_fp16(name, output, attentions):
    model = shortened(skeleton(name), output)
    plan = without_code(model, ("sm_90a",))
    inputs = feeds(model, 1)
    (expected,) = reference(model, inputs).values()
    with Session(plan, device="cpu") as session:
        (got,) = session.run([output], inputs)
    assert relative_error(got, expected) <= 3e-3
    section, program = plan.entries[0].sections[0], plan.entries[0].program
    kernels = [step.kernel for step, op in zip(section.steps, program.ops, strict=True) if isinstance(op, Attention)]
    assert kernels == ["attention_sm90"] * attentions
    assert sum(isinstance(op, Pointwise) for op in program.ops) <= 5  # the image as patches, the embedding, the output


@pytest.mark.parametrize("name", usually(["resnet18", "mobilenet_v2", "densenet121"], "mobilenet_v2"))
def test_network_in_fp32(name):
    model = skeleton(name)
    inputs = feeds(model, 2)
    expected = reference(model, inputs)
    with Session(without_code(model, ("sm_80",), precision="fp32"), device="cpu") as session:
        got = session.run(list(expected), inputs)
    for out, ref in zip(got, expected.values(), strict=True):
        assert relative_error(out, ref) <= 1e-5


def test_a_network_with_fp16_weights_inputs_and_outputs():
    model = half(skeleton("resnet18"))
    inputs = {name: value.astype(np.float16) for name, value in feeds(skeleton("resnet18"), 3).items()}
    expected = reference(skeleton("resnet18"), {n: v.astype(np.float32) for n, v in inputs.items()})
    with Session(without_code(model, ("sm_80",)), device="cpu") as session:
        got = session.run(list(expected), inputs)
    for out, ref in zip(got, expected.values(), strict=True):
        assert out.dtype == np.float16
        assert relative_error(out, ref) <= 3e-3


LINEAR = ["resnet50", "googlenet", "mobilenet_v2", "efficientnet_b0", "unet_denoise"]


@pytest.mark.parametrize("name", usually(LINEAR, "mobilenet_v2"))
def test_linear_layers_run_on_tensor_cores_or_say_why_not_and_the_arena_is_small(name):
    program = to_program(skeleton(name), {}, Options(), Dump(None))
    for arch in ("sm_75", "sm_86", "sm_90a"):
        choices = schedule(program, GENERATIONS[arch])
        works = [choice.work for choice in choices]
        scratch = max(work.scratch for work in works)
        assert live_bytes(program) <= place(program, works).arena <= 1.1 * (live_bytes(program) + scratch), arch
        for op, choice in zip(program.ops, choices, strict=True):
            if not isinstance(op, Conv | Gemm) or choice.kernel.tensor_cores:
                continue
            why = (arch, op.nodes[0], choice.kernel.name, choice.reason)
            depthwise = isinstance(op, Conv) and op.groups == program.tensors[op.x].shape[1]
            if depthwise and max(program.tensors[op.w].shape[2:]) <= 3 and "with them" not in choice.reason:
                assert choice.reason.endswith("no Tensor Cores: its groups have 1 input channels, not a multiple of 8"), why
            else:  # where they would only be slower, both estimates are told
                (own,) = re.findall(r"^estimated ([\d.]+) µs", choice.reason)
                (cores,) = re.findall(r"no Tensor Cores: with them it is estimated to take ([\d.]+) µs$", choice.reason)
                assert float(own) <= float(cores), why


LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.mark.parametrize("arch", usually(["sm_80", "sm_90a"], "sm_90a"))
def test_a_shufflenet_runs_on_tensor_cores_without_moving_channels(arch):
    """Groups of 6 to 136 channels: only its depthwise convolutions are left to CUDA cores, and only the image is copied."""
    program = to_program(LIGHT / "light_shufflenet.onnx", {}, Options(precision="fp16"), Dump(None))
    choices = schedule(program, GENERATIONS[arch])
    convs = [(op, choice) for op, choice in zip(program.ops, choices, strict=True) if isinstance(op, Conv)]
    assert len(convs) == 49
    for op, choice in convs:
        assert choice.kernel.tensor_cores or op.groups == program.tensors[op.x].shape[1], choice.reason
    elsewhere = sum(program.flops(op) for op, choice in convs if not choice.kernel.tensor_cores)
    assert elsewhere <= 0.05 * total_flops(program)
    assert sum(isinstance(op, Pointwise) for op in program.ops) <= 1  # the image as the program holds it
