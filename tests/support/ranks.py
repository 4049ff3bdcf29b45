"""Processes that `torch.distributed` connects, and calls that each of them makes."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from replaydb import Batch, blocking
from replaydb.batch import PaddedBatch
from replaydb.training.dataset import ReplayDataset
from replaydb.training.distributed import ShardedBuffer


class Ranks:
    """Connected processes, which make calls when they are told to."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on every rank. Return the results, or the errors."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return [pipe.recv() for pipe in self._pipes if pipe.poll(60)]


@contextmanager
def running_ranks(count: int, folder: Path) -> Iterator[Ranks]:
    """Start processes and connect them. They end when the block does."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
    launcher = context.Process(target=_launch, args=(theirs, folder / "rendezvous"))
    launcher.start()
    for pipe in theirs:
        pipe.close()
    try:
        yield Ranks(list(mine))
    finally:
        for pipe in mine:
            pipe.close()
        launcher.join(10)
        launcher.kill()


def _launch(pipes: tuple[Connection, ...], rendezvous: Path) -> None:
    """Fork the processes, which have then imported torch."""
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_serve, args=(pipes, rank, rendezvous), daemon=True)
        for rank in range(len(pipes))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _serve(pipes: tuple[Connection, ...], rank: int, rendezvous: Path) -> None:
    for other in pipes[:rank] + pipes[rank + 1 :]:
        other.close()
    pipe = pipes[rank]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=len(pipes))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the test has ended
            return
        try:
            pipe.send(function(rank, *arguments))
        except Exception as error:
            pipe.send(error)


@contextmanager
def _sharded(url: str, **options: Any) -> Iterator[ShardedBuffer]:
    with blocking.Store.open(url, run="grpo") as store:
        yield ShardedBuffer(store.buffer("math", create=False), **options)


def train(rank: int, url: str, steps: list[int], n: int, options: dict[str, Any]) -> list[Any]:
    """Take steps. Return the ids, policy version and draw of each."""
    done = []
    with _sharded(url) as buffer:
        for step in steps:
            with buffer.lease(n, ttl=60, step=step, **{"timeout": 60, **options}) as lease:
                done.append((lease.batch.ids, lease.policy_version, lease.batch.draw_id))
                lease.ack(cursor={"step": step + 1}, advance_policy=step + 1)
    return done


def sample(
    rank: int, url: str, n: int, options: dict[str, Any]
) -> tuple[list[int], int | None, list[float]]:
    """Sample. Return the ids, the draw and the weights of the groups that this rank reads."""
    with _sharded(url) as buffer:
        batch = buffer.sample(n, step=5, timeout=60, **options)
        return batch.ids, batch.draw_id, batch.weights.tolist()


def leave(rank: int, url: str, n: int) -> list[int]:
    """Take a step without an explicit ack."""
    with _sharded(url) as buffer, buffer.lease(n, ttl=60, step=0, timeout=60) as lease:
        return lease.batch.ids


def fail(rank: int, url: str, failing: int) -> None:
    """Fail on one rank within a step, which the others leave too."""
    with _sharded(url) as buffer, buffer.lease(4, ttl=60, step=0, timeout=60):
        raise RuntimeError("out of memory" if rank == failing else "another rank has failed")


def abandon(rank: int, url: str, step: int) -> list[int]:
    """Take groups for a step, and end like a process that is killed: without a call."""
    with blocking.Store.open(url, run="grpo") as store:
        buffer = ShardedBuffer(store.buffer("math", create=False))
        leased = buffer.lease(8, ttl=600, step=step, timeout=60)
        ids = leased.__enter__().batch.ids
        _kept.append(leased)
    return ids


_kept: list[Any] = []


def step_of_each(rank: int, url: str, steps: list[int]) -> None:
    """Ask for another step on every rank."""
    with _sharded(url) as buffer, buffer.lease(4, ttl=60, step=steps[rank], timeout=60):
        pass


def ack_of_each(rank: int, url: str, versions: list[int]) -> None:
    """Ack with another policy version on every rank."""
    with _sharded(url) as buffer, buffer.lease(4, ttl=60, step=0, timeout=60) as lease:
        lease.ack(advance_policy=versions[rank])


def ack_a_function(rank: int, url: str, failing: int) -> None:
    """Ack with a cursor that cannot be sent to other ranks, on one of them."""
    with _sharded(url) as buffer, buffer.lease(4, ttl=60, step=0, timeout=60) as lease:
        lease.ack(cursor={"a": (lambda: 1) if rank == failing else 1})


def ack_an_array(rank: int, url: str, failing: int) -> None:
    """Ack with a cursor that cannot be compared, on all ranks."""
    with _sharded(url) as buffer, buffer.lease(4, ttl=60, step=0, timeout=60) as lease:
        lease.ack(cursor={"a": torch.zeros(3)})


def open_each(rank: int, url: str, names: list[str]) -> None:
    """Open another buffer on every rank."""
    with blocking.Store.open(url, run="grpo") as store:
        ShardedBuffer(store.buffer(names[rank], create=False))


def open_stores(rank: int, urls: list[str]) -> None:
    """Open another database on every rank."""
    with _sharded(urls[rank]):
        pass


def options_of_each(rank: int, url: str, call: str, options: list[dict[str, Any]]) -> list[int]:
    """Lease or sample with other arguments on every rank. Return the ids that this rank reads."""
    given = {"n": 4, "step": 0, "timeout": 60, **options[rank]}
    given["tasks"] = iter([given.get("tasks", "gsm8k")])
    with _sharded(url) as buffer:
        if call == "sample":
            return buffer.sample(**given).ids
        with buffer.lease(**{"ttl": 60, **given}) as lease:
            return lease.batch.ids


def mesh(rank: int, url: str, shards: list[int], num_shards: list[int]) -> list[int]:
    """Take a step on a mesh. Return the ids that this rank reads."""
    with (
        _sharded(url, shard=shards[rank], num_shards=num_shards[rank]) as buffer,
        buffer.lease(4, ttl=60, step=0, timeout=60) as lease,
    ):
        return lease.batch.ids


def subgroup(rank: int, url: str) -> list[int]:
    """Take a step on the last two ranks only."""
    group = dist.new_group([2, 3])
    with (
        _sharded(url, group=group) as buffer,
        buffer.lease(4, ttl=60, step=0, timeout=60) as lease,
    ):
        return lease.batch.ids


def call_of_each(rank: int, url: str, sampling: int) -> None:
    """Sample on one rank, and lease on the others."""
    with _sharded(url) as buffer:
        if rank == sampling:
            buffer.sample(4, step=0, timeout=60)
        else:
            with buffer.lease(4, ttl=60, step=0, timeout=60):
                pass


def only_read(rank: int, url: str, n: int) -> None:
    """Take a step on ranks of which only the first can write."""
    with blocking.Store.open(url, run="grpo" if rank == 0 else None, read_only=rank > 0) as store:
        buffer = ShardedBuffer(store.buffer("math", create=False), owner="grpo")
        with buffer.lease(n, ttl=60, step=0, timeout=60):
            pass


def copied(rank: int, url: str) -> tuple[int | None, int | None]:
    """Copy a dataset, as a DataLoader does for workers that it spawns. Return its position."""
    made = copy.copy(ReplayDataset(url=url, buffer="math", batch_size=1, shard="modulo"))
    return made.rank, made.world_size


def ids_of(batch: Batch) -> list[int]:
    return batch.ids


def iterate(rank: int, url: str, options: dict[str, Any]) -> list[list[int]]:
    """Iterate over a dataset."""
    return list(ReplayDataset(url=url, buffer="math", collate=ids_of, run="grpo", **options))


def new_model() -> torch.nn.Module:
    """Return a small language model, the same in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16))


