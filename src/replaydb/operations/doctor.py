"""Looking for what is wrong with a store and what it stands on. Nothing is changed."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import URL, Connection

from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.engines.protocol import Backend
from replaydb.database.repository import packs, sequences
from replaydb.database.transactions import Database, end_in
from replaydb.errors import (
    DatabaseError,
    NotSupportedError,
    PayloadsUnavailableError,
    ReplayDBError,
    SchemaError,
)
from replaydb.packs import Place
from replaydb.results import Finding

#: Clocks that differ by more show times that mislead.
SKEW_SECONDS = 2.0
#: For a server, or a place of payloads, that does not answer.
PATIENCE_SECONDS = 20.0


async def examine(url: str | URL) -> tuple[Finding, ...]:
    """What is good and what is wrong with a store: each with what mends it, if anything is to be.

    Looked at are the engine and its known faults, its settings, connections and disk, the tables
    and their indexes, what has grown, the clocks, and the place of the payloads. Not what is
    stored: for that there is `verify`. A database that cannot be reached is a finding.

    Args:
        url: Of the store, as of `Store.open`.

    Raises:
        InvalidURLError: The URL cannot be used.
    """
    backend = backend_for(url, read_only=True)
    found: list[Finding] = []
    try:
        await backend.check_target()
    except NotSupportedError as error:
        mend = "move it to a local disk, or use PostgreSQL"
        return (Finding("bad", "place", str(error), mend),)
    database = Database(backend)
    try:
        end = end_in(PATIENCE_SECONDS)
        found += await database.read(backend.examine, end=end)
        found.append(await database.read(lambda it: _clock(backend, it), end=end))
        tables = await _tables(backend)
        found += tables
        if all(finding.level == "good" for finding in tables):
            found.append(await database.read(lambda it: _sequences(backend, it), end=end))
            found.append(await _payloads(database))
    except DatabaseError as error:
        mend = "see to the URL, the network and the server; the rest could not be looked at"
        found.append(Finding("bad", "connection", str(error), mend))
    finally:
        await database.close()
    return tuple(found)


def _clock(backend: Backend, connection: Connection) -> Finding:
    before = datetime.now(UTC)
    theirs = backend.now(connection)
    here = before + (datetime.now(UTC) - before) / 2
    skew = (theirs - here).total_seconds()
    if abs(skew) <= SKEW_SECONDS:
        return Finding("good", "clock", "the database has the time of this machine")
    return Finding(
        "warning",
        "clock",
        f"that of the database is {abs(skew):,.1f} s {'ahead' if skew > 0 else 'behind'}: leases "
        "go by it, and ages that are computed here are wrong by that",
        "let NTP set the clocks of both machines",
    )


async def _tables(backend: Backend) -> list[Finding]:
    try:
        await migrations.prepare(backend, migrate=False)
    except SchemaError as error:
        mend = "do as it says, with a backup beside it"
        return [Finding("bad", "tables", str(error), mend)]
    mend = "put it right by hand, as migrations/ has it, or replaydb copy into a new database"
    found = [
        Finding("bad", "tables", f"other than this version makes them: {difference}", mend)
        for difference in await migrations.check(backend)
    ]
    revision = await migrations.current(backend)
    return found or [
        Finding("good", "tables", f"revision {revision}, with all columns, keys and indexes")
    ]


def _sequences(backend: Backend, connection: Connection) -> Finding:
    if behind := sequences.behind(backend, connection):
        shown = "; ".join(f"{one.table}: {one}" for one in behind)
        return Finding("bad", "sequences", shown, "replaydb verify --repair")
    if not backend.last_ids(connection):
        what = "only users with SELECT on them see what ids they have generated"
        return Finding("good", "sequences", what)
    return Finding("good", "sequences", "they generate ids that no row has")


async def _payloads(database: Database) -> Finding:
    row = await database.read(packs.place)
    if row is None:
        return Finding("good", "payload place", "payloads are in the database")
    try:
        place = Place.at(row.url, row.store_uid)
        try:
            await place.check(end_in(PATIENCE_SECONDS))
        finally:
            await place.close()
    except PayloadsUnavailableError as error:
        mend = "mount it, or give credentials; if it was moved: replaydb db relocate"
        return Finding("bad", "payload place", str(error), mend)
    except ReplayDBError as error:  # what talks to buckets is not installed
        return Finding("bad", "payload place", str(error), "install replaydb[obstore]")
    return Finding("good", "payload place", row.url)
