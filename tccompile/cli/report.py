"""What is in a plan, as data that prints as text or as JSON: `tccompile --explain` and `tcinspect`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tccompile.ir.loops import times
from tccompile.ir.memory import lifetimes
from tccompile.ir.ops import Conv, Gemm, Op
from tccompile.ir.program import Program
from tccompile.ir.tensor import Storage
from tccompile.ir.types import DType
from tccompile.ir.weights import sources_of
from tccompile.plan.file import Plan
from tccompile.plan.format import Certificate, Entry, Family, Step
from tccompile.plan.formulas import Slot
from tccompile.refit.constants import sources
from tccompile.sizes import Size
from tccompile.terminal import plain

Json = dict[str, Any]


def inspect(plan: Plan) -> Json:
    """Inputs and outputs, entries, generations, steps and sizes (bytes)."""
    return {
        "name": plan.name,
        "producer": dict(plan.producer),
        "notes": list(plan.notes),
        "rewrites": [{"equation": r.equation, "nodes": list(r.nodes)} for r in plan.rewrites],
        "certificates": [_certificate(c) for c in plan.certificates],
        **({"ranges": _ranges(plan)} if plan.families else {}),
        "entries": [_entry(plan, entry, sizes) for entry, sizes in zip(plan.entries, _sizes(plan), strict=True)],
        "weights": {
            "constants": len({n for e in plan.entries for n in e.program.constants}),
            "bytes": sum(map(plan.size, plan.weights)),
            "left_out": len({n for e in plan.entries for n in e.program.constants} - set(plan.weights)),
        },
        "code": {"images": len(plan.images), "bytes": sum(len(i.code) for i in plan.images)},
    }


def _certificate(certificate: Certificate) -> Json:
    held = certificate.held > 0
    outputs = [
        {"name": e.name, "error": e.error, "bound": e.bound} | ({"held": e.held} if held else {}) for e in certificate.outputs
    ]
    made = {"entry": certificate.entry, "oracle": certificate.oracle, "device": certificate.device, "outputs": outputs}
    return made | ({"held": certificate.held} if held else {})


def _sizes(plan: Plan) -> list[Json]:
    """For each entry the sizes that its family is for; none for those of fixed shapes."""
    fixed = len(plan.entries) - len(plan.families)
    families: list[Json] = []
    for family in plan.families:
        sizes = {size.name: [size.low, size.all[-1], size.step] for size in family.sizes}
        families.append(sizes | ({"product": [*family.product]} if family.product else {}))
    return [{} for _ in range(fixed)] + families


def _ranges(plan: Plan) -> Json:
    """What holds for all parts of a range together."""
    parts = [[e] for e in plan.entries[: -len(plan.families)]] + [[f.lowest, f.highest] for f in plan.families]
    ends: dict[str, list[int]] = {}
    for family in plan.families:
        for size in family.sizes:
            name, axis = _place(family, size)
            extents = [entry.program.tensors[name].shape[axis] for part in parts for entry in part]
            ends[size.name] = [min(extents), max(extents), size.step]
    images = [{code.image for s in part[0].sections for step in s.steps for code in step.launches} for part in parts]
    p = plan.entries[0].program
    return {
        "sizes": ends,
        "parts": len(parts),
        "inputs": [_open(parts, name) for name in p.inputs],
        "outputs": [_open(parts, name) for name in p.results],
        "images": len(set().union(*images)),
        "images_in_all_parts": len(set.intersection(*images)),
    }


def _place(family: Family, size: Size) -> tuple[str, int]:
    """An input that has the size as an extent, and the axis."""
    program, number = family.entry.program, family.sizes.index(size)
    return next(
        (name, axis)
        for name in program.inputs
        for axis, n in enumerate(program.tensors[name].shape)
        if isinstance(n, Slot) and family.formulas[n.number][:2] == ("size", number)
    )


def _open(parts: Sequence[Sequence[Entry]], name: str) -> Json:
    """An input or output with the least and the greatest extent of each axis, where these differ."""
    shapes = [entry.program.tensors[name].shape for part in parts for entry in part]
    axes = [(min(axis), max(axis)) for axis in zip(*shapes, strict=True)]
    shape = [low if low == high else f"{low}..{high}" for low, high in axes]
    return {"name": name, "shape": shape, "dtype": parts[0][0].program.tensors[name].dtype.value}


def _entry(plan: Plan, entry: Entry, sizes: Json) -> Json:
    p = entry.program
    return ({"sizes": sizes} if sizes else {}) | {
        "inputs": [_value(p, n) for n in p.inputs],
        "outputs": [_value(p, n) for n in p.results],
        "ops": len(p.ops),
        "sections": [
            {
                "arch": s.arch,
                "code": plan.kind(s),
                "steps": len(s.steps),
                "launches": sum(len(step.launches) for step in s.steps),
                "tensor_core_steps": sum(step.tensor_cores for step in s.steps),
                "arena_bytes": s.arena,
                "live_bytes": live_bytes(p),
            }
            for s in entry.sections
        ],
    }


def sbom(plan: Plan) -> Json:
    """A bill of materials, as CycloneDX has it: the plan, the model that it was made from, and the tools that made it."""

    def component(kind: str, name: str, version: str = "", sha256: str = "") -> Json:
        known: Json = {"type": kind, "name": name, "bom-ref": f"{kind}:{name}"}
        known |= {"version": version} if version else {}
        return known | ({"hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else {})

    weights = [{"name": f"weight {name}", "value": f"sha256:{value}"} for name, value in sorted(plan.origin.weights.items())]
    model = component("machine-learning-model", plan.name or "model", sha256=plan.origin.model) | {"properties": weights}
    tools = [component("application", name, version) for name, version in plan.producer.items()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("firmware", f"{plan.name or 'model'}.plan", sha256=plan.identity)},
        "components": [model, *tools],
    }


def live_bytes(program: Program) -> int:
    """The bytes of the arena's tensors that live at once where most do: what an arena cannot be smaller than."""
    change = [0] * (len(program.ops) + 1)
    for owner, (first, last) in lifetimes(program).items():
        change[first] += program.tensors[owner].nbytes
        change[last + 1] -= program.tensors[owner].nbytes
    return max(accumulate(change), default=0)


