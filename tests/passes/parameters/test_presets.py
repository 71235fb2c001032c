"""Presets of weights: biases, normalizations and the last layers, in exports of PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import ARGUMENT, UnsupportedError, UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import LoraSpec, Options
from tests.facts import raises
from tests.passes.test_adapters import FORMS, TRANSFORMER, chosen, copied, model_of

ROOT = Path(__file__).parents[3]


Tensor = torch.Tensor


@pytest.mark.slow
def test_presets_of_a_transformer() -> None:
    every = chosen(TRANSFORMER)
    biases = [name for name in every if name.endswith("bias")]
    norms = [name for name in every if "norm" in name]
    head = ["classifier.weight", "classifier.bias"]
    assert chosen(TRANSFORMER, preset=("bias",)) == biases
    assert chosen(TRANSFORMER, preset=("norm",)) == norms
    assert chosen(TRANSFORMER, preset=("head",)) == head == chosen(TRANSFORMER, train_last=1)
    assert chosen(TRANSFORMER, train_last=2) == ["norm.weight", "norm.bias", *head]
    assert chosen(TRANSFORMER, train_last=3) == ["layers.1.fc2.weight", "layers.1.fc2.bias", "norm.weight",
                                                 "norm.bias", *head]  # fmt: skip
    assert chosen(TRANSFORMER, preset=("bias", "head")) == [n for n in every if n in biases or n in head]
    assert chosen(TRANSFORMER, preset=("bias",), train=("embed_tokens.*",)) == ["embed_tokens.weight", *biases]
    assert chosen(TRANSFORMER, preset=("bias",), freeze=("layers.*",)) == ["norm.bias", "classifier.bias"]
    built = build(onnx.load(TRANSFORMER), Options(losses=(LossSpec("cross-entropy"),), preset=("bias",), train_last=1))
    assert ARGUMENT.findall(built.training.not_trained["norm.weight"]) == [("preset", "'bias'"), ("train_last", "1")]
    assert chosen(TRANSFORMER, preset=("head",), lora=LoraSpec(2))[:2] == head


def test_presets_of_a_convolutional_network() -> None:
    path = ROOT / "sample_models" / "digits_cnn.onnx"
    every = chosen(path)
    kinds = {node.op_type: node for node in onnx.load(path).graph.node}
    norm = [name for node in onnx.load(path).graph.node if node.op_type == "BatchNormalization"
            for name in node.input[1:3]]  # fmt: skip
    assert "BatchNormalization" in kinds
    assert set(chosen(path, preset=("norm",))) == set(norm)
    assert set(chosen(path, preset=("bias",))) == {name for name in every if name.endswith("bias")}


DECOMPOSED = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[n, 4] x) => (float[n, 3] y)
<int64[1] axis = {-1}, float eps = {0.00001}>
{
  h = MatMul(x, w1) hb = Add(b1, h)
  m = ReduceMean(hb, axis) c = Sub(hb, m) q = Mul(c, c) v = ReduceMean(q, axis) ve = Add(v, eps) s = Sqrt(ve)
  n1 = Div(c, s) g1 = Mul(gamma, n1) z = Add(g1, beta)
  r = Relu(z) t = Transpose(w2) u = MatMul(r, t) y = Add(u, b2)
}
"""


def test_presets_where_layers_are_written_in_single_operators() -> None:
    model = parser.parse_model(DECOMPOSED)
    shapes = {"w1": (4, 5), "b1": (5,), "gamma": (5,), "beta": (5,), "w2": (3, 5), "b2": (3,)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))

    def trained(**options: Any) -> list[str]:
        return build(copied(model), Options(**options)).training.trained

    assert trained(preset=("norm",)) == ["gamma", "beta"]
    assert trained(preset=("bias",)) == ["b1", "beta", "b2"]
    assert trained(preset=("head",)) == ["w2", "b2"]
    assert trained(train_last=2) == ["gamma", "beta", "w2", "b2"]
    assert trained(train_last=3) == list(shapes)


def test_a_table_that_is_added_is_no_bias() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]> g (float[n, 3, 4] x) => (float[n, 3, 5] y) {
        h = MatMul(x, w) p = Add(h, positions) y = Add(p, b) }
    """
    model = parser.parse_model(text)
    shapes = {"w": (4, 5), "positions": (3, 5), "b": (1, 1, 5)}
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in shapes.items())
    assert build(model, Options(preset=("bias",))).training.trained == ["b"]


def test_presets_that_name_nothing() -> None:
    model = model_of(FORMS["matmul"])[0]
    with raises(UsageError, "no_data", "preset='norm'"):
        build(copied(model), Options(preset=("norm",)))
    with raises(UsageError, "wrong_value", "preset='norms'", "bias", "norm", "head"):
        build(copied(model), Options(preset=("norms",)))
    with raises(UsageError, "wrong_value", "train_last=2", "1"):
        build(copied(model), Options(train_last=2))
    with raises(UnsupportedError, "refused") as refused:
        build(copied(model), Options(lora=LoraSpec(2), freeze=("*",)))
    assert refused.value.details


def decomposed(text: str) -> Any:
    model = parser.parse_model(text)
    shapes = {"w1": (4, 5), "b1": (5,), "gamma": (5,), "beta": (5,), "w2": (3, 5), "b2": (3,)}
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in shapes.items())
    return model


def test_the_hint_lists_the_last_layers_from_the_end() -> None:
    with raises(UsageError, "wrong_value", "train_last=4", "3") as refused:
        build(decomposed(DECOMPOSED), Options(train_last=4))
    assert re.findall(r"\w+_\w+", refused.value.hint or "") == ["MatMul_u", "Mul_g1", "MatMul_h"]


def test_a_root_of_a_mean_behind_several_steps_is_that_of_a_normalization() -> None:
    steps = DECOMPOSED.replace("s = Sqrt(ve)", "vc = Cast<to = 1>(ve) vm = Max(vc, eps) s = Sqrt(vm)")
    assert build(decomposed(steps), Options(preset=("norm",))).training.trained == ["gamma", "beta"]
