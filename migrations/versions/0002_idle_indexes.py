"""Partial scheduling indexes: all except the one by id contain only completed and aborted groups.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

KEYS = (
    ("priority", "priority"),
    ("uniform_key", "uniform_key"),
    ("priority_key", "priority_key"),
    ("policy_version", "min_policy_version"),
    ("times_sampled", "times_sampled"),
    ("last_sampled_at", "last_sampled_at"),
)


def upgrade() -> None:
    idle = sa.column("group_status").in_(["completed", "aborted"])
    drawn = sa.column("last_sampled_at").is_not(None)
    for name, key in KEYS:
        _index_anew(name, key, idle & drawn if name == "last_sampled_at" else idle)


def downgrade() -> None:
    for name, key in KEYS:
        _index_anew(name, key, None)


def _index_anew(name: str, key: str, where: sa.ColumnElement[bool] | None) -> None:
    op.drop_index(f"ix_episode_group_{name}", table_name="episode_group")
    op.create_index(
        f"ix_episode_group_{name}",
        "episode_group",
        ["buffer_id", "task_name", "group_status", key, "id"],
        sqlite_where=where,
        postgresql_where=where,
    )
