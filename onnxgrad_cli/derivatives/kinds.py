"""Every kind of derivative from the one set of rules, which are those of reverse mode.

A vector-Jacobian product is linear in its cotangent u, so that its own vector-Jacobian product with respect to u, for
a tangent t, is the Jacobian-vector product J t: forward mode is reverse mode twice, and what the first walk has
written is read by nobody. The rows of a Jacobian are vector-Jacobian products of unit vectors, a Hessian is the
Jacobian of a gradient. Source: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapters 3 to 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.autodiff.reverse import as_declared, differentiate
from onnxgrad_cli.common.checks import one_of
from onnxgrad_cli.common.choices import Derivative, DerivativeNames, Yield
from onnxgrad_cli.derivatives.derivative_model import (
    DerivativeModel,
    float_initializers,
    float_inputs,
    float_weights,
    open_model,
)
from onnxgrad_cli.derivatives.independence import sample_axes
from onnxgrad_cli.derivatives.jacobian import jacobian
from onnxgrad_cli.derivatives.names import casadi_names, name_after
from onnxgrad_cli.derivatives.sample_gradients import Meetings, sample_gradients
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.derivatives.values import Chosen, choose, floats, hold, split
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown, UnsupportedError, UsageError, suggest
from onnxgrad_cli.files import ModelSource
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options


def derive(
    model: ModelSource,
    kind: Derivative = "vjp",
    *,
    of: str | Sequence[str] = (),
    wrt: str | Sequence[str] = (),
    class_: int | str | None = None,
    class_axis: int = 1,
    per_sample: bool = False,
    names: DerivativeNames = "plain",
    keep_outputs: bool = False,
    cotangents: Yield | None = None,
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
        of: glob patterns over the float outputs to differentiate; by default all of them. One that matches none is
            taken for inner values, by their names or those of their nodes.
        wrt: glob patterns over float inputs and initializers, with respect to which; by default all float inputs, and
            for vjp the initializers too, except those that only say how something is resized. Initializers become
            overridable: they keep their values and may be fed. A pattern that matches none is taken for inner values,
            and the derivative is that by something added to those.
        class_: differentiate one score in place of all that each of `of` has along `class_axis`: that of a class by its
            number, of the best one ('argmax', found at run time), or of those in an input `label` of int64 ('label').
            The score of y is called `<y>_score`; it has the shape of y without that axis, and so has the label. A
            number that is no class is refused by the runtime, where the size of the axis is not known before.
        per_sample: derivatives of each sample alone, which is proven to depend on no other one. For vjp those by a
            weight are [samples, *weight]; for jacobian [samples, *y, *x], y and x without their axes of samples; for
            hessian, by inputs alone, [samples, *x, *z].
        names: 'plain', as above, or 'casadi': `adj_<y>` and `adj_<x>`, `fwd_<x>` and `fwd_<y>`, `jac_<y>_<x>`,
            `hess_<y>_<x>_<z>`, and for hvp `fwd_<x>` and `fwd_adj_<x>`.
        cotangents: for vjp, what becomes of the cotangents: 'input', 'ones' (filled in the graph), or 'keep', which
            leaves the YieldOp that hands them in; by default 'input', and 'ones' with `class_`.
        keep_outputs: return the model's own outputs too, after the derivatives, and then inner values that are named.
        path: where bytes or a model were read from; external data are relative to it.
        options: shapes and modes, as for a build.

    Raises:
        UsageError: there is no such kind, output, input or initializer, or nothing to differentiate.
        UnsupportedError: the model can't be differentiated, or samples mix; all nodes in the way are listed.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no derivative '{kind}'", suggest(kind, KINDS, "derivatives"))
    one_of("names", names, DerivativeNames)
    pick = ClassChoice.of(class_, class_axis)
    _check(kind, cotangents, per_sample)
    cotangents = cotangents or ("ones" if pick and kind == "vjp" else "input")
    options = options or Options()
    graph = open_model(model, path, options)
    derivative, own = _opened(graph, kind, of, wrt, options)
    ends = list(derivative.outputs)
    try:
        derivatives = _appended(derivative, kind, pick, per_sample, cotangents)
    except Unknown as error:  # what is differentiated, or by what, and not a node on the way
        raise UnsupportedError(f"{error}, which this derivative needs", hint=graph.rank_hint()) from error
    kept = dict.fromkeys([*own, *ends, *derivative.inner, *derivative.outputs]) if keep_outputs else ()
    outputs = [*derivatives, *kept]
    finished = derivative.finish(outputs)
    if names == "casadi":
        new = casadi_names(kind, derivative.outputs, derivative.wanted)
        name_after(graph, finished, *new, len(finished.graph.input) - len(derivative.added))
    return derivative.described(finished, kind, derivatives, outputs)


def _appended(
    derivative: DerivativeModel, kind: Derivative, pick: ClassChoice | None, per_sample: bool, cotangents: Yield
) -> list[str]:
    """Append the derivatives that are asked for; their names.

    Raises:
        Unknown: the rank of what is differentiated, or of what it is differentiated by, is unknown.
    """
    if pick:
        _pick(derivative, pick)
    if per_sample:
        _set_apart(derivative, kind)
    if kind == "vjp":
        return _each_gradient(derivative, cotangents) if per_sample else derivative.vjp(cotangents)
    return KINDS[kind](derivative)


def _check(kind: Derivative, cotangents: Yield | None, per_sample: bool) -> None:
    """Make sure that the options go together."""
    if cotangents is not None:
        one_of("cotangents", cotangents, Yield)
    if kind != "vjp" and cotangents not in (None, "input"):
        raise UsageError(f"cotangents='{cotangents}' means something for the kind vjp alone", "leave it out")
    if per_sample and (kind in ("jvp", "hvp") or cotangents == "keep"):
        what = f"the kind {kind}" if kind != "vjp" else "a YieldOp that stays"
        raise UsageError(
            f"per-sample derivatives are not for {what}", "ask for the kind vjp, jacobian or hessian, or leave it out"
        )


def _pick(derivative: DerivativeModel, pick: ClassChoice) -> None:
    """Put the score of a class in place of each output that is differentiated."""
    graph, label = derivative.graph, ""
    if pick.which == "label":
        label = pick.add_label(graph, derivative.outputs[0])
    derivative.scores = {pick.score(graph, name, label): name for name in derivative.outputs}
    for name in derivative.scores:
        graph.add_output(name)
    derivative.outputs = list(derivative.scores)
    derivative.said |= {"pick": pick.which, "class_axis": pick.axis, "label": label}


def _set_apart(derivative: DerivativeModel, kind: Derivative) -> None:
    """Find out what the derivatives of each sample are by, and prove that samples don't mix.

    Raises:
        UnsupportedError: they do, or may.
        UsageError: what is differentiated, or by what, has no axis 0 of samples.
    """
    axes = sample_axes(derivative.graph, derivative.outputs)
    for name in derivative.outputs:
        if axes.get(name) != 0:
            raise UsageError(f"'{name}' has no samples on its axis 0", "choose others with `of`")
    for name in derivative.wanted:
        if axes.get(name, 0) != 0 or (kind == "hessian" and name not in axes):
            raise UsageError(f"'{name}' has no samples on its axis 0", "choose others with `wrt`")
    derivative.axes = axes
    derivative.said["per_sample"] = tuple(name for name in derivative.wanted if name in axes)


def _each_gradient(derivative: DerivativeModel, cotangents: Yield) -> list[str]:
    """Append the gradients of each sample's outputs times its cotangents: its own by inputs, and one by each weight."""
    graph = derivative.graph
    given = {y: derivative.add_input(f"{y}_grad", y) for y in derivative.outputs} if cotangents == "input" else {}
    meetings = _meetings(derivative)
    found: dict[str, Val | None] = _by_all_samples(derivative, given, meetings.mixed) if meetings.mixed else {}
    op = Op(graph)
    seeds = {y: op.val(given[y]) if given else op.fill(1.0, op.val(y)) for y in derivative.outputs}
    others = [x for x in derivative.wanted if x not in meetings.mixed]
    found |= sample_gradients(op, seeds, others, meetings, derivative.training)
    samples = op.size(op.val(derivative.outputs[0]), 0)
    for x in (op.val(name) for name in derivative.wanted if name not in derivative.axes):
        found[x.name] = found[x.name] or op.zeros([samples, *(op.size(x, axis) for axis in range(x.rank))], x)
    return _results(derivative, op, {f"{x}_grad": (found[x], x) for x in derivative.wanted})


