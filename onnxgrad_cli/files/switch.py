"""Files that belong together take their names together, once each of them is whole, or none does.

Each is written under a temporary name in its own folder, by the one process that claims it. What may be large, the data
file of a model, has its content in its name: it is never replaced under a model that refers to it, and so the model,
which is renamed last, switches both at once.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from onnxgrad_cli.common.full_disk import FULL, said
from onnxgrad_cli.common.inputs import check_is_no_input
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.locking import hold, opened

DIGITS = 12
"""Of the SHA-256 of a data file's content, in its name."""

Write = Callable[[BinaryIO], object]
"""What writes the content of a file that is open."""


ANOTHER = "choose another place"
"""What to do where a file can't be written; which option names it depends on the file."""


@contextmanager
def told(out: Path) -> Iterator[None]:
    """Say an operating system's error in the user's terms."""
    try:
        yield
    except OSError as error:
        hint = f"free some space, or {ANOTHER}" if error.errno in FULL else ANOTHER
        raise OnnxgradError(f"'{out}' can't be written: {said(error)}", hint) from error


# -- names of our own -----------------------------------------------------------------------------------------------


def _hidden(out: Path, word: str) -> Path:
    """A name beside `out` that says whose it is; a long one is cut, so that a folder takes it."""
    stem, name = out.name, os.fsencode(out.name)
    if len(name) > 200:
        stem = f"{name[:180].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:DIGITS]}"
    return out.with_name(f".{stem}{word}")


def _temporary(out: Path) -> Path:
    return _hidden(out, f".{secrets.token_hex(8)}.onnxgrad.tmp")


_LOCK = ".onnxgrad.lock"
_OURS = re.compile(r"\.(.+?)(\.[0-9a-f]{16}\.onnxgrad\.tmp|\.onnxgrad\.lock)", re.DOTALL)


def _unfinished(folder: Path) -> list[tuple[Path, str]]:
    """The temporary files and locks in a folder, each with what the name of its output begins with."""
    with suppress(OSError):  # who may write in a folder need not be one who may read it
        return [(folder / name, match[1]) for name in os.listdir(folder) if (match := _OURS.fullmatch(name))]
    return []


def tidy(folder: Path) -> None:
    """Remove what processes that were killed have left in a folder: temporary files of outputs that nobody claims."""
    for stem in {stem for _, stem in _unfinished(folder)}:
        with suppress(OSError), claim(folder / stem):
            pass


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Be the only process that writes a file, and remove what one that was killed has left of it.

    Raises:
        BlockingIOError: another process writes it at this moment.
        OSError: no file can be made beside it.
    """
    with ExitStack() as held:
        if _locked(_hidden(out, _LOCK), held):
            for file, stem in _unfinished(out.parent):
                if f".{stem}" == _hidden(out, "").name and file.suffix == ".tmp":
                    file.unlink(missing_ok=True)
        yield


def _locked(path: Path, held: ExitStack) -> bool:
    """Lock a file until `held` ends; False where the file system has no locks.

    Then too what is written is whole: it is the last one's.
    """
    while True:
        lock = opened(path)
        try:
            alone = hold(lock)
        except OSError:
            held.callback(_let_go, path, lock)
            return False
        if not alone:
            lock.close()
            raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing it")
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                held.callback(_let_go, path, lock)
                return True
        lock.close()  # its last holder has removed it since it was opened


def _let_go(path: Path, lock: IO[str]) -> None:
    """Remove a lock while it is held, so that nobody else's is removed; Windows removes no file that is open."""
    if os.name == "nt":
        lock.close()
    with suppress(OSError):
        path.unlink()
    lock.close()


# -- files that take their names together ---------------------------------------------------------------------------


def check_apart(files: Iterable[Path]) -> None:
    """Make sure that files which are to be written are different ones; a link is itself, for it would be replaced.

    Raises:
        UsageError: two are the same.
    """
    places: set[Path] = set()
    for file in files:
        place = Path(os.path.realpath(file.parent), file.name)
        if place in places:
            raise UsageError(f"'{file}' is to be written twice", "give each file its own name")
        places.add(place)


