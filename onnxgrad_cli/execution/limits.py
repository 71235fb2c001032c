"""Limits of time and memory for runs that the user did not request, such as runs that fold constants or try sizes.

A proof that the user did not request has these limits too. Without them a model could run for ever, such as with a Loop
of 2^62 iterations, or fill the memory, such as with an Expand to 2^31. A run that is cut short counts as failed. After
it no other run begins, because each of many attempts could take as long. All parts of a job share its limits
(`shared_budget`).

`check_ends` refuses a model with a loop that never ends, because the first run of a training or a proof would not
return.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from onnx import ModelProto

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import keeps_going
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import body_of, captured_by, with_bodies

SECONDS, MOST_SECONDS = 6.0, 60.0
"""Limits in processor seconds, if the work of a run is unknown.

`SECONDS` is the limit of one run, and of all runs of a job together if its model is small. `MOST_SECONDS` is the limit
of all runs of a job together, whatever the size of the model.
"""

SECONDS_PER_BYTE, SECONDS_PER_NODE, FEW_NODES = 0.5e-6, 0.05, 100
"""For a proof, the limit of all runs is raised by these seconds per byte of weights and per node.

The first 100 nodes of the file don't count. The proof of most real models takes a second.
"""

SECONDS_PER_OPERATION, MOST_FOR_OPERATIONS = 3e-8, 120.0
"""If the number of operations of a run is known, limits are raised by these seconds per operation, up to the maximum.

A proof makes about twenty runs, and the slowest do a billion floating-point operations in two seconds. So the limit is
ten times the time that is needed, or four times for the largest models.
"""

MEMORY = 4 * GB
"""The most bytes by which opening or running a session may increase the memory of the process."""

WITHOUT_MEMORY = ("bad_alloc", "Failed to allocate memory")
"""Texts that onnxruntime's errors contain if memory is missing."""


T = TypeVar("T")
R = TypeVar("R")


class OverLimit(OnnxgradError):
    """A run that the user did not request exceeded the limit of time or memory for such runs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a run of the model takes more than {what}", "set smaller sizes, or pass your own data")


class _Stop(Exception):
    """Raised inside a thread that runs a model in Python code, to stop the run."""


class RunBudget:
    """The time that is left for runs that the user did not request. After a run was cut short, no other may begin.

    Attributes:
        spent: the limit that was exceeded, as a text such as '6 s'; "" if none was.
        left: processor seconds that all further runs may take together.
        each: processor seconds that one run may take.
    """

    def __init__(self) -> None:
        self.spent = ""
        self.left = self.each = self._given = SECONDS

    def allow(self, weights: int, nodes: int, operations: int = 0) -> None:
        """Raise the limits to suit the size of a model.

        Args:
            weights: the bytes of its weights.
            nodes: the number of nodes in its file.
            operations: the floating-point operations of one run, as far as they are known.
        """
        more = SECONDS_PER_BYTE * weights + SECONDS_PER_NODE * max(nodes - FEW_NODES, 0)
        work = min(SECONDS_PER_OPERATION * operations, MOST_FOR_OPERATIONS)
        given = min(SECONDS + more, MOST_SECONDS) + work
        self.each = max(SECONDS + work, self.each)
        self.left += max(given - self._given, 0)
        self._given = max(given, self._given)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Subtract the processor time that the block takes from the time that is left.

        The block contains runs, and work on their results.
        """
        left, start = self.left, time.process_time()
        try:
            yield
        finally:
            self.left = min(self.left, left - (time.process_time() - start))
            if self.left <= 0 and not self.spent:
                self.spent = f"{self._given:.3g} s"


_shared: ContextVar[RunBudget | None] = ContextVar("shared", default=None)
"""The limits that all `within_budget` blocks of a job share; None outside `shared_budget`.

Between these blocks the limits don't apply, but the time that is left is remembered.
"""

_patience: ContextVar[RunBudget | None] = ContextVar("patience", default=None)
"""The limits that apply at the moment; None if none apply."""


