"""What a command says as JSON: one shape for all of them, whether they succeed or fail.

docs/reference/output.schema.json describes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from onnxgrad_cli.errors import Refusal

VERSION = 1
"""The version of the shape: it grows when a key changes its meaning or goes away."""

STATUSES = {0: "done", 1: "failed", 2: "usage", 3: "refused", 4: "check failed", 130: "interrupted"}
"""Exit code -> the word for it."""


@dataclass(frozen=True)
class Problem:
    """Why a command fails.

    Attributes:
        message: what happened.
        hint: what to do about it; None where nobody knows.
        details: what there is to say of several things, such as one line for each of `refusals`.
        refusals: the nodes that can't be differentiated.
    """

    message: str
    hint: str | None = None
    details: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def document(
    command: str, code: int, result: object, problem: Problem | None, warnings: list[str], **more: Any
) -> dict[str, Any]:
    """The document of one command.

    Args:
        command: its name; "" where none was typed.
        code: its exit code.
        result: what the command found or made; None where it came to nothing.
        problem: why it failed.
        warnings: what a careful reader should know.
        more: what is said besides, of one of several models.
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


BESIDE = ("source model", "weights", "report")
"""Roles of files that a summary leaves out."""


def files_of(result: Any) -> list[str]:
    """The files that a command's result says it has made."""
    files = result.get("files", []) if isinstance(result, dict) else []
    roles = [(file["path"], file["role"]) if isinstance(file, dict) else (file, "") for file in files]
    return [path for path, role in roles if role not in BESIDE]
