"""Every error a user can meet, as one family: what happened, where, and what to do about it.

The command line turns each kind into its documented exit code and prints it without a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


class OnnxgradError(Exception):
    """Something failed. `message` says what and where, `hint` what to do about it; a traceback shows both.

    What there is to say of several things stands in `details`, a line each: whoever prints an error can tell the line
    breaks of the message from those that a name holds. Arguments are named as Python does, in backquotes, such as
    `mode='Train'`; see `common.wording`.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, details: Iterable[str] = ()) -> None:
        self.message = message
        self.hint = hint
        self.details = tuple(details)
        super().__init__("\n".join([message, *(f"  {detail}" for detail in self.details)]))
        if hint:
            self.add_note(f"hint: {hint}")


class UsageError(OnnxgradError):
    """The request itself does not fit: an option, a name, a pattern."""

    exit_code = 2


class InternalError(OnnxgradError):
    """Something is made that can't be: a fault of onnxgrad, or of a model that others refuse too."""


NAUGHT = "an attribute or a size that is 0"
"""What only a model can bring rules and definitions to divide by, whatever else they check."""


@dataclass(frozen=True)
class Refusal:
    """Why one node can't be differentiated: `reason`, and what to do about it as `hint`."""

    node: str
    op_type: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.node} ({self.op_type}): {self.reason}"


@dataclass(frozen=True)
class Caution:
    """What a careful reader should know of a result.

    `kind` is one of 'training mode', 'zero gradient', 'opset change' and 'note' (the report knows more), `subject`
    the weight, node or input it is about ("" for the whole), `text` a sentence.
    """

    kind: str
    subject: str
    text: str

    def __str__(self) -> str:
        return self.text


class UnsupportedError(OnnxgradError):
    """The model can't be differentiated. `refusals` lists every node that stands in the way, at once."""

    exit_code = 3

    def __init__(
        self, message: str, refusals: Iterable[Refusal] = (), hint: str | None = None, details: Iterable[str] = ()
    ) -> None:
        self.refusals = tuple(refusals)
        super().__init__(message, hint, (*details, *map(str, self.refusals)))


class Unknown(Exception):
    """A rule needs something that is unknown at build time; the walk turns it into a refusal of the node.

    Attributes:
        hint: what to do about it; "" if shapes of the inputs may tell it.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class CheckFailed(OnnxgradError):
    """The result was built, and a check of it failed."""

    exit_code = 4


def suggest(name: str, known: Iterable[str], kind: str, show: Callable[[str], str] = str) -> str:
    """A hint for a misspelt `name`: the nearest of `known`, or else the first few of them, each as `show` writes it."""
    import difflib  # which few commands need

    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(show, near))}?"
    if not known:
        return f"the model has no {kind}"
    shown = ", ".join(map(show, known[:8])) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")
    return f"{kind}: {shown}"
