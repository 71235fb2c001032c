"""The report as data: a tree of plain values from which every format is rendered.

`dataclasses.asdict(report)` is the JSON report, so the names of the fields here are public keys. Numbers are exact and
in base units (elements, bytes, seconds, floating-point operations). The renderers format them for people.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from onnxgrad_cli.cost.training_cost import Cost
from onnxgrad_cli.errors import Caution, Code, Refusal
from onnxgrad_cli.ir.types import Shape
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.record import Recomputed, Targeted
from onnxgrad_cli.verification.verdict import PROVED, Proof

FORMAT = 1
"""The version of the keys of the JSON report. It increases when a key changes its meaning or is removed."""


@dataclass(frozen=True)
class Asked:
    """The request: the model, the losses, the optimizer and the other options.

    Attributes:
        command: the command line, quoted for a shell; "" if the build was called from Python.
        model: the file that was read; "" for a model from memory or a pipe.
        opset: the version of the default domain in the result; None if there is no graph.
        losses: each loss as a text, such as 'mse of y against label'.
        optimizer: the optimizer with its options; "" if there is no optimizer.
        options: name on the command line -> value as a text, for every option that differs from its default.
    """

    command: str = ""
    model: str = ""
    opset: int | None = None
    losses: list[str] = field(default_factory=list)
    optimizer: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight:
    """A trained weight. `count` is its number of elements, `share` (0 to 1) their share of all trained elements."""

    name: str
    dtype: str
    shape: Shape | None
    count: int
    share: float
    gradient: str


@dataclass(frozen=True)
class Untrained:
    """A tensor of the model that gets no gradient, with the reason.

    Attributes:
        heuristic: the name of the heuristic that classified the tensor as a constant; "" for any other reason.
    """

    name: str
    dtype: str
    shape: Shape | None
    count: int
    reason: str
    heuristic: str = ""


@dataclass(frozen=True)
class Value:
    """An input or output of the model.

    Attributes:
        role: the role in the training model, such as 'label' or 'gradient'.
        of: the value to which the role refers: for a gradient, the weight; for an input of a named data set, the set.
        shape: the sizes as ints and the symbols as strings, '?' for an unnamed symbol; None if the rank is unknown.
    """

    name: str
    role: str
    of: str
    dtype: str
    shape: Shape | None


@dataclass(frozen=True)
class PassRow:
    """One pass: a text about its effect, its duration, and the number of nodes before and after it."""

    name: str
    summary: str
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class Operator:
    """One operator: the number of its nodes in each part of the training model, and the source of its derivative.

    Attributes:
        differentiated: the number of nodes to which a rule was applied.
        rules: the functions that implement the applied rules.
        derivative: 'rule', 'zero' (the derivative is mathematically zero), 'not needed' (no requested gradient passes
            through it), 'none' (it has no rule), or '' if neither the model nor the loss has the operator.
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
    "training mode": "Training mode: the output for a sample depends on the rest of its batch, or on random numbers",
    "zero gradient": "Zero gradients: training does not change these weights",
    "note": "Notes",
    "random operator": "Random operators: two runs give different losses",
    "low-precision type": "Low precision: 16-bit values",
    "kink": "Kinks: the gradient where an operator has no derivative",
    "run-time sum": "Run-time sums: the sizes of a broadcast value are unknown at build time, so the training model "
    "decides at run time along which axes its gradient is summed",
    "opset change": "Opset: the version of the ONNX operators",
}
"""Kind of caution -> its heading in the report. The most important kinds come first."""


CONVENTIONS = ("kink", "run-time sum")
"""Kinds of cautions that apply to nearly every model. They are only counted, not shown as warnings."""


WARNINGS = (UNTRAINED, "training mode", "zero gradient", "note")
"""Kinds of cautions that can change the result of a training. The terminal prints them in full."""


@dataclass(frozen=True)
class File:
    """A file that was read or written. `sha256` is "" if it was not computed."""

    path: str
    role: str
    bytes: int
    sha256: str

    @staticmethod
    def of(path: str | Path, role: str, digest: bool = True) -> File:
        """Return an entry for a file, with its size.

        Args:
            path: the file; the report shows the path that is given here.
            role: 'training model', 'source model', 'weights' (external data), 'pass', ...
            digest: True to read the whole file and compute its SHA-256.

        Raises:
            OSError: the file can't be read.
        """
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest() if digest else ""
            return File(str(path), role, file.seek(0, 2), sha256)