@contextmanager
def shared_budget() -> Iterator[None]:
    """Share one set of limits among all runs in the block, which is a whole job. `within_budget` applies the limits."""
    token = _shared.set(_shared.get() or RunBudget())
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def within_budget(limited: bool = True) -> Iterator[RunBudget | None]:
    """Apply the limits to the runs inside the block, which the user did not request.

    Args:
        limited: False applies no new limits. Those of a surrounding block still apply.

    Yields:
        The limits that apply, which show if a run was cut short; None if none apply.
    """
    outer = _patience.get()
    if not limited or outer is not None:
        yield outer
        return
    token = _patience.set(_shared.get() or RunBudget())
    try:
        yield _patience.get()
    finally:
        _patience.reset(token)


@contextmanager
def limited() -> Iterator[RunBudget | None]:
    """Enforce the limits that apply, if any, on the block, which opens or runs a session.

    Raises:
        OverLimit: the block exceeds a limit, or an earlier block did.
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
    """If limits apply, count the time of the block, which may draw random data, as time of a run.

    Raises:
        OverLimit: no time is left.
    """
    with limited() as patience, nullcontext() if patience is None else patience.taking():
        yield


def run_limited(run: Callable[..., Sequence[Any]], feeds: dict[str, Any], options: Any = None) -> Sequence[Any]:
    """Run a model and return the outputs. The run is cut short if it exceeds the limits that apply.

    Args:
        run: the `run` of a session or of an evaluator in Python.
        feeds: input -> its array.
        options: for a session, the class RunOptions of onnxruntime.

    Raises:
        OverLimit: the run was cut short, or an earlier one was.
        Exception: the run failed.
    """
    with limited() as patience:
        if patience is None:
            return run(None, feeds)
        given = () if options is None else (options(),)
        with patience.taking(), _WATCH.over(Stopping(patience, *given)):
            return run(None, feeds, *given)


def at_once(run: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Call a function that runs a model for several values in parallel, within the limits, and return the results.

    Args:
        run: the function. It must be safe to call in parallel.
        values: the arguments of the calls.

    Raises:
        OverLimit: a run was cut short, or an earlier one was.
        Exception: the first exception of a call.
    """
    from concurrent.futures import ThreadPoolExecutor

    with limited(), ThreadPoolExecutor(len(values)) as pool:  # the pool closes when all runs have ended
        runs = [pool.submit(copy_context().run, run, value) for value in values]
        return [each.result() for each in runs]


class Stopping:
    """Stops a run at its deadline. onnxruntime reads a flag between nodes; Python code is stopped by an exception."""

    def __init__(self, patience: RunBudget, options: Any = None) -> None:
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
    """A thread that checks five times a second if a run has passed its deadline. It starts with the first run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[Stopping] = []
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, stopping: Stopping) -> Iterator[None]:
        """Call `stopping` if the run in the block passes its deadline."""
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


MOST_ROUNDS = 2**31
"""Largest accepted number of iterations of a Loop that no condition ends. At 1 µs each they take 36 minutes."""


def check_ends(graph: Graph) -> None:
    """Raise an error if a Loop of the model would run for ever, whatever the data.

    A Loop whose number of iterations depends on the data is not checked. The user can end its run with a second
    interrupt.

    Args:
        graph: the model, an inference or a training model. Constants must have been moved out of the loop bodies.

    Raises:
        UnsupportedError: a loop runs for ever; the message names it.
    """
    for node in with_bodies(graph.nodes):
        rounds = _rounds(graph, node) if node.op_type == "Loop" else 0
        if rounds is None or rounds > MOST_ROUNDS:
            label = node.name or next(iter(node.output), "")
            count = "for ever" if rounds is None else f"for {rounds:,} iterations"
            raise UnsupportedError(
                f"node '{label}' (Loop) runs {count} without a condition that ends it earlier, so a step would not end",
                hint=f"export it with a condition, or with at most {MOST_ROUNDS:,} iterations",
            )


def _rounds(graph: Graph, node: Node) -> int | None:
    """Return the number of iterations of a Loop that no condition can end; None if the number is not limited.

    If a condition may end the Loop, or the number depends on the data, return 0.
    """
    trips, condition = (graph.constant(name) if name else None for name in node.input[:2])
    if (node.input[0] and trips is None) or (node.input[1] and (condition is None or not condition.all())):
        return 0
    body = body_of(node, "body")
    inner = Graph(ModelProto(graph=body))
    inner.initializers.update((n, graph.initializers[n]) for n in captured_by(body) if graph.constant(n) is not None)
    if not keeps_going(inner):
        return 0
    return int(trips.item()) if trips is not None else None
