"""Downloads of the rows of a page as Parquet or JSON, at most `MAX_ROWS`.

A download has its own connection and is read and sent in chunks.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from replaydb import analysis

MEDIA_TYPES = {
    "parquet": "application/vnd.apache.parquet",
    "json": "application/json",
}

#: Maximum number of rows of a download; `replaydb export` has no limit.
MAX_ROWS = 100_000

#: Columns that contain JSON.
_JSON_COLUMNS = ("tags", "metadata")


async def answer(
    request: Request,
    rows: Callable[..., analysis.Rows],
    *,
    positions: Sequence[int] | None = None,
    **options: Any,
) -> Response:
    """Return `rows(url, **options)` as a file of the type that the path ends with, in chunks.

    Args:
        request: The request.
        rows: Returns the rows.
        positions: Only the rows of episodes at these positions.
        options: Further arguments of `rows`.
    """
    name = request.url.path.rpartition("/")[2]
    kind = name.rpartition(".")[2]
    found = await asyncio.to_thread(rows, request.app.state.url, **options)
    chunks = _chunks(_FORMATS[kind](found.schema, _batches(found, positions)))
    first = await anext(chunks, b"")  # an error until here still becomes an error page
    return StreamingResponse(
        _with(first, chunks),
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
        media_type=MEDIA_TYPES[kind],
    )


def _batches(rows: analysis.Rows, positions: Sequence[int] | None) -> Iterator[pa.RecordBatch]:
    left = MAX_ROWS
    for batch in rows.reader():
        if positions is not None:
            batch = batch.filter(pc.is_in(batch["position"], pa.array(positions)))
        if batch.num_rows:
            yield batch[:left]
        left -= batch.num_rows
        if left <= 0:
            return


def _parquet(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, "w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            yield sink.take()
    yield sink.take()


def _json(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield a JSON array of objects."""
    begin = "[\n"
    for batch in batches:
        objects = []
        for row in batch.to_pylist():
            row |= {name: _parse(row[name]) for name in _JSON_COLUMNS if name in row}
            objects.append(_dump(row))
        yield (begin + ",\n".join(objects)).encode()
        begin = ",\n"
    yield b"[]\n" if begin == "[\n" else b"\n]\n"


def _parse(text: str) -> Any:
    """Parse JSON. Returns the text unchanged if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dump(row: dict[str, Any]) -> str:
    """Return a row as JSON, with null for infinite numbers and NaN."""
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
    """A write-only file whose content is removed by `take` while it is written."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._chunks.append(chunk)
        self._size += len(chunk)
        return len(chunk)

    def tell(self) -> int:
        return self._size

    def take(self) -> bytes:
        """Return what was written since the last call."""
        taken, self._chunks = b"".join(self._chunks), []
        return taken


async def _with(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


async def _chunks(made: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield chunks that a separate thread produces. The thread ends with this generator."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1)
    try:
        while (chunk := await loop.run_in_executor(thread, partial(next, made, None))) is not None:
            if chunk:
                yield chunk
    finally:  # without waiting, as the client may have disconnected
        if close := getattr(made, "close", None):
            thread.submit(close)
        thread.shutdown(wait=False)
