"""Where files are written and read: a folder, or a prefix of an object store."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from replaydb.errors import InvalidInputError, InvalidURLError, PayloadsUnavailableError
from replaydb.packs.bucket import client, reason
from replaydb.packs.urls import PlaceURL

if TYPE_CHECKING:
    from obstore.store import ObjectStore

EXPECTED = "a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"


class Files(Protocol):
    """Files by their names, which have slashes in them."""

    url: str

    def get(self, name: str) -> bytes | None:
        """A small file; None where there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in the place of one that is there."""

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """A file to write to, which gets its name when the block ends well, and else is gone."""
        ...

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """A file to read from."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""

    def names(self) -> list[str]:
        """All there are, sorted, but those that begin with a dot."""
        ...


def files_at(field: str, where: str | Path) -> Files:
    """A folder by its path or URL, or a prefix by its URL.

    Raises:
        InvalidURLError: It can be neither.
        NotSupportedError: What talks to object stores is not installed.
    """
    if not isinstance(where, str | Path) or not str(where):
        raise InvalidInputError(field, EXPECTED, repr(where))
    if isinstance(where, Path) or "://" not in where:
        return Folder(Path(where))
    try:
        url = PlaceURL.of(where)
    except InvalidURLError as error:
        raise InvalidURLError(field, error.expected, error.actual) from None
    return Folder(Path(url.path)) if url.scheme == "file" else Bucket(url)


@contextmanager
def unavailable(url: str) -> Iterator[None]:
    """Errors of this machine, such as a full disk, as those of a place."""
    try:
        yield
    except OSError as error:
        raise PayloadsUnavailableError(url, error.strerror or str(error)) from error


def sha256_of(path: Path) -> str:
    """Of the bytes of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Folder:
    """A folder of this machine, made when the first file is; or one file of it."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._only = path.name if path.is_file() else None
        self._folder = path if self._only is None else path.parent

    def get(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        if self._only is not None:
            return None
        with unavailable(self.url), suppress(FileNotFoundError, NotADirectoryError):
            return (self._folder / name).read_bytes()
        return None

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in the place of one that is there."""
        with self.written(name) as path, unavailable(self.url):
            path.write_bytes(content)

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """A file to write to: hidden until it is whole."""
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
        """The file itself."""
        yield self._folder / name

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with unavailable(self.url):
            (self._folder / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """All files below the folder, or the one that it is."""
        if self._only is not None:
            return [self._only]
        found = (path for path in self._folder.rglob("[!.]*") if path.is_file())
        return sorted(path.relative_to(self._folder).as_posix() for path in found)


class Bucket:
    """Objects below a prefix; files are made on this machine and sent when they are whole."""

    def __init__(self, url: PlaceURL) -> None:
        self.url = str(url)
        self._store: ObjectStore = client(url, url.path)

    def get(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        import obstore

        with self._typed():
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def put(self, name: str, content: bytes) -> None:
        """Write a small object, in the place of one that is there."""
        import obstore

        with self._typed():
            obstore.put(self._store, name, content)

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """A file to write to; the object is there when all of it has been sent."""
        import obstore

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part")
            yield path
            with self._typed():
                obstore.put(self._store, name, path)

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """A copy of an object."""
        import obstore

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part")
            with self._typed(), path.open("wb") as file:
                for piece in obstore.get(self._store, name).stream():
                    file.write(piece)
            yield path

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        import obstore

        with self._typed():
            try:
                return int(obstore.head(self._store, name)["size"])
            except FileNotFoundError:
                return None

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        import obstore

        with self._typed(), suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def names(self) -> list[str]:
        """All objects below the prefix."""
        import obstore

        with self._typed():
            found: list[str] = [one["path"] for page in obstore.list(self._store) for one in page]
        return sorted(name for name in found if not Path(name).name.startswith("."))

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Errors of the service in words of our own, as theirs may hold keys."""
        from obstore.exceptions import BaseError

        failed: Any = None
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            failed = reason(error)
        if failed is not None:
            raise PayloadsUnavailableError(self.url, failed)
