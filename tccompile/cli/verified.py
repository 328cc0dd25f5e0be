"""What commands with --verify share: which errors they allow, and how they print what was compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tccompile.cli.command import fail
from tccompile.errors import VerificationError
from tccompile.terminal import json_text, say

if TYPE_CHECKING:
    from tccompile.verify.oracle import Verification

TOLERANCE = {"mixed": 1e-2, "fp16": 1e-2, "bf16": 5e-2, "fp32": 1e-4}
"""The relative error of an output that --verify allows, by precision; of what is quantized it is what --quantize was allowed."""


def print_verification(
    verification: Verification,
    as_json: bool,
    quiet: bool,
    way_out: str = "",
) -> int:
    """Print each output's error, and each tensor's if they were compared; the exit code."""
    from tccompile.verify.certificate import results_text
    from tccompile.verify.oracle import layers_text

    if as_json:
        say(json_text(verification.to_json()))
    elif not quiet or not verification.passed:
        if verification.layers:
            say(layers_text(verification.layers))
        say(results_text(verification.results))
    if verification.passed:
        return 0
    own = any(c.oracle.startswith("NumPy") for c in verification.plan.certificates)
    fail(f"the plan differs from {'the references' if own else 'ONNX Runtime'}, and was not written: {way_out}")
    return VerificationError.exit_code
