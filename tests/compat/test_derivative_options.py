"""`onnx_derivative` against the function it is named after: same names and order, same numbers, none of its faults.

What the older function built is compared where its graphs are at hand (ONNXGRAD_GOLDEN, a folder). Everywhere, each
kind of model is built with every option; the measure is central differences of the model itself, in float64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.compat import DerivativeOptions, onnx_derivative
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.executor import Executor, to_double
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.facts import raises
from tests.harness import fed

Zero = DerivativeOptions.Zero
Yield = DerivativeOptions.KeepYieldOp
Keep = DerivativeOptions.KeepOutputs
Fill = DerivativeOptions.FillGrad
Loss = DerivativeOptions.Loss

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}


# -- models and what they are fed -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    """A model, and the names that its derivative must have: every float input and weight, in order.

    `cotangents` are those of the float outputs; `inputs`, where there are others, lists all inputs that are no weights.
    """

    text: str
    floats: str
    weights: str
    cotangents: str
    inputs: str | None = None
    opset: int = 17

    @property
    def model(self) -> ModelProto:
        header = f'<ir_version: 8, opset_import: ["": {self.opset}]>\n'
        return parser.parse_model(header + self.text)

    @property
    def fed(self) -> list[str]:
        """The inputs of the derivative but the cotangents."""
        return [*(self.floats if self.inputs is None else self.inputs).split(), *self.weights.split()]

    @property
    def gradients(self) -> list[str]:
        return [f"{name}_grad" for name in (*self.floats.split(), *self.weights.split())]


NETS = {
    "add": Net("g (float[?, 10] X) => (float[?, 10] Y) <float[1] b = {1}> { Y = Add(X, b) }", "X", "b", "Y_grad"),
    "product of one value": Net("g (float[?, 10] X) => (float[?, 10] Y) { i = Identity(X) Y = Mul(i, i) }",
                                "X", "", "Y_grad"),
    "passes through": Net("g (float[N, 4] X) => (float[N, 4] Y) { Y = Identity(X) }", "X", "", "Y_grad"),
    "perceptron": Net(
        """g (float[N, 4] X) => (float[N, 2] Y)
        <float[3, 4] w1 = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] b1 = {0.5, -1, 2},
         float[3, 2] w2 = {1, -2, 3, -4, 5, 6}, int64[2] two = {-1, 2}>
        { h = Gemm<transB = 1>(X, w1, b1) r = Relu(h) m = MatMul(r, w2) Y = Reshape(m, two) }""",
        "X", "w1 b1 w2", "Y_grad"),
    "two outputs": Net(
        """g (float[N, 4] X) => (float[N, 3] Y1, float[N, 2] Y2)
        <float[4, 3] w1 = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3, 2] w2 = {1, -2, 3, -4, 5, 6}>
        { Y1 = MatMul(X, w1) r = Tanh(Y1) Y2 = MatMul(r, w2) }""",
        "X", "w1 w2", "Y1_grad_external Y2_grad"),
    "independent outputs": Net(
        """g (float[N, 4] X, float[N, 4] Z) => (float[N, 4] Y1, float[N, 4] Y2) <float[4] w = {1, -2, 3, 4}>
        { Y1 = Mul(X, w) Y2 = Sin(Z) }""",
        "X Z", "w", "Y1_grad Y2_grad"),
    "an output whose shape is read": Net(
        """g (float[N, 4] X, float[4] b) => (float[N, 4] Y1, float[N, 4] Y2)
        { Y1 = Sin(X) s = Shape(Y1) Y2 = Expand(b, s) }""",
        "X b", "", "Y1_grad Y2_grad"),
    "a body reads an output": Net(
        """g (float[N, 4] X, bool c) => (float[N, 4] Y1, float[N, 4] Y2)
        { Y1 = Sin(X)
          Y2 = If(c)<then_branch = t () => (float[N, 4] u) { u = Mul(Y1, Y1) },
                     else_branch = e () => (float[N, 4] v) { v = Neg(X) }> }""",
        "X", "", "Y1_grad_external Y2_grad", "X c"),
    "an integer output": Net(
        """g (float[N, 4] X) => (int64[N] L, float[N, 3] Y)
        <float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}>
        { Y = MatMul(X, w) L = ArgMax<axis = 1, keepdims = 0>(Y) }""",
        "X", "w", "Y_grad"),
    "an integer input": Net(
        """g (int64[N] ids, float[N, 2] X) => (float[N, 2] Y) <float[3, 2] table = {1, -2, 3, 4, 5, -6}>
        { e = Gather(table, ids) Y = Mul(e, X) }""",
        "X", "table", "Y_grad", "ids X"),
    "only an integer input": Net(
        """g (int64[N] ids) => (float[N, 2] Y) <float[3, 2] table = {1, -0.2, 0.3, 0.4, 0.5, -0.6}>
        { e = Gather(table, ids) Y = Tanh(e) }""",
        "", "table", "Y_grad", "ids"),
    "a weight used twice": Net(
        """g (float[N, 2] X) => (float[N, 2] Y) <float[2, 2] w = {1, -2, 0.5, 1}>
        { a = MatMul(X, w) t = Tanh(a) Y = MatMul(t, w) }""",
        "X", "w", "Y_grad"),
    "an unused input": Net(
        "g (float[N, 4] U, float[N, 4] X) => (float[N, 4] Y) <float[4] w = {1, 2, 3, 4}> { Y = Mul(X, w) }",
        "U X", "w", "Y_grad"),
    "an input whose shape is read": Net(
        """g (float[M, 4] U, float[1, 4] X) => (float[M, 4] Y) <float[4] w = {1, 2, 3, 4}>
        { m = Mul(X, w) s = Shape(U) Y = Expand(m, s) }""",
        "U X", "w", "Y_grad"),
    "an unused weight": Net(
        "g (float[N, 4] X) => (float[N, 4] Y) <float[2, 3] dead = {1, 2, 3, 4, 5, 6}, float[4] w = {1, 2, 3, 4}>"
        "{ Y = Mul(X, w) }",
        "X", "dead w", "Y_grad"),
    "weights among the inputs": Net(
        """g (float[4] w, float[N, 4] X, float[N, 4] Z) => (float[N, 4] Y)
        <float[4] w = {1, 2, 3, 4}, float[4] b = {1, 2, 3, 4}>
        { m = Mul(X, w) a = Add(m, b) Y = Mul(a, Z) }""",
        "X Z", "w b", "Y_grad"),
    "double": Net(
        "g (double[N, 2] X) => (double[N, 2] Y) <double[2, 2] w = {1, -2, 0.5, 1}> { m = MatMul(X, w) Y = Tanh(m) }",
        "X", "w", "Y_grad"),
    "half": Net(
        """g (float16[N, 2] X) => (float16[N, 2] Y) <float[2, 2] v = {1, -2, 0.5, 1}>
        { w = Cast<to = 10>(v) m = MatMul(X, w) Y = Tanh(m) }""",
        "X", "v", "Y_grad"),
    "a constant node": Net(
        "g (float[N, 2] X) => (float[N, 2] Y) { w = Constant<value = float[2] {2, 3}>() Y = Mul(X, w) }",
        "X", "", "Y_grad"),
    "a body reads a weight": Net(
        """g (float[N, 4] X) => (float[N, 4] Y) <float[4] w = {1, -2, 3, 4}, float z = {0}>
        { s = ReduceSum<keepdims = 0>(X) c = Greater(s, z)
          Y = If(c)<then_branch = t () => (float[N, 4] u) { u = Mul(X, w) },
                    else_branch = e () => (float[N, 4] v) { v = Div(X, w) }> }""",
        "X", "w z", "Y_grad"),
    "convolution and pools": Net(
        """g (float[N, 1, 8, 8] X) => (float[N, 2] Y)
        <float[2, 1, 3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, -4, 5, 6, -7, 8, 9}, float[2] b = {0.5, -1},
         float[8, 2] v = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, -4, 5, 6, -7}>
        { c = Conv<pads = [1, 1, 1, 1]>(X, w, b) r = Relu(c)
          p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
          q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(p)
          f = Flatten(q) Y = MatMul(f, v) }""",
        "X", "w b v", "Y_grad"),
    "pools of unknown sides": Net(
        """g (float[N, 1, H, W] X) => (float[N, 2, ?, ?] Y)
        <float[2, 1, 3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, -4, 5, 6, -7, 8, 9}>
        { c = Conv<pads = [1, 1, 1, 1]>(X, w)
          p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)
          q = AveragePool<kernel_shape = [2, 2], pads = [1, 1, 1, 1]>(p)
          Y = Tanh(q) }""",
        "X", "w", "Y_grad"),
    "batch normalization": Net(
        """g (float[N, 2, 4, 4] X) => (float[N, 2, 4, 4] Y)
        <float[2] s = {0.5, -1}, float[2] b = {1, 2}, float[2] mu = {-0.5, 0.3}, float[2] var = {1, 2}>
        { Y = BatchNormalization(X, s, b, mu, var) }""",
        "X", "s b mu var", "Y_grad"),
    "softplus": Net("g (float[N, 4] X) => (float[N, 4] Y) { Y = Softplus(X) }", "X", "", "Y_grad"),
    "recurrent": Net(
        """g (float[3, N, 2] X, float[1, 4, 2] W, float[1, 4, 1] R) => (float[3, 1, N, 1] Y)
        { Y = LSTM<hidden_size = 1>(X, W, R) }""",
        "X W R", "", "Y_grad"),
    "broadcast at run time": Net(
        "g (float[N, 4] A, float[M, 4] B) => (float[?, 4] Y) { Y = Mul(A, B) }", "A B", "", "Y_grad"),
    "old operators": Net(
        """g (float[N, 4] X) => (float[N, 1] Y) <float[4] w = {1, 2, 3, 4}>
        { m = Mul(X, w) Y = ReduceSum<axes = [1]>(m) }""",
        "X", "w", "Y_grad", opset=11),
}  # fmt: skip

SIZES = {"N": 3, "M": 2, "H": 7, "W": 6, "": 3}
"""The sizes of symbolic and unnamed axes."""

ALSO = {"broadcast at run time": {"M": 1}, "an input whose shape is read": {"M": 3}}
"""Sizes of a single net."""


def names(values: Sequence[ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def element(value: ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


def sample(value: ValueInfoProto, rng: np.random.Generator, sizes: dict[str, int] = SIZES) -> np.ndarray:
    """Random values for an input: integers are small enough to be indices."""
    axes = value.type.tensor_type.shape.dim
    shape = [axis.dim_value if axis.HasField("dim_value") else sizes[axis.dim_param] for axis in axes]
    dtype = helper.tensor_dtype_to_np_dtype(element(value))
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype.kind == "i":
        return rng.integers(0, 3, shape, dtype)
    return np.asarray(rng.standard_normal(shape), dtype)


def own_values(model: ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def sampled(model: ModelProto, sizes: dict[str, int] = SIZES, seed: int = 0) -> Arrays:
    """Random values for the inputs that have none."""
    rng, own = np.random.default_rng(seed), own_values(model)
    return {value.name: sample(value, rng, sizes) for value in model.graph.input if value.name not in own}


def run(model: ModelProto, feeds: Arrays) -> Arrays:
    """The outputs on stock onnxruntime, and on nothing else."""
    return Executor(model, fallback=False)(fed(model, feeds))


def cotangents_of(model: ModelProto, derived: ModelProto | None, feeds: Arrays) -> Arrays:
    """A cotangent for every float output, by output: random, or ones where `derived` fills them itself."""
    rng = np.random.default_rng(1)
    outputs = Executor(model)(fed(model, feeds))
    taken = None if derived is None else names(derived.graph.input)
    found = {}
    for value in model.graph.output:
        if element(value) in FLOATS:
            array = outputs[value.name]
            random = np.asarray(rng.standard_normal(array.shape), array.dtype)
            found[value.name] = random if taken is None or cotangent_name(value.name, taken) else np.ones_like(array)
    return found


def cotangent_name(output: str, taken: Sequence[str]) -> str | None:
    return next((name for name in (f"{output}_grad", f"{output}_grad_external") if name in taken), None)


def as_inputs(cotangents: Arrays, derived: ModelProto) -> Arrays:
    """The cotangents by the names of the derivative's inputs."""
    taken = names(derived.graph.input)
    by_name = {cotangent_name(output, taken): array for output, array in cotangents.items()}
    return {name: array for name, array in by_name.items() if name is not None}


