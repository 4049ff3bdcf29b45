"""The three ways to build an episode, each of which comes down to one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.episodes.arrays import (
    ArrayLike,
    Versions,
    frozen,
    same,
    spread,
    to_bool,
    to_int32,
    to_versions,
)
from replaydb.episodes.turns import Turn
from replaydb.errors import InvalidInputError


class Row(NamedTuple):
    """What the three ways to build an episode come down to."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: ArrayLike | None
    prompt_length: int
    policy_version: ArrayLike | None
    response: int | None = None
    reward: float | None = None
    turns: tuple[Turn, ...] = ()


def row_of_tokens(
    token_ids: ArrayLike, loss_mask: ArrayLike, logprobs: ArrayLike, version: ArrayLike
) -> Row:
    """Of `token_ids` and `loss_mask`."""
    tokens = to_int32("token_ids", token_ids)
    if loss_mask is None:
        raise InvalidInputError("loss_mask", f"shape [{len(tokens)}]", None)
    mask = spread("loss_mask", to_bool("loss_mask", loss_mask), len(tokens))
    prompt_length = int(mask.argmax()) if mask.any() else len(mask)
    return Row(tokens, mask, logprobs, prompt_length, version)


def row_of_response(
    prompt_ids: ArrayLike,
    response_ids: ArrayLike,
    loss_mask: ArrayLike,
    logprobs: ArrayLike,
    version: ArrayLike,
) -> Row:
    """Of `prompt_ids` and `response_ids`."""
    prompt = to_int32("prompt_ids", prompt_ids)
    reply = to_int32("response_ids", response_ids)
    tokens = frozen(np.concatenate([prompt, reply]), "<i4")
    mask = np.ones(len(reply), bool) if loss_mask is None else to_bool("loss_mask", loss_mask)
    mask = spread("loss_mask", mask, len(tokens), len(reply))
    return Row(tokens, mask, logprobs, len(prompt), version, len(reply))


def row_of_turns(
    turns: ArrayLike, loss_mask: ArrayLike, logprobs: ArrayLike, version: ArrayLike
) -> Row:
    """Of turns, put end to end."""
    steps = checks.instances("turns", turns, Turn)
    if not steps:
        raise InvalidInputError("turns", "at least one", "none")
    of_turns = {"loss_mask": loss_mask, "logprobs": logprobs}
    if any(turn.policy_version is not None for turn in steps):
        of_turns["policy_version"] = version
        version = _joint_versions(steps)
    for name, value in of_turns.items():
        if value is not None:
            raise InvalidInputError(name, "None, since the turns have their own", "a value")
    tokens, mask = _joint_tokens(steps)
    rewards = [turn.reward for turn in steps if turn.reward is not None]
    return Row(
        token_ids=tokens,
        loss_mask=mask,
        logprobs=_joint_logprobs(steps),
        prompt_length=len(steps[0].prompt_ids),
        policy_version=version,
        reward=sum(rewards) if rewards else None,
        turns=steps,
    )


def _joint_tokens(turns: Sequence[Turn]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids [T], turn after turn, and the mask [T] that is True on the responses."""
    parts = [part for turn in turns for part in (turn.prompt_ids, turn.response_ids)]
    mask = np.repeat([False, True] * len(turns), [len(part) for part in parts])
    return frozen(np.concatenate(parts), "<i4"), frozen(mask, "?")


def _joint_logprobs(turns: Sequence[Turn]) -> NDArray[np.float32] | None:
    """float32 [T]: 0.0 on prompts, NaN on responses without; None if no turn has any."""
    if all(turn.logprobs is None for turn in turns):
        return None
    parts: list[NDArray[np.float32]] = []
    for turn in turns:
        absent = np.full(len(turn.response_ids), np.nan, np.float32)
        parts.append(np.zeros(len(turn.prompt_ids), np.float32))
        parts.append(absent if turn.logprobs is None else turn.logprobs)
    return np.concatenate(parts)


def _joint_versions(turns: Sequence[Turn]) -> Versions:
    """One version if all turns have the same, else int32 [T]; None as soon as one is unknown."""
    versions = [turn.policy_version for turn in turns]
    if any(version is None for version in versions):
        return None
    first = versions[0]
    if isinstance(first, int) and all(same(version, first) for version in versions):
        return first
    rows = [
        np.full(turn.num_tokens, turn.policy_version, np.int32)
        if isinstance(turn.policy_version, int)
        else to_versions(turn.policy_version, turn.num_tokens, len(turn.response_ids))
        for turn in turns
    ]
    return np.concatenate(cast("list[NDArray[np.int32]]", rows))
