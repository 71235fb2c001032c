"""Derivatives of each sample alone against torch.func's vmap, and the proof that samples do not mix."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, parser
from torch import Tensor

from onnxgrad_cli.common.choices import Derivative
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.derivatives.sample_gradients import ALIGNED, Meetings, sample_axes
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.derivative_proof import prove_derived
from tests.autodiff.rows import ROWS as OPERATORS
from tests.derivatives.test_kinds import Arrays, Net, net, run
from tests.harness import Case, fed, forward_model, sample

from onnxgrad_cli.derivatives.derivative_model import open_model  # isort: skip
from tests.facts import raises

BATCH = 4
NETS = {"perceptron": ["c.weight", "a.bias"], "convolutional": ["a.weight", "norm.bias"]}


def points(name: str, batch: int) -> tuple[Net, dict[str, Tensor]]:
    subject = net(name)
    torch.manual_seed(3)
    return subject, {key: torch.randn((batch, *x.shape[1:]), dtype=x.dtype) for key, x in subject.inputs.items()}


def arrays(values: dict[str, Tensor]) -> Arrays:
    return {name: value.numpy() for name, value in values.items()}


def agrees(found: np.ndarray, wanted: Tensor) -> None:
    assert found.shape == tuple(wanted.shape)
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def of_one(subject: Net, weights: dict[str, Tensor], *sample: Tensor) -> Tensor:
    """The outputs of one sample, by PyTorch."""
    every = {**subject.weights, **weights}
    return torch.func.functional_call(subject.module, every, tuple(x[None] for x in sample))[0]


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("name", NETS)
def test_jacobians_of_a_batch_are_those_of_vmap(name: str, batch: int) -> None:
    """Of a batch whose size is found at run time; by a weight they are what they are without."""
    subject, inputs = points(name, batch)
    weight = NETS[name][0]
    model = derive(subject.model["any"], "jacobian", wrt=[*inputs, weight], per_sample=True)
    found = run(model, arrays(inputs))
    every = tuple(range(len(inputs)))
    wanted = torch.func.vmap(torch.func.jacrev(lambda *x: of_one(subject, {}, *x), every))(*inputs.values())
    for x, value in zip(inputs, wanted, strict=True):
        agrees(found[f"y_jacobian_{x}"], value)
    by_weight = torch.func.jacrev(lambda w, *x: of_one(subject, {weight: w}, *x))
    axes = (None, *[0] * len(inputs))
    agrees(found[f"y_jacobian_{weight}"], torch.func.vmap(by_weight, axes)(subject.weights[weight], *inputs.values()))


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("name", NETS)
def test_gradients_of_samples_are_those_of_vmap(name: str, batch: int) -> None:
    subject, inputs = points(name, batch)
    weights = {w: subject.weights[w] for w in NETS[name]}
    model = derive(subject.model["any"], wrt=[*inputs, *weights], per_sample=True)
    outputs = subject.module(*inputs.values())
    cotangents = torch.randn_like(outputs)
    found = run(model, {**arrays(inputs), "y_grad": cotangents.numpy()})

    def loss(weights: dict[str, Tensor], g: Tensor, *x: Tensor) -> Tensor:
        return (g * of_one(subject, weights, *x)).sum()

    axes = (None, 0, *[0] * len(inputs))
    wanted = torch.func.vmap(torch.func.grad(loss), axes)(weights, cotangents, *inputs.values())
    for w in weights:
        agrees(found[f"{w}_grad"], wanted[w])
    by_input = torch.func.vmap(torch.func.grad(loss, 2), axes)(weights, cotangents, *inputs.values())
    agrees(found["x_grad"], by_input)


def test_hessians_of_samples_are_those_of_vmap() -> None:
    subject, inputs = points("perceptron", BATCH)
    found = run(derive(subject.model["any"], "hessian", per_sample=True), arrays(inputs))
    hessian = torch.func.hessian(lambda x, z: of_one(subject, {}, x, z).sum(), (0, 1))
    wanted = torch.func.vmap(hessian)(*inputs.values())
    for i, x in enumerate("xz"):
        for j, z in enumerate("xz"):
            agrees(found[f"{x}_hessian_{z}"], wanted[i][j])


@pytest.mark.parametrize("which", ["2", "argmax", "label"])
def test_with_the_score_of_a_class(which: str) -> None:
    subject, inputs = points("perceptron", BATCH)
    model = derive(subject.model["any"], "jacobian", class_=which, per_sample=True)
    label = np.array([4, 0, 2, 1])
    feeds = {**arrays(inputs), **({"label": label} if which == "label" else {})}
    outputs = subject.module(*inputs.values())
    classes = {"2": torch.full((BATCH,), 2), "argmax": outputs.argmax(1), "label": torch.from_numpy(label)}[which]
    score = torch.func.jacrev(lambda x, z, c: of_one(subject, {}, x, z).gather(0, c[None])[0])
    agrees(run(model, feeds)["y_score_jacobian_x"], torch.func.vmap(score)(*inputs.values(), classes))


MIXED = """<ir_version: 10, opset_import: ["" : 18]> g (float[N, 3] x) => (float[N, 3] y)
<float[3] s = {{1, 2, 3}}, float[3] b = {{0, 1, 2}}, float[3] m = {{0.1, 0.2, 0.3}}, float[3] v = {{1, 2, 1}},
 int64[1] first = {{0}}, float[4, 3] four = {{1,2,3,4,5,6,7,8,9,1,2,3}}, int64[2] flat = {{-1, 1}}> {{ {} }}"""


@pytest.mark.parametrize(
    ("body", "node"),
    [
        ("t = ReduceMean(x, first) y = Sub(x, t)", "ReduceMean"),
        ("t = Transpose(x) u = MatMul(x, t) y = MatMul(u, x)", "MatMul"),
        ("y = Softmax<axis = 0>(x)", "Softmax"),
        ("t = Reshape(x, flat) u = Softmax(t) r = Shape(x) y = Reshape(u, r)", "Reshape"),
        ("y = Add(x, four)", "Add"),
        ("y = CumSum(x, first)", "CumSum"),
        ("y = NonZero(x)", "NonZero"),
    ],
)
def test_samples_that_mix_are_refused(body: str, node: str) -> None:
    text = MIXED.format(body).replace("float[N, 3] y", "float[A, B] y")
    with pytest.raises(UnsupportedError) as raised:
        derive(parser.parse_model(text.replace("y = NonZero(x)", "z = NonZero(x) y = Cast<to = 1>(z)")), "jacobian",
               per_sample=True)  # fmt: skip
    assert node in {refusal.op_type for refusal in raised.value.refusals}


def test_what_mixes_in_training_mode_alone() -> None:
    model = parser.parse_model(MIXED.format("y = BatchNormalization(x, s, b, m, v)"))
    found = run(derive(model, "jacobian", wrt="x", per_sample=True), {"x": np.ones((2, 3), np.float32)})
    assert found["y_jacobian_x"].shape == (2, 3, 3)
    with raises(UnsupportedError, "refused", "BatchNormalization_y/batch_mean/ReduceMean", "ReduceMean"):
        derive(model, "jacobian", wrt="x", per_sample=True, options=Options(mode="train"))


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"kind": "jvp"}, ("conflict", "per_sample", "kind='jvp'")),
        ({"cotangents": "keep"}, ("conflict", "per_sample", "cotangents='keep'")),
        ({"kind": "hessian", "wrt": "s"}, ("wrong_shape", "0", "s")),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, str], facts: tuple[str, ...]) -> None:
    model = parser.parse_model(MIXED.format("y = Mul(x, s)"))
    with raises(UsageError, *facts):
        derive(model, per_sample=True, **arguments)  # type: ignore[arg-type]


def verdict(model: ModelProto, original: ModelProto) -> str:
    said = read_derived(model)
    assert said is not None
    return prove_derived(model, said, original=original).verdict


@pytest.mark.parametrize("kind", ["vjp", "jacobian", "hessian"])
def test_a_sample_that_gets_anothers_derivative_fails(kind: str) -> None:
    """The proof alone, of a model in which the samples have been turned around."""
    original = parser.parse_model(MIXED.format("t = Mul(x, s) y = Tanh(t)").replace("[N,", "[2,"))
    wrt = ["x", "s"] if kind != "hessian" else ["x"]
    model = derive(original, kind, wrt=wrt, per_sample=True)  # type: ignore[arg-type]
    assert verdict(model, original) == "proved"
    last = model.graph.output[-1].name
    for node in model.graph.node:
        node.output[:] = ["right" if name == last else name for name in node.output]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 0]), "turned"))
    model.graph.node.append(onnx.helper.make_node("Gather", ["right", "turned"], [last], axis=0))
    assert verdict(model, original) == "failed"


FIRST = {(case.op, case.domain): case for case in reversed(OPERATORS)}


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_no_sample_is_seen_by_another_where_an_operator_is_said_to_keep_them_apart(case: Case) -> None:
    """Another first sample changes no other one's results on onnxruntime; where they may mix, that is refused."""
    model = forward_model(case, False)
    graph = open_model(model, None)
    make_differentiable(graph, Options(), Training())
    try:
        axes = sample_axes(graph, graph.output_names)
    except UnsupportedError as error:
        assert error.refusals
        return
    feeds = fed(model, sample(case))
    other = {
        name: np.concatenate([x[:1][..., ::-1] * 0.5, x[1:]]) if axes.get(name) == 0 and x.dtype.kind == "f" else x
        for name, x in feeds.items()
    }
    results = [Executor(model, case.executor)(each) for each in (feeds, other)]
    for name in results[0]:
        axis = axes.get(name)
        here, there = (each[name] for each in results)
        if axis is None:
            np.testing.assert_array_equal(here, there)
        else:
            np.testing.assert_array_equal(*(np.delete(each, 0, axis) for each in (here, there)))


