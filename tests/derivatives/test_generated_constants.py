"""Constants that onnxgrad generates are never parameters of the file that they are written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.cli_harness import Shell, save

WEIGHTS = {"a.weight": (20, 1), "a.bias": (20,), "b.weight": (20, 20), "b.bias": (20,), "c.weight": (1, 20)}
BIAS = {"c.bias": (1,)}
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(-1, 1)


def network(function: str = "Tanh", rows: int | str = "n", **extra: np.ndarray) -> ModelProto:
    """A small network as PyTorch's exporter writes it: the names of modules, and the producer."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in {**WEIGHTS, **BIAS}.items()}

    def activation(x: str, y: str) -> list[onnx.NodeProto]:
        if function == "LayerNormalization":
            return [helper.make_node(function, [x, "n.weight", "n.bias"], [y], axis=-1)]
        return [helper.make_node(function, [x], [y])]

    if function == "LayerNormalization":
        drawn |= {"n.weight": np.linspace(0.5, 2, 20, dtype=np.float32), "n.bias": drawn["b.bias"] / 2}
    tensors = [numpy_helper.from_array(array, name) for name, array in {**drawn, **extra}.items()]
    gain = ["gain"] if "gain" in extra else []
    nodes = [
        helper.make_node("Gemm", ["x", "a.weight", "a.bias"], ["linear"], transB=1),
        *activation("linear", "first"),
        helper.make_node("Gemm", ["first", "b.weight", "b.bias"], ["linear_1"], transB=1),
        *activation("linear_1", "second"),
        *(helper.make_node("Mul", ["second", name], ["scaled"]) for name in gain),
        helper.make_node("Gemm", ["scaled" if gain else "second", "c.weight", "c.bias"], ["u"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 1])
    u = helper.make_tensor_value_info("u", TensorProto.FLOAT, [rows, 1])
    graph = helper.make_graph(nodes, "main_graph", [x], [u], tensors)
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, producer_name="pytorch", ir_version=9, opset_imports=opsets)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "u.onnx")
    return Shell(tmp_path, capsys)


