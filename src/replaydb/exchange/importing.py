"""Groups of files into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL

from replaydb import blocking, checks
from replaydb.episodes import EpisodeGroup, GroupStatus
from replaydb.errors import DuplicateGroupError, InvalidInputError
from replaydb.exchange.files import Files, files_at, sha256_of, unavailable
from replaydb.exchange.formats import NAMES, names_of, rows_of
from replaydb.exchange.groups import SORTED, Incoming, groups_in
from replaydb.exchange.manifest import NAME, Manifest, Part

#: Groups that are put together: so many at most, of so many tokens, or one.
PUT_GROUPS, PUT_TOKENS = 256, 1 << 20
#: Seconds to wait for room or for a rate limit.
PATIENCE_SECONDS = 60.0
#: Runs whose stores are open at once: groups are put in the name of the run that had put them.
OPEN_RUNS = 4

Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import has put.

    Attributes:
        num_files: Files that were read.
        num_groups: Groups in them.
        num_episodes: Episodes of these.
        num_put: Groups of them that were put; of the others, the uid was there already, or the
            files have a later group of it.
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
    """Put the groups of an export, or of other files with such rows, into a store.

    Groups keep their uids, tags, priorities, prompts, texts and runs, and their statuses: what was
    leased is what it was leased from, what was arriving is `aborted`. A group whose uid is there
    already is left as it is, so that an import that was broken off can be run again. Of several
    groups of a buffer that had one uid, the last is put. Ids, times and draws are new; `replaydb
    copy` keeps them. Files are read twice: nothing is put before all of them were found whole.

    Args:
        url: The store, as for `Store.open`. Its tables must be there.
        source: A folder, a file, or a prefix of an object store.
        buffer: Put everything into this buffer; by default into buffers of the names they had.
        create: Make buffers that are not there.
        progress: Called with how many groups were read, and how many there are if that is known.

    Raises:
        InvalidInputError: An argument is wrong, there are no rows of episodes, the export has not
            ended, a file of it is missing or not as it was written, or the store knows a run under
            another lineage.
        UnknownBufferError: A buffer is not there, and `create` is False.
        BufferFullError: There is no room.
        PayloadsUnavailableError: The source cannot be reached.
        DatabaseError: There is no such store, or it cannot be written.
    """
    target = checks.optional(checks.name, "buffer", buffer)
    may_create = checks.flag("create", create)
    tell = checks.optional(checks.function, "progress", progress) or _quiet
    files = files_at("source", source)
    names, total = _parts(files)
    latest, in_several = _latest(files, names)
    groups = episodes = put = 0
    with _Stores(url, may_create) as stores:
        for name in names:
            with files.read(name) as path:
                found = _undivided(groups_in(rows_of(path, name), name), name, in_several)
                for together in _together(found):
                    wanted = [one for one in together if not _is_old(one, latest)]
                    put += stores.put(target or together[0].buffer, wanted) if wanted else 0
                    groups += len(together)
                    episodes += sum(one.group.num_episodes for one in together)
                    tell(groups, total)
    return ImportReport(len(names), groups, episodes, put)


def _quiet(done: int, total: int | None) -> None:
    """Progress that nobody wants to hear of."""


def _parts(files: Files) -> tuple[list[str], int | None]:
    """Files to read, and how many groups they have if that is known.

    Raises:
        InvalidInputError: There are none, or some are missing.
    """
    manifest = Manifest.found(files)
    if manifest is not None:
        if not manifest.complete:
            expected = "an export that has ended: run it again"
            raise InvalidInputError("source", expected, files.url)
        for part in manifest.parts:
            _check(files, part)
        if strays := manifest.strays(files):
            expected = "a record of all files of the export: run that again, which mends it"
            raise InvalidInputError(NAME, expected, f"none of {strays[0]!r}")
        total = sum(part.num_groups for part in manifest.parts)
        return [part.name for part in manifest.parts], total
    names = [name for name in files.names() if name.endswith((".parquet", ".jsonl"))]
    if not names:
        raise InvalidInputError("source", "files *.parquet or *.jsonl", files.url)
    return names, None


def _check(files: Files, part: Part) -> None:
    """Refuse a file of an export that is not as it was written."""
    size = files.size(part.name)
    if size != part.num_bytes:
        shown = "no such file" if size is None else f"{size}"
        raise InvalidInputError(part.name, f"the {part.num_bytes} bytes of the export", shown)
    with files.read(part.name) as path, unavailable(files.url):
        if sha256_of(path) != part.sha256:
            raise InvalidInputError(part.name, "the bytes that were exported", "others")


#: Of uids that several groups of a buffer had: the id of the last.
Latest = dict[tuple[str | None, str], int]
#: Buffer, uid and id of a group.
Key = tuple[str | None, str, int | None]


def _latest(files: Files, names: Sequence[str]) -> tuple[Latest, frozenset[Key]]:
    """Which groups are put of those that had the same uid: it was given anew between exports.

    Returns:
        With it, groups that have rows in several files.

    Raises:
        InvalidInputError: Rows of a group are in several places of a file.
    """
    tables = [NAMES.empty_table()]
    for name in names:
        with files.read(name) as path:
            found = pa.concat_tables([NAMES.empty_table(), *names_of(path, name)])
        counted = found.group_by(NAMES.names).aggregate([([], "count_all")])
        for split in counted.filter(pc.greater(counted["count_all"], 1)).slice(0, 1).to_pylist():
            where = f"{name}, group {split['group_uid']!r}"
            raise InvalidInputError(where, SORTED, f"rows in {split['count_all']} places")
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
    """Groups that have all their rows in this file.

    Raises:
        InvalidInputError: There are rows of one in another file, and none says how many there are.
    """
    for one in several:
        if not one.counted and (one.buffer, one.group.group_uid, one.group_id) in in_several:
            where = f"{name}, group {one.group.group_uid!r}"
            expected = "rows of a group in one file, as none has num_episodes"
            raise InvalidInputError(where, expected, "rows in another file, too")
        yield one


def _is_old(one: Incoming, latest: Latest) -> bool:
    last = latest.get((one.buffer, one.group.group_uid))
    return last is not None and one.group_id != last


def _together(several: Iterator[Incoming]) -> Iterator[list[Incoming]]:
    """Groups of one buffer and run that are put together."""
    for _, mine in groupby(several, key=lambda one: (one.buffer, one.run)):
        while chunk := list(islice(mine, PUT_GROUPS)):
            start = tokens = 0
            for i, one in enumerate(chunk):
                if i > start and tokens + one.group.num_tokens > PUT_TOKENS:
                    yield chunk[start:i]
                    start, tokens = i, 0
                tokens += one.group.num_tokens
            yield chunk[start:]


class _Stores:
    """The store, opened in the names of the runs that had put the groups."""

    def __init__(self, url: str | URL, create: bool) -> None:
        self._url = url
        self._create = create
        self._open: dict[tuple[str | None, str | None], blocking.Store] = {}

    def __enter__(self) -> _Stores:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with ExitStack() as stack:
            for store in self._open.values():
                stack.callback(store.close)

    def put(self, name: str | None, several: list[Incoming]) -> int:
        """Put groups; how many were not there."""
        if name is None:
            raise InvalidInputError("buffer", "a name, as the rows have none", None)
        buffer = self._store(several[0].run).buffer(name, create=self._create)
        uids = [one.group.group_uid for one in several]
        known = {one.group_uid: one for one in buffer.find(uids=uids)}
        new = [one for one in several if one.group.group_uid not in known]
        put = _put(buffer, [one.group for one in new])
        # Of those that were there too: the import that put them may have ended here.
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
    """Put groups, but those that somebody else has put meanwhile; how many.

    In halves, where the buffer takes fewer at once.
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
    """Refuse a run whose versions would be compared with those of another lineage."""
    [known] = [one.lineage for one in store.runs() if one.name == name] or [None]
    if known is not None and known != (lineage or name):
        expected = f"run {name!r} of lineage {known!r}, as the store knows it"
        raise InvalidInputError("run_lineage", expected, repr(lineage))
