"""Equations on standard ONNX ops, applied until none fits any more."""

from __future__ import annotations

import onnx_graphsurgeon as gs


def rewrite(graph: gs.Graph) -> gs.Graph:
    """The graph after all rewrites: legal ONNX that computes the same."""
    return graph
