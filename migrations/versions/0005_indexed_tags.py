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


def downgrade() -> None:
    op.drop_table("group_tag")
    op.drop_column("buffer", "pending_tags")
