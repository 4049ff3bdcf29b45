"""SQLite files that are deleted, replaced, truncated or overwritten while a writer is active.

The writer is a separate process, and is killed afterwards. Every put that it reported as stored
must be found when the files are opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import replaydb as rdb
from replaydb import Store, operations
from support.groups import group
from support.workers import Worker, workers

#: The results of a writer's puts: the uid, and the error if there was one.
Results = list[tuple[str, str | None]]


def _write(url: str, pipe: Connection) -> None:
    """Put groups with the received uids until None is received. Then close the store."""

    async def live() -> None:
        async with Store.open(url, run="writer") as store:
            buffer = await store.buffer("math")
            while (uids := pipe.recv()) is not None:
                results: Results = []
                for uid in uids:
                    try:
                        await buffer.put(group(uid))
                        results.append((uid, None))
                    except rdb.ReplayDBError as error:
                        results.append((uid, f"{type(error).__name__}: {error}"))
                pipe.send(results)
        pipe.send("closed")

    asyncio.run(live())


class Writer:
    """A process that has the store open."""

    def __init__(self, url: str) -> None:
        self._pipe, theirs = Pipe()
        self.worker = Worker(_write, url, theirs)

    async def put(self, *uids: str) -> Results:
        self._pipe.send(uids)
        return await asyncio.to_thread(self._pipe.recv)

    async def close(self) -> None:
        self._pipe.send(None)
        assert await asyncio.to_thread(self._pipe.recv) == "closed"

    async def kill(self) -> None:
        self.worker.kill()
        await self.worker.ended()


@asynccontextmanager
async def writer(path: Path) -> AsyncIterator[Writer]:
    one = Writer(f"sqlite:///{path}")
    with workers(one.worker):
        yield one


async def _stored(path: Path) -> set[str]:
    async with Store.open(f"sqlite:///{path}") as store:
        buffer = await store.buffer("math", create=False)
        await buffer.put(group())  # the store is writable
        return {one.group_uid for one in await buffer.find(limit=1000)}


async def _fill(path: Path, *uids: str) -> None:
    """Put groups. The close moves them from the log into the database file."""
    async with Store.open(f"sqlite:///{path}", run="first") as store:
        await (await store.buffer("math")).put([group(uid) for uid in uids])


@pytest.fixture
async def path(sqlite_url: str) -> Path:
    """A closed database with one group."""
    found = Path(sqlite_url.removeprefix("sqlite:///"))
    await _fill(found, "first")
    return found


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of another store."""
    made = tmp_path_factory.mktemp("another") / "another.db"
    asyncio.run(_fill(made, "theirs"))
    return made


def _delete(*endings: str) -> Callable[[Path], None]:
    def happens(path: Path) -> None:
        for ending in endings:
            path.with_name(path.name + ending).unlink()

    return happens


def _replace(ending: str) -> Callable[[Path], None]:
    def happens(path: Path) -> None:
        file = path.with_name(path.name + ending)
        file.rename(path.with_suffix(".old"))
        shutil.copy(path.with_suffix(".old"), file)

    return happens


def _cut(ending: str, keep: float) -> Callable[[Path], None]:
    def happens(path: Path) -> None:
        file = path.with_name(path.name + ending)
        os.truncate(file, int(keep * file.stat().st_size))

    return happens


def _overwrite(other: str) -> Callable[[Path], None]:
    def happens(path: Path) -> None:
        shutil.copyfile(path.with_name(other), path)

    return happens


def _size(path: Path) -> int:
    return path.stat().st_size


def _spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(100))


@pytest.mark.parametrize(
    ("happens", "message", "is_kept"),
    [
        pytest.param(_delete("-wal"), "earlier commits are safe", True, id="wal deleted"),
        pytest.param(_delete("-shm"), "-shm was deleted", True, id="shm deleted"),
        pytest.param(_delete("-wal", "-shm"), "-wal was deleted", None, id="both deleted"),
        pytest.param(_replace("-wal"), "-wal was deleted", True, id="wal replaced"),
        pytest.param(_replace("-shm"), "-shm was deleted", True, id="shm replaced"),
        pytest.param(_cut("-wal", 0), "-wal was truncated", None, id="wal emptied"),
        pytest.param(_cut("-wal", 0.9), "-wal was truncated", None, id="wal cut"),
        pytest.param(_cut("", 0), "overwritten or truncated", None, id="emptied"),
        pytest.param(_cut("", 0.9), "overwritten or truncated", None, id="cut"),
        pytest.param(_overwrite("another.db"), "overwritten", None, id="another database"),
        pytest.param(_overwrite("older.db"), "overwritten", None, id="an older copy"),
        pytest.param(_spoil, "overwritten", None, id="no database"),
    ],
)
async def test_changed_files_are_detected_before_a_commit(
    path: Path, another: Path, happens: Callable[[Path], None], message: str, is_kept: bool | None
) -> None:
    shutil.copy(another, path.with_name("another.db"))
    shutil.copy(path, path.with_name("older.db"))
    await _fill(path, "second")
    async with writer(path) as one:
        assert await one.put("third", "fourth") == [("third", None), ("fourth", None)]
        happens(path)
        answers = await one.put("fifth", "sixth", "seventh")
        await one.kill()
    assert all(error is not None for _, error in answers), answers
    kinds = {str(error).partition(":")[0] for _, error in answers}
    assert kinds <= {"DatabaseReplacedError", "DatabaseUnavailableError"}, answers
    assert message in str(answers[0][1])
    if is_kept is None:
        with contextlib.suppress(rdb.ReplayDBError):  # if unusable, the error is typed
            await _stored(path)
    else:
        found = await _stored(path)
        assert {"first", "second", "third", "fourth"} <= found
        assert not {"fifth", "sixth", "seventh"} & found


