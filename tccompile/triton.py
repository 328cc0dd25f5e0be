"""Plans in NVIDIA's Triton Inference Server: the repository that it reads, and the model of its Python backend.

`tctriton model.plan -o repository` writes the repository. Where the server runs, its Python needs tccompile's base install.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tccompile.errors import TccompileError, UsageError
from tccompile.ir.types import DType
from tccompile.plan.file import Plan, read_plan
from tccompile.runtime.rows import Rows, row_sizes
from tccompile.runtime.session import Session

__all__ = ["Model", "write_repository"]

PLAN, CONFIGURATION = "model.plan", "config.pbtxt"
TYPES = {
    DType.F32: "FP32", DType.F16: "FP16", DType.F64: "FP64", DType.BOOL: "BOOL", DType.I8: "INT8", DType.I16: "INT16",
    DType.I32: "INT32", DType.I64: "INT64", DType.U8: "UINT8", DType.U16: "UINT16", DType.U32: "UINT32", DType.U64: "UINT64",
}  # fmt: skip
"""What the server calls the types that its Python backend has as NumPy's."""

BACKEND = (
    '"""Written by tctriton."""\n\nfrom tccompile.triton import Model as TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
)


# --- The repository --------------------------------------------------------------------------------------------------


def write_repository(
    plan: Path, repository: Path, name: str, *, cpu: bool = False, wait_us: int = 0, update: bool = False
) -> Path:
    """Write a model of the server's into a repository; its folder.

    cpu      an instance on the CPU engine; else one for each GPU
    wait_us  how long the server gathers requests for a batch while the instance has nothing to do, if examples are rows
    update   the model may be there: the plan becomes its next version, which the server takes in the place of the one before
    Raises UsageError for types that the server's Python backend does not have, and for a model that is there.
    """
    loaded = read_plan(plan)
    folder = repository / name
    if folder.exists() and not update:
        raise UsageError(f"{folder} is there already: give --update for another version of it, or --name for another model")
    text = configuration(loaded, name, cpu, wait_us)
    folder.mkdir(parents=True, exist_ok=True)
    version = 1 + max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0)
    with TemporaryDirectory(dir=repository, prefix=".") as made:  # a server that polls never sees half a version
        whole = Path(made) / "whole"
        whole.mkdir()
        (whole / "model.py").write_text(BACKEND, encoding="utf-8")
        shutil.copyfile(plan, whole / PLAN)
        (Path(made) / CONFIGURATION).write_text(text, encoding="utf-8")
        (Path(made) / CONFIGURATION).replace(folder / CONFIGURATION)
        whole.rename(folder / str(version))
    return folder


def configuration(plan: Plan, name: str, cpu: bool, wait_us: int) -> str:
    """The text of config.pbtxt."""
    program, batch = plan.entries[0].program, _largest(plan)
    parts = [f"name: {_quoted(name)}", 'backend: "python"', f"max_batch_size: {batch}"]
    for kind, names in (("input", program.inputs), ("output", program.outputs)):
        parts += [f"{kind} {{ {_value(plan, n, batch > 0)} }}" for n in names]
    parts.append(f"instance_group {{ kind: {'KIND_CPU' if cpu else 'KIND_GPU'} count: 1 }}")
    if batch > 1:
        parts.append(f"dynamic_batching {{ max_queue_delay_microseconds: {wait_us} }}")
    return "\n".join(parts) + "\n"


def _largest(plan: Plan) -> int:
    """How many rows the plan takes at once; 0 for a plan whose first axes are not those of rows."""
    try:
        return row_sizes(plan)[-1]
    except UsageError:
        return 0


def _value(plan: Plan, name: str, rows: bool) -> str:
    entries = (*plan.entries, *(family.highest for family in plan.families))
    tensors = [entry.program.tensors[name] for entry in entries]
    first = tensors[0]
    if first.dtype not in TYPES:
        raise UsageError(
            f"{name!r} is {first.dtype.value}, which the server's Python backend does not have: end the model in float32"
        )
    if len({t.rank for t in tensors}) > 1:
        raise UsageError(f"{name!r} has {', '.join(str(t.rank) for t in tensors)} axes, as the entry has it: make a plan of each")
    shapes = [t.shape[1:] if rows else t.shape for t in tensors]
    dims = [str(n[0]) if len(set(n)) == 1 else "-1" for n in zip(*shapes, strict=True)]
    scalar = "" if dims else " reshape { shape: [ ] }"
    return f"name: {_quoted(name)} data_type: TYPE_{TYPES[first.dtype]} dims: [ {', '.join(dims) or '1'} ]{scalar}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- The model of the server's Python backend ------------------------------------------------------------------------


class Model:
    """What the server calls TritonPythonModel: a session for an instance, on the instance's GPU."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the plan beside the model's file."""
        import triton_python_backend_utils as utils  # only the server has it

        self.utils = utils
        gpu = args["model_instance_kind"] == "GPU"
        path = Path(args["model_repository"]) / args["model_version"] / PLAN
        self.session = Session(path, f"gpu:{args['model_instance_device_id']}" if gpu else "cpu")
        self.rows = Rows(self.session) if _largest(self.session.plan) else None
        if self.rows is not None:
            self.rows.warm()
        program = self.session.plan.entries[0].program
        self.inputs, self.outputs = program.inputs, program.outputs

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """An answer to each request: rows of all of them run together. What does not fit gets an error of its own."""
        feeds = [{n: self.utils.get_input_tensor_by_name(r, n).as_numpy() for n in self.inputs} for r in requests]
        if self.rows is not None and len(requests) > 1:
            try:
                return [self._response(y) for y in self._together(self.rows, feeds)]
            except TccompileError:
                pass  # then each by itself, so that one bad request fails alone
        return [self._one(f) for f in feeds]

    def finalize(self) -> None:
        """Frees the instance's memory."""
        self.session.close()

    def _together(self, rows: Rows, feeds: Sequence[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
        made = rows.run({n: np.concatenate([f[n] for f in feeds]) for n in self.inputs})
        ends = np.cumsum([len(f[self.inputs[0]]) for f in feeds])[:-1]
        return [list(parts) for parts in zip(*(np.split(made[n], ends) for n in self.outputs), strict=True)]

    def _one(self, feeds: dict[str, np.ndarray]) -> Any:
        try:
            if self.rows is not None:
                made = self.rows.run(feeds)
                return self._response([made[n] for n in self.outputs])
            return self._response([np.asarray(y) for y in self.session.run(None, feeds)])
        except TccompileError as error:
            return self.utils.InferenceResponse(error=self.utils.TritonError(str(error)))

    def _response(self, values: Sequence[np.ndarray]) -> Any:
        tensors = [self.utils.Tensor(n, np.ascontiguousarray(y)) for n, y in zip(self.outputs, values, strict=True)]
        return self.utils.InferenceResponse(output_tensors=tensors)
