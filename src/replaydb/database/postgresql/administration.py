"""What an administrator asks of a PostgreSQL database: health, sizes, roles, sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection, String, Text, cast, column, func, select, table
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import checkup, pooler, roles, sequences, standby
from replaydb.database.postgresql import instance as instances
from replaydb.database.postgresql.connections import CLIENT_NAME
from replaydb.database.postgresql.sql import command
from replaydb.database.runtime.protocol import Client
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import own_tables
from replaydb.domain.results import Finding
from replaydb.errors import DatabaseError
from replaydb.packs import Instance

if TYPE_CHECKING:
    from replaydb.database.postgresql.backend import PostgresqlBackend


_activity = table(
    "pg_stat_activity",
    column("application_name", String()),
    column("usename", String()),
    column("client_addr"),
    column("datname"),
    column("pid"),
)
_client = (
    _activity.c.application_name,
    _activity.c.usename,
    cast(_activity.c.client_addr, Text()).label("host"),
)
_clients = (
    select(*_client, func.count().label("number"))
    .where(
        _activity.c.datname == func.current_database(),
        _activity.c.application_name.startswith(CLIENT_NAME),
        _activity.c.pid != func.pg_backend_pid(),
    )
    .group_by(*_client)
    .order_by(*_client)
)


class PostgresqlAdministration:
    """Health, sizes, roles and sequences of a database."""

    def __init__(self, backend: PostgresqlBackend) -> None:
        self._backend = backend

    @property
    def roles(self) -> PostgresqlRoles:
        """Roles for users."""
        return PostgresqlRoles(self._backend)

    async def examine_connections(self, end: float) -> list[Finding]:
        """Check whether a pooler is in between, and whether the URL says so."""
        try:
            async with asyncio.timeout_at(end):
                return [await pooler.finding(self._backend.url)]
        except Exception as error:
            raise self._backend.errors.typed(error) or error from error

    def clients(self, session: Session) -> list[Client]:
        """Return the clients by the `application_name` of their connections, which is visible."""
        return [
            Client(
                row.application_name.removeprefix(CLIENT_NAME), row.usename, row.host, row.number
            )
            for row in session.core.execute(_clients)
        ]

    def examine(self, session: Session) -> list[Finding]:
        """Check the server, its settings and the state of the tables."""
        return list(checkup.findings(session.core))

    def replication_lag(self, session: Session) -> float | None:
        """Ask the server, which may be a standby."""
        return standby.lag(session.core)

    def damage(self, session: Session) -> list[tuple[str, str]]:
        """Return nothing: values match their types, and checks of pages need an extension."""
        return []

    async def size(self) -> int:
        """Return the size of the tables, with their indexes and TOAST tables."""
        sizes = (func.pg_total_relation_size(cast(name, REGCLASS)) for name in own_tables())
        async with self._backend.alone() as connection:
            [row] = await greenlet_spawn(connection.core.execute, select(*sizes))
        return sum(row)

    async def vacuum(self) -> None:
        """Rewrite table by table. Each is locked meanwhile."""
        async with self._backend.alone() as connection:
            await greenlet_spawn(self._vacuum, connection.core)

    def _vacuum(self, core: Connection) -> None:
        for name in own_tables():
            file = select(func.pg_relation_filenode(cast(name, REGCLASS)))
            before = core.scalar(file)
            core.execute(command("VACUUM (FULL, ANALYZE) {}", name))
            if core.scalar(file) == before:  # skipped, with only a warning
                raise DatabaseError(
                    f"{self._backend.shown}: the server does not let this user vacuum {name}: "
                    "that takes the owner of the table or of the database, or from "
                    "PostgreSQL 17 on MAINTAIN on the table (SQLSTATE 42501)"
                )

    def instance(self, session: Session) -> Instance:
        """Ask the server which database of which server it is, and on which timeline."""
        return instances.instance(session.core)

    last_ids = staticmethod(sequences.last_ids)
    advance_sequences = staticmethod(sequences.advance)


class PostgresqlRoles:
    """Roles for users."""

    def __init__(self, backend: PostgresqlBackend) -> None:
        self._backend = backend

    def statements(
        self, session: Session, prefix: str, tables: Sequence[str], *, apply: bool
    ) -> list[ExecutableDDLElement]:
        """Return the statements of `roles`."""
        if apply and (problem := roles.problem(session.core, prefix, tables)):
            raise DatabaseError(f"{self._backend.shown}: {problem}; nothing was changed")
        return list(roles.statements(session.core, prefix, tables))
