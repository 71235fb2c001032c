"""Find the matrix products of an inference model that can have adapters, and the module that each product belongs to.

Other programs name an adapter after its module, such as 'model.layers.0.self_attn.q_proj'. They store the LoRA matrices
A [rank, in] and B [out, rank] for y = x W + scale (x Aᵀ) Bᵀ. Several modules may share a matrix. Their adapters must be
equal, and become one adapter of the matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.checkpoints.stored_weights import stored_tensors
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import GENAI, module_path
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.adapters import PRODUCTS as PASSES_PRODUCTS, Reader, views_of
from onnxgrad_cli.passes.stored_integers import Uses, is_integer

PRODUCTS = PASSES_PRODUCTS | {("MatMulNBits", 1)}
"""(operator, input position) pairs: the matrix products, and the input at which each may read a stored matrix."""

LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})
"""Operators that look up rows of a matrix. They get no adapters."""

WEIGHT = re.compile(r"(^|\.)q?weight")
"""A regular expression for the name of a layer's only matrix.

Quantizers may append text: 'weight_quantized', 'weight_Q4'.
"""


@dataclass(frozen=True)
class Factors:
    """The LoRA matrices of an adapter, in PEFT's orientation.

    Attributes:
        a: the LoRA matrix A, [rank, in].
        b: the LoRA matrix B, [out, rank].
        scale: the number by which the product B A is multiplied.
        magnitude: with DoRA, the trained norm of each output's weights, [out]; otherwise None.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    def added_to(self, matrix: np.ndarray) -> np.ndarray:
        """Return the sum of a matrix [out, in] and the adapter, in float64."""
        a, b = (factor.astype(np.float64) for factor in (self.a, self.b))
        total: np.ndarray = matrix.astype(np.float64) + self.scale * (b @ a)
        return total if self.magnitude is None else total * self.gain(total)[:, None]

    def gain(self, total: np.ndarray) -> np.ndarray:
        """Return the number by which DoRA multiplies each output, [out].

        Args:
            total: the sum of the matrix and the scaled product B A, [out, in].

        Raises:
            OnnxgradError: all weights of an output are 0, so that their norm can't be scaled.
        """
        assert self.magnitude is not None
        lengths = np.linalg.norm(total, axis=1)
        if not lengths.all():
            message = "an adapter makes all weights of an output 0, and DoRA can't scale zeros"
            raise OnnxgradError(message, code="not_finite")
        found: np.ndarray = self.magnitude.astype(np.float64) / lengths
        return found


