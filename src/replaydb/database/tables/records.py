"""Conversion of groups to rows, and of rows to groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from replaydb import codec
from replaydb.batch.stored import StoredGroup, check_whole
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.schema import CONTEXT_PART, LATE_PART
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus, Turn
from replaydb.domain.episodes.building import extreme_version
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.group import reward_stats
from replaydb.domain.episodes.turns import parents_of, set_fields
from replaydb.errors import CorruptPayloadError
from replaydb.packs import PackDamage

#: Payloads larger than this in total are decoded in a thread, because checksums and copies of
#: megabytes would block the event loop.
DECODE_INLINE_BYTES = 256 << 10

#: A row: values by column name.
Facts = Mapping[Any, Any]

#: Statuses that `put` and `update` may set. `open_group` and `lease` set the others.
PUTTABLE = frozenset(GroupStatus) - {GroupStatus.PENDING, GroupStatus.LEASED}

#: Values that a column of statuses may have.
STATUSES = frozenset(GroupStatus)

#: A sampling priority to put: a number, or the highest one of the stored groups of the task.
Priority = float | Literal["max"]


@dataclass(eq=False, slots=True)
class Pack:
    """An object outside the database that was written to hold payloads.

    Attributes:
        name: Name of the object.
        num_bytes: Size of the object.
        written_at: When the write began, by `time.monotonic`.
        id: Id of its row, which the current transaction may have inserted.
        is_committed: Whether its row is committed.
        is_gone: Whether it may have been removed, so that its payloads must be written again.
    """

    name: str
    num_bytes: int
    written_at: float
    id: int | None = None
    is_committed: bool = False
    is_gone: bool = False


@dataclass(eq=False, slots=True)
class PayloadRecord:
    """One part of a payload, ready to be stored.

    Attributes:
        part: Number of the part: the position of its first episode, or `CONTEXT_PART`; lower
            numbers are those of columns.
        data: The encoded bytes.
        checksum: Checksum of `data`.
        codec_version: Payload format of `data`.
        field: The column that the part holds; None: the episodes without heavy columns.
        of_part: Number of the part with the episodes of the column. Of a turn of an unfinished
            trajectory, which has no field: the position of the trajectory.
        expanded_bytes: Size of its tensors in memory; None in format 1.
        pack: Pack that holds the bytes, if they are outside the database.
        offset: Position of the first byte in the pack.
        repeated: Bytes of token extras by name that are stored again for tokens which segments
            share. Only in parts with episodes in format 2.
    """

    part: int
    data: bytes | memoryview
    checksum: int
    codec_version: int
    field: str | None = None
    of_part: int | None = None
    expanded_bytes: int | None = None
    pack: Pack | None = None
    offset: int = 0
    repeated: Mapping[str, int] | None = None

    @property
    def is_inside(self) -> bool:
        """Whether it is always in the database, as turns and late values are."""
        return self.field is None and (self.of_part is not None or self.part == LATE_PART)

    def row(self, group_id: int) -> dict[str, Any]:
        """Return the columns of `payload`."""
        row: dict[str, Any] = {
            "group_id": group_id,
            "part": self.part,
            "codec_version": self.codec_version,
            "checksum": self.checksum,
            "field": self.field,
            "of_part": self.of_part,
            "expanded_bytes": self.expanded_bytes,
        }
        if self.pack is None:
            return row | {"data": self.data}
        return row | {
            "data": None,
            "pack_id": self.pack.id,
            "pack_offset": self.offset,
            "pack_length": len(self.data),
        }


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group that is ready to be stored, without what depends on the state of the buffer.

    Attributes:
        facts: Columns of `episode_group` that follow from the group itself.
        episodes: Rows of `episode`, without `group_id`.
        turns: Rows of `turn`, without `group_id`.
        transcripts: Rows of `transcript`, without `group_id`.
        payloads: Parts of its payload.
        time_limit: Time from the moment it is stored to its deadline, if it has one.
    """

    facts: dict[str, Any]
    episodes: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    transcripts: list[dict[str, Any]]
    payloads: list[PayloadRecord]
    time_limit: timedelta | None = None

    @property
    def uid(self) -> str:
        """The idempotency key of the group."""
        uid: str = self.facts["group_uid"]
        return uid

    @property
    def task_name(self) -> str:
        """The task of the group."""
        name: str = self.facts["task_name"]
        return name

    @property
    def num_bytes(self) -> int:
        """Size of its payload in bytes, and of its texts in characters."""
        payload: int = self.facts["num_bytes"]
        return payload + sum(len(one["text"]) for one in self.transcripts)

    @property
    def is_completed(self) -> bool:
        """Whether its status is completed."""
        return bool(self.facts["group_status"] == GroupStatus.COMPLETED.value)


