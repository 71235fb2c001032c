"""Check derivatives that are composed of other derivatives, which are first proved against finite differences.

- A Gauss-Newton vector product is the vector-Jacobian product of a weighted Jacobian-vector product.
- Element i of a Hessian's diagonal is element i of the Hessian's product with unit vector i.
- A Laplacian is the sum of a Hessian's diagonal.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np

from onnxgrad_cli.common.choices import WEIGHTED_DERIVATIVES, Derivative, Mode
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.double import DoubleExecutor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.metadata import Derived, read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.case import CheckOutcome, ProofCase, skipped
from onnxgrad_cli.verification.checks.agreement import run_nearby
from onnxgrad_cli.verification.verdict import FAILED, PROVED, Proof

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
    try:
        parts = [_ProvedPart(kind, derived, case) for kind in PARTS[derived.kind]]
    except OnnxgradError as error:
        return skipped(f"the derivatives that it is composed of can't be computed: {error.message}")
    for part in parts:
        proof = prove(part.model, part.said, case.path, case.original.model, sizes=case.sizes, force=True)
        if proof.verdict != PROVED:
            status = "failed" if proof.verdict == FAILED else "skipped"
            return CheckOutcome(status, f"{part.said.kind} that it is composed of: {proof.why}")
    try:
        return _compare(derived, case, partial(COMPOSED[derived.kind], derived, case, parts))
    except Exception as error:  # the executors' exceptions share no base class
        return skipped(f"the derivatives can't be compared in float64: {str(error).strip()[:300]}")


def _compare(derived: Derived, case: ProofCase, compare: Callable[[Arrays], Compared]) -> CheckOutcome:
    """Compare derivatives with the values computed from the parts. If they differ, compare again in float64.

    Args:
        derived, case: the derivatives to check.
        compare: a function that compares derivatives (variable -> array) with the values computed from the parts.
    """

    def by_variable(outputs: Mapping[str, np.ndarray]) -> Arrays:
        return {x: outputs[name] for x, name in zip(derived.wrt, derived.outputs, strict=True)}

    delivered = by_variable(case.outputs)
    compared = compare(delivered)
    if not np.isfinite(list(compared.differences.values())).all():
        return skipped("the derivatives are not finite on these data: pass other data")
    rounding = f"{compared.worst:.1e} in relative terms"
    if compared.worst <= MAX_ROUNDING:
        return CheckOutcome("passed", f"equal to {compared.what}, up to {rounding}")
    run = DoubleExecutor(case.described.model)
    exact = by_variable(run(run.widened({**case.described.weights, **case.feeds})))
    case.measured_by = run.name
    again = compare(exact)
    if not again.worst <= MAX_DIFFERENCE:
        return CheckOutcome("failed", f"they differ from {again.what} by {again.worst:.1e} in relative terms")
    near = by_variable(run_nearby(case))
    noise = max(_largest(near[x], delivered[x]) / compared.scales[x] for x in delivered)
    if compared.worst <= 10 * noise:
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
        of, wrt = ([glob.escape(name) for name in names] for names in (derived.of, derived.wrt))
        self.model = derive(
            case.original.model, kind, of=of, wrt=wrt, class_=derived.pick or None, class_axis=derived.class_axis,
            per_sample=derived.per_sample is not None and kind not in ("jvp", "hvp"), cotangents="input",
            weighted=bool(derived.weights) and kind in WEIGHTED_DERIVATIVES, path=case.path,
            options=Options(mode=cast(Mode, derived.mode)),
        )  # fmt: skip
        said = read_derived(self.model)
        assert said is not None
        self.said = said
        self._case = case
        self._run = DoubleExecutor(self.model)
        self._weights = zip(said.weights, derived.weights, strict=True) if said.weights else ()
        self._feeds = {**case.described.weights, **case.feeds}
        self._feeds |= {theirs: case.feeds[ours] for theirs, ours in self._weights}
        self._feeds |= {said.label: case.feeds[derived.label]} if derived.label else {}

    def __call__(self, given: Mapping[str, np.ndarray]) -> Arrays:
        """Return a map: differentiated value or variable -> its derivative in float64.

        Args:
            given: differentiated value or variable -> its cotangent, tangent or vector.
        """
        added = {name: given[key] for (key,), name in self.said.added().items()}
        outputs = self._run(self._run.widened({**self._feeds, **added}))
        return {key: outputs[name] for (key,), name in self.said.results().items()}


class Compared:
    """The comparison of derivatives with the values computed from their parts.

    Attributes:
        what: the computation from the parts, as text for the report.
        differences: variable -> the largest difference.
        scales: variable -> the magnitude by which its difference is divided.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.differences: dict[str, float] = {}
        self.scales: dict[str, float] = {}

    def add(self, x: str, difference: float, scale: float) -> None:
        """Record the difference and the scale of the derivatives with respect to x."""
        self.differences[x], self.scales[x] = difference, scale or 1.0

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max(self.differences[x] / self.scales[x] for x in self.differences)


