"""Schema migrations: upgrade, downgrade, history and checks, for `replaydb db` and for opening.

alembic is imported only for a migration. A store whose tables are current opens without it.
`docs/migrations.md` describes the rules.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Select, func, inspect, select

from replaydb.database.engines import backend_for
from replaydb.database.runtime import revisions
from replaydb.database.runtime.protocol import Backend, Client
from replaydb.database.runtime.session import Session
from replaydb.database.tables.schema import (
    buffer,
    draw_group,
    episode_group,
    group,
    metadata,
    payload,
    policy_change,
)
from replaydb.database.tables.views import VIEWS
from replaydb.errors import InvalidInputError, SchemaOutOfDateError
from replaydb.util.progress import Progress, no_progress

if TYPE_CHECKING:
    from alembic.config import Config

#: Beginning of a difference that `upgrade` removes; see `check`.
MISSING_INDEX = "add index "

_view_names = frozenset(view.table.name for view in VIEWS)
_INDEXES = tuple(index for table in metadata.sorted_tables for index in table.indexes)

#: What a downgrade of a revision loses, also after a new upgrade, and the number of its rows.
_LOST: tuple[tuple[str, str, Select[int]], ...] = (
    (
        "0010",
        "drawn groups that were replaced since: what the draws took",
        select(func.count(draw_group.c.task_name)),
    ),
    (
        "0010",
        "evicted groups: that they were not consumed",
        select(func.count()).select_from(episode_group).where(group.is_evicted),
    ),
    (
        "0008",
        "policy versions: when buffers advanced to them",
        select(func.count()).select_from(policy_change),
    ),
    (
        "0006",
        "groups with payloads outside the database: their payloads, so they fail when drawn",
        select(func.count(payload.c.group_id.distinct())).where(payload.c.pack_id.is_not(None)),
    ),
    ("0003", "drawn groups: the outcomes of their draws", select(func.count(draw_group.c.outcome))),
    ("0001", "groups: all of their data", select(func.count()).select_from(episode_group)),
)

# alembic keeps the running migration in module globals, which event loops of several threads share.
# The lock is acquired by polling, so that a waiting coroutine can be cancelled.
_alembic_lock = threading.Lock()
_LOCK_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of the schema."""

    id: str
    description: str


async def upgrade(
    target: Backend | str | URL, revision: str = "head", *, progress: Progress | None = None
) -> None:
    """Upgrade the tables to `revision`, all steps in one transaction. Then create missing indexes.

    Indexes are created only at the newest revision. On PostgreSQL other processes read and write
    meanwhile. If that is interrupted, another call continues.

    Args:
        target: The database, or its URL.
        revision: A revision, `head`, or `+1` for the next one.
        progress: Called while an index is created on PostgreSQL, with the number of blocks or rows
            processed in the current phase, and their total.

    Raises:
        InvalidInputError: There is no such revision.
        ClientTooOldError: The tables need a newer replaydb. Newer tables that this one can use are
            left as they are.
        SchemaError: Tables with replaydb's names exist that no migration has created.
        DatabaseError: The database refused; the upgrade was rolled back.
    """
    from alembic import command

    backend = _backend(target)
    existed = await _run(backend, command.upgrade, revision)
    found = await revisions.find(backend)
    if existed and revisions.is_newest(found):  # later tables may have other indexes
        await backend.schema.create_indexes(_INDEXES, progress or no_progress)


async def downgrade(target: Backend | str | URL, revision: str) -> None:
    """Downgrade the tables to `revision`. What later revisions added is lost.

    Args:
        target: The database, or its URL.
        revision: A revision, `-1` for the one before, or `base` to drop everything.

    Raises:
        InvalidInputError: There is no such revision.
        SchemaError: As for `upgrade`; or payloads are stored that clients of the revision cannot
            read; or this replaydb does not know the revision of the tables. Nothing was changed.
        DatabaseError: The database does not exist, or refused; the downgrade was rolled back.
    """
    from alembic import command

    await _run(_backend(target), command.downgrade, revision)


async def losses(target: Backend | str | URL, revision: str) -> tuple[str, ...]:
    """Return what a downgrade to `revision` would lose, also after a new upgrade. Never writes.

    Args:
        target: The database, or its URL.
        revision: As for `downgrade`. If there is no such revision, nothing is lost.

    Raises:
        DatabaseError: The database does not exist, or cannot be read.
    """
    from alembic.script import ScriptDirectory
    from alembic.script.revision import RevisionError

    backend = _backend(target, read_only=True)
    scripts = ScriptDirectory.from_config(_config())

    def work(session: Session) -> list[str]:
        now = revisions.inspect_schema(session).revision
        try:
            steps = scripts.iterate_revisions(now, revision, select_for_downgrade=True)
            undone = {script.revision for script in steps}
        except RevisionError:  # `downgrade` raises it as a typed error
            return []
        counts = ((what, statement) for since, what, statement in _LOST if since in undone)
        numbers = ((session.run(statement)[0][0], what) for what, statement in counts)
        return [f"{number} {what}" for number, what in numbers if number]

    return tuple(await backend.schema.read(work))


