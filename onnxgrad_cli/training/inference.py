"""An inference model on data: how good it is, and what it says of each sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import ModelProto, TypeProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UnsupportedError, UsageError, suggest
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.observation import is_quick
from onnxgrad_cli.execution.session import find_provider, of_samples, open_session
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.skeleton import skeleton
from onnxgrad_cli.ir.types import in_words
from onnxgrad_cli.metadata import Term, check_is_original, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.free_batch import asked_batch, fixed_batch
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.class_names import class_names, names_for
from onnxgrad_cli.training.data import (
    Batches,
    Data,
    SampleOptions,
    SequenceOptions,
    as_trained,
    input_types_of,
    names_in,
    open_data,
    ranges_of,
    rows_of,
)
from onnxgrad_cli.training.data.arrays import data_of
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.pasts import fed_types, with_empty_pasts
from onnxgrad_cli.training.data.preprocessing import Preprocessing
from onnxgrad_cli.training.data.states import (
    NOT_RECURRENT,
    Recurrent,
    has_batch_behind,
    outputs_batch_first,
    recurrent_values,
)
from onnxgrad_cli.training.eval_model import EvalSession, make_eval_model
from onnxgrad_cli.training.evaluate import Evaluator, confusions
from onnxgrad_cli.training.metrics import metrics_of
from onnxgrad_cli.training.readable_outputs import unreadable, with_readable
from onnxgrad_cli.verification.freed_batch import freed

Source = str | Path | Mapping[str, np.ndarray]
"""Data in a file or folder, or in memory by the names of inputs."""

MOST_CLASSES = 1000
"""Of more classes a confusion matrix is not made: it would be mostly zeros, and large."""


@dataclass(frozen=True)
class Setting(KnownKeywords):
    """How a model is run on data; the defaults are those of the command line.

    Attributes:
        batch_size: how many samples are taken at once; of a model that takes so many and no others, that many.
        provider, threads: what it runs on; see `Trainer`.
        prefix: what the names in the data have before those of the inputs.
        sequences: how text and lists of tokens become samples.
        samples: how data become samples; a normalization that is not asked for is that of the training.

    Raises:
        UsageError: there is no such field, or a word, a number or a type does not fit.
    """

    batch_size: int = 32
    provider: str = "cpu"
    threads: int | None = None
    prefix: str = ""
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)

    def __post_init__(self) -> None:
        checks.at_least("batch_size", self.batch_size, 1, whole=True)
        if self.threads is not None:
            checks.threads(self.threads)
        for name in ("provider", "prefix"):
            checks.text(name, getattr(self, name))
        checks.of_type("sequences", self.sequences, SequenceOptions, "SequenceOptions(...)")
        checks.of_type("samples", self.samples, SampleOptions, "SampleOptions(...)")

    def open(
        self,
        source: Source,
        inputs: InputTypes,
        ranges: Mapping[str, Range],
        terms: Sequence[Term],
        tell: Tell,
        known: Preprocessing,
        finite: bool = True,
        labels: Collection[str] = (),
        unread: Collection[str] = (),
        recurrent: Recurrent = NOT_RECURRENT,
    ) -> Data:
        """Open data, and do to them what was done to those that the model was trained on, or is asked for.

        Args:
            labels: what of the inputs is no input of the model.
            source, inputs, ranges, terms, tell, known, finite, unread, recurrent: see `open_data`.
        """
        if isinstance(source, Mapping):
            data = replace(
                data_of(self._renamed(source, {*inputs, *unread}), inputs, ranges, finite, recurrent),
                normal=known.normal,
            )
        else:
            data = open_data(
                source, inputs, ranges, prefix=self.prefix, finite=finite, terms=terms, options=self.sequences,
                samples=self.samples, known=known, unread=unread, recurrent=recurrent, trains=False, tell=tell,
            )  # fmt: skip
            data.tell_padding(tell)
        return as_trained(data, {n: kind for n, kind in inputs.items() if n not in labels}, self.samples, tell)

    def _renamed(self, arrays: Mapping[str, np.ndarray], inputs: Collection[str]) -> dict[str, np.ndarray]:
        """Arrays by the inputs that they are to be."""
        columns = self.samples.columns
        for column, feed in columns.items():
            for name, held, what in ((column, arrays, "arrays"), (feed, inputs, "inputs and labels")):
                if name not in held:
                    raise UsageError(f"`columns`: there is no '{name}' among the {what}", suggest(name, held, what))
        return {columns.get(name, name): array for name, array in arrays.items()}


@dataclass(frozen=True)
class Matrix:
    """How often each class was taken for each.

    Attributes:
        classes: their names, or else their numbers.
        counts: int (C, C): rows are labels, columns what was chosen.
    """

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Evaluated:
    """How good a model is.

    Attributes:
        results: 'loss', and each metric by the name it was asked for by.
        samples: how many it was measured on.
        confusion: output -> how often each class was taken for each, of outputs that tell up to 1,000 classes apart.
    """

    results: dict[str, float]
    samples: int
    confusion: dict[str, Matrix]


def evaluate(
    model: ModelProto, path: Path | None, source: Source, options: Options, metrics: Sequence[str], setting: Setting,
    keep_mode: bool, tell: Tell,
) -> Evaluated:  # fmt: skip
    """The loss of an inference model and its metrics on data; see `run_evaluate`."""
    check_is_original(model)
    _check_ends(model)
    options = with_empty_pasts(model, options, lambda: _held(source), tell)
    model = with_free_batch(model, path, setting.batch_size, options, tell)
    found = make_eval_model(model, options, (), path, keep_mode=keep_mode, counted=True)
    roles = describe(found.model)
    terms, labels = roles.losses, {n for n, role in roles.inputs.items() if role in ("label", "sample weight")}
    asked = metrics_of(metrics, terms)
    inputs = {name: found.types[name] for name in input_types_of(found.model)}
    known = Preprocessing.of_model(model)
    data = setting.open(
        source,
        inputs,
        ranges_of(found.model),
        terms,
        tell,
        known,
        labels=labels,
        recurrent=recurrent_values(model.graph.node),
    )
    session = EvalSession.of(found, path, find_provider(setting.provider), setting.threads)
    batches = Batches(data, data.batch_size or setting.batch_size, shuffle=False, tell=tell)
    evaluator = Evaluator(session, data, batches, asked)
    evaluator.check({})
    taken = confusions(terms, MOST_CLASSES)
    results = evaluator.measure({}, taken)
    samples = len(batches) * batches.size if batches.drop_last else len(data)
    return Evaluated(results, samples, {term.output: matrix_of(model, term, each) for term, each in taken})


def with_free_batch(model: ModelProto, path: Path | None, batch_size: int, options: Options, tell: Tell) -> ModelProto:
    """Return a model with a free batch, if `shapes` asks for it, or if the model has fixed another one and it can be.

    Raises:
        UnsupportedError: `shapes` asks for it, and it can't be.
    """
    asked = asked_batch(model, options)
    fixed = fixed_batch(model) if not options.shapes and is_quick(model) and not has_batch_behind(model) else None
    batch = asked or fixed
    if batch is None or (asked is None and batch.size == batch_size):
        return model
    try:
        free = freed(model, path, batch, options.shapes)
        tell(str(free.compare()), 0)
    except UnsupportedError:
        if asked is not None:
            raise
        return model
    return free.model


def _check_ends(model: ModelProto) -> None:
    """Make sure that no loop of a model goes on for ever; see `check_ends`. One without loops is not looked through."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    if any(node.op_type == "Loop" for node in with_bodies(nodes)):
        graph = Graph(skeleton(model))
        normalise(graph)
        check_ends(graph)


