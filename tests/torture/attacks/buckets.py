"""A payload store whose address leads elsewhere for a while loses and fails no acknowledged group.

The endpoint of a bucket leads to another, empty service, alternates between two, loses the marker,
or answers wrongly; a folder is replaced by an empty one. Meanwhile groups are put, sampled,
deleted, and their packs compacted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from unittest.mock import patch

from processes.derived import check_group, derived_group
from replaydb import Buffer, NotEnoughGroupsError, PayloadsUnavailableError, Store
from support.buckets import FAULTS, Endpoint, running_endpoint, times
from support.s3 import credentials
from torture.arena import Arena
from torture.crew import BUFFER

PROMISES = (1, 8)
ENGINES = ("sqlite", "postgresql")
#: Groups of one put, of which most are deleted, so that their pack is compacted.
_GROUPS = 4

#: Causes the trouble of this name; heals it if the name is None.
Cause = Callable[[str | None], None]


async def attack(arena: Arena) -> None:
    """Trouble after trouble while groups are stored, then read them all."""
    kept: set[str] = set()
    async with (
        _payloads(arena) as (payloads, troubles, cause),
        Store.open(arena.url, payloads=payloads) as store,
    ):
        buffer = await store.buffer(BUFFER)
        end = time.monotonic() + arena.seconds
        writing = [asyncio.create_task(_put(arena, buffer, name, end, kept)) for name in "abc"]
        writing.append(asyncio.create_task(_prune(arena, store, end)))
        writing.append(asyncio.create_task(_sample(arena, buffer, end)))
        while time.monotonic() < end:
            trouble = arena.chance.choice(troubles)
            cause(trouble)
            arena.figures[trouble] += 1
            await asyncio.sleep(arena.chance.uniform(0.02, 0.2))
            cause(None)
            await asyncio.sleep(arena.chance.uniform(0.02, 0.1))
        await asyncio.gather(*writing)
        await _compacted(arena, store)
        assert await buffer.count(statuses="failed") == 0, "intact groups failed"
        found = await buffer.find(limit=None)
        assert {one.group_uid for one in found} == kept, "other groups than acknowledged"
        for group in await buffer.get([one.id for one in found]):
            check_group(group)
        arena.figures["groups read"] += len(found)


async def _put(arena: Arena, buffer: Buffer, name: str, end: float, kept: set[str]) -> None:
    """Put groups again and again, and delete most of what was acknowledged."""
    for nth in count():
        uids = [f"{name}-{nth}-{i}" for i in range(_GROUPS)]
        try:
            ids = await buffer.put([derived_group(uid) for uid in uids])
        except PayloadsUnavailableError:
            arena.figures["refused"] += 1
        else:
            arena.figures["put"] += 1
            kept.update(uids)
            if arena.chance.random() < 0.5:
                await buffer.delete(ids[1:])
                kept.difference_update(uids[1:])
        if time.monotonic() > end:
            return


async def _prune(arena: Arena, store: Store, end: float) -> None:
    while time.monotonic() < end:
        await _compacted(arena, store)
        await asyncio.sleep(0.02)


async def _sample(arena: Arena, buffer: Buffer, end: float) -> None:
    """Draw groups again and again; the pauses before they are read again outlast the trouble."""
    with patch("replaydb.packs.place.REREADS", (0.0, 0.3, 0.3, 0.3)):
        while time.monotonic() < end:
            try:
                for group in (await buffer.sample(3, timeout=0)).groups:
                    check_group(group)
            except PayloadsUnavailableError:
                arena.figures["samples refused"] += 1
            except NotEnoughGroupsError:
                await asyncio.sleep(0.01)
            else:
                arena.figures["sampled"] += 1
            await asyncio.sleep(0)


async def _compacted(arena: Arena, store: Store) -> None:
    try:
        report = await store.prune(dry_run=False)
    except PayloadsUnavailableError:
        arena.figures["prunes refused"] += 1
    else:
        arena.figures["compacted"] += report.num_compacted


@asynccontextmanager
async def _payloads(arena: Arena) -> AsyncIterator[tuple[str, tuple[str, ...], Cause]]:
    """Where payloads are, as chance has it, and what can happen there."""
    if arena.chance.random() < 0.3:
        folder = arena.folder / "payloads"
        yield folder.as_uri(), ("unmounted",), _mounts(folder)
        return
    async with running_endpoint() as endpoint:
        with patch.dict(os.environ, credentials()):
            troubles = ("another service", "alternating", "random", "no marker", "wrong answers")
            yield endpoint.url, troubles, _routes(arena, endpoint)


def _mounts(folder: Path) -> Cause:
    """Trouble with the folder of the store, which is a mount."""
    numbers = count()
    away = folder / "away"

    def cause(trouble: str | None) -> None:
        (mounted,) = (each for each in folder.iterdir() if len(each.name) == 32)
        if trouble is None:
            mounted.rename(folder / f"wrong-{next(numbers)}")
            away.rename(mounted)
        else:
            mounted.rename(away)
            mounted.mkdir()

    return cause


def _routes(arena: Arena, endpoint: Endpoint) -> Cause:
    """Trouble with the address of a bucket."""
    services = (endpoint.right, endpoint.wrong)
    marker: dict[str, bytes] = {}

    def cause(trouble: str | None) -> None:
        match trouble:
            case None:
                endpoint.fault = lambda answer: answer
                endpoint.right.objects.update(marker)
                endpoint.lead_to(endpoint.right)
            case "another service":
                endpoint.lead_to(endpoint.wrong)
            case "alternating":
                endpoint.alternate()
            case "random":
                endpoint.route = lambda request: arena.chance.choice(services)
            case "wrong answers":
                fault = arena.chance.choice(list(FAULTS.values()))
                endpoint.fault = times(arena.chance.randint(1, 3), fault)
            case "no marker":
                marker.update(endpoint.right.named("replaydb-store"))
                for key in marker:
                    del endpoint.right.objects[key]

    return cause
