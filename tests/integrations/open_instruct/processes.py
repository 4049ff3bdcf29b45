"""Functions that run in other processes and use a table."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from integrations.open_instruct.upstream import ProcessedResult, processed
from replaydb.integrations.open_instruct import Table


def table(url: str, *, run: str | None = None) -> Table[ProcessedResult]:
    return Table(1000, "fifo", "fifo", url=url, kind=ProcessedResult, run=run)


def die_training(url: str, count: int) -> None:
    """Insert items, sample two for step 7, and be killed during the step."""
    mine = table(url, run="before")
    for i in range(count):
        mine.insert(f"key-{i}", processed(f"prompt-{i}"))
    mine.sample(2, step=7)
    os.kill(os.getpid(), signal.SIGKILL)


def consume(url: str, times: int, took: str) -> None:
    """Sample three at a time, and write their names to a file."""
    mine = table(url)
    batches = [mine.sample(3) or [] for _ in range(times)]
    mine.shutdown()
    Path(took).write_text("\n".join(str(one.result.prompt_id) for b in batches for one in b))
