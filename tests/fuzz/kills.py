"""The wrong moment: signals, full disks, two at a time, closed streams: `make fuzz-kills`.

After each, every output is absent, the old one, or a whole new one; the next run leaves no trace of it; and a training
that goes on comes to the same bits as one that nothing stopped.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random

import numpy as np
import onnx
from onnx import external_data_helper

from tests.fuzz import campaign
from tests.fuzz.case import Outcome, text_of
from tests.fuzz.files import imported

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)

SECONDS = 60
"""After which a process hangs."""


@dataclass(frozen=True)
class Job:
    """A command that writes files.

    Attributes:
        words: of the command, in a folder beside `in`.
        written: what it writes.
        resumes: whether a second run goes on where the first was.
        older: the words of one that makes another result: what may lie there before.
        beside: whether weights go to a file of their own.
    """

    words: tuple[str, ...]
    written: tuple[str, ...]
    resumes: bool = False
    older: tuple[str, ...] = ()
    beside: bool = False


TRAIN = ("train", "../in/mlp.onnx", "--loss", "cross-entropy", "--label", "y", "--data", "../in/mlp.npz", "--epochs",
    "3", "--batch-size", "8",
         "--threads", "1", "--optimizer", "adam", "--run", "run", "-o", "out.onnx")  # fmt: skip

BUILD = ("build", "../in/mlp.onnx", "-o", "out.onnx")
EXPORT = ("export", "../in/checkpoint.safetensors", "--model", "../in/mlp.onnx", "-o", "out.onnx")
EARLIER = ("export", "../in/earlier.safetensors", *EXPORT[2:])
DERIVE = ("derive", "../in/mlp.onnx", "-o", "out.onnx")

JOBS = (
    Job((*BUILD, "--report", "out.md"), ("out.onnx", "out.md"), older=(*BUILD, "--l2", "0.5", "--report", "out.md")),
    Job((*BUILD, "--no-report", "--no-verify"), ("out.onnx",),
        older=(*BUILD, "--no-report", "--no-verify", "--l2", "0.5")),
    Job(("build", "../in/beside.onnx", "-o", "out.onnx", "--no-report", "--no-verify"), ("out.onnx",)),
    Job(("build", "../in/mlp.onnx", "--artifacts", "a", "--optimizer", "adam", "--no-verify"),
        ("a/training_model.onnx", "a/eval_model.onnx")),
    Job(DERIVE, ("out.onnx",), older=(*DERIVE, "--kind", "jvp")),
    Job(EXPORT, ("out.onnx",), older=EARLIER),
    Job(EXPORT, ("out.onnx",), older=EARLIER, beside=True),
    Job(("tune", "../in/linear.onnx", "-o", "out.toml", "--repeat", "1"), ()),
    Job(TRAIN, ("out.onnx",), resumes=True),
    Job((*TRAIN, "--save-every", "1", "--ema", "0.9"), ("out.onnx",), resumes=True),
    Job((*TRAIN, "--lora", "2", "--adapter", "a.safetensors", "--val", "0.25"), ("out.onnx", "a.safetensors"),
        resumes=True),
)  # fmt: skip


def play(kind: str | None, rng: Random, place: Path) -> campaign.Played:
    """Play one case, of one kind or of any."""
    shutil.rmtree(place / "in")
    shutil.copytree(_inputs(), place / "in")
    return KINDS[kind or rng.choice((*["kill"] * 4, "full", "full", "race", "race", "stream"))](rng, place)


# -- processes -----------------------------------------------------------------------------------------------------


def start(words: Sequence[str], place: Path, before: Callable[[], object] = lambda: None, beside: bool = False) -> int:
    """Begin a command in place/out, as a fork of this process or, as its first word asks, as a new one; its id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(place / "out")
        os.environ.update(TMPDIR=str(place / "tmp"), NO_COLOR="1", PYTHONPATH=os.pathsep.join(sys.path))
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(place / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before()
        if "python" in words:
            where = words.index("python")
            line = [*words[:where], sys.executable, "-m", "onnxgrad_cli", *words[where + 1 :]]
            os.execvp(line[0], line)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        if beside:
            _weights_beside()
        from onnxgrad_cli import __main__

        sys.argv = ["onnxgrad", *words]
        __main__.main()
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
    finally:
        os._exit(98)


def _weights_beside() -> None:
    """Let weights be too large for protobuf."""
    from onnxgrad_cli.files import writing

    assert hasattr(writing, "PROTOBUF_LIMIT"), "the limit is called otherwise"
    writing.PROTOBUF_LIMIT = 0


def end(child: int) -> int:
    """Wait for a process: its exit code, negative for a signal; one that hangs is killed."""
    start_ = time.monotonic()
    while time.monotonic() - start_ < SECONDS:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1000


# -- what is there, and what should be -----------------------------------------------------------------------------


@cache
def _inputs() -> Path:
    """A folder with models, data and a checkpoint."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-kills-"))
    (place / "in").mkdir()
    (place / "out").mkdir()
    (place / "tmp").mkdir()
    shutil.copyfile("sample_models/digits_mlp.onnx", place / "in" / "mlp.onnx")
    shutil.copyfile("sample_models/linear_regression.onnx", place / "in" / "linear.onnx")
    model = onnx.load(place / "in" / "mlp.onnx")
    external_data_helper.convert_model_to_external_data(model, location="beside.bin", size_threshold=0)
    onnx.save(model, place / "in" / "beside.onnx")
    with np.load("sample_models/digits.npz") as digits:
        np.savez(place / "in" / "mlp.npz", x=digits["train_x"][:64], y=digits["train_y"][:64])
    for name, epochs in (("earlier", "1"), ("checkpoint", "3")):
        code = end(start([*TRAIN, "--epochs", epochs, "--run", f"run{epochs}"], place))
        assert code == 0, (place / "stderr.txt").read_text()
        shutil.copyfile(place / "out" / f"run{epochs}" / "checkpoint.safetensors", place / "in" / f"{name}.safetensors")
    return place / "in"


@cache
def undisturbed(job: Job, older: bool = False) -> tuple[Mapping[str, bytes], float]:
    """What a job writes when nothing disturbs it, by name, and how long it takes."""
    with tempfile.TemporaryDirectory(prefix="fuzz-kills-") as top:
        place = _place(Path(top))
        begin = time.monotonic()
        code = end(start(_words(job, older), place, beside=job.beside))
        assert code == 0, (job.words, (place / "stderr.txt").read_text())
        return _files(place / "out"), time.monotonic() - begin


def _place(top: Path) -> Path:
    place = top / "a" / "b" / "case"
    for folder in ("out", "tmp"):
        (place / folder).mkdir(parents=True)
    shutil.copytree(_inputs(), place / "in")
    return place


def _words(job: Job, older: bool = False) -> list[str]:
    return list(job.older if older and job.older else job.words)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _model(out: Path, name: str) -> bytes | None:
    """A model with its weights, whole in one; b"" if it can't be had, None if it is not there."""
    if not (out / name).exists():
        return None
    try:
        model = onnx.load(out / name)
    except Exception:
        return b""
    del model.metadata_props[:]
    return model.SerializeToString(deterministic=True)


def _pure(files: Mapping[str, bytes], name: str) -> bytes | None:
    """As `_model`, of files in memory."""
    with tempfile.TemporaryDirectory() as folder:
        for each, content in files.items():
            (Path(folder) / each).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / each).write_bytes(content)
        return _model(Path(folder), name)


