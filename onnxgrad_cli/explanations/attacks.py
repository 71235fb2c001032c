"""Attack models: find inputs close to samples that the model classifies differently.

The loss of the attack is added to the model as an output [batch, classes]. Column k holds minus the loss that a sample
would have if its class were k. An attack decreases the column of the true class. A targeted attack increases the column
of its target.

Sources: I. Goodfellow, J. Shlens, C. Szegedy, Explaining and Harnessing Adversarial Examples, 2014, arXiv:1412.6572
(FGSM); A. Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, 2017, arXiv:1706.06083 (PGD); N.
Carlini, D. Wagner, Towards Evaluating the Robustness of Neural Networks, 2016, arXiv:1608.04644 (margin); F. Croce, M.
Hein, Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free Attacks, 2020,
arXiv:2003.01690 (DLR).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from onnxgrad_cli.common.choices import AttackLoss, Norm
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import wrong_shape
from onnxgrad_cli.explanations.open_samples import Scored
from onnxgrad_cli.explanations.scorer import Case
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.upgrade import upgrade

SAME_CLASS = frozenset({"Softmax", "LogSoftmax", "Log", "Identity", "Cast"})
"""Operators that may come between the logits and the output, because they don't change the order of the classes."""

MAX_SUM_ERROR = 1e-3
"""Scores count as probabilities if those of each sample add up to 1 with at most this error."""

SMALLEST_RANGE = 1e-12
"""A number that is added to the divisor of the DLR loss, so that it is not zero. AutoAttack adds the same number."""


@dataclass(frozen=True)
class AttackedModel:
    """A model that also computes the losses of an attack.

    Attributes:
        model: the model.
        losses: the output [batch, classes] with minus the loss of each sample, for each class that it might have.
        label: the input for the true classes of the samples; "" if the loss does not read them. It takes one-hot floats
            instead of class numbers. The proof can then feed random floats, with which the loss varies.
    """

    model: ModelProto
    losses: str
    label: str = ""

    def one_hot(self, labels: np.ndarray, classes: int) -> dict[str, np.ndarray]:
        """Return the feed with the true classes `labels`, int64 [batch]; empty if the loss does not read them."""
        if not self.label:
            return {}
        kind = next(value.type for value in self.model.graph.input if value.name == self.label)
        return {self.label: np.eye(classes, dtype=onnx.helper.tensor_dtype_to_np_dtype(dtype_of(kind)))[labels]}


def check_classes(what: Scored, classes: int | None, loss: AttackLoss, targeted: bool) -> None:
    """Check that an output has enough classes for the loss of the attack.

    Raises:
        UsageError: the output has fewer classes.
    """
    if classes is None:
        return
    if classes < 2:
        raise wrong_shape(f"'{what.output}' has only one class", "choose another output with `output`")
    needed = {"dlr": 4 if targeted else 3}.get(loss, 2)
    if classes < needed:
        takes = f"the {'targeted ' * targeted}DLR loss requires at least {needed}"
        raise wrong_shape(f"'{what.output}' has {classes} classes, but {takes}", "use `loss='margin'`")


def logits_of(model: ModelProto, graph: Graph, what: Scored) -> str:
    """Return the logits: the input of the Softmax that computes the scores, or the output if there is no such Softmax.

    A loss of logits doesn't saturate, unlike a loss computed after the Softmax. Only operators in `SAME_CLASS` may come
    between the Softmax and the output.

    Args:
        model: the model.
        graph: the model with types.
        what: the output with the scores.

    Raises:
        UsageError: the shape of the output is not [batch, classes].
    """
    kind = graph.types[what.output]
    if len(shape_of(kind) or ()) != 2:
        hint = "choose another output with `output`"
        raise wrong_shape(f"'{what.output}' is {in_words(kind)}, but an attack requires [batch, classes]", hint)
    makers = {output: node for node in model.graph.node for output in node.output}
    name = logits = what.output
    while (node := makers.get(name)) is not None and node.op_type in SAME_CLASS and is_standard(node.domain):
        axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
        name = node.input[0]
        if axis not in (1, -1) or not is_float(graph.types.get(name)):
            break
        if "Softmax" in node.op_type:
            logits = name
    return logits


