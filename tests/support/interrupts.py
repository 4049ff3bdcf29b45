"""Process whose blocking calls are interrupted by SIGINT at random times.

    python -m support.interrupts URL SEED ROUNDS [ROLE ...]

A child process sends the signals. After each one, leases and puts are read from the tables by the
bare driver. The counts are printed as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg

from replaydb import LeaseExpiredError, NotEnoughGroupsError, blocking
from support.groups import group, groups

#: Maximum delay in seconds of a signal after the start of its round; a call takes a few ms.
MAX_DELAY = 0.012
#: Share of rounds with a second signal, and its maximum additional delay in seconds.
DOUBLE_SHARE, DOUBLE_SECONDS = 0.25, 0.004
#: Roles whose own cleanup a second signal would interrupt.
SINGLE = ("put", "lease")

_LEASES = "SELECT id FROM lease"
_PUTS = "SELECT group_uid FROM episode_group WHERE task_name = 'put'"


def main(url: str, seed: str, rounds: str, *roles: str) -> None:
    """Interrupt calls of each role in turn."""
    with _signal_sender() as sender, blocking.Store.open(url, run="interrupted") as store:
        caller = _Caller(url, store, random.Random(seed), sender)
        chosen = roles or tuple(caller.roles)
        for number in range(int(rounds)):
            caller.round(chosen[number % len(chosen)])
        stored = set(_read(url, _PUTS))
    absent = caller.absent
    caller.figures += Counter(
        {"puts cancelled": len(absent), "puts stored late": len(absent & stored)}
    )
    print(json.dumps(caller.figures))


class _SignalSender:
    """Requests signals from another process."""

    def __init__(self, requests: int, done: int) -> None:
        self._requests, self._done = requests, done

    def request(self, delays: list[float]) -> None:
        """Request one signal per delay in seconds, one after the other."""
        os.write(self._requests, f"{json.dumps(delays)}\n".encode())

    def is_done(self) -> bool:
        """Whether all requested signals were sent. True only once per request."""
        try:
            return bool(os.read(self._done, 1))
        except BlockingIOError:
            return False


@contextmanager
def _signal_sender() -> Iterator[_SignalSender]:
    requests_in, requests_out = os.pipe()
    done_in, done_out = os.pipe()
    target, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(requests_out)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with open(requests_in) as lines:
            for line in lines:
                for delay in json.loads(line):
                    time.sleep(delay)
                    os.kill(target, signal.SIGINT)
                os.write(done_out, b".")
        os._exit(0)
    os.close(requests_in)
    os.set_blocking(done_in, False)
    try:
        yield _SignalSender(requests_out, done_in)
    finally:
        os.close(requests_out)
        os.waitpid(pid, 0)


class _Caller:
    """Makes calls until they are interrupted."""

    def __init__(
        self, url: str, store: blocking.Store, chance: random.Random, sender: _SignalSender
    ) -> None:
        self.figures: Counter[str] = Counter()
        self.absent: set[str] = set()
        self.roles: dict[str, Callable[[], None]] = {
            "put": self._put,
            "with": self._with,
            "lease": self._lease,
            "loader": self._loader,
            "wait": self._wait,
            "open": self._open,
        }
        self._url = url
        self._chance = chance
        self._sender = sender
        self._is_armed = False
        self._puts = 0
        self._buffer = store.buffer("math", on_ack="return", max_attempts=10**6)
        self._buffer.put(groups(8))
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._is_armed:
            self.figures["interrupts"] += 1
            raise KeyboardInterrupt

    def round(self, role: str) -> None:
        """Interrupt calls by one or two signals, then count leases that were left behind."""
        delays = [self._chance.uniform(0, MAX_DELAY)]
        if role not in SINGLE and self._chance.random() < DOUBLE_SHARE:
            delays.append(self._chance.uniform(0, DOUBLE_SECONDS))
        self._sender.request(delays)
        while not self._sender.is_done():
            try:
                self._is_armed = True
                self.roles[role]()
                self._is_armed = False
            except KeyboardInterrupt:
                self._is_armed = False
        for lease_id in _read(self._url, _LEASES):
            self.figures[f"leases left by {role}"] += 1
            self._buffer.revoke(lease_id)
        threads = sum(one.name == "replaydb" for one in threading.enumerate())
        assert threads == 1, f"{role}: threads left"

    def _put(self) -> None:
        self._puts += 1
        uid = f"put-{self._puts}"
        try:
            self._buffer.put(group(uid, task="put"))
        except KeyboardInterrupt:
            if uid not in _read(self._url, _PUTS):
                self.absent.add(uid)
            raise

    def _with(self) -> None:
        with self._buffer.lease(1, tasks="gsm8k", ttl=600) as lease:
            lease.extend()

    def _lease(self) -> None:
        lease = None
        try:
            lease = self._buffer.lease(1, tasks="gsm8k", ttl=600)
            lease.nack()
        except KeyboardInterrupt:
            if lease is not None:
                with suppress(LeaseExpiredError):  # the nack had succeeded
                    lease.nack()
            raise

    def _loader(self) -> None:
        with self._buffer.loader(1, tasks="gsm8k", lease=True, ttl=600, prefetch=1) as loader:
            for _ in range(3):
                next(loader)

    def _wait(self) -> None:
        with suppress(NotEnoughGroupsError):
            self._buffer.lease(1, tasks="nothing", ttl=600, timeout=0.05)

    def _open(self) -> None:
        with blocking.Store.open(self._url, run="other") as store:
            store.buffer("math")


def _read(url: str, query: str) -> list[Any]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(Path(url.removeprefix("sqlite:///")), timeout=60)) as file:
            return [row[0] for row in file.execute(query)]

    async def fetch() -> list[Any]:
        connection = await asyncpg.connect(url)
        try:
            return [row[0] for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return asyncio.run(fetch())


if __name__ == "__main__":
    main(*sys.argv[1:])
