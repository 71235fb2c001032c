"""Render a report as text."""

from __future__ import annotations

import dataclasses

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.escape import escaped_lines
from onnxgrad_cli.errors import suggest, unknown_name
from onnxgrad_cli.report.markdown import Writer
from onnxgrad_cli.report.model import Report
from onnxgrad_cli.report.sections import page

FORMATS = ("md", "html", "json")
"""The formats of a report. Each is the suffix of the report's file."""


def render(report: Report, kind: str, picture: str = "") -> str:
    """Return the report in one of `FORMATS`.

    Args:
        report: the report.
        kind: the format.
        picture: for 'html', a relative link from the report to the page with the picture of the model; "" if there is
            no such page.

    Raises:
        UsageError: the format is unknown.
    """
    match kind:
        case "md":
            text = Writer().write(page(report))
        case "html":
            from onnxgrad_cli.report.html import html  # imports the renderer of Markdown

            text = html(page(report), picture)
        case "json":
            text = strict_json.dumps(dataclasses.asdict(report), indent=2) + "\n"
        case _:
            raise unknown_name(f"no report format '{kind}'", suggest(kind, FORMATS, "formats"))
    return escaped_lines(text)
