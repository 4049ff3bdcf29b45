"""Merge turns of a trajectory to training rows without the tokens that later prompts repeat.

A turn whose prompt begins with all tokens of an earlier one, which it continues, appends only its
other tokens to the row, the new ones of the prompt outside the loss. Rows are the paths of the
forest of turns (`forest.py`), or only runs of consecutive turns, as in SkyRL's step-wise training
and torchtitan's `rollout_to_training_samples`. Either takes time linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
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
from replaydb.domain.episodes.forest import Forest, forest_of, paths_of
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
from replaydb.domain.episodes.turns import (
    Turn,
    parents_of,
    to_token_rewards,
    total_reward,
    trusted,
)
from replaydb.errors import InvalidInputError

#: Number of branches with whose answers a prompt is realigned.
_MOST_REALIGNED = 4


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Statistics of merging.

    Attributes:
        num_turns: Number of input turns.
        num_rows: Number of output rows.
        num_mismatches: Number of turns after the first one whose prompt does not continue an
            earlier turn (of consecutive rows: the turn before), so that they began a new row.
        num_realigned: Number of turns that continue another one, although the tokenizer split its
            answer differently.
        num_tokens_before: Number of tokens of all turns, prompts included.
        num_tokens_after: Number of tokens of the rows.
        num_discarded: Number of turns that are not trained on, and in no row.
    """

    num_turns: int = 0
    num_rows: int = 0
    num_mismatches: int = 0
    num_realigned: int = 0
    num_tokens_before: int = 0
    num_tokens_after: int = 0
    num_discarded: int = 0

    @property
    def merge_ratio(self) -> float:
        """Trained turns per row; 1.0 if nothing was merged."""
        return (self.num_turns - self.num_discarded) / self.num_rows if self.num_rows else 1.0

    def __add__(self, other: MergeReport) -> MergeReport:
        return MergeReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class MergedRow(NamedTuple):
    """A training row of a trajectory.

    Attributes:
        episode: The row as an episode without turns.
        first_turn: Index in the trajectory of its first turn, from 0.
        last_turn: Index of its last turn.
        turns: Indices of all its turns. Each one continues the one before.
        num_shared: How many of the first of these turns are in the loss of an earlier row.
    """

    episode: Episode
    first_turn: int
    last_turn: int
    turns: tuple[int, ...]
    num_shared: int


