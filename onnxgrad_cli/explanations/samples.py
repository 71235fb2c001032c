"""Samples for a model that is explained or attacked: what it is fed, and the classes whose scores are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.explanations.scorer import Scorer
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_names import class_names as names_in, names_for
from onnxgrad_cli.training.data import (
    Data,
    Preprocessing,
    Range,
    SampleOptions,
    SequenceOptions,
    as_trained,
    holds_text,
    open_data,
    rows_of,
)
from onnxgrad_cli.training.data.pasts import with_sizes_of_pasts
from onnxgrad_cli.training.data.states import outputs_batch_first, recurrent_values

TOGETHER = 32
"""Samples that are fed together where they are independent."""


@dataclass(frozen=True)
class Scored:
    """The output that is looked at.

    Attributes:
        output: its name.
        axis: the axis of its classes, from the front.
        classes: how many there are; None where that is known at run time alone.
        places: its shape without them.
    """

    output: str
    axis: int
    classes: int | None
    places: tuple[int | str, ...]


def scored(graph: Graph, output: str | None, class_axis: int = 1) -> Scored:
    """The output that is named, or the first one of floats.

    Raises:
        UsageError: there is none, or it has no such axis.
    """
    known = [name for name in graph.output_names if is_float(graph.types.get(name))]
    if output is not None and output not in known:
        raise UsageError(f"`output`: the model has no '{output}' of floats", suggest(output, known, "outputs"))
    if not known:
        raise UsageError("the model has no output of floats", "a score is a float")
    name = output or known[0]
    shape = shape_of(graph.types[name])
    if shape is None or len(shape) < 2 or not -len(shape) <= class_axis < len(shape) or class_axis % len(shape) == 0:
        raise UsageError(
            f"'{name}' is {in_words(graph.types[name])}: it has no classes along axis {class_axis}",
            "name an output [batch, classes] with `output`, or the axis with `class_axis`",
        )
    axis = class_axis % len(shape)
    size = shape[axis]
    return Scored(name, axis, size if isinstance(size, int) else None, shape[:axis] + shape[axis + 1 :])


def open_samples(
    source: str | Path, model: ModelProto, graph: Graph, what: Scored, label: str, read: bool, prefix: str,
    how: SampleOptions, sequences: SequenceOptions, tell: Tell,
) -> Data:  # fmt: skip
    """Open the data of a model, and of its labels if there are to be some.

    Args:
        source: see `open_data`.
        model: the model, which may say how its data were prepared.
        graph: it, typed.
        what: the output that is looked at.
        label: what the data call the labels.
        read: whether they are wanted.
        prefix: what names in the data have before the inputs' names.
        how: how columns become inputs.
        sequences: how text and lists of tokens become samples; data of tokens need no tokenizer.
        tell: takes what is narrated.

    Raises:
        UsageError: they can't be read, or don't fit.
    """
    fed = with_sizes_of_pasts({n: graph.types[n] for n in graph.input_names if n not in graph.initializers}, graph)
    inputs = dict(fed)
    ranges = rows_of(model, inputs)
    terms = []
    unread = [] if read or label in inputs else [label]
    if read:
        if label in inputs:
            raise UsageError(f"`label`: '{label}' is an input of the model", "say what the data call the labels")
        inputs[label] = tensor_type(TensorProto.INT64, what.places)
        last = None if what.classes is None else what.classes - 1
        ranges[label] = Range(0, last, why=f"there are {what.classes} classes" if what.classes else "it is a class")
        terms = [Term("cross-entropy", what.output, label, 1.0, what.classes or 0, None, what.axis)]
    known = Preprocessing.of_model(model)
    path = checks.path("data", source)
    if sequences.tokenizer is not None and not holds_text(path, prefix):
        sequences = replace(sequences, tokenizer=None)
    data = open_data(
        path, inputs, ranges, prefix=prefix, terms=terms, options=sequences, samples=how, known=known, unread=unread,
        recurrent=recurrent_values(model.graph.node), trains=False, tell=tell,
    )  # fmt: skip
    return as_trained(data, fed, how, tell)


def check_batch_first(data: Data, model: ModelProto, subject: str, output: str) -> None:
    """Refuse an input or an output whose batch is not its first axis.

    Raises:
        UsageError: it is not.
    """
    for name in ({**data.axes, **outputs_batch_first(model, data.axes)}.keys()) & {subject, output}:
        raise UsageError(
            f"'{name}' has its batch behind the first axis",
            "export the model with the batch first, such as batch_first=True in PyTorch",
        )


def class_names(data: Data, model: ModelProto, what: Scored, label: str | None) -> Sequence[str]:
    """What the classes are called; nothing where nobody says."""
    said = names_in(model)
    stored = said.get(what.output, ()) if what.classes is None else names_for(said, what.classes, what.output)
    return data.names.get(label or "") or stored


def labels_of(class_: int | str, what: Scored, output: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    """The classes that are looked at, int64 of the shape of the output without its axis of classes.

    Args:
        class_: a number, 'argmax' or 'label'; see `ClassChoice`.
        what: the output.
        output: its values.
        given: the labels that the data have.

    Raises:
        UsageError: there is no such class.
    """
    pick = ClassChoice.of(class_, what.axis)
    assert pick is not None
    if pick.which == "argmax":
        return output.argmax(what.axis).astype(np.int64)
    if pick.which == "label":
        assert given is not None
        found = given
    else:
        found = np.full(output.shape[: what.axis] + output.shape[what.axis + 1 :], int(pick.which))
    classes = output.shape[what.axis]
    if found.size and not (found.min() >= 0 and found.max() < classes):
        raise UsageError(f"'{what.output}' has the classes 0 to {classes - 1}, and no {found.max()}", "name another")
    return found.astype(np.int64)


def chosen(data: Data, sample: Sequence[int]) -> np.ndarray:
    """The numbers of the samples that are asked for; none is all.

    Raises:
        UsageError: there is no such sample.
    """
    for each in sample:
        checks.at_least("sample", each, 0, whole=True)
        if each >= len(data):
            raise UsageError(f"`sample={each}`: there are {len(data)} samples, and the first is 0")
    return np.array(sample, np.int64) if sample else np.arange(len(data))


def batches(rows: np.ndarray, scorer: Scorer, most: int) -> list[np.ndarray]:
    """Samples as they are fed together."""
    size = scorer.size or most
    return [rows[start : start + size] for start in range(0, len(rows), size)]