def ran(path: str, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def derive_and_train(shell: Shell) -> None:
    """Train a model of second derivatives on f and on values at a boundary, as for a differential equation."""
    result = shell("derive", "u.onnx", "--kind", "hessian", "--wrt", "x", "--per-sample", "--option", "keep-outputs",
                   "-o", "p.onnx")  # fmt: skip
    assert result.code == 0, result.err
    np.savez("data.npz", x=X, f=-9 * np.sin(3 * X).reshape(-1, 1, 1), ub=np.sin(3 * X))
    result = shell("train", "p.onnx", "--loss", "mse:x_hessian_x:f", "--loss", "mse:u:ub:10", "--data", "data.npz",
                   "--epochs", 3, "--learning-rate", 0.05, "-o", "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err


def second_differences(path: str) -> np.ndarray:
    """The second derivative of a network by its input, by central differences of its own values in float64."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    w = {name: values[name].astype(np.float64) for name in {**WEIGHTS, **BIAS}}

    def u(x: np.ndarray) -> np.ndarray:
        hidden = np.tanh(np.tanh(x @ w["a.weight"].T + w["a.bias"]) @ w["b.weight"].T + w["b.bias"])
        return hidden @ w["c.weight"].T + w["c.bias"]

    h, x = 1e-4, X.astype(np.float64)
    return (u(x + h) - 2 * u(x) + u(x - h)) / h**2


def test_a_trained_second_derivative_is_that_of_the_trained_model(shell: Shell) -> None:
    derive_and_train(shell)
    found = ran("trained.onnx", x=X)
    expected = second_differences("trained.onnx")
    assert np.abs(expected - second_differences("u.onnx")).max() > 0.1  # it was trained
    np.testing.assert_allclose(found["x_hessian_x"].reshape(-1, 1), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["vjp", "jvp", "hvp", "jacobian", "hessian"])
@pytest.mark.parametrize("function", ["Tanh", "Sigmoid", "Gelu", "LayerNormalization"])
@pytest.mark.thinned(3)
def test_no_kind_of_derivative_adds_parameters(shell: Shell, kind: str, function: str) -> None:
    onnx.save(network(function), "net.onnx")
    result = shell("derive", "net.onnx", "--kind", kind, "--wrt", "x", "--option", "keep-outputs", "-o", "d.onnx",
                   "--no-verify")  # fmt: skip
    assert result.code == 0, result.err
    for options in [[], ["--train", "*"]]:
        result = shell("inspect", "d.onnx", "--loss", "mse:u", "--json", *options)
        assert result.code == 0, result.err
        trained = {each["name"] for each in result.json["weights"]}
        own = {tensor.name for tensor in network(function).graph.initializer}
        assert trained == own
        assert {each["name"] for each in result.json["not_trained"]} <= own


def test_derivatives_of_derivatives_are_by_weights_alone(shell: Shell) -> None:
    assert shell("derive", "u.onnx", "--kind", "jvp", "-o", "j.onnx", "--no-verify").code == 0
    result = shell("derive", "j.onnx", "-o", "vjp_of_j.onnx", "--no-verify")
    assert result.code == 0, result.err
    outputs = {value.name for value in onnx.load("vjp_of_j.onnx").graph.output}
    assert {name.removesuffix("_grad") for name in outputs} <= {"x", "x_tangent", *WEIGHTS, *BIAS}
    result = shell("inspect", "vjp_of_j.onnx", "--loss", "mse", "--json", "--train", "*")
    assert {each["name"] for each in result.json["weights"]} <= {*WEIGHTS, *BIAS}


def test_expanded_gradients_add_no_parameters(shell: Shell) -> None:
    assert shell("build", "u.onnx", "--loss", "mse", "--label", "y", "--as-gradient-op", "-o", "g.onnx").code == 0
    model = onnx.load("g.onnx")
    del model.metadata_props[:]  # as another tool writes such a model
    onnx.save(model, "g.onnx")
    assert shell("expand", "g.onnx", "-o", "e.onnx").code == 0
    result = shell("inspect", "e.onnx", "--loss", "mse:a.weight_grad:t", "--json", "--train", "*")
    assert result.code == 0, result.err
    assert {each["name"] for each in result.json["weights"]} <= {*WEIGHTS, *BIAS}


def optimized(source: str, target: str, level: str) -> None:
    """Save a model as onnxruntime's optimizer leaves it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = target
    options.log_severity_level = 3
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
@pytest.mark.parametrize("rows", ["n", 32])
def test_the_mark_survives_the_optimizer(shell: Shell, level: str, rows: int | str) -> None:
    """With a fixed batch the optimizer stores what was computed of shapes, such as the seed of the backward part."""
    onnx.save(network(rows=rows), "u.onnx")
    result = shell("derive", "u.onnx", "--kind", "vjp", "--wrt", "x", "--option", "keep-outputs", "--option",
                   "fill-grad", "-o", "d.onnx", "--no-verify")  # fmt: skip
    assert result.code == 0, result.err
    optimized("d.onnx", "o.onnx", level)
    result = shell("inspect", "o.onnx", "--loss", "mse:x_grad:f", "--loss", "mse:u", "--json", "--train", "*")
    if rows == "n":
        assert result.code == 0, result.err
        assert {each["name"] for each in result.json["weights"]} <= {*WEIGHTS, *BIAS}
    else:  # ones times c.weight are stored, too: they would stay while c.weight is trained
        assert result.code == 3 and "'second_grad'" in result.json["error"]


def test_a_fold_of_weights_is_refused(shell: Shell) -> None:
    model = network()
    for tensor in model.graph.initializer:
        if tensor.name == "b.weight":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).T, tensor.name))
    model.graph.node[2].CopyFrom(helper.make_node("MatMul", ["first", "b.weight"], ["linear_1"]))
    onnx.save(model, "u.onnx")
    assert shell("derive", "u.onnx", "--kind", "jacobian", "--wrt", "x", "--per-sample", "-o", "d.onnx").code == 0
    optimized("d.onnx", "o.onnx", "BASIC")  # which stores the transpose of b.weight
    for command in (["build", "o.onnx", "--loss", "mse"], ["derive", "o.onnx"]):
        result = shell(*command)
        assert (result.code, result.facts[0]) == (3, "refused") and result.facts[1].endswith("Transpose_out")
    assert shell("derive", "o.onnx", "--wrt", "x", "--kind", "jvp", "--no-verify").code == 0  # the weights stay


