"""The choice of the engine by the URL."""

from __future__ import annotations

from sqlalchemy import URL

from replaydb.database import urls
from replaydb.database.runtime.protocol import Backend, Durability
from replaydb.errors import InvalidURLError


def backend_for(
    url: str | URL,
    *,
    durability: Durability = "process",
    read_only: bool = False,
    pool_size: int | None = None,
) -> Backend:
    """Return the backend for a database URL, which need not name a driver.

    Raises:
        InvalidURLError: It is neither `sqlite:///FILE` nor `postgresql://...`.
    """
    # The module of an engine imports its dialect and driver, so only the one in use is imported.
    match urls.engine_of(url):
        case "sqlite":
            from replaydb.database.sqlite.backend import SqliteBackend

            return SqliteBackend(
                urls.sqlite_url(url), durability, read_only=read_only, pool_size=pool_size
            )
        case "postgresql" | "postgres":
            from replaydb.database.postgresql.backend import PostgresqlBackend

            return PostgresqlBackend(
                urls.PostgresqlURL.of(url), read_only=read_only, pool_size=pool_size
            )
        case other:
            raise InvalidURLError("url", urls.EXPECTED, f"engine {other!r}")
