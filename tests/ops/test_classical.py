"""Operators of ai.onnx.ml against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tccompile.errors import UnsupportedError
from tccompile.ir.reference import evaluate
from tccompile.ir.verify import verify
from tccompile.load.model import load, sources
from tccompile.lower.graph import lower
from tests.networks import relative_error

ROWS, FEATURES = 37, 5
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
ELEM = {"f": TensorProto.FLOAT, "d": TensorProto.DOUBLE, "l": TensorProto.INT64, "i": TensorProto.INT32}


def model(
    op: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[int], opset: int = 3, **attributes: Any
) -> onnx.ModelProto:
    """One operator of ai.onnx.ml, with outputs of these types."""
    names = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(op, list(inputs), names, op.lower(), domain="ai.onnx.ml", **attributes)
    given = [helper.make_tensor_value_info(n, ELEM[x.dtype.char], x.shape) for n, x in inputs.items()]
    made = [helper.make_tensor_value_info(n, elem, None) for n, elem in zip(names, outputs, strict=True)]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", opset)]
    return helper.make_model(helper.make_graph([node], "net", given, made), opset_imports=opsets, ir_version=10)


def agrees(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], tolerance: float = 1e-6) -> dict[str, np.ndarray]:
    """Hold the lowered model to ONNX Runtime: integers are equal, infinities and NaN are where they are."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    want = dict(zip((o.name for o in session.get_outputs()), session.run(None, dict(inputs)), strict=True))
    program = lower(load(proto))
    verify(program)
    with np.errstate(all="ignore"):
        got = evaluate(program, inputs, sources(proto))
    for name, expected in want.items():
        assert got[name].shape == expected.shape and program.tensors[name].dtype.numpy == expected.dtype
        if expected.dtype.kind == "f":
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(got[name][~finite], expected[~finite])
            assert relative_error(got[name][finite], expected[finite]) <= tolerance
        else:
            np.testing.assert_array_equal(got[name], expected)
    return got


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


F, INT = TensorProto.FLOAT, TensorProto.INT64
X = normal(ROWS, FEATURES)
WHOLE = np.random.default_rng(1).integers(-2, 6, (ROWS, FEATURES))
HOLES = np.where(normal(ROWS, FEATURES, seed=2) > 1, np.float32(np.nan), X)
ROUND = np.round(X, 1)

FEATURE_CASES: dict[str, tuple[str, dict[str, np.ndarray], int, dict[str, Any]]] = {
    "scaler": ("Scaler", {"x": X}, F, {"offset": [0.5], "scale": [2.0]}),
    "scaler of each": ("Scaler", {"x": X}, F, {"offset": normal(FEATURES).tolist(), "scale": normal(FEATURES, seed=3).tolist()}),
    "scaler of integers": ("Scaler", {"x": WHOLE}, F, {"offset": [0.5], "scale": [2.0]}),
    "scaler of doubles": ("Scaler", {"x": X.astype(np.float64)}, F, {"offset": [0.5], "scale": [2.0]}),
    **{f"normalizer {n}": ("Normalizer", {"x": X}, F, {"norm": n}) for n in ("MAX", "L1", "L2")},
    **{f"normalizer {n} of zeros": ("Normalizer", {"x": X * (X[:, :1] > 0)}, F, {"norm": n}) for n in ("MAX", "L1", "L2")},
    "normalizer of integers": ("Normalizer", {"x": WHOLE}, F, {"norm": "L2"}),
    "normalizer of a row": ("Normalizer", {"x": X[0]}, F, {"norm": "L1"}),
    "binarizer": ("Binarizer", {"x": ROUND}, F, {"threshold": 0.1}),
    "imputer": ("Imputer", {"x": HOLES}, F, {"imputed_value_floats": normal(FEATURES).tolist(), "replaced_value_float": np.nan}),
    "imputer of a value": ("Imputer", {"x": ROUND}, F, {"imputed_value_floats": [7.0], "replaced_value_float": 0.5}),
    "imputer of integers": ("Imputer", {"x": WHOLE}, INT, {"imputed_value_int64s": [9], "replaced_value_int64": 2}),
    "imputer, integers each": ("Imputer", {"x": WHOLE}, INT, {"imputed_value_int64s": [*range(5)], "replaced_value_int64": -1}),
    "one-hot": ("OneHotEncoder", {"x": WHOLE}, F, {"cats_int64s": [0, 1, 2, 5], "zeros": 1}),
    "one-hot of floats": ("OneHotEncoder", {"x": 2 * X}, F, {"cats_int64s": [0, 1, 2, -1], "zeros": 1}),
    "one-hot of a row": ("OneHotEncoder", {"x": WHOLE[0]}, F, {"cats_int64s": [3, 1, 2], "zeros": 1}),
    "vectorizer": ("FeatureVectorizer", {"x": X, "z": X[:, :2]}, F, {"inputdimensions": [5, 2]}),
    "vectorizer that cuts": ("FeatureVectorizer", {"x": X, "z": X[:, :2]}, F, {"inputdimensions": [3, 4]}),
    "vectorizer of integers": ("FeatureVectorizer", {"x": WHOLE, "z": WHOLE[:, :2]}, F, {"inputdimensions": [5, 2]}),
    "vectorizer of a row": ("FeatureVectorizer", {"x": X[0], "z": X[1]}, F, {"inputdimensions": [5, 5]}),
    "extractor": ("ArrayFeatureExtractor", {"x": X, "at": np.array([3, 0, 3])}, F, {}),
    "extractor, two axes": ("ArrayFeatureExtractor", {"x": WHOLE, "at": np.array([[4], [1]])}, INT, {}),
    "extractor of a row": ("ArrayFeatureExtractor", {"x": X[0], "at": np.array([3, 0])}, F, {}),
    "extractor, three axes": ("ArrayFeatureExtractor", {"x": normal(2, 3, 4), "at": np.array([3, 1])}, F, {}),
}


