"""Samples as lines of JSON, and lines that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.test_sequences import FLOAT, INT64
from tests.facts import raises, raises_as


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ('{"x": null, "y": 1}', "line 2 has no value for 'x'"),
        ('{"y": 1}', "line 2 has no value for 'x'"),
        ('{"x": [1, "a", 3], "y": 1}', "line 2: 'x' is neither a number nor a list of numbers"),
        ('{"x": 3, "y": 1}', "line 2: 'x' is a number, but was a list on the lines before"),
        ('{"x": [1, 2, [3]], "y": 1}', "line 2: 'x' is neither a number"),
        ('{"x": [[1], [2], [3]], "y": 1}', ("usage", "a.jsonl", "x")),
        ('{"x": [1, 2, 1e999], "y": 1}', ("usage", "a.jsonl", "x", "1", "0", "2", "float32")),
        ('{"x": [1, 2, 3], "y": 1.5}', ("usage", "a.jsonl", "y", "float64", "int64")),
        ('{"x": [1, 2, 3], "y": 99999999999999999999}', "line 2: 'y' is neither a number"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"x": "\xff"}', "line 2 is not JSON"),
    ],
)
def test_lines_that_are_wrong(tmp_path: Path, line: str, said: str | tuple[str, ...]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": [1, 2, 3], "y": 0}\n' + line.encode("latin-1") + b"\n")
    inputs = {"x": tensor_type(FLOAT, ["n", 3]), "y": tensor_type(INT64, ["n"])}
    with raises_as(UsageError, said):
        open_data(path, inputs)


def test_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.data.json_lines.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text('{"x": [' + "1, " * 1000)
    with raises(UsageError, "usage", "a.jsonl", "1", "1,000"):
        open_data(tmp_path / "a.jsonl", {"x": tensor_type(FLOAT, ["n", 3])})
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match="has no 'x'"):
        open_data(tmp_path / "b.jsonl", {"x": tensor_type(FLOAT, ["n", 3])})
