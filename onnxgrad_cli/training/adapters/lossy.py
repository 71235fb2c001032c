"""What is lost where adapters are rounded into integers: outputs, held against those with the adapters beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Role, Roles
from onnxgrad_cli.verification.feeds import DescribedModel, first_run
from onnxgrad_cli.verification.original import with_weights


@dataclass(frozen=True)
class Loss:
    """How far an output is from the right one, and from the model's without adapters: relative root mean squares."""

    output: str
    lost: float
    moved: float

    def __str__(self) -> str:
        return f"'{self.output}' is off by {self.lost:.2%} of its size; the adapters have moved it by {self.moved:.2%}"


def measured(
    base: ModelProto,
    beside: ModelProto,
    rounded: ModelProto,
    path: Path | None = None,
    data: Mapping[str, np.ndarray] | None = None,
) -> list[Loss]:
    """What the outputs of a model have lost.

    Args:
        base: the model without adapters.
        beside: the model with the adapters beside its products.
        rounded: the model that the adapters were rounded into.
        path: where the model was read from; external data are relative to it.
        data: arrays by the names of inputs; what is not there is drawn at random.

    Raises:
        OnnxgradError: the model does not run on these or on drawn data.
    """
    right = with_weights(beside, path)
    run = Executor(right)
    fed = {value.name: "model input" for value in right.graph.input}
    fed.update({tensor.name: "constant" for tensor in right.graph.initializer if tensor.name in fed})
    outputs = {value.name: Role("kept output") for value in right.graph.output}
    roles = Roles("", (), "", fed, {**outputs, next(iter(outputs)): Role("loss")})
    try:
        feeds, wanted, _ = first_run(run, DescribedModel(right, roles), np.random.default_rng(0), dict(data or {}), {})
    except Exception as error:  # the executors' exceptions share no base class
        raise OnnxgradError(
            f"what is lost can't be measured: the model does not run on such data: {str(error).strip()}",
            "give data that it runs on with `test_data`",
        ) from None
    feeds = {name: feeds[name] for name, role in fed.items() if role == "model input"}
    found, before = (Executor(with_weights(model, path))(feeds) for model in (rounded, base))
    return [
        Loss(name, _off(found, wanted, name), _off(before, wanted, name)) for name in wanted if _is_float(wanted[name])
    ]


def _is_float(array: np.ndarray) -> bool:
    return bool(array.size) and array.dtype.kind == "f"


def _off(found: Arrays, wanted: Arrays, name: str) -> float:
    size = float(np.linalg.norm(wanted[name].astype(np.float64)))
    return float(np.linalg.norm(found[name].astype(np.float64) - wanted[name])) / (size or 1.0)
