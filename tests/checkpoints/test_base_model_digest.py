"""The digest of a model that was trained: another one for all that computes otherwise, and the same for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.checkpoints.base_model_digest import is_base, untrained_digest
from tests.cli_harness import Shell

FLOAT = TensorProto.FLOAT


def tensor(values: object, name: str = "") -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def branch(kept: float, trained: float) -> onnx.GraphProto:
    """A body with a constant that is trained, and an initializer that is not."""
    nodes = [
        helper.make_node("Constant", [], ["inner"], value=tensor([trained] * 4)),
        helper.make_node("Mul", ["y", "inner"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["o"]),
    ]
    out = helper.make_tensor_value_info("o", FLOAT, None)
    return helper.make_graph(nodes, "then", [], [out], [tensor([kept] * 4, "bias")])


def model(
    function: str = "Tanh",
    opset: int = 13,
    node: str = "Relu",
    sparse: float = 1,
    index: int = 0,
    constant: float = 1,
    text: str = "a",
    kept: float = 2,
    trained: float = 3,
    outs: str = "yz",
    ins: str = "xv",
) -> ModelProto:
    body = helper.make_function(
        "my", "F", ["a"], ["b"], [helper.make_node(function, ["a"], ["b"])], [helper.make_opsetid("", opset)]
    )
    nodes = [
        helper.make_node("Constant", [], ["c"], value=tensor([constant])),
        helper.make_node("MatMul", ["x", "w"], ["h0"]),
        helper.make_node("Add", ["h0", "v"], ["h"]),
        helper.make_node(node, ["h"], ["h2"]),
        helper.make_node("F", ["h2"], ["t"], domain="my"),
        helper.make_node("Mul", ["t", "s"], ["y0"]),
        helper.make_node("Mul", ["y0", "c"], ["y"]),
        helper.make_node("If", ["yes"], ["z"], then_branch=branch(kept, trained), else_branch=branch(0, trained)),
        helper.make_node("Identity", ["words"], ["said"]),
    ]
    values = numpy_helper.from_array(np.full(2, sparse, np.float32), "s")
    indices = numpy_helper.from_array(np.array([index, 3], np.int64), "i")
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(name, FLOAT, ["n", 4]) for name in ins],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outs],
        [
            tensor(np.full((4, 4), trained), "w"),
            numpy_helper.from_array(np.array(True), "yes"),
            helper.make_tensor("words", TensorProto.STRING, [1], [text.encode()]),
        ],
        sparse_initializer=[helper.make_sparse_tensor(values, indices, [4])],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=[body])


TRAINED = ("w", "inner")
DIGEST = untrained_digest(model(), TRAINED)


@pytest.mark.parametrize(
    "other",
    [
        {"node": "Sigmoid"}, {"function": "Sigmoid"}, {"opset": 14}, {"sparse": 2}, {"index": 1}, {"constant": 2},
        {"text": "b"}, {"kept": 5}, {"outs": "zy"}, {"outs": "y"}, {"ins": "vx"},
    ],
)  # fmt: skip
def test_a_model_that_computes_otherwise_is_another(other: dict) -> None:
    assert not is_base(DIGEST, model(**other), TRAINED)


def commented(found: ModelProto) -> None:
    found.doc_string = found.graph.doc_string = found.functions[0].doc_string = "a"
    found.graph.node[7].attribute[0].g.node[1].doc_string = found.graph.node[1].name = "a"
    found.metadata_props.add(key="a", value="b")


def stored_otherwise(found: ModelProto) -> None:
    body = found.graph.node[7].attribute[1].g.initializer[0]  # then_branch
    body.CopyFrom(helper.make_tensor("bias", FLOAT, [4], [2.0] * 4))
    found.graph.node[0].attribute[0].t.CopyFrom(helper.make_tensor("", FLOAT, [1], [1.0]))


def imported(found: ModelProto) -> None:
    found.opset_import.add(domain="nobody", version=3)


def reordered(found: ModelProto) -> None:
    first = TensorProto()
    first.CopyFrom(found.graph.initializer[0])
    del found.graph.initializer[0]
    found.graph.initializer.append(first)


@pytest.mark.parametrize("change", [commented, stored_otherwise, imported, reordered])
def test_a_model_that_computes_the_same_is_the_same(change: Callable[[ModelProto], None]) -> None:
    found = model()
    change(found)
    assert found != model() and untrained_digest(found, TRAINED) == DIGEST
    assert untrained_digest(model(trained=7), TRAINED) == DIGEST


def test_of_weights_in_another_file_the_numbers_are_left_out() -> None:
    found = model()
    found.graph.node[7].attribute[0].g.initializer[0].data_location = TensorProto.EXTERNAL
    assert untrained_digest(found, TRAINED) == DIGEST.partition("-")[0]
    assert is_base(DIGEST, found, TRAINED)


def test_a_digest_of_another_form_says_nothing() -> None:
    assert is_base("0123abcd-0123abcd", model(), TRAINED)


MODEL = """<ir_version: 8, opset_import: ["": 17, "my": 1]>
g (float[n, 4] x) => (float[n, 4] y) {{ h = MatMul(x, w) y = my.F(h) }}
<domain: "my", opset_import: ["": 17]> F (a) => (b) {{ b = {}(a) }}"""


@pytest.mark.parametrize("file", ["t.onnx.run/checkpoint.safetensors", "a.safetensors", "a.onnx_adapter"])
def test_a_run_is_not_taken_for_that_of_another_function(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint is refused, and of adapters there is a caution, also where a training begins with them."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    for name, op in (("a", "Tanh"), ("b", "Sigmoid")):
        found = onnx.parser.parse_model(MODEL.format(op))
        found.graph.initializer.append(tensor(np.arange(16).reshape(4, 4) / 16, "w"))
        onnx.save(found, f"{name}.onnx")
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    np.savez("d.npz", x=x, label=x)
    adapter = () if "run" in file else ("--lora", "2", "--adapter", file)
    done = shell("train", "a.onnx", "--data", "d.npz", "--epochs", "1", *adapter, "-o", "t.onnx")
    assert done.code == 0, done.err
    same = shell("export", file, "--model", "a.onnx", "-o", "e.onnx")
    assert same.code == 0 and "another model" not in same.err, same.err
    other = shell("export", file, "--model", "b.onnx", "-o", "e.onnx", "--force")
    assert other.code == (0 if adapter else 1) and "another model" in other.err
    for name in ("a", "b") if adapter else ():
        begun = shell(
            "train", f"{name}.onnx", "--data", "d.npz", "--epochs", "1", "--adapter-from", file, "-o", f"{name}.t.onnx"
        )
        assert begun.code == 0 and ("trained on another model" in begun.err) == (name == "b"), begun.err
