"""From a model and samples to inputs that it classifies otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Attack, Norm
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.visible import visible
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.explanations.attacks import Ball, attack
from onnxgrad_cli.explanations.likelihood import with_log_probabilities
from onnxgrad_cli.explanations.samples import (
    TOGETHER,
    Scored,
    batches,
    check_batch_first,
    chosen,
    class_names,
    labels_of,
    open_samples,
    scored,
)
from onnxgrad_cli.explanations.saturation import find_saturation, with_outputs
from onnxgrad_cli.explanations.scorer import Case, Scorer
from onnxgrad_cli.explanations.subject import in_mode, the_input, typed
from onnxgrad_cli.files import ModelSource, own_model, save_bytes
from onnxgrad_cli.files.arrays import write_npz
from onnxgrad_cli.jobs.scores import UNPROVED, Verdict, file_for, proved_scorer
from onnxgrad_cli.metadata import check_is_original
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.class_names import called, number_of
from onnxgrad_cli.training.data import Data, SampleOptions, SequenceOptions

CLIP_TOLERANCE = 1e-6
"""The share of the range of `clip` by which samples may lie outside of it, as rounding leaves them."""

LARGEST = float(np.finfo(np.float32).max)
"""What no distance is beyond: its square is a float64 still."""


@dataclass(frozen=True)
class Fooling(KnownKeywords):
    """How a model is attacked.

    Attributes:
        method: 'fgsm', one step of epsilon, or 'pgd', several from a random place.
        epsilon: the largest distance from a sample, in the numbers that the model is fed.
        steps, step_size: of pgd; by default 10 steps of 2.5 epsilon / steps.
        norm: of the distance: 'inf' or '2'.
        targeted: the class that samples are to be taken for, by its number or the name that the model stores; None is
            any other.
        clip: the least and the greatest number of an input; None is what the data have.
        start: whether pgd begins at a random place within epsilon, in place of the sample.
        seed: of that.

    Raises:
        UsageError: a word or a number does not fit.
    """

    method: Attack = "fgsm"
    epsilon: float = 0.03
    steps: int | None = None
    step_size: float | None = None
    norm: Norm = "inf"
    targeted: int | str | None = None
    clip: tuple[float, float] | None = None
    start: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        checks.one_of("method", self.method, Attack)
        checks.one_of("norm", self.norm, Norm)
        checks.at_least("epsilon", self.epsilon, 0)
        checks.at_least("seed", self.seed, 0, whole=True)
        for name, whole in (("steps", True), ("step_size", False), ("targeted", True)):
            named = name == "targeted" and isinstance(self.targeted, str)
            if getattr(self, name) is not None and not named:
                checks.at_least(name, getattr(self, name), 1 if name == "steps" else 0, whole=whole)
        for name in ("epsilon", "step_size"):
            if (getattr(self, name) or 0) > LARGEST:
                raise UsageError(
                    f"`{name}` is more than a float32 holds", "give it in the numbers that the model takes"
                )
        if self.method == "fgsm" and (self.steps, self.step_size) != (None, None):
            raise UsageError("fgsm is one step of epsilon: `steps` and `step_size` are of pgd", "take `method='pgd'`")
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise UsageError("`clip` is the least number and a greater one", "such as 0 and 1")

    @property
    def way(self) -> tuple[int, float]:
        """How many steps there are, and how long each is."""
        if self.method == "fgsm":
            return 1, self.epsilon
        steps = self.steps or 10
        return steps, 2.5 * self.epsilon / steps if self.step_size is None else self.step_size


@dataclass(frozen=True)
class Fooled:
    """What became of samples.

    Attributes:
        words: what was done, in a sentence.
        inputs: the input that was changed -> the new samples, (n, ...), in the model's type.
        samples, labels: their numbers, and their classes, int64 (n,).
        before, after: the classes that the model finds, int64 (n,).
        distances: how far each sample was moved, float64 (n,), in the norm that was asked for.
        flat: how many samples had a gradient of zero at the start, of which nothing is known.
        targeted: the class that was aimed at; None is any other.
        proof: the verdict on the gradients, and why.
        files: what was written.
    """

    words: str
    inputs: dict[str, np.ndarray]
    samples: np.ndarray
    labels: np.ndarray
    before: np.ndarray
    after: np.ndarray
    distances: np.ndarray
    flat: int = 0
    targeted: int | None = None
    proof: Verdict = UNPROVED
    files: list[Path] = field(default_factory=list)

    @property
    def accuracy_before(self) -> float:
        """The share of samples that the model classifies as labelled."""
        return float((self.before == self.labels).mean())

    @property
    def accuracy_after(self) -> float:
        """The same of the changed samples."""
        return float((self.after == self.labels).mean())

    @property
    def success(self) -> float | None:
        """The share that the attack has moved, of samples that could be; None where there are none.

        Those are the rightly classified ones, which then are not; of a targeted attack those that were not taken for
        the target, which then are.
        """
        if self.targeted is None:
            able, moved = self.before == self.labels, self.after != self.labels
        else:
            able, moved = self.before != self.targeted, self.after == self.targeted
        return float(moved[able].mean()) if able.any() else None


@judged
def run_attack(
    model: ModelSource,
    data: str | Path,
    out: str | Path | None = None,
    fooling: Fooling | None = None,
    *,
    output: str | None = None,
    wrt: str | None = None,
    label: str | None = None,
    prefix: str = "",
    sample: Sequence[int] = (),
    samples: SampleOptions | None = None,
    options: Options | None = None,
    verify: bool | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> Fooled:
    """Change samples by little, so that a model classifies them otherwise.

    What is changed is what the model is fed: numbers after a normalization. Samples are judged by the model itself,
    which is run on what was found.

    Args:
        model: the model; '-' is stdin.
        data: samples in any format of training data, or a single picture.
        out: an .npz with the new samples, and what else the model is fed, under the inputs' names, `labels`, `samples`,
            `before` and `after`; by default nothing is written.
        fooling: how; by default fgsm.
        output: the scores, [batch, classes]: an output of the model or a value in between; by default the first output
            of floats.
        wrt: the input that is changed; by default the one of floats.
        label: what the data call the labels; None takes the model's own answers for them.
        prefix: what names in the data have before the inputs' names.
        sample: the numbers of the samples; by default all.
        samples, options, verify, force, tell: see `run_explain`.

    Raises:
        CheckFailed: a gradient is wrong, or there is no proof though one is asked for.
        UnsupportedError: the model can't be differentiated.
        UsageError: the request does not fit the model or the data.
        OnnxgradError: a file can't be read or written.
    """
    keep(data)
    fooling, options = fooling or Fooling(), options or Options()
    proto, path = own_model(model)
    if output is None:
        check_is_original(proto)
    target = file_for(out, [".npz"], proto, path, force)
    proto = in_mode(proto, path, options, tell)
    graph = typed(proto, path, options)
    check_ends(graph)
    inner = with_outputs(proto, graph, [output or ""])
    if inner is not proto:
        proto, graph = inner, typed(inner, path, options)
    what = scored(graph, output)
    likely, name = with_log_probabilities(proto, graph, what)
    subject = the_input(likely, path, typed(likely, path, options), wrt)
    if subject.inner:
        raise UsageError(
            f"'{subject.name}' is no input of floats: what is in between can't be fed, nor tokens changed by little",
            "name an input of floats with `wrt`",
        )
    found = open_samples(
        data, proto, graph, what, label or "label", label is not None, prefix, samples or SampleOptions(),
        SequenceOptions(), tell,
    )  # fmt: skip
    check_batch_first(found, proto, subject.name, what.output)
    names = class_names(found, proto, what, label)
    aim = None if fooling.targeted is None else ClassChoice.of(number_of(fooling.targeted, names), what.axis)
    if aim is not None and not aim.which.isdigit():
        raise UsageError(
            f"`targeted='{aim.which}'`: one class for all samples is wanted", "give its number or its name"
        )
    target_class = None if aim is None else int(aim.which)
    rows = chosen(found, sample)
    scorer, proof = proved_scorer(subject, name, what, found.batch_size, options, verify, tell)
    ball = Ball(fooling.epsilon, fooling.norm, *(fooling.clip or _range(found, subject.name, tell)))
    parts: list[dict[str, np.ndarray]] = []
    for part in batches(rows, scorer, TOGETHER):
        tell(f"attacking: {sum(len(each['x']) for each in parts)} of {len(rows)} samples are done", 1)
        parts.append(_fooled(part, scorer, found, what, label, fooling, target_class, ball))
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    mask = arrays.pop("flat")
    flat = int(mask.sum())
    if flat:
        first = next(part for part in batches(rows, scorer, TOGETHER) if np.isin(part, rows[mask]).any())
        feeds = {key: value for key, value in found.batch(first).items() if key != label}
        saturated = find_saturation(proto, path, graph, what, feeds, np.isin(first, rows[mask]))
        tell(
            f"caution: the gradients of {flat} of {len(rows)} samples are zero at the start: that these stay as they "
            f"are is no sign of robustness{saturated}", 0,
        )  # fmt: skip
    aimed = "another class" if target_class is None else called(target_class, names)
    words = visible(_words(fooling, ball, what, aimed, label))
    fooled = Fooled(
        words, {subject.name: arrays["x"]}, rows, arrays["labels"], arrays["before"],
        arrays["after"], arrays["distances"], flat, target_class, proof,
    )  # fmt: skip
    if target is not None:
        others = {key: value for key, value in found.batch(rows).items() if key not in (subject.name, label)}
        save_bytes(_archive(fooled, others), target)
        fooled.files.append(target)
        if subject.name in found.normal:
            tell(f"'{target}' holds what the model is fed, normalised already: read it with `normalize='none'`", 0)
    return fooled


def _fooled(
    part: np.ndarray,
    scorer: Scorer,
    data: Data,
    what: Scored,
    label: str | None,
    fooling: Fooling,
    targeted: int | None,
    ball: Ball,
) -> dict[str, np.ndarray]:
    """What becomes of some samples."""
    feeds = data.batch(part)
    given = feeds.pop(label) if label else None
    scores, x = scorer.values(feeds)
    if scores.shape[what.axis] < 2:
        raise UsageError(f"'{what.output}' has one class: there is no other", "name another output with `output`")
    before = scores.argmax(what.axis)
    labels = labels_of("argmax" if given is None else "label", what, scores, given)
    aim = labels if targeted is None else labels_of(targeted, what, scores, None)
    rounding = CLIP_TOLERANCE * (ball.high - ball.low)
    if x.min() < ball.low - rounding or x.max() > ball.high + rounding:
        raise UsageError(
            f"`clip`: the samples hold {x.min():g} to {x.max():g}, which goes beyond {ball.low:g} to {ball.high:g}",
            "give the range of what the model is fed, after a normalization",
        )
    case = Case(scorer, feeds, x, aim)
    sources = [np.random.default_rng([fooling.seed, row]) for row in part.tolist()]
    begun = sources if fooling.method == "pgd" and fooling.start else []
    moved, flat = attack(case, ball, *fooling.way, targeted is not None, begun)
    after = scorer.values({**feeds, scorer.subject.name: moved})[0].argmax(what.axis)
    change = np.abs(moved.astype(np.float64) - x).reshape(len(x), -1)
    distances = change.max(1) if ball.norm == "inf" else np.sqrt((change**2).sum(1))
    return {"x": moved, "labels": labels, "before": before, "after": after, "distances": distances, "flat": flat}


def _range(data: Data, name: str, tell: Tell) -> tuple[float, float]:
    """The least and the greatest number that an input has in the data, as the model is fed them."""
    low, high = math.inf, -math.inf
    for start in range(0, len(data), TOGETHER):
        x = data.batch(np.arange(start, min(start + TOGETHER, len(data))))[name]
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    tell(f"'{name}' is kept within {low:g} to {high:g}, as the data have it; `clip` says otherwise", 0)
    return low, high


def _words(fooling: Fooling, ball: Ball, what: Scored, aim: str, label: str | None) -> str:
    steps, size = fooling.way
    how = "fgsm" if fooling.method == "fgsm" else f"pgd in {steps} steps of {size:g}"
    begin = f" from a random place (seed {fooling.seed})" if fooling.method == "pgd" and fooling.start else ""
    own = "" if label else "; the labels are the model's own answers"
    norm = "L-inf" if fooling.norm == "inf" else "L2"
    return f"{how}{begin}, {norm} within {ball.epsilon:g}, so that '{what.output}' is taken for {aim}{own}"


def _archive(found: Fooled, others: dict[str, np.ndarray]) -> bytes:
    """The new samples as data that the model can be fed, and what became of them."""
    told = {"labels": found.labels, "samples": found.samples, "before": found.before, "after": found.after}
    stream = BytesIO()
    write_npz({**told, **others, **found.inputs}, stream)
    return stream.getvalue()
