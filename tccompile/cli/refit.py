"""`tcrefit`: the weights of a file in the place of a plan's, with the names and the adapters that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tccompile.errors import UsageError
from tccompile.plan.file import Plan
from tccompile.refit.constants import sources
from tccompile.refit.lora import merged, places, read_adapters
from tccompile.refit.names import Called, by_content, named, read_map
from tccompile.refit.plan import refitted
from tccompile.refit.safetensors import SafeTensors

if TYPE_CHECKING:
    from tccompile.load.model import Model


@dataclass(frozen=True)
class Asked:
    """What the user gives: files, and how much adapters count."""

    new: Path
    was: Path | None = None
    names: Path | None = None
    lora: Path | None = None
    scale: float = 1.0


def refitted_as(plan: Plan, asked: Asked) -> tuple[Plan, Model | None]:
    """The plan with the weights of a file, and the model that computes what it does; None if the file holds weights alone.

    Raises UsageError for a model of another graph, and what `refitted` raises.
    """
    model = None if asked.new.suffix == ".safetensors" else _model_of(plan, asked.new)
    arrays = _arrays(asked.new) if model is None else _checked(plan, model)
    called = read_map(asked.names) if asked.names is not None else {}
    of_new = called
    if asked.lora is not None:  # then a name that NEW does not have is a module of the adapters'
        of_new = {weight: there for weight, there in called.items() if there.name in arrays}
    if asked.was is not None:
        of_new = by_content(plan, _arrays(asked.was)) | of_new
    weights = named(plan, arrays, of_new, whole=model is not None)
    if asked.lora is not None:
        known = places((entry.program for entry in plan.entries), plan.origin.exported)
        changed = merged(weights, known, read_adapters(asked.lora), asked.scale, called)
        weights |= changed
        model = None if model is None else _tuned(model, changed, of_new)
    return refitted(plan, weights), model


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    """The arrays of a file by name."""
    if path.suffix == ".safetensors":
        return SafeTensors(path)
    from tccompile.load import model

    return model.sources(path)


def _model_of(plan: Plan, path: Path) -> Model:
    """The model, or the part of it that the plan computes, if the plan was made of a part."""
    from tccompile.load.cut import part
    from tccompile.load.model import input_names, output_names

    program = plan.entries[0].program
    inputs = () if set(program.inputs) <= set(input_names(path)) else program.inputs
    outputs = () if set(program.results) == set(output_names(path)) else program.results
    return part(path, inputs, outputs)


def _checked(plan: Plan, model: Model) -> Mapping[str, np.ndarray]:
    """The weights of a model, whose graph must be that of the plan's."""
    from tccompile.load.identity import first_other
    from tccompile.load.model import read

    opened = read(model)
    for name, source in sources(plan).items():
        if name in opened.weights and opened.weights[name].shape != source.shape:
            shapes = [str(shape) for shape in (source.shape, opened.weights[name].shape)]
            raise UsageError(f"the weight {name!r} has the shape {shapes[0]} in the plan, and {shapes[1]} in the model")
    if (other := first_other(opened, plan.origin.nodes)) is not None:
        raise UsageError(f"the model is another one than the plan was made from: the plan has not {other}; compile the model")
    return opened.weights


def _tuned(model: Model, changed: Mapping[str, np.ndarray], called: Mapping[str, Called]) -> Model:
    """The model with weights changed that it calls by other names, and has transposed, as `called` says."""
    from tccompile.load.model import Tuned

    there = {name: called.get(name, Called(name)) for name in changed}
    values = {own.name: changed[n].swapaxes(-1, -2) if own.transposed else changed[n] for n, own in there.items()}
    assert not isinstance(model, Tuned)
    return Tuned(model, values)
