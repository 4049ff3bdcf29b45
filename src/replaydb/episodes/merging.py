"""Turns of a trajectory as training rows: what later prompts only repeat is left out.

The rule is that of SkyRL's step-wise training and of torchtitan's `rollout_to_training_samples`:
as long as everything so far is a prefix of the next prompt, only what is new in it is appended,
outside the loss; where it is not, a new row begins. Greedy, consecutive, linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.episodes import Episode
from replaydb.episodes.arrays import Array, Versions, bits, dtype_name, end_to_end, from_bits
from replaydb.episodes.rows import TOKEN_REWARDS, joint_logprobs, joint_tokens, joint_versions
from replaydb.episodes.turns import Turn
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging did.

    Attributes:
        num_turns: Turns that went in.
        num_rows: Rows that came out.
        num_mismatches: Turns whose prompt did not go on from what was before, so that they began
            a new row.
        num_realigned: Turns that went on although the tokenizer had cut the last answer
            differently.
        num_tokens_before: Tokens of all turns, prompts included.
        num_tokens_after: Tokens of the rows.
    """

    num_turns: int = 0
    num_rows: int = 0
    num_mismatches: int = 0
    num_realigned: int = 0
    num_tokens_before: int = 0
    num_tokens_after: int = 0

    @property
    def merge_ratio(self) -> float:
        """Turns for each row; 1.0 where nothing was merged."""
        return self.num_turns / self.num_rows if self.num_rows else 1.0

    def __add__(self, other: MergeReport) -> MergeReport:
        return MergeReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class MergedRow(NamedTuple):
    """A row of a trajectory.

    Attributes:
        episode: Its tokens and all that belongs to them; an episode without turns.
        first_turn: Position in the trajectory of the first turn it holds, from 0.
        last_turn: Position of the last one.
    """

    episode: Episode
    first_turn: int
    last_turn: int


def merge_turns(
    trajectory: Episode | Iterable[Turn] | Iterable[Episode], *, end_token_id: int | None = None
) -> tuple[list[MergedRow], MergeReport]:
    """Merge the turns of one trajectory.

    Every row has the reward of the whole trajectory: that of its episode; of several episodes, or
    of turns, the sum of the rewards they have. What each turn earned is in the rows'
    `token_extras["token_rewards"]`, float32 [T]: its `token_rewards` where they are, or its reward
    on the last of its tokens that is in the loss (the last that is new in the row, where none is).
    No row has them if no turn has a reward.

    A row has the prompt of its first turn and the finish reason of its last. Advantage, extras,
    metadata and text are those of its episode; of several, those of the last it holds. Logprobs
    are None if no turn of the row has any (empty ones count as having them), else NaN on the
    actions of turns without and 0.0 on prompts. All rows have the same token extras, zero in the
    turns that do not have them.

    Args:
        trajectory: Its turns in order, at least one; or one episode; or several, one after the
            other, where each step was stored as an episode of its own. An episode that was not
            built from turns counts as one turn.
        end_token_id: The token that ends an answer. With it, a prompt that differs from what was
            before only inside the last answer (the tokenizer cut the same text differently) still
            goes on: the sampled tokens stay, followed by what comes after the first such token
            in the prompt. By default such a turn begins a new row.

    Returns:
        The rows, and what was done.

    Raises:
        InvalidInputError: No turns, or neither turns nor episodes; a token extra that has several
            dtypes or shapes; an episode that is no turn, since tokens of its prompt are in the
            loss or have rewards.
    """
    if end_token_id is not None:
        end_token_id = checks.token_id("end_token_id", end_token_id)
    episodes = _episodes(trajectory)
    pieces = [piece for episode in episodes for piece in _pieces(episode)]
    repeated, realigned = _repetitions([piece.turn for piece in pieces], end_token_id)
    starts = [position for position, known in enumerate(repeated) if known is None]
    ends = [*starts[1:], len(pieces)]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    reward = sum(rewards) if rewards else None
    is_rewarded = any(piece.turn.reward is not None for piece in pieces)
    sizes = [piece.turn.num_tokens for piece in pieces]
    offsets = np.cumsum([0, *sizes]).tolist()
    extras = end_to_end("token_extras", [piece.token_extras for piece in pieces], sizes)
    rows = []
    for first, end in zip(starts, ends, strict=True):
        its = {name: array[offsets[first] : offsets[end]] for name, array in extras.items()}
        known = [count or 0 for count in repeated[first:end]]
        row = _row(pieces[first:end], known, its, reward, is_rewarded)
        rows.append(MergedRow(row, first, end - 1))
    report = MergeReport(
        num_turns=len(pieces),
        num_rows=len(rows),
        num_mismatches=len(rows) - 1,
        num_realigned=realigned,
        num_tokens_before=offsets[-1],
        num_tokens_after=sum(row.episode.num_tokens for row in rows),
    )
    return rows, report


class _Piece(NamedTuple):
    """A turn, with what the episode it is of says of its tokens."""

    turn: Turn
    version: Versions
    token_extras: dict[str, Array]
    episode: Episode


