"""The part of a payload with values that arrived after its episodes: a JSON object in a frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from replaydb.codec import framing
from replaydb.codec.framing import corrupt
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.building import TOKEN_REWARDS
from replaydb.domain.episodes.segments import TURN_REWARDS
from replaydb.domain.episodes.turns import set_fields
from replaydb.util import escapes

#: New values of episodes, by position as text. Those of their turns are in "turns", by number.
Late = dict[str, dict[str, Any]]


def encode(values: Mapping[str, Any], version: int) -> memoryview:
    """Return the part, in a version of the payload format."""
    text = escapes.to_json(values, separators=(",", ":"), sort_keys=True)
    return framing.write({"json": np.frombuffer(text.encode(), np.uint8)}, version)


def decode(data: bytes | memoryview, newest: int) -> Late:
    """Return what `encode` was given.

    Raises:
        CorruptPayloadError: The bytes are truncated, altered or foreign.
        ClientTooOldError: They are of a newer version of the format.
    """
    tensors = framing.read(memoryview(data).toreadonly(), newest).tensors
    if tensors.keys() != {"json"}:
        corrupt(f"late values in the sections {sorted(tensors)}")
    found: Late = escapes.unescaped(framing.parse_json(tensors["json"][1].tobytes()))
    return found


def apply(late: Mapping[str, Any], episodes: Mapping[int, Episode]) -> None:
    """Set values of decoded episodes, by position.

    Raises:
        CorruptPayloadError: They are invalid, or of episodes or turns that do not exist.
    """
    try:
        for position, values in late.items():
            episode = episodes[int(position)]
            turns = values.pop("turns", {})
            _set(episode, values)
            for number, of_turn in turns.items():
                _set(episode.turns[int(number)], of_turn)
            if any("reward" in of_turn for of_turn in turns.values()):
                _remove_token_rewards(episode)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        corrupt(f"late values: {error!r}", error)


def restore(episode: Episode, number: int, reward: float | None) -> None:
    """Give a turn the reward that it had before, and those of its tokens if it is their sum.

    Rewards of tokens of the whole episode come back with the last turn that had no reward before.
    """
    turn = set_fields(episode.turns[number], reward=reward)
    if all(one.reward is None for one in episode.turns):
        for name, values in vars(episode).get("earlier", {}).items():
            getattr(episode, name)[TOKEN_REWARDS] = values
    if reward is not None and (column := vars(turn).get("earlier")) is not None:
        turn.segment.columns[TURN_REWARDS] = column
        rewards = turn.token_rewards
        if rewards is None or not np.isclose(rewards.sum(dtype=np.float64), reward):
            del turn.segment.columns[TURN_REWARDS]


def _remove_token_rewards(episode: Episode) -> None:
    """Remove the extra with rewards of tokens, which no episode with rewards of turns can have."""
    extras: dict[str, dict[str, Any]] = {
        "extras": episode.extras,
        "joint_extras": episode.joint_extras,
    }
    earlier = {name: it.pop(TOKEN_REWARDS) for name, it in extras.items() if TOKEN_REWARDS in it}
    if earlier:
        set_fields(episode, earlier=earlier)


def _set(target: Episode | Turn, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name == "metadata":
            added = checks.json_object(name, value, checks.text)
            set_fields(target, metadata={**target.metadata, **added})
        elif name == "reward" or (name == "advantage" and isinstance(target, Episode)):
            if isinstance(target, Turn) and TURN_REWARDS in target.segment.columns:
                # They would contradict the new reward.
                set_fields(target, earlier=target.segment.columns.pop(TURN_REWARDS))
            set_fields(target, **{name: checks.float32(name, value)})
        else:
            raise LookupError(name)
