"""A temporarily wrong payload store loses no acknowledged group and marks none as failed.

The endpoint of a bucket is routed to another, empty service, alternates between two, loses its
marker, or returns wrong responses; a folder is replaced by an empty one. Meanwhile groups are put,
sampled and deleted, and their packs are compacted.
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
from torture.context import AttackContext
from torture.workers import BUFFER

PROMISES = (1, 8)
ENGINES = ("sqlite", "postgresql")
#: Groups per put. Most of them are deleted, so that their pack is compacted.
_GROUPS = 4

#: Injects the fault of a name; None removes it.
Injector = Callable[[str | None], None]


async def attack(context: AttackContext) -> None:
    """Inject faults while groups are stored, then read all groups."""
    kept: set[str] = set()
    async with (
        _payloads(context) as (payloads, fault_names, inject),
        Store.open(context.url, payloads=payloads) as store,
    ):
        buffer = await store.buffer(BUFFER)
        end = time.monotonic() + context.seconds
        writing = [asyncio.create_task(_put(context, buffer, name, end, kept)) for name in "abc"]
        writing.append(asyncio.create_task(_prune(context, store, end)))
        writing.append(asyncio.create_task(_sample(context, buffer, end)))
        while time.monotonic() < end:
            fault = context.chance.choice(fault_names)
            inject(fault)
            context.figures[fault] += 1
            await asyncio.sleep(context.chance.uniform(0.02, 0.2))
            inject(None)
            await asyncio.sleep(context.chance.uniform(0.02, 0.1))
        await asyncio.gather(*writing)
        await _compacted(context, store)
        assert await buffer.count(statuses="failed") == 0, "intact groups failed"
        found = await buffer.find(limit=None)
        assert {one.group_uid for one in found} == kept, "not exactly the acknowledged groups"
        for group in await buffer.get([one.id for one in found]):
            check_group(group)
        context.figures["groups read"] += len(found)


async def _put(
    context: AttackContext, buffer: Buffer, name: str, end: float, kept: set[str]
) -> None:
    """Put groups repeatedly, and delete most of them."""
    for nth in count():
        uids = [f"{name}-{nth}-{i}" for i in range(_GROUPS)]
        try:
            ids = await buffer.put([derived_group(uid) for uid in uids])
        except PayloadsUnavailableError:
            context.figures["refused"] += 1
        else:
            context.figures["put"] += 1
            kept.update(uids)
            if context.chance.random() < 0.5:
                await buffer.delete(ids[1:])
                kept.difference_update(uids[1:])
        if time.monotonic() > end:
            return


async def _prune(context: AttackContext, store: Store, end: float) -> None:
    while time.monotonic() < end:
        await _compacted(context, store)
        await asyncio.sleep(0.02)


async def _sample(context: AttackContext, buffer: Buffer, end: float) -> None:
    """Draw groups repeatedly. Pauses before payloads are read again outlast a fault."""
    with patch("replaydb.packs.store.REREADS", (0.0, 0.3, 0.3, 0.3)):
        while time.monotonic() < end:
            try:
                for group in (await buffer.sample(3, timeout=0)).groups:
                    check_group(group)
            except PayloadsUnavailableError:
                context.figures["samples refused"] += 1
            except NotEnoughGroupsError:
                await asyncio.sleep(0.01)
            else:
                context.figures["sampled"] += 1
            await asyncio.sleep(0)


async def _compacted(context: AttackContext, store: Store) -> None:
    try:
        report = await store.prune(dry_run=False)
    except PayloadsUnavailableError:
        context.figures["prunes refused"] += 1
    else:
        context.figures["compacted"] += report.num_compacted


@asynccontextmanager
async def _payloads(context: AttackContext) -> AsyncIterator[tuple[str, tuple[str, ...], Injector]]:
    """Create a folder or an endpoint; yields its location, its faults and their injector."""
    if context.chance.random() < 0.3:
        folder = context.folder / "payloads"
        yield folder.as_uri(), ("unmounted",), _mount_faults(folder)
        return
    async with running_endpoint() as endpoint:
        with patch.dict(os.environ, credentials()):
            fault_names = ("another service", "alternating", "random", "no marker", "wrong answers")
            yield endpoint.url, fault_names, _route_faults(context, endpoint)


def _mount_faults(folder: Path) -> Injector:
    """Return an injector for the folder of the store, as if it were a mount."""
    numbers = count()
    away = folder / "away"

    def inject(fault: str | None) -> None:
        (mounted,) = (each for each in folder.iterdir() if len(each.name) == 32)
        if fault is None:
            mounted.rename(folder / f"wrong-{next(numbers)}")
            away.rename(mounted)
        else:
            mounted.rename(away)
            mounted.mkdir()

    return inject


def _route_faults(context: AttackContext, endpoint: Endpoint) -> Injector:
    """Return an injector for the endpoint of a bucket."""
    services = (endpoint.right, endpoint.wrong)
    marker: dict[str, bytes] = {}

    def inject(fault: str | None) -> None:
        match fault:
            case None:
                endpoint.fault = lambda answer: answer
                endpoint.right.objects.update(marker)
                endpoint.route_to(endpoint.right)
            case "another service":
                endpoint.route_to(endpoint.wrong)
            case "alternating":
                endpoint.alternate()
            case "random":
                endpoint.route = lambda request: context.chance.choice(services)
            case "wrong answers":
                response_fault = context.chance.choice(list(FAULTS.values()))
                endpoint.fault = times(context.chance.randint(1, 3), response_fault)
            case "no marker":
                marker.update(endpoint.right.named("replaydb-store"))
                for key in marker:
                    del endpoint.right.objects[key]

    return inject
