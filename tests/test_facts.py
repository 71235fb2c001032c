"""The data of errors that tests compare: what is taken from a message, and errors that are told apart."""

from __future__ import annotations

import pytest

from onnxgrad_cli.errors import OnnxgradError, Refusal, UnsupportedError, UsageError, wrong_value
from tests.facts import facts, raises


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("`train`: 'fc.*' doesn't match"), ("usage", "train", "fc.*")),
        (wrong_value("`mode='Train'` isn't 1,000 or -0.5"), ("wrong_value", "mode='Train'", "1,000", "-0.5")),
        (OnnxgradError("'/tmp/a b/m.onnx' and '.' are float32[3, n]"), ("failed", "m.onnx", ".", "float32", "3")),
        (UsageError("post_transform of MatMul, and can't"), ("usage", "post_transform", "MatMul")),
        (UnsupportedError("2 nodes", [Refusal("n", "Mod", "no 'a' in 3")]), ("refused", "n", "Mod", "a", "3")),
    ],
)
def test_facts(error: OnnxgradError, expected: tuple[str, ...]) -> None:
    assert facts(error, getattr(error, "refusals", ())) == expected


@pytest.mark.parametrize("error", [UsageError("'x' is 4"), wrong_value("'x' is 3"), UsageError("'y' is 3")])
def test_an_error_with_other_facts_fails(error: OnnxgradError) -> None:
    with pytest.raises(AssertionError), raises(UsageError, "usage", "x", "3"):
        raise error
