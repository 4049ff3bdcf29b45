"""Import of groups from Parquet or JSON Lines files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL

from replaydb import blocking
from replaydb.domain import checks
from replaydb.domain.episodes import EpisodeGroup, GroupStatus
from replaydb.errors import DuplicateGroupError, InvalidInputError
from replaydb.exchange.files import Files, files_at, sha256_of, unavailable
from replaydb.exchange.formats import NAMES, names_of, rows_of
from replaydb.exchange.manifest import NAME, Manifest, Part
from replaydb.exchange.regrouping import SORTED, Incoming, groups_in
from replaydb.util.chunks import chunks
from replaydb.util.progress import Progress, no_progress

#: Maximum number of groups and tokens of a put; a single group may have more tokens.
PUT_GROUPS, PUT_TOKENS = 256, 1 << 20
#: Seconds to wait for capacity or a rate limit.
PATIENCE_SECONDS = 60.0
#: Number of stores that are open at once, one for each run: groups keep the run that put them.
OPEN_RUNS = 4


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import.

    Attributes:
        num_files: Number of files read.
        num_groups: Number of groups in the files.
        num_episodes: Number of episodes of these groups.
        num_put: Number of groups that were put. The others were skipped, because their uid exists
            in the buffer, or the files have a newer group with the same uid.
    """

    num_files: int
    num_groups: int
    num_episodes: int
    num_put: int


