"""Makes every sample beside this script: `python sample_models/make.py [FOLDER]`.

A sample must be small, look like a PyTorch export and need no framework to remake, so each is written node by
node. Weights are random and everything is seeded: the same numpy and onnx give the same bytes again.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import helper, numpy_helper

Spec = tuple[int, list[int | str | None]]  # element type, shape

OPSET = 18
FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def tensor(value: ArrayLike, name: str = "") -> onnx.TensorProto:
    """A tensor of `value`: floats become float32, int64 and bool stay."""
    array = np.asarray(value)
    return numpy_helper.from_array(array.astype(np.float32) if array.dtype.kind == "f" else array, name)


class Net:
    """The nodes and weights of one sample; values are named as the exporter names them: relu, relu_1, ..."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.count: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """`stem`, and from its second use on `stem_1`, `stem_2`, ..."""
        number = self.count[stem] = self.count.get(stem, -1) + 1
        return f"{stem}_{number}" if number else stem

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Append one single-output node and return its output's name."""
        output = out or self.fresh(op.lower())
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def weight(self, name: str, value: ArrayLike) -> str:
        """A named initializer."""
        self.weights.append(tensor(value, name))
        return name

    def initializer(self, value: ArrayLike) -> str:
        """An unnamed constant in an initializer (`val_7`), as PyTorch's newer exporter leaves it."""
        return self.weight(self.fresh("val"), value)

    def constant(self, value: ArrayLike) -> str:
        """An unnamed constant in a Constant node, as PyTorch's older exporter leaves it."""
        return self("Constant", value=tensor(value))

    def normal(self, name: str, *shape: int, scale: float) -> str:
        """A weight drawn from N(0, scale^2)."""
        return self.weight(name, self.random.normal(0, scale, shape))

    def affine(self, name: str, *shape: int, gain: float = 1.0) -> tuple[str, str]:
        """A weight of `shape`, outputs first, with variance gain / fan-in, and its zero bias."""
        weight = self.normal(f"{name}.weight", *shape, scale=(gain / np.prod(shape[1:])) ** 0.5)
        return weight, self.weight(f"{name}.bias", np.zeros(shape[0]))

    def identity(self, name: str, size: int) -> tuple[str, str]:
        """The scale and bias of a normalization before any training."""
        return self.weight(f"{name}.weight", np.ones(size)), self.weight(f"{name}.bias", np.zeros(size))

    def conv(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """A 3x3 convolution that keeps the image's size."""
        weights = self.affine(name, outputs, inputs, 3, 3, gain=2)
        return self("Conv", x, *weights, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        """BatchNormalization as exported for inference, with statistics near (0, 1)."""
        weights = self.identity(name, channels)
        mean = self.normal(f"{name}.running_mean", channels, scale=0.1)
        var = self.weight(f"{name}.running_var", self.random.uniform(0.5, 1.5, channels))
        return self("BatchNormalization", x, *weights, mean, var, epsilon=1e-5, momentum=0.9)

    def gemm(self, x: str, name: str, inputs: int, outputs: int, gain: float = 1.0, out: str = "") -> str:
        """A linear layer on [batch, inputs]."""
        return self("Gemm", x, *self.affine(name, outputs, inputs, gain=gain), out=out, transB=1)

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """A linear layer on [batch, sequence, inputs], for Gemm takes matrices only."""
        weight, bias = self.affine(name, outputs, inputs)
        return self("Add", self("MatMul", x, self("Transpose", weight, perm=[1, 0])), bias)

    def layer_norm(self, x: str, name: str, size: int) -> str:
        """LayerNormalization over the last axis."""
        return self("LayerNormalization", x, *self.identity(name, size), axis=-1, epsilon=1e-5)

    def save(self, folder: Path, inputs: dict[str, Spec], outputs: dict[str, Spec], opset: int = OPSET) -> None:
        """Check the model fully and write it."""
        imports = [onnx.OperatorSetIdProto(domain="", version=opset)]
        declared, returned = (
            [helper.make_tensor_value_info(name, *spec) for name, spec in values.items()]
            for values in (inputs, outputs)
        )
        model = helper.make_model(
            helper.make_graph(self.nodes, self.name, declared, returned, self.weights),
            opset_imports=imports,
            ir_version=helper.find_min_ir_version_for(imports),
            producer_name="onnxgrad sample",
        )
        onnx.checker.check_model(model, full_check=True)
        (folder / f"{self.name}.onnx").write_bytes(model.SerializeToString(deterministic=True))


def add(folder: Path) -> None:
    """A constant added to ten columns: the example of the older documentation of gradient graphs."""
    net = Net("add")
    net("Add", "X", net.weight("Ad_Addcst", [1.0]), out="Y")
    net.nodes[-1].name = "Ad_Add"
    net.save(folder, {"X": (FLOAT, [None, 10])}, {"Y": (FLOAT, [None, 10])}, opset=14)


def linear_regression(folder: Path) -> None:
    """One linear layer on three features, and 256 noisy points of a plane for it to find."""
    net = Net("linear_regression")
    net.gemm("x", "fc", 3, 1, out="prediction")
    net.save(folder, {"x": (FLOAT, ["batch", 3])}, {"prediction": (FLOAT, ["batch", 1])})
    x = net.random.normal(size=(256, 3)).astype(np.float32)
    noise = net.random.normal(0, 0.1, (256, 1))
    y = (x @ np.array([[1.5], [-2.0], [0.5]]) + 0.25 + noise).astype(np.float32)
    np.savez_compressed(folder / "linear_regression.npz", x=x, y=y)


def digits(folder: Path) -> None:
    """The 1,797 8x8 digits of scikit-learn, shuffled and scaled from 0..16 to 0..1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.images[order, None] / 16).astype(np.float32)
    save_split(folder / "digits.npz", x, data.target[order].astype(np.int64))


def save_split(path: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    """Write train_x, train_y, test_x and test_y: the last fifth is held out."""
    split = len(x) * 4 // 5
    np.savez_compressed(path, train_x=x[:split], train_y=y[:split], test_x=x[split:], test_y=y[split:])


def digits_mlp(folder: Path) -> None:
    """64 -> 64 -> 32 -> 10 with Relu."""
    net = Net("digits_mlp")
    x = net("Relu", net.gemm(net("Flatten", "x", axis=1), "fc1", 64, 64, gain=2))
    x = net("Relu", net.gemm(x, "fc2", 64, 32, gain=2))
    net.gemm(x, "fc3", 32, 10, out="logits")
    net.save(folder, {"x": (FLOAT, ["batch", 1, 8, 8])}, {"logits": (FLOAT, ["batch", 10])})


def digits_cnn(folder: Path) -> None:
    """Two blocks of Conv, BatchNormalization, Relu and MaxPool, then two linear layers."""
    net = Net("digits_cnn")
    x = "x"
    for block, (inputs, outputs) in enumerate([(1, 16), (16, 32)], start=1):
        x = net("Relu", net.batch_norm(net.conv(x, f"conv{block}", inputs, outputs), f"bn{block}", outputs))
        x = net("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net("Relu", net.gemm(net("Flatten", x, axis=1), "fc1", 128, 64, gain=2))
    net.gemm(x, "fc2", 64, 10, out="logits")
    net.save(folder, {"x": (FLOAT, ["batch", 1, 8, 8])}, {"logits": (FLOAT, ["batch", 10])})


def tiny_transformer(folder: Path) -> None:
    """A pre-norm encoder of two layers over at most 64 tokens, mean-pooled into four classes, and its task.

    Tokens 0, 1, 2 and 3 stand once each among others, and the class is the one that comes first: a question
    of order, which a bag of words cannot answer.
    """
    vocabulary, limit, width, heads, classes = 16, 64, 32, 4, 4
    net = Net("tiny_transformer")
    length = net("Squeeze", net("Shape", "input_ids", start=1, end=2), net.constant(np.array([0])))
    positions = net("Range", net.constant(np.int64(0)), length, net.constant(np.int64(1)))
    tokens = net("Gather", net.normal("embed_tokens.weight", vocabulary, width, scale=0.5), "input_ids")
    places = net("Gather", net.normal("embed_positions.weight", limit, width, scale=0.5), positions)
    x = net("Add", tokens, places)
    for layer in ("layers.0", "layers.1"):
        normed = net.layer_norm(x, f"{layer}.norm1", width)
        projected = [net.linear(normed, f"{layer}.{name}_proj", width, width) for name in "qkv"]
        split = [net("Reshape", part, net.constant([0, 0, heads, width // heads])) for part in projected]
        query, key, value = (net("Transpose", part, perm=[0, 2, 1, 3]) for part in split)
        key = net("Transpose", key, perm=[0, 1, 3, 2])
        scores = net("Div", net("MatMul", query, key), net.constant((width / heads) ** 0.5))
        mixed = net("Transpose", net("MatMul", net("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        joined = net("Reshape", mixed, net.constant([0, 0, width]))
        x = net("Add", x, net.linear(joined, f"{layer}.out_proj", width, width))
        hidden = net.linear(net.layer_norm(x, f"{layer}.norm2", width), f"{layer}.fc1", width, 2 * width)
        erf = net("Erf", net("Div", hidden, net.constant(2**0.5)))
        gelu = net("Mul", net("Mul", hidden, net("Add", erf, net.constant(1.0))), net.constant(0.5))
        x = net("Add", x, net.linear(gelu, f"{layer}.fc2", 2 * width, width))
    pooled = net("ReduceMean", net.layer_norm(x, "norm", width), net.constant([1]), keepdims=0)
    net.gemm(pooled, "classifier", width, classes, out="logits")
    net.save(folder, {"input_ids": (INT64, ["batch", "sequence"])}, {"logits": (FLOAT, ["batch", classes])})

    count, sequence = 2560, 12
    ids = net.random.integers(classes, vocabulary, (count, sequence))
    at = net.random.random((count, sequence)).argsort(axis=1)[:, :classes]
    np.put_along_axis(ids, at, np.broadcast_to(np.arange(classes), at.shape), axis=1)
    save_split(folder / "tiny_transformer.npz", ids, at.argmin(axis=1))


def symbolic(folder: Path) -> None:
    """Masked attention behind a class token, with batch and sequence carried through shape arithmetic.

    Shape, Slice and Concat make the operands of Reshape, Expand and Slice, as exporters write `view(b, n)`.
    """
    width, heads, classes = 12, 3, 5
    net = Net("symbolic")
    one, zero, last = net.initializer([1]), net.initializer([0]), net.initializer([np.iinfo(np.int64).max])
    batch = net("Slice", net("Shape", "x"), zero, one)
    size, three = net.initializer([width]), net.initializer([3])

    token = net.normal("cls_token", 1, 1, width, scale=0.5)
    x = net("Concat", net("Expand", token, net("Concat", batch, one, size, axis=0)), "x", axis=1)
    length = net("Slice", net("Shape", x), one, net.initializer([2]))
    x = net("Add", x, net("Slice", net.normal("pos_embed", 1, 64, width, scale=0.5), zero, length, one, one))

    shape = net("Concat", batch, length, three, net.initializer([heads]), net.initializer([-1]), axis=0)
    qkv = net("Reshape", net.linear(x, "qkv", width, 3 * width), shape)
    qkv = net("Transpose", qkv, perm=[2, 0, 3, 1, 4])
    query, key, value = (net("Gather", qkv, net.initializer(np.int64(part)), axis=0) for part in range(3))
    depth = net("Cast", net("Slice", net("Shape", query), net.initializer([-1]), last), to=FLOAT)
    scores = net("Div", net("MatMul", query, net("Transpose", key, perm=[0, 1, 3, 2])), net("Sqrt", depth))

    seen = net("Expand", net.initializer([[True]]), net("Concat", batch, one, axis=0))
    seen = net("Unsqueeze", net("Concat", seen, "mask", axis=1), net.initializer([1, 2]))
    seen = net("Expand", seen, net("Shape", scores))
    scores = net("Where", seen, scores, net.initializer(-np.inf))
    mixed = net("Transpose", net("MatMul", net("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    joined = net("Reshape", mixed, net("Concat", batch, length, size, axis=0))
    x = net("Add", x, net.linear(joined, "proj", width, width))
    net.gemm(net("Gather", x, net.initializer(np.int64(0)), axis=1), "head", width, classes, out="logits")
    inputs: dict[str, Spec] = {
        "x": (FLOAT, ["batch", "sequence", width]),
        "mask": (BOOL, ["batch", "sequence"]),
    }
    net.save(folder, inputs, {"logits": (FLOAT, ["batch", classes])})


def main(folder: Path) -> None:
    """Write every sample into `folder`."""
    for sample in (add, linear_regression, digits, digits_mlp, digits_cnn, tiny_transformer, symbolic):
        sample(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
