"""A plan in a real Triton Inference Server, asked over HTTP and gRPC; the server is that of the wheel nvidia-pytriton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.doors.server import serving

MODELS = ("rows", "range", "product")
PLANS = os.environ.get("TCCOMPILE_TRITON_PLANS")
"""A folder that tests/doors/triton_plans.py has written, where this interpreter has no compiler."""

if find_spec("pytriton") is None or find_spec("tritonclient") is None:
    pytest.skip("needs nvidia-pytriton and tritonclient", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The HTTP and the gRPC port of a server with models of rows, in two entries' sizes and in a range, and one without rows."""
    folder = tmp_path_factory.mktemp("triton")
    plans = Path(PLANS) if PLANS else folder
    if not PLANS:
        from tests.doors.triton_plans import write

        write(folder)
    from tccompile.triton import write_repository

    for name in MODELS:
        write_repository(plans / f"{name}.plan", folder / "repository", name, cpu=True, wait_us=20_000)
    with serving(folder / "repository", folder, MODELS) as started:
        yield started.http, started.grpc


def asked(kind: str, ports: tuple[int, int], model: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The only output, by one of the protocols."""
    import tritonclient.grpc
    import tritonclient.http

    library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[kind]
    with library.InferenceServerClient(f"127.0.0.1:{ports[kind == 'grpc']}") as client:
        values = [library.InferInput(n, list(x.shape), {"float32": "FP32"}[x.dtype.name]) for n, x in feeds.items()]
        for value, x in zip(values, feeds.values(), strict=True):
            value.set_data_from_numpy(x)
        found = client.infer(model, values)
        (output,) = client.get_model_metadata(model, **({"as_json": True} if kind == "grpc" else {}))["outputs"]
        return found.as_numpy(output["name"])


def expected(model: str, feeds: dict[str, np.ndarray], server_plans: Path) -> np.ndarray:
    from tccompile.runtime.rows import Rows
    from tccompile.runtime.session import Session

    session = Session(server_plans / f"{model}.plan", "cpu")
    return session.run(None, feeds)[0] if model == "product" else next(iter(Rows(session).run(feeds).values()))


@pytest.fixture(scope="module")
def plans(server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PLANS:
        return Path(PLANS)
    from tests.doors.triton_plans import write

    return write(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize("model, count", [("rows", 1), ("rows", 3), ("rows", 8), ("range", 1), ("range", 7), ("range", 24)])
def test_rows(server: tuple[int, int], plans: Path, kind: str, model: str, count: int) -> None:
    x = {"x": np.random.default_rng(count).standard_normal((count, 3, 8, 8)).astype(np.float32)}
    np.testing.assert_allclose(asked(kind, server, model, x), expected(model, x, plans), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_plan_without_rows(server: tuple[int, int], plans: Path, kind: str) -> None:
    rng = np.random.default_rng(7)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (4, 3)), ("y", (3, 2)))}
    np.testing.assert_allclose(asked(kind, server, "product", feeds), expected("product", feeds, plans), rtol=1e-6, atol=1e-7)


def test_many_at_once(server: tuple[int, int], plans: Path) -> None:
    xs = [np.random.default_rng(i).standard_normal((1 + i % 3, 3, 8, 8)).astype(np.float32) for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda x: asked("grpc", server, "rows", {"x": x}), xs))
    for x, y in zip(xs, got, strict=True):
        np.testing.assert_allclose(y, expected("rows", {"x": x}, plans), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "feeds, why",
    [
        ({"x": np.zeros((1, 3, 9, 8), np.float32)}, "unexpected shape for input 'x'"),
        ({"x": np.zeros((9, 3, 8, 8), np.float32)}, "batch-size must be <= 8"),
    ],
)
def test_requests_that_do_not_fit(server: tuple[int, int], feeds: dict, why: str) -> None:
    with pytest.raises(Exception, match=why):
        asked("http", server, "rows", feeds)
