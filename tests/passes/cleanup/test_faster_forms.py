"""Transposed products and scaled channels in faster forms: values and gradients equal PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import as_run
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.cleanup.faster_forms import convolve_channels, turn_products

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def with_weight(text: str, w: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    return model


@pytest.mark.parametrize(("rows", "columns", "made_by"), [(2, 3, "MatMul"), (6, 3, "MatMul"), (7, 3, "Transpose")])
@pytest.mark.parametrize("batch", ["N", "N, M"])
def test_the_gradient_of_a_transposed_weight(rows: int, columns: int, made_by: str, batch: str) -> None:
    text = f"g (float[{batch}, {columns}] x) => (y) {{ t = Transpose(w) y = MatMul(x, t) }}"
    w, x = normal(rows, columns), normal(*(4, 5)[: 1 + batch.count(",")], columns)
    model = build(with_weight(text, w), Options()).model
    label = normal(*x.shape[:-1], rows)
    leaf = torch.tensor(w, requires_grad=True)
    torch.nn.functional.mse_loss(torch.tensor(x) @ leaf.t(), torch.tensor(label)).backward()
    assert leaf.grad is not None
    found = Executor(model)({"x": x, "label": label, "w": w})["w_grad"]
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-5, atol=1e-6)
    assert [node.op_type for node in model.graph.node if "w_grad" in node.output] == [made_by]


SIZES = {"p": "2, 4", "r": "2, 4", "pt": "4, 2", "q": "4, 5", "qt": "5, 4"}
CHAIN = """
g (float[3, 2] a, float[3, 4] b, float[2, 5] c) => ({outputs}) {{
    at = Transpose(a) p = MatMul(at, b) pt = Transpose<perm = [1, 0]>(p) q = MatMul(pt, c) qt = Transpose(q) {more}
}}
"""


@pytest.mark.parametrize(
    ("outputs", "more", "transposes"),
    [
        (["pt"], "", 1),
        (["p", "pt"], "", 2),
        (["pt", "r"], "r = Relu(p)", 2),
        (["q"], "", 1),
        (["qt"], "", 3),  # pt is a factor itself, and no transpose any more
    ],
)
def test_whose_product_is_turned(outputs: list[str], more: str, transposes: int) -> None:
    model = onnx.parser.parse_model(
        HEADER + CHAIN.format(outputs=", ".join(f"float[{SIZES[name]}] {name}" for name in outputs), more=more)
    )
    for node in model.graph.node:
        node.name = node.output[0]
        node.metadata_props.add(key=ROLE, value="backward")
    graph = Graph(model)
    infer_types(graph)
    before = onnx.ModelProto()
    before.CopyFrom(graph.commit())
    turn_products(graph)
    graph.remove_unused()
    after = graph.commit()
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node].count("Transpose") == transposes
    feeds = {"a": normal(3, 2), "b": normal(3, 4), "c": normal(2, 5)}
    expected, found = Executor(before)(feeds), Executor(after)(feeds)
    for name in outputs:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_a_tied_embedding_is_scattered_onto_the_gradient_of_its_product() -> None:
    """Two tensors of the table's size are made, the sum and its gradient by the product, not five."""
    count, vocabulary, width = 8, 300, 6
    text = f"g (int64[{count}] ids) => (y) {{ h = Gather(w, ids) t = Transpose(w) y = MatMul(h, t) }}"
    w, ids = normal(vocabulary, width), np.array([1, 7, 7, 299, 7, 0, 1, -1])
    label = rng.integers(0, vocabulary, count)
    model = build(with_weight(text, w), Options(losses=(LossSpec("cross-entropy"),))).model
    found = Executor(model, threads=2)({"ids": ids, "label": label, "w": w})
    leaf = torch.tensor(w, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(leaf[torch.tensor(ids)] @ leaf.t(), torch.tensor(label))
    loss.backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found["w_grad"], leaf.grad.numpy(), rtol=1e-4, atol=1e-6)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("ScatterElements") == 2  # the table's, and that of the logits at the labels
    assert "ConstantOfShape" not in [node.op_type for node in model.graph.node if node.output[0] in _bases(model)]


def _bases(model: onnx.ModelProto) -> list[str]:
    """What is scattered onto."""
    return [node.input[0] for node in model.graph.node if node.op_type == "ScatterElements"]


OPSET_18 = '<ir_version: 10, opset_import: ["" : 18]>'


IMAGE, VECTOR = "float[N, 3, 9, 8]", "float[1, 3, 1, 1]"


def written(text: str) -> Graph:
    """A model's graph as the pass leaves it."""
    graph = Graph(onnx.parser.parse_model(OPSET_18 + text))
    infer_types(graph)
    convolve_channels(graph)
    graph.commit()
    return graph


def convolved(text: str) -> bool:
    graph = written(text)
    return any(node.op_type == "Conv" for node in graph.nodes)


