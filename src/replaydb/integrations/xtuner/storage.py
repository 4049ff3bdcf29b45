"""XTuner's storage and replay policies, on a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from xtuner.v1.data_proto.rl_data import RolloutState, Status, reset_rollout_response
from xtuner.v1.rl.replay_buffer import ReplayPolicy, StorageBackend, StorageItem

import replaydb as rdb
from replaydb import blocking
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    UnknownGroupError,
)
from replaydb.integrations.decoding import decoded, decoded_sample
from replaydb.integrations.xtuner.query import LIVE, STANDS_FOR, STATUS_TAG, Selection, selection
from replaydb.integrations.xtuner.states import fingerprint, to_episode, to_state
from replaydb.policies import SimplePolicy

T = TypeVar("T")
#: When what is taken is used up: at once; when the trainer has saved a checkpoint; never.
Consume = Literal["taken", "saved", "never"]
#: Seconds of a lease that ends with the call; and of one that ends with a checkpoint, whenever
#: there is one.
TAKE_SECONDS, SAVE_SECONDS = 60.0, 1e9


class SqlStorage(StorageBackend):
    """A storage of XTuner's in a database; its calls work in threads.

    A uid is the id of a group, and so is a timestamp_id: later ones are higher. The policy version
    of the buffer is XTuner's train step less one, so that staleness is the same number here.

    Attributes:
        buffer: The buffer of replaydb.
        is_used: Whether an item was stored, read or counted by this object.

    Raises:
        InvalidInputError: The buffer follows the policy of another lineage: the staleness of what
            this run puts would be unknown.
    """

    def __init__(
        self,
        url: str,
        name: str = "xtuner",
        *,
        run: str | None = None,
        lineage: str | None = None,
        consume: Consume = "taken",
        owner: str = "xtuner",
    ) -> None:
        self._store = blocking.Store.open(url, run=run, lineage=lineage)
        try:
            self.buffer = self._store.buffer(name)
            self._advance(self.buffer.policy_version)
        except BaseException:
            self._store.close()
            raise
        self._consume = consume
        self._owner = owner
        self._held: list[blocking.Lease] = []
        self._has_begun = consume != "saved"
        self.is_used = False

    def close(self) -> None:
        """Let go of the database. What is stored stays; what is held is held on."""
        self._store.close()

    async def _run(self, work: Callable[..., T], /, *args: Any, **named: Any) -> T:
        """Call what blocks, in a thread."""
        self.is_used = True
        return await asyncio.to_thread(work, *args, **named)

    async def put(self, item: StorageItem) -> int:
        """Store an item. It survives the death of any process from then on."""
        return await self._run(self._put, item)

    async def get(self, query: Any) -> list[StorageItem]:
        """The items that a query finds, the oldest first."""

        def work() -> list[StorageItem]:
            ids = [one.id for one in self._find(selection(query))]
            try:
                groups = self.buffer.get(ids)
            except (UnknownGroupError, PayloadGoneError) as error:  # deleted or taken meanwhile
                groups = list(error.batch or [])
            except CorruptPayloadError as error:
                # A draw raises the same, and marks the groups as failed: the next call passes on.
                damaged = rdb.col.id.in_(error.group_ids)
                which: dict[str, Any] = {"statuses": LIVE, "where": damaged, "at_least": 0}
                self.buffer.lease(len(error.group_ids), ttl=TAKE_SECONDS, **which)
                raise
            there = [group for group in groups if group.status in LIVE]
            return decoded_sample(self.buffer, there, self._item)

        return await self._run(work)

    async def count(self, query: Any) -> int:
        """How many items a query finds."""
        return await self._run(lambda: self.buffer.count(**selection(query)._asdict()))

    async def delete(self, uids: list[int]) -> None:
        """Delete items; those that are gone are passed over."""
        await self._run(self.buffer.delete, uids)

    async def update(self, items: list[StorageItem]) -> None:
        """Put new content in the place of items, all of them at once; they keep their uids.

        What somebody else has taken is passed over. Until it returns, nobody finds the items.
        """

        def work() -> None:
            by_id = {item.uid: item for item in items}
            which: dict[str, Any] = {"statuses": LIVE, "where": rdb.col.id.in_(list(by_id))}
            new = {
                one.id: self._group(by_id[one.id], one.group_uid)
                for one in self.buffer.find(**which)
            }
            # Held, or what is taken between the two calls would be there again.
            with self.buffer.lease(len(new), ttl=TAKE_SECONDS, at_least=0, **which) as lease:
                held = [new[one.id] for one in lease.batch if one.id in new]
                self.buffer.put(held, on_duplicate="replace")

        if items:
            await self._run(work)

    async def discard(self, uids: list[int]) -> list[int]:
        """Delete items, apart from those that somebody has taken, whose uids are returned."""

        def work() -> list[int]:
            mine = rdb.col.id.in_(uids)
            if self.buffer.delete(uids, statuses=LIVE) == len(uids):
                return []
            return [one.id for one in self.buffer.find(where=mine)]

        return await self._run(work) if uids else []

    async def take(
        self, count: int | Mapping[str, int], query: Any, policy: SimplePolicy
    ) -> list[StorageItem]:
        """Take the first items that a query finds, in one transaction.

        Args:
            count: How many at most; or how many of each task.
            query: What to take.
            policy: In what order.
        """
        return await self._run(self._take, count, selection(query), policy)

    async def move_to(self, train_step: int) -> None:
        """Have staleness be that of a train step, which may be an earlier one."""
        await self._run(self._move_to, train_step)

    async def begin(self, train_step: int) -> None:
        """Settle what an earlier process of this owner held, once the trainer says where it is.

        `let_go` does so if the trainer resumes from a checkpoint that includes the buffer. If not,
        what was taken for earlier steps is part of the trainer's state, and what was taken for this
        step and later ones goes back.
        """

        def work() -> None:
            held = {lease.id for lease in self._held}
            for found in self._leases():
                if found.id in held:
                    continue
                if found.step is not None and found.step < train_step:
                    self.buffer.ack(found.id)
                else:
                    self.buffer.revoke(found.id, reason=f"began at train step {train_step}")
            self._move_to(train_step)

        if not self._has_begun:
            self._has_begun = True
            await self._run(work)

    async def let_go(self, *, used: bool) -> None:
        """End the hold on what was taken: it was used; or not, also by a process that died."""

        def work() -> None:
            while self._held and used:
                self._held.pop().ack()
            self._held.clear()
            if not used:
                for found in self._leases():
                    self.buffer.revoke(found.id, reason="resumed from a checkpoint")

        self._has_begun = self._has_begun or not used
        await self._run(work)

    def __len__(self) -> int:
        return self.buffer.count(statuses=LIVE)

    def state_dict(self) -> dict[str, Any]:
        """Nothing but where the items are: they are durable."""
        return {"buffer": self.buffer.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, for what `state_dict` gave; or put the items of XTuner's `NaiveStorage`.

        They keep their order. Items that an earlier call has put are passed over: those of the
        same uid and content.

        Raises:
            InvalidInputError: It is the state of another storage.
        """
        self.is_used = True
        if state == self.state_dict():
            return
        if "items" not in state:
            raise InvalidInputError("state", "that of a NaiveStorage", f"one with {sorted(state)}")
        items = sorted(state["items"], key=lambda item: item.timestamp_id)
        groups = [
            self._group(item, f"imported/{item.uid}/{fingerprint(item.item)}") for item in items
        ]
        self.buffer.put(groups, on_duplicate="ignore")

    def _put(self, item: StorageItem) -> int:
        [uid] = self.buffer.put(self._group(item))
        return uid

    def _move_to(self, train_step: int) -> None:
        self.buffer.advance_policy(max(train_step - 1, 0), rewind=True)

    def _leases(self) -> list[rdb.LeaseInfo]:
        """What this owner holds, also in a process that died."""
        return [one for one in self.buffer.leases() if one.owner == self._owner]

    def _find(self, which: Selection) -> list[rdb.GroupInfo]:
        return self.buffer.find(**which._asdict())

    def _take(
        self, count: int | Mapping[str, int], which: Selection, policy: SimplePolicy
    ) -> list[StorageItem]:
        if not which.statuses:  # as of a query for two at once
            return []
        asked: dict[str, Any] = {"tasks": which.tasks, "where": which.where, "at_least": 0}
        if self._consume == "never" and which.statuses == ["completed"]:
            batch = self.buffer.sample(count, policy, **asked)
            return decoded_sample(self.buffer, batch, self._item)
        is_held = self._consume == "saved"
        lease = self.buffer.lease(
            count,
            policy,
            ttl=SAVE_SECONDS if is_held else TAKE_SECONDS,
            owner=self._owner,
            statuses=which.statuses,
            step=self.buffer.policy_version + 1,
            **asked,
        )
        items = decoded(lease, self._item)
        if is_held:
            self._held.append(lease)
        else:
            lease.ack()
        return items

    def _group(self, item: StorageItem, group_uid: str | None = None) -> rdb.EpisodeGroup:
        versions = [
            state.seq_staleness + min(state.response_model_steps)
            for state in item.item
            if state.response_model_steps
        ]
        if versions and max(versions) > self.buffer.policy_version:
            self._advance(max(versions))
        now = self.buffer.policy_version
        status = _status(item)
        prompt = getattr(item.item[0], "group_id", None) if item.item else None
        return rdb.EpisodeGroup(
            item.task_name,
            [to_episode(state, now - state.seq_staleness) for state in item.item],
            group_uid=group_uid,
            prompt_uid=None if prompt is None else str(prompt),
            status=STANDS_FOR.get(status, status),
            tags={STATUS_TAG: status} if status in STANDS_FOR else None,
        )

    def _advance(self, version: int) -> None:
        try:
            self.buffer.advance_policy(version)
        except InvalidInputError as error:
            if error.field != "version":  # or somebody was quicker
                raise

    def _item(self, group: rdb.StoredGroup) -> StorageItem:
        """The item of a group, with the status and the staleness that it had when it was read."""
        status = (group.leased_from or group.status).value
        tag = str(group.tags.get(STATUS_TAG))
        states = [to_state(episode) for episode in group.episodes]
        for state, episode in zip(states, group.episodes, strict=True):
            if group.staleness is not None:
                newer = (episode.min_policy_version or 0) - (group.min_policy_version or 0)
                state.seq_staleness = group.staleness - newer
        if status == "expired" and all(one.status is not Status.EXPIRED for one in states):
            for state in states:  # `max_staleness` of the buffer made the whole group expire
                state.status = Status.EXPIRED
                reset_rollout_response(state)
        return StorageItem(
            item=states,
            uid=group.id,
            timestamp_id=group.id,
            task_name=group.task_name,
            status=Status(tag if STANDS_FOR.get(tag) == status else status),
            staleness=group.staleness or 0,
        )


def _status(item: StorageItem) -> str:
    """The status of an item: not completed, if one of its states has yet to begin, or was used."""
    members = {state.status.value for state in item.item}
    if item.status is Status.COMPLETED:
        for status in STANDS_FOR:
            if status in members:
                return status
    return str(item.status.value)


class SqlReplayPolicy(ReplayPolicy):
    """A replay policy of XTuner's whose order and limit are the database's.

    Attributes:
        order: `Fifo()`, or `StalestFirst()`, where the oldest of equals is first.
    """

    def __init__(self, order: SimplePolicy) -> None:
        self.order = order

    async def put(self, item: StorageItem, storage_backend: SqlStorage) -> None:
        """Store an item, unless it is empty."""
        if item.item:
            await storage_backend.put(item)

    async def get(
        self, count: int, query: Any, storage_backend: SqlStorage
    ) -> list[list[RolloutState]]:
        """Take the first `count` items that a query finds."""
        if count <= 0:
            return []
        return [item.item for item in await storage_backend.take(count, query, self.order)]
