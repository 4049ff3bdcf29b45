"""Positions of incremental groups without an episode, and rows of turns.

Claims are of these positions. Pending groups are not leased any more.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_group = sa.table(
    "episode_group",
    *(sa.column(name) for name in ("id", "buffer_id", "group_status", "expected_episodes")),
    *(sa.column(name) for name in ("lease_id", "attempts")),
)
_episode = sa.table("episode", sa.column("group_id"), sa.column("position"))
_payload = sa.table("payload", sa.column("group_id"), sa.column("part"))
_trajectory = sa.table(
    "trajectory", *(sa.column(name) for name in ("group_id", "position", "buffer_id"))
)


def upgrade() -> None:
    """Create the tables. Each pending group gets a row for each position without an episode."""
    op.create_table(
        "trajectory",
        _group_id(),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("missing", sa.String(255), server_default=sa.text("'episode'"), nullable=False),
        sa.Column("buffer_id", _ID, nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_turns", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("claim_uid", sa.String(255)),
        sa.Column("claimed_by", sa.String(255)),
        sa.Column("claimed_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("unusable_reason", sa.Text()),
        _of_group("trajectory"),
        sa.PrimaryKeyConstraint("group_id", "position", "missing", name="pk_trajectory"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_trajectory_claim_uid", "trajectory", ["claim_uid"])
    for name, columns, condition in (
        (
            "ix_trajectory_open",
            ["buffer_id", "missing", "group_id", "position"],
            "unusable_reason IS NULL AND claim_uid IS NULL",
        ),
        ("ix_trajectory_expires_at", ["buffer_id", "expires_at"], "expires_at IS NOT NULL"),
    ):
        where = sa.text(condition)
        op.create_index(name, "trajectory", columns, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "turn",
        _group_id(),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("turn_uid", sa.String(255)),
        sa.Column("parent", sa.Integer()),
        sa.Column("agent", sa.String(255)),
        sa.Column("state", sa.Text()),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("reward", sa.Double()),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_loss_tokens", sa.BigInteger(), nullable=False),
        sa.Column("min_policy_version", sa.BigInteger()),
        sa.Column("max_policy_version", sa.BigInteger()),
        sa.Column("is_discarded", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("appended_at", sa.DateTime(timezone=True)),
        _of_group("turn"),
        sa.PrimaryKeyConstraint("group_id", "position", "turn", name="pk_turn"),
        sa.UniqueConstraint("group_id", "turn_uid", name="uq_turn_group_id_turn_uid"),
        sqlite_with_rowid=False,
    )
    _insert_open_positions()
    leased = _group.c.lease_id.is_not(None) | (_group.c.attempts > 0)
    op.execute(sa.update(_group).where(_is_open(), leased).values(lease_id=None, attempts=0))
    op.execute(
        sa.text("""
        CREATE VIEW turn_overview AS
        SELECT turn.group_id, turn.position, turn.turn, buffer.name AS buffer_name,
            episode_group.task_name, episode_group.prompt_uid, episode_group.group_status,
            turn.turn_uid, turn.parent, turn.agent, turn.state, turn.finish_reason, turn.reward,
            turn.num_prompt_tokens, turn.num_tokens, turn.num_loss_tokens,
            turn.min_policy_version, turn.max_policy_version, turn.is_discarded, turn.metadata,
            turn.appended_at, run.name AS run_name, run.lineage AS run_lineage
        FROM turn
            JOIN episode_group ON episode_group.id = turn.group_id
            JOIN buffer ON buffer.id = episode_group.buffer_id
            LEFT OUTER JOIN run ON run.id = episode_group.run_id
        """)
    )


def downgrade() -> None:
    """Drop the tables, and the turns of unfinished trajectories with them."""
    op.execute(sa.DropView(sa.Table("turn_overview", sa.MetaData())))
    turns = sa.select(_group.c.id).where(_group.c.id == _payload.c.group_id)
    op.execute(
        sa.delete(_payload).where(
            turns.where(_payload.c.part >= _group.c.expected_episodes).exists()
        )
    )
    op.drop_table("turn")
    op.drop_table("trajectory")


def _group_id() -> sa.Column[int]:
    return sa.Column("group_id", _ID, nullable=False)


def _of_group(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["group_id"],
        ["episode_group.id"],
        name=f"fk_{table}_group_id",
        ondelete="CASCADE",
        deferrable=True,
        initially="DEFERRED",
    )


def _insert_open_positions() -> None:
    most = sa.select(sa.func.max(_group.c.expected_episodes)).where(_is_open())
    numbers = sa.select(sa.literal(0).label("position")).cte("numbers", recursive=True)
    following = numbers.c.position + 1
    numbers = numbers.union_all(sa.select(following).where(following < most.scalar_subquery()))
    taken = sa.select(_episode.c.position).where(
        _episode.c.group_id == _group.c.id, _episode.c.position == numbers.c.position
    )
    rows = (
        sa.select(_group.c.id, numbers.c.position, _group.c.buffer_id)
        .join_from(_group, numbers, numbers.c.position < _group.c.expected_episodes)
        .where(_is_open(), ~taken.exists())
    )
    op.execute(sa.insert(_trajectory).from_select(["group_id", "position", "buffer_id"], rows))


def _is_open() -> sa.ColumnElement[bool]:
    return _group.c.group_status == "pending"
