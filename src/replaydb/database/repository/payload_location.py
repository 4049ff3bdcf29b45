"""The row of the payload store: where payloads outside the database are."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select, true, update

from replaydb.database.runtime import revisions
from replaydb.database.runtime.session import Session
from replaydb.database.statements.insertion import insert_into
from replaydb.database.tables.schema import compatibility, payload, payload_place
from replaydb.errors import InvalidInputError

#: Default grace period: how long a pack is kept after it was marked for deletion.
GRACE_SECONDS = 3600.0


class PayloadStoreRow(NamedTuple):
    """The row of `payload_place`: the payload store that this database uses.

    Attributes:
        url: Its URL, without secrets.
        store_uid: Identifies this store among others in the same folder or bucket.
        grace_seconds: How long a pack is kept after it was marked for deletion.
    """

    url: str
    store_uid: str
    grace_seconds: float


def payload_store(session: Session) -> PayloadStoreRow | None:
    """Return the payload store of the database; None if payloads are in the database.

    Raises:
        ClientTooOldError: The store has come to need a newer replaydb.
    """
    rows = session.run(
        select(payload_place, compatibility.c.min_client).outerjoin_from(
            payload_place, compatibility, true()
        )
    )
    if not rows:
        return None
    revisions.check_usable(rows[0].min_client)
    return PayloadStoreRow(rows[0].url, rows[0].store_uid, rows[0].grace_seconds)


def record_payload_store(session: Session, url: str, store_uid: str) -> PayloadStoreRow:
    """Record the payload store, unless another process has. Returns the one that is recorded.

    Raises:
        InvalidInputError: There are payloads in the database.
    """
    found = payload_store(session)
    if found is None:
        check_no_payloads(session, url)
        found = PayloadStoreRow(url, store_uid, GRACE_SECONDS)
        session.run_many(insert_into(payload_place), [{"id": 1, **found._asdict()}])
    return found


def check_no_payloads(session: Session, url: str) -> None:
    """Check that a payload store can be recorded.

    Raises:
        InvalidInputError: There are payloads in the database.
    """
    if session.run(select(payload.c.group_id).limit(1)):
        expected = "None, since this store has its payloads in the database (see `replaydb copy`)"
        raise InvalidInputError("payloads", expected, url)


def relocate(session: Session, url: str) -> None:
    """Record the new URL of the payload store."""
    session.run(update(payload_place).values(url=url))


def set_grace(session: Session, seconds: float) -> None:
    """Set the grace period of packs that are marked for deletion."""
    session.run(update(payload_place).values(grace_seconds=seconds))
