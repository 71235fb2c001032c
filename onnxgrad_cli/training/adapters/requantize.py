"""Adapters added into matrices that are stored as integers, which are rounded to the nearest ones anew: that is lossy.

Zero points stay. The scale of a block is kept, or changed so that the largest sum is still within the integers' range,
whichever comes nearer to the sums. Sources: the operator pages of MatMulNBits (com.microsoft) and DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.few_bits import unpacked
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.steps import spread
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.adapters import Uses, views_of
from onnxgrad_cli.training.adapters.places import LOOKUPS, Place, places
from onnxgrad_cli.training.run.export import read_stored, stored_tensors
from onnxgrad_cli.training.run.integers import LIMITS

DEQUANTIZED = frozenset({("DequantizeLinear", 0), ("MatMulNBits", 1)})
"""Where a node reads integers that it makes floats of."""


@dataclass(frozen=True)
class Rounded:
    """What became of a matrix.

    Attributes:
        weight: what it is called.
        lost: how far it is from the sum of matrix and adapter, relative to the adapter, both as root mean squares: at 1
            as much was lost as the adapter has added.
    """

    weight: str
    lost: float


@dataclass
class _Grid:
    """A matrix of integers as floats of blocks.

    Attributes:
        integers: the integers, in the shape of the matrix.
        low, high: the least and the largest integer there is.
        scales: one for each block.
        zeros: the integer that stands for 0, one for each block.
        block: of each element of the matrix, the block it is in.
        store: makes of integers what the model stores.
    """

    integers: np.ndarray
    low: int
    high: int
    scales: np.ndarray
    zeros: np.ndarray
    block: np.ndarray
    store: Callable[[np.ndarray], np.ndarray]

    def floats(self, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return (integers - self.zeros[self.block]) * scales[self.block]

    @property
    def matrix(self) -> np.ndarray:
        """The floats that the integers stand for, float64."""
        return self.floats(self.integers, self.scales.astype(np.float64))

    def nearest(self, floats: np.ndarray, scales: np.ndarray) -> np.ndarray:
        steps = np.divide(floats, scales[self.block], where=scales[self.block] != 0, out=np.zeros_like(floats))
        return np.clip(np.rint(steps + self.zeros[self.block]), self.low, self.high)

    def widened(self, floats: np.ndarray) -> np.ndarray:
        """The scales with which the largest elements of each block are just within its range."""
        signs = np.where(self.scales == 0, 1.0, self.scales)
        steps = floats / signs[self.block]
        room = np.where(steps > 0, self.high - self.zeros[self.block], self.low - self.zeros[self.block])
        need = np.divide(steps, room, where=room != 0, out=np.zeros_like(steps))
        most = np.zeros(len(self.scales))
        np.maximum.at(most, self.block.ravel(), need.ravel())
        found = (signs * most).astype(self.scales.dtype)
        return np.where((found != 0) & np.isfinite(found), found, self.scales)


def requantize(
    model: ModelProto, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray], path: Path | None = None
) -> list[Rounded]:
    """Add adapters into matrices that a model stores as integers, and round what comes to the nearest integers.

    Args:
        model: the inference model; it is changed. What it stores of these matrices outside comes inside.
        adapters: as `of_integers` has them.
        values: their factors, by name.
        path: where the model was read from; external data are relative to it.

    Returns:
        How much each matrix has lost.

    Raises:
        UsageError: a matrix is stored in a form that can't be rounded anew, or is read by more than products.
        OnnxgradError: the factors don't fit the matrix.
    """
    graph = Graph(model)
    uses = graph.uses()
    own = {adapter.weight: adapter for adapter in adapters}
    stored = {name: tensor for tensor, name in stored_tensors(model.graph)}
    found: dict[str, Rounded] = {}
    there = places(model, own.keys())
    lacking = sorted(own.keys() - {place.weight for place in there})
    if lacking:
        raise _unfit(lacking[0], "no product of the model's own graph reads it")
    for place in there:
        if place.weight in found:
            continue
        nodes = _readers(uses, place.weight)
        grid = _grid(model, nodes[0], place.weight, stored, path)
        factors, before = place.of(own[place.weight], values), grid.matrix
        wanted = factors.added_to(before.T).T if place.reader.leads else factors.added_to(before)
        scales, integers = _rounded(grid, wanted)
        error, added = grid.floats(integers, scales.astype(np.float64)) - wanted, np.linalg.norm(wanted - before)
        found[place.weight] = Rounded(place.weight, float(np.linalg.norm(error) / (added or 1.0)))
        _replace(stored[place.weight], grid.store(integers))
        _store_scales(model, nodes, uses, stored, scales)
    graph.commit()
    return list(found.values())


def dequantized(model: ModelProto, place: Place, path: Path | None = None) -> np.ndarray:
    """The floats that a stored matrix of integers stands for, [out, in], float64.

    Args:
        model: the inference model.
        place: a product that reads the matrix.
        path: where the model was read from; external data are relative to it.

    Raises:
        UsageError: it is stored in a form that is not known.
    """
    stored = {name: tensor for tensor, name in stored_tensors(model.graph)}
    nodes = [node for node, at in Graph(model).uses()[place.weight] if (node.op_type, at) in DEQUANTIZED]
    if not nodes:
        raise _unfit(place.weight, "no node is known that makes floats of it")
    found = _grid(model, nodes[0], place.weight, stored, path).matrix
    return found.T if place.reader.leads else found.reshape(len(found), -1)


def _rounded(grid: _Grid, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and integers that come nearest to a matrix, block by block."""
    count = len(grid.scales)
    tried = []
    for scales in (grid.scales, grid.widened(wanted)):
        integers = grid.nearest(wanted, scales.astype(np.float64))
        error = (grid.floats(integers, scales.astype(np.float64)) - wanted) ** 2
        tried.append((scales, integers, np.bincount(grid.block.ravel(), error.ravel(), count)))
    (kept, kept_integers, kept_error), (wide, wide_integers, wide_error) = tried
    better = wide_error < kept_error
    return np.where(better, wide, kept), np.where(better[grid.block], wide_integers, kept_integers)


