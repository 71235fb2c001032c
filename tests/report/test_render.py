"""Reports in each format, and formats that are none."""

from __future__ import annotations

import dataclasses
import json

import pytest

from onnxgrad_cli.errors import Refusal, UsageError
from onnxgrad_cli.report import Report, make_report, render
from tests.report.test_build_report import HOSTILE, full, hostile, mlp, refused, told


def test_json_is_the_whole_tree() -> None:
    report = full(hostile())
    tree = json.loads(render(report, "json"))
    assert tree == json.loads(json.dumps(dataclasses.asdict(report)))
    assert set(tree) == {field.name for field in dataclasses.fields(Report)}
    assert tree["weights"][0]["name"] == HOSTILE
    assert tree["format"] == 1
    built, error = refused()
    refusals = json.loads(render(make_report(built=built, error=error), "json"))["refusals"]
    assert [Refusal(**refusal) for refusal in refusals] == told(error.refusals)


def test_an_unknown_format_is_an_error_of_usage() -> None:
    with pytest.raises(UsageError) as caught:
        render(full(mlp()), "htm")
    assert "html" in str(caught.value.hint)
