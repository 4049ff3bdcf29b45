"""Packs as files in a folder, read and written with system calls in a thread pool."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from uuid import uuid4

from replaydb.errors import (
    DatabaseFullError,
    DatabaseReadOnlyError,
    PayloadsUnavailableError,
    ReplayDBError,
)
from replaydb.packs.protocol import (
    SMALL,
    Listed,
    PackDamage,
    Part,
    Range,
    State,
    compared,
    file_of,
    missing,
    too_short,
)
from replaydb.packs.urls import PayloadURL
from replaydb.util import memory

P = ParamSpec("P")
T = TypeVar("T")

_THREADS: Final = 4
#: Each thread reads at least this many bytes: for fewer, waking another thread costs more.
_LEAST_BYTES: Final = 4_000_000
_PAGE: Final = 1000
_MAX_CHUNKS: Final = os.sysconf("SC_IOV_MAX")
#: Bytes per system call. For larger ones Linux caches the file in larger blocks of memory, which
#: are rarely reused. In a virtual machine the first use of memory is slow.
_MAX_WRITTEN: Final = 256 << 10
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_FILE = re.compile(r"([0-9a-f]{32})\.pack(\.part)?")


class Folder:
    """Files below `FOLDER/STORE_UID/`."""

    def __init__(self, url: PayloadURL, store_uid: str) -> None:
        self._url = str(url)
        self._folder = Path(url.path, store_uid)
        self._threads = ThreadPoolExecutor(_THREADS, "replaydb-packs")

    async def begin(self) -> None:
        """Create the folder of the store, and the one that the URL names if its parent exists.

        Raises:
            PayloadsUnavailableError: The URL names a file, or the parent of the folder does not
                exist, because a file system may not be mounted.
        """
        await self._in_thread(self._begin)

    def _begin(self) -> None:
        for folder in (self._folder.parent, self._folder):
            if not folder.is_dir():
                self._create(folder)

    def _create(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            reason = (
                f"{folder.parent} does not exist: create or mount that folder first. Only the last "
                "folder of the URL is created"
            )
        except (FileExistsError, NotADirectoryError):
            reason = "this path, or one above it, is a file: name a folder"
        else:
            _sync_folder(folder.parent)
            return
        raise PayloadsUnavailableError(self._url, reason)

    async def get(self, file: str) -> bytes | None:
        """Return the first bytes of a file; None if there is none."""
        return await self._in_thread(self._get, file)

    def _get(self, file: str) -> bytes | None:
        path = self._folder / file
        try:
            with path.open("rb") as opened:
                return opened.read(SMALL)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # that it may not be read does not mean that it is read-only
            raise PayloadsUnavailableError(self._url, f"{path}: {error.strerror}") from error

    async def put(self, file: str, chunks: Sequence[Part], *, sync: bool) -> None:
        """Write a file under a temporary name, and rename it when it is complete."""
        await self._in_thread(self._put, file, chunks, sync)

    def _put(self, file: str, chunks: Sequence[Part], sync: bool) -> None:
        # The temporary name is that of an orphan, so pruning finds the remains of a killed write.
        unfinished = self._folder / f"{uuid4().hex}.pack.part"
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _write_all(descriptor, chunks)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            unfinished.rename(self._folder / file)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        if sync:
            _sync_folder(self._folder)

    async def replace(self, file: str, old: bytes, new: bytes) -> bool:
        """Compare and rename a file while its folder is locked, if the file system has locks."""

        def replace() -> bool:
            with self._opened() as folder:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                if self._get(file) != old:
                    return False
                self._put(file, [new], sync=True)
                return True

        return await self._in_thread(replace)

    async def states(self, files: Sequence[str]) -> dict[str, State]:
        """Look files up in one open directory: the one that the path leads to at this moment."""

        def states() -> dict[str, State]:
            with self._opened() as folder:
                found = {file: _state(file, folder) for file in files}
            return {file: state for file, state in found.items() if state is not None}

        return await self._in_thread(states)

    async def read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Read ranges, each into its own memory.

        Files are not memory-mapped: if one is truncated while mapped, a read kills the process.
        """
        if sum(wanted.length for wanted in ranges) < _LEAST_BYTES:
            return await self._in_thread(self._read, ranges)
        found = await self._in_thread(self._prepared, ranges)
        views = _views(found)
        num_threads = min(_THREADS, len(views), 1 + sum(map(len, views.values())) // _LEAST_BYTES)
        shares = await asyncio.gather(
            *(
                self._in_thread(
                    self._filled, ranges, dict(islice(views.items(), nth, None, num_threads))
                )
                for nth in range(num_threads)
            )
        )
        for share in shares:
            for position, outcome in share:
                found[position] = outcome
        return found

    def _read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Read ranges in the current thread."""
        found = self._prepared(ranges)
        for position, outcome in self._filled(ranges, _views(found)):
            found[position] = outcome
        return found

    def _prepared(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Allocate memory for each range; return damage for ranges that the files do not have."""
        with self._opened() as folder:
            states = {
                pack: _state(file_of(pack), folder) for pack in {wanted.pack for wanted in ranges}
            }
        found: list[memoryview | PackDamage] = []
        for wanted in ranges:
            state = states[wanted.pack]
            if state is None:
                found.append(missing(wanted.pack))
            elif state.size < wanted.offset + wanted.length:
                found.append(too_short(wanted, state.size))
            else:
                found.append(memory.take(wanted.length))
        return found

    def _filled(
        self, ranges: Sequence[Range], views: Mapping[int, memoryview]
    ) -> list[tuple[int, memoryview | PackDamage]]:
        """Read some of the ranges, by position. A file may be removed or truncated meanwhile."""
        by_pack: defaultdict[str, list[int]] = defaultdict(list)
        for position in views:
            by_pack[ranges[position].pack].append(position)
        outcomes: list[tuple[int, memoryview | PackDamage]] = []
        with self._opened() as folder:
            for pack, positions in by_pack.items():
                try:
                    descriptor = os.open(file_of(pack), os.O_RDONLY, dir_fd=folder)
                except FileNotFoundError:
                    outcomes += [(position, missing(pack)) for position in positions]
                    continue
                try:
                    for position in positions:
                        view, wanted = views[position], ranges[position]
                        if _read_all(descriptor, view, wanted.offset):
                            outcomes.append((position, compared(wanted, view)))
                        else:
                            size = os.fstat(descriptor).st_size
                            outcomes.append((position, too_short(wanted, size)))
                finally:
                    os.close(descriptor)
        return outcomes

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder, so that a file missing in it is gone, and not only unreachable.

        With lookups by path, a file would also be missing while the folder is not mounted. The
        folder may be mounted again before the marker is read.
        """
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    async def remove(self, packs: Sequence[str]) -> None:
        """Remove files. If a power cut undoes a removal, the file is an orphan."""

        def remove() -> None:
            for pack in packs:
                path = self._folder / file_of(pack)
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.part").unlink(missing_ok=True)

        await self._in_thread(remove)

    async def listed(self) -> AsyncIterator[list[Listed]]:
        """Yield pages of the files."""
        names = await self._in_thread(os.listdir, self._folder)
        for first in range(0, len(names), _PAGE):
            yield await self._in_thread(self._described, names[first : first + _PAGE])

    def _described(self, names: Sequence[str]) -> list[Listed]:
        found = []
        for name in names:
            if match := _FILE.fullmatch(name):
                with suppress(FileNotFoundError):
                    facts = os.stat(self._folder / name, follow_symlinks=False)
                    modified = datetime.fromtimestamp(facts.st_mtime, UTC)
                    found.append(Listed(match[1], facts.st_size, modified))
        return found

    def typed(self, error: Exception) -> ReplayDBError | None:
        """Return the typed error. An `OSError` has no secrets in it, and is kept as its cause."""
        if not isinstance(error, OSError):
            return None
        reason = error.strerror or type(error).__name__
        if isinstance(error.filename, str):  # relative to the folder if that was opened first
            reason = f"{self._folder / error.filename}: {reason}"
        typed: ReplayDBError
        if error.errno in _FULL:
            typed = DatabaseFullError(f"{self._url}: {reason}")
        elif error.errno in _READ_ONLY:
            typed = DatabaseReadOnlyError(f"{self._url}: {reason}")
        else:
            typed = PayloadsUnavailableError(self._url, reason)
        typed.__cause__ = error
        return typed

    def close(self) -> None:
        """Let the threads end after their current work."""
        self._threads.shutdown(wait=False)

    async def _in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))


def _views(found: Sequence[memoryview | PackDamage]) -> dict[int, memoryview]:
    """Return the memory to read into, by position."""
    return {position: each for position, each in enumerate(found) if isinstance(each, memoryview)}


def _state(file: str, folder: int) -> State | None:
    try:
        found = os.stat(file, dir_fd=folder)
    except FileNotFoundError:
        return None
    return State(found.st_size, f"{found.st_ino} {found.st_mtime_ns}")


def _write_all(descriptor: int, chunks: Sequence[Part]) -> None:
    """Write chunks one after another. A system call may write less than it is given."""
    left = deque(memoryview(chunk) for chunk in chunks if len(chunk))
    while left:
        some, room = [], _MAX_WRITTEN
        for chunk in islice(left, _MAX_CHUNKS):
            some.append(chunk[:room])
            room -= len(some[-1])
            if not room:
                break
        written = os.writev(descriptor, some)
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]


def _read_all(descriptor: int, into: memoryview, offset: int) -> bool:
    """Fill memory from a file. Returns False if the file is too short."""
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            return False
        into, offset = into[count:], offset + count
    return True


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that files renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