def faults_of(place: Path, job: Job, older: bool, *, finished: bool, how: str) -> list[str]:
    """What is wrong with what lies in a folder.

    Args:
        older: whether there was an older result.
        finished: whether the job says that it is done: then nothing but the new result is right.
        how: what was done to it.
    """
    new, old = undisturbed(job)[0], undisturbed(job, True)[0] if older else {}
    faults = []
    for name in job.written:
        if not name.endswith(".onnx"):
            there = place / "out" / name
            if finished and not there.exists():
                faults.append(f"{how}: {job.words[0]}: done, and *{Path(name).suffix} is not there")
            elif there.exists() and not there.stat().st_size:
                faults.append(f"{how}: {job.words[0]}: *{Path(name).suffix} is empty")
            continue
        found = _model(place / "out", name)
        wanted = [_pure(new, name)] + ([] if finished else [_pure(old, name) if older else None])
        if found not in wanted:
            what = "not there" if found is None else "neither the old nor the new one" if found else "broken"
            faults.append(f"{how}: {job.words[0]}{' with weights beside' * job.beside}: {name} is {what}")
    return faults


def _left(place: Path, job: Job, how: str) -> list[str]:
    """What lies there and should not, after all is done."""
    new = undisturbed(job)[0]
    found = [name for name in (*_files(place / "out"), *(f"tmp/{n}" for n in _files(place / "tmp"))) if name not in new]
    found = [
        name for name in found if not re.fullmatch(r".*\.(data|bin)|tmp/\.ses", name)
    ]  # an older one's; onnxruntime's
    return [f"{how}: {job.words[0]}: left behind: {re.sub('[0-9]+', 'N', name)}" for name in found]


