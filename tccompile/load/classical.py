"""Operators of ai.onnx.ml, which scikit-learn's pipelines are exported to, as standard ones, by ONNX Runtime's meaning of them
(https://github.com/onnx/onnx/blob/main/docs/Operators-ml.md).

Trees stay: an ensemble becomes a TreeEnsembleRegressor or TreeEnsemble that only adds up, with standard nodes behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.helper
from onnx import TensorProto, numpy_helper

from tccompile.errors import ModelError, UnsupportedError
from tccompile.load.contrib.parts import Nodes

DOMAIN = "ai.onnx.ml"
TREES = ("TreeEnsemble", "TreeEnsembleRegressor")

WITHOUT_STRINGS = "only numbers are computed with: train the model on classes that are integers, or end the model before it"


class Given(NamedTuple):
    """What the load stage knows of an input: its element type and shape."""

    elem: int
    shape: tuple[int, ...]


class Node(Nodes):
    """An operator's node, and the standard nodes that it becomes.

    x        its inputs, and what is known of each
    used     whether anyone reads an output
    version  of ai.onnx.ml
    """

    def __init__(self, node: onnx.NodeProto, given: Sequence[Given], used: Callable[[str], bool], version: int) -> None:
        super().__init__(node)
        self.version = version
        self.x, self.given = [*node.input], given
        self.used = [bool(name) and used(name) for name in node.output]
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        self.attributes: dict[str, Any] = {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}

    def refusal(self, reason: str, way_out: str = "") -> UnsupportedError:
        return UnsupportedError(f"{self.title}: {reason}{f'; {way_out}' if way_out else ''}")

    def invalid(self, why: str) -> ModelError:
        return ModelError(f"{self.title} is not valid: {why}")

    @property
    def title(self) -> str:
        return f"node {self.node.name or self.node.output[0]!r} ({DOMAIN}.{self.node.op_type})"

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(values, dtype), "values"))

    def numbers(self, name: str, default: Sequence[float] = ()) -> np.ndarray:
        """An attribute of floats."""
        return np.asarray(self.attributes.get(name, default), np.float32).reshape(-1)

    def floats(self, i: int = 0) -> str:
        """Input i as float32."""
        return self.x[i] if self.given[i].elem == TensorProto.FLOAT else self.add("Cast", [self.x[i]], to=TensorProto.FLOAT)

    def rows(self) -> tuple[str, int]:
        """The first input as float32 of rank 2, a row for each sample, and how many features a row has."""
        shape = self.given[0].shape
        if len(shape) not in (1, 2):
            raise self.invalid(f"its input has {len(shape)} axes")
        x = self.floats()
        return (x if len(shape) == 2 else self.add("Unsqueeze", [x, self.constant([0], np.int64)])), shape[-1]

    def give(self, y: str, i: int = 0) -> None:
        """Output i is y."""
        if self.used[i]:
            self.add("Identity", [y], self.node.output[i])

    def columns(self, x: str, *numbers: int) -> str:
        return self.add("Gather", [x, self.constant(numbers, np.int64)], axis=1)

    def where(self, condition: str, a: str, b: str) -> str:
        return self.add("Where", [condition, a, b])

    def product(self, x: str, weights: np.ndarray, bias: np.ndarray) -> str:
        """x @ weightsᵀ + bias"""
        return self.add("Gemm", [x, self.constant(weights), self.constant(bias)], transB=1)


EXPORTERS = ("skl2onnx", "OnnxMLTools")
"""What converters of scikit-learn's models and the like call themselves."""


def is_classical(model: onnx.ModelProto) -> bool:
    """Whether the model is one of scikit-learn's or its kind: by who made it, or as it has an operator of ai.onnx.ml."""
    return model.producer_name in EXPORTERS or any(node.domain == DOMAIN for node in model.graph.node)


def taken_apart(
    node: onnx.NodeProto, given: Sequence[Given], used: Callable[[str], bool], version: int
) -> list[onnx.NodeProto] | None:
    """The nodes that a node of ai.onnx.ml stands for, or None if it is trees that stay as they are.

    given    of each input; used: whether an output is read by anyone
    version  of ai.onnx.ml
    Raises UnsupportedError for operators without a meaning here, ModelError for attributes that do not fit.
    """
    parts = Node(node, given, used, version)
    if node.op_type in WITHOUT_MEANING:
        raise parts.refusal(WITHOUT_MEANING[node.op_type], "end the model before it, and do the rest in the application")
    if node.op_type not in OPERATORS:
        raise parts.refusal("the operator is not one of ai.onnx.ml's")
    if node.op_type in TREES and not _does_more(parts):
        return None
    OPERATORS[node.op_type](parts)
    return parts.nodes


