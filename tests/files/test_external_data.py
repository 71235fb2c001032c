"""External data: every reference that is read means one file inside the model's folder, and is written plainly."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.session import open_session
from onnxgrad_cli.files import check_external_data, load_external_data, load_model, own_model, save_model
from onnxgrad_cli.files.external_data import external_tensors, refer, reference_of, tensors
from tests.cli_harness import Shell
from tests.facts import facts, raises
from tests.files.test_writing import W, model_of, saved_outside


def referring(*entries: tuple[str, object]) -> ModelProto:
    """A model whose weight lies elsewhere, as these entries say."""
    model = model_of()
    (tensor,) = model.graph.initializer
    tensor.CopyFrom(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=W.shape))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries:
        tensor.external_data.add(key=key, value=str(value))
    return model


def written(folder: Path, *entries: tuple[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "d.bin").write_bytes(W.tobytes())
    (folder / "m.onnx").write_bytes(referring(*entries).SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    "location",
    [
        "../d.bin", "sub/../../d.bin", "sub/../d.bin", "..", "/d.bin", "//host/d.bin", r"\\host\d.bin", r"\d.bin",
        r"..\d.bin", "C:d.bin", "c:/d.bin", "d.bin\0", ".", "./", "/",
    ],
)  # fmt: skip
def test_a_location_that_is_no_plain_relative_path_is_refused(tmp_path: Path, location: str) -> None:
    source = written(tmp_path / "pkg", ("location", location))
    (tmp_path / "d.bin").write_bytes(W.tobytes())
    for read in (load_model, lambda source: own_model(onnx.load(source, load_external_data=False), source)):
        with pytest.raises(OnnxgradError) as error:
            read(source)
        assert facts(error.value)[:2] == ("unreadable_file", "w") and repr(location)[1:-1] in error.value.message


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("x" * 5000, "File name too long"),
        ("a/" * 3000 + "d.bin", "too long|missing"),
        ("loop", "symbolic links"),
        ("loop/d.bin", "symbolic links"),
        ("folder", "not a regular file"),
        ("pipe", "not a regular file"),
        ("d.bin/d.bin", "Not a directory"),
        ("out/d.bin", "outside the model's folder"),
    ],
)
def test_odd_names_are_told(tmp_path: Path, location: str, words: str) -> None:
    import os

    source = written(tmp_path / "pkg", ("location", location))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.bin").write_bytes(W.tobytes())
    (source.parent / "loop").symlink_to("loop")
    (source.parent / "folder").mkdir()
    (source.parent / "out").symlink_to("../elsewhere")
    os.mkfifo(source.parent / "pipe")
    model = onnx.load(source, load_external_data=False)
    for read in (check_external_data, load_external_data):
        with pytest.raises(OnnxgradError, match=words) as error:
            read(model, source)
        assert "'w'" in str(error.value) and len(str(error.value)) < 1000


COMMANDS = (
    "build m.onnx --loss mse -o out.onnx --no-verify",
    "derive m.onnx --kind vjp --wrt x -o out.onnx",
    "evaluate m.onnx --data d.npz --loss mse",
    "predict m.onnx --data d.npz -o p.npz",
    "train m.onnx --data d.npz --epochs 1 -o out.onnx",
    "view m.onnx -o p.html",
)


@pytest.mark.skipif(os.name == "nt", reason="the hint is of a shell that Windows lacks")
def test_a_hard_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes may be those of a secret file; a copy, by the command of the hint, is read."""
    folder = written(tmp_path / "a model", ("location", "d.bin")).parent
    (folder / "d.bin").rename(tmp_path / "secret")
    os.link(tmp_path / "secret", folder / "d.bin")
    monkeypatch.chdir(folder)
    shell = Shell(folder, capsys)
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 3), np.float32))
    with pytest.raises(OnnxgradError, match="2 names"):
        open_session(onnx.load(folder / "m.onnx", load_external_data=False), folder / "m.onnx")
    hints = set()
    for command in COMMANDS:
        refused = shell(*command.split())
        assert refused.code == 1 and "'d.bin' has 2 names (hard links)" in refused.err, refused.err
        assert not {"out.onnx", "p.npz", "p.html"} & {*os.listdir()}
        hints.add(next(line for line in refused.err.splitlines() if line.startswith("hint: ")))
    (hint,) = hints
    subprocess.run(["sh", "-ec", hint.partition("copy the file: ")[2]], check=True)
    for command in (COMMANDS[0], "predict m.onnx --data d.npz -o p.npz"):
        done = shell(*command.split())
        assert done.code == 0, done.err
    assert (tmp_path / "secret").stat().st_nlink == 1 and (tmp_path / "secret").read_bytes() == W.tobytes()


