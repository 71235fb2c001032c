"""Data in every format: the arrays that were written come back as batches, and what is wrong with them is told."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, TypeProto, numpy_helper, parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.data import Batches, Data, Range, array_files, input_types_of, open_data, ranges_of
from onnxgrad_cli.data.dataset import data_of
from onnxgrad_cli.data.states import NOT_RECURRENT
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import LOSS, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.feeds import DescribedModel, random_feeds

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
random = np.random.default_rng(0)
SAMPLES = Path(__file__).parents[2] / "sample_models"

PORTS = {"x": tensor_type(FLOAT, ["batch", 3]), "y": tensor_type(INT64, ["batch"])}
N = 20
X, Y = random.normal(size=(N, 3)), random.integers(0, 5, N)
Arrays = Mapping[str, np.ndarray]


# -- formats: each writer is another library than the reader, where there is one ------------------------


def to_npz(folder: Path, arrays: Arrays) -> Path:
    np.savez_compressed(folder / "data.npz", **arrays)
    return folder / "data.npz"


def to_folder(folder: Path, arrays: Arrays) -> Path:
    for name, array in arrays.items():
        file = folder / "data" / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, array)
    return folder / "data"


def to_columns(arrays: Arrays) -> dict[str, np.ndarray]:
    columns = {}
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        columns.update({name if array.ndim == 1 else f"{name}_{i}": flat[:, i] for i in range(flat.shape[1])})
    return columns


def to_csv(folder: Path, arrays: Arrays) -> Path:
    columns = to_columns(arrays)
    with (folder / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return folder / "data.csv"


def to_pandas_csv(folder: Path, arrays: Arrays) -> Path:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pandas.DataFrame(to_columns(arrays)).to_csv(folder / "pandas.csv", index=False)
    return folder / "pandas.csv"


def to_parquet(folder: Path, arrays: Arrays) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(to_columns(arrays)), folder / "data.parquet")
    return folder / "data.parquet"


def to_parquet_lists(folder: Path, arrays: Arrays) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = arrow.table({name: array.tolist() for name, array in arrays.items()})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "lists.parquet")
    return folder / "lists.parquet"


def to_json_lines(folder: Path, arrays: Arrays) -> Path:
    rows = zip(*(array.tolist() for array in arrays.values()), strict=True)
    lines = "".join(json.dumps(dict(zip(arrays, row, strict=True))) + "\n" for row in rows)
    (folder / "data.jsonl").write_text(lines, "utf-8")
    return folder / "data.jsonl"


def to_safetensors(folder: Path, arrays: Arrays) -> Path:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    library.save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / "data.safetensors")
    return folder / "data.safetensors"


def to_sets(folder: Path, arrays: Arrays) -> Path:
    for number, rows in enumerate((slice(0, 11), slice(11, None))):
        home = folder / "sets" / f"test_data_set_{number}"
        home.mkdir(parents=True)
        for at, array in enumerate(arrays.values()):
            (home / f"input_{at}.pb").write_bytes(numpy_helper.from_array(array[rows]).SerializeToString())
    return folder / "sets"


TABLES = [to_csv, to_pandas_csv, to_parquet, to_json_lines]
WRITERS = [to_npz, to_folder, *TABLES, to_parquet_lists, to_safetensors, to_sets]
Writer = Callable[[Path, Arrays], Path]


@pytest.mark.parametrize("write", WRITERS)
def test_what_was_written_comes_back(tmp_path: Path, write: Writer) -> None:
    data = open_data(write(tmp_path, {"x": X, "y": Y}), PORTS, {"y": Range(0, 4)})
    assert (data.size, len(data), data.sizes, data.batch_size) == (N, N, {}, None)
    chosen = random.permutation(N)[:7]
    batch = data.batch(chosen)
    assert list(batch) == ["x", "y"]
    np.testing.assert_array_equal(batch["x"], X[chosen].astype(np.float32))
    np.testing.assert_array_equal(batch["y"], Y[chosen])
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int64)
    assert all(array.flags.c_contiguous and type(array) is np.ndarray for array in batch.values())


@pytest.mark.parametrize("write", WRITERS)
def test_images_and_columns_of_one_number(tmp_path: Path, write: Writer) -> None:
    inputs = {"image": tensor_type(FLOAT, ["n", 2, 3, 4]), "target": tensor_type(FLOAT, ["n", 1])}
    image, target = random.normal(size=(N, 2, 3, 4)), random.normal(size=(N, 1))
    batch = open_data(write(tmp_path, {"image": image, "target": target}), inputs).batch(np.arange(N))
    np.testing.assert_array_equal(batch["image"], image.astype(np.float32))
    np.testing.assert_array_equal(batch["target"], target.astype(np.float32))


@pytest.mark.parametrize("write", TABLES)
def test_what_is_left_is_the_input_that_has_no_columns(tmp_path: Path, write: Writer) -> None:
    columns = {"a": X[:, 0], "b": X[:, 1], "y": Y, "c": X[:, 2]}
    batch = open_data(write(tmp_path, columns), PORTS).batch(np.arange(N))
    np.testing.assert_array_equal(batch["x"], X.astype(np.float32))
    with pytest.raises(UsageError, match="takes 3 columns, but there are 4: a, b, c, d"):
        open_data(write(tmp_path, {**columns, "d": Y}), PORTS)
    with pytest.raises(UsageError, match="takes 3 columns, but there are 2: x_0"):
        open_data(write(tmp_path, {"x_0": Y, "x_1": Y, "x_3": Y, "y": Y}), PORTS)


@pytest.mark.parametrize("write", TABLES)
def test_columns_in_brackets_and_of_unknown_number(tmp_path: Path, write: Writer) -> None:
    inputs = {"x": tensor_type(FLOAT, ["batch", "features"]), "y": PORTS["y"]}
    told: list[str] = []
    columns = {"x[1]": X[:, 1], "id": Y, "x[0]": X[:, 0], "y": Y}
    data = open_data(write(tmp_path, columns), inputs, tell=lambda text, level: told.append(text))
    np.testing.assert_array_equal(data.batch(np.arange(N))["x"], X[:, :2].astype(np.float32))
    assert data.sizes == {"features": 2}
    assert "not model inputs: id" in told[0]


def test_a_column_called_as_an_input_is_no_part_of_another(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(FLOAT, ["n", "k"]), "x_2": tensor_type(FLOAT, ["n"])}
    batch = open_data(to_csv(tmp_path, {"x": X[:, :2], "x_2": X[:, 2]}), inputs).batch(np.arange(N))
    np.testing.assert_array_equal(batch["x"], X[:, :2].astype(np.float32))


def test_text_as_spreadsheets_write_it(tmp_path: Path) -> None:
    file = tmp_path / "sheet.csv"
    file.write_text(
        '\ufeff"x_0", x_1 ,"x_2",name,y\r\n1,"2.5",-3e2,"Doe, ""J""\nnext",4\r\n\r\n0, 1 ,2,a,1\r\n', "utf-8"
    )
    batch = open_data(file, PORTS).batch(np.array([1, 0]))
    np.testing.assert_array_equal(batch["x"], np.array([[0, 1, 2], [1, 2.5, -300]], np.float32))
    np.testing.assert_array_equal(batch["y"], [1, 4])
    tabs = tmp_path / "sheet.tsv"
    tabs.write_text("x_0\tx_1\tx_2\ty\n1\t2\t3\t9007199254740993\n")
    assert open_data(tabs, PORTS).batch(np.array([0]))["y"] == 2**53 + 1


@pytest.mark.parametrize(
    "lines, said",
    [
        (["1,2,3,4", "1,2,oops,4"], r"line 3, column 'x_2' for 'x': 'oops' is not a number"),
        (["1,2,3,4", "1,,2,4"], r"line 3, column 'x_1' for 'x': the cell is empty"),
        (["1,2,3,4.5"], r"line 2, column 'y' for 'y': '4.5' is not a whole number"),
        (["1,2,3,4", '"1', '",2,3,4', "1,2,3,4,5"], r"line 5 has 5 fields, but the first line has 4"),
        (["1,2,3,4", "1,2,3"], r"line 3 has 3 fields"),
        (["1,2,3,4.0", "1,2,yes,4.5"], r"line 3, column 'x_2' for 'x': 'yes' is not a number"),
        (["1,2,3,4.0", "1,2,3,1e3.0"], r"line 3, column 'y' for 'y': '1e3.0' is not a whole number"),
        (["2024_01,2,3,4"], r"line 2, column 'x_0' for 'x': '2024_01' is not a number"),
        (["1,2,3,99999999999999999999"], r"'99999999999999999999' is not a whole number"),
        (["1,2,3,4", "1,inf,3,4"], r"'x' is inf in sample 1 \(the first is 0\) at index \[1\]"),
        (["1,2,3,4", "1,2,3\0,4"], r"can't be read as a text table: it contains a NUL"),
        (["1,2,3,4\0"], r"can't be read as a text table: it contains a NUL"),
        (['1,2,3,"4'], r"can't be read as a text table"),
        ([], r"is empty"),
    ],
)
def test_bad_cells_and_rows(tmp_path: Path, lines: list[str], said: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("\n".join(["x_0,x_1,x_2,y", *lines]) + "\n")
    with pytest.raises(OnnxgradError, match=f"bad.csv'.*{said}"):
        open_data(file, PORTS)


def test_a_bad_cell_far_down(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_text("x_0,x_1,x_2,y\n" + "1,2,3,4\n" * 10_000 + "1,2,3,-\n" + "1,2,3,4\n" * 10_000)
    with pytest.raises(UsageError, match="line 10002, column 'y'"):
        open_data(file, PORTS)
    file.write_text("x_0,x_1,x_2,y\n" + "".join(f"{i},2,3,{i % 7}\n" for i in range(20_000)))
    batch = open_data(file, PORTS).batch(np.arange(20_000))
    np.testing.assert_array_equal(batch["x"][:, 0], np.arange(20_000))
    np.testing.assert_array_equal(batch["y"], np.arange(20_000) % 7)


def test_headers_that_can_not_be_right(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("y,a,a,b\n1,2,3,4\n")
    with pytest.raises(UsageError, match="two columns 'a'"):
        open_data(tmp_path / "twice.csv", PORTS)
    (tmp_path / "none.csv").write_text("")
    with pytest.raises(UsageError, match="has no 'x'"):
        open_data(tmp_path / "none.csv", PORTS)
    (tmp_path / "latin.csv").write_bytes("x_0,x_1,x_2,y,größe\n".encode("latin-1"))
    with pytest.raises(OnnxgradError, match=r"utf-8.*can.t decode"):
        open_data(tmp_path / "latin.csv", PORTS)


def test_text_as_pandas_writes_it(tmp_path: Path) -> None:
    """Truth values as words, whole numbers with a point, and the numbers of the rows in a column without a name."""
    inputs = {**PORTS, "x": tensor_type(FLOAT, ["batch", "features"]), "mask": tensor_type(TensorProto.BOOL, ["batch"])}
    file, told = tmp_path / "PANDAS.CSV", []
    file.write_text(",a,b,mask,y\n0,1.0,True,True,9007199254740993.0\n1,2.5,False,false,-3.\n")
    batch = open_data(file, inputs, tell=lambda text, level: told.append(text)).batch(np.arange(2))
    np.testing.assert_array_equal(batch["x"], [[1, 1], [2.5, 0]])
    np.testing.assert_array_equal(batch["mask"], [True, False])
    np.testing.assert_array_equal(batch["y"], [2**53 + 1, -3])
    assert "not model inputs: the unnamed column" in told[0]


@pytest.mark.parametrize("write", [to_npz, to_folder, to_safetensors, to_csv, to_parquet, to_json_lines])
def test_one_float_a_sample_is_a_column_of_an_output_of_one(tmp_path: Path, write: Writer) -> None:
    """Labels of a regression, in whatever format; of a class and of wider inputs nothing is guessed."""
    inputs = {"x": tensor_type(FLOAT, ["batch", 3]), "y": tensor_type(FLOAT, ["batch", 1])}
    data = open_data(write(tmp_path, {"x": X, "y": X[:, 0]}), inputs)
    np.testing.assert_array_equal(data.batch(np.array([3, 1]))["y"], X[[3, 1], :1].astype(np.float32))
    held = data_of({"x": X, "y": X[:, 0]}, inputs, {}, True, NOT_RECURRENT)
    np.testing.assert_array_equal(held.batch(np.array([3, 1]))["y"], X[[3, 1], :1].astype(np.float32))
    if write in (to_npz, to_folder, to_safetensors):
        with pytest.raises(UsageError, match=r"'y' has shape \[20\], but the model takes \[batch, 2\]"):
            open_data(write(tmp_path, {"x": X, "y": X[:, 0]}), {**inputs, "y": tensor_type(FLOAT, ["batch", 2])})
        with pytest.raises(UsageError, match=r"'y' has shape \[20\], but the model takes \[batch, 1\]"):
            open_data(write(tmp_path, {"x": X, "y": Y}), {**inputs, "y": tensor_type(INT64, ["batch", 1])})


@pytest.mark.parametrize("name, header", [("a.csv", "x;y"), ("a.csv", "x\ty"), ("a.csv", "x|y"), ("a.tsv", "x,y")])
def test_columns_that_are_cut_by_other_marks(tmp_path: Path, name: str, header: str) -> None:
    (tmp_path / name).write_text(f"{header}\n")
    with pytest.raises(UsageError, match=f"has only one column in its first line: {re.escape(header)}") as told:
        open_data(tmp_path / name, PORTS)
    assert "separate columns by commas" in (told.value.hint or "")


def test_the_index_of_pandas_in_parquet_is_no_feature(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = arrow.table({"a": X[:, 0], "b": X[:, 1], "y": Y, "__index_level_0__": Y})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    inputs = {**PORTS, "x": tensor_type(FLOAT, ["batch", "features"])}
    assert open_data(tmp_path / "a.parquet", inputs).sizes == {"features": 2}


def test_parquet_without_values_and_with_uneven_lists(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")

    def opened(**columns: Any) -> Data:
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        return open_data(tmp_path / "a.parquet", PORTS)

    rows = [[1.0, 2.0, 3.0]] * 3
    with pytest.raises(UsageError, match="column 'y' has no value in row 1"):
        opened(x=rows, y=[1, None, 2])
    with pytest.raises(UsageError, match="column 'x' has no value in row 2"):
        opened(x=[*rows[:2], None], y=[1, 1, 2])
    with pytest.raises(UsageError, match=r"'x' has size 2 along axis 0 in sample 2 .* but the model takes float"):
        opened(x=[*rows[:2], [1.0, 2.0]], y=[1, 1, 2])
    with pytest.raises(UsageError, match="'y' holds text"):
        opened(x=rows, y=["a", "b", "c"])
    fixed = arrow.array(rows, arrow.list_(arrow.float32(), 3))
    assert opened(x=fixed, y=arrow.array([1, 2, 3], arrow.uint8())).batch(np.arange(3))["y"].dtype == np.int64
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(OnnxgradError, match="can't be read as a Parquet file"):
        open_data(tmp_path / "b.parquet", PORTS)


@pytest.mark.parametrize("order", [None, [0, 1, 2], [1, 2, 0]])
def test_tensors_of_one_shape_in_parquet(tmp_path: Path, order: list[int] | None) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = arrow.fixed_shape_tensor(arrow.float32(), (2, 3, 4), permutation=order)
    numbers: list[Any] = np.arange(120, dtype=np.float32).reshape(5, 24).tolist()

    def read(rows: list[Any]) -> np.ndarray:
        column = arrow.ExtensionArray.from_storage(kind, arrow.array(rows, kind.storage_type))
        parquet.write_table(arrow.table({"x": column, "y": Y[:5]}), tmp_path / "a.parquet")
        return open_data(tmp_path / "a.parquet", inputs).batch(np.arange(1, 5))["x"]

    wanted = np.arange(120).reshape(5, 2, 3, 4).transpose(0, *(1 + axis for axis in order or [0, 1, 2]))
    inputs = {"x": tensor_type(FLOAT, ["batch", *wanted.shape[1:]]), "y": PORTS["y"]}
    np.testing.assert_array_equal(read(numbers), wanted[1:])
    for missing in ([*numbers[:4], None], [*numbers[:4], [None, *numbers[4][1:]]]):
        with pytest.raises(UsageError, match="column 'x' has no value in row"):
            read(missing)


def test_bytes_are_no_text_and_float8_has_no_type(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = arrow.array([row.tobytes() for row in X])
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"x": rows, "y": Y}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="'x' holds bytes, but the model takes"):
        open_data(tmp_path / "a.parquet", PORTS)
    head = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [4, 3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(12))
    with pytest.raises(UsageError, match="'x' has the type F8_E4M3, which numpy lacks"):
        open_data(tmp_path / "a.safetensors", {"x": PORTS["x"]})


def test_safetensors_of_half_floats(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    library.save_file({"x": X.astype(np.float16), "y": Y.astype(np.int8)}, tmp_path / "a.safetensors")
    batch = open_data(tmp_path / "a.safetensors", PORTS).batch(np.arange(N))
    np.testing.assert_array_equal(batch["x"], X.astype(np.float16).astype(np.float32))
    (tmp_path / "b.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(OnnxgradError, match="can't be read as a safetensors file"):
        open_data(tmp_path / "b.safetensors", PORTS)


def test_sets_by_the_names_of_their_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "test_data_set_3"
    folder.mkdir()
    onnx.save_tensor(numpy_helper.from_array(Y, "y"), folder / "input_0.pb")
    onnx.save_tensor(numpy_helper.from_array(X, "x"), folder / "input_1.pb")
    np.testing.assert_array_equal(open_data(folder, PORTS).batch(np.arange(N))["y"], Y)
    onnx.save_tensor(numpy_helper.from_array(X, "z"), folder / "input_2.pb")
    with pytest.raises(UsageError, match="has 3 inputs, but the model takes 2: x float"):
        open_data(folder, PORTS)
    (folder / "input_2.pb").write_bytes(b"\xff\xff")
    with pytest.raises(OnnxgradError, match=r"input_2.pb' can't be read as a tensor"):
        open_data(folder, PORTS)


def test_sets_that_differ(tmp_path: Path) -> None:
    path = to_sets(tmp_path, {"x": X, "y": Y})
    (path / "test_data_set_1" / "input_1.pb").unlink()
    with pytest.raises(UsageError, match="not every set has a tensor for 'y'"):
        open_data(path, PORTS)
    array = numpy_helper.from_array(X[:, :2])
    (path / "test_data_set_1" / "input_0.pb").write_bytes(array.SerializeToString())
    (path / "test_data_set_0" / "input_1.pb").unlink()
    with pytest.raises(UsageError, match=r"'x' differs between the sets: float64\[11, 3\], float64\[20, 2\]"):
        open_data(path, PORTS)


def test_inputs_called_as_paths(tmp_path: Path) -> None:
    inputs = {"encoder/x:0": PORTS["x"], "y": PORTS["y"]}
    assert open_data(to_folder(tmp_path, {"encoder/x:0": X, "y": Y}), inputs).size == N


# -- what is checked ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrays, said",
    [
        ({"X": X, "y": Y}, r"has no 'x' \(float\[batch, 3\]\)"),
        ({}, r"has no 'x' .*, 'y' \(int64\[batch\]\)"),
        ({"x": X[:, :2], "y": Y}, r"'x' has shape \[20, 2\], but the model takes \[batch, 3\]"),
        ({"x": X[:, 0], "y": Y}, r"'x' has shape \[20\]"),
        ({"x": X, "y": Y[:, None]}, r"'y' has shape \[20, 1\], but the model takes \[batch\]"),
        ({"x": X, "y": Y.astype(np.float32)}, r"'y' holds float32, but the model takes int64\[batch\]"),
        ({"x": X.astype(str), "y": Y}, "'x' holds text"),
        ({"x": X + 1j, "y": Y}, "'x' holds complex128"),
        ({"x": X, "y": Y[:-1]}, "'x' has 20 samples, but 'y' has 19"),
        ({"x": X[:0], "y": Y[:0]}, r"is empty: 'x' has shape \[0, 3\]"),
        (
            {"x": np.where(np.arange(60).reshape(20, 3) == 50, np.nan, X), "y": Y},
            r"'x' is nan in sample 16 .*at index \[2\]",
        ),
        ({"x": X * 1e39, "y": Y}, r"'x' is .*e\+3. in sample 0 .*finite float32"),
        (
            {"x": X, "y": np.where(np.arange(20) > 7, 9, Y)},
            r"'y' is 9 in sample 8 .*0 to 4 or -100: there are 5 classes",
        ),
        ({"x": X, "y": Y - 1}, r"'y' is -1 in sample"),
    ],
)
@pytest.mark.parametrize("write", [to_npz, to_folder])
def test_wrong_data_is_told(tmp_path: Path, write: Writer, arrays: Arrays, said: str) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError, match=f"data.*{said}") as told:
        open_data(write(tmp_path, {**arrays, "other": Y}), PORTS, {"y": CLASSES})
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
        assert "not all are whole" in hint(X, np.where(np.arange(N) == N - 1, broken, Y))
    assert "structured_to_unstructured" in hint(np.zeros(N, [("a", "f4"), ("b", "f4")]), Y)
    assert "array[..., None]" in hint(X, Y, tensor_type(FLOAT, ["batch", 1]))
    assert "array[..., 0]" in hint(X, Y[:, None])
    with pytest.raises(UsageError) as told:
        open_data(to_npz(tmp_path, {"x": X, "label": Y}), {"x": PORTS["x"], "labels": PORTS["y"]})
    assert "did you mean label?" in (told.value.hint or "")


def test_labels_of_which_none_counts(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": X, "y": np.full_like(Y, -100)})
    with pytest.raises(UsageError, match="'y' is -100 in all samples, so none of them counts in the loss"):
        open_data(path, PORTS, {"y": CLASSES})


def test_one_label_for_all_samples(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'y' has shape \[\]") as told:
        open_data(to_npz(tmp_path, {"x": X, "y": np.int64(1)}), PORTS, {"y": CLASSES})
    assert told.value.hint == "it is a single number, but each sample needs its own"


def test_what_is_ignored_is_no_class_at_fault(tmp_path: Path) -> None:
    labels = np.where(np.arange(N) % 2, Y, -100)
    assert open_data(to_npz(tmp_path, {"x": X, "y": labels}), PORTS, {"y": CLASSES}).size == N


def test_symbols_are_one_size_everywhere(tmp_path: Path) -> None:
    inputs = {"ids": tensor_type(INT64, ["batch", "seq"]), "mask": tensor_type(FLOAT, ["n", "seq"])}
    ids = np.zeros((6, 8), int)
    data = open_data(to_npz(tmp_path, {"ids": ids, "mask": np.ones((6, 8))}), inputs)
    assert data.sizes == {"seq": 8}
    with pytest.raises(UsageError, match=r"'mask' has shape \[6, 9\], .*'seq' is 8 in 'ids'"):
        open_data(to_npz(tmp_path, {"ids": ids, "mask": np.ones((6, 9))}), inputs)


@pytest.mark.parametrize(
    "inputs, said",
    [
        (
            {"x": tensor_type(FLOAT, ["time", "batch", 3]), "y": tensor_type(FLOAT, ["batch", "time"])},
            "'batch' is not its first axis",
        ),
        ({"x": tensor_type(FLOAT, [8, 3]), "h": tensor_type(FLOAT, [1, 3])}, "8 in 'x' and 1 in 'h'"),
        ({"x": tensor_type(TensorProto.STRING, ["batch"])}, "'x' is string"),
        ({"x": onnx.helper.make_sequence_type_proto(PORTS["x"])}, "sequence of float"),
    ],
)
def test_inputs_that_can_not_be_cut_into_samples(tmp_path: Path, inputs: dict[str, TypeProto], said: str) -> None:
    with pytest.raises(UsageError, match=said):
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
        ([1, 70000], TensorProto.FLOAT16, "'x' is 70000 in sample 1 .*finite float16"),
        ([1, 2**31], TensorProto.INT32, "'x' is 2147483648 in sample 1 .*-2147483648 to 2147483647"),
        ([1, 2], TensorProto.BOOL, "'x' is 2 in sample 1 .*0 to 1: it is true or false"),
        ([0, -1], TensorProto.UINT64, "'x' is -1 in sample 1"),
    ],
)
def test_numbers_that_the_type_can_not_hold(tmp_path: Path, array: list[int], wanted: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_data(to_npz(tmp_path, {"x": np.array(array)}), {"x": tensor_type(wanted, ["n"])})


def test_infinity_can_be_let_in(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": np.full((4, 3), -np.inf), "y": Y[:4]})
    assert open_data(path, PORTS, finite=False).size == 4


def test_layouts_that_are_not_plain(tmp_path: Path) -> None:
    folder = to_folder(tmp_path, {"x": np.asfortranarray(X), "y": Y.astype(">i4")})
    batch = open_data(folder, PORTS).batch(np.array([3, 1]))
    np.testing.assert_array_equal(batch["x"], X[[3, 1]].astype(np.float32))
    np.testing.assert_array_equal(batch["y"], Y[[3, 1]])
    assert all(array.flags.c_contiguous for array in batch.values())


def test_a_number_for_all_samples(tmp_path: Path) -> None:
    inputs = {**PORTS, "temperature": tensor_type(FLOAT, [])}
    data = open_data(to_npz(tmp_path, {"x": X, "y": Y, "temperature": np.array(2.0)}), inputs)
    assert data.batch(np.arange(3))["temperature"].shape == ()
    with pytest.raises(UsageError, match=r"'temperature' has shape \[1\]"):
        open_data(to_npz(tmp_path, {"x": X, "y": Y, "temperature": np.ones(1)}), inputs)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("none.npz", None, "no such file or folder"),
        ("a.npz", b"", "can't be read as an .npz file"),
        ("a.npz", b"PK\x03\x04 cut short", "can't be read as an .npz file"),
        ("a.npz", b"\x08\x0a no archive", "does not start like a zip archive"),
        ("a.xlsx", b"", "can't read data of the format of"),
        ("a.npy", b"", "can't read data of the format of"),
        ("data/x.npy", b"\x93NUMPY", "x.npy' can't be read as an .npy file"),
        ("empty/readme", b"", "has no 'x'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OnnxgradError, match=said):
        open_data(file.parent if "/" in name else file, PORTS)


def test_broken_and_pickled_arrays(tmp_path: Path) -> None:
    path = to_npz(tmp_path, {"x": X, "y": Y})
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(len(whole[100:140])) + whole[140:])
    with pytest.raises(OnnxgradError, match=r"can't be read as an .npz file"):
        open_data(path, PORTS)
    np.savez(path, x=X, y=np.array([{}] * N, object))
    with pytest.raises(OnnxgradError, match="with an array 'y': Object arrays cannot be loaded") as told:
        open_data(path, PORTS)
    assert "array.astype(float)" in (told.value.hint or "")
    with pytest.raises(OnnxgradError, match=r"y.npy' can't be read.*Python objects") as told:
        open_data(to_folder(tmp_path, {"x": X, "y": Y.astype(object)}), PORTS)
    assert "array.astype(float)" in (told.value.hint or "")
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(OnnxgradError, match="a single array without a name"):
        open_data(path, PORTS)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_compressed_as_numpy_compresses_none(tmp_path: Path, compression: int) -> None:
    """A kilobyte of such an archive may stand for gigabytes."""
    path = to_npz(tmp_path, {"x": X, "y": Y})
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "other.npz", "w", compression) as other:
        for name in whole.namelist():
            other.writestr(name, whole.read(name))
    with pytest.raises(OnnxgradError, match="compressed in a way that numpy does not write"):
        open_data(tmp_path / "other.npz", PORTS)


def test_an_array_that_is_larger_than_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = to_npz(tmp_path, {"x": X, "y": Y})
    monkeypatch.setattr(array_files, "free_memory", lambda: 100)
    with pytest.raises(OnnxgradError, match="not enough memory to read"):
        open_data(path, PORTS)


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


def test_names_with_something_before_them() -> None:
    inputs = {"x": tensor_type(FLOAT, ["batch", 1, 8, 8]), "y": PORTS["y"]}
    told: list[str] = []
    data = open_data(SAMPLES / "digits.npz", inputs, prefix="test_", tell=lambda text, level: told.append(text))
    with np.load(SAMPLES / "digits.npz") as arrays:
        np.testing.assert_array_equal(data.batch(np.arange(5))["x"], arrays["test_x"][:5])
    assert "train_x, train_y" in told[0]


# -- what the model says of itself ------------------------------------------------------------------------

EMBEDDING = """
<ir_version: 8, opset_import: ["": 17]>
words (int64[batch, seq] ids) => (float[batch, 4] logits)
<float[11, 4] table = {0}>
{
  found = Gather(table, ids)
  logits = ReduceMean<axes=[1], keepdims=0>(found)
}
"""


def words(**options: Any) -> onnx.ModelProto:
    model = parser.parse_model(EMBEDDING.replace("{0}", "{" + ", ".join("0.5" for _ in range(44)) + "}"))
    return build(model, Options(losses=(LossSpec("cross-entropy"),), label="y", **options)).model


def test_the_model_says_what_it_is_fed_and_what_may_be_in_it() -> None:
    model = words(optimizer="sgd", sample_weight="share")
    assert list(input_types_of(model)) == ["ids", "y", "share"]
    ranges = ranges_of(model)
    assert (ranges["ids"].low, ranges["ids"].high) == (-11, 10)
    assert (ranges["y"].low, ranges["y"].high, ranges["y"].besides) == (0, 3, {-100})
    assert ranges_of(words(loss_options={"ignore_index": 7}))["y"].besides == {7}


def test_a_model_of_a_version_that_did_not_write_the_ignored_label() -> None:
    model = words()
    entry = next(entry for entry in model.metadata_props if entry.key == LOSS)
    described = json.loads(entry.value)
    assert described["terms"][0].pop("ignore_index") == -100
    entry.value = json.dumps(described)
    assert describe(model).losses[0].ignore_index is None
    assert ranges_of(model)["y"] == Range(0, 3, why="there are 4 classes")


def test_what_is_drawn_counts() -> None:
    """A batch of nothing but ignored labels has no mean, and proves nothing."""
    model = words(loss_options={"ignore_index": 1}, shapes={"ids": (1, 2)})
    described = DescribedModel(model, describe(model))
    drawn = [random_feeds(described, np.random.default_rng(seed), {})["y"] for seed in range(40)]
    assert {int(labels[0]) for labels in drawn} == {0, 2, 3}


def test_tokens_are_of_the_vocabulary_and_some_of_those_drawn_do_not_count() -> None:
    """The first label of a sequence is predicted by nothing, so that the second one has to count."""
    text = EMBEDDING.replace("[batch, 4] logits", "[batch, seq, 4] logits")
    text = text.replace("found = Gather(table, ids)", "logits = Gather(table, ids)").replace(
        " logits = ReduceMean", "#"
    )
    model = parser.parse_model(text.partition("#")[0].replace("{0}", "{" + ", ".join(["0.5"] * 44) + "}") + "}")
    model = build(model, Options(losses=(LossSpec("causal-lm"),), label="y")).model
    assert (describe(model).losses[0].classes, describe(model).losses[0].class_axis) == (4, -1)
    assert ranges_of(model)["y"] == Range(0, 3, frozenset({-100}), "there are 4 classes")
    feeds = random_feeds(DescribedModel(model, describe(model)), np.random.default_rng(0), {"batch": 2, "seq": 8})
    assert feeds["y"].shape == (2, 8)
    assert (feeds["y"].reshape(-1)[:2] >= 0).all() and (feeds["y"] == -100).sum() == 3 and feeds["y"].max() == 3


def test_the_ranges_are_told(tmp_path: Path) -> None:
    model = words()
    for ids, label, said in ((11, 0, "'ids' is 11 .*a table of 11 rows"), (10, 4, "'y' is 4 .*there are 4 classes")):
        path = to_npz(tmp_path, {"ids": np.full((5, 2), ids), "y": np.full(5, label)})
        with pytest.raises(UsageError, match=said):
            open_data(path, input_types_of(model), ranges_of(model))


def test_ranges_meet() -> None:
    met = Range(0, 9, frozenset({-100, -1}), "a") & Range(-128, None, frozenset(), "b")
    assert met == Range(0, 9, frozenset({-100, -1}), "a and b")
    assert (Range(0, 9, frozenset({-100})) & Range(0, 4)).besides == frozenset()
    assert 5 in met and -1 in met and -2 not in met


# -- larger than memory -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_may_be_larger_than_memory(tmp_path: Path) -> None:
    """1 GiB of float32 in a process that may have 256 MiB more than it starts with."""
    samples, width = 2**14, 2**14
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (samples, width))
    mapped[[7, samples - 1], 5] = 3
    mapped.flush()
    np.save(tmp_path / "y.npy", np.zeros(samples, np.int64))
    program = f"""
        import json, resource, tracemalloc
        import numpy as np
        from onnxgrad_cli.ir.types import tensor_type
        from onnxgrad_cli.data import Batches, Range, open_data
        held = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (held + 2**28, held + 2**28))
        try:
            np.ones({samples} * {width}, np.float32)
            refused = False
        except MemoryError:
            refused = True
        tracemalloc.start()
        inputs = {{"x": tensor_type(1, ["batch", {width}]), "y": tensor_type(7, ["batch"])}}
        data = open_data({str(tmp_path)!r}, inputs, {{"y": Range(0, 1)}})
        for part, _ in zip(Batches(data, 32), range(5)):
            data.batch(part.indices)
        batch = data.batch(np.array([7, {samples} - 1]))
        print(json.dumps([refused, float(batch["x"].sum()), tracemalloc.get_traced_memory()[1]]))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    refused, total, peak = json.loads(run.stdout)
    assert refused and total == 6
    assert peak < 2**26


