"""What was drawn when, where datasets stand, and what became of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.prepared import execute_many
from replaydb.database.repository.rows import inserted_id
from replaydb.database.statements import lineage as statements
from replaydb.outcomes import DrawOutcome


@dataclass(frozen=True, slots=True)
class DrawInfo:
    """One draw: which groups trained which step. All sequences are in the order of the batch.

    Attributes:
        id: Which draw; `Buffer.redraw` makes the batch again.
        run_name: The run that drew.
        step: The trainer step it was drawn for, where that was said.
        policy: How it was drawn.
        created_at: When.
        group_ids: The groups.
        probabilities: Chance of each.
        weights: Importance weights.
        staleness: Staleness of each at the draw; None where it was unknown.
        outcomes: What became of each; None where a version of replaydb drew that did not keep it.
        outcome_reasons: Why it was nacked, rejected or lost, where that was said.
        outcome_times: When it was sampled, acked, nacked, ...; None while it is leased.
        times_replaced: How often other content had taken the place of each before the draw; None
            where it is known only that it was replaced since.
    """

    id: int
    run_name: str | None
    step: int | None
    policy: str
    created_at: datetime
    group_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    weights: tuple[float, ...]
    staleness: tuple[int | None, ...]
    outcomes: tuple[DrawOutcome | None, ...]
    outcome_reasons: tuple[str | None, ...]
    outcome_times: tuple[datetime | None, ...]
    times_replaced: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What became of the groups of one prompt of one task; deleted groups are not counted.

    Attributes:
        prompt_uid: The prompt.
        task_name: Its task.
        num_groups: Groups generated from it.
        num_episodes: Their episodes.
        times_sampled: Draws of its groups that were not given back.
        num_sampled: Groups that were drawn at least once.
        num_expired: Groups that became too stale.
        num_filtered: Groups that were rejected.
        num_failed: Groups that failed.
        reward_mean: Mean over groups of the mean reward.
        reward_min: Lowest reward of an episode.
        reward_max: Highest reward of an episode.
        last_put_at: When the newest group was put.
    """

    prompt_uid: str
    task_name: str
    num_groups: int
    num_episodes: int
    times_sampled: int
    num_sampled: int
    num_expired: int
    num_filtered: int
    num_failed: int
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    last_put_at: datetime


async def record(
    connection: AsyncConnection, facts: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> int:
    """Enter a draw: columns of `draw`, and of `draw_group` in order. Returns its id."""
    draw_id = await inserted_id(connection, statements.insert_draw(), dict(facts))
    rows = [
        {"draw_id": draw_id, "position": position, **group} for position, group in enumerate(groups)
    ]
    await execute_many(connection, statements.insert_draw_groups(), rows)
    return draw_id


async def settle(
    connection: AsyncConnection,
    ids: Sequence[int],
    outcome: DrawOutcome,
    reason: str | None,
    now: datetime,
) -> None:
    """Enter what became of groups that were leased until now."""
    if ids:
        await connection.execute(*statements.settle(ids, outcome.value, reason, now))


async def lose(
    connection: AsyncConnection, draw_id: int, damaged: Mapping[int, str], now: datetime
) -> None:
    """Enter which groups of a draw could not be read, and why."""
    for reason in sorted(set(damaged.values())):
        ids = [one for one, why in damaged.items() if why == reason]
        await connection.execute(statements.lose_drawn(draw_id, ids, reason, now))


async def draws(connection: AsyncConnection, buffer_id: int, **which: Any) -> list[DrawInfo]:
    """Draws of a buffer, the newest first; `which` as `statements.lineage.draws` takes it."""
    found = (await connection.execute(statements.draws(buffer_id, **which))).all()
    members: dict[int, list[Any]] = {row.id: [] for row in found}
    for row in await connection.execute(statements.drawn_groups(list(members))):
        members[row.draw_id].append(row)
    return [
        DrawInfo(
            row.id,
            row.run_name,
            row.step,
            row.policy,
            row.created_at,
            tuple(one.group_id for one in members[row.id]),
            tuple(one.probability for one in members[row.id]),
            tuple(one.weight for one in members[row.id]),
            tuple(one.staleness for one in members[row.id]),
            tuple(one.outcome and DrawOutcome(one.outcome) for one in members[row.id]),
            tuple(one.outcome_reason for one in members[row.id]),
            tuple(
                row.created_at if one.outcome == DrawOutcome.SAMPLED else one.outcome_at
                for one in members[row.id]
            ),
            tuple(one.times_replaced for one in members[row.id]),
        )
        for row in found
    ]


async def find_draw(connection: AsyncConnection, buffer_id: int, draw_id: int) -> DrawInfo | None:
    """One draw of a buffer."""
    found = await draws(
        connection,
        buffer_id,
        draw_id=draw_id,
        step=None,
        runs=None,
        group_id=None,
        before=None,
        limit=1,
    )
    return found[0] if found else None


async def cursor(connection: AsyncConnection, buffer_id: int, name: str) -> Any:
    """Value of a cursor; None where there is none."""
    return await connection.scalar(statements.find_cursor(buffer_id, name))


async def set_cursors(
    connection: AsyncConnection, buffer_id: int, cursors: Mapping[str, Any], now: datetime
) -> None:
    """Write cursors; of two clients that make the same one, the loser of the race runs again."""
    for name, value in sorted(cursors.items()):  # in one order, so that nobody deadlocks
        values = {"value": value, "updated_at": now}
        changed = await connection.execute(statements.update_cursor(buffer_id, name), values)
        if changed.rowcount == 0:
            row = {"buffer_id": buffer_id, "name": name, **values}
            await connection.execute(statements.insert_cursor(), row)


async def prompts(connection: AsyncConnection, condition: ColumnElement[bool]) -> list[PromptInfo]:
    """What became of every prompt."""
    rows = await connection.execute(statements.prompts(condition))
    return [PromptInfo(**row) for row in rows.mappings()]
