"""Networks in fp16 beside the same in fp32, on a GPU: python -m tests.bench.tensor_cores [NAME …]

The same network compiled twice, by --precision fp16 and fp32: the latency of an inference, the time of all its convolutions, and
how much faster single ones are, each timed by itself (`tcrun --profile`).
"""

from __future__ import annotations

import argparse

import numpy as np

from tccompile.pipeline import compile
from tccompile.runtime.profile import Profile
from tccompile.runtime.session import Session
from tests.bench.networks import variant
from tests.networks import feeds


def profiles(name: str, arch: str) -> dict[str, Profile]:
    """Of both plans, by precision."""
    model, shapes = variant(name)
    inputs = feeds(model, 0, shapes)
    found = {}
    for precision in ("fp16", "fp32"):
        with Session(compile(model, shapes, [arch], precision=precision), device="gpu") as session:
            found[precision] = session.profile(feeds=inputs)
    return found


def row(name: str, found: dict[str, Profile]) -> str:
    """A row of the table."""
    times = {
        precision: {s.nodes[0]: s.us for s in profile.steps if s.op == "Conv"} for precision, profile in found.items()
    }  # by the model's convolution: what is fused behind it may differ
    half, single = times["fp16"], times["fp32"]
    ratios = np.array([single[node] / half[node] for node in half.keys() & single.keys() if half[node]])
    cells = [
        name,
        *(f"{found[p].us / 1e3:.3f}" for p in ("fp16", "fp32")),
        f"{found['fp32'].us / found['fp16'].us:.1f}",
        f"{sum(single.values()) / sum(half.values()):.1f}",
        f"{np.exp(np.log(ratios).mean()):.1f}, {ratios.min():.1f} to {ratios.max():.1f} ({len(ratios)})",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["resnet50_dynbatch@32"])
    parser.add_argument("--arch", default="sm_90a", help="the generation to build for")
    args = parser.parse_args()
    print("| network | fp16, ms | fp32, ms | speed | all convolutions | single ones: mean, least to most (number) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.names:
        print(row(name, profiles(name, args.arch)), flush=True)


if __name__ == "__main__":
    main()
