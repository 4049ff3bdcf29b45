"""Conversion of turns of unfinished trajectories to rows and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from replaydb import codec
from replaydb.batch.stored import StoredGroup
from replaydb.database.tables.records import (
    Facts,
    PayloadRecord,
    Stored,
    check_scalars,
    damage_of,
    decoded_context,
    is_of_turn,
    turn_facts,
)
from replaydb.domain.episodes import Turn
from replaydb.domain.episodes.turns import origin_of, placed_after
from replaydb.errors import CorruptPayloadError, InvalidInputError


class TurnRecord(NamedTuple):
    """A turn that is ready to be appended.

    Attributes:
        facts: Columns of `turn` that follow from the turn itself.
        follows: Uid of the turn that it follows.
        begins_with: Uid of the turn that has the last of the tokens that it shares.
        payload: The part of the payload that holds it, without its number.
    """

    facts: dict[str, Any]
    follows: str | None
    begins_with: str | None
    payload: PayloadRecord


class Parent(NamedTuple):
    """A stored turn that another one follows."""

    uid: str
    num_tokens: int


def to_turn_record(
    turn: Turn, compression: Literal["zstd"] | None, parent: Parent | None = None
) -> TurnRecord:
    """Encode a turn.

    Args:
        turn: The turn. It has a uid.
        compression: As for `codec.encode`.
        parent: The stored turn that it follows; None: that is its own parent.

    Raises:
        InvalidInputError: Its own parent has no uid.
    """
    if parent is not None:
        turn = placed_after(turn, parent.num_tokens)
        follows: str | None = parent.uid
        begins_with = follows
    else:
        follows = None if turn.parent is None else _uid("turn.parent.uid", turn.parent)
        origin = origin_of(turn)
        begins_with = None if origin is None else _uid("the uid of the first turn", origin)
    part = codec.encode_turn(turn, follows, begins_with, compression=compression)
    payload = PayloadRecord(
        part=0,
        data=part.data,
        checksum=codec.checksum_of(part.data),
        codec_version=codec.VERSION,
        expanded_bytes=part.expanded_bytes,
    )
    return TurnRecord(turn_facts(turn), follows, begins_with, payload)


def _uid(field: str, turn: Turn) -> str:
    if turn.uid is None:
        raise InvalidInputError(field, "the uid under which that turn was appended", None)
    return turn.uid


class Unfinished(NamedTuple):
    """A pending group without its episodes, and some of its trajectories.

    Attributes:
        group: The group.
        turns: The turns of each trajectory, by position. Those without turns are omitted.
        damaged: Why the turns of others cannot be read, by position.
    """

    group: StoredGroup
    turns: Mapping[int, tuple[Turn, ...]]
    damaged: Mapping[int, str]


def unfinished_of(stored: Stored) -> dict[int, Unfinished | CorruptPayloadError]:
    """Decode pending groups, by id, from their rows and the parts of their context and turns.

    The value of a group whose row or context is damaged is the error.
    """
    found: dict[int, Unfinished | CorruptPayloadError] = {}
    for facts in stored.groups:
        mine = [part for part in stored.payloads if part["group_id"] == facts["id"]]
        try:
            found[facts["id"]] = _unfinished(facts, mine)
        except CorruptPayloadError as error:
            found[facts["id"]] = CorruptPayloadError(error.reason, [facts["id"]])
    return found


def _unfinished(facts: Facts, parts: list[Facts]) -> Unfinished:
    check_scalars(facts)
    context = decoded_context([part for part in parts if not is_of_turn(part)])
    of_turns: dict[int, list[Facts]] = {}
    for part in filter(is_of_turn, parts):
        of_turns.setdefault(part["of_part"], []).append(part)
    turns, damaged = {}, {}
    for position, mine in of_turns.items():
        try:
            turns[position] = _decoded(mine)
        except CorruptPayloadError as error:
            damaged[position] = error.reason
    return Unfinished(StoredGroup(facts, {}, context), turns, damaged)


def _decoded(parts: Iterable[Facts]) -> tuple[Turn, ...]:
    """Decode the turns of an unfinished trajectory from the rows of their parts.

    Raises:
        CorruptPayloadError: A part is damaged, or a turn that another one follows is missing.
    """
    known: dict[str, Turn] = {}
    for part in sorted(parts, key=lambda one: one["part"]):
        if (wrong := damage_of(part)) is not None:
            raise CorruptPayloadError(wrong)
        turn = codec.decode_turn(part["data"], part["expanded_bytes"], known)
        if turn.uid is None or turn.uid in known:
            raise CorruptPayloadError(f"turn {turn.uid!r} has no uid of its own")
        known[turn.uid] = turn
    return tuple(known.values())


def part_of(position: int, turn: int, expected: int) -> int:
    """Return the number of the part with an appended turn.

    Episodes have parts below the expected number of episodes. Turns have higher ones, so that no
    two transactions give the same number, and a turn comes after the turns that it follows.
    """
    return expected * (1 + turn) + position