@pytest.mark.parametrize(
    "entries",
    [
        [("location", "./d.bin"), ("location", "./d.bin"), ("offset", "٠")],  # onnxruntime loads neither
        [("location", "d.bin"), ("offset", " 0_0"), ("length", "+48"), ("basepath", "/etc"), ("more", "?")],
        [("location", "d.bin"), ("offset", "0"), ("offset", "0")],
    ],
)
def test_references_are_written_anew(tmp_path: Path, entries: list[tuple[str, str]]) -> None:
    import onnxruntime

    source = written(tmp_path, *entries)
    model, path = load_model(source)
    save_model(model, tmp_path / "out.onnx", path)
    for each in (load_model(source)[0], onnx.load(tmp_path / "out.onnx", load_external_data=False)):
        found = [(entry.key, entry.value) for entry in each.graph.initializer[0].external_data]
        assert found == [("location", "d.bin"), ("offset", "0"), ("length", "48")]
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
    np.testing.assert_array_equal(session.run(None, {"x": np.eye(4, dtype=np.float32)})[0], W)
    assert numpy_helper.to_array(onnx.load(tmp_path / "out.onnx").graph.initializer[0]).tolist() == W.tolist()


@pytest.mark.parametrize("key", ["location", "offset", "length"])
def test_two_values_for_one_key_are_refused(key: str) -> None:
    entries: dict[str, object] = {"location": "d.bin", "offset": 0, "length": 48}
    with raises(OnnxgradError, "unreadable_file", "w"):
        list(
            map(reference_of, external_tensors(referring(*entries.items(), (key, "e.bin" if key == "location" else 4))))
        )


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_a_session_finds_data_wherever_their_links_lead(tmp_path: Path) -> None:
    """Two names of one file, below another folder, and a file of another one; the model is as it was after that."""
    for folder in ("blobs/deep", "links"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs/deep/1").write_bytes(np.float32([1, 2]).tobytes())
    (tmp_path / "blobs/2").write_bytes(np.float32([10, 20]).tobytes())
    (tmp_path / "blobs/model").touch()
    for name, target in (("a", "deep/1"), ("b", "deep/1"), ("c", "2"), ("model.onnx", "model")):
        (tmp_path / "links" / name).symlink_to(f"../blobs/{target}")
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    m (float[2] x) => (float[2] y) <float[2] a = {0, 0}, float[2] b = {0, 0}, float[2] c = {0, 0}>
    { y = Sum(x, a, b, c) }""")
    for tensor in model.graph.initializer:
        tensor.ClearField("float_data")
        refer(tensor, tensor.name, 0, 8)
    before = model.SerializeToString()
    session = open_session(model, tmp_path / "links/model.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": np.float32([100, 200])})[0], np.float32([112, 224]))
    assert model.SerializeToString() == before
    (tmp_path / "out").write_bytes(bytes(8))
    (tmp_path / "links/c").unlink()
    (tmp_path / "links/c").symlink_to("../out")
    with pytest.raises(OnnxgradError, match="outside the model's folder"):
        open_session(model, tmp_path / "links/model.onnx")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("../outside.bin", ("unreadable_file", "w", "outside.bin")),
        ("missing.bin", ("missing_file", "missing.bin", "w")),
        ("short.bin", ("unreadable_file", "short.bin", "w", "48", "47")),
    ],
)
def test_external_data_that_are_not_there(tmp_path: Path, location: str, expected: tuple[str, ...]) -> None:
    source = saved_outside(tmp_path / "a")
    (tmp_path / "outside.bin").write_bytes(W.tobytes())
    (tmp_path / "a" / "short.bin").write_bytes(W.tobytes()[:-1])
    model = onnx.load(source, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    with raises(OnnxgradError, *expected):
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
