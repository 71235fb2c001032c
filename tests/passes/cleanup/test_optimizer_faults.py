"""Training models load in onnxruntime and equal PyTorch's, although its optimizer mistakes some of their patterns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.cli import run
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.passes.cleanup.optimizer_faults import keep_cubic_layout

torch = pytest.importorskip("torch")
F = torch.nn.functional

SIZES = {1: 9, 2: 7, 3: 6}
CONVOLUTIONS: dict[str, Callable] = {
    f"{name}{rank}": getattr(F, f"{function}{rank}d")
    for name, function in (("Conv", "conv"), ("ConvTranspose", "conv_transpose"))
    for rank in SIZES
}
GRID = [
    pytest.param(
        op,
        {"rank": rank, "group": group, "stride": stride, "dilation": dilation, "pad": pad, "kernel": kernel},
        marks=[] if dilation == 1 and pad == 0 and kernel == 3 and rank != 2 else [pytest.mark.slow],
    )
    for op, rank, group, stride, dilation, pad, kernel in itertools.product(
        ("Conv", "ConvTranspose"), SIZES, (1, 2), (1, 2, 3), (1, 2), (0, 1), (1, 3)
    )
    if pad < kernel and (kernel > 1 or dilation == 1)
]


def convolution(op: str, rank: int, group: int, stride: int, dilation: int, pad: int, kernel: int) -> ModelProto:
    """A convolution of two inputs, images and weight."""
    attributes = {"strides": [stride] * rank, "dilations": [dilation] * rank, "pads": [pad] * 2 * rank, "group": group}
    weight = [4, 4 // group, *[kernel] * rank]
    inputs = {"x": [2, 4, *[SIZES[rank]] * rank], "w": weight}
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def derived(tmp_path: Path, model: ModelProto, *options: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results of the model that the command derives, on random data, and these data."""
    onnx.save(model, tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["derive", str(tmp_path / "model.onnx"), *options, "--no-verify", "-o", str(made)]) == 0
    session = onnxruntime.InferenceSession(made)
    rng = np.random.default_rng(1)
    data = {each.name: np.float32(rng.standard_normal(each.shape)) for each in session.get_inputs()}
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, data), strict=True)), data


def close(got: np.ndarray, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("op", "form"), GRID)
@pytest.mark.thinned(4)
def test_tangents_of_a_weight(tmp_path: Path, op: str, form: dict[str, int]) -> None:
    got, data = derived(tmp_path, convolution(op, **form), "--kind", "jvp", "--wrt", "w")
    x, tangent = (torch.tensor(data[name]).double() for name in ("x", "w_tangent"))
    settings = {"stride": form["stride"], "dilation": form["dilation"], "padding": form["pad"], "groups": form["group"]}
    close(got["y_tangent"], CONVOLUTIONS[f"{op}{form['rank']}"](x, tangent, **settings))  # linear in its weight


@pytest.mark.parametrize(("op", "form"), GRID)
@pytest.mark.thinned(3)
def test_second_derivatives(tmp_path: Path, op: str, form: dict[str, int]) -> None:
    got, data = derived(tmp_path, convolution(op, **form), "--kind", "hvp", "--wrt", "x", "--wrt", "w")
    x, w, *vectors = (torch.tensor(data[name]).double() for name in ("x", "w", "x_vector", "w_vector"))
    settings = {"stride": form["stride"], "dilation": form["dilation"], "padding": form["pad"], "groups": form["group"]}
    wanted = torch.autograd.functional.hvp(
        lambda x, w: CONVOLUTIONS[f"{op}{form['rank']}"](x, w, **settings).sum(), (x, w), tuple(vectors)
    )[1]
    close(got["x_hvp"], wanted[0])
    close(got["w_hvp"], wanted[1])


def test_a_weight_that_the_model_pads(tmp_path: Path) -> None:
    """The model's runtime computes the padded weight once; a training model is fed the weight."""
    nodes = [
        helper.make_node("Pad", ["w", "pads"], ["wide"]),
        helper.make_node("Conv", ["x", "wide"], ["y"], pads=[0, 0]),
    ]
    rng = np.random.default_rng(2)
    weight, pads = np.float32(rng.standard_normal((3, 2, 2))), np.int64([0, 0, 1, 0, 0, 2])
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 5])],
        [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(pads, "pads")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["build", str(tmp_path / "model.onnx"), "--loss", "mse", "--label", "t", "-o", str(made)]) == 0
    session = onnxruntime.InferenceSession(made)
    x, label = np.float32(rng.standard_normal((2, 2, 9))), np.float32(rng.standard_normal((2, 3, 5)))
    got = session.run(["w_grad"], {"x": x, "t": label})[0]
    w = torch.tensor(weight).double().requires_grad_()
    F.mse_loss(F.conv1d(torch.tensor(x).double(), F.pad(w, (1, 2))), torch.tensor(label).double()).backward()
    close(got, w.grad)


RNG = np.random.default_rng(5)


EMBEDDING = np.float32(RNG.standard_normal((1, 6, 6, 8)))


def embedded() -> ModelProto:
    """A position embedding that is resized to a smaller and larger axis, and added, as vision transformers do."""
    nodes = [
        helper.make_node("Transpose", ["e"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "Resize", ["t", "", "", "s"], ["r"], mode="cubic", coordinate_transformation_mode="half_pixel"
        ),
        helper.make_node("Transpose", ["r"], ["u"], perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["u", "k"], ["v"]),
        helper.make_node("Mul", ["x", "v"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(EMBEDDING, "e"),
        numpy_helper.from_array(np.int64([1, 8, 4, 7]), "s"),
        numpy_helper.from_array(np.int64([1, -1, 8]), "k"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 28, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 28, 8])
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def test_each_of_several_resizes_keeps_its_layout() -> None:
    graph = Graph(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[1, 4, 4, 3] x) => (float[1, 3, 16, 16] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}> {
        t = Transpose <perm = [0, 3, 1, 2]> (x)  r = Resize <mode = "cubic"> (t, , s)
        h = Sigmoid(r)  y = Resize <mode = "cubic"> (h, , s) }""")
    )
    infer_types(graph)
    for _ in range(2):  # the second time, the Reshapes are there
        keep_cubic_layout(graph)
        kinds = [node.op_type for node in graph.nodes]
        assert kinds == ["Transpose", "Resize", "Reshape", "Sigmoid", "Resize", "Reshape"]


def test_a_resized_position_embedding_is_trained() -> None:
    model = embedded()
    x, label = (np.float32(RNG.standard_normal((2, 28, 8))) for _ in range(2))
    got = Executor(build(model).model, fallback=False)({"x": x, "label": label})
    e = torch.tensor(EMBEDDING).double().requires_grad_()
    size = {"size": (4, 7), "mode": "bicubic", "align_corners": False}
    resized = torch.nn.functional.interpolate(e.permute(0, 3, 1, 2), **size)
    y = torch.tensor(x) * resized.permute(0, 2, 3, 1).reshape(1, -1, 8)
    torch.mean((y - torch.tensor(label)) ** 2).backward()
    np.testing.assert_allclose(got["e_grad"], e.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_one_view_is_enough() -> None:
    built = build(embedded())
    again = derive(built.model, of=["loss"], wrt=["e"])
    views = [node for node in again.graph.node if node.name.endswith("/view")]
    assert len(views) == 1
