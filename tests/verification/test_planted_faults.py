"""The proof finds faults that are planted in training models, and lets right models pass."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.proof import prove
from tests.verification.planted_faults import KINDS, Network, count, faults, in_single, network, planted, right

SAMPLES = Path(__file__).parents[2] / "sample_models"
FAULTS, SEEDS = 6, 3


def sample(name: str) -> Network:
    return network(onnx.load(SAMPLES / f"{name}.onnx"), Options(losses=(LossSpec("mse"),)))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("digits_mlp", 0),
        pytest.param("symbolic", 0, marks=pytest.mark.slow),
        pytest.param("digits_cnn", 0, marks=pytest.mark.slow),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("digits_mlp", "digits_cnn", "tiny_transformer")),
    ],
)
def test_planted_faults_are_found(name: str, seed: int) -> None:
    found = count(sample(name), FAULTS, seed)
    assert (found.found, found.missed) == (FAULTS, [])


@pytest.mark.parametrize(
    "name",
    [
        "digits_mlp",
        "symbolic",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("digits_cnn", "tiny_transformer")),
    ],
)
@pytest.mark.thinned(2)
def test_right_models_pass_at_every_seed(name: str) -> None:
    assert [proof.verdict for proof in right(sample(name), SEEDS)] == ["proved"] * SEEDS


@pytest.mark.slow
def test_faults_of_a_sign_are_found_in_float32_alone() -> None:
    found = sample("digits_mlp")
    found.places = {"negated": found.places["negated"]}
    with in_single():
        counted = count(found, FAULTS)
    assert (counted.found, counted.missed) == (FAULTS, [])


@pytest.mark.slow
def test_one_gradient_of_many_of_another_sign_is_found_in_float32_alone() -> None:
    """The noise of all others would hide it in the first round."""
    found = sample("tiny_transformer")
    with in_single():
        wrong = prove(planted(found, "negated", "layers.0.norm1.weight_grad"), found.roles, original=found.original)
        assert wrong.failed
        assert prove(found.model, found.roles, original=found.original).status == "passed"


def test_every_kind_of_fault_is_planted_in_a_model_that_is_valid() -> None:
    found = sample("tiny_transformer")
    drawn = dict(faults(found, 100, np.random.default_rng(0)))
    assert set(drawn) == set(KINDS)
    for kind, value in drawn.items():
        model = planted(found, kind, value)
        onnx.checker.check_model(model)
        assert len(model.graph.node) > len(found.model.graph.node)