def prove(model: ModelProto, feeds: Arrays, cotangents: Arrays, gradients: Arrays) -> None:
    """Compare `gradients`, by what they belong to, with central differences of sum(cotangents * outputs)."""
    double = to_double(model)
    declared = set(names(double.graph.input))
    for tensor in double.graph.initializer:
        if tensor.name not in declared:
            double.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    no_double_kernel = any(node.op_type == "LSTM" for node in model.graph.node)
    execute = Executor(double, "reference" if no_double_kernel else "onnxruntime")
    point = {**own_values(model), **feeds}
    narrow = {str(array.dtype) for array in point.values()}
    point = {n: a.astype(np.float64) if a.dtype.kind in "fV" else a for n, a in point.items()}

    def value(moved: Arrays) -> float:
        outputs = execute(fed(double, moved))
        return float(sum(np.vdot(np.float64(c), outputs[name]) for name, c in cotangents.items()))

    rng = np.random.default_rng(2)
    tolerance = 2e-2 if narrow & {"float16", "bfloat16"} else 2e-4
    for name, gradient in gradients.items():
        assert gradient.shape == point[name].shape, f"{name}: {gradient.shape}"
        size = float(np.linalg.norm(np.float64(gradient)))
        for _ in range(2):
            difference = directional(value, point, {name: gradient}, rng, floor=0.1 * size)
            assert difference.error <= tolerance, f"{name}: {difference}"


