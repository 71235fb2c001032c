"""Run one command for several models, each in a process of its own, so that a crash affects one model only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxgrad_cli.cli.parsing.click_option import TEXT, Command, option, together
from onnxgrad_cli.cli.parsing.shared_options import complete_files
from onnxgrad_cli.cli.terminal.console import Console, table
from onnxgrad_cli.cli.terminal.document import Problem, document, files_of
from onnxgrad_cli.common.flags import listed, status_text
from onnxgrad_cli.errors import UsageError, conflict, unwritable, wrong_value

Value = TypeVar("Value")

STREAM = "-"

OPENED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Prefixes of paths that refer to files this process has open, as a shell's `<(...)` does.

Child processes don't have these files open, so they can't read them.
"""

HEAD = ("model", "verdict", "time", "files")

APART = "rename one, or use two commands"

ONCE = ("json", "quiet", "verbose", "traceback", "models", "jobs", "out", "out_dir")
"""Parameters that are not passed to the processes as the user typed them: each process gets its own value, or none."""


def takes_several(metavar: str = "MODEL...") -> Callable[[Command], Command]:
    """Add the argument for one or more models, and --jobs, to a command."""
    count, words = click.IntRange(min=1), "Number of models that are processed at the same time."
    return together(
        click.argument("models", metavar=metavar, nargs=-1, required=True, type=TEXT, shell_complete=complete_files),
        option("--jobs", type=count, default=1, metavar="N", help=words, common=True),
    )


def the_only(name: str, values: Sequence[Value]) -> Value | None:
    """Return the value of an option that may be given once per model, if there is only one model.

    Return None if the option is not given.

    Raises:
        UsageError: there are several values.
    """
    if len(values) > 1:
        raise conflict(f"`{name}` can be given only once for a single model", "leave the others out")
    return values[0] if values else None


def run_several(
    console: Console,
    models: Sequence[str],
    jobs: int,
    targets: Mapping[str, str] | None = None,
    each: Mapping[str, Sequence[Any]] | None = None,
) -> int:
    """Run the current command once for each model, in processes, and print all results.

    Args:
        console: prints a line for each model when its run ends.
        models: the files of the models.
        jobs: the number of runs at the same time.
        targets: model -> its output file; None if the command writes no models.
        each: parameter -> its values, for options that may be given either once for all models, or once per model.

    Returns:
        The highest exit code.

    Raises:
        UsageError: a model is named twice or is stdin, or an option has several values, but not one per model.
    """
    # imported here because help does not need it, and the import would take a tenth of the time of help

    _check(models)
    context = click.get_current_context()
    own = {name: values for name, values in (each or {}).items() if len(values) > 1}
    for name, values in own.items():
        if len(values) != len(models):
            raise wrong_value(
                f"`{name}` is given {len(values)} times for {len(models)} models",
                "give one for all models, or one for each",
            )
    options = list(typed(context, console.arguments, own))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    runs = []
    for at, model in enumerate(models):
        given = [f"{_flag(context, name)}={values[at]}" for name, values in own.items()]
        runs.append(
            ModelProcess(console.name, model, words(console.name, model, [*options, *given], targets), environment)
        )
    try:
        for count, run in enumerate(ended(runs, jobs), start=1):
            console.say(f"{count}/{len(models)} {run.model}: {run.said['verdict']} ({run.seconds:.1f} s)")
    finally:  # after an interrupt too, so that the results of all finished runs are printed
        console.models.extend(run.said for run in runs if run.said)
        console.result(console.models, table(HEAD, [_row(said) for said in console.models]), asked=False)
    code = max(said["exit_code"] for said in console.models)
    if code:
        bad = [said["model"] for said in console.models if said["exit_code"]]
        why = f"{len(bad)} of {len(models)} models: {listed(bad)}"
        console.failed(Problem("failed", why, hint="see the error of each model"))
        for said in console.models:
            if said["error"]:
                console.tell(said["error"], f"{said['model']}: ")
    return code


def _check(models: Sequence[str]) -> None:
    if STREAM in models:
        raise conflict("stdin (-) can't be combined with other models", "pass the model as a file")
    for model in models:
        if os.path.abspath(model).startswith(OPENED):
            raise conflict(
                f"'{model}' is a stream, which can't be combined with other models", "pass the model as a file"
            )
    twice = {model for model in models if models.count(model) > 1}
    if twice:
        raise conflict(f"models are named twice: {listed(sorted(twice))}", "name each model once")


def _row(said: Mapping[str, Any]) -> tuple[str, ...]:
    return said["model"], said["verdict"], f"{said['seconds']:.1f} s", " ".join(said["files"])


def _flag(context: click.Context, name: str) -> str:
    return next(max(param.opts, key=len) for param in context.command.params if param.name == name)


