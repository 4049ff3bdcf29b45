"""What a view shows, to be taken along: as Parquet, as JSON, and as the SQL that gives the same.

All three are rows of a view of the database, up to `queries.MOST_ROWS`. They are read and sent a
part at a time, beside the pages, over a connection of their own.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import URL, Select
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from replaydb import analysis
from replaydb.analysis.columns import batch_of, schema_of
from replaydb.analysis.source import opened
from replaydb.database.prepared import execute
from replaydb.database.statements.walks import plain
from replaydb.ui import queries

MEDIA_TYPES = {
    "parquet": "application/vnd.apache.parquet",
    "json": "application/json",
    "sql": "application/sql",
}

#: Columns of JSON.
_JSON = ("tags", "metadata")


async def answer(
    request: Request,
    statement: Select[Any],
    rows: Callable[[], analysis.Rows] | None = None,
) -> Response:
    """A file of the name, and so of the kind, that the address ends with; it is sent in parts.

    Args:
        request: What is answered.
        statement: A query over the views.
        rows: Finds the same rows, a page at a time. None: they are few, and read at once.
    """
    url = request.app.state.url
    if _name(request).endswith(".sql"):
        text = await asyncio.to_thread(_literal, url, statement)
        return Response(f"{text};\n", headers=_headers(request))
    return await answer_rows(request, rows or partial(_at_once, url, statement))


async def answer_rows(request: Request, rows: Callable[[], analysis.Rows]) -> Response:
    """The same of rows that no SQL gives."""
    made = _FORMATS[_name(request).rpartition(".")[2]]
    parts = _parts(made(await asyncio.to_thread(rows)))
    first = await anext(parts, b"")  # what fails until then is answered as of a page
    return StreamingResponse(_with(first, parts), headers=_headers(request))


def _headers(request: Request) -> dict[str, str]:
    name = _name(request)
    return {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Type": MEDIA_TYPES[name.rpartition(".")[2]],
    }


def _name(request: Request) -> str:
    return request.url.path.rpartition("/")[2]


def _at_once(url: str | URL, statement: Select[Any]) -> analysis.Rows:
    """The few rows of a query over the views."""
    readable = plain(statement)
    schema = schema_of(readable)
    place = schema.get_field_index("group_id")

    def batches() -> Iterator[pa.RecordBatch]:
        with opened(url) as source:
            found = source.read(lambda connection: execute(connection, readable))
        yield batch_of(schema, found, lambda row: -1 if place < 0 else int(row[place]))

    return analysis.Rows(schema, batches)


def _literal(url: str | URL, statement: Select[Any]) -> str:
    """A statement as text of the store's engine, with its values in it."""
    with opened(url) as source:
        dialect = source.read(lambda connection: connection.dialect)
    return str(statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


def _batches(rows: analysis.Rows) -> Iterator[pa.RecordBatch]:
    left = queries.MOST_ROWS
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
            row |= {name: _read(row[name]) for name in _JSON if name in row}
            said.append(_dumped(row))
        yield (begin + ",\n".join(said)).encode()
        begin = ",\n"
    yield b"[]\n" if begin == "[\n" else b"\n]\n"


def _read(text: str) -> Any:
    """JSON, or the text of what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dumped(row: dict[str, Any]) -> str:
    """As JSON, which has no infinite numbers."""
    try:
        return json.dumps(row, default=_iso, allow_nan=False)
    except ValueError:
        known = {
            name: None if isinstance(it, float) and not math.isfinite(it) else it
            for name, it in row.items()
        }
        return json.dumps(known, default=_iso)


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


async def _with(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for part in rest:
            yield part


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
