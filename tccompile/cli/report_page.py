"""What was built, as one HTML page: the graph with its steps, formats, memory and expected times. One file, which loads nothing.

Of each entry and generation there is a part; a choice at the top shows one. The graph is drawn by a script of the page, which
zooms and searches; everything else is there without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from tccompile.arch import ARCHS
from tccompile.cli.profile_page import KEY, MARGIN, MOVES, STYLE, WIDTH, colour, kernel, table, ticks, timeline
from tccompile.cli.report import Json, explain, inspect, size_text, verified_lines
from tccompile.ir.loops import times as times_of
from tccompile.ir.memory import lifetimes
from tccompile.ir.program import Program
from tccompile.plan.file import Plan
from tccompile.plan.format import Entry, Section
from tccompile.runtime.profile import Profile, Roof, StepProfile, traffic
from tccompile.schedule.timings import Timings
from tccompile.terminal import plain
from tccompile.verify.budgets import StepTime, step_times

BOX, GAP_X, GAP_Y = (180, 40), 24, 34
"""Of the graph, in its own units: a box's width and height, and what lies between boxes beside and below each other."""

PAGE = STYLE + (
    "#graph { width: 100%; height: 560px; border: 1px solid #e4e8ea; cursor: grab; touch-action: none }\n"
    "#graph rect { stroke: #fff; rx: 4px } #graph text { fill: #fff; pointer-events: none } #graph path { fill: none; "
    "stroke: #b8c2c8 }\n#graph .faded { opacity: .15 } #graph .chosen rect { stroke: #1c2328; stroke-width: 3 }\n"
    "#detail { white-space: pre-wrap; font: 12px/1.5 ui-monospace, monospace; min-height: 9em; background: #f5f7f8; "
    "padding: 8px }\n"
    "[hidden] { display: none } select, input { font: inherit } input { width: 24em }\n"
)


def report_page(plan: Plan, timings: Timings) -> str:
    """The whole page. `timings` are measured times, of steps that have any."""
    parts, graphs, names = [], [], []
    whole = explain(plan)
    for number, entry in enumerate(plan.entries):
        for arch in dict.fromkeys(s.arch for s in entry.sections):
            section = next(s for s in entry.sections if s.arch == arch)
            steps = next(e["steps"] for e in whole if (e["entry"], e["arch"]) == (number, arch))
            times = step_times(entry.program, section, ARCHS[arch], timings) if arch in ARCHS else _none(section)
            profile = _expected(plan, entry.program, section, times)
            names.append(_name(plan, number, entry, arch))
            parts.append(_part(entry, section, profile, times, steps))
            graphs.append(_graph(entry.program, section, profile, steps))
    options = "".join(f'<option value="{i}">{escape(plain(name))}</option>' for i, name in enumerate(names))
    notes = "".join(f"<li>{escape(plain(note))}</li>" for note in plan.notes) or "<li>none</li>"
    checked = "".join(f"<p>Verified {escape(plain(line))}.</p>" for line in verified_lines(inspect(plan)))
    data = json.dumps({"box": BOX, "parts": graphs}).replace("<", "\\u003c")
    sections = "".join(f'<section{" hidden" if i else ""} data-part="{i}">{part}</section>' for i, part in enumerate(parts))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(plain(plan.name))}</title><style>{PAGE}</style><h1>{escape(plain(plan.name)) or 'a plan'}</h1>"
        f"<p>{escape(_summary(plan))}</p>{checked}<h2>What was decided</h2><ul>{notes}</ul>"
        f"{_rewrites(plan)}"
        f'<p><select id="part" aria-label="part">{options}</select> <input id="search" type="search" '
        'placeholder="node, kernel, type or reason" aria-label="search"> <span id="found"></span></p>'
        f'<p>{KEY}</p><svg id="graph" role="img" aria-label="graph"></svg><div id="detail">Point at a step: its nodes, kernel, '
        f"formats and times. The wheel zooms, dragging moves.</div>{sections}"
        f'<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script></html>\n'
    )


def _rewrites(plan: Plan) -> str:
    """What each rewrite did to the model's graph, those that did most first; the nodes are there when it is opened."""
    rows = []
    for r in sorted(plan.rewrites, key=lambda r: -len(r.nodes)):
        names = "".join(f"<li>{escape(plain(name))}</li>" for name in r.nodes)
        at = f"{len(r.nodes)} node{'s' if len(r.nodes) != 1 else ''}"
        rows.append(f"<details><summary>{escape(plain(r.equation))}: at {at}</summary><ul>{names}</ul></details>")
    return f"<h2>What rewrites did</h2>{''.join(rows) or '<p>nothing</p>'}"