# -- batches ------------------------------------------------------------------------------------------------


def samples(count: int, batch_size: int | None = None) -> Data:
    return Data(Path("data.npz"), {"x": np.arange(count)}, {"x": np.dtype(np.int64)}, count, {}, batch_size)


def test_an_epoch_has_every_sample_once_and_no_two_are_alike() -> None:
    batches = Batches(samples(100), 8, seed=1)
    assert len(batches) == 13
    epochs = [[part for part in batches] for _ in range(3)]
    orders = [np.concatenate([part.indices for part in epoch]) for epoch in epochs]
    assert [len(part.indices) for part in epochs[0]] == [8] * 12 + [4]
    assert all(part.whole == len(part.indices) for part in epochs[0])
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert (batches.epoch, batches.position) == (3, 0)
    again = Batches(samples(100), 8, seed=1)
    np.testing.assert_array_equal(np.concatenate([part.indices for part in again]), orders[0])
    other = Batches(samples(100), 8, seed=2)
    assert not np.array_equal(np.concatenate([part.indices for part in other]), orders[0])


def test_without_shuffling_and_without_the_last() -> None:
    parts = [part.indices.tolist() for part in Batches(samples(10), 4, shuffle=False, drop_last=True)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 13, 14, 17])
def test_goes_on_from_any_place(taken: int) -> None:
    def endless(batches: Batches) -> Any:
        while True:
            yield from batches

    whole = endless(Batches(samples(50), 8, seed=3))
    wanted = [next(whole).indices.tolist() for _ in range(30)]
    batches = Batches(samples(50), 8, seed=3)
    run = endless(batches)
    for _ in range(taken):
        next(run)
    resumed = Batches(samples(50), 8, seed=3)
    resumed.restore(json.loads(json.dumps(batches.state())))
    run = endless(resumed)
    assert [next(run).indices.tolist() for _ in range(30 - taken)] == wanted[taken:]


