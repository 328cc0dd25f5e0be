"""The ops, each in a file of its own: what it is, what it asks of a plan from a file, what it means, and what it costs."""

from __future__ import annotations

from tccompile.ir.ops.attention import Attention
from tccompile.ir.ops.carry import Carry
from tccompile.ir.ops.conv import Conv
from tccompile.ir.ops.cumulate import Cumulate
from tccompile.ir.ops.custom import Custom
from tccompile.ir.ops.gemm import Gemm
from tccompile.ir.ops.mlp import Mlp
from tccompile.ir.ops.norm import Norm
from tccompile.ir.ops.op import Op
from tccompile.ir.ops.places import Places
from tccompile.ir.ops.pointwise import Pointwise
from tccompile.ir.ops.pool import Pool
from tccompile.ir.ops.reduce import Reduce
from tccompile.ir.ops.resize import Resize
from tccompile.ir.ops.rnn import Rnn
from tccompile.ir.ops.scatter import Scatter
from tccompile.ir.ops.softmax import Softmax
from tccompile.ir.ops.suppress import Suppress
from tccompile.ir.ops.top_k import TopK
from tccompile.ir.ops.trees import Trees

__all__ = [
    "OPS",
    "Attention",
    "Carry",
    "Conv",
    "Cumulate",
    "Custom",
    "Gemm",
    "Mlp",
    "Norm",
    "Op",
    "Places",
    "Pointwise",
    "Pool",
    "Reduce",
    "Resize",
    "Rnn",
    "Scatter",
    "Softmax",
    "Suppress",
    "TopK",
    "Trees",
]

OPS: tuple[type[Op], ...] = (
    Pointwise, Conv, Gemm, Mlp, Attention, Cumulate, Places, TopK, Suppress, Scatter, Trees,
    Pool, Reduce, Softmax, Norm, Resize, Rnn, Custom, Carry,
)  # fmt: skip
"""All of them. Plans call them by their classes' names."""
