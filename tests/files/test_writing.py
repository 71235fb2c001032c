"""Files of models: what is written is read again by onnx, whole or not at all, and nothing of a user's is replaced.

What the command line says of bad files stands in tests/cli/test_bad_input.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import (
    check_external_data,
    check_structure,
    check_target,
    load_external_data,
    load_model,
    save_bytes,
    save_model,
    writing,
)
from onnxgrad_cli.files.external_data import references, tensors
from onnxgrad_cli.files.outputs import is_ours

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def model_of(weight: np.ndarray = W) -> ModelProto:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def saved_outside(folder: Path, data: str = "weights.bin", weight: np.ndarray = W) -> Path:
    """A model whose weight lies in a file beside it, as onnx itself writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of(weight)
    (folder / data).unlink(missing_ok=True)
    convert_model_to_external_data(model, location=data, size_threshold=0)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def data_file(model: Path, content: bytes) -> Path:
    """The file in which the data of a written model lie."""
    return model.with_name(f"{model.name}.{hashlib.sha256(content).hexdigest()[:12]}.data")


def test_what_is_saved_is_what_onnx_loads(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    model = model_of()
    assert save_model(model, out) == [out]
    found = onnx.load(out)
    assert found.graph == model_of().graph
    assert is_ours(out)
    read, path = load_model(out)
    assert read == found and path == out
    assert sorted(tmp_path.iterdir()) == [out]


def test_external_data_stay_references_and_travel_as_they_are(tmp_path: Path) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    assert model.graph.initializer[0].data_location == TensorProto.EXTERNAL
    assert [(r.tensor, r.location, r.length) for r in references(model)] == [("w", "weights.bin", W.nbytes)]
    assert check_external_data(model, path) == ["weights.bin"]
    assert save_model(model, tmp_path / "a" / "beside.onnx", path) == [tmp_path / "a" / "beside.onnx"]
    (tmp_path / "b").mkdir()
    written = save_model(model, tmp_path / "b" / "m.onnx", path)
    assert written == [tmp_path / "b" / "m.onnx", data_file(tmp_path / "b" / "m.onnx", W.tobytes())]
    assert model.graph.initializer[0].external_data[0].value == "weights.bin", "what is in memory is as it was"
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(written[0]).graph.initializer[0]), W)
    load_external_data(model, path)
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), W)


def test_weights_too_large_for_protobuf_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 1000)
    weight = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float32)
    out = tmp_path / "m.onnx"
    assert save_model(model_of(weight), out) == [out, data_file(out, weight.tobytes())]
    (reference,) = references(onnx.load(out, load_external_data=False))
    assert reference.offset % writing.ALIGNMENT == 0
    assert out.stat().st_size < 1000
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(out).graph.initializer[0]), weight)


def test_a_users_files_are_never_replaced(tmp_path: Path) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(UsageError, match="is an input"):
        check_target(source, model, path, force=True)
    with pytest.raises(UsageError, match="is an input"):
        check_target(tmp_path / "a" / "weights.bin", model, path, force=True)
    with pytest.raises(UsageError, match="did not write it"):
        save_model(model_of(), foreign)
    assert foreign.read_text() == "mine" and not is_ours(foreign)
    check_target(foreign, force=True)
    with pytest.raises(OnnxgradError, match="is a directory"):
        check_target(tmp_path)
    with pytest.raises(OnnxgradError, match="there is no folder"):
        check_target(tmp_path / "no" / "m.onnx")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "weights.bin").write_bytes(b"others")
    save_model(model, tmp_path / "b" / "m.onnx", path, force=True)
    assert (tmp_path / "b" / "weights.bin").read_bytes() == b"others"


def test_what_breaks_off_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved_outside(tmp_path / "a")
    model, path = load_model(source)
    out = tmp_path / "b" / "m.onnx"
    out.parent.mkdir()
    save_bytes(b"\x08onnxgrad.version before", out)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    before = {file: file.read_bytes() for file in out.parent.iterdir()}
    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OnnxgradError, match="no space is left"):
        save_model(model, out, path, force=True)
    assert {file: file.read_bytes() for file in out.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("location", "words"),
    [("../outside.bin", "outside"), ("missing.bin", "missing"), ("short.bin", "cut short")],
)
def test_external_data_that_are_not_there(tmp_path: Path, location: str, words: str) -> None:
    source = saved_outside(tmp_path / "a")
    (tmp_path / "outside.bin").write_bytes(W.tobytes())
    (tmp_path / "a" / "short.bin").write_bytes(W.tobytes()[:-1])
    model = onnx.load(source, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    with pytest.raises(OnnxgradError, match=words):
        check_external_data(model, source)


def test_every_tensor_is_found(tmp_path: Path) -> None:
    """Those of nodes, of bodies and of functions too."""
    value = numpy_helper.from_array(np.zeros(2, np.float32), "t")
    inner = helper.make_node("Constant", [], ["c"], value=value)
    body = helper.make_graph([inner], "body", [], [helper.make_tensor_value_info("c", 1, [2])], [value])
    node = helper.make_node("If", ["cond"], ["y"], then_branch=body, else_branch=body)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("cond", 9, [])],
        [helper.make_tensor_value_info("y", 1, [2])],
        [value],
    )
    function = helper.make_function("my.ops", "F", [], ["c"], [inner], [helper.make_opsetid("", 17)])
    model = helper.make_model(graph, functions=[function], opset_imports=[helper.make_opsetid("", 17)])
    assert len(list(tensors(model))) == 1 + 2 * 2 + 1


def test_structure_is_checked_without_weights(tmp_path: Path) -> None:
    model = onnx.load(saved_outside(tmp_path), load_external_data=False)
    (tmp_path / "weights.bin").unlink()
    check_structure(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(OnnxgradError, match="NoSuchOperator"):
        check_structure(model, "'m.onnx'")
