"""What says which extra is missing."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("module, missing", [("torch", "onnxscript"), ("ray", "ray")])
def test_a_module_whose_extra_is_not_installed(module: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"tccompile.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"{missing} is not installed: pip install 'tccompile\[{module}\]'"):
        import_module(f"tccompile.{module}")
