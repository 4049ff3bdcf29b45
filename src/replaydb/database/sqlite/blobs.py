"""Reads of payloads from SQLite: small ones with their rows, large ones as blobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, and_, case, column, func, select

from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.payload import NAME_OF_PACK
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import payload
from replaydb.util.memory import LEAST_BYTES, take

#: Bytes of a blob that are read at once: few enough to be still in the processor's cache when they
#: are copied to their destination.
BLOB_CHUNK = 1 << 16


def read_payloads(
    session: Session, driver: sqlite3.Connection, ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the rows of `payload` of groups, and the names of their packs as `pack`.

    SQLite assembles the value of a column from its pages, and the driver then copies it. A blob is
    copied only once, from the pages to its destination. For megabytes this takes a third of the
    time.
    """
    rows = [row._asdict() for row in session.run(_select_small_payloads(ids))]
    for row in rows:
        rowid = row.pop("rowid_if_large")
        if rowid is not None:
            row["data"] = _read_blob(driver, rowid)
    return rows


def _read_blob(driver: sqlite3.Connection, rowid: int) -> memoryview:
    with driver.blobopen(payload.name, payload.c.data.name, rowid, readonly=True) as blob:
        data = take(len(blob))
        for begin in range(0, len(data), BLOB_CHUNK):
            data[begin : begin + BLOB_CHUNK] = blob.read(BLOB_CHUNK)
    return data


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
