"""The GPU code: `KERNELS` lists every kernel family, `JOINTS` those of several ops in one launch."""

from __future__ import annotations

from tccompile.kernels.attention import AttentionKernel
from tccompile.kernels.attention_mma import AttentionMma
from tccompile.kernels.attention_sm90 import AttentionSm90
from tccompile.kernels.carry import CarryKernel
from tccompile.kernels.conv_direct import ConvDirect
from tccompile.kernels.conv_halo import ConvHalo
from tccompile.kernels.conv_patch import ConvPatch
from tccompile.kernels.conv_stem import ConvStem
from tccompile.kernels.cumulate import CumulateKernel
from tccompile.kernels.custom import CustomKernel
from tccompile.kernels.depthwise import Depthwise
from tccompile.kernels.depthwise_bytes import DepthwiseBytes
from tccompile.kernels.depthwise_bytes_sm90 import DepthwiseBytesSm90
from tccompile.kernels.depthwise_mma import DepthwiseMma
from tccompile.kernels.depthwise_sm90 import DepthwiseSm90
from tccompile.kernels.expand_sm90 import ExpandSm90
from tccompile.kernels.gemm_mma import MMA
from tccompile.kernels.gemm_simt import SIMT
from tccompile.kernels.gemm_sm90 import HOPPER
from tccompile.kernels.gemm_thin import THIN
from tccompile.kernels.gemv import GEMV
from tccompile.kernels.gemv_packed import PACKED
from tccompile.kernels.mlp import MlpKernel
from tccompile.kernels.norm import NormKernel
from tccompile.kernels.norm_split import NormSplit
from tccompile.kernels.norm_team import NormTeam
from tccompile.kernels.pair_sm90 import PairSm90
from tccompile.kernels.pointwise import PointwiseKernel
from tccompile.kernels.pool import PoolKernel
from tccompile.kernels.prologue_sm90 import PrologueSm90
from tccompile.kernels.reduce import ReduceKernel
from tccompile.kernels.resize import ResizeKernel
from tccompile.kernels.rnn import RNN
from tccompile.kernels.scan import PlacesKernel, ScanKernel
from tccompile.kernels.scatter import ScatterKernel
from tccompile.kernels.softmax import SoftmaxKernel
from tccompile.kernels.sort import SortKernel
from tccompile.kernels.spec import Family, Joint, Kernel
from tccompile.kernels.squeeze_excite import SqueezeExcite
from tccompile.kernels.suppress import SuppressKernel
from tccompile.kernels.top_k import TopKKernel
from tccompile.kernels.trees import TreesKernel

KERNELS: tuple[Kernel, ...] = (
    *HOPPER,
    *GEMV,
    *PACKED,
    *THIN,
    ConvPatch(),
    ConvHalo(),
    ConvStem(),
    DepthwiseSm90(),
    DepthwiseMma(),
    DepthwiseBytesSm90(),
    DepthwiseBytes(),
    *MMA,
    *SIMT,
    Depthwise(),
    ConvDirect(),
    MlpKernel(),
    AttentionSm90(),
    AttentionMma(),
    AttentionKernel(),
    ReduceKernel(),
    SoftmaxKernel(),
    NormKernel(),
    NormSplit(),
    NormTeam(),
    PointwiseKernel(),
    PoolKernel(),
    ResizeKernel(),
    *RNN,
    CumulateKernel(),
    ScanKernel(),
    PlacesKernel(),
    TopKKernel(),
    SortKernel(),
    SuppressKernel(),
    ScatterKernel(),
    TreesKernel(),
    CustomKernel(),
    CarryKernel(),
)


JOINTS: tuple[Joint, ...] = (PairSm90(), ExpandSm90(), PrologueSm90(), SqueezeExcite())


def kernel(name: str) -> Kernel:
    """The kernel family of that name; KeyError if there is none."""
    return {k.name: k for k in KERNELS}[name]


def joint(name: str) -> Joint | None:
    """The kernel family of several ops of that name; None if there is none."""
    return next((k for k in JOINTS if k.name == name), None)


def family(name: str) -> Family:
    """The kernel family of that name, of one op or several; KeyError if there is none."""
    return joint(name) or kernel(name)
