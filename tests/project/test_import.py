"""`import replaydb` loads no heavy module, since hundreds of workers may import it.

`make bench` measures its duration.
"""

from __future__ import annotations

import subprocess
import sys

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
    assert "replaydb.store" in imported
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
