"""Fuzz targets: what replaydb guarantees for any bytes that somebody else wrote.

A check returns if the bytes were accepted with a valid result, or refused with the documented
error. It raises in every other case.
"""

from __future__ import annotations

import asyncio
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sqlalchemy import make_url

from replaydb import blocking, codec
from replaydb.analysis.episode_columns import episode_schema
from replaydb.analysis.episode_rows import batch_of_empty, batch_of_episodes
from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.database import migrations
from replaydb.database.filters.parsing import parsed
from replaydb.database.statements.episode_group import count_groups
from replaydb.domain.episodes import EpisodeGroup
from replaydb.errors import ClientTooOldError, CorruptPayloadError, InvalidInputError
from replaydb.exchange import export_groups, import_groups
from replaydb.exchange.formats import WRITERS, Format, names_of, rows_of
from replaydb.exchange.regrouping import Incoming, groups_in
from support.batches import ROW
from support.decoded import decoded_group
from support.groups import episode
from support.payloads import decode, rebuilt

#: A folder of inputs for each target.
CORPUS = Path(__file__).with_name("corpus")

#: Of this many accepted files, one is also imported into a store, which takes longest.
STORE_EVERY = 16

#: The format in which an import is exported again.
_OTHER: dict[str, Format] = {".jsonl": "parquet", ".parquet": "jsonl"}

POSTGRESQL = make_url("postgresql+asyncpg://").get_dialect()()

Check = Callable[[bytes], None]


@contextmanager
def payloads() -> Iterator[Check]:
    """A payload decodes to episodes that can be encoded, used in tensors, and exported."""
    with TemporaryDirectory(prefix="replaydb-fuzz-") as folder:
        yield partial(_check_payload, Path(folder))


def _check_payload(folder: Path, data: bytes) -> None:
    try:
        found = decode(data)
    except (ClientTooOldError, CorruptPayloadError):
        return
    for compression in (None, "zstd"):
        parts = codec.encode(*found, compression=compression)
        assert codec.decode([part.data for part in parts]) == found
    assert [rebuilt(one) for one in found.episodes] == found.episodes
    for one in found.episodes:
        assert one.logprobs is None or not np.isinf(one.logprobs).any()
    row = ROW | {"group_status": "aborted"}
    group = StoredGroup(row, dict(enumerate(found.episodes)), found.context)
    batch = Batch([group])
    for tensors in (batch.padded, batch.split, partial(batch.packed, max_tokens=2**16)):
        with suppress(InvalidInputError):  # extras that cannot be in one tensor
            tensors(0)
    path = folder / "some.jsonl"
    _write(path, "jsonl", [group])
    [incoming] = groups_in(rows_of(path, path.name), path.name)
    assert incoming.group.episodes == group.episodes
    assert incoming.group.context == group.context


def _write(path: Path, kind: Format, groups: Sequence[EpisodeGroup]) -> None:
    writer = WRITERS[kind](path, episode_schema())
    for group in groups:
        decoded = decoded_group(group)
        batch = batch_of_episodes if decoded.rows else batch_of_empty
        writer.write(batch(episode_schema(), [decoded]))
    writer.close()


def varied_groups() -> list[EpisodeGroup]:
    """Return groups with and without the values that filters compare."""
    tags: list[dict[str, Any]] = [
        {"level": "hard", "n": 5, "spec": {"langs": ["py", None, 2**63]}, "a": True},
        {"level": 0.5, "n": "5", "spec": [True, -0.0], "a": "x%y"},
        {"level": 3, "n": 2**53 + 1, "a": None},
        {"level": 1e300, "n": -0.0},
        {},
    ]
    return [
        EpisodeGroup(
            "gsm8k" if i % 2 else "Gsm_é",
            [episode(i / 4 if i else None, i or None, text=f"{i}" if i % 2 else None)],
            group_uid=f"a{i}",
            prompt_uid=f"p{i}" if i else None,
            tags=one,
        )
        for i, one in enumerate(tags)
    ]


@contextmanager
def filters() -> Iterator[Check]:
    """A filter can be written as text again, and is a condition on both engines."""
    with _migrated() as (_, url), blocking.Store.open(url) as store:
        buffer = store.buffer("math", indexed_tags=["level", "n"])
        buffer.put(varied_groups())
        yield partial(_check_filter, buffer)


def _check_filter(buffer: blocking.Buffer, data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = parsed(text)
    except InvalidInputError:
        return
    again = parsed(found.text)
    assert str(again.where) == str(found.where)
    count_groups(found.where).compile(dialect=POSTGRESQL)
    assert buffer.count(where=found.where) == buffer.count(where=again.where)


@contextmanager
def imports(kind: Format) -> Iterator[Check]:
    """A file is imported as the groups that it has, and exported as these, or it is refused."""
    with _migrated() as (folder, _):
        yield partial(_check_import, folder / f"some.{kind}")


def _check_import(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    several: list[Incoming] = []
    is_valid = False
    with suppress(InvalidInputError):
        several.extend(groups_in(rows_of(path, path.name), path.name))
        is_valid = True
    with suppress(InvalidInputError):
        list(names_of(path, path.name))
    if unique := {one.group.group_uid: one.group for one in several}:
        copy = path.with_name(f"copy.{_OTHER[path.suffix]}")
        _write(copy, _OTHER[path.suffix], [*unique.values()])
        again = [one.group for one in groups_in(rows_of(copy, copy.name), copy.name)]
        assert again == [*unique.values()]
    if zlib.crc32(data) % STORE_EVERY == 0:
        _check_store(path, several, is_valid)


def _check_store(path: Path, several: list[Incoming], is_valid: bool) -> None:
    """Import a file, and export the store in the other format."""
    url = f"sqlite:///{shutil.copy(path.with_name('migrated.db'), path.with_name('store.db'))}"
    target = None if any(one.buffer for one in several) else "math"
    kind = _OTHER[path.suffix]
    is_refused = False
    try:
        report = import_groups(url, path, buffer=target, create=True)
    except InvalidInputError:
        is_refused = True
    stored = _stored(url, path.parent, kind)
    for key, group in stored.items():
        mine = [one for one in several if (target or one.buffer, one.group.group_uid) == key]
        # If a uid was reused, the newest group is put.
        last = max(mine, key=lambda one: one.group_id or 0)
        assert group == last.group
    if not is_refused:
        assert is_valid
        assert report.num_groups == len(several)
        assert (
            report.num_put
            == len(stored)
            == len({(one.buffer, one.group.group_uid) for one in several})
        )


def _stored(url: str, folder: Path, kind: Format) -> dict[Any, EpisodeGroup]:
    """Export all groups of a store, and return them by buffer and uid."""
    destination = folder / "export"
    shutil.rmtree(destination, ignore_errors=True)
    export_groups(url, destination, format=kind)
    found = {}
    for path in destination.rglob(f"*.{kind}"):
        for one in groups_in(rows_of(path, path.name), path.name):
            found[one.buffer, one.group.group_uid] = one.group
    return found


@contextmanager
def _migrated() -> Iterator[tuple[Path, str]]:
    """Yield a folder, and the URL of a migrated SQLite file in it."""
    with TemporaryDirectory(prefix="replaydb-fuzz-") as folder:
        url = f"sqlite:///{folder}/migrated.db"
        asyncio.run(migrations.upgrade(url))
        yield Path(folder), url


TARGETS: dict[str, Callable[[], AbstractContextManager[Check]]] = {
    "payload": payloads,
    "filter": filters,
    "jsonl": partial(imports, "jsonl"),
    "parquet": partial(imports, "parquet"),
}