def import_groups(
    url: str | URL,
    source: str | Path,
    *,
    buffer: str | None = None,
    create: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the groups of an export, or of other files with such rows, into a store.

    Groups keep their uids, tags, priorities, prompts, texts, runs and statuses. Leased groups get
    the status that they were leased from, and pending groups become `aborted`. Groups whose uid
    exists in the buffer are skipped, so you can rerun an interrupted import. Of several groups of a
    buffer with the same uid, the newest is put. Ids, times and draws are new; `replaydb copy` keeps
    them. Files are read twice: nothing is put until the names in all of them, and the checksums of
    an export, have been checked. An invalid group is found only when groups before it have been
    put; import the corrected file again.

    Args:
        url: The store, as for `Store.open`. Its tables must exist.
        source: A folder, a file, or a prefix of an object store.
        buffer: Put all groups into this buffer. None (default) uses the names in the files.
        create: Create missing buffers.
        progress: Called with the number of groups read, and their total or None if it is unknown.

    Returns:
        Counts of files and groups.

    Raises:
        InvalidInputError: An argument is invalid, the files have no rows of episodes, the export is
            not finished, a file is missing or was changed, or a run exists in the store with
            another lineage.
        UnknownBufferError: A buffer does not exist, and `create` is False.
        BufferFullError: The buffer has no capacity left.
        PayloadsUnavailableError: The source cannot be reached.
        DatabaseError: The store does not exist or cannot be written.
    """
    target = checks.optional(checks.name, "buffer", buffer)
    may_create = checks.flag("create", create)
    notify = checks.optional(checks.function, "progress", progress) or no_progress
    files = files_at("source", source)
    groups = episodes = put = 0
    with _Stores(url, may_create) as stores:
        names, total = _parts(files)
        latest, in_several = _latest(files, names)
        for name in names:
            with files.read(name) as path:
                found = _undivided(groups_in(rows_of(path, name), name), name, in_several)
                for batch in _batches(found):
                    wanted = [one for one in batch if not _is_old(one, latest)]
                    put += stores.put(target or batch[0].buffer, wanted) if wanted else 0
                    groups += len(batch)
                    episodes += sum(one.group.num_episodes for one in batch)
                    notify(groups, total)
    return ImportReport(len(names), groups, episodes, put)


def _parts(files: Files) -> tuple[list[str], int | None]:
    """Return the files to read, and their number of groups, or None if it is unknown.

    Raises:
        InvalidInputError: There are no files, or files of an export are missing or not finished.
    """
    manifest = Manifest.load(files)
    if manifest is not None:
        if not manifest.complete:
            expected = "a finished export; rerun the export to finish it"
            raise InvalidInputError("source", expected, files.url)
        for part in manifest.parts:
            _check(files, part)
        if unrecorded := manifest.unrecorded(files):
            expected = "a record of all files of the export; rerun the export to fix it"
            raise InvalidInputError(NAME, expected, f"no record of {unrecorded[0]!r}")
        total = sum(part.num_groups for part in manifest.parts)
        return [part.name for part in manifest.parts], total
    names = [name for name in files.names() if name.endswith((".parquet", ".jsonl"))]
    if not names:
        raise InvalidInputError("source", "files *.parquet or *.jsonl", files.url)
    return names, None


def _check(files: Files, part: Part) -> None:
    """Raise if a file of an export is missing or was changed."""
    size = files.size(part.name)
    if size != part.num_bytes:
        shown = "no such file" if size is None else f"{size}"
        raise InvalidInputError(part.name, f"the {part.num_bytes} bytes exported", shown)
    with files.read(part.name) as path, unavailable(files.url):
        if sha256_of(path) != part.sha256:
            raise InvalidInputError(part.name, "the exported bytes", "other bytes")


#: Largest group id for each (buffer, uid) that several groups have.
Latest = dict[tuple[str | None, str], int]
#: Buffer, uid and id of a group.
Key = tuple[str | None, str, int | None]


def _latest(files: Files, names: Sequence[str]) -> tuple[Latest, frozenset[Key]]:
    """Find the newest group of each uid that was reused between exports.

    Returns:
        The ids of these groups, and the groups that have rows in several files.

    Raises:
        InvalidInputError: Rows of a group are not adjacent in a file.
    """
    tables = [NAMES.empty_table()]
    for name in names:
        with files.read(name) as path:
            found = pa.concat_tables([NAMES.empty_table(), *names_of(path, name)])
        counted = found.group_by(NAMES.names).aggregate([([], "count_all")])
        for split in counted.filter(pc.greater(counted["count_all"], 1)).slice(0, 1).to_pylist():
            where = f"{name}, group {split['group_uid']!r}"
            raise InvalidInputError(where, SORTED, f"rows at {split['count_all']} positions")
        tables.append(found)
    everything = pa.concat_tables(tables)
    divided = everything.group_by(NAMES.names).aggregate([([], "count_all")])
    divided = divided.filter(pc.greater(divided["count_all"], 1)).select(NAMES.names)
    keys = ["buffer_name", "group_uid"]
    counts = [("group_id", "max"), ("group_id", "count_distinct")]
    found = everything.group_by(keys).aggregate(counts)
    several = found.filter(pc.greater(found["group_id_count_distinct"], 1))
    columns = (several[name].to_pylist() for name in (*keys, "group_id_max"))
    latest = {(buffer, uid): last for buffer, uid, last in zip(*columns, strict=True)}
    return latest, frozenset(zip(*divided.to_pydict().values(), strict=True))


def _undivided(
    several: Iterator[Incoming], name: str, in_several: frozenset[Key]
) -> Iterator[Incoming]:
    """Yield groups, after checking that all their rows are in this file.

    Raises:
        InvalidInputError: A group without `num_episodes` also has rows in another file.
    """
    for one in several:
        if not one.counted and (one.buffer, one.group.group_uid, one.group_id) in in_several:
            where = f"{name}, group {one.group.group_uid!r}"
            expected = "all rows of a group in one file, or the column num_episodes"
            raise InvalidInputError(where, expected, "rows in another file, too")
        yield one


def _is_old(one: Incoming, latest: Latest) -> bool:
    last = latest.get((one.buffer, one.group.group_uid))
    return last is not None and one.group_id != last


def _batches(several: Iterator[Incoming]) -> Iterator[list[Incoming]]:
    """Yield groups of one buffer and run that are put in one call."""
    for _, mine in groupby(several, key=lambda one: (one.buffer, one.run)):
        yield from chunks(mine, lambda one: one.group.num_tokens, PUT_TOKENS, length=PUT_GROUPS)


class _Stores:
    """The target store, opened once for each run that put the groups."""

    def __init__(self, url: str | URL, create: bool) -> None:
        self._url = url
        self._create = create
        self._open: dict[tuple[str | None, str | None], blocking.Store] = {}

    def __enter__(self) -> _Stores:
        self._store((None, None))  # raises before files are read if there is no store
        return self

    def __exit__(self, *exc_info: object) -> None:
        with ExitStack() as stack:
            for store in self._open.values():
                stack.callback(store.close)

    def put(self, name: str | None, several: list[Incoming]) -> int:
        """Put groups; return the number of new ones."""
        if name is None:
            raise InvalidInputError("buffer", "a name, since the rows have no buffer_name", None)
        buffer = self._store((None, None)).buffer(name, create=self._create)
        uids = [one.group.group_uid for one in several]
        known = {one.group_uid: one for one in buffer.find(uids=uids)}
        new = [one for one in several if one.group.group_uid not in known]
        put = 0
        if new:  # a run is stored only with groups
            of_run = self._store(new[0].run).buffer(name, create=False)
            put = _put(of_run, [one.group for one in new])
        # Also for existing groups: an interrupted import may not have set their reasons.
        reasons: dict[str, list[str]] = {}
        for one in several:
            before = known.get(one.group.group_uid)
            if one.reason is not None and (before is None or before.status_reason is None):
                reasons.setdefault(one.reason, []).append(one.group.group_uid)
        for reason, named in reasons.items():
            buffer.update(uids=named, statuses=GroupStatus.ARCHIVED, reason=reason)
        return put

    def _store(self, run: tuple[str | None, str | None]) -> blocking.Store:
        if (store := self._open.pop(run, None)) is None:
            while len(self._open) >= OPEN_RUNS:
                self._open.pop(next(iter(self._open))).close()
            name, lineage = run
            options: dict[str, Any] = {} if name is None else {"run": name, "lineage": lineage}
            store = blocking.Store.open(self._url, migrate=False, **options)
            try:
                _check_lineage(store, name, lineage)
            except BaseException:
                store.close()
                raise
        self._open[run] = store
        return store


def _put(buffer: blocking.Buffer, several: Sequence[EpisodeGroup]) -> int:
    """Put groups, except those that another process puts meanwhile; return the number put.

    If the buffer accepts fewer at once, put them in halves.
    """
    try:
        return len(buffer.put(several, timeout=PATIENCE_SECONDS))
    except DuplicateGroupError as error:
        return _put(buffer, [one for one in several if one.group_uid not in error.group_uids])
    except InvalidInputError as error:
        if error.field != "groups" or len(several) == 1:
            raise
    half = len(several) // 2
    return _put(buffer, several[:half]) + _put(buffer, several[half:])


def _check_lineage(store: blocking.Store, name: str | None, lineage: str | None) -> None:
    """Raise if the run exists with another lineage, as its policy versions would not compare."""
    [known] = [one.lineage for one in store.runs() if one.name == name] or [None]
    if known is not None and known != (lineage or name):
        expected = f"run {name!r} with lineage {known!r}, as in the store"
        raise InvalidInputError("run_lineage", expected, repr(lineage))
