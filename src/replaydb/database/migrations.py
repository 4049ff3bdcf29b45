"""Migrations from code: what `replaydb db` runs, and what opening a store looks at.

alembic is imported only where something is migrated: a store whose tables are current opens
without it. `docs/migrations.md` tells the rules.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, inspect

from replaydb.database import revisions
from replaydb.database.engines import backend_for
from replaydb.database.engines.protocol import Backend
from replaydb.database.schema import metadata
from replaydb.database.views import VIEWS
from replaydb.errors import InvalidInputError, SchemaOutOfDateError

if TYPE_CHECKING:
    from alembic.config import Config

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
    return (await revisions.find(_backend(target, read_only=True))).revision


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
    async with revisions.reading(backend) as connection:
        if problem := revisions.problem_of(backend, await revisions.look(connection)):
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
    found = await revisions.find(backend)
    problem = revisions.problem_of(backend, found)
    if problem is None:
        return
    is_new_file = backend.file is not None and found == revisions.NOTHING
    allowed = is_new_file if migrate is None else migrate
    if not (allowed and isinstance(problem, SchemaOutOfDateError)):
        raise problem
    await upgrade(backend)


def alembic_options() -> dict[str, Any]:
    """How alembic is configured, by `migrations/env.py` and by `check` alike."""
    return {
        "target_metadata": metadata,
        "version_table": revisions.VERSION_TABLE,
        "include_object": _is_compared,
        "render_as_batch": True,
        "transactional_ddl": True,
    }


async def _run(backend: Backend, action: Callable[[Config, str], None], revision: str) -> None:
    from alembic.util import CommandError

    config = _config()

    def run(connection: Connection) -> None:
        config.attributes["connection"] = connection
        action(config, revision)

    async with _alembic_alone(), revisions.schema_transaction(backend) as connection:
        problem = revisions.problem_of(backend, await revisions.look(connection))
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
