"""Products with 2:4 weights, beside cuSPARSELt and beside dense ones, on a GPU: python -m tests.bench.sparse [MxNxK …]

Rows are y (M, N) = a (M, K) · b (N, K)ᵀ in fp16, of bytes and of E4M3 (`--formats`), results in fp16, in which b is 2:4; with
`--deepbench` also DeepBench's convolutions for training and products for inference, in fp16. "Dense" is the fastest of our
kernels' cheapest configs that multiply all of the weights, "2:4" the fastest of those that read them compressed. The peer is
PyTorch's `_cslt_sparse_mm`, with the algorithm that `_cslt_sparse_mm_search` finds, the result turned over or not. "Gain" is the
faster of dense and peer by 2:4.

Results of all configs are compared with each other, as `--tune` does it. All run as tccompile/tune.py says: repetitions in a CUDA
graph, constants that are not in the L2 cache. Times are microseconds; every time is a median.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tccompile.arch import ARCHS
from tccompile.errors import UsageError
from tccompile.fuse.sparse import offered
from tccompile.ir.ops import Conv, Gemm
from tccompile.ir.types import DType
from tccompile.schedule.choose import candidates, is_sparse
from tccompile.tune import Trial, gpu_to_measure, measure
from tests.bench.eight import Product
from tests.bench.layers import QUICK, ConvLayer, GemmLayer, Layer, Peer, _time, deepbench, mean, named, progress

SIZES = ("4096x4096x4096", "8192x8192x8192")

COPIES = 8
"""Of the weights, one after the other, which the L2 cache does not hold."""

FORMATS = {"f16": DType.F16, "s8": DType.I8, "e4m3": DType.E4M3}


@dataclass
class Row:
    """A layer and what was measured of it, in microseconds; infinite is what there is none of."""

    layer: Layer | Product
    dense: float = math.inf
    sparse: float = math.inf
    peer: float = math.inf
    configs: tuple[str, str] = ("", "")
    wrong: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        return min(self.dense, self.peer) / self.sparse


def ours(layers: Sequence[Layer | Product], count: int) -> Iterator[Row]:
    """Each layer with our times. All kernels are compiled before the first comes."""
    gpu, arch = gpu_to_measure(tuple(ARCHS))
    trials = []
    for layer in layers:
        op, program = layer.parts()[-1]
        weights = op.w if isinstance(op, Conv) else op.b if isinstance(op, Gemm) else ""
        program = offered(program, [weights])
        ranked = candidates(op, program, arch)
        kept = [c for sparse in (False, True) for c in [c for c in ranked if is_sparse(c.config) == sparse][:count]]
        trials.append(Trial(op, program, kept, len(kept)))
    for layer, (_, results) in zip(layers, measure(trials, gpu, arch, progress), strict=True):
        row, right = Row(layer), [r for r in results if r.wrong is None]
        row.wrong = tuple(f"{named(r.candidate)}: {r.wrong}" for r in results if r.wrong)
        found = [min((r for r in right if is_sparse(r.candidate.config) == s), key=lambda r: r.us, default=None) for s in (0, 1)]
        row.dense, row.sparse = (r.us if r else math.inf for r in found)
        row.configs = tuple(named(r.candidate) if r else "" for r in found)  # type: ignore[assignment]
        yield row


def theirs(layers: Sequence[Layer | Product]) -> list[float]:
    """Microseconds of cuSPARSELt for each layer, with the algorithm that it takes by itself and with the one that it finds, the
    result turned over or not; infinite for what it does not take.

    In a process of its own: its search has ended in an illegal instruction, after which a process has no use of the GPU. Another
    one goes on with what comes next.
    """
    todo = [(k, turned, searched) for k in range(len(layers)) for turned in (True, False) for searched in (False, True)]
    found, at, context = [math.inf] * len(layers), 0, multiprocessing.get_context("spawn")
    while at < len(todo):
        receive, send = context.Pipe(False)
        process = context.Process(target=_theirs, args=(layers, todo[at:], send))
        process.start()
        send.close()
        try:
            while receive.poll(60):
                us = receive.recv()
                found[todo[at][0]] = min(found[todo[at][0]], us)
                at += 1
        except EOFError:
            pass
        process.kill()
        at += 1  # what it ended in, or one beyond the last
    return found


def _theirs(layers: Sequence[Layer | Product], todo: Sequence[tuple[int, bool, bool]], send: Any) -> None:
    """Sends the microseconds of (layer's number, whether the result is turned over, whether to search); ends with an error."""
    peer = Peer()
    for number, turned, searched in todo:
        try:
            send.send(_multiplied(peer, layers[number], turned, searched))
        except RuntimeError as error:
            how = "searched" if searched else "its own choice"
            print(f"{layers[number]}, {how}: cuSPARSELt: {str(error).splitlines()[0]}", file=sys.stderr)
            return


def _multiplied(peer: Peer, layer: Layer | Product, turned: bool, searched: bool) -> float:
    """Microseconds; infinite for a convolution."""
    if isinstance(layer, ConvLayer):
        return math.inf
    torch, kind = peer.torch, layer.kind if isinstance(layer, Product) else DType.F16
    a, b = (_operand(torch, layer, kind, rows) for rows in ("m", "n"))
    copies, right = [torch._cslt_compress(b.clone()) for _ in range(COPIES)], a.t()
    how: dict[str, Any] = {"transpose_result": turned}
    if kind is not DType.F16:
        how["out_dtype"] = torch.float16
    algorithm = torch._cslt_sparse_mm_search(copies[0], right, **how) if searched else 0
    multiply = partial(torch._cslt_sparse_mm, alg_id=algorithm, **how)
    return _time(torch, [partial(multiply, one, right) for one in copies], peer.flush) / COPIES


def _operand(torch: Any, layer: Any, kind: DType, side: str) -> Any:
    """A random operand; b is 2:4."""
    shape = getattr(layer, side), layer.k
    if kind is DType.I8:
        values = torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
    else:
        values = torch.randn(shape, device="cuda", dtype=torch.half)
    if side == "n":
        kept = torch.rand(shape[0], shape[1] // 4, 4, device="cuda").argsort(-1) < 2
        values = values * kept.reshape(shape)
    return values.to(torch.float8_e4m3fn) if kind is DType.E4M3 else values


def line(row: Row) -> str:
    times = " | ".join(f"{us:.1f}" if us < math.inf else "-" for us in (row.dense, row.sparse, row.peer))
    speed = f"{row.layer.flop / row.sparse / 1e6:.0f}" if row.sparse < math.inf else "-"
    gain = f"{row.gain:.2f}" if row.sparse < math.inf else "-"
    return f"| {row.layer} | {times} | {speed} | {gain} | {' | '.join(row.configs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sparse")
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--formats", default="f16,s8,e4m3", help="of the sizes")
    parser.add_argument("--deepbench", action="store_true", help="its lists, too")
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} of the lists' layers")
    parser.add_argument("--candidates", type=int, default=6, metavar="N", help="configs to measure, dense and as 2:4")
    args = parser.parse_args()
    layers: list[Layer | Product] = []
    for kind in args.formats.split(","):
        for m, n, k in (map(int, size.split("x")) for size in args.sizes):
            layers.append(GemmLayer(m, n, k) if kind == "f16" else Product(m, n, k, FORMATS[kind]))
    if args.deepbench:
        listed = [x for x in deepbench("training") if isinstance(x, ConvLayer) and x.x[1] >= 32]
        listed += [x for x in deepbench("inference") if isinstance(x, GemmLayer)]
        layers += listed[:: QUICK if args.quick else 1]
    peers = theirs(layers)
    print(gpu_to_measure(tuple(ARCHS))[0].name, "; microseconds\n", sep="")
    print("| layer | dense | 2:4 | cuSPARSELt | TFLOP/s | gain | dense config | 2:4 config |\n|" + " --- |" * 8)
    rows = []
    for row, us in zip(ours(layers, args.candidates), peers, strict=True):
        row.peer = us
        rows.append(row)
        print(line(row), *(f"WRONG: {wrong}" for wrong in row.wrong), sep="\n", flush=True)
    known = [row for row in rows if row.sparse < math.inf]
    gain = mean([r.dense / r.sparse for r in known])
    print(f"\n{len(known)} of {len(rows)} as 2:4; dense by 2:4 in the geometric mean {gain:.2f}")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
