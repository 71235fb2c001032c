"""The result of a proof: its steps, and the verdict that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True)
class ProofStep:
    """One check of a proof. `status` is 'passed', 'failed' or 'skipped'."""

    name: str
    status: str
    detail: str
    seconds: float


Verdict = Literal["proved", "not_proved", "failed"]

PROVED: Final = "proved"
NOT_PROVED: Final = "not_proved"
FAILED: Final = "failed"
"""The verdicts: `PROVED`: every check passed. `NOT_PROVED`: a check was skipped. `FAILED`: a check failed."""


@dataclass
class Proof:
    """The steps of a proof and its verdict.

    Attributes:
        status: 'failed' if a check failed; 'skipped' if the model can't be proved, with the `reason`; otherwise
            'passed'.
        steps: the checks, in the order in which they ran.
        verdict: 'proved', 'not_proved' or 'failed'.
        why: the reason why the model is not proved, or the failed check; "" if it is proved.
        executor: the runtimes that evaluated the finite differences, and their precision.
        sizes: symbol in the shapes of the model's inputs -> the size that was chosen for random data.
    """

    status: str = "passed"
    reason: str = ""
    steps: list[ProofStep] = field(default_factory=list)
    executor: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    verdict: Verdict = field(init=False, default=NOT_PROVED)
    why: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.conclude()

    def conclude(self) -> None:
        """Set the verdict and its reason from the steps so far."""
        open_ = [step for step in self.steps if step.status != "passed"]
        worst = next((step for step in open_ if step.status == "failed"), next(iter(open_), None))
        self.why = f"{worst.name}: {worst.detail}" if worst else ""
        if self.status == "failed":
            self.verdict = FAILED
        elif self.status == "skipped" or worst or not self.steps:
            self.verdict, self.why = NOT_PROVED, self.reason or self.why or "nothing was checked"
        else:
            self.verdict = PROVED

    def add(self, step: ProofStep) -> None:
        """Append a step and update the verdict."""
        self.steps.append(step)
        if step.status == "failed":
            self.status = "failed"
        self.conclude()

    @property
    def failed(self) -> bool:
        """True if a check failed."""
        return self.status == "failed"
