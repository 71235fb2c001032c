"""`--mode`: batch statistics, running statistics and masks against PyTorch, and what each mode leaves alone."""

import io

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.node import ROLE, metadata_of
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.facts import raises

WEIGHTS = ("scale", "bias")


def batch_norm(shape, *, training=None, opset=17, dtype=TensorProto.FLOAT, momentum=0.8, shared=False, outputs=1):
    """y = BatchNormalization(x), twice in a row with the same weights where `shared`."""
    channels = shape[1]
    rng = np.random.default_rng(0)
    np_dtype = helper.tensor_dtype_to_np_dtype(dtype)
    arrays = {name: rng.uniform(0.5, 2, channels).astype(np_dtype) for name in ("scale", "bias", "mean", "var")}
    attributes = {"momentum": momentum, "epsilon": 1e-3}
    if training is not None:
        attributes["training_mode"] = training
    extra = ["next_mean", "next_var", "saved_mean", "saved_var"][: outputs - 1]
    nodes = [helper.make_node("BatchNormalization", ["x", *arrays], ["y", *extra], name="bn", **attributes)]
    if shared:
        nodes = [
            helper.make_node("BatchNormalization", ["x", *arrays], ["hidden"], name="first", **attributes),
            helper.make_node("BatchNormalization", ["hidden", *arrays], ["y"], name="second", **attributes),
        ]
    graph = helper.make_graph(
        nodes,
        "bn",
        [helper.make_tensor_value_info("x", dtype, ["batch", *shape[1:]])],
        [helper.make_tensor_value_info("y", dtype, ["batch", *shape[1:]])],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), arrays


def trained(model, mode, **keywords):
    return build(model, Options(losses=(LossSpec("mse"),), label="label", mode=mode, **keywords))


def run(built, feeds):
    return Executor(built.model, fallback=False)(feeds)


def expected(arrays, x, label, times=1, momentum=0.8):
    """Loss, gradients and next running statistics by PyTorch in float64, its variance made the population's."""
    leaves = {n: torch.tensor(arrays[n].astype(np.float64), requires_grad=n in WEIGHTS) for n in arrays}
    y = given = torch.tensor(x.astype(np.float64), requires_grad=True)
    state = {n: leaves[n].detach().clone() for n in ("mean", "var")}
    for _ in range(times):
        before = y
        y = torch.nn.functional.batch_norm(before, None, None, leaves["scale"], leaves["bias"], training=True, eps=1e-3)
        axes = [a for a in range(before.ndim) if a != 1]
        state["mean"] = momentum * state["mean"] + (1 - momentum) * before.detach().mean(axes)
        state["var"] = momentum * state["var"] + (1 - momentum) * before.detach().var(axes, unbiased=False)
    loss = ((y - torch.tensor(label.astype(np.float64))) ** 2).mean()
    loss.backward()
    gradients = {n: leaves[n].grad.numpy() for n in WEIGHTS}
    return {"loss": loss.item(), **{f"{n}_grad": g for n, g in gradients.items()}, "x_grad": given.grad.numpy(),
            **{f"{n}_next": v.numpy() for n, v in state.items()}}  # fmt: skip


def close(found, wanted, tolerance=2e-5):
    for name, value in wanted.items():
        scale = max(np.abs(value).max(), 1e-3)
        assert np.abs(np.asarray(found[name], np.float64) - value).max() <= tolerance * scale, name


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 5, 6), (2, 3, 4, 3, 2)])
def test_train_uses_the_statistics_of_the_batch(shape):
    model, arrays = batch_norm(shape)
    rng = np.random.default_rng(1)
    x, label = (rng.standard_normal(shape).astype(np.float32) * 3 + 2 for _ in range(2))
    built = trained(model, "train", grad_of_input=("x",))
    assert built.training.state == {"mean": "mean_next", "var": "var_next"}
    assert not any(node.op_type == "BatchNormalization" for node in built.model.graph.node)
    close(run(built, {"x": x, "label": label}), expected(arrays, x, label))


