"""List and count the functions of onnxgrad_cli that a command calls: `python -m tools.trace build MODEL ...`.

The functions of each file are printed in the order of their first call. Module bodies, class bodies, lambdas and
comprehensions are left out.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).parents[1] / "onnxgrad_cli"


class Trace:
    """Records the functions of the package that are called while the trace is on.

    Attributes:
        entered: file relative to the package -> the functions, in the order of their first call.
    """

    def __init__(self) -> None:
        self.entered: dict[str, list[str]] = defaultdict(list)
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call; see `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        path = Path(code.co_filename)
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if is_function and path.is_relative_to(PACKAGE):
            self.entered[path.relative_to(PACKAGE).as_posix()].append(code.co_qualname.replace(".<locals>", ""))

    def table(self) -> str:
        """Return a table of functions and files by package, the largest package first."""
        packages = defaultdict[str, list[str]](list)
        for file in self.entered:
            packages[file.split("/")[0]].append(file)
        rows = sorted(((sum(len(self.entered[f]) for f in fs), len(fs), name) for name, fs in packages.items()))[::-1]
        total = (sum(row[0] for row in rows), len(self.entered), "in all")
        return "\n".join(
            f"{functions:5} functions {files:4} files  {name}" for functions, files, name in [*rows, total]
        )


def main(arguments: list[str]) -> int:
    """Run a command and print the functions that it entered."""
    trace = Trace()
    sys.argv[1:] = arguments
    from onnxgrad_cli.__main__ import main as run

    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        run()
    except SystemExit as end:
        code = end.code
    sys.setprofile(None)
    for file in sorted(trace.entered):
        print(f"{file}: {', '.join(trace.entered[file])}")
    print(trace.table())
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