@dataclass(frozen=True)
class AdapterSite:
    """A matrix product that reads a stored matrix, and can have an adapter.

    Attributes:
        weight: the name of the matrix.
        reader: the node of the product.
        shape: the number of input features and of output features.
        kernel: for a convolution, the sizes of the kernel axes of its weight, which are all 1; otherwise ().
        swapped: True if the input features lie along the other axis of the matrix than in the first product that reads
            it.
        module: the path of the module that the product belongs to; "" if it is unknown.
        parts: if several modules are packed into one product: (module, number of outputs) of each. Otherwise ().
        dtype: the ONNX element type with which the product computes.
    """

    weight: str
    reader: Reader
    shape: tuple[int, int]
    kernel: tuple[int, ...] = ()
    swapped: bool = False
    module: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    dtype: int = 1

    @property
    def leads(self) -> bool:
        """True if the stored matrix is the right-hand operand: x W. False for W x and for a convolution."""
        return not self.kernel and self.reader.position == 1

    @property
    def sizes(self) -> dict[str, int]:
        """Map from each module of the product to its number of outputs, in the order of the product's outputs."""
        return dict(self.parts) or {self.module: self.shape[1]}

    @property
    def obstacle(self) -> str:
        """The reason why formats that name adapters after modules can't store this site's adapter; "" if they can."""
        if not self.module:
            return "neither names nor metadata say which module reads it"
        if self.weight.startswith(f"{self.module}.") and self.weight != f"{self.module}.weight" and not self.parts:
            own = self.weight.removeprefix(f"{self.module}.")
            if not WEIGHT.search(own):
                return f"it is the parameter '{own}' of '{self.module}', not a layer of its own"
        if not self.kernel and not self.leads:
            return f"'{self.reader.node.name}' multiplies with it from the left, unlike a layer"
        return ""

    def of(self, adapter: Adapter, values: Mapping[str, np.ndarray]) -> Factors:
        """Return the LoRA matrices of an adapter for this product, as A [rank, in] and B [out, rank], like in PEFT.

        Raises:
            OnnxgradError: the LoRA matrices don't fit the matrix.
        """
        a, b = flat(values[adapter.a]), flat(values[adapter.b])
        rank = adapter.rank
        if a.shape[1] == rank == b.shape[0]:  # the form for a matrix [in, out]
            a, b = a.T, b.T
        if self.swapped:
            a, b = b.T, a.T
        m = values[adapter.magnitude] if adapter.magnitude else None
        fits = (a.shape, b.shape) == ((rank, self.shape[0]), (self.shape[1], rank))
        if not fits or (m is not None and m.shape != (self.shape[1],)):
            raise OnnxgradError(
                f"the adapter of '{self.weight}' does not fit: it has rank {rank} and maps {a.shape[-1]} values to "
                f"{len(b)}, but the matrix maps {self.shape[0]} to {self.shape[1]}",
                "use the model that was adapted",
                code="mismatch",
            )
        return Factors(a, b, adapter.scale, m)

    def adapter(self, found: Factors, alpha: float, scaling: str = "lora") -> tuple[Adapter, dict[str, np.ndarray]]:
        """Return the adapter of the matrix, and a map: name -> LoRA matrix. This is the inverse of `of`."""
        names = f"{self.weight}_lora_A", f"{self.weight}_lora_B"
        a, b = (found.b.T, found.a.T) if self.swapped else (found.a, found.b)
        if self.reader.leads != self.swapped:
            a, b = a.T, b.T
        dtype = helper.tensor_dtype_to_np_dtype(self.dtype)
        a, b = (np.ascontiguousarray(factor, dtype).reshape(*factor.shape, *self.kernel) for factor in (a, b))
        arrays = dict(zip(names, (a, b), strict=True))
        magnitude = "" if found.magnitude is None else f"{self.weight}_lora_magnitude"
        if found.magnitude is not None:
            arrays[magnitude] = np.ascontiguousarray(found.magnitude, dtype)
        return Adapter(self.weight, *names, len(found.a), alpha, scaling, magnitude), arrays


def flat(factor: np.ndarray) -> np.ndarray:
    """Return a LoRA matrix as a matrix: remove the kernel axes of a convolution, which have size 1."""
    return factor.reshape(factor.shape[0], factor.shape[1])


def places(model: ModelProto | Graph, weights: Collection[str] | None = None) -> list[AdapterSite]:
    """Find the matrix products of a model that read stored matrices. Products in subgraphs are not found.

    Args:
        model: an inference model, or its graph; not changed. If it is a graph, the returned sites refer to its nodes.
        weights: the names of the stored matrices to consider; None for all.

    Returns:
        The products, in no particular order.
    """
    graph = model if isinstance(model, Graph) else Graph(model)
    uses = graph.uses()
    heads = _heads(graph) if graph.proto.producer_name == GENAI else None
    found: list[AdapterSite] = []
    stored = {name: tensor for tensor, name in stored_tensors(graph.proto.graph)}
    for name, tensor in stored.items():
        if len(tensor.dims) > 1 and (weights is None or name in weights):
            found += _of(uses, name, stored, heads)
    return found


def _of(
    uses: Uses, weight: str, stored: Mapping[str, TensorProto], heads: Mapping[str, tuple[int, int]] | None
) -> Iterator[AdapterSite]:
    dims, dtype, first = list(stored[weight].dims), _dtype(uses, weight, stored), None
    for reader in readers_of(uses, weight):
        if not is_product(reader) or (len(dims) > 2) != (reader.node.op_type in ("Conv", "MatMulNBits")):
            continue
        own = reader.settings
        if reader.node.op_type == "MatMulNBits":
            shape = int(own.get("K", 0)), int(own.get("N", 0))
        else:
            shape = (dims[0], dims[1]) if reader.leads else (dims[1], dims[0])
        first = reader.leads if first is None else first
        module, parts = _named(module_path(reader.node), shape[1], heads)
        kernel = tuple(dims[2:]) if reader.node.op_type == "Conv" else ()
        yield AdapterSite(weight, reader, shape, kernel, reader.leads != first, module, parts, dtype)


