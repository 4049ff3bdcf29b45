"""Incremental updates of staleness: tasks record the progress, views compute current staleness.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_buffer = sa.table("buffer", *map(sa.column, ("id", "policy_version")))
_task = sa.table("task", *map(sa.column, ("max_staleness", "is_expiring")))
_group = sa.table(
    "episode_group",
    *map(sa.column, ("buffer_id", "group_status", "staleness", "comparable_version")),
)


def upgrade() -> None:
    _drop_views()
    op.add_column(
        "task",
        sa.Column("num_outdated", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )
    op.add_column(
        "task", sa.Column("is_expiring", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column("task", sa.Column("aged_to", sa.BigInteger()))
    # A downgrade leaves groups that are too stale.
    expiring = sa.update(_task).where(_task.c.max_staleness.is_not(None))
    op.execute(expiring.values(is_expiring=sa.true()))
    _create_views()


def downgrade() -> None:
    """Update the staleness of all groups. Groups still to expire do so at the next advance."""
    _drop_views()
    _bring_up_staleness()
    for name in ("num_outdated", "is_expiring", "aged_to"):
        op.drop_column("task", name)
    _create_old_views()


def _bring_up_staleness() -> None:
    version = (
        sa.select(_buffer.c.policy_version)
        .where(_buffer.c.id == _group.c.buffer_id)
        .scalar_subquery()
    )
    now = version - _group.c.comparable_version
    live = _group.c.group_status.in_(["pending", "completed", "leased", "aborted"])
    behind = live & _group.c.staleness.is_distinct_from(now)
    op.execute(sa.update(_group).where(behind).values(staleness=now))


def _drop_views() -> None:
    for view in ("task_overview", "group_overview"):
        op.execute(sa.DropView(sa.Table(view, sa.MetaData())))


def _create_views() -> None:
    op.execute(
        sa.text("""
        CREATE VIEW group_overview AS
        SELECT episode_group.id AS group_id, buffer.name AS buffer_name, run.name AS run_name,
            episode_group.task_name, episode_group.group_uid, episode_group.prompt_uid,
            episode_group.group_status,
            CASE WHEN (episode_group.group_status IN
                    ('pending', 'completed', 'leased', 'aborted'))
                THEN buffer.policy_version - episode_group.comparable_version
                ELSE episode_group.staleness END AS staleness,
            episode_group.priority,
            episode_group.min_policy_version, episode_group.max_policy_version,
            episode_group.num_episodes, episode_group.expected_episodes, episode_group.num_tokens,
            episode_group.num_bytes, episode_group.reward_mean, episode_group.reward_std,
            episode_group.reward_min, episode_group.reward_max, episode_group.times_sampled,
            episode_group.attempts, episode_group.has_transcript, episode_group.tags,
            episode_group.status_reason, episode_group.created_at, episode_group.completed_at,
            episode_group.first_sampled_at, episode_group.last_sampled_at,
            episode_group.archived_at, episode_group.comparable_version,
            episode_group.times_replaced
        FROM episode_group
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )
    op.execute(
        sa.text("""
        CREATE VIEW task_overview AS
        SELECT buffer.name AS buffer_name, task.task_name, buffer.policy_version,
            task.max_staleness, task.num_inserted, task.num_sampled,
            count(episode_group.id) AS num_groups,
            count(CASE WHEN (episode_group.group_status = 'pending') THEN 1 END) AS num_pending,
            count(CASE WHEN (episode_group.group_status = 'completed') THEN 1 END) AS num_completed,
            count(CASE WHEN (episode_group.group_status = 'leased') THEN 1 END) AS num_leased,
            count(CASE WHEN (episode_group.group_status = 'aborted') THEN 1 END) AS num_aborted,
            count(CASE WHEN (episode_group.group_status = 'expired') THEN 1 END) AS num_expired,
            count(CASE WHEN (episode_group.group_status = 'failed') THEN 1 END) AS num_failed,
            count(CASE WHEN (episode_group.group_status = 'filtered') THEN 1 END) AS num_filtered,
            count(CASE WHEN (episode_group.group_status = 'archived') THEN 1 END) AS num_archived,
            sum(episode_group.num_tokens) AS num_tokens, sum(episode_group.num_bytes) AS num_bytes,
            avg(episode_group.reward_mean) AS reward_mean,
            min(CASE WHEN (episode_group.group_status IN
                    ('pending', 'completed', 'leased', 'aborted'))
                THEN buffer.policy_version - episode_group.comparable_version
                ELSE episode_group.staleness END) AS min_staleness,
            max(CASE WHEN (episode_group.group_status IN
                    ('pending', 'completed', 'leased', 'aborted'))
                THEN buffer.policy_version - episode_group.comparable_version
                ELSE episode_group.staleness END) AS max_seen_staleness
        FROM task
            JOIN buffer ON buffer.id = task.buffer_id
            LEFT OUTER JOIN episode_group ON episode_group.buffer_id = task.buffer_id
                AND episode_group.task_name = task.task_name
        GROUP BY task.id, buffer.name, task.task_name, buffer.policy_version, task.max_staleness,
            task.num_inserted, task.num_sampled
        """)
    )


