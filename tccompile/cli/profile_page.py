"""A profile as text and as an HTML page: a timeline of the steps, a roofline plot, a table. One file, no scripts.

`report_page` draws what is expected of a plan with the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from tccompile.runtime.profile import Profile, Roof, StepProfile
from tccompile.terminal import plain

WIDTH, ROW, MARGIN = 1100, 16, 70
"""Of the drawings, in pixels: their width, a row of the timeline, what lies left of and below a plot's axes."""

TENSOR, CUDA, MOVES = "#2a78b8", "#e08a1e", "#7c8a94"
"""Colours of steps on Tensor Cores, of products on CUDA cores, and of the others."""


# --- Text ------------------------------------------------------------------------------------------------------------


def profile_text(profile: Profile) -> str:
    """A line for each step, in the order in which they ran, and their sum."""
    lines = ["   µs   share  TFLOP/s    GB/s  of roof  kernel and node"]
    total = sum(s.us for s in profile.steps)
    for s in profile.steps:
        of_roof = f"{s.share:7.0%}" if s.share is not None else "       "
        flops = f"{s.tflops:8.2f}" if s.flops else " " * 8
        part = s.us / total if total else 0.0
        lines.append(f"{s.us:7.1f} {part:6.1%} {flops} {s.gbps:8.1f}  {of_roof}  {kernel(s)}: {' + '.join(s.nodes)}")
    return "\n".join(map(plain, [*lines, summary_text(profile)]))


def summary_text(profile: Profile) -> str:
    """The sum of the steps, the time of an inference, the roof."""
    total = sum(s.us for s in profile.steps)
    if profile.on_cpu:
        return f"{len(profile.steps)} steps, {total:.1f} µs in NumPy: the CPU engine is for checking, not for speed"
    return (
        f"{len(profile.steps)} steps, one after the other {total:.1f} µs; an inference takes "
        f"{profile.us:.1f} µs{_loops(profile)}; {_roof(profile)}"
    )


def _loops(profile: Profile) -> str:
    """What the steps' sum leaves out."""
    inside = [s.times for s in profile.steps if s.times > 1]
    return f", in which {len(inside)} of them run up to {max(inside)} times, as parts of loops" if inside else ""


def _roof(profile: Profile) -> str:
    roof = profile.roof
    if roof is None:
        return "no roof is known for this GPU"
    least = sum(s.least or 0.0 for s in profile.steps)
    cores = f"Tensor Cores {roof.tensor:.0f} TFLOP/s, " if roof.tensor else ""
    return f"the roof allows {least:.1f} µs ({cores}CUDA cores {roof.cuda:.0f} TFLOP/s, memory {roof.memory:.0f} GB/s)"


def kernel(s: StepProfile) -> str:
    config = " ".join(f"{k}={'x'.join(map(str, v)) if isinstance(v, list | tuple) else v}" for k, v in s.config.items())
    return f"{s.kernel} ({config})" if config else s.kernel


