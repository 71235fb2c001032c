"""Turn the result of a gradient check into a text."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.common.flags import listed
from onnxgrad_cli.verification.case import CheckOutcome, skipped
from onnxgrad_cli.verification.gradients.judgement import Judge, Judgement

FAULTS = (0.01, 0.05, 0.2)
"""Sizes of gradient errors that the report mentions, relative to a gradient.

The report names the first size that the check would detect in at least half of the tensors, and the number of these
tensors.
"""

ROUNDING = 1e-3
"""An undetected error up to this fraction of the largest gradient is ignored.

Rounding leaves values of this size in a gradient that should be zero, such as that of a bias before a normalization.
"""

STILL = "all gradients are zero on these data, and the loss does not change with the tensors"
"""The text of the outcome if the loss doesn't change and all gradients are zero. Such a check tests no rule."""


def in_words(judge: Judge, judged: Judgement, partial: Sequence[str], named: bool = False) -> CheckOutcome:
    """Check whether the gradients passed, and return the outcome with a text.

    Args:
        judge: compared the gradients with slopes.
        judged: the result of `judge`.
        partial: tensors whose gradients were not checked, because some paths to them are stopped.
        named: also search for the gradients that are wrong on their own, not only in the sum, and name them.
    """
    detail = f"{judged.directions} random directions: relative error {judged.error:.1e} ({judge.loss.name})"
    if partial:
        detail += f"; without {_some(partial)}, where gradients are stopped on some paths"
    if judged.refuted:
        return CheckOutcome("failed", f"{detail}; wrong: {_wrong(judge, judged) if named else TOGETHER}")
    moving = [name for name in judged.visible if name not in judged.still]
    if not moving:
        return skipped(STILL)
    seen = _seen(judged, moving)
    if not seen:
        return skipped(
            "the gradients are dominated by rounding errors here: a change in the last digits changes them completely"
        )
    hidden = [
        name for name in moving if judged.visible[name] >= FAULTS[-1] and judge.could_hide(judged, name) > ROUNDING
    ]
    return CheckOutcome("passed", f"{detail}; {seen}", hidden=tuple(hidden))


def hiding(found: CheckOutcome) -> str:
    """Return a text that names the gradients in which the check would miss large errors."""
    return f"the check would not detect large errors in the gradient of {listed(found.hidden)}: {found.detail}"


TOGETHER = "none alone, but all together"


def _wrong(judge: Judge, judged: Judgement) -> str:
    errors = judge.wrong_among(judged.refuted)
    return ", ".join(f"{name} ({error:.1e})" for name, error in errors.items()) or TOGETHER


def _seen(judged: Judgement, moving: Sequence[str]) -> str:
    """Return a text with the size of an error that would be detected, and in how many tensors; "" if in none."""
    shown = {fault: [name for name in moving if judged.visible[name] < fault] for fault in FAULTS}
    fault = next((size for size, names in shown.items() if 2 * len(names) >= len(moving)), FAULTS[-1])
    if not shown[fault]:
        return ""
    seen = f"an error of {fault:.0%} would show in {len(shown[fault])} of {len(judged.visible)} tensors alone"
    hidden = [name for name in moving if name not in shown[fault]]
    if hidden:
        seen += f", but not in {_some(hidden)}, whose gradients are small compared with their noise"
    if judged.still:
        seen += f"; zero, and the loss does not change with them: {_some(judged.still)}"
    return seen


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' and more' * (len(names) > 5)}"
