"""Migrations from code: what `replaydb db` runs, and what opening a store looks at.

alembic is imported only where something is migrated: a store whose tables are current opens
without it. `docs/migrations.md` tells the rules.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, String, Update, column, inspect, select, table, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.engines import backend_for
from replaydb.database.engines.protocol import Backend
from replaydb.database.repository.rows import first_in_use
from replaydb.database.schema import REVISIONS, metadata
from replaydb.database.views import VIEWS
from replaydb.errors import (
    InvalidInputError,
    ReplayDBError,
    SchemaError,
    SchemaOutOfDateError,
    SchemaTooNewError,
)

if TYPE_CHECKING:
    from alembic.config import Config

#: Private: another user of alembic in the same database keeps its own.
VERSION_TABLE = "replaydb_alembic_version"

#: Before the revision of a database that is being copied into, with a token of that copy after it:
#: nobody opens it until that is done.
_COPYING = "copying "

_revision_column = column("version_num", String())
_version_table = table(VERSION_TABLE, _revision_column)
_version_query = select(_revision_column).select_from(_version_table)
_view_names = frozenset(view.table.name for view in VIEWS)

# alembic keeps the migration it runs in module globals. A lock of threads, as event loops of
# several threads share them; taken by polling, so that a coroutine that waits can be cancelled.
_alembic_lock = threading.Lock()
_LOCK_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Revision:
    """One step of the history."""

    id: str
    description: str


async def upgrade(target: Backend | str | URL, revision: str = "head") -> None:
    """Bring the tables up to `revision`, all steps in one transaction.

    Args:
        target: The database, or its URL.
        revision: A revision, `head`, or `+1` for the next one.

    Raises:
        InvalidInputError: There is no such revision.
        SchemaTooNewError: The tables were made by a newer replaydb.
        SchemaError: There are tables of our names that no migration made.
        DatabaseError: The database refused; nothing of the upgrade was kept.
    """
    from alembic import command

    await _run(_backend(target), command.upgrade, revision)


async def downgrade(target: Backend | str | URL, revision: str) -> None:
    """Take the tables back to `revision`: what later ones added is lost.

    Args:
        target: The database, or its URL.
        revision: A revision, `-1` for the one before, or `base` to drop everything.

    Raises:
        InvalidInputError: There is no such revision.
        SchemaError: As for `upgrade`.
        DatabaseError: The database refused; nothing of the downgrade was kept.
    """
    from alembic import command

    await _run(_backend(target), command.downgrade, revision)


async def current(target: Backend | str | URL) -> str | None:
    """The revision of the tables; None where no migration made any. Never writes.

    Raises:
        DatabaseError: The database is not there, or cannot be read.
    """
    return (await _find(_backend(target, read_only=True))).revision


def history() -> tuple[Revision, ...]:
    """All revisions, the oldest first."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return tuple(Revision(script.revision, script.doc) for script in scripts)[::-1]


async def check(target: Backend | str | URL) -> tuple[str, ...]:
    """How the tables differ from what this replaydb expects; empty where they do not.

    alembic's comparison: it sees tables, columns, types, keys and indexes, and no CHECKs.

    Raises:
        SchemaError: The revision is not the newest one, see `prepare`.
    """
    backend = _backend(target, read_only=True)
    async with _reading(backend) as connection:
        if problem := _problem(backend, await _look(connection)):
            raise problem
        return await connection.run_sync(_differences)


async def prepare(backend: Backend, *, migrate: bool | None) -> None:
    """Make sure that the tables are those this version works with.

    Args:
        backend: The database.
        migrate: True upgrades whatever is out of date; False never writes; None does neither,
            except that a new SQLite file gets its tables.

    Raises:
        SchemaOutOfDateError: An upgrade is due; the message is the command to run.
        SchemaTooNewError: The tables were made by a newer replaydb.
        SchemaError: There are tables of our names that no migration made.
        DatabaseError: The database cannot be reached, read or upgraded.
    """
    found = await _find(backend)
    problem = _problem(backend, found)
    if problem is None:
        return
    is_new_file = backend.file is not None and found == _NOTHING
    allowed = is_new_file if migrate is None else migrate
    if not (allowed and isinstance(problem, SchemaOutOfDateError)):
        raise problem
    await upgrade(backend)


