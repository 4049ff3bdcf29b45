"""Conversion of samples to groups whose turns are the samples, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import replaydb as rdb
from replaydb.integrations.slime.samples import ARRAYS, Sample, to_fields, to_turn
from replaydb.integrations.values import Arrays, completed, encode, is_same, without

#: The key of the metadata with all that no column has.
_KEY = "slime"


def from_samples(
    samples: Iterable[Any], task_name: str = "slime", *, reward_key: str | None = None
) -> rdb.EpisodeGroup:
    """Convert the samples of one prompt to a group. It is `aborted` if one of them is unfinished.

    Args:
        samples: Samples, or the dicts of their `to_dict`. A list among them has the samples of one
            rollout.
        task_name: Name of the task.
        reward_key: Key of the reward if rewards are dicts, as slime's argument of this name.

    Raises:
        InvalidInputError: A field cannot be stored, or does not fit the tokens of its sample.
    """
    if isinstance(samples, str | Mapping) or not isinstance(samples, Iterable):
        raise rdb.InvalidInputError("samples", "a list of samples", type(samples).__name__)
    rollouts = [
        [_record(f"samples[{i}][{j}]", sample) for j, sample in enumerate(item)]
        if isinstance(item, list)
        else _record(f"samples[{i}]", item)
        for i, item in enumerate(samples)
    ]
    known = [sample for item in rollouts for sample in (item if isinstance(item, list) else [item])]
    prompt = next((_prompt(sample.get("prompt")) for sample in known), None)
    is_open = any(sample.get("status") in ("pending", "aborted") for sample in known)
    return rdb.EpisodeGroup(
        task_name,
        [_episode(f"samples[{i}]", item, prompt, reward_key) for i, item in enumerate(rollouts)],
        status="aborted" if is_open else "completed",
        prompt=prompt,
    )


def to_samples(group: rdb.EpisodeGroup, kind: Any = None) -> list[Any]:
    """Convert a group of `from_samples` back to its samples, as dicts.

    Args:
        group: The group.
        kind: The class `Sample`, to return the instances of its `from_dict`.

    Raises:
        InvalidInputError: The group is none of `from_samples`.
    """
    found: list[Any] = []
    for episode in group.episodes:
        if _KEY not in episode.metadata:
            raise rdb.InvalidInputError("group", "a group of from_samples", repr(group))
        stored = episode.metadata[_KEY]
        samples = [
            completed(one, to_fields(turn, group.prompt, one["forms"]), episode.extras)
            for one, turn in zip(stored["samples"], episode.turns, strict=True)
        ]
        made = samples if kind is None else [kind.from_dict(sample) for sample in samples]
        found.append(made if stored["nested"] else made[0])
    return found


def _record(where: str, sample: Any) -> Sample:
    if not isinstance(sample, Mapping) and not hasattr(sample, "to_dict"):
        raise rdb.InvalidInputError(where, "a Sample or its dict", type(sample).__name__)
    record: Sample = sample if isinstance(sample, Mapping) else sample.to_dict()
    return record


def _prompt(prompt: Any) -> Any:
    """Return a prompt if the group preserves it: text, or messages of plain JSON; else None."""
    arrays: Arrays = {}
    is_messages = isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt)
    if not isinstance(prompt, str) and not is_messages:
        return None
    return prompt if is_same(encode("prompt", prompt, arrays), prompt) else None


def _episode(
    where: str, item: Sample | list[Sample], prompt: Any, reward_key: str | None
) -> rdb.Episode:
    kinds: dict[str, Any] = {}
    arrays: Arrays = {}
    turns, stored = [], []
    for j, sample in enumerate(item if isinstance(item, list) else [item]):
        path = f"{where}[{j}]" if isinstance(item, list) else where
        turn = to_turn(path, sample, kinds, reward_key)
        forms = {name: type(sample[name]).__name__ for name in ARRAYS if name in sample}
        usual = to_fields(turn, prompt, forms)
        turns.append(turn)
        stored.append({"forms": forms, **without(path, sample, usual, arrays)})
    tokens: dict[str, Any] = {"turns": turns} if turns else {"prompt_ids": [], "response_ids": []}
    metadata = {_KEY: {"nested": isinstance(item, list), "samples": stored}}
    return rdb.Episode(**tokens, metadata=metadata, extras=arrays)
