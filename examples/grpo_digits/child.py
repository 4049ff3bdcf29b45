"""Child processes of the demo, as controlled by the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.grpo_digits.job import URL_VARIABLE

CHECKOUT = Path(__file__).parents[2]
SECONDS_TO_STOP = 10.0


class ChildFailedError(Exception):
    """A process exited unexpectedly; the message ends with the end of its log."""


class Child:
    """A module of this package that runs in a child process while the context is open.

    The process has its own session, so that Ctrl-C in a terminal reaches only the parent.
    """

    def __init__(self, module: str, *arguments: object, log: Path, url: str) -> None:
        self._command = ["-m", f"examples.grpo_digits.{module}", *map(str, arguments)]
        self._environment = os.environ | {URL_VARIABLE: url, "OMP_NUM_THREADS": "1"}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._expected = {0}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await self._stop()
            self.check()
        else:
            await self.kill()  # its result is not needed, and the store tolerates a kill

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start or restart the process."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._command,
                stdout=log,
                stderr=log,
                cwd=CHECKOUT,
                env=self._environment,
                start_new_session=True,
            )

    async def kill(self) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def ask_to_stop(self) -> None:
        """Send SIGTERM: the process finishes its step and exits."""
        self._expected.add(-signal.SIGTERM)
        self._send(signal.SIGTERM)

    def check(self) -> None:
        """Raise `ChildFailedError` if the process exited unexpectedly."""
        if self.exit_code is not None and self.exit_code not in self._expected:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise ChildFailedError(f"{self._log.stem} exited with {self.exit_code}:\n{tail}")

    async def _stop(self) -> None:
        if self._process is None:
            return
        self.ask_to_stop()
        try:
            await asyncio.wait_for(self._process.wait(), SECONDS_TO_STOP)
        except TimeoutError:
            await self.kill()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self.exit_code is None:
            self._process.send_signal(number)