def _held(source: Source) -> Collection[str] | None:
    return source.keys() if isinstance(source, Mapping) else names_in(source)


def matrix_of(model: ModelProto, term: Term, confusion: Confusion) -> Matrix:
    """A confusion matrix with the names of classes that the model stores, if it does."""
    count = len(confusion.matrix)
    named = names_for(class_names(model), count, term.output, term.label)
    return Matrix(named or [str(number) for number in range(count)], confusion.matrix.tolist())


class Predictor:
    """An inference model and data, of which it says something for each sample.

    Attributes:
        outputs: the names of its outputs that are asked for.
        classes: output -> the names of its classes, of those whose last axis has as many places as there are names.
    """

    def __init__(
        self,
        model: ModelProto,
        path: Path | None,
        source: Source,
        outputs: Sequence[str],
        setting: Setting,
        tell: Tell,
        label: str = "label",
        options: Options | None = None,
    ) -> None:
        """See `run_predict`."""
        check_is_original(model)
        _check_ends(model)
        options = with_empty_pasts(model, options or Options(), lambda: _held(source), tell)
        model = with_free_batch(model, path, setting.batch_size, options, tell)
        self.outputs, self._names = _asked(model, outputs, tell), class_names(model)
        inputs = fed_types(model, path, options)
        self._data = setting.open(
            source, inputs, rows_of(model, inputs), (), tell, Preprocessing.of_model(model), finite=False,
            unread=[name for name in (label,) if name not in inputs], recurrent=recurrent_values(model.graph.node),
        )  # fmt: skip
        self._axes = outputs_batch_first(model, self._data.axes)
        self._size = self._data.batch_size or setting.batch_size
        self._session = open_session(model, path, find_provider(setting.provider), setting.threads)
        self._read = {name: name for name in self.outputs}
        if casts := unreadable(self._session, self.outputs):
            model, called = with_readable(model, casts)
            self._read |= called
            self._session = open_session(model, path, find_provider(setting.provider), setting.threads)

    @cached_property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The outputs of one batch after the other, samples along the first axis.

        A model that takes a fixed number of samples gets some twice where they are too few; they are counted once. So
        does a model that removes the axis of a batch of 1.

        Raises:
            UsageError: an output is not of samples.
            OnnxgradError: onnxruntime fails.
        """
        for start in range(0, self.samples, self._size):
            rows = np.arange(start, min(start + self._size, self.samples))
            missing = self._size - len(rows) if self._data.batch_size is not None else 0
            found = self._outputs_for(np.pad(rows, (0, missing), mode="edge"))
            if len(rows) + missing == 1 and any(array.ndim == 0 or len(array) != 1 for array in found.values()):
                missing = 1
                found = self._outputs_for(np.pad(rows, (0, missing), mode="edge"))
            yield {name: _samples(name, array, len(rows), missing) for name, array in found.items()}

    def _outputs_for(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Run the model on the samples in some rows of the data."""
        with of_samples(f"the samples from {rows[0]} on"):
            arrays = self._session.run(list(self._read.values()), self._data.batch(rows))
        found = dict(zip(self.outputs, arrays, strict=True))
        return found | {n: np.moveaxis(found[n], axis, 0) for n, axis in self._axes.items() if n in found}

    def all(self) -> dict[str, np.ndarray]:
        """The outputs of all samples, and of those with names of classes the class as `<output>_class` and its name.

        Raises:
            UsageError: an output is not of samples, or not of one shape, or is called as the class of another.
        """
        parts = list[dict[str, np.ndarray]]()
        for part in self:
            if not parts:
                self._with_classes(part)  # a name that is there already is told before the rest is run
            parts.append(part)
        return self._with_classes({name: _joined(name, [part[name] for part in parts]) for name in self.outputs})

    def _with_classes(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs, and of those with names of classes the class and its name."""
        whole = dict(found)
        for name in self.outputs:
            added = self.named(name, found[name])
            twice = next(filter(whole.__contains__, added), None)
            if twice is not None:
                raise UsageError(
                    f"the model has an output '{twice}', which the class of '{name}' would be called, too",
                    f"name one of '{name}' and '{twice}' with `outputs`",
                )
            whole |= added
        return whole

    def named(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """The class of the largest output of each sample and its name, where the model stores names; else {}."""
        listed = names_for(self._names, array.shape[1], name) if array.ndim == 2 else []
        if not listed:
            return {}
        best = array.argmax(1)
        return {f"{name}_class": best, f"{name}_label": np.array(listed)[best]}


def _asked(model: ModelProto, outputs: Sequence[str], tell: Tell) -> list[str]:
    types: dict[str, TypeProto] = {value.name: value.type for value in model.graph.output}
    for name in outputs:
        if name not in types:
            raise UsageError(f"`outputs`: the model has no output '{name}'", suggest(name, types, "outputs"))
    wanted = list(dict.fromkeys(outputs)) or list(types)
    others = [name for name in wanted if not types[name].HasField("tensor_type")]
    if others and (outputs or len(others) == len(wanted)):
        raise UsageError(f"the output '{others[0]}' is no tensor: {in_words(types[others[0]])}", "name other outputs")
    for name in others:
        tell(f"the output '{name}' is no tensor, and left out", 0)
    return [name for name in wanted if name not in others]


def _samples(name: str, array: np.ndarray, count: int, missing: int) -> np.ndarray:
    """What an output says of each sample."""
    if array.ndim == 0 or len(array) != count + missing:
        raise UsageError(
            f"the output '{name}' is {list(array.shape)} for {count + missing} samples: its first axis is not theirs",
            "name other outputs with `outputs`",
        )
    return (array.astype(str) if array.dtype == object else array)[:count]


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1:
        raise UsageError(
            f"the output '{name}' has samples of {list(shapes[0])} and of {list(shapes[1])}",
            "take all samples at once with `batch_size`, or batches of one length",
        )
    return np.concatenate(parts)
