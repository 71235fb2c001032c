"""The one mutable view of a model that every pass works on: nodes as a list, values by name, types beside them.

It is a thin layer over the protobuf, which stays the base, so that whatever this tool does not understand goes
out as it came in. Weights are never touched: inline ones stay where they are, external ones stay references.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

from onnxgrad_cli.common.checks import number_in
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, write
from onnxgrad_cli.ir.nodes import captured, dims_in, node_names, read_by, reads
from onnxgrad_cli.ir.provenance import Provenance
from onnxgrad_cli.ir.skeleton import skeleton
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes, shape_of, tensor_type

GENERATED = "onnxgrad_const"
"""Prefix of the names of constants that onnxgrad generates. It marks them in files: later commands never train them."""


def is_generated(name: str) -> bool:
    """Return True if the name of a constant says that onnxgrad generated it."""
    return name.startswith(GENERATED)


class Graph:
    """A model under work.

    Attributes:
        proto: the model; its `graph.node` is stale until `commit()`.
        types: the type of every value whose type is known.
        initializers: every initializer by name (views into `proto`; values may be external).
        path: where the model was read from, if it was a file: external data are relative to it.
        unexpanded: the name of each node that could not be replaced by its definition -> why.
        declared_shapes: values whose shape a rule or a pass has declared: inference alone may not find it again.
        hints: what the model stores of values though it could be inferred; see `passes.prepare.declarations`.
        assumed: values whose shape, or part of it, is known from `hints` alone.
        confirmed: those of `assumed` that a run of the model has confirmed.
        follows_shapes: whether onnx is to follow the integers that make shapes: not where they fill the memory.
        observed: types that were read off a run of the model; their sizes have no names.
        run_for_ranks: why no run has shown the ranks that are unknown, "forbidden", "too large" or "failed"; or "".
        ranks: values that have other ranks at other sizes -> which, in words.
        branches: Ifs that were replaced by one branch because the other one can't run -> the branch.
        multiples: symbols that we have made for a multiple of another one, as (factor, symbol).
        original_names: every name of a value or node that the model had before anything was done to it.
        computed: values that nodes computed of constants when onnxgrad wrote the file, and that a tool may have stored.
        derived: True if onnxgrad added derivatives to the model that the file holds.
        changed: the first tensor that another tool changed after onnxgrad added derivatives, in words; "" if none.
        provenance: what the file says of where its tensors come from; nothing before `prepare` has asked it.
        settings: values that hold a setting of an operator that a definition may replace -> which.
        not_constant: values that may change at run time though they look constant, such as trained weights.
        held: values that count as constants in derivatives, whatever they depend on.
        runs_bfloat16: whether the installed onnxruntime has kernels for the model as it was read, which has bfloat16.
        kernels: values that a definition has written -> the node with a kernel of its own that gives them, or products
            with them.
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
        """The nodes in topological order, read when they are first asked for."""
        if self._nodes is None:
            self._nodes = list(map(Node.read, self.proto.graph.node))
        return self._nodes

    @nodes.setter
    def nodes(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def read_again(self) -> None:
        """Take nodes and initializers as they stand in the model, which was changed there."""
        self._nodes = None
        self.initializers = {tensor.name: tensor for tensor in self.proto.graph.initializer}

    def opset(self, domain: str = "") -> int | None:
        """The version of `domain` that the model imports; None when it does not."""
        for entry in self.proto.opset_import:
            if plain_domain(entry.domain) == plain_domain(domain):
                return int(entry.version)
        return None

    def fresh(self, stem: str) -> str:
        """A name that nothing in the model bears: `stem`, or `stem_1`, `stem_2`, ... where it is taken."""
        name = stem
        while name in self._names:
            self._counters[stem] += 1
            name = f"{stem}_{self._counters[stem]}"
        self._names.add(name)
        return name

    def fresh_symbol(self) -> str:
        """A symbol that no dimension bears."""
        return f"_d{next(self._symbols)}"

    def share_names(self, other: Graph) -> None:
        """Draw fresh names and symbols from the same stock as `other`, so that both can be parts of one model."""
        self._names, self._counters, self._symbols = other._names, other._counters, other._symbols
        self.multiples, self.branches = other.multiples, other.branches
        self._outer = other

    @property
    def is_part(self) -> bool:
        """Whether this is part of another graph, with which it shares names."""
        return self._outer is not None

    def use_domain(self, domain: str) -> None:
        """Import a domain, at version 1 where the model does not import it yet."""
        if self.opset(domain) is None:
            self.proto.opset_import.add(domain=domain, version=1)
        if self._outer is not None:
            self._outer.use_domain(domain)

    def taken(self, name: str) -> bool:
        """Whether a value or a node bears `name`."""
        return name in self._names

    @property
    def input_names(self) -> list[str]:
        """The graph's inputs in order, overridable initializers included."""
        return [value.name for value in self.proto.graph.input]

    @property
    def output_names(self) -> list[str]:
        """The graph's outputs in order, each once: nothing forbids to name one twice."""
        return list(dict.fromkeys(value.name for value in self.proto.graph.output))

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace the nodes by others, whose names may be new."""
        self.nodes = [node if isinstance(node, Node) else Node.read(node) for node in nodes]
        for node in self.nodes:
            self._names.update((node.name, *node.output))

    def rank_hint(self) -> str:
        """Return what to do about an unknown rank or size, without asking again for what was given."""
        if self._outer is not None:
            return self._outer.rank_hint()
        shapes = {value.name: shape_of(value.type) for value in self.proto.graph.input}
        shapes = {name: shape for name, shape in shapes.items() if name not in self.initializers}
        unknown = [name for name, shape in shapes.items() if shape is None]
        open_ = [name for name, shape in shapes.items() if shape and any(isinstance(size, str) for size in shape)]
        if unknown:
            return (
                f"give the input its shape with `shapes={unknown[0]}:DIM,DIM,...`, such as {unknown[0]}:batch,3,224,224"
            )
        if open_:
            return f"fix the shape of {listed(open_)} with `dims` or `shapes`"
        if self.run_for_ranks in ("forbidden", "too large"):
            return "allow a run of the model, which shows the ranks, with `infer_by_run=True`"
        if self.run_for_ranks == "failed":
            return "give data that the model runs on with `test_data`"
        return "export the model with shapes that do not depend on the values of its inputs"

    def made(self) -> Iterator[str]:
        """Every value that a node makes."""
        return itertools.chain.from_iterable(node.output for node in self.nodes)

    def producers(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.output if name}

    def ancestors(self, names: Iterable[str], stop: Collection[str] = ()) -> set[str]:
        """Every value that `names` are computed from, and they themselves; nothing behind what is in `stop`."""
        needed = set(names)
        for node in reversed(self.nodes):
            if any(name in needed and name not in stop for name in node.output):
                needed.update(reads(node))
        return needed

    def distinct_types(self) -> list[TypeProto]:
        """The types of all values, each once as far as values share it: they are few."""
        return list({id(value_type): value_type for value_type in self.types.values()}.values())

    def uses(self) -> dict[str, list[tuple[Node, int]]]:
        """Where each value is read: (node, input position), position -1 for a capture by a subgraph."""
        uses: dict[str, list[tuple[Node, int]]] = defaultdict(list)
        for node in self.nodes:
            for position, name in enumerate(node.input):
                if name:
                    uses[name].append((node, position))
            for name in captured(node) if node.attribute else ():
                uses[name].append((node, -1))
        return uses

    def constant(self, name: str) -> np.ndarray | None:
        """The values of `name` where they are small and can't be overridden at run time; else None."""
        if name in self.not_constant:
            return None
        if name not in self._constants:
            tensor = self.initializers.get(name)
            known = tensor is not None and not is_external(tensor) and nbytes(tensor) <= SMALL
            fixed = tensor if known and name not in self._fed else None
            self._constants[name] = None if fixed is None else numpy_helper.to_array(fixed)
        return self._constants[name]

    def vary(self, names: Iterable[str]) -> None:
        """Declare values that may change at run time (trained weights): `constant` never gives them out."""
        self.not_constant.update(names)

    def add_initializer(self, name: str, array: np.ndarray) -> None:
        """Add a constant called `name`, which no node makes; `commit` writes it if anybody reads it."""
        tensor = numpy_helper.from_array(np.asarray(array), name)
        self.initializers[name] = tensor
        self._constants.pop(name, None)
        self.types[name] = tensor_type(tensor.data_type, list(tensor.dims))
        self._names.add(name)
        self._pooled.add(name)

    def fresh_constant(self, stem: str = "") -> str:
        """Return an unused name for a generated constant; the prefix marks it as no parameter, in files too."""
        return self.fresh(f"{GENERATED}_{stem}" if stem else GENERATED)

    def add_constant(self, array: np.ndarray, stem: str = "") -> str:
        """Add a generated constant under a marked name, and return the name."""
        name = self.fresh_constant(stem)
        self.add_initializer(name, array)
        return name

    def store(self, name: str, array: np.ndarray) -> None:
        """Add an initializer as one of the model's own; no node makes a value called `name` any more."""
        self.add_initializer(name, array)
        self._pooled.discard(name)
        self.proto.graph.initializer.append(self.initializers[name])
        self.initializers[name] = self.proto.graph.initializer[-1]

    def copy_initializer(self, name: str, copy: str) -> None:
        """Add another initializer with the values of one, external data too; no node makes `copy` any more."""
        tensor = self.proto.graph.initializer.add()
        tensor.CopyFrom(self.initializers[name])
        tensor.name = copy
        self.initializers[copy] = tensor
        self._constants.pop(copy, None)
        self.types[copy] = self.types[name]
        self._names.add(copy)

    def remove_initializer(self, name: str) -> None:
        """Remove one of the model's own initializers; a node may make a value of that name then."""
        stored = self.proto.graph.initializer
        del stored[next(i for i, tensor in enumerate(stored) if tensor.name == name)]
        self.initializers = {tensor.name: tensor for tensor in stored} | {n: self.initializers[n] for n in self._pooled}
        self._constants.pop(name, None)

    def added(self, name: str) -> bool:
        """Return True if onnxgrad generated the constant `name`, in this build or in the one that wrote the file."""
        return name in self._pooled or name in self.computed or is_generated(name)

    def hand_constants_to(self, outer: Graph) -> None:
        """Give the constants that were added to the graph around this one, where all can read them."""
        for name in self._pooled:
            tensor = self.initializers[name]
            outer.initializers[name] = tensor
            outer.types[name] = tensor_type(tensor.data_type, list(tensor.dims))
            outer._pooled.add(name)
        self._pooled.clear()

    def unlist_initializers(self) -> None:
        """Take the initializers out of the inputs, so that they are constants; trained ones come back as inputs."""
        own = [value for value in self.proto.graph.input if value.name not in self.initializers]
        del self.proto.graph.input[:]
        self.proto.graph.input.extend(own)
        self._fed = {value.name for value in own}
        self._constants.clear()

    def drop_unread(self, names: Iterable[str]) -> None:
        """Remove those initializers of `names` that no node or kernel reads and nobody can feed or fetch."""
        kept = {*read_by(self.nodes), *read_by(self.kernels.values()), *self._fed, *self.output_names}
        gone = {name for name in names if name in self.initializers and name not in kept}
        for position in reversed(range(len(self.proto.graph.initializer))):
            if self.proto.graph.initializer[position].name in gone:
                del self.proto.graph.initializer[position]
        for name in gone:
            del self.initializers[name]
            self._pooled.discard(name)

    def add_input(self, name: str, value_type: TypeProto) -> None:
        """Declare a graph input; a weight declared so becomes an overridable initializer."""
        self.proto.graph.input.append(onnx.helper.make_value_info(name, value_type))
        self.types[name] = value_type
        self._names.add(name)
        self._fed.add(name)
        self._constants.pop(name, None)

    def add_output(self, name: str, value_type: TypeProto | None = None) -> None:
        """Declare a graph output."""
        value_type = value_type or self.types[name]
        self.proto.graph.output.append(onnx.helper.make_value_info(name, value_type))

    def commit(self) -> ModelProto:
        """Write nodes and pooled constants back into the protobuf and return it."""
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
        """The model without its weights; see `skeleton`."""
        return skeleton(self.proto, self.nodes, self.initializers)

    def adopt(self, rewritten: ModelProto) -> None:
        """Take the nodes, opsets and new constants of a rewritten skeleton; the weights stay as they are.

        Nodes in place of one, which end with that which makes its output, are of its module.
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
        del self.proto.opset_import[:]
        self.proto.opset_import.extend(rewritten.opset_import)
        self.proto.ir_version = max(self.proto.ir_version, rewritten.ir_version)
        for tensor in rewritten.graph.initializer:
            if tensor.name not in self.initializers:
                self.proto.graph.initializer.append(tensor)
                self.initializers[tensor.name] = self.proto.graph.initializer[-1]

    def shared(self, value_type: TypeProto) -> TypeProto:
        """The one object for all types equal to this one: a large graph has few, and what is the same is soon seen."""
        return self._shared.setdefault(value_type.SerializeToString(), value_type)

    def named(self, value_type: TypeProto, symbols: dict[str, str] | None = None) -> TypeProto:
        """The type itself, after each unnamed dimension got a symbol of its own: it equals itself, if nothing else.

        With `symbols`, the others are onnx's, which starts to count anew at each inference: they get ours for good.
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
        """Drop every node whose results nobody reads, and every constant only they read; returns how many nodes."""
        needed = set(self.output_names) | set(keep)
        kept = []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                kept.append(node)
                needed.update(reads(node))
        removed = len(self.nodes) - len(kept)
        self.nodes = kept[::-1]
        return removed
