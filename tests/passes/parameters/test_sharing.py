"""Weights that a file holds twice are trained as one, and weights of several modules are split, as in PyTorch."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses import LossSpec
from onnxgrad_cli.options import Options
from tests.cli_harness import Shell
from tests.facts import raises


class Tied(nn.Module):
    """A last layer with the matrix of the embedding."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(words, 6), nn.Linear(6, 6), nn.Linear(6, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.fc(self.embed(tokens))))
        return y


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def export(words: int) -> tuple[Tied, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    net, tokens, label = Tied(words), torch.randint(0, words, (16, 5)), torch.randn(16, 5, words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (tokens,), "net.onnx", dynamo=False, opset_version=17, input_names=["tokens"],
                          output_names=["y"], dynamic_axes={"tokens": {0: "n"}, "y": {0: "n"}})  # fmt: skip
    np.savez("data.npz", tokens=tokens.numpy(), label=label.numpy())
    return net, tokens, label


GIVEN = ("--data", "data.npz", "--optimizer", "sgd", "--learning-rate", "0.5", "--batch-size", "16")


def matrices(path: str) -> dict[str, np.ndarray]:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    head = next(node.input[1] for node in onnx.load(path).graph.node if node.output[0] == "y")
    return {"embed": stored["embed.weight"], "head": stored[head].T}


@pytest.mark.parametrize("words", [11, 6])  # of 6 words the matrix is square
@pytest.mark.parametrize("option", ["*", "embed.weight", "head"])
@pytest.mark.thinned(3)
def test_a_tied_matrix_is_trained_as_pytorch_trains_it(shell: Shell, words: int, option: str) -> None:
    net, tokens, label = export(words)
    result = shell("train", "net.onnx", *GIVEN, "--epochs", "18", "--tie", option, "-o", "out.onnx")
    assert result.code == 0, result.err
    assert "transposed" not in result.err
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(18):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(tokens), label).backward()
        optimizer.step()
    for name, matrix in matrices("out.onnx").items():
        np.testing.assert_allclose(matrix, net.embed.weight.detach(), atol=1e-5, err_msg=name)


def test_export_and_resume_write_both_copies(shell: Shell) -> None:
    export(11)
    tied = (*GIVEN, "--tie", "*")
    assert shell("train", "net.onnx", *tied, "--epochs", "6", "-o", "whole.onnx").code == 0
    assert shell("train", "net.onnx", *tied, "--epochs", "3", "-o", "out.onnx").code == 0
    assert shell("train", "net.onnx", *tied, "--epochs", "6", "-o", "out.onnx", "--resume").code == 0
    assert shell("export", "out.onnx.run/checkpoint.safetensors", "--model", "net.onnx", "-o", "back.onnx").code == 0
    whole = matrices("whole.onnx")
    np.testing.assert_array_equal(whole["embed"], whole["head"])
    for path in ("out.onnx", "back.onnx"):
        for name, matrix in matrices(path).items():
            np.testing.assert_array_equal(matrix, whole[name])


def test_a_transposed_copy_is_named_with_the_option_that_ties_it(shell: Shell) -> None:
    export(11)
    for command in (["inspect"], ["build"], ["train", *GIVEN, "--epochs", "1"]):
        result = shell(*command[:1], "net.onnx", *command[1:])
        assert result.code == 0, result.err
        told = next(line for line in (result.out + result.err).splitlines() if "transposed" in line)
        assert "is 'embed.weight' transposed" in told
        option = told.split("--tie ")[1].split()[0].strip("'")
        after = shell("inspect", "net.onnx", "--tie", option)
        assert after.code == 0 and "transposed" not in after.out + after.err and " 3 tensors, " in after.out
    assert shell("inspect", "net.onnx", "--json").json["diagnosis"]["equal"] == [["embed.weight", option]]


