"""Attention: the kernels' code thread by thread, what each refuses, code for every generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.compile import resources
from tccompile.ir.ops import Attention
from tccompile.ir.program import Program
from tccompile.ir.types import DType
from tccompile.kernels.attention import AttentionKernel
from tccompile.kernels.attention_mma import AttentionMma
from tccompile.kernels.attention_sm90 import AttentionSm90
from tccompile.kernels.spec import Config, Kernel, TiledMap
from tccompile.schedule.choose import candidates
from tests.gpu.cases import LOWEST, attention, program_of
from tests.kernels import machine
from tests.kernels.support import check
from tests.tiers import thorough, usually

KERNEL, MMA, SM90 = AttentionKernel(), AttentionMma(), AttentionSm90()

TINY = {
    "masked": attention("masked", (2, 1, 3, 5), 36, e=9, mask=(2, 1, 1, 36), ep="bias"),
    "bool, causal": attention("bool, causal", (1, 2, 34, 3), 3, mask=(1, 2, 34, 3), kind=DType.BOOL, causal=-1),
    "groups of heads": attention("groups", (1, 2, 4, 40), 6, e=3, share=2, dtype=DType.F32, to="output"),
}


@pytest.mark.parametrize("case", TINY)
def test_values(case: str) -> None:
    check(KERNEL, TINY[case])


def tile(warpgroups: int, bn: int, persistent: bool = False) -> Config:
    """A config of attention_sm90."""
    return {"warpgroups": warpgroups, "bn": bn, "persistent": persistent}


RUN: dict[str, tuple[Any, ...]] = {
    "mma.m16n8k16": (
        MMA,
        "sm_80",
        {"bn": 64, "splits": 1},
        attention("a", (1, 3, 70, 40), 130, share=3, causal=60),
        attention("b", (1, 1, 5, 33), 1),
    ),
    "mma.m16n8k8, a mask": (
        MMA,
        "sm_75",
        {"bn": 32, "splits": 1},
        attention("a", (2, 1, 17, 8), 70, mask=(2, 1, 1, 70), hidden=LOWEST, unseen=True),
    ),
    "mma.m16n8k16, split": (
        MMA,
        "sm_80",
        {"bn": 32, "splits": 5},
        attention("a", (1, 4, 19, 40), 299, share=2),
        attention("b", (2, 1, 70, 40), 161),
    ),
    "mma.m16n8k16, split, a mask": (
        MMA,
        "sm_80",
        {"bn": 32, "splits": 8},
        attention("a", (2, 4, 19, 64), 250, share=2, mask=(2, 1, 1, 250), hidden=LOWEST, unseen=True, causal=100),
    ),
    "mma.m16n8k8, split": (MMA, "sm_75", {"bn": 32, "splits": 32}, attention("a", (1, 1, 17, 160), 1023)),
    "mma.m16n8k16, few rows": (
        MMA,
        "sm_80",
        {"bn": 64, "splits": 1},
        attention("a", (1, 4, 16, 40), 200, share=2, causal=150),
        attention("b", (2, 1, 1, 40), 9),
    ),
    "mma.m16n8k16, few rows, split": (
        MMA,
        "sm_80",
        {"bn": 128, "splits": 4},
        attention("a", (2, 4, 3, 64), 700, share=2),
        attention("b", (1, 2, 11, 64), 513),
    ),
    "mma.m16n8k16, few rows, split, a mask": (
        MMA,
        "sm_80",
        {"bn": 64, "splits": 8},
        attention("a", (2, 4, 9, 64), 550, share=2, mask=(2, 1, 1, 550), hidden=LOWEST, unseen=True, causal=100),
        attention("b", (2, 1, 1, 64), 1025, mask=(2, 1, 1, 1025), unseen=True, causal=1024),
    ),
    "mma.m16n8k8, few rows, split": (MMA, "sm_75", {"bn": 64, "splits": 5}, attention("a", (1, 1, 13, 160), 600)),
    "wgmma": (
        SM90,
        "sm_90a",
        tile(1, 64),
        attention("a", (1, 2, 100, 64), 199),
        attention("b", (1, 1, 1, 64), 1),
    ),
    "mma.m16n8k16, bf16": (MMA, "sm_80", {"bn": 64, "splits": 1}, attention("a", (1, 2, 40, 24), 70, causal=3, dtype=DType.BF16)),
    "wgmma, bf16": (SM90, "sm_90a", tile(1, 64), attention("a", (1, 2, 70, 40), 100, dtype=DType.BF16)),
    "wgmma, in turns": (SM90, "sm_90a", tile(2, 64), attention("a", (2, 2, 70, 40), 200, share=2, causal=-9)),
    "wgmma, a mask of keys": (SM90, "sm_90a", tile(1, 64),
        attention("a", (2, 3, 65, 64), 199, mask=(2, 1, 1, 199), hidden=LOWEST, unseen=True),
        attention("b", (3, 1, 1, 64), 63, mask=(3, 1, 1, 63), hidden=-1e9, unseen=True),
        attention("c", (2, 2, 3, 64), 128, mask=(2, 2, 1, 128), unseen=True),
    ),
    "wgmma, a mask of rows": (SM90, "sm_90a", tile(2, 64),
        attention("a", (2, 2, 130, 32), 211, mask=(1, 2, 130, 211), hidden=LOWEST, unseen=True, causal=100),
        attention("b", (2, 2, 49, 32), 49, mask=(2, 2, 49, 49), unseen=True, causal=0),
        attention("c", (2, 1, 7, 32), 129, mask=(2, 1, 7, 129), hidden=-1e38, unseen=True, causal=129),
    ),
    "wgmma, a mask of halves": (SM90, "sm_90a", tile(1, 128),
        attention("a", (1, 2, 70, 40), 141, mask=(1, 2, 70, 141), kind=DType.F16, unseen=True),
        attention("b", (2, 2, 64, 40), 256, mask=(1, 2, 64, 256), kind=DType.F16, hidden=-6e4),
    ),
    "wgmma, a mask of bools": (SM90, "sm_90a", tile(1, 64),
        attention("a", (2, 2, 70, 72), 141, mask=(2, 1, 70, 141), kind=DType.BOOL, unseen=True),
        attention("b", (2, 2, 64, 72), 64, mask=(1, 1, 64, 64), kind=DType.BOOL, unseen=True),
    ),
}  # fmt: skip
"""Kernels as they are compiled: generation, config, and programs of the same code."""


@pytest.mark.parametrize("case", usually(RUN, "mma.m16n8k8, a mask", "wgmma, in turns"))
def test_compiled_code_computes(case: str) -> None:
    kernel, arch, config, *programs = RUN[case]
    for program in programs:
        check(kernel, program, config, arch=ARCHS[arch], run=machine.run)


@thorough
@pytest.mark.parametrize("config", [tile(2, 64, persistent=True)])
def test_blocks_go_on_with_the_next_rows(config: Config) -> None:
    arch = replace(ARCHS["sm_90a"], sms=1)
    for program in (
        attention("a", (2, 3, 140, 64), 199),
        attention("b", (1, 7, 90, 64), 64, share=7),
        attention("c", (2, 2, 140, 64), 140, causal=-70),
    ):
        (launch,) = SM90.work(program.ops[0], program, config, arch).launches
        assert launch.grid[0] < 6
        check(SM90, program, config, arch=arch, run=machine.run)


def test_says_why_not() -> None:
    def reason(kernel: Kernel, program: Program, arch: str = "sm_90a") -> str:
        return kernel.supports(program.ops[0], program, ARCHS[arch]) or ""

    integers = attention("integers", (1, 1, 4, 8), 4, dtype=DType.I32)
    assert "no float type" in reason(KERNEL, integers)
    good = attention("good", (1, 2, 40, 64), 40)
    assert not any(reason(k, good) for k in (KERNEL, MMA, SM90))
    assert not reason(MMA, good, "sm_75") and not reason(KERNEL, good, "sm_61")
    assert "no mma.m16n8" in reason(MMA, good, "sm_70") and "no wgmma" in reason(SM90, good, "sm_80")
    for kernel in (MMA, SM90):
        assert "float32" in reason(kernel, attention("wide", (1, 2, 40, 64), 40, dtype=DType.F32))
        assert "at most 256" in reason(kernel, attention("long heads", (1, 2, 40, 264), 40))
        program = program_of("attention_packed")
        (op,) = program.ops
        assert isinstance(op, Attention)
        negative = replace(program, ops=(replace(op, scale=-1.0),))
        assert "its scale is -1" in reason(kernel, negative)
        odd = {n: replace(t, offset=t.offset + (n == "k")) for n, t in program.tensors.items()}
        assert "rows of k do not begin" in reason(kernel, replace(program, tensors=odd))
    masked = {case: attention(case, (1, 2, 40, 64), 40, mask=(1, 1, 40, n), kind=k)
              for case, n, k in (("odd", 40, DType.F32), ("wide", 40, DType.BF16), ("one", 1, DType.F32))}  # fmt: skip
    odd = {n: replace(t, offset=t.offset + (n == "mask")) for n, t in masked["odd"].tensors.items()}
    assert not reason(SM90, masked["odd"]) and "begin at even" in reason(SM90, replace(masked["odd"], tensors=odd))
    assert "bfloat16" in reason(SM90, masked["wide"]) and "one element for all columns" in reason(SM90, masked["one"])
    assert "64 KiB of shared memory" in reason(MMA, attention("large", (1, 2, 40, 256), 40), "sm_75")


@thorough
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_few_rows_and_many_of_k_are_split(arch: str) -> None:
    def splits(*shape: Any, **more: Any) -> int:
        (op,) = (program := attention("a", *shape, **more)).ops
        return min(MMA.configs(op, program, ARCHS[arch]), key=lambda c: MMA.cost(op, program, c, ARCHS[arch]))["splits"]

    assert splits((1, 12, 1, 64), 4096) > 4 and splits((1, 8, 16, 128), 8192, share=4) > 4
    assert splits((16, 12, 1, 64), 4096) <= 2 and splits((1, 12, 197, 64), 197) == splits((1, 12, 1, 64), 64) == 1
    (op,) = (program := attention("a", (1, 12, 5, 40), 4096)).ops
    work = MMA.work(op, program, {"bn": 64, "splits": 20}, ARCHS[arch])
    assert work.launches[0].grid == (12, 16, 1)  # 64 steps, 4 each
    assert (work.scratch, work.counters) == (12 * 16 * 5 * (48 + 2) * 4, 12 * 4)


def test_tiles_fit_shared_memory_and_registers() -> None:
    for d, mask in product((8, 40, 64, 96, 128, 192, 256), (None, (1, 1, 1, 600), (1, 2, 600, 600))):
        program = attention("tiles", (1, 2, 600, d), 600, mask=mask, kind=DType.F32)
        (op,) = program.ops
        for config in SM90.configs(op, program, ARCHS["sm_90a"]):
            (launch,) = SM90.work(op, program, config, ARCHS["sm_90a"]).launches
            assert launch.smem <= ARCHS["sm_90a"].smem_block and launch.block <= 512
            maps = [a for a in launch.args if isinstance(a, TiledMap)]
            assert [m.box[1] for m in maps] == [64 * config["warpgroups"], config["bn"], config["bn"]]
            assert [m.extents[0] for m in maps] == [d] * 3
        assert len(list(SM90.configs(op, program, ARCHS["sm_90a"]))) >= (2 if mask is None or d < 192 else d < 256)


@pytest.mark.parametrize(
    "kernel, case, arch, config",
    usually(
        [
            (KERNEL, "attention_mask_causal", "sm_61", {}),
            (MMA, "attention_40", "sm_75", {"bn": 32, "splits": 1}),
            (MMA, "attention_causal", "sm_80", {"bn": 64, "splits": 1}),
            (MMA, "attention_decode_long", "sm_75", {"bn": 64, "splits": 9}),
            (MMA, "attention_decode_few", "sm_86", {"bn": 64, "splits": 9}),
            (SM90, "attention_causal", "sm_90a", tile(1, 64)),
            (SM90, "attention_long", "sm_90a", tile(2, 128)),
            (SM90, "attention_mask_long", "sm_90a", tile(2, 64)),
        ],
    ),
)
def test_compiles(kernel: Kernel, case: str, arch: str, config: Config) -> None:
    program = program_of(case)
    (launch,) = kernel.work(program.ops[0], program, config, ARCHS[arch]).launches
    assert resources(launch.code, ARCHS[arch]).stack == 0


@pytest.mark.parametrize(
    ("batch", "keys", "kernel"), [(1, 60, "attention_sm90"), (1, 131, "attention_mma"), (16, 201, "attention_sm90")]
)
def test_keys_of_one_row_are_split_where_that_is_faster_in_a_network(batch, keys, kernel):
    """A decoder's inferences on an H200 say so, not the kernels alone: of few heads, and from some hundred keys on."""
    program = attention("one_row", (batch, 8, 1, 64), keys)
    assert candidates(program.ops[0], program, ARCHS["sm_90a"])[0].kernel.name == kernel
