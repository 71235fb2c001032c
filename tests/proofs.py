"""Write the package's file of proofs, with the tested gradients of each operator, for `onnxgrad list operators`.

The rules themselves show which operands have a gradient. The model of every row of the table is differentiated with
respect to each float operand separately. `python -m tests.proofs` updates the file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.domains import full_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import captured, reads
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.prepare import opset as opsets, prepare
from onnxgrad_cli.passes.prepare.quantized_operators import MEANINGS
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.coverage import PROOFS, operand_names, output_names
from tests.autodiff import rows as table
from tests.autodiff.definitions import test_classical, test_contrib, test_group_query, test_mixture
from tests.harness import Case, Const, forward_model

INTEGERS = "tests/passes/prepare/test_quanti"
"""Start of the paths of the tests of integer operators."""

FORMS = {
    f"tests/autodiff/definitions/{module.__name__.rpartition('.')[2]}.py": module.models
    for module in (test_classical, test_contrib, test_group_query, test_mixture)
}
"""Test file of operators of other domains -> the function that makes their models. These files have no rows.

The tests compare values with the kernel of each operator, and gradients with differences or PyTorch.
"""

PARTS = ("operands", "outputs")

RANK = {"gradient": 0, "zero": 1}
"""State of an operand -> its rank when states are merged. The lowest rank is kept; refusals have the highest rank."""


def operands(model: onnx.ModelProto, op_type: str, floats: Sequence[str]) -> dict[str, str]:
    """Return the states of the operands of the first node with an operator that are computed from float inputs.

    Returns:
        operand -> 'gradient', 'zero', or 'refused: ' and the reason. The operand 'captured' stands for values that
        subgraphs of the node capture.
    """
    places = _places(model, op_type)
    floats = [name for name in floats if name in places]
    try:
        states = _states(model, floats)
    except UnsupportedError:
        states = {}
        for name in floats:
            try:
                states |= _states(model, [name])
            except UnsupportedError as error:
                states[name] = _refusal(error)
    return merged((places[name], state) for name, state in states.items())


def _places(model: onnx.ModelProto, op_type: str) -> dict[str, str]:
    """Return the operand of the first node with an operator that each value of a model is used for."""
    nodes = list(model.graph.node)
    position = next((i for i, node in enumerate(nodes) if node.op_type == op_type), None)
    if position is None:
        return {}
    node = nodes[position]
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    names = operand_names(op_type, node.domain, opsets[node.domain])
    places = dict.fromkeys(captured(node), "captured")
    places |= {name: names[min(i, len(names) - 1)] for i, name in enumerate(node.input) if name}
    for before in reversed(nodes[:position]):
        for place in [places[name] for name in before.output if name in places]:
            places |= dict.fromkeys(reads(before), place)
    return places


def outputs(model: onnx.ModelProto, op_type: str, floats: Sequence[str]) -> dict[str, str]:
    """Return the state of each float output of an operator: whether gradients flow from it to float inputs.

    Returns:
        name of the output in the schema -> 'gradient', 'zero', or 'refused: ' and the reason.
    """
    node = next((node for node in model.graph.node if node.op_type == op_type), None)
    if node is None:
        return {}
    version = next(entry.version for entry in model.opset_import if entry.domain == node.domain)
    named = output_names(op_type, node.domain, version)
    results = {value.name for value in model.graph.output if is_float(value.type)}
    return merged(
        (named[min(i, len(named) - 1)], _through(model, floats, name))
        for i, name in enumerate(node.output if named else ())
        if name in results
    )


def _through(model: onnx.ModelProto, floats: Sequence[str], output: str) -> str:
    found: list[str] = []
    for name in floats:
        if "gradient" not in found:
            try:
                found.append(_states(model, [name], output)[name])
            except UnsupportedError as error:
                found.append(_refusal(error))
    return merged((output, state) for state in found).get(output, "zero")


def _refusal(error: UnsupportedError) -> str:
    return f"refused: {error.refusals[0].reason if error.refusals else error.message}"


def of_row(row: Case) -> tuple[dict[str, str], dict[str, str]]:
    """Return the state of each float operand of a row, and the state of each float output."""
    arrays = {f"x{i}": x.array if isinstance(x, Const) else x for i, x in enumerate(row.inputs) if x is not None}
    floats = [name for name, x in arrays.items() if isinstance(x, tuple) or np.asarray(x).dtype.kind == "f"]
    model = forward_model(row, symbolic=False)
    found = operands(model, row.op, floats)
    return found, outputs(model, row.op, floats)


def _states(model: onnx.ModelProto, wanted: Sequence[str], output: str | None = None) -> dict[str, str]:
    graph = Graph(onnx.ModelProto.FromString(model.SerializeToString()))
    prepare.normalise(graph)
    with patch.object(opsets, "newest_loaded", lambda limit: limit):  # don't depend on the installed onnxruntime
        prepare.infer_and_lower(graph, Training())
    op = Op(graph)
    seeds = {}
    for name in graph.output_names:
        if is_float(graph.types[name]) and output in (None, name):
            graph.add_input(f"g_{name}", graph.types[name])
            seeds[name] = op.val(f"g_{name}")
    gradients = differentiate(graph, seeds, wanted, op)
    return {name: "zero" if gradients[name] is None else "gradient" for name in wanted}


def merged(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the best state of each operand: 'gradient' if there is one, then 'zero', then the first refusal."""
    best: dict[str, str] = {}
    for name, state in found:
        if name not in best or RANK.get(state, 2) < RANK.get(best[name], 2):
            best[name] = state
    return best


