"""Export of groups to Parquet or JSON Lines files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL
from sqlalchemy.dialects import sqlite

from replaydb.analysis.arrow import Damaged, to_damaged
from replaydb.analysis.decoded import episode_rows
from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.source import Source, opened
from replaydb.analysis.tables import Names, Where, Which
from replaydb.database.repository import buffers as buffer_rows
from replaydb.database.statements.episode_group import count_groups
from replaydb.domain import checks
from replaydb.errors import InvalidInputError
from replaydb.exchange.files import Files, files_at, sha256_of, unavailable
from replaydb.exchange.formats import WRITERS, Format
from replaydb.exchange.manifest import Manifest, Part, packed
from replaydb.util.progress import Progress, no_progress

#: Size of a file, in bytes of Arrow data. An interrupted export repeats at most one file.
PART_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Files of an export, including those of earlier calls that it resumed.

    Attributes:
        url: Folder or URL of the export.
        num_files: Number of files.
        num_groups: Number of groups in the files.
        num_episodes: Number of episodes in the files.
        num_bytes: Total size of the files in bytes.
        num_left_out: Number of selected groups that were not exported, because their tokens were
            dropped or are damaged.
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
    """Export groups and tokens to files, with the rows of `replaydb.analysis.tokens`.

    Files are in folders `buffer=NAME/task=NAME`; a file appears only when it is complete. To resume
    an interrupted export, make the same call again. After a finished export, the same call adds
    groups that were put, or came to match, since then. Memory use is bounded.

    Args:
        url: The store, as for `Store.open`.
        destination: A folder, or a prefix of an object store as for `Store.open(payloads=)`.
        buffer: Name or names of buffers; None (default) for all.
        tasks: Only groups of these tasks.
        statuses: Only groups of these statuses.
        runs: Only groups that these runs put.
        where: Only groups that meet this condition over `replaydb.col`.
        format: "parquet" (default), compressed with zstd, or "jsonl".
        damaged: "raise" (default) or "skip", as for `replaydb.analysis.tokens`.
        progress: Called with the number of exported groups, and their total.

    Returns:
        Counts of all files of the export.

    Raises:
        InvalidInputError: An argument is invalid, the destination has an export with other filters
            or of another store, or another export has begun to write there.
        UnknownBufferError: The buffer does not exist.
        CorruptPayloadError: The payload of a group is damaged; the error names the group.
        NotSupportedError: A value is too large for the format; the error names its group.
        PayloadsUnavailableError: The destination cannot be reached or written.
        DatabaseError: The store does not exist or cannot be read.
    """
    which = Which.of(buffer, tasks, statuses, runs, where)
    kind = checks.one_of("format", format, get_args(Format))
    skip = to_damaged(damaged)
    files = files_at("destination", destination)
    notify = checks.optional(checks.function, "progress", progress) or no_progress
    with opened(url) as source:
        tasks_of_buffers, total, created = _tasks(source, which)
    manifest = _manifest(files, {"format": kind, **_described(which)}, created)
    manifest.begin(files)
    export = _Export(url, files, kind, skip, manifest, total, notify)
    for name, task in tasks_of_buffers:
        export.run(which, name, task)
    manifest.complete = True
    manifest.save(files)
    return export.report()


@dataclass
class _Export:
    """A running export. Writes one file at a time."""

    url: str | URL
    files: Files
    kind: Format
    damaged: Damaged
    manifest: Manifest
    total: int
    progress: Progress
    schema: pa.Schema = field(default_factory=episode_schema)
    omitted: list[int] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """Number of groups in complete files."""
        return sum(part.num_groups for part in self.manifest.parts)

    def run(self, which: Which, buffer: str, task: str) -> None:
        """Write the groups of a task that are not in a file yet."""
        mine = replace(which, buffers=frozenset([buffer]), tasks=frozenset([task]))
        rows = episode_rows(
            self.url,
            mine,
            self.schema,
            self.damaged,
            include_empty=True,
            exclude=self.manifest.ids(buffer, task),
            omitted=self.omitted,
        )
        with rows.reader() as reader:
            batches = iter(reader)
            first = next(batches, None)
            while first is not None:
                first = self._file(buffer, task, first, batches)

    def _file(
        self, buffer: str, task: str, first: pa.RecordBatch, batches: Iterator[pa.RecordBatch]
    ) -> pa.RecordBatch | None:
        """Write a file. Returns the first rows of the next file, or None."""
        number = sum((part.buffer, part.task) == (buffer, task) for part in self.manifest.parts)
        # The name includes the writer, so that concurrent exports do not overwrite each other.
        ending = f"part-{number:05}-{self.manifest.writer[:8]}.{self.kind}"
        name = f"{self.manifest.folder(buffer, task)}/{ending}"
        ids: set[int] = set()
        episodes = size = 0
        following: pa.RecordBatch | None = first
        with self.files.written(name) as path, unavailable(self.files.url):
            with closing(WRITERS[self.kind](path, self.schema)) as writer:
                while following is not None:
                    if size >= PART_BYTES and following["group_id"][0].as_py() not in ids:
                        break  # all rows of a group are in one file
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
            self.manifest.save(self.files)
        except InvalidInputError:
            self.files.remove(name)
            raise
        return following

    def report(self) -> ExportReport:
        """Return the counts so far."""
        parts = self.manifest.parts
        return ExportReport(
            self.files.url,
            len(parts),
            self.num_groups,
            sum(part.num_episodes for part in parts),
            sum(part.num_bytes for part in parts),
            len(self.omitted),
        )


def _tasks(source: Source, which: Which) -> tuple[list[tuple[str, str]], int, dict[str, str]]:
    """Return (buffer, task) pairs, the number of groups, and creation times of the buffers."""
    known = source.buffer_ids()
    wanted = sorted(known if which.buffers is None else which.buffers)
    condition = which.condition(which.buffer_ids(source))
    infos = {info.name: info for info in source.read(buffer_rows.all_buffers)}
    pairs: list[tuple[str, str]] = []
    for name in wanted:
        tasks = source.read(partial(buffer_rows.task_names, buffer_id=known[name]))
        pairs += [(name, task) for task in sorted(tasks)]
    if which.tasks is not None:
        pairs = [(name, task) for name, task in pairs if task in which.tasks]
    [(total,)] = source.read(lambda session: session.run(count_groups(condition)))
    return pairs, int(total), {name: infos[name].created_at.isoformat() for name in wanted}


def _manifest(files: Files, wanted: Mapping[str, Any], created: Mapping[str, str]) -> Manifest:
    """Return the manifest of an earlier export of the same groups, or a new one.

    Raises:
        InvalidInputError: The destination has another export, or other files.
    """
    found = Manifest.load(files)
    if found is None:
        if files.names():
            expected = "an empty location, or one with an export"
            raise InvalidInputError("destination", expected, f"{files.url}, which has other files")
        return Manifest({**wanted, "buffers": dict(created)})
    earlier = dict(found.wanted)
    buffers = earlier.pop("buffers")
    if earlier != wanted or any(buffers.get(name, time) != time for name, time in created.items()):
        expected = "a location without an export of other groups or of another store"
        raise InvalidInputError("destination", expected, files.url)
    found.wanted["buffers"] = buffers | created
    return found


def _described(which: Which) -> dict[str, Any]:
    """Return the filters as JSON values, to detect an export with other filters."""
    where = None
    if which.eligible is not None:
        compiled = which.eligible.compile(dialect=sqlite.dialect())
        params = sorted((name, repr(value)) for name, value in compiled.params.items())
        where = f"{compiled} {params}"
    names = {"buffer": which.buffers, "tasks": which.tasks, "statuses": which.statuses}
    known = {name: None if one is None else sorted(one) for name, one in names.items()}
    return {**known, "where": where}
