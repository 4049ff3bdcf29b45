"""XTuner's replay buffer in a database, its config, and import of its dumps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from xtuner.v1.data_proto import rl_data
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl import replay_buffer as upstream
from xtuner.v1.rl.replay_buffer import StorageItem

import replaydb as rdb
from replaydb.integrations.xtuner.query import selection
from replaydb.integrations.xtuner.storage import Consume, SqlReplayPolicy, SqlStorage


class SqlReplayBuffer(upstream.ReplayBuffer):
    """XTuner's replay buffer in a database. Atomic operations run in one transaction."""

    _policy: SqlReplayPolicy
    _storage: SqlStorage

    async def put(
        self,
        items: list[RolloutState],
        task_name: str,
        *,
        current_train_step: int | None = None,
        **options: Any,
    ) -> None:
        """Store a group. Members that are too stale are cleared, as in XTuner.

        Args:
            items: The states of the group.
            task_name: Task of the group.
            current_train_step: The train step that will use the group.
            options: Other arguments of XTuner's `put`, such as thresholds.

        Raises:
            InvalidInputError: A state contains a value that cannot be stored.
        """
        if current_train_step is not None:
            await self._storage.begin(current_train_step)
        await super().put(items, task_name, current_train_step=current_train_step, **options)

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: Status = Status.COMPLETED
    ) -> tuple[dict[str, list[list[RolloutState]]], dict[str, int]]:
        """Take groups of all tasks in one transaction.

        Args:
            task_batch_sizes: Maximum number of groups, by task.
            group_status: Status of the groups.

        Returns:
            The groups and their number, by task. Tasks with a size of 0 or less have no groups.
        """
        batch: dict[str, list[list[RolloutState]]] = {task: [] for task in task_batch_sizes}
        sizes = {task: size for task, size in task_batch_sizes.items() if size > 0}
        query = {"status": group_status}
        async with self._lock:
            taken = await self._storage.take(sizes, query, self._policy.order) if sizes else []
        for item in taken:
            batch[item.task_name].append(item.item)
        return batch, {task: len(groups) for task, groups in batch.items()}

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int],
        current_train_step: int,
        task_token_stale_thresholds: Mapping[str, int] | None = None,
        **options: Any,
    ) -> dict[str, int]:
        """Set the train step, and expire groups that are too stale for it, as in XTuner.

        A member of a group expires if the staleness of its oldest token has reached the threshold
        of its task, or if all of its tokens in the loss have reached the token threshold. Its
        response is cleared; the other members are kept. If expired groups of a task are not
        retryable, they are deleted instead, and their trace sessions are released. Only groups
        with a token that is old enough are read and written.

        Args:
            task_stale_thresholds: By task, the staleness at which states expire. Staleness is
                `current_train_step` minus the model step of the oldest token, minus one.
            current_train_step: The train step.
            task_token_stale_thresholds: By task, the staleness at which single tokens expire. The
                rule does not apply to tasks without a threshold.
            options: Other arguments of XTuner's method: `statuses` and
                `expired_groups_retryable_by_task`.

        Returns:
            By task, how many of the groups that were read are expired now.

        Raises:
            InvalidInputError: A threshold is not positive; nothing was changed.
        """
        of_tokens = task_token_stale_thresholds or {}
        for field, thresholds in {
            "task_stale_thresholds": task_stale_thresholds,
            "task_token_stale_thresholds": of_tokens,
        }.items():
            for task, threshold in thresholds.items():
                if not isinstance(threshold, int | float) or not threshold > 0:
                    raise rdb.InvalidInputError(f"{field}[{task!r}]", "above 0", threshold)
        await self._storage.begin(current_train_step)
        await self._storage.move_to(current_train_step)
        from_ = {
            task: min(threshold, of_tokens.get(task, threshold))
            for task, threshold in task_stale_thresholds.items()
        }
        aged: Any = _Aged(self._storage, from_, current_train_step)
        refreshing = upstream.ReplayBuffer(self._policy, aged)
        refreshing._lock = self._lock
        expired: dict[str, int] = await refreshing.refresh_staleness(
            task_stale_thresholds=task_stale_thresholds,
            task_token_stale_thresholds=task_token_stale_thresholds,
            current_train_step=current_train_step,
            **options,
        )
        return expired

    def __len__(self) -> int:
        """Return the number of groups, or 0 if this object was not used yet.

        XTuner resumes from a checkpoint that does not include the buffer only if the buffer that it
        has just built is empty. Groups of earlier processes count after the first other call.
        """
        return len(self._storage) if self._storage.is_used else 0

    async def save(self, path: str | Path) -> None:
        """Record in a checkpoint which groups were taken before it, if `consume` is "saved".

        The trainer completes the checkpoint afterwards. Its groups are therefore acknowledged by
        the next save to another path, or when the trainer resumes from it.
        """
        async with self._lock:
            await self._storage.save(Path(path))

    async def resume(self, path: str | Path) -> None:
        """Return to a checkpoint, if `consume` is "saved".

        Groups that were taken since can be taken again, also if a killed process had taken them or
        a later checkpoint includes them.

        Raises:
            InvalidInputError: The record of the checkpoint cannot be read.
        """
        async with self._lock:
            await self._storage.resume(Path(path))


