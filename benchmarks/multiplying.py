"""Buffers with tens of millions of groups on PostgreSQL: rows are multiplied on the server.

A few groups are put, and half of them leased and acked, by the API. All other rows are copies of
theirs, with ids, uids, sampling keys and times of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Double,
    Insert,
    Table,
    TableValuedColumn,
    Text,
    cast,
    func,
    insert,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.schema import CreateIndex, DropIndex

import replaydb as rdb
from benchmarks.filling import LEVELS, TASKS
from replaydb.database.repository import recount, sequences
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.tables.schema import (
    draw,
    draw_group,
    episode,
    episode_group,
    group_tag,
    payload,
    task,
)

#: Groups that are put: the first half becomes archived, the others stay completed.
TEMPLATES = 128
HALF = TEMPLATES // 2
BATCH = 32
DAYS = 60
GROUPS_PER_PROMPT = 16
TOKENS = 24
CHUNK = 500_000
_TIMES = ("created_at", "completed_at", "first_sampled_at", "last_sampled_at", "archived_at")


async def multiply(url: str, count: int, report: Callable[[str], None] = lambda _: None) -> None:
    """Create the buffer "bench" with `count` groups, on a database without rows.

    The older half is archived and was drawn once, the newer half is completed. Requires a
    superuser, since foreign keys are not checked.
    """
    await _put_templates(url)
    engine = create_async_engine(asyncpg_url(url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for setting in (
            text("SET session_replication_role = replica"),
            text("SET synchronous_commit = off"),
            text("SET maintenance_work_mem = '1GB'"),
            text("SET work_mem = '1GB'"),
        ):
            await connection.execute(setting)
        tables = (episode_group, draw, draw_group, payload, episode, group_tag)
        indexes = sorted(
            (one for table in tables for one in table.indexes), key=lambda one: str(one.name)
        )
        for index in indexes:
            await connection.execute(DropIndex(index))
        # Their copies: the templates that are not archived have the ids up to `TEMPLATES`.
        archived = count // 2 + HALF
        for first in range(TEMPLATES + 1, count + 1, CHUNK):
            last = min(first + CHUNK - 1, count)
            report(f"{first:,} of {count:,} groups")
            statements = [
                *_groups(first, min(last, archived), 0, count),
                *_draws(first, min(last, archived), count),
                *_groups(max(first, archived + 1), last, HALF, count),
            ]
            for statement in statements:
                await connection.execute(statement)
        for index in indexes:
            report(f"{count:,} groups: {index.name}")
            await connection.execute(CreateIndex(index))
        await _correct(url, connection, count)
        report(f"{count:,} groups: statistics")
        await connection.execute(text("VACUUM ANALYZE"))
    await engine.dispose()


def asyncpg_url(url: str) -> Any:
    """Return a URL for an engine of SQLAlchemy."""
    return make_url(url).set(drivername="postgresql+asyncpg")


async def _put_templates(url: str) -> None:
    async with rdb.Store.open(url, run="bench") as store:
        buffer = await store.buffer("bench", seed=0, compression="zstd", indexed_tags=["level"])
        ids = await buffer.put([_template(number) for number in range(TEMPLATES)])
        assert ids == list(range(1, TEMPLATES + 1)), "the database must have no other rows"
        for _ in range(0, HALF, BATCH):
            async with buffer.lease(BATCH, rdb.Fifo(), ttl=600):
                pass


def _template(number: int) -> rdb.EpisodeGroup:
    one = rdb.Episode(
        prompt_ids=range(TOKENS // 2),
        response_ids=range(TOKENS // 2),
        logprobs=[-0.5] * (TOKENS // 2),
        reward=number % 7 / 7,
        policy_version=0,
    )
    return rdb.EpisodeGroup(
        TASKS[number % len(TASKS)],
        [one],
        group_uid=_uid(number + 1),
        prompt_uid=f"prompt-{number}",
        priority=1 + number % 13,
        tags={"level": LEVELS[number // len(TASKS) % 2]},
    )


def _uid(number: int) -> str:
    return f"bench-{number:012}"


def _groups(first: int, last: int, offset: int, count: int) -> Iterator[Insert]:
    """Yield statements that insert groups `first` to `last`: copies of the half after `offset`."""
    new = _series(first, last)
    source = (new - 1) % HALF + 1 + offset
    for table in (payload, episode, group_tag):
        yield _copies(table, table.c.group_id, source, group_id=new)
    age = _age(new, count)
    exponential = -func.ln(1 - func.random(), type_=Double)
    yield _copies(
        episode_group,
        episode_group.c.id,
        source,
        id=new,
        group_uid=literal("bench-").concat(func.lpad(cast(new, Text), 12, "0")),
        prompt_uid=literal("prompt-").concat(cast(new / GROUPS_PER_PROMPT, Text)),
        uniform_key=exponential,
        priority_key=exponential / episode_group.c.weight,
        **{name: episode_group.c[name] - age for name in _TIMES},
    )


def _draws(first: int, last: int, count: int) -> Iterator[Insert]:
    """Yield statements that insert the draws of groups `first` to `last`."""
    new = _series(first, last)
    yield _copies(
        draw_group,
        draw_group.c.group_id,
        (new - 1) % HALF + 1,
        group_id=new,
        draw_id=_draw_of(new),
        outcome_at=draw_group.c.outcome_at - _age(new, count),
    )
    number = _series(_draw_of(first), _draw_of(last))
    yield _copies(
        draw,
        draw.c.id,
        (number - 1) % (HALF // BATCH) + 1,
        id=number,
        step=number,
        created_at=draw.c.created_at - _age(number * BATCH, count),
    )


def _series(first: int, last: int) -> TableValuedColumn[int]:
    return func.generate_series(first, last, type_=BigInteger).column_valued("new")


def _draw_of(group_id: Any) -> Any:
    return (group_id - 1) // BATCH + 1


def _age(group_id: ColumnElement[int], count: int) -> ColumnElement[timedelta]:
    return literal(timedelta(days=DAYS)) * (count - group_id) / float(count)


def _copies(
    table: Table, key: Column[int], source: ColumnElement[int], **changed: ColumnElement[Any]
) -> Insert:
    """Insert a copy of a template's row for each number of the series that `source` has."""
    columns = {one.name: changed.get(one.name, one) for one in table.columns}
    copies = (
        select(*columns.values())
        .where(key == source, key <= TEMPLATES)
        .order_by(literal_column("new"))
    )
    return insert(table).from_select(list(columns), copies)


async def _correct(url: str, connection: AsyncConnection, count: int) -> None:
    """Correct counters and sequences."""
    factor = count // TEMPLATES
    counts = {one.name: one * factor for one in (task.c.num_inserted, task.c.num_sampled)}
    await connection.execute(update(task).values(**counts))
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        database = store._database

        def work(session: Session) -> None:
            recount.repair_counters(session, buffer.id, buffer.name)
            sequences.repair(database.backend, session)

        await database.write(work, end=end_in(BULK_SECONDS))
