"""What every derivative model starts from: a prepared model, and what of it is differentiated with respect to what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxgrad_cli.common.choices import Yield
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.files import ModelSource, mark, own_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import FLOATS, is_float
from onnxgrad_cli.metadata import Derived, write_derived, write_tensors
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.backward import BACKWARD
from onnxgrad_cli.passes.cleanup import CLEANUP
from onnxgrad_cli.passes.identifiers import make_identifiers
from onnxgrad_cli.passes.outputs import settle_yield
from onnxgrad_cli.passes.parameters.changed import read_record, refuse_changed
from onnxgrad_cli.passes.parameters.constants import resizing
from onnxgrad_cli.passes.prepare.admit import admit
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.passes.yield_op import insert_yield
from onnxgrad_cli.record import Training


@dataclass
class DerivativeModel:
    """A model on its way to computing derivatives, and the choice of them.

    Attributes:
        graph: the model; its outputs are still its own.
        inputs, weights: what it is differentiated with respect to, each in order.
        options: shapes and modes, as for a build.
        inner: values in between that it is differentiated with respect to.
        outputs: the float outputs, or inner values, that are differentiated.
        added: inputs that were added, which come last.
        scores: score of a class that is differentiated -> the output that it is of.
        axes: where derivatives are those of each sample, the axis of the samples of each value that depends on them.
        said: what else the model is to say of itself.
        training: what the passes note.
    """

    graph: Graph
    inputs: list[str]
    weights: list[str]
    options: Options
    inner: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    scores: dict[str, str] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)

    @property
    def wanted(self) -> list[str]:
        """What it is differentiated with respect to."""
        return [*self.inputs, *self.weights, *self.inner]

    def prepare(self) -> None:
        """Bring the graph into the form that can be differentiated, and take all its float outputs for `outputs`.

        Raises:
            UsageError: there is nothing to differentiate.
            UnsupportedError: no output is of floats.
        """
        graph = self.graph
        if self.weights:
            refuse_changed(graph)
        if not self.wanted:
            raise UsageError(
                "there is nothing to differentiate with respect to", "name float inputs or float initializers"
            )
        if self.options.quantization == "lsq":
            raise UsageError(
                "`quantization='lsq'` is for training: it balances the gradients of scales",
                "pass `quantization='ste'`",
            )
        graph.vary(self.wanted)  # before anything is made of their values
        make_differentiable(graph, self.options, self.training)
        self.training.straight_through = self.options.straight_through
        self.outputs = [name for name in graph.output_names if is_float(graph.types.get(name))]
        if not self.outputs:
            raise UnsupportedError(
                "the model has no float output to differentiate", hint="a gradient needs a float output"
            )

    def vjp(self, cotangents: Yield = "input") -> list[str]:
        """Append the backward part of the chosen outputs; returns the gradients, in order.

        Args:
            cotangents: 'input', 'ones' or 'keep', what becomes of the YieldOp that hands them in.
        """
        graph, training = self.graph, self.training
        others = [n for n in graph.output_names if cotangents == "keep" and not is_float(graph.types.get(n))]
        ends = [name for name in graph.output_names if name in self.outputs or name in others]
        training.yielded = insert_yield(graph, ends, self.wanted)
        training.trained = self.wanted
        BACKWARD.run(graph, replace(self.options, yield_=cotangents), training)
        settle_yield(graph, cotangents, training.yielded)
        self.added += training.yielded.values() if cotangents == "input" else ()
        return list(training.gradients.values())

    def finish(self, outputs: Iterable[str], feed_weights: bool = True) -> ModelProto:
        """Declare what goes in and out, remove what nobody reads, and return the model.

        Inputs are the model's own, then, with `feed_weights`, the weights, which keep their values, then other
        initializers that could be fed, then what was added.
        """
        self._declare_inputs(feed_weights)
        self._declare_outputs(outputs)
        CLEANUP.run(self.graph, self.options, self.training)
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
        ordered = [declared[name] for name in names if name in declared]
        del graph.proto.graph.input[:]
        graph.proto.graph.input.extend(ordered)

    def _declare_outputs(self, names: Iterable[str]) -> None:
        graph = self.graph
        declared = {value.name: value.type for value in graph.proto.graph.output}
        del graph.proto.graph.output[:]
        for name in names:
            graph.add_output(name, declared.get(name))

    def described(self, model: ModelProto, kind: str, derivatives: Sequence[str], outputs: Sequence[str]) -> ModelProto:
        """The model that was finished, which now says what it is.

        Args:
            model: what `finish` has returned.
            kind: of the derivatives.
            derivatives, outputs: those and all outputs, by the names that they had: the model may have others.
        """
        names = [model.graph.output[outputs.index(name)].name for name in derivatives]
        added = [value.name for value in model.graph.input][len(model.graph.input) - len(self.added) :]
        of, wrt = (
            (self.training.yielded, self.training.gradients) if self.training.yielded else (self.outputs, self.wanted)
        )
        ends = tuple(self.scores.get(name, name) for name in of)
        said = Derived(
            kind, ends, tuple(wrt), tuple(added), tuple(names), self.options.mode, self.training.straight_through,
            tuple(self.training.partial), tuple(self.inner), **self.said,
        )  # fmt: skip
        write_tensors(model, self.graph)
        write_derived(model, said)
        return model

    def _forget_unread(self) -> None:
        """Drop the constants of forward nodes that are gone, and what was declared of their results."""
        graph = self.graph
        graph.drop_unread(list(graph.initializers))
        made = {name for node in graph.nodes for name in node.output}
        declared = graph.proto.graph.value_info
        kept = [value for value in declared if value.name in made]
        del declared[:]
        declared.extend(kept)

    def add_input(self, stem: str, like: str) -> str:
        """Add an input of the type of a value, after all others; returns its name."""
        name = self.graph.fresh(stem)
        self.graph.add_input(name, self.graph.types[like])
        self.added.append(name)
        return name


def open_model(model: ModelSource, path: Path | None, options: Options | None = None) -> Graph:
    """A copy of a model as a graph; what an earlier build has said of it is forgotten.

    Raises:
        OnnxgradError: a file can't be read, or is no valid model.
        UnsupportedError: its opset is newer than what is known.
    """
    graph = Graph(*own_model(model, path))
    read_record(graph)
    admit(graph, options or Options())
    return graph


def float_inputs(graph: Graph) -> list[str]:
    """The float inputs that must be fed, in order."""
    values = graph.proto.graph.input
    return [value.name for value in values if is_float(value.type) and value.name not in graph.initializers]


def float_initializers(graph: Graph) -> list[str]:
    """Return the float initializers in order, without constants that onnxgrad generated."""
    return [n for n, tensor in graph.initializers.items() if tensor.data_type in FLOATS and not graph.added(n)]


def float_weights(graph: Graph) -> list[str]:
    """The float initializers, in order, except those that only say how something is resized."""
    fixed = resizing(graph)
    return [name for name in float_initializers(graph) if name not in fixed]


def without(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Those of `names` that are not among `others`."""
    gone = set(others)
    return [name for name in names if name not in gone]
