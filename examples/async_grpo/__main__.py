"""Supervisor: starts the ranks and the workers, and restarts what dies.

If a rank dies, the others cannot finish the step, so all of them are killed and started again. A
worker is restarted alone. The supervisor keeps no state: it can be killed too, and started again
with another number of ranks. Its processes then end, and it waits for them before it starts new
ones, so that there are never two trainers.

The processes are forked, which saves each of them the seconds of importing torch.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._dynamo  # fully_shard imports it

from examples.async_grpo.job import BUFFER, NUM_WORKERS, parser_of, phase
from examples.async_grpo.trainer import train
from examples.async_grpo.worker import work
from replaydb import blocking

#: Of the ranks, or of one worker.
MAX_RESTARTS = 20


def main() -> None:
    options = parse_options()
    kills = options.folder / "kill"
    kills.mkdir(parents=True, exist_ok=True)
    for name in options.kill:
        (kills / name).touch()
    with (options.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # forked processes hold it too, until the last one ends
        supervise(options.url, options.folder, options.steps, options.ranks)
    report(options.url)


def parse_options() -> argparse.Namespace:
    parser = parser_of("examples.async_grpo")
    parser.add_argument("--steps", type=int, default=20, help="number of steps in all")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks of the trainer")
    parser.add_argument(
        "--kill",
        nargs="*",
        default=[],
        metavar="PHASE-NUMBER-PROCESS",
        help="kill a rank in a phase of a step (leased, computed, checkpointed or acked, such as "
        "leased-2-rank0), a worker at a position of its prompts (generated or put, such as "
        "put-8-worker1), or the supervisor before a restart of the ranks (restart-0-supervisor)",
    )
    return parser.parse_args()


def supervise(url: str, folder: Path, num_steps: int, num_ranks: int) -> None:
    """Keep everything running until all ranks have taken the last step."""

    def start_worker(number: int) -> BaseProcess:
        return start(run_worker, url, folder, number)

    def start_ranks() -> list[BaseProcess]:
        port = free_port()
        return [
            start(run_rank, rank, num_ranks, port, url, folder, num_steps)
            for rank in range(num_ranks)
        ]

    workers = [start_worker(number) for number in range(NUM_WORKERS)]
    ranks = start_ranks()
    restarts: Counter[str] = Counter()
    try:
        while any(rank.exitcode != 0 for rank in ranks):
            # With a timeout, because the last rank may end before its sentinel is in this list.
            wait([one.sentinel for one in ranks + workers if one.exitcode is None], timeout=0.5)
            if any(rank.exitcode for rank in ranks):
                kill(ranks)
                phase(folder, f"restart-{restarts['ranks']}-supervisor")
                count(restarts, "ranks", ranks)
                ranks = start_ranks()
            for number, worker in enumerate(workers):
                if worker.exitcode is not None:
                    count(restarts, f"worker {number}", [worker])
                    workers[number] = start_worker(number)
    finally:
        kill(workers + ranks)


def run_rank(rank: int, num_ranks: int, port: int, url: str, folder: Path, num_steps: int) -> None:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}"}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    train(url, folder, num_steps)


def run_worker(url: str, folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(work(url, folder, number))


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Run a function in a process that ends with this one."""
    parent = os.getpid()

    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor gets Ctrl-C and kills it
        threading.Thread(target=end_after, args=(parent,), daemon=True).start()
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def kill(processes: Iterable[BaseProcess]) -> None:
    """Kill processes and wait until they have ended. None of them needs to shut down."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def count(restarts: Counter[str], part: str, processes: Iterable[BaseProcess]) -> None:
    """Log and count a restart. Exit after too many."""
    print(f"restart {part}, exit codes {[one.exitcode for one in processes]}", flush=True)
    restarts[part] += 1
    if restarts[part] > MAX_RESTARTS:
        sys.exit(f"{part}: more than {MAX_RESTARTS} restarts")


def free_port() -> int:
    """Return a port for the ranks. If another process takes it first, they are restarted."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def report(url: str) -> None:
    """Print the draws of each step, and the outcomes of their groups."""
    with blocking.Store.open(url, read_only=True) as store:
        buffer = store.buffer(BUFFER, create=False)
        for draw in reversed(buffer.draws()):
            outcomes = Counter(map(str, draw.outcomes))
            print(f"step {draw.step}: draw {draw.id}, groups by outcome: {dict(outcomes)}")
        print(f"policy version {buffer.policy_version}, groups: {buffer.count()}")


if __name__ == "__main__":
    main()
