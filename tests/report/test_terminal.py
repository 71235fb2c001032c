"""The summary of a report on the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from onnxgrad_cli.report import Report, make_report, summary
from tests.report.test_build_report import HOSTILE, full, hostile, one_line, refused


def shown(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary(report))
    return stream.getvalue()


def test_the_summary_takes_names_as_they_are() -> None:
    text = shown(full(hostile()))
    assert one_line(f"{HOSTILE}.onnx") in text
    assert "3 tensors, 38 parameters (152 B)" in text
    assert len(text.splitlines()) < 15


def test_the_summary_of_a_refusal_lists_the_nodes() -> None:
    built, error = refused()
    text = shown(make_report(built=built, error=error))
    assert text.count("acme::") >= 2
    assert "--freeze" in text
