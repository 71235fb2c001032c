"""What a training model wants of data: the types of its inputs and labels, and the numbers that they may hold.

A class that does not exist or a token that has no row makes a run fail, or worse, in the middle of an epoch. What the
model says of itself is enough to know it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, TypeProto

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.losses import LOSSES
from onnxgrad_cli.metadata import Roles, Term, describe
from onnxgrad_cli.verification.feeds import index_limits

InputTypes = Mapping[str, TypeProto]
"""The inputs that a step is fed: name -> type. The first axis is the sample; an input without axes is the same for all
samples."""


@dataclass(frozen=True)
class Range:
    """The whole numbers that an input may hold.

    Attributes:
        low, high: the least and the greatest; None where that is not known.
        besides: others that it may hold too.
        why: what sets the bounds, in words.
        hint: what to do about others.
    """

    low: int | None
    high: int | None
    besides: frozenset[int] = frozenset()
    why: str = ""
    hint: str = field(default="", compare=False)

    def __contains__(self, number: int) -> bool:
        above = self.low is None or number >= self.low
        return number in self.besides or (above and (self.high is None or number <= self.high))

    def __and__(self, other: Range) -> Range:
        low = max((n for n in (self.low, other.low) if n is not None), default=None)
        high = min((n for n in (self.high, other.high) if n is not None), default=None)
        besides = frozenset(n for n in self.besides | other.besides if n in self and n in other)
        why = " and ".join(filter(None, (self.why, other.why)))
        return Range(low, high, besides, why, self.hint or other.hint)


def input_types_of(model: ModelProto) -> dict[str, TypeProto]:
    """What a training model is fed besides the learning rate: its inputs, labels and sample weights, with their types.

    Raises:
        UsageError: it is no training model.
    """
    types = {value.name: value.type for value in model.graph.input}
    return {name: types[name] for name in describe(model).sampled}


def ranges_of(model: ModelProto) -> dict[str, Range]:
    """The whole numbers that inputs of a training model may hold: classes of labels, rows of the tables they index.

    Args:
        model: the training model.

    Raises:
        UsageError: it is no training model.
    """
    roles, inputs = describe(model), input_types_of(model)
    found = rows_of(model, inputs)
    for label, classes in _classes(roles, inputs):
        found[label] = found[label] & classes if label in found else classes
    return found


def rows_of(model: ModelProto, inputs: InputTypes) -> dict[str, Range]:
    """The rows of tables that inputs of any model index."""
    return {
        name: Range(-rows, rows - 1, why=f"it indexes a table of {rows} rows")
        for name, rows in index_limits(model, {}).items()
        if name in inputs
    }


def _classes(roles: Roles, inputs: InputTypes) -> list[tuple[str, Range]]:
    numbered = [term for term in roles.losses if term.label in inputs and not is_float(inputs[term.label])]
    return [(term.label, found) for term in numbered if (found := _range_of(term))]


def _range_of(term: Term) -> Range | None:
    """The labels that a loss takes; None for one from a file, whose labels may be anything.

    A function is no longer there to be asked; that its labels are classes shows in their number.
    """
    try:
        loss = LOSSES.lookup(term.name)
    except UsageError:
        if term.name.endswith(".onnx") or not term.classes:
            return None
    else:
        if loss.class_axis({}) is None:
            return None
    return Range(
        0,
        term.classes - 1 if term.classes else None,
        frozenset() if term.ignore_index is None else frozenset({term.ignore_index}),
        f"there are {term.classes} classes" if term.classes else "it is the number of a class",
        f"'{term.output}' has {term.classes} classes: with `classes=N` a training gives it N" if term.classes else "",
    )
