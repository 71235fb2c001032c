"""Weights that several modules read are parted where that is asked for; globs name modules, too."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto
from torch import nn

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses import LossSpec
from onnxgrad_cli.options import Group, Options


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
    assert any("`untie` trains them separately" in caution.text for caution in tied.training.cautions)
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
    with pytest.raises(UsageError, match="'w' matches no shared weight"):
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


@pytest.mark.parametrize(
    ("pattern", "trained"), [("enc.two*", ["enc.two.w"]), ("enc.one", ["w"]), ("enc.*", ["w", "enc.two.w"])]
)
def test_globs_name_modules(pattern: str, trained: list[str]) -> None:
    """Scalars that a module reads are not chosen with it."""
    model = scoped({"a": "enc.one", "b": "enc.two"})
    assert build(model, Options(train=(pattern,), untie=("w",))).training.trained == trained
    left = [name for name in ("w", "enc.two.w") if name not in trained]
    if left:
        assert build(model, Options(freeze=(pattern,), untie=("w",))).training.trained == left


def test_groups_name_modules() -> None:
    model = scoped({"a": "enc.one", "b": "enc.two"})
    group = (Group("enc.two", {"lr": 0.5}),)
    built = build(model, Options(untie=("w",), optimizer="sgd", group=group))
    assert "w_next" in {output.name for output in built.model.graph.output}
    with pytest.raises(UsageError, match=r"enc\.three"):
        build(model, Options(untie=("w",), optimizer="sgd", group=(Group("enc.three", {"lr": 0.5}),)))
