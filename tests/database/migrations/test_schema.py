"""The schema that migrations create is the one that the metadata defines."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from replaydb.database import migrations
from replaydb.database.tables.schema import REVISIONS, metadata
from replaydb.errors import ClientTooOldError, SchemaOutOfDateError
from support.connections import transaction
from support.snapshot import Snapshot, take_snapshot


async def _snapshot(url: str) -> Snapshot:
    async with transaction(url) as connection:
        return await take_snapshot(connection)


async def test_migrations_create_the_schema_of_the_metadata(
    empty_url: str, engine_name: str
) -> None:
    async with transaction(empty_url) as connection:
        await connection.run_sync(metadata.create_all)
        expected = await take_snapshot(connection)
        await connection.run_sync(metadata.drop_all)
    await migrations.upgrade(empty_url)
    made = await _snapshot(empty_url)
    if engine_name == "postgresql":
        # The only thing that metadata cannot express: payloads are not compressed.
        assert _storage(made) == "e"
        assert _storage(expected) == "x"
        made["columns"] = _without_payload_data(made)
        expected["columns"] = _without_payload_data(expected)
    assert made == expected


def _is_payload_data(column: tuple[object, ...]) -> bool:
    return column[:2] == ("payload", "data")


def _storage(snapshot: Snapshot) -> object:
    (column,) = filter(_is_payload_data, snapshot["columns"])
    return column[5]


def _without_payload_data(snapshot: Snapshot) -> list[tuple[object, ...]]:
    return [column for column in snapshot["columns"] if not _is_payload_data(column)]


async def test_engine_specific_options(url: str, engine_name: str) -> None:
    snapshot = await _snapshot(url)
    if engine_name == "postgresql":
        options = {name: found for name, _, *found in snapshot["tables"]}
        assert options["episode_group"] == [["fillfactor=70"], None]
        at_once = ["autovacuum_vacuum_cost_delay=0"]
        assert options["payload"] == options["transcript"] == [at_once, at_once]
        definitions = {name: str(definition) for _, name, definition in snapshot["indexes"]}
        assert " USING brin (buffer_id, staleness)" in definitions["ix_episode_group_staleness"]
        assert definitions["ix_episode_group_lease_id"].endswith("WHERE (lease_id IS NOT NULL)")
    else:
        tables = {str(name): (tail, clauses) for name, _, _, tail, *clauses in snapshot["table"]}
        without_rowid = {name for name, (tail, _) in tables.items() if tail == "WITHOUT ROWID"}
        assert without_rowid == {
            *("episode", "draw_group", "cursor", "group_tag", "annotation", "trajectory", "turn")
        }
        counted = {name for name, (_, clauses) in tables.items() if "AUTOINCREMENT" in str(clauses)}
        assert counted == {"run", "buffer", "task", "lease", "episode_group", "draw", "pack"}


async def test_every_revision_can_be_downgraded(empty_url: str) -> None:
    made: list[Snapshot] = []
    for revision in REVISIONS:
        await migrations.upgrade(empty_url, revision)
        made.append(await _snapshot(empty_url))
    for revision, expected in list(zip(REVISIONS, made, strict=True))[-2::-1]:
        await migrations.downgrade(empty_url, revision)
        assert await _snapshot(empty_url) == expected
    await migrations.downgrade(empty_url, "base")
    assert not any((await _snapshot(empty_url)).values())
    assert await migrations.current(empty_url) is None
    await migrations.upgrade(empty_url)
    assert await _snapshot(empty_url) == made[-1]
    assert await migrations.current(empty_url) == REVISIONS[-1]


def test_revisions_match_the_folder() -> None:
    assert tuple(revision.id for revision in migrations.history()) == REVISIONS


async def test_check_finds_manual_changes(own_url: str) -> None:
    changes = {
        "DROP INDEX ix_draw_step": "add index ix_draw_step",
        "CREATE INDEX mine ON draw (policy)": "remove index mine",
        "ALTER TABLE draw ADD COLUMN colour TEXT": "remove column draw.colour",
        "DROP VIEW task_overview": "add view task_overview",
        "DROP TABLE cursor": "add table cursor",
    }
    async with transaction(own_url) as connection:
        for change in changes:
            await connection.execute(text(change))
    assert set(await migrations.check(own_url)) >= set(changes.values())


async def test_check_finds_a_view_with_other_columns(own_url: str) -> None:
    async with transaction(own_url) as connection:
        await connection.execute(text("DROP VIEW task_overview"))
        await connection.execute(text("CREATE VIEW task_overview AS SELECT task_name FROM task"))
    assert await migrations.check(own_url) == (
        "modify view task_overview: other columns than expected",
    )


async def test_check_finds_a_changed_column(own_postgresql_url: str) -> None:
    async with transaction(own_postgresql_url) as connection:
        await connection.execute(text("ALTER TABLE lease ALTER COLUMN owner DROP NOT NULL"))
    assert await migrations.check(own_postgresql_url) == (
        "modify nullable lease.owner: True, expected False",
    )


async def test_check_ignores_other_tables(empty_url: str) -> None:
    async with transaction(empty_url) as connection:
        await connection.execute(text("CREATE TABLE alembic_version (version_num TEXT)"))
        await connection.execute(text("CREATE TABLE experiments (id INTEGER PRIMARY KEY)"))
    await migrations.upgrade(empty_url)
    assert await migrations.check(empty_url) == ()


async def test_check_requires_the_newest_revision(empty_url: str) -> None:
    async with transaction(empty_url):
        pass  # an empty database
    with pytest.raises(SchemaOutOfDateError):
        await migrations.check(empty_url)
    await migrations.upgrade(empty_url)
    async with transaction(empty_url) as connection:
        await connection.execute(text("UPDATE replaydb_alembic_version SET version_num = '9999'"))
    with pytest.raises(ClientTooOldError):
        await migrations.check(empty_url)
