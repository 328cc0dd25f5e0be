"""Joining what was measured in parts."""

import pytest

from tccompile.schedule.timings import FORMAT, Table, Timing
from tests.bench.timings import joined


def table(gpu="H200", **ops):
    return Table(gpu, "sm_90a", {op: tuple(Timing(f"k{us}", {}, us, "") for us in times) for op, times in ops.items()}, FORMAT)


def test_of_each_op_what_is_near_the_fastest():
    ours = joined([table(conv=(4.0, 5.0, 5.1), gemm=(2.0,)), table(conv=(1.0,), softmax=())])
    assert {op: [t.us for t in times] for op, times in ours.ops.items()} == {"conv": [4.0, 5.0], "gemm": [2.0]}


def test_one_gpu():
    with pytest.raises(ValueError, match="times of H100, and of H200"):
        joined([table(conv=(1.0,)), table("H100", conv=(1.0,))])
