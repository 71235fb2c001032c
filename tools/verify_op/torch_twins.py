"""Map ONNX operators to functions of PyTorch. Each mapping is an expression that is shown and evaluated.

An expression uses these names:

- the operator's inputs and attributes, by their names in the schema. Absent ones are None. The last input of a variadic
  operator is a list.
- `torch` and its `F`.
- `given(value, default)`, which returns the default if the value is None.
- `dims`: the axes of a reduction.
- `pad`: the padding in the form of PyTorch's pools and convolutions.
- `outputs`: the number of outputs of the node.

An expression is only used for a node if it computes the same value as the node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx.defs import OpSchema

from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import Arrays
from tools.verify_op.examples import Example

SAME = (
    "Abs Acos Acosh Add Asin Asinh Atan Atanh Ceil Cos Cosh Det Div Erf Exp Floor Log MatMul Mul Pow "
    "Reciprocal Round Sigmoid Sign Sin Sinh Sqrt Sub Tan Tanh"
).split()
"""Operators that have the same name and operands in torch."""

EXPRESSIONS = {
    "AffineGrid": "F.affine_grid(theta, size.tolist(), bool(align_corners))",
    "Attention": "F.scaled_dot_product_attention(Q, K, V, attn_mask, 0.0, bool(is_causal), scale=scale, "
    "enable_gqa=True)",
    "AveragePool": "getattr(F, f'avg_pool{X.ndim - 2}d')"
    "(X, kernel_shape, strides or 1, pad, bool(ceil_mode), bool(count_include_pad))",
    "BatchNormalization": "((X.movedim(1, -1) - input_mean) / torch.sqrt(input_var + epsilon) * scale + B)"
    ".movedim(-1, 1)",
    "Celu": "F.celu(X, alpha)",
    "Clip": "torch.clamp(input, min, max)",
    "Col2Im": "F.fold(input, image_shape.tolist(), block_shape.tolist(), dilations or 1, pad, strides or 1)",
    "Compress": "torch.index_select(input, axis, condition.nonzero()[:, 0])",
    "Concat": "torch.cat(inputs, axis)",
    "Conv": "getattr(F, f'conv{X.ndim - 2}d')(X, W, B, strides or 1, pad, dilations or 1, group)",
    "ConvTranspose": "getattr(F, f'conv_transpose{X.ndim - 2}d')"
    "(X, W, B, strides or 1, pad, output_padding or 0, group, dilations or 1)",
    "CumSum": "torch.cumsum(x, int(axis))",
    "CumProd": "torch.cumprod(x, int(axis))",
    "DepthToSpace": "F.pixel_shuffle(input, blocksize)",
    "Dropout": "F.dropout(data, float(given(ratio, 0.5)), bool(training_mode))",
    "Einsum": "torch.einsum(equation, *Inputs)",
    "Elu": "F.elu(X, alpha)",
    "Expand": "input.expand(torch.broadcast_shapes(input.shape, shape.tolist()))",
    "Flatten": "input.reshape(math.prod(input.shape[:axis]), -1)",
    "Gather": "data[(slice(None),) * (axis % data.ndim) + (indices,)]",
    "GatherElements": "torch.gather(data, axis, indices % data.shape[axis])",
    "GatherND": "data[tuple(indices.movedim(-1, 0))]",
    "Gelu": "F.gelu(X, approximate=approximate)",
    "Gemm": "alpha * (A.T if transA else A) @ (B.T if transB else B) + beta * given(C, 0)",
    "GlobalAveragePool": "torch.mean(X, list(range(2, X.ndim)), keepdim=True)",
    "GlobalMaxPool": "torch.amax(X, list(range(2, X.ndim)), keepdim=True)",
    "GridSample": "F.grid_sample(X, grid, {'linear': 'bilinear', 'cubic': 'bicubic'}.get(mode, mode), padding_mode, "
    "bool(align_corners))",
    "GroupNormalization": "F.group_norm(X, num_groups, scale, bias, epsilon)",
    "HardSigmoid": "torch.clamp(alpha * X + beta, 0, 1)",
    "HardSwish": "F.hardswish(X)",
    "Identity": "torch.clone(input)",
    "InstanceNormalization": "F.instance_norm(input, None, None, scale, B, eps=epsilon)",
    "LRN": "F.local_response_norm(X, size, alpha, beta, bias)",
    "LayerNormalization": "F.layer_norm(X, X.shape[axis:], Scale, B, epsilon)",
    "LeakyRelu": "F.leaky_relu(X, alpha)",
    "LogSoftmax": "F.log_softmax(input, axis)",
    "LpNormalization": "F.normalize(input, p, axis)",
    "Max": "reduce(torch.maximum, data_0)",
    "MaxPool": "getattr(F, f'max_pool{X.ndim - 2}d')"
    "(X, kernel_shape, strides or 1, pad, dilations or 1, bool(ceil_mode))",
    "Mean": "reduce(torch.add, data_0) / len(data_0)",
    "Min": "reduce(torch.minimum, data_0)",
    "Mish": "F.mish(X)",
    "Mod": "torch.fmod(A, B)",
    "Neg": "torch.neg(X)",
    "NegativeLogLikelihoodLoss": "F.nll_loss(input, target, weight, ignore_index=given(ignore_index, -100), "
    "reduction=reduction)",
    "PRelu": "torch.where(X > 0, X, slope * X)",
    "Pad": "F.pad(data - given(constant_value, 0), pads.reshape(2, -1).T.flip(0).ravel().tolist(), mode) "
    "+ given(constant_value, 0)",
    "RMSNormalization": "F.rms_norm(X, X.shape[axis:], scale, epsilon)",
    "ReduceL1": "torch.linalg.vector_norm(data, 1, dims, bool(keepdims))",
    "ReduceL2": "torch.linalg.vector_norm(data, 2, dims, bool(keepdims))",
    "ReduceLogSum": "torch.log(torch.sum(data, dims, bool(keepdims)))",
    "ReduceLogSumExp": "torch.logsumexp(data, dims, bool(keepdims))",
    "ReduceMax": "torch.amax(data, dims, bool(keepdims))",
    "ReduceMean": "torch.mean(data, dims, bool(keepdims))",
    "ReduceMin": "torch.amin(data, dims, bool(keepdims))",
    "ReduceProd": "reduce(lambda x, axis: torch.prod(x, axis, True), dims, data)",
    "ReduceSum": "torch.sum(data, dims, bool(keepdims))",
    "ReduceSumSquare": "torch.sum(torch.square(data), dims, bool(keepdims))",
    "Relu": "torch.relu(X)",
    "Reshape": "torch.reshape(data, shape.tolist())",
    "ScatterElements": "torch.scatter(data, axis, indices % data.shape[axis], updates)",
    "ScatterND": "torch.index_put(data, tuple(indices.movedim(-1, 0)), updates, reduction == 'add')",
    "Selu": "gamma * F.elu(X, alpha)",
    "Shrink": "(F.softshrink if bias else F.hardshrink)(input, lambd)",
    "Softmax": "F.softmax(input, axis)",
    "SoftmaxCrossEntropyLoss": "F.cross_entropy(scores, labels, weights, "
    "ignore_index=given(ignore_index, -100), reduction=reduction)",
    "Softplus": "F.softplus(X)",
    "Softsign": "F.softsign(input)",
    "SpaceToDepth": "F.pixel_unshuffle(input, blocksize)",
    "Split": "torch.split(input, -(-input.shape[axis] // outputs) if split is None else split.tolist(), axis)",
    "Squeeze": "torch.squeeze(data, dims)",
    "Sum": "reduce(torch.add, data_0)",
    "Swish": "X * torch.sigmoid(alpha * X)",
    "ThresholdedRelu": "F.threshold(X, alpha, 0.0)",
    "Tile": "torch.tile(input, repeats.tolist())",
    "TopK": "torch.topk(X, int(K), axis, bool(largest), bool(sorted))",
    "Transpose": "torch.permute(data, perm or list(range(data.ndim))[::-1])",
    "Trilu": "(torch.triu if upper else torch.tril)(input, int(given(k, 0)))",
    "Unsqueeze": "reduce(torch.unsqueeze, sorted(axes.tolist()), data)",
    "Where": "torch.where(condition, X, Y)",
}
"""Operator -> the PyTorch expression for it: a call of one function, or a short expression of several."""


class Twin:
    """An example, computed by PyTorch.

    Attributes:
        expression: the PyTorch expression for the operator.
        values: names in the expression -> their values, for names that are not tensors.
        tensors: names in the expression -> names of the node's inputs, for tensors.
        outputs: the outputs of the node that the expression computes.
    """

    def __init__(self, example: Example, outputs: Arrays) -> None:
        """Evaluate the expression.

        Args:
            example: the node and the point.
            outputs: the outputs of the node at this point.

        Raises:
            UsageError: PyTorch is not installed.
            UnsupportedError: the operator has no mapping, or the mapping doesn't cover these attributes.
        """
        try:
            import torch
        except ImportError:
            raise UsageError("PyTorch is not installed", "pip install 'torch>=2.13', or use --against math") from None
        self._torch = torch
        self._example = example
        self.expression = expression_of(example.node.op_type, example.node.domain)
        self._leaves = {n: torch.tensor(x, requires_grad=n in example.point) for n, x in example.values.items()}
        named = _named(example)
        used = set(re.findall(r"\w+", self.expression))
        self.tensors = {name: x for name, x in named.tensors.items() if name in used}
        self.values = {name: x for name, x in named.values.items() if name in used}
        leaves = {name: self._leaf(x) for name, x in named.tensors.items()}
        names = {**named.values, **leaves, "torch": torch, "F": torch.nn.functional, **HELPERS}
        try:
            result = eval(self.expression, names)  # the expression is a constant of this module
        except Exception as error:  # PyTorch raises several types for arguments that it does not support
            raise _differs(example, str(error).strip().splitlines()[0]) from error
        results = result if isinstance(result, (tuple, list)) else [result]
        self._results = dict(zip(example.node.output, results, strict=False))
        for name, y in self._results.items():
            if name in outputs and not _equal(y.detach().numpy(), outputs[name]):
                raise _differs(example, f"it computes another '{name}'")
        self.outputs = [name for name in self._results if name in outputs]

    def _leaf(self, name: str | list[str] | None) -> Any:
        if isinstance(name, list):
            return [self._leaf(each) for each in name]
        return None if name is None else self._leaves[name]

    def backward(self, cotangents: Arrays) -> Arrays:
        """Return the gradient of each input from cotangents of `outputs`, or zeros if PyTorch has no gradient."""
        pairs = [(self._results[n], self._torch.tensor(np.asarray(c))) for n, c in cotangents.items()]
        pairs = [(y, c.to(y.dtype)) for y, c in pairs if y.requires_grad]
        if pairs:
            self._torch.autograd.backward([y for y, _ in pairs], grad_tensors=[c for _, c in pairs])
        found = {name: self._leaves[name].grad for name in self._example.point}
        zeros = {name: np.zeros_like(x) for name, x in self._example.point.items()}
        return {name: zeros[name] if g is None else g.numpy() for name, g in found.items()}


def expression_of(op_type: str, domain: str = "") -> str:
    """Return the PyTorch expression for an operator.

    Raises:
        UnsupportedError: the operator has no mapping.
    """
    if not domain and op_type in EXPRESSIONS:
        return EXPRESSIONS[op_type]
    if not domain and op_type in SAME:
        operands = ", ".join(parameter.name for parameter in onnx.defs.get_schema(op_type).inputs)
        return f"torch.{'linalg.' if op_type == 'Det' else ''}{op_type.lower()}({operands})"
    raise UnsupportedError(f"{op_type} has no mapping to one function of PyTorch", hint="use --against math")


def _differs(example: Example, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the PyTorch expression for {example.node.op_type} does not compute {example.name}: {why}",
        hint="use another example with --case or --input, or --against math",
    )


def _equal(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and bool(np.allclose(found, expected, 1e-5, 1e-6, equal_nan=True))


@dataclass(frozen=True)
class _Named:
    """The names in an expression. Tensors are given by the names of the node's inputs, other names by their values."""

    tensors: dict[str, Any]
    values: dict[str, Any]