def _summary(plan: Plan) -> str:
    made = ", ".join(f"{name} {version}" for name, version in plan.producer.items())
    weights, code = sum(map(plan.size, plan.weights)), sum(len(i.code) for i in plan.images)
    return plain(
        f"Weights {size_text(weights)}, code {size_text(code)} in {len(plan.images)} kernels; made by {made or 'nobody'}."
    )


def _name(plan: Plan, number: int, entry: Entry, arch: str) -> str:
    shapes = ", ".join(f"{n} {'×'.join(map(str, entry.program.tensors[n].shape))}" for n in entry.program.inputs)
    return f"{arch}: {shapes}" if len(plan.entries) == 1 else f"{arch}, entry {number}: {shapes}"


def _none(section: Section) -> list[StepTime]:
    """Of steps for the CPU engine, whose times nobody estimates."""
    return [StepTime(0.0, 0.0, False)] * len(section.steps)


def _expected(plan: Plan, program: Program, section: Section, times: Sequence[StepTime]) -> Profile:
    """What profiling is expected to show."""
    arch = ARCHS.get(section.arch)
    roof = Roof(arch.tensor_tflops, arch.fp32_tflops, arch.gbps) if arch is not None else None
    steps = []
    for step, time, often in zip(section.steps, times, times_of(program), strict=True):
        op = program.ops[step.op]
        flops, moved = program.products(op), traffic(op, program)
        least = max(flops / roof.flops(step.tensor_cores) * 1e-6, moved / roof.memory * 1e-3) if roof and step.launches else None
        shape, name, config = program.tensors[op.y].shape, type(op).__name__, dict(step.config)
        cores, us = step.tensor_cores, time.us
        steps.append(StepProfile(op.nodes, name, shape, step.kernel, config, cores, us, flops, moved, least, often))
    whole = max((t.begin + t.us for t in times), default=0.0)
    return Profile(plan.name, section.arch, arch is None, 0, whole, tuple(steps), roof)


def _part(entry: Entry, section: Section, profile: Profile, times: Sequence[StepTime], steps: Sequence[Json]) -> str:
    measured, launched = sum(t.measured for t in times), sum(bool(s.launches) for s in section.steps)
    fused = len({name for s in steps for name in s["nodes"]})
    cores = sum(s.tensor_cores for s in section.steps)
    lines = [
        f"{fused} of the model's nodes in {len(steps)} steps, {launched} of which launch anything, {cores} on Tensor Cores.",
        f"An inference is expected to take {profile.us:.1f} µs: {measured} of {launched} steps were measured, others are by the "
        "cost model. The timeline has them one after the other.",
    ]
    expected = f"<h2>Expected times</h2>{timeline(profile)}" if profile.us else ""
    text = "<br>".join(lines if profile.us else lines[:1])
    return (
        f"<p>{text}</p><h2>Memory</h2>{_memory(entry.program, section)}{expected}<h2>Steps</h2>{table(profile)}{_formats(steps)}"
    )


def _memory(program: Program, section: Section) -> str:
    """What lives in the arena at each step, beside what the arena takes."""
    change, count = [0] * (len(program.ops) + 1), len(program.ops)
    for owner, (first, last) in lifetimes(program).items():
        change[first] += program.tensors[owner].nbytes
        change[last + 1] -= program.tensors[owner].nbytes
    live = list(accumulate(change))[:count]
    scratch = [0] * count
    for step in section.steps:
        scratch[step.op] = step.scratch[1]
    high, height, width = max(section.arena, *map(sum, zip(live, scratch, strict=True)), 1), 200, WIDTH - MARGIN - 10
    bars, grid = [], []
    for i, (alive, own) in enumerate(zip(live, scratch, strict=True)):
        x, w = MARGIN + i * width / count, max(width / count - 0.5, 0.5)
        sizes = f"{size_text(alive)} alive, {size_text(own)} workspace"
        title = f"<title>step {i}, {escape(plain(program.ops[i].nodes[0]))}\n{sizes}</title>"
        for size, below, shade in ((alive, 0, "#2a78b8"), (own, alive, "#e08a1e")):
            h, y = size / high * (height - 20), (1 - (size + below) / high) * (height - 20) + 10
            bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.2f}" height="{h:.1f}" fill="{shade}">{title}</rect>')
    for tick in ticks(high / 2**20):
        y = (1 - tick * 2**20 / high) * (height - 20) + 10
        grid.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g} MiB</text>')
    top = (1 - section.arena / high) * (height - 20) + 10
    arena = f'<line class="roof" x1="{MARGIN}" x2="{WIDTH}" y1="{top:.1f}" y2="{top:.1f}"><title>the arena</title></line>'
    said = f"The arena takes {size_text(section.arena)}. Step by step: tensors that are alive, and above them a step's workspace."
    return f'<p>{said}</p><svg width="{WIDTH}" height="{height}">{"".join(grid)}{"".join(bars)}{arena}</svg>'