# --- Features --------------------------------------------------------------------------------------------------------


def _along(node: Node, name: str, values: np.ndarray) -> str:
    """One number for all features, or one for each."""
    if values.size not in (1, node.given[0].shape[-1]):
        raise node.invalid(f"its {name} are {values.size}, for rows of {node.given[0].shape[-1]}")
    return node.constant(values, values.dtype)


def _scaler(node: Node) -> None:
    offset, scale = (_along(node, n, node.numbers(n, [d])) for n, d in (("offset", 0.0), ("scale", 1.0)))
    node.give(node.add("Mul", [node.add("Sub", [node.floats(), offset]), scale]))


def _normalizer(node: Node) -> None:
    """x / its row's norm, where that is not 0; the norm MAX is the largest, not the largest magnitude."""
    x, norm = node.floats(), node.attributes.get("norm", "MAX")
    operators = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
    if norm not in operators:
        raise node.invalid(f"its norm is {norm!r}")
    size = node.add(operators[norm], [x, node.constant([-1], np.int64)], keepdims=1)
    is_zero = node.add("Equal", [size, node.constant(0)])
    node.give(node.add("Div", [x, node.where(is_zero, node.constant(1), size)]))


def _binarizer(node: Node) -> None:
    above = node.add("Greater", [node.floats(), node.constant(node.attributes.get("threshold", 0.0))])
    node.give(node.add("Cast", [above], to=node.given[0].elem))


def _imputer(node: Node) -> None:
    x, kind = node.x[0], node.given[0]
    if kind.elem == TensorProto.INT64:
        values = np.asarray(node.attributes.get("imputed_value_int64s", ()), np.int64)
        replaced = node.attributes.get("replaced_value_int64", 0)
    else:
        values, replaced = node.numbers("imputed_value_floats"), node.attributes.get("replaced_value_float", 0.0)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem)
    missing = node.add("IsNaN", [x]) if np.isnan(replaced) else node.add("Equal", [x, node.constant(replaced, dtype)])
    node.give(node.where(missing, _along(node, "imputed values", values.astype(dtype)), x))


def _one_hot(node: Node) -> None:
    """A column for each category that there is; zeros for what is none of them."""
    if "cats_int64s" not in node.attributes:
        raise node.refusal("its categories are strings", WITHOUT_STRINGS)
    x = node.add("Unsqueeze", [node.add("Cast", [node.x[0]], to=TensorProto.INT64), node.constant([-1], np.int64)])
    same = node.add("Equal", [x, node.constant(node.attributes["cats_int64s"], np.int64)])
    node.give(node.add("Cast", [same], to=TensorProto.FLOAT))


def _feature_vectorizer(node: Node) -> None:
    """The features of all inputs beside each other, each with as many as are said for it, cut off or filled up with zeros."""
    sizes = node.attributes.get("inputdimensions", ())
    if len(sizes) != len(node.x):
        raise node.invalid(f"it has {len(node.x)} inputs and {len(sizes)} inputdimensions")
    parts = []
    for i, (given, size) in enumerate(zip(node.given, sizes, strict=True)):
        rows = given.shape[0] if len(given.shape) > 1 else 1
        x = node.add("Reshape", [node.floats(i), node.constant([rows, -1], np.int64)])
        change = size - int(np.prod(given.shape)) // max(rows, 1)
        parts.append(node.add("Pad", [x, node.constant([0, 0, 0, change], np.int64)]) if change else x)
    node.give(node.add("Concat", parts, axis=1))


def _array_feature_extractor(node: Node) -> None:
    """Elements of the last axis; of a vector as one row."""
    if node.given[0].elem == TensorProto.STRING:
        raise node.refusal("it chooses between strings", WITHOUT_STRINGS)
    at = node.add("Reshape", [node.x[1], node.constant([-1], np.int64)])
    y = node.add("Gather", [node.x[0], at], axis=-1)
    if len(node.given[0].shape) == 1:
        y = node.add("Unsqueeze", [y, node.constant([0], np.int64)])
    node.give(y)


