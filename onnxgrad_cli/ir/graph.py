"""The mutable view of a model that every pass works on: a list of nodes, values by name, and their types.

The view is a thin layer over the protobuf message. So fields that onnxgrad does not know are written unchanged. Weights
are not copied: inline weights stay in the protobuf, and external weights stay references.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, refill, write
from onnxgrad_cli.ir.node_values import behind, captured, dims_in, node_names, read_by, reads
from onnxgrad_cli.ir.provenance import Provenance
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, Shape, is_external, nbytes, shape_of, tensor_type
from onnxgrad_cli.ir.weightless_copy import skeleton

GENERATED = "onnxgrad_const"
"""Prefix of the names of constants that onnxgrad generates. Later commands never train constants with this prefix."""


def is_generated(name: str) -> bool:
    """Return True if a name marks a constant that onnxgrad generated."""
    return name.startswith(GENERATED)


class Graph:
    """The model that all passes read and change.

    Attributes:
        proto: the model; its `graph.node` is stale until `commit()`.
        types: the type of every value whose type is known.
        initializers: every initializer by name (views into `proto`; values may be external).
        path: the file that the model was read from, if any; paths of external data are relative to it.
        unexpanded: node that could not be replaced by its definition -> the reason.
        declared_shapes: values whose shape a rule or a pass determined, because shape inference alone may not find it.
        hints: inner value -> the type that the model declares, which is used only if inference finds none; see
            `passes.prepare.declarations`.
        assumed: value whose shape depends on `hints` -> its type.
        confirmed: values of `assumed` whose shape a run of the model confirmed.
        follows_shapes: True if shape inference uses onnx's data propagation: it tracks the integers from which shapes
            are computed. False if these integers would fill the memory.
        observed: value -> its type as seen in a run of the model, with unnamed sizes.
        run_for_ranks: the reason why no run of the model could show unknown ranks: "forbidden", "too large" or
            "failed"; otherwise "".
        ranks: value whose rank depends on sizes -> a description of its ranks.
        branches: If node that was replaced by one of its branches, because the other can't run -> that branch, 'then'
            or 'else'.
        multiples: symbol that onnxgrad generated for a multiple of another symbol -> (factor, the other symbol).
        original_names: every name of a value or node in the model before any change.
        computed: values that were computed only from constants when onnxgrad wrote the file. Another tool may have
            folded them to initializers since.
        derived: True if the file already contains derivatives that onnxgrad added.
        changed: a description of the first tensor that another tool changed after onnxgrad added derivatives, or "".
        provenance: the origin of the tensors according to the file; empty until `prepare` reads it.
        settings: value that is a setting of an operator instead of data, such as the scales of Resize -> a text that
            names the setting. A definition may later replace the operator.
        not_constant: values that look constant but may change at run time, such as trained weights.
        held: values that derivatives treat as constants, whatever they depend on.
        runs_bfloat16: True if the model as read has bfloat16 values and the installed onnxruntime has kernels for all
            of it.
        kernels: value in the definition that replaced a node -> the replaced node. onnxruntime's kernel for it computes
            the value or a product with the value.
    """

    def __init__(self, proto: ModelProto, path: Path | None = None) -> None:
        self.proto = proto
        self.path = path
        self._nodes: list[Node] | None = None
        self.types: dict[str, TypeProto] = {}
        self.unexpanded: dict[str, str] = {}
        self.declared_shapes: set[str] = set()
        self.hints: dict[str, ValueInfoProto] = {}
        self.assumed: dict[str, TypeProto] = {}
        self.confirmed: set[str] = set()
        self.follows_shapes = True
        self.observed: dict[str, TypeProto] = {}
        self.run_for_ranks = ""
        self.ranks: dict[str, str] = {}
        self.branches: dict[str, str] = {}
        self.multiples: dict[str, tuple[int, str]] = {}
        self.initializers: dict[str, TensorProto] = {t.name: t for t in proto.graph.initializer}
        self.original_names = frozenset(node_names(proto.graph))
        self._names = set(self.original_names)
        self._counters: dict[str, int] = defaultdict(int)
        self._constants: dict[str, np.ndarray | None] = {}
        self.computed: frozenset[str] = frozenset()
        self.derived = False
        self.changed = ""
        self.provenance = Provenance()
        self.settings: dict[str, str] = {}
        self.not_constant: set[str] = set()
        self.held: set[str] = set()
        self.runs_bfloat16 = False
        self.kernels: dict[str, Node] = {}
        self._shared: dict[bytes, TypeProto] = {}
        self._pooled: set[str] = set()
        borne = (number_in(dim.dim_param[2:]) for dim in dims_in(proto.graph) if dim.dim_param.startswith("_d"))
        self._symbols = itertools.count(1 + max((n for n in borne if n is not None), default=0))
        self._fed = {value.name for value in proto.graph.input}
        self._outer: Graph | None = None

    @property
    def nodes(self) -> list[Node]:
        """The nodes in topological order, which are read from the protobuf at the first access."""
        if self._nodes is None:
            self._nodes = list(map(Node.read, self.proto.graph.node))
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def read_again(self) -> None:
        """Read nodes and initializers again after code outside this class changed the protobuf."""
        self._nodes = None
        self.initializers = {tensor.name: tensor for tensor in self.proto.graph.initializer}

    def opset(self, domain: str = "") -> int | None:
        """Return the version of `domain` that the model imports, or None if it does not import the domain."""
        same = (entry for entry in self.proto.opset_import if plain_domain(entry.domain) == plain_domain(domain))
        return next((int(entry.version) for entry in same), None)

    def fresh(self, stem: str) -> str:
        """Return a name that is unused in the model: `stem`, or `stem_1`, `stem_2`, ... if it is taken."""
        name = stem
        while name in self._names:
            self._counters[stem] += 1
            name = f"{stem}_{self._counters[stem]}"
        self._names.add(name)
        return name

    def fresh_symbol(self) -> str:
        """Return a symbol that no dimension uses."""
        return f"_d{next(self._symbols)}"

    def share_names(self, other: Graph) -> None:
        """Share the sets of used names and symbols with `other`, so that both graphs can be parts of one model."""
        self._names, self._counters, self._symbols = other._names, other._counters, other._symbols
        self.multiples, self.branches = other.multiples, other.branches
        self._outer = other

    @property
    def is_part(self) -> bool:
        """True if this graph is a part of another graph, with which it shares names."""
        return self._outer is not None

    def use_domain(self, domain: str) -> None:
        """Import a domain at version 1, unless the model imports it already."""
        if self.opset(domain) is None:
            self.proto.opset_import.add(domain=domain, version=1)
        if self._outer is not None:
            self._outer.use_domain(domain)

    def taken(self, name: str) -> bool:
        """Return True if a value or a node is called `name`."""
        return name in self._names

    @property
    def input_names(self) -> list[str]:
        """The graph's inputs in order, including overridable initializers."""
        return [value.name for value in self.proto.graph.input]

    @property
    def output_names(self) -> list[str]:
        """The graph's outputs in order, without repetitions. A model may list an output twice."""
        return list(dict.fromkeys(value.name for value in self.proto.graph.output))

    def set_nodes(self, nodes: Iterable[Node | NodeProto]) -> None:
        """Replace the nodes by others, and register their names."""
        self.nodes = [node if isinstance(node, Node) else Node.read(node) for node in nodes]
        self._names.update([node.name for node in self.nodes], *[node.output for node in self.nodes])

    def rewrite(
        self, replacement: Callable[[Node], Sequence[Node | NodeProto] | None], op_types: Container[str] | None = None
    ) -> bool:
        """Replace each node by the nodes that `replacement` returns for it, unless it returns None.

        Args:
            replacement: a function from a node to the nodes that replace it, or None.
            op_types: the operators to call `replacement` for; None for all.

        Returns:
            True if any node was replaced.
        """
        found = [replacement(n) if op_types is None or n.op_type in op_types else None for n in self.nodes]
        changed = found.count(None) < len(found)
        if changed:
            pairs = zip(self.nodes, found, strict=True)
            self.set_nodes([each for node, new in pairs for each in ([node] if new is None else new)])
        return changed

    def rank_hint(self) -> str:
        """Return a hint for an unknown rank or size, which suggests only options that the user has not given yet."""
        if self._outer is not None:
            return self._outer.rank_hint()
        shapes = {value.name: shape_of(value.type) for value in self.proto.graph.input}
        shapes = {name: shape for name, shape in shapes.items() if name not in self.initializers}
        unknown = [name for name, shape in shapes.items() if shape is None]
        open_ = [name for name, shape in shapes.items() if shape and any(isinstance(size, str) for size in shape)]
        if unknown:
            return (
                f"set the shape of the input with `shapes={unknown[0]}:DIM,DIM,...`, such as "
                f"{unknown[0]}:batch,3,224,224"
            )
        if open_:
            return f"set the shape of {listed(open_)} with `dims` or `shapes`"
        if self.run_for_ranks in ("forbidden", "too large"):
            return "allow a run of the model with `infer_by_run=True`, which shows the ranks"
        if self.run_for_ranks == "failed":
            return "pass data on which the model runs with `test_data`"
        return "export the model with shapes that do not depend on the values of its inputs"

    def shape(self, name: str) -> Shape | None:
        """Return the dimensions of a value, or None if its rank is unknown; see `types.shape_of`."""
        return shape_of(self.types.get(name))

    def made(self) -> Iterator[str]:
        """Return the names of all outputs of nodes."""
        return itertools.chain.from_iterable(node.output for node in self.nodes)

    def producers(self) -> dict[str, Node]:
        """Return value -> the node that computes it."""
        return {name: node for node in self.nodes for name in node.output if name}

    def ancestors(self, names: Iterable[str], stop: Collection[str] = ()) -> set[str]:
        """Return `names` and all values that they are computed from. The search does not go beyond values in `stop`."""
        needed = set(names)
        for node in reversed(self.nodes):
            if any(name in needed and name not in stop for name in node.output):
                needed.update(reads(node))
        return needed

    def distinct_types(self) -> list[TypeProto]:
        """Return the types of all values, each object once. Values share type objects, so there are few."""
        return list({id(value_type): value_type for value_type in self.types.values()}.values())

    def uses(self) -> dict[str, list[tuple[Node, int]]]:
        """Return value -> its readers as (node, input position), with position -1 for a capture by a subgraph."""
        uses: dict[str, list[tuple[Node, int]]] = defaultdict(list)
        for node in self.nodes:
            for position, name in enumerate(node.input):
                if name:
                    uses[name].append((node, position))
            for name in captured(node) if node.attribute else ():
                uses[name].append((node, -1))
        return uses

    def constant(self, name: str) -> np.ndarray | None:
        """Return the array of a small initializer, or None if it is large, external or can change at run time."""
        if name in self.not_constant:
            return None
        if name not in self._constants:
            tensor = self.initializers.get(name)
            known = tensor is not None and not is_external(tensor) and nbytes(tensor) <= MAX_SHAPE_BYTES
            fixed = tensor if known and name not in self._fed else None
            self._constants[name] = None if fixed is None else numpy_helper.to_array(fixed)
        return self._constants[name]

    def vary(self, names: Iterable[str]) -> None:
        """Declare that values may change at run time, such as trained weights, so that `constant` returns None."""
        self.not_constant.update(names)

    def add_initializer(self, name: str, array: np.ndarray) -> None:
        """Add a constant called `name`, which no node may compute. `commit` writes it if a node or output reads it."""
        tensor = numpy_helper.from_array(np.asarray(array), name)
        self.initializers[name] = tensor
        self._constants.pop(name, None)
        self.types[name] = tensor_type(tensor.data_type, list(tensor.dims))
        self._names.add(name)
        self._pooled.add(name)

    def fresh_constant(self, stem: str = "") -> str:
        """Return an unused name for a generated constant. Its prefix marks the constant in files as not trainable."""
        return self.fresh(f"{GENERATED}_{stem}" if stem else GENERATED)

    def add_constant(self, array: np.ndarray, stem: str = "") -> str:
        """Add a generated constant, and return its name, which has the prefix `GENERATED`."""
        name = self.fresh_constant(stem)
        self.add_initializer(name, array)
        return name

    def store(self, name: str, array: np.ndarray) -> None:
        """Add an initializer to the model itself, which stays even if unused. No node may compute `name`."""
        self.add_initializer(name, array)
        self._pooled.discard(name)
        self.proto.graph.initializer.append(self.initializers[name])
        self.initializers[name] = self.proto.graph.initializer[-1]

    def store_tensor(self, name: str, tensor: TensorProto) -> None:
        """Add a copy of a tensor to the initializers of the model itself, under the name `name`."""
        copy = self.proto.graph.initializer.add()
        copy.CopyFrom(tensor)
        copy.name = name
        self.initializers[name] = copy

    def copy_initializer(self, name: str, copy: str) -> None:
        """Add a copy of an initializer, which may be external, under the name `copy`. No node may compute `copy`."""
        self.store_tensor(copy, self.initializers[name])
        self._constants.pop(copy, None)
        self.types[copy] = self.types[name]
        self._names.add(copy)

    def remove_initializer(self, name: str) -> None:
        """Remove an initializer of the model itself. Afterwards a node may compute a value called `name`."""
        stored = self.proto.graph.initializer
        del stored[next(i for i, tensor in enumerate(stored) if tensor.name == name)]
        self.initializers = {tensor.name: tensor for tensor in stored} | {n: self.initializers[n] for n in self._pooled}
        self._constants.pop(name, None)

    def added(self, name: str) -> bool:
        """Return True if onnxgrad generated the constant `name`, in this build or in the one that wrote the file."""
        return name in self._pooled or name in self.computed or is_generated(name)

    def hand_constants_to(self, outer: Graph) -> None:
        """Move the added constants to the graph that contains this one, where all its parts can read them."""
        for name in self._pooled:
            tensor = self.initializers[name]
            outer.initializers[name] = tensor
            outer.types[name] = tensor_type(tensor.data_type, list(tensor.dims))
            outer._pooled.add(name)
        self._pooled.clear()

    def unlist_initializers(self) -> None:
        """Remove the initializers from the inputs, so that they are constants. Trained ones become inputs again."""
        own = [value for value in self.proto.graph.input if value.name not in self.initializers]
        refill(self.proto.graph.input, own)
        self._fed = {value.name for value in own}
        self._constants.clear()

    def drop_unread(self, names: Iterable[str]) -> None:
        """Remove the initializers among `names` that no node reads and that are not inputs or outputs.

        The replaced nodes in `kernels` count as readers, too.
        """
        kept = {*read_by(self.nodes), *read_by(self.kernels.values()), *self._fed, *self.output_names}
        gone = {name for name in names if name in self.initializers and name not in kept}
        for position in reversed(range(len(self.proto.graph.initializer))):
            if self.proto.graph.initializer[position].name in gone:
                del self.proto.graph.initializer[position]
        for name in gone:
            del self.initializers[name]
            self._pooled.discard(name)

    def add_input(self, name: str, value_type: TypeProto) -> None:
        """Declare a graph input. If `name` is an initializer, it becomes overridable."""
        self.proto.graph.input.append(onnx.helper.make_value_info(name, value_type))
        self.types[name] = value_type
        self._names.add(name)
        self._fed.add(name)
        self._constants.pop(name, None)

    def add_output(self, name: str, value_type: TypeProto | None = None) -> None:
        """Declare a graph output."""
        self.proto.graph.output.append(onnx.helper.make_value_info(name, value_type or self.types[name]))

    def commit(self) -> ModelProto:
        """Write the nodes and those added constants that are used into the protobuf, and return it."""
        graph = self.proto.graph
        if self._pooled:
            live = self._pooled.intersection(read_by(self.nodes)).union(self.output_names)
            graph.initializer.extend(
                self.initializers[name] for name in self.initializers if name in self._pooled and name in live
            )
            for name in self._pooled - live:
                del self.initializers[name]
            self._pooled.clear()
        if self._nodes is not None:
            write(self._nodes, graph.node)
        return self.proto

    def skeleton(self) -> ModelProto:
        """Return the model without its weights: large initializers become inputs, small initializers stay."""
        return skeleton(self.proto, self.nodes, self.initializers)

    def adopt(self, rewritten: ModelProto) -> None:
        """Take over the nodes, opsets and new constants of a rewritten copy of the skeleton. The weights stay.

        If several nodes replace one node, they get its module. Nodes count as a replacement up to the node that
        computes the output of the replaced node.
        """
        before = {output: node for node in self.nodes for output in node.output if output}
        nodes, written = list(map(Node.read, rewritten.graph.node)), list[Node]()
        for node in nodes:
            written.append(node)
            replaced = next((before[output] for output in node.output if output in before), None)
            if replaced is not None:
                same = len(written) == 1 and node.op_type == replaced.op_type
                for each in written:
                    each.metadata = each.metadata or (replaced.metadata if same else origin(replaced))
                written.clear()
        self.set_nodes(nodes)
        refill(self.proto.opset_import, rewritten.opset_import)
        self.proto.ir_version = max(self.proto.ir_version, rewritten.ir_version)
        for tensor in rewritten.graph.initializer:
            if tensor.name not in self.initializers:
                self.proto.graph.initializer.append(tensor)
                self.initializers[tensor.name] = self.proto.graph.initializer[-1]

    def shared(self, value_type: TypeProto) -> TypeProto:
        """Return the object that represents all types equal to `value_type`. A graph has few different types."""
        return self._shared.setdefault(value_type.SerializeToString(), value_type)

    def named(self, value_type: TypeProto, symbols: dict[str, str] | None = None) -> TypeProto:
        """Give each unnamed dimension of a type a new symbol, in place, so that it counts as equal to no other one.

        Args:
            value_type: the type, which is changed.
            symbols: symbol of onnx -> the symbol of the graph that replaces it in the type. onnx numbers its symbols
                from the start at each inference. Missing symbols are added to the map. None keeps existing symbols.

        Returns:
            The type.
        """
        for dim in value_type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                if not dim.dim_param:
                    dim.dim_param = self.fresh_symbol()
                elif symbols is not None:
                    if dim.dim_param not in symbols:
                        symbols[dim.dim_param] = self.fresh_symbol()
                    dim.dim_param = symbols[dim.dim_param]
        return value_type

    def remove_unused(self, keep: Iterable[str] = ()) -> int:
        """Remove every node on which no output and no value in `keep` depends. Return the number of removed nodes."""
        before = len(self.nodes)
        self.nodes = behind(self.nodes, {*self.output_names, *keep})
        return before - len(self.nodes)
