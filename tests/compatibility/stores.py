"""Stores of earlier releases in `tests/data`, and what was read from them when they were written.

A folder `revision_NNNN` has four stores, `sqlite-inside` and so on: on both engines, with payloads
inside and outside of the database. SQLite files are compressed. Those of PostgreSQL are dumps in
plain SQL, without owners. Packs are in a zip file beside the store.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import replaydb as rdb
from replaydb import analysis
from support.postgres import PostgresServer

DATA = Path(__file__).resolve().parents[1] / "data"
NAMES = ("sqlite-inside", "sqlite-outside", "postgresql-inside", "postgresql-outside")
TABLES = ("groups", "episodes", "draws", "prompts", "policies", "runs", "tokens")

Facts = dict[str, Any]


async def facts_of(url: str) -> Facts:
    """Read everything that the public API shows of a store, as JSON."""
    found: Facts = {table: getattr(analysis, table)(url).to_table().to_pylist() for table in TABLES}
    async with rdb.Store.open(url, read_only=True) as store:
        for name in await store.buffer_names():
            buffer = await store.buffer(name, create=False)
            found[f"buffer {name}"] = {
                "policy_version": buffer.policy_version,
                "settings": buffer.settings.to_json(),
                "leases": await buffer.leases(expired=True),
                "cursors": [await buffer.cursor(cursor) for cursor in ("gsm8k", "text")],
                "tasks": (await buffer.stats()).tasks,
            }
    facts: Facts = json.loads(json.dumps(found, default=_plain))
    return facts


def _plain(value: Any) -> Any:
    """Return a value as JSON can store it."""
    match value:
        case datetime():
            return value.isoformat()
        case bytes():
            return value.hex()
        case _:
            return {name: getattr(value, name) for name in value.__dataclass_fields__}


def restore(path: Path, folder: Path, server: PostgresServer | None) -> str:
    """Restore a store into a folder, or a server, and return its URL. Packs are in `packs`."""
    data = gzip.decompress(store_file(path).read_bytes())
    if server is None:
        file = folder / "replay.db"
        file.write_bytes(data)
        url = f"sqlite:///{file}"
    else:
        url = server.create_database("restored")
        server.execute(url, data.decode())
    if (archive := path.with_suffix(".zip")).exists():
        zipfile.ZipFile(archive).extractall(folder / "packs")
    return url


def store_file(path: Path) -> Path:
    return path.with_suffix(".db.gz" if path.name.startswith("sqlite") else ".sql.gz")
