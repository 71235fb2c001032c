"""The check of a model's own description, and the verdict that follows from the checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from onnx import parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import Role, Roles, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import NOT_PROVED, Proof
from tests.steps import exported, network, options

Change = Callable[[Roles], Roles]
WHOLE = "every gradient as a whole"


def status_of(proof: Proof, name: str) -> str:
    return next((step.status for step in proof.steps if step.name == name), "")


CHANGES: dict[str, tuple[Change, str]] = {
    "a weight without a gradient": (
        lambda roles: replace(roles, outputs={**roles.outputs, "last.bias_grad": Role("kept output")}),
        "no output is the gradient of 'last.bias'",
    ),
    "an output of the model": (
        lambda roles: replace(
            roles,
            inputs={**roles.inputs, "last.bias": "constant"},
            outputs={**roles.outputs, "last.bias_grad": Role("kept output")},
        ),
        "'last.bias_grad' depends on labels, but is described as an output of the model",
    ),
    "a state": (
        lambda roles: replace(roles, inputs={**roles.inputs, "last.bias": "state"}),
        "the loss reads 'last.bias', which is described as state",
    ),
    "a stopped path": (
        lambda roles: replace(roles, partial=("last.bias",)),
        "leaves out paths on which gradients are stopped",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_that_are_not_whole_are_not_proved(name: str) -> None:
    change, words = CHANGES[name]
    model = build(exported(network(torch.float32)), options("sgd")).model
    roles = change(describe(model))
    proof = prove(model, roles)
    assert proof.verdict == NOT_PROVED
    assert words in next(step.detail for step in proof.steps if step.name == WHOLE)
    assert status_of(proof, WHOLE) == "skipped"


@pytest.mark.parametrize("trained", [("t", "u"), ("t",)])
def test_tensors_whose_gradient_is_not_finite_are_named_with_what_leaves_them_out(trained: tuple[str, ...]) -> None:
    """As of sin(t) / t at 0, which a Where replaces: the loss is finite, the gradient of t is not, as in PyTorch."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 3] y)
        <float[3] t = {0, 1, 2}, float[3] u = {1, 2, 3}, float zero = {0}, float one = {1}> {
          s = Sin(t) q = Div(s, t) at = Equal(t, zero) w = Where(at, one, q) v = Mul(x, w) y = Add(v, u) }""")
    built = build(model, Options(losses=(LossSpec("mse"),), train=trained))
    proof = prove(built.model, describe(built.model), original=model)
    detail = proof.steps[-1].detail
    assert proof.status == "failed" and "NaN is from 'q'" in detail and "of Div" in detail, detail
    assert ("--freeze 't'" in detail) == (len(trained) > 1), "something must be left to train"
