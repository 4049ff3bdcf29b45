"""Payloads in several parts: heavy columns can be read alone.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


_payload = sa.table("payload", sa.column("group_id"))


def upgrade() -> None:
    """Add nullable columns, which neither engine writes to the rows that exist.

    The index is created only if there are no payloads. Otherwise `replaydb db upgrade` creates it.
    """
    op.add_column("payload", sa.Column("field", sa.Text()))
    op.add_column("payload", sa.Column("of_part", sa.Integer()))
    op.add_column("payload", sa.Column("expanded_bytes", sa.BigInteger()))
    if op.get_bind().execute(sa.select(_payload.c.group_id).limit(1)).first() is None:
        is_column = sa.text("field IS NOT NULL")
        op.create_index(
            "ix_payload_field",
            "payload",
            ["group_id", "field", "part"],
            sqlite_where=is_column,
            postgresql_where=is_column,
        )


def downgrade() -> None:
    """Drop the columns. `migrations/env.py` refuses it while payloads of format 2 are stored."""
    op.drop_index("ix_payload_field", table_name="payload", if_exists=True)
    for name in ("expanded_bytes", "of_part", "field"):
        op.drop_column("payload", name)
