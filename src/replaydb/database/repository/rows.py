"""One row in, its id out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Insert


def inserted_id(connection: Connection, statement: Insert, values: Mapping[str, Any]) -> int:
    """Insert a row, and say which id the engine gave it."""
    key: Any = connection.execute(statement, dict(values)).inserted_primary_key
    return int(key[0])
