"""Map exceptions to messages, hints and exit codes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import click

from onnxgrad_cli.cli.terminal.document import Problem
from onnxgrad_cli.common.full_disk import UNWRITABLE, said
from onnxgrad_cli.errors import INTERRUPTED, Code, InternalError, OnnxgradError, UnsupportedError

ISSUES = "https://github.com/onnxgrad/onnxgrad/issues"

REPORT = f"this is a bug in onnxgrad: run the command again with --traceback, and report the output at {ISSUES}"
"""The hint for an error that can only be a bug in onnxgrad."""

NO_MEMORY = ("std::bad_alloc", "bad allocation", "Failed to allocate memory", "Available memory of")
"""Texts in the messages of exceptions, of any type, with which libraries report that memory is exhausted."""

NO_TEMPORARY = "No usable temporary directory"
"""A part of the message with which Python reports that it finds no writable folder for temporary files."""

OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers of failed file accesses that are due to the file's name or to the permissions of its folders."""


def failure(error: BaseException) -> tuple[Problem, int]:
    """Return the problem to print for an error, and the exit code. For a bug, the hint describes how to report it."""
    if isinstance(error, click.ClickException):
        return _of_click(error), error.exit_code
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Problem("interrupted", "interrupted"), INTERRUPTED
    if any(map(_lacks_memory, chain(error))):
        hint = "close other programs, raise the limit, or use a smaller model, smaller batches or smaller --dim sizes"
        return Problem("no_memory", "not enough memory", hint=hint), 1
    if isinstance(error, OnnxgradError):
        refusals = list(error.refusals) if isinstance(error, UnsupportedError) else []
        advice = REPORT if isinstance(error, InternalError) else error.hint
        problem = Problem(error.code, error.message, error.argument, advice, list(error.details), refusals)
        return problem, error.exit_code
    if isinstance(error, OSError) and _is_out_of_reach(error):
        hint = "check the name, and the permissions of its folders"
        return Problem("unreadable_file", f"'{error.filename}' can't be reached: {error.strerror}", hint=hint), 1
    unwritable = next((each for each in chain(error) if isinstance(each, OSError) and _is_unwritable(each)), None)
    if unwritable is not None:
        hint = "free some space, or choose another place; the variable TMPDIR sets the place of temporary files"
        which = f"'{unwritable.filename}'" if _names_file(unwritable) else "a file"
        return Problem("unwritable_file", f"{which} can't be written: {said(unwritable)}", hint=hint), 1
    if any(isinstance(each, RecursionError) for each in chain(error)):
        hint = "simplify the model; if it has no nested graphs, this is a bug in onnxgrad: report it at " + ISSUES
        return Problem("failed", "the input is nested too deeply", hint=hint), 1
    text = " ".join(str(error).split())
    return Problem("internal", f"internal: {type(error).__name__}{': ' + text if text else ''}", hint=REPORT), 1


def _of_click(error: click.ClickException) -> Problem:
    """Return the problem to print for an error in the command line, which click has raised."""
    code: Code = "usage" if isinstance(error, click.UsageError) else "failed"
    hint = ""
    if isinstance(error, click.NoSuchOption):
        code, hint = "unknown_name", _other_name(error)
    elif isinstance(error, click.exceptions.NoSuchCommand):
        code, hint = "unknown_name", _other_command(error)
    elif isinstance(error, click.BadParameter):
        code = "wrong_value"
    message = error.message if hint else error.format_message()  # click would append options with similar names
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "onnxgrad"
    param = error.param if isinstance(error, click.BadParameter) else None
    argument = param.name if isinstance(param, click.Option) else None
    if not hint:
        hint = f"see '{path} --help'"
    return Problem(code, message, argument, hint)


def _other_name(error: click.NoSuchOption) -> str:
    """Return a hint for an unknown option that has another name in onnxgrad or belongs to another command, or ""."""
    from onnxgrad_cli.common.synonyms import meant

    if error.ctx is None:
        return ""
    path, group = error.ctx.command_path, error.ctx.find_root().command
    if own := meant(error.option_name, _names(error.ctx.command)):
        return f"use {' or '.join(f'--{use}' for use in own)}; see '{path} --help'"
    for other in group.commands.values() if isinstance(group, click.Group) else ():
        names = _names(other)
        uses = [name for name in names if f"--{name}" == error.option_name] or meant(error.option_name, names)
        if uses:
            return f"'onnxgrad {other.name}' has --{uses[0]}; see '{path} --help'"
    return ""


def _other_command(error: click.exceptions.NoSuchCommand) -> str:
    """Return a hint for an unknown command that has another name in onnxgrad; otherwise ""."""
    from onnxgrad_cli.common.synonyms import meant_command

    use = meant_command(error.command_name)
    return f"use 'onnxgrad {use}'; see 'onnxgrad --help'" if use else ""


def _names(command: click.Command) -> list[str]:
    """Return the long names of a command's options, without their dashes."""
    return [flag[2:] for param in command.params for flag in param.opts if flag.startswith("--")]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it or was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def _is_out_of_reach(error: OSError) -> bool:
    """Return True if an error is about a file that can't be reached. Such an error is not a bug in onnxgrad."""
    return _names_file(error) and error.errno in OUT_OF_REACH


def _is_unwritable(error: OSError) -> bool:
    return error.errno in UNWRITABLE or NO_TEMPORARY in str(error)


def _names_file(error: OSError) -> bool:
    return isinstance(error.filename, (str, os.PathLike))
