"""Merge adapters into matrices that are stored as integers, and quantize the sums again, which loses precision.

Zero points don't change. For each block, two scales are tried: the old one, and the smallest with which all sums lie in
the range of the integers. The one with the smaller error is used. Sources: the operator pages of MatMulNBits
(com.microsoft) and DequantizeLinear. `measured` compares the outputs with the outputs of a model that computes the
adapters separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.adapters.places import LOOKUPS, AdapterSite, places
from onnxgrad_cli.checkpoints.integers import LIMITS
from onnxgrad_cli.checkpoints.stored_weights import read_stored, stored_tensors
from onnxgrad_cli.errors import OnnxgradError, UsageError, conflict
from onnxgrad_cli.execution.executor import Executor, unpacked
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.adapters import views_of
from onnxgrad_cli.passes.stored_integers import Uses, spread
from onnxgrad_cli.verification.feeds import DescribedModel, first_run
from onnxgrad_cli.verification.original_model import with_weights

SCALES = {"DequantizeLinear": 1, "MatMulNBits": 2}
"""Operator that dequantizes -> the position of its input with the scales. The integers are the input before it."""


@dataclass
class _Grid:
    """A matrix that is quantized in blocks.

    Attributes:
        integers: the quantized elements, in the shape of the matrix.
        low, high: the smallest and the largest integer of the type.
        scales: the scale of each block.
        zeros: the zero point of each block.
        block: for each element, the index of its block, in the shape of the matrix.
        store: converts integers to the array that the model stores.
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
        """The dequantized matrix, float64."""
        return self.floats(self.integers, self.scales.astype(np.float64))

    def nearest(self, floats: np.ndarray, scales: np.ndarray) -> np.ndarray:
        steps = np.divide(floats, scales[self.block], where=scales[self.block] != 0, out=np.zeros_like(floats))
        return np.clip(np.rint(steps + self.zeros[self.block]), self.low, self.high)

    def widened(self, floats: np.ndarray) -> np.ndarray:
        """Return, for each block, the smallest scale with which no element leaves the range of the integers."""
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
) -> dict[str, float]:
    """Add adapters to matrices that a model stores as integers, and quantize the sums.

    Args:
        model: the inference model, which is changed. Changed matrices that were external data are then stored in the
            model.
        adapters: adapters of matrices that are stored as integers; see `of_integers`.
        values: the LoRA matrices of the adapters, by name.
        path: the file that the model was read from; external data are relative to it.

    Returns:
        Matrix -> its rounding error: the root mean square (RMS) of the error, divided by the RMS of the change by the
        adapter. At 1 the error is as large as the change.

    Raises:
        UsageError: a matrix is stored in a form that can't be quantized again, or a node other than a matrix product
            reads it.
        OnnxgradError: the LoRA matrices don't fit the matrix.
    """
    graph = Graph(model)
    uses = graph.uses()
    own = {adapter.weight: adapter for adapter in adapters}
    stored = {name: tensor for tensor, name in stored_tensors(model.graph)}
    lost: dict[str, float] = {}
    there = places(model, own.keys())
    lacking = sorted(own.keys() - {place.weight for place in there})
    if lacking:
        raise _unfit(lacking[0], "no product of the main graph reads it")
    for place in there:
        if place.weight in lost:
            continue
        nodes = _readers(uses, place.weight)
        grid = _grid(model, nodes[0], place.weight, stored, path)
        factors, before = place.of(own[place.weight], values), grid.matrix
        wanted = factors.added_to(before.T).T if place.reader.leads else factors.added_to(before)
        scales, integers = _rounded(grid, wanted)
        error, added = grid.floats(integers, scales.astype(np.float64)) - wanted, np.linalg.norm(wanted - before)
        lost[place.weight] = float(np.linalg.norm(error) / (added or 1.0))
        stored[place.weight].CopyFrom(numpy_helper.from_array(grid.store(integers), place.weight))
        _store_scales(model, nodes, uses, stored, scales)
    graph.commit()
    return lost


