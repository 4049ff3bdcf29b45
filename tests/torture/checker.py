"""Independent checker that reads the tables by bare drivers and plain SQL, without replaydb.

It checks invariants of the tables, and the consistency of the logs of several processes.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import xxhash

Row = dict[str, Any]
LIVE = {"pending", "completed", "leased", "aborted"}

_QUERIES = {
    "groups": "SELECT id, buffer_id, task_name, group_uid, group_status, weight, num_episodes,"
    " num_tokens, num_bytes, times_sampled, lease_id, staleness, comparable_version,"
    " expected_episodes, min_episodes, completed_at, times_annotated, reward_mean, reward_min,"
    " reward_max, status_reason, attempts"
    " FROM episode_group",
    "buffers": "SELECT id, policy_version FROM buffer",
    "leased": "SELECT group_id FROM draw_group WHERE outcome = 'leased'",
    "drawn": "SELECT group_id FROM draw_group",
    "history": "SELECT draw_id, reward_mean FROM training_history",
    "tasks": "SELECT buffer_id, task_name, num_available, total_weight, num_pending, num_leased,"
    " stored_groups, stored_tokens, stored_bytes, num_sampled, aged_to FROM task",
    "leases": "SELECT id FROM lease",
    "payloads": "SELECT group_id, checksum, data, pack_id, pack_offset, pack_length,"
    " field IS NULL AND of_part IS NOT NULL AS is_of_turn FROM payload",
    "packs": "SELECT id, name, num_bytes, live_parts, live_bytes, condemned_at, removing FROM pack",
    "stores": "SELECT url, store_uid FROM payload_place",
    "episodes": "SELECT group_id, position, num_tokens, reward, metadata FROM episode",
    "annotations": "SELECT group_id, number, position, name, value, previous, changes,"
    " author FROM annotation",
    "trajectories": "SELECT group_id, position, missing, attempts, unusable_reason FROM trajectory",
    "cursors": "SELECT value FROM cursor WHERE name LIKE 'put-%'",
}


@dataclass(frozen=True)
class Tables:
    """All relevant rows of one snapshot."""

    groups: list[Row]
    buffers: list[Row]
    leased: list[Row]
    drawn: list[Row]
    history: list[Row]
    tasks: list[Row]
    leases: list[Row]
    payloads: list[Row]
    packs: list[Row]
    stores: list[Row]
    episodes: list[Row]
    annotations: list[Row]
    trajectories: list[Row]
    cursors: list[Row]

    @property
    def by_uid(self) -> dict[str, Row]:
        """Groups by uid."""
        return {row["group_uid"]: row for row in self.groups}

    def with_status(self, status: str) -> set[int]:
        """Return the ids of the groups with a status."""
        return {row["id"] for row in self.groups if row["group_status"] == status}


async def read_tables(url: str) -> Tables:
    """Read all tables in one transaction."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as file:
            file.row_factory = sqlite3.Row
            file.execute("BEGIN")
            found = {
                name: [dict(row) for row in file.execute(query)] for name, query in _QUERIES.items()
            }
            file.execute("COMMIT")
            assert file.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            assert file.execute("PRAGMA foreign_key_check").fetchall() == []
            return Tables(**found)
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return Tables(
                **{
                    name: [dict(row) for row in await connection.fetch(query)]
                    for name, query in _QUERIES.items()
                }
            )
    finally:
        await connection.close()


async def count_stored_groups(url: str) -> int:
    """Return the number of groups that count against the capacity: those not archived."""
    query = "SELECT count(*) FROM episode_group WHERE group_status <> 'archived'"
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)) as file:
            return int(file.execute(query).fetchone()[0])
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


def check_tables(tables: Tables) -> None:
    """Check that task counters, payloads and leases agree with the groups."""
    _check_counters(tables)
    uids = Counter((row["buffer_id"], row["group_uid"]) for row in tables.groups)
    assert not [uid for uid, count in uids.items() if count > 1], "a uid is stored twice"
    leases = {row["id"] for row in tables.leases}
    for row in tables.groups:
        has_lease = row["lease_id"] is not None
        is_leased = row["group_status"] == "leased"
        assert is_leased == has_lease or row["group_status"] == "pending", row
        assert row["lease_id"] is None or row["lease_id"] in leases, row
    _check_staleness(tables)
    leased = sorted(row["group_id"] for row in tables.leased)
    assert leased == sorted(tables.with_status("leased")), "outcomes and leases disagree"
    sizes: Counter[int] = Counter()
    _check_packs(tables)
    files = {row["id"]: _file(tables, row["name"]) for row in tables.packs if row["live_parts"]}
    contents = {pack_id: file.read_bytes() for pack_id, file in files.items()}
    for row in tables.payloads:
        data = row["data"]
        if data is None:
            begin = row["pack_offset"]
            data = contents[row["pack_id"]][begin : begin + row["pack_length"]]
        assert _xxh3(data) == row["checksum"], f"payload of {row['group_id']}"
        if not row["is_of_turn"]:  # it is counted when its trajectory is finished
            sizes[row["group_id"]] += len(data)
    episodes, tokens = Counter[int](), Counter[int]()
    for row in tables.episodes:
        episodes[row["group_id"]] += 1
        tokens[row["group_id"]] += row["num_tokens"]
    for row in tables.groups:
        key = row["id"]
        assert (episodes[key], tokens[key]) == (row["num_episodes"], row["num_tokens"]), row
        assert sizes[key] == row["num_bytes"], row


