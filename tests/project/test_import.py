"""`import replaydb` is light: workers start by the hundred."""

from __future__ import annotations

import resource
import subprocess
import sys

# The goal is 0.4 s. Of processor time, as others use this machine too, and with room for slow ones.
_SECONDS = 0.8
_HEAVY = ("torch", "alembic", "pandas", "pyarrow", "typer", "rich", "scipy")


def _processor_seconds(code: str) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, "-c", code], check=True)
    return used() - before


def _imported(code: str) -> set[str]:
    listing = f"{code}; import sys; print(*sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", listing], check=True, capture_output=True, text=True
    )
    return set(outcome.stdout.split())


def test_importing_takes_no_heavy_module_along() -> None:
    imported = _imported("import replaydb")
    assert "replaydb.store" in imported
    assert imported.isdisjoint(_HEAVY)


def test_opening_a_current_store_takes_no_alembic_along(sqlite_url: str) -> None:
    code = (
        "import asyncio, replaydb\n"
        "async def main():\n"
        f"    async with replaydb.Store.open({sqlite_url!r}) as store:\n"
        "        await store.buffers()\n"
        "asyncio.run(main())"
    )
    assert _imported(code).isdisjoint({"torch", "alembic"})


def test_importing_is_quick() -> None:
    bare = min(_processor_seconds("pass") for _ in range(3))
    assert min(_processor_seconds("import replaydb") for _ in range(3)) - bare <= _SECONDS
