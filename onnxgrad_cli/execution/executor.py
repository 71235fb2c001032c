"""Run a model with numpy arrays on onnxruntime, or on onnx.reference if onnxruntime lacks a kernel.

`to_double` converts a model to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.execution import session
from onnxgrad_cli.execution.limits import limited, run_limited
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import captured, with_bodies
from onnxgrad_cli.ir.types import Arrays, element_type, is_external
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.targets.standard import to_standard

if TYPE_CHECKING:
    from onnx.reference.op_run import OpRun


class Executor:
    """Runs a model on onnxruntime, or on onnx.reference if onnxruntime lacks kernels for its types and attributes.

    Initializers that are also inputs are fed to onnxruntime, instead of being copied into the model of each session.

    Args:
        model: the model; external data are loaded.
        prefer: 'reference' uses onnx.reference without trying onnxruntime.
        threads: the number of threads of onnxruntime; None uses all.
        fallback: True uses onnx.reference if onnxruntime has no kernels, False raises onnxruntime's error.
        ops: Python implementations, for onnx.reference, of operators that both runtimes lack.

    Attributes:
        name: the name of the runtime.
        stored: the values of the initializers that are fed.
        by_reference: True if the runtime is onnx.reference.
    """

    def __init__(
        self, model: ModelProto, prefer: str = "onnxruntime", threads: int | None = 1, fallback: bool = True,
        ops: Sequence[type[OpRun]] = (),
    ) -> None:  # fmt: skip
        self._outputs = [output.name for output in model.graph.output]
        self._options: Callable[[], Any] | None = None
        self.stored: Arrays = {}
        self.by_reference = False
        if prefer == "onnxruntime" and not ops:
            runtime = session.load_onnxruntime()
            errors = runtime.capi.onnxruntime_pybind11_state
            few = session.OPTIMIZED_FOR_FEW_RUNS
            bare, stored = session.take_out(model, values_of_inputs(model, _FED), None)
            try:
                with limited():
                    opened = session.start_session(
                        bare, threads=threads, alternating=threads != 1, optimized=few, arena=False
                    )
                self._run, self.stored, self._options = session.array_run(opened), stored, runtime.RunOptions
                self.name = f"onnxruntime {runtime.__version__}"
                return
            except (errors.NotImplemented, errors.Fail) as error:  # no kernel, or the model is too new
                known = any(text in str(error) for text in ("not supported", "Current official support"))
                if not fallback or not (known or isinstance(error, errors.NotImplemented)):
                    raise
        from onnxgrad_cli.execution.reference import evaluator  # importing it takes longer than a small build

        self._run = evaluator(model, ops).run
        self.name, self.by_reference = "onnx.reference", True

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Return the model's outputs by name."""
        return dict(zip(self._outputs, run_limited(self._run, {**self.stored, **feeds}, self._options), strict=True))


_FED = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})
"""Element types of weights that are fed to onnxruntime as numpy arrays. bfloat16 is missing: numpy has no such type."""


def values_of_inputs(model: ModelProto, types: Container[int]) -> set[str]:
    """Return the inputs of a model whose value is stored as an initializer with one of these element types."""
    inputs = {value.name for value in model.graph.input}
    tensors = (tensor for tensor in model.graph.initializer if tensor.data_type in types and not is_external(tensor))
    return inputs.intersection(tensor.name for tensor in tensors)


def to_double(model: ModelProto) -> ModelProto:
    """Return a copy of a model that computes in float64 instead of float32, float16 or bfloat16."""
    double = copied(model)
    to_standard(double)
    if any(node.op_type == "MatMulNBits" for node in double.graph.node):
        write_out_few_bits(double)
    del double.graph.value_info[:]
    _widen(double.graph)
    for function in double.functions:
        _widen_function(function)
    _widen_stashes(double)
    return double


_NARROW = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_STAYS = {"Resize": 2, "Upsample": 1}
"""Operator -> the position of the input that is float32 by definition, and so must not be widened."""

_ELEMENT_TYPES = frozenset({"to", "dtype"})
"""Attributes whose value is the element type of an output."""


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _NARROW:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


_SCALES = {"DequantizeLinear": 1, "GatherBlockQuantized": 2}
"""Operator -> the position of the input that holds quantization scales, in float32 or narrower."""

_VIEWS = frozenset({"Reshape", "Slice"})
"""Operators that may lie between stored scales and the node that dequantizes with them."""


def _constant_scales(graph: GraphProto) -> set[str]:
    """Return the scales that are only used to dequantize. onnxruntime has no kernel for such a scale in float64.

    They are initializers, or are computed from initializers by `_VIEWS`.
    """
    made = {name for node in graph.node if node.op_type not in _VIEWS for name in node.output}
    fed = {value.name for value in (*graph.input, *graph.output)}
    scales, others = set[str](), {name for node in graph.node for name in captured(node)} | made | fed
    for node in reversed(graph.node):
        viewed = node.op_type in _VIEWS and node.output[0] in scales - others
        scale = 0 if viewed else _SCALES.get(node.op_type, -1)
        scales.update(node.input[scale : scale + 1] if scale >= 0 else ())
        others.update(name for at, name in enumerate(node.input) if at != scale)
    for node in graph.node:  # views of widened values are widened
        if node.op_type in _VIEWS and node.input[0] in others:
            others.update(node.output)
    return scales - others


