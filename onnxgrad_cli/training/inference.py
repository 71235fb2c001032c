"""Evaluate an inference model on data, and compute its outputs for each sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto, TypeProto, helper

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data import (
    Batches,
    Data,
    SampleOptions,
    SequenceOptions,
    as_trained,
    names_in,
    open_data,
    ranges_of,
    rows_of,
)
from onnxgrad_cli.data.class_names import class_names, names_for
from onnxgrad_cli.data.dataset import data_of
from onnxgrad_cli.data.empty_kv_cache import fed_types, with_empty_pasts
from onnxgrad_cli.data.initial_states import (
    NOT_RECURRENT,
    Recurrent,
    has_batch_behind,
    outputs_batch_first,
    recurrent_values,
)
from onnxgrad_cli.data.input_types import InputTypes, Range
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import UnsupportedError, conflict, suggest, unknown_name, wrong_shape, wrong_type
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.execution.observation import is_quick
from onnxgrad_cli.execution.session import find_provider, of_samples, open_session
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import in_words
from onnxgrad_cli.ir.weightless_copy import copied, skeleton
from onnxgrad_cli.metadata import Term, check_is_original, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.free_batch import asked_batch, fixed_batch
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.evaluation import EvalSession, Evaluator, confusions, make_eval_model
from onnxgrad_cli.training.metrics import metrics_of
from onnxgrad_cli.training.padding_check import check_padding
from onnxgrad_cli.verification.checks.freed_batch import freed

if TYPE_CHECKING:
    import onnxruntime


Source = str | Path | Mapping[str, np.ndarray]
"""Data: the path of a file or folder, or a map from the name of an input to its array."""

MOST_CLASSES = 1000
"""Largest number of classes for a confusion matrix. A larger one would be mostly zeros."""


@dataclass(frozen=True)
class Setting(checks.KnownKeywords):
    """Settings for running a model on data. The defaults are the same as on the command line.

    Attributes:
        batch_size: the number of samples per run. A fixed batch size of the model takes precedence.
        provider: the execution provider, such as 'cpu'.
        threads: the number of CPU threads; None for onnxruntime's default.
        prefix: the prefix of the names of the arrays to use, such as 'test_'.
        sequences: options of the conversion of text and lists of tokens to samples.
        samples: options of the conversion of other data to samples. By default, data are normalized as in the training.

    Raises:
        UsageError: a field doesn't exist, or a value or its type does not fit.
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
        """Open data, and preprocess them as the training did or as the options request.

        The arguments that are not described here are those of `open_data`.

        Args:
            labels: the names in `inputs` that are not inputs of the model.
        """
        if isinstance(source, Mapping):
            data = data_of(self._renamed(source, {*inputs, *unread}), inputs, ranges, finite, recurrent)
            data = replace(data, normal=known.normal)
        else:
            data = open_data(
                source, inputs, ranges, prefix=self.prefix, finite=finite, terms=terms, options=self.sequences,
                samples=self.samples, known=known, unread=unread, recurrent=recurrent, trains=False, tell=tell,
            )  # fmt: skip
            data.tell_padding(tell)
        return as_trained(data, {n: kind for n, kind in inputs.items() if n not in labels}, self.samples, tell)

    def _renamed(self, arrays: Mapping[str, np.ndarray], inputs: Collection[str]) -> dict[str, np.ndarray]:
        """Return the arrays, renamed to the inputs that the `columns` option assigns them to.

        Raises:
            UsageError: the option names an array or an input that doesn't exist.
        """
        columns = self.samples.columns
        for column, feed in columns.items():
            for name, held, what in ((column, arrays, "arrays"), (feed, inputs, "inputs and labels")):
                if name not in held:
                    hint = suggest(name, held, what)
                    raise unknown_name(f"`columns`: there is no '{name}' among the {what}", hint)
        return {columns.get(name, name): array for name, array in arrays.items()}


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix.

    Attributes:
        classes: the names of the classes, or their numbers as text if the model stores no names.
        counts: integers (C, C); rows are labels, columns are predictions.
    """

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        results: 'loss' -> the loss, and the name of each metric, as requested, -> its value.
        samples: the number of samples.
        confusion: output -> its confusion matrix, for outputs with at most 1,000 classes.
    """

    results: dict[str, float]
    samples: int
    confusion: dict[str, Matrix]


