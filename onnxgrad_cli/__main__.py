"""The `onnxgrad` command; `python -m onnxgrad_cli` is the same."""

import gc
import signal
import sys
from typing import NoReturn

from onnxgrad_cli.cli import run


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    if hasattr(signal, "sigwaitinfo"):
        from onnxgrad_cli.cli.supervision import watch_over_a_child

        watch_over_a_child(sys.argv[1:])
    gc.disable()  # a build only builds up, and ends: looking for cycles in it takes a third of the time
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside: tidy up as after Ctrl-C
    code = run(sys.argv[1:])
    gc.freeze()  # nor are they looked for at exit
    sys.exit(code)


if __name__ == "__main__":
    main()
