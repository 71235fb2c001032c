"""`onnxgrad tune`: the sizes at which forms are measured, and what a build takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli import Options, run_tune
from onnxgrad_cli.autodiff.kernel_variants import TABLE, load_tuned
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.session import open_session
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises


@pytest.mark.parametrize(("words", "size"), [((), 8), (("--size", "batch=3"), 3)])
def test_forms_are_measured_at_the_sizes_that_are_given(
    words: tuple[str, ...],
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(MLP, Path("mlp.onnx"))
    result = Shell(tmp_path, capsys)("tune", "mlp.onnx", "--loss", "mse", "--repeat", "1", *words)
    assert result.code == 0 and f"batch = {size}" in result.err, result.err


def test_each_form_of_a_gradient_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 2, 6, 6] x) => (float[n, 3, 4, 4] y) { y = Conv(x, w) }""")
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, "conv.onnx")
    result = shell("tune", "conv.onnx", "--loss", "mse", "--repeat", "1", "--threads", "1", "--json")
    assert result.code == 0, result.err
    (measured,) = result.json["measured"]
    assert len(measured["milliseconds"]) > 1 and measured["best"] in measured["milliseconds"]
    assert shell("build", "conv.onnx", "--loss", "mse", "--tuned", "conv.tuned.toml", "--verify").code == 0


CONV = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 2, 6, 6] x) => (float[n, 3, 4, 4] y) { y = Conv(x, w) }"""


@pytest.fixture
def conv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(CONV)
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, "conv.onnx")
    return "conv.onnx"


def test_each_form_is_another_model(conv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[bytes, int | None]] = []

    def recorded(model: onnx.ModelProto, threads: int | None) -> Any:
        opened.append((model.SerializeToString(deterministic=True), threads))
        return open_session(model, threads=threads)

    monkeypatch.setattr("onnxgrad_cli.jobs.tune.open_session", recorded)
    (found,), file = run_tune(conv, threads=2, repeat=1)
    assert len({model for model, _ in opened}) == len(opened) == len(found.milliseconds) > 1
    assert {threads for _, threads in opened} == {2} and file == Path("conv.tuned.toml")
    assert "2 threads" in file.read_text().splitlines()[0]


@pytest.mark.parametrize(("share", "chosen"), [(0.96, False), (0.94, True)])
def test_a_form_is_chosen_if_it_is_clearly_faster(
    share: float, chosen: bool, conv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (real,), _ = run_tune(conv, "first.toml", repeat=1)
    other = next(form for form in real.milliseconds if form != real.default)
    times = {form: 5.0 for form in real.milliseconds} | {real.default: 2.0, other: 2.0 * share}
    monkeypatch.setattr("onnxgrad_cli.jobs.tune.interleaved", lambda steps, repeat: {f: times[f] for f in steps})
    (found,), file = run_tune(conv, "second.toml")
    assert (found.best, found.default, found.milliseconds) == (other if chosen else real.default, real.default, times)
    lines = file.read_text().splitlines()
    assert len(lines) == (3 if chosen else 2) and lines[1] == f"[{TABLE}]"
    if chosen:
        assert lines[2] == f'"{found.place}" = "{other}"  # 0.94 of {real.default}\'s time'
        assert load_tuned(file) == {found.place: other}


def test_forms_that_disagree_are_an_error(conv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Any] = []

    def wrong(model: onnx.ModelProto, threads: int | None) -> Any:
        session = open_session(model, threads=threads)
        sessions.append(session)
        factor = np.float32(1.01 if len(sessions) > 1 else 1)
        return Mock(run=lambda names, feeds: [factor * array for array in session.run(names, feeds)])

    monkeypatch.setattr("onnxgrad_cli.jobs.tune.open_session", wrong)
    with pytest.raises(OnnxgradError) as caught:
        run_tune(conv, repeat=1)
    assert caught.value.hint is not None and "'Conv" in caught.value.message
    assert not Path("conv.tuned.toml").exists()


def test_what_can_not_be_tuned(conv: str) -> None:
    with raises(UsageError, "conflict", "target='ort-cpu'"):
        run_tune(conv, options=Options(target="ort-cpu"))
    with raises(UsageError, "wrong_value", "threads=0", "1"):
        run_tune(conv, threads=0)
    Path("mine.toml").write_text("a = 1")
    with pytest.raises(OnnxgradError):
        run_tune(conv, "mine.toml")
    assert Path("mine.toml").read_text() == "a = 1"


def test_first_axes_are_smaller_than_others(conv: str) -> None:
    model = onnx.load(conv)
    model.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "side"
    model.graph.output[0].type.tensor_type.shape.dim[3].dim_param = "rest"
    onnx.save(model, conv)
    said: list[str] = []
    run_tune(conv, repeat=1, sizes={"n": 2}, tell=lambda text, _: said.append(text))
    assert said[0].endswith("n = 2, side = 64")
    run_tune(conv, repeat=1, tell=lambda text, _: said.append(text))
    assert any(text.endswith("n = 8, side = 64") for text in said)
