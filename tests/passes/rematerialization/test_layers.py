"""The layers of networks as exporters write them: where they end, and what is kept when one at a time is recomputed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, helper
from torch import nn

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.rematerialization.dataflow import Dataflow
from onnxgrad_cli.passes.rematerialization.layers import ends_of_layers
from tests.facts import raises

COUNT, WIDTH = 4, 32
BLOCKS = RecomputeSpec("block", "auto")


class Encoder(nn.Module):
    """A transformer with a head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.layers, self.head = nn.TransformerEncoder(layer, COUNT, enable_nested_tensor=False), nn.Linear(WIDTH, 3)
        for parameter in self.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)  # the exporter merges weights of equal values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def exported(net: nn.Module) -> onnx.ModelProto:
    file = io.BytesIO()
    torch.onnx.export(net, (torch.randn(4, 16, WIDTH),), file, opset_version=17, dynamo=False, input_names=["x"])
    return onnx.load_from_string(file.getvalue())


def made(model: onnx.ModelProto, recompute: RecomputeSpec | None, stop_after: str | None = None) -> TrainingModel:
    options = Options(losses=(LossSpec("cross-entropy"),), label="y", recompute=recompute)
    return build(model, options, stop_after=stop_after)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.thinned(2)
def test_one_layer_at_a_time(norm_first: bool) -> None:
    """Each layer's input is kept, and what the last part keeps: far less than all; gradients are PyTorch's."""
    net = Encoder(norm_first).train()
    model = exported(net)
    plain, again = made(model, None, "backward"), made(model, BLOCKS)
    done = again.training.recomputed
    assert done is not None and done.kept < 0.35 * done.kept_before
    ends = ends_of_layers(Dataflow(plain.graph, plain.training).forward)
    assert len(ends) == COUNT + 1 and len(set(np.diff(ends))) == 1
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 16, WIDTH)).astype(np.float32), "y": np.array([0, 2, 1, 1])}
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 3
    results = ort.InferenceSession(again.model.SerializeToString(), quiet).run(None, feeds)
    found = dict(zip([value.name for value in again.model.graph.output], results, strict=True))
    nn.functional.cross_entropy(net(torch.tensor(feeds["x"])), torch.tensor(feeds["y"])).backward()
    theirs = {name: parameter.grad for name, parameter in net.named_parameters()}
    compared = 0
    for name, gradient in again.training.gradients.items():
        if name in theirs:  # the exporter names transposed matrices anew
            np.testing.assert_allclose(found[gradient], theirs[name], rtol=2e-4, atol=2e-6, err_msg=name)
            compared += 1
    assert compared >= 2 * COUNT


def chain(kinds: str, name: str = "{}") -> list[NodeProto]:
    """Nodes in a row, of one letter each, of which each reads the one before it."""
    operators = {"a": "Abs", "e": "Exp", "n": "Neg", "s": "Sin", "t": "Tanh"}
    return [
        helper.make_node(operators[kind], [f"v{at}"], [f"v{at + 1}"], name=name.format(at))
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("kinds", "ends"),
    [
        ("a" + "ent" * 4 + "s", [1, 4, 7, 10, 13]),
        ("ent" * 2, [0, 3]),
        ("aens", []),
        ("a" * 5, [0, 1, 2, 3, 4]),
        ("", []),
    ],
)
def test_what_repeats(kinds: str, ends: list[int]) -> None:
    assert ends_of_layers(chain(kinds)) == ends


def test_the_fewest_values_cross_an_end() -> None:
    """A residual layer has one value at its ends, and two inside; what all layers read crosses every end alike."""
    nodes = chain("s")
    value = "v1"
    for at in range(3):
        nodes += [
            helper.make_node("Mul", [value, "v1"], [f"m{at}"]),
            helper.make_node("Exp", [f"m{at}"], [f"h{at}"]),
            helper.make_node("Add", [value, f"h{at}"], [f"r{at}"]),
        ]
        value = f"r{at}"
    assert ends_of_layers(nodes) == [1, 4, 7]
    assert nodes[6].output == ["r1"]


def test_modules_that_are_numbered() -> None:
    """Where nothing repeats: the first layer makes what the others read, too."""
    nodes = [*chain("aas", "/embed/{}"), *chain("etns", "/layers.0/{}"), *chain("ent", "/layers.1/x.2/{}")]
    assert ends_of_layers([*nodes, *chain("s", "/head/{}")]) == [3, 7, 10]
    assert ends_of_layers([*nodes, *chain("atsanetnesatnns", "/head/{}")]) == []


def test_a_network_without_layers(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Softmax(-1), nn.LayerNorm(8))
    with raises(UsageError, "no_data", "recompute") as told:
        made(exported(net), BLOCKS)
    assert "block:GLOB" in (told.value.hint or "")
