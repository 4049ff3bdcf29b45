"""`import replaydb` is light: workers start by the hundred.

What it takes along is held here; how long it takes is measured by `make bench`.
"""

from __future__ import annotations

import subprocess
import sys

#: Needed by the trainer's side, migrations, the command line, object stores, or by nobody.
_HEAVY = {"torch", "alembic", "typer", "rich", "pandas", "pyarrow", "scipy", "obstore"}
_DRIVERS = {"asyncpg", "aiosqlite", "sqlite3"}


def _imported(code: str) -> set[str]:
    listing = f"{code}; import sys; print(*sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", listing], check=True, capture_output=True, text=True
    )
    return set(outcome.stdout.split())


def test_importing_takes_no_heavy_module_along() -> None:
    imported = _imported("import replaydb")
    assert "replaydb.store" in imported
    assert imported.isdisjoint(_HEAVY | _DRIVERS)


def test_a_current_store_takes_only_its_own_driver_along(url: str, engine_name: str) -> None:
    code = (
        "import asyncio, replaydb\n"
        "async def main():\n"
        f"    async with replaydb.Store.open({url!r}) as store:\n"
        "        await store.buffers()\n"
        "asyncio.run(main())"
    )
    own = {"sqlite": {"aiosqlite", "sqlite3"}, "postgresql": {"asyncpg"}}[engine_name]
    assert _imported(code) & (_HEAVY | _DRIVERS) == own
