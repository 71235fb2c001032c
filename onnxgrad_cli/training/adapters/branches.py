"""Low-rank adapters beside the products of an inference model: y = x W becomes y = x W + (x A) B.

What a matrix of a few bits and its adapter come to can't be stored in a few bits, so that theirs are not merged. And
where adapters are to change while the model runs, A and B are initializers that a runtime overrides: empty ones, of
rank 0, with which the model computes what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.magnitudes import bias_apart
from onnxgrad_cli.passes.quantized_matrices import is_integer
from onnxgrad_cli.training.adapters.places import Factors, Place, flat, is_product, keys, places, readers_of
from onnxgrad_cli.training.adapters.requantize import dequantized
from onnxgrad_cli.training.run.export import stored_tensors


def of_integers(model: ModelProto, adapters: Sequence[Adapter]) -> list[Adapter]:
    """Those of adapters whose weights the model stores as integers."""
    stored = {name for tensor, name in stored_tensors(model.graph) if is_integer(tensor)}
    return [adapter for adapter in adapters if adapter.weight in stored]


def check_branches(model: ModelProto, adapters: Sequence[Adapter]) -> None:
    """Make sure that `add_branches` finds the products that read what adapters add to.

    Raises:
        UsageError: it does not.
    """
    beside = of_integers(model, adapters)
    if beside:
        _checked(Graph(model), beside)


def add_branches(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None = None
) -> None:
    """Add adapters to an inference model, beside the products that they belong to.

    Args:
        model: the inference model; it is changed.
        adapters: their weights stay as they are.
        values: their factors, by name.
        path: where the model was read from; external data are relative to it.

    Raises:
        UsageError: a product of the model reads such a matrix in a form that is not known.
        OnnxgradError: the factors don't fit the matrix.
    """
    own = {adapter.weight: adapter for adapter in adapters}
    graph, branches = Graph(model), _Branches()
    for place in _checked(graph, adapters):
        found = place.of(own[place.weight], values)
        factor = np.float64(place.reader.settings.get("alpha", 1.0) * found.scale)
        names = []
        for kind, array in zip("AB", arrays_of(place, found, factor), strict=True):
            names.append(graph.fresh(f"{place.weight}_lora_{kind}"))
            graph.add_initializer(names[-1], array)
        gain = ""
        if found.magnitude is not None:
            each = found.gain(replace(found, magnitude=None).added_to(dequantized(model, place, path)))
            each = each.astype(found.a.dtype).reshape(-1, *(1 for _ in place.kernel))
            gain = graph.add_constant(each, f"{place.weight}_lora_gain")
        branches.add(graph, place, names, gain=gain)
    branches.write(graph)


def make_adaptable(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Add empty factors that a runtime can override beside the products that adapters belong to.

    They are called as `onnx_adapter` files have it, `<module>.lora_A.weight` and `<module>.lora_B.weight`. What of
    `values` is no factor, weights that were trained in full, can be overridden too, and keeps its value.

    Args:
        model: the inference model; it is changed.
        adapters: those that say which products.
        values: their factors, whose types count, and other weights.

    Raises:
        UsageError: a product of the model reads such a matrix in a form that is not known, or a weight is no
            initializer.
        OnnxgradError: the factors don't fit the matrix.
    """
    refuse_magnitudes(adapters, "`adaptable`")
    own = {adapter.weight: adapter for adapter in adapters}
    factors = {name for adapter in adapters for name in adapter.names}
    _open_alone(model)
    graph, branches = Graph(model), _Branches()
    for key, found in keys(_checked(graph, adapters)).items():
        for place in found:
            place.of(own[place.weight], values)  # which fit
        names = name_a, name_b = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
        for name, tensor in zip(names, _empty(found[0], values[own[found[0].weight].a].dtype), strict=True):
            _add_overridable(graph, name, tensor, f"{key}.rank")
        for place in found:
            branches.add(graph, place, [name_a, name_b], place.reader.settings.get("alpha", 1.0))
    for name in values.keys() - factors:
        _override(graph, name)
    branches.write(graph)


def refuse_magnitudes(adapters: Sequence[Adapter], option: str) -> None:
    """Make sure that adapters are products of two factors, and no more: that is what onnxruntime takes at run time.

    Raises:
        UsageError: one is of DoRA.
    """
    if any(adapter.magnitude for adapter in adapters):
        raise UsageError(
            f"{option}: onnxruntime's adapters are products of two factors, and DoRA has magnitudes besides",
            "write a file of onnxgrad or a folder of PEFT, or merge them into the model by `onnxgrad export`",
        )


