"""`onnxgrad predict`: predictions are the model's outputs of each sample, in every format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxgrad_cli import (
    run_predict,
)
from onnxgrad_cli.data import open_data
from onnxgrad_cli.ir.types import tensor_type
from tests.cli_harness import Shell
from tests.jobs.test_evaluate import ARRAYS, X, outputs, two

random = np.random.default_rng(0)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(two(onnxgrad_classes=json.dumps({"cls": ["ant", "bee", "cat"]})), "m.onnx")
    np.savez("d.npz", **ARRAYS)
    return Shell(tmp_path, capsys)


def test_a_table_with_labels_is_predicted_from_as_it_was_trained_on(shell: Shell) -> None:
    """Columns that the one input takes are what the label leaves, in predict as in train."""
    rows = [[*map(float, x), "ant"] for x in X]
    text = "\n".join(",".join(map(str, row)) for row in [["a", "b", "c", "d", "kind"], *rows])
    (shell.folder / "t.csv").write_text(text)
    lines = [dict(zip("abcd", x, strict=True), kind="ant") for x in X.tolist()]
    (shell.folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for data in ("t.csv", "t.jsonl"):
        for how in (("--label", "kind"), ("--map", "kind=label")):
            done = shell("predict", "m.onnx", "--data", data, *how, "-o", "p.npz", "--force")
            assert done.code == 0, done.err
            np.testing.assert_allclose(np.load("p.npz")["cls"], outputs()[0], atol=1e-4)
    done = shell("predict", "m.onnx", "--data", "t.csv", "-o", "p.npz", "--force")
    assert done.code == 2 and done.facts[1:] == ("t.csv", "x", "4", "4", "5") and "`columns`" in done.hint
    done = shell("predict", "m.onnx", "--data", "t.csv", "--map", "kind=lable", "-o", "p.npz", "--force")
    assert done.code == 2 and done.facts == ("unknown_name", "columns", "lable")
    done = shell("attack", "m.onnx", "--data", "t.csv", "--map", "kind=label", "--output", "cls")
    assert done.code == 0, done.err
    done = shell("explain", "m.onnx", "--data", "t.csv", "--label", "kind", "--output", "cls", "--sample", "0")
    assert done.code == 0, done.err


@pytest.mark.parametrize("form", ["npz", "csv", "jsonl", "parquet"])
def test_predictions_are_written_as_data_are_read(shell: Shell, form: str) -> None:
    """What one form holds of numbers and names, all hold."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    done = shell("predict", "m.onnx", "--data", "d.npz", "-o", f"p.{form}")
    assert done.code == 0, done.err
    types = {value.name: value.type for value in two().graph.output}
    data = open_data(Path(f"p.{form}"), {"cls": types["cls"], "reg": types["reg"]})
    batch = data.batch(np.arange(len(data)))
    for name, wanted in zip(("cls", "reg"), outputs(), strict=True):
        np.testing.assert_allclose(batch[name], wanted, rtol=1e-6)
    kinds = open_data(Path(f"p.{form}"), {"cls_class": tensor_type(TensorProto.INT64, ["N"])}).batch(np.arange(45))
    np.testing.assert_array_equal(kinds["cls_class"], outputs()[0].argmax(1))
    assert b"ant" in Path(f"p.{form}").read_bytes() or form == "npz"


def test_a_number_that_is_none_and_an_axis_more_are_written_too(shell: Shell) -> None:
    text = """
        <ir_version: 8, opset_import: ["": 17]>
        roots (float[N, 2, 2] x) => (float[N, 2, 2] y) { y = Sqrt(x) }
    """
    onnx.save(parser.parse_model(text), "roots.onnx")
    np.savez("r.npz", x=np.array([[[1, 4], [9, -1]]], np.float32))
    assert shell("predict", "roots.onnx", "--data", "r.npz", "-o", "r.jsonl").code == 0
    assert json.loads(Path("r.jsonl").read_text()) == {"y": [[1, 2], [3, None]]}
    parquet = pytest.importorskip("pyarrow.parquet")
    assert shell("predict", "roots.onnx", "--data", "r.npz", "-o", "r.parquet").code == 0
    (row,) = parquet.read_table("r.parquet").column("y").to_pylist()
    assert row[0] == [1, 2] and row[1][0] == 3 and np.isnan(row[1][1])
    done = shell("predict", "roots.onnx", "--data", "r.npz", "-o", "r.xlsx")
    assert done.code == 2 and done.facts == ("wrong_value", "out", "r.xlsx") and ".jsonl, .parquet" in done.err


