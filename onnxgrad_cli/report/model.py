"""The report as data: one tree of plain values, which every format is rendered from.

`dataclasses.asdict` of it is the JSON report, so a field's name here is a public key. Numbers are exact and in
base units (elements, bytes, seconds, floating-point operations); words for people are written by the renderers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from onnxgrad_cli.cost.training_cost import Cost
from onnxgrad_cli.errors import Caution, Refusal
from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.record import Recomputed, Targeted
from onnxgrad_cli.verification.verdict import PROVED, Proof

FORMAT = 1
"""The version of the JSON keys: it grows when one changes its meaning or goes away."""


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        command: the command line, quoted for a shell; "" where there was none.
        model: the file that was read; "" for a model from memory or a pipe.
        opset: the version of the default domain of the result; None without a graph.
        losses: each loss in words: 'mse of y against label'.
        optimizer: the optimizer with its options; "" for none.
        options: every option that differs from its default: its name on the command line -> its value in words.
    """

    command: str = ""
    model: str = ""
    opset: int | None = None
    losses: list[str] = field(default_factory=list)
    optimizer: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight:
    """A trained weight; `count` elements, which are the `share` (0 to 1) of all trained elements."""

    name: str
    dtype: str
    shape: Shape | None
    count: int
    share: float
    gradient: str


@dataclass(frozen=True)
class Untrained:
    """A tensor of the model that gets no gradient, and why.

    `heuristic` identifies the heuristic that took it for a constant; "" if none did.
    """

    name: str
    dtype: str
    shape: Shape | None
    count: int
    reason: str
    heuristic: str = ""


@dataclass(frozen=True)
class Value:
    """An input or output of the model: its `role`, and `of` what (the weight of a gradient, ...).

    `shape` has sizes as ints and symbols as strings, '?' for an unnamed one; None is an unknown rank.
    """

    name: str
    role: str
    of: str
    dtype: str
    shape: Shape | None


@dataclass(frozen=True)
class PassRow:
    """What one pass did."""

    name: str
    summary: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


@dataclass(frozen=True)
class Operator:
    """One operator: its nodes in each part of the training model, and how it was differentiated.

    Attributes:
        differentiated: how many nodes a rule was applied to.
        rules: the functions that did it.
        derivative: 'rule', 'zero' (by mathematics), 'not needed' (no wanted gradient passes through it), 'none'
            (it has no rule), or '' where the operator stands in neither model nor loss.
    """

    op: str
    model: int
    loss: int
    backward: int
    differentiated: int
    rules: list[str]
    derivative: str
    optimizer: int = 0


KINDS = {
    UNTRAINED: "Weights that stay untrained",
    "training mode": "Training mode: what the model says of a sample depends on the others of its batch, or on chance",
    "zero gradient": "Zero gradients: nothing trains these weights",
    "random operator": "Random operators: two runs give two losses, so compare runs with care",
    "low-precision type": "Low precision: values of 16 bits",
    "kink": "Kinks: where an operator has no derivative, this value was taken",
    "run-time sum": "Run-time sums: the gradient of a value that was broadcast (stretched along an axis) is summed "
    "along that axis; here two sizes were not known to be equal, so the model decides when it runs",
    "opset change": "Opset: the version of the ONNX operators",
    "note": "Besides",
}
"""The kinds of caution, in the order of their weight, with their headings."""


@dataclass(frozen=True)
class File:
    """A file that was read or written; `sha256` is "" where it was not asked for."""

    path: str
    role: str
    bytes: int
    sha256: str

    @staticmethod
    def of(path: str | Path, role: str, digest: bool = True) -> File:
        """Measure a file.

        Args:
            path: the file, named in the report as it is given here.
            role: 'training model', 'source model', 'weights' (external data), 'pass', ...
            digest: whether to read it all for its SHA-256.

        Raises:
            OSError: it can't be read.
        """
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest() if digest else ""
            return File(str(path), role, file.seek(0, 2), sha256)


@dataclass(frozen=True)
class Next:
    """Something to do next: why, and what to type, in `language` ('sh' or 'python')."""

    why: str
    language: str
    text: str


@dataclass(frozen=True)
class Tuned:
    """The gradients that have several forms.

    Attributes:
        choices: how many there are that differ in operator, shapes or attributes.
        measured: those whose form was chosen as measured, with the form.
    """

    choices: int
    measured: dict[str, str]


@dataclass(frozen=True)
class Report:
    """Everything there is to say about one build.

    Attributes:
        format: the version of the keys.
        status: 'built', 'differentiable' (as `inspect` found), 'check failed', 'stopped' (on request, before the
            last pass), 'refused' (the model can't be differentiated) or 'failed' (anything else).
        verdict: the status in one sentence.
        error, hint: what went wrong and what to do about it; "" if nothing did.
        refusals: every node that stands in the way.
        adapters: the low-rank adapters, whose factors are among the weights.
        recomputed: what is computed again in the backward part; None where nothing was asked for.
        targeted: what was done for the runtime that was named; None where none was.
        tuned: which forms of gradients were chosen as measured; None where no measurement was given.
        proof: what was verified; None where nothing was.
    """

    status: str
    verdict: str
    asked: Asked
    error: str = ""
    hint: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    not_trained: list[Untrained] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    passes: list[PassRow] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    cautions: list[Caution] = field(default_factory=list)
    cost: Cost | None = None
    recomputed: Recomputed | None = None
    targeted: Targeted | None = None
    tuned: Tuned | None = None
    proof: Proof | None = None
    files: list[File] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    next: list[Next] = field(default_factory=list)
    format: int = FORMAT

    @property
    def tone(self) -> str:
        """How the verdict sounds: 'good', 'warn' (of a model that nobody has proved, or no whole one) or 'bad'."""
        if self.status == "differentiable" or (self.status == "built" and self.proof and self.proof.verdict == PROVED):
            return "good"
        return "warn" if self.status in ("built", "stopped") else "bad"

    @property
    def compact(self) -> bool:
        """Whether one Gradient node stands for the backward part."""
        return any(step.name == "gradient" for step in self.passes)