def are_probabilities(scores: np.ndarray) -> bool:
    """Return True if the scores [n, classes] are probabilities: not negative, and with a sum of 1 for each sample."""
    sums = scores.astype(np.float64).sum(1)
    return bool((scores >= 0).all() and (np.abs(sums - 1) < MAX_SUM_ERROR).all())


def with_losses(
    model: ModelProto, path: Path | None, graph: Graph, logits: str, loss: AttackLoss, targeted: bool, logs: bool
) -> AttackedModel:
    """Return a copy of a model that also computes the losses of an attack.

    Args:
        model: the model, which is not changed.
        path: the file that the model was read from.
        graph: the model with types.
        logits: the scores that the loss is computed from, [batch, classes]; see `logits_of`.
        loss: the name of the loss.
        targeted: True for a targeted attack. DLR then reads the true classes from an input.
        logs: True if `logits` are probabilities. Their logarithms are then used as logits.

    Raises:
        UnsupportedError: the model has too old an opset and can't be converted to a newer one.
    """
    copy = copied(model)
    work = Graph(copy, path)
    if work.opset() is None:
        copy.opset_import.add(domain="", version=OLDEST_OPSET)
    if (work.opset() or 0) < OLDEST_OPSET:
        upgrade(work, OLDEST_OPSET)
    work.types.update(graph.types)
    op = Op(work)
    scores = op.wide(op.val(logits))  # in float16, SMALLEST_RANGE is zero
    if logs:
        smallest = np.finfo(onnx.helper.tensor_dtype_to_np_dtype(scores.dtype)).tiny
        scores = op.Log(op.Max(scores, op.const(float(smallest), scores)))
    label = ""
    if loss == "dlr" and targeted:
        label = work.fresh("true_class")
        work.add_input(label, tensor_type(scores.dtype, scores.shape))
        losses = _targeted_dlr(op, scores, op.val(label))
    else:
        losses = LOSSES[loss](op, scores)
    op.rename(losses, name := work.fresh(f"{logits}_{loss.replace('-', '_')}"))
    work.nodes.extend(op.nodes)
    work.add_output(name)
    return AttackedModel(work.commit(), name, label)


def _cross_entropy(op: Op, z: Val) -> Val:
    """Emit minus the cross-entropy for each class, which is the logarithm of the probability of the class."""
    return op.LogSoftmax(z, axis=1)


def _margin(op: Op, z: Val) -> Val:
    """Emit z_k - max_{j ≠ k} z_j, the margin of Carlini and Wagner, for each class k."""
    first, second = _largest(op, z, 2)
    return z - op.Where(z < first, first, second)


def _dlr(op: Op, z: Val) -> Val:
    """Emit the margin divided by the difference of the largest and third-largest logit, by Croce and Hein."""
    first, second, third = _largest(op, z, 3)
    return (z - op.Where(z < first, first, second)) / (first - third + SMALLEST_RANGE)


def _targeted_dlr(op: Op, z: Val, label: Val) -> Val:
    """Emit the logit of each class minus that of the true class, divided by a range of the logits.

    The range is the largest logit minus the mean of the third-largest and fourth-largest one.
    """
    first, _, third, fourth = _largest(op, z, 4)
    true = op.sum(label * z, [1])
    return (z - true) / (first - (third + fourth) * 0.5 + SMALLEST_RANGE)


LOSSES: Mapping[AttackLoss, Callable[[Op, Val], Val]] = {
    "cross-entropy": _cross_entropy,
    "margin": _margin,
    "dlr": _dlr,
}
"""Name of a loss -> the function that emits minus the loss for each class, from logits [batch, classes]."""


def _largest(op: Op, z: Val, count: int) -> tuple[Val, ...]:
    """Return the `count` largest logits of each sample in descending order, each [batch, 1]."""
    values, _ = op.TopK(z, op.ints([count]), axis=1, outputs=2)
    return op.split(values, [1] * count, axis=1)


