"""Episodes with their tokens, a row for each episode or for each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sqlalchemy import URL, ColumnElement, Connection

from replaydb import checks
from replaydb.analysis.columns import Damaged, to_damaged
from replaydb.analysis.episode_rows import Whole, batch_of_bare, batch_of_episodes, episode_schema
from replaydb.analysis.rows import Rows
from replaydb.analysis.source import Source, opened
from replaydb.analysis.tables import Names, Where, Which
from replaydb.analysis.token_rows import batch_of_tokens, token_schema
from replaydb.buffer.drawing import reasons
from replaydb.database.prepared import execute
from replaydb.database.records import Stored
from replaydb.database.repository import groups
from replaydb.database.statements.walks import select_whole_groups, walk_whole_groups
from replaydb.errors import CorruptPayloadError

Per: TypeAlias = Literal["episode", "token"]

#: Groups that are read together: so many at most, and so many bytes of tokens, or one.
CHUNK_GROUPS, CHUNK_BYTES = 512, 4 << 20
#: Bytes that a token takes at least once it is decoded: its id, mask, logprob and version.
TOKEN_BYTES = 13


def tokens(
    url: str | URL,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    per: Per = "episode",
    extras: Mapping[str, str] | None = None,
    damaged: Damaged = "raise",
) -> Rows:
    """Episodes with their tokens, and what is known of them and their groups.

    What an episode has not is null: `logprobs` that were not recorded, `turns` of an episode that
    was not built from turns, `policy_version` where it differs by token. Groups whose tokens were
    dropped are left out, and so are those without an episode. `docs/analysis.md` says what every
    column holds.

    Args:
        url: The store, as for `Store.open`.
        buffer: Only of groups of this buffer, or of these; by default of all.
        tasks: Only of groups of these tasks.
        statuses: Only of groups of these statuses.
        runs: Only of groups that these runs put.
        where: Only of groups that meet this expression over `replaydb.col`.
        per: "episode": a row for each episode, with lists of what its tokens have. "token": a row
            for each token.
        extras: Extras of episodes or tokens to give columns of their own, by name: the numpy dtype
            of their numbers, such as `{"ref_logprobs": "float32"}`. A column holds lists of an
            array's numbers in C order, or with `per="token"` the number that is of the token. All
            extras, of any dtype and shape, are in the columns `token_extras` and `extras` as well.
        damaged: What to do with a group whose stored bytes are damaged: "raise" a
            `CorruptPayloadError` that names it, or "skip" it.

    Raises:
        InvalidInputError: An argument is wrong, or, while it is read, an extra does not fit the
            dtype asked for.
        UnknownBufferError: There is no such buffer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    kind = checks.one_of("per", per, get_args(Per))
    wanted = episode_schema(extras)
    skip = to_damaged(damaged)
    which.check(url)
    if kind == "episode":
        return episode_rows(url, which, wanted, skip)
    shown = token_schema(wanted)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in episode_rows(url, which, wanted, skip).reader():
            yield batch_of_tokens(shown, batch)

    return Rows(shown, batches)


def episode_rows(
    url: str | URL,
    which: Which,
    schema: pa.Schema,
    damaged: Damaged,
    *,
    bare: bool = False,
    passed: NDArray[np.int64] | None = None,
    lost: list[int] | None = None,
) -> Rows:
    """A row for each episode. Episodes of a group are in one batch.

    Args:
        url: The store.
        which: Of which groups.
        schema: What the rows have.
        damaged: What to do with a group whose bytes are damaged.
        bare: Whether there is also a row for each group that has no episode, without position.
        passed: Ids of groups that are passed over, ascending.
        lost: Gets the ids of groups that have no rows, as their tokens were dropped or damaged.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            condition = which.condition(source)
            for ids in _chunks(source, condition, passed):
                several = list(_whole_groups(source, condition, ids, damaged, lost))
                if any(whole.pieces for whole in several):
                    yield batch_of_episodes(schema, [one for one in several if one.pieces])
                if bare and not all(whole.pieces for whole in several):
                    yield batch_of_bare(schema, [one for one in several if not one.pieces])

    return Rows(schema, batches)


def _chunks(
    source: Source, condition: ColumnElement[bool], passed: NDArray[np.int64] | None
) -> Iterator[list[int]]:
    """Ids of groups that are read together."""
    ids: list[int] = []
    size = 0
    for rows in source.pages(walk_whole_groups(condition)):
        found = np.array([row[0] for row in rows], np.int64)
        is_new = np.ones(len(rows), np.bool_) if passed is None else ~_are_among(found, passed)
        for group_id, num_bytes, num_tokens, *_ in compress(rows, is_new):
            own = max(_size(num_bytes), TOKEN_BYTES * _size(num_tokens))
            if ids and (size + own > CHUNK_BYTES or len(ids) == CHUNK_GROUPS):
                yield ids
                ids, size = [], 0
            ids.append(group_id)
            size += own
    if ids:
        yield ids


def _are_among(ids: NDArray[np.int64], passed: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of some ids are among many others, which ascend."""
    return np.searchsorted(passed, ids, "right") > np.searchsorted(passed, ids)


def _size(value: Any) -> int:
    """SQLite takes anything for a number."""
    return value if isinstance(value, int) else 0


def _whole_groups(
    source: Source,
    condition: ColumnElement[bool],
    ids: list[int],
    damaged: Damaged,
    lost: list[int] | None,
) -> Iterable[Whole]:
    def work(connection: Connection) -> Stored:
        rows = execute(connection, select_whole_groups(condition, ids))
        return groups.stored(source.backend, connection, [row._asdict() for row in rows])

    stored, found = source.stored(work)
    if found.corrupt and damaged == "raise":
        raise CorruptPayloadError(reasons(found.corrupt), sorted(found.corrupt))
    places: dict[int, list[int]] = {}
    for part in stored.payloads:
        if part["group_id"] in found.groups:
            places.setdefault(part["group_id"], []).append(part["part"])
    for facts in stored.groups:
        if (group := found.groups.get(facts["id"])) is not None:
            yield Whole.of(facts, group, sorted(places.get(group.id, ())))
        elif lost is not None:
            lost.append(facts["id"])