# --- The page --------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1140px; color: #1c2328 }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: 2px 8px; text-align: left; border-bottom: 1px solid #e4e8ea }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
svg { display: block }
svg text { font-size: 11px; fill: #1c2328 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
.grid { stroke: #e4e8ea }
.roof { stroke: #1c2328; fill: none }
"""


KEY = "".join(
    f'<span class="key" style="background: {colour}"></span>{text}'
    for colour, text in ((TENSOR, "Tensor Cores"), (CUDA, "products on CUDA cores"), (MOVES, "other steps"))
)
"""What the colours mean."""


def profile_page(profile: Profile) -> str:
    """The whole page."""
    plot = f"<h2>Roofline</h2>{roofline(profile, profile.roof)}" if profile.roof and any(s.flops for s in profile.steps) else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(profile.model)}</title><style>{STYLE}</style>'
        f"<h1>{escape(profile.model)}</h1><p>{escape(profile.device)}; medians of {profile.iterations} inferences.<br>"
        f"{escape(summary_text(profile))}.</p><p>{KEY}</p><h2>Timeline</h2>{timeline(profile)}{plot}"
        f"<h2>Steps</h2>{table(profile)}</html>\n"
    )


def colour(s: StepProfile) -> str:
    return TENSOR if s.tensor_cores else CUDA if s.flops else MOVES


def _title(s: StepProfile) -> str:
    """What is shown when a step is pointed at."""
    roof = f"\n{s.share:.0%} of the roof" if s.share is not None else ""
    figures = f"{s.us:.1f} µs, {s.tflops:.2f} TFLOP/s, {s.gbps:.1f} GB/s{roof}"
    return f"<title>{escape(' + '.join(s.nodes))}\n{s.op} → {'×'.join(map(str, s.shape))}\n{escape(kernel(s))}\n{figures}</title>"


def timeline(profile: Profile) -> str:
    """A row for each step, from when the ones before it have ended; the part that the roof allows is darker."""
    total = sum(s.us for s in profile.steps) or 1.0
    left, height = 300, ROW * len(profile.steps)
    scale = (WIDTH - left - 30) / total  # the last tick needs room
    parts = []
    for us in ticks(total):
        x = left + us * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 14}" text-anchor="middle">{us:g} µs</text>')
    start = 0.0
    for row, s in enumerate(profile.steps):
        x, y, width = left + start * scale, row * ROW + 2, max(s.us * scale, 1.0)
        name = s.nodes[0] if len(s.nodes[0]) <= 44 else f"…{s.nodes[0][-43:]}"
        parts.append(f'<g>{_title(s)}<text x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}" fill="{colour(s)}" opacity="0.5"/>')
        if s.share:
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width * min(s.share, 1):.2f}" height="{ROW - 4}" fill="{colour(s)}"/>'
            )
        parts.append("</g>")
        start += s.us
    return f'<svg width="{WIDTH}" height="{height + 20}">{"".join(parts)}</svg>'


def ticks(total: float) -> Iterator[float]:
    """Round numbers from 0 to `total`, five to ten of them."""
    step = 10 ** math.floor(math.log10(total))
    step *= next(f for f in (0.1, 0.2, 0.5, 1.0) if total / (step * f) <= 10)
    yield from (i * step for i in range(int(total / step) + 1))


def roofline(profile: Profile, roof: Roof) -> str:
    """Steps with products by operations a byte and TFLOP/s, both axes logarithmic; a step's area is its time."""
    steps = [s for s in profile.steps if s.flops and s.us]
    peak = max(roof.tensor, roof.cuda)
    low_x, high_x = (
        0.5 * min(s.flops / s.bytes for s in steps),
        2.0 * max(4e3 * peak / roof.memory, *(s.flops / s.bytes for s in steps)),
    )
    low_y, high_y = 0.5 * min(s.tflops for s in steps), 2.0 * peak
    height = 460

    def x_of(intensity: float) -> float:
        return MARGIN + math.log(intensity / low_x) / math.log(high_x / low_x) * (WIDTH - MARGIN)

    def y_of(tflops: float) -> float:
        return (height - 30) * (1 - math.log(tflops / low_y) / math.log(high_y / low_y))

    parts = []
    for power in range(math.ceil(math.log10(low_x)), math.floor(math.log10(high_x)) + 1):
        x = x_of(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 30}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 16}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(math.ceil(math.log10(low_y)), math.floor(math.log10(high_y)) + 1):
        y = y_of(10.0**power)
        parts.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts.append(
        f'<text x="{WIDTH}" y="{height - 2}" text-anchor="end">operations a byte</text><text x="0" y="12">TFLOP/s</text>'
    )
    for rate, what in ((roof.tensor, "Tensor Cores"), (roof.cuda, "CUDA cores")):
        if rate:
            ridge = max(rate / roof.memory * 1e3, low_x)
            begin = max(low_x, low_y / roof.memory * 1e3)
            corners = ((begin, begin * roof.memory * 1e-3), (ridge, rate), (high_x, rate))
            points = " ".join(f"{x_of(i):.1f},{y_of(min(t, rate)):.1f}" for i, t in corners)
            parts.append(f'<polyline class="roof" points="{points}"/>')
            parts.append(f'<text x="{WIDTH}" y="{y_of(rate) - 4:.1f}" text-anchor="end">{what}, {rate:.0f} TFLOP/s</text>')
    longest = max(s.us for s in steps)
    for s in steps:
        radius = 3 + 11 * math.sqrt(s.us / longest)
        place = f'cx="{x_of(s.flops / s.bytes):.1f}" cy="{y_of(s.tflops):.1f}" r="{radius:.1f}"'
        parts.append(f'<circle {place} fill="{colour(s)}" opacity="0.6">{_title(s)}</circle>')
    return f'<svg width="{WIDTH}" height="{height}">{"".join(parts)}</svg>'


def table(profile: Profile) -> str:
    total = sum(s.us for s in profile.steps) or 1.0
    names = ("µs", "share", "TFLOP/s", "GB/s", "of roof")
    head = f"<tr><th>step</th>{''.join(f'<th class=n>{n}</th>' for n in names)}<th>kernel</th><th>nodes</th></tr>"
    rows = []
    for number, s in enumerate(profile.steps):
        of_roof = "" if s.share is None else f"{s.share:.0%}"
        figures = (f"{s.us:.1f}", f"{s.us / total:.1%}", f"{s.tflops:.2f}" if s.flops else "", f"{s.gbps:.1f}", of_roof)
        cells = "".join(f"<td class=n>{f}</td>" for f in figures)
        nodes = escape(" + ".join(s.nodes))
        rows.append(f"<tr><td>{number}</td>{cells}<td>{escape(kernel(s))}</td><td>{nodes}</td></tr>")
    return f"<table>{head}{''.join(rows)}</table>"
