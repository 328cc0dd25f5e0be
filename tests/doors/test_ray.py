"""Plans in Ray: a real cluster on this machine, workers that die, requests in batches. On the CPU engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.errors import InputError
from tccompile.pipeline import without_code
from tccompile.plan.file import write_plan
from tccompile.runtime.rows import Rows
from tccompile.runtime.session import Session
from tests.rewrites.common import Net

ray = pytest.importorskip("ray")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

from ray import serve  # noqa: E402

import tccompile.ray as door  # noqa: E402

IMAGES = 10_000
ROWS = 16


def network() -> onnx.ModelProto:
    """A convolution and a mean of images of 8 by 8, each by itself."""
    n = Net(x=(ROWS, 3, 8, 8))
    h = n("Relu", n("Conv", "x", n.normal(8, 3, 3, 3, scale=0.2), n.normal(8), pads=[1] * 4))
    return n.out(n("Flatten", n("GlobalAveragePool", h))).model()


def pictures(ids: np.ndarray) -> np.ndarray:
    """Of each id another image, the same every time."""
    base = np.random.default_rng(0).standard_normal((3, 8, 8)).astype(np.float32)
    return base * (1 + ids[:, None, None, None].astype(np.float32) / IMAGES)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "network.plan"
    write_plan(without_code(network(), precision="fp32"), path)
    return path


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    serve.shutdown()
    ray.shutdown()


def expected(path: Path, ids: np.ndarray) -> np.ndarray:
    rows = Rows(Session(path, "cpu"))
    return rows.run({"x": pictures(ids)})[rows.outputs[0]]


def ragged() -> np.ndarray:
    rows = np.empty(2, object)
    rows[0], rows[1] = np.zeros((3, 8, 8)), np.zeros((3, 9, 8))
    return rows


@pytest.mark.parametrize(
    "batch, why",
    [
        ({"id": np.arange(3)}, "the batch has no column 'x', which the plan takes; it has 'id'"),
        ({"x": ragged()}, "the rows of 'x' have several shapes"),
    ],
)
def test_batches_that_do_not_fit(path: Path, batch: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        door.Batches(path, device="cpu")(batch)


def test_one_that_does_not_fit_costs_the_others_nothing(path: Path) -> None:
    rows, ids = Rows(Session(path, "cpu")), np.arange(3)
    good = [{"x": image} for image in pictures(ids)]
    first, problem, *others = door._answers(rows, [good[0], {"x": np.zeros(3, np.float32)}, *good[1:]])
    assert isinstance(problem, InputError) and all(map(rows.problem, [{}, None]))
    got = np.stack([a[rows.outputs[0]] for a in (first, *others)])
    np.testing.assert_allclose(got, expected(path, ids), rtol=1e-6, atol=1e-7)


class Mortal(door.Batches):
    """Kills its own process once, in the middle of the work, where nobody has been killed yet."""

    def __init__(self, plan: Path, folder: Path) -> None:
        super().__init__(plan)
        self.folder, self.calls = folder, 0

    def __call__(self, batch):
        self.calls += 1
        (self.folder / f"{os.getpid()}").touch()
        if self.calls == 20:
            try:
                (self.folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def test_ten_thousand_images_and_a_worker_that_dies(cluster, path: Path, tmp_path: Path) -> None:
    """Each image comes out once, with its own result."""

    def with_pictures(batch):
        return {"id": batch["id"], "x": pictures(batch["id"])}

    pool = ray.data.ActorPoolStrategy(size=2)
    arguments = {"fn_constructor_args": (path, tmp_path), "batch_size": 64, "compute": pool}
    images = ray.data.range(IMAGES, override_num_blocks=20).map_batches(with_pictures, batch_size=500)
    begin = time.monotonic()
    made = images.map_batches(Mortal, **arguments).to_pandas()
    print(f"{time.monotonic() - begin:.1f} s")
    assert (tmp_path / "killed").exists()
    assert len([p for p in tmp_path.iterdir() if p.name.isdecimal()]) >= 3, "two workers, and one in the place of the killed one"
    assert sorted(made["id"]) == [*range(IMAGES)]
    (output,) = set(made.columns) - {"id"}
    got = np.stack([np.asarray(row) for row in made.sort_values("id")[output]])
    np.testing.assert_allclose(got, expected(path, np.arange(IMAGES)), rtol=1e-6, atol=1e-7)


def test_a_service_answers_in_batches(cluster, path: Path) -> None:
    handle = serve.run(door.service(path, wait=0.05), name="network", route_prefix=None)
    ids = np.arange(100)
    answers = [handle.remote({"x": image}) for image in pictures(ids)]
    bad = [handle.remote({"x": np.zeros((3, 9, 8), np.float32)}), handle.remote({"y": 1})]
    got = np.stack([next(iter(a.result(timeout_s=60).values())) for a in answers])
    np.testing.assert_allclose(got, expected(path, ids), rtol=1e-6, atol=1e-7)
    for answer, why in zip(
        bad, (r"'x' of an example is float32 \(3, 8, 8\), .* got float32 \(3, 9, 8\)", "has no 'x'"), strict=True
    ):
        with pytest.raises(Exception, match=why):
            answer.result(timeout_s=60)