def evaluate(
    model: ModelProto, path: Path | None, source: Source, options: Options, metrics: Sequence[str], setting: Setting,
    keep_mode: bool, tell: Tell,
) -> Evaluated:  # fmt: skip
    """Compute the loss and the metrics of an inference model on data.

    The arguments are those of `run_evaluate`, where `source` is called `data`.
    """
    model, options = _ready(model, path, source, options, setting, tell)
    found = make_eval_model(model, options, (), path, keep_mode=keep_mode, counted=True)
    for caution in dict.fromkeys(map(str, found.cautions)):
        tell(f"warning: {caution}", 0)
    roles = describe(found.model)
    if len(roles.sets) > 1:
        names = " and ".join(roles.sets)
        message = f"`losses`: an evaluation has one data set, but the losses name {names}"
        raise conflict(message, "pass the losses of one data set")
    terms, arrays = roles.losses, next(iter(roles.sets.values()), {name: name for name in roles.sampled})
    labels = {name for name, own in arrays.items() if roles.inputs[own] in ("label", "sample weight")}
    asked = metrics_of(metrics, terms)
    inputs = {name: found.types[own] for name, own in arrays.items()}
    known = Preprocessing.of_model(model)
    ranges, recurrent = ranges_of(found.model), recurrent_values(model.graph.node)
    ranges = {name: ranges[own] for name, own in arrays.items() if own in ranges}
    of_data = roles.on_set(next(iter(roles.sets), "")).losses
    data = setting.open(source, inputs, ranges, of_data, tell, known, labels=labels, recurrent=recurrent)
    session = EvalSession(found, path, find_provider(setting.provider), setting.threads)
    batches = Batches(data, data.batch_size or setting.batch_size, shuffle=False, tell=tell)
    evaluator = Evaluator(session, data, batches, asked, inputs=arrays)
    if setting.batch_size > 1 and not keep_mode:
        check_padding(session, data, arrays, {})
    evaluator.check({})
    taken = confusions(terms, MOST_CLASSES)
    results = evaluator.measure({}, taken)
    samples = len(batches) * batches.size if batches.drop_last else len(data)
    return Evaluated(results, samples, {term.output: matrix_of(model, term, each) for term, each in taken})


