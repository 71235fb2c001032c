"""Every kind of derivative from the one set of rules, which are those of reverse mode.

A vector-Jacobian product is linear in its cotangent u, so that its own vector-Jacobian product with respect to u, for
a tangent t, is the Jacobian-vector product J t: forward mode is reverse mode twice, and what the first walk has
written is read by nobody. The rows of a Jacobian are vector-Jacobian products of unit vectors, a Hessian is the
Jacobian of a gradient. Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapters 3 to 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.common.checks import one_of
from onnxgrad_cli.common.choices import Derivative, Yield
from onnxgrad_cli.derivatives.derivative_model import Subject, float_initializers, float_inputs, open_model
from onnxgrad_cli.derivatives.jacobian import jacobian
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.files import ModelSource
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.patterns import matching


def derive(
    model: ModelSource,
    kind: Derivative = "vjp",
    *,
    of: str | Sequence[str] = (),
    wrt: str | Sequence[str] = (),
    keep_outputs: bool = False,
    cotangents: Yield = "input",
    path: Path | None = None,
    options: Options | None = None,
) -> ModelProto:
    """Build a model that computes a derivative of a model.

    ======== ======================= =========================================================================
    kind     inputs added            outputs, for each y of `of` and x, z of `wrt`
    ======== ======================= =========================================================================
    vjp      `<y>_grad`, like y      `<x>_grad`, like x: the sum over all y of `<y>_grad` times dy/dx
    jvp      `<x>_tangent`, like x   `<y>_tangent`, like y: the sum over all x of dy/dx times `<x>_tangent`
    hvp      `<x>_vector`, like x    `<x>_hvp`, like x: the Hessian of the sum of all y, times the vectors
    jacobian                         `<y>_jacobian_<x>`, of shape [*y, *x]
    hessian                          `<x>_hessian_<z>`, of shape [*x, *z]: the Hessian of the sum of all y
    ======== ======================= =========================================================================

    A cotangent is called `<y>_grad_external` where another differentiated output depends on y and adds to it, or where
    y is an x itself. A name that is taken gets `_1`.

    Args:
        model: a file, the bytes of one, or a model, which is not changed.
        kind: one of the above; vjp is `onnx_derivative` with the option Zero.
        of: glob patterns over the float outputs to differentiate; by default all of them.
        wrt: glob patterns over float inputs and initializers, with respect to which; by default all float inputs, and
            for vjp the initializers too. Initializers become overridable: they keep their values and may be fed.
        cotangents: for vjp, what becomes of the cotangents: 'input', 'ones' (filled in the graph), or 'keep', which
            leaves the YieldOp that hands them in.
        keep_outputs: return the model's own outputs too, after the derivatives.
        path: where bytes or a model were read from; external data are relative to it.
        options: shapes and modes, as for a build.

    Raises:
        UsageError: there is no such kind, output, input or initializer, or nothing to differentiate.
        UnsupportedError: the model can't be differentiated; all nodes in the way are listed.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no derivative '{kind}'", suggest(kind, KINDS, "derivatives"))
    one_of("cotangents", cotangents, Yield)
    if kind != "vjp" and cotangents != "input":
        raise UsageError(f"cotangents='{cotangents}' means something for the kind vjp alone", "leave it out")
    options = options or Options()
    graph = open_model(model, path, options)
    inputs, initializers = float_inputs(graph), float_initializers(graph)
    known = [*inputs, *initializers]
    default = known if kind == "vjp" else inputs
    chosen = matching(wrt, known, "`wrt`", "float inputs and initializers") if wrt else default
    subject = Subject(graph, [n for n in inputs if n in chosen], [n for n in initializers if n in chosen], options)
    subject.prepare()
    own = graph.output_names
    if of:
        subject.outputs = matching(of, subject.outputs, "`of`", "float outputs")
    derivatives = subject.vjp(cotangents) if kind == "vjp" else KINDS[kind](subject)
    return subject.finish([*derivatives, *(own if keep_outputs else ())])


