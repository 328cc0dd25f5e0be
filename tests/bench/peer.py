"""An ONNX network as a PyTorch user runs it: torch.nn.functional, fp16, channels-last, in a CUDA graph, eager or compiled.

The graph is the one that tccompile's own stages start from (constants folded), so both run the same network. What exporters
spell as several nodes is PyTorch's one function: attention, group and layer norms, activations, a product and its bias.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import torch
import torch.nn.functional as F

from tccompile import rewrites
from tccompile.load.model import load
from tccompile.rewrites.rule import Editor
from tests.networks import relative_error

COMPOSED = (
    *rewrites.movement.REWRITES,
    *rewrites.activations.REWRITES,
    *rewrites.normalization.REWRITES,
    *rewrites.attention.REWRITES,
)
"""The rewrites that find what exporters have taken apart; none that makes a network faster than its author wrote it."""


def module(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> torch.fx.GraphModule:
    """The network, in fp32 on the CPU: `.half().to("cuda", memory_format=torch.channels_last)` is what is measured."""
    graph = load(model, shapes)
    rewrites.to_fixpoint(Editor(graph), COMPOSED)
    out, root = torch.fx.Graph(), torch.nn.Module()
    values = {x.name: out.placeholder(f"x{i}") for i, x in enumerate(graph.inputs)}

    def value(tensor: gs.Tensor) -> Any:
        """What computes a tensor; a weight becomes a buffer when it is first met."""
        if tensor.name not in values:
            assert isinstance(tensor, gs.Constant), tensor.name
            values[tensor.name] = weight(tensor.values)
        return values[tensor.name]

    def weight(array: Any) -> torch.fx.Node:
        name = f"w{len(list(root.buffers()))}"
        root.register_buffer(name, torch.from_numpy(np.array(array)))
        return out.get_attr(name)

    for node in graph.nodes:
        if node.op in GATES:
            name = f"rnn{len(list(root.children()))}"
            root.add_module(name, _recurrent(node))
            result = out.call_function(operator.getitem, (out.call_module(name, (value(node.inputs[0]),)), 0))
            steps, directions, batch, hidden = node.outputs[0].shape
            apart = out.call_function(torch.reshape, (result, (steps, batch, directions, hidden)))
            values[node.outputs[0].name] = out.call_function(torch.permute, (apart, (0, 2, 1, 3)))
            continue
        if node.op == "MatMul" and isinstance(node.inputs[1], gs.Constant) and len(node.inputs[1].shape) == 2:
            call: Call = (F.linear, (value(node.inputs[0]), weight(node.inputs[1].values.T)), {})
        else:
            call = OPS[node.op](node, value)
        function, arguments, options = call
        if function is torch.mul and (silu := _silu(arguments)) is not None:
            function, arguments = F.silu, (silu,)
        elif function is torch.add and (biased := _biased(arguments, root)) is not None:
            function, arguments = F.linear, biased
        values[node.outputs[0].name] = out.call_function(function, arguments, options)
    out.output(tuple(values[y.name] for y in graph.outputs))
    network = torch.fx.GraphModule(root, out)
    network.graph.eliminate_dead_code()  # sigmoids that became part of a silu, products of what has a bias
    network.recompile()
    return network


def _silu(arguments: tuple) -> Any:
    """x, if the factors are x and sigmoid(x)."""
    for x, y in (arguments, arguments[::-1]):
        if isinstance(y, torch.fx.Node) and y.target is torch.sigmoid and y.args == (x,):
            return x
    return None


def _biased(arguments: tuple, root: torch.nn.Module) -> tuple | None:
    """x, w and b, if this is linear(x, w) + b, b a vector."""
    for x, b in (arguments, arguments[::-1]):
        product = isinstance(x, torch.fx.Node) and x.target is F.linear and len(x.args) == 2
        if product and b.op == "get_attr" and root.get_buffer(b.target).dim() == 1:
            return *x.args, b
    return None


GATES = {"GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
"""Of PyTorch's gates, their places among ONNX's."""


def _recurrent(node: gs.Node) -> torch.nn.Module:
    """A layer of PyTorch's with the node's weights, from a state of zeros."""
    _, w, r, b, lengths, *states = node.inputs
    assert not lengths.name and not any(state.values.any() for state in states)
    assert node.op == "LSTM" or node.attrs["linear_before_reset"] == 1
    layer = getattr(torch.nn, node.op)(w.shape[2], node.attrs["hidden_size"], bidirectional=w.shape[0] == 2)

    def gates(array: np.ndarray) -> torch.Tensor:
        parts = np.split(array, len(GATES[node.op]))
        return torch.from_numpy(np.concatenate([parts[i] for i in GATES[node.op]]))

    with torch.no_grad():
        for direction, suffix in zip(range(w.shape[0]), ("", "_reverse"), strict=False):
            for kind, arrays in (("weight", (w.values, r.values)), ("bias", np.split(b.values, 2, axis=1))):
                for side, array in zip(("ih", "hh"), arrays, strict=True):
                    getattr(layer, f"{kind}_{side}_l0{suffix}").copy_(gates(array[direction]))
    return layer


# --- The ops that the networks have --------------------------------------------------------------------------------------

Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
Value = Callable[[gs.Tensor], Any]


def _conv(node: gs.Node, value: Value) -> Call:
    strides, dilations, groups, padding = _windows(node)
    function = F.conv2d if node.op == "Conv" else F.conv_transpose2d
    options = {"stride": strides, "padding": padding, "dilation": dilations, "groups": groups}
    assert not any(node.attrs.get("output_padding", ()))
    return function, tuple(map(value, node.inputs)), options


def _windows(node: gs.Node) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    """Strides, dilations, groups, and padding, which must be the same on both sides."""
    attrs = node.attrs
    assert attrs.get("auto_pad", "NOTSET") == "NOTSET"
    pads = tuple(attrs.get("pads", (0, 0, 0, 0)))
    assert pads[:2] == pads[2:], (node.name, pads)
    return tuple(attrs.get("strides", (1, 1))), tuple(attrs.get("dilations", (1, 1))), attrs.get("group", 1), pads[:2]


def _pool(node: gs.Node, value: Value) -> Call:
    strides, dilations, _, padding = _windows(node)
    options: dict[str, Any] = {"kernel_size": tuple(node.attrs["kernel_shape"]), "stride": strides, "padding": padding}
    options["ceil_mode"] = bool(node.attrs.get("ceil_mode", 0))
    if node.op == "MaxPool":
        return F.max_pool2d, (value(node.inputs[0]),), options | {"dilation": dilations}
    assert dilations == (1, 1)
    return F.avg_pool2d, (value(node.inputs[0]),), options | {"count_include_pad": bool(node.attrs.get("count_include_pad", 0))}


def _gemm(node: gs.Node, value: Value) -> Call:
    attrs = node.attrs
    assert (attrs.get("alpha", 1.0), attrs.get("beta", 1.0), attrs.get("transA", 0), attrs.get("transB", 0)) == (1.0, 1.0, 0, 1)
    return F.linear, tuple(map(value, node.inputs)), {}


def _clip(node: gs.Node, value: Value) -> Call:
    low, high = (float(t.values) for t in node.inputs[1:])
    return (
        (F.relu6, (value(node.inputs[0]),), {})
        if (low, high) == (0, 6)
        else (torch.clamp, (value(node.inputs[0]), low, high), {})
    )


def _resize(node: gs.Node, value: Value) -> Call:
    """Of images to whole multiples, by the nearest pixel: all that the networks have."""
    attrs, (x, y) = node.attrs, (node.inputs[0], node.outputs[0])
    assert attrs["mode"] == "nearest" and all(n % m == 0 for n, m in zip(y.shape, x.shape, strict=True))
    return F.interpolate, (value(x),), {"size": tuple(y.shape[2:]), "mode": "nearest"}


def _pad(node: gs.Node, value: Value) -> Call:
    pads = node.inputs[1].values.tolist()
    assert pads[:2] == pads[4:6] == [0, 0]
    return F.pad, (value(node.inputs[0]), (pads[3], pads[7], pads[2], pads[6])), {"mode": node.attrs["mode"]}


def _instance_norm(node: gs.Node, value: Value) -> Call:
    x, scale, bias = map(value, node.inputs)
    return F.instance_norm, (x,), {"weight": scale, "bias": bias, "eps": node.attrs["epsilon"]}


def _batch_norm(node: gs.Node, value: Value) -> Call:
    x, scale, bias, mean, variance = map(value, node.inputs)
    return F.batch_norm, (x, mean, variance, scale, bias), {"eps": node.attrs["epsilon"]}


def _mean(node: gs.Node, value: Value) -> Call:
    axes = tuple(node.inputs[1].values.tolist()) if len(node.inputs) > 1 else (2, 3)  # else it is GlobalAveragePool
    return torch.mean, (value(node.inputs[0]), axes), {"keepdim": bool(node.attrs.get("keepdims", 1))}


def _depth_to_space(node: gs.Node, value: Value) -> Call:
    assert node.attrs["mode"] == "CRD"
    return F.pixel_shuffle, (value(node.inputs[0]), node.attrs["blocksize"]), {}


def _attention(node: gs.Node, value: Value) -> Call:
    q, k, v, *mask = map(value, node.inputs)
    assert len(mask) <= 1 and len(node.outputs) == 1 and node.inputs[0].shape[1] == node.inputs[1].shape[1]
    options = {"attn_mask": mask[0] if mask else None, "is_causal": bool(node.attrs["is_causal"]), "scale": node.attrs["scale"]}
    return F.scaled_dot_product_attention, (q, k, v), options


def _layer_norm(node: gs.Node, value: Value) -> Call:
    x, *parameters = node.inputs
    return F.layer_norm, (value(x), tuple(x.shape[node.attrs["axis"] :]), *map(value, parameters), node.attrs["epsilon"]), {}


def _group_norm(node: gs.Node, value: Value) -> Call:
    x, scale, bias = map(value, node.inputs)
    return F.group_norm, (x, node.attrs["num_groups"], scale, bias, node.attrs["epsilon"]), {}


def _slice(node: gs.Node, value: Value) -> Call:
    starts, ends, axes, *steps = (t.values.tolist() for t in node.inputs[1:])
    parts = [slice(None)] * len(node.inputs[0].shape)
    for axis, start, end, step in zip(axes, starts, ends, steps[0] if steps else [1] * len(axes), strict=True):
        parts[axis] = slice(start, min(end, 2**31), step)
    return operator.getitem, (value(node.inputs[0]), tuple(parts)), {}


def _gather(node: gs.Node, value: Value) -> Call:
    data, index = node.inputs
    if isinstance(index, gs.Constant):
        assert index.shape == ()
        return torch.select, (value(data), node.attrs["axis"], int(index.values)), {}
    assert node.attrs.get("axis", 0) == 0
    return F.embedding, (value(index), value(data)), {}


def _cast(node: gs.Node, value: Value) -> Call:
    """To a float: to the network's, whichever that is when it runs."""
    assert node.attrs["to"] == onnx.TensorProto.FLOAT
    like = gs.Constant(f"{node.outputs[0].name} type", np.zeros(1, np.float32))
    return torch.Tensor.type_as, (value(node.inputs[0]), value(like)), {}


