"""The folder that a page trains in: its files, and what it holds of model and data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli import OnnxgradError, Options, Trainer, UsageError, run_build
from onnxgrad_cli.files.start_values import read_values
from onnxgrad_cli.jobs.pack import PAGE, WASM, WEBGPU, run_pack
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises

OPTIONS = Options(label="t", optimizer="adamw")
FILES = {"model.onnx", "model.json", "model.bin", "data.json", "data.bin", *PAGE}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((7, n)).astype(np.float32) for name, n in (("a_x", 4), ("a_t", 2))}
    np.savez("data.npz", **arrays, b_x=arrays["a_x"][:3], b_t=arrays["a_t"][:3])
    run_build("mlp.onnx", "train.onnx", OPTIONS, verify=False, no_report=True)
    return Shell(tmp_path, capsys)


def test_a_folder_has_all_that_a_page_needs(shell: Shell) -> None:
    Path("dist").mkdir()
    for name in (*WASM, *WEBGPU):
        Path("dist", name).write_text(name)
    flags = ["--data", "data.npz", "--prefix", "a_", "--val", "data.npz", "--val-prefix", "b_", "--runtime", "dist"]
    assert shell("pack", "train.onnx", "-o", "site", *flags).code == 0
    assert {f.relative_to("site").as_posix() for f in Path("site").rglob("*.*")} == FILES | {f"ort/{n}" for n in WASM}
    assert shell("pack", "train.onnx", "-o", "site", *flags, "--webgpu").code == 0, "a folder of ours is replaced"
    assert all((Path("site/ort") / name).read_text() == name for name in WEBGPU)
    said, data = json.loads(Path("site/data.json").read_text()), Path("site/data.bin").read_bytes()
    given = np.load("data.npz")
    for part, prefix in (("train", "a_"), ("val", "b_")):
        for name, port in said[part].items():
            found = np.frombuffer(data, np.float32, port["size"], port["offset"]).reshape(port["dims"])
            np.testing.assert_array_equal(found, given[prefix + name])
            assert port["array"] == "Float32Array" and port["offset"] % 8 == 0


def test_weights_that_are_stored_are_taken_out(shell: Shell) -> None:
    run_build("mlp.onnx", "inputs.onnx", OPTIONS, weights="inputs", verify=False, no_report=True)
    for name in ("train", "inputs"):
        run_pack(f"{name}.onnx", Path(name), data=Path("data.npz"), prefix="a_")
    for file in ("model.bin", "model.json"):
        assert Path("train", file).read_bytes() == Path("inputs", file).read_bytes()
    data = np.load("data.npz")
    feeds = {"x": data["a_x"], "t": data["a_t"]}
    assert Trainer("train/model.onnx").step(feeds) == Trainer("train.onnx").step(feeds)


def test_a_model_in_onnxruntimes_own_format_computes_the_same(shell: Shell) -> None:
    run_pack("train.onnx", Path("site"), data=Path("data.npz"), prefix="a_", ort=True)
    roles, held = json.loads(Path("site/model.json").read_text()), read_values(Path("site/model.json")).values
    assert roles["model"] == "model.ort"
    data = np.load("data.npz")
    feeds = {**held, "x": data["a_x"], "t": data["a_t"], "learning_rate": np.array(0.1, np.float32)}
    sessions = [onnxruntime.InferenceSession(f"site/model.{form}") for form in ("ort", "onnx")]
    for got, expected in zip(*(session.run(list(roles["outputs"]), feeds) for session in sessions), strict=True):
        np.testing.assert_array_equal(got, expected)
    with raises(UsageError, "conflict", "ort", "webgpu"):
        run_pack("train.onnx", Path("gpu"), data=Path("data.npz"), prefix="a_", ort=True, webgpu=True)
    assert not Path("gpu").exists()


def test_what_is_missing_is_told(shell: Shell) -> None:
    result = shell("pack", "train.onnx", "-o", "site", "--data", "data.npz", "--prefix", "a_")
    assert result.code == 0 and "onnxruntime-web" in result.err
    with raises(OnnxgradError, "missing_file", "runtime", "ort.wasm.min.mjs"):
        run_pack("train.onnx", Path("site"), data=Path("data.npz"), prefix="a_", runtime=Path("dist"))
    with pytest.raises(UsageError, match="optimizer"):
        run_build("mlp.onnx", "bare.onnx", Options(label="t"), verify=False, no_report=True)
        run_pack("bare.onnx", Path("site"), data=Path("data.npz"), prefix="a_")
    with pytest.raises(UsageError, match="'x'"):
        run_pack("train.onnx", Path("site"), data=Path("data.npz"))


@pytest.mark.parametrize("name", ["model.bin", "index.html", "data.bin"])
def test_files_of_others_are_not_replaced(name: str, shell: Shell) -> None:
    Path("site").mkdir()
    Path("site", name).write_text("mine")
    with raises(UsageError, "file_exists", name):
        run_pack("train.onnx", Path("site"), data=Path("data.npz"), prefix="a_")
    assert [file.name for file in Path("site").iterdir()] == [name]


def test_a_folder_with_a_model_of_ours_is_no_page_of_ours(shell: Shell) -> None:
    run_build("mlp.onnx", "site.onnx", OPTIONS, verify=False, no_report=True)
    Path("site").mkdir()
    Path("site.onnx").rename("site/model.onnx")
    Path("site/index.html").write_text("mine")
    with raises(UsageError, "file_exists", "index.html"):
        run_pack("train.onnx", Path("site"), data=Path("data.npz"), prefix="a_")
    assert Path("site/index.html").read_text() == "mine"


@pytest.mark.parametrize("link", [False, True])
def test_the_runtime_replaces_no_files_of_others_and_goes_through_no_link(link: bool, shell: Shell) -> None:
    for folder in ("dist", "mine", "site"):
        Path(folder).mkdir()
    for name in WASM:
        Path("dist", name).write_text(name)
    Path("mine", WASM[0]).write_text("mine")
    Path("site/ort").symlink_to("../mine") if link else Path("mine").rename("site/ort")
    with raises(UsageError, *(("unwritable_file", "ort") if link else ("file_exists", WASM[0]))):
        run_pack("train.onnx", Path("site"), data=Path("data.npz"), prefix="a_", runtime=Path("dist"))
    assert Path("site/ort", WASM[0]).read_text() == "mine" and len([*Path("site/ort").iterdir()]) == 1


def test_a_weight_is_declared_of_which_only_the_value_has_a_type(shell: Shell) -> None:
    """The value is taken out, so that onnxruntime would know of none."""
    model = onnx.load("train.onnx")
    weight = next(value for value in model.graph.input if value.name in {t.name for t in model.graph.initializer})
    weight.ClearField("type")
    onnx.save(model, "bare.onnx")
    run_pack("bare.onnx", Path("site"), data=Path("data.npz"), prefix="a_")
    onnxruntime.InferenceSession("site/model.onnx")


def test_what_onnxruntime_does_not_open_is_no_page(shell: Shell) -> None:
    model = onnx.load("train.onnx")
    model.graph.node.add(op_type="Unheard", domain="of.nobody", input=["x"], output=["heard"])
    model.opset_import.add(domain="of.nobody", version=1)
    onnx.save(model, "odd.onnx")
    result = shell("pack", "odd.onnx", "-o", "site", "--data", "data.npz", "--prefix", "a_")
    assert result.code == 1 and result.facts == ("unreadable_file", "1", "-1")
    assert not Path("site/model.onnx").exists()


def test_data_are_packed_as_they_were_trained_on(shell: Shell) -> None:
    """Columns in the order of the training data, and normalized as the model says."""
    x = np.random.default_rng(0).standard_normal((6, 4)) * 100 + 500
    for name, order in (("data", [0, 1, 2, 3]), ("swapped", [2, 1, 0, 3])):
        table = np.column_stack([x[:, order], x[:, :2]])
        header = ",".join([*("abcd"[i] for i in order), "label_0", "label_1"])
        np.savetxt(f"{name}.csv", table, "%.7g", ",", header=header, comments="")
    trained = ("train", "mlp.onnx", "--data", "data.csv", "--normalize", "auto", "--epochs", "1", "-o", "m.onnx")
    assert shell(*trained).code == 0
    run_build("m.onnx", "m.train.onnx", Options(optimizer="sgd"), verify=False, no_report=True)
    assert shell("pack", "m.train.onnx", "-o", "site", "--data", "data.csv", "--val", "swapped.csv").code == 0
    said, data = json.loads(Path("site/data.json").read_text()), Path("site/data.bin").read_bytes()
    found = [
        np.frombuffer(data, np.float32, said[part]["x"]["size"], said[part]["x"]["offset"]) for part in ("train", "val")
    ]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0].reshape(6, 4), (x - x.mean(0)) / x.std(0), atol=1e-3)


def test_the_model_that_is_read_is_not_overwritten(shell: Shell) -> None:
    Path("site").mkdir()
    Path("train.onnx").rename("site/model.onnx")
    before = Path("site/model.onnx").read_bytes()
    with raises(UsageError, "conflict", "model.onnx"):
        run_pack("site/model.onnx", Path("site"), data=Path("data.npz"), prefix="a_", force=True)
    assert Path("site/model.onnx").read_bytes() == before
