"""Reads of payloads from SQLite: small ones with their rows, large ones as blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, Select, and_, case, column, func, select

from replaydb.database.runtime.prepared import execute, prepared
from replaydb.database.sqlite.driver import EagerConnection
from replaydb.database.statements.payload import NAME_OF_PACK
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import payload
from replaydb.util.memory import LEAST_BYTES


def read_payloads(connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of `payload` of groups, and the names of their packs as `pack`.

    SQLite assembles the value of a column from its pages, and the driver then copies it. A blob is
    copied only once, from the pages to its destination. For megabytes this takes a third of the
    time.
    """
    driver = cast("EagerConnection", connection.connection.driver_connection)
    rows = [row._asdict() for row in execute(connection, _select_small_payloads(ids))]
    for row in rows:
        rowid = row.pop("rowid_if_large")
        if rowid is not None:
            row["data"] = driver.read_blob(payload.name, payload.c.data.name, rowid)
    return rows


@prepared
def _select_small_payloads(ids: Any) -> Select[Any]:
    """Select the rows of `payload` of groups, without the data of large ones."""
    data = payload.c.data
    # A value of another type cannot be opened as a blob, and its length has another unit.
    is_large = and_(func.typeof(data) == "blob", func.length(data) >= LEAST_BYTES)
    return select(
        *[each for each in payload.c if each is not data],
        case((is_large, None), else_=data).label(data.name),
        case((is_large, column("rowid"))).label("rowid_if_large"),
        NAME_OF_PACK,
    ).where(among(payload.c.group_id, ids))
