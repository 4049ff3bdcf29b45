"""Reader of payload format 2, which `format2_writer` writes.

It accepts only what `Episode` accepts, and makes no array but views of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from replaydb.codec import framing
from replaydb.codec.framing import corrupt
from replaydb.codec.sections import EPISODE, JOINT, Sections, is_beyond_float32
from replaydb.domain import checks
from replaydb.domain.episodes import CORE_FIELDS, Episode, Turn
from replaydb.domain.episodes.arrays import Array, Versions, bits, dtype_name, to_float32
from replaydb.domain.episodes.building import TOKEN_REWARDS, check_kinds, extra_values, extras_of
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import NO_VERSION
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    Column,
    Segment,
)
from replaydb.domain.episodes.turns import total_reward, trusted

_VARIANT = r"(?:~[1-9][0-9]{0,8}/)?"
_COLUMN = re.compile(
    _VARIANT + r"(loss_mask|logprobs|token_versions|turn/token_rewards|token/.+)", re.DOTALL
)
_STACKED = re.compile(_VARIANT + r"((?:episode|joint)/.+)", re.DOTALL)
#: Dtypes of the columns that are no extras.
_CODES = {LOSS_MASK: "U8", LOGPROBS: "F32", TOKEN_VERSIONS: "I32", TURN_REWARDS: "F32"}


def read(parts: Iterable[framing.Tensors]) -> tuple[list[Episode], GroupContext]:
    """Return the episodes and the context in the tensors of the parts of a payload.

    Heavy columns that are not among the parts are left out.

    Raises:
        CorruptPayloadError: A section is missing, unknown or inconsistent with the others.
        InvalidInputError: A name or a JSON value is invalid for an episode.
    """
    tensors: framing.Tensors = {}
    for part in parts:
        if twice := tensors.keys() & part.keys():
            corrupt(f"{sorted(twice)} in two parts")
        tensors |= part
    sections = Sections(tensors)
    segments = _segments(sections)
    turns = sections.optional("turns", "I64", None)
    counts = [0] * len(segments) if turns is None else turns.tolist()
    if min(counts, default=0) < 0 or sum(max(1, count) for count in counts) != len(segments):
        corrupt(f"{counts} turns of {len(segments)} segments")
    is_turn = [count > 0 for count in counts for _ in range(max(1, count))]
    _read_columns(sections, segments, is_turn)
    episodes = _episodes(sections, segments, counts)
    context = sections.context()
    sections.check_empty()
    return episodes, context


def _segments(core: Sections) -> list[Segment]:
    """Return the segments of a part, with their tokens."""
    code, table = core.tensors.pop("segments", ("", np.empty(0)))
    if code != "I64" or table.ndim != 2 or table.shape[1] != 4:
        corrupt(f"segments is {code} {list(table.shape)}, not I64 [any, 4]")
    token_ids = core.column(TOKEN_IDS, "I32")
    found: list[Segment] = []
    end = 0
    for i, (parent, shared, context, response) in enumerate(table.tolist()):
        begin, end = end, end + context + response
        if min(shared, context, response) < 0 or end > len(token_ids):
            corrupt(f"segment {i} has {shared}, {context} and {response} tokens")
        above = None
        if parent != -1:
            if not 0 <= parent < i or shared > found[parent].length:
                corrupt(f"segment {i} begins with {shared} tokens of segment {parent}")
            above = found[parent]
            if shared <= above.shared:  # with such parents, reading a few tokens could take long
                corrupt(f"segment {i} begins with {shared} tokens, none of segment {parent} itself")
        elif shared:
            corrupt(f"segment {i} begins with {shared} tokens of no segment")
        length = shared + context + response
        column = Column(((shared, token_ids[begin:end]),), length, inherits=above is not None)
        found.append(Segment(length, shared + context, {TOKEN_IDS: column}, above))
    if end != len(token_ids):
        corrupt(f"{end} tokens in segments, {len(token_ids)} stored")
    return found


def _read_columns(sections: Sections, segments: Sequence[Segment], is_turn: Sequence[bool]) -> None:
    """Add the other columns to the segments."""
    for match in [*filter(None, map(_COLUMN.fullmatch, sections.tensors))]:
        stored, name = match[0], match[1]
        rows = _rows(sections, stored, len(segments))
        begins = sections.optional(f"begins/{stored}", "I64", len(rows))
        missing = None
        if begins is not None:
            missing = sections.optional(f"missing/{stored}", "I64", len(rows))
        may_miss = int(name.startswith(EXTRA) and name != EXTRA + TOKEN_REWARDS)
        spans = []
        for i, row in enumerate(rows):
            one = segments[row]
            begin = one.prompt_length if begins is None else int(begins[i])
            end = one.length - (0 if missing is None else int(missing[i]))
            if not 0 <= begin <= end or not 0 <= one.length - end <= may_miss:
                corrupt(f"{stored} covers tokens {begin} to {end} of segment {row}")
            spans.append((row, begin, end))
        values = _values(sections, stored, name, sum(end - begin for _, begin, end in spans))
        last = 0
        for row, begin, end in spans:
            first, last = last, last + end - begin
            _check_column(stored, name, segments[row], is_turn[row], begins is not None)
            inherits = begins is not None and begin > 0
            if inherits and name in (LOSS_MASK, TOKEN_VERSIONS):
                # A parent without such a column has values, too, which depend on its response.
                corrupt(f"{stored} continues values of a parent")
            segments[row].columns[name] = Column(((begin, values[first:last]),), end, inherits)
    for one in segments:
        _check_inherited(one)


def _check_column(
    stored: str, name: str, one: Segment, is_turn: bool, covers_context: bool
) -> None:
    """Check that a segment may have a column."""
    if name in one.columns or (name == TURN_REWARDS and not is_turn):
        corrupt(f"{stored} is the second one of a segment, or belongs to no turn")
    if is_turn and covers_context and not name.startswith(EXTRA):
        corrupt(f"{stored} covers the context of a turn")
    if is_turn and name == EXTRA + TOKEN_REWARDS:
        corrupt(f"{stored} belongs to a turn")


def _check_inherited(one: Segment) -> None:
    """Check that the parent has the values that a segment takes from it."""
    for name, column in one.columns.items():
        if column.inherits and name != TOKEN_IDS:
            theirs = None if one.parent is None else one.parent.columns.get(name)
            if theirs is None or theirs.kind != column.kind or column.begin > theirs.end:
                corrupt(f"{name} continues values that the parent of a segment does not have")


def _rows(sections: Sections, stored: str, count: int) -> list[int]:
    """Return which of `count` segments or episodes have a column."""
    given = sections.optional(f"rows/{stored}", "I64", None)
    if given is None:
        return list(range(count))
    rows: list[int] = given.tolist()
    if rows != sorted(set(rows)) or not all(0 <= row < count for row in rows):
        corrupt(f"{stored} belongs to {rows} of {count}")
    return rows


def _values(sections: Sections, stored: str, name: str, count: int) -> Array:
    """Return the values of a column of tokens."""
    if name == LOSS_MASK:
        packed = sections.column(stored, "U8", -(-count // 8))
        mask = np.unpackbits(packed, count=count).view(np.bool_)
        mask.setflags(write=False)
        return mask
    if name in _CODES:
        values = sections.column(stored, _CODES[name], count)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            if name == TURN_REWARDS:
                corrupt("a reward of a token is not finite")
            if np.isinf(values).any():
                corrupt("a logprob is infinite")
        return values
    _extra_name(name)
    return _array(sections, stored, name, count)


def _array(sections: Sections, stored: str, section: str, count: int) -> Array:
    """Return the values of an extra."""
    array = sections.array(stored)
    if array.shape[:1] != (count,):
        corrupt(f"{stored} is {list(array.shape)}, not [{count}, ...]")
    rewards = EXTRA + TOKEN_REWARDS, JOINT + TOKEN_REWARDS
    if section in rewards and dtype_name(array) == "float64":
        to_float32(stored, bits(array).reshape(-1))
    return array


def _extra_name(section: str) -> str:
    """Return the name of an extra, from that of its section."""
    name = checks.name(section, section.partition("/")[2])
    if name in CORE_FIELDS:
        corrupt(f"an extra has the reserved name {name}")
    return name


def _episodes(
    sections: Sections, segments: Sequence[Segment], counts: Sequence[int]
) -> list[Episode]:
    count = len(counts)
    several = _turns(sections, segments, counts)
    rewards = _numbers(sections, "rewards", count)
    advantages = _numbers(sections, "advantages", count)
    versions = _versions(sections, "versions", count)
    reasons = sections.finish_reasons("finish_reasons", count)
    metadata = sections.metadata("metadata", count)
    extras: list[dict[str, Array]] = [{} for _ in counts]
    joint: list[dict[str, Array]] = [{} for _ in counts]
    for match in [*filter(None, map(_STACKED.fullmatch, sections.tensors))]:
        stored, section = match[0], match[1]
        rows = _rows(sections, stored, count)
        name = section.removeprefix(JOINT)
        if name != "policy_version":
            name = _extra_name(section)
        array = _array(sections, stored, section, len(rows))
        target = extras if section.startswith(EPISODE) else joint
        for i, row in enumerate(rows):
            if name in target[row]:
                corrupt(f"{stored} has a second value of episode {row}")
            target[row][name] = array[i, ...]
    found = []
    first = 0
    for i, turns in enumerate(several):
        mine = segments[first : first + max(1, counts[i])]
        first += len(mine)
        version: Versions = versions[i]
        if "policy_version" in joint[i]:
            if version is not None or not turns:
                corrupt("versions per token beside another version, or without turns")
            version = _token_versions(joint[i].pop("policy_version"))
        if rewards[i] is None and any(turn.reward is not None for turn in turns):
            corrupt("turns have rewards, and their episode has none")
        _check_episode(mine, turns, version, extras[i], joint[i])
        found.append(
            trusted(
                Episode,
                segment=None if turns else mine[0],
                turns=turns,
                version=version,
                joint_extras=joint[i],
                reward=rewards[i],
                advantage=advantages[i],
                finish_reason=reasons[i],
                extras=extras[i],
                metadata=metadata[i],
                text=None,
            )
        )
    return found


def _token_versions(array: Array) -> NDArray[np.int32]:
    if dtype_name(array) != "int32" or array.ndim != 1 or not len(array):
        corrupt("versions per token are not I32, or those of no token")
    return cast("NDArray[np.int32]", array)


def _turns(
    sections: Sections, segments: Sequence[Segment], counts: Sequence[int]
) -> list[tuple[Turn, ...]]:
    """Return the turns of each episode."""
    total = sum(counts)
    if not total:
        return [()] * len(counts)
    rewards = _numbers(sections, "turn/rewards", total)
    versions = _versions(sections, "turn/versions", total)
    parents = sections.optional("turn/parents", "I64", total)
    above = [-1] * total if parents is None else parents.tolist()
    reasons = sections.finish_reasons("turn_finish_reasons", total)
    metadata = sections.metadata("turn_metadata", total)
    found: list[tuple[Turn, ...]] = []
    first = at = 0
    for count in counts:
        mine: list[Turn] = []
        for i in range(count):
            segment, parent = segments[first + i], above[at + i]
            if not -1 <= parent < i:
                corrupt(f"turn {parent} of an episode is the parent of turn {i}")
            mine.append(
                trusted(
                    Turn,
                    segment=segment,
                    parent=None if parent < 0 else mine[parent],
                    version=versions[at + i],
                    reward=rewards[at + i],
                    finish_reason=reasons[at + i],
                    metadata=metadata[at + i],
                )
            )
            _check_turn(mine[-1])
        found.append(tuple(mine))
        first += max(1, count)
        at += count
    return found


def _check_turn(turn: Turn) -> None:
    rewards, reward = turn.token_rewards, turn.reward
    if rewards is not None:
        if reward is None:
            corrupt("a turn has token rewards but no reward")
        total_reward(rewards, reward)
    _check_versions(turn.segment, turn.version)


def _check_versions(segment: Segment, version: Versions) -> None:
    column = segment.columns.get(TOKEN_VERSIONS)
    if column is not None and (version is not None or not len(column.pieces[0][1])):
        corrupt("versions per token of no token, or beside another version")


def _check_episode(
    segments: Sequence[Segment],
    turns: Sequence[Turn],
    version: Versions,
    extras: Mapping[str, Array],
    joint: Mapping[str, Array],
) -> None:
    """Check what `Episode` checks of an episode and its turns together."""
    if not (turns or extras or joint):
        _check_versions(segments[0], version)
        return
    tokens = extras_of(turns) if turns else {name: [] for name in extra_values(segments[0])}
    for name, arrays in tokens.items():
        check_kinds(name, arrays)
    rewarded = {TOKEN_REWARDS} if any(turn.reward is not None for turn in turns) else set()
    names = [*tokens, *rewarded, *extras, *joint]
    if len(set(names)) != len(names) or (joint and not turns):
        corrupt(f"extras {names} of one episode have duplicate names, or belong to turns")
    total = sum(segment.length for segment in segments)
    arrays = [*joint.values(), *([version] if isinstance(version, np.ndarray) else [])]
    if any(array.shape[:1] != (total,) for array in arrays):
        corrupt(f"arrays of the turns of an episode do not have {total} values")
    if not turns:
        _check_versions(segments[0], version)
    elif version is not None and any(turn.policy_version is not None for turn in turns):
        corrupt("versions of turns, and of their episode")


def _numbers(sections: Sections, name: str, count: int) -> list[float | None]:
    found = sections.optional(name, "F64", count)
    if found is None:
        return [None] * count
    if is_beyond_float32(found):
        corrupt(f"one of {name} is beyond float32")
    return [None if number != number else number for number in found.tolist()]


def _versions(sections: Sections, name: str, count: int) -> list[int | None]:
    found = sections.optional(name, "I64", count)
    if found is None:
        return [None] * count
    versions = found.tolist()
    if any(not checks.INT32[0] <= n <= checks.INT32[1] and n != NO_VERSION for n in versions):
        corrupt(f"policy versions {versions} are not 32-bit")
    return [None if version == NO_VERSION else version for version in versions]