def check_puttable(group: EpisodeGroup) -> None:
    """Check that a put may store a group, with its status.

    Raises:
        InvalidInputError: It may not: the error names the statuses that it may set. Or only some
            extras of the group were read.
    """
    check_whole(group)
    checks.one_of("status", group.status, sorted(PUTTABLE))


def to_record(
    group: EpisodeGroup,
    compression: Literal["zstd"] | None,
    priority: Priority | Callable[[EpisodeGroup], Priority] | None = None,
    version: int = codec.VERSION,
) -> GroupRecord:
    """Encode a group in a version of the payload format.

    `priority`, or its result if it is a function, replaces the group's own.
    """
    if priority is None:
        priority = group.priority
    elif callable(priority):
        priority = priority(group)
    is_highest = isinstance(priority, str) and priority == "max"
    episodes = group.episodes
    payloads = payload_records(dict(enumerate(episodes)), group.context, compression, version)
    rows = [episode_row(one) for one in episodes]
    texts = group.texts
    facts = {
        "group_uid": group.group_uid,
        "prompt_uid": group.prompt_uid,
        "task_name": group.task_name,
        "group_status": group.status.value,
        "priority": None if is_highest else checks.priority("priority", priority),
        "min_policy_version": group.min_policy_version,
        "max_policy_version": group.max_policy_version,
        "num_episodes": len(episodes),
        "expected_episodes": group.expected_episodes,
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "num_bytes": sum(len(part.data) for part in payloads),
        **reward_facts(group.rewards),
        "times_sampled": 0,
        "attempts": 0,
        "min_episodes": None,
        "deadline": None,
        "has_transcript": any(text is not None for text in texts),
        "tags": group.tags,
    }
    return GroupRecord(
        facts,
        [{"position": i, **row} for i, row in enumerate(rows)],
        [{"position": i, **row} for i, one in enumerate(episodes) for row in turn_rows(one)],
        [{"position": i, "text": text} for i, text in enumerate(texts) if text is not None],
        payloads,
    )


def payload_records(
    episodes: Mapping[int, Episode],
    context: GroupContext,
    compression: Literal["zstd"] | None,
    version: int,
) -> list[PayloadRecord]:
    """Encode episodes, by position, and the context of their group.

    Adjacent episodes are in one part. If there is none at position 0, the context is in a part of
    its own, because an episode may be added there.
    """
    runs: dict[int, list[Episode]] = {}
    if context and 0 not in episodes:
        runs[CONTEXT_PART] = []
    number = CONTEXT_PART
    for position, episode in episodes.items():
        if position - 1 not in episodes:
            number = position
        runs.setdefault(number, []).append(episode)
    found: list[PayloadRecord] = []
    for i, (number, mine) in enumerate(runs.items()):
        given = GroupContext() if i else context
        parts = codec.encode(mine, given, compression=compression, version=version)
        found += _records_of(parts, number, version, len(found))
    return found


