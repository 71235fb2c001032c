"""`onnxgrad inspect` on the command line and on real exports: what a file is, what survived, what would serve."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from tests.cli_harness import MLP, Shell, save


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


FOLDED = "BatchNormalization was folded into 1 convolution: its parameters can't be trained"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("offset", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.drop(self.fc(h)) @ self.fc.weight + self.offset


def names_of(found: dict[str, Any]) -> list[str]:
    """The names of the weights that would be trained."""
    return [weight["name"] for weight in found["weights"]]


def export(path: str, net: nn.Module, **settings: Any) -> ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(2, 2, 6, 6),), file, dynamo=False, opset_version=17, input_names=["x"],
                          output_names=["y"], **settings)  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    onnx.save(model, path)
    return model


def test_an_export_in_inference(shell: Shell) -> None:
    export("net.onnx", Net().eval())
    before = shell.files()
    result = shell("inspect", "net.onnx", "--json")
    found = result.json
    assert (result.code, found["status"]) == (0, "differentiable")
    origin = found["diagnosis"]["origin"]
    assert origin["exporter"] == "PyTorch's older exporter" and origin["producer"].startswith("pytorch 2")
    assert (origin["domains"], origin["sizes"]) == ({"": 17}, [])
    assert (origin["inputs"], origin["outputs"]) == ({"x": "float[2, 2, 6, 6]"}, {"y": "float[2, 4]"})
    assert origin["operators"]["Conv"] == 1 and "BatchNormalization" not in origin["operators"]
    assert found["diagnosis"]["normalization"] == [FOLDED]
    assert {name.partition("_")[0] for name in found["diagnosis"]["unnamed"]} == {"onnx::Conv"}
    assert sum(weight["count"] for weight in found["weights"]) == 4 * 2 * 9 + 4 + 4 * 4 + 4 + 4
    advice = " ".join(found["diagnosis"]["advice"])
    assert all(
        word in advice for word in ("do_constant_folding=False", "dynamo=True", "dynamic_axes={'x': {0: 'batch'}}")
    )
    text = shell("inspect", "net.onnx").out
    assert text.startswith(
        "Differentiable: 5 weights will get a gradient.\nwritten by     PyTorch's older exporter (pytorch 2"
    )
    assert "names          the exporter invented the names of 2 of 5 weights: onnx::Conv_" in text
    assert "may vary       no size" in text
    assert shell.files() == before


def test_an_export_that_can_be_trained_on(shell: Shell) -> None:
    export("net.onnx", Net().train(), training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
           dynamic_axes={"x": {0: "n"}})  # fmt: skip
    found = shell("inspect", "net.onnx", "--json", "--freeze", "fc.bias").json
    assert found["diagnosis"]["normalization"] == [
        "1 of BatchNormalization, 1 of them in training mode", "1 of Dropout, 1 of them in training mode"
    ]  # fmt: skip
    assert found["diagnosis"]["unnamed"] == [] and found["diagnosis"]["origin"]["sizes"] == ["n"]
    assert (
        len(found["diagnosis"]["advice"]) == 1
        and "records which tensors are parameters" in found["diagnosis"]["advice"][0]
    )
    frozen = [(each["name"], each["count"]) for each in found["not_trained"] if each["reason"] == "frozen by --freeze"]
    assert frozen == [("fc.bias", 4)]
    assert "names          every weight has its original name" in shell("inspect", "net.onnx").out


def test_weights_that_are_equal_may_have_been_one(shell: Shell) -> None:
    model = export("net.onnx", Net().eval())
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "fc.weight")
    for name, change in (("tied", 0.0), ("other", 1e-6)):
        values = numpy_helper.to_array(weight) + np.float32(change)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
        model.graph.node.add(op_type="MatMul", input=[model.graph.output[0].name, name], output=[f"{name}_y"])
        model.graph.output[0].name = f"{name}_y"
    onnx.save(model, "net.onnx")
    assert shell("inspect", "net.onnx", "--json").json["diagnosis"]["equal"] == [["fc.weight", "tied"]]
    assert (
        "equal          fc.weight, tied: have equal values and are trained separately"
        in shell("inspect", "net.onnx").out
    )


def test_of_the_newer_exporter_the_signature_tells_what_was_folded(shell: Shell) -> None:
    model = export("net.onnx", Net().eval())
    signature = (
        "b_norm_mean: BUFFER target='norm.running_mean'\np_w: PARAMETER target='fc.weight'\nb_o: BUFFER target='offset'"
    )
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    onnx.save(model, "net.onnx")
    found = shell("inspect", "net.onnx", "--json").json
    assert found["diagnosis"]["origin"]["exporter"] == "PyTorch's newer exporter"
    assert found["diagnosis"]["normalization"] == [FOLDED]
    assert "PyTorch's exporter does not mark it as a parameter (name it with --train to train it)" in str(
        found["not_trained"]
    )
    assert "offset" not in names_of(found) and not any("dynamo=True" in text for text in found["diagnosis"]["advice"])


def test_what_was_read_otherwise(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "own": 1], producer_name: "here">
    g (float[n, 4] x, int64[m] i) => (float y) <float[4, 4] w, float s = {0.5}>
    { h = com.microsoft.FusedMatMul(x, w) q = own.f(h) k = Gather(q, i) y = Det(k) }
    <domain: "own", opset_import: ["": 17]> f (a) => (b) { b = Relu(a) }
    """
    model = onnx.parser.parse_model(text.replace("<float[4, 4] w, ", "<"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    onnx.save(model, "net.onnx")
    found = shell("inspect", "net.onnx", "--json").json
    assert found["diagnosis"]["repaired"] == [
        "1 function of the model: replaced by their nodes",
        "com.microsoft::FusedMatMul, 1 node: replaced by standard operators",
    ]
    assert (
        found["diagnosis"]["origin"]["functions"] == ["own::f"] and found["diagnosis"]["origin"]["exporter"] == "here"
    )
    assert found["diagnosis"]["proof"][-2:] == [
        "i: not floats; if random values are invalid, give values with --test-data FILE.npz",
        "n, m: if these sizes depend on each other, fix them with --dim",
    ]
    assert any("only onnxruntime has" in text for text in found["diagnosis"]["advice"])


def test_what_stands_in_the_way(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "nowhere": 1]>
    g (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {1, 2, 3, 5}>
    { h = MatMul(x, w) k = nowhere.Unheard(h) y = Tanh(k) }
    """
    Path("refused.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    result = shell("inspect", "refused.onnx", "--json")
    assert (result.code, result.json["status"]) == (3, "refused") and result.json["diagnosis"]["origin"]
    assert "No training model" not in result.json["verdict"] and result.json["next"] == []
    assert [refusal["op_type"] for refusal in result.json["refusals"]] == ["nowhere::Unheard", "Tanh"]
    result = shell("inspect", "refused.onnx")
    assert result.out.startswith("Refused: 2 nodes can't be differentiated.\nwritten by ")
    assert "Unheard" not in result.out and "nowhere::Unheard" in result.err, (
        "an error stands on stderr, and there alone"
    )
    text = text.replace("float[2, 2] y)", "float y)")  # its rank can't be known
    Path("wrong.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    result = shell("inspect", "wrong.onnx", "--json")
    assert (result.code, result.json["status"]) == (2, "usage") and result.json["error"]
    message = result.json["error"].splitlines()[0]
    result = shell("inspect", "wrong.onnx")
    assert "\nwritten by " in result.out and f"error: {message}" in result.err


def test_an_exporter_whose_name_is_no_utf8(shell: Shell) -> None:
    """protobuf gives it out as bytes; the rest of the file is as good as any."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17], producer_name: "tool">
    g (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {1, 2, 3, 5}> { y = MatMul(x, w) }""")
    Path("m.onnx").write_bytes(model.SerializeToString().replace(b"tool", b"t\xe9ol"))
    result = shell("inspect", "m.onnx", "--json")
    assert (result.code, result.json["status"], result.json["diagnosis"]["origin"]["producer"]) == (
        0,
        "differentiable",
        "t\\xe9ol",
    )
    assert "\nwritten by     t\\xe9ol, opset 17" in shell("inspect", "m.onnx").out


def test_a_file_that_is_no_model(shell: Shell) -> None:
    Path("net.onnx").write_bytes(b"no model")
    assert shell("inspect", "net.onnx").code == 1


def calls_in(advice: list[str]) -> list[dict[str, Any]]:
    """The keywords of each call of torch.onnx.export that the advice contains."""
    found = []
    for text in advice:
        start = text.find("torch.onnx.export(")
        if start >= 0:
            ends = (end for end, letter in enumerate(text) if letter == ")" and end > start)
            call = next(tree for end in ends if (tree := _parsed(text[start : end + 1])) is not None)
            found.append({k.arg: eval(ast.unparse(k.value), {"torch": torch}) for k in call.keywords if k.arg})
    return found


def _parsed(text: str) -> ast.Call | None:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    return tree if isinstance(tree, ast.Call) else None


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True], ids=["older", "newer"])
def test_the_advice_on_an_export_is_true(shell: Shell, dynamo: bool) -> None:
    """Each call that the advice contains is made, and the problem that it is for is gone."""
    if importlib.util.find_spec("onnxscript") is None and dynamo:
        pytest.skip("PyTorch's newer exporter needs onnxscript")

    def written(path: str, **settings: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(Net().train(), (torch.zeros(2, 2, 6, 6),), path, external_data=False, **settings)
        return shell("inspect", path, "--json", "--mode", "train").json

    before = written("before.onnx", dynamo=dynamo)
    assert FOLDED in before["diagnosis"]["normalization"] and "norm.weight" not in names_of(before)
    calls = calls_in(before["diagnosis"]["advice"])
    if importlib.util.find_spec("onnxscript") is None:
        calls = [call for call in calls if not call.get("dynamo", dynamo)]
    assert len(calls) >= 2
    for number, call in enumerate(calls):
        found = written(f"after{number}.onnx", **{"dynamo": dynamo, **call})
        if "dynamic_axes" in call or "dynamic_shapes" in call:
            assert before["diagnosis"]["origin"]["sizes"] == [] and found["diagnosis"]["origin"]["sizes"] == ["batch"]
            continue
        assert {"norm.weight", "norm.bias", "conv.weight", "fc.weight"} <= set(names_of(found))
        assert (
            found["diagnosis"]["unnamed"] == [] and len(found["diagnosis"]["normalization"]) == 2
        )  # BatchNormalization and Dropout
        assert "folded" not in str(found["diagnosis"]["normalization"])
        if call.get("dynamo"):
            assert "offset" not in names_of(found)  # a buffer


def test_a_size_without_a_name_may_vary(shell: Shell) -> None:
    """As tf2onnx writes it: `unk__749`, or a dimension without a size."""
    model = onnx.load(save(MLP, Path("m.onnx")))
    for size in ("unk__749", ""):
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = size
        onnx.save(model, "m.onnx")
        text = shell("inspect", "m.onnx").out
        assert re.search(r"may vary +\?\n", text) and "all sizes are fixed" not in text, text


@pytest.mark.parametrize(("more", "counts"), [((), ["3"]), (("--grad-of-input", "x"), ["3", "1"])])
def test_the_verdict_counts_weights_and_inputs(shell: Shell, more: tuple[str, ...], counts: list[str]) -> None:
    save(MLP, Path("mlp.onnx"))
    result = shell("inspect", "mlp.onnx", *more, "--json")
    assert re.findall(r"\d+", result.json["verdict"]) == counts and result.json["status"] == "differentiable"
    (following,) = result.json["next"]
    assert following["text"] == " ".join(["onnxgrad", "build", "mlp.onnx", *more, "--json"])
