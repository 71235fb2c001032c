"""What a judgement of gradients means, in words."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.common.wording import listed
from onnxgrad_cli.verification.case import Found
from onnxgrad_cli.verification.judgement import Judge, Judgement

FAULTS = (0.01, 0.05, 0.2)
"""Sizes of faults, relative to a gradient: the report says in how many tensors the first of them would show that would
in most."""

ROUNDING = 1e-3
"""The share of the largest gradient by which a hidden one may be wrong: rounding leaves as much where zero is right, as
of a bias before a normalization."""

STILL = "every gradient is zero on these data, and the loss stays where the tensors move"
"""What is found where nothing moves the loss: it shows nothing of any rule."""


def in_words(judge: Judge, judged: Judgement, partial: Sequence[str], named: bool = False) -> Found:
    """What was found of gradients.

    Args:
        judge: who judged them.
        judged: what came of it.
        partial: tensors that were left out, because paths to them are stopped.
        named: look for those that are wrong alone.
    """
    detail = f"{judged.directions} random directions: relative error {judged.error:.1e} ({judge.loss.name})"
    if partial:
        detail += f"; not of {_some(partial)}, of which paths are stopped"
    if judged.refuted:
        return Found("failed", f"{detail}; wrong: {_wrong(judge, judged) if named else TOGETHER}")
    moving = [name for name in judged.visible if name not in judged.still]
    if not moving:
        return Found("skipped", STILL)
    seen = _seen(judged, moving)
    if not seen:
        return Found("skipped", "the gradients are rounding noise here: a change in the last digits gives others")
    hidden = [
        name for name in moving if judged.visible[name] >= FAULTS[-1] and judge.could_hide(judged, name) > ROUNDING
    ]
    return Found("passed", f"{detail}; {seen}", hidden=tuple(hidden))


def hiding(found: Found) -> str:
    """That faults could hide, in words."""
    return f"in the gradient of {listed(found.hidden)} large faults could hide: {found.detail}"


TOGETHER = "none alone, but all together"


def _wrong(judge: Judge, judged: Judgement) -> str:
    errors = judge.wrong_among(judged.refuted)
    return ", ".join(f"{name} ({error:.1e})" for name, error in errors.items()) or TOGETHER


def _seen(judged: Judgement, moving: Sequence[str]) -> str:
    """In which tensors faults of which size would have shown; "" where in none."""
    shown = {fault: [name for name in moving if judged.visible[name] < fault] for fault in FAULTS}
    fault = next((size for size, names in shown.items() if 2 * len(names) >= len(moving)), FAULTS[-1])
    if not shown[fault]:
        return ""
    seen = f"a fault of {fault:.0%} would show in {len(shown[fault])} of {len(judged.visible)} tensors alone"
    hidden = [name for name in moving if name not in shown[fault]]
    if hidden:
        seen += f", not in {_some(hidden)}, whose gradients are small beside their noise"
    if judged.still:
        seen += f"; zero, and the loss stays where they move: {_some(judged.still)}"
    return seen


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' and more' * (len(names) > 5)}"
