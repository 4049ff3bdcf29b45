"""Worker processes, as controlled by the driver: start, requests, memory and kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.catalog import Peer
from benchmarks.peers.environments import CHECKOUT

_PSS = re.compile(r"^Pss(?:_File)?:\s+(\d+) kB", re.MULTILINE)


class WorkerError(Exception):
    """A worker exited before it replied; the message has the end of its output."""


class WorkerProcess:
    """A worker process; it opens its store when `open` is called."""

    def __init__(self, peer: Peer, python: Path, folder: Path) -> None:
        self._name = peer.name
        self._servers: list[int] = []
        self._log = folder / "worker.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.worker", peer.module, peer.adapter],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=CHECKOUT,
                env=_variables(peer),
            )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command and return the reply."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([command, arguments]) + "\n")
            process.stdin.flush()
        reply = process.stdout.readline()
        if not reply:
            printed = self._log.read_text(encoding="utf8", errors="replace")[-2000:]
            raise WorkerError(f"{self._name} exited during {command!r}:\n{printed}")
        return json.loads(reply)

    def open(self, folder: Path, policy: str, capacity: int, size: str) -> float:
        """Open the store, and record its server processes. Return the seconds it took."""
        seconds: float = self.ask(
            "open", folder=str(folder), policy=policy, capacity=capacity, size=size
        )
        self._servers = self.ask("pids")
        return seconds

    def memory(self) -> tuple[int, int]:
        """Return the memory of all its processes in bytes, shared pages counted once.

        The second value is the part that is mapped from files.
        """
        total = mapped = 0
        for process in self._processes():
            with suppress(OSError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                sizes = [1024 * int(size) for size in _PSS.findall(text)]
                total, mapped = total + sizes[0], mapped + sizes[1]
        return total, mapped

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""
        processes = self._processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        # Orphans are reaped later; PostgreSQL does not start until its old process id is free.
        psutil.wait_procs(processes, timeout=30)

    def close(self) -> None:
        """Let the store shut down; kill it if it does not within 30 seconds."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()

    def _processes(self) -> list[psutil.Process]:
        parents = [
            psutil.Process(pid)
            for pid in (self._process.pid, *self._servers)
            if psutil.pid_exists(pid)
        ]
        return parents + [child for one in parents for child in one.children(recursive=True)]


def _variables(peer: Peer) -> dict[str, str]:
    """Return the environment variables; PYTHONPATH only for peers in this environment."""
    return {
        key: value
        for key, value in os.environ.items()
        if peer.environment is None or key != "PYTHONPATH"
    }
