"""Inline the functions that a model defines itself, except those that have a rule.

onnx's own inliner is not used, because it ignores default values of attributes and skips functions that import another
opset than the model. It would also duplicate the weights of a function that is called twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, TensorProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.functions import Key, called_by, key_of, name_of
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node, metadata, refill, set_metadata, write
from onnxgrad_cli.ir.node_values import subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import renamed
from onnxgrad_cli.passes.prepare.upgrade import upgrade


def inline(graph: Graph, constant: Callable[[Node], TensorProto | None]) -> None:
    """Replace every call of a function of the model, in bodies too, by the nodes of the function.

    A call is not inlined if its operator has a gradient rule, or operands at which gradients stop. Then the function
    computes the result and the rule differentiates it. If a call in onnxruntime's own domains has a rule or a
    definition, onnxruntime's kernel computes it, whatever the function computes. The function is then removed from the
    model, because the rule is for the kernel.

    Args:
        graph: the model. The functions that it still calls are kept.
        constant: returns the tensor of a Constant node, or None for another node.

    Raises:
        UnsupportedError: a function has the name of a standard operator; or it was written for a different opset, in
            which one of its operators has a different schema.
    """
    if graph.proto.functions:
        inliner = _Inliner(graph, constant)
        graph.set_nodes(inliner.nodes(graph.nodes))
        refill(graph.proto.functions, inliner.called(graph.nodes))


class _Inliner:
    def __init__(self, graph: Graph, constant: Callable[[Node], TensorProto | None]) -> None:
        self.graph = graph
        self.constant = constant
        functions = {key_of(function): function for function in graph.proto.functions}
        self.functions = {key: function for key, function in functions.items() if not self.is_kernel(key)}
        self.constants: dict[Key, dict[str, str]] = {}

    def nodes(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes with calls inlined, also in bodies, except calls that stay (`stands`)."""
        found: list[Node] = []
        for node in nodes:
            for body in subgraphs(node):
                write(self.nodes(body.node), body.node)
            key = called_by(node)
            if key not in self.functions or self.stands(key):
                found.append(node)
            else:
                found += self.nodes(self.body(node, key))
        return found

    def stands(self, key: Key) -> bool:
        """Return True if calls of a function are differentiated as they are, by a rule, without inlining."""
        domain, op_type, overload = key
        if overload or not domain or domain.startswith("com.microsoft"):
            return False
        rule = registry.lookup(op_type, domain, self.graph.opset(domain) or 1)
        return rule is not None or bool(registry.stopped(op_type, domain))

    def is_kernel(self, key: Key) -> bool:
        """Return True if onnxruntime has a kernel for a function, and a rule or definition exists for the kernel."""
        domain, op_type, overload = key
        if overload or not domain.startswith("com.microsoft"):
            return False
        version = self.graph.opset(domain) or 1
        rule = registry.lookup(op_type, domain, version)
        known = rule is not None and not rule.refusal
        return known or registry.lookup_definition(op_type, domain, version) is not None

    def called(self, nodes: Iterable[Node]) -> list[FunctionProto]:
        """Return the functions that nodes call, directly or indirectly, converted to the model's opset."""
        found: dict[Key, FunctionProto] = {}
        waiting = list(with_bodies(nodes))
        while waiting:
            node = waiting.pop()
            key = called_by(node)
            if key in self.functions and key not in found:
                found[key] = self.raised(self.functions[key])
                self.check(found[key], key)
                for entry in found[key].opset_import:
                    entry.version = self.graph.opset(entry.domain) or entry.version
                waiting += with_bodies(found[key].node)
        return [function for key, function in self.functions.items() if key in found]

    def raised(self, function: FunctionProto) -> FunctionProto:
        """Upgrade a function to the model's opset of the default domain, if the function's own opset is older."""
        own = next((entry.version for entry in function.opset_import if not plain_domain(entry.domain)), None)
        opset = self.graph.opset()
        if own is None or opset is None or own >= opset:
            return function
        alone = onnx.ModelProto(graph=GraphProto(name=function.name, node=function.node))
        alone.opset_import.extend(function.opset_import)
        work = Graph(alone)
        upgrade(work, opset)
        added = [tensor for name, tensor in work.initializers.items() if work.added(name)]
        constants = [make_node("Constant", [], [tensor.name], value=tensor) for tensor in added]
        write([*constants, *work.nodes], function.node)
        refill(function.opset_import, alone.opset_import)
        return function

    def body(self, call: Node, key: Key) -> list[Node]:
        """Return copies of the nodes of the function `key` for one call, with new unique names."""
        function = self.functions[key]
        if key not in self.constants:
            self.check(function, key)
            self.constants[key] = self.hoisted(function)
        copy = GraphProto()
        copy.node.extend(node for node in function.node if not self.constants[key].keys() & set(node.output))
        for node in copy.node:
            node.name = f"{call.name or call.op_type}/{node.name or node.op_type}"
        names = dict(self.constants[key])
        names.update(zip(function.input, [*call.input, *[""] * len(function.input)], strict=False))
        made = {name for node in copy.node for name in node.output}
        taken = {formal: actual for formal, actual in zip(function.output, call.output, strict=False) if actual}
        names.update((formal, actual) for formal, actual in taken.items() if formal in made)
        nodes = list(renamed(self.graph, copy, names).node)
        given = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        for node in nodes:  # the nodes inherit the call's metadata, their own take precedence
            _fill(node, given)
            set_metadata(node, {**metadata(call), **metadata(node)})
        for formal, actual in taken.items():
            if formal not in made:  # an input, or a constant, returned as it is
                name = self.graph.fresh(f"{call.name or call.op_type}/Identity")
                nodes.append(make_node("Identity", [names[formal]], [actual], name=name))
        return nodes

    def hoisted(self, function: FunctionProto) -> dict[str, str]:
        """Store a function's constants as initializers, so that each exists once even if there are several calls.

        Return a map from the output of each Constant to the initializer.
        """
        names = {}
        for node in function.node:
            tensor = None if any(a.ref_attr_name for a in node.attribute) else self.constant(node)
            if tensor is not None:
                names[node.output[0]] = name = self.graph.fresh(node.output[0])
                self.graph.store_tensor(name, tensor)
        return names

    def check(self, function: FunctionProto, key: Key) -> None:
        """Refuse functions that runtimes interpret differently. Import domains that only the function imports."""
        if onnx.defs.has(function.name, key[0]):
            raise UnsupportedError(
                f"the model defines a function '{name_of(key)}', but the standard has an operator with the same name",
                hint=(
                    "rename the function in its definition and its calls: some runtimes would run the function, "
                    "others the operator"
                ),
            )
        for entry in function.opset_import:
            if self.graph.opset(entry.domain) is None:
                self.graph.proto.opset_import.append(entry)


def _fill(node: Node, given: Mapping[str, AttributeProto]) -> None:
    """Replace references to a function's attributes by the values of a call; drop attributes that the call lacks."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name and attribute.ref_attr_name in given:
            name = attribute.name
            attribute.CopyFrom(given[attribute.ref_attr_name])
            attribute.name = name
        elif attribute.ref_attr_name:
            continue
        else:
            for inner in (each for graph in (attribute.g, *attribute.graphs) for each in graph.node):
                _fill(inner, given)
        kept.append(attribute)
    refill(node.attribute, kept)
