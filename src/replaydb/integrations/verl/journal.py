"""Journal of the generated groups of a run, in a buffer with its name."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import transfer_queue as tq
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.decoding import decoded_sample, put_failed
from replaydb.integrations.verl.trajectories import TASK, Fields, rows, tag_of, to_fields, to_group

logger = logging.getLogger(__name__)

#: The partition of TransferQueue with training data.
TRAIN = "train"
#: The key of verl's configuration with the settings of a sampler.
WHERE = "trainer.v1.sampler.sampler_kwargs"
#: Leases end with a checkpoint or a restart, never by time.
FOREVER = 1e9

_WAITING = rdb.GroupStatus.COMPLETED
_TAKEN = sorted(set(rdb.GroupStatus) - {_WAITING})
#: Statuses that a later step set, and that the return to a checkpoint undoes.
_UNDONE = sorted({*_TAKEN} - {rdb.GroupStatus.LEASED, rdb.GroupStatus.PENDING})


class Journal:
    """Groups of the train partition and their outcome, so that another process can continue.

    A group is `completed` while it waits, `leased` from the step that takes it until a checkpoint
    includes this step, then `archived`.
    """

    def __init__(self, url: str, run: str) -> None:
        self._run = run
        self._store = blocking.Store.open(url, run=run)
        self._buffer = self._store.buffer(run)
        self._kept: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, sampler_kwargs: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Open the journal that a sampler's settings name. Return it and the other settings.

        Raises:
            InvalidInputError: `url` or `run` is missing.
        """
        others = dict(sampler_kwargs)
        url, run = (_text(name, others.pop(name, None)) for name in ("url", "run"))
        return cls(url, run), others

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def keep(self) -> None:
        """Store finished groups of the queue that are not stored yet.

        A group that cannot be stored is recorded as `failed`, and fails in the queue too: verl
        replaces it like a group whose generation failed.
        """
        with self._lock:
            queue = tq.kv_list(TRAIN).get(TRAIN, {})
            finished = _finished(queue)
            new = finished.keys() - self._kept
            for uid in new:
                try:
                    if (group := _read(uid, queue)) is not None:
                        self._buffer.put(group, on_duplicate="ignore")
                except rdb.InvalidInputError as error:
                    self._refuse(uid, queue, error)
            self._kept = set(finished)

    def taken(self, uids: Collection[str]) -> set[str]:
        """Return the uids of groups that were already taken or evicted, by any sampler."""
        return {one.group_uid for one in self._buffer.find(uids=uids, statuses=_TAKEN)}

    def take(self, uids: Collection[str], step: int) -> None:
        """Lease groups for a step, all of them or none.

        Raises:
            NotEnoughGroupsError: Another sampler has taken one of them.
        """
        found = self._buffer.find(uids=uids)
        if known := [one.id for one in found if one.status is not rdb.GroupStatus.FAILED]:
            where = rdb.col.id.in_(known)
            self._buffer.lease(
                len(known), ttl=FOREVER, owner=self._run, where=where, step=step, fields=()
            )

    def drop(self, uids: Collection[str], status: str) -> None:
        """Exclude waiting groups from training, by setting their status.

        Raises:
            GroupLeasedError: Another sampler took one of them at the same time.
        """
        waiting = [one.id for one in self._buffer.find(uids=uids, statuses=_WAITING)]
        self._buffer.update(waiting, statuses=[_WAITING, rdb.GroupStatus.LEASED], status=status)

    def advance(self, step: int) -> None:
        """Record the step up to which the policy has been trained."""
        self._buffer.advance_policy(step, rewind=True)

    def settle(self, step: int) -> None:
        """Acknowledge the groups of steps up to this one, which a checkpoint includes."""
        for lease in self._leases():
            if lease.step is not None and lease.step <= step:
                self._buffer.ack(lease.id)

    def rewind(self, step: int) -> tuple[set[str], dict[str | None, list[str]]]:
        """Undo all steps after `step`, the last step of the checkpoint that the trainer resumed.

        Afterwards the queue has all answered groups that were requested up to this step.

        Returns:
            Uids of the groups that were put back into the queue; and, by prompt, uids of the groups
            that were requested later. The dataset will reach their prompts again.
        """
        self.settle(step)
        for lease in self._leases():
            self._buffer.revoke(lease.id, reason=f"resumed from step {step}")
        self.advance(step)
        queue = tq.kv_list(TRAIN).get(TRAIN, {})
        queued = _finished(queue)
        # Groups that later steps trained on can have lost their payload.
        trained = self._buffer.find(uids=queued.keys(), statuses=rdb.GroupStatus.ARCHIVED)
        reread = [_read(one.group_uid, queue) for one in trained]
        self._buffer.put([group for group in reread if group is not None], on_duplicate="renew")
        found = self._buffer.find(uids=queued.keys())
        stored = [one.id for one in found if one.num_episodes]  # others could not be stored
        self._buffer.update(stored, statuses=_UNDONE, status=_WAITING)
        ahead, behind = defaultdict(list), set()
        for one in self._buffer.find(statuses=_WAITING):
            requested = one.tags["global_steps"]
            if requested is None or requested > step:
                ahead[one.prompt_uid].append(one.group_uid)
            elif one.group_uid not in queued:
                behind.add(one.group_uid)
        # Unknown until the dataset reaches their prompts.
        later = [uid for uids in ahead.values() for uid in uids]
        self._buffer.update(uids=later, statuses=_WAITING, tags={"global_steps": None})
        self._put_back(self._buffer.get(uids=behind))
        logger.info("%d groups put back, %d stored for later requests", len(behind), len(later))
        return behind, ahead

    def restore(self, uids: Collection[str], step: int) -> None:
        """Put groups into the queue whose prompts are requested again, in this step."""
        self._buffer.update(uids=uids, statuses=_WAITING, tags={"global_steps": step})
        self._put_back(self._buffer.get(uids=uids))

    def _leases(self) -> list[rdb.LeaseInfo]:
        return [one for one in self._buffer.leases() if one.owner == self._run]

    def _refuse(
        self, uid: str, queue: Mapping[str, Mapping[str, Any]], error: rdb.InvalidInputError
    ) -> None:
        put_failed(
            self._buffer, error, TASK, group_uid=uid, prompt_uid=queue[uid].get("prompt_uid")
        )
        tq.kv_clear([key for key in queue if key.startswith(f"{uid}_")], TRAIN)
        tq.kv_put(uid, TRAIN, tag={"status": "failure"})

    def _put_back(self, groups: Iterable[rdb.StoredGroup]) -> None:
        for group in groups:
            [fields] = decoded_sample(self._buffer, [group], _fields)
            for episode, row in zip(group.episodes, fields, strict=True):
                original = episode.metadata["verl"]
                tq.kv_batch_put([original["key"]], TRAIN, fields=row, tags=[tag_of(episode)])
            tq.kv_batch_put([group.group_uid], TRAIN, tags=[group.tags])