def _label_encoder(node: Node) -> None:
    """The value of the first key that x is, or the default."""
    columns: dict[str, np.ndarray] = {}
    for what in ("keys", "values"):
        for suffix, dtype in (("int64s", np.int64), ("floats", np.float32), ("tensor", None)):
            if (given := node.attributes.get(f"{what}_{suffix}")) is not None:
                columns[what] = numpy_helper.to_array(given).reshape(-1) if dtype is None else np.asarray(given, dtype)
    if len(columns) < 2 or any(c.dtype.kind not in "if" for c in columns.values()):
        raise node.refusal("it maps from or to strings", WITHOUT_STRINGS)
    keys, values = columns["keys"], columns["values"]
    if len(keys) != len(values):
        raise node.invalid(f"it has {len(keys)} keys and {len(values)} values")
    default: Any = -1 if values.dtype.kind == "i" else -0.0
    default = node.attributes.get("default_int64" if values.dtype == np.int64 else "default_float", default)
    if "default_tensor" in node.attributes:
        default = numpy_helper.to_array(node.attributes["default_tensor"]).reshape(-1)[0]
    x = node.add("Unsqueeze", [node.x[0], node.constant([-1], np.int64)])
    same = node.add("Equal", [x, node.constant(keys, keys.dtype)])
    if node.version >= 4 and np.isnan(keys).any():
        same = node.add("Or", [same, node.add("And", [node.add("IsNaN", [x]), node.constant(np.isnan(keys), bool)])])
    places = node.where(same, node.constant(np.arange(len(keys)), np.int64), node.constant(len(keys), np.int64))
    first = node.add("ReduceMin", [places, node.constant([-1], np.int64)], keepdims=0)
    node.give(node.add("Gather", [node.constant([*values, default], values.dtype), first]))


# --- Scores and labels -----------------------------------------------------------------------------------------------


def _logistic(node: Node, x: str) -> str:
    return node.add("Sigmoid", [x])


def _probit(node: Node, x: str) -> str:
    """√2 erf⁻¹(2x - 1), by Winitzki's approximation with the numbers that ONNX Runtime has for π and a."""
    z = node.add("Sub", [node.add("Mul", [x, node.constant(2)]), node.constant(1)])
    log = node.add("Log", [node.add("Mul", [node.add("Sub", [node.constant(1), z]), node.add("Add", [node.constant(1), z])])])
    half = node.add(
        "Add", [node.add("Mul", [log, node.constant(0.5)]), node.constant(np.float32(2) / np.float32(3.14159 * 0.147))]
    )
    root = node.add("Sub", [node.add("Mul", [half, half]), node.add("Mul", [log, node.constant(1 / np.float32(0.147))])])
    size = node.add("Sqrt", [node.add("Sub", [node.add("Sqrt", [root]), half])])
    sign = node.where(node.add("Less", [z, node.constant(0)]), node.constant(-(2**0.5)), node.constant(2**0.5))
    return node.add("Mul", [size, sign])


def _softmax(node: Node, x: str) -> str:
    return node.add("Softmax", [x], axis=-1)


def _softmax_zero(node: Node, x: str) -> str:
    """A softmax without the elements that are 0, which stay 0 (below 1e-7, in proportion)."""
    last = node.constant([-1], np.int64)
    highest = node.add("ReduceMax", [x, last], keepdims=1)
    counts = node.add("Greater", [node.add("Abs", [x]), node.constant(np.float32(1e-7))])
    e = node.add("Exp", [node.add("Sub", [x, highest])])
    total = node.add("ReduceSum", [node.where(counts, e, node.constant(0)), last], keepdims=1)
    kept = node.add("Mul", [x, node.add("Exp", [node.add("Neg", [highest])])])
    return node.add("Div", [node.where(counts, e, kept), total])


