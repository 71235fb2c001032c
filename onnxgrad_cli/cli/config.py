"""Options from a TOML file: keys are the names of options, and what a command does not have is left to the others.

Under `[build]`, or another command's name, stand options of that command alone, which go before the others.
"""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.common import toml
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.synonyms import suggest_setting
from onnxgrad_cli.errors import UsageError, suggest


def read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make a file's values the defaults of the command's options.

    Raises:
        UsageError: the file can't be read, it has a key that is no option of any command, a section that is no
            command, or a value that is none.
    """
    if path is None:
        return
    keep(path)
    try:
        values = toml.load(path)
    except OSError as error:
        raise UsageError(f"--config: '{path}' can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: '{path}' is no TOML: {error}") from None
    commands = _commands(ctx)
    known = sorted({name for options in commands.values() for name in options})
    sections = {
        key: value for key, value in values.items()
        if isinstance(value, dict) and (key in commands or key.replace("_", "-") not in known)
    }  # fmt: skip
    defaults = _defaults(path, {key: value for key, value in values.items() if key not in sections}, ctx, known)
    for key, value in sections.items():
        if key not in commands:
            raise UsageError(f"--config: '{path}' has an unknown section [{key}]", suggest(key, commands, "commands"))
        section = _defaults(path, value, ctx, sorted(commands[key]), f"[{key}] ")
        defaults |= section if key == ctx.command.name else {}
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _defaults(
    path: str, values: dict[str, Any], ctx: click.Context, known: list[str], section: str = ""
) -> dict[str, Any]:
    """The values of the command's options, by the names of their parameters.

    Raises:
        UsageError: a key is none of the `known` options, or a value is none.
    """
    own = _options(ctx.command)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"--config: '{path}' has an unknown option {section}'{key}'", suggest_setting(name, known))
        if name in own:
            try:
                found[own[name].name or ""] = _value(own[name], value)
            except _Unfit as error:
                raise UsageError(f"--config: '{path}': {section}'{key}' {error}", own[name].help) from None
    return found


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names."""
    return {
        flag.removeprefix("--"): param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--") and flag not in ("--config", "--help-all")
    }


def _commands(ctx: click.Context) -> dict[str, dict[str, click.Option]]:
    """The options of each command."""
    group = ctx.find_root().command
    commands = list(group.commands.values()) if isinstance(group, click.Group) else [ctx.command]
    return {command.name or "": _options(command) for command in commands}


class _Unfit(Exception):
    """Why a value is none of an option's."""


def _value(option: click.Option, value: Any) -> Any:
    """A TOML value as it would be typed: a table is KEY=VALUE pairs, a list is several values of a repeated option.

    Raises:
        _Unfit: it can't be typed.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise _Unfit(f"is true or false, not {value!r}")
        return value
    if isinstance(value, dict) and hasattr(option.type, "join"):
        pairs = {key: _typed(item) for key, item in value.items()}
        return [option.type.join(key, item) for key, item in pairs.items()]
    if not option.multiple:
        return _one(value)
    return [_one(item) for item in (value if isinstance(value, list) else [value])]


def _one(value: Any) -> str:
    found = _typed(value)
    if isinstance(found, list):
        raise _Unfit("takes one value, not several")
    return found


def _typed(value: Any) -> Any:
    """A value in the words in which it is typed, or several of them."""
    if isinstance(value, list):
        return [_one(item) for item in value]
    if not isinstance(value, (str, int, float)) or "\0" in str(value):
        raise _Unfit(f"takes numbers or text, not {value!r}")
    return str(value)
