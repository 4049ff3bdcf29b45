"""Merge turns of a trajectory to training rows without the tokens that later prompts repeat.

The rule is that of SkyRL's step-wise training and of torchtitan's `rollout_to_training_samples`: as
long as all tokens so far are a prefix of the next prompt, only its new tokens are appended, outside
the loss. Otherwise a new row begins. The algorithm is greedy, merges consecutive turns, and is
linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.arrays import (
    Array,
    Versions,
    bits,
    concatenate_named,
    dtype_name,
    from_bits,
    to_float32,
)
from replaydb.domain.episodes.building import (
    TOKEN_REWARDS,
    joint_logprobs,
    joint_tokens,
    joint_versions,
)
from replaydb.domain.episodes.turns import Turn, trusted
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Statistics of merging.

    Attributes:
        num_turns: Number of input turns.
        num_rows: Number of output rows.
        num_mismatches: Number of turns whose prompt does not continue the turn before, so that they
            began a new row.
        num_realigned: Number of turns that continue the turn before, although the tokenizer split
            the last answer differently.
        num_tokens_before: Number of tokens of all turns, prompts included.
        num_tokens_after: Number of tokens of the rows.
    """

    num_turns: int = 0
    num_rows: int = 0
    num_mismatches: int = 0
    num_realigned: int = 0
    num_tokens_before: int = 0
    num_tokens_after: int = 0

    @property
    def merge_ratio(self) -> float:
        """Turns per row; 1.0 if nothing was merged."""
        return self.num_turns / self.num_rows if self.num_rows else 1.0

    def __add__(self, other: MergeReport) -> MergeReport:
        return MergeReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class MergedRow(NamedTuple):
    """A training row of a trajectory.

    Attributes:
        episode: The row as an episode without turns.
        first_turn: Index in the trajectory of its first turn, from 0.
        last_turn: Index of its last turn.
    """

    episode: Episode
    first_turn: int
    last_turn: int


def merge_turns(
    trajectory: Episode | Iterable[Turn] | Iterable[Episode], *, end_token_id: int | None = None
) -> tuple[list[MergedRow], MergeReport]:
    """Merge the turns of one trajectory to training rows.

    Every row has the reward of the trajectory: that of its episode, or the sum of the rewards of
    several episodes or turns. Rewards of single turns are in `token_extras["token_rewards"]` of the
    rows, float32 [T]: the `token_rewards` of the turn, or else its reward at its last token that is
    in the loss (its last new token if none is). No row has this extra if no turn has a reward.

    A row has the prompt of its first turn and the finish reason of its last turn. Advantage,
    extras, metadata and text are those of its episode; if it contains several, of the last one.
    Logprobs are None if no turn of the row has any (empty arrays count as having them). Otherwise
    they are NaN on actions of turns without logprobs and 0.0 on prompts. All rows have the same
    token extras, with zeros for turns without them.

    Args:
        trajectory: At least one turn, in order; or one episode; or several episodes in order, if
            each step was stored as an episode of its own. An episode that was not built from turns
            counts as one turn.
        end_token_id: Token that ends an answer. With it, a prompt that differs from the tokens
            before only within the last answer (because the tokenizer split the same text
            differently) still continues the row: the sampled tokens are kept, followed by what
            comes after the first such token in the prompt. Default: such a turn begins a new row.

    Returns:
        The rows, and statistics.

    Raises:
        InvalidInputError: There are no turns, or other objects than turns and episodes; a token
            extra has several dtypes or shapes; or an episode cannot count as a turn, because tokens
            of its prompt are in the loss or have rewards.
    """
    end_token_id = checks.optional(checks.token_id, "end_token_id", end_token_id)
    episodes = _episodes(trajectory)
    steps = [step for episode in episodes for step in _steps(episode)]
    repeated, realigned = _repetitions([step.turn for step in steps], end_token_id)
    starts = [position for position, known in enumerate(repeated) if known is None]
    ends = [*starts[1:], len(steps)]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    reward = sum(rewards) if rewards else None
    is_rewarded = any(step.turn.reward is not None for step in steps)
    sizes = [step.turn.num_tokens for step in steps]
    offsets = np.cumsum([0, *sizes]).tolist()
    extras = concatenate_named("token_extras", [step.token_extras for step in steps], sizes)
    rows = []
    for first, end in zip(starts, ends, strict=True):
        own = {name: array[offsets[first] : offsets[end]] for name, array in extras.items()}
        known = [count or 0 for count in repeated[first:end]]
        row = _row(steps[first:end], known, own, reward, is_rewarded)
        rows.append(MergedRow(row, first, end - 1))
    report = MergeReport(
        num_turns=len(steps),
        num_rows=len(rows),
        num_mismatches=len(rows) - 1,
        num_realigned=realigned,
        num_tokens_before=offsets[-1],
        num_tokens_after=sum(row.episode.num_tokens for row in rows),
    )
    return rows, report


