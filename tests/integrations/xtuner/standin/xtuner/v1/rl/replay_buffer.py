"""A minimal replay buffer with the contract of XTuner v1's, including its faults."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from xtuner.v1.data_proto.rl_data import (
    RolloutState,
    Status,
    fresh_masks,
    get_group_status,
    refresh_seq_staleness,
    reset_rollout_response,
    update_sample_version,
)
from xtuner.v1.rl.rollout.trace_store import release_and_discard_rollout_groups


@dataclass
class StorageItem:
    item: list[RolloutState]
    uid: int
    timestamp_id: int
    task_name: str
    status: Status
    staleness: int


class StorageBackend(ABC):
    @abstractmethod
    async def put(self, item: StorageItem) -> int: ...

    @abstractmethod
    async def get(self, query: Any) -> list[StorageItem]: ...

    @abstractmethod
    async def count(self, query: Any) -> int: ...

    @abstractmethod
    async def delete(self, uids: list[int]) -> None: ...

    @abstractmethod
    async def update(self, items: list[StorageItem]) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ReplayPolicy(ABC):
    @abstractmethod
    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None: ...

    @abstractmethod
    async def get(
        self, count: int, query: Any, storage_backend: StorageBackend
    ) -> list[list[RolloutState]]: ...

    async def count(self, query: Any, storage_backend: StorageBackend) -> int:
        return await storage_backend.count(query)


class ReplayBuffer:
    def __init__(self, policy: ReplayPolicy, storage_backend: StorageBackend) -> None:
        self._policy = policy
        self._storage = storage_backend
        self._lock = asyncio.Lock()

    def _expire(
        self,
        group: list[RolloutState],
        step: int | None,
        threshold: int | None,
        token_threshold: int | None,
        retryable: bool,
    ) -> Status:
        """Clear the members of a group that are too stale; the others are unchanged."""
        status = get_group_status(group)
        refreshed = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
        if step is None or status not in refreshed:
            return status
        refresh_seq_staleness(group, step)
        masks = fresh_masks(group, step, token_threshold)
        stale = [
            state
            for state, mask in zip(group, masks, strict=True)
            if state.status is Status.EXPIRED
            or (threshold is not None and state.seq_staleness >= threshold)
            or (mask is not None and not any(mask))
        ]
        if not stale:
            return status
        for state in stale if retryable else group:
            state.status = Status.EXPIRED
        if retryable:
            for state in stale:
                reset_rollout_response(state)
        return Status.EXPIRED

    async def put(
        self,
        items: list[RolloutState],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
    ) -> None:
        if not items:
            return
        for item in items:
            if model_step is not None:
                update_sample_version(item, model_step)
        status = self._expire(
            items,
            current_train_step,
            stale_threshold,
            token_stale_threshold,
            expired_groups_retryable,
        )
        if status is Status.EXPIRED and not expired_groups_retryable:
            await self._discard([items])
            return
        staleness = max(item.seq_staleness for item in items)
        stored = StorageItem(items, 0, 0, task_name, status, staleness)
        async with self._lock:
            await self._policy.put(stored, self._storage)

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: dict[str, int],
        task_token_stale_thresholds: dict[str, int] | None = None,
        expired_groups_retryable_by_task: dict[str, bool] | None = None,
        current_train_step: int,
        statuses: list[Status] | None = None,
    ) -> dict[str, int]:
        chosen = statuses or [Status.COMPLETED, Status.ABORTED, Status.EXPIRED]
        expired = dict.fromkeys(task_stale_thresholds, 0)
        updated, gone = [], []
        async with self._lock:
            for task, threshold in task_stale_thresholds.items():
                query = {"$and": [{"task_name": task}, {"status": {"$in": chosen}}]}
                retryable = (expired_groups_retryable_by_task or {}).get(task, True)
                for record in await self._storage.get(query):
                    status = self._expire(
                        record.item,
                        current_train_step,
                        threshold,
                        (task_token_stale_thresholds or {}).get(task),
                        retryable,
                    )
                    staleness = max((one.seq_staleness for one in record.item), default=0)
                    expired[task] += status is Status.EXPIRED
                    if status is Status.EXPIRED and not retryable:
                        gone.append(record)
                    else:
                        updated.append(replace(record, status=status, staleness=staleness))
            await self._storage.delete([record.uid for record in gone])
            await self._storage.update(updated)
        await self._discard([record.item for record in gone])
        return expired

    async def _discard(self, groups: list[list[RolloutState]]) -> None:
        if groups:
            await release_and_discard_rollout_groups(groups)
        for group in groups:
            for item in group:
                item.status = Status.EXPIRED

    async def get(
        self, batch_size: int, task_name: str, group_status: Status
    ) -> list[list[RolloutState]]:
        query = {"$and": [{"task_name": task_name}, {"status": group_status}]}
        async with self._lock:
            return await self._policy.get(batch_size, query, self._storage)

    async def count(self, task_name: str, group_status: Status) -> int:
        query = {"$and": [{"task_name": task_name}, {"status": group_status}]}
        async with self._lock:
            return await self._policy.count(query, self._storage)

    async def is_ready(
        self, task_batch_sizes: dict[str, int], *, group_status: Status = Status.COMPLETED
    ) -> bool:
        for task, size in task_batch_sizes.items():
            if await self.count(task, group_status) < size:
                return False
        return True

    async def count_statuses(
        self, task_names: list[str], statuses: list[Status]
    ) -> dict[str, dict[Status, int]]:
        return {
            task: {status: await self.count(task, status) for status in statuses}
            for task in task_names
        }

    async def save(self, path: str | Path) -> None:
        file = Path(path) / "replay_buffer.pth"
        state = {
            "policy": type(self._policy).__name__,
            "storage": type(self._storage).__name__,
            "storage_state": self._storage.state_dict(),
        }
        await asyncio.to_thread(torch.save, state, file)

    def __len__(self) -> int:
        return len(self._storage)


class NaiveStorage(StorageBackend):
    """A storage in memory. It supports only the query that matches everything."""

    def __init__(self) -> None:
        self.items: dict[int, StorageItem] = {}

    async def put(self, item: StorageItem) -> int:
        uid = len(self.items) + 1
        self.items[uid] = replace(item, uid=uid, timestamp_id=uid)
        return uid

    async def get(self, query: Any) -> list[StorageItem]:
        return list(self.items.values())

    async def count(self, query: Any) -> int:
        return len(self.items)

    async def delete(self, uids: list[int]) -> None:
        for uid in uids:
            self.items.pop(uid, None)

    async def update(self, items: list[StorageItem]) -> None:
        self.items.update((item.uid, item) for item in items)

    def __len__(self) -> int:
        return len(self.items)

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items.values()), "next_uid": len(self.items) + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = {item.uid: item for item in state["items"]}


class FIFOReplayPolicy(ReplayPolicy):
    async def put(self, item: StorageItem, storage_backend: StorageBackend) -> None:
        await storage_backend.put(item)

    async def get(
        self, count: int, query: Any, storage_backend: StorageBackend
    ) -> list[list[RolloutState]]:
        found = sorted(await storage_backend.get(query), key=lambda one: one.timestamp_id)[:count]
        await storage_backend.delete([one.uid for one in found])
        return [one.item for one in found]


class AsyncReplayBufferConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def build(self) -> ReplayBuffer:
        return ReplayBuffer(FIFOReplayPolicy(), NaiveStorage())
