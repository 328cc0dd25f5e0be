"""The page on custom operators: its operators and its rewrite do what they say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tccompile as tc
from tccompile.custom.files import Rewriting
from tests.custom.common import EXAMPLE, normal, run
from tests.networks import relative_error
from tests.rewrites.common import Net

TEXT = (EXAMPLE.parents[1] / "guide" / "custom-operators.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's blocks of Python define, but for those that leave something out."""
    blocks = [b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "..." not in b and "tc." in b]
    path, scope = tmp_path_factory.mktemp("page") / "page.py", {"tc": tc, "np": np}
    path.write_text("\n".join(blocks))
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def test_its_elementwise_operator(said: dict[str, Any]) -> None:
    net, x = Net(x=(1, 3, 8, 6)), normal(1, 3, 8, 6)
    (out,) = run(net.out(net("Vignette", "x", domain="acme", strength=0.25)), {"x": x}, said["vignette"], precision="fp32")
    p, q = np.arange(8)[:, None] / 8 - 0.5, np.arange(6) / 6 - 0.5
    assert relative_error(out, x * (1 - 0.25 * (p * p + q * q))) < 1e-6


def test_its_operator_with_a_kernel(said: dict[str, Any]) -> None:
    net, x, w = Net(x=(4, 6)), normal(4, 6), normal(6, 5, seed=2)
    (out,) = run(net.out(net("Foo", "x", w, domain="acme", n=3)), {"x": x}, said["foo"])
    assert relative_error(out, np.maximum(x @ w, 0) * 3) < 1e-6


def test_its_rewrite(said: dict[str, Any]) -> None:
    glow = tc.op("acme::Glow", out=lambda x, strength: x.like(), elementwise=True)(lambda x, strength: x + strength)
    net, x = Net(x=(1, 2, 3, 4)), normal(1, 2, 3, 4)
    net.out(net("Mul", net("Tanh", net("Softplus", "x")), "x"))
    assert isinstance(said["glow"], Rewriting)
    (out,) = run(net, {"x": x}, said["glow"], glow, precision="fp32")
    assert relative_error(out, x + 2) < 1e-6


def test_all_functions_are_told() -> None:
    told = set(
        re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", TEXT.split("## Elementwise operators")[1].split("**Limits.")[0])))
    )
    assert set(tc.OF_VALUES) <= told
