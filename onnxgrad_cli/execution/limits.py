"""Limits of time and memory for runs that nobody has asked for: to fold constants, to try sizes, to prove unasked.

A model may be made to run for ever, as by a Loop of 2^62 iterations, or to fill any memory, as by an Expand to 2^31.
What is cut short counts as a run that failed; no other one is begun then, lest each of many tries should last as long.
That is so for a whole job (`one_patience`), whichever of its parts began the run.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import OnnxgradError

SECONDS, MOST_SECONDS = 6.0, 60.0
"""Of the processor, where the work of runs is not known: for one, and for all of a job whose model is small; for all of
any job."""

SECONDS_PER_BYTE, SECONDS_PER_NODE, FEW_NODES = 0.5e-6, 0.05, 100
"""What a proof may take more for each byte of weights, and for each node of the file beyond a few: most real models
take a second."""

SECONDS_PER_OPERATION, MOST_FOR_OPERATIONS = 3e-8, 120.0
"""What runs may take more for each floating-point operation that is known of one: a proof takes some twenty runs, of
which the slowest do a billion operations in two seconds, so that this is ten times what is needed, or
for the largest four times."""

MEMORY = 4 * GB
"""Bytes beyond what the process has when a session is opened or run."""

WITHOUT_MEMORY = ("bad_alloc", "Failed to allocate memory")
"""What onnxruntime's errors say where there is no memory left."""


T = TypeVar("T")
R = TypeVar("R")


class OverLimit(OnnxgradError):
    """A run took more time or memory than runs may that nobody has asked for."""

    def __init__(self, what: str) -> None:
        super().__init__(f"to run the model takes more than {what}", "give smaller sizes, or data of your own")


class _Stop(Exception):
    """Raised in a thread that runs a model by Python code."""


class Patience:
    """What is left for runs: nothing any more when one of them was cut short.

    Attributes:
        spent: by which limit one was; "" while none was.
        left: seconds of the processor that runs may still take in all.
        each: those that one of them may take.
    """

    def __init__(self) -> None:
        self.spent = ""
        self.left = self.each = self._given = SECONDS

    def allow(self, weights: int, nodes: int, operations: int = 0) -> None:
        """Let runs take as long as may be for a model.

        Args:
            weights: its bytes.
            nodes: those of its file.
            operations: floating-point operations that are known of one run.
        """
        more = SECONDS_PER_BYTE * weights + SECONDS_PER_NODE * max(nodes - FEW_NODES, 0)
        work = min(SECONDS_PER_OPERATION * operations, MOST_FOR_OPERATIONS)
        given = min(SECONDS + more, MOST_SECONDS) + work
        self.each = max(SECONDS + work, self.each)
        self.left += max(given - self._given, 0)
        self._given = max(given, self._given)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take the time of what is inside from what is left, whether runs take it or what is made of them."""
        left, start = self.left, time.process_time()
        try:
            yield
        finally:
            self.left = min(self.left, left - (time.process_time() - start))
            if self.left <= 0 and not self.spent:
                self.spent = f"{self._given:.3g} s"


_shared: ContextVar[Patience | None] = ContextVar("shared", default=None)
"""That of the whole job, whether or not what it does now is limited."""

_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)
"""That of what is done now; None where there are no limits."""


@contextmanager
def one_patience() -> Iterator[None]:
    """Let all limits inside, which belong to one job, be those of one patience; they do not begin by that."""
    token = _shared.set(_shared.get() or Patience())
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def unasked(limited: bool = True) -> Iterator[Patience | None]:
    """Limit the runs inside, by `SECONDS` and `MEMORY` each; not those that the user has asked for.

    Yields:
        What says whether one was cut short; None where there are no limits.
    """
    outer = _patience.get()
    if not limited or outer is not None:
        yield outer
        return
    token = _patience.set(_shared.get() or Patience())
    try:
        yield _patience.get()
    finally:
        _patience.reset(token)


@contextmanager
def limited() -> Iterator[Patience | None]:
    """Keep what is inside, which opens or runs a session, within the limits, if there are any.

    Raises:
        OverLimit: it is beyond one of them, or something before it was.
    """
    patience = _patience.get()
    if patience is None:
        yield None
        return
    if patience.spent:
        raise OverLimit(patience.spent)
    try:
        with limited_memory(MEMORY):
            yield patience
    except Exception as error:  # onnxruntime's exceptions share no base class
        if isinstance(error, MemoryError) or any(text in str(error) for text in WITHOUT_MEMORY):
            patience.spent = f"{MEMORY / GB:g} GB of memory"
        if patience.spent:
            raise OverLimit(patience.spent) from None
        raise


@contextmanager
def counted() -> Iterator[None]:
    """Count the time of what is inside, as the drawing of data, as that of runs, if these have a limit.

    Raises:
        OverLimit: there is none left.
    """
    with limited() as patience, nullcontext() if patience is None else patience.taking():
        yield


def run_limited(run: Callable[..., Sequence[Any]], feeds: dict[str, Any], options: Any = None) -> Sequence[Any]:
    """The outputs of a run, which is cut short where it takes too long.

    Args:
        run: that of a session, or of an evaluator written in Python.
        feeds: by the names of inputs.
        options: makes the RunOptions of onnxruntime, for a session.

    Raises:
        OverLimit: the run was cut short, or one before it was.
        Exception: those of the run.
    """
    with limited() as patience:
        if patience is None:
            return run(None, feeds)
        given = () if options is None else (options(),)
        with patience.taking(), _WATCH.over(Stopping(patience, *given)):
            return run(None, feeds, *given)


def at_once(run: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """What a function that runs a model makes of some values, computed at the same time; together within the limits.

    Args:
        run: the function; its runs share nothing that they change.
        values: what it is computed of.

    Raises:
        OverLimit: a run was cut short, or one before it was.
        Exception: that of the first run that raises.
    """
    from concurrent.futures import ThreadPoolExecutor

    with limited(), ThreadPoolExecutor(len(values)) as pool:  # which ends when all have
        runs = [pool.submit(copy_context().run, run, value) for value in values]
        return [each.result() for each in runs]


class Stopping:
    """Ends a run when it is time: onnxruntime's by a flag that it looks at between nodes, Python's by an exception."""

    def __init__(self, patience: Patience, options: Any = None) -> None:
        self._patience, self._options = patience, options
        self._thread = threading.get_ident()
        self._given = patience.each
        self.deadline = time.process_time() + min(patience.each, patience.left)

    def __call__(self) -> None:
        """Stop the run."""
        self._patience.spent = f"{self._given:.3g} s"
        if self._options is not None:
            self._options.terminate = True
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Stop))


class _Watch:
    """A thread that looks five times a second whether a run takes too long; it begins with the first run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[Stopping] = []
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, stopping: Stopping) -> Iterator[None]:
        """Watch over a run."""
        with self._lock:
            self._runs.append(stopping)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="onnxgrad-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                if stopping in self._runs:
                    self._runs.remove(stopping)

    def _look(self) -> None:
        while True:
            time.sleep(0.2)
            now = time.process_time()
            with self._lock:
                late = [stopping for stopping in self._runs if stopping.deadline < now]
                for stopping in late:
                    stopping()
                    self._runs.remove(stopping)


_WATCH = _Watch()
