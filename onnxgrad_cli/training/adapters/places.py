"""Where adapters belong in an inference model: the products that read what they add to, by the modules around these.

Other programs know an adapter by the module that it is of, 'model.layers.0.self_attn.q_proj', and have its factors as
they meet the module's input: A of [rank, in] and B of [out, rank], for y = x W + scale (x Aᵀ) Bᵀ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import GENAI, module_path
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.adapters import PRODUCTS as PASSES_PRODUCTS, Reader, Uses, views_of
from onnxgrad_cli.passes.quantized_matrices import is_integer
from onnxgrad_cli.training.run.export import stored_tensors

PRODUCTS = PASSES_PRODUCTS | {("MatMulNBits", 1)}
"""Where a product may read a matrix, as operator and position."""

LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})
"""Operators that take rows of a matrix: adapters don't add to these."""

WEIGHT = re.compile(r"(^|\.)q?weight")
"""What the one matrix of a layer is called, whatever a quantizer adds: 'weight_quantized', 'MatMul.weight_Q4'."""


@dataclass(frozen=True)
class Factors:
    """An adapter of a module: A of [rank, in], B of [out, rank], and what their product is multiplied with.

    With DoRA `magnitude` of [out] holds the lengths that the sums of matrix and product are brought to.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    def added_to(self, matrix: np.ndarray) -> np.ndarray:
        """What a matrix of [out, in] comes to, in float64."""
        a, b = (factor.astype(np.float64) for factor in (self.a, self.b))
        total: np.ndarray = matrix.astype(np.float64) + self.scale * (b @ a)
        return total if self.magnitude is None else total * self.gain(total)[:, None]

    def gain(self, total: np.ndarray) -> np.ndarray:
        """What DoRA multiplies the sums of matrix and product with, for each output."""
        assert self.magnitude is not None
        lengths = np.linalg.norm(total, axis=1)
        if not lengths.all():
            raise OnnxgradError("an adapter cancels all weights of an output: DoRA knows no direction of these")
        found: np.ndarray = self.magnitude.astype(np.float64) / lengths
        return found


@dataclass(frozen=True)
class Place:
    """A product with a stored matrix.

    Attributes:
        weight: what the matrix is called.
        reader: the product.
        shape: the size of its input and that of its result, along the axes that the matrix has.
        kernel: the axes that a convolution's matrix has besides, which are of size 1.
        swapped: whether the input meets the other axis of the matrix than that of the first product that reads it.
        module: the path of the module around it; "" where nothing tells.
        parts: the modules that were made one, each with its number of outputs; none where it is one.
        dtype: the type of what the product reads, as onnx numbers it.
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
        """Whether the product is x W: else it is W x, or a convolution, whose factors stand before what they meet."""
        return not self.kernel and self.reader.position == 1

    @property
    def sizes(self) -> dict[str, int]:
        """The modules that its adapter is of, in order, each with its number of outputs."""
        return dict(self.parts) or {self.module: self.shape[1]}

    @property
    def obstacle(self) -> str:
        """Why other programs know no module whose adapter this one's is; "" where they do."""
        if not self.module:
            return "no name and no metadata say which module reads it"
        if self.weight.startswith(f"{self.module}.") and self.weight != f"{self.module}.weight" and not self.parts:
            own = self.weight.removeprefix(f"{self.module}.")
            if not WEIGHT.search(own):
                return f"it is the parameter '{own}' of '{self.module}', no layer of its own"
        if not self.kernel and not self.leads:
            return f"'{self.reader.node.name}' multiplies with it from the left, as no layer does"
        return ""

    def of(self, adapter: Adapter, values: Mapping[str, np.ndarray]) -> Factors:
        """The factors of the adapter of its matrix, as they meet this product.

        Raises:
            OnnxgradError: they don't fit.
        """
        a, b = flat(values[adapter.a]), flat(values[adapter.b])
        rank = adapter.rank
        if a.shape[1] == rank == b.shape[0]:  # as for a matrix of [in, out]
            a, b = a.T, b.T
        if self.swapped:
            a, b = b.T, a.T
        m = values[adapter.magnitude] if adapter.magnitude else None
        fits = (a.shape, b.shape) == ((rank, self.shape[0]), (self.shape[1], rank))
        if not fits or (m is not None and m.shape != (self.shape[1],)):
            raise OnnxgradError(
                f"the adapter of '{self.weight}' does not fit: it is of rank {rank}, from {a.shape[-1]} to {len(b)}, "
                f"and the matrix from {self.shape[0]} to {self.shape[1]}",
                "this is another model than the one that was adapted",
            )
        return Factors(a, b, adapter.scale, m)

    def adapter(self, found: Factors, alpha: float, scaling: str = "lora") -> tuple[Adapter, dict[str, np.ndarray]]:
        """The adapter of its matrix, and its factors by name; the converse of `of`."""
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
    """A factor as a matrix, without the axes of a convolution's kernel."""
    return factor.reshape(factor.shape[0], factor.shape[1])


