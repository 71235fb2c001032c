"""Derivatives load and run in stock onnxruntime in every type in which the model itself does."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli.cli import run

torch = pytest.importorskip("torch")
F = torch.nn.functional


BFLOAT16 = {
    "Gather": (22, "a = Gather <axis = 1> (x, i) y = Transpose (a)", lambda x, i: x[:, i].T),
    "Pad": (22, 'y = Pad <mode = "reflect"> (x, p)', lambda x, i: F.pad(x[None], (1, 2), "reflect")[0]),
    "GatherElements": (22, "y = GatherElements <axis = 1> (x, j)", lambda x, i: x[:, :2].flip(1)),
    "Compress": (28, "y = Compress <axis = 1> (x, c)", lambda x, i: x[:, [0, 2, 3]]),
    "Celu": (28, "y = Celu <alpha = 2.0> (x)", lambda x, i: F.celu(x, 2.0)),
    "Einsum": (28, 'y = Einsum <equation = "ij->i"> (x)', lambda x, i: x.sum(1)),
}
"""Models that onnxruntime runs in bfloat16, though not what their gradients are made of; and the same in PyTorch."""


def bfloat16_model(name: str, folder: Path) -> Path:
    opset, body, function = BFLOAT16[name]
    sizes = list(function(torch.zeros(3, 4), torch.zeros(5, dtype=torch.int64)).shape)
    text = f"""
    <ir_version: 10, opset_import: ["" : {opset}]>
    g (bfloat16[3, 4] x, int64[5] i) => (bfloat16{sizes} y)
    <int64[4] p = {{0, 1, 0, 2}}, bool[4] c = {{1, 0, 1, 1}}, int64[3, 2] j = {{1, 0, 1, 0, 1, 0}}>
    {{ {body} }}
    """
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("name", BFLOAT16)
def test_gradients_in_bfloat16(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = bfloat16_model(name, tmp_path), tmp_path / "made.onnx"
    try:
        onnxruntime.InferenceSession(source)
    except Exception as error:
        if onnxruntime.__version__ >= "1.32":
            raise
        pytest.skip(f"an older onnxruntime does not run the model: {error}")
    assert run(["derive", str(source), "--kind", "vjp", "-o", str(made)]) == 0
    assert "proof   proved" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((3, 4))).bfloat16().requires_grad_()
    i = np.int64([3, 0, 0, 2, 3])
    y = BFLOAT16[name][2](x, torch.tensor(i))
    g = torch.tensor(rng.standard_normal(tuple(y.shape))).bfloat16()
    y.backward(g)
    feeds = {"x": x, "y_grad": g}
    values = {
        each: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            value.detach().contiguous().view(torch.uint16).numpy(), onnx.TensorProto.BFLOAT16
        )
        for each, value in feeds.items()
    }
    session = onnxruntime.InferenceSession(made)
    taken = {each.name for each in session.get_inputs()}
    values = {each: value for each, value in values.items() if each in taken}
    values |= {"i": onnxruntime.OrtValue.ortvalue_from_numpy(i)} if "i" in taken else {}
    (got,) = session.run_with_ort_values(["x_grad"], values)
    found = torch.utils.dlpack.from_dlpack(got._ortvalue.to_dlpack()).float()
    np.testing.assert_allclose(found.numpy(), x.grad.float().numpy(), rtol=2**-6, atol=2**-6)


def test_a_training_model_in_bfloat16_is_proved_on_given_data_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [onnx.helper.make_node("Gather", ["w", "i"], ["y"], name="rows")]
    weight = np.linspace(-1, 1, 20).reshape(5, 4).astype(ml_dtypes.bfloat16)
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ["n"])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.BFLOAT16, ["n", 4])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    made, data = tmp_path / "made.onnx", tmp_path / "data.npz"
    assert run(["build", str(tmp_path / "model.onnx"), "--loss", "mse", "--label", "t", "-o", str(made)]) == 0
    assert "proof     proved" in capsys.readouterr().out
    np.savez(data, i=np.int64([4, 0, 4]), t=np.float32([[1, 2, 3, 4], [-1, 0, 1, 2], [0.5, 0, 0, 1]]))
    assert run(["check", str(made), "--data", str(data)]) == 0
    assert "skipped" not in capsys.readouterr().out