def _meetings(derivative: DerivativeModel) -> Meetings:
    """Where samples meet the weights by which their derivatives are asked for."""
    axes = derivative.axes
    return Meetings(derivative.graph, [name for name in derivative.wanted if name not in axes], axes)


def _by_all_samples(
    derivative: DerivativeModel, given: Mapping[str, str], weights: Sequence[str]
) -> dict[str, Val | None]:
    """Append the gradients by weights that are read in ways of which the part of one sample is not known: one of the
    whole batch for each sample."""
    graph, op = derivative.graph, Op(derivative.graph)
    values = {y: op.val(y) for y in derivative.outputs}
    parts = {y: v * op.val(given[y]) if given else v for y, v in values.items()}
    summed = [op.sum(part, range(1, part.rank), keepdims=False) if part.rank > 1 else part for part in parts.values()]
    total = op.Sum(*summed) if len(summed) > 1 else op.Identity(summed[0])
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    rows = jacobian(op, op.val(total.name), weights, derivative.training)
    graph.nodes.extend(op.nodes)
    return dict(zip(weights, rows, strict=True))


def _opened(
    graph: Graph, kind: Derivative, of: str | Sequence[str], wrt: str | Sequence[str], options: Options
) -> tuple[DerivativeModel, list[str]]:
    """A prepared model with the choice of what is differentiated by what, and the outputs that it has of its own."""
    inputs, initializers = float_inputs(graph), float_initializers(graph)
    known = [*inputs, *initializers]
    by = choose(wrt, known, graph, "`wrt`", SOURCES) if wrt else {"": inputs}
    if not wrt and kind == "vjp":
        by = {"": [*inputs, *float_weights(graph)]}
    ends = choose(of, graph.output_names, graph, "`of`", ENDS) if of else {}
    chosen = _names(by)
    inputs, initializers = _among(inputs, chosen), _among(initializers, chosen)
    inner = _among(graph.made(), chosen.keys() - known)
    derivative = DerivativeModel(graph, inputs, initializers, options, inner)
    own = hold(graph, [*inner, *_names(ends)])
    derivative.prepare()
    derivative.outputs = floats(ends, graph, "`of`", ENDS) if of else _among(derivative.outputs, own)
    if inner:
        derivative.inner = _among(inner, floats(by, graph, "`wrt`", SOURCES))
        for name in derivative.inner:
            split(graph, name)
    return derivative, own


