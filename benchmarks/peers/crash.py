"""Lost groups and recovery time after SIGKILL of all processes of a store and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.catalog import Peer
from benchmarks.peers.findings import Finding
from benchmarks.peers.processes import WorkerProcess
from benchmarks.peers.race import Load, loads


def crash(peer: Peer, python: Path, folder: Path, groups: int) -> Iterator[Finding]:
    """Kill a store after all puts are acknowledged: without and with a checkpoint half-way."""
    load = loads(groups)["72 KB"]
    half = max(1, groups // 2 // load.batch) * load.batch
    for checkpoint in (False, True):
        inside = folder / ("with" if checkpoint else "without")
        inside.mkdir()
        with ExitStack() as stack:
            worker = WorkerProcess(peer, python, inside)
            stack.callback(worker.close)
            facts = worker.ask("describe")
            if checkpoint and not facts["checkpoints"]:
                yield Finding(peer.name, "checkpoint", None, note=facts["none"]["checkpoint"])
                return
            policy = facts["policies"][0]
            store = inside / "store"
            store.mkdir()
            worker.open(store, policy, 2 * half, load.size)
            worker.ask("put", times=half // load.batch, batch=load.batch)
            if checkpoint:
                seconds = worker.ask("checkpoint")
                yield Finding(peer.name, "checkpoint", seconds, "s", f"of {half:,} groups")
            worker.ask("put", times=half // load.batch, batch=load.batch)
            worker.kill()
            again = WorkerProcess(peer, python, inside)
            stack.callback(again.close)
            yield from _found(peer.name, again, store, policy, half, load, checkpoint=checkpoint)


def _found(
    name: str,
    worker: WorkerProcess,
    folder: Path,
    policy: str,
    half: int,
    load: Load,
    *,
    checkpoint: bool,
) -> Iterator[Finding]:
    """Count lost groups, and measure the time until the first batch, without imports."""
    when = " with a checkpoint" if checkpoint else ""
    worker.ask("describe")
    seconds = worker.open(folder, policy, 2 * half, load.size)
    left = worker.ask("count")
    lost = 2 * half - left
    known = {2 * half: "everything", half: "everything since the checkpoint"}
    yield Finding(name, f"lost{when}", lost, "groups", known.get(lost, ""))
    if left == 0:
        yield Finding(name, f"recovery{when}", None, note="everything is lost")
        return
    seconds += sum(worker.ask("sample", policy=policy, n=load.n, times=1, columns=False))
    yield Finding(name, f"recovery{when}", 1e3 * seconds, "ms")
