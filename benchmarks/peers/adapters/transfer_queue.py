"""TransferQueue: columns of samples in Ray actors, over ZeroMQ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.peers.groups import Group, Shape, number_of

PARTITION = "train"


class Adapter:
    """A controller and two storage units, each an actor in its own process; usable by any process.

    One of its samples is a group here, with fields [episodes, tokens]. A draw fetches the metadata
    and fields of the next samples that the task has not consumed. Only checkpoints written by
    `save_checkpoint` are durable.
    """

    POLICIES = ("order",)
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {
        "uniform": "none: a task consumes each once, in order; callers may fetch keys they name",
        "priority": "none",
        "update_priorities": "none",
    }

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._shapes = {name: each for name, (each, _) in shape.fields.items()}
        self._checkpoint = folder / "checkpoint"
        self._num_groups = self._fetched = self._turn = 0
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8
        )
        transfer_queue.init()
        if self._checkpoint.exists():
            transfer_queue.load_checkpoint(self._checkpoint)
            self._num_groups = self.count()

    def put(self, groups: Sequence[Group]) -> None:
        fields = {
            name: torch.stack([torch.from_numpy(group[name]) for group in groups])
            for name in self._shapes
        }
        transfer_queue.kv_batch_put(
            keys=[str(number_of(group)) for group in groups],
            partition_id=PARTITION,
            fields=TensorDict(fields, batch_size=[len(groups)]),
        )
        self._num_groups += len(groups)

    def sample(self, policy: str, n: int) -> TensorDict:
        client = transfer_queue.get_client()
        # Each task gets each sample once. A new task starts when this one has consumed them all.
        if self._fetched + n > self._num_groups:
            self._turn, self._fetched = self._turn + 1, 0
        self._fetched += n
        meta = client.get_meta(
            data_fields=list(self._shapes),
            batch_size=n,
            partition_id=PARTITION,
            mode="fetch",
            task_name=f"trainer {self._turn}",
        )
        return client.get_data(meta)

    def parts(self, sample: TensorDict) -> list[Group]:
        """Return the fields, each of which is one array, jagged or not."""
        part = {}
        for name, shape in self._shapes.items():
            column = sample[name]
            flat = column.values() if column.is_nested else column
            part[name] = flat.reshape(-1, *shape).numpy()
        return [part]

    def checkpoint(self) -> None:
        transfer_queue.save_checkpoint(self._checkpoint)

    def count(self) -> int:
        return len(transfer_queue.kv_list(PARTITION).get(PARTITION, {}))

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        transfer_queue.close()
        ray.shutdown()
