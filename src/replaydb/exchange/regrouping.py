"""Conversion of rows of episodes to groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from replaydb.domain import checks
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus, Turn
from replaydb.domain.episodes.arrays import (
    NUMPY_CODES,
    TORCH_CODES,
    from_bits,
    to_int32,
)
from replaydb.domain.episodes.building import check_kinds
from replaydb.domain.episodes.ragged import Ragged, Values, is_zero, joined, placed
from replaydb.domain.episodes.segments import EXTRA, Column, Segment
from replaydb.domain.episodes.turns import MARKS
from replaydb.errors import InvalidInputError
from replaydb.exchange.formats import Row, numbers
from replaydb.util import escapes

#: Statuses that a put does not accept, and those that groups are put with instead.
_PUT_AS = {
    GroupStatus.PENDING: GroupStatus.ABORTED,
    GroupStatus.LEASED: GroupStatus.COMPLETED,
}
#: Columns with the same value in all rows of a group.
_OF_GROUP = (
    "task_name", "prompt_uid", "priority", "group_status", "leased_from", "status_reason", "tags",
    "num_episodes", "expected_episodes", "prompt", "run_name", "run_lineage",
)  # fmt: skip
#: Expected order of rows, for errors.
SORTED = "adjacent rows for each group: sort them by buffer_name, group_id and position"
_NUMPY = frozenset(NUMPY_CODES.values())
_TORCH = {name: "int16" if name == "bfloat16" else "uint8" for name in TORCH_CODES.values()}


@dataclass(frozen=True, slots=True)
class Incoming:
    """A group read from a file.

    Attributes:
        group: The group, with a status that a put accepts.
        buffer: Buffer that it was exported from; None if the file does not have it.
        run: Run that had put it, and the lineage of that run; each may be None.
        group_id: Id that it had; None if the file does not have it.
        reason: Status reason, if the group is archived.
        counted: Whether its rows have `num_episodes`.
    """

    group: EpisodeGroup
    buffer: str | None
    run: tuple[str | None, str | None]
    group_id: int | None
    reason: str | None
    counted: bool


def groups_in(rows: Iterable[Row], name: str) -> Iterator[Incoming]:
    """Yield the groups of a file, whose rows must be adjacent.

    Raises:
        InvalidInputError: A value is missing or invalid; the error names the file and the group.
    """
    for (*_, uid), several in groupby(
        rows, key=lambda row: (row.get("buffer_name"), row.get("group_id"), row.get("group_uid"))
    ):
        try:
            if not isinstance(uid, str):
                raise InvalidInputError("group_uid", "a string in every row", uid)
            incoming = _group(_complete(list(several)))
        except InvalidInputError as error:
            field = f"{name}, group {uid!r}, {error.field}"
            raise InvalidInputError(field, error.expected, error.actual) from error
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else error
            raise InvalidInputError(f"{name}, group {uid!r}", "rows of episodes", reason) from error
        yield incoming


def _complete(rows: list[Row]) -> list[Row]:
    """Return the rows of a group sorted by position, after checking that they are complete.

    Raises:
        InvalidInputError: Rows are missing, repeated or contradict each other.
    """
    if any(row.get("position") is not None for row in rows):
        positions = [checks.whole_number("position", row.get("position")) for row in rows]
        if len(set(positions)) < len(positions):
            raise InvalidInputError(
                "position", "each position of the group once", sorted(positions)
            )
        rows = sorted(rows, key=itemgetter("position"))
    for row in rows[1:]:
        for name in _OF_GROUP:
            if row.get(name) != rows[0].get(name):
                found = f"{rows[0].get(name)!r:.80} and {row.get(name)!r:.80}"
                raise InvalidInputError(name, "the same in every row of the group", found)
    num_found = sum(row.get("token_ids") is not None for row in rows)
    if len(rows) > 1 and num_found < len(rows):
        raise InvalidInputError("token_ids", "tokens in every row of the group", None)
    number = rows[0].get("num_episodes")
    if number is not None and num_found != number:
        expected = f"{SORTED}; to import only some of the {number} episodes, omit this column"
        raise InvalidInputError("num_episodes", expected, f"{num_found} adjacent episodes")
    return rows


def _group(rows: Sequence[Row]) -> Incoming:
    first = rows[0]
    status = _status(first)
    priority = first.get("priority")
    group = EpisodeGroup(
        first["task_name"],
        [_episode(row) for row in rows if row.get("token_ids") is not None],
        prompt_uid=first.get("prompt_uid"),
        group_uid=first["group_uid"],
        priority=1.0 if priority is None else priority,
        status=status,
        tags=_tags(first),
        expected_episodes=first.get("expected_episodes"),
        prompt=_json(first, "prompt"),
        prompt_ids=first.get("group_prompt_ids"),
        extras=_arrays(first, "group_extras"),
    )
    run, lineage = (
        checks.optional(checks.string, name, first.get(name))
        for name in ("run_name", "run_lineage")
    )
    reason = first.get("status_reason") if status is GroupStatus.ARCHIVED else None
    group_id = checks.optional(checks.whole_number, "group_id", first.get("group_id"))
    counted = first.get("num_episodes") is not None
    return Incoming(group, first.get("buffer_name"), (run, lineage), group_id, reason, counted)


def _status(row: Row) -> GroupStatus:
    """Return the status that a group is put with."""
    status = GroupStatus(row.get("group_status") or GroupStatus.COMPLETED)
    if status is GroupStatus.LEASED and row.get("leased_from") is not None:
        status = GroupStatus(row["leased_from"])
    return _PUT_AS.get(status, status)


def _episode(row: Row) -> Episode:
    extras = _arrays(row, "token_extras")
    return Episode(
        **(_turns(row, extras) if row.get("turns") else _tokens(row, extras)),
        reward=row.get("reward"),
        advantage=row.get("advantage"),
        finish_reason=row.get("finish_reason"),
        extras=_arrays(row, "extras"),
        metadata=_json(row, "metadata"),
        text=_text(row),
    )


def _text(row: Row) -> Any:
    text = row.get("text")
    return escapes.unescape(text) if isinstance(text, str) else text


def _tokens(row: Row, extras: dict[str, Values]) -> dict[str, Any]:
    """Return the arguments of an episode without turns."""
    ids, length = row["token_ids"], row.get("prompt_length")
    given: dict[str, Any] = {
        "loss_mask": row.get("loss_mask"),
        "logprobs": row.get("logprobs"),
        "policy_version": _version(row),
        "token_extras": extras,
    }
    # With a prompt of one token, such an array would be taken for one of the response.
    has_short = any(array.shape[:1] == (len(ids) - 1,) for array in extras.values())
    if length is None or (length == 1 and has_short):
        return given | {"token_ids": ids}
    checks.whole_number("prompt_length", length, most=len(ids))
    return given | {"prompt_ids": ids[:length], "response_ids": ids[length:]}


def _version(row: Row) -> Any:
    versions = row.get("token_versions")
    return row.get("policy_version") if versions is None else versions


def _turns(row: Row, extras: dict[str, Values]) -> dict[str, Any]:
    """Return the arguments of an episode of turns."""
    ids, version = row["token_ids"], _version(row)
    of_turns = {name for turn in row["turns"] for name in turn["token_extras"] or ()}
    joint = {name: array for name, array in extras.items() if name not in of_turns}
    if isinstance(version, np.ndarray):
        joint["policy_version"] = to_int32("token_versions", version)
    turns: list[Turn] = []
    whole: list[dict[str, Values]] = []  # the values of `joint` for all tokens of each turn
    begin = 0
    for turn in row["turns"]:
        above, shared = _parent(turn, turns)
        end = begin + turn["num_tokens"] - shared
        if not 0 <= end - begin <= len(ids) - begin:
            raise ValueError(f"turns longer than the {len(ids)} tokens of the episode")
        turns.append(_turn(row, turn, extras, slice(begin, end), shared, above))
        before = None if above is None else whole[turn["parent"]]
        whole.append(
            {
                name: _values(turn, name, array[begin:end], shared, before)
                for name, array in joint.items()
            }
        )
        begin = end
    if begin != len(ids):
        raise ValueError(f"turns of {begin} tokens in an episode of {len(ids)} tokens")
    joint = {name: joined([arrays[name] for arrays in whole]) for name in joint}
    versions = joint.pop("policy_version", version)
    if any(turn.policy_version is not None for turn in turns):
        versions = None
    return {"turns": turns, "policy_version": versions, "token_extras": joint}


def _turn(
    row: Row,
    turn: Row,
    extras: dict[str, Values],
    own: slice,
    shared: int,
    above: Turn | None,
) -> Turn:
    """Return a turn of an episode.

    Args:
        row: The row of the episode.
        turn: The row of the turn.
        extras: Extras of the episode.
        own: The tokens of the episode that the turn does not have from its parent.
        shared: Number of tokens that it has from its parent.
        above: Its parent.
    """
    middle = own.start + turn["prompt_length"] - shared
    if not own.start <= middle <= own.stop:
        raise ValueError(
            f"{turn['prompt_length']} tokens of a prompt, of which {shared} are shared"
        )
    prompt, response = row["token_ids"][own.start : middle], slice(middle, own.stop)
    context: dict[str, Any] = {"parent": above, "prompt_ids": prompt}
    if above is not None and shared == above.num_tokens:
        context = {"parent": above, "new_ids": prompt}
    elif above is not None:
        context["prompt_ids"] = np.concatenate([above.segment.tokens(0, shared), prompt])
    given, columns = {}, {}
    for name in turn["token_extras"] or ():
        values = extras[name][own]
        column = None if above is None else _continued(turn, name, values, shared, above.segment)
        if column is not None:
            columns[EXTRA + name] = column
        elif above is not None and _is_of_response(turn, name, values[: len(prompt)]):
            given[name] = values[len(prompt) :]
        else:
            given[name] = _values(turn, name, values, shared, above)
    versions = turn["token_versions"]
    made = Turn(
        **context,
        response_ids=row["token_ids"][response],
        loss_mask=row["loss_mask"][response],
        logprobs=row["logprobs"][response] if turn["has_logprobs"] else None,
        reward=turn["reward"],
        token_rewards=row["token_rewards"][response] if turn["has_token_rewards"] else None,
        policy_version=turn["policy_version"]
        if versions is None
        else numbers("turns.token_versions", versions, np.int32),
        finish_reason=turn["finish_reason"],
        token_extras=given,
        metadata=_json(turn, "metadata"),
        **{name: turn[name] for name in MARKS if turn.get(name) is not None},
    )
    made.segment.columns.update(columns)
    return made


def _continued(turn: Row, name: str, own: Values, shared: int, above: Segment) -> Column | None:
    """Return the column of an extra that begins with values of the parent, without copying these.

    Args:
        turn: The row of the turn.
        name: Name of the extra.
        own: Its values for the tokens that the turn does not have from its parent.
        shared: Number of tokens that it has from its parent.
        above: The segment of its parent.

    Returns:
        None if the segment of the turn will have another parent, or other values are needed.
    """
    rest = _arrays(turn, "context_extras").get(name)
    theirs = above.columns.get(EXTRA + name)
    if rest is None or theirs is None or shared <= above.shared:
        return None
    count = turn["num_tokens"] - (name in (turn.get("short_extras") or ()))
    check_kinds(name, [rest, own])
    values = joined([rest, own[: max(count - shared, 0)]])
    begin = count - len(values)
    column = Column(((begin, values),), count, inherits=True)
    is_known = begin == min(shared, count) - len(rest) and 0 < begin <= theirs.end
    return column if is_known and column.kind == theirs.kind else None


def _is_of_response(turn: Row, name: str, context: Values) -> bool:
    """Whether an extra is 0 before the response. `context`: its values of new context tokens."""
    others = (*(turn.get("short_extras") or ()), *_arrays(turn, "context_extras"))
    return name not in others and is_zero(context)


def _parent(turn: Row, before: Sequence[Turn]) -> tuple[Turn | None, int]:
    """Return the parent of a turn, and how many of its tokens the turn begins with."""
    parent, shared = turn.get("parent"), turn.get("shared") or 0
    if parent is None:
        checks.whole_number("turns.shared", shared, most=0)
        return None, 0
    above = before[checks.whole_number("turns.parent", parent, most=len(before) - 1)]
    most = min(turn["prompt_length"], above.num_tokens)
    return above, checks.whole_number("turns.shared", shared, most=most)


def _values(
    turn: Row, name: str, own: Values, shared: int, above: Turn | dict[str, Values] | None
) -> Values:
    """Return the values of an extra for all tokens of a turn.

    Args:
        turn: The row of the turn.
        name: Name of the extra.
        own: Its values for the tokens that the turn does not have from its parent.
        shared: Number of tokens that it has from its parent.
        above: The parent, or the values of its tokens by name.
    """
    count = turn["num_tokens"] - (name in (turn.get("short_extras") or ()))
    parts = [own[: max(count - shared, 0)]]
    known = min(shared, count)
    if (rest := _arrays(turn, "context_extras").get(name)) is not None:
        known -= len(rest)
        parts.insert(0, rest)
    if known and rest is None:
        parts.insert(0, placed([], known, own))
    elif known and isinstance(above, Turn):
        parts.insert(0, above.segment.values(EXTRA + name, 0, known))
    elif known and isinstance(above, dict):
        parts.insert(0, above[name][:known])
    check_kinds(name, parts)
    values = joined(parts)
    if len(values) != count:
        raise ValueError(f"{len(values)} values of {name!r} for {count} tokens of a turn")
    return values


def _tags(row: Row) -> Any:
    text = row.get("tags")
    return None if text is None else json.loads(text)  # never escaped, like names


def _json(row: Row, name: str) -> Any:
    text = row.get(name)
    return None if text is None else escapes.from_json(text)


def _arrays(row: Row, name: str) -> dict[str, Values]:
    named = row.get(name) or ()
    found = {one["name"]: _array(one) for one in named}
    if len(found) < len(named):
        raise InvalidInputError(name, "unique names", sorted(one["name"] for one in named))
    return found


def _array(row: Row) -> Values:
    dtype = row["dtype"]
    if dtype not in _NUMPY and dtype not in _TORCH:
        raise ValueError(f"an array of dtype {dtype!r}")
    kind = np.dtype(_TORCH.get(dtype, dtype)).newbyteorder("<")
    if min(row["shape"], default=0) < 0:
        raise ValueError(f"an array of shape {row['shape']}")
    if kind == np.bool_ and max(row["data"], default=0) > 1:
        raise ValueError("bytes other than 0 and 1 in a bool array")
    array = from_bits(np.frombuffer(row["data"], kind).reshape(row["shape"]), dtype)
    counts = row.get("counts")
    return array if counts is None else Ragged(array, counts)
