"""One row in, its id out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Insert
from sqlalchemy.ext.asyncio import AsyncConnection


async def inserted_id(
    connection: AsyncConnection, statement: Insert, values: Mapping[str, Any]
) -> int:
    """Insert a row, and say which id the engine gave it."""
    key: Any = (await connection.execute(statement, dict(values))).inserted_primary_key
    return int(key[0])
