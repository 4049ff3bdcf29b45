"""Wrong answers of an object store: a single one is retried, consistent ones are damage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import replaydb as rdb
from replaydb import Buffer, Store, analysis
from replaydb.operations import copy, verify
from replaydb.packs import PackDamage, PayloadStore, Range
from support.buckets import (
    FAULTS,
    Answer,
    Endpoint,
    Fault,
    not_found,
    page,
    short,
    times,
)
from support.engines import postgresql_nightly
from support.groups import long_group

from .conftest import opened, soon

GROUPS = 4


@pytest.fixture
def store(store_at_endpoint: Store) -> Store:
    """A store whose payloads are in the bucket."""
    return store_at_endpoint


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """A buffer with groups in one pack."""
    made = await store.buffer("math")
    await made.put([long_group(str(i), 1000) for i in range(GROUPS)])
    return made


@postgresql_nightly
async def test_an_upload_of_several_megabytes_is_repeated(
    store: Store, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are not joined before, and are sent completely the second time, too."""
    buffer = await store.buffer("math")
    answered, sizes = endpoint._answer, []

    def unavailable_once(method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "PUT" and ".pack" in target:
            sizes.append(len(body))
            if len(sizes) == 1:
                return 503, b"<Error><Code>SlowDown</Code></Error>", []
        return answered(method, target, headers, body)

    monkeypatch.setattr(endpoint, "_answer", unavailable_once)
    given = [long_group(str(i), 400_000) for i in range(3)]
    await buffer.put(given)
    assert len(sizes) == 2
    assert sizes[0] == sizes[1] > 3_000_000
    batch = await buffer.sample(3, rdb.Fifo())
    assert [one.episodes[0].text for one in batch] == [one.episodes[0].text for one in given]
    assert [one.episodes[0].token_ids.sum() for one in batch] == [400_000 * 399_999 // 2] * 3


@postgresql_nightly
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
async def test_one_wrong_answer_fails_no_group(
    buffer: Buffer, endpoint: Endpoint, fault: Fault
) -> None:
    endpoint.fault = times(1, fault)
    batch = await buffer.sample(GROUPS)
    assert sorted(batch.ids) == [1, 2, 3, 4]
    assert await buffer.count(statuses="failed") == 0
    first, second = endpoint.readers
    assert first != second


def callers(
    buffer: Buffer, store: Store, url: str, folder: Path
) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return all calls that read packs."""

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


async def test_every_reader_retries_damaged_ranges(
    buffer: Buffer, store: Store, url: str, endpoint: Endpoint, tmp_path: Path
) -> None:
    for name, call in callers(buffer, store, url, tmp_path).items():
        endpoint.fault, reads = times(1, not_found), len(endpoint.readers)
        await call()
        assert len(endpoint.readers) > reads + 1, name
        assert await buffer.count(statuses="failed") == 0


@pytest.mark.parametrize(
    ("how", "reason"),
    [("gone", "is missing"), ("cut", "ends at byte"), ("altered", "checksum is")],
)
async def test_damage_is_confirmed_by_two_more_reads(
    buffer: Buffer, endpoint: Endpoint, how: str, reason: str
) -> None:
    ((key, data),) = endpoint.right.named(".pack").items()
    if how == "gone":
        del endpoint.right.objects[key]
    else:
        last = b"" if how == "cut" else bytes([data[-1] ^ 1])
        endpoint.right.objects[key] = data[:-1] + last
    with pytest.raises(rdb.CorruptPayloadError, match=reason) as caught:
        await buffer.sample(GROUPS)
    failed = await buffer.find(statuses="failed")
    assert {one.id for one in failed} == set(caught.value.group_ids)
    assert all((one.status_reason or "").startswith("damaged (was completed): ") for one in failed)
    assert len(endpoint.readers) == len(set(endpoint.readers)) == 3
    endpoint.right.objects[key] = data


@postgresql_nightly
@pytest.mark.parametrize("count", [3, 1000])
async def test_a_pack_that_is_listed_but_not_found(
    buffer: Buffer, endpoint: Endpoint, count: int
) -> None:
    """It is damaged only if no read finds it, as when a service has lost its content."""
    endpoint.fault = times(count, not_found)
    if count == 3:
        assert len(await buffer.sample(GROUPS)) == GROUPS
    else:
        with pytest.raises(rdb.CorruptPayloadError, match="is missing"):
            await buffer.sample(GROUPS)
        assert len(endpoint.readers) == 5
    assert await buffer.count(statuses="failed") == (0 if count == 3 else GROUPS)


@postgresql_nightly
async def test_alternating_services_fail_no_group(buffer: Buffer, endpoint: Endpoint) -> None:
    await buffer.put([long_group("more", 1000)])  # two packs are read with two requests
    endpoint.alternate()
    for _ in range(20):
        with suppress(rdb.PayloadsUnavailableError):
            await buffer.sample(GROUPS + 1)
    assert await buffer.count(statuses="failed") == 0


@postgresql_nightly
async def test_inconsistent_answers_are_not_damage(buffer: Buffer, endpoint: Endpoint) -> None:
    firsts = count(100)

    def another(answer: Answer) -> Answer:
        status, body, facts = answer
        return status, bytes([next(firsts)]) + body[1:], facts

    endpoint.fault = another
    with pytest.raises(rdb.PayloadsUnavailableError, match="no consistent answer"):
        await buffer.sample(GROUPS)
    assert await buffer.count(statuses="failed") == 0


@postgresql_nightly
@pytest.mark.parametrize("fault", [short, page], ids=["short", "page"])
async def test_invalid_answers_are_not_damage(
    buffer: Buffer, endpoint: Endpoint, fault: Fault
) -> None:
    """Such an answer does not show what is stored, however often it is repeated."""
    endpoint.fault = fault
    with pytest.raises(rdb.PayloadsUnavailableError, match="no consistent answer"):
        await buffer.get([1])


@postgresql_nightly
async def test_intact_payloads_are_requested_once(
    buffer: Buffer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replaydb.codec import payload

    checksum_of, compared = payload.checksum_of, []

    def counted(data: memoryview) -> int:
        compared.append(len(data))
        return checksum_of(data)

    monkeypatch.setattr(payload, "checksum_of", counted)
    endpoint.requests.clear()
    await buffer.sample(GROUPS)
    assert [request.kind for request in endpoint.requests] == ["GET"]
    assert len(compared) == GROUPS


async def test_pauses_end_at_the_deadline(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.packs.store.REREADS", (0.0, 3600.0))
    async with opened(endpoint.url) as payload_store:
        await payload_store.prepare(soon())
        with pytest.raises(rdb.PayloadsUnavailableError, match="no answer in time"):
            await payload_store.read([Range(uuid4().hex, 0, 1)], end=soon(0.2))


async def test_damaged_ranges_in_a_folder_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path.as_uri()) as payload_store:
        await payload_store.prepare(soon())
        wanted = [Range(uuid4().hex, 0, 3)]
        reread, again = PayloadStore._reread, list[int]()

        async def back_again(self: PayloadStore, *args: object) -> object:
            if again:
                await payload_store.write(wanted[0].pack, [b"abc"], sync=False, end=soon())
            again.append(1)
            return await reread(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(PayloadStore, "_reread", back_again)
        (found,) = await payload_store.read(wanted, end=soon())
        assert not isinstance(found, PackDamage)
        assert (bytes(found), len(again)) == (b"abc", 2)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"<html>", "DeleteObjects request cannot be parsed"),
        (b"<DeleteResult><Error><Key>of others</Key><Code>X</Code><Message/></Error>"
         b"</DeleteResult>", "obstore failed on the answer"),
    ],
    ids=["page", "other objects"],
)  # fmt: skip
async def test_an_invalid_answer_to_a_removal(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, body: bytes, what: str
) -> None:
    async with opened(endpoint.url) as payload_store:
        await payload_store.prepare(soon())
        answer = endpoint._answer

        def answered(method: str, target: str, *rest: Any) -> Answer:
            if "delete" in target:
                return 200, body, ["Content-Type: text/xml"]
            return answer(method, target, *rest)

        monkeypatch.setattr(endpoint, "_answer", answered)
        with pytest.raises(rdb.PayloadsUnavailableError, match=f"^s3://payloads/.*{what}"):
            await payload_store.remove([uuid4().hex], end=soon())
