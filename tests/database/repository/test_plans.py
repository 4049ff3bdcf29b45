"""Query plans: every statement of a put, a draw or an advance uses its index."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import and_, func, insert, select, text, true
from sqlalchemy.ext.asyncio import AsyncConnection

import replaydb as rdb
from replaydb import Store
from replaydb.analysis.decoded import scan_group_sizes, select_groups_with_names
from replaydb.analysis.tables import (
    draws_of,
    groups_of,
    scan_annotations,
    scan_draws,
    scan_episodes,
    scan_groups,
    scan_prompts,
    scan_runs,
)
from replaydb.database.filters.compiling import at_most_stale, checked
from replaydb.database.filters.tag_lookups import lookups_in
from replaydb.database.postgresql.combined_writes import writes_as_one
from replaydb.database.postgresql.sequences import identify_groups
from replaydb.database.repository import (
    claims,
    earlier_values,
    late_values,
    missing_values,
    rewriting,
    tasks,
    trajectories,
    unfinished,
)
from replaydb.database.repository.aging import (
    age_groups,
    select_all_too_stale,
    select_end_of_step,
    select_too_stale,
    too_stale,
)
from replaydb.database.repository.buffers import select_available
from replaydb.database.repository.capacity import EVICTABLE
from replaydb.database.repository.draws import select_by_key, select_eligible
from replaydb.database.repository.groups import (
    count_groups_up_to,
    select_episode_page,
    select_facts,
    select_transcripts,
)
from replaydb.database.repository.incremental_groups import past_deadline, select_past_deadline
from replaydb.database.repository.leases import select_overdue
from replaydb.database.repository.lineage import select_steps, settle_groups
from replaydb.database.repository.listing import (
    select_end_of_next,
    select_end_of_previous,
    select_page,
    select_page_by_id,
    select_page_of_all,
    select_pages,
    select_partitions,
    select_partitions_of,
    select_shown,
)
from replaydb.database.repository.locking import (
    lock_all_tasks,
    lock_buffer_and_tasks,
    lock_leased_tasks,
    lock_tasks,
    lock_tasks_of_groups,
)
from replaydb.database.repository.maintenance import any_older, select_any_overdue
from replaydb.database.repository.packs import (
    begin_pack_removal,
    change_packs,
    move_member,
    release_payloads,
    select_mostly_dead,
    select_removable,
    select_staying,
)
from replaydb.database.repository.preview import select_page_of_eligible
from replaydb.database.repository.puts import select_kept_by_uid
from replaydb.database.repository.retention import (
    select_archived,
    select_archived_beyond,
    select_draws_beyond,
    select_ended_draws,
)
from replaydb.database.repository.run_totals import count_drawn, sum_draws, sum_put
from replaydb.database.repository.tags import (
    count_tagged,
    delete_tags,
    insert_tags,
    select_ids_below,
    select_ids_of_prompt,
    select_tagged,
)
from replaydb.database.repository.taking import (
    mark_leased,
    mark_sampled,
    mark_sampled_and_rekey,
    rekey,
)
from replaydb.database.repository.tasks import shift_keys, update_tasks
from replaydb.database.repository.transitions import (
    age_groups_by_id,
    archive_groups,
    delete_groups,
    expire_groups,
    keep_drawn,
    select_losses,
)
from replaydb.database.runtime.prepared import Bound, Write
from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import (
    Order,
    Partition,
    order_of,
    select_among,
    select_first,
)
from replaydb.database.statements.draw import delete_draws
from replaydb.database.statements.episode_group import (
    count_groups,
    select_known_uids,
    select_sums,
    update_each_group,
)
from replaydb.database.statements.lease import select_leased
from replaydb.database.statements.payload import select_payloads
from replaydb.database.statements.selections import IS_FREE, selection
from replaydb.database.statements.statistics import select_task_counters
from replaydb.database.tables.schema import (
    IDLE,
    INDEXED,
    annotation,
    buffer,
    draw,
    draw_group,
    episode,
    episode_group,
    group,
    group_tag,
    pack,
    payload,
    task,
    trajectory,
    transcript,
    turn,
)
from replaydb.domain.policies import SimplePolicy
from replaydb.domain.settings import BufferSettings
from replaydb.operations.removal import ended_draws, select_ids_between, weigh_groups
from support.connections import transaction
from support.plans import assert_reads_only, assert_stays_within, plan_of
from support.postgres import PostgresServer
from support.watching import recorded

TASKS = [f"task-{number}" for number in range(10)]
NUM_GROUPS = 20_000
#: Statuses by id modulo 22; all others are completed.
STATUSES = dict(enumerate(("expired", "archived", "leased", "failed", *["aborted"] * 4)))
ARRIVAL = "ix_episode_group_arrival"
PARTITION = Partition(1, "task-3", "completed")
NOW = datetime(2026, 1, 15, tzinfo=UTC)
INDEXES: list[tuple[SimplePolicy, str]] = [
    (rdb.Fifo(), ARRIVAL),
    (rdb.Lifo(), ARRIVAL),
    (rdb.StalestFirst(), "ix_episode_group_comparable_version"),
    (rdb.FreshestFirst(), "ix_episode_group_comparable_version"),
    (rdb.TopPriority(), "ix_episode_group_priority"),
    (rdb.LeastSampled(), "ix_episode_group_times_sampled"),
    (rdb.Uniform(), "ix_episode_group_uniform_key"),
    (rdb.Prioritized(), "ix_episode_group_priority_key"),
]
#: If PostgreSQL sorts anyway, it may use the smallest of these: all begin with the task.
SCHEDULING = {index for _, index in INDEXES}
BY_POLICY = pytest.mark.parametrize(
    ("policy", "index"), INDEXES, ids=[type(policy).__name__ for policy, _ in INDEXES]
)
FILTERS = {
    "no filter": None,
    "staleness": at_most_stale(4),
    "reward": group.reward_std > 0.1,
    "tag": group.tags["level"].as_string() == "hard",
}


def locking(statement: Bound[Any]) -> Bound[Any]:
    """Return a statement of `Session.lock` with the value of its last run."""
    return statement._replace(values={**statement.values, "is_last": True})


def group_rows() -> Iterator[dict[str, Any]]:
    """Ten tasks, seven groups in eleven completed; one in twenty of unknown version."""
    for i in range(1, NUM_GROUPS + 1):
        version = None if i % 20 == 0 else i % 50
        yield {
            "id": i, "buffer_id": 1, "group_uid": f"uid-{i}", "prompt_uid": f"prompt-{i % 500}",
            "task_name": TASKS[i * 7 % 10],
            "group_status": STATUSES.get(i % 22, "completed"),
            "staleness": None if version is None else 50 - version, "priority": 1.0 + i % 100,
            "weight": 1.0 + i % 100, "uniform_key": (i * 7919 % NUM_GROUPS) / 100,
            "priority_key": (i * 104_729 % NUM_GROUPS) / 1000, "min_policy_version": version,
            "max_policy_version": version, "comparable_version": version,
            "num_episodes": 1, "num_tokens": 100, "num_bytes": 100,
            "reward_std": i % 7 / 10, "times_sampled": i % 9, "attempts": 0,
            "has_transcript": False, "tags": {"level": "hard" if i % 3 else "easy"},
            "created_at": NOW, "last_sampled_at": NOW if i % 3 else None,
        }  # fmt: skip


async def fill(url: str) -> None:
    async with transaction(url) as connection:
        await connection.execute(
            insert(buffer),
            {
                "id": 1,
                "name": "math",
                "settings": BufferSettings(),
                "policy_version": 50,
                "limited_inserts": 0,
                "limited_samples": 0,
                "created_at": NOW,
            },
        )
        await connection.execute(
            insert(task),
            [
                {
                    "buffer_id": 1, "task_name": name, "uniform_clock": 0.0, "priority_clock": 0.0,
                    "random_counter": 0, "num_available": 1800, "total_weight": 1e5,
                    "weight_error": 0.0,
                    "num_pending": 0, "num_leased": 0, "stored_groups": 2000, "stored_tokens": 0,
                    "stored_bytes": 0, "num_inserted": 2000, "num_sampled": 0,
                }
                for name in TASKS
            ],
        )  # fmt: skip
        await connection.execute(insert(episode_group), list(group_rows()))
        await connection.execute(insert(pack), [
            {"id": i, "name": f"{i:032x}", "created_at": NOW, "num_bytes": 1000,
             "live_parts": 0 if i % 100 == 0 else 10, "live_bytes": 0 if i % 100 == 0 else 1000,
             "condemned_at": NOW if i % 100 == 0 else None, "removing": False}
            for i in range(1, 1001)
        ])  # fmt: skip
        await connection.execute(insert(payload), [
            {"group_id": i, "part": 1, "codec_version": 1, "checksum": 0, "data": None,
             "pack_id": i % 1000 + 1, "pack_offset": i // 1000, "pack_length": 100}
            for i in range(1, NUM_GROUPS + 1) if i % 100 != 99
        ])  # fmt: skip
        children: dict[Any, dict[str, Any]] = {
            payload: {"part": 0, "codec_version": 1, "checksum": 0, "data": b"x" * 100},
            transcript: {"position": 0, "text": "thought"},
            episode: {
                "position": 0, "num_tokens": 100, "num_loss_tokens": 50, "num_turns": 1,
                "metadata": {},
            },
        }  # fmt: skip
        for table, values in children.items():
            await connection.execute(
                insert(table), [{"group_id": i, **values} for i in range(1, NUM_GROUPS + 1)]
            )
        await connection.execute(insert(group_tag), [
            {"group_id": i, "name": name, "buffer_id": 1, "text": text, "number": number}
            for i in range(1, NUM_GROUPS + 1)
            for name, text, number in (("level", f"level-{i % 500}", None), ("n", None, i % 700))
        ])  # fmt: skip
        await connection.execute(insert(trajectory), [
            {"group_id": i, "position": position, "buffer_id": 1, "num_turns": i % 3,
             **({"claim_uid": f"claim-{i}", "claimed_by": "worker", "claimed_at": NOW,
                 "expires_at": NOW} if i % 10 == 0 else {"claim_uid": None, "claimed_by": None,
                 "claimed_at": None, "expires_at": None})}
            for i in range(1, NUM_GROUPS + 1) for position in (1, 2)
        ])  # fmt: skip
        await connection.execute(insert(turn), [
            {"group_id": i, "position": 1, "turn": number, "turn_uid": f"call-{number}",
             "num_prompt_tokens": 1, "num_tokens": 2, "num_loss_tokens": 1, "metadata": {}}
            for i in range(1, NUM_GROUPS + 1) for number in range(i % 3)
        ])  # fmt: skip
        draws_made = {"buffer_id": 1, "policy": "Fifo()", "created_at": NOW}
        await connection.execute(insert(draw), [{"id": i, **draws_made} for i in range(1, 3001)])
        await connection.execute(insert(draw_group), [
            {"draw_id": i % 100 + 1, "position": i // 100, "group_id": i, "probability": 1.0,
             "weight": 1.0, "outcome": "leased" if i % 22 == 2 else "acked"}
            for i in range(1, 5001)
        ])  # fmt: skip
        await connection.execute(insert(annotation), [
            {"group_id": i, "number": 1, "position": 0, "turn": -1, "name": "reward",
             "created_at": NOW}
            for i in range(1, NUM_GROUPS + 1)
        ])  # fmt: skip
        if connection.dialect.name == "postgresql":
            await connection.execute(text("ANALYZE"))


@pytest.fixture(scope="module")
def _filled_sqlite(_migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "replay.db"
    shutil.copy(_migrated_file, path)
    asyncio.run(fill(f"sqlite:///{path}"))
    return f"sqlite:///{path}"


@pytest.fixture(scope="module")
def _filled_postgresql(postgres: PostgresServer, _migrated_template: str) -> Iterator[str]:
    url = postgres.create_database("plans", _migrated_template)
    asyncio.run(fill(url))
    yield url
    postgres.drop_database(url)


@pytest.fixture
def filled_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"_filled_{engine_name}")
    return url


@pytest.fixture
async def connection(filled_url: str) -> AsyncIterator[AsyncConnection]:
    async with transaction(filled_url) as opened:
        yield opened


@BY_POLICY
async def test_first_groups_of_a_task(
    connection: AsyncConnection, policy: SimplePolicy, index: str
) -> None:
    order = order_of(policy)
    statement: Any
    for eligible in FILTERS.values():
        if order.clock is None:
            statement = select_first(PARTITION, order, 64, eligible)
        else:
            statement = select_by_key(PARTITION, order, 128, eligible, None)
        assert_reads_only(await plan_of(connection, statement), index)


@pytest.mark.parametrize("column", [group.priority, group.times_sampled], ids=lambda one: one.name)
async def test_oldest_of_equal_keys(connection: AsyncConnection, column: Any) -> None:
    """Even if so many keys are equal that a scan by age would soon find some of them."""
    order = Order(column, descending=True)
    for eligible in FILTERS.values():
        statement = select_first(PARTITION, order, 16, eligible, key=5)
        assert_reads_only(await plan_of(connection, statement), f"ix_episode_group_{column.name}")


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()], ids=["uniform", "priority"])
async def test_next_page_by_key(connection: AsyncConnection, policy: SimplePolicy) -> None:
    order = order_of(policy)
    for eligible in FILTERS.values():
        statement = select_by_key(PARTITION, order, 128, eligible, (5.0, 77))
        assert_reads_only(await plan_of(connection, statement), dict(INDEXES)[policy])


@pytest.mark.parametrize("policy", [rdb.StalestFirst(), rdb.FreshestFirst()])
async def test_groups_of_unknown_version(connection: AsyncConnection, policy: SimplePolicy) -> None:
    statement = select_first(PARTITION, order_of(policy), 64, unknown=True)
    assert_reads_only(await plan_of(connection, statement), "ix_episode_group_comparable_version")


@pytest.mark.parametrize("policy", [rdb.Uniform(), rdb.Prioritized()], ids=["uniform", "priority"])
async def test_new_keys(connection: AsyncConnection, policy: SimplePolicy) -> None:
    order = order_of(policy)
    values = {"group_id": 7, "new_key": 0.5, "now": NOW}
    for statement in (mark_sampled_and_rekey(order), rekey(order)):
        assert_reads_only(await plan_of(connection, statement, values), "pk_episode_group")


async def test_a_scan_of_eligible_groups_reads_one_task(connection: AsyncConnection) -> None:
    for status in rdb.GroupStatus:
        partition = Partition(1, "task-3", status)
        plan = await plan_of(connection, select_eligible(partition, group.reward_std > 0.5))
        assert_stays_within(plan, *SCHEDULING)


async def test_peek_reads_a_task_in_pages(connection: AsyncConnection) -> None:
    for eligible in FILTERS.values():
        statement = select_page_of_eligible(PARTITION, eligible, 9000, 1000)
        assert_reads_only(await plan_of(connection, statement), ARRIVAL)


async def test_setting_a_clock_back_updates_one_task(connection: AsyncConnection) -> None:
    for clock in tasks.CLOCKS:
        plan = await plan_of(connection, shift_keys(PARTITION, clock, 5.0))
        assert_stays_within(plan, *SCHEDULING)


@pytest.mark.parametrize(
    ("statement", "indexes"),
    [
        (sum_put([5, 6, 7], 1), {"pk_episode_group"}),
        (sum_draws([5, 6, 7], 1), {"pk_draw"}),
        (count_drawn([5, 6, 7], 1), {"pk_draw", "pk_draw_group"}),
    ],
    ids=["sum_put", "sum_draws", "count_drawn"],
)
async def test_totals_of_a_run_read_only_the_given_ids(
    connection: AsyncConnection, statement: Any, indexes: set[str]
) -> None:
    plan = await plan_of(connection, statement)
    assert not plan.scans, plan.text
    assert plan.indexes == indexes, plan.text


level, n = rdb.col.tags["level"], rdb.col.tags["n"]
LOOKUPS = {
    "equal": level == "level-3",
    "in": level.in_(["level-3", "level-4"]),
    "range": (n > 10) & (n <= 12),
    "number": n == 3,
    "numbers": n.in_([3, 4]),
}


@pytest.mark.parametrize("where", LOOKUPS.values(), ids=LOOKUPS.keys())
async def test_a_tag_is_looked_up_in_its_index(connection: AsyncConnection, where: Any) -> None:
    (lookup,) = lookups_in(checked(where), {"level", "n"})
    for statement in (count_tagged(1, lookup, 1000), select_tagged(1, lookup)):
        plan = await plan_of(connection, statement)
        assert plan.indexes == {"ix_group_tag_value"}, plan.text
        assert not plan.scans & {"group_tag"}, plan.text
        assert not plan.sorts, plan.text


@BY_POLICY
async def test_groups_found_in_the_tag_index_are_read_by_id(
    connection: AsyncConnection, policy: SimplePolicy, index: str
) -> None:
    ids = list(range(3, 20_000, 500))
    statement = select_among(PARTITION, order_of(policy), ids, FILTERS["tag"])
    assert_stays_within(await plan_of(connection, statement), "pk_episode_group")


async def test_the_tag_index_is_filled_by_id(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, select_ids_below(15_000, 1000))
    assert_reads_only(plan, "pk_episode_group")
    plan = await plan_of(connection, insert_tags("level", [3, 4, 5]))
    assert "pk_episode_group" in plan.indexes, plan.text
    assert not plan.scans & {"episode_group"}, plan.text
    plan = await plan_of(connection, delete_tags([3, 4, 5], ["level"]))
    assert plan.indexes == {"pk_group_tag"}, plan.text
    assert not plan.scans, plan.text


ORDERED = pytest.mark.parametrize(
    ("policy", "index"),
    [(policy, index) for policy, index in INDEXES if order_of(policy).clock is None],
    ids=[type(policy).__name__ for policy, _ in INDEXES if order_of(policy).clock is None],
)


@ORDERED
async def test_aborted_groups_are_in_the_same_indexes(
    connection: AsyncConnection, policy: SimplePolicy, index: str
) -> None:
    partition = Partition(1, "task-3", "aborted")
    for eligible in FILTERS.values():
        statement = select_first(partition, order_of(policy), 16, eligible)
        assert_reads_only(await plan_of(connection, statement), index)


@ORDERED
@pytest.mark.parametrize("status", ["expired", "failed", "archived"])
async def test_a_draw_from_other_statuses_reads_one_task(
    connection: AsyncConnection, policy: SimplePolicy, index: str, status: str
) -> None:
    """It may sort the groups, except in order of ids."""
    order = order_of(policy)
    for unknown in (False, True) if order.column.nullable else (False,):
        statement = select_first(Partition(1, "task-3", status), order, 64, unknown=unknown)
        plan = await plan_of(connection, statement)
        assert_stays_within(plan, ARRIVAL)
        assert index != ARRIVAL or not plan.sorts, plan.text


EVICTIONS = [
    (Order(group.id), "arrival", False),
    (Order(group.comparable_version), "comparable_version", False),
    (Order(group.comparable_version), "comparable_version", True),
    (Order(group.priority), "priority", False),
    (Order(group.last_sampled_at), "last_sampled_at", False),
    (Order(group.last_sampled_at), "arrival", True),
    (Order(group.times_sampled, descending=True), "times_sampled", False),
]


@pytest.mark.parametrize(
    ("order", "index", "unknown"),
    EVICTIONS,
    ids=[f"{order.column.name}{' is null' * unknown}" for order, _, unknown in EVICTIONS],
)
async def test_victims_of_eviction(
    connection: AsyncConnection, order: Order, index: str, unknown: bool
) -> None:
    for status in IDLE:
        partition = Partition(1, "task-3", status)
        statement = select_first(partition, order, 16, unknown=unknown)
        assert_reads_only(await plan_of(connection, statement), f"ix_episode_group_{index}")


async def test_victims_that_can_not_be_drawn(connection: AsyncConnection) -> None:
    for status in ("expired", "failed", "filtered"):
        statement = select_first(Partition(1, "task-3", status), Order(group.id), 16)
        assert_reads_only(await plan_of(connection, statement), ARRIVAL)


LISTED = [
    (group.id, "arrival", 9000),
    (group.priority, "priority", 50.0),
    (group.comparable_version, "comparable_version", 20),
    (group.times_sampled, "times_sampled", 3),
    (group.last_sampled_at, "last_sampled_at", NOW),
]


@pytest.mark.parametrize(("column", "index", "key"), LISTED, ids=[one[1] for one in LISTED])
@pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
async def test_a_page_of_a_listing(
    connection: AsyncConnection, column: Any, index: str, key: Any, descending: bool
) -> None:
    """Including groups without a value, which come last."""
    order = Order(column, descending)
    for unknown in (False, True) if column.nullable else (False,):
        by_age = unknown and column is group.last_sampled_at
        last = (None if unknown else key, 9000)
        reads = [(None, False), (last, False)]
        if not unknown and column in INDEXED:
            reads.append((last, True))
        for (after, equals), eligible in product(reads, (None, FILTERS["reward"])):
            statement = select_page(
                PARTITION, order, 100, eligible, after, unknown=unknown, equals=equals
            )
            plan = await plan_of(connection, statement)
            assert_reads_only(plan, ARRIVAL if by_age else f"ix_episode_group_{index}")
            if connection.dialect.name == "sqlite" and (equals or unknown or index == "arrival"):
                sought = any(f"AND id{sign}?" in plan.text for sign in "<>")
                assert sought == (after is not None), plan.text


@pytest.mark.parametrize(("column", "index", "key"), LISTED, ids=[one[1] for one in LISTED])
async def test_pages_of_several_tasks_are_read_by_index(
    connection: AsyncConnection, column: Any, index: str, key: Any
) -> None:
    partitions = [PARTITION, Partition(1, "task-4", "aborted")]
    for after in (None, (key, 9000)):
        statement = select_pages(partitions, Order(column), 100, None, after, unknown=False)
        plan = await plan_of(connection, statement)
        assert "episode_group" not in plan.scans, plan.text
        assert plan.indexes - {"pk_buffer"} == {f"ix_episode_group_{index}"}, plan.text


async def test_pages_by_id_read_a_range_of_ids(connection: AsyncConnection) -> None:
    """Whatever their tasks and statuses, and however rare the groups that meet the conditions."""
    for statement in (select_end_of_next(500, 999), select_end_of_previous(5000, 999)):
        plan = await plan_of(connection, statement)
        assert plan.indexes == {"pk_episode_group"}, plan.text
        assert not plan.sorts, plan.text
    for eligible, statuses in ((None, None), (group.reward_std > 0.5, ["failed"])):
        where = and_(group.id > 500, group.id <= 1500, true() if eligible is None else eligible)
        condition = selection(1, statuses=statuses, where=where, by_id=True)
        for order in (Order(group.id), Order(group.id, descending=True)):
            plan = await plan_of(connection, select_page_by_id(condition, order, 50))
            assert_stays_within(plan, "pk_episode_group")


async def test_a_listing_of_archived_groups_reads_one_task(
    connection: AsyncConnection,
) -> None:
    partition = Partition(1, "task-3", "archived")
    order = Order(group.priority)
    statement = select_page(partition, order, 100, None, (3.0, 9000), unknown=False)
    assert_stays_within(await plan_of(connection, statement), ARRIVAL)


async def test_tasks_and_statuses_without_groups_are_found_by_index(
    connection: AsyncConnection,
) -> None:
    for statement in (select_partitions(1), select_partitions_of(1, TASKS[:2])):
        plan = await plan_of(connection, statement)
        assert plan.scans <= {"task"}, plan.text  # there are few tasks
        assert ARRIVAL in plan.indexes, plan.text


async def test_visible_columns_of_groups_are_read_by_id(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, select_shown(1, [5, 6, 7]))
    assert "episode_group" not in plan.scans, plan.text
    assert "pk_episode_group" in plan.indexes, plan.text
    assert plan.tables == {"episode_group", "run"}, plan.text


STATEMENTS: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str], set[str]]] = {
    "mark_sampled": (
        lambda: mark_sampled([3, 4, 5], NOW), {}, {"pk_episode_group"}, {"episode_group"},
    ),
    "select_known_uids": (
        lambda: select_known_uids(1, [f"uid-{i}" for i in range(50)]), {},
        {"uq_episode_group_buffer_id_group_uid"}, {"episode_group"},
    ),
    "select_kept_by_uid": (
        lambda: select_kept_by_uid(1, [f"uid-{i}" for i in range(50)]), {},
        {"uq_episode_group_buffer_id_group_uid"}, {"episode_group"},
    ),
    "named by uid": (
        lambda: count_groups(selection(1, uids=["uid-3", "uid-4"])), {},
        {"uq_episode_group_buffer_id_group_uid"}, {"episode_group"},
    ),
    "select_facts": (
        lambda: select_facts(1, [5, 6, 7]), {},
        {"pk_episode_group"}, {"episode_group"},
    ),
    "select_episode_page": (
        lambda: select_episode_page(1, 5, 0, 100), {},
        {"pk_episode", "pk_episode_group"}, {"episode", "episode_group"},
    ),
    "select_ids_of_prompt": (
        lambda: select_ids_of_prompt(1, "prompt-7", 1001), {},
        {"ix_episode_group_prompt_uid"}, {"episode_group"},
    ),
    "select_steps": (
        lambda: select_steps(1, runs=None, above=7, below=None, limit=1), {},
        {"ix_draw_step"}, {"draw"},
    ),
    "select_payloads": (
        lambda: select_payloads([5, 6, 7], None), {},
        {"pk_payload", "pk_pack"}, {"payload", "pack"},
    ),
    "select_payloads_in_part": (
        lambda: select_payloads([5, 6, 7], ["experts"]), {},
        {"pk_payload", "pk_pack"}, {"payload", "pack"},
    ),
    "release_payloads": (
        lambda: release_payloads([5, 6, 7]), {}, {"pk_payload"}, {"payload"},
    ),
    "change_packs": (
        change_packs, {"of_pack": 7, "parts": -1, "bytes": -100, "now": NOW},
        {"pk_pack"}, {"pack"},
    ),
    "select_staying": (lambda: select_staying([5, 6]), {}, {"pk_pack"}, {"pack"}),
    "select_removable": (
        lambda: select_removable(NOW, NOW, 16), {}, {"ix_pack_condemned_at"}, {"pack"},
    ),
    "move_member": (
        move_member, {"old_pack": 7, "old_offset": 0, "new_pack": 8, "new_offset": 64},
        {"ix_payload_pack_id"}, {"payload"},
    ),
    "select_transcripts": (
        lambda: select_transcripts([5, 6, 7]), {}, {"pk_transcript"}, {"transcript"},
    ),
    "set_priorities": (
        update_each_group,
        {"group_id": 7, "priority": 1.0, "weight": 1.0, "priority_key": 0.5},
        {"pk_episode_group"}, {"episode_group"},
    ),
    "mark_leased": (
        lambda: mark_leased([3, 4, 5], 1, NOW, 7), {},
        {"pk_episode_group"}, {"episode_group"},
    ),
    "past_deadline": (
        lambda: select(group.id).where(past_deadline(1, TASKS, NOW)), {},
        {"ix_episode_group_deadline"}, {"episode_group"},
    ),
    "archive_groups": (
        lambda: archive_groups([3, 4, 5], "acked", NOW), {},
        {"pk_episode_group"}, {"episode_group"},
    ),
    "settle_groups": (
        lambda: settle_groups([3, 4, 5], "acked", None, NOW), {},
        {"ix_draw_group_leased"}, {"draw_group"},
    ),
    "expire_groups": (
        lambda: expire_groups([3, 4, 5], "too stale", 51), {},
        {"pk_episode_group"}, {"episode_group"},
    ),
    "age_groups_by_id": (
        lambda: age_groups_by_id([3, 4, 5], 51), {},
        {"pk_episode_group"}, {"episode_group"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
async def test_statements_find_their_rows_by_index(connection: AsyncConnection, name: str) -> None:
    statement, values, indexes, tables = STATEMENTS[name]
    plan = await plan_of(connection, statement(), values)
    assert not plan.scans, plan.text
    assert not plan.sorts, plan.text
    assert plan.indexes == indexes, plan.text
    assert plan.tables == tables, plan.text


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_rows_written_together_are_found_by_index(connection: AsyncConnection) -> None:
    of_groups = [{"group_id": 7, "priority": 1.0}, {"group_id": 8, "priority": 2.0}]
    of_tasks = [{"task_id": 1, "num_sampled": 9}]
    writes = [Write(update_each_group(), of_groups), Write(update_tasks(), of_tasks)]
    plan = await plan_of(connection, writes_as_one(writes, None))
    assert plan.scans <= {"task"}, plan.text  # there are few tasks
    assert "pk_episode_group" in plan.indexes, plan.text


@pytest.mark.parametrize("engine_name", ["postgresql"])
async def test_uids_are_found_by_index(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, identify_groups(1, [f"uid-{i}" for i in range(50)]))
    assert not plan.scans, plan.text
    keys = {"uq_episode_group_buffer_id_group_uid", "pk_episode_group"}
    assert plan.indexes == keys, plan.text


async def test_steps_of_a_run_are_read_in_index_order(
    connection: AsyncConnection,
) -> None:
    """PostgreSQL reads all runs, of which there are few."""
    statement = select_steps(1, runs=["test"], above=7, below=None, limit=1)
    plan = await plan_of(connection, statement)
    assert "draw" not in plan.scans, plan.text
    assert not plan.sorts, plan.text
    assert "ix_draw_step" in plan.indexes, plan.text


async def test_mostly_dead_packs_are_found_by_index(connection: AsyncConnection) -> None:
    """Without it, each tidying would read the rows of all packs."""
    plan = await plan_of(connection, select_mostly_dead(10_000))
    assert "ix_pack_mostly_dead" in plan.text


async def test_payloads_in_packs_marked_for_deletion_are_found_by_index(
    connection: AsyncConnection,
) -> None:
    plan = await plan_of(connection, begin_pack_removal([100, 200], NOW))
    assert not plan.scans, plan.text
    assert "ix_payload_pack_id" in plan.indexes, plan.text


@pytest.mark.parametrize(
    "statement",
    [select_archived(1, "task-3", 16), select_archived_beyond(1, "task-3", 50, 16)],
)
async def test_oldest_archived_groups_are_read_from_the_index(
    connection: AsyncConnection, statement: Any
) -> None:
    assert_reads_only(await plan_of(connection, statement), ARRIVAL)


@pytest.mark.parametrize("statement", [select_ended_draws(1, 4), select_draws_beyond(1, 500, 4)])
async def test_oldest_draws_are_read_from_their_index(
    connection: AsyncConnection, statement: Any
) -> None:
    plan = await plan_of(connection, statement)
    assert not plan.sorts, plan.text
    assert "draw" not in plan.scans, plan.text
    assert "ix_draw_latest" in plan.indexes, plan.text
    assert plan.indexes <= {"ix_draw_latest", "pk_draw_group", "ix_draw_group_leased"}, plan.text


async def test_draws_are_deleted_by_id(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, delete_draws([3, 4, 5]))
    assert not plan.scans, plan.text
    assert "pk_draw" in plan.indexes, plan.text


def of_a_step() -> Any:
    """Condition of a step of `prune_groups`."""
    old = (group.created_at < NOW) & IS_FREE
    return selection(1, ids=[3, 4, 5], statuses=["archived"], where=old)


@pytest.mark.parametrize("build", [weigh_groups, select_sums, delete_groups])
async def test_steps_of_a_deletion_find_their_groups_by_id(
    connection: AsyncConnection, build: Callable[[Any], Any]
) -> None:
    plan = await plan_of(connection, build(of_a_step()))
    assert not plan.scans, plan.text
    tables = (annotation, episode, group_tag, payload, trajectory, transcript, turn)
    children = {f"pk_{one.name}" for one in tables}
    assert plan.indexes - children == {"pk_episode_group"}, plan.text


async def test_what_drew_or_leased_a_replaced_group_is_found_by_id(
    connection: AsyncConnection,
) -> None:
    """Or in the index of groups that are leased, if there are few of these."""
    replaced = selection(1, ids=[3, 4, 5])
    plan = await plan_of(connection, select_losses(replaced))
    assert not plan.scans or "ix_episode_group_lease_id" in plan.text, plan.text
    plan = await plan_of(connection, keep_drawn(replaced))
    assert not plan.scans, plan.text
    assert plan.indexes == {"pk_episode_group", "ix_draw_group_group_id"}, plan.text


async def test_a_page_without_an_index_is_one_scan(connection: AsyncConnection) -> None:
    """However many tasks and statuses there are."""
    order = Order(group.reward_mean, descending=True)
    for after in (None, (0.5, 9)):
        page = select_page_of_all(1, order, 50, None, after, unknown=False)
        plan = await plan_of(connection, page)
        assert plan.tables == {"episode_group"}, plan.text
        reads = re.findall(r'(?:SEARCH|SCAN) |"Relation Name": "episode_group"', plan.text)
        assert len(reads) == 1, plan.text


async def test_pages_of_a_deletion_are_ranges_of_ids(connection: AsyncConnection) -> None:
    """However many groups and draws there are below and above."""
    old = (group.created_at < NOW) & IS_FREE
    archived = selection(1, statuses=["archived"], where=old, by_id=True)
    plan = await plan_of(connection, select_ids_between(group.id, archived, 500, 600, 50))
    assert not plan.scans, plan.text
    of_trajectories = {"pk_trajectory", "ix_trajectory_claim_uid"}
    assert plan.indexes - of_trajectories == {"pk_episode_group"}, plan.text
    ended = ended_draws(1, before=NOW)
    plan = await plan_of(connection, select_ids_between(draw.c.id, ended, 500, 600, 50))
    assert not plan.scans & {"draw"}, plan.text
    assert plan.indexes & {"pk_draw", "ix_draw_latest"}, plan.text


@pytest.mark.parametrize("select_some", [select_too_stale, select_all_too_stale])
async def test_groups_to_expire_are_read_from_their_index(
    connection: AsyncConnection, select_some: Any
) -> None:
    for status in IDLE:
        plan = await plan_of(connection, select_some(1, "task-3", status, 2, 1000))
        assert_reads_only(plan, "ix_episode_group_comparable_version")


async def test_groups_to_expire_are_summed_up_by_the_same_index(
    connection: AsyncConnection,
) -> None:
    plan = await plan_of(connection, select_sums(too_stale(1, "task-3", 2)))
    assert_stays_within(plan, "ix_episode_group_comparable_version")


async def test_aging_step_ends_are_read_in_order_of_ids(
    connection: AsyncConnection,
) -> None:
    plan = await plan_of(connection, select_end_of_step(1, "task-3", 9000, 500))
    assert plan.indexes - {"pk_anon_1"} == {ARRIVAL}, plan.text
    assert plan.text.count(" AND id>?)") == 4 or plan.text.count("> ROW(") == 4, plan.text


async def test_an_aging_step_updates_a_range_of_ids(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, age_groups(1, "task-3", 9000, 9500, 51))
    assert_stays_within(plan, ARRIVAL, "pk_episode_group")


async def test_a_filter_by_staleness_uses_its_index(connection: AsyncConnection) -> None:
    column = rdb.col.staleness
    if connection.dialect.name == "postgresql":  # which scans such a small table
        await connection.execute(text("SET LOCAL enable_seqscan = off"))
    for where, bounds in (
        (column < 3, "<"),
        (column <= 3, "<"),
        (column > 45, ">"),
        (column >= 45, ">"),
        (column == 4, "<>"),
        (column.between(3, 5), "<>"),
    ):
        plan = await plan_of(connection, count_groups(selection(1, where=checked(where))))
        assert plan.indexes >= {"ix_episode_group_staleness"}, plan.text
        condition = re.search(r"ix_episode_group_staleness[^\n]* \((buffer_id=.*)\)", plan.text)
        if connection.dialect.name == "postgresql":
            condition = re.search(r'"Index Cond": "(.*staleness.*)"', plan.text)
        assert condition, plan.text
        assert set(re.findall(r"staleness ?([<>])", condition[1])) == set(bounds), plan.text


async def test_a_count_reads_only_its_tasks_and_statuses(connection: AsyncConnection) -> None:
    condition = selection(1, tasks=TASKS, statuses=["pending", "filtered"])
    plan = await plan_of(connection, count_groups_up_to(condition, 50))
    assert "episode_group" not in plan.scans, plan.text
    assert plan.indexes == {ARRIVAL}, plan.text


async def test_some_overdue_groups_are_found_by_index(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, select_overdue(1, TASKS, NOW, 256))
    assert plan.scans <= {"lease"}, plan.text  # it has no rows here
    assert "ix_episode_group_lease_id" in plan.indexes, plan.text
    assert "pk_episode_group" not in plan.indexes, plan.text
    plan = await plan_of(connection, select_past_deadline(1, TASKS, NOW, 256))
    assert not plan.scans, plan.text
    assert plan.indexes == {"ix_episode_group_deadline"}, plan.text


async def test_overdue_groups_are_found_by_time(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, select_any_overdue(1, NOW))
    assert "ix_episode_group_deadline" in plan.indexes, plan.text
    assert "ix_episode_group_lease_id" in plan.text, plan.text
    assert "payload" not in plan.tables, plan.text


async def test_old_groups_are_found_by_age(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, select(any_older(1, EVICTABLE, NOW)))
    assert "episode_group" not in plan.scans, plan.text
    assert {one for one in plan.indexes if "episode_group" in one} == {ARRIVAL}, plan.text


@pytest.mark.parametrize(
    "statement",
    [
        select_leased(1, 7),
        select_leased(1, 7, [5, 6]),
        locking(lock_leased_tasks(1, 7)),
    ],
)
async def test_leased_groups_are_found_by_their_lease(
    connection: AsyncConnection, statement: Any
) -> None:
    plan = await plan_of(connection, statement)
    assert "episode_group" not in plan.scans, plan.text
    assert plan.indexes & {"ix_episode_group_lease_id", "pk_episode_group"}, plan.text


async def test_available_groups_are_read_from_task_counters(connection: AsyncConnection) -> None:
    assert (await plan_of(connection, select_available(1))).tables == {"task"}
    for lock in (
        lock_all_tasks(1, True, True),
        lock_tasks(1, TASKS[:2], True, True),
        lock_buffer_and_tasks(1, False, False),
    ):
        plan = await plan_of(connection, locking(lock))
        of_plan = {"CONSTANT", "locked", "held"}
        overdue = {"lease", "episode_group", "trajectory"}
        of_store = {"payload_place", "compatibility"}
        assert plan.tables - of_plan == {"task"} | of_store | overdue, plan.text
        assert "episode_group" not in plan.scans, plan.text
    plan = await plan_of(connection, select_task_counters(1))
    assert plan.indexes >= {"ix_episode_group_comparable_version"}, plan.text
    assert plan.scans <= {"task"}, plan.text


async def test_tasks_of_groups_are_locked_by_their_uids(connection: AsyncConnection) -> None:
    plan = await plan_of(connection, locking(lock_tasks_of_groups(1, ["uid-5", "uid-6"])))
    assert "episode_group" not in plan.scans, plan.text


async def test_trajectories_and_turns_are_found_by_key(connection: AsyncConnection) -> None:
    for statement in (
        trajectories.lock_trajectories(1, ["uid-5"], ["1/uid-5"]),
        trajectories.select_known_turns(1, ["uid-5"], ["call-1", "call-2"]),
        trajectories.select_position(1, "uid-5", 1),
        trajectories.select_trajectories([5, 6]),
        trajectories.close_trajectories([5, 6], "closed"),
        trajectories.delete_turn_parts(5, [2, 4]),
        claims.select_claimed(1, "claim-10"),
        claims.select_claimed_tasks(1, "claim-10"),
        unfinished.select_turn(1, "uid-5", 1, "call-1"),
        rewriting.select_prompts(1, ["uid-5", "uid-6"]),
        late_values.select_episode_values(1, ["uid-5", "uid-6"]),
        late_values.select_turn_values(1, ["uid-5"], [0, 1], [0], ["call-1"]),
        late_values.select_late_parts(1, ["uid-5", "uid-6"]),
        late_values.select_annotated(1, ["uid-5", "uid-6"]),
        missing_values.select_missing(1, ["uid-5", "uid-6"]),
        missing_values.delete_missing([5, 6], ["5/0/reward"]),
        earlier_values.select_later(5, [5, 6]),
    ):
        plan = await plan_of(connection, statement)
        tables = (trajectory, turn, episode_group, payload, episode, annotation, draw_group)
        assert not plan.scans & {table.name for table in tables}, plan.text


@pytest.mark.parametrize("whole_groups", [False, True])
async def test_free_trajectories_are_read_in_the_order_of_an_index(
    connection: AsyncConnection, whole_groups: bool
) -> None:
    locked: Any = SimpleNamespace(id=1, task_states=TASKS[:2])
    terms = claims.ClaimTerms("worker", 60.0, whole_groups)
    plan = await plan_of(connection, claims._select_free(locked, terms, 4))
    assert "ix_trajectory_open" in plan.indexes, plan.text
    if whole_groups and connection.dialect.name == "postgresql":  # else it can be run for each row
        assert "CTE claimable" in plan.text, plan.text
    assert "trajectory" not in plan.scans, plan.text


async def test_the_first_run_of_a_lock_returns_one_task(connection: AsyncConnection) -> None:
    """It only waits for the locks. What it has read may have changed meanwhile."""
    some = sorted(TASKS[2:5])
    for lock, names in (
        (lock_all_tasks(1, False, False), sorted(TASKS)),
        (lock_tasks(1, some, False, False), some),
        (lock_buffer_and_tasks(1, False, False), sorted(TASKS)),
    ):
        found = []
        for is_last in (False, True):
            values = {**lock.values, "is_last": is_last}
            rows = (await connection.execute(lock.statement, values)).all()
            assert [row.is_first for row in rows] == [True] + [False] * (len(rows) - 1)
            found.append([row.task_name for row in rows])
        assert found == [names[:1], names]


BAD: dict[str, Any] = {
    "a full scan": select(group.id).where(group.num_bytes > 5).limit(3),
    "a sort": select_by_key(PARTITION, Order(group.num_bytes), 64, None, None),
    "another index": select_first(PARTITION, Order(group.id), 64),
    "a payload page": select_first(
        PARTITION,
        Order(group.uniform_key),
        64,
        select(func.length(payload.c.data)).where(payload.c.group_id == group.id).scalar_subquery()
        > 0,
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_plans_are_detected(connection: AsyncConnection, name: str) -> None:
    """The assertion itself is tested."""
    with pytest.raises(AssertionError):
        assert_reads_only(await plan_of(connection, BAD[name]), "ix_episode_group_uniform_key")


async def test_the_lineage_of_a_group_is_found_by_index(connection: AsyncConnection) -> None:
    statement = (
        select(draw.c.step, draw_group.c.probability)
        .join_from(draw_group, draw)
        .where(draw_group.c.group_id == 5)
    )
    plan = await plan_of(connection, statement)
    assert "ix_draw_group_group_id" in plan.indexes, plan.text


async def test_saving_a_task_does_not_set_its_key(filled_url: str) -> None:
    """Groups refer to the key. On SQLite, setting it reads every group of the task."""
    async with Store.open(filled_url) as store:
        with recorded(store) as statements:

            def work(session: Session) -> list[str]:
                task_states = tasks.states_of(session.lock(lock_all_tasks(1, False, False)))
                statements.clear()
                tasks.save(session, list(task_states.values()))
                session.send()
                return list(statements)

            (update,) = await store._database.write(work)
    assert update.startswith("UPDATE task SET")
    assert "task_name" not in update


async def test_analysis_scans_by_primary_keys(connection: AsyncConnection) -> None:
    """A page reads no more than its window, whatever the conditions."""
    every = groups_of(None, None, None, None)
    few = groups_of([1], ["task-3"], ["failed"], group.reward_std > 0.5)
    large = {"episode_group", "episode", "annotation", "draw_group"}
    tables = (*large, "transcript", "run", "draw")
    aliases = ("anon_1", "putter", "following")
    own = {f"pk_{name}" for name in (*tables, *aliases)}
    for condition in (every, few):
        for scan in (
            scan_groups(condition),
            scan_episodes(condition),
            scan_group_sizes(condition),
            scan_annotations(condition),
            scan_draws(condition),
            scan_runs(),
        ):
            for after in (None, (3, 7, 0, -1, "reward")[: len(scan.keys)]):
                plan = await plan_of(connection, scan.page(2, 4, after, 8192))
                assert plan.indexes <= own, plan.text
                assert not plan.scans & large, plan.text
            plan = await plan_of(connection, scan.end_of_window(2, 5000))
            assert plan.indexes <= own, plan.text
            assert not plan.scans & large, plan.text
        plan = await plan_of(connection, select_groups_with_names(condition, [1, 2, 3]))
        assert not plan.scans & {"episode_group"}, plan.text


async def test_analysis_of_few_rows_reads_only_their_windows(connection: AsyncConnection) -> None:
    of_step = scan_draws(draws_of([1], None, None, None))
    of_step = replace(of_step, of=(draw.c.buffer_id == 1) & (draw.c.step == 7))
    for where in (group.id == 9, group.id.in_([7, 9]), group.id.between(7, 9) & (group.id < 9)):
        for scan in (scan_groups, scan_episodes, scan_group_sizes):
            few = scan(groups_of(eligible=checked(where))).within(checked(where))
            for statement in (few.top, few.end_of_window(0, 9), few.page(0, 9, None, 8192)):
                plan = await plan_of(connection, statement)
                assert not plan.scans & {"episode_group", "episode"}, plan.text
    plan = await plan_of(connection, of_step.end_of_window(0, 900))
    assert "ix_draw_step" in plan.indexes, plan.text
    plan = await plan_of(connection, of_step.page(0, 900, None, 8192))
    assert not plan.scans & {"draw", "draw_group", "episode_group"}, plan.text


async def test_prompts_are_read_by_their_index(connection: AsyncConnection) -> None:
    condition = groups_of(None, ["task-3"], None, None)
    scan = scan_prompts(condition, 1)
    only = scan.within(group.prompt_uid == "prompt-7")
    for statement in (
        scan.top,
        scan.end_of_window("prompt-1", "prompt-9"),
        scan.page("prompt-1", "prompt-102", None, 8192),
        scan.page("prompt-1", "prompt-102", ("prompt-100", "task-3"), 8192),
        only.top,
        only.end_of_window("", "prompt-7"),
        only.page("", "prompt-7", None, 8192),
    ):
        plan = await plan_of(connection, statement)
        assert "ix_episode_group_prompt_uid" in plan.indexes, plan.text
        assert not plan.scans & {"episode_group", "draw_group"}, plan.text
