"""A generic checker for all rules: each row of a table becomes a one-node model, whose gradient is checked.

The gradient is compared with central differences in float64. They are computed by onnxruntime's double kernels, or by
onnx.reference if onnxruntime has no such kernel. Neither shares code with the rules.
"""

from __future__ import annotations

import argparse
import itertools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.reference import evaluator
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays, is_float, shape_of, tensor_type
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.declare_outputs import settle_yield
from onnxgrad_cli.passes.prepare.expand_definitions import expand
from onnxgrad_cli.passes.rematerialization.recompute import parse_recompute, recompute
from onnxgrad_cli.passes.target import rewrite_for_target
from onnxgrad_cli.record import Training
from onnxgrad_cli.targets import STANDARD, TARGETS, find_target
from onnxgrad_cli.verification.gradients.gradcheck import vjp_difference


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        op: the operator.
        inputs: for each input a shape, an array, `const(array)` or None. A shape is a tuple of ints and stands for
            random float64 values. Arrays of floats are differentiated. `const(array)` is an initializer and is never
            differentiated. None is an absent input.
        attrs: the attributes of the node.
        outputs: the number of outputs of the node.
        opset: the opset of the default domain.
        low, high: the range of the random inputs. It must avoid kinks and invalid values.
        only: the positions of the inputs to differentiate; by default every float input that is not a `const`.
        note: the subject of the row; part of the name of the test.
        executor: 'onnxruntime' (with onnx.reference for missing kernels) or 'reference'.
        second_order: False if there is no second derivative. `note` then has the reason.
        symbolic: True to run the row with symbolic axes too.
        tolerance: the largest relative error of a directional derivative.
        step: the step of differences; larger for operators that only have float32 kernels.
        floor: the share of the output's size below which a difference is noise.
        domain: the domain of the operator.
        nodes: the nodes, from x0, x1, ... to y0, y1, ..., if the row needs more than a single node.
    """

    op: str
    inputs: Sequence[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    opset: int = 18
    low: float = -2.0
    high: float = 2.0
    only: tuple[int, ...] | None = None
    note: str = ""
    executor: str = "onnxruntime"
    second_order: bool = True
    symbolic: bool = True
    tolerance: float = 1e-6
    step: float = 1e-6
    floor: float = 1e-3
    domain: str = ""
    nodes: Sequence[onnx.NodeProto] = ()

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, np.shape(as_array(x)))) if x is not None else "-" for x in self.inputs)
        text = [f"{self.op}-{self.opset}", shapes, *(f"{k}={v}" for k, v in self.attrs.items()), self.note]
        return " ".join(part for part in text if part)


@dataclass(frozen=True)
class Const:
    """An input that is an initializer."""

    array: np.ndarray


def const(values: Any, dtype: Any = np.int64) -> Const:
    """Return an input that is an initializer, int64 by default."""
    return Const(np.asarray(values, dtype))


def as_array(x: Any) -> np.ndarray:
    if isinstance(x, Const):
        return x.array
    return np.empty(x) if isinstance(x, tuple) else np.asarray(x)


def sample(case: Case) -> Arrays:
    """Return the values of a case's inputs by name. The text of the case is the seed of random values."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    feeds = {}
    for i, x in enumerate(case.inputs):
        if isinstance(x, tuple):
            feeds[f"x{i}"] = np.asarray(rng.uniform(case.low, case.high, x))
        elif x is not None:
            feeds[f"x{i}"] = as_array(x)
    return feeds


def forward_model(case: Case, symbolic: bool) -> onnx.ModelProto:
    """Return the one-node model of a case. With `symbolic`, every axis of every input has its own symbol."""
    feeds = sample(case)
    inputs, initializers, names = [], [], []
    for i, x in enumerate(case.inputs):
        if x is None:
            names.append("")
            continue
        names.append(f"x{i}")
        array = feeds[f"x{i}"]
        if isinstance(x, Const):
            initializers.append(numpy_helper.from_array(array, f"x{i}"))
            continue
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = [f"s{i}_{axis}" for axis in range(array.ndim)] if symbolic else list(array.shape)
        inputs.append(helper.make_tensor_value_info(f"x{i}", dtype, dims))
    outputs = [f"y{i}" for i in range(case.outputs)]
    nodes = case.nodes or [helper.make_node(case.op, names, outputs, name="node", domain=case.domain, **case.attrs)]
    imports = [helper.make_opsetid("", case.opset)]
    if case.domain:
        imports.append(helper.make_opsetid(case.domain, 1))
    infos = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "case", inputs, infos, initializers)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    graph_view = Graph(model)
    infer_types(graph_view)
    del model.graph.output[:]
    values: list[np.ndarray] = []
    for name in outputs:
        value_type = graph_view.types.get(name)
        if shape_of(value_type) is None:
            values = values or evaluator(model).run(outputs, fed(model, feeds))
            dims = [f"{name}_{axis}" for axis in range(values[outputs.index(name)].ndim)]
            dtype = helper.np_dtype_to_tensor_dtype(values[outputs.index(name)].dtype)
            value_type = tensor_type(dtype, dims)
        model.graph.output.append(helper.make_value_info(name, value_type))
    return model


PLAIN = Options()
"""The default options for writing gradients. They are created once and never changed."""


