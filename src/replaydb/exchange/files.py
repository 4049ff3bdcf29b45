"""File access in a local folder or under a prefix of an object store."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from replaydb.errors import InvalidInputError, InvalidURLError, PayloadsUnavailableError
from replaydb.packs.bucket import client, reason
from replaydb.packs.urls import PayloadURL

if TYPE_CHECKING:
    from obstore.store import ObjectStore

EXPECTED = "a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"


def files_at(field: str, where: str | Path) -> Files:
    """Return access to the files of a folder (path or URL) or an object store prefix (URL).

    Args:
        field: Name of the argument, for errors.
        where: The path or URL.

    Raises:
        InvalidInputError: The location is neither a non-empty string nor a path.
        InvalidURLError: The URL cannot be used.
        NotSupportedError: The client of object stores is not installed.
    """
    if not isinstance(where, str | Path) or not str(where):
        raise InvalidInputError(field, EXPECTED, repr(where))
    if isinstance(where, Path) or "://" not in where:
        return Folder(Path(where))
    try:
        url = PayloadURL.of(where)
    except InvalidURLError as error:
        raise InvalidURLError(field, error.expected, error.actual) from None
    return Folder(Path(url.path)) if url.scheme == "file" else Bucket(url)


@contextmanager
def unavailable(url: str) -> Iterator[None]:
    """Raise errors of the operating system, such as a full disk, as `PayloadsUnavailableError`."""
    try:
        yield
    except OSError as error:
        raise PayloadsUnavailableError(url, error.strerror or repr(error)) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Folder:
    """Files of a local folder, created with the first file; or a single local file."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._only = path.name if path.is_file() else None
        self._folder = path if self._only is None else path.parent

    def get(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        if self._only is not None:
            return None
        with unavailable(self.url), suppress(FileNotFoundError, NotADirectoryError):
            return (self._folder / name).read_bytes()
        return None

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self.written(name) as path, unavailable(self.url):
            path.write_bytes(content)

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """Yield a hidden file, which is renamed when the block ends, or removed on an error."""
        path = self._folder / name
        with unavailable(self.url):
            path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{uuid4().hex}.unfinished")
        try:
            yield hidden
            with unavailable(self.url):
                os.replace(hidden, path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """Yield the file itself."""
        yield self._folder / name

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        with unavailable(self.url):
            (self._folder / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return all files below the folder, sorted; or the single file."""
        if self._only is not None:
            return [self._only]
        found = (path for path in self._folder.rglob("[!.]*") if path.is_file())
        return sorted(path.relative_to(self._folder).as_posix() for path in found)


class Bucket:
    """Objects under a prefix. Files are written locally and uploaded when they are complete."""

    def __init__(self, url: PayloadURL) -> None:
        self.url = str(url)
        self._store: ObjectStore = client(url, url.path)

    def get(self, name: str) -> bytes | None:
        """Return the content of a small object; None if it does not exist."""
        with self._typed():
            try:
                return bytes(self._store.get(name).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def put(self, name: str, content: bytes) -> None:
        """Write a small object, replacing an existing one."""
        with self._typed():
            self._store.put(name, content)

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """Yield a local file, which is uploaded when the block ends."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part")
            yield path
            with self._typed():
                self._store.put(name, path)

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """Yield a local copy of an object."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part")
            with self._typed(), path.open("wb") as file:
                for chunk in self._store.get(name).stream():
                    file.write(chunk)
            yield path

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        with self._typed():
            try:
                return int(self._store.head(name)["size"])
            except FileNotFoundError:
                return None

    def remove(self, name: str) -> None:
        """Delete an object if it exists."""
        with self._typed(), suppress(FileNotFoundError):
            self._store.delete(name)

    def names(self) -> list[str]:
        """Return all objects under the prefix, sorted, without hidden ones."""
        with self._typed():
            found: list[str] = [one["path"] for page in self._store.list() for one in page]
        return sorted(name for name in found if not Path(name).name.startswith("."))

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise errors of the service without their messages, which may contain credentials."""
        from obstore.exceptions import BaseError

        failed: Any = None
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            failed = reason(error)
        if failed is not None:
            raise PayloadsUnavailableError(self.url, failed)


#: Files by relative path.
Files = Folder | Bucket
