"""Health checks of a store and its database (`replaydb doctor`). Reads only."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import URL

from replaydb.database import migrations
from replaydb.database.engines import backend_for
from replaydb.database.repository import payload_location, sequences
from replaydb.database.runtime import revisions
from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import Database, end_in
from replaydb.database.tables.schema import REVISIONS
from replaydb.domain.results import Finding
from replaydb.errors import (
    ClientTooOldError,
    DatabaseError,
    NotSupportedError,
    PayloadsUnavailableError,
    ReplayDBError,
    SchemaError,
)
from replaydb.packs import PayloadStore

#: Clock skew, in seconds, above which a warning is reported.
SKEW_SECONDS = 2.0
#: Seconds to wait for a database server or payload store that does not answer.
PATIENCE_SECONDS = 20.0
#: What removes a difference of the tables, by its beginning.
_FIXES = {
    migrations.MISSING_INDEX: "replaydb db upgrade",
    revisions.DAMAGED: "replaydb db write-format NUMBER",
}


async def examine(url: str | URL) -> tuple[Finding, ...]:
    """Check the health of a store and its database, and suggest fixes.

    Checks the engine version and its known faults, settings, disk space, tables and indexes,
    clocks, id sequences, and the payload store. Reads only, and does not read stored groups; for
    those, see `verify`. A database that cannot be reached is a finding, not an error.

    Args:
        url: URL of the store, as for `Store.open`.

    Returns:
        The result of each check; good results are included.

    Raises:
        InvalidURLError: The URL cannot be used.
    """
    backend = backend_for(url, read_only=True)
    found: list[Finding] = []
    try:
        await backend.schema.check_target()
    except NotSupportedError as error:
        fix = "keep it in a folder of a local disk, under one name, or use PostgreSQL"
        return (Finding("bad", "location", str(error), fix),)
    database = Database(backend)
    try:
        end = end_in(PATIENCE_SECONDS)
        found += await backend.administration.examine_connections(end)
        if any(finding.level == "bad" for finding in found):
            return tuple(found)
        found += await database.read(backend.administration.examine, end=end)
        found.append(await database.read(_clock, end=end))
        tables = await _tables(backend)
        found += tables
        if all(finding.level == "good" for finding in tables):
            found.append(await database.read(lambda it: _sequences(backend, it), end=end))
            found.append(await _payloads(database))
    except DatabaseError as error:
        fix = "check the URL, the network and the server; the other checks did not run"
        found.append(Finding("bad", "connection", str(error), fix))
    finally:
        await database.close()
    return tuple(found)


def _clock(session: Session) -> Finding:
    before = datetime.now(UTC)
    theirs = session.now()
    here = before + (datetime.now(UTC) - before) / 2
    skew = (theirs - here).total_seconds()
    if abs(skew) <= SKEW_SECONDS:
        return Finding("good", "clock", "the clocks of the database and this machine agree")
    return Finding(
        "warning",
        "clock",
        f"the clock of the database is {abs(skew):,.1f} s {'ahead' if skew > 0 else 'behind'}: "
        "leases use it, and ages computed on this machine are wrong by that",
        "synchronize the clocks of both machines with NTP",
    )


async def _tables(backend: Backend) -> list[Finding]:
    try:
        await migrations.prepare(backend, migrate=False)
    except SchemaError as error:
        fix = "make a backup, then follow the message"
        return [Finding("bad", "tables", str(error), fix)]
    try:
        differences = await migrations.check(backend)
    except ClientTooOldError as error:  # but not too old to use them
        return [Finding("warning", "tables", str(error), "run this with the newer replaydb")]
    found = [
        Finding(
            "bad",
            "tables",
            f"differs from the tables of this version: {difference}",
            next(
                (fix for beginning, fix in _FIXES.items() if difference.startswith(beginning)),
                "restore it by hand as in migrations/, or `replaydb copy` into a new database",
            ),
        )
        for difference in differences
    ]
    return found or [
        Finding("good", "tables", f"revision {REVISIONS[-1]}, with all columns, keys and indexes")
    ]


def _sequences(backend: Backend, session: Session) -> Finding:
    if behind := sequences.behind(backend, session):
        shown = "; ".join(f"{one.table}: {one}" for one in behind)
        return Finding("bad", "sequences", shown, "replaydb verify --repair")
    if not backend.administration.last_ids(session):
        what = "not checked: only users with SELECT on sequences can read their positions"
        return Finding("good", "sequences", what)
    return Finding("good", "sequences", "they will not generate ids of existing rows")


async def _payloads(database: Database) -> Finding:
    row = await database.read(payload_location.payload_store)
    if row is None:
        return Finding("good", "payload store", "payloads are in the database")
    try:
        store = PayloadStore(row.url, row.store_uid)
        try:
            marker = await store.check(end_in(PATIENCE_SECONDS))
        finally:
            await store.close()
    except PayloadsUnavailableError as error:
        fix = "mount it or provide credentials; if it was moved: replaydb db relocate; "
        fix += "if its marker is missing or damaged: replaydb db adopt-payloads"
        return Finding("bad", "payload store", str(error), fix)
    except ReplayDBError as error:  # the client of object stores is not installed
        return Finding("bad", "payload store", str(error), "install replaydb[obstore]")
    instance = await database.read(database.backend.administration.instance)
    if (refused := store.refusal(marker, instance)) is not None:
        return Finding("warning", "payload store", str(refused), "replaydb db adopt-payloads")
    return Finding("good", "payload store", row.url)