def _plain(function: Callable[..., Any], **options: str) -> Callable[[gs.Node, Value], Call]:
    """A function of the node's inputs; `options` names the attributes that its keywords take."""

    def convert(node: gs.Node, value: Value) -> Call:
        return function, tuple(map(value, node.inputs)), {k: node.attrs[a] for k, a in options.items()}

    return convert


OPS: dict[str, Callable[[gs.Node, Value], Call]] = {
    "Add": _plain(torch.add),
    "Attention": _attention,
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda node, value: (torch.cat, (tuple(map(value, node.inputs)), node.attrs["axis"]), {}),
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Cos": _plain(torch.cos),
    "DepthToSpace": _depth_to_space,
    "Div": _plain(torch.div),
    "Flatten": lambda node, value: (torch.flatten, (value(node.inputs[0]), node.attrs["axis"]), {}),
    "Gather": _gather,
    "Gelu": _plain(F.gelu, approximate="approximate"),
    "Gemm": _gemm,
    "GlobalAveragePool": _mean,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _plain(F.leaky_relu, negative_slope="alpha"),
    "LogSoftmax": lambda node, value: (F.log_softmax, (value(node.inputs[0]), node.attrs["axis"]), {}),
    "MatMul": _plain(torch.matmul),
    "MaxPool": _pool,
    "Mul": _plain(torch.mul),
    "Pad": _pad,
    "ReduceMean": _mean,
    "Relu": _plain(F.relu),
    "Reshape": lambda node, value: (torch.reshape, (value(node.inputs[0]), tuple(node.outputs[0].shape)), {}),
    "Resize": _resize,
    "Sigmoid": _plain(torch.sigmoid),
    "Sin": _plain(torch.sin),
    "Slice": _slice,
    "Sub": _plain(torch.sub),
    "Tanh": _plain(torch.tanh),
    "Transpose": lambda node, value: (torch.permute, (value(node.inputs[0]), tuple(node.attrs["perm"])), {}),
}


