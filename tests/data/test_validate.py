"""Names, types, shapes and values of data are checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, TypeProto

from onnxgrad_cli.data import Range, open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.test_dataset import FLOAT, INT64, PORTS, X, Y, to_folder, to_npz
from tests.facts import raises

random = np.random.default_rng(0)


N = 20


Arrays = Mapping[str, np.ndarray]


Writer = Callable[[Path, Arrays], Path]


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({"X": X, "y": Y}, ("missing_value", "x", "3")),
        ({}, ("missing_value", "x", "3", "y", "int64")),
        ({"x": X[:, :2], "y": Y}, ("wrong_shape", "x", "20", "2", "3")),
        ({"x": X[:, 0], "y": Y}, ("wrong_shape", "x", "20", "3")),
        ({"x": X, "y": Y[:, None]}, ("wrong_shape", "y", "20", "1")),
        ({"x": X, "y": Y.astype(np.float32)}, ("wrong_type", "y", "float32", "int64")),
        ({"x": X.astype(str), "y": Y}, ("wrong_type", "x", "3")),
        ({"x": X + 1j, "y": Y}, ("wrong_type", "x", "complex128", "3")),
        ({"x": X, "y": Y[:-1]}, ("wrong_shape", "x", "20", "y", "19")),
        ({"x": X[:0], "y": Y[:0]}, ("no_data", "x", "0", "3")),
        (
            {"x": np.where(np.arange(60).reshape(20, 3) == 50, np.nan, X), "y": Y},
            ("wrong_value", "x", "16", "0", "2", "float32"),
        ),
        ({"x": X * 1e39, "y": Y}, ("wrong_value", "x", "6.4042265044328204e+38", "0", "0", "2", "float32")),
        (
            {"x": X, "y": np.where(np.arange(20) > 7, 9, Y)},
            ("wrong_value", "y", "9", "8", "0", "0", "4", "-100", "5"),
        ),
        ({"x": X, "y": Y - 1}, ("wrong_value", "y", "-1", "3", "0", "0", "4", "-100", "5")),
    ],
)
@pytest.mark.parametrize("write", [to_npz, to_folder])
def test_wrong_data_is_told(tmp_path: Path, write: Writer, arrays: Arrays, said: tuple[str, ...]) -> None:
    (tmp_path / "data").mkdir()
    path = write(tmp_path, {**arrays, "other": Y})
    with raises(UsageError, said[0], path.name, *said[1:]) as told:
        open_data(path, PORTS, {"y": CLASSES})
    assert told.value.hint


CLASSES = Range(0, 4, frozenset({-100}), "there are 5 classes")


def test_hints_say_what_to_do(tmp_path: Path) -> None:
    def hint(x: np.ndarray, y: np.ndarray, label: TypeProto = PORTS["y"]) -> str:
        with pytest.raises(UsageError) as told:
            open_data(to_npz(tmp_path, {"x": x, "y": y}), {**PORTS, "y": label})
        return told.value.hint or ""

    assert "argmax(1)" in hint(X, np.eye(5)[Y])
    assert "astype(numpy.int64)" in hint(X, Y.astype(float))
    for broken in (0.5, np.nan):
        assert "such as mse" in hint(X, np.where(np.arange(N) == N - 1, broken, Y))
    assert "structured_to_unstructured" in hint(np.zeros(N, [("a", "f4"), ("b", "f4")]), Y)
    assert "array[..., None]" in hint(X, Y, tensor_type(FLOAT, ["batch", 1]))
    assert "array[..., 0]" in hint(X, Y[:, None])
    with pytest.raises(UsageError) as told:
        open_data(to_npz(tmp_path, {"x": X, "label": Y}), {"x": PORTS["x"], "labels": PORTS["y"]})
    assert "did you mean label?" in (told.value.hint or "")


def test_labels_of_which_none_counts(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": X, "y": np.full_like(Y, -100)})
    with raises(UsageError, "no_data", "data.npz", "y", "-100"):
        open_data(path, PORTS, {"y": CLASSES})


def test_one_label_for_all_samples(tmp_path: Path) -> None:
    with raises(UsageError, "wrong_shape", "data.npz", "y") as told:
        open_data(to_npz(tmp_path, {"x": X, "y": np.int64(1)}), PORTS, {"y": CLASSES})
    assert "single number" in (told.value.hint or "")


def test_what_is_ignored_is_no_class_at_fault(tmp_path: Path) -> None:
    labels = np.where(np.arange(N) % 2, Y, -100)
    assert open_data(to_npz(tmp_path, {"x": X, "y": labels}), PORTS, {"y": CLASSES}).size == N


def test_symbols_are_one_size_everywhere(tmp_path: Path) -> None:
    inputs = {"ids": tensor_type(INT64, ["batch", "seq"]), "mask": tensor_type(FLOAT, ["n", "seq"])}
    ids = np.zeros((6, 8), int)
    data = open_data(to_npz(tmp_path, {"ids": ids, "mask": np.ones((6, 8))}), inputs)
    assert data.sizes == {"seq": 8}
    with raises(UsageError, "wrong_shape", "data.npz", "mask", "6", "9", "seq", "8", "ids"):
        open_data(to_npz(tmp_path, {"ids": ids, "mask": np.ones((6, 9))}), inputs)


@pytest.mark.parametrize(
    "inputs, said",
    [
        (
            {"x": tensor_type(FLOAT, ["time", "batch", 3]), "y": tensor_type(FLOAT, ["batch", "time"])},
            ("wrong_shape", "x", "3", "batch"),
        ),
        ({"x": tensor_type(FLOAT, [8, 3]), "h": tensor_type(FLOAT, [1, 3])}, ("mismatch", "8", "x", "1", "h")),
        ({"x": tensor_type(TensorProto.STRING, ["batch"])}, ("wrong_type", "x")),
        ({"x": onnx.helper.make_sequence_type_proto(PORTS["x"])}, ("wrong_type", "x", "3")),
    ],
)
def test_inputs_that_can_not_be_cut_into_samples(
    tmp_path: Path, inputs: dict[str, TypeProto], said: tuple[str, ...]
) -> None:
    with raises(UsageError, *said):
        open_data(to_npz(tmp_path, dict.fromkeys(inputs, X)), inputs)


@pytest.mark.parametrize(
    "held, wanted, fits",
    [
        (np.float64, TensorProto.FLOAT, True),
        (np.uint8, TensorProto.FLOAT, True),
        (np.bool_, TensorProto.FLOAT, True),
        (np.float32, TensorProto.BFLOAT16, True),
        (np.float64, TensorProto.FLOAT16, True),
        (np.int64, TensorProto.INT32, True),
        (np.int64, TensorProto.BOOL, True),
        (np.uint8, TensorProto.INT64, True),
        (">f8", TensorProto.DOUBLE, True),
        (np.float32, TensorProto.INT64, False),
        (np.float32, TensorProto.BOOL, False),
        ("datetime64[s]", TensorProto.INT64, False),
    ],
)
def test_types_that_fit(tmp_path: Path, held: Any, wanted: int, fits: bool) -> None:
    path = to_folder(tmp_path, {"x": np.array([0, 1, 1, 0]).astype(held)})
    inputs = {"x": tensor_type(wanted, ["n"])}
    if not fits:
        with pytest.raises(UsageError, match="'x' holds"):
            open_data(path, inputs)
        return
    batch = open_data(path, inputs).batch(np.array([1, 0]))
    assert batch["x"].dtype == onnx.helper.tensor_dtype_to_np_dtype(wanted) and batch["x"].dtype.isnative
    np.testing.assert_array_equal(batch["x"].astype(float), [1, 0])


@pytest.mark.parametrize(
    "array, wanted, said",
    [
        ([1, 70000], TensorProto.FLOAT16, ("wrong_value", "data.npz", "x", "70000", "1", "0", "float16")),
        (
            [1, 2**31],
            TensorProto.INT32,
            ("wrong_value", "data.npz", "x", "2147483648", "1", "0", "-2147483648", "2147483647"),
        ),
        ([1, 2], TensorProto.BOOL, ("wrong_value", "data.npz", "x", "2", "1", "0", "0", "1")),
        ([0, -1], TensorProto.UINT64, ("wrong_value", "data.npz", "x", "-1", "1", "0", "0", "18446744073709551615")),
    ],
)
def test_numbers_that_the_type_can_not_hold(
    tmp_path: Path, array: list[int], wanted: int, said: tuple[str, ...]
) -> None:
    with raises(UsageError, *said):
        open_data(to_npz(tmp_path, {"x": np.array(array)}), {"x": tensor_type(wanted, ["n"])})


def test_infinity_can_be_let_in(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": np.full((4, 3), -np.inf), "y": Y[:4]})
    assert open_data(path, PORTS, finite=False).size == 4


def test_a_number_for_all_samples(tmp_path: Path) -> None:
    inputs = {**PORTS, "temperature": tensor_type(FLOAT, [])}
    data = open_data(to_npz(tmp_path, {"x": X, "y": Y, "temperature": np.array(2.0)}), inputs)
    assert data.batch(np.arange(3))["temperature"].shape == ()
    with raises(UsageError, "wrong_shape", "data.npz", "temperature", "1"):
        open_data(to_npz(tmp_path, {"x": X, "y": Y, "temperature": np.ones(1)}), inputs)
