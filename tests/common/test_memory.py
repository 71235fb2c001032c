"""Limits of memory, against what the system says of this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.common.memory import GB, free_memory, limited_memory, taken_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much a process takes")
resource = pytest.importorskip("resource")


def of_system(file: str, key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path(file).read_text())
    assert found
    return int(found[1]) * 1024


def test_sizes_are_those_of_the_system() -> None:
    assert abs(taken_memory() - of_system("/proc/self/status", "VmSize")) < GB / 64
    assert abs(free_memory() - of_system("/proc/meminfo", "MemAvailable")) < GB


def test_larger_requests_fail_within_the_block_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_memory(GB // 4):
        np.empty(GB // 16, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(GB // 2, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    np.empty(GB // 2, np.uint8)


def test_a_lower_limit_stays() -> None:
    with limited_memory(GB // 4):
        lower = resource.getrlimit(resource.RLIMIT_AS)
        with limited_memory(GB):
            assert resource.getrlimit(resource.RLIMIT_AS) == lower
        assert resource.getrlimit(resource.RLIMIT_AS) == lower


def test_the_limit_goes_with_an_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(KeyError), limited_memory(GB):
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_AS) == before
