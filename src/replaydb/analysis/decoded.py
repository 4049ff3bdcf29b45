"""Table of episodes with tokens: one row for each episode or each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sqlalchemy import URL, ColumnElement, Select, select

from replaydb.analysis.arrow import Damaged, Rows, to_damaged
from replaydb.analysis.decoded_groups import TOKEN_BYTES, DecodedGroup, in_batches
from replaydb.analysis.episode_columns import episode_schema, extra_fields
from replaydb.analysis.episode_rows import batch_of_empty, batch_of_episodes
from replaydb.analysis.source import Source, opened
from replaydb.analysis.tables import Names, Where, Which
from replaydb.buffer.drawing import check_intact
from replaydb.database.repository import groups
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import SHOWN
from replaydb.database.statements.scans import WINDOW, Scan
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import Facts, Stored, from_rows
from replaydb.database.tables.schema import buffer, episode_group, group, run
from replaydb.domain import checks
from replaydb.errors import InvalidInputError
from replaydb.util.chunks import chunks

Per: TypeAlias = Literal["episode", "token"]

#: Maximum number of groups, and of bytes of their tokens, that are read at once.
CHUNK_GROUPS, CHUNK_BYTES = 512, 4 << 20
#: Columns repeated for every token; strings become dictionaries, which store each once.
_SHARED = (
    "group_id", "position", "buffer_name", "run_name", "task_name", "prompt_uid", "group_status",
    "staleness", "reward", "advantage",
)  # fmt: skip
#: Columns of the token, and the list columns that they come from.
_OWN = {
    "token_id": "token_ids", "loss_mask": "loss_mask", "logprob": "logprobs",
    "token_version": "token_versions", "token_reward": "token_rewards",
}  # fmt: skip


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
    """Return episodes with their tokens and attributes, and attributes of their groups.

    Missing values are null: `logprobs` that were not recorded, `turns` of an episode that was not
    built from turns, `policy_version` if it differs by token. Groups without episodes and groups
    whose tokens were dropped are omitted. `docs/analysis.md` documents all columns.

    Args:
        url: The store, as for `Store.open`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only groups of these tasks.
        statuses: Only groups of these statuses.
        runs: Only groups that these runs put.
        where: Only groups that meet this condition over `replaydb.col`.
        per: "episode" (default): one row for each episode, with lists of token values. "token": one
            row for each token.
        extras: Extras of episodes or tokens that get a column of their own: numpy dtypes by name,
            such as `{"ref_logprobs": "float32"}`. The column has lists of the numbers of an array
            in C order, or with `per="token"` the number of the token. The columns `token_extras`
            and `extras` have all extras, of any dtype and shape.
        damaged: What to do with a group whose payload is damaged: "raise" (default) a
            `CorruptPayloadError` that names it while rows are read, or "skip" it.

    Returns:
        Lazy rows. While they are read, a value of more than 2 GiB raises `NotSupportedError`.

    Raises:
        InvalidInputError: An argument is invalid; or, while rows are read, an extra does not fit
            its dtype.
        UnknownBufferError: The buffer does not exist.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    kind = checks.one_of("per", per, get_args(Per))
    wanted = episode_schema(extras)
    skip = to_damaged(damaged)
    which.check(url)
    if kind == "episode":
        return episode_rows(url, which, wanted, skip)

    # Without the column of all token extras, only those that have a column are read.
    fields = frozenset([*(extras or ()), "token_rewards"])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in episode_rows(url, which, wanted, skip, fields=fields).reader():
            yield _batch_of_tokens(batch)

    return Rows(_batch_of_tokens(pa.RecordBatch.from_pylist([], wanted)).schema, batches)