TRANSFORMS: Mapping[str, Callable[[Node, str], str]] = {
    "NONE": lambda node, x: x,
    "LOGISTIC": _logistic,
    "PROBIT": _probit,
    "SOFTMAX": _softmax,
    "SOFTMAX_ZERO": _softmax_zero,
}
NUMBERED = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""As TreeEnsemble calls them."""


def _transform(node: Node) -> str:
    name = node.attributes.get("post_transform", "NONE")
    if name in (1, 2):
        own, other = NUMBERED[name], NUMBERED[3 - name]
        way_out = "make the transform a node behind the trees"
        raise node.refusal(f"its post_transform {name} means {own} in the standard, and {other} in ONNX Runtime", way_out)
    name = NUMBERED[name] if isinstance(name, int) and 0 <= name < len(NUMBERED) else name
    if name not in TRANSFORMS:
        raise node.invalid(f"its post_transform is {name!r}")
    return name


def _labels(node: Node) -> Any:
    """The classes; None if they are strings, and nobody reads them."""
    if node.attributes.get("classlabels_strings"):
        if node.used[0]:
            raise node.refusal(f"its output {node.node.output[0]!r} is of strings", WITHOUT_STRINGS)
        return None
    return np.asarray(node.attributes.get("classlabels_ints", node.attributes.get("classlabels_int64s", ())), np.int64)


def _classes(node: Node) -> int:
    names = ("classlabels_strings", "classlabels_ints", "classlabels_int64s")
    return max(len(node.attributes.get(name, ())) for name in names)


def _give_class(node: Node, place: str) -> None:
    """The first output: the classes at places (N,)."""
    labels = _labels(node)
    if labels is not None:
        node.give(node.add("Gather", [node.constant(labels, np.int64), place]))


def _give_positive(node: Node, positive: str, labels: Sequence[int] | None) -> None:
    """The first output: the second label where `positive` (N, 1) holds, and else the first."""
    if labels is not None:
        flat = node.add("Reshape", [positive, node.constant([-1], np.int64)])
        node.give(node.where(flat, *(node.constant(label, np.int64) for label in reversed(labels))))


def _largest(node: Node, scores: str) -> str:
    return node.add("ArgMax", [scores], axis=1, keepdims=0)


# --- Linear models and support vectors -------------------------------------------------------------------------------


def _linear_regressor(node: Node) -> None:
    (x, features), targets = node.rows(), node.attributes.get("targets", 1)
    weights, bias = node.numbers("coefficients"), node.numbers("intercepts", [0.0] * targets)
    if weights.size != targets * features or bias.size != targets:
        raise node.invalid(f"it has {weights.size} coefficients and {bias.size} intercepts for {targets} targets of {features}")
    y, name = node.product(x, weights.reshape(targets, features), bias), _transform(node)
    node.give(TRANSFORMS[name](node, y) if targets > 1 else _transformed_one(node, y, name))


def _linear_classifier(node: Node) -> None:
    x, features = node.rows()
    bias, weights, classes = node.numbers("intercepts"), node.numbers("coefficients"), _classes(node)
    count = bias.size
    if not count or weights.size != count * features or classes < count or (count == 1 and classes != 2):
        raise node.invalid(
            f"it has {weights.size} coefficients, {count} intercepts and {classes} classes for {features} features"
        )
    scores, name = node.product(x, weights.reshape(count, features), bias), _transform(node)
    if count > 1:
        _give_class(node, _largest(node, scores))
        node.give(TRANSFORMS[name](node, scores), 1)
        return
    _give_positive(node, node.add("Greater", [scores, node.constant(0)]), _labels(node))
    node.give(_second(node, scores, name, signed=False), 1)


def _transformed_one(node: Node, score: str, name: str) -> str:
    """The only score: ONNX Runtime transforms it by PROBIT alone."""
    return _probit(node, score) if name == "PROBIT" else score


def _second(node: Node, score: str, name: str, signed: bool) -> str:
    """Two columns of one score s (N, 1): 1 - s and s, or -s and s if it is signed, which it always is for LOGISTIC."""
    if name == "PROBIT":
        way_out = "export it with another post_transform"
        raise node.refusal("of two classes with one score, ONNX Runtime leaves the second undefined after PROBIT", way_out)
    signed = signed or name == "LOGISTIC"
    other = node.add("Neg", [score]) if signed else node.add("Sub", [node.constant(1), score])
    both = node.add("Concat", [other, score], axis=1)
    return _logistic(node, both) if name == "LOGISTIC" else both


def _kernel(node: Node, x: str, features: int, vectors: np.ndarray) -> str:
    """The kernel's value of each row and each vector."""
    kind = node.attributes.get("kernel_type", "LINEAR")
    gamma, coef0, degree = (*node.numbers("kernel_params", [0.0, 0.0, 0.0]), 0, 0, 0)[:3]
    zero = np.zeros(len(vectors), np.float32)
    if kind == "RBF":  # distances do not depend on the origin: near it, squares are small
        origin = vectors.mean(0, np.float64).astype(np.float32)
        x, vectors = node.add("Sub", [x, node.constant(origin)]), vectors - origin
        squares = node.add("ReduceSumSquare", [x, node.constant([1], np.int64)], keepdims=1)
        product = node.product(x, -2 * vectors, np.square(vectors).sum(1))
        distance = node.add("Max", [node.add("Add", [product, squares]), node.constant(0)])
        return node.add("Exp", [node.add("Mul", [distance, node.constant(-gamma)])])
    if kind == "LINEAR":
        return node.product(x, vectors, zero)
    if kind not in ("POLY", "SIGMOID"):
        raise node.invalid(f"its kernel_type is {kind!r}")
    product = node.product(x, vectors * gamma, zero + coef0)
    return node.add("Tanh", [product]) if kind == "SIGMOID" else node.add("Pow", [product, node.constant(degree)])


