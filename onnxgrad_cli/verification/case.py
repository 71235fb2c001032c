"""The model and data that a proof checks, and the outcomes of its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.observation import MAX_WEIGHT_BYTES, weight_bytes
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.feeds import DescribedModel
from onnxgrad_cli.verification.original_model import Original
from onnxgrad_cli.verification.verdict import FAILED, Proof
from onnxgrad_cli.verification.written_file import Ran

LONG_RUN_OPERATIONS = 10 * 10**9
"""If a run of the model takes more floating-point operations than this, a proof makes as few runs as possible."""


@dataclass
class ProofCase:
    """The model and data that a proof checks, and the values that its checks have computed so far.

    Attributes:
        model, roles, path, data, sizes, force, operations: see `prove`.
        original: the inference model that `model` was made from; None if the proof does not compare the two.
        rng: draws the random data and directions.
        described: the training model with its weights, in the form that is run.
        run: runs `described` on onnxruntime.
        feeds, outputs: the inputs and outputs of the run of the model.
        cotangents: input that is a cotangent -> the output of the original that it belongs to and whose shape it has.
        differentiated: the original's outputs that are differentiated; empty for a training model.
        drawn: the sizes of symbolic dimensions in random data; None if no input was drawn at random.
        measured_by: the runtimes that evaluated the finite differences, and their precision.
        exact: True if the finite differences were evaluated in float64.
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
        """Return True if a run of the model takes long (see `LONG_RUN_OPERATIONS`)."""
        return self.operations > LONG_RUN_OPERATIONS

    @property
    def is_large(self) -> bool:
        """Return True if the weights take much memory. The gradients of each run then take as much again."""
        return weight_bytes(self.model) > MAX_WEIGHT_BYTES

    @property
    def is_costly(self) -> bool:
        """Return True if a run of the model takes long, or much memory."""
        return self.is_long or self.is_large

    @property
    def ran(self) -> Ran | None:
        """The run of the model; None if it did not run."""
        return Ran(self.described.model, self.feeds, self.outputs) if hasattr(self, "outputs") else None

    @property
    def symbols(self) -> list[str]:
        """Return the symbolic dimensions in the shapes of the model's inputs."""
        inputs = (v for v in self.model.graph.input if self.roles.inputs.get(v.name) == "model input")
        return list(dict.fromkeys(d for v in inputs for d in shape_of(v.type) or () if isinstance(d, str) and d != "?"))


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check.

    Attributes:
        status: 'passed', 'failed' or 'skipped'; "" if there was nothing to check.
        detail: the finding, as a text.
        ends: True if the proof ends here, because the next checks would make no sense.
        leaves_unproved: the reason why the whole model counts as not proved, even if no check failed; "" if there is
            none.
        hidden: tensors in whose gradients the check can't detect even large errors, so that they may be wrong.
    """

    status: str = ""
    detail: str = ""
    ends: bool = False
    leaves_unproved: str = ""
    hidden: tuple[str, ...] = ()


NOTHING = CheckOutcome()


def skipped(detail: str) -> CheckOutcome:
    """Return the outcome of a check that could not reach a decision."""
    return CheckOutcome("skipped", detail)


def unproved(proof: Proof, what: str) -> CheckOutcome:
    """Return the outcome of a check whose proof did not succeed. `what` describes the proof."""
    return CheckOutcome("failed" if proof.verdict == FAILED else "skipped", f"{what}: {proof.why}")
