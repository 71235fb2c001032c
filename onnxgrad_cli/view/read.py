"""From a model to a drawing of all of it: values and nodes as boxes, each node's gradient and bodies beside it.

A training model says in its metadata which node belongs to which part; one of onnxruntime-training says it in its
nodes' names. Any other model is drawn too, as a forward part alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.ir.dialects import mend
from onnxgrad_cli.ir.domains import is_standard, plain_domain
from onnxgrad_cli.ir.graph import Graph, is_generated
from onnxgrad_cli.ir.modules import folders, module_finder
from onnxgrad_cli.ir.node import FORWARD, ROLE
from onnxgrad_cli.ir.nodes import reads, subgraphs
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import FLOATS, in_words, is_external
from onnxgrad_cli.metadata import ROLES
from onnxgrad_cli.view.drawing import Box, Drawing, Edge, Group, Kind, Part, short

INLINE = 16
"""Elements up to which a constant stands in the boxes of its readers instead of in one of its own."""

SHOWN = 6
"""Elements of a constant, or values of a node, that are written out."""

GENERATED = re.compile(r"const(_\d+)?|val_\d+|onnx::.*|.*Constant(_\d+)?(_output_0)?")
"""Names that tools give to constants, not people to weights."""

OLDER_GRADIENT = re.compile(r"(.+)_Grad/")
"""How onnxruntime-training names the gradient nodes of a node."""


def draw(model: ModelProto, path: Path | None = None) -> Drawing:
    """Read the whole of a model, unfolded; its weights need not be loaded.

    Args:
        model: any valid model.
        path: the file it was read from.
    """
    reader = _Reader(model)
    parts = reader.container(model.graph, _typed(model, path), _Scope({}, {}), Kind.FORWARD)
    name = model.graph.name or (path.stem if path else "model")
    edges = tuple(Edge(*ends, tuple(tensors)) for ends, tensors in reader.edges.items())
    return Drawing(visible(name), Group("model", "", None, tuple(parts), container=True), edges, reader.inline)


def _typed(model: ModelProto, path: Path | None) -> GraphProto:
    """The graph with the types that can be inferred; what calls a function has none, for functions may double."""
    bare = Graph(model, path).skeleton()
    mend(bare)
    del bare.functions[:]
    try:
        return infer_shapes(bare).graph
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError):
        return bare.graph  # a model that contradicts itself can be looked at


def _in_order(graph: GraphProto, typed: GraphProto) -> Iterator[tuple[NodeProto, NodeProto]]:
    """The nodes and their typed twins, in the order of these: the one in which they run, whatever the file has."""
    makers = {tuple(node.output): node for node in graph.node}
    return ((makers[tuple(twin.output)], twin) for twin in typed.node)


class _Scope:
    """What a graph and its bodies can read: value -> the box that makes it, and the constants that stand inline."""

    def __init__(self, makers: Mapping[str, str], constants: Mapping[str, str]) -> None:
        self.makers = dict(makers)
        self.constants = dict(constants)
        self.types: dict[str, TypeProto] = {}

    def inner(self) -> _Scope:
        found = _Scope(self.makers, self.constants)
        found.types = dict(self.types)
        return found


class _Unit:
    """A node that belongs to no other, with its bodies and the nodes of its gradient."""

    def __init__(self, label: str, scope: tuple[str, ...]) -> None:
        self.label = label
        self.scope = scope
        self.own: list[Part] = []
        self.gradient: list[Part] = []


class _Reader:
    def __init__(self, model: ModelProto) -> None:
        self.edges: dict[tuple[str, str], list[str]] = {}
        self.opsets = {plain_domain(entry.domain): entry.version for entry in model.opset_import}
        self.roles = _roles(model)
        self.tells_parts = any(_meta(node, ROLE) == "backward" for node in model.graph.node)
        self.numbers = itertools.count()
        self.inline = 0

    def key(self, stem: str) -> str:
        return f"{stem}{next(self.numbers)}"

    def kind(self, node: NodeProto, default: Kind) -> Kind:
        """The part that a node belongs to.

        A node that names another one differentiates it, or stands in its place: in a model that says which nodes are
        its backward part, the latter are all others.
        """
        role = _meta(node, ROLE)
        if node.op_type == "YieldOp" or (not role and not self.tells_parts and _forward_of(node)):
            return Kind.BACKWARD
        return _NODES.get(role, default)

    # -- graphs -----------------------------------------------------------------------------------------------------

    def container(self, graph: GraphProto, typed: GraphProto, scope: _Scope, kind: Kind) -> list[Part]:
        """The parts of the model's graph or of a body; what they make is entered into `scope`."""
        scope.types |= {value.name: value.type for value in (*typed.value_info, *typed.input, *typed.output)}
        parts: list[Part] = [*self.inputs(graph, scope)]
        units: list[_Unit] = []
        known: dict[str, _Unit] = {}
        ends = {value.name for value in graph.output}
        plain = [node for node in graph.node if self.kind(node, kind) == Kind.FORWARD]
        module_of = module_finder(plain, {tensor.name for tensor in graph.initializer})
        drawn_nodes: list[tuple[NodeProto, str]] = []
        for node, twin in _in_order(graph, typed):
            if (text := _inline(node)) is not None and not ends.intersection(node.output):
                scope.constants[node.output[0]] = text
                self.inline += 1
                continue
            own = self.kind(node, kind)
            of = _forward_of(node) if own == Kind.BACKWARD else ""
            module = module_of(node)
            if not of or of not in known:
                units.append(_Unit(of or _label(node), folders(of) if of else module))
                known.setdefault(units[-1].label, units[-1])
            drawn = self.node(node, twin, scope, own, module)
            if of:
                known[of].gradient.extend(drawn)
            else:
                units[-1].own.extend(drawn)
            drawn_nodes.append((node, drawn[0].key))
        for node, key in drawn_nodes:  # when all makers are known
            for name in node.input:
                self.edge(name, key, scope)
        parts += map(_part, units)
        parts += self.outputs(graph, scope)
        return parts

    def inputs(self, graph: GraphProto, scope: _Scope) -> Iterable[Box]:
        """A box for each value that is there before the first node, but for constants that stand inline."""
        stored: dict[str, tuple[TensorProto | None, int, Sequence[int]]] = {
            tensor.name: (tensor, tensor.data_type, tensor.dims) for tensor in graph.initializer
        }
        for sparse in graph.sparse_initializer:
            stored[sparse.values.name] = (None, sparse.values.data_type, sparse.dims)
        fed = {value.name for value in graph.input}
        ends = {value.name for value in graph.output}
        read = {name for node in graph.node for name in reads(node)}
        for value in graph.input:
            if value.name not in stored:
                yield self.value(value.name, self.roles[0].get(value.name, Kind.INPUT), scope, value.type)
        for name, (tensor, dtype, dims) in stored.items():
            if tensor is not None and name in read and name not in fed | ends and _is_constant(tensor):
                scope.constants[name] = _values(tensor)
                continue
            kind = Kind.WEIGHT if dtype in FLOATS and not is_generated(name) else Kind.CONSTANT
            value_type = onnx.helper.make_tensor_type_proto(dtype, list(dims))
            yield self.value(name, self.roles[0].get(name, kind), scope, value_type)

    def outputs(self, graph: GraphProto, scope: _Scope) -> Iterable[Box]:
        """A box for each output."""
        for value in graph.output:
            gradient = value.name.removesuffix("_grad") in scope.makers and value.name.endswith("_grad")
            kind = self.roles[1].get(value.name, Kind.GRADIENT if gradient else Kind.OUTPUT)
            box = Box(self.key("v"), kind, short(value.name), _lines(in_words(scope.types.get(value.name))),
                      visible(value.name))  # fmt: skip
            self.edge(value.name, box.key, scope)
            yield box

    def value(self, name: str, kind: Kind, scope: _Scope, value_type: TypeProto) -> Box:
        scope.types[name] = value_type
        scope.makers[name] = self.key("v")
        return Box(scope.makers[name], kind, short(name), _lines(in_words(value_type)), visible(name))

    def edge(self, name: str, target: str, scope: _Scope) -> None:
        if name in scope.makers:
            tensors = self.edges.setdefault((scope.makers[name], target), [])
            text = _named(name, scope)
            if text not in tensors:
                tensors.append(text)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def node(self, node: NodeProto, twin: NodeProto, scope: _Scope, kind: Kind, module: tuple[str, ...]) -> list[Part]:
        """The box of a node, and a group for each of its bodies."""
        key = self.key("n")
        for name in node.output:
            if name:
                scope.makers[name] = key
        outputs = [_named(name, scope) for name in node.output if name]
        if node.op_type == "Constant":
            box = Box(key, Kind.CONSTANT, short(node.output[0]), _lines(in_words(scope.types.get(node.output[0]))),
                      details(node), 1, module)  # fmt: skip
            return [box]
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
            drawn.append(Group(self.key("g"), short(title), kind, tuple(parts), container=True))
        return drawn

    def operand(self, node: NodeProto, position: int) -> str:
        """What the operator's page calls an input."""
        try:
            formal = onnx.defs.get_schema(node.op_type, self.opsets.get(node.domain, 1), node.domain).inputs
        except onnx.defs.SchemaError:
            formal = []
        return formal[min(position, len(formal) - 1)].name if formal else f"input {position}"


