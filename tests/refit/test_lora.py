"""Adapters: the names that tools write, where they belong, and what merging them makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from tccompile.errors import UnsupportedError, UsageError
from tccompile.plan.file import from_bytes, to_bytes
from tccompile.plan.format import Exported
from tccompile.refit.lora import Adapter, merged, places, read_adapters
from tccompile.refit.names import Called
from tests.refit.common import attention, convolutions, plan_of, products, weights, write_safetensors
from tests.rewrites.common import Net

RNG = np.random.default_rng(3)
DOWN, UP = (RNG.standard_normal(s).astype(np.float32) for s in ((2, 16), (16, 2)))


def adapters(tmp_path: Path, arrays: Mapping[str, np.ndarray], config: object = None) -> list[Adapter]:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_adapters(write_safetensors(tmp_path / "adapter_model.safetensors", arrays))


# --- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "down, up, module",
    [
        ("base_model.model.l.q_proj.lora_A.weight", "base_model.model.l.q_proj.lora_B.weight", "base_model.model.l.q_proj"),
        ("base_model.model.q.lora_A.default.weight", "base_model.model.q.lora_B.default.weight", "base_model.model.q"),
        ("unet.mid.to_q.lora.down.weight", "unet.mid.to_q.lora.up.weight", "unet.mid.to_q"),
        ("lora_unet_mid_to_q.lora_down.weight", "lora_unet_mid_to_q.lora_up.weight", "lora_unet_mid_to_q"),
        ("unet.mid.to_q.lora_A.weight", "unet.mid.to_q.lora_B.weight", "unet.mid.to_q"),
    ],
)
def test_names_as_tools_write_them(tmp_path: Path, down: str, up: str, module: str) -> None:
    (found,) = adapters(tmp_path, {down: DOWN, up: UP})
    assert (found.module, found.factor) == (module, 1.0)
    np.testing.assert_array_equal(found.down, DOWN)
    np.testing.assert_array_equal(found.up, UP)


@pytest.mark.parametrize(
    "alpha, config, factor",
    [
        (None, None, 1.0),
        (np.float32(8), None, 4.0),
        (None, {"lora_alpha": 16}, 8.0),
        (None, {"lora_alpha": 16, "use_rslora": True}, 16 / 2**0.5),
        (np.float32(1), {"lora_alpha": 16}, 0.5),
        (None, {"lora_alpha": 16, "alpha_pattern": {"x": 4, "q": 6}}, 3.0),
        (None, {"lora_alpha": 16, "alpha_pattern": {"q.+": 6}}, 8.0),
    ],
)
def test_how_much_an_adapter_counts(tmp_path: Path, alpha: np.ndarray | None, config: object, factor: float) -> None:
    arrays = {"q.lora_down.weight": DOWN, "q.lora_up.weight": UP} | ({} if alpha is None else {"q.alpha": np.asarray(alpha)})
    assert adapters(tmp_path, arrays, config)[0].factor == pytest.approx(factor)


@pytest.mark.parametrize(
    "arrays, config, error, why",
    [
        ({}, None, UsageError, "holds no adapters"),
        ({"q.lora_down.weight": DOWN}, None, UsageError, "of 'q' only a part is there: down"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP.T}, None, UsageError, r"'q' is no product of up \(2, 16\) and down"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP[:, 0]}, None, UsageError, "'q' is no product"),
        (
            {"q.lora_A.weight": DOWN, "q.lora_B.weight": UP, "q.lora_magnitude": UP},
            None,
            UnsupportedError,
            "is no part of",
        ),
        ({"q.hada_w1_a": DOWN}, None, UnsupportedError, "'q.hada_w1_a' is no part of a LoRA adapter"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP, "q.alpha": UP}, None, UsageError, "the alpha of 'q' has the shape"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP, "q.alpha": np.float32(np.nan)}, None, UsageError, "is not finite"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP}, "{", UsageError, "adapter_config.json: cannot be read"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP}, {"lora_alpha": "8"}, UsageError, "no lora_alpha that is a number"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP}, {"use_dora": True}, UnsupportedError, "use_dora is True, which"),
        (
            {"q.lora_A.weight": DOWN, "q.lora_B.weight": UP},
            {"unet.init_lora_weights": "pissa"},
            UnsupportedError,
            "'pissa', which",
        ),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP}, {"peft_type": "XLORA"}, UnsupportedError, "peft_type is 'XLORA'"),
        ({"q.lora_A.weight": DOWN, "q.lora_B.weight": UP}, {"lora_alpha": 1, "alpha_pattern": {"(": 3}}, UsageError, "alpha_p"),
    ],
)
def test_what_is_no_adapter(tmp_path: Path, arrays: Mapping[str, np.ndarray], config: object, error: type, why: str) -> None:
    with pytest.raises(error, match=why):
        adapters(tmp_path, {name: np.asarray(values) for name, values in arrays.items()}, config)


@pytest.mark.parametrize(
    "config, module, factor",
    [
        ({"lora_alpha": 16}, "mid.to_q", 8.0),
        ({"unet.lora_alpha": 6, "text_encoder.lora_alpha": 2}, "unet.mid.to_q", 3.0),
        ({"unet.lora_alpha": 6, "text_encoder.lora_alpha": 2}, "text_encoder.mid.to_q", 1.0),
    ],
)
def test_what_diffusers_keeps_in_the_file(tmp_path: Path, config: dict, module: str, factor: float) -> None:
    arrays = {f"{module}.lora_A.weight": DOWN, f"{module}.lora_B.weight": UP}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    (found,) = read_adapters(write_safetensors(tmp_path / "pytorch_lora_weights.safetensors", arrays, metadata=metadata))
    assert (found.module, found.factor) == (module, factor)


# --- Where they belong -----------------------------------------------------------------------------------------------


def named(net: Net, nodes: Mapping[int, str], initializers: Mapping[int, str]) -> Net:
    """The model with names as exporters give them."""
    for i, name in nodes.items():
        net.nodes[i].name = name
    for i, name in initializers.items():
        for node in net.nodes:
            node.input[:] = [name if x == net.weights[i].name else x for x in node.input]
        net.weights[i].name = name
    return net


def exported() -> Net:
    """A Gemm whose weights keep their module's name, and a product whose weights have lost it, and lie transposed."""
    return named(
        products(),
        {0: "/layers.0/fc1/Gemm", 2: "/layers.0/fc2/MatMul"},
        {0: "layers.0.fc1.weight", 1: "layers.0.fc1.bias", 2: "onnx::MatMul_12"},
    )