def _value(program: Program, name: str) -> Json:
    t = program.tensors[name]
    return {"name": name, "shape": list(t.shape), "dtype": t.dtype.value}


def explain(plan: Plan) -> list[Json]:
    """For each entry and generation, each step: the user's nodes, kernel, config, Tensor Cores or why not, precision, padding.

    A generation whose code comes in several forms has the same steps in each: it is told once, with all of them in `code`.
    """
    out = []
    for number, entry in enumerate(plan.entries):
        for arch in dict.fromkeys(s.arch for s in entry.sections):
            same = [s for s in entry.sections if s.arch == arch]
            often = times(entry.program)
            steps = [_step(entry.program, step, n) for step, n in zip(same[0].steps, often, strict=True)]
            whole = sum(step["flops"] * step["times"] for step in steps)
            there = sum(step["flops"] * step["times"] for step in steps if step["tensor_cores"])
            us = sum(step["us"] * step["times"] for step in steps)
            told = {"flops": whole, "tensor_core_flops": there, "us": us}
            out.append({"entry": number, "arch": arch, "code": [plan.kind(s) for s in same], **told, "steps": steps})
    return out


_TIME = re.compile(r"(?:estimated|measured) ([0-9.]+) µs")
"""What a step's reason says first: by what time it was chosen."""


def _step(program: Program, step: Step, often: int) -> Json:
    op = program.ops[step.op]
    y = program.tensors[op.y]
    return {
        "nodes": list(op.nodes),
        "op": type(op).__name__,
        "output": {"shape": list(y.shape), "dtype": y.dtype.value},
        "kernel": step.kernel,
        "config": dict(step.config),
        "launches": len(step.launches),
        "times": often,
        "tensor_cores": step.tensor_cores,
        "flops": program.flops(op),
        "us": float(time[1]) if (time := _TIME.match(step.reason)) else 0.0,
        "reason": step.reason,
        "precision": _precision(program, op),
        "padding": _padding(program, op, step),
    }


def _precision(program: Program, op: Op) -> list[Json]:
    """What the op writes, and the constants it multiplies, where their storage is a choice of its own."""
    owners = dict.fromkeys(program.tensors[name].storage for name in (op.y, *op.operands))
    y = program.tensors[op.y]
    told = {n: program.storage[n] for n in owners if n in program.storage and (n in program.constants or n == y.storage)}
    if y.size == 1 and y.dtype is DType.F32 and y.storage not in {*program.storage, *program.inputs, *program.outputs}:
        told[y.storage] = Storage("fp32: single numbers always are")
    return [{"tensor": n, "dtype": program.tensors[n].dtype.value, **vars(storage)} for n, storage in told.items()]


