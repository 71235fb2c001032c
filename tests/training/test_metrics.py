"""The metrics beside scikit-learn, over batches of unequal sizes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.losses import LOSSES
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.metrics import DEFAULTS, METRICS, default_metrics, metric, metrics_of, parse_metric
from tests.facts import raises, raises_as

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


def test_labels_without_places_are_not_shifted() -> None:
    with raises(UsageError, "wrong_shape", "1"):
        taken("perplexity:shift=1", LOGITS, CLASSES)


@pytest.mark.parametrize("name", ["accuracy", "f1-macro", "auc"])
def test_numbers_are_no_yes_and_no(name: str) -> None:
    """scikit-learn refuses continuous labels, too; shares and signs say yes above a half."""
    scores, named = random.normal(size=(60, 1)), ["f1"] * (name == "f1-macro")
    for labels in (random.uniform(0, 1, (60, 1)), np.sign(random.normal(size=(60, 1))), random.integers(0, 2, (60, 1))):
        yes = (labels > 0.5).astype(float)
        assert taken(name, scores, labels) == taken(name, scores, yes)
        assert taken(name, np.vstack([scores, [[0]]]), np.vstack([labels, [[-100]]])) == pytest.approx(
            taken(name, scores, yes)
        )
    for other in (1.5, -0.5, 7):
        labels = np.array([[0], [1], [other]])
        with raises(UsageError, "wrong_value", *named, "1", "0", "1", "-1", f"{other:g}") as refused:
            taken(name, scores[:3], labels, (1,))
        assert refused.value.hint and "rmse" in refused.value.hint
    with raises(UsageError, "wrong_value", *named, "1", "0", "1", "-1", "0"):
        taken(name, scores[:3], np.array([[-1], [1], [0.5]]) * [[1], [1], [0]], ())


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
     (["accuracy", "accuracy"], "two results would have the name 'accuracy'"), (["loss"], ("unknown_name", "loss"))],
)  # fmt: skip
def test_metrics_that_no_loss_goes_with(texts: list[str], said: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, said):
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


OF_CLASSES = ["accuracy", "top-k", "f1", "f1-macro", "f1-micro", "f1-weighted", "auc", "perplexity"]


@pytest.mark.parametrize("name", ["mae", "r2", *OF_CLASSES])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"\[60, 1\].*\[1, 60\]") as refused:
        parse_metric(name).begin().update(np.zeros((60, 1)), np.zeros((1, 60)))
    assert refused.value.code == "wrong_shape"
    assert refused.value.message.startswith(f"{name} ") == (name in OF_CLASSES)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_scores_need_an_axis_of_samples_and_one_of_classes(name: str) -> None:
    with raises(UsageError, "wrong_shape", *(["f1"] if name.startswith("f1") else []), "3"):
        parse_metric(name, class_axis=0).begin().update(np.zeros(3), np.zeros((), np.int64))


@pytest.mark.parametrize("text", ["accuracy", "top-k:k=2"])
def test_classes_may_lie_along_any_axis(text: str) -> None:
    logits, labels = random.normal(size=(6, 3, 4, 5)), random.integers(0, 3, (6, 4, 5))
    wanted = taken(text, logits, labels)
    assert taken(f"{text}{',' if ':' in text else ':'}class-axis=-1", np.moveaxis(logits, 1, -1), labels) == wanted
    with raises(UsageError, "wrong_shape", *"634564"[:4], *"645") as error:
        parse_metric(text, class_axis=7).begin().update(logits, labels)
    assert error.value.hint and error.value.hint.endswith("axis 7")
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
        with raises(OnnxgradError, "conflict", "worst"):
            metric("worst", higher=False, options={"scale": "a factor"})(Worst)
        metric("mae", higher=True, options={"scale": "a factor"}, override=True)(Worst)
        assert parse_metric("mae").higher and taken("mae", np.arange(60.0), np.zeros(60)) == 59
    assert not parse_metric("mae").higher


def test_r2_of_one_number_for_all_samples() -> None:
    """A model may give one that has no axis."""
    values = []
    for number in (np.array(2.0), np.array([2.0])):
        found = parse_metric("r2").begin()
        found.update(number, number)
        values.append(found.value())
    np.testing.assert_equal(*values)