async def current(target: Backend | str | URL) -> str | None:
    """Return the revision of the tables; None if no migration has created any. Never writes.

    Raises:
        DatabaseError: The database does not exist, or cannot be read.
    """
    return (await revisions.find(_backend(target, read_only=True))).revision


def history() -> tuple[Revision, ...]:
    """Return all revisions, the oldest first."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return tuple(Revision(script.revision, script.doc) for script in scripts)[::-1]


async def check(target: Backend | str | URL) -> tuple[str, ...]:
    """Return the differences between the tables and what this version expects; empty if none.

    The comparison is alembic's. It covers tables, columns, types, keys and indexes, but not CHECK
    constraints. Views are compared by their columns.

    Raises:
        SchemaError: The revision is not the newest one of this version, see `prepare`.
    """
    backend = _backend(target, read_only=True)

    def work(session: Session) -> tuple[str, ...]:
        revisions.check_known(backend, revisions.inspect_schema(session), "they cannot be compared")
        return _differences(session.core)

    return await backend.schema.read(work)


async def write_format(target: Backend | str | URL, number: int) -> None:
    """Set the format of new payloads. Clients that cannot read it can then not use the store.

    Args:
        target: The database, or its URL.
        number: The payload format.

    Raises:
        InvalidInputError: This version does not know the format.
        SchemaError: As for `check`; or payloads of a later format are stored.
        DatabaseError: The database does not exist, or refused. Nothing was changed.
    """
    revisions.check_format(number)
    backend = _backend(target)

    def work(session: Session) -> None:
        found = revisions.inspect_schema(session)
        revisions.check_known(backend, found, "its payload format cannot be set")
        # All transactions that store or draw groups read it: they are over, or read the new format.
        backend.schema.lock_tables(session, [buffer.name])
        newest = revisions.newest_format(str(found.revision))  # what is recorded may be damaged
        revisions.record(session.core, newest, number)

    await backend.schema.change(work)


async def outdated_clients(
    target: Backend | str | URL, revision: str = "head", number: int | None = None
) -> tuple[str | None, tuple[Client, ...]]:
    """Return which connected clients are too old for the tables after a change. Never writes.

    Clients of a SQLite file cannot be seen, nor those whose URL sets another `application_name`.

    Args:
        target: The database, or its URL.
        revision: The revision to upgrade to.
        number: The format of new payloads after the change; None: the same as now.

    Returns:
        The oldest release that can use the tables then, and the clients that are older.

    Raises:
        InvalidInputError: This version does not know the format.
        SchemaError: What the store requires is damaged, or needs a newer replaydb.
        DatabaseError: The database does not exist, or cannot be read.
    """
    from alembic.script import ScriptDirectory
    from alembic.script.revision import RevisionError

    if number is not None:
        revisions.check_format(number)
    backend = _backend(target, read_only=True)
    if backend.schema.is_new_file():
        return None, ()
    scripts = ScriptDirectory.from_config(_config())

    def work(session: Session) -> tuple[str | None, tuple[Client, ...]]:
        now = revisions.inspect_schema(session).revision
        written = number or revisions.write_format_in(session.core)
        if now is None or written is None:
            return None, ()
        try:
            steps = list(scripts.iterate_revisions(revision, now))
        except RevisionError:  # the change raises it as a typed error
            return None, ()
        needed = revisions.min_client_of(steps[0].revision if steps else now, written)
        clients = backend.administration.clients(session)
        return needed, tuple(
            one for one in clients if not revisions.is_new_enough(one.version, needed)
        )

    return await backend.schema.read(work)


async def prepare(backend: Backend, *, migrate: bool | None, knows_all: str | None = None) -> None:
    """Make sure that this version can use the tables.

    Args:
        backend: The database.
        migrate: True upgrades tables that are out of date. False never writes. None creates the
            tables of a new SQLite file, and writes nothing otherwise.
        knows_all: If the caller must know all tables: what it cannot do otherwise, for the error.

    Raises:
        SchemaOutOfDateError: An upgrade is needed; the message has the command to run.
        ClientTooOldError: The tables need a newer replaydb.
        SchemaError: Tables with replaydb's names exist that no migration has created.
        DatabaseError: The database cannot be reached, read or upgraded. With False also: the file
            does not exist.
    """
    await backend.schema.check_target(exists=migrate is False)
    found = await revisions.find(backend)
    problem = revisions.problem_of(backend, found)
    if problem is None:
        if knows_all is not None:
            revisions.check_known(backend, found, knows_all)
        return
    is_new_file = backend.schema.file is not None and found == revisions.NOTHING
    allowed = is_new_file if migrate is None else migrate
    if not (allowed and isinstance(problem, SchemaOutOfDateError)):
        raise problem
    await upgrade(backend)


def alembic_options() -> dict[str, Any]:
    """Return alembic's options, for both `migrations/env.py` and `check`."""
    return {
        "target_metadata": metadata,
        "version_table": revisions.VERSION_TABLE,
        "include_object": _is_compared,
        "render_as_batch": True,
        "transactional_ddl": True,
    }