def _dtype(uses: Uses, weight: str, stored: Mapping[str, TensorProto]) -> int:
    """Return the element type with which products of a matrix compute. For integers, it is the type of their scales."""
    if not is_integer(stored[weight]):
        return stored[weight].data_type
    beside = (node.input[position + 1] for node, position in uses[weight] if len(node.input) > position + 1)
    scales = (stored[name] for name in beside if name in stored and not is_integer(stored[name]))
    return next((scale.data_type for scale in scales), TensorProto.FLOAT)


def readers_of(uses: Uses, weight: str) -> Iterator[Reader]:
    """Yield the nodes that read a matrix, directly or after dequantization and transposition.

    Row lookups are left out.
    """
    for _, readers in views_of(uses, weight):
        for reader in readers:
            kind = reader.node.op_type
            if kind == "DequantizeLinear" and reader.position == 0:
                found = [each for _, own in views_of(uses, reader.node.output[0], reader.transposed) for each in own]
                yield from (each for each in found if each.node.op_type not in LOOKUPS)
            elif kind == "MatMulNBits":  # MatMulNBits stores a row for each output
                yield Reader(reader.node, reader.position, transposed=True)
            elif kind not in LOOKUPS and not _is_looked_up(uses, reader.node):
                yield reader


def _is_looked_up(uses: Uses, node: Node) -> bool:
    """Return True if a node is a Reshape whose result only row lookups read, as in a blockwise quantized embedding."""
    readers = uses.get(node.output[0], ()) if node.op_type == "Reshape" else ()
    return bool(readers) and all(reader.op_type in LOOKUPS for reader, _ in readers)


def is_product(reader: Reader) -> bool:
    """Return True if a node that reads a matrix is a matrix product with it."""
    return (reader.node.op_type, reader.position) in PRODUCTS


# -- names of onnxruntime-genai ---------------------------------------------------------------------------------------


