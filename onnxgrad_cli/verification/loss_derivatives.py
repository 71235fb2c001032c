"""Check each derivative inside a loss, such as a gradient penalty, against finite differences.

A wrong derivative inside a loss does not show in a comparison of the loss with its own gradients: these are correct,
but for a different loss than the author wrote. So each derivative is checked as a model of derivatives of its own.
"""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad_cli.derivatives.named_values import take_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.metadata import PROOF_PREFIX, Derived, InnerDerivative
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase, skipped, unproved
from onnxgrad_cli.verification.derivative_proof import has_values, prove_derived
from onnxgrad_cli.verification.feeds import part, with_proof_part
from onnxgrad_cli.verification.verdict import PROVED, Proof


def agrees_inside(case: ProofCase) -> CheckOutcome:
    """Check that the derivatives inside the loss match finite differences."""
    whole = with_proof_part(case.described)
    named = {name for each in case.roles.inner for name in (each.of, each.seed, *each.wrt, *each.results)}
    whole = part(whole, sorted(named.intersection(name for node in whole.graph.node for name in node.output)))
    for each in case.roles.inner:
        proof = _proved(case, whole, each)
        if proof is None:
            return skipped(f"the model does not compute the derivative of '{each.of}' as described")
        if proof.verdict != PROVED:
            names = ", ".join(f"'{name}'" for name in each.wrt)
            return unproved(proof, f"the derivative of '{each.of.removeprefix(PROOF_PREFIX)}' with respect to {names}")
    count = len(case.roles.inner)
    return CheckOutcome("passed", f"{count} of {count}") if count else NOTHING


def _proved(case: ProofCase, whole: ModelProto, each: InnerDerivative) -> Proof | None:
    """Prove an inner derivative as a model of its own. Return None if `whole` does not compute it as described."""
    model = _as_model(case, whole, each)
    if model is None:
        return None
    fed = {value.name for value in model.graph.input}
    inner = tuple(name for name in each.wrt if name not in fed)
    seeds = (each.seed,) if each.seed else ()
    derived = Derived(each.kind, (each.of,), each.wrt, seeds, each.results, "keep", inner=inner)
    data = {name: array for name, array in case.data.items() if name in fed}
    return prove_derived(model, derived, case.path, None, data, case.sizes, force=case.force)


def _as_model(case: ProofCase, model: ModelProto, inner: InnerDerivative) -> ModelProto | None:
    """Return the part of the model that computes an inner derivative and the value that is differentiated.

    The seed of the derivative, which is the cotangent or vector that it is multiplied with, becomes an input. Return
    None if the model does not compute one of these values.
    """
    if not has_values(model, filter(None, (inner.of, *inner.results, *inner.wrt, inner.seed))):
        return None
    if inner.seed and inner.seed not in (value.name for value in model.graph.input):
        graph = Graph(copied(model), case.path)
        infer_types(graph)
        if inner.seed not in graph.types:
            return None
        take_name(graph, inner.seed, graph.fresh(f"{inner.seed}_made"))
        graph.add_input(inner.seed, graph.types[inner.seed])
        model = graph.commit()
    return part(model, [inner.of, *inner.results])
