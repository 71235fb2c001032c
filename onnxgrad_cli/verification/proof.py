"""Prove a training model before anyone trusts it: it is valid, it loads, it still computes the original, and its
gradients agree with differences of its loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.execution.limits import OverLimit, unasked
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.verification.case import Case, Found
from onnxgrad_cli.verification.checks import CHECKS


@dataclass(frozen=True)
class Step:
    """One thing that was checked: `status` is 'passed', 'failed' or 'skipped'."""

    name: str
    status: str
    detail: str
    seconds: float


PROVED, NOT_PROVED, FAILED = "proved", "not proved", "failed"
"""Verdicts: every check passed; one was left out, so that something could be wrong; one failed."""


@dataclass
class Proof:
    """What was checked and what came of it.

    Attributes:
        status: 'passed', 'failed', or 'skipped' with the `reason`.
        steps: each check in order.
        verdict: 'proved', 'not proved' or 'failed'.
        why: why it is not proved, or what failed; "" where it is proved.
        executor: what evaluated the differences, and in which precision.
    """

    status: str = "passed"
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    executor: str = ""
    verdict: str = field(init=False, default=NOT_PROVED)
    why: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.conclude()

    def conclude(self) -> None:
        """Draw the verdict from what was checked so far."""
        open_ = [step for step in self.steps if step.status != "passed"]
        worst = next((step for step in open_ if step.status == "failed"), next(iter(open_), None))
        self.why = f"{worst.name}: {worst.detail}" if worst else ""
        if self.status == "failed":
            self.verdict = FAILED
        elif self.status == "skipped" or worst or not self.steps:
            self.verdict, self.why = NOT_PROVED, self.reason or self.why or "nothing was checked"
        else:
            self.verdict = PROVED

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return self.status == "failed"


def prove(
    model: ModelProto,
    roles: Roles,
    path: Path | None = None,
    original: ModelProto | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    force: bool = False,
    note: Callable[[str], object] = str,
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
        note: gets the name of each check as it begins.
    """
    proof = Proof()
    case = Case(model, roles, path, original, dict(data or {}), sizes or {}, np.random.default_rng(seed), force)
    with unasked(limited=not force):
        for name, check in CHECKS:
            note(name)
            start = time.perf_counter()
            try:
                found = check(case)
            except OverLimit as error:
                found = Found(
                    "skipped", error.message, ends=True, leaves_unproved=f"{error.message}: ask for it with --verify"
                )
            if found.status:
                proof.steps.append(Step(name, found.status, found.detail, time.perf_counter() - start))
            if found.status == "failed":
                proof.status = "failed"
            if found.leaves_unproved:
                proof.status, proof.reason = "skipped", found.leaves_unproved
            if found.ends:
                break
    proof.executor = case.measured_by
    proof.conclude()
    return proof
