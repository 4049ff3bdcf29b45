"""Sequences of generated ids: the counters of AUTOINCREMENT."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, Select, column, delete, func, insert, select, table

from replaydb.database.runtime.prepared import execute
from replaydb.database.tables.schema import GENERATED, episode_group


def last_ids(connection: Connection) -> dict[str, int | None]:
    """Return the last generated id of each table. A table has a counter once it has had a row."""
    last = {row.name: row.seq for row in execute(connection, _LAST_IDS)}
    return {one.name: last.get(one.name, 0) if one in _COUNTED else None for one in GENERATED}


def advance(connection: Connection, ids: Mapping[str, int]) -> None:
    """Generate only ids after these, by table."""
    last = last_ids(connection)
    for name, value in ids.items():
        if (found := last[name]) is not None and found < value:
            execute(connection, delete(_SEQUENCE).where(_SEQUENCE.c.name == name))
            execute(connection, insert(_SEQUENCE).values(name=name, seq=value))


def last_group_id(connection: Connection) -> int:
    """Return the last id of a group that was generated or is used."""
    return connection.scalar(_LAST_GROUP_ID) or 0


_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))
_LAST_IDS = select(_SEQUENCE.c.name, func.max(_SEQUENCE.c.seq).label("seq")).group_by(
    _SEQUENCE.c.name
)
_LAST_GROUP_ID: Select[int] = select(
    func.max(  # with two arguments: the larger one
        func.coalesce(
            select(func.max(_SEQUENCE.c.seq))
            .where(_SEQUENCE.c.name == episode_group.name)
            .scalar_subquery(),
            0,
        ),
        func.coalesce(select(func.max(episode_group.c.id)).scalar_subquery(), 0),
    )
)
#: Tables that never generate an id twice, even after deletions.
_COUNTED = frozenset(one for one in GENERATED if one.dialect_options["sqlite"]["autoincrement"])
