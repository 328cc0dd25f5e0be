"""Draws the two pictures of the design: python docs/design/pictures.py writes pipeline.svg and plan.svg beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, PALE = "#1f2937", "#6b7280"
GRAPH, PROGRAM, CODE, DATA = "#dbeafe", "#dcfce7", "#ffedd5", "#f3e8ff"

STAGES = (
    ("load", "check, one opset, bind shapes, fold constants", GRAPH),
    ("rewrite", "equations on ONNX operators", GRAPH),
    ("quantize", "if asked for: where 8 bits pay", GRAPH),
    ("lower", "few typed ops, NHWC", PROGRAM),
    ("fuse", "epilogues; views in place of copies", PROGRAM),
    ("measure", "what values tensors take, in fp32 on the CPU", PROGRAM),
    ("precision", "fp16, fp32 or 8 bits; scales", PROGRAM),
    ("layout", "padding by format", PROGRAM),
)
PER_GENERATION = (
    ("schedule", "which kernel, which config, and why"),
    ("place", "one arena; which step waits for which"),
    ("emit", "Numba → PTX → machine code, cached"),
)
SECTIONS = (
    ("steps", "kernel, config, launches, what each waits for"),
    ("offsets", "each tensor's place in one arena"),
    ("arena, counters", "bytes to allocate"),
)


def text(x: float, y: float, words: str, size: int = 14, fill: str = INK, anchor: str = "start", bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'{weight} {FONT}>{escape(words)}</text>"


def box(x: float, y: float, w: float, h: float, fill: str, edge: str = PALE) -> str:
    return f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' stroke='{edge}'/>"


def named(x: float, y: float, w: float, h: float, fill: str, name: str, what: str) -> str:
    """A box with its name, and below it what it is."""
    return box(x, y, w, h, fill) + text(x + 12, y + 21, name, 15, bold=True) + text(x + 12, y + 39, what, 12, PALE)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.5' marker-end='url(#head)'/>"


def page(name: str, width: int, height: int, title: str, parts: Sequence[str]) -> None:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
        f"<title>{escape(title)}</title><defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0 0 8 4 0 8z' fill='{INK}'/></marker></defs>"
        f"<rect width='{width}' height='{height}' fill='white'/>"
    )
    (HERE / f"{name}.svg").write_text("\n".join((head, *parts, "</svg>", "")), encoding="utf-8")


def pipeline() -> None:
    """Stages from above to below, coloured by what they take and make; those for each generation stand side by side."""
    left, wide, high, step = 30, 340, 50, 66
    parts = [text(left, 28, "model.onnx", 15, bold=True), arrow(left + 60, 36, left + 60, 54)]
    for n, (name, what, fill) in enumerate(STAGES):
        y = 58 + n * step
        parts.append(named(left, y, wide, high, fill, name, what))
        parts.append(arrow(left + 60, y + high, left + 60, y + step - 3))
    y = 58 + len(STAGES) * step
    parts.append(box(left - 14, y - 2, 806, 3 * step + 44, "none", INK))
    parts.append(text(left, y + 20, "for each GPU generation: sm_80, sm_90a, …", 14, bold=True))
    for n, (name, what) in enumerate(PER_GENERATION):
        for copy in (1, 0):
            parts.append(named(left + copy * 10, y + 32 + n * step - copy * 4, wide, high, CODE, name, what))
        if n + 1 < len(PER_GENERATION):
            parts.append(arrow(left + 60, y + 32 + n * step + high, left + 60, y + 32 + (n + 1) * step - 3))
    end = y + 32 + 3 * step + 22
    parts.append(arrow(left + 60, end - 38, left + 60, end - 2))
    parts.append(named(left, end, wide, high, DATA, "pack", "one file: model.plan"))
    notes = (
        (58, "a graph of ONNX operators", "opens in Netron; ONNX Runtime can run it after each rewrite", GRAPH),
        (58 + 3 * step, "a program of typed ops", "runs in NumPy: the CPU engine and the tests do so", PROGRAM),
        (y + 32, "choices, memory map, code", "data: a plan holds all of it, and says why", CODE),
    )
    for top, name, what, fill in notes:
        parts.append(named(430, top, 376, high, fill, name, what))
    parts.append(text(430, end + 20, "No stage imports or calls a later one.", 14, bold=True))
    parts.append(text(430, end + 40, "make dump MODEL=x.onnx writes what each has made.", 12, PALE))
    page("pipeline", 836, int(end + high + 20), "The stages of compiling, from an ONNX file to a plan", parts)


def plan() -> None:
    """What is inside what: entries, their sections, and what they share."""
    parts = [box(16, 16, 800, 424, "#f9fafb", INK), text(32, 42, "model.plan", 16, bold=True)]
    parts.append(text(130, 42, "header: compressed JSON, checked by SHA-256; then sections of bytes", 12, PALE))
    for copy in (2, 1, 0):
        parts.append(box(32 + copy * 8, 64 + copy * 8, 430, 350 - copy * 8, "white"))
    parts.append(text(46, 88, "entry", 15, bold=True))
    parts.append(text(96, 88, "one for each set of input shapes; a range has one with formulas", 12, PALE))
    parts.append(named(46, 100, 400, 50, PROGRAM, "program", "typed ops, tensors with layouts, where constants come from"))
    for copy in (1, 0):
        parts.append(box(46 + copy * 8, 164 + copy * 8, 392, 232 - copy * 8, "#fff7ed"))
    parts.append(text(60, 188, "section", 15, bold=True))
    parts.append(text(122, 188, "one for each generation: sm_80, sm_90a", 12, PALE))
    for n, (name, what) in enumerate(SECTIONS):
        parts.append(named(60, 202 + n * 64, 364, 50, CODE, name, what))
    shared = (
        ("images", "machine code or PTX, shared by steps", CODE),
        ("weights", "once, as kernels read them", DATA),
        ("origin", "what other weights are held to", DATA),
        ("certificates", "seeds, values, error bounds", DATA),
        ("notes", "what was decided, and why", DATA),
    )
    parts.append(text(540, 88, "shared by all entries", 14, bold=True))
    for n, (name, what, fill) in enumerate(shared):
        parts.append(named(540, 100 + n * 66, 258, 50, fill, name, what))
    parts.append(arrow(424, 222, 536, 126))
    parts.append(text(494, 148, "run", 12, PALE))
    parts.append(arrow(424, 238, 536, 190))
    parts.append(text(494, 226, "read", 12, PALE))
    page("plan", 832, 456, "What a plan file holds", parts)


if __name__ == "__main__":
    pipeline()
    plan()
