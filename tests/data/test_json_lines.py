"""Samples as lines of JSON, and lines that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.leading_facts import raises_first
from tests.data.test_sequences import FLOAT, INT64
from tests.facts import raises


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ("wrong_value", "a.jsonl", "2")),
        ("[1]", ("wrong_type", "a.jsonl", "2")),
        ('{"x": null, "y": 1}', ("missing_value", "a.jsonl", "2", "x")),
        ('{"y": 1}', ("missing_value", "a.jsonl", "2", "x")),
        ('{"x": [1, "a", 3], "y": 1}', ("wrong_type", "a.jsonl", "2", "x")),
        ('{"x": 3, "y": 1}', ("wrong_type", "a.jsonl", "2", "x")),
        ('{"x": [1, 2, [3]], "y": 1}', ("wrong_type", "a.jsonl", "2", "x")),
        ('{"x": [[1], [2], [3]], "y": 1}', ("wrong_type", "a.jsonl", "x")),
        ('{"x": [1, 2, 1e999], "y": 1}', ("wrong_value", "a.jsonl", "x", "1", "0", "2", "float32")),
        ('{"x": [1, 2, 3], "y": 1.5}', ("wrong_type", "a.jsonl", "y", "float64", "int64")),
        ('{"x": [1, 2, 3], "y": 99999999999999999999}', ("wrong_type", "a.jsonl", "2", "y")),
        ("[" * 100_000, ("wrong_value", "a.jsonl", "2")),
        ('{"x": "\xff"}', ("wrong_value", "a.jsonl", "2")),
    ],
)
def test_lines_that_are_wrong(tmp_path: Path, line: str, said: tuple[str, ...]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": [1, 2, 3], "y": 0}\n' + line.encode("latin-1") + b"\n")
    inputs = {"x": tensor_type(FLOAT, ["n", 3]), "y": tensor_type(INT64, ["n"])}
    with raises_first(UsageError, *said):
        open_data(path, inputs)


def test_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.data.json_lines.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"x": [' + "1, " * 1000)
    with raises(UsageError, "wrong_value", "a.jsonl", "1", "1,000"):
        open_data(tmp_path / "a.jsonl", {"x": tensor_type(FLOAT, ["n", 3])})
    (tmp_path / "b.jsonl").write_text("\n\n")
    with raises(UsageError, "no_data", "b.jsonl", "x", "3"):
        open_data(tmp_path / "b.jsonl", {"x": tensor_type(FLOAT, ["n", 3])})