def test_tokens_of_different_lengths_are_predicted_whatever_the_input_is_called(shell: Shell) -> None:
    bag = """
        <ir_version: 10, opset_import: ["": 18]>
        bag (int64[N, T] words) => (float[N, 2] y)
        <float[4, 2] table = {0, 0, 1, 2, 3, 4, 5, 6}, int64[1] along = {1}>
        { rows = Gather(table, words)
          y = ReduceSum<keepdims = 0>(rows, along) }
    """
    onnx.save(onnx.parser.parse_model(bag), "bag.onnx")
    (shell.folder / "w.jsonl").write_text('{"words": [1, 2]}\n{"words": [3]}\n{"words": [1, 1, 1]}\n')
    done = shell("predict", "bag.onnx", "--data", "w.jsonl", "-o", "p.npz")
    assert done.code == 0, done.err
    assert "'words' has 1 to 3 tokens" in done.err
    np.testing.assert_array_equal(np.load("p.npz")["y"], [[4, 6], [5, 6], [3, 6]])
    (shell.folder / "w.jsonl").write_text('{"words": [1, 9]}\n')
    done = shell("predict", "bag.onnx", "--data", "w.jsonl", "-o", "q.npz")
    assert done.code == 2 and "'words' is 9 in sample 0" in done.err and "a table of 4 rows" in done.err


@pytest.mark.parametrize("batch", ["batch", "8"])
def test_predictions_are_the_models_outputs_of_each_sample(shell: Shell, batch: str) -> None:
    """Also of a model that takes eight samples at once, and there are 45."""
    onnx.save(two(batch, onnxgrad_classes=json.dumps({"cls": ["ant", "bee", "cat"]})), "m.onnx")
    done = shell("predict", "m.onnx", "--data", "d.npz", "--batch-size", "7", "--json")
    assert done.code == 0, done.err
    cls, reg = outputs()
    with np.load("m.predictions.npz") as found:
        assert set(found) == {"cls", "reg", "cls_class", "cls_label"} == set(done.json["outputs"])
        np.testing.assert_allclose(found["cls"], cls, rtol=1e-6)
        np.testing.assert_allclose(found["reg"], reg, rtol=1e-6)
        assert found["cls_class"].tolist() == cls.argmax(1).tolist()
        assert found["cls_label"].tolist() == np.array(["ant", "bee", "cat"])[cls.argmax(1)].tolist()
    assert shell("predict", "m.onnx", "--data", "d.npz", "-q").code == 0  # its own file may be replaced


def test_predictions_as_a_table(shell: Shell) -> None:
    import csv

    done = shell("predict", "m.onnx", "--data", "d.npz", "--output", "cls", "-o", "p.csv")
    assert done.code == 0, done.err
    assert b"\r" not in Path("p.csv").read_bytes()
    with Path("p.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["cls_0", "cls_1", "cls_2", "cls_class", "cls_label"] and len(rows) == 45
    found = np.array([[row[f"cls_{i}"] for i in range(3)] for row in rows], np.float32)
    np.testing.assert_array_equal(found, run_predict("m.onnx", "d.npz", "p.npz").outputs["cls"])
    refused = shell("predict", "m.onnx", "--data", "d.npz", "-o", "p.csv")
    assert refused.code == 2 and "--force" in refused.err
    assert shell("predict", "m.onnx", "--data", "d.npz", "-o", "p.txt").code == 2
    assert shell("predict", "m.onnx", "--data", "d.npz", "-o", "m.onnx").code == 2


def test_no_output_is_replaced_by_the_class_of_another(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4] x) => (float[n, 4] y, float[n, 4] OTHER) { y = Relu(x) OTHER = Neg(x) }"""
    for other in ("y_class", "y_label"):
        model = parser.parse_model(text.replace("OTHER", other))
        model.metadata_props.add(key="onnxgrad.classes", value='{"y": ["a", "b", "c", "d"]}')
        onnx.save(model, "z.onnx")
        done = shell("predict", "z.onnx", "--data", "d.npz", "-o", "p.npz")
        assert done.code == 2 and not Path("p.npz").exists(), done.err
        assert done.facts[1:] == (other, "y")
        found = run_predict("z.onnx", "d.npz", "p.npz", outputs=("y",)).outputs
        assert set(found) == {"y", "y_class", "y_label"} and found["y_label"][0] in "abcd"
        assert run_predict("z.onnx", "d.npz", "q.npz", outputs=(other,), force=True).outputs[other].min() < 0
        Path("p.npz").unlink()


def test_a_table_has_no_two_columns_of_one_name(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y, float[n] y_2)
    { y = Relu(x) y_2 = ReduceMin<axes = [1], keepdims = 0>(x) }"""
    onnx.save(parser.parse_model(text), "z.onnx")
    done = shell("predict", "z.onnx", "--data", "d.npz", "-o", "p.csv")
    assert done.code == 2 and done.facts == ("conflict", "y_2")
    assert "--output" in done.err and not Path("p.csv").exists()
    for name in ("p.jsonl", "p.npz"):
        assert shell("predict", "z.onnx", "--data", "d.npz", "-o", name).code == 0


