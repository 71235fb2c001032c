"""The metrics beside scikit-learn, over batches of unequal sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.losses import LOSSES
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.class_metrics import Confusion
from onnxgrad_cli.training.metrics import DEFAULTS, METRICS, default_metrics, metric, metrics_of, parse_metric

random = np.random.default_rng(0)
CUTS = (1, 8, 9, 40, 41)


def taken(
    text: str, predictions: np.ndarray, labels: np.ndarray, cuts: tuple[int, ...] = CUTS, **settings: Any
) -> float:
    found = parse_metric(text, **settings).begin()
    for part, wanted in zip(np.split(predictions, cuts), np.split(labels, cuts), strict=True):
        found.update(part, wanted)
    return found.value()


LOGITS = random.normal(size=(60, 7)).astype(np.float32)
CLASSES = random.integers(0, 7, 60)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_accuracy_of_classes(dtype: Any) -> None:
    from sklearn import metrics as sklearn

    logits = LOGITS.astype(dtype)
    wanted = sklearn.accuracy_score(CLASSES, logits.astype(np.float64).argmax(1))
    assert 0 < wanted < 1
    assert taken("accuracy", logits, CLASSES) == pytest.approx(wanted, abs=1e-15)


def test_accuracy_leaves_out_what_is_ignored() -> None:
    from sklearn import metrics as sklearn

    labels = np.where(np.arange(60) % 3, CLASSES, -1)
    counted = labels >= 0
    wanted = sklearn.accuracy_score(labels[counted], LOGITS.argmax(1)[counted])
    assert taken("accuracy:ignore-index=-1", LOGITS, labels) == pytest.approx(wanted)
    assert taken("accuracy", LOGITS, labels, ignore_index=-1) == pytest.approx(wanted)
    assert np.isnan(taken("accuracy", LOGITS, np.full(60, -100)))


def test_accuracy_of_each_pixel() -> None:
    from sklearn import metrics as sklearn

    logits, labels = random.normal(size=(60, 3, 4, 5)), random.integers(0, 3, (60, 4, 5))
    wanted = sklearn.accuracy_score(labels.ravel(), logits.argmax(1).ravel())
    assert taken("accuracy", logits, labels) == pytest.approx(wanted)


@pytest.mark.parametrize("text, threshold", [("accuracy", 0.5), ("accuracy:threshold=0", 0.0)])
@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 4)])
def test_accuracy_of_yes_and_no(text: str, threshold: float, shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(0.3, 1, shape), random.integers(0, 2, shape).astype(np.float32)
    wanted = sklearn.accuracy_score(labels.ravel(), scores.ravel() > threshold)
    assert taken(text, scores, labels) == pytest.approx(wanted)


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_top_k(k: int) -> None:
    from sklearn import metrics as sklearn

    wanted = sklearn.top_k_accuracy_score(CLASSES, LOGITS, k=k, labels=range(7))
    assert taken(f"top-k:k={k}", LOGITS, CLASSES) == pytest.approx(wanted)


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3)])
def test_of_numbers(shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    labels = random.normal(1000, 5, shape).astype(np.float32)
    found = labels + random.normal(0, 2, shape).astype(np.float32)
    a, b = labels.astype(np.float64), found.astype(np.float64)
    assert taken("mae", found, labels) == pytest.approx(sklearn.mean_absolute_error(a, b), rel=1e-12)
    assert taken("mse", found, labels) == pytest.approx(sklearn.mean_squared_error(a, b), rel=1e-12)
    rmse = sklearn.root_mean_squared_error(a.ravel(), b.ravel())
    assert taken("rmse", found, labels) == pytest.approx(rmse, rel=1e-12)
    assert taken("r2", found, labels) == pytest.approx(sklearn.r2_score(a, b), rel=1e-9)


def test_r2_of_a_label_that_never_changes() -> None:
    from sklearn import metrics as sklearn

    labels = np.stack([np.full(60, 2.0), np.full(60, 3.0), random.normal(size=60)], 1)
    found = labels + np.array([0.0, 0.5, 0.1])
    assert taken("r2", found, labels) == pytest.approx(sklearn.r2_score(labels, found), rel=1e-9)
    assert np.isnan(taken("r2", found[:1], labels[:1], ()))


LABELS = random.integers(0, 5, 60)  # of the seven classes two are no label; one of them is never chosen either
CHOSEN = np.where(random.random((60, 1)) < 0.5, np.eye(7)[LABELS] * 3, 0) + np.where(np.arange(7) == 6, -9.0, LOGITS)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_classes(average: str) -> None:
    from sklearn import metrics as sklearn

    found = CHOSEN.argmax(1)
    assert 5 in found and 6 not in found
    wanted = sklearn.f1_score(LABELS, found, average=average, zero_division=0)
    assert 0.1 < wanted < 0.9
    assert taken(f"f1-{average}", CHOSEN, LABELS) == pytest.approx(wanted, rel=1e-12)
    counted = LABELS != 2
    wanted = sklearn.f1_score(LABELS[counted], found[counted], average=average, zero_division=0)
    assert taken(f"f1-{average}", CHOSEN, LABELS, ignore_index=2) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", ["binary", "macro", "micro", "weighted"])
@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_f1_of_yes_and_no(average: str, shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(0.3, 1, shape), random.integers(0, 2, shape).astype(np.float32)
    name = "f1" if average == "binary" else f"f1-{average}"
    wanted = sklearn.f1_score(labels.ravel(), scores.ravel() > 0, average=average)
    assert taken(f"{name}:threshold=0", scores, labels) == pytest.approx(wanted, rel=1e-12)
    two = np.stack([-scores.ravel(), scores.ravel()], 1)
    assert taken(name, two, labels.ravel().astype(int)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_of_several_answers(average: str) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(0.3, 1, (60, 4)), random.integers(0, 2, (60, 4))
    scores[:, 3], labels[:, 3] = -1, 0
    wanted = sklearn.f1_score(labels, scores > 0.5, average=average, zero_division=0)
    assert taken(f"f1-{average}", scores, labels) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(UsageError, match="f1 is for yes and no, but there are 4 classes"):
        taken("f1", scores, labels)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(np.asarray(logits, np.float64))
    return powers / powers.sum(1, keepdims=True)


def test_auc_of_classes_is_by_probability() -> None:
    from sklearn import metrics as sklearn

    logits = CHOSEN * 3
    labels = np.where(np.arange(60) < 7, np.arange(60), LABELS)
    wanted = sklearn.roc_auc_score(labels, softmax(logits), multi_class="ovr")
    assert taken("auc", logits, labels) == pytest.approx(wanted, rel=1e-12)
    assert taken("auc", softmax(logits), labels) == pytest.approx(wanted, rel=1e-12)
    areas = [sklearn.roc_auc_score(label == LABELS, softmax(logits)[:, label]) for label in range(5)]
    assert taken("auc", logits, LABELS) == pytest.approx(np.mean(areas), rel=1e-12)  # two classes have no samples
    two = sklearn.roc_auc_score(labels[labels < 2], logits[labels < 2, 1] - logits[labels < 2, 0])
    assert taken("auc", logits[:, :2], np.where(labels < 2, labels, -100)) == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3)])
def test_auc_of_yes_and_no_with_equal_scores(shape: tuple[int, ...]) -> None:
    from sklearn import metrics as sklearn

    scores, labels = random.normal(size=shape).round(1), random.integers(0, 2, shape).astype(np.float32)
    wanted = sklearn.roc_auc_score(labels.reshape(60, -1), scores.reshape(60, -1))
    assert taken("auc", scores, labels) == pytest.approx(wanted, rel=1e-12)
    assert np.isnan(taken("auc", scores, np.zeros(shape)))


def test_labels_without_places_are_not_shifted() -> None:
    with pytest.raises(UsageError, match="have no positions to shift"):
        taken("perplexity:shift=1", LOGITS, CLASSES)


def test_perplexity() -> None:
    import torch

    labels = np.where(np.arange(60) % 3, CLASSES, -100)
    wanted = torch.nn.functional.cross_entropy(torch.tensor(LOGITS), torch.tensor(labels)).exp().item()
    assert taken("perplexity", LOGITS, labels) == pytest.approx(wanted, rel=1e-5)
    assert taken("perplexity", np.log(softmax(LOGITS)), labels) == pytest.approx(wanted, rel=1e-5)
    logits, tokens = random.normal(size=(60, 5, 7)), random.integers(0, 7, (60, 5))
    tokens[::3, 3:] = -100
    (of_tokens,) = metrics_of(["perplexity"], [Term("causal-lm", "out", "y", 1.0, 7, -100, -1)])
    shifted = torch.tensor(logits[:, :-1]).reshape(-1, 7), torch.tensor(tokens[:, 1:]).reshape(-1)
    begun = of_tokens.begin()
    for part, wanted_part in zip(np.split(logits, CUTS), np.split(tokens, CUTS), strict=True):
        begun.update(part, wanted_part)
    assert begun.value() == pytest.approx(torch.nn.functional.cross_entropy(*shifted).exp().item(), rel=1e-9)


@pytest.mark.parametrize("name", ["accuracy", "f1-macro", "auc"])
def test_numbers_are_no_yes_and_no(name: str) -> None:
    """scikit-learn refuses continuous labels, too; shares and signs say yes above a half."""
    scores = random.normal(size=(60, 1))
    for labels in (random.uniform(0, 1, (60, 1)), np.sign(random.normal(size=(60, 1))), random.integers(0, 2, (60, 1))):
        yes = (labels > 0.5).astype(float)
        assert taken(name, scores, labels) == taken(name, scores, yes)
        assert taken(name, np.vstack([scores, [[0]]]), np.vstack([labels, [[-100]]])) == pytest.approx(
            taken(name, scores, yes)
        )
    for other in (1.5, -0.5, 7):
        labels = np.array([[0], [1], [other]])
        with pytest.raises(
            UsageError, match=f"{name} is for yes and no.*, but there is a label {other}\nhint: .* rmse or r2"
        ):
            taken(name, scores[:3], labels, (1,))
    with pytest.raises(UsageError, match="but there is a label 0"):
        taken(name, scores[:3], np.array([[-1], [1], [0.5]]) * [[1], [1], [0]], ())


def test_a_confusion_matrix() -> None:
    from sklearn import metrics as sklearn

    matrix = Confusion(ignore_index=2)
    for part, labels in zip(np.split(CHOSEN, CUTS), np.split(LABELS, CUTS), strict=True):
        matrix.update(part, labels)
    counted = LABELS != 2
    wanted = sklearn.confusion_matrix(LABELS[counted], CHOSEN.argmax(1)[counted], labels=range(7))
    assert matrix.matrix.tolist() == wanted.tolist()
    yes = Confusion(threshold=0.0)
    yes.update(LOGITS[:, :2], CHOSEN[:, :2] > 0.1)
    wanted = sklearn.confusion_matrix(CHOSEN[:, :2].ravel() > 0.1, LOGITS[:, :2].ravel() > 0)
    assert yes.matrix.tolist() == wanted.tolist()


TERMS = [Term("cross-entropy", "cls", "kind", 1.0, 7, 3, -1), Term("mse", "dense:0", "size", 1.0)]


def test_a_metric_is_of_an_output() -> None:
    found = metrics_of(["accuracy", "top-2:cls", "rmse:dense:0", "f1-macro:cls:ignore-index=-1"], TERMS)
    assert [(named.name, named.kind, named.output) for named in found] == [
        ("accuracy", "accuracy", ""), ("top-2:cls", "top-k", "cls"), ("rmse:dense:0", "rmse", "dense:0"),
        ("f1-macro:cls:ignore-index=-1", "f1-macro", "cls"),
    ]  # fmt: skip
    assert [named.term for named in found] == [TERMS[0], TERMS[0], TERMS[1], TERMS[0]]
    begun, labels = found[1].begin(), np.array([0, 1, 3, 6])
    begun.update(np.eye(7)[[0, 0, 0, 0]] * 2 + np.eye(7)[[1, 1, 1, 1]], labels)
    assert begun.value() == pytest.approx(2 / 3)  # label 3 does not count


def test_what_suits_several_losses_says_of_which_output_it_is() -> None:
    assert [named.name for named in metrics_of([], TERMS)] == ["accuracy:cls", "rmse:dense:0", "r2:dense:0"]
    assert [named.name for named in metrics_of([], TERMS[:1])] == ["accuracy"]
    logits = Term("bce-logits", "b", "y", 1.0)
    assert [named.name for named in metrics_of([], [TERMS[1], logits])][-1] == "accuracy:b:threshold=0"


@pytest.mark.parametrize(
    ("texts", "said"),
    [(["accuracy:none"], "names an output that has no loss"), (["mae:size"], "names an output that has no loss"),
     (["accuracy", "accuracy"], "two results would have the name 'accuracy'"), (["loss"], "no metric 'loss'")],
)  # fmt: skip
def test_metrics_that_no_loss_goes_with(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        metrics_of(texts, TERMS)


def test_accuracy_of_logits_of_yes_and_no_knows_where_they_turn() -> None:
    (named,) = metrics_of(["accuracy"], [Term("bce-logits", "b", "y", 1.0)])
    begun = named.begin()
    begun.update(np.array([0.2, -0.2, 0.7]), np.array([1.0, 0.0, 1.0]))
    assert begun.value() == 1


@pytest.mark.parametrize("name", [kind.name for kind in METRICS])
def test_before_the_first_batch_there_is_no_number(name: str) -> None:
    assert np.isnan(parse_metric(name).begin().value())
    assert METRICS.lookup(name).summary


@pytest.mark.parametrize("name", ["mae", "r2", "top-k", "accuracy"])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"\[60, 1\].*\[1, 60\]"):
        parse_metric(name).begin().update(np.zeros((60, 1)), np.zeros((1, 60)))


@pytest.mark.parametrize("text", ["accuracy", "top-k:k=2"])
def test_classes_may_lie_along_any_axis(text: str) -> None:
    logits, labels = random.normal(size=(6, 3, 4, 5)), random.integers(0, 3, (6, 4, 5))
    wanted = taken(text, logits, labels)
    assert taken(f"{text}{',' if ':' in text else ':'}class-axis=-1", np.moveaxis(logits, 1, -1), labels) == wanted
    with pytest.raises(UsageError, match=r"shape without its axis 7") as error:
        parse_metric(text, class_axis=7).begin().update(logits, labels)
    assert "[6, 3, 4, 5]" in error.value.message
    (default, *_) = default_metrics(Term("cross-entropy", "out", "y", 1.0, class_axis=-1))
    begun = default.begin()
    begun.update(np.moveaxis(logits, 1, -1), labels)
    assert begun.value() == taken("accuracy", logits, labels)


def test_the_defaults_are_of_losses_that_there_are() -> None:
    assert set(DEFAULTS) <= {loss.name for loss in LOSSES}

    def names(loss: str) -> list[str]:
        return [found.name for found in default_metrics(Term(loss, "out", "y", 1.0, ignore_index=3))]

    assert names("cross-entropy") == ["accuracy"]
    assert names("mse") == ["rmse", "r2"]
    assert names("my_loss.onnx") == names("poisson-nll") == []
    (accuracy,) = default_metrics(Term("cross-entropy", "out", "y", 1.0, ignore_index=3))
    begun = accuracy.begin()
    begun.update(np.eye(4), np.array([0, 1, 0, 3]))
    assert begun.value() == pytest.approx(2 / 3)
    assert accuracy.higher


LARGEST = """
<ir_version: 8, opset_import: ["": 17]>
metric (float[N, K] prediction, {label}[N, K] label) => ({out} worst)
{{
  wide = Cast<to=1>(label)
  off = Sub(prediction, wide)
  size = Abs(off)
  worst = ReduceMean<keepdims={keep}>(size)
}}
"""


def save(path: Path, label: str = "float", out: str = "float", keep: int = 0) -> str:
    onnx.save(parser.parse_model(LARGEST.format(label=label, out=out, keep=keep)), path)
    return str(path)


@pytest.mark.parametrize("keep, out", [(0, "float"), (1, "float[1, 1]")])
def test_a_metric_from_a_file(tmp_path: Path, keep: int, out: str) -> None:
    from sklearn import metrics as sklearn

    path = save(tmp_path / "error.onnx", out=out, keep=keep)
    found, labels = random.normal(size=(60, 3)), random.normal(size=(60, 3))
    assert taken(path, found, labels) == pytest.approx(sklearn.mean_absolute_error(labels, found), rel=1e-5)
    turned = onnx.load(path)
    turned.graph.input.insert(0, turned.graph.input.pop(1))  # what is called label is the label, first or not
    turned.graph.node[2].op_type = "Identity"
    onnx.save(turned, tmp_path / "turned.onnx")
    assert taken(str(tmp_path / "turned.onnx"), found, labels) == pytest.approx(np.mean(found - labels), rel=1e-4)
    assert parse_metric(path).name == "error"
    assert not parse_metric(path).higher
    assert parse_metric(f"{path}:higher=true").higher


def test_what_is_wrong_with_a_metric_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(OnnxgradError, match="no such file"):
        parse_metric(str(tmp_path / "none.onnx"))
    with pytest.raises(UsageError, match="takes 'label' as int64, not float64"):
        taken(save(tmp_path / "a.onnx", label="int64"), np.zeros((60, 3)), np.zeros((60, 3)))
    with pytest.raises(OnnxgradError, match=r"fails on predictions \[60, 3, 1\]"):
        taken(save(tmp_path / "a.onnx"), np.zeros((60, 3, 1)), np.zeros((60, 3)), ())
    model = onnx.load(tmp_path / "a.onnx")
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(UsageError, match="2 inputs and 2 outputs"):
        parse_metric(str(tmp_path / "b.onnx"))


@pytest.mark.parametrize(
    "text",
    ["acuracy", "accuracy:treshold=1", "top-k:k=0", "top-k:k=1.5", "mae:x=1", "accuracy:out:threshold=1,x"],
)
def test_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_metric(text)


def test_a_metric_of_ones_own() -> None:
    with METRICS.scoped():

        @metric("worst", higher=False, options={"scale": "a factor"})
        class Worst:
            def __init__(self, *, scale: float = 1.0) -> None:
                self._worst, self._scale = 0.0, scale

            def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
                self._worst = max(self._worst, float(np.abs(predictions - labels).max()))

            def value(self) -> float:
                return self._worst * self._scale

        assert taken("worst:scale=2", np.arange(60.0), np.zeros(60)) == 118


def test_r2_of_one_number_for_all_samples() -> None:
    """A model may give one that has no axis."""
    values = []
    for number in (np.array(2.0), np.array([2.0])):
        found = parse_metric("r2").begin()
        found.update(number, number)
        values.append(found.value())
    np.testing.assert_equal(*values)
