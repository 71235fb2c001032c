"""Prove a training model before anyone trusts it: it is valid, it loads, it still computes the original, and its
gradients agree with differences of its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.limits import OverLimit, unasked
from onnxgrad_cli.execution.observation import weight_bytes
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.case import NOTHING, Case, Found
from onnxgrad_cli.verification.checks import CHECKS, Check
from onnxgrad_cli.verification.original import Original
from onnxgrad_cli.verification.verdict import Proof, Step
from onnxgrad_cli.verification.written import Ran


def prove(
    model: ModelProto,
    roles: Roles,
    path: Path | None = None,
    original: ModelProto | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    operations: int = 0,
    note: Callable[[str], object] = str,
    keep: Callable[[Ran], object] | None = None,
) -> Proof:
    """Check a training model on given or random data.

    Args:
        model: the training model; external data are relative to `path`.
        roles: what its inputs and outputs are for.
        original: the inference model it was made from, for the comparison of the forward parts.
        data: arrays for its inputs; what is missing is drawn at random.
        sizes: sizes of symbolic dimensions for random data.
        seed: of the random data and directions.
        force: check large models too, which takes longer than a few seconds.
        operations: floating-point operations that are known of one run.
        note: gets the name of each check as it begins.
        keep: gets the run of the model, if it came to one, with which the file that is written is compared.
    """
    before = Original(original, path) if original is not None else None
    case = Case(
        model, roles, path, before, dict(data or {}), sizes or {}, np.random.default_rng(seed), force, operations
    )
    proof = checked(case, CHECKS, note)
    if keep and case.ran:
        keep(case.ran)
    return proof


def checked(case: Case, checks: Iterable[tuple[str, Check]], note: Callable[[str], object]) -> Proof:
    """What checks find of a case, one after the other; `note` gets the name of each as it begins."""
    proof = Proof()
    with unasked(limited=not case.force) as patience:
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
                proof.steps.append(Step(name, found.status, found.detail, time.perf_counter() - start))
            if found.status == "failed":
                proof.status = "failed"
            if found.leaves_unproved:
                proof.status, proof.reason = "skipped", f"{name}: {found.leaves_unproved}"
            if found.ends:
                break
    proof.executor, proof.sizes = case.measured_by, case.named_sizes
    proof.conclude()
    return proof


def _cut_short(limit: str) -> Found:
    """What a check has found of which a run was cut short: nothing, whatever it took that for."""
    reason = f"the proof takes more than {limit}: ask for it with --verify"
    return Found("skipped", reason, ends=True, leaves_unproved=reason)