def gradients_in(outputs: Arrays) -> Arrays:
    return {name.removesuffix("_grad"): array for name, array in outputs.items() if name.endswith("_grad")}


def from_cotangents(model: ModelProto) -> ModelProto:
    """What stands after a YieldOp, as a model of its own: the YieldOp's outputs are inputs, like in option Zero."""
    cut = ModelProto()
    cut.CopyFrom(model)
    marker = yield_op(cut)
    differentiable = [n for i, n in enumerate(marker.input) if i not in ints(marker, "non_differentiable_outputs")]
    cut.graph.node.remove(marker)
    known = {value.name: element(value) for value in (*model.graph.value_info, *model.graph.output)}
    known |= {v.name: element(v) for v in onnx.shape_inference.infer_shapes(cut).graph.value_info}
    for output, cotangent in zip(differentiable, marker.output, strict=True):
        cut.graph.input.append(helper.make_tensor_value_info(cotangent, known[output], None))
    return cut


def yield_op(model: ModelProto) -> onnx.NodeProto:
    (marker,) = (node for node in model.graph.node if node.op_type == "YieldOp")
    assert marker.domain == "com.microsoft"
    return marker


def ints(node: onnx.NodeProto, attribute: str) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == attribute), [])


def by_text(body: str, opset: int = 17) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{body}')


# -- every net with every option ------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("options", [Zero, Keep, Keep | Fill], ids=["zero", "keep", "keep+fill"])
@pytest.mark.thinned(3)
def test_every_net(net: str, options: DerivativeOptions) -> None:
    one = NETS[net]
    model = one.model
    derived = onnx_derivative(model, options=options)
    onnx.checker.check_model(derived, full_check=True)
    filled = options & Fill
    assert names(derived.graph.input) == [*one.fed, *([] if filled else one.cotangents.split())]
    kept = names(model.graph.output) if options & Keep else []
    assert names(derived.graph.output) == [*one.gradients, *kept]
    assert {node.domain for node in derived.graph.node} <= {""}, "standard operators only"

    feeds = sampled(model, SIZES | ALSO.get(net, {}))
    cotangents = cotangents_of(model, derived, feeds)
    given = {**feeds, **as_inputs(cotangents, derived)}
    found = run(derived, given)
    prove(model, feeds, cotangents, gradients_in(found))
    expected = run(model, feeds)
    for name in kept:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("net", NETS)
def test_every_net_with_its_yield_op(net: str) -> None:
    one = NETS[net]
    model = one.model
    derived = onnx_derivative(model, options=Yield)
    assert names(derived.graph.input) == one.fed
    assert names(derived.graph.output) == one.gradients
    marker = yield_op(derived)
    assert list(marker.input) == names(model.graph.output)
    assert list(marker.output) == one.cotangents.split()
    assert ints(marker, "full_shape_outputs") == list(range(len(marker.input)))
    others = [i for i, value in enumerate(model.graph.output) if element(value) not in FLOATS]
    assert ints(marker, "non_differentiable_outputs") == others

    feeds = sampled(model, SIZES | ALSO.get(net, {}))
    cotangents = cotangents_of(model, None, feeds)
    whole = from_cotangents(derived)
    found = run(whole, {**feeds, **as_inputs(cotangents, whole)})
    prove(model, feeds, cotangents, gradients_in(found))


