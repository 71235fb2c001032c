"""Check the derivative of every row of the table in every float type, and write the table of docs/supported.md.

Each row's model is converted to a type, differentiated by `derive`, and run in stock onnxruntime. The results are
stored with the version of onnxruntime: `python -m tests.type_support` runs all rows, stores the results and writes the
table; --page only writes the table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.session import array_run
from onnxgrad_cli.ir.types import Arrays, dtype_of, is_float
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.verification.gradients.gradcheck import vjp_difference
from tests.autodiff.rows import ROWS, by_operator
from tests.autodiff.test_types import EPSILON, float_inputs, gradient, half_model, narrowed, noise, widened
from tests.harness import Case, fed, forward_model, sample

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "supported.md"
BEGIN, END = "<!-- begin of the table that tests/type_support.py writes -->", "<!-- end of the table -->"

TYPES = ("float32", "float64", "float16", "bfloat16")
YES, UNCOMPARED, REFUSED, NO_KERNEL, NO_TYPE, WRONG = "yes", "runs", "refused", "no kernel", "no type", "wrong"

SINGLE = 1e-3
"""Largest difference between gradients in float32 and float64, relative to the largest element.

It covers kernels that compute approximations.
"""


# -- one row ------------------------------------------------------------------------------------------------------


def written(row: Case, dtype: str) -> tuple[Case, onnx.ModelProto | None]:
    """Return a row in a type, and its model, or None if the operator does not accept the type."""
    narrow = narrowed(row, dtype)
    return narrow, half_model(narrow, dtype)


def loaded(model: onnx.ModelProto) -> Any:
    """Return a function that runs a model in stock onnxruntime. Errors of onnxruntime are not caught."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return array_run(onnxruntime.InferenceSession(model.SerializeToString(), options))


def state(row: Case, dtype: str) -> str:
    """Return the state of the derivative of a row in a type, with the reason if it is refused or wrong."""
    narrow, model = written(row, dtype)
    if model is None:
        return NO_TYPE
    try:
        forward = loaded(model)
        values = dict(
            zip([value.name for value in model.graph.output], forward(None, fed(model, sample(narrow))), strict=True)
        )
    except Exception:  # of many kinds, none of them public
        return NO_KERNEL
    names = float_inputs(row)
    outputs = [value.name for value in model.graph.output if is_float(value.type)]
    try:
        made = derive(model, "vjp", of=outputs, wrt=names)
    except UnsupportedError as error:
        return f"{REFUSED}: {error.refusals[0].reason if error.refusals else error.message}"
    said = read_derived(made)
    assert said is not None
    seeds = _seeds(model, values, outputs)
    feeds = {**fed(model, sample(narrow)), **{x: seeds[y] for y, x in zip(said.of, said.inputs, strict=True)}}
    try:
        run = loaded(made)
        found = dict(zip([value.name for value in made.graph.output], run(None, fed(made, feeds)), strict=True))
    except Exception as error:  # of many kinds, none of them public
        return f"{WRONG}: {str(error).splitlines()[0][:200]}"
    gradients = {x: found[output] for x, output in zip(said.wrt, said.outputs, strict=True)}
    if dtype == "float64":
        return _against_differences(narrow, model, seeds, gradients)
    return _against_float64(row, narrow, dtype, values, seeds, gradients)


def _seeds(model: onnx.ModelProto, values: Arrays, outputs: Iterable[str]) -> Arrays:
    rng = np.random.default_rng(5)
    types = {value.name: helper.tensor_dtype_to_np_dtype(dtype_of(value.type)) for value in model.graph.output}
    return {name: rng.standard_normal(np.shape(values[name])).astype(types[name]) for name in outputs}


def _against_differences(case: Case, model: onnx.ModelProto, seeds: Arrays, gradients: Arrays) -> str:
    """Return the state of gradients compared with differences, computed by the executor that the row names.

    Some kernels of onnxruntime compute in float32 internally.
    """
    forward = Executor(model, case.executor)

    def evaluate(point: Arrays) -> Arrays:
        return forward(fed(model, point))

    rng = np.random.default_rng(7)
    found = vjp_difference(evaluate, sample(case), seeds, gradients, rng, case.step, case.floor)
    return YES if found.error <= case.tolerance else f"{WRONG}: {found}"


