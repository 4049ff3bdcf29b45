"""Payload format 1: every token of every row, turn after turn.

Tensors of a payload with E episodes, T tokens and N turns. Those in brackets are optional:

    lengths prompt_lengths versions  I64 [E]      rewards advantages  F64 [E]
    token_ids [token_versions]       I32 [T]      loss_mask           BOOL [T]
    [logprobs]                       F32 [T]      [has_logprobs has_token_versions]  BOOL [E]
    [token/<name>]                   [T, ...]     [episode/<name>]    [E, ...]
    [each/<position>/token/<name>]   [its T, ...] [each/<position>/episode/<name>]   any shape
    [prompt_ids]                     I32 [P]      [group/<name>]      any shape
    [turn/counts]                    I64 [E]      [turn/<other columns>]             [N]
    [turn/token_rewards]             F32 [T]      [turn/has_token_rewards]           BOOL [N]
    [json]  U8: finish reasons, metadata, which token extras turns have, the prompt of the group
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from replaydb.codec import framing
from replaydb.codec.framing import corrupt
from replaydb.codec.sections import Sections, is_beyond_float32
from replaydb.domain import checks
from replaydb.domain.episodes import CORE_FIELDS, Episode
from replaydb.domain.episodes.arrays import Array, to_float32
from replaydb.domain.episodes.building import TOKEN_REWARDS
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import NO_VERSION, FlatEpisodes, FlatTurns, flatten
from replaydb.domain.episodes.ragged import Ragged
from replaydb.domain.episodes.segments import EXTRA
from replaydb.domain.episodes.turns import MARKS, total_reward
from replaydb.errors import InvalidInputError
from replaydb.util import escapes

_TURN_COLUMNS = (
    "counts",
    "lengths",
    "prompt_lengths",
    "rewards",
    "versions",
    "has_logprobs",
    "has_token_versions",
)
#: Fields of turns that this format does not have.
_NOT_STORED = ("parent", *MARKS)
_EXTRA = re.compile(r"(?:each/(0|[1-9][0-9]{0,8})/)?(token|episode)/(.+)", re.DOTALL)


def tensors_of(episodes: Sequence[Episode], context: GroupContext) -> dict[str, Array]:
    """Return the tensors of a payload.

    Raises:
        InvalidInputError: The episodes have something that this format cannot hold.
    """
    for i, episode in enumerate(episodes):
        for j, segment in enumerate(episode.segments):
            where = f"episodes[{i}]" + (f".turns[{j}]" if episode.turns else "")
            for name in _NOT_STORED if episode.turns else ():
                if (value := getattr(episode.turns[j], name)) not in (None, False):
                    expected = "False" if name == "is_discarded" else "None"
                    _refuse(f"{where}.{name}", expected, "a turn" if name == "parent" else value)
            for name, column in segment.columns.items():
                field = f"{where}.token_extras[{name.removeprefix(EXTRA)!r}]"
                if None in column.kind:
                    _refuse(field, "an array", "a Ragged")
                if column.end != segment.length:
                    _refuse(field, f"{segment.length} values", column.end)
        for name, array in episode.joint_extras.items():
            if isinstance(array, Ragged):
                _refuse(f"episodes[{i}].token_extras[{name!r}]", "an array", "a Ragged")
    return _tensors(flatten(episodes, context))


def _refuse(field: str, expected: str, actual: object) -> NoReturn:
    why = "while the store writes payload format 1 (see `replaydb db write-format 2`)"
    raise InvalidInputError(field, f"{expected}, {why}", actual)


def read(tensors: framing.Tensors) -> tuple[list[Episode], GroupContext]:
    """Return the episodes and the context in the tensors of a payload.

    Raises:
        CorruptPayloadError: A section is missing, unknown or inconsistent with the others.
        InvalidInputError: A name or a JSON value is invalid for an episode.
    """
    flat = _Reader(tensors).episodes()
    return flat.episodes(), flat.context


def _tensors(flat: FlatEpisodes) -> dict[str, Array]:
    tensors: dict[str, Array] = {
        "lengths": flat.lengths,
        "prompt_lengths": flat.prompt_lengths,
        "rewards": flat.rewards,
        "advantages": flat.advantages,
        "versions": flat.versions,
        "token_ids": flat.token_ids,
        "loss_mask": flat.loss_mask,
    }
    if flat.logprobs is not None:
        tensors["logprobs"] = flat.logprobs
        if not flat.has_logprobs.all():
            tensors["has_logprobs"] = flat.has_logprobs
    if flat.token_versions is not None:
        tensors["token_versions"] = flat.token_versions
        tensors["has_token_versions"] = flat.has_token_versions
    tensors |= {f"token/{name}": array for name, array in flat.token_extras.items()}
    tensors |= {f"episode/{name}": array for name, array in flat.extras.items()}
    for kind, each in (("token", flat.each_token_extras), ("episode", flat.each_extras)):
        for i, arrays in each.items():
            tensors |= {f"each/{i}/{kind}/{name}": array for name, array in arrays.items()}
    if flat.context.prompt_ids is not None:
        tensors["prompt_ids"] = flat.context.prompt_ids
    tensors |= {f"group/{name}": array for name, array in flat.context.extras.items()}
    columns = _json_columns("", flat)
    if flat.turns is not None:
        tensors |= _turn_tensors(flat.turns)
        columns |= _json_columns("turn_", flat.turns)
    if flat.context.prompt is not None:
        columns["prompt"] = flat.context.prompt
    if columns:
        text = escapes.to_json(columns, separators=(",", ":"))
        tensors["json"] = np.frombuffer(text.encode(), np.uint8)
    return tensors


def _turn_tensors(turns: FlatTurns) -> dict[str, Array]:
    tensors: dict[str, Array] = {f"turn/{name}": getattr(turns, name) for name in _TURN_COLUMNS}
    if turns.token_rewards is not None:
        tensors["turn/token_rewards"] = turns.token_rewards
        tensors["turn/has_token_rewards"] = turns.has_token_rewards
    return tensors


def _json_columns(prefix: str, rows: FlatEpisodes | FlatTurns) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if any(reason is not None for reason in rows.finish_reasons):
        columns[f"{prefix}finish_reasons"] = rows.finish_reasons
    if any(rows.metadata):
        columns[f"{prefix}metadata"] = rows.metadata
    if isinstance(rows, FlatTurns) and any(rows.token_extras):
        columns[f"{prefix}token_extras"] = rows.token_extras
    return columns


class _Reader(Sections):
    """Splits the tensors of a payload, and checks that `tensors_of` could have made them."""

    def episodes(self) -> FlatEpisodes:
        """Return all episodes.

        Raises:
            CorruptPayloadError: A section is missing, unknown or inconsistent with the others.
            InvalidInputError: A name or a JSON value is invalid for an episode.
        """
        lengths = self.column("lengths", "I64")
        token_ids = self.column("token_ids", "I32")
        count, total = len(lengths), len(token_ids)
        sizes = lengths.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != total:
            corrupt(f"lengths {sizes} do not add up to {total} tokens")
        logprobs = self.optional("logprobs", "F32", total)
        token_versions = self.optional("token_versions", "I32", total)
        columns = {
            "prompt_lengths": self.column("prompt_lengths", "I64", count),
            "rewards": self.column("rewards", "F64", count),
            "advantages": self.column("advantages", "F64", count),
            "versions": self.column("versions", "I64", count),
            "has_logprobs": self._presence("has_logprobs", logprobs, count),
            "has_token_versions": self._presence("has_token_versions", token_versions, count),
            "loss_mask": self.column("loss_mask", "BOOL", total),
        }
        extras = self._extras(sizes, total)  # from the remaining tensors, usually none
        flat = FlatEpisodes(
            lengths=lengths,
            token_ids=token_ids,
            logprobs=logprobs,
            token_versions=token_versions,
            **columns,
            token_extras=extras["token"],
            extras=extras["episode"],
            each_token_extras=extras["each token"],
            each_extras=extras["each episode"],
            finish_reasons=self.texts("finish_reasons", count),
            metadata=self.metadata("metadata", count),
            turns=self._turns(count, total) if "turn/counts" in self.tensors else None,
            context=self.context(),
        )
        self.check_empty()
        _check_rows(flat, flat)
        if is_beyond_float32(flat.advantages):
            corrupt("an advantage is beyond float32")
        if flat.logprobs is not None and np.isinf(flat.logprobs).any():
            corrupt("a logprob is infinite")
        if flat.turns is not None:
            _check_turns(flat, flat.turns)
        return flat

    def _turns(self, num_episodes: int, num_tokens: int) -> FlatTurns:
        lengths = self.column("turn/lengths", "I64")
        count = len(lengths)
        rewards = self.optional("turn/token_rewards", "F32", num_tokens)
        return FlatTurns(
            counts=self.column("turn/counts", "I64", num_episodes),
            lengths=lengths,
            prompt_lengths=self.column("turn/prompt_lengths", "I64", count),
            rewards=self.column("turn/rewards", "F64", count),
            versions=self.column("turn/versions", "I64", count),
            has_logprobs=self.column("turn/has_logprobs", "BOOL", count),
            has_token_versions=self.column("turn/has_token_versions", "BOOL", count),
            finish_reasons=self.texts("turn_finish_reasons", count),
            metadata=self.metadata("turn_metadata", count),
            token_rewards=rewards,
            has_token_rewards=self._presence("turn/has_token_rewards", rewards, count),
            token_extras=self.values("turn_token_extras", count, _names, tuple),
        )

    def _presence(self, name: str, column: NDArray[Any] | None, count: int) -> NDArray[np.bool_]:
        """Return which rows have an optional column: as a tensor lists them, else all or none."""
        if column is not None and name in self.tensors:
            return self.column(name, "BOOL", count)
        return np.zeros(count, np.bool_) if column is None else np.ones(count, np.bool_)

    def _extras(self, lengths: list[int], total: int) -> dict[str, dict[Any, Any]]:
        """Return the extras by kind: `token`, `episode`, `each token` and `each episode`."""
        kinds = "token", "episode", "each token", "each episode"
        found: dict[str, dict[Any, Any]] = {kind: {} for kind in kinds}
        for section in list(self.tensors):
            if (match := _EXTRA.fullmatch(section)) is None:
                continue
            code = self.tensors[section][0]
            array = self.array(section)
            position, kind, name = match.groups()
            target = found[kind]
            length: int | None = total if kind == "token" else len(lengths)
            if position is not None:
                if int(position) >= len(lengths):
                    corrupt(f"{section} belongs to none of {len(lengths)} episodes")
                target = found[f"each {kind}"].setdefault(int(position), {})
                length = lengths[int(position)] if kind == "token" else None
            if length is not None and array.shape[:1] != (length,):
                corrupt(f"{section} is {list(array.shape)}, not [{length}, ...]")
            if kind == "token" and name == TOKEN_REWARDS and code == "F64":
                to_float32(section, array.reshape(-1))
            target[checks.name(section, name)] = array
        if any(found.values()):
            _check_names(found)
        return found


def _check_names(extras: dict[str, dict[Any, Any]]) -> None:
    """Check that no episode has two extras of one name, or an extra with a reserved name."""
    for i in {None, *extras["each token"], *extras["each episode"]}:
        own = [*extras["each token"].get(i, ()), *extras["each episode"].get(i, ())]
        names = [*extras["token"], *extras["episode"], *own]
        if len(set(names)) != len(names) or not CORE_FIELDS.isdisjoint(names):
            corrupt(f"extras {names} of one episode have duplicate or reserved names")


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | None):
        corrupt(f"{value!r} are not names of token extras")
    names = tuple(checks.name("token_extras", name) for name in value or ())
    if len(set(names)) != len(names) or TOKEN_REWARDS in names:
        corrupt(f"duplicate or reserved token extras {names} of one turn")
    return names


def _check_rows(flat: FlatEpisodes, rows: FlatEpisodes | FlatTurns) -> None:
    """Check the columns that episodes and turns share."""
    lengths, prompt_lengths = rows.lengths.tolist(), rows.prompt_lengths.tolist()
    if min(prompt_lengths, default=0) < 0 or any(map(operator.gt, prompt_lengths, lengths)):
        corrupt(f"prompt lengths {prompt_lengths} do not fit lengths {lengths}")
    versions = rows.versions.tolist()
    if any([not checks.INT32[0] <= n <= checks.INT32[1] and n != NO_VERSION for n in versions]):
        corrupt(f"policy versions {versions} are not 32-bit")
    if is_beyond_float32(rows.rewards):
        corrupt("a reward is beyond float32")
    if flat.logprobs is None and rows.has_logprobs.any():
        corrupt("logprobs are declared but missing")
    if True in rows.has_token_versions.tolist() and (
        flat.token_versions is None or not rows.lengths[rows.has_token_versions].all()
    ):
        corrupt("versions per token are declared but missing")


def _check_turns(flat: FlatEpisodes, turns: FlatTurns) -> None:
    """Check that the turns of each episode, if any, add up to its tokens."""
    _check_rows(flat, turns)
    lengths, begin = turns.lengths.tolist(), 0
    for i, (count, size) in enumerate(
        zip(turns.counts.tolist(), flat.lengths.tolist(), strict=True)
    ):
        end = begin + max(count, 0)
        if count < 0 or (count and sum(lengths[begin:end]) != size):
            corrupt(f"turns of {lengths[begin:end]} in an episode of {size} tokens")
        own = {*flat.token_extras, *flat.each_token_extras.get(i, ())}
        named = set[str]().union(*turns.token_extras[begin:end])
        if not named <= own:
            corrupt(f"token extras {sorted(named)} of turns, which their episode does not have")
        taken = TOKEN_REWARDS in {*own, *flat.extras, *flat.each_extras.get(i, ())}
        if not np.isnan(turns.rewards[begin:end]).all() and (taken or np.isnan(flat.rewards[i])):
            corrupt(f"rewards of turns, and an extra {TOKEN_REWARDS} or no reward in their episode")
        begin = end
    if begin != len(lengths):
        corrupt(f"{begin} turns counted, {len(lengths)} described")
    if (turns.has_logprobs > np.repeat(flat.has_logprobs, turns.counts)).any():
        corrupt("logprobs of turns, which their episode does not have")
    sizes = turns.lengths - turns.prompt_lengths  # of responses
    if not sizes[turns.has_token_versions].all():
        corrupt("a turn without a response has versions per token")
    if turns.token_rewards is not None:
        _check_token_rewards(flat, turns, turns.token_rewards, sizes.tolist())


def _check_token_rewards(
    flat: FlatEpisodes, turns: FlatTurns, rewards: NDArray[np.float32], sizes: list[int]
) -> None:
    """Check that the reward of a turn is the sum of those of its tokens."""
    if not np.isfinite(rewards).all():
        corrupt("a reward of a token is not finite")
    if np.isnan(turns.rewards[turns.has_token_rewards]).any():
        corrupt("a turn has token rewards but no reward")
    # Episodes without turns have tokens between those of turns.
    skipped = np.where(turns.counts > 0, 0, flat.lengths).cumsum()
    ends = turns.lengths.cumsum() + np.repeat(skipped, turns.counts)
    for turn in np.flatnonzero(turns.has_token_rewards).tolist():
        end = int(ends[turn])
        total_reward(rewards[end - sizes[turn] : end], float(turns.rewards[turn]))