@pytest.mark.parametrize("body", ["p = Mul(x, a) y = Add(p, b)", "p = Mul(a, x) y = Add(b, p)"])
@pytest.mark.parametrize("shapes", [
    (IMAGE, VECTOR), ("float[N, 3, 70]", "float[1, 3, 1]"), ("float[N, 3, H, W]", "float[3, 1, 1]"),
    ("float[2, 3, 5, 5, 5]", "float[3, 1, 1, 1]"),
])  # fmt: skip
@pytest.mark.parametrize("batch", [0, 2])
def test_images_of_every_rank(body: str, shapes: tuple[str, str], batch: int) -> None:
    image, vector = shapes
    text = f"g ({image} x, {vector} a, {vector} b) => (y) {{ {body} }}"
    dims = [int(d) if d.strip().isdigit() else 9 for d in image[6:-1].split(",")]
    fixed = image.startswith("float[2")
    rng = np.random.default_rng(0)
    x = rng.standard_normal([2 if fixed else batch, *dims[1:]]).astype(np.float32)
    a, b = (rng.standard_normal([int(d) for d in vector[6:-1].split(",")]).astype(np.float32) for _ in range(2))
    graph = written(text)
    assert [node.op_type for node in graph.nodes if node.op_type in ("Mul", "Add", "Conv")] == ["Conv"]
    np.testing.assert_array_equal(Executor(graph.proto, fallback=False)({"x": x, "a": a, "b": b})["y"], x * a + b)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("({IMAGE} x, {VECTOR} b) => (y) <{VECTOR} a = {1, 2, 3}> { p = Mul(x, a) y = Add(p, b) }", "constant factors"),
        ("({IMAGE} x, {VECTOR} a, {VECTOR} b) => (y, p) { p = Mul(x, a) y = Add(p, b) }", "the product is wanted"),
        ("({IMAGE} x, {VECTOR} a, {VECTOR} b) => (y, z) { p = Mul(x, a) y = Add(p, b) z = Neg(p) }", "and read"),
        ("({IMAGE} x, {VECTOR} a) => (y) { p = Mul(x, a) y = Add(p, p) }", "twice"),
        ("({IMAGE} x, {VECTOR} a, float b) => (y) { p = Mul(x, a) y = Add(p, b) }", "one number is added"),
        ("({IMAGE} x, {VECTOR} a, {IMAGE} b) => (y) { p = Mul(x, a) y = Add(p, b) }", "an image is added"),
        ("({IMAGE} x, float[1, 1, 9, 1] a, {VECTOR} b) => (y) { p = Mul(x, a) y = Add(p, b) }", "rows are scaled"),
        ("({IMAGE} x, {IMAGE} a, {VECTOR} b) => (y) { p = Mul(x, a) y = Add(p, b) }", "an image is multiplied"),
        ("(float[N, C, 9, 9] x, float[1, C, 1, 1] a, float[1, C, 1, 1] b) => (y) { p = Mul(x, a) y = Add(p, b) }",
         "unknown channels"),
        ("(float[N, 3, 8, 8] x, {VECTOR} a, {VECTOR} b) => (y) { p = Mul(x, a) y = Add(p, b) }", "a small image"),
        ("(float[N, 3] x, float[1, 3] a, float[1, 3] b) => (y) { p = Mul(x, a) y = Add(p, b) }", "no image"),
        ("(double[N, 3, 9, 9] x, double[3, 1, 1] a, double[3, 1, 1] b) => (y) { p = Mul(x, a) y = Add(p, b) }",
         "onnxruntime convolves float32 alone"),
    ],
)  # fmt: skip
def test_what_stays_a_product_and_a_sum(text: str, why: str) -> None:
    assert not convolved("g " + text.replace("{IMAGE}", IMAGE).replace("{VECTOR}", VECTOR)), why


def network() -> tuple[torch.nn.Module, onnx.ModelProto]:
    """A convolution, a normalization with the statistics of the batch, a Relu and a mean over all pixels."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 3)
    )
    model = onnx.parser.parse_model(
        OPSET_18
        + """
        g (float[N, 2, 12, 11] x) => (y) {
            c = Conv<kernel_shape = [3, 3]>(x, w0, b0)
            n = BatchNormalization(c, w1, b1, running_mean, running_var)
            r = Relu(n)
            y = Conv<kernel_shape = [3, 3]>(r, w3, b3)
        }"""
    )
    for i in (0, 1, 3):
        with torch.no_grad():
            net[i].bias.normal_()  # type: ignore[union-attr, operator]
        model.graph.initializer.append(onnx.numpy_helper.from_array(net[i].weight.detach().numpy(), f"w{i}"))  # type: ignore[union-attr, operator]
        model.graph.initializer.append(onnx.numpy_helper.from_array(net[i].bias.detach().numpy(), f"b{i}"))  # type: ignore[union-attr, operator]
    for name, value in (("running_mean", np.zeros(3)), ("running_var", np.ones(3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return net, model


def test_a_normalization_is_two_convolutions_of_which_one_takes_in_the_relu() -> None:
    net, model = network()
    training = build(model, Options(losses=(LossSpec("mse"),), mode="train")).model
    rng = np.random.default_rng(0)
    x, label = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 2, 12, 11), (5, 2, 8, 7)))
    torch.nn.functional.mse_loss(net(torch.tensor(x)), torch.tensor(label)).backward()
    found = Executor(training, fallback=False)({"x": x, "label": label})
    for i in (0, 1, 3):
        for name, leaf in ((f"w{i}_grad", net[i].weight), (f"b{i}_grad", net[i].bias)):  # type: ignore[union-attr]
            np.testing.assert_allclose(found[name], leaf.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)  # type: ignore[union-attr]
    fused = [node for node in as_run(training).graph.node if node.op_type == "FusedConv" and "BatchNorm" in node.name]
    assert [a.s for node in fused for a in node.attribute if a.name == "activation"] == [b"Relu"]
    assert sum(a.name == "group" and a.i == 3 for node in training.graph.node for a in node.attribute) == 2


@pytest.mark.parametrize("options", [{"target": "ort-cuda"}, {"target": "portable"}, {"as_gradient_op": True}])
def test_other_runtimes_and_what_is_differentiated_yet_have_products_and_sums(options: dict[str, object]) -> None:
    _, model = network()
    training = build(model, Options(losses=(LossSpec("mse"),), mode="train", **options)).model  # type: ignore[arg-type]
    assert not any(a.name == "group" and a.i == 3 for node in training.graph.node for a in node.attribute)
