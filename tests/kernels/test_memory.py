"""Loads and stores of every type in every width are PTX that assembles."""

from __future__ import annotations

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.ptx import ptx_text
from tccompile.emit.ptxas import assemble
from tccompile.ir.types import ELEMENTS
from tccompile.kernels.codegen import execute
from tccompile.kernels.spec import Function
from tests.tiers import usually


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("arch", usually(["sm_61", "sm_90a"], "sm_61"))
def test_every_type_in_every_width(arch: str, guarded: bool) -> None:
    from tccompile.kernels.ptx import memory
    from tccompile.kernels.ptx.core import types

    scope, lines = {}, []
    for dtype in ELEMENTS:
        for n in (1, 2, 4, 8):
            name = f"{dtype.name}_{n}"
            scope[f"load_{name}"], scope[f"store_{name}"] = memory.load(dtype, n, guarded), memory.store(dtype, n, guarded)
            values = ", ".join(f"{name}_{i}" for i in range(n))
            inside = ", inside" if guarded else ""
            lines += [f"    {values} = load_{name}(x{inside})", f"    store_{name}(y, {values}{inside})"]
    text = "def kernel(x, y, inside):\n" + "\n".join(lines) + "\n"
    function = execute(text, scope, "kernel")
    signature = types.void(types.int64, types.int64, types.int32)
    code, _ = assemble(ptx_text(Function(function, signature, 32), ARCHS[arch], "kernel"), arch)
    assert code
