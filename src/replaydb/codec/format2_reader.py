"""Reader of payload format 2, which `format2_writer` writes.

It accepts only what `Episode` accepts, and makes no array but views of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from replaydb import limits
from replaydb.codec import framing
from replaydb.codec.format2_writer import ELSEWHERE
from replaydb.codec.framing import corrupt
from replaydb.codec.sections import EPISODE, GROUP, JOINT, Sections, is_beyond_float32
from replaydb.domain import checks
from replaydb.domain.episodes import CORE_FIELDS, Episode, Turn
from replaydb.domain.episodes.arrays import Array, Versions, bits, dtype_name, to_float32
from replaydb.domain.episodes.building import TOKEN_REWARDS, check_kinds, extra_values, extras_of
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import NO_VERSION
from replaydb.domain.episodes.ragged import Ragged, Values, from_offsets, offsets_of
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
from replaydb.domain.episodes.turns import check_uids, set_fields, total_reward, trusted

_VARIANT = r"(?:~[1-9][0-9]{0,8}/)?"
_COLUMN = re.compile(
    _VARIANT + r"(loss_mask|logprobs|token_versions|turn/token_rewards|token/.+)", re.DOTALL
)
_STACKED = re.compile(_VARIANT + r"((?:episode|joint)/.+)", re.DOTALL)
#: Memory of the values of one segment in one column, also if it has none.
VIEW_BYTES = 500
#: Dtypes of the columns that are no extras.
_CODES = {LOSS_MASK: "U8", LOGPROBS: "F32", TOKEN_VERSIONS: "I32", TURN_REWARDS: "F32"}


def read(
    parts: Iterable[framing.Tensors], fields: Collection[str] | None = None
) -> tuple[list[Episode], GroupContext]:
    """Return the episodes and the context in the tensors of the parts of a payload.

    Large extras that are not in `fields` may be missing; None: none may.

    Raises:
        CorruptPayloadError: A section is missing, unknown or inconsistent with the others.
        InvalidInputError: A name or a JSON value is invalid for an episode.
    """
    tensors: framing.Tensors = {}
    large: set[str] = set()
    for part in parts:
        if twice := tensors.keys() & part.keys():
            corrupt(f"{sorted(twice)} in two parts")
        tensors |= part
        large |= set() if "segments" in part else _extra_names(part)
    sections = Sections(tensors)
    expected = sections.values("large_extras", None, _text, str)
    wanted = {*expected} if fields is None else {*expected} & {*fields}
    if wanted - large:
        corrupt(f"extra {min(wanted - large)!r} is missing")
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


def read_turn(tensors: framing.Tensors, known: Mapping[str, Turn]) -> Turn:
    """Return the turn in the tensors of its part.

    Args:
        tensors: The tensors.
        known: Turns of the same trajectory before it, by uid.

    Raises:
        CorruptPayloadError: As `read`, or a turn that it follows is missing.
        InvalidInputError: A name or a JSON value is invalid for a turn.
    """
    sections = Sections(tensors)
    parent, origin = (sections.turn_of(name, known) for name in ("follows", "begins_with"))
    segments = _segments(sections, None if origin is None else origin.segment)
    if len(segments) != 1:
        corrupt(f"{len(segments)} segments of one turn")
    _read_columns(sections, segments, [True])
    [[turn]] = _turns(sections, segments, [1])
    sections.check_empty()
    return set_fields(turn, parent=parent)


def _extra_names(part: framing.Tensors) -> set[str]:
    """Return the names of the extras in a part."""
    found = [_COLUMN.fullmatch(name) or _STACKED.fullmatch(name) for name in part]
    names = [match[1] for match in found if match is not None]
    names += [name for name in part if name.startswith(GROUP)]
    return {name.partition("/")[2] for name in names}


def _text(value: Any) -> str:
    return checks.string("large_extras", value)


def _segments(core: Sections, elsewhere: Segment | None = None) -> list[Segment]:
    """Return the segments of a part, with their tokens.

    `elsewhere`: the parent in another part, to which a segment can refer.
    """
    code, table = core.tensors.pop("segments", ("", np.empty(0)))
    if code != "I64" or table.ndim != 2 or table.shape[1] != 4:
        corrupt(f"segments is {code} {list(table.shape)}, not I64 [any, 4]")
    token_ids = core.column(TOKEN_IDS, "I32")
    found: list[Segment] = []
    end, total = 0, len(token_ids)
    for i, (parent, shared, context, response) in enumerate(table.tolist()):
        begin, end = end, end + context + response
        if shared < 0 or context < 0 or response < 0 or end > total:
            corrupt(f"segment {i} has {shared}, {context} and {response} tokens")
        above = elsewhere if parent == ELSEWHERE else None
        if parent != -1:
            if 0 <= parent < i:
                above = found[parent]
            if above is None or shared > above.length:
                corrupt(f"segment {i} begins with {shared} tokens of segment {parent}")
            if shared <= above.shared and parent != ELSEWHERE:
                # With such parents, reading a few tokens could take long.
                corrupt(f"segment {i} begins with {shared} tokens, none of segment {parent} itself")
        elif shared:
            corrupt(f"segment {i} begins with {shared} tokens of no segment")
        length = shared + context + response
        column = Column(((shared, token_ids[begin:end]),), length, above is not None)
        found.append(Segment(length, shared + context, {TOKEN_IDS: column}, above))
    if end != total:
        corrupt(f"{end} tokens in segments, {total} stored")
    return found


def _read_columns(sections: Sections, segments: Sequence[Segment], is_turn: Sequence[bool]) -> None:
    """Add the other columns to the segments."""
    matches = [*filter(None, map(_COLUMN.fullmatch, sections.tensors))]
    if len(matches) * len(segments) * VIEW_BYTES > limits.MAX_PART_BYTES:
        most = f"replaydb.limits.MAX_PART_BYTES is {limits.MAX_PART_BYTES}"
        corrupt(f"{len(matches)} columns of {len(segments)} segments, and {most}")
    inherited = [_read_column(sections, segments, is_turn, match[0], match[1]) for match in matches]
    if any(inherited):
        for one in segments:
            _check_inherited(one)


def _read_column(
    sections: Sections,
    segments: Sequence[Segment],
    is_turn: Sequence[bool],
    stored: str,
    name: str,
) -> bool:
    """Add a column to its segments. Return whether any of them takes values from its parent."""
    rows = _rows(sections, stored, len(segments))
    begins = sections.optional(f"begins/{stored}", "I64", len(rows))
    missing = None
    if begins is not None:
        missing = sections.optional(f"missing/{stored}", "I64", len(rows))
    owners = [segments[row] for row in rows]
    for of_turn, wrong in _refusals(name, covers_context=begins is not None):
        if any(is_turn[row] is of_turn for row in rows):
            corrupt(f"{stored} {wrong}")
    if any(name in one.columns for one in owners):
        corrupt(f"{stored} is the second one of a segment")
    spans = [(one.prompt_length, one.length) for one in owners]
    if begins is not None:
        spans = _spans(stored, name, rows, owners, begins.tolist(), missing)
    values = _values(sections, stored, name, sum(end - begin for begin, end in spans))
    last, inherits = 0, False
    for one, (begin, end) in zip(owners, spans, strict=True):
        first, last = last, last + end - begin
        goes_on = begin > 0 and begins is not None
        inherits |= goes_on
        one.columns[name] = Column(((begin, values[first:last]),), end, goes_on)
    return inherits


def _refusals(name: str, *, covers_context: bool) -> Iterator[tuple[bool, str]]:
    """Yield why turns (True) or other segments (False) cannot have a column, if they cannot."""
    if name == TURN_REWARDS:
        yield False, "belongs to no turn"
    if name == EXTRA + TOKEN_REWARDS:
        yield True, "belongs to a turn"
    if covers_context and not name.startswith(EXTRA):
        yield True, "covers the context of a turn"


def _spans(
    stored: str,
    name: str,
    rows: Sequence[int],
    owners: Sequence[Segment],
    begins: Sequence[int],
    missing: NDArray[np.int64] | None,
) -> list[tuple[int, int]]:
    """Return the first token of each segment with values of its own, and the end of its values."""
    behind = [0] * len(owners) if missing is None else missing.tolist()
    may_miss = int(name.startswith(EXTRA) and name != EXTRA + TOKEN_REWARDS)
    if any(begins) and name in (LOSS_MASK, TOKEN_VERSIONS):
        # A parent without such a column has values, too, which depend on its response.
        corrupt(f"{stored} continues values of a parent")
    found = []
    for row, one, begin, none in zip(rows, owners, begins, behind, strict=True):
        end = one.length - none
        if not 0 <= begin <= end or not 0 <= none <= may_miss:
            corrupt(f"{stored} covers tokens {begin} to {end} of segment {row}")
        found.append((begin, end))
    return found


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


def _values(sections: Sections, stored: str, name: str, count: int) -> Values:
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


def _array(sections: Sections, stored: str, section: str, count: int) -> Values:
    """Return the values of an extra, of `count` tokens or episodes."""
    array = sections.array(stored)
    rewards = EXTRA + TOKEN_REWARDS, JOINT + TOKEN_REWARDS
    if array.ndim and section.startswith((EXTRA, JOINT)) and section not in rewards:
        counts = sections.optional(f"counts/{stored}", "I64", None)
        if counts is not None:
            return _ragged(stored, section, array, counts, count)
    if array.shape[:1] != (count,):
        corrupt(f"{stored} is {list(array.shape)}, not [{count}, ...]")
    if section in rewards and dtype_name(array) == "float64":
        to_float32(stored, bits(array).reshape(-1))
    return array


def _ragged(
    stored: str, section: str, array: Array, counts: NDArray[np.int64], count: int
) -> Ragged:
    """Return values of `count` tokens, or of the tokens of `count` episodes."""
    size = len(counts) // max(count, 1) if section.startswith(JOINT) else 1
    if len(counts) != count * size:
        corrupt(f"counts/{stored} is [{len(counts)}], not those of {count}")
    return from_offsets(array, offsets_of(counts, len(array), f"counts/{stored}"))


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
    reasons = sections.texts("finish_reasons", count)
    metadata = sections.metadata("metadata", count)
    extras, joint = _stacked(sections, count)
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
        if turns or extras[i] or joint[i]:
            _check_episode(mine, turns, version, extras[i], joint[i])
            if rewards[i] is None and any(turn.reward is not None for turn in turns):
                corrupt("turns have rewards, and their episode has none")
        elif TOKEN_VERSIONS in mine[0].columns:
            _check_versions(mine[0], version)
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


def _stacked(
    sections: Sections, count: int
) -> tuple[list[dict[str, Values]], list[dict[str, Values]]]:
    """Return the extras of each episode, and its arrays over the tokens of all its turns."""
    extras: list[dict[str, Values]] = [{} for _ in range(count)]
    joint: list[dict[str, Values]] = [{} for _ in range(count)]
    for match in [*filter(None, map(_STACKED.fullmatch, sections.tensors))]:
        stored, section = match[0], match[1]
        rows = _rows(sections, stored, count)
        name = section.removeprefix(JOINT)
        if name != "policy_version":
            name = _extra_name(section)
        array = _array(sections, stored, section, len(rows))
        size = len(array) // max(len(rows), 1)
        target = extras if section.startswith(EPISODE) else joint
        for i, row in enumerate(rows):
            if name in target[row]:
                corrupt(f"{stored} has a second value of episode {row}")
            ragged = isinstance(array, Ragged)
            target[row][name] = array[i * size : (i + 1) * size] if ragged else array[i, ...]
    return extras, joint


def _token_versions(array: Values) -> NDArray[np.int32]:
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
    reasons = sections.texts("turn_finish_reasons", total)
    metadata = sections.metadata("turn_metadata", total)
    uids = sections.texts("turn_uids", total, checks.name)
    agents = sections.texts("turn_agents", total, checks.name)
    states = sections.texts("turn_states", total)
    discarded = sections.optional("turn/discarded", "BOOL", total)
    is_discarded = [False] * total if discarded is None else discarded.tolist()
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
                    uid=uids[at + i],
                    agent=agents[at + i],
                    state=states[at + i],
                    is_discarded=is_discarded[at + i],
                )
            )
            _check_turn(mine[-1])
        found.append(tuple(mine))
        first += max(1, count)
        at += count
    check_uids([("turns", [turn for mine in found for turn in mine])])
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
    extras: Mapping[str, Values],
    joint: Mapping[str, Values],
) -> None:
    """Check what `Episode` checks of an episode and its turns together."""
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
