"""Compile a folder of exported models for the CPU engine and compare with ONNX Runtime: `python -m tests.zoo FOLDER`.

FOLDER holds NAME.onnx, its inputs NAME.npz and NAME.json about it, as `tests.zoo.export` writes them. Each model has a process
of its own, with a limit on its time and its memory. Results go into a file, a line each: what is there is not run again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tccompile.errors import TccompileError
from tccompile.pipeline import without_code
from tccompile.runtime.session import Session

BOUND = 3e-3
"""What `mixed` is held to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, help="of JSON lines; FOLDER/results.jsonl if left away")
    parser.add_argument("--only", default="*", help="a pattern of names, or several with commas")
    parser.add_argument("--again", action="store_true", help="those that have a result too")
    parser.add_argument("--seconds", type=int, default=180, help="for one model")
    parser.add_argument("--memory", type=int, default=6, help="GiB for one model")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of docs/testing/models-tried.md")
    args = parser.parse_args()
    path = args.results or args.folder / "results.jsonl"
    known = {r["name"]: r for r in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    if args.table:
        print(table(list(known.values())))
        return
    context = multiprocessing.get_context("fork")
    for about in sorted(
        args.folder.glob("*.json"), key=lambda path: path.with_suffix(".onnx").stat().st_size
    ):  # small ones first
        model = json.loads(about.read_text())
        name = model["name"]
        if not any(fnmatch.fnmatch(name, pattern) for pattern in args.only.split(",")) or (name in known and not args.again):
            continue
        result = model | _limited(context, about.with_name(f"{name}.onnx"), args.seconds, args.memory)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(text(result), flush=True)


def text(r: dict[str, Any]) -> str:
    if "refusal" in r:
        return f"{r['name']:45} {r['refusal']}"
    marks = (
        ""
        if passes(r)
        else "   <-- " + "; ".join(f"{n} {e:.1e}" if e is not None else f"{n} NaN" for n, e in r["errors"].items())
    )
    peer, fp32 = ("      -" if r.get(k) is None else f"{r[k]:.1e}" for k in ("peer", "fp32"))
    worst = "    NaN" if r["error"] is None else f"{r['error']:.1e}"
    return f"{r['name']:45} error {worst}  fp32 {fp32}  PyTorch's fp16 {peer}  {r['seconds']:5.1f} s  {r['mib']} MiB{marks}"


def passes(r: dict[str, Any]) -> bool:
    error = r.get("error")
    return error is not None and (error <= BOUND or (error <= 2e-2 and error <= (r.get("peer") or 0)))


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a line for each library and kind of model, then one for each model that does not pass."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in sorted(results, key=lambda r: r["name"]):
        kinds.setdefault((r["library"], r["kind"]), []).append(r)
    lines = ["| models | kind | errors | worst | build, s |", "| --- | --- | --- | --- | --- |"]
    for (library, kind), found in sorted(kinds.items()):
        names = ", ".join(r["name"].partition(".")[2] if r["name"].startswith(library) else r["name"] for r in found)
        errors = sorted(r["error"] for r in found if r.get("error") is not None)
        seconds = sorted(r["seconds"] for r in found if "seconds" in r)
        lines.append(
            f"| {library}, {len(found)}: {names} | {kind} | {errors[len(errors) // 2]:.1e} | {errors[-1]:.1e} "
            f"| {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} |"
        )
    lines += ["", "| model | error | PyTorch in fp16 | in fp32 |", "| --- | --- | --- | --- |"]
    for r in sorted((r for r in results if not passes(r)), key=lambda r: r["name"]):
        peer, fp32 = ("" if r.get(what) is None else f"{r[what]:.1e}" for what in ("peer", "fp32"))
        error = r["refusal"] if "refusal" in r else "NaN" if r["error"] is None else f"{r['error']:.1e}"
        lines.append(f"| {r['name']} | {error} | {peer} | {fp32} |")
    return "\n".join(lines)


def _limited(context: Any, path: Path, seconds: int, gib: int) -> dict[str, Any]:
    """The result of a process that is ended when its time is over, and that the kernel ends beyond its memory."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(path, theirs, gib))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else {"refusal": f"TOO LONG: more than {seconds} s"}
    except EOFError:
        process.join(10)
        return {"refusal": f"CRASH: exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _child(path: Path, pipe: Any, gib: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (gib << 30, gib << 30))
    warnings.simplefilter("ignore")
    try:
        pipe.send(measured(path))
    except MemoryError:
        pipe.send({"refusal": f"TOO LARGE: more than {gib} GiB"})
    except TccompileError as error:
        pipe.send({"refusal": f"{type(error).__name__}: {error}"})
    except BaseException as error:
        import traceback

        pipe.send({"refusal": f"CRASH: {type(error).__name__}: {error}", "traceback": traceback.format_exc()})
    pipe.close()
    os._exit(0)


def measured(path: Path) -> dict[str, Any]:
    """The errors by output of the model in `mixed`, and, where one is over the bound, the worst in fp32; the build's time."""
    with np.load(path.with_suffix(".npz")) as data:
        inputs = dict(data)
    expected = reference(path, inputs)
    begin = time.monotonic()
    errors = _errors(path, inputs, expected, "mixed")
    seconds = errors.pop("")
    worst = max(errors.values(), default=0.0) if all(np.isfinite(list(errors.values()))) else None
    fp32 = float("nan")
    if worst is None or worst > BOUND:
        single = _errors(path, inputs, expected, "fp32")
        single.pop("")
        fp32 = max(single.values(), default=0.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {
        "error": worst, "errors": {n: e if np.isfinite(e) else None for n, e in errors.items()}, "seconds": round(seconds, 2),
        "fp32": fp32 if np.isfinite(fp32) else None, "total": round(time.monotonic() - begin, 1), "mib": peak, "ops": _ops(path),
    }  # fmt: skip


def _ops(path: Path) -> int:
    return len(onnx.load(path, load_external_data=False).graph.node)


def _errors(path: Path, inputs: dict[str, np.ndarray], expected: dict[str, np.ndarray], precision: str) -> dict[str, float]:
    """Each output's; under the empty name the seconds that the plan took."""
    model = onnx.load(path)
    shapes = {n: v.shape for n, v in inputs.items() if n in _open(model)}
    begin = time.monotonic()
    plan = without_code(model, shapes, precision)
    seconds = time.monotonic() - begin
    with Session(plan, "cpu") as session:
        outputs = dict(zip(expected, session.run(list(expected), inputs), strict=True))
    return {"": seconds} | {name: relative(outputs[name], ref) for name, ref in expected.items()}


def _open(model: onnx.ModelProto) -> set[str]:
    """The inputs whose shapes the model leaves open."""
    return {v.name for v in model.graph.input if any(not d.HasField("dim_value") for d in v.type.tensor_type.shape.dim)}


def reference(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By ONNX Runtime without its optimizations, in fp32: a model in fp16 is what it is with its weights made wider."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(_array, session.run(names, inputs)), strict=True))


def _array(found: Any) -> np.ndarray:
    """An output; of a ZipMap, a list with a dictionary for each row, the values that it maps to."""
    return np.array([[*row.values()] for row in found]) if isinstance(found, list) else found


def relative(out: np.ndarray, ref: np.ndarray) -> float:
    """‖out - ref‖ / ‖ref‖; NaN and another shape are no number. What both have infinite or NaN is left out if it is the same."""
    if out.shape != ref.shape:
        return float("nan")
    a, b = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = np.where(same, 0, a - np.where(same, a, b))
    norm = np.linalg.norm(b[np.isfinite(b)])
    return float(np.linalg.norm(difference) / norm) if norm else float(np.linalg.norm(difference))


if __name__ == "__main__":
    sys.exit(main())