def _told(place: Path, code: int, how: str, job: str, expected: set[int]) -> list[str]:
    """What is wrong with how it ended, and with what it said."""
    said = "".join(
        (place / f"{name}.txt").read_text("utf-8", "replace")
        for name in ("stdout", "stderr")
        if (place / f"{name}.txt").exists()
    )
    faults = []
    if code not in expected:
        faults.append(f"{how}: {job}: exit {code}")
    if re.search("Traceback|internal:|bug in onnxgrad|Exception ignored", said):
        last = [line for line in said.splitlines() if re.match(r"\w*(Error|Interrupt)|error: internal", line)]
        faults.append(f"{how}: {job}: internal: {(last or [said[-80:]])[-1][:100]}")
    return faults


def _kind(code: int) -> str:
    return f"exit {code}" if code >= 0 else "hang" if code == -1000 else signal.Signals(-code).name


# -- disturbances --------------------------------------------------------------------------------------------------


def killed(rng: Random, place: Path) -> campaign.Played:
    """A signal at some moment, then the same command once more."""
    job, number = rng.choice(JOBS), rng.choice(SIGNALS)
    older = bool(job.older) and rng.random() < 0.5
    if older:
        assert end(start(_words(job, True), place, beside=job.beside)) == 0
    as_new = rng.random() < 0.25 and not job.beside
    lasts = undisturbed(job)[1] + 1.5 * as_new
    moment = rng.random() * lasts * 1.1
    child = start(["python", *job.words] if as_new else job.words, place, beside=job.beside)
    time.sleep(moment)
    os.kill(child, number)
    code = end(child)
    how = signal.Signals(number).name
    expected = {0, -signal.SIGKILL} if number == signal.SIGKILL else {0, 130}
    if number == signal.SIGHUP and not job.resumes:
        expected |= {-number}  # only a training has steps to lose
    if as_new or moment < 0.1:  # it may come before the command is there to hear it
        expected |= {98 if number == signal.SIGINT and not as_new else -number}
    ready = "Fatal Python error: init" not in text_of(place / "stderr.txt")
    faults = _told(place, code, how, job.words[0], expected) if ready else []  # else Python itself was not
    faults += faults_of(place, job, older, finished=code == 0 and not job.resumes, how=how)
    story = f"{how} after {moment:.3f} s of {lasts:.3f} s, older: {older}, new process: {as_new}, {job}"
    return _again(Outcome(_kind(code), faults), place, job, story, how)