def arrays_of(place: Place, found: Factors, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors as the operators of a branch read them, the second one multiplied with `scale`.

    They are A of [in, rank] and B of [rank, out] for x W, else A of [rank, in] and B of [out, rank].
    """
    a, b = found.a, (found.b.astype(np.float64) * scale).astype(found.b.dtype)
    a, b = (a.T, b.T) if place.leads else (a, b)
    return (
        np.ascontiguousarray(a).reshape(*a.shape, *place.kernel),
        np.ascontiguousarray(b).reshape(*b.shape, *place.kernel),
    )


def factors_of(place: Place, a: np.ndarray, b: np.ndarray, scale: float) -> Factors:
    """The converse of `arrays_of`, of which B may have been scaled."""
    a, b = flat(a), flat(b)
    return Factors(a.T, b.T, scale) if place.leads else Factors(a, b, scale)


def _checked(graph: Graph, adapters: Sequence[Adapter]) -> list[Place]:
    """The products that read the matrices of adapters, each of which has one, and nothing else reads these."""
    uses = graph.uses()
    for adapter in adapters:
        found = list(readers_of(uses, adapter.weight))
        strange = [reader.node for reader in found if not is_product(reader)]
        if not found or strange:
            label = strange and (strange[0].name or strange[0].output[0])
            by = f"'{label}' ({strange[0].op_type})" if strange else "nothing in the model's own graph"
            raise UsageError(
                f"'{adapter.weight}' has an adapter that can't be written back: {by} reads it",
                "name others with `lora_target`, or let onnx.inliner.inline_local_functions bring functions into the "
                "graph",
            )
    return places(graph, {adapter.weight for adapter in adapters})


# -- the nodes --------------------------------------------------------------------------------------------------------


@dataclass
class _Branch:
    """The nodes of one product's adapter, to be written behind it."""

    graph: Graph
    stem: str
    nodes: list[Node]

    def write(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        y = self.graph.fresh(f"{self.stem}/adapter/{op_type}")
        self.nodes.append(make_node(op_type, inputs, [y], name=y, **attributes))
        return y


class _Branches:
    """The branches of a graph's products, as they come."""

    def __init__(self) -> None:
        self._after: dict[str, list[Node]] = {}
        self._bases: dict[str, str] = {}

    def add(self, graph: Graph, place: Place, names: Sequence[str], alpha: float = 1.0, gain: str = "") -> None:
        """Prepare a branch whose factors have these names, and whose sum is multiplied with `alpha`.

        With a `gain` all that the product gives is multiplied with that, but for what it adds in the end.
        """
        result = place.reader.node.output[0]
        branch = _Branch(graph, result, [])
        wide = _product(branch, place, names, alpha)
        self._bases[result] = graph.fresh(f"{result}_base")
        total = [self._bases[result], wide]
        if gain:
            total = _lengthened(branch, place, total, gain)
        last = "Add" if len(total) > 1 else "Identity"
        branch.nodes.append(make_node(last, total, [result], name=graph.fresh(f"{result}/adapter")))
        self._after[result] = branch.nodes

    def write(self, graph: Graph) -> None:
        """Write all of them behind their products."""
        nodes: list[Node] = []
        for node in graph.nodes:
            result = node.output[0] if node.output else ""
            nodes += [node, *self._after.get(result, ())]
            if result in self._bases:
                node.output[0] = self._bases[result]
        graph.set_nodes(nodes)
        graph.commit()


def _lengthened(branch: _Branch, place: Place, total: Sequence[str], gain: str) -> list[str]:
    """A sum times a gain, and what the product has added before."""
    bias, beta = bias_apart(place.reader.node)
    y = [branch.write("Mul", branch.write("Add", *total), gain)]
    if not bias:
        return y
    if place.kernel:
        shape = branch.graph.add_constant(np.array([-1, *(1 for _ in place.kernel)]))
        bias = branch.write("Reshape", bias, shape)
    return [*y, bias if beta == 1 else branch.write("Mul", bias, _constant(branch.graph, beta, gain))]


def _product(branch: _Branch, place: Place, names: Sequence[str], alpha: float) -> str:
    """The product of an input with two thin factors."""
    node, settings, (a, b) = place.reader.node, place.reader.settings, names
    if place.kernel:
        thin = branch.write("Conv", node.input[0], a, **settings)
        return branch.write("Conv", thin, b)
    x = node.input[0 if place.leads else 1]
    if settings.get("transA" if place.leads else "transB", 0):
        x = branch.write("Transpose", x, perm=[1, 0])
    thin = branch.write("MatMul", x, a) if place.leads else branch.write("MatMul", a, x)
    if alpha != 1:
        thin = branch.write("Mul", thin, _constant(branch.graph, alpha, a))
    return branch.write("MatMul", thin, b) if place.leads else branch.write("MatMul", b, thin)


def _constant(graph: Graph, number: float, like: str) -> str:
    dtype = helper.tensor_dtype_to_np_dtype(graph.initializers[like].data_type)
    return graph.add_constant(np.asarray(number, dtype))


# -- what a runtime overrides -----------------------------------------------------------------------------------------


def _empty(place: Place, dtype: np.dtype) -> Iterable[np.ndarray]:
    """Factors that add nothing: of rank 0, or where onnxruntime has no such product, of zeros and rank 1.

    A convolution without channels, and a matrix of no columns before a batch, leave their results as they find them.
    """
    rank = 0 if place.leads else 1
    none = Factors(np.zeros((rank, place.shape[0]), dtype), np.zeros((place.shape[1], rank), dtype), 1.0)
    return arrays_of(place, none, 1.0)


def _add_overridable(graph: Graph, name: str, array: np.ndarray, symbol: str) -> None:
    if graph.taken(name):
        raise UsageError(f"the model has a value called '{name}' already", "it takes adapters as it is")
    tensor = numpy_helper.from_array(array, name)
    rank = array.shape.index(min(array.shape[:2]))
    dims = [symbol if axis == rank else size for axis, size in enumerate(array.shape)]
    graph.store(name, array)
    graph.proto.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, dims))


def _override(graph: Graph, name: str) -> None:
    """Let a runtime override an initializer."""
    tensor = graph.initializers.get(name)
    if tensor is None:
        raise UsageError(
            f"'{name}' was trained in full, and a runtime can't override it: it is no initializer of the graph's own",
            "write the trained model itself, by `onnxgrad export`",
        )
    graph.proto.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))


def _open_alone(model: ModelProto) -> None:
    """Take initializers out of the inputs: there a runtime may override them, which costs it what constants allow.

    In old files they all stood there, and were constants still.
    """
    stored: set[str] = {tensor.name for tensor in model.graph.initializer}
    if model.ir_version < INITIALIZERS_ALONE:
        kept = [value for value in model.graph.input if value.name not in stored]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = INITIALIZERS_ALONE
