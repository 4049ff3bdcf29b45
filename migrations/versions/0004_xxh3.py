"""XXH3 checksums of payloads, which take a quarter of the time of CRC-32.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import sqlalchemy as sa
import xxhash
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

#: Number of payloads in memory at the same time: each may be megabytes.
_PAGE = 8

_payload = sa.table(
    "payload",
    sa.column("group_id", sa.BigInteger),
    sa.column("part", sa.Integer),
    sa.column("checksum", sa.BigInteger),
    sa.column("data", sa.LargeBinary),
)


def upgrade() -> None:
    _replace(zlib.crc32, _xxh3)


def downgrade() -> None:
    _replace(_xxh3, zlib.crc32)


def _xxh3(data: bytes) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def _replace(old: Callable[[bytes], int], new: Callable[[bytes], int]) -> None:
    """Replace checksums, page by page. Damaged payloads keep their wrong checksums."""
    connection = op.get_bind()
    key = sa.tuple_(_payload.c.group_id, _payload.c.part)
    page = sa.select(_payload).order_by(_payload.c.group_id, _payload.c.part).limit(_PAGE)
    change = (
        sa.update(_payload)
        .where(
            _payload.c.group_id == sa.bindparam("of_group", type_=sa.BigInteger),
            _payload.c.part == sa.bindparam("of_part", type_=sa.Integer),
        )
        .values(checksum=sa.bindparam("sum_of_data", type_=sa.BigInteger))
    )
    rows = connection.execute(page).all()
    while rows:
        sound = [
            {"of_group": row.group_id, "of_part": row.part, "sum_of_data": new(row.data)}
            for row in rows
            if isinstance(row.data, bytes) and old(row.data) == row.checksum
        ]
        if sound:
            connection.execute(change, sound)
        last = sa.tuple_(*(sa.literal(value) for value in (rows[-1].group_id, rows[-1].part)))
        rows = connection.execute(page.where(key > last)).all()
