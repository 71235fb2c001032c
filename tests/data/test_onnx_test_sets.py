"""Test sets as onnx publishes them: tensors in numbered folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.data.leading_facts import raises_first
from tests.data.test_array_files import PORTS as ONE_INPUT, X as FOUR_ROWS
from tests.data.test_dataset import PORTS, X, Y, to_folder, to_sets
from tests.facts import raises

random = np.random.default_rng(0)


N = 20


def test_sets_by_the_names_of_their_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "test_data_set_3"
    folder.mkdir()
    onnx.save_tensor(numpy_helper.from_array(Y, "y"), folder / "input_0.pb")
    onnx.save_tensor(numpy_helper.from_array(X, "x"), folder / "input_1.pb")
    np.testing.assert_array_equal(open_data(folder, PORTS).batch(np.arange(N))["y"], Y)
    onnx.save_tensor(numpy_helper.from_array(X, "z"), folder / "input_2.pb")
    with raises(UsageError, "mismatch", "test_data_set_3", "3", "2"):
        open_data(folder, PORTS)
    (folder / "input_2.pb").write_bytes(b"\xff\xff")
    with raises_first(OnnxgradError, "unreadable_file", "input_2.pb"):
        open_data(folder, PORTS)


def test_sets_that_differ(tmp_path: Path) -> None:
    path = to_sets(tmp_path, {"x": X, "y": Y})
    (path / "test_data_set_1" / "input_1.pb").unlink()
    with raises(UsageError, "missing_value", "sets", "y"):
        open_data(path, PORTS)
    array = numpy_helper.from_array(X[:, :2])
    (path / "test_data_set_1" / "input_0.pb").write_bytes(array.SerializeToString())
    (path / "test_data_set_0" / "input_1.pb").unlink()
    with raises(UsageError, "mismatch", "sets", "x", "float64", "11", "3", "float64", "20", "2"):
        open_data(path, PORTS)


def test_inputs_called_as_paths(tmp_path: Path) -> None:
    inputs = {"encoder/x:0": PORTS["x"], "y": PORTS["y"]}
    assert open_data(to_folder(tmp_path, {"encoder/x:0": X, "y": Y}), inputs).size == N


def test_numbers_of_test_sets_that_are_none(tmp_path: Path) -> None:
    """A superscript is a digit, and no number."""
    path = to_sets(tmp_path, {"x": X, "y": Y})
    for name in ("test_data_set_²", "test_data_set_" + "9" * 100):
        (path / "test_data_set_1").rename(path / name)
        assert open_data(path, PORTS).size == N
        (path / name).rename(path / "test_data_set_1")
    for folder in path.iterdir():
        (folder / "input_0.pb").rename(folder / "input_0².pb")
    assert open_data(path, {"x": PORTS["y"], "y": PORTS["x"]}).size == N


def test_tensors_of_onnx_that_lie(tmp_path: Path) -> None:
    file = tmp_path / "test_data_set_0" / "input_0.pb"
    file.parent.mkdir()

    def refuse(content: bytes, words: str = "") -> None:
        file.write_bytes(content)
        with raises_first(OnnxgradError, "unreadable_file", "input_0.pb") as told:
            open_data(file.parent, ONE_INPUT)
        assert words in told.value.message

    tensor = numpy_helper.from_array(FOUR_ROWS, "x")
    tensor.dims[0] = 2**40
    refuse(tensor.SerializeToString())
    tensor.dims[0], tensor.data_type = 4, 99
    refuse(tensor.SerializeToString())
    outside = TensorProto(name="x", dims=[4, 3], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="/etc/hostname")
    refuse(outside.SerializeToString(), "another file")
    refuse(b"\xff" * 40)
