"""Replaced content in draws, groups that leases lost, evictions, and a counter of replacements.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_VIEWS = ("training_history", "prompt_overview")


def _drawn() -> list[sa.Column[object]]:
    return [
        sa.Column("task_name", sa.String(255)),
        sa.Column("prompt_uid", sa.String(255)),
        sa.Column("group_run_id", _ID),
        sa.Column("reward_mean", sa.Double()),
        sa.Column("reward_std", sa.Double()),
        sa.Column("min_policy_version", sa.BigInteger()),
        sa.Column("max_policy_version", sa.BigInteger()),
        sa.Column("num_tokens", sa.BigInteger()),
    ]


def upgrade() -> None:
    """Add the columns. Groups that were evicted before count as consumed."""
    _drop_views()
    op.add_column(
        "task",
        sa.Column("num_replaced", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )
    op.add_column("lease", sa.Column("lost_ids", sa.JSON()))
    op.add_column(
        "episode_group",
        sa.Column("is_evicted", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    for column in _drawn():
        op.add_column("draw_group", column)
    _create_views()


def downgrade() -> None:
    _drop_views()
    for column in _drawn():
        op.drop_column("draw_group", column.name)
    op.drop_column("episode_group", "is_evicted")
    op.drop_column("lease", "lost_ids")
    op.drop_column("task", "num_replaced")
    _create_old_views()


def _drop_views() -> None:
    for name in _VIEWS:
        op.execute(sa.DropView(sa.Table(name, sa.MetaData())))


def _create_views() -> None:
    op.execute(
        sa.text("""
        CREATE VIEW training_history AS
        SELECT draw.id AS draw_id, draw.created_at AS drawn_at, buffer.name AS buffer_name,
            run.name AS run_name, draw.step, draw.policy, draw_group.position,
            draw_group.group_id, draw_group.probability, draw_group.weight, draw_group.staleness,
            draw_group.outcome, draw_group.outcome_reason,
            CASE WHEN (draw_group.outcome = 'sampled') THEN draw.created_at
                ELSE draw_group.outcome_at END AS outcome_at,
            coalesce(episode_group.task_name, draw_group.task_name) AS task_name,
            coalesce(episode_group.prompt_uid, draw_group.prompt_uid) AS prompt_uid,
            coalesce(episode_group.reward_mean, draw_group.reward_mean) AS reward_mean,
            coalesce(episode_group.reward_std, draw_group.reward_std) AS reward_std,
            putter.name AS group_run_name, putter.lineage AS group_run_lineage,
            coalesce(episode_group.min_policy_version, draw_group.min_policy_version)
                AS min_policy_version,
            coalesce(episode_group.max_policy_version, draw_group.max_policy_version)
                AS max_policy_version,
            coalesce(episode_group.num_tokens, draw_group.num_tokens) AS num_tokens
        FROM draw
            JOIN draw_group ON draw_group.draw_id = draw.id
            JOIN buffer ON buffer.id = draw.buffer_id
            LEFT OUTER JOIN run ON run.id = draw.run_id
            LEFT OUTER JOIN episode_group ON episode_group.id = draw_group.group_id
                AND episode_group.times_replaced = draw_group.times_replaced
            LEFT OUTER JOIN run AS putter ON putter.id =
                coalesce(episode_group.run_id, draw_group.group_run_id)
        """)
    )
    op.execute(
        sa.text("""
        CREATE VIEW prompt_overview AS
        SELECT buffer.name AS buffer_name, episode_group.task_name, episode_group.prompt_uid,
            count(episode_group.id) AS num_groups,
            CAST(sum(episode_group.num_episodes) AS BIGINT) AS num_episodes,
            CAST(sum(episode_group.num_tokens) AS BIGINT) AS num_tokens,
            avg(episode_group.reward_mean) AS reward_mean,
            min(episode_group.reward_min) AS reward_min,
            max(episode_group.reward_max) AS reward_max,
            min(episode_group.min_policy_version) AS first_version,
            max(episode_group.max_policy_version) AS last_version,
            CAST(sum(episode_group.times_sampled +
                CASE WHEN (episode_group.times_replaced > 0) THEN
                    (SELECT count(*) AS count_1 FROM draw_group
                    WHERE draw_group.group_id = episode_group.id
                        AND draw_group.outcome IN ('sampled', 'acked')
                        AND draw_group.task_name = episode_group.task_name
                        AND draw_group.prompt_uid = episode_group.prompt_uid)
                ELSE 0 END) AS BIGINT) AS times_sampled,
            CAST(sum((SELECT count(*) AS count_2 FROM draw_group
                WHERE draw_group.group_id = episode_group.id
                    AND draw_group.outcome IN ('sampled', 'acked')
                    AND (draw_group.task_name IS NULL
                        OR draw_group.task_name = episode_group.task_name
                        AND draw_group.prompt_uid = episode_group.prompt_uid))) AS BIGINT)
                AS times_trained,
            min(episode_group.created_at) AS first_put_at,
            max(episode_group.created_at) AS last_put_at
        FROM episode_group
            JOIN buffer ON buffer.id = episode_group.buffer_id
        WHERE episode_group.prompt_uid IS NOT NULL
        GROUP BY buffer.name, episode_group.prompt_uid, episode_group.task_name
        """)
    )


def _create_old_views() -> None:
    op.execute(
        sa.text("""
        CREATE VIEW training_history AS
        SELECT draw.id AS draw_id, draw.created_at AS drawn_at, buffer.name AS buffer_name,
            run.name AS run_name, draw.step, draw.policy, draw_group.position,
            draw_group.group_id, draw_group.probability, draw_group.weight, draw_group.staleness,
            draw_group.outcome, draw_group.outcome_reason,
            CASE WHEN (draw_group.outcome = 'sampled') THEN draw.created_at
                ELSE draw_group.outcome_at END AS outcome_at,
            episode_group.task_name, episode_group.prompt_uid, episode_group.reward_mean,
            episode_group.reward_std, putter.name AS group_run_name,
            putter.lineage AS group_run_lineage, episode_group.min_policy_version,
            episode_group.max_policy_version, episode_group.num_tokens
        FROM draw
            JOIN draw_group ON draw_group.draw_id = draw.id
            JOIN buffer ON buffer.id = draw.buffer_id
            LEFT OUTER JOIN run ON run.id = draw.run_id
            LEFT OUTER JOIN episode_group ON episode_group.id = draw_group.group_id
                AND episode_group.times_replaced = draw_group.times_replaced
            LEFT OUTER JOIN run AS putter ON putter.id = episode_group.run_id
        """)
    )
    op.execute(
        sa.text("""
        CREATE VIEW prompt_overview AS
        SELECT buffer.name AS buffer_name, episode_group.task_name, episode_group.prompt_uid,
            count(episode_group.id) AS num_groups,
            CAST(sum(episode_group.num_episodes) AS BIGINT) AS num_episodes,
            CAST(sum(episode_group.num_tokens) AS BIGINT) AS num_tokens,
            avg(episode_group.reward_mean) AS reward_mean,
            min(episode_group.reward_min) AS reward_min,
            max(episode_group.reward_max) AS reward_max,
            min(episode_group.min_policy_version) AS first_version,
            max(episode_group.max_policy_version) AS last_version,
            CAST(sum(episode_group.times_sampled) AS BIGINT) AS times_sampled,
            CAST(sum((SELECT count(*) AS count_1 FROM draw_group
                WHERE draw_group.group_id = episode_group.id
                    AND draw_group.outcome IN ('sampled', 'acked'))) AS BIGINT) AS times_trained,
            min(episode_group.created_at) AS first_put_at,
            max(episode_group.created_at) AS last_put_at
        FROM episode_group
            JOIN buffer ON buffer.id = episode_group.buffer_id
        WHERE episode_group.prompt_uid IS NOT NULL
        GROUP BY buffer.name, episode_group.prompt_uid, episode_group.task_name
        """)
    )