# -- what is read and written -----------------------------------------------------------------------------------------


def _readers(uses: Uses, weight: str) -> list[Node]:
    """The nodes that make floats of a matrix, or multiply with it; all alike, and nothing else reads it."""
    nodes = [node for node, _ in uses[weight]]
    first = nodes[0]
    kinds = {
        (node.op_type, tuple(node.input)[1:] if node.op_type == "DequantizeLinear" else tuple(node.input)[2:5])
        for node in nodes
    }
    known = first.op_type == "MatMulNBits" or (first.op_type == "DequantizeLinear" and is_standard(first.domain))
    looked_up = any(
        reader.node.op_type in LOOKUPS
        for node in nodes if node.op_type == "DequantizeLinear"
        for _, readers in views_of(uses, node.output[0]) for reader in readers
    )  # fmt: skip
    if not known or len(kinds) > 1 or looked_up:
        why = "rows of it are looked up" if looked_up else "nodes read it in several ways, or in one that is not known"
        raise _unfit(weight, why)
    return nodes


def _unfit(weight: str, why: str) -> UsageError:
    return UsageError(
        f"`merge`: the adapter of '{weight}' can't be rounded into it: {why}",
        "leave `merge` out, and it stands beside its product",
    )


def _grid(model: ModelProto, node: Node, weight: str, stored: Mapping[str, TensorProto], path: Path | None) -> _Grid:
    own = attributes_of(node)
    names = list(node.input)
    scale, zero, groups = (
        (names[2], _at(names, 3), _at(names, 4)) if node.op_type == "MatMulNBits" else (names[1], _at(names, 2), "")
    )
    missing = next((name for name in (scale, zero) if name and name not in stored), None)
    if groups or missing is not None:
        raise _unfit(weight, "its columns are in another order" if groups else f"'{missing}' is computed")
    arrays = read_stored(model, {weight, scale, zero}, path)
    make = _of_bits if node.op_type == "MatMulNBits" else _of_dequantized
    return make(own, arrays[weight], arrays[scale], arrays.get(zero))


def _at(names: Sequence[str], position: int) -> str:
    return names[position] if len(names) > position else ""


def _of_bits(own: Mapping[str, Any], packed: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> _Grid:
    """What MatMulNBits reads: [N, K] in blocks along K, several integers a byte, the first in the lowest bits."""
    size_out, size_in, bits, block = (int(own.get(name, 4)) for name in ("N", "K", "bits", "block_size"))
    blocks = -(-size_in // block)
    whole = unpacked(packed.reshape(size_out, -1), bits)[:, : blocks * block].astype(np.float64)
    if zero is None:
        zeros = np.full(size_out * blocks, 2.0 ** (bits - 1))
    elif zero.dtype == np.uint8:
        zeros = unpacked(zero.reshape(size_out, -1), bits)[:, :blocks].astype(np.float64).ravel()
    else:
        zeros = zero.astype(np.float64).ravel()
    of_block = np.repeat(np.arange(size_out * blocks).reshape(size_out, blocks), block, axis=1)[:, :size_in]

    def store(integers: np.ndarray) -> np.ndarray:
        full = whole.copy()
        full[:, :size_in] = integers
        return _packed(full.astype(np.uint8), bits).reshape(packed.shape)

    return _Grid(whole[:, :size_in], 0, 2**bits - 1, scale.ravel(), zeros, of_block, store)


def _packed(rows: np.ndarray, bits: int) -> np.ndarray:
    """The converse of `unpacked`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = rows.reshape(len(rows), -1, len(shifts)) << shifts
    return np.bitwise_or.reduce(parts, axis=-1)


def _of_dequantized(own: Mapping[str, Any], stored: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> _Grid:
    """What DequantizeLinear reads: one scale for all, for each entry of an axis, or for each block along it."""
    axis = int(own.get("axis", 1)) % stored.ndim
    blocks = spread(np.arange(scale.size).reshape(scale.shape), stored.shape, axis, int(own.get("block_size", 0)))
    of_block = np.broadcast_to(blocks, stored.shape)
    zeros = np.zeros(scale.size) if zero is None else zero.astype(np.float64).ravel()
    low, high = LIMITS[helper.np_dtype_to_tensor_dtype(stored.dtype)]

    def store(integers: np.ndarray) -> np.ndarray:
        return integers.astype(np.int32).astype(stored.dtype)

    return _Grid(stored.astype(np.float64), low, high, scale.ravel(), zeros, of_block, store)


def _replace(tensor: TensorProto, array: np.ndarray) -> None:
    found = numpy_helper.from_array(array, tensor.name)
    tensor.CopyFrom(found)


def _store_scales(
    model: ModelProto, nodes: Sequence[Node], uses: Uses, stored: Mapping[str, TensorProto], scales: np.ndarray
) -> None:
    """Write scales, under a name of their own where others read them too."""
    position = 2 if nodes[0].op_type == "MatMulNBits" else 1
    name = nodes[0].input[position]
    array = scales.reshape(tuple(stored[name].dims))
    if all(any(reader is node for node in nodes) for reader, _ in uses[name]):
        _replace(stored[name], array)
        return
    own = Graph(model).fresh(f"{nodes[0].input[position - 1]}_scale")
    model.graph.initializer.append(numpy_helper.from_array(array, own))
    for node in nodes:
        node.input[position] = own