def _jvp(subject: Subject) -> list[str]:
    graph, op = subject.graph, Op(subject.graph)
    tangents = _inputs(subject, "{}_tangent")
    # The first walk is linear in these, so that any value will do: zeros, should a loop still read them.
    free = {name: op.rename(op.fill(0.0, op.val(name)), graph.fresh(f"{name}_free")).name for name in subject.outputs}
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    seeds = {name: op.val(cotangent) for name, cotangent in free.items()}
    transposed = differentiate(graph, seeds, subject.wanted, op, subject.training)
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    found = differentiate(graph, _seeds(op, transposed, tangents), free.values(), op)
    return _results(subject, op, {f"{y}_tangent": (found[cotangent], y) for y, cotangent in free.items()})


def _hvp(subject: Subject) -> list[str]:
    vectors = _inputs(subject, "{}_vector")
    gradient = _gradient_of_sum(subject)
    op = Op(subject.graph)
    found = differentiate(subject.graph, _seeds(op, gradient, vectors), subject.wanted, op, subject.training)
    return _results(subject, op, {f"{x}_hvp": (found[x], x) for x in subject.wanted})


def _jacobian(subject: Subject) -> list[str]:
    return _rows(subject, {f"{y}_jacobian_": Op(subject.graph).val(y) for y in subject.outputs})


def _hessian(subject: Subject) -> list[str]:
    gradient = _gradient_of_sum(subject)
    op = Op(subject.graph)
    rows = {f"{x}_hessian_": gradient[x] or op.fill(0.0, op.val(x)) for x in subject.wanted}
    subject.graph.nodes.extend(op.nodes)
    return _rows(subject, rows)


KINDS: Mapping[Derivative, Callable[[Subject], list[str]]] = {
    "vjp": Subject.vjp, "jvp": _jvp, "hvp": _hvp, "jacobian": _jacobian, "hessian": _hessian
}  # fmt: skip
"""The kinds of derivatives; each appends its nodes and returns its outputs."""


def _inputs(subject: Subject, name: str) -> dict[str, str]:
    """Add an input like each x, and say which."""
    return {x: subject.add_input(name.format(x), x) for x in subject.wanted}


def _gradient_of_sum(subject: Subject) -> dict[str, Val | None]:
    """Append the gradient of the sum of all outputs."""
    op = Op(subject.graph)
    ones = {name: op.fill(1.0, op.val(name)) for name in subject.outputs}
    gradient = differentiate(subject.graph, ones, subject.wanted, op, subject.training)
    if subject.training.partial:
        raise UsageError(
            f"gradients are stopped on the way to '{subject.training.partial[0]}', and what rules write is not",
            "a second derivative would be half stopped: ask for a first one",
        )
    subject.graph.nodes.extend(op.nodes)
    return gradient


def _seeds(op: Op, values: Mapping[str, Val | None], cotangents: Mapping[str, str]) -> dict[str, Val]:
    """The cotangents of the values that are not zero, by the values' own names: one value may stand for several x."""
    seeds: dict[str, Val] = {}
    for x, name in cotangents.items():
        value, cotangent = values[x], op.val(name)
        if value is not None:
            seeds[value.name] = seeds[value.name] + cotangent if value.name in seeds else cotangent
    return seeds


def _rows(subject: Subject, values: Mapping[str, Val]) -> list[str]:
    op = Op(subject.graph)
    found: dict[str, tuple[Val | None, str]] = {}
    for stem, value in values.items():
        derivatives = jacobian(op, op.val(value.name), subject.wanted, subject.training)
        found |= {f"{stem}{x}": (rows, x) for x, rows in zip(subject.wanted, derivatives, strict=True)}
    return _results(subject, op, found)


def _results(subject: Subject, op: Op, values: Mapping[str, tuple[Val | None, str]]) -> list[str]:
    """Append the nodes, in which each value gets its name; what is zero by mathematics is zeros like another value."""
    names = [
        op.rename(value or op.fill(0.0, op.val(like)), subject.graph.fresh(name)).name
        for name, (value, like) in values.items()
    ]
    subject.graph.nodes.extend(op.nodes)
    return names
