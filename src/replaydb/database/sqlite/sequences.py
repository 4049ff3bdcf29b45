"""Sequences of generated ids: the counters of AUTOINCREMENT."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import column, delete, func, insert, select, table

from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import GENERATED


def last_ids(session: Session) -> dict[str, int | None]:
    """Return the last generated id of each table. A table has a counter once it has had a row."""
    last = {row.name: row.seq for row in session.run(_LAST_IDS)}
    return {one.name: last.get(one.name, 0) if one in _COUNTED else None for one in GENERATED}


def advance(session: Session, ids: Mapping[str, int]) -> None:
    """Generate only ids after these, by table."""
    last = last_ids(session)
    for name, value in ids.items():
        if (found := last[name]) is not None and found < value:
            session.run(delete(SEQUENCE).where(SEQUENCE.c.name == name))
            session.run(insert(SEQUENCE).values(name=name, seq=value))


#: SQLite's counters of AUTOINCREMENT.
SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))
_LAST_IDS = select(SEQUENCE.c.name, func.max(SEQUENCE.c.seq).label("seq")).group_by(SEQUENCE.c.name)
#: Tables that never generate an id twice, even after deletions.
_COUNTED = frozenset(one for one in GENERATED if one.dialect_options["sqlite"]["autoincrement"])