def of_rows() -> dict[str, Any]:
    """Return the entry of each operator: its operands and outputs, the number of rows for each, and the test files."""
    found: dict[str, Any] = {}
    for file, rows in tables().items():
        for row in rows:
            entry = found.setdefault(full_name(row.op, row.domain), _entry([]))
            for part, states in zip(PARTS, of_row(row), strict=True):
                entry[part] += states.items()
            entry["rows"] += 1
            if file not in entry["files"]:
                entry["files"].append(file)
    for file, models in FORMS.items():
        for model in models():
            node = model.graph.node[0]
            entry = found.setdefault(full_name(node.op_type, node.domain), _entry([file]))
            floats = [value.name for value in model.graph.input if is_float(value.type)]
            entry["operands"] += operands(model, node.op_type, floats).items()
            entry["rows"] += 1
    for name, files in _files_of_tests().items():
        found.setdefault(name, _entry(files))
    for entry in found.values():
        for part in PARTS:
            proven = Counter(name for name, state in entry[part] if state == "gradient")
            entry["proven"][part] = dict(sorted(proven.items()))
            entry[part] = dict(sorted(merged(entry[part]).items()))
    return dict(sorted(found.items()))


def _entry(files: list[str]) -> dict[str, Any]:
    return {"operands": [], "outputs": [], "proven": {}, "rows": 0, "files": files}


def _files_of_tests() -> dict[str, list[str]]:
    """Return the test files of each operator with a definition, and of each integer operator.

    These are the files that contain the name of the operator.
    """
    home = Path(__file__).parents[1]
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    tests = {file.relative_to(home).as_posix(): file.read_text() for file in files}
    found = {
        full_name(each.op_type, each.domain): [name for name, text in tests.items() if f'"{each.op_type}"' in text]
        for each in registry.all_definitions()
    }
    integers = {name: text for name, text in tests.items() if name.startswith(INTEGERS)}
    for name in set(MEANINGS) - set(found):
        word = re.compile(rf"\b{name.partition('::')[2]}\b")
        found[name] = [file for file, text in integers.items() if word.search(text)]
    return found


def tables() -> dict[str, list[Case]]:
    """Return the rows in each file of the table."""
    names = [module.name for module in iter_modules(table.__path__)]
    return {f"tests/autodiff/rows/{name}.py": import_module(f"{table.__name__}.{name}").ROWS for name in names}


def update(**parts: Any) -> None:
    """Replace parts of the file of proofs."""
    old = json.loads(PROOFS.read_text()) if PROOFS.exists() else {"rows": {}, "published": {}}
    PROOFS.write_text(json.dumps({**old, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    update(rows=of_rows())
