"""Training models whose weights are inputs: what lies beside them is what they would have stored, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import numpy_helper

from onnxgrad_cli import LoraSpec, LossSpec, Options, Trainer, UsageError, run_build
from onnxgrad_cli.common.memory import taken_memory
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files.start_values import read_values
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.metadata import describe
from tests.cli_harness import MLP, Shell, save
from tests.facts import facts, raises

OPTIONS = Options(losses=(LossSpec("mse"),), label="t", optimizer="adamw", ema=0.5)
RATE = np.array(0.01, np.float32)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


def built(form: Any, options: Options = OPTIONS) -> Path:
    out = Path(f"{form}.onnx")
    assert run_build("mlp.onnx", out, options, weights=form, verify=False, no_report=True).status == "built"
    return out


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((5, 4)).astype(np.float32), "t": rng.standard_normal((5, 2)).astype(np.float32)}


def as_javascript_reads(roles: Path) -> dict[str, np.ndarray]:
    """Weights and state by the recipe of the docs: zeros, the file over their beginning, an array at each offset."""
    said = json.loads(roles.read_text())
    data = bytearray(said["bytes"])
    stored = (roles.parent / said["values"]).read_bytes()
    data[: len(stored)] = stored
    ports = {name: port for name, port in said["inputs"].items() if "offset" in port}
    assert all(port["offset"] % np.dtype(port["type"]).itemsize == 0 for port in ports.values())
    return {
        name: np.frombuffer(data, port["type"], port["size"], port["offset"]).reshape(port["dims"])
        for name, port in ports.items()
    }


def test_the_values_are_those_that_would_be_stored(shell: Shell) -> None:
    bare, whole = onnx.load(built("inputs")), onnx.load(built("stored"))
    held = as_javascript_reads(Path("inputs.json"))
    expected = {t.name: numpy_helper.to_array(t) for t in whole.graph.initializer if t.name in held}
    assert held.keys() == expected.keys() == {n for n, r in describe(bare).inputs.items() if r in ("weight", "state")}
    for name, array in expected.items():
        np.testing.assert_array_equal(held[name], array, strict=True)
    session = ort.InferenceSession(bare.SerializeToString())
    assert not session.get_overridable_initializers()
    assert {each.name for each in session.get_inputs()} == {*held, "x", "t", "learning_rate"}


def test_a_loop_by_the_json_takes_the_steps_of_a_trainer(shell: Shell) -> None:
    session = ort.InferenceSession(built("inputs"))
    said, held = json.loads(Path("inputs.json").read_text()), as_javascript_reads(Path("inputs.json"))
    trainers = [Trainer(built("stored")), Trainer("inputs.onnx")]
    for step in range(3):
        outputs = list(said["outputs"])
        fed = {**held, **batch(step), said["learning_rate"]: RATE}
        found = dict(zip(outputs, session.run(outputs, fed), strict=True))
        held = {name: found[said["inputs"][name]["next"]] for name in held}
        losses = [trainer.step(batch(step), 0.01) for trainer in trainers]
        assert losses == [found[said["loss"]]] * 2
    for trainer in trainers:
        for name, array in {**trainer.weights(), **trainer.state()}.items():
            np.testing.assert_array_equal(held[name], array)


def trained(roles: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """The bytes that a training elsewhere leaves: each array at its offset."""
    said = json.loads(roles.read_text())
    data, rng, held = bytearray(said["bytes"]), np.random.default_rng(0), {}
    for name, port in said["inputs"].items():
        if "offset" in port:
            held[name] = np.asarray(rng.standard_normal(port["dims"])).astype(port["type"])
            data[port["offset"] : port["offset"] + held[name].nbytes] = held[name].tobytes()
    return bytes(data), held


def weights_of(model: str | Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(model).graph.initializer}


@pytest.mark.parametrize("averages", [False, True])
def test_trained_bytes_become_a_model(averages: bool, shell: Shell) -> None:
    built("inputs")
    data, held = trained(Path("inputs.json"))
    Path("done.bin").write_bytes(data)
    assert shell("export", "done.bin", "--model", "mlp.onnx", "-o", "a.onnx").code == 1
    flags = ["--use-ema"] * averages
    more = ["--roles", "inputs.json", "--model", "mlp.onnx", "-o", "a.onnx", *flags]
    assert shell("export", "done.bin", *more).code == 0
    for name, array in weights_of("a.onnx").items():
        np.testing.assert_array_equal(array, held[f"{name}_ema" if averages else name])


def test_the_start_becomes_the_model_it_came_from(shell: Shell) -> None:
    built("inputs")
    for source in ("inputs.json", "inputs.bin"):
        assert shell("export", source, "--model", "mlp.onnx", "-o", "a.onnx").code == 0
        for name, array in weights_of("mlp.onnx").items():
            np.testing.assert_array_equal(weights_of("a.onnx")[name], array)


def test_adapters_are_merged(shell: Shell) -> None:
    built("inputs", Options(losses=(LossSpec("mse"),), label="t", optimizer="sgd", lora=LoraSpec(1, 2.0)))
    data, held = trained(Path("inputs.json"))
    Path("done.bin").write_bytes(data)
    run_export(Path("done.bin"), "mlp.onnx", "a.onnx", roles=Path("inputs.json"))
    before, after = weights_of("mlp.onnx"), weights_of("a.onnx")
    expected = before["w1"] + 2 * held["w1_lora_A"].astype(float) @ held["w1_lora_B"]
    np.testing.assert_allclose(after["w1"], expected, rtol=1e-6)
    np.testing.assert_array_equal(after["b1"], before["b1"])


def test_safetensors_of_weights_alone(shell: Shell) -> None:
    weights = {name: array + 1 for name, array in weights_of("mlp.onnx").items()}
    safetensors.numpy.save_file(weights, "w.safetensors")
    assert shell("export", "w.safetensors", "--model", "mlp.onnx", "-o", "a.onnx").code == 0
    for name, array in weights.items():
        np.testing.assert_array_equal(weights_of("a.onnx")[name], array)
    safetensors.numpy.save_file({**weights, "step": np.zeros(1, np.float32)}, "w.safetensors")
    assert "'step'" in shell("export", "w.safetensors", "--model", "mlp.onnx", "-o", "a.onnx").err


def test_a_model_is_checked_with_what_lies_beside(shell: Shell) -> None:
    built("inputs")
    assert shell("check", "inputs.onnx").code == 0
    Path("inputs.json").rename("other.json")
    result = shell("check", "inputs.onnx")
    assert result.code == 1 and result.facts == ("missing_file", "w1", "inputs.json")
    with pytest.raises(OnnxgradError, match="are inputs"):
        Trainer("inputs.onnx")
    with raises(UsageError, "missing_value", "w1"):
        Trainer(Path("inputs.onnx").read_bytes())


def test_without_an_optimizer(shell: Shell) -> None:
    session = ort.InferenceSession(built("inputs", Options(losses=(LossSpec("mse"),), label="t")))
    held = as_javascript_reads(Path("inputs.json"))
    said = json.loads(Path("inputs.json").read_text())
    assert said["learning_rate"] is None and said["optimizer"] is None
    name = said["inputs"]["w1"]["gradient"]
    (got,) = session.run([name], {**held, **batch()})
    expected = ort.InferenceSession(built("stored", Options(losses=(LossSpec("mse"),), label="t"))).run([name], batch())
    np.testing.assert_array_equal(got, expected[0])


@pytest.mark.parametrize("damage", ["cut", "turned", "longer"])
def test_damage_is_seen(damage: str, shell: Shell) -> None:
    file = built("inputs").with_suffix(".bin")
    data = bytearray(file.read_bytes())
    data[0] ^= damage == "turned"
    file.write_bytes({"cut": data[:-4], "turned": data, "longer": data + b"1234"}[damage])
    with pytest.raises(OnnxgradError, match="checksum"):
        read_values(Path("inputs.json"))
    with pytest.raises(OnnxgradError, match="bytes, but"):
        read_values(file)


@pytest.mark.parametrize("entry", [{"type": "float3"}, {"dims": [-4, 3]}, {"offset": 1 << 40}, {"dims": "x"}])
def test_a_wrong_description_is_refused(entry: dict[str, Any], shell: Shell) -> None:
    roles = built("inputs").with_suffix(".json")
    said = json.loads(roles.read_text())
    said["inputs"]["w1"] |= entry
    roles.write_text(json.dumps(said))
    with pytest.raises(OnnxgradError) as caught:
        read_values(roles)
    assert facts(caught.value)[:2] == ("unreadable_file", roles.name)


@pytest.mark.parametrize("size", [1 << 36, 1 << 50])
def test_zeros_that_are_claimed_take_no_memory(size: int, shell: Shell) -> None:
    roles = built("inputs").with_suffix(".json")
    said = json.loads(roles.read_text())
    said["bytes"], last = said["bytes"] + size, next(port for port in said["inputs"].values() if port.get("slot"))
    last |= {"offset": said["stored"], "dims": [size // 8]}
    roles.write_text(json.dumps(said))
    before = taken_memory()
    assert size // 8 in [array.size for array in read_values(roles).values.values()]
    assert taken_memory() - before < 1 << 30


def test_values_that_never_end(shell: Shell) -> None:
    values = built("inputs").with_suffix(".bin")
    values.unlink()
    values.symlink_to("/dev/zero")
    with raises(OnnxgradError, "unreadable_file", "inputs.bin"):
        read_values(values)


def test_files_of_others_are_not_replaced(shell: Shell) -> None:
    Path("inputs.bin").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"inputs\.bin"):
        built("inputs")
    Path("inputs.bin").unlink()
    built("inputs")
    built("inputs")


@pytest.mark.parametrize(
    "flags",
    [
        ["--training-info", "--optimizer", "sgd"],
        ["--as-gradient-op"],
        ["--stop-after", "loss"],
        ["-o", "-"],
        ["--artifacts", "a"],
        ["-o", "a.bin"],
    ],
    ids=" ".join,
)
def test_what_does_not_go_with_it(flags: list[str], shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--label", "t", "--weights", "inputs", *flags)
    assert result.code == 2 and ("--weights" in result.err or "a.bin" in result.err)


def test_a_report_does_not_take_the_place_of_the_values(shell: Shell) -> None:
    command = ("build", "mlp.onnx", "--label", "t", "--weights", "inputs", "-o", "t.onnx", "--report", "t.json", "-v")
    result = shell(*command)
    assert result.code == 2 and result.facts == ("conflict", "t.json")
    assert "prepare" not in result.err, "it is refused before any pass"


def test_what_is_written_is_what_was_proved(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrad_cli.jobs import build as build_job

    def other(switch: Any, model: Any, values: Any, path: Path) -> Any:
        return stage(switch, model, {name: array * 2 for name, array in values.items()}, path)

    stage = build_job.stage_values
    monkeypatch.setattr(build_job, "stage_values", other)
    report = run_build("mlp.onnx", "out.onnx", OPTIONS, weights="inputs", verify=True, no_report=True)
    assert report.status == "check_failed" and not list(Path().glob("out*"))
