"""The guard against slowness: it notices what has become slower, and lets be what is noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from benchmarks import check
from benchmarks.check import Count, Figure, Timed, is_higher
from benchmarks.models.files import chain


def sure(middle: float) -> Figure:
    """A figure without noise."""
    return Figure(middle, middle, middle, 1)


class Clock:
    """A clock that steps alone move: each takes its seconds, give or take a random share of them."""

    def __init__(self, noise: float = 0.0) -> None:
        self.now, self._noise, self._draw = 0.0, noise, np.random.default_rng(0)

    def step(self, seconds: float) -> None:
        """Let a step take its time."""
        self.now += seconds * (1 + self._noise * abs(self._draw.standard_normal()))

    def timed(self, ours: float, reference: float = 0.01) -> Timed:
        """A step of so many seconds beside a reference."""
        return Timed(partial(self.step, ours), partial(self.step, reference), lambda: self.now)


def test_a_ratio_is_that_of_the_seconds_whatever_the_machine_is_like() -> None:
    for machine in (1.0, 7.0):
        figure = Clock().timed(0.03 * machine, 0.01 * machine).figure(5)
        assert (figure.middle, figure.low, figure.high) == pytest.approx((3.0, 3.0, 3.0))


@pytest.mark.parametrize(("slower", "told"), [(1.0, False), (1.05, False), (1.3, True), (0.5, False)])
def test_only_what_is_slower_beyond_the_noise_is_told(slower: float, told: bool) -> None:
    before = Clock(noise=0.2).timed(0.03).figure(15)
    assert before.high > before.low
    now = Clock(noise=0.2).timed(0.03 * slower).figure(15)
    assert is_higher(now, before, check.ALLOWED) is told


def test_what_is_lost_in_noise_is_not_told() -> None:
    before, now = Figure(3.0, 2.0, 4.0, 15), Figure(3.6, 2.6, 4.6, 15)
    assert not is_higher(now, before, check.ALLOWED)
    assert is_higher(Figure(3.6, 3.55, 3.65, 15), Figure(3.0, 2.95, 3.05, 15), check.ALLOWED)


def test_the_error_of_a_median_is_that_of_many_medians() -> None:
    draws = np.random.default_rng(0).standard_normal((20_000, 15))
    low, _, high = np.quantile(draws, (0.25, 0.5, 0.75), axis=1)
    told = np.median([Figure(0.0, a, b, 15).error for a, b in zip(low[:2000], high[:2000], strict=True)])
    assert told == pytest.approx(np.std(np.median(draws, axis=1)), rel=0.15)


def test_calls_are_counted_alike_and_more_work_is_more_calls() -> None:
    def step(n: int) -> None:
        for _ in range(n):
            len("")

    counted = [check.calls(partial(step, n)) for n in (100, 100, 200)]
    assert counted[0] == counted[1] == counted[2] - 100


def run(monkeypatch: pytest.MonkeyPatch, file: Path, words: list[str], cases: list[tuple[str, Timed | Count]]) -> int:
    """The command, where these cases are all there are."""

    def given(folder: Path) -> Iterator[tuple[str, Timed | Count]]:
        yield from cases

    monkeypatch.setattr(check, "cases", given)
    monkeypatch.setattr("sys.argv", ["check", "--baseline", str(file), *words])
    return check.main()


def test_a_baseline_is_stored_and_what_exceeds_it_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    here = partial(run, monkeypatch, file)
    assert here(["--write"], [("step", Clock().timed(0.03)), ("calls", Count(lambda: 1000))]) == 0
    assert check.stored(file) == ({"step": Figure(3.0, 3.0, 3.0, 15), "calls": sure(1000)}, True)
    assert here([], [("step", Clock().timed(0.031)), ("calls", Count(lambda: 1010)), ("new", Count(lambda: 1))]) == 0
    assert "new" in capsys.readouterr().out
    assert here([], [("step", Clock().timed(0.04)), ("calls", Count(lambda: 1030))]) == 1
    assert capsys.readouterr().err == "slower than the baseline: step, calls\n"
    numbers = count(1100, -100)  # what is too high once is not told
    assert here([], [("step", Clock().timed(0.02)), ("calls", Count(lambda: next(numbers)))]) == 0
    assert "lower: write the baseline anew" in capsys.readouterr().out


def test_where_there_is_no_baseline_of_these_versions_another_is_taken_and_counts_may_differ_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    here = partial(run, monkeypatch, file)
    assert here([], [("calls", Count(lambda: 1000))]) == 0  # there is nothing to compare with
    here(["--write"], [("calls", Count(lambda: 1000))])
    file.write_text(file.read_text().replace(check.versions(), "onnxruntime 0.1, Python 2.7"))
    assert here([], [("calls", Count(lambda: 1090))]) == 0
    assert "that of onnxruntime 0.1, Python 2.7 is taken" in capsys.readouterr().out
    assert here([], [("calls", Count(lambda: 1110))]) == 1
    here(["--write"], [("calls", Count(lambda: 5))])
    assert {"onnxruntime 0.1, Python 2.7", check.versions()} == json.loads(file.read_text()).keys()


def test_the_baseline_has_what_is_measured(tmp_path: Path) -> None:
    names = [name for name, _ in check.cases(tmp_path)]
    sections = json.loads(check.BASELINE.read_text())
    assert all(sorted(section["figures"]) == sorted(names) for section in sections.values())


def test_nodes_are_those_that_the_runtime_runs(tmp_path: Path) -> None:
    path = chain(8, tmp_path / "chain.onnx")
    assert check._optimized(path, tmp_path / "optimized.onnx") == 8