def _padding(program: Program, op: Op, step: Step) -> list[str]:
    """The padding of what Tensor Cores multiply, as `input 3→8`, and groups that they multiply as fewer, as `groups 32→16`."""
    if not isinstance(op, Conv | Gemm):
        return []
    x, w = (op.x, op.w) if isinstance(op, Conv) else (op.a, op.b)
    read, out = [("input", x), ("weights", w), ("output", op.y)], []
    if isinstance(op, Conv) and "groups" in step.config:
        del read[1]  # it multiplies by others
        out.append(f"groups {op.groups}→{step.config['groups']}")
    for label, name in read:
        t = program.tensors[name]
        out += [f"{label} {n}→{p}" for n, p in zip(t.shape, t.padded, strict=True) if n != p]
    return out


# --- Text ------------------------------------------------------------------------------------------------------------


def summary_text(data: Json, quantized: str | None = None) -> str:
    """One line on a plan that has been written, and one on what is quantized to a format."""
    archs = dict.fromkeys(s["arch"] for entry in data["entries"] for s in entry["sections"])
    notes = [note for note in data["notes"] if quantized and note.startswith(f"{quantized}: ")]
    return "\n".join(map(plain, (f"{data['plan']}: {size_text(data['bytes'])}, for {', '.join(archs)}", *notes)))


def inspect_text(data: Json) -> str:
    lines = [f"{data['plan']}: {size_text(data['bytes'])}"]
    lines.append(f"  model    {data['name'] or 'without a name'}")
    lines.append(f"  made by  {', '.join(f'{k} {v}' for k, v in data['producer'].items())}")
    if data.get("ranges"):
        lines += _range_lines(data)
    else:
        for number, entry in enumerate(data["entries"]):
            lines += [f"  entry {number}"] if len(data["entries"]) > 1 else []
            lines += _value_lines(entry)
            lines.append("  target           steps  launches  on Tensor Cores  arena (alive at once)")
            lines += map(_section_line, entry["sections"])
    w, c = data["weights"], data["code"]
    left = f", {w['left_out']} left out (tcrun --weights MODEL.onnx fills them in)" if w["left_out"] else ""
    lines.append(f"  weights  {size_text(w['bytes'])} in {w['constants']} constants{left}")
    lines.append(f"  code     {size_text(c['bytes'])} in {c['images']} kernels")
    lines += [f"  note     {note}" for note in data["notes"]]
    lines += [f"  verified {line}; tcrun --selftest does so again" for line in verified_lines(data)]
    return "\n".join(map(plain, lines))


def verified_lines(data: Json) -> list[str]:
    """What each certificate says: of the user's inputs first, where there are such. Random ones are noise to most networks."""
    lines = []
    for made in data["certificates"]:
        entry = f"entry {made['entry']}, " if len(data["entries"]) > 1 else ""
        errors = ", ".join(f"{e['name']}: {e['error']:.1e}" for e in made["outputs"])
        errors = f"of random inputs {errors}"
        if "held" in made:
            real = ", ".join(f"{e['name']}: {e['held']:.1e}" for e in made["outputs"])
            sets = f"{made['held']} set{'s' if made['held'] > 1 else ''} of inputs"
            errors = f"of {sets} held back from calibration {real}; {errors}"
        allowed = " or ".join(f"{bound:.0e}" for bound in dict.fromkeys(e["bound"] for e in made["outputs"]))
        lines.append(f"{entry}beside {made['oracle']}, errors {errors}; {allowed} is allowed")
    return lines


def _value_lines(of: Json) -> list[str]:
    return [
        f"  {kind[:-1]:7}  {v['name']}: {v['dtype']}[{', '.join(map(str, v['shape']))}]"
        for kind in ("inputs", "outputs")
        for v in of[kind]
    ]


def _section_line(s: Json) -> str:
    target = s["arch"] + (" (PTX)" if s["code"] == "ptx" else "")
    cores, arena = s["tensor_core_steps"], f"{size_text(s['arena_bytes'])} ({size_text(s['live_bytes'])})"
    return f"  {target:15}  {s['steps']:5}  {s['launches']:8}  {cores:15}  {arena}"


def _range_lines(data: Json) -> list[str]:
    """What there is to say of a range: its sizes and, for each generation, between what the parts are."""
    of, entries = data["ranges"], data["entries"]
    sizes = [
        f"{plain(name)} {low} to {high}" + (f" in steps of {step}" if step > 1 else "")
        for name, (low, high, step) in of["sizes"].items()
    ]
    lines = [f"  range    {', '.join(sizes)}", *_value_lines(of)]
    shared = f"{of['images']} kernels, {of['images_in_all_parts']} of them in all parts"
    lines.append(f"  parts    {of['parts']}, run by {shared}" + ("; --json lists them" if of["parts"] > 1 else ""))
    lines.append("  target           steps     launches  on Tensor Cores  arena")
    targets = dict.fromkeys((s["arch"], s["code"]) for entry in entries for s in entry["sections"])
    for arch, code in targets:
        own = [s for entry in entries for s in entry["sections"] if (s["arch"], s["code"]) == (arch, code)]
        steps, launches, cores = (_between([s[key] for s in own]) for key in ("steps", "launches", "tensor_core_steps"))
        target = arch + (" (PTX)" if code == "ptx" else "")
        lines.append(f"  {target:15}  {steps:8}  {launches:8}  {cores:15}  {size_text(max(s['arena_bytes'] for s in own))}")
    return lines


