"""Create `revision_NNNN.db.gz` with the replaydb of that revision.

    python tests/data/make_revision.py

Each file was created once by this script, which documents their content. A new revision gets a new
file. Never recreate the file of a revision that was released.
"""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
import tempfile
from pathlib import Path

import replaydb as rdb
from replaydb.database.tables.schema import REVISIONS

TARGET = Path(__file__).with_name(f"revision_{REVISIONS[-1]}.db.gz")


async def fill(path: Path) -> None:
    async with rdb.Store.open(f"sqlite:///{path}", run="qwen-7b-a") as store:
        buffer = await store.buffer("math", max_staleness=4, seed=7)
        for number in range(6):
            await buffer.put(
                rdb.EpisodeGroup(
                    group_uid=f"group-{number}",
                    prompt_uid=f"gsm8k/{number}",
                    task_name="gsm8k" if number % 2 == 0 else "code",
                    episodes=[
                        rdb.Episode(
                            prompt_ids=[10, 11, 12],
                            response_ids=[number, position],
                            logprobs=[-0.5, -0.25],
                            reward=float(position),
                            policy_version=2,
                        )
                        for position in range(2)
                    ],
                    tags={"level": "hard"},
                )
            )
        await buffer.advance_policy(3)
        await buffer.delete([6])
        await buffer.sample(2, rdb.Uniform())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.db"
        asyncio.run(fill(path))
        connection = sqlite3.connect(path)
        # Move the content of the WAL into the file.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        TARGET.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


if __name__ == "__main__":
    main()
