"""Operators whose batch is freed, against runs of the original on one batch after the other."""

import onnx
import pytest

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare.free_batch import FixedBatch
from onnxgrad_cli.verification.freed_batch import freed
from tests.autodiff.rows import ROWS
from tests.harness import Case, forward_model

FIRST = {(case.op, case.domain): case for case in reversed(ROWS)}
BY_REFERENCE = {"LRN"}
"""Operators whose implementation in onnx.reference is wrong for more samples than channels."""


def shapes_of(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return {v.name: shape_of(v.type) or () for v in model.graph.input if v.name not in stored}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FIRST.values() if case.op not in BY_REFERENCE], ids=str)
def test_an_operator_gives_what_it_gave_for_each_batch_alone(case: Case) -> None:
    """Or the batch is refused before any run."""
    model = forward_model(case, False)
    shapes = shapes_of(model)
    for size in {shape[0] for shape in shapes.values() if shape and isinstance(shape[0], int)}:
        axes = {name: 0 for name, shape in shapes.items() if shape and shape[0] == size}
        try:
            found = freed(model, None, FixedBatch(axes, size, "n"))
        except UnsupportedError:
            continue
        found.compare()
