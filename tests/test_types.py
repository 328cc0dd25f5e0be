"""The table of types of numbers against NumPy, ml_dtypes and ONNX."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

from tccompile.ir.tensor import dense
from tccompile.ir.types import ELEMENTS, DType

ELSEWHERE = [t for t in DType if t is not DType.TF32]
"""The types that other packages know too."""


@pytest.mark.parametrize("dtype", ELSEWHERE)
def test_a_row_says_what_other_packages_say(dtype: DType) -> None:
    known = np.dtype(getattr(ml_dtypes, dtype.value, dtype.value))
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx) == known
    if dtype.is_float:
        info = ml_dtypes.finfo(known)
        ours = dtype.largest, dtype.lowest, dtype.least_normal, dtype.eps, dtype.bits
        assert ours == (float(info.max), float(info.min), float(info.smallest_normal), float(info.eps), info.bits)
        assert dtype.infinite == bool(np.isinf(np.array(np.inf).astype(known).astype(np.float32)))
    elif dtype is not DType.BOOL:
        integer = ml_dtypes.iinfo(known)
        assert (dtype.lowest, dtype.largest, dtype.bits) == (integer.min, integer.max, integer.bits)


def test_tf32_has_the_range_of_float32_and_the_digits_of_float16() -> None:
    assert DType.TF32.least_normal == DType.F32.least_normal and DType.TF32.eps == DType.F16.eps
    assert DType.TF32.largest == float(np.uint32(0x7F7FE000).view(np.float32))


def test_a_tensors_bytes_come_from_its_types_bits() -> None:
    held = {t: dense("x", (3, 5), t, pad=1).nbytes for t in (DType.F64, DType.F32, DType.BF16, DType.E4M3, DType.I4)}
    assert held == {DType.F64: 120, DType.F32: 60, DType.BF16: 30, DType.E4M3: 15, DType.I4: 8}


def test_elements_have_whole_bytes() -> None:
    assert all(t.size == t.numpy.itemsize for t in ELEMENTS)
    with pytest.raises(TypeError, match="int4 has 4 bits"):
        DType.I4.size  # noqa: B018
