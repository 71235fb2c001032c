"""Check derivatives that are composed of other derivatives, which are first proved against finite differences.

- A Gauss-Newton vector product is the vector-Jacobian product of a weighted Jacobian-vector product.
- Element i of a Hessian's diagonal is element i of the Hessian's product with unit vector i.
- A Laplacian is the sum of a Hessian's diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.common.choices import WEIGHTED_DERIVATIVES, Derivative
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Derived
from onnxgrad_cli.verification.case import CheckOutcome, ProofCase, skipped, unproved
from onnxgrad_cli.verification.checks.agreement import run_nearby
from onnxgrad_cli.verification.original_derivatives import derive_again, feeds_again
from onnxgrad_cli.verification.verdict import PROVED, Proof

MAX_PROBES = 64
"""Largest number of elements of one diagonal that are checked. If there are more, some are chosen at random."""

MAX_ROUNDING = 1e-4
"""Largest accepted difference of the model's own derivatives, relative to the largest entry or sum of magnitudes."""

MAX_DIFFERENCE = 1e-8
"""Largest accepted difference of derivatives in float64, relative to the largest entry or sum of magnitudes."""

Prove = Callable[..., Proof]
"""Type of `prove_derived`. The function is passed as an argument, because its module imports this one."""


def agrees_with_parts(derived: Derived, case: ProofCase, prove: Prove) -> CheckOutcome:
    """Prove the parts of derivatives, and compare the derivatives with the values computed from the parts."""
    if case.original is None:
        return skipped(f"a {derived.kind} is measured with the original model: pass it with --original")
    kinds, compare = COMPOSED[derived.kind]
    try:
        parts = [_ProvedPart(kind, derived, case) for kind in kinds]
    except OnnxgradError as error:
        return skipped(f"the derivatives that it is composed of can't be computed: {error.message}")
    for part in parts:
        proof = prove(part.model, part.said, case.path, case.original.model, sizes=case.sizes, force=True)
        if proof.verdict != PROVED:
            return unproved(proof, f"{part.said.kind} that it is composed of")
    try:
        return _compared(derived, case, lambda outputs: compare(derived, case, parts, outputs))
    except Exception as error:  # the executors' exceptions share no base class
        return skipped(f"the derivatives can't be compared in float64: {str(error).strip()[:300]}")


def _compared(derived: Derived, case: ProofCase, compare: Callable[[Arrays], Comparison]) -> CheckOutcome:
    """Compare derivatives with the values computed from the parts. If they differ, compare again in float64.

    Args:
        derived, case: the derivatives to check.
        compare: a function that compares derivatives (variable -> array) with the values computed from the parts.
    """

    def by_variable(outputs: Mapping[str, np.ndarray]) -> Arrays:
        return {x: outputs[name] for x, name in zip(derived.wrt, derived.outputs, strict=True)}

    delivered = by_variable(case.outputs)
    found = compare(delivered)
    if not np.isfinite([difference for difference, _ in found.differences.values()]).all():
        return skipped("the derivatives are not finite on these data: pass other data")
    rounding = f"{found.worst:.1e} in relative terms"
    if found.worst <= MAX_ROUNDING:
        return CheckOutcome("passed", f"equal to {found.what}, up to {rounding}")
    run = DoubleExecutor(case.described.model)
    exact = by_variable(run.on({**case.described.weights, **case.feeds}))
    case.measured_by = run.name
    again = compare(exact)
    if not again.worst <= MAX_DIFFERENCE:
        return CheckOutcome("failed", f"they differ from {again.what} by {again.worst:.1e} in relative terms")
    near = by_variable(run_nearby(case))
    noise = max(_largest(near[x], delivered[x]) / (scale or 1.0) for x, (_, scale) in found.differences.items())
    if found.worst <= 10 * noise:
        return skipped(f"correct in float64, but dominated by rounding errors on these data: {rounding}")
    return CheckOutcome("failed", f"correct in float64, but onnxruntime's float32 kernels deviate by {rounding}")


