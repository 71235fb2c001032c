"""Folders in the form of Hugging Face's `Dataset.save_to_disk`, written by pyarrow, and what a stranger may write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.data import (
    Data,
    Preprocessing,
    SampleOptions,
    open_data,
)
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Term
from tests.data.leading_facts import raises_first
from tests.data.test_dataset import PORTS as TABLE, X as ROWS, Y as CLASSES
from tests.facts import raises

arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
TERM = Term("cross-entropy", "p", "label", 1.0, 3, -100, 1)
PORTS = {"x": tensor_type(FLOAT, ["n", 3]), "label": tensor_type(INT64, ["n"])}
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def save(folder: Path, columns: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> Path:
    """A Dataset of two files, as datasets 5.2 writes it."""
    folder.mkdir()
    table = arrow.table(dict(columns))
    files = [f"data-0000{part}-of-00002.arrow" for part in (0, 1)]
    for part, name in enumerate(files):
        some = table.slice(4 * part, 4)
        with arrow.OSFile(str(folder / name), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(some)
    said = {"_data_files": [{"filename": name} for name in files], "_format_type": None, **(state or {})}
    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}, "x": {"_type": "List"}}
    (folder / "state.json").write_text(json.dumps(said))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def opened(path: Path, inputs: Mapping[str, Any] = PORTS, known: Preprocessing | None = None, **options: Any) -> Data:
    return open_data(path, inputs, terms=[TERM], samples=SampleOptions(**options), known=known)


def test_columns_and_the_names_of_classes_come_back(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"x": X.tolist(), "label": [0, 1] * 4})
    data = opened(path)
    np.testing.assert_array_equal(data.batch(np.arange(8))["x"], X)
    assert data.batch(np.arange(8))["label"].tolist() == [0, 1] * 4
    assert data.preprocessing([TERM]).classes == {"p": ("no", "yes")}
    with raises(UsageError, "mismatch", "d", "label"):
        opened(path, known=Preprocessing({"p": ("yes", "no")}))


def test_pictures_are_decoded_as_they_are_needed(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    arrays = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3), np.uint8)
    column = []
    for array in arrays:
        stream = BytesIO()
        image.fromarray(array).save(stream, "PNG")
        column.append({"bytes": stream.getvalue(), "path": None})
    inputs = {**PORTS, "x": tensor_type(TensorProto.UINT8, ["n", 6, 6, 3])}
    data = opened(save(tmp_path / "d", {"img": column, "label": [0, 1] * 4}), inputs, columns={"img": "x"})
    np.testing.assert_array_equal(data.batch(np.array([5, 0]))["x"], arrays[[5, 0]])
    column[3] = {"bytes": b"nothing", "path": None}
    with raises_first(OnnxgradError, "unreadable_file", "e, sample 3"):
        opened(save(tmp_path / "e", {"img": column, "label": [0, 1] * 4}), inputs, columns={"img": "x"})
    column[3] = {"bytes": None, "path": "/etc/passwd"}
    with raises(UsageError, "missing_value", "f", "img"):
        opened(save(tmp_path / "f", {"img": column, "label": [0, 1] * 4}), inputs, columns={"img": "x"})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": [{"filename": "../other.arrow"}]}, ("unreadable_file", "d", "other.arrow")),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, ("unreadable_file", "d", "passwd")),
        ({"_data_files": []}, ("unreadable_file", "d")),
        ({"_data_files": 3}, ("unreadable_file", "d")),
        ({"_data_files": [{"filename": "dataset_info.json"}]}, ("unreadable_file", "dataset_info.json")),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, ("unreadable_file", "d", "flatten_indices")),
    ],
)
def test_a_strangers_description_is_refused(tmp_path: Path, state: Mapping[str, Any], said: tuple[str, ...]) -> None:
    path = save(tmp_path / "d", {"x": X.tolist(), "label": [0, 1] * 4}, state)
    with raises_first(OnnxgradError, *said):
        opened(path)


OFFSETS = {"x": range(0, 39, 3), "label": range(0, 26, 2)}
"""Where the lists and the texts below begin in what holds all of them."""


@pytest.mark.parametrize(
    ("column", "offset"), [("x", 10**8), ("x", -(10**8)), ("label", 10**8), ("label", -7), ("label", 2**31 - 1)]
)
def test_offsets_that_lead_elsewhere_in_the_memory(tmp_path: Path, column: str, offset: int) -> None:
    texts = [f"a{i % 3}" for i in range(12)]
    folder = tmp_path / "d"
    folder.mkdir()
    table = arrow.table({"x": np.ones((12, 3), np.float32).tolist(), "label": texts})
    with arrow.OSFile(str(folder / "a.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    whole = (folder / "a.arrow").read_bytes()
    right = np.array(OFFSETS[column], "<i4")
    wrong = np.where(np.arange(13) == 5, offset, right).astype("<i4")
    assert whole.count(right.tobytes()) == 1
    assert len(opened(folder)) == 12
    (folder / "a.arrow").write_bytes(whole.replace(right.tobytes(), wrong.tobytes()))
    with raises_first(OnnxgradError, "unreadable_file", "d") as told:
        opened(folder)
    assert "offset" in told.value.message.lower()


def test_text_in_an_arrow_file_that_is_none(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"x": X.tolist(), "label": ["no", "yes"] * 4})
    file = path / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes().replace(b"noyesno", b"n\xffyesno"))
    with pytest.raises(OnnxgradError, match="UTF8"):
        opened(path)


def test_a_link_to_elsewhere_and_splits_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"x": X.tolist(), "label": [0, 1] * 4})
    file = path / "data-00001-of-00002.arrow"
    file.rename(tmp_path / "moved.arrow")
    file.symlink_to(tmp_path / "moved.arrow")
    with raises(OnnxgradError, "unreadable_file", "d", "data-00001-of-00002.arrow"):
        opened(path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with raises(UsageError, "ambiguous", tmp_path.name) as failure:
        opened(tmp_path)
    assert failure.value.hint == f"choose one: '{tmp_path / 'train'}'"


random = np.random.default_rng(0)


def test_the_index_of_pandas_in_parquet_is_no_feature(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = arrow.table({"a": ROWS[:, 0], "b": ROWS[:, 1], "y": CLASSES, "__index_level_0__": CLASSES})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    inputs = {**TABLE, "x": tensor_type(FLOAT, ["batch", "features"])}
    assert open_data(tmp_path / "a.parquet", inputs).sizes == {"features": 2}


def test_parquet_without_values_and_with_uneven_lists(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")

    def opened(**columns: Any) -> Data:
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        return open_data(tmp_path / "a.parquet", TABLE)

    rows = [[1.0, 2.0, 3.0]] * 3
    with raises(UsageError, "missing_value", "a.parquet", "y", "1", "0"):
        opened(x=rows, y=[1, None, 2])
    with raises(UsageError, "missing_value", "a.parquet", "x", "2", "0"):
        opened(x=[*rows[:2], None], y=[1, 1, 2])
    with raises(UsageError, "missing_value", "a.parquet", "x", "1", "0"):
        opened(x=[rows[0], [1.0, 2.0, None], rows[2]], y=[1, 1, 2])
    with raises(UsageError, "wrong_shape", "a.parquet", "x", "2", "0", "2", "0", "3"):
        opened(x=[*rows[:2], [1.0, 2.0]], y=[1, 1, 2])
    with raises(UsageError, "wrong_type", "a.parquet", "y", "int64"):
        opened(x=rows, y=["a", "b", "c"])
    fixed = arrow.array(rows, arrow.list_(arrow.float32(), 3))
    assert opened(x=fixed, y=arrow.array([1, 2, 3], arrow.uint8())).batch(np.arange(3))["y"].dtype == np.int64
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with raises(OnnxgradError, "unreadable_file", "b.parquet"):
        open_data(tmp_path / "b.parquet", TABLE)


@pytest.mark.parametrize("order", [None, [0, 1, 2], [1, 2, 0]])
def test_tensors_of_one_shape_in_parquet(tmp_path: Path, order: list[int] | None) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = arrow.fixed_shape_tensor(arrow.float32(), (2, 3, 4), permutation=order)
    numbers: list[Any] = np.arange(120, dtype=np.float32).reshape(5, 24).tolist()

    def read(rows: list[Any]) -> np.ndarray:
        column = arrow.ExtensionArray.from_storage(kind, arrow.array(rows, kind.storage_type))
        parquet.write_table(arrow.table({"x": column, "y": CLASSES[:5]}), tmp_path / "a.parquet")
        return open_data(tmp_path / "a.parquet", inputs).batch(np.arange(1, 5))["x"]

    wanted = np.arange(120).reshape(5, 2, 3, 4).transpose(0, *(1 + axis for axis in order or [0, 1, 2]))
    inputs = {"x": tensor_type(FLOAT, ["batch", *wanted.shape[1:]]), "y": TABLE["y"]}
    np.testing.assert_array_equal(read(numbers), wanted[1:])
    for missing in ([*numbers[:4], None], [*numbers[:4], [None, *numbers[4][1:]]]):
        # pyarrow before 26 does not read such a file
        with pytest.raises(OnnxgradError, match=r"'x' has no value in row 4|lists to be of size"):
            read(missing)
