"""What a store requires of its clients: the release that they have, and the payload format."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, Executable, select, type_coerce, update
from typer.testing import CliRunner, Result

import replaydb as rdb
from replaydb import codec
from replaydb.cli import app
from replaydb.codec import framing
from replaydb.codec import payload as payload_format
from replaydb.database import migrations
from replaydb.database.runtime import revisions
from replaydb.database.tables.schema import (
    BREAKING,
    FORMATS,
    RELEASES,
    REVISIONS,
    buffer,
    compatibility,
    episode_group,
    payload,
    run,
)
from replaydb.database.tables.schema import lease as leases
from replaydb.operations import doctor
from replaydb.util import release
from support.connections import transaction
from support.engines import both_engines
from support.groups import episode, group, groups
from support.revisions import NEXT, release_next

LATER = "0.2.0"
#: The newest payload format, and that of the later release.
FORMAT = max(FORMATS)
LATER_FORMAT = FORMAT + 1


@pytest.fixture
def _newer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    _migrated_file: Path,
    _migrated_template: str,
) -> None:
    """This process is a later release, with one more revision and payload format.

    The tables that all tests copy were created by this one.
    """
    release_next(tmp_path, monkeypatch, "pass")
    monkeypatch.setattr(release, "VERSION", LATER)
    monkeypatch.setattr(revisions, "RELEASES", RELEASES | {NEXT: LATER})
    monkeypatch.setattr(revisions, "FORMATS", FORMATS | {LATER_FORMAT: NEXT})
    monkeypatch.setattr(payload_format, "VERSION", LATER_FORMAT)


async def required(url: str) -> tuple[str, int]:
    async with transaction(url) as connection:
        row = (await connection.execute(select(compatibility))).one()
    return row.min_client, row.write_format


async def formats(url: str) -> list[int]:
    async with transaction(url) as connection:
        return list(await connection.scalars(select(payload.c.codec_version).distinct()))


def test_revisions_and_formats_are_of_releases_until_this() -> None:
    here = release.numbers(release.VERSION)
    assert list(RELEASES) == sorted(RELEASES)
    assert all(release.numbers(one) <= here for one in RELEASES.values())
    assert {len(release.numbers(one)) for one in RELEASES.values()} == {3}  # 1.0 is before 1.0.0
    assert {*BREAKING, *FORMATS.values()} <= RELEASES.keys()
    assert list(FORMATS) == list(range(1, payload_format.VERSION + 1))


@pytest.mark.parametrize(
    ("version", "needed", "allowed"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.10.0", "0.9.1", True),
        ("0.9.1", "0.10.0", False),
        ("0.2.0rc1", "0.2.0", True),
        ("0.1.0", None, True),
        ("1.0.0", "damaged", False),
    ],
)
def test_versions_are_compared_by_number(version: str, needed: str | None, allowed: bool) -> None:
    assert revisions.is_new_enough(version, needed) is allowed


async def test_a_new_store_writes_the_newest_format(url: str) -> None:
    assert await required(url) == ("0.1.0", max(FORMATS))


@pytest.mark.usefixtures("_newer")
async def test_a_new_store_of_a_later_release_writes_its_format(empty_url: str) -> None:
    async with rdb.Store.open(empty_url, migrate=True) as store:
        await (await store.buffer("math")).put(group())
    assert await required(empty_url) == (LATER, LATER_FORMAT)
    assert await formats(empty_url) == [LATER_FORMAT]


@pytest.mark.usefixtures("_newer")
async def test_an_existing_store_writes_a_format_only_on_request(own_url: str) -> None:
    async with rdb.Store.open(own_url, migrate=True) as store:
        assert await required(own_url) == ("0.1.0", FORMAT)
        math = await store.buffer("math")
        await math.put(group("old"))
        await math.open_group("math", "open", 1)
        assert await formats(own_url) == [FORMAT]
        await migrations.write_format(own_url, LATER_FORMAT)
        assert await required(own_url) == (LATER, LATER_FORMAT)
        await math.put(group("unaware"))  # what this process knows is of its last transaction
        await math.put(group("new"))
        await math.add_episode("open", episode(1.0))
        assert sorted(await formats(own_url)) == [FORMAT, LATER_FORMAT]
        ids = [one.id for one in await math.find()]
        assert [len(one.episodes) for one in await math.get(ids)] == [2, 1, 2, 2]
        assert len((await math.sample(4)).ids) == 4


@pytest.mark.usefixtures("_newer")
async def test_a_downgrade_below_stored_payloads_is_refused(own_url: str) -> None:
    before = REVISIONS[-1]
    await migrations.upgrade(own_url)
    await migrations.write_format(own_url, LATER_FORMAT)
    await migrations.downgrade(own_url, before)  # nothing is stored in it
    assert await required(own_url) == ("0.1.0", FORMAT)

    await migrations.upgrade(own_url)
    await migrations.write_format(own_url, LATER_FORMAT)
    async with rdb.Store.open(own_url) as store:
        math = await store.buffer("math")
        await math.put(group())
        for change in (
            migrations.downgrade(own_url, before),
            migrations.downgrade(own_url, "0005"),
            migrations.write_format(own_url, FORMAT),
        ):
            with pytest.raises(rdb.SchemaError, match="1 groups have payloads of a later format"):
                await change
        assert await migrations.current(own_url) == NEXT
        assert await required(own_url) == (LATER, LATER_FORMAT)
        await math.delete([1])
        await migrations.write_format(own_url, FORMAT)
        assert await required(own_url) == ("0.1.0", FORMAT)


@pytest.mark.usefixtures("_newer")
@pytest.mark.parametrize("adds", [False, True])
async def test_what_was_encoded_before_a_downgrade_is_not_stored(own_url: str, adds: bool) -> None:
    await migrations.upgrade(own_url)
    await migrations.write_format(own_url, LATER_FORMAT)
    async with rdb.Store.open(own_url) as store:
        math = await store.buffer("math")
        await math.open_group("math", "open", 1)
        await migrations.write_format(own_url, FORMAT)
        call = math.add_episode("open", episode(1.0)) if adds else math.put(group())
        with pytest.raises(
            rdb.SchemaOutOfDateError, match=f"downgraded to payload format {FORMAT}"
        ):
            await call
        assert await formats(own_url) == []
        await (math.add_episode("open", episode(1.0)) if adds else math.put(group()))
        assert await formats(own_url) == [FORMAT]


async def test_an_open_client_that_becomes_too_old_is_told(url: str) -> None:
    tables = (episode_group, leases, run)

    async def stored() -> list[Any]:
        async with transaction(url) as connection:
            return [(await connection.execute(select(one))).all() for one in tables]

    async with rdb.Store.open(url, run="a") as store, rdb.Store.open(url) as unused:
        math = await store.buffer("math")
        first = await unused.buffer("math")
        await math.put(groups(3))
        lease = await math.lease(1, ttl=60)
        before = await stored()
        async with transaction(url) as connection:
            await connection.execute(update(compatibility).values(min_client=LATER))
        calls = {
            "put": math.put(group("more")),
            "sample": math.sample(1),
            "lease": math.lease(1, ttl=60),
            "first put, which stores the run": first.put(group("first")),
            "extend": lease.extend(),
            "open_lease": math.open_lease(lease.id, ttl=90).__aenter__(),
            "ack": lease.ack(),
            "stats": math.stats(),
            "advance": math.advance_policy(1),
            "update": math.update_priorities([1], [2.0]),
            "delete": math.delete([1]),
            "buffer": store.buffer("math"),
            "settings": math.update_settings(seed=1),
        }
        found = await asyncio.gather(*calls.values(), return_exceptions=True)
        message = "the store needs replaydb 0.2.0 or later, and this is 0.1.0; run: "
        for name, error in zip(calls, found, strict=True):
            assert isinstance(error, rdb.ClientTooOldError), name
            assert str(error).startswith(message), name
        assert await stored() == before
        async with transaction(url) as connection:
            await connection.execute(update(compatibility).values(min_client="0.1.0"))
        await lease.nack()


async def test_a_copy_into_a_store_that_needs_a_newer_client_stores_no_run(
    own_url: str, tmp_path: Path
) -> None:
    async with rdb.Store.open(f"sqlite:///{tmp_path}/from.db", run="source") as store:
        math = await store.buffer("math")
        await math.put(group())
        async with rdb.Store.open(own_url) as other:
            there = await other.buffer("math")
            async with transaction(own_url) as connection:
                await connection.execute(update(compatibility).values(min_client=LATER))
            with pytest.raises(rdb.ClientTooOldError):
                await math.copy_to(there)
    async with transaction(own_url) as connection:
        assert (await connection.execute(select(run))).all() == []


@pytest.mark.parametrize("damage", [7, 0])
async def test_a_damaged_format_is_not_written(own_url: str, damage: int) -> None:
    async with rdb.Store.open(own_url) as store:
        math = await store.buffer("math")
        async with transaction(own_url) as connection:
            await connection.execute(update(compatibility).values(write_format=damage))
        with pytest.raises(rdb.SchemaError, match=r"compatibility\.write_format: expected one of"):
            await math.put(group())
        assert await formats(own_url) == []


@pytest.mark.parametrize(
    "change",
    [
        compatibility.delete(),
        update(compatibility).values(write_format=7),
        update(compatibility).values(min_client="0.0.1"),
    ],
)
async def test_a_damaged_row_is_reported_and_replaced(own_url: str, change: Executable) -> None:
    async with transaction(own_url) as connection:
        await connection.execute(change)
    (found,) = [one for one in await doctor.examine(own_url) if one.subject == "tables"]
    assert revisions.DAMAGED in found.text
    assert found.fix == "replaydb db write-format NUMBER"
    await migrations.write_format(own_url, FORMAT)
    assert await migrations.check(own_url) == ()
    assert await required(own_url) == ("0.1.0", FORMAT)


async def test_a_payload_of_a_later_format_is_not_damaged(own_url: str) -> None:
    later = bytes(framing.write({}, LATER_FORMAT))
    async with rdb.Store.open(own_url) as store:
        math = await store.buffer("math")
        await math.put(groups(2))
        async with transaction(own_url) as connection:
            values = {"data": later, "checksum": codec.checksum_of(later)}
            values |= {"codec_version": LATER_FORMAT}
            await connection.execute(update(payload).where(payload.c.group_id == 1).values(values))
        with pytest.raises(
            rdb.ClientTooOldError, match=rf"payload format {LATER_FORMAT}, .* reads up to {FORMAT}"
        ):
            await math.get([1])
        assert [one.group_uid for one in await math.get([2])] == ["gsm8k-1"]
        assert {one.status for one in await math.find()} == {rdb.GroupStatus.COMPLETED}


@pytest.mark.parametrize("changes", [{"horizon": 3}, {"eviction": "wisest"}, {"capacity": 7}])
async def test_a_setting_of_a_later_release_is_named(url: str, changes: dict[str, Any]) -> None:
    async with rdb.Store.open(url) as store:
        math = await store.buffer("math")
        async with transaction(url) as connection:
            stored = rdb.BufferSettings().to_json() | changes
            await connection.execute(update(buffer).values(settings=type_coerce(stored, JSON)))
        [name] = changes
        for call in (math.put(group()), store.buffer("math"), store.buffers()):
            with pytest.raises(rdb.ClientTooOldError, match=f"newer replaydb: .*{name}"):
                await call


@both_engines
def test_connected_clients_that_would_be_too_old_are_named(own_url: str) -> None:
    """On SQLite none can be seen."""
    by_name = "&application_name=replaydb%200.0.9" if "postgresql" in own_url else ""

    def run(*arguments: str, answer: str | None = None) -> Result:
        environment = {"REPLAYDB_URL": own_url, "COLUMNS": "200"}
        return CliRunner().invoke(app, ["db", *arguments], input=answer, env=environment)

    async def check() -> None:
        async with rdb.Store.open(own_url) as newer, rdb.Store.open(own_url + by_name) as older:
            for store in (newer, older):
                await (await store.buffer("math")).put(group())
            for command in (("upgrade",), ("write-format", str(FORMAT))):
                refused = await asyncio.to_thread(run, *command, answer="n\n")
                done = await asyncio.to_thread(run, *command, "--yes")
                assert done.exit_code == 0
                if not by_name:
                    assert refused.output == done.output
                    continue
                assert refused.exit_code == 1
                first, second, *_ = lines = refused.output.splitlines()
                assert first == (
                    "connected clients older than 0.1.0, whose calls will raise ClientTooOldError:"
                )
                assert re.fullmatch(r"  replaydb 0\.0\.9: user postgres, \d+ connections", second)
                assert lines[-1] == "Aborted."

    asyncio.run(check())


def test_an_unknown_format_is_refused(sqlite_url: str) -> None:
    for number in (0, 7):
        for change in (
            migrations.write_format(sqlite_url, number),
            migrations.outdated_clients(sqlite_url, number=number),
        ):
            with pytest.raises(
                rdb.InvalidInputError, match=rf"number: expected one of \[1, 2\], got {number}"
            ):
                asyncio.run(change)
