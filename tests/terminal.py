"""Run a command on a pseudo-terminal, and read the text that remains on the screen."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from dataclasses import dataclass

from tests.cli_harness import PROGRAM

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9\d|10\d)[0-9;]*m")


@dataclass(frozen=True)
class Recording:
    """The text that a command sent to its terminal, and its exit code."""

    sent: str
    code: int

    @property
    def lines(self) -> list[str]:
        """All lines that were shown at any time, in order, including lines that a progress bar has overwritten."""
        return re.split(r"[\r\n]+", CONTROL.sub("", self.sent))

    @property
    def colored(self) -> bool:
        return COLOR.search(self.sent) is not None

    def stays(self) -> list[str]:
        """Return the lines on the screen at the end, without lines that were overwritten or erased."""
        rows, row, column = [""], 0, 0
        for part in re.findall(rf"{CONTROL.pattern}|\r|\n|[^\r\n\x1b]+", self.sent):
            if part == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif part == "\r":
                column = 0
            elif part.startswith("\x1b[") and part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part == "\x1b[2K":
                rows[row] = ""
            elif not part.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                column += len(part)
        return [each.rstrip() for each in rows]


def record(*words: object, width: int = 80, **environment: str) -> Recording:
    """Run `onnxgrad` on a terminal with `width` columns. All three standard streams are that terminal."""
    import fcntl
    import pty  # only exists on Unix
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [*PROGRAM, *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**variables, "TERM": "xterm-256color", **environment},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # the other side is closed
            pass
        os.close(ours)
    return Recording(shown.decode(), process.returncode)
