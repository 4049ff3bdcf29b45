"""Rollout states for tests."""

from __future__ import annotations

from typing import Any

from xtuner.v1.data_proto.rl_data import RolloutState, Status


def state(uid: int, **fields: Any) -> RolloutState:
    """A completed state of two tokens of prompt and three of response."""
    return RolloutState(**{
        "group_id": uid,
        "rollout_id": uid,
        "message": [{"role": "user", "content": f"prompt {uid}"}],
        "prompt_ids": [1, 2],
        "tokens": [1, 2],
        "response": f"response {uid}",
        "response_ids": [5, 6, 7],
        "logprobs": [-0.5, -0.25, -1.0],
        "response_mask": [1, 0, 1],
        "finish_reason": "stop",
        "reward": {"score": 1.0},
        "status": Status.COMPLETED,
    } | fields)  # fmt: skip


def uids(groups: list[list[RolloutState]]) -> list[list[int]]:
    return [[one.rollout_id for one in group] for group in groups]
