"""Add low-rank adapters to an inference model as separate branches: y = x W becomes y = x W + (x A) B.

Branches are used in two cases. First, if a matrix is stored as integers of a few bits, the adapter is not merged,
because the sum can't be stored in these bits without loss. Second, if adapters are to be exchanged at run time, A and B
are initializers that a runtime can override. Their initial values are empty, of rank 0, or zeros of rank 1, so that the
model's results are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.adapters.places import AdapterSite, Factors, flat, is_product, keys, places, readers_of
from onnxgrad_cli.adapters.requantize import dequantized
from onnxgrad_cli.checkpoints.stored_weights import stored_tensors
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE
from onnxgrad_cli.ir.node import Node, make_node, refill
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.dora import bias_apart
from onnxgrad_cli.passes.stored_integers import is_integer


def of_integers(model: ModelProto, adapters: Sequence[Adapter]) -> list[Adapter]:
    """Return the adapters whose weights the model stores as integers."""
    stored = {name for tensor, name in stored_tensors(model.graph) if is_integer(tensor)}
    return [adapter for adapter in adapters if adapter.weight in stored]


def check_branches(model: ModelProto, adapters: Sequence[Adapter]) -> None:
    """Check that `add_branches` can find the matrix products of all adapters whose weights are stored as integers.

    Raises:
        UsageError: no matrix product in the model's main graph reads an adapted weight, or another kind of node reads
            it.
    """
    if beside := of_integers(model, adapters):
        _checked(Graph(model), beside)


def add_branches(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None = None
) -> None:
    """Add adapters to an inference model as branches beside the matrix products. The stored weights don't change.

    Args:
        model: the inference model; it is changed.
        adapters: the adapters.
        values: name -> LoRA matrix of an adapter.
        path: the file that the model was read from; external data are relative to it.

    Raises:
        UsageError: no matrix product in the model's main graph reads an adapted weight, or another kind of node reads
            it.
        OnnxgradError: the LoRA matrices don't fit the matrix.
    """
    own = {adapter.weight: adapter for adapter in adapters}
    graph = Graph(model)
    branches: dict[str, list[Node]] = {}
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
        _add(branches, graph, place, names, gain=gain)
    _insert(branches, graph)


def make_adaptable(model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Add branches to an inference model, with LoRA matrices that add nothing until a runtime overrides them.

    The LoRA matrices have the names that `.onnx_adapter` files use, `<module>.lora_A.weight` and
    `<module>.lora_B.weight`. Weights in `values` that were trained in full keep the values that they have in the model,
    and can be overridden, too.

    Args:
        model: the inference model; it is changed.
        adapters: the adapters. The matrix products that read their weights get a branch.
        values: name -> array: the LoRA matrices of the adapters, of which only the dtypes are used, and weights that
            were trained in full.

    Raises:
        UsageError: an adapter uses DoRA; a weight that was trained in full is not an initializer; no matrix product in
            the model's main graph reads an adapted weight; or another kind of node reads it.
        OnnxgradError: the LoRA matrices don't fit the matrix.
    """
    refuse_magnitudes(adapters, "`adaptable`")
    own = {adapter.weight: adapter for adapter in adapters}
    factors = {name for adapter in adapters for name in adapter.names}
    _open_alone(model)
    graph = Graph(model)
    branches: dict[str, list[Node]] = {}
    for key, found in keys(_checked(graph, adapters)).items():
        for place in found:
            place.of(own[place.weight], values)  # checks that the LoRA matrices fit
        names = name_a, name_b = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
        for name, tensor in zip(names, _empty(found[0], values[own[found[0].weight].a].dtype), strict=True):
            _add_overridable(graph, name, tensor, f"{key}.rank")
        for place in found:
            _add(branches, graph, place, [name_a, name_b], place.reader.settings.get("alpha", 1.0))
    for name in values.keys() - factors:
        _override(graph, name)
    _insert(branches, graph)