# --- The same network ----------------------------------------------------------------------------------------------------


def check_same(network: torch.nn.Module, inputs: Sequence[np.ndarray], expected: Iterable[np.ndarray]) -> None:
    """Hold the network to ONNX Runtime's outputs in fp32, on the CPU. Raises ValueError if it computes something else."""
    rounded = any(x.dtype == np.float16 for x in inputs)  # as are its weights then
    with torch.no_grad():
        got = network.float()(*(torch.from_numpy(x.astype(np.float32) if x.dtype == np.float16 else x) for x in inputs))
    for y, ref in zip(got, expected, strict=True):
        error = relative_error(y.numpy(), ref)
        if not error < (3e-3 if rounded else 1e-5):
            raise ValueError(f"PyTorch would run another network: {error:.1e} off in fp32")


# --- Measuring -----------------------------------------------------------------------------------------------------------


def measure(
    network: Callable[..., Any], inputs: list[torch.Tensor], replays: int = 200
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Median milliseconds of an inference, by events around replays of its CUDA graph; and its outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):  # cuDNN chooses algorithms, the compiler compiles
            network(*inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = network(*inputs)
        for _ in range(10):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        stream.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in events])), outputs


def measure_peers(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    compiled: bool,
) -> dict[str, Any]:
    """Milliseconds of PyTorch "eager" and, if asked for, "compiled" (torch.compile), and the outputs in fp32, by name.

    What the model's outputs are expected to be says whether the network is the same.
    Inputs are fp16 and channels-last before the measurement begins: what PyTorch runs fastest on.
    """
    torch.backends.cudnn.benchmark = True
    names = [x.name for x in load(model, shapes).inputs]
    network = module(model, shapes)
    check_same(network, [feeds[n] for n in names], expected.values())
    inputs = []
    for n in names:
        x = torch.from_numpy(feeds[n]).cuda()
        x = x.half() if x.is_floating_point() else x
        inputs.append(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
    network = network.half().cuda()
    for name, weight in network.named_buffers():
        if weight.dim() == 4:
            setattr(network, name, weight.contiguous(memory_format=torch.channels_last))
    eager, outputs = measure(network, inputs)
    out: dict[str, Any] = {"eager": eager, "outputs": [y.float().cpu().numpy() for y in outputs]}
    if compiled:
        torch._dynamo.reset()
        out["compiled"], _ = measure(torch.compile(network), inputs)
    return out
