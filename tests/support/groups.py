"""Small groups and episodes to put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replaydb import Episode, EpisodeGroup, Turn

#: Text that neither engine can store unchanged, and its stored form.
GENERATED = "NUL \0, \ud83d\ude00, ␛0000 and 😀\n"
STORED = "NUL ␛0000, ␛d83d␛de00, ␛241b0000 and 😀\n"


def episode(reward: float | None = 1.0, version: int | None = None, **fields: Any) -> Episode:
    """Return an episode of two prompt and three response tokens."""
    return Episode(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        logprobs=[-0.5, -0.25, -1.0],
        reward=reward,
        policy_version=version,
        **fields,
    )


def group(
    uid: str | None = None,
    task: str = "gsm8k",
    *,
    rewards: Sequence[float | None] = (1.0, 0.0),
    version: int | None = None,
    **fields: Any,
) -> EpisodeGroup:
    """Return a group with one episode per reward."""
    episodes = [episode(reward, version) for reward in rewards]
    return EpisodeGroup(task, episodes, group_uid=uid, **fields)


def groups(count: int, task: str = "gsm8k", **fields: Any) -> list[EpisodeGroup]:
    """Return groups whose uids are their task and position: `gsm8k-0` and so on."""
    return [group(f"{task}-{i}", task, **fields) for i in range(count)]


def long_group(uid: str, num_tokens: int, task: str = "gsm8k", **fields: Any) -> EpisodeGroup:
    """Return a group with one episode of many tokens and a text."""
    row = Episode(
        token_ids=list(range(num_tokens)),
        loss_mask=[True] * num_tokens,
        reward=1.0,
        text="x" * num_tokens,
    )
    return EpisodeGroup(task, [row], group_uid=uid, **fields)


def conversation() -> Episode:
    """Return an episode of two turns."""
    return Episode(
        turns=[
            Turn(
                prompt_ids=[1, 2],
                response_ids=[3],
                logprobs=[-0.5],
                reward=0.25,
                policy_version=3,
                finish_reason="tool_calls",
                metadata={"tool": "python"},
            ),
            Turn(
                prompt_ids=[4],
                response_ids=[5, 6],
                loss_mask=[True, False],
                token_rewards=[0.125, 0.375],
                policy_version=[4, 5],
                token_extras={"experts": [[7], [8], [9]]},
            ),
        ],
        text="two turns",
    )
