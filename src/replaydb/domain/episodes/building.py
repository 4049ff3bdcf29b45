"""The three ways to build an episode, each converted to one row of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    Versions,
    concatenate_named,
    frozen,
    same,
    spread,
    to_bool,
    to_int32,
    to_versions,
)
from replaydb.domain.episodes.turns import Turn
from replaydb.errors import InvalidInputError

#: Name of the token extra with the rewards of merged turns.
TOKEN_REWARDS = "token_rewards"  # noqa: S105 - not a password


class Row(NamedTuple):
    """Common form of the three ways to build an episode. The last four fields are for turns."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: ArrayLike | None
    prompt_length: int
    policy_version: ArrayLike | None
    response: int | None = None
    reward: float | None = None
    turns: tuple[Turn, ...] = ()
    token_extras: Mapping[str, Array] = MappingProxyType({})
    taken: frozenset[str] = frozenset()


def row_of_tokens(
    token_ids: ArrayLike, loss_mask: ArrayLike, logprobs: ArrayLike, version: ArrayLike
) -> Row:
    """Return the row for `token_ids` and `loss_mask`."""
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
    """Return the row for `prompt_ids` and `response_ids`."""
    prompt = to_int32("prompt_ids", prompt_ids)
    reply = to_int32("response_ids", response_ids)
    tokens = frozen(np.concatenate([prompt, reply]), "<i4")
    mask = np.ones(len(reply), bool) if loss_mask is None else to_bool("loss_mask", loss_mask)
    mask = spread("loss_mask", mask, len(tokens), len(reply))
    return Row(tokens, mask, logprobs, len(prompt), version, len(reply))


def row_of_turns(
    turns: ArrayLike, loss_mask: ArrayLike, logprobs: ArrayLike, version: ArrayLike
) -> Row:
    """Return the row for concatenated turns."""
    steps = checks.instances("turns", turns, Turn)
    if not steps:
        raise InvalidInputError("turns", "at least one", "none")
    of_turns = {"loss_mask": loss_mask, "logprobs": logprobs}
    if any(turn.policy_version is not None for turn in steps):
        of_turns["policy_version"] = version
        version = joint_versions(steps, [turn.policy_version for turn in steps])
    for name, value in of_turns.items():
        if value is not None:
            raise InvalidInputError(name, "None, since the turns have their own", "a value")
    tokens, mask = joint_tokens(steps)
    rewards = [turn.reward for turn in steps if turn.reward is not None]
    extras = concatenate_named(
        "token_extras",
        [turn.token_extras for turn in steps],
        [turn.num_tokens for turn in steps],
    )
    return Row(
        token_ids=tokens,
        loss_mask=mask,
        logprobs=joint_logprobs(steps),
        prompt_length=len(steps[0].prompt_ids),
        policy_version=version,
        reward=sum(rewards) if rewards else None,
        turns=steps,
        token_extras=extras,
        taken=frozenset(extras) | ({TOKEN_REWARDS} if rewards else set()),
    )


def joint_tokens(turns: Sequence[Turn]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return token ids [T], turn after turn, and the loss mask [T], False on prompts."""
    parts = [part for turn in turns for part in (turn.prompt_ids, turn.response_ids)]
    masks = [
        mask for turn in turns for mask in (np.zeros(len(turn.prompt_ids), bool), turn.loss_mask)
    ]
    return frozen(np.concatenate(parts), "<i4"), frozen(np.concatenate(masks), "?")


def joint_logprobs(turns: Sequence[Turn]) -> NDArray[np.float32] | None:
    """Return logprobs, float32 [T]: 0.0 on prompts, NaN where unknown; None if no turn has any."""
    if all(turn.logprobs is None for turn in turns):
        return None
    parts: list[NDArray[np.float32]] = []
    for turn in turns:
        absent = np.full(len(turn.response_ids), np.nan, np.float32)
        parts.append(np.zeros(len(turn.prompt_ids), np.float32))
        parts.append(absent if turn.logprobs is None else turn.logprobs)
    return np.concatenate(parts)


def joint_versions(turns: Sequence[Turn], versions: Sequence[Versions]) -> Versions:
    """Return one version if all turns have the same, else int32 [T]; None if any is unknown.

    Args:
        turns: The turns.
        versions: For each turn one version, one per token of its response, or one per token.
    """
    first = versions[0]
    if isinstance(first, int) and all(same(version, first) for version in versions):
        return first
    rows = []
    for turn, version in zip(turns, versions, strict=True):
        if version is None:
            return None
        if isinstance(version, int):
            version = np.full(turn.num_tokens, version, np.int32)
        elif len(version) != turn.num_tokens:
            version = to_versions(version, turn.num_tokens, len(turn.response_ids))
        rows.append(np.asarray(version, np.int32))
    return np.concatenate(rows)
