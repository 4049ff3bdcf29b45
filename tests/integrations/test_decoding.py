"""Groups that cannot be decoded become `failed` eventually; the others are unaffected."""

from __future__ import annotations

import pytest

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import decoded, decoded_one, decoded_sample
from support.groups import groups


def _name(group: rdb.StoredGroup) -> str:
    if group.group_uid.startswith("bad"):
        raise KeyError("a\0\ud800")
    return group.group_uid


def _put(buffer: blocking.Buffer) -> None:
    buffer.put([rdb.EpisodeGroup("math", one.episodes, group_uid=uid) for uid, one in _named()])


def _named() -> list[tuple[str, rdb.EpisodeGroup]]:
    return list(zip(["bad", "good"], groups(2), strict=True))


@pytest.mark.parametrize(("limit", "attempts"), [(None, 3), (2, 2)])
def test_a_lease_with_an_undecodable_group(url: str, limit: int | None, attempts: int) -> None:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math", max_attempts=limit)
        _put(buffer)
        for _ in range(attempts):
            with pytest.raises(KeyError) as caught:
                decoded(buffer.lease(2, ttl=60), _name)
            assert "group" in caught.value.__notes__[0]
        assert decoded(buffer.lease(2, ttl=60, at_least=1), _name) == ["good"]
        bad, good = buffer.find()
        assert (bad.status, bad.attempts, good.attempts) == ("failed", attempts, 0)
        assert str(bad.status_reason).startswith("cannot be decoded: KeyError: ")


def test_a_sample_with_an_undecodable_group(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        _put(buffer)
        for _ in range(3):
            assert decoded_sample(buffer, buffer.sample(2, rdb.Fifo()), _name) == ["good"]
        bad, good = buffer.find()
        assert (bad.status, good.status) == ("failed", "completed")
        errors = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert errors == [f"Group {bad.id} cannot be decoded and is left out"] * 3


def test_a_sample_without_decodable_groups(url: str) -> None:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        _put(buffer)
        for _ in range(3):
            with pytest.raises(KeyError):
                decoded_sample(buffer, buffer.sample(1, rdb.Fifo()), _name)
        assert [one.status for one in buffer.find()] == ["failed", "completed"]


def test_a_sample_that_was_the_last_of_its_groups(url: str) -> None:
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math", max_times_sampled=1, rate_limit=rdb.MinSize(1))
        _put(buffer)
        batch = buffer.sample(2, rdb.Fifo())  # the buffer is below its rate limit from now on
        assert decoded_sample(buffer, batch, _name) == ["good"]


async def test_a_lease_of_one_undecodable_group(store: rdb.Store) -> None:
    buffer = await store.buffer("math")
    [group] = groups(1)
    await buffer.put(rdb.EpisodeGroup("math", group.episodes, group_uid="bad"))
    for _ in range(3):
        with pytest.raises(KeyError):
            await decoded_one(await buffer.lease(1, ttl=60), _name)
    assert await buffer.count(statuses="failed") == 1


def test_an_interrupt_counts_no_attempt(url: str) -> None:
    def interrupted(_: rdb.StoredGroup) -> None:
        raise KeyboardInterrupt

    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        _put(buffer)
        with pytest.raises(KeyboardInterrupt):
            decoded(buffer.lease(2, ttl=60), interrupted)
        assert buffer.leases() == []
        assert [one.attempts for one in buffer.find()] == [0, 0]
