"""Every rule in the half types: what it emits type-checks there, and is as right as the type allows.

The measure is the gradient in the type of the row (float64 almost always), which other tests prove, at the same rounded
values; how far rounding may carry a gradient off is measured by moving what it is computed from by that much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, defs, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import FLOATS, Arrays, dtype_of, is_float, tensor_type
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.opset import FIRST_WITH_BFLOAT16
from onnxgrad_cli.passes.prepare.upgrade import upgrade
from tests.autodiff.rows import ROWS, by_operator, few, tiers
from tests.conftest import Each
from tests.harness import Case, Const, fed, forward_model, sample, with_gradient

HALF: dict[str, Any] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
EVERY = HALF | {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
"""The types that the rows, most of which are in float64, can be written in."""

EPSILON = {name: float(ml_dtypes.finfo(dtype).eps) for name, dtype in EVERY.items()}
SINGLE = {"Resize": (2,), "Upsample": (1,)}
"""The inputs of an operator that are float32 by its definition."""

FLOAT = (np.float64, np.float32, *HALF.values())
BY_OP = by_operator(ROWS)
OF_TYPES, OF_VALUES = tiers(BY_OP, few(BY_OP, 2)), tiers(BY_OP, few(BY_OP, 1))


# -- rows in half types -------------------------------------------------------------------------------------------


def narrowed(case: Case, dtype: str) -> Case:
    """The row with every float in another type."""
    feeds = sample(case)
    inputs: list[Any] = []
    for i, x in enumerate(case.inputs):
        array = feeds.get(f"x{i}")
        if array is None or array.dtype.kind != "f" or i in SINGLE.get(case.op, ()):
            inputs.append(x)
        else:
            half = array.astype(EVERY[dtype])
            inputs.append(Const(half) if isinstance(x, Const) else half)
    attrs = {
        name: _narrow(value, dtype) for name, value in case.attrs.items() if name != "stash_type" or dtype == "float64"
    }
    nodes = [_narrow_node(node, dtype) for node in case.nodes]
    return replace(case, inputs=inputs, attrs=attrs, nodes=nodes)


def _narrow_node(node: NodeProto, dtype: str) -> NodeProto:
    result = NodeProto()
    result.CopyFrom(node)
    for attribute in result.attribute:
        if attribute.HasField("g"):
            attribute.g.CopyFrom(_narrow(attribute.g, dtype))
        elif attribute.HasField("t"):
            _narrow_tensor(attribute.t, dtype)
        elif attribute.name == "dtype":
            attribute.i = helper.np_dtype_to_tensor_dtype(EVERY[dtype])
    return result


def _narrow_tensor(tensor: TensorProto, dtype: str) -> None:
    if is_float(tensor_type(tensor.data_type, None)):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(EVERY[dtype]), tensor.name))


def _narrow(value: Any, dtype: str) -> Any:
    """An attribute; a graph with every float in another type."""
    if not isinstance(value, GraphProto):
        return value
    graph = GraphProto()
    graph.CopyFrom(value)
    for tensor in graph.initializer:
        _narrow_tensor(tensor, dtype)
    for info in (*graph.input, *graph.value_info, *graph.output):
        for held in (info.type.tensor_type, info.type.sequence_type.elem_type.tensor_type):
            if held.elem_type in FLOATS:
                held.elem_type = helper.np_dtype_to_tensor_dtype(EVERY[dtype])
    nodes = [_narrow_node(node, dtype) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return graph


def widened(case: Case, half: Case) -> Case:
    """The row in its own types, with the values of a narrower type."""
    inputs: list[Any] = []
    for x, h in zip(case.inputs, half.inputs, strict=True):
        array = h.array if isinstance(h, Const) else h
        if array is not None and np.asarray(array).dtype in EVERY.values():
            own = np.dtype(np.float64) if isinstance(x, tuple) else (x.array if isinstance(x, Const) else x).dtype
            array = np.asarray(array).astype(own)
        inputs.append(Const(array) if isinstance(h, Const) else array)
    return replace(case, inputs=inputs)


def float_inputs(case: Case) -> list[str]:
    every = [
        i
        for i, x in enumerate(case.inputs)
        if x is not None and not isinstance(x, Const) and (isinstance(x, tuple) or np.asarray(x).dtype in FLOAT)
    ]
    return [f"x{i}" for i in (every if case.only is None else case.only)]


def half_model(case: Case, dtype: str) -> onnx.ModelProto | None:
    """The row's model in a narrower type, at an opset that `prepare` would raise it to; None where no opset has it."""
    try:
        model = forward_model(case, symbolic=False)
        if dtype == "bfloat16" and case.opset < FIRST_WITH_BFLOAT16:
            graph = Graph(model)
            infer_types(graph)
            upgrade(graph, FIRST_WITH_BFLOAT16)
            model = graph.commit()
        return None if type_errors(model) else model
    except (onnx.shape_inference.InferenceError, OnnxgradError):
        return None


