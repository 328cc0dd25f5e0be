"""What kernels compile to and how they are launched, as hashes: a change that should leave code as it is leaves them as they are.

    python -m tests.kernels.hashes before.txt                     three codes of each kernel on each of four generations
    python -m tests.kernels.hashes before.txt --kernel gemm_sm90 --count 0     every config of every case, of that kernel
    … the change …
    python -m tests.kernels.hashes after.txt && diff before.txt after.txt

A line is a case, a kernel, a generation, a config and a launch of it; then the hash of its PTX, and of its grid, block, shared
memory and arguments. Needs no GPU; a code takes about a second of a core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from tccompile.arch import ARCHS, Arch
from tccompile.emit.ptx import ptx_text
from tccompile.kernels import KERNELS, kernel
from tccompile.kernels.spec import Code, Launch
from tests.gpu.build import variants
from tests.gpu.cases import CASES, program_of

GENERATIONS = "sm_61,sm_70,sm_75,sm_80,sm_90a"


def lines_of(name: str, arch: Arch) -> Iterator[tuple[str, Launch]]:
    """Every launch of a kernel in the cases' configs, and what a line begins with."""
    for case in CASES:
        for v in variants(case, program_of(case), [arch], "ptx", True, [kernel(name)]):
            config = json.dumps(dict(v.config), sort_keys=True, separators=(",", ":"))
            for number, launch in enumerate(v.work.launches):
                yield f"{case} {name} {arch.name} {config} {number}", launch


def sample(found: list[tuple[str, Launch]], count: int) -> list[tuple[str, Launch]]:
    """`count` of different codes, from the first to the last; all if it is 0."""
    distinct = list({launch.code: (line, launch) for line, launch in found}.values())
    if not count or len(distinct) <= count:
        return distinct if count else found
    return [distinct[i * (len(distinct) - 1) // max(count - 1, 1)] for i in range(count)]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ptx_hash(job: tuple[Code, Arch]) -> str:
    """Of the PTX, or what is wrong with it."""
    code, arch = job
    try:
        return digest(ptx_text(kernel(code.kernel).build(arch, **dict(code.params)), arch, "tc_kernel"))
    except Exception as error:
        return f"{type(error).__name__}"


def launch_hash(launch: Launch) -> str:
    args = [f"{type(arg).__name__} {asdict(arg)}" for arg in launch.args]
    return digest(repr((launch.grid, launch.block, launch.smem, launch.cooperative, args)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--kernel", default=",".join(k.name for k in KERNELS))
    parser.add_argument("--arch", default=GENERATIONS)
    parser.add_argument("--count", type=int, default=3, help="codes of each kernel on each generation; 0 for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    found: list[tuple[str, Launch, Arch]] = []
    for name in given.kernel.split(","):
        for arch in (ARCHS[a] for a in given.arch.split(",")):
            found += [(line, launch, arch) for line, launch in sample(list(lines_of(name, arch)), given.count)]
    jobs = list(dict.fromkeys((launch.code, arch) for _, launch, arch in found))
    with ProcessPoolExecutor(given.jobs) as pool:
        hashes = dict(zip(jobs, pool.map(ptx_hash, jobs), strict=True))
    with open(given.file, "w", encoding="utf-8") as file:
        for line, launch, arch in found:
            print(line, hashes[launch.code, arch], launch_hash(launch), file=file)
    print(f"{len(found)} launches of {len(jobs)} codes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
