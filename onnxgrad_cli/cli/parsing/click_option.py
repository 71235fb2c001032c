"""Declare the options of commands, each with its section in the help, and define click types for paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxgrad_cli.common.flags import FLAGS
from onnxgrad_cli.errors import unreadable

Command = TypeVar("Command", bound=Callable[..., Any])


class SectionOption(click.Option):
    """A click option with a section in the help. An environment variable named after its flag can set it, too.

    Attributes:
        section: the heading in `--help-all`; '' for options of one command.
        common: True if `--help` lists the option even if the command has many options.
    """

    def __init__(self, *arguments: Any, section: str = "", common: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if self.metavar is None and isinstance(self.type, (click.IntRange, click.FloatRange)):
            self.metavar = "N" if isinstance(self.type, click.IntRange) else "X"
        self.section, self.common = section, common
        FLAGS[str(self.name)] = max(self.opts, key=len)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable ONNXGRAD_COMMAND_OPTION; None if it is not set."""
        if not self.allow_from_autoenv or ctx.auto_envvar_prefix is None:
            return None
        flag = max(self.opts, key=len).lstrip("-")
        return os.environ.get(f"{ctx.auto_envvar_prefix}_{flag.upper().replace('-', '_')}") or None


def option(*flags: str, **more: Any) -> Callable[[Command], Command]:
    """Return a decorator like `click.option`, which also accepts the arguments `section` and `common`.

    The help shows the default, unless it is empty or a bool.
    """
    default = more.get("default")
    shown = default not in (None, "") and not isinstance(default, bool)
    return click.option(*flags, cls=more.pop("cls", SectionOption), show_default=shown, **more)


def together(*each: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine several decorators into one, which adds their options to a command in the order of the arguments."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(each):
            command = decorator(command)
        return command

    return decorate


class FilePath(click.Path):
    """The click type of the path of a file or a folder.

    An empty path is refused, because Python would take it for the working directory. A shell passes an empty path if a
    variable is not set.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: the path is empty.
            OnnxgradError: the path is a folder instead of a file, a file instead of a folder, or not readable.
        """
        if not os.fspath(value):
            self.fail("expected a path, got an empty string; '.' is the working directory", param, ctx)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:  # the path exists, but is of another kind or not readable
            where = f"{max(param.opts, key=len)}: " if isinstance(param, click.Option) else ""
            fault = error.message.partition(" ")[2].removesuffix(".")
            raise unreadable(f"{where}{fault}", _hint(fault)) from None


def _hint(fault: str) -> str:
    if fault.endswith("is a directory"):
        return "name a file"
    return "name a folder" if fault.endswith("is a file") else "check its permissions"


TEXT = FilePath(readable=False)
"""The click type of a path that is kept as text, because it may be '-'. Jobs report errors about the file."""

FILE, FOLDER = FilePath(dir_okay=False, path_type=Path), FilePath(file_okay=False, path_type=Path)
ANY_PATH = FilePath(path_type=Path)
"""The click types of paths: `FILE`, `FOLDER`, and `ANY_PATH` for either."""
