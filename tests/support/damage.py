"""Stored bytes changed, as a failing disk would."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import select, update

from replaydb.database.schema import payload
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


async def damage(url: str, group_id: int, how: Damage = DAMAGES["the last bit"]) -> None:
    """Change the stored bytes of a group, as a failing disk would."""
    here = payload.c.group_id == group_id
    async with transaction(url) as connection:
        data = (await connection.execute(select(payload.c.data).where(here))).scalar_one()
        await connection.execute(update(payload).where(here).values(data=how(data)))