def merge_turns(
    trajectory: Episode | Iterable[Turn] | Iterable[Episode],
    *,
    interleaved: bool = False,
    end_token_id: int | None = None,
) -> tuple[list[MergedRow], MergeReport]:
    """Merge the turns of one trajectory to training rows.

    Turns that are not trained on (`is_discarded`) are left out. Every row has the reward of the
    trajectory: that of its episode, or the sum of the rewards of several episodes or turns. Rewards
    of single turns are in `token_extras["token_rewards"]` of the rows, float32 [T]: the
    `token_rewards` of the turn, or else its reward at its last token that is in the loss (its last
    new token if none is). No row has this extra if no turn has a reward.

    A row has the prompt of its first turn and the finish reason of its last turn. Advantage,
    extras, metadata and text are those of its episode; if it contains several, of the last one.
    Logprobs are None if no turn of the row has any (empty arrays count as having them). Otherwise
    they are NaN on actions of turns without logprobs and 0.0 on prompts. All rows have the same
    token extras, with zeros for turns without them.

    Args:
        trajectory: At least one turn, in order; or one episode; or several episodes in order, if
            each step was stored as an episode of its own. An episode that was not built from turns
            counts as one turn.
        interleaved: Whether a turn can continue any earlier turn, as in a batch. If several turns
            continue the same one, each of them begins a row, except the first. Responses that rows
            share are in the loss of the first one only, with their rewards. With False, a turn can
            only continue the one before.
        end_token_id: Token that ends an answer. With it, a prompt that differs from the tokens
            before only within the last answer (because the tokenizer split the same text
            differently) still continues the row: the sampled tokens are kept, followed by what
            comes after the first such token in the prompt. Default: such a turn begins a new row.

    Returns:
        The rows, in the order of the first turns that no earlier row has, and statistics.

    Raises:
        InvalidInputError: There are no turns, or other objects than turns and episodes; a token
            extra has several dtypes or shapes; or an episode cannot count as a turn, because tokens
            of its prompt are in the loss or have rewards.
    """
    end_token_id = checks.optional(checks.token_id, "end_token_id", end_token_id)
    episodes = _episodes(trajectory)
    steps = [step for episode in episodes for step in _steps(episode)]
    turns = [step.turn for step in steps]
    forest = episodes[0].forest if len(episodes) == 1 else forest_of(turns)
    find = _any_links if checks.flag("interleaved", interleaved) else _consecutive_links
    links, realigned = find(turns, forest, end_token_id)
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    reward = sum(rewards) if rewards else None
    is_rewarded = any(turn.reward is not None for turn in turns)
    extras = _extras(steps)
    rows = []
    for path, num_shared in paths_of([link.above for link in links], forest.is_trained):
        mine = [steps[i] for i in path]
        known = [links[i].repeated for i in path]
        row = _row(mine, known, num_shared, extras, reward, is_rewarded)
        rows.append(MergedRow(row, path[0], path[-1], tuple(path), num_shared))
    num_roots = sum(not row.num_shared for row in rows)
    report = MergeReport(
        num_turns=len(steps),
        num_rows=len(rows),
        num_mismatches=max(num_roots - 1, 0),
        num_realigned=realigned,
        num_tokens_before=sum(turn.num_tokens for turn in turns),
        num_tokens_after=sum(row.episode.num_tokens for row in rows),
        num_discarded=forest.is_trained.count(False),
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


class _Link(NamedTuple):
    """The turn that a turn continues.

    Attributes:
        above: Its index, -1 for none.
        repeated: How many tokens of the prompt are those of the row so far.
    """

    above: int
    repeated: int


def _consecutive_links(
    turns: Sequence[Turn], forest: Forest, end_token_id: int | None
) -> tuple[list[_Link], int]:
    """Return what each turn continues, if it can only be the turn before, and the realigned turns.

    The prompt of the turn before began with all tokens before it, so comparing with that turn is
    enough.
    """
    links, realigned, before = [], 0, -1
    for i, turn in enumerate(turns):
        link = _Link(-1, 0)
        if before >= 0 and forest.is_trained[i]:
            if begins_with(turn.segment, turns[before].segment):
                link = _Link(before, turns[before].num_tokens)
            elif (known := _realigned(turns[before], turn, end_token_id)) is not None:
                link = _Link(before, known)
                realigned += 1
        links.append(link)
        before = i if forest.is_trained[i] else before
    return links, realigned


def _any_links(
    turns: Sequence[Turn], forest: Forest, end_token_id: int | None
) -> tuple[list[_Link], int]:
    """Return what each turn continues, and the number of realigned turns.

    A turn is realigned with its parent, or with the end of one of the last branches.
    """
    links, realigned = [], 0
    ends: dict[int, None] = {}  # of the branches so far, the newest last
    for i, (named, above) in enumerate(zip(parents_of(turns), forest.continues, strict=True)):
        link = _Link(above, 0 if above < 0 else turns[above].num_tokens)
        if forest.is_trained[i]:
            if above < 0 or (above != named and above not in ends):
                few = [named] if named >= 0 else islice(reversed(ends), _MOST_REALIGNED)
                for other in few:
                    known = _realigned(turns[other], turns[i], end_token_id, link.repeated)
                    if known is not None:
                        link = _Link(other, known)
                        realigned += 1
                        break
            ends.pop(link.above, None)
            ends[i] = None
        links.append(link)
    return links, realigned


def _realigned(before: Turn, turn: Turn, end_token_id: int | None, least: int = 0) -> int | None:
    """Return where the prompt continues after an answer that was tokenized differently, or None.

    `least`: number of tokens that the prompt of the turn before must have.
    """
    if end_token_id is None or before.segment.prompt_length < least:
        return None
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
    num_shared: int,
    extras: Mapping[str, Values],
    reward: float | None,
    is_rewarded: bool,
) -> Episode:
    """Return turns of a row as one episode, without the repeated tokens of each prompt.

    Its columns are views of those of the turns. The first turns, `num_shared`, are not in its loss.
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
    for i, (step, known, size) in enumerate(zip(steps, repeated, fresh, strict=True)):
        segment = step.turn.segment
        end, prompt = segment.length, segment.prompt_length
        for name, pieces in found.items():
            own: list[Piece]
            if name == LOSS_MASK:
                own = [(prompt, segment.mask(prompt, end))] if i >= num_shared else []
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
        columns[EXTRA + TOKEN_REWARDS] = Column((_token_rewards(turns, fresh, num_shared),), length)
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


def _token_rewards(turns: Sequence[Turn], sizes: Sequence[int], num_shared: int) -> Piece:
    """Return the rewards of the tokens of a row, float32, from the first token that has one.

    `sizes`: new tokens per turn. The rewards of the first turns, `num_shared`, are in another row.
    """
    found: list[tuple[int, ArrayLike]] = []
    end = 0
    for i, (turn, size) in enumerate(zip(turns, sizes, strict=True)):
        end += size
        if i < num_shared:
            continue
        if turn.token_rewards is not None:
            found.append((end - len(turn.token_rewards), turn.token_rewards))
        elif turn.reward is not None and any(sizes):  # before the first token: it is on that
            in_loss = np.flatnonzero(turn.loss_mask)
            behind = len(turn.loss_mask) - int(in_loss[-1]) if len(in_loss) else 1
            found.append((max(end - behind, 0), [turn.reward]))
    first = min((at for at, _ in found), default=0)
    rewards = np.zeros(end - first if found else 0)
    for at, values in found:
        rewards[at - first : at - first + len(values)] += values
    return first, to_float32(TOKEN_REWARDS, rewards)


def restarts(episodes: Iterable[Episode]) -> Iterator[tuple[int, int]]:
    """Yield the episode and turn index of each prompt that does not repeat all tokens of a turn.

    In a batch, a new row begins at such a turn. First turns, turns that are not trained on, and
    turns with a parent, whose context is their own on purpose, are left out. Both indexes start at
    0.
    """
    for i, episode in enumerate(episodes):
        for j, (above, is_trained) in enumerate(zip(*episode.forest, strict=True)):
            if j and above < 0 and is_trained and episode.turns[j].parent is None:
                yield i, j
