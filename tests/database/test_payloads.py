"""A pack must be found beside the marker of its store before a transaction refers to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaydb import Buffer, Episode, PayloadsUnavailableError, Store
from replaydb.packs.folder import Folder
from support.buckets import Endpoint, Request, Service
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.invariants import check_invariants

Route = Callable[[Endpoint], Callable[[Request], Service]]

#: Routes of requests at an endpoint that does not always lead to the right service.
ROUTES: dict[str, Route] = {
    "another service": lambda both: lambda request: both.wrong,
    "writes go elsewhere": lambda both: (
        lambda request: both.wrong if request.kind == "PUT" else both.right
    ),
    "proofs come from elsewhere": lambda both: (
        lambda request: both.right if request.kind == "PUT" else both.wrong
    ),
}


@pytest.fixture
def store(store_at_endpoint: Store) -> Store:
    """A store whose payloads are in the bucket."""
    return store_at_endpoint


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """An empty buffer."""
    return await store.buffer("math")


async def contents(buffer: Buffer) -> dict[str, list[Episode]]:
    """Return all stored groups with their tokens."""
    found = await buffer.find(limit=None)
    return {one.group_uid: list(one.episodes) for one in await buffer.get([e.id for e in found])}


async def mostly_dead(buffer: Buffer) -> dict[str, list[Episode]]:
    """Create a pack that is mostly deleted, and return what is left."""
    ids = await buffer.put([long_group(str(nth), 1000 + nth) for nth in range(10)])
    await buffer.delete(ids[2:])
    return await contents(buffer)


@postgresql_nightly
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
async def test_a_put_into_another_service_is_refused(
    buffer: Buffer, endpoint: Endpoint, route: Route
) -> None:
    await buffer.put(group("before"))
    endpoint.route = route(endpoint)
    for nth in range(2):
        with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
            await buffer.put(group(f"refused-{nth}"))
    endpoint.route_to(endpoint.right)
    await buffer.put(group("refused-0"))
    assert list(await contents(buffer)) == ["before", "refused-0"]


@postgresql_nightly
async def test_an_endpoint_that_changes_with_every_request(
    buffer: Buffer, endpoint: Endpoint
) -> None:
    chance, acknowledged = random.Random(1), []
    endpoint.route = lambda request: chance.choice((endpoint.right, endpoint.wrong))
    for nth in range(40):
        if nth == 30:
            endpoint.alternate()
        try:
            await buffer.put(group(str(nth)))
        except PayloadsUnavailableError:
            continue
        acknowledged.append(str(nth))
    endpoint.route_to(endpoint.right)
    assert list(await contents(buffer)) == acknowledged
    assert 0 < len(acknowledged) < 20
    assert endpoint.wrong.named(".pack")


async def test_a_put_without_the_marker_is_refused(buffer: Buffer, endpoint: Endpoint) -> None:
    await buffer.put(group("before"))
    marker = endpoint.right.named("replaydb-store")
    for key in marker:
        del endpoint.right.objects[key]
    with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
        await buffer.put(group("without"))
    endpoint.right.objects |= marker
    await buffer.put(group("after"))
    assert list(await contents(buffer)) == ["before", "after"]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
async def test_a_pack_is_not_moved_to_another_service(
    store: Store, buffer: Buffer, endpoint: Endpoint, route: Route
) -> None:
    expected = await mostly_dead(buffer)
    elsewhere = route(endpoint)
    routes = [endpoint.route]

    def route_from_the_write_on(request: Request) -> Service:
        if request.kind == "PUT":
            routes[0] = elsewhere
        return routes[0](request)

    endpoint.route = route_from_the_write_on
    with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
        await store.prune(dry_run=False)
    endpoint.route_to(endpoint.right)
    assert await contents(buffer) == expected
    assert (await store.prune(dry_run=False)).num_compacted == 1
    assert await contents(buffer) == expected


@postgresql_nightly
async def test_requests_of_a_put_to_an_object_store(buffer: Buffer, endpoint: Endpoint) -> None:
    """One request writes the pack, and one with a short answer proves where it is."""
    await buffer.put(group("first"))
    endpoint.page = 2  # a longer answer would take another request
    endpoint.requests.clear()
    for nth in range(5):
        await buffer.put(groups(2, f"code-{nth}"))
    assert [request.kind for request in endpoint.requests] == ["PUT", "LIST"] * 5


@pytest.mark.parametrize("how", ["put", "prune"])
async def test_a_folder_that_is_unmounted_during_a_write(
    url: str, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder remains at the mount point."""
    async with Store.open(url, payloads=(tmp_path / "packs").as_uri()) as store:
        buffer = await store.buffer("math")
        expected = await mostly_dead(buffer)
        (mounted,) = (tmp_path / "packs").iterdir()
        put, away = Folder._put, tmp_path / "away"

        def unmounted(*args: Any) -> None:
            mounted.rename(away)
            mounted.mkdir()
            put(*args)

        with monkeypatch.context() as patched:
            patched.setattr(Folder, "_put", unmounted)
            with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
                await (buffer.put(group("lost")) if how == "put" else store.prune(dry_run=False))
        with pytest.raises(PayloadsUnavailableError, match="beside the marker"):
            await buffer.put(group("lost"))
        for file in mounted.iterdir():
            file.unlink()
        away.rename(mounted)
        assert await contents(buffer) == expected
        await buffer.put(group("lost"))
        assert (await store.prune(dry_run=False)).num_compacted == 1
        assert await contents(buffer) == expected | {"lost": list(group("lost").episodes)}
    await check_invariants(url)