def _episodes(trajectory: Episode | Iterable[Turn] | Iterable[Episode]) -> Sequence[Episode]:
    """The episodes of a trajectory, all of them with turns."""
    if isinstance(trajectory, Episode):
        trajectory = (trajectory,)
    steps: tuple[Any, ...] = tuple(checks.items("trajectory", "turns or episodes", trajectory))
    if steps and isinstance(steps[0], Episode):
        episodes = checks.instances("trajectory", steps, Episode)
        return [episode if episode.turns else _with_a_turn(episode) for episode in episodes]
    return [Episode(turns=checks.instances("trajectory", steps, Turn))]


def _with_a_turn(episode: Episode) -> Episode:
    """An episode that was not built from turns, with itself as its turn."""
    prompt = episode.prompt_length
    rewards = episode.token_extras.get(TOKEN_REWARDS)
    if episode.loss_mask[:prompt].any():
        raise InvalidInputError("loss_mask", "False on the prompt of a step", "True")
    if rewards is not None and bits(rewards[:prompt]).any():
        raise InvalidInputError(TOKEN_REWARDS, "0 on the prompt of a step", "others")
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
    its = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    its |= {"reward": turn.reward, "token_extras": extras, "turns": (turn,)}
    return Episode._trusted(**its)


def _pieces(episode: Episode) -> list[_Piece]:
    # Where turns have versions, an unknown one among them stays so.
    has_versions = any(turn.policy_version is not None for turn in episode.turns)
    pieces, end = [], 0
    for turn in episode.turns:
        begin, end = end, end + turn.num_tokens
        version = turn.policy_version if has_versions else episode.policy_version
        if isinstance(version, np.ndarray) and not has_versions:
            version = version[begin:end]
        extras = {name: array[begin:end] for name, array in episode.token_extras.items()}
        pieces.append(_Piece(turn, version, extras, episode))
    return pieces


def _repetitions(turns: Sequence[Turn], end_token_id: int | None) -> tuple[list[int | None], int]:
    """Tokens of each prompt that are there already, None where a row begins; and realignments."""
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
    """How much of the prompt is the turn before; None if that is not how it begins.

    As the prompt of the turn before began with all that was before it, there is no need to look
    further back: that is what makes merging linear.
    """
    prompt, asked, answered = turn.prompt_ids, len(before.prompt_ids), before.num_tokens
    if len(prompt) < answered:
        return None
    same = np.array_equal(prompt[:asked], before.prompt_ids) and np.array_equal(
        prompt[asked:answered], before.response_ids
    )
    return answered if same else None


def _realigned(before: Turn, turn: Turn, end_token_id: int) -> int | None:
    """Where the prompt goes on after an answer that was tokenized in another way."""
    prompt, asked, answer = turn.prompt_ids, len(before.prompt_ids), before.response_ids
    if not len(answer) or not np.array_equal(prompt[:asked], before.prompt_ids):
        return None
    ends = np.flatnonzero(prompt[asked:] == end_token_id)
    if not len(ends):
        return None
    # The end token goes with the answer if it was sampled, and else with what follows.
    return asked + int(ends[0]) + int(answer[-1] == end_token_id)


def _row(
    pieces: Sequence[_Piece],
    repeated: Sequence[int],
    token_extras: dict[str, Array],
    reward: float | None,
    is_rewarded: bool,
) -> Episode:
    """The pieces as one episode, without the tokens that the prompt of each only repeats."""
    turns = [piece.turn for piece in pieces]
    fresh = [turn.num_tokens - known for turn, known in zip(turns, repeated, strict=True)]
    runs = [run for pair in zip(repeated, fresh, strict=True) for run in pair]
    keep = np.repeat([False, True] * len(pieces), runs)
    tokens, mask = joint_tokens(turns)
    logprobs = joint_logprobs(turns)
    version = joint_versions(turns, [piece.version for piece in pieces])
    if isinstance(version, np.ndarray):
        version = version[keep] if keep.any() else None
    extras = {
        name: from_bits(bits(array)[keep], dtype_name(array))
        for name, array in token_extras.items()
    }
    if is_rewarded:
        extras[TOKEN_REWARDS] = _token_rewards(turns, fresh)
    last = pieces[-1]
    return Episode._trusted(
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


def _finish_reason(last: _Piece) -> str | None:
    """Of a turn; or of the episode that ended with it."""
    reason = last.turn.finish_reason
    if reason is None and last.turn is last.episode.turns[-1]:
        return last.episode.finish_reason
    return reason


def _token_rewards(turns: Sequence[Turn], sizes: Sequence[int]) -> NDArray[np.float32]:
    """What the tokens of a row earned, float32 [T], of whose tokens each turn has so many."""
    rewards = np.zeros(sum(sizes), np.float32)
    end = 0
    for turn, size in zip(turns, sizes, strict=True):
        end += size
        if turn.token_rewards is not None:
            rewards[end - len(turn.token_rewards) : end] += turn.token_rewards
        elif turn.reward is not None and len(rewards):
            in_loss = np.flatnonzero(turn.loss_mask)
            behind = len(turn.loss_mask) - int(in_loss[-1]) if len(in_loss) else 1
            rewards[max(end - behind, 0)] += turn.reward
    rewards.setflags(write=False)
    return rewards
