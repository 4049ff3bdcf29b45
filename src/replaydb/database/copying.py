"""The mark of the target of a copy, which cannot be opened until the copy is complete."""

from __future__ import annotations

import secrets

from sqlalchemy import Update, update

from replaydb.database import migrations
from replaydb.database.repository.row_differences import first_in_use
from replaydb.database.runtime import revisions
from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import REVISIONS
from replaydb.errors import InvalidInputError, SchemaError


async def begin_copy(backend: Backend) -> str:
    """Mark an empty database as the target of a copy, and create its tables if it is new.

    No store can be opened on it until `end_copy`. An earlier copy into it cannot continue.

    Returns:
        The mark, which is stored instead of the revision; for `check_copy`.

    Raises:
        InvalidInputError: The database is in use, and is not an unfinished copy.
        SchemaError: As for `migrations.prepare`; or another version of replaydb began the copy.
        DatabaseError: The database cannot be reached, read or written.
    """
    found = await revisions.find(backend)
    if not revisions.is_copy(found.revision):
        try:
            await migrations.prepare(
                backend,
                migrate=found == revisions.NOTHING,
                knows_all="nothing can be copied into them",
            )
        except SchemaError as error:
            if not revisions.is_copy(error.current):  # another copy began meanwhile: replace it
                raise
    mark = f"{revisions.COPYING}{REVISIONS[-1]} {secrets.token_hex(8)}"  # at most 32 characters

    def work(session: Session) -> None:
        revision = revisions.revision_in(session)
        if revision is not None and revisions.is_copy(revision):
            if revision.split()[1] != REVISIONS[-1]:
                what = "another version of replaydb has begun to copy into this database"
                how = "delete the database, and start the copy again"
                raise SchemaError(f"{what}; {how}", revision, REVISIONS[-1])
        elif used := first_in_use(session):
            expected = "an empty database, or an unfinished copy"
            if backend.schema.file is None:
                how = "name another database, or empty this one with `replaydb db downgrade base`"
            else:
                how = "name a new file, or delete this one first"
            actual = f"a store in use, with rows in the table {used}; {how}"
            raise InvalidInputError("target", expected, actual)
        session.run(_set_revision(mark))

    await backend.schema.change(work)
    return mark


async def end_copy(backend: Backend, mark: str) -> None:
    """Remove the mark, so that stores can be opened on the database.

    Raises:
        SchemaError: Another copy has begun since.
        DatabaseError: The database cannot be reached or written.
    """

    def work(session: Session) -> None:
        check_copy(backend, session, mark)
        session.run(_set_revision(REVISIONS[-1]))

    await backend.schema.change(work)


def check_copy(backend: Backend, session: Session, mark: str) -> None:
    """Check that no other copy has begun, and let none begin before the transaction ends.

    Every transaction of a copy calls this first.

    Raises:
        SchemaError: Another copy has begun.
    """
    backend.schema.share(session)
    revision = revisions.revision_in(session)
    if revision != mark:
        what = "another copy into it has begun since; only the one that began last can continue"
        raise SchemaError(f"{backend.shown}: {what}", revision, mark)


def _set_revision(revision: str) -> Update:
    return update(revisions.version_table).values(version_num=revision)
