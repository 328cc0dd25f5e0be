"""Products of bytes beside cuBLASLt, on a GPU: python -m tests.bench.bytes [MxNxK …] [--result float16] [--list NAME]

Squares, DeepBench's products, and those of the zoo's networks at batch 1 and 32, of signed bytes. Results are sums in int32, or
scaled by column in float16, as a network has them. The peer is PyTorch's `_int_mm`, which is cuBLASLt with sums as int32. Sizes
that it refuses are padded for it, and marked. Ours is the config that the cost model takes, "best" the fastest of --candidates.
All run as `tests.bench.layers` says.
"""

from __future__ import annotations

import sys

from tccompile.errors import TccompileError
from tccompile.ir.types import DType
from tests.bench.eight import LISTS, arguments, compared, products, sizes_of
from tests.bench.layers import summary

HEADS = ("list", "product", "ours", "best", "cuBLASLt", "TOP/s", "speed", "chosen", "fastest")


def main() -> None:
    parser = arguments("bytes")
    parser.add_argument("--result", choices=("int32", "float16"), default="int32", help="type of our results")
    args = parser.parse_args()
    rows = sizes_of(args.sizes, DType.I8, args.result) or list(products(DType.I8, args.result, args.quick, args.list or LISTS))
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    (found,) = compared(rows, args.candidates, ({},))
    print()
    print("\n".join(summary(found)))


if __name__ == "__main__":
    try:
        main()
    except TccompileError as error:
        sys.exit(f"error: {error}")
