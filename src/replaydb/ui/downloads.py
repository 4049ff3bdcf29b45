"""What a view shows, to be taken along: as Parquet, as JSON, and as the SQL that gives the same.

All three are rows of a view of the database, up to `MOST_ROWS`. They are read and sent a part at a
time, beside the pages, over a connection of their own.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import URL, Case, Column, ColumnElement, ScalarSelect, Select, select
from sqlalchemy.sql.visitors import replacement_traverse
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from replaydb import analysis
from replaydb.analysis.columns import batch_of, schema_of
from replaydb.analysis.source import opened
from replaydb.database import filters
from replaydb.database.prepared import execute
from replaydb.database.schema import episode_group
from replaydb.database.statements.walks import plain
from replaydb.database.views import episode_overview, group_overview, training_history
from replaydb.errors import InvalidInputError
from replaydb.ui.addresses import Groups

#: Rows of a download; `replaydb export` has no limit.
MOST_ROWS = 100_000
MEDIA_TYPES = {
    "parquet": "application/vnd.apache.parquet",
    "json": "application/json",
    "sql": "application/sql",
}

_view = group_overview.table.c
_episodes = episode_overview.table.c
_drawn = training_history.table.c
#: Columns of JSON.
_JSON = ("tags", "metadata")


async def groups(url: str | URL, buffer: str, asked: Groups, kind: str) -> AsyncGenerator[bytes]:
    """The groups that an address asks for, as a file that is sent in parts.

    Raises:
        InvalidInputError: The address asks for a text, which downloads do not look for; or, as SQL,
            for something that the views do not have.
    """
    if asked.text is not None:
        raise InvalidInputError("text", "none in a download, which reads no completions", "one")
    if kind == "sql":
        text = await asyncio.to_thread(_literal, url, select_groups(buffer, asked))
        return _parts(iter([f"{text};\n".encode()]))
    rows = await asyncio.to_thread(
        analysis.groups,
        url,
        buffer=buffer,
        tasks=asked.task or None,
        statuses=asked.status or None,
        runs=asked.run or None,
        where=asked.condition,
    )
    return _parts(_FORMATS[kind](rows))


async def rows_of(url: str | URL, statement: Select[Any], kind: str) -> AsyncGenerator[bytes]:
    """The few rows of a query over the views, read at once, as a file."""
    if kind == "sql":
        text = await asyncio.to_thread(_literal, url, statement)
        return _parts(iter([f"{text};\n".encode()]))
    readable = plain(statement)
    schema = schema_of(readable)
    place = schema.get_field_index("group_id")

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            found = source.read(lambda connection: execute(connection, readable))
        yield batch_of(schema, found, lambda row: int(row[place]))

    return _parts(_FORMATS[kind](analysis.Rows(schema, batches)))


def select_episodes(buffer: str, group_id: int) -> Select[Any]:
    """The episodes of a group."""
    mine = (_episodes.buffer_name == buffer) & (_episodes.group_id == group_id)
    return select(*_episodes).where(mine).order_by(_episodes.position).limit(MOST_ROWS)


def select_drawn(
    buffer: str, *, step: int | None, run: str | None, draw: int | None
) -> Select[Any]:
    """The groups that a draw took, or the draws for a step, of one run or of all."""
    statement = select(*_drawn).where(_drawn.buffer_name == buffer)
    for column, value in ((_drawn.step, step), (_drawn.run_name, run), (_drawn.draw_id, draw)):
        if value is not None:
            statement = statement.where(column == value)
    return statement.order_by(_drawn.draw_id, _drawn.position).limit(MOST_ROWS)


def select_groups(buffer: str, asked: Groups) -> Select[Any]:
    """The same rows of `group_overview`.

    Raises:
        InvalidInputError: The filter asks for a column that the view does not have.
    """
    statement = select(*_view).where(_view.buffer_name == buffer)
    for column, names in (
        (_view.task_name, asked.task),
        (_view.group_status, asked.status),
        (_view.run_name, asked.run),
    ):
        if names:
            statement = statement.where(column.in_(names))
    where = filters.checked(asked.condition)
    if where is not None:
        statement = statement.where(_over_view(where))
    return statement.order_by(_view.group_id).limit(MOST_ROWS)


def _over_view(where: ColumnElement[bool]) -> ColumnElement[bool]:
    """A filter over the columns of groups as one over those of the view."""

    def replaced(element: Any, **_: Any) -> ColumnElement[Any] | None:
        match element:
            case Case() if element.else_ is episode_group.c.staleness:
                return _view.staleness  # the view knows what it is now
            case ScalarSelect():  # a bound of that column, for its index
                [bound] = element.element.selected_columns
                return cast("Case[Any]", bound).else_
            case Column(table=table, key=key) if table is episode_group:
                name = "group_id" if key == "id" else key
                if name not in _view:
                    expected = "columns that the view group_overview has"
                    raise InvalidInputError("where", expected, key)
                return _view[name]
        return None

    return replacement_traverse(where, {}, replaced)


def _literal(url: str | URL, statement: Select[Any]) -> str:
    """A statement as text of the store's engine, with its values in it."""
    with opened(url) as source:
        dialect = source.read(lambda connection: connection.dialect)
    return str(statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


def _batches(rows: analysis.Rows) -> Iterator[pa.RecordBatch]:
    left = MOST_ROWS
    for batch in rows.reader():
        yield batch[:left]
        left -= batch.num_rows
        if left <= 0:
            return


def _parquet(rows: analysis.Rows) -> Iterator[bytes]:
    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), rows.schema) as writer:
        for batch in _batches(rows):
            writer.write_batch(batch)
            yield sink.taken()
    yield sink.taken()


def _json(rows: analysis.Rows) -> Iterator[bytes]:
    """A list of objects."""
    begin = "[\n"
    for batch in _batches(rows):
        said = []
        for row in batch.to_pylist():
            row |= {name: json.loads(row[name]) for name in _JSON if name in row}
            said.append(json.dumps(row, default=_iso))
        yield (begin + ",\n".join(said)).encode()
        begin = ",\n"
    yield b"[]\n" if begin == "[\n" else b"\n]\n"


def _iso(time: Any) -> str:
    return str(time.isoformat())


_FORMATS = {"parquet": _parquet, "json": _json}


class _Sink(io.RawIOBase):
    """A file that is taken away as it is written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def taken(self) -> bytes:
        """What was written since the last time."""
        taken, self._parts = b"".join(self._parts), []
        return taken


def answer(request: Request, parts: AsyncGenerator[bytes]) -> Response:
    """A file of the name that the address ends with."""
    name = request.url.path.rpartition("/")[2]
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(parts, media_type=MEDIA_TYPES[kind_of(request)], headers=headers)


def kind_of(request: Request) -> str:
    """What an address asks for: one of `MEDIA_TYPES`."""
    return request.url.path.rpartition(".")[2]


async def _parts(made: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """Parts that are made in a thread of their own, which ends with whoever takes them."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1)
    try:
        while (part := await loop.run_in_executor(thread, partial(next, made, None))) is not None:
            if part:
                yield part
    finally:  # without waiting: who has gone away does not wait either
        if close := getattr(made, "close", None):
            thread.submit(close)
        thread.shutdown(wait=False)
