"""Columns that may have other names, and what a model and a run keep of how samples were prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, TypeProto

from onnxgrad_cli.data import (
    Data,
    Range,
    SampleOptions,
    open_data,
    prepared,
)
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Role, Roles, Term
from tests.facts import raises

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
random = np.random.default_rng(0)
PORTS = {"x": tensor_type(FLOAT, ["n", 3]), "y": tensor_type(INT64, ["n"])}
PICTURES = {"x": tensor_type(FLOAT, ["n", 3, 16, 8]), "y": tensor_type(INT64, ["n"])}
TERM = Term("cross-entropy", "logits", "y", 1.0, 3, -100, 1)
ROLES = Roles("", (TERM,), "mean", {"x": "model input", "y": "label"}, {"loss": Role("loss")}, False, (), "", (), {})
X = random.normal(size=(12, 3)) * [1, 10, 0.1] + [1e6, 0, 5]
NAMES = ["pear", "apple", "fig"] * 4


def to_csv(path: Path, names: list[Any], label: str = "y") -> Path:
    rows = [",".join([*map(repr, row), str(name)]) for row, name in zip(X.tolist(), names, strict=True)]
    path.write_text("\n".join([f"x_0,x_1,x_2,{label}", *rows]) + "\n")
    return path


def to_lines(path: Path, names: list[Any], label: str = "y") -> Path:
    rows = zip(X.tolist(), names, strict=True)
    path.write_text("".join(json.dumps({"x": row, label: name}) + "\n" for row, name in rows))
    return path


def to_parquet(path: Path, names: list[Any], label: str = "y") -> Path:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    column = arrow.array(names)
    column = column.dictionary_encode() if isinstance(names[0], str) else column
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"x": X.tolist(), label: column}), path)
    return path


WRITERS = {"csv": to_csv, "jsonl": to_lines, "parquet": to_parquet}


def opened(
    path: Path, inputs: dict[str, TypeProto] = PORTS, known: Preprocessing | None = None, **options: Any
) -> Data:
    how = SampleOptions(**options)
    return open_data(path, inputs, {"y": Range(0, 2)}, terms=[TERM], samples=how, known=known)


def ready(
    data: Data, inputs: dict[str, TypeProto] = PORTS, val: Data | None = None, **options: Any
) -> tuple[Data, Data]:
    known = Preprocessing()
    found = prepared(data, val, inputs, ROLES, SampleOptions(**options), known, 3, lambda text, level: None)
    return found[0], found[1] or found[0]


# -- names of classes ----------------------------------------------------------------------------------


def test_text_where_the_model_takes_numbers_is_refused(tmp_path: Path) -> None:
    path = to_lines(tmp_path / "a.jsonl", NAMES)
    with raises(UsageError, "wrong_type", "a.jsonl", "y", "int64"):
        open_data(path, PORTS)


# -- columns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITERS)
def test_a_column_may_be_called_otherwise(tmp_path: Path, form: str) -> None:
    data = opened(WRITERS[form](tmp_path / f"a.{form}", NAMES, "fruit"), columns={"fruit": "y"})
    assert data.batch(np.arange(4))["y"].tolist() == [2, 0, 1, 2]
    for columns, said in (({"frut": "y"}, (f"a.{form}", "frut")), ({"fruit": "z"}, ("z",))):
        with raises(UsageError, "unknown_name", "columns", *said):
            opened(data.source, columns=columns)
    with raises(UsageError, "conflict", "columns", "y", "a"):
        SampleOptions(columns={"a": "y", "b": "y"})


def test_arrays_may_be_called_otherwise_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=X, y=np.arange(12) % 3)
    np.testing.assert_allclose(opened(tmp_path / "a.npz", columns={"image": "x"}).batch(np.arange(12))["x"], X)


# -- normalization -------------------------------------------------------------------------------------


def pixels(tmp_path: Path, dtype: type = np.uint8) -> Path:
    x = random.integers(0, 256, (12, 3, 16, 8)).astype(dtype)
    np.savez(tmp_path / "p.npz", x=x, y=np.arange(12) % 3)
    return tmp_path / "p.npz"


# -- what a trained model keeps ------------------------------------------------------------------------


# -- at random -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["empty", "empty.jsonl"])
def test_what_is_empty_is_said_to_be(tmp_path: Path, name: str) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    with raises(UsageError, "no_data", name, "x", "3", "y", "int64") as caught:
        opened(tmp_path / name)
    assert (".npy" in str(caught.value.hint)) == (name == "empty")


# -- a user's function ---------------------------------------------------------------------------------
