"""Options from a TOML file: keys are the names of options, and what a command does not have is left to the others."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.errors import UsageError, suggest


def read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make a file's values the defaults of the command's options.

    Raises:
        UsageError: the file can't be read, it has a key that is no option of any command, or a value that is none.
    """
    if path is None:
        return
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: '{path}' can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: '{path}' is no TOML: {error}") from None
    own, known = _options(ctx.command), _known(ctx)
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"--config: '{path}' has an unknown option '{key}'", suggest(name, known, "options"))
        if name in own:
            try:
                defaults[own[name].name or ""] = _value(own[name], value)
            except _Unfit as error:
                raise UsageError(f"--config: '{path}': '{key}' {error}", own[name].help) from None
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names."""
    return {
        flag.removeprefix("--"): param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--") and flag != "--config"
    }


def _known(ctx: click.Context) -> list[str]:
    group = ctx.find_root().command
    commands = group.commands.values() if isinstance(group, click.Group) else [ctx.command]
    return sorted({name for command in commands for name in _options(command)})


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
