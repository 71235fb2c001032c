"""Output for GitHub Actions: annotations for errors and warnings, and a row in the summary of a workflow's step.

GitHub's runner executes lines on stdout or stderr that begin with `::` as commands, and also older commands after `##[`
anywhere in a line. Because output may contain names from untrusted files, all other output must be escaped so that it
looks like neither.
Source: "Workflow commands for GitHub Actions", and `actions/runner`, ActionCommand.cs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxgrad_cli.cli.terminal.document import files_of, hints_of
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import status_text

MAX_ANNOTATIONS = 10
"""Maximum number of annotations of one kind that GitHub shows for a step."""

_COMMAND = re.compile(r"(?m)^(\s*):(?=:)|(##)\[")

_PLAIN = re.compile(r"[^\w .,/()=+-]|_", re.ASCII)


def on_github() -> bool:
    """Return True if this process runs in a step of a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def harmless(text: str) -> str:
    r"""Escape text that GitHub's runner would execute as a command: `::` at the start of a line, and `##[` anywhere.

    They become `\u003a:` and `##\u005b`, which JSON readers decode to the original. Outside of a workflow, the text is
    returned unchanged.
    """
    if not on_github():
        return text
    return _COMMAND.sub(lambda found: rf"{found[2]}\u005b" if found[2] else rf"{found[1]}\u003a", text)


def tell_github(
    whole: dict[str, Any], models: Sequence[dict[str, Any]], arguments: Sequence[str], seconds: float, done: str
) -> Iterator[str]:
    """Add a row to the step's summary for a command, or for each of its models, and yield lines with its annotations.

    Args:
        whole: the JSON document of the command; see `cli.terminal.document`.
        models: if the command runs for several models: the document of each, with the further entries `model`,
            `verdict`, `seconds` and `files`.
        arguments: the arguments of the command line.
        seconds: the duration of the command.
        done: a description of the result; "" for commands that only list something.
    """
    if not done and not whole["error"]:
        return
    file = next((word for word in arguments[1:] if word.endswith(".onnx") and os.path.isfile(word)), "")
    single = {**whole, "model": file, "verdict": done, "seconds": seconds, "files": files_of(whole["result"])}
    rows = list(models) or [single]
    errors = [(row["model"], _whole(row["error"])) for row in rows if row["error"]]
    warnings = [(row["model"], text) for row in rows for text in row["warnings"]]
    for kind, found in (("error", errors), ("warning", warnings)):
        for model, text in found[:MAX_ANNOTATIONS]:
            yield annotation(kind, text, title=f"onnxgrad {whole['command']}", file=model)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as target:
                target.write("\n".join(_table(whole["command"], rows)) + "\n")
        except OSError as error:
            yield annotation("warning", f"the step's summary can't be written: {error.strerror}")


def annotation(kind: str, text: str, **properties: str) -> str:
    """Return a workflow command that shows a text as an annotation. `kind` is 'error', 'warning' or 'notice'."""
    said = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{kind}{' ' if said else ''}{said}::{_data(text)}"


def _whole(error: dict[str, Any]) -> str:
    return "\n".join([error["message"], *error["details"], *(f"hint: {hint}" for hint in hints_of(error))])


def _data(text: str) -> str:
    """Escape per cent signs and line breaks in a text, for the message of a workflow command."""
    lines = "\n".join(map(escaped, text.split("\n")))
    return lines.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace("##[", "##\\u005b")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _table(command: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    lines = [f"### onnxgrad {_cell(command)}", "", "| model | status | verdict | time | files |", "| --- " * 5 + "|"]
    for row in rows:
        verdict = row["error"]["message"] if row["error"] else row["verdict"]
        cells = (row["model"], status_text(row["status"]), verdict, f"{row['seconds']:.1f} s", ", ".join(row["files"]))
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """Escape Markdown markup in a text, for a cell of a table."""
    return _PLAIN.sub(lambda found: f"&#{ord(found[0])};" if ord(found[0]) < 128 else found[0], escaped(text))
