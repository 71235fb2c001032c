"""What an error is to the user: what happened, what to do about it, and the exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

import click

from onnxgrad_cli.common.full_disk import UNWRITABLE, said
from onnxgrad_cli.errors import InternalError, OnnxgradError, Refusal, UnsupportedError, UsageError

ISSUES = "https://github.com/onnxgrad/onnxgrad/issues"

REPORT = f"this is a fault of onnxgrad: run it again with --traceback and report what it prints, {ISSUES}"
"""What to do about an error that is nobody's but ours."""

NO_MEMORY = ("std::bad_alloc", "bad allocation", "Failed to allocate memory", "Available memory of")
"""What the libraries say beneath us where memory ends, as errors of any type."""

NO_TEMPORARY = "No usable temporary directory"
"""What Python says where no folder for temporary files can be written to."""

OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)
"""What asking whether a file exists fails with where its name or the rights of a folder stand in the way."""


class Failure(NamedTuple):
    """How a command failed; see `Console.error`."""

    message: str
    hint: str | None = None
    details: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    code: int = 1


def failure(error: BaseException) -> Failure:
    """What an error is to the user; one that is nobody's but ours says how to report it."""
    if isinstance(error, click.NoSuchOption) and (hint := _other_name(error)):
        return Failure(error.message, hint, code=error.exit_code)
    if isinstance(error, click.ClickException):
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "onnxgrad"
        return Failure(error.format_message(), f"see '{path} --help'", code=error.exit_code)
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Failure("interrupted", code=130)
    if any(map(_lacks_memory, chain(error))):
        hint = "close other programs, raise the limit, or take a smaller model, smaller batches or smaller --dim sizes"
        return Failure("not enough memory", hint)
    if isinstance(error, OnnxgradError):
        refusals = error.refusals if isinstance(error, UnsupportedError) else ()
        advice = REPORT if isinstance(error, InternalError) else error.hint
        return Failure(error.message, advice, error.details, refusals, error.exit_code)
    if isinstance(error, OSError) and _is_out_of_reach(error):
        hint = "check its name, and the permissions of the folders in which it lies"
        return Failure(f"'{error.filename}' can't be reached: {error.strerror}", hint, code=UsageError.exit_code)
    unwritable = next((each for each in chain(error) if isinstance(each, OSError) and _is_unwritable(each)), None)
    if unwritable is not None:
        hint = "free some space, or choose another place; that of temporary files the variable TMPDIR says"
        which = f"'{unwritable.filename}'" if _names_file(unwritable) else "a file"
        return Failure(f"{which} can't be written: {said(unwritable)}", hint)
    if any(isinstance(each, RecursionError) for each in chain(error)):
        hint = "simplify the model; if it nests no graphs in graphs, it is a fault of onnxgrad: report it, " + ISSUES
        return Failure("what was given is nested too deeply", hint)
    text = " ".join(str(error).split())
    return Failure(f"internal: {type(error).__name__}{': ' + text if text else ''}", REPORT)


def _other_name(error: click.NoSuchOption) -> str:
    """Return a hint for an option that is called otherwise here, or that another command has; "" for neither."""
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


def _names(command: click.Command) -> list[str]:
    """Return the long names of a command's options, without their dashes."""
    return [flag[2:] for param in command.params for flag in param.opts if flag.startswith("--")]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, or was raised while that was handled, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def _is_out_of_reach(error: OSError) -> bool:
    """Whether an error says that a file which it names can't be reached, which is no fault of ours."""
    return _names_file(error) and error.errno in OUT_OF_REACH


def _is_unwritable(error: OSError) -> bool:
    return error.errno in UNWRITABLE or NO_TEMPORARY in str(error)


def _names_file(error: OSError) -> bool:
    return isinstance(error.filename, (str, os.PathLike))
