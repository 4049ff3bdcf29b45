"""The program of a client of some version of replaydb, which uses only what is public.

    python -P -m compatibility.program SOCKET

It imports its replaydb once, and forks a process for each connection to the socket. The first line
on the connection is a request in JSON: `["command", WORD, ...]`, `["traffic", URL, NAME]` or
`["calls", URL]`. The connection is stdin, stdout and stderr of the process. The first line of the
answer is the process id, and the last one the exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import alembic.autogenerate
import alembic.command  # noqa: F401 - imported once, not by each process

import replaydb as rdb
from processes.derived import check_group, derived_group
from replaydb import Buffer, Store
from replaydb.cli import app

BUFFER = "fleet"
POLICIES = (rdb.Prioritized(), rdb.Uniform())
Call = Callable[[], Any]


def report(facts: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(facts), flush=True)


class Traffic:
    """A producer and a consumer, which run until they are stopped, and check what they read.

    Attributes:
        put: Uids of the groups whose put has returned.
        acked: Uids of the groups whose ack has returned.
        errors: The error that ended the producer or the consumer.
        rounds: How often each of them has made its calls.
    """

    def __init__(self, store: Store, buffer: Buffer, name: str) -> None:
        self._store = store
        self._buffer = buffer
        self._name = name
        self._is_stopped = False
        self.put: list[str] = []
        self.acked: list[str] = []
        self.errors: dict[str, str] = {}
        self.rounds = {"produce": 0, "consume": 0}

    async def run(self) -> None:
        """Run until a line `stop` comes. Answer each line `progress` after two more rounds."""
        running = [asyncio.create_task(self._repeat(call)) for call in (self.produce, self.consume)]
        while (await asyncio.to_thread(sys.stdin.readline)).strip() == "progress":
            wanted = {name: number + 2 for name, number in self.rounds.items()}
            while any(self._is_before(name, least) for name, least in wanted.items()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # other tasks make rounds
            report({"rounds": self.rounds, "errors": self.errors})
        self._is_stopped = True
        await asyncio.gather(*running)
        report({"put": self.put, "acked": self.acked, "errors": self.errors})

    def _is_before(self, name: str, least: int) -> bool:
        return name not in self.errors and self.rounds[name] < least

    async def _repeat(self, call: Callable[[int], Awaitable[None]]) -> None:
        name = call.__name__
        while not self._is_stopped:
            try:
                await call(self.rounds[name])
            except rdb.NotEnoughGroupsError:
                pass
            except rdb.ReplayDBError as error:
                self.errors[name] = f"{type(error).__name__}: {error}"
                return
            self.rounds[name] += 1
            await asyncio.sleep(random.uniform(0.01, 0.05))

    async def produce(self, number: int) -> None:
        """Put some groups at once, and one episode by episode."""
        uids = [f"{self._name}-{number}-{i}" for i in range(random.randint(1, 3))]
        await self._buffer.put([derived_group(uid) for uid in uids])
        self.put += uids
        whole = derived_group(f"{self._name}-{number}-added")
        await self._buffer.open_group(whole.task_name, whole.group_uid, len(whole.episodes))
        self.put.append(whole.group_uid)
        for position, one in enumerate(whole.episodes):
            await self._buffer.add_episode(whole.group_uid, one, position=position)

    async def consume(self, number: int) -> None:
        """Train on some groups: ack them, except one in every fifth batch."""
        lease = await self._buffer.lease(3, ttl=600, at_least=1, step=number)
        self._check(lease.batch.groups)
        if number % 5 == 0 and len(lease.batch) > 1:
            await lease.nack(lease.batch.ids[:1])
        settled = (await lease.ack(cursor={self._name: number})).settled
        self.acked += [one.group_uid for one in lease.batch.groups if one.id in settled]
        await self._buffer.advance_policy(self._buffer.policy_version + 1, take_over=True)

        batch = await self._buffer.sample(3, POLICIES[number % 2])
        self._check(batch.groups)
        await self._buffer.update_priorities(batch.ids, [random.choice([0.5, 2.0])] * len(batch))
        recent = await self._buffer.find(limit=4, statuses=["completed", "archived"])
        self._check(await self._buffer.get([one.id for one in recent]))
        await self._buffer.stats()
        await self._store.buffer(BUFFER, create=False)

    def _check(self, groups: Iterable[rdb.EpisodeGroup]) -> None:
        for group in groups:
            check_group(group)


async def traffic(url: str, name: str) -> None:
    async with Store.open(url, run=name) as store:
        await Traffic(store, await store.buffer(BUFFER), name).run()


async def unused(url: str) -> None:
    """Open a store. After a line, make the first call, which would also store the run."""
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER, create=False)
        report({})
        sys.stdin.readline()
        report({"put": await _error_of(lambda: buffer.put(derived_group("unused")))})


async def calls(url: str) -> None:
    """Open a store and take a lease. After each line, make the calls that it names, or `all`.

    Reports for each call its error, or None.
    """
    async with Store.open(url, run="calls") as store:
        buffer = await store.buffer(BUFFER)
        uid = f"of-{os.getpid()}"
        ids = await buffer.put([derived_group(f"{uid}-{i}") for i in range(12)])
        await buffer.open_group("math", uid, 4)
        drawn = await buffer.sample(2)
        lease = await buffer.lease(2, ttl=600)
        report({"leased": lease.batch.ids})
        number = 0
        while line := sys.stdin.readline().strip():
            number += 1
            made = {**writes(buffer, lease, ids, uid, number), **reads(buffer, ids, drawn)}
            made["create"] = partial(store.buffer, f"{uid}-{number}")
            made["buffer"] = partial(store.buffer, BUFFER, create=False)
            made |= {"buffers": store.buffers, "runs": store.runs}
            names = made.keys() - {"empty"} if line == "all" else line.split()
            report({name: await _error_of(made[name]) for name in names})


def writes(
    buffer: Buffer, lease: rdb.Lease, ids: list[int], uid: str, number: int
) -> dict[str, Call]:
    """Return calls that write. `number` makes each call of a process different."""
    return {
        "put": lambda: buffer.put(derived_group(f"{uid}-later-{number}")),
        "open_group": lambda: buffer.open_group("math", f"{uid}-opened-{number}", 4),
        "add_episode": lambda: buffer.add_episode(uid, derived_group("x").episodes[0]),
        "sample": lambda: buffer.sample(2),
        "lease": lambda: buffer.lease(2, ttl=600),
        "extend": lease.extend,
        "nack": lambda: lease.nack(lease.batch.ids[:1]),
        "ack": lease.ack,
        "revoke": lambda: buffer.revoke(lease.id),
        "advance_policy": lambda: buffer.advance_policy(buffer.policy_version + 1),
        "update_priorities": lambda: buffer.update_priorities(ids[:1], [number]),
        "update": lambda: buffer.update(ids[:1], tags={"x": number}),
        "update_settings": lambda: buffer.update_settings(max_attempts=number + 1),
        "delete": lambda: buffer.delete(ids[1:2]),
        "empty": lambda: buffer.delete(where=rdb.col.id > 0),
    }


def reads(buffer: Buffer, ids: list[int], drawn: rdb.Batch) -> dict[str, Call]:
    """Return calls that write nothing."""
    return {
        "get": lambda: _get_all(buffer),
        "peek": lambda: buffer.peek(1),
        "find": buffer.find,
        "episodes": lambda: buffer.episodes(ids[2]),
        "count": buffer.count,
        "stats": buffer.stats,
        "cursor": lambda: buffer.cursor("dataset"),
        "draws": buffer.draws,
        "redraw": lambda: buffer.redraw(drawn.draw_id or 0),
    }


async def _get_all(buffer: Buffer) -> None:
    """Read and check the payloads of all groups, of old and of new clients."""
    groups = await buffer.find(statuses=["completed", "leased"])
    await buffer.get([one.id for one in groups])


async def _error_of(call: Call) -> str | None:
    try:
        await call()
    except rdb.ReplayDBError as error:
        return f"{type(error).__name__}: {error}"
    return None


KINDS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "traffic": traffic,
    "calls": calls,
    "unused": unused,
}


def command(*words: str) -> None:
    app(list(words), prog_name="replaydb")


def serve(connection: socket.socket) -> int:
    """Answer a request in this process; return its exit code."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(connection.fileno(), number)
        setattr(sys, name, os.fdopen(number, mode, buffering=1))
    random.seed()
    report({"pid": os.getpid()})
    kind, *arguments = json.loads(sys.stdin.readline())
    try:
        if kind == "command":
            command(*arguments)
        else:
            asyncio.run(KINDS[kind](*arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        report({"version": rdb.__version__, "file": rdb.__file__})
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                code = serve(connection)
                report({"exit": code})
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
