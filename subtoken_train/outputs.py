"""Files and folders that this package writes: never over what is there unless told, and whole or not at all.

What is written grows in a *stage*, a hidden folder beside its target: ``.NAME.subtoken-1a2b3c4d``, which holds
``content`` and a marker that the writer locks. Whatever ends it, the system gives the lock back, and the next writer to
the same target removes the stages that nobody holds: nothing else beside a target is ever removed.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from subtoken_train.errors import SubTokenWarning, refuse, system_words

_MARK, _MARKER, _CONTENT = ".subtoken-", ".subtoken-stage", "content"
STAGE = re.escape(_MARK) + "[0-9a-f]{8}"  # ending of a stage's name, after its target's name and a dot
_LONGEST, _CUT = 255, 200  # bytes of a name at most; those of a longer target's name that its stages' names begin with
NO_LOCKS, FULL = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS), (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors where a file system has no locks; where a disk, a quota or a limit of a file's size leaves no room."""
_OF_WRITING = (*FULL, errno.EIO, errno.EROFS)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # what libraries in Rust (safetensors, tokenizers) make of a number


class WritingError(OSError):
    """Says of which file a disk had no room, or failed, and what to do."""

    def __str__(self) -> str:
        return system_words(self)


def check_new(paths: Iterable[Path], overwrite: bool) -> None:
    """Raise ``ValueError`` if one of the files is there, unless it is to be replaced."""
    for path in paths:
        check_file(path)
        refuse((not overwrite and os.path.lexists(path), f"{path} exists; name another file, or pass --overwrite"))
        check_place(path)


def check_place(target: Path) -> None:
    """Find out before any work whether a file or folder can be written: make what ``stage`` makes, and remove it."""
    try:
        with suppress(_OnlyTriedError), stage(target) as temporary:
            temporary.touch()
            raise _OnlyTriedError
    except OSError as error:
        if error.filename is not None and _is_staged(error.filename):
            error.filename = str(target)
        raise


class _OnlyTriedError(Exception):
    """Ends a stage in which nothing is to be left, its parents included."""


def check_file(path: Path) -> None:
    """Raise ``ValueError`` if a folder, a pipe or a device lies at ``path``: no file may take its place."""
    try:
        mode = os.lstat(path).st_mode
        mode = os.stat(path).st_mode if stat.S_ISLNK(mode) else mode
    except OSError as error:  # nothing there, or a link that leads nowhere; whatever else is wrong, writing says
        if error.errno == errno.ENAMETOOLONG:
            raise
        return
    refuse((stat.S_ISDIR(mode), f"{path} is a folder; name a file"))
    refuse((not stat.S_ISREG(mode), f"{path} is a pipe or a device; name a file"))


def write_whole(path: Path, content: str | bytes | memoryview, overwrite: bool = True) -> None:
    """Write a file (a text in UTF-8) whole or not at all."""
    with whole_file(path, overwrite) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def append_whole(path: Path, text: str) -> None:
    """Append a text to a file and wait until it is on the disk; after an error the file is as long as it was."""
    with room_for(path), path.open("ab", buffering=0) as file:
        before, left = os.fstat(file.fileno()).st_size, memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except BaseException:
            os.truncate(path, before)
            raise