@pytest.mark.parametrize("net", NETS)
def test_both_runtimes_agree(net: str) -> None:
    if net == "recurrent":
        pytest.skip("onnx.reference can't run a Scan backwards, which the gradient through time is")
    model = NETS[net].model
    derived = onnx_derivative(model)
    feeds = sampled(model, SIZES | ALSO.get(net, {}))
    feeds |= as_inputs(cotangents_of(model, derived, feeds), derived)
    feeds = fed(derived, {**own_values(model), **feeds})
    for name, array in zip(names(derived.graph.output), ReferenceEvaluator(derived).run(None, feeds), strict=True):
        tolerance = 1e-2 if net == "half" else 2e-5
        np.testing.assert_allclose(run(derived, feeds)[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


# -- the faults of the older function, one test each -------------------------------------------------------------------

LINEAR = """g (float[N, 2] X, float[N, 1] label) => (float[1, 1] loss, float[N, 1] Y)
<float[2, 1] coef = {1, -2}, float[1] intercept = {3}>
{ m = MatMul(X, coef) Y = Add(m, intercept) d = Sub(Y, label) q = Mul(d, d) loss = ReduceSum(q) }"""

FEEDS = {
    "X": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
    "label": np.array([[1], [0], [-1]], np.float32),
}
RESIDUE = FEEDS["X"] @ [[1], [-2]] + 3 - FEEDS["label"]
LINEAR_GRADIENTS = {
    "X_grad": 2 * RESIDUE @ [[1, -2]],
    "label_grad": -2 * RESIDUE,
    "coef_grad": FEEDS["X"].T @ (2 * RESIDUE),
    "intercept_grad": (2 * RESIDUE).sum(0),
    "loss": (RESIDUE**2).sum(keepdims=True),
    "Y": RESIDUE + FEEDS["label"],
}
"""By hand: the sum of squared residues of a linear regression."""


def check_linear(derived: ModelProto, outputs: str) -> None:
    assert names(derived.graph.output) == outputs.split()
    for name, array in run(derived, FEEDS).items():
        np.testing.assert_allclose(array, LINEAR_GRADIENTS[name], rtol=1e-6, err_msg=name)


def test_bug_1_inputs_are_honoured() -> None:
    """Whatever list was given, no input had a gradient."""
    model = NETS["independent outputs"].model
    for inputs, expected in [(["Z"], ["Z"]), (["Z", "X"], ["X", "Z"]), ([], []), (("X",), ["X"])]:
        derived = onnx_derivative(model, inputs=inputs)
        assert names(derived.graph.output) == [f"{name}_grad" for name in (*expected, "w")]
        assert names(derived.graph.input)[:3] == ["X", "Z", "w"], "they stay inputs"
    with raises(UsageError, "unknown_name", "nope"):
        onnx_derivative(model, inputs=["nope"])
    with raises(UsageError, "unknown_name", "ids"):
        onnx_derivative(NETS["an integer input"].model, inputs=["ids"])


def test_bug_2_inputs_can_be_listed_verbosely() -> None:
    """With verbose=1 and a list of inputs, a name was read that nothing had set."""
    model = NETS["perceptron"].model
    loud, quiet = (onnx_derivative(model, inputs=["X"], verbose=level) for level in (2, 0))
    assert names(loud.graph.output) == names(quiet.graph.output) == ["X_grad", "w1_grad", "b1_grad", "w2_grad"]


def test_bug_3_loss_has_a_bit_of_its_own() -> None:
    """It was KeepYieldOp | FillGrad, so that this combination was it, unnoticed."""
    bits = [Yield, Keep, Fill, Loss]
    assert [int(option) for option in (Zero, *bits)] == [0, 1, 2, 4, 8]
    assert not any(Loss & other for other in (Yield, Keep, Fill))
    with raises(UsageError, "conflict", "DerivativeOptions", "KeepYieldOp"):
        onnx_derivative(by_text(LINEAR), options=Yield | Fill, loss="loss", label="label")


def test_bug_4_all_outputs_are_kept() -> None:
    """Only the last one was."""
    for net in ("two outputs", "independent outputs", "an integer output"):
        model = NETS[net].model
        derived = onnx_derivative(model, options=Keep)
        assert names(derived.graph.output)[-2:] == names(model.graph.output)


def test_bug_5_several_outputs_can_be_filled() -> None:
    """Two outputs were compared with each other as nodes, which have no order."""
    one = NETS["two outputs"]
    derived = onnx_derivative(one.model, options=Keep | Fill)
    assert names(derived.graph.input) == ["X", "w1", "w2"]
    nodes = {output: node for node in derived.graph.node for output in node.output}
    for output, cotangent in (("Y1", "Y1_grad_external"), ("Y2", "Y2_grad")):
        shape, fill = nodes[f"{output}_shape"], nodes[cotangent]
        assert (shape.op_type, list(shape.input)) == ("Shape", [output])
        assert (fill.op_type, list(fill.input)) == ("ConstantOfShape", [f"{output}_shape"])
        np.testing.assert_array_equal(numpy_helper.to_array(fill.attribute[0].t), np.ones(1, np.float32))
    x = sampled(one.model)["X"]
    w1, w2 = own_values(one.model).values()
    t = np.tanh(x @ w1)
    both = np.ones_like(t) + np.ones((3, 2)) @ w2.T * (1 - t**2)
    found = run(derived, {"X": x})
    np.testing.assert_allclose(found["X_grad"], both @ w1.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["w2_grad"], t.T @ np.ones((3, 2)), rtol=1e-5)


@pytest.mark.parametrize("options", [Zero, Keep, Keep | Fill], ids=["zero", "keep", "keep+fill"])
def test_bug_6_outputs_may_be_no_floats(options: DerivativeOptions) -> None:
    """An integer output ended in an assertion about the YieldOp."""
    model = NETS["an integer output"].model
    derived = onnx_derivative(model, options=options)
    assert names(derived.graph.output) == ["X_grad", "w_grad", *(["L", "Y"] if options & Keep else [])]
    assert names(derived.graph.input) == ["X", "w", *([] if options & Fill else ["Y_grad"])]


@pytest.mark.parametrize("net", ["convolution and pools", "pools of unknown sides"])
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_bug_7_pools_run_at_every_level_of_optimization(net: str, level: str) -> None:
    """Shapes went to the wrong graph: the session died of a segmentation fault."""
    model = NETS[net].model
    derived = onnx_derivative(model, options=Keep | Fill)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(
        derived.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )  # fmt: skip
    feeds = sampled(model)
    found = dict(zip(names(derived.graph.output), session.run(None, feeds), strict=True))
    prove(model, feeds, {"Y": np.ones_like(found["Y"])}, gradients_in(found))


def test_bug_8_the_label_is_the_label() -> None:
    """`label` had to name the loss; the documented label='label' failed."""
    model = by_text(LINEAR)
    check_linear(onnx_derivative(model, options=Loss, loss="loss", label="label"), "loss Y X_grad")
    check_linear(onnx_derivative(model, options=Loss, loss="loss", label=["label"]), "loss Y X_grad")
    check_linear(onnx_derivative(model, options=Loss, loss="loss", label=["loss", "label"]), "loss Y X_grad")
    check_linear(onnx_derivative(model, options=Loss, loss="loss", label="loss"), "loss Y X_grad label_grad")


@pytest.mark.parametrize("options", [Zero, Yield, Keep, Keep | Fill], ids=["zero", "yield", "keep", "keep+fill"])
def test_bug_9_weights_keep_their_values(options: DerivativeOptions) -> None:
    """They were lost; now they are initializers that an input of the same name overrides."""
    model = by_text(LINEAR)
    derived = onnx_derivative(model, options=options, weights=["intercept", "coef"])
    assert names(derived.graph.input)[2:4] == ["intercept", "coef"]
    kept, own = own_values(derived), own_values(model)
    for name, array in own.items():
        np.testing.assert_array_equal(kept[name], array)
    if options == Keep | Fill:
        doubled = {name: 2 * array for name, array in own.items()}
        label = FEEDS["label"]
        y = FEEDS["X"] @ doubled["coef"] + doubled["intercept"]
        found = run(derived, {**FEEDS, **doubled})
        np.testing.assert_allclose(found["Y"], y, rtol=1e-6)
        np.testing.assert_allclose(found["X_grad"], (2 * (y - label) + 1) @ doubled["coef"].T, rtol=1e-6)
        found = run(derived, FEEDS)
        expected = (2 * RESIDUE + 1) @ own["coef"].T
        np.testing.assert_allclose(found["X_grad"], expected, rtol=1e-6)


@pytest.mark.parametrize("axes", ["N M", "? ?", "N ?"])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.thinned(3)
def test_bug_10_symbols_may_broadcast(axes: str, n: int, m: int, op: str) -> None:
    """Two symbols were taken for equal: with N=1, M=3 the gradient of A[N, 4] had the shape [3, 4]."""
    a, b = axes.split()
    model = by_text(f"g (float[{a}, 4] A, float[{b}, 4] B) => (float[?, 4] Y) {{ Y = {op}(A, B) }}")
    derived = onnx_derivative(model)
    rng = np.random.default_rng(4)
    feeds = {"A": rng.uniform(1, 2, (n, 4)).astype("f"), "B": rng.uniform(1, 2, (m, 4)).astype("f")}
    g = rng.standard_normal((max(n, m), 4)).astype("f")
    found = run(derived, {**feeds, "Y_grad": g})
    assert (found["A_grad"].shape, found["B_grad"].shape) == ((n, 4), (m, 4))
    prove(model, feeds, {"Y": g}, gradients_in(found))


# -- weights and inputs ------------------------------------------------------------------------------------------------


def test_weights_are_exactly_those_asked_for_in_their_order() -> None:
    model = NETS["perceptron"].model
    derived = onnx_derivative(model, weights=["w2", "b1"])
    assert names(derived.graph.input) == ["X", "w2", "b1", "Y_grad"]
    assert names(derived.graph.output) == ["X_grad", "w2_grad", "b1_grad"]
    assert {"w1", "w2", "b1"} <= set(own_values(derived)), "the others stay as they were"
    derived = onnx_derivative(model, weights=[])
    assert names(derived.graph.input) == ["X", "Y_grad"]
    assert names(derived.graph.output) == ["X_grad"]


def test_a_weight_may_be_an_input() -> None:
    model = NETS["independent outputs"].model
    derived = onnx_derivative(model, weights=["w", "X"])
    assert names(derived.graph.input) == ["Z", "w", "X", "Y1_grad", "Y2_grad"]
    assert names(derived.graph.output) == ["Z_grad", "w_grad", "X_grad"]


def test_weights_without_inputs_and_inputs_without_weights() -> None:
    model = NETS["perceptron"].model
    assert names(onnx_derivative(model, inputs=[]).graph.output) == ["w1_grad", "b1_grad", "w2_grad"]
    assert names(onnx_derivative(model, inputs=["X"], weights=[]).graph.output) == ["X_grad"]


@pytest.mark.parametrize("weight", ["w", "r", "two"])
def test_a_weight_is_a_float_that_nothing_computes(weight: str) -> None:
    with raises(UsageError, "unknown_name", weight) as error:
        onnx_derivative(NETS["perceptron"].model, weights=[weight])
    assert error.value.hint
    assert weight != "w" or "w1" in error.value.hint


def test_nothing_to_differentiate() -> None:
    model = NETS["perceptron"].model
    only_integers = NETS["only an integer input"].model
    no_float_output = by_text("g (float[N, 4] X) => (int64[N] L) { L = ArgMax<keepdims = 0>(X) }")
    for call, kind in (
        (lambda: onnx_derivative(model, inputs=[], weights=[]), UsageError),
        (lambda: onnx_derivative(only_integers, weights=[]), UsageError),
        (lambda: onnx_derivative(no_float_output), UnsupportedError),
    ):
        with pytest.raises(kind) as error:
            call()
        assert error.value.hint


@pytest.mark.parametrize("net", ["an unused input", "an input whose shape is read", "an unused weight"])
def test_what_no_output_depends_on_has_a_gradient_of_zeros(net: str) -> None:
    one = NETS[net]
    feeds = sampled(one.model, SIZES | ALSO.get(net, {}))
    found = run(onnx_derivative(one.model, options=Keep | Fill), feeds)
    unused = "dead" if net == "an unused weight" else "U"
    expected = {**own_values(one.model), **feeds}[unused]
    np.testing.assert_array_equal(found[f"{unused}_grad"], np.zeros_like(expected))
    assert np.any(found["X_grad"])


def test_the_type_of_a_gradient_is_that_of_its_value() -> None:
    text = """g (float16[N, 2] X, double[N, 2] Z) => (double[N, 2] Y) <bfloat16[2] v = {1, 2}, float[2] w = {1, 2}>
    { x = Cast<to = 11>(X) a = Cast<to = 11>(v) b = Cast<to = 11>(w) p = Mul(x, a) q = Mul(Z, b) Y = Add(p, q) }"""
    derived = onnx_derivative(by_text(text))
    assert {value.name: element(value) for value in derived.graph.output} == {
        "X_grad": TensorProto.FLOAT16,
        "Z_grad": TensorProto.DOUBLE,
        "v_grad": TensorProto.BFLOAT16,
        "w_grad": TensorProto.FLOAT,
    }
    assert element(derived.graph.input[-1]) == TensorProto.DOUBLE


# -- options -----------------------------------------------------------------------------------------------------------

CLASHES = {
    "an integer": 1,
    "a name": "Zero",
    "a truth value": True,
    "fill alone": Fill,
    "yield and keep": Yield | Keep,
    "yield and fill": Yield | Fill,
    "yield, keep and fill": Yield | Keep | Fill,
    "loss and yield": Loss | Yield,
    "loss and keep": Loss | Keep,
    "loss and fill": Loss | Fill,
    "all": Loss | Yield | Keep | Fill,
}


@pytest.mark.parametrize("options", CLASHES)
def test_options_that_do_not_go_together_are_refused(options: str) -> None:
    with pytest.raises(UsageError) as error:
        onnx_derivative(by_text(LINEAR), options=CLASHES[options], loss="loss", label="label")
    assert error.value.hint


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        DerivativeOptions(16)


EVERY = [Zero, Yield, Keep, Keep | Fill, Loss]
IDS = ["zero", "yield", "keep", "keep+fill", "loss"]


@pytest.mark.parametrize("options", EVERY, ids=IDS)
def test_the_result_is_also_written_to_a_file(options: DerivativeOptions, tmp_path: Path) -> None:
    path = tmp_path / "derivative.onnx"
    derived = onnx_derivative(by_text(LINEAR), options=options, path_name=str(path))
    assert onnx.load(path) == derived
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("options", EVERY, ids=IDS)
def test_the_input_model_is_left_as_it_was(options: DerivativeOptions) -> None:
    model = by_text(LINEAR)
    before = model.SerializeToString(deterministic=True)
    derived = onnx_derivative(model, options=options)
    assert model.SerializeToString(deterministic=True) == before
    assert derived.ir_version == model.ir_version
    del derived.graph.node[:]
    assert model.SerializeToString(deterministic=True) == before, "nothing is shared"


def test_names_of_the_model_are_left_alone() -> None:
    """It has values called like a gradient and like a cotangent: Y = sin(x³), and is differentiated as any other."""
    model = by_text(
        "g (float[N] X) => (float[N] Y) { X_grad = Mul(X, X) Y_grad = Mul(X_grad, X) Y = Sin(Y_grad) }"
    )  # fmt: skip
    derived = onnx_derivative(model, options=Keep)
    taken = {*names(derived.graph.input), *names(derived.graph.output)}
    assert taken >= {"X", "Y"}
    assert not taken & {"X_grad", "Y_grad"}
    x, g = np.float32([[0.1, 0.2, -0.3], [1, 2, 3]])
    gradient, y = run(derived, dict(zip(names(derived.graph.input), (x, g), strict=True))).values()
    np.testing.assert_allclose(y, np.sin(x**3), rtol=1e-5)
    np.testing.assert_allclose(gradient, 3 * x**2 * np.cos(x**3) * g, rtol=1e-5)


def test_weights_of_the_oldest_models_may_be_fed_too() -> None:
    """Before IR version 4 an initializer had to be an input, and could not be overridden for all that."""
    header = '<ir_version: 3, opset_import: ["": 9]>'
    text = "g (float[N, 4] X, float[4] w) => (float[N, 4] Y) <float[4] w = {1, 2, 3, 4}> { Y = Mul(X, w) }"
    derived = onnx_derivative(parser.parse_model(header + text), options=Keep | Fill)
    assert names(derived.graph.output) == ["X_grad", "w_grad", "Y"]
    x = np.ones((3, 4), np.float32)
    for fed_weight, w in (({}, [1, 2, 3, 4]), ({"w": np.float32([5, 6, 7, 8])}, [5, 6, 7, 8])):
        np.testing.assert_array_equal(run(derived, {"X": x, **fed_weight})["X_grad"], x * w)


def test_a_gradient_can_be_derived_again() -> None:
    """With respect to the same input: d(3 x² g)/dx = 6 x g."""
    model = by_text("g (float[N] X) => (float[N] Y) { q = Mul(X, X) Y = Mul(q, X) }")
    first = onnx_derivative(model)
    second = onnx_derivative(first)
    onnx.checker.check_model(second, full_check=True)
    assert len({*names(second.graph.input), *names(second.graph.output)}) == 5
    x, g, h = np.float32([[1, 2], [3, 4], [5, 6]])
    inputs = dict(zip(names(second.graph.input), (x, g, h), strict=True))
    by_x, by_g = run(second, inputs).values()
    np.testing.assert_allclose(by_x, 6 * x * g * h, rtol=1e-6)
    np.testing.assert_allclose(by_g, 3 * x**2 * h, rtol=1e-6)


# -- the loss mode -----------------------------------------------------------------------------------------------------


def test_the_inputs_of_the_model_and_its_weights_stay_as_they_are() -> None:
    derived = onnx_derivative(by_text(LINEAR), options=Loss, loss="loss", label="label")
    onnx.checker.check_model(derived, full_check=True)
    assert names(derived.graph.input) == ["X", "label"]
    assert {"coef", "intercept"} <= set(own_values(derived))


def test_the_gradients_of_a_loss() -> None:
    model = by_text(LINEAR)

    def derive(**given: object) -> ModelProto:
        return onnx_derivative(model, options=Loss, loss="loss", **given)  # type: ignore[arg-type]

    check_linear(derive(label="label", weights=["intercept", "coef"]), "loss Y X_grad intercept_grad coef_grad")
    check_linear(derive(label="label", inputs=["X"]), "loss Y X_grad")
    check_linear(derive(label="loss", inputs=["X"]), "loss Y X_grad")
    check_linear(derive(inputs=["coef", "intercept"]), "loss Y coef_grad intercept_grad")
    check_linear(derive(label="label", inputs=["intercept"], weights=["coef"]), "loss Y intercept_grad coef_grad")
    check_linear(derive(inputs=[], weights=["coef"]), "loss Y coef_grad")
    check_linear(derive(), "loss Y X_grad label_grad")


def test_which_output_is_the_loss() -> None:
    check_linear(onnx_derivative(by_text(LINEAR), options=Loss, label="label"), "loss Y X_grad")
    swapped = LINEAR.replace("float[1, 1] loss, float[N, 1] Y", "float[N, 1] Y, float[1, 1] loss")
    check_linear(onnx_derivative(by_text(swapped), options=Loss, label="label"), "loss Y X_grad")
    unnamed = by_text(LINEAR.replace("loss", "cost"))
    derived = onnx_derivative(unnamed, options=Loss, label="label")
    assert names(derived.graph.output) == ["cost", "Y", "X_grad"]


@pytest.mark.parametrize("shape", ["", "1", "1, 1", "1, 1, 1"])
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_a_loss_has_one_element_in_any_shape_and_type(shape: str, dtype: str) -> None:
    """The older seed was a float32 scalar, whatever the loss."""
    declared, rank = (f"{dtype}[{shape}]", len(shape.split(","))) if shape else (dtype, 0)
    model = by_text(f"""g ({dtype}[N] X) => ({declared} loss) <int64[{rank}] s = {{{shape}}}>
    {{ q = Mul(X, X) r = ReduceSum<keepdims = 0>(q) loss = Reshape(r, s) }}""")
    x = np.array([1, 2, 3], np.float32 if dtype == "float" else np.float64)
    found = run(onnx_derivative(model, options=Loss), {"X": x})
    np.testing.assert_allclose(found["X_grad"], 2 * x)
    assert found["X_grad"].dtype == x.dtype
    assert found["loss"].item() == 14


def test_labels_may_be_integers() -> None:
    model = by_text("""g (float[N, 3] X, int64[N] label) => (float loss)
    <float[3, 3] w = {1, 2, 3, 4, -5, 6, 7, 8, -9}>
    { z = MatMul(X, w) loss = SoftmaxCrossEntropyLoss(z, label) }""")
    derived = onnx_derivative(model, options=Loss, label="label", weights=["w"])
    assert names(derived.graph.output) == ["loss", "X_grad", "w_grad"]
    feeds = sampled(model)
    found = run(derived, feeds)
    prove(model, feeds, {"loss": np.float32(1)}, gradients_in(found))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss": "lost"}, ("unknown_name", "lost")),
        ({"loss": "q"}, ("unknown_name", "q")),
        ({"loss": "loss", "label": "lable"}, ("unknown_name", "lable")),
        ({"loss": "loss", "label": "Y"}, ("unknown_name", "Y")),
        ({"loss": "loss", "inputs": ["nope"]}, ("unknown_name", "nope")),
        ({"loss": "loss", "weights": ["nope"]}, ("unknown_name", "nope")),
        ({"loss": "loss", "inputs": []}, ("no_data",)),
    ],
    ids=str,
)
def test_what_the_loss_mode_refuses(given: dict, expected: tuple[str, ...]) -> None:
    with raises(UsageError, *expected) as error:
        onnx_derivative(by_text(LINEAR), options=Loss, **given)
    assert error.value.hint


