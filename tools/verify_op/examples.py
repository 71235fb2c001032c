"""Examples of an operator: one node, a value for each of its inputs, and the expected outputs.

Published examples are the node tests in the onnx package, so neither the nodes nor the numbers come from onnxgrad.
Other examples are made from the inputs and attributes that a user gives, with random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.execution.kernels import newest_loaded
from onnxgrad_cli.ir.dialects import checker_error
from onnxgrad_cli.ir.types import HALVES, Arrays, dtype_of, is_float
from onnxgrad_cli.ir.weightless_copy import copied

LARGEST = 10_000_000
"""Largest number of entries in the Jacobian of an example. Larger Jacobians take minutes and are too long to read."""


@dataclass(frozen=True)
class Example:
    """A model of one node at a point.

    Attributes:
        name: the name of the published test, or a description of the random numbers.
        model: the model. Its inputs are the float inputs of the node; the other inputs are initializers.
        point: a value for each input of the model.
        expected: the published outputs; empty for a made example.
    """

    name: str
    model: ModelProto
    point: Arrays
    expected: Arrays

    @property
    def node(self) -> NodeProto:
        """The node."""
        return self.model.graph.node[0]

    @property
    def values(self) -> Arrays:
        """The values of all inputs of the node, including constants."""
        return {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer} | self.point

    @property
    def entries(self) -> int:
        """The number of entries in the Jacobian of all published float outputs with respect to all float inputs."""
        floats = [v.name for v in self.model.graph.output if is_float(v.type)]
        return sum(x.size for x in self.point.values()) * sum(np.size(self.expected[name]) for name in floats)

    def elsewhere(self) -> Example:
        """Return the same node at a point nearer to zero. Signs, zeros and infinities are kept."""
        rng = np.random.default_rng(0)
        moved = {n: np.asarray(x * rng.uniform(0.9, 1.0, x.shape), x.dtype) for n, x in self.point.items()}
        return replace(self, name=f"{self.name}, its inputs times 0.9 to 1", point=moved, expected={})


@cache
def published_cases(file: str) -> list[Any]:
    """Return the test cases of one file of onnx.backend.test.case.node.

    Running the file appends its cases to a global list. The list is replaced while the file runs.
    """
    published = _published()
    aside = published._NodeTestCases, published._existing_names, published._TargetOpType
    published._NodeTestCases, published._existing_names, published._TargetOpType = [], {}, None
    spec = find_spec(f"{published.__name__}.{file}")
    assert spec is not None and spec.loader is not None
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module_from_spec(spec))
        return published._NodeTestCases
    finally:
        published._NodeTestCases, published._existing_names, published._TargetOpType = aside


def published_examples(op_type: str, domain: str = "") -> list[Example]:
    """Return the published examples of an operator with a float input and a float output, in the order of files."""
    folder = Path(next(iter(_published().__path__)))
    files = [file.stem for file in sorted(folder.glob("*.py")) if f'"{op_type}"' in file.read_text("utf-8")]
    return [example for file in files for case in published_cases(file) for example in _example(case, op_type, domain)]


def made_examples(
    op_type: str,
    domain: str,
    inputs: Sequence[tuple[int, ...] | np.ndarray | None],
    attributes: Mapping[str, object],
    seed: int,
) -> list[Example]:
    """Return two examples of a node that a user described, with different random numbers.

    Args:
        op_type, domain: the operator.
        inputs: for each input a shape of random numbers, a constant array, or None if the input is absent.
        attributes: the attributes by name.
        seed: the seed of the random numbers. They are multiples of 1/64, so that differences of linear operators are
            exact.

    Raises:
        UsageError: the operator doesn't have an attribute or takes another number of inputs, or the node is invalid.
    """
    schema = _schema(op_type, domain)
    names = _input_names(schema, op_type, len(inputs))
    given = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    shapes = {name: x for name, x in given.items() if isinstance(x, tuple)}
    if not shapes:
        raise UsageError("all inputs are constants: nothing is left to differentiate by", "give one as a shape, as 2,3")
    constants = {name: np.asarray(x) for name, x in given.items() if not isinstance(x, tuple)}
    node = helper.make_node(op_type, [n if n in given else "" for n in names], _output_names(schema), domain=domain)
    node.attribute.extend(_attribute(schema, op_type, *pair) for pair in attributes.items())
    model = _model_of(node, shapes, constants)
    rng = np.random.default_rng(seed)
    drawn = [{name: np.round(64 * rng.normal(0, 2, shape)) / 64 for name, shape in shapes.items()} for _ in range(2)]
    points = [{name: np.asarray(x, np.float32) for name, x in point.items()} for point in drawn]
    return [Example(f"random numbers of seed {seed}", model, point, {}) for point in points]


def _published() -> Any:
    from onnx.backend.test.case import node

    return node


def _example(case: Any, op_type: str, domain: str) -> Iterator[Example]:
    """Yield the example of a published case if its model is a single node of the operator with float operands."""
    graph = case.model.graph
    values = [*graph.input, *graph.output]
    if not _is_of(graph.node, op_type, domain) or not all(value.type.HasField("tensor_type") for value in values):
        return
    inputs, results = ([_array(x) for x in data] for data in case.data_sets[0])
    expected = {value.name: x for value, x in zip(graph.output, results, strict=True)}
    example = Example(case.name, *_constants_apart(case.model, inputs), expected)
    halves = any(dtype_of(value.type) in HALVES for value in values)
    if not halves and any(is_float(value.type) for value in graph.output) and example.entries:
        yield example


def _is_of(nodes: Sequence[NodeProto], op_type: str, domain: str) -> bool:
    """Return True if there is exactly one node, and it has this operator."""
    return [(node.op_type, node.domain) for node in nodes] == [(op_type, domain)]


def _constants_apart(model: ModelProto, inputs: Sequence[np.ndarray]) -> tuple[ModelProto, Arrays]:
    """Return a copy of a model with its other inputs turned into initializers, and the values of its float inputs."""
    point = {value.name: x for value, x in zip(model.graph.input, inputs, strict=True)}
    floats = [value for value in model.graph.input if is_float(value.type)]
    wanted = {value.name for value in floats}
    copy = copied(model)
    del copy.graph.input[:]
    copy.graph.input.extend(floats)
    copy.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in point.items() if n not in wanted)
    return copy, {n: x for n, x in point.items() if n in wanted}


def _array(x: Any) -> np.ndarray:
    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else np.asarray(x)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- a node that a user describes ---------------------------------------------------------------------------


def _schema(op_type: str, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, newest_loaded(NEWEST_OPSET), domain)
    except onnx.defs.SchemaError:
        return None


def _input_names(schema: onnx.defs.OpSchema | None, op_type: str, count: int) -> list[str]:
    if schema is None:
        return [f"x{i}" for i in range(count)]
    names = [parameter.name for parameter in schema.inputs]
    if not schema.min_input <= count <= schema.max_input:
        raise UsageError(f"{op_type} does not take {count} inputs", f"its inputs: {', '.join(names)}")
    return [*names[:count], *(f"{names[-1]}_{i}" for i in range(2, count - len(names) + 2))]


def _output_names(schema: onnx.defs.OpSchema | None) -> list[str]:
    """Return the outputs that every node of the operator has, or "y" if the operator has no schema."""
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return [output.name for output in schema.outputs if output.option == single] if schema else ["y"]


def _model_of(
    node: NodeProto, shapes: Mapping[str, tuple[int, ...]], constants: Mapping[str, np.ndarray]
) -> ModelProto:
    """Return a model of one node with float32 inputs, constants, and outputs of the types that onnx infers.

    Raises:
        UsageError: the node is invalid.
    """
    graph = helper.make_graph(
        [node],
        node.op_type,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    imports = [
        helper.make_opsetid("", newest_loaded(NEWEST_OPSET)),
        *([helper.make_opsetid(node.domain, 1)] if node.domain else []),
    ]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if why := checker_error(copied(model)):
        raise UsageError(f"{node.op_type} does not take these inputs and attributes: {why}")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except Exception as error:  # onnx raises exceptions of several types
        raise UsageError(f"{node.op_type} does not take these inputs and attributes: {_line(error)}") from error
    for value, found in zip(model.graph.output, inferred.graph.output, strict=True):
        if found.type.WhichOneof("value") is None:
            found = helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None)
        value.CopyFrom(found)
    return model


_LISTS: dict[int, Callable[[Any], Any]] = {
    AttributeProto.INTS: int,
    AttributeProto.FLOATS: float,
    AttributeProto.STRINGS: str,
}
_SINGLE: dict[int, Callable[[Any], Any]] = {
    AttributeProto.INT: int,
    AttributeProto.FLOAT: float,
    AttributeProto.STRING: str,
}


def _attribute(schema: onnx.defs.OpSchema | None, op_type: str, name: str, value: Any) -> AttributeProto:
    """Return an attribute in the type that the schema declares."""
    if schema is None:
        return helper.make_attribute(name, int(value) if isinstance(value, bool) else value)
    if name not in schema.attributes:
        raise UsageError(f"{op_type} has no attribute '{name}'", suggest(name, schema.attributes, "attributes"))
    declared: Any = schema.attributes[name].type
    kind = AttributeProto.AttributeType.Value(declared.name)
    try:
        if kind in _LISTS:
            values = value if isinstance(value, tuple) else (value,)
            return helper.make_attribute(name, [_LISTS[kind](each) for each in values], attr_type=kind)
        if kind in _SINGLE:
            return helper.make_attribute(name, _SINGLE[kind](value), attr_type=kind)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"--attribute: '{value}' is not a valid value for {name}") from None
    raise OnnxgradError(f"'{name}' is a tensor or a graph, which can't be given here", "take a published example")
