"""The mark of a database that is being copied into: nobody opens it until that is done."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection, Update, update

from replaydb.database import migrations, revisions
from replaydb.database.engines.protocol import Backend
from replaydb.database.repository.rows import first_in_use
from replaydb.database.schema import REVISIONS
from replaydb.errors import InvalidInputError, SchemaError


async def begin_copy(backend: Backend) -> str:
    """Let nobody open a database until `end_copy`: the tables of an empty one, which may be new.

    Whoever was copying into it can not go on.

    Returns:
        What stands in the place of the revision, for `check_copy`.

    Raises:
        InvalidInputError: There is something in it, and it is no copy that was not finished.
        SchemaError: As for `migrations.prepare`; or another version of replaydb began the copy.
        DatabaseError: The database cannot be reached, read or written.
    """
    found = await revisions.find(backend)
    if not revisions.is_copy(found.revision):
        try:
            await migrations.prepare(backend, migrate=found == revisions.NOTHING)
        except SchemaError as error:
            if not revisions.is_copy(error.current):  # which has begun just now, and ends here
                raise
    mark = f"{revisions.COPYING}{REVISIONS[-1]} {secrets.token_hex(8)}"  # alembic's column holds 32
    async with revisions.schema_transaction(backend) as connection:
        revision = await connection.scalar(revisions.version_query)
        if revision is not None and revisions.is_copy(revision):
            if revision.split()[1] != REVISIONS[-1]:
                what = "another version of replaydb has begun to copy into it"
                raise SchemaError(f"{what}: remove it, and begin anew", revision, REVISIONS[-1])
        elif used := await connection.run_sync(first_in_use):
            expected = "an empty database, or a copy that was not finished"
            if backend.file is None:
                how = "name another database, or empty this one with `replaydb db downgrade base`"
            else:
                how = "name a new file, or delete this one first"
            actual = f"a store in use, with rows in the table {used}; {how}"
            raise InvalidInputError("target", expected, actual)
        await connection.execute(_set_revision(mark))
    return mark


async def end_copy(backend: Backend, mark: str) -> None:
    """Let everybody open what was copied.

    Raises:
        SchemaError: Another copy has begun since.
        DatabaseError: The database cannot be reached or written.
    """
    async with revisions.schema_transaction(backend) as connection:
        await connection.run_sync(lambda sync: check_copy(backend, sync, mark))
        await connection.execute(_set_revision(REVISIONS[-1]))


def check_copy(backend: Backend, connection: Connection, mark: str) -> None:
    """In every transaction that copies: no other copy has begun, nor does before its end.

    Raises:
        SchemaError: One has.
    """
    backend.share_schema(connection)
    revision = connection.scalar(revisions.version_query)
    if revision != mark:
        what = "another copy into it has taken over: only the one that began last goes on"
        raise SchemaError(f"{backend.shown}: {what}", revision, mark)


def check_no_copy(connection: Connection) -> None:
    """Raise if the database, which was empty when it was opened, is being copied into.

    Raises:
        SchemaError: It is.
    """
    revision = connection.scalar(revisions.version_query)
    if revisions.is_copy(revision):
        raise revisions.unfinished_copy(revision)


def _set_revision(revision: str) -> Update:
    return update(revisions.version_table).values(version_num=revision)
