"""XTuner's replay buffer on a database, its config, and its dumps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from xtuner.v1.data_proto import rl_data
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl import replay_buffer as upstream

import replaydb as rdb
from replaydb.errors import InvalidInputError
from replaydb.integrations.xtuner.storage import Consume, SqlReplayPolicy, SqlStorage


class SqlReplayBuffer(upstream.ReplayBuffer):
    """XTuner's replay buffer; what it has to do as one, it does in one transaction."""

    _policy: SqlReplayPolicy
    _storage: SqlStorage

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: Status = Status.COMPLETED
    ) -> tuple[dict[str, list[list[RolloutState]]], dict[str, int]]:
        """Take up to so many groups of each task, all of them at once.

        Returns:
            The groups by task, and how many these are.
        """
        batch: dict[str, list[list[RolloutState]]] = {task: [] for task in task_batch_sizes}
        query = {"status": group_status}
        for item in await self._storage.take(task_batch_sizes, query, self._policy.order):
            batch[item.task_name].append(item.item)
        return batch, {task: len(groups) for task, groups in batch.items()}

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int],
        current_train_step: int,
        statuses: list[Status] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
    ) -> dict[str, int]:
        """Move to a train step, and have expire what is too stale for it.

        Args:
            task_stale_thresholds: By task, the staleness at which groups expire.
            current_train_step: The step; a group's staleness is this, less that of the model that
                made its oldest token, less one.
            statuses: Which groups may expire: by default those that are completed or aborted.
            expired_groups_retryable_by_task: Tasks whose expired groups are kept to be rolled
                again, as by default; of the others they are deleted.

        Returns:
            How many groups have expired, by task.

        Raises:
            InvalidInputError: A threshold is not positive; nothing was changed.
        """
        for task, threshold in task_stale_thresholds.items():
            if not isinstance(threshold, int | float) or not threshold > 0:
                field = f"task_stale_thresholds[{task!r}]"
                raise InvalidInputError(field, "above 0", threshold)
        await self._storage.move_to(current_train_step)
        expired = {}
        for task, threshold in task_stale_thresholds.items():
            chosen = statuses or [Status.COMPLETED, Status.ABORTED]
            query = {"task_name": task, "status": {"$in": chosen}}
            retry = (expired_groups_retryable_by_task or {}).get(task, True)
            expired[task] = await self._storage.expire(query, threshold, delete=not retry)
        return expired

    async def save(self, path: str | Path) -> None:
        """Say that a checkpoint has what was taken so far. No file is written."""
        await self._storage.let_go(used=True)

    async def resume(self, path: str | Path) -> None:
        """Have back what was taken since the last `save`, also by a process that was killed."""
        await self._storage.let_go(used=False)


class SqlReplayBufferConfig(upstream.AsyncReplayBufferConfig):
    """Takes the place of XTuner's `AsyncReplayBufferConfig` and `SyncReplayBufferConfig`.

    Attributes:
        url: The database, as for `replaydb.Store.open`.
        name: Name of the buffer.
        order: "staleness" takes the stalest first, as XTuner's asynchronous config; "fifo" the
            oldest, as its synchronous one.
        consume: When what is taken is used up: at once, as in XTuner; when `save` says that a
            checkpoint has it, until when `resume` gives it back; or never, so that completed
            groups can be taken again.
        owner: Who takes; consumers that resume on their own have names of their own.
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
        """Open the buffer, with everything that an earlier process has left in it.

        With `consume="saved"` it has back what its owner took and did not save.

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
        if self.consume == "saved":
            storage.give_back()
        return SqlReplayBuffer(policy=SqlReplayPolicy(order), storage_backend=storage)


def load_dump(path: str | Path) -> dict[str, Any]:
    """What XTuner's `save` wrote, a pickle, without running what it says.

    Only XTuner's own data classes and arrays of numbers are made of it; anything else that it names
    is refused. `SqlStorage.load_state_dict` takes what is returned.

    Args:
        path: The file, `replay_buffer.pth`, or its folder.

    Raises:
        InvalidInputError: It holds something else, or is no such file.
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
        raise InvalidInputError("path", expected, f"{file}: {error}") from error
    return state


def _safe() -> list[Any]:
    """What a dump may name."""
    own = [thing for thing in vars(rl_data).values() if isinstance(thing, type)]
    numbers = [np.dtype(code) for code in np.typecodes["AllInteger"] + "?efdg"]
    empty = np.empty(0)
    return [
        *(thing for thing in own if thing.__module__ == rl_data.__name__),
        upstream.StorageItem,
        set,
        np.ndarray,
        np.dtype,
        *{type(number) for number in numbers},
        empty.__reduce__()[0],  # numpy's _reconstruct, which has another place in every version
    ]