def refuse_magnitudes(adapters: Sequence[Adapter], option: str) -> None:
    """Raise an error for DoRA adapters, because adapters that onnxruntime loads at run time have only A and B.

    Args:
        adapters: the adapters.
        option: the option that the error message names.

    Raises:
        UsageError: an adapter uses DoRA.
    """
    if any(adapter.magnitude for adapter in adapters):
        message = f"{option}: onnxruntime's adapters have two LoRA matrices, but DoRA adapters also have magnitudes"
        hint = "write a .safetensors file or a folder of PEFT, or merge them into the model with `onnxgrad export`"
        raise conflict(message, hint)


def arrays_of(place: AdapterSite, found: Factors, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the LoRA matrices in the shapes that the operators of a branch read, with B multiplied by `scale`.

    The shapes are A [in, rank] and B [rank, out] if the product is x W. Otherwise they are A [rank, in] and B [out,
    rank], followed by the kernel axes of a convolution.
    """
    a, b = found.a, (found.b.astype(np.float64) * scale).astype(found.b.dtype)
    a, b = (a.T, b.T) if place.leads else (a, b)
    a, b = (np.ascontiguousarray(factor).reshape(*factor.shape, *place.kernel) for factor in (a, b))
    return a, b


def factors_of(place: AdapterSite, a: np.ndarray, b: np.ndarray, scale: float) -> Factors:
    """Return the LoRA matrices of an adapter from the arrays of a branch; the inverse of `arrays_of`.

    Args:
        place: the matrix product.
        a, b: the arrays, in the shapes that `arrays_of` returns.
        scale: the scale of the adapter; 1 if B is already multiplied by it.
    """
    a, b = flat(a), flat(b)
    return Factors(a.T, b.T, scale) if place.leads else Factors(a, b, scale)


def _checked(graph: Graph, adapters: Sequence[Adapter]) -> list[AdapterSite]:
    """Return the matrix products that read the adapters' weights, after checking that each adapter has at least one.

    Raises:
        UsageError: no matrix product in the model's main graph reads an adapted weight, or another kind of node reads
            it.
    """
    uses = graph.uses()
    for adapter in adapters:
        found = list(readers_of(uses, adapter.weight))
        strange = [reader.node for reader in found if not is_product(reader)]
        if not found or strange:
            label = strange and (strange[0].name or strange[0].output[0])
            by = f"'{label}' ({strange[0].op_type})" if strange else "nothing in the main graph"
            raise conflict(
                f"the adapter of '{adapter.weight}' can't be written back: {by} reads this weight",
                "name other weights with `lora_target`, or inline functions with onnx.inliner.inline_local_functions",
            )
    return places(graph, {adapter.weight for adapter in adapters})


# -- the nodes --------------------------------------------------------------------------------------------------------


@dataclass
class _Branch:
    """The nodes that compute the adapter of one matrix product. They are inserted after the product."""

    graph: Graph
    stem: str
    nodes: list[Node]

    def write(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        y = self.graph.fresh(f"{self.stem}/adapter/{op_type}")
        self.nodes.append(make_node(op_type, inputs, [y], name=y, **attributes))
        return y


def _add(
    branches: dict[str, list[Node]], graph: Graph, place: AdapterSite, names: Sequence[str], alpha: float = 1.0,
    gain: str = "",
) -> None:  # fmt: skip
    """Write a branch beside a matrix product.

    Args:
        branches: renamed result of a product -> the nodes of its branch; the new branch is added.
        graph: the graph of the model, in which the product's result is renamed.
        place: the matrix product.
        names: the names of the LoRA matrices A and B.
        alpha: the factor by which the branch's result is multiplied.
        gain: for DoRA, the name of the value by which the sum of product and branch is multiplied, before the bias is
            added; "" without DoRA.
    """
    result = place.reader.node.output[0]
    branch = _Branch(graph, result, [])
    wide = _product(branch, place, names, alpha)
    base = place.reader.node.output[0] = graph.fresh(f"{result}_base")
    total = _lengthened(branch, place, [base, wide], gain) if gain else [base, wide]
    last = "Add" if len(total) > 1 else "Identity"
    branch.nodes.append(make_node(last, total, [result], name=graph.fresh(f"{result}/adapter")))
    branches[base] = branch.nodes


def _insert(branches: Mapping[str, list[Node]], graph: Graph) -> None:
    """Insert the branches after their products."""
    graph.set_nodes([each for node in graph.nodes for each in (node, *branches.get(next(iter(node.output), ""), ()))])
    graph.commit()


def _lengthened(branch: _Branch, place: AdapterSite, total: Sequence[str], gain: str) -> list[str]:
    """Write nodes that multiply the sum of product and branch by DoRA's gain.

    The bias is removed from the product, so that it is not multiplied by the gain.

    Returns:
        The values whose sum is the result: the multiplied sum, and the bias if there is one.
    """
    bias, beta = bias_apart(place.reader.node)
    y = [branch.write("Mul", branch.write("Add", *total), gain)]
    if not bias:
        return y
    if place.kernel:
        shape = branch.graph.add_constant(np.array([-1, *(1 for _ in place.kernel)]))
        bias = branch.write("Reshape", bias, shape)
    return [*y, bias if beta == 1 else branch.write("Mul", bias, _constant(branch.graph, beta, gain))]


def _product(branch: _Branch, place: AdapterSite, names: Sequence[str], alpha: float) -> str:
    """Write nodes that multiply the input of a matrix product by the LoRA matrices. Return the name of the result."""
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


# -- initializers that a runtime can override -------------------------------------------------------------------------


def _empty(place: AdapterSite, dtype: np.dtype) -> Iterable[np.ndarray]:
    """Return LoRA matrices that add nothing: of rank 0 if the product is x W, otherwise of rank 1 and all zeros.

    Rank 0 is not used for W x and convolutions. If W has no columns and x a batch axis, some versions of onnxruntime
    (1.23, but not 1.32) leave parts of W x unwritten. These have arbitrary values. Convolutions without channels had
    the same fault, or are refused.
    """
    rank = 0 if place.leads else 1
    none = Factors(np.zeros((rank, place.shape[0]), dtype), np.zeros((place.shape[1], rank), dtype), 1.0)
    return arrays_of(place, none, 1.0)


def _add_overridable(graph: Graph, name: str, array: np.ndarray, symbol: str) -> None:
    if graph.taken(name):
        message = f"`adaptable`: the model already has a value called '{name}'"
        raise conflict(message, "use this model without changes: it already takes adapters")
    tensor = numpy_helper.from_array(array, name)
    rank = array.shape.index(min(array.shape[:2]))
    dims = [symbol if axis == rank else size for axis, size in enumerate(array.shape)]
    graph.store(name, array)
    graph.proto.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, dims))


def _override(graph: Graph, name: str) -> None:
    """Declare an initializer as an input, too, so that a runtime can override it.

    Raises:
        UsageError: the graph has no initializer with this name.
    """
    tensor = graph.initializers.get(name)
    if tensor is None:
        message = f"`adaptable`: '{name}' was trained in full, but it is not an initializer that a runtime can override"
        raise conflict(message, "write the trained model itself with `onnxgrad export`")
    graph.proto.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))


def _open_alone(model: ModelProto) -> None:
    """If a model has an old IR version, raise the version, and remove the initializers from the inputs.

    In old IR versions, every initializer is also declared as an input, but is still a constant. In later versions, a
    runtime can override an initializer that is also an input, so it can't optimize it as a constant.
    """
    if model.ir_version < INITIALIZERS_ALONE:
        stored = {tensor.name for tensor in model.graph.initializer}
        refill(model.graph.input, [value for value in model.graph.input if value.name not in stored])
        model.ir_version = INITIALIZERS_ALONE