@pytest.mark.parametrize(
    "module, weight, transposed",
    [
        ("base_model.model.layers.0.fc1", "layers.0.fc1.weight", False),
        ("base_model.model.model.layers.0.fc2", "onnx::MatMul_12", True),
        ("lora_unet_layers_0_fc1", "layers.0.fc1.weight", False),
        ("lora_te_layers_0_fc2", "onnx::MatMul_12", True),
        ("fc2", "onnx::MatMul_12", True),
    ],
)
def test_adapters_find_their_weights(module: str, weight: str, transposed: bool) -> None:
    model = exported().model()
    plan, base = plan_of(model), weights(model)
    made = merged(base, places([plan.entries[0].program]), [Adapter(module, DOWN, UP, 0.5)], 3.0)
    assert list(made) == [weight]
    delta = 1.5 * (UP @ DOWN)
    np.testing.assert_allclose(made[weight], base[weight] + (delta.T if transposed else delta), rtol=1e-5, atol=1e-6)
    assert made[weight].dtype == np.float32


def test_weights_that_the_model_transposes_itself() -> None:
    """As some exporters write a linear layer: the initializer lies as the module has it."""
    n = Net(x=(4, 16))
    n.out(n("MatMul", "x", n("Transpose", n.normal(16, 16), perm=[1, 0])))
    model = named(n, {1: "/fc/MatMul"}, {0: "fc.weight"}).model()
    base, known = weights(model), places([plan_of(model).entries[0].program])
    assert [(place.weight, place.transposed) for place in known] == [("fc.weight", False)]
    made = merged(base, known, [Adapter("fc", DOWN, UP, 1.0)], 1.0)
    np.testing.assert_allclose(made["fc.weight"], base["fc.weight"] + UP @ DOWN, rtol=1e-5, atol=1e-6)


def by_torch_export() -> onnx.ModelProto:
    """As PyTorch's newer exporter writes it: it says where nodes come from, not what it transposes or folds."""
    n = Net(x=(1, 16, 4, 4))
    h = n("GlobalAveragePool", n("Conv", "x", n.normal(16, 16, 1, 1, scale=0.2)))
    n.out(n("MatMul", n("Reshape", h, np.array([1, 16])), n.normal(16, 16)))
    model = named(n, {0: "node_Conv_1", 3: "node_linear"}, {0: "conv.weight", 2: "val_2"}).model()
    scopes = {0: ["", "norm", "_native_batch_norm_legit_no_training"], 3: ["", "layers.0", "layers.0.fc", "linear"]}
    for i, names in scopes.items():
        model.graph.node[i].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(names))
    return model


def test_modules_that_the_exporter_tells() -> None:
    plan = plan_of(model := by_torch_export())
    plan = from_bytes(to_bytes(plan))
    assert plan.origin.exported == Exported({"val_2": "layers.0.fc", "conv.weight": "norm"}, ("conv.weight",))
    known, base = places([plan.entries[0].program], plan.origin.exported), weights(model)
    made = merged(base, known, [Adapter("base_model.model.layers.0.fc", DOWN, UP, 1.0)], 1.0)
    np.testing.assert_allclose(made["val_2"], base["val_2"] + (UP @ DOWN).T, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match=r"'conv' is for 'conv.weight', which is not that module's alone"):
        merged(base, known, [Adapter("conv", DOWN[..., None, None], UP[..., None, None], 1.0)], 1.0)


@pytest.mark.parametrize("said", ["[", "['a', 1]", "__import__('os')", "(" * 300, ""])
def test_what_an_exporter_says_is_text(said: str) -> None:
    model = by_torch_export()
    for node in model.graph.node:
        for entry in node.metadata_props:
            entry.value = said
    assert plan_of(model).origin.exported == Exported()