def _svm_regressor(node: Node) -> None:
    (x, features), count = node.rows(), node.attributes.get("n_supports", 0)
    weights, rho = node.numbers("coefficients"), node.numbers("rho")
    if count > 0:
        vectors = node.numbers("support_vectors")
        if vectors.size != count * features or weights.size != count or rho.size < 1:
            raise node.invalid(f"it has {vectors.size} numbers of {count} support vectors, for rows of {features}")
        x = _kernel(node, x, features, vectors.reshape(count, features))
    elif weights.size != features or rho.size < 1:
        raise node.invalid(f"it has {weights.size} coefficients for rows of {features}")
    y = node.product(x, weights.reshape(1, -1), rho[:1])
    if node.attributes.get("one_class", 0):
        y = node.where(node.add("Greater", [y, node.constant(0)]), node.constant(1), node.constant(-1))
    node.give(y)


def _svm_classifier(node: Node) -> None:
    (x, features), classes = node.rows(), _classes(node)
    supports = np.asarray(node.attributes.get("vectors_per_class", ()), np.int64)
    weights, rho, name = node.numbers("coefficients"), node.numbers("rho"), _transform(node)
    if not supports.sum():
        return _linear_svm_classifier(node, x, features)
    vectors, count, pairs = node.numbers("support_vectors"), int(supports.sum()), classes * (classes - 1) // 2
    fits = len(supports) == classes and vectors.size == count * features and rho.size >= pairs > 0
    if not fits or (supports < 0).any() or weights.size != (classes - 1) * count:
        raise node.invalid(f"it has {count} support vectors for rows of {features} and {classes} classes, and they do not fit")
    values = _kernel(node, x, features, vectors.reshape(count, features))
    weights, ends = weights.reshape(classes - 1, count), np.cumsum([0, *supports])
    of_pairs, first, second = np.zeros((pairs, count), np.float32), [], []
    for pair, (i, j) in enumerate(combinations(range(classes), 2)):
        for a, row in ((i, j - 1), (j, i)):
            of_pairs[pair, ends[a] : ends[a + 1]] = weights[row, ends[a] : ends[a + 1]]
        first.append(i)
        second.append(j)
    scores = node.product(values, of_pairs, rho[:pairs])
    wins = node.add("Cast", [node.add("Greater", [scores, node.constant(0)])], to=TensorProto.FLOAT)
    losers, winners = np.eye(classes, dtype=np.float32)[second], np.eye(classes, dtype=np.float32)[first]
    _give_class(node, _largest(node, node.product(wins, (winners - losers).T, losers.sum(0))))
    if "prob_a" in node.attributes:
        node.give(_coupled(node, scores, classes, pairs), 1)
    elif classes == 2:
        node.give(_second(node, scores, name, signed=name == "NONE"), 1)
    else:
        node.give(TRANSFORMS[name](node, scores), 1)
    return None


