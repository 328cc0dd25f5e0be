"""Heads of Attention: how large they are, and whether it is one op."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from tccompile.ir.extent import possible

MOST = 256
"""Elements of a head up to which attention is one op. Beyond, scores take less time through memory than to compute again."""


def sizes(node: gs.Node) -> tuple[int, int]:
    """Elements of a head of q and k, and of one of v."""
    q, _, v = node.inputs[:3]
    if len(q.shape) == 4:
        return q.shape[3], v.shape[3]
    return q.shape[2] // int(node.attrs["q_num_heads"]), v.shape[2] // int(node.attrs["kv_num_heads"])


def is_one_op(node: gs.Node) -> bool:
    """Whether Attention is lowered to the op of that name, and not to its parts."""
    return not node.attrs.get("softcap", 0.0) and possible(f"{node.outputs[0].name} as one op", max(sizes(node)) <= MOST)