@dataclass(frozen=True)
class Ball:
    """The set of inputs that an attack may use: a ball around each sample, clipped to a range of values.

    Attributes:
        epsilon: the radius of the ball.
        norm: the norm that measures the change of a sample: 'inf' (the largest change of an element) or '2' (the
            Euclidean norm).
        low, high: the smallest and the largest value that an element may have.
    """

    epsilon: float
    norm: Norm = "inf"
    low: float = -np.inf
    high: float = np.inf

    def project(self, moved: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return `moved`, projected to the balls around `x` and clipped to the range of values; float64 (n, ...)."""
        change = moved - x
        if self.norm == "inf":
            change = np.clip(change, -self.epsilon, self.epsilon)
        else:
            change = change * np.minimum(1.0, self.epsilon / np.maximum(_length(change), np.finfo(np.float64).tiny))
        return np.clip(x + change, self.low, self.high)

    def direction(self, gradient: np.ndarray) -> np.ndarray:
        """Return the direction of steepest ascent, with norm 1: the sign of the gradient, or the scaled gradient."""
        if self.norm == "inf":
            return np.sign(gradient)
        length = _length(gradient)
        return np.divide(gradient, length, out=np.zeros_like(gradient), where=length > 0)

    def drawn(self, x: np.ndarray, sources: Sequence[np.random.Generator]) -> np.ndarray:
        """Return a random input in the ball around each sample."""
        if self.norm == "inf":
            change = np.stack([source.uniform(-self.epsilon, self.epsilon, x.shape[1:]) for source in sources])
        else:
            change = np.stack([source.standard_normal(x.shape[1:]) for source in sources])
            radius = np.array([source.uniform() for source in sources]) ** (1 / max(x[0].size, 1))
            change *= self.epsilon * radius.reshape(-1, *[1] * (x.ndim - 1)) / _length(change)
        return self.project(x + change, x)


def attack(
    case: Case, ball: Ball, steps: int, step_size: float, targeted: bool, sources: Sequence[np.random.Generator]
) -> tuple[np.ndarray, np.ndarray]:
    """Run projected gradient descent: x ← project(x + step_size · direction(g)), `steps` times.

    g is the gradient of the score with respect to x, negated unless `targeted`. FGSM is a single step of size epsilon.

    Args:
        case: the samples. Their score is minus the loss for a class.
        ball: the set of inputs that the attack may use.
        steps: the number of steps.
        step_size: the length of a step.
        targeted: True to increase the score, False to decrease it.
        sources: a random generator for each sample, which draws the starting point in the ball. If empty, the attack
            starts at the samples.

    Returns:
        The inputs, in the shape and type of x, and a bool for each: True if its first gradient vanished. A gradient
        vanishes if all elements are smaller than the smallest normal number of its type, or of float32 for 16-bit
        floats.
    """
    x = case.x.astype(np.float64)
    moved = ball.drawn(x, sources) if sources else x
    vanishing = np.zeros(len(x), bool)
    for step in range(steps):
        gradient = case.gradients(moved.astype(case.x.dtype))
        gradient[~np.isfinite(gradient)] = 0  # a step by NaN would make the input NaN, and any class a success
        if step == 0:
            smallest = np.finfo(np.promote_types(case.x.dtype, np.float32)).tiny
            vanishing = np.all(np.abs(gradient.reshape(len(x), -1)) < smallest, axis=1)
        way = ball.direction(gradient if targeted else -gradient)
        moved = ball.project(moved + step_size * way, x)
    return moved.astype(case.x.dtype), vanishing


def best_of(
    runs: int, run: Callable[[], tuple[np.ndarray, np.ndarray]], case: Case, targeted: bool,
    succeeded: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run an attack several times. For each sample, keep the first successful input or, if there is none, the best one.

    Args:
        runs: the largest number of runs. Fewer are run if the attack has succeeded for all samples.
        run: calls `attack` with the case.
        case, targeted: see `attack`.
        succeeded: takes inputs and returns a bool array, True where the attack succeeded.

    Returns:
        The inputs, and a bool for each: True if its first gradient vanished in every run.
    """
    best, vanishing = run()
    done = np.ones(len(best), bool) if runs == 1 else succeeded(best)
    for _ in range(runs - 1):
        if done.all():
            break
        moved, vanished = run()
        now, gain = succeeded(moved), case.scores(moved) - case.scores(best)
        better = ~done & (now | (gain > 0 if targeted else gain < 0))
        best[better] = moved[better]
        done, vanishing = done | now, vanishing & vanished
    return best, vanishing


def _length(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).sum(tuple(range(1, x.ndim)), keepdims=True))
