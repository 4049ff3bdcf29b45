"""Outcomes of draws; groups keep their policy versions when the lineage of a buffer changes.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_group = sa.table(
    "episode_group",
    *map(
        sa.column,
        (
            "id",
            "group_status",
            "min_policy_version",
            "max_policy_version",
            "comparable_version",
            "created_at",
            "completed_at",
        ),
    ),
)
_episode = sa.table(
    "episode", *map(sa.column, ("group_id", "min_policy_version", "max_policy_version"))
)
_draw = sa.table("draw", *map(sa.column, ("id", "created_at")))
_drawn = sa.table(
    "draw_group", *map(sa.column, ("draw_id", "group_id", "outcome", "times_replaced"))
)
_IDLE = sa.column("group_status").in_(["completed", "aborted"])


def upgrade() -> None:
    _drop_views()
    op.drop_index("ix_episode_group_policy_version", table_name="episode_group")
    op.add_column("episode_group", sa.Column("comparable_version", sa.BigInteger()))
    op.add_column("episode_group", _times_replaced(nullable=False))
    _tell_versions_apart()
    op.create_index(
        "ix_episode_group_comparable_version",
        "episode_group",
        ["buffer_id", "task_name", "group_status", "comparable_version", "id"],
        sqlite_where=_IDLE,
        postgresql_where=_IDLE,
    )
    op.add_column(
        "draw_group",
        sa.Column(
            "outcome",
            sa.String(16),
            sa.CheckConstraint(
                "outcome IN ('sampled', 'leased', 'acked', 'nacked', 'expired', 'rejected', "
                "'lost')",
                name=op.f("ck_draw_group_outcome"),
            ),
        ),
    )
    op.add_column("draw_group", sa.Column("outcome_reason", sa.Text()))
    op.add_column("draw_group", sa.Column("outcome_at", sa.DateTime(timezone=True)))
    op.add_column("draw_group", _times_replaced(nullable=True))
    _tell_what_is_known_of_draws()
    leased = sa.column("outcome") == sa.literal_column("'leased'")
    op.create_index(
        "ix_draw_group_leased",
        "draw_group",
        ["group_id"],
        sqlite_where=leased,
        postgresql_where=leased,
    )
    _create_views()


def downgrade() -> None:
    _drop_views()
    op.drop_index("ix_draw_group_leased", table_name="draw_group")
    for name in ("outcome", "outcome_reason", "outcome_at", "times_replaced"):
        op.drop_column("draw_group", name)
    op.drop_index("ix_episode_group_comparable_version", table_name="episode_group")
    unknown = _group.c.comparable_version.is_(None)
    op.execute(
        sa.update(_group).where(unknown).values(min_policy_version=None, max_policy_version=None)
    )
    for name in ("comparable_version", "times_replaced"):
        op.drop_column("episode_group", name)
    op.create_index(
        "ix_episode_group_policy_version",
        "episode_group",
        ["buffer_id", "task_name", "group_status", "min_policy_version", "id"],
        sqlite_where=_IDLE,
        postgresql_where=_IDLE,
    )
    _create_old_views()


def _times_replaced(*, nullable: bool) -> sa.Column[int]:
    return sa.Column("times_replaced", sa.Integer(), nullable=nullable, server_default=sa.text("0"))


def _tell_versions_apart() -> None:
    """Restore versions of groups that were erased as not comparable, from their episodes."""
    op.execute(sa.update(_group).values(comparable_version=_group.c.min_policy_version))
    known = sa.func.count(_episode.c.min_policy_version) == sa.func.count()

    def of_episodes(bound: sa.ColumnElement[int]) -> sa.ScalarSelect[int]:
        members = _episode.c.group_id == _group.c.id
        return sa.select(sa.case((known, bound))).where(members).scalar_subquery()

    op.execute(
        sa.update(_group)
        .where(_group.c.min_policy_version.is_(None))
        .values(
            min_policy_version=of_episodes(sa.func.min(_episode.c.min_policy_version)),
            max_policy_version=of_episodes(sa.func.max(_episode.c.max_policy_version)),
        )
    )


def _tell_what_is_known_of_draws() -> None:
    """Set the outcome of the last draw of each leased group. Other outcomes are unknown."""
    held = sa.select(_group.c.id).where(_group.c.group_status == "leased")
    later = _drawn.alias("later")
    newer = sa.exists().where(
        later.c.group_id == _drawn.c.group_id, later.c.draw_id > _drawn.c.draw_id
    )
    op.execute(
        sa.update(_drawn).where(_drawn.c.group_id.in_(held), ~newer).values(outcome="leased")
    )
    # Content that replaced other content was completed when it was put, but has the `created_at`
    # of the content that it replaced.
    replaced = sa.exists().where(
        _group.c.id == _drawn.c.group_id,
        _draw.c.id == _drawn.c.draw_id,
        _group.c.completed_at > _draw.c.created_at,
        _group.c.completed_at > _group.c.created_at,
    )
    op.execute(sa.update(_drawn).where(replaced).values(times_replaced=None))


def _drop_views() -> None:
    for view in ("training_history", "group_overview"):
        op.execute(sa.DropView(sa.Table(view, sa.MetaData())))


def _create_views() -> None:
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
            episode_group.archived_at
        FROM episode_group
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
            episode_group.task_name, episode_group.prompt_uid, episode_group.reward_mean,
            episode_group.reward_std
        FROM draw
            JOIN draw_group ON draw_group.draw_id = draw.id
            JOIN buffer ON buffer.id = draw.buffer_id
            LEFT OUTER JOIN run ON run.id = draw.run_id
            LEFT OUTER JOIN episode_group ON episode_group.id = draw_group.group_id
        """)
    )