def _widen(graph: GraphProto) -> None:
    stay = {name for node in graph.node if (at := _STAYS.get(node.op_type)) for name in node.input[at : at + 1]}
    scales = _constant_scales(graph)
    stay |= scales
    for tensor in graph.initializer:
        if tensor.name not in stay:
            _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        element = element_type(value.type)
        if element is not None and element.tensor_type.elem_type in _NARROW and value.name not in stay:
            element.tensor_type.elem_type = TensorProto.DOUBLE
    _widen_nodes(graph.node)
    if scales:
        refill(graph.node, (each for node in graph.node for each in _widened_after(node, scales)))


def _widened_after(node: NodeProto, scales: set[str]) -> list[NodeProto]:
    """Return the nodes that replace a node: itself and, if it dequantizes with a float32 scale, a Cast to float64."""
    at = _SCALES.get(node.op_type)
    if at is None or node.input[at] not in scales:
        return [node]
    narrow = deepcopy(node)
    return [narrow, _cast_to_double(narrow)]


def _cast_to_double(node: NodeProto) -> NodeProto:
    """Rename the output of a node, and return a Cast to float64 whose output has the old name."""
    name, node.output[0] = node.output[0], f"{node.output[0]}_narrow"
    return helper.make_node("Cast", [node.output[0]], [name], to=TensorProto.DOUBLE)


def _widen_function(function: FunctionProto) -> None:
    """Convert a function to float64. Values that come from its float attributes are float32, so a Cast follows them."""
    nodes: list[NodeProto] = []
    for node in function.node:
        nodes.append(node)
        given = [a.type for a in node.attribute if a.ref_attr_name]
        if node.op_type == "Constant" and (AttributeProto.FLOAT in given or AttributeProto.FLOATS in given):
            nodes.append(_cast_to_double(node))
    refill(function.node, nodes)
    _widen_nodes(function.node)
    for attribute in function.attribute_proto:
        if attribute.type == AttributeProto.TENSOR:
            _widen_tensor(attribute.t)


def _widen_nodes(nodes: Iterable[NodeProto]) -> None:
    """Change the element types and tensors in the attributes of nodes to float64."""
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:  # float32 zeros, by default
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        if node.op_type == "SequenceEmpty" and not node.attribute:
            node.attribute.append(helper.make_attribute("dtype", TensorProto.DOUBLE))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.ref_attr_name:
                continue
            elif node.op_type == "Constant" and attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
                wide = np.asarray(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(wide)))
            elif attribute.type == AttributeProto.GRAPH:
                _widen(attribute.g)
            elif attribute.name in _ELEMENT_TYPES and attribute.i in _NARROW:
                attribute.i = TensorProto.DOUBLE


STASHES = 21
"""The first opset at which the function body of GroupNormalization computes in the type that `stash_type` gives.

Other operators with this attribute, such as LayerNormalization, keep it: onnxruntime has float64 kernels for them.
"""


def _widen_stashes(model: ModelProto) -> None:
    if any(entry.version >= STASHES for entry in model.opset_import if is_standard(entry.domain)):
        for node in with_bodies(model.graph.node):
            if node.op_type == "GroupNormalization":
                kept = (attribute for attribute in node.attribute if attribute.name != "stash_type")
                refill(node.attribute, [*kept, helper.make_attribute("stash_type", TensorProto.DOUBLE)])


def write_out_few_bits(model: ModelProto) -> None:
    """Replace, in place, each MatMulNBits whose weight is stored in the model by a MatMul."""
    fed = {value.name for value in model.graph.input}
    stored = {t.name: t for t in model.graph.initializer if t.name not in fed and not is_external(t)}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        in_order = node.op_type == "MatMulNBits" and not any(node.input[4:5])
        if in_order and all(name in stored for name in filter(None, node.input[1:4])):
            nodes += _written_out(model, node, stored)
        else:
            nodes.append(node)
    refill(model.graph.node, nodes)


def _written_out(model: ModelProto, node: NodeProto, stored: dict[str, TensorProto]) -> list[NodeProto]:
    name, bias = f"{node.output[0]}_matrix", node.input[5] if len(node.input) > 5 else ""
    packed, scales, *zeros = (numpy_helper.to_array(stored[each]) for each in node.input[1:4] if each)
    given = {attribute.name: attribute.i for attribute in node.attribute}
    matrix = _matrix(packed, scales, *zeros, **given)
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(matrix.T), name))
    product = f"{node.output[0]}_product" if bias else node.output[0]
    nodes = [helper.make_node("MatMul", [node.input[0], name], [product], node.name)]
    return nodes + ([helper.make_node("Add", [product, bias], node.output)] if bias else [])


def _matrix(
    packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, *,
    K: int, N: int, bits: int = 4, block_size: int = 128, **_: int,
) -> np.ndarray:  # fmt: skip
    """Return the dequantized weight [N, K] of a MatMulNBits in float64. The keywords are the operator's attributes."""
    blocks = -(-K // block_size)
    steps = unpacked(packed.reshape(N, -1), bits)
    if zeros is None:
        shift = np.full((N, blocks), 2 ** (bits - 1))
    else:
        shift = unpacked(zeros.reshape(N, -1), bits)[:, :blocks] if zeros.dtype == np.uint8 else zeros
    scale, zero = (each.reshape(N, blocks, 1).astype(np.float64) for each in (scales, shift))
    return ((steps.reshape(N, blocks, block_size) - zero) * scale).reshape(N, -1)[:, :K]


def unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `bits` bits that are packed in rows of bytes, beginning with the low bits of a byte."""
    numbers = (rows[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    return numbers.reshape(len(rows), -1)
