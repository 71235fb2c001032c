"""`evaluate` and `predict` beside scikit-learn and onnxruntime: exact over all samples, in whatever batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from onnxgrad_cli import (
    LossSpec,
    Options,
    SampleOptions,
    Setting,
    Trainer,
    UsageError,
    build,
    parse_schedule,
    run_evaluate,
    run_predict,
)
from onnxgrad_cli.data.class_names import class_names, names_for
from tests.cli_harness import Shell
from tests.facts import raises_as

TWO = """
<ir_version: 8, opset_import: ["": 17]>
two (float[{batch}, 4] x) => (float[{batch}, 3] cls, float[{batch}, 2] reg)
<float[4, 3] w = {{1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}}, float[4, 2] v = {{1, 2, 3, 4, 5, 6, 7, 8}},
 float[3] one = {{1, 1, 1}}, float[3] zero = {{0, 0, 0}}, float[3] mean = {{1, 2, 3}}>
{{
  h = MatMul(x, w)
  n = BatchNormalization(h, one, zero, mean, one)
  cls = Dropout(n)
  reg = MatMul(x, v)
}}
"""
LOSSES = ("--loss", "cross-entropy:cls:kind", "--loss", "mse:reg:size")
BOTH = (LossSpec("cross-entropy", "cls", "kind"), LossSpec("mse", "reg", "size"))
random = np.random.default_rng(0)
X = random.standard_normal((45, 4)).astype(np.float32)
ARRAYS = {"x": X, "kind": random.integers(0, 3, 45), "size": random.standard_normal((45, 2)).astype(np.float32)}


def two(batch: str = "batch", **metadata: str) -> onnx.ModelProto:
    model = parser.parse_model(TWO.format(batch=batch))
    for key, value in metadata.items():
        model.metadata_props.add(key=key.replace("_", "."), value=value)
    return model


def outputs(x: np.ndarray = X) -> tuple[np.ndarray, np.ndarray]:
    cls, reg = onnxruntime.InferenceSession(two().SerializeToString()).run(None, {"x": x})
    return cls, reg


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(two(onnxgrad_classes=json.dumps({"cls": ["ant", "bee", "cat"]})), "m.onnx")
    np.savez("d.npz", **ARRAYS)
    return Shell(tmp_path, capsys)


def wanted() -> dict[str, float]:
    from scipy.special import softmax
    from sklearn import metrics as sklearn

    cls, reg = (array.astype(np.float64) for array in outputs())
    kind, size = ARRAYS["kind"], ARRAYS["size"]
    return {
        "loss": sklearn.log_loss(kind, softmax(cls, 1)) + sklearn.mean_squared_error(size, reg),
        "accuracy:cls": sklearn.accuracy_score(kind, cls.argmax(1)),
        "f1-macro:cls": sklearn.f1_score(kind, cls.argmax(1), average="macro"),
        "top-2:cls": sklearn.top_k_accuracy_score(kind, cls, k=2),
        "auc:cls": sklearn.roc_auc_score(kind, softmax(cls, 1), multi_class="ovr"),
        "rmse:reg": np.sqrt(np.mean((size - reg) ** 2)),
        "r2:reg": sklearn.r2_score(size, reg),
        "mae:reg": sklearn.mean_absolute_error(size, reg),
    }


@pytest.mark.parametrize("size", [1, 7, 64])
def test_each_output_is_measured_over_all_samples(shell: Shell, size: int) -> None:
    from sklearn import metrics as sklearn

    asked = [word for name in list(wanted())[1:] for word in ("--metric", name)]
    done = shell("evaluate", "m.onnx", "--data", "d.npz", *LOSSES, *asked, "--batch-size", size, "--json")
    assert done.code == 0, done.err
    assert done.json["results"] == pytest.approx(wanted(), rel=1e-5)
    assert done.json["samples"] == 45 and list(done.json["confusion"]) == ["cls"]
    matrix = sklearn.confusion_matrix(ARRAYS["kind"], outputs()[0].argmax(1))
    assert done.json["confusion"]["cls"] == {"classes": ["ant", "bee", "cat"], "counts": matrix.tolist()}


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_all_samples_as_one_batch(shell: Shell, reduction: str, size: int) -> None:
    """With class weights and ignored labels, though some batches have no label that counts. As in PyTorch."""
    import torch
    from torch.nn import functional as F

    kind = np.where(np.arange(45) % 9 < 7, ARRAYS["kind"], -100)
    kind[7:14] = -100
    np.savez("d.npz", **{**ARRAYS, "kind": kind})
    np.save("weights.npy", [1.0, 2.0, 0.5])
    cls, reg, wanted = (torch.tensor(each).double() for each in (*outputs(), ARRAYS["size"]))
    classes = {"weight": torch.tensor([1.0, 2.0, 0.5]).double(), "reduction": reduction}
    loss = 0.3 * F.cross_entropy(cls, torch.tensor(kind), **classes) + F.mse_loss(reg, wanted, reduction=reduction)
    done = shell(
        "evaluate", "m.onnx", "--data", "d.npz", "--loss", "cross-entropy:cls:kind:0.3", "--loss", "mse:reg:size",
        "--loss-option", "class-weights=weights.npy", "--reduction", reduction, "--batch-size", size, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    expected = loss.item() / 45 if reduction == "sum" else loss.item()
    assert done.json["results"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_what_suits_the_losses_is_measured_unasked_and_shown_as_a_table(shell: Shell) -> None:
    done = shell("evaluate", "m.onnx", "--data", "d.npz", *LOSSES)
    names = [line.split()[0] for line in done.out.splitlines() if line and not line.startswith(" ")]
    assert names == ["loss", "accuracy:cls", "rmse:reg", "r2:reg", "cls:", "ant", "bee", "cat"]
    rows = [list(map(int, line.split()[1:])) for line in done.out.splitlines()[-3:]]
    assert np.sum(rows) == 45


CODE = """
import numpy as np