def test_the_backward_part_keeps_no_second_tensor_of_the_inputs_size():
    model, _ = batch_norm((4, 3, 5, 6), shared=True)
    built = trained(model, "train", grad_of_input=("x",))
    readers = [metadata_of(node, ROLE) for node in built.graph.nodes if "hidden" in node.input]
    assert readers and "backward" not in readers


def test_the_mean_of_the_input_costs_no_precision():
    model, arrays = batch_norm((16, 3, 4, 4))
    rng = np.random.default_rng(1)
    x, label = (rng.standard_normal((16, 3, 4, 4)).astype(np.float32) + shift for shift in (300, 0))
    built = trained(model, "train", grad_of_input=("x",))
    close(run(built, {"x": x, "label": label}), expected(arrays, x, label), 1e-4)


def test_running_statistics_can_be_fed_back():
    model, arrays = batch_norm((8, 3))
    built = trained(model, "train")
    rng = np.random.default_rng(2)
    state = {name: arrays[name] for name in ("mean", "var")}
    wanted = dict(arrays)
    for _ in range(3):
        x, label = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
        kept = {name: value.copy() for name, value in state.items()}
        found = run(built, {"x": x, "label": label, **state})
        assert all(np.array_equal(kept[name], state[name]) for name in state), "a fed array was overwritten"
        after = expected(wanted, x, label)
        close(found, {name: after[name] for name in ("mean_next", "var_next")})
        state = {name: found[f"{name}_next"] for name in state}
        wanted.update({name: after[f"{name}_next"] for name in state})


def test_shared_running_statistics_are_updated_once_a_use():
    model, arrays = batch_norm((8, 3), shared=True)
    rng = np.random.default_rng(3)
    x, label = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
    built = trained(model, "train")
    found = run(built, {"x": x, "label": label})
    wanted = expected(arrays, x, label, times=2)
    for name in ("mean", "var"):
        wanted[built.training.state[name]] = wanted.pop(f"{name}_next")
    close(found, {n: v for n, v in wanted.items() if n != "x_grad"})


@pytest.mark.parametrize(("opset", "training"), [(14, 1), (15, 1), (17, 1), (13, None)])
def test_keep_takes_a_node_in_training_mode_apart(opset, training):
    """Before opset 14 it is the number of outputs that says so."""
    model, arrays = batch_norm((8, 3), training=training, opset=opset, outputs=3 if training else 5)
    rng = np.random.default_rng(1)
    x, label = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
    built = trained(model, "keep")
    assert built.training.state == {"mean": "next_mean", "var": "next_var"}
    wanted = expected(arrays, x, label)
    wanted.pop("x_grad")
    close(run(built, {"x": x, "label": label}), {n.replace("mean_next", "next_mean").replace("var_next", "next_var"): v
                                                 for n, v in wanted.items()})  # fmt: skip


@pytest.mark.parametrize(("mode", "training"), [("keep", None), ("keep", 0), ("eval", None), ("eval", 1)])
def test_inference_uses_the_running_statistics(mode, training):
    model, arrays = batch_norm((8, 3, 2), training=training, outputs=3 if training else 1)
    rng = np.random.default_rng(1)
    x, label = (rng.standard_normal((8, 3, 2)).astype(np.float32) for _ in range(2))
    built = trained(model, mode)
    assert not built.training.state
    leaves = {n: torch.tensor(a.astype(np.float64), requires_grad=n in WEIGHTS) for n, a in arrays.items()}
    y = torch.nn.functional.batch_norm(torch.tensor(x.astype(np.float64)), leaves["mean"], leaves["var"],
                                       leaves["scale"], leaves["bias"], eps=1e-3)  # fmt: skip
    loss = ((y - torch.tensor(label.astype(np.float64))) ** 2).mean()
    loss.backward()
    close(run(built, {"x": x, "label": label}), {"loss": np.asarray(loss.item()), **{
        f"{n}_grad": leaves[n].grad.numpy() for n in WEIGHTS}})  # fmt: skip


