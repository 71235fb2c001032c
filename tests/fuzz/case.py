"""One run of the command in a process of its own, with little time and memory, and what is wrong with how it ended.

The process is a fork of one that has imported everything and run nothing: a case costs what it computes, and what kills
it kills no other.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 10
"""Of the processor, for a case: six of them may go to runs that nobody has asked for (`execution.limits`)."""

WALL_SECONDS = 300
"""For one that waits for ever; the machine may have other work."""

BYTES = 6 * 2**30
"""Of addresses, for a case."""

EXIT_CODES = {0, 1, 2, 3, 4, 5}

TEXTS = {".md", ".html", ".json", ".txt", ".dot", ".svg", ".toml"}

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys, or what hides or turns around what is read."""

CONTROL_IN_JSON = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")

NOISE = re.compile(r"\[[WEF]:onnxruntime|Warning: |^/usr|terminate called|Assertion", re.MULTILINE)
"""What a library said, past the command."""


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        kind: in a word, for the counts.
        faults: what is wrong with it, each a line: equal causes are equal lines.
        told: the end of what it said.
        seconds: of the processor.
    """

    kind: str
    faults: list[str] = field(default_factory=list)
    told: str = ""
    seconds: float = 0.0


def run(arguments: Sequence[str], place: Path, written: Sequence[str] = ()) -> Outcome:
    """Run the command in place/out, and judge what it did.

    Args:
        arguments: of the command.
        place: a folder in which there are folders `in`, `out` and `tmp`; all that lies around is watched.
        written: the files in `out` that there are at exit code 0 and not else.
    """
    around = place.parent
    (place / "said").mkdir()
    before = _snapshot(around, place / "out", place / "said")
    there = _snapshot(place / "out")
    old = {name for name in written if (place / "out" / name).exists()}
    status, seconds = _forked(arguments, place)
    said = {name: text_of(place / "said" / name) for name in ("stdout", "stderr", "stack", "error", "opened", "code")}
    outcome = _ended(status, said)
    outcome.seconds = seconds
    told = said["stdout"] + said["stderr"]
    outcome.told = (said["stderr"] + said["stack"])[-3000:]
    judge = outcome.faults.append
    pattern = CONTROL_IN_JSON if "--json" in arguments else CONTROL
    if found := (pattern.search(said["stdout"]) or CONTROL.search(said["stderr"])):
        judge(f"raw control character on the terminal: {arguments[0]}: {_before(told, found.group())}")
    now = _snapshot(place / "out")
    for path in sorted((place / "out").rglob("*")):
        name = str(path.relative_to(place / "out"))
        if there.get(name) == now.get(name):
            continue  # it was there, and is as it was
        if path.suffix in TEXTS and path.is_file():
            pattern = CONTROL_IN_JSON if path.suffix.startswith(".json") else CONTROL
            if found := pattern.search(text := text_of(path)):
                judge(f"raw control character in *{path.suffix}: {arguments[0]}: {_before(text, found.group())}")
        if path.name.endswith(".tmp") or (path.name.startswith(".") and path.name not in ("..", ".")):
            judge(f"left behind: {re.sub('[0-9a-f]{4,}', 'N', path.name[-40:])}: {arguments[0]}")
    after = _snapshot(around, place / "out", place / "said")
    if changed := [path for path in {**before, **after} if before.get(path) != after.get(path)]:
        judge(f"changed outside: {arguments[0]}: {changed[0]}")
    if noise := NOISE.search(said["stderr"]):
        judge(f"noise: {arguments[0]}: {_around(said['stderr'], noise.group())}")
    if outcome.kind.startswith("exit"):
        code = int(said["code"])
        for name in written:
            exists = (place / "out" / name).exists()
            if (code == 0) != exists and name not in old:
                judge(f"exit {code}, and {name} is {'there' if exists else 'not there'}: {arguments[0]}")
    return outcome


def _ended(status: int, said: dict[str, str]) -> Outcome:
    """What the end of the process means."""
    stack = _ours(said["stack"])
    opening = "opening the result: " if said["code"] else ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return Outcome("hang", [f"hang: {opening}{stack}"])
        why = next((line for line in said["stderr"].splitlines() if "what()" in line or "ssert" in line), "")
        return Outcome(
            "death", [f"death: {opening}{signal.Signals(number).name}: {_plain(why)} {'' if opening else stack}"]
        )
    if not said["code"]:
        return Outcome("death", [f"death: exit {os.WEXITSTATUS(status)} {stack}"])
    code, outcome = int(said["code"]), Outcome(f"exit {said['code']}")
    internal = re.search("internal: |bug in onnxgrad|Traceback \\(most recent", said["stdout"] + said["stderr"])
    if internal or code not in EXIT_CODES:
        outcome.faults.append(f"internal: exit {code}: {said['error'] or said['stderr'][-200:]}")
    elif code and not said["stderr"].strip() and not said["stdout"].strip():
        outcome.faults.append(f"silent: exit {code}")
    if said["opened"]:
        outcome.faults += json.loads(said["opened"])
    return outcome


def _forked(arguments: Sequence[str], place: Path) -> tuple[int, float]:
    """Run the command in a child; its wait status, and how much time of the processor it took."""
    sys.stdout.flush()
    sys.stderr.flush()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _child(arguments, place)
        finally:
            os._exit(99)
    while time.monotonic() - start < WALL_SECONDS:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_utime + usage.ru_stime
        time.sleep(0.005)
    os.kill(child, signal.SIGABRT)  # faulthandler tells where it stands
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    _, _, usage = os.wait4(child, 0)
    return int(signal.SIGKILL), usage.ru_utime + usage.ru_stime


def survives(act: Callable[[], object]) -> bool:
    """Whether something comes to an end in a fork of this process, without an error."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (2, 3))
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _child(arguments: Sequence[str], place: Path) -> None:
    """Run the command, then open what it wrote; never returns."""
    said = place / "said"
    os.chdir(place / "out")
    os.environ.update(TMPDIR=str(place / "tmp"), NO_COLOR="1")
    import tempfile

    tempfile.tempdir = None
    for number, name in ((0, None), (1, "stdout"), (2, "stderr")):
        file = os.open(said / name if name else os.devnull, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    stack = (said / "stack").open("w")
    faulthandler.enable(stack)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    faulthandler.register(signal.SIGXCPU, stack, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, 2 * SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _spy(said / "error")
    from onnxgrad_cli.cli import run as command

    try:
        code = command(arguments)
        sys.stdout.flush()
    except BaseException as error:
        (said / "error").write_text(root(error))
        traceback.print_exc()
        code = 70
    (said / "code").write_text(str(code))
    taken = resource.getrusage(resource.RUSAGE_SELF)
    both = int(taken.ru_utime + taken.ru_stime) + SECONDS  # the command's own time is over: to open its results is ours
    resource.setrlimit(resource.RLIMIT_CPU, (both, 2 * SECONDS + 2))
    if code == 0:
        (said / "opened").write_text(
            json.dumps(_unopened(arguments, place, (said / "stdout").read_text("utf-8", "replace")))
        )
    os._exit(0)


PROVED = "every check passed"


def _unopened(arguments: Sequence[str], place: Path, told: str) -> list[str]:
    """The written models that onnxruntime does not open; where it opens the original, or all is proved."""
    faults = {
        path.name: why
        for path in sorted((place / "out").rglob("*.onnx"))
        if path.is_file() and path.parent.name != "passes" and (why := _refusal(path)) and _refusal(path, optimize=True)
    }
    if not faults or "--as-gradient-op" in arguments or "keep" in _values(arguments, "--yield"):
        return []  # these have an operator without a kernel, as asked
    if PROVED not in told and _refusal(place / "out" / _model_of(arguments), optimize=True):
        return []
    return [f"does not open: {arguments[0]}: {name}: {_plain(why)}" for name, why in faults.items()]


def _model_of(arguments: Sequence[str]) -> str:
    """The model that a command line is about."""
    return next(iter(_values(arguments, "--model")), arguments[1])


def _values(arguments: Sequence[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


class _Bytes(os.PathLike[bytes]):
    """A path whose name need be no text, for which onnxruntime asks as one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> bytes:
        return os.fsencode(self._path)


def _refusal(path: Path, optimize: bool = False) -> str:
    """Why onnxruntime does not open a model; "" if it does.

    Its optimizer refuses some that it opens without, and takes seconds where a transpose can move along a long chain.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(_Bytes(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).replace(str(path), path.name)
    return ""


def _spy(file: Path) -> None:
    """Let the console write down where the error that it tells was raised."""
    from onnxgrad_cli.cli.terminal.console import Console

    told = Console.error

    def error(self: Console, *arguments: Any, **words: Any) -> None:
        if raised := sys.exc_info()[1]:
            file.write_text(root(raised), "utf-8", "backslashreplace")
        told(self, *arguments, **words)

    Console.error = error  # type: ignore[method-assign]
    import click.utils

    click.utils.should_strip_ansi = lambda *_: False  # what a name brings is to be seen


def root(error: BaseException) -> str:
    """The kind of an exception and our innermost frames, which equal causes have alike."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).relative_to(_home())}:{f.name}" for f in frames if _is_ours(f.filename)][-3:]
    last = frames[-1] if frames else None
    inner = "" if last is None or _is_ours(last.filename) else f" > {Path(last.filename).name}:{last.name}"
    return f"{type(error).__name__} in {' > '.join(ours)}{inner}: {_plain(str(error))}"


def _home() -> Path:
    import onnxgrad_cli

    return Path(onnxgrad_cli.__file__).parent


def _is_ours(filename: str) -> bool:
    return "/onnxgrad_cli/" in filename


def _ours(stack: str) -> str:
    """Our innermost frames in what faulthandler wrote, and the innermost of all."""
    current = stack.split("Current thread")[-1] or stack
    frames = re.findall(r'File "([^"]*)", line \d+ in (\S+)', current)
    ours = [f"{name.split('/onnxgrad_cli/')[1]}:{function}" for name, function in frames if _is_ours(name)][:3]
    inner = "" if not frames or _is_ours(frames[0][0]) else f" > {Path(frames[0][0]).name}:{frames[0][1]}"
    return " > ".join(reversed(ours)) + inner


def _plain(text: str) -> str:
    """A message without what differs from case to case."""
    text = re.sub(r"/tmp/fuzz-\w*", "", text[:1000])
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    text = re.sub(r"0x[0-9a-f]+|\d+", "N", text)
    return "".join(c if c.isprintable() else " " for c in text)[:160]


def _before(text: str, found: str) -> str:
    """The words before the first place in a text in which something stands."""
    line = next((line for line in text.split("\n") if found in line), "")
    return " ".join(re.findall(r"[A-Za-z]+", _plain(line[: line.find(found)]))[:6])


def _around(text: str, found: str) -> str:
    """The line of a text in which something stands, without what differs from case to case."""
    line = next((line for line in text.split("\n") if found in line), "")
    where = line.find(found)
    return _plain(line[max(0, where - 60) : where + 60])


def text_of(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _snapshot(folder: Path, *aside: Path) -> dict[str, object]:
    """Every file and folder in a folder, and how it was last changed."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if not any(path == each or each in path.parents for each in aside):
            stat = path.lstat()
            found[str(path.relative_to(folder))] = (
                stat.st_size,
                stat.st_mtime_ns if not path.is_dir() else 0,
                stat.st_mode,
            )
    return found