def test_a_loss_of_several_elements_is_refused() -> None:
    model = by_text("g (float[3, 2] X) => (float[3, 2] loss) { loss = Mul(X, X) }")
    with raises(UsageError, "wrong_shape", "loss", "3", "2"):
        onnx_derivative(model, options=Loss)


# -- the older function's own tests, written anew --------------------------------------------------------------------


ADD = NETS["add"]


def test_older_keep_yield() -> None:
    assert "YieldOp" in {node.op_type for node in onnx_derivative(ADD.model, options=Yield).graph.node}


def test_older_default_has_no_output_of_the_model() -> None:
    derived = onnx_derivative(ADD.model)
    assert "Y" not in names(derived.graph.output)
    assert derived.ir_version == ADD.model.ir_version
    x = np.random.default_rng(5).standard_normal((7, 10)).astype("f")
    found = run(derived, {"X": np.zeros_like(x), "Y_grad": x})
    np.testing.assert_array_equal(found["X_grad"], x)
    np.testing.assert_allclose(found["b_grad"], [x.sum()], rtol=1e-5)


def test_older_keep_outputs() -> None:
    x = np.random.default_rng(6).standard_normal((7, 10)).astype("f")
    found = run(onnx_derivative(ADD.model, options=Keep), {"X": x, "Y_grad": x})
    np.testing.assert_array_equal(found["Y"], x + 1)