def _check_packs(tables: Tables) -> None:
    """Packs count their references, and unreferenced packs are marked for deletion."""
    parts, sizes = Counter[int](), Counter[int]()
    for row in tables.payloads:
        if row["pack_id"] is not None:
            parts[row["pack_id"]] += 1
            sizes[row["pack_id"]] += row["pack_length"]
    for row in tables.packs:
        live = (row["live_parts"], row["live_bytes"])
        assert live == (parts[row["id"]], sizes[row["id"]]), row
        assert (row["live_parts"] == 0) == (row["condemned_at"] is not None), row


def _file(tables: Tables, name: str) -> Path:
    [store] = tables.stores
    return Path(urlsplit(store["url"]).path, store["store_uid"], f"{name}.pack")


def _check_staleness(tables: Tables) -> None:
    versions = {row["id"]: row["policy_version"] for row in tables.buffers}
    # An advance that was killed has updated groups up to this id.
    aged_to = {(row["buffer_id"], row["task_name"]): row["aged_to"] for row in tables.tasks}
    for row in tables.groups:
        last = aged_to[row["buffer_id"], row["task_name"]]
        if last is not None and row["id"] > last:
            continue
        if row["group_status"] in LIVE and row["comparable_version"] is not None:
            expected = versions[row["buffer_id"]] - row["comparable_version"]
            assert row["staleness"] == expected, row


def _check_counters(tables: Tables) -> None:
    by_task: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in tables.groups:
        by_task[row["buffer_id"], row["task_name"]].append(row)
    for task in tables.tasks:
        groups = by_task.pop((task["buffer_id"], task["task_name"]), [])
        status = Counter(row["group_status"] for row in groups)
        stored = [row for row in groups if row["group_status"] != "archived"]
        weight = sum(row["weight"] for row in groups if row["group_status"] == "completed")
        expected = {
            "num_available": status["completed"],
            "num_pending": status["pending"],
            "num_leased": status["leased"],
            "stored_groups": len(stored),
            "stored_tokens": sum(row["num_tokens"] for row in stored),
            "stored_bytes": sum(row["num_bytes"] for row in stored),
        }
        assert {name: task[name] for name in expected} == expected, task
        assert abs(task["total_weight"] - weight) <= 1e-9 * (1 + weight), task
        assert task["num_sampled"] >= sum(row["times_sampled"] for row in groups), task
    assert not by_task, f"groups without task counters: {list(by_task)}"


@dataclass(frozen=True)
class Entry:
    """A call of a process, logged after it returned. Times are of the machine's monotonic clock."""

    call: str
    begin: float
    end: float
    pid: int
    detail: Any


def read_log(log: Path) -> list[Entry]:
    """Read all complete lines of a log. The last line may be incomplete after a kill."""
    if not log.exists():
        return []
    return [Entry(*json.loads(line)) for line in log.read_text().split("\n")[:-1]]


def check_log(entries: Iterable[Entry], tables: Tables) -> Counter[str]:
    """Check that there are no errors, lost groups, partial puts or conflicting leases.

    Returns:
        The number of calls by kind.
    """
    entries = list(entries)
    errors = [entry.detail for entry in entries if entry.call == "error"]
    assert not errors, f"{len(errors)} untyped or unexpected errors, such as {errors[0]}"
    deleted = {uid for entry in entries if entry.call == "deleting" for uid in entry.detail}
    promised = {uid for entry in entries if entry.call == "put" for uid in entry.detail} - deleted
    missing = promised - tables.by_uid.keys()
    assert not missing, f"{len(missing)} of {len(promised)} acknowledged groups are lost"
    puts = Counter(uid.rsplit(":", 2)[0] for uid in tables.by_uid if uid.count(":") == 2)
    sizes = {uid.rsplit(":", 2)[0]: int(uid.rsplit(":")[-1]) for uid in tables.by_uid if ":" in uid}
    partial = [put for put, count in puts.items() if count != sizes[put] and not deleted]
    assert not partial, f"partial puts: {partial}"
    named = {uid for row in tables.cursors for uid in json.loads(row["value"])} - deleted
    assert named <= tables.by_uid.keys(), "a cursor is stored without the groups of its put"
    check_leases(entries)
    return Counter(entry.call for entry in entries)


#: Calls that end a lease before it expires.
_ENDS = ("ack", "nack", "revoke")


def check_leases(entries: list[Entry]) -> None:
    """Check that leases are exclusive, and that groups are not acked twice."""
    ends = {entry.detail["lease"]: entry for entry in entries if entry.call in _ENDS}
    acked = Counter(one for entry in entries if entry.call == "ack" for one in entry.detail["ids"])
    # A process that read a group before an ack and sets it to completed after it, un-archives it.
    reopened = {
        group_id
        for entry in entries
        if entry.call == "curate" and entry.detail["status"] == "completed"
        for group_id in entry.detail["ids"]
    }
    twice = [one for one, count in acked.items() if count > 1 and one not in reopened]
    assert not twice, f"acked twice: {twice}"
    leased: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for entry in entries:
        if entry.call != "lease":
            continue
        lease = entry.detail["lease"]
        end = entry.begin + entry.detail["ttl"]  # the ttl starts at some time within the call
        if lease in ends:
            end = min(end, ends[lease].begin)
        for one in entry.detail["ids"]:
            leased[one].append((entry.end, end, lease))
    for one, spans in leased.items():
        spans.sort()
        for (_, end, first), (begin, _, second) in pairwise(spans):
            assert end <= begin, f"group {one} is leased by {first} and {second} at the same time"


def _xxh3(data: bytes) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)
