"""Outputs that are cut to what there is in the data, by a session on a GPU: a fake driver's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tccompile.errors import InputError
from tccompile.ir.expr import Epilogue, const
from tccompile.ir.ops import Pointwise
from tccompile.ir.program import Count
from tccompile.ir.tensor import dense
from tccompile.ir.types import DType
from tccompile.plan.file import Plan
from tccompile.runtime.arrays import DeviceArray
from tccompile.runtime.session import Session
from tests.runtime.fake_driver import FakeApi, FakeArray
from tests.runtime.test_session import KERNELS, expected, fake, plan, x_of

__all__ = ["fake"]


def counting(there: int, rows: int, axis: int) -> tuple[Plan, dict]:
    """A plan whose z says that there is so much of y along an axis, and its kernels."""

    def scale(h: int, y: int, factor: float, count: int) -> None:
        if factor > 0:
            KERNELS["tc_scale"][1](h, y, factor, count)
        else:
            ctypes.c_int64.from_address(y).value = there

    base = plan(rows=(rows,))
    (entry,) = base.entries
    z = Pointwise(nodes=("count",), y="z", epilogue=Epilogue(const(there, DType.I64)))
    program = replace(
        entry.program,
        tensors={**entry.program.tensors, "z": dense("z", (1,), DType.I64, pad=1)},
        ops=(*entry.program.ops[:2], z),
        counts=(Count("z", (rows, 3)[axis], "node 'find' (NonZero)", {"y": (axis,)}),),
    )
    return replace(base, entries=(replace(entry, program=program),)), {**KERNELS, "tc_scale": (KERNELS["tc_scale"][0], scale)}


@pytest.mark.parametrize("there", [0, 2, 4])
def test_arrays_on_the_host_and_on_the_gpu(fake: Callable[..., FakeApi], there: int) -> None:
    api = fake()
    made, api.kernels = counting(there, 4, 0)
    session, x, stream = Session(made, "gpu"), x_of(4), api.cuStreamCreate(0)[1]
    (y,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(y, expected(x)[0][:there])
    for queue in (None, stream):
        (y,) = session.run(["y"], {"x": FakeArray(api, x)}, stream=queue)
        assert isinstance(y, DeviceArray) and y.shape == (there, 3)
        np.testing.assert_array_equal(np.asarray(y), expected(x)[0][:there])


def test_what_does_not_lie_together_is_cut_on_the_host_only(fake: Callable[..., FakeApi]) -> None:
    api = fake()
    made, api.kernels = counting(2, 4, 1)
    session, x = Session(made, "gpu"), x_of(4)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected(x)[0][:, :2])
    with pytest.raises(InputError, match="output 'y' is cut along axis 1"):
        session.run(None, {"x": FakeArray(api, x)})


def test_more_than_there_is_room_for_is_an_error(fake: Callable[..., FakeApi]) -> None:
    api = fake()
    made, api.kernels = counting(5, 4, 0)
    with pytest.raises(InputError, match=r"'find' \(NonZero\) finds 5 elements in the data, and the plan has room for 4"):
        Session(made, "gpu").run(None, {"x": FakeArray(api, x_of(4))})