def _again(outcome: Outcome, place: Path, job: Job, story: str, how: str) -> campaign.Played:
    """Run the job once more, or let it go on: all must be as if nothing had been."""
    said = [
        (place / name).read_text("utf-8", "replace") for name in ("stdout.txt", "stderr.txt") if (place / name).exists()
    ]
    for name in ("stdout.txt", "stderr.txt"):
        (place / name).unlink(missing_ok=True)
    code = end(start([*job.words, *["--resume", "auto"] * job.resumes], place, beside=job.beside))
    how = f"after {how}, {'resumed' if job.resumes else 'run again'}"
    outcome.faults += _told(place, code, how, job.words[0], {0})
    if code == 0:
        outcome.faults += faults_of(place, job, False, finished=True, how=how) + _left(place, job, how)
    outcome.told = (
        "\n".join(said)[-2000:] + "\n--- again ---\n" + (place / "stderr.txt").read_text("utf-8", "replace")[-2000:]
    )
    return campaign.Played(outcome, story)


def full(rng: Random, place: Path) -> campaign.Played:
    """No space is left, then there is."""
    job = rng.choice(JOBS)
    older = bool(job.older) and rng.random() < 0.5
    if older:
        assert end(start(_words(job, True), place, beside=job.beside)) == 0
    largest = max(len(content) for content in undisturbed(job)[0].values())
    size = rng.choice((0, 1, 100, rng.randrange(largest), rng.randrange(largest), largest - 1))

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        sys.dont_write_bytecode = True  # else Python keeps a module that was cut off, for all who follow
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for number, name in ((1, "stdout"), (2, "stderr")):  # pipes know no limit
            reader, writer = os.pipe()
            if os.fork() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                os.close(writer)
                with open(place / f"{name}.txt", "ab", buffering=0) as file:
                    while piece := os.read(reader, 65536):
                        file.write(piece)
                os._exit(0)
            os.close(reader)
            os.dup2(writer, number)
            os.close(writer)

    code = end(start(job.words, place, limit, beside=job.beside))
    time.sleep(0.1)
    faults = _told(place, code, "full disk", job.words[0], {0, 1})
    faults += faults_of(place, job, older, finished=code == 0, how="full disk")
    faults += [
        f"full disk: {job.words[0]}: left behind: {name}" for name in _files(place / "out") if name.endswith(".tmp")
    ]
    story = (
        f"no file may have more than {size} bytes, older result: {older}, beside: {job.beside}: {' '.join(job.words)}"
    )
    return _again(Outcome(_kind(code), faults), place, job, story, "full disk")


@cache
def _alone() -> tuple[str, ...]:
    """How a command line begins of which the process has the id that it would have in a container; () if it can't."""
    words = ("unshare", "--pid", "--fork", "--kill-child")
    able = shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    return (*words, "python") if able else ()