def gradient(model: onnx.ModelProto, case: Case) -> tuple[onnx.ModelProto, list[str]]:
    outputs = [value.name for value in model.graph.output if is_float(value.type)]
    return with_gradient(model, float_inputs(case), outputs, "g_"), outputs


# -- type check -----------------------------------------------------------------------------------------------------


def type_errors(model: onnx.ModelProto, strict: bool = True) -> list[str]:
    """The nodes whose inputs and outputs don't have the types that their operator's schema allows at the opset."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=strict)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    return list(_errors(inferred.graph, {}, opsets))


def _errors(graph: GraphProto, outer: Mapping[str, str], opsets: Mapping[str, int]) -> Iterator[str]:
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = _name(value.type.tensor_type.elem_type) if value.type.HasField("tensor_type") else ""
    types |= {tensor.name: _name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        yield from _node_errors(node, types, opsets)
        for inner in subgraphs(node):
            yield from _errors(inner, types, opsets)


def _name(dtype: int) -> str:
    return f"tensor({TensorProto.DataType.Name(dtype).lower()})" if dtype else ""


def _node_errors(node: NodeProto, types: Mapping[str, str], opsets: Mapping[str, int]) -> Iterator[str]:
    if not defs.has(node.op_type, opsets[node.domain], node.domain):
        return  # a contrib operator
    schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    bound: dict[str, str] = {}
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for i, name in enumerate(names):
            parameter = formal[min(i, len(formal) - 1)]
            found = types.get(name, "")
            if not name or not found:
                continue
            if found not in parameter.types:
                yield f"{node.name}: {node.op_type}-{schema.since_version} takes no {found}"
            elif parameter.is_homogeneous and bound.setdefault(parameter.type_str, found) != found:
                yield f"{node.name}: {node.op_type} mixes {bound[parameter.type_str]} and {found}"


UNINFERRED = ("SequenceEmpty", "MeanVarianceNormalization")
"""Where onnx's strict inference fails: for a sequence that grows in a Loop, and in the operator's function body."""

SUMS = ("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


def check_types(row: Case, dtype: str) -> None:
    """No constant of another type, no operator without the type, and no sum taken in it."""
    half = narrowed(row, dtype)
    model = half_model(half, dtype)
    if model is None:
        pytest.skip(f"{row.op} takes no {dtype}")
    backward, _ = gradient(model, half)
    if row.op not in UNINFERRED:
        onnx.checker.check_model(backward, full_check=True)
    assert not type_errors(backward, strict=row.op not in UNINFERRED), row
    graph = Graph(backward)
    infer_types(graph)
    for node in graph.nodes:
        if node.op_type in SUMS and node.op_type != row.op and node.name.startswith("grad/"):
            found = dtype_of(graph.types[node.input[0]])
            assert found not in (TensorProto.FLOAT16, TensorProto.BFLOAT16), f"{row}: {node.name}"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", OF_TYPES)
def test_what_a_rule_emits_takes_the_type(rows: list[Case], dtype: str, each: Each) -> None:
    each(rows, partial(check_types, dtype=dtype))


# -- the values -------------------------------------------------------------------------------------------------------


FACTOR = 0.97
"""What inputs are multiplied with, of which no product has so few digits as a half type."""


def computed(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with some inputs multiplied by a number, so that its node reads what another one has computed.

    onnxruntime computes such a product in float32, and hands it on to kernels of float32 as it is, rounded to others.
    """
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for node in found.graph.node:
        node.input[:] = [f"{name}_computed" if name in names else name for name in node.input]
    products = []
    for value in [value for value in found.graph.input if value.name in names]:
        dtype = helper.tensor_dtype_to_np_dtype(dtype_of(value.type))
        factor = np.asarray(np.asarray(FACTOR, HALF["float16"]), dtype)
        found.graph.initializer.append(numpy_helper.from_array(factor, f"{value.name}_factor"))
        names_in = [value.name, f"{value.name}_factor"]
        products.append(helper.make_node("Mul", names_in, [f"{value.name}_computed"], name=f"{value.name}_product"))
    nodes = [*products, *found.graph.node]
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