def test_another_order_is_refused() -> None:
    state = Batches(samples(50), 8, seed=3).state()
    for count, size, seed, said in (
        (51, 8, 3, "samples=50, not with samples=51"),
        (50, 9, 3, "size=8, not with size=9"),
        (50, 8, 4, "seed=3, not with seed=4"),
    ):
        with pytest.raises(UsageError, match=said):
            Batches(samples(count), size, seed).restore(state)
    with pytest.raises(OnnxgradError, match="batch 7, which does not exist"):
        Batches(samples(50), 8, 3).restore({**state, "position": 7})
    with pytest.raises(UsageError):
        Batches(samples(50), 8, 3).restore({})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_parts_of_ranks_make_the_whole(world: int) -> None:
    whole = list(Batches(samples(53), 10, seed=5))
    parts = [list(Batches(samples(53), 10, seed=5, rank=rank, world=world)) for rank in range(world)]
    for batch, *shares in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([share.indices for share in shares]), batch.indices)
        assert {share.whole for share in shares} == {len(batch.indices)}
        lengths = [len(share.indices) for share in shares]
        assert max(lengths) - min(lengths) <= 1


def test_a_place_holds_for_any_number_of_ranks() -> None:
    one = Batches(samples(50), 8)
    next(iter(one))
    two = Batches(samples(50), 8, rank=1, world=2)
    two.restore(one.state())
    np.testing.assert_array_equal(next(iter(two)).indices, next(iter(one)).indices[4:])


