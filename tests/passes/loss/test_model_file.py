"""Losses that are model files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare import opset
from tests.facts import raises
from tests.passes.loss.test_append import FILE, HUBER, C, V, W, X, Y, built, huber, model, refused, run, saved, tensors


def test_a_file_whose_label_comes_first(tmp_path: Path) -> None:
    """Prediction and label are told by their names where they have these."""
    text = HUBER % (18, *["double"] * 6)
    turned = text.replace("double[n, c] prediction, double[n, c] label", "double[n, c] label, double[n, c] prediction")
    assert turned != text
    gradients = []
    for name, each in {"a.onnx": text, "b.onnx": turned}.items():
        each = each.replace("scaled = Mul(near, half)", "scaled = Mul(prediction, half)")
        gradients.append(run(built(f"{saved(tmp_path, each, name)}:p:y", model=model(opset=18)), x=X, y=Y)["w_grad"])
    np.testing.assert_array_equal(*gradients)


POOL = "k = Constant<value_ints = [1]>() u = Unsqueeze(p, k) a = AveragePool<kernel_shape = [2], dilations = [2]>(u)"


@pytest.mark.parametrize("node", ["a = Gelu(p)", POOL])
def test_a_file_that_no_opset_of_the_model_fits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """As where onnxruntime loads no newer one: 18 has no Gelu, nor a dilated pool, of which the converter is silent."""
    monkeypatch.setattr(opset, "newest_loaded", lambda least: min(least, 18))
    head = '<ir_version: 10, opset_import: ["":20]> g (double[n, c] p) => (double e)'
    text = f"{head} {{ {node} e = ReduceSum<keepdims = 0>(a) }}"
    refused(saved(tmp_path, text), model=model(opset=18), match="opset 20", hint="save the loss at opset 18")


LOSSES_OF_THE_STANDARD = {
    "SoftmaxCrossEntropyLoss <ignore_index = 2> (p, y)": lambda p, y: F.cross_entropy(p, y, ignore_index=2),
    'SoftmaxCrossEntropyLoss <reduction = "sum"> (p, y)': lambda p, y: F.cross_entropy(p, y, reduction="sum"),
    "NegativeLogLikelihoodLoss (p, y)": F.nll_loss,
}


@pytest.mark.parametrize("call", LOSSES_OF_THE_STANDARD)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_file_with_a_loss_of_the_standard(tmp_path: Path, call: str, symbolic: bool) -> None:
    sizes = ("n, c", "n") if symbolic else ("5, 4", "5")
    text = f'<ir_version: 10, opset_import: ["":18]> g (double[{sizes[0]}] p, int64[{sizes[1]}] y) => (double e)'
    file, given = saved(tmp_path, f"{text} {{ e = {call} }}"), model()
    for value in (*given.graph.input, *given.graph.output):
        if not symbolic:
            value.type.tensor_type.shape.dim[0].dim_value = 5
    classes = np.arange(5) % 4
    outputs = run(built(f"{file}:p:y", model=given), x=np.repeat(X[:1], 5, 0), y=classes)
    (w,) = tensors(W)
    expected = LOSSES_OF_THE_STANDARD[call](torch.tensor(np.repeat(X[:1], 5, 0)) @ w, torch.tensor(classes))
    expected.backward()
    np.testing.assert_allclose(outputs["loss"], expected.item())
    np.testing.assert_allclose(outputs["w_grad"], w.grad.numpy(), atol=1e-12)


def test_a_file_twice_and_beside_another_loss(tmp_path: Path) -> None:
    file = huber(tmp_path)
    outputs = run(built(f"{file}:p:y", f"{file}:q:z", "mse:p:y"), x=X, y=Y, z=X @ V + 2)
    p, y = torch.tensor(X @ W), torch.tensor(Y)
    np.testing.assert_allclose(outputs["loss"], F.huber_loss(p, y) + 1.5 + F.mse_loss(p, y))


def test_a_file_in_float32_judges_a_float16_output(tmp_path: Path) -> None:
    found = built(f"{huber(tmp_path, kind='float')}:p:y", model=model(dtype=np.float16))
    x, y = X.astype(np.float16), Y.astype(np.float32)
    outputs = run(found, x=x, y=y)
    exact = F.huber_loss(torch.tensor((x @ W.astype(np.float16)).astype(np.float32)), torch.tensor(y))
    np.testing.assert_allclose(outputs["loss"], exact, rtol=2e-3)
    assert outputs["w_grad"].dtype == np.float16


def test_a_file_with_class_labels_and_a_subgraph(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["":18]>
    loss (double[n, c] scores, int64[n] classes) => (double value) <int64[1] one = {1}, bool yes = {1}>
    {
        column = Unsqueeze(classes, one)
        picked = GatherElements<axis=1>(scores, column)
        side = If(yes)<
            then_branch = t () => (double a) { a = ReduceMean<keepdims=0>(column_f) column_f = Identity(picked) },
            else_branch = e () => (double b) { b = ReduceSum<keepdims=0>(picked) }>
        total = ReduceMean<keepdims=0>(picked)
        value = Neg(total)
    }
    """.replace(
        "a = ReduceMean<keepdims=0>(column_f) column_f = Identity(picked)",
        "c = Identity(picked) a = ReduceMean<keepdims=0>(c)",
    )
    found = built(f"{saved(tmp_path, text)}:q:c")
    np.testing.assert_allclose(run(found, x=X, c=C)["loss"], -np.mean((X @ V)[np.arange(5), C]))
    assert shape_of(found.graph.types["c"]) == ("batch",)


def test_a_file_without_a_label(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["":18]> energy (double[n, c] p) => (double[1] e) <int64[1] all = {-1}>'
    text += "{ s = Mul(p, p) f = Reshape(s, all) e = ReduceSum<keepdims=1>(f) }"
    found = built(f"{saved(tmp_path, text)}:p")
    np.testing.assert_allclose(run(found, x=X)["loss"], np.sum((X @ W) ** 2))
    assert found.training.labels == []


PAIR = "double[n, c] p, double[n, c] y"


def test_a_file_that_uses_another_version_of_a_domain(tmp_path: Path) -> None:
    text = FILE % (PAIR, "double v", "d = Sub(p, y) v = ReduceMean<keepdims=0>(d)")
    file = saved(tmp_path, text.replace('["":18]', '["":18, "ai.onnx.ml":4]'))
    assert built(f"{file}:p:y").graph.opset("ai.onnx.ml") == 4
    old = model()
    old.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    refused(file, model=old, facts=("mismatch", "my loss.onnx", "4", "3"))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("hello")
    for name, code in (("none.onnx", "missing_file"), ("text.onnx", "unreadable_file")):
        with raises(OnnxgradError, code, "losses", name) as raised:
            built(str(tmp_path / name))
        assert raised.value.exit_code == 1
    with pytest.raises(OnnxgradError, match=r"none\.npy' can't be read"):
        built("cross-entropy:q:c", loss_options={"class_weights": "none.npy"})


def test_a_file_and_sample_weights(tmp_path: Path) -> None:
    refused(huber(tmp_path), sample_weight="s", facts=("conflict", "sample_weight", "my loss.onnx"))
