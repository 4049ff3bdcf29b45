"""States of the marker of a payload store: missing, damaged, of another store, or unreadable."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from replaydb import PayloadsUnavailableError
from replaydb.packs import Instance, PayloadStore, Range

from .conftest import STORE, Behind, opened, soon

MARKER = "replaydb-store"
FIRST = f"payloads of the replaydb store {STORE}\n".encode()
OTHER = FIRST.replace(STORE.encode(), uuid4().hex.encode())
OWNER = Instance({"inode": 1}).encoded()

#: Markers without a valid first line, or with an unreadable owner. None: it does not exist.
LOST = {
    "missing": None,
    "empty": b"",
    "garbled": b"\xff\x00\x81",
    "truncated in the text": FIRST[:12],
    "truncated in the uid": FIRST[:40],
    "truncated before the end of the line": FIRST[:-1],
    "another text": b"payloads of something else\n",
    "huge": b"\0" * 9_000_000,
    "truncated in the owner": FIRST + OWNER[:9],
    "truncated at the end of the owner": FIRST + OWNER[:-2],
    "an owner of another shape": FIRST + b'{"facts": 1, "timeline": 0, "newest": 0}\n',
    "an owner without facts": FIRST + Instance({}).encoded(),
    "no object as the owner": FIRST + b"null\n",
    "a later version": FIRST + b'{"version": 9}\n',
    "no JSON": FIRST + b"\xff\n",
    "a huge owner": FIRST + b"[" * 9_000_000,
}
OF_ANOTHER = {
    "whole": OTHER + OWNER,
    "truncated": OTHER[:50],
}


def cases(table: Mapping[str, bytes | None]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("marker", table.values(), ids=table.keys())


async def write(payload_store: PayloadStore) -> str:
    name = payload_store.new_name()
    await payload_store.write(name, [b"abc"], sync=False, end=soon())
    return name


def replaced(behind: Behind, marker: bytes | None) -> None:
    if marker is None:
        behind.delete(MARKER)
    else:
        behind.put(MARKER, marker)


async def check_refused(payload_store: PayloadStore, pack: str, reason: str) -> None:
    """Check that packs are neither written nor removed nor listed, but can be read."""
    (data,) = await payload_store.read([Range(pack, 0, 3)], end=soon())
    assert isinstance(data, memoryview)
    assert bytes(data) == b"abc"
    before = [each.name async for page in payload_store._objects.listed() for each in page]
    for call in (
        lambda: payload_store.check(soon()),
        lambda: payload_store.claim(soon()),
        lambda: payload_store.claim(soon(), adopt=True),
        lambda: write(payload_store),
        lambda: payload_store.remove([pack], end=soon()),
        lambda: anext(payload_store.listed(end=soon())),
    ):
        with pytest.raises(PayloadsUnavailableError, match=reason) as raised:
            await call()
        assert f"{STORE}/{MARKER}" in str(raised.value)
    assert before == [each.name async for page in payload_store._objects.listed() for each in page]


@cases(LOST)
async def test_a_lost_marker_is_restored_beside_packs_of_the_database(
    payload_store: PayloadStore,
    behind: Behind,
    marker: bytes | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pack = await write(payload_store)
    replaced(behind, marker)
    async with opened(payload_store.url) as other:
        state = "missing" if marker is None else "damaged"
        await check_refused(other, pack, f"{MARKER} is {state}.*`replaydb db adopt-payloads`")
        with pytest.raises(PayloadsUnavailableError, match=r"2 packs of this database.*got none"):
            await other.restore([uuid4().hex, uuid4().hex], soon())
        assert marker is None or behind.get(MARKER) == marker
        await other.restore([pack, uuid4().hex], soon())
        assert behind.get(MARKER) == FIRST
        assert [one.levelno for one in caplog.records] == [logging.WARNING]
        assert "1 of 2 packs are missing" in caplog.text
        await other.claim(soon(), adopt=True)
    await write(payload_store)
    assert behind.get(MARKER) == FIRST + OWNER


@cases(LOST)
async def test_a_lost_marker_of_a_store_without_packs(
    payload_store: PayloadStore, behind: Behind, marker: bytes | None
) -> None:
    replaced(behind, marker)
    await payload_store.restore([], soon())
    await write(payload_store)


@cases(OF_ANOTHER)
async def test_the_marker_of_another_store_is_never_replaced(
    payload_store: PayloadStore, behind: Behind, marker: bytes
) -> None:
    pack = await write(payload_store)
    behind.put(MARKER, marker)
    async with opened(payload_store.url) as other:
        for packs in ([pack], []):
            await other.restore(packs, soon())
        await check_refused(other, pack, f"{MARKER} belongs to another store")
        with pytest.raises(PayloadsUnavailableError, match="belongs to another store"):
            await other.prepare(soon())
    assert behind.get(MARKER) == marker
    assert behind.get(f"{pack}.pack") == b"abc"


async def test_the_owner_stays_when_nothing_is_restored(
    payload_store: PayloadStore, behind: Behind
) -> None:
    await write(payload_store)
    before = behind.get(MARKER)
    await payload_store.restore([], soon())
    assert behind.get(MARKER) == before


def _folder(path: Path, _: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, _: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.symlink_to(path)


def _refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without permission; the tests may run as root."""

    def refuse(self: Path, _: str) -> object:
        assert self == path
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_folder, "Is a directory"),
        (_loop, "Too many levels of symbolic links"),
        (_refused, "Permission denied"),
    ],
)
async def test_a_marker_that_cannot_be_opened(
    tmp_path: Path,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(tmp_path.as_uri()) as payload_store:
        await payload_store.prepare(soon())
        pack = await write(payload_store)
        change(tmp_path / STORE / MARKER, monkeypatch)
        async with opened(tmp_path.as_uri()) as other:
            with pytest.raises(PayloadsUnavailableError, match=reason):
                await other.restore([pack], soon())
            await check_refused(other, pack, reason)
