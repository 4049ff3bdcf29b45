"""Completions of any inference engine, and groups of them."""

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
        response_ids: Sampled tokens, including a stop token; empty if the completion was aborted
            before the first.
        logprobs: One per token of `response_ids`, NaN if the engine has none.
        text: The decoded tokens; None if the engine did not decode them.
        finish_reason: Why the completion ended: "stop", "length", "abort", or "tool_calls".
        policy_version: Version of the weights, if the server reports a number; one per token of
            `response_ids` if it changed; None if that of a token is unknown.
        prompt: Text of the prompt, if the engine returns it.
        metadata: Other reported values: `request_id`, `stop_reason` (the string or token at which
            generation stopped), `tool_calls`, `reasoning`.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str | None = None
    finish_reason: str | None = None
    policy_version: int | Sequence[int] | None = None
    prompt: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def episode(self, **fields: Any) -> Episode:
        """Return it as an `Episode`; `fields`, such as `reward`, replace or extend its own."""
        return Episode(**{**self._fields(), "text": self.text, **fields})

    def turn(self, **fields: Any) -> Turn:
        """Return it as a `Turn` of an agent's episode; `fields` as for `episode`."""
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
    """Combine the completions of one prompt into a group; `aborted` if one of them was aborted.

    Args:
        task_name: Task of the group.
        completions: All completions of one prompt.
        rewards: One per completion, None for a completion without reward; by default all are None.
        policy_version: Version of the weights that sampled, for completions of which the server
            did not report it.
        fields: Other arguments of `EpisodeGroup`.

    Raises:
        InvalidInputError: The prompts differ, or `rewards` and `completions` have different
            lengths.
    """
    several = list(completions)
    scores = [None] * len(several) if rewards is None else list(rewards)
    if len(scores) != len(several):
        raise InvalidInputError(
            "rewards", f"one for each of {len(several)} completions", len(scores)
        )
    if different := [one for one in several if list(one.prompt_ids) != list(several[0].prompt_ids)]:
        position = several.index(different[0])
        raise InvalidInputError(
            f"completions[{position}].prompt_ids",
            "the same prompt for all completions",
            f"another prompt of {len(different[0].prompt_ids)} tokens",
        )
    if any(one.finish_reason == "abort" for one in several):
        fields.setdefault("status", GroupStatus.ABORTED)
    if several and several[0].prompt is not None:
        fields.setdefault("prompt", several[0].prompt)
    episodes = [
        one.episode(
            reward=reward,
            policy_version=policy_version if one.policy_version is None else one.policy_version,
        )
        for one, reward in zip(several, scores, strict=True)
    ]
    return EpisodeGroup(task_name, episodes, **fields)
