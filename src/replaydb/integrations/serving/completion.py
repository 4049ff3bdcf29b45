"""Completions, whatever engine they are from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replaydb import Episode, EpisodeGroup, GroupStatus, InvalidInputError, Turn


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion, as its engine returned it.

    Attributes:
        prompt_ids: Tokens of the prompt.
        response_ids: Tokens that were sampled, a stop token included; none where it was aborted
            before the first.
        logprobs: One for each of `response_ids`, NaN where the engine has none.
        text: What the engine made of the tokens; None where it did not.
        finish_reason: Why it ended: "stop", "length", "abort", or "tool_calls".
        policy_version: The version of the weights, where the server reports a number.
        prompt: Text of the prompt, where the engine returns it.
        metadata: What else it said: `request_id`, `stop_reason` (the string or token that it
            stopped at), `tool_calls`, `reasoning`.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str | None = None
    finish_reason: str | None = None
    policy_version: int | None = None
    prompt: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def episode(self, **fields: Any) -> Episode:
        """It as an `Episode`; fields, such as `reward`, take the place of its own or are added."""
        return Episode(**{**self._fields(), "text": self.text, **fields})

    def turn(self, **fields: Any) -> Turn:
        """It as a `Turn` of an agent's episode; fields as for `episode`."""
        return Turn(**{**self._fields(), **fields})

    def _fields(self) -> dict[str, Any]:
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.response_ids,
            "logprobs": self.logprobs,
            "policy_version": self.policy_version,
            "finish_reason": self.finish_reason,
            "metadata": self.metadata,
        }


def to_group(
    task_name: str,
    completions: Iterable[Completion],
    *,
    rewards: Iterable[float | None] | None = None,
    policy_version: int | None = None,
    **fields: Any,
) -> EpisodeGroup:
    """The completions of one prompt as a group; `aborted` as soon as one of them was.

    Args:
        task_name: Its task.
        completions: All of one prompt.
        rewards: One for each, or None for a completion that has none; by default none has.
        policy_version: The version that sampled, where the server does not report it.
        fields: What else `EpisodeGroup` takes.

    Raises:
        InvalidInputError: The prompts differ, or there are not as many rewards as completions.
    """
    several = list(completions)
    scores = [None] * len(several) if rewards is None else list(rewards)
    if len(scores) != len(several):
        raise InvalidInputError("rewards", f"as many as completions, {len(several)}", len(scores))
    if different := [one for one in several if list(one.prompt_ids) != list(several[0].prompt_ids)]:
        position = several.index(different[0])
        raise InvalidInputError(
            f"completions[{position}].prompt_ids",
            "the prompt of the others",
            f"another one of {len(different[0].prompt_ids)} tokens",
        )
    of_all = {} if policy_version is None else {"policy_version": policy_version}
    if any(one.finish_reason == "abort" for one in several):
        fields.setdefault("status", GroupStatus.ABORTED)
    if several and several[0].prompt is not None:
        fields.setdefault("prompt", several[0].prompt)
    episodes = [
        one.episode(reward=reward, **of_all) for one, reward in zip(several, scores, strict=True)
    ]
    return EpisodeGroup(task_name, episodes, **fields)