class _Step(NamedTuple):
    """A turn, with the versions and token extras of its episode for it."""

    turn: Turn
    version: Versions
    token_extras: dict[str, Array]
    episode: Episode


def _episodes(trajectory: Episode | Iterable[Turn] | Iterable[Episode]) -> Sequence[Episode]:
    """Return the episodes of a trajectory, all with turns."""
    if isinstance(trajectory, Episode):
        trajectory = (trajectory,)
    steps: tuple[Any, ...] = tuple(checks.items("trajectory", "turns or episodes", trajectory))
    if steps and isinstance(steps[0], Episode):
        episodes = checks.instances("trajectory", steps, Episode)
        return [episode if episode.turns else _with_a_turn(episode) for episode in episodes]
    return [Episode(turns=checks.instances("trajectory", steps, Turn))]


def _with_a_turn(episode: Episode) -> Episode:
    """Return an episode that was not built from turns with one turn that has its tokens."""
    prompt = episode.prompt_length
    rewards = episode.token_extras.get(TOKEN_REWARDS)
    if episode.loss_mask[:prompt].any():
        raise InvalidInputError("loss_mask", "False on the prompt of a step", "True")
    if rewards is not None and bits(rewards[:prompt]).any():
        raise InvalidInputError(TOKEN_REWARDS, "0 on the prompt of a step", "other values")
    turn = Turn(
        prompt_ids=episode.prompt_ids,
        response_ids=episode.response_ids,
        loss_mask=episode.loss_mask[prompt:],
        logprobs=None if episode.logprobs is None else episode.logprobs[prompt:],
        reward=episode.reward,
        token_rewards=None if rewards is None else rewards[prompt:].tolist(),
        finish_reason=episode.finish_reason,
    )
    extras = {name: it for name, it in episode.token_extras.items() if name != TOKEN_REWARDS}
    own = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    own |= {"reward": turn.reward, "token_extras": extras, "turns": (turn,)}
    return trusted(Episode, **own)


def _steps(episode: Episode) -> list[_Step]:
    # If any turn has a version, unknown versions of other turns stay unknown.
    has_versions = any(turn.policy_version is not None for turn in episode.turns)
    steps, end = [], 0
    for turn in episode.turns:
        begin, end = end, end + turn.num_tokens
        version = turn.policy_version if has_versions else episode.policy_version
        if isinstance(version, np.ndarray) and not has_versions:
            version = version[begin:end]
        extras = {name: array[begin:end] for name, array in episode.token_extras.items()}
        steps.append(_Step(turn, version, extras, episode))
    return steps


def _repetitions(turns: Sequence[Turn], end_token_id: int | None) -> tuple[list[int | None], int]:
    """Return how many tokens each prompt repeats (None: new row), and the realigned turns."""
    repeated: list[int | None] = [None]
    realigned = 0
    for before, turn in pairwise(turns):
        known = _continuation(before, turn)
        if known is None and end_token_id is not None:
            known = _realigned(before, turn, end_token_id)
            realigned += known is not None
        repeated.append(known)
    return repeated, realigned


