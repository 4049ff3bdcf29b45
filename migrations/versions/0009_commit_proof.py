"""Proof of the commit of a transaction on PostgreSQL.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "commit_proof",
        sa.Column("connection_uid", sa.Uuid(), nullable=False),
        sa.Column("transaction_number", sa.BigInteger(), nullable=False),
        sa.Column("written_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("connection_uid", name="pk_commit_proof"),
        postgresql_with={"fillfactor": 50},
    )


def downgrade() -> None:
    op.drop_table("commit_proof")
