"""The `onnxgrad` command; `python -m onnxgrad_cli` is the same.

Signals are answered before anything else is imported.
"""

import gc
import signal
import sys
from types import FrameType
from typing import NoReturn

LATER = 0.02
"""Seconds until an interrupt that came during an import comes again."""

ENDING = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
"""The signals that end a command, which tidies up; those that the shell lets it ignore stay ignored."""


def interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not within an import: modules that are there by half answer with tracebacks."""
    while frame is not None and hasattr(signal, "setitimer"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, lambda _, frame: signal.raise_signal(number))
            signal.setitimer(signal.ITIMER_REAL, LATER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def answer(handler: object) -> None:
    """Let a handler answer the signals that end a command."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def tell_death(message: str, hint: str, stack: str) -> None:
    """Tell, as other errors are told, what a command died of.

    If one of several processes under torchrun was killed, the others report it.
    """
    from onnxgrad_cli.cli.console import Console
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
    console.error(message, hint)
    console.finish(1)
    sys.stdout.flush()


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    gc.disable()  # a build only builds up, and ends: looking for cycles in it takes a third of the time
    code = 130
    try:
        from onnxgrad_cli.common.streams import prepare

        prepare()
        if hasattr(signal, "sigwaitinfo"):
            from onnxgrad_cli.common.launchers import rank_here
            from onnxgrad_cli.common.supervision import watch_over_a_child

            watch_over_a_child(tell_death, apart=bool(rank_here()[0]))
        from onnxgrad_cli.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the command
        print("error: interrupted", file=sys.stderr)
    answer(signal.SIG_DFL)  # nothing is left to be tidied up
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)  # an interrupt that is to come again comes too late
    gc.freeze()  # nor are cycles looked for at exit
    sys.exit(code)


answer(interrupted)

if __name__ == "__main__":
    main()