def _part(unit: _Unit) -> Part:
    """A unit as a box, or as a group of what belongs together."""
    gradient: list[Part] = []
    if unit.gradient:
        key = f"g{unit.gradient[0].key}"
        title = short(f"gradient of {unit.label}")
        gradient = [Group(key, title, Kind.BACKWARD, tuple(unit.gradient), scope=unit.scope)]
    parts = [*unit.own, *gradient]
    if len(parts) == 1:
        return parts[0]
    return Group(f"u{unit.own[0].key}", "", None, tuple(parts), beside=True, scope=unit.scope)


# -- parts ----------------------------------------------------------------------------------------------------------


def _roles(model: ModelProto) -> tuple[dict[str, Kind], dict[str, Kind]]:
    """The kinds of the inputs and outputs, as far as a training model describes itself."""
    props = {entry.key: entry.value for entry in model.metadata_props}
    try:
        ports = strict_json.loads(props.get(ROLES, "{}"))
        inputs = {name: _INPUTS.get(role, Kind.INPUT) for name, role in ports.get("inputs", {}).items()}
        outputs = {name: _OUTPUTS.get(role["role"], Kind.OUTPUT) for name, role in ports.get("outputs", {}).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return {}, {}  # a description that can't be read is no reason not to draw
    return inputs, outputs


_INPUTS = {"weight": Kind.WEIGHT, "state": Kind.STATE, "constant": Kind.CONSTANT}
_OUTPUTS = {"gradient": Kind.GRADIENT, "next state": Kind.STATE}
_NODES = {"loss": Kind.LOSS, "seed": Kind.BACKWARD, "backward": Kind.BACKWARD, "optimizer": Kind.OPTIMIZER}


def _label(node: NodeProto) -> str:
    """What a node is called: its name, or that of its first output."""
    return node.name or next(filter(None, node.output), node.op_type)


def _meta(node: NodeProto, key: str) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == key), "")


