"""Open the samples of an explanation or attack, and choose the classes whose scores are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data import (
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
from onnxgrad_cli.data.class_names import class_names as names_in, names_for
from onnxgrad_cli.data.empty_kv_cache import with_sizes_of_pasts
from onnxgrad_cli.data.initial_states import outputs_batch_first, recurrent_values
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.errors import suggest, unknown_name, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.explanations.scorer import Scorer
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.metadata import Term

TOGETHER = 32
"""If the samples of a batch don't affect each other, at most this many are fed to the model at once."""


@dataclass(frozen=True)
class Scored:
    """The output with the class scores.

    Attributes:
        output: the name of the output.
        axis: the axis of the classes, counted from the front.
        classes: the number of classes, or None if it is known only at run time.
        places: the shape of the output without the axis of the classes.
    """

    output: str
    axis: int
    classes: int | None
    places: tuple[int | str, ...]


def scored(graph: Graph, output: str | None, class_axis: int = 1) -> Scored:
    """Return the output with the given name, or the first float output.

    Raises:
        UsageError: the model has no such output, or the output doesn't have the axis of classes.
    """
    known = [name for name in graph.output_names if is_float(graph.types.get(name))]
    if output is not None and output not in known:
        raise unknown_name(f"`output`: the model has no float output '{output}'", suggest(output, known, "outputs"))
    if not known:
        raise wrong_type("the model has no float output", "export the model with a float output of scores")
    name = output or known[0]
    shape = shape_of(graph.types[name]) or ()
    if not -len(shape) < class_axis < len(shape) or class_axis == 0:
        message = f"'{name}' is {in_words(graph.types[name])}, so it has no classes along axis {class_axis}"
        raise wrong_shape(message, "choose an output [batch, classes] with `output`, or set the axis with `class_axis`")
    axis = class_axis % len(shape)
    size = shape[axis]
    return Scored(name, axis, size if isinstance(size, int) else None, shape[:axis] + shape[axis + 1 :])


def open_samples(
    source: str | Path, model: ModelProto, graph: Graph, what: Scored, label: str, read: bool, prefix: str,
    how: SampleOptions, sequences: SequenceOptions, tell: Tell,
) -> Data:  # fmt: skip
    """Open the data for the inputs of a model, and for labels if they are needed.

    Args:
        source: the data; see `open_data`.
        model: the model, whose metadata may describe the preprocessing of its data.
        graph: the model with types.
        what: the output with the scores.
        label: the name of the label array in the data.
        read: True to read the labels.
        prefix: a prefix of the names in the data. Without it, they are the names of inputs.
        how: options for turning columns into inputs.
        sequences: options for turning text and lists of tokens into samples. Data that contain tokens need no
            tokenizer.
        tell: function that prints progress and cautions.

    Raises:
        UsageError: the data can't be read, or don't fit the model.
    """
    fed = with_sizes_of_pasts({n: graph.types[n] for n in graph.input_names if n not in graph.initializers}, graph)
    inputs = dict(fed)
    ranges = rows_of(model, inputs)
    terms = []
    unread = [] if read or label in inputs else [label]
    if read:
        if label in inputs:
            hint = "give the name of the array of labels"
            raise wrong_value(f"`label`: '{label}' is an input of the model, not an array of labels", hint)
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
    """Check that axis 0 of the subject and of the output is the batch.

    Raises:
        UsageError: the batch is another axis.
    """
    for name in ({**data.axes, **outputs_batch_first(model, data.axes)}.keys()) & {subject, output}:
        hint = "export the model with the batch first, such as batch_first=True in PyTorch"
        raise wrong_shape(f"the first axis of '{name}' is not the batch", hint)


def class_names(data: Data, model: ModelProto, what: Scored, label: str | None) -> Sequence[str]:
    """Return the names of the classes that the data or the model give, or an empty sequence."""
    said = names_in(model)
    stored = said.get(what.output, ()) if what.classes is None else names_for(said, what.classes, what.output)
    return data.names.get(label or "") or stored


def labels_of(class_: int | str, what: Scored, output: np.ndarray, given: np.ndarray | None) -> np.ndarray:
    """Return the classes to explain, int64 in the shape of the output without its axis of classes.

    Args:
        class_: the number of a class, 'argmax' or 'label'; see `ClassChoice`.
        what: the output with the scores.
        output: the values of the output.
        given: the labels in the data. They are only used if `class_` is 'label'.

    Raises:
        UsageError: the output has no class with this number.
    """
    pick = ClassChoice.of(class_, what.axis)
    assert pick is not None
    best, classes = output.argmax(what.axis), output.shape[what.axis]
    if pick.which == "label":
        assert given is not None
        found = given
    else:
        found = best if pick.which == "argmax" else np.full_like(best, int(pick.which))
    if found.size and not (found.min() >= 0 and found.max() < classes):
        message = f"'{what.output}' has the classes 0 to {classes - 1}, but class {found.max()} was chosen"
        raise wrong_value(message, "choose another class")
    return found.astype(np.int64)


def chosen(data: Data, sample: Sequence[int]) -> np.ndarray:
    """Return the indices of the chosen samples: `sample`, or all indices if it is empty.

    Raises:
        UsageError: the data have no sample with such an index.
    """
    for each in sample:
        checks.at_least("sample", each, 0, whole=True)
        if each >= len(data):
            raise wrong_value(f"`sample={each}` is out of range: there are {len(data)} samples, and the first is 0")
    return np.array(sample, np.int64) if sample else np.arange(len(data))


def batches(rows: np.ndarray, scorer: Scorer, most: int) -> list[np.ndarray]:
    """Split samples into batches of at most `most` samples, or of the size that the scorer requires."""
    size = scorer.size or most
    return [rows[start : start + size] for start in range(0, len(rows), size)]
