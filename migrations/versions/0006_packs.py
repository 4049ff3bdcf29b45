"""Payloads outside the database, in packs.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_payload = sa.table("payload", sa.column("data"))


def upgrade() -> None:
    op.create_table(
        "payload_place",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("store_uid", sa.String(255), nullable=False),
        sa.Column("grace_seconds", sa.Double(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_payload_place_id")),
        sa.PrimaryKeyConstraint("id", name="pk_payload_place"),
    )
    op.create_table(
        "pack",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("live_parts", sa.BigInteger(), nullable=False),
        sa.Column("live_bytes", sa.BigInteger(), nullable=False),
        sa.Column("condemned_at", sa.DateTime(timezone=True)),
        sa.Column("removing", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pack"),
        sa.UniqueConstraint("name", name="uq_pack_name"),
        sqlite_autoincrement=True,
    )
    _partial_index("pack", "condemned_at")
    with op.batch_alter_table("payload") as batch:
        batch.alter_column("data", existing_type=sa.LargeBinary(), nullable=True)
        batch.add_column(sa.Column("pack_id", _ID))
        batch.add_column(sa.Column("pack_offset", sa.BigInteger()))
        batch.add_column(sa.Column("pack_length", sa.BigInteger()))
        batch.create_foreign_key(
            "fk_payload_pack_id", "pack", ["pack_id"], ["id"], deferrable=True, initially="DEFERRED"
        )
        batch.create_check_constraint(
            op.f("ck_payload_place"),
            "data IS NOT NULL AND pack_id IS NULL OR data IS NULL AND pack_id IS NOT NULL "
            "AND pack_offset IS NOT NULL AND pack_length IS NOT NULL",
        )
    _partial_index("payload", "pack_id")


def downgrade() -> None:
    """Delete payloads outside the database; their groups are then like groups without payload."""
    op.execute(sa.delete(_payload).where(_payload.c.data.is_(None)))
    op.drop_index("ix_payload_pack_id", table_name="payload")
    with op.batch_alter_table("payload") as batch:
        batch.drop_constraint(op.f("ck_payload_place"), type_="check")
        batch.drop_constraint("fk_payload_pack_id", type_="foreignkey")
        for name in ("pack_length", "pack_offset", "pack_id"):
            batch.drop_column(name)
        batch.alter_column("data", existing_type=sa.LargeBinary(), nullable=False)
    op.drop_table("pack")
    op.drop_table("payload_place")


def _partial_index(table: str, name: str) -> None:
    there = sa.column(name).is_not(None)
    op.create_index(f"ix_{table}_{name}", table, [name], sqlite_where=there, postgresql_where=there)