def _continuation(before: Turn, turn: Turn) -> int | None:
    """Return how many tokens of the prompt repeat the turn before; None if it does not.

    The prompt of the turn before began with all tokens before it, so comparing with that turn is
    enough. This makes merging linear.
    """
    prompt, prompt_end, answer_end = turn.prompt_ids, len(before.prompt_ids), before.num_tokens
    if len(prompt) < answer_end:
        return None
    same = np.array_equal(prompt[:prompt_end], before.prompt_ids) and np.array_equal(
        prompt[prompt_end:answer_end], before.response_ids
    )
    return answer_end if same else None


def _realigned(before: Turn, turn: Turn, end_token_id: int) -> int | None:
    """Return where the prompt continues after an answer that was tokenized differently, or None."""
    prompt, prompt_end, answer = turn.prompt_ids, len(before.prompt_ids), before.response_ids
    if not len(answer) or not np.array_equal(prompt[:prompt_end], before.prompt_ids):
        return None
    ends = np.flatnonzero(prompt[prompt_end:] == end_token_id)
    if not len(ends):
        return None
    # The end token belongs to the answer if it was sampled, otherwise to the tokens after it.
    return prompt_end + int(ends[0]) + int(answer[-1] == end_token_id)


def _row(
    steps: Sequence[_Step],
    repeated: Sequence[int],
    token_extras: dict[str, Array],
    reward: float | None,
    is_rewarded: bool,
) -> Episode:
    """Return consecutive turns as one episode, without the repeated tokens of each prompt."""
    turns = [step.turn for step in steps]
    fresh = [turn.num_tokens - known for turn, known in zip(turns, repeated, strict=True)]
    runs = [run for pair in zip(repeated, fresh, strict=True) for run in pair]
    keep = np.repeat([False, True] * len(steps), runs)
    tokens, mask = joint_tokens(turns)
    logprobs = joint_logprobs(turns)
    version = joint_versions(turns, [step.version for step in steps])
    if isinstance(version, np.ndarray):
        version = version[keep] if keep.any() else None
    extras = {
        name: from_bits(bits(array)[keep], dtype_name(array))
        for name, array in token_extras.items()
    }
    if is_rewarded:
        extras[TOKEN_REWARDS] = _token_rewards(turns, fresh)
    last = steps[-1]
    return trusted(
        Episode,
        token_ids=tokens[keep],
        loss_mask=mask[keep],
        logprobs=None if logprobs is None else logprobs[keep],
        prompt_length=len(turns[0].prompt_ids),
        reward=reward,
        advantage=last.episode.advantage,
        policy_version=version,
        finish_reason=_finish_reason(last),
        token_extras=extras,
        extras=last.episode.extras,
        metadata=last.episode.metadata,
        text=last.episode.text,
        turns=(),
    )


def _finish_reason(last: _Step) -> str | None:
    """Return the finish reason of a turn, or of the episode that ended with it."""
    reason = last.turn.finish_reason
    if reason is None and last.turn is last.episode.turns[-1]:
        return last.episode.finish_reason
    return reason


def _token_rewards(turns: Sequence[Turn], sizes: Sequence[int]) -> NDArray[np.float32]:
    """Return the rewards of the tokens of a row, float32 [T]. `sizes`: new tokens per turn."""
    rewards = np.zeros(sum(sizes))
    end = 0
    for turn, size in zip(turns, sizes, strict=True):
        end += size
        if turn.token_rewards is not None:
            rewards[end - len(turn.token_rewards) : end] += turn.token_rewards
        elif turn.reward is not None and len(rewards):
            in_loss = np.flatnonzero(turn.loss_mask)
            behind = len(turn.loss_mask) - int(in_loss[-1]) if len(in_loss) else 1
            rewards[max(end - behind, 0)] += turn.reward
    return to_float32(TOKEN_REWARDS, rewards)
