"""Make a drawing of a model: a box for each node and value. The gradient and the bodies of a node are drawn beside it.

The metadata of a training model give the part to which each node belongs: forward, loss, backward or optimizer. In a
training model of onnxruntime-training, the names of the nodes give it. All nodes of other models count as forward.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.ir.dialects import repair
from onnxgrad_cli.ir.domains import is_standard, plain_domain
from onnxgrad_cli.ir.graph import Graph, is_generated
from onnxgrad_cli.ir.modules import folders, module_finder
from onnxgrad_cli.ir.node import FORWARD, ROLE, metadata_of
from onnxgrad_cli.ir.node_values import reads, subgraphs
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import FLOATS, in_words, is_external
from onnxgrad_cli.metadata import ROLES
from onnxgrad_cli.view.drawing import Box, BoxKind, Cluster, Drawing, Edge, Part, short

INLINE = 16
"""A constant with at most this many elements has no box. It is written in the boxes of its readers."""

SHOWN = 6
"""Largest number of elements of a constant, and of outputs of a node, that are shown as text."""

GENERATED = re.compile(r"const(_\d+)?|val_\d+|onnx::.*|.*Constant(_\d+)?(_output_0)?")
"""Pattern of the names that exporters and other tools generate for constants."""

OLDER_GRADIENT = re.compile(r"(.+)_Grad/")
"""Pattern for the start of a gradient node's name in onnxruntime-training. The group is the forward node's name."""


def draw(model: ModelProto, path: Path | None = None) -> Drawing:
    """Return the drawing of a whole model, not folded. External data need not be loaded.

    Args:
        model: any valid model.
        path: the file that it was read from.
    """
    reader = _Reader(model)
    parts = reader.container(model.graph, _typed(model, path), _Scope(), BoxKind.FORWARD)
    name = model.graph.name or (path.stem if path else "model")
    edges = tuple(Edge(*ends, tuple(tensors)) for ends, tensors in reader.edges.items())
    return Drawing(escaped(name), Cluster("model", "", None, tuple(parts), container=True), edges, reader.inline)


def _typed(model: ModelProto, path: Path | None) -> GraphProto:
    """Return the model's graph with inferred types.

    Functions are removed before inference, because nested functions can grow exponentially. So the results of a node
    that calls a function have no types.
    """
    bare = Graph(model, path).skeleton()
    repair(bare)
    del bare.functions[:]
    try:
        return infer_shapes(bare).graph
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError):
        return bare.graph  # a model with contradictory types can be drawn too


def _in_order(graph: GraphProto, typed: GraphProto) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield each node with its counterpart in the typed graph, in the order in which the nodes run.

    That is the order of the typed graph. The nodes in the file may have a different order.
    """
    makers = {tuple(node.output): node for node in graph.node}
    return ((makers[tuple(twin.output)], twin) for twin in typed.node)


@dataclass
class _Scope:
    """The values that a graph and its bodies can read.

    Attributes:
        makers: value -> key of the box for the node that computes it, or for the value itself.
        constants: constant that has no box -> its elements as text.
        types: value -> its type.
    """

    makers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    types: dict[str, TypeProto] = field(default_factory=dict)

    def inner(self) -> _Scope:
        return _Scope(dict(self.makers), dict(self.constants), dict(self.types))


@dataclass
class _Unit:
    """A forward node with its bodies and the nodes of its gradient, which are drawn side by side.

    `label` is the name of the forward node. If the model lacks that node, the unit contains only its gradient.
    """

    label: str
    scope: tuple[str, ...]
    own: list[Part] = field(default_factory=list)
    gradient: list[Part] = field(default_factory=list)