def test_a_model_with_a_fixed_batch(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(FLOAT, [8, 3]), "y": tensor_type(INT64, ["batch"])}
    data = open_data(to_npz(tmp_path, {"x": X, "y": Y}), inputs)
    assert data.batch_size == 8
    told: list[str] = []
    batches = Batches(data, 8, tell=lambda text, level: told.append(text))
    assert [len(part.indices) for part in batches] == [8, 8]
    assert "the last 4 samples" in told[0]
    with pytest.raises(UsageError, match="batches of 8 samples, not of 16"):
        Batches(data, 16)
    assert len(Batches(data, 16, rank=1, world=2)) == 1
    with pytest.raises(UsageError, match="20 samples, fewer than a batch of 32"):
        Batches(samples(20, 32), 32)


@pytest.mark.parametrize("size, rank, world", [(0, 0, 1), (-1, 0, 1), (2, 0, 3), (8, 2, 2)])
def test_batches_that_can_not_be(size: int, rank: int, world: int) -> None:
    with pytest.raises(UsageError):
        Batches(samples(50), size, rank=rank, world=world)


def test_bfloat16_is_fed_as_such(tmp_path: Path) -> None:
    data = open_data(to_npz(tmp_path, {"x": X}), {"x": tensor_type(TensorProto.BFLOAT16, ["n", 3])})
    batch = data.batch(np.arange(N))["x"]
    assert batch.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(batch, X.astype(ml_dtypes.bfloat16))
