"""Read options from a TOML file. Keys are the names of options; a command ignores the options of other commands.

A section such as `[build]` holds options for one command, which take precedence over those outside of sections.
"""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.common import toml
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.synonyms import suggest_setting
from onnxgrad_cli.errors import UsageError, suggest, unknown_name, unreadable, wrong_value


def read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Read a file, and make its values the defaults of the command's options.

    Raises:
        OnnxgradError: the file can't be read.
        UsageError: the file is not TOML, a key is not an option of any command, a section is not a command, or a value
            is not valid.
    """
    if path is None:
        return
    protect_inputs(path)
    try:
        values = toml.load(path)
    except OSError as error:
        raise unreadable(f"`config`: '{path}' can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`config`: '{path}' is not TOML: {error}", code="unreadable_file") from None
    commands = _commands(ctx)
    known = sorted({name for options in commands.values() for name in options})
    sections = {
        key: value for key, value in values.items()
        if isinstance(value, dict) and (key in commands or key.replace("_", "-") not in known)
    }  # fmt: skip
    defaults = _defaults(path, {key: value for key, value in values.items() if key not in sections}, ctx, known)
    for key, value in sections.items():
        if key not in commands:
            raise unknown_name(f"`config`: '{path}' has an unknown section [{key}]", suggest(key, commands, "commands"))
        section = _defaults(path, value, ctx, sorted(commands[key]), f"[{key}] ")
        defaults |= section if key == ctx.command.name else {}
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _defaults(
    path: str, values: dict[str, Any], ctx: click.Context, known: list[str], section: str = ""
) -> dict[str, Any]:
    """Return a map: name of a parameter of the command -> its value in `values`.

    Raises:
        UsageError: a key is not a `known` option, or a value is not valid.
    """
    own = _options(ctx.command)
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise unknown_name(
                f"`config`: '{path}' has an unknown option {section}'{key}'", suggest_setting(name, known)
            )
        if name in own:
            try:
                found[own[name].name or ""] = _value(own[name], value)
            except _InvalidValue as error:
                raise wrong_value(f"`config`: '{path}': {section}'{key}' {error}", own[name].help) from None
    return found


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return a map: long name of an option of a command, without dashes -> the option."""
    return {
        flag.removeprefix("--"): param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--") and flag not in ("--config", "--help-all")
    }


def _commands(ctx: click.Context) -> dict[str, dict[str, click.Option]]:
    """Return a map: name of a command -> its options; see `_options`."""
    group = ctx.find_root().command
    commands = list(group.commands.values()) if isinstance(group, click.Group) else [ctx.command]
    return {command.name or "": _options(command) for command in commands}


class _InvalidValue(Exception):
    """A value is not valid for an option. The message has the reason."""


def _value(option: click.Option, value: Any) -> Any:
    """Convert a TOML value to the texts that a user would type.

    A table becomes a list of KEY=VALUE texts. A list becomes the values of an option that may be repeated. A flag stays
    a bool.

    Raises:
        _InvalidValue: the option can't have this value.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise _InvalidValue(f"must be true or false, not {value!r}")
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
        raise _InvalidValue("takes one value, not several")
    return found


def _typed(value: Any) -> Any:
    """Return the text that a user would type for a value; for a list, return a list of texts."""
    if isinstance(value, list):
        return [_one(item) for item in value]
    if not isinstance(value, (str, int, float)) or "\0" in str(value):
        raise _InvalidValue(f"takes numbers or text, not {value!r}")
    return str(value)