def _records_of(
    parts: Sequence[codec.Part], number: int, version: int, num_before: int = 0
) -> list[PayloadRecord]:
    """Return the records of the parts of a payload. Columns have numbers below all others."""
    return [
        PayloadRecord(
            part=number if one.field is None else CONTEXT_PART - num_before - i,
            data=one.data,
            checksum=codec.checksum_of(one.data),
            codec_version=version,
            field=one.field,
            of_part=None if one.field is None else number,
            expanded_bytes=one.expanded_bytes,
            repeated=one.repeated,
        )
        for i, one in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode that is ready to be added to a pending group.

    Attributes:
        facts: Columns of `episode`, without `group_id` and `position`.
        turns: Columns of `turn`, also without them.
        payloads: The parts of the payload that hold it.
        text: Transcript of the episode, if it has one.
    """

    facts: dict[str, Any]
    turns: list[dict[str, Any]]
    payloads: list[PayloadRecord]
    text: str | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the prompt."""
        tokens: int = self.facts["num_tokens"]
        return tokens

    @property
    def num_bytes(self) -> int:
        """Size of its payload in bytes."""
        return sum(len(part.data) for part in self.payloads)


def to_episode_record(
    episode: Episode,
    compression: Literal["zstd"] | None,
    version: int = codec.VERSION,
) -> EpisodeRecord:
    """Encode a single episode in a version of the payload format."""
    parts = codec.encode([episode], compression=compression, version=version)
    return EpisodeRecord(
        episode_row(episode), turn_rows(episode), _records_of(parts, 0, version), episode.text
    )


def reward_facts(rewards: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the reward columns of a group."""
    return {f"reward_{name}": value for name, value in reward_stats(rewards)._asdict().items()}


def episode_row(one: Episode) -> dict[str, Any]:
    """Return the columns of `episode` that follow from the episode itself."""
    rows = one.row_lengths
    ended = one.turns[-1] if one.turns and one.finish_reason is None else one
    return {
        "reward": one.reward,
        "advantage": one.advantage,
        "num_tokens": sum(rows),
        "longest_row": max(rows, default=0),
        "num_loss_tokens": one.num_loss_tokens,
        "num_turns": one.num_turns,
        "min_policy_version": one.min_policy_version,
        "max_policy_version": one.max_policy_version,
        "finish_reason": ended.finish_reason,
        "metadata": one.metadata,
    }


def turn_rows(one: Episode) -> list[dict[str, Any]]:
    """Return the columns of `turn` that follow from the turns of an episode."""
    if not one.turns:
        return []
    parents = (None if parent < 0 else parent for parent in parents_of(one.turns))
    every = zip(one.turns, parents, one.forest.is_trained, strict=True)
    return [
        {"turn": i, "parent": parent, **turn_facts(turn), "is_discarded": not is_trained}
        for i, (turn, parent, is_trained) in enumerate(every)
    ]


def turn_facts(one: Turn) -> dict[str, Any]:
    """Return the columns of `turn` that follow from the turn itself."""
    return {
        "turn_uid": one.uid,
        "agent": one.agent,
        "state": one.state,
        "finish_reason": one.finish_reason,
        "reward": one.reward,
        "num_prompt_tokens": one.segment.prompt_length,
        "num_tokens": one.segment.length,
        "num_loss_tokens": one.segment.num_loss_tokens,
        "min_policy_version": extreme_version([one], min),
        "max_policy_version": extreme_version([one], max),
        "is_discarded": one.is_discarded,
        "metadata": one.metadata,
    }


@dataclass(slots=True)
class Decoded:
    """Groups that were read, in the order of their rows.

    Attributes:
        groups: Intact groups, by id.
        corrupt: Why damaged groups cannot be read, by id.
        gone: Ids of groups without a payload, of which only the scalars are stored.
    """

    groups: dict[int, StoredGroup] = field(default_factory=dict)
    corrupt: dict[int, str] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class Stored(NamedTuple):
    """Rows of groups, of their payloads and of their transcripts."""

    groups: Sequence[Facts]
    payloads: Sequence[Facts] = ()
    transcripts: Sequence[Facts] = ()

    @classmethod
    def of(cls, found: Iterable[Iterable[Any]]) -> Self:
        """Return what up to three statements selected: groups, payloads, transcripts."""
        return cls(*([row._asdict() for row in rows] for rows in found))


async def decoded(stored: Stored, fields: frozenset[str] | None = None) -> Decoded:
    """Decode groups from their rows, in a thread if they are large. See `from_rows`."""
    if sum(row["num_bytes"] for row in stored.groups) > DECODE_INLINE_BYTES:
        return await asyncio.to_thread(from_rows, *stored, fields)
    return from_rows(*stored, fields)


def from_rows(
    groups: Iterable[Facts],
    payloads: Iterable[Facts],
    transcripts: Iterable[Facts],
    fields: frozenset[str] | None = None,
) -> Decoded:
    """Decode groups from their rows and from the rows of their payloads and transcripts.

    Of extras, only those in `fields` are kept; None: all.
    """
    parts: dict[int, list[Facts]] = {}
    for part in payloads:
        parts.setdefault(part["group_id"], []).append(part)
    texts: dict[int, dict[int, str]] = {}
    for line in transcripts:
        texts.setdefault(line["group_id"], {})[line["position"]] = line["text"]

    decoded = Decoded()
    for facts in groups:
        group_id, mine = facts["id"], parts.get(facts["id"], [])
        if not mine and is_gone(facts):
            decoded.gone.add(group_id)
            continue
        try:
            check_scalars(facts)
            decoded.groups[group_id] = _from_parts(facts, mine, texts.get(group_id), fields)
        except CorruptPayloadError as error:
            decoded.corrupt[group_id] = error.reason
    return decoded


def is_gone(facts: Facts) -> bool:
    """Whether a group without a payload had one that was dropped.

    An open group without episodes may never have had one. If it is archived, it cannot be
    distinguished from a group whose prompt was dropped, and True is returned.
    """
    return bool(facts["num_episodes"]) or facts["group_status"] == GroupStatus.ARCHIVED


def check_scalars(facts: Facts) -> None:
    """Check that the row of a group has values that can be read.

    Raises:
        CorruptPayloadError: A value is damaged; the error names its column.
    """
    for name, value in facts.items():
        if isinstance(value, Damaged):
            raise CorruptPayloadError(f"{name} can not be read: {value}")
    for name in mistyped(facts):
        raise CorruptPayloadError(f"{name} can not be read: {Damaged(facts[name])}")
    if not isinstance(facts["tags"], dict):
        raise CorruptPayloadError(f"tags are not a JSON object: {Damaged(facts['tags'])}")
    status("group_status", facts["group_status"])
    checks.optional(status, "leased_from", facts["leased_from"])


def mistyped(facts: Facts) -> list[str]:
    """Return the columns with which a draw calculates and that are not numbers."""
    names = ("times_sampled", "comparable_version")
    return [name for name in names if isinstance(facts.get(name), str | bytes)]


def status(column: str, value: Any) -> GroupStatus:
    """Return the status in a column, which may be damaged in a SQLite file.

    Raises:
        CorruptPayloadError: The value is not a status.
    """
    if value not in STATUSES:
        raise CorruptPayloadError(f"{column} can not be read: {Damaged(value)}")
    return GroupStatus(value)


def damage_of(part: Facts) -> str | None:
    """Return what is wrong with a row of `payload`, or None. SQLite stores values of any type.

    Parts from packs have no checksum here, because it was compared when the pack was read.
    """
    if isinstance(part["data"], PackDamage):
        return part["data"].reason
    kinds = {"part": int, "data": bytes | memoryview, "checksum": int}
    if part["pack_id"] is not None:
        del kinds["checksum"]
    for name, kind in kinds.items():
        if not isinstance(part[name], kind):
            return f"{name} can not be read: {Damaged(part[name])}"
    return None if part["checksum"] is None else codec.mismatch(part["data"], part["checksum"])


def is_of_turn(part: Facts) -> bool:
    """Whether a part is a turn of an unfinished trajectory."""
    return part["field"] is None and part["of_part"] is not None


def late_values(part: Facts) -> codec.late.Late:
    """Decode the part with values that arrived after the episodes of its group.

    Raises:
        CorruptPayloadError: It is damaged.
    """
    if (wrong := damage_of(part)) is not None:
        raise CorruptPayloadError(f"late values: {wrong}")
    return codec.late.decode(part["data"], codec.VERSION)


def _by_core(parts: Iterable[Facts]) -> dict[int, list[Facts]]:
    """Return the parts with episodes in order, each with those of its columns, by their numbers.

    Raises:
        CorruptPayloadError: A part is damaged, or the episodes of a column are missing.
    """
    cores: dict[int, list[Facts]] = {}
    columns: list[Facts] = []
    for part in parts:
        name = part["field"]
        if (wrong := damage_of(part)) is not None:
            raise CorruptPayloadError(wrong if name is None else f"extra {name!r}: {wrong}")
        if name is None:
            cores[part["part"]] = [part]
        else:
            columns.append(part)
    for part in columns:
        if part["of_part"] not in cores:
            raise CorruptPayloadError(f"extra {part['field']!r} of episodes that do not exist")
        cores[part["of_part"]].append(part)
    return dict(sorted(cores.items()))


def decoded_context(parts: Iterable[Facts]) -> GroupContext:
    """Decode the context of an incremental group from the parts that have no episodes."""
    context = GroupContext()
    for mine in _by_core(parts).values():
        context = codec.decode(
            [one["data"] for one in mine], [one["expanded_bytes"] for one in mine]
        ).context
    return context


def _from_parts(
    facts: Facts,
    parts: Iterable[Facts],
    texts: Mapping[int, str] | None,
    fields: frozenset[str] | None,
) -> StoredGroup:
    episodes: dict[int, Episode] = {}
    context = GroupContext()
    late, finished = [], []
    for part in parts:
        if part["part"] == LATE_PART:
            late.append(part)
        elif not is_of_turn(part):
            finished.append(part)
    for i, (number, mine) in enumerate(_by_core(finished).items()):
        contents = codec.decode(
            [one["data"] for one in mine], [one["expanded_bytes"] for one in mine], fields
        )
        episodes |= dict(enumerate(contents.episodes, number))
        if not i:
            context = contents.context
    if len(episodes) != facts["num_episodes"]:
        reason = f"{len(episodes)} episodes stored, {facts['num_episodes']} expected"
        raise CorruptPayloadError(reason)
    for part in late:
        codec.late.apply(late_values(part), episodes)
    for position, text in (texts or {}).items():
        if position in episodes:
            set_fields(episodes[position], text=text)
    return StoredGroup(facts, episodes, context, fields)
