"""Rows of all tables, for tests that do not use a store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import insert, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.tables.schema import compatibility, metadata
from replaydb.database.tables.views import VIEWS
from replaydb.domain.settings import BufferSettings

_NOW = datetime(2025, 11, 20, 12, tzinfo=UTC)
_VIEW_NAMES = {view.table.name for view in VIEWS}
TABLES = [table for table in metadata.sorted_tables if table.name not in _VIEW_NAMES]


def group_row(number: int, status: str, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "buffer_id": 1, "run_id": 1, "group_uid": f"group-{number}",
        "task_name": "gsm8k", "group_status": status, "staleness": 0, "priority": 1.0,
        "weight": 1.0, "uniform_key": 0.5 * number, "priority_key": 0.25 * number,
        "min_policy_version": 3, "max_policy_version": 3, "num_episodes": 2, "num_tokens": 8,
        "num_bytes": 4, "times_sampled": 1, "attempts": 0, "lease_id": None,
        "has_transcript": True, "tags": {"level": "hard"}, "created_at": _NOW, **more,
    }  # fmt: skip


def _episode(group: int, position: int) -> dict[str, Any]:
    return {
        "group_id": group, "position": position, "reward": float(position), "num_tokens": 4,
        "num_loss_tokens": 2, "num_turns": 1, "metadata": {"seed": position},
    }  # fmt: skip


_ROWS: dict[str, list[dict[str, Any]]] = {
    "run": [{"id": 1, "name": "qwen", "started_at": _NOW, "metadata": {"lr": 1e-6}}],
    "buffer": [
        {
            "id": 1, "name": "math", "settings": BufferSettings(), "policy_version": 3,
            "limited_inserts": 0, "limited_samples": 0, "created_at": _NOW,
        }
    ],
    "task": [{
        "id": 1, "buffer_id": 1, "task_name": "gsm8k", "uniform_clock": 0.0,
        "priority_clock": 0.0, "random_counter": 7, "num_available": 2, "total_weight": 2.0,
        "weight_error": 0.0,
        "num_pending": 0, "num_leased": 1, "stored_groups": 3, "stored_tokens": 24,
        "stored_bytes": 12, "num_inserted": 4, "num_sampled": 2,
    }],
    "lease": [
        {"id": 1, "buffer_id": 1, "owner": "me", "acquired_at": _NOW, "expires_at": _NOW}
    ],
    "episode_group": [
        group_row(1, "completed"), group_row(2, "leased", lease_id=1), group_row(3, "completed")
    ],
    "episode": [_episode(group, position) for group in (1, 2, 3) for position in (0, 1)],
    "compatibility": [{"id": 1, "min_client": "0.1.0", "write_format": 1}],
    "payload_place": [
        {"id": 1, "url": "file:///packs", "store_uid": "a" * 32, "grace_seconds": 60.0}
    ],
    "pack": [
        {
            "id": 1, "name": "b" * 32, "created_at": _NOW, "num_bytes": 4, "live_parts": 0,
            "live_bytes": 0, "condemned_at": _NOW, "removing": False,
        }
    ],
    "payload": [
        {"group_id": group, "part": 0, "codec_version": 1, "checksum": 9, "data": b"\0\1\2\3"}
        for group in (1, 2, 3)
    ],
    "group_tag": [
        {"group_id": 1, "name": "level", "buffer_id": 1, "text": "hard", "number": None}
    ],
    "annotation": [
        {"group_id": 1, "number": 1, "position": 0, "turn": -1, "name": "reward", "value": 1.0,
         "previous": None, "changes": None, "author": "judge", "policy_version": 2, "run_id": 1,
         "created_at": _NOW}
    ],
    "trajectory": [
        {"group_id": 2, "position": 2, "buffer_id": 1, "attempts": 1, "num_turns": 1,
         "claim_uid": "c" * 32, "claimed_by": "me", "claimed_at": _NOW, "expires_at": _NOW,
         "unusable_reason": None}
    ],
    "turn": [
        {"group_id": 2, "position": 2, "turn": 0, "turn_uid": "call-1", "parent": None,
         "agent": "main", "state": None, "finish_reason": "stop", "reward": 0.5,
         "num_prompt_tokens": 3, "num_tokens": 5, "num_loss_tokens": 2, "min_policy_version": 3,
         "max_policy_version": 3, "is_discarded": False, "metadata": {}, "appended_at": _NOW}
    ],
    "transcript": [{"group_id": 1, "position": 0, "text": "2 + 2 is 4"}],
    "draw": [
        {"id": 1, "buffer_id": 1, "run_id": 1, "step": 5, "policy": "uniform", "created_at": _NOW}
    ],
    "draw_group": [
        {"draw_id": 1, "position": position, "group_id": group, "probability": 0.5, "weight": 1.0}
        for position, group in enumerate((1, 99))
    ],
    "policy_change": [
        {"id": 1, "buffer_id": 1, "run_id": 1, "policy_version": 3, "lineage": None,
         "began_at": _NOW}
    ],
    "cursor": [{"buffer_id": 1, "name": "dataset", "value": {"row": 17}, "updated_at": _NOW}],
    "commit_proof": [
        {"connection_uid": UUID(int=1), "transaction_number": 3, "written_at": _NOW}
    ],
}  # fmt: skip

Contents = dict[str, list[tuple[object, ...]]]


async def fill(connection: AsyncConnection) -> None:
    """Insert rows into all existing tables. The largest group id, 99, is of a deleted group."""
    existing = await connection.run_sync(lambda synchronous: inspect(synchronous).get_table_names())
    for table in TABLES:
        if table.name not in existing:  # a table of a later revision
            continue
        if table is compatibility:  # a migration has inserted its row
            await connection.execute(table.delete())
        await connection.execute(insert(table), _ROWS[table.name])
        if table.name != "episode_group":
            continue
        await connection.execute(insert(table), [group_row(99, "archived")])
        await connection.execute(table.delete().where(table.c.id == 99))


async def contents(connection: AsyncConnection) -> Contents:
    """Return all rows of all tables, with the columns of the metadata."""
    found: Contents = {}
    for table in TABLES:
        rows = await connection.execute(table.select().order_by(*table.primary_key))
        found[table.name] = [tuple(row) for row in rows]
    return found


async def view_counts(connection: AsyncConnection) -> dict[str, int]:
    """Return the number of rows of every view, which also checks that it can be read."""
    counts = {}
    for name in sorted(_VIEW_NAMES):
        rows = await connection.execute(metadata.tables[name].select())
        counts[name] = len(rows.all())
    return counts
