"""The timing tables that come with tccompile, on a GPU: python -m tests.bench.timings PART.json [--plans DIR] [--lists …]

    python -m tests.bench.timings networks.json --plans DIR              the ops of plans that tests.bench.networks --build wrote
    python -m tests.bench.timings layers.json --lists zoo,inference      the layers of tests.bench.layers
    python -m tests.bench.timings TABLE.json --join networks.json layers.json

What a part already holds is not measured again, and it is whole after each op, so it can be stopped and gone on with, and ops
can be measured on several GPUs (--share 0/2 is one half of them). Joined, a table keeps what is near each op's fastest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tccompile.arch import ARCHS
from tccompile.errors import TccompileError
from tccompile.ir.program import Program
from tccompile.plan.file import read_plan
from tccompile.schedule.timings import Table, Timing, key, read, write
from tccompile.tune import gpu_to_measure, tune
from tests.bench.layers import lists, progress

NEAR = 1.25
"""Times of a joined table, in those of the fastest: with branches beside it the next fastest may be the better choice."""


def programs(plans: Path | None, wanted: str) -> Iterator[Program]:
    """The programs of plans in a folder, and of lists of layers, each of its ops alone."""
    for path in sorted(plans.glob("*.plan")) if plans else ():
        for entry in read_plan(path).entries:
            yield from (replace(entry.program, ops=(op,)) for op in entry.program.ops)
    if wanted:
        for row in lists((1, 8, 32), wanted.split(","), quick=False):
            yield from (program for _, program in row.layer.parts())


def joined(tables: Iterable[Table]) -> Table:
    """One table of several of the same GPU, the first that has an op first, without what no choice would take."""
    first, *others = tables
    ops: dict[str, tuple[Timing, ...]] = dict(first.ops)
    for table in others:
        if (table.gpu, table.arch) != (first.gpu, first.arch):
            raise ValueError(f"times of {table.gpu}, and of {first.gpu}")
        ops = {**table.ops, **ops}
    near = {op: tuple(t for t in times if t.us <= NEAR * times[0].us) for op, times in ops.items() if times}
    return replace(first, ops=near)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.timings")
    parser.add_argument("table", type=Path)
    parser.add_argument("--plans", type=Path, metavar="DIR", help="the ops of these plans")
    parser.add_argument("--lists", default="", help="lists of tests.bench.layers, at batch 1, 8 and 32")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth op, from the Ith on")
    parser.add_argument("--candidates", type=int, default=8, metavar="N", help="configs to measure: the cheapest by estimate")
    parser.add_argument("--join", type=Path, nargs="+", metavar="PART", help="write the table of these parts, measure nothing")
    args = parser.parse_args()
    if args.join:
        write(joined([read(path) for path in args.join]), args.table)
        return
    first, step = map(int, args.share.split("/"))
    gpu, arch = gpu_to_measure(tuple(ARCHS))
    distinct = {key(p.ops[0], p): p for p in programs(args.plans, args.lists)}
    tune(list(distinct.values())[first::step], gpu, arch, args.table, progress, count=args.candidates)


if __name__ == "__main__":
    try:
        main()
    except TccompileError as error:
        sys.exit(f"error: {error}")
