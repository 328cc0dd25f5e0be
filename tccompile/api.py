"""What `tccompile --check`, `tccompile --verify` and `tcinspect` do, as functions of Python.

What needs the compiler is imported when it is called: `inspect` does without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tccompile.plan.file import Plan, read_plan
from tccompile.python import speaking_python

if TYPE_CHECKING:
    from tccompile.check import Report
    from tccompile.load.model import Given
    from tccompile.options import Shapes
    from tccompile.verify.oracle import Verification


@speaking_python
def check(
    model: Given,
    shapes: Shapes | None = None,
    *,
    entries: Sequence[Shapes] | None = None,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    nchwc_block: int | None = None,
    limits: Mapping[str, int] | None = None,
) -> Report:
    """What of a model is not supported, and where the model can be cut so that the rest is. Writes nothing, needs no GPU.

    The arguments are those of `compile`. The report has `missing`, empty for a model that can be compiled, `cut`, `text` and
    `to_json()`. Raises UsageError for shapes that do not fit, and ModelError for a file that is no model.
    """
    _need_compiler("checking a model")
    from tccompile.check import check as check_entries
    from tccompile.load.cut import part
    from tccompile.load.model import in_memory

    sets = tuple(entries) if entries is not None else (shapes or {},)
    return check_entries(part(in_memory(model), inputs, outputs), sets, nchwc_block, limits)


@speaking_python
def verify(
    plan: Plan | str | os.PathLike[str],
    model: Given,
    data: str | os.PathLike[str] | None = None,
    *,
    tolerance: float = 1e-2,
    layers: bool = False,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    input_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Verification:
    """Run a plan beside ONNX Runtime in fp32, on the CPU and on the first GPU if there is one.

    model      what the plan was compiled from, with the same `inputs` and `outputs`
    data       a .npz file of inputs to look at beside random ones; `input_ranges`: between what numbers these lie, by input
    tolerance  what ‖out - ref‖ / ‖ref‖ may be, for each output
    layers     compare every tensor that the model has too

    The result has `passed`, `results`, one for each output, and `plan`, which has a certificate for `tcrun --selftest`. Raises
    UsageError without ONNX Runtime, and InputError for data that fit no entry.
    """
    _need_compiler("verifying a plan")
    from tccompile.load.cut import part
    from tccompile.load.model import in_memory
    from tccompile.verify import oracle

    whole = part(in_memory(model), inputs, outputs)
    given = None if data is None else Path(data)
    return oracle.verify(whole, _plan(plan), tolerance, given, layers, input_ranges)


def inspect(plan: Plan | str | os.PathLike[str], *, steps: bool = False) -> dict[str, Any]:
    """What is in a plan, as data: inputs and outputs, GPU generations, sizes in bytes; as `tcinspect --json` prints it.

    steps  under "explain", each step of each generation: the nodes, the kernel, Tensor Cores or why not, as --explain prints them
    """
    from tccompile.cli import report

    loaded = _plan(plan)
    return report.inspect(loaded) | ({"explain": report.explain(loaded)} if steps else {})


def _plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    return plan if isinstance(plan, Plan) else read_plan(plan)


def _need_compiler(purpose: str) -> None:
    try:
        import tccompile.pipeline  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"{purpose} needs {error.name}, which is not installed: pip install 'tccompile[compiler]'"
        raise ModuleNotFoundError(message, name=error.name) from error
