"""What users of other tools type, and how it is said here: for the errors that they get."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tccompile.options import PRECISIONS, QUANTIZATIONS

SAID = {
    "--fp16": "--precision fp16; the default, mixed, is fp16 but where that would lose something",
    "--bf16": "--precision bf16",
    "--half": "--precision fp16",
    "--int8": "--quantize int8 --calibrate DATA.npz",
    "--fp8": "--quantize fp8 --calibrate DATA.npz",
    "--best": "--quantize int8 --calibrate DATA.npz",
    "--calib": "--calibrate DATA.npz",
    "--onnx": "the model as argument: tccompile MODEL.onnx",
    "--model": "the model as argument: tccompile MODEL.onnx",
    "--saveEngine": "-o MODEL.plan",
    "--save-engine": "-o MODEL.plan",
    "--output-file": "-o MODEL.plan",
    "--engine": "the plan as argument: tcrun MODEL.plan",
    "--loadEngine": "the plan as argument: tcrun MODEL.plan",
    "--shapes": "--shape NAME=1x3x224x224",
    "--input-shapes": "--shape NAME=1x3x224x224",
    "--minShapes": "--entry NAME=1x3x224x224, once for each set of shapes",
    "--optShapes": "--entry NAME=1x3x224x224, once for each set of shapes",
    "--maxShapes": "--entry NAME=1x3x224x224, once for each set of shapes",
    "--timingCacheFile": "--timing-cache FILE",
    "--onnxrt": "--verify",
    "--onnx-outputs": "--output TENSOR",
    "--gpu": "--arch sm_86 for what a plan is built for, and tcrun --device gpu:N for where it runs",
    "--device": "--arch sm_86 for what a plan is built for, and tcrun --device gpu:N for where it runs",
    "--target": "--arch sm_86",
    "--benchmark": "tcrun MODEL.plan --bench",
    "--bench": "tcrun MODEL.plan --bench",
    "--iterations": "tcrun MODEL.plan --bench --iterations N",
    "--avgRuns": "tcrun MODEL.plan --bench --iterations N",
    "--warmUp": "tcrun MODEL.plan --bench, which runs ten inferences before",
    "--duration": "tcrun MODEL.plan --bench --iterations N",
    "--dumpProfile": "tcrun MODEL.plan --profile",
    "--exportProfile": "tcrun MODEL.plan --profile FILE.html, or with --json",
    "--useCudaGraph": "nothing: a plan always runs as a CUDA graph",
    "--noDataTransfers": "tcrun MODEL.plan --bench, which measures on the GPU",
    "--loadInputs": "the inputs as argument: tcrun MODEL.plan INPUT.npz",
    "--load-inputs": "the inputs as argument: tcrun MODEL.plan INPUT.npz",
    "--inputs": "the inputs as argument: tcrun MODEL.plan INPUT.npz",
    "--exportOutput": "tcrun MODEL.plan INPUT.npz -o OUT.npz",
    "--save-outputs": "tcrun MODEL.plan INPUT.npz -o OUT.npz",
    "--validate": "tccompile --verify, and tcrun --selftest",
    "--memPoolSize": "--max-vram SIZE, which fails where a plan takes more",
    "--workspace": "--max-vram SIZE, which fails where a plan takes more",
    "--threads": "--jobs N",
    "--refit": "tcrefit MODEL.plan NEW.onnx -o NEW.plan",
    "--providers": "tcrun --device gpu or cpu",
    "--size": "tccompile cache --size",
    "--clear": "tccompile cache --clear",
}
"""Options of trtexec, polygraphy and of tools like them."""

VALUES = {
    **{("--precision", f): f"--quantize {f} --calibrate DATA.npz, which shows how large tensors get" for f in QUANTIZATIONS},
    **{("--quantize", f): f"--precision {f}" for f in PRECISIONS},
}
"""What an option does not take, and another does."""

COMMANDS = {
    "run": "tcrun MODEL.plan INPUT.npz",
    "inspect": "tcinspect MODEL.plan",
    "refit": "tcrefit MODEL.plan NEW.onnx",
    "compile": "tccompile MODEL.onnx",
    "build": "tccompile MODEL.onnx",
    "convert": "tccompile MODEL.onnx",
    "check": "tccompile MODEL.onnx --check",
    "verify": "tccompile MODEL.onnx --verify",
    "bench": "tcrun MODEL.plan --bench",
    "profile": "tcrun MODEL.plan --profile",
    "cache": "tccompile cache --size, or --clear, with cache as the first word",
}
"""Subcommands of tools that have such."""


def message_of(error: click.ClickException) -> str:
    """What an error says, with what somebody is likely to have meant."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and (said := SAID.get(error.option_name)):
        return f"No such option '{error.option_name}'; here it is {said}"
    if isinstance(error, click.BadParameter) and error.param and (said := _elsewhere(error.param.opts, error.message)):
        return f"{message} Here it is {said}"
    if isinstance(error, click.BadParameter) and message.endswith("does not exist."):
        word = message.removesuffix(" does not exist.").rpartition("File ")[2].strip("'")
        if word in COMMANDS:
            return f"{message} If no file is meant: {COMMANDS[word]}"
    return message


def _elsewhere(options: Sequence[str], message: str) -> str | None:
    """What takes the value that an option was refused, which the message begins with."""
    value = message.split("'")[1] if "'" in message else ""
    return next((VALUES[o, value] for o in options if (o, value) in VALUES), None)