def test_what_is_for_other_models_is_left_out() -> None:
    """A file of a pipeline's: names of the text encoder are in no plan of the other model."""
    base, known = weights(model := exported().model()), places([plan_of(model).entries[0].program])
    both = [Adapter(f"{where}.{name}", DOWN, UP, 1.0) for where, name in (("unet", "layers.0.fc1"), ("text_encoder", "q_proj"))]
    with pytest.warns(RuntimeWarning, match=r"1 adapters are for other models \(text_encoder\.…\) and were left out"):
        assert list(merged(base, known, both, 1.0)) == ["layers.0.fc1.weight"]
    with pytest.raises(UsageError, match=r"'unet\.q_proj': no product's weight is called so"):
        merged(base, known, [both[0], Adapter("unet.q_proj", DOWN, UP, 1.0)], 1.0)


def transposed_convolution() -> Net:
    n = Net(x=(1, 16, 5, 5))
    return n.out(n("ConvTranspose", "x", n.normal(16, 16, 3, 3, scale=0.1), strides=[2, 2]))


def read_both_ways() -> Net:
    n = Net(x=(4, 16))
    w = n.normal(16, 16, scale=0.2)
    return n.out(n("MatMul", n("MatMul", "x", w), n("Transpose", "w0", perm=[1, 0])))


@pytest.mark.parametrize("net, shape", [(transposed_convolution, (16, 3, 3)), (read_both_ways, (16,))])
def test_weights_whose_outputs_are_not_known(net, shape: tuple[int, ...]) -> None:
    """They are square: their shape does not tell either."""
    model = net().model()
    known = places([plan_of(model).entries[0].program])
    down = np.ones((2, *shape), np.float32)
    with pytest.raises(UnsupportedError, match=r"'q' is for 'w0', of whose axes it is not known which are outputs: merge it"):
        merged(weights(model), known, [Adapter("q", down, UP, 1.0)], 1.0, {"w0": Called("q")})


def test_a_map_says_where_names_do_not() -> None:
    model = products().model()
    plan, base = plan_of(model), weights(model)
    known, adapter = places([plan.entries[0].program]), Adapter("encoder.q", DOWN, UP, 1.0)
    with pytest.raises(UsageError, match=r"'encoder.q': no product's weight is called so; say it with --map"):
        merged(base, known, [adapter], 1.0)
    assert list(merged(base, known, [adapter], 1.0, {"w2": Called("encoder.q")})) == ["w2"]


def test_a_name_of_several_weights() -> None:
    net = named(products(), {0: "/a/q/Gemm", 2: "/b/q/MatMul"}, {})
    model = net.model()
    known = places([plan_of(model).entries[0].program])
    with pytest.raises(UsageError, match="'q': it may be for 'w0', 'w2'; say it with --map"):
        merged(weights(model), known, [Adapter("q", DOWN, UP, 1.0)], 1.0)
    assert list(merged(weights(model), known, [Adapter("b.q", DOWN, UP, 1.0)], 1.0)) == ["w2"]


def test_an_adapter_of_another_size() -> None:
    model = exported().model()
    known = places([plan_of(model).entries[0].program])
    with pytest.raises(UsageError, match=r"'fc1' is for weights of 16×8, and 'layers.0.fc1.weight' has 16×16"):
        merged(weights(model), known, [Adapter("fc1", DOWN[:, :8], UP, 1.0)], 1.0)
    with pytest.raises(UsageError, match="cannot be merged nan times"):
        merged(weights(model), known, [], float("nan"))


def test_convolutions_take_adapters_too() -> None:
    model = convolutions().model()
    plan, base = plan_of(model), weights(model)
    down, up = RNG.standard_normal((2, 8, 3, 3)).astype(np.float32), RNG.standard_normal((16, 2, 1, 1)).astype(np.float32)
    made = merged(base, places([plan.entries[0].program]), [Adapter("n0", down, up, 1.0)], 1.0)
    delta = np.einsum("or,rcyx->ocyx", up[..., 0, 0], down)
    np.testing.assert_allclose(made["w0"], base["w0"] + delta, rtol=1e-4, atol=1e-5)


def test_two_adapters_of_one_weight() -> None:
    """Modules of one name elsewhere: what the model does not have must not end up in what it has."""
    model = exported().model()
    base, known = weights(model), places([plan_of(model).entries[0].program])
    with pytest.raises(UsageError, match=r"'layers.0.fc1' and 'x.layers.0.fc1' seem to be for one weight, 'layers.0.fc1.weight'"):
        merged(base, known, [Adapter(f"{where}layers.0.fc1", DOWN, UP, 1.0) for where in ("", "x.")], 1.0)


def test_heads_that_are_one_product_in_the_plan_keep_their_own_adapters() -> None:
    model = attention().model()
    program = plan_of(model).entries[0].program
    base, found = weights(model), places([program])
    wide = {name for name, values in base.items() if values.shape == (16, 16)}
    assert {place.weight for place in found} == wide and all(place.transposed for place in found)
