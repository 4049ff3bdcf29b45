"""Groups of a store into files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL
from sqlalchemy.dialects import sqlite

from replaydb import checks
from replaydb.analysis.columns import Damaged, to_damaged
from replaydb.analysis.decoded import episode_rows
from replaydb.analysis.episode_rows import episode_schema
from replaydb.analysis.source import Source, opened
from replaydb.analysis.tables import Names, Where, Which
from replaydb.database.engines import sqlite_sql  # noqa: F401 - how filters are written
from replaydb.database.prepared import execute
from replaydb.database.repository import buffers as buffer_rows
from replaydb.database.statements.counts import count_groups
from replaydb.errors import InvalidInputError
from replaydb.exchange.files import Files, files_at, sha256_of, unavailable
from replaydb.exchange.formats import WRITERS, Format, Writer
from replaydb.exchange.manifest import Manifest, Part, packed

#: A file is ended after so many bytes of Arrow: what an export that is broken off does anew.
PART_BYTES = 256 << 20

Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export has written, those before it that it went on from included.

    Attributes:
        url: Where.
        num_files: How many files.
        num_groups: How many groups.
        num_episodes: How many episodes.
        num_bytes: Size of the files.
        num_left_out: Groups that were asked for and are in none, as their tokens were dropped or
            damaged.
    """

    url: str
    num_files: int
    num_groups: int
    num_episodes: int
    num_bytes: int
    num_left_out: int