class _Reader:
    def __init__(self, model: ModelProto) -> None:
        self.edges: dict[tuple[str, str], list[str]] = {}
        self.opsets = {plain_domain(entry.domain): entry.version for entry in model.opset_import}
        self.roles = _roles(model)
        self.tells_parts = any(metadata_of(node, ROLE) == "backward" for node in model.graph.node)
        self.numbers = itertools.count()
        self.inline = 0

    def key(self, stem: str) -> str:
        return f"{stem}{next(self.numbers)}"

    def kind(self, node: NodeProto, default: BoxKind) -> BoxKind:
        """Return the kind of a node: the part of the training model to which it belongs.

        If a node's metadata name a forward node, the node either differentiates that node or replaces it. If the
        metadata of any node mark it as backward, only nodes with this mark differentiate.
        """
        role = metadata_of(node, ROLE)
        if node.op_type == "YieldOp" or (not role and not self.tells_parts and _forward_of(node)):
            return BoxKind.BACKWARD
        return _NODES.get(role, default)

    # -- graphs -----------------------------------------------------------------------------------------------------

    def container(self, graph: GraphProto, typed: GraphProto, scope: _Scope, kind: BoxKind) -> list[Part]:
        """Return the boxes and groups for the model's graph or a body, and add the values of the graph to `scope`."""
        scope.types |= {value.name: value.type for value in (*typed.value_info, *typed.input, *typed.output)}
        parts: list[Part] = [*self.inputs(graph, scope)]
        units: list[_Unit] = []
        known: dict[str, _Unit] = {}
        ends = {value.name for value in graph.output}
        plain = [node for node in graph.node if self.kind(node, kind) == BoxKind.FORWARD]
        module_of = module_finder(plain, {tensor.name for tensor in graph.initializer})
        keys: list[tuple[NodeProto, str]] = []
        for node, twin in _in_order(graph, typed):
            if (text := _inline(node)) is not None and not ends.intersection(node.output):
                scope.constants[node.output[0]] = text
                self.inline += 1
                continue
            own = self.kind(node, kind)
            of = _forward_of(node) if own == BoxKind.BACKWARD else ""
            module = module_of(node)
            if not of or of not in known:
                units.append(_Unit(of or _label(node), folders(of) if of else module))
                known.setdefault(units[-1].label, units[-1])
            drawn = self.node(node, twin, scope, own, module)
            (known[of].gradient if of else units[-1].own).extend(drawn)
            keys.append((node, drawn[0].key))
        for node, key in keys:  # now the boxes of all values are known
            for name in node.input:
                self.edge(name, key, scope)
        parts += map(_part, units)
        parts += self.outputs(graph, scope)
        return parts

    def inputs(self, graph: GraphProto, scope: _Scope) -> Iterable[Box]:
        """Yield a box for each input and initializer, except for constants written in the boxes of their readers."""
        stored: dict[str, tuple[TensorProto | None, int, Sequence[int]]] = {
            tensor.name: (tensor, tensor.data_type, tensor.dims) for tensor in graph.initializer
        }
        for sparse in graph.sparse_initializer:
            stored[sparse.values.name] = (None, sparse.values.data_type, sparse.dims)
        hidden = {name for node in graph.node for name in reads(node)}
        hidden.difference_update(value.name for value in (*graph.input, *graph.output))
        for value in graph.input:
            if value.name not in stored:
                yield self.value(value.name, self.roles[0].get(value.name, BoxKind.INPUT), scope, value.type)
        for name, (tensor, dtype, dims) in stored.items():
            if tensor is not None and name in hidden and _is_constant(tensor):
                scope.constants[name] = _values(tensor)
                continue
            kind = BoxKind.WEIGHT if dtype in FLOATS and not is_generated(name) else BoxKind.CONSTANT
            value_type = onnx.helper.make_tensor_type_proto(dtype, list(dims))
            yield self.value(name, self.roles[0].get(name, kind), scope, value_type)

    def outputs(self, graph: GraphProto, scope: _Scope) -> Iterable[Box]:
        """Yield a box for each output."""
        for value in graph.output:
            gradient = value.name.removesuffix("_grad") in scope.makers and value.name.endswith("_grad")
            kind = self.roles[1].get(value.name, BoxKind.GRADIENT if gradient else BoxKind.OUTPUT)
            box = Box(self.key("v"), kind, short(value.name), _typed_as(value.name, scope), escaped(value.name))
            self.edge(value.name, box.key, scope)
            yield box

    def value(self, name: str, kind: BoxKind, scope: _Scope, value_type: TypeProto) -> Box:
        scope.types[name] = value_type
        scope.makers[name] = self.key("v")
        return Box(scope.makers[name], kind, short(name), _typed_as(name, scope), escaped(name))

    def edge(self, name: str, target: str, scope: _Scope) -> None:
        if name in scope.makers:
            tensors = self.edges.setdefault((scope.makers[name], target), [])
            text = _named(name, scope)
            if text not in tensors:
                tensors.append(text)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def node(
        self, node: NodeProto, twin: NodeProto, scope: _Scope, kind: BoxKind, module: tuple[str, ...]
    ) -> list[Part]:
        """Return the box of a node, followed by a group for each of its bodies."""
        key = self.key("n")
        for name in node.output:
            if name:
                scope.makers[name] = key
        outputs = [_named(name, scope) for name in node.output if name]
        if node.op_type == "Constant":
            name = node.output[0]
            return [Box(key, BoxKind.CONSTANT, short(name), _typed_as(name, scope), details(node), 1, module)]
        constants = [f"{self.operand(node, i)} = {scope.constants[name]}" for i, name in enumerate(node.input)
                     if name in scope.constants]  # fmt: skip
        more = [f"and {len(outputs) - SHOWN} more"] if len(outputs) > SHOWN else []
        lines = tuple(map(short, [*constants, *outputs[:SHOWN], *more]))
        title = node.op_type if is_standard(node.domain) else f"{node.domain}.{node.op_type}"
        drawn: list[Part] = [Box(key, kind, short(title), lines, details(node), 1, module, len(outputs))]
        attributes = [a.name for a in node.attribute for _ in ([a.g] if a.HasField("g") else a.graphs)]
        for name, body, typed in zip(attributes, subgraphs(node), subgraphs(twin), strict=True):
            parts = self.container(body, typed, scope.inner(), kind)
            title = f"{name} of {node.op_type} {node.name}".strip()
            drawn.append(Cluster(self.key("g"), short(title), kind, tuple(parts), container=True))
        return drawn

    def operand(self, node: NodeProto, position: int) -> str:
        """Return the name that the operator's schema gives to an input."""
        try:
            formal = onnx.defs.get_schema(node.op_type, self.opsets.get(node.domain, 1), node.domain).inputs
        except onnx.defs.SchemaError:
            formal = []
        return formal[min(position, len(formal) - 1)].name if formal else f"input {position}"


