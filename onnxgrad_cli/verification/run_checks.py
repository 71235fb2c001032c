"""Run the checks of a proof one after the other, within the limits of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress

from onnxgrad_cli.execution.limits import OverLimit, within_budget
from onnxgrad_cli.execution.observation import weight_bytes
from onnxgrad_cli.verification.case import NOTHING, CheckOutcome, ProofCase
from onnxgrad_cli.verification.proof_checks import Check
from onnxgrad_cli.verification.verdict import Proof, ProofStep


def checked(case: ProofCase, checks: Iterable[tuple[str, Check]], note: Callable[[str], object]) -> Proof:
    """Run checks on a case in order, and return the proof.

    `note` is called with the name of each check as it starts.
    """
    proof = Proof()
    with within_budget(limited=not case.force) as patience:
        if patience is not None:
            stored = case.original.model if case.original is not None else case.model
            patience.allow(weight_bytes(case.model), len(stored.graph.node), case.operations)
        for name, check in checks:
            note(name)
            start = time.perf_counter()
            found = NOTHING
            with suppress(OverLimit), patience.taking() if patience else nullcontext():
                found = check(case)
            if patience is not None and patience.spent:
                found = _cut_short(patience.spent)
            if found.status:
                proof.steps.append(ProofStep(name, found.status, found.detail, time.perf_counter() - start))
            if found.status == "failed":
                proof.status = "failed"
            if found.leaves_unproved:
                proof.status, proof.reason = "skipped", f"{name}: {found.leaves_unproved}"
            if found.ends:
                break
    proof.executor, proof.sizes = case.measured_by, case.named_sizes
    proof.conclude()
    return proof


def _cut_short(limit: str) -> CheckOutcome:
    """Return the outcome that replaces that of a check in which a run exceeded a limit of time or memory."""
    reason = f"the proof takes more than {limit}; --verify runs it anyway"
    return CheckOutcome("skipped", reason, ends=True, leaves_unproved=reason)