def at_once(rng: Random, place: Path) -> campaign.Played:
    """Two processes of one id, as in two containers, with one output or one run folder."""
    job = rng.choice([job for job in JOBS if job.older or job.resumes])

    delay = rng.random() * 0.3
    alone = [] if job.beside else [*_alone()]
    first = start([*alone, *job.words], place, beside=job.beside)
    time.sleep(delay * rng.choice((0, 1)))
    second = start([*alone, *_words(job, True)], place, beside=job.beside)
    codes = sorted((end(first), end(second)))
    how = "two at once"
    expected = {0, 1, 2} if job.resumes else {0, 1}
    faults = [fault for code in codes for fault in _told(place, code, how, job.words[0], expected)]
    if 0 not in codes:
        faults.append(f"{how}: {job.words[0]}: neither is done")
    if text_of(place / "stderr.txt").count("error: ") < sum(code != 0 for code in codes):
        faults.append(f"{how}: {job.words[0]}: one is not done, and does not say so")
    whole = [
        _pure(undisturbed(job, older)[0], name)
        for older in {False, bool(job.older)}
        for name in job.written
        if name == "out.onnx"
    ]
    found = _model(place / "out", "out.onnx")
    if whole and found not in whole:
        what = "not there" if found is None else "a mixture" if found else "broken"
        faults.append(f"{how}: {job.words[0]}{' with weights beside' * job.beside}: out.onnx is {what}, exits {codes}")
    faults += [
        f"{how}: {job.words[0]}: left behind: {re.sub('[0-9]+', 'N', name)}"
        for name in _files(place / "out")
        if name.endswith(".tmp")
    ]
    outcome = Outcome(
        f"exits {codes}", sorted(set(faults)), (place / "stderr.txt").read_text("utf-8", "replace")[-3000:]
    )
    return campaign.Played(
        outcome,
        f"{delay:.3f} s apart, ids equal, beside: {job.beside}: {' '.join(job.words)} and {' '.join(job.older)}",
    )


def streams(rng: Random, place: Path) -> campaign.Played:
    """Streams that are closed, full, or whose reader has gone."""
    words = rng.choice(
        (["build", "../in/mlp.onnx", "-o", "-"], ["build", "../in/mlp.onnx", "-o", "out.onnx", "--json"],
            ["inspect", "../in/mlp.onnx"], ["list", "operators"],
         ["view", "../in/mlp.onnx"], ["list", "losses", "--json"], ["--help"], ["build", "-", "-o", "out.onnx"],
         ["--version"],
         ["build", "../in/nothing.onnx"], list(TRAIN), ["check", "-"])
    )  # fmt: skip
    which, how = rng.choice(
        ((1, "closed"), (1, "full"), (1, "gone"), (2, "closed"), (2, "full"), (0, "closed"), (1, "all closed"))
    )

    def set_() -> None:
        if how == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), which)
        elif how == "gone":
            reader, writer = os.pipe()
            os.dup2(writer, which)
            os.close(reader)
            os.close(writer)
        else:
            for number in (0, 1, 2) if how == "all closed" else (which,):
                os.close(number)

    if which != 0:
        stdin = (
            (lambda: os.dup2(os.open(place / "in" / "mlp.onnx", os.O_RDONLY), 0)) if rng.random() < 0.8 else (lambda: 0)
        )
    else:
        stdin = lambda: 0  # noqa: E731
    code = end(start(["python", *words], place, lambda: (stdin(), set_())))
    name = f"{('stdin', 'stdout', 'stderr')[which]} {how}"
    faults = _told(place, code, name, words[0], {0, 1, 2, 4})
    if code == 0 and how == "full" and which == 1 and "-o" not in words:
        faults.append(f"{name}: {words[0]}: exit 0, though nothing was written")
    for out in ("out.onnx",):
        found = _model(place / "out", out)
        if found == b"":
            faults.append(f"{name}: {words[0]}: {out} is broken")
    faults += [
        f"{name}: {words[0]}: left behind: {re.sub('[0-9]+', 'N', left)}"
        for left in _files(place / "out")
        if left.endswith(".tmp")
    ]
    told = "".join(
        (place / f"{each}.txt").read_text("utf-8", "replace")[-1500:]
        for each in ("stdout", "stderr")
        if (place / f"{each}.txt").exists()
    )
    return campaign.Played(Outcome(_kind(code), faults, told), f"{name}: {' '.join(words)}")


KINDS = {"kill": killed, "full": full, "race": at_once, "stream": streams}


def main() -> int:
    """Play as many cases as asked for."""
    parser = campaign.arguments(__doc__, 200)
    parser.add_argument("--of", choices=KINDS, help="of this kind alone")
    asked = parser.parse_args()
    imported()
    try:
        return campaign.main("kills", partial(play, asked.of), asked)
    finally:
        shutil.rmtree(_inputs().parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
