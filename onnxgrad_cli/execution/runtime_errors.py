"""The messages of onnxruntime's errors."""

from __future__ import annotations

import re

MAX_LENGTH = 500
"""Characters of a message that are quoted."""

NODE = re.compile(r"Non-zero status code returned while running (\S+) node\. Name:\s*'([^']*)' Status Message: ?(.*)")
PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")

MISSING_KERNEL = re.compile(
    r"NOT_IMPLEMENTED|implementation for|"
    r"\b(?:not|n't)(?: yet| be)* (?:support|implement)\w*\b[^.]*\b(?:double|\w*float\w*|u?int\d+|\w*type)",
    re.IGNORECASE,
)


def in_short(error: Exception) -> str:
    """Return the reason of an error in one line. An error of a node begins with the node."""
    text = PREFIX.sub("", " ".join(str(error).split()))
    found = NODE.search(text)
    return (f"{found[1]} '{found[2]}': {found[3].strip()}" if found else text)[:MAX_LENGTH]


def lacks_kernel(error: Exception) -> bool:
    """Return True if an error says that onnxruntime has no kernel for an operator on the types of its inputs."""
    return MISSING_KERNEL.search(str(error)) is not None