def _between(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def weights(plan: Plan) -> list[Json]:
    """Each of the model's weights that the plan knows: its type and shape, whether it can be replaced, what is made of it."""
    known, made = sources(plan), dict[str, list[str]]()
    for entry in plan.entries:
        for constant, recipe in entry.program.constants.items():
            for name in sources_of(recipe):
                made.setdefault(name, []).append(constant)
    return [
        {
            "name": name,
            "dtype": known[name].dtype if name in known else None,
            "shape": list(known[name].shape) if name in known else None,
            "decided": name in plan.origin.decided,
            "constants": sorted(set(made.get(name, ()))),
        }
        for name in sorted({*plan.origin.weights, *known})
        if name in known or name in plan.origin.decided
    ]


def weights_text(found: list[Json]) -> str:
    lines = []
    for w in found:
        kind = "" if w["dtype"] is None else f": {w['dtype']}[{', '.join(map(str, w['shape']))}]"
        fixed = "  cannot be replaced: something was decided by its values" if w["decided"] else ""
        lines.append(f"{w['name']}{kind}{fixed}" + (f"  in {', '.join(w['constants'])}" if w["constants"] else ""))
    return "\n".join(map(plain, lines))


def explain_text(sections: list[Json], notes: Sequence[str] = ()) -> str:
    """The steps of each section, and after them what was decided for the whole plan."""
    lines: list[str] = []
    for section in sections:
        entry = f"entry {section['entry']}, " if any(s["entry"] for s in sections) else ""
        lines.append(f"{entry}{section['arch']} ({', '.join(section['code'])})")
        lines += _longest(section)
        for number, step in enumerate(section["steps"]):
            config = " ".join(f"{k}={v}" for k, v in step["config"].items())
            cores = "Tensor Cores" if step["tensor_cores"] else "CUDA cores"
            where = "" if step["kernel"] == "custom" else f" on {cores}"  # what users' kernels use, only they know
            shape = "×".join(map(str, step["output"]["shape"]))
            lines.append(f"  {number:3}  {' + '.join(step['nodes'])}")
            lines.append(f"       {step['op']} → {step['output']['dtype']} {shape}")
            often = f", up to {step['times']} times" if step["times"] > 1 else ""
            lines.append(f"       {step['kernel']} ({config}){where}{often}; {step['reason']}")
            lines += [f"       {choice['tensor']} is {choice['reason']}" for choice in step["precision"]]
            if step["padding"]:
                lines.append(f"       padding: {', '.join(step['padding'])}")
    lines += [f"note  {note}" for note in notes]
    return "\n".join(map(plain, lines))


LONGEST = 10
"""Steps that are named before all."""


def _longest(section: Json) -> list[str]:
    """How much runs on Tensor Cores, and the steps that take longest by what they were chosen by."""
    whole, us = section["flops"], section["us"]
    share = f"{100 * section['tensor_core_flops'] / whole:.1f}% of {_count(whole)}FLOP on Tensor Cores; " if whole else ""
    numbered = [(n, step) for n, step in enumerate(section["steps"]) if step["us"]]
    longest = sorted(numbered, key=lambda pair: -pair[1]["us"] * pair[1]["times"])[:LONGEST]
    lines = [f"  {share}{us:.1f} µs for {len(numbered)} steps one after the other, those that take longest:"]
    for n, step in longest:
        cores = "Tensor Cores" if step["tensor_cores"] else "CUDA cores"
        called = f"{step['kernel']}: {' + '.join(step['nodes'])}"
        own = step["us"] * step["times"]
        lines.append(f"  {n:5}  {own:8.1f} µs  {100 * own / us:5.1f}%  {cores:12}  {called}")
    return [*lines, "  all steps:"] if longest else []


def _count(number: int) -> str:
    """12.3 G"""
    unit = min(max(int(math.log10(max(number, 1))) // 3, 0), 4)
    return f"{number / 1000**unit:.{1 if unit else 0}f} {('', 'k', 'M', 'G', 'T')[unit]}"


def size_text(size: int) -> str:
    """12.3 MiB"""
    unit = min(int(math.log(max(size, 1), 1024)), 3)
    return f"{size} B" if unit == 0 else f"{size / 1024**unit:.1f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
