"""Replace a group of files atomically: when all are complete, all get their final names; otherwise none does.

Each file is written under a temporary name in its folder, by the process that has locked it. The name of a data file,
such as one with a model's weights, contains a digest of the content, so that a data file is never replaced while a
model refers to it. The main file of the group, called the head, is renamed last. If it is a model, the rename replaces
the model and its data at once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from onnxgrad_cli.common.inputs import check_is_no_input
from onnxgrad_cli.errors import unwritable
from onnxgrad_cli.files.outputs import check_apart, is_model, is_special, mentions, told

DIGITS = 12
"""Number of digits of the SHA-256 of a data file's content in its name."""

NO_LINK: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for opening a lock file: don't follow links and don't block on pipes, which an attacker may have created."""

Write = Callable[[BinaryIO], object]
"""A function that writes the content to an open file."""


# -- names of our own -----------------------------------------------------------------------------------------------


def _hidden(out: Path, word: str) -> Path:
    """Return a hidden path beside `out`: its name with a dot in front and `word` appended. A long name is shortened."""
    stem, name = out.name, os.fsencode(out.name)
    if len(name) > 200:
        stem = f"{name[:180].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:DIGITS]}"
    return out.with_name(f".{stem}{word}")


_LOCK = ".onnxgrad.lock"
_OURS = re.compile(r"\.(.+?)(\.[0-9a-f]{16}\.onnxgrad\.tmp|\.onnxgrad\.lock)", re.DOTALL)


def _unfinished(folder: Path) -> list[tuple[Path, str]]:
    """Return onnxgrad's temporary files and lock files in a folder, each with its output's name (see `_hidden`)."""
    with suppress(OSError):  # a process may be allowed to write to a folder but not to read it
        return [(folder / name, match[1]) for name in os.listdir(folder) if (match := _OURS.fullmatch(name))]
    return []


def tidy(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder: those whose output file no process has locked."""
    for stem in {stem for _, stem in _unfinished(folder)}:
        with suppress(OSError), claim(folder / stem):
            pass


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """In the block, lock a file, so that no other process writes it.

    First remove the temporary files of killed processes.

    Raises:
        BlockingIOError: another process is writing the file.
        OSError: no file can be created beside it.
    """
    with ExitStack() as held:
        if _locked(_hidden(out, _LOCK), held):
            for file, stem in _unfinished(out.parent):
                if f".{stem}" == _hidden(out, "").name and file.suffix == ".tmp":
                    file.unlink(missing_ok=True)
        yield


def _locked(path: Path, held: ExitStack) -> bool:
    """Lock a lock file until `held` is closed. Return False if the file system does not support locks.

    Without locks, a written file is still complete: it is the file of the process that renamed its own last.

    Raises:
        BlockingIOError: another process has locked the file.
        OSError: the file can't be created, or is a link or a pipe.
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
    """Remove and close a lock file. It is removed while this process holds it, so that no other lock is removed.

    Windows can't remove an open file, so there it is closed first.
    """
    if os.name == "nt":
        lock.close()
    with suppress(OSError):
        path.unlink()
    lock.close()


def opened(path: Path) -> IO[str]:
    """Open a file for locking, and create it if it is missing.

    Raises:
        OSError: the file can't be created, or is a link or a pipe.
    """
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666))


def hold(file: IO[Any]) -> bool:
    """Lock an open file until it is closed. Return False if it is already locked, by this or another process.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


# -- files that take their names together ---------------------------------------------------------------------------


