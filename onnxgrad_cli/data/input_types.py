"""Determine the types of a training model's inputs and labels, and the ranges of integers that they accept.

Data are checked against these ranges before training. Otherwise a class number or a token id out of range would stop a
run in the middle of an epoch, or even give wrong results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, TypeProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.node_values import source_of
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.losses import LOSSES
from onnxgrad_cli.losses.registry import FOR_OUTPUTS
from onnxgrad_cli.metadata import Term, describe
from onnxgrad_cli.verification.feeds import index_limits

InputTypes = Mapping[str, TypeProto]
"""Input or label -> its type. The first axis runs over the samples; a scalar is the same for all samples."""


@dataclass(frozen=True)
class Range:
    """The integers that an input accepts.

    Attributes:
        low, high: the smallest and the largest integer; None if unknown.
        besides: further integers that are accepted, such as the label that the loss ignores.
        why: the reason for the bounds, for messages.
        hint: the hint of the error about an integer that is not accepted. For a label of floats, which accepts all
            numbers, it is a hint about class numbers.
    """

    low: int | None
    high: int | None
    besides: frozenset[int] = frozenset()
    why: str = ""
    hint: str = field(default="", compare=False)

    def __contains__(self, number: int) -> bool:
        within = (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
        return within or number in self.besides

    def __and__(self, other: Range) -> Range:
        low = max((n for n in (self.low, other.low) if n is not None), default=None)
        high = min((n for n in (self.high, other.high) if n is not None), default=None)
        besides = frozenset(n for n in self.besides | other.besides if n in self and n in other)
        why = " and ".join(filter(None, (self.why, other.why)))
        return Range(low, high, besides, why, self.hint or other.hint)


def input_types_of(model: ModelProto) -> dict[str, TypeProto]:
    """Return the types of a training model's inputs, labels and sample weights.

    Raises:
        UsageError: the model is not a training model.
    """
    types = {value.name: value.type for value in model.graph.input}
    return {name: types[name] for name in describe(model).sampled}


def ranges_of(model: ModelProto) -> dict[str, Range]:
    """Return a map: input or label of a training model -> the integers that it accepts.

    Labels accept class numbers. Inputs that index a table, such as an embedding, accept its row indices.

    A label of floats accepts all numbers. Its entry, if it has one, is a hint about class numbers.

    Args:
        model: the training model.

    Raises:
        UsageError: the model is not a training model.
    """
    roles, inputs = describe(model), input_types_of(model)
    found = rows_of(model, inputs)
    producers = {name: node for node in model.graph.node for name in node.output}
    for term in roles.losses:
        label = term.label
        if label in inputs and is_float(inputs[label]):
            node = source_of(term.output, producers)
            if node is not None and node.op_type in FOR_OUTPUTS:
                found.setdefault(label, Range(None, None, hint=_for_classes(FOR_OUTPUTS[node.op_type])))
        elif label in inputs and (classes := _range_of(term)):
            found[label] = found[label] & classes if label in found else classes
    return found


def _for_classes(loss: str) -> str:
    """Return the hint about class numbers for a label of floats, given the loss that fits the output."""
    if LOSSES.lookup(loss).label == "class":
        return f"if they are class numbers, choose the loss that takes them: `losses={loss!r}`"
    return f"if they are class numbers, save a column for each, numpy.eye(N)[array], for `losses={loss!r}`"


def rows_of(model: ModelProto, inputs: InputTypes) -> dict[str, Range]:
    """Return a map: input that indexes a table -> the row indices that it accepts.

    Negative indices are accepted, because they count from the end.
    """
    limits = {name: rows for name, rows in index_limits(model, {}).items() if name in inputs}
    return {name: Range(-rows, rows - 1, why=f"it indexes a table of {rows} rows") for name, rows in limits.items()}


def _range_of(term: Term) -> Range | None:
    """Return the class numbers that a loss accepts as labels, or None if its labels are not classes.

    For a loss from an ONNX file the result is None, because the meaning of its labels is unknown. For a loss that was a
    Python function, which is not available here, the labels are classes if the term has a number of classes.
    """
    try:
        of_classes = LOSSES.lookup(term.name).class_axis({}) is not None
    except UsageError:
        of_classes = bool(term.classes) and not term.name.endswith(".onnx")
    if not of_classes:
        return None
    ignored = frozenset[int]() if term.ignore_index is None else frozenset({term.ignore_index})
    if not term.classes:
        return Range(0, None, ignored, "it is the number of a class")
    more = f"'{term.output}' has {term.classes} classes: to train with N classes, pass `classes=N`"
    return Range(0, term.classes - 1, ignored, f"there are {term.classes} classes", more)
