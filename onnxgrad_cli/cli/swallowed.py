"""Options that were typed without their value: the next option would be taken for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import click

from onnxgrad_cli.errors import UsageError


def is_optional(option: click.Option) -> bool:
    """Return True if the value of an option may be left out."""
    return isinstance(option.flag_value, str)


def refuse_swallowed(command: click.Command, arguments: Sequence[str]) -> None:
    """Refuse a command line in which an option stands where another one's value belongs.

    Args:
        command: the command that is run.
        arguments: what was typed behind its name.

    Raises:
        UsageError: a value is missing.
    """
    options = [param for param in command.params if isinstance(param, click.Option)]
    flags = {flag: option for option in options for flag in (*option.opts, *option.secondary_opts)}
    for flag, value in pairwise(arguments):
        if flag == "--":
            return
        option = flags.get(flag)
        if (
            option is not None
            and not option.is_flag
            and not option.count
            and value in flags
            and not is_optional(option)
        ):
            metavar = option.make_metavar(click.Context(command))
            raise UsageError(
                f"{flag} wants a value, {metavar}, and '{value}' is another option",
                f"give one; if '{value}' is the value, write {max(option.opts, key=len)}={value}",
            )