class AtomicWriteGroup:
    """A group of files that get their final names at `commit`. At the end of the block, uncommitted files are removed.

    The group is committed as soon as the head has its final name. From then on all files are kept, even if the block is
    interrupted.

    Args:
        head: the main file, such as a model, which is renamed last.
        bound: True if the head refers to other files of the group by their names, as a model to its checkpoint. In this
            case the old head is removed before the first of these files is replaced, so that it never refers to a file
            that does not fit.

    Raises:
        OnnxgradError: on entering the block: another process writes the head, or no file can be created beside it.
    """

    def __init__(self, head: Path, bound: bool = False) -> None:
        self._head, self._bound = head, bound
        self._staged: dict[Path, Path] = {}
        self._durable: set[Path] = set()
        self._claimed: set[Path] = set()
        self._claims, self._temporary, self._new = ExitStack(), ExitStack(), ExitStack()
        self._done = False

    def __enter__(self) -> Self:
        """Lock the head file."""
        with told(self._head):
            tidy(self._head.parent)
            self._claim(self._head)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove temporary files; if the head was not renamed, also remove new files. Release the locks."""
        with self._claims, self._temporary:
            if not self._done and (self._head not in self._staged or self._staged[self._head].exists()):
                self._new.close()

    def where(self, out: Path) -> Path:
        """Return the current path of an output file. Before the commit, this is a temporary file."""
        return self._staged.get(out, out)

    def stage(self, out: Path, write: Write, durable: bool = False) -> None:
        """Write a file under a temporary name, and add it to the group.

        Args:
            out: the final path.
            write: a function that writes the content.
            durable: wait until the file is on the disk, so that it survives a power failure. Without it, a file may be
                incomplete after one.

        Raises:
            UsageError: the file is an input, or was staged already.
            OnnxgradError: the file can't be written, or another process writes it.
        """
        check_apart([out, *self._staged])
        with told(out):
            self._claim(out)
            self._staged[out] = self._write(out, write, durable)
            if durable:
                self._durable.add(out)

    def copy_data(self, source: Path) -> Path:
        """Copy a data file to the folder of the head, under a name with a digest of the content. Keep an existing copy.

        Returns:
            The path of the copy.

        Raises:
            OnnxgradError: the copy can't be written.
        """
        with told(self._head), source.open("rb") as file:
            most = stat.S_IMODE(source.stat().st_mode)
            return self._place(source, lambda: self._write(self._head, partial(shutil.copyfileobj, file), most=most))

    def write_data(self, write: Write) -> Path:
        """Write a data file to the folder of the head, under a name with a digest of the content. See `copy_data`."""
        with told(self._head):
            temporary = self._write(self._head, write)
            return self._place(temporary, lambda: temporary)

    def commit(self) -> None:
        """Give all files their final names, the head last. Remove data files of earlier heads that no model refers to.

        Raises:
            OnnxgradError: the operating system can't rename a file.
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
                raise unwritable(f"'{out}' is not a file: it is a folder, a device or a pipe", "move it away")
            self._claims.enter_context(claim(out))
            self._claimed.add(out)

    def _write(self, out: Path, write: Write, durable: bool = False, most: int = 0o777) -> Path:
        """Write a temporary file for an output.

        The temporary file gets the permissions of the file to replace, except those not in `most`.
        """
        temporary = _hidden(out, f".{secrets.token_hex(8)}.onnxgrad.tmp")
        self._temporary.callback(temporary.unlink, missing_ok=True)
        with temporary.open("xb") as file:
            own = stat.S_IMODE(temporary.stat().st_mode)
            mode = (stat.S_IMODE(out.stat().st_mode) if out.exists() else own) & most
            if mode != own:
                temporary.chmod(mode)
            write(file)
            # Sync before the rename: the disk may store the new name first, and a power failure would then leave an
            # empty file.
            if durable:
                file.flush()
                os.fsync(file.fileno())
        return temporary

    def _place(self, content: Path, temporary: Callable[[], Path]) -> Path:
        """Give a data file the name with its digest, unless an intact file with this name exists.

        Args:
            content: the file with the data.
            temporary: returns the file to rename, such as `content` or a new copy of it.
        """
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
    """Wait until renames in a folder are on the disk, if the file system supports this."""
    with suppress(PermissionError):  # a process may be allowed to write to a folder but not to read it
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(place)


def _remove_unread_data(head: Path) -> None:
    """Remove data files of earlier models with the name of `head`, if no model in the folder refers to them any more.

    Files are recognized as models by their first byte. A model refers to a data file if it contains the file's name.

    Args:
        head: the main file of the group, a model (see `AtomicWriteGroup`).
    """
    pattern = re.compile(re.escape(head.name) + rf"\.[0-9a-f]{{{DIGITS}}}\.data")
    with suppress(OSError):  # files that can't be read may refer to the data, so these stay
        old = [file for file in head.parent.iterdir() if pattern.fullmatch(file.name)]
        if not old:
            return
        models = [file for file in head.parent.iterdir() if file.is_file() and is_model(file)]
        for data in old:
            if not any(mentions(model, data.name.encode()) for model in models if model != data):
                data.unlink()
