"""The errors that a user can see. Each states the problem, its place and a fix.

The command line turns each kind of error into its documented exit code and prints it without a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

Code = Literal[
    "failed", "usage", "refused", "check_failed", "internal", "interrupted", "no_memory", "not_finite",
    "missing_file", "unreadable_file", "unwritable_file", "file_exists", "missing_package",
    "unknown_name", "missing_value", "wrong_value", "wrong_type", "wrong_shape", "no_data",
    "ambiguous", "conflict", "mismatch",
]  # fmt: skip
"""The codes for kinds of failures, which programs can read: one per exit code, then codes for files, for values that
don't fit (`no_data`: nothing is left to work on), and for values that don't fit together: a name fits several things
(`ambiguous`), options exclude each other (`conflict`), or files don't belong together (`mismatch`)."""

CODES: tuple[Code, ...] = get_args(Code)

ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")
"""A regular expression for an argument in a message: `argument` or `argument=value`, in backquotes."""

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""


class OnnxgradError(Exception):
    """Base class of the errors that a user can see. The command line replaces arguments in the texts by flags.

    Attributes:
        code: the kind of failure, one of `CODES`.
        message: the problem and where it is. Arguments are in backquotes, as Python code, such as `mode='Train'`; see
            `common.flags`.
        argument: the name of the first argument in the message; None if there is none.
        hint: a fix; None if no fix is known.
        details: one line per problem, if there are several.
    """

    exit_code = 1
    code: Code = "failed"

    def __init__(
        self, message: str, hint: str | None = None, details: Iterable[str] = (), *, code: Code | None = None
    ) -> None:
        self.message = message
        self.hint = hint
        self.details = tuple(details)
        named = ARGUMENT.search(message)
        self.argument = named[1] if named else None
        self.code = code or self.code
        super().__init__("\n".join([message, *(f"  {detail}" for detail in self.details)]))
        if hint:
            self.add_note(f"hint: {hint}")

    def put_place(self, place: str) -> None:
        """Put the place of the problem, such as a line of a file, in front of the message."""
        self.message = f"{place}: {self.message}"
        self.args = ("\n".join([self.message, *(f"  {detail}" for detail in self.details)]),)


class UsageError(OnnxgradError):
    """The user's request is wrong, such as an option, a name or a pattern."""

    exit_code = 2
    code = "usage"


unreadable = partial(OnnxgradError, code="unreadable_file")
"""The error for a file that can't be read."""

unwritable = partial(OnnxgradError, code="unwritable_file")
"""The error for a file that can't be written."""

missing_file = partial(OnnxgradError, code="missing_file")
"""The error for a file that doesn't exist."""

unknown_name = partial(UsageError, code="unknown_name")
"""The error for a name that doesn't exist."""

missing_value = partial(UsageError, code="missing_value")
"""The error for a value, option or input that is required and not given."""

wrong_value = partial(UsageError, code="wrong_value")
"""The error for an argument whose value doesn't fit."""

wrong_type = partial(UsageError, code="wrong_type")
"""The error for a value of the wrong type or kind."""

wrong_shape = partial(UsageError, code="wrong_shape")
"""The error for a value of the wrong shape, rank or size."""

no_data = partial(UsageError, code="no_data")
"""The error for a selection or a file that contains nothing to work on."""

ambiguous = partial(UsageError, code="ambiguous")
"""The error for a request that fits several things."""

conflict = partial(UsageError, code="conflict")
"""The error for options that exclude each other or don't apply."""

mismatch = partial(UsageError, code="mismatch")
"""The error for files that don't belong together, such as a model and another model's checkpoint."""


class InternalError(OnnxgradError):
    """A state that should be impossible, caused by a bug in onnxgrad or by an invalid model that other tools reject."""

    code = "internal"


ZERO_DIVISOR = "an attribute or a size that is 0"
"""The divisor named in messages about a ZeroDivisionError in a gradient rule or definition.

The 0 always comes from the model.
"""


@dataclass(frozen=True)
class Refusal:
    """A node that can't be differentiated, with the reason. `hint` is a fix, if one is known."""

    node: str
    op_type: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.node} ({self.op_type}): {self.reason}"


@dataclass(frozen=True)
class Caution:
    """A note about the result that a careful user should read.

    Attributes:
        kind: the kind of note, such as 'training mode', 'zero gradient', 'opset change' or 'note'. The report defines
            further kinds.
        subject: the weight, node or input that the note is about; "" for the whole model.
        text: the note, as one sentence.
    """

    kind: str
    subject: str
    text: str

    def __str__(self) -> str:
        return self.text


class UnsupportedError(OnnxgradError):
    """The model can't be differentiated. `refusals` lists all nodes that prevent it."""

    exit_code = 3
    code = "refused"

    def __init__(
        self, message: str, refusals: Iterable[Refusal] = (), hint: str | None = None, details: Iterable[str] = ()
    ) -> None:
        self.refusals = tuple(refusals)
        super().__init__(message, hint, (*details, *map(str, self.refusals)))


class Unknown(Exception):
    """A gradient rule needs a fact, such as a size, that is unknown at build time.

    Differentiation then refuses the node.

    Attributes:
        hint: a fix. If it is "", the refusal suggests to declare the shapes of the inputs.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class CheckFailed(OnnxgradError):
    """A result was built, but a check of it failed."""

    exit_code = 4
    code = "check_failed"


def suggest(name: str, known: Iterable[str], kind: str, show: Callable[[str], str] = str) -> str:
    """Return a hint for a misspelt name.

    Args:
        name: the misspelt name.
        known: the valid names.
        kind: a plural noun for the valid names, such as 'float weights'.
        show: a function that formats a name for the hint.

    Returns:
        The similar names, or the first few valid names if none is similar.
    """
    import difflib  # imported here, as few commands need it

    known = list(known)
    folded = {each.lower(): each for each in reversed(known)}
    near = [folded[each] for each in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
    near = near[:1] if near and near[0].lower() == name.lower() else near
    if near:
        return f"did you mean {' or '.join(map(show, near))}?"
    if not known:
        return f"the model has no {kind}"
    shown = ", ".join(map(show, known[:8])) + (f", ... ({len(known)} in all)" if len(known) > 8 else "")
    return f"{kind}: {shown}"