async def begin_copy(backend: Backend) -> str:
    """Let nobody open a database until `end_copy`: the tables of an empty one, which may be new.

    Whoever was copying into it can not go on.

    Returns:
        What stands in the place of the revision, for `check_copy`.

    Raises:
        InvalidInputError: There is something in it, and it is no copy that was not finished.
        SchemaError: As for `prepare`; or the copy was begun by another version of replaydb.
        DatabaseError: The database cannot be reached, read or written.
    """
    found = await _find(backend)
    if not _is_copy(found.revision):
        await prepare(backend, migrate=found == _NOTHING)
    mark = f"{_COPYING}{REVISIONS[-1]} {secrets.token_hex(8)}"  # alembic's column holds 32
    async with schema_transaction(backend) as connection:
        revision = await connection.scalar(_version_query)
        if revision is not None and _is_copy(revision):
            if revision.split()[1] != REVISIONS[-1]:
                what = "another version of replaydb has begun to copy into it"
                raise SchemaError(f"{what}: remove it, and begin anew", revision, REVISIONS[-1])
        elif used := await connection.run_sync(first_in_use):
            expected = "an empty database, or a copy that was not finished"
            raise InvalidInputError("target", expected, f"one with rows in the table {used}")
        await connection.execute(_set_revision(mark))
    return mark


async def end_copy(backend: Backend, mark: str) -> None:
    """Let everybody open what was copied.

    Raises:
        SchemaError: Another copy has begun since.
        DatabaseError: The database cannot be reached or written.
    """
    async with schema_transaction(backend) as connection:
        await connection.run_sync(lambda sync: check_copy(backend, sync, mark))
        await connection.execute(_set_revision(REVISIONS[-1]))


def check_copy(backend: Backend, connection: Connection, mark: str) -> None:
    """In every transaction that copies: no other copy has begun, nor does before its end.

    Raises:
        SchemaError: One has.
    """
    backend.share_schema(connection)
    revision = connection.scalar(_version_query)
    if revision != mark:
        what = "another copy into it has taken over: only the one that began last goes on"
        raise SchemaError(f"{backend.shown}: {what}", revision, mark)


def check_no_copy(connection: Connection) -> None:
    """Raise if the database, which was empty when it was opened, is being copied into.

    Raises:
        SchemaError: It is.
    """
    revision = connection.scalar(_version_query)
    if _is_copy(revision):
        raise _unfinished(revision)


def _is_copy(revision: str | None) -> bool:
    return revision is not None and revision.startswith(_COPYING)


def _unfinished(revision: str | None) -> SchemaError:
    what = "it is a copy that was not finished: run `replaydb copy` again, or remove it"
    return SchemaError(what, revision, REVISIONS[-1])


def _set_revision(revision: str) -> Update:
    return update(_version_table).values(version_num=revision)


@asynccontextmanager
async def schema_transaction(backend: Backend) -> AsyncIterator[AsyncConnection]:
    """One transaction in which tables may be changed, by one process at a time.

    Raises:
        DatabaseError: The database refused, or rows would refer to rows that are gone.
    """
    await backend.check_target()
    engine = backend.migration_engine()
    try:
        async with _translating(backend), engine.begin() as connection:
            await backend.lock_schema(connection)
            yield connection
            await backend.check_integrity(connection)
    finally:
        await engine.dispose()


def alembic_options() -> dict[str, Any]:
    """How alembic is configured, by `migrations/env.py` and by `check` alike."""
    return {
        "target_metadata": metadata,
        "version_table": VERSION_TABLE,
        "include_object": _is_compared,
        "render_as_batch": True,
        "transactional_ddl": True,
    }


@dataclass(frozen=True, slots=True)
class _Found:
    """What a database holds: the revision, and tables other than alembic's."""

    revision: str | None
    tables: frozenset[str]


_NOTHING = _Found(None, frozenset())


async def _find(backend: Backend) -> _Found:
    """One small query where all is well."""
    file = None if backend.read_only else backend.file
    if file is not None and (not file.exists() or file.stat().st_size == 0):
        return _NOTHING  # connecting would write the header
    async with _reading(backend) as connection:
        with suppress(DBAPIError):  # most likely no such table: the longer way tells
            revision = await connection.scalar(_version_query)
            if revision is not None:
                return _Found(revision, frozenset())
        await connection.rollback()
        return await _look(connection)


