"""Opening a store whose tables are missing, out of date, too new, or not replaydb's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, delete, event, inspect, text, update

from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.tables.schema import REVISIONS, compatibility, episode_group
from replaydb.errors import (
    ClientTooOldError,
    DatabaseUnavailableError,
    InvalidInputError,
    SchemaError,
    SchemaOutOfDateError,
)
from support.connections import transaction
from support.revisions import NEXT, release_next

CHOICES = [None, True, False]


def _path(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


async def _tables(url: str) -> list[str]:
    async with transaction(url) as connection:
        return await connection.run_sync(lambda sync: inspect(sync).get_table_names())


async def _set_revision(url: str, revision: str) -> None:
    async with transaction(url) as connection:
        await connection.execute(
            text("UPDATE replaydb_alembic_version SET version_num = :revision"),
            {"revision": revision},
        )


async def test_current_tables_take_one_query(url: str) -> None:
    for choice in CHOICES:
        with _recorded() as queries:
            await migrations.prepare(backend_for(url), migrate=choice)
        assert len(queries) == 1, choice


@contextmanager
def _recorded() -> Iterator[list[str]]:
    """Record the statements that SQLAlchemy runs: all but prepared ones of SQLite."""
    queries: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        queries.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    yield queries
    event.remove(Engine, "before_cursor_execute", record)


@pytest.mark.parametrize("choice", [None, True])
@pytest.mark.parametrize("exists", [False, True])
async def test_a_new_file_gets_its_tables(
    empty_sqlite_url: str, choice: bool | None, exists: bool
) -> None:
    if exists:
        _path(empty_sqlite_url).touch()
    await migrations.prepare(backend_for(empty_sqlite_url), migrate=choice)
    assert await migrations.check(empty_sqlite_url) == ()


async def test_a_file_without_tables_is_treated_as_new(sqlite_url: str) -> None:
    await migrations.downgrade(sqlite_url, "base")
    await migrations.prepare(backend_for(sqlite_url), migrate=None)
    assert await migrations.check(sqlite_url) == ()


async def test_migrate_false_does_not_create_the_file(empty_sqlite_url: str) -> None:
    path = _path(empty_sqlite_url)
    with pytest.raises(DatabaseUnavailableError, match="there is no such file"):
        await migrations.prepare(backend_for(empty_sqlite_url), migrate=False)
    assert not path.exists()
    path.touch()
    with pytest.raises(SchemaOutOfDateError, match="there are no tables yet"):
        await migrations.prepare(backend_for(empty_sqlite_url), migrate=False)
    assert path.stat().st_size == 0


async def test_a_downgrade_does_not_create_the_file(empty_sqlite_url: str) -> None:
    for revision in "base", "-1", "0001":
        with pytest.raises(DatabaseUnavailableError, match="there is no such file"):
            await migrations.downgrade(empty_sqlite_url, revision)
    assert not _path(empty_sqlite_url).exists()


async def test_an_upgrade_without_a_step_does_not_create_the_file(empty_sqlite_url: str) -> None:
    for revision in "0099", "+99", "-1":
        with pytest.raises(InvalidInputError, match="replaydb db history"):
            await migrations.upgrade(empty_sqlite_url, revision)
    with pytest.raises(DatabaseUnavailableError, match="there is no such file"):
        await migrations.upgrade(empty_sqlite_url, "base")
    assert not _path(empty_sqlite_url).exists()


async def test_a_file_of_another_program_needs_migrate_true(empty_sqlite_url: str) -> None:
    async with transaction(empty_sqlite_url) as connection:
        await connection.execute(text("CREATE TABLE notes (id INTEGER PRIMARY KEY)"))
    with pytest.raises(SchemaOutOfDateError):
        await migrations.prepare(backend_for(empty_sqlite_url), migrate=None)
    assert await _tables(empty_sqlite_url) == ["notes"]
    await migrations.prepare(backend_for(empty_sqlite_url), migrate=True)
    assert await migrations.check(empty_sqlite_url) == ()


async def test_a_server_gets_tables_only_with_migrate_true(empty_postgresql_url: str) -> None:
    for choice in (None, False):
        with pytest.raises(SchemaOutOfDateError, match="there are no tables yet") as refused:
            await migrations.prepare(backend_for(empty_postgresql_url), migrate=choice)
        assert (refused.value.current, refused.value.expected) == (None, REVISIONS[-1])
    assert await _tables(empty_postgresql_url) == []
    await migrations.prepare(backend_for(empty_postgresql_url), migrate=True)
    assert await migrations.check(empty_postgresql_url) == ()


async def test_old_tables_are_refused_with_the_command_to_run(
    own_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_next(tmp_path, monkeypatch, "pass")
    for choice in (None, False):
        with pytest.raises(SchemaOutOfDateError) as refused:
            await migrations.prepare(backend_for(own_url), migrate=choice)
        message, _, command = str(refused.value).partition("; run: ")
        assert message == f"the tables are of revision {REVISIONS[-1]}, but {NEXT} is needed"
        *words, url = shlex.split(command)
        assert words == ["replaydb", "db", "upgrade", "--url"]
    await migrations.upgrade(url)
    assert await migrations.current(own_url) == NEXT


async def test_migrate_true_upgrades_old_tables(
    own_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_next(tmp_path, monkeypatch, "pass")
    await migrations.prepare(backend_for(own_url), migrate=True)
    assert await migrations.current(own_url) == NEXT


async def test_newer_tables_are_refused(own_url: str) -> None:
    await _set_revision(own_url, "9999")
    async with transaction(own_url) as connection:
        await connection.execute(update(compatibility).values(min_client="1.10.0"))
    message = r"needs replaydb 1\.10\.0 or later.*run: pip install --upgrade 'replaydb>=1\.10\.0'"
    for choice in CHOICES:
        with pytest.raises(ClientTooOldError, match=message) as refused:
            await migrations.prepare(backend_for(own_url), migrate=choice)
        assert refused.value.current == "9999"
    for change in (migrations.upgrade(own_url), migrations.downgrade(own_url, "base")):
        with pytest.raises(ClientTooOldError):
            await change
    assert await migrations.current(own_url) == "9999"


async def test_tables_of_a_newer_revision_that_only_adds_are_used(own_url: str) -> None:
    await _set_revision(own_url, "9999")
    index = next(iter(episode_group.indexes)).name
    async with transaction(own_url) as connection:  # which the newer version has replaced
        await connection.execute(text(f"DROP INDEX {index}"))
    for choice in CHOICES:
        await migrations.prepare(backend_for(own_url), migrate=choice)
    await migrations.upgrade(own_url)  # nothing that this version could do
    async with transaction(own_url) as connection:
        found = await connection.run_sync(lambda it: inspect(it).get_indexes(episode_group.name))
    assert index not in [one["name"] for one in found]
    for call in (
        migrations.upgrade(own_url, "+1"),
        migrations.downgrade(own_url, "base"),
        migrations.check(own_url),
        migrations.write_format(own_url, 1),
        migrations.prepare(backend_for(own_url), migrate=False, knows_all="they cannot be copied"),
    ):
        with pytest.raises(ClientTooOldError, match=r"9999 of a newer replaydb.*knows none after"):
            await call
    assert await migrations.current(own_url) == "9999"


async def test_a_different_revision_is_refused(own_url: str) -> None:
    """Without the row that says who may use the tables."""
    await _set_revision(own_url, "9999")
    async with transaction(own_url) as connection:
        await connection.execute(delete(compatibility))
    with pytest.raises(ClientTooOldError, match="of a newer or different replaydb"):
        await migrations.prepare(backend_for(own_url), migrate=None)


async def test_unknown_tables_with_our_names_are_refused(empty_url: str) -> None:
    async with transaction(empty_url) as connection:
        await connection.execute(text("CREATE TABLE run (id INTEGER PRIMARY KEY)"))
    for choice in CHOICES:
        with pytest.raises(SchemaError, match=r"with replaydb's names .*: run; use another"):
            await migrations.prepare(backend_for(empty_url), migrate=choice)
    with pytest.raises(SchemaError, match="with replaydb's names"):
        await migrations.upgrade(empty_url)
    assert await _tables(empty_url) == ["run"]


async def test_current_does_not_create_a_file(empty_sqlite_url: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="there is no such file"):
        await migrations.current(empty_sqlite_url)
    assert not _path(empty_sqlite_url).exists()
