"""Find adversarial inputs: samples, changed slightly, that a model classifies differently."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import job, listed
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data import Data, SampleOptions, SequenceOptions
from onnxgrad_cli.data.class_names import called, number_of
from onnxgrad_cli.derivatives.derivative_model import float_inputs
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.errors import OnnxgradError, wrong_type, wrong_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.limits import check_ends
from onnxgrad_cli.explanations.attacks import (
    AttackedModel,
    Ball,
    are_probabilities,
    attack,
    best_of,
    check_classes,
    logits_of,
    with_losses,
)
from onnxgrad_cli.explanations.open_samples import (
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
from onnxgrad_cli.explanations.saturation import find_saturation, run_values, with_outputs
from onnxgrad_cli.explanations.scorer import Case, Scorer
from onnxgrad_cli.explanations.subject import embeddings, in_mode, no_float_inputs, required_inputs, the_input, typed
from onnxgrad_cli.files import ModelSource, own_model, save_bytes
from onnxgrad_cli.files.writing import npz_bytes
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.jobs.score_gradients import UNPROVED, Verdict, file_for, proved_scorer
from onnxgrad_cli.metadata import check_is_original
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.attack import Fooling

CLIP_TOLERANCE = 1e-6
"""The fraction of the size of the range `clip` by which samples may lie outside the range, because of rounding."""


@dataclass(frozen=True)
class Fooled:
    """The result of an attack.

    Attributes:
        words: a sentence that describes the attack.
        inputs: the name of the changed input -> the changed samples, (n, ...), in the model's type.
        samples, labels: the indices of the samples, and their labels, int64 (n,).
        before, after: the classes that the model predicts before and after the attack, int64 (n,).
        distances: the distance of each changed sample from the original, float64 (n,), in the norm of the attack.
        vanishing: the number of samples on which the attack failed, and whose gradient was 0 at the start of every run.
        targeted: the target class; None if any wrong class was a success.
        proof: the verdict of the check of the gradients, with the reason.
        files: the files written.
    """

    words: str
    inputs: dict[str, np.ndarray]
    samples: np.ndarray
    labels: np.ndarray
    before: np.ndarray
    after: np.ndarray
    distances: np.ndarray
    vanishing: int = 0
    targeted: int | None = None
    proof: Verdict = UNPROVED
    files: list[Path] = field(default_factory=list)

    @property
    def accuracy_before(self) -> float:
        """The fraction of the original samples for which the model predicts the label."""
        return float((self.before == self.labels).mean())

    @property
    def accuracy_after(self) -> float:
        """The fraction of the changed samples for which the model predicts the label."""
        return float((self.after == self.labels).mean())

    @property
    def success(self) -> float | None:
        """The fraction of attacked samples on which the attack succeeded; None if there was no sample to attack.

        An untargeted attack is made on samples that the model classifies correctly, and succeeds if the changed sample
        is classified wrongly. A targeted attack is made on samples that the model does not classify as the target, and
        succeeds if the changed sample is classified as the target.
        """
        if self.targeted is None:
            able, moved = self.before == self.labels, self.after != self.labels
        else:
            able, moved = self.before != self.targeted, self.after == self.targeted
        return float(moved[able].mean()) if able.any() else None


@attribute_failures
@job
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
    """Change samples slightly, so that a model classifies them differently.

    The attack changes the input that the model is fed: if the data are normalized, this is the normalized input.
    Success is measured by running the model itself on the changed samples.

    The arguments that are not described here are those of `run_explain`.

    Args:
        model: the model; '-' is stdin.
        data: samples in any format of training data, or a single picture.
        out: an .npz file. It receives the changed samples and the model's other inputs, each under the name of the
            input, and the arrays `labels`, `samples`, `before` and `after` of `Fooled`. By default nothing is written.
        fooling: the settings of the attack; by default fgsm.
        output: the scores, [batch, classes]: an output of the model or a value inside it; by default the first float
            output.
        wrt: the input to change; by default the float input.
        label: the name of the labels in the data; None uses the model's own predictions as labels.
        prefix: the prefix of the inputs' names in the data.
        sample: the indices of the samples; by default all.

    Raises:
        CheckFailed: a gradient is wrong, or `verify` is True and the gradients could not be checked.
        UnsupportedError: the model can't be differentiated.
        UsageError: the arguments don't fit the model or the data.
        OnnxgradError: a file can't be read or written.
    """
    protect_inputs(data)
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
    if not float_inputs(graph):
        raise wrong_type(no_float_inputs(graph), _cut(proto, path, graph, output or graph.output_names[0]))
    what = scored(graph, output)
    subject = the_input(proto, path, graph, wrt)
    if subject.inner:
        raise wrong_type(
            f"'{subject.name}' is not a float input: values inside the model can't be fed, and tokens can't be "
            "changed slightly",
            "name a float input with `wrt`",
        )
    logits = logits_of(proto, graph, what)
    targeted = fooling.targeted is not None
    check_classes(what, what.classes, fooling.loss, targeted)
    found = open_samples(
        data, proto, graph, what, label or "label", label is not None, prefix, samples or SampleOptions(),
        SequenceOptions(), tell,
    )  # fmt: skip
    check_batch_first(found, proto, subject.name, what.output)
    names = class_names(found, proto, what, label)
    aim = ClassChoice.of(None if fooling.targeted is None else number_of(fooling.targeted, names), what.axis)
    if aim is not None and not aim.which.isdigit():
        raise wrong_value(
            f"`targeted='{aim.which}'`: expected one class for all samples", "give its number or its name"
        )
    target_class = None if aim is None else int(aim.which)
    rows = chosen(found, sample)
    logs = False
    with suppress(OnnxgradError):  # a model that can't be run is refused below, with the reason
        feeds = found.batch(_filled(rows[:TOGETHER], found))
        logs = are_probabilities(run_values(proto, path, graph, feeds, [logits])[logits])
    if logs:
        tell(f"note: '{logits}' holds probabilities, so their logarithms are used as logits", 0)
    attacked = with_losses(proto, path, graph, logits, fooling.loss, targeted, logs)
    subject = replace(subject, model=attacked.model)
    scorer, proof = proved_scorer(subject, attacked.losses, what, found.batch_size, options, verify, tell)
    ball = Ball(fooling.epsilon, fooling.norm, *(fooling.clip or _range(found, subject.name, tell)))
    parts: list[dict[str, np.ndarray]] = []
    for part in batches(rows, scorer, TOGETHER):
        tell(f"attacking: {sum(len(each['x']) for each in parts)} of {len(rows)} samples done", 1)
        parts.append(_fooled(part, scorer, found, what, label, attacked, fooling, target_class, ball))
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    mask = arrays.pop("vanishing")
    vanishing = int(mask.sum())
    if vanishing:
        first = next(part for part in batches(rows, scorer, TOGETHER) if np.isin(part, rows[mask]).any())
        first = _filled(first, found)
        exponential = fooling.loss == "cross-entropy" and not targeted
        saturated = find_saturation(
            proto, path, graph, what, logits, exponential, found.batch(first), np.isin(first, rows[mask])
        )
        tell(
            f"caution: the gradients of {vanishing} of {len(rows)} samples vanish at the start. The attack fails on "
            f"these, which does not show that the model is robust{saturated}", 0,
        )  # fmt: skip
    aimed = "another class" if target_class is None else called(target_class, names)
    words = escaped(_words(fooling, ball, what, aimed, label))
    fooled = Fooled(
        words, {subject.name: arrays["x"]}, rows, arrays["labels"], arrays["before"],
        arrays["after"], arrays["distances"], vanishing, target_class, proof,
    )  # fmt: skip
    if target is not None:
        others = {key: value for key, value in found.batch(rows).items() if key not in (subject.name, label)}
        told = {"labels": fooled.labels, "samples": rows, "before": fooled.before, "after": fooled.after}
        save_bytes(npz_bytes({**told, **others, **fooled.inputs}), target)
        fooled.files.append(target)
        if subject.name in found.normal:
            tell(f"'{target}' holds model inputs that are already normalized: read it with `normalize='none'`", 0)
    return fooled


def _fooled(
    part: np.ndarray,
    scorer: Scorer,
    data: Data,
    what: Scored,
    label: str | None,
    attacked: AttackedModel,
    fooling: Fooling,
    targeted: int | None,
    ball: Ball,
) -> dict[str, np.ndarray]:
    """Attack some samples, and return the arrays of the result by name.

    Args:
        part: the indices of the samples.
        scorer: computes the scores of the model and the gradients of the loss.
        data, what, label, fooling, ball: see `run_attack`.
        attacked: the model with the loss.
        targeted: the class that the model should predict; None: any class except the labelled one.
    """
    feeds = data.batch(part)
    given = feeds.pop(label) if label else None
    scores, x = scorer.values(feeds)
    check_classes(what, scores.shape[what.axis], fooling.loss, targeted is not None)
    before = scores.argmax(what.axis)
    labels = labels_of("argmax" if given is None else "label", what, scores, given)
    aim = labels if targeted is None else labels_of(targeted, what, scores, None)
    rounding = CLIP_TOLERANCE * (ball.high - ball.low)
    if x.min() < ball.low - rounding or x.max() > ball.high + rounding:
        raise wrong_value(
            f"`clip`: the samples have values from {x.min():g} to {x.max():g}, outside {ball.low:g} to {ball.high:g}",
            "give the range of the model's input, after normalization",
        )

    def classes_of(moved: np.ndarray) -> np.ndarray:
        return scorer.values({**feeds, scorer.subject.name: moved})[0].argmax(what.axis)

    def succeeded(classes: np.ndarray) -> np.ndarray:
        return classes != labels if targeted is None else classes == targeted

    case = Case(scorer, {**feeds, **attacked.one_hot(labels, scores.shape[what.axis])}, x, aim)
    sources = [np.random.default_rng([fooling.seed, row]) for row in part.tolist()] if fooling.random else []
    run = partial(attack, case, ball, *fooling.way, targeted is not None, sources)
    moved, vanishing = best_of(
        fooling.restarts, run, case, targeted is not None, lambda moved: succeeded(classes_of(moved))
    )
    after = classes_of(moved)
    vanishing &= ~succeeded(before) & ~succeeded(after)
    change = np.abs(moved.astype(np.float64) - x).reshape(len(x), -1)
    distances = change.max(1) if ball.norm == "inf" else np.sqrt((change**2).sum(1))
    return {
        "x": moved,
        "labels": labels,
        "before": before,
        "after": after,
        "distances": distances,
        "vanishing": vanishing,
    }


def _cut(model: ModelProto, path: Path | None, graph: Graph, output: str) -> str:
    """Return a hint for a model without float inputs: a command that extracts the part after its first float values."""
    values = embeddings(model, graph)
    kind, data = "embeddings", f"on data that hold {listed(values)}"
    if not values:
        inputs = required_inputs(graph)
        casts = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
        values = [new for new, old in casts.items() if old in inputs and is_float(graph.types.get(new))]
        kind, data = "Cast", f"with {' '.join(f'`columns={casts[new]}={new}`' for new in values)}"
    needed = graph.ancestors([output], values)
    names = [*values, *(name for name in graph.input_names if name in needed)]
    written = (str(path or ""), *names, output)
    if not values or output in values or not all(re.fullmatch(r"[\w./:-]+", name) for name in written):
        return "export the model with a float input"
    part = f"{Path(written[0]).stem}.float.onnx"
    code = f"import onnx; onnx.utils.extract_model({written[0]!r}, {part!r}, {names}, {[output]})"
    return f"python -c \"{code}\" cuts the model behind the {kind}; attack '{part}' {data}"


def _filled(rows: np.ndarray, data: Data) -> np.ndarray:
    """Return indices of samples. If the model's batch size is fixed, repeat them up to this size."""
    return np.resize(rows, data.batch_size) if data.batch_size else rows


def _range(data: Data, name: str, tell: Tell) -> tuple[float, float]:
    """Return the smallest and the largest value of an input in the data, after any normalization."""
    low, high = math.inf, -math.inf
    for start in range(0, len(data), TOGETHER):
        x = data.batch(np.arange(start, min(start + TOGETHER, len(data))))[name]
        low, high = min(low, float(x.min())), max(high, float(x.max()))
    tell(f"'{name}' is kept within {low:g} to {high:g}, the range of the data; `clip` sets another range", 0)
    return low, high


def _words(fooling: Fooling, ball: Ball, what: Scored, aim: str, label: str | None) -> str:
    steps, size = fooling.way
    how = "fgsm" if fooling.method == "fgsm" else f"pgd in {steps} steps of {size:g}"
    begin = f" from a random start (seed {fooling.seed})" if fooling.random else ""
    if fooling.restarts > 1:
        begin = f" from {fooling.restarts} random starts (seed {fooling.seed})"
    own = "" if label else "; the labels are the model's own predictions"
    norm = "L-inf" if fooling.norm == "inf" else "L2"
    how = f"{how}{begin} on the {fooling.loss} loss, within {norm} distance {ball.epsilon:g}"
    return f"{how}, so that '{what.output}' predicts {aim}{own}"