async def _look(connection: AsyncConnection) -> _Found:
    names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    revision = await connection.scalar(_version_query) if VERSION_TABLE in names else None
    return _Found(revision, frozenset(names) - {VERSION_TABLE})


def _problem(backend: Backend, found: _Found) -> SchemaError | None:
    newest = REVISIONS[-1]
    if found.revision == newest:
        return None
    if found.revision is None:
        ours = sorted(found.tables & metadata.tables.keys())
        if ours:
            return SchemaError(
                f"there are tables already, without the mark of a migration ({VERSION_TABLE}), "
                f"of the same names as ours: {', '.join(ours)}; use another database",
                None,
                newest,
            )
        what = "there are no tables yet"
    elif _is_copy(found.revision):
        return _unfinished(found.revision)
    elif found.revision in REVISIONS:
        what = f"the tables are of revision {found.revision}, {newest} is needed"
    else:
        return SchemaTooNewError(
            f"the tables are of revision {found.revision}, made by a newer replaydb: "
            f"this one knows no revision after {newest}; upgrade the package",
            found.revision,
            newest,
        )
    # Made to be pasted: with a password that is not shown, the URL has to come from elsewhere.
    if ":***" in backend.shown:
        how = f"with the URL of {backend.shown} in REPLAYDB_URL, run: replaydb db upgrade"
    else:
        how = f"run: replaydb db upgrade --url {shlex.quote(backend.shown)}"
    return SchemaOutOfDateError(f"{what}; {how}", found.revision, newest)


async def _run(backend: Backend, action: Callable[[Config, str], None], revision: str) -> None:
    from alembic.util import CommandError

    config = _config()

    def run(connection: Connection) -> None:
        config.attributes["connection"] = connection
        action(config, revision)

    async with _alembic_alone(), schema_transaction(backend) as connection:
        problem = _problem(backend, await _look(connection))
        if problem is not None and not isinstance(problem, SchemaOutOfDateError):
            raise problem
        try:
            await connection.run_sync(run)
        except CommandError as error:
            raise InvalidInputError(
                "revision", "one of `replaydb db history`, head or base", f"{revision!r}: {error}"
            ) from error


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    # The file format of alembic.ini, which expands %: a folder may well have one in its name.
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    return config


def _folder() -> Path:
    """`migrations/`: inside the installed package, or beside `src/` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError(f"this installation of replaydb has no migrations: {package}")


@asynccontextmanager
async def _alembic_alone() -> AsyncIterator[None]:
    while not _alembic_lock.acquire(blocking=False):  # noqa: ASYNC110 - other threads set it free
        await asyncio.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        _alembic_lock.release()


@asynccontextmanager
async def _reading(backend: Backend) -> AsyncIterator[AsyncConnection]:
    engine = backend.reader_engine()
    try:
        async with _translating(backend), engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


@asynccontextmanager
async def _translating(backend: Backend) -> AsyncIterator[None]:
    try:
        yield
    except ReplayDBError:
        raise
    except Exception as error:
        typed = backend.translate(error)
        if typed is None:
            raise
        raise typed from error


def _backend(target: Backend | str | URL, *, read_only: bool = False) -> Backend:
    if isinstance(target, str | URL):
        return backend_for(target, read_only=read_only)
    return target


def _is_compared(_item: object, name: str | None, kind: str, *_: object) -> bool:
    """Tables of others are none of our business; views are compared by `_view_differences`."""
    return kind != "table" or (name in metadata.tables and name not in _view_names)


def _differences(connection: Connection) -> tuple[str, ...]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts=alembic_options())
    changes: list[Any] = compare_metadata(context, metadata)
    steps = (step for change in changes for step in (change if type(change) is list else [change]))
    return (*(_described(step) for step in steps), *_view_differences(connection))


def _described(step: tuple[Any, ...]) -> str:
    """One change that alembic would make, such as `add index ix_draw_step`."""
    kind, *details = step
    last = details[-1]
    if kind.startswith("modify_"):  # schema, table, column, more, what is, what should be
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