def reverse(batch):
    return {name: array[:, ::-1] if name == "x" else array for name, array in batch.items()}

def wrong(scores, labels):
    return np.mean(scores.argmax(1) != labels)
"""


def test_columns_are_mapped_normalised_and_transformed(shell: Shell) -> None:
    (shell.folder / "code.py").write_text(CODE)
    np.savez("named.npz", features=X * 2 + 1, **{name: ARRAYS[name] for name in ("kind", "size")})
    how = ("--data", "named.npz", "--map", "features=x", "--normalize", "1/2", "--transform", "code.py:reverse")
    cls, reg = outputs(np.ascontiguousarray(X[:, ::-1]))
    done = shell("predict", "m.onnx", *how, "-o", "p.npz")
    assert done.code == 0, done.err
    np.testing.assert_allclose(np.load("p.npz")["reg"], reg, rtol=1e-4, atol=1e-4)
    done = shell("evaluate", "m.onnx", *how, *LOSSES, "--metric", "code.py:wrong:cls", "--json")
    assert done.code == 0, done.err
    assert done.json["results"]["wrong:cls"] == pytest.approx(np.mean(cls.argmax(1) != ARRAYS["kind"]))
    x = np.random.default_rng(2).integers(0, 256, X.shape).astype(np.uint8)
    np.savez("bytes.npz", x=x)  # columns of bytes are numbers, and not pixels
    assert shell("predict", "m.onnx", "--data", "bytes.npz", "--normalize", "1/2", "-o", "p.npz", "--force").code == 0
    np.testing.assert_allclose(np.load("p.npz")["reg"], outputs((x - np.float32(1)) / 2)[1], rtol=1e-4)
    arrays = {"features": X * 2 + 1}
    setting = Setting(samples=SampleOptions(columns={"features": "x"}, normalize=("1/2",)))
    np.testing.assert_allclose(run_predict(two(), arrays, setting=setting).outputs["cls"], outputs()[0], atol=1e-4)


def test_an_array_is_mapped_to_one_input(shell: Shell) -> None:
    loss = ("--loss", "cross-entropy:cls:kind", "--data", "d.npz", "--map", "kind=kind")
    assert shell("evaluate", "m.onnx", *loss).code == 0
    assert shell("evaluate", "m.onnx", *loss, "--map", "kind=kind").code == 2


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"columns": {"feature": "x"}}, ("unknown_name", "columns", "feature")),
        ({"columns": {"features": "y"}}, ("unknown_name", "columns", "y")),
        ({"normalize": ("auto",)}, "is only for training data"),
        ({"balance": True}, ("conflict", "augment", "balance")),
    ],
)
def test_what_can_not_be_done_to_samples_is_told(samples: dict[str, Any], said: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, said):
        run_predict(two(), {"features": X, "x": X}, setting=Setting(samples=SampleOptions(**samples)))


def test_a_metric_of_an_output_says_which_epoch_is_best(shell: Shell) -> None:
    more = ("--epochs", "3", "--val", "d.npz", "--metric", "rmse:reg", "--metric", "accuracy:cls", "--mode", "train")
    done = shell("train", "m.onnx", "--data", "d.npz", *LOSSES, *more, "-o", "t.onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["by"] == "val_rmse:reg"
    found = run_evaluate("t.onnx", "d.npz", Options(losses=BOTH), metrics=("rmse:reg", "accuracy:cls"))
    best = done.json["epochs"][done.json["best"] - 1]
    assert found.results == pytest.approx({name: best[f"val_{name}"] for name in found.results}, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--metric", "accuracy:other"), "outputs with a loss: cls, reg"),
        (("--metric", "f1:cls"), "f1 is for binary classification, but there are 3 classes"),
        (("--metric", "acuracy"), "no metric 'acuracy'"),
    ],
)
def test_metrics_that_do_not_fit_are_told_before_a_step(shell: Shell, words: tuple[str, ...], said: str) -> None:
    for command in (("evaluate",), ("train", "--val", "d.npz", "--max-steps", "1")):
        done = shell(command[0], "m.onnx", "--data", "d.npz", *command[1:], *LOSSES, *words)
        assert done.code == 2 and said in done.err, done.err
        assert "epoch 1" not in done.err


def test_a_model_without_anything_to_train_is_measured_too(shell: Shell) -> None:
    """As one of which all weights are integers, or which only sorts scores."""
    onnx.save(parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] x) => (float[batch, 4] y) { r = Round(x) y = Softmax(r) }"""), "bare.onnx")  # fmt: skip
    np.savez("best.npz", x=X, label=np.round(X).argmax(1))
    result = shell("evaluate", "bare.onnx", "--data", "best.npz", "--loss", "cross-entropy", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["result"]["results"]["accuracy"] == 1.0
    assert shell("build", "bare.onnx", "--loss", "cross-entropy").code == 3


def test_labels_that_only_a_run_finds_of_another_shape_are_told(shell: Shell) -> None:
    """The file declares no number of columns."""
    text = "<ir_version: 8, opset_import: ['': 17]> g (float[n, m] x) => (float[n, k] y) { y = Concat<axis = 1>(x, x) }"
    onnx.save(parser.parse_model(text.replace("'", '"')), "m.onnx")
    np.savez("d.npz", x=np.ones((3, 2), np.float32), label=np.ones((3, 3), np.float32))
    result = shell("evaluate", "m.onnx", "--data", "d.npz", "--loss", "mse")
    assert result.code == 1 and result.facts[:2] == ("failed", "Sub")


def test_a_training_model_is_refused(shell: Shell) -> None:
    assert shell("build", "m.onnx", *LOSSES, "--no-verify", "-o", "t.onnx").code == 0
    for command in ("evaluate", "predict"):
        done = shell(command, "t.onnx", "--data", "d.npz")
        assert done.code == 2 and "the model is already a training model" in done.err


def test_a_trainer_measures_and_predicts_what_it_would_save(tmp_path: Path) -> None:
    options = Options(losses=BOTH, optimizer="adam", mode="train")
    trainer = Trainer(build(two(), options), threads=1)
    schedule = parse_schedule("step:every=2e,factor=0.5,warmup=1e", 0.1, steps=10, epoch=2)
    rates = [schedule.rate(step) for step in range(10)]
    twin = Trainer(build(two(), options), threads=1)
    for rate in rates:
        assert trainer.step(ARRAYS, schedule) == twin.step(ARRAYS, rate)
    onnx.save(two(), tmp_path / "m.onnx")
    trainer.save(tmp_path / "t.onnx", tmp_path / "m.onnx")
    found = trainer.evaluate(two(), ARRAYS, metrics=("auc:cls", "rmse:reg"), setting=Setting(batch_size=10))
    assert found == run_evaluate(tmp_path / "t.onnx", ARRAYS, options, metrics=("auc:cls", "rmse:reg"),
                                 setting=Setting(batch_size=10))  # fmt: skip
    said = trainer.predict(two(), {"x": X}, outputs=("reg",))
    (reg,) = onnxruntime.InferenceSession(tmp_path / "t.onnx").run(["reg"], {"x": X})
    np.testing.assert_array_equal(said["reg"], reg)
    onnx.save(build(two(), options).model, tmp_path / "train.onnx")
    with pytest.raises(UsageError, match="all options of its losses"):
        Trainer(tmp_path / "train.onnx").evaluate(two(), ARRAYS)


@pytest.mark.parametrize(
    "arrays", [{"x": X}, {**ARRAYS, "kind": ARRAYS["kind"] + 1}, {**ARRAYS, "x": X[:, :3]}, {**ARRAYS, "x": X[:9]}]
)
def test_arrays_that_do_not_fit_are_refused(arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(UsageError):
        run_evaluate(two(), arrays, Options(losses=BOTH))


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"onnxgrad_classes": '{"cls": ["a", "b", "c"]}'}, ["a", "b", "c"]),
        ({"onnxgrad_classes": '{"kind": ["a", "b", "c"], "z": ["d", "e", "f"]}'}, ["a", "b", "c"]),
        ({"onnxgrad_classes": '["a", "b", "c"]'}, ["a", "b", "c"]),
        ({"names": "{1: 'b', 0: 'a', 2: 'c'}"}, ["a", "b", "c"]),
        ({"names": "{1: 'b', 5: 'c'}"}, []),
        ({"names": "__import__('os')"}, []),
        ({"onnxgrad_classes": '["a", "b"]'}, []),
        ({"onnxgrad_classes": '{"cls": ["a", "b"]}'}, ["a", "b", "2"]),
        ({"onnxgrad_classes": '{"cls": ["a", "b", "c", "d"]}'}, []),
        ({"onnxgrad_classes": "{"}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_names_of_classes_in_metadata(metadata: dict[str, Any], names: list[str]) -> None:
    assert names_for(class_names(two(**metadata)), 3, "cls", "kind") == names


def test_data_may_name_fewer_classes_than_the_model_tells_apart(shell: Shell) -> None:
    rows = [f"{','.join(map(str, x))},{['ant', 'bee'][i % 2]}" for i, x in enumerate(X)]
    Path("d.csv").write_text("\n".join(["x_0,x_1,x_2,x_3,kind", *rows]))
    onnx.save(two(), "m.onnx")
    loss = ("--loss", "cross-entropy:cls:kind", "--epochs", "1", "-o", "t.onnx")
    done = shell("train", "m.onnx", "--data", "d.csv", "--val", "d.csv", *loss)
    assert done.code == 0, done.err
    assert "| `2`" in Path("t.onnx.run/report.md").read_text()
    found = shell("evaluate", "t.onnx", "--data", "d.csv", *loss[:2], "--json")
    assert found.json["confusion"]["cls"]["classes"] == ["ant", "bee", "2"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_names_that_the_model_does_not_know_are_no_guess(shell: Shell, form: str) -> None:
    """Two names in data for three classes may be any two of them; three can only be numbered in their order."""
    onnx.save(two(), "bare.onnx")

    def written(names: list[str]) -> str:
        rows = [{**{f"x_{i}": float(x) for i, x in enumerate(row)}, "kind": names[at % len(names)]}
                for at, row in enumerate(X)]  # fmt: skip
        if form == "npz":
            np.savez("names.npz", x=X, kind=np.array([row["kind"] for row in rows]))
        elif form == "jsonl":
            Path("names.jsonl").write_text("\n".join(map(json.dumps, rows)))
        else:
            lines = [",".join(map(str, row.values())) for row in rows]
            Path("names.csv").write_text("\n".join([",".join(rows[0]), *lines]))
        return f"names.{form}"

    loss = ("--loss", "cross-entropy:cls:kind")
    few = written(["no", "yes"])
    np.savez("numbers.npz", x=X, kind=ARRAYS["kind"])
    for command in (
        ("evaluate", "bare.onnx", "--data", few, *loss),
        ("explain", "bare.onnx", "--data", few, "--class", "label", "--output", "cls", "--label", "kind"),
        ("attack", "bare.onnx", "--data", few, "--output", "cls", "--label", "kind"),
        ("train", "bare.onnx", "--data", "numbers.npz", "--val", few, *loss, "-o", "t.onnx"),
    ):
        done = shell(*command)
        assert done.code == 2, (command, done.err)
        assert done.facts[1:] == (few, "kind", "3") and "no, yes" in done.err, done.err
    assert shell("train", "bare.onnx", "--data", few, *loss, "--epochs", "1", "-o", "t.onnx").code == 0
    assert shell("evaluate", "t.onnx", "--data", few, *loss).code == 0
    assert shell("evaluate", "bare.onnx", "--data", written(["a", "b", "c"]), *loss).code == 0


@pytest.mark.parametrize(
    "said",
    [
        {"names": "{0: 'cat', 1: 'ant', 2: 'bee'}"}, {"onnxgrad_classes": '{"kind": ["cat", "ant", "bee"]}'},
        {"onnxgrad_classes": '{"cls": ["cat", "ant", "bee"]}'},
    ],
)  # fmt: skip
def test_names_are_numbered_as_the_model_says_in_whatever_form(shell: Shell, said: dict[str, str]) -> None:
    onnx.save(two(**said), "m.onnx")
    names = np.array(["cat", "ant", "bee"])[ARRAYS["kind"]]
    for few in (slice(None), names != "ant"):
        np.savez("numbers.npz", x=X[few], kind=ARRAYS["kind"][few])
        np.savez("names.npz", x=X[few], kind=names[few])
        command = ("evaluate", "m.onnx", "--loss", "cross-entropy:cls:kind", "--json", "--data")
        by_number, by_name = (shell(*command, f"{form}.npz").json for form in ("numbers", "names"))
        assert by_name["results"] == by_number["results"] and by_name["confusion"] == by_number["confusion"]


def test_data_are_prepared_as_those_of_the_training(shell: Shell) -> None:
    """Names of classes, and numbers that were normalised, from the data as they were."""
    import csv

    with Path("d.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["x_0", "x_1", "x_2", "x_3", "kind"])
        writer.writerows([*row, ["ant", "bee", "cat"][kind]] for row, kind in zip(X + 50, ARRAYS["kind"], strict=True))
    onnx.save(two(), "m.onnx")
    loss = ("--loss", "cross-entropy:cls:kind", "--metric", "f1-macro:cls")
    done = shell("train", "m.onnx", "--data", "d.csv", "--val", "d.csv", *loss, "--normalize", "auto", "--epochs", "1",
                 "-o", "t.onnx", "--json")  # fmt: skip
    assert done.code == 0, done.err
    found = shell("evaluate", "t.onnx", "--data", "d.csv", *loss, "--json")
    assert found.json["results"]["loss"] == pytest.approx(done.json["epochs"][0]["val_loss"], rel=1e-5)
    assert found.json["confusion"]["cls"]["classes"] == ["ant", "bee", "cat"]
    assert "| `bee`" in Path("t.onnx.run/report.md").read_text()
    assert shell("predict", "t.onnx", "--data", "d.csv", "-o", "p.npz").code == 0
    with np.load("p.npz") as said:
        right = said["cls_label"] == np.array(["ant", "bee", "cat"])[ARRAYS["kind"]]
    assert np.sum(right) == np.trace(found.json["confusion"]["cls"]["counts"])