def test_half_precision_takes_its_statistics_in_float32():
    model, arrays = batch_norm((64, 3), dtype=TensorProto.FLOAT16, opset=14)
    rng = np.random.default_rng(1)
    x, label = (rng.standard_normal((64, 3)).astype(np.float16) for _ in range(2))
    built = trained(model, "train")
    wanted = expected(arrays, x, label)
    wanted.pop("x_grad")
    close(run(built, {"x": x, "label": label}), wanted, 5e-3)


def dropout(ratio, training, opset=17, mask=False, switch_is_input=False):
    """y = Dropout(x * w)."""
    inputs = [helper.make_tensor_value_info("x", 1, ["batch", 400])]
    initializers = [numpy_helper.from_array(np.linspace(0.5, 2, 400, dtype=np.float32), "w")]
    operands = ["hidden"]
    if ratio is not None:
        operands.append("ratio")
        initializers.append(numpy_helper.from_array(np.array(ratio, np.float32), "ratio"))
    if switch_is_input:
        operands.append("switch")
        inputs.append(helper.make_tensor_value_info("switch", TensorProto.BOOL, []))
    elif training is not None:
        operands += [""] * (2 - len(operands)) + ["switch"]
        initializers.append(numpy_helper.from_array(np.array(training), "switch"))
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["hidden"], name="mul"),
        helper.make_node("Dropout", operands, ["y", "kept"] if mask else ["y"], name="drop"),
    ]
    graph = helper.make_graph(
        nodes, "drop", inputs, [helper.make_tensor_value_info("y", 1, ["batch", 400])], initializers
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def check_dropout(built, ratio, feeds, dropped=True):
    """The gradient of sum(y - label)^2 / n through the very mask that the forward part drew."""
    found = run(built, feeds)
    w = np.linspace(0.5, 2, 400, dtype=np.float32)
    y, hidden = found["y"], feeds["x"] * w
    factor = np.where(y != 0, 1 / (1 - ratio), 0) if dropped else np.ones_like(y)
    np.testing.assert_allclose(y, hidden * factor, rtol=1e-5)
    share = np.mean(y == 0)
    assert abs(share - ratio) < 0.05 if dropped else share == 0
    gradient = (2 * (y - feeds["label"]) / y.size * factor * feeds["x"]).sum(0)
    np.testing.assert_allclose(found["w_grad"], gradient, rtol=2e-3, atol=1e-6)


def feeds(**more):
    rng = np.random.default_rng(4)
    return {"x": rng.uniform(0.5, 2, (16, 400)).astype(np.float32),
            "label": rng.standard_normal((16, 400)).astype(np.float32), **more}  # fmt: skip


@pytest.mark.parametrize("ratio", [None, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("training", [None, False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_dropout_in_training(ratio, training, mask):
    built = trained(dropout(ratio, training, mask=mask), "train", keep_outputs=True)
    check_dropout(built, 0.5 if ratio is None else ratio, feeds())


@pytest.mark.parametrize("opset", [13, 22])
def test_dropout_in_training_at_other_opsets(opset):
    check_dropout(trained(dropout(0.3, None, opset=opset), "train", keep_outputs=True), 0.3, feeds())


@pytest.mark.parametrize(("mode", "training", "drops"), [
    ("keep", True, True), ("keep", False, False), ("keep", None, False), ("eval", True, False), ("eval", None, False),
])  # fmt: skip
def test_dropout_as_it_is_or_off(mode, training, drops):
    check_dropout(trained(dropout(0.3, training), mode, keep_outputs=True), 0.3, feeds(), drops)


@pytest.mark.parametrize("on", [False, True])
def test_dropout_switched_at_run_time(on):
    built = trained(dropout(0.3, None, switch_is_input=True), "keep", keep_outputs=True)
    check_dropout(built, 0.3, feeds(switch=np.array(on)), on)


def test_what_train_finds_nothing_of_is_said():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")], "linear",
        [helper.make_tensor_value_info("x", 1, ["n", 3])], [helper.make_tensor_value_info("y", 1, ["n", 2])],
        [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    cautions = " ".join(map(str, trained(model, "train").training.cautions))
    assert "no Dropout" in cautions and "no BatchNormalization" in cautions


def test_unknown_rank_is_refused():
    model, _ = batch_norm((8, 3))
    model.graph.input[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with raises(UnsupportedError, "refused", "bn", "BatchNormalization", "x"):
        trained(model, "train")


def test_a_network_that_pytorch_exported_in_training_mode():
    """Two steps of a small CNN: loss, gradients and running statistics are PyTorch's own."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    ).double()  # fmt: skip
    file = io.BytesIO()
    net.float().eval()
    torch.onnx.export(net, torch.zeros(2, 2, 6, 6), file, dynamo=False, opset_version=17, input_names=["x"],
                      training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
                      dynamic_axes={"x": {0: "n"}})  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    built = trained(model, "train")
    net.double().train()
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((8, 2, 6, 6)).astype(np.float32), rng.standard_normal((8, 3)).astype(np.float32)
    found = run(built, {"x": x, "label": label})
    loss = ((net(torch.tensor(x, dtype=torch.float64)) - torch.tensor(label)) ** 2).mean()
    loss.backward()
    close(found, {f"{name}_grad": p.grad.numpy() for name, p in net.named_parameters()}, 1e-4)
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found["1.running_mean_next"], net[1].running_mean.numpy(), rtol=1e-4, atol=1e-6)
    count = 8 * 4 * 4
    unbiased = 0.9 + (found["1.running_var_next"] - 0.9) * count / (count - 1)
    np.testing.assert_allclose(unbiased, net[1].running_var.numpy(), rtol=1e-4)


def test_a_constant_that_is_subtracted_is_no_mean() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2] w = {1, 2}> { h = Mul (x, w) zero = RandomUniform <shape = [2], seed = 1.0> () y = Sub (h, zero) }""")
    assert build(model, Options(losses=(LossSpec("mse"),))).training.trained == ["w"]


def test_a_normalization_by_the_batch_that_it_normalizes_is_named_once() -> None:
    """The subtraction on the way to its variance is a part of it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2, 2] w = {1, 2, 3, 5}, float[2] scale = {1, 2}, float[2] shift = {0, 1}, int64[1] first = {0}> {
          h = MatMul(x, w)
          mean = ReduceMean<keepdims = 0>(h, first)
          d = Sub(h, mean)
          q = Mul(d, d)
          var = ReduceMean<keepdims = 0>(q, first)
          y = BatchNormalization(h, scale, shift, mean, var)
        }""")
    model.graph.node[-1].name, model.graph.node[2].name = "norm", "minus"
    cautions = [str(caution) for caution in build(model, Options(losses=(LossSpec("mse"),))).training.cautions]
    assert len([text for text in cautions if "'norm'" in text]) == 1
    assert not [text for text in cautions if "'minus'" in text]


def test_a_mean_over_the_batch_is_told_and_one_over_channels_is_not() -> None:
    for axis, told in ((0, ["'s' subtracts"]), (1, [])):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[batch, 3] x) => (float[batch, 2] y)
            <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}> {{
                m = ReduceMean<axes = [{axis}], keepdims = 1>(x) [s] d = Sub(x, m) y = MatMul(d, w) }}"""
        cautions = build(onnx.parser.parse_model(text)).training.cautions
        assert [c.text[: len("'s' subtracts")] for c in cautions if c.subject == "`mode`"] == told
