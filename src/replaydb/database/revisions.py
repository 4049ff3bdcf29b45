"""What a database says of itself: the revision of its tables, and whether it may be opened.

Without alembic, as every opening of a store looks at it.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from sqlalchemy import String, column, inspect, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines.protocol import Backend
from replaydb.database.schema import REVISIONS, metadata
from replaydb.errors import ReplayDBError, SchemaError, SchemaOutOfDateError, SchemaTooNewError

#: Private: another user of alembic in the same database keeps its own.
VERSION_TABLE = "replaydb_alembic_version"

#: Before the revision of a database that is being copied into, with a token of that copy after it:
#: nobody opens it until that is done.
COPYING = "copying "

revision_column = column("version_num", String())
version_table = table(VERSION_TABLE, revision_column)
version_query = select(revision_column).select_from(version_table)


@dataclass(frozen=True, slots=True)
class Found:
    """What a database holds: the revision, and tables other than alembic's."""

    revision: str | None
    tables: frozenset[str]


NOTHING = Found(None, frozenset())


async def find(backend: Backend) -> Found:
    """One small query where all is well."""
    if not backend.read_only and backend.is_new_file():
        return NOTHING  # connecting would write the header
    async with reading(backend) as connection:
        with suppress(DBAPIError):  # most likely no such table: the longer way tells
            revision = await connection.scalar(version_query)
            if revision is not None:
                return Found(revision, frozenset())
        await connection.rollback()
        return await look(connection)


async def look(connection: AsyncConnection) -> Found:
    """The longer way, which does not need there to be anything."""
    names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    revision = await connection.scalar(version_query) if VERSION_TABLE in names else None
    return Found(revision, frozenset(names) - {VERSION_TABLE})


def problem_of(backend: Backend, found: Found) -> SchemaError | None:
    """Why this version cannot work with it; `SchemaOutOfDateError` where an upgrade helps."""
    newest = REVISIONS[-1]
    if found.revision == newest:
        return None
    if found.revision is None:
        ours = sorted(found.tables & metadata.tables.keys())
        if ours:
            return SchemaError(
                f"there are tables already, without the mark of a migration ({VERSION_TABLE}), "
                f"of the same names as ours: {', '.join(ours)}; use another database",
                None,
                newest,
            )
        what = "there are no tables yet"
    elif is_copy(found.revision):
        return unfinished_copy(found.revision)
    elif found.revision in REVISIONS:
        what = f"the tables are of revision {found.revision}, {newest} is needed"
    else:
        return SchemaTooNewError(
            f"the tables are of revision {found.revision}, made by a newer replaydb: "
            f"this one knows no revision after {newest}; upgrade the package",
            found.revision,
            newest,
        )
    # Made to be pasted: with a password that is not shown, the URL has to come from elsewhere.
    if ":***" in backend.shown:
        how = f"with the URL of {backend.shown} in REPLAYDB_URL, run: replaydb db upgrade"
    else:
        how = f"run: replaydb db upgrade --url {shlex.quote(backend.shown)}"
    return SchemaOutOfDateError(f"{what}; {how}", found.revision, newest)


def is_copy(revision: str | None) -> bool:
    """Whether it is the mark of a copy that is not finished."""
    return revision is not None and revision.startswith(COPYING)


def unfinished_copy(revision: str | None) -> SchemaError:
    """What whoever opens such a copy is told."""
    what = "it is a copy that was not finished: run `replaydb copy` again, or remove it"
    return SchemaError(what, revision, REVISIONS[-1])


@asynccontextmanager
async def schema_transaction(backend: Backend) -> AsyncIterator[AsyncConnection]:
    """One transaction in which tables may be changed, by one process at a time.

    Raises:
        DatabaseError: The database refused, or rows would refer to rows that are gone.
    """
    await backend.check_target()
    engine = backend.migration_engine()
    try:
        async with _translating(backend), engine.begin() as connection:
            await backend.lock_schema(connection)
            yield connection
            await backend.check_integrity(connection)
    finally:
        await engine.dispose()


@asynccontextmanager
async def reading(backend: Backend) -> AsyncIterator[AsyncConnection]:
    """A connection that only reads."""
    engine = backend.reader_engine()
    try:
        async with _translating(backend), engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def _translating(backend: Backend) -> AsyncIterator[None]:
    try:
        yield
    except ReplayDBError:
        raise
    except Exception as error:
        typed = backend.translate(error)
        if typed is None:
            raise
        raise typed from error
