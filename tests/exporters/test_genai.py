"""Every language model that onnxruntime-genai's builder writes here gets a training model that is proved."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.execution.executor import Executor
from tests.exporters.genai import (
    CONFIGURATIONS,
    FOR_CUDA,
    MODELS,
    first_weight,
    is_as_expected,
    judge,
    prompt,
    reference,
    row,
    write_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("onnxruntime_genai", "transformers", "onnx_ir", "torch"):
        pytest.importorskip(package)
    return tmp_path_factory.mktemp("genai")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_the_builder_is_proved(model: str, folder: Path) -> None:
    verdict = judge(write_model(*model.split("-"), folder))
    assert is_as_expected(model, verdict), row(model, verdict)
    steps = {step["name"]: step["status"] for step in verdict["proof"]["steps"]}
    assert steps.pop("computes what the original computes") == ("skipped" if model in FOR_CUDA else "passed")
    assert set(steps.values()) == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGURATIONS.keys() - {"mistral"}))  # whose window the builder leaves out
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
def test_loss_and_gradient_are_those_of_transformers(name: str, precision: str, tolerance: float, folder: Path) -> None:
    file = write_model(name, precision, folder)
    data = dict(np.load(prompt(file)))
    judge(file)
    training = Executor(onnx.load(file.with_name("train.onnx")), fallback=False)
    found = training(data)
    loss, gradient = reference(name, folder, data)
    assert abs(float(found["loss"]) - loss) <= tolerance * loss
    ours = found[f"{first_weight(name)[0]}_grad"].astype(np.float64)
    assert np.abs(ours - gradient).max() <= tolerance * np.abs(gradient).max()
