"""When sums that Tensor Cores keep in few digits (`Atom.rough`) are added to those in fp32."""

from __future__ import annotations

from enum import Enum


class Promotion(Enum):
    """When the rough sums of a stage are added to the others in fp32."""

    OF_EACH = "once they are made"
    OF_PAIRS = "once those of two stages are made, at once"
    MEANWHILE = "while the next stage's are made"
