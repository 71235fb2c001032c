"""Check each derivative inside a loss, such as a gradient penalty, against finite differences.

A wrong derivative inside a loss does not show in a comparison of the loss with its own gradients: these are correct,
but for a different loss than the author wrote. So each derivative is checked as a model of derivatives of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import Derived, InnerDerivative
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.derived import has_values, prove_derived
from onnxgrad_cli.verification.feeds import part
from onnxgrad_cli.verification.gradients.perturbation import take_name
from onnxgrad_cli.verification.verdict import FAILED, PROVED, Proof


def agrees_inside(case: ProofCase) -> CheckOutcome:
    """Check that the derivatives inside the loss match finite differences."""
    for each in case.roles.inner:
        proof = _proved(case, each)
        if proof is None:
            return skipped(f"the model does not compute the derivative of '{each.of}' as described")
        if proof.verdict != PROVED:
            names = ", ".join(f"'{name}'" for name in each.wrt)
            text = f"the derivative of '{each.of}' with respect to {names}: {proof.why}"
            return CheckOutcome("failed", text) if proof.verdict == FAILED else skipped(text)
    count = len(case.roles.inner)
    return CheckOutcome("passed", f"{count} of {count}") if count else NOTHING


def _proved(case: ProofCase, each: InnerDerivative) -> Proof | None:
    """Prove an inner derivative as a model of its own. Return None if the case does not compute it as described."""
    original = case.original.model if case.original is not None else None
    alone = original is None or has_values(case.described.model, [each.of]) or not has_values(original, [each.of])
    model = _as_model(case, each, [each.of] if alone else [])
    if model is None:
        return None
    fed = {value.name for value in model.graph.input}
    inner = tuple(name for name in each.wrt if name not in fed)
    seeds = (each.seed,) if each.seed else ()
    derived = Derived(each.kind, (each.of,), each.wrt, seeds, each.results, "keep", inner=inner)
    data = {name: array for name, array in case.data.items() if name in fed}
    return prove_derived(model, derived, case.path, None if alone else original, data, case.sizes, force=case.force)


def _as_model(case: ProofCase, inner: InnerDerivative, of: Sequence[str]) -> ModelProto | None:
    """Return the part of the model that computes an inner derivative and the values in `of`.

    The seed of the derivative, which is the cotangent or vector that it is multiplied with, becomes an input. Return
    None if the model does not compute one of these values.
    """
    model = case.described.model
    if not has_values(model, filter(None, (*of, *inner.results, *inner.wrt, inner.seed))):
        return None
    if inner.seed and inner.seed not in (value.name for value in model.graph.input):
        graph = Graph(copied(model), case.path)
        infer_types(graph)
        if inner.seed not in graph.types:
            return None
        take_name(graph, inner.seed, graph.fresh(f"{inner.seed}_made"))
        graph.add_input(inner.seed, graph.types[inner.seed])
        model = graph.commit()
    return part(model, [*of, *inner.results])
