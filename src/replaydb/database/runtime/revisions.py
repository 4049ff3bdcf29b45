"""The revision of the tables in a database, and whether this version can use them.

Every opening of a store reads it, so this module does not import alembic. `docs/compatibility.md`
says what older and newer versions may expect of a store.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache

from sqlalchemy import Connection, String, column, distinct, func, inspect, select, table, true

from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import (
    BREAKING,
    FORMATS,
    LATE_PART,
    RELEASES,
    REVISIONS,
    compatibility,
    group,
    metadata,
    payload,
)
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import (
    ClientTooOldError,
    DatabaseError,
    DatabaseUnavailableError,
    InvalidInputError,
    SchemaError,
    SchemaOutOfDateError,
)
from replaydb.util import release

#: A name of our own: another user of alembic in the same database has its own table.
VERSION_TABLE = "replaydb_alembic_version"

#: Prefix of the revision in the target of a copy, with a token of the copy after the revision. The
#: database cannot be opened until the copy is complete.
COPYING = "copying "

revision_column = column("version_num", String())
version_table = table(VERSION_TABLE, revision_column)
_select_revision = select(revision_column).select_from(version_table)
_select_found = select(revision_column, compatibility.c.min_client).select_from(
    version_table.outerjoin(compatibility, true())
)


@dataclass(frozen=True, slots=True)
class Found:
    """What is found in a database.

    Attributes:
        revision: Revision of the tables.
        tables: Names of the tables other than alembic's, if there is no revision.
        min_client: The oldest release that can use the store. None: it is not recorded.
    """

    revision: str | None
    tables: frozenset[str]
    min_client: str | None = None


NOTHING = Found(None, frozenset())

#: Beginning of a difference that `migrations.write_format` removes.
DAMAGED = "the row of compatibility is damaged"

#: Revision that adds the table `compatibility`.
_SINCE = "0012"
#: The first revision whose clients read `LATE_PART`.
LATE_SINCE = "0016"


async def find(backend: Backend) -> Found:
    """Read the revision of a database, with one small query if it has one."""
    if not backend.read_only and backend.schema.is_new_file():
        return NOTHING  # connecting would write the header
    try:
        if rows := await backend.schema.read(lambda session: session.run(_select_found)):
            return Found(rows[0].version_num, frozenset(), rows[0].min_client)
    except DatabaseUnavailableError:
        raise  # `inspect_schema` would connect again
    except DatabaseError:
        pass  # probably there is no such table
    return await backend.schema.read(inspect_schema)


def inspect_schema(session: Session) -> Found:
    """Read what is in a database, which may be empty."""
    names = frozenset(inspect(session.core).get_table_names())
    revision = revision_in(session) if VERSION_TABLE in names else None
    if revision is None:
        return Found(None, names - {VERSION_TABLE})
    recorded = compatibility.name in names and session.run(select(compatibility.c.min_client))
    return Found(revision, frozenset(), recorded[0].min_client if recorded else None)


def revision_in(session: Session) -> str | None:
    """Return the revision, or the mark of a copy. There must be a table for it."""
    rows = session.run(_select_revision)
    return rows[0].version_num if rows else None


def problem_of(backend: Backend, found: Found) -> SchemaError | None:
    """Return why this version cannot use the tables; `SchemaOutOfDateError` if an upgrade helps."""
    newest = REVISIONS[-1]
    if found.revision is None:
        ours = sorted(found.tables & metadata.tables.keys())
        if ours:
            return SchemaError(
                "the database already has tables with replaydb's names that no migration has "
                f"created (there is no {VERSION_TABLE}): {', '.join(ours)}; use another database",
                None,
                newest,
            )
        what = "there are no tables yet"
    elif is_copy(found.revision):
        return unfinished_copy(found.revision)
    elif not is_new_enough(release.VERSION, found.min_client):
        return too_old(found.min_client, found.revision)
    elif is_newest(found):
        return None
    elif found.revision in REVISIONS:
        what = f"the tables are of revision {found.revision}, but {newest} is needed"
    elif found.min_client is None:
        return ClientTooOldError(
            f"the tables are of revision {found.revision} of a newer or different replaydb: this "
            f"one, {release.VERSION}, knows none after {newest}",
            found.revision,
            newest,
        )
    else:
        return None  # of a later revision, which only adds
    # The command can be pasted into a shell, unless the URL has a password, which is not shown.
    if ":***" in backend.shown:
        how = f"with the URL of {backend.shown} in REPLAYDB_URL, run: replaydb db upgrade"
    else:
        how = f"run: replaydb db upgrade --url {shlex.quote(backend.shown)}"
    return SchemaOutOfDateError(f"{what}; {how}", found.revision, newest)


def check_still_usable(session: Session) -> None:
    """Check what may have changed since the database was opened.

    Raises:
        SchemaError: A copy into it has begun, or it has come to need a newer replaydb.
    """
    for row in session.run(_select_found):
        if is_copy(row.version_num):
            raise unfinished_copy(row.version_num)
        check_usable(row.min_client)


def is_newest(found: Found) -> bool:
    """Whether the tables are of the newest revision of this version."""
    return found.revision == REVISIONS[-1]


@cache
def is_new_enough(version: str, min_client: str | None) -> bool:
    """Whether a version may use a store that requires this release, or does not say which."""
    return min_client is None or release.numbers(version) >= release.numbers(min_client)


def check_usable(min_client: str | None, write_format: int | None = None) -> None:
    """Check the row of `compatibility`, whose values are None if it is missing.

    Raises:
        ClientTooOldError: The store needs a newer replaydb.
        SchemaError: This version does not know the format, so the row is damaged.
    """
    if not is_new_enough(release.VERSION, min_client):
        raise too_old(min_client)
    if write_format not in FORMATS and write_format is not None:
        raise SchemaError(
            f"compatibility.write_format: expected one of {sorted(FORMATS)}, got {write_format!r}: "
            "the row is damaged; run: replaydb db write-format NUMBER"
        )


def too_old(min_client: str | None, revision: str | None = None) -> ClientTooOldError:
    """Return the error of a client that is older than the store requires."""
    return ClientTooOldError(
        f"the store needs replaydb {min_client} or later, and this is {release.VERSION}; run: "
        f"pip install --upgrade 'replaydb>={min_client}'",
        revision,
    )


def check_known(backend: Backend, found: Found, consequence: str) -> None:
    """Check that this version knows all tables, and not only that it can use them.

    Args:
        backend: The database.
        found: What is in it.
        consequence: What is impossible otherwise, for the error.

    Raises:
        SchemaError: It cannot use them, or a newer replaydb has added some.
    """
    if problem := problem_of(backend, found):
        raise problem
    if not is_newest(found):
        raise ClientTooOldError(
            f"the tables are of revision {found.revision} of a newer replaydb, and this one, "
            f"{release.VERSION}, knows none after {REVISIONS[-1]}, so {consequence}; run: "
            "pip install --upgrade replaydb",
            found.revision,
            REVISIONS[-1],
        )


def check_format(number: int) -> None:
    """Check that this version knows a payload format.

    Raises:
        InvalidInputError: It does not.
    """
    if number not in FORMATS:
        raise InvalidInputError("number", f"one of {sorted(FORMATS)}", number)


def min_client_of(revision: str, write_format: int) -> str:
    """Return the oldest release that can use tables of a revision with payloads up to a format."""
    needed = {one for one in BREAKING if one <= revision} | {FORMATS[write_format]}
    return RELEASES[max(needed)]


def newest_format(revision: str) -> int:
    """Return the newest payload format that clients of a revision read."""
    return max(number for number, since in FORMATS.items() if since <= revision)


def write_format_in(core: Connection) -> int | None:
    """Return the format of new payloads; None if the database has no tables of replaydb.

    Raises:
        SchemaError: As of `check_usable`.
    """
    names = inspect(core).get_table_names()
    if VERSION_TABLE not in names or core.scalar(_select_revision) is None:
        return None
    if compatibility.name not in names:
        return min(FORMATS)
    for row in core.execute(select(compatibility.c.min_client, compatibility.c.write_format)):
        check_usable(*row)
        return int(row.write_format)
    return min(FORMATS)


def damage(core: Connection) -> list[str]:
    """Return what is wrong with the row of `compatibility`. `record` replaces it."""
    row = core.execute(select(compatibility.c.min_client, compatibility.c.write_format)).first()
    if row is None:
        return [f"{DAMAGED}: it is missing"]
    revision, number = core.scalar(_select_revision), row.write_format
    if number in FORMATS and row.min_client == min_client_of(str(revision), number):
        return []
    return [f"{DAMAGED}: {tuple(row)}"]


def record(core: Connection, before: int | None, write_format: int | None = None) -> None:
    """Record what a client must support, after the tables or the format of new payloads changed.

    Args:
        core: The transaction that changed them. It has locked the tables.
        before: Result of `write_format_in` before the change.
        write_format: The new format; None: the newest for new tables, otherwise the old one as far
            as clients of the revision read it.

    Raises:
        SchemaError: Payloads of a later format are stored, or what earlier clients cannot use. The
            transaction must be rolled back.
    """
    revision = core.scalar(_select_revision)
    if revision is None:
        return
    if write_format is None:
        newest = newest_format(revision)
        write_format = newest if before is None else min(before, newest)
    if before is not None and before > write_format:
        later = select(func.count(distinct(payload.c.group_id)))
        if number := core.scalar(later.where(payload.c.codec_version > write_format)):
            raise SchemaError(
                f"{number} groups have payloads of a later format than {write_format}. Nothing was "
                "changed. Export these groups, delete them, and import them afterwards",
                revision,
                REVISIONS[-1],
            )
    if revision < LATE_SINCE:
        late = select(func.count()).where(payload.c.part == LATE_PART)
        if number := core.scalar(late):
            raise SchemaError(
                f"{number} groups have values that were added later, which clients of revision "
                f"{revision} cannot read. Nothing was changed. Run `replaydb db rewrite-payloads` "
                "first",
                revision,
                REVISIONS[-1],
            )
        waits = group.num_episodes >= func.coalesce(group.expected_episodes, 0)
        waits |= group.status_reason.startswith("waits for ")  # with unusable positions, too
        waiting = select(func.count()).where(group.group_status == GroupStatus.PENDING.value, waits)
        if number := core.scalar(waiting):
            raise SchemaError(
                f"{number} groups wait for values that the setting `requires` names, which clients "
                f"of revision {revision} do not know. Nothing was changed. Add the values, or "
                "change the status of the groups",
                revision,
                REVISIONS[-1],
            )
    if revision >= _SINCE:
        values = {
            "id": 1,
            "min_client": min_client_of(revision, write_format),
            "write_format": write_format,
        }
        core.execute(compatibility.delete())  # the row may be missing
        core.execute(compatibility.insert().values(values))


def is_copy(revision: str | None) -> bool:
    """Whether a revision is the mark of an unfinished copy."""
    return revision is not None and revision.startswith(COPYING)


def unfinished_copy(revision: str | None) -> SchemaError:
    """Return the error of opening an unfinished copy."""
    what = (
        "the database is a copy that was not finished: run `replaydb copy` again, or delete the "
        "database"
    )
    return SchemaError(what, revision, REVISIONS[-1])