FEW = np.array([[-2, -1, 0, 1]] * 3, np.float32)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("BFLOAT16", "float32"), ("FLOAT8E4M3FN", "float32"), ("FLOAT8E4M3FNUZ", "float32"),
        ("FLOAT8E5M2", "float32"), ("FLOAT8E5M2FNUZ", "float32"), ("INT4", "int8"), ("INT2", "int8"),
        ("UINT4", "uint8"), ("UINT2", "uint8"),
    ],
)  # fmt: skip
def test_outputs_in_types_that_numpy_lacks_are_numbers(kind: str, dtype: str) -> None:
    """Also beside an output that is called as the one in which they would be read."""
    to, sizes = TensorProto.DataType.Value(kind), ["n", 4]
    zero = [helper.make_tensor("z", to, [], [0])] if "INT" in kind else []
    cast = helper.make_node("Cast", ["x"], ["o"], to=to)
    made = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["o"]) if zero else cast
    types = {"x": TensorProto.FLOAT, "o": to, "o_read": TensorProto.FLOAT}
    ends = [helper.make_tensor_value_info(name, each, sizes) for name, each in types.items()]
    nodes = [made, helper.make_node("Identity", ["x"], ["o_read"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(np.float32(1), "s"), *zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    found = run_predict(model, {"x": FEW}).outputs
    assert found["o"].dtype == dtype
    np.testing.assert_array_equal(found["o"], np.clip(FEW, 0, 3) if kind.startswith("U") else FEW)
    np.testing.assert_array_equal(found["o_read"], FEW)


def test_an_output_that_is_not_of_samples_is_refused_by_name(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y, float z)
    { y = Relu(x) z = ReduceSum<keepdims=0>(x) }"""
    onnx.save(parser.parse_model(text), "z.onnx")
    done = shell("predict", "z.onnx", "--data", "d.npz", "-o", "p.npz")
    assert done.code == 2 and done.facts == ("wrong_shape", "z", "32") and "--output" in done.err
    assert shell("predict", "z.onnx", "--data", "d.npz", "--output", "y", "-o", "p.npz").code == 0
    done = shell("predict", "z.onnx", "--data", "d.npz", "--output", "w", "-o", "p.npz")
    assert done.code == 2 and done.facts == ("unknown_name", "outputs", "w")


def test_a_table_is_written_in_utf8_and_in_its_columns(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(two(onnxgrad_classes=json.dumps({"cls": ["émeu", "=1+1", "cat"]})), "u.onnx")
    monkeypatch.setattr("locale.getencoding", lambda: "ascii", raising=False)
    found = run_predict("u.onnx", "d.npz", "u.csv", outputs=("cls",))
    text = Path("u.csv").read_bytes().decode("utf-8")
    names = [line.rpartition(",")[2] for line in text.splitlines()[1:]]
    assert names == ["'=1+1" if name == "=1+1" else name for name in found.outputs["cls_label"].tolist()]
    assert found.samples == len(names) == 45 and found.files == [Path("u.csv")]
    in_memory = run_predict(onnx.load("u.onnx"), {"x": X}, outputs=("cls",))
    assert in_memory.files == [] and in_memory.samples == len(X)
    np.testing.assert_array_equal(in_memory.outputs["cls"], found.outputs["cls"])
