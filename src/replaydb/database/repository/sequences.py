"""Id sequences that are behind the ids of existing rows: detection and repair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select

from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import GENERATED
from replaydb.errors import DatabaseError


@dataclass(frozen=True, slots=True)
class Behind:
    """A sequence that would generate ids again.

    Attributes:
        table: Name of the table.
        last: The last id that the sequence has generated.
        least: The id that it must continue after.
    """

    table: str
    last: int
    least: int

    def __str__(self) -> str:
        return f"the sequence has generated ids up to {self.last}, and must be past {self.least}"


def positions(backend: Backend, session: Session) -> dict[str, int]:
    """Return the id that each table continues after: its last one, or the largest one it has.

    Raises:
        DatabaseError: The user may not read a sequence.
    """
    largest, last = _largest(session), backend.administration.last_ids(session)
    if hidden := [one.name for one in GENERATED if one.name not in last]:
        raise DatabaseError(
            f"{backend.shown}: this user may not read the sequences of {', '.join(hidden)}: "
            "grant it SELECT on them (`replaydb db roles --apply` does so for its roles)"
        )
    return {name: max(last[name] or 0, least) for name, least in largest.items()}


def behind(
    backend: Backend, session: Session, least: Mapping[str, int] | None = None
) -> list[Behind]:
    """Return the sequences that would generate an id that a row has. Takes no locks.

    Args:
        backend: The engine.
        session: The transaction.
        least: Ids that the sequences must also be past, by table.
    """
    # Other transactions may insert between the two statements: the sequences are read last.
    largest, last = _largest(session), backend.administration.last_ids(session)
    found = []
    for name, wanted in largest.items():
        position = last.get(name)
        wanted = max(wanted, (least or {}).get(name, 0))
        if position is not None and position < wanted:
            found.append(Behind(name, position, wanted))
    return found


def repair(backend: Backend, session: Session) -> None:
    """Move sequences past the ids that rows have."""
    found = {one.table: one.least for one in behind(backend, session)}
    backend.administration.advance_sequences(session, found)


def _largest(session: Session) -> dict[str, int]:
    largest = (select(func.max(one.c.id)).scalar_subquery().label(one.name) for one in GENERATED)
    [row] = session.run(select(*largest))
    return {name: last or 0 for name, last in row._asdict().items()}