def _names(chosen: Chosen) -> dict[str, None]:
    return dict.fromkeys(itertools.chain.from_iterable(chosen.values()))


def _among(names: Iterable[str], chosen: Collection[str]) -> list[str]:
    return [name for name in names if name in chosen]


SOURCES, ENDS = "float inputs and initializers", "float outputs"
"""What can be differentiated by, and what can be, besides inner values: as errors call them."""


def _jvp(derivative: DerivativeModel) -> list[str]:
    """Append Jacobian-vector products: the reverse walk of a reverse walk, with the tangents as its cotangents."""
    graph, op = derivative.graph, Op(derivative.graph)
    tangents = _inputs(derivative, "{}_tangent")
    # The first walk is linear in these, so that any value will do: zeros, should a loop still read them.
    free = {
        name: op.rename(op.fill(0.0, op.val(name)), graph.fresh(f"{name}_free")).name for name in derivative.outputs
    }
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    seeds = {name: op.val(cotangent) for name, cotangent in free.items()}
    transposed = differentiate(graph, seeds, derivative.wanted, op, derivative.training)
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    found = differentiate(graph, _seeds(op, transposed, tangents), free.values(), op)
    return _products(derivative, op, {f"{y}_tangent": (found[cotangent], y) for y, cotangent in free.items()})