def token_losses(model: torch.nn.Module, tensors: PaddedBatch) -> torch.Tensor:
    """Return the cross-entropy of each token, [N, L]; 0 for the first of a sequence."""
    logits = model(tensors.token_ids[:, :-1]).transpose(1, 2)
    losses = cross_entropy(logits, tensors.token_ids[:, 1:], reduction="none")
    return pad(losses, (1, 0))


def gradients(rank: int, url: str, n: int, wrapper: str, code: str) -> tuple[int, dict[str, Any]]:
    """Run `backward` of the code on a leased batch. Return its number of groups and gradients."""
    model = wrapped = new_model()
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard  # an import of two seconds

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    scope: dict[str, Any] = {"token_losses": token_losses}
    exec(code, scope)  # noqa: S102 - our page
    with (
        _sharded(url) as buffer,
        buffer.lease(n, ttl=60, step=0, timeout=60, even=False) as lease,
    ):
        scope["backward"](wrapped, lease.batch)
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        found[name] = np.asarray(gradient.full_tensor() if wrapper == "FSDP2" else gradient)
    return len(lease.batch), found


def grpo_update(rank: int, url: str, n: int) -> dict[str, Any]:
    """Take one step of `examples.async_grpo`, with plain SGD. Return all weights."""
    from examples.async_grpo.trainer import new_policy, update
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    policy = new_policy()
    with _sharded(url) as buffer, buffer.lease(n, ttl=60, step=0, timeout=60) as lease:
        update(policy, torch.optim.SGD(policy.parameters(), lr=1.0), lease.batch)
    weights = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True))
    return {name: np.asarray(weight) for name, weight in weights.items()}