def test_older_product_of_an_identity() -> None:
    x, g = np.random.default_rng(7).standard_normal((2, 7, 10)).astype("f")
    derived = onnx_derivative(NETS["product of one value"].model)
    np.testing.assert_allclose(run(derived, {"X": x, "Y_grad": g})["X_grad"], 2 * x * g, rtol=1e-6)


def test_older_no_weight() -> None:
    derived = onnx_derivative(ADD.model, weights=[])
    assert names(derived.graph.input) == ["X", "Y_grad"]
    x = np.ones((7, 10), np.float32)
    assert list(run(derived, {"X": x, "Y_grad": x})) == ["X_grad"]


def test_older_fill_needs_the_outputs() -> None:
    with raises(UsageError, "missing_value", "DerivativeOptions", "FillGrad", "KeepOutputs"):
        onnx_derivative(ADD.model, weights=[], options=Fill)
    derived = onnx_derivative(ADD.model, weights=[], options=Fill | Keep)
    assert names(derived.graph.input) == ["X"]
    x = np.random.default_rng(8).standard_normal((7, 10)).astype("f")
    np.testing.assert_array_equal(run(derived, {"X": x})["X_grad"], np.ones_like(x))


def test_older_options_are_no_integers() -> None:
    with raises(UsageError, "wrong_value", "options=1", "DerivativeOptions") as error:
        onnx_derivative(ADD.model, weights=[], options=1)  # type: ignore[arg-type]
    assert error.value.hint
    assert "DerivativeOptions" in error.value.hint


