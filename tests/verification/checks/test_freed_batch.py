"""Runs that compare a model whose batch size was made dynamic with its original."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.passes.prepare.free_batch import NOT_COMPARED, FixedBatch
from onnxgrad_cli.verification.checks.freed_batch import FreedModel, freed
from tests.facts import facts

NEVER_FINITE = "a = Abs(x) n = Neg(a) m = Sub(n, w) z = Log(m)"


def freed_from(batch: int, nodes: str) -> FreedModel:
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[{batch}, 3] x) => (float[{batch}, 3] z, float[{batch}, 3] y) <float[3] w = {{1, 2, 3}}>
    {{ {nodes} y = Mul(x, w) }}"""
    return freed(onnx.parser.parse_model(text), None, FixedBatch({"x": 0}, batch, "n"))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("nodes", ["z = Tanh(x)", NEVER_FINITE])
def test_equal_models_are_compared_on_the_same_data(batch: int, nodes: str) -> None:
    """Data are drawn again if an output is not finite."""
    assert NOT_COMPARED not in freed_from(batch, nodes).compare().text


@pytest.mark.parametrize("nodes", ["z = Tanh(x)", NEVER_FINITE])
def test_a_model_that_computes_something_else_is_refused(nodes: str) -> None:
    both = freed_from(2, nodes)
    other = onnx.ModelProto()
    other.CopyFrom(both.model)
    other.graph.node[-1].op_type = "Add"
    with pytest.raises(UnsupportedError) as refused:
        replace(both, model=other).compare()
    assert facts(refused.value)[:2] == ("refused", "y")
