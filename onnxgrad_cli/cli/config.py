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
        UsageError: the file can't be read, or it has a key that is no option of any command.
    """
    if path is None:
        return
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: '{path}' can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: '{path}' is no TOML: {error}") from None
    own, known = _options(ctx.command), _known(ctx)
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"--config: '{path}' has an unknown option '{key}'", suggest(name, known, "options"))
        if name in own:
            defaults[own[name].name or ""] = _value(own[name], value)
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


def _value(option: click.Option, value: Any) -> Any:
    """A TOML value as the option takes it: a table is KEY=VALUE pairs, a list is several of them."""
    if isinstance(value, dict):
        value = [option.type.join(key, item) for key, item in value.items()] if hasattr(option.type, "join") else value
    return [value] if option.multiple and not isinstance(value, list) else value