class _ProvedPart:
    """A model of derivatives that the checked derivatives are composed of, for the same outputs and variables.

    Attributes:
        model: the model.
        said: the description of its derivatives.
    """

    def __init__(self, kind: Derivative, derived: Derived, case: ProofCase) -> None:
        assert case.original is not None
        self.model, self.said = derive_again(
            derived, case.original.model, case.path, kind, {}, cotangents="input",
            per_sample=derived.per_sample is not None and kind not in ("jvp", "hvp"),
            weighted=bool(derived.weights) and kind in WEIGHTED_DERIVATIVES,
        )  # fmt: skip
        self._run = DoubleExecutor(self.model)
        self._feeds = feeds_again(self.said, derived, {**case.described.weights, **case.feeds})

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Return a map: differentiated value or variable -> its derivative in float64.

        Args:
            given: differentiated value or variable -> its cotangent, tangent or vector.
        """
        added = {name: given[key] for (key,), name in self.said.added().items()}
        outputs = self._run.on({**self._feeds, **added})
        return {key: outputs[name] for (key,), name in self.said.results().items()}


@dataclass(frozen=True)
class Comparison:
    """The comparison of derivatives with the values computed from their parts.

    Attributes:
        what: the computation from the parts, as text for the report.
        differences: variable -> the largest difference, and the magnitude by which it is divided.
    """

    what: str
    differences: Mapping[str, tuple[float, float]]

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max(difference / (scale or 1.0) for difference, scale in self.differences.values())


def _largest(a: np.ndarray, b: np.ndarray | None = None) -> float:
    """Return the largest magnitude in `a`, or in the difference of two arrays of the same shape."""
    b = np.zeros(a.shape) if b is None else b
    if a.shape != b.shape:
        raise ValueError(f"the derivatives have the shape {list(a.shape)} instead of {list(b.shape)}")
    return float(np.abs(np.subtract(a, b, dtype=np.float64)).max(initial=0.0))


def _gnvp(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Comparison:
    forward, reverse = parts
    tangents = forward(dict(zip(derived.wrt, (case.feeds[name] for name in derived.inputs), strict=True)))
    weights = {y: np.asarray(case.feeds[name]) for y, name in zip(derived.of, derived.weights, strict=False)}
    wanted = reverse({y: tangent * weights.get(y, 1.0) for y, tangent in tangents.items()})
    return Comparison(
        "the vector-Jacobian product of the Jacobian-vector product, both proved",
        {x: (_largest(value, wanted[x]), _largest(wanted[x])) for x, value in found.items()},
    )


def _diagonal(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Comparison:
    (product,) = parts
    first = int(derived.per_sample is not None)
    zeros = {x: np.zeros(value.shape) for x, value in found.items()}
    count = total = 0
    differences = {}
    for x, value in found.items():
        flat = value.reshape(*value.shape[:first], -1)
        positions = probes(flat.shape[-1], case.rng)
        count, total = count + len(positions), total + flat.shape[-1]
        worst = 0.0
        for at in positions:
            unit = np.zeros(flat.shape)
            unit[..., at] = 1.0
            row = product({**zeros, x: unit.reshape(value.shape)})[x].reshape(flat.shape)
            worst = max(worst, _largest(flat[..., at], row[..., at]))
        differences[x] = worst, _largest(value)
    what = f"products of the Hessian, which are proved, with {count:,} of {total:,} unit vectors"
    return Comparison(what, differences)


def probes(size: int, rng: np.random.Generator) -> list[int]:
    """Return the positions of a diagonal to check: all, or the first, the last and random ones if there are many."""
    if size <= MAX_PROBES:
        return list(range(size))
    return [0, size - 1, *(rng.choice(size - 2, MAX_PROBES - 2, replace=False) + 1).tolist()]


def _laplacian(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Comparison:
    (diagonal,) = parts
    first = int(derived.per_sample is not None)
    differences = {}
    for x, entries in diagonal({}).items():
        axes = tuple(range(first, entries.ndim))
        differences[x] = _largest(found[x], entries.sum(axes)), _largest(np.abs(entries).sum(axes))
    return Comparison("the sum of the Hessian's diagonal, which is proved", differences)


Compare = Callable[[Derived, ProofCase, list[_ProvedPart], Arrays], Comparison]

COMPOSED: Mapping[str, tuple[tuple[Derivative, ...], Compare]] = {
    "gnvp": (("jvp", "vjp"), _gnvp),
    "hessian-diagonal": (("hvp",), _diagonal),
    "laplacian": (("hessian-diagonal",), _laplacian),
}
"""Kind of derivative -> the kinds that it is composed of, and the function that compares it with their composition."""
