"""The JSON output of a command. All commands have the same schema, whether they succeed or fail.

docs/reference/output.schema.json describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxgrad_cli.errors import Code, Refusal

VERSION = 1
"""The version of the schema. It is increased when a key is removed or changes its meaning."""

STATUSES = {0: "done", 1: "failed", 2: "usage", 3: "refused", 4: "check_failed", 130: "interrupted"}
"""Exit code -> the entry `status` of the document."""


@dataclass(frozen=True)
class Problem:
    """The reason why a command failed.

    Attributes:
        code: the kind of failure; see `errors.CODES`.
        message: a description of the failure.
        argument: the option that caused the failure; None if no option did.
        hint: a fix; None if none is known.
        details: further lines of text, such as one for each of `refusals`.
        refusals: the nodes that can't be differentiated.
    """

    code: Code
    message: str
    argument: str | None = None
    hint: str | None = None
    details: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def document(
    command: str, code: int, result: object, problem: Problem | None, warnings: list[str], **more: Any
) -> dict[str, Any]:
    """Return the document of one command.

    Args:
        command: the name of the command, or "" if the user typed none.
        code: the exit code of the command.
        result: the result of the command; None if it has none.
        problem: the reason why the command failed; None after success.
        warnings: the warnings.
        more: further entries, for the documents of several models.
    """
    return {
        "version": VERSION,
        "command": command,
        **more,
        "status": STATUSES.get(code, "failed"),
        "exit_code": code,
        "result": result,
        "error": asdict(problem) if problem else None,
        "warnings": warnings,
    }


def hints_of(error: Mapping[str, Any]) -> list[str]:
    """Return the hints in the entry `error` of a document: the hint of the error, then the hints of its refusals."""
    return list(dict.fromkeys(filter(None, (error["hint"], *(refusal["hint"] for refusal in error["refusals"])))))


BESIDE = ("source model", "weights", "report")
"""Roles of files that the summary for several models or for GitHub does not list."""


def files_of(result: Any) -> list[str]:
    """Return the files that a command wrote, according to its result."""
    files = result.get("files", []) if isinstance(result, dict) else []
    roles = [(file["path"], file["role"]) if isinstance(file, dict) else (file, "") for file in files]
    return [path for path, role in roles if role not in BESIDE]