MET = """<ir_version: 10, opset_import: ["" : 18]> g (float[N, 3] x, int64[N, 2] t) => (float[N, O] y)
<float[3, 3] w = {{1, -2, 3, 0.5, 4, -1, 2, 0.3, 1}}, float[1, 3] b = {{0.5, -1, 2}}, float[3] c = {{1, 0.2, -3}},
 int64[1] first = {{0}}> {{ {} }}"""
MEETINGS = {
    "tied": "h = MatMul(x, w) a = Tanh(h) v = Transpose(w) u = MatMul(a, v) y = Add(u, b)",
    "behind others": "v = Exp(w) p = ReduceSum<keepdims=0>(v, first) s = Mul(x, p) k = MatMul(v, w) y = MatMul(s, k)",
    "in one node": "h = Gemm<transB=1>(x, w, b) u = MatMul(h, w) a = Tanh(u) y = Sub(b, a)",
    "looked up": "e = Gather(w, t) h = Tanh(e) m = MatMul(h, w) y = ReduceSum<keepdims=0>(m, column1)",
    "normalized": "n = LayerNormalization(x, c, b) u = MatMul(n, w) y = Add(n, u)",
    "an equation": 'y = Einsum<equation="ni,ij->nj">(x, w)',
    "unread by samples": "n = Neg(w) y = Tanh(x)",
    "not separable": "h = MatMul(x, w) l = Cast<to=7>(t) g = GatherElements<axis=1>(w4, l) u = Add(h, b) "
    "m = ReduceMean(g, column1) y = Mul(u, m)",
}  # fmt: skip
FOUR = ", float[4, 2] w4 = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] column1 = {1}> {"