def _hvp(derivative: DerivativeModel) -> list[str]:
    vectors = _inputs(derivative, "{}_vector")
    gradient = _gradient_of_sum(derivative)
    op = Op(derivative.graph)
    found = differentiate(derivative.graph, _seeds(op, gradient, vectors), derivative.wanted, op, derivative.training)
    return _products(derivative, op, {f"{x}_hvp": (found[x], x) for x in derivative.wanted})


def _jacobian(derivative: DerivativeModel) -> list[str]:
    return _rows(derivative, {f"{y}_jacobian_": Op(derivative.graph).val(y) for y in derivative.outputs})


def _hessian(derivative: DerivativeModel) -> list[str]:
    gradient = _gradient_of_sum(derivative)
    op = Op(derivative.graph)
    rows = {f"{x}_hessian_": gradient[x] or op.fill(0.0, op.val(x)) for x in derivative.wanted}
    derivative.graph.nodes.extend(op.nodes)
    return _rows(derivative, rows)


KINDS: Mapping[Derivative, Callable[[DerivativeModel], list[str]]] = {
    "vjp": DerivativeModel.vjp, "jvp": _jvp, "hvp": _hvp, "jacobian": _jacobian, "hessian": _hessian
}  # fmt: skip
"""The kinds of derivatives; each appends its nodes and returns its outputs."""


def _inputs(derivative: DerivativeModel, name: str) -> dict[str, str]:
    """Add an input like each x, and say which."""
    return {x: derivative.add_input(name.format(x), x) for x in derivative.wanted}


def _gradient_of_sum(derivative: DerivativeModel) -> dict[str, Val | None]:
    """Append the gradient of the sum of all outputs."""
    op = Op(derivative.graph)
    ones = {name: op.fill(1.0, op.val(name)) for name in derivative.outputs}
    gradient = differentiate(derivative.graph, ones, derivative.wanted, op, derivative.training)
    if derivative.training.partial:
        raise UsageError(
            f"gradients are stopped on the way to '{derivative.training.partial[0]}', and what rules write is not",
            "a second derivative would be half stopped: ask for a first one",
        )
    derivative.graph.nodes.extend(op.nodes)
    return gradient


def _seeds(op: Op, values: Mapping[str, Val | None], cotangents: Mapping[str, str]) -> dict[str, Val]:
    """The cotangents of the values that are not zero, by the values' own names: one value may stand for several x."""
    seeds: dict[str, Val] = {}
    for x, name in cotangents.items():
        value, cotangent = values[x], op.val(name)
        if value is not None:
            seeds[value.name] = seeds[value.name] + cotangent if value.name in seeds else cotangent
    return seeds


def _rows(derivative: DerivativeModel, values: Mapping[str, Val]) -> list[str]:
    """Append the Jacobians of values by each x: of each sample by its own and by weights, or of all by all."""
    op, wanted = Op(derivative.graph), derivative.wanted
    meetings = _meetings(derivative) if derivative.axes else None
    mixed = meetings.mixed if meetings else wanted
    found: dict[str, tuple[Val | None, str]] = {}
    for stem, value in values.items():
        rows: dict[str, Val] = {}
        for names, where in ([x for x in wanted if x not in mixed], meetings), (mixed, None):
            if names:
                blocks = jacobian(op, op.val(value.name), names, derivative.training, where)
                rows |= zip(names, blocks, strict=True)
        found |= {f"{stem}{x}": (rows[x], x) for x in wanted}
    return _results(derivative, op, found)


def _products(derivative: DerivativeModel, op: Op, values: Mapping[str, tuple[Val | None, str]]) -> list[str]:
    """Append the nodes of products with a vector, each of which has the shape of an input or output."""
    shaped = {name: (value and as_declared(op, like, value), like) for name, (value, like) in values.items()}
    return _results(derivative, op, shaped)


def _results(derivative: DerivativeModel, op: Op, values: Mapping[str, tuple[Val | None, str]]) -> list[str]:
    """Append the nodes, in which each value gets its name; what is zero by mathematics is zeros like another value."""
    found = {
        derivative.graph.fresh(name): value or op.fill(0.0, op.val(like)) for name, (value, like) in values.items()
    }
    op.rename_all(found)
    derivative.graph.nodes.extend(op.nodes)
    return list(found)
