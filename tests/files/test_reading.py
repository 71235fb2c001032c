"""Files of models are read, or an error names what is wrong with them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, parser

from onnxgrad_cli import files
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import (
    check_structure,
)
from tests.cli.test_bad_input import AS_ROOT, BUILD, refused
from tests.cli.test_hostile_files import in_function, mlp, refused as refused_model
from tests.cli_harness import (
    MLP,
    Shell,
    save,
)
from tests.files.test_writing import saved_outside


@pytest.fixture
def empty_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("command", ["build", "view"])
def test_strings_that_are_no_text(empty_shell: Shell, command: str) -> None:
    """numpy_helper decodes them, wherever they are read."""
    text = '<ir_version: 10, opset_import: ["": 21]> g (string[2] x) => (bool[2] y) { y = Equal(x, s) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.add(name="s", data_type=TensorProto.STRING, dims=[2], string_data=[b"\xff", b"a"])
    refused_model(empty_shell, model, "tensor 's' has a string that is not UTF-8", command=command)


def test_an_attribute_of_a_function_outside_of_one(empty_shell: Shell) -> None:
    model = mlp()
    model.graph.node[2].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    refused_model(empty_shell, model, "'alpha'", "'s' (Sigmoid)", "'slope'")


def test_an_absent_input_among_many(empty_shell: Shell) -> None:
    model = mlp()
    model.graph.node[1].op_type = "Sum"
    model.graph.node[1].input.append("")
    refused_model(empty_shell, model, f"'k' (Sum) has no input {len(model.graph.node[1].input) - 1}")


@pytest.mark.parametrize(
    "node",
    ["y = LayerNormalization(x, k, '')", "y = DFT(x, '', '')", "y = Clip(x, '', '')"],
    ids=["bias", "axis", "max"],
)
def test_an_absent_input_at_the_end(empty_shell: Shell, node: str) -> None:
    """It means what no input means there; onnxruntime ends the process on the first two."""
    text = f"""<ir_version: 8, opset_import: ["": 20]>
    g (float[1, 4, 2] x) => (float[1, 4, 2] y) <float[2] k = {{1, 2}}> {{ {node.replace("'", '"')} }}"""
    onnx.save(onnx.parser.parse_model(text), "m.onnx")
    result = empty_shell("build", "m.onnx", "--loss", "mse", "--grad-of-input", "x", "-o", "o.onnx")
    assert result.code == 0 and "proved" in result.err + result.out


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (
            "z, y = Scan <num_scan_inputs = 1, body: graph = b (float s, float v) => () { o = Add(s, v) }> (k, x)",
            "needs 2",
        ),
        ("y = Loop <body: graph = b (int64 i, bool t, float[2] s) => () { o = Relu(s) }> (n, c, x)", "needs 2"),
        ("y = If <then_branch: graph = b () => () {}, else_branch: graph = e () => () {}> (c)", "needs 1"),
    ],
)
def test_a_body_that_hands_out_nothing(empty_shell: Shell, node: str, told: str) -> None:
    """onnx's checker lets it pass, and onnxruntime opens the first."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[2] x) => (float[2] y) <float k = {{0}}, bool c = {{1}}, int64 n = {{3}}> {{ {node} }}""")
    refused_model(empty_shell, model, "has a body with 0 outputs", told)


def test_an_absent_input_among_many_in_a_function(empty_shell: Shell) -> None:
    """onnxruntime ends the process of the first, and of the second too, which lacks it by its call alone."""
    refused_model(empty_shell, in_function('c = Sum(a, "")'), "'c' (Sum) has no input 1")
    refused_model(empty_shell, in_function("c = Sum(a, b)"), "(Sum) has no input 1")


