"""onnx's inference ends the process on some operators whose input is of unknown type: it is not asked then."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import onnx
import pytest
from onnx import ModelProto, TensorProto, TypeProto, helper

from onnxgrad_cli.ir.onnx_inference import FRAGILE, HIDDEN, infer_shapes
from onnxgrad_cli.ir.types import dtype_of, shape_of

STANDARD = tuple({schema.name: schema for schema in onnx.defs.get_all_schemas()}.values())
VALUES = {
    "INT": TensorProto.DOUBLE, "INTS": [1, 1], "FLOAT": 1.0, "FLOATS": [1.0, 2.0], "STRING": "a", "STRINGS": ["a", "b"],
    "TENSOR": helper.make_tensor("t", TensorProto.FLOAT, [1], [1.0]),
}  # fmt: skip
"""A value for each type of attribute but for bodies."""


def behind_something_unknown(schema: onnx.defs.OpSchema) -> ModelProto:
    """A model in which an operator reads what an operator makes that onnx does not know."""
    values = {name: VALUES.get(attribute.type.name) for name, attribute in schema.attributes.items()}
    given = {name: value for name, value in values.items() if value is not None}
    read = [f"u{i}" for i in range(max(1, schema.min_input))]
    node = helper.make_node(schema.name, read, ["y"], domain=schema.domain, **given)
    nodes = [helper.make_node("Thing", [], read, domain="their"), node]
    graph = helper.make_graph(nodes, "g", [], [helper.make_value_info("y", TypeProto())])
    opset = onnx.defs.onnx_opset_version()
    imports = {"": opset, schema.domain: schema.since_version if schema.domain else opset, "their": 1}
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*entry) for entry in imports.items()])


def first_death(models: Iterable[ModelProto]) -> int | None:
    """Return the index of the first model whose inference ends the process that runs it, else None."""
    end, start = os.pipe()
    if pid := os.fork():
        os.close(start)
        with open(end, "rb") as survived:
            count = len(survived.read())
        return None if os.waitpid(pid, 0)[1] == 0 else count
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for model in models:
        for strict in (False, True):
            with suppress(Exception):  # onnx raises several kinds
                infer_shapes(model, strict_mode=strict, check_type=strict, data_prop=True)
        os.write(start, b".")
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a crash is tried in a process of its own")
def test_no_operator_behind_an_unknown_one_ends_the_process() -> None:
    rest, died = STANDARD, []
    while (at := first_death(map(behind_something_unknown, rest))) is not None:
        died.append(rest[at].name)
        rest = rest[at + 1 :]
    assert died == []


def test_all_that_can_be_is_inferred() -> None:
    """Of an EyeLike behind an unknown operator nothing, and all of one behind another EyeLike, in a body too."""
    text = """<ir_version: 10, opset_import: ["": 22, "their": 1]> g (float[3, 4] x, bool c) => (y, z, unknown) {
        y = If(c) <then_branch = a () => (double[3, 4] u) { t = Neg(x) u = EyeLike<dtype = 11>(t) },
          else_branch = b () => (double[3, 4] v) { w = Neg(x) v = EyeLike<dtype = 11>(w) }>
        z = EyeLike<dtype = 7>(y) thing = their.Thing(x) unknown = EyeLike<dtype = 11>(thing)
    }"""
    model = onnx.parser.parse_model(text)
    before = model.SerializeToString()
    found = infer_shapes(model, strict_mode=True)
    types = {value.name: value.type for value in found.graph.output}
    assert [dtype_of(types[name]) for name in ("y", "z")] == [TensorProto.DOUBLE, TensorProto.INT64]
    assert shape_of(types["z"]) == (3, 4) and not dtype_of(types["unknown"])
    assert [node.domain for node in found.graph.node] == ["", "", "their", ""]
    assert HIDDEN not in {entry.domain for entry in found.opset_import}
    assert model.SerializeToString() == before


def test_the_operators_have_their_domains() -> None:
    assert all(onnx.defs.has(op_type, domain) for op_type, domain in FRAGILE.items())
