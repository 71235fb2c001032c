"""Cut a whole training step in two where the optimizer begins, so that something can come between.

What comes there are the gradients: those of several processes, or of several batches, are summed before one step is
taken with them. Both halves are training models of their own kind, which describe themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from onnx import FunctionProto, ModelProto, NodeProto, TypeProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.emission.emitter import ROLE
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.skeleton import copied, copy_fields
from onnxgrad_cli.metadata import Role, Roles
from onnxgrad_cli.passes.outputs import forget_domain


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
    makers = {name: node for node in model.graph.node for name in node.output if name}
    stepped = [name for name, role in roles.outputs.items() if role.role == "next state" and _steps(makers.get(name))]
    if not stepped:
        raise UsageError("the training model has no optimizer", "build it with `optimizer=NAME`")
    steps = [node for node in model.graph.node if _steps(node)]
    own = behind(steps, stepped)
    crossing = [name for name in dict.fromkeys(n for node in own for n in reads(node)) if name in makers]
    crossing = [name for name in crossing if not any(name in node.output for node in own)]
    results = [name for name in roles.outputs if name not in stepped]
    results += [name for name in dict.fromkeys([*crossing, *also]) if name not in results]
    types = _types(model, results)
    gradient = _part(model, behind(model.graph.node, results), [*roles.inputs], results, types)
    optimizer = _part(model, own, [*crossing, *roles.inputs], stepped, types)
    del optimizer.functions[:]
    _write_roles(gradient, roles)
    _write_roles(optimizer, roles)
    return Halves(gradient, optimizer)


def narrowed(
    model: ModelProto, outputs: Collection[str], types: Mapping[str, TypeProto] = MappingProxyType({})
) -> ModelProto:
    """A copy of a training model with some of its outputs, or values of which `types` has the type, and only what these
    take."""
    roles = metadata.read(model)
    kept = [name for name in roles.outputs if name in outputs] + [name for name in outputs if name not in roles.outputs]
    part = _part(model, behind(model.graph.node, kept), list(roles.inputs), kept, types)
    _write_roles(part, roles)
    return part


def _steps(node: NodeProto | None) -> bool:
    return node is not None and any(entry.key == ROLE and entry.value == "optimizer" for entry in node.metadata_props)


def behind(nodes: Sequence[NodeProto], results: Iterable[str]) -> list[NodeProto]:
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
    nodes: list[NodeProto],
    inputs: list[str],
    outputs: list[str],
    types: Mapping[str, TypeProto],
) -> ModelProto:
    """A model of some of the nodes, with those inputs that they read; a value that none makes may be an input."""
    used = {name for node in nodes for name in reads(node)} | set(outputs)
    known = {name for node in nodes for name in (*reads(node), *node.output)} | set(outputs)
    part = ModelProto()
    part.CopyFrom(_bare(model))
    graph, whole = part.graph, model.graph
    declared = {value.name: value for value in (*whole.input, *whole.output)}
    for names, field in ((inputs, graph.input), (outputs, graph.output)):
        for name in names:
            if name in used:
                field.append(declared.get(name) or helper.make_value_info(name, types[name]))
    graph.node.extend(nodes)
    graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in used)
    graph.sparse_initializer.extend(tensor for tensor in whole.sparse_initializer if tensor.values.name in used)
    graph.value_info.extend(value for value in whole.value_info if value.name in known and value.name not in declared)
    cut = Graph(part)
    for domain in [entry.domain for entry in part.opset_import if entry.domain]:
        if not any(_calls(function, domain) for function in part.functions):
            forget_domain(cut, domain)
    return part


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
    outputs = {value.name: roles.outputs.get(value.name, Role("kept output")) for value in part.graph.output}
    steps = any(role == "learning rate" for role in inputs.values())
    slots = {name: slot for name, slot in roles.slots.items() if name in inputs}
    optimizer = roles.optimizer if steps else ""
    metadata.write(part, replace(roles, inputs=inputs, outputs=outputs, slots=slots, optimizer=optimizer))
