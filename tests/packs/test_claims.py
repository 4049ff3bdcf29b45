"""The marker of a payload store names the instance of the database that may write and remove."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from replaydb import PayloadsReadOnlyError, PayloadsUnavailableError
from replaydb.packs import Instance, PayloadStore
from replaydb.packs.store import ReadInstance
from support.buckets import Answer, Endpoint

from .conftest import STORE, opened, soon

FILE = Instance({"inode": 1, "birth": 2})
OTHER = Instance({"inode": 2, "birth": 2})
SERVER = Instance({"system": 1, "database": 2}, timeline=2, newest=3)


def reading(*instances: Instance) -> ReadInstance:
    """Return a function that returns these in turn, and the last one for ever."""
    left = list(instances)

    async def read(_: float) -> Instance:
        return left.pop(0) if len(left) > 1 else left[0]

    return read


async def write(payload_store: PayloadStore) -> str:
    """Write a pack and return its name."""
    name = payload_store.new_name()
    await payload_store.write(name, [b"abc"], sync=False, end=soon())
    return name


@pytest.mark.parametrize(
    ("instance", "owner", "relation"),
    [
        (FILE, FILE, "same"),
        (FILE, Instance({"inode": 1}), "same"),
        (Instance({"inode": 1}), FILE, "same"),
        (FILE, Instance({"inode": 2, "birth": 2}), "other"),
        (FILE, Instance({"inode": 1, "birth": 3}), "other"),
        (FILE, Instance({}), "other"),
        (FILE, SERVER, "other"),
        (replace(SERVER, newest=0), SERVER, "same"),
        (replace(SERVER, timeline=0), SERVER, "same"),
        (SERVER, replace(SERVER, timeline=0), "same"),
        (Instance({"database": 2}, 2), SERVER, "same"),
        (replace(SERVER, timeline=1), SERVER, "other"),
        (replace(SERVER, timeline=3), SERVER, "other"),
        (replace(SERVER, timeline=4), SERVER, "promoted"),
        (Instance({"system": 1, "database": 3}, 4), SERVER, "other"),
        (Instance({"system": 2, "database": 2}, 4), SERVER, "other"),
    ],
)
def test_relations(instance: Instance, owner: Instance, relation: str) -> None:
    assert instance.relation(owner) == relation
    assert Instance.decoded(owner.encoded()) == owner


def test_the_newest_timeline_is_remembered() -> None:
    assert SERVER.after(None) == replace(SERVER, newest=2)
    assert replace(SERVER, timeline=4).after(SERVER).newest == 4
    assert replace(SERVER, timeline=1).after(SERVER).newest == 3
    assert replace(SERVER, timeline=1).after(FILE).newest == 1


async def test_one_of_several_instances_becomes_the_owner(payload_url: str) -> None:
    async with opened(payload_url) as first:
        await first.prepare(soon())

    async def claim(number: int) -> int:
        async with opened(payload_url, STORE, reading(Instance({"inode": number}))) as one:
            await write(one)
            return number

    claims = [claim(number % 3) for number in range(9)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    owners = {one for one in outcomes if isinstance(one, int)}
    assert len(owners) == 1
    refused = [one for one in outcomes if not isinstance(one, int)]
    assert len(refused) == 6
    assert all(isinstance(one, PayloadsReadOnlyError) for one in refused)


async def test_another_instance_writes_and_removes_nothing(payload_store: PayloadStore) -> None:
    name = await write(payload_store)
    async with opened(payload_store.url, STORE, reading(OTHER)) as other:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: write(other),
            lambda: other.remove([name], end=soon()),
            lambda: other.claim(soon()),
        ]
        for call in calls:
            with pytest.raises(PayloadsReadOnlyError, match=r"\(inode 1\), got inode 2, birth 2"):
                await call()
        assert [one.name async for one in other.listed(end=soon())] == [name]
        await other.claim(soon(), adopt=True)
        await other.remove([name], end=soon())
        await write(other)
        for _ in range(3):  # only the first writes a pack, beside which it finds another marker
            with pytest.raises(PayloadsReadOnlyError):
                await write(payload_store)
        assert len([one async for one in other.listed(end=soon())]) == 2
        with pytest.raises(PayloadsReadOnlyError):
            await payload_store.remove([name], end=soon())


async def test_a_marker_that_was_changed_meanwhile_is_not_replaced(
    payload_store: PayloadStore,
) -> None:
    objects, file = payload_store._objects, "replaydb-store"
    old = await objects.get(file)
    assert old is not None
    assert await objects.replace(file, old, b"first")
    assert not await objects.replace(file, old, b"second")
    assert await objects.get(file) == b"first"


async def test_an_object_that_changes_while_it_is_replaced(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service compares its version with the one that was read."""
    async with opened(endpoint.url) as payload_store:
        await payload_store.prepare(soon())
        ((key, old),) = endpoint.right.named("replaydb-store").items()
        answer = endpoint._answer

        def then_changed(method: str, *request: Any) -> Answer:
            found = answer(method, *request)
            if method == "GET":
                endpoint.right.objects[key] = b"first"
            return found

        monkeypatch.setattr(endpoint, "_answer", then_changed)
        assert not await payload_store._objects.replace("replaydb-store", old, b"second")
        assert endpoint.right.objects[key] == b"first"


