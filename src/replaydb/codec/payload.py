"""Payload format: `FlatEpisodes` to bytes and back.

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
from collections.abc import Callable
from types import NoneType
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from replaydb.codec import framing
from replaydb.codec.framing import corrupt
from replaydb.domain import checks
from replaydb.domain.episodes import CORE_FIELDS
from replaydb.domain.episodes.arrays import TORCH_CODES, Array, from_bits, to_float32
from replaydb.domain.episodes.building import TOKEN_REWARDS
from replaydb.domain.episodes.context import GroupContext, to_prompt
from replaydb.domain.episodes.flat import NO_VERSION, FlatEpisodes, FlatTurns
from replaydb.domain.episodes.turns import total_reward
from replaydb.errors import CorruptPayloadError, InvalidInputError
from replaydb.util import escapes

#: The newest version of the format. All older ones can be read.
VERSION = 1

_T = TypeVar("_T")

_TURN_COLUMNS = (
    "counts",
    "lengths",
    "prompt_lengths",
    "rewards",
    "versions",
    "has_logprobs",
    "has_token_versions",
)
_EXTRA = re.compile(r"(?:each/(0|[1-9][0-9]{0,8})/)?(token|episode)/(.+)", re.DOTALL)


def encode(
    flat: FlatEpisodes, *, compression: Literal["zstd"] | None = None, version: int = VERSION
) -> bytes | memoryview:
    """Return the episodes as bytes, in this version of the format.

    The same episodes give the same bytes. A payload that would expand more than `decode` allows is
    not compressed.

    Raises:
        NotSupportedError: `compression` is "zstd" and zstandard is not installed.
    """
    blob = framing.write(_tensors(flat), version)
    return blob if compression is None else framing.compress(blob)


def decode(data: bytes | memoryview, checksum: int | None = None) -> FlatEpisodes:
    """Return the episodes in `data`. Arrays are read-only views of it unless it is compressed.

    Args:
        data: Result of `encode`.
        checksum: Result of `checksum_of` for it. Without it, altered bytes may decode to different
            episodes, but never to invalid ones.

    Raises:
        CorruptPayloadError: The bytes are truncated, altered or foreign.
        ClientTooOldError: They are of a newer version of the format.
        NotSupportedError: They are compressed and zstandard is not installed.
    """
    view = memoryview(data).toreadonly()
    if checksum is not None and (wrong := mismatch(view, checksum)):
        corrupt(wrong)
    tensors = framing.read(framing.decompress(view), VERSION)
    try:
        return _Reader(tensors).episodes()
    except (InvalidInputError, RecursionError) as error:
        raise CorruptPayloadError(str(error)) from error


def checksum_of(data: bytes | memoryview) -> int:
    """Return XXH3 of the bytes as a signed 64-bit number. It detects accidents, not tampering."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def mismatch(data: bytes | memoryview, checksum: int) -> str | None:
    """Return what is wrong with the checksum of the bytes, or None."""
    actual = checksum_of(data)
    return None if actual == checksum else f"checksum is {actual}, not {checksum}"


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