def dequantized(model: ModelProto, place: AdapterSite, path: Path | None = None) -> np.ndarray:
    """Dequantize a stored matrix. Return it as float64 [out, in].

    Args:
        model: the inference model.
        place: a matrix product that reads the matrix.
        path: the file that the model was read from; external data are relative to it.

    Raises:
        UsageError: the matrix is stored in an unknown form.
    """
    stored = {name: tensor for tensor, name in stored_tensors(model.graph)}
    nodes = [node for node, at in Graph(model).uses()[place.weight] if SCALES.get(node.op_type) == at + 1]
    if not nodes:
        raise _unfit(place.weight, "no known node dequantizes it")
    found = _grid(model, nodes[0], place.weight, stored, path).matrix
    return found.T if place.reader.leads else found.reshape(len(found), -1)


def _rounded(grid: _Grid, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix: for each block use the old or the widened scale, whichever has less error.

    Return the scales (blocks,), and the integers in the shape of the matrix.
    """
    count = len(grid.scales)
    tried = []
    for scales in (grid.scales, grid.widened(wanted)):
        integers = grid.nearest(wanted, scales.astype(np.float64))
        error = (grid.floats(integers, scales.astype(np.float64)) - wanted) ** 2
        tried.append((scales, integers, np.bincount(grid.block.ravel(), error.ravel(), count)))
    (kept, kept_integers, kept_error), (wide, wide_integers, wide_error) = tried
    better = wide_error < kept_error
    return np.where(better, wide, kept), np.where(better[grid.block], wide_integers, kept_integers)


# -- read and write quantized matrices --------------------------------------------------------------------------------


def _readers(uses: Uses, weight: str) -> list[Node]:
    """Return the nodes that dequantize a matrix, or multiply by it and dequantize it (MatMulNBits).

    Raises:
        UsageError: the nodes differ in operator, scales or zero points; their operator is unknown; or a node looks up
            rows of the matrix.
    """
    nodes = [node for node, _ in uses[weight]]
    known = all(
        node.op_type == "MatMulNBits" or (node.op_type == "DequantizeLinear" and is_standard(node.domain))
        for node in nodes
    )
    lookups = [
        reader.node
        for node in nodes if node.op_type == "DequantizeLinear"
        for _, readers in views_of(uses, node.output[0]) for reader in readers if reader.node.op_type in LOOKUPS
    ]  # fmt: skip
    if not known or lookups or len({(node.op_type, *_scaling(node)) for node in nodes}) > 1:
        lookup = f"{lookups[0].op_type} '{lookups[0].output[0]}' looks up its rows" if lookups else ""
        why = lookup or "nodes read it in several ways, or in an unknown way"
        raise _unfit(weight, why)
    return nodes


def _unfit(weight: str, why: str) -> UsageError:
    hint = "leave `merge` out: the model then computes the adapter separately"
    return conflict(f"`merge`: the adapter of '{weight}' can't be merged into this weight: {why}", hint)


def _grid(model: ModelProto, node: Node, weight: str, stored: Mapping[str, TensorProto], path: Path | None) -> _Grid:
    scale, zero, groups = _scaling(node)
    missing = next((name for name in (scale, zero) if name and name not in stored), None)
    if groups or missing is not None:
        raise _unfit(weight, "its columns are in another order" if groups else f"'{missing}' is computed by the model")
    arrays = read_stored(model, {weight, scale, zero}, path)
    make = _of_bits if node.op_type == "MatMulNBits" else _of_dequantized
    return make(attributes_of(node), arrays[weight], arrays[scale], arrays.get(zero))


def _scaling(node: Node) -> list[str]:
    """Return the names of the scales, the zero points and the group indices of a node; "" if absent."""
    start = SCALES[node.op_type]
    return [*node.input, "", "", ""][start : start + 3]


def _of_bits(own: Mapping[str, Any], packed: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> _Grid:
    """Unpack the matrix of a MatMulNBits, [N, K].

    The blocks lie along K. The first integer in a byte has the lowest bits.
    """
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
    """Pack integers into bytes; the inverse of `unpacked`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = rows.reshape(len(rows), -1, len(shifts)) << shifts
    return np.bitwise_or.reduce(parts, axis=-1)


def _of_dequantized(own: Mapping[str, Any], stored: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> _Grid:
    """Read the matrix of a DequantizeLinear.

    The matrix has one scale, a scale per index of an axis, or a scale per block along an axis.
    """
    axis = int(own.get("axis", 1)) % stored.ndim
    blocks = spread(np.arange(scale.size).reshape(scale.shape), stored.shape, axis, int(own.get("block_size", 0)))
    of_block = np.broadcast_to(blocks, stored.shape)
    zeros = np.zeros(scale.size) if zero is None else zero.astype(np.float64).ravel()
    low, high = LIMITS[helper.np_dtype_to_tensor_dtype(stored.dtype)]

    def store(integers: np.ndarray) -> np.ndarray:
        return integers.astype(np.int32).astype(stored.dtype)

    return _Grid(stored.astype(np.float64), low, high, scale.ravel(), zeros, of_block, store)


def _store_scales(
    model: ModelProto, nodes: Sequence[Node], uses: Uses, stored: Mapping[str, TensorProto], scales: np.ndarray
) -> None:
    """Store new scales for `nodes`.

    If other nodes read the old scales, too, store the new ones as a new initializer.
    """
    position = SCALES[nodes[0].op_type]
    name = nodes[0].input[position]
    array = scales.reshape(tuple(stored[name].dims))
    if all(any(reader is node for node in nodes) for reader, _ in uses[name]):
        stored[name].CopyFrom(numpy_helper.from_array(array, name))
        return
    own = Graph(model).fresh(f"{nodes[0].input[position - 1]}_scale")
    model.graph.initializer.append(numpy_helper.from_array(array, own))
    for node in nodes:
        node.input[position] = own


@dataclass(frozen=True)
class OutputDeviation:
    """The deviation of an output from the same output of the model that computes the adapters separately.

    A deviation is the root mean square of the difference, divided by the root mean square of the latter model's output.

    Attributes:
        output: the name of the output.
        lost: the deviation of the model with merged adapters.
        moved: the deviation of the model without adapters.
    """

    output: str
    lost: float
    moved: float

    def __str__(self) -> str:
        return f"rounding changes '{self.output}' by {self.lost:.2%} of its size, the adapters by {self.moved:.2%}"


def measured(
    base: ModelProto, beside: ModelProto, rounded: ModelProto, path: Path | None, data: Mapping[str, np.ndarray] | None
) -> list[OutputDeviation]:
    """Run three versions of a model on the same data, and measure the deviations of each float output.

    Args:
        base: the model without adapters.
        beside: the model that computes the adapters separately, without rounding.
        rounded: the model with the adapters merged into its integer matrices.
        path: the file that the model was read from; external data are relative to it.
        data: input -> array. The values of other inputs are drawn at random.

    Raises:
        OnnxgradError: the model does not run on these data.
    """
    right = with_weights(beside, path)
    run = Executor(right)
    described = DescribedModel.of_inference(right)
    try:
        feeds, wanted, _ = first_run(run, described, np.random.default_rng(0), dict(data or {}), {})
    except Exception as error:  # the executors' exceptions share no base class
        message = f"the error of merging can't be measured: the model does not run on these data: {str(error).strip()}"
        raise OnnxgradError(message, "use `test_data` to pass data that the model can run on") from None
    feeds = {name: feeds[name] for name in described.own}
    found, before = (Executor(with_weights(model, path))(feeds) for model in (rounded, base))
    floats = [name for name, array in wanted.items() if array.size and array.dtype.kind == "f"]
    return [OutputDeviation(name, _off(found, wanted, name), _off(before, wanted, name)) for name in floats]


def _off(found: Arrays, wanted: Arrays, name: str) -> float:
    size = float(np.linalg.norm(wanted[name].astype(np.float64)))
    return float(np.linalg.norm(found[name].astype(np.float64) - wanted[name])) / (size or 1.0)
