"""Export the registry's models with random weights: `python -m tests.zoo.export FOLDER`.

Needs the libraries (PyTorch, torchvision, timm, transformers, diffusers, keras, scikit-learn, …) and not tccompile: its own
environment. Each model is built in a process of its own; NAME.onnx, its inputs NAME.npz, and NAME.json about it go into FOLDER.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch.onnx import symbolic_helper

from tests.zoo.entry import Entry, Torch, Wrapped, numpy, tensors
from tests.zoo.registry import entries

SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="a pattern of names, or several with commas")
    parser.add_argument("--again", action="store_true", help="those that are there too")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    for entry in entries():
        if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in args.only.split(",")):
            continue
        about = args.folder / f"{entry.name}.json"
        if about.exists() and not args.again:
            continue
        begin = time.monotonic()
        process = context.Process(target=_export, args=(entry, args.folder))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if not about.exists() or process.exitcode:
            failed = args.folder / f"{entry.name}.failed"
            why = failed.read_text().strip().splitlines()[-1] if failed.exists() else f"exit code {process.exitcode}"
            print(f"FAILED {entry.name}: {why[:300]}", flush=True)
        else:
            size = (args.folder / f"{entry.name}.onnx").stat().st_size >> 10
            print(f"{entry.name}: {time.monotonic() - begin:.0f} s, {size} KiB", flush=True)


def _export(entry: Entry, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    np.random.seed(0)
    stem = folder / entry.name
    about: dict[str, Any] = {"name": entry.name, "library": entry.library, "kind": entry.kind}
    try:
        with torch.no_grad():
            made = entry.build(folder)
            if isinstance(made, Torch):
                about["peer"] = export(made, stem.with_name(stem.name + ".onnx"))
                inputs = numpy(made.inputs)
            else:
                model, inputs = made
                onnx.save(model, f"{stem}.onnx")
        np.savez(f"{stem}.npz", **_those_of(f"{stem}.onnx", inputs))
        Path(f"{stem}.json").write_text(json.dumps(about))
        Path(f"{stem}.failed").unlink(missing_ok=True)
    except BaseException:
        Path(f"{stem}.failed").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _those_of(path: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs that the model still has: exporters leave out what nothing reads."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {t.name for t in graph.initializer}
    return {v.name: inputs[v.name] for v in graph.input if v.name not in weights}


def _difference(g: Any, x: Any, n: Any, axis: Any, *_: Any) -> Any:
    """Of neighbours, which the tracing exporter does not know."""
    axis = [symbolic_helper._get_const(axis, "i", "axis")]
    end = g.op("Constant", value_t=torch.tensor([2**31]))
    at = {i: g.op("Constant", value_t=torch.tensor([i])) for i in (0, 1, -1)}
    along = g.op("Constant", value_t=torch.tensor(axis))
    return g.op("Sub", g.op("Slice", x, at[1], end, along), g.op("Slice", x, at[0], at[-1], along))


torch.onnx.register_custom_op_symbolic("aten::diff", _difference, 9)


def export(spec: Torch, path: Path) -> float | None:
    """Write the ONNX file; gives the error of PyTorch in fp16 at its worst output, or None where it does not run so.

    What is written computes what the module does, and no output that tells nothing: all zeros, or not finite.
    """
    module, args = Wrapped(spec).eval(), tuple(spec.inputs.values())
    expected = [t.clone() for t in tensors(module(*args))]
    for t in expected:
        if t.is_floating_point() and not (bool(t.isfinite().all()) and float(t.abs().max())):
            raise ValueError("an output is zero everywhere, or not finite")
    ways = (_traced, _captured) if spec.trace else (_captured,)
    for way in ways:
        try:
            way(module, args, list(spec.inputs), spec.opset, path)
            _check(path, spec, expected)
            break
        except Exception:
            if way is ways[-1]:
                raise
    return peer(module, args)


def _traced(module: torch.nn.Module, args: tuple, names: list[str], opset: int, path: Path) -> None:
    torch.onnx.export(module, args, str(path), input_names=names, opset_version=opset, dynamo=False)


def _captured(module: torch.nn.Module, args: tuple, names: list[str], opset: int, path: Path) -> None:
    torch.onnx.export(module, args, input_names=names, opset_version=opset, dynamo=True, verbose=False).save(str(path))


def _check(path: Path, spec: Torch, expected: list[torch.Tensor]) -> None:
    """Raises ValueError if ONNX Runtime computes something else from the file than PyTorch from the module."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {v.name: spec.inputs[v.name].numpy() for v in session.get_inputs()}
    for got, want in zip(session.run(None, inputs), expected, strict=True):
        if want.is_floating_point():
            error = float((torch.from_numpy(got).double() - want.double()).norm() / want.double().norm())
            if not error < 1e-2:
                raise ValueError(f"ONNX Runtime is off by {error:.1e}")


def peer(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> float | None:
    """‖half - single‖ / ‖single‖ of PyTorch itself on the CPU, at the worst output."""
    try:
        single = tensors(module(*args))
        halved = _halved(module)
        half = tensors(halved(*(a.half() if a.is_floating_point() else a for a in args)))
    except Exception:
        return None
    errors = []
    for a, b in zip(half, single, strict=True):
        if b.is_floating_point() and b.numel():
            a, b = a.double(), b.double()
            errors.append(float((a - b).norm() / b.norm().clamp_min(1e-30)))
    return max(errors) if errors and all(np.isfinite(errors)) else None


def _halved(module: torch.nn.Module) -> torch.nn.Module:
    """As its users have it: in fp16, but for the frequencies of rotary embeddings, which stay in fp32."""
    kept = [(m, n, b.clone()) for m in module.modules() for n, b in m.named_buffers(recurse=False) if "inv_freq" in n]
    halved = module.half()
    for owner, name, buffer in kept:
        setattr(owner, name, buffer)
    return halved


if __name__ == "__main__":
    main()
