"""The report of a build: the request, the result, its cost and its proof. A `Report` is rendered in several formats.

report = make_report(built=built, proof=proof, files=[File.of(out, "training model")], command=sys.argv)
text = render(report, "md")           # or "html", "json"
console.print(summary(report))        # the short form, for a terminal
"""

from __future__ import annotations

import dataclasses

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.escape import escaped_lines
from onnxgrad_cli.errors import suggest, unknown_name
from onnxgrad_cli.report.build_report import make_report
from onnxgrad_cli.report.markdown import Writer
from onnxgrad_cli.report.model import File, Report
from onnxgrad_cli.report.sections import page
from onnxgrad_cli.report.terminal import summary

__all__ = ["FORMATS", "File", "Report", "make_report", "render", "summary"]


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