def places(model: ModelProto | Graph, weights: Collection[str] | None = None) -> list[Place]:
    """The products of a model's own graph with matrices that it stores, in no set order.

    Args:
        model: an inference model, or the graph whose nodes the products are to be; it is only read.
        weights: the matrices; None is all.
    """
    graph = model if isinstance(model, Graph) else Graph(model)
    uses = graph.uses()
    heads = _heads(graph) if graph.proto.producer_name == GENAI else None
    found: list[Place] = []
    stored = {name: tensor for tensor, name in stored_tensors(graph.proto.graph)}
    for name, tensor in stored.items():
        if len(tensor.dims) > 1 and (weights is None or name in weights):
            found += _of(uses, name, stored, heads)
    return found


def _of(
    uses: Uses, weight: str, stored: Mapping[str, TensorProto], heads: Mapping[str, tuple[int, int]] | None
) -> Iterator[Place]:
    dims, first = list(stored[weight].dims), None
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
        yield Place(weight, reader, shape, kernel, reader.leads != first, module, parts, _dtype(uses, weight, stored))


def _dtype(uses: Uses, weight: str, stored: Mapping[str, TensorProto]) -> int:
    """The type of a matrix as products read it: of one of integers, that of its scales."""
    if not is_integer(stored[weight]):
        return stored[weight].data_type
    beside = (node.input[position + 1] for node, position in uses[weight] if len(node.input) > position + 1)
    scales = (stored[name] for name in beside if name in stored and not is_integer(stored[name]))
    return next((scale.data_type for scale in scales), TensorProto.FLOAT)


def readers_of(uses: Uses, weight: str) -> Iterator[Reader]:
    """What reads a matrix, be it dequantized and transposed before, but where rows of it are looked up."""
    for _, readers in views_of(uses, weight):
        for reader in readers:
            kind = reader.node.op_type
            if kind == "DequantizeLinear" and reader.position == 0:
                found = [each for _, own in views_of(uses, reader.node.output[0], reader.transposed) for each in own]
                yield from (each for each in found if each.node.op_type not in LOOKUPS)
            elif kind == "MatMulNBits":  # which stores a row for each output
                yield Reader(reader.node, reader.position, transposed=True)
            elif kind not in LOOKUPS and not _is_looked_up(uses, reader.node):
                yield reader


def _is_looked_up(uses: Uses, node: Node) -> bool:
    """Whether a node only lays out anew a table whose rows are looked up: bytes by blocks, as one of two axes."""
    readers = uses.get(node.output[0], ()) if node.op_type == "Reshape" else ()
    return bool(readers) and all(reader.op_type in LOOKUPS for reader, _ in readers)


def is_product(reader: Reader) -> bool:
    """Whether a reader multiplies with what it reads."""
    return (reader.node.op_type, reader.position) in PRODUCTS


# -- what onnxruntime-genai calls otherwise ---------------------------------------------------------------------------


def _heads(graph: Graph) -> dict[str, tuple[int, int]]:
    """The numbers of heads of queries and of keys, by the path of their attention."""
    found = {}
    for node in graph.nodes:
        if node.op_type == "GroupQueryAttention":
            own = attributes_of(node)
            found[module_path(node)] = int(own.get("num_heads", 0)), int(own.get("kv_num_heads", 0))
    return found


def _named(
    path: str, outputs: int, heads: Mapping[str, tuple[int, int]] | None
) -> tuple[str, tuple[tuple[str, int], ...]]:
    """What transformers calls a module that genai's builder has written, and those that a packed one was made of."""
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


def keys(found: Iterable[Place]) -> dict[str, list[Place]]:
    """Places by the name under which they take their factors: their module's, or where that has several, the matrix's.

    Of one name are the places of one matrix that take the same factors.
    """
    found = list(found)
    kinds = {(place.module, place.weight, place.swapped, place.leads) for place in found}
    times = Counter(module for module, *_ in kinds)
    named: dict[str, list[Place]] = {}
    for place in found:
        own = f"{place.weight}{'/swapped' * place.swapped}{'/left' * (not place.leads)}"
        named.setdefault(place.module if place.module and times[place.module] == 1 else own, []).append(place)
    return named
