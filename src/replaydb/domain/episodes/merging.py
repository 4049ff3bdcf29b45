"""Merge turns of a trajectory to training rows without the tokens that later prompts repeat.

The rule is that of SkyRL's step-wise training and of torchtitan's `rollout_to_training_samples`: as
long as all tokens so far are a prefix of the next prompt, only its new tokens are appended, outside
the loss. Otherwise a new row begins. The algorithm is greedy, merges consecutive turns, and is
linear in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from replaydb.domain import checks
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.arrays import (
    ArrayLike,
    Versions,
    bits,
    to_float32,
)
from replaydb.domain.episodes.building import (
    TOKEN_REWARDS,
    check_kinds,
    extra_values,
    joint_versions,
)
from replaydb.domain.episodes.ragged import Values
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    Column,
    Piece,
    Segment,
    begins_with,
)
from replaydb.domain.episodes.turns import Turn, to_token_rewards, total_reward, trusted
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
    extras = _extras(steps)
    rows = []
    for first, end in zip(starts, ends, strict=True):
        known = [count or 0 for count in repeated[first:end]]
        row = _row(steps[first:end], known, extras, reward, is_rewarded)
        rows.append(MergedRow(row, first, end - 1))
    report = MergeReport(
        num_turns=len(steps),
        num_rows=len(rows),
        num_mismatches=len(rows) - 1,
        num_realigned=realigned,
        num_tokens_before=sum(step.turn.num_tokens for step in steps),
        num_tokens_after=sum(row.episode.num_tokens for row in rows),
    )
    return rows, report


class _Step(NamedTuple):
    """A turn, with the versions and token extras of its episode for it."""

    turn: Turn
    version: Versions
    joint_extras: dict[str, Values]
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
    [own] = episode.segments
    prompt, length = own.prompt_length, own.length
    if own.mask(0, prompt).any():
        raise InvalidInputError("loss_mask", "False on the prompt of a step", "True")
    columns = dict(own.columns)
    columns.pop(TOKEN_VERSIONS, None)  # they are those of the episode
    for name in (LOSS_MASK, LOGPROBS):
        if name in columns:
            columns[name] = Column(((prompt, own.values(name, prompt, length)),), length)
    reward = episode.reward
    if (column := columns.pop(EXTRA + TOKEN_REWARDS, None)) is not None:
        rewards = own.values(EXTRA + TOKEN_REWARDS, 0, column.end)
        if bits(rewards[:prompt]).any():
            raise InvalidInputError(TOKEN_REWARDS, "0 on the prompt of a step", "other values")
        checked = to_token_rewards(rewards[prompt:].tolist())
        reward = total_reward(checked, reward)
        columns[TURN_REWARDS] = Column(((prompt, checked),), length)
    turn = trusted(
        Turn,
        segment=Segment(length, prompt, columns, own.parent),
        parent=None,
        version=None,
        reward=reward,
        finish_reason=episode.finish_reason,
        metadata={},
    )
    values = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    version = episode.policy_version
    changed = {"segment": None, "turns": (turn,), "version": version, "reward": reward}
    return trusted(Episode, **values | changed)


def _steps(episode: Episode) -> list[_Step]:
    # If any turn has a version, unknown versions of other turns stay unknown.
    has_versions = any(turn.policy_version is not None for turn in episode.turns)
    steps, end = [], 0
    for turn in episode.turns:
        begin, end = end, end + turn.num_tokens
        version = turn.policy_version if has_versions else episode.version
        if isinstance(version, np.ndarray) and not has_versions:
            version = version[begin:end]
        extras = {name: array[begin:end] for name, array in episode.joint_extras.items()}
        steps.append(_Step(turn, version, extras, episode))
    return steps


def _extras(steps: Sequence[_Step]) -> dict[str, Values]:
    """Return an empty array [0, ...] of each token extra by name.

    Raises:
        InvalidInputError: The steps have several dtypes or shapes of an extra.
    """
    found: dict[str, list[Values]] = {}
    for step in steps:
        for name, values in (extra_values(step.turn.segment) | step.joint_extras).items():
            found.setdefault(name, []).append(values)
    for name, arrays in found.items():
        check_kinds(name, arrays)
    return {name: arrays[0][:0] for name, arrays in found.items()}


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
    return before.num_tokens if begins_with(turn.segment, before.segment) else None


def _realigned(before: Turn, turn: Turn, end_token_id: int) -> int | None:
    """Return where the prompt continues after an answer that was tokenized differently, or None."""
    prompt, known, answer = turn.prompt_ids, before.segment.prompt_length, before.response_ids
    if not len(answer) or not np.array_equal(prompt[:known], before.prompt_ids):
        return None
    ends = np.flatnonzero(prompt[known:] == end_token_id)
    if not len(ends):
        return None
    # The end token belongs to the answer if it was sampled, otherwise to the tokens after it.
    return known + int(ends[0]) + int(answer[-1] == end_token_id)


def _row(
    steps: Sequence[_Step],
    repeated: Sequence[int],
    extras: Mapping[str, Values],
    reward: float | None,
    is_rewarded: bool,
) -> Episode:
    """Return consecutive turns as one episode, without the repeated tokens of each prompt.

    Its columns are views of those of the turns.
    """
    turns = [step.turn for step in steps]
    fresh = [turn.num_tokens - known for turn, known in zip(turns, repeated, strict=True)]
    length = sum(fresh)
    # the empty pieces have the dtype of columns without values
    found: dict[str, list[Piece]] = {TOKEN_IDS: [(0, np.empty(0, np.int32))], LOSS_MASK: []}
    if any(LOGPROBS in turn.segment.columns for turn in turns):
        found[LOGPROBS] = [(0, np.empty(0, np.float32))]
    found |= {EXTRA + name: [(0, like)] for name, like in extras.items()}
    offset = 0  # of the first token of the turn that is not repeated
    for step, known, size in zip(steps, repeated, fresh, strict=True):
        segment = step.turn.segment
        end, prompt = segment.length, segment.prompt_length
        for name, pieces in found.items():
            own: list[Piece]
            if name == LOSS_MASK:
                own = [(prompt, segment.mask(prompt, end))]
            elif name == LOGPROBS and name not in segment.columns:
                own = [(prompt, np.full(end - prompt, np.nan, np.float32))]
            elif (joint := step.joint_extras.get(name.removeprefix(EXTRA))) is not None:
                own = [(known, joint[known:])]
            else:
                own = segment.pieces(name, known, end)
            pieces += [(offset + at - known, values) for at, values in own]
        offset += size
    columns = {name: Column(tuple(pieces), length) for name, pieces in found.items()}
    version = _versions(steps, repeated, columns)
    if is_rewarded:
        columns[EXTRA + TOKEN_REWARDS] = Column((_token_rewards(turns, fresh),), length)
    last = steps[-1]
    return trusted(
        Episode,
        segment=Segment(length, turns[0].segment.prompt_length, columns),
        turns=(),
        version=version,
        joint_extras={},
        reward=reward,
        advantage=last.episode.advantage,
        finish_reason=_finish_reason(last),
        extras=last.episode.extras,
        metadata=last.episode.metadata,
        text=last.episode.text,
    )


def _versions(
    steps: Sequence[_Step], repeated: Sequence[int], columns: dict[str, Column]
) -> int | None:
    """Return the version of a row, or add the column of the versions of its tokens."""
    version = joint_versions(
        [step.turn for step in steps], [step.version for step in steps], repeated
    )
    if not isinstance(version, np.ndarray):
        return version
    if len(version):
        columns[TOKEN_VERSIONS] = Column(((0, version),), len(version))
    return None


def _finish_reason(last: _Step) -> str | None:
    """Return the finish reason of a turn, or of the episode that ended with it."""
    reason = last.turn.finish_reason
    if reason is None and last.turn is last.episode.turns[-1]:
        return last.episode.finish_reason
    return reason


def _token_rewards(turns: Sequence[Turn], sizes: Sequence[int]) -> Piece:
    """Return the rewards of the tokens of a row, float32, from the first token that has one.

    `sizes`: new tokens per turn.
    """
    found: list[tuple[int, ArrayLike]] = []
    end = 0
    for turn, size in zip(turns, sizes, strict=True):
        end += size
        if turn.token_rewards is not None:
            found.append((end - len(turn.token_rewards), turn.token_rewards))
        elif turn.reward is not None and end:
            in_loss = np.flatnonzero(turn.loss_mask)
            behind = len(turn.loss_mask) - int(in_loss[-1]) if len(in_loss) else 1
            found.append((max(end - behind, 0), [turn.reward]))
    first = min((at for at, _ in found), default=0)
    rewards = np.zeros(end - first if found else 0)
    for at, values in found:
        rewards[at - first : at - first + len(values)] += values
    return first, to_float32(TOKEN_REWARDS, rewards)


def restarts(episodes: Iterable[Episode]) -> Iterator[tuple[int, int]]:
    """Yield the episode and turn index of each prompt that does not repeat all tokens before it.

    Merging begins a new row at such a turn. Both indexes start at 0.
    """
    for i, episode in enumerate(episodes):
        for j, (before, turn) in enumerate(pairwise(episode.turns), 1):
            if not begins_with(turn.segment, before.segment):
                yield i, j
