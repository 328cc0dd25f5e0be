"""Plans for tests of everything but machine code: scheduled, placed and packed, with empty kernels. The CPU engine runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import onnx

from tccompile.dump import Dump
from tccompile.emit.pack import pack
from tccompile.load.constants import decisive
from tccompile.load.model import read
from tccompile.options import Options, Shapes
from tccompile.pipeline import Told, jobs_of, origin_of, to_builds, to_program
from tccompile.plan.file import Plan
from tests.small import image


def without_code(
    model: onnx.ModelProto,
    archs: tuple[str, ...],
    shapes: Shapes | None = None,
    precision: str = "fp16",
    input_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    max_error: float | None = None,
) -> Plan:
    """The model's plan for these generations, each kernel's machine code left empty."""
    options = Options((dict(shapes or {}),), archs, precision, input_ranges=input_ranges, max_error=max_error)
    opened, told = read(model), Told()
    with decisive() as told.decided:
        program = to_program(opened, options.entries[0], options, Dump(None), told=told)
    builds = to_builds(program, options, Dump(None))
    jobs = dict.fromkeys(job for build in builds for job in jobs_of(build))
    images = {job: image(job[1].name, job[2], f"kernel_{n}") for n, job in enumerate(jobs)}
    origin = origin_of(opened, told)
    return pack("test", {}, [(program, builds)], images, opened.weights, False, origin=origin, rooms=told.rooms)
