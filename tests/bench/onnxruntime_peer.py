"""ONNX Runtime's CUDA provider beside tccompile: the same network in fp16, by ONNX Runtime's own converter.

Times are of whole calls by the wall clock, inputs and outputs on the device: a replay of one CUDA graph where the provider takes
the whole network, and the wait for it, 10 to 20 µs more than events around it would say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import onnx

PROVIDER = "CUDAExecutionProvider"


def is_installed() -> bool:
    """Whether there is an ONNX Runtime that runs on GPUs."""
    try:
        import onnxruntime
    except ImportError:
        return False
    return PROVIDER in onnxruntime.get_available_providers()


def measure_onnxruntime(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    provider: str = PROVIDER,
    device: str = "cuda",
    calls: int = 200,
) -> tuple[float, dict[str, np.ndarray]]:
    """Median milliseconds of an inference, and its outputs. `expected` has the outputs' shapes and types, fp32 for fp16.

    Raises what ONNX Runtime raises for a network that it does not run.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(model).SerializeToString()
    graphs = ({"enable_cuda_graph": "1"}, {}) if provider == PROVIDER else ({},)
    for options in graphs:
        try:
            return _measured(half, {n: _half(x) for n, x in feeds.items()}, expected, (provider, options), device, calls)
        except Exception:
            if options is graphs[-1]:
                raise
    raise AssertionError("there is always one without a graph")


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16) if x.dtype == np.float32 else x


def _measured(
    model: bytes,
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    provider: tuple[str, Mapping[str, str]],
    device: str,
    calls: int,
) -> tuple[float, dict[str, np.ndarray]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=[provider])
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x, device, 0))
    for y in session.get_outputs():  # a CUDA graph needs them where they were when it was captured
        of = expected[y.name]
        kind = np.float16 if of.dtype == np.float32 else of.dtype
        binding.bind_ortvalue_output(y.name, onnxruntime.OrtValue.ortvalue_from_shape_and_type(of.shape, kind, device, 0))
    times = []
    for _ in range(10 + calls):
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append((time.perf_counter() - begin) * 1e3)
    outputs = dict(zip((y.name for y in session.get_outputs()), binding.copy_outputs_to_cpu(), strict=True))
    return float(np.median(times[10:])), outputs