def with_free_batch(model: ModelProto, path: Path | None, batch_size: int, options: Options, tell: Tell) -> ModelProto:
    """Return a copy of the model with a dynamic batch size, or the model itself if its batch size fits.

    The batch size is made dynamic if the `shapes` option requests it, or if the fixed batch size of the model is not
    `batch_size`. In the second case, the original model is returned if its batch size can't be made dynamic.

    Raises:
        UnsupportedError: `shapes` requests a dynamic batch size, and the model can't have one.
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


def _ready(
    model: ModelProto, path: Path | None, source: Source, options: Options, setting: Setting, tell: Tell
) -> tuple[ModelProto, Options]:
    """Return the model with a batch size that fits, and the options with the sizes of empty pasts.

    Raises:
        UsageError: the model is a training model made by onnxgrad, or has an endless Loop.
    """
    check_is_original(model)
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    if any(node.op_type == "Loop" for node in with_bodies(nodes)):
        graph = Graph(skeleton(model))
        normalise(graph)
        check_ends(graph)
    held = partial(names_in, source) if isinstance(source, (str, Path)) else source.keys
    options = with_empty_pasts(model, options, held, tell)
    return with_free_batch(model, path, setting.batch_size, options, tell), options


def matrix_of(model: ModelProto, term: Term, confusion: Confusion) -> Matrix:
    """Return a confusion matrix with the class names that the model stores, or with class numbers."""
    count = len(confusion.matrix)
    named = names_for(class_names(model), count, term.output, term.label)
    return Matrix(named or [str(number) for number in range(count)], confusion.matrix.tolist())


class Predictor:
    """Runs an inference model on data, and yields its outputs.

    Attributes:
        outputs: the names of the requested outputs.
        samples: the number of samples.
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
        """Open the model and the data. The arguments are those of `run_predict`, where `source` is called `data`."""
        model, options = _ready(model, path, source, options or Options(), setting, tell)
        self.outputs, self._names = _asked(model, outputs, tell), class_names(model)
        inputs = fed_types(model, path, options)
        self._data = setting.open(
            source, inputs, rows_of(model, inputs), (), tell, Preprocessing.of_model(model), finite=False,
            unread=[name for name in (label,) if name not in inputs], recurrent=recurrent_values(model.graph.node),
        )  # fmt: skip
        self.samples = len(self._data)
        self._axes = outputs_batch_first(model, self._data.axes)
        self._apart = self._data.padding is not None and self._data.ragged
        self._size = 1 if self._apart else self._data.batch_size or setting.batch_size
        self._session = open_session(model, path, find_provider(setting.provider), setting.threads)
        self._read = {name: name for name in self.outputs}
        if casts := unreadable(self._session, self.outputs):
            model, called = with_readable(model, casts)
            self._read |= called
            self._session = open_session(model, path, find_provider(setting.provider), setting.threads)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of each batch, with samples along the first axis.

        If the last batch is too small for a model with a fixed batch size, the last sample is repeated, and the outputs
        for the copies are dropped. A batch of one sample is treated in the same way if the model removes its batch
        axis.

        Raises:
            UsageError: the first axis of an output is not the number of samples.
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
        """Run the model on the samples at the given rows of the data."""
        with of_samples(f"the samples from {rows[0]} on"):
            arrays = self._session.run(list(self._read.values()), self._data.batch(rows))
        found = dict(zip(self.outputs, arrays, strict=True))
        return found | {n: np.moveaxis(found[n], axis, 0) for n, axis in self._axes.items() if n in found}

    def all(self) -> dict[str, np.ndarray]:
        """Return the outputs of all samples.

        If the data have samples of different shapes, so may an output. Such an output is returned as an object array
        with an array for each sample.

        If the model stores class names for an output, also return the predicted class as `<output>_class` and the name
        of the class as `<output>_label`.

        Raises:
            UsageError: the first axis of an output is not the number of samples; the shape of its samples differs
                between batches; or an output is already called `<output>_class` or `<output>_label`.
        """
        parts = list[dict[str, np.ndarray]]()
        for part in self:
            if not parts:
                self._with_classes(part)  # report a name conflict before running the other batches
            parts.append(part)
        joined = _apart if self._apart else _joined
        return self._with_classes({name: joined(name, [part[name] for part in parts]) for name in self.outputs})

    def _with_classes(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs, and for outputs with class names also the predicted classes and their names."""
        whole = dict(found)
        for name in self.outputs:
            added = self.named(name, found[name])
            twice = next(filter(whole.__contains__, added), None)
            if twice is not None:
                message = f"the model has an output '{twice}', but the class of '{name}' would get the same name"
                raise conflict(message, f"choose one of '{name}' and '{twice}' with `outputs`")
            whole |= added
        return whole

    def named(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return the predicted class of each sample and its name, or {} if the model stores no class names."""
        listed = names_for(self._names, array.shape[1], name) if array.ndim == 2 else []
        if not listed:
            return {}
        best = array.argmax(1)
        return {f"{name}_class": best, f"{name}_label": np.array(listed)[best]}


def _asked(model: ModelProto, outputs: Sequence[str], tell: Tell) -> list[str]:
    types: dict[str, TypeProto] = {value.name: value.type for value in model.graph.output}
    for name in outputs:
        if name not in types:
            hint = suggest(name, types, "outputs")
            raise unknown_name(f"`outputs`: the model has no output '{name}'", hint)
    wanted = list(dict.fromkeys(outputs)) or list(types)
    others = [name for name in wanted if not types[name].HasField("tensor_type")]
    if others and (outputs or len(others) == len(wanted)):
        message = f"the output '{others[0]}' is not a tensor: {in_words(types[others[0]])}"
        raise wrong_type(message, "name other outputs")
    for name in others:
        tell(f"ignoring the output '{name}', which is not a tensor", 0)
    return [name for name in wanted if name not in others]


def _samples(name: str, array: np.ndarray, count: int, missing: int) -> np.ndarray:
    """Return the first `count` rows of an output, without the `missing` rows of repeated samples at the end.

    Raises:
        UsageError: the first axis does not have `count` + `missing` rows.
    """
    if array.ndim == 0 or len(array) != count + missing:
        message = f"the output '{name}' is {list(array.shape)} for {count + missing} samples"
        raise wrong_shape(
            f"{message}, but its first axis must run over the samples", "name other outputs with `outputs`"
        )
    return (array.astype(str) if array.dtype == object else array)[:count]


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1:
        message = f"the output '{name}' has samples of different shapes: {list(shapes[0])} and {list(shapes[1])}"
        raise wrong_shape(message, "use a single batch for all samples with `batch_size`, or batches of one length")
    return np.concatenate(parts)


def _apart(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    if len({part.shape for part in parts}) == 1:
        return _joined(name, parts)
    found = np.empty(len(parts), object)
    for row, part in enumerate(parts):
        found[row] = part[0]
    return found


FEW_BITS = {"int4": TensorProto.INT8, "int2": TensorProto.INT8, "uint4": TensorProto.UINT8, "uint2": TensorProto.UINT8}
SHORT_FLOATS = ("bfloat16", "float8", "float4")


def unreadable(session: onnxruntime.InferenceSession, outputs: Sequence[str]) -> dict[str, int]:
    """Return a map: output of a type that numpy lacks -> the ONNX type to cast it to."""
    kinds = {value.name: value.type.removeprefix("tensor(").removesuffix(")") for value in session.get_outputs()}
    lacking = [name for name in outputs if kinds[name] in FEW_BITS or kinds[name].startswith(SHORT_FLOATS)]
    return {name: FEW_BITS.get(kinds[name], TensorProto.FLOAT) for name in lacking}


def with_readable(model: ModelProto, types: Mapping[str, int]) -> tuple[ModelProto, dict[str, str]]:
    """Return a copy of a model with a cast of some outputs added, and a map: output -> the name of its cast.

    Args:
        model: the model.
        types: output to cast -> the ONNX type to cast it to.
    """
    found = copied(model)
    graph = Graph(found)
    called = {name: graph.fresh(f"{name}_read") for name in types}
    for name, to in types.items():
        found.graph.node.append(helper.make_node("Cast", [name], [called[name]], to=to))
        found.graph.output.append(helper.make_tensor_value_info(called[name], to, None))
    return found, called
