"""A file that is damaged, or made to harm, comes to a message that names what is wrong, in little time and memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.files import read_model
from tests.cli_harness import MLP, Result, Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def refused(shell: Shell, model: ModelProto | bytes, *words: str, command: str = "build", code: int = 1) -> Result:
    """Run a command on a model, which it must refuse with these words and leave nothing behind."""
    data = model if isinstance(model, bytes) else model.SerializeToString()
    (shell.folder / "m.onnx").write_bytes(data)
    result = shell(command, "m.onnx")
    assert result.code == code, result.err
    assert result.err.startswith("error: ") and "hint: " in result.err
    assert "internal" not in result.err and "Traceback" not in result.err
    for word in words:
        assert word in result.err
    assert [*shell.files()] == ["m.onnx"]
    return result


def mlp() -> ModelProto:
    return onnx.parser.parse_model(MLP)


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


def test_an_attribute_of_a_function_outside_of_one(shell: Shell) -> None:
    model = mlp()
    model.graph.node[2].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    refused(shell, model, "'alpha'", "'s' (Sigmoid)", "'slope'")


@pytest.mark.parametrize("opset", [0, -3, 2**40])
def test_an_opset_that_never_was(shell: Shell, opset: int) -> None:
    model = mlp()
    model.opset_import[0].version = opset
    refused(shell, model, "no opset" if opset == 0 else f"version {opset} of 'ai.onnx'")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_without_an_end(shell: Shell) -> None:
    result = shell("inspect", "/dev/zero")
    assert result.code == 1 and "does not begin as an ONNX model" in result.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_read_like_a_file(shell: Shell) -> None:
    os.mkfifo(shell.folder / "pipe")
    data = mlp().SerializeToString()
    writer = threading.Thread(target=(shell.folder / "pipe").write_bytes, args=(data,))
    writer.start()
    result = shell("inspect", "pipe")
    writer.join()
    assert result.code == 0, result.err


def test_a_file_that_is_longer_than_a_message_can_be(shell: Shell) -> None:
    with (shell.folder / "m.onnx").open("wb") as file:
        file.write(mlp().SerializeToString())
        file.truncate(2**31)  # of which the disk holds nothing
    result = shell("inspect", "m.onnx")
    assert result.code == 1 and "longer than 2 GB" in result.err and "external data" in result.err
