"""Scaled channels as convolutions: which are, that onnxruntime fuses a Relu, and what they compute, against PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import as_run
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.cleanup.faster_forms import convolve_channels

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
IMAGE, VECTOR = "float[N, 3, 9, 8]", "float[1, 3, 1, 1]"


def written(text: str) -> Graph:
    """A model's graph as the pass leaves it."""
    graph = Graph(onnx.parser.parse_model(HEADER + text))
    infer_types(graph)
    before = len(graph.nodes)
    changed = convolve_channels(graph)
    assert changed == (len(graph.nodes) > before)
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
        HEADER
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