def check_computed_half(row: Case) -> None:
    """As `check_half` in float16, of a node whose operands another node computes."""
    if row.nodes or row.executor != "onnxruntime":
        pytest.skip("it is several nodes, or nothing that onnxruntime runs")
    check_half(row, "float16", float_inputs(row))


def check_half(row: Case, dtype: str, products: Sequence[str] = ()) -> None:
    """Compare the gradient in a half type with the one in the row's own, and with what rounding does to that."""
    half = narrowed(row, dtype)
    wide = widened(row, half)
    model, own = half_model(half, dtype), forward_model(wide, symbolic=False)
    if model is None:
        pytest.skip(f"{row.op} takes no {dtype}")
    model, own = computed(model, products), computed(own, products)
    if dtype == "bfloat16" and (row.op == "MaxPool" or row.attrs.get("nearest_mode") == "ceil"):
        pytest.skip("in so few digits there are ties, which are broken in another way in each type")
    (backward, outputs), (reference, _) = gradient(model, half), gradient(own, wide)
    executor = row.executor if dtype == "float16" else "reference"  # whose faults are then the same on both sides
    feeds, wide_feeds = sample(half), sample(wide)
    try:
        values = Executor(own, executor)(fed(own, wide_feeds))
        exact = Executor(reference, executor)
    except Exception as error:
        if dtype == "float16":
            raise
        pytest.skip(f"onnx.reference does not run {row.op}: {_line(error)}")
    rng = np.random.default_rng(5)
    types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in model.graph.output}
    seeds = {name: rng.standard_normal(values[name].shape).astype(types[name]) for name in outputs}
    wide_seeds = {f"g_{name}": seed.astype(values[name].dtype) for name, seed in seeds.items()}
    expected = exact({**fed(own, wide_feeds), **wide_seeds})
    try:
        forward = Executor(model, executor)(fed(model, feeds))
        found = Executor(backward, executor)({**fed(model, feeds), **{f"g_{n}": seed for n, seed in seeds.items()}})
    except Exception as error:
        if _runs(model, executor, feeds):
            raise
        pytest.skip(f"no executor runs {row.op} in {dtype}: {_line(error)}")
    epsilon = EPSILON[dtype]
    for name in outputs:
        far = np.abs(forward[name].astype(float) - values[name])
        if not np.all(far <= 64 * epsilon * np.max(np.abs(values[name]), initial=1.0)):
            pytest.skip("beyond the range of the type, or on another side of a tie, which runtimes see differently")
    names = float_inputs(row)
    noises = noise(exact, own, wide_feeds, wide_seeds, names, expected, epsilon)
    for name in names:
        want, got = expected[f"g_grad_{name}"], found[f"g_grad_{name}"]
        assert got.shape == want.shape
        off = np.max(np.abs(got.astype(float) - want), initial=0.0)
        allowed = 3 * (noises[name] + epsilon * np.max(np.abs(want), initial=0.0))
        assert off <= allowed, f"{row}: {name} is off by {off:.2e}, not {allowed:.2e}"


def _line(error: Exception) -> str:
    return str(error).strip()[:80]


def _runs(model: onnx.ModelProto, executor: str, feeds: Arrays) -> bool:
    try:
        Executor(model, executor)(fed(model, feeds))
    except Exception:
        return False
    return executor == "onnxruntime"  # what onnx.reference knows in half types is chance


def noise(
    exact: Executor,
    own: onnx.ModelProto,
    feeds: Arrays,
    seeds: Arrays,
    names: Sequence[str],
    expected: Arrays,
    size: float,
) -> dict[str, float]:
    """How far each gradient goes when the inputs and cotangents move by the rounding of the half type."""
    rng = np.random.default_rng(11)
    found = dict.fromkeys(names, 0.0)
    for _ in range(3):
        near = {**fed(own, feeds), **seeds}
        for name in (*names, *seeds):
            x = np.asarray(near[name])
            near[name] = np.asarray(x * (1 + size * rng.uniform(-1, 1, x.shape)), x.dtype)
        moved = exact(near)
        for name in names:
            off = np.max(np.abs(moved[f"g_grad_{name}"] - expected[f"g_grad_{name}"]), initial=0.0)
            found[name] = max(found[name], float(off))
    return found


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", OF_VALUES)
def test_gradient_in_a_half_type(rows: list[Case], dtype: str, each: Each) -> None:
    each(rows, partial(check_half, dtype=dtype))