@pytest.mark.parametrize("name", MEETINGS)
def test_where_samples_meet_weights(name: str) -> None:
    """Against the gradients of each sample's own run."""
    text = MET.format(MEETINGS[name]).replace("> {", FOUR, 1)
    fixed = name == "not separable"
    model = parser.parse_model(text.replace("[N,", "[4,") if fixed else text)
    wrt = ["x", "w", "b", "c", *(["w4"] if fixed else [])]
    rng = np.random.default_rng(5)
    feeds = {"x": rng.standard_normal((4, 3)), "t": rng.integers(0, 2, (4, 2)), "y_grad": rng.standard_normal((4, 3))}
    feeds = {key: x.astype(np.float32) if x.dtype.kind == "f" else x for key, x in feeds.items()}
    found = run(derive(model, wrt=wrt, per_sample=True), feeds)
    one = derive(model, wrt=wrt)
    for i in range(4):
        masked = {**feeds, "y_grad": feeds["y_grad"] * (np.arange(4) == i)[:, None].astype(np.float32)}
        for weight, value in run(one, masked).items():
            claim = found[weight][i]
            np.testing.assert_allclose(claim, value[i] if weight == "x_grad" else value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MEETINGS)
def test_jacobians_where_samples_meet_weights(name: str) -> None:
    """Against the whole batch's, of which a sample's results have their own block."""
    text = MET.format(MEETINGS[name]).replace("> {", FOUR, 1)
    fixed = name == "not separable"
    model = parser.parse_model(text.replace("[N,", "[4,") if fixed else text)
    wrt = ["x", "w", "b", "c", *(["w4"] if fixed else [])]
    rng = np.random.default_rng(7)
    feeds = {"x": rng.standard_normal((4, 3)).astype(np.float32), "t": rng.integers(0, 2, (4, 2))}
    found = run(derive(model, "jacobian", wrt=wrt, per_sample=True), feeds)
    whole = run(derive(model, "jacobian", wrt=wrt), feeds)
    for key, value in whole.items():
        own = value[np.arange(4), :, np.arange(4)] if key.endswith("_x") else value
        np.testing.assert_allclose(found[key], own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_a_recurrent_network_met_by_samples(op: str, gates: int) -> None:
    """Whose samples are on axis 1 of what it reads, against the gradients of each sample's own run."""
    rng = np.random.default_rng(2)
    shapes = {"w": (1, 3 * gates, 2), "r": (1, 3 * gates, 3), "b": (1, 6 * gates)}
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]> g (float[N, 5, 2] x) => (float[N, 3] y)
        <int64[1] first = {{0}}> {{
            t = Transpose<perm = [1, 0, 2]>(x) s, h = {op}<hidden_size = 3>(t, w, r, b) y = Squeeze(h, first)
        }}"""
    )
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    )
    graph = open_model(model, None)
    make_differentiable(graph, Options(), Training())
    assert not Meetings(graph, [*shapes], sample_axes(graph, ["y"])).mixed
    feeds = {"x": rng.standard_normal((4, 5, 2)), "y_grad": rng.standard_normal((4, 3))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    found, one = run(derive(model, wrt=[*shapes], per_sample=True), feeds), derive(model, wrt=[*shapes])
    for i in range(4):
        alone = {name: value[i : i + 1] for name, value in feeds.items()}
        for weight, value in run(one, alone).items():
            np.testing.assert_allclose(found[weight][i], value, rtol=1e-5, atol=1e-6)


def test_a_token_that_is_joined_to_each_sample() -> None:
    """A weight that Expand repeats for each of them."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> g (float[3, 2, 4] x) => (float[3, 3, 4] y)
        <float[1, 1, 4] token = {1, -2, 0.5, 3}, int64[3] shape = {3, 1, 4}> {
            e = Expand(token, shape) f = Concat<axis = 1>(e, x) y = Tanh(f)
        }"""
    )
    rng = np.random.default_rng(1)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", (3, 2, 4)), ("y_grad", (3, 3, 4)))
    }
    graph = open_model(model, None)
    make_differentiable(graph, Options(), Training())
    assert not Meetings(graph, ["token"], sample_axes(graph, ["y"])).mixed
    found = run(derive(model, wrt="token", per_sample=True), feeds)["token_grad"]
    token = onnx.numpy_helper.to_array(model.graph.initializer[0])
    np.testing.assert_allclose(
        found, (feeds["y_grad"][:, :1] * (1 - np.tanh(token) ** 2))[:, None], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vjp", "jacobian"])
def test_derivatives_of_samples_by_weights_take_a_time_that_is_linear_in_them(kind: Derivative) -> None:
    """Sixteen times as many samples: about sixteen times as long, where it was 256 times."""
    subject, _ = points("convolutional", 1)
    session = Executor(derive(subject.model["any"], kind, wrt=[*subject.weights], per_sample=True))

    def seconds(batch: int) -> float:
        _, inputs = points("convolutional", batch)
        outputs = subject.module(*inputs.values()).detach().numpy()
        feeds = {**arrays(inputs), **({"y_grad": outputs} if kind == "vjp" else {})}
        times = []
        for _ in range(5):
            start = time.process_time()
            session(feeds)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(1024) < 64 * seconds(64)


SAMPLES_ELSEWHERE = {"GRU", "Gather", "GatherElements", "LSTM", "RNN"}
"""Operators whose rows have their samples on another axis, or in their indices; tests of their own have these."""


def weights_beside_samples(case: Case) -> list[str]:
    """The operands of floats behind the first one of a row, which are taken for weights."""
    model = forward_model(case, False)
    feeds = fed(model, sample(case))
    return [value.name for value in model.graph.input[1:] if feeds[value.name].dtype.kind == "f"]


def kept_apart(case: Case, weights: list[str]) -> ModelProto | None:
    """The gradients of each sample by the weights of a row; None where its samples are not known to be independent."""
    model = forward_model(case, False)
    feeds = fed(model, sample(case))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(feeds[name], name) for name in weights)
    try:
        return derive(model, of="y0", wrt=weights, per_sample=True)
    except (UnsupportedError, UsageError):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(ALIGNED.keys() - SAMPLES_ELSEWHERE))
@pytest.mark.thinned(3)
def test_gradients_of_one_sample_are_those_that_all_samples_give(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each operator that reads weights beside samples, against the gradient of the whole batch for each sample."""
    compared = 0
    for case in (row for row in OPERATORS if row.op == op and not row.domain):
        weights = weights_beside_samples(case)
        derived = kept_apart(case, weights) if weights else None
        if derived is None:
            continue
        with monkeypatch.context() as patched:
            patched.setattr(Meetings, "operand", lambda self, node, position: None)
            one_by_one = kept_apart(case, weights)
        assert one_by_one is not None
        feeds = fed(forward_model(case, False), sample(case))
        outputs = Executor(forward_model(case, False), case.executor)(feeds)["y0"]
        cotangent = np.random.default_rng(0).standard_normal(outputs.shape).astype(outputs.dtype)
        results = [Executor(m, case.executor)(fed(m, {**feeds, "y0_grad": cotangent})) for m in (derived, one_by_one)]
        for name, value in results[0].items():
            np.testing.assert_allclose(value, results[1][name], rtol=1e-6, atol=1e-9, err_msg=str(case))
        compared += 1
    assert compared, "no row has samples beside weights"