def _forward_of(node: NodeProto) -> str:
    """The label of the forward node that a node differentiates, or ""."""
    older = OLDER_GRADIENT.match(node.name) if node.doc_string == "Backward pass" else None
    return older[1] if older else _meta(node, FORWARD)


# -- words ----------------------------------------------------------------------------------------------------------


def details(node: NodeProto) -> str:
    """The node's name and its attributes, a line each."""
    attributes = (a for a in node.attribute if a.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS))
    return "\n".join([visible(_label(node)), *map(_attribute, attributes)])


def _attribute(attribute: AttributeProto) -> str:
    if attribute.ref_attr_name:
        return short(f"{attribute.name} = @{attribute.ref_attr_name}")
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        text = _values(value) if not is_external(value) and np.prod(value.dims) <= INLINE else _tensor(value)
    else:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return short(f"{attribute.name} = {text}")


def _lines(text: str) -> tuple[str, ...]:
    return (visible(text),) if text else ()


def _named(name: str, scope: _Scope) -> str:
    value_type = in_words(scope.types.get(name))
    return visible(f"{name}: {value_type}" if value_type else name)


def _tensor(tensor: TensorProto) -> str:
    return in_words(onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))


# -- constants ------------------------------------------------------------------------------------------------------


def _is_constant(tensor: TensorProto) -> bool:
    """Whether an initializer is a small setting, not a weight that somebody has named."""
    small = not is_external(tensor) and np.prod(tensor.dims) <= INLINE
    others = GENERATED.fullmatch(tensor.name) or is_generated(tensor.name)
    named = tensor.data_type in FLOATS and len(tensor.dims) > 0 and not others
    return bool(small and not named)


def _inline(node: NodeProto) -> str | None:
    """The values of a small Constant node; None for any other node."""
    if node.op_type != "Constant" or not is_standard(node.domain) or len(node.attribute) != 1:
        return None
    if node.attribute[0].ref_attr_name:
        return None
    value = onnx.helper.get_attribute_value(node.attribute[0])
    if isinstance(value, TensorProto):
        return _values(value) if not is_external(value) and np.prod(value.dims) <= INLINE else None
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
