"""The table of operators and types: complete, up to date, and as the installed onnxruntime and the command do."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx
import onnxruntime
import pytest

from onnxgrad_cli.cli import run
from tests import type_support
from tests.autodiff.rows import ROWS, by_operator
from tests.autodiff.test_types import float_inputs
from tests.type_support import NO_KERNEL, NO_TYPE, TYPES, UNCOMPARED, WRONG, YES

REFUSED_CODE = 3
STALE = "run `make types`"
BY_OP = by_operator(ROWS)
PAIRS = list(itertools.product(BY_OP, TYPES))


def test_every_row_has_a_result_and_none_is_wrong() -> None:
    for results in type_support.stored().values():
        assert results.keys() == BY_OP.keys(), STALE
        for operator, types in results.items():
            assert types.keys() == set(TYPES), STALE
            for states in types.values():
                assert sum(states.values()) == len(BY_OP[operator]), STALE
                assert not [state for state in states if state.startswith(WRONG)], operator


def test_the_page_has_the_table() -> None:
    assert type_support.page() == type_support.PAGE.read_text(), "run `make docs`"


@pytest.mark.thinned(12, 3)
@pytest.mark.parametrize(("operator", "dtype"), PAIRS)
def test_a_row_comes_to_what_is_stored(operator: str, dtype: str) -> None:
    results = type_support.stored()
    if onnxruntime.__version__ not in results:
        pytest.skip(f"nothing is stored of onnxruntime {onnxruntime.__version__}: {STALE}")
    row = BY_OP[operator][len(BY_OP[operator]) // 2]
    assert type_support.state(row, dtype) in results[onnxruntime.__version__][operator][dtype], STALE


@pytest.mark.thinned(40, 8)
@pytest.mark.parametrize(("operator", "dtype"), PAIRS)
def test_the_command_derives_what_the_table_promises(operator: str, dtype: str, tmp_path: Path) -> None:
    for row in BY_OP[operator][:: max(len(BY_OP[operator]) // 2, 1)]:
        state = type_support.state(row, dtype)
        if state in (NO_KERNEL, NO_TYPE):
            continue
        _, model = type_support.written(row, dtype)
        assert model is not None
        onnx.save(model, tmp_path / "model.onnx")
        made = tmp_path / "made.onnx"
        by = [word for name in float_inputs(row) for word in ("--wrt", name)]
        code = run(["derive", str(tmp_path / "model.onnx"), "--kind", "vjp", *by, "-o", str(made)])
        assert code == (0 if state in (YES, UNCOMPARED) else REFUSED_CODE), str(row)
        if code == 0:
            type_support.loaded(onnx.load(made))