@dataclass(frozen=True)
class Next:
    """A suggestion for the next step: the reason in `why`, and in `text` a command or program in `language`.

    The language is 'sh', 'python' or 'js'.
    """

    why: str
    language: str
    text: str


@dataclass(frozen=True)
class Tuned:
    """The implementations chosen by `onnxgrad tune`, for the gradients of a model that have several.

    Attributes:
        choices: the number of gradients with several implementations. Gradients with equal operator, shapes and
            attributes count once.
        measured: gradient -> the implementation that was chosen by a measurement.
    """

    choices: int
    measured: dict[str, str]


@dataclass(frozen=True)
class Origin:
    """The producer of a model file, its operators, inputs and outputs.

    Attributes:
        exporter: the program that wrote the file, as a text.
        producer: the producer name and version stored in the file; "" if it stores none.
        domains: operator domain -> its version; "" is ONNX's default domain.
        operators: operator -> number of its nodes. Operators of other domains are written as 'domain::Op'.
        functions: the functions that the file defines, as 'domain::name'.
        inputs, outputs: name -> type.
        sizes: the symbols of variable sizes; '?' stands for unnamed ones.
    """

    exporter: str
    producer: str
    ir_version: int
    domains: dict[str, int]
    operators: dict[str, int]
    functions: list[str]
    inputs: dict[str, str]
    outputs: dict[str, str]
    sizes: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """The result of `onnxgrad inspect`: the origin of the file, problems of the export, and advice on a better one.

    Every entry of the lists is a sentence for the user, except in `unnamed` and `equal`.

    Attributes:
        origin: the origin of the file.
        repaired: parts of the file that were rewritten when it was read.
        doubts: possibly wrong choices of the weights to train, with the option that changes them.
        unnamed: the weights whose names the exporter made up.
        equal: groups of weights with equal values. They may come from one shared weight, but are trained separately.
        normalization: the mode (training or inference) of BatchNormalization and Dropout in the file, and folded
            normalizations.
        proof: reasons why the model may not be provable on random data.
        advice: settings of the exporter that would give a model better suited for training.
    """

    origin: Origin
    repaired: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    equal: list[list[str]] = field(default_factory=list)
    normalization: list[str] = field(default_factory=list)
    proof: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The report of one build or of one inspection.

    The status is one of these:

    - 'built': there is a training model, proved or not.
    - 'differentiable': the model can be trained (only from `onnxgrad inspect`).
    - 'check_failed': a check of the gradients failed.
    - 'stopped': the build ended before the last pass, on request.
    - 'refused': the model can't be differentiated.
    - 'usage': an option does not fit the model (only from `onnxgrad inspect`).
    - 'failed': any other error.

    Attributes:
        format: the version of the keys of the JSON report.
        status: the result, see above.
        verdict: the status in one sentence.
        error, hint: the error message and a way to fix it; "" if there is no error.
        code: the kind of the error, see `errors.CODES`; None if there is no error.
        argument: the command-line flag of the option that caused the error; "" if the error names no option.
        refusals: every node that prevents differentiation.
        adapters: the low-rank adapters; their LoRA matrices are also listed in `weights`.
        recomputed: the values computed again in the backward part; None if recomputation was not requested.
        targeted: the changes that adapt the model to the requested target runtime; None if no target was requested.
        tuned: the gradients whose implementation was chosen by a measurement; None if no measurement was given.
        proof: the result of the verification; None if nothing was verified.
        diagnosis: the diagnosis of the file; None unless the model was inspected.
    """

    status: str
    verdict: str
    asked: Asked
    error: str = ""
    hint: str = ""
    code: Code | None = None
    argument: str = ""
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
    diagnosis: Diagnosis | None = None
    files: list[File] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    next: list[Next] = field(default_factory=list)
    format: int = FORMAT

    @property
    def tone(self) -> str:
        """The tone of the verdict: 'good', 'warn' (built but not proved, or stopped early) or 'bad'."""
        if self.status == "differentiable" or (self.status == "built" and self.proof and self.proof.verdict == PROVED):
            return "good"
        return "warn" if self.status in ("built", "stopped") else "bad"

    @property
    def untrained_by_reason(self) -> dict[str, list[Untrained]]:
        """Reason -> the tensors that get no gradient for this reason."""
        found: dict[str, list[Untrained]] = defaultdict(list)
        for tensor in self.not_trained:
            found[tensor.reason].append(tensor)
        return found

    @property
    def compact(self) -> bool:
        """True if the model has a single Gradient node instead of a backward part."""
        return any(step.name == "gradient" for step in self.passes)
