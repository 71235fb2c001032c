"""Weights that begin at random values: drawn by the seed, and they learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad_cli import Options, build
from onnxgrad_cli.errors import ARGUMENT, UsageError
from onnxgrad_cli.jobs.train import Course, run_train
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.options import LoraSpec
from onnxgrad_cli.training.steps.initial_values import as_asked, begin_from, init_weights
from onnxgrad_cli.training.trainer import Trainer
from tests.cli_harness import Shell, save_mlp_and_data
from tests.facts import raises
from tests.jobs.train.test_train import ON_DIGITS
from tests.training.test_new_head import ROWS, exported

LOSSES = (LossSpec("cross-entropy"),)


rng = np.random.default_rng(0)


def test_weights_that_begin_anew(tmp_path: Path) -> None:
    model = exported("gemm")
    np.savez(tmp_path / "data.npz", x=ROWS, label=np.zeros(40, int))
    course = Course(epochs=1, learning_rate=1e-6, batch_size=40, reset=("2.*",), seed=1)
    run_train(model, tmp_path / "data.npz", tmp_path / "t.onnx", Options(losses=LOSSES, optimizer="sgd"), course)
    read = [
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, onnx.load(tmp_path / "t.onnx"))
    ]
    old, new = read
    assert all(np.abs(old[name] - new[name]).max() < 1e-5 for name in ("0.weight", "0.bias"))
    assert np.abs(old["2.weight"] - new["2.weight"]).max() > 0.1 and np.abs(new["2.bias"]).max() < 1e-5
    with raises(UsageError, "unknown_name", "reset", "9"):
        wrong = Course(epochs=1, reset=("9",))
        run_train(model, tmp_path / "data.npz", tmp_path / "u.onnx", Options(losses=LOSSES), wrong)


ROOT = Path(__file__).parents[3]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save_mlp_and_data()
    return Shell(tmp_path, capsys)


@pytest.mark.slow
def test_random_weights_are_drawn_by_the_seed_and_learn(shell: Shell) -> None:
    """Weights of zero learn nothing in a network of layers, so what is learnt began elsewhere."""
    model = onnx.load(str(ROOT / "sample_models" / "digits_mlp.onnx"))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, "zeros.onnx")
    arguments = ("train", "zeros.onnx", *ON_DIGITS, "--epochs", "5", "--learning-rate", "0.01")
    accuracies = {}
    for name, more in {"he": ("--init", "he"), "again": ("--init", "he"), "keep": ()}.items():
        result = shell(*arguments, *more, "-o", f"{name}.onnx", "--json")
        assert result.code == 0, result.err
        accuracies[name] = result.json["epochs"][-1]["val_accuracy"]
    assert accuracies["he"] > 0.9 and accuracies["keep"] < 0.2
    assert Path("he.onnx").read_bytes() == Path("again.onnx").read_bytes()
    other = shell(*arguments, "--init", "he", "--seed", "1", "-o", "other.onnx")
    assert other.code == 0 and Path("he.onnx").read_bytes() != Path("other.onnx").read_bytes()
    refused = shell(*arguments, "--init", "he", "--lora", "2", "-o", "lora.onnx")
    assert refused.code == 2 and "--lora" in refused.err and not Path("lora.onnx").exists()


def test_weights_are_drawn_by_the_seed() -> None:
    model = exported("gemm")
    built = build(model, Options(losses=LOSSES, optimizer="sgd"))

    def drawn(how: str, seed: int, reset: Sequence[str] = ()) -> dict[str, np.ndarray]:
        trainer = Trainer(built, threads=1)
        init_weights(trainer, built, model, how, seed, reset)
        return trainer.weights()

    stored, he = drawn("keep", 1), drawn("he", 1)
    assert all(np.array_equal(he[name], array) for name, array in drawn("he", 1).items())
    for other in (stored, drawn("he", 2), drawn("xavier", 1)):
        assert all(np.abs(he[name] - other[name]).max() > 0.01 for name in ("0.weight", "2.weight"))
    assert not he["0.bias"].any()
    reset = drawn("keep", 1, ("2.*",))
    assert np.array_equal(reset["0.weight"], stored["0.weight"])
    assert np.array_equal(reset["2.weight"], drawn("xavier", 1)["2.weight"])
    adapted = build(model, Options(losses=LOSSES, optimizer="sgd", lora=LoraSpec(1)))
    with raises(UsageError, "conflict", "init='he'", "lora"):
        init_weights(Trainer(adapted, threads=1), adapted, model, "he", 1)


# -- adapters from an earlier training ---------------------------------------------------------------------------------

W = Adapter("w", "w_A", "w_B", 2, 4.0)
V = Adapter("v", "v_A", "v_B", 2, 4.0)
DORA = replace(W, scaling="rslora", magnitude="w_m")


def test_adapters_request_others_like_them() -> None:
    found = as_asked(Options(), [W, V])
    assert (found.lora, found.lora_scaling, found.lora_dora) == (LoraSpec(2, 4.0), "lora", False)
    assert found.lora_target == ("w", "v")
    found = as_asked(Options(lora_target=("*",)), [DORA])
    assert (found.lora, found.lora_scaling, found.lora_dora) == (LoraSpec(2, 4.0), "rslora", True)
    assert found.lora_target == ("*",)
    asked = Options(lora=LoraSpec(2, 16.0))
    assert as_asked(asked, [W, replace(V, alpha=1.0)]) is asked


@pytest.mark.parametrize(
    ("options", "adapters", "expected", "advised"),
    [
        (Options(), [], ("no_data", "adapter_from"), ["adapter_from", "lora"]),
        (Options(), [replace(W, rank=3), V], ("conflict", "adapter_from", "2, 3"), []),
        (Options(lora=LoraSpec(3)), [W], ("conflict", "adapter_from", "2", "3"), ["lora"]),
        (Options(lora=LoraSpec(2)), [W, replace(V, rank=3)], ("conflict", "adapter_from", "2, 3", "2"), ["lora"]),
        (
            Options(lora=LoraSpec(2), lora_dora=True), [W], ("conflict", "adapter_from", "lora_dora"),
            ["lora", "lora_dora"],
        ),
        (Options(lora=LoraSpec(2)), [DORA], ("conflict", "adapter_from", "lora_dora"), ["lora", "lora_dora"]),
        (Options(), [W, replace(V, alpha=1.0)], ("ambiguous", "adapter_from"), ["lora"]),
    ],
)  # fmt: skip
def test_adapters_that_no_options_request(
    options: Options, adapters: list[Adapter], expected: tuple[str, ...], advised: list[str]
) -> None:
    with raises(UsageError, *(word for fact in expected for word in fact.split(", "))) as refused:
        as_asked(options, adapters)
    assert refused.value.hint and [name for name, _ in ARGUMENT.findall(refused.value.hint)] == advised


def trainer_of(*adapters: Adapter, **weights: np.ndarray) -> SimpleNamespace:
    """A trainer with adapters in float16, and weights that are trained in full."""
    arrays = {name: np.zeros((), np.float16) for adapter in adapters for name in adapter.names} | weights
    buffers = {name: SimpleNamespace(array=array) for name, array in arrays.items()}
    return SimpleNamespace(roles=SimpleNamespace(adapters=adapters), buffers=buffers, load=Mock())


def test_adapters_begin_with_the_same_product() -> None:
    """The product of A and B is multiplied by alpha / rank, so B makes up for another alpha."""
    other = replace(DORA, a="a", b="b", magnitude="m", alpha=8.0)
    values = {"w_A": np.float32([1, 2]), "w_B": np.float32([3, 4]), "w_m": np.float32(5), "bias": np.float32([6])}
    trainer = trainer_of(other, bias=np.zeros(1, np.float32))
    begin_from(trainer, [DORA], values)  # type: ignore[arg-type]
    (begun,) = trainer.load.call_args.args
    assert {name: (array.dtype, array.tolist()) for name, array in begun.items()} == {
        "a": (np.float16, [1, 2]), "b": (np.float16, [1.5, 2]), "m": (np.float16, 5), "bias": (np.float32, [6]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "name", "advised"),
    [(trainer_of(V, bias=np.zeros(1)), "w", ["lora_target", "lora_target"]), (trainer_of(W), "bias", ["train"])],
)
def test_values_without_a_place_are_refused(trainer: SimpleNamespace, name: str, advised: list[str]) -> None:
    with raises(UsageError, "conflict", "adapter_from", name) as refused:
        begin_from(trainer, [W], {"w_A": np.ones(1), "w_B": np.ones(1), "bias": np.ones(1)})  # type: ignore[arg-type]
    assert refused.value.hint and [name for name, _ in ARGUMENT.findall(refused.value.hint)] == advised
    trainer.load.assert_not_called()
