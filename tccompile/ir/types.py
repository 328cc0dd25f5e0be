"""The types of numbers: what each can hold, how it is rounded to, how many bits an element takes, and what others call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum

import numpy as np

from tccompile.ir.extent import ceil_div

_ROWS: Mapping[str, tuple[int, str, int, int, str, int]] = {
    # bits, kind, exponent, digits, NumPy, ONNX
    "float64": (64, "float", 11, 53, "float64", 11),
    "float32": (32, "float", 8, 24, "float32", 1),
    "tf32": (32, "float", 8, 11, "float32", 0),  # what Tensor Cores make of float32: 19 of its bits count
    "float16": (16, "float", 5, 11, "float16", 10),
    "bfloat16": (16, "float", 8, 8, "uint16", 16),
    "float8_e5m2": (8, "float", 5, 3, "uint8", 19),
    "float8_e4m3fn": (8, "float", 4, 4, "uint8", 17),
    "int64": (64, "int", 0, 63, "int64", 7),
    "int32": (32, "int", 0, 31, "int32", 6),
    "int16": (16, "int", 0, 15, "int16", 5),
    "int8": (8, "int", 0, 7, "int8", 3),
    "int4": (4, "int", 0, 3, "uint8", 22),
    "uint64": (64, "uint", 0, 64, "uint64", 13),
    "uint32": (32, "uint", 0, 32, "uint32", 12),
    "uint16": (16, "uint", 0, 16, "uint16", 4),
    "uint8": (8, "uint", 0, 8, "uint8", 2),
    "uint4": (4, "uint", 0, 4, "uint8", 21),
    "bool": (8, "bool", 0, 1, "bool", 9),
}


class DType(Enum):
    """A type of numbers. Its value is the name that plans and kernels' parameters call it by: NumPy's, or ml_dtypes' where NumPy
    does not have the type.

    bits      bits of memory an element; two elements of 4 bits share a byte, the first of them in its lower half
    kind      "float", "int" (two's complement), "uint" or "bool"
    exponent  a float's bits of exponent, 0 for all others
    digits    binary digits that it counts with: of a float's significand, the leading one that is not stored included; of an
              integer all bits but the sign
    numpy     the NumPy type that holds an element in memory (both elements of a byte, for 4 bits): unsigned bits where NumPy
              does not have the type
    onnx      its number among ONNX's TensorProto.DataType, 0 for one that ONNX does not have

    Floats are rounded to the nearest value, of two as near to the one with an even last digit. What is beyond the largest becomes
    infinite in those of 16 bits and more, and the largest in those of 8, as on GPUs. Integers are truncated, and saturate.
    """

    F64 = "float64"
    F32 = "float32"
    TF32 = "tf32"
    F16 = "float16"
    BF16 = "bfloat16"
    E5M2 = "float8_e5m2"
    E4M3 = "float8_e4m3fn"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    I4 = "int4"
    U64 = "uint64"
    U32 = "uint32"
    U16 = "uint16"
    U8 = "uint8"
    U4 = "uint4"
    BOOL = "bool"

    bits: int
    kind: str
    exponent: int
    digits: int
    numpy: np.dtype
    onnx: int

    def __init__(self, name: str) -> None:
        self.bits, self.kind, self.exponent, self.digits, stored, self.onnx = _ROWS[name]
        self.numpy = np.dtype(stored)
        used = {"float": self.exponent + self.digits, "int": 1 + self.digits, "uint": self.digits, "bool": 8}[self.kind]
        assert used == (19 if name == "tf32" else self.bits), f"{name}: {used} bits of {self.bits} have a meaning"
        assert self.numpy.itemsize == ceil_div(self.bits, 8), f"{name}: {self.bits} bits in NumPy's {stored}"

    @property
    def size(self) -> int:
        """Bytes an element. Raises TypeError for types of which a byte holds two."""
        if self.bits % 8:
            raise TypeError(f"an element of type {self.value} has {self.bits} bits, which are no whole bytes")
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def in_numpy(self) -> bool:
        """Whether NumPy has the type, so that its arrays hold values and not bits."""
        return self.numpy.name == self.value

    @property
    def compute(self) -> DType:
        """The type that expressions compute in when they read this one: F32, I64 or BOOL."""
        return DType.F32 if self.is_float else DType.BOOL if self is DType.BOOL else DType.I64

    @property
    def infinite(self) -> bool:
        """Whether a float's largest exponent stands for infinities and NaN alone; in E4M3 only its last value is NaN."""
        return self.is_float and self is not DType.E4M3

    @property
    def largest(self) -> float | int:
        """The largest finite value."""
        if not self.is_float:
            return (1 << self.digits) - 1
        top = (1 << self.exponent - 1) - (1 if self.infinite else 0)  # the largest exponent
        ulps = 1 if self.infinite else 2  # that the largest significand is below 2
        return math.ldexp(2.0 - ulps * self.eps, top)

    @property
    def lowest(self) -> float | int:
        """The most negative finite value."""
        return -self.largest if self.is_float else -(1 << self.digits) if self.kind == "int" else 0

    @property
    def least_normal(self) -> float:
        """The smallest positive float that has all of its digits."""
        return math.ldexp(1.0, 2 - (1 << self.exponent - 1))

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger float."""
        return math.ldexp(1.0, 1 - self.digits)


FLOAT8 = (DType.E4M3, DType.E5M2)
"""Floats of 8 bits: what products are made of, and what is between them. Nothing is computed in them, and no model gives or takes
them: it has their bits as uint8."""

ELEMENTS = tuple(t for t in DType if t not in (DType.TF32, DType.I4, DType.U4))
"""The types that a tensor's elements may have: those that kernels load and store. A model with others is refused."""
