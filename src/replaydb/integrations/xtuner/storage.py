"""XTuner's storage and replay policies, on a replaydb buffer."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from xtuner.v1.data_proto.rl_data import RolloutState, Status, reset_rollout_response
from xtuner.v1.rl.replay_buffer import ReplayPolicy, StorageBackend, StorageItem

import replaydb as rdb
from replaydb import blocking
from replaydb.domain.policies import SimplePolicy
from replaydb.integrations.decoding import decoded, decoded_sample
from replaydb.integrations.xtuner.query import LIVE, STANDS_FOR, STATUS_TAG, Selection, selection
from replaydb.integrations.xtuner.states import fingerprint, to_episode, to_state

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
#: The file of a checkpoint that names the leases of the groups that it includes.
MARK = "replaydb.json"
#: When taken groups are used up: at once; when the trainer has saved a checkpoint; never.
Consume = Literal["taken", "saved", "never"]
#: Duration in seconds of a lease that ends with the call, and of a lease that ends with a
#: checkpoint.
TAKE_SECONDS, SAVE_SECONDS = 60.0, 1e9


def _in_thread(
    method: Callable[Concatenate[SqlStorage, P], T],
) -> Callable[Concatenate[SqlStorage, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a method in a thread."""

    @functools.wraps(method)
    async def call(self: SqlStorage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.is_used = True
        return await asyncio.to_thread(method, self, *args, **kwargs)

    return call


class SqlStorage(StorageBackend):
    """A storage backend of XTuner in a database. Its calls run in threads.

    `uid` and `timestamp_id` of an item are the id of its group; later ids are higher. The policy
    version of the buffer is XTuner's train step minus one, so staleness is the same number.

    Attributes:
        buffer: The buffer of replaydb.
        is_used: Whether this object has stored, read or counted an item.

    Raises:
        InvalidInputError: The buffer follows the policy of another lineage, so groups put by this
            run would have no staleness.
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
        self._has_begun = consume != "saved"
        # Leases that the last save included, and later ones with the ids of their groups.
        self._saved: list[int] = []
        self._taken: dict[int, list[int]] = {}
        self._saved_to: Path | None = None
        self._last = 0  # the newest lease that a save included
        self._tag = f"xtuner_checkpoint/{owner}"  # of a group: `_last` of its first checkpoint
        self.is_used = False

    def close(self) -> None:
        """Close the database connection. Stored groups and leases are kept."""
        self._store.close()

    @_in_thread
    def put(self, item: StorageItem) -> int:
        """Store an item, and return its uid. It is durable when this returns."""
        [uid] = self.buffer.put(self._group(item))
        return uid

    @_in_thread
    def get(self, query: Any) -> list[StorageItem]:
        """Return the items that match a query, oldest first."""
        return self._get(selection(query))

    @_in_thread
    def get_aged(self, query: Any, staleness: float) -> list[StorageItem]:
        """Return the items that match a query and have a token of at least this staleness.

        The column `staleness` of expired groups does not follow the policy version any more, so
        their staleness is computed from the version of their oldest token.
        """
        which = selection(query)
        newest = self.buffer.policy_version - staleness
        is_aged = (rdb.col.staleness >= staleness) | (
            (rdb.col.group_status == "expired") & (rdb.col.comparable_version <= newest)
        )
        where = is_aged if which.where is None else which.where & is_aged
        return self._get(which._replace(where=where))

    @_in_thread
    def count(self, query: Any) -> int:
        """Return the number of items that match a query."""
        return self.buffer.count(**selection(query)._asdict())

    @_in_thread
    def delete(self, uids: list[int]) -> None:
        """Delete items. Uids that do not exist, or that a process has taken, are ignored."""
        self.buffer.delete(uids, statuses=LIVE)

    @_in_thread
    def update(self, items: list[StorageItem]) -> None:
        """Replace the content of items in one transaction; they keep their uids.

        Items that another process has taken are skipped. The others cannot be found until this
        returns.
        """
        if not items:
            return
        by_id = {item.uid: item for item in items}
        which: dict[str, Any] = {"statuses": LIVE, "where": rdb.col.id.in_(list(by_id))}
        new = {
            one.id: self._group(by_id[one.id], one.group_uid) for one in self.buffer.find(**which)
        }
        # Leased, because a group taken between the two calls would be restored otherwise.
        with self.buffer.lease(len(new), ttl=TAKE_SECONDS, at_least=0, **which) as lease:
            leased = [new[one.id] for one in lease.batch if one.id in new]
            self.buffer.put(leased, on_duplicate="replace")

    @_in_thread
    def discard(self, uids: list[int]) -> list[int]:
        """Delete items that no process has taken, and return the uids of the others."""
        if not uids or self.buffer.delete(uids, statuses=LIVE) == len(uids):
            return []
        return [one.id for one in self.buffer.find(uids)]

    @_in_thread
    def take(
        self, count: int | Mapping[str, int], query: Any, policy: SimplePolicy
    ) -> list[StorageItem]:
        """Take the first items that match a query, in one transaction.

        Args:
            count: Maximum number of items, in total or by task.
            query: The query.
            policy: The order of the items.
        """
        which = selection(query)
        if not which.statuses:  # such as a query for two statuses at once
            return []
        options: dict[str, Any] = {"tasks": which.tasks, "where": which.where, "at_least": 0}
        if self._consume == "never" and which.statuses == ["completed"]:
            batch = self.buffer.sample(count, policy, **options)
            return decoded_sample(self.buffer, batch, self._item)
        until_saved = self._consume == "saved"
        lease = self.buffer.lease(
            count,
            policy,
            ttl=SAVE_SECONDS if until_saved else TAKE_SECONDS,
            owner=self._owner,
            statuses=which.statuses,
            step=self.buffer.policy_version + 1,
            **options,
        )
        items = decoded(lease, self._item)
        if not until_saved:
            lease.ack()
        elif lease.batch:
            # A group of another status is generated again, and the result is a new group.
            completed = [one.id for one in lease.batch if one.leased_from == "completed"]
            self._taken[lease.id] = completed
        return items

    @_in_thread
    def move_to(self, train_step: int) -> None:
        """Set the train step that staleness refers to; it can be an earlier one."""
        self._move_to(train_step)

    async def begin(self, train_step: int) -> None:
        """Settle leases of earlier processes of this owner, once the trainer reports its step.

        If the trainer resumes from a checkpoint that includes the buffer, `resume` does this. If
        not, groups taken for earlier steps are part of the trainer's state and are acknowledged;
        groups taken for this step and later ones are released.
        """
        if not self._has_begun:
            self._has_begun = True
            await self._begin(train_step)

    @_in_thread
    def _begin(self, train_step: int) -> None:
        def is_earlier(lease: rdb.LeaseInfo) -> bool:
            return lease.step is not None and lease.step < train_step

        self._settle(is_earlier, f"began at train step {train_step}")
        self._move_to(train_step)

    @_in_thread
    def save(self, path: Path) -> None:
        """Mark the groups that this object took as included in a checkpoint.

        The mark is a file of the checkpoint, so it is deleted and moved with it. The trainer
        writes the rest of the checkpoint afterwards, so the groups stay leased until it saves the
        next one.
        """
        if self._consume != "saved":
            return
        place = path.resolve()
        if place != self._saved_to:  # the last checkpoint is complete
            while self._saved:
                self.buffer.ack(self._saved.pop())
        if self._taken:
            self._last = max(self._taken)
            ids = [one for several in self._taken.values() for one in several]
            self.buffer.update(ids, statuses="leased", tags={self._tag: self._last})
            self._saved += self._taken
            self._taken.clear()
        place.mkdir(parents=True, exist_ok=True)
        mark = {"leases": self._saved, "last": self._last}
        (place / MARK).write_text(json.dumps(mark))
        self._saved_to = place

    @_in_thread
    def resume(self, path: Path) -> None:
        """Return to a checkpoint: groups taken since can be taken again, all others are settled.

        If the checkpoint has no mark, the next train step decides: see `begin`.

        Raises:
            InvalidInputError: The mark cannot be read.
        """
        if self._consume != "saved":
            return
        self._saved, self._taken = [], {}
        file = path.resolve() / MARK
        try:
            mark = json.loads(file.read_text())
            included, self._last = set(mark["leases"]), int(mark["last"])
        except FileNotFoundError:
            self._has_begun = False
            return
        except (ValueError, TypeError, KeyError) as error:
            expected = "a checkpoint of this buffer"
            raise rdb.InvalidInputError("path", expected, str(file)) from error
        self._settle(lambda lease: lease.id in included, f"resumed from {path}")
        later = rdb.col.tags[self._tag] > self._last
        undone = self.buffer.find(statuses="archived", where=later)
        there = [one.id for one in undone if one.num_bytes]
        self.buffer.update(there, statuses="archived", status="completed")
        if lost := len(undone) - len(there):
            logger.warning("%d groups taken since %s have lost their payload", lost, path)
        self._has_begun, self._saved_to = True, file.parent

    def __len__(self) -> int:
        """Return the number of items that were not taken."""
        return self.buffer.count(statuses=LIVE)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the buffer; the items themselves are durable."""
        return {"buffer": self.buffer.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Import the items of XTuner's `NaiveStorage`. A state of `state_dict` is ignored.

        The items keep their order. Items that were already imported, which have the same uid and
        content, are skipped.

        Raises:
            InvalidInputError: It is the state of another storage.
        """
        self.is_used = True
        if state == self.state_dict():
            return
        if "items" not in state:
            raise rdb.InvalidInputError(
                "state", "the state of a NaiveStorage", f"keys {sorted(state)}"
            )
        items = sorted(state["items"], key=lambda item: item.timestamp_id)
        groups = [
            self._group(item, f"imported/{item.uid}/{fingerprint(item.item)}") for item in items
        ]
        self.buffer.put(groups, on_duplicate="ignore")

    def _get(self, which: Selection) -> list[StorageItem]:
        ids = [one.id for one in self.buffer.find(**which._asdict())]
        try:
            groups = self.buffer.get(ids)
        except (rdb.UnknownGroupError, rdb.PayloadGoneError) as error:  # deleted or taken meanwhile
            groups = list(error.batch or [])
        except rdb.CorruptPayloadError as error:
            # A draw raises the same error and marks the groups failed, so the next call works.
            damaged = rdb.col.id.in_(error.group_ids)
            self.buffer.lease(
                len(error.group_ids), ttl=TAKE_SECONDS, statuses=LIVE, where=damaged, at_least=0
            )
            raise
        there = [group for group in groups if group.status in LIVE]
        return decoded_sample(self.buffer, there, self._item)

    def _move_to(self, train_step: int) -> None:
        self.buffer.advance_policy(max(train_step - 1, 0), rewind=True)

    def _settle(self, is_used: Callable[[rdb.LeaseInfo], bool], reason: str) -> None:
        """End the leases of earlier processes of this owner, also of processes that died.

        Groups that were used are acknowledged, and the others are released.
        """
        for lease in self.buffer.leases():
            if lease.owner != self._owner or lease.id in (*self._saved, *self._taken):
                continue
            if is_used(lease):
                self.buffer.ack(lease.id)
            else:
                self.buffer.revoke(lease.id, reason=reason)

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
        except rdb.InvalidInputError as error:
            if error.field != "version":  # else another process was faster
                raise

    def _item(self, group: rdb.StoredGroup) -> StorageItem:
        """Return the item of a group, with its status and staleness at the time of the read."""
        status = (group.leased_from or group.status).value
        oldest, staleness = group.min_policy_version or 0, group.staleness
        if status == "expired" and staleness is not None:  # the stored value is not updated
            staleness = max(self.buffer.policy_version - oldest, 0)
        tag = str(group.tags.get(STATUS_TAG))
        states = [to_state(episode) for episode in group.episodes]
        for state, episode in zip(states, group.episodes, strict=True):
            if staleness is not None and not _is_cleared(state):  # cleared states do not age
                newer = (episode.min_policy_version or 0) - oldest
                state.seq_staleness = staleness - newer
        if status == "expired" and all(one.status is not Status.EXPIRED for one in states):
            for state in states:  # expired as a group by `max_staleness` of the buffer
                state.status = Status.EXPIRED
                reset_rollout_response(state)
        return StorageItem(
            item=states,
            uid=group.id,
            timestamp_id=group.id,
            task_name=group.task_name,
            status=Status(tag if STANDS_FOR.get(tag) == status else status),
            staleness=max((state.seq_staleness for state in states), default=0)
            if status == "expired"
            else staleness or 0,
        )


def _is_cleared(state: RolloutState) -> bool:
    """Whether a state expired, so that its response will be generated again."""
    return state.status is Status.EXPIRED and not state.response_ids


def _status(item: StorageItem) -> str:
    """Return the status of an item. It is not completed if a state is INIT or ARCHIVED."""
    members = {state.status.value for state in item.item}
    if item.status is Status.COMPLETED:
        for status in STANDS_FOR:
            if status in members:
                return status
    return str(item.status.value)


class SqlReplayPolicy(ReplayPolicy):
    """A replay policy of XTuner whose order and limit are applied by the database.

    Attributes:
        order: `Fifo()`, or `StalestFirst()`, which takes the oldest of equally stale items first.
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
        """Take the first `count` items that match a query."""
        if count <= 0:
            return []
        return [item.item for item in await storage_backend.take(count, query, self.order)]
