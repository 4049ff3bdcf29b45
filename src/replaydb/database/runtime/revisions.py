"""The revision of the tables in a database, and whether this version can use them.

Every opening of a store reads it, so this module does not import alembic.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sqlalchemy import String, column, inspect, select, table

from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import REVISIONS, metadata
from replaydb.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    SchemaError,
    SchemaOutOfDateError,
    SchemaTooNewError,
)

#: A name of our own: another user of alembic in the same database has its own table.
VERSION_TABLE = "replaydb_alembic_version"

#: Prefix of the revision in the target of a copy, with a token of the copy after the revision. The
#: database cannot be opened until the copy is complete.
COPYING = "copying "

revision_column = column("version_num", String())
version_table = table(VERSION_TABLE, revision_column)
_select_revision = select(revision_column).select_from(version_table)


@dataclass(frozen=True, slots=True)
class Found:
    """The revision found in a database, and its tables other than alembic's."""

    revision: str | None
    tables: frozenset[str]


NOTHING = Found(None, frozenset())


async def find(backend: Backend) -> Found:
    """Read the revision of a database, with one small query if it has one."""
    if not backend.read_only and backend.schema.is_new_file():
        return NOTHING  # connecting would write the header
    try:
        if (revision := await backend.schema.read(revision_in)) is not None:
            return Found(revision, frozenset())
    except DatabaseUnavailableError:
        raise  # `inspect_schema` would connect again
    except DatabaseError:
        pass  # probably there is no such table
    return await backend.schema.read(inspect_schema)


def inspect_schema(session: Session) -> Found:
    """Read the revision and the tables of a database, which may be empty."""
    names = inspect(session.core).get_table_names()
    revision = revision_in(session) if VERSION_TABLE in names else None
    return Found(revision, frozenset(names) - {VERSION_TABLE})


def revision_in(session: Session) -> str | None:
    """Return the revision, or the mark of a copy. There must be a table for it."""
    rows = session.run(_select_revision)
    return rows[0].version_num if rows else None


def problem_of(backend: Backend, found: Found) -> SchemaError | None:
    """Return why this version cannot use the tables; `SchemaOutOfDateError` if an upgrade helps."""
    newest = REVISIONS[-1]
    if found.revision == newest:
        return None
    if found.revision is None:
        ours = sorted(found.tables & metadata.tables.keys())
        if ours:
            return SchemaError(
                "the database already has tables with replaydb's names that no migration has "
                f"created (there is no {VERSION_TABLE}): {', '.join(ours)}; use another database",
                None,
                newest,
            )
        what = "there are no tables yet"
    elif is_copy(found.revision):
        return unfinished_copy(found.revision)
    elif found.revision in REVISIONS:
        what = f"the tables are of revision {found.revision}, but {newest} is needed"
    else:
        return SchemaTooNewError(
            f"the tables are of revision {found.revision} of a newer replaydb: "
            f"this version knows none after {newest}; upgrade the package",
            found.revision,
            newest,
        )
    # The command can be pasted into a shell, unless the URL has a password, which is not shown.
    if ":***" in backend.shown:
        how = f"with the URL of {backend.shown} in REPLAYDB_URL, run: replaydb db upgrade"
    else:
        how = f"run: replaydb db upgrade --url {shlex.quote(backend.shown)}"
    return SchemaOutOfDateError(f"{what}; {how}", found.revision, newest)


def is_copy(revision: str | None) -> bool:
    """Whether a revision is the mark of an unfinished copy."""
    return revision is not None and revision.startswith(COPYING)


def unfinished_copy(revision: str | None) -> SchemaError:
    """Return the error of opening an unfinished copy."""
    what = (
        "the database is a copy that was not finished: run `replaydb copy` again, or delete the "
        "database"
    )
    return SchemaError(what, revision, REVISIONS[-1])
