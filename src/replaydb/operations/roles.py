"""Roles for those who put, train and look, with the least that each needs."""

from __future__ import annotations

from sqlalchemy import URL, Connection

from replaydb import checks
from replaydb.database import migrations, revisions
from replaydb.database.engines import backend_for
from replaydb.database.schema import metadata


async def roles(
    url: str | URL, *, prefix: str = "replaydb", apply: bool = False
) -> tuple[str, ...]:
    """Statements that make roles on PostgreSQL, or bring them in line: writer, trainer, analyst.

    Nobody logs in as one of them: `GRANT replaydb_writer TO alice` makes Alice a member.

    Args:
        url: Of the store, as a user who owns the tables, and may make roles if there are none yet.
        prefix: What the names begin with; roles belong to a server, not to a database.
        apply: Run them, in one transaction; by default they are only returned.

    Raises:
        NotSupportedError: A file has no roles.
        SchemaError: The tables are not those of this version.
        DatabaseError: The database refused; nothing was changed.
    """
    name = checks.name("prefix", prefix)
    run = checks.flag("apply", apply)
    backend = backend_for(url)
    tables = [*sorted(metadata.tables), revisions.VERSION_TABLE]

    def work(connection: Connection) -> tuple[str, ...]:
        found = backend.role_statements(connection, name, tables)
        if run:
            for statement in found:
                connection.execute(statement)
        return tuple(str(one.compile(dialect=connection.dialect)).strip() for one in found)

    backend.check_roles()
    await migrations.prepare(backend, migrate=False)
    async with revisions.schema_transaction(backend) as connection:
        return await connection.run_sync(work)
