"""In what two plans of a model differ: sizes, steps, kernels, formats, weights. `tcinspect NEW.plan --diff OLD.plan`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tccompile.cli.report import Json, explain, inspect, size_text
from tccompile.plan.file import Plan, encoded_size
from tccompile.plan.format import Entry, Section
from tccompile.terminal import plain


@dataclass(frozen=True)
class Change:
    """What is something else in the new plan: where, what of it, and its old and new value; None where there was or is none."""

    where: str
    what: str
    old: Any
    new: Any

    def to_json(self) -> Json:
        return dict(vars(self))


Estimate = Callable[[Entry, Section], float | None]
"""The microseconds that an inference is expected to take; None where nobody knows."""


def changes(old: Plan, new: Plan, estimate: Estimate = lambda entry, section: None) -> list[Change]:
    """All that differs, sizes first. Entries are matched by the shapes of their inputs, steps by their nodes."""
    return [*_sizes(old, new), *_notes(old, new), *_entries(old, new, estimate), *_weights(old, new)]


def text_of(found: list[Change]) -> str:
    """A line for each change, those of one place together."""
    lines: list[str] = []
    for number, c in enumerate(found):
        if number == 0 or c.where != found[number - 1].where:
            lines.append(c.where)
        lines.append(f"  {c.what}: {_value(c.what, c.old)} → {_value(c.what, c.new)}")
    return "\n".join(map(plain, lines)) if lines else "the plans have the same steps, code sizes and weights"


def _value(what: str, value: Any) -> str:
    if value is None:
        return "none"
    if what.endswith("bytes") and isinstance(value, int):
        return size_text(value)
    if isinstance(value, list):
        return " + ".join(value)
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _differing(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for what in dict.fromkeys((*old, *new)):
        if old.get(what) != new.get(what):
            yield Change(where, what, old.get(what), new.get(what))


def _sizes(old: Plan, new: Plan) -> Iterator[Change]:
    def numbers(plan: Plan) -> Json:
        data = inspect(plan)
        made = {f"made by {name}": version for name, version in data["producer"].items()}
        return {
            "file, bytes": encoded_size(plan),
            "weights, bytes": data["weights"]["bytes"],
            "code, bytes": data["code"]["bytes"],
            "kernels": data["code"]["images"],
            **made,
        }

    return _differing("plan", numbers(old), numbers(new))


def _notes(old: Plan, new: Plan) -> Iterator[Change]:
    for note in old.notes:
        if note not in new.notes:
            yield Change("notes", "note", note, None)
    for note in new.notes:
        if note not in old.notes:
            yield Change("notes", "note", None, note)


def _entries(old: Plan, new: Plan, estimate: Estimate) -> Iterator[Change]:
    told = [_by_entry(plan, estimate) for plan in (old, new)]
    for key in dict.fromkeys((*told[0], *told[1])):
        sections = [t.get(key) for t in told]
        if None in sections:
            yield Change(key, "steps", *(None if s is None else len(s["steps"]) for s in sections))
            continue
        before, after = sections
        assert before is not None and after is not None
        yield from _differing(key, before["sizes"], after["sizes"])
        for one, other in _paired(before["steps"], after["steps"]):
            name = " + ".join((other or one)["nodes"])  # type: ignore[index]
            if one is None or other is None:
                yield Change(f"{key}, {name}", "step", one and one["kernel"], other and other["kernel"])
            else:
                yield from _differing(f"{key}, {name}", one, other)


def _paired(old: Sequence[Json], new: Sequence[Json]) -> Iterator[tuple[Json | None, Json | None]]:
    """The steps of both plans: those together that have most of their nodes in common, each once, in the new plan's order."""
    owners: dict[str, list[int]] = {}
    for i, step in enumerate(old):
        for node in step["nodes"]:
            owners.setdefault(node, []).append(i)
    pairs = []
    for j, step in enumerate(new):
        shared = Counter(i for node in step["nodes"] for i in owners.get(node, ()))
        for i, common in shared.items():
            alike = common / (len(step["nodes"]) + len(old[i]["nodes"]) - common)
            pairs.append((-alike, old[i]["kernel"] != step["kernel"], i, j))
    found: dict[int, int] = {}
    for _, _, i, j in sorted(pairs):
        if j not in found and i not in found.values():
            found[j] = i
    for j, step in enumerate(new):
        yield (old[found[j]] if j in found else None), step
    for i in sorted({*range(len(old))} - {*found.values()}):
        yield old[i], None


def _by_entry(plan: Plan, estimate: Estimate) -> dict[str, Json]:
    """For each entry and generation, its sizes and its steps."""
    out = {}
    for told in explain(plan):
        entry = plan.entries[told["entry"]]
        section = next(s for s in entry.sections if s.arch == told["arch"])
        steps = [_step(step) for step in told["steps"]]
        sizes = {
            "steps": len(section.steps),
            "launches": sum(s["launches"] for s in told["steps"]),
            "on Tensor Cores": sum(s["tensor_cores"] for s in told["steps"]),
            "arena, bytes": section.arena,
        }
        if (us := estimate(entry, section)) is not None:
            sizes["expected time, µs"] = round(us, 1)
        out[f"{told['arch']}, {_inputs(entry)}"] = {"sizes": sizes, "steps": steps}
    return out


def _inputs(entry: Entry) -> str:
    shapes = (f"{name} {'×'.join(map(str, entry.program.tensors[name].shape))}" for name in entry.program.inputs)
    return ", ".join(shapes) or "no inputs"


def _step(told: Json) -> Json:
    precision = {f"{choice['tensor']} is": f"{choice['dtype']}, {choice['reason']}" for choice in told["precision"]}
    return {
        "nodes": told["nodes"],
        "kernel": told["kernel"],
        "config": told["config"],
        "on": "Tensor Cores" if told["tensor_cores"] else "CUDA cores",
        "writes": told["output"]["dtype"],
        **precision,
    }


def _weights(old: Plan, new: Plan) -> Iterator[Change]:
    """Constants whose bytes are others; of those left out of a plan nothing is known."""
    for name in dict.fromkeys((*old.weights, *new.weights)):
        there = [_digest(plan, name) for plan in (old, new)]
        if there[0] != there[1]:
            yield Change(f"weights {name!r}", "values", *there)


def _digest(plan: Plan, name: str) -> str | None:
    if name not in plan.weights:
        return None
    shape = next((e.program.tensors[name] for e in plan.entries if name in e.program.tensors), None)
    what = "" if shape is None else f"{shape.dtype.value} {'×'.join(map(str, shape.shape)) or 'number'}, "
    return f"{what}SHA-256 {hashlib.sha256(plan.weight(name)).hexdigest()[:12]}"
