"""Convolutions of the zoo in 8 bits beside fp16, on a GPU: python -m tests.bench.convolutions8 [--batch 32,128] [--group NAME]

Every distinct convolution of the convolutional networks that has one group and 16 channels at least, at each batch, or those of a
group of the summary: in fp16 with bias and ReLU, results in fp16; in unsigned bytes with signed weights; and in E4M3, results in
the same. Ours is the config that the cost model takes, without a table, "best" the fastest of --candidates. They run as
tccompile/tune.py says. Times are microseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tccompile.errors import TccompileError
from tccompile.ir.types import DType
from tests.bench.eight import Convolution
from tests.bench.layers import ConvLayer, Row, mean, ours, zoo

GROUPS = ("1×1", "3×3", "deep 3×3", "other")
KINDS = {"fp16": None, "int8": DType.U8, "fp8": DType.E4M3}


def layers(batch: int, only: str | None) -> list[ConvLayer]:
    found = (layer for layer in zoo(batch) if isinstance(layer, ConvLayer))
    return [layer for layer in found if layer.groups == 1 and layer.x[1] >= 16 and only in (None, group(layer))]


def group(layer: ConvLayer) -> str:
    window = "×".join(map(str, layer.w[2:]))
    return "deep 3×3" if window == "3×3" and layer.x[1] >= 256 else window if window in ("1×1", "3×3") else "other"


def line(rows: Sequence[Row]) -> str:
    """A layer's times, and those of fp16 by those of 8 bits."""
    half = rows[0].ours
    times = " | ".join(f"{r.ours:.1f}" for r in rows)
    gains = " | ".join(f"{half / r.ours:.2f} ({rows[0].best / r.best:.2f})" for r in rows[1:])
    return f"| {rows[0].layer} | {times} | {gains} | {' | '.join(r.chosen for r in rows)} |"


def summary(batch: int, found: Sequence[Sequence[Row]]) -> None:
    """Geometric means by window, and with the fastest configs."""
    print("\n| batch | layers | number |" + "".join(f" {k} | least | best |" for k in list(KINDS)[1:]) + "\n|" + " --- |" * 9)
    groups = {"all": list(found)}
    for rows in found:
        groups.setdefault(rows[0].group, []).append(rows)
    for name, of in groups.items():
        cells = [str(batch), name, str(len(of))]
        for number in range(1, len(KINDS)):
            gains = [rows[0].ours / rows[number].ours for rows in of]
            best = mean([rows[0].best / rows[number].best for rows in of])
            cells += [f"{mean(gains):.2f}", f"{min(gains):.2f}", f"{best:.2f}"]
        print(f"| {' | '.join(cells)} |")
    for row in (row for rows in found for row in rows):
        for wrong in row.wrong:
            print(f"WRONG: {row.layer}: {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.convolutions8")
    parser.add_argument("--batch", default="32", help="batches, separated by commas")
    parser.add_argument("--group", choices=GROUPS, help="the layers of this group; deep ones have 256 channels at least")
    parser.add_argument(
        "--candidates", type=int, default=3, metavar="N", help="configs to measure: those of least estimated time"
    )
    args = parser.parse_args()
    for batch in map(int, args.batch.split(",")):
        todo = [
            Row(group(layer), layer if kind is None else Convolution(layer, kind))  # type: ignore[arg-type]
            for layer in layers(batch, args.group)
            for kind in KINDS.values()
        ]
        print("| layer | fp16 | int8 | fp8 | speed in int8 (best) | in fp8 (best) | fp16 | int8 | fp8 |\n|" + " --- |" * 9)
        found, part = [], []
        for row in ours(todo, args.candidates):
            part.append(row)
            if len(part) == len(KINDS):
                print(line(part), flush=True)
                found.append(part)
                part = []
        summary(batch, found)


if __name__ == "__main__":
    try:
        main()
    except TccompileError as error:
        sys.exit(f"error: {error}")
