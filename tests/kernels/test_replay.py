"""Steps of networks by the code of their kernels: the geometries, layouts and epilogues that networks have."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tests.kernels import replay
from tests.networks import feeds, skeleton
from tests.plans import without_code
from tests.test_exporters import NETWORKS
from tests.tiers import usually


def steps(name: str, arch: str, precision: str) -> list[replay.Step]:
    shapes, _ = NETWORKS[name]
    model = skeleton(f"more/{name}")
    given = feeds(model, 1, shapes)
    plan = without_code(model, (arch,), {n: x.shape for n, x in given.items()}, precision)
    return list(replay.replay(plan, given, ARCHS[arch]))


@pytest.mark.parametrize(
    "name, arch, precision",
    usually(
        [("blazeface", "sm_90a", "mixed"), ("retinanet_head", "sm_75", "mixed"), ("unet_bicubic_opset11", "sm_61", "fp32")], 0
    ),
)
def test_network(name: str, arch: str, precision: str) -> None:
    found = steps(name, arch, precision)
    assert found and not [s for s in found if s.problem]


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one element in a thousand"""
    correct = replay.compute

    def wrong(*args):
        out = correct(*args).copy()
        out.reshape(-1)[::1000] += 1
        return out

    monkeypatch.setattr(replay, "compute", wrong)
    assert [s for s in steps("blazeface", "sm_90a", "fp32") if s.problem and "off" in s.problem]
