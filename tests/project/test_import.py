"""`import replaydb` loads no heavy module, since hundreds of workers may import it.

`make bench` measures its duration.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from replaydb.integrations.values import decode, encode
from replaydb.util.devices import on_current_stream

#: Modules for trainers, migrations, the command line and object stores, or not used at all.
_HEAVY = {"torch", "alembic", "typer", "rich", "pandas", "pyarrow", "scipy", "obstore"}
_DRIVERS = {"asyncpg", "aiosqlite", "sqlite3"}


def _imported(code: str) -> set[str]:
    listing = f"{code}; import sys; print(*sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", listing], check=True, capture_output=True, text=True
    )
    return set(outcome.stdout.split())


def test_importing_loads_no_heavy_module() -> None:
    imported = _imported("import replaydb")
    assert "replaydb.buffer.store" in imported
    assert imported.isdisjoint(_HEAVY | _DRIVERS)


def test_opening_a_store_loads_only_its_own_driver(url: str, engine_name: str) -> None:
    code = (
        "import asyncio, replaydb\n"
        "async def main():\n"
        f"    async with replaydb.Store.open({url!r}) as store:\n"
        "        await store.buffers()\n"
        "asyncio.run(main())"
    )
    own = {"sqlite": {"aiosqlite", "sqlite3"}, "postgresql": {"asyncpg"}}[engine_name]
    assert _imported(code) & (_HEAVY | _DRIVERS) == own


async def test_everything_works_while_another_thread_imports_a_package(
    buffer: rdb.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `sys.modules`, a package has no names yet when its import begins."""
    for name in ("torch", "ray"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    turn = rdb.Turn(
        prompt_ids=[1], response_ids=np.array([2]), reward=np.float64(1), token_extras={"a": [0.5]}
    )
    group = rdb.EpisodeGroup("t", [rdb.Episode(turns=[turn], extras={"b": 1})], priority=2)
    (group_id,) = await buffer.put([group])
    await buffer.update([group_id], tags={"n": np.int64(1)})
    async with buffer.loader(1, num_steps=1, collate=lambda batch: batch.rewards) as loader:
        assert [rewards.tolist() async for rewards in loader] == [[1.0]]
    assert (await buffer.get([group_id]))[0].episodes[0] == group.episodes[0]
    assert on_current_stream(len) is len
    assert decode({"$ref": ["gone"]}, {}) == "gone"
    arrays: dict[str, Any] = {}
    assert decode(encode("value", (1, b"a"), arrays), arrays) == (1, b"a")
