"""`train --memory`: what is chosen, what is said of it, and that what is learnt is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli import Options, build
from onnxgrad_cli.common.checks import bytes_of
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.memory_plan import StepPlan, planned
from onnxgrad_cli.report.formatting import scaled
from tests.cli_harness import MLP, Shell
from tests.facts import raises

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

MODEL = str(Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.standard_normal((256, 1, 8, 8)).astype(np.float32), y=rng.integers(0, 10, 256))
    return Shell(tmp_path, capsys)


ARGUMENTS = ("--data", "data.npz", "--loss", "cross-entropy", "--label", "y", "--epochs", "2", "--batch-size", "128",
             "--threads", "1")  # fmt: skip


@pytest.mark.slow
def test_the_same_is_learnt_in_more_runs(shell: Shell) -> None:
    plain = shell("train", MODEL, *ARGUMENTS, "-o", "plain.onnx")
    tight = shell("train", MODEL, *ARGUMENTS, "-o", "tight.onnx", "--memory", "24MB")
    assert plain.code == tight.code == 0, tight.err
    assert "2 runs " in tight.err
    one, other = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(name).graph.initializer}
        for name in ("plain.onnx", "tight.onnx")
    )
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=1e-3, atol=2e-5)
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(MODEL).graph.initializer}
    assert any(np.abs(array - before[name]).max() > 1e-3 for name, array in one.items())


@pytest.mark.slow
def test_what_can_not_be_kept_to_is_refused_with_figures(shell: Shell) -> None:
    result = shell("train", MODEL, *ARGUMENTS[:-4], "--batch-size", "2", "-o", "out.onnx", "--memory", "20MB")
    assert result.code == 2
    held = 2 * 4 * 13_802 * 4 / 1e3  # kB: weights, two slots and gathered gradients, the present ones and the next
    told = re.search(r"20.0 MB are allowed; weights and state take (\d+) kB, each run ", result.err)
    assert told is not None and held <= int(told[1]) < 1.02 * held  # and running statistics, constants
    assert "--freeze" in result.err
    assert not Path("out.onnx").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--mode", "train"), "samples of a batch are not proven independent"),
        (("--schedule", "cosine"), "the schedule counts each run as a step"),
    ],
)
@pytest.mark.thinned(2)
def test_a_batch_is_shared_only_where_that_changes_nothing(shell: Shell, more: tuple[str, ...], why: str) -> None:
    result = shell("train", MODEL, *ARGUMENTS, *more, "-o", "out.onnx", "--memory", "23MB")
    assert result.code == 2
    assert why in result.err


@pytest.mark.parametrize(("text", "size"), [("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("7", 7), ("2kb", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text, "`memory`") == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "nan", "5XB"])
def test_no_sizes(text: str) -> None:
    with raises(UsageError, "wrong_value", "memory", text):
        bytes_of(text, "`memory`")


SAMPLES = 2**20


def plan_of(batch: str = "batch", **options: Any) -> tuple[str, StepPlan | None, str]:
    """Plan a step of the MLP within the limit, and return the message, the plan and the error."""
    said: list[str] = []
    limit = options.pop("limit")
    whole = options.pop("whole", "")
    given = Options(optimizer="sgd", **options)
    model = onnx.parser.parse_model(MLP.replace("batch", batch))
    try:
        plan = planned(
            lambda asked: build(model, asked), given, limit, SAMPLES, 1, whole, lambda text, _: said.append(text)
        )
    except UsageError as error:
        return "", None, f"{error.message} {error.hint}"
    return said[0], plan, ""


def test_the_first_plan_that_fits_is_the_given_one() -> None:
    said, plan, _ = plan_of(limit=10**9)
    assert plan is not None and plan.runs == 1 and str(plan) == "no recomputation"
    assert "1.00 GB" in said and said.endswith("with no recomputation") and "given options" not in said


def test_a_smaller_limit_takes_more_runs() -> None:
    _, whole, _ = plan_of(limit=10**9)
    assert whole is not None
    said, plan, _ = plan_of(limit=whole.memory.peak * 2 // 3)
    assert plan is not None and plan.runs == 2 and plan.options.accumulate == 2 and plan.memory.peak < whole.memory.peak
    assert "2 runs per step" in str(plan) and f"given options it would take {scaled(whole.memory.peak, 'B')}" in said
    _, smaller, _ = plan_of(limit=whole.memory.peak // 3)
    assert smaller is not None and smaller.runs > 2


@pytest.mark.parametrize(
    ("options", "batch", "reason"),
    [
        ({"whole": "it is Monday"}, "batch", "it is Monday"),
        ({}, str(SAMPLES), "the model has a fixed batch size"),
        ({"accumulate": 2}, "batch", ""),
        ({}, "batch", ""),
    ],
)
def test_what_is_too_little_is_refused_with_the_reason(options: dict[str, Any], batch: str, reason: str) -> None:
    _, plan, error = plan_of(batch, limit=1000, **options)
    assert (
        plan is None
        and "1.00 kB are allowed" in error
        and "`freeze=GLOB`" in error
        and re.search(r"take \d+ B, each run takes [\d.]+ MB ", error)
    )
    assert error.endswith(f"several runs: {reason}" if reason else "`lora=RANK`")
