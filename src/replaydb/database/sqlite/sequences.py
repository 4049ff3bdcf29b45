"""Sequences of generated ids: the counters of AUTOINCREMENT."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Select, column, delete, func, insert, select, table

from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import GENERATED, episode_group


def last_ids(session: Session) -> dict[str, int | None]:
    """Return the last generated id of each table. A table has a counter once it has had a row."""
    last = {row.name: row.seq for row in session.run(_LAST_IDS)}
    return {one.name: last.get(one.name, 0) if one in _COUNTED else None for one in GENERATED}


def advance(session: Session, ids: Mapping[str, int]) -> None:
    """Generate only ids after these, by table."""
    last = last_ids(session)
    for name, value in ids.items():
        if (found := last[name]) is not None and found < value:
            session.run(delete(_SEQUENCE).where(_SEQUENCE.c.name == name))
            session.run(insert(_SEQUENCE).values(name=name, seq=value))


def last_group_id(session: Session) -> int:
    """Return the last id of a group that was generated or is used."""
    [(last,)] = session.run(_select_last_group_id())
    return int(last)


_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))
_LAST_IDS = select(_SEQUENCE.c.name, func.max(_SEQUENCE.c.seq).label("seq")).group_by(
    _SEQUENCE.c.name
)
#: Tables that never generate an id twice, even after deletions.
_COUNTED = frozenset(one for one in GENERATED if one.dialect_options["sqlite"]["autoincrement"])


@prepared
def _select_last_group_id() -> Select[int]:
    last = select(func.max(_SEQUENCE.c.seq)).where(_SEQUENCE.c.name == episode_group.name)
    used = select(func.max(episode_group.c.id))
    return select(
        func.max(  # with two arguments: the larger one
            func.coalesce(last.scalar_subquery(), 0), func.coalesce(used.scalar_subquery(), 0)
        )
    )