def _linear_svm_classifier(node: Node, x: str, features: int) -> None:
    """Without support vectors: a score for each class."""
    classes, weights, rho, name = _classes(node), node.numbers("coefficients"), node.numbers("rho"), _transform(node)
    if weights.size != classes * features or rho.size < 1:
        raise node.invalid(f"it has {weights.size} coefficients for {classes} classes and rows of {features}")
    scores = node.product(x, weights.reshape(classes, features), np.repeat(rho[:1], classes))
    place = _largest(node, scores)
    if classes == 2:  # the second class wherever a score is beyond the threshold
        highest = node.add("ReduceMax", [scores, node.constant([1], np.int64)], keepdims=0)
        if (weights >= 0).all():
            beyond = node.add("GreaterOrEqual", [highest, node.constant(0.5)])
        else:
            beyond = node.add("Greater", [highest, node.constant(0)])
        place = node.where(beyond, node.constant(1, np.int64), place)
    _give_class(node, place)
    node.give(TRANSFORMS[name](node, scores), 1)


ROUNDS = 8
"""Of the iteration that couples probabilities. It ends when it has come near enough, after 4 rounds at most in 7,500 random cases
of up to 10 classes; ONNX Runtime would go on to 100."""


def _coupled(node: Node, scores: str, classes: int, pairs: int) -> str:
    """The classes' probabilities from those of pairs (Wu, Lin and Weng, 2004, the second method), as far as ONNX Runtime goes."""
    slopes, offsets = (node.numbers(f"prob_{name}") for name in "ab")
    if min(slopes.size, offsets.size) < pairs:
        raise node.invalid(f"it has {slopes.size} prob_a and {offsets.size} prob_b for {pairs} pairs of classes")
    steep = node.add("Add", [node.add("Mul", [scores, node.constant(slopes[:pairs])]), node.constant(offsets[:pairs])])
    first = node.add("Max", [node.add("Sigmoid", [node.add("Neg", [steep])]), node.constant(np.float32(1e-7))])
    first = node.add("Min", [first, node.constant(np.float32(1 - 1e-7))])
    one, axis = node.constant(1), {i: node.constant([i], np.int64) for i in range(3)}
    nothing = node.add("Sub", [node.columns(first, 0), node.columns(first, 0)])
    table = node.add("Concat", [first, node.add("Sub", [one, first]), nothing], axis=1)
    place = np.full((classes, classes), 2 * pairs)
    for pair, (i, j) in enumerate(combinations(range(classes), 2)):
        place[i, j], place[j, i] = pair, pairs + pair
    r, turned = (node.add("Gather", [table, node.constant(p, np.int64)], axis=1) for p in (place, place.T))
    squares = node.add("Unsqueeze", [node.add("ReduceSumSquare", [r, axis[1]], keepdims=0), axis[1]])
    q = node.add("Sub", [node.add("Mul", [squares, node.constant(np.eye(classes))]), node.add("Mul", [r, turned])])
    lines = [node.add("Gather", [q, node.constant(i, np.int64)], axis=1) for i in range(classes)]
    p = node.add("Add", [node.add("ReduceSum", [node.add("Mul", [lines[0], node.constant(0)]), axis[1]], keepdims=1),
                         node.constant(np.full((1, classes), 1 / classes))])  # fmt: skip
    going = ""
    for _ in range(ROUNDS):
        products = node.add("Mul", [q, node.add("Unsqueeze", [p, axis[1]])])
        qp = node.add("ReduceSum", [products, axis[2]], keepdims=0)
        pqp = node.add("ReduceSum", [node.add("Mul", [p, qp]), axis[1]], keepdims=1)
        off = node.add("ReduceMax", [node.add("Abs", [node.add("Sub", [qp, pqp])]), axis[1]], keepdims=1)
        far = node.add("GreaterOrEqual", [off, node.constant(np.float32(0.005) / np.float32(classes))])
        going = node.add("And", [going, far]) if going else far
        p = node.where(going, _round(node, lines, p, qp, pqp, classes), p)
    return p


def _round(node: Node, lines: Sequence[str], p: str, qp: str, pqp: str, classes: int) -> str:
    """Each of the probabilities brought into line with the others, one after the other."""
    one = node.constant(1)
    for i, line in enumerate(lines):
        own, at = node.columns(line, i), node.columns(qp, i)
        step = node.add("Div", [node.add("Sub", [pqp, at]), own])
        rest = node.add("Add", [one, step])
        twice = node.add("Add", [node.add("Mul", [step, own]), node.add("Add", [at, at])])
        pqp = node.add("Add", [pqp, node.add("Mul", [step, twice])])
        pqp = node.add("Div", [node.add("Div", [pqp, rest]), rest])
        qp = node.add("Div", [node.add("Add", [qp, node.add("Mul", [step, line])]), rest])
        mine = node.constant(np.eye(classes)[i : i + 1])
        p = node.add("Div", [node.add("Add", [p, node.add("Mul", [step, mine])]), rest])
    return p


