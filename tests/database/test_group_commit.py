"""Group commit: withdrawals, timeouts, failures and outages of shared transactions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest

from replaydb.database.runtime.group_commit import SHARED_ATTEMPTS, Gate, GroupCommit, Submission
from replaydb.errors import DatabaseUnavailableError, OutcomeUnknownError, StoreClosedError


class Store:
    """Commits numbers. `before` is called in each transaction, before the gate is closed."""

    def __init__(self) -> None:
        self.attempts: list[list[int]] = []
        self.stored: list[int] = []
        self.before: Callable[[Sequence[int]], None] = lambda items: None
        self.committing, self.after = asyncio.Event(), asyncio.Event()
        self.settling_seconds = math.inf
        self.after.set()
        self.shared: GroupCommit[int, int] = GroupCommit(
            "db", self.commit, lambda num_bytes: 60.0, lambda: self.settling_seconds
        )

    async def commit(self, items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        gate.open()
        self.attempts.append(list(items))
        await asyncio.sleep(0)
        self.before(items)
        await asyncio.sleep(0)
        gate.close()
        self.committing.set()
        await self.after.wait()
        self.stored.extend(items)
        return [2 * item for item in items]

    def put(self, item: int, end: float | None = None) -> asyncio.Task[int]:
        return asyncio.create_task(self.shared.submit(Submission(item, (), 0), end))


def in_a_minute() -> float:
    return asyncio.get_running_loop().time() + 60


async def test_withdrawals_cannot_starve_a_submission() -> None:
    """Before each commit of a shared transaction, another caller withdraws."""
    store = Store()
    leaving = [store.put(i) for i in range(20)]
    patient = store.put(99)

    def one_withdraws(items: Sequence[int]) -> None:
        if len(items) > 1:
            leaving[items[0]].cancel()

    store.before = one_withdraws
    assert await asyncio.wait_for(patient, 60) == 198
    shared = [items for items in store.attempts if len(items) > 1]
    assert len(shared) == SHARED_ATTEMPTS
    assert sum(task.cancelled() for task in leaving) == SHARED_ATTEMPTS
    assert sorted(store.stored) == [*range(SHARED_ATTEMPTS, 20), 99]


async def test_a_withdrawal_before_the_commit_prevents_it() -> None:
    store = Store()
    early, late = store.put(1), store.put(2)

    def early_withdraws(_: Sequence[int]) -> None:
        early.cancel()

    store.before = early_withdraws
    store.after.clear()
    while len(store.attempts) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    late.cancel()
    await asyncio.wait([late], timeout=0.05)
    assert not late.done(), "it was cancelled before the end of its commit"
    store.after.set()
    await asyncio.wait([early, late])
    assert (early.cancelled(), late.cancelled(), store.stored) == (True, True, [2])


async def test_a_timeout_during_the_commit_is_not_a_failure(
    pass_time: Callable[[float], None],
) -> None:
    store = Store()
    store.after.clear()
    put = store.put(1, in_a_minute())
    await store.committing.wait()
    pass_time(61)
    await asyncio.wait([put], timeout=0.01)
    assert not put.done()
    store.after.set()
    assert await put == 2


async def test_a_put_times_out_while_its_commit_stalls(
    pass_time: Callable[[float], None],
) -> None:
    store = Store()
    store.after.clear()
    store.settling_seconds = 0.05
    hurried, patient = store.put(1, in_a_minute()), store.put(2)
    await store.committing.wait()
    pass_time(61)
    with pytest.raises(OutcomeUnknownError, match="db: "):
        await asyncio.wait_for(hurried, 60)
    store.after.set()
    assert await patient == 4


async def test_a_retried_transaction_skips_puts_that_timed_out(
    pass_time: Callable[[float], None],
) -> None:
    store = Store()
    store.settling_seconds = 0.05
    again = asyncio.Event()
    first_commit = store.commit

    async def commit(items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        gate.close()  # a commit that stores nothing
        store.committing.set()
        await again.wait()
        return await first_commit(items, gate, end)

    store.shared = GroupCommit("db", commit, lambda num_bytes: 60.0, lambda: store.settling_seconds)
    hurried, patient = store.put(1, in_a_minute()), store.put(2)
    await store.committing.wait()
    pass_time(61)
    with pytest.raises(OutcomeUnknownError):
        await asyncio.wait_for(hurried, 60)
    again.set()
    assert await patient == 4
    assert store.stored == [2]


async def test_a_stalled_commit_without_callers_ends(pass_time: Callable[[float], None]) -> None:
    store = Store()
    store.after.clear()
    store.settling_seconds = 0.05
    put = store.put(1, in_a_minute())
    await store.committing.wait()
    pass_time(61)
    with pytest.raises(OutcomeUnknownError):
        await asyncio.wait_for(put, 60)
    await asyncio.wait_for(store.shared.drain(), 60)


async def test_give_up_fails_all_submissions() -> None:
    store = Store()
    has_begun, never = asyncio.Event(), asyncio.Event()

    async def commit(items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        has_begun.set()
        await never.wait()
        return items

    store.shared = GroupCommit("db", commit, lambda num_bytes: 60.0, lambda: store.settling_seconds)
    put = store.put(1)
    await has_begun.wait()
    waiting = store.put(2)
    await asyncio.sleep(0)
    await asyncio.wait_for(store.shared.give_up(), 60)
    for one in (put, waiting):
        with pytest.raises(StoreClosedError):
            await asyncio.wait_for(one, 60)


async def test_give_up_waits_for_a_commit_under_way() -> None:
    """A caller that gets an error must not find its submission stored."""
    store = Store()
    store.after.clear()
    put = store.put(1)
    await store.committing.wait()
    waiting = store.put(2)
    giving_up = asyncio.create_task(store.shared.give_up())
    await asyncio.sleep(0.05)
    store.after.set()
    await asyncio.wait_for(giving_up, 60)
    assert await put == 2
    with pytest.raises(StoreClosedError):
        await waiting
    assert store.stored == [1]


async def test_give_up_leaves_the_outcome_of_a_stalled_commit_unknown() -> None:
    store = Store()
    store.after.clear()
    store.settling_seconds = 0.05
    put = store.put(1)
    await store.committing.wait()
    await asyncio.wait_for(store.shared.give_up(), 60)
    with pytest.raises(OutcomeUnknownError):
        await put


async def test_a_timeout_before_the_commit() -> None:
    store = Store()
    stuck = asyncio.Event()

    async def commit(items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        await stuck.wait()
        raise AssertionError("no caller waits for this")

    shared: GroupCommit[int, int] = GroupCommit("db", commit, lambda num_bytes: 60.0, lambda: 0.0)
    now = asyncio.get_running_loop().time()
    with pytest.raises(DatabaseUnavailableError, match="db: "):
        await shared.submit(Submission(1, (), 0), now + 0.05)
    await asyncio.wait_for(shared.drain(), 60)  # a transaction without callers ends at once
    assert store.stored == []


@pytest.mark.parametrize("kind", [DatabaseUnavailableError, OutcomeUnknownError])
async def test_an_outage_fails_all_waiting_submissions_at_once(
    kind: type[DatabaseUnavailableError],
) -> None:
    store = Store()

    def gone(_: Sequence[int]) -> None:
        raise kind("gone")

    store.before = gone
    outcomes = await asyncio.gather(*(store.put(i) for i in range(9)), return_exceptions=True)
    assert {type(one) for one in outcomes} == {kind}
    assert store.attempts == [list(range(9))]


async def test_the_time_limit_begins_at_the_last_commit() -> None:
    """While the database commits, no submission fails, however long the queue is."""
    ends: list[float] = []
    committed: list[float] = []

    async def commit(items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        ends.append(end)
        await asyncio.sleep(0.01)
        committed.append(asyncio.get_running_loop().time())
        return items

    shared: GroupCommit[int, int] = GroupCommit(
        "db", commit, lambda num_bytes: 60.0, lambda: math.inf
    )
    await asyncio.gather(*(shared.submit(Submission(i, ("alone",), 0)) for i in range(3)))
    assert all(end >= before + 60.0 for before, end in zip(committed, ends[1:], strict=False))


@pytest.mark.parametrize("is_unknown", [False, True], ids=["away", "unknown"])
async def test_an_outage_fails_only_submissions_from_before_the_attempt(is_unknown: bool) -> None:
    """The outcome of a submission that was not attempted is not unknown."""
    kind = OutcomeUnknownError if is_unknown else DatabaseUnavailableError
    store = Store()
    away = asyncio.Event()

    async def commit(items: Sequence[int], gate: Gate, end: float) -> Sequence[int]:
        store.attempts.append(list(items))
        if 1 in items:
            await away.wait()
            raise kind("gone")
        return [2 * item for item in items]

    shared: GroupCommit[int, int] = GroupCommit(
        "db", commit, lambda num_bytes: 60.0, lambda: math.inf
    )

    def put(item: int) -> asyncio.Task[int]:
        key = "alone" if item < 3 else item  # 2 must wait for 1
        return asyncio.create_task(shared.submit(Submission(item, (key,), 0)))

    before = [put(1), put(2)]
    while not store.attempts:  # noqa: ASYNC110
        await asyncio.sleep(0)
    after = [put(3), put(4)]
    await asyncio.sleep(0)
    away.set()
    outcomes = await asyncio.gather(*before, return_exceptions=True)
    assert [type(one) for one in outcomes] == [kind, int if is_unknown else kind]
    assert await asyncio.gather(*after) == [6, 8]
    assert store.attempts == ([[1], [2, 3, 4]] if is_unknown else [[1], [3, 4]])


async def test_a_failing_submission_does_not_fail_the_others() -> None:
    store = Store()

    def three_is_bad(items: Sequence[int]) -> None:
        if 3 in items:
            raise ValueError

    store.before = three_is_bad
    outcomes = await asyncio.gather(*(store.put(i) for i in range(5)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [int, int, int, ValueError, int]
    assert store.attempts == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
