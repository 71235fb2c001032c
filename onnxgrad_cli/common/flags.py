"""Replace Python arguments in messages by command-line flags, for users of the command line.

Messages contain arguments as Python code in backquotes: `lora_target`, `yield_='keep'`, `train=GLOB`. The command line
shows these as --lora-target, --yield keep and --train GLOB. It shows a setting such as `weight_decay` as weight-decay.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from itertools import islice
from typing import TypeVar

from onnxgrad_cli.errors import ARGUMENT

FLAGS: dict[str, str] = {}
"""Python argument -> its flag. The declarations of options fill this map, and `job` adds the parameters of jobs."""

Function = TypeVar("Function", bound=Callable[..., object])


def plain_flag(argument: str) -> str:
    """Return the default flag of an argument, such as --yield for yield_ and --lora-target for lora_target."""
    return f"--{argument.rstrip('_').replace('_', '-')}"


def job(function: Function) -> Function:
    """Decorate a job: add its parameters to `FLAGS`, with default flags if no option has declared one."""
    code = function.__code__
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        FLAGS.setdefault(name, plain_flag(name))
    return function


def flag_of(argument: str) -> str:
    """Return the flag of an argument: the one in `FLAGS`, or the default flag."""
    return FLAGS.get(argument) or plain_flag(argument)


def as_cli_flags(text: str) -> str:
    """Return a message with flags in place of arguments."""
    return ARGUMENT.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    argument, value = found[1], found[2]
    if argument not in FLAGS:
        return argument.replace("_", "-") if "_" in argument and value is None else found[0]
    flag = FLAGS[argument]
    if value in (None, "True"):
        return flag
    if value == "False":
        return f"--no-{flag.removeprefix('--')}"
    text = re.fullmatch(r"'([^'\\]*)'", value)
    return f"{flag} {shlex.quote(text[1]) if text else value}"


def status_text(value: str) -> str:
    """Return a status or verdict of the JSON output as text, such as "not proved" for 'not_proved'."""
    return value.replace("_", " ")


def listed(names: Collection[str], most: int = 5) -> str:
    """Return names in quotes, joined by commas. If there are more than `most`, return the first ones and '...'."""
    return ", ".join(f"'{name}'" for name in islice(names, most)) + ", ..." * (len(names) > most)