async def test_a_process_notices_a_failover_of_its_server(payload_url: str) -> None:
    """It reads the instance again when it finds another marker."""
    old, new = (replace(SERVER, timeline=timeline) for timeline in (2, 3))
    async with opened(payload_url, STORE, reading(old, new)) as first:
        await first.prepare(soon())
        await write(first)
        async with opened(payload_url, STORE, reading(new)) as second:
            await write(second)
        await write(first)
        async with opened(payload_url, STORE, reading(old)) as stale:
            with pytest.raises(PayloadsReadOnlyError):
                await write(stale)


async def test_packs_are_removed_by_the_instance_that_chose_them(payload_url: str) -> None:
    """If the process was led to another server meanwhile, that one may still need them."""
    old, new = (replace(SERVER, timeline=timeline) for timeline in (2, 3))
    async with (
        opened(payload_url, STORE, reading(old, new)) as first,
        opened(payload_url, STORE, reading(new)) as second,
    ):
        await first.prepare(soon())
        await first.claim(soon())
        name = await write(second)
        with pytest.raises(PayloadsReadOnlyError):
            await first.remove([name], end=soon())


async def test_a_folder_that_another_process_has_locked(tmp_path: Path) -> None:
    async with opened(tmp_path.as_uri()) as payload_store:
        await payload_store.prepare(soon())
        lock = os.open(tmp_path / STORE, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PayloadsUnavailableError, match="no answer in time"):
            await payload_store.claim(soon(0.1))
        claiming = asyncio.create_task(payload_store.claim(soon()))
        await asyncio.sleep(0.01)
        os.close(lock)
        await claiming


async def test_a_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(9, "of some network file systems"), OSError(5, "of a broken disk")):

        def refuse(*_: int, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(fcntl, "flock", refuse)
        async with opened(tmp_path.as_uri(), uuid4().hex) as payload_store:
            await payload_store.prepare(soon())
            if error.errno == 9:
                await write(payload_store)
            else:
                with pytest.raises(PayloadsUnavailableError):
                    await write(payload_store)


@pytest.mark.parametrize("answers", ["ignored", "refused", "succeeded, but the answer was lost"])
async def test_services_and_conditions(
    endpoint: Endpoint, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is read again after each replacement."""
    async with opened(endpoint.url) as payload_store:
        await payload_store.prepare(soon())
        answer = endpoint._answer

        def answered(method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
            if "if-match" in headers:
                if answers == "refused":
                    return 501, b"<Error><Code>NotImplemented</Code></Error>", []
                del headers["if-match"]
                if answers != "ignored":
                    answer(method, target, headers, body)
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>", []
            return answer(method, target, headers, body)

        monkeypatch.setattr(endpoint, "_answer", answered)
        await write(payload_store)
    async with opened(endpoint.url, STORE, reading(OTHER)) as other:
        with pytest.raises(PayloadsReadOnlyError):
            await write(other)
