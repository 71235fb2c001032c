"""Classes as names or numbers, in every format, and balanced by their number of samples."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.data import (
    open_data,
)
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.test_preprocessing import PORTS, TERM, WRITERS, X, opened, to_lines
from tests.facts import facts, raises

random = np.random.default_rng(0)


NAMES = ["pear", "apple", "fig"] * 4


@pytest.mark.parametrize("form", WRITERS)
def test_names_of_classes_become_numbers_in_their_order(tmp_path: Path, form: str) -> None:
    data = opened(WRITERS[form](tmp_path / f"a.{form}", NAMES))
    assert data.batch(np.arange(4))["y"].tolist() == [2, 0, 1, 2]
    assert data.preprocessing([TERM]).classes == {"logits": ("apple", "fig", "pear")}
    few = WRITERS[form](tmp_path / f"b.{form}", ["pear"] * 12)
    assert opened(few, known=data.preprocessing([TERM])).batch(np.arange(2))["y"].tolist() == [2, 2]
    other = WRITERS[form](tmp_path / f"c.{form}", ["pear"] * 11 + ["fix"])
    with raises(UsageError, "unknown_name", other.name, "11", "0", "y", "fix", "3") as failure:
        opened(other, known=data.preprocessing([TERM]))
    assert failure.value.hint == "did you mean fig?"


@pytest.mark.parametrize(
    ("form", "names", "said"),
    [
        ("csv", [*NAMES[:11], 7], ("wrong_type", "a.csv", "2", "y", "y", "pear")),
        ("csv", [7, *NAMES[1:]], ("wrong_type", "a.csv", "3", "y", "y", "apple")),
        ("csv", [*NAMES[:11], ""], ("wrong_type", "a.csv", "2", "y", "y", "pear")),
        ("csv", [0.5] * 12, ("wrong_type", "a.csv", "2", "y", "y", "0.5")),
        ("jsonl", [*NAMES[:11], 7], ("wrong_type", "a.jsonl", "12", "y")),
        ("parquet", [Decimal(1)] * 12, ("wrong_type", "a.parquet", "0", "0", "y", "1")),
        ("parquet", [b"pear"] * 12, ("wrong_type", "a.parquet", "0", "0", "y")),
        ("jsonl", [7, 8, *NAMES[:10]], ("wrong_type", "a.jsonl", "3", "y")),
        ("jsonl", [*NAMES[:9], "a", "b", "c"], ("mismatch", "a.jsonl", "y", "6", "3")),
    ],
)
def test_a_mistyped_number_is_no_name(tmp_path: Path, form: str, names: list[Any], said: tuple[str, ...]) -> None:
    with raises(UsageError, *said):
        opened(WRITERS[form](tmp_path / f"a.{form}", names))


def to_npz(path: Path, names: list[Any]) -> Path:
    np.savez(path, x=X, y=np.array(names))
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "npz"])
@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        ([*map(str, range(11)), "10"], [*range(11), 10]),
        (["2", "7"] * 6, [2, 7] * 6),
        (["007", " 3", "+3", "3.0", "1.", "12 "] * 2, [7, 3, 3, 3, 1, 12] * 2),
        (["True", "false"] * 6, [1, 0] * 6),
        (["pear", *"12345678901"], None),
        (["1.5", "2"] * 6, None),
        (["1_0", "2"] * 6, None),
        ([str(10**20), "2"] * 6, None),
        (["", "2"] * 6, None),
        (["nan"] * 12, None),
    ],
)
def test_whole_numbers_as_text_are_the_same_classes_in_every_format(
    tmp_path: Path, form: str, texts: list[str], numbers: list[int] | None
) -> None:
    path = {**WRITERS, "npz": to_npz}[form](tmp_path / f"a.{form}", texts)
    if numbers is None:
        with pytest.raises(UsageError) as told:
            open_data(path, PORTS, terms=[TERM])
        assert facts(told.value)[0] == "wrong_type" and "y" in facts(told.value)
        return
    for known in (None, Preprocessing({"logits": tuple(sorted(set(NAMES)))})):
        data = open_data(path, PORTS, terms=[TERM], known=known)
        assert data.batch(np.arange(12))["y"].tolist() == numbers
        assert data.names == ({} if known is None else {"y": ("apple", "fig", "pear")})


def test_a_number_that_a_class_is_called_by_is_its_name(tmp_path: Path) -> None:
    known = Preprocessing({"logits": ("7", "cat", "3")})
    data = opened(to_lines(tmp_path / "a.jsonl", ["3", "7", "cat"] * 4), known=known)
    assert data.batch(np.arange(3))["y"].tolist() == [2, 0, 1]


def test_a_number_with_a_character_that_is_not_seen_is_none(tmp_path: Path) -> None:
    with raises(UsageError, "wrong_type", "a.jsonl", "1", "0", "y", "2\u0000"):
        opened(to_lines(tmp_path / "a.jsonl", ["1", "2\0"] * 6))


def test_names_and_numbers_far_apart_in_a_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,x_0,x_1,x_2\n" + "pear,1,2,3\n" * 4096 + "1,1,2,3\n")
    with raises(UsageError, "wrong_type", "a.csv", "y", "y", "pear"):
        opened(path)


def test_names_where_a_loss_takes_numbers_are_told_what_they_are_for(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(TensorProto.FLOAT, ["N", 1]), "y": tensor_type(TensorProto.FLOAT, ["N", 1])}
    (tmp_path / "a.csv").write_text("x,y\n1,no\n2,yes\n")
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": "no"}\n{"x": 2, "y": "yes"}\n')
    for name, place in (("a.csv", ("2", "y", "y", "no")), ("a.jsonl", ("y", "1"))):
        with raises(UsageError, "wrong_type", name, *place) as told:
            open_data(tmp_path / name, inputs)
        assert "losses='cross-entropy'" in (told.value.hint or "")
    (tmp_path / "a.csv").write_text("x,y\n1,1\n2,yes\n")
    with raises(UsageError, "wrong_type", "a.csv", "3", "y", "y", "yes"):
        open_data(tmp_path / "a.csv", inputs)
