"""The search for data that a model takes."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.feeds import SEARCH, TRIES, DescribedModel, finite, first_run, index_limits


@pytest.mark.parametrize("seconds", [0.0, SEARCH / 2])
def test_a_search_ends_where_its_tries_take_long(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tries = 0.0, list[Arrays]()
    monkeypatch.setattr(time, "process_time", lambda: now)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[n, m] x) => (float[n, m] y) { y = Mul(x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    training = build(model, Options(train=("w",))).model

    def fail(feeds: Arrays) -> Arrays:
        nonlocal now
        now += seconds
        tries.append(feeds)
        raise ValueError("it takes other sizes")

    with pytest.raises(ValueError, match="other sizes"):
        first_run(fail, DescribedModel(training, describe(training)), np.random.default_rng(0), {}, {})
    assert len(tries) == TRIES if seconds else len(tries) > TRIES


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ("y = Gather(table, i)", 7),
        ("y = Gather<axis = 1>(table, i)", 5),
        ("c = Cast<to = 6>(i) u = Unsqueeze(c, zero) y = Gather(table, u)", 7),
        ("h = Gather<axis = 1>(table, i) y = Gather(table, i)", 5),
        ("h = Neg(i) y = Gather(table, h)", None),
        ("f = Identity(table) y = Gather<axis = 1>(f, i)", 5),
        ("e = GatherElements<axis = 1>(table, i) y = Neg(e)", 5),
        ("y = Gather(i, zero)", None),
    ],
)
def test_indices_stay_within_the_smallest_table_that_they_index(body: str, rows: int | None) -> None:
    """They may be cast, and the table may be copied; of computed ones nothing is known."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 18]> g (int64[n, m] i) => (float y) <int64[1] zero = {{0}}> {{ {body} }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((7, 5), np.float32), "table"))
    limits = index_limits(model, {})
    assert limits.get("i") == rows and set(limits) <= {"i", "zero"}


def test_tables_that_are_fed_have_the_rows_of_their_shape() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]> g (float[r, c] t, int64[n] i) => (float y) { y = Gather(t, i) }""")
    assert index_limits(model, {"t": [3, 2], "i": [4]}) == {"i": 3}
    assert index_limits(model, {"t": [0, 2], "i": [4]}) == {"i": 1}


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.array([1.0, np.inf]), False),
        (np.array([np.nan], np.float16), False),
        (np.array([1.0], np.float32), True),
        (np.array([1, 2]), True),
        (np.array([True]), True),
        (np.array(["text"]), True),
        (np.array(["text"], object), True),
        (np.array([], np.float32), True),
    ],
)
def test_finite_numbers(x: np.ndarray, expected: bool) -> None:
    assert finite(x) is expected
    assert finite([x])  # type: ignore[arg-type]
