"""One command for several models: each is taken by a process of its own, so that what ends one ends no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxgrad_cli.cli.console import Console, table
from onnxgrad_cli.cli.options import complete_files
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

Value = TypeVar("Value")

STREAM = "-"

OPENED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""How names begin of what a process has open, as a shell's `<(...)` gives them: its children have it not."""

HEAD = ("model", "verdict", "time", "files")

APART = "rename one, or take them in two commands"

ONCE = ("json", "quiet", "verbose", "traceback", "models", "jobs", "out", "out_dir")
"""Parameters that the processes are given otherwise, or not at all."""


def takes_several(metavar: str = "MODEL...") -> Callable[[Command], Command]:
    """Give a command the argument of one or more models, and --jobs."""

    def give(command: Command) -> Command:
        command = click.option(
            "--jobs", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
            help="How many of several models are taken at a time.",
        )(command)  # fmt: skip
        return click.argument(
            "models", metavar=metavar, nargs=-1, required=True, type=TEXT, shell_complete=complete_files
        )(command)

    return give


def the_only(name: str, values: Sequence[Value]) -> Value | None:
    """What is given of an option that may be given for each of several models, where there is one.

    Raises:
        UsageError: there are several.
    """
    if len(values) > 1:
        raise UsageError(f"`{name}`: one model takes one", "leave the others out")
    return values[0] if values else None


def run_several(
    console: Console,
    models: Sequence[str],
    jobs: int,
    targets: Mapping[str, str] | None = None,
    each: Mapping[str, Sequence[Any]] | None = None,
) -> int:
    """Run the command that is being run once for each model, and print what came of all of them.

    Args:
        console: tells each as it ends.
        models: the files.
        jobs: how many at a time.
        targets: where what is made of each is written; None where nothing is.
        each: parameter -> its values, of options that may be given once for all models, or once for each.

    Returns:
        The highest of the exit codes.

    Raises:
        UsageError: a model is named twice, or is a stream; or an option is given several times, and not for each.
    """
    from onnxgrad_cli.cli.processes import Run, ended, words  # half of the time that help would take

    _check(models)
    context = click.get_current_context()
    own = {name: values for name, values in (each or {}).items() if len(values) > 1}
    for name, values in own.items():
        if len(values) != len(models):
            raise UsageError(
                f"`{name}`: {len(values)} are given for {len(models)} models", "one for all, or one for each"
            )
    options = list(typed(context, console.arguments, own))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    runs = []
    for at, model in enumerate(models):
        given = [f"{_flag(context, name)}={values[at]}" for name, values in own.items()]
        runs.append(Run(console.name, model, words(console.name, model, [*options, *given], targets), environment))
    try:
        for count, run in enumerate(ended(runs, jobs), start=1):
            console.say(f"{count}/{len(models)} {run.model}: {run.said['verdict']} ({run.seconds:.1f} s)")
    finally:  # after an interrupt too: what came of each that was begun is told
        console.models.extend(run.said for run in runs if run.said)
        console.result(console.models, table(HEAD, [_row(said) for said in console.models]), asked=False)
    code = max(said["exit_code"] for said in console.models)
    if code:
        bad = [said["model"] for said in console.models if said["exit_code"]]
        console.failed(f"{len(bad)} of {len(models)} models: {listed(bad)}", "the document of each says why")
        for said in console.models:
            if said["error"]:
                console.tell(said["error"], f"{said['model']}: ")
    return code


def _check(models: Sequence[str]) -> None:
    if STREAM in models:
        raise UsageError("stdin (-) is one model: it can't be one of several", "give its file")
    for model in models:
        if os.path.abspath(model).startswith(OPENED):
            raise UsageError(f"'{model}' is a stream: it can't be one of several models", "give its file")
    twice = {model for model in models if models.count(model) > 1}
    if twice:
        raise UsageError(f"named twice: {listed(sorted(twice))}", "name each model once")


def _row(said: Mapping[str, Any]) -> tuple[str, ...]:
    return said["model"], said["verdict"], f"{said['seconds']:.1f} s", " ".join(said["files"])


def _flag(context: click.Context, name: str) -> str:
    return next(max(param.opts, key=len) for param in context.command.params if param.name == name)


def typed(context: click.Context, arguments: Sequence[str], without: Collection[str] = ()) -> Iterator[str]:
    """The options of a command line as they were typed, without those that `ONCE` names, and others."""
    values, _, order = context.command.make_parser(context).parse_args(list(arguments[1:]))
    for param in dict.fromkeys(order):
        if not isinstance(param, click.Option) or param.name in {*ONCE, *without}:
            continue
        value = values[param.name or ""]
        flag = max(param.opts, key=len)
        if param.is_flag:
            yield flag if value or not param.secondary_opts else max(param.secondary_opts, key=len)
        else:
            yield from (f"{flag}={each}" for each in (value if param.multiple else [value]))


def targets_in(folder: str | None, models: Sequence[str], word: str) -> dict[str, str]:
    """Where what is made of each model goes: into a folder, or beside it where none is named.

    Raises:
        UsageError: a model is named twice, or is a stream; two would go to one file, one would replace a model that is
            read or go through a link, or the folder can't be made.
    """
    _check(models)
    names = {model: f"{Path(model).stem}.{word}.onnx" for model in models}
    paths = {model: Path(folder or Path(model).parent) / name for model, name in names.items()}
    read, taken = {_place(model): model for model in models}, dict[str, str]()
    for model, path in paths.items():
        place = _place(path)
        if place in read:
            raise UsageError(f"what is made of '{model}' would replace '{read[place]}', which is read", APART)
        if taken.setdefault(place, model) != model:
            raise UsageError(f"what is made of '{taken[place]}' and of '{model}' would both be '{path}'", APART)
        if path.is_symlink():  # a stranger may have left it: only a name that somebody has typed is followed
            raise UsageError(f"what is made of '{model}' would be '{path}', which is a link", "remove it, or name -o")
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out-dir: '{folder}' can't be made: {error.strerror}") from None
    return {model: str(path) for model, path in paths.items()}


def _place(path: str | Path) -> str:
    """One text for all names of one file."""
    return os.path.normcase(os.path.realpath(path))
