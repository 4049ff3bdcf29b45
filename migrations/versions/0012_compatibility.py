"""What a client must support to use the store.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the table with its row. `migrations/env.py` changes that after every migration."""
    compatibility = op.create_table(
        "compatibility",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("min_client", sa.String(255), nullable=False),
        sa.Column("write_format", sa.SmallInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_compatibility_id")),
        sa.PrimaryKeyConstraint("id", name="pk_compatibility"),
    )
    op.bulk_insert(compatibility, [{"id": 1, "min_client": "0.1.0", "write_format": 1}])


def downgrade() -> None:
    op.drop_table("compatibility")
