"""An input that takes the columns of a table as they stand takes those of the same names of other data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from onnxgrad_cli.data import Data, Preprocessing, open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises

PORTS = {"x": tensor_type(TensorProto.FLOAT, ["n", 3]), "y": tensor_type(TensorProto.INT64, ["n"])}
ROWS = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0], "y": [0, 1]}


def write(path: Path, columns: str) -> Path:
    """A table of some of the columns, in this order."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*map(ROWS.get, columns), strict=True)]
    if path.suffix == ".csv":
        path.write_text("\n".join([",".join(columns), *(",".join(map(str, row.values())) for row in rows)]))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({name: ROWS[name] for name in columns}), path)
    return path


def opened(path: Path, known: Preprocessing | None = None) -> Data:
    return open_data(path, PORTS, known=known)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_order_is_that_of_the_data_it_was_trained_on(suffix: str, tmp_path: Path) -> None:
    first = opened(write(tmp_path / f"first{suffix}", "abcy"))
    assert first.preprocessing([]).order == {"x": ["a", "b", "c"]}
    model = ModelProto()
    first.preprocessing([]).write_to(model)
    known = Preprocessing.of_model(model)
    again = opened(write(tmp_path / f"again{suffix}", "cyba"), known)
    np.testing.assert_array_equal(again.batch(np.arange(2))["x"], [[1, 3, 5], [2, 4, 6]])
    with raises(UsageError, "missing_value", f"less{suffix}", "b", "x"):
        opened(write(tmp_path / f"less{suffix}", "acy"), known)


def test_other_data_leave_it_as_it_is(tmp_path: Path) -> None:
    """What was trained on a table, and then on arrays, still reads the table as before."""
    known = Preprocessing(order={"x": ("a", "b", "c")}, resize="stretch")
    np.savez(tmp_path / "more.npz", x=np.ones((2, 3), np.float32), y=np.zeros(2, np.int64))
    said = opened(tmp_path / "more.npz", known).preprocessing([])
    assert said.order == known.order and said.resize == "stretch"


def test_columns_whose_names_tell_their_order_are_free(tmp_path: Path) -> None:
    known = Preprocessing(order={"x": ("a", "b", "c")})
    path = tmp_path / "named.csv"
    path.write_text("x_2,x_0,y,x_1\n3,1,0,2\n")
    data = opened(path, known)
    np.testing.assert_array_equal(data.batch(np.arange(1))["x"], [[1, 2, 3]])
    assert not opened(path).preprocessing([]).to_json()


@pytest.mark.slow
def test_validation_and_evaluation_read_columns_as_the_training_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((60, 4))
    y = (x[:, 0] > x[:, 2]).astype(int)
    for name, order in (("data", [0, 1, 2, 3]), ("swapped", [2, 1, 0, 3])):
        table = np.column_stack([x[:, order], y])
        np.savetxt(
            f"{name}.csv", table, "%g", ",", header=",".join(["abcd"[i] for i in order] + ["label"]), comments=""
        )
    shell = Shell(tmp_path, capsys)
    asked = ("--loss", "cross-entropy", "--json")
    losses = []
    for val in ("data.csv", "swapped.csv"):
        trained = shell("train", "mlp.onnx", "--data", "data.csv", "--val", val, "-o", f"{val}.onnx", *asked)
        assert trained.code == 0, trained.err
        losses.append(trained.json["epochs"][-1]["val_loss"])
        told = [shell("evaluate", f"{val}.onnx", "--data", data, *asked) for data in ("data.csv", "swapped.csv")]
        assert [each.code for each in told] == [0, 0], told[1].err
        assert told[0].json["results"] == told[1].json["results"]
    assert losses[0] == losses[1]
