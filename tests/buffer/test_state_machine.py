"""Random call sequences compared with a small model, on both engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import replaydb as rdb
from replaydb import Buffer, Capacity, Lease, Store
from replaydb.operations import delete_buffer
from support.clock import Clock
from support.connections import engine_of
from support.examples import examples
from support.groups import episode, group
from support.invariants import check_tables
from support.model import FullError, Model, Row

T = TypeVar("T")

TASKS = st.sampled_from(["a", "b"])
AGES = st.sampled_from([None, 0, 0, 1, 2])  # staleness in versions
PUTTABLE = st.sampled_from(
    ["completed", "completed", "completed", "aborted", "expired", "failed", "filtered", "archived"]
)
NUMBER = st.integers(0, 1000)
PRIORITIES = st.sampled_from([0.0, 0.5, 1.0, 3.0])
TTL = 100.0


class Machine(RuleBasedStateMachine):
    """Every rule makes one call to a buffer and to its model."""

    url: str
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.leases: list[Lease] = []
        self.claims: list[rdb.Claim] = []
        self.uids = 0

    def run(self, call: Awaitable[T]) -> T:
        async def main() -> T:
            return await call

        return self.runner.run(main())

    @initialize(
        capacity=st.sampled_from([None, 4, 7]),
        max_staleness=st.sampled_from([None, 1]),
        max_attempts=st.sampled_from([None, 2]),
        max_times=st.sampled_from([None, 2]),
        returns=st.booleans(),
        eviction=st.sampled_from(["oldest", "newest", "lowest_priority"]),
        expire_by=st.sampled_from(["oldest_token", "newest_token"]),
        on_evict=st.just("archive"),
    )
    def begin(self, on_evict: str, **rules: Any) -> None:
        self.model = Model(**rules)
        chosen: dict[str, Any] = {
            "capacity": None if rules["capacity"] is None else Capacity(groups=rules["capacity"]),
            "max_staleness": rules["max_staleness"],
            "max_attempts": rules["max_attempts"],
            "max_times_sampled": rules["max_times"],
            "on_ack": "return" if rules["returns"] else "archive",
            "eviction": rules["eviction"],
            "expire_by": rules["expire_by"],
            "on_evict": on_evict,
        }

        async def opened() -> tuple[Store, Buffer]:
            store = await Store.open(self.url, run="test")
            return store, await store.buffer("test", **chosen)

        self.store, self.buffer = self.run(opened())
        self.below = engine_of(self.url)

    def teardown(self) -> None:
        if hasattr(self, "below"):
            self.run(delete_buffer(self.store, "test"))
            self.run(self.store.close())
            self.run(self.below.dispose())
        self.runner.close()

    def pick(self, number: int, *statuses: str) -> str | None:
        found = self.model.of(*statuses)
        return found[number % len(found)] if found else None

    def version(self, age: int | None) -> int | None:
        return None if age is None else max(0, self.model.version - age)

    def uid(self) -> str:
        self.uids += 1
        return f"uid-{self.uids}"

    @rule(task=TASKS, count=st.integers(1, 3), age=AGES, priority=PRIORITIES, status=PUTTABLE)
    def put(self, task: str, count: int, age: int | None, priority: float, status: str) -> None:
        fields: dict[str, Any] = {"version": self.version(age), "status": status}
        several = [group(self.uid(), task, priority=priority + i, **fields) for i in range(count)]
        self._put(several)

    def _put(self, several: list[rdb.EpisodeGroup], **how: Any) -> list[int]:
        """Put groups into both. Return their ids, or none if they do not fit."""
        try:
            ids = self.run(self.buffer.put(several, timeout=0, **how))
        except rdb.BufferFullError:
            ids = []
        rows = {}
        for one, group_id in zip(several, ids or range(10**6, 10**6 + len(several)), strict=True):
            row = Row(group_id, one.task_name, "", one.min_policy_version, one.max_policy_version)
            row.priority = one.priority
            self.model.set_status(row, one.status.value)
            rows[one.group_uid] = row
        try:
            self.model.put(rows)
        except FullError:
            assert ids == []
        else:
            assert len(ids) == len(several)
        return ids

    @rule(number=NUMBER, age=AGES, priority=PRIORITIES, how=st.sampled_from(["replace", "renew"]),
          status=st.sampled_from(["completed", "completed", "aborted"]))  # fmt: skip
    def put_again(
        self, number: int, age: int | None, priority: float, how: str, status: str
    ) -> None:
        uid = self.pick(number, "completed", "leased", "pending", "archived", "aborted", "expired")
        if uid is None:
            return
        old = self.model.rows[uid]
        again = group(uid, "a", version=self.version(age), priority=priority, status=status)
        with pytest.raises(rdb.DuplicateGroupError):
            self.run(self.buffer.put(again))
        assert self.run(self.buffer.put(again, on_duplicate="ignore")) == [old.id]
        if how == "replace" and old.status == "archived" and old.has_payload:  # not evicted
            with pytest.raises(rdb.ConsumedGroupError):
                self.run(self.buffer.put(again, on_duplicate="replace"))
        elif ids := self._put([again], on_duplicate=how):
            self.model.release(uid)
            is_renewed = how == "renew" or old.status == "archived"
            assert (ids == [old.id]) == (not is_renewed)
            if not is_renewed and status == "aborted":
                self.model.rows[uid].attempts = old.attempts

    @rule(
        count=st.integers(0, 3),
        spare=st.integers(0, 3),
        task=st.none() | TASKS,
        newest=st.booleans(),
    )
    def sample(self, count: int, spare: int, task: str | None, newest: bool) -> None:
        uids = self.model.of("completed", task=task)
        policy = rdb.Lifo() if newest else rdb.Fifo()
        least = max(0, count - spare)
        call = self.buffer.sample(count, policy, tasks=task, at_least=least)
        if len(uids) < least:
            with pytest.raises(rdb.NotEnoughGroupsError):
                self.run(call)
            return
        expected = (uids[::-1] if newest else uids)[:count]
        assert [one.group_uid for one in self.run(call).groups] == expected
        self.model.sample(expected)

    @rule(count=st.integers(1, 3), least=st.integers(0, 1), status=st.sampled_from(
        ["completed", "completed", "aborted", "expired", "failed"]))  # fmt: skip
    def lease(self, count: int, least: int, status: str) -> None:
        self._lease(count, least, status)

    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        free = [uid for uid in self.model.of("pending") if self.model.rows[uid].claim is None]
        call = self.buffer.claim(count, ttl=TTL, whole_groups=True, timeout=0)
        claims = self.run(call)
        assert [claim.group.group_uid for claim in claims] == free[:count]
        for claim in claims:
            self.model.rows[claim.group.group_uid].claim = claim.uid
            self.claims.append(claim)

    @rule(number=NUMBER)
    def release(self, number: int) -> None:
        if not self.claims:
            return
        claim = self.claims[number % len(self.claims)]
        row = self.model.rows.get(claim.group.group_uid)
        if row is not None and row.status == "pending" and row.claim == claim.uid:
            self.run(claim.release())
            row.claim = None
        else:
            with pytest.raises(rdb.ClaimExpiredError):
                self.run(claim.release())

    def _lease(self, count: int, least: int, status: str) -> None:
        uids = self.model.of(status)
        call = self.buffer.lease(count, ttl=TTL, statuses=status, at_least=least)
        if len(uids) < least:
            with pytest.raises(rdb.NotEnoughGroupsError):
                self.run(call)
            return
        taken = self.run(call)
        assert [one.group_uid for one in taken.batch.groups] == uids[:count]
        if uids:
            self.model.lease(taken.id, uids[:count])
            self.leases.append(taken)

    @rule(number=NUMBER, revoked=st.booleans())
    def by_its_id(self, number: int, revoked: bool) -> None:
        """Another process resumes or revokes a lease."""
        if not self.leases:
            return
        lease = self.leases[number % len(self.leases)]
        leased = self.model.leases.get(lease.id)
        uids = sorted(leased or (), key=lambda uid: self.model.rows[uid].id)
        ids = [self.model.rows[uid].id for uid in uids]
        if revoked:
            assert self.run(self.buffer.revoke(lease.id)) == ids
            for uid in uids:
                self.model.undo(uid)
            self.model.leases.pop(lease.id, None)
        elif leased is None:
            with pytest.raises(rdb.LeaseExpiredError):
                self.run(self.buffer.open_lease(lease.id, ttl=TTL))
        else:
            again = self.run(self.buffer.open_lease(lease.id, ttl=TTL))
            assert sorted(again.batch.ids) == ids
            self.leases.append(again)

    @rule(number=NUMBER, part=st.booleans(), success=st.booleans())
    def settle(self, number: int, part: bool, success: bool) -> None:
        if self.leases:
            self._settle(self.leases[number % len(self.leases)], part, success)

    @rule(count=st.integers(1, 3), by=st.integers(0, 2), success=st.booleans())
    def step(self, count: int, by: int, success: bool) -> None:
        """Repeat what a trainer does."""
        known = len(self.leases)
        self._lease(count, 1, "completed")
        self._advance(by)
        for lease in self.leases[known:]:
            self._settle(lease, False, success)

    def _settle(self, lease: Lease, part: bool, success: bool) -> None:
        leased = self.model.leases.get(lease.id)
        if leased is None:  # it has expired, or all its groups were acked or released
            with pytest.raises(rdb.LeaseExpiredError):
                self.run(lease.ack())
            return
        uids = sorted(leased, key=lambda uid: self.model.rows[uid].id)[: 1 if part else None]
        ids = [self.model.rows[uid].id for uid in uids] if part else None
        self.run((lease.ack if success else lease.nack)(ids))
        for uid in uids:
            (self.model.ack if success else self.model.undo)(uid)
        if not self.model.leases[lease.id]:
            del self.model.leases[lease.id]

    @rule()
    def extend(self) -> None:
        for lease in self.leases:
            if lease.id in self.model.leases:
                self.run(lease.extend())
            else:
                with pytest.raises(rdb.LeaseExpiredError):
                    self.run(lease.extend())

    @rule()
    def time_passes(self) -> None:
        """The next call on both tasks runs the maintenance that is due."""
        self.clock.jump(TTL + 1)
        self.model.time_passes()
        assert self._put([group(self.uid(), task) for task in ("a", "b")])
        self.model.leases.clear()

    @rule(task=TASKS, expected=st.integers(1, 3), least=st.integers(1, 3), closes=st.booleans())
    def open_group(self, task: str, expected: int, least: int, closes: bool) -> None:
        uid, least = self.uid(), min(expected, least)
        if len(self.model.of("pending")) >= 2:
            return  # groups that cannot be evicted must leave capacity for `time_passes`
        call = self.buffer.open_group(
            task, uid, expected, min_episodes=least, deadline=TTL if closes else None, timeout=0
        )
        try:
            self.model.evict(1)
        except FullError:
            with pytest.raises(rdb.BufferFullError):
                self.run(call)
            return
        self.model.rows[uid] = Row(
            self.run(call), task, "pending", expected=expected, least=least, closes=closes
        )

    @rule(number=NUMBER, age=AGES)
    def add_episode(self, number: int, age: int | None) -> None:
        uid = self.pick(number, "pending", "completed", "failed", "archived")
        if uid is None:
            return
        row, version = self.model.rows[uid], self.version(age)
        call = self.buffer.add_episode(uid, episode(float(number), version))
        if row.status != "pending" or row.claim is not None:
            with pytest.raises(rdb.GroupClosedError):
                self.run(call)
            return
        status = self.run(call)
        known = [version] if not row.rewards else [version, row.version, row.newest]
        versions = [one for one in known if one is not None]
        whole = len(versions) == len(known)
        row.version, row.newest = (min(versions), max(versions)) if whole else (None, None)
        row.rewards.append(float(number))
        if len(row.rewards) == row.expected:
            self.model.complete(uid)
        assert status == row.status

    @rule(by=st.integers(0, 2))
    def advance(self, by: int) -> None:
        self._advance(by)

    def _advance(self, by: int) -> None:
        version = self.model.version + by
        assert self.run(self.buffer.advance_policy(version)) == self.model.advance(version)

    @rule(number=NUMBER)
    def delete(self, number: int) -> None:
        uid = self.pick(number, "completed", "leased", "pending", "archived", "failed")
        if uid is not None:
            row = self.model.rows.pop(uid)
            assert self.run(self.buffer.delete([row.id])) == 1
            self.model.release(uid)

    @rule(
        numbers=st.lists(NUMBER, min_size=1, max_size=3),
        by_uid=st.booleans(),
        status=PUTTABLE,
    )
    def update(self, numbers: list[int], by_uid: bool, status: str) -> None:
        everything = self.model.of(*rdb.GroupStatus)
        if not everything:
            return
        uids = sorted({everything[number % len(everything)] for number in numbers})
        which: dict[str, Any] = {"uids": uids}
        if not by_uid:
            which = {"ids": [self.model.rows[uid].id for uid in uids]}
        call = self.buffer.update(**which, status=status, reason="by hand")
        refused = self.model.update(uids, status)
        if refused is None:
            assert self.run(call) == len(uids)
        else:
            with pytest.raises(refused):
                self.run(call)

    @rule(number=NUMBER, priority=st.sampled_from([0.0, 0.5, 3.0]))
    def update_priorities(self, number: int, priority: float) -> None:
        uid = self.pick(number, "completed", "leased", "archived")
        if uid is not None:
            ids = [self.model.rows[uid].id]
            assert self.run(self.buffer.update_priorities(ids, [priority])) == 1
            self.model.rows[uid].priority = priority

    async def tables(self) -> list[dict[str, Any]]:
        async with self.below.begin() as connection:
            return await check_tables(connection, idle_leases=True)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        stored = self.run(self.tables())
        mine = [row for row in stored if row["buffer_id"] == self.buffer.id]
        assert {
            row["group_uid"]: (
                row["id"],
                row["group_status"],
                row["times_sampled"],
                row["attempts"],
            )
            for row in mine
        } == {
            uid: (row.id, row.status, row.times, row.attempts)
            for uid, row in self.model.rows.items()
        }
        assert len(mine) == len({row["id"] for row in mine})
        counts = Counter(row.status for row in self.model.rows.values())
        totals = self.run(self.buffer.stats()).totals
        for status in counts:
            mine_now = sum(one.num_groups for one in totals if one.status == status)
            assert mine_now == counts[status]


def test_any_history(url: str, clock: Clock) -> None:
    class Here(Machine):
        pass

    Here.url, Here.clock = url, clock
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=examples(24 if url.startswith("sqlite") else 12),
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate],  # shrinking a history takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
