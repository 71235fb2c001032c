"""The `onnxgrad` command, which `python -m onnxgrad_cli` runs too.

The signal handlers are installed before other modules are imported, so that an interrupt during an import ends the
command without a traceback.
"""

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn

LATER = 0.02
"""Delay, in seconds, of an interrupt that arrives during an import."""

ENDING = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
"""The signals that end a command after it has removed its temporary files."""


def interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not during an import, because partly imported modules would cause tracebacks.

    During an import, the signal is sent again after `LATER` seconds.
    """
    while frame is not None and hasattr(signal, "setitimer"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, lambda _, frame: signal.raise_signal(number))
            signal.setitimer(signal.ITIMER_REAL, LATER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def answer(handler: object) -> None:
    """Install a handler for the signals in `ENDING`, except those that the parent process has set to be ignored."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def tell_death(message: str, hint: str, stack: str) -> None:
    """Print that the process of the command crashed, in the format of other errors.

    If torchrun started the process and it was killed, print nothing, because the other processes report this.

    Args:
        message: the cause of the crash.
        hint: a fix.
        stack: the Python stack at the crash, which is printed only if the user requested tracebacks.
    """
    from onnxgrad_cli.cli.terminal.console import Console
    from onnxgrad_cli.cli.terminal.document import Problem
    from onnxgrad_cli.common.launchers import rank_here
    from onnxgrad_cli.common.supervision import KILLED

    launcher, rank = rank_here() if "train" in sys.argv[1:2] else ("", "")
    if launcher == "torchrun" and message == KILLED:
        return
    if launcher:
        message = f"rank {rank}: {message}"
    console = Console(sys.argv[1:])
    if console.traceback:
        console.trace(stack)
    console.error(Problem("failed", message, hint=hint))
    console.finish(1)
    sys.stdout.flush()


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    gc.disable()  # a build frees few objects before its end, and searching for cycles would take a third of the time
    code = 130
    try:
        from onnxgrad_cli.common.stdio import prepare

        prepare()
        if hasattr(signal, "sigwaitinfo"):
            from onnxgrad_cli.common.launchers import rank_here
            from onnxgrad_cli.common.supervision import run_in_subprocess

            run_in_subprocess(tell_death, apart=bool(rank_here()[0]))
        from onnxgrad_cli.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # raised before or after `run`, which handles interrupts itself
        from onnxgrad_cli.common.launchers import is_first_here

        if "train" not in sys.argv[1:2] or is_first_here():  # if one process fails, its launcher interrupts the others
            print("error: interrupted", file=sys.stderr)
    answer(signal.SIG_DFL)  # no temporary files are left
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)  # cancel a delayed interrupt
    gc.freeze()  # skip the search for cycles at exit
    sys.exit(code)


answer(interrupted)

if __name__ == "__main__":
    main()
