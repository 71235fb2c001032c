"""One model as each framework's exporter writes it, and what `onnxgrad build` says.

    PYTHON -m tests.exporters.frameworks FOLDER [NAME ...]

Writes the models of the frameworks that the interpreter has, with random weights, and prints a row for each: the exit
code, the verdict, how far the gradients are from central differences of the original's loss, taken here, and the
seconds that the build took. A framework that is not installed is named. Exits 1 when a model is not proved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.exporters.judged import judge

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 4)).astype(np.float32)
PICTURES = RNG.random((2, 16, 16, 3), np.float32)

Feeds = Mapping[str, np.ndarray]


def _keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((16, 16, 3), name="x"), layers.Conv2D(8, 3, strides=2, padding="same"),
            layers.BatchNormalization(), layers.ReLU(), layers.DepthwiseConv2D(3, padding="same"),
            layers.GlobalAveragePooling2D(), layers.Dense(5),
        ]
    )  # fmt: skip


def keras(file: Path) -> Feeds:
    """A small convolutional network by the exporter of Keras 3."""
    model = _keras_model()
    model(PICTURES)  # what was never called is not exported
    model.export(file, format="onnx", verbose=False)
    return {"x": PICTURES}


def tf2onnx(file: Path) -> Feeds:
    """The same of a function of TensorFlow."""
    import tensorflow as tf
    from tf2onnx import convert

    model = _keras_model()
    function = tf.function(lambda x: model(x, training=False))
    signature = [tf.TensorSpec([None, 16, 16, 3], tf.float32, name="x")]
    convert.from_function(function, signature, opset=15, output_path=str(file))
    return {"x": PICTURES}


def jax2onnx(file: Path) -> Feeds:
    """A perceptron with a normalization, written in jax.numpy."""
    import jax
    import jax.numpy as jnp
    from jax2onnx import to_onnx

    w, v = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 3)))

    def function(x: Any) -> Any:
        h = jax.nn.gelu(x @ w)
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return jax.nn.softmax(h @ v)

    to_onnx(function, [jax.ShapeDtypeStruct(X.shape, jnp.float32)], return_mode="file", output_path=str(file))
    return _fed(file, X)


def sklearn(file: Path) -> Feeds:
    """A scaler and a perceptron of scikit-learn."""
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, random_state=0))
    model.fit(X, X @ np.ones(4))
    file.write_bytes(to_onnx(model, X).SerializeToString())
    return _fed(file, X)


def lightgbm(file: Path) -> Feeds:
    """Trees, which have no gradient."""
    from lightgbm import LGBMRegressor
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    model = LGBMRegressor(n_estimators=5, min_child_samples=2, verbose=-1).fit(
        np.tile(X, (20, 1)), np.tile(X[:, 0], 20)
    )
    found = convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, 4]))])
    file.write_bytes(found.SerializeToString())
    return {"x": X}


def optimum(file: Path) -> Feeds:
    """A BERT of random weights."""
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import BertConfig, BertModel

    sizes = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=32,
    )  # fmt: skip
    onnx_export_from_model(
        BertModel(sizes).eval(), file.parent / "optimum", task="feature-extraction", do_validation=False
    )
    (file.parent / "optimum" / "model.onnx").rename(file)
    tokens = RNG.integers(1, 60, (2, 7))
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}


def ultralytics(file: Path) -> Feeds:
    """A detector, of random weights."""
    from ultralytics import YOLO

    written = YOLO("yolov8n.yaml", verbose=False).export(format="onnx", imgsz=64, simplify=False)
    Path(written).rename(file)
    return _fed(file, RNG.random((1, 3, 64, 64), np.float32))


def _fed(file: Path, x: np.ndarray) -> Feeds:
    """Data for the only input of a model."""
    import onnx

    graph = onnx.load(file).graph
    stored = {tensor.name for tensor in graph.initializer}
    (name,) = (value.name for value in graph.input if value.name not in stored)
    return {name: x}


FRAMEWORKS: dict[str, tuple[Callable[[Path], Feeds], str]] = {
    "keras": (keras, "proved"),
    "tf2onnx": (tf2onnx, "proved"),
    "jax2onnx": (jax2onnx, "proved"),
    "sklearn": (sklearn, "proved"),
    "lightgbm": (lightgbm, ""),
    "optimum": (optimum, "proved"),
    "ultralytics": (ultralytics, "proved"),
}
"""What writes a model and gives data for it, and the verdict that is expected; "" where it is refused."""


def main() -> int:
    """Judge the frameworks that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(FRAMEWORKS))
    asked = parser.parse_args()
    surprises = 0
    for name in asked.names:
        write, expected = FRAMEWORKS[name]
        file = asked.folder.resolve() / f"{name}.onnx"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            feeds = write(file)
        except ImportError as error:
            print(f"{name:42} | not installed: {error}", flush=True)
            continue
        found = judge(file, feeds, file.parent)
        surprises += found.verdict != expected
        print(found.row(name), flush=True)
    return int(surprises > 0)


if __name__ == "__main__":
    sys.exit(main())
