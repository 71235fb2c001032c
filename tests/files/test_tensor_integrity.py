"""A tensor stores what it declares, or the file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli import build
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import read_model
from onnxgrad_cli.jobs.inspect import inspect
from onnxgrad_cli.jobs.view import run_view
from tests.cli.test_hostile_files import mlp, refused
from tests.cli_harness import Shell
from tests.facts import raises


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


LIES = [
    ({"dims": [4, 2**40], "raw_data": bytes(48)}, ("[4, 1099511627776]", "stores 48")),
    ({"dims": [2**32, 2**32], "raw_data": b""}, ("[4294967296, 4294967296]",)),
    ({"dims": [2**40, 0, 2**40], "raw_data": b""}, ("1099511627776",)),
    ({"dims": [4, -3], "raw_data": bytes(48)}, ("[4, -3]",)),
    ({"dims": [400, 3], "raw_data": bytes(4796)}, ("4,800 bytes", "stores 4,796")),
    ({"dims": [4, 3], "float_data": [0.0] * 13}, ("12 numbers", "stores 13")),
    ({"dims": [4, 3], "raw_data": bytes(48), "data_type": 77}, ("unknown type 77",)),
    ({"dims": [4, 3], "raw_data": bytes(48), "segment": TensorProto.Segment(begin=0, end=4)}, ("a segment",)),
    ({"dims": [2**40], "string_data": [b"a"], "data_type": TensorProto.STRING}, ("1,099,511,627,776 strings",)),
    ({"dims": [7], "raw_data": bytes(5), "data_type": TensorProto.INT4}, ("4 bytes", "stores 5")),
]


@pytest.mark.parametrize(("fields", "words"), LIES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_stores_what_it_declares(
    shell: Shell, fields: dict[str, object], words: tuple[str, ...], inside: bool
) -> None:
    model = mlp()
    tensor = TensorProto(**{"name": "lie", "data_type": TensorProto.FLOAT, **fields})
    if inside:
        model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    else:
        model.graph.initializer.append(tensor)
    refused(shell, model, "tensor 'lie'", *words)


@pytest.mark.parametrize("dtype", [d for d in TensorProto.DataType.values() if d])
@pytest.mark.parametrize("raw", [False, True])
def test_tensors_of_every_type_store_what_they_declare(dtype: int, raw: bool) -> None:
    model = mlp()
    values = [b"a"] * 5 if dtype == TensorProto.STRING else [0, 1, 1, 0, 1]
    tensor = helper.make_tensor("t", dtype, [5], values)
    if raw and dtype != TensorProto.STRING:
        tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), "t")
        assert tensor.HasField("raw_data")
    model.graph.initializer.append(tensor)
    assert read_model(model.SerializeToString())[0].graph.initializer[-1] == tensor


@pytest.mark.parametrize("job", [build, inspect, run_view])
def test_a_model_in_memory_stores_what_it_declares(job: Callable[[ModelProto], object]) -> None:
    model = mlp()
    model.graph.initializer.append(TensorProto(name="lie", data_type=TensorProto.FLOAT, dims=[2**40]))
    with raises(OnnxgradError, "unreadable_file", "lie", "1099511627776", "1,099,511,627,776", "0"):
        job(model)


def test_tensors_that_belong_to_no_weight(shell: Shell) -> None:
    """Adagrad reads each weight with its gradient and its state: onnx says of them only that they are many."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    g (float r, int64 t, float[2] x, float[2] g, float[2] h) => (float[2] y) <float[2] w = {1, 2}> {
        a = Mul(x, w) y, z = ai.onnx.preview.training.Adagrad(r, t, a, g, h, x)
    }""")
    refused(shell, model, "4 tensors, but needs 3 for each weight", code=3)
