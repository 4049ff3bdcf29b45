"""Shared cache of compiled statements. Compiling them for each store would dominate the tests."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.util import LRUCache


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all engines of the same dialect in this process share compiled statements."""
    compiled: LRUCache[Any, Any] = LRUCache(10_000)

    def share(engine: Engine) -> None:
        engine._compiled_cache = compiled

    for kind in (PGDialect_asyncpg, SQLiteDialect_aiosqlite):
        monkeypatch.setattr(kind, "engine_created", share)
        # The dialect is part of the cache key.
        monkeypatch.setattr(kind, "__hash__", lambda dialect: hash(type(dialect)))
        monkeypatch.setattr(kind, "__eq__", lambda dialect, other: type(dialect) is type(other))
