"""Patterns choose weights by their names, and by the names of modules."""

from __future__ import annotations

import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.options import Group, Options
from onnxgrad_cli.passes.parameters.select import FROZEN
from tests.facts import raises
from tests.passes.parameters.test_select import LINEAR, training
from tests.passes.parameters.test_sharing import scoped


def test_patterns() -> None:
    assert training(LINEAR, freeze=("b",)).trained == ["w"]
    assert training(LINEAR, freeze=("b",)).not_trained == {"b": FROZEN}
    assert training(LINEAR, train=("*",), freeze=("w",)).trained == ["b"]
    assert training(LINEAR, grad_of_input=("x",)).grad_of_input == ["x"]
    with raises(UsageError, "unknown_name", "freeze", "bias"):
        training(LINEAR, freeze=("bias",))
    with raises(UnsupportedError, "refused") as refused:
        training(LINEAR, freeze=("*",))
    assert refused.value.details == (f"w: {FROZEN}", f"b: {FROZEN}")


@pytest.mark.parametrize(
    ("pattern", "trained"), [("enc.two*", ["enc.two.w"]), ("enc.one", ["w"]), ("enc.*", ["w", "enc.two.w"])]
)
def test_globs_name_modules(pattern: str, trained: list[str]) -> None:
    """Scalars that a module reads are not chosen with it."""
    model = scoped({"a": "enc.one", "b": "enc.two"})
    assert build(model, Options(train=(pattern,), untie=("w",))).training.trained == trained
    left = [name for name in ("w", "enc.two.w") if name not in trained]
    if left:
        assert build(model, Options(freeze=(pattern,), untie=("w",))).training.trained == left


def test_groups_name_modules() -> None:
    model = scoped({"a": "enc.one", "b": "enc.two"})
    group = (Group("enc.two", {"lr": 0.5}),)
    built = build(model, Options(untie=("w",), optimizer="sgd", group=group))
    assert "w_next" in {output.name for output in built.model.graph.output}
    with raises(UsageError, "unknown_name", "group", "enc.three"):
        build(model, Options(untie=("w",), optimizer="sgd", group=(Group("enc.three", {"lr": 0.5}),)))