@pytest.mark.parametrize("rows", OF_VALUES)
def test_gradient_in_float16_of_what_is_computed(rows: list[Case], each: Each) -> None:
    each(rows, check_computed_half)


LONG = 1 << 16
"""More than the largest float16, 65504."""

SUMMED = [
    # (operator, inputs, attributes, the input that is looked at, the cotangent of each output entry, its gradient)
    ("Add", [(LONG, 2), (2,)], {}, "x1", 0.5, LONG / 2),
    ("Mul", [(2, LONG), (2, 1)], {}, "x1", 0.25, LONG / 4),
    ("PRelu", [(2, LONG), (1,)], {}, "x1", -0.125, LONG / 4),
    ("ReduceMean", [(2, LONG)], {}, "x0", float(LONG // 2), 0.25),
    ("GlobalAveragePool", [(1, 1, 512, 256)], {}, "x0", float(LONG // 2), 0.25),
    ("Conv", [(1, 1, 1, LONG), (1, 1, 1, 1), (1,)], {}, "x2", 0.5, LONG / 2),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("op", "shapes", "attrs", "name", "seed", "expected"), SUMMED, ids=lambda v: str(v)[:20])
def test_sums_over_long_axes(
    op: str, shapes: Any, attrs: Any, name: str, seed: float, expected: float, dtype: str, symbolic: bool
) -> None:
    """Where half types add up, 0.5 stays what it was from 1024 on, and a count of 65536 is infinite."""
    case = Case(op, [np.full(shape, -1.0 if op == "PRelu" else 1.0, HALF[dtype]) for shape in shapes], attrs, opset=22)
    model = forward_model(case, symbolic)
    for value in model.graph.output:
        sizes = [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        assert len(sizes) <= 4
    backward = with_gradient(model, [name], ["y0"], "g_")
    feeds = sample(case)
    run = Executor(backward, "onnxruntime" if dtype == "float16" else "reference")
    shape = Executor(model, "onnxruntime" if dtype == "float16" else "reference")(feeds)["y0"].shape
    found = run({**feeds, "g_y0": np.full(shape, seed, HALF[dtype])})[f"g_grad_{name}"]
    np.testing.assert_allclose(found.astype(float), expected, rtol=EPSILON[dtype], atol=EPSILON[dtype])


def test_a_model_in_bfloat16_is_raised_to_the_opset_that_has_it() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 13]>
    g (bfloat16[N, 3] x) => (bfloat16[N, 2] y) <bfloat16[3, 2] w = {1, 2, 3, 4, 5, 6}>
    { h = MatMul(x, w) s = ReduceMean<axes = [1]>(h) y = Sub(h, s) }
    """
    built = build(onnx.parser.parse_model(text))
    assert built.graph.opset() == FIRST_WITH_BFLOAT16
    assert not type_errors(built.model)


# -- types without a derivative ------------------------------------------------------------------------------------


def test_only_four_types_carry_a_derivative() -> None:
    carrying = {dtype for dtype in TensorProto.DataType.values() if is_float(tensor_type(dtype, None))}
    assert carrying == FLOATS == {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}


@pytest.mark.parametrize("to", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT4E2M1", "INT8", "INT64", "BOOL"])
def test_nothing_flows_through_other_types(to: str) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 11, opset_import: ["" : 23]>
        g (float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}>
        { h = Mul(x, w) q = Cast<to = 0>(h) back = Cast<to = 1>(q) y = Mul(back, v) }
        """
    )
    model.graph.node[1].attribute[0].i = TensorProto.DataType.Value(to)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    built = build(model)
    assert built.training.trained == ["v"]
    assert "interrupted by Cast" in built.training.not_trained["w"]
    with pytest.raises(UnsupportedError, match="no differentiable path"):
        build(copy, Options(freeze=("v",)))