def _part(unit: _Unit) -> Part:
    """Return a unit as a box, or as a group of the node's box, its bodies and its gradient."""
    parts = [*unit.own]
    if unit.gradient:
        key, title = f"g{unit.gradient[0].key}", short(f"gradient of {unit.label}")
        parts.append(Cluster(key, title, BoxKind.BACKWARD, tuple(unit.gradient), scope=unit.scope))
    if len(parts) == 1:
        return parts[0]
    return Cluster(f"u{unit.own[0].key}", "", None, tuple(parts), beside=True, scope=unit.scope)


# -- parts ----------------------------------------------------------------------------------------------------------


def _roles(model: ModelProto) -> tuple[dict[str, BoxKind], dict[str, BoxKind]]:
    """Return two maps, input -> kind and output -> kind, from the metadata of a training model."""
    props = {entry.key: entry.value for entry in model.metadata_props}
    try:
        ports = strict_json.loads(props.get(ROLES, "{}"))
        inputs = {name: _INPUTS.get(role, BoxKind.INPUT) for name, role in ports.get("inputs", {}).items()}
        outputs = {name: _OUTPUTS.get(role["role"], BoxKind.OUTPUT) for name, role in ports.get("outputs", {}).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return {}, {}  # the model can be drawn without the description
    return inputs, outputs


_INPUTS = {"weight": BoxKind.WEIGHT, "state": BoxKind.STATE, "constant": BoxKind.CONSTANT}
_OUTPUTS = {"gradient": BoxKind.GRADIENT, "next state": BoxKind.STATE}
_NODES = {"loss": BoxKind.LOSS, "seed": BoxKind.BACKWARD, "backward": BoxKind.BACKWARD, "optimizer": BoxKind.OPTIMIZER}


def _label(node: NodeProto) -> str:
    """Return the name of a node, or of its first output if the node has no name."""
    return node.name or next(filter(None, node.output), node.op_type)


def _forward_of(node: NodeProto) -> str:
    """Return the label of the forward node that a node differentiates or replaces; "" if the node names none."""
    older = OLDER_GRADIENT.match(node.name) if node.doc_string == "Backward pass" else None
    return older[1] if older else metadata_of(node, FORWARD)


# -- words ----------------------------------------------------------------------------------------------------------


def details(node: NodeProto) -> str:
    """Return a text with the name of a node and its attributes, one per line."""
    attributes = (a for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS))
    return "\n".join([escaped(_label(node)), *map(_attribute, attributes)])