def _named(example: Example) -> _Named:
    """Return the values of the names in an expression for the node of an example.

    Inputs and attributes that only newer versions of the operator have are None. If a name is an input in one version
    and an attribute in another, the attribute is used.
    """
    node = example.node
    opset = next(entry.version for entry in example.model.opset_import if not entry.domain)
    newest, schema = onnx.defs.get_schema(node.op_type), onnx.defs.get_schema(node.op_type, opset)
    tensors = {**{parameter.name: None for parameter in newest.inputs}, **_inputs(node, schema)}
    values = _attributes(node, schema)
    pad = _pad(values.get("pads"), values.get("auto_pad"))
    made = {"outputs": len(node.output), "dims": _dims(example, tensors, values), "pad": pad}
    absent = {name: None for name in newest.attributes if name not in values and name not in tensors}
    return _Named({n: x for n, x in tensors.items() if n not in values}, {**made, **absent, **values})


def _inputs(node: NodeProto, schema: OpSchema) -> dict[str, str | list[str] | None]:
    """Return the inputs of a node by their names in the schema: None for an absent input, a list for a variadic one."""
    given = [name or None for name in node.input]
    inputs: dict[str, Any] = {p.name: given[i] if i < len(given) else None for i, p in enumerate(schema.inputs)}
    if schema.inputs[-1].option == OpSchema.FormalParameterOption.Variadic:
        inputs[schema.inputs[-1].name] = given[len(schema.inputs) - 1 :]
    return inputs


def _attributes(node: NodeProto, schema: OpSchema) -> dict[str, Any]:
    """Return the values of all attributes in the schema: from the node, or the default, or None."""
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    values = {name: helper.get_attribute_value(default) if default.type else None for name, default in defaults.items()}
    values |= attributes_of(node)
    return {name: x.decode() if isinstance(x, bytes) else x for name, x in values.items()}


def _dims(example: Example, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> list[int]:
    """Return the axes of a reduction from the input or attribute `axes`, or all axes if neither is given."""
    constants = example.values
    axes = constants[tensors["axes"]] if tensors.get("axes") else values.get("axes")
    return list(range(constants[example.node.input[0]].ndim)) if axes is None else np.ravel(axes).tolist()


def _pad(pads: Any, auto: Any) -> Any:
    """Return padding in PyTorch's form, if it is equal at both ends. PyTorch raises an error for any other padding."""
    if auto not in (None, "NOTSET", "VALID"):
        return auto
    half = len(pads or ()) // 2
    return 0 if not pads else pads[:half] if pads[:half] == pads[half:] else pads


HELPERS = {"math": math, "reduce": reduce, "given": lambda value, default: default if value is None else value}
"""More names that an expression may use."""