def _create_old_views() -> None:
    op.execute(
        sa.text("""
        CREATE VIEW group_overview AS
        SELECT episode_group.id AS group_id, buffer.name AS buffer_name, run.name AS run_name,
            episode_group.task_name, episode_group.group_uid, episode_group.prompt_uid,
            episode_group.group_status, episode_group.staleness, episode_group.priority,
            episode_group.min_policy_version, episode_group.max_policy_version,
            episode_group.num_episodes, episode_group.expected_episodes, episode_group.num_tokens,
            episode_group.num_bytes, episode_group.reward_mean, episode_group.reward_std,
            episode_group.reward_min, episode_group.reward_max, episode_group.times_sampled,
            episode_group.attempts, episode_group.has_transcript, episode_group.tags,
            episode_group.status_reason, episode_group.created_at, episode_group.completed_at,
            episode_group.first_sampled_at, episode_group.last_sampled_at,
            episode_group.archived_at, episode_group.comparable_version,
            episode_group.times_replaced
        FROM episode_group
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )
    op.execute(
        sa.text("""
        CREATE VIEW task_overview AS
        SELECT buffer.name AS buffer_name, task.task_name, buffer.policy_version,
            task.max_staleness, task.num_inserted, task.num_sampled,
            count(episode_group.id) AS num_groups,
            count(CASE WHEN (episode_group.group_status = 'pending') THEN 1 END) AS num_pending,
            count(CASE WHEN (episode_group.group_status = 'completed') THEN 1 END) AS num_completed,
            count(CASE WHEN (episode_group.group_status = 'leased') THEN 1 END) AS num_leased,
            count(CASE WHEN (episode_group.group_status = 'aborted') THEN 1 END) AS num_aborted,
            count(CASE WHEN (episode_group.group_status = 'expired') THEN 1 END) AS num_expired,
            count(CASE WHEN (episode_group.group_status = 'failed') THEN 1 END) AS num_failed,
            count(CASE WHEN (episode_group.group_status = 'filtered') THEN 1 END) AS num_filtered,
            count(CASE WHEN (episode_group.group_status = 'archived') THEN 1 END) AS num_archived,
            sum(episode_group.num_tokens) AS num_tokens, sum(episode_group.num_bytes) AS num_bytes,
            avg(episode_group.reward_mean) AS reward_mean,
            min(episode_group.staleness) AS min_staleness,
            max(episode_group.staleness) AS max_seen_staleness
        FROM task
            JOIN buffer ON buffer.id = task.buffer_id
            LEFT OUTER JOIN episode_group ON episode_group.buffer_id = task.buffer_id
                AND episode_group.task_name = task.task_name
        GROUP BY task.id, buffer.name, task.task_name, buffer.policy_version, task.max_staleness,
            task.num_inserted, task.num_sampled
        """)
    )
