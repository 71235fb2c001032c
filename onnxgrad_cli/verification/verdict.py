"""What came of a proof: its steps, and the verdict that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        sizes: symbol of the model's inputs -> the size that was chosen for random data.
    """

    status: str = "passed"
    reason: str = ""
    steps: list[Step] = field(default_factory=list)
    executor: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
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

    def add(self, step: Step) -> None:
        """Take in what was checked after the others."""
        self.steps.append(step)
        if step.status == "failed":
            self.status = "failed"
        self.conclude()

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return self.status == "failed"