def _largest(a: np.ndarray, b: np.ndarray | None = None) -> float:
    """Return the largest magnitude in `a`, or in the difference of two arrays of the same shape."""
    b = np.zeros(a.shape) if b is None else b
    if a.shape != b.shape:
        raise ValueError(f"the derivatives have the shape {list(a.shape)} instead of {list(b.shape)}")
    return float(np.abs(np.subtract(a, b, dtype=np.float64)).max(initial=0.0))


def _gnvp(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Compared:
    forward, reverse = parts
    tangents = forward(dict(zip(derived.wrt, (case.feeds[name] for name in derived.inputs), strict=True)))
    weights = {y: np.asarray(case.feeds[name]) for y, name in zip(derived.of, derived.weights, strict=False)}
    wanted = reverse({y: tangent * weights.get(y, 1.0) for y, tangent in tangents.items()})
    compared = Compared("the vector-Jacobian product of the Jacobian-vector product, both proved")
    for x, value in found.items():
        compared.add(x, _largest(value, wanted[x]), _largest(wanted[x]))
    return compared


def _diagonal(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Compared:
    (product,) = parts
    first = int(derived.per_sample is not None)
    zeros = {x: np.zeros(value.shape) for x, value in found.items()}
    count = total = 0
    differences = {}
    for x, value in found.items():
        flat = value.reshape(*value.shape[:first], -1)
        positions = probes(flat.shape[-1], case.rng)
        count, total = count + len(positions), total + flat.shape[-1]
        differences[x] = 0.0
        for at in positions:
            unit = np.zeros(flat.shape)
            unit[..., at] = 1.0
            row = product({**zeros, x: unit.reshape(value.shape)})[x].reshape(flat.shape)
            differences[x] = max(differences[x], _largest(flat[..., at], row[..., at]))
    compared = Compared(f"products of the Hessian, which are proved, with {count:,} of {total:,} unit vectors")
    for x, value in found.items():
        compared.add(x, differences[x], _largest(value))
    return compared


def probes(size: int, rng: np.random.Generator) -> list[int]:
    """Return the positions of a diagonal to check: all, or the first, the last and random ones if there are many."""
    if size <= MAX_PROBES:
        return list(range(size))
    return [0, size - 1, *(rng.choice(size - 2, MAX_PROBES - 2, replace=False) + 1).tolist()]


def _laplacian(derived: Derived, case: ProofCase, parts: list[_ProvedPart], found: Arrays) -> Compared:
    (diagonal,) = parts
    first = int(derived.per_sample is not None)
    compared = Compared("the sum of the Hessian's diagonal, which is proved")
    for x, entries in diagonal({}).items():
        axes = tuple(range(first, entries.ndim))
        compared.add(x, _largest(found[x], entries.sum(axes)), _largest(np.abs(entries).sum(axes)))
    return compared


PARTS: Mapping[str, tuple[Derivative, ...]] = {
    "gnvp": ("jvp", "vjp"), "hessian-diagonal": ("hvp",), "laplacian": ("hessian-diagonal",)
}  # fmt: skip
"""Kind of derivative -> the kinds that it is composed of."""

COMPOSED: Mapping[str, Callable[[Derived, ProofCase, list[_ProvedPart], Arrays], Compared]] = {
    "gnvp": _gnvp, "hessian-diagonal": _diagonal, "laplacian": _laplacian
}  # fmt: skip
"""Kind of derivative -> the function that compares it with the composition of its parts."""
