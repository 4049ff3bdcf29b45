"""A service that answers wrongly once does no harm; one that always does is damage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest

import replaydb as rdb
from replaydb import Buffer, Store, analysis
from replaydb.operations import copy, verify
from replaydb.packs import PackDamage, Place, Range
from support.faulty_s3 import (
    FAULTS,
    Answer,
    Fault,
    FaultyS3,
    flipped,
    not_found,
    running_faulty_s3,
    short,
    times,
)
from support.groups import long_group
from support.ledger import check_books
from support.s3 import credentials

from .conftest import opened, soon

GROUPS = 4


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A service that answers as it should, until it is told otherwise."""
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)
    with running_faulty_s3() as running:
        yield running


@pytest.fixture
async def store(url: str, service: FaultyS3) -> AsyncIterator[Store]:
    """A store whose payloads are in its bucket."""
    async with Store.open(url, run="test", payloads=service.url(uuid4().hex)) as opened:
        yield opened
    service.fault = None
    await check_books(url)


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """Some groups, of one pack."""
    made = await store.buffer("math")
    await made.put([long_group(str(i), 1000) for i in range(GROUPS)])
    return made


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
async def test_one_wrong_answer_fails_no_group(
    buffer: Buffer, service: FaultyS3, fault: Fault
) -> None:
    service.fault = times(1, fault)
    batch = await buffer.sample(GROUPS)
    assert sorted(batch.ids) == [1, 2, 3, 4]
    assert await buffer.count(statuses="failed") == 0
    first, *_, last = service.connections
    assert first is not last


def callers(
    buffer: Buffer, store: Store, url: str, folder: Path
) -> dict[str, Callable[[], Awaitable[object]]]:
    """Everything that reads packs."""

    async def leased() -> None:
        async with buffer.lease(GROUPS, ttl=60) as lease:
            await lease.nack()

    async def redrawn() -> None:
        await buffer.redraw((await buffer.draws())[0].id)

    async def tabulated() -> None:
        assert (await asyncio.to_thread(analysis.tokens(url).to_table)).num_rows

    async def copied() -> None:
        await copy(url, f"sqlite:///{folder / 'copy.db'}")

    async def verified() -> None:
        assert (await verify(store)).is_sound

    async def compacted() -> None:
        await buffer.delete([1, 2, 3])
        assert (await store.prune(dry_run=False)).num_compacted == 1

    several = (leased, redrawn, tabulated, copied, verified, compacted)
    return {"got": lambda: buffer.get([1]), **{call.__name__: call for call in several}}


async def test_whoever_reads_reads_again(
    buffer: Buffer, store: Store, url: str, service: FaultyS3, tmp_path: Path
) -> None:
    for name, call in callers(buffer, store, url, tmp_path).items():
        service.fault, answers = times(1, not_found), service.requests["GET", "pack"]
        await call()
        assert service.requests["GET", "pack"] > answers + 1, name
        assert await buffer.count(statuses="failed") == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(not_found, "is missing"), (flipped, "checksum is"), (None, "ends at byte")],
    ids=["404", "flipped", "cut"],
)
async def test_damage_is_what_two_reads_find(
    buffer: Buffer, service: FaultyS3, fault: Fault | None, reason: str
) -> None:
    if fault is None:  # it is the object that is cut
        for key in service.objects:
            if key.endswith(".pack"):
                service.objects[key] = service.objects[key][:-1]
    service.fault = fault
    with pytest.raises(rdb.CorruptPayloadError, match=reason) as caught:
        await buffer.sample(GROUPS)
    failed = await buffer.find(statuses="failed")
    assert {one.id for one in failed} == set(caught.value.group_ids)
    assert all(reason in (one.status_reason or "") for one in failed)
    assert service.requests["GET", "pack"] == 3
    assert len({id(one) for one in service.connections}) == 3


async def test_answers_that_differ_are_no_damage(buffer: Buffer, service: FaultyS3) -> None:
    lengths = count(100)

    def another(answer: Answer) -> Answer:
        cut = next(lengths)
        return Answer(206, bytes([cut]) + answer.body[1:], answer.headers)

    service.fault = another
    with pytest.raises(rdb.PayloadsUnavailableError, match="no consistent answer"):
        await buffer.sample(GROUPS)
    assert await buffer.count(statuses="failed") == 0


@pytest.mark.parametrize("fault", [short, FAULTS["page"]], ids=["short", "page"])
async def test_what_is_no_answer_is_no_damage(
    buffer: Buffer, service: FaultyS3, fault: Fault
) -> None:
    """However often it comes: it says nothing of what is stored."""
    service.fault = fault
    with pytest.raises(rdb.PayloadsUnavailableError, match="no consistent answer"):
        await buffer.get([1])


async def test_what_is_sound_is_asked_for_once(
    buffer: Buffer, service: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replaydb.codec import payload

    checksum_of, compared = payload.checksum_of, []

    def counted(data: memoryview) -> int:
        compared.append(len(data))
        return checksum_of(data)

    monkeypatch.setattr(payload, "checksum_of", counted)
    service.requests.clear()
    await buffer.sample(GROUPS)
    assert service.requests == {("GET", "pack"): 1}
    assert len(compared) == GROUPS


async def test_pauses_are_within_the_call(
    service: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.place.REREADS", (0.0, 3600.0))
    async with opened(service.url("x")) as place:
        await place.prepare(soon())
        with pytest.raises(rdb.PayloadsUnavailableError, match="no answer in time"):
            await place.read([Range(uuid4().hex, 0, 1)], end=soon(0.2))


async def test_a_folder_is_read_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path.as_uri()) as place:
        await place.prepare(soon())
        wanted = [Range(uuid4().hex, 0, 3)]
        read, again = Place._read_anew, list[int]()

        async def back_again(self: Place, *args: object) -> object:
            if again:
                await place.write(wanted[0].pack, [b"abc"], sync=False, end=soon())
            again.append(1)
            return await read(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Place, "_read_anew", back_again)
        (found,) = await place.read(wanted, end=soon())
        assert not isinstance(found, PackDamage)
        assert (bytes(found), len(again)) == (b"abc", 2)
