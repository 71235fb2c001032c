"""Data in every format: the arrays that were written come back as batches."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.data import Data, Range, open_data
from onnxgrad_cli.data.dataset import data_of
from onnxgrad_cli.data.initial_states import NOT_RECURRENT
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.leading_facts import raises_first
from tests.facts import raises

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
    path = write(tmp_path, {**columns, "d": Y})
    with raises(UsageError, "wrong_shape", path.name, "x", "3", "3", "4"):
        open_data(path, PORTS)
    path = write(tmp_path, {"x_0": Y, "x_1": Y, "x_3": Y, "y": Y})
    with raises(UsageError, "wrong_shape", path.name, "x", "3", "3", "2", "x_0", "x_1"):
        open_data(path, PORTS)


@pytest.mark.parametrize("write", TABLES)
def test_columns_in_brackets_and_of_unknown_number(tmp_path: Path, write: Writer) -> None:
    inputs = {"x": tensor_type(FLOAT, ["batch", "features"]), "y": PORTS["y"]}
    told: list[str] = []
    columns = {"x[1]": X[:, 1], "id": Y, "x[0]": X[:, 0], "y": Y}
    data = open_data(write(tmp_path, columns), inputs, tell=lambda text, level: told.append(text))
    np.testing.assert_array_equal(data.batch(np.arange(N))["x"], X[:, :2].astype(np.float32))
    assert data.sizes == {"features": 2}
    assert told[0].endswith(": id")


def test_a_column_called_as_an_input_is_no_part_of_another(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(FLOAT, ["n", "k"]), "x_2": tensor_type(FLOAT, ["n"])}
    batch = open_data(to_csv(tmp_path, {"x": X[:, :2], "x_2": X[:, 2]}), inputs).batch(np.arange(N))
    np.testing.assert_array_equal(batch["x"], X[:, :2].astype(np.float32))


@pytest.mark.parametrize("write", [to_npz, to_folder, to_safetensors, to_csv, to_parquet, to_json_lines])
def test_one_float_a_sample_is_a_column_of_an_output_of_one(tmp_path: Path, write: Writer) -> None:
    """Labels of a regression, in whatever format; of a class and of wider inputs nothing is guessed."""
    inputs = {"x": tensor_type(FLOAT, ["batch", 3]), "y": tensor_type(FLOAT, ["batch", 1])}
    data = open_data(write(tmp_path, {"x": X, "y": X[:, 0]}), inputs)
    np.testing.assert_array_equal(data.batch(np.array([3, 1]))["y"], X[[3, 1], :1].astype(np.float32))
    held = data_of({"x": X, "y": X[:, 0]}, inputs, {}, True, NOT_RECURRENT)
    np.testing.assert_array_equal(held.batch(np.array([3, 1]))["y"], X[[3, 1], :1].astype(np.float32))
    if write in (to_npz, to_folder, to_safetensors):
        with raises(UsageError, "wrong_shape", data.source.name, "y", "20", "2"):
            open_data(write(tmp_path, {"x": X, "y": X[:, 0]}), {**inputs, "y": tensor_type(FLOAT, ["batch", 2])})
        with raises(UsageError, "wrong_shape", data.source.name, "y", "20", "1"):
            open_data(write(tmp_path, {"x": X, "y": Y}), {**inputs, "y": tensor_type(INT64, ["batch", 1])})


def test_bytes_are_no_text_and_float8_has_no_type(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = arrow.array([row.tobytes() for row in X])
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"x": rows, "y": Y}), tmp_path / "a.parquet")
    with raises(UsageError, "wrong_type", "a.parquet", "x", "3"):
        open_data(tmp_path / "a.parquet", PORTS)
    head = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [4, 3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(12))
    with raises(UsageError, "wrong_type", "a.safetensors", "x", "F8_E4M3"):
        open_data(tmp_path / "a.safetensors", {"x": PORTS["x"]})


# -- what is checked ------------------------------------------------------------------------------------


def test_layouts_that_are_not_plain(tmp_path: Path) -> None:
    folder = to_folder(tmp_path, {"x": np.asfortranarray(X), "y": Y.astype(">i4")})
    batch = open_data(folder, PORTS).batch(np.array([3, 1]))
    np.testing.assert_array_equal(batch["x"], X[[3, 1]].astype(np.float32))
    np.testing.assert_array_equal(batch["y"], Y[[3, 1]])
    assert all(array.flags.c_contiguous for array in batch.values())


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("none.npz", None, ("missing_file", "none.npz")),
        ("a.npz", b"", ("unreadable_file", "a.npz")),
        ("a.npz", b"PK\x03\x04 cut short", ("unreadable_file", "a.npz")),
        ("a.npz", b"\x08\x0a no archive", ("unreadable_file", "a.npz")),
        ("a.xlsx", b"", ("wrong_type", "a.xlsx")),
        ("a.npy", b"", ("wrong_type", "a.npy")),
        ("data/x.npy", b"\x93NUMPY", ("unreadable_file", "x.npy")),
        ("empty/readme", b"", ("no_data", "empty", "x", "3", "y", "int64")),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes | None, said: tuple[str, ...]) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content)
    with raises_first(OnnxgradError, *said):
        open_data(file.parent if "/" in name else file, PORTS)


def test_names_with_something_before_them() -> None:
    inputs = {"x": tensor_type(FLOAT, ["batch", 1, 8, 8]), "y": PORTS["y"]}
    told: list[str] = []
    data = open_data(SAMPLES / "digits.npz", inputs, prefix="test_", tell=lambda text, level: told.append(text))
    with np.load(SAMPLES / "digits.npz") as arrays:
        np.testing.assert_array_equal(data.batch(np.arange(5))["x"], arrays["test_x"][:5])
    assert told == [], "the prefix leaves out the other arrays"


# -- what the model says of itself ------------------------------------------------------------------------


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


def test_bfloat16_is_fed_as_such(tmp_path: Path) -> None:
    data = open_data(to_npz(tmp_path, {"x": X}), {"x": tensor_type(TensorProto.BFLOAT16, ["n", 3])})
    batch = data.batch(np.arange(N))["x"]
    assert batch.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(batch, X.astype(ml_dtypes.bfloat16))
