"""Models for one target are written back in standard operators."""

from __future__ import annotations

from typing import Any

import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.tune import run_tune
from onnxgrad_cli.options import Options
from onnxgrad_cli.targets.standard import to_standard
from tests.facts import facts
from tests.targets.test_blocked_channels import CASES, made, model


def test_it_is_written_back_in_standard_operators() -> None:
    built, plain = made(model(*CASES["3x3"])).model, made(model(*CASES["3x3"]), "standard").model
    to_standard(built)
    assert not built.functions and [node.SerializeToString() for node in built.graph.node] == [
        node.SerializeToString() for node in plain.graph.node
    ]
    assert built.opset_import == plain.opset_import


@pytest.mark.parametrize("more", [{"training_info": True, "optimizer": "sgd"}, {"as_gradient_op": True}])
def test_what_only_standard_operators_are_for_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        made(model(*CASES["3x3"]), **more)
    assert facts(refused.value)[1:3] == ("target='ort-cpu'", next(iter(more)))


def test_tuning_is_for_the_standard() -> None:
    with pytest.raises(UsageError) as refused:
        run_tune("conv.onnx", options=Options(target="ort-cpu"))
    assert refused.value.argument == "target"
