"""The files that a job writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.output_plan import OutputPlan, file_of, target_of
from tests.cli_harness import Shell, save_mlp_and_data
from tests.facts import raises


def test_the_default_file_is_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    assert target_of(model, None, "train") == tmp_path / "m.train.onnx"
    assert file_of(model, None, "tuned", ".toml") == tmp_path / "m.tuned.toml"
    assert target_of(model, tmp_path / "o.onnx", "train") == tmp_path / "o.onnx"


@pytest.mark.parametrize(
    ("model", "out"), [("-", None), (Path("-"), None), ("m.onnx", "-"), ("-", "-"), (b"model", "-")]
)
def test_a_stream_is_no_file(model: str | Path | bytes, out: str | None) -> None:
    assert target_of(model, out, "train") is None
    with raises(UsageError, "conflict", "out"):
        file_of(model, out, "tuned")


@pytest.mark.parametrize("name", [target_of, file_of])
def test_a_model_in_memory_has_no_default(name: object) -> None:
    with raises(UsageError, "missing_value", "out"):
        name(b"model", None, "train")  # type: ignore[operator]


@pytest.mark.parametrize(
    "command",
    ["predict mlp.onnx --data data.npz", "train mlp.onnx --data data.npz", "tune mlp.onnx", "train - --data data.npz"],
)
def test_commands_that_write_no_model_refuse_streams(command: str, shell: Shell) -> None:
    save_mlp_and_data()
    before = shell.files()
    out = [] if " - " in command else ["-o", "-"]
    result = shell(*command.split(), *out)
    assert result.code == 2 and result.facts == ("conflict", *(["out"] if out else [])), result.err
    assert shell.files() == before


def test_reports_and_pictures() -> None:
    model = Path("m.onnx")
    assert OutputPlan.of(model).reports == (Path("m.onnx.report.md"),)
    assert OutputPlan.of(None).reports == OutputPlan.of(model, no_report=True, reports=["r.md"]).reports == ()
    plan = OutputPlan.of(model, reports=["r.html", "s.json"], picture="p.html", dump="passes")
    assert plan.reports == (Path("r.html"), Path("s.json"))
    assert (plan.picture, plan.dump) == (Path("p.html"), Path("passes"))
    with raises(UsageError, "missing_value", "picture"):
        OutputPlan.of(None, picture="p.html")
    with raises(UsageError, "wrong_value", "picture", "p.svg"):
        OutputPlan.of(model, picture="p.svg")
    with raises(UsageError, "wrong_value", "reports='r.md'"):
        OutputPlan.of(model, reports="r.md")