def _attribute(attribute: AttributeProto) -> str:
    if attribute.ref_attr_name:
        return short(f"{attribute.name} = @{attribute.ref_attr_name}")
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        type_of = onnx.helper.make_tensor_type_proto(value.data_type, list(value.dims))
        text = _values(value) if _is_small(value) else in_words(type_of)
    else:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return short(f"{attribute.name} = {text}")


def _typed_as(name: str, scope: _Scope) -> tuple[str, ...]:
    """Return the type of a value as lines of a box: one line, or none if the type is unknown."""
    text = in_words(scope.types.get(name))
    return (escaped(text),) if text else ()


def _named(name: str, scope: _Scope) -> str:
    value_type = in_words(scope.types.get(name))
    return escaped(f"{name}: {value_type}" if value_type else name)


# -- constants ------------------------------------------------------------------------------------------------------


def _is_constant(tensor: TensorProto) -> bool:
    """Return True if an initializer is small and is no float weight with a name of its own."""
    generated = GENERATED.fullmatch(tensor.name) or is_generated(tensor.name)
    return _is_small(tensor) and bool(tensor.data_type not in FLOATS or not tensor.dims or generated)


def _is_small(tensor: TensorProto) -> bool:
    return not is_external(tensor) and math.prod(tensor.dims) <= INLINE


def _inline(node: NodeProto) -> str | None:
    """Return the elements of a small Constant node as text, or None for any other node."""
    if node.op_type != "Constant" or not is_standard(node.domain) or len(node.attribute) != 1:
        return None
    if node.attribute[0].ref_attr_name:
        return None
    value = onnx.helper.get_attribute_value(node.attribute[0])
    if isinstance(value, TensorProto):
        return _values(value) if _is_small(value) else None
    if isinstance(value, onnx.SparseTensorProto) or (isinstance(value, list) and len(value) > INLINE):
        return None
    return _array(np.asarray(value))


def _values(tensor: TensorProto) -> str:
    return _array(numpy_helper.to_array(tensor))


def _array(array: np.ndarray) -> str:
    values = [item.decode(errors="replace") if isinstance(item, bytes) else item for item in array.ravel().tolist()]
    texts = [f"{item:.6g}" if isinstance(item, float) else str(item) for item in values[:SHOWN]]
    inner = ", ".join([*texts, *(["…"] if len(values) > SHOWN else [])])
    return inner if array.ndim == 0 else f"[{inner}]"
