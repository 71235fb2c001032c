"""What holds for every test: its collection, threads, the numbers that modules draw, tests of a table's rows."""

from __future__ import annotations

import functools
import gc
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import numpy as np
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what runs in the background: then no
    signal.signal(signal.SIGINT, signal.default_int_handler)  # process that a test starts could be interrupted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--row", default="*", metavar="PATTERN", help="of the tables, only the rows that look like this")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without Python's garbage collector, and hide from it what they are made of.

    None of it is garbage before the session ends, and going through it again and again took half of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `thinned(n)` one in n is quick, and the rest are slow; which, chance decided once."""
    families: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("thinned"):
            families.setdefault((item.parent, getattr(item, "originalname", item.name), *mark.args), []).append(item)
    for (*_, n), family in families.items():
        family.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in family[-(-len(family) // n) :]:
            item.add_marker("slow")


@functools.cache
def _torch() -> ModuleType:
    """PyTorch, on one thread: idle threads spin, which made the recurrent tests 14 times slower.

    It takes seconds to import, which the process that hands tests out to its workers does not need.
    """
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """PyTorch's generator and a module's own start anew for each test, whichever ran before in the same process."""
    _start_anew(request, request.node.nodeid)


def _start_anew(request: pytest.FixtureRequest, name: str) -> None:
    seed = zlib.crc32(name.encode())
    _torch().default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of device
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(seed).bit_generator.state


Each = Callable[[Iterable[Any], Callable[[Any], object]], None]


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Each:
    """`each(rows, check)` checks every row, and fails with all rows that failed, each by its text and its traceback.

    A row may be skipped as a test may; a test is skipped where all its rows are. Each row draws numbers of its own, so
    that `--row` runs one of them as it runs among the others.
    """

    def run(rows: Iterable[Any], check: Callable[[Any], object]) -> None:
        chosen = [row for row in rows if fnmatchcase(str(row), request.config.option.row)]
        skipped: list[str] = []
        failed: list[BaseException] = []
        for row in chosen:
            _start_anew(request, f"{request.node.nodeid} {row}")
            try:
                check(row)
            except pytest.skip.Exception as reason:
                skipped.append(f"{row}: {reason}")
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"row: {row}")
                failed.append(error)
        request.node.user_properties.append(("rows", {"checked": len(chosen) - len(skipped), "skipped": len(skipped)}))
        if failed:
            raise BaseExceptionGroup(f"{len(failed)} of {len(chosen)} rows fail", failed)
        if len(skipped) == len(chosen):
            pytest.skip("; ".join(skipped) or "no row looks like this")

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many rows the tests went through."""
    rows: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") == "call":
            for name, counts in report.user_properties:
                rows.update(counts if name == "rows" else {})
    if rows:
        terminalreporter.write_line(f"{rows['checked']} rows of tables checked, {rows['skipped']} skipped")