class _Reader:
    """Splits the tensors of a payload, and checks that `encode` could have written them."""

    def __init__(self, tensors: framing.Tensors) -> None:
        self._tensors = tensors
        self._json: dict[str, Any] = {}
        if (text := tensors.pop("json", None)) is not None:
            data = text[1].tobytes()
            self._json = framing.parse_json(data)
            if escapes.JSON_MARK in data:
                self._json = escapes.unescaped(self._json)

    def episodes(self) -> FlatEpisodes:
        """Return all episodes.

        Raises:
            CorruptPayloadError: A section is missing, unknown or inconsistent with the others.
            InvalidInputError: A name or a JSON value is invalid for an episode.
        """
        lengths = self._column("lengths", "I64")
        token_ids = self._column("token_ids", "I32")
        count, total = len(lengths), len(token_ids)
        sizes = lengths.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != total:
            corrupt(f"lengths {sizes} do not add up to {total} tokens")
        logprobs = self._optional("logprobs", "F32", total)
        token_versions = self._optional("token_versions", "I32", total)
        columns = {
            "prompt_lengths": self._column("prompt_lengths", "I64", count),
            "rewards": self._column("rewards", "F64", count),
            "advantages": self._column("advantages", "F64", count),
            "versions": self._column("versions", "I64", count),
            "has_logprobs": self._presence("has_logprobs", logprobs, count),
            "has_token_versions": self._presence("has_token_versions", token_versions, count),
            "loss_mask": self._column("loss_mask", "BOOL", total),
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
            finish_reasons=self._list("finish_reasons", count, _finish_reason, NoneType),
            metadata=self._list("metadata", count, _metadata, dict),
            turns=self._turns(count, total) if "turn/counts" in self._tensors else None,
            context=self._context(),
        )
        if self._tensors or self._json:
            corrupt(f"unknown sections {[*self._tensors, *self._json]}")
        _check_rows(flat, flat)
        if _is_beyond_float32(flat.advantages):
            corrupt("an advantage is beyond float32")
        if flat.logprobs is not None and np.isinf(flat.logprobs).any():
            corrupt("a logprob is infinite")
        if flat.turns is not None:
            _check_turns(flat, flat.turns)
        return flat

    def _context(self) -> GroupContext:
        extras: dict[str, Array] = {}
        for section in [name for name in self._tensors if name.startswith("group/")]:
            code, array = self._tensors.pop(section)
            name = checks.name(section, section.removeprefix("group/"))
            extras[name] = from_bits(array, TORCH_CODES.get(code, ""))
        return GroupContext(
            prompt=checks.optional(to_prompt, "prompt", self._json.pop("prompt", None)),
            prompt_ids=self._optional("prompt_ids", "I32", None),
            extras=extras,
        )

    def _turns(self, num_episodes: int, num_tokens: int) -> FlatTurns:
        lengths = self._column("turn/lengths", "I64")
        count = len(lengths)
        rewards = self._optional("turn/token_rewards", "F32", num_tokens)
        return FlatTurns(
            counts=self._column("turn/counts", "I64", num_episodes),
            lengths=lengths,
            prompt_lengths=self._column("turn/prompt_lengths", "I64", count),
            rewards=self._column("turn/rewards", "F64", count),
            versions=self._column("turn/versions", "I64", count),
            has_logprobs=self._column("turn/has_logprobs", "BOOL", count),
            has_token_versions=self._column("turn/has_token_versions", "BOOL", count),
            finish_reasons=self._list("turn_finish_reasons", count, _finish_reason, NoneType),
            metadata=self._list("turn_metadata", count, _metadata, dict),
            token_rewards=rewards,
            has_token_rewards=self._presence("turn/has_token_rewards", rewards, count),
            token_extras=self._list("turn_token_extras", count, _names, tuple),
        )

    def _column(self, name: str, code: str, length: int | None = None) -> NDArray[Any]:
        found, array = self._tensors.pop(name, (None, None))
        if array is None:
            corrupt(f"there is no {name}")
        if found != code or array.ndim != 1 or length not in (None, len(array)):
            corrupt(f"{name} is {found} {list(array.shape)}, not {code} [{length or 'any'}]")
        return array

    def _optional(self, name: str, code: str, length: int | None) -> NDArray[Any] | None:
        return self._column(name, code, length) if name in self._tensors else None

    def _presence(self, name: str, column: NDArray[Any] | None, count: int) -> NDArray[np.bool_]:
        """Return which rows have an optional column: as a tensor lists them, else all or none."""
        if column is not None and name in self._tensors:
            return self._column(name, "BOOL", count)
        return np.zeros(count, np.bool_) if column is None else np.ones(count, np.bool_)

    def _extras(self, lengths: list[int], total: int) -> dict[str, dict[Any, Any]]:
        """Return the extras by kind: `token`, `episode`, `each token` and `each episode`."""
        kinds = "token", "episode", "each token", "each episode"
        found: dict[str, dict[Any, Any]] = {kind: {} for kind in kinds}
        for section in list(self._tensors):
            if (match := _EXTRA.fullmatch(section)) is None:
                continue
            code, array = self._tensors.pop(section)
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
            target[checks.name(section, name)] = from_bits(array, TORCH_CODES.get(code, ""))
        if any(found.values()):
            _check_names(found)
        return found

    def _list(
        self, name: str, count: int, check: Callable[[Any], _T], absent: Callable[[], _T]
    ) -> tuple[_T, ...]:
        if name not in self._json:
            return tuple([absent() for _ in range(count)])
        values = self._json.pop(name)
        if not isinstance(values, list) or len(values) != count:
            corrupt(f"{name} is not a list of {count}")
        return tuple([check(value) for value in values])


def _check_names(extras: dict[str, dict[Any, Any]]) -> None:
    """Check that no episode has two extras of one name, or an extra with a reserved name."""
    for i in {None, *extras["each token"], *extras["each episode"]}:
        own = [*extras["each token"].get(i, ()), *extras["each episode"].get(i, ())]
        names = [*extras["token"], *extras["episode"], *own]
        if len(set(names)) != len(names) or not CORE_FIELDS.isdisjoint(names):
            corrupt(f"extras {names} of one episode have duplicate or reserved names")


def _finish_reason(value: Any) -> str | None:
    return checks.optional(checks.string, "finish_reason", value)


def _metadata(value: Any) -> dict[str, Any]:
    return checks.json_object("metadata", value, checks.text)


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
    if _is_beyond_float32(rows.rewards):
        corrupt("a reward is beyond float32")
    if flat.logprobs is None and rows.has_logprobs.any():
        corrupt("logprobs are declared but missing")
    if True in rows.has_token_versions.tolist() and (
        flat.token_versions is None or not rows.lengths[rows.has_token_versions].all()
    ):
        corrupt("versions per token are declared but missing")


def _is_beyond_float32(numbers: NDArray[np.float64]) -> bool:
    return any([abs(number) > checks.FLOAT32_MAX for number in numbers.tolist()])


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
        if taken and not np.isnan(turns.rewards[begin:end]).all():
            corrupt(f"rewards of turns, and an extra {TOKEN_REWARDS} in their episode")
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
