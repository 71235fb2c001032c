"""Configure pytest for all tests: collection, threads, random numbers, and tests of the rows of a table."""

from __future__ import annotations

import functools
import gc
import os
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.cli_harness import Shell

# A shell makes background processes ignore SIGINT. Their child processes, which tests start, would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--row", default="*", metavar="PATTERN", help="of the tables, only the rows that look like this")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests with Python's garbage collector turned off, and exclude the collected objects from it afterwards.

    These objects live until the session ends. Scanning them again and again took half of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # at the default of 700, collections take 3 % of the time of the tests
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move parameter sets of tests marked `thinned(n, m)` from quick to slow, and from slow to long.

    One in n keeps the marks of its test. The others move once. Of those, all but one in m move a second time.
    """
    families: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("thinned"):
            families.setdefault((item.parent, getattr(item, "originalname", item.name), mark.args), []).append(item)
    for (*_, factors), family in families.items():
        for n in factors:
            representatives = set(_representatives(family, -(-len(family) // n)))
            family = [item for item in family if item not in representatives]
            for item in family:
                item.add_marker("long" if item.get_closest_marker("slow") else "slow")


def _representatives(family: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Choose `count` items that cover as many values of each parameter as possible.

    Ties are broken by a hash of the name, so that every process chooses the same items.
    """
    rest = sorted(family, key=lambda item: zlib.crc32(item.name.encode()))
    values = {item: {(name, id(value)) for name, value in vars(item)["callspec"].params.items()} for item in rest}
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    while len(chosen) < count:
        item = max(rest, key=lambda item: len(values[item] - seen))
        if not values[item] - seen:
            seen = set()
            continue
        rest.remove(item)
        chosen.append(item)
        seen |= values[item]
    return chosen


@functools.cache
def _torch() -> ModuleType:
    """Import PyTorch with one thread. Idle threads spin, which made the recurrent tests 14 times slower.

    The import takes seconds, and the process that distributes tests to workers doesn't need it.
    """
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """Seed the random generators of PyTorch and of the test module, so that a test doesn't depend on earlier ones."""
    _start_anew(request, request.node.nodeid)


def _start_anew(request: pytest.FixtureRequest, name: str) -> None:
    seed = zlib.crc32(name.encode())
    _torch().default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of device
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Return a shell in a folder with the model mlp.onnx and an empty folder out, without variables of onnxgrad."""
    from tests.cli_harness import MLP, Shell, save  # imported here, as most tests run no command

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONNXGRAD_")]:
        monkeypatch.delenv(name)
    (tmp_path / "out").mkdir()
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


Each = Callable[[Iterable[Any], Callable[[Any], object]], None]


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Each:
    """Return a function `each(rows, check)` that checks every row and then raises the errors of all rows together.

    Each error names its row. A row can be skipped like a test; if all rows are skipped, the test is skipped. The random
    generators are seeded for each row, so that `--row` runs a row with the same numbers as a run of all rows.
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
    """Print the number of rows that the tests checked and skipped."""
    rows: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") == "call":
            for name, counts in report.user_properties:
                rows.update(counts if name == "rows" else {})
    if rows:
        terminalreporter.write_line(f"{rows['checked']} rows of tables checked, {rows['skipped']} skipped")


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take steps in slices so small that small models are split."""
    from onnxgrad_cli.training.steps import sliced
    from onnxgrad_cli.training.steps.in_place_optimizer import InPlace

    monkeypatch.setattr(sliced, "SLICE", 7)
    monkeypatch.setattr(sliced, "ALONE", 5)
    monkeypatch.setattr(sliced, "MIN_SLICED_ELEMENTS", 12)  # b is not sliced
    monkeypatch.setattr(sliced, "MIN_SLICED_TOTAL", 12)
    monkeypatch.setattr(sliced, "update_of", InPlace)
