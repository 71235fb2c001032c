"""The preparation of a run: the model of a step, the data and their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli import Course, Options, SampleOptions
from onnxgrad_cli.data import Preprocessing
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.train import run_train
from onnxgrad_cli.losses.spec import LossSpec
from tests.cli_harness import MLP, Shell, save, save_mlp_and_data
from tests.facts import raises

HEADS = """
<ir_version: 8, opset_import: ["": 17]>
heads (float[n, 4] x) => (float[n, 2] value, float[n, 3] kind)
<float[4, 2] v = {1, 2, 3, 4, 5, 6, 7, 8}, float[4, 3] k = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}>
{
  value = MatMul(x, v)
  kind = MatMul(x, k)
}
"""


@pytest.fixture
def folder(shell: Shell) -> Path:
    save_mlp_and_data()
    return shell.folder


def weights(path: str) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def trained(**more: Any) -> list[str]:
    """Train the MLP for one epoch, and return the messages."""
    said: list[str] = []
    given = {
        "model": "mlp.onnx",
        "data": "data.npz",
        "out": "t.onnx",
        "force": True,
        "course": Course(epochs=1),
        **more,
    }
    given["result"] = run_train(tell=lambda text, level: said.append(text), **given)
    return said


def test_the_last_layer_is_that_of_the_loss(folder: Path) -> None:
    save(HEADS, folder / "heads.onnx")
    np.savez("kinds.npz", x=np.load("data.npz")["x"], label=np.arange(50) % 5)
    for options in (
        Options(losses=(LossSpec("cross-entropy", "kind"),)),
        Options(losses=(LossSpec("cross-entropy"),), output="kind"),
    ):
        trained(model="heads.onnx", data="kinds.npz", options=options, course=Course(epochs=1, classes=5))
        shapes = sorted(array.shape for array in weights("t.onnx").values())
        assert (4, 5) in shapes and (4, 2) in shapes and (4, 3) not in shapes


def test_a_new_last_layer_is_trained_beside_the_chosen_weights(folder: Path) -> None:
    np.savez("kinds.npz", x=np.load("data.npz")["x"], label=np.arange(50) % 3)
    options = Options(losses=(LossSpec("cross-entropy"),), train=("b1",))
    trained(data="kinds.npz", options=options, course=Course(epochs=1, classes=3, seed=5))
    first = weights("t.onnx")
    trained(data="kinds.npz", options=options, course=Course(epochs=2, classes=3, seed=5))
    second, before = weights("t.onnx"), weights("mlp.onnx")
    changed = {name for name in first if not np.array_equal(first[name], second[name])}
    assert "b1" in changed and len(changed) > 1 and np.array_equal(second["w1"], before["w1"])


def test_balanced_classes_are_drawn_equally_often(folder: Path) -> None:
    label = np.r_[np.zeros(45, int), np.ones(5, int)]
    np.savez("rare.npz", x=np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32), label=label)
    options = Options(losses=(LossSpec("cross-entropy"),))
    results = {}
    for balance in (False, True):
        course = Course(epochs=1, samples=SampleOptions(balance=balance))
        trained(data="rare.npz", options=options, course=course)
        results[balance] = weights("t.onnx")
    assert any(not np.array_equal(results[True][name], results[False][name]) for name in results[True])


def test_validation_on_external_weights(folder: Path) -> None:
    model = onnx.load("mlp.onnx")
    (folder / "apart").mkdir()
    onnx.save(model, "apart/mlp.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    found = run_train("apart/mlp.onnx", "data.npz", "t.onnx", course=Course(epochs=2), val=0.2)
    inside = run_train("mlp.onnx", "data.npz", "u.onnx", course=Course(epochs=2), val=0.2)
    assert found.epochs == inside.epochs and found.by == "val_loss"


@pytest.mark.parametrize("val", [None, 0.2, "data.npz"])
def test_the_best_epoch_has_a_reason_only_with_validation(val: Any, folder: Path) -> None:
    found = run_train("mlp.onnx", "data.npz", "t.onnx", course=Course(epochs=2), val=val)
    assert (found.by == ("" if val is None else "val_loss") and found.reason == "epochs") or found.best <= 2
    assert ("val_loss" in found.epochs[0]) == (val is not None)
    assert found.steps == 2 * -(-(40 if val == 0.2 else 50) // 32)


def test_batches_that_fill_no_step(folder: Path) -> None:
    with raises(UsageError, "no_data", "accumulate=3", "2"):
        trained(options=Options(accumulate=3))
    assert "the last 1 of 3 batches have no effect, because a step takes 2 batches" in trained(
        options=Options(accumulate=2), course=Course(epochs=2, max_steps=3)
    )
    assert not any("no effect" in text for text in trained(options=Options(accumulate=2)))


@pytest.mark.parametrize(
    ("val", "course", "expected"),
    [
        (0.2, {"val_prefix": "a_"}, ("conflict", "val_prefix", "val=DATA", "data")),
        ({"": 0.2}, {"val_prefix": "a_"}, ("conflict", "val_prefix", "val=DATA", "data")),
        (None, {"patience": 2}, ("missing_value", "patience")),
        (None, {"metrics": ("mae",)}, ("missing_value", "metrics")),
        (None, {"eval_every": 2}, ("missing_value", "eval_every")),
        (None, {"schedule": "plateau"}, ("missing_value", "schedule='plateau'")),
    ],
)
def test_options_of_validation(val: Any, course: dict[str, Any], expected: tuple[str, ...], folder: Path) -> None:
    with raises(UsageError, *expected):
        trained(val=val, course=Course(epochs=1, **course))


def test_arrays_for_validation_in_the_training_file_are_not_unused(folder: Path) -> None:
    arrays = dict(np.load("data.npz"))
    np.savez("two.npz", **arrays, **{f"b_{name}": array for name, array in arrays.items()})
    named = [text for text in trained(data="two.npz") if "b_x" in text]
    both = trained(data="two.npz", val="two.npz", course=Course(epochs=1, val_prefix="b_"))
    np.savez("other.npz", **{f"b_{name}": array for name, array in arrays.items()})
    apart = trained(data="two.npz", val="other.npz", course=Course(epochs=1, val_prefix="b_"))
    assert named and not any("b_x" in text for text in both) and any("b_x" in text for text in apart)


def test_a_fixed_batch_of_one_takes_steps_of_several_samples(folder: Path) -> None:
    save(MLP.replace("batch", "1"), folder / "one.onnx")
    said = trained(model="one.onnx", course=Course(epochs=1, batch_size=10))
    assert any("keeps its batch size of 1" in text for text in said)
    fixed = onnx.load("t.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value
    plain = trained(course=Course(epochs=1, batch_size=10))
    assert fixed == 1 and not any("batch size" in text for text in plain)


def test_a_run_has_the_seed_of_its_course(folder: Path) -> None:
    text = MLP.replace("y = MatMul(s, w2)", "r = Constant <value_float = 0.5> () t = Constant <value = bool {1}> () "
                       "d = Dropout(s, r, t) y = MatMul(d, w2)")  # fmt: skip
    onnx.save(parser.parse_model(text), "drop.onnx")
    runs = []
    for seed in (1, 1, 2):
        trained(model="drop.onnx", options=Options(mode="train", seed=seed), course=Course(epochs=1, seed=seed))
        runs.append(weights("t.onnx"))
    same = [all(np.array_equal(runs[0][name], run[name]) for name in run) for run in runs[1:]]
    assert same == [True, False]


def test_a_resumed_run_keeps_its_normalization(folder: Path) -> None:
    """The mean and deviation of the first run are used, not those of the data that resume it."""
    course = {"samples": SampleOptions(normalize=("auto",)), "batch_size": 25}
    run_train("mlp.onnx", "data.npz", "t.onnx", course=Course(epochs=1, **course))  # type: ignore[arg-type]
    before = Preprocessing.of_run(Path("t.onnx.run"))
    arrays = dict(np.load("data.npz"))
    np.savez("data.npz", **{**arrays, "x": arrays["x"] * 3})
    more = Course(epochs=2, **course)  # type: ignore[arg-type]
    run_train("mlp.onnx", "data.npz", "t.onnx", course=more, resume="must", new_data=True)
    assert before is not None and Preprocessing.of_run(Path("t.onnx.run")) == before


def test_other_validation_data_are_another_run(folder: Path) -> None:
    np.savez("val.npz", **dict(np.load("data.npz")))
    run_train("mlp.onnx", "data.npz", "t.onnx", course=Course(epochs=1), val="val.npz")
    np.savez("val.npz", **{name: array[::-1] for name, array in np.load("data.npz").items()})
    again: dict[str, Any] = {"course": Course(epochs=2), "val": "val.npz", "resume": "must"}
    for more in (False, True):  # new training data are allowed, new validation data are not
        with pytest.raises(UsageError, match="validation"):
            run_train("mlp.onnx", "data.npz", "t.onnx", new_data=more, **again)