def test_tensors_of_ones_own_are_trained_without_the_record(shell: Shell) -> None:
    assert shell("derive", "u.onnx", "--kind", "jvp", "-o", "d.onnx", "--no-verify").code == 0
    model = onnx.load("d.onnx")
    model.graph.initializer.append(numpy_helper.from_array(np.full(1, 0.7, np.float32), "own.bias"))
    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if each == name else each for each in node.output]
        node.input[:] = ["before" if each == name else each for each in node.input]
    model.graph.node.append(helper.make_node("Add", ["before", "own.bias"], [name]))
    onnx.save(model, "d.onnx")
    result = shell("inspect", "d.onnx", "--loss", "mse")
    assert (result.code, result.facts) == (3, ("refused", "own.bias")) and "'onnxgrad.tensors'" in result.err
    kept = [entry for entry in model.metadata_props if entry.key != "onnxgrad.tensors"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    onnx.save(model, "d.onnx")
    result = shell("inspect", "d.onnx", "--loss", "mse", "--json", "--train", "own.bias")
    assert result.code == 0 and [each["name"] for each in result.json["weights"]] == ["own.bias"]


def test_a_weight_that_was_merged_with_a_constant_is_refused(shell: Shell) -> None:
    onnx.save(network(gain=np.ones((), np.float32)), "u.onnx")
    assert shell("derive", "u.onnx", "--kind", "jacobian", "--wrt", "x", "--per-sample", "-o", "d.onnx").code == 0
    assert shell("build", "d.onnx", "--loss", "mse", "--train", "gain", "-o", "t.onnx", "--no-verify").code == 0
    model = onnx.load("d.onnx")
    ones = [t.name for t in model.graph.initializer if t.name != "gain" and not t.dims and t.float_data[:] == [1]]
    ones += [t.name for t in model.graph.initializer if not t.dims and t.raw_data == np.float32(1).tobytes()]
    (one,) = {*ones} - {"gain"}
    for node in model.graph.node:
        node.input[:] = ["gain" if name == one else name for name in node.input]
    kept = [tensor for tensor in model.graph.initializer if tensor.name != one]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, "d.onnx")
    result = shell("build", "d.onnx", "--loss", "mse", "--train", "gain", "-o", "t.onnx", "--force")
    assert (result.code, result.facts) == (3, ("refused", "gain"))


MODES = """
<ir_version: 9, opset_import: ["": 18]>
modes (float[n, 2] x) => (float[n, 1] u)
<float[2, 3] w = {1, 2, -3, 4, 0.5, 6}, float[3] s = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] m = {1, 0, 2},
 float[3] v = {1, 4, 9}, float[3, 1] w2 = {1, -1, 2}, float ratio = {0.5}, bool drops = {1}>
{
  h = MatMul(x, w)
  k = BatchNormalization(h, s, b, m, v)
  d = Dropout(k, ratio, drops)
  t = Tanh(d)
  u = MatMul(t, w2)
}
"""


def test_the_mode_that_derivatives_were_written_for_stays(shell: Shell) -> None:
    """A BatchNormalization with the statistics of its batch has other derivatives, and so has a Dropout that is off."""
    save(MODES, shell.folder / "net.onnx")
    derive = ("derive", "net.onnx", "--kind", "vjp", "--wrt", "x", "--option", "fill-grad", "--option", "keep-outputs")
    result = shell(*derive, "-o", "d.onnx", "--no-verify")
    assert result.code == 0, result.err
    for mode, label in (("train", "BatchNormalization"), ("eval", "Dropout")):
        result = shell("build", "d.onnx", "--loss", "mse:x_grad", "--mode", mode)
        assert (result.code, result.facts[1]) == (2, "mode") and result.facts[2].startswith(label)
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    np.savez("data.npz", x=x, label=np.ones((16, 2), np.float32))
    result = shell("train", "d.onnx", "--loss", "mse:x_grad", "--data", "data.npz", "--val", 0.5, "--epochs", 1, "-o",
                   "t.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert "training mode" in result.err
    (drop,) = (node for node in onnx.load("t.onnx").graph.node if node.op_type == "Dropout")
    assert len(drop.input) == 3


def test_derivatives_follow_their_weights(shell: Shell) -> None:
    assert shell("derive", "u.onnx", "--kind", "jacobian", "--wrt", "x", "--per-sample", "-o", "d.onnx").code == 0
    result = shell("build", "d.onnx", "--loss", "mse", "--untie", "*")
    assert (result.code, result.facts[1:]) == (2, ("untie",))
    result = shell("inspect", "d.onnx", "--loss", "mse")
    assert result.code == 0 and "untie" not in result.out + result.err


LOSS = """
<ir_version: 9, opset_import: ["": 18]>
weighted (float[n, 1] prediction, float[n, 1] label) => (float loss)
<float[1] scale = {3}, float[1, 1] "a.weight" = {2}>
{
  d = Sub(prediction, label)
  e = Mul(d, scale)
  f = Mul(e, "a.weight")
  s = Mul(f, f)
  loss = ReduceMean <keepdims = 0> (s)
}
"""


def test_constants_of_a_loss_file_are_marked(shell: Shell) -> None:
    """One may have the name of a weight."""
    save(LOSS, shell.folder / "loss.onnx")
    result = shell("build", "u.onnx", "--loss", "loss.onnx", "-o", "t.onnx", "--train", "*")
    assert result.code == 0, result.err
    stored = {tensor.name for tensor in onnx.load("t.onnx").graph.initializer if tensor.data_type == TensorProto.FLOAT}
    assert {"onnxgrad_const_scale", "onnxgrad_const_a.weight"} <= stored
    assert all(name in {*WEIGHTS, *BIAS} or name.startswith("onnxgrad_const") for name in stored)
    assert shell("view", "t.onnx", "-o", "t.dot").code == 0
    assert "onnxgrad_const_scale" not in (shell.folder / "t.dot").read_text()  # values stand in the nodes