def _fields(group: rdb.StoredGroup) -> list[TensorDict]:
    return [list_of_dict_to_tensordict([to_fields(group, episode)]) for episode in group.episodes]


def _finished(queue: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the tags of prompts whose trajectories are complete, by key."""
    return {
        key: tag
        for key, tag in queue.items()
        if tag.get("is_prompt") and tag["status"] == "finished"
    }


def _read(uid: str, queue: Mapping[str, Mapping[str, Any]]) -> rdb.EpisodeGroup | None:
    """Read a group from the queue. None if it has no trajectory, or is being taken right now."""
    sessions = defaultdict(list)
    for key in queue:
        if key.startswith(f"{uid}_"):
            sessions[key.split("_")[1]].append(key)
    trajectories: dict[str, tuple[Fields, Mapping[str, Any]]] = {}
    try:
        # A request for several trajectories returns only the fields that all of them have.
        alike: dict[frozenset[str], list[str]] = defaultdict(list)
        for keys in sessions.values():
            alike[frozenset(tq.get_client().kv_retrieve_meta(keys, TRAIN).field_names)] += keys
        for keys in alike.values():
            table = rows(tq.kv_batch_get(keys, TRAIN))
            trajectories |= {key: (row, queue[key]) for key, row in zip(keys, table, strict=True)}
    except (ValueError, tq.StorageKeyNotFoundError):
        if uid in _finished(tq.kv_list(TRAIN).get(TRAIN, {})):
            raise
        return None
    if not trajectories:
        return None
    in_order = {key: trajectories[key] for key in sorted(trajectories, key=_order)}
    return to_group(uid, in_order, queue[uid])


def _order(key: str) -> list[int]:
    """Return session and index of a trajectory."""
    return [int(part) for part in key.split("_")[1:]]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise rdb.InvalidInputError(f"{WHERE}.{name}", "text", repr(value))
    return value
