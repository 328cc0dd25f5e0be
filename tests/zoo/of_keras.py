"""Keras' networks and layers, on PyTorch: images with channels last, as Keras lays them out."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from keras import layers

from tests.zoo.entry import Entry, Torch, normal, tokens

APPLICATIONS = {
    "ConvNeXtTiny": 64, "DenseNet121": 96, "EfficientNetB0": 96, "EfficientNetV2B0": 96, "InceptionResNetV2": 96,
    "InceptionV3": 96, "MobileNet": 96, "MobileNetV2": 96, "MobileNetV3Small": 96, "ResNet50": 96,
    "ResNet50V2": 96, "VGG16": 64, "Xception": 96,
}  # fmt: skip
"""Names and the sides of their images."""


def _application(name: str, side: int, _: Path) -> Torch:
    keras.utils.set_random_seed(0)
    network = getattr(keras.applications, name)(
        weights=None, input_shape=(side, side, 3), classes=100, classifier_activation=None
    )
    for layer in network._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.moving_mean.assign(0.1 * keras.random.normal(layer.moving_mean.shape, seed=1))
            layer.moving_variance.assign(1 + keras.random.uniform(layer.moving_variance.shape, seed=2))
    return Torch(network.eval(), {"x": normal(1, side, side, 3)}, trace=True)


def _functional(make: Callable[[Any], Any], shape: tuple[int, ...], words: int, _: Path) -> Torch:
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, batch_size=2, dtype="int64" if words else "float32")
    network = keras.Model(x, make(x)).eval()
    return Torch(network, {"x": tokens(words, *shape, batch=2) if words else normal(2, *shape)}, trace=True)


def _encoder(x: Any) -> Any:
    y = layers.Embedding(500, 64)(x)
    for _ in range(2):
        y = layers.LayerNormalization()(y + layers.MultiHeadAttention(4, 16)(y, y))
        y = layers.LayerNormalization()(y + layers.Dense(64)(layers.Dense(128, activation="gelu")(y)))
    return layers.Dense(10)(layers.GlobalAveragePooling1D()(y))


def _segments(x: Any) -> Any:
    skips = []
    for channels in (16, 32):
        x = layers.Activation("relu")(layers.GroupNormalization(8)(layers.Conv2D(channels, 3, padding="same")(x)))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    for skip in reversed(skips):
        x = layers.Conv2DTranspose(skip.shape[-1], 3, strides=2, padding="same")(x)
        x = layers.SeparableConv2D(skip.shape[-1], 3, padding="same", activation="swish")(layers.Concatenate()([x, skip]))
    return layers.Conv2D(4, 1)(x)


LAYERS: dict[str, tuple[str, Callable[[Any], Any], tuple[int, ...], int]] = {
    "transformer": ("language, encoder", _encoder, (48,), 500),
    "unet": ("segmentation", _segments, (48, 48, 3), 0),
    "lstm": ("recurrent", lambda x: layers.Dense(8)(layers.Bidirectional(layers.LSTM(24, return_sequences=True))(x)),
             (20, 12), 0),
    "gru": ("recurrent", lambda x: layers.GRU(24)(layers.Conv1D(16, 5, padding="causal", activation="elu")(x)), (20, 12), 0),
    "video": ("video", lambda x: layers.Dense(5)(layers.GlobalAveragePooling3D()(layers.Conv3D(8, 3, activation="relu")(x))),
              (6, 20, 20, 3), 0),
    "resize": ("image", lambda x: layers.Conv2D(3, 3, padding="same")(layers.UpSampling2D(2, interpolation="bilinear")(x)),
               (24, 24, 8), 0),
}  # fmt: skip
"""Kind, the network of its input, and the input's shape; of how many words, if it is text."""

ENTRIES = [
    *(Entry(f"keras.{name}", "Keras", "classification", partial(_application, name, side))
      for name, side in APPLICATIONS.items()),
    *(Entry(f"keras.{name}", "Keras", kind, partial(_functional, make, shape, words))
      for name, (kind, make, shape, words) in LAYERS.items()),
]  # fmt: skip