def test_tied_weights_keep_what_is_chosen_by_either_name(shell: Shell) -> None:
    export(11)
    copy = shell("inspect", "net.onnx", "--json").json["diagnosis"]["equal"][0][1]
    for name in ("embed.weight", copy, "head", "embed"):
        result = shell("inspect", "net.onnx", "--tie", "*", "--freeze", name, "--json")
        assert {weight["name"] for weight in result.json["weights"]}.isdisjoint({"embed.weight", copy}), name


def test_what_has_no_equal_is_not_tied(shell: Shell) -> None:
    export(11)
    result = shell("build", "net.onnx", "--tie", "fc.bias")
    assert result.code == 2 and result.facts == ("unknown_name", "tie", "fc.bias")


class Encoder(nn.Module):
    """Two layers that begin alike, so that each of their weights has an equal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.enc(x)


@pytest.fixture(scope="module")
def encoder() -> tuple[Encoder, ModelProto]:
    torch.manual_seed(0)
    net, file = Encoder().eval(), io.BytesIO()
    torch.onnx.export(net, (torch.randn(2, 3, 8),), file, dynamo=False, input_names=["x"], output_names=["y"])
    return net, onnx.load_from_string(file.getvalue())


def test_each_module_has_its_own(encoder: tuple[Encoder, ModelProto]) -> None:
    """The gradients of parted weights are those of PyTorch, whose weights were never one."""
    net, model = encoder
    tied = build(model)
    assert len(tied.training.trained) < 10
    assert any("`untie`" in caution.text for caution in tied.training.cautions)
    untied = build(model, Options(losses=(LossSpec("mse"),), label="t", untie=("*",)))
    assert len(untied.training.trained) == len(list(net.parameters()))
    assert not any("untie" in caution.text for caution in untied.training.cautions)
    x, t = (np.random.default_rng(seed).standard_normal((2, 3, 8)).astype(np.float32) for seed in (0, 1))
    session = ort.InferenceSession(untied.model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": x, "t": t}), strict=True))
    nn.functional.mse_loss(net(torch.tensor(x)), torch.tensor(t)).backward()
    theirs = {f"{name}_grad": parameter.grad.numpy() for name, parameter in net.named_parameters()}
    shared = theirs.keys() & found.keys()
    assert len(shared) >= 17  # the exporter has renamed those that it transposed
    for name in shared:
        np.testing.assert_allclose(found[name], theirs[name], atol=2e-6, err_msg=name)
    others = sorted(float(np.abs(theirs[name]).sum()) for name in theirs.keys() - shared)
    renamed = sorted(float(np.abs(found[name]).sum()) for name in found if "MatMul" in name)
    np.testing.assert_allclose(renamed, others, rtol=1e-4)


def test_what_nobody_shares_is_not_parted() -> None:
    model = scoped({"a": "enc.one"})
    with raises(UsageError, "unknown_name", "untie", "w"):
        build(model, Options(untie=("w",)))


def scoped(scopes: dict[str, str]) -> ModelProto:
    """Products with one weight, in modules as PyTorch's newer exporter notes them: output -> the module's path."""
    products = "".join(f"{name} = MatMul({before}, w) " for before, name in zip(["x", *scopes], scopes, strict=False))
    last = list(scopes)[-1]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
    g (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {{1, 2, 3, 4}}, float half = {{0.5}}>
    {{ {products} s = Mul({last}, half) y = Tanh(s) }}""")
    for node in model.graph.node:
        path = scopes.get(node.output[0], "enc.end")
        parts = path.split(".")
        names = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), node.output[0]]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(names))
    return model


def test_a_copy_is_called_after_its_module() -> None:
    model = scoped({"a": "enc.one", "b": "enc.two", "c": "enc.one"})
    found = build(model, Options(untie=("w",)))
    assert found.training.trained == ["w", "enc.two.w"]
    reads = [node.input[1] for node in found.graph.nodes if node.op_type == "MatMul" and node.output[0] in "abc"]
    assert reads == ["w", "enc.two.w", "w"]