async def test_a_file_that_is_cut_after_a_checkpoint(path: Path) -> None:
    """It is still larger than before the last commit, which did a checkpoint."""
    before = _size(path)
    async with writer(path) as one:
        for number in itertools.count():
            await one.put(f"g{number}")
            if _size(path) > before:
                break
        os.truncate(path, (before + _size(path)) // 2)
        ((_, error),) = await one.put("refused")
        await one.kill()
    assert "overwritten or truncated" in str(error)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "closed"])
async def test_a_process_that_lost_its_files_does_not_change_new_ones(
    path: Path, is_killed: bool
) -> None:
    """A checkpoint of its old log would overwrite newer pages, and its close delete the new log."""
    async with writer(path) as one:
        await one.put("lost")
        _delete("-wal", "-shm")(path)
        async with writer(path) as other:
            assert await other.put("late") == [("late", None)]
            ((_, error),) = await one.put("refused")
            assert "another process has made a new one" in str(error)
            await (other.kill() if is_killed else other.close())
        await one.close()
    assert {"first", "late"} <= await _stored(path)


async def test_close_saves_commits_in_deleted_files(path: Path) -> None:
    async with writer(path) as one:
        await one.put("second")
        _delete("-wal", "-shm")(path)
        ((_, error),) = await one.put("refused")
        assert "when the store is closed" in str(error)
        await one.close()
    assert await _stored(path) >= {"first", "second"}


async def test_a_process_opens_a_database_again_while_it_keeps_the_error(path: Path) -> None:
    store = await Store.open(f"sqlite:///{path}", run="a")
    buffer = await store.buffer("math")
    await buffer.put(group("second"))
    _delete("-wal", "-shm")(path)
    with pytest.raises(rdb.DatabaseReplacedError, match="then open it again") as kept:
        await buffer.put(group("refused"))
    await store.close()
    assert await _stored(path) >= {"first", "second"}
    assert kept.tb is not None  # its frames refer to the lost files


async def test_a_backup_copied_beside_an_old_log_is_refused(path: Path) -> None:
    shutil.copy(path, path.with_name("older.db"))
    await _fill(path, "second")
    async with writer(path) as one:
        await one.put("third")
        await one.kill()  # leaves the log
    _overwrite("older.db")(path)
    # In another process, because this one would keep the file open.
    code = "import asyncio, sys; from replaydb import Store; asyncio.run(Store.open(sys.argv[1]))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, f"sqlite:///{path}"),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, problem = await process.communicate()
    assert "do not belong together" in problem.decode()


async def test_a_reader_detects_a_deleted_log(path: Path) -> None:
    async with Store.open(f"sqlite:///{path}", read_only=True) as store:
        buffer = await store.buffer("math", create=False)
        assert await buffer.count() == 1
        _delete("-wal")(path)
        with pytest.raises(rdb.DatabaseUnavailableError, match="-wal was deleted"):
            await buffer.count()


async def test_checkpoints_and_vacuums_of_others_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "replay.db"
    url = f"sqlite:///{path}"
    async with Store.open(url, run="a") as mine:
        buffer = await mine.buffer("math")
        async with writer(path) as theirs:
            for nth, what in enumerate(("PASSIVE", "FULL", "RESTART", "TRUNCATE", "VACUUM") * 2):
                await buffer.put(group(f"a{nth}"))
                assert await theirs.put(f"b{nth}") == [(f"b{nth}", None)]
                await buffer.delete([1 + 2 * nth])  # so that a vacuum has an effect
                with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as other:
                    other.execute(
                        what if what == "VACUUM" else f"PRAGMA wal_checkpoint({what})"
                    ).fetchall()
                await operations.vacuum(url)
            await theirs.close()
        assert await buffer.count() == 10


async def test_reading_headers_drops_no_locks(tmp_path: Path) -> None:
    """When a process closes any descriptor of a file, it loses all its locks on the file."""
    path = tmp_path / "replay.db"
    (tmp_path / "notes.txt").write_text("no database")
    async with Store.open(f"sqlite:///{path}", run="a") as store:
        await (await store.buffer("math")).put(group("mine"))
        with pytest.raises(rdb.DatabaseUnavailableError, match=r"its folder has replay\.db$"):
            await Store.open(f"sqlite:///{tmp_path / 'misspelt.db'}", migrate=False, read_only=True)
        async with writer(path) as other:  # without those locks it would be the last to close
            await other.put("theirs")
            await other.close()
        assert path.with_name("replay.db-wal").exists()
