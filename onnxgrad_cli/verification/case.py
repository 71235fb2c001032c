"""What a proof is about, and what its checks find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.observation import LARGE, weight_bytes
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.feeds import DescribedModel
from onnxgrad_cli.verification.original import Original
from onnxgrad_cli.verification.written import Ran

LONG = 10 * 10**9
"""Floating-point operations of one run, from which on a proof makes as few runs as it can."""


@dataclass
class Case:
    """What a proof is about, and what its checks have made of it so far.

    Attributes:
        model, roles, path, data, sizes, force, operations: see `prove`.
        original: the inference model it was made from; None where it is not compared.
        rng: draws the random data and directions.
        described: the training model with its weights, as it is run.
        run: runs that model on onnxruntime.
        feeds, outputs: what the model was run on, and what came of it.
        cotangents: inputs that have the shape of an output of the original -> that output.
        differentiated: the original's outputs that are differentiated; empty in a training model.
        drawn: the sizes of symbolic dimensions; None where no feed was drawn at random.
        measured_by: what evaluated the differences, and in which precision.
        exact: whether that was float64.
    """

    model: ModelProto
    roles: Roles
    path: Path | None
    original: Original | None
    data: Arrays
    sizes: Mapping[str, int]
    rng: np.random.Generator
    force: bool
    operations: int = 0
    cotangents: Mapping[str, str] = field(default_factory=dict)
    differentiated: Sequence[str] = ()
    described: DescribedModel = field(init=False)
    run: Executor = field(init=False)
    feeds: Arrays = field(init=False)
    outputs: Arrays = field(init=False)
    drawn: dict[str, int] | None = field(init=False, default=None)
    measured_by: str = ""
    exact: bool = False

    @property
    def is_long(self) -> bool:
        """Return True if each run takes long."""
        return self.operations > LONG

    @property
    def is_large(self) -> bool:
        """Return True if the weights, and so the gradients of each run, take much memory."""
        return weight_bytes(self.model) > LARGE

    @property
    def is_costly(self) -> bool:
        """Return True if each run takes long, or much memory."""
        return self.is_long or self.is_large

    @property
    def ran(self) -> Ran | None:
        """The run of the model; None where it has not come to one."""
        return Ran(self.described.model, self.feeds, self.outputs) if hasattr(self, "outputs") else None

    @property
    def named_sizes(self) -> dict[str, int]:
        """Return the sizes that were chosen for the symbols of the model's inputs."""
        return {symbol: size for symbol, size in (self.drawn or {}).items() if symbol in self.symbols}

    @property
    def symbols(self) -> list[str]:
        """Return the symbols in the shapes of the model's inputs."""
        inputs = (v for v in self.model.graph.input if self.roles.inputs.get(v.name) == "model input")
        return list(dict.fromkeys(d for v in inputs for d in shape_of(v.type) or () if isinstance(d, str) and d != "?"))


@dataclass(frozen=True)
class Found:
    """What came of a check.

    Attributes:
        status: 'passed', 'failed' or 'skipped'; "" where there was nothing to check.
        detail: the finding, in words.
        ends: whether the checks that follow make no sense.
        leaves_unproved: why the model as a whole counts as not proved; "" where it does not.
        hidden: tensors whose gradients may be wrong for all that is found of the others.
    """

    status: str = ""
    detail: str = ""
    ends: bool = False
    leaves_unproved: str = ""
    hidden: tuple[str, ...] = ()


NOTHING = Found()