class SqlReplayBufferConfig(upstream.AsyncReplayBufferConfig):
    """Replacement for XTuner's `AsyncReplayBufferConfig` and `SyncReplayBufferConfig`.

    Attributes:
        url: URL of the database, as for `replaydb.Store.open`.
        name: Name of the buffer.
        order: "staleness" takes the stalest groups first, as XTuner's asynchronous config; "fifo"
            takes the oldest, as its synchronous config.
        consume: When taken groups are used up. "taken": at once, as in XTuner. "saved": when a
            checkpoint that includes them is complete; until then they stay leased. "never":
            completed groups can be taken again.
        owner: Name of the consumer. Consumers that resume independently need different names.
        run: Name of the run, as for `replaydb.Store.open`.
        lineage: The run that this one continues, as for `replaydb.Store.open`.
    """

    url: str
    name: str = "xtuner"
    order: Literal["staleness", "fifo"] = "staleness"
    consume: Consume = "taken"
    owner: str = "xtuner"
    run: str | None = None
    lineage: str | None = None

    def build(self) -> SqlReplayBuffer:
        """Open the buffer. Groups of earlier processes are still in it.

        Raises:
            InvalidInputError: The buffer follows a run that this one does not continue.
        """
        order = rdb.Fifo() if self.order == "fifo" else rdb.StalestFirst()
        storage = SqlStorage(
            self.url,
            self.name,
            run=self.run,
            lineage=self.lineage,
            consume=self.consume,
            owner=self.owner,
        )
        return SqlReplayBuffer(policy=SqlReplayPolicy(order), storage_backend=storage)


class _Aged:
    """A view of a storage with only the items that a refresh can change.

    It implements the methods that XTuner's refresh calls.
    """

    def __init__(self, storage: SqlStorage, from_: Mapping[str, float], train_step: int) -> None:
        self._storage = storage
        self._from = from_
        self._train_step = train_step
        self._before: dict[int, Any] = {}
        self._items: dict[int, StorageItem] = {}
        self._undated: list[tuple[RolloutState, Any]] = []

    async def get(self, query: Any) -> list[StorageItem]:
        """Return the items that match a query for one task and have a token that is old enough."""
        [task] = selection(query).tasks or []
        found = await self._storage.get_aged(query, self._from[task])
        for item in found:
            self._items[item.uid], self._before[item.uid] = item, _state_of(item)
            for state in item.item:
                if state.response_ids and not state.response_model_steps:  # as old as its put
                    self._undated.append((state, state.response_model_steps))
                    rl_data.update_sample_version(state, self._train_step - 1 - state.seq_staleness)
        return found

    async def update(self, items: list[StorageItem]) -> None:
        """Write the items that changed."""
        for state, steps in self._undated:
            if state.status is not Status.EXPIRED:
                state.response_model_steps = steps
        changed = [item for item in items if _state_of(item) != self._before[item.uid]]
        await self._storage.update(changed)

    async def delete(self, uids: list[int]) -> None:
        """Delete items. Items that another trainer has just taken keep their trace sessions."""
        for uid in await self._storage.discard(uids):
            self._items[uid].item.clear()


def _state_of(item: StorageItem) -> Any:
    """Return the parts of an item that a refresh can change."""
    return item.status, [(one.status, one.seq_staleness) for one in item.item]


def load_dump(path: str | Path) -> dict[str, Any]:
    """Read a dump of XTuner's `save`, which is a pickle, without running code from it.

    Only XTuner's own data classes and arrays of numbers are created; all other objects that the
    dump names are refused. Pass the result to `SqlStorage.load_state_dict`.

    Args:
        path: The file, `replay_buffer.pth`, or its folder.

    Raises:
        InvalidInputError: The file is not such a dump, or contains other objects.
        OSError: The file cannot be read.
    """
    file = Path(path)
    file = file / "replay_buffer.pth" if file.is_dir() else file
    try:
        with torch.serialization.safe_globals(_safe()):
            dump = torch.load(file, map_location="cpu", weights_only=True)
        state: dict[str, Any] = dump["storage_state"]
    except OSError:
        raise
    except Exception as error:
        expected = "a dump of XTuner's replay buffer that holds rollout states and nothing else"
        raise rdb.InvalidInputError("path", expected, f"{file}: {error}") from error
    return state


def _safe() -> list[Any]:
    """Return the classes and functions that a dump can name."""
    own = [thing for thing in vars(rl_data).values() if isinstance(thing, type)]
    numbers = [np.dtype(code) for code in np.typecodes["AllInteger"] + "?efdg"]
    empty = np.empty(0)
    return [
        *(thing for thing in own if thing.__module__ == rl_data.__name__),
        StorageItem,
        set,
        np.ndarray,
        np.dtype,
        *{type(number) for number in numbers},
        empty.__reduce__()[0],  # numpy's _reconstruct, whose module differs between versions
    ]