def with_gradient(
    model: onnx.ModelProto, wanted: Sequence[str], seeded: Sequence[str], prefix: str, options: Options | None = None
) -> onnx.ModelProto:
    """Return a copy of a model with gradients of `wanted` as outputs, and cotangents `<prefix><output>` as inputs.

    Only the options `target` and `recompute` are used. Their passes run as in a build.
    """
    options = options or PLAIN
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = Graph(copy)
    infer_types(graph)
    while expand(graph):
        infer_types(graph)
    op, training = Op(graph), Training(yielded={name: f"{prefix}{name}" for name in seeded})
    op.role = "backward"
    training.kernel_variants.prefer = find_target(options.target).prefer
    graph.types.update((cotangent, graph.types[name]) for name, cotangent in training.yielded.items())
    seeds = {name: op.val(cotangent) for name, cotangent in training.yielded.items()}
    gradients = differentiate(graph, seeds, wanted, op, training)
    marker = make_node("YieldOp", seeded, training.yielded.values(), f"{prefix}seed", domain="com.microsoft")
    graph.nodes.extend([marker, *op.nodes])
    for name in wanted:
        value = gradients[name]
        if value is None:
            value = op.fill(0.0, op.val(name))
            graph.nodes = [*graph.nodes, *(n for n in op.nodes if n not in graph.nodes)]
        training.gradients[name] = f"{prefix}grad_{name}"
        output = make_node("Identity", [value.name], [training.gradients[name]], name=f"{prefix}out_{name}")
        graph.nodes.append(output)
        graph.types[output.output[0]] = graph.types[name]
        graph.add_output(output.output[0])
    if options.recompute:
        training.loss = marker.output[0]  # the end of the forward part
        recompute(graph, options, training)
    settle_yield(graph, "input", training.yielded)
    graph.remove_unused()
    if options.target != STANDARD:
        rewrite_for_target(graph, options, training)
    result = graph.commit()
    onnx.checker.check_model(result)
    return result


def changes(model: onnx.ModelProto, plain: onnx.ModelProto) -> int:
    """Return the number of nodes in `model` in excess of the nodes with the same operator in `plain`."""
    one, other = (Counter((node.domain, node.op_type) for node in each.graph.node) for each in (model, plain))
    return (one - other).total()


def asked(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Options]:
    """Add options for passes that change how gradients are written, and return the parsed arguments and the options."""
    parser.add_argument("--recompute", type=parse_recompute, help="as in `onnxgrad build`")
    parser.add_argument("--target", default=STANDARD, choices=TARGETS, help="as in `onnxgrad build`")
    arguments = parser.parse_args()
    return arguments, Options(recompute=arguments.recompute, target=arguments.target)


def wanted_inputs(case: Case) -> list[str]:
    """Return the names of the inputs that a case differentiates."""
    every = [
        i
        for i, x in enumerate(case.inputs)
        if isinstance(x, tuple) or (x is not None and not isinstance(x, Const) and as_array(x).dtype.kind == "f")
    ]
    return [f"x{i}" for i in (every if case.only is None else case.only)]


def subsets(names: Sequence[str]) -> list[list[str]]:
    """Return every non-empty subset of up to three names. For more names, return each name alone, and all together."""
    if len(names) <= 3:
        return [list(s) for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
    return [[name] for name in names] + [list(names)]


def check_case(case: Case, symbolic: bool = False, order: int = 1) -> None:
    """Differentiate a case, or its gradient if `order` is 2, and compare the result with central differences.

    Raises:
        AssertionError: a gradient has the wrong shape or the wrong value.
    """
    model, feeds = forward_model(case, symbolic), sample(case)
    rng = np.random.default_rng(7)
    names = wanted_inputs(case)
    floats = [o.name for o in model.graph.output if is_float(o.type)]
    if order == 2:
        values = Executor(model, case.executor)(fed(model, feeds))
        model = with_gradient(model, names, floats, "g_")
        feeds = {**feeds, **{f"g_{name}": _seed(rng, values[name]) for name in floats}}
        floats = [f"g_grad_{name}" for name in names]
        names = [*names, *(n for n in feeds if n.startswith("g_"))]
        choices, prefix = [(names, floats)], "h_"
    elif symbolic:
        choices, prefix = [(names, floats)], "g_"
    else:
        alone = [(names, [output]) for output in floats] if len(floats) > 1 else []
        choices, prefix = [(subset, floats) for subset in subsets(names)] + alone, "g_"
    forward = Executor(model, case.executor)
    values = forward(fed(model, feeds))
    for wanted, seeded in choices:
        seeds = {name: _seed(rng, values[name]) for name in seeded}
        backward = with_gradient(model, wanted, seeded, prefix)
        run = Executor(backward, case.executor)
        result = run({**fed(model, feeds), **{f"{prefix}{name}": seed for name, seed in seeds.items()}})
        gradients = {name: result[f"{prefix}grad_{name}"] for name in wanted}
        for name, gradient in gradients.items():
            assert gradient.shape == feeds[name].shape, f"{name}: {gradient.shape} for {feeds[name].shape}"

        def evaluate(point: Arrays) -> Arrays:
            return forward(fed(model, point))

        found = vjp_difference(evaluate, feeds, seeds, gradients, rng, case.step, case.floor)
        assert found.error <= case.tolerance * (10 if order == 2 else 1), (
            f"{case} wrt {wanted} through {seeded} ({run.name}): {found}"
        )


def _seed(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return np.asarray(rng.standard_normal(like.shape), like.dtype)


def fed(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """Return the feeds that are inputs of a model."""
    names = {value.name for value in model.graph.input}
    return {name: array for name, array in feeds.items() if name in names}
