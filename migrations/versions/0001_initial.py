"""Initial schema: groups, payloads, tasks with their clocks, draws, and views.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# A migration is frozen: it is self-contained and imports nothing from the package.
Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)
Name = sa.String(255)
Timestamp = sa.DateTime(timezone=True)


def upgrade() -> None:
    _create_owners()
    _create_groups()
    _index_groups()
    _create_contents()
    _create_history()
    _create_group_views()
    _create_history_views()


def downgrade() -> None:
    for view in ("task_overview", "training_history", "episode_overview", "group_overview"):
        op.execute(sa.DropView(sa.Table(view, sa.MetaData())))
    for table in (
        "cursor",
        "draw_group",
        "draw",
        "transcript",
        "payload",
        "episode",
        "episode_group",
        "lease",
        "task",
        "buffer",
        "run",
    ):
        op.drop_table(table)


def _create_owners() -> None:
    op.create_table(
        "run",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("lineage", Name),
        sa.Column("started_at", Timestamp, nullable=False),
        sa.Column("metadata", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.UniqueConstraint("name", name="uq_run_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "buffer",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("settings", Json, nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("policy_lineage", Name),
        sa.Column("limited_inserts", sa.BigInteger(), nullable=False),
        sa.Column("limited_samples", sa.BigInteger(), nullable=False),
        sa.Column("created_at", Timestamp, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_buffer"),
        sa.UniqueConstraint("name", name="uq_buffer_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "task",
        sa.Column("id", Id, nullable=False),
        sa.Column("buffer_id", Id, nullable=False),
        sa.Column("task_name", Name, nullable=False),
        sa.Column("max_staleness", sa.BigInteger()),
        sa.Column("uniform_clock", sa.Double(), nullable=False),
        sa.Column("priority_clock", sa.Double(), nullable=False),
        sa.Column("random_counter", sa.BigInteger(), nullable=False),
        sa.Column("num_available", sa.BigInteger(), nullable=False),
        sa.Column("total_weight", sa.Double(), nullable=False),
        sa.Column("weight_error", sa.Double(), nullable=False),
        sa.Column("num_pending", sa.BigInteger(), nullable=False),
        sa.Column("num_leased", sa.BigInteger(), nullable=False),
        sa.Column("stored_groups", sa.BigInteger(), nullable=False),
        sa.Column("stored_tokens", sa.BigInteger(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_inserted", sa.BigInteger(), nullable=False),
        sa.Column("num_sampled", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_task"),
        _buffer_key("task"),
        sa.UniqueConstraint("buffer_id", "task_name", name="uq_task_buffer_id_task_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "lease",
        sa.Column("id", Id, nullable=False),
        sa.Column("buffer_id", Id, nullable=False),
        sa.Column("owner", Name, nullable=False),
        sa.Column("acquired_at", Timestamp, nullable=False),
        sa.Column("expires_at", Timestamp, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_lease"),
        _buffer_key("lease"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_lease_expires_at", "lease", ["buffer_id", "expires_at"])


def _create_groups() -> None:
    op.create_table(
        "episode_group",
        sa.Column("id", Id, nullable=False),
        sa.Column("buffer_id", Id, nullable=False),
        sa.Column("run_id", Id),
        sa.Column("group_uid", Name, nullable=False),
        sa.Column("prompt_uid", Name),
        sa.Column("task_name", Name, nullable=False),
        sa.Column("group_status", sa.String(16), nullable=False),
        sa.Column("staleness", sa.BigInteger()),
        sa.Column("priority", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("uniform_key", sa.Double(), nullable=False),
        sa.Column("priority_key", sa.Double(), nullable=False),
        sa.Column("min_policy_version", sa.BigInteger()),
        sa.Column("max_policy_version", sa.BigInteger()),
        sa.Column("num_episodes", sa.Integer(), nullable=False),
        sa.Column("expected_episodes", sa.Integer()),
        sa.Column("min_episodes", sa.Integer()),
        sa.Column("deadline", Timestamp),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reward_mean", sa.Double()),
        sa.Column("reward_std", sa.Double()),
        sa.Column("reward_min", sa.Double()),
        sa.Column("reward_max", sa.Double()),
        sa.Column("times_sampled", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("lease_id", Id),
        sa.Column("leased_from", sa.String(16)),
        sa.Column("has_transcript", sa.Boolean(), nullable=False),
        sa.Column("tags", Json, nullable=False),
        sa.Column("status_reason", sa.Text()),
        sa.Column("created_at", Timestamp, nullable=False),
        sa.Column("completed_at", Timestamp),
        sa.Column("first_sampled_at", Timestamp),
        sa.Column("last_sampled_at", Timestamp),
        sa.Column("archived_at", Timestamp),
        sa.PrimaryKeyConstraint("id", name="pk_episode_group"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_episode_group_run_id"),
        sa.ForeignKeyConstraint(
            ["lease_id"], ["lease.id"], name="fk_episode_group_lease_id", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["buffer_id", "task_name"],
            ["task.buffer_id", "task.task_name"],
            name="fk_episode_group_buffer_id_task_name",
            ondelete="CASCADE",
        ),
        sa.CheckConstraint(
            "group_status IN ('pending', 'completed', 'leased', 'aborted', 'expired', 'failed', "
            "'filtered', 'archived')",
            name=op.f("ck_episode_group_group_status"),
        ),
        sa.UniqueConstraint("buffer_id", "group_uid", name="uq_episode_group_buffer_id_group_uid"),
        sqlite_autoincrement=True,
        postgresql_with={"fillfactor": 70},
    )


def _index_groups() -> None:
    for name, keys in (
        ("arrival", ()),
        ("priority", ("priority",)),
        ("uniform_key", ("uniform_key",)),
        ("priority_key", ("priority_key",)),
        ("policy_version", ("min_policy_version",)),
        ("times_sampled", ("times_sampled",)),
        ("last_sampled_at", ("last_sampled_at",)),
    ):
        op.create_index(
            f"ix_episode_group_{name}",
            "episode_group",
            ["buffer_id", "task_name", "group_status", *keys, "id"],
        )
    op.create_index(
        "ix_episode_group_staleness",
        "episode_group",
        ["buffer_id", "staleness"],
        postgresql_using="brin",
    )
    op.create_index("ix_episode_group_prompt_uid", "episode_group", ["buffer_id", "prompt_uid"])
    leased = sa.column("lease_id").is_not(None)
    op.create_index(
        "ix_episode_group_lease_id",
        "episode_group",
        ["lease_id"],
        sqlite_where=leased,
        postgresql_where=leased,
    )
    awaited = sa.column("deadline").is_not(None)
    op.create_index(
        "ix_episode_group_deadline",
        "episode_group",
        ["buffer_id", "deadline"],
        sqlite_where=awaited,
        postgresql_where=awaited,
    )


def _create_contents() -> None:
    op.create_table(
        "episode",
        sa.Column("group_id", Id, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.Column("advantage", sa.Double()),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_loss_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_turns", sa.Integer(), nullable=False),
        sa.Column("min_policy_version", sa.BigInteger()),
        sa.Column("max_policy_version", sa.BigInteger()),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("metadata", Json, nullable=False),
        sa.PrimaryKeyConstraint("group_id", "position", name="pk_episode"),
        _group_key("episode"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "payload",
        sa.Column("group_id", Id, nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("codec_version", sa.SmallInteger(), nullable=False),
        sa.Column("checksum", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "part", name="pk_payload"),
        _group_key("payload"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Token ids hardly compress, and the attempt costs most of the write speed.
        op.execute(sa.text("ALTER TABLE payload ALTER COLUMN data SET STORAGE EXTERNAL"))
    op.create_table(
        "transcript",
        sa.Column("group_id", Id, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "position", name="pk_transcript"),
        _group_key("transcript"),
    )


def _create_history() -> None:
    op.create_table(
        "draw",
        sa.Column("id", Id, nullable=False),
        sa.Column("buffer_id", Id, nullable=False),
        sa.Column("run_id", Id),
        sa.Column("step", sa.BigInteger()),
        sa.Column("policy", Name, nullable=False),
        sa.Column("created_at", Timestamp, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_draw"),
        _buffer_key("draw"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_draw_run_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_draw_step", "draw", ["buffer_id", "step"])
    op.create_index("ix_draw_latest", "draw", ["buffer_id", "id"])
    op.create_table(
        "draw_group",
        sa.Column("draw_id", Id, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("group_id", Id, nullable=False),
        sa.Column("probability", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("staleness", sa.BigInteger()),
        sa.PrimaryKeyConstraint("draw_id", "position", name="pk_draw_group"),
        sa.ForeignKeyConstraint(
            ["draw_id"], ["draw.id"], name="fk_draw_group_draw_id", ondelete="CASCADE"
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_draw_group_group_id", "draw_group", ["group_id"])
    op.create_table(
        "cursor",
        sa.Column("buffer_id", Id, nullable=False),
        sa.Column("name", Name, nullable=False),
        sa.Column("value", Json, nullable=False),
        sa.Column("updated_at", Timestamp, nullable=False),
        sa.PrimaryKeyConstraint("buffer_id", "name", name="pk_cursor"),
        _buffer_key("cursor"),
        sqlite_with_rowid=False,
    )


def _buffer_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["buffer_id"], ["buffer.id"], name=f"fk_{table}_buffer_id", ondelete="CASCADE"
    )


def _group_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["group_id"],
        ["episode_group.id"],
        name=f"fk_{table}_group_id",
        ondelete="CASCADE",
        deferrable=True,
        initially="DEFERRED",
    )


def _create_group_views() -> None:
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


def _create_history_views() -> None:
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
