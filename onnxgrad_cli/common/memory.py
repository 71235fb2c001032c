"""A limit of memory for what models make onnx and onnxruntime do: 100 bytes of a file must not fill a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

GB = 2**30


def taken_memory() -> int:
    """The bytes of addresses that the process has; 0 on systems other than Linux, which do not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as sizes:  # asked thousands of times: the shortest way
            return int(sizes.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def free_memory() -> float:
    """The bytes that processes may still have, what the system only caches among them; infinitely many where it does
    not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            told = dict(line.split(":", 1) for line in lines)
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # only Linux has it
        return math.inf


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let the process take at most so many bytes more than it has; what wants more fails.

    numpy and onnx raise MemoryError then, and onnxruntime an error of its own. Only Linux tells a process what it has,
    so elsewhere there is no limit; a lower one that the user has set stays.
    """
    there = taken_memory()
    if not there:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = there + more
    if soft != resource.RLIM_INFINITY and soft <= limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
