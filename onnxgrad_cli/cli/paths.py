"""Paths as they are typed."""

from __future__ import annotations

import os
from typing import Any

import click


class FilePath(click.Path):
    """The path of a file or a folder.

    An empty one is none: a shell makes it of a variable that is not set, and Python the working directory of it.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if not os.fspath(value):
            self.fail("a path is wanted, and this is empty; '.' is the working directory", param, ctx)
        return super().convert(value, param, ctx)


TEXT = FilePath(readable=False)
"""A path that stays a text, such as one that may be '-'; what is wrong with the file the library says."""
