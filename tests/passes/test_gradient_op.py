"""Training models with a Gradient node: what is written is expanded to the same gradients."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.jobs.check import run_check
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import LoraSpec, Options, RecomputeSpec
from onnxgrad_cli.passes.gradient_op import rename_named, xs_zs_y
from onnxgrad_cli.standard.gradient_operator import expand_gradients
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises
from tests.standard.test_gradient_operator import feeds, model, options, run

SAMPLES = Path(__file__).parents[2] / "sample_models"


PREVIEW = "ai.onnx.preview.training"


CASES = ["linear_regression", "digits_mlp", "digits_cnn", "tiny_transformer", "symbolic"]


@pytest.mark.parametrize("mode", ["keep", "train"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(5, 2)
def test_round_trip(name: str, mode: str) -> None:
    """The compact form, expanded, has the ordinary training model's interface and gives its numbers."""
    source = onnx.load(SAMPLES / f"{name}.onnx")
    plain = build(deepcopy(source), options(name, False, mode=mode)).model
    compact = build(source, options(name, True, mode=mode)).model
    onnx.checker.check_model(compact, full_check=True)
    (node,) = [node for node in compact.graph.node if node.domain == PREVIEW]
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    roles = describe(compact)
    assert [x.decode() for x in given["xs"]] == [n for n, role in roles.inputs.items() if role == "weight"]
    assert list(node.output) == [f"{x.decode()}_grad" for x in given["xs"]]
    assert given["y"].decode() == roles.loss
    assert not any(p.value == "backward" for n in compact.graph.node for p in n.metadata_props)
    found = expand_gradients(compact)
    assert describe(found) == describe(plain) == roles
    for kind in ("input", "output"):
        assert [v.name for v in getattr(found.graph, kind)] == [v.name for v in getattr(plain.graph, kind)]
    expected = run(plain, feeds(name))
    for key, value in run(found, feeds(name)).items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7, err_msg=key)


def test_it_goes_with_an_optimizer_and_identifiers() -> None:
    source = onnx.load(SAMPLES / "linear_regression.onnx")
    plain = build(deepcopy(source), options("linear_regression", False, optimizer="adam", identifiers=True)).model
    compact = build(source, options("linear_regression", True, optimizer="adam", identifiers=True)).model
    data = {**feeds("linear_regression"), "learning_rate": np.array(0.1, np.float32)}
    expected, got = run(plain, data), run(expand_gradients(compact), data)
    assert list(got) == list(expected)
    for key, value in got.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-7, err_msg=key)


def test_what_it_names_can_be_renamed() -> None:
    node = helper.make_node("Gradient", ["a"], ["b"], domain=PREVIEW, xs=["a b"], zs=["c"], y="d e")
    rename_named(node, lambda name: name.replace(" ", "_"))
    assert xs_zs_y(node) == (["a_b"], ["c"], "d_e")


def test_inputs_and_state_are_named() -> None:
    """xs: the weights, then the inputs asked for; zs: what else the loss depends on, running statistics too."""
    source = onnx.load(SAMPLES / "digits_cnn.onnx")
    compact = build(source, options("digits_cnn", True, mode="train", grad_of_input=("x",))).model
    node = next(node for node in compact.graph.node if node.domain == PREVIEW)
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert given["xs"][-1] == b"x"
    assert given["zs"][0] == b"label"
    assert node.output[-1] == "x_grad"
    found = expand_gradients(compact)
    assert prove(found, describe(found)).status == "passed"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"yield_": "input"}, "yield_='input'"),
        ({"quantization": "ste"}, "quantization='ste'"),
        ({"loss_scale": 8.0}, "loss_scale"),
        ({"recompute": RecomputeSpec("elementwise")}, "recompute"),
        ({"lora": LoraSpec(2), "lora_dora": True}, "lora_dora"),
    ],
)
def test_what_the_operator_can_not_say_is_refused(change: dict[str, Any], word: str) -> None:
    with raises(UsageError, "conflict", "as_gradient_op", word):
        build(onnx.load(SAMPLES / "digits_mlp.onnx"), options("digits_mlp", True, **change))


def test_bfloat16_is_refused_for_the_standard_leaves_it_out() -> None:
    text = "g (bfloat16[2] x) => (bfloat16[2] y) { y = Mul(x, w) }"
    halves = model(text)
    halves.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, [2], [1.0, 2.0]))
    with raises(UsageError, "conflict", "as_gradient_op", "bfloat16", "w"):
        build(halves, Options(as_gradient_op=True))


def test_what_can_not_be_differentiated_is_refused_as_ever() -> None:
    text = "unknown (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { h = Mul(x, w)\n [turn] y = own.Twirl(h) }"
    with raises(UnsupportedError, "refused", "turn", "own::Twirl"):
        build(model(text), Options(as_gradient_op=True))


def test_a_wrong_compact_model_is_found_out(tmp_path: Path) -> None:
    """`check` looks at the expansion: a Gradient that is fed other values than the loss reads fails."""
    compact = build(onnx.load(SAMPLES / "linear_regression.onnx"), options("linear_regression", True)).model
    node = next(node for node in compact.graph.node if node.domain == PREVIEW)
    doubled = helper.make_node("Add", [node.input[0], node.input[0]], ["doubled"], name="double")
    node.input[0] = "doubled"
    compact.graph.node.insert(0, doubled)
    onnx.save(compact, tmp_path / "wrong.onnx")
    assert run_check(tmp_path / "wrong.onnx").failed