def normalized(op_type: str, opset: int, call: str = "", attributes: str = "", given: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}, "f": 1]>
    g (float[2, 2] x) => (float[2, 2] y) <float[2] s = {{1, 2}}> {{ y = f.m{call}(x, s) }}
    <domain: "f", opset_import: ["": {opset}]> m {attributes} (a, b) => (c) {{ c = {op_type} {given} (a, b) }}""")


@pytest.mark.parametrize(("op_type", "opset"), [("LayerNormalization", 14), ("SimplifiedLayerNormalization", 17)])
def test_a_normalization_of_onnxruntime_in_a_function(empty_shell: Shell, op_type: str, opset: int) -> None:
    """Without a stash_type onnxruntime ends the process there; with one it reads the model, as it does outside."""
    told = (f"'c' ({op_type}) in function 'm'", "stash_type")
    referred = {"attributes": "<t>", "given": "<stash_type: int = @t>"}
    refused_model(empty_shell, normalized(op_type, opset, given="<epsilon = 0.1>"), *told)
    refused_model(empty_shell, normalized(op_type, opset, **referred), *told)
    for model in (
        normalized(op_type, opset, "<t = 1>", **referred),
        normalized(op_type, opset, given="<stash_type = 1>"),
    ):
        assert onnxruntime.InferenceSession(model.SerializeToString()).get_outputs()[0].name == "y"
        check_structure(model)


@pytest.mark.parametrize("opset", [0, -3, 2**40])
def test_an_opset_that_never_was(empty_shell: Shell, opset: int) -> None:
    model = mlp()
    model.opset_import[0].version = opset
    refused_model(empty_shell, model, f"version {opset} of 'ai.onnx'")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_without_an_end(empty_shell: Shell) -> None:
    result = empty_shell("inspect", "/dev/zero")
    assert result.code == 1 and result.facts == ("unreadable_file", "zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.parametrize(
    "command",
    [
        ("inspect",), ("build", "--label", "t", "-o", "t.onnx"), ("derive", "-o", "d.onnx"), ("view", "-o", "v.html"),
        ("build", "--label", "t", "--artifacts", "folder"), ("expand", "-o", "e.onnx"),
        ("train", "--data", "d.npz", "--epochs", "1", "-o", "m.onnx"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_pipe_is_read_like_a_file(empty_shell: Shell, command: tuple[str, ...]) -> None:
    os.mkfifo(empty_shell.folder / "pipe")
    np.savez(empty_shell.folder / "d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    data = mlp().SerializeToString()
    writer = threading.Thread(target=(empty_shell.folder / "pipe").write_bytes, args=(data,))
    writer.start()
    result = empty_shell(*command, "pipe")
    writer.join()
    assert result.code == 0, result.err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_fails_with_a_model_from_a_pipe_waits_for_no_other(
    empty_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(empty_shell.folder / "pipe")
    writer = threading.Thread(target=(empty_shell.folder / "pipe").write_bytes, args=(mlp().SerializeToString(),))
    writer.start()

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("onnxgrad_cli.jobs.derive.settle_sizes", fails)
    result = empty_shell("derive", "pipe", "-o", "d.onnx")
    writer.join()
    assert result.code == 1 and "internal: ZeroDivisionError: ours" in result.err


def test_a_file_that_is_longer_than_a_message_can_be(empty_shell: Shell) -> None:
    with (empty_shell.folder / "m.onnx").open("wb") as file:
        file.write(mlp().SerializeToString())
        file.truncate(2**31)  # of which the disk holds nothing
    result = empty_shell("inspect", "m.onnx")
    assert result.code == 1 and "larger than 2 GB" in result.err and "external data" in result.err


def test_a_name_that_is_not_text(empty_shell: Shell) -> None:
    refused_model(empty_shell, mlp().SerializeToString().replace(b"w1", b"w\xff"), "not UTF-8", "w\\xff")


def test_a_name_that_is_not_text_where_nothing_is_to_be_done(empty_shell: Shell) -> None:
    refused_model(empty_shell, mlp().SerializeToString().replace(b"w1", b"w\xff"), "not UTF-8", command="expand")


def test_a_domain_at_version_0(empty_shell: Shell) -> None:
    """onnx's checker knows no operator of it, and lets every use of one pass."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
    g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1, 2}> { s = ai.onnx.ml.Normalizer(x) y = Mul(s, w) }""")
    model.opset_import[1].version = 0
    refused_model(empty_shell, model, "it imports version 0 of 'ai.onnx.ml'")
    model.opset_import[0].version = 0
    refused_model(empty_shell, model, "it imports version 0 of 'ai.onnx'")


def test_no_such_file(shell: Shell) -> None:
    refused(shell, 1, "no such file: 'mpl.onnx'", "did you mean mlp.onnx?", command=("build", "mpl.onnx", *BUILD))
    refused(shell, 1, "there is no folder 'gone'", command=("build", "gone/mlp.onnx", *BUILD))


def test_empty_file(shell: Shell) -> None:
    Path("empty.onnx").touch()
    refused(shell, 1, "'empty.onnx' is empty", command=("build", "empty.onnx", *BUILD))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97, 0.999])
def test_truncated(shell: Shell, share: float) -> None:
    whole = Path("mlp.onnx").read_bytes()
    Path("cut.onnx").write_bytes(whole[: int(share * len(whole))])
    refused(shell, 1, "'cut.onnx' is no", "hint: ", "again", command=("build", "cut.onnx", *BUILD))


def test_truncated_everywhere(tmp_path: Path) -> None:
    whole, cut = save(MLP, tmp_path / "mlp.onnx").read_bytes(), tmp_path / "cut.onnx"
    for length in range(len(whole) - 20):  # what follows the graph is the opset
        cut.write_bytes(whole[:length])
        with pytest.raises(OnnxgradError):
            files.load_model(cut)


def test_text_file(shell: Shell) -> None:
    Path("notes.onnx").write_text(MLP)
    refused(shell, 1, "'notes.onnx' is a text file", "onnx.parser", command=("build", "notes.onnx", *BUILD))


def test_git_lfs_pointer(shell: Shell) -> None:
    Path("lfs.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(shell, 1, "Git LFS pointer", "git lfs pull", command=("build", "lfs.onnx", *BUILD))


def test_archive(shell: Shell) -> None:
    Path("model.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(shell, 1, "zip archive", "torch.onnx", command=("build", "model.pt", *BUILD))


@pytest.mark.parametrize(
    ("name", "content", "told", "hint"),
    [
        ("m.tflite", b"\x1c\0\0\0TFL3\x14\0", "TensorFlow Lite", "python -m tf2onnx.convert --tflite"),
        ("m.h5", b"\x89HDF\r\n\x1a\n\0", "HDF5", "python -m tf2onnx.convert --keras"),
        ("m.gguf", b"GGUF\x03\0\0\0", "GGUF", "onnxruntime-genai"),
        ("m.pth", b"\x80\x02}q\x00", "pickle", "torch.onnx"),
        ("saved_model.pb", b"\x08\x01\x12\x04\x0a\x02\xff\xfe", "TensorFlow SavedModel", "--saved-model"),
        ("m.mlmodel", b"\x08\x04\x12\x04\x0a\x02\xff\xfe", "Core ML", "export the model"),
        ("cut.pb", b"\x08\x01\x12\x04\x0a\x02\xff\xfe", "has no graph", "export it again"),
        ("folder/saved_model.pb", b"\x08\x01", "TensorFlow SavedModel", "--saved-model folder"),
    ],
)
def test_other_formats_are_told_with_their_converter(
    name: str, content: bytes, told: str, hint: str, shell: Shell
) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content)
    given = "folder" if name.startswith("folder") else name
    refused(shell, 1, told, hint, command=("build", given, *BUILD))


def test_directory(shell: Shell) -> None:
    refused(shell, 1, "'out' is a directory", command=("build", "out", *BUILD))


@pytest.mark.skipif(AS_ROOT, reason="root may read everything")
def test_not_readable(shell: Shell) -> None:
    Path("mlp.onnx").chmod(0)
    refused_ = shell("build", "mlp.onnx", *BUILD)
    assert refused_.code == 1 and refused_.facts == ("unreadable_file", "mlp.onnx")


def test_no_graph(shell: Shell) -> None:
    Path("bare.onnx").write_bytes(onnx.ModelProto(ir_version=8, producer_name="test").SerializeToString())
    refused(shell, 1, "has no graph", command=("build", "bare.onnx", *BUILD))


def test_fails_the_checker(shell: Shell) -> None:
    model = parser.parse_model(MLP)
    model.graph.node[0].input[0] = "nobody"
    onnx.save(model, "broken.onnx")
    refused(shell, 1, "not a valid ONNX model", "nobody", command=("build", "broken.onnx", *BUILD))


def test_structure_is_checked_without_weights(tmp_path: Path) -> None:
    model = onnx.load(saved_outside(tmp_path), load_external_data=False)
    (tmp_path / "weights.bin").unlink()
    check_structure(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(OnnxgradError, match="NoSuchOperator"):
        check_structure(model, "'m.onnx'")
