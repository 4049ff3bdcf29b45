"""Alembic environment: the connection that migrations run on.

If alembic is called from code, this is the given connection. If it is called as `alembic ...` in a
checkout, a connection is made from `-x url=...`, else REPLAYDB_URL, else the url in alembic.ini.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.config import fileConfig

import sqlalchemy as sa
from alembic import context
from alembic.util import CommandError

from replaydb.database.engines import backend_for
from replaydb.database.migrations import alembic_options
from replaydb.database.runtime import revisions

_sequences = sa.table("sqlite_sequence", sa.column("name"), sa.column("seq"))


def run(connection: sa.Connection) -> None:
    context.configure(connection=connection, **alembic_options())
    before = revisions.write_format_in(connection)
    if connection.dialect.name == "sqlite":
        with _tables_rebuildable(connection):
            context.run_migrations()
    else:
        context.run_migrations()
    revisions.record(connection, before)


async def run_alone() -> None:
    options = context.get_x_argument(as_dictionary=True)
    url = (
        options.get("url")
        or os.environ.get("REPLAYDB_URL")
        or context.config.get_main_option("sqlalchemy.url")
    )
    if not url:
        raise CommandError(
            "no database URL: pass -x url=..., or set REPLAYDB_URL or sqlalchemy.url in alembic.ini"
        )
    await backend_for(url).schema.change(lambda session: run(session.core), create=True)


@contextmanager
def _tables_rebuildable(connection: sa.Connection) -> Iterator[None]:
    """Keep views and sequences when `batch_alter_table` copies a table and renames the copy.

    The rename fails on views of the dropped table, unless SQLite renames as before 3.25. The copy
    continues AUTOINCREMENT from its largest id, so ids of deleted groups, which draws still refer
    to, would be generated again.
    """
    connection.execute(sa.text("PRAGMA legacy_alter_table = ON"))
    before = _last_ids(connection)
    yield
    after = _last_ids(connection)
    for table, last in before.items():
        if after.get(table, 0) < last and sa.inspect(connection).has_table(table):
            connection.execute(sa.delete(_sequences).where(_sequences.c.name == table))
            connection.execute(sa.insert(_sequences).values(name=table, seq=last))


def _last_ids(connection: sa.Connection) -> dict[str, int]:
    if not sa.inspect(connection).has_table("sqlite_sequence"):
        return {}
    rows = connection.execute(sa.select(_sequences.c.name, _sequences.c.seq))
    return {name: last for name, last in rows}


if context.is_offline_mode():
    raise CommandError("--sql is not supported: migrations read the database that they change")
given_connection = context.config.attributes.get("connection")
if given_connection is not None:
    run(given_connection)
else:
    if context.config.config_file_name is not None:
        fileConfig(context.config.config_file_name, disable_existing_loggers=False)
    asyncio.run(run_alone())
