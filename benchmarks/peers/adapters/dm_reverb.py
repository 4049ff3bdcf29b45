"""Reverb, with its server in a separate process or in the worker process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import reverb

from benchmarks.peers.groups import Group, Shape

TABLE = "bench"
# Without a signature, a sample is a flat list in the order of the sorted names.
NAMES = sorted(Shape(1, 1).fields)
SELECTORS = {
    "uniform": reverb.selectors.Uniform,
    "priority": lambda: reverb.selectors.Prioritized(1.0),
    "order": reverb.selectors.Fifo,
}


def serve(folder: Path, policy: str, capacity: int) -> reverb.Server:
    """Start a server with one table and sampler. It loads the last checkpoint, if there is one."""
    table = reverb.Table(
        name=TABLE,
        sampler=SELECTORS[policy](),
        remover=reverb.selectors.Fifo(),
        max_size=capacity,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(folder))
    return reverb.Server([table], checkpointer=checkpointer)


class Adapter:
    """Groups are in the memory of a server, reachable over the network; one sampler per table.

    A put is acknowledged when it is in the server's memory. Draws are with replacement, and return
    copies. A checkpoint contains all data, and blocks all requests.
    """

    POLICIES = tuple(SELECTORS)
    ONE_STORE = False
    NONE: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._client = self._connect(folder, policy, capacity)
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=1)

    def put(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._writer.append(group)
            step = {name: column[-1:] for name, column in self._writer.history.items()}
            self._writer.create_item(TABLE, 1.0, step)
        self._writer.flush()

    def sample(self, policy: str, n: int) -> list[reverb.ReplaySample]:
        return list(self._client.sample(TABLE, n, emit_timesteps=False))

    def parts(self, sample: list[reverb.ReplaySample]) -> list[Group]:
        return [
            {name: array[0] for name, array in zip(NAMES, one.data, strict=True)} for one in sample
        ]

    def update_priorities(self, sample: list[reverb.ReplaySample], values: np.ndarray) -> None:
        keys = [one.info.key for one in sample]
        self._client.mutate_priorities(TABLE, dict(zip(keys, values.tolist(), strict=True)))

    def checkpoint(self) -> None:
        self._client.checkpoint()

    def count(self) -> int:
        return self._client.server_info()[TABLE].current_size

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._writer.close()
        self._server.terminate()
        self._server.wait()

    def _connect(self, folder: Path, policy: str, capacity: int) -> reverb.Client:
        command = [sys.executable, "-m", __name__, str(folder), policy, str(capacity)]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        port = next(line for line in self._server.stdout if line.startswith("port"))
        return reverb.Client(f"localhost:{port.split()[1]}")


class InProcess(Adapter):
    """The server runs in the process of its only client; samples do not pass through gRPC."""

    def close(self) -> None:
        self._writer.close()
        self._server.stop()

    def _connect(self, folder: Path, policy: str, capacity: int) -> reverb.Client:
        self._server = serve(folder, policy, capacity)
        return self._server.localhost_client()


if __name__ == "__main__":
    server = serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print("port", server.port, flush=True)
    server.wait()
