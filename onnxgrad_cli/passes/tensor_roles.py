"""Collect the roles of inputs and outputs that the passes declared, for the model's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float, shape_of
from onnxgrad_cli.metadata import Quantized, Role, Roles, Term, write
from onnxgrad_cli.options import StepOptions
from onnxgrad_cli.passes.proof_part import proof_part
from onnxgrad_cli.record import StepRecord


def roles(graph: Graph, options: StepOptions, training: StepRecord) -> Roles:
    """Return the roles of the model's inputs and outputs, as far as passes have declared them."""
    inputs: dict[str | None, str] = {
        **dict.fromkeys(training.yielded.values(), "loss gradient"),
        **dict.fromkeys(training.state, "state"),
        **dict.fromkeys(training.trained, "weight"),
        training.learning_rate: "learning rate",
        training.sample_weight: "sample weight",
        **dict.fromkeys(training.labels, "label"),
        **dict.fromkeys(training.factors.values(), "loss weight"),
    }
    outputs = {successor: Role("next state", name) for name, successor in training.state.items()}
    outputs |= {gradient: Role("gradient", name) for name, gradient in training.gradients.items()}
    outputs[training.loss] = Role("loss")
    stored, there = graph.initializers, set(graph.input_names)
    return Roles(
        tool_version(),
        tuple(_terms(graph, options, training)),
        options.reduction,
        {name: inputs.get(name, "constant" if name in stored else "model input") for name in graph.input_names},
        {name: outputs.get(name, Role("kept output")) for name in graph.output_names},
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
        *proof_part(graph, training),
        {data: {name: own for name, own in arrays.items() if own in there} for data, arrays in training.sets.items()},
    )


def _terms(graph: Graph, options: StepOptions, training: StepRecord) -> Iterator[Term]:
    each = zip(options.losses, training.predictions, training.judged, training.settings, strict=False)
    for position, (spec, output, label, given) in enumerate(each):
        from_file = spec.name.endswith(".onnx")
        name = Path(spec.name).name if from_file else spec.name
        loss = spec.loss
        ignored = None if loss is None else loss.ignored(given)
        numbered = label and not is_float(graph.types[label])
        shape = shape_of(graph.types[output]) or ()
        axis = (None if loss is None else loss.class_axis(given)) or 1
        classes = shape[axis] if numbered and len(shape) > 1 else 0
        chunks = training.chunks.values if training.chunks is not None and training.chunks.of == output else ()
        classes, factor = classes if isinstance(classes, int) else 0, training.factors.get(position, "")
        more, mask = tuple(training.more.get(position, ())), training.masks.get(position, "")
        yield Term(name, output, label, spec.weight, classes, ignored, axis, chunks, spec.data, factor, more, mask)


def write_roles(graph: Graph, options: StepOptions, training: StepRecord) -> None:
    """Write the roles of inputs and outputs into the model's metadata. They replace those of an earlier build."""
    write(graph.proto, roles(graph, options, training))