def is_special(path: Path) -> bool:
    """Whether there is, or a link leads to, something that is neither a file nor a folder: a device, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


class Switch:
    """Files that take their names at its `commit`; if it is not reached, the end of the block leaves nothing of them.

    What decides is the head's new name: once it has that, all is kept, whatever ends the block.

    Args:
        head: the file that counts, such as a model: it takes its name last.
        bound: whether the others mean something to the head by their names, as a checkpoint to its model. Then an old
            head goes before the first of them is replaced, so that it never stands beside what it does not fit.

    Raises:
        OnnxgradError: on entering, another process writes the head, or no file can be made beside it.
    """

    def __init__(self, head: Path, bound: bool = False) -> None:
        self._head, self._bound = head, bound
        self._staged: dict[Path, Path] = {}
        self._durable: set[Path] = set()
        self._claimed: set[Path] = set()
        self._claims, self._temporary, self._new = ExitStack(), ExitStack(), ExitStack()
        self._done = False

    def __enter__(self) -> Self:
        """Claim the head."""
        with told(self._head):
            tidy(self._head.parent)
            self._claim(self._head)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove what has no name yet, and what is new if the head has none; let go of the outputs."""
        with self._claims, self._temporary:
            if not self._done and (self._head not in self._staged or self._staged[self._head].exists()):
                self._new.close()

    def where(self, out: Path) -> Path:
        """Where the content of an output lies until it has its name."""
        return self._staged.get(out, out)

    def stage(self, out: Path, write: Write, durable: bool = False) -> None:
        """Write a file under a temporary name.

        Args:
            out: the name that it will have.
            write: writes it.
            durable: wait until the disk has it, so that it outlives a loss of power too. What is not durable is whole
                for whoever reads it while the machine runs.

        Raises:
            UsageError: it is an input, or written already.
            OnnxgradError: it can't be written, or another process writes it.
        """
        check_apart([out, *self._staged])
        with told(out):
            self._claim(out)
            self._staged[out] = self._write(out, write, durable)
            if durable:
                self._durable.add(out)

    def copy_data(self, source: Path) -> Path:
        """Copy a data file beside the head, under a name that says its content; what is there already is left.

        Returns:
            Its new place.

        Raises:
            OnnxgradError: it can't be written.
        """
        with told(self._head), source.open("rb") as file:
            most = stat.S_IMODE(source.stat().st_mode)
            return self._place(source, lambda: self._write(self._head, partial(shutil.copyfileobj, file), most=most))

    def write_data(self, write: Write) -> Path:
        """Write a data file beside the head, under a name that says its content; see `copy_data`."""
        with told(self._head):
            temporary = self._write(self._head, write)
            return self._place(temporary, lambda: temporary)

    def commit(self) -> None:
        """Let all files take their names, the head last, and remove data of heads before it that no model refers to.

        Raises:
            OnnxgradError: the operating system refuses one of them its name.
        """
        others = [out for out in self._staged if out != self._head]
        if self._bound and any(out.exists() for out in others):
            with told(self._head):
                self._head.unlink(missing_ok=True)
        for out in (*others, *(self._staged.keys() & {self._head})):
            with told(out):
                if not out.exists():
                    self._new.callback(out.unlink, missing_ok=True)
                self._staged[out].replace(out)
                if out in self._durable and os.name != "nt":
                    _sync_names(out.parent)
        self._done = True
        _remove_unread_data(self._head)

    def _claim(self, out: Path) -> None:
        if out not in self._claimed:
            check_is_no_input(out)
            if is_special(out) or out.is_dir():
                raise OnnxgradError(f"'{out}' is no file: it is a folder, a device or a pipe", "move it away")
            self._claims.enter_context(claim(out))
            self._claimed.add(out)

    def _write(self, out: Path, write: Write, durable: bool = False, most: int = 0o777) -> Path:
        """Write a temporary file of an output, with the mode of the file it replaces, or at most the one given."""
        temporary = _temporary(out)
        self._temporary.callback(temporary.unlink, missing_ok=True)
        with temporary.open("xb") as file:
            own = stat.S_IMODE(temporary.stat().st_mode)
            mode = (stat.S_IMODE(out.stat().st_mode) if out.exists() else own) & most
            if mode != own:
                temporary.chmod(mode)
            write(file)
            if durable:  # before the rename: a disk may take the new name first, and then has an empty file
                file.flush()
                os.fsync(file.fileno())
        return temporary

    def _place(self, content: Path, temporary: Callable[[], Path]) -> Path:
        """Let a data file take the name that says its content, unless it is there, and whole."""
        digest = _sha256(content)
        target = self._head.with_name(f"{self._head.name}.{digest[:DIGITS]}.data")
        if not target.is_file() or target.is_symlink() or _sha256(target) != digest:
            if not target.exists():
                self._new.callback(target.unlink, missing_ok=True)
            temporary().replace(target)
        return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_names(folder: Path) -> None:
    """Wait until the disk has the names of a folder's files, where the file system lets a folder be asked for that."""
    with suppress(PermissionError):  # who may write in a folder need not be one who may read it
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(place)


def _remove_unread_data(head: Path) -> None:
    """Remove the data files that a model, or one that was to be, had under this head's name and no model reads now.

    Models are recognised by their first byte, and read a data file if its name stands in them.
    """
    pattern = re.compile(re.escape(head.name) + rf"\.[0-9a-f]{{{DIGITS}}}\.data")
    with suppress(OSError):  # what can't be read may refer to it: then it stays
        old = [file for file in head.parent.iterdir() if pattern.fullmatch(file.name)]
        if not old:
            return
        models = [file for file in head.parent.iterdir() if file.is_file() and is_model(file)]
        for data in old:
            if not any(mentions(model, data.name.encode()) for model in models if model != data):
                data.unlink()


def is_model(path: Path) -> bool:
    """Whether a file begins as every ONNX model does."""
    with path.open("rb") as file:
        return file.read(1) == b"\x08"


def mentions(path: Path, words: bytes) -> bool:
    """Whether words stand in a file that is not empty; near its end they are found soonest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(words) >= 0
