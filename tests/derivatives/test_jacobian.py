"""Rows of Jacobians are computed in blocks, whose size the batch decides."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto

from onnxgrad_cli.derivatives import jacobian
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.ir.node_values import with_bodies
from tests.derivatives.test_curvature import agrees, perceptron
from tests.derivatives.test_kinds import (
    Arrays,
    net,
    run,
    scans,
)


@pytest.mark.parametrize("per_sample", [False, True])
def test_rows_of_many_inputs_are_not_written_out(per_sample: bool) -> None:
    """The model is as large for 512 inputs as for 64, and has the same results as the formula."""
    counts = []
    for size in (64, 512):
        module, x, model = perceptron(size)
        derived = derive(model, "laplacian", per_sample=per_sample)
        counts.append(len(list(with_bodies(derived.graph.node))))
        (found,) = run(derived, {"x": x.numpy()}).values()
        first, second = module[0].weight, module[2].weight[0]
        t = torch.tanh(module[0](x))
        each = (-2 * t * (1 - t * t) * second) @ (first * first).sum(1)
        agrees(found, each if per_sample else each.sum(), 1e-10)
    assert counts[0] == counts[1]


@pytest.fixture
def few_elements(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(jacobian, "MAX_VECTORIZED_ELEMENTS", 2000)
    yield 2000


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_size_of_the_batch_decides_how_many_rows_a_block_has(size: int, few_elements: int) -> None:
    """The largest value within a step of the loop; one row alone may have more elements."""
    module, _, model = perceptron(200)
    x = torch.randn(size, 200, dtype=torch.float64)
    derived = derive(model, "hessian-diagonal", per_sample=True, keep_outputs=True)
    (loop,) = (node for node in derived.graph.node if node.op_type == "Scan")
    (body,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    (step,) = (node for node in derived.graph.node if loop.input[0] in node.output)
    derived.graph.output.append(onnx.ValueInfoProto(name=step.output[0]))
    rows = run_unchecked(derived, {"x": x.numpy()})[step.output[0]]
    assert rows.size >= 200 and len(body.input) == 1
    assert rows.shape[1] == max(few_elements // (200 * size), 1)
    found = run(derive(model, "hessian-diagonal", per_sample=True), {"x": x.numpy()})["x_hessian_diagonal"]
    wanted = torch.func.vmap(torch.func.hessian(lambda x: module(x)[0]))(x)
    agrees(found, torch.diagonal(wanted, dim1=1, dim2=2), 1e-10)


def run_unchecked(model: ModelProto, feeds: Arrays) -> Arrays:

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def test_rows_of_more_than_fits_are_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest value of the perceptron's backward part has 2 x 6 elements, and there are 10 rows."""
    for limit, loops in ((120, 0), (119, 1)):
        monkeypatch.setattr(jacobian, "MAX_VECTORIZED_ELEMENTS", limit)
        assert scans(derive(net("perceptron").model["fixed"], "jacobian")) == loops
