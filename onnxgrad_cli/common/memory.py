"""Limit the memory that onnx and onnxruntime may use, because a model of 100 bytes can request any amount."""

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
    """Return the size of the process's address space in bytes; 0 on systems other than Linux, which don't report it."""
    try:
        # called thousands of times, and this is the fastest way
        with open("/proc/self/statm", "rb", buffering=0) as sizes:
            return int(sizes.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def free_memory() -> float:
    """Return the bytes of memory that processes can still use, without swap; infinity on systems other than Linux.

    Memory that the system only uses for caches counts as available.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            told = dict(line.split(":", 1) for line in lines)
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # only Linux has this file
        return math.inf


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """In the block, limit the address space of the process to `more` bytes above its current size.

    If a request for memory exceeds the limit, numpy and onnx raise MemoryError, and onnxruntime raises an error of its
    own. On systems other than Linux there is no limit, because they don't report the current size. If the user has set
    a lower limit, it stays.
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
