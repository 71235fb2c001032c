"""Split a whole training step into two models where the optimizer begins.

Gradients can then be processed in between. For example, the gradients of several processes or batches are summed before
one step is taken. Both halves are training models with their own metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnx import ModelProto, TypeProto, ValueInfoProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.errors import wrong_type
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, messages, metadata_of
from onnxgrad_cli.ir.node_values import behind, read_by
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied, copy_fields
from onnxgrad_cli.metadata import Role, Roles
from onnxgrad_cli.passes.declare_outputs import forget_domain

DIVISOR = "kept output"
"""The role of the loss's divisor as an output, if the optimizer weighs accumulated gradients by it."""


@dataclass(frozen=True)
class Halves:
    """A training step as two models. Initializers that both read are stored in both.

    Attributes:
        gradient: computes the loss, the gradients and the next running statistics from inputs, labels, weights and
            running statistics. If the optimizer reads further values, these are the last outputs.
        optimizer: computes the next weights and slots from weights, gradients, slots and the learning rate.
    """

    gradient: ModelProto
    optimizer: ModelProto


def split(model: ModelProto, also: Collection[str] = ()) -> Halves:
    """Return the two halves of a whole training step.

    Args:
        model: a model that `build` made with an optimizer; not changed. External data stay references.
        also: values that become additional outputs of the gradient model.

    Raises:
        UsageError: the model has no optimizer, or is not a training model.
    """
    roles = metadata.describe(model)
    steps = [node for node in model.graph.node if metadata_of(node, ROLE) == "optimizer"]
    made = {name for node in steps for name in node.output if name}
    stepped = [name for name, role in roles.outputs.items() if role.role == "next state" and name in made]
    if not stepped:
        raise wrong_type("the training model has no optimizer", "build it with `optimizer=NAME`")
    steps = behind(steps, stepped)
    crossing = _crossing(model, steps)
    results = [name for name in roles.outputs if name not in stepped]
    results += [name for name in dict.fromkeys([*crossing, *also]) if name not in results]
    types = _types(model, results)
    gradient = _part(model, behind(model.graph.node, results), list(roles.inputs), results, types)
    optimizer = _part(model, steps, [*crossing, *roles.inputs], stepped, types)
    del optimizer.functions[:]
    _write_roles(gradient, roles)
    _write_roles(optimizer, roles)
    return Halves(gradient, optimizer)


def _crossing(model: ModelProto, steps: Sequence[Node]) -> list[str]:
    """Return the values that the optimizer's nodes read from the other nodes of the model."""
    own = {name for node in steps for name in node.output}
    before = {name for node in model.graph.node for name in node.output if name and name not in own}
    return [name for name in dict.fromkeys(read_by(steps)) if name in before]


def narrowed(
    model: ModelProto, outputs: Collection[str], types: Mapping[str, TypeProto] = MappingProxyType({})
) -> ModelProto:
    """Return a copy of a training model that has only the given outputs and the nodes that they require.

    Args:
        model: a training model; not changed.
        outputs: names of its outputs, or of other values that become outputs.
        types: map from each such other value to its type.
    """
    roles = metadata.read(model)
    own = [name for name in roles.outputs if name in outputs]
    results = own + [name for name in outputs if name not in roles.outputs]
    part = _part(model, behind(model.graph.node, results), list(roles.inputs), results, types)
    _write_roles(part, roles)
    return part


def _types(model: ModelProto, names: Collection[str]) -> dict[str, TypeProto]:
    """Return the types of values, as declared or otherwise inferred."""
    types = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
    if all(name in types for name in names):
        return types
    graph = Graph(copied(model))
    infer_types(graph)
    return graph.types


def _part(
    model: ModelProto, nodes: list[Node], inputs: list[str], outputs: list[str], types: Mapping[str, TypeProto]
) -> ModelProto:
    """Return a model that consists of `nodes` and the inputs that they read.

    A value of the whole model that none of `nodes` computes may become an input.

    Args:
        model: the whole model.
        nodes: the nodes.
        inputs: names of possible inputs, in order.
        outputs: the names of its outputs.
        types: the types of inputs and outputs that the whole model does not declare.
    """
    read = {*read_by(nodes), *outputs}
    known = read.union(*(node.output for node in nodes))
    part = ModelProto()
    copy_fields(model, part, ("graph", "training_info"))
    graph, whole = part.graph, model.graph
    graph.name, graph.doc_string = whole.name, whole.doc_string
    declared = {value.name: value for value in (*whole.input, *whole.output)}

    def info(name: str) -> ValueInfoProto:
        return declared.get(name) or helper.make_value_info(name, types[name])

    graph.input.extend(info(name) for name in inputs if name in read)
    graph.output.extend(map(info, outputs))
    graph.node.extend(messages(nodes))
    graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in read)
    graph.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in read)
    graph.value_info.extend(value for value in whole.value_info if value.name in known and value.name not in declared)
    _forget_unused_domains(part)
    return part


def _forget_unused_domains(part: ModelProto) -> None:
    cut = Graph(part)
    kept = {domain for f in part.functions for domain in (f.domain, *(entry.domain for entry in f.opset_import))}
    for domain in {entry.domain for entry in part.opset_import} - {"", *kept}:
        forget_domain(cut, domain)


def _write_roles(part: ModelProto, roles: Roles) -> None:
    gradients = {name for name, role in roles.outputs.items() if role.role == "gradient"}
    inputs = {v.name: "gradient" if v.name in gradients else roles.inputs.get(v.name, "") for v in part.graph.input}
    outputs = {value.name: roles.outputs.get(value.name, Role(DIVISOR)) for value in part.graph.output}
    slots = {name: slot for name, slot in roles.slots.items() if name in inputs}
    optimizer, settings = (roles.optimizer, roles.step) if "learning rate" in inputs.values() else ("", None)
    found = replace(roles, inputs=inputs, outputs=outputs, slots=slots, optimizer=optimizer, step=settings)
    metadata.write(part, found)