# --- Trees -----------------------------------------------------------------------------------------------------------


def _values(node: Node, name: str) -> np.ndarray:
    """An attribute of floats, or of doubles, which are a tensor."""
    given = node.attributes.get(f"{name}_as_tensor")
    return np.asarray(node.attributes.get(name, ()) if given is None else numpy_helper.to_array(given), np.float64).reshape(-1)


def _base(node: Node, targets: int) -> np.ndarray:
    """Base values: one for each target, or none; of two classes, any up to two."""
    values = _values(node, "base_values").astype(np.float32)
    if values.size not in (0, targets) and not (node.node.op_type == "TreeEnsembleClassifier" and targets <= 2 >= values.size):
        raise node.invalid(f"it has {values.size} base values for {targets} targets")
    return values


def _does_more(node: Node) -> bool:
    """Whether there is anything beside the sums: base values, an average, a transform, features that are integers."""
    average = node.attributes.get("aggregate_function", "SUM") in ("AVERAGE", 0)
    floats = node.given[0].elem in (TensorProto.FLOAT, TensorProto.DOUBLE) and len(node.given[0].shape) == 2
    return bool(_values(node, "base_values").size) or average or _transform(node) != "NONE" or not floats


def type_of_trees(node: onnx.NodeProto, x: Given) -> Given:
    """Of what the trees say: a row for each row of x."""
    targets = next((a.i for a in node.attribute if a.name == "n_targets"), 1)
    if targets < 1:
        raise ModelError(
            f"node {node.name or node.output[0]!r} ({DOMAIN}.{node.op_type}) is not valid: it has {targets} n_targets"
        )
    return Given(x.elem if node.op_type == "TreeEnsemble" else TensorProto.FLOAT, (x.shape[0], targets))


OWN = ("base_values", "base_values_as_tensor", "post_transform", "aggregate_function", "classlabels_ints", "classlabels_int64s",
       "classlabels_strings")  # fmt: skip
"""Attributes of trees that become nodes."""


def _summed(node: Node, op: str, targets: int, aggregate: Any) -> str:
    """The trees themselves."""
    renamed = {k.replace("class_", "target_"): v for k, v in node.attributes.items() if k not in OWN}
    if len(node.given[0].shape) not in (1, 2):
        raise node.invalid(f"its input has {len(node.given[0].shape)} axes")
    x = node.x[0] if node.given[0].elem == TensorProto.DOUBLE else node.floats()
    if len(node.given[0].shape) == 1:
        x = node.add("Unsqueeze", [x, node.constant([0], np.int64)])
    y = f"{node.node.output[0]}/trees"
    made = onnx.helper.make_node(op, [x], [y], node.node.name, domain=DOMAIN, **renamed | {"n_targets": targets})
    made.attribute.append(onnx.helper.make_attribute("aggregate_function", aggregate))
    node.nodes.append(made)
    return y


def _trees(node: Node) -> None:
    """An average is a sum divided by the number of trees; then come base values and the transform."""
    op, targets, base = node.node.op_type, node.attributes.get("n_targets", 1), _base(node, node.attributes.get("n_targets", 1))
    numbered = op == "TreeEnsemble"
    aggregate = node.attributes.get("aggregate_function", 1 if numbered else "SUM")
    average = aggregate in ("AVERAGE", 0)
    if numbered:
        y = _summed(node, op, targets, 1 if average else aggregate)
        count = len(node.attributes.get("tree_roots", ()))
    else:
        y = _summed(node, op, targets, "SUM" if average else aggregate)
        count = len(set(node.attributes.get("nodes_treeids", ())))
    if average:
        y = node.add("Div", [y, node.constant(max(count, 1))])
    if base.size:
        y = node.add("Add", [y, node.constant(base)])
    name = _transform(node)
    node.give(TRANSFORMS[name](node, y) if targets > 1 else _transformed_one(node, y, name))


