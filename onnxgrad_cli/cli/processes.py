"""Run a command for several models, each in a process of its own. At most `jobs` processes run at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgrad_cli.cli.terminal.document import Problem, document, files_of
from onnxgrad_cli.common.wording import status_text

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