def export_groups(
    url: str | URL,
    destination: str | Path,
    *,
    buffer: Names = None,
    tasks: Names = None,
    statuses: Names = None,
    runs: Names = None,
    where: Where = None,
    format: Format = "parquet",
    damaged: Damaged = "raise",
    progress: Progress | None = None,
) -> ExportReport:
    """Write groups with their tokens into files, the rows of `replaydb.analysis.tokens`.

    Files are in folders `buffer=NAME/task=NAME`, and each is there only when it is whole. What is
    broken off, by Ctrl-C too, is gone on with by the same call; one that had ended adds what was
    put since. Memory holds a few pages, whatever the size of the store.

    Args:
        url: The store, as for `Store.open`.
        destination: A folder, or a prefix of an object store as for `Store.open(payloads=)`.
        buffer: Only of this buffer, or of these; by default of all.
        tasks: Only of these tasks.
        statuses: Only of these statuses.
        runs: Only what these runs put.
        where: Only what meets this expression over `replaydb.col`.
        format: "parquet", compressed with zstd, or "jsonl".
        damaged: As for `replaydb.analysis.tokens`.
        progress: Called with how many groups were written, and how many there are.

    Raises:
        InvalidInputError: An argument is wrong, the destination has an export of other groups, or
            another export has begun to write there.
        UnknownBufferError: There is no such buffer.
        CorruptPayloadError: Stored bytes of a group are damaged; it names it.
        PayloadsUnavailableError: The destination cannot be reached or written.
        DatabaseError: There is no such store, or it cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    kind = checks.one_of("format", format, get_args(Format))
    skip = to_damaged(damaged)
    files = files_at("destination", destination)
    tell = checks.optional(checks.function, "progress", progress) or _quiet
    with opened(url) as source:
        places, total, made = _places(source, which)
    manifest = _begun(files, {"format": kind, **_described(which)}, made)
    manifest.begin(files)
    export = _Export(url, files, kind, skip, manifest, total, tell)
    for name, task in places:
        export.run(which, name, task)
    manifest.complete = True
    manifest.keep(files)
    return export.report()


@dataclass
class _Export:
    """One run of an export; a file at a time."""

    url: str | URL
    files: Files
    kind: Format
    damaged: Damaged
    manifest: Manifest
    total: int
    progress: Progress
    schema: pa.Schema = field(default_factory=episode_schema)
    lost: list[int] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """Groups in files that are whole."""
        return sum(part.num_groups for part in self.manifest.parts)

    def run(self, which: Which, buffer: str, task: str) -> None:
        """Write the groups of a task that are in no file yet."""
        mine = replace(which, buffers=frozenset([buffer]), tasks=frozenset([task]))
        rows = episode_rows(
            self.url,
            mine,
            self.schema,
            self.damaged,
            bare=True,
            passed=self.manifest.ids(buffer, task),
            lost=self.lost,
        )
        with rows.reader() as reader:
            batches = iter(reader)
            first = next(batches, None)
            while first is not None:
                first = self._file(buffer, task, first, batches)

    def _file(
        self, buffer: str, task: str, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]
    ) -> pa.RecordBatch | None:
        """Write a file; the first rows of the next one, if there is one."""
        number = sum((part.buffer, part.task) == (buffer, task) for part in self.manifest.parts)
        # Named by the writer too: of two that meet here, none writes over a file of the other.
        ending = f"part-{number:05}-{self.manifest.writer[:8]}.{self.kind}"
        name = f"buffer={_as_folder(buffer)}/task={_as_folder(task)}/{ending}"
        ids: set[int] = set()
        episodes = size = 0
        following: pa.RecordBatch | None = first
        with self.files.written(name) as path, unavailable(self.files.url):
            with _writing(WRITERS[self.kind](path, self.schema)) as writer:
                while following is not None and size < PART_BYTES:
                    writer.write(following)
                    ids.update(pc.unique(following["group_id"]).to_pylist())
                    episodes += len(following) - following["position"].null_count
                    size += following.nbytes
                    done = self.num_groups + len(ids)
                    self.progress(done, max(done, self.total))
                    following = next(batches, None)
            num_bytes, digest = path.stat().st_size, sha256_of(path)
        part = Part(name, buffer, task, len(ids), episodes, num_bytes, digest, packed(ids))
        self.manifest.parts.append(part)
        try:
            self.manifest.keep(self.files)
        except InvalidInputError:
            self.files.remove(name)
            raise
        return following

    def report(self) -> ExportReport:
        """What there is now."""
        parts = self.manifest.parts
        return ExportReport(
            self.files.url,
            len(parts),
            self.num_groups,
            sum(part.num_episodes for part in parts),
            sum(part.num_bytes for part in parts),
            len(self.lost),
        )


def _quiet(done: int, total: int | None) -> None:
    """Progress that nobody wants to hear of."""


@contextmanager
def _writing(writer: Writer) -> Iterator[Writer]:
    try:
        yield writer
    finally:
        writer.close()


def _places(source: Source, which: Which) -> tuple[list[tuple[str, str]], int, dict[str, str]]:
    """Buffers and tasks to be exported, how many groups that are, and when buffers were made."""
    known = source.buffer_ids()
    wanted = sorted(known if which.buffers is None else which.buffers)
    condition = which.condition(source)
    infos = {info.name: info for info in source.read(buffer_rows.all_buffers)}
    places: list[tuple[str, str]] = []
    for name in wanted:
        tasks = source.read(partial(buffer_rows.task_names, buffer_id=known[name]))
        places += [(name, task) for task in sorted(tasks)]
    if which.tasks is not None:
        places = [(name, task) for name, task in places if task in which.tasks]
    [(total,)] = source.read(lambda connection: execute(connection, count_groups(condition)))
    return places, int(total), {name: infos[name].created_at.isoformat() for name in wanted}


def _begun(files: Files, wanted: Mapping[str, Any], made: Mapping[str, str]) -> Manifest:
    """The export that is there, if it is of the same groups, or a new one.

    Raises:
        InvalidInputError: There is another, or there are files of something else.
    """
    found = Manifest.found(files)
    if found is None:
        if files.names():
            expected = "an empty place, or one with an export"
            raise InvalidInputError("destination", expected, f"{files.url}, which has other files")
        return Manifest({**wanted, "buffers": dict(made)})
    theirs = dict(found.wanted)
    buffers = theirs.pop("buffers")
    if theirs != wanted or any(buffers.get(name, time) != time for name, time in made.items()):
        expected = "a place without the export of other groups, or of another store"
        raise InvalidInputError("destination", expected, files.url)
    found.wanted["buffers"] = buffers | made
    return found


def _described(which: Which) -> dict[str, Any]:
    """Filters, so that others are seen to be others."""
    where = None
    if which.eligible is not None:
        compiled = which.eligible.compile(dialect=sqlite.dialect())
        params = sorted((name, repr(value)) for name, value in compiled.params.items())
        where = f"{compiled} {params}"
    names = {"buffer": which.buffers, "tasks": which.tasks, "statuses": which.statuses}
    known = {name: None if one is None else sorted(one) for name, one in names.items()}
    return {**known, "where": where}


def _as_folder(name: str) -> str:
    """A name that can stand in a path, as Hive writes it; the rows have the name itself."""
    quoted = quote(name, safe=" ")
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) <= 128:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{quoted[:96].rstrip('%')}-{digest}"
