"""Offer derivatives and evaluations of models to a loss that is a Python function.

The derivatives are written by the same reverse walk as the backward part. They become nodes of the loss, so the
backward part differentiates through them, and the gradients are checked as for any other loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution, UsageError, suggest, unknown_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import reads
from onnxgrad_cli.ir.types import in_words, is_float, known_sizes
from onnxgrad_cli.metadata import InnerDerivative
from onnxgrad_cli.passes.loss.model_file import ModelFile, append_copy
from onnxgrad_cli.record import LossRecord

LEAVE_OUT = "remove this derivative from the loss"
"""The hint for a derivative that is zero."""


class _IndependentError(UsageError):
    """A value does not depend on the other value of a derivative."""


class LossOp(Op):
    """The emitter that losses are written with: `Op`, with derivatives and evaluations of models.

    Args:
        graph: the model. The emitted nodes are appended to it before each derivative is written.
        training: the record of the loss.
    """

    def __init__(self, graph: Graph, training: LossRecord) -> None:
        super().__init__(graph)
        self.role, self.training = "loss", training
        self._model = list(graph.nodes)
        self._derived: set[str] = set()  # results of derivatives

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
        """Return the vector-Jacobian product of `cotangent`, which has the shape of y, and dy/dx, for each x.

        Raises:
            UsageError: y does not depend on x.
            UnsupportedError: nodes between x and y can't be differentiated; all of them are listed.
        """
        return self._vjp("vjp", y, cotangent, xs)

    def _vjp(self, name: str, y: Val, cotangent: Val | None, xs: Sequence[Val]) -> Any:
        found = self._walk(name, y, self.fill(1.0, y) if cotangent is None else cotangent, xs)
        seed = "" if cotangent is None else cotangent.name
        self._record("vjp", y, seed, xs, found)
        return found[0] if len(found) == 1 else tuple(found)

    def jvp(self, y: Val, x: Val, tangent: Val) -> Val:
        """Return the Jacobian-vector product of dy/dx and `tangent`, which has the shape of x.

        Reverse mode is applied twice: the vector-Jacobian product of dy/dx is a linear function of the cotangent. The
        vector-Jacobian product of that function and `tangent` is the result.

        Raises:
            UsageError: y does not depend on x.
            UnsupportedError: a node between x and y can't be differentiated twice.
        """
        cotangent = self.rename(self.fill(0.0, y), self.graph.fresh(f"{self.scope}/cotangent"))
        (transposed,) = self._walk("jvp", y, cotangent, [x])
        (found,) = self._walk("jvp", transposed, tangent, [cotangent])
        self._record("jvp", y, tangent.name, [x], [found])
        return found

    def _record(self, kind: str, y: Val, seed: str, xs: Sequence[Val], found: Sequence[Val]) -> None:
        wrt, results = tuple(x.name for x in xs), tuple(each.name for each in found)
        self.training.inner.append(InnerDerivative(kind, y.name, seed, wrt, results))

    def divergence(self, y: Val, x: Val) -> Val:
        """Return the divergence, Σ_i dy[:, i] / dx[:, i], one number per sample: [batch, 1].

        x and y have the same shape, [batch, ...], whose sizes after the batch are fixed. One gradient is computed for
        each element of a sample.

        Raises:
            UsageError: the shapes differ, or a size after the batch is unknown.
        """
        if x.shape[1:] != y.shape[1:]:
            raise UsageError(
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
        """Return the Laplacian of y, which has one number per sample: the sum of its second derivatives by x.

        Returns:
            A value of the shape of y, [batch] or [batch, 1].

        Raises:
            UsageError: y has another shape or does not depend on x, or a size of x after the batch is unknown.
        """
        if y.rank > 2 or (y.rank == 2 and y.shape[1] != 1):
            raise UsageError(
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
        """Append nodes that compute the vector-Jacobian product of `cotangent` and dy/dx, and return it for each x."""
        if not xs or not all(isinstance(each, Val) for each in (y, cotangent, *xs)):
            raise UsageError(
                f"`op.{name}` accepts only values of the graph",
                "pass parameters of the loss function, or results of op",
            )
        for each in (y, *xs):
            if not is_float(each.type):
                raise UsageError(
                    f"`op.{name}`: '{each.name}' must be a float tensor, but is {in_words(each.type)}",
                    "pass float tensors, because only they have derivatives",
                )
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
            raise UsageError(
                f"`op.{name}`: a gradient is stopped before '{record.partial[0]}', so the derivative would be "
                "incomplete",
                "compute the loss from values whose derivatives are not stopped",
            )
        for x in wanted:
            if found[x] is None:
                raise _IndependentError(f"`op.{name}`: '{y.name}' does not depend on '{x}'", LEAVE_OUT)
        if training.kinks and self.graph.ancestors([y.name]) & self._derived:
            kinds = ", ".join(sorted(training.kinks))
            text = f"a second derivative passes through {kinds}, whose own second derivative is zero wherever it exists"
            training.cautions.append(Caution("note", y.name, text))
        training.rules.update(record.rules)
        training.kinks.update(record.kinks)
        training.cautions.extend(record.cautions)
        self.flush()
        results = [value for x in wanted if (value := found[x]) is not None]
        self._derived.update(value.name for value in results)
        return results

    def flush(self) -> None:
        """Append the nodes emitted so far to the graph, so that a reverse walk can find them."""
        self.graph.nodes.extend(self.nodes)
        self.nodes = []
        self._readers = self._makers = None

    # -- models -----------------------------------------------------------------------------------------------

    def model(self, **inputs: Val) -> Any:
        """Evaluate the model once more with other inputs and the same weights.

        Args:
            inputs: map from an input to its value in this evaluation. Other inputs have the same value as in the model.

        Returns:
            The output of the model, or a tuple of its outputs.

        Raises:
            UsageError: the model has no such input, or a value is of another type.
        """
        names: dict[str, str] = {}
        for name, value in inputs.items():
            known = self.training.inputs
            if name not in known:
                raise unknown_name(f"`op.model`: the model has no input '{name}'", suggest(name, known, "inputs"))
            own = self.val(name)
            if value.dtype != own.dtype or value.rank != own.rank:
                words = f"'{name}' is {in_words(own.type)}, but the given value is {in_words(value.type)}"
                raise UsageError(f"`op.model`: {words}", "pass a value of the same element type and rank")
            names[name] = value.name
        self.flush()
        for node in self._model:
            if not names.keys().isdisjoint(reads(node)):
                self.graph.types.update(self.infer(append_copy(self, node, names)))
        outputs = [self.val(names.get(name, name)) for name in self.graph.output_names]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def load(self, path: str, **inputs: Val) -> Any:
        """Evaluate another model, whose weights are constants, such as the teacher of a distillation.

        Args:
            path: an ONNX file that holds its weights. It is converted to the opset of the model.
            inputs: map from an input of the file to its value. An input that is left out gets the model's value with
                the same name.

        Returns:
            The output of the file, or a tuple of its outputs.

        Raises:
            UsageError: the file can't be used, has no such input, or lacks a value for one.
        """
        file = ModelFile(path, self.graph)
        given = {}
        for name in file.inputs:
            if name not in inputs and name not in self.graph.types:
                raise UsageError(
                    f"`op.load`: '{path}' has an input '{name}' without a value", f"pass a value: {name}=..."
                )
            given[name] = inputs.get(name) or self.val(name)
        if unknown := inputs.keys() - given.keys():
            name = min(unknown)
            raise unknown_name(f"`op.load`: '{path}' has no input '{name}'", suggest(name, list(given), "inputs"))
        outputs = tuple(file.splice(self, given).values())
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _elements(x: Val) -> int:
    """Return the number of elements of each sample.

    Raises:
        UsageError: a size after the batch is unknown.
    """
    sizes = known_sizes(x.shape[1:])
    if sizes is None:
        raise UsageError(
            f"a derivative in the loss requires fixed sizes after the batch, but '{x.name}' is {in_words(x.type)}",
            "fix its sizes after the batch",
        )
    return math.prod(sizes)
