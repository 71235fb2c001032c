"""Cut a whole training step in two where the optimizer begins, so that something can come between.

What comes there are the gradients: those of several processes, or of several batches, are summed before one step is
taken with them. Both halves are training models of their own kind, which describe themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnx import FunctionProto, ModelProto, TypeProto, ValueInfoProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.node import ROLE, Node, messages, metadata_of
from onnxgrad_cli.ir.nodes import read_by, reads
from onnxgrad_cli.ir.skeleton import copied, copy_fields
from onnxgrad_cli.metadata import Role, Roles
from onnxgrad_cli.passes.outputs import forget_domain

DIVISOR = "kept output"
"""The role of what the loss is divided by, where the optimizer gathers gradients by it."""


@dataclass(frozen=True)
class Halves:
    """A training step in two models; values that both read are stored in both.

    Attributes:
        gradient: from inputs, labels, weights and running statistics to the loss, the gradients and the next
            statistics; what else the optimizer reads of it comes after these.
        optimizer: from weights, gradients, slots and the learning rate to the next weights and slots.
    """

    gradient: ModelProto
    optimizer: ModelProto


def split(model: ModelProto, also: Collection[str] = ()) -> Halves:
    """The two halves of a whole training step.

    Args:
        model: a model that `build` has made with an optimizer; not changed. External data stay references.
        also: values that the gradient model is to have as outputs besides.

    Raises:
        UsageError: it has no optimizer, or is no training model.
    """
    roles = metadata.describe(model)
    steps = [node for node in model.graph.node if _is_step(node)]
    made = {name for node in steps for name in node.output if name}
    stepped = [name for name, role in roles.outputs.items() if role.role == "next state" and name in made]
    if not stepped:
        raise UsageError("the training model has no optimizer", "build it with `optimizer=NAME`")
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
    """What the optimizer's nodes read of the nodes before them."""
    own = {name for node in steps for name in node.output}
    before = {name for node in model.graph.node for name in node.output if name and name not in own}
    return [name for name in dict.fromkeys(read_by(steps)) if name in before]


def narrowed(
    model: ModelProto, outputs: Collection[str], types: Mapping[str, TypeProto] = MappingProxyType({})
) -> ModelProto:
    """A copy of a training model with some outputs only, and what these are computed of.

    Args:
        model: a training model; not changed.
        outputs: names of its outputs, or of other values that become outputs.
        types: the types of these other values.
    """
    roles = metadata.read(model)
    own = [name for name in roles.outputs if name in outputs]
    results = own + [name for name in outputs if name not in roles.outputs]
    part = _part(model, behind(model.graph.node, results), list(roles.inputs), results, types)
    _write_roles(part, roles)
    return part


def _is_step(node: Node) -> bool:
    """Whether a node belongs to the optimizer."""
    return metadata_of(node, ROLE) == "optimizer"


def behind(nodes: Sequence[Node], results: Iterable[str]) -> list[Node]:
    """The nodes that results are computed by, in order."""
    needed, found = set(results), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            found.append(node)
            needed.update(reads(node))
    return found[::-1]


def _types(model: ModelProto, names: Collection[str]) -> dict[str, TypeProto]:
    """The types of values, as they are declared or else inferred."""
    types = {value.name: value.type for value in (*model.graph.value_info, *model.graph.output)}
    if all(name in types for name in names):
        return types
    copy = copied(model)
    graph = Graph(copy)
    infer_types(graph)
    return graph.types


def _part(
    model: ModelProto,
    nodes: list[Node],
    inputs: list[str],
    outputs: list[str],
    types: Mapping[str, TypeProto],
) -> ModelProto:
    """A model of some of the nodes, with those inputs that they read; a value that none makes may be an input.

    Args:
        model: the whole model.
        nodes: the nodes.
        inputs: names of possible inputs, in order.
        outputs: the names of its outputs.
        types: the types of inputs and outputs that the whole model does not declare as such.
    """
    read = {*read_by(nodes), *outputs}
    known = read.union(*(node.output for node in nodes))
    part = _bare(model)
    graph, whole = part.graph, model.graph
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
    for domain in [entry.domain for entry in part.opset_import if entry.domain]:
        if not any(_calls(function, domain) for function in part.functions):
            forget_domain(cut, domain)


def _bare(model: ModelProto) -> ModelProto:
    """All that a model says but its graph."""
    bare = ModelProto()
    copy_fields(model, bare, ("graph", "training_info"))
    bare.graph.name, bare.graph.doc_string = model.graph.name, model.graph.doc_string
    return bare


def _calls(function: FunctionProto, domain: str) -> bool:
    return function.domain == domain or any(entry.domain == domain for entry in function.opset_import)


def _write_roles(part: ModelProto, roles: Roles) -> None:
    gradients = {name for name, role in roles.outputs.items() if role.role == "gradient"}
    inputs = {v.name: "gradient" if v.name in gradients else roles.inputs.get(v.name, "") for v in part.graph.input}
    outputs = {value.name: roles.outputs.get(value.name, Role(DIVISOR)) for value in part.graph.output}
    steps = any(role == "learning rate" for role in inputs.values())
    slots = {name: slot for name, slot in roles.slots.items() if name in inputs}
    optimizer, settings = (roles.optimizer, roles.step) if steps else ("", None)
    found = replace(roles, inputs=inputs, outputs=outputs, slots=slots, optimizer=optimizer, step=settings)
    metadata.write(part, found)