def typed(context: click.Context, arguments: Sequence[str], without: Collection[str] = ()) -> Iterator[str]:
    """Yield the options of a command line, as texts such as --name=VALUE, except for those in `ONCE` and `without`."""
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
    """Return a map: model -> its output file, in the folder, or beside the model if no folder is given.

    Raises:
        UsageError: a model is named twice or is stdin; two outputs would be the same file; an output would replace an
            input model; or an output is a link.
        OnnxgradError: the folder can't be created.
    """
    _check(models)
    names = {model: f"{Path(model).stem}.{word}.onnx" for model in models}
    paths = {model: Path(folder or Path(model).parent) / name for model, name in names.items()}
    read, taken = {_place(model): model for model in models}, dict[str, str]()
    for model, path in paths.items():
        place = _place(path)
        if place in read:
            raise conflict(f"the output for '{model}' would replace the input '{read[place]}'", APART)
        if taken.setdefault(place, model) != model:
            raise conflict(f"the outputs for '{taken[place]}' and '{model}' would both be '{path}'", APART)
        if path.is_symlink():  # an attacker may have created it: links are followed only in names that the user typed
            raise UsageError(
                f"the output for '{model}' would be '{path}', which is a link",
                "remove it, or name -o",
                code="unwritable_file",
            )
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(f"`out_dir`: '{folder}' can't be created: {error.strerror}") from None
    return {model: str(path) for model, path in paths.items()}


def _place(path: str | Path) -> str:
    """Return a text that is equal for all paths of the same file."""
    return os.path.normcase(os.path.realpath(path))


POSIX = os.name == "posix"

INTERRUPT = signal.SIGINT if POSIX else signal.SIGTERM

PROGRAM = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from onnxgrad_cli.__main__ import main; main()"
)
"""Python code that runs onnxgrad from these sources, even if it is not installed."""

GRACE = 3.0
"""Seconds that a process has to end after an interrupt."""


def words(name: str, model: str, options: Sequence[str], targets: Mapping[str, str] | None) -> list[str]:
    """Return the command line of the process for one model. It ignores Python modules in the working directory."""
    where = [] if targets is None else [f"--out={targets[model]}"]
    return [sys.executable, "-P", "-c", PROGRAM, name, *options, *where, "--json", "--", model]


def ended(runs: Sequence[ModelProcess], jobs: int) -> Iterator[ModelProcess]:
    """Start the runs, and yield each run when it ends.

    If an error ends the loop, interrupt the processes that still run.
    """
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run): run for run in runs}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                run.end(INTERRUPT)
            if wait([future for future in futures if not future.cancelled()], GRACE).not_done:
                for run in runs:
                    run.end(signal.SIGKILL if POSIX else INTERRUPT)
            raise


class ModelProcess:
    """The run of a command for one model, in a process of its own.

    Attributes:
        said: the JSON document that the command has printed; {} until it has ended.
        seconds: the duration of the run.
    """

    def __init__(self, name: str, model: str, words: list[str], environment: Mapping[str, str]) -> None:
        self.name, self.model = name, model
        self._words, self._environment = words, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self.said: dict[str, Any] = {}
        self.seconds = 0.0

    def __call__(self) -> None:
        """Start the process, and wait until it ends."""
        if self._asked:
            return
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self._words,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's interrupt then reaches only the parent, which passes it on once
        )
        if self._asked:
            self.end(INTERRUPT)
        out, err = self._process.communicate()
        self.seconds = time.perf_counter() - start
        try:
            said = json.loads(out)
        except ValueError:  # the process ended without a document
            last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {self._process.returncode}"]
            code, why = (130, "interrupted") if self._asked else (1, f"the process ended: {last[0]}")
            said = document(self.name, code, None, Problem("interrupted" if self._asked else "failed", why), [])
        head = {"version": said.pop("version"), "command": said.pop("command"), "model": self.model}
        tail = {
            "verdict": _verdict(self.name, said),
            "seconds": round(self.seconds, 3),
            "files": files_of(said["result"]),
        }
        self.said = {**head, **said, **tail}

    def end(self, number: int) -> None:
        """Send the process a signal. If it has not started yet, it will not be started."""
        self._asked = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _verdict(name: str, said: Mapping[str, Any]) -> str:
    """Return the outcome of a run, in a few words, for the summary."""
    error, found = said["error"], said["result"] or {}
    status = found.get("verdict" if name == "check" else "status") or said["status"]
    proof = found.get("proof") if name == "build" else None
    if error and not found:
        return f"{status_text(said['status'])}: {error['message']}"
    return ", ".join(map(status_text, [status, *([proof["verdict"]] if proof else [])]))