def test_older_loss_of_a_regression(tmp_path: Path) -> None:
    """Of a fitted regression; there it was derived without the loss, and nobody looked at the result."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((100, 10)).astype("f")
    y = (x @ rng.standard_normal((10, 1)) + 2 + rng.standard_normal((100, 1))).astype("f")
    with_one = np.hstack([x, np.ones((100, 1), np.float32)])
    fitted = np.linalg.lstsq(with_one, y, rcond=None)[0].astype("f")
    body = (
        LINEAR.replace("[N, 2]", "[N, 10]").replace("[2, 1]", "[10, 1]").replace("{1, -2}", "{}").replace("{3}", "{}")
    )
    model = by_text(body)
    for tensor, array in zip(model.graph.initializer, (fitted[:10], fitted[10]), strict=True):
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    path = tmp_path / "loss.onnx"
    onnx_derivative(
        model, options=Loss, loss="loss", label="label", inputs=[], weights=["coef", "intercept"], path_name=str(path)
    )
    found = run(onnx.load(path), {"X": x, "label": y})
    residue = with_one @ fitted - y
    np.testing.assert_allclose(found["loss"].item(), np.sum(residue**2), rtol=1e-4)
    for name in ("coef_grad", "intercept_grad"):
        np.testing.assert_allclose(found[name], 0, atol=2e-3, err_msg="the fit is where the gradient vanishes")


# -- the older function's graphs -----------------------------------------------------------------------------------

GOLDEN = Path(os.environ.get("ONNXGRAD_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
ABSENT = f"there are no graphs of the older function in {GOLDEN}: set ONNXGRAD_GOLDEN to their folder"

BUILT = {
    "mlp.in_list_zero": ("bug 1: the list of inputs was ignored", "X w1 b1 w2 b2 Y_grad",
                         "X_grad w1_grad b1_grad w2_grad b2_grad"),
    "mlp.in_list_verbose": ("bug 2: a name that nothing had set", "X w1 b1 w2 b2 Y_grad",
                            "X_grad w1_grad b1_grad w2_grad b2_grad"),
    "two.keep": ("bug 4: the last output only", "X w1 w2 Y1_grad_external Y2_grad",
                 "X_grad w1_grad w2_grad Y1 Y2"),
    "two_ind.keep": ("bug 4: the last output only", "X w1 w2 Y1_grad Y2_grad", "X_grad w1_grad w2_grad Y1 Y2"),
    "two.keepfill": ("bug 5: nodes were compared", "X w1 w2", "X_grad w1_grad w2_grad Y1 Y2"),
    "two_ind.keepfill": ("bug 5: nodes were compared", "X w1 w2", "X_grad w1_grad w2_grad Y1 Y2"),
    "linreg+loss.fw_keepfill": ("bug 5: nodes were compared", "X label coef intercept",
                                "X_grad label_grad coef_grad intercept_grad loss Y"),
    "two_int.zero": ("bug 6: an integer output", "X w1 Y1_grad", "X_grad w1_grad"),
    "two_int.keep": ("bug 6: an integer output", "X w1 Y1_grad", "X_grad w1_grad L Y1"),
    "two_int.keepfill": ("bug 6: an integer output", "X w1", "X_grad w1_grad L Y1"),
    "linreg+loss.loss_label_is_label": ("bug 8: label had to be the loss", "X label", "loss Y X_grad"),
    "linreg+loss.loss_inputs_weights": ("the order was that of a hash table", "X label",
                                        "loss Y X_grad coef_grad intercept_grad"),
    "unused_input.zero": ("an unused input was refused", "X U w1 Y_grad", "X_grad U_grad w1_grad"),
    "unused_input.keepfill": ("an unused input was refused", "X U w1", "X_grad U_grad w1_grad Y"),
    "unused_init.zero": ("an unused weight was refused", "X w1 dead Y_grad", "X_grad w1_grad dead_grad"),
    "unused_init.keepfill": ("an unused weight was refused", "X w1 dead", "X_grad w1_grad dead_grad Y"),
    "unreach_input.zero": ("an input whose shape is read was refused", "X U w1 Y_grad", "X_grad U_grad w1_grad"),
    "unreach_input.keepfill": ("an input whose shape is read was refused", "X U w1", "X_grad U_grad w1_grad Y"),
    "bn.zero": ("BatchNormalization failed in building", "X s b mu var Y_grad",
                "X_grad s_grad b_grad mu_grad var_grad"),
    "bn.keepfill": ("BatchNormalization failed in building", "X s b mu var",
                    "X_grad s_grad b_grad mu_grad var_grad Y"),
    "unsupported.zero": ("Softplus had no gradient", "X Y_grad", "X_grad"),
    "unsupported.keepfill": ("Softplus had no gradient", "X", "X_grad Y"),
    "if.zero": ("If failed in building", "X w z Y_grad", "X_grad w_grad z_grad"),
    "if.keepfill": ("If failed in building", "X w z", "X_grad w_grad z_grad Y"),
    "lstm.zero": ("LSTM failed in building", "X W R B Y_grad", "X_grad W_grad R_grad B_grad"),
    "lstm.keepfill": ("LSTM failed in building", "X W R B", "X_grad W_grad R_grad B_grad Y"),
}  # fmt: skip
"""Where the older answer does not hold: why, and the inputs and outputs in its place."""

REFUSED = {
    "mlp.in_unknown_zero": ("bug 1: an unknown input was ignored", "nope"),
    "add.bad_yield_fill": ("bug 3: it was the option Loss", "KeepYieldOp"),
    "mlp.w_unknown": ("as before", "nope"),
    "mlp.w_activation": ("as before", "g1"),
    "mlp.in_empty_w_empty": ("as before", ""),
    "embed_onlyint.w_empty": ("as before", ""),
    "add.bad_int": ("as before", "int"),
    "add.bad_fill_alone": ("as before", "KeepOutputs"),
    "add.bad_yield_keep": ("as before", "KeepYieldOp"),
    "add.bad_all": ("as before", "KeepYieldOp"),
    "add.bad_loss_keep": ("as before", "Loss"),
    "linreg.loss_nopath": ("its model has no such output", "loss"),
    "linreg.loss_weights": ("its model has no such output", "loss"),
    "linreg.loss_nolabel": ("its model has no such output", "loss"),
    "linreg.loss_noloss": ("its model has no such input", "label"),
    "linreg.loss_asunittest": ("the result did not load: its model has no such output", "loss"),
    "linreg+loss.loss_label_is_pred": ("as before: an output is no label", "Y"),
    "linreg+loss.path_ignored_zero": ("loss and label without the option Loss were ignored", "loss"),
}
"""What is refused, and what the message names."""

OPTIONS = {0: Zero, 1: Yield, 2: Keep, 3: Yield | Keep, 4: Fill, 6: Keep | Fill, 7: Yield | Keep | Fill}


@cache
def index() -> dict[str, dict]:
    path = GOLDEN / "index.json"
    return json.loads(path.read_text()) if path.exists() else {}


@dataclass(frozen=True)
class Golden:
    """One call of the older function, and what it built."""

    entry: str

    @property
    def known(self) -> dict:
        return index()[self.entry]

    @property
    def model(self) -> ModelProto:
        return onnx.load(self.file("input.onnx"))

    def file(self, suffix: str) -> Path:
        return GOLDEN / f"{self.entry.split('.')[0].replace('+', '_')}.{suffix}"

    def built(self, suffix: str) -> Path:
        return self.file(f"{self.entry.split('.')[1]}.{suffix}")

    @property
    def options(self) -> DerivativeOptions | int:
        number = int(self.known["call"].get("options", 0))
        if self.entry == "add.bad_int":
            return number
        if number == 5 or self.entry == "add.bad_loss_keep":  # Loss was 5, and KeepYieldOp | FillGrad as well
            return Yield | Fill if self.entry == "add.bad_yield_fill" else Loss | (Keep if number == 7 else Zero)
        return OPTIONS[number]

    def derive(self, folder: Path) -> ModelProto:
        call = {**self.known["call"], "options": self.options}
        if "path_name" in call:
            call["path_name"] = str(folder / call["path_name"])
        return onnx_derivative(self.model, **call)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        if self.entry in BUILT:
            _, inputs, outputs = BUILT[self.entry]
            return inputs.split(), outputs.split()
        return tuple([text.split(":")[0] for text in self.known[key]] for key in ("inputs", "outputs"))

    @property
    def described(self) -> list[str | None]:
        """The inputs and outputs with their types and shapes, as far as the names are right."""
        texts = [*self.known.get("inputs", ()), *self.known.get("outputs", ())]
        inputs, outputs = self.names
        return [next((t for t in texts if t.split(":")[0] == name), None) for name in (*inputs, *outputs)]

    @property
    def arrays(self) -> tuple[Arrays, Arrays]:
        """What it was fed, and what came out."""
        path = self.built("npz")
        if not path.exists():
            return {}, {}
        stored = np.load(path)
        parts = {part: {} for part in ("in", "out")}
        for key in stored.files:
            part, name = key.split("/", 1)
            parts[part][name.replace("|", "/")] = stored[key]
        return parts["in"], parts["out"]


def described(value: ValueInfoProto, like: str) -> str:
    """A value in the words of the golden index; an axis that has no name there may have any."""
    axes: list[int | str | None] = []
    for axis, text in zip(value.type.tensor_type.shape.dim, like.split("[")[1].rstrip("]").split(", "), strict=True):
        axes.append(None if text == "None" else axis.dim_value or axis.dim_param)
    return f"{value.name}:{TensorProto.DataType.Name(element(value))}{axes}"


def entries(refused: bool) -> list:
    found = [pytest.param(Golden(e), id=e) for e in index() if (e in REFUSED) == refused]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason=ABSENT))]


@pytest.mark.parametrize("golden", entries(refused=False))
def test_golden(golden: Golden, tmp_path: Path) -> None:
    derived = golden.derive(tmp_path)
    onnx.checker.check_model(derived)
    inputs, outputs = golden.names
    assert names(derived.graph.input) == inputs
    assert names(derived.graph.output) == outputs
    for ours, theirs in zip((*derived.graph.input, *derived.graph.output), golden.described, strict=True):
        assert theirs is None or described(ours, theirs) == theirs
    if golden.options == Yield:
        ours, theirs = yield_op(derived), yield_op(onnx.load(golden.built("onnx")))
        assert (list(ours.input), list(ours.output)) == (list(theirs.input), list(theirs.output))
        assert ints(ours, "non_differentiable_outputs") == ints(theirs, "non_differentiable_outputs")

    model = golden.model
    fed_then, found_then = golden.arrays
    feeds = {**sampled(model, {**SIZES, "": 3}), **fed_then}
    if golden.options == Yield:
        derived = from_cotangents(derived)
    cotangents = cotangents_of(model, derived, feeds)
    seeds = as_inputs(cotangents, derived)
    cotangents |= {output: feeds[n] for output in cotangents if (n := cotangent_name(output, list(feeds)))}
    if golden.options == Loss:
        cotangents = {"loss": np.ones((1, 1), np.float32)}
    found = run(derived, {**seeds, **feeds})
    for name, array in found_then.items():
        tolerance = 2e-3 if array.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
        assert found[name].dtype == array.dtype
    prove(model, {n: a for n, a in feeds.items() if n not in seeds}, cotangents, gradients_in(found))


@pytest.mark.parametrize("golden", entries(refused=True))
def test_golden_refused(golden: Golden, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=REFUSED[golden.entry][1] or None) as error:
        golden.derive(tmp_path)
    assert error.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not index(), reason=ABSENT)
def test_golden_deviations_are_few_and_real() -> None:
    """Each is of an entry that exists, and says otherwise than the older function did."""
    for entry, (_, *ours) in BUILT.items():
        then = [" ".join(text.split(":")[0] for text in index()[entry].get(key, ())) for key in ("inputs", "outputs")]
        assert then != ours, entry
    assert not BUILT.keys() & REFUSED.keys()
    assert REFUSED.keys() <= index().keys()