def _heads(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return a map: module path of an attention layer -> its numbers of query heads and of key heads."""
    found = {}
    for node in graph.nodes:
        if node.op_type == "GroupQueryAttention":
            own = attributes_of(node)
            found[module_path(node)] = int(own.get("num_heads", 0)), int(own.get("kv_num_heads", 0))
    return found


def _named(
    path: str, outputs: int, heads: Mapping[str, tuple[int, int]] | None
) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Convert a module path in a model of onnxruntime-genai to the module's name, and find parts of a packed module.

    Args:
        path: the module path in the model.
        outputs: the number of outputs of the module.
        heads: the result of `_heads`; None if genai's builder did not write the model. The path is then the name.

    Returns:
        The name of the module; and for a packed module (name, number of outputs) of each part, otherwise ().
    """
    if heads is None:
        return path, ()
    around, _, last = path.rpartition(".")
    module = f"{around.removesuffix('attn')}self_attn.{last}" if around.endswith(".attn") else path
    queries, keys = heads.get(around, (0, 0))
    if last == "qkv_proj":
        counts = {"q": queries, "k": keys, "v": keys}
    else:
        counts = {"gate": 1, "up": 1} if last == "gate_up_proj" else {}
    if not sum(counts.values()):
        return module, ()
    size, own = outputs // sum(counts.values()), module.removesuffix(last)
    return module, tuple((f"{own}{kind}_proj", size * n) for kind, n in counts.items())


# -- names in files ---------------------------------------------------------------------------------------------------


def keys(found: Iterable[AdapterSite]) -> dict[str, list[AdapterSite]]:
    """Group sites by the name that their LoRA matrices have in a file. Return name -> sites.

    The name is the module's. If the module is unknown or has several matrices, the name is the matrix's. Sites of one
    matrix that take the same LoRA matrices have the same name.
    """
    found = list(found)
    kinds = {(place.module, place.weight, place.swapped, place.leads) for place in found}
    times = Counter(module for module, *_ in kinds)
    named: dict[str, list[AdapterSite]] = {}
    for place in found:
        own = f"{place.weight}{'/swapped' * place.swapped}{'/left' * (not place.leads)}"
        named.setdefault(place.module if place.module and times[place.module] == 1 else own, []).append(place)
    return named


Read = tuple[AdapterSite, Adapter, dict[str, np.ndarray]]
"""A site, its adapter from a file, and a map: name -> LoRA matrix of the adapter."""


def together(found: Iterable[Read], known: Iterable[AdapterSite]) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """Keep one adapter for each matrix, and check that all modules sharing a matrix have the same adapter.

    Args:
        found: the adapters that were read from a file.
        known: all sites of the model.

    Returns:
        The kept adapters, and a map: name -> LoRA matrix, for these adapters.

    Raises:
        OnnxgradError: modules that share a matrix have different adapters, a LoRA matrix is not finite, or the rank
            equals the smaller size of the matrix, so that the adapter is not of low rank.
    """
    found = list(found)
    read = {(place.weight, place.module) for place, *_ in found}
    for place in known:
        if any(place.weight == weight for weight, _ in read) and (place.weight, place.module) not in read:
            raise _parted(next(module for weight, module in read if weight == place.weight), place)
    adapters: dict[str, tuple[str, Adapter]] = {}
    values: dict[str, np.ndarray] = {}
    for place, adapter, factors in found:
        if not all(np.isfinite(array).all() for array in factors.values()):
            message = f"the adapter of '{place.module or place.weight}' has values that are not finite"
            raise OnnxgradError(message, code="not_finite")
        smaller = min((factors[adapter.a], factors[adapter.b]), key=lambda array: array.size)
        if smaller.shape[:2] == (adapter.rank, adapter.rank):
            message = (
                f"the adapter of '{place.module or place.weight}' is not of low rank: one of its matrices is square"
            )
            raise OnnxgradError(f"{message}, of rank {adapter.rank}", code="mismatch")
        module, other = adapters.setdefault(place.weight, (place.module, adapter))
        if other is not adapter and not _same(other, adapter, values, factors):
            raise _parted(module, place)
        values.update(factors)
    return [adapter for _, adapter in adapters.values()], values


def misfit(source: Path, name: str, sizes: tuple[int, int], a: np.ndarray, b: np.ndarray) -> OnnxgradError:
    """Return the error for LoRA matrices in a file that don't fit the numbers of inputs and outputs of a module."""
    return OnnxgradError(
        f"'{source}' does not fit the model: '{name}' maps {sizes[0]} values to {sizes[1]}, but its LoRA matrices are "
        f"{list(a.shape)} and {list(b.shape)}",
        "use an adapter of this model with the rank of its configuration; quantized LoRA matrices are not supported",
        code="mismatch",
    )


def _parted(module: str, place: AdapterSite) -> OnnxgradError:
    return OnnxgradError(
        f"'{module}' and '{place.module}' share the matrix '{place.weight}' in this model, but have different adapters",
        "export the model again so that each has its own matrix",
        code="mismatch",
    )


def _same(one: Adapter, other: Adapter, values: dict[str, np.ndarray], factors: dict[str, np.ndarray]) -> bool:
    """Return True if two adapters of a matrix add the same matrix, within 1e-5, and have the same magnitudes.

    The tolerance allows for rounding, as when the scale is multiplied into A in one adapter and into B in the other.
    """
    if bool(one.magnitude) != bool(other.magnitude):
        return False
    if one.magnitude and not np.array_equal(values[one.magnitude], factors[other.magnitude]):
        return False
    left, right = _on_vectors(one, values), _on_vectors(other, factors)
    return left.shape == right.shape and bool(np.abs(left - right).max() <= 1e-5 * np.abs(left).max())


def _on_vectors(adapter: Adapter, values: dict[str, np.ndarray]) -> np.ndarray:
    """Multiply an adapter's matrix B A by 4 random vectors. Comparing the results avoids computing B A itself."""
    a, b = (flat(values[name]).astype(np.float64) for name in (adapter.a, adapter.b))
    left, right = (a, b) if a.shape[1] == adapter.rank == b.shape[0] else (b, a)
    return adapter.scale * (left @ (right @ np.random.default_rng(0).standard_normal((right.shape[1], 4))))