def episode_rows(
    url: str | URL,
    which: Which,
    schema: pa.Schema,
    damaged: Damaged,
    *,
    include_empty: bool = False,
    exclude: NDArray[np.int64] | None = None,
    omitted: list[int] | None = None,
    fields: frozenset[str] | None = None,
) -> Rows:
    """Return one row for each episode. The episodes of a group are adjacent.

    Args:
        url: The store.
        which: Groups to read.
        schema: Columns of the rows.
        damaged: What to do with a group whose payload is damaged.
        include_empty: Whether to add a row, without position, for each group without episodes.
        exclude: Ids of groups to skip, ascending.
        omitted: List to which the ids of groups are added whose tokens were dropped or are damaged.
        fields: Names of the extras to read. Default: all.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            condition = which.condition(which.buffer_ids(source))
            scan = scan_group_sizes(condition).within(which.eligible)
            for ids in _chunks(source, scan, exclude):
                for several in in_batches(
                    _decoded_groups(source, condition, ids, damaged, omitted, fields)
                ):
                    if any(one.rows for one in several):
                        yield batch_of_episodes(schema, [one for one in several if one.rows])
                    if include_empty and not all(one.rows for one in several):
                        yield batch_of_empty(schema, [one for one in several if not one.rows])

    return Rows(schema, batches)


def _chunks(source: Source, scan: Scan, exclude: NDArray[np.int64] | None) -> Iterator[list[int]]:
    """Yield the ids of groups that are read at once."""
    found = (row for rows in source.pages(scan) for row in _new(rows, exclude))
    for rows in chunks(
        found,
        lambda row: max(_size(row.num_bytes), TOKEN_BYTES * _size(row.num_tokens)),
        CHUNK_BYTES,
        length=CHUNK_GROUPS,
    ):
        yield [row.id for row in rows]


def _new(rows: Sequence[Any], exclude: NDArray[np.int64] | None) -> Iterable[Any]:
    """Return the rows whose ids are not in a sorted array."""
    if exclude is None:
        return rows
    ids = np.array([row.id for row in rows], np.int64)
    return compress(rows, np.searchsorted(exclude, ids, "right") == np.searchsorted(exclude, ids))


def _size(value: Any) -> int:
    """Return a size, or 0 for a value of a wrong type, which SQLite does not prevent."""
    return value if isinstance(value, int) else 0


def _decoded_groups(
    source: Source,
    condition: ColumnElement[bool],
    ids: list[int],
    damaged: Damaged,
    omitted: list[int] | None,
    fields: frozenset[str] | None,
) -> Iterable[DecodedGroup]:
    def work(session: Session) -> Stored:
        rows = session.run(select_groups_with_names(condition, ids))
        return groups.stored(session, [row._asdict() for row in rows], fields)

    stored = source.stored(work)
    payloads = _by_group(stored.payloads)
    transcripts = _by_group(stored.transcripts)
    for facts in stored.groups:
        group_id = facts["id"]
        mine = payloads.get(group_id, ())
        found = from_rows([facts], mine, transcripts.get(group_id, ()), fields)
        if damaged == "raise":
            check_intact(found.corrupt)
        if group_id in found.groups:
            yield DecodedGroup.of(facts, found.groups[group_id])
        elif omitted is not None:
            omitted.append(group_id)


def _by_group(rows: Iterable[Facts]) -> dict[int, list[Facts]]:
    found: dict[int, list[Facts]] = {}
    for row in rows:
        found.setdefault(row["group_id"], []).append(row)
    return found


def _batch_of_tokens(episodes: pa.RecordBatch) -> pa.RecordBatch:
    """Return one row for each token of the episodes of a batch.

    Raises:
        InvalidInputError: A requested extra does not have one number for each token.
    """
    lengths = episodes["num_tokens"].to_numpy()
    parents = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    columns: list[pa.Array] = []
    for name in _SHARED:
        column = episodes[name]
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        columns.append(column.take(pa.array(parents)))
    index = np.arange(len(parents)) - starts[parents]
    columns += [pa.array(index), pa.array(_is_prompt(episodes))]
    extras = [one.name for one in extra_fields(episodes.schema)]
    for name in (*_OWN.values(), *extras):
        column = episodes[name]
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        is_right = (sizes == lengths) | ~column.is_valid().to_numpy(zero_copy_only=False)
        if not (is_right | ((sizes == lengths - 1) & _has_token_extra(episodes, name))).all():
            expected = "extras with one number for each token"
            raise InvalidInputError("extras", expected, f"{name!r}, of another shape")
        values = (np.cumsum(sizes) - sizes)[parents] + index
        columns.append(column.flatten().take(pa.array(values, mask=index >= sizes[parents])))
    of_episodes = episodes["policy_version"].take(pa.array(parents)).cast(pa.int32())
    names = [*_SHARED, "token_index", "is_prompt", *_OWN, *extras]
    versions = names.index("token_version")
    columns[versions] = pc.coalesce(columns[versions], of_episodes)
    return pa.RecordBatch.from_arrays(columns, names)


def _is_prompt(episodes: pa.RecordBatch) -> np.ndarray:
    """Return for each token whether it is in the prompt of its turn, or of its episode."""
    turns = episodes["turns"]
    counts = pc.fill_null(pc.list_value_length(turns), 0).to_numpy(zero_copy_only=False)
    num_turns = counts.clip(1)
    of_turns = np.repeat(counts > 0, num_turns)
    sizes, contexts = (
        np.repeat(episodes[name].to_numpy(), num_turns) for name in ("num_tokens", "prompt_length")
    )
    whole, prompts, shared = (
        turns.flatten().field(name).to_numpy(zero_copy_only=False)
        for name in ("num_tokens", "prompt_length", "shared")
    )
    sizes[of_turns] = whole - shared
    contexts[of_turns] = prompts - shared
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) < np.repeat(starts + contexts, sizes)


def _has_token_extra(episodes: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    """Return which episodes have a token extra; it may not have a value of the last token."""
    extras = episodes["token_extras"]
    is_named = pc.equal(extras.flatten().field("name"), name)
    found = np.zeros(len(episodes), np.bool_)
    found[pc.list_parent_indices(extras).filter(is_named).to_numpy()] = True
    return found


def scan_group_sizes(condition: ColumnElement[bool]) -> Scan:
    """Scan ids and sizes of groups, from which the reads of payloads are planned."""
    rows = select(group.id, group.num_bytes, group.num_tokens)
    return Scan(rows, [group.id], group.id, WINDOW, condition)


def select_groups_with_names(condition: ColumnElement[bool], ids: Sequence[int]) -> Select[Any]:
    """Select the columns of groups that users can see, with names of buffer, run and lineage."""
    return (
        select(*SHOWN, buffer.c.name.label("buffer_name"), run.c.lineage.label("run_lineage"))
        .join_from(episode_group, buffer, buffer.c.id == group.buffer_id)
        .outerjoin(run, run.c.id == group.run_id)
        .where(among(group.id, ids), condition)
        .order_by(group.id)
    )
