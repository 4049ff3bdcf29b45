"""What is imported when, since hundreds of workers may import replaydb.

`python -m benchmarks open` measures the durations.
"""

from __future__ import annotations

import pickle  # used by trainers for checkpoints
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
#: What only a process needs that opens a store.
_STORES = {"sqlalchemy", "replaydb.buffer", "replaydb.database"}


def _imported(code: str, *arguments: str) -> set[str]:
    listing = f"{code}\nimport sys; print(*sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", listing, *arguments], check=True, capture_output=True, text=True
    )
    return set(outcome.stdout.split())


def test_importing_loads_no_database() -> None:
    imported = _imported("import replaydb; replaydb.EpisodeGroup, replaydb.Batch, dir(replaydb)")
    assert "replaydb.batch.batch" in imported
    assert imported.isdisjoint(_HEAVY | _DRIVERS | _STORES)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_line_loads_no_database(option: str) -> None:
    code = (
        "from replaydb.cli import app\ntry: app()\nexcept SystemExit as end: assert end.code == 0"
    )
    imported = _imported(code, option)
    assert "replaydb.cli.watch" in imported
    # The help is printed with rich.
    assert imported.isdisjoint((_HEAVY | _DRIVERS | _STORES) - {"typer", "rich"})
    assert ("rich" in imported) == (option == "--help")


def test_all_public_names_load_no_heavy_module() -> None:
    imported = _imported("from replaydb import *; Store")
    assert imported >= _STORES
    assert imported.isdisjoint(_HEAVY | _DRIVERS)


def test_an_object_is_unpickled_where_replaydb_is_not_imported_yet() -> None:
    saved = pickle.dumps(rdb.Loader)
    imported = _imported(f"import pickle; assert pickle.loads({saved!r}).__name__ == 'Loader'")
    assert imported >= _STORES


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
