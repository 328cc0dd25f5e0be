"""Infinities and NaN where there should be numbers, and which step wrote them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tccompile.errors import VerificationError
from tccompile.ir.extent import ceil_div
from tccompile.ir.ops import Op
from tccompile.ir.storage import from_storage
from tccompile.ir.tensor import Storage, Tensor, factor_text
from tccompile.ir.types import DType
from tccompile.runtime.driver import Device, Handle, Memory

PTX = Path(__file__).with_name("finite.ptx")
"""The code of `Scan`, which kernels/finite.py explains; `python -m tccompile.emit.finite` writes it."""

ENTRY, THREADS, BLOCKS = b"tc_finite", 256, 8
"""The code's entry, the threads of its blocks, and how many blocks a multiprocessor gets."""

EXPONENTS = {
    DType.F16: (0x7C00, 0x7C000000, 0),
    DType.BF16: (0x7F80, 0x7F800000, 0),
    DType.F32: (0x7F800000, 0x7F800000, 0),
    DType.F64: (0x7FF00000, 0x7FF00000, 1),
}
"""By type: the exponent's bits in a word of 32 bits, of an element in its lower and in its upper half; whether elements are pairs
of words, the exponent in the second."""


class Scan:
    """Looks for infinities and NaN in arrays on a device, where they lie; 4 bytes come back for each array.

    Made once for a device's engine: the driver compiles the kernel then. Raises LaunchError if the driver refuses it.
    """

    def __init__(self, device: Device, names: list[str]) -> None:
        self.device, self.names = device, names
        with device as cu:
            self._module = Handle(device, cu.cuModuleLoadData(PTX.read_bytes() + b"\0"), "cuModuleUnload")
            self._function = cu.cuModuleGetFunction(self._module.value, ENTRY)
        self._flags = Memory(device, 4 * len(names), "a check for infinities")

    def wrong(self, tensors: Mapping[str, Tensor], addresses: Mapping[str, int], stream: int) -> list[str]:
        """Those of its names whose tensors hold what is not finite, after all that is queued on the stream.

        addresses  of the tensors' first elements, multiples of 16 bytes; their elements lie one after the other
        """
        found = np.zeros(len(self.names), np.int32)
        with self.device as cu:
            cu.cuMemsetD8Async(self._flags.address, 0, found.nbytes, stream)
            for number, name in enumerate(self.names):
                t = tensors[name]
                if not t.dtype.is_float or not t.nbytes:
                    continue
                low, high, pairs = EXPONENTS[t.dtype]
                flag, vectors = self._flags.address + 4 * number, t.nbytes // 16
                blocks = min(max(ceil_div(vectors, THREADS), 1), BLOCKS * self.device.multiprocessors)
                values = (addresses[name], vectors, t.nbytes % 16, low, high, pairs, flag)
                cu.cuLaunchKernel(self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, KINDS), 0)
            cu.cuMemcpyDtoHAsync(found.ctypes.data, self._flags.address, found.nbytes, stream)
            cu.cuStreamSynchronize(stream)
        return [name for name, flag in zip(self.names, found, strict=True) if flag]


KINDS = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64)
"""Of the kernel's parameters."""


def is_finite(tensor: Tensor, stored: np.ndarray) -> bool:
    """Whether all elements of a tensor, as they are stored, are numbers; integers always are."""
    return not tensor.dtype.is_float or bool(np.isfinite(from_storage(stored, tensor.dtype)).all())


def check_finite(op: Op, tensor: Tensor, stored: np.ndarray, values: Callable[[], np.ndarray], storage: Storage | None) -> None:
    """Raises VerificationError, with the user's node, if what the op wrote holds an infinity or a NaN.

    values  gives what it computes, ahead of rounding to the tensor's type
    """
    if is_finite(tensor, stored):
        return
    exact = values()
    finite = exact[np.isfinite(exact)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    what = "NaN" if np.isnan(from_storage(stored, tensor.dtype)).any() else "an infinity"
    where = f"node {op.nodes[0]!r} writes {what} into {tensor.name!r} {tensor.shape} {tensor.dtype.value}"
    if tensor.dtype is DType.F16 and largest > 65504:
        scale = storage.scale if storage else 1.0
        end = f"float16 {f'times {factor_text(1.0 / scale)} ' if scale != 1.0 else ''}ends at {65504 / scale:.6g}"
        way = f"its largest magnitude is {largest / scale:.4g}, {end}: compile with --calibrate INPUT, or --precision fp32"
    else:
        way = f"its largest finite magnitude is {largest:.4g}: the model itself computes it, or an input holds it"
    raise VerificationError(f"{where}; {way}")
