"""Measured constants of GPUs: one file for each GPU that was measured, in the form that `rate.py` states.

What a datasheet says of a generation is `tccompile.arch.Arch`: multiprocessors, clocks and bandwidth. Cost models take what grows
with these from there, and from here what only a measurement tells. A generation that nobody measured has the H200's numbers as
they are: cycles, latencies and shares are taken to be alike, and nothing is scaled.
"""

from collections.abc import Mapping

from tccompile.arch import Arch
from tccompile.kernels.rates.h200 import H200
from tccompile.kernels.rates.rate import Rates

MEASURED: Mapping[str, Rates] = {"sm_90a": H200}
"""By the generation's name."""


def measured(arch: Arch) -> Rates:
    """What was measured on a GPU of the generation, or else on an H200."""
    return MEASURED.get(arch.name, H200)