async def _run(backend: Backend, action: Callable[[Config, str], None], revision: str) -> bool:
    """Run an action of alembic in one transaction. Return whether there were tables before."""
    from alembic import command
    from alembic.script import ScriptDirectory
    from alembic.script.revision import RevisionError
    from alembic.util import CommandError

    config = _config()
    create = action is command.upgrade
    if create and backend.schema.is_new_file():  # before the file is created
        scripts = ScriptDirectory.from_config(config)
        try:
            create = any(scripts.iterate_revisions(revision, None, implicit_base=True))
        except RevisionError as error:
            raise _unknown(revision, error) from error

    def work(session: Session) -> bool:
        found = revisions.inspect_schema(session)
        problem = revisions.problem_of(backend, found)
        if problem is not None and not isinstance(problem, SchemaOutOfDateError):
            raise problem
        if problem is None:
            if action is command.upgrade and revision == "head":
                return True
            revisions.check_known(backend, found, "they cannot be changed")
        if problem is not None or action is command.downgrade:
            backend.schema.lock_tables(session, inspect(session.core).get_table_names())
        config.attributes["connection"] = session.core
        try:
            action(config, revision)
        except CommandError as error:
            raise _unknown(revision, error) from error
        return found.revision is not None

    async with _alembic_alone():
        return await backend.schema.change(work, create=create)


def _unknown(revision: str, error: Exception) -> InvalidInputError:
    expected = "one of `replaydb db history`, head or base"
    return InvalidInputError("revision", expected, f"{revision!r}: {error}")


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    # alembic expands % as in alembic.ini, and the path of the folder may contain one.
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    """Return `migrations/` of the installed package, or the one beside `src/` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(
        f"this installation of replaydb has no migrations/ folder in {package}: reinstall it"
    )


@asynccontextmanager
async def _alembic_alone() -> AsyncIterator[None]:
    while not _alembic_lock.acquire(blocking=False):  # noqa: ASYNC110 - other threads release it
        await asyncio.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        _alembic_lock.release()


def _backend(target: Backend | str | URL, *, read_only: bool = False) -> Backend:
    if isinstance(target, str | URL):
        return backend_for(target, read_only=read_only)
    return target


def _is_compared(_item: object, name: str | None, kind: str, *_: object) -> bool:
    """Compare only replaydb's own tables. `_view_differences` compares views."""
    return kind != "table" or (name in metadata.tables and name not in _view_names)


def _differences(connection: Connection) -> tuple[str, ...]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts=alembic_options())
    changes: list[Any] = compare_metadata(context, metadata)
    steps = (step for change in changes for step in (change if type(change) is list else [change]))
    return (
        *(_described(step) for step in steps),
        *_view_differences(connection),
        *revisions.damage(connection),
    )


def _described(step: tuple[Any, ...]) -> str:
    """Describe a change that alembic would make, such as `add index ix_draw_step`."""
    kind, *details = step
    last = details[-1]
    if kind.startswith("modify_"):  # schema, table, column, more, found, expected
        _, table_name, column_name, _, found, expected = details
        what = f"{table_name}.{column_name}: {found!r}, expected {expected!r}"
    elif kind.endswith("_column"):  # schema, table, the column
        what = f"{details[-2]}.{last.name}"
    else:
        what = str(last.name)
    return f"{kind.replace('_', ' ')} {what}"


def _view_differences(connection: Connection) -> list[str]:
    inspector = inspect(connection)
    present = set(inspector.get_view_names())
    found = []
    for name in sorted(_view_names):
        if name not in present:
            found.append(f"add view {name}")
        elif [column["name"] for column in inspector.get_columns(name)] != [
            column.name for column in metadata.tables[name].columns
        ]:
            found.append(f"modify view {name}: other columns than expected")
    return found