@pytest.mark.parametrize("case", FEATURE_CASES)
def test_features(case: str) -> None:
    op, inputs, elem, attributes = FEATURE_CASES[case]
    agrees(model(op, inputs, [elem], **attributes), inputs)


ENCODERS: dict[str, tuple[np.ndarray, int, dict[str, Any]]] = {
    "integers": (WHOLE, INT, {"keys_int64s": [0, 3, 5], "values_int64s": [7, -1, 2], "default_int64": 100}),
    "first of equal keys": (WHOLE, INT, {"keys_int64s": [0, 3, 0], "values_int64s": [7, -1, 2]}),
    "floats": (ROUND, F, {"keys_floats": [0.5, 0.1, -0.3], "values_floats": [1.5, 2.5, 3.5], "default_float": 9.0}),
    "NaN is no key": (HOLES, F, {"keys_floats": [0.5, np.nan], "values_floats": [1.5, 2.5], "default_float": 9.0}),
    "to integers": (ROUND, INT, {"keys_floats": [0.5, 0.1, -0.3], "values_int64s": [1, 2, 3]}),
    "to floats": (WHOLE, F, {"keys_int64s": [0, 3, 5], "values_floats": [7.5, -1, 2]}),
}


@pytest.mark.parametrize("case", ENCODERS)
def test_label_encoder(case: str) -> None:
    x, elem, attributes = ENCODERS[case]
    agrees(model("LabelEncoder", {"x": x}, [elem], opset=2, **attributes), {"x": x})


def test_label_encoder_of_tensors() -> None:
    columns = {
        name: np.array(values, np.float64) for name, values in (("keys", [0.5, 0.1]), ("values", [4, 5]), ("default", [9]))
    }
    tensors = {f"{name}_tensor": onnx.numpy_helper.from_array(values) for name, values in columns.items()}
    x = ROUND.astype(np.float64).round(1)
    agrees(model("LabelEncoder", {"x": x}, [TensorProto.DOUBLE], opset=4, **tensors), {"x": x})


def bound(transform: str) -> float:
    """ONNX Runtime subtracts what is nearly equal to compute PROBIT."""
    return 1e-3 if transform == "PROBIT" else 1e-5


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_linear_regressor(targets: int, transform: str) -> None:
    weights = normal(targets, FEATURES, seed=4).reshape(-1) / 5
    attributes = {"coefficients": weights.tolist(), "targets": targets, "post_transform": transform}
    for more in ({"intercepts": [0.5] * targets}, {}):
        agrees(model("LinearRegressor", {"x": X}, [F], **attributes, **more), {"x": X}, bound(transform))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (2, 2), (3, 3), (4, 4)])
