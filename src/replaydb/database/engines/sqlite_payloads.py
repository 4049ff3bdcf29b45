"""Payloads from a SQLite file: small ones with their rows, large ones as blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, Select, and_, case, column, func, select

from replaydb.database.engines.sqlite_driver import EagerConnection
from replaydb.database.expressions import among
from replaydb.database.prepared import execute, prepared
from replaydb.database.schema import payload
from replaydb.memory import LEAST_BYTES


def read_payloads(connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of `payload` of some groups.

    The driver makes each value anew, after SQLite has put it together from its pages: megabytes
    take a third of the time as blobs, which are copied from the pages to where they stay.
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
    """Parts of the payloads of some groups; of large ones all but their data."""
    data = payload.c.data
    # Of what is no blob the length says nothing, and it can not be opened as one.
    is_large = and_(func.typeof(data) == "blob", func.length(data) >= LEAST_BYTES)
    return select(
        *[each for each in payload.c if each is not data],
        case((is_large, None), else_=data).label(data.name),
        case((is_large, column("rowid"))).label("rowid_if_large"),
    ).where(among(payload.c.group_id, ids))
