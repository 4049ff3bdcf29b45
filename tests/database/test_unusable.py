"""Databases that cannot be used: typed errors with the driver's as their cause, and no secrets."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import struct
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import URL, make_url

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from support.errors import all_error_text
from support.groups import group
from support.users import without_root

PASSWORD = "hunter2-geheim"  # noqa: S105


@pytest.fixture(autouse=True)
async def _threads_end() -> AsyncIterator[None]:
    """aiosqlite does not wait for the thread of a connection that failed."""
    yield
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            await asyncio.to_thread(thread.join, 5)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "replay.db",
        "/tmp/replay.db",  # noqa: S108
        None,
        5,
        Path("replay.db"),
        f"mysql://me:{PASSWORD}@host/db",
        f"redis://:{PASSWORD}@host",
        f"postgresql://me:{PASSWORD}@host:port/db",
        f"postgresql:/me:{PASSWORD}@host/db",
    ],
)
async def test_invalid_urls_are_refused(url: Any) -> None:
    with pytest.raises(rdb.InvalidURLError) as caught:
        await Store.open(url)
    assert caught.value.field == "url"
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+aiosqlite:///:memory:"]
)
async def test_in_memory_databases_are_refused(url: str) -> None:
    with pytest.raises(rdb.NotSupportedError, match="in-memory"):
        await Store.open(url)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{PASSWORD}\ud800@host/db",
        f"postgresql://me:{PASSWORD}@host/\udc80",
        f"postgresql://me:{PASSWORD}\0@host/db",
        f"postgresql://me:{PASSWORD}@host/db%00",
        f"sqlite:////tmp/{PASSWORD}\ud800.db",
        f"sqlite:////tmp/{PASSWORD}\0.db",
        URL.create("sqlite", database=f"/tmp/{PASSWORD}\udc80.db"),  # noqa: S108
        URL.create("sqlite", database=f"/tmp/{PASSWORD}\0.db"),  # noqa: S108
    ],
)
async def test_invalid_characters_are_refused(url: str | URL) -> None:
    with pytest.raises(rdb.InvalidURLError, match=r"NUL character|valid UTF-8") as caught:
        await Store.open(url)
    assert PASSWORD not in all_error_text(caught.value)


@pytest.mark.parametrize("where", ["127.0.0.1:1", "no-such-host.invalid", "[::1]:1"])
async def test_a_server_that_cannot_be_reached(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(rdb.DatabaseUnavailableError) as caught:
        await Store.open(f"postgresql://me:{PASSWORD}@{where}/db")
    assert "me:***@" in str(caught.value)
    assert isinstance(caught.value.__cause__, Exception)
    assert PASSWORD not in all_error_text(caught.value)
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize(
    ("part", "state"), [({"database": "no-such-db"}, "3D000"), ({"username": "nobody"}, "28000")]
)
async def test_a_server_that_refuses(
    postgresql_url: str, caplog: pytest.LogCaptureFixture, part: dict[str, Any], state: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = make_url(postgresql_url).set(password=PASSWORD, **part)
    with pytest.raises(rdb.DatabaseUnavailableError, match=state) as caught:
        await Store.open(url)
    assert caught.value.__cause__ is not None
    assert PASSWORD not in all_error_text(caught.value)
    assert PASSWORD not in caplog.text


async def test_the_command_to_run_hides_the_password(empty_postgresql_url: str) -> None:
    url = make_url(empty_postgresql_url).set(password=PASSWORD)
    with pytest.raises(rdb.SchemaOutOfDateError, match="replaydb db upgrade") as caught:
        await Store.open(url)
    assert ":***@" in str(caught.value)
    assert PASSWORD not in all_error_text(caught.value)


async def test_errors_of_an_open_store_hide_the_password(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = make_url(postgresql_url).set(password=PASSWORD)
    async with Store.open(url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        with pytest.raises(rdb.DatabaseError, match="22003") as caught:
            await buffer.count(where=rdb.col.id * 1e308 * 1e308 > 1)
        assert (await buffer.stats()).num_groups == 1
        assert PASSWORD not in repr(store) + repr(buffer)
    assert PASSWORD not in all_error_text(caught.value)
    assert PASSWORD not in caplog.text


async def test_a_folder_without_migrations(tmp_path: Path) -> None:
    with pytest.raises(rdb.DatabaseError):
        await Store.open(f"sqlite:///{tmp_path}", migrate=False)


@pytest.mark.parametrize("migrate", [None, True, False])
async def test_a_file_that_is_not_a_database(tmp_path: Path, migrate: bool | None) -> None:
    content = b"text, not a database\n" * 500
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(rdb.DatabaseUnavailableError, match=r"notes\.txt") as caught:
        await Store.open(f"sqlite:///{path}", migrate=migrate)
    assert caught.value.__cause__ is not None
    assert path.read_bytes() == content


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that users other than root can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="replaydb-readonly-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


@pytest.mark.parametrize("folder_too", [False, True])
async def test_a_file_that_cannot_be_written(
    sqlite_url: str, public_folder: Path, folder_too: bool
) -> None:
    path = public_folder / "replay.db"
    shutil.copy(make_url(sqlite_url).database or "", path)
    os.chmod(path, 0o444)
    os.chmod(public_folder, 0o555 if folder_too else 0o777)
    with without_root(), pytest.raises(rdb.DatabaseError) as caught:
        async with Store.open(f"sqlite:///{path}", run="a") as store:
            await store.buffer("math")
    assert type(caught.value) in (rdb.DatabaseReadOnlyError, rdb.DatabaseUnavailableError)
    assert "replay.db" in str(caught.value)
    cause: Any = caught.value.__cause__
    assert getattr(cause, "orig", cause).sqlite_errorname.startswith("SQLITE_")


async def test_a_folder_that_cannot_be_written(public_folder: Path) -> None:
    os.chmod(public_folder, 0o555)  # noqa: S103
    with without_root(), pytest.raises(rdb.DatabaseError) as caught:
        await Store.open(f"sqlite:///{public_folder}/replay.db")
    assert isinstance(caught.value, rdb.DatabaseUnavailableError | rdb.DatabaseReadOnlyError)
    assert os.listdir(public_folder) == []


def test_a_read_only_error_of_sqlite(sqlite_url: str) -> None:
    path = make_url(sqlite_url).database
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("DELETE FROM buffer")
    connection.close()
    typed = backend_for(sqlite_url).errors.typed(caught.value)
    assert isinstance(typed, rdb.DatabaseReadOnlyError)
    assert "SQLITE_READONLY" in str(typed)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.DiskFullError, rdb.DatabaseFullError),
        (asyncpg.ReadOnlySQLTransactionError, rdb.DatabaseReadOnlyError),
        (asyncpg.TooManyConnectionsError, rdb.DatabaseUnavailableError),
        (asyncpg.AdminShutdownError, rdb.DatabaseUnavailableError),
        (asyncpg.CannotConnectNowError, rdb.DatabaseUnavailableError),
        (asyncpg.InvalidPasswordError, rdb.DatabaseUnavailableError),
        (asyncpg.ConnectionDoesNotExistError, rdb.DatabaseUnavailableError),
        (asyncpg.InterfaceError, rdb.DatabaseUnavailableError),
        (ConnectionResetError, rdb.DatabaseUnavailableError),
        (asyncpg.UndefinedTableError, rdb.DatabaseError),
    ],
)
def test_errors_of_postgresql_are_typed(error: type[Exception], kind: type[Any]) -> None:
    typed = backend_for("postgresql://me@host/db").errors.typed(error("reason"))
    assert type(typed) is kind
    assert "reason" in str(typed)


async def test_an_authentication_method_that_is_not_supported() -> None:
    """The store cannot be opened later either, so the call fails at once."""

    async def request_unknown(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096) == struct.pack("!II", 8, 80877103):  # SSLRequest
            writer.write(b"N")
        writer.write(b"R" + struct.pack("!II", 8, 99))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(request_unknown, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(rdb.DatabaseUnavailableError, match=r"unsupported authentication .*99"):
            async with asyncio.timeout(60):
                await Store.open(f"postgresql://me:secret@127.0.0.1:{port}/db")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), AssertionError()])
def test_other_errors_are_not_translated(error: Exception) -> None:
    for url in ("postgresql://me@host/db", "sqlite:///file.db"):
        assert backend_for(url).errors.typed(error) is None


MOUNTS = """\
/dev/root / ext4 rw,relatime 0 0
server:/home /mnt/shared\\040data {kind} rw,vers=4.2 0 0
tmpfs /mnt/shared\\040data/local tmpfs rw 0 0
/dev/root /mnt/replay.db ext4 rw,relatime 0 0
"""


@pytest.fixture
def list_mounts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the list of mounts; the filesystem at `/mnt/shared data` is of the given kind."""
    read_text = Path.read_text

    def list_them(kind: str) -> None:
        def read(path: Path, *arguments: Any, **options: Any) -> str:
            if path == Path("/proc/self/mounts"):
                return MOUNTS.format(kind=kind)
            return read_text(path, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", read)

    return list_them


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "ceph", "lustre", "fuse.sshfs"])
async def test_network_filesystems_are_refused(
    list_mounts: Callable[[str], None], kind: str
) -> None:
    list_mounts(kind)
    with pytest.raises(rdb.NotSupportedError, match=f"network filesystem .{kind}.*PostgreSQL"):
        await Store.open("sqlite:////mnt/shared data/run/replay.db")
    for local in ("/mnt/shared data/local/replay.db", "/mnt/other/replay.db"):
        await backend_for(f"sqlite:///{local}").schema.check_target()


async def test_a_file_that_is_a_mount_is_refused(list_mounts: Callable[[str], None]) -> None:
    """A container with `-v $PWD/replay.db:/mnt/replay.db` would keep the log for itself."""
    list_mounts("ext4")
    with pytest.raises(rdb.NotSupportedError, match="mounted as a single file"):
        await Store.open("sqlite:////mnt/replay.db")


async def test_a_file_with_two_names_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    """Two processes that open it by different names would not see each other's commits."""
    other = tmp_path / "other" / "replay.db"
    other.parent.mkdir()
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group("first"))
        os.link(sqlite_url.removeprefix("sqlite:///"), other)
        await buffer.put(group("second"))  # an open store has the log beside its own name
        with pytest.raises(rdb.NotSupportedError, match=r"2 names \(hard links\)"):
            await Store.open(f"sqlite:///{other}", run="b")
        assert [*other.parent.iterdir()] == [other]  # no log beside it
    other.unlink()
    async with Store.open(sqlite_url) as store:
        assert await (await store.buffer("math", create=False)).count() == 2