def test_linear_classifier(rows: int, classes: int, transform: str) -> None:
    attributes = {
        "coefficients": (normal(rows, FEATURES, seed=5).reshape(-1) / 5).tolist(),
        "intercepts": (normal(rows) / 9 + 0.5).tolist(),
        "classlabels_ints": [10, 7, 12, 3][:classes], "post_transform": transform,
    }  # fmt: skip
    proto = model("LinearClassifier", {"x": X}, [INT, F], **attributes)
    if rows == 1 and transform == "PROBIT":
        with pytest.raises(UnsupportedError, match="undefined after PROBIT"):
            load(proto)
        return
    for x in (X, X.astype(np.float64), WHOLE, WHOLE.astype(np.int32)) if transform == "NONE" else (X,):
        agrees(model("LinearClassifier", {"x": x}, [INT, F], **attributes), {"x": x}, bound(transform))


KERNELS = {"LINEAR": [0.0, 0, 0], "POLY": [0.2, 1.0, 3], "RBF": [0.3, 0, 0], "SIGMOID": [0.1, 0.2, 0]}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kernel: str, one_class: int) -> None:
    vectors = normal(11, FEATURES, seed=6) + 20 * (kernel == "RBF")
    x = X + 20 * (kernel == "RBF")
    attributes = {
        "kernel_type": kernel, "kernel_params": KERNELS[kernel], "n_supports": 11,
        "support_vectors": vectors.reshape(-1).tolist(),
        "coefficients": normal(11, seed=7).tolist(), "rho": [0.1], "one_class": one_class,
    }  # fmt: skip
    agrees(model("SVMRegressor", {"x": x}, [F], **attributes), {"x": x}, 2e-5)


def test_svm_regressor_without_vectors() -> None:
    attributes = {
        "kernel_type": "LINEAR",
        "kernel_params": [0.0, 0, 0],
        "coefficients": normal(FEATURES).tolist(),
        "rho": [0.1],
        "n_supports": 0,
    }
    agrees(model("SVMRegressor", {"x": X}, [F], **attributes), {"x": X}, 1e-5)


def support_vectors(classes: int, kernel: str, transform: str, probabilities: bool = False, positive: bool = False) -> dict:
    per_class = [4, 3, 5, 2][:classes]
    count, pairs = sum(per_class), classes * (classes - 1) // 2
    weights = normal(classes - 1, count, seed=9).reshape(-1)
    given = {
        "kernel_type": kernel, "kernel_params": KERNELS[kernel], "vectors_per_class": per_class, "post_transform": transform,
        "support_vectors": normal(count, FEATURES, seed=8).reshape(-1).tolist(), "rho": (normal(pairs, seed=3) / 5).tolist(),
        "coefficients": (np.abs(weights) if positive else weights).tolist(), "classlabels_ints": [10, 7, 12, 3][:classes],
    }  # fmt: skip
    slopes = {"prob_a": (-1 - np.abs(normal(pairs))).tolist(), "prob_b": (normal(pairs, seed=1) / 5).tolist()}
    return given | (slopes if probabilities else {})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_svm_classifier(classes: int, kernel: str) -> None:
    agrees(model("SVMClassifier", {"x": X}, [INT, F], **support_vectors(classes, kernel, "NONE")), {"x": X}, 1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_svm_probabilities(classes: int) -> None:
    """Some rows are done after one round, others after more."""
    agrees(model("SVMClassifier", {"x": X}, [INT, F], **support_vectors(classes, "RBF", "NONE", True)), {"x": X}, 1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("positive", [True, False])
def test_svm_transforms(classes: int, transform: str, positive: bool) -> None:
    proto = model("SVMClassifier", {"x": X}, [INT, F], **support_vectors(classes, "RBF", transform, positive=positive))
    if classes == 2 and transform == "PROBIT":
        with pytest.raises(UnsupportedError, match="undefined after PROBIT"):
            load(proto)
    else:
        agrees(proto, {"x": X}, bound(transform))


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("positive", [True, False])
def test_svm_classifier_without_vectors(classes: int, transform: str, positive: bool) -> None:
    weights = normal(classes, FEATURES, seed=9).reshape(-1)
    attributes = {
        "kernel_type": "LINEAR", "kernel_params": [0.0, 0, 0], "rho": [0.3],
        "coefficients": (np.abs(weights) if positive else weights).tolist(),
        "classlabels_ints": [10, 7, 12][:classes], "post_transform": transform,
    }  # fmt: skip
    agrees(model("SVMClassifier", {"x": X}, [INT, F], **attributes), {"x": X}, 1e-5)
