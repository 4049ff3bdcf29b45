"""Vacuum of large values without pauses; an index of packs that are mostly dead.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_pack = sa.table("pack", sa.column("id"))


def upgrade() -> None:
    """Create the index only if there are no packs. Otherwise `replaydb db upgrade` creates it."""
    if op.get_bind().execute(sa.select(_pack.c.id).limit(1)).first() is None:
        is_mostly_dead = sa.text("live_parts > 0 AND num_bytes >= 2 * live_bytes")
        op.create_index(
            "ix_pack_mostly_dead",
            "pack",
            ["live_bytes", "id"],
            sqlite_where=is_mostly_dead,
            postgresql_where=is_mostly_dead,
        )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            sa.text(
                "ALTER TABLE payload SET "
                "(autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0)"
            )
        )
        op.execute(
            sa.text(
                "ALTER TABLE transcript SET "
                "(autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_cost_delay = 0)"
            )
        )


def downgrade() -> None:
    op.drop_index("ix_pack_mostly_dead", table_name="pack", if_exists=True)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            sa.text(
                "ALTER TABLE payload RESET "
                "(autovacuum_vacuum_cost_delay, toast.autovacuum_vacuum_cost_delay)"
            )
        )
        op.execute(
            sa.text(
                "ALTER TABLE transcript RESET "
                "(autovacuum_vacuum_cost_delay, toast.autovacuum_vacuum_cost_delay)"
            )
        )
