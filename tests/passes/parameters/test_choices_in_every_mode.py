"""The options that choose weights choose the same ones in every mode and with every other option, on the command line.

The expected sets follow from the modules of the networks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper
from torch import nn

from onnxgrad_cli.ir.modules import SCOPES
from tests.cli_harness import Shell
from tests.quantized import quantized

CHANNELS = 6
LAYERS = {
    "body.0": ("Conv", {"weight": (CHANNELS, 2, 3, 3), "bias": (CHANNELS,)}),
    "body.1": ("BatchNormalization", {"weight": (CHANNELS,), "bias": (CHANNELS,)}),
    "body.2": ("ConvTranspose", {"weight": (CHANNELS, CHANNELS, 2, 2), "bias": (CHANNELS,)}),
    "body.3": ("BatchNormalization", {"weight": (CHANNELS,), "bias": (CHANNELS,)}),
    "body.4": ("GroupNormalization", {"weight": (CHANNELS,), "bias": (CHANNELS,)}),
    "body.5": ("MeanVarianceNormalization", {}),
    "norm": ("LayerNormalization", {"weight": (CHANNELS,), "bias": (CHANNELS,)}),
    "fc": ("Gemm", {"weight": (CHANNELS, CHANNELS), "bias": (CHANNELS,)}),
    "head": ("Gemm", {"weight": (3, CHANNELS), "bias": (3,)}),
}
"""The modules of a network: operator, and the shapes of its weights."""

ATTRIBUTES = {"GroupNormalization": {"num_groups": 2}, "Gemm": {"transB": 1}}


def weights_of(*modules: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name in LAYERS[module][1]}


NORMS = weights_of("body.1", "body.3", "body.4", "norm")
BODY = weights_of(*(f"body.{i}" for i in range(5)))
EVERY = weights_of(*LAYERS)
CHOICES: dict[tuple[str, ...], set[str]] = {
    (): EVERY,
    ("--preset", "norm"): NORMS,
    ("--preset", "bias"): {name for name in EVERY if name.endswith("bias")},
    ("--preset", "head"): weights_of("head"),
    ("--train-last", "2"): weights_of("fc", "head"),
    ("--train-last", "5"): weights_of("body.3", "body.4", "norm", "fc", "head"),
    ("--train-last", "7"): EVERY - weights_of("body.0"),
    ("--freeze", "body.?"): EVERY - BODY,
    ("--train", "body.[134]"): weights_of("body.1", "body.3", "body.4"),
    ("--preset", "norm", "--freeze", "body.3"): NORMS - weights_of("body.3"),
}


def network(noted: bool, training: bool) -> ModelProto:
    """The network as PyTorch's newer exporter calls its nodes, with the modules in metadata, or as the older does."""
    rng = np.random.default_rng(0)
    nodes: list[NodeProto] = []
    stored: list[onnx.TensorProto] = []
    value = "x"

    def add(op_type: str, inputs: list[str], module: str, outputs: int = 1, **attributes: object) -> str:
        name = f"/{'body/' if module.startswith('body.') else ''}{module}/{op_type}"
        node = helper.make_node(op_type, inputs, [f"v{len(nodes)}_{i}" for i in range(outputs)], **attributes)
        node.name = f"node_{len(nodes)}" if noted else name
        if noted:
            scopes = ["", *(["body"] if module.startswith("body.") else []), *([module] if module else []), "op"]
            node.metadata_props.add(key=SCOPES, value=str(scopes))
        nodes.append(node)
        return node.output[0]

    def store(name: str, values: np.ndarray) -> str:
        stored.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    for module, (op_type, shapes) in LAYERS.items():
        if module == "norm":
            value = add("Flatten", [add("GlobalAveragePool", [value], "")], "")
        names = [store(f"{module}.{name}", rng.uniform(0.5, 1.5, shape)) for name, shape in shapes.items()]
        outputs, attributes = 1, dict(ATTRIBUTES.get(op_type, {}))
        if op_type == "BatchNormalization":
            names += [store(f"{module}.{n}", rng.uniform(0.5, 1.5, CHANNELS)) for n in ("running_mean", "running_var")]
            if training:
                outputs, attributes = 3, {"training_mode": 1}
        value = add(op_type, [value, *names], module, outputs, **attributes)
    nodes[-1].output[0] = "y"
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2, 6, 6])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def trained(shell: Shell, *arguments: str) -> set[str]:
    result = shell("inspect", *arguments, "--loss", "mse", "--json")
    assert result.code == 0, result.err or result.out
    return {weight["name"] for weight in result.json["weights"]}


FORMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "a step": ("--optimizer", "adam", "--clip-norm", "1"),
    "recomputed": ("--recompute", "elementwise"),
    "scaled": ("--loss-scale", "8", "--quantization", "ste"),
    "another target": ("--target", "ort-cuda"),
    "adapters": ("--lora", "1"),
}
"""Other options, under which the same weights are chosen."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("noted", "training"), [(True, False), (False, True)], ids=["newer", "older"])
@pytest.mark.thinned(12, 3)
def test_the_same_weights_in_every_mode(shell: Shell, noted: bool, training: bool, form: str) -> None:
    onnx.save(network(noted, training), "net.onnx")
    for choice, expected in CHOICES.items():
        if form == "adapters" and ("--train-last" in choice or not {"--preset", "--train"} & set(choice)):
            continue  # adapters take the place of what is not chosen
        for mode in ("keep", "train", "eval"):
            found = trained(shell, "net.onnx", *choice, *FORMS[form], "--mode", mode)
            assert {name for name in found if "_lora_" not in name} == expected, (choice, mode)


QUANTIZED_CHOICES: dict[tuple[str, ...], set[str]] = {
    ("--preset", "head"): {"fc_weight", "fc_bias"},
    ("--train-last", "1"): {"fc_weight", "fc_bias"},
    ("--preset", "bias"): {"conv_bias", "fc_bias"},
}


@pytest.mark.parametrize("operators", [False, True])
def test_the_same_weights_of_a_quantized_model(shell: Shell, operators: bool) -> None:
    quantized(Path(), operators=operators)
    for choice, expected in QUANTIZED_CHOICES.items():
        assert trained(shell, "float.onnx", *choice) == expected
        assert trained(shell, "quantized.onnx", *choice, "--quantization", "ste") == expected


class Net(nn.Module):
    """A convolution and its normalization, then a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x).mean((2, 3)))
        return y


NORM = ["body.1.weight", "body.1.bias"]


@pytest.mark.parametrize(
    ("choice", "chosen", "fast"),
    [
        (("--preset", "norm"), NORM, []),
        (("--train-last", "2"), [*NORM, "head.weight", "head.bias"], []),
        (("--freeze", "body.0", "--group", "body.1:lr=10"), [*NORM, "head.weight", "head.bias"], ["body.1"]),
    ],
)
def test_steps_in_training_mode_are_those_of_pytorch(
    shell: Shell, choice: tuple[str, ...], chosen: list[str], fast: list[str]
) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    x, label = torch.randn(16, 2, 6, 6), torch.randn(16, 3)
    torch.onnx.export(net, (x,), "net.onnx", dynamo=False, do_constant_folding=False, opset_version=17,
                      input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}})  # fmt: skip
    np.savez("data.npz", x=x.numpy(), label=label.numpy())
    result = shell("train", "net.onnx", "--data", "data.npz", "--optimizer", "sgd", "--learning-rate", "0.05",
                   "--epochs", "6", "--batch-size", "16", "--mode", "train", *choice, "-o", "out.onnx")  # fmt: skip
    assert result.code == 0, result.err
    parameters = dict(net.train().named_parameters())
    rates = [{"params": [parameters[n]], "lr": 0.5 if n.rpartition(".")[0] in fast else 0.05} for n in chosen]
    optimizer = torch.optim.SGD(rates)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), label).backward()
        optimizer.step()
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("out.onnx").graph.initializer}
    for name, parameter in parameters.items():
        np.testing.assert_allclose(found[name], parameter.detach(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (("--train-last", "1"), ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]),
        (("--preset", "head"), ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]),
        (("--preset", "bias"), ["bias_ih_l0", "bias_hh_l0"]),
    ],
)
def test_a_recurrent_layer_whose_gates_are_reordered_is_one_layer(
    shell: Shell, choice: tuple[str, ...], expected: list[str]
) -> None:
    """PyTorch's exporters slice the weights and concatenate the parts, for ONNX has the gates in another order."""
    torch.manual_seed(0)
    torch.onnx.export(nn.LSTM(3, 4), (torch.randn(5, 2, 3),), "net.onnx", dynamo=False, do_constant_folding=False)
    assert trained(shell, "net.onnx", *choice) == set(expected)
