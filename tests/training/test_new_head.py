"""A last layer of another size: the network before it stays, the new one is drawn and trained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from onnxgrad_cli import Options
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import LoraSpec
from onnxgrad_cli.training.new_head import with_classes
from tests.facts import raises

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

LOSSES = (LossSpec("cross-entropy"),)
rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((40, 2, 4, 4)).astype(np.float32)
ROWS = rng.standard_normal((40, 6)).astype(np.float32)
KINDS: dict[str, tuple[Any, np.ndarray]] = {
    "gemm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), ROWS),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Softmax(-1)), ROWS),
    "matmul": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), ROWS[:, None].repeat(3, 1)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 5, 1)), IMAGES),
}


def exported(kind: str) -> ModelProto:
    torch.manual_seed(0)
    net, x = KINDS[kind][0](), KINDS[kind][1]
    file = io.BytesIO()
    torch.onnx.export(
        net, (torch.tensor(x[:2]),), file, opset_version=17, dynamo=False, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def answers(model: ModelProto, x: np.ndarray, output: str = "y") -> np.ndarray:
    return ort.InferenceSession(model.SerializeToString()).run([output], {"x": x})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_new_layer_is_another_of_its_kind(kind: str) -> None:
    """Its results are those of numpy on what the old layer was given; a seed draws the same again."""
    old, x = exported(kind), KINDS[kind][1]
    new, again, other = (onnx.ModelProto.FromString(old.SerializeToString()) for _ in range(3))
    names = with_classes(new, None, 3, 7)
    with_classes(again, "y", 3, 7)
    with_classes(other, "y", 3, 8)
    onnx.checker.check_model(new, full_check=True)
    assert new.SerializeToString() == again.SerializeToString() != other.SerializeToString()
    read = {tensor.name: numpy_helper.to_array(tensor) for tensor in new.graph.initializer}
    weight, *biases = (read[name] for name in names)
    assert all(not bias.any() for bias in biases) and len(biases) == 1
    (head,) = (node for node in new.graph.node if names[0] in node.input)
    old.graph.output.append(onnx.ValueInfoProto(name=head.input[0]))
    hidden = answers(old, x, head.input[0])
    matrix = weight.reshape(3, 8).T if kind == "conv" else weight if weight.shape[1] == 3 else weight.T
    wanted = np.einsum("nchw,cd->ndhw" if kind == "conv" else "...c,cd->...d", hidden, matrix)
    if kind == "softmax":
        wanted = torch.softmax(torch.tensor(wanted), -1).numpy()
    np.testing.assert_allclose(answers(new, x), wanted, rtol=1e-4, atol=1e-6)
    bound = np.sqrt(6 / (8 + 3))
    assert 0.6 * bound < np.abs(weight).max() <= bound and abs(weight.mean()) < 0.5 * bound


@pytest.mark.parametrize("options", [{}, {"lora": LoraSpec(2)}, {"train": ("0.bias",)}], ids=["all", "lora", "bias"])
@pytest.mark.thinned(3)
def test_a_training_with_other_classes(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of its checkpoint and its adapters too the model is made that it began with."""
    adapter = tmp_path / "a.safetensors" if "lora" in options else None
    model, labels = exported("gemm"), (ROWS[:, 0] > 0).astype(int) + (ROWS[:, 1] > 0)
    np.savez(tmp_path / "data.npz", x=ROWS, label=labels)
    course = Course(epochs=60, learning_rate=0.05, batch_size=40, classes=3, seed=1)
    asked = Options(losses=LOSSES, **options)
    found = run_train(model, tmp_path / "data.npz", tmp_path / "t.onnx", asked, course, adapter=adapter)
    trained = onnx.load(tmp_path / "t.onnx")
    assert trained.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
    assert found.epochs[-1]["loss"] < 0.5 * found.epochs[0]["loss"]
    assert (answers(trained, ROWS).argmax(1) == labels).mean() > 0.8
    assert {t.name for t in trained.graph.initializer} == {t.name for t in model.graph.initializer}
    said: list[str] = []
    for source in (tmp_path / "t.onnx.run", *([adapter] if adapter else [])):
        run_export(source, model, tmp_path / "e.onnx", tell=lambda words, _: said.append(words))
        assert any("'y' gets 3 classes" in line for line in said)
        said.clear()
        written = onnx.load(tmp_path / "e.onnx")
        assert written.graph.output == trained.graph.output
        np.testing.assert_array_equal(answers(written, ROWS), answers(trained, ROWS))
    with pytest.raises(OnnxgradError, match="another model"):
        run_export(tmp_path / "t.onnx.run", exported("softmax"), tmp_path / "e.onnx", force=True)


def test_an_old_file_declares_the_new_weights_as_inputs() -> None:
    model = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        m (double[n, 2] x, double[2, 2] w, double[2] b) => (double[n, 2] y)
        <double[2, 2] w = {1, 2, 3, 4}, double[2] b = {1, 2}> { h = MatMul(x, w) y = Add(h, b) }""")
    assert with_classes(model, "y", 3, 0) == ["w", "b"]
    onnx.checker.check_model(model, full_check=True)
    declared = [value.type.tensor_type for value in (*model.graph.input, *model.graph.output)]
    assert {each.elem_type for each in declared} == {onnx.TensorProto.DOUBLE}
    assert [[dim.dim_value for dim in each.shape.dim] for each in declared] == [[0, 2], [2, 3], [3], [0, 3]]


@pytest.mark.parametrize(
    ("text", "expected", "advice"),
    [
        ("m (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }", ("conflict", "classes", "y", ""), "MatMul"),
        ("m (float[2, 3] x) => (float[2, 3] y) { y = Identity(x) }", ("conflict", "classes", "x"), "MatMul"),
        (
            "m (float[2, 3] x) => (float[2, 2] y) { w = RandomNormal<shape=[3, 2]>() y = MatMul(x, w) }",
            ("conflict", "classes", "w", ""),
            "as a stored weight",
        ),
        (
            "m (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { h = MatMul(x, w) y = MatMul(h, w) }",
            ("conflict", "classes", "w", ""),
            "of its own",
        ),
        ("m (float[2, 3] x) => (float[2, 3] z) { z = Add(x, x) }", ("unknown_name", "y"), "z"),
    ],
)
def test_what_is_no_last_layer(text: str, expected: tuple[str, ...], advice: str) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text)
    with raises(UsageError, *expected) as refused:
        with_classes(model, "y", 3, 0)
    assert refused.value.hint and advice in refused.value.hint
