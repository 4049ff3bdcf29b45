"""Index of the tags that are named in a buffer's settings.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_buffer = sa.table(
    "buffer",
    sa.column("id"),
    sa.column("settings", sa.JSON),
    sa.column("pending_tags", sa.JSON(none_as_null=True)),
)


def upgrade() -> None:
    op.add_column("buffer", sa.Column("pending_tags", sa.JSON()))
    id_type = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "group_tag",
        sa.Column("group_id", id_type, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("buffer_id", id_type, nullable=False),
        sa.Column("text", sa.Text().with_variant(sa.Text(collation="C"), "postgresql")),
        sa.Column("number", sa.Double()),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["episode_group.id"],
            name=op.f("fk_group_tag_group_id"),
            ondelete="CASCADE",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.PrimaryKeyConstraint("group_id", "name", name=op.f("pk_group_tag")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_group_tag_value", "group_tag", ["buffer_id", "name", "text", "number", "group_id"]
    )
    _plan_indexes()


def downgrade() -> None:
    op.drop_table("group_tag")
    op.drop_column("buffer", "pending_tags")


def _plan_indexes() -> None:
    """Mark the indexes that the settings of a downgraded database declare as still to be filled."""
    connection = op.get_bind()
    for row in connection.execute(sa.select(_buffer.c.id, _buffer.c.settings)).all():
        if names := row.settings.get("indexed_tags"):
            pending = dict.fromkeys(names, 2**63 - 1)
            mine = sa.update(_buffer).where(_buffer.c.id == row.id)
            connection.execute(mine.values(pending_tags=pending))
