"""Turns of a trajectory as training rows: what later prompts only repeat is left out.

The rule is that of SkyRL's step-wise training and of torchtitan's `rollout_to_training_samples`:
as long as everything so far is a prefix of the next prompt, only what is new in it is appended,
outside the loss; where it is not, a new row begins. Greedy, consecutive, linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from replaydb import checks
from replaydb.episodes import Episode
from replaydb.episodes.arrays import Array, Versions, bits, dtype_name, from_bits
from replaydb.episodes.turns import Turn

#: Name of the token extra that holds the rewards of turns.
TOKEN_REWARDS = "token_rewards"  # noqa: S105 - not a password


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


def merge_turns(
    turns: Iterable[Turn], *, end_token_id: int | None = None
) -> tuple[list[Episode], MergeReport]:
    """Merge the turns of one trajectory, in order.

    A row has the prompt of its first turn, and the finish reason and scalar reward of its last.
    Every turn's reward is kept in `token_extras["token_rewards"]`, float32 [T]: on the last
    action token of the turn, or where it took no action on the last token before its end.
    Logprobs are None if no turn of the row has any (empty ones count as having them), else NaN
    on the actions of turns without and 0.0 on prompts.

    Args:
        turns: At least one.
        end_token_id: The token that ends an answer. With it, a prompt that differs from what was
            before only inside the last answer (the tokenizer cut the same text differently) still
            goes on: the sampled tokens stay, followed by what comes after the first such token
            in the prompt. By default such a turn begins a new row.

    Returns:
        The rows, and what was done.

    Raises:
        InvalidInputError: No turns, or not turns.
    """
    whole = Episode(turns=turns)
    rows, report = merge_episode(whole, end_token_id=end_token_id)
    return [row.episode for row in rows], report


class MergedRow(NamedTuple):
    """One row, and which turns of its episode it holds."""

    episode: Episode
    first_turn: int
    last_turn: int


def merge_episode(
    episode: Episode, *, end_token_id: int | None = None
) -> tuple[list[MergedRow], MergeReport]:
    """Merge the turns of an episode; what it has besides tokens goes to every row.

    Args:
        episode: One that was built from turns.
        end_token_id: As for `merge_turns`.
    """
    if end_token_id is not None:
        end_token_id = checks.token_id("end_token_id", end_token_id)
    turns = episode.turns
    pieces = [_Piece(0, turns[0], 0)]
    starts = [0]
    mismatches = realigned = 0
    for position, (before, turn) in enumerate(pairwise(turns), start=1):
        fresh = _continuation(before, turn)
        if fresh is None and end_token_id is not None:
            fresh = _realigned(before, turn, end_token_id)
            realigned += fresh is not None
        if fresh is None:
            mismatches += 1
            starts.append(position)
        pieces.append(_Piece(position, turn, fresh or 0))
    ends = [*starts[1:], len(turns)]
    offsets = np.cumsum([0, *(turn.num_tokens for turn in turns)]).tolist()
    rows = [
        MergedRow(_row(episode, pieces[first:last], offsets[first]), first, last - 1)
        for first, last in zip(starts, ends, strict=True)
    ]
    report = MergeReport(
        num_turns=len(turns),
        num_rows=len(rows),
        num_mismatches=mismatches,
        num_realigned=realigned,
        num_tokens_before=offsets[-1],
        num_tokens_after=sum(row.episode.num_tokens for row in rows),
    )
    return rows, report


class _Piece(NamedTuple):
    """A turn of a row, of whose prompt the first `repeated` tokens are there already."""

    position: int
    turn: Turn
    repeated: int

    @property
    def num_tokens(self) -> int:
        return self.turn.num_tokens - self.repeated


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


def _row(episode: Episode, pieces: Sequence[_Piece], offset: int) -> Episode:
    """The tokens of the pieces, which begin at `offset` in those of the episode."""
    whole = Episode(turns=[piece.turn for piece in pieces])
    keep = np.repeat(
        [False, True] * len(pieces),
        [n for piece in pieces for n in (piece.repeated, piece.num_tokens)],
    )
    version: Versions = whole.policy_version
    if version is None and all(turn.policy_version is None for turn in episode.turns):
        version = episode.policy_version
        if isinstance(version, np.ndarray):
            version = version[offset : offset + len(keep)]
    if isinstance(version, np.ndarray):
        version = version[keep]
    token_extras = {
        name: from_bits(bits(array[offset : offset + len(keep)])[keep], dtype_name(array))
        for name, array in episode.token_extras.items()
    }
    last = pieces[-1].turn
    return Episode._trusted(
        token_ids=whole.token_ids[keep],
        loss_mask=whole.loss_mask[keep],
        logprobs=None if whole.logprobs is None else whole.logprobs[keep],
        prompt_length=len(pieces[0].turn.prompt_ids),
        reward=last.reward,
        advantage=episode.advantage,
        policy_version=version,
        finish_reason=last.finish_reason,
        token_extras=_rewards(pieces, int(keep.sum())) | token_extras,
        extras=episode.extras,
        metadata=episode.metadata,
        text=episode.text,
        turns=(),
    )


def _rewards(pieces: Sequence[_Piece], total: int) -> dict[str, Array]:
    """Rewards of turns on their last token; none at all where no turn has one."""
    if all(piece.turn.reward is None for piece in pieces):
        return {}
    rewards = np.zeros(total, np.float32)
    if total:
        ends = np.cumsum([piece.num_tokens for piece in pieces])
        values = np.array([piece.turn.reward or 0.0 for piece in pieces])
        np.add.at(rewards, np.maximum(ends - 1, 0), values)
    rewards.setflags(write=False)
    return {TOKEN_REWARDS: rewards}
