"""Payloads of one part, in format 1 unless another one is named, and altered ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from replaydb import Episode, Turn, codec
from replaydb.codec import Contents, compaction, framing
from replaydb.domain.episodes.arrays import TORCH_CODES, Array, from_bits
from replaydb.domain.episodes.turns import MARKS
from replaydb.errors import CorruptPayloadError


def encode(*given: Any, version: int = 1, **options: Any) -> bytes | memoryview:
    """Return episodes, and perhaps a context, as the only part of a payload."""
    [part] = codec.encode(*given, version=version, **options)
    return part.data


def decode(data: bytes | memoryview, checksum: int | None = None) -> Contents:
    """Return what a payload of one part has, if it has this checksum."""
    if checksum is not None and (wrong := codec.mismatch(data, checksum)):
        raise CorruptPayloadError(wrong)
    return codec.decode([data])


def tensors_of(data: bytes | memoryview) -> dict[str, Array]:
    """Return the expanded tensors of a part in format 2."""
    found = compaction.expanded(framing.read(memoryview(data), newest=2))
    return {name: from_bits(one, TORCH_CODES.get(code, "")) for name, (code, one) in found.items()}


def altered(data: bytes | memoryview, changes: Mapping[str, Any]) -> bytes:
    """Return a part in format 2 with changed tensors.

    A change is a function of the old tensor, a new tensor, or None, which removes it.
    """
    tensors = tensors_of(data)
    for name, change in changes.items():
        array = change(tensors[name]) if callable(change) else change
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
    return bytes(framing.write(tensors, 2))


def at(*place: Any, add: float) -> Callable[[Any], Any]:
    """Return a change of some numbers of a tensor."""

    def change(array: Any) -> Any:
        array = array.copy()
        array[place] += add
        return array

    return change


def rebuilt(episode: Episode) -> Episode:
    """Return an episode that the constructors made from the values of another one."""
    for one in episode.turns or [episode]:
        if one.segment.prompt_length == 1 and any(  # type: ignore[union-attr]
            len(array) < one.num_tokens for array in one.token_extras.values()
        ):
            return episode  # the constructors take such an array for that of the response
    names = ["reward", "finish_reason", "metadata"]
    given: dict[str, Any] = {"token_extras": episode.token_extras}
    if episode.turns:
        of_turns = [*names, "prompt_ids", "response_ids", "loss_mask", "logprobs", "token_rewards"]
        of_turns += ["policy_version", "token_extras", *MARKS]
        turns: dict[int, Turn] = {}
        for turn in episode.turns:
            fields = {name: getattr(turn, name) for name in of_turns}
            turns[id(turn)] = Turn(parent=turns.get(id(turn.parent)), **fields)
        given = {"turns": [*turns.values()], "token_extras": episode.joint_extras}
        if all(turn.policy_version is None for turn in episode.turns):
            names.append("policy_version")
    else:
        names += ["prompt_ids", "response_ids", "loss_mask", "logprobs", "policy_version"]
    names += ["advantage", "extras"]
    return Episode(**given, **{name: getattr(episode, name) for name in names})
