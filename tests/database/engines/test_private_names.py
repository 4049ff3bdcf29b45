"""Private names of other libraries: where they are used, and what is expected of them."""

from __future__ import annotations

import ast
import asyncio
import queue
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
from sqlalchemy import column, insert

import replaydb
from replaydb.database.tables.schema import draw

HOME = Path(replaydb.__file__).parent
#: Public by documentation, although their names begin with an underscore.
PUBLIC = {"_asdict", "_fields", "_make", "_mapping", "_replace"}
#: Names of this project that another of its modules uses.
OURS = {"_quota", "_wake"}


def test_each_is_used_in_one_module_of_its_engine() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in (HOME / "database").rglob("*.py"):
        own, used = PUBLIC | OURS, set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.Constant(value="_all_selected_columns" as name):
                    used.add(name)
        for name in used - own:
            if name.startswith("_") and name.isidentifier() and not name.endswith("__"):
                found[name].add(str(path.relative_to(HOME / "database")))
    assert found == {
        "_tx": {"sqlite/connection.py"},
        "_thread": {"sqlite/connection.py"},
        "_connect": {"sqlite/connection.py"},
        "_transport": {"postgresql/connecting.py"},
        "_all_selected_columns": {"postgresql/combined_reads.py"},
    }


async def test_the_thread_of_aiosqlite_runs_functions_from_a_queue(tmp_path: Path) -> None:
    connection = aiosqlite.connect(tmp_path / "test.db")
    assert isinstance(connection._thread, threading.Thread)
    assert not connection._thread.is_alive()
    assert isinstance(connection._tx, queue.SimpleQueue)
    connection._thread.start()
    await connection._connect()
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    connection._tx.put_nowait((answer, threading.get_ident))
    assert await answer == connection._thread.ident
    await connection.close()


async def test_the_transport_of_asyncpg_has_a_socket(postgresql_url: str) -> None:
    connection = await asyncpg.connect(postgresql_url.replace("+asyncpg", ""))
    try:
        assert connection._transport.get_extra_info("socket").fileno() >= 0
    finally:
        await connection.close()


def test_a_copy_of_a_statement_keeps_the_columns_that_it_returned() -> None:
    """If this fails because they are up to date, they need not be removed any more."""
    first = insert(draw).returning(draw.c.id)
    assert [one.name for one in first.exported_columns] == ["id"]
    more: Any = first.returning(column("rows_0"))
    assert "_all_selected_columns" in vars(more)
    assert [one.name for one in more.exported_columns] == ["id"]
