"""Every store compiles its statements for itself, which takes longer than most tests of one."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.util import LRUCache


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all engines of this process share what is compiled, as those of one kind may."""
    compiled: LRUCache[Any, Any] = LRUCache(10_000)

    def share(engine: Engine) -> None:
        engine._compiled_cache = compiled

    for kind in (PGDialect_asyncpg, SQLiteDialect_aiosqlite):
        monkeypatch.setattr(kind, "engine_created", share)
        # Compiled statements are found by the dialect they are for.
        monkeypatch.setattr(kind, "__hash__", lambda dialect: hash(type(dialect)))
        monkeypatch.setattr(kind, "__eq__", lambda dialect, other: type(dialect) is type(other))
