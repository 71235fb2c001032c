"""The roles of inputs and outputs as the passes have declared them, for the model's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float, shape_of
from onnxgrad_cli.losses.spec import settings_of
from onnxgrad_cli.metadata import Quantized, Role, Roles, Term, tool_version, write
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.record import StepRecord


def roles(graph: Graph, options: StepOptions, training: StepRecord) -> Roles:
    """The roles of a model's inputs and outputs, as the passes have declared them so far."""
    successors = {successor: name for name, successor in training.state.items()}
    gradients = {gradient: name for name, gradient in training.gradients.items()}
    trained, labels = set(training.trained), set(training.labels)

    def of_input(name: str) -> str:
        if name in labels:
            return "label"
        if name == training.sample_weight:
            return "sample weight"
        if name == training.learning_rate:
            return "learning rate"
        if name in trained:
            return "weight"
        if name in training.state:
            return "state"
        if name in training.yielded.values():
            return "loss gradient"
        return "constant" if name in graph.initializers else "model input"

    def of_output(name: str) -> Role:
        if name == training.loss:
            return Role("loss")
        if name in gradients:
            return Role("gradient", gradients[name])
        if name in successors:
            return Role("next state", successors[name])
        return Role("kept output")

    return Roles(
        tool_version(),
        tuple(_terms(graph, options, training)),
        options.reduction,
        {name: of_input(name) for name in graph.input_names},
        {name: of_output(name) for name in graph.output_names},
        any(full.endswith("::QuantizeLinear") for full, _ in training.rules),
        tuple(dict.fromkeys(training.partial)),
        options.optimizer,
        tuple(training.adapters),
        dict(training.slots),
        Quantized(
            tuple(training.integer_weights),
            tuple(training.learned_scales),
            dict(training.copies),
            tuple(training.transposed),
        ),
        tuple(sorted(graph.held.intersection(graph.producers()))) if graph.held else (),
        training.step,
    )


def _terms(graph: Graph, options: StepOptions, training: StepRecord) -> Iterator[Term]:
    for spec, output, label in zip(options.losses, training.predictions, training.judged, strict=False):
        from_file = spec.name.endswith(".onnx")
        name = Path(spec.name).name if from_file else spec.name
        loss = spec.loss
        given = settings_of(options.loss_options, spec.output, output, label)
        ignored = None if loss is None else loss.ignored(given)
        numbered = label and not is_float(graph.types[label])
        shape = shape_of(graph.types[output]) or ()
        axis = (None if loss is None else loss.class_axis(given)) or 1
        classes = shape[axis] if numbered and len(shape) > 1 else 0
        chunks = training.chunks.values if training.chunks is not None and training.chunks.of == output else ()
        yield Term(name, output, label, spec.weight, classes if isinstance(classes, int) else 0, ignored, axis, chunks)


def embed(graph: Graph, options: StepOptions, training: StepRecord) -> None:
    """Write the roles into the model's metadata, in place of those of an earlier build."""
    write(graph.proto, roles(graph, options, training))
