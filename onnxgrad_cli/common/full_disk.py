"""What the operating system says where nothing more can be written, in the user's terms."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk is full, a quota used up, a file as long as it may be."""

UNWRITABLE = (*FULL, errno.EROFS)
"""What is nobody's fault, wherever it comes from."""


def said(error: OSError) -> str:
    """Why a file can't be written."""
    return "no space is left" if error.errno in FULL else str(error.strerror)
