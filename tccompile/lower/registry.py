"""How each ONNX op becomes typed ops: one converter an op, one file a family."""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from tccompile.lower import (
    attention,
    conv,
    counted,
    fourier,
    linear,
    lines,
    loops,
    movement,
    norm,
    pointwise,
    pool,
    positions,
    quantized,
    reduce,
    resize,
    rnn,
    sample,
    trees,
)
from tccompile.lower.builder import Builder

Converter = Callable[[gs.Node, Builder], None]

CONVERTERS: dict[str, Converter] = {
    "Conv": conv.conv,
    "ConvTranspose": conv.conv_transpose,
    "Gemm": linear.gemm,
    "MatMul": linear.matmul,
    "Det": linear.determinant,
    "Attention": attention.attention,
    "MaxPool": pool.max_pool,
    "MaxUnpool": pool.max_unpool,
    "AveragePool": pool.average_pool,
    "LpPool": pool.lp_pool,
    "GlobalLpPool": reduce.global_lp_pool,
    "GlobalAveragePool": reduce.global_pool,
    "GlobalMaxPool": reduce.global_pool,
    **{op: reduce.reduce for op in reduce.REDUCTIONS if op.startswith("Reduce")},
    **dict.fromkeys(("ArgMax", "ArgMin"), reduce.arg),
    "ReduceLogSumExp": reduce.reduce_log_sum_exp,
    "Softmax": reduce.softmax,
    "LogSoftmax": reduce.softmax,
    "BatchNormalization": norm.batch_normalization,
    "InstanceNormalization": norm.instance_normalization,
    "GroupNormalization": norm.group_normalization,
    "LayerNormalization": norm.layer_normalization,
    "RMSNormalization": norm.rms_normalization,
    "LRN": norm.lrn,
    "Identity": movement.copy,
    "Dropout": movement.dropout,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), movement.reshape),
    "Transpose": movement.transpose,
    "Slice": movement.slice_,
    "Gather": movement.gather,
    "GatherElements": movement.gather_elements,
    "GatherND": movement.gather_nd,
    "ScatterND": movement.scatter_nd,
    "ScatterElements": lines.scatter_elements,
    **dict.fromkeys(("CumSum", "CumProd"), lines.cumulative),
    "TopK": lines.top_k,
    "Compress": movement.compress,
    "ReverseSequence": movement.reverse_sequence,
    "TensorScatter": movement.tensor_scatter,
    "OneHot": pointwise.one_hot,
    "Hardmax": reduce.hardmax,
    "LpNormalization": reduce.lp_normalization,
    "AffineGrid": sample.affine_grid,
    "GridSample": sample.grid_sample,
    "RoiAlign": sample.roi_align,
    "DeformConv": sample.deform_conv,
    "Col2Im": sample.col2im,
    "DFT": fourier.dft,
    "STFT": fourier.stft,
    "Split": movement.split,
    "Concat": movement.concat,
    "Expand": movement.expand,
    "Tile": movement.tile,
    "Pad": movement.pad,
    "DepthToSpace": movement.depth_to_space,
    "SpaceToDepth": movement.space_to_depth,
    "Resize": resize.resize,
    **dict.fromkeys(("RNN", "GRU", "LSTM"), rnn.rnn),
    "QuantizeLinear": quantized.quantize,
    "DequantizeLinear": quantized.dequantize,
    "ConvInteger": quantized.conv_integer,
    "MatMulInteger": quantized.matmul_integer,
    "QLinearConv": quantized.qlinear_conv,
    "QLinearMatMul": quantized.qlinear_matmul,
    **dict.fromkeys(pointwise.FLOAT, pointwise.float_function),
    **dict.fromkeys(pointwise.ANY, pointwise.any_type),
    "Gelu": pointwise.gelu,
    "Swish": pointwise.swish,
    "Clip": pointwise.clip,
    "Pow": pointwise.pow_,
    "Mod": pointwise.mod,
    "IsInf": pointwise.is_inf,
    "BitShift": pointwise.bit_shift,
    **dict.fromkeys(("Cast", "CastLike"), pointwise.cast_to),
    "Trilu": pointwise.trilu,
    "Range": positions.range_,
}
"""By ONNX op, at the opset that `load` gives."""

CLASSICAL: dict[str, Converter] = {
    "TreeEnsemble": trees.tree_ensemble,
    "TreeEnsembleRegressor": trees.tree_ensemble_regressor,
}
"""By op of ai.onnx.ml: those that `load` does not take apart."""

COUNTED: dict[str, Converter] = {
    "Carry": loops.carry,
    "Counted": counted.counted,
    "GatherEach": movement.gather_each,
    "Pick": loops.pick,
    "Places": counted.places,
    "Suppress": counted.suppress,
}
"""By op of `load.sizes.OWN`."""
