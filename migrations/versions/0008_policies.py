"""Run names in all views; views of prompts and of policy versions.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the history of policy versions, without earlier versions, which are unknown."""
    _drop_views("training_history", "episode_overview", "group_overview")
    op.create_table(
        "policy_change",
        sa.Column("id", _ID, nullable=False),
        sa.Column("buffer_id", _ID, nullable=False),
        sa.Column("run_id", _ID),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("lineage", sa.String(255)),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["buffer_id"], ["buffer.id"], name="fk_policy_change_buffer_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name="fk_policy_change_run_id", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_policy_change"),
    )
    op.create_index("ix_policy_change_latest", "policy_change", ["buffer_id", "id"])
    _create_views()


def downgrade() -> None:
    _drop_views(
        "policy_overview", "prompt_overview", "training_history", "episode_overview",
        "group_overview",
    )  # fmt: skip
    op.drop_table("policy_change")
    _create_old_views()


def _drop_views(*names: str) -> None:
    for name in names:
        op.execute(sa.DropView(sa.Table(name, sa.MetaData())))


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
            episode_group.times_replaced, run.lineage AS run_lineage
        FROM episode_group
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )
    op.execute(
        sa.text("""
        CREATE VIEW episode_overview AS
        SELECT episode.group_id, episode.position, buffer.name AS buffer_name,
            episode_group.task_name, episode_group.prompt_uid, episode_group.group_status,
            episode.reward, episode.advantage, episode.num_tokens, episode.num_loss_tokens,
            episode.num_turns, episode.min_policy_version, episode.max_policy_version,
            episode.finish_reason, episode.metadata, run.name AS run_name,
            run.lineage AS run_lineage
        FROM episode
            JOIN episode_group ON episode_group.id = episode.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )
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
    op.execute(
        sa.text("""
        CREATE VIEW policy_overview AS
        SELECT policy_change.id AS change_id, buffer.name AS buffer_name, run.name AS run_name,
            policy_change.lineage, policy_change.policy_version, policy_change.began_at,
            following.began_at AS ended_at
        FROM policy_change
            JOIN buffer ON buffer.id = policy_change.buffer_id
            LEFT OUTER JOIN run ON run.id = policy_change.run_id
            LEFT OUTER JOIN policy_change AS following ON following.id =
                (SELECT min(later.id) AS min_1 FROM policy_change AS later
                WHERE later.buffer_id = policy_change.buffer_id AND later.id > policy_change.id)
        """)
    )


def _create_old_views() -> None:
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
        CREATE VIEW episode_overview AS
        SELECT episode.group_id, episode.position, buffer.name AS buffer_name,
            episode_group.task_name, episode_group.prompt_uid, episode_group.group_status,
            episode.reward, episode.advantage, episode.num_tokens, episode.num_loss_tokens,
            episode.num_turns, episode.min_policy_version, episode.max_policy_version,
            episode.finish_reason, episode.metadata
        FROM episode
            JOIN episode_group ON episode_group.id = episode.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
        """)
    )
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
            episode_group.reward_std
        FROM draw
            JOIN draw_group ON draw_group.draw_id = draw.id
            JOIN buffer ON buffer.id = draw.buffer_id
            LEFT OUTER JOIN run ON run.id = draw.run_id
            LEFT OUTER JOIN episode_group ON episode_group.id = draw_group.group_id
                AND episode_group.times_replaced = draw_group.times_replaced
        """)
    )
