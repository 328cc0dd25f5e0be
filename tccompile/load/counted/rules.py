"""Which rule is for which operator."""

from __future__ import annotations

from collections.abc import Mapping

from tccompile.load.counted.begin import choice, compress, guard, non_max_suppression, non_zero, unique
from tccompile.load.counted.elements import (
    along_others,
    elementwise,
    flatten,
    normalized,
    padded,
    rows,
    squeeze,
    tile,
    transpose,
    unsqueeze,
)
from tccompile.load.counted.late import LATE
from tccompile.load.counted.mixing import arg, cumulative, gemm, matmul, one_hot, reduced, roi_align, scatter, softmax, top_k
from tccompile.load.counted.parts import concat, gather, gather_each, gather_elements, gather_nd, like_first, sliced, split
from tccompile.load.counted.resized import resize
from tccompile.load.counted.shapes import constant_of_shape, expand, numbers_of, range_, reshape, shape_of, size_of
from tccompile.load.sizes import Folding, Rule, Rules, Sizes

COUNTS: dict[str, tuple[Rule, tuple[int, ...]]] = {
    "Choice": (choice, ()),
    "Compress": (compress, (1,)),
    "GatherEach": (gather_each, ()),
    "Guard": (guard, ()),
    "NonMaxSuppression": (non_max_suppression, (0, 1)),
    "NonZero": (non_zero, (0,)),
    "Unique": (unique, (0,)),
}
"""Operators that make as many elements as the data say, and the inputs that say it."""


ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu",
    "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip

OF_ROWS = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "Det", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GridSample", "GroupNormalization", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "SpaceToDepth",
)  # fmt: skip

SPLIT_UP = (
    "DynamicQuantizeLinear", "MeanVarianceNormalization", "SwiGLU", "SequenceConstruct", "SequenceInsert", "SequenceAt",
    "ConcatFromSequence",
)  # fmt: skip
"""Operators that become others, which have rules."""

REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(OF_ROWS, rows),
    **{f"Reduce{kind}": reduced for kind in REDUCTIONS},
    **dict.fromkeys(("ArgMax", "ArgMin"), arg),
    **dict.fromkeys(("CumSum", "CumProd"), cumulative),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), normalized),
    **dict.fromkeys(("Hardmax", "LpNormalization"), along_others),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), like_first),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(("ScatterElements", "ScatterND"), scatter),
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Gemm": gemm,
    "MatMul": matmul,
    "OneHot": one_hot,
    "Pad": padded,
    "Range": range_,
    "Reshape": reshape,
    "Resize": resize,
    "RoiAlign": roi_align,
    "Shape": shape_of,
    "Size": size_of,
    "Slice": sliced,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
}
"""By operator, of nodes that read an axis whose extent the data decide, or a shape that does."""


def sizes(folder: Folding, limits: Mapping[str, int]) -> Sizes:
    """What handles such axes of the graph that is folded; `limits`, how much nodes find at most, where the user says it."""
    return Sizes(folder, Rules(COUNTS, RULES, SPLIT_UP, numbers_of, LATE), limits)
