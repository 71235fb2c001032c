"""From a report to text: one function a format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.visible import visible_lines
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.report import text
from onnxgrad_cli.report.document import page
from onnxgrad_cli.report.markdown import markdown
from onnxgrad_cli.report.model import Report

if TYPE_CHECKING:
    from rich.console import RenderableType


def _markdown(report: Report, picture: str) -> str:
    return markdown(page(report))


def _html(report: Report, picture: str) -> str:
    from onnxgrad_cli.report.html import html

    return html(dataclasses.replace(page(report), picture=picture))


def _text(report: Report, picture: str) -> str:
    return text.text(report)


def _json(report: Report, picture: str) -> str:
    return strict_json.dumps(dataclasses.asdict(report), indent=2) + "\n"


FORMATS: dict[str, Callable[[Report, str], str]] = {"md": _markdown, "html": _html, "json": _json, "txt": _text}
"""The formats of a report, by the suffix of its file."""


def render(report: Report, kind: str, picture: str = "") -> str:
    """The report in one of `FORMATS`: 'md', 'html', 'json' or 'txt'.

    Args:
        report: what there is to say.
        kind: the format.
        picture: a link from it to the page with the picture of the model, which html follows; "" where there is none.

    Raises:
        UsageError: no such format.
    """
    if kind not in FORMATS:
        raise UsageError(f"no report format '{kind}'", suggest(kind, FORMATS, "formats"))
    return visible_lines(FORMATS[kind](report, picture))


def summary(report: Report) -> RenderableType:
    """The report in a few lines, for `rich.console.Console.print`."""
    return text.summary(report)