def _formats(steps: Sequence[Json]) -> str:
    """Of each step the type that it writes, why that, its padding, and why this kernel."""
    rows = []
    for number, s in enumerate(steps):
        out, scales = s["output"], (f"{p['tensor']}: {p['dtype']}, {p['reason']}" for p in s["precision"])
        shape = "×".join(map(str, out["shape"]))
        cells = (number, f"{out['dtype']} {shape}", "; ".join(scales), ", ".join(s["padding"]), s["reason"])
        rows.append("<tr>" + "".join(f"<td>{escape(plain(str(c)))}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("step", "writes", "precision", "padding", "why this kernel"))
    return f"<h2>Formats and reasons</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


# --- The graph -------------------------------------------------------------------------------------------------------


def _graph(program: Program, section: Section, profile: Profile, steps: Sequence[Json]) -> Json:
    """Boxes with places, and what reads what: inputs, steps, outputs."""
    count = len(steps)
    edges = _edges(program)
    labels = [*(s["nodes"][0] for s in steps), *program.inputs, *program.outputs]
    boxes = []
    for i, (x, y) in enumerate(_places(len(labels), edges)):
        box: Json = {"x": x, "y": y, "name": plain(labels[i]), "colour": "#1c2328", "kind": "input", "detail": plain(labels[i])}
        if i < count:
            s, p = steps[i], profile.steps[i]
            box |= {"colour": colour(p), "kind": f"{s['op']} · {s['kernel']}", "detail": _detail(i, s, p)}
            box |= {} if section.steps[i].launches or section.arch == "cpu" else {"colour": MOVES, "kind": f"{s['op']} · nothing"}
        elif i >= count + len(program.inputs):
            box["kind"] = "output"
        boxes.append(box)
    return {"boxes": boxes, "edges": edges}


def _detail(number: int, s: Json, p: StepProfile) -> str:
    shape = "×".join(map(str, s["output"]["shape"]))
    lines = [
        f"step {number}: {' + '.join(s['nodes'])}",
        f"{s['op']} → {s['output']['dtype']} {shape}",
        f"{kernel(p)}: {s['reason']}",
    ]
    lines += [f"{own['tensor']} in {own['dtype']}: {own['reason']}" for own in s["precision"]]
    lines += [", ".join(s["padding"])] if s["padding"] else []
    of_roof = f", {p.share:.0%} of the roof" if p.share is not None else ""
    lines += [f"expected {p.us:.1f} µs{of_roof}"] if p.us else []
    return "\n".join(map(plain, lines))


def _edges(program: Program) -> list[tuple[int, int]]:
    """Which box reads what another one makes: steps, then inputs, then outputs."""
    tensors, count = program.tensors, len(program.ops)
    makers: dict[str, list[int]] = {name: [count + i] for i, name in enumerate(program.inputs)}
    exact = {op.y: i for i, op in enumerate(program.ops)}
    found = set()
    for reader, names in [*((i, op.inputs) for i, op in enumerate(program.ops)), *_ends(program)]:
        for name in names:
            own = exact.get(name)
            for maker in [own] if own is not None and own != reader else makers.get(tensors[name].storage, ()):
                found.add((maker, reader))
        if reader < count:
            makers.setdefault(tensors[program.ops[reader].y].storage, []).append(reader)
    return sorted(found)


def _ends(program: Program) -> list[tuple[int, tuple[str, ...]]]:
    first = len(program.ops) + len(program.inputs)
    return [(first + i, (name,)) for i, name in enumerate(program.outputs)]


def _places(count: int, edges: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Each box below all that it reads, and as far as there is room in the middle of them."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    layer, waits = [0] * count, [len(b) for b in before]
    ready = [i for i in range(count) if not waits[i]]
    while ready:
        a = ready.pop()
        for b in after[a]:
            layer[b], waits[b] = max(layer[b], layer[a] + 1), waits[b] - 1
            ready += [b] if not waits[b] else []
    rows: dict[int, list[int]] = {}
    for i in range(count):
        rows.setdefault(layer[i], []).append(i)
    x = [0.0] * count
    for row in (rows[n] for n in sorted(rows)):
        wanted = {i: sum(x[b] for b in before[i]) / max(len(before[i]), 1) for i in row}
        row.sort(key=wanted.__getitem__)
        places = [wanted[i] for i in row]
        for k in range(1, len(row)):
            places[k] = max(places[k], places[k - 1] + BOX[0] + GAP_X)
        shift = sum(p - wanted[i] for i, p in zip(row, places, strict=True)) / len(row)
        for i, place in zip(row, places, strict=True):
            x[i] = place - shift
    return [(round(x[i], 1), float(layer[i] * (BOX[1] + GAP_Y))) for i in range(count)]


SCRIPT = """
const [svg, detail, search, data] = ["graph", "detail", "search", "data"].map(id => document.getElementById(id))
const { parts, box: [W, H] } = JSON.parse(data.textContent)
let view = { x: 0, y: 0, w: 1, h: 1 }, groups = [], boxes = []
function make(tag, parent, attributes, text) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const name in attributes) e.setAttribute(name, attributes[name])
  if (text !== undefined) e.textContent = text
  return parent.appendChild(e)
}
function look() { svg.setAttribute("viewBox", [view.x, view.y, view.w, view.h].join(" ")) }
function frame(x, y, w) { const b = svg.getBoundingClientRect(); view = { x, y, w, h: w * b.height / b.width }; look() }
function short(text) { return text.length > 26 ? "…" + text.slice(-25) : text }
function draw(number) {
  svg.replaceChildren()
  boxes = parts[number].boxes
  for (const [a, b] of parts[number].edges) {
    const p = boxes[a], q = boxes[b], x = p.x + W / 2, y = p.y + H, u = q.x + W / 2, v = q.y, m = (y + v) / 2
    make("path", svg, { d: `M${x} ${y}C${x} ${m} ${u} ${m} ${u} ${v}` })
  }
  groups = boxes.map(box => {
    const g = make("g", svg, {})
    make("rect", g, { x: box.x, y: box.y, width: W, height: H, fill: box.colour })
    make("text", g, { x: box.x + 8, y: box.y + 17 }, short(box.name))
    make("text", g, { x: box.x + 8, y: box.y + 32, opacity: .8 }, short(box.kind))
    make("title", g, {}, box.detail)
    g.addEventListener("pointerenter", () => { detail.textContent = box.detail })
    return g
  })
  const left = Math.min(...boxes.map(b => b.x)), right = Math.max(...boxes.map(b => b.x)) + W
  frame((left + right) / 2 - Math.max(right - left, 900) / 2 - 20, -20, Math.max(right - left, 900) + 40)
  for (const s of document.querySelectorAll("[data-part]")) s.hidden = s.dataset.part != number
  find()
}
function find() {
  const text = search.value.toLowerCase(), hits = []
  boxes.forEach((box, i) => {
    const hit = text && (box.detail + " " + box.kind).toLowerCase().includes(text)
    if (hit) hits.push(box)
    groups[i].setAttribute("class", hit ? "chosen" : text ? "faded" : "")
  })
  document.getElementById("found").textContent = text ? hits.length + " found" : ""
  if (!hits.length) return
  detail.textContent = hits[0].detail
  frame(hits[0].x + W / 2 - view.w / 2, hits[0].y + H / 2 - view.h / 2, view.w)
}
svg.addEventListener("wheel", e => {
  e.preventDefault()
  const b = svg.getBoundingClientRect(), f = Math.exp(e.deltaY * .0015)
  const px = (e.clientX - b.left) / b.width, py = (e.clientY - b.top) / b.height
  view.x += view.w * px * (1 - f); view.y += view.h * py * (1 - f); view.w *= f; view.h *= f; look()
}, { passive: false })
svg.addEventListener("pointerdown", e => svg.setPointerCapture(e.pointerId))
svg.addEventListener("pointermove", e => {
  if (!(e.buttons & 1)) return
  const scale = view.w / svg.getBoundingClientRect().width
  view.x -= e.movementX * scale; view.y -= e.movementY * scale; look()
})
search.addEventListener("input", find)
document.getElementById("part").addEventListener("change", e => draw(Number(e.target.value)))
draw(0)
"""
