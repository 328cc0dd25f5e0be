"""scikit-learn's pipelines and models, fitted on made-up data and written by skl2onnx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from skl2onnx import to_onnx
from sklearn import (
    cluster,
    decomposition,
    discriminant_analysis,
    ensemble,
    gaussian_process,
    kernel_approximation,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

from tests.zoo.entry import Entry

RNG = np.random.default_rng(11)
ROWS = RNG.normal(size=(300, 12)).astype(np.float32)
LABELS = (ROWS[:, 0] + ROWS[:, 1] ** 2 - ROWS[:, 2] > 0.5).astype(np.int64) + (ROWS[:, 3] > 1)
TARGETS = (ROWS @ RNG.normal(size=12) + np.sin(3 * ROWS[:, 0])).astype(np.float32)

CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "LogisticRegression": linear_model.LogisticRegression,
    "SGDClassifier": partial(linear_model.SGDClassifier, loss="log_loss"),
    "RidgeClassifier": linear_model.RidgeClassifier,
    "Perceptron": linear_model.Perceptron,
    "LinearSVC": svm.LinearSVC,
    "SVC": partial(svm.SVC, kernel="rbf"),
    "SVC.poly": partial(svm.SVC, kernel="poly"),
    "GaussianNB": naive_bayes.GaussianNB,
    "LDA": discriminant_analysis.LinearDiscriminantAnalysis,
    "MLPClassifier": partial(neural_network.MLPClassifier, (32, 16), max_iter=50),
    "DecisionTreeClassifier": partial(tree.DecisionTreeClassifier, max_depth=6),
    "RandomForestClassifier": partial(ensemble.RandomForestClassifier, 20, max_depth=6),
    "ExtraTreesClassifier": partial(ensemble.ExtraTreesClassifier, 20, max_depth=6),
    "GradientBoostingClassifier": partial(ensemble.GradientBoostingClassifier, n_estimators=20),
    "AdaBoostClassifier": partial(ensemble.AdaBoostClassifier, n_estimators=10),
    "KNeighborsClassifier": neighbors.KNeighborsClassifier,
}
REGRESSORS: dict[str, Callable[[], Any]] = {
    "LinearRegression": linear_model.LinearRegression,
    "Ridge": linear_model.Ridge,
    "BayesianRidge": linear_model.BayesianRidge,
    "PoissonRegressor": linear_model.PoissonRegressor,
    "SVR": svm.SVR,
    "MLPRegressor": partial(neural_network.MLPRegressor, (32,), max_iter=50),
    "DecisionTreeRegressor": partial(tree.DecisionTreeRegressor, max_depth=6),
    "RandomForestRegressor": partial(ensemble.RandomForestRegressor, 20, max_depth=6),
    "GradientBoostingRegressor": partial(ensemble.GradientBoostingRegressor, n_estimators=20),
    "KNeighborsRegressor": neighbors.KNeighborsRegressor,
    "GaussianProcessRegressor": partial(gaussian_process.GaussianProcessRegressor, alpha=1.0),
}
TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "StandardScaler": preprocessing.StandardScaler,
    "MinMaxScaler": preprocessing.MinMaxScaler,
    "RobustScaler": preprocessing.RobustScaler,
    "Normalizer": preprocessing.Normalizer,
    "PolynomialFeatures": partial(preprocessing.PolynomialFeatures, 2),
    "Binarizer": preprocessing.Binarizer,
    "KBinsDiscretizer": partial(preprocessing.KBinsDiscretizer, 4, encode="ordinal"),
    "PCA": partial(decomposition.PCA, 5),
    "TruncatedSVD": partial(decomposition.TruncatedSVD, 5),
    "KMeans": partial(cluster.KMeans, 5, n_init=1),
    "Nystroem": partial(kernel_approximation.RBFSampler, n_components=20),
    "PowerTransformer": preprocessing.PowerTransformer,
}


def _fitted(make: Callable[[], Any], target: np.ndarray | None, scaled: bool, _: Path) -> Any:
    model = make()
    if scaled:
        model = pipeline.make_pipeline(preprocessing.StandardScaler(), model)
    target = np.abs(target) if isinstance(make, type) and "Poisson" in make.__name__ else target  # type: ignore[arg-type]
    model.fit(ROWS, target)
    options = {"zipmap": False} if hasattr(model, "predict_proba") else None
    written = to_onnx(model, ROWS[:16], target_opset={"": 18, "ai.onnx.ml": 3}, options={id(model): options} if options else None)
    return written, {written.graph.input[0].name: ROWS[:16]}


ENTRIES = [
    *(
        Entry(f"sklearn.{n}", "scikit-learn", "classifier", partial(_fitted, m, LABELS, i % 2 == 0))
        for i, (n, m) in enumerate(CLASSIFIERS.items())
    ),
    *(
        Entry(f"sklearn.{n}", "scikit-learn", "regressor", partial(_fitted, m, TARGETS, i % 2 == 0))
        for i, (n, m) in enumerate(REGRESSORS.items())
    ),
    *(Entry(f"sklearn.{n}", "scikit-learn", "preprocessing", partial(_fitted, m, None, False)) for n, m in TRANSFORMERS.items()),
]
