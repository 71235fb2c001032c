"""Reports in Markdown are well formed, whatever the names in a model are."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.report import make_report, render
from tests.report.test_build_report import HOSTILE, full, hostile, mlp, one_line, tables


def test_markdown_tables_are_well_formed_whatever_the_names() -> None:
    text = render(full(hostile()), "md")
    found = tables(text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == sum(len(table) + 1 for table in found)  # no line of a table is taken for anything else
    for table in found:
        assert len({len(row) for row in table}) == 1
    by_head = {table[0][0]: table for table in found}
    assert by_head["weight"][1][:1] == [one_line(HOSTILE)]
    assert by_head["weight"][1][3:6] == ["20", "52.6 %", one_line(f"{HOSTILE}_grad")]
    assert by_head["check"][1] == ["a | b", "passed", f"about {one_line(HOSTILE)}"]
    assert by_head["file"][1][2] == "1,234,567"
    assert "<script>" not in MarkdownIt("commonmark").enable("table").render(text)


def test_markdown_sections() -> None:
    headings = [line[3:] for line in render(full(mlp()), "md").splitlines() if line.startswith("## ")]
    assert headings == [
        "Cautions", "Trained weights", "Inputs and outputs", "Cost", "Proof", "Request", "Files", "Versions",
        "Next steps",
    ]  # fmt: skip
    page = render(full(mlp()), "html")
    details = page[page.index("<details>") : page.index("</details>")]
    assert re.findall("<h2[^>]*>([^<]*)<", details) == ["Passes", "Operators", "Cost in detail", "Programs"]
    assert not re.search(r"\d m?s\b", render(full(mlp()), "md") + page), "times are in the JSON report only"


def test_a_report_of_a_sample_is_short(tmp_path: Path) -> None:
    sample = Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx"
    out = tmp_path / "t.onnx"
    options = Options(losses=[LossSpec("cross-entropy")], label="y")
    run_build(sample, out, options, command="onnxgrad build")
    text = (tmp_path / "t.onnx.report.md").read_text()
    assert len(text.splitlines()) <= 120
    run_build(sample, out, options, command="onnxgrad build", force=True)
    assert (tmp_path / "t.onnx.report.md").read_text() == text


def test_apostrophes_are_no_quotes() -> None:
    error = OnnxgradError("it can't be that 'a name' isn't one")
    assert "can't be that `a name` isn't one" in render(make_report(error=error), "md")