def _against_float64(row: Case, narrow: Case, dtype: str, values: Arrays, seeds: Arrays, gradients: Arrays) -> str:
    """Return the state of gradients compared with gradients in the row's own type at the same rounded values."""
    wide = widened(row, narrow)
    own = forward_model(wide, symbolic=False)
    reference, outputs = gradient(own, wide)
    feeds = sample(wide)
    try:
        exact_values = Executor(own, row.executor)(fed(own, feeds))
        exact = Executor(reference, row.executor)
        wide_seeds = {f"g_{name}": seeds[name].astype(exact_values[name].dtype) for name in outputs}
        expected = exact({**fed(own, feeds), **wide_seeds})
    except Exception:  # of many kinds: onnx.reference does not run it
        return UNCOMPARED
    epsilon = EPSILON[dtype]
    for name in outputs:
        far = np.abs(values[name].astype(float) - exact_values[name])
        if not np.all(far <= 64 * epsilon * np.max(np.abs(exact_values[name]), initial=1.0)):
            return UNCOMPARED  # a value exceeds the range of the type, or a tie is broken differently
    moves = noise(exact, own, feeds, wide_seeds, float_inputs(row), expected, epsilon)
    for name, got in gradients.items():
        want = expected[f"g_grad_{name}"]
        largest = np.max(np.abs(want), initial=0.0)
        allowed = 3 * (moves[name] + epsilon * largest) + (SINGLE * largest if dtype == "float32" else 0.0)
        off = np.max(np.abs(got.astype(float) - want), initial=0.0)
        if got.shape != want.shape or not off <= allowed:
            if _has_ties(row, dtype):
                return UNCOMPARED
            return f"{WRONG}: {name} is off by {off:.2e}, not {allowed:.2e}"
    return YES


def _has_ties(row: Case, dtype: str) -> bool:
    """Return True if rounding to a type makes ties, which are broken differently in each type."""
    return dtype == "bfloat16" and (row.op == "MaxPool" or row.attrs.get("nearest_mode") == "ceil")


# -- all rows -----------------------------------------------------------------------------------------------------


def of_operator(rows: list[Case]) -> dict[str, dict[str, int]]:
    """Return the number of rows of an operator in each state, by type."""
    return {dtype: dict(Counter(state(row, dtype) for row in rows)) for dtype in TYPES}


def run_all() -> dict[str, dict[str, dict[str, int]]]:
    operators = dict(sorted(by_operator(ROWS).items()))
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return dict(zip(operators, pool.map(of_operator, operators.values()), strict=True))


def stored() -> dict[str, Any]:
    """Return the stored results by version of onnxruntime, the newest first."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return dict(sorted(found.items(), key=lambda entry: [int(part) for part in entry[0].split(".")], reverse=True))


# -- the page -----------------------------------------------------------------------------------------------------


def cell(states: Mapping[str, int]) -> str:
    """Return the text of a table cell for an operator and a type."""
    kinds = Counter[str]()
    for text, count in states.items():
        kinds[text.partition(":")[0]] += count
    if kinds[WRONG]:
        return WRONG
    refused = sorted({text.partition(": ")[2] for text in states if text.startswith(REFUSED)})
    if kinds[YES] or kinds[UNCOMPARED]:
        known = YES if kinds[YES] else "runs, not compared"
        return f"{known}; some forms refused: {'; '.join(refused)}" if refused else known
    if refused:
        return f"refused: {'; '.join(refused)}"
    return "no kernel" if kinds[NO_KERNEL] else "–"


def table() -> str:
    """Return the table of the page, with a row for each operator and a column for each type."""
    results = stored()
    (version, newest), *older = results.items()
    others = " and ".join(each for each, _ in older)
    lines = [f"Each cell is for onnxruntime {version}, and names {others} where the result differs there.", ""]
    lines += [f"| operator | {' | '.join(TYPES)} |", "| --- " * (len(TYPES) + 1) + "|"]
    for operator, types in newest.items():
        cells = []
        for dtype in TYPES:
            here = cell(types[dtype])
            there = [(each, cell(found.get(operator, types)[dtype])) for each, found in older]
            differing = [f"{each}: {text}" for each, text in there if text != here]
            cells.append("; ".join([here, *differing]).replace("|", "\\|"))
        lines.append(f"| {operator} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the document with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", action="store_true", help="write the table of what is stored")
    if not parser.parse_args().page:
        RESULTS.write_text(json.dumps({**stored(), onnxruntime.__version__: run_all()}, indent=1) + "\n")
    PAGE.write_text(page())
