"""The common base of all derivative models: a prepared graph, the outputs to differentiate, and the variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxgrad_cli.common.choices import Yield
from onnxgrad_cli.errors import UnsupportedError, conflict, no_data
from onnxgrad_cli.files import ModelSource, mark, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.types import FLOATS, is_float
from onnxgrad_cli.metadata import Derived, write_derived, write_tensors
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.backward import append_backward
from onnxgrad_cli.passes.cleanup import clean_up
from onnxgrad_cli.passes.declare_outputs import settle_yield
from onnxgrad_cli.passes.identifiers import make_identifiers
from onnxgrad_cli.passes.parameters.changed import read_record, refuse_changed
from onnxgrad_cli.passes.parameters.constants import resizing
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.passes.prepare.validate_input import validate_input
from onnxgrad_cli.passes.yield_op import insert_yield
from onnxgrad_cli.record import Training


@dataclass
class DerivativeModel:
    """A model to which derivatives are added, with the selected outputs and variables.

    Attributes:
        graph: the model. It keeps its original outputs until `finish`.
        inputs, weights: the inputs and initializers to differentiate with respect to, in order.
        options: shapes and modes, as for a build.
        inner: the values computed inside the model to differentiate with respect to.
        outputs: the float outputs or inner values that are differentiated.
        added: the inputs that were added for the derivatives, such as cotangents. They come last.
        output_weights: differentiated value -> the added input with the weights of its elements. Empty if all elements
            have the weight one. These inputs come first in `added`.
        scores: differentiated class score -> the output from which it is taken.
        axes: value that depends on the samples -> the axis of the samples; empty unless derivatives are per sample.
        said: more fields of the `Derived` record that is stored in the finished model.
        training: the record that the passes fill.
    """

    graph: Graph
    inputs: list[str]
    weights: list[str]
    options: Options
    inner: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    output_weights: dict[str, str] = field(default_factory=dict)
    scores: dict[str, str] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)

    @property
    def wanted(self) -> list[str]:
        """The names of all values to differentiate with respect to."""
        return [*self.inputs, *self.weights, *self.inner]

    def prepare(self) -> None:
        """Rewrite the graph so that it can be differentiated, and set `outputs` to all its float outputs.

        Raises:
            UsageError: nothing to differentiate with respect to was selected, or an option is only for training.
            UnsupportedError: the model has no float output.
        """
        graph = self.graph
        if self.weights:
            refuse_changed(graph)
        if not self.wanted:
            raise no_data(
                "no input or initializer is left to differentiate with respect to",
                "choose float inputs or float initializers",
            )
        if self.options.quantization == "lsq":
            raise conflict(
                "`quantization='lsq'` is only for training, because it scales the gradients of the scales",
                "use `quantization='ste'`",
            )
        graph.vary(self.wanted)  # before a pass uses their stored values
        make_differentiable(graph, self.options, self.training)
        self.training.straight_through = self.options.straight_through
        self.outputs = [name for name in graph.output_names if is_float(graph.types.get(name))]
        if not self.outputs:
            raise UnsupportedError(
                "the model has no float output to differentiate",
                hint="export the model with a float output, which a derivative requires",
            )

    def vjp(self, cotangents: Yield = "input") -> list[str]:
        """Append the backward part of the selected outputs and return the names of the gradients, in order.

        Args:
            cotangents: the source of the cotangents: new inputs ('input'), ones in the graph ('ones'), or a YieldOp
                that stays in the model ('keep').
        """
        graph, training = self.graph, self.training
        others = [n for n in graph.output_names if cotangents == "keep" and not is_float(graph.types.get(n))]
        ends = [name for name in graph.output_names if name in self.outputs or name in others]
        training.yielded = insert_yield(graph, ends, self.wanted)
        training.trained = self.wanted
        append_backward(graph, replace(self.options, yield_=cotangents), training)
        settle_yield(graph, cotangents, training.yielded)
        self.added += training.yielded.values() if cotangents == "input" else ()
        return list(training.gradients.values())

    def finish(self, outputs: Iterable[str], feed_weights: bool = True) -> ModelProto:
        """Declare inputs and outputs, remove unused nodes and values, and return the model.

        The inputs come in this order: the model's own inputs; if `feed_weights`, the weights, which keep their values;
        other initializers that can be fed; and the added inputs.
        """
        self._declare_inputs(feed_weights)
        self._declare_outputs(outputs)
        clean_up(self.graph, self.options, self.training)
        self._forget_unread()
        if self.options.identifiers:
            make_identifiers(self.graph)
        model = self.graph.commit()
        mark(model)
        return model

    def _declare_inputs(self, feed_weights: bool) -> None:
        graph = self.graph
        others = [name for name in graph.input_names if name not in self.weights]
        plain = [name for name in others if name not in graph.initializers and name not in self.added]
        overridable = [name for name in others if name in graph.initializers]
        for name in self.weights if feed_weights else ():
            if name not in graph.input_names:
                graph.add_input(name, graph.types[name])
        declared = {value.name: value for value in graph.proto.graph.input}
        names = (*plain, *self.weights, *overridable, *self.added)
        refill(graph.proto.graph.input, (declared[name] for name in names if name in declared))

    def _declare_outputs(self, names: Iterable[str]) -> None:
        graph = self.graph
        declared = {value.name: value.type for value in graph.proto.graph.output}
        del graph.proto.graph.output[:]
        for name in names:
            graph.add_output(name, declared.get(name))

    def described(self, model: ModelProto, kind: str, derivatives: Sequence[str], outputs: Sequence[str]) -> ModelProto:
        """Store a description of the derivatives in the metadata of a finished model, and return the model.

        Args:
            model: the model that `finish` returned; its inputs and outputs may have been renamed since.
            kind: the kind of the derivatives.
            derivatives: the names of the derivatives before any renaming.
            outputs: the names of all outputs before any renaming.
        """
        names = [model.graph.output[outputs.index(name)].name for name in derivatives]
        added = [value.name for value in model.graph.input][len(model.graph.input) - len(self.added) :]
        weights, inputs = added[: len(self.output_weights)], added[len(self.output_weights) :]
        of, wrt = (
            (self.training.yielded, self.training.gradients) if self.training.yielded else (self.outputs, self.wanted)
        )
        ends = tuple(self.scores.get(name, name) for name in of)
        said = Derived(
            kind, ends, tuple(wrt), tuple(inputs), tuple(names), self.options.mode, self.training.straight_through,
            tuple(self.training.partial), tuple(self.inner), weights=tuple(weights), **self.said,
        )  # fmt: skip
        write_tensors(model, self.graph)
        write_derived(model, said)
        return model

    def _forget_unread(self) -> None:
        """Remove constants that nothing reads any more, and declared types of values that are no longer computed."""
        graph = self.graph
        graph.drop_unread(list(graph.initializers))
        made = {name for node in graph.nodes for name in node.output}
        declared = graph.proto.graph.value_info
        refill(declared, (value for value in declared if value.name in made))

    def add_input(self, stem: str, like: str) -> str:
        """Add an input with the type of the value `like`, after all other inputs, and return its name."""
        name = self.graph.fresh(stem)
        self.graph.add_input(name, self.graph.types[like])
        self.added.append(name)
        return name


def open_model(model: ModelSource, path: Path | None, options: Options | None = None) -> Graph:
    """Return a copy of a model as a graph, without the metadata that an earlier build added to its nodes.

    Raises:
        OnnxgradError: a file can't be read, or is not a valid model.
        UnsupportedError: the opset of the model is newer than the newest supported one.
    """
    graph = Graph(*own_model(model, path))
    read_record(graph)
    validate_input(graph, options or Options())
    return graph


def float_inputs(graph: Graph) -> list[str]:
    """Return the float inputs that have no stored value, in order."""
    values = graph.proto.graph.input
    return [value.name for value in values if is_float(value.type) and value.name not in graph.initializers]


def float_initializers(graph: Graph) -> list[str]:
    """Return the float initializers in order, without constants that onnxgrad generated."""
    return [n for n, tensor in graph.initializers.items() if tensor.data_type in FLOATS and not graph.added(n)]


def float_weights(graph: Graph) -> list[str]:
    """Return the float initializers in order, except those that are only parameters of a Resize."""
    fixed = resizing(graph)
    return [name for name in float_initializers(graph) if name not in fixed]


def without(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return the names that are not in `others`."""
    gone = set(others)
    return [name for name in names if name not in gone]
