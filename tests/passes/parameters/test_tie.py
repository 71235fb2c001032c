"""Weights that a file holds twice are named, and trained as one where that is asked for, as PyTorch trains them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from tests.cli_harness import Shell


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
    assert result.code == 2 and "--tie: 'fc.bias' matches no equal weight" in result.err
