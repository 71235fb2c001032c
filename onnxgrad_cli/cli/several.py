"""One command for several models: each is taken by a process of its own, so that what ends one ends no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxgrad_cli.cli.console import Console, table
from onnxgrad_cli.cli.document import Problem, document
from onnxgrad_cli.cli.options import complete_files
from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

STREAM = "-"

BESIDE = ("source model", "weights", "report")
"""Roles of files that a summary leaves out."""

POSIX = os.name == "posix"

INTERRUPT = signal.SIGINT if POSIX else signal.SIGTERM

HEAD = ("model", "verdict", "time", "files")

APART = "rename one, or take them in two commands"

PROGRAM = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from onnxgrad_cli.__main__ import main; main()"
)
"""The command, whether it is installed or not, and whatever lies in the folder where it is called."""

GRACE = 3.0
"""Seconds that a process has to answer an interrupt."""

ONCE = ("json", "quiet", "verbose", "traceback", "models", "jobs", "out", "out_dir")
"""Parameters that the processes are given otherwise, or not at all."""


def takes_several(metavar: str = "MODEL...") -> Callable[[Command], Command]:
    """Give a command the argument of one or more models, and --jobs."""

    def give(command: Command) -> Command:
        command = click.option(
            "--jobs", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
            help="How many of several models are taken at a time.",
        )(command)  # fmt: skip
        return click.argument("models", metavar=metavar, nargs=-1, required=True, shell_complete=complete_files)(
            command
        )

    return give


def run_several(console: Console, models: Sequence[str], jobs: int, targets: Mapping[str, str] | None = None) -> int:
    """Run the command that is being run once for each model, and print what came of all of them.

    Args:
        console: tells each as it ends.
        models: the files.
        jobs: how many at a time.
        targets: where what is made of each is written; None where nothing is.

    Returns:
        The highest of the exit codes.

    Raises:
        UsageError: a model is named twice, or is stdin.
    """
    if STREAM in models:
        raise UsageError("stdin (-) is one model: it can't be one of several", "give its file")
    twice = {model for model in models if models.count(model) > 1}
    if twice:
        raise UsageError(f"named twice: {listed(sorted(twice))}", "name each model once")
    context = click.get_current_context()
    options = list(typed(context, console.arguments))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    runs = [_Run(console.name, model, _words(console.name, model, options, targets), environment) for model in models]
    try:
        for run in _ended(runs, jobs):
            console.models.append(run.said)
            console.say(f"{len(console.models)}/{len(models)} {run.model}: {run.verdict} ({run.seconds:.1f} s)")
    finally:  # after an interrupt too: what has ended by then is told
        console.models.sort(key=lambda said: models.index(said["model"]))
        console.result(console.models, table(HEAD, [_row(said) for said in console.models]), asked=False)
    code = max(said["exit_code"] for said in console.models)
    if code:
        bad = [said["model"] for said in console.models if said["exit_code"]]
        console.failed(f"{len(bad)} of {len(models)} models: {listed(bad)}", "the document of each says why")
        for said in console.models:
            if said["error"]:
                console.tell(said["error"], f"{said['model']}: ")
    return code


def _row(said: Mapping[str, Any]) -> tuple[str, ...]:
    return said["model"], said["verdict"], f"{said['seconds']:.1f} s", " ".join(said["files"])


def typed(context: click.Context, arguments: Sequence[str]) -> Iterator[str]:
    """The options of a command line as they were typed, without those that `ONCE` names."""
    values, _, order = context.command.make_parser(context).parse_args(list(arguments[1:]))
    for param in dict.fromkeys(order):
        if not isinstance(param, click.Option) or param.name in ONCE:
            continue
        value = values[param.name or ""]
        flag = max(param.opts, key=len)
        if param.is_flag:
            yield flag if value or not param.secondary_opts else max(param.secondary_opts, key=len)
        else:
            yield from (f"{flag}={each}" for each in (value if param.multiple else [value]))


def _words(name: str, model: str, options: Sequence[str], targets: Mapping[str, str] | None) -> list[str]:
    """The command line for one model."""
    where = [] if targets is None else [f"--out={targets[model]}", "--out-dir="]
    return [sys.executable, "-P", "-c", PROGRAM, name, *options, *where, "--json", "--", model]


def _ended(runs: Sequence[_Run], jobs: int) -> Iterator[_Run]:
    """The runs as they end; where this is left by an error, those that still run are interrupted."""
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
            if wait(futures, GRACE).not_done:
                for run in runs:
                    run.end(signal.SIGKILL if POSIX else INTERRUPT)
            raise


class _Run:
    """One model in a process of its own.

    Attributes:
        said: its document, once it has ended.
        seconds: how long it took.
    """

    def __init__(self, name: str, model: str, words: list[str], environment: Mapping[str, str]) -> None:
        self.name, self.model = name, model
        self._words, self._environment = words, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self.said: dict[str, Any] = {}
        self.seconds = 0.0

    def __call__(self) -> None:
        """Run it to its end."""
        if self._asked:
            return
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self._words,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal comes to us alone, who hand it on once
        )
        if self._asked:
            self.end(INTERRUPT)
        out, err = self._process.communicate()
        self.seconds = time.perf_counter() - start
        try:
            said = json.loads(out)
        except ValueError:  # it ended without a word
            last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {self._process.returncode}"]
            said = document(self.name, 1, None, Problem(f"the process ended: {last[0]}"), [])
        head = {"version": said.pop("version"), "command": said.pop("command"), "model": self.model}
        self.said = {**head, **said}
        self.said |= {"verdict": self.verdict, "seconds": round(self.seconds, 3), "files": _written(said["result"])}

    def end(self, number: int) -> None:
        """Send it a signal, and begin it no more."""
        self._asked = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def verdict(self) -> str:
        """What came of it, in a word or a line."""
        error, found = self.said["error"], self.said["result"] or {}
        status = found.get("verdict" if self.name == "check" else "status") or self.said["status"]
        proof = found.get("proof") if self.name == "build" else None
        words = [status, *([proof["verdict"]] if proof else [])]
        return ", ".join(words) if not error or found else f"{self.said['status']}: {error['message']}"


def _written(result: Any) -> list[str]:
    """The files of a report that are new."""
    files = result.get("files", []) if isinstance(result, dict) else []
    return [file["path"] for file in files if isinstance(file, dict) and file["role"] not in BESIDE]


def targets_in(folder: str, models: Sequence[str], word: str) -> dict[str, str]:
    """Where what is made of each model goes: into a folder, or beside it where none is named.

    Raises:
        UsageError: two would go to one file, one would replace a model that is read, or the folder can't be made.
    """
    names = {model: f"{Path(model).stem}.{word}.onnx" for model in models}
    paths = {model: Path(folder or Path(model).parent) / name for model, name in names.items()}
    read, taken = {_place(model): model for model in models}, dict[str, str]()
    for model, path in paths.items():
        place = _place(path)
        if place in read:
            raise UsageError(f"what is made of '{model}' would replace '{read[place]}', which is read", APART)
        if taken.setdefault(place, model) != model:
            raise UsageError(f"what is made of '{taken[place]}' and of '{model}' would both be '{path}'", APART)
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"`out_dir`: '{folder}' can't be made: {error.strerror}") from None
    return {model: str(path) for model, path in paths.items()}


def _place(path: str | Path) -> str:
    """One text for all names of one file."""
    return os.path.normcase(os.path.realpath(path))
