"""Products of E4M3 beside cuBLASLt, on a GPU: python -m tests.bench.float8 [MxNxK …] [--list NAME]

Squares, DeepBench's products, and those of the zoo's networks at batch 1 and 32, scaled by column, in float16. The peer is
PyTorch's `_scaled_mm`, which is cuBLASLt, in float16 with one scale for each operand: with sums that are added up in float32
(`use_fast_accum=False`), as all kernels here do it, and with those of Tensor Cores alone. Sizes that it refuses are padded for
it, and marked. Ours is the config that the cost model takes, "best" the fastest of --candidates. All run as `tests.bench.layers`
says.
"""

from __future__ import annotations

import sys

from tccompile.errors import TccompileError
from tests.bench.eight import E4M3, LISTS, arguments, compared, products, sizes_of
from tests.bench.layers import summary

HEADS = ("list", "product", "ours", "best", "cuBLASLt", "the same, fast", "TFLOP/s", "speed", "beside fast", "chosen", "fastest")


def main() -> None:
    args = arguments("float8").parse_args()
    rows = sizes_of(args.sizes, E4M3, "float16") or list(products(E4M3, "float16", args.quick, args.list or LISTS))
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    for fast, found in enumerate(compared(rows, args.candidates, ({}, {"fast": True}))):
        print(f"\nuse_fast_accum={bool(fast)}:\n")
        print("\n".join(summary(found)))


if __name__ == "__main__":
    try:
        main()
    except TccompileError as error:
        sys.exit(f"error: {error}")
