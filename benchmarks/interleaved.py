"""Systems with a process each that take turns: a `Worker` waits for its turn at a pipe.

The threads of a runtime go on spinning for a while after a step (onnxruntime's for a tenth of a second), which would
disturb whoever comes next. So a turn ends when the process has come to rest.
This module needs the standard library alone: it is read by processes with very different packages.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgrad_cli.execution.interleaved_timing import block

FIRST = 3
"""Steps whose losses are compared, and which are never measured."""

RATE = 1e-3
"""The learning rate of every step."""

QUIET, PATIENCE = 0.05, 2.0
"""Seconds in which a process at rest computes next to nothing; and for which it is given to come to rest."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


class Refused(Exception):
    """A system can't take the step; the message is its own."""


class Worker:
    """A system in a process of its own.

    Attributes:
        losses: of the first steps.
        norm: of the gradients of the first step; None where the system does not tell.
    """

    def __init__(self, command: Sequence[str | Path], folder: Path) -> None:
        """Start it, and wait for its first steps.

        Args:
            command: what to run.
            folder: for what it writes on its standard error.

        Raises:
            Refused: it can't take the step, or ends.
        """
        self._errors = open(folder / "errors.txt", "w+")  # noqa: SIM115 (as long as the worker)
        root = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, cwd=root, env=environment,
        )  # fmt: skip
        try:
            begun = self._hear()
        except Refused:
            self.close()
            raise
        self.losses: list[float] = begun["losses"]
        self.norm: float | None = begun["norm"]

    def block(self) -> float:
        """Seconds of a step, in a block of them."""
        return self._ask("block")["seconds"]

    def memory(self) -> dict[str, float]:
        """Megabytes beyond the imports: the peak of `all`, and that of the `steps` alone."""
        return self._ask("memory")

    def close(self) -> None:
        """End it."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _ask(self, word: str) -> Any:
        assert self._process.stdin
        print(word, file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                if "refused" in found:
                    raise Refused(found["refused"])
                return found
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise Refused(lines[-1] if lines else f"ended with exit code {self._process.wait()}")


def serve(make: Callable[[], Any]) -> None:
    """Be a worker: open a step, take the first ones, then do what the pipe says until it is closed.

    Args:
        make: opens a step: an object with `step() -> loss`, and perhaps `norm() -> norm of the gradients`.
    """
    try:
        empty = _peak()
        system = make()
        losses = [system.step()]
        norm = system.norm() if hasattr(system, "norm") else None
        loaded = _peak()
        _forget_peak()
        losses += [system.step() for _ in range(FIRST - 1)]
    except Exception as error:  # the system's, of any kind: the table tells
        return _tell({"refused": _words(error)})
    rest()
    _tell({"losses": losses, "norm": norm})
    for line in sys.stdin:
        if line.strip() == "block":
            seconds = block(system.step)
            rest()
            _tell({"seconds": seconds})
        else:
            now = _peak()
            _tell({"all": max(now, loaded) - empty, "steps": now - empty})


def rest() -> None:
    """Wait until this process computes no more, for `PATIENCE` seconds at most."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(QUIET)
        if time.process_time() - before < QUIET / 20:
            return


def _words(error: Exception) -> str:
    """What an error says, in one line; onnxruntime's own words stand behind the place in its source, OpenVINO's below
    lines that name such places, or in its summary."""
    lines = str(error).split("\nSummary:\n")[-1].strip().splitlines() or [""]
    text = next((line for line in lines if not line.rstrip().endswith(":")), lines[0])
    return f"{type(error).__name__}: {text.split('[ONNXRuntimeError]')[-1].lstrip(' :-0123456789')[-300:]}"


def _tell(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _peak() -> float:
    """The most memory that this process has had, in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource

    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _forget_peak() -> None:
    """Let the peak begin anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
