"""Damage of stored bytes, as by a failing disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.tables.schema import pack, payload, payload_place
from support.connections import transaction

Damage = Callable[[bytes], bytes]

DAMAGES: dict[str, Damage] = {
    "a bit of the header": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit in the middle": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
    ),
    "the last bit": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "nothing left": lambda _: b"",
    "something else": lambda _: b"not a payload at all",
}


async def damage(
    url: str, group_id: int, how: Damage = DAMAGES["the last bit"], field: str | None = None
) -> None:
    """Damage the stored payload of a group, or the part of it that holds an extra."""
    here = (payload.c.group_id == group_id) & payload.c.field.is_not_distinct_from(field)
    async with transaction(url) as connection:
        row = (await connection.execute(select(payload).where(here))).one()
        if row.data is not None:
            await connection.execute(update(payload).where(here).values(data=how(row.data)))
            return
        file = await pack_file(connection, row.pack_id)
        content = bytearray(file.read_bytes())
        part = slice(row.pack_offset, row.pack_offset + row.pack_length)
        data = how(bytes(content[part]))
        content[part] = data[: row.pack_length].ljust(row.pack_length, b"?")
        file.write_bytes(content)
        await connection.execute(update(payload).where(here).values(pack_length=len(data)))


def change_behind_indexes(sqlite_url: str, table: str, change: str) -> None:
    """Run a statement on a closed file without updating the indexes of a table."""
    path = sqlite_url.removeprefix("sqlite:///")
    ours = "type = 'index' AND sql IS NOT NULL AND tbl_name = ?"

    def schema(statement: str, *rows: Sequence[object]) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("PRAGMA writable_schema = 1")
            [(version,)] = file.execute("PRAGMA schema_version")
            found = [one for row in rows for one in file.execute(statement, row)]
            file.execute(f"PRAGMA schema_version = {version + 1}")
            return found

    indexes = schema(f"SELECT * FROM sqlite_master WHERE {ours}", [table])  # noqa: S608
    schema(f"DELETE FROM sqlite_master WHERE {ours}", [table])  # noqa: S608
    with closing(sqlite3.connect(path)) as file, file:
        assert file.execute(change).rowcount == 1
    schema("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", *indexes)


async def pack_file(connection: AsyncConnection, pack_id: int) -> Path:
    """Return the path of a pack."""
    store = (await connection.execute(select(payload_place))).one()
    name = (await connection.execute(select(pack.c.name).where(pack.c.id == pack_id))).scalar_one()
    file: Path
    [file] = (Path(urlsplit(store.url).path) / store.store_uid).rglob(f"{name}.pack")
    return file
