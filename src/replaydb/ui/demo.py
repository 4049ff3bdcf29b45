"""Demo store of the web UI."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from replaydb.buffer.store import Store
from replaydb.domain.episodes import Episode, EpisodeGroup, Turn
from replaydb.domain.policies import Fifo, Prioritized

#: Stores that `make demo` leaves in the folder for temporary files.
LEFT_BY_DEMO = "replaydb-demo-*/replaydb.db"
#: Policy versions of a generated store.
VERSIONS = 24


@contextmanager
def demo_store() -> Iterator[str]:
    """Yield the URL of the newest store of `make demo`, or of a generated temporary one."""
    folder = Path(tempfile.gettempdir())
    # Any user can create files in this folder, so only files of the current user are opened.
    left = [it for it in folder.glob(LEFT_BY_DEMO) if it.stat().st_uid == os.getuid()]
    if left:
        yield f"sqlite:///{max(left, key=lambda it: it.stat().st_mtime)}"
        return
    with tempfile.TemporaryDirectory(prefix="replaydb-ui-") as temporary:
        url = f"sqlite:///{temporary}/demo.db"
        asyncio.run(fill(url))
        yield url


async def fill(url: str) -> None:
    """Create two tasks whose rewards rise over policy versions, with draws, leases and replay."""
    chance = np.random.default_rng(0)
    async with Store.open(url, run="demo") as store:
        buffer = await store.buffer("math", max_staleness=6, on_ack="return")
        for version in range(VERSIONS):
            await buffer.advance_policy(version)
            skill = 0.1 + 0.8 * version / VERSIONS
            sums = [_sum_group(chance, skill, version, number) for number in range(8)]
            tools = [_tool_group(chance, skill, version, number) for number in range(2)]
            await buffer.put([*sums, *tools])
            async with buffer.lease(6, Fifo(), ttl=600, step=2 * version):
                pass
            await buffer.sample(3, Prioritized(), step=2 * version + 1)
        await buffer.lease(4, Fifo(), ttl=3600, step=2 * VERSIONS, owner="trainer-0")


def _sum_group(
    chance: np.random.Generator, skill: float, version: int, number: int
) -> EpisodeGroup:
    """Return four answers to a sum, each correct with probability `skill`."""
    left, right = (int(it) for it in chance.integers(10, 99, 2))
    prompt = f"What is {left} + {right}?"
    episodes = []
    for _ in range(4):
        is_right = chance.random() < skill
        answer = left + right if is_right else left + right + int(chance.integers(1, 9))
        text = f"{left} and {right} make <answer>{answer}</answer>"
        ids = list(text.encode())
        episodes.append(
            Episode(
                prompt_ids=list(prompt.encode()),
                response_ids=ids,
                logprobs=-chance.exponential(0.4, len(ids)),
                reward=float(is_right),
                policy_version=version,
                text=text,
                finish_reason="stop" if chance.random() < 0.9 else "length",
            )
        )
    return EpisodeGroup(
        "sums",
        episodes,
        prompt=prompt,
        prompt_uid=f"sums/{number}",
        tags={"level": "hard" if left + right > 99 else "easy"},
    )


def _tool_group(
    chance: np.random.Generator, skill: float, version: int, number: int
) -> EpisodeGroup:
    """Return two conversations with a tool call."""
    episodes = []
    for _ in range(2):
        is_right = bool(chance.random() < skill)
        question, call, day = b"Which day is it?", b"call: today()", b"Sunday"
        answer = b"Sunday." if is_right else b"Monday."
        turns = [
            Turn(
                prompt_ids=list(question),
                response_ids=list(call),
                logprobs=-chance.exponential(0.4, len(call)),
                policy_version=version,
                finish_reason="tool_calls",
                metadata={"tool": "today"},
            ),
            Turn(
                prompt_ids=list(question + call + day),  # the whole context
                response_ids=list(answer),
                logprobs=-chance.exponential(0.4, len(answer)),
                policy_version=version,
                reward=float(is_right),
                finish_reason="stop",
            ),
        ]
        text = b"\n".join([call, day, answer]).decode()
        episodes.append(Episode(turns=turns, text=text))
    return EpisodeGroup("tools", episodes, prompt="Which day is it?", prompt_uid=f"tools/{number}")
