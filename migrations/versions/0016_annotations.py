"""Values of episodes and turns that arrive after they were stored, and their history.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

#: Settings that are new in this revision.
_NEW_SETTINGS = ("requires", "requires_timeout", "on_missing")

_buffer = sa.table("buffer", sa.column("id"), sa.column("settings", sa.JSON))
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table and its view. Draws record the rewards that annotations change."""
    op.add_column(
        "episode_group",
        sa.Column("times_annotated", sa.Integer(), server_default=sa.text("0"), nullable=False),
    )
    op.add_column("draw_group", sa.Column("times_annotated", sa.Integer()))
    op.create_table(
        "annotation",
        sa.Column("group_id", _ID, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("value", sa.Double()),
        sa.Column("previous", sa.Double()),
        sa.Column("changes", sa.JSON()),
        sa.Column("author", sa.String(255)),
        sa.Column("policy_version", sa.BigInteger()),
        sa.Column("run_id", _ID),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["episode_group.id"],
            name="fk_annotation_group_id",
            ondelete="CASCADE",
            deferrable=True,
            initially="DEFERRED",
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name="fk_annotation_run_id", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint(
            "group_id", "number", "position", "turn", "name", name="pk_annotation"
        ),
        sqlite_with_rowid=False,
    )
    op.execute(
        sa.text("""
        CREATE VIEW annotation_history AS
        SELECT annotation.group_id, annotation.number, annotation.position,
            CASE WHEN (annotation.turn >= 0) THEN annotation.turn END AS turn, annotation.name,
            buffer.name AS buffer_name, episode_group.task_name, episode_group.prompt_uid,
            episode_group.group_status, annotation.value, annotation.previous, annotation.changes,
            annotation.author, annotation.policy_version, run.name AS run_name,
            annotation.created_at AS annotated_at
        FROM annotation
            JOIN episode_group ON episode_group.id = annotation.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = annotation.run_id
        """)
    )
    op.execute(sa.DropView(sa.Table("training_history", sa.MetaData())))
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
            CASE WHEN (draw_group.num_tokens IS NOT NULL) THEN draw_group.reward_mean
                ELSE episode_group.reward_mean END AS reward_mean,
            CASE WHEN (draw_group.num_tokens IS NOT NULL) THEN draw_group.reward_std
                ELSE episode_group.reward_std END AS reward_std,
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


def downgrade() -> None:
    """Drop the history, and the settings and missing values that earlier clients do not know.

    `revisions.record` refuses it while payloads have late values, or groups wait for values.
    """
    connection = op.get_bind()
    for row in connection.execute(sa.select(_buffer.c.id, _buffer.c.settings)).all():
        known = {name: one for name, one in row.settings.items() if name not in _NEW_SETTINGS}
        connection.execute(sa.update(_buffer).where(_buffer.c.id == row.id).values(settings=known))
    op.execute(sa.text("DELETE FROM trajectory WHERE missing <> 'episode'"))
    for name in ("annotation_history", "training_history"):
        op.execute(sa.DropView(sa.Table(name, sa.MetaData())))
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
    op.drop_table("annotation")
    op.drop_column("draw_group", "times_annotated")
    op.drop_column("episode_group", "times_annotated")
