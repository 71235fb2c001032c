"""What a workflow of GitHub Actions is told: annotations of errors and warnings, and a row of the step's summary.

A runner obeys lines of either stream that begin with `::`, and older commands behind `##[` anywhere in a line. Names
come from strangers' files: nothing else that is printed there may look like either.
Source: "Workflow commands for GitHub Actions", and `actions/runner`, ActionCommand.cs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxgrad_cli.cli.document import files_of
from onnxgrad_cli.common.visible import visible

MOST = 10
"""Annotations of a kind: GitHub shows no more of one step."""

_COMMAND = re.compile(r"(?m)^(\s*):(?=:)|(##)\[")

_PLAIN = re.compile(r"[^\w .,/()=+-]|_", re.ASCII)


def on_github() -> bool:
    """Whether this is a step of a workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def harmless(text: str) -> str:
    r"""The text without what a runner would obey: `::` at the beginning of a line is `\u003a:`, `##[` `##\u005b`.

    Both mean the same in the strings of JSON. Elsewhere than in a workflow, text stays as it is.
    """
    if not on_github():
        return text
    return _COMMAND.sub(lambda found: rf"{found[2]}\u005b" if found[2] else rf"{found[1]}\u003a", text)


def tell_github(
    whole: dict[str, Any], models: Sequence[dict[str, Any]], arguments: Sequence[str], seconds: float, done: str
) -> Iterator[str]:
    """Add a row for a command, or for each of several models, to the step's summary, and yield its annotations.

    Args:
        whole: its document, see `cli.document`.
        models: the documents of several models, each with `model`, `verdict`, `seconds` and `files` besides.
        arguments: of the command line.
        seconds: how long it took.
        done: what it did or found, in words; "" for commands that only list something.
    """
    if not done and not whole["error"]:
        return
    file = next((word for word in arguments[1:] if word.endswith(".onnx") and os.path.isfile(word)), "")
    single = {**whole, "model": file, "verdict": done, "seconds": seconds, "files": files_of(whole["result"])}
    rows = list(models) or [single]
    errors = [(row["model"], _whole(row["error"])) for row in rows if row["error"]]
    warnings = [(row["model"], text) for row in rows for text in row["warnings"]]
    for kind, found in (("error", errors), ("warning", warnings)):
        for model, text in found[:MOST]:
            yield annotation(kind, text, title=f"onnxgrad {whole['command']}", file=model)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as target:
                target.write("\n".join(_table(whole["command"], rows)) + "\n")
        except OSError as error:
            yield annotation("warning", f"the step's summary can't be written: {error.strerror}")


def annotation(kind: str, text: str, **properties: str) -> str:
    """A workflow command that shows a text; `kind` is 'error', 'warning' or 'notice'."""
    said = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{kind}{' ' if said else ''}{said}::{_data(text)}"


def _whole(error: dict[str, Any]) -> str:
    hints = dict.fromkeys(text for text in (error["hint"], *(r["hint"] for r in error["refusals"])) if text)
    return "\n".join([error["message"], *error["details"], *(f"hint: {hint}" for hint in hints)])


def _data(text: str) -> str:
    """A text as a command's message: per cent signs and line breaks are escaped; a break within a name is visible."""
    lines = "\n".join(map(visible, text.split("\n")))
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace("##[", "##\\u005b")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _table(command: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    lines = [f"### onnxgrad {_cell(command)}", "", "| model | status | verdict | time | files |", "| --- " * 5 + "|"]
    for row in rows:
        verdict = row["error"]["message"] if row["error"] else row["verdict"]
        cells = (row["model"], row["status"], verdict, f"{row['seconds']:.1f} s", ", ".join(row["files"]))
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """A text in which Markdown finds no markup."""
    return _PLAIN.sub(lambda found: f"&#{ord(found[0])};" if ord(found[0]) < 128 else found[0], visible(text))
