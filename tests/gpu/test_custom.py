"""Users' own operators in a session on a GPU, beside the CPU engine, which runs their references. Needs the compiler, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tccompile as tc
from tccompile.arch import ARCHS, PTX
from tccompile.custom.files import collected, using
from tccompile.runtime.session import Session
from tccompile.verify.certificate import selftest
from tccompile.verify.oracle import verify
from tests.custom.common import EXAMPLE, OPERATORS, model_of, normal
from tests.custom.test_kernels import example
from tests.gpu.build import known
from tests.networks import relative_error
from tests.rewrites.common import Net

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def archs(gpu) -> list[str]:
    """This GPU's own generation, and an older one whose PTX it runs."""
    own = [a.name for a in known(ARCHS.values()) if a.cc <= gpu.cc and a.cc[0] == gpu.cc[0] and (not a.suffix or a.cc == gpu.cc)]
    return [next(a.name for a in known(ARCHS.values()) if a.name in PTX), own[-1]]


def both_kinds() -> Net:
    """A network of all that operators with kernels may have: outputs of two types, working memory, shared memory."""
    net = Net(x=(5, 19))
    y, largest = net("Spread", "x", net.normal(19, 70), outputs=2, domain="test", steps=[1.5, 2.0], scale=0.5)
    value, place = net("Peak", net("Ramp", y, domain="test", low=-9, high=9.0), outputs=2, domain="test")
    return net.out(y, largest, value, place)


@pytest.mark.parametrize(
    ("net", "ops", "shape"),
    [(example(), EXAMPLE / "press.py", (1, 3, 9, 12)), (both_kinds(), OPERATORS, (5, 19))],
    ids=["example", "kernels"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_outputs_are_the_references(archs: list[str], net: Net, ops: Path, shape: tuple[int, ...], number: int) -> None:
    plan = tc.compile(model_of(net), archs=[archs[number]], ops=[ops])
    with Session(plan, "gpu") as session, Session(plan, "cpu", ops=[ops]) as reference:
        for seed in range(3):
            feeds = {"x": normal(*shape, seed=seed)}
            for got, wanted in zip(session.run(None, feeds), reference.run(None, feeds), strict=True):
                assert got.dtype == wanted.dtype and relative_error(np.asarray(got), wanted) < 2e-3


def test_a_certificate_holds_a_kernel_to_its_reference(archs: list[str]) -> None:
    model, ops = model_of(example()), [EXAMPLE / "press.py"]
    with using(collected(ops)):
        found = verify(model, tc.compile(model, archs=archs[1:], ops=ops), 2e-3)
    assert found.passed and any("CPU" not in r.device for r in found.results)
    with Session(found.plan, "gpu") as session:
        assert all(r.passed for r in selftest(found.plan, session))
