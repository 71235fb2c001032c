"""The emitter for losses that are Python functions, with derivatives and evaluations of models.

A derivative is emitted by the same reverse walk as the backward part, as nodes of the loss. The backward part
differentiates through these nodes, and the gradients are checked as for any other loss.

The values of a 16-bit model are cast to float32 before a loss function receives them. A derivative with respect to such
a value is the derivative with respect to the model's own value, cast to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import TensorProto, TypeProto

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import (
    Caution,
    UsageError,
    conflict,
    missing_value,
    suggest,
    unknown_name,
    wrong_shape,
    wrong_type,
    wrong_value,
)
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads
from onnxgrad_cli.ir.types import HALVES, in_words, is_float, known_sizes, shape_of
from onnxgrad_cli.metadata import InnerDerivative, InnerEvaluation
from onnxgrad_cli.passes.loss.model_file import ModelFile, append_copy
from onnxgrad_cli.record import StepRecord

LEAVE_OUT = "remove this derivative from the loss"
"""The hint for a derivative that is zero."""


PIECEWISE_LINEAR = frozenset(
    "Abs Clip GlobalMaxPool HardSigmoid LeakyRelu Max MaxPool Min PRelu ReduceL1 ReduceMax ReduceMin Relu Shrink "
    "ThresholdedRelu".split()
)
"""Operators whose second derivative is zero wherever it exists."""


class _IndependentError(UsageError):
    """The value to differentiate does not depend on the value to differentiate with respect to."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the model on a data set.

    Attributes:
        names: map from a value of the model that depends on the inputs to its copy in this evaluation; empty for the
            model itself.
        nodes: the nodes of the evaluation.
        labels: map from the name of a label in the data set to the input that it is fed to; empty if the data set has
            no name.
    """

    names: dict[str, str]
    nodes: list[Node]
    labels: dict[str, str] = field(default_factory=dict)

    def own(self, name: str) -> str:
        """Return the name that a value of the model has in this evaluation."""
        return self.names.get(name, name)


class LossOp(Op):
    """The emitter that Python losses receive as `op`: `Op` with derivatives and evaluations of models.

    Args:
        graph: the model. The emitted nodes are appended to it before each derivative is written.
        training: the record of the loss.

    Attributes:
        evaluation: the evaluation of the model that the current loss is computed on.
        folder: the folder of the file with the current loss.
    """

    def __init__(self, graph: Graph, training: StepRecord) -> None:
        super().__init__(graph)
        self.role, self.training = "loss", training
        self._has_statistics = bool(training.state or training.fusions)
        self.evaluation = Evaluation({}, list(graph.nodes))
        self.folder = Path()
        self._derived: set[str] = set()  # results of derivatives
        self._linear_pieces: set[str] = set()  # operators in `PIECEWISE_LINEAR` that were differentiated
        self._narrow: dict[str, str] = {}  # value that was cast to float32 -> the 16-bit value

    # -- 16-bit models ----------------------------------------------------------------------------------------

    def wide(self, x: Val) -> Val:
        """Return `x`, cast to float32 if it has 16 bits."""
        found = super().wide(x)
        if found is not x:
            self._narrow[found.name] = x.name
        return found

    def own(self, x: Val) -> Val:
        """Return the 16-bit value that `x` was cast from by `wide`, or `x` itself."""
        return self.val(self._narrow.get(x.name, x.name))

    def _as(self, place: Val, value: Val) -> Val:
        """Return a float32 value in the 16-bit type of its place, or the value itself."""
        is_wide = isinstance(value, Val) and place.dtype in HALVES and value.dtype == TensorProto.FLOAT
        return self.cast(self.own(value), place.dtype) if is_wide else value

    # -- derivatives ------------------------------------------------------------------------------------------

    def grad(self, y: Val, *xs: Val) -> Any:
        """Return the gradient of the sum of y with respect to each x, in the shape of x.

        If the samples of a batch are independent, these are the gradients of each sample, as with
        `torch.autograd.grad(y.sum(), x, create_graph=True)`.

        Raises:
            UsageError: y does not depend on x.
            UnsupportedError: nodes between x and y can't be differentiated; all of them are listed.
        """
        return self._vjp("grad", y, None, xs)

    def vjp(self, y: Val, cotangent: Val, *xs: Val) -> Any:
        """Return the product of `cotangent`, which has the shape of y, with the Jacobian dy/dx, for each x.

        Raises:
            UsageError: y does not depend on x.
            UnsupportedError: nodes between x and y can't be differentiated; all of them are listed.
        """
        return self._vjp("vjp", y, cotangent, xs)

    def _vjp(self, name: str, y: Val, cotangent: Val | None, xs: Sequence[Val]) -> Any:
        self._check_values(name, y, *xs)
        own = [self.own(x) for x in xs]
        cotangent = None if cotangent is None else self._apart(cotangent, y)
        found = self._walk(name, y, self.fill(1.0, y) if cotangent is None else cotangent, own)
        seed = "" if cotangent is None else cotangent.name
        self.record("vjp", y, seed, own, found)
        results = [each if x is given else self.wide(each) for each, x, given in zip(found, own, xs, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    def jvp(self, y: Val, x: Val, tangent: Val) -> Val:
        """Return the product of the Jacobian dy/dx with `tangent`, which has the shape of x.

        Reverse mode is applied twice. The vector-Jacobian product of y is a linear function of its cotangent. The
        vector-Jacobian product of this function, with `tangent` as the cotangent, is the result.

        Raises:
            UsageError: y does not depend on x.
            UnsupportedError: a node between x and y can't be differentiated twice.
        """
        self._check_values("jvp", y, x)
        x = self.own(x)
        tangent = self._as(x, tangent)
        self._check_fits("jvp", f"the tangent of '{x.name}'", x, tangent)
        tangent = self._apart(tangent, y)
        cotangent = self.rename(self.fill(0.0, y), self.graph.fresh(f"{self.scope}/cotangent"))
        (transposed,) = self._walk("jvp", y, cotangent, [x])
        (found,) = self._walk("jvp", transposed, tangent, [cotangent])
        self.record("jvp", y, tangent.name, [x], [found])
        return found

    def _apart(self, seed: Val, y: Val) -> Val:
        """Return a copy of a cotangent or tangent if `y` is computed from it. The proof replaces the seed by an input,
        which must not change `y`.
        """
        if not isinstance(seed, Val):
            return seed  # refused by _check_fits
        self.flush()
        is_shared = seed.name in self.graph.initializers or seed.name in self.graph.ancestors([y.name])
        return self.Identity(seed) if is_shared else seed

    def record(self, kind: str, y: Val, seed: str, xs: Sequence[Val], found: Sequence[Val]) -> None:
        """Record a derivative that is a part of the loss, for the proof."""
        wrt, results = tuple(x.name for x in xs), tuple(each.name for each in found)
        self.training.inner.append(InnerDerivative(kind, y.name, seed, wrt, results))

    def divergence(self, y: Val, x: Val) -> Val:
        """Return the divergence, Σ_i dy[:, i] / dx[:, i], one number per sample: [batch, 1].

        x and y have the same shape, [batch, ...], with fixed sizes after the batch axis. One gradient is computed
        for each element of a sample.

        Raises:
            UsageError: the shapes differ, or the size of an axis after the batch axis is unknown.
        """
        if x.shape[1:] != y.shape[1:]:
            raise wrong_shape(
                f"`op.divergence`: both values must have the same shape, but '{y.name}' is {in_words(y.type)} "
                f"and '{x.name}' is {in_words(x.type)}",
                "give both the shape [batch, ...]",
            )
        count = _elements(x)
        terms = []
        for at, column in enumerate(self._columns(y, count)):
            with suppress(_IndependentError):  # its derivative is zero
                terms.append(self._columns(self.grad(column, x), count)[at])
        if not terms:
            raise _IndependentError(f"`op.divergence`: '{y.name}' does not depend on '{x.name}'", LEAVE_OUT)
        return self.Sum(*terms) if len(terms) > 1 else terms[0]

    def laplacian(self, y: Val, x: Val) -> Val:
        """Return the Laplacian of y, which has one number per sample: the sum of its second
        derivatives with respect to the elements of x.

        Returns:
            A value of the shape of y, [batch] or [batch, 1].

        Raises:
            UsageError: y has a different shape or does not depend on x, or a size of x after the batch is unknown.
        """
        if y.rank > 2 or (y.rank == 2 and y.shape[1] != 1):
            raise wrong_shape(
                f"`op.laplacian`: '{y.name}' must have one number per sample, but is {in_words(y.type)}",
                "give it the shape [batch, 1]",
            )
        slope = self.grad(y, x)
        try:
            found = self.divergence(slope, x)
        except _IndependentError:
            raise UsageError(
                f"`op.laplacian`: the first derivative of '{y.name}' is constant, so the second is zero",
                "use a network with smooth activations, such as tanh or SiLU",
            ) from None
        return found if y.rank == 2 else self.squeeze(found, [1])

    def _columns(self, x: Val, count: int) -> Sequence[Val]:
        """Split `x` into `count` columns [batch, 1], one for each element of a sample."""
        flat = x if x.rank == 2 else self.reshape(x, [self.size(x, 0), count])
        return self.split(flat, [1] * count, 1) if count > 1 else (flat,)

    def _walk(self, name: str, y: Val, cotangent: Val, xs: Sequence[Val]) -> list[Val]:
        """Append nodes for the products of `cotangent` with dy/dx, and return the product for each x."""
        for each in (y, *xs):
            if not is_float(each.type):
                raise wrong_type(
                    f"`op.{name}`: '{each.name}' must be a float tensor, but is {in_words(each.type)}",
                    "pass float tensors, because only they have derivatives",
                )
        self._check_fits(name, f"the cotangent of '{y.name}'", y, cotangent)
        self.flush()
        training, scope, role = self.training, self.scope, self.role
        record = Differentiation(straight_through=training.straight_through, forward_stays=training.forward_stays)
        wanted = [x.name for x in xs]
        try:
            found = differentiate(self.graph, {y.name: cotangent}, wanted, self, record)
        finally:
            self.training, self.scope, self.role, self.forward = training, scope, role, ""
            self.wanted, self.node = (lambda _: True), None
        if record.partial:
            raise conflict(
                f"`op.{name}`: a gradient is stopped before '{record.partial[0]}', so the derivative would be "
                "incomplete",
                "compute the loss from values whose derivatives are not stopped",
            )
        for x in wanted:
            if found[x] is None:
                raise _IndependentError(f"`op.{name}`: '{y.name}' does not depend on '{x}'", LEAVE_OUT)
        if self.graph.ancestors([y.name]).isdisjoint(self._derived):
            self._linear_pieces.update(PIECEWISE_LINEAR.intersection(record.kinks))
        elif self._linear_pieces:
            kinds = ", ".join(sorted(self._linear_pieces))
            text = f"a second derivative passes through {kinds}, whose own second derivative is zero wherever it exists"
            training.cautions.append(Caution("note", y.name, text))
        training.rules.update(record.rules)
        training.kinks.update(record.kinks)
        training.cautions.extend(record.cautions)
        self.flush()
        results = [value for x in wanted if (value := found[x]) is not None]
        self._derived.update(value.name for value in results)
        return results

    def _check_values(self, name: str, y: Val, *xs: Val) -> None:
        """Check that there are values to differentiate with respect to, and that all are values of the graph."""
        if not xs or not all(isinstance(each, Val) for each in (y, *xs)):
            raise wrong_type(
                f"`op.{name}` accepts only values of the graph",
                "pass parameters of the loss function, or results of op",
            )

    def _check_fits(self, name: str, what: str, place: Val, value: Val) -> None:
        """Check that a value has the type and the fixed sizes that its place, such as an input, requires.

        Args:
            name: the method of `op` that was called.
            what: the description of the place, for the error.
            place: a value of the type that is required.
            value: the value that was passed.

        Raises:
            UsageError: the type or a size differs.
        """
        if not isinstance(value, Val):
            raise wrong_type(f"`op.{name}` accepts only values of the graph, not {value!r}", "use op.const(...)")
        sizes = zip(place.known_shape or (), value.known_shape or (), strict=False)
        is_broadcast = any(size != other and (isinstance(size, int) or other == 1) for size, other in sizes)
        if value.dtype != place.dtype or value.rank != place.rank or is_broadcast:
            raise wrong_type(
                f"`op.{name}`: {what} must be {in_words(place.type)}, but the given value is {in_words(value.type)}",
                "pass a value of this type",
            )

    def flush(self) -> None:
        """Append the nodes emitted so far to the graph, so that a reverse walk can find them."""
        self.graph.nodes.extend(self.nodes)
        self.nodes = []
        self._readers = self._makers = None

    # -- reductions -------------------------------------------------------------------------------------------

    def reduce(self, kind: str, x: Val, axes: Sequence[int] | None = None, keepdims: bool = True) -> Val:
        """Reduce `x` over `axes` as `Op.reduce` does.

        Raises:
            UsageError: `x` has no such axis.
        """
        for axis in axes or ():
            if not -x.rank <= axis < x.rank:
                raise wrong_value(
                    f"a reduction over axis {axis}: '{x.name}' is {in_words(x.type)}",
                    f"choose axes from {-x.rank} to {x.rank - 1}",
                )
        return super().reduce(kind, x, axes, keepdims)

    # -- models -----------------------------------------------------------------------------------------------

    def model(self, **inputs: Val) -> Any:
        """Evaluate the model once more with other inputs and the same weights.

        Args:
            inputs: map from an input to its new value. The other inputs keep their values.

        Returns:
            The output of the model, or a tuple of its outputs.

        Raises:
            UsageError: the model has no such input, or a value is of a different type.
        """
        names, known = dict[str, str](), self.training.inputs
        for name, value in inputs.items():
            if name not in known:
                raise unknown_name(f"`op.model`: the model has no input '{name}'", suggest(name, known, "inputs"))
            own = self.val(self.evaluation.own(name))
            value = self._as(own, value)
            self._check_fits("model", f"the input '{name}'", own, value)
            names[own.name] = value.name
        if self._has_statistics:
            text = (
                "`op.model` evaluates BatchNormalization with the statistics of its own batch, and leaves the running "
                "statistics unchanged: they follow the model's inputs"
            )
            self.training.cautions.append(Caution("note", "", text))
        given = dict(names)
        found = self.evaluate(names)
        before = {name: self.evaluation.own(name) for name in (*known, *self.graph.output_names)}
        fed = {name: given.get(before[name], before[name]) for name in known}
        made = {name: found.own(before[name]) for name in self.graph.output_names if before[name] in found.names}
        self.training.evaluated.append(InnerEvaluation(fed, made))
        outputs = [self.wide(self.val(found.own(self.evaluation.own(name)))) for name in self.graph.output_names]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def evaluate(self, names: dict[str, str], retyped: Callable[[TypeProto], TypeProto] | None = None) -> Evaluation:
        """Evaluate the model once more: append copies of the nodes that depend on the given values.

        Args:
            names: map from values of the current evaluation to the values that replace them. This method adds the
                results of the copied nodes to the map.
            retyped: a function that returns the type of a result of a copy, given its type in the current evaluation.
                It is called if the rank can't be inferred.
        """
        self.flush()
        copies = []
        for node in self.evaluation.nodes:
            if not names.keys().isdisjoint(reads(node)):
                copies.append(append_copy(self, node, names))
                types = self.infer(copies[-1])
                for old, new in zip(node.output, copies[-1].output, strict=True):
                    known = self.graph.types.get(old)
                    if retyped and known is not None and shape_of(types.get(new)) is None:
                        types[new] = retyped(known)
                self.graph.types.update(types)
        self.graph.held.update(names[name] for name in self.graph.held.intersection(names))
        self.flush()
        return Evaluation(names, copies)

    def load(self, path: str | Path, **inputs: Val) -> Any:
        """Evaluate another model, whose weights are constants, such as the teacher of a distillation.

        Args:
            path: an ONNX file. Its path is relative to the folder of the file with the loss. The file is converted to
                the opset of the model.
            inputs: map from an input of the file to its value. An input that is left out gets the model's value with
                the same name.

        Returns:
            The output of the file, or a tuple of its outputs.

        Raises:
            UsageError: the file can't be used, has no such input, or lacks a value for one.
        """
        file = ModelFile(str(self.folder / path), self.graph)
        given = {}
        for name in file.inputs:
            own = self.evaluation.labels.get(name, self.evaluation.own(name))
            if name not in inputs and own not in self.graph.types:
                raise missing_value(
                    f"`op.load`: '{path}' has an input '{name}' without a value", f"pass a value: {name}=..."
                )
            given[name] = inputs.get(name) or self.val(own)
        if unknown := inputs.keys() - given.keys():
            name = min(unknown)
            raise unknown_name(f"`op.load`: '{path}' has no input '{name}'", suggest(name, list(given), "inputs"))
        outputs = tuple(map(self.wide, file.splice(self, given).values()))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _elements(x: Val) -> int:
    """Return the number of elements of each sample.

    Raises:
        UsageError: the size of an axis after the batch axis is unknown.
    """
    sizes = known_sizes(x.shape[1:])
    if sizes is None:
        raise wrong_shape(
            f"a derivative in the loss requires a fixed size on each axis after the batch axis, but '{x.name}' is "
            f"{in_words(x.type)}",
            f"fix the sizes of '{x.name}' on the axes after the batch axis",
        )
    return math.prod(sizes)