@contextmanager
def whole_file(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Yield a path to write a new file at, which takes the name ``path`` once the block has ended and it is on disk.

    Parents are made; a link at ``path`` is replaced, not followed; whatever ends the process, what was at ``path`` is
    there. Without ``overwrite`` a file that came in the meantime stays.
    """
    check_file(path)
    with stage(path) as temporary:
        yield temporary
        flush(temporary)
        words = "came while this command ran, so it stays and nothing was written; name another file"
        refuse((not overwrite and os.path.lexists(path), f"{path} {words}"))
        os.replace(temporary, path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which takes the name ``folder`` once the block has ended."""
    with stage(folder) as temporary:
        temporary.mkdir()
        yield temporary
        if os.path.lexists(folder):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        temporary.rename(folder)


@contextmanager
def stage(target: Path) -> Iterator[Path]:
    """Yield a free path in a new stage beside ``target``: write a file or make a folder there, and rename it.

    The stage, what is left in it, and parents that were made for it and are empty are gone afterwards. Stages that
    killed writers to this target left are removed first.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        with room_for(target):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target)) from None
            remove_left(target)
            own, lock = _locked_stage(target)
            try:
                yield own / _CONTENT
            finally:
                shutil.rmtree(own)
                os.close(lock)
    except BaseException:
        unmake_folders(missing)
        raise


@contextmanager
def room_for(target: Path) -> Iterator[None]:
    """Let a full or failing disk come out as a ``WritingError`` that names ``target``, whichever library met it."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_WRITING and (error.filename is None or _is_staged(error.filename)):
            raise WritingError(error.errno, os.strerror(error.errno), str(target)) from error
        raise
    except Exception as error:
        found = _OS_ERROR.search(str(error))
        if found is not None and int(found[1]) in _OF_WRITING:
            raise WritingError(int(found[1]), os.strerror(int(found[1])), str(target)) from error
        raise


def remove_left(target: Path) -> None:
    """Remove the stages of a target whose writers were killed."""
    begins = _begin_of_stage(target)
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    ours = [name for name in names if name.startswith(begins) and re.fullmatch(STAGE, name[len(begins) :])]
    for own in map(target.with_name, sorted(ours)):
        if own.is_symlink() or not own.is_dir():
            continue
        if not any(own.iterdir()):  # killed before its marker stood
            with suppress(OSError):  # a writer that begins, or another process, was faster
                own.rmdir()
        elif (lock := _lock(own / _MARKER)) is not None:
            shutil.rmtree(own, ignore_errors=True)  # another process may have been faster
            os.close(lock)


def _begin_of_stage(target: Path) -> str:
    """Return how the names of a target's stages begin: with its own name, or a part of it where that leaves no room."""
    name = os.fsencode(target.name)
    if 1 + len(name) + len(_MARK) + 8 <= _LONGEST or len(name) > _LONGEST:  # no target has so long a name
        return f".{target.name}"
    return f".{name[:_CUT].decode(errors='ignore')}-{sha256(name).hexdigest()[:16]}"


def _locked_stage(target: Path) -> tuple[Path, int]:
    """Make a stage and its marker; returns it and the descriptor that holds the lock, where the system has locks."""
    while True:
        own = target.with_name(f"{_begin_of_stage(target)}{_MARK}{secrets.token_hex(4)}")
        own.mkdir()
        try:
            lock = os.open(own / _MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:  # taken for one that a killed writer left, in between
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the same, a moment later: whoever holds it removes it
            os.close(lock)
            continue
        except OSError:  # a file system without locks: what is left there stays
            pass
        return own, lock


def _lock(marker: Path) -> int | None:
    try:
        descriptor = os.open(marker, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def take_lock(path: Path, seconds: float = -1) -> FileLock:
    """Lock a file until ``release``, so that others wait up to ``seconds`` (-1: as long as it takes)."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:  # a ``Timeout`` has none
            raise
        words = "it continues without one: start no second command that writes there"
        warnings.warn(f"{path.parent} lies on a file system without locks; {words}", SubTokenWarning, stacklevel=2)
    return lock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``take_lock`` inside the block."""
    lock = take_lock(path)
    try:
        yield
    finally:
        lock.release()


def _is_staged(name: object) -> bool:
    return any(re.fullmatch(rf"\..+{STAGE}", part) for part in Path(os.fsdecode(str(name))).parts)


def unmake_folders(made: list[Path]) -> None:
    """Remove the folders that were made, inner ones first, as far as they are empty."""
    for folder in made:
        if folder.is_dir():
            remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing."""
    if not any(folder.iterdir()):
        folder.rmdir()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
