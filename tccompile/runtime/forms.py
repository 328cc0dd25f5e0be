"""Sequences and optional values of a model's user, as the tensors of a plan: see `load/boundary.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

from tccompile.errors import InputError
from tccompile.ir.metadata import Form, Kind, copy_of, part


def parts(form: Form, there: Collection[str]) -> list[str]:
    """The plan's tensors that a value is made of."""
    if form.kind in (Kind.TENSOR, Kind.OPTIONAL, Kind.GIVEN):
        name = copy_of(form.name) if form.kind is Kind.GIVEN else form.name
        return [name] if name in there else []
    return list(takewhile(there.__contains__, (part(form.name, i) for i in count())))


def flattened(forms: Sequence[Form], there: Collection[str], feed: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a model's inputs by the names of the plan's tensors: lists for sequences, None for what is not there."""
    out = dict(feed)
    for form in forms:
        if form.kind is Kind.TENSOR or form.name not in feed:
            continue
        names, given = parts(form, there), out.pop(form.name)
        several = form.kind is not Kind.OPTIONAL
        if several and not isinstance(given, list | tuple) and not (given is None and form.kind is Kind.OPTIONAL_SEQUENCE):
            raise InputError(f"input {form.name!r} is a sequence: give a list of arrays, not a {type(given).__name__}")
        arrays = [] if given is None else list(given) if several else [given]
        if len(arrays) != len(names):
            raise InputError(
                f"input {form.name!r} has {len(arrays)} arrays, and the plan is for {len(names)}: compile it with the shapes of "
                f"those that there are, as --shape '{part(form.name, 0) if several else form.name}=2x3'"
            )
        out |= dict(zip(names, arrays, strict=True))
    return out


def written(forms: Sequence[Form], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays to write a model's outputs into, by the names of the plan's tensors."""
    called = {form.name: copy_of(form.name) for form in forms if form.kind is Kind.GIVEN}
    return {called.get(name, name): array for name, array in arrays.items()}


def grouped(forms: Sequence[Form], names: Sequence[str], made: Mapping[str, Any]) -> list[Any]:
    """The values of a model's outputs of these names: lists for sequences, None for what is not there."""
    by_name = {form.name: form for form in forms}
    out = []
    for name in names:
        form = by_name.get(name, Form(name, Kind.TENSOR))
        arrays = [made[one] for one in parts(form, made)]
        nothing = form.kind is Kind.OPTIONAL_SEQUENCE and not arrays
        several = form.kind in (Kind.SEQUENCE, Kind.OPTIONAL_SEQUENCE)
        out.append(None if nothing else arrays if several else next(iter(arrays), None))
    return out
