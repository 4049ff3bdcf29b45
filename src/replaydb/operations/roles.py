"""Least-privilege PostgreSQL roles for writers, trainers and analysts."""

from __future__ import annotations

from sqlalchemy import URL

from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.runtime import revisions
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import metadata
from replaydb.domain import checks
from replaydb.errors import NotSupportedError


async def roles(
    url: str | URL, *, prefix: str = "replaydb", apply: bool = False
) -> tuple[str, ...]:
    """Return or run statements that create or update the roles writer, trainer and analyst.

    The roles cannot log in. Make users members of them: `GRANT replaydb_writer TO alice`.

    Args:
        url: URL of the store, for a user that owns the tables and, if the roles do not exist yet,
            may create roles.
        prefix: Prefix of the role names. Roles belong to a server, not to a database, so several
            stores on one server need different prefixes.
        apply: Run the statements in one transaction. By default, they are only returned.

    Returns:
        The SQL statements.

    Raises:
        NotSupportedError: The store is a SQLite file, which has no roles.
        SchemaError: The tables are not those of this version.
        DatabaseError: With `apply`, the user does not own the tables, or may not grant the use of
            their schema; or a statement failed. Nothing was changed.
    """
    name = checks.name("prefix", prefix)
    run = checks.flag("apply", apply)
    backend = backend_for(url)
    tables = [*sorted(metadata.tables), revisions.VERSION_TABLE]

    own = backend.administration.roles
    if own is None:
        raise NotSupportedError(
            f"{backend.shown}: SQLite has no roles; set the permissions of the file, or open it "
            "with Store.open(url, read_only=True)"
        )

    def work(session: Session) -> tuple[str, ...]:
        found = own.statements(session, name, tables, apply=run)
        if run:
            for statement in found:
                session.core.execute(statement)
        return tuple(str(one.compile(dialect=session.core.dialect)).strip() for one in found)

    await migrations.prepare(
        backend, migrate=False, knows_all="the privileges on them are not known"
    )
    return await backend.schema.change(work)
