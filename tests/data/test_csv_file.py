"""Tables in CSV: as spreadsheets and pandas write them, and what is wrong with a cell, a row or a header."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.test_array_files import PORTS as ONE_INPUT, refused
from tests.data.test_dataset import FLOAT, PORTS
from tests.facts import raises


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
        (["1,2,3,4", "1,2,oops,4"], ("wrong_type", "3", "x_2", "x", "oops")),
        (["1,2,3,4", "1,,2,4"], ("wrong_type", "3", "x_1", "x")),
        (["1,2,3,4.5"], ("wrong_type", "2", "y", "y", "4.5")),
        (["1,2,3,4", '"1', '",2,3,4', "1,2,3,4,5"], ("wrong_shape", "5", "5", "4")),
        (["1,2,3,4", "1,2,3"], ("wrong_shape", "3", "3", "4")),
        (["1,2,3,4.0", "1,2,yes,4.5"], ("wrong_type", "3", "x_2", "x", "yes")),
        (["1,2,3,4.0", "1,2,3,1e3.0"], ("wrong_type", "3", "y", "y", "1e3.0")),
        (["2024_01,2,3,4"], ("wrong_type", "2", "x_0", "x", "2024_01")),
        (["1,2,3,99999999999999999999"], ("wrong_type", "2", "y", "y", "99999999999999999999")),
        (["1,2,3,4", "1,inf,3,4"], ("wrong_value", "x", "1", "0", "1", "float32")),
        (["1,2,3,4", "1,2,3\0,4"], ("unreadable_file",)),
        (["1,2,3,4\0"], ("unreadable_file",)),
        (['1,2,3,"4'], ("unreadable_file",)),
        ([], ("no_data", "x", "0", "3")),
    ],
)
def test_bad_cells_and_rows(tmp_path: Path, lines: list[str], said: tuple[str, ...]) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("\n".join(["x_0,x_1,x_2,y", *lines]) + "\n")
    with raises(OnnxgradError, said[0], "bad.csv", *said[1:]):
        open_data(file, PORTS)


def test_a_bad_cell_far_down(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_text("x_0,x_1,x_2,y\n" + "1,2,3,4\n" * 10_000 + "1,2,3,-\n" + "1,2,3,4\n" * 10_000)
    with raises(UsageError, "wrong_type", "long.csv", "10002", "y", "y", "-"):
        open_data(file, PORTS)
    file.write_text("x_0,x_1,x_2,y\n" + "".join(f"{i},2,3,{i % 7}\n" for i in range(20_000)))
    batch = open_data(file, PORTS).batch(np.arange(20_000))
    np.testing.assert_array_equal(batch["x"][:, 0], np.arange(20_000))
    np.testing.assert_array_equal(batch["y"], np.arange(20_000) % 7)


def test_headers_that_can_not_be_right(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("y,a,a,b\n1,2,3,4\n")
    with raises(UsageError, "ambiguous", "twice.csv", "a"):
        open_data(tmp_path / "twice.csv", PORTS)
    (tmp_path / "none.csv").write_text("")
    with raises(UsageError, "no_data", "none.csv", "x", "3", "y", "int64"):
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
    assert told[0].endswith("unnamed column")


@pytest.mark.parametrize("name, header", [("a.csv", "x;y"), ("a.csv", "x\ty"), ("a.csv", "x|y"), ("a.tsv", "x,y")])
def test_columns_that_are_cut_by_other_marks(tmp_path: Path, name: str, header: str) -> None:
    (tmp_path / name).write_text(f"{header}\n")
    with raises(UsageError, "wrong_value", name) as told:
        open_data(tmp_path / name, PORTS)
    assert header in told.value.message


def test_a_table_that_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.data.csv_file.MAX_LINE_LENGTH", 1000)
    (tmp_path / "d.csv").write_bytes(bytes(5000))
    refused(tmp_path / "d.csv", "unreadable_file", "1,000")


@pytest.mark.parametrize("content", [b"\0\0\n", b'x_0,x_1,x_2\n"1,2,3', b"\xff\xfe\n", b"x_0,x_1,x_2\n1,2,\0\n"])
def test_text_that_is_no_table(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(OnnxgradError, match=r"d.csv'"):
        open_data(tmp_path / "d.csv", ONE_INPUT)


def test_a_table_of_very_many_columns_is_read_in_time(tmp_path: Path) -> None:
    """Names are not looked for one by one: with a hundred thousand that takes minutes."""
    count = 100_000
    names, cells = ",".join(f"c{i}" for i in range(count)), ",".join(["1"] * count)
    (tmp_path / "d.csv").write_text(f"{names}\n{cells}\n")
    start = time.process_time()
    data = open_data(tmp_path / "d.csv", {"x": tensor_type(TensorProto.FLOAT, ["n", count])})
    assert data.arrays["x"].shape == (1, count) and time.process_time() - start < 5
