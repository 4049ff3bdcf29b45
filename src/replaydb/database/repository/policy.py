"""The policy clock of a buffer, and what follows from its settings."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository import buffers, groups, tasks, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locking import Scope
from replaydb.database.repository.transitions import Accounts
from replaydb.database.statements import buffers as buffer_statements
from replaydb.database.statements import groups as statements
from replaydb.errors import InvalidInputError, InvalidSettingsError
from replaydb.settings import BufferSettings


async def advance(
    connection: AsyncConnection, scope: Scope, version: int, *, rewind: bool, take_over: bool
) -> int:
    """Move the policy version, and the staleness of every live group with it.

    Returns:
        How many groups expired.
    """
    state = await buffers.state(connection, scope.buffer_id, scope.buffer_name, lock=True)
    new_lineage = not scope.compares(state)
    if new_lineage and not take_over:
        raise InvalidInputError(
            "run",
            f"a run of lineage {state.policy_lineage!r}, whose policy this buffer follows "
            "(or take_over=True)",
            f"one of lineage {scope.run.lineage!r}",
        )
    if version < state.policy_version and not (rewind or new_lineage):
        raise InvalidInputError(
            "version",
            f"at least the buffer's policy version {state.policy_version} (or rewind=True)",
            version,
        )
    accounts = await tasks.lock(connection, scope.buffer_id)
    lineage = scope.run.lineage or state.policy_lineage
    await connection.execute(
        buffer_statements.save_buffer(scope.buffer_id),
        {"policy_version": version, "policy_lineage": lineage},
    )
    if lineage is not None and lineage != state.policy_lineage:
        for statement in statements.relate_versions(scope.buffer_id, lineage):
            await connection.execute(statement)
    expired = await _expire(connection, scope.buffer_id, version, accounts)
    await connection.execute(statements.refresh_staleness(scope.buffer_id, accounts, version))
    await tasks.save(connection, accounts.values())
    return expired


async def apply_settings(
    connection: AsyncConnection, before: BufferRow, settings: BufferSettings
) -> None:
    """Store changed settings of a locked buffer, and bring its groups in line with them."""
    accounts = await tasks.lock(connection, before.id)
    values: dict[str, object] = {"settings": settings.to_json()}
    if settings.rate_limit != before.settings.rate_limit:
        values |= {"limited_inserts": 0, "limited_samples": 0}
    await connection.execute(buffer_statements.save_buffer(before.id), values)
    for account in accounts.values():
        account.max_staleness = settings.max_staleness_of(account.task_name)
        if settings.seed != before.settings.seed:
            account.random_counter = 0
    await _expire(connection, before.id, before.policy_version, accounts)
    if settings.priority_exponent != before.settings.priority_exponent:
        await _reweigh(connection, before.id, settings, accounts)
    await tasks.save(connection, accounts.values())


async def _expire(
    connection: AsyncConnection, buffer_id: int, version: int, accounts: Accounts
) -> int:
    expired = 0
    for account in accounts.values():
        if account.max_staleness is not None:
            condition = statements.too_stale(
                buffer_id, account.task_name, version, account.max_staleness
            )
            values = {
                "status_reason": statements.TOO_STALE,
                "staleness": statements.staleness_at(version),
            }
            expired += await transitions.expire(connection, accounts, condition, values)
    return expired


async def _reweigh(
    connection: AsyncConnection, buffer_id: int, settings: BufferSettings, accounts: Accounts
) -> None:
    """Every group keeps its priority, under another exponent.

    Raises:
        InvalidSettingsError: One of them would have a weight that cannot be drawn by.
    """
    condition = statements.selection(buffer_id)
    rows = (await connection.execute(statements.scalars(condition))).all()
    priorities = {row.id: row.priority for row in rows}
    try:
        await groups.update_priorities(connection, accounts, settings, rows, priorities)
    except InvalidInputError as error:
        raise InvalidSettingsError(f"of a group that is stored, {error}") from None
