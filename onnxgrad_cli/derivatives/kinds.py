"""Build every kind of derivative from the rules of reverse mode alone.

- A Jacobian-vector product J t is reverse mode applied twice. The vector-Jacobian product u J is a linear function of
  the cotangent u. The vector-Jacobian product of this function with the cotangent t is J t. The value of u J itself is
  not needed.
- The rows of a Jacobian are vector-Jacobian products of unit vectors.
- A Hessian is the Jacobian of a gradient. For its diagonal the same rows are computed, and one element of each is kept.
- A Gauss-Newton vector product J^T J t is a vector-Jacobian product of a Jacobian-vector product.

Sources: A. Griewank and A. Walther, Evaluating Derivatives, SIAM 2008, chapters 3 to 5. N. Schraudolph, Fast
Curvature Matrix-Vector Products for Second-Order Gradient Descent, Neural Computation 14, 2002.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.autodiff.reverse import as_declared, differentiate
from onnxgrad_cli.common.checks import one_of
from onnxgrad_cli.common.choices import SECOND_DERIVATIVES, WEIGHTED_DERIVATIVES, Derivative, DerivativeNames, Yield
from onnxgrad_cli.derivatives import casadi_names as casadi
from onnxgrad_cli.derivatives.derivative_model import (
    DerivativeModel,
    float_initializers,
    float_inputs,
    float_weights,
    open_model,
)
from onnxgrad_cli.derivatives.jacobian import diagonal, jacobian
from onnxgrad_cli.derivatives.named_values import Chosen, choose, floats, hold, split
from onnxgrad_cli.derivatives.sample_gradients import Meetings, sample_axes, sample_gradients
from onnxgrad_cli.derivatives.scores import ClassChoice
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown, UnsupportedError, conflict, suggest, unknown_name, wrong_shape
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
    weighted: bool = False,
    names: DerivativeNames = "plain",
    keep_outputs: bool = False,
    cotangents: Yield | None = None,
    path: Path | None = None,
    options: Options | None = None,
) -> ModelProto:
    """Build a model that computes a derivative of a model.

    ================ ======================= ====================================================================
    kind             inputs added            outputs, for each y of `of` and x, z of `wrt`
    ================ ======================= ====================================================================
    vjp              `<y>_grad`, like y      `<x>_grad`, like x: the sum over all y of `<y>_grad` times dy/dx
    jvp              `<x>_tangent`, like x   `<y>_tangent`, like y: the sum over all x of dy/dx times `<x>_tangent`
    hvp              `<x>_vector`, like x    `<x>_hvp`, like x: the Hessian of the sum of all y, times the vectors
    gnvp             `<x>_vector`, like x    `<x>_gnvp`, like x: the Gauss-Newton matrix, times the vectors
    jacobian                                 `<y>_jacobian_<x>`, of shape [*y, *x]
    hessian                                  `<x>_hessian_<z>`, of shape [*x, *z]: the Hessian of the sum of all y
    hessian-diagonal                         `<x>_hessian_diagonal`, like x: the diagonal of that Hessian
    laplacian                                `<x>_laplacian`: the sum of that diagonal, one number
    ================ ======================= ====================================================================

    The Gauss-Newton matrix is the sum over all y of J^T J, with J = dy/dx. A diagonal or a Laplacian costs one
    Hessian-vector product per element of x, or per element of one sample of x if derivatives are per sample.

    The cotangent of y is called `<y>_grad_external` instead if another differentiated output depends on y, or if y is
    itself an x. If a name is already used in the model, `_1` is appended to it.

    Args:
        model: a file, the bytes of a file, or a model. It is not changed.
        kind: a kind from the table above. vjp corresponds to `onnx_derivative` with the option Zero.
        of: glob patterns of the float outputs to differentiate; by default all of them. If a pattern matches no output,
            it selects inner values by their names or by the names of their nodes.
        wrt: glob patterns of the float inputs and initializers to differentiate with respect to. The default is all
            float inputs. For vjp it also includes the initializers, except parameters of a resize.
            Initializers become overridable: they keep their values and can be fed. If a pattern matches no input or
            initializer, it selects inner values. The derivative is then with respect to a term added to them.
        class_: the class whose score is differentiated, instead of all elements of each output along `class_axis`. It
            is the number of a class, 'argmax' (the class with the highest score at run time), or 'label' (the classes
            fed to an int64 input `label`). The score of y is called `<y>_score`. The score and the label have the shape
            of y without the axis of classes. If the number of classes is unknown at build time, the run fails for a
            class that does not exist.
        class_axis: the axis of the classes.
        per_sample: True to compute derivatives for each sample separately. This requires a proof that the samples are
            independent. For vjp, the derivatives with respect to a weight are [samples, *weight]. For jacobian they are
            [samples, *y, *x], where *y and *x do not include the axes of samples. For hessian, which supports only
            inputs, they are [samples, *x, *z], and for laplacian [samples].
        weighted: True to add an input `<y>_weight`, like y, with the weights of the elements of y. The kinds of second
            derivatives then refer to the weighted sum of all y. The Gauss-Newton matrix is J^T diag(`<y>_weight`) J.
        names: 'plain', as above, or 'casadi': `adj_<y>` and `adj_<x>`, `fwd_<x>` and `fwd_<y>`, `jac_<y>_<x>`,
            `hess_<y>_<x>_<z>`, for hvp `fwd_<x>` and `fwd_adj_<x>`, and `lam_<y>` for weights. CasADi has no names for
            the other kinds, which are refused.
        cotangents: the source of the cotangents of a vjp: 'input', 'ones' (filled in the graph), or 'keep' (they come
            from a YieldOp in the model, which is kept). The default is 'input', or 'ones' with `class_`.
        keep_outputs: True to also return the model's own outputs and then the selected inner values, after the
            derivatives.
        path: the file that bytes or a model were read from; external data are relative to it.
        options: shapes and modes, as for a build.

    Raises:
        UsageError: the kind, or an output, input or initializer, doesn't exist, or there is nothing to differentiate.
        UnsupportedError: the model can't be differentiated, or its samples are not independent. The error lists all
            nodes that prevent it.
    """
    if kind not in KINDS:
        raise unknown_name(f"there is no derivative '{kind}'", suggest(kind, KINDS, "derivatives"))
    one_of("names", names, DerivativeNames)
    if names == "casadi":
        casadi.check_kind(kind)
    pick = ClassChoice.of(class_, class_axis)
    _check(kind, cotangents, per_sample, weighted)
    cotangents = cotangents or ("ones" if pick and kind == "vjp" else "input")
    options = options or Options()
    graph = open_model(model, path, options)
    derivative, own = _opened(graph, kind, of, wrt, options)
    ends = list(derivative.outputs)
    try:
        derivatives = _appended(derivative, kind, pick, per_sample, weighted, cotangents)
    except Unknown as error:  # about an output or a variable of the derivative, not about a node between them
        raise UnsupportedError(f"{error}, but this derivative requires it", hint=graph.rank_hint()) from error
    kept = dict.fromkeys([*own, *ends, *derivative.inner, *derivative.outputs]) if keep_outputs else ()
    outputs = [*derivatives, *kept]
    finished = derivative.finish(outputs)
    if names == "casadi":
        new = casadi.casadi_names(kind, derivative.outputs, derivative.wanted, weighted)
        casadi.name_after(graph, finished, *new, len(finished.graph.input) - len(derivative.added))
    return derivative.described(finished, kind, derivatives, outputs)


def _appended(
    derivative: DerivativeModel, kind: Derivative, pick: ClassChoice | None, per_sample: bool, weighted: bool,
    cotangents: Yield,
) -> list[str]:  # fmt: skip
    """Append the requested derivatives and return their names.

    Raises:
        Unknown: the rank of a differentiated output, or of a value it is differentiated with respect to, is unknown.
    """
    if pick:
        _pick(derivative, pick)
    if per_sample:
        _set_apart(derivative, kind)
    if weighted:
        derivative.output_weights = {y: derivative.add_input(f"{y}_weight", y) for y in derivative.outputs}
    if kind == "vjp" and per_sample:
        outputs = derivative.outputs
        given = {y: derivative.add_input(f"{y}_grad", y) for y in outputs} if cotangents == "input" else {}
        found = _each_gradient(derivative, given)
        return _results(derivative, Op(derivative.graph), {f"{x}_grad": (found[x], x) for x in derivative.wanted})
    if kind == "vjp":
        return derivative.vjp(cotangents)
    return KINDS[kind](derivative)


def _check(kind: Derivative, cotangents: Yield | None, per_sample: bool, weighted: bool) -> None:
    """Raise a UsageError if the options contradict each other."""
    if cotangents is not None:
        one_of("cotangents", cotangents, Yield)
    if kind != "vjp" and cotangents not in (None, "input"):
        raise conflict(f"`cotangents='{cotangents}'` is only for `kind='vjp'`", "leave out the cotangents")
    if per_sample and (kind in ("jvp", "hvp") or cotangents == "keep"):
        other = f"kind='{kind}'" if kind != "vjp" else "cotangents='keep'"
        raise conflict(
            f"`per_sample` can't be combined with `{other}`",
            "use another kind, such as vjp or hessian, or leave out per-sample derivatives",
        )
    if weighted and kind not in WEIGHTED_DERIVATIVES:
        raise conflict(
            f"`weighted` can't be combined with `kind='{kind}'`",
            f"use one of the kinds {', '.join(WEIGHTED_DERIVATIVES)}, or leave out the weights",
        )


def _pick(derivative: DerivativeModel, pick: ClassChoice) -> None:
    """Replace each differentiated output by the score of the chosen class."""
    graph, label = derivative.graph, ""
    if pick.which == "label":
        label = pick.add_label(graph, derivative.outputs[0])
    derivative.scores = {pick.score(graph, name, label): name for name in derivative.outputs}
    for name in derivative.scores:
        graph.add_output(name)
    derivative.outputs = list(derivative.scores)
    derivative.said |= {"pick": pick.which, "class_axis": pick.axis, "label": label}


def _set_apart(derivative: DerivativeModel, kind: Derivative) -> None:
    """Prove that the samples are independent, and record the axis of the samples in each value.

    Raises:
        UnsupportedError: the samples depend on each other, or independence can't be proven.
        UsageError: axis 0 of a differentiated output, or of a value to differentiate with respect to, is not the axis
            of the samples. A weight has no such axis, so per-sample second derivatives with respect to it are refused.
    """
    axes = sample_axes(derivative.graph, derivative.outputs)
    for name in derivative.outputs:
        if axes.get(name) != 0:
            raise wrong_shape(f"axis 0 of '{name}' is not the axis of samples", "choose other outputs with `of`")
    for name in derivative.wanted:
        if axes.get(name, 0) != 0 or (kind in SECOND_DERIVATIVES and name not in axes):
            raise wrong_shape(f"axis 0 of '{name}' is not the axis of samples", "choose other inputs with `wrt`")
    derivative.axes = axes
    derivative.said["per_sample"] = tuple(name for name in derivative.wanted if name in axes)


def _each_gradient(derivative: DerivativeModel, given: Mapping[str, str]) -> dict[str, Val | None]:
    """Append the per-sample vector-Jacobian products, with respect to inputs and to weights.

    The gradient of an input has the shape of the input. The gradient of a weight has an additional axis 0 for the
    samples.

    Args:
        derivative: the model.
        given: differentiated value -> its cotangent; empty if all cotangents are ones.
    """
    graph = derivative.graph
    meetings = _meetings(derivative)
    found: dict[str, Val | None] = _by_all_samples(derivative, given, meetings.mixed) if meetings.mixed else {}
    op = Op(graph)
    seeds = {y: op.val(given[y]) if given else op.fill(1.0, op.val(y)) for y in derivative.outputs}
    others = [x for x in derivative.wanted if x not in meetings.mixed]
    found |= sample_gradients(op, seeds, others, meetings, derivative.training)
    samples = op.size(op.val(derivative.outputs[0]), 0)
    for x in (op.val(name) for name in derivative.wanted if name not in derivative.axes):
        found[x.name] = found[x.name] or op.zeros([samples, *(op.size(x, axis) for axis in range(x.rank))], x)
    graph.nodes.extend(op.nodes)
    return found


def _meetings(derivative: DerivativeModel) -> Meetings:
    """Return the nodes that read both samples and the weights of the derivatives."""
    axes = derivative.axes
    return Meetings(derivative.graph, [name for name in derivative.wanted if name not in axes], axes)


def _by_all_samples(
    derivative: DerivativeModel, given: Mapping[str, str], weights: Sequence[str]
) -> dict[str, Val | None]:
    """Append the per-sample gradients of weights, computed as Jacobians over the whole batch.

    This is used if a node reads the weights, but its contribution to their gradient can't be computed for each sample.
    """
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
    """Prepare a model and return it with the selected outputs and variables, and the names of its original outputs."""
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
"""Names in error messages for the values among which `wrt` and `of` search first, before inner values."""


def _jvp(derivative: DerivativeModel) -> list[str]:
    tangents = {x: derivative.add_input(f"{x}_tangent", x) for x in derivative.wanted}
    op = Op(derivative.graph)
    found = _forward(derivative, op, tangents)
    return _products(derivative, op, {f"{y}_tangent": (found[y], y) for y in derivative.outputs})


def _forward(derivative: DerivativeModel, op: Op, tangents: Mapping[str, str]) -> dict[str, Val | None]:
    """Emit the Jacobian-vector product of each output: reverse mode twice, the second time with tangents as cotangents.

    Args:
        derivative: the model, to which the nodes of the first differentiation are appended.
        op: the emitter for the nodes of the second differentiation.
        tangents: value to differentiate with respect to -> the name of its tangent.
    """
    graph, first = derivative.graph, Op(derivative.graph)
    # The first result is linear in these cotangents, so its derivative doesn't depend on their values.
    # They are zeros because a loop may still read them.
    free = {
        name: first.rename(first.fill(0.0, first.val(name)), graph.fresh(f"{name}_free")).name
        for name in derivative.outputs
    }
    graph.nodes.extend(first.nodes)
    first = Op(graph)
    seeds = {name: first.val(cotangent) for name, cotangent in free.items()}
    transposed = differentiate(graph, seeds, derivative.wanted, first, derivative.training)
    graph.nodes.extend(first.nodes)
    found = differentiate(graph, _seeds(op, transposed, tangents), free.values(), op)
    return {name: found[cotangent] for name, cotangent in free.items()}


def _hvp(derivative: DerivativeModel) -> list[str]:
    vectors = {x: derivative.add_input(f"{x}_vector", x) for x in derivative.wanted}
    gradient = _gradient_of_sum(derivative)
    op = Op(derivative.graph)
    found = differentiate(derivative.graph, _seeds(op, gradient, vectors), derivative.wanted, op, derivative.training)
    return _products(derivative, op, {f"{x}_hvp": (found[x], x) for x in derivative.wanted})


def _gnvp(derivative: DerivativeModel) -> list[str]:
    """Append Gauss-Newton vector products: the weighted Jacobian-vector products are the cotangents of the outputs."""
    graph, weights = derivative.graph, derivative.output_weights
    vectors = {x: derivative.add_input(f"{x}_vector", x) for x in derivative.wanted}
    op = Op(graph)
    cotangents = {}
    for y, tangent in _forward(derivative, op, vectors).items():
        cotangent = as_declared(op, y, tangent) if tangent is not None else op.fill(0.0, op.val(y))
        cotangents[y] = cotangent * op.val(weights[y]) if weights else cotangent
    graph.nodes.extend(op.nodes)
    op = Op(graph)
    if derivative.axes:
        found = _each_gradient(derivative, {y: cotangent.name for y, cotangent in cotangents.items()})
        return _results(derivative, op, {f"{x}_gnvp": (found[x], x) for x in derivative.wanted})
    seeds = {y: op.val(cotangent.name) for y, cotangent in cotangents.items()}
    found = differentiate(graph, seeds, derivative.wanted, op, derivative.training)
    return _products(derivative, op, {f"{x}_gnvp": (found[x], x) for x in derivative.wanted})


def _jacobian(derivative: DerivativeModel) -> list[str]:
    return _rows(derivative, {f"{y}_jacobian_": Op(derivative.graph).val(y) for y in derivative.outputs})


def _hessian(derivative: DerivativeModel) -> list[str]:
    gradient = _gradient_of_sum(derivative)
    op = Op(derivative.graph)
    rows = {f"{x}_hessian_": gradient[x] or op.fill(0.0, op.val(x)) for x in derivative.wanted}
    derivative.graph.nodes.extend(op.nodes)
    return _rows(derivative, rows)


def _hessian_diagonal(derivative: DerivativeModel) -> list[str]:
    op = Op(derivative.graph)
    found = _diagonals(derivative, op)
    return _results(derivative, op, {f"{x}_hessian_diagonal": (found[x], x) for x in derivative.wanted})


def _laplacian(derivative: DerivativeModel) -> list[str]:
    op, first = Op(derivative.graph), int(bool(derivative.axes))
    found: dict[str, tuple[Val | None, str]] = {}
    for x, entries in _diagonals(derivative, op).items():
        like = op.val(x)
        if entries is None:
            total = op.zeros([op.size(like, axis) for axis in range(first)], like)
        else:
            total = op.sum(entries, range(first, like.rank), keepdims=False) if like.rank > first else entries
        found[f"{x}_laplacian"] = op.state(total, like.shape[:first]), x
    return _results(derivative, op, found)


KINDS: Mapping[Derivative, Callable[[DerivativeModel], list[str]]] = {
    "vjp": DerivativeModel.vjp, "jvp": _jvp, "hvp": _hvp, "gnvp": _gnvp, "jacobian": _jacobian, "hessian": _hessian,
    "hessian-diagonal": _hessian_diagonal, "laplacian": _laplacian,
}  # fmt: skip
"""Kind of derivative -> the function that appends its nodes and returns the names of its outputs."""


def _gradient_of_sum(derivative: DerivativeModel) -> dict[str, Val | None]:
    """Append the gradient of the sum, or of the weighted sum, of all outputs."""
    op, given = Op(derivative.graph), derivative.output_weights
    weights = {y: op.val(given[y]) if given else op.fill(1.0, op.val(y)) for y in derivative.outputs}
    gradient = differentiate(derivative.graph, weights, derivative.wanted, op, derivative.training)
    if derivative.training.partial:
        raise conflict(
            f"gradients are stopped before '{derivative.training.partial[0]}', but the nodes of the first "
            "derivative would bypass that stop, so a second derivative would be wrong",
            "use a first derivative, such as vjp or jacobian",
        )
    derivative.said["kinks"] = tuple(sorted(derivative.training.kinks))  # without those of the gradient's own nodes
    derivative.graph.nodes.extend(op.nodes)
    return gradient


def _diagonals(derivative: DerivativeModel, op: Op) -> dict[str, Val | None]:
    """Return x -> the diagonal of the Hessian with respect to x, or None if it is zero."""
    graph, gradient, first = derivative.graph, _gradient_of_sum(derivative), Op(derivative.graph)
    slopes = {x: as_declared(first, x, slope) for x in derivative.wanted if (slope := gradient[x]) is not None}
    graph.nodes.extend(first.nodes)
    per_sample = bool(derivative.axes)
    return {
        x: diagonal(op, op.val(slopes[x].name), op.val(x), derivative.training, per_sample) if x in slopes else None
        for x in derivative.wanted
    }


def _seeds(op: Op, values: Mapping[str, Val | None], cotangents: Mapping[str, str]) -> dict[str, Val]:
    """Return value -> its cotangent, for the values that are not zero.

    Args:
        values: x -> the value that was computed for it; None if it is zero.
        cotangents: x -> the name of the cotangent. If the same value belongs to several x, their cotangents are added.
    """
    seeds: dict[str, Val] = {}
    for x, name in cotangents.items():
        value, cotangent = values[x], op.val(name)
        if value is not None:
            seeds[value.name] = seeds[value.name] + cotangent if value.name in seeds else cotangent
    return seeds


def _rows(derivative: DerivativeModel, values: Mapping[str, Val]) -> list[str]:
    """Append the Jacobians of values with respect to each x, and return the names of the Jacobians.

    Args:
        derivative: the model. If its derivatives are per sample, so are the Jacobians.
        values: prefix of the names of the Jacobians -> the value to differentiate.
    """
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
    """Append products with a vector, each in the declared shape of the input or output that it belongs to."""
    shaped = {name: (value and as_declared(op, like, value), like) for name, (value, like) in values.items()}
    return _results(derivative, op, shaped)


def _results(derivative: DerivativeModel, op: Op, values: Mapping[str, tuple[Val | None, str]]) -> list[str]:
    """Append the nodes of an emitter, rename the results, and return their names.

    Args:
        derivative: the model.
        op: the emitter with the nodes.
        values: name for a result -> (its value, or None if it is zero; the name of a value with the same shape).
    """
    found = {
        derivative.graph.fresh(name): value or op.fill(0.0, op.val(like)) for name, (value, like) in values.items()
    }
    op.rename_all(found)
    derivative.graph.nodes.extend(op.nodes)
    return list(found)