def _tree_classifier(node: Node) -> None:
    """Scores are sums of weights; what two classes make of weights for one of them depends on their signs."""
    classes, base, name = _classes(node), _base(node, _classes(node)), _transform(node)
    ids = np.asarray(node.attributes.get("class_ids", ()), np.int64)
    weights = _values(node, "class_weights")
    if not classes or not ids.size or not 0 <= ids.min() <= ids.max() < max(classes, 2):
        raise node.invalid(f"its trees have weights for classes {sorted(set(ids.tolist()))[:3]} of {classes}")
    sums = _summed(node, "TreeEnsembleRegressor", max(classes, 2), "SUM")
    if classes > 2:
        scores = node.add("Add", [sums, node.constant(base)]) if base.size else sums
        never = np.isin(np.arange(classes), ids, invert=True) & (not base.size)
        judged = node.add("Add", [scores, node.constant(np.where(never, -np.inf, 0))]) if never.any() else scores
        _give_class(node, _largest(node, judged))
        node.give(TRANSFORMS[name](node, scores), 1)
        return
    only = set(ids.tolist()) if classes == 2 else {0}
    if base.size > 1 and (classes == 1 or only == {1}):
        raise node.refusal(f"it has {base.size} base values where all weights are for one class", "export the model again")
    threshold = 0.5 if classes == 2 and len(only) == 1 and (weights >= 0).all() else 0.0
    first = node.columns(sums, 0)
    if base.size == 1 and 0 in only:
        first = node.add("Add", [first, node.constant(base)])
    if classes == 1:
        judged, scores = first, _transformed_one(node, first, name)
    elif only == {0} and base.size < 2:
        judged, scores = first, _second(node, first, name, signed=not threshold)
    else:
        judged, both = _two_scores(node, sums, first, only, base)
        scores = TRANSFORMS[name](node, both)
    labels = _labels(node)
    if labels is not None and (len(only) == 2 or classes == 1):
        labels = np.array([0, 1])
    _give_positive(node, node.add("Greater", [judged, node.constant(threshold)]), labels)
    node.give(scores, 1)


def _two_scores(node: Node, sums: str, first: str, only: set[int], base: np.ndarray) -> tuple[str, str]:
    """Of trees with weights for the second of two classes, or two base values: the score that is judged, and both, as ONNX
    Runtime makes them, which takes the sum for the first class as that for the second if there are two base values."""
    second = node.columns(sums, 1)
    if base.size < 2:
        return second, node.add("Concat", [first, second], axis=1)
    if only == {0}:
        first = node.add("Add", [first, node.constant(base[:1])])
        return first, node.add("Concat", [first, second], axis=1)
    second = node.add("Add", [first, node.constant(base[1:])])
    return second, node.add("Concat", [node.add("Neg", [second]), second], axis=1)


# --- Maps ------------------------------------------------------------------------------------------------------------


def class_names(node: onnx.NodeProto) -> list[int | str]:
    """The keys of a ZipMap's maps, in the order of its columns."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    strings = [name.decode(errors="replace") for name in values.get("classlabels_strings", ())]
    return [*strings, *values.get("classlabels_int64s", ())]


def _zip_map(node: Node) -> None:
    """The array whose columns the maps' values are, where it is an output of the model."""
    names = class_names(node.node)
    classes = ", ".join(map(str, names[:20]))
    warnings.warn(
        f"the output {node.node.output[0]!r} is the array of which {node.title} makes maps, a column for each class: "
        f"{classes}{', …' if len(names) > 20 else ''}",
        RuntimeWarning,
        stacklevel=2,
    )
    node.give(node.floats())


OPERATORS: Mapping[str, Callable[[Node], None]] = {
    "ArrayFeatureExtractor": _array_feature_extractor,
    "Binarizer": _binarizer,
    "FeatureVectorizer": _feature_vectorizer,
    "Imputer": _imputer,
    "LabelEncoder": _label_encoder,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "Normalizer": _normalizer,
    "OneHotEncoder": _one_hot,
    "SVMClassifier": _svm_classifier,
    "SVMRegressor": _svm_regressor,
    "Scaler": _scaler,
    "TreeEnsemble": _trees,
    "TreeEnsembleClassifier": _tree_classifier,
    "TreeEnsembleRegressor": _trees,
    "ZipMap": _zip_map,
}

WITHOUT_MEANING = {
    "CastMap": "its input is a map",
    "CategoryMapper": "it maps between strings and numbers",
    "DictVectorizer": "its input is a map",
}
"""Why operators of ai.onnx.ml cannot be compiled."""
